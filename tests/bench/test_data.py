"""Inputs that flatter and outputs that are not those of a run, planted."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.bench.data import CHANGE_TOLERANCE, change, feed_marks, output_marks, scrambled
from onnxfuse.engine.trt import TensorSpec

RNG = np.random.default_rng(0)
VARIED = RNG.standard_normal((2, 8)).astype(np.float16)


@pytest.mark.parametrize(
    "feeds",
    [
        {"x": VARIED},
        {"ids": np.array([[101, 2, 102]]), "mask": np.ones((1, 3), np.int64), "types": np.zeros((1, 3), np.int64)},
        {"x": VARIED, "h0": np.zeros((1, 8), np.float16)},
        {"x": np.array([1.0], np.float32)},
        {"x": VARIED.astype(ml_dtypes.bfloat16)},
        {"empty": np.zeros((0, 4), np.float32)},
    ],
    ids=["floats", "tokens, a mask of ones", "a first state of zeros", "one value", "bfloat16", "empty"],
)
def test_inputs_as_they_are_used_have_no_mark(feeds: dict[str, np.ndarray]) -> None:
    assert feed_marks(feeds) == []


@pytest.mark.parametrize(
    "feeds",
    [{"x": np.zeros((2, 8), np.float16)}, {"x": np.full((4,), 3.0), "mask": np.ones((4,), bool)}, {"ids": np.zeros((1, 9), np.int64)}],
    ids=["zeros", "one value each", "one token"],
)
def test_inputs_of_one_value_are_marked(feeds: dict[str, np.ndarray]) -> None:
    (mark,) = feed_marks(feeds)
    assert mark.startswith("no input varies")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_input_that_is_no_number_is_marked(bad: float) -> None:
    x = VARIED.copy()
    x[0, 0] = bad
    assert feed_marks({"x": x}) == ["input x holds NaN or infinity"]


def test_outputs_without_a_number_are_marked() -> None:
    outputs = {"y": np.full((2, 2), np.nan), "z": np.array([1.0, np.nan]), "n": np.array([1, 2]), "none": np.zeros((0,))}
    assert output_marks("fused", outputs) == ["fused: output y holds no finite number"]


def test_scrambled_inputs_hold_the_same_values_elsewhere() -> None:
    specs = (TensorSpec("x", "float16", (2, 8), True, False), TensorSpec("shape", "int64", (2,), True, True))
    feeds = {"x": VARIED, "shape": np.array([2, 8])}
    other = scrambled(feeds, specs)
    assert other["x"].shape == VARIED.shape
    assert np.array_equal(np.sort(other["x"], axis=None), np.sort(VARIED, axis=None))
    assert not np.array_equal(other["x"], VARIED)
    assert np.array_equal(other["shape"], feeds["shape"])


def test_the_same_bits_are_no_change() -> None:
    y = np.array([1.0, np.nan, -0.0], np.float32)
    assert change({"y": y}, {"y": y.copy()}) is None


def test_a_change_is_measured_by_the_largest_value() -> None:
    then = {"y": np.array([4.0, 1.0]), "z": np.array([1.0])}
    assert change(then, {"y": np.array([4.0, 1.02]), "z": np.array([1.0])}) == ("y", pytest.approx(0.005))
    assert change(then, {"y": np.array([4.0, 1.0]), "z": np.array([1.5])}) == ("z", pytest.approx(0.5))


def test_sums_in_another_order_stay_below_the_tolerance() -> None:
    x = RNG.standard_normal(4096).astype(np.float16)
    forward, backward = (np.cumsum(rows, axis=1, dtype=np.float16)[:, -1] for rows in (x.reshape(64, 64), x.reshape(64, 64)[:, ::-1]))
    changed = change({"y": forward}, {"y": backward})
    assert changed is not None
    assert 0 < changed[1] < CHANGE_TOLERANCE


@pytest.mark.parametrize(
    "now",
    [np.array([1.0, np.nan]), np.array([np.inf, 1.0]), np.array([1.0, 1.0, 1.0])],
    ids=["NaN", "infinity", "another shape"],
)
def test_what_is_no_number_any_more_is_a_change_without_bound(now: np.ndarray) -> None:
    assert change({"y": np.array([1.0, 1.0])}, {"y": now}) == ("y", math.inf)
