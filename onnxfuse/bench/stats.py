"""Medians with an interval, and what follows from one: faster, slower, or a draw.

Latency samples of one process are not independent (clocks and temperature drift), so the bootstrap resamples blocks of
neighbours rather than single samples (circular block bootstrap: Politis and Romano, 1992), of length n^(1/3).

Where samples were taken in several placements of the engines in memory, one placement is one observation, however many samples it has: its
medians, and their ratio within it. The interval is then Student's over the logarithms of these few (see T. Kalibera and R. Jones,
"Rigorous benchmarking in reasonable time", ISMM 2013, on repeating at the highest level that varies): resampling eight placements would
find a difference that is none about twice as often as it says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom; the last serves for more.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
BUILD_DIFFERENCE = 0.005
"""What two builds of one model may differ by: resnet50 built twice on an H200 gave a ratio of 0.998. A fusion must win by more."""


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % interval, in the unit of the samples; of several placements, the geometric mean of their medians."""

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
    if placements > 1:
        return _student(_by_placement(values, placements))
    medians = np.median(values[_resampled(len(values), seed)], axis=1)
    return Interval(float(np.median(values)), *_tails(medians))


def bootstrap_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0, placements: int = 1) -> Interval:
    """median(a) / median(b) and its interval; above 1, b is the faster one.

    Samples are paired: a[i] and b[i] were taken next to each other, and are resampled together, so that a drift that
    both saw cancels; so does what a placement does to both. ValueError where the lengths differ.
    """
    first, second = _checked(a), _checked(b)
    if len(first) != len(second):
        raise ValueError(f"paired samples must be equally many, not {len(first)} and {len(second)}")
    if placements > 1:
        return _student(_by_placement(first, placements) / _by_placement(second, placements))
    index = _resampled(len(first), seed)
    ratios = np.median(first[index], axis=1) / np.median(second[index], axis=1)
    return Interval(float(np.median(first) / np.median(second)), *_tails(ratios))


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


def _resampled(count: int, seed: int) -> NDArray[np.intp]:
    """RESAMPLES rows of indices, made of blocks of neighbours."""
    length = max(1, round(count ** (1 / 3)))
    starts = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, -(-count // length)))
    rows: NDArray[np.intp] = ((starts[..., None] + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]
    return rows


def _by_placement(values: NDArray[np.float64], placements: int) -> NDArray[np.float64]:
    if len(values) % placements:
        raise ValueError(f"{len(values)} samples are not {placements} equal parts")
    medians: NDArray[np.float64] = np.median(values.reshape(placements, -1), axis=1)
    return medians


def _student(values: NDArray[np.float64]) -> Interval:
    """Geometric mean of a few positive values and its interval."""
    logs = np.log(values)
    count = len(logs)
    half = STUDENT[min(count - 1, len(STUDENT)) - 1] * float(logs.std(ddof=1)) / math.sqrt(count)
    centre = float(logs.mean())
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half))


def _tails(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
