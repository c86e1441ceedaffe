"""Operators that numpy computes bit for bit as a runtime does: what moves data, integer arithmetic, and single float operations.

Constants are folded with these where that is enough, since a session of a runtime takes milliseconds and megabytes. IEEE 754 asks that
one addition, multiplication or division be rounded correctly, so those of float32 and float64 agree everywhere; what is summed or
approximated (MatMul, Exp, reductions) is left to the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import query, weights

Array = np.ndarray[Any, Any]
Arrays = Sequence[Array]

_MOST_FILLED = 1 << 24  # elements that ConstantOfShape makes here
_MOST_EXACT = 2**31  # absolute value of a float that is cast to an integer here


class _NotHere(Exception):
    """Left to the runtime."""


def compute(node: gs.Node, inputs: Sequence[Array | None]) -> Array | None:
    """The one output of `node` for its inputs (None: absent); None where this module does not know it, or where it is an error."""
    rule = _RULES.get(node.op)
    given = [value for value in inputs if value is not None]
    if rule is None or node.domain or len(given) < len(inputs) or len(node.outputs) != 1:
        return None
    try:
        with np.errstate(all="ignore"):
            return np.asarray(rule(node.attrs, given))
    except (_NotHere, ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _need(condition: object) -> None:
    if not condition:
        raise _NotHere


def _ints(attrs: dict[str, Any], inputs: Arrays, index: int, name: str, default: list[int] | None = None) -> list[int]:
    """A list of integers: an input, or the attribute that it was in older versions."""
    if len(inputs) > index:
        _need(inputs[index].dtype.kind == "i")
        return [int(x) for x in inputs[index].reshape(-1)]
    found = attrs.get(name, default)
    _need(found is not None)
    return [int(x) for x in found]  # type: ignore[union-attr]


def _identity(attrs: dict[str, Any], inputs: Arrays) -> Array:
    return inputs[0]


def _reshape(attrs: dict[str, Any], inputs: Arrays) -> Array:
    value, sizes = inputs[0], _ints(attrs, inputs, 1, "shape")
    if not attrs.get("allowzero", 0):
        sizes = [value.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    _need(value.size and all(size > 0 or size == -1 for size in sizes))
    return value.reshape(sizes)


def _transpose(attrs: dict[str, Any], inputs: Arrays) -> Array:
    return np.transpose(inputs[0], attrs.get("perm"))


def _squeeze(attrs: dict[str, Any], inputs: Arrays) -> Array:
    if len(inputs) == 1 and "axes" not in attrs:
        return np.squeeze(inputs[0])
    return np.squeeze(inputs[0], tuple(_ints(attrs, inputs, 1, "axes")))


def _unsqueeze(attrs: dict[str, Any], inputs: Arrays) -> Array:
    return np.expand_dims(inputs[0], tuple(_ints(attrs, inputs, 1, "axes")))


def _concat(attrs: dict[str, Any], inputs: Arrays) -> Array:
    _need(len({value.dtype for value in inputs}) == 1)
    return np.concatenate(inputs, attrs["axis"])


def _slice(attrs: dict[str, Any], inputs: Arrays) -> Array:
    value = inputs[0]
    starts, ends = _ints(attrs, inputs, 1, "starts"), _ints(attrs, inputs, 2, "ends")
    axes = _ints(attrs, inputs, 3, "axes", list(range(len(starts))))
    steps = _ints(attrs, inputs, 4, "steps", [1] * len(starts))
    _need(len(starts) == len(ends) == len(axes) == len(steps) and 0 not in steps)
    cut = [slice(None)] * value.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut[axis] = slice(start, end, step)
    return value[tuple(cut)]


def _gather(attrs: dict[str, Any], inputs: Arrays) -> Array:
    _need(inputs[1].dtype.kind == "i")
    return np.take(inputs[0], inputs[1], attrs.get("axis", 0))


def _cast(attrs: dict[str, Any], inputs: Arrays) -> Array:
    value, target = inputs[0], weights.NUMPY[attrs["to"]]
    _need(set(attrs) <= {"to", "saturate"} and _is_plain(value.dtype) and _is_plain(target))
    if value.dtype.kind == "f" and target.kind in "iu":
        _need(target.kind == "i" and target.itemsize >= 4 and (np.abs(value) < _MOST_EXACT).all())
    return value.astype(target)


def _filled(attrs: dict[str, Any], inputs: Arrays) -> Array:
    sizes, fill = [int(size) for size in inputs[0]], attrs.get("value")
    held = np.zeros(1, np.float32) if fill is None else query.constant(fill)
    _need(held is not None and all(0 <= size <= _MOST_FILLED for size in sizes) and np.prod(sizes, dtype=np.float64) <= _MOST_FILLED)
    return np.full(sizes, held.reshape(-1)[0])  # type: ignore[union-attr]


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Of a type whose arithmetic is the processor's own."""
    return dtype.kind in "iub" or (dtype.kind == "f" and dtype.itemsize >= 4)


def _elementwise(compute: Callable[[Array, Array], Array], kinds: str) -> Callable[[dict[str, Any], Arrays], Array]:
    def run(attrs: dict[str, Any], inputs: Arrays) -> Array:
        a, b = inputs
        _need(not attrs and a.dtype == b.dtype and a.dtype.kind in kinds and _is_plain(a.dtype))
        return compute(a, b)

    return run


def _divided(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.divide(a, b)
    _need_divisible(a, b)
    down = np.floor_divide(a, b)
    if a.dtype.kind == "u":
        return down
    quotient: Array = down + ((np.remainder(a, b) != 0) & ((a < 0) != (b < 0))).astype(a.dtype)  # ONNX rounds towards 0, numpy down
    return quotient


def _need_divisible(a: Array, b: Array) -> None:
    """A processor traps on integer division by 0, and of the smallest number by -1, where the quotient does not fit."""
    _need((b != 0).all() and not (a.dtype.kind == "i" and (b == -1).any() and (a == np.iinfo(a.dtype).min).any()))


def _modulo(attrs: dict[str, Any], inputs: Arrays) -> Array:
    a, b = inputs
    _need(a.dtype == b.dtype and a.dtype.kind in "iu")
    _need_divisible(a, b)
    return np.fmod(a, b) if attrs.get("fmod", 0) else np.mod(a, b)


def may_trap(node: gs.Node) -> bool:
    """Whether a runtime may be ended by the processor at a node, which then is computed here or not at all."""
    kind = query.dtype(node.inputs[0]) if node.inputs else None
    return node.op in ("Div", "Mod") and not (isinstance(kind, np.dtype) and kind.kind == "f")


_RULES: dict[str, Callable[[dict[str, Any], Arrays], Array]] = {
    "Add": _elementwise(np.add, "iuf"),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "Div": _elementwise(_divided, "iuf"),
    "Equal": _elementwise(np.equal, "iubf"),
    "Gather": _gather,
    "Identity": _identity,
    "Mod": _modulo,
    "Mul": _elementwise(np.multiply, "iuf"),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _elementwise(np.subtract, "iuf"),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
