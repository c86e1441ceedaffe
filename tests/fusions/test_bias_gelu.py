"""bias_gelu: a row's bias and the GELU behind it become one node; an addition that broadcasts or is no bias stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.fusions.helpers import NEWEST, OPSETS, Net, check, fuse, gelu, names, ops, proved, random, run, same, undo, value
from tests.fusions.strategies import WIDTH, Planter, first
from tests.fusions.test_gelu import VARIANTS

OP = {"erf": "onnxfuse::BiasGelu", "tanh": "onnxfuse::BiasGeluTanh", "quick": "onnxfuse::BiasQuickGelu"}
X = random(2, 3, WIDTH)
BIAS = np.linspace(-1, 1, WIDTH)


def model(
    variant: str = "erf",
    opset: int = 17,
    bias: Any = BIAS,
    shape: Any = ("N", 3, WIDTH),
    elem: int = TensorProto.FLOAT,
    swap: bool = False,
    dtype: Any = np.float32,
    **kwargs: Any,
) -> onnx.ModelProto:
    net = Net(opset, **kwargs)
    name = bias if isinstance(bias, str) else net.const(bias, dtype)
    total = net.op("Add", *((name, "x") if swap else ("x", name)), out="sum")
    last = getattr(Planter(net, first, dtype), f"gelu_{variant}")(total)
    return net.model([value("x", shape, elem)], [last])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(variant: str, opset: int) -> None:
    fused, sites, _ = check(model(variant, opset), {"x": X}, atol=1e-6)
    assert ops(fused) == [OP[variant]]
    assert sites == [("gelu", variant), ("bias_gelu", variant)]
    np.testing.assert_allclose(run(fused, {"x": X})[0], gelu(X + BIAS, variant), rtol=1e-3, atol=2e-6)
    same(run(undo(fused), {"x": X}), run(fused, {"x": X}), atol=1e-6)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("constant_nodes", [False, True])
@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (1, 1, WIDTH)])
def test_spellings_of_the_bias(swap: bool, constant_nodes: bool, shape: tuple[int, ...]) -> None:
    fused, sites, _ = check(model(bias=BIAS.reshape(shape), swap=swap, constant_nodes=constant_nodes), {"x": X})
    assert names(sites) == ["gelu", "bias_gelu"]
    assert ops(fused) == [OP["erf"]]
    np.testing.assert_allclose(run(fused, {"x": X})[0], gelu(X + BIAS, "erf"), rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_native_gelu(approximate: str) -> None:
    net = Net(20)
    net.op("Gelu", net.op("Add", "x", net.const(BIAS)), out="y", **({"approximate": "tanh"} if approximate == "tanh" else {}))
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": X}, atol=1e-6)
    variant = "tanh" if approximate == "tanh" else "erf"
    assert sites == [("bias_gelu", variant)]
    assert ops(fused) == [OP[variant]]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("opset", [13, 20])
def test_half_precision(variant: str, opset: int) -> None:
    x = X.astype(np.float16)
    original = model(variant, opset, elem=TensorProto.FLOAT16, dtype=np.float16)
    fused, _, _ = check(original, {"x": x}, rtol=5e-3, atol=5e-3)
    assert ops(fused) == [OP[variant]]
    total = (x + BIAS.astype(np.float16)).astype(np.float16)  # the sum is rounded, as it was before
    np.testing.assert_allclose(run(fused, {"x": x})[0].astype(np.float64), gelu(total, variant), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("opset", [13, NEWEST])
def test_bfloat16(opset: int) -> None:
    import ml_dtypes

    original = model(opset=opset, elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, sites, _ = fuse(original)
    assert names(sites) == ["gelu", "bias_gelu"]
    proved(original, fused)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (3, WIDTH), (2, 1, WIDTH), (1, 1, 1, WIDTH)])
def test_a_bias_that_is_not_one_value_for_each_element_of_a_row(shape: tuple[int, ...]) -> None:
    fused, sites, misses = check(model(bias=np.full(shape, 0.5), shape=(2, 3, WIDTH)), {"x": X})
    assert names(sites) == ["gelu"]
    assert ops(fused) == ["Add", "onnxfuse::Gelu"]
    assert any(miss.fusion == "bias_gelu" for miss in misses)


def test_a_bias_that_widens_the_rows() -> None:
    x = random(2, 3, 1)
    fused, sites, misses = check(model(shape=(2, 3, 1)), {"x": x})
    assert names(sites) == ["gelu"]
    assert any(
        "is not one value for each normalised element of" in m.reason or "shape [8]" in m.reason for m in misses if m.fusion == "bias_gelu"
    )
    assert run(fused, {"x": x})[0].shape == (2, 3, WIDTH)


REFUSED = [
    ({"shape": ("N", 3, "C")}, "length of the normalised rows of 'x' is unknown"),
    ({"bias": "x"}, "'bias' is computed at run time (x)"),
]


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(kwargs: dict[str, Any], reason: str) -> None:
    _, sites, misses = check(model(**kwargs), {"x": X})
    assert names(sites) == ["gelu"]
    assert any(reason in miss.reason for miss in misses if miss.fusion == "bias_gelu"), misses


@pytest.mark.parametrize("by", ["node", "output", "body"])
def test_a_sum_that_others_read_is_kept(by: str) -> None:
    original = model(shape=(2, 3, WIDTH))
    if by == "node":
        original.graph.node.append(helper.make_node("Neg", ["sum"], ["other"]))
    elif by == "body":
        then = helper.make_graph([helper.make_node("Neg", ["sum"], ["minus"])], "then", [], [onnx.ValueInfoProto(name="minus")])
        other = helper.make_graph([helper.make_node("Abs", ["x"], ["plus"])], "else", [], [onnx.ValueInfoProto(name="plus")])
        original.graph.input.append(value("flag", [], TensorProto.BOOL))
        original.graph.node.append(helper.make_node("If", ["flag"], ["other"], then_branch=then, else_branch=other))
    original.graph.output.append(value("sum" if by == "output" else "other", [2, 3, WIDTH]))
    _, sites, misses = check(original, {"x": X, **({"flag": np.array(True)} if by == "body" else {})})
    assert names(sites) == ["gelu"]
    reader = {"node": "(Neg)", "output": "a graph output", "body": "(Neg)"}[by]
    assert any("'sum' is also read by" in m.reason and reader in m.reason for m in misses if m.fusion == "bias_gelu"), misses


def test_one_bias_for_two_sites() -> None:
    net = Net(13)
    bias = net.const(BIAS.reshape(1, WIDTH))
    planter = Planter(net, first)
    y = planter.gelu_erf(net.op("Add", "x", bias))
    z = planter.gelu_tanh(net.op("Add", y, bias))
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], [z]), {"x": X})
    assert names(sites) == ["gelu", "gelu", "bias_gelu", "bias_gelu"]
    assert sum(t.dims[-1:] == [WIDTH] for t in fused.graph.initializer) == 1  # weights that were shared stay shared
