"""The machine: what it is, and what a copy and a matrix product reach on it, which other figures are shares of.

Run as a program it prints one JSON object, so that the caller itself holds no GPU memory.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from typing import Any

from onnxfuse import gpus
from onnxfuse.bench.timing import bandwidth_mark
from onnxfuse.bench.watch import others_on_gpu
from onnxfuse.engine import trt

COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192
RUNS = 20


def describe() -> dict[str, Any]:
    """GPU, versions, copy_gbps (read plus written) and matmul_tflops (fp16, 8192 x 8192 x 8192, random data)."""
    device = trt.gpu()
    driver = trt.activate()
    number = driver.get_driver_version()
    copy = copy_gbps(driver)
    rate, source = matmul_tflops()
    return {
        "gpu": device.name,
        "sm": device.sm,
        "driver": device.driver,
        "cuda": f"{number // 1000}.{number % 1000 // 10}",
        "tensorrt": trt.version(),
        "copy_gbps": round(copy, 1),
        "matmul_tflops": round(rate, 1) if rate is not None else None,
        "matmul_by": source,
        "marks": [mark for mark in (impossible(copy, gpus.resolve("auto").memory_gbps), *others_on_gpu()) if mark],
    }


def impossible(copy: float, memory_gbps: float | None) -> str | None:
    """A mark where the copy would be faster than the memory: it was not timed right."""
    return None if memory_gbps is None else bandwidth_mark(copy * 1e6, 1.0, memory_gbps)


def copy_gbps(driver: Any, size: int = COPY_BYTES) -> float:
    """Median rate of device-to-device copies of `size` bytes, in GB/s, bytes read and written counted."""
    source, target = driver.mem_alloc(size), driver.mem_alloc(size)
    driver.memset_d32(source, 0x3C003C00, size // 4)
    stream, start, end = driver.Stream(), driver.Event(), driver.Event()
    times = []
    for _ in range(RUNS):
        start.record(stream)
        driver.memcpy_dtod_async(target, source, size, stream)
        end.record(stream)
        end.synchronize()
        times.append(start.time_till(end))
    source.free()
    target.free()
    return 2 * size / statistics.median(times[3:]) / 1e6


def matmul_tflops(size: int = MATMUL_SIZE) -> tuple[float | None, str]:
    """Median rate of an fp16 matrix product in TFLOP/s, and the library that made it; (None, reason) without one."""
    for name, run in (("torch", _torch_times), ("cupy", _cupy_times)):
        try:
            module = importlib.import_module(name)
            times = run(module, size)
        except Exception as error:
            reason = f"{name}: {error}"
            continue
        return 2 * size**3 / statistics.median(times[3:]) / 1e9, f"{name} {module.__version__}"
    return None, f"no library ({reason})"


def _torch_times(torch: Any, size: int) -> list[float]:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty_like(a)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(RUNS):
        start.record()
        torch.matmul(a, b, out=out)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def _cupy_times(cupy: Any, size: int) -> list[float]:
    a, b = (cupy.random.standard_normal((size, size), dtype=cupy.float32).astype(cupy.float16) for _ in range(2))
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(RUNS):
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return times


if __name__ == "__main__":
    from onnxfuse.errors import OnnxfuseError

    try:
        print(json.dumps(describe()))
    except OnnxfuseError as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(fault.exit_status)
