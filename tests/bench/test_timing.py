"""The timing loop and its marks, with planted faults; nothing here is timed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxfuse.bench import timing
from onnxfuse.bench.timing import Clocks, Timings, bandwidth_mark, interleave, joined, judge, time_engines, time_placed, warm
from onnxfuse.engine.trt import EngineFault, TensorSpec

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
    assert judge({"automatic": steady(), "fused": steady(0.38)}) == []


def test_an_interval_too_wide_is_marked() -> None:
    noisy = list(np.random.default_rng(1).choice([0.3, 0.6], size=200))
    (mark,) = judge({"a": noisy})
    assert mark.startswith("a: interval too wide")


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf")])
def test_a_sample_that_is_no_time_is_refused(time: float) -> None:
    with pytest.raises(EngineFault, match=r"fused: a run is said to have taken .* which is no time"):
        interleave({"automatic": lambda n: 0.4 * n, "fused": lambda n: time * n}, {"automatic": 1, "fused": 1}, samples=10)


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


def test_the_gpu_is_looked_at_between_the_samples() -> None:
    looks: list[int] = []
    runs: list[int] = []
    interleave({"a": lambda n: float(len(runs)) + 1.0 if runs.append(n) is None else 0.0}, {"a": 1}, 25, lambda: looks.append(len(runs)))
    assert looks == [5, 10, 15, 20]


def part(ratio: float, marks: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Timings:
    samples = {"automatic": steady(0.4, 25), "fused": [0.4 / ratio] * 25}
    return Timings(samples, {"automatic": 5, "fused": 5}, {"automatic": True, "fused": True}, STEADY, STEADY, marks, notes=notes)


def test_placements_that_agree_have_no_mark() -> None:
    assert joined([part(1.05)] * 8).marks == ()


def test_a_ratio_that_placements_dispute_is_marked() -> None:
    (mark,) = joined([part(0.9), part(1.1)] * 4).marks
    assert mark.startswith("automatic over fused: interval too wide")


def test_samples_that_spread_within_placements_do_not_hide_what_all_placements_agree_on() -> None:
    spread = [1.10, 1.22] * 12
    samples = {"automatic": spread, "fused": [sample / 7 for sample in spread]}
    placed = [Timings(samples, {}, {}, STEADY, STEADY, ())] * 8
    assert judge(samples) != []
    whole = joined(placed)
    assert whole.marks == ()
    assert whole.notes[0] == "automatic: interval above 3% of the median within 8 of 8 placements"
    assert whole.ratio("automatic", "fused").low > 6.9


def test_marks_and_notes_of_any_placement_stay() -> None:
    whole = joined([part(1.0), part(1.0, ("m",), ("n",)), part(1.0, ("m",))])
    assert (whole.marks, whole.notes) == (("m",), ("n",))


class Fake:
    """An engine that doubles its input in two kernels, with a fault; and the driver that runs it, in a time told by the engine."""

    inputs = (TensorSpec("x", "float32", (4,), True, False),)
    capturable = True

    def __init__(self, name: str = "fused", fault: str = "", milliseconds: float = 0.4) -> None:
        self.name, self.fault, self.milliseconds = name, fault, milliseconds
        self.activation = self.output = np.zeros(4, np.float32)
        self.runs = 0

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *ended: object) -> None:
        pass

    def bind(self, feeds: Mapping[str, Any]) -> None:
        self.x = feeds["x"].copy()

    def first_kernel(self) -> None:
        self.activation = self.x + self.x

    def second_kernel(self) -> None:
        self.runs += 1
        if self.fault == "enqueue":
            raise EngineFault(f"{self.name}: enqueue failed: error 2")
        noise = {"race": 0.5, "order of sums": 1e-4}.get(self.fault, 0.0) if self.runs > 40 else 0.0
        self.output = self.activation + np.float32(noise)
        if self.fault == "NaN":
            self.output = self.output * np.float32(np.nan)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        self.bind(feeds)
        self.first_kernel()
        self.second_kernel()
        return self.outputs()

    def replay(self) -> None:
        """What the captured graph launches."""
        if self.fault == "empty graph":
            return
        if self.fault != "missing kernel":
            self.first_kernel()
        self.second_kernel()

    def outputs(self) -> dict[str, Any]:
        return {"y": self.output.copy()}

    def poison(self) -> None:
        self.output = np.full(4, np.nan, np.float32)


class QuietWatch:
    def look(self) -> Any:
        return SimpleNamespace(clocks=STEADY)

    def moved(self) -> None:
        pass

    def look_idle(self) -> None:
        pass

    def marks(self) -> list[str]:
        return []

    def notes(self) -> list[str]:
        return []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces CUDA by the fake: a graph is `replay`, and a run takes the milliseconds that the engine tells."""

    @contextlib.contextmanager
    def launcher(engine: Fake, stream: object) -> Iterator[tuple[Callable[[], None], str | None]]:
        if engine.fault == "no graph":
            yield lambda: engine.run({"x": engine.x}), "capture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        else:
            yield engine.replay, None

    def runner(driver: object, stream: object, launch: Callable[[], None], name: str) -> timing.Runner:
        level = {"automatic": 0.4, "fused": 0.3}[name]

        def run(count: int) -> float:
            for _ in range(count):
                launch()
            return level * count

        return run

    memory = SimpleNamespace(free=lambda: None)
    stream = SimpleNamespace(synchronize=lambda: None, handle=0)
    cuda = SimpleNamespace(Stream=lambda: stream, mem_alloc=lambda size: memory)
    monkeypatch.setattr(timing.trt, "activate", lambda: cuda)
    monkeypatch.setattr(timing.trt, "watching", lambda what: contextlib.nullcontext())
    monkeypatch.setattr(timing, "Watch", QuietWatch)
    monkeypatch.setattr(timing, "_launcher", launcher)
    monkeypatch.setattr(timing, "_runner", runner)


FEEDS = {"x": np.array([1.0, 2.0, 3.0, 4.0], np.float32)}


def timed(fault: str, feeds: Mapping[str, Any] = FEEDS) -> Timings:
    engines: Any = {"automatic": Fake("automatic"), "fused": Fake("fused", fault)}
    return time_engines(engines, feeds, samples=10, warm_up=0)


def test_a_sound_engine_has_no_mark(driver: None) -> None:
    timings = timed("")
    assert (timings.marks, timings.notes) == ((), ())
    assert timings.ratio("automatic", "fused").median == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("fault", "mark"),
    [
        ("empty graph", "fused: what is timed gives other outputs than a run (y, by inf of its largest value)"),
        ("missing kernel", "fused: what is timed gives other outputs than a run (y, by 0.75 of its largest value)"),
        ("race", "fused: the last run gave other outputs than the first (y, by 0.062 of its largest value)"),
        ("no graph", "fused: no CUDA graph, timed by plain enqueue (capture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)"),
        ("NaN", "fused: output y holds no finite number"),
    ],
)
def test_an_engine_that_does_not_do_its_work_is_marked(driver: None, fault: str, mark: str) -> None:
    assert timed(fault).marks == (mark,)


def test_sums_in_another_order_are_a_note(driver: None) -> None:
    timings = timed("order of sums")
    assert timings.marks == ()
    assert timings.notes == ("fused: the last run gave other outputs than the first (y, by 1.3e-05 of its largest value)",)


def test_an_engine_whose_enqueue_fails_is_not_timed(driver: None) -> None:
    with pytest.raises(EngineFault, match="fused: enqueue failed"):
        timed("enqueue")


def test_inputs_of_one_value_are_marked(driver: None) -> None:
    (mark,) = timed("", {"x": np.zeros(4, np.float32)}).marks
    assert mark.startswith("no input varies")


def test_a_fault_of_one_placement_marks_all(driver: None) -> None:
    loads = itertools.count()
    fused: Any = lambda: Fake("fused", "missing kernel" if next(loads) == 2 else "")  # noqa: E731
    automatic: Any = lambda: Fake("automatic")  # noqa: E731
    timings = time_placed({"automatic": automatic, "fused": fused}, FEEDS, samples=16, placements=4, warm_up=0)
    assert timings.placements == 4
    assert len(timings.samples["fused"]) == 16
    assert len(timings.marks) == 1
    assert timings.marks[0].startswith("fused: what is timed gives other outputs than a run")
