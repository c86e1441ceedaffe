"""conv_bias: a constant for each channel that is added to a convolution becomes its bias.

    conv(x, weight, bias) + constant = conv(x, weight, bias + constant)        constant one value for each channel, or one for all

When it wins: always, a pass over the feature map goes. Source: exporters that write the bias as an addition of its own. The constant may be
subtracted too. A constant that differs along another axis (a whole feature map) is no bias.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _folding
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import const, either, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

_X, _WEIGHT, _CONSTANT = tensor("x"), tensor("weight"), const("constant")
_TYPES = ("Conv", "ConvTranspose")
_CONV = either(op(_TYPES, _X, _WEIGHT, tensor("bias"), out="conv"), op(_TYPES, _X, _WEIGHT, out="conv"))


class ConvBias(Fusion):
    name = "conv_bias"
    kind = "folding"
    free = True
    patterns = (either(op("Add", _CONV, _CONSTANT), op("Sub", _CONV, _CONSTANT)),)

    def check(self, match: Match, model: Model) -> Refusal | None:
        for role in ("bias", "constant"):
            value = match.get(role)
            refusal = None if value is None else _folding.refuse_parameter(value, role)
            if refusal:
                return refusal
        total = _total(match)
        return total if isinstance(total, Refusal) else _folding.refuse_overflow(total, "bias", match["constant"])

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        conv, constant = match.node("conv"), match["constant"]
        total = _total(match)
        assert not isinstance(total, Refusal)
        bias = new.constant(constant.name, _folding.rounded(total, constant))
        return new.node(conv.op, [match["x"], match["weight"], bias], [match.output], conv.attrs, stem=self.name)


def _total(match: Match) -> Array | Refusal:
    """The bias of the convolution and the constant together, one float64 for each channel."""
    conv = match.node("conv")
    shape = query.shape(match["weight"])
    if shape is None or len(shape) < 3:
        return Refusal(f"shape of the weight '{match['weight'].name}' is unknown", shape)
    size = shape[0] if conv.op == "Conv" else shape[1]
    if not isinstance(size, int):
        return Refusal(f"number of output channels of '{match['weight'].name}' is unknown", shape)
    channels = size if conv.op == "Conv" else size * int(conv.attrs.get("group", 1))
    constant = _folding.per_channel(match["constant"], channels, 1, len(shape))
    if isinstance(constant, Refusal):
        return constant
    bias = np.zeros(channels) if match.get("bias") is None else _folding.wide(match["bias"])
    if bias.shape != (channels,):
        return Refusal(f"bias of shape {list(bias.shape)} is not one value for each of the channels", channels)
    return bias - constant if match.root.op == "Sub" else bias + constant


FUSION = ConvBias()
