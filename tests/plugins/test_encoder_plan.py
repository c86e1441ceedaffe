"""How the encoder kernel's work is divided, which is host code: there is a plan for whatever the fusion takes, on every GPU of sm_90."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Clusters of 4, 2 and 1 blocks that find room: as many multiprocessors, less what is left over in a GPC.
GPUS = {"h200": (30, 66, 132), "h100-pcie": (26, 57, 114), "h20": (18, 39, 78)}


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("plan") / "check"
    subprocess.run(["g++", "-std=c++17", "-O2", HERE / "encoder_plan_check.cpp", "-o", program], check=True)
    return program


@pytest.mark.parametrize("gpu", GPUS)
def test_there_is_a_plan(gpu: str, check: Path) -> None:
    *others, count = subprocess.run([check, *map(str, GPUS[gpu])], check=True, capture_output=True, text=True).stdout.splitlines()
    assert int(count) > 5000
    assert not [line for line in others if line.startswith("none")]
    if gpu == "h200":  # kernels that are compiled for a shape take its clusters for granted
        assert not others
