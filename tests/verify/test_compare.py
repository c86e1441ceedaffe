"""`onnxfuse compare` as a user runs it; engines stand in where there is no GPU, to test what the command makes of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.bench.layers import LayerTime
from onnxfuse.commands import compare
from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.verify import reference
from tests.verify.conftest import Save

FLOAT = TensorProto.FLOAT
Run = Callable[..., subprocess.CompletedProcess[str]]


def scaled(save: Save, name: str, factor: float = 1.0, x: str = "x") -> Path:
    nodes = [helper.make_node("Mul", [x, "f"], ["scaled"]), helper.make_node("Neg", [x], ["other"])]
    values = [("scaled", FLOAT, ["N", 8]), ("other", FLOAT, ["N", 8])]
    return save(nodes, [(x, FLOAT, ["N", 8])], values, {"f": np.array(factor, np.float32)}, name=name)


@pytest.fixture
def fused(save: Save) -> Path:
    """A model with one fused node that carries its function."""
    body = helper.make_function(
        "onnxfuse", "Silu", ["X"], ["Y"],
        [helper.make_node("Sigmoid", ["X"], ["S"]), helper.make_node("Mul", ["X", "S"], ["Y"])],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    node = helper.make_node("Silu", ["x"], ["y"], domain="onnxfuse", name="silu")
    return save([node], [("x", FLOAT, [2, 8])], [("y", FLOAT, [2, 8])], functions=[body], name="fused")


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    return lines[0]


def test_agreement_is_status_0_with_a_report(save: Save, run_cli: Run, tmp_path: Path) -> None:
    a, b = scaled(save, "a", 2.0), scaled(save, "b", 2.0)
    done = run_cli("compare", a, b, "--report", tmp_path / "report")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the outputs agree" in done.stdout
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["agrees"]
    assert list(report["others"][0]["check"]["outputs"]) == ["scaled", "other"]
    assert report["inputs"]["feeds"] == [{"x": "float32[1, 8]"}, {"x": "float32[3, 8]"}]
    assert (tmp_path / "report" / "report.html").read_text().startswith("<!doctype html>")


def test_the_same_file_twice_has_two_names(save: Save, tmp_path: Path) -> None:
    """With --layers each has a column of its own."""
    path = scaled(save, "a", 2.0)
    (tmp_path / "b").mkdir()
    elsewhere = tmp_path / "b" / "a.onnx"
    elsewhere.write_bytes(path.read_bytes())
    wanted = compare.Wanted(path, (path, elsewhere), None, 0, 1, {}, None, None, 2, layers=True)
    report = compare.run(wanted)
    names = [other["name"] for other in report["others"]]
    assert len({"a.onnx", *names}) == 3
    row = next(row for row in report["tensors"] if row["name"] == "scaled")
    assert {"onnxruntime_float32", "fused", names[1]} <= row.keys()
    assert compare._names("a.onnx", path, [path]) == {path: "a.onnx (other)"}
    assert compare._names("a.onnx undone", path, [path]) == {path: "a.onnx"}


def test_disagreement_is_status_1_and_names_the_output(save: Save, run_cli: Run, tmp_path: Path) -> None:
    a, b = scaled(save, "a", 2.0), scaled(save, "b", 2.001)
    done = run_cli("compare", a, b, "--report", tmp_path / "r")
    assert done.returncode == 1
    assert one_line(done).startswith("error: b.onnx: output 'scaled' differs: ")
    assert "✗" in done.stdout
    assert not json.loads((tmp_path / "r" / "report.json").read_text())["agrees"]
    assert run_cli("compare", a, b, "--rtol", "0.01").returncode == 0
    assert run_cli("compare", a, b, a).returncode == 1


def test_inputs_from_a_file(save: Save, run_cli: Run, tmp_path: Path) -> None:
    a, b = scaled(save, "a", 2.0), scaled(save, "b", 2.0)
    np.savez(tmp_path / "d.npz", x=np.ones((5, 8), np.float32))
    done = run_cli("compare", a, b, "--data", "d.npz", "--report", "r")
    assert done.returncode == 0
    assert json.loads((tmp_path / "r" / "report.json").read_text())["inputs"]["feeds"] == [{"x": "float32[5, 8]"}]
    np.savez(tmp_path / "d.npz", x=np.ones((5, 9), np.float32))
    done = run_cli("compare", a, b, "--data", "d.npz")
    assert done.returncode == 2
    assert "input 'x' has shape [5, 9]" in one_line(done)


def test_a_fused_file_is_compared_with_itself_undone(fused: Path, run_cli: Run, save: Save) -> None:
    done = run_cli("compare", fused)
    assert done.returncode == 0, done.stderr
    assert "fused.onnx undone: the outputs agree" in done.stdout
    assert sorted(path.name for path in fused.parent.glob("*.onnx")) == ["fused.onnx"]
    done = run_cli("compare", scaled(save, "plain"))
    assert done.returncode == 2
    assert "holds no fused node to undo" in one_line(done)


def test_dims_seed_and_feeds(save: Save, run_cli: Run, tmp_path: Path) -> None:
    a = scaled(save, "a")
    done = run_cli("compare", a, scaled(save, "b"), "--dims", "N=6", "--feeds", "1", "--seed", "3", "--report", "r")
    assert done.returncode == 0
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["inputs"] == {"source": "1 generated with seed 3", "feeds": [{"x": "float32[6, 8]"}]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.onnx", "gone.onnx"], "gone.onnx: no such file"),
        (["gone.onnx", "a.onnx"], "gone.onnx: no such file"),
        (["a.onnx", "text.onnx"], "text.onnx: not an ONNX model"),
        (["a.onnx", "z.onnx"], "z.onnx: has no input 'x', which a.onnx takes"),
        (["a.onnx", "b.onnx", "--dims", "N"], "--dims N: not of the form NAME=N"),
        (["a.onnx", "b.onnx", "--dims", "M=2"], "no free dimension 'M'; it has N"),
        (["a.onnx", "b.onnx", "--dims", "N=2", "--data", "d.npz"], "--data and --dims exclude each other"),
        (["a.onnx", "b.onnx", "--data", "gone.npz"], "gone.npz: no such file"),
        (["a.onnx", "b.onnx", "b.onnx"], "named twice"),
        (["x.engine", "a.onnx"], "an engine cannot be the reference"),
        (["a.onnx", "b.onnx", "--report", "text.onnx"], "--report text.onnx: it is a file"),
        (["a.onnx", "b.onnx", "--rtol", "-1"], "--rtol"),
    ],
)
def test_bad_input_is_status_2_and_one_line(save: Save, run_cli: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    scaled(save, "a")
    scaled(save, "b")
    scaled(save, "z", x="z")
    (tmp_path / "text.onnx").write_text("text")
    done = run_cli("compare", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in one_line(done)


def test_an_engine_without_tensorrt_or_gpu_is_status_3(save: Save, run_cli: Run, tmp_path: Path) -> None:
    from tests.conftest import missing_for_gpu

    if missing_for_gpu() is None:
        pytest.skip("a GPU and TensorRT are here")
    scaled(save, "a")
    (tmp_path / "a.engine").write_bytes(b"engine")
    done = run_cli("compare", "a.onnx", "a.engine")
    assert done.returncode == 3, done.stderr
    assert "error: " in one_line(done)


# ------------------------------------------------------------------------------------------------------------ engines


class Stand:
    """An engine whose outputs come from a model, times a factor."""

    def __init__(self, model: Path, factor: float, dtype: str) -> None:
        self.model, self.factor = model, factor
        self.inputs = (SimpleNamespace(name="x", dtype="float32", shape=(-1, 8), is_input=True, on_host=False),)
        self.output_specs = tuple(SimpleNamespace(name=n, dtype="float16", shape=(-1, 8)) for n in ("scaled", "other"))
        tensor = SimpleNamespace(name="x", dtype="float32", shape=(-1, 8), opt=(4, 8))
        layer = SimpleNamespace(inputs=(dtype,), outputs=(dtype,))
        self.manifest = SimpleNamespace(inputs=(tensor,), layers=(layer,), gpu="a GPU", plugins=None, cuts=())
        self.changed: tuple[str, ...] = ()

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *about: object) -> None:
        pass

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        (outputs,) = reference.run(self.model, [feeds])
        return {name: (value * self.factor).astype(np.float16) for name, value in outputs.items()}


@pytest.fixture
def engines(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, tuple[float, str]]], dict[str, Any]]:
    """Compare a model with engines {name: (factor, dtype of the layers)}; the second is timed twice as fast as the first."""
    from onnxfuse.bench.stats import bootstrap_median, bootstrap_ratio
    from onnxfuse.engine import run as engine_run
    from onnxfuse.report import machine

    stands: dict[Path, Stand] = {}

    def profile(engine: Stand) -> tuple[LayerTime, ...]:
        if engine is stands.get(tmp_path / "unprofiled.engine"):
            raise OnnxfuseError("no profiler here")
        return (LayerTime("mul", "PluginV3" if engine.manifest.plugins else "kgen", ("mul",), 2.0 * engine.factor),)

    def compared(wanted: dict[str, tuple[float, str]]) -> dict[str, Any]:
        model = scaled(save, "m", 2.0)
        stands.update({tmp_path / name: Stand(model, *about) for name, about in wanted.items()})
        for path, stand in stands.items():
            path.write_bytes(b"")
            stand.manifest.plugins = None if path.name == "automatic.engine" else "sha"
        monkeypatch.setattr("onnxfuse.bench.layers.profile", lambda engine, feeds: profile(engine))
        monkeypatch.setattr(engine_run.Engine, "load", classmethod(lambda cls, path, trust=False: stands[path]))
        monkeypatch.setattr(machine, "describe", lambda gpu: {"gpu": str(gpu)})
        samples = {name: [(2.0 if i == 0 else 1.0) + 0.001 * (k % 5) for k in range(50)] for i, name in enumerate(wanted)}
        timings = SimpleNamespace(
            median=lambda name: bootstrap_median(samples[name]),
            ratio=lambda a, b: bootstrap_ratio(samples[a], samples[b]),
            marks=("a mark",),
            placements=1,
        )
        monkeypatch.setattr("onnxfuse.bench.timing.time_placed", lambda engines, feeds, samples: timings)
        return compare.run(compare.Wanted(model, tuple(stands), None, 0, 2, {}, None, None, 50))

    return compared


def test_engines_are_compared_and_timed_side_by_side(engines: Callable[..., dict[str, Any]]) -> None:
    report = engines({"automatic.engine": (1.0, "fp16"), "fused.engine": (1.0001, "fp16")})
    assert report["agrees"]
    # Fed with the size that the engine was optimized for.
    assert report["inputs"]["feeds"] == [{"x": "float32[4, 8]"}]
    check = report["others"][0]["check"]
    assert check["tolerance"]["name"] == "float16"
    assert check["outputs"]["scaled"]["notes"] == ["float16 compared with float32"]
    latency = report["timings"]
    assert latency["baseline"] == "automatic.engine"
    assert latency["ratios"]["fused.engine"]["verdict"] == "faster"
    assert latency["ratios"]["fused.engine"]["median"] == pytest.approx(2.0, rel=0.01)
    assert latency["marks"] == ["a mark"]
    assert [report["layers"][side][0]["type"] for side in ("automatic", "fused")] == ["kgen", "PluginV3"]
    assert report["layers"]["diff"]["plugins"] == 1


def test_without_an_automatic_and_a_fused_engine_there_are_no_profiles(engines: Callable[..., dict[str, Any]]) -> None:
    assert "layers" not in engines({"fused.engine": (1.0, "fp16"), "again.engine": (1.0, "fp16")})


def test_a_profile_that_fails_is_a_note(engines: Callable[..., dict[str, Any]]) -> None:
    report = engines({"automatic.engine": (1.0, "fp16"), "unprofiled.engine": (1.0, "fp16")})
    assert report["agrees"]
    assert report["notes"] == ["layers: no profiler here"]


def test_an_engine_that_is_wrong_is_named(engines: Callable[..., dict[str, Any]]) -> None:
    report = engines({"automatic.engine": (1.0, "fp32"), "fused.engine": (1.1, "bf16")})
    assert not report["agrees"]
    assert [other["check"]["agrees"] for other in report["others"]] == [True, False]
    assert [other["check"]["tolerance"]["name"] for other in report["others"]] == ["tf32", "bfloat16"]
    assert "fused.engine: output 'scaled' differs (and 1 more outputs)" in compare._disagreement(report)


def test_an_engine_of_another_model_is_refused(save: Save, tmp_path: Path) -> None:
    stand = Stand(scaled(save, "m"), 1.0, "fp32")
    with pytest.raises(BadInput, match=r"e\.engine: takes input 'x', which .*other\.onnx does not have"):
        compare._same_inputs(scaled(save, "other", x="q"), [], {tmp_path / "e.engine": stand})


def test_the_command_is_in_the_help_without_onnxruntime(run_cli: Run) -> None:
    done = run_cli("compare", "--help")
    assert done.returncode == 0
    assert "--report" in done.stdout
    assert onnx.__version__  # the module is here; the help alone does not need it
