#!/usr/bin/env python3
"""Builds, checks and times the engines of this kit on the GPU here. Needs Python 3.8, numpy and tensorrt (10.0 or newer), nothing else.

    python3 kit.py             build, check and time; engines and report.json go to the folder `result` beside this file
    python3 kit.py --help      other folders, fewer samples

Exit status: 0 done and verified; 1 outputs disagree, or the GPU failed; 2 the kit is damaged, or wrong usage; 3 something is missing here.

This file is written to be read before it is run, and stands alone: what it knows of metrics and intervals it knows again from onnxfuse
(onnxfuse/verify/metrics.py, onnxfuse/bench/stats.py), whose tests hold both to the same answers.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__":
    # Python looks for modules in this folder first: a file called tensorrt.py that somebody left here must not be run.
    sys.path[:] = [entry for entry in sys.path if entry and os.path.realpath(entry) != os.path.realpath(HERE)]

import argparse
import contextlib
import ctypes
import functools
import hashlib
import json
import math
import platform
import re
import subprocess
import tempfile
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

try:
    import numpy as np
except ImportError:
    sys.stderr.write("error: numpy is not installed here; `python3 -m pip install numpy`\n")
    sys.exit(3)

SCHEMA = 1
KIT = "kit.json"

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


class Fault(Exception):
    """One line for the user, and the exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


# The kit's own files ---------------------------------------------------------------------------------------------------


def read_kit(folder: str, expected: str | None = None) -> dict[str, Any]:
    """kit.json, after every file that it names has been compared with its hash. `expected` is the hash of kit.json itself."""
    path = os.path.join(folder, KIT)
    if os.path.lexists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise Fault(2, f"{folder}: {KIT} is no ordinary file; copy the kit again")
    try:
        with open(path, "rb") as file:
            text = file.read()
        kit: dict[str, Any] = json.loads(text.decode("utf-8"))
        schema, files = kit["schema"], dict(kit["files"])
    except OSError as error:
        raise Fault(2, f"{folder}: {KIT} cannot be read: {error.strerror}; copy the whole kit") from None
    except (ValueError, KeyError, TypeError):
        raise Fault(2, f"{folder}: {KIT} is damaged; copy the kit again") from None
    if expected is not None and hashlib.sha256(text).hexdigest() != expected.strip().lower():
        raise Fault(2, f"{folder}: {KIT} is not the one with hash {expected}; this is not the kit that was made")
    if schema != SCHEMA:
        raise Fault(2, f"{folder}: kit schema {schema}, not {SCHEMA}; use the script of the kit itself")
    for name, digest in files.items():
        if os.path.basename(name) != name or name in (".", ".."):
            raise Fault(2, f"{folder}: {KIT} names a file outside the kit; it is not to be trusted")
        if hash_file(os.path.join(folder, name)) != digest:
            raise Fault(2, f"{folder}: {name} is missing or not the file that was put into the kit; copy the kit again")
    return kit


def hash_file(path: str) -> str | None:
    """SHA-256 of an ordinary file, in hexadecimal; None where there is none."""
    digest = hashlib.sha256()
    try:
        if not os.path.isfile(path) or os.path.islink(path):
            return None
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def read_reference(folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(inputs, right outputs) of each case. bfloat16 lies there as float32, which holds every value of it."""
    cases: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    with np.load(os.path.join(folder, "reference.npz"), allow_pickle=False) as data:
        for key in data.files:
            number, kind, name = key.split("/", 2)
            inputs, outputs = cases.setdefault(int(number), ({}, {}))
            (inputs if kind == "in" else outputs)[name] = data[key]
    return [cases[number] for number in sorted(cases)]


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """A temporary path in the same folder that takes the name `path` when the block ends; gone if it fails."""
    try:
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=os.path.dirname(path))
        os.close(handle)
        try:
            yield temporary
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise Fault(2, f"cannot write {path}: {error.strerror}; make room, or give another folder with --out") from None


def write(path: str, data: bytes) -> None:
    """The whole file, or the old one."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)


# CUDA: the driver's library through ctypes ---------------------------------------------------------------------------------

CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
CAPTURE_THREAD_LOCAL = 1


class Cuda:
    """libcuda, with device 0's primary context current in this thread. Every status is looked at."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise Fault(3, "no NVIDIA driver here: libcuda.so.1 was not found; install the driver of the GPU") from None
        status = self.library.cuInit(0)
        if status:
            raise Fault(3, f"no NVIDIA GPU can be used here: the driver answers {self.name(status)}; check `nvidia-smi`")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.device = device

    def name(self, status: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(status, ctypes.byref(text))
        return text.value.decode() if text.value else f"status {status}"

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self.library, function)(*arguments)
        if status:
            raise Fault(1, f"CUDA: {function} answers {self.name(status)}")

    def describe(self) -> tuple[str, int]:
        """Name and compute capability of the GPU, 90 for 9.0."""
        name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetName", name, 256, self.device)
        self.call("cuDeviceGetAttribute", ctypes.byref(major), CAPABILITY_MAJOR, self.device)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), CAPABILITY_MINOR, self.device)
        return name.value.decode(errors="replace"), 10 * major.value + minor.value

    def version(self) -> str:
        """CUDA version of the driver."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"


class Memory:
    """Device memory, given back with `free`."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.cuda, self.size, self.pointer = cuda, size, ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(max(size, 1)))

    @property
    def address(self) -> int:
        return int(self.pointer.value)

    def put(self, array: Any) -> None:
        if array.nbytes:
            self.cuda.call("cuMemcpyHtoD_v2", self.pointer, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))

    def get(self, array: Any) -> None:
        if array.nbytes:
            self.cuda.call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), self.pointer, ctypes.c_size_t(array.nbytes))

    def free(self) -> None:
        self.cuda.call("cuMemFree_v2", self.pointer)


class Clocks:
    """SM and memory clock in MHz, and the driver's release, from libnvidia-ml; None where it does not say (Jetson)."""

    def __init__(self) -> None:
        self.handle: ctypes.c_void_p | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            index = int(visible) if visible.isdigit() else 0
            if self.library.nvmlInit_v2() == 0 and self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self.handle = handle

    def read(self) -> dict[str, int | None]:
        return {name: self._clock(kind) for name, kind in (("sm", 1), ("memory", 2))}

    def _clock(self, kind: int) -> int | None:
        value = ctypes.c_uint()
        if self.handle is None or self.library.nvmlDeviceGetClockInfo(self.handle, kind, ctypes.byref(value)):
            return None
        return value.value

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(80)
        if self.handle is None or self.library.nvmlSystemGetDriverVersion(text, 80):
            return None
        return text.value.decode(errors="replace")


# TensorRT ------------------------------------------------------------------------------------------------------------------


class TensorRT:
    """The tensorrt module, one logger that keeps what was said, and what differs between 10.0 and 11."""

    def __init__(self) -> None:
        try:
            import tensorrt as trt
        except (ImportError, OSError) as error:
            raise Fault(3, f"TensorRT cannot be imported here: {error}; `python3 -m pip install tensorrt`") from None
        self.version = str(getattr(trt, "__version__", "0"))
        if not hasattr(trt, "Builder") or int((re.findall(r"\d+", self.version) or ["0"])[0]) < 10:
            raise Fault(3, f"TensorRT {self.version} is too old: 10.0 or newer is needed; `python3 -m pip install -U tensorrt`")
        self.module = trt
        self.errors: list[str] = []
        severe = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)
        said = self.errors

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in severe:
                    said.append(message)

        self.logger = Logger()
        trt.init_libnvinfer_plugins(self.logger, "")

    def reason(self, since: int) -> str:
        """The first error said since then, on one line: later ones are consequences."""
        text = " ".join(next(iter(self.errors[since:]), "TensorRT gives no reason").split())
        return text if len(text) <= 300 else text[:299] + "…"

    def load(self, library: str) -> None:
        mark = len(self.errors)
        if self.module.get_plugin_registry().load_library(library) is None:
            raise Fault(2, f"TensorRT {self.version} does not load the plugin library: {self.reason(mark)}")

    def build(self, kit: Mapping[str, Any], model: bytes, where: str, library: str | None, cache: bytes) -> tuple[bytes, bytes]:
        """(engine, timing cache) of a serialized ONNX model whose external data lie in the folder of `where`."""
        trt, mark = self.module, len(self.errors)
        builder = trt.Builder(self.logger)
        flags = trt.NetworkDefinitionCreationFlag.__members__  # TensorRT 11 may have no other kind of network
        network = builder.create_network(1 << int(flags["STRONGLY_TYPED"]) if "STRONGLY_TYPED" in flags else 0)
        parser = trt.OnnxParser(network, self.logger)
        if not parser.parse(model, where):
            problem = parser.get_error(0).desc() if parser.num_errors else self.reason(mark)
            raise Fault(1, f"{os.path.basename(where)}: TensorRT {self.version} cannot take the model: {' '.join(problem.split())[:300]}")
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        self._add_profile(kit, builder, network, config)
        if kit["compatible"]:
            config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        if library is not None:
            config.plugins_to_serialize = [library]
        timing = config.create_timing_cache(cache)
        if timing is None or not config.set_timing_cache(timing, False):
            raise Fault(
                2, f"the timing cache of an earlier run does not fit: {self.reason(mark)}; remove it, or give another folder with --out"
            )
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise Fault(1, f"{os.path.basename(where)}: TensorRT {self.version} cannot build an engine: {self.reason(mark)}")
        return bytes(memoryview(plan)), bytes(memoryview(timing.serialize()))

    def _add_profile(self, kit: Mapping[str, Any], builder: Any, network: Any, config: Any) -> None:
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        dynamic = [tensor for tensor in inputs if any(d < 0 for d in tuple(tensor.shape))]
        if not dynamic:
            return
        profile = builder.create_optimization_profile()
        for tensor in dynamic:
            profile.set_shape(tensor.name, *(tuple(shape) for shape in kit["shapes"][tensor.name]))
        if config.add_optimization_profile(profile) < 0:
            raise Fault(1, "TensorRT refuses the kit's shapes together")


class Engine:
    """A loaded engine: inputs and outputs in device memory, run on a stream of its own."""

    def __init__(self, tensorrt: TensorRT, cuda: Cuda, data: bytes, name: str) -> None:
        """`name` stands for the engine in messages. Code inside it is executed: it was built from this kit, here."""
        trt, mark = tensorrt.module, len(tensorrt.errors)
        self.tensorrt, self.cuda, self.name = tensorrt, cuda, name
        self.memory: dict[str, Memory] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.host: dict[str, Any] = {}
        self.stream = ctypes.c_void_p()
        self.graph: ctypes.c_void_p | None = None
        self.runtime = trt.Runtime(tensorrt.logger)
        self.runtime.engine_host_code_allowed = True
        self.engine = self.runtime.deserialize_cuda_engine(data)
        if self.engine is None:
            raise Fault(1, f"{name}: TensorRT cannot load the engine: {tensorrt.reason(mark)}")
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise Fault(1, f"{name}: no execution context: {tensorrt.reason(mark)}")
        cuda.call("cuStreamCreate", ctypes.byref(self.stream), 0)  # waits for the copies, which are of the default stream
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self.types = {n: self.engine.get_tensor_dtype(n).name for n in names}
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self.outputs = [n for n in names if n not in self.inputs]
        self.on_host = {n for n in names if self.engine.get_tensor_location(n) == trt.TensorLocation.HOST}
        self.allocator = _allocator(trt, cuda)
        self.sized_by_run: list[str] = []

    def bind(self, feeds: dict[str, Any]) -> None:
        """Sets shapes, uploads the feeds in the engine's types, and gives every output its memory."""
        mark = len(self.tensorrt.errors)
        for name in self.inputs:
            array = to_engine(feeds[name], self.types[name])
            if not self.context.set_input_shape(name, array.shape):
                raise Fault(1, f"{self.name}: input {name} of shape {array.shape} is refused: {self.tensorrt.reason(mark)}")
            self._place(name, array.shape, array)
        missing = self.context.infer_shapes()
        if missing:
            raise Fault(1, f"{self.name}: shapes cannot be inferred; TensorRT misses {', '.join(missing)}")
        self.sized_by_run = []
        for name in self.outputs:
            shape = tuple(self.context.get_tensor_shape(name))
            if any(length < 0 for length in shape):
                self.sized_by_run.append(name)
                if not self.context.set_output_allocator(name, self.allocator):
                    raise Fault(1, f"{self.name}: TensorRT refuses an allocator for output {name}")
            else:
                self._place(name, shape, None)

    def _place(self, name: str, shape: tuple[int, ...], content: Any) -> None:
        empty = np.empty(shape, storage(self.types[name])) if content is None else content
        self.shapes[name] = tuple(shape)
        if name in self.on_host:
            self.host[name] = empty
            address = empty.ctypes.data
        else:
            known = self.memory.get(name)
            if known is None or known.size < empty.nbytes:
                if known is not None:
                    known.free()
                self.memory[name] = known = Memory(self.cuda, empty.nbytes)
            if content is not None:
                known.put(content)
            address = known.address
        if not self.context.set_tensor_address(name, address):
            raise Fault(1, f"{self.name}: TensorRT refuses the memory for {name}")

    def enqueue(self) -> None:
        """Launches one run and does not wait for it. A kernel that was not launched is an error here, not a fast engine."""
        mark = len(self.tensorrt.errors)
        if not self.context.execute_async_v3(int(self.stream.value or 0)) or len(self.tensorrt.errors) > mark:
            raise Fault(1, f"{self.name}: enqueue failed: {self.tensorrt.reason(mark)}")

    def wait(self) -> None:
        self.cuda.call("cuStreamSynchronize", self.stream)

    def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        self.bind(feeds)
        self.enqueue()
        return self.fetch()

    def fetch(self) -> dict[str, Any]:
        """The outputs of the last run; bfloat16 as float32."""
        self.wait()
        found: dict[str, Any] = {}
        for name in self.outputs:
            if name in self.sized_by_run:
                if name not in self.allocator.shapes:
                    raise Fault(1, f"{self.name}: TensorRT did not say the shape of output {name}")
                array = np.empty(self.allocator.shapes[name], storage(self.types[name]))
                self.allocator.memory[name].get(array)
            elif name in self.on_host:
                array = self.host[name].copy()
            else:
                array = np.empty(self.shapes[name], storage(self.types[name]))
                self.memory[name].get(array)
            found[name] = from_engine(array, self.types[name])
        return found

    def capture(self) -> str | None:
        """Makes a CUDA graph of one run on what is bound; answers why there is none."""
        self.enqueue()  # TensorRT sets things up in the first run on a shape, which must not be captured
        self.wait()
        if self.sized_by_run:
            return "the size of an output is known only after a run"
        begun = self.cuda.library.cuStreamBeginCapture_v2(self.stream, CAPTURE_THREAD_LOCAL)
        if begun:
            return f"capture cannot begin: {self.cuda.name(begun)}"
        fault = None
        try:
            self.enqueue()
        except Fault as error:
            fault = str(error)
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        ended = self.cuda.library.cuStreamEndCapture(self.stream, ctypes.byref(graph))
        if ended or fault:
            if graph:
                self.cuda.call("cuGraphDestroy", graph)
            return fault or f"capture failed: {self.cuda.name(ended)}"
        made = self.cuda.library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0))
        self.cuda.call("cuGraphDestroy", graph)
        if made:
            return f"the graph cannot be instantiated: {self.cuda.name(made)}"
        self.graph = executable
        return None

    def launch(self) -> None:
        """One run: the graph where there is one."""
        if self.graph is None:
            self.enqueue()
        else:
            self.cuda.call("cuGraphLaunch", self.graph, self.stream)

    def launch_computes(self) -> bool:
        """Whether a launch itself makes the outputs of a run: they are overwritten before. A graph that misses a kernel is fast."""
        self.enqueue()
        wanted = self.fetch()
        for memory in self.memory.values() if self.graph is not None else ():
            if memory not in [self.memory.get(name) for name in self.inputs]:
                self.cuda.call("cuMemsetD8_v2", memory.pointer, ctypes.c_ubyte(0xFF), ctypes.c_size_t(memory.size))
        self.launch()
        got = self.fetch()
        return all(measure(got[name], wanted[name], SAME)["agrees"] for name in wanted)

    def layers(self) -> list[Any]:
        """The layer table, as TensorRT's inspector tells it."""
        inspector = self.engine.create_engine_inspector()
        try:
            table = json.loads(inspector.get_engine_information(self.tensorrt.module.LayerInformationFormat.JSON)).get("Layers", [])
        except (ValueError, AttributeError):
            return []
        return [layer if isinstance(layer, dict) else {"Name": str(layer)} for layer in table]

    def profile(self, feeds: dict[str, Any], runs: int = 20) -> list[dict[str, Any]]:
        """Microseconds of every layer, the median of `runs`, in the order of execution. TensorRT then runs layer by layer, so that the
        sum is more than a run takes.
        """
        self.bind(feeds)
        profiler = _profiler(self.tensorrt.module)
        self.context.profiler = profiler
        taken: dict[str, list[float]] = {}
        for _ in range(runs):
            self.enqueue()
            self.wait()
            for name, milliseconds in profiler.take().items():
                taken.setdefault(name, []).append(milliseconds)
        about = {str(layer.get("Name")): layer for layer in self.layers()}
        return [_layer(name, about.get(name, {}), each) for name, each in taken.items()]

    def close(self) -> None:
        self.wait()
        if self.graph is not None:
            self.cuda.call("cuGraphExecDestroy", self.graph)
            self.graph = None
        self.context = self.engine = self.runtime = None  # in this order
        for memory in [*self.memory.values(), *self.allocator.memory.values()]:
            memory.free()
        self.memory.clear()
        self.allocator.memory.clear()
        self.cuda.call("cuStreamDestroy_v2", self.stream)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()


def _layer(name: str, about: Mapping[str, Any], milliseconds: Sequence[float]) -> dict[str, Any]:
    """One layer of the report: what TensorRT's inspector says of it, and its median time."""
    parts = re.split(r"[\x1e\x1f]|\\u001[efEF]", str(about.get("Metadata") or ""))
    nodes = [match.group(1) for match in (re.match(r"\s*\[ONNX Layer: (.*)\]\s*$", part, re.DOTALL) for part in parts) if match]
    kernel = str(about.get("TacticName") or about.get("TacticValue") or "")
    median = float(np.median(np.asarray(milliseconds)))
    return {"name": name, "type": str(about.get("LayerType", "")), "nodes": nodes, "us": 1000.0 * median, "kernel": kernel}


def _profiler(trt: Any) -> Any:
    """Gathers what TensorRT says of the time of every layer: of one that ran several times, as in a loop, together."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times[layer_name] = self.times.get(layer_name, 0.0) + ms

        def take(self) -> dict[str, float]:
            taken, self.times = self.times, {}
            return taken

    return Profiler()


def _allocator(trt: Any, cuda: Cuda) -> Any:
    """Memory for outputs whose size is known only after a run."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.memory: dict[str, Memory] = {}
            self.shapes: dict[str, tuple[int, ...]] = {}

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            known = self.memory.get(tensor_name)
            if known is None or known.size < size:
                try:
                    self.memory[tensor_name] = Memory(cuda, size)
                except Fault:
                    return 0  # TensorRT reports the failed allocation
                if known is not None:
                    known.free()
            return self.memory[tensor_name].address

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self.shapes[tensor_name] = tuple(shape)

    return Allocator()


# Element types: TensorRT's name -> numpy's; bfloat16, which numpy lacks, is carried as its 16 bits.
NUMPY = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "uint16", "INT8": "int8", "UINT8": "uint8", "INT32": "int32", "INT64": "int64",
    "BOOL": "bool",
}  # fmt: skip


def storage(kind: str) -> Any:
    """numpy's type that holds a TensorRT type's bytes."""
    if kind not in NUMPY:
        raise Fault(1, f"a tensor of type {kind} cannot be read from numpy; cast it inside the model")
    return np.dtype(NUMPY[kind])


def to_engine(array: Any, kind: str) -> Any:
    """The array contiguous and in the engine's type; floats are rounded, to bfloat16 half to even."""
    array = np.asarray(array)
    if kind == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        array = np.where(np.isnan(array), np.uint16(0x7FC0), rounded).astype(np.uint16)
    # ascontiguousarray would make a scalar one-dimensional
    return np.require(array.astype(storage(kind), copy=False), requirements="C")


def from_engine(array: Any, kind: str) -> Any:
    return (array.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else array


# Are the outputs right? ----------------------------------------------------------------------------------------------------

FEW, FEW_NORMALISED, REL_FLOOR = 8, 0.1, 1e-6
# Two runs of one engine: sums in another order make no more difference.
SAME = {"rtol": None, "atol": None, "of_typical": 0.0, "cosine": None, "relative_rms": None, "normalised": 1e-3}


def measure(got: Any, want: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """How far an output is from its reference, and whether that is near enough by the kit's limits (null: not asked).

    Floats: NaN and infinity at the same places; |a-b| <= max(atol, of_typical*median|b|) + rtol*|b|; the cosine, norm(a-b)/norm(b) and
    max|a-b|/max|b|. All else must be equal.
    """
    got, want = np.asarray(got), np.asarray(want)
    found: dict[str, Any] = {
        "agrees": True, "reason": "", "dtype": want.dtype.name, "shape": list(want.shape), "elements": int(want.size), "max_abs": 0.0,
        "max_rel": 0.0, "cosine": 1.0, "relative_rms": 0.0, "normalised": 0.0, "used": 0.0, "outside": 0, "nan_equal": 0, "nan_differ": 0,
        "inf_equal": 0, "inf_differ": 0, "notes": [],
    }  # fmt: skip
    if got.shape != want.shape:
        return dict(found, agrees=False, reason=f"shape {list(got.shape)} instead of {list(want.shape)}")
    if want.dtype.kind != "f" or got.dtype.kind != "f":
        return _measure_exact(got, want, found)
    if got.dtype != want.dtype:
        found["notes"] = [f"{got.dtype.name} compared with {want.dtype.name}"]
    a, b = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    infinite = (np.isinf(a) | np.isinf(b)) & ~(nan_a | nan_b)
    found["nan_equal"], found["nan_differ"] = int(np.sum(nan_a & nan_b)), int(np.sum(nan_a != nan_b))
    found["inf_equal"], found["inf_differ"] = int(np.sum(infinite & (a == b))), int(np.sum(infinite & (a != b)))
    reasons = [
        f"{what} on one side only at {found[key]} places" for what, key in (("NaN", "nan_differ"), ("infinity", "inf_differ")) if found[key]
    ]
    finite_b = np.abs(b[np.isfinite(b)])
    top, typical = float(np.max(finite_b, initial=0.0)), float(np.median(finite_b)) if finite_b.size else 0.0
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    error = np.abs(a - b)
    atol, rtol = limits["atol"], limits["rtol"]
    if (atol is not None or rtol is not None) and error.size:
        bound = max(atol or 0.0, limits["of_typical"] * typical) + (rtol or 0.0) * np.abs(b)
        found["outside"] = int(np.sum(error > bound))
        found["used"] = float(np.max(np.divide(error, bound, out=np.where(error > 0, math.inf, 0.0), where=bound > 0)))
        if found["outside"]:
            reasons.append(f"{found['outside']} of {want.size} values are outside rtol {rtol} and atol {atol}")
    if error.size:
        found["max_abs"] = float(error.max())
        found["max_rel"] = float(np.max(error / np.maximum(np.abs(b), REL_FLOOR * top or np.finfo(np.float64).tiny)))
    norm_a, norm_b, norm_e = (float(np.sqrt(np.sum((x / (top or 1.0)) ** 2))) for x in (a, b, error))
    if norm_a and norm_b:
        found["cosine"] = float(np.clip(np.sum((a / (top or 1.0)) * (b / (top or 1.0))) / (norm_a * norm_b), -1.0, 1.0))
    else:
        found["cosine"] = float(bool(norm_a) == bool(norm_b))
    found["relative_rms"] = norm_e / norm_b if norm_b else (0.0 if not norm_e else math.inf)
    found["normalised"] = found["max_abs"] / top if top else (0.0 if not found["max_abs"] else math.inf)
    if top or (atol is None and rtol is None):
        share, why = _scale_free(found, limits, int(want.size))
        found["used"] = max(found["used"], share)
        reasons += why
    if found["nan_differ"] or found["inf_differ"]:
        found["used"] = math.inf
    return dict(found, agrees=not reasons, reason="; ".join(reasons))


def _measure_exact(got: Any, want: Any, found: dict[str, Any]) -> dict[str, Any]:
    if got.dtype != want.dtype:
        return dict(found, agrees=False, reason=f"{got.dtype.name} instead of {want.dtype.name}")
    different = int(np.sum(got != want))
    reason = f"{different} of {want.size} values differ" if different else ""
    return dict(found, agrees=not different, reason=reason, outside=different, used=math.inf if different else 0.0)


def _scale_free(found: Mapping[str, Any], limits: Mapping[str, Any], size: int) -> tuple[float, list[str]]:
    """The share of the limits that the worst figure takes, and what is beyond them."""
    used, reasons = 0.0, []
    if limits["cosine"] is not None and size >= FEW:
        used = max(used, (1.0 - found["cosine"]) / (1.0 - limits["cosine"]))
        if found["cosine"] < limits["cosine"]:
            reasons.append(f"cosine {found['cosine']:.6f} is below {limits['cosine']:g}")
    if limits["relative_rms"] is not None and size >= FEW:
        used = max(used, found["relative_rms"] / limits["relative_rms"])
        if found["relative_rms"] > limits["relative_rms"]:
            reasons.append(f"the error's norm is {found['relative_rms']:.3g} of the reference's, above {limits['relative_rms']:g}")
    if limits["normalised"] is not None:
        limit = limits["normalised"] if size >= FEW else max(FEW_NORMALISED, limits["normalised"])
        used = max(used, found["normalised"] / limit)
        if found["normalised"] > limit:
            reasons.append(f"largest error is {found['normalised']:.3g} of the largest reference value, above {limit:g}")
    return used, reasons


def worst(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One output over several cases: the largest errors, the smallest cosine, and the first reason."""
    bad = next((m for m in each if not m["agrees"]), each[0])
    found = dict(bad)
    for key in ("max_abs", "max_rel", "relative_rms", "normalised", "used"):
        found[key] = max(m[key] for m in each)
    found["cosine"] = min(m["cosine"] for m in each)
    for key in ("elements", "outside", "nan_equal", "nan_differ", "inf_equal", "inf_differ"):
        found[key] = sum(m[key] for m in each)
    return found


def check(kit: Mapping[str, Any], got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every output of every case against the reference."""
    outputs: dict[str, Any] = {}
    for name in wanted[0]:
        each = [
            measure(have[name], want[name], kit["tolerance"]) if name in have else measure(np.zeros(0), want[name], kit["tolerance"])
            for have, want in zip(got, wanted)
        ]
        outputs[name] = worst(each)
    return {
        "agrees": all(metrics["agrees"] for metrics in outputs.values()),
        "reference": kit["reference"], "tolerance": kit["tolerance"], "feeds": len(wanted), "notes": kit["notes"], "outputs": outputs,
    }  # fmt: skip


# How fast? -----------------------------------------------------------------------------------------------------------------

SAMPLE_MS, CLOCK_TOLERANCE, RATIO_WIDTH_LIMIT = 2.0, 0.03, 0.05
# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom; the last serves for more.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Any) -> dict[str, float]:
    """Geometric mean of one value a placement, and Student's 95 % interval: a placement is one observation, however many samples it has."""
    logs = np.log(values)
    half = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1] * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    centre = float(logs.mean())
    return {key: round(math.exp(centre + shift), 6) for key, shift in (("median", 0.0), ("low", -half), ("high", half))}


def verdict(ratio: Mapping[str, float]) -> str:
    """An interval that covers 1 decides nothing."""
    if ratio["low"] <= 1.0 <= ratio["high"]:
        return "draw"
    return "faster" if ratio["low"] > 1.0 else "slower"


def time_engines(
    load: Mapping[str, Callable[[], Engine]], feeds: dict[str, Any], cuda: Cuda, clocks: Clocks, options: argparse.Namespace
) -> dict[str, Any]:
    """CUDA graph replay, events, warm-up; engines in turns, in an order that turns round; loaded anew for each placement, every time
    elsewhere in memory, since one engine runs several per cent faster or slower from one loading to the next.
    """
    each = max(2, -(-options.samples // options.placements))
    taken: dict[str, list[float]] = {name: [] for name in load}
    marks: list[str] = []
    before = clocks.read()
    random = np.random.RandomState(0)
    names = list(load)
    for _ in range(options.placements):
        spacer = Memory(cuda, int(random.randint(1, 256)) << 20)  # moves what is loaded after it
        with contextlib.ExitStack() as stack:
            stack.callback(spacer.free)
            engines = {name: stack.enter_context(load[name]()) for name in names}
            for name, engine in engines.items():
                engine.bind(feeds)
                why_not = engine.capture()
                if why_not:
                    marks.append(f"{name}: no CUDA graph, timed by plain enqueue ({why_not})")
                if not engine.launch_computes():
                    marks.append(f"{name}: what is timed gives other outputs than a run")
            runs = {name: warm_up(cuda, engine, options.warm_up) for name, engine in engines.items()}
            order = list(engines)
            for _ in range(each):
                for name in order:
                    taken[name].append(timed(cuda, engines[name], runs[name]))
                order.reverse()
        names = names[1:] + names[:1]
    marks += judge(before, clocks.read())
    return summary(taken, options.placements, marks, before)


def warm_up(cuda: Cuda, engine: Engine, seconds: float) -> int:
    """Runs until the clocks settle; answers how many runs one sample averages over."""
    count, end = 1, time.monotonic() + seconds
    while True:
        one = timed(cuda, engine, count)
        if time.monotonic() >= end:
            return max(1, math.ceil(SAMPLE_MS / max(one, 1e-6)))
        count = max(1, min(1000, math.ceil(10.0 / max(one, 1e-3))))


def timed(cuda: Cuda, engine: Engine, count: int) -> float:
    """Milliseconds of one run, over `count` back to back."""
    start, end, spent = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
    for event in (start, end):
        cuda.call("cuEventCreate", ctypes.byref(event), 0)
    cuda.call("cuEventRecord", start, engine.stream)
    for _ in range(count):
        engine.launch()
    cuda.call("cuEventRecord", end, engine.stream)
    cuda.call("cuEventSynchronize", end)
    cuda.call("cuEventElapsedTime", ctypes.byref(spent), start, end)
    for event in (start, end):
        cuda.call("cuEventDestroy_v2", event)
    if not 0 < spent.value < math.inf:
        raise Fault(1, f"{engine.name}: a run is said to have taken {spent.value} ms, which is no time; nothing was measured")
    return spent.value / count


def judge(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Reasons of the clocks not to trust the figures."""
    marks = []
    for what in ("sm", "memory"):
        then, now = before[what], after[what]
        if then and now and abs(now - then) / then > CLOCK_TOLERANCE:
            marks.append(f"{what} clock moved from {then} to {now} MHz while measuring")
    return marks


def summary(taken: Mapping[str, Sequence[float]], placements: int, marks: Sequence[str], clocks: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, and ratios of the first engine over each other one: above 1, the other is faster."""
    medians = {name: np.median(np.asarray(each, np.float64).reshape(placements, -1), axis=1) for name, each in taken.items()}
    baseline, *others = taken
    ratios: dict[str, Any] = {}
    wide = []
    for name in others:
        ratio = interval(medians[baseline] / medians[name])
        ratios[name] = dict(ratio, verdict=verdict(ratio))
        width = (ratio["high"] - ratio["low"]) / ratio["median"]
        if width > RATIO_WIDTH_LIMIT:
            limit = f"{100 * RATIO_WIDTH_LIMIT:.0f} %"
            wide.append(f"{baseline} over {name}: interval too wide, {100 * width:.1f} % of the ratio (limit {limit})")
    return {
        "engines": {name: interval(each) for name, each in medians.items()}, "baseline": baseline, "ratios": ratios,
        "samples": len(taken[baseline]), "placements": placements, "marks": list(dict.fromkeys([*marks, *wide])), "clocks": dict(clocks),
        "samples_ms": {name: list(each) for name, each in taken.items()},
    }  # fmt: skip


# All of it -----------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _options(arguments)
        if options.fresh:
            return run_fresh(options.fresh)
        return work(options)
    except Fault as fault:
        print("error: " + " ".join(str(fault).split()), file=sys.stderr)
        return fault.status
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Builds, checks and times the engines of this kit on the GPU here.")
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=os.path.join(HERE, "result"),
        help="where engines and report.json go (default: result beside this file)",
    )
    parser.add_argument("--samples", metavar="N", type=int, default=400, help="samples of each engine (default: 400); 0 does not time")
    parser.add_argument(
        "--placements", metavar="N", type=int, default=8, help="how often engines are loaded anew while timing (default: 8)"
    )
    parser.add_argument("--warm-up", metavar="S", type=float, default=0.2, help="seconds to warm up before each loading (default: 0.2)")
    parser.add_argument("--sha256", metavar="HASH", help="the hash of kit.json that was said when the kit was made: refuses any other kit")
    parser.add_argument("--fresh", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.samples < 0 or options.placements < 2:
        parser.error("--samples cannot be negative, and --placements must be 2 or more")
    return options


def work(options: argparse.Namespace) -> int:
    kit = read_kit(HERE, options.sha256)
    cases = read_reference(HERE)
    tensorrt, cuda, clocks = TensorRT(), Cuda(), Clocks()
    gpu, sm = cuda.describe()
    check_gpu(kit, gpu, sm)
    say(f"{kit['model']} on {gpu} (sm_{sm}), TensorRT {tensorrt.version}")
    out = os.path.abspath(options.out)
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise Fault(2, f"--out {out}: {error.strerror}; give another folder") from None
    machine = {
        "gpu": f"{gpu} (sm_{sm})", "driver": clocks.driver() or f"CUDA {cuda.version()}", "cuda": cuda.version(),
        "tensorrt": tensorrt.version,
        "python": platform.python_version(), "numpy": np.__version__, "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "command": "python3 kit.py",
    }  # fmt: skip
    engines = build_all(kit, tensorrt, cuda, out, {**machine, "gpu_name": gpu, "sm": sm})
    checks = check_all(kit, tensorrt, cuda, engines, cases)
    for name, found in checks.items():
        if found["agrees"] and kit["engines"][name]["plugins"]:
            alone = fresh_process(kit, name, os.path.join(out, f"{name}.engine"), cases[0])
            if not alone["agrees"]:
                checks[name] = dict(alone, notes=[*alone["notes"], "in a fresh process, without the plugin library"])
            else:
                found["notes"] = [*found["notes"], "it runs in a fresh process without the plugin library, and agrees there, too"]
    timings, layers = None, {}
    if options.samples and all(found["agrees"] for found in checks.values()):  # a wrong result has no latency
        say(f"timing {' and '.join(engines)}: {options.samples} samples each, {options.placements} loadings")
        load = {name: functools.partial(Engine, tensorrt, cuda, data, name) for name, data in engines.items()}
        timings = time_engines(load, cases[0][0], cuda, clocks, options)
        for name in engines:
            with load[name]() as engine:
                layers[name] = engine.profile(cases[0][0])
    found = report(kit, machine, checks, timings, layers)
    write(os.path.join(out, "report.json"), (json.dumps(plain(found), indent=1, allow_nan=False) + "\n").encode())
    return tell(found, out)


def check_gpu(kit: Mapping[str, Any], gpu: str, sm: int) -> None:
    """The plugin library holds code for the kit's GPUs alone."""
    if sm in kit["architectures"] or (kit["compatible"] and sm >= 80):
        return
    raise Fault(3, f"this kit is for {kit['gpu']} (sm_{kit['sm']}), and here is {gpu} (sm_{sm}); make one with --gpu sm_{sm}")


def build_all(kit: Mapping[str, Any], tensorrt: TensorRT, cuda: Cuda, out: str, machine: Mapping[str, Any]) -> dict[str, bytes]:
    """Builds and writes every engine of the kit with its manifest. They share one timing cache, so that equal layers get equal kernels."""
    engines: dict[str, bytes] = {}
    cache_path = os.path.join(out, "timing.cache")
    cache = b""
    if os.path.isfile(cache_path):
        with open(cache_path, "rb") as file:
            cache = file.read()
    with tempfile.TemporaryDirectory(prefix="onnxfuse-kit-") as private:
        # Nobody can change this copy between the look at its hash and its loading.
        library = private_copy(kit, private) if kit["library"] else None
        if library:
            tensorrt.load(library)
        for name, wanted in kit["engines"].items():
            say(f"building {name}")
            start = time.monotonic()
            with open(os.path.join(HERE, wanted["model"]), "rb") as file:
                model = file.read()
            if hashlib.sha256(model).hexdigest() != kit["files"][wanted["model"]]:
                raise Fault(2, f"{wanted['model']} changed while the kit was read; copy the kit again")
            embedded = library if wanted["plugins"] else None
            engines[name], cache = tensorrt.build(kit, model, os.path.join(HERE, wanted["model"]), embedded, cache)
            seconds = time.monotonic() - start
            with Engine(tensorrt, cuda, engines[name], name) as engine:
                described = manifest(kit, wanted, engines[name], engine, machine, seconds)
            write(os.path.join(out, f"{name}.engine"), engines[name])
            write(os.path.join(out, f"{name}.engine.json"), (json.dumps(plain(described), indent=1) + "\n").encode())
            write(cache_path, cache)
    return engines


def private_copy(kit: Mapping[str, Any], folder: str) -> str:
    with open(os.path.join(HERE, kit["library"]), "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != kit["files"][kit["library"]]:
        raise Fault(2, f"{kit['library']} changed while the kit was read; copy the kit again")
    path = os.path.join(folder, kit["library"])
    with open(path, "wb") as file:
        file.write(data)
    return path


def manifest(
    kit: Mapping[str, Any], wanted: Mapping[str, Any], data: bytes, engine: Engine, machine: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """What onnxfuse writes beside an engine."""

    def tensor(name: str) -> dict[str, Any]:
        low, mid, high = kit["shapes"].get(name, (None, None, None)) if name in engine.inputs else (None, None, None)
        kind = "bfloat16" if engine.types[name] == "BF16" else str(storage(engine.types[name]))
        return {"name": name, "dtype": kind, "shape": list(engine.engine.get_tensor_shape(name)), "min": low, "opt": mid, "max": high}

    plugins = (
        {"file": None, "sha256": kit["files"][kit["library"]], "embedded": True, "ops": wanted["plugins"]} if wanted["plugins"] else None
    )
    return {
        "schema": 1, "model": kit["model"], "model_sha256": kit["model_sha256"], "engine_sha256": hashlib.sha256(data).hexdigest(),
        "engine_bytes": len(data), "plugins": plugins, "tensorrt": machine["tensorrt"], "driver": machine["driver"],
        "gpu": machine["gpu_name"], "sm": machine["sm"], "inputs": [tensor(n) for n in engine.inputs],
        "outputs": [tensor(n) for n in engine.outputs], "strongly_typed": True, "build_seconds": round(seconds, 3),
        "inspector": engine.layers(), "warnings": [], "compatible": kit["compatible"],
    }  # fmt: skip


def check_all(
    kit: Mapping[str, Any],
    tensorrt: TensorRT,
    cuda: Cuda,
    engines: Mapping[str, bytes],
    cases: Sequence[tuple[dict[str, Any], dict[str, Any]]],
) -> dict[str, Any]:
    found = {}
    for name, data in engines.items():
        with Engine(tensorrt, cuda, data, name) as engine:
            found[name] = check(kit, [engine.run(feeds) for feeds, _ in cases], [outputs for _, outputs in cases])
    return found


def fresh_process(kit: Mapping[str, Any], name: str, path: str, case: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """The first case in a new process that loads no plugin library: an engine that carries its plugins needs TensorRT alone."""
    say(f"running {name} in a fresh process, with no plugin library")
    with tempfile.TemporaryDirectory(prefix="onnxfuse-kit-") as folder:
        order = os.path.join(folder, "order.json")
        np.savez(os.path.join(folder, "in.npz"), **{f"in/{name}": array for name, array in case[0].items()})
        with open(order, "w", encoding="utf-8") as file:
            json.dump({"engine": path, "inputs": os.path.join(folder, "in.npz"), "outputs": os.path.join(folder, "out.npz")}, file)
        command = [sys.executable, os.path.abspath(__file__), "--fresh", order]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False, timeout=600)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
            raise Fault(1, f"{name} does not run in a fresh process: {said[-1][:300]}")
        with np.load(os.path.join(folder, "out.npz"), allow_pickle=False) as data:
            return check(kit, [{key[4:]: data[key] for key in data.files}], [case[1]])


def run_fresh(order_path: str) -> int:
    """In the new process: TensorRT alone."""
    with open(order_path, encoding="utf-8") as file:
        order = json.load(file)
    with np.load(order["inputs"], allow_pickle=False) as data:
        feeds = {key[3:]: data[key] for key in data.files}
    with open(order["engine"], "rb") as file:
        content = file.read()
    with Engine(TensorRT(), Cuda(), content, os.path.basename(order["engine"])) as engine:
        np.savez(order["outputs"], **{f"out/{name}": array for name, array in engine.run(feeds).items()})
    return 0


def report(
    kit: Mapping[str, Any], machine: Mapping[str, Any], checks: Mapping[str, Any], timings: dict[str, Any] | None, layers: Mapping[str, Any]
) -> dict[str, Any]:
    """The report that `onnxfuse report` reads, of onnxfuse/report/schema.json; parts that were not made are left off."""
    others = [{"name": name, "path": f"{name}.engine", "kind": "engine", "check": found} for name, found in checks.items()]
    found = {
        "schema": 2, "kind": "compare", "onnxfuse": kit["onnxfuse"], "model": {"name": kit["model"], "path": None},
        "machine": dict(machine),
        "agrees": all(found["agrees"] for found in checks.values()), "inputs": kit["inputs"], "others": others,
    }  # fmt: skip
    if timings is not None:
        found["timings"] = timings
    if {"automatic", "fused"} <= set(layers):
        found["layers"] = dict(layers)
    return found


def plain(value: Any) -> Any:
    """JSON has neither NaN nor infinity: null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def tell(found: Mapping[str, Any], out: str) -> int:
    """What was found, in a few lines; the exit status."""
    for other in found["others"]:
        outputs = other["check"]["outputs"]
        if other["check"]["agrees"]:
            largest = max((m["max_abs"] for m in outputs.values()), default=0.0)
            cosine = min((m["cosine"] for m in outputs.values()), default=1.0)
            say(f"{other['name']}: agrees with the reference (largest difference {largest:.3g}, cosine {cosine:.6f})")
        for name, metrics in outputs.items():
            if not metrics["agrees"]:
                say(f"{other['name']}: output {name!r} DIFFERS: {metrics['reason']}")
        for note in other["check"]["notes"]:
            say(f"{other['name']}: {note}")
    timings = found.get("timings")
    if timings:
        for name, each in timings["engines"].items():
            say(f"{name}: {each['median']:.4f} ms ({each['low']:.4f} to {each['high']:.4f})")
        for name, ratio in timings["ratios"].items():
            bounds = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
            say(f"{name} is {ratio['median']:.3f} times as fast as {timings['baseline']} ({bounds}): {ratio['verdict']}")
        for mark in timings["marks"]:
            say(f"note: {mark}")
    say(f"wrote {os.path.join(out, 'report.json')}")
    return 0 if found["agrees"] else 1


def say(line: str) -> None:
    print("".join(c if c.isprintable() else " " for c in line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
