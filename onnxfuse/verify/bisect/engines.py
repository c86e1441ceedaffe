"""Engines as an oracle: the plugins of some fused nodes, the functions of the others.

Each model is built and run in a process of its own, which runs the engine several times, for faults that do not always show. The engines of
the last few models are kept, as the search comes back to them.
"""

from __future__ import annotations

import collections
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onnxfuse.engine.manifest import path_of
from onnxfuse.errors import OnnxfuseError
from onnxfuse.verify import engine_process
from onnxfuse.verify.bisect.backends import Feeds
from onnxfuse.verify.engine_process import TIMEOUT, Failed, Order, read
from onnxfuse.verify.reference import Outputs

KEPT = 4  # engines


class Engines:
    """Builds the engine of a model and runs it; a run that is asked for again is one of those that were made together.

    runs: how many are made together. faults: of engines that were built and did not run.
    """

    name = "tensorrt"
    same_dtype = False

    def __init__(self, folder: Path, runs: int, timeout: float = TIMEOUT) -> None:
        self.folder = folder
        self.runs = runs
        self.timeout = timeout
        self.faults: list[str] = []
        self._model: tuple[Path, int] | None = None
        self._engines: dict[str, Path] = {}  # by the content of a model, where it could be built; the one used last is the last
        self._left: collections.deque[Sequence[Outputs]] = collections.deque()

    def run(self, model: Path, feeds: Sequence[Feeds]) -> Sequence[Outputs]:
        """Outputs for each feed, floating ones as float32. None at all, which nothing agrees with, where the engine is built and then
        fails or crashes. OnnxfuseError: it cannot be built.
        """
        asked = model, model.stat().st_mtime_ns
        if asked != self._model:
            self._left.clear()
            self._model = asked
        if not self._left:
            self._left.extend(self._made(model, feeds))
        return self._left.popleft()

    def _engine_of(self, model: Path, taken: Sequence[str]) -> Path:
        """Where the engine of a model that takes these shapes is, or is to be written. Weights in files beside the models are the same
        for all of them.
        """
        key = hashlib.sha256(model.read_bytes() + repr(taken).encode()).hexdigest()
        self._engines[key] = self._engines.pop(key, self.folder / f"{key[:32]}.engine")
        while len(self._engines) > KEPT:
            oldest = self._engines.pop(next(iter(self._engines)))
            oldest.unlink(missing_ok=True)
            path_of(oldest).unlink(missing_ok=True)
        return self._engines[key]

    def _made(self, model: Path, feeds: Sequence[Feeds]) -> list[Sequence[Outputs]]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            taken = shapes(feeds)
            order = Order(
                model=str(model),
                engine=str(self._engine_of(model, taken)),
                out=str(Path(folder) / "outputs"),
                shapes=taken,
                cache=str(self.folder / "timing.cache"),
                runs=self.runs,
            )
            try:
                engine_process.run(order, feeds, self.timeout)
            except Failed as why:
                if not why.built:
                    raise OnnxfuseError(f"no engine: {why}") from None
                self.faults.append(str(why))
                return [[{} for _ in feeds]] * self.runs
            return [[_floats(read(order.outputs(run, feed))) for feed in range(len(feeds))] for run in range(self.runs)]


def shapes(feeds: Sequence[Feeds]) -> list[str]:
    """Values of --shapes that cover all feeds, with the first as the one to optimize for."""
    found = []
    for name, first in feeds[0].items():
        sizes = [feed[name].shape for feed in feeds]
        ends = [tuple(end(axis) for axis in zip(*sizes, strict=True)) for end in (min, max)]
        least, most = ("x".join(map(str, end)) for end in ends)
        opt = "x".join(map(str, first.shape))
        if first.ndim:
            found.append(f"{name}:{opt}" if least == most else f"{name}:{least}..{opt}..{most}")
    return found


def _floats(outputs: Outputs) -> Outputs:
    return {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in outputs.items()}
