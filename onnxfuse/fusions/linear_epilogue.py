"""linear_epilogue: a matrix product by constant weights with what follows it element by element, in one kernel.

    y = act(x W + bias)                       act GELU (erf, tanh, quick), SiLU or ReLU
    y = residual + scale * (x W + bias)       scale one value a column ("layer scale")

When it wins: where a runtime does not merge what follows into the product: an erf-GELU behind a channels-last product, layer scale +
residual + transpose in ConvNeXt. The second form also takes the residual through the transposes that a channels-first network has around
it: the sum is computed channels last, and a Transpose gives others the channels-first one. Source: the epilogues of CUTLASS; layer scale:
"Going deeper with Image Transformers", Touvron and others, 2021.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _folding, _layouts, _norms, _products
from onnxfuse.fusions import gelu as gelus
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, canonical, const, either, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

_LINEAR = _products.linear()

# Scale before the transpose, behind it, or no transpose at all; the residual in either layout.
_BEFORE = op("Mul", _LINEAR, const("scale"))
_MOVED = either(op("Mul", op("Transpose", _LINEAR, out="moved"), const("plane_scale")), op("Transpose", _BEFORE, out="moved"))
_OPS = {"erf": "LinearGelu", "tanh": "LinearGeluTanh", "quick": "LinearQuickGelu", "silu": "LinearSilu", "relu": "LinearRelu"}


class LinearEpilogue(Fusion):
    name = "linear_epilogue"
    kind = "fused"
    half_from = 80
    needs = ("gelu", "silu")
    anchor = "MatMul"
    patterns = (
        op("Add", _MOVED, tensor("residual")),
        op("Add", _BEFORE, tensor("residual")),
        either(*(canonical(kind.op, _LINEAR) for kind in gelus.KINDS.values()), canonical("Silu", _LINEAR), op("Relu", _LINEAR)),
    )

    def check(self, match: Match, model: Model) -> Refusal | None:
        refusal = _products.refuse_type(match["x"], model)
        if refusal:
            return refusal
        columns = _products.columns_of(match)
        if isinstance(columns, Refusal):
            return columns
        return None if match.get("residual") is None else _refuse_residual(match, columns)

    def variant(self, match: Match) -> str:
        if match.get("residual") is not None:
            return "residual"
        if match.root.op in ("Silu", "Relu"):
            return str(match.root.op).lower()
        return gelus.variant_of(match.root)

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x, weight = match["x"], _products.weight_of(match, new)
        columns = int((query.shape(weight) or [0, 0])[1] or 0)
        inputs = [x, weight, _norms.parameter(match.get("bias"), [columns], 0.0, x, new)]
        attrs = {"dtype": _norms.element_type(x)}
        if match.get("residual") is None:
            return new.node(_OPS[self.variant(match)], inputs, [match.output], attrs, stem=self.name, domain=DOMAIN)
        scale = match.get("scale")
        inputs.append(new.reshaped(match["plane_scale"], (columns,)) if scale is None else _norms.parameter(scale, [columns], 1.0, x, new))
        if match.get("moved") is None:
            return new.node("LinearResidual", [*inputs, match["residual"]], [match.output], attrs, stem=self.name, domain=DOMAIN)
        rows_shape = query.shape(match["product"])
        residual = _layouts.behind_transpose(match["residual"])
        if residual is None:
            residual = new.variable("residual_last", x.dtype, rows_shape)
            new.node("Transpose", [match["residual"]], [residual], {"perm": list(_layouts.TO_LAST)}, stem="to_last")
        rows = new.variable("rows", x.dtype, rows_shape)
        stands = new.node("LinearResidual", [*inputs, residual], [rows], attrs, stem=self.name, domain=DOMAIN)
        new.node("Transpose", [rows], [match.output], {"perm": list(_layouts.TO_FIRST)}, stem="to_first")
        return stands

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        linear = "product = MatMul (X, W) biased = Add (product, bias)"
        joined = "scaled = Mul (biased, scale) Y = Add (scaled, residual)"
        bodies = {
            **{_OPS[variant]: kind.statements(opset, "biased", "Y") for variant, kind in gelus.KINDS.items()},
            "LinearSilu": "gate = Sigmoid (biased) Y = Mul (biased, gate)",
            "LinearRelu": "Y = Relu (biased)",
        }
        return (
            *(_bodies.define(opset, f"{name} <dtype> (X, W, bias) => (Y) {{ {linear} {body} }}") for name, body in bodies.items()),
            _bodies.define(opset, f"LinearResidual <dtype> (X, W, bias, scale, residual) => (Y) {{ {linear} {joined} }}"),
        )


def _refuse_residual(match: Match, columns: int) -> Refusal | None:
    residual, output, x = match["residual"], match.output, match["x"]
    scale = match.get("scale")
    if scale is None:
        sizes = _folding.known_sizes(match["plane_scale"]) or []
        if sizes[-3:] != [columns, 1, 1] or any(size != 1 for size in sizes[:-3]) or len(sizes) > 4:
            return Refusal("scale is not one value for each of the channels", sizes)
        if _norms.element_type(match["plane_scale"]) != _norms.element_type(x):
            return Refusal(f"scale is of another type than '{x.name}'")
    else:
        refusal = _norms.row_parameter(scale, [columns], "scale", x)
        if refusal:
            return refusal
    given = match.get("moved") if match.get("moved") is not None else match["product"]
    assert given is not None
    if match.get("moved") is not None:
        perm = tuple(match.node("moved").attrs.get("perm", ()))
        if perm != _layouts.TO_FIRST:
            return Refusal("Transpose does not put the channels first (perm)", list(perm))
    if not query.same_shape(given, residual):
        return Refusal("the residual is not proved to be of the product's shape", f"{query.shape(given)} and {query.shape(residual)}")
    if _norms.element_type(residual) != _norms.element_type(x):
        return Refusal(f"'{residual.name}' is of another type than '{x.name}'")
    return None if output.shape is None or query.same_shape(output, residual) else Refusal("the sum broadcasts", query.shape(output))


FUSION = LinearEpilogue()
