"""bias_gelu: the addition of a bias and the GELU behind it in one kernel.

    y = gelu(x + bias)        bias one value for each element of the last axis; erf, tanh or quick

When it wins: where the addition is not already the epilogue of a matmul, which TensorRT merges by itself. Source of the idea: the BiasGelu
of transformer libraries. The three kinds are three operators, as in gelu.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.gelu import KINDS, variant_of
from onnxfuse.fusions.pattern import DOMAIN, canonical, const, either, op, tensor
from onnxfuse.graph.model import Model

_SUM = op("Add", tensor("x"), const("bias"))


class BiasGelu(Fusion):
    name = "bias_gelu"
    kind = "fused"
    needs = ("gelu",)
    patterns = (either(*(canonical(kind.op, _SUM) for kind in KINDS.values())),)

    def check(self, match: Match, model: Model) -> Refusal | None:
        refusal = _norms.refuse_operands(match, match["x"])
        if refusal:
            return refusal
        sizes = _norms.rows_of(match["x"], 1)
        return sizes if isinstance(sizes, Refusal) else _norms.row_parameter(match["bias"], sizes, "bias", match["x"])

    def variant(self, match: Match) -> str:
        return variant_of(match.root)

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x = match["x"]
        sizes = _norms.rows_of(x, 1)
        assert not isinstance(sizes, Refusal)
        inputs = [x, _norms.parameter(match["bias"], sizes, 0.0, x, new)]
        kind, attrs = KINDS[self.variant(match)], {"dtype": _norms.element_type(x)}
        return new.node(f"Bias{kind.op}", inputs, [_norms.settle(match, x)], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        return tuple(
            _bodies.define(
                opset,
                f"""Bias{kind.op} <dtype> (X, bias) => (Y) {{
                    biased = Add (X, bias)
                    {kind.statements(opset, "biased", "Y")}
                }}""",
            )
            for kind in KINDS.values()
        )


FUSION = BiasGelu()
