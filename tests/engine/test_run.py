"""What is checked before anything reaches the GPU."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.engine import run
from onnxfuse.engine.manifest import path_of
from onnxfuse.engine.run import Engine, cast_feeds, check_feeds
from onnxfuse.engine.trt import TensorSpec
from onnxfuse.errors import BadInput, MissingHere
from tests.engine.test_manifest import example

X = TensorSpec("x", "float16", (-1, 4), True, False)
K = TensorSpec("k", "int64", (), True, False)
B = TensorSpec("b", "bfloat16", (4,), True, False)


def test_feeds_in_the_engines_types() -> None:
    x = np.asfortranarray(np.ones((2, 4), np.float16))
    got = check_feeds((X, K), {"k": np.int64(3), "x": x}, "e")
    assert list(got) == ["x", "k"]
    assert got["x"].flags.c_contiguous
    assert got["k"].shape == ()
    assert check_feeds((B,), {"b": np.ones(4, ml_dtypes.bfloat16)}, "e")["b"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({}, "input x is not given; give an array of type float16"),
        ({"x": np.ones((2, 4), np.float32)}, "input x is float32; the engine takes float16"),
        ({"x": np.ones(4, np.float16)}, r"input x has shape \(4,\); the engine takes \(-1, 4\)"),
        ({"x": np.ones((2, 4), np.float16), "z": np.ones(1)}, "no input z; the inputs are x"),
    ],
)
def test_feeds_refused(feeds: dict[str, np.ndarray], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        check_feeds((X,), feeds, "e")


def test_floats_are_cast_and_integers_are_not() -> None:
    feeds = {"x": np.ones((1, 4), np.float32), "k": np.array(2, np.int32), "b": np.ones(4, np.float32), "unused": np.ones(1)}
    cast = cast_feeds((X, K, B), feeds)
    assert {name: array.dtype.name for name, array in cast.items()} == {"x": "float16", "k": "int32", "b": "bfloat16"}


def test_arrays_are_seen_as_bytes_without_a_copy() -> None:
    for array in (np.zeros((2, 3), ml_dtypes.bfloat16), np.zeros((), np.int64), np.zeros((0, 3), np.float16)):
        view = run._bytes(array)
        assert view.dtype == np.uint8
        assert view.size == array.nbytes
        assert array.size == 0 or np.shares_memory(view, array)


def engine_with_manifest(folder: Path, data: bytes, manifest_for: bytes, **changes: object) -> Path:
    path = folder / "m.engine"
    path.write_bytes(data)
    manifest = dataclasses.replace(example(), engine_sha256=hashlib.sha256(manifest_for).hexdigest(), **changes)  # type: ignore[arg-type]
    path_of(path).write_text(manifest.to_json())
    return path


def test_an_engine_that_its_manifest_was_not_written_for_is_refused(tmp_path: Path) -> None:
    path = engine_with_manifest(tmp_path, b"engine with other code", manifest_for=b"engine")
    with pytest.raises(BadInput, match=r"m\.engine\.json was written for another engine, so this one is not trusted"):
        Engine.load(path)


def test_an_engine_of_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = engine_with_manifest(tmp_path, b"e", b"e")
    monkeypatch.setattr(run.trt, "tensorrt", lambda: None)
    monkeypatch.setattr(run.trt, "gpu", lambda: run.trt.Device("NVIDIA L4", 89, "580.1"))
    with pytest.raises(BadInput, match=r"built for NVIDIA H200 \(sm_90\), here is NVIDIA L4 \(sm_89\); build it again here"):
        Engine.load(path)


def test_no_engine_and_a_broken_manifest(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        Engine.load(tmp_path / "absent.engine")
    path = engine_with_manifest(tmp_path, b"e", b"e")
    path_of(path).write_text("{")
    with pytest.raises(BadInput, match="not an engine manifest"):
        Engine.load(path)


def test_without_tensorrt_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingHere("TensorRT is not installed here")

    path = engine_with_manifest(tmp_path, b"e", b"e")
    monkeypatch.setattr(run.trt, "tensorrt", missing)
    with pytest.raises(MissingHere):
        Engine.load(path)


def test_an_engine_that_holds_code_needs_a_manifest(tmp_path: Path) -> None:
    """Refused before TensorRT sees it."""
    path = tmp_path / "m.engine"
    path.write_bytes(b"plan" + run.CODE + b"plugin library")
    with pytest.raises(BadInput, match=r"cannot load this engine: it holds code .*no manifest m\.engine\.json vouches for it"):
        Engine.load(path)
