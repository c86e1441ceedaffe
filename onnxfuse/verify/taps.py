"""An engine looked into.

TensorRT computes no tensor that it fused away, and a tap in the middle of what it fused would change what it fuses. So only tensors
between two layers are tapped: those that the layer table of the engine shows to be handed from one layer to another. They are
outputs of a second engine, built from the same model, which is compared with the first one layer by layer, so that each figure says
whether TensorRT fused as before around it. Outputs of the model are those of the engine itself.

The second engine is built and run once, in a process of its own, and its values wait in files: an abort of TensorRT costs them and nothing
else. Where the device has no room for all of them there are several engines, one after the other, each with some of the tensors.

A plugin is also run alone: in an engine of one node, of the same types, which is fed with the reference's values.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


class EngineSubject:
    """An engine on one set of inputs, as `layers.Subject`. notes: what could not be looked into. free: bytes of device memory that may be
    used, of which tensors that are tapped take a share.
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
    ) -> None:
        self.name, self.role, self.limits, self.pieces = name, role, limits, pieces
        self.notes: list[str] = []
        self._engine, self._feeds, self._folder, self._build = engine, feeds, folder, build
        self._alone: dict[bytes, Running | None] = {}
        self._taps: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self._layers: dict[str, str] = {}
        self._plugins = frozenset(manifest.plugins.ops) if manifest is not None and manifest.plugins is not None else frozenset()
        known = runtime.kinds(pieces.path, feeds, list(pieces.producers))
        self._types = known
        outputs = {spec.name: known[spec.name] for spec in engine.output_specs if spec.name in known}
        if source is None:
            self.notes.append(f"{name}: the model that it was built from is not here, so only its outputs are compared; put it beside it")
        elif manifest is not None:
            self._open(source, manifest, free * SHARE)
        self.kinds: Mapping[str, Kind] = {**{n: known[n] for n in self._taps}, **outputs}
        self._outputs = frozenset(outputs)

    def _open(self, source: Path, manifest: Manifest, room: float) -> None:
        """Has the tensors between layers computed, some of no more than `room` bytes at a time."""
        prepared = onnx.ModelProto.FromString(prepare.for_parser(source, self._plugins))
        makers = {name: node.name for node in prepared.graph.node for name in node.output}
        computing: dict[str, list[str]] = {}
        for layer in manifest.layers:
            for node in layer.nodes:
                computing.setdefault(node, []).append(layer.name)
        self._layers = {name: ", ".join(computing[node]) for name, node in makers.items() if node in computing}
        names = [n for n in between_layers(prepared, manifest.layers) if n in self._types and self._types[n].is_float]
        if not names:
            self.notes.append(f"{self.name}: TensorRT made one piece of it, so only its outputs are compared")
            return
        needed = sum(4 * math.prod(self._types[name].shape) for name in names) / 2**30
        there = shutil.disk_usage(self._folder).free / 2**30
        if needed > there:
            lack = (
                f"{len(names)} tensors are {needed:.1f} GiB, and the folder for temporary files has {there:.1f}; set TMPDIR to a larger one"
            )
            self.notes.append(f"{self.name}: could not be looked into: {lack}")
            return
        around = {name: {makers[name]} for name in names}
        for reader in prepared.graph.node:
            for name in around.keys() & set(reader.input):
                around[name].add(reader.name)
        for batch in batches(names, self._types, room):
            which = "" if len(batch) == len(names) else f"{len(batch)} of {len(names)} tensors "
            self._tapped(source, manifest, batch, around, which)

    def _tapped(self, source: Path, manifest: Manifest, names: Sequence[str], around: Mapping[str, Collection[str]], which: str) -> None:
        """Has `names` computed by an engine of their own. around: the nodes that make and read each. which: what they are, in words."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            order = engine_process.Order(
                model=str(source.resolve()),
                engine=str(Path(folder) / "tapped.engine"),
                out=str(self._folder / f"{Path(folder).name}-values"),
                shapes=[
                    f"{t.name}:{'..'.join('x'.join(map(str, shape)) for shape in (t.min, t.opt, t.max))}"
                    for t in manifest.inputs
                    if t.min and t.opt and t.max
                ],
                cache=str(self._folder / "timing.cache"),
                plugins=bool(self._plugins),
                taps=names,
            )
            try:
                engine_process.run(order, [self._feeds])
            except OnnxfuseError as error:
                self.notes.append(f"{self.name}: {which}could not be looked into: {error}")
                return
            second = manifests.load(Path(order.engine))
        values = order.outputs(0, 0)
        there = engine_process.names(values)
        alike = fused_alike(manifest.layers, second.layers if second is not None else ())
        for name in names:
            if name in there:
                self._taps[name] = SAME if all(map(alike, around[name])) else OTHER
                self._files[name] = values

    def close(self) -> None:
        """Gives back the engines that were built to look at plugins."""
        for engine in self._alone.values():
            if engine is not None:
                engine.close()

    def fetch(self, names: Sequence[str]) -> Outputs:
        found: Outputs = {}
        if any(name in self._outputs for name in names):
            fed = cast_feeds(self._engine.inputs, dict(self._feeds))
            found.update((name, value) for name, value in self._engine.run(fed).items() if name in names)
        inside = [name for name in names if name not in self._outputs]
        for path in dict.fromkeys(self._files[name] for name in inside if name in self._files):
            values = engine_process.read(path, inside)
            found.update((name, _cast(value, self._types[name])) for name, value in values.items())
        return found

    def tap(self, name: str) -> str:
        return OUTPUT if name in self._outputs else self._taps.get(name, OTHER)

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
        key, model = self.pieces.one(node, feeds)
        if key not in self._alone:
            path = self._folder / f"alone-{len(self._alone)}.onnx"
            path.write_bytes(model.SerializeToString())
            try:
                self._alone[key] = self._build(path, plugin_ops=self._plugins & {node.op})
            except OnnxfuseError as error:
                self.notes.append(f"{self.name}: {label(node)} cannot be run alone ({error})")
                self._alone[key] = None
        engine = self._alone[key]
        if engine is None:
            return {}
        made = engine.run(cast_feeds(engine.inputs, feeds))
        return {tensor.name: made[f"{OWN}{place}"] for place, tensor in enumerate(node.outputs) if f"{OWN}{place}" in made}


def _cast(value: np.ndarray, kind: Kind | None) -> np.ndarray:
    import ml_dtypes

    if kind is None or not kind.is_float or value.dtype.name == kind.dtype:
        return value
    with np.errstate(over="ignore"):
        return value.astype(getattr(ml_dtypes, kind.dtype, kind.dtype))
