"""Questions that the norm fusions share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions.base import Builder, Match, Refusal
from onnxfuse.graph import query

_LONGEST_ROW = 1 << 24  # elements; a thousand times a long row, and what a scale or bias of ones and zeros may come to
FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})


def element_type(value: gs.Tensor) -> int:
    """ONNX element type of a tensor; 0 where it is unknown."""
    kind = query.dtype(value)
    if kind is None:
        return 0
    return kind if isinstance(kind, int) else int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind)))


def refuse_type(value: gs.Tensor) -> Refusal | None:
    """Norms compute in float32: wider types and unknown ones are left alone."""
    kind = element_type(value)
    if kind in FLOATS:
        return None
    return Refusal(f"'{value.name}' is of type", onnx.TensorProto.DataType.Name(kind).lower() if kind else "unknown")


def refuse_epsilon(attrs: Mapping[str, Any]) -> Refusal | None:
    """Kernels of norms take no epsilon below 0, which nobody means."""
    epsilon = float(attrs.get("epsilon", 1e-5))
    return None if 0 <= epsilon < math.inf else Refusal("epsilon is negative or no number", epsilon)


def refuse_operands(match: Match, x: gs.Tensor) -> Refusal | None:
    """What holds for any site on `x`: a float that float32 holds, no cast that loses digits, no constant that makes the result grow."""
    refusal = refuse_type(x)
    if refusal:
        return refusal
    given, rank = element_type(x), query.rank(x) or 0
    for node in match.nodes:
        if node.op == "Cast" and node.attrs["to"] not in (onnx.TensorProto.FLOAT, given):
            return Refusal(f"'{node.outputs[0].name}' is cast to", onnx.TensorProto.DataType.Name(node.attrs["to"]).lower())
        if node.op.startswith("Reduce"):
            continue  # its second input is axes
        for value in node.inputs:
            if query.is_constant(value) and (query.rank(value) or 0) > rank:
                return Refusal(f"constant '{value.name}' has more axes than '{x.name}', and so has the result", query.shape(value))
    result = element_type(match.output)
    if result != given and (result or any(node.op == "Cast" for node in match.nodes)):
        return Refusal(f"'{match.output.name}' is of another type than '{x.name}'")
    return None


def grows(own: int | str | None, wanted: int | str | None) -> bool:
    """Whether an extent that is broadcast to `wanted` is, or may be, larger: another number, or an unknown one beside 1."""
    return own != 1 and own != wanted and wanted is not None and (wanted == 1 or isinstance(own, int))


def reduced_axes(node: gs.Node) -> list[int] | Refusal:
    """The axes that a reduction with kept dimensions reduces, as written (negative ones too)."""
    if not node.attrs.get("keepdims", 1):
        return Refusal(f"{node.op} drops the axes it reduces (keepdims)", 0)
    if len(node.inputs) > 1 and not node.inputs[1].is_empty():
        values = query.constant(node.inputs[1])
        if values is None:
            return Refusal(f"axes of {node.op} are computed at run time", node.inputs[1].name)
        axes = [int(axis) for axis in values.reshape(-1)]
    else:
        axes = list(node.attrs.get("axes") or ())
    if not axes:
        return Refusal(f"{node.op} reduces all axes")
    return axes


def trailing(axes: Sequence[int], rank: int | None) -> int | Refusal:
    """How many of the last axes `axes` are; refused where they are others."""
    if rank is None and any(axis >= 0 for axis in axes):
        return Refusal("rank of the input is unknown and the axes count from its front", list(axes))
    counted = from_end(axes, rank)
    if counted != list(range(-len(counted), 0)):
        return Refusal("normalised axes are not the last ones", list(axes))
    return len(counted)


def from_end(axes: Sequence[int], rank: int | None) -> list[int]:
    """`axes` sorted and, where the rank is known, counted from the end."""
    return sorted(axis - rank if axis >= 0 and rank is not None else axis for axis in axes)


def row_parameter(value: gs.Tensor, sizes: Sequence[int], role: str, x: gs.Tensor) -> Refusal | None:
    """Refuses a scale or bias that is not one value for each normalised element (it would only broadcast), or of another type than `x`."""
    found = query.shape(value)
    if found is None:
        return Refusal(f"shape of the {role} '{value.name}' is unknown")
    while len(found) > len(sizes) and found[0] == 1:
        found = found[1:]
    if list(found) != list(sizes):
        return Refusal(f"{role} '{value.name}' of shape {query.shape(value)} is not one value for each normalised element of", list(sizes))
    if query.rank(value) != len(sizes) and not query.is_constant(value):
        return Refusal(f"{role} '{value.name}' has extra axes and is computed at run time", query.shape(value))
    if element_type(value) != element_type(x):
        return Refusal(f"{role} '{value.name}' is of another type than '{x.name}'")
    return None


def settle(match: Match, x: gs.Tensor) -> gs.Tensor:
    """The result of a site, with type and shape of `x` where inference found none: refuse_operands and row_parameter leave no other."""
    if match.output.dtype is None:
        match.output.dtype = x.dtype
    if match.output.shape is None and x.shape is not None:
        match.output.shape = list(x.shape)
    return match.output


def numpy_type(value: gs.Tensor) -> np.dtype[Any]:
    """The numpy type of a float tensor; ml_dtypes has the one that numpy lacks."""
    bfloat16 = element_type(value) == onnx.TensorProto.BFLOAT16
    known: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16) if bfloat16 else onnx.helper.tensor_dtype_to_np_dtype(element_type(value))
    return known


def parameter(value: gs.Tensor | None, sizes: Sequence[int], filler: float, like: gs.Tensor, new: Builder) -> gs.Tensor:
    """`value` as exactly `sizes`; where it is absent, `filler` everywhere, in the type of `like`."""
    if value is None:
        return new.filled("ones" if filler else "zeros", filler, tuple(sizes), numpy_type(like))
    if query.rank(value) == len(sizes):
        return value
    return new.reshaped(value, tuple(sizes))  # row_parameter lets only constants have extra axes


def rows_of(value: gs.Tensor, count: int) -> list[int] | Refusal:
    """Sizes of the last `count` axes, which must be known."""
    known = query.shape(value)
    sizes = None if known is None or len(known) < count else known[-count:]
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        return Refusal(f"length of the normalised rows of '{value.name}' is unknown", known)
    found = [int(size) for size in sizes if size is not None]
    if math.prod(found) > _LONGEST_ROW:
        return Refusal(f"normalised rows of '{value.name}' are of more than {_LONGEST_ROW:,} elements", found)
    return found
