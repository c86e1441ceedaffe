"""qkv_pack: the products that make queries, keys and values of one attention from one tensor become one product.

    Q = X Wq + bq        K = X Wk + bk        V = X Wv + bv        ->        Q, K, V = Split(X [Wq Wk Wv] + [bq bk bv])

When it wins: where one product of the small widths leaves the GPU partly idle (short sequences, small batches); TensorRT may merge the
products by itself. Source: the packed projections of transformer inference libraries. Widths may differ (grouped queries). Where
only Q and K come from one tensor (position embeddings are added to both), those two are packed. The attention itself stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _folding
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import Pattern, const, either, op, tensor, through
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

# What lies between a projection and the product of the attention: heads, scale, rotary embedding, cache, repeated heads.
_SHAPING = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Tile", "Slice", "Concat", "Cast", "Identity")
_HEADS = (*_SHAPING, "Mul", "Div", "Add", "Sub", "Neg")
_SCORES = ("Mul", "Div", "Add", "Sub", "Where", "Cast", "Reshape", "Tanh", "Max", "Identity")
_WEIGHTS = ("Cast", "Where", "IsNaN", "Reshape", "Dropout", "Mul", "Identity")
_ROLES = ("q", "k", "v")


def _linear(role: str) -> Pattern:
    x, weight, bias = tensor(f"{role}_x"), const(f"{role}_weight"), const(f"{role}_bias")
    return either(
        op("Add", op("MatMul", x, weight, out=f"{role}_product"), bias, out=role),
        op("Gemm", x, weight, bias, out=role),
        op(("MatMul", "Gemm"), x, weight, out=role),
    )


def _pattern(values: Pattern) -> Pattern:
    queries, keys = (through(_HEADS, _linear(role)) for role in ("q", "k"))
    scores = op("MatMul", queries, keys, context=True)
    weights = op("Softmax", through(_SCORES, scores), context=True)
    return op("MatMul", through(_WEIGHTS, weights), values, context=True)


class QkvPack(Fusion):
    name = "qkv_pack"
    kind = "folding"
    patterns = (_pattern(through(_HEADS, _linear("v"))), _pattern(tensor("values")))
    keeps = _ROLES

    def check(self, match: Match, model: Model) -> Refusal | None:
        roles = _roles(match)
        sources = [match[f"{role}_x"] for role in roles]
        if any(source is not sources[0] for source in sources):
            return Refusal(f"{_listed(roles)} are made of different tensors", ", ".join(source.name for source in sources))
        if len({id(_product(match, role)) for role in roles}) != len(roles):
            return Refusal(f"{_listed(roles)} share one product", ", ".join(match[role].name for role in roles))
        if model.opset < 11 and query.rank(match["q"]) is None:
            return Refusal("rank of the projections is unknown, and below operator set 11 Split counts axes from the front", model.opset)
        return _refuse_products(match, roles) or _refuse_weights(match, roles) or _refuse_biases(match, roles)

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        roles = _roles(match)
        first = _product(match, roles[0])
        widths = [_width(match, role) for role in roles]
        weight = new.constant("qkv_weight", np.concatenate([_matrix(match, role) for role in roles], axis=1))
        bias = None
        if any(match.get(f"{role}_bias") is not None for role in roles):
            bias = new.constant("qkv_bias", np.concatenate([_vector(match, role) for role in roles]))
        shape = query.shape(match["q"])
        shape = None if shape is None else [*shape[:-1], sum(widths)]
        packed = new.variable("qkv", match["q"].dtype, shape)
        if first.op == "Gemm":
            inputs = [match["q_x"], weight] if bias is None else [match["q_x"], weight, bias]
            stand = new.node("Gemm", inputs, [packed], {**first.attrs, "transB": 0}, stem=self.name)
        else:
            stand = new.node("MatMul", [match["q_x"], weight], [packed], first.attrs, stem=self.name)
            if bias is not None:
                product, packed = packed, new.variable("qkv_sum", match["q"].dtype, shape)
                new.node("Add", [product, bias], [packed], stem=f"{self.name}_bias")
        _split(match, roles, packed, widths, new)
        return stand


def _split(match: Match, roles: Sequence[str], packed: gs.Tensor, widths: list[int], new: Builder) -> None:
    """Gives the parts the names they had. Widths became an input of Split in version 13."""
    rank = query.rank(packed)
    axis = -1 if rank is None else rank - 1
    inputs: list[gs.Tensor] = [packed]
    attrs: dict[str, Any] = {"axis": axis}
    if new.opset >= 13:
        inputs.append(new.constant("qkv_widths", np.array(widths, np.int64)))
    else:
        attrs["split"] = widths
    new.node("Split", inputs, [match[role] for role in roles], attrs, stem="qkv_split")


def _roles(match: Match) -> tuple[str, ...]:
    return tuple(role for role in _ROLES if match.get(role) is not None)


def _listed(roles: Sequence[str]) -> str:
    return " and ".join([", ".join(roles[:-1]), roles[-1]]).upper().replace(" AND ", " and ")


def _product(match: Match, role: str) -> gs.Node:
    """The MatMul or Gemm of a projection."""
    product = match.get(f"{role}_product")
    return match.node(role if product is None else f"{role}_product")


def _width(match: Match, role: str) -> int:
    sizes = _folding.known_sizes(match[f"{role}_weight"])
    assert sizes is not None
    return sizes[0 if _product(match, role).attrs.get("transB", 0) else 1]


def _refuse_products(match: Match, roles: Sequence[str]) -> Refusal | None:
    products = [_product(match, role) for role in roles]
    kinds = [product.op for product in products]
    if not _folding.same(kinds):
        return Refusal(f"{_listed(roles)} are not the same operator", ", ".join(kinds))
    for name, default in (("alpha", 1.0), ("beta", 1.0), ("transA", 0)):
        values = [product.attrs.get(name, default) for product in products]
        if not _folding.same(values):
            return Refusal(f"{_listed(roles)} have different {name}", ", ".join(map(str, values)))
    return None


def _refuse_weights(match: Match, roles: Sequence[str]) -> Refusal | None:
    weights = [match[f"{role}_weight"] for role in roles]
    for weight in weights:
        if query.rank(weight) != 2:
            return Refusal(f"weight '{weight.name}' is no matrix", query.shape(weight))
        readers = query.readers(weight)
        if len(readers) != 1 or id(weight) in match.index.outputs:
            return Refusal(f"weight '{weight.name}' has other readers and would be stored twice", len(readers))
    types = [query.dtype(weight) for weight in weights]
    return None if _folding.same(types) else Refusal("weights are of different types", ", ".join(map(str, types)))


def _refuse_biases(match: Match, roles: Sequence[str]) -> Refusal | None:
    for role in roles:
        bias = match.get(f"{role}_bias")
        shape = None if bias is None else query.shape(bias)
        if bias is not None and (not shape or shape[-1] != _width(match, role) or any(size != 1 for size in shape[:-1])):
            return Refusal(f"bias '{bias.name}' of shape {shape} is not one value for each of the columns", _width(match, role))
        product = match.get(f"{role}_product")
        if product is not None and shape is not None and len(shape) > 1 and (query.rank(product) or 0) < len(shape):
            return Refusal(f"bias of shape {shape} is not proved to have no more axes than the product", query.rank(product))
    return None


def _matrix(match: Match, role: str) -> Array:
    values = query.constant(match[f"{role}_weight"])
    assert values is not None
    return values.T if _product(match, role).attrs.get("transB", 0) else values


def _vector(match: Match, role: str) -> Array:
    """The bias of a projection; zeros where it has none."""
    bias = match.get(f"{role}_bias")
    values = None if bias is None else query.constant(bias)
    return _folding.rounded(np.zeros(_width(match, role)), match[f"{role}_weight"]) if values is None else values.reshape(-1)


FUSION = QkvPack()
