"""Figures against numpy in float64, and what counts as agreement."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxfuse.verify import metrics
from onnxfuse.verify.check import TOLERANCES
from onnxfuse.verify.metrics import Tolerance, agrees, measure, worst


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_figures_are_those_of_float64() -> None:
    want = normal(50, 70)
    got = want + 1e-3 * normal(50, 70, seed=1)
    a, b = got.astype(np.float64), want.astype(np.float64)
    found = measure(got, want)
    assert found.max_abs == np.abs(a - b).max()
    assert found.max_rel == pytest.approx(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-6 * np.abs(b).max())))
    assert found.cosine == pytest.approx((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()), abs=1e-15)
    assert found.relative_rms == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert found.normalised == np.abs(a - b).max() / np.abs(b).max()
    assert found.outside == np.count_nonzero(np.abs(a - b) > 1e-5 + 1e-4 * np.abs(b))
    assert (found.shape, found.elements, found.dtype) == ((50, 70), 3500, "float32")


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)), st.floats(0, 1e-2), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_the_element_rule_is_exact(want: np.ndarray, size: float, seed: int) -> None:
    got = (want + size * np.random.default_rng(seed).standard_normal(want.shape)).astype(np.float32)
    only_elements = Tolerance(rtol=1e-4, atol=1e-5, cosine=None, relative_rms=None, normalised=None)
    right = np.abs(got.astype(np.float64) - want.astype(np.float64)) <= 1e-5 + 1e-4 * np.abs(want.astype(np.float64))
    assert measure(got, want, only_elements).agrees == right.all()


def test_chunks_give_the_figures_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    want = normal(1000)
    got = want + 1e-4 * normal(1000, seed=3)
    got[777] = np.nan
    whole = measure(got, want)
    monkeypatch.setattr(metrics, "CHUNK", 64)
    pieces = measure(got, want, Tolerance())
    assert pieces.max_abs == whole.max_abs
    assert pieces.cosine == pytest.approx(whole.cosine, abs=1e-14)
    assert pieces.reason == whole.reason
    assert "first at [777]" in pieces.reason


def test_a_wrong_value_is_found_and_named() -> None:
    want = normal(3, 5)
    got = want.copy()
    got[1, 2] += 0.5
    found = measure(got, want)
    assert not found.agrees
    assert "1 of 15 values outside" in found.reason
    assert "[1, 2]" in found.reason
    assert found.used > 1


def test_nan_on_one_side_only_fails() -> None:
    want, got = normal(8), normal(8)
    got[3] = np.nan
    for a, b in ((got, want), (want, got)):
        found = measure(a, b)
        assert not found.agrees
        assert found.nan_differ == 1
        assert "NaN on one side only at 1 place, first at [3]" in found.reason


def test_nan_on_both_sides_agrees_with_a_remark() -> None:
    want = np.array([np.nan, 1, -np.inf, 2], np.float32)
    found = measure(want.copy(), want)
    assert found.agrees
    assert (found.nan_equal, found.inf_equal, found.max_abs) == (1, 1, 0)
    assert found.remarks == ("NaN at the same 1 place on both sides", "infinity at the same 1 place on both sides")
    assert found.to_dict()["equal_nans"] == 1


@pytest.mark.parametrize("wrong", [np.inf, 3.0, np.nan])
def test_infinity_counts_by_sign_and_position(wrong: float) -> None:
    want = np.array([-np.inf, 1, 2], np.float32)
    got = want.copy()
    got[0] = wrong
    assert not agrees(got, want)
    assert not agrees(want, got)


def test_small_tensors_are_not_passed_by_atol() -> None:
    # All values are far below atol: only the scale-free figures can tell.
    want = np.abs(normal(64)) * 1e-7
    assert not agrees(np.zeros_like(want), want)
    assert not agrees(want * np.float32(1.1), want)
    assert agrees(want * np.float32(1 + 1e-6), want)


def test_values_near_zero_raise_no_alarm() -> None:
    want = np.exp(-np.abs(normal(4, 64)) * 30).astype(np.float32)
    got = want * (1 + 1e-6)
    got[want < 1e-9] *= 1.5  # an enormous relative error of nothing
    found = measure(got.astype(np.float32), want)
    assert found.agrees
    assert found.max_rel < 1e-3


def test_zero_references() -> None:
    zero = np.zeros(16, np.float32)
    assert measure(zero, zero).agrees
    assert measure(zero + np.float32(1e-6), zero).agrees
    assert not measure(zero + np.float32(1e-3), zero).agrees
    assert measure(zero, zero).cosine == 1


def test_large_values_may_round_but_not_differ() -> None:
    want = normal(1000) * 300
    got = want + np.float32(1e-3) * normal(1000, seed=1)
    scaled = Tolerance(of_typical=1e-5)
    assert not measure(got, want).agrees  # near zero, atol 1e-5 is below what float32 can hold of 300
    assert measure(got, want, scaled).agrees
    got[7] += 1
    assert not measure(got, want, scaled).agrees
    # One huge value does not make room for the others.
    want[0] = got[0] = 1e38
    assert not measure(got, want, scaled).agrees


def test_huge_values_do_not_overflow() -> None:
    want = np.array([1e300, -1e300, 1.0] * 4)
    found = measure(want * (1 + 1e-9), want)
    assert found.agrees
    assert found.cosine == pytest.approx(1)


def test_float16_limits_ask_for_direction_and_scale() -> None:
    limits = TOLERANCES["float16"]
    want = normal(10000)
    # The cosine is blind to a wrong scale.
    assert "the error's norm is 0.02 of the reference's" in measure(want * np.float32(1.02), want, limits).reason
    assert measure(want.astype(np.float16).astype(np.float32), want, limits).agrees
    assert "cosine" in measure(want + 0.05 * normal(10000, seed=5), want, limits).reason


@pytest.mark.parametrize(
    ("got", "want", "reason"),
    [
        (np.zeros(3, np.float32), np.zeros((3, 1), np.float32), "shape [3] instead of [3, 1]"),
        (np.zeros(3, np.float64), np.zeros(3, np.float32), "float64 instead of float32"),
        (np.zeros(3, np.int32), np.zeros(3, np.int64), "int32 instead of int64"),
        (None, np.zeros(3), "nothing (an empty optional) instead of a tensor"),
        ([np.zeros(3)], np.zeros(3), "a sequence of 1 instead of a tensor"),
        ([np.zeros(3)], [np.zeros(3), np.zeros(3)], "a sequence of 1 instead of a sequence of 2"),
    ],
)
def test_kinds_that_differ(got: object, want: object, reason: str) -> None:
    found = measure(got, want)
    assert not found.agrees
    assert found.reason == reason
    assert np.isinf([found.max_abs, found.relative_rms, found.used]).all()  # an error of 0 would read as no error
    assert np.isnan(found.cosine)


def test_where_nothing_is_finite_on_both_sides_there_is_no_figure() -> None:
    want = normal(9)
    for wrong in (np.nan, np.inf):
        found = measure(np.full_like(want, wrong), want)
        assert not found.agrees
        assert np.isinf([found.max_abs, found.max_rel, found.relative_rms, found.normalised, found.ulp]).all()
        assert np.isnan(found.cosine)
        assert np.isnan(worst([measure(want, want), found]).cosine)
        some = want.copy()
        some[0] = wrong
        assert measure(some, want).max_abs == 0  # the eight others are equal
    same = np.full(9, np.nan, np.float32)
    assert (measure(same, same.copy()).max_abs, measure(same, same.copy()).cosine) == (0, 1)


def test_integers_that_differ_have_a_norm_of_error() -> None:
    assert measure(np.array([3, 0], np.int64), np.array([3, 4], np.int64)).relative_rms == pytest.approx(0.8)
    assert np.isinf(measure(np.array([1], np.int64), np.array([0], np.int64)).relative_rms)


def test_integers_are_exact_beyond_float64() -> None:
    want = np.array([2**60, 5, -7], np.int64)
    assert measure(want.copy(), want).agrees
    got = want.copy()
    got[0] += 1
    found = measure(got, want)
    assert not found.agrees
    assert found.max_abs == 1
    assert "first at [0]" in found.reason
    extremes = np.array([np.iinfo(np.int64).min]), np.array([np.iinfo(np.int64).max])
    assert measure(*extremes).max_abs == pytest.approx(2.0**64)


def test_booleans_strings_scalars_and_nothing() -> None:
    assert measure(np.array([True, False]), np.array([True, False])).agrees
    assert not measure(np.array([True, True]), np.array([True, False])).agrees
    assert measure(np.array(["a", "b"], object), np.array(["a", "b"])).agrees
    assert "'x'" not in measure(np.array(["x", "b"]), np.array(["a", "b"])).reason
    assert not measure(np.array(["x", "b"]), np.array(["a", "b"])).agrees
    assert measure(np.float32(2.5), np.float32(2.5)).agrees
    assert not measure(np.array(2.5, np.float32), np.array(2.6, np.float32)).agrees
    empty = measure(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32))
    assert (empty.agrees, empty.max_abs, empty.cosine) == (True, 0, 1)
    assert measure(None, None).agrees


def test_sequences_name_the_element() -> None:
    want = [normal(4), normal(4, seed=1)]
    assert measure([a.copy() for a in want], want).agrees
    found = measure([want[0], want[1] + 1], want)
    assert not found.agrees
    assert found.reason.startswith("element 1 of the sequence: ")
    assert measure([], []).agrees


def test_bfloat16_is_a_float() -> None:
    want = normal(32).astype(ml_dtypes.bfloat16)
    found = measure(want.copy(), want)
    assert found.agrees
    assert found.cosine == pytest.approx(1)
    assert not measure(want + ml_dtypes.bfloat16(1), want).agrees


def test_engines_may_answer_in_another_float_type() -> None:
    want = normal(100)
    limits = TOLERANCES["float16"]
    found = measure(want.astype(np.float16), want, limits, same_dtype=False)
    assert found.agrees
    assert found.notes == ("float16 compared with float32",)
    assert not measure(want.astype(np.int32), want, limits, same_dtype=False).agrees


def test_worst_of_several_feeds() -> None:
    want = normal(16)
    good, bad = measure(want, want), measure(want + 1, want)
    both = worst([good, bad])
    assert not both.agrees
    assert both.reason == bad.reason
    assert both.max_abs == bad.max_abs
    assert both.elements == 32
