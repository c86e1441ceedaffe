"""Building an engine and its manifest, with progress, and leaving nothing half-written."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onnxfuse.engine import encoder, prepare, trt
from onnxfuse.engine import manifest as manifests
from onnxfuse.engine.manifest import Manifest
from onnxfuse.engine.shapes import inputs_of, parse
from onnxfuse.errors import BadInput, MissingHere, refusal
from onnxfuse.graph import files
from onnxfuse.graph.files import atomic

if TYPE_CHECKING:
    from onnxfuse.elementwise.compiling import Plan
    from onnxfuse.engine.run import Engine
    from onnxfuse.gpus import Gpu
    from onnxfuse.plugins import Library

Result = TypeVar("Result")


@dataclass(frozen=True)
class Step:
    """Progress of one phase of the builder. Phases nest; several may be open at once."""

    phase: str
    parent: str | None
    done: int
    steps: int
    elapsed: float
    """Seconds since the build started."""
    finished: bool


ProgressCallback = Callable[[Step], None]


class Phases:
    """Turns the builder's calls into Steps, and stops the build once `cancel` is set. Safe from any thread."""

    def __init__(self, progress: ProgressCallback | None, cancel: threading.Event) -> None:
        self._progress = progress
        self._cancel = cancel
        self._lock = threading.Lock()
        self._open: dict[str, Step] = {}
        self._start = time.monotonic()

    def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
        self._tell(phase, parent, 0, steps, finished=False)

    def step_complete(self, phase: str, step: int) -> bool:
        known = self._open.get(phase)
        self._tell(phase, known.parent if known else None, step + 1, known.steps if known else step + 1, finished=False)
        return not self._cancel.is_set()

    def phase_finish(self, phase: str) -> None:
        known = self._open.get(phase)
        steps = known.steps if known else 1
        self._tell(phase, known.parent if known else None, steps, steps, finished=True)

    def _tell(self, phase: str, parent: str | None, done: int, steps: int, *, finished: bool) -> None:
        with self._lock:
            step = Step(phase, parent, done, steps, time.monotonic() - self._start, finished)
            if finished:
                self._open.pop(phase, None)
            else:
                self._open[phase] = step
            if self._progress is not None:
                self._progress(step)


def build(
    model: Path,
    out: Path,
    *,
    gpu: str = "auto",
    shapes: Sequence[str] = (),
    timing_cache: Path | None = None,
    embed_plugins: bool = True,
    use_plugins: bool = True,
    compatible: str | None = None,
    taps: Sequence[str] = (),
    level: int | None = None,
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Builds the engine `out` of the ONNX model `model`, and `out`.json beside it; both appear whole, or neither.

    The network is strongly typed: the engine computes in the types that the model is written in. `shapes` are values of
    --shapes. `use_plugins` False replaces every onnxfuse operator by its function: the engine that TensorRT makes
    alone. `embed_plugins` puts the plugin library into the engine, which then needs nothing but TensorRT to run;
    otherwise the library lies beside the engine. `compatible` "ampere+" gives an engine that runs on every GPU from compute
    capability 8.0 on. `taps` are tensors inside of the model that become outputs of the engine, too, which changes what TensorRT fuses.
    `level` is TensorRT's builder optimization level, None its default. `timing_cache` is read where it exists, and written after the
    build. `progress` is called from TensorRT's threads.

    Raises BadInput (model, shapes, output), MissingHere (TensorRT, driver, GPU, compiler, or another GPU than `gpu`),
    and KeyboardInterrupt after Ctrl-C, once TensorRT has stopped.
    """
    _check_output(model, out)
    profiles = _profiles(model, shapes)
    left: list[str] = []
    wanted = prepare.plugin_ops_in(model, _plugin_ops(), left.append) if use_plugins else frozenset()
    cache = _read_cache(timing_cache)
    _check_gpu_name(gpu)
    device = _device(gpu)
    check_gpu(gpu, device)
    if compatible and device.sm < manifests.AMPERE:
        raise BadInput(f"--compatible {compatible}: {device.name} (sm_{device.sm}) is older than Ampere (sm_80); leave --compatible off")
    sm = manifests.AMPERE if compatible else device.sm
    wanted = prepare.taken_in_half(model, prepare.taken(wanted, sm, left.append), sm, left.append)
    library = _library(sm, compatible is not None) if wanted else None
    plans = _generated(model, wanted, sm, compatible is not None)
    order = trt.Order(
        model=prepare.for_parser(model, wanted, plans, points(profiles), encoder.compiled, left.append),
        path=model,
        profiles=profiles,
        cache=cache,
        libraries=(library.path,) if library is not None else (),
        embed=embed_plugins,
        taps=tuple(taps),
        compatible=compatible is not None,
        level=level,
    )
    use = _plugin_use(library, out, embed_plugins, wanted)
    return _make(order, out, device, use, timing_cache, progress, tuple(plan.to_dict() for plan in plans.values()), tuple(left))


def build_reference_fp16flag(model: Path, out: Path, *, shapes: Sequence[str] = (), timing_cache: Path | None = None) -> Manifest:
    """A weakly typed engine of `model` under TensorRT 10's FP16 flag, without plugins: what benchmarks compare with.

    TensorRT then chooses the precision of every layer itself. MissingHere where TensorRT has no such flag (11 and later).
    """
    profiles = _profiles(model, shapes)
    if not trt.fp16_flag_exists():
        raise MissingHere(f"TensorRT {trt.version()} has no FP16 flag; use TensorRT 10.x for this reference")
    device = trt.gpu()
    order = trt.Order(
        model=prepare.for_parser(model, frozenset()),
        path=model,
        profiles=profiles,
        cache=_read_cache(timing_cache),
        fp16_flag=True,
    )
    return _make(order, out, device, None, timing_cache, None)


def in_memory(model: Path, *, plugin_ops: Collection[str] = ()) -> Engine:
    """An engine that is built, loaded and never written: of a node to look at. `plugin_ops` are computed by plugins, all else by TensorRT.

    Raises BadInput where TensorRT cannot build it, MissingHere without TensorRT or GPU.
    """
    from onnxfuse.engine.run import Engine

    trt.tensorrt()
    device = trt.gpu()
    ops = prepare.taken_in_half(model, prepare.taken(frozenset(plugin_ops), device.sm), device.sm)
    order = trt.Order(
        model=prepare.for_parser(model, ops, _generated(model, ops, device.sm, False)),
        path=model,
        libraries=(_library(device.sm, False).path,) if ops else (),
        embed=False,
    )
    built = run_cancellable(lambda cancel: trt.build(order, Phases(None, cancel)))
    assert built is not None  # nobody cancels it
    return Engine(built.engine, f"{model.name}, built to look into", manifest=None, host_code=False)


def compatibility(text: str | None) -> str | None:
    """The value of --compatible: None, or "ampere+". BadInput for any other."""
    if text is None or text == "ampere+":
        return text
    raise BadInput(f"--compatible {text}: not a level that TensorRT has; give ampere+, or leave it off")


def _profiles(model: Path, options: Sequence[str]) -> dict[str, trt.Range]:
    profiles = parse(options, inputs_of(model))
    return {name: (p.min, p.opt, p.max) for name, p in profiles.items()}


def check_gpu(wanted: str, device: trt.Device) -> None:
    """MissingHere where `wanted` (a GPU's name, sm_NN, or auto) is not the GPU here."""
    if wanted == "auto":
        return
    from onnxfuse import gpus

    gpu = gpus.resolve(wanted)
    only_architecture = gpu.sms is None
    if gpu.sm != device.sm or not (only_architecture or _is(gpu, device)):
        raise MissingHere(
            f"--gpu {wanted}: an engine is built on the GPU that it is for, and here is {device.name} (sm_{device.sm}); "
            "give --kit DIR to write all that a machine with that GPU needs, or --gpu auto"
        )


def _device(wanted: str) -> trt.Device:
    """The GPU here. Where TensorRT or a GPU is missing and another machine's GPU was named, the remedy is a kit, too."""
    try:
        trt.tensorrt()
        return trt.gpu()
    except MissingHere as missing:
        if wanted == "auto":
            raise
        raise MissingHere(f"{missing}; or --kit DIR writes all that a machine with {wanted} needs") from None


def _is(gpu: Gpu, device: trt.Device) -> bool:
    """Whether the device is that GPU; a device that the table does not know is taken by its compute capability."""
    from onnxfuse import gpus

    try:
        return gpus.resolve(device.name) == gpu
    except BadInput:
        return True


def run_cancellable(work: Callable[[threading.Event], Result]) -> Result:
    """Runs `work` in a thread, so that Ctrl-C reaches this one at once while TensorRT computes.

    On KeyboardInterrupt (or any exception in this thread) the event is set, `work` is waited for, and the exception goes on.
    """
    cancel, done = threading.Event(), threading.Event()
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(work(cancel))
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=body, name="onnxfuse-build").start()
    # Not Thread.join: interrupted, it takes a running thread for an ended one (Python 3.10 to 3.12), and TensorRT would then call
    # into an interpreter that is going down.
    try:
        while not done.wait(0.1):
            pass
    except BaseException:
        cancel.set()
        done.wait()
        raise
    if failure:
        raise failure[0]
    return outcome[0]


def _make(
    order: trt.Order,
    out: Path,
    device: trt.Device,
    plugins: manifests.PluginUse | None,
    timing_cache: Path | None,
    progress: ProgressCallback | None,
    generated: tuple[Mapping[str, Any], ...] = (),
    left: tuple[str, ...] = (),
) -> Manifest:
    """Builds what `order` says and writes engine, manifest and timing cache."""
    start = time.monotonic()
    built = run_cancellable(lambda cancel: trt.build(order, Phases(progress, cancel)))
    if built is None:
        raise BadInput(f"{order.path}: the build was stopped by its progress report; build again")
    result = Manifest(
        model=order.path.name,
        model_sha256=manifests.model_digest(order.path),
        engine_sha256=hashlib.sha256(built.engine).hexdigest(),
        engine_bytes=len(built.engine),
        plugins=plugins,
        tensorrt=trt.version(),
        driver=device.driver,
        gpu=device.name,
        sm=device.sm,
        inputs=tuple(_tensor(t, order.profiles) for t in built.tensors if t.is_input),
        outputs=tuple(_tensor(t, {}) for t in built.tensors if not t.is_input),
        strongly_typed=not order.fp16_flag,
        build_seconds=round(time.monotonic() - start, 3),
        layers=manifests.layers_from(built.layers),
        warnings=built.warnings,
        model_path=_seen_from(out, order.path),
        timing_cache=_seen_from(out, timing_cache) if timing_cache is not None and built.cache is not None else None,
        compatible="ampere+" if order.compatible else None,
        generated=generated,
        left=left,
    )
    _write(out, built.engine, result, order.libraries)
    if timing_cache is not None and built.cache is not None:
        with atomic(timing_cache) as part:
            part.write_bytes(built.cache)
    return result


def _seen_from(out: Path, path: Path) -> str:
    """Relative to the folder that the engine `out` is in."""
    return os.path.relpath(os.path.realpath(path), os.path.dirname(os.path.realpath(out)))


def _write(out: Path, engine: bytes, result: Manifest, libraries: Sequence[Path]) -> None:
    """The library, the engine, and last the manifest: what is there in between does not fit the manifest, and is not loaded.

    Two processes that build the same engine replace these files one after the other, never in turns.
    """
    beside = result.plugins.file if result.plugins is not None else None
    with _turn(out.parent):
        if beside is not None:
            with atomic(out.with_name(beside)) as part:
                part.write_bytes(libraries[0].read_bytes())
        with atomic(manifests.path_of(out)) as manifest_part, atomic(out) as engine_part:
            engine_part.write_bytes(engine)
            manifest_part.write_text(result.to_json(), encoding="utf-8")


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Waits for other processes that write engines to this folder. The lock is on the folder itself, leaves no file, and ends with the
    process. File systems that have no locks go without.
    """
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _check_output(model: Path, out: Path) -> None:
    """Before minutes of building: can the output be written at all?"""
    if os.path.realpath(out) == os.path.realpath(model):
        raise BadInput(f"{out}: the engine would replace the model; give another path with -o")
    files.check(out)
    files.check(manifests.path_of(out))


def _check_gpu_name(gpu: str) -> None:
    """A name that no GPU has is wrong usage, whatever is missing here."""
    if gpu != "auto":
        from onnxfuse import gpus

        gpus.resolve(gpu)


def _read_cache(path: Path | None) -> bytes | None:
    """The timing cache's content; empty for one that is to be made; None for none at all."""
    if path is None:
        return None
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if path.parent.is_dir():
            return b""
        raise BadInput(f"--timing-cache {path}: no folder {path.parent}; make it, or give another path") from None
    except OSError as error:
        raise BadInput(f"--timing-cache {path}: {refusal(error)}; give another path") from None


def _plugin_ops() -> frozenset[str]:
    from onnxfuse import plugins

    return frozenset(op.name for op in plugins.ops())


def _library(sm: int, and_newer: bool) -> Library:
    from onnxfuse import plugins

    return plugins.build(sm, and_newer=and_newer)


def _generated(model: Path, ops: frozenset[str], sm: int, and_newer: bool) -> dict[str, Plan]:
    """The compiled kernels of the model's element-wise expressions."""
    texts = prepare.expressions_in(model, ops)
    if not texts:
        return {}
    from onnxfuse.elementwise import compiling

    return compiling.fit_all(texts, sm, and_newer=and_newer)


def points(profiles: Mapping[str, trt.Range]) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The shapes that a profile names: smallest, to optimize for, and largest."""
    return tuple({name: tuple(shapes[i]) for name, shapes in profiles.items()} for i in range(3)) if profiles else ({},)


def _plugin_use(library: Library | None, out: Path, embedded: bool, ops: frozenset[str]) -> manifests.PluginUse | None:
    if library is None:
        return None
    return manifests.PluginUse(None if embedded else f"{out.name}.plugins.so", library.sha256, embedded, tuple(sorted(ops)))


def _tensor(spec: trt.TensorSpec, profiles: Mapping[str, trt.Range]) -> manifests.Tensor:
    low, mid, high = profiles.get(spec.name, (None, None, None))
    return manifests.Tensor(spec.name, spec.dtype, spec.shape, low, mid, high)
