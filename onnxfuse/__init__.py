"""onnxfuse: operator fusion for TensorRT that proves it is faster, and can always be taken apart again."""

import os

__version__ = "0.1.0"

# onnxruntime reports its use to its makers, and leaves files for that. What is done with a model here is nobody else's business.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
