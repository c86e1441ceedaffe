"""What the looks at the GPU have against the figures, with a management library that plays the fault."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from onnxfuse.bench import watch
from onnxfuse.bench.watch import Clocks, Watch, clock_marks

ME = os.getpid()


class Nvml:
    """NVML at rest: 1980 MHz, nothing held down, this process alone. Each reading may be a list, told one after the other."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, **told: Any) -> None:
        self.told = {"sm": 1980, "memory": 3201, "temperature": 50, "reasons": 0, "pids": [[ME]], "used": [], "busy": 0, **told}

    def _next(self, what: str) -> Any:
        value = self.told[what]
        if isinstance(value, list):
            value = value.pop(0) if len(value) > 1 else value[0]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlDeviceGetClockInfo(self, handle: object, which: int) -> int:
        return int(self._next("sm" if which == self.NVML_CLOCK_SM else "memory"))

    def nvmlDeviceGetTemperature(self, handle: object, which: int) -> int:
        return int(self._next("temperature"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: object) -> int:
        return int(self._next("reasons"))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self._next("pids")]

    def nvmlDeviceGetProcessUtilization(self, handle: object, since: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, smUtil=80, timeStamp=since + late) for pid, late in self.told["used"]]

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any:
        return SimpleNamespace(gpu=self._next("busy"))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`watched(free=[...], sm=[...])`: a watch that looked thrice, with what NVML and CUDA told it."""

    def make(free: Sequence[int] = (100_000,), looks: int = 3, **told: Any) -> Watch:
        left = list(free)
        told.setdefault("pids", [[ME]])
        monkeypatch.setattr(watch, "_nvml", lambda: (Nvml(**told), None))
        monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
        driver = SimpleNamespace(mem_get_info=lambda: ((left.pop(0) if len(left) > 1 else left[0]) << 20, 140_000 << 20))
        monkeypatch.setattr(watch.trt, "cuda", lambda: driver)
        made = Watch()
        made.look_idle()
        for _ in range(looks):
            made.look()
        made.look_idle()
        return made

    return make


def test_a_quiet_gpu_has_no_mark(watched: Any) -> None:
    quiet = watched()
    assert (quiet.marks(), quiet.notes()) == ([], [])


@pytest.mark.parametrize(
    ("sm", "mark"),
    [
        ([1980, 1980, 1755], "SM clock moved from 1980 to 1755 MHz while measuring"),
        ([1980, 1410, 1980], "SM clock moved from 1980 to 1410 MHz while measuring"),
        ([345, 1980, 1980], "SM clock moved from 345 to 1980 MHz while measuring"),
    ],
    ids=["at the end", "between and back", "not warmed up"],
)
def test_a_clock_that_moved_is_marked(watched: Any, sm: list[int], mark: str) -> None:
    assert watched(sm=sm).marks() == [mark]


def test_a_memory_clock_that_moved_is_marked() -> None:
    assert clock_marks([Clocks(1980, 3201, 50), Clocks(1980, 2619, 50)]) == ["memory clock moved from 3201 to 2619 MHz while measuring"]


def test_a_clock_within_its_tolerance_is_none() -> None:
    assert clock_marks([Clocks(1980, 3201, 50), Clocks(1935, 3201, 60), Clocks(1980, None, None)]) == []


@pytest.mark.parametrize(
    ("bit", "word"), [(0x04, "power limit"), (0x08, "hardware"), (0x20, "software thermal"), (0x40, "hardware thermal"), (0x80, "brake")]
)
def test_throttling_is_marked_also_where_no_clock_was_seen_to_move(watched: Any, bit: int, word: str) -> None:
    (mark,) = watched(reasons=[0, bit, 0]).marks()
    assert word in mark
    assert mark.endswith("at 1 of 3 looks")


@pytest.mark.parametrize("bit", [0x01, 0x02, 0x10, 0x100], ids=["idle", "application clocks", "sync boost", "display"])
def test_what_is_set_on_purpose_is_no_throttling(watched: Any, bit: int) -> None:
    assert watched(reasons=bit).marks() == []


def test_an_older_driver_tells_throttling_by_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x40)
    assert watch.throttles(old, None) == (watch.THROTTLES[0x40],)


@pytest.mark.parametrize(
    ("pids", "marked"),
    [
        ([[ME]], False),
        ([[77]], False),
        ([[ME, 77]], True),
        ([[77, 78]], True),
        ([[ME], [ME], [ME, 77]], True),
        ([[ME], [ME, 77], [ME]], True),
        ([[77], [77], [78]], True),
    ],
    ids=[
        "itself",
        "itself under another number",
        "another",
        "two others",
        "one that came",
        "one that came and went",
        "under other numbers",
    ],
)
def test_another_process_is_marked(watched: Any, pids: list[list[int]], marked: bool) -> None:
    marks = watched(pids=pids).marks()
    assert bool(marks) is marked
    assert all("another process is on the GPU" in mark for mark in marks)


def test_a_process_that_came_and_went_between_two_looks_is_marked(watched: Any) -> None:
    assert watched(used=[(ME, 5), (77, 9)]).marks() == ["another process is on the GPU (77)"]


def test_a_process_that_ended_before_is_none(watched: Any) -> None:
    assert watched(used=[(ME, 5), (77, -1), (0, 5)]).marks() == []


def test_a_process_whose_number_is_hidden_is_marked_by_the_memory_it_takes(watched: Any) -> None:
    assert watched(free=[100_000, 99_400, 99_400]).marks() == [
        "free GPU memory moved by 600 MiB while this process took and gave back none: another process came or went"
    ]


def test_memory_that_this_process_takes_itself_is_no_other_process(watched: Any) -> None:
    made = watched(free=[100_000, 100_000, 100_000, 60_000])
    made.moved()
    made.look()
    assert made.marks() == []


def test_where_the_driver_lists_nobody_a_busy_gpu_is_marked(watched: Any) -> None:
    (mark,) = watched(pids=[[]], busy=[0, 87]).marks()
    assert mark == "another process is on the GPU: it was 87 % busy while nothing of this process ran"
    assert watched(pids=[[]], busy=0).marks() == []


def test_where_nothing_tells_of_other_processes_that_is_marked(watched: Any) -> None:
    (mark,) = watched(pids=[[]], busy=RuntimeError("not supported")).marks()
    assert mark.startswith("other processes cannot be seen")


def test_no_idle_time_is_spent_where_processes_are_listed(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watched()
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: pytest.fail("slept"))
    made.look_idle()


def test_without_nvml_the_figures_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_nvml", lambda: (None, None))
    monkeypatch.setattr(watch.trt, "cuda", lambda: SimpleNamespace(mem_get_info=lambda: (1 << 30, 1 << 31)))
    made = Watch()
    made.look_idle()
    made.look()
    (mark,) = made.marks()
    assert "NVML is missing" in mark


def test_what_a_driver_does_not_tell_is_said(watched: Any) -> None:
    refused = RuntimeError("not supported")
    made = watched(sm=refused, memory=refused, temperature=refused, reasons=refused, pids=refused)
    assert made.looks[0].clocks == Clocks(None, None, None)
    assert made.notes() == ["the driver does not tell the SM clock", "the driver does not tell the processes on the GPU"]
