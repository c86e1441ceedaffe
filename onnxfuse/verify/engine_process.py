"""Engines that are built and run in a process of their own: an abort of TensorRT, or a kernel that reads past its memory and leaves a
CUDA context that nothing can use any more, costs their outputs and nothing else.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.bench import child
from onnxfuse.errors import OnnxfuseError
from onnxfuse.verify.reference import Feeds, Outputs

TIMEOUT = 1800.0  # seconds for one engine, built and run
RUN = "run"  # the step that the process tells when the engine is built


class Failed(OnnxfuseError):
    """No outputs, and why. built: whether there is an engine that failed to run."""

    def __init__(self, why: str, built: bool) -> None:
        super().__init__(why)
        self.built = built


@dataclass(frozen=True)
class Order:
    """An engine to build and run; plain values only.

    engine: where it is, or is written. out: how the paths of its outputs begin. shapes: values of --shapes. cache: a timing cache; None
    for none. plugins: False for what TensorRT makes alone. taps: tensors inside that the engine gives as outputs, too; where there are
    any, they alone are read. level: of TensorRT's builder, None for its default. runs: how often it runs on all feeds.
    """

    model: str
    engine: str
    out: str
    shapes: Sequence[str] = ()
    cache: str | None = None
    plugins: bool = True
    taps: Sequence[str] = ()
    level: int | None = None
    runs: int = 1

    def outputs(self, run: int, feed: int) -> Path:
        """An .npz file, floating types that it does not know as float32."""
        return Path(f"{self.out}.{run}.{feed}.npz")


def run(order: Order, feeds: Sequence[Feeds], timeout: float = TIMEOUT, watch: Callable[[str], None] | None = None) -> None:
    """Writes the outputs of each run on each feed. Failed: there are none, whatever the reason. watch: as `child.run` has it."""
    with tempfile.TemporaryDirectory(dir=Path(order.out).parent) as folder:
        given = [Path(folder) / f"feed{index}.npz" for index in range(len(feeds))]
        for path, feed in zip(given, feeds, strict=True):
            np.savez(path, **{name: _plain(array) for name, array in feed.items()})  # type: ignore[arg-type]
        request = Path(folder) / "order.json"
        request.write_text(json.dumps({**asdict(order), "feeds": [str(path) for path in given]}), encoding="utf-8")
        status, said = child.run([__name__, str(request)], timeout, watch)
    if status != 0:
        built = f"{child.STEP}{RUN}" in said.splitlines()
        raise Failed(_why(status, said, timeout, "running" if built else "building"), built)


def _why(status: int | None, said: str, timeout: float, doing: str) -> str:
    why = child.why(status, said, timeout)
    if status is None or status >= 0:
        return why
    name = signal.Signals(-status).name
    return f"TensorRT ended with {name} while {doing} an engine ({why.removeprefix(f'crashed ({name}): ')})"


def read(path: Path, names: Collection[str] | None = None) -> Outputs:
    """All outputs of a file that was written, or those of `names` that it has; no others are read."""
    with np.load(path, allow_pickle=False) as data:
        return {name: data[name] for name in data.files if names is None or name in names}


def names(path: Path) -> frozenset[str]:
    """Of the outputs in a file."""
    with np.load(path, allow_pickle=False) as data:
        return frozenset(data.files)


def main(request: str) -> None:
    """The process: does what the order in the file `request` says."""
    from onnxfuse.engine import build
    from onnxfuse.engine.run import Engine, cast_feeds

    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    feeds = [read(Path(path)) for path in asked.pop("feeds")]
    order = Order(**asked)
    if not Path(order.engine).exists():
        cache = Path(order.cache) if order.cache else None
        build.build(
            Path(order.model),
            Path(order.engine),
            shapes=order.shapes,
            timing_cache=cache,
            use_plugins=order.plugins,
            taps=order.taps,
            level=order.level,
        )
    print(f"{child.STEP}{RUN}", flush=True)
    with Engine.load(Path(order.engine)) as engine:
        for turn in range(order.runs):
            for index, feed in enumerate(feeds):
                outputs = engine.run_each(cast_feeds(engine.inputs, feed))
                _write(order.outputs(turn, index), ((n, value) for n, value in outputs if not order.taps or n in order.taps))


def _write(path: Path, outputs: Iterable[tuple[str, np.ndarray[Any, Any]]]) -> None:
    """As numpy.savez does, but holds one array at a time."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in outputs:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, _plain(array), allow_pickle=False)


def _plain(array: Any) -> np.ndarray[Any, Any]:
    """Floating types that .npz files do not know as float32, which holds each of their values."""
    plain = np.asarray(array)
    return plain.astype(np.float32) if "float" in plain.dtype.name and plain.dtype.kind != "f" else plain


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (OnnxfuseError, OSError) as fault:  # OSError: a full disk
        sys.exit(f"error: {fault}")
