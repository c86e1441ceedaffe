"""onnxfuse: operator fusion for TensorRT that proves it is faster, and can always be taken apart again."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxfuse.api import build_engine, compare, optimize

__version__ = "0.1.0"
__all__ = ["build_engine", "compare", "optimize"]

# onnxruntime reports its use to its makers, and leaves files for that. What is done with a model here is nobody else's business.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    """The functions of `onnxfuse.api`, imported when they are asked for: the command line starts without numpy."""
    if name in __all__:
        from onnxfuse import api

        return getattr(api, name)
    raise AttributeError(f"module 'onnxfuse' has no attribute '{name}'")
