"""Checks and times generated kernels in real engines. Runs beside what gpu_kit.py made; needs a GPU, its driver, tensorrt and numpy.

    python3 run.py FOLDER OUT [--seconds 55]

OUT/elementwise.json: every value check (wrong outputs, or none), every pair of timings in microseconds, and the bandwidth of a copy.
"""

import argparse
import ctypes
import functools
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import tensorrt as trt

SIZES = {trt.float32: 4, trt.float16: 2, trt.bfloat16: 2, trt.int32: 4, trt.int64: 8, trt.bool: 1}
KINDS = {
    trt.float32: np.float32,
    trt.float16: np.float16,
    trt.int32: np.int32,
    trt.int64: np.int64,
    trt.bool: np.bool_,
    trt.bfloat16: np.uint16,
}


class Cuda:
    """The driver, by ctypes; every answer is looked at."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self.stream = self.made("cuStreamCreate", 1)

    def __call__(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def made(self, name, *arguments):
        handle = ctypes.c_void_p()
        self(name, ctypes.byref(handle), *arguments)
        return handle

    def memory(self, size):
        return self.made("cuMemAlloc_v2", ctypes.c_size_t(max(size, 256)))

    def free(self, memory):
        self("cuMemFree_v2", memory)

    def put(self, memory, array):
        array = np.ascontiguousarray(array)
        if array.nbytes:
            self("cuMemcpyHtoD_v2", memory, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))

    def get(self, memory, shape, kind):
        array = np.empty(shape, kind)
        if array.nbytes:
            self("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), memory, ctypes.c_size_t(array.nbytes))
        return array

    def captured(self, work):
        """An executable graph of what `work` puts on the stream."""
        self("cuStreamBeginCapture_v2", self.stream, 2)
        good = work()
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        if not good:
            raise RuntimeError("the engine could not be captured")
        self("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
        return ready

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


class Log(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
        self.errors = []

    def log(self, severity, text):
        if severity <= trt.ILogger.ERROR:
            self.errors.append(text[:300])


class Built:
    """An engine, its context and its memory."""

    def __init__(self, cuda, log, model, library, profile=None):
        start = time.time()
        builder = trt.Builder(log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, log)
        if not parser.parse(model.read_bytes()):
            raise RuntimeError("; ".join(str(parser.get_error(at)) for at in range(min(3, parser.num_errors))))
        config = builder.create_builder_config()
        config.plugins_to_serialize = [str(library)]
        if profile:
            ranges = builder.create_optimization_profile()
            for name, (low, middle, high) in profile.items():
                if low != high:
                    ranges.set_shape(name, low, middle, high)
            config.add_optimization_profile(ranges)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise RuntimeError("the build failed: " + "; ".join(log.errors[-3:]))
        self.seconds, self.bytes = round(time.time() - start, 2), plan.nbytes
        self.runtime = trt.Runtime(log)
        self.runtime.engine_host_code_allowed = True
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        self.context = self.engine.create_execution_context()
        self.cuda, self.memory = cuda, {}
        names = [self.engine.get_tensor_name(at) for at in range(self.engine.num_io_tensors)]
        self.inputs = [name for name in names if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if name not in self.inputs]

    def bind(self, shapes):
        """Memory for every tensor at these shapes of the inputs."""
        for name in self.inputs:
            is_open = -1 in tuple(self.engine.get_tensor_shape(name))
            if is_open and not self.context.set_input_shape(name, tuple(shapes[name])):
                raise RuntimeError(f"shape {shapes[name]} of {name} is refused")
        for name in (*self.inputs, *self.outputs):
            size = int(np.prod(self.context.get_tensor_shape(name), dtype=np.int64)) * SIZES[self.engine.get_tensor_dtype(name)]
            if name in self.memory:
                self.cuda.free(self.memory.pop(name))
            self.memory[name] = self.cuda.memory(size)
            self.cuda("cuMemsetD8_v2", self.memory[name], ctypes.c_ubyte(255), ctypes.c_size_t(max(size, 1)))
            self.context.set_tensor_address(name, self.memory[name].value)

    def enqueue(self):
        return self.context.execute_async_v3(self.cuda.stream.value)

    def run(self):
        if not self.enqueue():
            raise RuntimeError("the engine did not run")
        self.cuda("cuStreamSynchronize", self.cuda.stream)

    def output(self, name):
        """In float64, integers and bool in their type."""
        kind = self.engine.get_tensor_dtype(name)
        array = self.cuda.get(self.memory[name], tuple(self.context.get_tensor_shape(name)), KINDS[kind])
        if kind == trt.bfloat16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float64) if array.dtype.kind == "f" else array

    def close(self):
        for memory in self.memory.values():
            self.cuda.free(memory)
        self.memory = {}


def check(cuda, log, folder, entry):
    """Wrong outputs of one engine, by name of the expression."""
    arrays = np.load(folder / entry["arrays"])
    built = Built(cuda, log, folder / entry["model"], folder / "plugins.bin", entry["profile"])
    wrong = []
    try:
        for run in (0, 1):
            given = {name: arrays[f"{run}/in/{name}"] for name in built.inputs}
            built.bind({name: array.shape for name, array in given.items()})
            for name, array in given.items():
                cuda.put(built.memory[name], array)
            built.run()
            for name in built.outputs:
                fault = differs(built.output(name), *(arrays[f"{run}/{what}/{name}"] for what in ("want", "bound", "sure")))
                if fault:
                    wrong.append(f"{entry['names'][int(name[1:].split('_')[0])]}, output {name.split('_o')[1]}, run {run}: {fault}")
            first = {name: built.output(name).tobytes() for name in built.outputs}
            ready = cuda.captured(built.enqueue)
            cuda("cuGraphLaunch", ready, cuda.stream)
            cuda("cuStreamSynchronize", cuda.stream)
            wrong += [
                f"{name}, run {run}: a replayed graph gives other values"
                for name in built.outputs
                if built.output(name).tobytes() != first[name]
            ]
    finally:
        built.close()
    return {"name": entry["name"], "expressions": len(entry["names"]), "wrong": wrong, "build_seconds": built.seconds}


def differs(have, want, bound, sure):
    if have.shape != want.shape:
        return f"shape {have.shape} and not {want.shape}"
    with np.errstate(all="ignore"):
        right = have == want
        if have.dtype.kind == "f":
            right |= np.isnan(have) & np.isnan(want)
            right |= np.isfinite(have) & np.isfinite(want) & (np.abs(have - want) <= bound)
    bad = sure & ~right
    return f"{int(bad.sum())} values, such as {have[bad][:3]} for {want[bad][:3]}" if bad.any() else None


def time_pair(cuda, log, folder, entry, copy_gbps):
    """Microseconds of each engine of a chain, taken in turn, after a look at whether they agree."""
    builts, row = {}, {key: entry[key] for key in ("name", "shape", "bytes")}
    try:
        for kind, file in entry["models"].items():
            builts[kind] = Built(cuda, log, folder / file, folder / "plugins.bin")
        rng = np.random.default_rng(0)
        feeds = {}
        for built in builts.values():
            built.bind({name: tuple(built.engine.get_tensor_shape(name)) for name in built.inputs})
            for name in built.inputs:
                if name not in feeds:
                    feeds[name] = random(rng, built.engine.get_tensor_dtype(name), tuple(built.engine.get_tensor_shape(name)))
                cuda.put(built.memory[name], feeds[name])
            built.run()
        names = builts["fused"].outputs
        for kind in builts:
            if kind != "fused":
                row[f"largest_difference_{kind}"] = max(distance(builts["fused"].output(name), builts[kind].output(name)) for name in names)
        graphs = {kind: cuda.captured(built.enqueue) for kind, built in builts.items()}
        run = {kind: functools.partial(cuda, "cuGraphLaunch", graph, cuda.stream) for kind, graph in graphs.items()}
        times = max(3, int(2000 / max(cuda.microseconds(run["fused"], 5), 1)))
        samples = {kind: [] for kind in builts}
        for turn in range(15):
            for kind in list(builts)[:: 1 if turn % 2 else -1]:
                samples[kind].append(cuda.microseconds(run[kind], times))
        for kind, found in samples.items():
            row[f"{kind}_us"] = round(statistics.median(found), 3)
            row[f"{kind}_spread"] = round((max(found) - min(found)) / statistics.median(found), 3)
        row["ratio"] = round(row["automatic_us"] / row["fused_us"], 4)
        row["share_of_copy"] = round(entry["bytes"] / row["fused_us"] / 1000 / copy_gbps, 3)
        row["layers"] = {kind: built.engine.num_layers for kind, built in builts.items()}
    except Exception as fault:
        row["failed"] = f"{type(fault).__name__}: {fault}; {'; '.join(log.errors[-2:])}"
    finally:
        for built in builts.values():
            built.close()
    return row


def random(rng, kind, shape):
    drawn = rng.standard_normal(min(int(np.prod(shape, dtype=np.int64)), 1 << 20)).astype(np.float32) + 1.5
    whole = np.resize(drawn, shape)
    if kind == trt.bool:
        return whole > 1.5
    return whole.astype(KINDS[kind])


def distance(a, b):
    if a.size > 1 << 22:
        a, b = a.reshape(-1)[: 1 << 22], b.reshape(-1)[: 1 << 22]
    both = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(np.where(both, a, 0) * 1.0 - np.where(both, b, 0) * 1.0).max(initial=0.0))


def copy_bandwidth(cuda):
    """GB/s read plus written of a copy of 1 GiB within the GPU's memory."""
    size = 1 << 30
    a, b = cuda.memory(size), cuda.memory(size)
    copy = lambda: cuda("cuMemcpyDtoDAsync_v2", b, a, ctypes.c_size_t(size), cuda.stream)  # noqa: E731
    cuda.microseconds(copy, 3)
    found = [2 * size / cuda.microseconds(copy, 5) / 1000 for _ in range(5)]
    cuda.free(a)
    cuda.free(b)
    return statistics.median(found)


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seconds", type=float, default=55)
    given = arguments.parse_args()
    about = json.loads((given.folder / "kit.json").read_text())
    start = time.time()
    cuda, log = Cuda(), Log()
    if trt.get_plugin_registry().load_library(str(given.folder / "plugins.bin")) is None:
        sys.exit("error: the plugin library does not load")
    result = {
        "tensorrt": trt.__version__,
        "sm": about["sm"],
        "copy_gbps": round(copy_bandwidth(cuda), 1),
        "values": [],
        "timings": [],
        "left": [],
    }
    for entry in about["values"]:
        try:
            result["values"].append(check(cuda, log, given.folder, entry))
        except Exception as fault:
            traceback.print_exc()
            result["values"].append({"name": entry["name"], "failed": f"{fault}; {'; '.join(log.errors[-2:])}", "names": entry["names"]})
        print(json.dumps(result["values"][-1])[:1500], flush=True)
    order = sorted(about["timings"], key=lambda entry: ("live" not in entry["name"], "64 MB" not in entry["name"]))
    for entry in order:
        if time.time() - start > given.seconds:
            result["left"].append(entry["name"])
            continue
        row = time_pair(cuda, log, given.folder, entry, result["copy_gbps"])
        result["timings"].append(row)
        print(json.dumps(row)[:700], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "elementwise.json").write_text(json.dumps(result, indent=1))
    wrong = sum(len(entry.get("wrong", ["failed"])) for entry in result["values"])
    checked = sum(entry.get("expressions", 0) for entry in result["values"])
    print(f"{checked} expressions checked, {wrong} wrong; {len(result['timings'])} timed, {len(result['left'])} left")
    print(f"{time.time() - start:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
