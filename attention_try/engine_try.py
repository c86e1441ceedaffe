"""(Of the recurrence branch.) Builds the fused engine of every model in engine/, compares it with onnxruntime's float32 results, times it as a CUDA graph and prints; then the
automatic one, which may take minutes for loops that TensorRT unrolls, and both in turn. Needs tensorrt, numpy and attention.bin.
engine_try.py [NAME...]; JSON to $OUT/engines.json. AUTO=0: no automatic engines. BUDGET: seconds for all. LIMIT, AUTO_LIMIT: seconds for one
fused or automatic engine (40, 40). ENGINES: folders with models, joined by ':' (engine/). One child process, another behind one that ended."""
import ctypes, json, os, subprocess, sys, threading, time
from pathlib import Path
import numpy as np
HERE = Path(__file__).resolve().parent; DIRS = [Path(p) for p in os.environ.get("ENGINES", str(HERE / "engine")).split(":")]; AUTO = os.environ.get("AUTO", "1") != "0"
def where(file): return next(d / file for d in DIRS if (d / file).exists())
PROFILES = {"dynamic": [(257, 1), (49, 8)]}

def many(models):
    import tensorrt as trt
    print("STAGE tensorrt is there", flush=True)
    for model in models:
        name, precision = model.split(":"); print("AT", name, precision, flush=True)
        try: one(trt, name, precision)
        except Exception as e: print(f"FAILED {name} {precision}: {type(e).__name__}: {e}", flush=True)

LOADED = []
def one(trt, name, precision):
    lib = ctypes.CDLL(str(HERE / "attention.bin")); lib.gt_error.restype = ctypes.c_char_p; P = ctypes.c_void_p
    def ok(e, what):
        if e: raise RuntimeError(f"{what}: {lib.gt_error(e).decode()}")
    class Log(trt.ILogger):
        def __init__(self): trt.ILogger.__init__(self)
        def log(self, severity, msg):
            if severity <= trt.ILogger.ERROR: print("TRT:", msg[:400], flush=True)
    log = Log(); keep = []; begun = time.time()
    def stage(*words): print("STAGE", *words, f"{time.time() - begun:.1f} s", flush=True)
    data = np.load(where(f"{name}.npz")); feeds = {k[3:]: data[k] for k in data if k.startswith("in_")}; want = {k[4:]: data[k] for k in data if k.startswith("out_")}
    plugins = str(where("plugins.bin"))
    if not LOADED:
        LOADED.append(trt.get_plugin_registry().load_library(plugins)); stage("plugins loaded")
        if LOADED[0] is None: raise RuntimeError("the plugin library does not load")
    shapes = PROFILES.get(name, [None]); results = []
    for shape in shapes:
        res = dict(name=name, precision=precision, shape=shape); execs = {}; s = P(); ok(lib.gt_stream(ctypes.byref(s)), "stream")
        def tell(): print("RESULT " + json.dumps({**res, **{k: {n: v for n, v in res[k].items() if n != "outputs"} for k in ("auto", "fused") if k in res}}), flush=True)
        for kind in ("fused", "auto") if AUTO else ("fused",):
            if kind == "auto": tell()
            b = trt.Builder(log); flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED); net = b.create_network(flag); parser = trt.OnnxParser(net, log)
            t0 = time.time(); stage(kind, "parse")
            if not parser.parse(where(f"{name}.{precision}.{kind}.onnx").read_bytes()):
                res[kind] = {"error": "; ".join(str(parser.get_error(i)) for i in range(min(3, parser.num_errors)))}; continue
            cfg = b.create_builder_config()
            if kind == "fused": cfg.plugins_to_serialize = [plugins]
            if shape:
                prof = b.create_optimization_profile(); T, B = shape; I = net.get_input(0).shape[2]; prof.set_shape("x", (1, 1, I), (B, T, I), (max(B, 16), 2 * T, I))
                cfg.add_optimization_profile(prof)
            elif any(-1 in tuple(net.get_input(i).shape) for i in range(net.num_inputs)):
                prof = b.create_optimization_profile()
                for i in range(net.num_inputs):
                    q = net.get_input(i)
                    if -1 in tuple(q.shape): prof.set_shape(q.name, *([feeds[q.name].shape] * 3))
                cfg.add_optimization_profile(prof)
            stage(kind, "build"); plan = b.build_serialized_network(net, cfg)
            if plan is None: res[kind] = {"error": "build failed"}; continue
            rt = trt.Runtime(log); rt.engine_host_code_allowed = True; eng = rt.deserialize_cuda_engine(plan); ctx = eng.create_execution_context(); keep += [rt, eng, ctx]
            r = {"build_s": round(time.time() - t0, 1), "layers": eng.num_layers, "mb": round(plan.nbytes / 1e6, 2), "workspace_mb": round(eng.device_memory_size / 1e6, 2)}
            bufs = {}; ins = dict(feeds)
            if shape and (shape[1], shape[0]) != ins["x"].shape[:2]:
                g5 = np.random.default_rng(5); ins = {n: g5.standard_normal((shape[1], shape[0], a.shape[2])).astype(np.float32) for n, a in ins.items()}
            for i in range(eng.num_io_tensors):
                n = eng.get_tensor_name(i)
                if eng.get_tensor_mode(n) == trt.TensorIOMode.INPUT:
                    a = np.ascontiguousarray(ins[n].astype(trt.nptype(eng.get_tensor_dtype(n)))); keep.append(a)
                    if eng.is_shape_inference_io(n): ctx.set_tensor_address(n, a.ctypes.data); continue
                    d = P(); ok(lib.gt_malloc(ctypes.byref(d), ctypes.c_size_t(max(a.nbytes, 256))), "malloc"); ok(lib.gt_put(d, P(a.ctypes.data), ctypes.c_size_t(a.nbytes)), "put"); ctx.set_input_shape(n, a.shape); ctx.set_tensor_address(n, d.value)
            for i in range(eng.num_io_tensors):
                n = eng.get_tensor_name(i)
                if eng.get_tensor_mode(n) == trt.TensorIOMode.OUTPUT:
                    shp = tuple(ctx.get_tensor_shape(n)); shp = tuple(shp); a = np.empty(shp, trt.nptype(eng.get_tensor_dtype(n)))
                    d = P(); ok(lib.gt_malloc(ctypes.byref(d), ctypes.c_size_t(max(a.nbytes, 256))), "malloc"); lib.gt_set(d, 255, ctypes.c_size_t(max(a.nbytes, 256))); ctx.set_tensor_address(n, d.value); bufs[n] = (d, a)
            stage(kind, "execute")
            for _ in range(3):
                if not ctx.execute_async_v3(s.value): raise RuntimeError(f"{kind}: execute failed")
            ok(lib.gt_stream_sync(s), "run")
            def read():
                for n, (d, a) in bufs.items(): ok(lib.gt_get(P(a.ctypes.data), d, ctypes.c_size_t(a.nbytes)), "get")
                return {n: a.astype(np.float64) for n, (d, a) in bufs.items()}
            got = read(); r["outputs"] = got
            if ins["x" if "x" in ins else next(iter(ins))] is feeds["x" if "x" in feeds else next(iter(feeds))]: r["err"] = {n: float(np.sqrt(((g - want[n]) ** 2).mean()) / (np.sqrt((want[n].astype(np.float64) ** 2).mean()) + 1e-12)) for n, g in got.items()}
            stage(kind, "capture")
            try:
                ok(lib.gt_begin(s), "capture"); good = ctx.execute_async_v3(s.value); e = P(); ok(lib.gt_end(s, ctypes.byref(e)), "end of capture")
                if not good: raise RuntimeError("execute in capture failed")
                ok(lib.gt_launch(e, s), "graph"); ok(lib.gt_stream_sync(s), "graph"); again = read(); r["graph_same"] = all(np.array_equal(got[n], again[n]) for n in got); execs[kind] = e
                if kind == "fused":
                    a, b_ = (ctypes.c_float * 50)(), (ctypes.c_float * 50)(); ok(lib.gt_pair(e, e, s, 50, a, b_), "timing"); r["us"] = round(float(np.median(a)), 1)
            except RuntimeError as f: r["graph"] = str(f)
            res[kind] = r
        if len(execs) == 2:
            a, b_ = (ctypes.c_float * 100)(), (ctypes.c_float * 100)(); ok(lib.gt_pair(execs["auto"], execs["fused"], s, 100, a, b_), "timing"); res["auto"]["us"], res["fused"]["us"] = round(float(np.median(a)), 1), round(float(np.median(b_)), 1)
        outs = [res[k].pop("outputs") for k in ("auto", "fused") if "outputs" in res.get(k, {})]
        if len(outs) == 2: res["differ"] = {n: float(np.sqrt(((outs[0][n] - outs[1][n]) ** 2).mean()) / (np.sqrt((outs[0][n] ** 2).mean()) + 1e-12)) for n in outs[0]}
        tell()

def show(r):
    print(r["name"], r["precision"], r["shape"] or "", *(f"{k}: {r[k].get('us')} us, {r[k].get('layers')} layers, err {({n: round(e, 6) for n, e in r[k].get('err', {}).items()})} {r[k].get('error', '')}{r[k].get('graph', '')}{'' if r[k].get('graph_same', True) else ' GRAPH DIFFERS'} ws {r[k].get('workspace_mb')} MB built {r[k].get('build_s')} s;" for k in ("fused", "auto") if k in r), *(("differ", {n: round(e, 6) for n, e in r["differ"].items()}) if "differ" in r else ()), flush=True)

def main():
    if sys.argv[1:2] == ["--many"]: return many(sys.argv[2:])
    files = [f for d in DIRS for f in d.glob("*.fused.onnx")]; asked = sys.argv[1:] or ["bert", "vit", ""]
    models = list(dict.fromkeys(":".join(f.name.split(".")[:2]) for a in asked for f in sorted(files) if a in f.name))
    out = {}; start = time.time(); budget = float(os.environ.get("BUDGET", "150")); limit, auto_limit = (float(os.environ.get(n, "40")) for n in ("LIMIT", "AUTO_LIMIT")); i = 0
    while i < len(models) and time.time() - start < budget - 5:
        child = subprocess.Popen([sys.executable, __file__, "--many", *models[i:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True); first = i; state = {"at": i, "since": time.time(), "limit": limit}
        def pump():
            at = first - 1
            for line in child.stdout:
                line = line.rstrip()
                if line.startswith("AT "): at += 1; state.update(at=at, since=time.time(), limit=limit); print("--", models[at], f"{time.time() - start:.0f} s", flush=True)
                elif line.startswith("RESULT "):
                    r = json.loads(line[7:]); out[r["name"], r["precision"], str(r["shape"])] = r; show(r); json.dump(list(out.values()), open(Path(os.environ.get("OUT", ".")) / "engines.json", "w"), indent=1)
                elif line.startswith("STAGE"):
                    print("    ", line, flush=True)
                    if line.startswith("STAGE auto parse"): state.update(since=time.time(), limit=auto_limit)
                elif "Deprecat" not in line and "device_memory_size" not in line and line.strip(): print("    ", line[:400], flush=True)
        th = threading.Thread(target=pump); th.start()
        while th.is_alive():
            th.join(0.1)
            if time.time() - state["since"] > state["limit"] or time.time() - start > budget: print("     time is up for", models[state["at"]], flush=True); child.kill(); th.join()
        code = child.wait(); i = state["at"] + 1
        if code: print("     ended with", code, flush=True)
    if i < len(models): print("no time left for", models[i:])
if __name__ == "__main__": main()
