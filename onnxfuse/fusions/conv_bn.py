"""conv_bn: a BatchNormalization in inference mode is folded into the convolution or product in front of it.

    factor = gamma / sqrt(variance + epsilon)        weight' = weight * factor        bias' = (bias - mean) * factor + beta

one factor for each output channel. Conv, ConvTranspose, Gemm, and MatMul of a matrix, which becomes a Gemm. When it wins: always, a
whole pass over the feature map goes and nothing is added. Source: the definition of BatchNormalization; every inference runtime does it.
The new weight and bias are computed in float64 and rounded once, into constants of their own: a shared weight stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _folding
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal, label
from onnxfuse.fusions.pattern import either, op, tensor, through
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_PARAMETERS = ("gamma", "beta", "mean", "variance")
_X, _WEIGHT = tensor("x"), tensor("weight")
_LINEAR = either(
    op((*_CONVOLUTIONS, "Gemm"), _X, _WEIGHT, tensor("bias"), out="linear"),
    op((*_CONVOLUTIONS, "Gemm", "MatMul"), _X, _WEIGHT, out="linear"),
)
# Over quantisation only to say why not.
_BEFORE = through(("QuantizeLinear", "DequantizeLinear"), _LINEAR)


class ConvBatchNorm(Fusion):
    name = "conv_bn"
    kind = "folding"
    free = True
    patterns = (op("BatchNormalization", _BEFORE, *(tensor(name) for name in _PARAMETERS)),)

    def check(self, match: Match, model: Model) -> Refusal | None:
        between = match.root.inputs[0]
        if between is not match["linear"]:
            return Refusal("values are quantised between the convolution and the normalisation", label(between.inputs[0]))
        refusal = _refuse_mode(match.root, model.opset) or _refuse_parameters(match)
        if refusal:
            return refusal
        layout = _layout(match)
        if isinstance(layout, Refusal):
            return layout
        for name in _PARAMETERS:
            if query.shape(match[name]) != [layout.channels]:
                return Refusal(f"{name} of shape {query.shape(match[name])} is not one value for each of the channels", layout.channels)
        return _refuse_values(match, layout)

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        linear, weight = match.node("linear"), match["weight"]
        layout = _layout(match)
        assert not isinstance(layout, Refusal)
        factor, bias = _folded(match, layout)
        values = _folding.rounded(_folding.wide(weight) * layout.along(factor), weight)
        inputs = [match["x"], new.constant(weight.name, values), new.constant(_bias_name(match), _folding.rounded(bias, weight))]
        attrs = dict(linear.attrs)
        if linear.op in ("Gemm", "MatMul"):
            attrs["beta"] = 1.0
        return new.node("Gemm" if linear.op == "MatMul" else linear.op, inputs, [match.output], attrs, stem=self.name)


@dataclass(frozen=True)
class _Layout:
    """How the output channels lie in a weight: on `axis`, in `groups` that repeat along axis 0."""

    shape: tuple[int, ...]
    axis: int
    groups: int

    @property
    def channels(self) -> int:
        return self.shape[self.axis] * self.groups

    def along(self, factor: Array) -> Array:
        """One factor a channel, as an array that multiplies the weight."""
        if self.groups == 1:
            return factor.reshape([-1 if axis == self.axis else 1 for axis in range(len(self.shape))])
        # ConvTranspose: rows of group g of [C_in, C_out / groups, ...] hold the channels of group g.
        rows = np.repeat(factor.reshape(self.groups, -1), self.shape[0] // self.groups, axis=0)
        return rows.reshape(rows.shape + (1,) * (len(self.shape) - 2))


def _layout(match: Match) -> _Layout | Refusal:
    linear = match.node("linear")
    sizes = _folding.known_sizes(match["weight"])
    if sizes is None or len(sizes) < 2:
        return Refusal(f"weight '{match['weight'].name}' is no matrix and no kernel", sizes)
    if linear.op == "Conv":
        return _Layout(tuple(sizes), 0, 1)
    if linear.op == "ConvTranspose":
        groups = int(linear.attrs.get("group", 1))
        if groups < 1 or sizes[0] % groups:
            return Refusal("number of input channels is no multiple of the number of groups", (sizes[0], groups))
        return _Layout(tuple(sizes), 1, groups)
    if len(sizes) != 2 or query.rank(match["x"]) != 2:
        return Refusal("the product is not proved to be a matrix, whose last axis is the channels", query.rank(match["x"]))
    return _Layout(tuple(sizes), 0 if linear.op == "Gemm" and linear.attrs.get("transB", 0) else 1, 1)


def _refuse_mode(norm: gs.Node, opset: int) -> Refusal | None:
    attrs = norm.attrs
    if attrs.get("training_mode", 0):
        return Refusal("statistics are those of the batch (training_mode)", attrs["training_mode"])
    if opset < 7 and not attrs.get("is_test", 0):
        return Refusal("statistics are those of the batch (is_test)", attrs.get("is_test", 0))
    if not attrs.get("spatial", 1):
        return Refusal("normalises each element by itself (spatial)", attrs["spatial"])
    extra = [value.name for value in norm.outputs[1:] if not value.is_empty()]
    return Refusal("gives the statistics of the batch as outputs", ", ".join(extra)) if extra else None


def _refuse_parameters(match: Match) -> Refusal | None:
    for role in ("weight", "bias", *_PARAMETERS):
        value = match.get(role)
        refusal = None if value is None else _folding.refuse_parameter(value, role)
        if refusal:
            return refusal
    return None


def _refuse_values(match: Match, layout: _Layout) -> Refusal | None:
    variance = _folding.wide(match["variance"])
    if not np.isfinite(variance).all() or (variance < 0).any():
        return Refusal("variance is negative or not finite", float(variance.min()))
    bias = match.get("bias")
    if bias is not None and match.node("linear").op == "Gemm":
        found = _folding.per_channel(bias, layout.channels, 1, 2)
        if isinstance(found, Refusal):
            return found
    elif bias is not None and query.shape(bias) != [layout.channels]:
        return Refusal(f"bias of shape {query.shape(bias)} is not one value for each of the channels", layout.channels)
    with np.errstate(all="ignore"):
        factor, shift = _folded(match, layout)
        magnitude = _folding.largest(match["weight"]) * (float(np.abs(factor).max()) if factor.size else 0.0)
    if not _folding.fits(magnitude, match["weight"]):
        return Refusal(f"weight after folding is not finite in {query.dtype(match['weight'])}", magnitude)
    return _folding.refuse_overflow(shift, "bias", match["weight"])


def _folded(match: Match, layout: _Layout) -> tuple[Array, Array]:
    """Factor and bias for each channel, in float64."""
    gamma, beta, mean, variance = (_folding.wide(match[name]) for name in _PARAMETERS)
    epsilon = float(match.root.attrs.get("epsilon", 1e-5))
    factor = gamma / np.sqrt(variance + epsilon)
    bias: Array = np.zeros(layout.channels)
    if match.get("bias") is not None:
        linear = match.node("linear")
        scale = float(linear.attrs.get("beta", 1.0)) if linear.op == "Gemm" else 1.0
        bias = np.broadcast_to(scale * _folding.wide(match["bias"]).reshape(-1), (layout.channels,))
    return factor, (bias - mean) * factor + beta


def _bias_name(match: Match) -> str:
    given = match.get("bias")
    return str(match["beta"].name if given is None else given.name)


FUSION = ConvBatchNorm()
