"""What the tests of the plugin library need from package registries: TensorRT's official headers and its real libraries.

Everything is fetched by the registries' own clients into .cache/external (ONNXFUSE_EXTERNAL_CACHE overrides it), once, and is never
committed. `Absent` says what could not be had and why.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("ONNXFUSE_EXTERNAL_CACHE") or ROOT / ".cache" / "external")


class Absent(Exception):
    """Something from a registry is not to be had here; the message says why."""


@dataclass(frozen=True)
class Crate:
    """A crate that carries TensorRT headers, and the folder inside it."""

    version: str
    folder: str


# TensorRT version -> where its headers come from. 10.14 is in a PyPI package, the others in versions of one crate.
CRATES = {
    "10.16": Crate("0.5.0", "TensorRT-Headers/TRT-Enterprise-10.16"),
    "11.0": Crate("0.6.0+rtx1.5", "TensorRT-Headers/TRT-Enterprise-11.0"),
    "11.4": Crate("0.9.1+rtx1.7", "TensorRT-Headers/TRT-Enterprise-11.4"),
}
HEADERS = ("10.14", *CRATES)

# TensorRT version -> Maven version of its libraries, PyPI version of its Python bindings.
LIBRARIES = {"10.15": ("10.15-1.5.13", "10.15.1.29"), "11.2": ("11.2-1.5.14", "11.2.1.2")}


@dataclass(frozen=True)
class TensorRT:
    """A TensorRT without builder resources: its registry works on a machine without a GPU."""

    libraries: Path
    site: Path


def headers(version: str) -> Path:
    """The include folder of TensorRT `version`, one of HEADERS."""
    if version == "10.14":
        place = _once(f"headers-{version}", lambda work: _pip("kernel-lens==2.0.1", work))
        return place / "kernel_lens" / "include" / "tensorrt"
    return _once(f"headers-{version}", lambda work: _crate(CRATES[version], work))


def tensorrt(version: str) -> TensorRT:
    """The libraries and Python bindings (of the running Python) of TensorRT `version`, one of LIBRARIES."""
    maven, bindings = LIBRARIES[version]
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return TensorRT(
        libraries=_once(f"tensorrt-{version}", lambda work: _maven(maven, work)),
        site=_once(f"bindings-{version}-{python}", lambda work: _pip(f"tensorrt_cu13_bindings=={bindings}", work)),
    )


def triton_schema() -> Path:
    """Triton's model configuration as a Python module, made from its model_config.proto."""
    place = _once("triton-2.73", lambda work: _pip("tritonclient==2.73.0", work))
    return place / "tritonclient" / "grpc" / "model_config_pb2.py"


def _once(name: str, fill: Callable[[Path], None]) -> Path:
    """CACHE/name, filled in a temporary folder and renamed; test processes wait for each other."""
    place = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f"{name}.lock"):
        if not place.is_dir():
            work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
            try:
                fill(work)
                work.rename(place)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return place


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _client(command: list[str], *, cwd: Path, **environment: str) -> None:
    if not shutil.which(command[0]):
        raise Absent(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        raise Absent(f"`{' '.join(command[:3])} ...` failed: {lines[0] if lines else done.returncode}")


def _pip(requirement: str, work: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    _client([*pip, "--only-binary=:all:", "--target", str(work), requirement], cwd=work)


def _crate(crate: Crate, work: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="cargo-", dir=CACHE) as scratch:
        project = Path(scratch) / "project"
        (project / "src").mkdir(parents=True)
        (project / "src" / "lib.rs").touch()
        (project / "Cargo.toml").write_text(
            f'[package]\nname = "headers"\nversion = "0.0.0"\nedition = "2021"\n\n[dependencies]\ntrtx-sys = "={crate.version}"\n'
        )
        home = Path(scratch) / "home"
        _client(["cargo", "fetch", "--quiet", "--target", "x86_64-unknown-linux-gnu"], cwd=project, CARGO_HOME=str(home))
        found = list(home.glob(f"registry/src/*/trtx-sys-{crate.version}/{crate.folder}"))
        if not found:
            raise Absent(f"crate trtx-sys {crate.version} has no {crate.folder}")
        shutil.copytree(found[0], work, dirs_exist_ok=True)


def _maven(version: str, work: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="maven-", dir=CACHE) as scratch:
        artifact = f"org.bytedeco:tensorrt:{version}:jar:linux-x86_64-redist"
        get = ["mvn", "--quiet", "--batch-mode", "dependency:get", f"-Dartifact={artifact}", "-Dtransitive=false"]
        _client([*get, f"-Dmaven.repo.local={scratch}"], cwd=Path(scratch))
        jars = list(Path(scratch).rglob(f"tensorrt-{version}-linux-x86_64-redist.jar"))
        if not jars:
            raise Absent(f"Maven got no {artifact}")
        with zipfile.ZipFile(jars[0]) as jar:
            for entry in jar.namelist():
                name = Path(entry).name
                if name.startswith(("libnvinfer.so.", "libnvinfer_plugin.so.", "libnvonnxparser.so.")):
                    with jar.open(entry) as source, (work / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
