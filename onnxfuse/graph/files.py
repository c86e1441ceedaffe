"""Output files appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnxfuse.errors import BadInput
from onnxfuse.graph.names import shown


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path in the folder of `path`; what was written there replaces `path` when the block ends.

    When the block raises, the temporary file is removed and `path` stays as it was. A failure of the file system (full
    disk, unwritable folder, no such folder) becomes BadInput with one line.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise BadInput(f"cannot write {shown(target)}: it is a folder; name a file")
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", suffix=".part", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise _unwritable(target, error) from None
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def _mode(target: Path) -> int:
    """The permissions that an ordinary open() would have given: those of the file replaced, or 0666 less the umask."""
    try:
        return target.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _unwritable(target: Path, error: OSError) -> BadInput:
    reason = (error.strerror or str(error)).lower()
    return BadInput(f"cannot write {shown(target)}: {reason}; choose another output or make room")
