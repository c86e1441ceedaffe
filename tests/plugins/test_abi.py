"""The own header of TensorRT's plugin interface against the official ones: sizes, offsets, enumerators, virtual table slots."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxfuse import plugins

HERE = Path(__file__).parent
VERSIONS = ("10.14", "10.16", "11.0", "11.4")
PROBES = ("ProbePlugin", "ProbeCore", "ProbeBuild", "ProbeRuntime", "ProbeCreator", "ProbeDimension", "ProbeBuilder")


def include_flags(official: Path | None, nvcc: plugins.Nvcc | None) -> list[str]:
    if official is None:
        return []
    assert nvcc is not None
    cuda = nvcc.path.parent.parent / "include"
    return ["-DONNXFUSE_TENSORRT_HEADERS", "-isystem", str(official), "-isystem", str(cuda)]


def facts(work: Path, flags: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """What abi_facts.cpp prints, and the functions in the virtual table of each probe, in order."""
    command = ["g++", "-std=c++17", "-Wno-invalid-offsetof", "-fdump-lang-class", *flags, str(HERE / "abi_facts.cpp"), "-o", "facts"]
    subprocess.run(command, cwd=work, check=True)
    printed = subprocess.run([work / "facts"], check=True, capture_output=True, text=True).stdout.splitlines()
    (dump,) = work.glob("*.class")
    return printed, virtual_tables(dump.read_text())


def virtual_tables(dump: str) -> dict[str, list[str]]:
    tables = {}
    for block in dump.split("\n\n"):
        if (match := re.match(r"Vtable for (\w+)\n", block)) and match[1] in PROBES:
            # "16    (int (*)(...))ProbePlugin::clone": offset in bytes, then the function; two header slots come first.
            slots = re.findall(r"^(\d+)\s+\(int \(\*\)\(\.\.\.\)\)(\S+)", block, re.MULTILINE)
            tables[match[1]] = [f"{offset} {name}" for offset, name in slots]
    return tables


def test_own_header_has_the_known_layout(tmp_path: Path) -> None:
    printed, tables = facts(tmp_path, [])
    assert {"sizeof Dims64 72", "sizeof PluginTensorDesc 88", "sizeof DynamicPluginTensorDesc 304", "sizeof PluginField 24"} <= set(printed)
    assert "interface IPluginCreatorV3One 'PLUGIN CREATOR_V3ONE' 1.0" in printed
    assert set(tables) == set(PROBES)
    # The table pointer points behind two slots (offset to top, type), so slot n is at 16 + 8 n.
    assert tables["ProbePlugin"][2:] == [
        "16 ProbePlugin::getAPILanguage",
        "24 ProbePlugin::getInterfaceInfo",
        "32 ProbePlugin::~ProbePlugin",
        "40 ProbePlugin::~ProbePlugin",
        "48 ProbePlugin::getCapabilityInterface",
        "56 ProbePlugin::clone",
    ]
    assert tables["ProbeBuild"][-1] == "128 ProbeBuild::getMetadataString"


@pytest.mark.external
@pytest.mark.parametrize("version", VERSIONS)
def test_own_header_equals_the_official_one(version: str, headers: Callable[[str], Path], nvcc: plugins.Nvcc, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "official").mkdir()
    own = facts(tmp_path / "own", [])
    official = facts(tmp_path / "official", include_flags(headers(version), nvcc))
    assert own[0] == official[0]
    assert own[1] == official[1]
    assert set(own[1]) == set(PROBES)


@pytest.mark.external
@pytest.mark.parametrize("version", VERSIONS)
def test_glue_compiles_with_the_official_headers(version: str, headers: Callable[[str], Path], nvcc: plugins.Nvcc) -> None:
    flags = ["-std=c++17", "-Wall", "-Werror", "-fsyntax-only", *include_flags(headers(version), nvcc)]
    for source in sorted(plugins.sources().rglob("*.cpp")):
        subprocess.run(["g++", *flags, str(source)], check=True)


@pytest.mark.external
@pytest.mark.parametrize("version", VERSIONS)
def test_the_cpp_example_compiles_with_the_official_headers(
    version: str, headers: Callable[[str], Path], nvcc: plugins.Nvcc, root: Path
) -> None:
    cuda = nvcc.path.parent.parent / "include"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations", "-fsyntax-only"]
    include = ["-isystem", str(headers(version)), "-isystem", str(cuda)]
    subprocess.run(["g++", *flags, *include, str(root / "examples" / "cpp" / "run_engine.cpp")], check=True)
