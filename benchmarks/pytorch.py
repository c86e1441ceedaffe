"""`python -m benchmarks.pytorch NAME PRECISION SAMPLES`: the same module in PyTorch, replayed as a CUDA graph; prints
one JSON object.

Not interleaved with the engines: PyTorch's allocator and libraries stay out of their process.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from onnxfuse.bench.stats import Interval, bootstrap_median
from onnxfuse.bench.timing import SAMPLE_MS

TYPES = {"fp32": "float32", "keep": "float32", "fp16": "float16", "bf16": "bfloat16"}


def time_graph(name: str, precision: str, samples: int) -> Interval:
    """Milliseconds of one forward pass of models/export.py's module `name`, in eval mode, under a CUDA graph."""
    import torch

    from models import export

    dtype = getattr(torch, TYPES[precision])
    entry = export.MODELS[name]
    module = entry.module().eval().to("cuda", dtype)
    inputs = tuple(_moved(torch, tensor, dtype) for tensor in entry.inputs())
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                module(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(*inputs)
        return bootstrap_median(_samples(torch, graph, samples))


def _samples(torch: Any, graph: Any, samples: int) -> list[float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(count: int) -> float:
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    for _ in range(3):
        once = run(100) / 100
    count = max(1, math.ceil(SAMPLE_MS / once))
    return [run(count) / count for _ in range(samples)]


def _moved(torch: Any, tensor: Any, dtype: Any) -> Any:
    return tensor.to("cuda", dtype) if tensor.is_floating_point() else tensor.to("cuda")


if __name__ == "__main__":
    print(json.dumps(time_graph(sys.argv[1], sys.argv[2], int(sys.argv[3])).to_dict()))
