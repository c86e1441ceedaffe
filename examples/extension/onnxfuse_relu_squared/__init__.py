"""relu_squared: a fusion with a plugin of its own, as a distribution beside onnxfuse.

    y = relu(x)^2

When it wins: as every fusion, only by measurement (`onnxfuse optimize --policy measure`). Source of the idea: the activation of Primer
("Searching for Efficient Transformers for Language Modeling", So and others, 2021).
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.extensions import Extension
from onnxfuse.fusions import _bodies, _norms
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, const, either, op, tensor
from onnxfuse.graph.model import Model
from onnxfuse.plugins import Op

_RELU = op("Relu", tensor("x"))


class ReluSquared(Fusion):
    name = "relu_squared"
    kind = "fused"
    # The square as a product of the tensor with itself, or as a power.
    patterns = (either(op("Mul", _RELU, _RELU), op("Pow", _RELU, const("two", 2.0))),)

    def check(self, match: Match, model: Model) -> Refusal | None:
        return _norms.refuse_operands(match, match["x"])

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x = match["x"]
        return new.node("ReluSquared", [x], [_norms.settle(match, x)], stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        return (_bodies.define(opset, "ReluSquared (X) => (Y) { positive = Relu (X) Y = Mul (positive, positive) }"),)


EXTENSION = Extension(
    fusions=(ReluSquared(),),
    ops=(Op("ReluSquared", "relu(X) squared", max_width=None),),
    plugins=Path(__file__).parent / "plugins",
)
