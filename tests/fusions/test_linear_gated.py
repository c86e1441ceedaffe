"""linear_gated: two products of one input, or the halves of one, of which one opens the other, become one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxfuse.engine import prepare
from tests.fusions.convnext import weights
from tests.fusions.helpers import NEWEST, Net, check, fuse, names, ops, proved, random, run, value
from tests.fusions.strategies import Planter, first

F16 = TensorProto.FLOAT16
K, N = 16, 24
X = random(2, 3, K, dtype=np.float16)
OPS = {"erf": "LinearGeglu", "tanh": "LinearGegluTanh", "quick": "LinearQuickGeglu", "silu": "LinearSwiglu", "relu": "LinearReglu"}
HALF = {"rtol": 1e-2, "atol": 1e-2}


def opened(net: Net, variant: str, y: str) -> str:
    if variant == "relu":
        return net.op("Relu", y)
    if variant == "silu":
        return net.op("Mul", y, net.op("Sigmoid", y))
    return str(getattr(Planter(net, first, np.float16), f"gelu_{variant}")(y))


def product(net: Net, columns: int, bias: bool, seed: int, k: int = K) -> str:
    y = net.op("MatMul", "x", weights(net, k, columns, seed=seed))
    return net.op("Add", y, weights(net, columns, seed=seed + 1)) if bias else y


def two(
    variant: str = "silu", opset: int = 17, bias: bool = True, columns: tuple[int, int] = (N, N), swap: bool = False
) -> onnx.ModelProto:
    net = Net(opset)
    gate, passes = (product(net, n, bias, seed) for n, seed in zip(columns, (1, 5), strict=True))
    gate = opened(net, variant, gate)
    last = net.op("Mul", *((passes, gate) if swap else (gate, passes)))
    return net.model([value("x", ("N", 3, K), F16)], [last])


def halves(
    variant: str = "erf", opset: int = 17, second: bool = True, bias: bool = True, axis: int = -1, sizes: Any = None, total: int = 2 * N
) -> onnx.ModelProto:
    """One product, of whose halves the second (GEGLU as diffusers write it) or the first is activated."""
    net = Net(opset)
    y = product(net, total, bias, 3)
    attrs: dict[str, Any] = {"num_outputs": 2} if opset >= 18 and sizes is None else {}
    given = [y] if sizes is None else [y, net.const(sizes, np.int64)]
    net.op("Split", *given, out=["a", "b"], axis=axis, **attrs)
    gate, passes = ("b", "a") if second else ("a", "b")
    rows = 4 if axis == 1 else 3
    return net.model([value("x", ("N", rows, K), F16)], [net.op("Mul", passes, opened(net, variant, gate))])


def reference(proto: onnx.ModelProto, order: tuple[int, int], act: Callable[[Any], Any]) -> Any:
    held = [onnx.numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer]
    matrices, rows = ([t for t in held if t.ndim == rank] for rank in (2, 1))
    z = X.astype(np.float64) @ np.concatenate(matrices, axis=1) + np.concatenate([row for row in rows if row.size >= N])
    parts = np.split(z, 2, axis=-1)
    return act(parts[order[0]]) * parts[order[1]]


@pytest.mark.parametrize("variant", list(OPS))
@pytest.mark.parametrize("opset", [13, 17, 18, 20, NEWEST])
def test_two_products_at_every_opset(variant: str, opset: int) -> None:
    fused, sites, _ = check(two(variant, opset), {"x": X}, **HALF)
    assert ops(fused) == [f"onnxfuse::{OPS[variant]}"]
    assert sites[-1] == ("linear_gated", variant)


@pytest.mark.parametrize("variant", list(OPS))
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("opset", [13, 18])
def test_halves_of_one_product(variant: str, second: bool, opset: int) -> None:
    fused, sites, _ = check(halves(variant, opset, second), {"x": X}, **HALF)
    assert ops(fused) == [f"onnxfuse::{OPS[variant]}"]
    assert sites[-1] == ("linear_gated", variant)


def test_values_against_float64() -> None:
    def sigmoid(z: Any) -> Any:
        return z / (1 + np.exp(-z))

    for original, order in ((two("silu"), (0, 1)), (halves("silu", second=True), (1, 0)), (halves("silu", second=False), (0, 1))):
        fused, _, _ = fuse(original)
        np.testing.assert_allclose(run(fused, {"x": X})[0].astype(np.float64), reference(original, order, sigmoid), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_spellings(bias: bool, swap: bool) -> None:
    assert ops(check(two(bias=bias, swap=swap), {"x": X}, **HALF)[0]) == ["onnxfuse::LinearSwiglu"]
    assert ops(check(halves(bias=bias, sizes=[N, N], axis=2), {"x": X}, **HALF)[0]) == ["onnxfuse::LinearGeglu"]


def test_no_rows() -> None:
    original = two()
    fused, _, _ = fuse(original)
    assert run(fused, {"x": X[:0]})[0].shape == (0, 3, N)


def test_products_of_matrices_are_gemms_by_then() -> None:
    """linear_bias makes a Gemm of a product of matrices and its bias; exporters write one with a weight to transpose."""
    net = Net(17)
    parts = [net.op("Gemm", "x", weights(net, N, K, seed=seed), weights(net, N, seed=seed + 1), transB=1) for seed in (1, 5)]
    original = net.model([value("x", ("N", K), F16)], [net.op("Mul", opened(net, "silu", parts[0]), parts[1])])
    fused, sites, _ = check(original, {"x": X[0]}, **HALF)
    assert ops(fused) == ["onnxfuse::LinearSwiglu"]
    assert names(sites) == ["silu", "linear_gated"]


def test_bfloat16() -> None:
    import ml_dtypes

    net = Net(NEWEST)
    gate, passes = (net.op("MatMul", "x", net.const(np.full((K, N), scale), ml_dtypes.bfloat16)) for scale in (0.5, 0.25))
    original = net.model([value("x", ("N", 3, K), TensorProto.BFLOAT16)], [net.op("Mul", net.op("Relu", gate), passes)])
    fused, sites, _ = fuse(original)
    assert names(sites) == ["linear_gated"]
    proved(original, fused)


REFUSED: list[tuple[onnx.ModelProto, str]] = [
    (two(columns=(N, 1)), "are no multiples of 8 ([16, 1])"),
    (halves(axis=1), "Split does not divide the columns (axis) (1)"),
    (halves(total=40), "columns of the halves are no multiple of 8 ([20, 20])"),
    (two("relu", opset=11), "its function needs operator set 13; this model's is (11)"),
]


@pytest.mark.parametrize(("original", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(original: onnx.ModelProto, reason: str) -> None:
    _, sites, misses = fuse(original)
    assert "linear_gated" not in names(sites)
    assert any(reason in miss.reason for miss in misses if miss.fusion == "linear_gated"), misses


def test_a_product_that_others_read_stays() -> None:
    original = two("relu")
    gate = next(node for node in original.graph.node if node.op_type == "Relu").input[0]
    original.graph.output.append(value(gate, ("N", 3, N), F16))
    _, sites, _ = check(original, {"x": X}, **HALF)
    assert "linear_gated" not in names(sites)


def test_what_the_parser_is_given(tmp_path: Any) -> None:
    onnx.save(fuse(two())[0], tmp_path / "fused.onnx")
    given = onnx.load_from_string(prepare.for_parser(tmp_path / "fused.onnx", frozenset({"Linear"})))
    (node,) = given.graph.node
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert (node.op_type, attrs["activation"], attrs["gated"], attrs["outputs"]) == ("Linear", b"silu", 1, 1)
