"""Runs the encoder kernel against a float64 reference and times it. numpy and ctypes alone.

try.py                 all cases, in child processes (one that hangs or crashes costs only its case); JSON to $OUT/encoder.json; ends after $BUDGET s
try.py --emulated [N]  small cases on the host
try.py --child A B     cases A to B-1, one JSON line each
"""
import ctypes, json, os, subprocess, sys, threading, time
import numpy as np
HERE = os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0, HERE)
from reference import encoder

P, I, Q, F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
class Linear(ctypes.Structure): _fields_ = [("weights", P), ("k_stride", Q), ("n_stride", Q), ("bias", P)]
class Norm(ctypes.Structure): _fields_ = [("gamma", P), ("beta", P)]
class Layer(ctypes.Structure): _fields_ = [(n, Linear) for n in "query key value projection inner outer".split()] + [("before_qkv", Norm), ("before_inner", Norm)]
class Problem(ctypes.Structure):
    _fields_ = ([(n, I) for n in "dtype layers batch sequence width inner heads pre_norm first_norm activation".split()] + [("epsilon", F), ("scale", F)] + [(n, P) for n in "x y weights vectors final_gamma final_beta mask".split()] + [("mask_type", I)]
        + [(n, Q) for n in "mask_batch mask_head mask_row".split()] + [("cluster", I), ("clusters", I), ("parts", I * 4), ("blocks", I * 4), ("per", I), ("stages", I), ("barrier", I), ("restore", I), ("skip", I), ("counters", P), ("profile", P), ("fault", P)])

def bf16(a): u = np.ascontiguousarray(a, np.float32).view(np.uint32); return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype(np.uint16)
CODE = {"float16": 1, "bfloat16": 2}
def store(dt, a): return np.ascontiguousarray(a, np.float16) if dt == "float16" else bf16(a)
def widen(dt, a): return a.astype(np.float64) if dt == "float16" else (a.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
def raw(dt, n): return np.zeros(n, np.float16 if dt == "float16" else np.uint16)

class Gpu:
    def __init__(self, name=""):
        self.lib = ctypes.CDLL(os.path.join(HERE, f"encoder{name}.bin")); self.lib.gt_error.restype = ctypes.c_char_p; self.kept = []; self.fault = None
        p = P(); self.ok(self.lib.gt_host(ctypes.byref(p), ctypes.c_size_t(64)), "host memory"); self.fault = p.value; ctypes.memset(self.fault, 0, 64)
    def ok(self, e, what):
        if e:
            w = (ctypes.c_int * 3).from_address(self.fault) if self.fault else None
            raise RuntimeError(f"{what}: {self.lib.gt_error(e).decode()}" + (f"; waited in vain at site {w[0]}, block {w[1]}, thread {w[2]}" if w and w[0] else ""))
    def alloc(self, n):
        p = P(); self.ok(self.lib.gt_malloc(ctypes.byref(p), ctypes.c_size_t(max(n, 256))), "malloc"); self.kept.append(p); return p.value
    def put(self, a): d = self.alloc(a.nbytes); self.ok(self.lib.gt_put(P(d), P(a.ctypes.data), ctypes.c_size_t(a.nbytes)), "put"); return d
    def get(self, d, a): self.ok(self.lib.gt_get(P(a.ctypes.data), P(d), ctypes.c_size_t(a.nbytes)), "get"); return a
    def fill(self, d, v, n): self.ok(self.lib.gt_set(P(d), v, ctypes.c_size_t(n)), "set")
    def sync(self): self.ok(self.lib.gt_sync(), "run")
    def free(self):
        for p in self.kept: self.lib.gt_free(p)
        self.kept = []
class Host:
    def __init__(self): os.environ.update(ONNXFUSE_EMULATED_SHARED="232448", ONNXFUSE_EMULATED_CLUSTERS="30"); self.lib = ctypes.CDLL(os.path.join(HERE, os.environ.get("EMULATED", "libemulated.so"))); self.kept = {}; self.fault = None
    def ok(self, e, what):
        if e: raise RuntimeError(f"{what}: cuda error {e}")
    def alloc(self, n): a = np.zeros(n + 512, np.uint8); d = (a.ctypes.data + 255) // 256 * 256; self.kept[d] = a; return d
    def put(self, a): d = self.alloc(a.nbytes); ctypes.memmove(d, a.ctypes.data, a.nbytes); return d
    def get(self, d, a): ctypes.memmove(a.ctypes.data, d, a.nbytes); return a
    def fill(self, d, v, n): ctypes.memset(d, v, n)
    def sync(self): pass
    def free(self): self.kept = {}

def case(name, dtype="float16", L=12, B=1, S=128, D=768, F=3072, H=12, pre=0, first_norm=None, final=None, act=0, eps=1e-12, mask=None, cluster=0, clusters=0, parts=(0, 0, 0, 0), blocks=(0, 0, 0, 0), per=0, stages=0, barrier=0, restore=0, skip=0, profile=False, most=0, time=True, mean=0.0, check=True, lib=""):
    d = dict(locals()); d["most"] = most or L; d["first_norm"] = pre if first_norm is None else first_norm; d["final"] = (not pre) if final is None else final; return d

# Clocks between a phase's stamps, see encoder.cuh; `between`: what is computed before the next barrier is looked at.
STAMPS = "barrier asked arrived start products send sums finish release".split()
POOL = {}
def problem(k, m):
    """The problem in memory `m`; the host's arrays are kept from case to case where they are the same."""
    dt, L, D, F_ = k["dtype"], k["L"], k["D"], k["F"]; key = (dt, D, F_, k["most"])
    if POOL.get("key") != key:
        rng = np.random.default_rng(5); n = 1 << 22 if D > 256 else 1 << 19
        pool = rng.standard_normal(n, dtype=np.float32); at = [0]
        def draw(shape, scale, mean=0.0):
            c = int(np.prod(shape)); at[0] = (at[0] + 7919 * 13) % (n // 3); take = np.arange(at[0], at[0] + c) % n if at[0] + c > n else slice(at[0], at[0] + c)
            return store(dt, (pool[take] * np.float32(scale) + np.float32(mean)).reshape(shape))
        s = 1 / np.sqrt(D); layers = []
        for _ in range(k["most"]):
            w = {a: draw((D, D), s) for a in ("wq", "wk", "wv", "wo")}
            w.update(w1=draw((D, F_), s), w2=draw((F_, D), 1 / np.sqrt(F_)), b1=draw((F_,), 0.1), **{a: draw((D,), 0.1) for a in ("bq", "bk", "bv", "bo", "b2")}, **{a: draw((D,), 0.1, 1.0) for a in ("g0", "g1")}, **{a: draw((D,), 0.1) for a in ("e0", "e1")})
            layers.append(w)
        for q in POOL.get("buffers", []): m.lib.gt_free(q)
        POOL.clear(); POOL.update(key=key, layers=layers, pool=pool, final=(rng.uniform(0.8, 1.2, D).astype(np.float32), rng.uniform(-0.1, 0.1, D).astype(np.float32)), wide=[None] * len(layers))
    for i in range(L if k["check"] else 0):
        if POOL["wide"][i] is None: POOL["wide"][i] = {a: widen(dt, v) for a, v in POOL["layers"][i].items()}
    n = k["B"] * k["S"] * D; POOL["x"] = store(dt, (POOL["pool"][np.arange(n) * 3 % (len(POOL["pool"]) - 5)] + np.float32(k["mean"])).reshape(k["B"], k["S"], D))
    p = Problem(); p.dtype, p.layers, p.batch, p.sequence, p.width, p.inner, p.heads = CODE[dt], L, k["B"], k["S"], D, F_, k["H"]
    p.pre_norm, p.first_norm, p.activation, p.epsilon, p.scale = k["pre"], k["first_norm"], k["act"], k["eps"], 1 / np.sqrt(D // k["H"])
    for n in ("onnxfuse_encoder_workspace",): getattr(m.lib, n).restype = ctypes.c_size_t
    if k["final"]: p.final_gamma, p.final_beta = m.put(POOL["final"][0]), m.put(POOL["final"][1])
    each = (Q * 2)(); m.lib.gt_packed(D, F_, each); each = tuple(each)
    kind = (each, k["pre"], k["first_norm"])
    if POOL.get("kind") != kind:
        for q in POOL.get("buffers", []): m.lib.gt_free(q)
        POOL.update(kind=kind, weights=m.alloc(each[0] * k["most"]), vectors=m.alloc(each[1] * k["most"]), done=0)
        if isinstance(m, Gpu): POOL["buffers"] = [m.kept.pop(), m.kept.pop()]
        else: POOL["array"] = m.kept[POOL["weights"]], m.kept[POOL["vectors"]]
    p.weights, p.vectors = POOL["weights"], POOL["vectors"]
    for i in range(POOL["done"], L):
        w = POOL["layers"][i]; POOL["done"] = i + 1
        l = Layer(); kept = len(m.kept) if isinstance(m, Gpu) else 0
        for name, a, b, transposed in (("query", "wq", "bq", 0), ("key", "wk", "bk", 1), ("value", "wv", "bv", 0), ("projection", "wo", "bo", 1), ("inner", "w1", "b1", 0), ("outer", "w2", "b2", 0)):
            v = w[a]; lin = getattr(l, name); lin.weights = m.put(np.ascontiguousarray(v.T) if transposed and i == 0 else v); transposed = transposed and i == 0
            lin.k_stride, lin.n_stride, lin.bias = (1 if transposed else v.shape[1]), (v.shape[0] if transposed else 1), m.put(w[b])
        if i > 0 or k["first_norm"]: l.before_qkv.gamma, l.before_qkv.beta = m.put(w["g0"]), m.put(w["e0"])
        l.before_inner.gamma, l.before_inner.beta = m.put(w["g1"]), m.put(w["e1"])
        m.ok(m.lib.gt_pack(p.dtype, D, F_, k["pre"], ctypes.byref(l), P(p.weights + each[0] * i), P(p.vectors + each[1] * i), None), "pack"); m.sync()
        if isinstance(m, Gpu):
            for q in m.kept[kept:]: m.lib.gt_free(q)
            del m.kept[kept:]
    p.x = m.put(POOL["x"]); n = POOL["x"].nbytes; p.y = m.alloc(n); m.fill(p.y, 255, n)
    B, S, H = k["B"], k["S"], k["H"]; rng = np.random.default_rng(9); mask = None
    if k["mask"] == "padding":  # bytes by key
        keep = np.ones((B, S), np.uint8)
        for b in range(B): keep[b, S - 1 - (b * 5 + 2) % max(S // 2, 1):] = 0
        keep[:, 0] = 1; mask = np.where(keep, 0.0, -np.inf)[:, None, None, :]; p.mask, p.mask_type, p.mask_batch, p.mask_head, p.mask_row = m.put(keep), 3, S, 0, 0
    elif k["mask"] == "additive":  # of the element type, finite fill, by key
        a = np.where(rng.random((B, S)) < 0.3, -10000.0, 0.0); a[:, 0] = 0; a = store(dt, a); mask = widen(dt, a)[:, None, None, :]; p.mask, p.mask_type, p.mask_batch = m.put(a), 1, S
    elif k["mask"] == "full":  # float32, by head, row and key
        a = rng.standard_normal((B, H, S, S)).astype(np.float32); mask = a.astype(np.float64); p.mask, p.mask_type, p.mask_batch, p.mask_head, p.mask_row = m.put(a), 2, H * S * S, S * S, S
    for n in ("cluster", "clusters", "per", "stages", "barrier", "restore", "skip"): setattr(p, n, k[n])
    for i in range(4): p.parts[i], p.blocks[i] = k["parts"][i], k["blocks"][i]
    if m.fault: p.fault = m.fault
    return p, mask

CACHE = {}
def expected(k, mask):
    "Of the first k['L'] layers."
    key = json.dumps({n: k[n] for n in ("dtype", "L", "B", "S", "D", "F", "H", "pre", "first_norm", "final", "act", "eps", "mask", "mean")})
    if key not in CACHE:
        CACHE.clear(); final = tuple(a.astype(np.float64) for a in POOL["final"]) if k["final"] else None
        CACHE[key] = encoder(widen(k["dtype"], POOL["x"]), POOL["wide"][:k["L"]], k["H"], 1 / np.sqrt(k["D"] // k["H"]), mask, k["pre"], k["first_norm"], k["act"], k["eps"], final)
    return CACHE[key]

def activations(a, rows, width):
    """[64 rows][8 columns][8 rows] of 8 x 8 -> [rows, width]"""
    return a.reshape(rows // 64, width // 8, 8, 8, 8).transpose(0, 2, 3, 1, 4).reshape(rows, width)
def fragments(a, rows, width):
    """[16 columns][16 rows][8 g, 4 q][column half, row half, 2] -> [rows, width]"""
    return a.reshape(width // 16, rows // 16, 8, 4, 2, 2, 2).transpose(1, 5, 2, 0, 4, 3, 6).reshape(rows, width)

def error(got, want):
    d = np.abs(np.nan_to_num(got, nan=1e9, posinf=1e9, neginf=-1e9) - want); s = np.sqrt((want ** 2).mean()) + 1e-30; return float(np.sqrt((d ** 2).mean()) / s), d / s

def run(k, m):
    t0 = time.time(); p, mask = problem(k, m); t1 = time.time(); lib = m.lib; ref = ctypes.byref(p); dt = k["dtype"]
    numbers = (Q * 64)(); count = lib.onnxfuse_encoder_describe(ref, numbers, 64)
    if count < 0: return dict(name=k["name"], ok=False, refused=f"cuda error {-count}")
    d = list(numbers[:count]); plan = dict(cluster=d[0], clusters=d[1], rows=d[3], ring=d[6] - d[5], products=[dict(zip("slices groups parts blocks passes wide stages per".split(), d[14 + 8 * i:22 + 8 * i])) for i in range(4)])
    n = lib.onnxfuse_encoder_workspace(ref); ws = m.alloc(n); m.fill(ws, 255, n)
    if k["restore"]: p.counters = m.alloc(256); m.fill(p.counters, 0, 256)
    steps = 5 * k["L"] + 2; grid = d[0] * d[1]
    if k["profile"]: p.profile = m.alloc(grid * steps * 80); m.fill(p.profile, 0, grid * steps * 80)
    launch = lambda: (m.ok(lib.onnxfuse_launch_encoder(ref, P(ws), ctypes.c_size_t(n), None), "launch"), m.sync())
    launch(); res = dict(name=k["name"], plan=plan, ok=True, err={})
    padded, rows = d[2], d[3]; B, S, D, F_ = k["B"], k["S"], k["D"], k["F"]
    def read(at, width, decode):
        a = decode(widen(dt, m.get(ws + at, raw(dt, rows * width))), rows, width)[: B * padded].reshape(B, padded, width)[:, :S]; return a
    y = m.get(p.y, raw(dt, B * S * D)).reshape(B, S, D)
    if k["check"]:
        want, phases = expected(k, mask); got = dict(qkv=read(d[9], 3 * D, fragments), context=read(d[10], D, activations), middle=read(d[8], D, activations), inner=read(d[11], F_, activations), y=widen(dt, y))
        if k["final"]: got["outer"] = read(d[7], D, activations)
        tol = (1e-3 if dt == "float16" else 8e-3) * (1 + 0.12 * k["L"]) * (1 + abs(k["mean"]))
        for name in ("qkv", "context", "middle", "inner", "outer", "y"):
            if name not in got: continue
            w = want if name == "y" else phases[name]; e, rel = error(got[name], w); res["err"][name] = e
            if not e < tol:
                res["ok"] = False; bad = rel > 20 * tol; f = np.argwhere(bad)
                res.setdefault("first", dict(phase=name, n=int(bad.sum()), of=int(bad.size), nan=int(np.isnan(got[name]).sum()), at=f[0].tolist() if len(f) else None, got=float(got[name][tuple(f[0])]) if len(f) else None, want=float(w[tuple(f[0])]) if len(f) else None, rows=np.unique(f[:, 1])[:24].tolist() if len(f) else [], columns8=np.unique(f[:, 2] // 8)[:24].tolist() if len(f) else []))
    t2 = time.time()
    if isinstance(m, Gpu):
        if k["profile"]:
            launch(); a = m.get(p.profile, np.zeros(grid * steps * 10, np.int64)).reshape(grid, steps, 10); L = k["L"]; b = a[:, : 5 * L].reshape(grid, L, 5, 10)[:, min(2, L - 1):]
            for n_ in range(1, 10): b[..., n_] = np.where(b[..., n_] == 0, b[..., n_ - 1], b[..., n_])
            diff = np.diff(b, axis=-1); phases = ("qkv", "attention", "projection", "inner", "outer")
            res["profile"] = {q: {n_: [round(float(np.median(v))), round(float(v.max(0).mean()))] for n_, v in ((STAMPS[i], diff[:, :, j, i]) for i in range(9))} for j, q in enumerate(phases)}
            nxt = (a[:, 1: 5 * L + 1, 0] - a[:, : 5 * L, 0]).reshape(grid, L, 5)[:, min(2, L - 1):]; res["phase_clocks"] = {q: round(float(np.median(nxt[:, :, j]))) for j, q in enumerate(phases)}
            for j, q in enumerate(phases): res["profile"][q]["between"] = [round(float(np.median((nxt - (b[:, : nxt.shape[1], :, 9] - b[:, : nxt.shape[1], :, 0]))[:, :, j]))), 0]
            res["one_block"] = (b[37 % grid, -1] - b[37 % grid, -1, 0, 0]).tolist()
            p.profile = None
        launch(); res["same_again"] = y.tobytes() == m.get(p.y, raw(dt, B * S * D)).tobytes()
        if k["time"]:
            out = (ctypes.c_float * 3)(); m.ok(lib.gt_time(ref, P(ws), ctypes.c_size_t(n), 5, 12, out), "timing"); res["us"], res["us_min"], res["us_90"] = (round(x, 2) for x in out)
            res["same_after_timing"] = y.tobytes() == m.get(p.y, raw(dt, B * S * D)).tobytes()
    res["s"] = [round(t1 - t0, 2), round(t2 - t1, 2), round(time.time() - t2, 2)]; m.free(); return res

from cases import GPU_CASES, HOST_CASES
def main():
    if sys.argv[1:2] == ["--child"]:
        m = {}; cases = GPU_CASES(case)
        for i in range(int(sys.argv[2]), int(sys.argv[3])):
            print(json.dumps({"at": i}), flush=True); k = cases[i]
            if k["lib"] not in m: m[k["lib"]] = Gpu(k["lib"])
            print(json.dumps({"case": i, **run(k, m[k["lib"]])}), flush=True)
        return
    if sys.argv[1:2] == ["--emulated"]:
        m = Host(); bad = 0; only = sys.argv[2:]
        for k in HOST_CASES(case):
            if only and not any(o in k["name"] for o in only): continue
            t0 = time.time(); r = run(k, m); bad += not r["ok"]; print("ok  " if r["ok"] else "BAD ", k["name"], {n: f"{e:.1e}" for n, e in r.get("err", {}).items()}, [tuple(q.values()) for q in r["plan"]["products"]] if "plan" in r else "", {n: v for n, v in r.items() if n in ("first", "refused")} or "", f"{time.time() - t0:.1f}s", flush=True)
        print("bad:", bad); return
    cases = GPU_CASES(case); results = []; i = 0; start = time.time(); out = os.environ.get("OUT", "."); budget = float(os.environ.get("BUDGET", "60"))
    while i < len(cases) and time.time() - start < budget:
        child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", str(i), str(len(cases))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        last = [time.time()]; lines = []
        def pump():
            for line in child.stdout: last[0] = time.time(); lines.append(line)
        th = threading.Thread(target=pump); th.start(); at = i; shown = 0; other = []
        while th.is_alive() or shown < len(lines):
            th.join(0.05)
            for line in lines[shown:]:
                try: d = json.loads(line)
                except ValueError: other.append(line.strip()); continue
                if "at" in d: at = d["at"]
                else:
                    i = d["case"] + 1; results.append(d)
                    print(("ok   " if d["ok"] else "BAD  ") + d["name"], f"{d['us']:.1f} us" if "us" in d else "", " ".join(f"{n} {e:.1e}" for n, e in d.get("err", {}).items()), "" if d.get("same_again", True) and d.get("same_after_timing", True) else "NOT THE SAME AGAIN", json.dumps({n: v for n, v in d.items() if n in ("first", "refused")}) if not d["ok"] else "", d.get("s"), flush=True)
                    for q, v in d.get("profile", {}).items(): print(f"       {q:10s} {d['phase_clocks'][q]:6d}:", " ".join(f"{n} {x[0]}/{x[1]}" for n, x in v.items()), flush=True)
                    json.dump(results, open(os.path.join(out, "encoder.json"), "w"), indent=1)
            shown = len(lines)
            if time.time() - last[0] > (12 if results else 25) or time.time() - start > budget: child.kill()
        child.wait(); th.join()
        if i <= at and i < len(cases):
            results.append(dict(case=at, name=cases[at]["name"], ok=False, crashed=f"status {child.returncode}", said=other[-6:])); print("BAD ", cases[at]["name"], "crashed or hung:", child.returncode, " | ".join(other[-3:]), flush=True); i = at + 1
        json.dump(results, open(os.path.join(out, "encoder.json"), "w"), indent=1)
    print(f"{len(results)} of {len(cases)} cases, {sum(not r['ok'] for r in results)} bad, {time.time() - start:.0f} s")
if __name__ == "__main__": main()
