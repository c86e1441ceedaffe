"""Building: progress, cancelling, and what is refused before TensorRT is asked."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxfuse.engine import build as building
from onnxfuse.engine import trt
from onnxfuse.engine.build import Phases, Step, run_cancellable
from onnxfuse.engine.manifest import Manifest, path_of
from onnxfuse.errors import BadInput, MissingHere
from tests.engine import models

H200 = trt.Device("NVIDIA H200", 90, "580.1")
Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_phases_become_steps() -> None:
    steps: list[Step] = []
    phases = Phases(steps.append, threading.Event())
    phases.phase_start("Build", None, 2)
    phases.phase_start("Tactics", "Build", 10)
    assert phases.step_complete("Tactics", 0)
    phases.phase_finish("Tactics")
    assert phases.step_complete("Build", 0)
    phases.phase_finish("Build")
    seen = [(s.phase, s.parent, s.done, s.steps, s.finished) for s in steps]
    assert seen == [
        ("Build", None, 0, 2, False),
        ("Tactics", "Build", 0, 10, False),
        ("Tactics", "Build", 1, 10, False),
        ("Tactics", "Build", 10, 10, True),
        ("Build", None, 1, 2, False),
        ("Build", None, 2, 2, True),
    ]
    assert all(b.elapsed >= a.elapsed >= 0 for a, b in itertools.pairwise(steps))


def test_cancelling_stops_at_the_next_step() -> None:
    cancel = threading.Event()
    phases = Phases(None, cancel)
    phases.phase_start("Build", None, 2)
    assert phases.step_complete("Build", 0)
    cancel.set()
    assert not phases.step_complete("Build", 1)


def test_work_runs_to_its_end_and_its_faults_come_through() -> None:
    assert run_cancellable(lambda cancel: 7) == 7

    def failing(cancel: threading.Event) -> None:
        raise BadInput("no")

    with pytest.raises(BadInput, match="no"):
        run_cancellable(failing)


SLOW_BUILD = """
import sys, time
from pathlib import Path
from onnxfuse.engine import build, trt

def stand_in(order, monitor):
    monitor.phase_start("Build", None, 1000)
    for step in range(1000):
        time.sleep(0.01)
        if step == 5:
            print("building", flush=True)
        if not monitor.step_complete("Build", step):
            return None
    return trt.Built(b"engine", b"cache", (), (), ())

trt.build = stand_in
trt.tensorrt = lambda: None
trt.gpu = lambda: trt.Device("NVIDIA H200", 90, "580.1")
build._plugin_ops = lambda: frozenset()
from onnxfuse.commands import main
sys.exit(main(["build-engine", sys.argv[1], "-o", sys.argv[2], "--shapes", "x:1x5x64", "--timing-cache", sys.argv[3]]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_build_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int) -> None:
    model = models.saved(models.block(), tmp_path)
    (tmp_path / "out").mkdir()
    arguments = [str(model), str(tmp_path / "out" / "m.engine"), str(tmp_path / "out" / "t.cache")]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], start_new_session=True,
        env={**os.environ, "ONNXFUSE_DEBUG": "0"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert list((tmp_path / "out").iterdir()) == []
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) <= 1


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[trt.Order]:
    """A TensorRT that builds at once; the orders it was given."""
    orders: list[trt.Order] = []
    spec = trt.TensorSpec("x", "float32", (-1, 5, 64), True, False)

    def stand_in(order: trt.Order, monitor: trt.Monitor | None = None) -> trt.Built:
        orders.append(order)
        time.sleep(0)
        return trt.Built(b"engine", b"new cache" if order.cache is not None else None, (spec,), (), ("careful",))

    monkeypatch.setattr(trt, "build", stand_in)
    monkeypatch.setattr(trt, "tensorrt", lambda: None)
    monkeypatch.setattr(trt, "version", lambda: "10.6.0")
    monkeypatch.setattr(trt, "gpu", lambda: H200)
    return orders


def test_engine_manifest_and_cache_are_written(tmp_path: Path, instant: list[trt.Order]) -> None:
    model = models.saved(models.block(), tmp_path)
    out, cache = tmp_path / "m.engine", tmp_path / "t.cache"
    manifest = building.build(model, out, shapes=["x:1x5x64..2x5x64..8x5x64"], timing_cache=cache, use_plugins=False)
    assert out.read_bytes() == b"engine"
    assert cache.read_bytes() == b"new cache"
    assert Manifest.from_json(path_of(out).read_text()) == manifest
    assert (manifest.gpu, manifest.sm, manifest.tensorrt, manifest.plugins) == ("NVIDIA H200", 90, "10.6.0", None)
    assert manifest.inputs[0].max == (8, 5, 64)
    assert manifest.timing_cache == "t.cache"
    assert manifest.warnings == ("careful",)
    (order,) = instant
    assert order.profiles == {"x": ((1, 5, 64), (2, 5, 64), (8, 5, 64))}
    assert order.libraries == ()
    assert order.cache == b""
    building.build(model, out, shapes=["x:1x5x64"], timing_cache=cache, use_plugins=False, level=1)
    assert instant[1].cache == b"new cache"
    assert [order.level for order in instant] == [None, 1]
    assert building.build(model, out, shapes=["x:1x5x64"], use_plugins=False).timing_cache is None


def test_without_a_folder_nothing_is_built(tmp_path: Path, instant: list[trt.Order]) -> None:
    model = models.saved(models.block(), tmp_path)
    for out, says in ((tmp_path / "no" / "m.engine", "no folder"), (tmp_path, "it is a folder"), (model, "replace the model")):
        with pytest.raises(BadInput, match=says):
            building.build(model, out, shapes=["x:1x5x64"], use_plugins=False)
    with pytest.raises(BadInput, match=r"--timing-cache .*no folder"):
        building.build(model, tmp_path / "e", shapes=["x:1x5x64"], timing_cache=tmp_path / "no" / "t", use_plugins=False)
    assert instant == []


@pytest.mark.parametrize("wanted", ["auto", "h200", "sm_90"])
def test_this_gpu(wanted: str) -> None:
    building.check_gpu(wanted, H200)


def test_a_gpu_that_the_table_does_not_know_goes_by_its_compute_capability() -> None:
    building.check_gpu("h200", trt.Device("NVIDIA Unheard-Of 9000", 90, "580.1"))
    building.check_gpu("a100-80gb", trt.Device("NVIDIA A100-SXM4-80GB", 80, "580.1"))


@pytest.mark.parametrize("wanted", ["l4", "sm_80", "h100"])
def test_another_gpu_is_missing_here(wanted: str) -> None:
    with pytest.raises(MissingHere, match=rf"--gpu {wanted}: .* here is NVIDIA H200 \(sm_90\); give --kit DIR"):
        building.check_gpu(wanted, H200)


def test_the_command_names_dynamic_inputs(tmp_path: Path, run_cli: Cli) -> None:
    models.saved(models.block(), tmp_path)
    done = run_cli("build-engine", "block.onnx")
    assert done.returncode == 2
    assert "dynamic shape of input x[batch, 5, 64]" in done.stderr
    assert "--shapes x:1x5x64..4x5x64..8x5x64" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_command_without_tensorrt_or_gpu(tmp_path: Path, run_cli: Cli) -> None:
    try:
        trt.tensorrt()
        trt.gpu()
    except MissingHere:
        pass
    else:
        pytest.skip("TensorRT and a GPU are here")
    models.saved(models.block(), tmp_path)
    done = run_cli("build-engine", "block.onnx", "--shapes", "x:2x5x64", "-o", "out.engine")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["block.onnx"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["absent.onnx"], 2, "absent.onnx: no such file"),
        (["block.onnx", "--shapes", "x:2x5"], 2, "has 3 dimensions, not 2"),
        (["block.onnx", "--shapes", "x:2x5x64", "--gpu", "v100"], 2, "v100"),
        (["block.onnx", "--shapes", "x:2x5x64", "--gpu", "nosuch"], 2, "nosuch"),
        (["block.onnx", "--shapes", "x:2x5x64", "-o", "no/such/folder.engine"], 2, "no folder"),
    ],
)
def test_the_command_on_bad_input(tmp_path: Path, run_cli: Cli, arguments: list[str], status: int, says: str) -> None:
    models.saved(models.block(), tmp_path)
    done = run_cli("build-engine", *arguments)
    assert done.returncode == status, done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["block.onnx"]
