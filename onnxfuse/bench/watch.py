"""What the GPU does while it is measured: clocks, what holds them down, and who else is on it.

Looks are taken before, during and after the samples; what they have against the figures comes out as marks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from onnxfuse.engine import trt

CLOCK_TOLERANCE = 0.03
"""Largest relative difference between any two readings of a clock."""
MEMORY_TOLERANCE_MIB = 128
"""A CUDA context of another process takes more; what a driver moves about in this one takes less."""
IDLE_SECONDS = 1.2
"""Utilization is a mean over up to a second: so long this process keeps the GPU idle before it asks."""

# Bits of nvmlClocksEventReasons that mean "slower than it could be" (nvml.h); idle and settings made on purpose are none.
THROTTLES = {
    0x04: "the power limit (software power cap)",
    0x08: "the hardware (slowdown: temperature, power or brake)",
    0x20: "the temperature (software thermal slowdown)",
    0x40: "the temperature (hardware thermal slowdown)",
    0x80: "the power supply (hardware power brake)",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Clocks:
    """SM and memory clock in MHz and temperature in degrees Celsius; None where the driver does not say."""

    sm: int | None
    memory: int | None
    temperature: int | None


@dataclass(frozen=True)
class Look:
    """One reading."""

    clocks: Clocks
    throttles: tuple[str, ...]
    """What holds the clocks down."""
    pids: frozenset[int] | None
    """Processes that compute on the GPU; None where the driver does not say. Empty: it hides even this one."""
    free_mib: int | None
    """Free GPU memory in MiB, whoever uses the rest."""
    stretch: int = 0
    """Looks of one stretch saw the same memory of this process."""


class Watch:
    """Looks at the GPU that CUDA calls device 0, and the marks that follow from them. A context must be current."""

    def __init__(self) -> None:
        self._nvml, self._handle = _nvml()
        self._since = time.time()
        self._stretch = 0
        self._idle: list[int | None] = []
        self.looks: list[Look] = []

    def look(self) -> Look:
        """Reads all; call it while nothing of this process runs on the GPU. A few milliseconds."""
        nvml, handle = self._nvml, self._handle
        look = Look(
            read_clocks(nvml, handle),
            throttles(nvml, handle),
            _pids(nvml, handle),
            _ask(lambda: int(trt.cuda().mem_get_info()[0]) >> 20),
            self._stretch,
        )
        self.looks.append(look)
        return look

    def moved(self) -> None:
        """This process is about to take or give back GPU memory: looks before and after are not compared in that."""
        self._stretch += 1

    def look_idle(self) -> None:
        """Where the driver hides processes: whether the GPU is busy while this process keeps it idle. Takes IDLE_SECONDS there."""
        if self._nvml is None or _pids(self._nvml, self._handle):
            return
        time.sleep(IDLE_SECONDS)
        self._idle.append(_ask(lambda: int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)))

    def marks(self) -> list[str]:
        """What the looks have against the figures; empty is good."""
        if self._nvml is None:
            return ["clocks, throttling and other processes are not known: NVML is missing (`pip install nvidia-ml-py`)"]
        found = [*clock_marks([look.clocks for look in self.looks]), *_throttle_marks(self.looks)]
        return [*found, *self._process_marks(), *_memory_marks(self.looks), *_idle_marks(self._idle)]

    def notes(self) -> list[str]:
        """What the driver does not tell, so that nothing can be held against the figures."""
        if self._nvml is None:
            return []
        silent: list[tuple[str, list[Any]]] = [
            ("the SM clock", [look.clocks.sm for look in self.looks]),
            ("the processes on the GPU", [look.pids for look in self.looks]),
        ]
        return [f"the driver does not tell {what}" for what, values in silent if values and all(value is None for value in values)]

    def _process_marks(self) -> list[str]:
        seen = {pid for look in self.looks for pid in look.pids or ()} | _busy(self._nvml, self._handle, self._since)
        return process_marks(seen)


def process_marks(pids: Iterable[int]) -> list[str]:
    """A mark where `pids`, seen on the GPU, are not this process alone."""
    seen = set(pids)
    # In a container the driver may number this very process otherwise: one process, whatever its number, is this one.
    others = seen - {os.getpid()} if os.getpid() in seen else (seen if len(seen) > 1 else set())
    return [f"another process is on the GPU ({', '.join(map(str, sorted(others)))})"] if others else []


def others_on_gpu() -> list[str]:
    """A mark where another process computes on the same GPU now."""
    nvml, handle = _nvml()
    return process_marks(_pids(nvml, handle) or ())


def clock_marks(clocks: Sequence[Clocks]) -> list[str]:
    """A mark for each clock of which two readings differ by more than CLOCK_TOLERANCE."""
    marks = []
    for what, read in (("SM", [c.sm for c in clocks]), ("memory", [c.memory for c in clocks])):
        known = [value for value in read if value]
        if not known:
            continue
        low, high = min(known), max(known)
        if high - low > CLOCK_TOLERANCE * high:
            then, now = (low, high) if known.index(low) < known.index(high) else (high, low)
            marks.append(f"{what} clock moved from {then} to {now} MHz while measuring")
    return marks


def read_clocks(nvml: Any, handle: Any) -> Clocks:
    if nvml is None:
        return Clocks(None, None, None)
    return Clocks(
        _ask(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        _ask(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
        _ask(lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
    )


def throttles(nvml: Any, handle: Any) -> tuple[str, ...]:
    """What holds the clocks down now; empty, too, where the driver does not say."""
    for question in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):  # the same, by age
        reasons = _ask(lambda: int(getattr(nvml, question)(handle)))  # noqa: B023  (asked at once)
        if reasons is not None:
            return tuple(text for bit, text in THROTTLES.items() if reasons & bit)
    return ()


def _throttle_marks(looks: Sequence[Look]) -> list[str]:
    counts = {text: sum(text in look.throttles for look in looks) for text in THROTTLES.values()}
    return [f"the clock was held down by {text} at {count} of {len(looks)} looks" for text, count in counts.items() if count]


def _memory_marks(looks: Sequence[Look]) -> list[str]:
    """A process whose number is hidden still takes memory."""
    largest = 0
    for stretch in {look.stretch for look in looks}:
        free = [look.free_mib for look in looks if look.stretch == stretch and look.free_mib is not None]
        largest = max(largest, max(free, default=0) - min(free, default=0))
    if largest <= MEMORY_TOLERANCE_MIB:
        return []
    return [f"free GPU memory moved by {largest} MiB while this process took and gave back none: another process came or went"]


def _idle_marks(idle: Sequence[int | None]) -> list[str]:
    if any(value is None for value in idle):
        return ["other processes cannot be seen: the driver lists none, not even this one, and tells no utilization"]
    busiest = max((value for value in idle if value is not None), default=0)
    return [f"another process is on the GPU: it was {busiest} % busy while nothing of this process ran"] if busiest else []


def _pids(nvml: Any, handle: Any) -> frozenset[int] | None:
    if nvml is None:
        return None
    return _ask(lambda: frozenset(int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)))


def _busy(nvml: Any, handle: Any, since: float) -> set[int]:
    """Processes that kept multiprocessors busy after `since` (seconds of the epoch), also those that came and went between two looks."""
    # A sample covers up to a second before its time, which may hold the end of a process that was there before.
    start = int((since + 1.0) * 1e6)
    samples = _ask(lambda: list(nvml.nvmlDeviceGetProcessUtilization(handle, start))) or []
    return {int(sample.pid) for sample in samples if sample.pid and sample.smUtil and sample.timeStamp > start}


def _ask(question: Callable[[], T]) -> T | None:
    """The answer, or None: every question may be one that this driver, GPU or binding does not know."""
    with contextlib.suppress(Exception):
        return question()
    return None


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
