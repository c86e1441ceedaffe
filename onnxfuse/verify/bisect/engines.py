"""Engines as an oracle: the plugins of some fused nodes, the functions of the others.

Each model is built and run in a process of its own, as a kernel that reads past its memory leaves a CUDA context that nothing can use
any more. One process runs the engine several times, for faults that do not always show.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.bench import child
from onnxfuse.errors import OnnxfuseError
from onnxfuse.verify.reference import Outputs

TIMEOUT = 1800.0  # seconds for one engine, built and run
_RUN = "run"  # the step that the process tells when the engine is built

Feeds = Mapping[str, np.ndarray[Any, Any]]


class Engines:
    """Builds the engine of a model and runs it; a run that is asked for again is one of those that were made together.

    runs: how many are made together. shapes: values of --shapes.
    """

    def __init__(self, feeds: Sequence[Feeds], folder: Path, runs: int, timeout: float = TIMEOUT) -> None:
        self.folder = folder
        self.runs = runs
        self.timeout = timeout
        self.shapes = shapes(feeds)
        self.feeds = [folder / f"feed{index}.npz" for index in range(len(feeds))]
        self.faults: list[str] = []  # of engines that were built and did not run
        self._model: Path | None = None
        self._left: collections.deque[Sequence[Outputs]] = collections.deque()
        for path, feed in zip(self.feeds, feeds, strict=True):
            np.savez(path, **feed)  # type: ignore[arg-type]

    def run(self, model: Path) -> Sequence[Outputs]:
        """Outputs for each feed, floating ones as float32. None at all, which nothing agrees with, where the engine is built and fails or
        crashes. OnnxfuseError: it cannot be built.
        """
        if model != self._model or not self._left:
            self._left.extend(self._made(model))
            self._model = model
        return self._left.popleft()

    def _made(self, model: Path) -> list[Sequence[Outputs]]:
        self._left.clear()
        engine, out = model.with_suffix(".engine"), model.with_suffix(".outputs")
        for left in (engine, *self.folder.glob(f"{out.name}*")):
            left.unlink(missing_ok=True)
        order = {
            "model": str(model), "engine": str(engine), "shapes": self.shapes, "cache": str(self.folder / "timing.cache"),
            "feeds": [str(path) for path in self.feeds], "out": str(out), "runs": self.runs,
        }  # fmt: skip
        request = model.with_suffix(".order.json")
        request.write_text(json.dumps(order), encoding="utf-8")
        told: list[str] = []
        status, said = child.run([__name__, str(request)], self.timeout, told.append)
        if status != 0:
            why = child.why(status, said, self.timeout)
            if f"{child.STEP}{_RUN}" not in said:
                raise OnnxfuseError(f"no engine: {why}")
            self.faults.append(why)
            return [[{} for _ in self.feeds]] * self.runs
        return [[_read(out, run, feed) for feed in range(len(self.feeds))] for run in range(self.runs)]


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
