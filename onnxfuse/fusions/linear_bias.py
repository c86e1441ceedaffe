"""linear_bias: a constant row that is added to a matrix product becomes the third operand of one Gemm.

    alpha * A B + beta * C + constant = Gemm(A, B, beta * C + constant)        constant one value for each column, or one for all

When it wins: always, the addition becomes part of the product's epilogue. Source: exporters that write a linear layer as MatMul and Add.
MatMul only of matrices: Gemm takes no batch, and a MatMul of higher rank with the Add behind it is what runtimes expect of a linear layer.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _folding
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal, label
from onnxfuse.fusions.pattern import const, either, op, tensor, through
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

_A, _B = tensor("a"), tensor("b")
_PRODUCT = either(op("Gemm", _A, _B, tensor("c"), out="product"), op(("Gemm", "MatMul"), _A, _B, out="product"))


class LinearBias(Fusion):
    name = "linear_bias"
    kind = "folding"
    free = True
    # Over a Reshape only to say why not: a constant behind it can differ from row to row of the product.
    patterns = (op("Add", through(("Reshape",), _PRODUCT), const("constant")),)

    def check(self, match: Match, model: Model) -> Refusal | None:
        if model.opset < 7:
            return Refusal("Gemm broadcasts its third operand from operator set 7; this model's is", model.opset)
        if all(value is not match["product"] for value in match.root.inputs):
            reshaped = next(value for value in match.root.inputs if value is not match["constant"])
            return Refusal("a Reshape lies between the product and the addition", label(reshaped.inputs[0]))
        for role in ("c", "constant"):
            value = match.get(role)
            refusal = None if value is None else _folding.refuse_parameter(value, role)
            if refusal:
                return refusal
        if match.node("product").op == "MatMul":
            refusal = _refuse_matmul(match)
            if refusal:
                return refusal
        total = _total(match)
        return total if isinstance(total, Refusal) else _folding.refuse_overflow(total, "constant", match["constant"])

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        constant = match["constant"]
        total = _total(match)
        assert not isinstance(total, Refusal)
        inputs = [match["a"], match["b"], new.constant(constant.name, _folding.rounded(total, constant))]
        attrs = {**match.node("product").attrs, "beta": 1.0}
        return new.node("Gemm", inputs, [match.output], attrs, stem=self.name)


def _refuse_matmul(match: Match) -> Refusal | None:
    if query.rank(match["a"]) != 2:
        return Refusal(f"rank of the first operand '{match['a'].name}' is not 2", query.rank(match["a"]))
    if query.rank(match["b"]) != 2:
        return Refusal(f"rank of the second operand '{match['b'].name}' is not 2", query.rank(match["b"]))
    return None if query.is_constant(match["b"]) else Refusal("the second operand is computed at run time", match["b"].name)


def _total(match: Match) -> Array | Refusal:
    """What is added to the product, one float64 for each column."""
    product = match.node("product")
    shape = query.shape(match["b"])
    columns = None if shape is None or len(shape) != 2 else shape[0 if product.attrs.get("transB", 0) else 1]
    if not isinstance(columns, int):
        return Refusal(f"number of columns of '{match['b'].name}' is unknown", shape)
    constant = _folding.per_channel(match["constant"], columns, 1, 2)
    if isinstance(constant, Refusal) or match.get("c") is None:
        return constant
    given = _folding.per_channel(match["c"], columns, 1, 2)
    if isinstance(given, Refusal):
        return given
    return np.asarray(float(product.attrs.get("beta", 1.0)) * given + constant)


FUSION = LinearBias()
