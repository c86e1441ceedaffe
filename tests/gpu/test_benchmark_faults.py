"""Faults planted on a real GPU: the benchmark refuses or marks each. tests/bench plants the same with fakes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfuse import plugins
from onnxfuse.bench import timing
from onnxfuse.bench.watch import Watch
from onnxfuse.engine import build as building
from onnxfuse.engine import trt
from onnxfuse.engine.run import Engine
from tests.engine import models

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ["x:1x5x64..64x5x64..64x5x64"]
# Writes GPU memory for so many seconds, and says when it begins.
HAMMER = """
import sys, time
import pycuda.driver as cuda
cuda.init()
context = cuda.Device(0).make_context()
memory = cuda.mem_alloc(1 << 30)
end = time.monotonic() + float(sys.argv[1])
print("running", flush=True)
while time.monotonic() < end:
    for _ in range(20):
        cuda.memset_d32(memory, 7, 1 << 28)
    context.synchronize()
context.pop()
"""


@pytest.fixture(scope="module")
def engine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small block with plugins, in float16."""
    folder = tmp_path_factory.mktemp("faults")
    out = folder / "block.engine"
    building.build(models.saved(models.block("float16"), folder), out, shapes=SHAPES)
    return out


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    return models.feeds("float16", batch=64)


@contextlib.contextmanager
def hammer(seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Another process that keeps the GPU busy; entered when it runs."""
    process = subprocess.Popen([sys.executable, "-c", HAMMER, str(seconds)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        yield process
    finally:
        process.kill()
        process.wait()


def timed(engine: Engine, feeds: dict[str, np.ndarray], samples: int = 20) -> timing.Timings:
    return timing.time_engines({"fused": engine}, feeds, samples=samples, warm_up=0.2)


def of_others(marks: tuple[str, ...]) -> list[str]:
    return [mark for mark in marks if "another process" in mark]


def test_a_sound_engine_alone_is_not_marked_for_what_it_does(engine_file: Path, feeds: dict[str, np.ndarray]) -> None:
    with Engine.load(engine_file) as engine:
        timings = timed(engine, feeds, samples=50)
    assert timings.captured == {"fused": True}
    assert of_others(timings.marks) == []
    assert [mark for mark in timings.marks if "outputs" in mark or "NVML" in mark or "input" in mark] == []


def test_a_process_that_is_there_before_is_marked(engine_file: Path, feeds: dict[str, np.ndarray]) -> None:
    with Engine.load(engine_file) as engine, hammer(60):
        timings = timed(engine, feeds)
    assert of_others(timings.marks), timings.marks


def test_a_process_that_comes_while_measuring_is_marked(engine_file: Path, feeds: dict[str, np.ndarray]) -> None:
    came: list[str] = []

    def come() -> None:
        time.sleep(0.5)
        with hammer(4):
            came.append("came")
            time.sleep(4)

    with Engine.load(engine_file) as engine:
        other = threading.Thread(target=come)
        other.start()
        # 2 ms a sample: about 8 s, while the other process needs one or two to start.
        timings = timed(engine, feeds, samples=4000)
        other.join()
    assert came
    assert of_others(timings.marks), timings.marks


def test_a_clock_that_moved_is_marked(engine_file: Path, feeds: dict[str, np.ndarray]) -> None:
    with Engine.load(engine_file) as engine:
        engine.run(feeds)
        watch = Watch()
        for _ in range(40):  # until the idle GPU has lowered its clock
            clock = watch.look().clocks.sm
            if clock is None or clock < 1500:
                break
            watch.looks.clear()
            time.sleep(0.25)
        else:
            pytest.skip("this GPU keeps its clock up while idle, and its settings are not to be changed")
        assert clock is not None, watch.notes()
        timed(engine, feeds, samples=300)
        watch.look()
    (mark,) = [mark for mark in watch.marks() if mark.startswith("SM clock")]
    assert mark.startswith(f"SM clock moved from {clock} to ")


class OwnStream(Engine):
    """An engine that ignores the stream it is given, as a plugin may: a graph captures nothing of it."""

    def enqueue(self, stream: int | None = None) -> None:
        super().enqueue(self.stream)


class Waiting(Engine):
    """An engine that waits for the GPU while it launches, which a capture does not allow."""

    def enqueue(self, stream: int | None = None) -> None:
        super().enqueue(stream)
        trt.activate().Context.synchronize()


def test_a_graph_that_misses_what_was_launched_elsewhere_is_marked(engine_file: Path, feeds: dict[str, np.ndarray]) -> None:
    with OwnStream.load(engine_file) as engine:
        timings = timed(engine, feeds)
    assert any("what is timed gives other outputs than a run" in mark or "no CUDA graph" in mark for mark in timings.marks), timings.marks


def test_a_graph_that_was_not_captured_is_marked(engine_file: Path, feeds: dict[str, np.ndarray]) -> None:
    with Waiting.load(engine_file) as engine:
        timings = timed(engine, feeds)
        assert timings.captured == {"fused": False}
        assert any(mark.startswith("fused: no CUDA graph, timed by plain enqueue") for mark in timings.marks), timings.marks
    with Engine.load(engine_file) as engine:  # nothing of the failed capture is left
        assert timed(engine, feeds).captured == {"fused": True}


def test_an_output_that_another_writes_to_is_marked(engine_file: Path, feeds: dict[str, np.ndarray]) -> None:
    """What a kernel with a race leaves behind: another result than at first, here written into the output while it is timed."""

    class Overwritten(Engine):
        fetched = 0

        def outputs(self) -> dict[str, Any]:
            self.fetched += 1
            if self.fetched > 3:  # untimed run, scrambled run, one launch; then what the samples left
                trt.activate().memset_d8(int(self._device["y"].memory), 0x40, 64)
            return super().outputs()

    with Overwritten.load(engine_file) as engine:
        timings = timed(engine, feeds)
    assert any("the last run gave other outputs than the first (y" in mark for mark in timings.marks), timings.marks


@pytest.mark.parametrize(("value", "mark"), [(0.0, "no input varies"), (float("nan"), "input x holds NaN")], ids=["zeros", "NaN"])
def test_data_that_says_nothing_is_marked(engine_file: Path, value: float, mark: str) -> None:
    with Engine.load(engine_file) as engine:
        timings = timed(engine, {"x": np.full((64, 5, 64), value, np.float16)})
    assert any(mark in found for found in timings.marks), timings.marks


def test_an_engine_whose_enqueue_fails_is_never_timed(tmp_path: Path) -> None:
    """A library compiled for another architecture: its kernels cannot be launched here."""
    other = 80 if trt.gpu().sm != 80 else 90
    code = """
import sys
from pathlib import Path
from onnxfuse import plugins
from onnxfuse.bench import timing
from onnxfuse.engine import prepare, trt
from onnxfuse.engine.run import Engine
from onnxfuse.errors import OnnxfuseError
from tests.engine import models
model = Path(sys.argv[1])
ops = prepare.plugin_ops_in(model, plugins.PLUGIN_OPS)
library = plugins.build(int(sys.argv[2]))
shapes = ((1, 5, 64), (3, 5, 64), (8, 5, 64))
try:
    built = trt.build(trt.Order(prepare.for_parser(model, ops), model, {"x": shapes}, libraries=(library.path,), embed=False))
    engine = Engine(built.engine, "wrong", manifest=None, host_code=False)
    timed = timing.time_engines({"fused": engine}, models.feeds(), samples=5, warm_up=0)
except OnnxfuseError as fault:
    print(type(fault).__name__, fault)
else:
    print("timed", timed.samples)
"""
    model = models.saved(models.block(), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(other)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.startswith(("EngineFault", "BadInput")), done.stdout + done.stderr


# Kernels alone ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Any:
    """(Bench, a case of 25 MB read and written)."""
    torch = pytest.importorskip("torch", reason="kernels alone are timed through torch")
    from benchmarks import kernel_cases, kernels

    library = ctypes.CDLL(str(plugins.build(trt.gpu().sm).path))
    shape = kernel_cases.Shape(2048, 3072, "12 MB", "middle")
    return kernels.Bench(torch, 30, None), kernel_cases.gelu(library, "float16", shape, 0, "erf")


def test_a_kernel_timed_warm_is_marked(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, case = bench
    cold = bench.row(case, "cold")
    assert cold["agrees"], cold
    # What the memory can do is what it did, and a little more: the same buffers again and again are faster than that.
    monkeypatch.setattr(bench, "_memory_gbps", max(1.1 * cold["gbps"], 1.1 * cold["copy_gbps"]))
    assert not [mark for mark in bench.row(case, "cold")["marks"] if "warm cache" in mark]
    monkeypatch.setattr(bench, "_memory_gbps", 1.1 * cold["gbps"])
    monkeypatch.setattr(bench, "_sets", lambda case: 1)
    monkeypatch.setattr(bench, "_copy", lambda count: 1.0)  # which would empty the cache between samples
    assert any("a warm cache was timed" in mark for mark in bench.row(case, "cold")["marks"])


def test_a_kernel_whose_launch_fails_is_refused(bench: Any) -> None:
    bench, case = bench
    row = bench.row(dataclasses.replace(case, launch=lambda read, written, stream: 209), "cold")
    assert row["failed"] == "launch failed: cudaError_t 209"
    assert bench.row(case, "cold")["agrees"]


def test_a_kernel_that_leaves_out_its_work_disagrees(bench: Any) -> None:
    bench, case = bench
    row = bench.row(dataclasses.replace(case, launch=lambda read, written, stream: 0), "cold")
    assert not row.get("agrees", False)
