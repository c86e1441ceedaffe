"""Timing engines against each other: CUDA graph replay, events, warm-up, interleaved, with marks on what cannot be trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfuse.bench import data
from onnxfuse.bench.stats import Interval, bootstrap_median, bootstrap_ratio
from onnxfuse.bench.watch import Clocks, Watch
from onnxfuse.engine import trt
from onnxfuse.engine.run import Array, Engine, cast_feeds
from onnxfuse.engine.trt import EngineFault

WARM_UP_SECONDS = 0.5
SAMPLE_MS = 2.0
"""A sample times as many back-to-back replays as take this long: single short ones would time the launch."""
WIDTH_LIMIT = 0.03
"""Widest interval of one placement, relative to its median, that says something where there is no other placement."""
RATIO_WIDTH_LIMIT = 0.05
"""Widest interval of a ratio over all placements, relative to its median: beyond that, a draw means that nothing was measured."""
PLACEMENTS = 8
"""How often engines are loaded anew where their speed is compared."""
PLACED_WARM_UP_SECONDS = 0.2
LOOKS = 4
"""How often the GPU is looked at among the samples of one placement, besides before and after."""

Runner = Callable[[int], float]
"""Runs a thing so many times, back to back, and answers the milliseconds of all together."""


@dataclass(frozen=True)
class Timings:
    """What was measured, and what speaks against it."""

    samples: dict[str, list[float]]
    """Milliseconds of one run, by engine; samples of the same index were taken next to each other."""
    replays: dict[str, int]
    """Runs that one sample averages over."""
    captured: dict[str, bool]
    """Whether a CUDA graph was replayed; False is plain enqueue, which launches kernel by kernel."""
    before: Clocks
    after: Clocks
    marks: tuple[str, ...]
    """Reasons not to trust the figures, one line each; empty is good."""
    placements: int = 1
    """Into how many equal parts, each of another placement of the engines in memory, the samples fall."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, or differs without doing harm, one line each."""

    def median(self, name: str) -> Interval:
        """Milliseconds of one run."""
        return bootstrap_median(self.samples[name], placements=self.placements)

    def ratio(self, automatic: str, fused: str) -> Interval:
        """Time of `automatic` over time of `fused`: above 1, `fused` is faster."""
        return bootstrap_ratio(self.samples[automatic], self.samples[fused], placements=self.placements)

    def by_placement(self, name: str) -> list[float]:
        """The median of each placement, in milliseconds."""
        return [float(part) for part in np.median(np.reshape(self.samples[name], (self.placements, -1)), axis=1)]


def time_placed(
    load: Mapping[str, Callable[[], Engine]],
    feeds: Mapping[str, Array],
    samples: int = 200,
    placements: int = PLACEMENTS,
    warm_up: float = PLACED_WARM_UP_SECONDS,
) -> Timings:
    """As `time_engines`, with the engines loaded anew `placements` times, each time elsewhere in memory and in another order.

    One engine file runs up to 7 % faster or slower from one loading to the next (bert-base on an H200), longer than any interval of
    the samples of one loading: where weights and activations lie decides what the caches and memory channels make of them.
    """
    each = -(-max(samples, 2 * placements) // placements)
    driver = trt.activate()
    rng = np.random.default_rng(0)
    parts: list[Timings] = []
    names = list(load)
    watch = Watch()
    watch.look_idle()
    for _ in range(placements):
        with contextlib.ExitStack() as stack:
            spacer = driver.mem_alloc(int(rng.integers(1, 256)) << 20)  # moves what is loaded after it
            stack.callback(spacer.free)
            engines = {name: stack.enter_context(load[name]()) for name in names}
            parts.append(_time({name: engines[name] for name in load}, feeds, each, warm_up, watch))
        names = [*names[1:], names[0]]
    watch.look_idle()
    return _judged(joined(parts), watch)


def joined(parts: Sequence[Timings]) -> Timings:
    """The samples of several placements as one; marks and notes are those of any, and of the ratios over all.

    A placement is one observation. How far its samples lie apart is in the interval over all placements, and no mark of its own: 100 steps
    that TensorRT unrolls differ by 5 % from one replay to the next, and are seven times as slow as one kernel all the same.
    """
    whole = Timings(
        samples={name: [sample for part in parts for sample in part.samples[name]] for name in parts[0].samples},
        replays=parts[0].replays,
        captured={name: all(part.captured[name] for part in parts) for name in parts[0].captured},
        before=parts[0].before,
        after=parts[-1].after,
        marks=tuple(dict.fromkeys(mark for part in parts for mark in part.marks)),
        placements=len(parts),
        notes=tuple(dict.fromkeys([*(note for part in parts for note in part.notes), *_restless(parts)])),
    )
    first, *others = whole.samples
    widths = {name: whole.ratio(first, name).width for name in others}
    wide = [
        f"{first} over {name}: interval too wide, {100 * width:.1f} % of the ratio (limit {100 * RATIO_WIDTH_LIMIT:.0f} %)"
        for name, width in widths.items()
        if width > RATIO_WIDTH_LIMIT
    ]
    return dataclasses.replace(whole, marks=(*whole.marks, *wide))


def _restless(parts: Sequence[Timings]) -> Iterator[str]:
    """A note on each engine of which single placements would have a mark."""
    wide = [name for part in parts for name in part.samples if _width(part.samples[name]) > WIDTH_LIMIT]
    for name in dict.fromkeys(wide):
        yield f"{name}: interval above {WIDTH_LIMIT:.0%} of the median within {wide.count(name)} of {len(parts)} placements"


def time_engines(
    engines: Mapping[str, Engine], feeds: Mapping[str, Array], samples: int = 200, warm_up: float = WARM_UP_SECONDS
) -> Timings:
    """Times `engines` on the same `feeds` (floating-point feeds are converted to the type that each engine takes).

    Each round takes one sample of every engine, in an order that turns round from round to round, so that a drift of
    the clocks falls on all alike. The result of each engine is fetched once before, so that a failing kernel raises
    EngineFault and is never timed; so does a sample that is no time.
    """
    trt.activate()
    watch = Watch()
    watch.look_idle()
    timings = _time(engines, feeds, samples, warm_up, watch)
    watch.look_idle()
    return _judged(dataclasses.replace(timings, marks=(*timings.marks, *judge(timings.samples))), watch)


def _time(engines: Mapping[str, Engine], feeds: Mapping[str, Array], samples: int, warm_up: float, watch: Watch) -> Timings:
    """The samples of one placement, and what they themselves give reason to mark; what `watch` saw is not judged yet."""
    if samples < 2:
        raise ValueError("at least 2 samples are needed")
    driver = trt.activate()
    stream = driver.Stream()
    captured: dict[str, bool] = {}
    found = _Findings(data.feed_marks(feeds))
    first: dict[str, dict[str, Array]] = {}
    runners: dict[str, Runner] = {}
    with contextlib.ExitStack() as stack:
        for name, engine in engines.items():
            given = cast_feeds(engine.inputs, feeds)
            untimed = engine.run(given)
            found.marks += data.output_marks(name, untimed)
            launch, why_not = stack.enter_context(_launcher(engine, stream))
            captured[name] = why_not is None
            if why_not is not None:
                found.marks.append(f"{name}: no CUDA graph, timed by plain enqueue ({why_not})")
            first[name] = _launched(engine, given, launch, stream)
            found.compare(f"{name}: what is timed gives other outputs than a run", untimed, first[name])
            runners[name] = _runner(driver, stream, launch, name)
        replays = {name: warm(runner, warm_up) for name, runner in runners.items()}
        watch.moved()
        before = watch.look().clocks
        taken = interleave(runners, replays, samples, watch.look)
        after = watch.look().clocks
        watch.moved()
        stream.synchronize()
        for name, engine in engines.items():
            found.compare(f"{name}: the last run gave other outputs than the first", first[name], engine.outputs())
    return Timings(taken, replays, captured, before, after, tuple(found.marks), notes=tuple(found.notes))


class _Findings:
    """Marks and notes as they come up."""

    def __init__(self, marks: list[str]) -> None:
        self.marks = marks
        self.notes: list[str] = []

    def compare(self, what: str, then: Mapping[str, Array], now: Mapping[str, Array]) -> None:
        """A mark where outputs changed by more than sums in another order do, a note where they changed at all."""
        changed = data.change(then, now)
        if changed is None:
            return
        output, size = changed
        harmless = size <= data.CHANGE_TOLERANCE
        (self.notes if harmless else self.marks).append(f"{what} ({output}, by {size:.2g} of its largest value)")


def _judged(timings: Timings, watch: Watch) -> Timings:
    return dataclasses.replace(timings, marks=(*timings.marks, *watch.marks()), notes=(*timings.notes, *watch.notes()))


def _launched(engine: Engine, feeds: Mapping[str, Array], launch: Callable[[], None], stream: Any) -> dict[str, Array]:
    """What one `launch` itself computes: the engine ran on other data before, and its outputs are filled with NaN.

    A CUDA graph that misses a kernel (a plugin that launches on a stream of its own, say) takes less time, and would leave the
    right results of the run before in place.
    """
    engine.run(data.scrambled(feeds, engine.inputs))
    engine.bind(feeds)
    engine.poison()
    with trt.watching(engine.name):
        launch()
        stream.synchronize()
    return engine.outputs()


def warm(runner: Runner, seconds: float) -> int:
    """Runs for so long that the clocks settle; returns how many runs make a sample of SAMPLE_MS."""
    count, spent, end = 1, 0.0, time.monotonic() + seconds
    while True:
        spent = runner(count)
        each = spent / count
        if time.monotonic() >= end:
            return max(1, math.ceil(SAMPLE_MS / max(each, 1e-6)))
        count = max(1, min(1000, math.ceil(10.0 / max(each, 1e-3))))


def interleave(
    runners: Mapping[str, Runner], replays: Mapping[str, int], samples: int, look: Callable[[], object] | None = None
) -> dict[str, list[float]]:
    """`samples` rounds; in each, one sample (milliseconds of one run) of every runner, in alternating order.

    Calls `look` LOOKS times between rounds. EngineFault for a sample that is not a positive time.
    """
    taken: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    each = max(1, samples // (LOOKS + 1))
    for index in range(samples):
        if look is not None and index and index % each == 0:
            look()
        for name in names:
            sample = runners[name](replays[name]) / replays[name]
            if not math.isfinite(sample) or sample <= 0:
                raise EngineFault(f"{name}: a run is said to have taken {sample} ms, which is no time; nothing was measured")
            taken[name].append(sample)
        names.reverse()
    return taken


def judge(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Marks that the samples of one placement themselves give reason for."""
    widths = {name: _width(values) for name, values in samples.items()}
    return [
        f"{name}: interval too wide, {100 * width:.1f} % of the median (limit {100 * WIDTH_LIMIT:.0f} %)"
        for name, width in widths.items()
        if width > WIDTH_LIMIT
    ]


def _width(samples: Sequence[float]) -> float:
    """Of the interval of the median of one placement, relative to it."""
    return bootstrap_median(samples).width


def bandwidth_mark(moved_bytes: float, milliseconds: float, memory_gbps: float) -> str | None:
    """A mark where a time would need more bandwidth than the card's memory has: the data came from a cache."""
    reached = moved_bytes / milliseconds / 1e6
    if reached <= memory_gbps:
        return None
    return f"{reached:.0f} GB/s is above the memory's {memory_gbps:.0f} GB/s: a warm cache was timed"


def _runner(driver: Any, stream: Any, launch: Callable[[], None], name: str) -> Runner:
    start, end = driver.Event(), driver.Event()

    def run(count: int) -> float:
        with trt.watching(name):
            start.record(stream)
            for _ in range(count):
                launch()
            end.record(stream)
            end.synchronize()
            return float(start.time_till(end))

    return run


@contextlib.contextmanager
def _launcher(engine: Engine, stream: Any) -> Iterator[tuple[Callable[[], None], str | None]]:
    """(launch, None) that replays a CUDA graph of one run, or (launch, reason) that enqueues where none could be captured."""
    handle = int(stream.handle)
    engine.enqueue(handle)  # TensorRT sets things up in the first run on a shape, which must not be captured
    stream.synchronize()
    cuda = trt.graphs()
    if cuda is None:
        yield (lambda: engine.enqueue(handle)), "cuda-bindings is not installed"
        return
    if not engine.capturable:
        yield (lambda: engine.enqueue(handle)), "the size of an output is known only after a run"
        return
    graph, reason = _capture(cuda, engine, handle)
    if graph is None:
        stream.synchronize()
        engine.enqueue(handle)
        stream.synchronize()
        yield (lambda: engine.enqueue(handle)), reason
        return

    launched_on = cuda.CUstream(handle)

    def replay() -> None:
        (status,) = cuda.cuGraphLaunch(graph, launched_on)
        _expect(cuda, status, f"{engine.name}: graph launch")

    try:
        replay()
        stream.synchronize()
        yield replay, None
    finally:
        cuda.cuGraphExecDestroy(graph)


def _capture(cuda: Any, engine: Engine, handle: int) -> tuple[Any, str]:
    """(executable graph, "") of one run, or (None, reason)."""
    stream = cuda.CUstream(handle)
    (status,) = cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    if int(status):
        return None, f"capture cannot begin: {_name(cuda, status)}"
    fault = ""
    try:
        with trt.watching(engine.name):  # what a capture does not allow may also come as CUDA's own error
            engine.enqueue(handle)
    except EngineFault as error:
        fault = str(error)
    status, graph = cuda.cuStreamEndCapture(stream)
    if int(status) or fault:
        if not int(status):
            cuda.cuGraphDestroy(graph)
        return None, fault or f"capture failed: {_name(cuda, status)}"
    status, executable = cuda.cuGraphInstantiate(graph, 0)
    cuda.cuGraphDestroy(graph)
    if int(status):
        return None, f"the graph cannot be instantiated: {_name(cuda, status)}"
    return executable, ""


def _expect(cuda: Any, status: Any, what: str) -> None:
    if int(status):
        raise EngineFault(f"{what}: {_name(cuda, status)}")


def _name(cuda: Any, status: Any) -> str:
    return str(getattr(status, "name", status))
