"""The timing of kernels alone, with numpy standing in for torch and the GPU, and planted faults."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import kernels
from benchmarks.kernel_cases import Case, Shape

ELEMENTS = 4096


class Tensor(np.ndarray[Any, Any]):
    """What of torch's tensor the benchmark uses."""

    def data_ptr(self) -> int:
        return int(self.ctypes.data)

    def to(self, kind: Any) -> Tensor:
        return self.astype(kind).view(Tensor)

    def float(self) -> Tensor:
        return self.astype(np.float32).view(Tensor)

    def abs(self) -> Tensor:
        return np.abs(self).view(Tensor)

    def nan_to_num(self, nan: float) -> Tensor:
        return np.nan_to_num(self, nan=nan, posinf=np.inf).view(Tensor)

    def fill_(self, value: float) -> None:
        self.fill(value)

    def copy_(self, other: Tensor) -> None:
        pass


class Gpu:
    """Events tell a clock that only work moves; a graph is the list of launches made while it was captured."""

    def __init__(self) -> None:
        self.now = 0.0
        self.capturing: list[Callable[[], None]] | None = None
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                gpu.now += 0.001
                self.at = gpu.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            def __init__(self) -> None:
                self.launches: list[Callable[[], None]] = []

            def replay(self) -> None:
                for launch in self.launches:
                    launch()

        @contextlib.contextmanager
        def graph(into: Graph) -> Iterator[None]:
            gpu.capturing = into.launches
            yield
            gpu.capturing = None

        def randn(*shape: int, device: str) -> Tensor:
            return np.random.default_rng(0).standard_normal(shape).view(Tensor)

        cuda = SimpleNamespace(
            Event=Event, CUDAGraph=Graph, graph=graph, Stream=object, stream=lambda stream: contextlib.nullcontext(),
            current_stream=lambda: SimpleNamespace(cuda_stream=0), synchronize=lambda: None,
            get_device_properties=lambda index: SimpleNamespace(L2_cache_size=8 * ELEMENTS),
        )  # fmt: skip
        self.torch = SimpleNamespace(
            cuda=cuda, uint8=np.uint8, float16=np.float16, randn=randn,
            randint=lambda low, high, shape, dtype, device: np.zeros(1, dtype).view(Tensor),
            empty_like=np.empty_like,
            full=lambda shape, value, dtype, device: np.full(shape, value, dtype).view(Tensor),
        )  # fmt: skip

    def launch(self, work: Callable[[], None], milliseconds: float) -> int:
        def run() -> None:
            self.now += milliseconds
            work()

        if self.capturing is None:
            run()
        else:
            self.capturing.append(run)
        return 0


class QuietWatch:
    def look(self) -> None:
        pass

    def marks(self) -> list[str]:
        return ["another process is on the GPU (7)"]

    def notes(self) -> list[str]:
        return []


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    gpu = Gpu()
    monkeypatch.setattr(kernels, "Watch", QuietWatch)
    made = kernels.Bench(gpu.torch, 10, None)
    monkeypatch.setattr(made, "_copy", lambda count: 0.5)
    return SimpleNamespace(gpu=gpu, row=made.row, bench=made)


def doubling(gpu: Gpu, status: int = 0, work: bool = True, seen: list[int] | None = None) -> Case:
    """A kernel that doubles float16, in 0.1 ms."""

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        if status:
            return status
        source, target = (np.frombuffer((ctypes.c_char * (2 * ELEMENTS)).from_address(at), np.float16) for at in (read[0], written[0]))
        if seen is not None:
            seen.append(read[0])
        return gpu.launch(lambda: np.copyto(target, source + source) if work else None, 0.1)

    shape = Shape(4, ELEMENTS // 4, "test", "small")
    return Case("double", "float16", shape, (ELEMENTS,), (ELEMENTS,), launch, lambda read: [read[0] + read[0]])


def test_a_kernel_is_timed_by_what_the_graph_takes(bench: Any) -> None:
    row = bench.row(doubling(bench.gpu), "cold")
    assert row["microseconds"] == pytest.approx(100, rel=1e-3)
    assert row["gbps"] == pytest.approx(4 * ELEMENTS / 0.1 / 1e6, abs=0.05)
    assert (row["agrees"], row["error"]) == (True, 0.0)
    assert row["marks"] == ["another process is on the GPU (7)"]
    assert bench.bench.copy_gbps() == pytest.approx(2 * kernels.COPY_BYTES / 0.5 / 1e6)


def test_a_cold_run_rotates_over_more_than_the_cache_and_a_warm_one_does_not(bench: Any) -> None:
    for cache, sets in (("cold", 6), ("warm", 1)):  # 3 times 8 bytes an element, of which one launch moves 4
        seen: list[int] = []
        bench.row(doubling(bench.gpu, seen=seen), cache)
        assert len(set(seen)) == sets


def test_a_launch_that_fails_is_refused(bench: Any) -> None:
    row = bench.row(doubling(bench.gpu, status=209), "cold")
    assert row["failed"] == "launch failed: cudaError_t 209"
    assert "microseconds" not in row


def test_a_kernel_that_writes_nothing_disagrees(bench: Any) -> None:
    row = bench.row(doubling(bench.gpu, work=False), "cold")
    assert row["agrees"] is False
    assert row["error"] is None
    assert "outputs disagree: error inf is above 0.004" in row["marks"]
