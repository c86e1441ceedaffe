"""`onnxfuse doctor`: what this machine can do, and how to get the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import typer

from onnxfuse import __version__
from onnxfuse.commands.faults import one_line
from onnxfuse.errors import OnnxfuseError
from onnxfuse.plugins import cache_dir, find_nvcc, on_absolute_path

FREE_GB_WANTED = 2.0  # a compiled library is 1 MB; engines and timing caches of large models are what needs room


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for."""

    name: str
    ok: bool
    found: str
    """What is there: a version, a path; or what is wrong with it."""
    remedy: str = ""
    """How to get it, in one line; empty where nothing is missing."""


@dataclass(frozen=True)
class Ability:
    """One command, and what keeps it from working here."""

    name: str
    missing: tuple[str, ...]

    @property
    def works(self) -> bool:
        return not self.missing


# What each command cannot do without, by the findings' names.
NEEDS = {
    "optimize": ("Python", "onnx", "onnx-graphsurgeon", "onnxruntime"),
    "plugins build": ("nvcc", "C++ compiler", "cache"),
    "build-engine": ("NVIDIA GPU", "TensorRT", "pycuda", "cuda-bindings"),
}


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON instead of a table."),
) -> None:
    """Say what this machine can do, and how to get the rest."""
    findings = [check() for check in CHECKS]
    can = abilities(findings)
    if as_json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "onnxfuse": __version__,
                    "findings": [asdict(finding) for finding in findings],
                    "can": {ability.name: {"works": ability.works, "missing": ability.missing} for ability in can},
                },
                indent=2,
            )
        )
    else:
        _print_table(findings, can)


def abilities(findings: list[Finding]) -> list[Ability]:
    """Which commands work, given what was found."""
    absent = {finding.name for finding in findings if not finding.ok}
    return [Ability(name, tuple(need for need in needs if need in absent)) for name, needs in NEEDS.items()]


def _print_table(findings: list[Finding], can: list[Ability]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=f"onnxfuse {__version__} on this machine", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "what", "found, or how to get it"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = "[green]yes[/]" if finding.ok else "[yellow]no[/]"
        remedy = f"\n[yellow]→[/] {escape(finding.remedy)}" if finding.remedy else ""
        table.add_row(mark, finding.name, escape(finding.found) + remedy)
    console.print(table)
    for ability in can:
        want = ", ".join(ability.missing)
        answer = f"[yellow]not here[/], for want of {want}" if want else "[green]works here[/]"
        console.print(f"onnxfuse {ability.name}: {answer}", highlight=False, soft_wrap=True)


def _python() -> Finding:
    return Finding("Python", True, f"{platform.python_version()} ({sys.executable})")


def _package(name: str, module: str, remedy: str) -> Callable[[], Finding]:
    """A check that imports `module`: an installed package whose libraries do not load is no use."""

    def check() -> Finding:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as fault:
            if fault.name == module.partition(".")[0]:
                return Finding(name, False, "not installed", remedy)
            return Finding(name, False, f"does not load: {fault}", remedy)
        except Exception as fault:
            return Finding(name, False, f"does not load: {one_line(str(fault) or repr(fault))}", remedy)
        return Finding(name, True, _version(name, found))

    return check


def _version(name: str, module: object) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "version unknown"))


def _nvcc() -> Finding:
    try:
        nvcc = find_nvcc()
    except OnnxfuseError as fault:
        return _missing("nvcc", fault)
    return Finding("nvcc", True, f"{nvcc.release} ({nvcc.path})")


def _missing(name: str, fault: OnnxfuseError) -> Finding:
    """A finding from an error line of the form "what: why; remedy"."""
    why, _, remedy = str(fault).rpartition("; ")
    return Finding(name, False, why or remedy, remedy)


def _cxx() -> Finding:
    name = os.environ.get("CXX") or "g++"
    path = on_absolute_path(name)
    if not path:
        return Finding("C++ compiler", False, f"{name} is not on PATH", "apt-get install g++, or the like; or set CXX")
    lines = _output([path, "--version"]).splitlines()
    return Finding("C++ compiler", True, f"{lines[0] if lines else 'version unknown'} ({path})")


def _gpu() -> Finding:
    remedy = "needs an NVIDIA GPU of compute capability 7.5 or newer and its driver"
    smi = on_absolute_path("nvidia-smi")
    if not smi:
        return Finding("NVIDIA GPU", False, "no nvidia-smi on PATH", remedy)
    answer = _output([smi, "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == 3]
    if not rows:
        return Finding("NVIDIA GPU", False, "nvidia-smi lists none", remedy)
    name, capability, driver, memory = rows[0]
    others = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    found = f"{name}, sm_{capability.replace('.', '')}, {memory}, driver {driver}{others}"
    try:
        too_old = tuple(map(int, capability.split("."))) < (7, 5)
    except ValueError:
        too_old = False
    return Finding("NVIDIA GPU", not too_old, found, remedy if too_old else "")


def _tensorrt() -> Finding:
    from onnxfuse.engine import trt

    try:
        version = trt.version()
    except OnnxfuseError as fault:
        return _missing("TensorRT", fault)
    return Finding("TensorRT", True, f"{version}, supported")


def _cache() -> Finding:
    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / 1e9
    found = f"{folder}, {free:.1f} GB free"
    if not os.access(existing, os.W_OK):
        return Finding("cache", False, f"{found}, not writable", "set ONNXFUSE_CACHE to a folder that can be written")
    if free < FREE_GB_WANTED:
        return Finding("cache", False, found, f"free {FREE_GB_WANTED:.0f} GB, or set ONNXFUSE_CACHE to a larger disk")
    return Finding("cache", True, found)


def _output(command: list[str]) -> str:
    """What a command prints; empty where it fails or hangs."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


_REINSTALL = "pip install --force-reinstall onnxfuse"

CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _package("onnx", "onnx", _REINSTALL),
    _package("onnx-graphsurgeon", "onnx_graphsurgeon", _REINSTALL),
    _package("onnxruntime", "onnxruntime", _REINSTALL),
    _nvcc,
    _cxx,
    _gpu,
    _tensorrt,
    _package("pycuda", "pycuda.driver", 'pip install "onnxfuse[gpu]" (compiles against a CUDA toolkit)'),
    _package("cuda-bindings", "cuda.bindings.runtime", 'pip install "onnxfuse[gpu]"'),
    _cache,
)
