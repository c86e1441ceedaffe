"""Output files appear whole or not at all, and never in the place of anything but a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnxfuse.errors import BadInput
from onnxfuse.graph.names import is_text, shown


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path in the folder of `path`; what was written there replaces `path` when the block ends.

    When the block raises, the temporary file is removed and `path` stays as it was. A failure of the file system (full
    disk, unwritable folder, no such folder) becomes BadInput with one line. A symbolic link is followed: the file that it leads to
    is replaced, or made.
    """
    check(path)
    target = Path(os.path.realpath(path))
    try:
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


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary folder beside `path`, which takes the name when the block ends; when the block raises, it is removed.

    BadInput where something is there already (an empty folder is replaced), and where the file system refuses.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir() and any(target.iterdir()):
            raise BadInput(f"cannot write {shown(path)}: the folder is not empty; remove it, or choose another")
        if target.exists() and not target.is_dir():
            raise BadInput(f"cannot write {shown(path)}: it is a file, and a folder is to be made; choose another")
        if not target.parent.is_dir():
            raise BadInput(f"cannot write {shown(path)}: there is no folder {shown(target.parent)}; make it first")
        work = Path(tempfile.mkdtemp(prefix=f".{target.name[:64]}.", suffix=".part", dir=target.parent))
    except OSError as error:
        raise _unwritable(target, error) from None
    try:
        yield work
        mask = os.umask(0)
        os.umask(mask)
        work.chmod(0o777 & ~mask)
        work.rename(target)
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check(path: str | os.PathLike[str], option: str = "") -> None:
    """BadInput where `path` is something that a file cannot be put in the place of, or is in no folder. Looks only: nothing is made.

    A device (/dev/null, a terminal) would be replaced for every program on the machine.
    """
    target = Path(os.path.realpath(path))
    folder = target.parent
    name = f"{option} {shown(path)}" if option else f"cannot write {shown(path)}"
    if not is_text(target):
        raise BadInput(f"{name}: the name is not UTF-8; choose another output")
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not folder.is_dir():
            raise BadInput(f"{name}: there is no folder {shown(folder)}; make it first") from None
        mode = stat.S_IFREG
    except OSError as error:
        raise BadInput(f"{name}: {(error.strerror or str(error)).lower()}; choose another output") from None
    if stat.S_ISDIR(mode):
        raise BadInput(f"{name}: it is a folder; name a file")
    if not stat.S_ISREG(mode):
        raise BadInput(f"{name}: it is a device or a pipe, and no file can take its place; name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"{name}: folder {shown(folder)} cannot be written to; choose another output")


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


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the file lock at `path`, which is made; waits while another process has it. A lock ends with its process. OSError."""
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
