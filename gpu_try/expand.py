"""Makes the float32 model of a skeleton (make_skeleton.py): expand(skeleton, path, batch). numpy and onnx."""
import json
import numpy as np

def image(batch): return np.random.default_rng(7).standard_normal((batch, 3, 224, 224), dtype=np.float32)

def expand(skeleton, path, batch):
    import onnx
    from onnx import numpy_helper
    m = onnx.load(skeleton); rng = np.random.default_rng(3)
    for w in json.loads(next(p.value for p in m.metadata_props if p.key == "weights")):
        m.graph.initializer.append(numpy_helper.from_array((rng.standard_normal(w["shape"], dtype=np.float32) * np.float32(w["std"]) + np.float32(w["mean"])), w["name"]))
    del m.metadata_props[:]
    for v in (m.graph.input[0], m.graph.output[0]): v.type.tensor_type.shape.dim[0].Clear(); v.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(m, path)
