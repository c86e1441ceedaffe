"""ConvNeXt-tiny in TensorRT: the fused engine and TensorRT's own, float16, as CUDA graphs in turn. Needs tensorrt, onnx, onnx_graphsurgeon, numpy, and the source of
onnxfuse in $SRC (src, which src.tgz is). engine_try.py [BATCH...] (1 32 8); JSON and the layers to $OUT. BUDGET: seconds for all (120); PLUGINS: plugins.bin, or that without early
starts, plugins_in_turn.bin. One child process for each batch; a child that takes too long is stopped, and what it printed stays."""
import ctypes, json, os, subprocess, sys, threading, time
from pathlib import Path
import numpy as np
HERE = Path(__file__).resolve().parent; OUT = Path(os.environ.get("OUT", ".")); SRC = Path(os.environ.get("SRC", HERE / "src")); WORK = Path(os.environ.get("WORK", "/tmp/epi_engines"))
P = ctypes.c_void_p

def one(batch, only_fused):
    begun = time.time(); tag = f"b{batch}" + ("_in_turn" if only_fused else "")
    def say(*words): print(tag, *words, f"{time.time() - begun:.1f} s", flush=True)
    if not (WORK / f"b{batch}.fused.onnx").exists():
        r = subprocess.run([sys.executable, str(HERE / "prepare_engines.py"), str(batch), str(WORK)], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])}, capture_output=True, text=True); print(r.stdout[-1500:], r.stderr[-1500:])
    import tensorrt as trt
    lib = ctypes.CDLL(str(HERE / "epilogues.bin")); lib.gt_error.restype = ctypes.c_char_p
    def ok(e, what):
        if e: raise RuntimeError(f"{what}: {lib.gt_error(e).decode()}")
    class Log(trt.ILogger):
        def __init__(self): trt.ILogger.__init__(self)
        def log(self, severity, msg):
            if severity <= trt.ILogger.WARNING and "onnx2trt" not in msg: print("TRT:", msg[:300], flush=True)
    log = Log(); trt.init_libnvinfer_plugins(log, ""); plugins = str(HERE / ("plugins_in_turn.bin" if only_fused else "plugins.bin"))
    if trt.get_plugin_registry().load_library(plugins) is None: raise RuntimeError("the plugin library does not load")
    sys.path.insert(0, str(HERE)); from expand import image
    want = np.load(HERE / "engine" / "want.npz")[f"b{batch}"]; feed = image(batch); s = P(); ok(lib.gt_stream(ctypes.byref(s)), "stream"); say("ready")
    res = dict(batch=batch, in_turn=only_fused); execs, outs, keep = {}, {}, []
    def put(a): d = P(); ok(lib.gt_malloc(ctypes.byref(d), ctypes.c_size_t(a.nbytes)), "malloc"); ok(lib.gt_put(d, P(a.ctypes.data), ctypes.c_size_t(a.nbytes)), "put"); return d
    for kind in ("fused",) if only_fused else ("fused", "auto"):
        t0 = time.time(); b = trt.Builder(log); net = b.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)); parser = trt.OnnxParser(net, log)
        if not parser.parse((WORK / f"b{batch}.{kind}.onnx").read_bytes()): res[kind] = {"error": "; ".join(str(parser.get_error(i)) for i in range(min(3, parser.num_errors)))}; say(kind, res[kind]); continue
        cfg = b.create_builder_config(); cfg.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        plan = b.build_serialized_network(net, cfg)
        if plan is None: res[kind] = {"error": "build failed"}; say(kind, res[kind]); continue
        rt = trt.Runtime(log); eng = rt.deserialize_cuda_engine(plan); ctx = eng.create_execution_context(); keep += [rt, eng, ctx, b, net, parser, cfg]
        r = res[kind] = {"build_s": round(time.time() - t0, 1), "layers": eng.num_layers}; say(kind, "built", r)
        (OUT / f"{tag}.{kind}.layers.json").write_text(eng.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))
        d, o = put(feed), put(np.zeros_like(want)); ctx.set_tensor_address("image", d.value); ctx.set_tensor_address("logits", o.value)
        def read(): a = np.empty_like(want); ok(lib.gt_get(P(a.ctypes.data), o, ctypes.c_size_t(a.nbytes)), "get"); return a
        for _ in range(3):
            if not ctx.execute_async_v3(s.value): raise RuntimeError(f"{kind}: execute failed")
        ok(lib.gt_stream_sync(s), "run"); outs[kind] = got = read()
        r["err"] = float(np.sqrt(((got - want) ** 2).mean()) / np.sqrt((want ** 2).mean())); r["max_abs"] = float(np.abs(got - want).max()); say(kind, "error against float32", r["err"])
        ok(lib.gt_begin(s), "capture"); good = ctx.execute_async_v3(s.value); e = P(); ok(lib.gt_end(s, ctypes.byref(e)), "end of capture")
        if not good: raise RuntimeError("execute in capture failed")
        ok(lib.gt_replay(e, s), "graph"); ok(lib.gt_stream_sync(s), "graph"); r["graph_same"] = bool(np.array_equal(got, read())); execs[kind] = e
        x, y = (ctypes.c_float * 100)(), (ctypes.c_float * 100)(); ok(lib.gt_pair(e, e, s, 100, x, y), "timing"); r["us_alone"] = round(float(np.median(x)), 1); r["graph_same_after"] = bool(np.array_equal(got, read())); say(kind, r)
        class Profile(trt.IProfiler):
            def __init__(self): trt.IProfiler.__init__(self); self.us = {}
            def report_layer_time(self, name, ms): self.us.setdefault(name, []).append(1000 * ms)
        prof = Profile(); ctx2 = eng.create_execution_context(); ctx2.profiler = prof; ctx2.set_tensor_address("image", d.value); ctx2.set_tensor_address("logits", o.value); keep += [prof, ctx2]
        for _ in range(15): ctx2.execute_async_v3(s.value); lib.gt_stream_sync(s)
        r["layer_us"] = {n: round(float(np.median(v)), 2) for n, v in prof.us.items()}; json.dump(res, open(OUT / f"{tag}.json", "w"), indent=1)
    if len(execs) == 2:
        x, y = (ctypes.c_float * 200)(), (ctypes.c_float * 200)(); ok(lib.gt_pair(execs["auto"], execs["fused"], s, 200, x, y), "timing"); a, f = float(np.median(x)), float(np.median(y))
        res["pair_us"] = dict(auto=round(a, 1), fused=round(f, 1), faster=round(a / f, 3)); res["differ"] = float(np.sqrt(((outs["auto"] - outs["fused"]) ** 2).mean()) / np.sqrt((outs["auto"] ** 2).mean())); say("IN TURN", res["pair_us"], "outputs differ by", round(res["differ"], 5))
    json.dump(res, open(OUT / f"{tag}.json", "w"), indent=1)

def main():
    if sys.argv[1:2] == ["--child"]: return one(int(sys.argv[2]), sys.argv[3] == "in_turn")
    OUT.mkdir(parents=True, exist_ok=True)
    if not SRC.exists(): SRC.mkdir(parents=True); subprocess.run(["tar", "xzf", str(HERE / "src.tgz"), "-C", str(SRC)], check=True)
    start = time.time(); budget = float(os.environ.get("BUDGET", "120")); jobs = [(b, "") for b in (sys.argv[1:] or ["1", "32"])]
    if (HERE / "plugins_in_turn.bin").exists() and not sys.argv[1:]: jobs.insert(1, ("1", "in_turn"))
    for batch, how in jobs + ([("8", "")] if not sys.argv[1:] else []):
        left = budget - (time.time() - start)
        if left < 15: print("no time left for", batch, how); continue
        child = subprocess.Popen([sys.executable, __file__, "--child", batch, how or "early"], stderr=subprocess.STDOUT)
        try: code = child.wait(left)
        except subprocess.TimeoutExpired: child.kill(); print("time is up for", batch, how, flush=True); continue
        if code: print(batch, how, "ended with", code, flush=True)
    print(f"{time.time() - start:.0f} s")
if __name__ == "__main__": main()
