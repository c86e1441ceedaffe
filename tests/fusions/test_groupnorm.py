"""groupnorm: spellings against onnxruntime and a float64 reference, and every reason to refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions import helpers
from tests.fusions.helpers import Net, value

ONLY = ("groupnorm",)
DIMS = ("N", "D", "H", "W")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reference(x: np.ndarray, groups: int, scale: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    wide = x.astype(np.float64).reshape(x.shape[0], groups, -1)
    centered = wide - wide.mean(axis=2, keepdims=True)
    norm = (centered / np.sqrt((centered**2).mean(axis=2, keepdims=True) + epsilon)).reshape(x.shape)
    column = (-1,) + (1,) * (x.ndim - 2)
    return norm * scale.astype(np.float64).reshape(column) + bias.astype(np.float64).reshape(column)


def spelled(
    net: Net,
    groups: int,
    target: Sequence[int] | None = None,
    back: Sequence[int] | None = None,
    scale: Any = None,
    bias: Any = None,
    norm: tuple[Any, Any] = (1.0, 0.0),
    dtype: Any = np.float32,
    out: str = "y",
    x: str = "x",
    first: bool = False,
) -> str:
    """The exporters' spelling. `back` None: the shape of x."""
    grouped = net.op("Reshape", x, net.const(target or [0, groups, -1], np.int64))
    parameters = [net.const(np.broadcast_to(values, (groups,)), dtype) for values in norm]
    value = net.op("InstanceNormalization", grouped, *parameters, epsilon=1e-3, out="inner")
    steps = [("Mul", scale), ("Add", bias)]
    last = [op for op, given in steps if given is not None]
    shape = net.op("Shape", x) if back is None else net.const(back, np.int64)
    value = net.op("Reshape", value, shape, out=None if last else out)
    for op, given in steps:
        if given is not None:
            operands = [value, given if isinstance(given, str) else net.const(given, dtype)]
            value = net.op(op, *(operands[::-1] if first else operands), out=out if op == last[-1] else None)
    return value


def parameters(channels: int, rank: int = 4, batch: bool = False) -> dict[str, np.ndarray]:
    shape = ((1,) if batch else ()) + (channels,) + (1,) * (rank - 2)
    return {"scale": random(*shape, seed=7), "bias": random(*shape, seed=8)}


def reasons(model: onnx.ModelProto) -> set[str]:
    _, sites, misses = helpers.fuse(model, ONLY)
    assert sites == []
    return {miss.reason for miss in misses}


@pytest.mark.parametrize("opset", [7, 9, 11, 12, 13, 17, 18, 20, 21, helpers.RUN_OPSET])
@pytest.mark.parametrize("first", [False, True])
def test_exporters_form(opset: int, first: bool) -> None:
    net = Net(opset)
    given = parameters(12)
    spelled(net, 3, **given, first=first)
    x = random(2, 12, 4, 5)
    model = net.model([value("x", x.shape)], [value("y", x.shape)])
    fused, sites, misses = helpers.check(model, {"x": x}, ONLY)
    assert (helpers.names(sites), misses) == (["groupnorm"], [])
    assert helpers.ops(fused) == ["GroupNormalization" if opset >= 21 else "onnxfuse::GroupNormalization"]
    (got,) = helpers.run(fused, {"x": x})
    np.testing.assert_allclose(got, reference(x, 3, given["scale"], given["bias"], 1e-3), rtol=1e-5, atol=1e-5)


def test_attributes() -> None:
    net = Net()
    spelled(net, 3, **parameters(12))
    fused, _, _ = helpers.fuse(net.model([value("x", [2, 12, 4, 5])], ["y"]), ONLY)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in fused.graph.node[0].attribute}
    assert attributes == {"num_groups": 3, "epsilon": pytest.approx(1e-3), "dtype": TensorProto.FLOAT}
    assert [array.shape for array in helpers.initializers(fused).values()] == [(12,), (12,)]


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("batch", [False, True])
def test_ranks_and_any_batch(opset: int, rank: int, batch: bool) -> None:
    net = Net(opset)
    spelled(net, 4, **parameters(8, rank, batch))
    model = net.model([value("x", ["N", 8, *DIMS[1 : rank - 1]])], ["y"])
    for count, size in ((1, 5), (3, 4)):
        fused, sites, _ = helpers.check(model, {"x": random(count, 8, *[size] * (rank - 2))}, ONLY)
        assert helpers.names(sites) == ["groupnorm"]
        assert interfaces(fused) == interfaces(model)


def interfaces(model: onnx.ModelProto) -> list[str]:
    return [v.SerializeToString() for v in (*model.graph.input, *model.graph.output)]


@pytest.mark.parametrize(
    ("shape", "target", "back"),
    [
        ([2, 12, 4, 5], [2, 3, -1], [2, 12, 4, 5]),
        ([2, 12, 4, 5], [2, 3, 80], [0, 12, 4, 5]),
        ([2, 12, 4, 5], [-1, 3, 80], [-1, 12, 4, 5]),
        ([2, 12, 4, 5], [0, 3, 80], [2, 12, 4, -1]),
        ([2, 12, 4, 5], [0, 3, -1], [2, -1, 4, 5]),
        (["N", 12, 4, 5], [0, 3, -1], [0, 12, 4, 5]),
        (["N", 12, 4, 5], [-1, 3, 80], [-1, 12, 4, 5]),
        (["N", 12, 4, "W"], [0, 3, -1], [0, 12, 4, -1]),
    ],
)
def test_targets(shape: list[Any], target: list[int], back: list[int]) -> None:
    net = Net()
    spelled(net, 3, target, back, **parameters(12))
    model = net.model([value("x", shape)], [value("y", shape)])
    fused, sites, _ = helpers.check(model, {"x": random(2, 12, 4, 5)}, ONLY)
    assert helpers.names(sites) == ["groupnorm"]
    assert helpers.ops(fused) == ["onnxfuse::GroupNormalization"]


@pytest.mark.parametrize("roles", [(), ("scale",), ("bias",), ("scale", "bias")])
@pytest.mark.parametrize("norm", [(1.0, 0.0), ([0.5, 2, 3], [1, -1, 0.25])])
def test_parameters_on_either_side(roles: tuple[str, ...], norm: tuple[Any, Any]) -> None:
    net = Net()
    given = {role: array for role, array in parameters(6).items() if role in roles}
    spelled(net, 3, norm=norm, **given)
    fused, sites, _ = helpers.check(net.model([value("x", [2, 6, 4, 5])], ["y"]), {"x": random(2, 6, 4, 5)}, ONLY)
    assert helpers.names(sites) == ["groupnorm"]
    assert helpers.ops(fused) == ["onnxfuse::GroupNormalization"]


def test_one_group_a_channel() -> None:
    net = Net()
    spelled(net, 6, norm=(random(6), random(6, seed=1)))
    fused, _, _ = helpers.check(net.model([value("x", [2, 6, 4, 5])], ["y"]), {"x": random(2, 6, 4, 5)}, ONLY)
    assert helpers.ops(fused) == ["onnxfuse::GroupNormalization"]


def test_one_scale_for_all() -> None:
    net = Net()
    spelled(net, 3, scale=2.5, bias=[[[0.5]]])
    fused, _, _ = helpers.check(net.model([value("x", [2, 6, 4, 5])], ["y"]), {"x": random(2, 6, 4, 5)}, ONLY)
    assert helpers.ops(fused) == ["onnxfuse::GroupNormalization"]


def test_two_share_one_function() -> None:
    net = Net()
    spelled(net, 3, **parameters(12), out="h")
    spelled(net, 6, [0, 6, -1], **parameters(12), x="h")
    fused, sites, _ = helpers.check(unique(net).model([value("x", [2, 12, 4, 5])], ["y"]), {"x": random(2, 12, 4, 5)}, ONLY)
    assert helpers.names(sites) == ["groupnorm", "groupnorm"]
    assert [function.name for function in fused.functions] == ["GroupNormalization"]


def unique(net: Net) -> Net:
    """`spelled` names one tensor; here the second gets a name of its own."""
    norms = [node for node in net.nodes if node.op_type == "InstanceNormalization"]
    norms[1].output[0] = "inner_2"
    for node in net.nodes[net.nodes.index(norms[1]) + 1 :]:
        node.input[:] = ["inner_2" if name == "inner" else name for name in node.input]
    return net


@pytest.mark.parametrize("opset", [17, 21])
def test_half_precision(opset: int) -> None:
    net = Net(opset)
    spelled(net, 3, **parameters(12), dtype=np.float16)
    x = random(2, 12, 4, 5).astype(np.float16)
    model = net.model([value("x", x.shape, TensorProto.FLOAT16)], ["y"])
    fused, sites, _ = helpers.fuse(model, ONLY)
    assert helpers.names(sites) == ["groupnorm"]
    given = {role: array.astype(np.float16) for role, array in parameters(12).items()}
    (got,) = helpers.run(fused, {"x": x})
    np.testing.assert_allclose(got, reference(x, 3, given["scale"], given["bias"], 1e-3), rtol=2e-3, atol=2e-3)
    helpers.proved(model, fused, ONLY)


def test_statistics_do_not_overflow_in_half_precision() -> None:
    net = Net()
    spelled(net, 2, **parameters(4), dtype=np.float16)
    x = (random(1, 4, 8, 8) * 3000).astype(np.float16)
    fused, _, _ = helpers.fuse(net.model([value("x", x.shape, TensorProto.FLOAT16)], ["y"]), ONLY)
    given = {role: array.astype(np.float16) for role, array in parameters(4).items()}
    (got,) = helpers.run(fused, {"x": x})
    np.testing.assert_allclose(got, reference(x, 2, given["scale"], given["bias"], 1e-3), rtol=5e-3, atol=5e-3)


def test_constant_nodes() -> None:
    net = Net(constant_nodes=True)
    spelled(net, 3, **parameters(12))
    fused, _, _ = helpers.check(net.model([value("x", [2, 12, 4, 5])], ["y"]), {"x": random(2, 12, 4, 5)}, ONLY)
    assert helpers.ops(fused, constants=True) == ["onnxfuse::GroupNormalization"]


def test_silu_behind_stays() -> None:
    net = Net()
    y = spelled(net, 3, **parameters(12), out="n")
    net.op("Mul", y, net.op("Sigmoid", y), out="y")
    fused, sites, _ = helpers.check(net.model([value("x", [2, 12, 4, 5])], ["y"]), {"x": random(2, 12, 4, 5)}, ("groupnorm", "silu"))
    assert sorted(helpers.names(sites)) == ["groupnorm", "silu"]
    assert helpers.ops(fused) == ["onnxfuse::GroupNormalization", "onnxfuse::Silu"]


def test_scale_and_shift_at_run_time_stay_outside() -> None:
    """The smaller pattern holds: normalisation without parameters, then Mul and Add."""
    net = Net()
    spelled(net, 3, scale="s", bias="t")
    model = net.model([value("x", [2, 6, 4, 5]), value("s", [2, 6, 1, 1]), value("t", [2, 6, 1, 1])], ["y"])
    feeds = {"x": random(2, 6, 4, 5), "s": random(2, 6, 1, 1, seed=1), "t": random(2, 6, 1, 1, seed=2)}
    fused, sites, misses = helpers.check(model, feeds, ONLY)
    assert (helpers.names(sites), misses) == (["groupnorm"], [])
    assert helpers.ops(fused) == ["onnxfuse::GroupNormalization", "Mul", "Add"]


def test_scale_of_another_axis_stays_outside() -> None:
    net = Net()
    spelled(net, 3, scale=random(5), bias=random(6, 1, 1))
    fused, _, _ = helpers.check(net.model([value("x", [2, 6, 4, 5])], ["y"]), {"x": random(2, 6, 4, 5)}, ONLY)
    assert helpers.ops(fused) == ["onnxfuse::GroupNormalization", "Mul", "Add"]


def test_in_a_loop_body() -> None:
    body = Net(prefix="b")
    body.op("Identity", "going", out="still")
    spelled(body, 3, **parameters(6), x="state", out="next")
    shape = [1, 6, 4, 4]
    inputs = [value("i", [], TensorProto.INT64), value("going", [], TensorProto.BOOL), value("state", shape)]
    graph = onnx.helper.make_graph(body.nodes, "body", inputs, [value("still", [], TensorProto.BOOL), value("next", shape)], body.constants)
    net = Net()
    net.op("Loop", net.const(3, np.int64), "", "x", out="y", body=graph)
    fused, sites, _ = helpers.check(net.model([value("x", shape)], [value("y", shape)]), {"x": random(*shape)}, ONLY)
    assert helpers.names(sites) == ["groupnorm"]
    assert helpers.ops(fused)[-1] == "onnxfuse::GroupNormalization"


@pytest.mark.parametrize("inner", [False, True])
def test_other_readers(inner: bool) -> None:
    """Where an inner tensor is read, the larger pattern is refused; the smaller one may hold."""
    net = Net()
    spelled(net, 3, **parameters(6))
    scaled = next(node.output[0] for node in net.nodes if node.op_type == "Mul")
    net.op("Relu", "inner" if inner else scaled, out="z")
    fused, sites, misses = helpers.check(net.model([value("x", [2, 6, 4, 5])], ["y", "z"]), {"x": random(2, 6, 4, 5)}, ONLY)
    assert helpers.names(sites) == [] if inner else ["groupnorm"]
    assert all("'inner' is also read by" in miss.reason for miss in misses)
    assert ("InstanceNormalization" in helpers.ops(fused)) == inner


@pytest.mark.parametrize("opset", [18, 20])
def test_version_eighteen_is_left(opset: int) -> None:
    net = Net(opset)
    net.op("GroupNormalization", "x", net.const(random(3)), net.const(random(3)), out="y", num_groups=3)
    fused, sites, misses = helpers.fuse(net.model([value("x", [2, 6, 3, 4])], [value("y", [2, 6, 3, 4])]), ONLY)
    assert (sites, misses) == ([], [])
    assert helpers.ops(fused) == ["GroupNormalization"]


def test_version_twenty_one_is_left() -> None:
    net = Net(21)
    net.op("GroupNormalization", "x", net.const(random(6)), net.const(random(6)), out="y", num_groups=3)
    fused, sites, _ = helpers.check(net.model([value("x", [2, 6, 3, 4])], [value("y", [2, 6, 3, 4])]), {"x": random(2, 6, 3, 4)}, ONLY)
    assert sites == []
    assert helpers.ops(fused) == ["GroupNormalization"]


@pytest.mark.parametrize(
    ("shape", "given", "said"),
    [
        (["N", "C", 4, 5], {}, "'x' is not proved to be [N, C, ...] of rank 3 to 5 with C known (['N', 'C', 4, 5])"),
        ([2, 6, 2, 2, 2, 2], {}, "'x' is not proved to be [N, C, ...] of rank 3 to 5 with C known ([2, 6, 2, 2, 2, 2])"),
        ([4, 6, 4, 5], {"target": [2, 3, -1]}, "Reshape is not proved to keep the batch of [4, 6, 4, 5] ([2, 3, -1])"),
        (
            ["N", 6, 4, 5],
            {"target": [2, 3, -1], "back": [2, 6, 4, 5]},
            "Reshape is not proved to keep the batch of ['N', 6, 4, 5] ([2, 3, -1])",
        ),
        ([2, 6, 4, 5], {"target": [0, 3, 2, -1]}, "Reshape does not make [N, 3, -1] ([0, 3, 2, -1])"),
        ([2, 6, 4, 5], {"target": [[0, 3, -1]]}, "Reshape does not make [N, 3, -1] ([0, 3, -1])"),
        ([2, 6, 4, 6], {"back": [2, 6, 6, 4]}, "second Reshape does not give the shape [2, 6, 4, 6] of the input ([2, 6, 6, 4])"),
        ([2, 6, 4, 5], {"back": [2, 6, 20]}, "second Reshape does not give the shape [2, 6, 4, 5] of the input ([2, 6, 20])"),
        ([2, 6, "H", 5], {"back": [2, 6, 4, 5]}, "second Reshape does not give the shape [2, 6, 'H', 5] of the input ([2, 6, 4, 5])"),
        ([2, 5, 6, 5], {}, "5 channels cannot be divided into groups (3)"),
        ([2, 3 << 40, 4, 5], {}, "more than 1048576 channels (3298534883328)"),
    ],
)
def test_refusals(shape: list[Any], given: dict[str, Any], said: str) -> None:
    net = Net()
    spelled(net, 3, **given)
    output = [2, 6, 20] if len(given.get("back", shape)) == 3 else [None] * len(shape)
    assert reasons(net.model([value("x", shape)], [value("y", output)])) == {said}


def test_groups_at_run_time() -> None:
    net = Net()
    spelled(net, 3)
    net.nodes[0].input[1] = "target"
    model = net.model([value("x", [2, 6, 4, 5]), value("target", [3], TensorProto.INT64)], [value("y", [2, 6, 4, 5])])
    assert reasons(model) == {"number of groups is computed at run time (target)"}


@pytest.mark.parametrize("first", [0, 2])
def test_a_target_that_is_computed_is_read_where_its_batch_is_that_of_the_input(first: int) -> None:
    """[batch, groups, -1]; of another axis than the batch it means something else."""
    net = Net(17)
    size = net.op("Gather", net.op("Shape", "x"), net.const([first], np.int64), axis=0)
    target = net.op("Concat", size, net.const([2], np.int64), net.const([-1], np.int64), axis=0)
    grouped = net.op("Reshape", "x", target)
    norm = net.op("InstanceNormalization", grouped, net.const([1.0, 1.0]), net.const([0.0, 0.0]))
    y = net.op("Add", net.op("Reshape", norm, net.op("Shape", "x")), net.const(random(6, 1, 1)), out="y")
    model = net.model([value("x", ["N", 6, "H", 4])], [value(y, ["N", 6, "H", 4])])
    _, sites, _ = helpers.check(model, {"x": random(3, 6, 3, 4)}, ONLY)
    assert helpers.names(sites) == (["groupnorm"] if first == 0 else [])


def test_shape_of_another_tensor() -> None:
    net = Net()
    spelled(net, 3)
    next(node for node in net.nodes if node.op_type == "Shape").input[0] = "u"
    model = net.model([value("x", [2, 6, "H", 5]), value("u", [2, 6, 5, "H"])], [value("y", [2, 6, None, None])])
    assert len(reasons(model)) == 1
    assert reasons(model).pop().startswith("shape of the second Reshape is not proved to be that of the input")


def test_double_precision_is_left() -> None:
    net = Net()
    spelled(net, 3, dtype=np.float64)
    assert reasons(net.model([value("x", [2, 6, 4, 5], TensorProto.DOUBLE)], ["y"])) == {"'x' is of type (double)"}


# --- Spelled out by mean and variance -------------------------------------------------------------------------------------------


def moments(
    opset: int = 17,
    groups: int = 3,
    target: Sequence[int] = (0, 3, -1),
    axes: Sequence[int] = (2,),
    shape: Sequence[Any] = (2, 6, 4, 5),
    variance: str = "ReduceMean",
    root: str = "Div",
    square: str = "Mul",
    affine: bool = True,
    count: float = 40.0,
    epsilon: Any = 1e-3,
    dtype: Any = np.float32,
    wide: bool = False,
) -> onnx.ModelProto:
    net = Net(opset)
    grouped = net.op("Reshape", "x", net.const(target, np.int64))
    if wide:
        grouped, dtype = net.op("Cast", grouped, to=TensorProto.FLOAT), np.float32
    centred = net.op("Sub", grouped, net.mean(grouped, axes))
    squared = net.op("Mul", centred, centred) if square == "Mul" else net.op("Pow", centred, net.const(2.0, dtype))
    if variance == "ReduceMean":
        spread = net.mean(squared, axes)
    else:
        total = (
            net.op("ReduceSum", squared, net.const(list(axes), np.int64)) if opset >= 13 else net.op("ReduceSum", squared, axes=list(axes))
        )
        spread = net.op("Div", total, net.const(count, dtype)) if variance == "Div" else net.op("Mul", total, net.const(1 / count, dtype))
    shifted = net.op("Add", spread, net.const(epsilon, dtype))
    if root == "Div":
        y = net.op("Div", centred, net.op("Sqrt", shifted))
    elif root == "Reciprocal":
        y = net.op("Mul", centred, net.op("Reciprocal", net.op("Sqrt", shifted)))
    else:
        y = net.op("Mul", centred, net.op("Pow", shifted, net.const(-0.5, dtype)))
    if wide:
        y, dtype = net.op("Cast", y, to=TensorProto.FLOAT16), np.float16
    y = net.op("Reshape", y, net.op("Shape", "x"))
    if affine:
        for op, given in zip(("Mul", "Add"), parameters(6).values(), strict=True):
            y = net.op(op, y, net.const(given, dtype))
    net.nodes[-1].output[0] = "y"
    elem = TensorProto.FLOAT16 if dtype == np.float16 else TensorProto.FLOAT
    return net.model([value("x", shape, elem)], [value("y", shape, elem)])


SPELLED: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"target": (0, 3, 2, -1), "axes": (2, 3)},
    {"target": (2, 3, -1), "axes": (-1,)},
    {"shape": ("N", 6, "H", "W")},
    {"shape": ("N", 6, "H", "W"), "target": (0, 3, 2, -1), "axes": (3, 2)},
    {"variance": "Div"},
    {"variance": "Mul", "square": "Pow"},
    {"root": "Reciprocal"},
    {"root": "Pow", "square": "Pow"},
]


@pytest.mark.parametrize("opset", [9, 13, 17, 18, 21, helpers.NEWEST])
@pytest.mark.parametrize("how", SPELLED, ids=str)
def test_spelled_out_by_mean_and_variance(how: dict[str, Any], opset: int) -> None:
    x = random(2, 6, 4, 5)
    fused, _sites, _ = helpers.check(moments(opset, **how), {"x": x}, ONLY)
    assert helpers.ops(fused) == ["GroupNormalization" if opset >= 21 else "onnxfuse::GroupNormalization"]
    scale, bias = (each.reshape(6) for each in parameters(6).values()) if how.get("affine", True) else (np.ones(6), np.zeros(6))
    np.testing.assert_allclose(helpers.run(fused, {"x": x})[0], reference(x, 3, scale, bias, 1e-3), rtol=1e-4, atol=1e-5)


def test_the_norm_of_rows_does_not_take_it_first() -> None:
    _fused, sites, _ = helpers.fuse(moments(), ("groupnorm", "layernorm"))
    assert sites == [("groupnorm", None)]


@pytest.mark.parametrize("wide", [False, True])
def test_mean_and_variance_in_half_precision(wide: bool) -> None:
    x = random(2, 6, 4, 5).astype(np.float16)
    fused, _sites, _ = helpers.check(moments(dtype=np.float16, wide=wide), {"x": x}, ONLY, rtol=1e-2, atol=1e-2)
    assert helpers.ops(fused) == ["onnxfuse::GroupNormalization"]


NOT_A_GROUP: list[tuple[dict[str, Any], str]] = [
    ({"target": (0, 3, 2, -1), "axes": (3,)}, "mean and variance are not those of whole groups (axes) ([3])"),
    ({"variance": "Div", "count": 39.0}, "the sum of squares is not divided by the 40 elements of a group (39.0)"),
    ({"variance": "Div", "shape": ("N", 6, "H", "W")}, "how many elements a group has is not known"),
    ({"epsilon": -1.0}, "epsilon is negative or no number (-1.0)"),
    ({"target": (1, 6, -1), "affine": False, "axes": (2,)}, "Reshape is not proved to make [N, groups, ...] of [2, 6, 4, 5]"),
    ({"epsilon": np.full((1, 3, 1), 1e-3)}, "epsilon is not one value ([1, 3, 1])"),
]


@pytest.mark.parametrize(("how", "reason"), NOT_A_GROUP, ids=[reason for _, reason in NOT_A_GROUP])
def test_what_is_no_group(how: dict[str, Any], reason: str) -> None:
    _, sites, misses = helpers.fuse(moments(**how), ONLY)
    assert sites == []
    assert any(reason in miss.reason for miss in misses), misses
