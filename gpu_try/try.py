"""Runs the recurrent kernels against a float64 reference and times them. numpy and ctypes alone.

try.py                 all cases, in child processes (one that hangs or crashes costs only its case); JSON to $OUT/recurrence.json
try.py --emulated [N]  small cases on the host
try.py --child A B     cases A to B-1, one JSON line each
"""
import ctypes, json, os, subprocess, sys, time
import numpy as np
HERE = os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0, HERE)
from reference import recurrence

class Layer(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in "input_weights weights bias h0 c0 h_last c_last".split()]
class Problem(ctypes.Structure):
    _fields_ = ([(n, ctypes.c_int32) for n in "dtype cell directions reversed layers steps batch width hidden".split()] + [("clip", ctypes.c_float), ("x", ctypes.c_void_p), ("x_step", ctypes.c_int64), ("x_row", ctypes.c_int64), ("lengths", ctypes.c_void_p), ("y", ctypes.c_void_p)]
        + [(n, ctypes.c_int64) for n in "y_step y_direction y_row state_direction state_row".split()] + [("layer", Layer * 8)] + [(n, ctypes.c_int32) for n in "variant rows cluster wavefront fast serial".split()] + [("fault", ctypes.c_void_p)])

STEPS, GRID, INDEPENDENT, CLUSTER = 1, 2, 3, 4
NAMES = {0: "auto", 1: "steps", 2: "grid", 3: "independent", 4: "cluster", 5: "resident"}

def bf16(a):
    u = np.ascontiguousarray(a, np.float32).view(np.uint32); return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype(np.uint16)
def unbf16(u): return (u.astype(np.uint32) << 16).view(np.float32)
TYPES = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (2, 2)}
def store(dtype, a): return np.ascontiguousarray(a, np.float32) if dtype == "float32" else np.ascontiguousarray(a, np.float16) if dtype == "float16" else bf16(a)
def widen(dtype, a): return (a if dtype != "bfloat16" else unbf16(a)).astype(np.float64)
def empty(dtype, shape): return np.full(shape, 0xffff, np.uint16).view(np.float16 if dtype == "float16" else np.uint16) if dtype != "float32" else np.full(shape, np.nan, np.float32)

class Gpu:
    def __init__(self, name=""):
        self.lib = ctypes.CDLL(os.path.join(HERE, f"recurrence{name}.bin")); self.lib.gt_error.restype = ctypes.c_char_p; self.kept = []
        p = ctypes.c_void_p(); self.ok(self.lib.gt_host(ctypes.byref(p), ctypes.c_size_t(64)), "host memory"); self.fault = p.value; ctypes.memset(self.fault, 0, 64)
    def ok(self, e, what):
        if e:
            w = (ctypes.c_int * 3).from_address(self.fault) if getattr(self, "fault", None) else None
            raise RuntimeError(f"{what}: {self.lib.gt_error(e).decode()}" + (f"; waited in vain at site {w[0]}, block ({w[1]}, {w[2]})" if w and w[0] else ""))
    def alloc(self, n):
        p = ctypes.c_void_p(); self.ok(self.lib.gt_malloc(ctypes.byref(p), ctypes.c_size_t(max(n, 256))), "malloc"); self.kept.append(p); return p.value
    def put(self, a):
        d = self.alloc(a.nbytes); self.ok(self.lib.gt_put(ctypes.c_void_p(d), ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(a.nbytes)), "put"); return d
    def get(self, d, a): self.ok(self.lib.gt_get(ctypes.c_void_p(a.ctypes.data), ctypes.c_void_p(d), ctypes.c_size_t(a.nbytes)), "get")
    def poison(self, d, n): self.ok(self.lib.gt_set(ctypes.c_void_p(d), 255, ctypes.c_size_t(n)), "set")
    def sync(self): self.ok(self.lib.gt_sync(), "run")
    def free(self):
        for p in self.kept: self.lib.gt_free(p)
        self.kept = []
class Host:
    def __init__(self): self.lib = ctypes.CDLL(os.path.join(HERE, "libemulated.so")); self.kept = {}; self.fault = None
    def ok(self, e, what):
        if e: raise RuntimeError(f"{what}: cuda error {e}")
    def alloc(self, n):
        a = np.zeros(n + 256, np.uint8); d = (a.ctypes.data + 255) // 256 * 256; self.kept[d] = a; return d
    def put(self, a): d = self.alloc(a.nbytes); ctypes.memmove(d, a.ctypes.data, a.nbytes); return d
    def get(self, d, a): ctypes.memmove(a.ctypes.data, d, a.nbytes)
    def poison(self, d, n): ctypes.memset(d, 255, n)
    def sync(self): pass
    def free(self): self.kept = {}

def case(name, cell=0, dtype="float16", T=100, B=1, I=None, H=512, D=1, mask=None, layers=1, bias=True, init=False, lens=False, clip=0.0, batch_first=False, states=True, y=True, variant=0, rows=0, cluster=0, wavefront=0, fast=0, serial=0, time=True, trained=1.0, lib=""):
    d = dict(locals()); d["I"] = I or H; d["mask"] = mask if mask is not None else (2 if D == 2 else 0); return d

def problem(k, m):
    """The problem in memory `m`, and a function that reads its results."""
    rng = np.random.default_rng(hash((k["cell"], k["T"], k["B"], k["H"], k["I"], k["D"], k["layers"])) % 2**32); dt = k["dtype"]; size = TYPES[dt][1]
    T, B, H, D, L = (k[n] for n in ("T", "B", "H", "D", "layers")); G = 4 if k["cell"] == 0 else 3; s = k["trained"] / np.sqrt(H)
    u = lambda *sh: store(dt, rng.uniform(-s, s, sh))
    x = store(dt, rng.standard_normal((T, B, k["I"])))
    p = Problem(); host = dict(x=x, layers=[])
    lens = None
    if k["lens"]:
        lens = rng.integers(1, T + 1, B).astype(np.int32); lens[0] = max(1, T - 1); lens[-1] = max(1, T // 2); p.lengths = m.put(lens)
    for l in range(L):
        I = k["I"] if l == 0 else D * H
        w, r = u(D, G * H, I), u(D, G * H, H); b = u(D, 2 * G * H) if k["bias"] else None
        h0 = store(dt, rng.uniform(-1, 1, (D, B, H))) if k["init"] else None; c0 = store(dt, rng.standard_normal((D, B, H))) if k["init"] and k["cell"] == 0 else None
        host["layers"].append((w, r, b, h0, c0)); e = p.layer[l]
        e.input_weights, e.weights = m.put(w), m.put(r)
        if b is not None: e.bias = m.put(b)
        if h0 is not None: e.h0 = m.put(h0)
        if c0 is not None: e.c0 = m.put(c0)
        if k["states"]:
            e.h_last = m.alloc(D * B * H * size); m.poison(e.h_last, D * B * H * size)
            if k["cell"] == 0: e.c_last = m.alloc(D * B * H * size); m.poison(e.c_last, D * B * H * size)
    p.dtype, p.cell, p.directions, p.reversed, p.layers, p.steps, p.batch, p.width, p.hidden, p.clip = TYPES[dt][0], k["cell"], D, k["mask"], L, T, B, k["I"], H, k["clip"]
    if k["batch_first"]:
        p.x = m.put(np.ascontiguousarray(x.transpose(1, 0, 2))); p.x_step, p.x_row = k["I"], T * k["I"]; p.y_step, p.y_direction, p.y_row = D * H, H, T * D * H
    else:
        p.x = m.put(x); p.x_step, p.x_row = B * k["I"], k["I"]; p.y_step, p.y_direction, p.y_row = D * B * H, B * H, H
    p.state_direction, p.state_row = B * H, H
    if k["y"]: p.y = m.alloc(T * B * D * H * size); m.poison(p.y, T * B * D * H * size)
    for n in ("variant", "rows", "cluster", "wavefront", "fast", "serial"): setattr(p, n, k[n])
    if m.fault: p.fault = m.fault
    def read():
        out = {}
        if k["y"]:
            a = empty(dt, (B, T, D, H) if k["batch_first"] else (T, D, B, H)); m.get(p.y, a); out["y"] = widen(dt, a.transpose(1, 2, 0, 3) if k["batch_first"] else a)
        if k["states"]:
            for l in range(L):
                for n in ("h", "c")[: 2 if k["cell"] == 0 else 1]:
                    a = empty(dt, (D, B, H)); m.get(getattr(p.layer[l], n + "_last"), a); out[f"{n}{l}"] = widen(dt, a)
        return out
    return p, host, lens, read

CACHE = {}
def expected(k, host, lens):
    key = json.dumps({n: v for n, v in k.items() if n not in ("name", "variant", "rows", "cluster", "wavefront", "fast", "serial", "lib", "time", "batch_first", "states", "y")})
    if key in CACHE: return CACHE[key]
    dt = k["dtype"]; x = widen(dt, host["x"]); out = {}; wide = lambda a: None if a is None else widen(dt, a)
    for l, (w, r, b, h0, c0) in enumerate(host["layers"]):
        y, h, c = recurrence(k["cell"], x, wide(w), wide(r), wide(b), wide(h0), wide(c0), lens, k["mask"], k["clip"])
        out[f"h{l}"] = h
        if k["cell"] == 0: out[f"c{l}"] = c
        x = y.transpose(0, 2, 1, 3).reshape(k["T"], k["B"], -1)
    out["y"] = y; CACHE.clear(); CACHE[key] = out; return out

LIMIT = {"float32": 3e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
def compare(k, got, want):
    """Relative error (2-norm) of each output; for a wrong one also where it first differs."""
    res = {"err": {}, "ok": True}; tol = LIMIT[k["dtype"]] * (3 if k["trained"] > 1 else 1) * (2 if k["fast"] else 1)
    for n, g in got.items():
        w = want[n]; d = np.abs(np.nan_to_num(g, nan=1e9, posinf=1e9, neginf=-1e9) - w); scale = np.sqrt((w ** 2).mean()) + 1e-9
        e = float(np.sqrt((d ** 2).mean()) / scale); res["err"][n] = e
        bad = d > max(20 * tol * scale, 1e-7)
        if e > tol or bad.any() or not np.isfinite(g).all():
            res["ok"] = False
            if bad.any():
                i = np.argwhere(bad)
                if n == "y":
                    order = i[:, 0] if k["mask"] == 0 else np.where((k["mask"] >> i[:, 1]) & 1, k["T"] - 1 - i[:, 0], i[:, 0]); f = i[np.argsort(order, kind="stable")][0]
                    s = bad[f[0], f[1], f[2]]
                    res[f"first_{n}"] = dict(t_d_b_u=f.tolist(), got=float(g[tuple(f)]), want=float(w[tuple(f)]), units_wrong_there=np.flatnonzero(s)[:12].tolist(), n_units=int(s.sum()), rows_wrong_there=np.flatnonzero(bad[f[0], f[1]].any(1)).tolist()[:12], times_wrong=int(bad.any((1, 2, 3)).sum()), n=int(bad.sum()), of=int(bad.size), nan=int(np.isnan(g).sum()))
                else: res[f"first_{n}"] = dict(d_b_u=i[0].tolist(), got=float(g[tuple(i[0])]), want=float(w[tuple(i[0])]), n=int(bad.sum()), of=int(bad.size))
    return res

def run(k, m):
    t0 = time.time(); p, host, lens, read = problem(k, m); t1 = time.time(); want = expected(k, host, lens); t2 = time.time()
    lib = m.lib; lib.onnxfuse_recurrence_workspace.restype = ctypes.c_size_t
    ref = ctypes.byref(p); v = lib.onnxfuse_recurrence_variant(ref)
    if v < 0: return dict(name=k["name"], ok=False, refused=f"cuda error {-v}" if isinstance(m, Host) else m.lib.gt_error(-v).decode())
    n = lib.onnxfuse_recurrence_workspace(ref); ws = m.alloc(n); m.poison(ws, n)
    m.ok(lib.onnxfuse_launch_recurrence(ref, ctypes.c_void_p(ws), ctypes.c_size_t(n), None), "launch"); m.sync()
    res = dict(name=k["name"], variant=NAMES[v], workspace_mb=round(n / 1e6, 2), **compare(k, read(), want))
    if isinstance(m, Gpu):
        a = read(); m.ok(lib.onnxfuse_launch_recurrence(ref, ctypes.c_void_p(ws), ctypes.c_size_t(n), None), "launch"); m.sync(); b = read()
        res["same_again"] = all(a[q].tobytes() == b[q].tobytes() for q in a)
        if k["time"]:
            out = (ctypes.c_float * 3)(); m.ok(lib.gt_time(ref, ctypes.c_void_p(ws), ctypes.c_size_t(n), 5 if v != STEPS else 1, 20, out), "timing"); res["us"], res["us_min"], res["us_90"] = (round(x, 2) for x in out)
            b = read(); res["same_after_timing"] = all(a[q].tobytes() == b[q].tobytes() for q in a)
    res["s"] = [round(t1 - t0, 2), round(t2 - t1, 2), round(time.time() - t2, 2)]
    m.free(); return res

from cases import GPU_CASES, HOST_CASES
def main():
    if sys.argv[1:2] == ["--child"]:
        m = {}; cases = GPU_CASES(case)
        for i in range(int(sys.argv[2]), int(sys.argv[3])):
            print(json.dumps({"at": i}), flush=True); k = cases[i]; m.setdefault(k["lib"], None); m[k["lib"]] = m[k["lib"]] or Gpu(k["lib"]); print(json.dumps({"case": i, **run(k, m[k["lib"]])}), flush=True)
        return
    if sys.argv[1:2] == ["--emulated"]:
        m = Host(); bad = 0; only = sys.argv[2:]
        for k in HOST_CASES(case):
            if only and not any(o in k["name"] for o in only): continue
            t0 = time.time(); r = run(k, m); bad += not r["ok"]; print("ok  " if r["ok"] else "BAD ", k["name"], r.get("variant"), {n: f"{e:.1e}" for n, e in r.get("err", {}).items()}, {n: v for n, v in r.items() if n.startswith("first") or n == "refused"} or "", f"{time.time() - t0:.1f}s", flush=True)
        print("bad:", bad); return
    cases = GPU_CASES(case); results = []; i = 0; start = time.time(); out = os.environ.get("OUT", "."); budget = float(os.environ.get("BUDGET", "100"))
    while i < len(cases) and time.time() - start < budget:
        child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", str(i), str(len(cases))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        import threading
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
                    print(("ok   " if d["ok"] else "BAD  ") + d["name"], d.get("variant", ""), f"{d['us']:.1f} us" if "us" in d else "", " ".join(f"{n} {e:.1e}" for n, e in d.get("err", {}).items() if n in ("y", "h0")), "" if d.get("same_again", True) and d.get("same_after_timing", True) else "NOT THE SAME AGAIN", json.dumps({n: v for n, v in d.items() if n.startswith("first") or n == "refused"}) if not d["ok"] else "", d.get("s"), flush=True)
            shown = len(lines)
            if time.time() - last[0] > 14 or time.time() - start > budget: child.kill()
        child.wait(); th.join()
        if i <= at and i < len(cases):
            results.append(dict(case=at, name=cases[at]["name"], ok=False, crashed=f"status {child.returncode}", said=other[-6:])); print("BAD ", cases[at]["name"], "crashed or hung:", child.returncode, " | ".join(other[-3:]), flush=True); i = at + 1
        json.dump(results, open(os.path.join(out, "recurrence.json"), "w"), indent=1)
    print(f"{len(results)} of {len(cases)} cases, {sum(not r['ok'] for r in results)} bad, {time.time() - start:.0f} s")
if __name__ == "__main__": main()
