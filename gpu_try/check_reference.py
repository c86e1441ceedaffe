import numpy as np, onnx, onnxruntime as ort, itertools
from onnx import helper, TensorProto
from reference import recurrence
rng = np.random.default_rng(0); T, B, I, H = 7, 4, 5, 8; worst = 0
for cell, mask, D, bias, init, lens, clip in itertools.product((0, 1, 2), (0, 1, 2), (1, 2), (0, 1), (0, 1), (0, 1), (0, 0.5)):
    if (D == 1) != (mask < 2): continue
    if D == 2: mask = 2
    G = 4 if cell == 0 else 3
    f = lambda *s: rng.standard_normal(s).astype(np.float32)
    x, w, r = f(T, B, I), f(D, G * H, I), f(D, G * H, H); b = f(D, 2 * G * H) if bias else None
    h0 = f(D, B, H) if init else None; c0 = f(D, B, H) if init else None; L = np.array([7, 3, 5, 1], np.int32) if lens else None
    feeds = {k: v for k, v in dict(x=x, w=w, r=r, b=b, l=L, h=h0, c=c0 if cell == 0 else None).items() if v is not None}
    names = [n if n in feeds else "" for n in ("x", "w", "r", "b", "l", "h", "c")][:7 if cell == 0 else 6]
    at = dict(hidden_size=H, direction="bidirectional" if D == 2 else ("forward", "reverse")[mask])
    if clip: at["clip"] = clip
    if cell: at["linear_before_reset"] = int(cell == 1)
    outs = ["y", "yh"] + (["yc"] if cell == 0 else [])
    node = helper.make_node("LSTM" if cell == 0 else "GRU", names, outs, **at)
    g = helper.make_graph([node], "g", [helper.make_tensor_value_info(k, TensorProto.INT32 if k == "l" else TensorProto.FLOAT, v.shape) for k, v in feeds.items()], [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outs])
    m = helper.make_model(g, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    got = ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    want = recurrence(cell, x, w, r, b, h0, c0, L, mask, clip)
    e = max(np.abs(a - v).max() for a, v in zip(got, want)); worst = max(worst, e)
    if e > 1e-5: print("differs", dict(cell=cell, mask=mask, D=D, bias=bias, init=init, lens=lens, clip=clip), [float(np.abs(a - v).max()) for a, v in zip(got, want)])
print("worst", worst)
