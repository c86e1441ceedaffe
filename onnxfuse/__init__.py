"""onnxfuse: operator fusion for TensorRT that proves it is faster, and can always be taken apart again."""

__version__ = "0.1.0"
