"""`python -m benchmarks.fresh ENGINE IN.npz OUT.npz`: runs an engine in this new process, without loading any plugin library.

The embedded plugins must be enough. Status 1 where the engine's plugins are not embedded or it does not run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from onnxfuse.engine import manifest
from onnxfuse.engine.run import Engine, cast_feeds
from onnxfuse.errors import BadInput, OnnxfuseError


def main(engine_path: Path, given: Path, answer: Path) -> int:
    """Runs and writes the outputs, floating-point ones as float32; returns the exit status."""
    try:
        known = manifest.load(engine_path)
        if known is not None and known.plugins is not None and not known.plugins.embedded:
            raise BadInput(f"{engine_path}: its plugins are not embedded; build it with --embed-plugins")
        engine = Engine.load(engine_path)
        with np.load(given, allow_pickle=False) as file:
            feeds = {name: file[name] for name in file.files}
        outputs = engine.run(cast_feeds(engine.inputs, feeds))
        engine.close()
    except OnnxfuseError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_status
    np.savez(answer, **{name: _plain(array) for name, array in outputs.items()})
    return 0


def _plain(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.kind in "fV" else array


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:4])))
