"""conv_bias: added constants against onnxruntime, and every reason to refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions import helpers
from tests.fusions.helpers import Net, value

ONLY = ("conv_bias",)
SHAPE = [2, 3, 6, 6]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def conv(net: Net, bias: bool = False, dtype: Any = np.float32) -> str:
    return net.op("Conv", "x", net.const(random(4, 3, 3, 3), dtype), *([net.const(random(4, seed=1), dtype)] if bias else []), out="h")


def reasons(model: onnx.ModelProto) -> list[str]:
    """Why nothing was folded."""
    _, sites, misses = helpers.fuse(model, ONLY)
    assert sites == []
    return [miss.reason for miss in misses]


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17, 18, 21, helpers.RUN_OPSET])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_addition(opset: int, bias: bool, first: bool) -> None:
    net = Net(opset)
    operands = [conv(net, bias), net.const(random(4, 1, 1, seed=2))]
    net.op("Add", *(operands[::-1] if first else operands), out="y")
    fused, sites, misses = helpers.check(net.model([value("x", SHAPE)], ["y"]), {"x": random(*SHAPE)}, ONLY)
    assert (helpers.names(sites), misses) == (["conv_bias"], [])
    assert helpers.ops(fused) == ["Conv"]


@pytest.mark.parametrize("bias", [False, True])
def test_subtraction(bias: bool) -> None:
    net = Net()
    net.op("Sub", conv(net, bias), net.const(random(1, 4, 1, 1, seed=2)), out="y")
    fused, _, _ = helpers.check(net.model([value("x", SHAPE)], ["y"]), {"x": random(*SHAPE)}, ONLY)
    assert helpers.ops(fused) == ["Conv"]


def test_subtracted_from_a_constant_is_no_site() -> None:
    net = Net()
    net.op("Sub", net.const(random(1, 4, 1, 1)), conv(net), out="y")
    fused, sites, _ = helpers.fuse(net.model([value("x", SHAPE)], ["y"]), ONLY)
    assert sites == []
    assert helpers.ops(fused) == ["Conv", "Sub"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (1, 1, 1, 1), (4, 1, 1), (1, 4, 1, 1)])
def test_shapes_of_the_constant(shape: tuple[int, ...]) -> None:
    net = Net()
    net.op("Add", conv(net, True), net.const(random(*shape, seed=3)), out="y")
    fused, _, _ = helpers.check(net.model([value("x", SHAPE)], ["y"]), {"x": random(*SHAPE)}, ONLY)
    assert helpers.ops(fused) == ["Conv"]
    assert [array.shape for name, array in helpers.initializers(fused).items() if name == fused.graph.node[0].input[2]] == [(4,)]


@pytest.mark.parametrize(
    "shape", [(4,), (4, 1), (4, 4, 4), (2, 4, 1, 1), (2, 4, 4, 4), (1, 1, 4, 4), (1, 1, 1, 1, 1), (1, 1, 4, 1, 1), (3, 1, 4, 1, 1)]
)
def test_no_constant_of_a_channel(shape: tuple[int, ...]) -> None:
    net = Net()
    net.op("Add", conv(net), net.const(random(*shape), name="map"), out="y")
    said = reasons(net.model([value("x", SHAPE)], ["y"]))
    assert said == [f"constant 'map' of shape {list(shape)} is not one value for each of the channels (4)"]


def test_one_channel_grows_by_the_constant() -> None:
    net = Net()
    net.op("Add", net.op("Conv", "x", net.const(random(1, 3, 3, 3))), net.const(random(4, 1, 1), name="four"), out="y")
    said = reasons(net.model([value("x", SHAPE)], ["y"]))
    assert said == ["constant 'four' of shape [4, 1, 1] is not one value for each of the channels (1)"]


@pytest.mark.parametrize(
    ("op", "shape", "weight", "channels", "attrs"),
    [
        ("Conv", (2, 3, 9), (4, 3, 3), 4, {}),
        ("Conv", (2, 3, 5, 5, 5), (4, 3, 2, 2, 2), 4, {}),
        ("Conv", (2, 6, 5, 5), (6, 1, 3, 3), 6, {"group": 6}),
        ("ConvTranspose", (2, 4, 5, 5), (4, 3, 3, 3), 6, {"group": 2, "strides": [2, 2]}),
        ("ConvTranspose", (2, 3, 5), (3, 4, 3), 4, {}),
    ],
)
def test_kinds(op: str, shape: tuple[int, ...], weight: tuple[int, ...], channels: int, attrs: dict[str, Any]) -> None:
    net = Net()
    added = net.const(random(channels, *[1] * (len(weight) - 2), seed=2))
    net.op("Add", net.op(op, "x", net.const(random(*weight)), net.const(random(channels)), **attrs), added, out="y")
    fused, _, _ = helpers.check(net.model([value("x", shape)], ["y"]), {"x": random(*shape)}, ONLY)
    assert helpers.ops(fused) == [op]
    assert {a.name for a in fused.graph.node[0].attribute} == set(attrs)


def test_reshaped_constant() -> None:
    net = Net(11)
    added = net.op("Reshape", net.const(random(4)), net.const([1, -1, 1, 1], np.int64))
    net.op("Add", conv(net), added, out="y")
    fused, _, _ = helpers.check(net.model([value("x", SHAPE)], ["y"]), {"x": random(*SHAPE)}, ONLY)
    assert helpers.ops(fused) == ["Conv"]


def test_constant_nodes() -> None:
    net = Net(constant_nodes=True)
    net.op("Add", conv(net, True), net.const(random(4, 1, 1)), out="y")
    fused, _, _ = helpers.check(net.model([value("x", SHAPE)], ["y"]), {"x": random(*SHAPE)}, ONLY)
    assert helpers.ops(fused, constants=True) == ["Conv"]


def test_weight_may_be_computed_at_run_time() -> None:
    net = Net()
    net.op("Add", net.op("Conv", "x", "w"), net.const(random(4, 1, 1)), out="y")
    model = net.model([value("x", SHAPE), value("w", [4, 3, 3, 3])], ["y"])
    fused, _, _ = helpers.check(model, {"x": random(*SHAPE), "w": random(4, 3, 3, 3)}, ONLY)
    assert helpers.ops(fused) == ["Conv"]


def test_unknown_number_of_channels() -> None:
    net = Net()
    net.op("Add", net.op("Conv", "x", "w"), net.const(random(4, 1, 1)), out="y")
    model = net.model([value("x", SHAPE), value("w", ["C", 3, 3, 3])], [value("y", [2, 4, 4, 4])])
    assert reasons(model) == ["number of output channels of 'w' is unknown (['C', 3, 3, 3])"]


@pytest.mark.parametrize("role", ["bias", "constant"])
def test_run_time_values(role: str) -> None:
    net = Net()
    bias = "b" if role == "bias" else net.const(random(4))
    net.op(
        "Add", net.op("Conv", "x", net.const(random(4, 3, 3, 3)), bias), "c" if role == "constant" else net.const(random(4, 1, 1)), out="y"
    )
    inputs = [value("x", SHAPE), value("b", [4]) if role == "bias" else value("c", [4, 1, 1])]
    said = {"bias": "bias is no constant (b)", "constant": "'constant' is computed at run time (c)"}
    assert reasons(net.model(inputs, ["y"])) == [said[role]]


@pytest.mark.parametrize("output", [False, True])
def test_other_readers(output: bool) -> None:
    net = Net()
    net.op("Add", conv(net), net.const(random(4, 1, 1)), out="y")
    net.op("Relu", "h", out="z")
    (said,) = reasons(net.model([value("x", SHAPE)], ["y", "h" if output else "z"]))
    assert said.startswith("'h' is also read by " + ("a graph output" if output else "'"))


def test_shared_bias_stays_what_it_was() -> None:
    net = Net()
    bias, added = net.const(random(4), name="bias"), net.const(random(4, 1, 1), name="added")
    for seed, out in ((0, "a"), (1, "b")):
        net.op("Add", net.op("Conv", "x", net.const(random(4, 3, 3, 3, seed=seed)), bias), added, out=out)
    net.op("Add", "x", net.op("Reshape", bias, net.const([4, 1, 1, 1], np.int64)), out="c")
    model = net.model([value("x", [1, 3, 6, 6])], ["a", "b", "c"])
    fused, sites, _ = helpers.check(model, {"x": random(1, 3, 6, 6)}, ONLY)
    assert helpers.names(sites) == ["conv_bias", "conv_bias"]
    assert any(np.array_equal(array.reshape(-1), random(4)) for array in helpers.initializers(fused).values())


def test_half_precision() -> None:
    net = Net(15)
    net.op("Add", conv(net, True, np.float16), net.const(random(4, 1, 1), np.float16), out="y")
    model = net.model([value("x", SHAPE, TensorProto.FLOAT16)], ["y"])
    fused, sites, _ = helpers.check(model, {"x": random(*SHAPE).astype(np.float16)}, ONLY, rtol=1e-2, atol=1e-2)
    assert helpers.names(sites) == ["conv_bias"]
    assert {array.dtype for array in helpers.initializers(fused).values()} == {np.dtype(np.float16)}


def test_half_precision_overflow() -> None:
    net = Net(15)
    h = net.op("Conv", "x", net.const(random(4, 3, 3, 3), np.float16), net.const([6e4] * 4, np.float16))
    net.op("Add", h, net.const(np.full((4, 1, 1), 6e4), np.float16), out="y")
    (said,) = reasons(net.model([value("x", SHAPE, TensorProto.FLOAT16)], ["y"]))
    assert said.startswith("bias after folding is not finite in float16 (")


def test_with_a_batch_normalisation_behind() -> None:
    net = Net()
    h = net.op("Add", conv(net), net.const(random(4, 1, 1)))
    net.op("BatchNormalization", h, *(net.const(np.abs(random(4, seed=seed)) + 0.1) for seed in range(4)), out="y")
    fused, sites, _ = helpers.check(net.model([value("x", SHAPE)], ["y"]), {"x": random(*SHAPE)}, ("conv_bias", "conv_bn"))
    assert helpers.names(sites) == ["conv_bias", "conv_bn"]
    assert helpers.ops(fused) == ["Conv"]


def test_in_a_loop_body() -> None:
    body = Net(prefix="b")
    body.op("Identity", "going", out="still")
    body.op("Add", body.op("Conv", "state", body.const(random(3, 3, 3, 3)), pads=[1, 1, 1, 1]), body.const(random(3, 1, 1)), out="next")
    shape = [1, 3, 4, 4]
    inputs = [value("i", [], TensorProto.INT64), value("going", [], TensorProto.BOOL), value("state", shape)]
    graph = onnx.helper.make_graph(body.nodes, "body", inputs, [value("still", [], TensorProto.BOOL), value("next", shape)], body.constants)
    net = Net()
    net.op("Loop", net.const(3, np.int64), "", "x", out="y", body=graph)
    model = net.model([value("x", shape)], [value("y", shape)])
    fused, sites, _ = helpers.check(model, {"x": random(*shape)}, ONLY, rtol=1e-3)
    assert helpers.names(sites) == ["conv_bias"]
    assert "Add" not in helpers.ops(fused)
