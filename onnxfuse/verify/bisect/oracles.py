"""The oracles of `search`: how far the model with just some sites on is from the right outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from onnxfuse.verify.bisect.regions import Pair
from onnxfuse.verify.bisect.search import Oracle, Sites
from onnxfuse.verify.check import Check, check_arrays
from onnxfuse.verify.metrics import FEW, Metrics, Tolerance
from onnxfuse.verify.reference import Outputs

Run = Callable[[Path], Sequence[Outputs]]  # a model -> its outputs, one mapping a feed
Judge = Callable[[Sequence[Outputs]], float]  # those outputs -> their disagreement figure


def exchanging(pair: Pair, run: Run, judge: Judge) -> Oracle:
    """The models between two files, run by `run`: onnxruntime where a function body may be wrong, an engine where a kernel may be."""
    count = itertools.count()
    last: dict[Sites, Path] = {}

    def ask(on: Sites) -> float:
        if on not in last:  # a set that is asked again is the same file, for which an engine need not be built again
            for path in last.values():
                path.unlink(missing_ok=True)
            last.clear()
            last[on] = pair.save(on, pair.folder / f"try{next(count)}.onnx")
        return judge(run(last[on]))

    return ask


def against(wanted: Sequence[Outputs], limits: Tolerance, same_dtype: bool) -> Judge:
    """Outputs against the right ones, one mapping a feed each."""
    return lambda got: figure(check_arrays(wanted, got, limits, same_dtype=same_dtype))


def figure(check: Check) -> float:
    """The largest error of a check as a share of its limit, linear in the error. Above 1 exactly where the check disagrees.

    The rest of a cosine to 1 grows with the square of an error, so its root counts.
    """
    return max((_figure(metrics, check.tolerance) for metrics in check.outputs.values()), default=0.0)


def _figure(metrics: Metrics, limits: Tolerance) -> float:
    used = metrics.used
    if limits.cosine is not None and metrics.elements >= FEW:
        angle = max(0.0, (1 - metrics.cosine) / (1 - limits.cosine))
        if used <= angle * (1 + 1e-12):  # nothing else is as far off
            norm = metrics.relative_rms / limits.relative_rms if limits.relative_rms else 0.0
            largest = metrics.normalised / limits.normalised if limits.normalised else 0.0
            used = max(math.sqrt(angle), norm, largest)
    if metrics.agrees:
        return min(used, 1.0)
    return used if used > 1 else math.inf  # a wrong shape or type, or a missing output


def worst_feed(wanted: Sequence[Outputs], got: Sequence[Outputs], limits: Tolerance, same_dtype: bool) -> int:
    """Which feed's outputs are furthest off."""
    figures = [figure(check_arrays([want], [have], limits, same_dtype=same_dtype)) for want, have in zip(wanted, got, strict=True)]
    return figures.index(max(figures))
