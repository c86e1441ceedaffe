"""Half precision: right types everywhere, finite and close where float16 would overflow."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.errors import BadInput
from onnxfuse.graph import functions, precision, write
from onnxfuse.graph.precision import PrecisionReport, convert
from tests.graph.models import Array, function, load, normal, parse, run, saved, transformer

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def halved(model: ModelProto, folder: Path, kind: str = "fp16", **options: object) -> tuple[ModelProto, PrecisionReport]:
    """The converted model; its types are checked by onnx's strict inference, and its interface is the original's."""
    loaded = load(model, folder)
    report = convert(loaded, kind, **options)  # type: ignore[arg-type]
    after = saved(loaded, folder)
    onnx.shape_inference.infer_shapes(after, check_type=True, strict_mode=True)
    assert [*after.graph.input, *after.graph.output] == [*model.graph.input, *model.graph.output]
    return after, report


def ranges_of(model: ModelProto, feeds: dict[str, Array]) -> dict[str, float]:
    """Largest absolute value of every float32 tensor."""
    typed = onnx.shape_inference.infer_shapes(model)
    whole = ModelProto()
    whole.CopyFrom(model)
    whole.graph.output.extend(value for value in typed.graph.value_info if value.type.tensor_type.elem_type == FLOAT)
    values = {**run(whole, feeds), **feeds}
    return {name: float(np.abs(value).max()) for name, value in values.items() if value.dtype == np.float32}


def close(got: Array, want: Array, tolerance: float = 5e-3) -> None:
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * float(np.abs(want).max()))


def reference(model: ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    """Outputs by onnx's reference implementation: onnxruntime computes half in float32 where it has no kernel, and drops casts."""
    results = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    return {value.name: np.asarray(result) for value, result in zip(model.graph.output, results, strict=True)}


def types(model: ModelProto) -> dict[str, int]:
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    return {value.name: value.type.tensor_type.elem_type for value in (*typed.graph.value_info, *typed.graph.input, *typed.graph.output)}


def casts(model: ModelProto) -> list[tuple[str, str]]:
    return [(node.input[0], node.output[0]) for node in model.graph.node if node.op_type == "Cast"]


def test_casts_only_at_the_edges_one_a_tensor(tmp_path: Path) -> None:
    model = parse(
        HEAD + "g (float[2,8] x) => (float[2,8] y, float[2,8] z) {a = MatMul(x, w) b = Add(x, a) y = Relu(b) c = Mul(x, y) z = Add(c, v)}",
        w=normal(8, 8), v=normal(8),
    )  # fmt: skip
    after, report = halved(model, tmp_path)
    assert len(casts(after)) == report.casts == 3
    assert report.half_nodes == 5
    assert {tensor.name: tensor.data_type for tensor in after.graph.initializer} == {"w": HALF, "v": HALF}
    feeds = {"x": normal(2, 8, seed=1)}
    for name, want in run(model, feeds).items():
        close(run(after, feeds)[name], want)


def test_every_node_reads_one_float_type(tmp_path: Path) -> None:
    model = transformer(3)
    after, report = halved(model, tmp_path)
    kinds = types(after)
    kinds.update({tensor.name: tensor.data_type for tensor in after.graph.initializer})
    for node in after.graph.node:
        assert len({kinds[name] for name in node.input} & {HALF, FLOAT}) == 1, node
    assert {reason for _, _, reason in report.float_nodes} == {"norm statistics"}
    x = {"x": normal(2, 9, 32)}
    close(run(after, x)["y"], run(model, x)["y"], 1e-2)


def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    model = parse(
        HEAD + "g (float[2,64] x) => (float[2,64] y) { a = MatMul(x, w) b = MatMul(a, w) y = MatMul(b, w) }", w=normal(64, 64) / 8
    )
    after, _ = halved(model, tmp_path)
    assert [tensor.name for tensor in after.graph.initializer] == ["w"]
    both, _ = halved(model, tmp_path, keep_fp32=["b"])
    assert sorted((tensor.name, tensor.data_type) for tensor in both.graph.initializer) == [("w", FLOAT), ("w_half", HALF)]


def test_what_the_caller_keeps(tmp_path: Path) -> None:
    model = parse(HEAD + "g (float[2,4] x) => (float[2,4] y) { a = Exp(x) b = Relu(a) c = Tanh(b) d = Exp(c) y = Neg(d) }")
    for i, node in enumerate(model.graph.node):
        node.name = f"node{i}"
    for keep, expected in {"node2": {"node2"}, "Exp": {"node0", "node3"}, "b": {"node1", "node2"}, "x": {"node0"}}.items():
        _, report = halved(model, tmp_path, keep_fp32=[keep])
        assert {name for name, _, _ in report.float_nodes} == expected
        assert all(keep in reason for _, _, reason in report.float_nodes)
    with pytest.raises(BadInput, match=r"no\\nbody"):
        halved(model, tmp_path, keep_fp32=["no\nbody"])
    with pytest.raises(BadInput, match="fp8"):
        halved(model, tmp_path, "fp8")


def test_neighbouring_islands_share_their_casts(tmp_path: Path) -> None:
    model = parse(
        HEAD + "g (float[2,4] x) => (float[2,4] y) { a = Relu(x) b = Exp(a) c = Reshape(b, t) d = Reshape(c, s) e = Log(d) y = Abs(e) }",
        s=np.array([2, 4]), t=np.array([8]),
    )  # fmt: skip
    after, report = halved(model, tmp_path, keep_fp32=["Exp", "Log"])
    assert {op for _, op, _ in report.float_nodes} == {"Exp", "Reshape", "Log"}
    assert report.casts == 4  # in, to the island, from the island, out
    close(run(after, {"x": normal(2, 4)})["y"], run(model, {"x": normal(2, 4)})["y"])


# --------------------------------------------------------------------------------------------------------------- overflow


@pytest.mark.parametrize("spelling", ["primitives", "native"])
def test_layernorm_of_large_values(tmp_path: Path, spelling: str) -> None:
    """Squares of values of 500 pass 65504; the statistics stay in float32."""
    body = {
        "native": "y = LayerNormalization <epsilon: float = 1e-5> (x, g, b)",
        "primitives": """m = ReduceMean <axes: ints = [-1]> (x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean <axes: ints = [-1]> (p)
                         e = Add(v, eps) s = Sqrt(e) n = Div(d, s) k = Mul(n, g) y = Add(k, b)""",
    }
    constants = {"two": np.float32(2), "eps": np.float32(1e-5)} if spelling == "primitives" else {}
    model = parse(HEAD + f"f (float[2,64] x) => (float[2,64] y) {{ {body[spelling]} }}", g=normal(64), b=normal(64), **constants)
    after, _ = halved(model, tmp_path)
    x = {"x": normal(2, 64, seed=2) * 3000}
    close(run(after, x)["y"], run(model, x)["y"])
    if spelling == "primitives":  # the reference implementation of LayerNormalization does not heed stash_type
        close(reference(after, x)["y"], run(model, x)["y"])


def test_rmsnorm_with_reciprocal_root_of_large_values(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """f (float[2,64] x) => (float[2,64] y) { p = Mul(x, x) v = ReduceMean <axes: ints = [-1]> (p) e = Add(v, eps) s = Sqrt(e)
        r = Reciprocal(s) n = Mul(x, r) y = Mul(n, g) }""",
        g=normal(64), eps=np.float32(1e-6),
    )  # fmt: skip
    after, report = halved(model, tmp_path)
    assert len(report.float_nodes) == 6
    x = {"x": normal(2, 64, seed=2) * 3000}
    close(run(after, x)["y"], run(model, x)["y"])
    close(reference(after, x)["y"], run(model, x)["y"])


def test_epsilon_that_half_cannot_hold(tmp_path: Path) -> None:
    """x / max(|x|, 1e-12): in half the bound is zero, and the quotient NaN."""
    model = parse(
        HEAD + "f (float[2,8] x) => (float[2,8] y) { a = Abs(x) m = ReduceMax <axes: ints = [-1]> (a) e = Add(m, eps) y = Div(x, e) }",
        eps=np.float32(1e-12),
    )
    after, report = halved(model, tmp_path)
    x = normal(2, 8)
    x[0] = 0
    close(run(after, {"x": x})["y"], run(model, {"x": x})["y"])
    close(reference(after, {"x": x})["y"], run(model, {"x": x})["y"])
    assert any("vanishes" in reason for _, _, reason in report.float_nodes)


@pytest.mark.parametrize("bounded", ["Max(s, eps)", "Clip(s, eps)"])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_bound_above_zero_stays_above_zero(bounded: str, kind: str, tmp_path: Path) -> None:
    """Mean over a mask that hides all tokens: 0 / max(0, 1e-9) is 0, and with a bound of zero NaN (sentence encoders' pooling)."""
    sums = "a = Mul(x, m) t = MatMul(a, one) s = MatMul(m, one)"
    text = f"f (float[2,8] x, float[2,8] m) => (float[2,1] y) {{ {sums} d = {bounded} y = Div(t, d) }}"
    model = parse(HEAD + text, one=np.ones((8, 1), np.float32), eps=np.float32(1e-9 if kind == "fp16" else 1e-43))
    after, report = halved(model, tmp_path, kind)
    feeds = {"x": normal(2, 8), "m": np.array([[0] * 8, [1] * 8], np.float32)}
    assert report.vanished == {}
    close(reference(after, feeds)["y"], reference(model, feeds)["y"])


def test_softmax_beyond_the_half_range(tmp_path: Path) -> None:
    model = parse(HEAD + "f (float[4,32] x) => (float[4,32] y) { h = MatMul(x, w) s = Mul(h, k) y = Softmax <axis: int = -1> (s) }",
                  w=normal(32, 32), k=np.float32(3000))  # fmt: skip
    x = {"x": normal(4, 32, seed=1) * 20}
    ranges = ranges_of(model, x)
    assert ranges["s"] > 65504
    overflowed, _ = halved(model, tmp_path)
    assert not np.isfinite(reference(overflowed, x)["y"]).all()
    after, report = halved(model, tmp_path, ranges=ranges)
    assert {op for _, op, _ in report.float_nodes} == {"Mul", "Softmax"}
    want = run(model, x)["y"]
    for got in (run(after, x)["y"], reference(after, x)["y"]):
        assert np.isfinite(got).all()
        assert (got.argmax(-1) == want.argmax(-1)).all()
        np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-3)


def test_a_sum_beyond_the_half_range(tmp_path: Path) -> None:
    text = """f (float[2,1000] x) => (float[2] y, float[2] z) {
        s = ReduceSum <keepdims: int = 0> (x, axis) y = Mul(s, k)
        a = Relu(x) m = ReduceMean <axes: ints = [1], keepdims: int = 0> (a) z = Neg(m)
    }"""
    model = parse(HEAD + text, axis=np.array([1]), k=np.float32(1e-3))
    x = {"x": np.abs(normal(2, 1000)) * 200}
    after, report = halved(model, tmp_path, ranges=ranges_of(model, x))
    assert {op for _, op, _ in report.float_nodes} >= {"ReduceSum", "ReduceMean", "Mul"}
    assert not np.isfinite(reference(halved(model, tmp_path)[0], x)["y"]).all()
    for name, want in run(model, x).items():
        close(run(after, x)[name], want)
        close(reference(after, x)[name], want)


def test_unknown_ranges_count_as_too_large(tmp_path: Path) -> None:
    model = parse(HEAD + "f (float[2] x) => (float[2] y) { a = Exp(x) b = Log(a) y = Relu(b) }")
    for value in (float("inf"), float("nan"), 1e9):
        _, report = halved(model, tmp_path, ranges={"a": value})
        assert {op for _, op, _ in report.float_nodes} == {"Exp", "Log"}


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("spelling", ["mul", "where"])
def test_mask_fills_are_clamped(tmp_path: Path, kind: str, spelling: str) -> None:
    fill = np.float32(np.finfo(np.float32).min)
    body = {
        "mul": "f = Cast <to: int = 1> (mask) i = Sub(one, f) m = Mul(i, fill)",
        "where": "b = Cast <to: int = 9> (mask) m = Where(b, zero, fill)",
    }
    constants = {"mul": {"one": np.float32(1)}, "where": {"zero": np.float32(0)}}
    model = parse(
        HEAD + f"g (float[2,4,4] x, int64[4] mask) => (float[2,4,4] y) {{ {body[spelling]} a = Add(x, m) y = Softmax(a) }}",
        fill=fill, **constants[spelling],
    )  # fmt: skip
    feeds = {"x": normal(2, 4, 4) * 5, "mask": np.array([1, 1, 0, 1])}
    after, report = halved(model, tmp_path, kind, ranges=ranges_of(model, feeds))
    assert report.clamped == {"fill": 1}
    assert report.float_nodes == ()
    kept = next(numpy_helper.to_array(tensor) for tensor in after.graph.initializer if tensor.name == "fill")
    if kind == "fp16":
        assert kept == -65504
        close(run(after, feeds)["y"], run(model, feeds)["y"])
        close(reference(after, feeds)["y"], run(model, feeds)["y"])
    else:
        assert kept == ml_dtypes.finfo(ml_dtypes.bfloat16).min
        assert np.isfinite(kept.astype(np.float32))


def test_constants_keep_inf_and_nan_and_losses_are_counted(tmp_path: Path) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1e-9, 1e-6, 1.0, -70000.0], np.float32)
    model = parse(HEAD + "g (float[7] x) => (bool[7] y) { y = Greater(x, k) }", k=values)
    after, report = halved(model, tmp_path)
    kept = numpy_helper.to_array(after.graph.initializer[0])
    np.testing.assert_array_equal(kept, np.array([np.inf, -np.inf, np.nan, 0, 1e-6, 1, -65504], np.float16))
    assert (report.clamped, report.vanished, report.subnormal) == ({"k": 1}, {"k": 1}, {"k": 1})


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_losses_are_those_of_the_conversion(kind: type) -> None:
    limits = ml_dtypes.finfo(kind)
    ends = [float(limits.max), float(limits.smallest_normal), float(limits.smallest_subnormal), float(limits.smallest_subnormal) / 2]
    points = np.array([0.0, 1.0, *ends], np.float32)
    values = np.concatenate([points, *(np.nextafter(points, np.float32(to)) for to in (0, np.inf)), points[2:] * np.float32(1.5)])
    top = float(limits.max) * (1 + float(limits.eps) / 4)  # between the largest value and what rounds to inf
    values = np.concatenate([values, np.array([top, top * (1 + float(limits.eps) / 8)], np.float32)])
    values = np.concatenate([values, -values])
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        plain = values.astype(kind).astype(np.float32)
    clamped, vanished, subnormal = precision._losses(values, np.dtype(kind))
    assert clamped == np.isinf(plain).sum()
    assert vanished == ((plain == 0) & (values != 0)).sum()
    assert subnormal == ((np.abs(values) < float(limits.smallest_normal)) & (plain != 0)).sum()
    half = precision._narrowed(values, np.dtype(kind)).astype(np.float32)
    np.testing.assert_array_equal(half, np.clip(plain, -float(limits.max), float(limits.max)))


def test_a_weight_that_half_cannot_hold_keeps_its_reader(tmp_path: Path) -> None:
    ops = "BatchNormalization(x, s, b, m, v)"
    model = parse(HEAD + f"g (float[2,3,4] x) => (float[2,3,4] y) {{ y = {ops} }}",
                  s=np.full(3, 2e3, np.float32), b=normal(3), m=normal(3) * 3e4, v=np.array([1e7, 4e7, 2e6], np.float32))  # fmt: skip
    after, report = halved(model, tmp_path)
    assert [(op, "reaches 4e+07" in reason) for _, op, reason in report.float_nodes] == [("BatchNormalization", True)]
    x = {"x": normal(2, 3, 4) * 1000}
    close(run(after, x)["y"], run(model, x)["y"])


# ----------------------------------------------------------------------------------------------------- types of operators


def test_inputs_that_are_always_float32(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[1,2,4,4] x, float[5,4] boxes) => (float[1,2,8,8] y, int64[N,3] keep, float[4] r) {
        h = Relu(x)
        z = Resize <mode: string = "nearest"> (h, , scales)
        y = Relu(z)
        b = Abs(boxes)
        b3 = Unsqueeze(b, zero)
        keep = NonMaxSuppression(b3, scores, limit)
        f = Range(start, stop, step)
        r = Neg(f)
    }""",
        scales=np.array([1, 1, 2, 2], np.float32), zero=np.array([0]), scores=normal(1, 1, 5), limit=np.array(3),
        start=np.float32(0), stop=np.float32(4), step=np.float32(1),
    )  # fmt: skip
    after, _ = halved(model, tmp_path)
    kinds = {tensor.name: tensor.data_type for tensor in after.graph.initializer}
    assert kinds["scales"] == kinds["scores"] == kinds["start"] == FLOAT
    assert types(after)["z"] == HALF
    feeds = {"x": normal(1, 2, 4, 4), "boxes": np.sort(np.abs(normal(5, 4)), axis=1)}
    for name, want in run(model, feeds).items():
        close(run(after, feeds)[name], want)


def test_positions_and_indices_stay_exact(tmp_path: Path) -> None:
    """Rotary angles of position 3000, and an index computed in floating point: both are beyond the digits of half."""
    model = parse(
        HEAD
        + """g (int64[4] p, float[4,2] x, float[5000,2] t) => (float[4,2] y, float[4,2] u) {
        f = Cast <to: int = 1> (p) e = Unsqueeze(f, one) a = MatMul(e, w) c = Cos(a) y = Mul(x, c)
        h = Mul(f, k) l = Floor(h) i = Cast <to: int = 7> (l) u = Gather(t, i)
    }""",
        one=np.array([1]), w=np.array([[1.0, 0.1]], np.float32), k=np.float32(1.5),
    )  # fmt: skip
    feeds = {"p": np.array([1, 100, 1001, 3001]), "x": normal(4, 2), "t": np.linspace(0, 9, 10000, dtype=np.float32).reshape(5000, 2)}
    after, _ = halved(model, tmp_path)
    for name, want in run(model, feeds).items():
        close(run(after, feeds)[name], want)


def test_integer_products_are_scaled_in_float32(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[2,256] x) => (float[2,8] y) {
        q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, w, z) f = Cast <to: int = 1> (p) k = Mul(s, ws) m = Mul(f, k) y = Relu(m)
    }""",
        w=np.full((256, 8), 120, np.int8), ws=np.float32(1e-3),
    )  # fmt: skip
    after, _ = halved(model, tmp_path)
    x = {"x": np.abs(normal(2, 256))}
    close(run(after, x)["y"], run(model, x)["y"])


@pytest.mark.parametrize("opset", [13, 21])
def test_quantization_takes_half_where_the_opset_does(tmp_path: Path, opset: int) -> None:
    model = parse(
        f'<ir_version: 10, opset_import: ["" : {opset}]> '
        + "g (float[2,8] x) => (float[2,8] y) { a = Relu(x) q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }",
        s=np.float32(0.1), z=np.int8(0), w=normal(8, 8),
    )  # fmt: skip
    after, report = halved(model, tmp_path)
    assert bool(report.float_nodes) == (opset < 19)
    x = {"x": normal(2, 8)}
    close(run(after, x)["y"], run(model, x)["y"], 5e-2)


def test_constant_nodes_and_shapes_filled_with_a_value(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[2] x, int64[1] n) => (float[N] y, float[2] z) {
        c = Constant <value_float: float = 2.5> () d = Constant <value_floats: floats = [1.5, 2.5]> ()
        k = ConstantOfShape <value: tensor = float[1] {3.5}> (n) y = Mul(k, c) m = Mul(x, d) z = Add(m, c) o = ConstantOfShape(n)
    }"""
    )
    after, _ = halved(model, tmp_path)
    feeds = {"x": normal(2), "n": np.array([3])}
    for name, want in run(model, feeds).items():
        close(run(after, feeds)[name], want)


@pytest.mark.parametrize("keep", [[], ["Loop"], ["If"], ["MatMul"]])
def test_bodies(tmp_path: Path, keep: list[str]) -> None:
    model = parse(
        HEAD
        + """g (float[4,4] x, bool flag) => (float[4,4] y, float[3,4,4] all, float[4,4] z) {
        n = Constant <value_int: int = 3> () go = Constant <value: tensor = bool {1}> () bias = Relu(x)
        y, all = Loop (n, go, x) <body: graph = b (int64 i, bool c, float[4,4] h) => (bool c2, float[4,4] h2, float[4,4] s) {
            c2 = Identity(c) t = MatMul(h, w)
            h2 = If (flag) <then_branch: graph = p () => (float[4,4] r) { u = Add(t, bias) r = Tanh(u) },
                            else_branch: graph = q () => (float[4,4] r) { r = Sub(t, bias) }>
            s = Add(h2, w) }>
        z = Add(y, bias)
    }""",
        w=normal(4, 4) / 4,
    )
    after, _ = halved(model, tmp_path, keep_fp32=keep)
    for flag in (True, False):
        feeds = {"x": normal(4, 4, seed=1), "flag": np.array(flag)}
        for name, want in run(model, feeds).items():
            close(run(after, feeds)[name], want, 1e-2)


def test_sequences_and_custom_operators_stay_in_float32(tmp_path: Path) -> None:
    model = parse(
        '<ir_version: 8, opset_import: ["" : 17, "own" : 1]> '
        + """g (float[2] x) => (float[2] y, float[2] z) {
        a = Relu(x) s = SequenceConstruct(a, a) i = Constant <value_int: int = 1> () b = SequenceAt(s, i) y = Exp(b)
        c = own.Op(a) z = Neg(c)
    }"""
    )
    loaded = load(model, tmp_path)
    report = convert(loaded, "fp16")
    kept = {op: reason for _, op, reason in report.float_nodes}
    assert set(kept) == {"SequenceConstruct", "SequenceAt", "Op", "Neg"}
    assert "own" in kept["Op"]


def test_function_nodes_take_half(tmp_path: Path) -> None:
    head = '<ir_version: 8, opset_import: ["" : 17, "onnxfuse" : 1]> '
    model = parse(head + "g (float[2,8] x) => (float[2,8] y) { a = Relu(x) y = onnxfuse.Gate(a, w) }", w=normal(8))
    nodes = [
        helper.make_node("Cast", ["X"], ["f"], to=FLOAT), helper.make_node("Cast", ["W"], ["g"], to=FLOAT),
        helper.make_node("Mul", ["f", "g"], ["m"]), helper.make_node("CastLike", ["m", "X"], ["Y"]),
    ]  # fmt: skip
    model.functions.append(function("onnxfuse", "Gate", ["X", "W"], ["Y"], nodes))
    after, report = halved(model, tmp_path)
    assert report.float_nodes == ()
    x = {"x": normal(2, 8)}
    close(run(after, x)["y"], run(model, x)["y"])
    loaded = load(after, tmp_path)
    assert functions.undo(loaded) == 1
    close(run(saved(loaded, tmp_path), x)["y"], run(model, x)["y"])


def test_functions_that_name_the_type_they_give(tmp_path: Path) -> None:
    """Before opset 15 there is no CastLike: the node says the type of its result."""
    head = '<ir_version: 8, opset_import: ["" : 14, "onnxfuse" : 1]> '
    model = parse(head + "g (float[2,8] x) => (float[2,8] y) { a = Relu(x) b = onnxfuse.Double <dtype: int = 1> (a) y = Neg(b) }")
    body = onnx.parser.parse_function(
        '<domain: "onnxfuse", opset_import: ["" : 14]> Double <dtype> (X) => (Y) '
        "{ x = Cast <to: int = 1> (X) d = Add(x, x) Y = Cast <to: int = @dtype> (d) }"
    )
    model.functions.append(body)
    x = {"x": normal(2, 8)}
    for keep, expected in (([], HALF), (["Double"], FLOAT)):
        after, _ = halved(model, tmp_path, keep_fp32=keep)
        node = next(node for node in after.graph.node if node.op_type == "Double")
        assert node.attribute[0].i == expected
        close(run(after, x)["y"], run(model, x)["y"])


@pytest.mark.parametrize(
    ("body", "kind", "opset", "without"),
    [
        ("Y = Conv (X, W)", "bf16", 17, "Conv"),
        ("Y = Conv (X, W)", "bf16", 22, None),
        ("Y = Conv (X, W)", "fp16", 17, None),
        ("x = Cast <to = 1> (X) w = Cast <to = 1> (W) c = Conv (x, w) Y = Cast <to: int = @dtype> (c)", "bf16", 17, None),
        ("x = Cast <to = 1> (X) w = Cast <to = 1> (W) c = Conv (x, w) h = Cast <to: int = @dtype> (c) Y = Elu (h)", "bf16", 17, "Elu"),
        ("c = Conv (X, W) Y = Celu (c)", "fp16", 17, "Celu"),
    ],
)
def test_fused_nodes_take_half_where_all_in_their_bodies_does(
    tmp_path: Path, body: str, kind: precision.Precision, opset: int, without: str | None
) -> None:
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "onnxfuse" : 1]> '
    model = parse(head + "g (float[4,2,3,3] x) => (float[4,3,3,3] y) { y = onnxfuse.Own <dtype: int = 1> (x, w) }", w=normal(3, 2, 1, 1))
    imports = f'<domain: "onnxfuse", opset_import: ["" : {opset}]> '
    model.functions.append(onnx.parser.parse_function(f"{imports} Own <dtype> (X, W) => (Y) {{ {body} }}"))
    _, report = halved(model, tmp_path, kind)
    name = "float16" if kind == "fp16" else "bfloat16"
    assert [reason for _, _, reason in report.float_nodes] == ([f"{without} takes no {name} in opset {opset}"] if without else [])


def test_what_a_newer_opset_would_take_is_said(tmp_path: Path) -> None:
    """Conv takes bfloat16 from opset 22 on (its schema), Einsum in none that exporters write."""
    text = 'g (float[1,2,3,3] x) => (float[1,2,3,3] y) { c = Conv(x, w) y = Einsum <equation = "abcd->abdc"> (c) }'
    _, report = halved(parse(HEAD + text, w=normal(2, 2, 1, 1)), tmp_path, "bf16")
    opset = parse(HEAD + text).opset_import[0].version
    assert {op: reason for _, op, reason in report.float_nodes} == {
        "Conv": f"Conv takes no bfloat16 in opset {opset}; export with opset 22",
        "Einsum": f"Einsum takes no bfloat16 in opset {opset}",
    }


def test_inputs_with_defaults_and_tensors_that_are_outputs_and_read(tmp_path: Path) -> None:
    model = parse(HEAD + "g (float[2] x, float[2] k) => (float[2] a, float[2] y, float[2] k2) { a = Mul(x, k) y = Exp(a) k2 = Neg(k) }",
                  k=np.ones(2, np.float32))  # fmt: skip
    after, _ = halved(model, tmp_path)
    for feeds in ({"x": normal(2)}, {"x": normal(2), "k": normal(2, seed=4)}):
        for name, want in run(model, feeds).items():
            close(run(after, feeds)[name], want)


# ---------------------------------------------------------------------------------------------------------------- bfloat16


def test_bfloat16_types_and_values(tmp_path: Path) -> None:
    model = parse(
        HEAD + "g (float[2,8] x) => (float[2,8] y) { a = MatMul(x, w) b = Add(a, c) t = Tanh(b) y = Mul(t, c) }",
        w=normal(8, 8),
        c=normal(8),
    )
    after, report = halved(model, tmp_path, "bf16")
    assert report.float_nodes == ()
    assert {tensor.data_type for tensor in after.graph.initializer} == {TensorProto.BFLOAT16}
    x = {"x": normal(2, 8, seed=1)}
    close(reference(after, x)["y"], run(model, x)["y"], 5e-2)


def test_bfloat16_convolution_needs_opset_22(tmp_path: Path) -> None:
    for opset in (17, 22):
        text = f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[1,2,4,4] x) => (float[1,3,2,2] y) {{ a = Conv(x, w) y = Relu(a) }}'
        after, report = halved(parse(text, w=normal(3, 2, 3, 3)), tmp_path, "bf16")
        assert [op for _, op, _ in report.float_nodes] == ([] if opset == 22 else ["Conv"])
        assert after.opset_import[0].version == opset


def test_bfloat16_before_it_existed_is_refused(tmp_path: Path) -> None:
    model = parse('<ir_version: 7, opset_import: ["" : 12]> g (float[2,8] x) => (float[2,8] y) { y = Relu(x) }')
    with pytest.raises(BadInput, match="opset 12 has no operator that takes bfloat16, 13 is the first"):
        convert(load(model, tmp_path), "bf16")


def test_large_weights_are_converted_while_they_are_written(tmp_path: Path) -> None:
    weight = normal(3000, 1500)
    weight[7, 11] = 1e-9
    model = parse(HEAD + "g (float[2,3000] x) => (float[2,1500] y) { y = MatMul(x, w) }", w=weight)
    after, report = halved(model, tmp_path)
    assert report.vanished == {"w": 1}
    np.testing.assert_array_equal(numpy_helper.to_array(after.graph.initializer[0]), weight.astype(np.float16))
    loaded = load(model, tmp_path)
    convert(loaded, "bf16")
    loaded.external = True
    write.save(loaded, tmp_path / "e.onnx")
    whole = onnx.load(tmp_path / "e.onnx")
    np.testing.assert_array_equal(numpy_helper.to_array(whole.graph.initializer[0]), weight.astype(ml_dtypes.bfloat16))


def test_thousands_of_nodes(tmp_path: Path) -> None:
    model = transformer(40)
    after, report = halved(model, tmp_path)
    x = {"x": normal(1, 5, 32)}
    got, want = run(after, x)["y"].ravel(), run(model, x)["y"].ravel()
    assert got @ want / np.linalg.norm(got) / np.linalg.norm(want) > 0.999
    assert report.casts < len(model.graph.node) / 5
