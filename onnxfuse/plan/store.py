"""The store of verdicts, in two places: those measured here (a file in the user's cache) and those that ship (verdicts.json).

Both are JSON: {"schema": 1, "verdicts": [...]}, an entry each as `Verdict.to_dict` has it. The user's file carries the schema in its
name, so that an older version never meets a newer one's file. Nothing in here raises for what is wrong with a file or a disk: a store
is no reason for hours of measuring to be lost, and a broken file is set aside beside the new one. What could not be done is said, one
line each.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from onnxfuse.errors import BadInput, refusal
from onnxfuse.graph import files
from onnxfuse.graph.names import shown
from onnxfuse.plan.verdicts import HERE, SHIPPED, Verdict
from onnxfuse.plugins import cache_dir

SCHEMA = 1


@dataclass(frozen=True)
class Contents:
    """All that is known. problems: what is wrong with the user's file, one line each."""

    here: tuple[Verdict, ...]
    shipped: tuple[Verdict, ...]
    problems: tuple[str, ...] = ()

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Those measured here first, then those that ship and were not measured again here."""
        own = {verdict.key for verdict in self.here}
        return *self.here, *(verdict for verdict in self.shipped if verdict.key not in own)


def user_file() -> Path:
    """Where the verdicts measured here are: ONNXFUSE_VERDICTS, or a file in the user's cache."""
    if own := os.environ.get("ONNXFUSE_VERDICTS"):
        return Path(own).expanduser().absolute()
    return cache_dir() / f"verdicts-{SCHEMA}.json"


def load() -> Contents:
    """What was measured here and what ships. Never raises for what is wrong with the user's file: see `Contents.problems`."""
    path = user_file()
    try:
        here, problems = _read(path)
    except OSError as error:
        return Contents((), shipped(), (_unreadable(path, error),))
    if problems:  # read again with the lock held, so that one process alone sets the file aside
        problems = tuple(dict.fromkeys((*problems, *_change(lambda verdicts: verdicts)[1])))
    return Contents(here, shipped(), problems)


def shipped() -> tuple[Verdict, ...]:
    """The verdicts measured for this release. ValueError where they are not whole: a fault of the package."""
    text = resources.files("onnxfuse.plan").joinpath("verdicts.json").read_text(encoding="utf-8")
    return tuple(Verdict.from_dict(entry, SHIPPED) for entry in json.loads(text)["verdicts"])


def add(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Stores verdicts measured here, the newest of each key; returns what went wrong, one line each. Any number of processes may add."""
    new = [replace(verdict, origin=HERE) for verdict in verdicts]
    return _change(lambda old: newest([*old, *new]))[1] if new else ()


def forget(unwanted: Callable[[Verdict], bool]) -> tuple[int, tuple[str, ...]]:
    """Removes verdicts measured here; returns how many, and what went wrong. What ships stays."""
    before: list[int] = []

    def left(old: Sequence[Verdict]) -> Sequence[Verdict]:
        before.append(len(old))
        return [verdict for verdict in old if not unwanted(verdict)]

    after, problems = _change(left)
    return before[0] - len(after) if before else 0, problems


def newest(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """One verdict of each key: that of the latest date, and of two of one date the later in the row."""
    kept: dict[tuple[Any, ...], Verdict] = {}
    for verdict in verdicts:
        if verdict.key not in kept or verdict.date >= kept[verdict.key].date:
            kept[verdict.key] = verdict
    return list(kept.values())


def text(verdicts: Iterable[Verdict]) -> str:
    """The content of a store, an entry a line, so that a change of it can be read."""
    entries = ",\n".join(" " + json.dumps(verdict.to_dict(), ensure_ascii=False) for verdict in verdicts)
    return f'{{"schema": {SCHEMA}, "verdicts": [\n{entries}\n]}}\n' if entries else f'{{"schema": {SCHEMA}, "verdicts": []}}\n'


def _change(change: Callable[[Sequence[Verdict]], Sequence[Verdict]]) -> tuple[tuple[Verdict, ...], tuple[str, ...]]:
    """Reads the user's file, changes it, writes it whole, while no other process does; the verdicts then there, and what went wrong."""
    path = user_file()
    old: tuple[Verdict, ...] = ()
    problems: tuple[str, ...] = ()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with files.locked(path.with_suffix(".lock")):
            old, problems = _read(path)
            if problems:
                problems = (*problems, f"verdicts {shown(path)}: set aside as {shown(_set_aside(path).name)}")
            new = tuple(change(old))
            if new != old or problems:
                with files.atomic(path) as part:
                    part.write_text(text(new), encoding="utf-8", errors="backslashreplace")
            return new, problems
    except OSError as error:
        return old, (*problems, _unreadable(path, error))
    except BadInput as error:
        return old, (*problems, f"verdicts: {error}; {_REMEDY}")


_REMEDY = "nothing was stored; set ONNXFUSE_VERDICTS to a file that can be written"


def _unreadable(path: Path, error: OSError) -> str:
    return f"verdicts {shown(path)}: {refusal(error)}; {_REMEDY}"


def _read(path: Path) -> tuple[tuple[Verdict, ...], tuple[str, ...]]:
    """The verdicts in a file, none where there is no file, and what is wrong with its content. OSError where it cannot be read."""
    what = f"verdicts {shown(path)}"
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return (), ()
    except (ValueError, RecursionError) as error:
        return (), (f"{what}: not JSON ({shown(error)})",)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("verdicts"), list):
        return (), (f"{what}: not a file of verdicts of schema {SCHEMA}",)
    read = [_entry(number, entry) for number, entry in enumerate(content["verdicts"])]
    faults = [f"{what}: {fault}" for fault in read if isinstance(fault, str)]
    more = (f"{what}: nor can {len(faults) - 1} more",) if len(faults) > 1 else ()
    return tuple(verdict for verdict in read if isinstance(verdict, Verdict)), (*faults[:1], *more)


def _entry(number: int, entry: Any) -> Verdict | str:
    """The verdict, or what is wrong with it."""
    try:
        return Verdict.from_dict(entry)
    except ValueError as fault:
        return f"entry {number} cannot be used: {fault}"


def _set_aside(path: Path) -> Path:
    """Gives a broken file a name of its own, which is returned."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    aside, number = path.with_name(f"{path.name}.broken-{stamp}"), 1
    while aside.exists():
        aside, number = path.with_name(f"{path.name}.broken-{stamp}-{number}"), number + 1
    path.rename(aside)
    return aside
