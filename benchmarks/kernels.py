"""The plugin kernels alone: time and share of a copy's bandwidth, at small, middle and large shapes.

    python -m benchmarks.kernels [--samples N] [--only NAME] > kernels.json

Needs a GPU, torch and the CUDA compiler. A kernel runs over rotating sets of buffers that together are several times the L2, so that
it reads from memory; small shapes are timed warm as well, since in an engine their inputs come from the L2. Launches are replayed from a
CUDA graph and timed with events. The copy is a device-to-device copy measured in the same run, counting bytes read and bytes written.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from onnxfuse import plugins

CODES = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (2, 2)}
LARGE = 64 * 2**20  # bytes of one tensor
COLD = 3  # the buffers of a cold run are this many times the L2


@dataclass(frozen=True)
class Shape:
    rows: int
    width: int
    name: str


NORM_SHAPES = (
    Shape(32, 384, "MiniLM, 32 tokens"),
    Shape(128, 768, "BERT base, 128 tokens"),
    Shape(197, 384, "ViT-S"),
    Shape(4096, 768, "BERT base, 32 x 128 tokens"),
    Shape(2048, 4096, "LLM prefill"),
    Shape(1, 4096, "LLM decode"),
    Shape(LARGE // 2 // 768, 768, "64 MB fp16, 768"),
    Shape(LARGE // 2 // 1024, 1024, "64 MB fp16, 1024"),
    Shape(LARGE // 2 // 4096, 4096, "64 MB fp16, 4096"),
    Shape(LARGE // 2 // 16384, 16384, "64 MB fp16, 16384"),
)
GELU_SHAPES = (
    Shape(32, 1536, "MiniLM, 32 tokens"),
    Shape(128, 3072, "BERT base, 128 tokens"),
    Shape(4096, 3072, "BERT base, 32 x 128 tokens"),
    Shape(LARGE // 2 // 3072, 3072, "64 MB fp16"),
)


@dataclass(frozen=True)
class Row:
    kernel: str
    dtype: str
    rows: int
    width: int
    shape: str
    threads_per_row: int
    cache: str
    microseconds: float
    low: float
    high: float
    gbps: float
    share_of_copy: float


@dataclass(frozen=True)
class Case:
    """One launch: its inputs and outputs are tensors of rows x width; weights are small and stay."""

    kernel: str
    dtype: str
    shape: Shape
    tensors: int  # of rows x width, read or written
    launch: Callable[[list[int], int], int]  # addresses of those tensors, stream
    threads: int = 0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--samples", type=int, default=50)
    arguments.add_argument("--only", default="", help="a part of the kernel's name")
    arguments.add_argument("--threads", action="store_true", help="also time other numbers of threads a row, at the small shapes")
    options = arguments.parse_args()

    try:
        import torch
    except ImportError:
        sys.exit("error: torch is not installed; `pip install torch`")
    if not torch.cuda.is_available():
        sys.exit("error: no GPU here; run it on a machine with one")
    torch.manual_seed(0)
    major, minor = torch.cuda.get_device_capability()
    library = plugins.build(10 * major + minor)
    copy = copy_gbps(options.samples)
    rows = [
        measure(case, cache, copy, options.samples)
        for case in cases(ctypes.CDLL(str(library.path)), options.threads)
        if options.only in case.kernel
        for cache in (("cold", "warm") if case.shape.rows * case.shape.width < 2**20 else ("cold",))
    ]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "compiler": library.compiler,
        "copy_gbps": round(copy, 1),
        "command": " ".join(["python -m benchmarks.kernels", *sys.argv[1:]]),
    }
    print(json.dumps({"schema": 1, "machine": machine, "rows": [asdict(row) for row in rows]}, indent=1))
    for row in rows:
        print(
            f"{row.kernel:24} {row.dtype:8} {row.rows:6} x {row.width:5} threads {row.threads_per_row:3} {row.cache}  "
            f"{row.microseconds:8.2f} us  {row.gbps:7.0f} GB/s  {row.share_of_copy:5.2f} of copy",
            file=sys.stderr,
        )


def cases(library: ctypes.CDLL, other_threads: bool) -> Iterator[Case]:
    p, i, i64, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    library.onnxfuse_launch_skip_layernorm.argtypes = [i, p, p, p, p, p, p, p, i64, i64, f, i, p]
    library.onnxfuse_launch_skip_rmsnorm.argtypes = [i, p, p, p, p, p, p, i64, i64, f, i, p]
    library.onnxfuse_launch_bias_gelu.argtypes = [i, i, p, p, p, i64, i64, p]
    for dtype in CODES:
        for shape in NORM_SHAPES:
            small = shape.rows * shape.width < 2**20
            for threads in (0, 32, 64, 96, 128, 192, 256, 384, 512) if other_threads and small and dtype == "float16" else (0,):
                if threads == 0 or threads * 32 >= shape.width:
                    yield from norm_cases(library, dtype, shape, threads)
        for shape in GELU_SHAPES:
            for kind, name in enumerate(("erf", "tanh", "quick")):
                yield gelu_case(library, dtype, shape, kind, name)


def norm_cases(library: ctypes.CDLL, dtype: str, shape: Shape, threads: int) -> Iterator[Case]:
    code = CODES[dtype][0]
    gamma, beta, bias = (weights(shape.width, dtype) for _ in range(3))

    def layernorm(with_sum: bool) -> Callable[[list[int], int], int]:
        def launch(t: list[int], stream: int) -> int:
            total = t[3] if with_sum else None
            pointers = [t[0], t[1], gamma.data_ptr(), beta.data_ptr(), bias.data_ptr(), t[2], total]
            return int(library.onnxfuse_launch_skip_layernorm(code, *pointers, shape.rows, shape.width, 1e-5, threads, stream))

        return launch

    def rmsnorm(t: list[int], stream: int) -> int:
        pointers = [t[0], t[1], gamma.data_ptr(), None, t[2], t[3]]
        return int(library.onnxfuse_launch_skip_rmsnorm(code, *pointers, shape.rows, shape.width, 1e-5, threads, stream))

    yield Case("skip_layernorm", dtype, shape, 3, layernorm(False), threads)
    yield Case("skip_layernorm with sum", dtype, shape, 4, layernorm(True), threads)
    yield Case("skip_rmsnorm with sum", dtype, shape, 4, rmsnorm, threads)


def gelu_case(library: ctypes.CDLL, dtype: str, shape: Shape, kind: int, name: str) -> Case:
    code = CODES[dtype][0]
    bias = weights(shape.width, dtype)

    def launch(t: list[int], stream: int) -> int:
        return int(library.onnxfuse_launch_bias_gelu(code, kind, t[0], bias.data_ptr(), t[1], shape.rows, shape.width, stream))

    return Case(f"bias_gelu {name}", dtype, shape, 2, launch)


def weights(width: int, dtype: str) -> Any:
    import torch

    return torch.randn(width, device="cuda").to(getattr(torch, dtype))


def measure(case: Case, cache: str, copy: float, samples: int) -> Row:
    """Median and quartiles of one launch, in microseconds. Raises RuntimeError if a launch fails."""
    import torch

    elements = case.shape.rows * case.shape.width
    size = elements * CODES[case.dtype][1] * case.tensors
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = 1 if cache == "warm" else max(2, -(-COLD * l2 // size))
    kind = getattr(torch, case.dtype)
    # Random numbers and not zeros: zeros take less power, and flatter.
    buffers = [[torch.randn(elements, device="cuda").to(kind) for _ in range(case.tensors)] for _ in range(sets)]
    launches = max(sets, 20)

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for index in range(launches):
            status = case.launch([tensor.data_ptr() for tensor in buffers[index % sets]], stream)
            if status:
                raise RuntimeError(f"{case.kernel} {case.dtype} {case.shape}: cudaError_t {status}")

    times = [1e3 * milliseconds / launches for milliseconds in graph_times(run, samples)]
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    gbps = size / middle / 1e3
    return Row(
        case.kernel, case.dtype, case.shape.rows, case.shape.width, case.shape.name, case.threads, cache,
        round(middle, 3), round(low, 3), round(high, 3), round(gbps, 1), round(gbps / copy, 3),
    )  # fmt: skip


def copy_gbps(samples: int) -> float:
    """GB/s read and written by a device-to-device copy of 2 GiB; launched on a stream, since in a graph it takes a slower way."""
    import torch

    source = torch.randint(0, 256, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [event_time(lambda: target.copy_(source)) for _ in range(samples + 3)]
    return 2 * source.numel() / statistics.median(times[3:]) / 1e6


def event_time(run: Callable[[], object]) -> float:
    """Milliseconds of what `run` launches."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def graph_times(run: Callable[[], object], samples: int) -> list[float]:
    """Milliseconds of each of `samples` replays of what `run` launches, after warming up."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        graph.replay()
    return [event_time(graph.replay) for _ in range(samples)]


if __name__ == "__main__":
    main()
