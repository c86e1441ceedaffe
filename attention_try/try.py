"""Checks and times the attention kernels: numpy and ctypes alone. The most important case first; JSON to $OUT/attention.json after each.

try.py [WORD...]   cases whose name holds one of the words; BUDGET seconds (28)
A case that crashes ends its child process; the next one goes on.
"""
import ctypes, json, os, subprocess, sys, time
import numpy as np
HERE = os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0, HERE)
DT = {"float16": 1, "bfloat16": 2}
def bf16(a):
    u = np.ascontiguousarray(a, np.float32).view(np.uint32); return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype(np.uint16)
def unbf16(u): return (u.astype(np.uint32) << 16).view(np.float32)
def store(dt, a): return np.ascontiguousarray(a, np.float16) if dt == "float16" else bf16(a)
def widen(dt, a): return (a if dt == "float16" else unbf16(a)).astype(np.float64)
class Strided(ctypes.Structure): _fields_ = [("data", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "row", "head")]
class Mask(ctypes.Structure): _fields_ = [("data", ctypes.c_void_p), ("batches", ctypes.c_int32), ("key", ctypes.c_int32)] + [(n, ctypes.c_int64) for n in ("batch", "head", "row")]
class Problem(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in "dtype batch heads kv_heads queries keys head width".split()] + [("scale", ctypes.c_float)] + [(n, Strided) for n in "qkvo"] + [("added", Mask * 2), ("keep", Mask), ("hides", ctypes.c_int32), ("fill", ctypes.c_float), ("safe", ctypes.c_int32)] + [(n, ctypes.c_int32) for n in "causal offset rows warps splits early".split()]

def case(name, B=1, H=12, S=128, K=None, D=64, W=None, KV=None, dt="float16", mask=None, causal=0, rows=0, warps=0, splits=0, early=0, packed=True, time=True, check=True):
    d = dict(locals()); d["K"] = K or S; d["W"] = W or D; d["KV"] = KV or H; d["packed"] = packed and d["K"] == S; return d
def cases():
    out = []; a = lambda *r, **k: out.append(case(*r, **k))
    def each(name, which=((16, 4), (16, 8), (32, 4), (32, 8), (64, 4), (64, 8)), **k):
        for r, w in which: a(f"{name}: {r} x {w}", rows=r, warps=w, **k)
    a("bert b1 s128: auto"); each("bert b1 s128"); a("bert b1 s128: auto, early", early=1); a("bert b1 s128: 16 x 8, early", rows=16, warps=8, early=1)
    each("bert b1 s128 key padding", ((16, 4), (16, 8)), mask="padding"); a("bert b1 s128 bf16", rows=16, dt="bfloat16")
    a("floor: 1 block", H=1, S=16, rows=16); a("floor: 1 block x 8", H=1, S=16, rows=16, warps=8)
    each("vit b1 h6 s257", H=6, S=257); a("vit b1 h6 s257: splits 2", H=6, S=257, rows=16, splits=2)
    each("swin b1 64 windows h3 s49 d32 bias", B=64, H=3, S=49, D=32, mask="bias"); a("swin b1 64 windows h3 s49 d32 bias + window mask", B=64, H=3, S=49, D=32, mask="swin")
    each("swin b1 1 window h24 s49 d32 bias", ((16, 4), (16, 8)), B=1, H=24, S=49, D=32, mask="bias")
    each("minilm b1 h12 s32 d32", ((16, 4), (16, 8), (32, 4)), H=12, S=32, D=32, mask="padding")
    each("bert b1 s512", S=512); each("bert b8 s128", B=8); each("bert b32 s128", ((32, 4), (64, 4), (64, 8)), B=32)
    each("bert b1 s16", ((16, 4), (16, 8)), S=16); each("t5 b1 h6 s64 bias", ((16, 4), (16, 8)), H=6, S=64, mask="bias"); each("whisper b1 h6 s1500", ((16, 8), (32, 4), (64, 4), (64, 8)), H=6, S=1500)
    for s in (1, 4, 8, 16): a(f"decode b1 h32/8 d128 k4096: splits {s}", H=32, KV=8, S=1, K=4096, D=128, splits=s)
    each("llama b1 h32/8 d128 s512 causal", ((32, 8), (64, 4), (64, 8)), H=32, KV=8, S=512, D=128, causal=1); each("b1 h16 d128 s4096", ((64, 4), (64, 8)), H=16, S=4096, D=128, check=False)
    each("d80 b1 h16 s257", ((16, 4), (16, 8), (64, 4)), H=16, S=257, D=80); a("cross b2 q100 k77 d40", B=2, H=8, S=100, K=77, D=40); a("d256 b1 h8 s128", H=8, D=256); a("d96 b2 s100 causal bf16", B=2, H=4, S=100, D=96, causal=1, dt="bfloat16"); a("whole row masked -10000", B=2, S=70, mask="whole")
    return out

def child(names):
    lib = ctypes.CDLL(os.path.join(HERE, os.environ.get("LIB", "attention.bin"))); lib.gt_error.restype = ctypes.c_char_p; lib.onnxfuse_attention_workspace.restype = ctypes.c_size_t; P = ctypes.c_void_p
    def ok(e, what):
        if e: raise RuntimeError(f"{what}: {lib.gt_error(e).decode()}")
    for c in [c for c in cases() if c["name"] in names]:
        r = dict(name=c["name"]); kept = []
        try:
            def alloc(n): p = P(); ok(lib.gt_malloc(ctypes.byref(p), ctypes.c_size_t(max(n, 256))), "malloc"); kept.append(p); return p.value
            def put(a): d = alloc(a.nbytes); ok(lib.gt_put(P(d), P(a.ctypes.data), ctypes.c_size_t(a.nbytes)), "put"); return d
            B, H, S, K, D, W, KV, dt = (c[n] for n in ("B", "H", "S", "K", "D", "W", "KV", "dt")); rng = np.random.default_rng(S * 7 + D)
            q, k, v = (store(dt, rng.standard_normal(s).astype(np.float32)) for s in ((B, S, H, D), (B, K, KV, D), (B, K, KV, W)))
            p = Problem(DT[dt], B, H, KV, S, K, D, W, D ** -0.5)
            if c["packed"]:
                both = np.concatenate([x.reshape(B, S, -1) for x in (q, k, v)], 2); at = put(both); T = both.shape[2]
                for n, d, off in zip("qkv", (D, D, W), (0, H * D, (H + KV) * D)): setattr(p, n, Strided(at + 2 * off, S * T, T, d))
            else:
                for n, x in zip("qkv", (q, k, v)): setattr(p, n, Strided(put(x), x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[3]))
            out = np.empty((B, S, H, W), q.dtype); size = out.nbytes; room = alloc(size + 512); ok(lib.gt_set(P(room), 255, ctypes.c_size_t(size + 512)), "set"); p.o = Strided(room + 256, S * H * W, H * W, W)
            total = np.zeros((1, 1, 1, 1)); whole = None
            def add(i, a):
                nonlocal total
                a = store(dt, a.astype(np.float32)); st = [0 if e == 1 else s // 2 for e, s in zip(a.shape, a.strides)]; p.added[i] = Mask(put(a), a.shape[0], st[3], *st[:3]); w = widen(dt, a); total = total + w[np.arange(B) % len(w)]
            if c["mask"] in ("padding", "whole"):
                m = np.zeros((B, 1, 1, K)); m[..., K - K // 5:] = -65504.0 if c["mask"] == "padding" else 0
                if c["mask"] == "whole": m[0] = -10000.0
                add(0, m)
            if c["mask"] in ("bias", "swin"): add(0, rng.standard_normal((1, H, S, K)))
            if c["mask"] == "swin": add(1, np.where(rng.random((B, 1, S, K)) < 0.3, -100.0, 0.0))
            p.causal, p.rows, p.warps, p.splits, p.early = c["causal"], c["rows"], c["warps"], c["splits"], c["early"]
            e = lib.onnxfuse_attention_supported(ctypes.byref(p))
            if e: raise RuntimeError(f"refused: {lib.gt_error(e).decode()}")
            ws = lib.onnxfuse_attention_workspace(ctypes.byref(p)); wsp = alloc(ws) if ws else 0; r["workspace"] = ws
            results = []
            for _ in range(2):
                ok(lib.onnxfuse_launch_attention(ctypes.byref(p), P(wsp), ctypes.c_size_t(ws), P(0)), "launch"); ok(lib.gt_sync(), "run")
                raw = np.empty(size + 512, np.uint8); ok(lib.gt_get(P(raw.ctypes.data), P(room), ctypes.c_size_t(raw.nbytes)), "get"); results.append(raw)
            r["same"] = bool((results[0] == results[1]).all()); r["guard"] = bool((raw[:256] == 255).all() and (raw[256 + size:] == 255).all())
            if c["check"]:
                got = widen(dt, raw[256:256 + size].view(q.dtype).reshape(out.shape)).transpose(0, 2, 1, 3); Q, KK, V = (widen(dt, x).transpose(0, 2, 1, 3) for x in (q, k, v)); KK, V = (np.repeat(x, H // KV, 1) for x in (KK, V))
                s = np.float64(np.float32(D ** -0.5)) * (Q @ KK.transpose(0, 1, 3, 2)); u = s + total
                u = np.where(total <= -64, widen(dt, store(dt, np.maximum(u, -65504.0 if dt == "float16" else -3e38).astype(np.float32))), u)
                if c["causal"]: u = np.where(np.arange(K) <= np.arange(S)[:, None], u, -np.inf)
                w = np.exp(u - u.max(-1, keepdims=True)); want = (w / w.sum(-1, keepdims=True)) @ V
                r["err"] = float(np.sqrt(((got - want) ** 2).mean() / (want ** 2).mean())); r["worst"] = float(np.abs(got - want).max() / np.abs(want).max())
            if c["time"]:
                t = (ctypes.c_float * 3)(); ok(lib.gt_time(ctypes.byref(p), P(wsp), ctypes.c_size_t(ws), 20, 25, t), "time"); r["us"] = [round(x, 2) for x in t]; r["tflops"] = round(2 * B * H * S * K * (D + W) / t[0] / 1e6, 1)
        except Exception as x: r["error"] = f"{type(x).__name__}: {x}"
        for x in kept: lib.gt_free(x)
        print("RESULT " + json.dumps(r), flush=True)
        if "error" in r and "refused" not in r["error"]: return 3

def main():
    if sys.argv[1:2] == ["--child"]: return child(json.loads(sys.argv[2]))
    words = sys.argv[1:]; names = [c["name"] for c in cases() if not words or any(w in c["name"] for w in words)]; out = []; start = time.time(); budget = float(os.environ.get("BUDGET", "28"))
    while names and time.time() - start < budget:
        p = subprocess.Popen([sys.executable, __file__, "--child", json.dumps(names)], stdout=subprocess.PIPE, text=True); seen = []
        import threading; killer = threading.Timer(max(budget - (time.time() - start), 1), p.kill); killer.start()
        for line in p.stdout:
            if not line.startswith("RESULT "): print(line.rstrip()); continue
            r = json.loads(line[7:]); seen.append(r["name"]); out.append(r); json.dump(out, open(os.path.join(os.environ.get("OUT", "."), "attention.json"), "w"), indent=1)
            bad = r.get("err", 0) > (1.2e-3 if "bf16" not in r["name"] else 8e-3) or not r.get("same", 1) or not r.get("guard", 1)
            print(f"{r['name']:58s}", *(f"{r['us'][0]:8.2f} us (least {r['us'][1]:.2f})" if "us" in r else "",), f"{r.get('tflops', 0):6.1f} TFLOP/s err {r.get('err', -1):.2e} worst {r.get('worst', -1):.1e}", "WRONG" if bad else "", r.get("error", ""), flush=True)
        p.wait(); killer.cancel()
        names = names[len(seen):] if seen else names[1:]
    print(f"{time.time() - start:.1f} s, {len(names)} left")
sys.exit(main())
