"""make_skeleton.py CONVNEXT_TINY.onnx: writes engine/skeleton.onnx, the float32 graph of convnext_tiny without its weights, whose initializers expand.py makes
from a seed, and engine/want.npz, logits of onnxruntime in float32. Each use of a weight has a weight of its own; the pooling that the exporter wrote as a Gather is left out."""
import json, sys
from pathlib import Path
import numpy as np, onnx
from onnx import TensorProto, helper, numpy_helper
HERE = Path(__file__).parent; OUT = HERE / "engine"

def skeleton(path):
    m = onnx.load(path); g = m.graph; consts = {i.name: numpy_helper.to_array(i) for i in g.initializer}; made = []; inits = []
    drop = {"image_half": "image", "as_strided": "mean", "val_228": None}; nodes = []
    for n in g.node:
        if n.output[0] in ("image_half", "val_228", "as_strided"): continue
        if n.op_type == "Cast": drop[n.output[0]] = n.input[0]; continue
        for i, name in enumerate(n.input):
            if name in ("image_half", "as_strided"): n.input[i] = drop[name]
            elif name in consts and consts[name].dtype.kind == "f":
                a = consts[name]; new = f"w{len(made)}"
                if a.ndim == 4 and a.shape[2] > 1 or n.op_type == "Conv": mean, std = 0.0, 1 / np.sqrt(np.prod(a.shape[1:]))
                elif a.ndim == 4: mean, std = 0.0, 0.3
                elif a.ndim == 2: mean, std = 0.0, 1 / np.sqrt(a.shape[1 if n.op_type == "Gemm" else 0])
                else: mean, std = (1.0 if n.op_type == "LayerNormalization" and i == 1 else 0.0), 0.1
                made.append(dict(name=new, shape=list(a.shape), mean=float(mean), std=float(std))); n.input[i] = new
            elif name in consts and name not in {i.name for i in inits}:
                inits.append(numpy_helper.from_array(np.array([-1, 768], np.int64) if name == "val_235" else consts[name], name))
        if n.output[0] == "logits_half": n.output[0] = "logits"
        nodes.append(n)
    graph = helper.make_graph(nodes, "convnext_tiny", [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["B", 3, 224, 224])], [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", 1000])], inits)
    out = helper.make_model(graph, opset_imports=m.opset_import, ir_version=m.ir_version)
    helper.set_model_props(out, {"weights": json.dumps(made)}); return out

if __name__ == "__main__":
    OUT.mkdir(exist_ok=True); onnx.save(skeleton(sys.argv[1]), OUT / "skeleton.onnx")
    import onnxruntime as ort
    from expand import expand, image
    want = {}
    for batch in (1, 8, 32):
        expand(OUT / "skeleton.onnx", Path("/tmp/epi/m.onnx"), batch); want[f"b{batch}"] = ort.InferenceSession("/tmp/epi/m.onnx", providers=["CPUExecutionProvider"]).run(None, {"image": image(batch)})[0]; print(batch, want[f"b{batch}"].std())
    np.savez(OUT / "want.npz", **want)
