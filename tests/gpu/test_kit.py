"""Kits on their target, and engines that travel: in fresh processes, in a C++ program, with their library beside them, on other GPUs.

The kits are made here, on the target itself; one made elsewhere is given by ONNXFUSE_KIT (its folder), and is then run as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnxfuse import gpus
from onnxfuse.engine import build as building
from onnxfuse.engine import trt
from onnxfuse.engine.manifest import Manifest, path_of
from onnxfuse.engine.run import Engine
from onnxfuse.errors import BadInput
from onnxfuse.kit import make, target
from tests.engine import models

ROOT = Path(__file__).resolve().parents[2]
RANGE = "x:1x5x64..3x5x64..8x5x64"
PROGRAM = ROOT / "examples" / "cpp" / "run_engine"


@dataclasses.dataclass(frozen=True)
class Ran:
    kit: Path
    done: subprocess.CompletedProcess[str]

    @property
    def report(self) -> dict:
        return json.loads((self.kit / "result" / "report.json").read_text())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A kit of the small block in half precision, made for the GPU here and run once, in an environment that has no onnxfuse."""
    folder = tmp_path_factory.mktemp("kit")
    model = models.saved(models.block("float16"), folder)
    make.make(model, folder / "kit", gpu=gpus.resolve(f"sm_{trt.gpu().sm}"), shapes=[RANGE])
    command = [sys.executable, str(folder / "kit" / "kit.py"), "--samples", "64", "--placements", "4"]
    return Ran(folder / "kit", subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False))


def close(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name].astype(np.float32), array.astype(np.float32), rtol=2e-2, atol=2e-2)


def test_a_kit_builds_checks_and_times(ran: Ran) -> None:
    assert ran.done.returncode == 0, ran.done.stdout + ran.done.stderr
    report = ran.report
    assert report["agrees"]
    assert [other["check"]["feeds"] for other in report["others"]] == [3, 3]
    assert any("fresh process without the plugin library" in note for note in report["others"][1]["check"]["notes"])
    timings = report["timings"]
    assert not [mark for mark in timings["marks"] if "CUDA graph" in mark or "other outputs" in mark], timings["marks"]
    assert 0 < timings["engines"]["fused"]["median"] < 1000
    assert {node for layer in report["layers"]["fused"] for node in layer["nodes"]} >= {"norm_0", "gelu_0"}


def test_its_report_has_the_published_form(ran: Ran) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(ran.report, json.loads((ROOT / "onnxfuse" / "report" / "schema.json").read_text()))


def test_its_engines_are_onnxfuses_engines(ran: Ran) -> None:
    feeds, wanted = target.read_reference(str(ran.kit))[0]
    with Engine.load(ran.kit / "result" / "fused.engine") as engine:
        close(engine.run(feeds), wanted)
        assert engine.manifest is not None
        assert engine.manifest.sm == trt.gpu().sm
        assert not [line for line in engine.changed if line.startswith(("GPU", "TensorRT"))]


@pytest.mark.skipif("ONNXFUSE_KIT" not in os.environ, reason="ONNXFUSE_KIT names no kit that was made on another machine")
def test_a_kit_from_another_machine(tmp_path: Path) -> None:
    kit = Path(os.environ["ONNXFUSE_KIT"]).resolve()
    out = Path(os.environ.get("ONNXFUSE_KIT_OUT") or tmp_path / "result")
    done = subprocess.run([sys.executable, kit / "kit.py", "--out", out], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out / "report.json").read_text())["agrees"]


def test_onnxfuse_run_shows_what_it_computes(ran: Ran, tmp_path: Path) -> None:
    feeds, wanted = target.read_reference(str(ran.kit))[0]
    np.savez(tmp_path / "in.npz", **feeds)
    command = [sys.executable, "-m", "onnxfuse", "run", ran.kit / "result" / "fused.engine", "--data", tmp_path / "in.npz"]
    done = subprocess.run([*command, "-o", tmp_path / "out.npz"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3x5x64" in done.stdout
    with np.load(tmp_path / "out.npz") as outputs:
        close(dict(outputs), wanted)


def test_an_engine_in_a_cpp_program(ran: Ran, tmp_path: Path) -> None:
    if not PROGRAM.is_file():
        pytest.skip("examples/cpp/run_engine is not built: `make -C examples/cpp` (it needs TensorRT's headers)")
    feeds, wanted = target.read_reference(str(ran.kit))[0]
    (tmp_path / "x.bin").write_bytes(np.ascontiguousarray(feeds["x"]).tobytes())
    engine = ran.kit / "result" / "fused.engine"
    done = subprocess.run([PROGRAM, "--trust", engine, "x=3x5x64:x.bin"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got = {}
    for line in done.stdout.splitlines():
        file, name, dtype, shape = line.split()
        got[name] = np.frombuffer((tmp_path / file).read_bytes(), dtype).reshape([int(n) for n in shape.split("x")])
    close(got, wanted)
    refused = subprocess.run([PROGRAM, "--trust", engine, "x=9x5x64"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "error: x: the engine does not take the shape 9x5x64" in refused.stderr


# Engines that travel ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.saved(models.block("float32"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def beside(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with its plugin library beside it."""
    out = tmp_path_factory.mktemp("beside") / "m.engine"
    manifest = building.build(model, out, shapes=[RANGE], embed_plugins=False)
    assert manifest.plugins is not None
    assert manifest.plugins.file == "m.engine.plugins.so"
    return out


def in_a_process(engine: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pathlib import Path\n"
        "from onnxfuse.engine.run import Engine\nfrom onnxfuse.errors import OnnxfuseError\nfrom tests.engine import models\n"
        "try:\n"
        "    with Engine.load(Path(sys.argv[1])) as engine: print(sorted(engine.run(models.feeds())))\n"
        "except OnnxfuseError as fault: print(type(fault).__name__, fault)\n"
    )
    return subprocess.run([sys.executable, "-c", code, engine], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_library_beside_the_engine_goes_where_the_engine_goes(beside: Path, tmp_path: Path) -> None:
    for path in (beside, path_of(beside), beside.with_name("m.engine.plugins.so")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    done = in_a_process(tmp_path / "m.engine")
    assert done.stdout.strip() == "['s', 'y']", done.stdout + done.stderr


def test_a_changed_library_is_not_loaded(beside: Path, tmp_path: Path) -> None:
    for path in (beside, path_of(beside)):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "m.engine.plugins.so").write_bytes(beside.with_name("m.engine.plugins.so").read_bytes() + b"\0")
    with pytest.raises(BadInput, match="is not the one that it was built with, and is not loaded"):
        Engine.load(tmp_path / "m.engine")


def test_an_engine_for_every_gpu_from_ampere_on(
    model: Path, tmp_path: Path, run_cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # In a process of its own: TensorRT takes one build of the plugin library.
    options = ["--shapes", RANGE, "--compatible", "ampere+", "-o", tmp_path / "m.engine"]
    built = run_cli("build-engine", model, *options)
    assert built.returncode == 0, built.stderr
    assert Manifest.from_json(path_of(tmp_path / "m.engine").read_text()).compatible == "ampere+"
    done = in_a_process(tmp_path / "m.engine")
    assert done.stdout.strip() == "['s', 'y']", done.stdout + done.stderr


def test_trust_is_asked_for(ran: Ran, tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    engine.write_bytes((ran.kit / "result" / "fused.engine").read_bytes())
    with pytest.raises(BadInput, match=r"no manifest m\.engine\.json vouches for it"):
        Engine.load(engine)
    feeds, wanted = target.read_reference(str(ran.kit))[0]
    with Engine.load(engine, trust=True) as loaded:
        close(loaded.run(feeds), wanted)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("driver", "1.2.3", "driver: built with 1.2.3, here is "),
        ("gpu", "NVIDIA Other", "GPU: built with NVIDIA Other"),
        ("tensorrt", "10.0.1", "TensorRT: built with 10.0.1"),
        ("model_sha256", "0" * 64, "model: block.onnx changed after the engine was built"),
    ],
)
def test_what_changed_is_said_with_the_remedy(field: str, value: str, says: str, beside: Path, model: Path, tmp_path: Path) -> None:
    old = Manifest.from_json(path_of(beside).read_text())
    changed = dataclasses.replace(old, **{field: value, "model_path": os.path.relpath(model, tmp_path)})
    for path in (beside, beside.with_name("m.engine.plugins.so")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path_of(tmp_path / "m.engine").write_text(changed.to_json())
    with Engine.load(tmp_path / "m.engine") as engine:
        (line,) = engine.changed
    assert line.startswith(says)
    assert "; " in line


def test_an_engine_of_an_architecture_that_is_not_here(beside: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(Manifest.from_json(path_of(beside).read_text()), sm=75, gpu="Tesla T4")
    (tmp_path / "m.engine").write_bytes(beside.read_bytes())
    path_of(tmp_path / "m.engine").write_text(other.to_json())
    with pytest.raises(BadInput, match=r"built for Tesla T4 \(sm_75\), here is .*; build it again here"):
        Engine.load(tmp_path / "m.engine")


def test_inspect_says_what_the_engine_is(beside: Path, run_cli: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_cli("inspect", beside)
    assert done.returncode == 0, done.stderr
    assert "plugins: BiasGelu, SkipLayerNormalization, in m.engine.plugins.so" in done.stdout
    assert "nothing it was made from has changed" in done.stdout
