"""Fixtures of the plugin library's tests: compiled libraries, and what comes from package registries."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from onnxfuse import plugins
from onnxfuse.errors import MissingHere


def _external() -> ModuleType:
    spec = importlib.util.spec_from_file_location("external", Path(__file__).with_name("external.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


external = _external()


@pytest.fixture(scope="session")
def headers(require_external: Callable[[str], NoReturn]) -> Callable[[str], Path]:
    """`headers("10.16")`: TensorRT's official include folder."""

    def get(version: str) -> Path:
        try:
            return external.headers(version)
        except external.Absent as reason:
            require_external(f"TensorRT {version}'s headers: {reason}")

    return get


@pytest.fixture(scope="session")
def tensorrt(require_external: Callable[[str], NoReturn]) -> Callable[[str], object]:
    """`tensorrt("11.2")`: TensorRT's libraries and Python bindings."""

    def get(version: str) -> object:
        try:
            return external.tensorrt(version)
        except external.Absent as reason:
            require_external(f"TensorRT {version}: {reason}")

    return get


@pytest.fixture(scope="session")
def nvcc(require_external: Callable[[str], NoReturn]) -> plugins.Nvcc:
    """The CUDA compiler."""
    try:
        return plugins.find_nvcc()
    except MissingHere as reason:
        require_external(str(reason))


@pytest.fixture(scope="session")
def library(nvcc: plugins.Nvcc) -> Callable[[int], plugins.Library]:
    """`library(90)`: the library compiled for sm_90 by the first test that asks, in the user's cache."""
    return plugins.build


@pytest.fixture(scope="session")
def emulated(nvcc: plugins.Nvcc, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`emulated("Recurrence")`: a library of that plugin's kernels, emulated. CUDA's headers alone are needed, not its compiler."""
    here = Path(__file__).parent
    flags = ["-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-isystem", str(nvcc.path.parent.parent / "include")]
    flags += [f"-I{here}", "-include", str(here / "emulator.h")]

    def build(folder: str) -> Path:
        work = tmp_path_factory.mktemp("emulated")
        objects = []
        for unit in [here / "emulator.cpp", *sorted((plugins.sources() / folder).glob("*.cu"))]:
            objects.append(work / f"{unit.stem}.o")
            subprocess.run(["g++", *flags, "-x", "c++", "-c", unit, "-o", objects[-1]], check=True)
        subprocess.run(["g++", "-shared", "-o", work / "emulated.so", *objects], check=True)
        return work / "emulated.so"

    return build
