"""Where a report was made."""

from __future__ import annotations

import platform
import sys
from datetime import datetime, timezone
from importlib import metadata


def describe(gpu: bool = False) -> dict[str, str]:
    """Versions of what was used; with `gpu` also the GPU, its driver and TensorRT, which must be here."""
    from onnxfuse import __version__

    found = {
        "onnxfuse": __version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
    }
    for package in ("onnx", "onnxruntime", "numpy"):
        found[package] = metadata.version(package)
    if gpu:
        from onnxfuse.engine import trt

        device = trt.gpu()
        found.update(gpu=f"{device.name} (sm_{device.sm})", driver=device.driver, tensorrt=str(trt.version()))
    return found
