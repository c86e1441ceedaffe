"""Medians with an interval, and what follows from one: faster, slower, or a draw.

Latency samples of one process are not independent (clocks and temperature drift), so the bootstrap resamples blocks of
neighbours rather than single samples (circular block bootstrap: Politis and Romano, 1992), of length n^(1/3). Where
samples were taken in several placements of the engines in memory, placements are resampled first, and blocks within them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
BUILD_DIFFERENCE = 0.005
"""What two builds of one model may differ by: resnet50 built twice on an H200 gave a ratio of 0.998. A fusion must win by more."""


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % bootstrap interval, in the unit of the samples."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Length of the interval relative to the median."""
        return (self.high - self.low) / self.median if self.median else float("inf")

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_dict(self, digits: int = 5) -> dict[str, float]:
        return {name: round(value, digits) for name, value in asdict(self).items()}


def bootstrap_median(samples: Sequence[float], seed: int = 0, placements: int = 1) -> Interval:
    """The median of `samples` and its interval; `placements` equal parts of the samples are one placement each.

    ValueError for no samples, or one that is not a positive finite number.
    """
    values = _checked(samples)
    index = _resampled(len(values), placements, seed)
    medians = np.median(values[index], axis=1)
    low, high = _tails(medians)
    return Interval(float(np.median(values)), low, high)


def bootstrap_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0, placements: int = 1) -> Interval:
    """median(a) / median(b) and its interval; above 1, b is the faster one.

    Samples are paired: a[i] and b[i] were taken next to each other, and are resampled together, so that a drift that
    both saw cancels. ValueError where the lengths differ.
    """
    first, second = _checked(a), _checked(b)
    if len(first) != len(second):
        raise ValueError(f"paired samples must be equally many, not {len(first)} and {len(second)}")
    index = _resampled(len(first), placements, seed)
    ratios = np.median(first[index], axis=1) / np.median(second[index], axis=1)
    low, high = _tails(ratios)
    return Interval(float(np.median(first) / np.median(second)), low, high)


def verdict(ratio: Interval) -> str:
    """ "faster", "slower" or "draw" for a ratio of automatic over fused: an interval that covers 1 decides nothing."""
    if ratio.covers(1.0):
        return "draw"
    return "faster" if ratio.low > 1.0 else "slower"


def _checked(samples: Sequence[float]) -> NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError("no samples")
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise ValueError("samples must be positive finite numbers")
    return values


def _resampled(count: int, placements: int, seed: int) -> NDArray[np.intp]:
    """RESAMPLES rows of indices: placements drawn with replacement, and in each of them blocks of neighbours."""
    if count % placements:
        raise ValueError(f"{count} samples are not {placements} equal parts")
    rng = np.random.default_rng(seed)
    each = count // placements
    length = max(1, round(each ** (1 / 3)))
    starts = rng.integers(0, each, size=(RESAMPLES, placements, -(-each // length)))
    index = ((starts[..., None] + np.arange(length)) % each).reshape(RESAMPLES, placements, -1)[..., :each]
    drawn = rng.integers(0, placements, size=(RESAMPLES, placements)) if placements > 1 else np.zeros((RESAMPLES, 1), np.intp)
    rows: NDArray[np.intp] = (index + each * drawn[..., None]).reshape(RESAMPLES, count)
    return rows


def _tails(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
