"""Measuring onnxfuse: `python -m benchmarks` or `benchmarks/run`, in a checkout on a machine with a GPU and TensorRT."""
