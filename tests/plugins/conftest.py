"""Fixtures of the plugin library's tests: compiled libraries, and what comes from package registries."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from onnxfuse import plugins


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
    return _fetched(external.headers, "TensorRT {}'s headers", require_external)


@pytest.fixture(scope="session")
def tensorrt(require_external: Callable[[str], NoReturn]) -> Callable[[str], object]:
    """`tensorrt("11.2")`: TensorRT's libraries and Python bindings."""
    return _fetched(external.tensorrt, "TensorRT {}", require_external)


def _fetched(fetch: Callable[[str], Any], what: str, require_external: Callable[[str], NoReturn]) -> Callable[[str], Any]:
    """`fetch` of a version; the running test is skipped, or fails, where its registry is absent."""

    def get(version: str) -> Any:
        try:
            return fetch(version)
        except external.Absent as reason:
            require_external(f"{what.format(version)}: {reason}")

    return get


@pytest.fixture(scope="session")
def library(nvcc: plugins.Nvcc) -> Callable[[int], plugins.Library]:
    """`library(90)`: the library compiled for sm_90 by the first test that asks, in the user's cache."""
    return plugins.build


@pytest.fixture(scope="session")
def emulated(nvcc: plugins.Nvcc, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`emulated("Recurrence")`: a library of the kernels of plugins, emulated. CUDA's headers alone are needed, not its compiler."""
    here = Path(__file__).parent
    flags = ["-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-isystem", str(nvcc.path.parent.parent / "include")]
    flags += [f"-I{here}", "-include", str(here / "emulator.h")]

    def build(*folders: str) -> Path:
        work = tmp_path_factory.mktemp("emulated")
        units = [here / "emulator.cpp", *(unit for folder in folders for unit in sorted((plugins.sources() / folder).glob("*.cu")))]
        objects = [work / f"{unit.parent.name}-{unit.stem}.o" for unit in units]
        for unit, made in zip(units, objects, strict=True):
            subprocess.run(["g++", *flags, "-x", "c++", "-c", unit, "-o", made], check=True)
        subprocess.run(["g++", "-shared", "-o", work / "emulated.so", *objects], check=True)
        return work / "emulated.so"

    return build
