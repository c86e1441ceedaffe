"""`onnxfuse run` and `onnxfuse inspect`: a look at what an engine computes, and at what a file is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.commands import inspect as inspecting
from onnxfuse.commands import run as running
from onnxfuse.engine import manifest as manifests
from onnxfuse.engine.manifest import PluginUse
from onnxfuse.engine.trt import TensorSpec
from onnxfuse.errors import BadInput
from tests.engine import models
from tests.engine.test_manifest import example


def test_figures_are_of_the_finite_values() -> None:
    values = np.array([[1.0, -3.0, np.nan], [np.inf, 2.0, np.nan]], np.float16)
    assert running.look("y", values) == running.Look("y", "float16", (2, 3), -3.0, 2.0, 0.0, 2, 1)
    assert running.look("y", np.full(2, np.nan, ml_dtypes.bfloat16)) == running.Look("y", "bfloat16", (2,), None, None, None, 2, 0)
    assert running.look("y", np.zeros((0, 3), np.int64)) == running.Look("y", "int64", (0, 3), None, None, None, 0, 0)
    assert running.look("y", np.array([True, False])).mean == 0.5


class Stand:
    """An engine that doubles its input, which it takes in bfloat16."""

    inputs = (TensorSpec("x", "bfloat16", (-1, 2), True, False),)
    changed = ("driver: built with 1, here is 2; measure again",)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *about: object) -> None:
        pass

    def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        assert feeds["x"].dtype == ml_dtypes.bfloat16
        return {"y [red]\x1b[2J": feeds["x"] * 2, "file": feeds["x"]}


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    from onnxfuse.engine.run import Engine

    asked: list[tuple[Path, bool]] = []
    monkeypatch.setattr(Engine, "load", classmethod(lambda cls, path, trust=False: asked.append((path, trust)) or Stand()))  # type: ignore[func-returns-value]
    return asked


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_run_is_shown_and_written(
    stored: str, stand: list[tuple[Path, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.array([[1.0, 2.0], [3.0, 4.0]]).astype(np.dtype(stored))
    np.savez(tmp_path / "in.npz", x=values)
    running.run(tmp_path / "e.engine", tmp_path / "in.npz", tmp_path / "out.npz", trust=True)
    assert stand == [(tmp_path / "e.engine", True)]
    with np.load(tmp_path / "out.npz") as outputs:
        assert len(outputs.files) == 2
        name = outputs.files[0]
        np.testing.assert_array_equal(outputs[name], values.astype(np.float32) * 2)
    said = capsys.readouterr()
    assert "note: driver: built with 1, here is 2" in said.err
    assert "bfloat16" in said.out
    assert "\x1b[2J" not in said.out
    assert {"2x2", "2", "8", "5"} <= set(said.out.split())


def test_what_a_run_refuses(stand: list[tuple[Path, bool]], tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", z=np.ones(1))
    with pytest.raises(BadInput, match=r"in\.npz: input 'x' is missing \(the file has z\)"):
        running.run(tmp_path / "e.engine", tmp_path / "in.npz", None, trust=False)
    with pytest.raises(BadInput, match="there is no folder"):
        running.run(tmp_path / "e.engine", tmp_path / "in.npz", tmp_path / "no" / "out.npz", trust=False)
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(BadInput, match=r"not an \.npz file"):
        running.run(tmp_path / "e.engine", tmp_path / "text.npz", None, trust=False)


# inspect ---------------------------------------------------------------------------------------------------------------


def engine(folder: Path, **changes: Any) -> Path:
    path = folder / "m.engine"
    path.write_bytes(b"an engine")
    usual = {"engine_sha256": hashlib.sha256(b"an engine").hexdigest(), "plugins": None, "model_path": "m.onnx"}
    manifests.path_of(path).write_text(dataclasses.replace(example(), **{**usual, **changes}).to_json())
    return path


def test_an_engine_as_it_was_built(tmp_path: Path) -> None:
    found = inspecting.describe(engine(tmp_path))
    assert (found["kind"], found["intact"], found["notes"]) == ("engine", True, [])
    text = "\n".join(inspecting.lines(found))
    assert "with TensorRT 10.6.0.post1" in text or f"with TensorRT {example().tensorrt}" in text
    assert "nothing it was made from has changed" in text


def test_what_changed_is_named_with_the_remedy(tmp_path: Path) -> None:
    model = models.saved(models.block(), tmp_path, "m.onnx")
    path = engine(tmp_path, model_sha256=manifests.model_digest(model))
    assert inspecting.describe(path)["notes"] == []
    models.saved(models.block(width=32), tmp_path, "m.onnx")
    assert inspecting.describe(path)["notes"] == [
        f"model: {example().model} changed after the engine was built from it; build the engine again"
    ]
    model.write_bytes(b"no model any more")
    assert len(inspecting.describe(path)["notes"]) == 1
    model.unlink()
    assert inspecting.describe(path)["notes"] == []
    path.write_bytes(b"another engine")
    (note,) = inspecting.describe(path)["notes"]
    assert note == "the manifest was written for another engine: this file is not trusted; build it again"
    manifests.path_of(path).unlink()
    (note,) = inspecting.describe(path)["notes"]
    assert note.startswith("no manifest m.engine.json beside it")
    assert next(inspecting.lines(inspecting.describe(path))).startswith(f"{path}: a file, 0.0 MB")


def test_another_plugin_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxfuse import plugins

    monkeypatch.setattr(plugins, "cached", lambda sm, and_newer: None)
    library = b"library"
    use = PluginUse("m.engine.plugins.so", hashlib.sha256(library).hexdigest(), False, ("BiasGelu",))
    path = engine(tmp_path, plugins=use)
    assert inspecting.describe(path)["notes"] == [
        "its plugin library m.engine.plugins.so is not beside it; put it there, or build the engine again"
    ]
    (tmp_path / "m.engine.plugins.so").write_bytes(library)
    assert inspecting.describe(path)["notes"] == []
    (tmp_path / "m.engine.plugins.so").write_bytes(b"other")
    assert inspecting.describe(path)["notes"] == [
        "its plugin library m.engine.plugins.so is not the one that it was built with; build the engine again"
    ]
    newer = plugins.Library(tmp_path / "x.so", 90, "f" * 64, (), (), "nvcc")
    monkeypatch.setattr(plugins, "cached", lambda sm, and_newer: newer)
    assert any(
        note.startswith("plugin library: built with ") and "this version of onnxfuse has ffffffffffff" in note
        for note in inspecting.describe(path)["notes"]
    )


def test_a_model(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    models.saved(models.block("float16"), tmp_path, "m.onnx")
    done = run_cli("inspect", "m.onnx")
    assert done.returncode == 0, done.stderr
    assert "m.onnx: ONNX model, 4 nodes, opset 17, float16" in done.stdout
    assert "input x: float16[batch, 5, 64]" in done.stdout
    assert "fused operators: 1 BiasGelu, 1 SkipLayerNormalization, 1 Silu" in done.stdout
    assert "plugins for: BiasGelu, SkipLayerNormalization" in done.stdout
    found = json.loads(run_cli("inspect", "m.onnx", "--json").stdout)
    assert found["functions"] == ["BiasGelu", "Silu", "SkipLayerNormalization"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent", "no such file; name an engine, an ONNX model, or the folder of a kit"),
        (".", "kit.json cannot be read"),
        ("empty.engine", "is empty; name an engine"),
        ("pipe.engine", "is not an ordinary file; name an engine"),
        ("pipes", "kit.json is no ordinary file"),
        ("bad.onnx", "not an ONNX model"),
    ],
)
def test_what_is_neither(name: str, says: str, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    (tmp_path / "bad.onnx").write_text("no model")
    (tmp_path / "empty.engine").touch()
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipe.engine")
    os.mkfifo(tmp_path / "pipes" / "kit.json")
    done = run_cli("inspect", name)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


KIT = {
    "schema": 1, "onnxfuse": "1.0", "model": "m.onnx", "gpu": "h200", "sm": 90, "shapes": {"x": [[1, 8], [4, 24], [8, 64]]},
    "engines": {"fused": {"model": "fused.onnx", "plugins": ["BiasGelu"]}}, "reference": "onnxruntime", "inputs": {"feeds": [{}]},
    "files": {},
}  # fmt: skip


def test_a_kit_is_told_in_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "kit.json").write_text(json.dumps(KIT))
    first, *others = inspecting.lines(inspecting.describe(tmp_path))
    assert first == f"{tmp_path}: kit of m.onnx for h200 (sm_90), made by onnxfuse 1.0"
    assert "  engine fused: fused.onnx, plugins BiasGelu" in others
    assert "  input x: 1x8 to 8x64, best at 4x24" in others
    (tmp_path / "kit.json").write_text(json.dumps({**KIT, "gpu": "sm_90"}))
    assert "kit of m.onnx for sm_90, made" in next(inspecting.lines(inspecting.describe(tmp_path)))
    (tmp_path / "kit.json").write_text(json.dumps({**KIT, "compatible": "ampere+"}))
    assert "kit of m.onnx for every GPU from sm_80 on (ampere+), made" in next(inspecting.lines(inspecting.describe(tmp_path)))


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("shapes", {"x": [[1], [2]]}, r"shapes\.x: "),
        ("shapes", {"x": 7}, r"shapes\.x: 7 is not of type 'array'"),
        ("engines", {"fused": {}}, r"engines\.fused: 'model' is a required property"),
        ("engines", {"fused": {"model": "f", "plugins": [None]}}, r"engines\.fused\.plugins\[0\]: "),
        ("inputs", {"feeds": 3}, r"inputs\.feeds: "),
        ("gpu", None, "gpu: None is not of type 'string'"),
        ("files", ["a"], "damaged"),
    ],
)
def test_a_kit_from_elsewhere_may_hold_anything(part: str, value: object, says: str, tmp_path: Path) -> None:
    (tmp_path / "kit.json").write_text(json.dumps({**KIT, part: value}))
    with pytest.raises(BadInput, match=says):
        inspecting.describe(tmp_path)
    del (without := dict(KIT))[part]
    (tmp_path / "kit.json").write_text(json.dumps(without))
    with pytest.raises(BadInput, match=f"'{part}' is a required property|damaged"):
        inspecting.describe(tmp_path)
