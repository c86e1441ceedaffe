"""linear_bias: one Gemm against onnxruntime, and every reason to refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions import helpers
from tests.fusions.helpers import Net, value

ONLY = ("linear_bias",)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reasons(model: onnx.ModelProto) -> list[str]:
    """Why nothing was folded."""
    _, sites, misses = helpers.fuse(model, ONLY)
    assert sites == []
    return [miss.reason for miss in misses]


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17, 18, 21, helpers.RUN_OPSET])
@pytest.mark.parametrize("first", [False, True])
def test_matmul(opset: int, first: bool) -> None:
    net = Net(opset)
    operands = [net.op("MatMul", "x", net.const(random(3, 5))), net.const(random(5, seed=1))]
    net.op("Add", *(operands[::-1] if first else operands), out="y")
    model = net.model([value("x", ["M", 3])], ["y"])
    for rows in (1, 4):
        fused, sites, misses = helpers.check(model, {"x": random(rows, 3)}, ONLY)
        assert (helpers.names(sites), misses) == (["linear_bias"], [])
        assert helpers.ops(fused) == ["Gemm"]


@pytest.mark.parametrize(
    ("attrs", "bias"),
    [
        ({}, None),
        ({"transB": 1, "alpha": 0.5}, None),
        ({"transB": 1, "alpha": 0.5}, (5,)),
        ({"transA": 1, "beta": 0.25}, (1, 5)),
        ({"beta": 0.0}, (5,)),
        ({"beta": 2.0}, ()),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (1, 1)])
def test_gemm(attrs: dict[str, Any], bias: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
    net = Net()
    weight = random(5, 3) if attrs.get("transB") else random(3, 5)
    product = net.op("Gemm", "x", net.const(weight), *([] if bias is None else [net.const(random(*bias, seed=1))]), **attrs)
    net.op("Add", product, net.const(random(*shape, seed=2)), out="y")
    given = random(3, 4, seed=3) if attrs.get("transA") else random(4, 3, seed=3)
    fused, _, _ = helpers.check(net.model([value("x", given.shape)], ["y"]), {"x": given}, ONLY)
    assert helpers.ops(fused) == ["Gemm"]


@pytest.mark.parametrize("opset", [7, 9])
def test_gemm_before_its_third_input_was_optional(opset: int) -> None:
    net = Net(opset)
    net.op("Add", net.op("Gemm", "x", net.const(random(3, 5)), net.const(random(5))), net.const(random(5, seed=1)), out="y")
    fused, _, _ = helpers.check(net.model([value("x", [4, 3])], ["y"]), {"x": random(4, 3)}, ONLY)
    assert helpers.ops(fused) == ["Gemm"]


def test_gemm_of_two_run_time_matrices() -> None:
    net = Net()
    net.op("Add", net.op("Gemm", "x", "w"), net.const(random(5)), out="y")
    model = net.model([value("x", [4, 3]), value("w", [3, 5])], ["y"])
    fused, _, _ = helpers.check(model, {"x": random(4, 3), "w": random(3, 5)}, ONLY)
    assert helpers.ops(fused) == ["Gemm"]


@pytest.mark.parametrize("shape", [(4, 1), (4, 5), (2, 4, 5), (1, 1, 5), (1, 1, 1)])
def test_no_constant_of_a_column(shape: tuple[int, ...]) -> None:
    net = Net()
    net.op("Add", net.op("MatMul", "x", net.const(random(3, 5))), net.const(random(*shape), name="rows"), out="y")
    said = reasons(net.model([value("x", [4, 3])], ["y"]))
    assert said == [f"constant 'rows' of shape {list(shape)} is not one value for each of the channels (5)"]


def test_one_column_grows_by_the_constant() -> None:
    net = Net()
    net.op("Add", net.op("MatMul", "x", net.const(random(3, 1))), net.const(random(5), name="five"), out="y")
    assert reasons(net.model([value("x", [4, 3])], ["y"])) == ["constant 'five' of shape [5] is not one value for each of the channels (1)"]


def test_third_operand_of_a_gemm_for_each_row() -> None:
    net = Net()
    net.op("Add", net.op("Gemm", "x", net.const(random(3, 5)), net.const(random(4, 1), name="rows")), net.const(random(5)), out="y")
    said = reasons(net.model([value("x", [4, 3])], ["y"]))
    assert said == ["constant 'rows' of shape [4, 1] is not one value for each of the channels (5)"]


def test_third_operand_of_a_gemm_at_run_time() -> None:
    net = Net()
    net.op("Add", net.op("Gemm", "x", net.const(random(3, 5)), "c"), net.const(random(5)), out="y")
    assert reasons(net.model([value("x", [4, 3]), value("c", [5])], ["y"])) == ["c is no constant (c)"]


def test_higher_rank_stays() -> None:
    net = Net()
    net.op("Add", net.op("MatMul", "x", net.const(random(3, 5))), net.const(random(5)), out="y")
    model = net.model([value("x", [2, 4, 3])], ["y"])
    assert reasons(model) == ["rank of the first operand 'x' is not 2 (3)"]
    assert helpers.ops(helpers.fuse(model, ONLY)[0]) == ["MatMul", "Add"]


def test_second_operand_at_run_time() -> None:
    net = Net()
    net.op("Add", net.op("MatMul", "x", "w"), net.const(random(5)), out="y")
    assert reasons(net.model([value("x", [4, 3]), value("w", [3, 5])], ["y"])) == ["the second operand is computed at run time (w)"]


def test_second_operand_of_higher_rank() -> None:
    net = Net()
    net.op("Add", net.op("MatMul", "x", net.const(random(2, 3, 5), name="w")), net.const(random(5)), out="y")
    assert reasons(net.model([value("x", [4, 3])], ["y"])) == ["rank of the second operand 'w' is not 2 (3)"]


def test_constant_at_run_time() -> None:
    net = Net()
    net.op("Add", net.op("MatMul", "x", net.const(random(3, 5))), "c", out="y")
    assert reasons(net.model([value("x", [4, 3]), value("c", [5])], ["y"])) == ["'constant' is computed at run time (c)"]


def test_reshape_between() -> None:
    net = Net()
    product = net.op("Gemm", "x", net.const(random(8, 4)), net.const(random(4)))
    net.nodes.append(onnx.helper.make_node("Reshape", [product, net.const([1, 3, 4], np.int64)], ["r"], "view"))
    net.op("Add", "r", net.const(random(1, 3, 4)), out="y")
    model = net.model([value("x", [3, 8])], ["y"])
    assert reasons(model) == ["a Reshape lies between the product and the addition (view)"]


@pytest.mark.parametrize("output", [False, True])
def test_other_readers(output: bool) -> None:
    net = Net()
    net.op("Add", net.const(random(5)), net.op("MatMul", "x", net.const(random(3, 5)), out="h"), out="y")
    net.op("Relu", "h", out="z")
    (said,) = reasons(net.model([value("x", [4, 3])], ["y", "h" if output else "z"]))
    assert said.startswith("'h' is also read by " + ("a graph output" if output else "'"))


def test_shared_weight_and_bias() -> None:
    net = Net()
    weight, bias = net.const(random(3, 5), name="w"), net.const(random(5), name="b")
    for given, out in (("x", "y"), ("u", "z")):
        net.op("Add", net.op("MatMul", given, weight), bias, out=out)
    model = net.model([value("x", [4, 3]), value("u", [2, 3])], ["y", "z"])
    fused, sites, _ = helpers.check(model, {"x": random(4, 3), "u": random(2, 3)}, ONLY)
    assert helpers.names(sites) == ["linear_bias", "linear_bias"]
    assert [node.input[1] for node in fused.graph.node] == ["w", "w"]


def test_constant_nodes() -> None:
    net = Net(constant_nodes=True)
    net.op("Add", net.op("MatMul", "x", net.const(random(3, 5))), net.const(random(5)), out="y")
    fused, _, _ = helpers.check(net.model([value("x", [4, 3])], ["y"]), {"x": random(4, 3)}, ONLY)
    assert helpers.ops(fused, constants=True) == ["Gemm"]


@pytest.mark.parametrize(("dtype", "kind"), [(np.float16, TensorProto.FLOAT16), (np.float64, TensorProto.DOUBLE)])
def test_types(dtype: Any, kind: int) -> None:
    net = Net()
    net.op("Add", net.op("MatMul", "x", net.const(random(3, 5), dtype)), net.const(random(5), dtype), out="y")
    fused, _, _ = helpers.check(net.model([value("x", [4, 3], kind)], ["y"]), {"x": random(4, 3).astype(dtype)}, ONLY, rtol=1e-2, atol=1e-2)
    assert helpers.ops(fused) == ["Gemm"]


def test_integers_are_left() -> None:
    net = Net()
    net.op("Add", net.op("MatMul", "x", net.const(np.ones((3, 5)), np.int64)), net.const(np.ones(5), np.int64, name="b"), out="y")
    said = reasons(net.model([value("x", [4, 3], TensorProto.INT64)], ["y"]))
    assert said == ["constant 'b' is of no float type (int64)"]


def test_in_a_branch_that_captures() -> None:
    outer, inner, other = Net(), Net(prefix="i"), Net(prefix="e")
    weight = outer.const(random(3, 5), name="w")
    inner.op("Add", inner.op("MatMul", "x", weight), inner.const(random(5)), out="then")
    other.op("MatMul", "x", weight, out="else")
    bodies = [
        onnx.helper.make_graph(net.nodes, name, [], [value(out, [4, 5])], net.constants)
        for net, name, out in ((inner, "a", "then"), (other, "b", "else"))
    ]
    outer.op("If", "c", out="y", then_branch=bodies[0], else_branch=bodies[1])
    model = outer.model([value("x", [4, 3]), value("c", [], TensorProto.BOOL)], [value("y", [4, 5])])
    fused, sites, _ = helpers.check(model, {"x": random(4, 3), "c": np.array(True)}, ONLY)
    assert helpers.names(sites) == ["linear_bias"]
    assert helpers.ops(fused) == ["If", "MatMul", "Gemm"]
