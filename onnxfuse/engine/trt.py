"""TensorRT and CUDA: the one place that imports tensorrt, pycuda and cuda-bindings. How TensorRT's versions differ is in `versions`.

What every version does, and is hidden here:
- loading a plugin library twice answers None, as does a library that cannot be loaded;
- a builder made on a machine without a driver ends the process, so the driver is asked first;
- the layer table's JSON spells the data type in one field or in two.

TensorRT's runtime works in the device's primary context. pycuda is given that same context, so that both (and torch, if it is
loaded) see the same memory.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import json
import re
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from onnxfuse.engine import versions
from onnxfuse.errors import BadInput, MissingHere, OnnxfuseError

PLUGIN_NAMESPACE = "onnxfuse"

Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest shape, the one to optimize for, and largest."""


class EngineFault(OnnxfuseError):
    """TensorRT or CUDA failed while an engine ran: the engine exists, but gives no outputs to trust."""

    exit_status = 1


class TensorSpec(NamedTuple):
    """An input or output of an engine."""

    name: str
    dtype: str
    """numpy's or ml_dtypes' name, "float16", "bfloat16", "int64"..."""
    shape: tuple[int, ...]
    """-1 where the length is dynamic."""
    is_input: bool
    on_host: bool
    """Whether TensorRT wants it in the host's memory (it holds a shape)."""


class Device(NamedTuple):
    """The GPU that TensorRT uses here."""

    name: str
    """As the driver says it, e.g. "NVIDIA H200"."""
    sm: int
    """Compute capability, 90 for 9.0."""
    driver: str
    """Driver release, e.g. "580.159.03"; "CUDA 13.0" where only the CUDA version of the driver can be read."""


class Monitor(Protocol):
    """What a build reports to. Called from TensorRT's threads; must not raise. Any False stops the build."""

    def phase_start(self, phase: str, parent: str | None, steps: int) -> None: ...
    def step_complete(self, phase: str, step: int) -> bool: ...
    def phase_finish(self, phase: str) -> None: ...


@dataclass(frozen=True)
class Order:
    """Everything that a build depends on; plain values only."""

    model: bytes
    path: Path
    """Where the model came from: external data are relative to its folder."""
    profiles: Mapping[str, Range] = field(default_factory=dict)
    """By input."""
    cache: bytes | None = None
    """A serialized timing cache; b"" starts a new one; None builds without one that outlives the build."""
    libraries: tuple[Path, ...] = ()
    """Plugin libraries to load."""
    embed: bool = True
    taps: tuple[str, ...] = ()
    """Tensors inside of the network that become outputs, too. TensorRT then fuses nothing across them."""
    compatible: bool = False
    """For every GPU from Ampere on, instead of the one here."""
    level: int | None = None
    """TensorRT's builder optimization level, 0 (quickest build) to 5; None for its default, 3."""
    fp16_flag: bool = False
    """Weakly typed network with the FP16 flag, TensorRT 10.x only: a reference for benchmarks, never what a user gets.
    """


@dataclass(frozen=True)
class Built:
    """What a build gives."""

    engine: bytes
    cache: bytes | None
    tensors: tuple[TensorSpec, ...]
    layers: tuple[dict[str, Any], ...]
    """One dictionary a layer, as TensorRT's inspector tells it."""
    warnings: tuple[str, ...]


# Finding what is here -----------------------------------------------------------------------------------------------


@functools.cache
def tensorrt() -> types.ModuleType:
    """The tensorrt module, or MissingHere with the remedy."""
    try:
        module = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("tensorrt"):
            raise MissingHere(
                "TensorRT is not installed here: no module named tensorrt; `pip install tensorrt` (or `onnxfuse[gpu]`)"
            ) from None
        raise MissingHere(f"TensorRT cannot be loaded here: {error}; reinstall the tensorrt package") from None
    except (ImportError, OSError) as error:
        raise MissingHere(
            f"TensorRT cannot be loaded here: {error}; its libraries (libnvinfer) must be installed and on LD_LIBRARY_PATH"
        ) from None
    if not hasattr(module, "Builder"):
        raise MissingHere("TensorRT cannot be loaded here: the module tensorrt is empty; reinstall the tensorrt package")
    if versions.number(module) < versions.OLDEST:
        raise MissingHere(f"TensorRT {module.__version__} is too old: 10.0 or newer is needed; `pip install -U tensorrt`")
    return module


def version() -> str:
    """The version of the TensorRT here, e.g. "10.6.0.post1"."""
    return str(tensorrt().__version__)


@functools.cache
def cuda() -> types.ModuleType:
    """pycuda's driver module, initialised, or MissingHere that tells package, driver and GPU apart."""
    try:
        driver = importlib.import_module("pycuda.driver")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pycuda"):
            raise MissingHere("pycuda is not installed here; `pip install pycuda` (it needs a CUDA toolkit), or `onnxfuse[gpu]`") from None
        raise MissingHere(f"pycuda cannot be loaded here: it needs the package {error.name}; `pip install {error.name}`") from None
    except (ImportError, OSError) as error:
        if "libcuda" in str(error):
            raise MissingHere("no NVIDIA driver here: libcuda.so.1 was not found; install the driver of the GPU") from None
        raise MissingHere(f"pycuda cannot be loaded here: {error}; reinstall pycuda against this machine's CUDA") from None
    try:
        driver.init()
        count = driver.Device.count()
    except driver.Error as error:
        raise MissingHere(f"no NVIDIA GPU can be used here: the driver answers {error}; check `nvidia-smi`") from None
    if count == 0:
        raise MissingHere("no NVIDIA GPU here: the driver is installed and sees none; check `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    return driver


_context: Any = None


def activate() -> types.ModuleType:
    """pycuda's driver module, with the primary context of device 0 made current in the first thread that asks."""
    global _context  # noqa: PLW0603  (the process has one primary context)
    driver = cuda()
    if _context is None:
        _context = driver.Device(0).retain_primary_context()
        _context.push()
        atexit.register(_leave)
    return driver


def _leave() -> None:
    """Without this pycuda aborts the process on its way out, complaining of a context left on its stack."""
    global _context  # noqa: PLW0603
    with contextlib.suppress(Exception):
        _context.pop()
    _context = None


def gpu() -> Device:
    """The GPU here, or MissingHere. Needs pycuda and the driver, not TensorRT."""
    driver = cuda()
    device = driver.Device(0)
    major, minor = device.compute_capability()
    return Device(device.name(), 10 * major + minor, _driver_version(driver))


def free_memory() -> int:
    """Bytes of device memory that nobody uses now."""
    return int(activate().mem_get_info()[0])


def _driver_version(driver: types.ModuleType) -> str:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        text = nvml.nvmlSystemGetDriverVersion()
        return text.decode() if isinstance(text, bytes) else str(text)
    except Exception:
        with contextlib.suppress(OSError):
            match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
            if match:
                return match.group(1)
        number = driver.get_driver_version()
        return f"CUDA {number // 1000}.{number % 1000 // 10}"


def graphs() -> types.ModuleType | None:
    """cuda-bindings' driver module, for CUDA graphs, which pycuda lacks; None where the package is not installed."""
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


# TensorRT's messages ------------------------------------------------------------------------------------------------


class Messages:
    """What TensorRT said, by severity; filled from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: list[tuple[bool, str]] = []

    def add(self, is_error: bool, text: str) -> None:
        with self._lock:
            self._lines.append((is_error, text))

    def mark(self) -> int:
        """A place to read on from."""
        with self._lock:
            return len(self._lines)

    def errors(self, since: int = 0) -> list[str]:
        with self._lock:
            return [text for is_error, text in self._lines[since:] if is_error]

    def warnings(self, since: int = 0) -> list[str]:
        with self._lock:
            return [text for is_error, text in self._lines[since:] if not is_error]

    def reason(self, since: int, otherwise: str) -> str:
        """The first error as one short line: the later ones are consequences."""
        return shorten(next(iter(self.errors(since)), otherwise))


def shorten(text: str, limit: int = 300) -> str:
    """One line, without TensorRT's source positions and error-code boilerplate, cut at `limit` characters."""
    line = " ".join(text.split())
    line = re.sub(r"^\[[\w./]+::[^\]]*\]\s*", "", line)
    line = re.sub(r"^(I\w+::\w+|\w+): (?=Error Code)", "", line)
    line = re.sub(r"^Error Code (\d+): ", r"error \1: ", line)
    line = re.sub(r"\s*\(?In \w+ at \S+:\d+\)?$", "", line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


MESSAGES = Messages()


@functools.cache
def logger() -> Any:
    """TensorRT keeps the first logger of a process for good, so there is one, and it writes to MESSAGES."""
    trt = tensorrt()
    severities = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)

    class Collector(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in severities:
                MESSAGES.add(True, message)
            elif severity == trt.ILogger.WARNING:
                MESSAGES.add(False, message)

    return Collector()


# Plugins --------------------------------------------------------------------------------------------------------------

_loaded: dict[str, Any] = {}


@functools.cache
def _standard_plugins() -> None:
    trt = tensorrt()
    if hasattr(trt, "init_libnvinfer_plugins"):
        trt.init_libnvinfer_plugins(logger(), "")


def load_plugins(library: Path) -> None:
    """Registers the creators of a plugin library with TensorRT. Loading the same content again does nothing.

    Needs no GPU. Raises BadInput where TensorRT does not take the library.
    """
    trt = tensorrt()
    _standard_plugins()
    try:
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(f"plugin library {library}: {error.strerror}; build it with `onnxfuse plugins build`") from None
    if digest in _loaded:
        return
    mark = MESSAGES.mark()
    handle = trt.get_plugin_registry().load_library(str(library.resolve()))
    if handle is None:
        clash = "another build of it is loaded in this process"
        unknown = "TensorRT does not say why; it must export getCreators and setLoggerFinder"
        reason = MESSAGES.reason(mark, clash if creators() else unknown)
        raise BadInput(f"plugin library {library} cannot be loaded: {reason}; start a new process, or `onnxfuse plugins build`")
    _loaded[digest] = handle


def creators(namespace: str = PLUGIN_NAMESPACE) -> tuple[str, ...]:
    """Names of the plugin creators that TensorRT knows in a namespace, sorted."""
    every = tensorrt().get_plugin_registry().all_creators
    return tuple(sorted({c.name for c in every if c.plugin_namespace == namespace}))


# Building -------------------------------------------------------------------------------------------------------------


def build(order: Order, monitor: Monitor | None = None) -> Built | None:
    """Builds an engine; None when the monitor stopped it. Raises BadInput with TensorRT's first reason.

    Blocks for as long as TensorRT builds, without the interpreter's lock. Any thread will do: TensorRT binds the
    primary context.
    """
    trt = tensorrt()
    cuda()  # without a driver the next line would end the process
    _standard_plugins()
    for library in order.libraries:
        load_plugins(library)
    mark = MESSAGES.mark()
    builder = trt.Builder(logger())
    network = builder.create_network(versions.network_flags(trt, strongly_typed=not order.fp16_flag))
    _parse(trt, network, order, mark)
    _mark(network, order.taps)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if order.fp16_flag:
        config.set_flag(trt.BuilderFlag.FP16)
    if order.level is not None:
        config.builder_optimization_level = order.level
    _add_profile(trt, builder, network, config, order)
    if order.compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    cache = _attach_cache(config, order)
    embed = order.embed and bool(order.libraries)
    if embed:
        config.plugins_to_serialize = [str(library.resolve()) for library in order.libraries]
    watcher = _watcher(trt, monitor) if monitor is not None else None
    if watcher is not None:
        config.progress_monitor = watcher
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        if watcher is not None and watcher.stopped:
            return None
        reason = MESSAGES.reason(mark, "TensorRT gives no reason")
        raise BadInput(f"{order.path}: TensorRT cannot build an engine: {reason}")
    engine = bytes(memoryview(plan))
    return Built(
        engine,
        bytes(memoryview(cache.serialize())) if cache is not None else None,
        *_described(engine, str(order.path), host_code=embed),
        tuple(dict.fromkeys(shorten(text) for text in MESSAGES.warnings(mark))),
    )


def fp16_flag_exists() -> bool:
    """Whether a weakly typed network with the FP16 flag can be built here (TensorRT 10.x)."""
    return versions.has_fp16_flag(tensorrt())


def _parse(trt: types.ModuleType, network: Any, order: Order, mark: int) -> None:
    parser = trt.OnnxParser(network, logger())
    if parser.parse(order.model, str(order.path.resolve())):
        return
    problems = [_problem(parser.get_error(i)) for i in range(parser.num_errors)]
    reason = problems[0] if problems else MESSAGES.reason(mark, "TensorRT's parser gives no reason")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise BadInput(f"{order.path}: TensorRT cannot take the model: {reason}{more}")


def _mark(network: Any, names: Sequence[str]) -> None:
    """Makes outputs of tensors, those that the network has. Not `mark_debug`: with several of these inside of one region, TensorRT 10.6
    corrupts its heap.
    """
    wanted = set(names)
    for i in range(network.num_layers if wanted else 0):
        layer = network.get_layer(i)
        for k in range(layer.num_outputs):
            tensor = layer.get_output(k)
            if tensor is not None and tensor.name in wanted:
                wanted.remove(tensor.name)
                if not tensor.is_network_output:
                    network.mark_output(tensor)


def _problem(error: Any) -> str:
    """One line from a parser error: the node, its operator, and what is wrong."""
    name, operator = error.node_name(), error.node_operator()
    where = f"node {name or error.node()} ({operator}): " if operator else ""
    return where + shorten(error.desc())


def _add_profile(trt: types.ModuleType, builder: Any, network: Any, config: Any, order: Order) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    for tensor in inputs:
        if tensor.is_shape_tensor:
            raise BadInput(
                f"{order.path}: input {tensor.name} holds a shape, which TensorRT needs when building; make it a constant of the model"
            )
    dynamic = [t for t in inputs if any(d < 0 for d in tuple(t.shape))]
    if not dynamic:
        return
    profile = builder.create_optimization_profile()
    for tensor in dynamic:
        if tensor.name not in order.profiles:
            raise BadInput(f"{order.path}: input {tensor.name} has a dynamic shape; give --shapes {tensor.name}:MIN..OPT..MAX")
        try:
            profile.set_shape(tensor.name, *order.profiles[tensor.name])
        except (ValueError, TypeError, RuntimeError) as error:
            raise BadInput(f"{order.path}: input {tensor.name}: TensorRT refuses these shapes: {shorten(str(error))}") from None
    if config.add_optimization_profile(profile) < 0:
        raise BadInput(f"{order.path}: TensorRT refuses the shapes given by --shapes together")


def _attach_cache(config: Any, order: Order) -> Any:
    if order.cache is None:
        return None
    mark = MESSAGES.mark()
    cache = config.create_timing_cache(order.cache)
    # TensorRT 10.6 makes an empty cache of what it cannot read, and says nothing.
    unread = cache is not None and 2 * len(bytes(memoryview(cache.serialize()))) < len(order.cache)
    if cache is None or unread or not config.set_timing_cache(cache, ignore_mismatch=False):
        reason = MESSAGES.reason(mark, "it belongs to another GPU or another TensorRT version")
        raise BadInput(f"the timing cache cannot be used here: {reason}; name a new file, and it will be made")
    return cache


def _watcher(trt: types.ModuleType, monitor: Monitor) -> Any:
    class Watcher(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        """Passes TensorRT's progress on. An exception here would be printed by TensorRT and lost, so it stops the build."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped = False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._pass(lambda: monitor.phase_start(phase_name, parent_phase or None, num_steps))

        def phase_finish(self, phase_name: str) -> None:
            self._pass(lambda: monitor.phase_finish(phase_name))

        def step_complete(self, phase_name: str, step: int) -> bool:
            if self._pass(lambda: monitor.step_complete(phase_name, step)) is False:
                self.stopped = True
            return not self.stopped

        def _pass(self, report: Any) -> Any:
            try:
                return report()
            except BaseException:
                self.stopped = True
                return False

    return Watcher()


def _described(data: bytes, what: str, host_code: bool) -> tuple[tuple[TensorSpec, ...], tuple[dict[str, Any], ...]]:
    """Tensors and layer table of an engine just built here."""
    runtime, engine = deserialize(data, what, host_code)
    described = tensors(engine), layer_table(engine)
    del engine  # before its runtime
    del runtime
    return described


def layer_table(engine: Any) -> tuple[dict[str, Any], ...]:
    """The inspector's layer table of a deserialized engine built with detailed verbosity; only names where it was not."""
    text = engine.create_engine_inspector().get_engine_information(tensorrt().LayerInformationFormat.JSON)
    try:
        layers = json.loads(text).get("Layers", [])
    except (ValueError, AttributeError):
        return ()
    return tuple(layer if isinstance(layer, dict) else {"Name": str(layer)} for layer in layers)


def tensors(engine: Any) -> tuple[TensorSpec, ...]:
    """Inputs and outputs of a deserialized engine, in its order."""
    trt = tensorrt()
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    return tuple(
        TensorSpec(
            name=name,
            dtype=numpy_dtype(engine.get_tensor_dtype(name)).name,
            shape=tuple(engine.get_tensor_shape(name)),
            is_input=engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
            on_host=engine.get_tensor_location(name) == trt.TensorLocation.HOST,
        )
        for name in names
    )


# Running --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watching(what: str) -> Iterator[None]:
    """Turns pycuda's exceptions, and errors that TensorRT logs without failing, into one EngineFault."""
    driver = activate()
    mark = MESSAGES.mark()
    try:
        yield
    except driver.Error as error:
        raise EngineFault(f"{what}: {MESSAGES.reason(mark, str(error))}") from None
    if MESSAGES.errors(mark):
        raise EngineFault(f"{what}: {MESSAGES.reason(mark, '')}")


def deserialize(data: bytes, what: str, host_code: bool) -> tuple[Any, Any]:
    """(runtime, engine) of a serialized engine. `host_code` lets TensorRT execute the plugin library inside it."""
    trt = tensorrt()
    cuda()
    _standard_plugins()
    mark = MESSAGES.mark()
    runtime = trt.Runtime(logger())
    runtime.engine_host_code_allowed = host_code
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        reason = MESSAGES.reason(mark, "TensorRT gives no reason")
        raise BadInput(f"{what}: TensorRT {version()} cannot load this engine: {reason}; build it again on this machine")
    return runtime, engine


def profiler() -> Any:
    """A profiler to set on an execution context, which then waits for each run and reports its layers.

    `take()` gives the milliseconds of each layer since the last take, by name, in execution order: those of a layer that ran
    several times, as in a loop, together.
    """
    trt = tensorrt()

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self._milliseconds: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self._milliseconds[layer_name] = self._milliseconds.get(layer_name, 0.0) + ms

        def take(self) -> dict[str, float]:
            taken, self._milliseconds = self._milliseconds, {}
            return taken

    return Profiler()


def output_allocator() -> Any:
    """An output allocator for tensors whose size is known only after the engine ran.

    After the run `memory[name]` is the device allocation and `shapes[name]` the shape.
    """
    trt = tensorrt()
    driver = activate()

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.memory: dict[str, Any] = {}
            self.sizes: dict[str, int] = {}
            self.shapes: dict[str, tuple[int, ...]] = {}

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            if self.sizes.get(tensor_name, -1) < size:
                try:
                    self.memory[tensor_name] = driver.mem_alloc(max(size, 1))
                except driver.Error:
                    return 0  # TensorRT reports the failed allocation
                self.sizes[tensor_name] = size
            return int(self.memory[tensor_name])

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self.shapes[tensor_name] = tuple(shape)

    return Allocator()


def numpy_dtype(data_type: Any) -> Any:
    """numpy's (or ml_dtypes') dtype of a TensorRT data type; BadInput for packed types that numpy cannot hold."""
    import ml_dtypes
    import numpy as np

    names: dict[str, Any] = {
        "FLOAT": np.float32,
        "HALF": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "FP8": ml_dtypes.float8_e4m3fn,
        "INT8": np.int8,
        "UINT8": np.uint8,
        "INT32": np.int32,
        "INT64": np.int64,
        "BOOL": np.bool_,
    }
    name = data_type.name
    if name not in names:
        raise BadInput(f"an engine tensor of type {name} cannot be read from numpy; cast it inside the model")
    return np.dtype(names[name])
