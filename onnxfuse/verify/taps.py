"""An engine looked into.

TensorRT computes no tensor that it fused away, and a tap in the middle of what it fused would change what it fuses. So only tensors
between two layers are tapped: those that the layer table of the engine shows to be handed from one layer to another. They are
debug tensors of a second engine, built from the same model, as marking happens before building; it is then compared with the first
one layer by layer, and each figure says whether TensorRT fused as before around it. Outputs are those of the engine itself.

A plugin is also run alone: in an engine of one node, of the same types, which is fed with the reference's values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.engine import prepare
from onnxfuse.engine.manifest import Layer, Manifest, model_digest
from onnxfuse.engine.run import cast_feeds
from onnxfuse.errors import OnnxfuseError
from onnxfuse.fusions.base import label
from onnxfuse.graph.model import DOMAIN
from onnxfuse.verify.metrics import Tolerance
from onnxfuse.verify.pieces import OWN, Pieces, names_read
from onnxfuse.verify.reference import Feeds, Kind, Outputs, Runtime

OUTPUT = "output of the engine"
SAME = "debug tensor of a second engine, in which TensorRT fused the same around it"
OTHER = "debug tensor of a second engine, in which TensorRT fused otherwise around it"


class Running(Protocol):
    """What is asked of an engine."""

    inputs: Any
    output_specs: Any

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]: ...
    def tapped(self, names: Sequence[str]) -> tuple[str, ...]: ...
    def tap(self, feeds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]: ...
    def layers(self) -> tuple[Layer, ...]: ...
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


class EngineSubject:
    """An engine on one set of inputs, as `layers.Subject`. notes: what could not be looked into."""

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
    ) -> None:
        self.name, self.role, self.limits, self.pieces = name, role, limits, pieces
        self.notes: list[str] = []
        self._engine, self._feeds, self._folder, self._build = engine, feeds, folder, build
        self._alone: dict[bytes, Running | None] = {}
        self._second: Running | None = None
        self._taps: dict[str, str] = {}
        self._layers: dict[str, str] = {}
        self._plugins = frozenset(manifest.plugins.ops) if manifest is not None and manifest.plugins is not None else frozenset()
        known = runtime.kinds(pieces.path, feeds, list(pieces.producers))
        self._types = known
        outputs = {spec.name: known[spec.name] for spec in engine.output_specs if spec.name in known}
        if source is None:
            self.notes.append(f"{name}: the model that it was built from is not here, so only its outputs are compared; put it beside it")
        elif manifest is not None:
            self._open(source, manifest, known)
        self.kinds: Mapping[str, Kind] = {**{n: known[n] for n in self._taps}, **outputs}
        self._outputs = frozenset(outputs)

    def _open(self, source: Path, manifest: Manifest, known: Mapping[str, Kind]) -> None:
        """Builds the second engine."""
        prepared = onnx.ModelProto.FromString(prepare.for_parser(source, self._plugins))
        makers = {name: node.name for node in prepared.graph.node for name in node.output}
        computing: dict[str, list[str]] = {}
        for layer in manifest.layers:
            for node in layer.nodes:
                computing.setdefault(node, []).append(layer.name)
        self._layers = {name: ", ".join(computing[node]) for name, node in makers.items() if node in computing}
        names = [name for name in between_layers(prepared, manifest.layers) if name in known and known[name].is_float]
        profiles = {t.name: (t.min, t.opt, t.max) for t in manifest.inputs if t.min and t.opt and t.max}
        if not names:
            self.notes.append(f"{self.name}: TensorRT made one piece of it, so only its outputs are compared")
            return
        try:
            self._second = self._build(source, profiles=profiles, plugin_ops=self._plugins, taps=names)
        except OnnxfuseError as error:
            self.notes.append(f"{self.name}: no second engine with taps could be built, so only its outputs are compared ({error})")
            return
        alike = fused_alike(manifest.layers, self._second.layers())
        self._taps = {name: SAME if alike(makers[name]) else OTHER for name in self._second.tapped(names)}

    def close(self) -> None:
        """Gives back the engines that were built to look into."""
        for engine in (self._second, *self._alone.values()):
            if engine is not None:
                engine.close()

    def fetch(self, names: Sequence[str]) -> Outputs:
        found: Outputs = {}
        fed = cast_feeds(self._engine.inputs, dict(self._feeds))
        if any(name in self._outputs for name in names):
            found.update((name, value) for name, value in self._engine.run(fed).items() if name in names)
        wanted = [name for name in names if name not in self._outputs]
        if wanted and self._second is not None:
            found.update(self._second.tap(fed, wanted))
        return found

    def tap(self, name: str) -> str:
        return OUTPUT if name in self._outputs else self._taps.get(name, OTHER)

    def layer(self, name: str) -> str:
        return self._layers.get(name, "")

    def needs(self, names: Sequence[str], edges: Collection[str]) -> Collection[str]:
        return {read for name in names if (node := self._plugin(name)) is not None for read in names_read(node) if read in edges}

    def alone(self, names: Sequence[str], edges: Collection[str], values: Mapping[str, Any]) -> Outputs:
        """Plugins only: of what TensorRT made itself it cannot be told apart what belongs to which node."""
        found: Outputs = {}
        for name in names:
            node = self._plugin(name)
            if node is None or name in found or not all(read in values or read in self._feeds for read in names_read(node)):
                continue
            outputs = self._run_alone(node, values)
            found.update((made, value) for made, value in outputs.items() if made in names)
        return found

    def _plugin(self, name: str) -> gs.Node | None:
        node = self.pieces.producers.get(name)
        return node if node is not None and node.domain == DOMAIN and node.op in self._plugins else None

    def _run_alone(self, node: gs.Node, values: Mapping[str, Any]) -> Outputs:
        """A plugin in an engine of its own; nodes with the same attributes, types and shapes share one."""
        feeds = {}
        for place, tensor in enumerate(node.inputs):
            if not tensor.name:
                continue
            value = tensor.values if isinstance(tensor, gs.Constant) else values.get(tensor.name, self._feeds.get(tensor.name))
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
