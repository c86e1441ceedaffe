"""The timing loop and its marks, with planted faults; nothing here is timed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from onnxfuse.bench import timing
from onnxfuse.bench.timing import Clocks, bandwidth_mark, interleave, judge, warm
from onnxfuse.engine.trt import EngineFault

STEADY = Clocks(1980, 3201, 50)


def steady(level: float = 0.4, count: int = 200) -> list[float]:
    return list(level * (1 + 0.002 * np.random.default_rng(0).standard_normal(count)))


def test_rounds_alternate_their_order_and_pair_their_samples() -> None:
    calls: list[str] = []

    def runner(name: str, each: float) -> timing.Runner:
        def run(count: int) -> float:
            calls.append(name)
            return each * count

        return run

    taken = interleave({"a": runner("a", 2.0), "b": runner("b", 1.0)}, {"a": 3, "b": 7}, samples=4)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert taken == {"a": [2.0] * 4, "b": [1.0] * 4}


def test_a_sample_is_long_enough_to_hide_the_launch() -> None:
    assert warm(lambda count: 0.004 * count, seconds=0) == 500
    assert warm(lambda count: 5.0 * count, seconds=0) == 1


def test_good_samples_have_no_mark() -> None:
    assert judge({"automatic": steady(), "fused": steady(0.38)}, STEADY, STEADY) == []
    assert judge({"automatic": steady()}, Clocks(None, None, None), Clocks(None, None, None)) == []


def test_a_clock_that_moved_is_marked() -> None:
    (mark,) = judge({"a": steady()}, STEADY, Clocks(1755, 3201, 80))
    assert mark == "SM clock moved from 1980 to 1755 MHz while measuring"


def test_an_interval_too_wide_is_marked() -> None:
    noisy = list(np.random.default_rng(1).choice([0.3, 0.6], size=200))
    (mark,) = judge({"a": noisy}, STEADY, STEADY)
    assert mark.startswith("a: interval too wide")


def test_a_time_that_is_none_is_marked() -> None:
    assert judge({"a": [0.4, 0.0, 0.4]}, STEADY, STEADY) == ["a: a sample is not a positive time"]


def test_a_warm_cache_is_marked() -> None:
    assert bandwidth_mark(2e9, 1.0, 4800) is None
    assert bandwidth_mark(6e9, 1.0, 4800) == "6000 GB/s is above the memory's 4800 GB/s: a warm cache was timed"


def test_a_failed_enqueue_is_never_a_sample() -> None:
    runs: Iterator[int] = itertools.count()

    def failing(count: int) -> float:
        if next(runs) == 3:
            raise EngineFault("fused: enqueue failed: error 2")
        return 0.0036 * count  # what a failing launch would be read as

    with pytest.raises(EngineFault, match="enqueue failed"):
        interleave({"automatic": lambda n: 0.4 * n, "fused": failing}, {"automatic": 1, "fused": 1}, samples=10)


class Nvml:
    """A driver that lists these processes on the GPU."""

    def __init__(self, *pids: int) -> None:
        self.pids = pids

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[object]:
        return [type("Process", (), {"pid": pid})() for pid in self.pids]


@pytest.mark.parametrize(
    ("pids", "marked"),
    [((), False), ((77,), False), ((1,), False), ((1, 77), True), ((77, 78), True)],
    ids=["none", "itself under another number", "itself", "itself and another", "two"],
)
def test_another_process_on_the_gpu_is_marked(monkeypatch: pytest.MonkeyPatch, pids: tuple[int, ...], marked: bool) -> None:
    monkeypatch.setattr(timing, "_nvml", lambda: (Nvml(*pids), None))
    monkeypatch.setattr(timing.os, "getpid", lambda: 1)
    assert bool(timing.others_on_gpu()) is marked
