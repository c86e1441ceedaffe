"""Standard input, output and error, whatever state the caller left them in."""

from __future__ import annotations

import io
import os
import sys


def prepare() -> None:
    """Open those that are closed, and let a character that the output's encoding lacks be a question mark and no fault.

    A descriptor below 3 that stays closed goes to the next file that is opened: prints of a library would end up in a model.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
