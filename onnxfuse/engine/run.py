"""Running an engine on numpy arrays, with every answer of TensorRT and CUDA looked at."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.engine import manifest as manifests
from onnxfuse.engine import trt
from onnxfuse.engine.manifest import Layer, Manifest
from onnxfuse.engine.trt import EngineFault, TensorSpec
from onnxfuse.errors import BadInput, refusal

Array = NDArray[Any]
# How a 64-bit little-endian shared library begins (System V ABI, "ELF Header"); TensorRT embeds plugin libraries as they are.
CODE = b"\x7fELF\x02\x01\x01"
TRUST = ", or give --trust if you know where it came from"


class Engine:
    """A loaded engine with its execution context, stream and device buffers. Use from one thread; close it, or use `with`.

    `run` does all at once. For timing, `bind` uploads feeds once, `enqueue` launches and returns, `outputs` fetches.
    """

    def __init__(self, data: bytes, name: str, *, manifest: Manifest | None, host_code: bool) -> None:
        """Prefer `load`. `data` is a serialized engine, `name` stands for it in messages; `host_code` lets TensorRT execute the
        plugin library inside it.
        """
        driver = trt.activate()
        self.name = name
        self.manifest = manifest
        self._runtime, self._engine = trt.deserialize(data, name, host_code)
        self._context = self._new_context()
        specs = trt.tensors(self._engine)
        self.inputs: tuple[TensorSpec, ...] = tuple(s for s in specs if s.is_input)
        self.output_specs: tuple[TensorSpec, ...] = tuple(s for s in specs if not s.is_input)
        self._stream = driver.Stream()
        self._device: dict[str, _Buffer] = {}
        self._host: dict[str, Array] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._allocator: Any = None
        self._sized_by_run: frozenset[str] = frozenset()
        self._bound = False

    @classmethod
    def load(cls, path: Path, trust: bool = False) -> Engine:
        """The engine at `path`, with the plugins that its manifest names.

        Code inside the engine (embedded plugins) is executed only if the manifest beside it was written for exactly
        this file, or `trust` is set. An engine that holds code and has no manifest is refused here: TensorRT 10.6 executes it also where
        `engine_host_code_allowed` is off. Raises BadInput for no engine, a manifest of
        another file, another GPU architecture, or a plugin library that is gone or changed; MissingHere without
        TensorRT or GPU.
        """
        data = manifests.content(path, "build it with `onnxfuse build-engine`")
        manifest = vouched(data, path, trust)
        if manifest is None:
            return cls(data, str(path), manifest=None, host_code=trust)
        trt.tensorrt()
        device = trt.gpu()
        if not manifests.runs_on(manifest, device.sm):
            raise BadInput(
                f"{path}: built for {manifest.gpu} (sm_{manifest.sm}), here is {device.name} (sm_{device.sm}); build it again here"
            )
        if manifest.plugins is not None and not manifest.plugins.embedded:
            trt.load_plugins(_library(manifest.plugins, manifest.sm, path))
        embedded = manifest.plugins is not None and manifest.plugins.embedded
        try:
            return cls(data, str(path), manifest=manifest, host_code=trust or embedded)
        except BadInput as refusal:
            differs = "; ".join(_changes_here(manifest))
            raise BadInput(f"{refusal} ({differs})" if differs else str(refusal)) from None

    @property
    def changed(self) -> tuple[str, ...]:
        """What is not as it was when the engine was built (GPU, TensorRT, driver, model, plugin library) and what to do, one line each."""
        if self.manifest is None:
            return ()
        return (*_changes_here(self.manifest), *stale(Path(self.name), self.manifest))

    @property
    def stream(self) -> int:
        """Handle of the CUDA stream that the engine runs on."""
        return int(self._stream.handle)

    @property
    def capturable(self) -> bool:
        """Whether a run may be captured in a CUDA graph: not where the size of an output is known only after it."""
        return not self._sized_by_run

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs of the engine for `feeds`, in the engine's order, each in the engine's own type (bfloat16 as ml_dtypes').

        `feeds` must have every input, in the engine's type, with a shape that the profile allows; BadInput says which is not.
        EngineFault where TensorRT or CUDA fails.
        """
        self.bind(feeds)
        self.enqueue()
        return self.outputs()

    def run_each(self, feeds: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """As `run`, but outputs come to the host one at a time, with their names."""
        self.bind(feeds)
        self.enqueue()
        self.synchronize()
        for spec in self.output_specs:
            with trt.watching(self.name):
                array = self._fetch(spec)
            yield spec.name, array

    def bind(self, feeds: Mapping[str, Array]) -> None:
        """Sets shapes, uploads `feeds`, and gives every output its memory."""
        self._bound = False
        arrays = check_feeds(self.inputs, feeds, self.name)
        with trt.watching(self.name):
            for spec in self.inputs:
                self._set_input(spec, arrays[spec.name])
            missing = self._context.infer_shapes()
            if missing:
                raise EngineFault(f"{self.name}: shapes cannot be inferred; TensorRT misses {', '.join(missing)}")
            self._bind_outputs()
        self._bound = True

    def enqueue(self, stream: int | None = None) -> None:
        """Launches one run on the engine's stream, or on the one given, and does not wait for it."""
        if not self._bound:
            raise EngineFault(f"{self.name}: nothing to run on; bind inputs first")
        mark = trt.MESSAGES.mark()
        launched = self._context.execute_async_v3(self.stream if stream is None else stream)
        if not launched or trt.MESSAGES.errors(mark):
            raise EngineFault(f"{self.name}: enqueue failed: {trt.MESSAGES.reason(mark, 'TensorRT gives no reason')}")

    def synchronize(self) -> None:
        """Waits for the engine's stream; EngineFault where a kernel failed."""
        with trt.watching(self.name):
            self._stream.synchronize()

    def outputs(self) -> dict[str, Array]:
        """Waits, and fetches the outputs of the last run."""
        self.synchronize()
        with trt.watching(self.name):
            return {spec.name: self._fetch(spec) for spec in self.output_specs}

    def layers(self) -> tuple[Layer, ...]:
        """The layers as TensorRT built them, in its order."""
        return manifests.layers_from(trt.layer_table(self._engine))

    def layer_times(self, feeds: Mapping[str, Array], runs: int) -> list[dict[str, float]]:
        """For each of `runs` runs the milliseconds of every layer that ran, by name, in execution order, after one run to warm up.

        In an execution context of its own, since one that was profiled cannot be captured in a CUDA graph. What was bound is unbound.
        """
        kept, self._context = self._context, self._new_context()
        profiler = trt.profiler()
        self._context.profiler = profiler
        try:
            self.bind(feeds)
            taken = []
            for _ in range(runs + 1):
                self.enqueue()
                self.synchronize()
                taken.append(profiler.take())
            return taken[1:]
        finally:
            self._context, self._bound = kept, False

    def poison(self) -> None:
        """Fills the memory of the bound outputs with bits that are NaN in every floating-point type: what a run does not write shows.

        Outputs whose size is known only after a run have no memory yet, and stay.
        """
        for spec in self.output_specs:
            if spec.on_host:
                _bytes(self._host[spec.name]).fill(0xFF)
            elif spec.name in self._device:
                buffer = self._device[spec.name]
                with trt.watching(self.name):
                    trt.activate().memset_d8(int(buffer.memory), 0xFF, max(buffer.size, 1))

    def close(self) -> None:
        """Gives back context, engine and device memory; the engine cannot be used after."""
        self._bound = False
        self._device.clear()
        self._allocator = None
        self._context = self._engine = self._runtime = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _new_context(self) -> Any:
        mark = trt.MESSAGES.mark()
        context = self._engine.create_execution_context()
        if context is None:
            raise EngineFault(f"{self.name}: no execution context: {trt.MESSAGES.reason(mark, 'not enough GPU memory?')}")
        return context

    def _set_input(self, spec: TensorSpec, array: Array) -> None:
        mark = trt.MESSAGES.mark()
        if not self._context.set_input_shape(spec.name, array.shape):
            raise BadInput(self._shape_refused(spec, array.shape, trt.MESSAGES.reason(mark, "")))
        if spec.on_host:
            self._host[spec.name] = array
            self._set_address(spec.name, array.ctypes.data)
            return
        buffer = self._buffer(spec.name, array.nbytes)
        if array.nbytes:
            trt.activate().memcpy_htod(buffer.memory, _bytes(array))
        self._set_address(spec.name, int(buffer.memory))

    def _bind_outputs(self) -> None:
        sized_by_run = []
        for spec in self.output_specs:
            shape = tuple(self._context.get_tensor_shape(spec.name))
            if any(length < 0 for length in shape):
                sized_by_run.append(spec.name)
                if self._allocator is None:
                    self._allocator = trt.output_allocator()
                if not self._context.set_output_allocator(spec.name, self._allocator):
                    raise EngineFault(f"{self.name}: TensorRT refuses an allocator for output {spec.name}")
                continue
            self._shapes[spec.name] = shape
            if spec.on_host:
                self._host[spec.name] = np.empty(shape, np.dtype(spec.dtype))
                self._set_address(spec.name, self._host[spec.name].ctypes.data)
            else:
                size = math.prod(shape) * np.dtype(spec.dtype).itemsize
                self._set_address(spec.name, int(self._buffer(spec.name, size).memory))
        self._sized_by_run = frozenset(sized_by_run)

    def _fetch(self, spec: TensorSpec) -> Array:
        if spec.name in self._sized_by_run:
            if spec.name not in self._allocator.shapes:
                raise EngineFault(f"{self.name}: TensorRT did not say the shape of output {spec.name}")
            shape, memory = self._allocator.shapes[spec.name], self._allocator.memory.get(spec.name)
        elif spec.on_host:
            on_host: Array = self._host[spec.name].copy()
            return on_host
        else:
            shape, memory = self._shapes[spec.name], self._device[spec.name].memory
        array: Array = np.empty(shape, np.dtype(spec.dtype))
        if array.nbytes:
            trt.activate().memcpy_dtoh(_bytes(array), memory)
        return array

    def _buffer(self, name: str, size: int) -> _Buffer:
        """Device memory of at least `size` bytes, and at least one: TensorRT takes no null address, even for an empty tensor."""
        known = self._device.get(name)
        if known is None or known.size < size:
            self._device[name] = known = _Buffer(trt.activate().mem_alloc(max(size, 1)), size)
        return known

    def _set_address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise EngineFault(f"{self.name}: TensorRT refuses the memory for {name}")

    def _shape_refused(self, spec: TensorSpec, shape: tuple[int, ...], reason: str) -> str:
        if -1 in spec.shape:
            low, _, high = (tuple(d) for d in self._engine.get_tensor_profile_shape(spec.name, 0))
            takes = f"the engine takes {low} to {high}; build it with other --shapes"
            return f"{self.name}: input {spec.name} has shape {shape}; {takes}"
        return f"{self.name}: input {spec.name} has shape {shape}; the engine takes {spec.shape}: {reason}".rstrip(": ")


class _Buffer:
    """Device memory and how many bytes of it were asked for."""

    def __init__(self, memory: Any, size: int) -> None:
        self.memory = memory
        self.size = size


def vouched(data: bytes, path: Path, trust: bool = False, way_out: str = TRUST) -> Manifest | None:
    """The manifest beside an engine of this content; None for an engine without one that holds no code.

    BadInput where the manifest was written for another engine, or where there is none for an engine that holds code; with `trust` both
    are taken as they are, without a manifest. way_out: what the message offers beside the remedies, where there is such an option.
    """
    manifest = None if trust and not _manifest_fits(data, path) else manifests.load(path)
    if manifest is not None and hashlib.sha256(data).hexdigest() != manifest.engine_sha256:
        raise BadInput(
            f"{path}: the manifest {manifests.path_of(path).name} was written for another engine, so this one is not trusted; "
            f"build it again{way_out}"
        )
    if manifest is None and CODE in data and not trust:
        raise BadInput(
            f"{path}: cannot load this engine: it holds code (embedded plugins), and no manifest {manifests.path_of(path).name} "
            f"vouches for it; put that file beside it or build the engine here{way_out}"
        )
    return manifest


def _manifest_fits(data: bytes, path: Path) -> bool:
    try:
        manifest = manifests.load(path)
    except BadInput:
        return False
    return manifest is not None and manifest.engine_sha256 == hashlib.sha256(data).hexdigest()


def _changes_here(manifest: Manifest) -> tuple[str, ...]:
    device = trt.gpu()
    return manifests.changes(manifest, gpu=device.name, sm=device.sm, tensorrt=trt.version(), driver=device.driver)


def stale(path: Path, manifest: Manifest) -> tuple[str, ...]:
    """What of the model and the plugin library changed since the engine was built, and what to do. Needs neither GPU nor TensorRT."""
    from onnxfuse import plugins

    library = plugins.cached(manifest.sm, and_newer=manifest.compatible is not None) if manifest.plugins is not None else None
    return manifests.stale(manifest, path, library.sha256 if library is not None else None)


def check_feeds(inputs: tuple[TensorSpec, ...], feeds: Mapping[str, Array], name: str) -> dict[str, Array]:
    """The feeds as contiguous arrays; BadInput for a missing or unknown input, a wrong type or rank."""
    declared = {spec.name for spec in inputs}
    for given in feeds:
        if given not in declared:
            raise BadInput(f"{name}: no input {given}; the inputs are {', '.join(sorted(declared))}")
    arrays: dict[str, Array] = {}
    for spec in inputs:
        if spec.name not in feeds:
            raise BadInput(f"{name}: input {spec.name} is not given; give an array of type {spec.dtype} and shape {spec.shape}")
        array = np.asarray(feeds[spec.name])
        if array.dtype.name != spec.dtype:
            raise BadInput(f"{name}: input {spec.name} is {array.dtype.name}; the engine takes {spec.dtype}; convert it first")
        if array.ndim != len(spec.shape):
            raise BadInput(f"{name}: input {spec.name} has shape {array.shape}; the engine takes {spec.shape}")
        arrays[spec.name] = np.require(array, requirements="C")
    return arrays


def cast_feeds(inputs: tuple[TensorSpec, ...], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """`feeds` with floating-point arrays in the types that the engine takes, and no more than the engine takes.

    For comparing engines of different precision on the same input; integers and booleans are left as they are.
    """
    cast = {}
    for spec in inputs:
        if spec.name not in feeds:
            continue
        array = np.asarray(feeds[spec.name])
        floats = _is_float(array.dtype) and _is_float(np.dtype(spec.dtype))
        cast[spec.name] = array.astype(np.dtype(spec.dtype)) if floats else array
    return cast


def _is_float(dtype: Any) -> bool:
    """Floating point, ml_dtypes' included (numpy counts those as void)."""
    return np.dtype(dtype).kind == "f" or "float" in np.dtype(dtype).name


def _bytes(array: Array) -> Array:
    """The same memory as bytes: pycuda does not know ml_dtypes."""
    return array.reshape(-1).view(np.uint8)


def _library(use: manifests.PluginUse, sm: int, engine: Path) -> Path:
    """The plugin library that the engine was built with: a copy, in the user's cache, of the one beside it, or the cache's own.

    What TensorRT loads is in a folder that nobody else can write to, and is what was hashed.
    """
    from onnxfuse import plugins

    if use.file is not None:
        beside = engine.with_name(use.file)
        try:
            content = beside.read_bytes()
        except OSError as error:
            raise BadInput(
                f"{engine}: its plugin library {beside.name} cannot be read: {refusal(error)}; "
                "put it beside the engine, or build the engine again"
            ) from None
        if hashlib.sha256(content).hexdigest() != use.sha256:
            raise BadInput(
                f"{engine}: its plugin library {beside.name} is not the one that it was built with, and is not loaded; "
                "build the engine again"
            )
        return plugins.keep(content)
    library = plugins.build(sm)
    if library.sha256 != use.sha256:
        raise BadInput(f"{engine}: built with another version of the plugin library; build the engine again")
    return Path(library.path)
