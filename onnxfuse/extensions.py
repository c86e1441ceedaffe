"""Fusions and plugins from outside the package: what installed distributions offer in the entry point group "onnxfuse.extensions".

An entry point names an `Extension`. Its fusions join the registry behind those of their kind (`elementwise` stays last), its CUDA
folders are compiled into the same plugin library. examples/extension is a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.errors import BadInput

if TYPE_CHECKING:
    from onnxfuse.fusions.base import Fusion
    from onnxfuse.plugins import Op

GROUP = "onnxfuse.extensions"


@dataclass(frozen=True)
class Extension:
    """What a distribution adds.

    plugins: a folder as plugins/ in onnxfuse's checkout, NAME/plugin.cpp and NAME/kernel.cu for each of `ops`.
    """

    fusions: tuple[Fusion, ...] = ()
    ops: tuple[Op, ...] = ()
    plugins: Path | None = None


@cache
def installed() -> tuple[Extension, ...]:
    """The extensions of this environment, in the order of their names. Raises BadInput for one that cannot be used."""
    entries = sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    if entries:
        # What an extension builds on, wherever the question came from: the registry asks for extensions when it is imported itself.
        import_module("onnxfuse.fusions.base")
    return tuple(_load(entry) for entry in entries)


def fusions(known: Sequence[Fusion]) -> Iterator[Fusion]:
    """The fusions of all extensions. Raises BadInput where one has the name of another, or of one of `known`."""
    names = {fusion.name for fusion in known}
    for extension in installed():
        for fusion in extension.fusions:
            if fusion.name in names:
                raise BadInput(f"extension fusion '{fusion.name}': there is a fusion of that name; rename it, or uninstall the extension")
            names.add(fusion.name)
            yield fusion


def _load(entry: metadata.EntryPoint) -> Extension:
    where = f"extension '{entry.name}' of {entry.dist.name if entry.dist else 'an unknown distribution'}"
    remedy = "update it, or uninstall it"
    try:
        loaded = entry.load()
    except Exception as error:
        raise BadInput(f"{where}: {entry.value} cannot be loaded ({type(error).__name__}: {error}); {remedy}") from error
    if not isinstance(loaded, Extension):
        raise BadInput(f"{where}: {entry.value} is a {type(loaded).__name__} and no onnxfuse.extensions.Extension; {remedy}")
    if loaded.plugins is not None and not loaded.plugins.is_dir():
        raise BadInput(f"{where}: there is no folder {loaded.plugins}; {remedy}")
    return loaded
