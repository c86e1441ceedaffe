"""layernorm: every spelling becomes one node that computes the formula; what only looks like it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.fusions.base import Index, apply, find
from onnxfuse.fusions.layernorm import FUSION
from tests.fusions import helpers
from tests.fusions.helpers import NEWEST, OPSETS, Net, check, fuse, layer_norm, names, ops, proved, random, run, same, undo, value
from tests.fusions.strategies import WIDTH, Planter, every

NODE = {True: "LayerNormalization", False: "onnxfuse::LayerNormalization"}
X = random(2, 3, WIDTH)


def spelled(
    net: Net,
    x: str = "x",
    width: int = WIDTH,
    *,
    scale: Any = None,
    bias: Any = None,
    epsilon: Any = 1e-5,
    exponent: Any = 2.0,
    axes: tuple[int, ...] = (-1,),
    again: tuple[int, ...] | None = None,
    keepdims: int = 1,
    dtype: Any = np.float32,
    out: str = "y",
) -> dict[str, str]:
    """The usual spelling; returns its tensors by name."""
    mean = net.mean(x, axes, keepdims)
    centered = net.op("Sub", x, mean)
    square = net.op("Pow", centered, net.const(exponent, dtype))
    variance = net.mean(square, again or axes, keepdims)
    shifted = net.op("Add", variance, epsilon if isinstance(epsilon, str) else net.const(epsilon, dtype))
    root = net.op("Sqrt", shifted)
    norm = net.op("Div", centered, root)
    scale = scale if isinstance(scale, str) else net.const(np.linspace(0.5, 2, width) if scale is None else scale, dtype)
    scaled = net.op("Mul", norm, scale)
    bias = bias if isinstance(bias, str) else net.const(np.linspace(-1, 1, width) if bias is None else bias, dtype)
    net.op("Add", scaled, bias, out=out)
    return {"mean": mean, "centered": centered, "square": square, "variance": variance, "root": root, "norm": norm, "scaled": scaled}


def model(
    opset: int = 17, shape: Any = (2, 3, WIDTH), elem: int = TensorProto.FLOAT, ir: int | None = None, **kwargs: Any
) -> onnx.ModelProto:
    net = Net(opset)
    spelled(net, **kwargs)
    return net.model([value("x", shape, elem)], ["y"], ir)


WANT = layer_norm(X, np.linspace(0.5, 2, WIDTH), np.linspace(-1, 1, WIDTH))


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset: int) -> None:
    fused, sites, misses = check(model(opset), {"x": X}, rtol=1e-5)
    assert ops(fused) == [NODE[opset >= 17]]
    assert sites == [("layernorm", None)]
    assert misses == []
    np.testing.assert_allclose(run(fused, {"x": X})[0], WANT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 13, 17, NEWEST])
@pytest.mark.parametrize("ir", [3, 4, 6, 8, 10, onnx.IR_VERSION])
def test_every_ir_version(opset: int, ir: int) -> None:
    fused, sites, _ = check(model(opset, ir=ir), {"x": X})
    assert len(sites) == 1
    assert fused.ir_version == ir


@pytest.mark.parametrize(("scale", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("opset", [11, 17])
def test_every_spelling(opset: int, scale: bool, bias: bool) -> None:
    def build(pick: Any) -> onnx.ModelProto:
        net = Net(opset)
        Planter(net, pick).layernorm("x", scale, bias)
        net.op("Identity", net.nodes[-1].output[0], out="y")
        return net.model([value("x", ["N", 3, WIDTH])], ["y"])

    for original in every(build):
        fused, sites, _ = fuse(original)
        assert sites == [("layernorm", None)], ops(original)
        assert NODE[opset >= 17] in ops(fused)
        assert not {"ReduceMean", "Sqrt", "Pow", "Sub"} & set(ops(fused))
        same(run(fused, {"x": X}), run(original, {"x": X}))


def test_commuted_operands() -> None:
    def build(pick: Any) -> onnx.ModelProto:
        net = Net(17)
        Planter(net, lambda *options: options[0] if not isinstance(options[0], tuple) else pick(*options), commute=True).layernorm("x")
        return net.model([value("x", [2, 3, WIDTH])], [net.nodes[-1].output[0]])

    for original in every(build):
        check(original, {"x": X})
        assert fuse(original)[1] == [("layernorm", None)]


def test_constant_nodes() -> None:
    net = Net(17, constant_nodes=True)
    spelled(net)
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": X})
    assert len(sites) == 1
    assert ops(fused) == ["LayerNormalization"]


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
def test_constants_with_axes_of_one(shape: tuple[int, ...]) -> None:
    fused, sites, _ = check(model(epsilon=np.full(shape, 1e-5), exponent=np.full(shape, 2)), {"x": X})
    assert len(sites) == 1
    np.testing.assert_allclose(run(fused, {"x": X})[0], WANT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [13, 17])
def test_parameters_with_axes_of_one(opset: int) -> None:
    scale, bias = np.linspace(1, 2, WIDTH).reshape(1, WIDTH), np.linspace(1, 3, WIDTH).reshape(1, 1, WIDTH)
    fused, _, _ = check(model(opset, scale=scale, bias=bias), {"x": X})
    assert ops(fused) == [NODE[opset >= 17]]
    np.testing.assert_allclose(run(fused, {"x": X})[0], layer_norm(X, scale, bias), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-6, 0.05])
@pytest.mark.parametrize("opset", [9, 13, 17])
def test_epsilon_is_kept(opset: int, epsilon: float) -> None:
    x = 0.1 * X
    fused, _, _ = check(model(opset, epsilon=epsilon), {"x": x})
    want = layer_norm(x, np.linspace(0.5, 2, WIDTH), np.linspace(-1, 1, WIDTH), epsilon)
    np.testing.assert_allclose(run(fused, {"x": x})[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("cast", [False, True])
def test_half_precision(opset: int, cast: bool) -> None:
    x = random(2, 3, WIDTH, dtype=np.float16)
    net = Net(opset)
    if cast:  # the square in float32, as exporters of half-precision models write it
        centered = net.op("Sub", "x", net.mean("x"))
        wide = net.op("Cast", centered, to=1)
        variance = net.op("Add", net.mean(net.op("Mul", wide, wide)), net.const(1e-5))
        norm = net.op("Div", centered, net.op("Cast", net.op("Sqrt", variance), to=10))
        gamma, beta = (net.const(row, np.float16) for row in (np.linspace(0.5, 2, WIDTH), np.linspace(-1, 1, WIDTH)))
        net.op("Add", net.op("Mul", norm, gamma), beta, out="y")
    else:
        spelled(net, dtype=np.float16)
    fused, _, _ = check(net.model([value("x", [2, 3, WIDTH], TensorProto.FLOAT16)], ["y"]), {"x": x}, rtol=2e-2, atol=2e-2)
    assert ops(fused) == [NODE[opset >= 17]]
    want = layer_norm(x, np.linspace(0.5, 2, WIDTH), np.linspace(-1, 1, WIDTH))
    np.testing.assert_allclose(run(fused, {"x": x})[0].astype(np.float64), want, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("where", ["input", "deviation"])
@pytest.mark.parametrize("scaled", ["half", "float"])
@pytest.mark.parametrize("opset", [13, 17])
def test_half_precision_that_is_widened(opset: int, scaled: str, where: str) -> None:
    """Cast up, normalise, cast down, and scale before or behind that."""
    x = random(2, 3, WIDTH, dtype=np.float16)
    net = Net(opset)
    given = net.op("Cast", "x", to=1) if where == "input" else "x"
    centered = net.op("Sub", given, net.mean(given))
    centered = centered if where == "input" else net.op("Cast", centered, to=1)
    root = net.op("Sqrt", net.op("Add", net.mean(net.op("Mul", centered, centered)), net.const(1e-5)))
    norm = net.op("Div", centered, root)
    kind = np.float16 if scaled == "half" else np.float32
    norm = net.op("Cast", norm, to=10) if scaled == "half" else norm
    last = net.op("Add", net.op("Mul", norm, net.const(np.linspace(0.5, 2, WIDTH), kind)), net.const(np.linspace(-1, 1, WIDTH), kind))
    net.op("Cast", last, to=10, out="y")
    original = net.model([value("x", [2, 3, WIDTH], TensorProto.FLOAT16)], ["y"])
    fused, sites, _ = check(original, {"x": x}, rtol=2e-2, atol=2e-2)
    if scaled == "float" and where == "deviation":
        assert "LayerNormalization" not in {op.removeprefix("onnxfuse::") for op in ops(fused)}  # scaled in a wider type than the input's
    else:
        assert len(sites) == 1
        assert NODE[opset >= 17] in ops(fused)
    np.testing.assert_allclose(
        run(fused, {"x": x})[0].astype(np.float64),
        layer_norm(x, np.linspace(0.5, 2, WIDTH), np.linspace(-1, 1, WIDTH)),
        rtol=5e-3,
        atol=5e-3,
    )


def test_half_precision_does_not_overflow() -> None:
    x = (1000 * X).astype(np.float16)
    original = model(13, elem=TensorProto.FLOAT16, dtype=np.float16)
    fused, _, _ = fuse(original)
    np.testing.assert_allclose(
        run(fused, {"x": x})[0].astype(np.float64),
        layer_norm(x, np.linspace(0.5, 2, WIDTH), np.linspace(-1, 1, WIDTH)),
        rtol=5e-3,
        atol=5e-3,
    )


@pytest.mark.parametrize("opset", [13, 17, NEWEST])
def test_bfloat16(opset: int) -> None:
    import ml_dtypes

    original = model(opset, elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, sites, _ = fuse(original)
    assert len(sites) == 1
    assert ops(fused) == [NODE[opset >= 17]]
    proved(original, fused)
    if opset < 17:
        (node,) = fused.graph.node
        assert {a.name: a.i for a in node.attribute}["dtype"] == TensorProto.BFLOAT16


@pytest.mark.parametrize("axes", [(-2, -1), (1, 2), (-1, -2)])
def test_several_axes(axes: tuple[int, ...]) -> None:
    shape = (3, WIDTH)
    scale, bias = random(*shape, seed=1), random(*shape, seed=2)
    fused, sites, _ = check(model(17, axes=axes, scale=scale, bias=bias, epsilon=0.05), {"x": X})
    assert ops(fused) == ["LayerNormalization"]
    assert len(sites) == 1
    np.testing.assert_allclose(run(fused, {"x": X})[0], layer_norm(X, scale, bias, 0.05, axes=(-2, -1)), rtol=1e-4, atol=1e-4)


def test_axes_written_in_two_ways_are_the_same() -> None:
    assert len(check(model(17, axes=(-1,), again=(2,)), {"x": X})[1]) == 1


def test_dynamic_shape_and_rank_one() -> None:
    assert len(check(model(17, shape=("batch", None, WIDTH)), {"x": X})[1]) == 1
    assert len(check(model(13, shape=(WIDTH,)), {"x": X[0, 0]})[1]) == 1


def test_scale_at_run_time() -> None:
    net = Net(13)
    spelled(net, scale="scale")
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH]), value("scale", [WIDTH])], ["y"]), {"x": X, "scale": X[0, 0]})
    assert len(sites) == 1
    assert ops(fused) == ["onnxfuse::LayerNormalization"]


REFUSED = [
    ({"shape": (2, 3, "W")}, "length of the normalised rows of 'x' is unknown ([2, 3, 'W'])"),
    ({"exponent": 3.0}, "constant 'two' is not 2 (3.0)"),
    ({"exponent": 2.001}, "constant 'two' is not 2 (2.000999927520752)"),
    ({"exponent": np.full(WIDTH, 2.0)}, "'two' is no one-element constant"),
    ({"axes": (1,)}, "normalised axes are not the last ones ([1])"),
    ({"axes": (0, 2)}, "normalised axes are not the last ones ([0, 2])"),
    ({"again": (1,), "shape": (2, WIDTH, WIDTH)}, "mean and variance are taken over different axes ([-1] and [1])"),
    ({"keepdims": 0, "shape": (3, 3, 3), "width": 3}, "ReduceMean drops the axes it reduces (keepdims) (0)"),
    ({"epsilon": np.linspace(1, 2, 3).reshape(3, 1)}, "epsilon is not one value ([3, 1])"),
    ({"opset": 13, "axes": (-2, -1)}, "normalises 2 axes, which needs operator set 17; this model's is (13)"),
    ({"elem": TensorProto.DOUBLE, "dtype": np.float64}, "'x' is of type (double)"),
    ({"epsilon": np.full((1, 1, 1, 1), 1e-5)}, "has more axes than 'x', and so has the result ([1, 1, 1, 1])"),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(kwargs: dict[str, Any], reason: str) -> None:
    original = model(**kwargs)
    fused, sites, misses = fuse(original)
    assert sites == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "layernorm"), [miss.reason for miss in misses]
    assert ops(fused) == ops(original)
    assert helpers.interface(fused) == helpers.interface(original)


@pytest.mark.parametrize("role", ["scale", "bias"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 1, WIDTH), (3, WIDTH), (1, 1, 1, WIDTH)])
def test_a_parameter_that_broadcasts_stays_outside(role: str, shape: tuple[int, ...]) -> None:
    original = model(17, **{role: np.full(shape, 1.5)})
    fused, sites, misses = check(original, {"x": X})
    assert len(sites) == 1  # what is inside of it
    assert ops(fused) == (["LayerNormalization", "Add"] if role == "bias" else ["LayerNormalization", "Mul", "Add"])
    assert misses == []


def test_a_scale_that_widens_the_rows_stays_outside() -> None:
    x = random(3, 1)
    original = model(17, shape=(3, 1), width=4)
    fused, _, _ = check(original, {"x": x})
    assert run(fused, {"x": x})[0].shape == (3, 4)


ESCAPES = ["mean", "centered", "square", "variance", "root"]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("by", ["node", "output", "body"])
def test_an_inner_tensor_that_others_read_is_kept(name: str, by: str) -> None:
    net = Net(17)
    inner = spelled(net)[name]
    outputs = ["y"]
    if by == "node":
        outputs.append(net.op("Relu", inner, out="other"))
    elif by == "output":
        outputs.append(inner)
    else:
        branch = helper.make_graph([helper.make_node("Neg", [inner], ["branch"])], "b", [], [onnx.ValueInfoProto(name="branch")])
        outputs.append(net.op("If", "flag", out="other", then_branch=branch, else_branch=_identity("x")))
    original = net.model([value("x", [2, 3, WIDTH]), value("flag", [], TensorProto.BOOL)], outputs)
    feeds = {"x": X, "flag": np.array(True)}
    _, sites, misses = check(original, feeds)
    assert "layernorm" not in names(sites)  # an rmsnorm of the centered values may be left
    reader = {"node": "(Relu)", "output": "a graph output", "body": "(Neg)"}[by]
    assert any(f"'{inner}' is also read by" in miss.reason and reader in miss.reason for miss in misses), [miss.reason for miss in misses]


@pytest.mark.parametrize("name", ["norm", "scaled"])
def test_a_smaller_norm_within_a_larger_one(name: str) -> None:
    net = Net(17)
    inner = spelled(net)[name]
    net.op("Relu", inner, out="other")
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y", "other", inner]), {"x": X})
    assert len(sites) == 1
    assert ops(fused) == (["LayerNormalization", "Add", "Relu"] if name == "scaled" else ["LayerNormalization", "Mul", "Add", "Relu"])


def _identity(name: str) -> onnx.GraphProto:
    return helper.make_graph([helper.make_node("Identity", [name], ["same"])], "e", [], [onnx.ValueInfoProto(name="same")])


def test_two_norms_that_share_statistics() -> None:
    net = Net(17)
    norm = spelled(net)["norm"]
    net.op("Add", net.op("Mul", norm, net.const(np.full(WIDTH, 3))), net.const(np.ones(WIDTH)), out="z")
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y", "z"]), {"x": X})
    assert len(sites) == 1
    assert ops(fused).count("LayerNormalization") == 1


@pytest.mark.parametrize("opset", [11, 13, 17, NEWEST])
def test_inside_an_if(opset: int) -> None:
    net = Net(opset)
    scale = net.const(np.linspace(1, 2, WIDTH))  # of the outer graph
    inner = Net(opset, prefix="i")
    spelled(inner, scale=scale)
    branch = helper.make_graph(inner.nodes, "then", [], [onnx.ValueInfoProto(name="y")], inner.constants)
    net.op("If", "flag", out="out", then_branch=branch, else_branch=_identity("x"))
    original = net.model([value("x", [2, 3, WIDTH]), value("flag", [], TensorProto.BOOL)], [value("out", [2, 3, WIDTH])])
    for flag in (True, False):
        fused, sites, _ = check(original, {"x": X, "flag": np.array(flag)})
        assert len(sites) == 1
        assert sorted(ops(fused)) == sorted(["If", NODE[opset >= 17], "Identity"])


@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize("loop", ["Loop", "Scan"])
def test_inside_a_loop(opset: int, loop: str) -> None:
    net = Net(opset)
    bias = net.const(np.linspace(1, 2, WIDTH))
    inner = Net(opset, prefix="i")
    given = value("v", [3, WIDTH])
    spelled(inner, "v", bias=bias)
    if loop == "Scan":
        inner.op("Identity", "y", out="z")
        body = helper.make_graph(inner.nodes, "body", [given], [value("z", [3, WIDTH])], inner.constants)
        net.op("Scan", "x", out="out", body=body, num_scan_inputs=1)
    else:
        inner.op("Identity", "go", out="go_on")
        inputs = [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), given]
        outputs = [value("go_on", [], TensorProto.BOOL), value("y", [3, WIDTH])]
        body = helper.make_graph(inner.nodes, "body", inputs, outputs, inner.constants)
        net.op("Loop", net.const(3, np.int64), "", "start", out="out", body=body)
    source = value("x", [2, 3, WIDTH]) if loop == "Scan" else value("start", [3, WIDTH])
    original = net.model([source], [value("out", [2, 3, WIDTH] if loop == "Scan" else [3, WIDTH])])
    fused, sites, misses = check(original, {source.name: X if loop == "Scan" else X[0]})
    assert len(sites) == 1, misses
    assert NODE[opset >= 17] in ops(fused)


def test_undo_gives_plain_operators_back() -> None:
    fused, _, _ = fuse(model(13))
    plain = undo(fused)
    assert not any(node.domain for node in plain.graph.node)
    assert not plain.functions
    assert all(entry.domain == "" for entry in plain.opset_import)
    np.testing.assert_allclose(run(plain, {"x": X})[0], WANT, rtol=1e-4, atol=1e-5)


def test_names_that_the_model_has_already() -> None:
    net = Net(13)
    spelled(net, "layernorm", out="ones")
    net.nodes[0].name = "layernorm"
    net.op("Neg", "ones", out="zeros")
    net.nodes[-1].name = "layernorm_1"
    fused, sites, _ = check(net.model([value("layernorm", [2, 3, WIDTH])], ["zeros"]), {"layernorm": X})
    assert len(sites) == 1
    assert fused.graph.node[0].name not in ("layernorm", "layernorm_1")


def test_shared_initializers_stay_as_they_are() -> None:
    net = Net(17)
    gamma, beta = net.const(np.linspace(1, 2, WIDTH).reshape(1, WIDTH)), net.const(np.linspace(0, 1, WIDTH))
    spelled(net, scale=gamma, bias=beta, out="a")
    spelled(net, "a", scale=gamma, bias=beta, out="b")
    net.op("Add", "b", gamma, out="y")
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": X})
    assert len(sites) == 2
    assert {t.name: onnx.numpy_helper.to_array(t).shape for t in fused.graph.initializer}[gamma] == (1, WIDTH)


def test_an_overridable_initializer_is_no_constant() -> None:
    net = Net(17)
    spelled(net, epsilon="eps")
    net.constants.append(onnx.numpy_helper.from_array(np.float32(1e-5), "eps"))
    original = net.model([value("x", [2, 3, WIDTH]), value("eps", [])], ["y"])
    _, sites, misses = check(original, {"x": X, "eps": np.array(0.5, np.float32)})
    assert sites == []
    assert any("'epsilon' is computed at run time" in miss.reason for miss in misses), misses


def test_where_inference_gave_up() -> None:
    """What is known of the graph's inputs is enough."""
    loaded = helpers.load(model(13))
    for node in loaded.graph.nodes:
        for tensor in node.outputs:
            tensor.dtype = tensor.shape = None
    matches, _ = find(FUSION, loaded, Index.of(loaded))
    assert len(matches) == 1
    apply(FUSION, matches, loaded)
    assert (loaded.graph.outputs[0].dtype, loaded.graph.outputs[0].shape) == (np.float32, [2, 3, WIDTH])
