"""patch_linear: a convolution of disjoint patches (its kernel is its stride) behind a LayerNormalization over channels becomes a product.

    y = Conv(Transpose(LayerNormalization(x, scale, offset), 0 3 1 2), weight, bias)        x [N, H, W, C], y [N, O, H / p, W / p]
      = Transpose(patches(LayerNormalization(x, scale, offset)) weight' + bias, 0 3 1 2)    patches [N, H / p, W / p, p p C]
    y = LayerNormalization(Transpose(x, 0 2 3 1), scale, offset)                            x [N, C, H, W] from a convolution

When it wins: between the stages of ConvNeXt (norm_before), where a runtime makes four or five kernels of it: norm, transpose, copies, a
convolution of few blocks, transpose. The norm writes its rows as patches, which costs nothing; the product takes channels last and gives
channels last, as dwconv_layernorm and linear_epilogue do around it. Where the norm's input was transposed from a channels-last tensor, that
is read; where others read the result transposed to channels last, they read the product. A norm that is spelled out over axis 1 of planes
is taken, too. Behind the first convolution (norm_behind) the norm reads the image in the layout that the convolution writes, and the
convolution stays. Source: "A ConvNet for the 2020s", Liu and others, 2022; patches as rows of a product: "An Image is Worth 16x16 Words",
Dosovitskiy and others, 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _folding, _layouts, _norms, layernorm
from onnxfuse.fusions.base import Builder, Fusion, Index, Match, Miss, Refusal, label
from onnxfuse.fusions.pattern import DOMAIN, STANDARD, canonical, const, either, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

_MOST = 32  # pixels a side of a patch
_MOST_PLANES = 504  # channels whose tile of float32 fits the shared memory of every GPU
_CROPS = 13  # the operator set from which a body cuts off what fills no patch

_ROWS = tensor("rows")
_NORM = either(
    canonical("LayerNormalization", _ROWS, const("scale"), const("offset"), out="norm"),
    canonical("LayerNormalization", _ROWS, const("scale"), out="norm"),
)
_MOVED = op("Transpose", _NORM, out="moved")
_SPELLED = layernorm.FUSION.patterns[0]  # over axis 1 of x, which layernorm leaves alone
_PLANES = op("Transpose", op("Conv", tensor("image"), const("filters"), rest=True, context=True, out="x"), out="planes")


class PatchLinear(Fusion):
    name = "patch_linear"
    kind = "fused"
    half_from = 80
    needs = ("layernorm",)
    belongs_with = ("linear_epilogue", "dwconv_layernorm")
    anchor = "LayerNormalization"
    patterns = (
        either(*(op("Conv", norm, const("weight"), *added) for norm in (_MOVED, _SPELLED) for added in ((const("added"),), ()))),
        either(
            canonical("LayerNormalization", _PLANES, const("scale"), const("offset"), out="norm"),
            canonical("LayerNormalization", _PLANES, const("scale"), out="norm"),
        ),
    )

    def find(self, model: Model, index: Index, far: bool) -> tuple[list[Match], list[Miss]]:
        """Norms are everywhere: that one is not behind a convolution is said only where it was asked.

        A norm whose convolution becomes a product reads that, channels last.
        """
        matches, misses = super().find(model, index, far)
        roots = {id(match.root) for match in matches}
        norms = {label(node) for _, node in index.by_op.get("LayerNormalization", ())}
        kept = [match for match in matches if match.get("planes") is None or id(match.node("x")) not in roots]
        return kept, [miss for miss in misses if far or miss.root not in norms]

    def check(self, match: Match, model: Model) -> Refusal | None:
        if match.get("planes") is not None:
            return _refuse_behind(match)
        if match.get("moved") is not None and tuple(match.node("moved").attrs.get("perm", ())) != _layouts.TO_FIRST:
            return Refusal("Transpose does not put the channels first (perm)", match.node("moved").attrs.get("perm"))
        refusal = _norms.refuse_type(_given(match)) or _refuse_convolution(match)
        if refusal:
            return refusal
        filters, channels, patch = _sizes(match)
        refusal = _refuse_norm(match, channels) if match.get("moved") is not None else _refuse_spelled(match, channels)
        if refusal:
            return refusal
        if match.get("added") is not None:
            refusal = _norms.row_parameter(match["added"], [filters], "bias", _given(match))
            if refusal:
                return refusal
        if not _fits(match, patch) and model.opset < _CROPS:
            return Refusal(f"height and width are not known to be multiples of {patch}, which needs operator set {_CROPS}", model.opset)
        return None

    def variant(self, match: Match) -> str:
        return "norm_before" if match.get("planes") is None else "norm_behind"

    def kept(self, match: Match) -> list[gs.Tensor]:
        reader = None if match.get("planes") is not None else _to_last(match)
        return [] if reader is None else [reader.outputs[0]]

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        if match.get("planes") is not None:
            return _norm_of_planes(match, new)
        given = _given(match)
        filters, channels, patch = _sizes(match)
        kind = {"dtype": _norms.element_type(given)}
        sizes: Sequence[Any] = query.shape(match.output) or [None] * 4
        places = [sizes[0], sizes[2], sizes[3]]
        patches = new.variable("patches", given.dtype, [*places, patch * patch * channels])
        name = "LayerNormPatches" if _fits(match, patch) else "LayerNormPatchesCropped"
        attrs = {"patch": patch, "epsilon": _epsilon(match), **kind}
        rows = [_channels_last(match, new), *_affine(match, channels, given, new)]
        new.node(name, rows, [patches], attrs, stem="layernorm_patches", domain=DOMAIN)

        weight = new.computed(("patches", id(match["weight"])), match["weight"].name, lambda: _as_matrix(match["weight"]))
        inputs = [patches, weight, _norms.parameter(match.get("added"), [filters], 0.0, given, new)]
        reader = _to_last(match)
        if reader is None:
            product = new.variable("rows", given.dtype, [*places, filters])
        else:
            product = reader.outputs[0]
            match.graph.nodes = [node for node in match.graph.nodes if node is not reader]
            reader.inputs.clear()
            reader.outputs.clear()
        stands = new.node("PatchLinear", inputs, [product], kind, stem=self.name, domain=DOMAIN)
        if match.output.outputs or id(match.output) in match.index.outputs:
            new.node("Transpose", [product], [match.output], {"perm": list(_layouts.TO_FIRST)}, stem="to_first")
        return stands

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        norm = layernorm.statements(opset, "whole", "Scale", "Offset", "normed")
        patches = f"""{norm}
            first = Transpose <perm = {list(_layouts.TO_FIRST)}> (normed)
            deep = SpaceToDepth <blocksize: int = @patch> (first)
            Y = Transpose <perm = {list(_layouts.TO_LAST)}> (deep)"""
        head = "<patch, epsilon, dtype> (X, Scale, Offset) => (Y)"
        planes = f"""rows = Transpose <perm = {list(_layouts.TO_LAST)}> (X)
            {layernorm.statements(opset, "rows", "Scale", "Offset", "Y")}"""
        made = [
            _bodies.define(opset, f"LayerNormPatches {head} {{ whole = Identity (X) {patches} }}"),
            _bodies.define(opset, f"LayerNormPlanes <epsilon, dtype> (X, Scale, Offset) => (Y) {{ {planes} }}"),
            _bodies.define(opset, "PatchLinear <dtype> (X, W, bias) => (Y) { product = MatMul (X, W) Y = Add (product, bias) }"),
        ]
        if opset >= _CROPS:
            made.append(_bodies.define(opset, f"LayerNormPatchesCropped {head} {{ {_CROPPED} {patches} }}"))
        return tuple(made)

    def definitions(self, nodes: Sequence[gs.Node], opset: int) -> tuple[onnx.FunctionProto, ...]:
        # The product, which stands for its site, reads what the other node writes.
        return super().definitions([*nodes, *(node.inputs[0].inputs[-1] for node in nodes if node.op == "PatchLinear")], opset)


_CROPPED = """shape = Shape (X)
    one = Constant <value_ints = [1]> ()
    three = Constant <value_ints = [3]> ()
    sides = Slice (shape, one, three)
    side = Constant <value_int: int = @patch> ()
    counts = Div (sides, side)
    ends = Mul (counts, side)
    starts = Constant <value_ints = [0, 0]> ()
    axes = Constant <value_ints = [1, 2]> ()
    whole = Slice (X, starts, ends, axes)"""


def _norm_of_planes(match: Match, new: Builder) -> gs.Node:
    x = match["x"]
    attrs = {"epsilon": _epsilon(match), "dtype": _norms.element_type(x)}
    inputs = [x, *_affine(match, _filters(match), x, new)]
    return new.node("LayerNormPlanes", inputs, [match.output], attrs, stem="layernorm_planes", domain=DOMAIN)


def _given(match: Match) -> gs.Tensor:
    """What the norm reads, its channels last or, where the norm is spelled out, first."""
    rows = match.get("rows")
    return match["x"] if rows is None else rows


def _epsilon(match: Match) -> float:
    if match.get("norm") is not None:
        return float(match.node("norm").attrs.get("epsilon", 1e-5))
    value = query.scalar(match["epsilon"])
    assert value is not None
    return value


def _affine(match: Match, channels: int, like: gs.Tensor, new: Builder) -> list[gs.Tensor]:
    if match.get("norm") is None:
        return [new.reshaped(match[role], (channels,)) for role in ("scale", "bias")]
    return [_norms.parameter(match.get(role), [channels], filler, like, new) for role, filler in (("scale", 1.0), ("offset", 0.0))]


def _refuse_norm(match: Match, channels: int) -> Refusal | None:
    """The norm is over the last axis alone; its parameters hold one value for each channel."""
    attrs = match.node("norm").attrs
    if attrs.get("axis", -1) not in (-1, 3):
        return Refusal("normalises more than the channels (axis)", attrs["axis"])
    if attrs.get("stash_type", 1) != 1:
        return Refusal("statistics are not kept in float32 (stash_type)", attrs["stash_type"])
    refusal = _norms.refuse_epsilon(attrs)
    for role in ("scale", "offset"):
        value = match.get(role)
        refusal = refusal or (None if value is None else _norms.row_parameter(value, [channels], role, _given(match)))
    return refusal


def _refuse_spelled(match: Match, channels: int) -> Refusal | None:
    """The norm that is spelled out is over axis 1 of an image; its parameters hold one value for each channel."""
    x = match["x"]
    refusal = _norms.refuse_operands(match, x)
    if refusal:
        return refusal
    if query.rank(x) != 4:
        return Refusal(f"'{x.name}' is no image", query.shape(x))
    for name in ("mean", "variance"):
        axes = _norms.reduced_axes(match.node(name))
        if isinstance(axes, Refusal):
            return axes
        if axes not in ([1], [-3]):
            return Refusal("the norm is not over the channels alone (axes)", axes)
    epsilon = query.scalar(match["epsilon"])
    if epsilon is None or not 0 <= epsilon < math.inf:
        return Refusal("epsilon is negative or no number", epsilon)
    for role in ("scale", "bias"):
        value = match[role]
        if not query.is_constant(value):
            return Refusal(f"{role} is no constant", value.name)
        if (_folding.known_sizes(value) or [])[-3:] != [channels, 1, 1] or _norms.element_type(value) != _norms.element_type(x):
            return Refusal(f"{role} '{value.name}' is not one value of the image's type for each of the channels", query.shape(value))
    return None


def _filters(match: Match) -> int:
    """Of the convolution before the norm; 0 where unknown."""
    sizes = _folding.known_sizes(match["filters"])
    return 0 if not sizes else sizes[0]


def _refuse_behind(match: Match) -> Refusal | None:
    """A convolution of whole images, whose planes the kernel's tile holds."""
    filters = _filters(match)
    if tuple(match.node("planes").attrs.get("perm", ())) != _layouts.TO_LAST:
        return Refusal("Transpose does not put the channels last (perm)", match.node("planes").attrs.get("perm"))
    groups = int(match.node("x").attrs.get("group", 1))
    if groups != 1:
        return Refusal("the convolution is grouped (group)", groups)
    if not 0 < filters <= _MOST_PLANES:
        return Refusal(f"there are not 1 to {_MOST_PLANES} channels", filters)
    return _norms.refuse_type(match["x"]) or _refuse_norm(match, filters)


def _sizes(match: Match) -> tuple[int, int, int]:
    """Filters, channels, and pixels a side of a patch."""
    sizes = _folding.known_sizes(match["weight"])
    assert sizes is not None
    return sizes[0], sizes[1], sizes[2]


def _as_matrix(weight: gs.Tensor) -> np.ndarray[Any, Any]:
    """[O, C, p, p] as [p p C, O]: rows in the order in which a patch's pixels, and their channels, follow each other."""
    values = query.constant(weight)
    assert values is not None
    return np.ascontiguousarray(values.transpose(2, 3, 1, 0).reshape(-1, values.shape[0]))


def _fits(match: Match, patch: int) -> bool:
    """Whether patches are known to leave nothing of the image."""
    shape = query.shape(_given(match)) or []
    sides = shape[2:] if match.get("rows") is None else shape[1:3]
    return len(shape) == 4 and all(isinstance(size, int) and size % patch == 0 for size in sides)


def _channels_last(match: Match, new: Builder) -> gs.Tensor:
    """The norm's input with its channels last; without the two transposes where it came from such a tensor through a channels-first one."""
    rows = match.get("rows")
    first = match["x"] if rows is None else _layouts.transposed_from(rows, _layouts.TO_LAST)
    last = None if first is None else _layouts.behind_transpose(first)
    if last is not None:
        return last
    if rows is None:
        shape = query.shape(match["x"])
        rows = new.variable("norm_last", match["x"].dtype, None if shape is None else [shape[axis] for axis in _layouts.TO_LAST])
        new.node("Transpose", [match["x"]], [rows], {"perm": list(_layouts.TO_LAST)}, stem="to_last")
    return rows


def _to_last(match: Match) -> gs.Node | None:
    """The Transpose of the same graph by which others read the result with its channels last."""
    for reader in match.output.outputs:
        is_transpose = reader.op == "Transpose" and reader.domain in STANDARD
        if is_transpose and tuple(reader.attrs.get("perm", ())) == _layouts.TO_LAST and match.index.owner.get(id(reader)) is match.graph:
            return reader
    return None


def _refuse_convolution(match: Match) -> Refusal | None:
    """Disjoint square patches of all channels, beginning at the first pixel; sizes that the product's kernel takes."""
    weight, attrs = match["weight"], match.root.attrs
    sizes = _folding.known_sizes(weight)
    if sizes is None or len(sizes) != 4:
        return Refusal("the convolution is not two-dimensional", query.shape(weight))
    filters, channels, height, width = sizes
    if int(attrs.get("group", 1)) != 1:
        return Refusal("the convolution is grouped (group)", attrs["group"])
    if height != width or not 2 <= height <= _MOST:
        return Refusal(f"the kernel is no square of 2x2 to {_MOST}x{_MOST}", [height, width])
    if list(attrs.get("strides", (1, 1))) != [height, width]:
        return Refusal("strides are not the kernel's sizes", list(attrs.get("strides", (1, 1))))
    if any(step != 1 for step in attrs.get("dilations", ())):
        return Refusal("dilations are not 1", list(attrs["dilations"]))
    auto, pads = attrs.get("auto_pad", "NOTSET"), list(attrs.get("pads", ()))
    auto = auto.decode() if isinstance(auto, bytes) else auto
    if auto not in ("NOTSET", "VALID") or (auto == "NOTSET" and any(pads)):
        return Refusal("the input is padded (pads)", pads if auto == "NOTSET" else auto)
    if filters % 8 or height * width * channels % 8 or not filters * channels:
        return Refusal("filters and elements of a patch are no multiples of 8", [filters, height * width * channels])
    if _norms.element_type(weight) != _norms.element_type(_given(match)):
        return Refusal(f"weight '{weight.name}' is of another type than '{_given(match).name}'")
    return None


FUSION = PatchLinear()
