"""Work in a process of its own, so that a crash of TensorRT, a hang and a full GPU cost one result and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As `python -m MODULE`, but isolated: neither the current folder nor PYTHONPATH can put another module in the place of one of ours. And it
# ends with this process (PR_SET_PDEATHSIG, SIGKILL), however that ends: nobody would stop it, and it would be on the GPU.
_START = (
    "import ctypes, json, runpy, sys; ctypes.CDLL(None).prctl(1, 9); "
    "sys.path[:] = json.loads(sys.argv[1]); sys.argv[:] = sys.argv[2:]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
STEP = "step: "
"""A line of the child that begins so says what it does now."""
TERMINATION_SECONDS = 20.0

Watch = Callable[[str], None]
"""Called about once a second with the last step that the child has told, "" before the first."""


def run(arguments: Sequence[str], timeout: float, watch: Watch | None = None, folder: Path | None = None) -> tuple[int | None, str]:
    """(exit status or None for a timeout, what was said) of `python -m ARGUMENTS`, which sees exactly the modules that this process sees.

    `timeout` in seconds. Whatever ends this process's waiting (Ctrl-C, too) ends the child first.
    """
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-u", "-c", _START, path, *arguments],  # unbuffered: what was said before a crash is not lost with it
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = _wait(process, timeout, (lambda: watch(_step(output.fileno()))) if watch else None)
        except BaseException:
            process.terminate()
            _wait(process, TERMINATION_SECONDS, None)
            raise
        output.seek(0)
        return status, output.read()


def _wait(process: subprocess.Popen[bytes], timeout: float, tell: Callable[[], None] | None) -> int | None:
    """The exit status, or None where the process had to be killed after `timeout` seconds."""
    end, next_word = time.monotonic() + timeout, time.monotonic() + 1.0
    while process.poll() is None:
        now = time.monotonic()
        if now >= end:
            process.kill()
            process.wait()
            return None
        if tell and now >= next_word:
            next_word = now + 1.0
            tell()
        time.sleep(0.02)
    return process.returncode


def _step(output: int) -> str:
    """The last step told in what a child has written so far; the child's own place in the file stays."""
    text = os.pread(output, 1 << 20, max(0, os.fstat(output).st_size - (1 << 20))).decode(errors="replace")
    told = (line.removeprefix(STEP) for line in reversed(text.splitlines()) if line.startswith(STEP))
    return next(told, "")


def why(status: int | None, said: str, timeout: float) -> str:
    """Why a child gave no result, in one line: its own error, or how it ended and the last that it said."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith(STEP)]
    last = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "it said nothing")
    if status is None:
        return f"not done within {timeout:.0f} s"
    if status < 0:
        return f"crashed ({signal.Signals(-status).name}): {last}"
    return last.removeprefix("error: ")


def last_json(said: str) -> dict[str, Any]:
    """The last JSON object that a child printed on a line of its own."""
    line = next(line for line in reversed(said.splitlines()) if line.startswith("{"))
    return dict(json.loads(line))
