"""Engines as an oracle: the plugins of some fused nodes, the functions of the others.

Each model is built and run in a process of its own, as a kernel that reads past its memory leaves a CUDA context that nothing can use
any more. One process runs the engine several times, for faults that do not always show.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.bench import child
from onnxfuse.errors import OnnxfuseError
from onnxfuse.verify.bisect.backends import Feeds
from onnxfuse.verify.reference import Outputs

TIMEOUT = 1800.0  # seconds for one engine, built and run
_RUN = "run"  # the step that the process tells when the engine is built


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
        self._engine = folder / "last.engine"  # of that model, where it could be built
        self._left: collections.deque[Sequence[Outputs]] = collections.deque()

    def run(self, model: Path, feeds: Sequence[Feeds]) -> Sequence[Outputs]:
        """Outputs for each feed, floating ones as float32. None at all, which nothing agrees with, where the engine is built and then
        fails or crashes. OnnxfuseError: it cannot be built.
        """
        asked = model, model.stat().st_mtime_ns
        if asked != self._model:
            self._left.clear()
            self._engine.unlink(missing_ok=True)
            self._model = asked
        if not self._left:
            self._left.extend(self._made(model, feeds))
        return self._left.popleft()

    def _made(self, model: Path, feeds: Sequence[Feeds]) -> list[Sequence[Outputs]]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return self._in(Path(folder), model, feeds)

    def _in(self, folder: Path, model: Path, feeds: Sequence[Feeds]) -> list[Sequence[Outputs]]:
        out, given = folder / "outputs", [folder / f"feed{index}.npz" for index in range(len(feeds))]
        for path, feed in zip(given, feeds, strict=True):
            np.savez(path, **{name: _plain(array) for name, array in feed.items()})  # type: ignore[arg-type]
        order = {
            "model": str(model),
            "engine": str(self._engine),
            "shapes": shapes(feeds),
            "cache": str(self.folder / "timing.cache"),
            "feeds": [str(path) for path in given],
            "out": str(out),
            "runs": self.runs,
        }
        request = folder / "order.json"
        request.write_text(json.dumps(order), encoding="utf-8")
        told: list[str] = []
        status, said = child.run([__name__, str(request)], self.timeout, told.append)
        if status != 0:
            why = child.why(status, said, self.timeout)
            if f"{child.STEP}{_RUN}" not in said:
                raise OnnxfuseError(f"no engine: {why}")
            self.faults.append(why)
            return [[{} for _ in feeds]] * self.runs
        return [[_read(out, run, feed) for feed in range(len(feeds))] for run in range(self.runs)]


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


def _read(out: Path, run: int, feed: int) -> Outputs:
    with np.load(f"{out}.{run}.{feed}.npz", allow_pickle=False) as data:
        return {name: data[name] for name in data.files}


def main(request: str) -> None:
    from onnxfuse.engine import build
    from onnxfuse.engine.run import Engine, cast_feeds

    order = json.loads(Path(request).read_text(encoding="utf-8"))
    if not Path(order["engine"]).exists():
        build.build(Path(order["model"]), Path(order["engine"]), shapes=order["shapes"], timing_cache=Path(order["cache"]))
    print(f"{child.STEP}{_RUN}", flush=True)
    feeds = []
    for path in order["feeds"]:
        with np.load(path, allow_pickle=False) as data:
            feeds.append({name: data[name] for name in data.files})
    with Engine.load(Path(order["engine"])) as engine:
        for run in range(order["runs"]):
            for index, feed in enumerate(feeds):
                outputs = engine.run(cast_feeds(engine.inputs, feed))
                np.savez(f"{order['out']}.{run}.{index}.npz", **{name: _plain(array) for name, array in outputs.items()})  # type: ignore[arg-type]


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Half precision as float32, which .npz files know."""
    return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OnnxfuseError as fault:
        sys.exit(f"error: {fault}")
