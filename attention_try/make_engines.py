"""Writes attention_try/engine/: for each model NAME.PRECISION.auto.onnx and .fused.onnx as TensorRT's parser takes them, NAME.npz (inputs, outputs
of onnxruntime in float32), and the plugin library for sm_90."""
import shutil, sys, tempfile
from pathlib import Path
import numpy as np, onnx, onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxfuse import pipeline, plugins
from onnxfuse.engine import prepare
OUT = Path(__file__).parent / "engine"
class Net:
    def __init__(self): self.n, self.w, self.rng = [], [], np.random.default_rng(0)
    def op(self, t, *i, out=None, **a):
        o = out or f"t{len(self.n)}"; self.n.append(helper.make_node(t, list(i), [o] if isinstance(o, str) else o, name=f"{t}_{len(self.n)}", **a)); return o
    def c(self, v, d=np.float32): self.w.append(numpy_helper.from_array(np.asarray(v, d), f"c{len(self.w)}")); return self.w[-1].name
    def ints(self, *v): return self.c(list(v), np.int64)
    def linear(self, x, i, o): return self.op("Add", self.op("MatMul", x, self.c(self.rng.standard_normal((i, o)) / np.sqrt(i))), self.c(self.rng.standard_normal(o) * 0.1))
    def norm(self, x, w): return self.op("LayerNormalization", x, self.c(np.ones(w)), self.c(np.zeros(w)), axis=-1)
def block(n, x, W, H, D, KV=None, mask=None, bias=None, windows=None, keep=None, rope=None, batch=1, rows=None):
    KV = KV or H; y = n.norm(x, W)
    def heads(t, h, perm): return n.op("Transpose", n.op("Reshape", t, n.ints(0, 0, h, D)), perm=perm)
    q, k, v = (heads(n.linear(y, W, h * D), h, [0, 2, 1, 3]) for h in (H, KV, KV))
    if rope:
        def turn(t):
            low, high = (n.op("Slice", t, n.ints(a), n.ints(b), n.ints(-1)) for a, b in ((0, D // 2), (D // 2, D)))
            return n.op("Add", n.op("Mul", t, rope[0]), n.op("Mul", n.op("Concat", n.op("Neg", high), low, axis=-1), rope[1]))
        q, k = turn(q), turn(k)
    if KV != H:
        rep = lambda t: n.op("Reshape", n.op("Expand", n.op("Unsqueeze", t, n.ints(2)), n.ints(batch, KV, H // KV, rows, D)), n.ints(batch, H, rows, D))
        k, v = rep(k), rep(v)
    s = n.op("Mul", n.op("MatMul", q, n.op("Transpose", k, perm=[0, 1, 3, 2])), n.c(D ** -0.5))
    for m in (mask, bias):
        if m: s = n.op("Add", s, m)
    if windows is not None: s = n.op("Reshape", n.op("Add", n.op("Reshape", s, n.ints(batch // windows.shape[1], windows.shape[1], H, rows, rows)), n.c(windows)), n.ints(batch, H, rows, rows))
    if keep: s = n.op("Where", keep, s, n.c(-10000.0))
    z = n.op("Reshape", n.op("Transpose", n.op("MatMul", n.op("Softmax", s, axis=-1), v), perm=[0, 2, 1, 3]), n.ints(0, 0, H * D))
    return n.op("Add", n.linear(z, H * D, W), x)
def model(B, S, W, H, D, layers, kind="", dynamic=False):
    n = Net(); f = {"x": np.random.default_rng(1).standard_normal((B, S, W)).astype(np.float32)}; k = {}; rng = np.random.default_rng(2)
    if kind == "padding": f["mask"] = np.where(np.arange(S) < S * 4 // 5, 0, -10000.0).astype(np.float32).reshape(1, 1, 1, S).repeat(B, 0); k["mask"] = "mask"
    if kind == "bool": f["keep"] = (np.arange(S) < S * 4 // 5).reshape(1, 1, 1, S).repeat(B, 0); k["keep"] = "keep"
    if kind == "swin": k.update(bias=n.c(rng.standard_normal((1, H, S, S))), windows=np.where(rng.random((1, B, 1, S, S)) < 0.2, -100.0, 0).astype(np.float32), batch=B, rows=S)
    if kind == "llama":
        ang = np.arange(S)[:, None] / 10000 ** (np.arange(D // 2) / (D // 2)); ang = np.concatenate([ang, ang], 1)[None, None]
        k.update(KV=H // 4, batch=B, rows=S, rope=(n.c(np.cos(ang)), n.c(np.sin(ang))), mask=n.c(np.where(np.tril(np.ones((S, S))) > 0, 0, -65504.0)[None, None]))
    x = "x"
    for _ in range(layers): x = block(n, x, W, H, D, **k)
    n.op("Identity", x, out="y"); kinds = {n_: TensorProto.BOOL if a.dtype == bool else TensorProto.FLOAT for n_, a in f.items()}
    sh = lambda name, a: ["B", "S", W] if dynamic and name == "x" else list(a.shape)
    g = helper.make_graph(n.n, "g", [helper.make_tensor_value_info(a, kinds[a], sh(a, v)) for a, v in f.items()], [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "S", W] if dynamic else [B, S, W])], n.w)
    return helper.make_model(g, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), f
MODELS = {"bert_b1_s128": lambda: model(1, 128, 768, 12, 64, 1, "padding"), "vit_b1_s257": lambda: model(1, 257, 384, 6, 64, 4), "dynamic": lambda: model(2, 64, 384, 6, 64, 2, dynamic=True),
    "swin_64w": lambda: model(64, 49, 96, 3, 32, 4, "swin"), "bool_b2_s100": lambda: model(2, 100, 384, 6, 64, 2, "bool"), "llama_b1_s128": lambda: model(1, 128, 512, 8, 64, 2, "llama")}
PRECISIONS = {"bool_b2_s100": ("fp16", "fp32")}
def run(path, f):
    o = ort.SessionOptions(); o.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    s = ort.InferenceSession(str(path), o, providers=["CPUExecutionProvider"]); return dict(zip([v.name for v in s.get_outputs()], s.run(None, f)))
OUT.mkdir(exist_ok=True); lib = plugins.build(90); shutil.copy(lib.path, OUT / "plugins.bin")
for name, make in MODELS.items():
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]): continue
    m, f = make()
    with tempfile.TemporaryDirectory() as d:
        src = Path(d) / "m.onnx"; onnx.save(m, src); want = run(src, f); np.savez(OUT / f"{name}.npz", **{f"in_{k}": v for k, v in f.items()}, **{f"out_{k}": v for k, v in want.items()})
        for precision in PRECISIONS.get(name, ("fp16",)):
            for kind, policy, only in (("auto", "none", []), ("fused", "all", ["qkv_pack", "rope", "attention"])):
                out = Path(d) / f"{kind}.onnx"; r = pipeline.optimize(src, out, policy=policy, only=only, precision="keep" if precision == "fp32" else precision, check=False)
                got = run(out, f); err = max(float(np.abs(got[k].astype(np.float64) - want[k]).max()) for k in want); data = prepare.for_parser(out, plugins.PLUGIN_OPS if kind == "fused" else frozenset()); (OUT / f"{name}.{precision}.{kind}.onnx").write_bytes(data)
                print(name, precision, kind, f"max error in onnxruntime {err:.1e}", [n.op_type for n in onnx.load(out).graph.node if n.domain == "onnxfuse"], f"{len(data) / 1e6:.1f} MB", flush=True)
