"""Medians, intervals and verdicts against known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onnxfuse.bench.stats import STUDENT, Interval, bootstrap_median, bootstrap_ratio, verdict


def test_constant_samples_have_no_width() -> None:
    assert bootstrap_median([2.0] * 50) == Interval(2.0, 2.0, 2.0)
    assert bootstrap_ratio([3.0] * 50, [2.0] * 50) == Interval(1.5, 1.5, 1.5)


def test_the_median_is_the_sample_median_not_the_mean() -> None:
    assert bootstrap_median([1.0, 1.0, 1.0, 100.0]).median == 1.0
    assert bootstrap_median([1.0, 2.0]).median == 1.5


def test_same_samples_give_the_same_interval() -> None:
    samples = np.random.default_rng(0).lognormal(size=200)
    assert bootstrap_median(samples) == bootstrap_median(list(samples))


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = sum(bootstrap_median(1 + 0.1 * rng.standard_normal(200), seed=i).covers(1.0) for i in range(200))
    assert 0.88 <= covered / 200 <= 0.99


def test_width_follows_the_standard_error_of_the_median() -> None:
    """For normal samples the standard error of the median is sqrt(pi/2) sigma / sqrt(n)."""
    rng = np.random.default_rng(2)
    widths = [bootstrap_median(1 + 0.1 * rng.standard_normal(400), seed=i).width for i in range(20)]
    expected = 2 * 1.96 * np.sqrt(np.pi / 2) * 0.1 / np.sqrt(400)
    assert np.mean(widths) == pytest.approx(expected, rel=0.2)


def test_a_drift_that_both_see_cancels_in_the_ratio() -> None:
    rng = np.random.default_rng(3)
    drift = np.linspace(1.0, 2.0, 200)
    a = 1.02 * drift * (1 + 0.001 * rng.standard_normal(200))
    b = drift * (1 + 0.001 * rng.standard_normal(200))
    paired = bootstrap_ratio(a, b)
    shuffled = bootstrap_ratio(a, rng.permutation(b))
    assert verdict(paired) == "faster"
    assert paired.low <= 1.02 <= paired.high
    assert paired.width < shuffled.width / 3


def test_neighbours_that_move_together_widen_the_interval() -> None:
    """200 samples that are 20 independent ones repeated say less than 200 independent ones."""
    rng = np.random.default_rng(4)
    independent = 1 + 0.1 * rng.standard_normal(200)
    repeated = np.repeat(1 + 0.1 * rng.standard_normal(20), 10)
    assert bootstrap_median(repeated).width > 1.5 * bootstrap_median(independent).width


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(1.1, 1.05, 1.15), "faster"),
        (Interval(0.9, 0.85, 0.95), "slower"),
        (Interval(1.02, 0.99, 1.05), "draw"),
        (Interval(1.02, 1.0, 1.05), "draw"),
        (Interval(1.0, 1.0, 1.0), "draw"),
    ],
)
def test_verdict(interval: Interval, expected: str) -> None:
    assert verdict(interval) == expected


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf")]])
def test_samples_that_are_no_times(samples: list[float]) -> None:
    with pytest.raises(ValueError):
        bootstrap_median(samples)


def test_unpaired_samples() -> None:
    with pytest.raises(ValueError, match="not 2 and 3"):
        bootstrap_ratio([1.0, 2.0], [1.0, 2.0, 3.0])


def test_placements_widen_the_interval_to_what_they_differ_by() -> None:
    """Each placement is steady, but they differ: an interval that ignores them would be far too sure."""
    rng = np.random.default_rng(3)
    levels = np.repeat(1 + 0.03 * rng.standard_normal(8), 25)
    samples = list(levels * (1 + 1e-4 * rng.standard_normal(200)))
    placed, ignoring = bootstrap_median(samples, placements=8), bootstrap_median(samples)
    assert placed.width > 2 * ignoring.width
    assert placed.covers(1.0)


def test_a_ratio_over_placements_covers_what_changes_sign_between_them() -> None:
    a = np.repeat([1.0, 1.06, 0.98, 1.05], 50)
    b = np.repeat([1.04, 1.0, 1.0, 1.01], 50)
    assert verdict(bootstrap_ratio(list(a), list(b), placements=4)) == "draw"


def test_samples_must_fall_into_equal_placements() -> None:
    with pytest.raises(ValueError, match="not 3 equal parts"):
        bootstrap_median([1.0] * 10, placements=3)


@pytest.mark.parametrize(("common", "own"), [(0.0, 0.01), (0.03, 0.001)], ids=["each engine by itself", "both alike"])
def test_over_placements_a_difference_that_is_none_is_found_as_often_as_it_says(common: float, own: float) -> None:
    """2.5 % of false wins; 600 times the standard error is 0.6 %."""
    rng = np.random.default_rng(5)
    wins, widths = 0, []
    for _ in range(600):
        shift, difference = (np.repeat(1 + size * rng.standard_normal(8), 25) for size in (common, own))
        a, b = (base * shift * (1 + 0.002 * rng.standard_normal(200)) for base in (1.0, difference))
        ratio = bootstrap_ratio(list(a), list(b), placements=8)
        wins += ratio.low > 1.0
        widths.append(ratio.width)
    assert 0.007 <= wins / 600 <= 0.043
    # What a placement does to both engines alike cancels.
    noise = np.hypot(own, 0.002 * np.sqrt(np.pi / 2 * 2 / 25))
    assert np.mean(widths) == pytest.approx(2 * 2.365 * noise / np.sqrt(8), rel=0.1)


@pytest.mark.parametrize("freedom", [1, 2, 7, 30])
def test_students_quantiles(freedom: int) -> None:
    """97.5 % of the density lies below them."""
    t = np.linspace(-STUDENT[freedom - 1], STUDENT[freedom - 1], 200_001)
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    density = scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    inside = float(np.sum((density[1:] + density[:-1]) / 2) * (t[1] - t[0]))
    assert inside == pytest.approx(0.95, abs=1e-4)
