"""A kill at any moment leaves the old file or the new one, never half: tried 200 times."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxfuse.engine import build as building
from onnxfuse.engine import manifest as manifests
from onnxfuse.engine.run import vouched
from tests.security.operations import OPERATIONS

KILLS = {"model": 35, "model with data": 35, "engine": 35, "library": 35, "verdicts": 30, "folder": 30}
LONGEST = 0.03  # seconds until the kill: a few operations


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Starts processes that have imported everything already, so that a kill comes in the middle of the work."""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.security.operations"], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.stdin.close()  # type: ignore[union-attr]
    assert process.wait(timeout=20) == 0


def ask(server: subprocess.Popen[str], line: str) -> str:
    assert server.stdin is not None
    assert server.stdout is not None
    if line:
        server.stdin.write(line + "\n")
        server.stdin.flush()
    return server.stdout.readline().strip()


def test_there_are_two_hundred() -> None:
    assert KILLS.keys() == OPERATIONS.keys()
    assert sum(KILLS.values()) == 200


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_killed_at_random_moments(name: str, server: subprocess.Popen[str], tmp_path: Path) -> None:
    save, check = OPERATIONS[name]
    with pytest.MonkeyPatch.context() as patched:
        for variable in ("ONNXFUSE_CACHE", "ONNXFUSE_VERDICTS"):
            patched.setenv(variable, str(tmp_path / "unused"))  # put back afterwards, whatever the operations set
        save(tmp_path, 0)
        check(tmp_path)
        moments = random.Random(0)
        cut = 0
        for _ in range(KILLS[name]):
            child = int(ask(server, f"{name}\t{tmp_path}"))
            time.sleep(moments.uniform(0, LONGEST))
            os.kill(child, signal.SIGKILL)
            assert ask(server, "") == "gone"
            cut += any(path.name.endswith(".part") or ".building-" in path.name for path in tmp_path.rglob("*"))
            check(tmp_path)
            for left in tmp_path.glob(".*.part"):  # what a killed process leaves behind; nothing reads it
                subprocess.run(["rm", "-rf", str(left)], check=True)
        assert cut or name == "verdicts", "no kill came in the middle of a write"  # that one spends its time on computing
        save(tmp_path, 1)
        check(tmp_path)


def test_two_processes_never_mix_engine_and_manifest(server: subprocess.Popen[str], tmp_path: Path) -> None:
    """While another process writes the same engine: whenever it is nobody's turn, engine and manifest fit."""
    save, _ = OPERATIONS["engine"]
    save(tmp_path, 0)
    child = int(ask(server, f"engine\t{tmp_path}"))
    try:
        for _ in range(20):
            save(tmp_path, 0)
            with building._turn(tmp_path):
                engine = (tmp_path / "m.engine").read_bytes()
                assert vouched(engine, tmp_path / "m.engine") == manifests.load(tmp_path / "m.engine")
    finally:
        os.kill(child, signal.SIGKILL)
        assert ask(server, "") == "gone"
