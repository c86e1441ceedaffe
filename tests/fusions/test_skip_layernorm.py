"""skip_layernorm: residual addition and norm become one node; the sum stays where others read it; a broadcast is no residual."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.fusions.helpers import NEWEST, OPSETS, Net, check, fuse, layer_norm, names, ops, proved, random, run, same, undo, value
from tests.fusions.strategies import WIDTH, Planter, every

OP = "onnxfuse::SkipLayerNormalization"
X, SKIP = random(2, 3, WIDTH), random(2, 3, WIDTH, seed=1)
FEEDS = {"x": X, "skip": SKIP}
GAMMA, BETA, BIAS = np.linspace(0.5, 2, WIDTH), np.linspace(-1, 1, WIDTH), np.linspace(2, 1, WIDTH)


def norm(net: Net, total: str, dtype: Any = np.float32, out: str = "y", **attrs: Any) -> str:
    """One node where the opset has it, nine elsewhere."""
    if net.opset >= 17:
        return net.op("LayerNormalization", total, net.const(GAMMA, dtype), net.const(BETA, dtype), out=out, **{"epsilon": 1e-3, **attrs})
    centered = net.op("Sub", total, net.mean(total))
    root = net.op("Sqrt", net.op("Add", net.mean(net.op("Mul", centered, centered)), net.const(1e-3, dtype)))
    return net.op("Add", net.op("Mul", net.op("Div", centered, root), net.const(GAMMA, dtype)), net.const(BETA, dtype), out=out)


def inputs(shape: Any = (2, 3, WIDTH), skip: Any = None, elem: int = TensorProto.FLOAT) -> list[onnx.ValueInfoProto]:
    return [value("x", shape, elem), value("skip", shape if skip is None else skip, elem)]


def model(opset: int = 17, bias: str | None = None, swap: bool = False, **kwargs: Any) -> onnx.ModelProto:
    net = Net(opset, constant_nodes=kwargs.pop("constant_nodes", False))
    dtype = kwargs.pop("dtype", np.float32)
    attrs = kwargs.pop("attrs", {})
    x = net.op("Add", "x", net.const(BIAS, dtype)) if bias == "first" else "x"
    total = net.op("Add", *(("skip", x) if swap else (x, "skip")))
    total = net.op("Add", net.const(BIAS, dtype), total) if bias == "last" else total
    norm(net, total, dtype, **attrs)
    return net.model(inputs(**kwargs), ["y"])


@pytest.mark.parametrize("bias", [None, "first", "last"])
@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset: int, bias: str | None) -> None:
    fused, sites, _ = check(model(opset, bias), FEEDS)
    assert ops(fused) == [OP]
    assert names(sites) == (["skip_layernorm"] if opset >= 17 else ["layernorm", "skip_layernorm"])
    want = layer_norm(X + SKIP + (BIAS if bias else 0), GAMMA, BETA, 1e-3)
    np.testing.assert_allclose(run(fused, FEEDS)[0], want, rtol=1e-4, atol=1e-5)
    same(run(undo(fused), FEEDS), run(fused, FEEDS))
    assert len(fused.graph.node[0].output) == 2


@pytest.mark.parametrize("ir", [3, 4, 8, onnx.IR_VERSION])
def test_every_ir_version(ir: int) -> None:
    net = Net(13)
    norm(net, net.op("Add", "x", "skip"))
    fused, _, _ = check(net.model(inputs(), ["y"], ir), FEEDS)
    assert ops(fused) == [OP]
    assert fused.ir_version == ir


def test_every_order_of_operands() -> None:
    def build(pick: Any) -> onnx.ModelProto:
        net = Net(17)
        norm(net, Planter(net, pick, commute=True).residual("x", "skip"))
        return net.model(inputs(), ["y"])

    for original in every(build):
        fused, _, _ = fuse(original)
        assert ops(fused) == [OP]
        same(run(fused, FEEDS), run(original, FEEDS))


@pytest.mark.parametrize("bias", [None, "last"])
def test_constant_nodes(bias: str | None) -> None:
    assert ops(check(model(13, bias, constant_nodes=True), FEEDS)[0]) == [OP]


def test_symbols_prove_one_shape() -> None:
    assert ops(check(model(shape=("batch", "length", WIDTH)), FEEDS)[0]) == [OP]


def test_a_norm_without_a_bias() -> None:
    net = Net(17)
    net.op("LayerNormalization", net.op("Add", "x", "skip"), net.const(GAMMA), out="y", axis=2)
    fused, _, _ = check(net.model(inputs(), ["y"]), FEEDS)
    assert ops(fused) == [OP]
    np.testing.assert_allclose(run(fused, FEEDS)[0], layer_norm(X + SKIP, GAMMA), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [13, 17])
def test_half_precision(opset: int) -> None:
    feeds = {name: given.astype(np.float16) for name, given in FEEDS.items()}
    original = model(opset, "first", elem=TensorProto.FLOAT16, dtype=np.float16)
    fused, _, _ = check(original, feeds, rtol=1e-2, atol=1e-2)
    assert ops(fused) == [OP]
    total = feeds["x"] + feeds["skip"] + BIAS.astype(np.float16)
    np.testing.assert_allclose(run(fused, feeds)[0].astype(np.float64), layer_norm(total, GAMMA, BETA, 1e-3), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("opset", [13, NEWEST])
def test_bfloat16(opset: int) -> None:
    import ml_dtypes

    original = model(opset, "last", elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, _, _ = fuse(original)
    assert ops(fused) == [OP]
    proved(original, fused)


REFUSED = [
    ({"skip": (1, 3, WIDTH)}, "not proved to be of one shape ([2, 3, 8] and [1, 3, 8])"),
    ({"skip": (3, WIDTH)}, "not proved to be of one shape ([2, 3, 8] and [3, 8])"),
    ({"skip": (WIDTH,)}, "not proved to be of one shape ([2, 3, 8] and [8])"),
    ({"skip": ("n", 3, WIDTH)}, "not proved to be of one shape ([2, 3, 8] and ['n', 3, 8])"),
    ({"shape": ("n", 3, WIDTH), "skip": ("m", 3, WIDTH)}, "not proved to be of one shape (['n', 3, 8] and ['m', 3, 8])"),
    ({"shape": (None, 3, WIDTH), "skip": (None, 3, WIDTH)}, "not proved to be of one shape"),
    (
        {"attrs": {"stash_type": 10}, "elem": TensorProto.FLOAT16, "dtype": np.float16},
        "statistics are not kept in float32 (stash_type) (10)",
    ),
    ({"attrs": {"epsilon": -1e-6}}, "epsilon is negative or no number"),
    ({"elem": TensorProto.DOUBLE, "dtype": np.float64}, "'x' is of type (double)"),
]


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(kwargs: dict[str, Any], reason: str) -> None:
    original = model(**kwargs)
    fused, sites, misses = fuse(original)
    assert sites == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "skip_layernorm"), [miss.reason for miss in misses]
    assert ops(fused) == ["Add", "LayerNormalization"]


def test_rows_that_are_too_long_for_the_kernel() -> None:
    net = Net(17)
    gamma = net.const(np.ones(16385))
    net.op("LayerNormalization", net.op("Add", "x", "skip"), gamma, gamma, out="y")
    _, sites, misses = fuse(net.model(inputs(("n", 16385)), ["y"]))
    assert sites == []
    assert any("rows are longer than the 16384 elements that the kernel holds (16385)" in miss.reason for miss in misses)


def test_several_axes() -> None:
    net = Net(17)
    net.op("LayerNormalization", net.op("Add", "x", "skip"), net.const(np.ones((3, WIDTH))), out="y", axis=-2)
    _, sites, misses = check(net.model(inputs(), ["y"]), FEEDS)
    assert sites == []
    assert any("normalises more than the last axis (axis) (-2)" in miss.reason for miss in misses)


def test_a_gamma_that_broadcasts() -> None:
    net = Net(17)
    net.op("LayerNormalization", net.op("Add", "x", "skip"), net.const([1.5]), out="y")
    _, sites, misses = fuse(net.model(inputs(), ["y"]))
    assert sites == []
    assert any("is not one value for each normalised element of ([8])" in miss.reason for miss in misses)


@pytest.mark.parametrize("by", ["node", "output", "body", "next residual"])
@pytest.mark.parametrize("bias", [None, "last"])
@pytest.mark.parametrize("opset", [13, 17])
def test_the_sum_is_a_second_output_where_others_read_it(by: str, bias: str | None, opset: int) -> None:
    net = Net(opset)
    total = net.op("Add", "x", "skip")
    total = net.op("Add", total, net.const(BIAS)) if bias else total
    outputs, feeds = ["y"], dict(FEEDS)
    if by == "node":
        outputs.append(net.op("Neg", total))  # stands before the norm
    elif by == "output":
        outputs.append(total)
    elif by == "body":
        then = helper.make_graph([helper.make_node("Neg", [total], ["minus"])], "then", [], [onnx.ValueInfoProto(name="minus")])
        other = helper.make_graph([helper.make_node("Abs", ["x"], ["plus"])], "else", [], [onnx.ValueInfoProto(name="plus")])
        outputs.append(net.op("If", "flag", out="other", then_branch=then, else_branch=other))
        feeds["flag"] = np.array(True)
    norm(net, total)
    if by == "next residual":
        outputs = [norm(net, net.op("Add", net.op("Neg", "y"), total), out="z")]
    given = inputs() + ([value("flag", [], TensorProto.BOOL)] if by == "body" else [])
    fused, sites, _ = check(net.model(given, outputs), feeds)
    assert names(sites).count("skip_layernorm") == (2 if by == "next residual" else 1)
    assert "Add" not in ops(fused)
    if by == "output":
        np.testing.assert_allclose(run(fused, feeds)[1], X + SKIP + (BIAS if bias else 0), rtol=1e-6, atol=1e-6)


def test_a_gamma_that_is_computed_from_the_sum_would_make_a_cycle() -> None:
    net = Net(17)
    total = net.op("Add", "x", "skip")
    row = net.op("Reshape", net.op("Slice", total, net.const([0, 0], np.int64), net.const([1, 1], np.int64)), net.const([WIDTH], np.int64))
    net.op("LayerNormalization", total, row, out="y")
    original = net.model(inputs(), ["y"])
    _, sites, misses = check(original, FEEDS)
    assert sites == []
    assert any("is computed at run time, and" in miss.reason and "has other readers" in miss.reason for miss in misses), misses


def test_a_gamma_computed_at_run_time() -> None:
    net = Net(17)
    gamma = net.op("Neg", "g")
    net.op("LayerNormalization", net.op("Add", "x", "skip"), gamma, out="y")
    fused, _, _ = check(net.model([*inputs(), value("g", [WIDTH])], ["y"]), {**FEEDS, "g": X[0, 0]})
    assert ops(fused) == ["Neg", OP]


def test_a_sum_before_the_bias_that_others_read() -> None:
    net = Net(17)
    total = net.op("Add", "x", "skip")
    norm(net, net.op("Add", total, net.const(BIAS)))
    fused, sites, misses = check(net.model(inputs(), ["y", total]), FEEDS)
    assert sites == []
    assert ops(fused) == ["Add", "Add", "LayerNormalization"]
    assert any(f"'{total}' is also read by a graph output" in miss.reason for miss in misses)


def test_statistics_that_others_read() -> None:
    net = Net(17)
    net.op("LayerNormalization", net.op("Add", "x", "skip"), net.const(GAMMA), out=["y", "mean"])
    _, sites, misses = check(net.model(inputs(), ["y", "mean"]), FEEDS)
    assert sites == []
    assert any("'mean' is also read by a graph output" in miss.reason for miss in misses)


def test_a_value_added_to_itself() -> None:
    net = Net(17)
    norm(net, net.op("Add", "x", "x"))
    fused, _, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": X})
    assert ops(fused) == [OP]


def test_a_biased_value_added_to_itself() -> None:
    """The bias is no part of the site: what it gives is the residual, too."""
    net = Net(17)
    biased = net.op("Add", "x", net.const(BIAS))
    norm(net, net.op("Add", biased, biased))
    fused, _, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": X})
    assert ops(fused) == ["Add", OP]


@pytest.mark.parametrize("opset", [13, 17, 23])
def test_inside_an_if_with_a_residual_of_the_outer_graph(opset: int) -> None:
    inner = Net(opset, prefix="i")
    norm(inner, inner.op("Add", "x", "skip"))
    then = helper.make_graph(inner.nodes, "then", [], [onnx.ValueInfoProto(name="y")], inner.constants)
    other = helper.make_graph([helper.make_node("Abs", ["x"], ["plus"])], "else", [], [onnx.ValueInfoProto(name="plus")])
    net = Net(opset)
    net.op("If", "flag", out="z", then_branch=then, else_branch=other)
    original = net.model([*inputs(), value("flag", [], TensorProto.BOOL)], [value("z", [2, 3, WIDTH])])
    fused, _, _ = check(original, {**FEEDS, "flag": np.array(True)})
    assert sorted(ops(fused)) == sorted(["If", OP, "Abs"])


def test_two_sites_share_one_function_and_their_zeros() -> None:
    net = Net(17)
    y = norm(net, net.op("Add", "x", "skip"), out="y")
    norm(net, net.op("Add", y, "skip"), out="z")
    fused, _, _ = check(net.model(inputs(), ["z"]), FEEDS)
    assert ops(fused) == [OP, OP]
    assert len(fused.functions) == 1
    assert fused.graph.node[0].input[4] == fused.graph.node[1].input[4]


def test_names_that_the_model_has_already() -> None:
    net = Net(17)
    total = net.op("Add", "x", "skip", out="skip_layernorm")
    norm(net, total, out="zeros")
    assert ops(check(net.model(inputs(), ["zeros"]), FEEDS)[0]) == [OP]
