"""`onnxfuse plugins` as a user types it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxfuse import occupancy, plugins

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_list(run_cli: Run) -> None:
    done = run_cli("plugins", "list")
    assert done.returncode == 0, done.stderr
    for text in (*plugins.PLUGIN_OPS, "float32, float16, bfloat16", "up to 16384", "sm_75 and newer", "h200", "rtx4090"):
        assert text in done.stdout
    gpus = {op.name: op.gpus for op in plugins.OPS}
    assert gpus["EncoderStack"] == "sm_90"
    assert gpus["Linear"] == "sm_80 and newer"
    assert gpus["FusedAttention"] == "sm_75 and newer; 16 bits from sm_80"


def test_list_json(run_cli: Run) -> None:
    said = json.loads(run_cli("plugins", "list", "--json").stdout)
    assert {op["name"] for op in said["plugins"]} == plugins.PLUGIN_OPS
    assert {"name": "h200", "sm": 90}.items() <= next(gpu for gpu in said["gpus"] if gpu["name"] == "h200").items()


@pytest.mark.nvcc
def test_build_and_inspect(run_cli: Run, library: Callable[[int], plugins.Library]) -> None:
    expected = [library(90), library(80)]
    done = run_cli("plugins", "build", "--gpu", "h200", "--gpu", "sm_80", "--gpu", "h100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"sm_{one.sm}  {one.path}" for one in expected]
    table = run_cli("plugins", "inspect", "--gpu", "H200")
    assert table.returncode == 0, table.stderr
    assert "skip_layernorm<half, 8, 3>" in table.stdout
    said = json.loads(run_cli("plugins", "inspect", "--gpu", "h200", "--json").stdout)
    (one,) = said["libraries"]
    assert one["sha256"] == expected[0].sha256
    assert {use["name"] for use in one["kernels"]} == {use.name for use in expected[0].kernels}
    assert all(use["code"] > 0 and 0 < use["occupancy"] <= 1 for use in one["kernels"] if use["registers"])


@pytest.mark.nvcc
def test_inspect_several_gpus(run_cli: Run, library: Callable[[int], plugins.Library]) -> None:
    """As people write it: --gpu a100 h100. Both architectures have been compiled by the test before."""
    kernels = {library(sm).sm: library(sm).kernels for sm in (80, 90)}
    done = run_cli("plugins", "inspect", "--gpu", "a100", "h100")
    assert done.returncode == 0, done.stderr
    assert "sm_80, nvcc" in done.stdout
    assert "(h20, h100, h100-pcie, h100-nvl, ...)" in done.stdout
    for column in ("kernel", "regs", "spills", "stack", "shared", "launch", "code", "threads", "warps", "limit"):
        assert column in done.stdout.splitlines()[2].split()
    said = json.loads(run_cli("plugins", "inspect", "--gpu", "a100", "h100", "--json").stdout)
    assert [one["sm"] for one in said["libraries"]] == [80, 90]
    assert said["warnings"] == occupancy.unsuited({f"sm_{sm}": uses for sm, uses in kernels.items()})


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["build", "--gpu", "v100"], 2, "error: GPU 'v100' is of compute capability 7.0: TensorRT 10 dropped it"),
        (["inspect", "--gpu", "h10"], 2, "error: GPU 'h10' is not known; did you mean h100"),
        (["build", "--gpu", "h200", "--gpu", "nothing"], 2, "error: GPU 'nothing' is not known"),
    ],
)
def test_faults_are_one_line(arguments: list[str], status: int, message: str, run_cli: Run) -> None:
    done = run_cli("plugins", *arguments)
    assert done.returncode == status
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def test_missing_compiler_is_one_line(run_cli: Run, tmp_path: Path) -> None:
    done = run_cli("plugins", "build", "--gpu", "h200", CXX="no-such-compiler", ONNXFUSE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 3
    assert done.stderr.startswith("error: no-such-compiler: no such C++ compiler; install g++")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["plugins", "build"], ["plugins", "inspect"], ["plugins", "inspect", "--gpu", "auto"]])
def test_without_a_gpu_the_remedy_is_to_name_one(arguments: list[str], run_cli: Run) -> None:
    done = run_cli(*arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert done.stderr.startswith("error: --gpu auto: ")
    assert done.stderr.endswith("; or name the GPU that it is for, as in --gpu h100\n")
    assert len(done.stderr.splitlines()) == 1
