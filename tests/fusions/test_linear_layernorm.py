"""linear_layernorm: a product, its bias, layer scale, the residual and the norm of the sum become one node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxfuse.engine import prepare
from tests.fusions.convnext import weights
from tests.fusions.helpers import NEWEST, Net, check, fuse, names, ops, proved, random, run, value

F16 = TensorProto.FLOAT16
K, N = 16, 24
FEEDS = {"x": random(2, 3, K, dtype=np.float16), "r": random(2, 3, N, seed=9, dtype=np.float16)}
HALF = {"rtol": 1e-2, "atol": 1e-2}


def model(
    opset: int = 17, scaled: bool = True, bias: bool = True, offset: bool = True, read: bool = False, columns: int = N, **kwargs: Any
) -> onnx.ModelProto:
    net = Net(opset)
    y = net.op("MatMul", "x", weights(net, K, columns))
    if bias:
        y = net.op("Add", y, weights(net, columns, seed=2))
    if scaled:
        y = net.op("Mul", y, weights(net, columns, seed=3))
    total = net.op("Add", y, "r")
    gamma, beta = weights(net, columns, seed=4), weights(net, columns, seed=5)
    if opset >= 17:
        net.op("LayerNormalization", total, gamma, *([beta] if offset else []), out="y", **{"axis": -1, "epsilon": 1e-5, **kwargs})
    else:
        centred = net.op("Sub", total, net.mean(total))
        root = net.op("Sqrt", net.op("Add", net.mean(net.op("Mul", centred, centred)), net.const(1e-5, np.float16)))
        net.op("Add", net.op("Mul", net.op("Div", centred, root), gamma), beta, out="y")
    outputs = [value("y", ("N", 3, columns), F16), *([value(total, ("N", 3, columns), F16)] if read else [])]
    return net.model([value("x", ("N", 3, K), F16), value("r", ("N", 3, columns), F16)], outputs)


@pytest.mark.parametrize("opset", [13, 17, 18, NEWEST])
@pytest.mark.parametrize("scaled", [False, True])
def test_at_every_opset(opset: int, scaled: bool) -> None:
    fused, sites, _ = check(model(opset, scaled), FEEDS, **HALF)
    assert ops(fused) == ["onnxfuse::LinearLayerNorm"]
    assert sites[-1] == ("linear_layernorm", "scaled" if scaled else "residual")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_what_may_be_absent_and_the_sum_that_others_read(bias: bool, offset: bool, read: bool) -> None:
    original = model(bias=bias, offset=offset, read=read)
    fused, _, _ = check(original, FEEDS, **HALF)
    assert ops(fused) == ["onnxfuse::LinearLayerNorm"]


def test_values_against_float64() -> None:
    original = model()
    fused, _, _ = fuse(original)
    w, b, scale, gamma, beta = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in original.graph.initializer)
    total = FEEDS["r"].astype(np.float64) + scale * (FEEDS["x"].astype(np.float64) @ w + b)
    away = total - total.mean(-1, keepdims=True)
    want = away / np.sqrt((away**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta
    np.testing.assert_allclose(run(fused, FEEDS)[0].astype(np.float64), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("read", [False, True])
def test_what_the_parser_is_given(read: bool, tmp_path: Any) -> None:
    onnx.save(fuse(model(read=read))[0], tmp_path / "fused.onnx")
    given = onnx.load_from_string(prepare.for_parser(tmp_path / "fused.onnx", frozenset({"Linear"})))
    (node,) = given.graph.node
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert (node.op_type, attrs["residual"], attrs["norm"], attrs["outputs"]) == ("Linear", 1, 1, 1 + read)
    assert len(node.output) == 1 + read
    assert attrs["epsilon"] == pytest.approx(1e-5)


def test_bfloat16() -> None:
    import ml_dtypes

    net = Net(NEWEST)
    bf16 = ml_dtypes.bfloat16
    total = net.op("Add", net.op("MatMul", "x", net.const(np.full((K, N), 0.25), bf16)), "r")
    net.op("LayerNormalization", total, net.const(np.ones(N), bf16), net.const(np.ones(N), bf16), out="y", axis=-1)
    kind = TensorProto.BFLOAT16
    original = net.model([value("x", ("N", 3, K), kind), value("r", ("N", 3, N), kind)], [value("y", ("N", 3, N), kind)])
    fused, sites, _ = fuse(original)
    assert names(sites) == ["linear_layernorm"]
    proved(original, fused)


REFUSED: list[tuple[onnx.ModelProto, str]] = [
    (model(columns=264), "rows are longer than the 256 columns that a block has (264)"),
    (model(columns=20), "are no multiples of 8 ([16, 20])"),
    (model(axis=1), "normalises more than the last axis (axis) (1)"),
    (model(epsilon=-1.0), "epsilon is negative or no number (-1.0)"),
    (model(stash_type=10), "statistics are not kept in float32 (stash_type) (10)"),
]


@pytest.mark.parametrize(("original", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(original: onnx.ModelProto, reason: str) -> None:
    _, sites, misses = fuse(original, ["linear_layernorm"])
    assert names(sites) == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "linear_layernorm"), misses


def test_a_residual_that_broadcasts_is_none() -> None:
    original = model()
    original.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 1
    _, sites, misses = fuse(original, ["linear_layernorm"])
    assert names(sites) == []
    assert any("the residual is not proved to be of the product's shape" in miss.reason for miss in misses), misses
