"""The model as the rest of the package sees it: an onnx-graphsurgeon graph and what graph-surgeon has no place for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.graph.weights import Weight

# graph-surgeon prints its warnings to stdout; what matters of them is checked here and raised as BadInput.
G_LOGGER.severity = G_LOGGER.CRITICAL

DOMAIN = "onnxfuse"


@dataclass
class Model:
    """A loaded model.

    graph: nodes and tensors. Subgraphs are gs.Graph objects in node.attrs; tensors they capture are the same objects.
        A graph input that has a default value (an overridable initializer, IR version 4 and newer) is a gs.Variable in
        graph.inputs; its default value is in `defaults`.
    header: the file without nodes, functions, value infos and (other) initializers. header.graph.input and
        header.graph.output are as declared, and are written back so.
    functions: function bodies by (domain, op type).
    path: where the model came from. Weights are read from that file's folder when they are needed.
    """

    graph: gs.Graph
    header: onnx.ModelProto
    functions: dict[tuple[str, str], onnx.FunctionProto] = field(default_factory=dict)
    path: Path | None = None
    defaults: dict[str, Weight] = field(default_factory=dict)  # of overridable graph inputs, by name
    external: bool = False  # the source kept weights in files of their own
    becomes_half: bool = False  # rewriting is followed by the conversion to float16 or bfloat16
    names: set[str] = field(default_factory=set, repr=False)  # every name ever used, filled on first need
    _counts: dict[str, int] = field(default_factory=dict, repr=False)
    _flat: gs.Graph | None = field(default=None, repr=False, compare=False)  # the main graph, if it is known to have no subgraphs

    @property
    def opset(self) -> int:
        """Version of the default operator set."""
        return opset(self.header)

    @property
    def ir_version(self) -> int:
        return int(self.header.ir_version)

    def graphs(self) -> Iterator[gs.Graph]:
        """The main graph, then every subgraph, depth first.

        Where the main graph had no node with a subgraph once, it is not searched again: rewriting takes bodies away, but adds none.
        """
        if self._flat is self.graph:
            yield self.graph
            return
        pending = [self.graph]
        while pending:
            graph = pending.pop()
            yield graph
            bodies = [value for node in graph.nodes for value in node.attrs.values() if isinstance(value, gs.Graph)]
            pending.extend(reversed(bodies))
            if graph is self.graph and not bodies:
                self._flat = graph

    def unique_name(self, stem: str) -> str:
        """A name close to `stem` that no tensor or node of the whole model carries, and that is never given again."""
        if not self.names:
            self.names = _all_names(self)
        name, count = stem, self._counts.get(stem, 0)
        while not name or name in self.names:
            count += 1
            name = f"{stem}_{count}"
        self._counts[stem] = count
        self.names.add(name)
        return name


def opset(model: onnx.ModelProto | onnx.FunctionProto) -> int:
    """Version of the default operator set that a model or a function imports; 0 where it imports none."""
    return max((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _all_names(model: Model) -> set[str]:
    names = {value.name for value in (*model.header.graph.input, *model.header.graph.output)}
    for graph in model.graphs():
        names.update(tensor.name for tensor in (*graph.inputs, *graph.outputs))
        for node in graph.nodes:
            names.add(node.name)
            names.update(tensor.name for tensor in node.inputs)
            names.update(tensor.name for tensor in node.outputs)
    return names
