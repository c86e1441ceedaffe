"""What is loaded, from where, and on whose word: the rules that hold for the whole package."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfuse import plugins
from onnxfuse.engine import manifest as manifests
from onnxfuse.engine import run
from onnxfuse.engine.manifest import Manifest, PluginUse
from onnxfuse.errors import BadInput
from tests.engine import models
from tests.engine.test_run import engine_with_manifest
from tests.security.operations import proto

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "onnxfuse").rglob("*.py"))
CODE = b"plan" + run.CODE + b"plugin library"


# Engines ---------------------------------------------------------------------------------------------------------------


def test_code_runs_only_on_the_word_of_a_manifest_or_the_user(tmp_path: Path) -> None:
    good = engine_with_manifest(tmp_path, CODE, CODE)
    assert run.vouched(CODE, good) is not None
    with pytest.raises(BadInput, match=r"was written for another engine, .* or give --trust"):
        run.vouched(CODE + b"more", good)
    assert run.vouched(CODE + b"more", good, trust=True) is None
    manifests.path_of(good).unlink()
    with pytest.raises(BadInput, match=r"no manifest .* vouches for it; .* or give --trust"):
        run.vouched(CODE, good)
    assert run.vouched(CODE, good, trust=True) is None


def test_an_engine_without_code_needs_no_manifest(tmp_path: Path) -> None:
    assert run.vouched(b"plan", tmp_path / "m.engine") is None


def test_a_damaged_manifest_vouches_for_nothing(tmp_path: Path) -> None:
    path = engine_with_manifest(tmp_path, CODE, CODE)
    manifests.path_of(path).write_text("{")
    with pytest.raises(BadInput, match="not an engine manifest"):
        run.vouched(CODE, path)
    assert run.vouched(CODE, path, trust=True) is None


def test_host_code_is_allowed_only_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What TensorRT is told, for an engine with a manifest that embeds plugins, one that does not, and on the user's word."""
    told: list[bool] = []
    monkeypatch.setattr(run.trt, "tensorrt", lambda: None)
    monkeypatch.setattr(run.trt, "gpu", lambda: run.trt.Device("NVIDIA H200", 90, "580.1"))
    monkeypatch.setattr(run.trt, "activate", lambda: None)

    class Told(Exception):
        pass

    def deserialize(data: bytes, what: str, host_code: bool) -> None:
        told.append(host_code)
        raise Told

    monkeypatch.setattr(run.trt, "deserialize", deserialize)
    embedded = PluginUse(None, "0" * 64, True, ("BiasGelu",))
    for plugin_use, trust in ((embedded, False), (None, False), (None, True)):
        path = engine_with_manifest(tmp_path, b"plan", b"plan", plugins=plugin_use)
        with pytest.raises(Told):
            run.Engine.load(path, trust=trust)
    bare = tmp_path / "bare.engine"
    bare.write_bytes(CODE)
    with pytest.raises(Told):
        run.Engine.load(bare, trust=True)
    assert told == [True, False, True, True]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNXFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_library_beside_an_engine_is_hashed_and_loaded_from_a_private_copy(own_cache: Path, tmp_path: Path) -> None:
    content = b"\x7fELF library"
    use = PluginUse("m.so", hashlib.sha256(content).hexdigest(), False, ("BiasGelu",))
    (tmp_path / "m.so").write_bytes(content)
    loaded = run._library(use, 90, tmp_path / "m.engine")
    (tmp_path / "m.so").write_bytes(b"replaced after the look at its hash")
    assert loaded.is_relative_to(own_cache)
    assert loaded.read_bytes() == content
    assert stat.S_IMODE(loaded.parent.stat().st_mode) == 0o700
    with pytest.raises(BadInput, match="is not the one that it was built with, and is not loaded"):
        run._library(use, 90, tmp_path / "m.engine")
    (tmp_path / "m.so").unlink()
    with pytest.raises(BadInput, match=r"its plugin library m\.so cannot be read: no such file"):
        run._library(use, 90, tmp_path / "m.engine")


def test_a_private_copy_that_was_changed_is_made_again(own_cache: Path) -> None:
    first = plugins.keep(b"content")
    first.write_bytes(b"changed")
    assert plugins.keep(b"content").read_bytes() == b"content"


def test_private_copies_are_in_no_folder_that_others_can_write_to(own_cache: Path) -> None:
    plugins.keep(b"content").parent.chmod(0o777)
    with pytest.raises(BadInput, match="others can write there; set ONNXFUSE_CACHE"):
        plugins.keep(b"content")


@pytest.mark.parametrize("name", ["../m.so", "/tmp/m.so", "sub/m.so", "", ".."])
def test_a_manifest_cannot_name_a_library_elsewhere(name: str, tmp_path: Path) -> None:
    path = engine_with_manifest(tmp_path, b"plan", b"plan", plugins=PluginUse("m.so", "0" * 64, False, ("BiasGelu",)))
    text = manifests.path_of(path).read_text().replace('"m.so"', f'"{name}"')
    with pytest.raises(BadInput, match="damaged engine manifest"):
        Manifest.from_json(text, "m.engine.json")


# Where modules and programs come from ------------------------------------------------------------------------------------


PLANTED = (
    "numpy",
    "onnx",
    "onnxruntime",
    "typer",
    "rich",
    "tensorrt",
    "pycuda",
    "json",
    "subprocess",
    "google",
    "onnx_graphsurgeon",
    "ml_dtypes",
)


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Path]:
    """A folder with a model, and with modules, compilers and libraries that leave a mark when they are run."""
    mark = tmp_path / "mark"
    folder = tmp_path / "models"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').write({name!r})\n")
    for name in ("nvcc", "g++", "c++filt", "nvidia-smi", "git"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} > {mark}\n")
        (folder / name).chmod(0o755)
    for name in ("libcuda.so.1", "libonnxfuse_plugins.so", "libnvinfer.so.10"):
        (folder / name).write_bytes(b"no library")
    models.saved(proto(2.0), folder, "m.onnx")
    yield folder
    assert not mark.exists(), f"{mark.read_text()} of the current folder was run"


@pytest.mark.parametrize("launcher", [("-m", "onnxfuse"), (str(ROOT / "cli.py"),)])
@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor",),
        ("explain", "m.onnx"),
        ("optimize", "m.onnx", "-o", "out.onnx", "--policy", "all"),
        ("plugins", "list"),
        ("inspect", "m.onnx"),
        ("build-engine", "m.onnx"),
    ],
)
def test_nothing_is_run_from_the_current_folder(launcher: tuple[str, ...], arguments: tuple[str, ...], planted: Path) -> None:
    environment = {**os.environ, "PATH": os.pathsep.join(["", ".", os.environ["PATH"]]), "ONNXFUSE_CACHE": str(planted.parent / "cache")}
    done = subprocess.run(
        [sys.executable, *launcher, *arguments], cwd=planted, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode in (0, 3), done.stderr
    assert "Traceback" not in done.stderr


# What the sources do not do ----------------------------------------------------------------------------------------------


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_pickle_no_shell_no_evaluation(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
    for name, call in calls(tree):
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        assert name not in ("eval", "exec", "compile", "os.system", "os.popen", "tempfile.mktemp", "subprocess.getoutput"), ast.unparse(
            call
        )
        if name in ("np.load", "numpy.load"):
            assert isinstance(options.get("allow_pickle"), ast.Constant), ast.unparse(call)
            assert options["allow_pickle"].value is False, ast.unparse(call)  # type: ignore[attr-defined]
        if name in ("np.save", "numpy.save"):
            assert "allow_pickle" in options, ast.unparse(call)
        assert "shell" not in options, ast.unparse(call)


def test_python_objects_in_data_are_not_made(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "exploded"), "w")

    models.saved(proto(2.0), tmp_path, "m.onnx")
    (tmp_path / "e.engine").write_bytes(b"plan")
    np.savez(tmp_path / "in.npz", x=np.array([Bomb()], dtype=object))
    optimized = run_cli("optimize", "m.onnx", "-o", "o.onnx", "--data", "in.npz")
    assert optimized.returncode == 2
    assert "holds Python objects, which are not read" in optimized.stderr
    looked = run_cli("run", "e.engine", "--data", "in.npz")
    assert looked.returncode == 2
    assert "holds Python objects, which are not read" in looked.stderr
    assert not (tmp_path / "exploded").exists()


# Temporary files ---------------------------------------------------------------------------------------------------------


def test_temporary_files_are_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the output, with a name that cannot be foreseen, readable by the user alone until all is written."""
    from onnxfuse.graph.files import atomic, whole_folder

    names = set()
    for _ in range(3):
        with atomic(tmp_path / "out") as part, whole_folder(tmp_path / "folder") as work:
            assert part.parent == work.parent == tmp_path
            assert stat.S_IMODE(part.stat().st_mode) == 0o600
            assert stat.S_IMODE(work.stat().st_mode) == 0o700
            names |= {part.name, work.name}
        (tmp_path / "folder").rmdir()
    assert len(names) == 6


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """Names of temporary files are made with O_EXCL: a link of that name makes another name be taken."""
    import tempfile

    from onnxfuse.graph.files import atomic

    victim = tmp_path / "victim"
    victim.write_text("mine")
    names = iter(["taken", "free"])

    class Names:
        def __iter__(self) -> Names:
            return self

        def __next__(self) -> str:
            return next(names)

    (tmp_path / ".out.taken.part").symlink_to(victim)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tempfile, "_name_sequence", Names())
        with atomic(tmp_path / "out") as part:
            part.write_text("new")
    assert victim.read_text() == "mine"
    assert (tmp_path / "out").read_text() == "new"


# The threat model ----------------------------------------------------------------------------------------------------------


def test_every_line_of_the_threat_model_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and not re.match(r"\|\s*(threat|-)", line, re.I)]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test in: {row}"
        for path, function in named:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{path} has no {function}"
