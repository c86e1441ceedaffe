"""conv_bn: folded values against onnxruntime, and every reason to refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions import helpers
from tests.fusions.helpers import Net, value

ONLY = ("conv_bn",)
PARAMETERS = ("gamma", "beta", "mean", "variance")


def parameters(channels: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "gamma": rng.normal(1, 0.5, channels),
        "beta": rng.normal(size=channels),
        "mean": rng.normal(size=channels),
        "variance": rng.uniform(0.2, 3, channels),
    }


def norm(net: Net, x: str, channels: int, seed: int = 0, dtype: Any = np.float32, out: str | None = None, **attrs: Any) -> str:
    values = parameters(channels, seed)
    given = [net.const(values[name], dtype) for name in PARAMETERS]
    return net.op("BatchNormalization", x, *given, out=out, epsilon=1e-3, **attrs)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def simple(net: Net, bias: bool = True, dtype: Any = np.float32, **attrs: Any) -> str:
    """x [2,3,6,6] -> Conv of 4 kernels -> BatchNormalization -> Relu."""
    inputs = ["x", net.const(random(4, 3, 3, 3), dtype)] + ([net.const(random(4, seed=1), dtype)] if bias else [])
    return net.op("Relu", norm(net, net.op("Conv", *inputs), 4, dtype=dtype, **attrs), out="y")


def model_of(
    net: Net, shape: list[Any] | None = None, dtype: int = TensorProto.FLOAT, outputs: tuple[str, ...] = ("y",)
) -> onnx.ModelProto:
    return net.model([value("x", shape or [2, 3, 6, 6], dtype)], outputs)


def refused(model: onnx.ModelProto) -> str:
    """The one reason why nothing was folded."""
    fused, sites, misses = helpers.fuse(model, ONLY)
    assert sites == []
    assert "BatchNormalization" in helpers.ops(fused)
    (miss,) = misses
    return miss.reason


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 14, 15, 17, 18, 21, helpers.RUN_OPSET])
@pytest.mark.parametrize("bias", [False, True])
def test_folds(opset: int, bias: bool) -> None:
    net = Net(opset)
    simple(net, bias)
    fused, sites, misses = helpers.check(model_of(net), {"x": random(2, 3, 6, 6)}, ONLY)
    assert (helpers.names(sites), misses) == (["conv_bn"], [])
    assert helpers.ops(fused) == ["Conv", "Relu"]


@pytest.mark.parametrize(
    ("op", "shape", "weight", "channels", "attrs"),
    [
        ("Conv", (2, 3, 9), (4, 3, 3), 4, {}),
        ("Conv", (2, 3, 5, 6, 7), (4, 3, 2, 3, 2), 4, {"strides": [1, 2, 1]}),
        ("Conv", (2, 6, 7, 7), (6, 1, 3, 3), 6, {"group": 6, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("Conv", (1, 4, 5, 5), (6, 2, 3, 3), 6, {"group": 2, "dilations": [2, 2]}),
        ("Conv", (1, 4, 5, 5), (6, 4, 3, 3), 6, {"auto_pad": "SAME_UPPER"}),
        ("ConvTranspose", (2, 3, 5), (3, 4, 3), 4, {"strides": [2]}),
        ("ConvTranspose", (2, 3, 5, 5), (3, 4, 3, 3), 4, {"strides": [2, 2], "output_padding": [1, 1], "pads": [1, 1, 1, 1]}),
        ("ConvTranspose", (1, 4, 5, 5), (4, 3, 3, 3), 6, {"group": 2}),
        ("ConvTranspose", (1, 6, 5, 5), (6, 1, 3, 3), 6, {"group": 6}),
        ("ConvTranspose", (1, 2, 3, 4, 3), (2, 3, 2, 2, 2), 3, {}),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_kinds(op: str, shape: tuple[int, ...], weight: tuple[int, ...], channels: int, attrs: dict[str, Any], bias: bool) -> None:
    net = Net()
    inputs = ["x", net.const(random(*weight))] + ([net.const(random(channels, seed=1))] if bias else [])
    norm(net, net.op(op, *inputs, **attrs), channels, out="y")
    fused, _, _ = helpers.check(model_of(net, list(shape)), {"x": random(*shape, seed=2)}, ONLY)
    assert helpers.ops(fused) == [op]


@pytest.mark.parametrize(
    ("op", "attrs", "bias"),
    [
        ("MatMul", {}, None),
        ("Gemm", {}, None),
        ("Gemm", {"transB": 1, "alpha": 0.5}, (5,)),
        ("Gemm", {"transA": 1, "beta": 0.25}, (1, 5)),
        ("Gemm", {"beta": 3.0}, ()),
        ("Gemm", {"beta": 3.0}, (1,)),
    ],
)
def test_products(op: str, attrs: dict[str, Any], bias: tuple[int, ...] | None) -> None:
    net = Net()
    weight = random(5, 3) if attrs.get("transB") else random(3, 5)
    inputs = ["x", net.const(weight)] + ([] if bias is None else [net.const(random(*bias, seed=1))])
    norm(net, net.op(op, *inputs, **attrs), 5, out="y")
    shape = (3, 4) if attrs.get("transA") else (4, 3)
    fused, _, _ = helpers.check(model_of(net, list(shape)), {"x": random(*shape, seed=2)}, ONLY)
    assert helpers.ops(fused) == ["Gemm"]


def test_product_of_higher_rank_is_refused() -> None:
    net = Net()
    norm(net, net.op("MatMul", "x", net.const(random(3, 5))), 4, out="y")
    assert refused(model_of(net, [2, 4, 3])) == "the product is not proved to be a matrix, whose last axis is the channels (3)"


def test_gemm_with_a_bias_for_each_row_is_refused() -> None:
    net = Net()
    norm(net, net.op("Gemm", "x", net.const(random(3, 5)), net.const(random(4, 1), name="rows")), 5, out="y")
    assert refused(model_of(net, [4, 3])) == "constant 'rows' of shape [4, 1] is not one value for each of the channels (5)"


def test_dynamic_batch_and_size() -> None:
    net = Net()
    simple(net)
    model = model_of(net, ["N", 3, "H", "W"])
    for shape in ((1, 3, 5, 7), (3, 3, 4, 4)):
        helpers.check(model, {"x": random(*shape)}, ONLY)


@pytest.mark.parametrize("constants", range(64))
def test_constant_nodes_and_initializers_in_every_mixture(constants: int) -> None:
    net = Net()
    parts: list[str] = []
    shapes = [random(4, 3, 3, 3), random(4, seed=1), *parameters(4).values()]
    for bit, values in enumerate(shapes):
        net.constant_nodes = bool(constants >> bit & 1)
        parts.append(net.const(values))
    conv = net.op("Conv", "x", *parts[:2])
    net.op("BatchNormalization", conv, *parts[2:], out="y")
    fused, sites, _ = helpers.fuse(model_of(net), ONLY)
    assert helpers.names(sites) == ["conv_bn"]
    assert helpers.ops(fused, constants=True) == ["Conv"]
    assert len(fused.graph.initializer) == 2
    if constants % 9 == 0:
        helpers.check(model_of(net), {"x": random(2, 3, 6, 6)}, ONLY)


def test_shared_weight_gets_a_copy_for_each() -> None:
    net = Net()
    weight = net.const(random(4, 3, 3, 3), name="w")
    for seed, out in ((0, "a"), (5, "b")):
        norm(net, net.op("Conv", "x", weight), 4, seed=seed, out=out)
    net.op("Conv", "x", weight, out="plain")
    model = model_of(net, outputs=("a", "b", "plain"))
    fused, sites, _ = helpers.check(model, {"x": random(2, 3, 6, 6)}, ONLY)
    assert helpers.names(sites) == ["conv_bn", "conv_bn"]
    np.testing.assert_array_equal(helpers.initializers(fused)["w"], random(4, 3, 3, 3))


def test_values_are_rounded_once() -> None:
    net = Net()
    weight, values = random(4, 3, 3, 3), {name: array.astype(np.float32) for name, array in parameters(4).items()}
    norm(net, net.op("Conv", "x", net.const(weight)), 4, out="y")
    fused, _, _ = helpers.fuse(model_of(net), ONLY)
    wide = {name: array.astype(np.float64) for name, array in values.items()}
    factor = wide["gamma"] / np.sqrt(wide["variance"] + np.float64(np.float32(1e-3)))
    node = fused.graph.node[0]
    stored = helpers.initializers(fused)
    np.testing.assert_array_equal(stored[node.input[1]], (weight.astype(np.float64) * factor[:, None, None, None]).astype(np.float32))
    np.testing.assert_array_equal(stored[node.input[2]], (wide["beta"] - wide["mean"] * factor).astype(np.float32))


@pytest.mark.parametrize("ir", [3, 8])
def test_initializers_that_are_inputs(ir: int) -> None:
    """Before IR version 4 all are; from it on an input with a default value is a run-time value."""
    net = Net(9)
    simple(net)
    given = [value("x", [2, 3, 6, 6])]
    if ir >= 4:
        given += [helpers.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in net.constants]
    model = net.model(given, ["y"], ir=ir)
    if ir < 4:
        fused, sites, _ = helpers.check(model, {"x": random(2, 3, 6, 6)}, ONLY)
        assert helpers.names(sites) == ["conv_bn"]
        assert helpers.ops(fused) == ["Conv", "Relu"]
    else:
        assert refused(model).startswith("weight is no constant")


def test_half_precision() -> None:
    net = Net(15)
    simple(net, dtype=np.float16)
    model = model_of(net, dtype=TensorProto.FLOAT16)
    fused, sites, _ = helpers.check(model, {"x": random(2, 3, 6, 6).astype(np.float16)}, ONLY, rtol=1e-2, atol=1e-2)
    assert helpers.names(sites) == ["conv_bn"]
    assert {array.dtype for array in helpers.initializers(fused).values()} == {np.dtype(np.float16)}


def test_half_precision_overflow_is_refused() -> None:
    net = Net(15)
    given = [net.const(array, np.float16) for array in ([6e4] * 4, [0] * 4, [0] * 4, [1] * 4)]
    conv = net.op("Conv", "x", net.const(np.full((4, 3, 3, 3), 2), np.float16))
    net.op("BatchNormalization", conv, *given, out="y")
    assert refused(model_of(net, dtype=TensorProto.FLOAT16)).startswith("weight after folding is not finite in float16 (11999")


def test_bfloat16() -> None:
    """onnxruntime has no kernels for it here, so the stored values are looked at."""
    import ml_dtypes

    net = Net(22)
    simple(net, dtype=ml_dtypes.bfloat16)
    model = model_of(net, dtype=TensorProto.BFLOAT16)
    fused, sites, _ = helpers.fuse(model, ONLY)
    assert helpers.names(sites) == ["conv_bn"]
    helpers.proved(model, fused, ONLY)
    assert {t.data_type for t in fused.graph.initializer} == {TensorProto.BFLOAT16}


def test_inside_a_subgraph() -> None:
    """The branch that folds captures its input, a weight, and half of the parameters."""
    inner = Net(prefix="i")
    outer = Net()
    weight = outer.const(random(4, 3, 3, 3), name="w")
    folded = norm(inner, inner.op("Conv", "x", weight), 4, out="then")
    plain = Net(prefix="e")
    plain.op("Conv", "x", weight, out="else")
    bodies = [
        onnx.helper.make_graph(net.nodes, name, [], [value(out, [2, 4, 4, 4])], net.constants)
        for net, name, out in ((inner, "a", folded), (plain, "b", "else"))
    ]
    outer.op("If", "c", out="y", then_branch=bodies[0], else_branch=bodies[1])
    model = outer.model([value("x", [2, 3, 6, 6]), value("c", [], TensorProto.BOOL)], [value("y", [2, 4, 4, 4])])
    for condition in (True, False):
        fused, sites, _ = helpers.check(model, {"x": random(2, 3, 6, 6), "c": np.array(condition)}, ONLY)
        assert helpers.names(sites) == ["conv_bn"]
        assert helpers.ops(fused) == ["If", "Conv", "Conv"]


def test_convolution_outside_of_the_body_is_refused() -> None:
    inner = Net(prefix="i")
    norm(inner, "h", 4, out="then")
    plain = Net(prefix="e")
    plain.op("Relu", "x", out="else")
    bodies = [
        onnx.helper.make_graph(net.nodes, name, [], [value(out, [2, 4, 4, 4])], net.constants)
        for net, name, out in ((inner, "a", "then"), (plain, "b", "else"))
    ]
    outer = Net()
    outer.op("Conv", "x", outer.const(random(4, 3, 3, 3)), out="h")
    outer.op("If", "c", out="y", then_branch=bodies[0], else_branch=bodies[1])
    model = outer.model([value("x", [2, 3, 6, 6]), value("c", [], TensorProto.BOOL)], [value("y", [2, 4, 4, 4])])
    assert refused(model).startswith("lies partly outside the body")


@pytest.mark.parametrize("output", [False, True])
def test_other_readers_of_the_convolution(output: bool) -> None:
    net = Net()
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)), out="h")
    norm(net, conv, 4, out="y")
    net.op("Sigmoid", conv, out="z")
    reason = refused(model_of(net, outputs=("y", "h") if output else ("y", "z")))
    assert reason.startswith("'h' is also read by " + ("a graph output" if output else "'"))


def test_training_mode() -> None:
    net = Net(15)
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    given = [net.const(array) for array in parameters(4).values()]
    net.op("BatchNormalization", conv, *given, out=["y", "m", "v"], training_mode=1)
    assert refused(model_of(net, outputs=("y", "m", "v"))) == "statistics are those of the batch (training_mode) (1)"


def test_statistics_as_outputs() -> None:
    net = Net(9)
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    given = [net.const(array) for array in parameters(4).values()]
    net.op("BatchNormalization", conv, *given, out=["y", "m", "v", "sm", "sv"])
    outputs = [value("y", [2, 4, 4, 4])] + [value(name, [4]) for name in ("m", "v", "sm", "sv")]
    reason = refused(net.model([value("x", [2, 3, 6, 6])], outputs))
    assert reason == "gives the statistics of the batch as outputs (m, v, sm, sv)"


def test_absent_statistics_are_no_outputs() -> None:
    net = Net(9)
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    given = [net.const(array) for array in parameters(4).values()]
    net.op("BatchNormalization", conv, *given, out=["y", "", "", "", ""])
    _, sites, _ = helpers.fuse(net.model([value("x", [2, 3, 6, 6])], [value("y", [2, 4, 4, 4])]), ONLY)
    assert helpers.names(sites) == ["conv_bn"]


def test_not_spatial() -> None:
    net = Net(7)
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    given = [net.const(np.broadcast_to(array.reshape(4, 1, 1), (4, 4, 4))) for array in parameters(4).values()]
    net.op("BatchNormalization", conv, *given, out="y", spatial=0)
    assert refused(net.model([value("x", [2, 3, 6, 6])], [value("y", [2, 4, 4, 4])])) == "normalises each element by itself (spatial) (0)"


@pytest.mark.parametrize("is_test", [0, 1])
def test_version_six(is_test: int) -> None:
    net = Net(6)
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    net.op("BatchNormalization", conv, *(net.const(array) for array in parameters(4).values()), out="y", is_test=is_test)
    _, sites, misses = helpers.fuse(net.model([value("x", [2, 3, 6, 6])], [value("y", [2, 4, 4, 4])]), ONLY)
    assert helpers.names(sites) == ["conv_bn"] * is_test
    assert [miss.reason for miss in misses] == ["statistics are those of the batch (is_test) (0)"] * (1 - is_test)


@pytest.mark.parametrize("role", ["weight", *PARAMETERS])
def test_run_time_parameters(role: str) -> None:
    net = Net()
    shapes = {"weight": [4, 3, 3, 3]} | {name: [4] for name in PARAMETERS}
    names = {name: name if name == role else net.const(np.ones(shape)) for name, shape in shapes.items()}
    conv = net.op("Conv", "x", names["weight"])
    net.op("BatchNormalization", conv, *(names[name] for name in PARAMETERS), out="y")
    model = net.model([value("x", [2, 3, 6, 6]), value(role, shapes[role])], ["y"])
    assert refused(model) == f"{role} is no constant ({role})"


@pytest.mark.parametrize(
    ("variance", "said"), [(-0.5, "variance is negative or not finite (-0.5)"), (np.nan, "variance is negative or not finite (nan)")]
)
def test_bad_variance(variance: float, said: str) -> None:
    net = Net()
    values = parameters(4)
    values["variance"][2] = variance
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    net.op("BatchNormalization", conv, *(net.const(array) for array in values.values()), out="y")
    assert refused(model_of(net)) == said


def test_division_by_zero() -> None:
    net = Net()
    values = parameters(4) | {"variance": np.zeros(4)}
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    net.op("BatchNormalization", conv, *(net.const(array) for array in values.values()), out="y", epsilon=0.0)
    assert refused(model_of(net)) == "weight after folding is not finite in float32 (inf)"


def test_quantised_between() -> None:
    net = Net(13)
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    scale, zero = net.const(0.05), net.const(0, np.int8)
    net.nodes.append(onnx.helper.make_node("DequantizeLinear", [net.op("QuantizeLinear", conv, scale, zero), scale, zero], ["q"], "dq"))
    norm(net, "q", 4, out="y")
    assert refused(model_of(net)) == "values are quantised between the convolution and the normalisation (dq)"


def test_quantised_weight() -> None:
    net = Net(13)
    weight = net.op("DequantizeLinear", net.const(random(4, 3, 3, 3) * 20, np.int8), net.const(0.05), out="w")
    norm(net, net.op("Conv", "x", weight), 4, out="y")
    assert refused(model_of(net)) == "weight is no constant ('w' from DequantizeLinear)"


@pytest.mark.parametrize("op", ["Relu", "Erf"])
def test_behind_something_else_is_no_site(op: str) -> None:
    net = Net()
    norm(net, net.op(op, net.op("Conv", "x", net.const(random(4, 3, 3, 3)))), 4, out="y")
    _, sites, misses = helpers.fuse(model_of(net), ONLY)
    assert (sites, misses) == ([], [])


def test_behind_an_addition_is_no_site() -> None:
    net = Net()
    convs = [net.op("Conv", "x", net.const(random(4, 3, 3, 3, seed=seed))) for seed in (0, 1)]
    norm(net, net.op("Add", *convs), 4, out="y")
    _, sites, misses = helpers.fuse(model_of(net), ONLY)
    assert (sites, misses) == ([], [])


def test_parameters_of_another_length() -> None:
    net = Net()
    conv = net.op("Conv", "x", net.const(random(4, 3, 3, 3)))
    values = parameters(4)
    given = [net.const(values[name]) for name in PARAMETERS[:3]] + [net.const(np.ones(1))]
    net.op("BatchNormalization", conv, *given, out="y")
    model = net.model([value("x", [2, 3, 6, 6])], [value("y", [2, 4, 4, 4])])
    assert refused(model) == "variance of shape [1] is not one value for each of the channels (4)"


def test_empty_optional_inputs_link_nothing() -> None:
    net = Net()
    grown = net.op("Resize", "x", "", "", net.const([1, 3, 8, 8], np.int64), mode="nearest")
    normed = norm(net, net.op("Conv", grown, net.const(random(4, 3, 3, 3)), ""), 4)
    net.op("Clip", normed, "", net.const(6.0), out="y")
    fused, sites, _ = helpers.check(model_of(net, [1, 3, 4, 4]), {"x": random(1, 3, 4, 4)}, ONLY)
    assert helpers.names(sites) == ["conv_bn"]
    assert [list(node.input)[1:2] for node in fused.graph.node if node.op_type in ("Resize", "Clip")] == [[""], [""]]
