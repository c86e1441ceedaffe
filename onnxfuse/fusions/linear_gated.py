"""linear_gated: two products of one input, one of which opens the other by an activation, in one kernel (SwiGLU, GEGLU, ReGLU).

    y = act(x W1 + b1) * (x W2 + b2)       act SiLU, GELU (erf, tanh, quick) or ReLU

When it wins: in the feed-forward networks of language models and diffusion transformers, where both products pass memory before the gate.
The two may also be the halves of one product that a Split divides. Columns of both weights lie in groups of 8 in turn, so that a block has
what opens and what passes. Source: "GLU Variants Improve Transformer", Shazeer, 2020.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms, _products
from onnxfuse.fusions import gelu as gelus
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, canonical, either, op, part
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

OLDEST = 13
"""The operator set from which on the body's operators take what it gives them."""
_NUMBERED = 18  # from this version on Split is told into how many
_GROUP = 8
_OPS = {"erf": "LinearGeglu", "tanh": "LinearGegluTanh", "quick": "LinearQuickGeglu", "silu": "LinearSwiglu", "relu": "LinearReglu"}


def _opened(of: Pattern) -> Pattern:
    named = [canonical(kind.op, of, out="opened") for kind in gelus.KINDS.values()]
    return either(*named, canonical("Silu", of, out="opened"), op("Relu", of, out="opened"))


_WHOLE = _products.linear()


class LinearGated(Fusion):
    name = "linear_gated"
    kind = "fused"
    half_from = 80
    needs = ("gelu", "silu")
    anchor = "Split"
    patterns = (
        op("Mul", _opened(part("Split", _WHOLE, out="gate")), part("Split", _WHOLE, out="value")),
        op("Mul", _opened(_products.linear("gate_")), _products.linear("value_")),
    )

    def check(self, match: Match, model: Model) -> Refusal | None:
        if model.opset < OLDEST:
            return Refusal(f"its function needs operator set {OLDEST}; this model's is", model.opset)
        refusal = _products.refuse_type(match["x"], model)
        if refusal:
            return refusal
        found = [_products.columns_of(match, role) for role in _roles(match)]
        for columns in found:
            if isinstance(columns, Refusal):
                return columns
        if match.get("gate") is not None:
            return _refuse_halves(match, found[0])
        return None if found[0] == found[1] else Refusal("the two products have other numbers of columns", found)

    def variant(self, match: Match) -> str:
        node = match.node("opened")
        return str(node.op).lower() if node.op in ("Silu", "Relu") else gelus.variant_of(node)

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x, (weights, biases) = match["x"], _pairs(match)
        key = tuple(id(match[f"{role}{name}"]) for role in _roles(match) for name in ("weight", "product"))
        stem = match[f"{_roles(match)[0]}weight"].name
        inputs = [
            x,
            _products.side_by_side(new, *weights, stem, ("weights", *key)),
            _products.side_by_side(new, *biases, f"{stem}_bias", ("biases", *key)),
        ]
        attrs = {"dtype": _norms.element_type(x)}
        return new.node(_OPS[self.variant(match)], inputs, [match.output], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        if opset < OLDEST:
            return ()
        bodies = {
            **{_OPS[variant]: kind.statements(opset, "first", "opened") for variant, kind in gelus.KINDS.items()},
            "LinearSwiglu": "sigmoid = Sigmoid (first) opened = Mul (first, sigmoid)",
            "LinearReglu": "opened = Relu (first)",
        }
        return tuple(
            _bodies.define(opset, f"{name} <dtype> (X, W, bias) => (Y) {{ {_body(opset, body)} }}") for name, body in bodies.items()
        )


def _body(opset: int, opening: str) -> str:
    """Statements for Y; `opening` gives `opened` of `first`. The number of groups is computed, so that there may be no rows."""
    halves = ", num_outputs = 2" if opset >= _NUMBERED else ""
    return f"""product = MatMul (X, W) biased = Add (product, bias)
        whole = Shape (biased)
        start = Constant <value = int64[1] {{0}}> () last = Constant <value = int64[1] {{-1}}> ()
        lead = Slice (whole, start, last) wide = Gather (whole, last)
        two = Constant <value = int64[1] {{2}}> () eight = Constant <value = int64[1] {{{_GROUP}}}> ()
        columns = Div (wide, two) groups = Div (columns, eight)
        paired_shape = Concat <axis = 0> (lead, groups, two, eight)
        paired = Reshape (biased, paired_shape)
        first, second = Split <axis = -2{halves}> (paired)
        {opening}
        joined = Mul (opened, second)
        rows_shape = Concat <axis = 0> (lead, columns)
        Y = Reshape (joined, rows_shape)"""


def _roles(match: Match) -> tuple[str, ...]:
    return ("",) if match.get("gate") is not None else ("gate_", "value_")


def _refuse_halves(match: Match, columns: int | Refusal) -> Refusal | None:
    """What opens and what passes must be the two halves of the product's columns."""
    assert isinstance(columns, int)
    node, rank = match.node("gate"), query.rank(match["x"])
    if match.node("value") is not node or match["gate"] is match["value"] or len(node.outputs) != 2:
        return Refusal("what opens and what passes are not the two outputs of one Split")
    axis = node.attrs.get("axis", 0)
    if axis not in (-1, None if rank is None else rank - 1):
        return Refusal("Split does not divide the columns (axis)", axis)
    sizes = [shape[-1] if (shape := query.shape(half)) else None for half in node.outputs]
    if sizes != [columns // 2] * 2:
        return Refusal("Split is not proved to give halves of the columns", sizes)
    return None if columns % (2 * _GROUP) == 0 else Refusal("columns of the halves are no multiple of 8", sizes)


def _pairs(match: Match) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The weights and the biases of what opens and of what passes."""
    if match.get("gate") is None:
        weights = [_products.values_of(match, role) for role in ("gate_", "value_")]
        biases = [_products.bias_values(match, weight.shape[1], role) for role, weight in zip(("gate_", "value_"), weights, strict=True)]
        return (weights[0], weights[1]), (biases[0], biases[1])
    whole = _products.values_of(match)
    bias, half = _products.bias_values(match, whole.shape[1]), whole.shape[1] // 2
    order = (0, half) if match.node("gate").outputs[0] is match["gate"] else (half, 0)
    weights, biases = ([values[..., start : start + half] for start in order] for values in (whole, bias))
    return (weights[0], weights[1]), (biases[0], biases[1])


FUSION = LinearGated()
