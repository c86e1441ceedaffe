"""What a fault looks like to the user: one line on stderr and an exit status."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TextIO

from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph.names import shown
from onnxfuse.plugins import cache_dir

USAGE = 2
MISSING = 3
INTERNAL = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 128 + 2  # SIGINT
BROKEN_PIPE = 128 + 13  # SIGPIPE

# Faults of the file system that no code can foresee: the user's to mend.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}


class Stopped(Exception):
    """The user's interrupt, or a reader that went away, on its way past click's own handling."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def report(fault: BaseException) -> int:
    """Say what went wrong in one line on stderr (nothing for a reader that went away); returns the exit status."""
    if isinstance(fault, Stopped):
        fault = fault.cause
    if isinstance(fault, BrokenPipeError):
        _give_up(sys.stdout)
        return BROKEN_PIPE
    if type(fault).__name__ == "NoArgsIsHelpError":  # a group of commands without one of them: its help has been shown
        return 0
    message, status = describe(fault)
    with contextlib.suppress(OSError):  # nobody listens
        print(f"error: {one_line(message)}", file=sys.stderr)
    _flush(sys.stdout)
    _flush(sys.stderr)
    return status


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError:
        _give_up(stream)


def _give_up(stream: TextIO) -> None:
    """The interpreter flushes once more on its way out, and would complain, with a status of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def describe(fault: BaseException) -> tuple[str, int]:
    """The message and the exit status of a fault."""
    if isinstance(fault, OnnxfuseError):
        return str(fault), fault.exit_status
    # typer carries click's exceptions under its own name or click's, depending on its version: both have these two.
    if hasattr(fault, "format_message") and hasattr(fault, "exit_code"):
        context = getattr(fault, "ctx", None)
        name = context.command_path if context is not None else "onnxfuse"
        return f"{fault.format_message().rstrip('.')}; see `{name} --help`", USAGE
    if isinstance(fault, KeyboardInterrupt) or type(fault).__name__ == "Abort":
        return "interrupted", INTERRUPTED
    if isinstance(fault, OSError) and fault.errno in _DISK:
        return f"{shown(fault.filename or 'output')}: {fault.strerror}; free space or choose another path", USAGE
    if isinstance(fault, FileNotFoundError) and fault.filename is None:  # os.getcwd
        return "the current folder is gone; change to one that exists", USAGE
    if isinstance(fault, MemoryError):
        return "not enough memory; close other programs or use a machine with more", MISSING
    kind = type(fault).__name__
    return f"internal fault: {kind}: {fault}; please report, details in {_write_log(fault)}", INTERNAL


def one_line(message: str) -> str:
    """The message without line breaks and control characters, which names inside a model file may carry."""
    return " ".join("".join(c if c.isprintable() else " " for c in message).split())


def _write_log(fault: BaseException) -> str:
    """Write the traceback to a file of its own; returns the path, or what kept it from being written."""
    text = "".join(traceback.format_exception(fault))
    header = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} python {sys.version.split()[0]} {sys.argv}\n"
    for folder in (cache_dir() / "faults", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(prefix="onnxfuse-", suffix=".log", dir=folder)
            with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(header + text)
        except OSError:
            continue
        return path
    return "no file (neither the cache nor the temporary folder can be written)"
