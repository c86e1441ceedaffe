"""dwconv_layernorm: a depthwise convolution and the LayerNormalization over its channels in one kernel, channels last behind it.

    y = LayerNormalization(Transpose(Conv(x, weight, bias), 0 2 3 1), scale, offset)        y [N, H, W, C]

When it wins: in ConvNeXt, where a runtime makes three kernels of it (convolution, transpose, norm) that each pass memory. Where the
convolution's input is itself a transpose of a channels-last tensor, or others read it transposed to one, that tensor is read. Source: "A
ConvNet for the 2020s", Liu and others, 2022.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _layouts, _norms, layernorm
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, canonical, const, either, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

# What the kernel takes.
KERNELS = (3, 5, 7)
MOST_CHANNELS = 2048

_X, _WEIGHT = tensor("x"), const("weight")
_CONV = either(op("Conv", _X, _WEIGHT, const("bias"), out="conv"), op("Conv", _X, _WEIGHT, out="conv"))
_ROWS = op("Transpose", _CONV, out="rows")


class DwconvLayerNorm(Fusion):
    name = "dwconv_layernorm"
    kind = "fused"
    needs = ("layernorm",)
    belongs_with = ("linear_epilogue",)
    patterns: tuple[Pattern, ...] = (
        either(
            canonical("LayerNormalization", _ROWS, const("scale"), const("offset")),
            canonical("LayerNormalization", _ROWS, const("scale")),
        ),
    )

    def check(self, match: Match, model: Model) -> Refusal | None:
        x = match["x"]
        if list(match.node("rows").attrs.get("perm", ())) != list(_layouts.TO_LAST):
            return Refusal("Transpose does not put the channels last (perm)", match.node("rows").attrs.get("perm"))
        attrs = match.root.attrs
        if attrs.get("axis", -1) not in (-1, 3):
            return Refusal("normalises more than the channels (axis)", attrs["axis"])
        if attrs.get("stash_type", 1) != 1:
            return Refusal("statistics are not kept in float32 (stash_type)", attrs["stash_type"])
        refusal = _norms.refuse_type(x) or _norms.refuse_epsilon(attrs) or _refuse_convolution(match)
        if refusal:
            return refusal
        channels = _channels(match)
        for role in ("scale", "offset", "bias"):
            value = match.get(role)
            refusal = None if value is None else _norms.row_parameter(value, [channels], role, x)
            if refusal:
                return refusal
        return None

    def variant(self, match: Match) -> str:
        return "channels_first" if _last(match) is None else "channels_last"

    def kept(self, match: Match) -> list[gs.Tensor]:
        moved = _moved(match)
        return [] if moved is None else [moved]

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x, channels = match["x"], _channels(match)
        last = _last(match)
        given = x if last is None else last
        filled = [
            _norms.parameter(match.get(role), [channels], filler, x, new)
            for role, filler in (("bias", 0.0), ("scale", 1.0), ("offset", 0.0))
        ]
        radius = _kernel(match) // 2
        attrs = {
            "channels": channels,
            "pads": [radius] * 4,
            "epsilon": float(match.root.attrs.get("epsilon", 1e-5)),
            "dtype": _norms.element_type(x),
        }
        name = "DepthwiseConvLayerNorm" if last is None else "DepthwiseConvLayerNormLast"
        return new.node(name, [given, match["weight"], *filled], [match.output], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        norm = layernorm.statements(opset, "rows", "Scale", "Offset", "Y")
        conv = f"""conv = Conv <group: int = @channels, pads: ints = @pads> (first, W, B)
                   rows = Transpose <perm = {list(_layouts.TO_LAST)}> (conv)
                   {norm}"""
        moved = f"first = Transpose <perm = {list(_layouts.TO_FIRST)}> (X)"
        names, inputs = "channels, pads, epsilon, dtype", "X, W, B, Scale, Offset"
        return (
            _bodies.define(opset, f"DepthwiseConvLayerNorm <{names}> ({inputs}) => (Y) {{ first = Identity (X) {conv} }}"),
            _bodies.define(opset, f"DepthwiseConvLayerNormLast <{names}> ({inputs}) => (Y) {{ {moved} {conv} }}"),
        )


def _moved(match: Match) -> gs.Tensor | None:
    """The input with its channels last, as others of the same graph read it: a residual of rows, say."""
    x, owner = match["x"], match.index.owner
    for reader in x.outputs:
        if owner.get(id(reader)) is not owner[id(match.root)] or not reader.outputs or not match.escapes(reader.outputs[0]):
            continue
        if _layouts.transposed_from(reader.outputs[0], _layouts.TO_LAST) is x:
            moved: gs.Tensor = reader.outputs[0]
            return moved
    return None


def _last(match: Match) -> gs.Tensor | None:
    """The input with its channels last, where the graph has that too."""
    given = _layouts.behind_transpose(match["x"])
    return _moved(match) if given is None else given


def _sizes(match: Match) -> list[int] | None:
    shape = query.shape(match["weight"])
    return None if shape is None or len(shape) != 4 else [int(size or 0) for size in shape]


def _channels(match: Match) -> int:
    sizes = _sizes(match)
    assert sizes is not None
    return sizes[0]


def _kernel(match: Match) -> int:
    sizes = _sizes(match)
    assert sizes is not None
    return sizes[2]


def _refuse_convolution(match: Match) -> Refusal | None:
    """Depthwise, one filter a channel, square, stride 1, output as large as the input."""
    sizes, attrs = _sizes(match), match.node("conv").attrs
    if sizes is None:
        return Refusal("the convolution is not two-dimensional", query.shape(match["weight"]))
    channels, each, height, width = sizes
    group = int(attrs.get("group", 1))
    if group != channels or each != 1:
        return Refusal(f"the convolution of {channels} filters is not depthwise (group)", group)
    if channels % 8 or channels > MOST_CHANNELS:
        return Refusal(f"channels are no multiple of 8 up to {MOST_CHANNELS}", channels)
    if height != width or height not in KERNELS:
        return Refusal("the kernel is not 3x3, 5x5 or 7x7", [height, width])
    for name in ("strides", "dilations"):
        if any(step != 1 for step in attrs.get(name, ())):
            return Refusal(f"{name} are not 1", list(attrs[name]))
    auto, pads = attrs.get("auto_pad", "NOTSET"), list(attrs.get("pads", (0, 0, 0, 0)))
    auto = auto.decode() if isinstance(auto, bytes) else auto
    if auto not in ("SAME_UPPER", "SAME_LOWER") and (auto != "NOTSET" or pads != [height // 2] * 4):
        return Refusal("the output is not as large as the input (pads)", pads if auto == "NOTSET" else auto)
    if _norms.element_type(match["weight"]) != _norms.element_type(match["x"]):
        return Refusal(f"weight '{match['weight'].name}' is of another type than '{match['x'].name}'")
    return None


FUSION = DwconvLayerNorm()
