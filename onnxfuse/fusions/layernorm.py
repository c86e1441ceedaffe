"""layernorm: a LayerNormalization that an exporter spelled out becomes one node.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * scale + bias        mean over the last axes

When it wins: always, as the first step for others. Runtimes treat the one node better than nine, and its statistics stay in float32
whatever the precision of the model. Formula and names: ONNX LayerNormalization, version 17. Below that version the node is of domain
onnxfuse, and its function holds the nine nodes again.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, const, either, maybe, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

NATIVE = 17


def _pattern(scale: bool, bias: bool) -> Pattern:
    """With scale and bias, with scale alone, or with neither."""
    # Half-precision models may widen the input, or what is squared; old exporters compute the deviation twice.
    x = maybe("Cast", tensor("x"))
    mean = op("ReduceMean", x, rest=True, out="mean")
    deviation = either(op("Sub", x, mean, out="centered"), op("Sub", x, mean))
    wide = maybe("Cast", deviation)
    square = either(op("Pow", wide, const("two", 2.0)), op("Mul", wide, wide))
    variance = op("ReduceMean", square, rest=True, out="variance")
    shifted = op("Add", variance, const("epsilon"))
    root = either(op("Sqrt", shifted), op("Pow", shifted, const("half", 0.5)))
    inverse = either(op("Reciprocal", root), op("Div", const("one", 1.0), root), op("Pow", shifted, const("minus_half", -0.5)))
    plain = maybe("Cast", either(op("Div", wide, maybe("Cast", root)), op("Mul", wide, maybe("Cast", inverse))))
    if not scale:
        return plain
    factor = op("Mul", inverse, tensor("scale"))
    scaled = either(op("Mul", plain, tensor("scale")), op("Mul", deviation, factor))
    if not bias:
        return scaled
    # TensorFlow multiplies out: x * factor + (bias - mean * factor).
    moved = op("Add", op("Mul", x, factor), op("Sub", tensor("bias"), op("Mul", mean, factor)))
    return either(op("Add", scaled, tensor("bias")), moved)


class LayerNorm(Fusion):
    name = "layernorm"
    kind = "canonical"
    patterns = (_pattern(True, True), _pattern(True, False), _pattern(False, False))

    def check(self, match: Match, model: Model) -> Refusal | None:
        x = match["x"]
        refusal = _norms.refuse_operands(match, x)
        if refusal:
            return refusal
        axes = _norms.reduced_axes(match.node("mean"))
        again = _norms.reduced_axes(match.node("variance"))
        if isinstance(axes, Refusal) or isinstance(again, Refusal):
            return axes if isinstance(axes, Refusal) else again if isinstance(again, Refusal) else None
        if _norms.from_end(axes, query.rank(x)) != _norms.from_end(again, query.rank(x)):
            return Refusal("mean and variance are taken over different axes", f"{axes} and {again}")
        if query.scalar(match["epsilon"]) is None:
            return Refusal("epsilon is not one value", query.shape(match["epsilon"]))
        count = _norms.trailing(axes, query.rank(x))
        if isinstance(count, Refusal):
            return count
        if count > 1 and model.opset < NATIVE:
            return Refusal(f"normalises {count} axes, which needs operator set {NATIVE}; this model's is", model.opset)
        return _affine(match, count)

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x = match["x"]
        axes = _norms.reduced_axes(match.node("mean"))
        assert not isinstance(axes, Refusal)
        sizes = _norms.rows_of(x, len(axes))
        epsilon = query.scalar(match["epsilon"])
        assert not isinstance(sizes, Refusal)
        assert epsilon is not None
        scale = _norms.parameter(match.get("scale"), sizes, 1.0, x, new)
        if new.opset >= NATIVE:
            inputs = [x, scale] if match.get("bias") is None else [x, scale, _norms.parameter(match["bias"], sizes, 0.0, x, new)]
            native = {"axis": -len(axes), "epsilon": epsilon}
            return new.node("LayerNormalization", inputs, [_norms.settle(match, x)], native, stem=self.name)
        bias = _norms.parameter(match.get("bias"), sizes, 0.0, x, new)
        attrs = {"epsilon": epsilon, "dtype": _norms.element_type(x)}
        return new.node("LayerNormalization", [x, scale, bias], [_norms.settle(match, x)], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        if opset >= NATIVE:
            return ()
        norm = statements(opset, "X", "Scale", "Bias", "Y")
        function = _bodies.define(opset, f"LayerNormalization <epsilon, dtype> (X, Scale, Bias) => (Y) {{ {norm} }}")
        return (function,)


def _affine(match: Match, count: int) -> Refusal | None:
    """The rows must be of known length, and scale and bias must hold one value for each of their elements."""
    sizes = _norms.rows_of(match["x"], count)
    if isinstance(sizes, Refusal):
        return sizes
    for role in ("scale", "bias"):
        value = match.get(role)
        refusal = None if value is None else _norms.row_parameter(value, sizes, role, match["x"])
        if refusal:
            return refusal
    return None


def statements(opset: int, x: str, scale: str, bias: str, y: str) -> str:
    """A function's statements for `y`, of the attributes epsilon and dtype: the native operator where there is one."""
    if opset >= NATIVE:
        return f"{y} = LayerNormalization <axis = -1, epsilon: float = @epsilon> ({x}, {scale}, {bias})"
    return f"""wide = Cast <to = 1> ({x})
        {_bodies.row_mean(opset, "mean", "wide")}
        centered = Sub (wide, mean)
        square = Mul (centered, centered)
        {_bodies.row_mean(opset, "variance", "square")}
        {_bodies.epsilon(opset)}
        shifted = Add (variance, eps)
        root = Sqrt (shifted)
        norm = Div (centered, root)
        wide_scale = Cast <to = 1> ({scale})
        wide_bias = Cast <to = 1> ({bias})
        scaled = Mul (norm, wide_scale)
        offset = Add (scaled, wide_bias)
        {y} = Cast <to: int = @dtype> (offset)"""


FUSION = LayerNorm()
