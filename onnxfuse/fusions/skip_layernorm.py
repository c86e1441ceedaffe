"""skip_layernorm: residual addition, with or without a bias, and the LayerNormalization behind it in one kernel.

    sum = input + skip (+ bias)        output = LayerNormalization(sum, gamma, beta)        over the last axis

When it wins: where the sum would be written to memory and read again, and the neighbours are no part of one region that TensorRT fuses by
itself; inside a transformer it usually cuts such a region apart (on an H200, bert-base got 3 % slower). Source of the idea: the
SkipLayerNormalization of BERT inference libraries. The sum is a second output where others read it.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms, _residual, layernorm
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, canonical, either, tensor
from onnxfuse.graph.model import Model


def _pattern(bias: bool) -> Pattern:
    total = _residual.total(bias)
    gamma, beta = tensor("gamma"), tensor("beta")
    return either(canonical("LayerNormalization", total, gamma, beta), canonical("LayerNormalization", total, gamma))


class SkipLayerNorm(Fusion):
    name = "skip_layernorm"
    kind = "fused"
    needs = ("layernorm",)
    patterns = (_pattern(bias=True), _pattern(bias=False))
    keeps = ("sum",)

    def check(self, match: Match, model: Model) -> Refusal | None:
        return _residual.refuse(match, ("gamma", "beta"))

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        inputs = _residual.inputs(match, ("gamma", "beta", "bias"), new)
        attrs = {"epsilon": float(match.root.attrs.get("epsilon", 1e-5)), "dtype": _norms.element_type(match["input"])}
        return new.node("SkipLayerNormalization", inputs, _residual.outputs(match), attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        norm = layernorm.statements(opset, "sum", "gamma", "beta", "output")
        function = _bodies.define(
            opset,
            f"""SkipLayerNormalization <epsilon, dtype> (input, skip, gamma, beta, bias) => (output, sum) {{
                {_residual.SUM}
                {norm}
            }}""",
        )
        return (function,)


FUSION = SkipLayerNorm()
