"""What goes into the engines that are timed and what comes out: data that flatters, and outputs that are not those of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onnxfuse.engine.run import Array
from onnxfuse.engine.trt import TensorSpec

CHANGE_TOLERANCE = 0.01
"""Largest difference between two runs on the same inputs, relative to the largest output: sums in another order make less."""


def feed_marks(feeds: Mapping[str, Array]) -> list[str]:
    """Marks on inputs that measure something else: none of them varies (zeros take less power), or one holds NaN or infinity.

    A single constant input beside others that vary is usual: masks of ones, initial states of zeros.
    """
    marks = []
    values = {name: _wide(array) for name, array in feeds.items() if array.size}
    for name, array in values.items():
        if not np.all(np.isfinite(array)):
            marks.append(f"input {name} holds NaN or infinity")
    many = [array for array in values.values() if array.size > 1]
    if many and all(np.all(array == array.flat[0]) for array in many):
        marks.append("no input varies: data of one value takes less power than real data, and hides wrong results")
    return marks


def output_marks(name: str, outputs: Mapping[str, Array]) -> list[str]:
    """Marks on the outputs of engine `name`: one that holds no finite number agrees with anything that fails alike."""
    wide = {output: _wide(array) for output, array in outputs.items() if array.size}
    return [f"{name}: output {output} holds no finite number" for output, array in wide.items() if not np.any(np.isfinite(array))]


def scrambled(feeds: Mapping[str, Array], inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """The same values in reverse order: valid for the model, and every intermediate result is another one.

    Inputs on the host hold shapes, and stay.
    """
    fixed = {spec.name for spec in inputs if spec.on_host}
    return {name: array if name in fixed else array.reshape(-1)[::-1].reshape(array.shape).copy() for name, array in feeds.items()}


def change(before: Mapping[str, Array], after: Mapping[str, Array]) -> tuple[str, float] | None:
    """(output, largest difference relative to its largest value) of the output that changed most; None where all bits are the same.

    NaN or infinity in other places is an infinite difference.
    """
    worst: tuple[str, float] | None = None
    for name, then in before.items():
        now = after[name]
        if then.shape == now.shape and then.tobytes() == now.tobytes():
            continue
        size = _difference(then, now)
        if worst is None or size > worst[1]:
            worst = (name, size)
    return worst


def _difference(then: Array, now: Array) -> float:
    if then.shape != now.shape:
        return math.inf
    a, b = _wide(then), _wide(now)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    difference = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    largest = float(np.abs(a[finite]).max(initial=0.0))
    return difference / largest if largest else (math.inf if difference else 0.0)


def _wide(array: Array) -> Array:
    """As float64, bfloat16 too, which numpy alone does not know."""
    wide: Array = np.asarray(array).astype(np.float64)
    return wide
