"""The encoder kernel on the host, clusters, barriers and tensor cores included, against float64, phase by phase."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onnxfuse import plugins

pytestmark = pytest.mark.nvcc
DRIVER = Path(__file__).parent.parent.parent / "gpu_encoder"
# By their beginnings in gpu_encoder/cases.py; all of them take some minutes: `gpu_encoder/try.py --emulated`.
CASES = ("one row block, odd length", "bfloat16", "parts 4 blocks 2", "barrier 2", "padding mask")


def test_encoder(nvcc: plugins.Nvcc) -> None:
    if not DRIVER.is_dir():
        pytest.skip("gpu_encoder is not here")
    environment = {**os.environ, "CU": str(nvcc.path.parent.parent)}
    subprocess.run([DRIVER / "emulate.sh"], check=True, env=environment, capture_output=True)
    done = subprocess.run([sys.executable, DRIVER / "try.py", "--emulated", *CASES], check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "bad: 0", done.stdout
    assert len([line for line in lines if re.match("ok ", line)]) >= len(CASES)
