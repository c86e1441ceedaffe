"""What several commands read from their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.errors import BadInput

if TYPE_CHECKING:
    from onnxfuse.gpus import Gpu
    from onnxfuse.verify.reference import Feeds


def gpu(name: str | None) -> Gpu | None:
    """The GPU that --gpu names; None where it was not given."""
    if name is None:
        return None
    from onnxfuse import gpus

    return gpus.resolve(name)


def dims(texts: Sequence[str]) -> dict[str, int]:
    """Sizes by symbolic dimension, from texts such as batch=4."""
    sizes = {}
    for text in texts:
        name, equals, size = text.rpartition("=")
        if not (name and equals and size.isdigit()):
            raise BadInput(f"--dims {text}: not of the form NAME=N; give a dimension's name and its size, as in batch=4")
        sizes[name] = int(size)
    return sizes


def feeds(data: Path | None, sizes: Sequence[str], model: Path) -> list[Feeds] | None:
    """The inputs that --data names; None where they are to be generated."""
    if data is None:
        return None
    if sizes:
        raise BadInput("--data and --dims exclude each other: the sizes are those of the data; leave one of them out")
    from onnxfuse.verify import inputs

    return list(inputs.from_data(data, model))
