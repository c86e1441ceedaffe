"""rmsnorm: an RMSNormalization that an exporter spelled out becomes one node.

    y = x / sqrt(mean(x^2) + epsilon) * scale        mean over the last axis

When it wins: always, as the first step for others; the square of a half-precision value overflows from 256 on, and the one node keeps it
in float32. Formula and names: ONNX RMSNormalization, version 23. Below that version the node is of domain onnxfuse.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, const, either, maybe, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

NATIVE = 23


def _pattern(scale: bool) -> Pattern:
    x = tensor("x")
    # Half-precision models widen x first, and exporters that promote types a second time for the product.
    wide, again = maybe("Cast", x), maybe("Cast", x)
    square = either(op("Pow", wide, const("two", 2.0)), op("Mul", wide, wide))
    mean = op("ReduceMean", square, rest=True, out="mean")
    shifted = op("Add", mean, const("epsilon"))
    root = either(op("Sqrt", shifted), op("Pow", shifted, const("half", 0.5)))
    inverse = either(op("Reciprocal", root), op("Div", const("one", 1.0), root), op("Pow", shifted, const("minus_half", -0.5)))
    norm = maybe("Cast", either(op("Div", again, root), op("Mul", again, inverse)))
    if not scale:
        return norm
    return either(op("Mul", norm, tensor("scale")), op("Mul", again, op("Mul", inverse, tensor("scale"))))


class RMSNorm(Fusion):
    name = "rmsnorm"
    kind = "canonical"
    patterns = (_pattern(True), _pattern(False))

    def check(self, match: Match, model: Model) -> Refusal | None:
        x = match["x"]
        refusal = _norms.refuse_operands(match, x)
        if refusal:
            return refusal
        axes = _norms.reduced_axes(match.node("mean"))
        if isinstance(axes, Refusal):
            return axes
        count = _norms.trailing(axes, query.rank(x))
        if isinstance(count, Refusal):
            return count
        if count != 1:
            return Refusal("normalises several axes", axes)
        if query.scalar(match["epsilon"]) is None:
            return Refusal("epsilon is not one value", query.shape(match["epsilon"]))
        sizes = _norms.rows_of(x, 1)
        if isinstance(sizes, Refusal):
            return sizes
        scale = match.get("scale")
        return None if scale is None else _norms.row_parameter(scale, sizes, "scale", x)

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x = match["x"]
        sizes = _norms.rows_of(x, 1)
        epsilon = query.scalar(match["epsilon"])
        assert not isinstance(sizes, Refusal)
        assert epsilon is not None
        inputs = [x, _norms.parameter(match.get("scale"), sizes, 1.0, x, new)]
        if new.opset >= NATIVE:
            return new.node("RMSNormalization", inputs, [_norms.settle(match, x)], {"axis": -1, "epsilon": epsilon}, stem=self.name)
        attrs = {"epsilon": epsilon, "dtype": _norms.element_type(x)}
        return new.node("RMSNormalization", inputs, [_norms.settle(match, x)], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        if opset >= NATIVE:
            return ()
        norm = statements(opset, "X", "Scale", "Y")
        return (_bodies.define(opset, f"RMSNormalization <epsilon, dtype> (X, Scale) => (Y) {{ {norm} }}"),)


def statements(opset: int, x: str, scale: str, y: str) -> str:
    """A function's statements for `y`, of the attributes epsilon and dtype: the native operator where there is one."""
    if opset >= NATIVE:
        return f"{y} = RMSNormalization <axis = -1, epsilon: float = @epsilon> ({x}, {scale})"
    return f"""wide = Cast <to = 1> ({x})
        square = Mul (wide, wide)
        {_bodies.row_mean(opset, "mean", "square")}
        {_bodies.epsilon(opset)}
        shifted = Add (mean, eps)
        root = Sqrt (shifted)
        norm = Div (wide, root)
        wide_scale = Cast <to = 1> ({scale})
        scaled = Mul (norm, wide_scale)
        {y} = Cast <to: int = @dtype> (scaled)"""


FUSION = RMSNorm()
