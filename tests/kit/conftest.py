"""A kit of the small block, and a machine that is none: stand-ins for TensorRT and the CUDA driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxfuse import gpus
from onnxfuse.errors import MissingHere
from onnxfuse.kit import make
from tests.engine import models

HERE = Path(__file__).resolve().parent
SHAPES = ["x:1x5x64..3x5x64..8x5x64"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.saved(models.block("float16"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory, require_external: Callable[[str], None]) -> make.Kit:
    """A kit for an H200, made once; tests that change it take a copy."""
    try:
        return make.make(model, tmp_path_factory.mktemp("made") / "kit", gpu=gpus.resolve("h200"), shapes=SHAPES)
    except MissingHere as reason:
        require_external(str(reason))
        raise


@pytest.fixture
def kit(made: make.Kit, tmp_path: Path) -> Path:
    shutil.copytree(made.folder, tmp_path / "kit")
    return tmp_path / "kit"


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(HERE / "stand_in" / "cuda.cpp")]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def run_kit(driver: Path, model: Path, tmp_path: Path) -> Run:
    """`run_kit(folder, "--samples", 16)` as a user runs it, in another folder."""

    def run(folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {
            "PYTHONPATH": str(HERE / "stand_in"), "LD_LIBRARY_PATH": str(driver), "STAND_IN_FUNCTIONS": str(model), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, str(folder / "kit.py"), *map(str, arguments)], cwd=tmp_path, env={**os.environ, **own, **environment},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return run
