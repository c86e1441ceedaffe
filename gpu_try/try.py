"""Runs the kernels against a float64 reference and times them. numpy and ctypes alone.

try.py                 all cases, in child processes (one that hangs or crashes costs only its case); JSON to $OUT/epilogues.json
try.py --emulated [N]  small cases on the host
try.py --child A B     cases A to B-1, one JSON line each
"""
import ctypes, json, math, os, subprocess, sys, threading, time, zlib
import numpy as np
HERE = os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0, HERE)
P, I, F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
class Depthwise(ctypes.Structure):
    _fields_ = [(n, I) for n in "dtype kernel images height width channels planar".split()] + [("epsilon", F)] + [(n, P) for n in "input weight bias gamma beta output".split()] + [(n, I) for n in "variant strip rows strips split early".split()]
class GroupNorm(ctypes.Structure):
    _fields_ = [(n, I) for n in "dtype silu images channels groups pixels channels_last add_one".split()] + [("epsilon", F)] + [(n, P) for n in "input gamma beta film_scale film_shift output".split()] + [(n, I) for n in "threads per_thread split bulk two_kernels early".split()]
class Linear(ctypes.Structure):
    _fields_ = [(n, I) for n in "dtype activation rows width columns plane".split()] + [(n, P) for n in "input weight bias scale residual output".split()] + [(n, I) for n in "tile_rows tile_columns stages split hopper early".split()]
class Copy(ctypes.Structure):
    _fields_ = [("from_", P), ("to", P), ("bytes", ctypes.c_size_t)]
class Link(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_long), ("problem", P)]
DEPTHWISE, GROUPNORM, LINEAR, COPY, MEMCPY, NOTHING, CHAIN = range(7)
ACT = {"none": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4, "gelu_quick": 5}

def bf16(a):
    u = np.ascontiguousarray(a, np.float32).view(np.uint32); return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype(np.uint16)
def unbf16(u): return (u.astype(np.uint32) << 16).view(np.float32)
TYPES = {"float32": (0, 4, np.float32), "float16": (1, 2, np.float16), "bfloat16": (2, 2, np.uint16)}
def store(dt, a): return np.ascontiguousarray(a, np.float32) if dt == "float32" else np.ascontiguousarray(a, np.float16) if dt == "float16" else bf16(a)
def widen(dt, a): return (a if dt != "bfloat16" else unbf16(a)).astype(np.float64)

class Gpu:
    def __init__(self, name=""):
        self.lib = ctypes.CDLL(os.path.join(HERE, f"epilogues{name}.bin")); self.lib.gt_error.restype = ctypes.c_char_p; self.kept = []; self.lib.onnxfuse_group_norm_workspace.restype = ctypes.c_size_t
        self.flush_bytes = 192 << 20; self.flush = self.alloc(self.flush_bytes); self.kept = []
    def ok(self, e, what):
        if e: raise RuntimeError(f"{what}: {self.lib.gt_error(e).decode()}")
    def alloc(self, n):
        p = P(); self.ok(self.lib.gt_malloc(ctypes.byref(p), ctypes.c_size_t(max(n, 256))), "malloc"); self.kept.append(p); return p.value
    def put(self, a): d = self.alloc(a.nbytes); self.ok(self.lib.gt_put(P(d), P(a.ctypes.data), ctypes.c_size_t(a.nbytes)), "put"); return d
    def get(self, d, a): self.ok(self.lib.gt_get(P(a.ctypes.data), P(d), ctypes.c_size_t(a.nbytes)), "get"); return a
    def poison(self, d, n): self.ok(self.lib.gt_set(P(d), 255, ctypes.c_size_t(n)), "set")
    def launch(self, kind, p, ws): self.ok(self.lib.gt_launch(kind, ctypes.byref(p), P(ws)), "launch"); self.ok(self.lib.gt_sync(), "run")
    def time(self, kind, problems, ws, per, reps, cold):
        a = (type(problems[0]) * len(problems))(*problems); out = (F * 3)()
        self.ok(self.lib.gt_time(kind, a, ctypes.sizeof(problems[0]), len(problems), P(ws), per, reps, P(self.flush if cold else None), ctypes.c_size_t(self.flush_bytes), out), "timing"); return [round(x, 3) for x in out]
    def free(self):
        for p in self.kept: self.lib.gt_free(p)
        self.kept = []
class Host:
    def __init__(self): self.lib = ctypes.CDLL(os.path.join(HERE, "libemulated.so")); self.lib.onnxfuse_group_norm_workspace.restype = ctypes.c_size_t; self.kept = {}
    def alloc(self, n):
        a = np.full(n + 512, 255, np.uint8); d = (a.ctypes.data + 255) // 256 * 256; self.kept[d] = (a, n); return d
    def put(self, a): d = self.alloc(a.nbytes); ctypes.memmove(d, a.ctypes.data, a.nbytes); return d
    def get(self, d, a): ctypes.memmove(a.ctypes.data, d, a.nbytes); return a
    def poison(self, d, n): ctypes.memset(d, 255, n)
    def launch(self, kind, p, ws):
        f = (self.lib.onnxfuse_launch_depthwise_layernorm, self.lib.onnxfuse_launch_group_norm, self.lib.onnxfuse_launch_linear)[kind]
        e = f(ctypes.byref(p), P(ws), None) if kind == GROUPNORM else f(ctypes.byref(p), None)
        if e: raise RuntimeError(f"cuda error {e}")
        for d, (a, n) in self.kept.items():
            if (a[: d - a.ctypes.data] != 255).any() or (a[d - a.ctypes.data + n:] != 255).any(): raise RuntimeError("written outside of a tensor")
    def free(self): self.kept = {}

def random(rng, shape, offset=0.0):
    n = int(np.prod(shape)); base = rng.standard_normal(min(n, 1 << 20) + 7).astype(np.float32)
    return np.resize(base[: len(base) if n > len(base) else n], n).reshape(shape) + np.float32(offset)

def depthwise(name, dtype="float16", N=1, H=56, C=96, K=7, W=None, planar=0, bias=True, affine=True, offset=0.0, variant=0, strip=0, rows=0, strips=0, split=0, time=True): return dict(kind=DEPTHWISE, name=name, dtype=dtype, N=N, H=H, W=W or H, C=C, K=K, planar=planar, bias=bias, affine=affine, offset=offset, tactic=dict(variant=variant, strip=strip, rows=rows, strips=strips, split=split), time=time)
def groupnorm(name, dtype="float16", N=1, C=320, G=32, HW=4096, last=0, silu=1, film=0, affine=True, offset=0.0, threads=0, per=0, split=0, two=0, bulk=0, time=True): return dict(kind=GROUPNORM, name=name, dtype=dtype, N=N, C=C, G=G, HW=HW, last=last, silu=silu, film=film, affine=affine, offset=offset, tactic=dict(threads=threads, per_thread=per, split=split, two_kernels=two, bulk=bulk), time=time)
def linear(name, dtype="float16", M=196, K=384, N=1536, act="none", bias=True, scale=False, residual=False, plane=0, rows=0, columns=0, stages=0, split=0, hopper=0, time=True): return dict(kind=LINEAR, name=name, dtype=dtype, M=M, K=K, N=N, act=act, bias=bias, scale=scale, residual=residual, plane=plane, tactic=dict(tile_rows=rows, tile_columns=columns, stages=stages, split=split, hopper=hopper), time=time)

def erf(x):  # float64, error below 1e-13: the series, and the continued fraction in the tail
    from math import erf as e
    if x.size < 300_000: return np.vectorize(e, otypes=[np.float64])(x)
    grid = np.linspace(-6, 6, 240_001); y = np.vectorize(e, otypes=[np.float64])(grid); h = grid[1] - grid[0]
    xc = np.clip(x, -5.9999, 5.9999); i = np.rint((xc + 6) / h).astype(np.int64); d = xc - grid[i]; g = 2 / math.sqrt(math.pi) * np.exp(-grid[i] ** 2)
    return y[i] + g * (d - grid[i] * d * d + (2 * grid[i] ** 2 - 1) / 3 * d ** 3)
def activation(kind, z):
    if kind == "relu": return np.maximum(z, 0)
    if kind == "silu": return z / (1 + np.exp(-z))
    if kind == "gelu": return 0.5 * z * (1 + erf(z / math.sqrt(2)))
    if kind == "gelu_tanh": return z / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3)))
    if kind == "gelu_quick": return z / (1 + np.exp(-1.702 * z))
    return z

DATA = {}
def kept(k, name, make):
    """Large random tensors are made once for cases that differ in their tactic alone."""
    key = json.dumps({n: v for n, v in k.items() if n not in ("name", "tactic", "time")})
    if DATA.get("key") != key: DATA.clear(); DATA["key"] = key
    if name not in DATA: DATA[name] = make(np.random.default_rng(len(name)))
    return DATA[name]

def build(k, m, sets):
    """`sets` problems in memory `m` (the same data at other addresses), the bytes of one, and (expected, got) as functions."""
    rng = np.random.default_rng(zlib.crc32(json.dumps({n: v for n, v in k.items() if n not in ("name", "tactic", "time")}).encode())); dt = k["dtype"]; code, size, np_type = TYPES[dt]
    small = lambda n, scale=1.0, mean=0.0: store(dt, rng.standard_normal(n) * scale + mean)
    if k["kind"] == DEPTHWISE:
        N, H, W, C, K = (k[n] for n in ("N", "H", "W", "C", "K")); x = kept(k, "x", lambda r: store(dt, random(r, (N, C, H, W) if k["planar"] else (N, H, W, C), k["offset"]))); w = small((K, K, C), 1 / K)
        b = small(C) if k["bias"] else None; g, be = (small(C, 0.3, 1.0), small(C, 0.3)) if k["affine"] else (None, None); shape = (N, H, W, C); weights = dict(weight=np.ascontiguousarray(w.transpose(2, 0, 1)), bias=b, gamma=g, beta=be)
        def make(): return Depthwise(dtype=code, kernel=K, images=N, height=H, width=W, channels=C, planar=k["planar"], epsilon=1e-6, **k["tactic"])
        picked = sorted({0, N - 1})
        def want():
            v = widen(dt, x[picked]); v = v.transpose(0, 2, 3, 1) if k["planar"] else v; r = K // 2; v = np.pad(v, ((0, 0), (r, r), (r, r), (0, 0))); y = np.zeros((len(picked), H, W, C))
            for i in range(K):
                for j in range(K): y += v[:, i:i + H, j:j + W] * widen(dt, w[i, j])
            if b is not None: y += widen(dt, b)
            y -= y.mean(-1, keepdims=True); y /= np.sqrt((y ** 2).mean(-1, keepdims=True) + np.float64(np.float32(1e-6)))
            return y * widen(dt, g) + widen(dt, be) if g is not None else y
        def pick(a): return a[picked]
    elif k["kind"] == GROUPNORM:
        N, C, G, HW = (k[n] for n in ("N", "C", "G", "HW")); x = kept(k, "x", lambda r: store(dt, random(r, (N, HW, C) if k["last"] else (N, C, HW), k["offset"]))); shape = x.shape
        g, be = (small(C, 0.3, 1.0), small(C, 0.3)) if k["affine"] else (None, None); fs, fb = (small((N, C), 0.3), small((N, C), 0.3)) if k["film"] else (None, None); weights = dict(gamma=g, beta=be, film_scale=fs, film_shift=fb)
        def make(): return GroupNorm(dtype=code, silu=k["silu"], images=N, channels=C, groups=G, pixels=HW, channels_last=k["last"], add_one=1, epsilon=1e-5, **k["tactic"])
        picked = sorted({0, N - 1}); cut = max(1, HW * C // 1_000_000)
        def want():
            v = widen(dt, x[picked]); v = v.transpose(0, 2, 1) if k["last"] else v; v = v.reshape(len(picked), G, -1)
            mean = v.mean(-1, keepdims=True); v = (v - mean) / np.sqrt(v.var(-1, keepdims=True) + np.float64(np.float32(1e-5))); v = v.reshape(len(picked), C, HW)
            if g is not None: v = v * widen(dt, g)[:, None] + widen(dt, be)[:, None]
            if fs is not None: v = v * (1 + widen(dt, fs)[picked][:, :, None]) + widen(dt, fb)[picked][:, :, None]
            v = v[:, :, ::cut]; v = activation("silu", v) if k["silu"] else v
            return v.transpose(0, 2, 1) if k["last"] else v
        def pick(a): a = a[picked]; return a[:, ::cut] if k["last"] else a[:, :, ::cut]
    else:
        M, K, N = (k[n] for n in "MKN"); x = kept(k, "x", lambda r: store(dt, random(r, (M, K)))); w = kept(k, "weight", lambda r: store(dt, random(r, (K, N)) / math.sqrt(K))); pl = k["plane"]; shape = (M // pl, N, pl) if pl else (M, N)
        b = small(N) if k["bias"] else None; s = small(N, 0.5) if k["scale"] else None; r = kept(k, "residual", lambda g: store(dt, random(g, shape))) if k["residual"] else None; weights = dict(weight=w, bias=b, scale=s)
        def make(): return Linear(dtype=code, activation=ACT[k["act"]], rows=M, width=K, columns=N, plane=pl, **k["tactic"])
        picked = np.arange(M) if M * N <= 400_000 else np.unique(np.linspace(0, M - 1, max(32, 400_000 // N)).astype(int))
        flat = lambda a: (a.transpose(0, 2, 1).reshape(M, N) if pl else a)[picked]
        def want():
            z = widen(dt, x[picked]) @ widen(dt, w)
            if b is not None: z += widen(dt, b)
            z = activation(k["act"], z)
            if s is not None: z *= widen(dt, s)
            return z + widen(dt, flat(r)) if r is not None else z
        def pick(a): return flat(a)
    n = int(np.prod(shape)) * size; problems = []
    for _ in range(sets):
        p = make(); p.input = m.put(x); p.output = m.alloc(n); m.poison(p.output, n); problems.append(p)
        for f, a in weights.items():
            if a is not None: setattr(p, f, m.put(a))
        if k["kind"] == LINEAR and k["residual"]: p.residual = m.put(r)
    moved = x.nbytes + n + sum(a.nbytes for a in weights.values() if a is not None) + (n if k["kind"] == LINEAR and k["residual"] else 0)
    return problems, moved, want, lambda: widen(dt, pick(m.get(problems[0].output, np.empty(shape, np_type))))

LIMIT = {"float32": 2e-6, "float16": 4e-4, "bfloat16": 3e-3}
CACHE = {}
def compare(k, got, want):
    dt = k["dtype"]; scale = math.sqrt((want ** 2).mean()) + 1e-12; g = np.nan_to_num(got, nan=1e9, posinf=1e9, neginf=-1e9); d = np.abs(g - want); tol = LIMIT[dt] * (1 + abs(k.get("offset", 0)) * (0.3 if dt == "float32" else 0.02))
    err = float(math.sqrt((d ** 2).mean()) / scale); bad = d > 30 * tol * np.maximum(scale, np.abs(want)); floor = widen(dt, store(dt, want)) - want
    res = dict(err=err, rounding=float(math.sqrt((floor ** 2).mean()) / scale), max_abs=float(d.max()), ok=bool(err <= tol and not bad.any() and np.isfinite(got).all()))
    if not res["ok"] and bad.any():
        i = np.argwhere(bad); f = tuple(i[0]); res["first"] = dict(at=i[0].tolist(), got=float(got[f]), want=float(want[f]), n=int(bad.sum()), of=int(bad.size), nan=int(np.isnan(got).sum()), last=i[-1].tolist(), axes=[sorted(set(i[:, a].tolist()))[:20] for a in range(i.shape[1])])
    return res

def run(k, m):
    t0 = time.time(); gpu = isinstance(m, Gpu); timed = gpu and k["time"]
    if k["kind"] >= COPY: return dict(name=k["name"], ok=True, **k["measure"](m))
    estimate = {DEPTHWISE: lambda: 2 * k["N"] * k["H"] * k["W"] * k["C"] * 2, GROUPNORM: lambda: 2 * k["N"] * k["C"] * k["HW"] * 2, LINEAR: lambda: 2 * (k["M"] * (k["K"] + 2 * k["N"]) + k["K"] * k["N"])}[k["kind"]]()
    sets = max(2, min(16, int(80e6 // estimate))) if timed else 1
    problems, moved, want, got = build(k, m, sets); t1 = time.time(); key = json.dumps({n: v for n, v in k.items() if n not in ("name", "tactic", "time")})
    if key not in CACHE: CACHE.clear(); CACHE[key] = want()
    t2 = time.time(); p = problems[0]; ws = 0
    if k["kind"] == GROUPNORM:
        n = m.lib.onnxfuse_group_norm_workspace(ctypes.byref(p)); ws = m.alloc(n) if n else 0
    m.launch(k["kind"], p, ws); a = got(); res = dict(name=k["name"], tactic={n: v for n, v in k["tactic"].items() if v}, mb=round(moved / 1e6, 3), **compare(k, a, CACHE[key])); t3 = time.time()
    if gpu:
        m.launch(k["kind"], p, ws); res["same_again"] = a.tobytes() == got().tobytes()
    if timed:
        res["warm"] = m.time(k["kind"], problems[:1], ws, 10, 15, False); res["cold"] = m.time(k["kind"], problems, ws, sets, 9, True)
        res["same_after"] = a.tobytes() == got().tobytes(); res["gbps_cold"] = round(moved / res["cold"][0] / 1e3); res["gbps_warm"] = round(moved / res["warm"][0] / 1e3)
        if k["kind"] == LINEAR: res["tflops"] = round(2 * k["M"] * k["K"] * k["N"] / res["warm"][0] / 1e6, 1)
    res["s"] = [round(t1 - t0, 2), round(t2 - t1, 2), round(t3 - t2, 2), round(time.time() - t3, 2)]; m.free(); return res

from cases import GPU_CASES, HOST_CASES
def line_of(d):
    t = " ".join(f"{n}{v}" for n, v in d.get("tactic", {}).items())
    return ("ok   " if d["ok"] else "BAD  ") + d["name"] + (f" [{t}]" if t else "") + (f" warm {d['warm'][0]:.2f} cold {d['cold'][0]:.2f} us" if "warm" in d else "") + (f" {d['gbps_cold']} GB/s cold {d['gbps_warm']} warm" if "gbps_cold" in d else "") + (f" {d['tflops']} TFLOP/s" if "tflops" in d else "") + (f" err {d['err']:.1e} (rounding {d['rounding']:.1e})" if "err" in d else "") + ("" if d.get("same_again", True) and d.get("same_after", True) else " NOT THE SAME AGAIN") + (f" {json.dumps({n: v for n, v in d.items() if n in ('first', 'refused', 'crashed', 'said')})}" if not d["ok"] else "")
def main():
    if sys.argv[1:2] == ["--child"]:
        m = Gpu(); cases = GPU_CASES(sys.modules[__name__])
        for i in range(int(sys.argv[2]), int(sys.argv[3])):
            print(json.dumps({"at": i}), flush=True)
            try: r = run(cases[i], m)
            except RuntimeError as e:
                r = dict(name=cases[i]["name"], tactic=cases[i].get("tactic", {}), ok=False, refused=str(e)); print(json.dumps({"case": i, **r}), flush=True); m.free()
                if m.lib.gt_sync(): sys.exit(1)
                continue
            print(json.dumps({"case": i, **r}), flush=True)
        return
    if sys.argv[1:2] == ["--emulated"]:
        m = Host(); bad = 0; only = sys.argv[2:]; n = 0
        for k in HOST_CASES(sys.modules[__name__]):
            if only and not any(o in k["name"] for o in only): continue
            t0 = time.time()
            try: r = run(k, m)
            except RuntimeError as e: r = dict(name=k["name"], tactic=k["tactic"], ok=False, refused=str(e)); m.free()
            n += 1; bad += not r["ok"]; print(line_of(r), f"{time.time() - t0:.1f}s", flush=True)
        print("bad:", bad, "of", n); sys.exit(bad > 0)
    cases = GPU_CASES(sys.modules[__name__]); results = []; i = 0; start = time.time(); out = os.environ.get("OUT", "."); budget = float(os.environ.get("BUDGET", "45"))
    while i < len(cases) and time.time() - start < budget - 1:
        child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", str(i), str(len(cases))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        last = [time.time()]; lines = []
        def pump():
            for line in child.stdout: last[0] = time.time(); lines.append(line)
        th = threading.Thread(target=pump); th.start(); at = i; shown = 0; other = []; late = False
        while th.is_alive() or shown < len(lines):
            th.join(0.05)
            for line in lines[shown:]:
                shown += 1
                try: d = json.loads(line)
                except ValueError: other.append(line.strip()); continue
                if "at" in d: at = d["at"]
                else: i = d["case"] + 1; results.append(d); print(line_of(d), d.get("s", ""), flush=True)
            if time.time() - last[0] > (6 if results else 15): child.kill()
            if time.time() - start > budget: late = True; child.kill()
        child.wait(); th.join()
        if i <= at and i < len(cases) and not late:
            results.append(dict(case=at, name=cases[at]["name"], tactic=cases[at].get("tactic", {}), ok=False, crashed=f"status {child.returncode}", said=other[-6:])); print(line_of(results[-1]), flush=True); i = at + 1
        json.dump(results, open(os.path.join(out, "epilogues.json"), "w"), indent=1)
    json.dump(results, open(os.path.join(out, "epilogues.json"), "w"), indent=1)
    print(f"{len(results)} of {len(cases)} cases, {sum(not r['ok'] for r in results)} bad, {time.time() - start:.0f} s")
if __name__ == "__main__": main()
