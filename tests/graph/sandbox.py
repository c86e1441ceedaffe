"""Command lines in processes of their own, without starting Python for each: a server imports onnxfuse once and forks.

A test asks `Sandbox.run(arguments, folder)`. Whatever a file makes the command do (crash, hang, fill the memory), it does to a fork.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a command ended. status: below zero for a signal. hung: it was killed at the limit. rss: MiB that it held at most."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    rss: int
    hung: bool

    @property
    def fault(self) -> str | None:
        """What a user must never see; None where the command refused in one line, or did what it was asked."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        if self.hung:
            return f"hung: {self.seconds:.0f} s"
        if self.status < 0:
            return f"crashed: {signal.Signals(-self.status).name}"
        if "Traceback" in self.stdout + self.stderr or "internal fault" in self.stderr:
            return "internal fault"
        if self.status not in (0, 1, 2, 3):
            return f"status {self.status}"
        if self.status and (len(lines) != 1 or not lines[0].startswith("error: ") or not lines[0].isprintable()):
            return f"status {self.status} with {len(lines)} lines"
        return "words on stderr" if not self.status and lines else None


class Sandbox:
    """A context manager. limit: seconds that one command may take. memory: GiB of address space that one command may have."""

    def __init__(self, limit: float = 30.0, memory: int = 16) -> None:
        self.limit, self.memory = limit, memory

    def __enter__(self) -> Sandbox:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "ONNXFUSE_DEBUG": "0", "PYTHONPATH": path}
        command = [sys.executable, str(Path(__file__).resolve()), str(self.limit), str(self.memory)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self._server.communicate()

    def run(self, arguments: list[str], folder: Path) -> Outcome:
        """`onnxfuse ARGUMENTS` in `folder`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([arguments, str(folder)]) + "\n")
        self._server.stdin.flush()
        return Outcome(**json.loads(self._server.stdout.readline()))


def _serve(limit: float, memory: int) -> None:
    import tempfile

    import onnxruntime  # noqa: F401  what a command would import, imported once

    from onnxfuse import commands, pipeline  # noqa: F401
    from onnxfuse.commands import explain, optimize  # noqa: F401
    from onnxfuse.report import terminal  # noqa: F401
    from onnxfuse.verify import check  # noqa: F401

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        for line in sys.stdin:
            arguments, folder = json.loads(line)
            for file in (out, err):
                file.seek(0)
                file.truncate()
            started = time.monotonic()
            child = os.fork()
            if not child:
                _become(arguments, folder, out.fileno(), err.fileno(), memory)
            status, rss, hung = _wait(child, started + limit)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="backslashreplace"))
            answer = {"status": status, "stdout": texts[0], "stderr": texts[1], "rss": rss, "hung": hung}
            print(json.dumps({**answer, "seconds": time.monotonic() - started}), flush=True)


def _become(arguments: list[str], folder: str, out: int, err: int, memory: int) -> None:
    """The command itself, in the fork."""
    import resource

    from onnxfuse import commands

    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        resource.setrlimit(resource.RLIMIT_AS, (memory << 30, memory << 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["onnxfuse", *arguments]
        try:
            status = commands.main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait(child: int, until: float) -> tuple[int, int, bool]:
    while time.monotonic() < until:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss >> 10, False
        time.sleep(0.003)
    os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss >> 10, True


if __name__ == "__main__":
    _serve(float(sys.argv[1]), int(sys.argv[2]))
