"""An engine looked into.

TensorRT computes no tensor that it fused away, and a tap in the middle of what it fused would change what it fuses. So only tensors
between two layers are tapped: those that the layer table of the engine shows to be handed from one layer to another. They are
outputs of a second engine, built from the same model, which is compared with the first one layer by layer, so that each figure says
whether TensorRT fused as before around it. Outputs of the model are those of the engine itself.

The second engine is built and run once, in a process of its own, and its values wait in files: an abort of TensorRT costs them and nothing
else. Where the device has no room for all of them there are several engines, one after the other, each with some of the tensors. Building
takes most of the time, so the second engines of all that is compared are built at once, in the background, with the timing cache that the
engine itself was built with: TensorRT then chooses the same kernels, and need not time and compile them again. Without one they are built
at a low builder optimization level.

A plugin is also run alone: in an engine of one node, of the same types, which is fed with the reference's values.
"""

from __future__ import annotations

import concurrent.futures
import math
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.engine import manifest as manifests
from onnxfuse.engine import prepare
from onnxfuse.engine.manifest import Layer, Manifest, model_digest
from onnxfuse.engine.run import cast_feeds
from onnxfuse.errors import OnnxfuseError
from onnxfuse.fusions.base import label
from onnxfuse.graph.model import DOMAIN
from onnxfuse.verify import engine_process
from onnxfuse.verify.metrics import Tolerance
from onnxfuse.verify.pieces import OWN, Pieces, names_read
from onnxfuse.verify.reference import Feeds, Kind, Outputs, Runtime

OUTPUT = "output of the engine"
SAME = "output of a second engine, in which TensorRT fused the same around it"
OTHER = "output of a second engine, in which TensorRT fused otherwise around it"
SHARE = 0.5  # of the device memory that is free: for what is tapped. An engine needs some to compute in, too.
QUICK = 1  # builder optimization level of second engines where no timing cache is known: kernels are chosen by few trials

Progress = Callable[[str], None]


class Running(Protocol):
    """What is asked of an engine."""

    inputs: Any
    output_specs: Any

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]: ...
    def close(self) -> None: ...


Build = Callable[..., Running]
"""`engine.build.in_memory`, or what stands for it in a test."""


def source_of(manifest: Manifest | None, engine: Path, candidates: Iterable[Path]) -> Path | None:
    """The model that an engine was built from, by its content: where it was then, or one of `candidates`. None where it is gone."""
    if manifest is None:
        return None
    places = [engine.parent / manifest.model_path] if manifest.model_path else []
    for place in dict.fromkeys([*places, engine.parent / manifest.model, *candidates]):
        if place.suffix != ".engine" and place.is_file() and model_digest(place) == manifest.model_sha256:
            return place
    return None


def cache_of(manifest: Manifest | None, engine: Path) -> Path | None:
    """The timing cache that an engine was built with; None where none is known, or it is gone."""
    if manifest is None or manifest.timing_cache is None:
        return None
    place = engine.parent / manifest.timing_cache
    return place if place.is_file() else None


def between_layers(model: onnx.ModelProto, layers: Sequence[Layer]) -> list[str]:
    """Tensors that one layer hands to another, in the order of the nodes. model: as TensorRT's parser was given it.

    A tensor counts where each of its readers is in layers that its maker has no part in; a node that no layer names was folded away.
    """
    of_node: dict[str, set[int]] = {}
    for place, layer in enumerate(layers):
        for name in layer.nodes:
            of_node.setdefault(name, set()).add(place)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found = []
    for node in model.graph.node:
        made = of_node.get(node.name)
        for name in node.output if made else ():
            reading = [of_node[reader.name] for reader in readers.get(name, ()) if reader.name in of_node]
            if name and reading and all(not places & (made or set()) for places in reading):
                found.append(name)
    return found


def fused_alike(first: Sequence[Layer], second: Sequence[Layer]) -> Callable[[str], bool]:
    """Whether a node is in layers of the same nodes in both engines."""

    def groups(layers: Sequence[Layer]) -> Counter[frozenset[str]]:
        return Counter(frozenset(layer.nodes) for layer in layers if layer.nodes)

    a, b = groups(first), groups(second)

    def alike(name: str) -> bool:
        return all(b[group] == count for group, count in a.items() if name in group)

    return alike


def batches(names: Sequence[str], kinds: Mapping[str, Kind], room: float) -> list[list[str]]:
    """`names` in order, each list of them no more than `room` bytes; what is larger is on its own."""
    found: list[list[str]] = []
    size = 0.0
    for name in names:
        size += kinds[name].nbytes
        if found and size <= room:
            found[-1].append(name)
        else:
            found.append([name])
            size = kinds[name].nbytes
    return found


@dataclass(frozen=True)
class _Tapped:
    """What second engines gave. taps: where the figures of a tensor come from, in words; files: where its values are."""

    taps: Mapping[str, str]
    files: Mapping[str, Path]
    notes: Sequence[str]
    how: Sequence[str]


class _Stopped(Exception):
    """Nobody waits for the second engine any more."""


class EngineSubject:
    """An engine on one set of inputs, as `layers.Subject`. notes: what could not be looked into. how: how it was looked into. free: bytes
    of device memory that may be used, of which tensors that are tapped take a share. cache: the timing cache of the engine.
    """

    def __init__(
        self,
        name: str,
        role: str,
        limits: Tolerance,
        engine: Running,
        manifest: Manifest | None,
        source: Path | None,
        pieces: Pieces,
        feeds: Feeds,
        runtime: Runtime,
        folder: Path,
        build: Build,
        free: int,
        cache: Path | None = None,
        progress: Progress = lambda text: None,
    ) -> None:
        self.name, self.role, self.limits, self.pieces = name, role, limits, pieces
        self._engine, self._feeds, self._folder, self._build, self._progress = engine, feeds, folder, build, progress
        self._cache = cache
        self._alone: dict[bytes, Running | None] = {}
        self._alone_seconds = 0.0
        self._notes: list[str] = []
        self._layers: dict[str, str] = {}
        self._plugins = frozenset(manifest.plugins.ops) if manifest is not None and manifest.plugins is not None else frozenset()
        self._types = runtime.kinds(pieces.path, feeds, list(pieces.producers))
        outputs = {spec.name: self._types[spec.name] for spec in engine.output_specs if spec.name in self._types}
        self._output_kinds, self._outputs = outputs, frozenset(outputs)
        self._stop = threading.Event()
        self._doing = "second engine"
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "onnxfuse-taps")
        self._opened: concurrent.futures.Future[_Tapped] | None = None
        if source is None:
            self._notes.append(f"{name}: the model that it was built from is not here, so only its outputs are compared; put it beside it")
        elif manifest is not None:
            self._open(source, manifest, free * SHARE)

    @property
    def kinds(self) -> Mapping[str, Kind]:
        return {**{name: self._types[name] for name in self._tapped.taps}, **self._output_kinds}

    @property
    def notes(self) -> list[str]:
        return [*self._notes, *self._tapped.notes]

    @property
    def how(self) -> list[str]:
        count = sum(engine is not None for engine in self._alone.values())
        alone = f"{self.name}: {count} engines of one plugin, built and run in {self._alone_seconds:.0f} s, say what each computes alone"
        return [*self._tapped.how, *([alone] if count else [])]

    @cached_property
    def _tapped(self) -> _Tapped:
        """Waits for the second engines."""
        if self._opened is None:
            return _Tapped({}, {}, (), ())
        start = time.monotonic()
        while not concurrent.futures.wait([self._opened], 0.5).done:
            self._progress(f"{self.name}: {self._doing}, waiting for {time.monotonic() - start:.0f} s")
        return self._opened.result()

    def _open(self, source: Path, manifest: Manifest, room: float) -> None:
        """Begins to have the tensors between layers computed, some of no more than `room` bytes at a time."""
        prepared = onnx.ModelProto.FromString(prepare.for_parser(source, self._plugins))
        makers = {name: node.name for node in prepared.graph.node for name in node.output}
        computing: dict[str, list[str]] = {}
        for layer in manifest.layers:
            for node in layer.nodes:
                computing.setdefault(node, []).append(layer.name)
        self._layers = {name: ", ".join(computing[node]) for name, node in makers.items() if node in computing}
        names = [n for n in between_layers(prepared, manifest.layers) if n in self._types and self._types[n].is_float]
        if not names:
            self._notes.append(f"{self.name}: TensorRT made one piece of it, so only its outputs are compared")
            return
        needed = sum(4 * math.prod(self._types[name].shape) for name in names) / 2**30
        there = shutil.disk_usage(self._folder).free / 2**30
        if needed > there:
            lack = (
                f"{len(names)} tensors are {needed:.1f} GiB, and the folder for temporary files has {there:.1f}; set TMPDIR to a larger one"
            )
            self._notes.append(f"{self.name}: could not be looked into: {lack}")
            return
        around = {name: {makers[name]} for name in names}
        for reader in prepared.graph.node:
            for name in around.keys() & set(reader.input):
                around[name].add(reader.name)
        self._opened = self._pool.submit(self._tap_all, source, manifest, batches(names, self._types, room), around)

    def _tap_all(self, source: Path, manifest: Manifest, parts: Sequence[Sequence[str]], around: Mapping[str, Collection[str]]) -> _Tapped:
        """Has the tensors of each part computed by an engine of its own. around: the nodes that make and read each."""
        taps: dict[str, str] = {}
        files: dict[str, Path] = {}
        notes: list[str] = []
        count = sum(map(len, parts))
        start = time.monotonic()
        for place, names in enumerate(parts, 1):
            which = "" if len(parts) == 1 else f"{len(names)} of {count} tensors "
            self._doing = "second engine" if len(parts) == 1 else f"second engine {place} of {len(parts)}"
            try:
                values, layers = self._computed(source, manifest, names)
            except OnnxfuseError as error:
                notes.append(f"{self.name}: {which}could not be looked into: {error}")
                continue
            alike = fused_alike(manifest.layers, layers)
            there = engine_process.names(values)
            for name in names:
                if name in there:
                    taps[name] = SAME if all(map(alike, around[name])) else OTHER
                    files[name] = values
        return _Tapped(taps, files, notes, self._told(len(taps), len(parts) - len(notes), time.monotonic() - start))

    def _told(self, tensors: int, engines: int, seconds: float) -> list[str]:
        if not engines:
            return []
        kernels = "the timing cache that it was built with"
        if self._cache is None:
            kernels = f"builder optimization level {QUICK}, so with other kernels, as it has no timing cache (build-engine --timing-cache)"
        which = "a second engine" if engines == 1 else f"{engines} further engines"
        return [f"{self.name}: {tensors} tensors inside are outputs of {which}, built with {kernels}, and run, in {seconds:.0f} s"]

    def _computed(self, source: Path, manifest: Manifest, names: Sequence[str]) -> tuple[Path, Sequence[Layer]]:
        """The file with the values of `names`, and the layers of the engine that computed them."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            cache = Path(folder).with_suffix(".cache")  # a copy: what this engine adds to it is no concern of the user's
            if self._cache is not None:
                shutil.copyfile(self._cache, cache)
            order = engine_process.Order(
                model=str(source.resolve()),
                engine=str(Path(folder) / "tapped.engine"),
                out=str(self._folder / f"{Path(folder).name}-values"),
                shapes=[
                    f"{t.name}:{'..'.join('x'.join(map(str, shape)) for shape in (t.min, t.opt, t.max))}"
                    for t in manifest.inputs
                    if t.min and t.opt and t.max
                ],
                cache=str(cache) if self._cache is not None else None,
                plugins=bool(self._plugins),
                taps=names,
                level=None if self._cache is not None else QUICK,
            )
            try:
                engine_process.run(order, [self._feeds], watch=self._watch)
            except engine_process.Failed as failed:
                if self._cache is None or failed.built:
                    raise
                self._cache = None  # it may be of another GPU by now
                return self._computed(source, manifest, names)
            second = manifests.load(Path(order.engine))
        return order.outputs(0, 0), second.layers if second is not None else ()

    def _watch(self, step: str) -> None:
        if self._stop.is_set():
            raise _Stopped

    def build_ahead(self) -> None:
        """Builds the engines of one plugin, while second engines are built in the background."""
        for node in self.pieces.producers.values():
            if node.domain != DOMAIN or node.op not in self._plugins:
                continue
            feeds = {f"i{k}": sized for k, tensor in enumerate(node.inputs) if tensor.name and (sized := self._sized(tensor)) is not None}
            if len(feeds) == sum(bool(tensor.name) for tensor in node.inputs):
                self._progress(f"{self.name}: {label(node)} alone")
                self._engine_of(node, feeds)

    def _sized(self, tensor: gs.Tensor) -> np.ndarray | None:
        """An array of the type and shape that a tensor has, of whatever values; None where they are not known."""
        import ml_dtypes

        if isinstance(tensor, gs.Constant):
            return np.asarray(tensor.values)
        if tensor.name in self._feeds:
            return np.asarray(self._feeds[tensor.name])
        kind = self._types.get(tensor.name)
        if kind is None or kind.dtype == "string":
            return None
        return np.broadcast_to(np.zeros((), getattr(ml_dtypes, kind.dtype, kind.dtype)), kind.shape)

    def close(self) -> None:
        """Gives back the engines that were built to look at plugins, and ends what still builds others."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for engine in self._alone.values():
            if engine is not None:
                engine.close()

    def fetch(self, names: Sequence[str]) -> Outputs:
        found: Outputs = {}
        if any(name in self._outputs for name in names):
            fed = cast_feeds(self._engine.inputs, dict(self._feeds))
            found.update((name, value) for name, value in self._engine.run(fed).items() if name in names)
        inside = [name for name in names if name not in self._outputs]
        files = self._tapped.files
        for path in dict.fromkeys(files[name] for name in inside if name in files):
            values = engine_process.read(path, inside)
            found.update((name, _cast(value, self._types[name])) for name, value in values.items())
        return found

    def tap(self, name: str) -> str:
        return OUTPUT if name in self._outputs else self._tapped.taps.get(name, OTHER)

    def layer(self, name: str) -> str:
        return self._layers.get(name, "")

    def needs(self, names: Sequence[str], edges: Collection[str]) -> Collection[str]:
        plugins = [node for name in names if (node := self._plugin(name)) is not None]
        return {known for node in plugins for read in names_read(node) if (known := self._before_cast(read, edges)) in edges}

    def alone(self, names: Sequence[str], edges: Collection[str], values: Mapping[str, Any]) -> Outputs:
        """Plugins only: of what TensorRT made itself it cannot be told apart what belongs to which node."""
        found: Outputs = {}
        for name in names:
            node = self._plugin(name)
            known = {*values, *self._feeds}
            if node is None or name in found or not all(self._before_cast(read, known) in known for read in names_read(node)):
                continue
            outputs = self._run_alone(node, values)
            found.update((made, value) for made, value in outputs.items() if made in names)
        return found

    def _plugin(self, name: str) -> gs.Node | None:
        node = self.pieces.producers.get(name)
        return node if node is not None and node.domain == DOMAIN and node.op in self._plugins else None

    def _before_cast(self, name: str, known: Collection[str]) -> str:
        """What a tensor that is not known is a cast of, as of an input that was float32; else the tensor itself."""
        maker = self.pieces.producers.get(name)
        casts = maker is not None and maker.op == "Cast" and name in self._types and self._types[name].is_float
        return str(maker.inputs[0].name) if maker is not None and casts and name not in known else name

    def _run_alone(self, node: gs.Node, values: Mapping[str, Any]) -> Outputs:
        """A plugin in an engine of its own; nodes with the same attributes, types and shapes share one."""
        feeds = {}
        for place, tensor in enumerate(node.inputs):
            if not tensor.name:
                continue
            name = self._before_cast(tensor.name, {*values, *self._feeds})
            value = tensor.values if isinstance(tensor, gs.Constant) else values.get(name, self._feeds.get(name))
            kind = self._types.get(tensor.name)
            feeds[f"i{place}"] = np.ascontiguousarray(_cast(np.asarray(value), kind))
        engine = self._engine_of(node, feeds)
        if engine is None:
            return {}
        start = time.monotonic()
        made = engine.run(cast_feeds(engine.inputs, feeds))
        self._alone_seconds += time.monotonic() - start
        return {tensor.name: made[f"{OWN}{place}"] for place, tensor in enumerate(node.outputs) if f"{OWN}{place}" in made}

    def _engine_of(self, node: gs.Node, feeds: Feeds) -> Running | None:
        """An engine of a node that takes what is like `feeds`; None where TensorRT cannot build it."""
        key, model = self.pieces.one(node, feeds, self._types)
        if key not in self._alone:
            start = time.monotonic()
            path = self._folder / f"alone-{len(self._alone)}.onnx"
            path.write_bytes(model.SerializeToString())
            try:
                self._alone[key] = self._build(path, plugin_ops=self._plugins & {node.op})
            except OnnxfuseError as error:
                self._notes.append(f"{self.name}: {label(node)} cannot be run alone ({error})")
                self._alone[key] = None
            self._alone_seconds += time.monotonic() - start
        return self._alone[key]


def _cast(value: np.ndarray, kind: Kind | None) -> np.ndarray:
    import ml_dtypes

    if kind is None or not kind.is_float or value.dtype.name == kind.dtype:
        return value
    with np.errstate(over="ignore"):
        return value.astype(getattr(ml_dtypes, kind.dtype, kind.dtype))
