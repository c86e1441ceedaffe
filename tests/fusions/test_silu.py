"""silu: x * sigmoid(x) becomes one node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from tests.fusions.helpers import NEWEST, OPSETS, Net, check, fuse, ops, proved, random, run, silu, value
from tests.fusions.strategies import Planter, every

NODE = "onnxfuse::Silu"
X = random(2, 3, 8)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_and_spelling(opset: int) -> None:
    def build(pick: Any) -> Any:
        net = Net(opset)
        last = Planter(net, pick, commute=True).silu("x")
        return net.model([value("x", ["N", None, "C"])], [last])

    for original in every(build):
        fused, sites, misses = check(original, {"x": X}, rtol=1e-5)
        assert ops(fused) == [NODE]
        assert sites == [("silu", None)]
        assert [miss for miss in misses if miss.fusion == "silu"] == []
        np.testing.assert_allclose(run(fused, {"x": X})[0], silu(X), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("opset", [9, 13, NEWEST])
def test_half_precision(opset: int) -> None:
    x = X.astype(np.float16)
    net = Net(opset)
    net.op("Mul", "x", net.op("Sigmoid", "x"), out="y")
    fused, _, _ = check(net.model([value("x", [2, 3, 8], TensorProto.FLOAT16)], ["y"]), {"x": x}, rtol=5e-3, atol=5e-3)
    assert ops(fused) == [NODE]


def test_bfloat16() -> None:
    net = Net(13)
    net.op("Mul", "x", net.op("Sigmoid", "x"), out="y")
    original = net.model([value("x", [2, 3, 8], TensorProto.BFLOAT16)], ["y"])
    fused, sites, _ = fuse(original)
    assert len(sites) == 1
    proved(original, fused)


@pytest.mark.parametrize("slope", [None, 1.0, 2.0])
def test_the_operator(slope: float | None) -> None:
    net = Net(24)
    net.op("Swish", "x", out="y", **({} if slope is None else {"alpha": slope}))
    fused, _, misses = check(net.model([value("x", [2, 3, 8])], ["y"]), {"x": X})
    assert ops(fused) == (["Swish"] if slope == 2.0 else [NODE])
    assert [miss.reason for miss in misses if miss.fusion == "silu"] == (["the slope is not 1 (alpha) (2.0)"] if slope == 2.0 else [])


def test_any_rank() -> None:
    for shape in ([], [5], [2, "b", 2, "d", 2]):
        net = Net(13)
        net.op("Mul", net.op("Sigmoid", "x"), "x", out="y")
        assert ops(check(net.model([value("x", shape)], ["y"]), {"x": random(*[2 if isinstance(d, str) else d for d in shape])})[0]) == [
            NODE
        ]


def test_unknown_rank() -> None:
    net = Net(13)
    x = net.op("Reshape", "x", "shape")
    net.op("Mul", net.op("Sigmoid", x), x, out="y")
    original = net.model([value("x", [2, 3, 8]), value("shape", ["r"], TensorProto.INT64)], [value("y", ["a", "b"])])
    assert ops(check(original, {"x": X, "shape": np.array([4, 12])})[0]) == ["Reshape", NODE]


@pytest.mark.parametrize("output", [False, True])
def test_a_gate_that_others_read_is_kept(output: bool) -> None:
    net = Net(13)
    gate = net.op("Sigmoid", "x")
    net.op("Mul", gate, "x", out="y")
    other = gate if output else net.op("Neg", gate)
    _, sites, misses = check(net.model([value("x", [2, 3, 8])], ["y", other]), {"x": X})
    assert sites == []
    assert [miss.reason for miss in misses if miss.fusion == "silu"] == [
        f"'{gate}' is also read by " + ("a graph output" if output else f"'{other}' (Neg)")
    ]


def test_refused() -> None:
    net = Net(13)
    net.op("Mul", net.op("Sigmoid", "x"), "x", out="y")
    _, sites, misses = fuse(net.model([value("x", [4], TensorProto.DOUBLE)], ["y"]))
    assert sites == []
    assert [miss.reason for miss in misses if miss.fusion == "silu"] == ["'x' is of type (double)"]


def test_a_gate_of_another_tensor() -> None:
    net = Net(13)
    net.op("Mul", net.op("Sigmoid", net.op("Neg", "x")), "x", out="y")
    _, sites, _ = check(net.model([value("x", [2, 3, 8])], ["y"]), {"x": X})
    assert sites == []


def test_a_slope_that_is_not_one() -> None:
    net = Net(13)
    net.op("Mul", net.op("Sigmoid", net.op("Mul", "x", net.const(1.5))), "x", out="y")
    _, sites, misses = check(net.model([value("x", [2, 3, 8])], ["y"]), {"x": X})
    assert sites == []
    assert any(miss.reason == "constant 'slope' is not 1 (1.5)" for miss in misses), misses


def test_a_slope_that_makes_the_result_grow() -> None:
    net = Net(13)
    net.op("Mul", net.op("Sigmoid", net.op("Mul", "x", net.const([[1.0]]))), "x", out="y")
    _, sites, misses = check(net.model([value("x", [8])], ["y"]), {"x": X[0, 0]})
    assert sites == []
    assert any("has more axes than 'x', and so has the result ([1, 1])" in miss.reason for miss in misses), misses


def test_both_operands_are_gates() -> None:
    net = Net(13)
    net.op("Mul", net.op("Sigmoid", "x"), net.op("Sigmoid", "x"), out="y")
    _, sites, _ = check(net.model([value("x", [2, 3, 8])], ["y"]), {"x": X})
    assert sites == []
