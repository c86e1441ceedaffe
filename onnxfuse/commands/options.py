"""What several commands read from their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.errors import BadInput, MissingHere

if TYPE_CHECKING:
    from onnxfuse.gpus import Gpu
    from onnxfuse.verify.reference import Feeds


def gpu(name: str | None) -> Gpu | None:
    """The GPU that --gpu names; None where it was not given. What is asked of it needs no GPU here: any may be named instead of auto."""
    if name is None:
        return None
    from onnxfuse import gpus

    try:
        return gpus.resolve(name)
    except MissingHere as fault:
        raise MissingHere(f"--gpu auto: {fault}; or name the GPU that it is for, as in --gpu h100") from None


def beside(model: Path, suffix: str) -> Path:
    """Where what is made of `model` goes, if the user names no place."""
    if not model.name:
        raise BadInput(f"{model}: is a folder; name the .onnx file in it")
    return model.with_suffix(suffix)


def dims(texts: Sequence[str]) -> dict[str, int]:
    """Sizes by symbolic dimension, from texts such as batch=4."""
    sizes = {}
    for text in texts:
        name, equals, size = text.rpartition("=")
        if not (name and equals and size.isdecimal()):
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
