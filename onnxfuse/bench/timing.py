"""Timing engines against each other: CUDA graph replay, events, warm-up, interleaved, with marks on what cannot be trusted."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfuse.bench.stats import Interval, bootstrap_median, bootstrap_ratio
from onnxfuse.engine import trt
from onnxfuse.engine.run import Array, Engine, cast_feeds
from onnxfuse.engine.trt import EngineFault

WARM_UP_SECONDS = 0.5
SAMPLE_MS = 2.0
"""A sample times as many back-to-back replays as take this long: single short ones would time the launch."""
CLOCK_TOLERANCE = 0.03
"""Largest relative change of the SM clock between the start and the end of the samples."""
WIDTH_LIMIT = 0.03
"""Widest interval of one placement, relative to its median, that still says something."""
PLACEMENTS = 8
"""How often engines are loaded anew where their speed is compared."""
PLACED_WARM_UP_SECONDS = 0.2

Runner = Callable[[int], float]
"""Runs a thing so many times, back to back, and answers the milliseconds of all together."""


@dataclass(frozen=True)
class Clocks:
    """SM and memory clock in MHz and temperature in degrees Celsius; None where the driver does not say."""

    sm: int | None
    memory: int | None
    temperature: int | None


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
    for _ in range(placements):
        with contextlib.ExitStack() as stack:
            spacer = driver.mem_alloc(int(rng.integers(1, 256)) << 20)  # moves what is loaded after it
            stack.callback(spacer.free)
            engines = {name: stack.enter_context(load[name]()) for name in names}
            parts.append(time_engines({name: engines[name] for name in load}, feeds, each, warm_up))
        names = [*names[1:], names[0]]
    return joined(parts)


def joined(parts: Sequence[Timings]) -> Timings:
    """The samples of several placements as one; marks are those of any."""
    return Timings(
        samples={name: [sample for part in parts for sample in part.samples[name]] for name in parts[0].samples},
        replays=parts[0].replays,
        captured={name: all(part.captured[name] for part in parts) for name in parts[0].captured},
        before=parts[0].before,
        after=parts[-1].after,
        marks=tuple(dict.fromkeys(mark for part in parts for mark in part.marks)),
        placements=len(parts),
    )


def time_engines(
    engines: Mapping[str, Engine], feeds: Mapping[str, Array], samples: int = 200, warm_up: float = WARM_UP_SECONDS
) -> Timings:
    """Times `engines` on the same `feeds` (floating-point feeds are converted to the type that each engine takes).

    Each round takes one sample of every engine, in an order that turns round from round to round, so that a drift of
    the clocks falls on all alike. The result of each engine is fetched once before, so that a failing kernel raises
    EngineFault and is never timed.
    """
    if samples < 2:
        raise ValueError("at least 2 samples are needed")
    driver = trt.activate()
    stream = driver.Stream()
    captured: dict[str, bool] = {}
    notes: list[str] = []
    runners: dict[str, Runner] = {}
    with contextlib.ExitStack() as stack:
        for name, engine in engines.items():
            engine.run(cast_feeds(engine.inputs, feeds))
            launch, why_not = stack.enter_context(_launcher(engine, stream))
            captured[name] = why_not is None
            if why_not is not None:
                notes.append(f"{name}: no CUDA graph, timed by plain enqueue ({why_not})")
            runners[name] = _runner(driver, stream, launch, name)
        replays = {name: warm(runner, warm_up) for name, runner in runners.items()}
        before = read_clocks()
        taken = interleave(runners, replays, samples)
        after = read_clocks()
        stream.synchronize()
    marks = notes + judge(taken, before, after) + others_on_gpu()
    return Timings(taken, replays, captured, before, after, tuple(marks))


def warm(runner: Runner, seconds: float) -> int:
    """Runs for so long that the clocks settle; returns how many runs make a sample of SAMPLE_MS."""
    count, spent, end = 1, 0.0, time.monotonic() + seconds
    while True:
        spent = runner(count)
        each = spent / count
        if time.monotonic() >= end:
            return max(1, math.ceil(SAMPLE_MS / max(each, 1e-6)))
        count = max(1, min(1000, math.ceil(10.0 / max(each, 1e-3))))


def interleave(runners: Mapping[str, Runner], replays: Mapping[str, int], samples: int) -> dict[str, list[float]]:
    """`samples` rounds; in each, one sample (milliseconds of one run) of every runner, in alternating order."""
    taken: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for _ in range(samples):
        for name in names:
            taken[name].append(runners[name](replays[name]) / replays[name])
        names.reverse()
    return taken


def judge(samples: Mapping[str, Sequence[float]], before: Clocks, after: Clocks) -> list[str]:
    """Marks that the samples and clocks themselves give reason for."""
    marks = []
    for name, values in samples.items():
        if any(not math.isfinite(v) or v <= 0 for v in values):
            marks.append(f"{name}: a sample is not a positive time")
            continue
        width = bootstrap_median(values).width
        if width > WIDTH_LIMIT:
            marks.append(f"{name}: interval too wide, {100 * width:.1f} % of the median (limit {100 * WIDTH_LIMIT:.0f} %)")
    for what, then, now in (("SM", before.sm, after.sm), ("memory", before.memory, after.memory)):
        if then and now and abs(now - then) / then > CLOCK_TOLERANCE:
            marks.append(f"{what} clock moved from {then} to {now} MHz while measuring")
    return marks


def bandwidth_mark(moved_bytes: float, milliseconds: float, memory_gbps: float) -> str | None:
    """A mark where a time would need more bandwidth than the card's memory has: the data came from a cache."""
    reached = moved_bytes / milliseconds / 1e6
    if reached <= memory_gbps:
        return None
    return f"{reached:.0f} GB/s is above the memory's {memory_gbps:.0f} GB/s: a warm cache was timed"


def read_clocks() -> Clocks:
    """The clocks now, of the first GPU that this process sees."""
    nvml, handle = _nvml()
    if nvml is None:
        return Clocks(None, None, None)

    def ask(question: Callable[[], int]) -> int | None:
        try:
            return int(question())
        except Exception:
            return None

    return Clocks(
        ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    )


def others_on_gpu() -> list[str]:
    """A mark where another process computes on the same GPU."""
    nvml, handle = _nvml()
    if nvml is None:
        return []
    try:
        pids = {int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except Exception:
        return []
    # In a container the driver may number this very process otherwise: one process, whatever its number, is this one.
    others = pids - {os.getpid()} if os.getpid() in pids else (pids if len(pids) > 1 else set())
    return [f"another process is on the GPU ({', '.join(map(str, sorted(others)))})"] if others else []


def _nvml() -> tuple[Any, Any]:
    """(pynvml, handle of the GPU that CUDA calls device 0), or (None, None)."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        bus = trt.cuda().Device(0).pci_bus_id()
        try:
            return nvml, nvml.nvmlDeviceGetHandleByPciBusId(bus)
        except nvml.NVMLError:
            return nvml, nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:
        return None, None


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
