"""Checks and times generated kernels on a GPU. Runs in the folder that gpu_kit.py made.

    python3 run.py --part kernels OUT [--seconds N]      needs the GPU's driver and numpy
    python3 run.py --part engines OUT [--seconds N]      needs TensorRT, too

kernels: the values of every expression against float64; time and share of a copy's bandwidth of chains from trained models at three sizes;
chains that are too big, before and after they are cut. Writes OUT/GPU-elementwise-kernels.json.

engines: chains against what TensorRT makes of them alone: all engines are built side by side, in half of the seconds at most, then timed in
turn, each chain in placements of its own, from cold caches; then the values again in engines of dynamic shape, replayed graphs and
a fresh process included. Writes OUT/GPU-elementwise-engines.json, anew after every chain, so that a stop loses nothing.

What does not fit into the seconds is named under "left". Status 1 where anything is wrong.
"""

import argparse
import ctypes
import datetime
import json
import re
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent


class Cuda:
    """The driver, by ctypes; every answer is looked at."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self.device = device
        self.stream = self.made("cuStreamCreate", 1)

    def __call__(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def made(self, name, *arguments):
        handle = ctypes.c_void_p()
        self(name, ctypes.byref(handle), *arguments)
        return handle

    def attribute(self, number):
        value = ctypes.c_int()
        self("cuDeviceGetAttribute", ctypes.byref(value), number, self.device)
        return value.value

    @property
    def name(self):
        text = ctypes.create_string_buffer(200)
        self("cuDeviceGetName", text, 200, self.device)
        return text.value.decode()

    @property
    def version(self):
        value = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(value))
        return f"CUDA {value.value // 1000}.{value.value % 1000 // 10}"

    def pointer(self, address):
        return ctypes.c_void_p(address)

    def memory(self, size):
        return self.made("cuMemAlloc_v2", ctypes.c_size_t(max(size, 256)))

    def free(self, memory):
        self("cuMemFree_v2", memory)

    def put(self, memory, array):
        array = np.ascontiguousarray(array)
        if array.nbytes:
            self("cuMemcpyHtoD_v2", memory, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
            self("cuCtxSynchronize")  # what runs on the stream does not wait for copies from the host

    def get(self, memory, shape, kind):
        array = np.empty(shape, kind)
        if array.nbytes:
            self("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), memory, ctypes.c_size_t(array.nbytes))
        return array

    def copy(self, to, source, size):
        self("cuMemcpyDtoDAsync_v2", to, source, ctypes.c_size_t(size), self.stream)

    def fill(self, memory, byte, size):
        self("cuMemsetD8_v2", memory, ctypes.c_ubyte(byte), ctypes.c_size_t(size))
        self("cuCtxSynchronize")

    def wait(self):
        self("cuStreamSynchronize", self.stream)

    def captured(self, work):
        """An executable graph of what `work` puts on the stream."""
        self("cuStreamBeginCapture_v2", self.stream, 2)
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            work()
        finally:
            self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
        self("cuGraphDestroy", graph)
        return ready

    def forget(self, graph):
        self("cuGraphExecDestroy", graph)

    def replay(self, graph):
        self("cuGraphLaunch", graph, self.stream)

    def microseconds(self, work, times):
        """Of one of `times` runs of `work`, back to back."""
        start, end = self.made("cuEventCreate", 0), self.made("cuEventCreate", 0)
        self("cuEventRecord", start, self.stream)
        for _ in range(times):
            work()
        self("cuEventRecord", end, self.stream)
        self("cuEventSynchronize", end)
        ms = ctypes.c_float()
        self("cuEventElapsedTime", ctypes.byref(ms), start, end)
        self("cuEventDestroy_v2", start)
        self("cuEventDestroy_v2", end)
        return ms.value * 1000 / times


class Copy:
    """A copy within the GPU's memory. It runs on the stream: as a graph's node it takes a slower way."""

    def __init__(self, cuda, size):
        self.cuda, self.size = cuda, size
        self.a, self.b = cuda.memory(size), cuda.memory(size)
        cuda.fill(self.a, 0x35, size)
        self.us(3)

    def us(self, times=1):
        return self.cuda.microseconds(lambda: self.cuda.copy(self.b, self.a, self.size), times)

    def gbps(self, us):
        return 2 * self.size / us / 1000

    def close(self):
        self.cuda.free(self.a)
        self.cuda.free(self.b)


class Nvml:
    """Clocks and what holds them down, by ctypes. Marks as in onnxfuse/bench/watch.py."""

    SM, MEMORY = 1, 2
    TOLERANCE = 0.03
    THROTTLES = 0x04 | 0x08 | 0x20 | 0x40 | 0x80  # power, hardware, temperature (software, hardware), power brake

    def __init__(self):
        self.lib, self.device = None, ctypes.c_void_p()
        try:
            lib = ctypes.CDLL("libnvidia-ml.so.1")
            if lib.nvmlInit_v2() == 0 and lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device)) == 0:
                self.lib = lib
        except OSError:
            pass

    @property
    def driver(self):
        """Its release, such as 580.159.04; None where it is not said."""
        text = ctypes.create_string_buffer(100)
        known = self.lib is not None and self.lib.nvmlSystemGetDriverVersion(text, 100) == 0
        return text.value.decode() if known else None

    def look(self):
        """(SM clock, memory clock, throttling bits); None where the driver does not say."""
        if self.lib is None:
            return None, None, None
        clocks = []
        for kind in (self.SM, self.MEMORY):
            value = ctypes.c_uint()
            clocks.append(value.value if self.lib.nvmlDeviceGetClockInfo(self.device, kind, ctypes.byref(value)) == 0 else None)
        bits = ctypes.c_ulonglong()
        known = self.lib.nvmlDeviceGetCurrentClocksThrottleReasons(self.device, ctypes.byref(bits)) == 0
        return (*clocks, bits.value & self.THROTTLES if known else None)

    def marks(self, looks):
        if self.lib is None:
            return ["clocks and throttling are not known: NVML is missing"]
        found = []
        for place, what in ((0, "SM"), (1, "memory")):
            clocks = [look[place] for look in looks if look[place]]
            if clocks and max(clocks) > (1 + self.TOLERANCE) * min(clocks):
                found.append(f"the {what} clock moved between {min(clocks)} and {max(clocks)} MHz")
        bits = 0
        for look in looks:
            bits |= look[2] or 0
        return [*found, *([f"throttled (reasons 0x{bits:x})"] if bits else [])]


def differs(have, want, bound, sure):
    """What is wrong with an output; None where nothing is. Floating-point numbers in float64."""
    if have.shape != want.shape:
        return f"shape {have.shape} and not {want.shape}"
    with np.errstate(all="ignore"):
        right = have == want
        if have.dtype.kind == "f":
            right |= np.isnan(have) & np.isnan(want)
            right |= np.isfinite(have) & np.isfinite(want) & (np.abs(have - want) <= bound)
    bad = sure & ~right
    return f"{int(bad.sum())} values, such as {have[bad][:3]} for {want[bad][:3]}" if bad.any() else None


def rounded(interval, digits=4):
    return {"median": round(interval.median, digits), "low": round(interval.low, digits), "high": round(interval.high, digits)}


class Clock:
    """Seconds that are left of those given."""

    def __init__(self, seconds):
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def spent(self):
        return time.monotonic() - self.start

    @property
    def is_over(self):
        return self.spent > self.seconds


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--part", choices=["kernels", "engines", "fresh", "builder"], required=True)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seconds", type=float, default=120)
    arguments.add_argument("--samples", type=int, default=25, help="of each engine, in one placement")
    given = arguments.parse_args()
    sys.path.insert(0, str(HERE))
    if given.part in ("fresh", "builder"):
        import engines

        return engines.fresh(given.out) if given.part == "fresh" else engines.builder(HERE)
    about = json.loads((HERE / "kit.json").read_text())
    given.out.mkdir(parents=True, exist_ok=True)
    clock, cuda = Clock(given.seconds), Cuda()
    stem = re.sub(r"[^a-z0-9]+", "-", cuda.name.lower().replace("nvidia", "").strip())
    path = given.out / f"{stem}-elementwise-{given.part}.json"

    def save(found):
        machine = {
            "gpu": cuda.name,
            "driver": cuda.version,
            "compiler": about["compiler"],
            **found["machine"],
            "command": " ".join(["run.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "commit": about["commit"],
            "seconds": round(clock.spent, 1),
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"schema": 1, **found, "machine": machine}, indent=1) + "\n")
        part.replace(path)

    if given.part == "kernels":
        import kernels

        found, wrong = kernels.run(cuda, HERE, about, clock, given.samples)
    else:
        import engines

        found, wrong = engines.run(cuda, HERE, about, clock, given.samples, given.out, save)
    save(found)
    print(f"{path}: {clock.spent:.0f} s, {len(wrong)} wrong, {len(found['left'])} left")
    for line in wrong[:20]:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
