"""Writes gpu_try/engine/: for each model NAME.auto.onnx and NAME.fused.onnx as TensorRT's parser takes them, NAME.npz (inputs, outputs of
onnxruntime in float32), and the plugin library for sm_90."""
import shutil, sys, tempfile
from pathlib import Path
import numpy as np, onnx, onnxruntime as ort
from onnx import numpy_helper
from tests.fusions import recurrences
from tests.fusions.recurrences import Stack
from onnxfuse import pipeline, plugins
from onnxfuse.engine import prepare
OUT = Path(__file__).parent / "engine"
def stack(cell, layers, H, I, T, B, direction="forward", **kw):
    recurrences.WIDTH, recurrences.STEPS, recurrences.BATCH = I, T, B
    m, f = Stack(cell, layers, direction=direction, hidden=H, **kw).model()
    rng = np.random.default_rng(1)
    for t in m.graph.initializer:  # weights as a trained-like module has them
        a = numpy_helper.to_array(t)
        if a.dtype == np.float32 and a.any(): t.CopyFrom(numpy_helper.from_array(rng.uniform(-1, 1, a.shape).astype(np.float32) / np.sqrt(H).astype(np.float32), t.name))
    return m, f
def real(name):
    path = Path("/work/main/models/real") / f"{name}.onnx"; m = onnx.load(path); rng = np.random.default_rng(0)
    shapes = {"aecmos": {"input": (1, 3, 100, 160), "h0": (4, 1, 64)}, "silero-vad": {"input": (1, 576), "state": (2, 1, 128)}, "deepfilternet-erb": {"emb": (1, 32, 512), "e3": (1, 64, 32, 8), "e2": (1, 64, 32, 8), "e1": (1, 64, 32, 16), "e0": (1, 64, 32, 32)}}[name]
    f = {n: (rng.standard_normal(s) * 0.3).astype(np.float32) for n, s in shapes.items()}
    if name == "silero-vad": f["sr"] = np.array(16000, np.int64)
    for v in m.graph.input: assert v.name in f, v.name
    return m, f
def dynamic(pair, T, B):
    m, f = pair
    for v in m.graph.input:
        if v.name == "x": v.type.tensor_type.shape.dim[0].dim_param, v.type.tensor_type.shape.dim[1].dim_param = "B", "T"
    for v in m.graph.output:
        for i, d in enumerate(v.type.tensor_type.shape.dim): d.Clear()
    return m, f
MODELS = {
    "lstm_2x512_t100_b1": lambda: stack("LSTM", 2, 512, 512, 100, 1), "bilstm_2x128_t60_b32": lambda: stack("LSTM", 2, 128, 128, 60, 32, "bidirectional"),
    "gru_1x256_t200_b1": lambda: stack("GRU", 1, 256, 256, 200, 1, attrs={"linear_before_reset": 1}),
    "lstm_2x512_dynamic": lambda: dynamic(stack("LSTM", 2, 512, 64, 50, 8, states=None), 50, 8), "lstm_1x1024_dynamic": lambda: dynamic(stack("LSTM", 1, 1024, 64, 50, 8, states=None), 50, 8),
    "gru_1x256_dynamic": lambda: dynamic(stack("GRU", 1, 256, 256, 50, 8, states=None, attrs={"linear_before_reset": 1}), 50, 8),
    "lstm_states_lengths": lambda: stack("LSTM", 2, 64, 24, 5, 3, "bidirectional", states="given", lengths=True), "gru_reset_first": lambda: stack("GRU", 2, 48, 24, 30, 3, "reverse", states="given"),
    "deepfilternet": lambda: real("deepfilternet-erb"), "aecmos": lambda: real("aecmos"), "silero": lambda: real("silero-vad"),
}
PRECISIONS = {"silero": ("fp32", "fp16"), "gru_1x256_t200_b1": ("fp16", "fp32")}
def run(path, f):
    o = ort.SessionOptions(); o.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    s = ort.InferenceSession(str(path), o, providers=["CPUExecutionProvider"]); return dict(zip([v.name for v in s.get_outputs()], s.run(None, f)))
def main():
    OUT.mkdir(exist_ok=True)
    lib = plugins.build(90); shutil.copy(lib.path, OUT / "plugins.bin")
    for name, make in MODELS.items():
        if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]): continue
        m, f = make()
        with tempfile.TemporaryDirectory() as d:
            src = Path(d) / "m.onnx"; onnx.save(m, src); want = run(src, f)
            np.savez(OUT / f"{name}.npz", **{f"in_{k}": v for k, v in f.items()}, **{f"out_{k}": v for k, v in want.items()})
            for precision in PRECISIONS.get(name, ("fp16",)):
                if precision == "bf16": m2 = Stack("LSTM", 2, hidden=512, opset=22).model()[0] if name.startswith("lstm_2x512_t100") else m; onnx.save(m2, src)
                for kind, policy, only in (("auto", "none", []), ("fused", "all", ["lstm", "gru"])):
                    out = Path(d) / f"{kind}.onnx"
                    r = pipeline.optimize(src, out, policy=policy, only=only, precision="keep" if precision == "fp32" else precision, check=False)
                    got = run(out, f); err = max(float(np.abs(got[k].astype(np.float64) - want[k]).max()) for k in want)
                    data = prepare.for_parser(out, plugins.PLUGIN_OPS if kind == "fused" else frozenset())
                    (OUT / f"{name}.{precision}.{kind}.onnx").write_bytes(data)
                    used = [(n.op_type, [i for i in n.input], [onnx.helper.get_attribute_value(a) for a in n.attribute if a.name == "layers"]) for g in prepare._all_graphs(onnx.load_from_string(data)) for n in g.node if n.domain == "onnxfuse"]
                    print(name, precision, kind, f"max error in onnxruntime {err:.1e}", [u[0] + str(u[2]) for u in used], f"{len(data) / 1e6:.1f} MB", [x for x in r.notes][:2])
main()
