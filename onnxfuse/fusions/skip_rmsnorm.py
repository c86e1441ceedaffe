"""skip_rmsnorm: residual addition, with or without a bias, and the RMSNormalization behind it in one kernel.

    sum = input + skip (+ bias)        output = RMSNormalization(sum, gamma)        over the last axis

When it wins: as skip_layernorm. Source of the idea: inference libraries for T5 and Llama. The sum is a second output where others read it.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms, _residual, rmsnorm
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, canonical, tensor
from onnxfuse.graph.model import Model


class SkipRMSNorm(Fusion):
    name = "skip_rmsnorm"
    kind = "fused"
    needs = ("rmsnorm",)
    patterns = tuple(canonical("RMSNormalization", _residual.total(bias), tensor("gamma")) for bias in (True, False))
    keeps = ("sum",)

    def check(self, match: Match, model: Model) -> Refusal | None:
        return _residual.refuse(match, ("gamma",))

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        inputs = _residual.inputs(match, ("gamma", "bias"), new)
        attrs = {"epsilon": float(match.root.attrs.get("epsilon", 1e-5)), "dtype": _norms.element_type(match["input"])}
        return new.node("SkipRMSNormalization", inputs, _residual.outputs(match), attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        norm = rmsnorm.statements(opset, "sum", "gamma", "output")
        function = _bodies.define(
            opset,
            f"""SkipRMSNormalization <epsilon, dtype> (input, skip, gamma, bias) => (output, sum) {{
                {_residual.SUM}
                {norm}
            }}""",
        )
        return (function,)


FUSION = SkipRMSNorm()
