"""Builds the automatic and the fused engine of every model in engine/, compares both with onnxruntime's float32 results, times both as CUDA graphs
in turn. Needs tensorrt, numpy and recurrence.bin. engine_try.py [NAME...]; JSON to $OUT/engines.json. A child process a model."""
import ctypes, json, os, subprocess, sys, time
from pathlib import Path
import numpy as np
HERE = Path(__file__).resolve().parent; DIR = HERE / "engine"
PROFILES = {"lstm_2x512_dynamic": [(50, 1), (50, 8), (50, 64)], "lstm_1x1024_dynamic": [(50, 1), (50, 8), (50, 64)], "gru_1x256_dynamic": [(50, 8), (50, 64)]}

def one(name, precision):
    import tensorrt as trt
    lib = ctypes.CDLL(str(HERE / "recurrence.bin")); lib.gt_error.restype = ctypes.c_char_p; P = ctypes.c_void_p
    def ok(e, what):
        if e: raise RuntimeError(f"{what}: {lib.gt_error(e).decode()}")
    class Log(trt.ILogger):
        def __init__(self): trt.ILogger.__init__(self)
        def log(self, severity, msg):
            if severity <= trt.ILogger.ERROR: print("TRT:", msg[:400], flush=True)
    log = Log(); keep = []
    data = np.load(DIR / f"{name}.npz"); feeds = {k[3:]: data[k] for k in data if k.startswith("in_")}; want = {k[4:]: data[k] for k in data if k.startswith("out_")}
    reg = trt.get_plugin_registry(); handle = reg.load_library(str(DIR / "plugins.bin"))
    if handle is None: raise RuntimeError("the plugin library does not load")
    shapes = PROFILES.get(name, [None]); results = []
    for shape in shapes:
        res = dict(name=name, precision=precision, shape=shape); execs = {}; s = P(); ok(lib.gt_stream(ctypes.byref(s)), "stream")
        for kind in ("auto", "fused"):
            b = trt.Builder(log); flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED); net = b.create_network(flag); parser = trt.OnnxParser(net, log)
            t0 = time.time()
            if not parser.parse((DIR / f"{name}.{precision}.{kind}.onnx").read_bytes()):
                res[kind] = {"error": "; ".join(str(parser.get_error(i)) for i in range(min(3, parser.num_errors)))}; continue
            cfg = b.create_builder_config()
            if kind == "fused": cfg.plugins_to_serialize = [str(DIR / "plugins.bin")]
            if shape:
                prof = b.create_optimization_profile(); T, B = shape; I = net.get_input(0).shape[2]; prof.set_shape("x", (1, 1, I), (B, T, I), (max(B, 64), 2 * T, I)); cfg.add_optimization_profile(prof)
            plan = b.build_serialized_network(net, cfg)
            if plan is None: res[kind] = {"error": "build failed"}; continue
            rt = trt.Runtime(log); rt.engine_host_code_allowed = True; eng = rt.deserialize_cuda_engine(plan); ctx = eng.create_execution_context(); keep += [rt, eng, ctx]
            r = {"build_s": round(time.time() - t0, 1), "layers": eng.num_layers, "mb": round(plan.nbytes / 1e6, 2), "workspace_mb": round(eng.device_memory_size / 1e6, 2)}
            bufs = {}; ins = dict(feeds)
            if shape and (shape[1], shape[0]) != ins["x"].shape[:2]: ins["x"] = np.random.default_rng(5).standard_normal((shape[1], shape[0], ins["x"].shape[2])).astype(np.float32)
            for i in range(eng.num_io_tensors):
                n = eng.get_tensor_name(i)
                if eng.get_tensor_mode(n) == trt.TensorIOMode.INPUT:
                    a = np.ascontiguousarray(ins[n].astype(trt.nptype(eng.get_tensor_dtype(n)))); keep.append(a)
                    if eng.is_shape_inference_io(n): ctx.set_tensor_address(n, a.ctypes.data); continue
                    d = P(); ok(lib.gt_malloc(ctypes.byref(d), ctypes.c_size_t(max(a.nbytes, 256))), "malloc"); ok(lib.gt_put(d, P(a.ctypes.data), ctypes.c_size_t(a.nbytes)), "put"); ctx.set_input_shape(n, a.shape); ctx.set_tensor_address(n, d.value)
            for i in range(eng.num_io_tensors):
                n = eng.get_tensor_name(i)
                if eng.get_tensor_mode(n) == trt.TensorIOMode.OUTPUT:
                    shp = tuple(ctx.get_tensor_shape(n)); shp = tuple(d if d >= 0 else want[n].shape[j] for j, d in enumerate(shp)); a = np.empty(shp, trt.nptype(eng.get_tensor_dtype(n)))
                    d = P(); ok(lib.gt_malloc(ctypes.byref(d), ctypes.c_size_t(max(a.nbytes, 256))), "malloc"); lib.gt_set(d, 255, ctypes.c_size_t(max(a.nbytes, 256))); ctx.set_tensor_address(n, d.value); bufs[n] = (d, a)
            for _ in range(3):
                if not ctx.execute_async_v3(s.value): raise RuntimeError(f"{kind}: execute failed")
            ok(lib.gt_stream_sync(s), "run")
            def read():
                for n, (d, a) in bufs.items(): ok(lib.gt_get(P(a.ctypes.data), d, ctypes.c_size_t(a.nbytes)), "get")
                return {n: a.astype(np.float64) for n, (d, a) in bufs.items()}
            got = read(); r["outputs"] = got
            if ins["x" if "x" in ins else next(iter(ins))] is feeds["x" if "x" in feeds else next(iter(feeds))]: r["err"] = {n: float(np.sqrt(((g - want[n]) ** 2).mean()) / (np.sqrt((want[n].astype(np.float64) ** 2).mean()) + 1e-12)) for n, g in got.items()}
            try:
                ok(lib.gt_begin(s), "capture"); good = ctx.execute_async_v3(s.value); e = P(); ok(lib.gt_end(s, ctypes.byref(e)), "end of capture")
                if not good: raise RuntimeError("execute in capture failed")
                ok(lib.gt_launch(e, s), "graph"); ok(lib.gt_stream_sync(s), "graph"); again = read(); r["graph_same"] = all(np.array_equal(got[n], again[n]) for n in got); execs[kind] = e
            except RuntimeError as f: r["graph"] = str(f)
            res[kind] = r
        if len(execs) == 2:
            a, b_ = (ctypes.c_float * 100)(), (ctypes.c_float * 100)(); ok(lib.gt_pair(execs["auto"], execs["fused"], s, 100, a, b_), "timing"); res["auto"]["us"], res["fused"]["us"] = round(float(np.median(a)), 1), round(float(np.median(b_)), 1)
        elif "fused" in execs:
            a, b_ = (ctypes.c_float * 50)(), (ctypes.c_float * 50)(); ok(lib.gt_pair(execs["fused"], execs["fused"], s, 50, a, b_), "timing"); res["fused"]["us"] = round(float(np.median(a)), 1)
        outs = [res[k].pop("outputs") for k in ("auto", "fused") if "outputs" in res.get(k, {})]
        if len(outs) == 2: res["differ"] = {n: float(np.sqrt(((outs[0][n] - outs[1][n]) ** 2).mean()) / (np.sqrt((outs[0][n] ** 2).mean()) + 1e-12)) for n in outs[0]}
        print("RESULT " + json.dumps(res), flush=True)

def main():
    if sys.argv[1:2] == ["--one"]: return one(sys.argv[2], sys.argv[3])
    names = sorted({(f.name.split(".")[0], f.name.split(".")[1]) for f in DIR.glob("*.fused.onnx")}, key=lambda n: (n[0] not in ("lstm_2x512_t100_b1", "bilstm_2x128_t60_b32", "gru_1x256_t200_b1") or n[1] != "fp16", n))
    names = [n for n in names if not sys.argv[1:] or any(a in n[0] for a in sys.argv[1:])]; out = []; start = time.time(); budget = float(os.environ.get("BUDGET", "150"))
    for name, precision in names:
        left = budget - (time.time() - start)
        if left < 5: print("no time left for", name, precision); continue
        try: done = subprocess.run([sys.executable, __file__, "--one", name, precision], capture_output=True, text=True, timeout=min(left, 90)); text = done.stdout + done.stderr; rc = done.returncode
        except subprocess.TimeoutExpired as e: text, rc = ((e.stdout or b"").decode() if isinstance(e.stdout, bytes) else e.stdout or ""), "timeout"
        found = [json.loads(l[7:]) for l in text.splitlines() if l.startswith("RESULT ")]; out += found
        for r in found: print(r["name"], r["precision"], r["shape"] or "", *(f"{k}: {r[k].get('us')} us, {r[k].get('layers')} layers, err {({n: round(e, 6) for n, e in r[k].get('err', {}).items()})} {r[k].get('error', '')}{r[k].get('graph', '')}{'' if r[k].get('graph_same', True) else ' GRAPH DIFFERS'} ws {r[k].get('workspace_mb')} MB built {r[k].get('build_s')} s;" for k in ("auto", "fused") if k in r), "differ", {n: round(e, 6) for n, e in r.get("differ", {}).items()}, flush=True)
        rest = [l for l in text.splitlines() if not l.startswith("RESULT ")]
        if rc or not found or rest: print(f"  [{name} {precision} rc {rc}]", *rest[-8:], sep="\n    ", flush=True)
        json.dump(out, open(Path(os.environ.get("OUT", ".")) / "engines.json", "w"), indent=1)
if __name__ == "__main__": main()
