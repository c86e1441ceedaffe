"""What all tests share: where the checkout is, running the command line, and models small enough to read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from onnxfuse import plugins
from onnxfuse.errors import MissingHere

ROOT = Path(__file__).resolve().parent.parent


def with_path(*folders: Path, **environment: str) -> dict[str, str]:
    """The environment with `folders` at the head of PYTHONPATH, before what it holds, and with these variables. Without `folders` the
    checkout, which need not be installed.
    """
    path = [*map(str, folders or (ROOT,)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment}


# A shell that starts tests in the background has them ignore Ctrl-C, nohup has them ignore a hangup, and what they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# CI sets this: what a developer's machine may lack must be there, so an absent registry fails instead of skipping.
EXTERNAL_REQUIRED = os.environ.get("ONNXFUSE_REQUIRE_EXTERNAL") == "1"


def absent(reason: str) -> NoReturn:
    """Skip the running test because something from outside is absent; fail where ONNXFUSE_REQUIRE_EXTERNAL=1."""
    if EXTERNAL_REQUIRED:
        pytest.fail(f"ONNXFUSE_REQUIRE_EXTERNAL=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def require_external() -> Callable[[str], NoReturn]:
    """`require_external("mvn is not on PATH")`: skips, or fails in CI."""
    return absent


@pytest.fixture(scope="session")
def nvcc(require_external: Callable[[str], NoReturn]) -> plugins.Nvcc:
    """The CUDA compiler."""
    try:
        return plugins.find_nvcc()
    except MissingHere as reason:
        require_external(str(reason))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(autouse=True, scope="session")
def _no_verdicts_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured here decides what `proven` fuses: tests see none of it, and leave nothing behind."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ONNXFUSE_VERDICTS", str(tmp_path_factory.mktemp("verdicts") / "verdicts.json"))
        yield


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m onnxfuse ARGS` in tmp_path as a user would; returns status, stdout and stderr."""

    def run(*arguments: object, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "onnxfuse", *map(str, arguments)],
            cwd=tmp_path,
            env={**with_path(), "COLUMNS": "200", "NO_COLOR": "1", "ONNXFUSE_DEBUG": "0", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def missing_for_gpu() -> str | None:
    """What tests on a GPU need and this machine lacks; None where all is here."""
    from onnxfuse.engine import trt
    from onnxfuse.errors import MissingHere

    try:
        trt.tensorrt()
        trt.gpu()
    except MissingHere as missing:
        return str(missing)
    return None
