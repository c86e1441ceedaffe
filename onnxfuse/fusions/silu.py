"""silu: x * sigmoid(x), spelled as two nodes or as Swish, becomes one.

    y = x * sigmoid(x)

When it wins: as the first step for others (groupnorm_silu, linear_epilogue). Source: "Sigmoid-weighted linear units", Elfwing and others,
2017; also called swish. ONNX has Swish from version 24; this node is of domain onnxfuse at every version.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, const, either, op, tensor
from onnxfuse.graph.model import Model

_X = tensor("x")


class Silu(Fusion):
    name = "silu"
    kind = "canonical"
    # Swish with a slope that happens to be 1.
    patterns = (op("Mul", _X, op("Sigmoid", either(_X, op("Mul", _X, const("slope", 1.0))))), op("Swish", _X))

    def check(self, match: Match, model: Model) -> Refusal | None:
        if match.root.attrs.get("alpha", 1.0) != 1.0:
            return Refusal("the slope is not 1 (alpha)", match.root.attrs["alpha"])
        return _norms.refuse_operands(match, match["x"])

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x = match["x"]
        return new.node("Silu", [x], [_norms.settle(match, x)], stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        return (_bodies.define(opset, "Silu (X) => (Y) { gate = Sigmoid (X) Y = Mul (X, gate) }"),)


FUSION = Silu()
