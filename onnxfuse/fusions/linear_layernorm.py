"""linear_layernorm: a product by constant weights, its bias, layer scale, the residual and the LayerNormalization of the sum in one kernel.

    sum = residual + scale * (x W + bias)        y = LayerNormalization(sum, gamma, beta)        scale one value a column, or none

When it wins: in narrow transformers (Swin's first stages, small encoders), where a block of the product has whole rows: up to 256 columns.
The sum is a second output where others read it. Source: the epilogues of CUTLASS's GEMM + LayerNorm example.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms, _products, layernorm
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, canonical, const, either, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

MOST_COLUMNS = 256
"""What a block of the kernel has of a row: kMostNormed of plugins/Linear/launch.h."""
_LINEAR = _products.linear()
_SUM = op("Add", either(op("Mul", _LINEAR, const("scale")), _LINEAR), tensor("residual"), out="sum")


class LinearLayerNorm(Fusion):
    name = "linear_layernorm"
    kind = "fused"
    half_from = 80
    needs = ("layernorm",)
    anchor = "MatMul"
    patterns = (
        either(canonical("LayerNormalization", _SUM, const("gamma"), const("beta")), canonical("LayerNormalization", _SUM, const("gamma"))),
    )
    keeps = ("sum",)

    def check(self, match: Match, model: Model) -> Refusal | None:
        x, residual, attrs = match["x"], match["residual"], match.root.attrs
        refusal = _products.refuse_type(x, model) or _norms.refuse_epsilon(attrs)
        if refusal:
            return refusal
        columns = _products.columns_of(match)
        if isinstance(columns, Refusal):
            return columns
        if columns > MOST_COLUMNS:
            return Refusal(f"rows are longer than the {MOST_COLUMNS} columns that a block has", columns)
        if attrs.get("stash_type", 1) != 1:
            return Refusal("statistics are not kept in float32 (stash_type)", attrs["stash_type"])
        rank = query.rank(match["sum"])
        if attrs.get("axis", -1) not in (-1, None if rank is None else rank - 1):
            return Refusal("normalises more than the last axis (axis)", attrs["axis"])
        for role in ("scale", "gamma", "beta"):
            value = match.get(role)
            refusal = None if value is None else _norms.row_parameter(value, [columns], role, x)
            if refusal:
                return refusal
        if not query.same_shape(match["product"], residual):
            shapes = f"{query.shape(match['product'])} and {query.shape(residual)}"
            return Refusal("the residual is not proved to be of the product's shape", shapes)
        if _norms.element_type(residual) != _norms.element_type(x):
            return Refusal(f"'{residual.name}' is of another type than '{x.name}'")
        return None

    def variant(self, match: Match) -> str:
        return "residual" if match.get("scale") is None else "scaled"

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x, weight = match["x"], _products.weight_of(match, new)
        columns = _products.columns_of(match)
        assert isinstance(columns, int)
        bias, scale, gamma, beta = (
            _norms.parameter(match.get(role), [columns], filler, x, new)
            for role, filler in (("bias", 0.0), ("scale", 1.0), ("gamma", 1.0), ("beta", 0.0))
        )
        attrs = {"epsilon": float(match.root.attrs.get("epsilon", 1e-5)), "dtype": _norms.element_type(x)}
        # Both outputs, also where nobody reads the sum: onnxruntime infers types only of calls with all outputs.
        outputs = [_norms.settle(match, match["residual"]), match["sum"]]
        given = [x, weight, bias, scale, match["residual"], gamma, beta]
        return new.node("LinearLayerNorm", given, outputs, attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        body = f"""product = MatMul (X, W) biased = Add (product, bias)
            stepped = Mul (biased, step) sum = Add (stepped, residual)
            {layernorm.statements(opset, "sum", "gamma", "beta", "Y")}"""
        return (
            _bodies.define(opset, f"LinearLayerNorm <epsilon, dtype> (X, W, bias, step, residual, gamma, beta) => (Y, sum) {{ {body} }}"),
        )


FUSION = LinearLayerNorm()
