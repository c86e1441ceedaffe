"""Products by constant weights, as MatMul (+ Add) or as Gemm: what the fusions of a product with what follows it share."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _folding, _norms
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Builder, Match, Refusal
from onnxfuse.fusions.pattern import Pattern, const, either, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model


def linear(role: str = "") -> Pattern:
    """x W + bias. `role` stands before the names of the weight, the bias and the product, where a site has several."""
    x, weight, bias = tensor("x"), const(f"{role}weight"), const(f"{role}bias")
    product = op("MatMul", x, weight, out=f"{role}product")
    return either(
        op("Add", product, bias, out=f"{role}biased"),
        product,
        op("Gemm", x, weight, bias, out=f"{role}product"),
        op("Gemm", x, weight, out=f"{role}product"),
    )


def refuse_type(x: gs.Tensor, model: Model) -> Refusal | None:
    """Tensor cores multiply halves: of the model as it is, or as it will be."""
    kind = _norms.element_type(x)
    if kind in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) or (model.becomes_half and kind == onnx.TensorProto.FLOAT):
        return None
    name = onnx.TensorProto.DataType.Name(kind).lower() if kind else "unknown"
    return Refusal(f"tensor cores take float16 and bfloat16; '{x.name}' is of type", name)


def columns_of(match: Match, role: str = "") -> int | Refusal:
    """The columns of the product; refused where the kernel does not take it, or its bias."""
    x, weight, node = match["x"], match[f"{role}weight"], match.node(f"{role}product")
    sizes = _folding.known_sizes(weight)
    if sizes is None or len(sizes) != 2:
        return Refusal(f"weight '{weight.name}' is no matrix", query.shape(weight))
    if sizes[0] % 8 or sizes[1] % 8 or not min(sizes):
        return Refusal(f"sizes of the weight '{weight.name}' are no multiples of 8", sizes)
    if _norms.element_type(weight) != _norms.element_type(x):
        return Refusal(f"weight '{weight.name}' is of another type than '{x.name}'")
    refusal = _refuse_gemm(node) if node.op == "Gemm" else None
    if refusal:
        return refusal
    rank = query.rank(x)
    if rank is None or rank < 2:
        return Refusal(f"rank of '{x.name}' is not 2 or more", rank)
    columns = sizes[0 if _turned(node) else 1]
    bias = match.get(f"{role}bias")
    return columns if bias is None else _norms.row_parameter(bias, [columns], "bias", x) or columns


def weight_of(match: Match, new: Builder, role: str = "") -> gs.Tensor:
    """W as [K, N]."""
    weight = match[f"{role}weight"]
    if not _turned(match.node(f"{role}product")):
        return weight
    return new.computed(("turned", id(weight)), weight.name, lambda: np.ascontiguousarray(_values(weight).T))


def side_by_side(new: Builder, first: Array, second: Array, stem: str, key: tuple[object, ...]) -> gs.Constant:
    """Columns of two matrices, or of two rows, in groups of 8, one of the first and one of the second in turn."""

    def packed() -> Array:
        grouped = (part.reshape(*part.shape[:-1], -1, 1, 8) for part in (first, second))
        return np.concatenate(list(grouped), axis=-2).reshape(*first.shape[:-1], -1)

    return new.computed(key, stem, packed)


def values_of(match: Match, role: str = "") -> Array:
    """W as [K, N], its values."""
    values = _values(match[f"{role}weight"])
    return values.T if _turned(match.node(f"{role}product")) else values


def bias_values(match: Match, columns: int, role: str = "") -> Array:
    """The bias as [N]; zeros where there is none."""
    bias = match.get(f"{role}bias")
    return np.zeros(columns, _norms.numpy_type(match["x"])) if bias is None else _values(bias).reshape(columns)


def _values(value: gs.Tensor) -> Array:
    values = query.constant(value)
    assert values is not None
    return values


def _turned(node: gs.Node) -> bool:
    return node.op == "Gemm" and bool(node.attrs.get("transB", 0))


def _refuse_gemm(node: gs.Node) -> Refusal | None:
    if node.attrs.get("transA", 0):
        return Refusal("Gemm transposes its first operand (transA)", 1)
    for name in ("alpha", "beta"):
        if node.attrs.get(name, 1.0) != 1.0:
            return Refusal(f"Gemm scales ({name})", node.attrs[name])
    return None
