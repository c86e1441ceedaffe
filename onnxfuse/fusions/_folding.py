"""What the folding fusions share: constants taken in float64, and rounded once to the type they are stored in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.fusions.base import Refusal
from onnxfuse.fusions.pattern import producer
from onnxfuse.graph import query

Array = np.ndarray[Any, Any]

_FLOATS = frozenset({np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64), np.dtype(ml_dtypes.bfloat16)})


def refuse_parameter(value: gs.Tensor, role: str) -> Refusal | None:
    """Only constants of a float type can be computed with here."""
    if not query.is_constant(value):
        source = producer(value)
        return Refusal(f"{role} is no constant", f"'{value.name}' from {source.op}" if source else value.name)
    if query.dtype(value) not in _FLOATS:
        return Refusal(f"{role} '{value.name}' is of no float type", query.dtype(value))
    return None


def wide(value: gs.Tensor) -> Array:
    """The values of a constant in float64."""
    values = query.constant(value)
    assert values is not None
    return values.astype(np.float64)


def rounded(values: Array, like: gs.Tensor) -> Array:
    """`values` in the type of `like`."""
    kind = query.dtype(like)
    assert isinstance(kind, np.dtype)
    return values.astype(kind)


def largest(value: gs.Tensor) -> float:
    """The largest magnitude in a constant; 0 of an empty one, NaN where it holds one."""
    values = query.constant(value)
    assert values is not None
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def fits(magnitude: float, like: gs.Tensor) -> bool:
    """Whether a number of this magnitude is finite in the type of `like`; NaN is not."""
    return magnitude <= float(ml_dtypes.finfo(query.dtype(like)).max)  # type: ignore[no-untyped-call]


def refuse_overflow(values: Array, role: str, like: gs.Tensor) -> Refusal | None:
    """Refuses computed constants that are not finite, or would not be in the type of `like`."""
    magnitude = float(np.abs(values).max()) if values.size else 0.0
    return None if fits(magnitude, like) else Refusal(f"{role} after folding is not finite in {query.dtype(like)}", magnitude)


def per_channel(value: gs.Tensor, channels: int, axis: int, rank: int) -> Array | Refusal:
    """A constant that is added to a tensor of `rank` axes, as one float64 for each channel (`axis`); refused where it is more than that."""
    shape = known_sizes(value) or []
    aligned = [1] * (rank - len(shape)) + shape
    wanted = [1] * rank
    wanted[axis] = channels
    if aligned not in (wanted, [1] * rank):
        return Refusal(f"constant '{value.name}' of shape {shape} is not one value for each of the channels", channels)
    return np.broadcast_to(wide(value).reshape(-1), (channels,))


def known_sizes(value: gs.Tensor) -> list[int] | None:
    """The shape of `value` where every size is known."""
    shape = query.shape(value)
    if shape is None or not all(isinstance(size, int) for size in shape):
        return None
    return [int(size) for size in shape if size is not None]


def same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values[1:])
