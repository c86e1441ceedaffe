"""A model as pieces that can be looked into: its tensors in order, what computes each, and any part of it as a model of its own.

Two files of one model have tensors in common, by name: rewriting keeps the names of what it still computes. Between two of those lies a
piece: the nodes that compute the one from the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from onnxfuse.errors import OnnxfuseError
from onnxfuse.fusions.base import label
from onnxfuse.graph import clean, ir, origin, read, weights, write
from onnxfuse.graph.convert import Export
from onnxfuse.graph.model import DOMAIN, Model
from onnxfuse.graph.origin import Origin
from onnxfuse.verify.reference import Feeds, Kind, Runtime
from onnxfuse.verify.skim import skeleton

OWN = "onnxfuse.alone:"  # before the name of a tensor that a piece computes, as its inputs have the names themselves
_MOST_WEIGHTS = 1900 << 20  # bytes; protobuf messages end at 2 GiB
LOOPS = frozenset({"Loop", "Scan"})


@dataclass(frozen=True)
class Pieces:
    """A loaded model, and the file with the same tensors that runtimes are given.

    branches: how many Ifs were replaced by the branch that these inputs take, so that its tensors can be seen.
    """

    path: Path
    model: Model
    branches: int = 0

    @cached_property
    def producers(self) -> dict[str, gs.Node]:
        """By tensor, in topological order."""
        return {value.name: node for node in self.model.graph.nodes for value in node.outputs if value.name}

    @cached_property
    def constants(self) -> dict[str, gs.Constant]:
        return {t.name: t for node in self.model.graph.nodes for t in (*node.inputs, *captured(node)) if isinstance(t, gs.Constant)}

    @property
    def outputs(self) -> list[str]:
        return [value.name for value in self.model.graph.outputs]

    @property
    def loops(self) -> list[str]:
        """Names of nodes whose bodies run several times: what is inside them has no single value."""
        return [label(node) for node in self.model.graph.nodes if node.op in LOOPS]

    def between(self, name: str, edges: Collection[str]) -> list[gs.Node]:
        """The nodes that compute tensor `name` from `edges`, graph inputs and constants; those nearest to it first."""
        found: dict[int, gs.Node] = {}
        pending = [name]
        while pending:
            node = self.producers.get(pending.pop())
            if node is None or id(node) in found:
                continue
            found[id(node)] = node
            pending.extend(value for value in names_read(node) if value not in edges)
        return list(found.values())

    def origin(self, name: str, edges: Collection[str]) -> tuple[Origin | None, str]:
        """What made tensor `name`: the origin of the nearest node that says one, and the node itself (else the nearest node)."""
        nodes = self.between(name, edges)
        for node in nodes:
            found = origin.of(node)
            if found is not None:
                return found, label(node)
        own = next((node for node in nodes if node.domain == DOMAIN), None)
        if own is not None:  # written by a version that said nothing
            return Origin(own.op, name, ()), label(own)
        return None, label(nodes[0]) if nodes else ""

    def alone(self, names: Sequence[str], edges: Collection[str], kinds: Mapping[str, Kind], rounded: Any = None) -> Piece:
        """A model that computes each of `names` by the nodes between it and `edges`, which are its inputs. rounded: a floating type that
        the weights are rounded to, though they keep theirs.
        """
        nodes: dict[int, gs.Node] = {}
        for name in names:
            nodes.update((id(node), node) for node in self.between(name, edges))
        order = [node for node in self.model.graph.nodes if id(node) in nodes]
        made = {value.name for node in order for value in node.outputs if value.name}
        reads = dict.fromkeys(name for node in order for name in names_read(node))
        inputs = [name for name in reads if name in edges or name not in made]
        inputs = [name for name in inputs if name not in self.constants]
        proto = _assembled(self.model, order, {name for name in made if name in edges or name in set(names)}, rounded)
        proto.graph.input.extend([_declared(name, kinds.get(name)) for name in inputs])
        proto.graph.output.extend([onnx.ValueInfoProto(name=OWN + name) for name in names])
        return Piece(proto, tuple(inputs), tuple(names))

    def one(self, node: gs.Node, feeds: Mapping[str, np.ndarray], kinds: Mapping[str, Kind]) -> tuple[bytes, onnx.ModelProto]:
        """A model of `node` alone, all of whose inputs are fed, weights too: input k is called "ik", output k `OWN` and k. Also what tells
        such models apart. kinds: of the node's outputs, by their names; TensorRT's parser takes no output without a type.
        """
        made = onnx.NodeProto()
        Export(gs.Graph(nodes=[node])).node(made, node)
        made.input[:] = [f"i{place}" if name else "" for place, name in enumerate(made.input)]
        made.output[:] = [f"{OWN}{place}" if name else "" for place, name in enumerate(made.output)]
        made.ClearField("metadata_props")
        made.name = node.op
        graph = helper.make_graph(
            [made],
            "alone",
            [helper.make_tensor_value_info(name, weights.elem_type(value.dtype), list(value.shape)) for name, value in feeds.items()],
            [_declared(name, kinds.get(value.name)) for name, value in zip(made.output, node.outputs, strict=True) if name],
        )
        proto = helper.make_model(graph, opset_imports=list(self.model.header.opset_import), ir_version=self.model.ir_version)
        proto.functions.extend(function for key, function in self.model.functions.items() if key == (node.domain, node.op))
        return bytes(proto.SerializeToString(deterministic=True)), proto


@dataclass(frozen=True)
class Piece:
    """A part of a model. Its outputs are called `OWN` and the tensor's name."""

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    names: tuple[str, ...]


def prepare(path: Path, feeds: Feeds, runtime: Runtime, folder: Path) -> Pieces:
    """The model in `path`, with the branch that `feeds` takes in the place of each If of its main graph. A copy is written to `folder`
    where the file itself does not have the tensors that the loaded model has, or has them in another order.
    """
    model = read.load(path)
    branches = 0
    copy = folder / f"model-{len(list(folder.glob('model-*.onnx')))}.onnx"
    while any(_asks(node) for node in model.graph.nodes):
        write.save(model, copy)
        wanted = list(dict.fromkeys(node.inputs[0].name for node in model.graph.nodes if _asks(node)))
        given = {name: value for name, value in feeds.items() if name in wanted}
        inner = [name for name in wanted if name not in given]
        values = {**given, **(runtime.run(copy, [feeds], inner)[0] if inner else {})}
        for node in model.graph.nodes:
            if _asks(node):
                name = model.unique_name(f"{node.inputs[0].name}_taken")
                ir.set_input(node, 0, ir.Constant(name, np.asarray(values[node.inputs[0].name]).astype(bool)))
        branches += clean.inline_branches(model)
        model = read.from_proto(write.to_proto(model), path)  # what moved is as if it had been there always
    there = [name for node in skeleton(path).graph.node if node.op_type != "Constant" for name in node.output if name]
    here = [name for name, node in Pieces(path, model).producers.items() if node.op != "Constant"]
    if branches or there != here:
        write.save(model, copy)
        return Pieces(copy, model, branches)
    return Pieces(path, model)


def _asks(node: gs.Node) -> bool:
    return bool(node.op == "If" and not node.domain and not isinstance(node.inputs[0], gs.Constant))


def captured(node: gs.Node) -> Iterator[gs.Tensor]:
    """Tensors that the bodies of a node read from outside of them."""
    bodies = ir.bodies(node)
    if not bodies:
        return
    inner = list(ir.with_inner(n for body in bodies for n in body.nodes))
    own = {id(value) for n in inner for value in n.outputs}
    graphs = [*bodies, *(body for n in inner for body in ir.bodies(n))]
    own.update(id(value) for body in graphs for value in body.inputs)
    for value in (*(t for n in inner for t in n.inputs), *(t for body in graphs for t in body.outputs)):
        local = isinstance(value, gs.Constant) and any(getattr(value, "home", None) is body for body in graphs)
        if id(value) not in own and value.name and not local:
            yield value


def names_read(node: gs.Node) -> list[str]:
    """Names of the tensors, no constants, that a node and its bodies read."""
    return list(dict.fromkeys(t.name for t in (*node.inputs, *captured(node)) if t.name and not isinstance(t, gs.Constant)))


def _assembled(model: Model, nodes: Sequence[gs.Node], renamed: Collection[str], rounded: Any) -> onnx.ModelProto:
    """A model of `nodes` and the constants that they read; outputs among `renamed` are called `OWN` and their name."""
    export = Export(gs.Graph(nodes=list(nodes)))
    proto = onnx.ModelProto(ir_version=model.ir_version)
    proto.opset_import.extend(model.header.opset_import)
    proto.graph.name = "piece"
    for node in nodes:
        made = proto.graph.node.add()
        export.node(made, node)
        made.output[:] = [OWN + name if name in renamed else name for name in made.output]
    held = export.constants.get(id(export.main), ())
    if sum(int(tensor._values.nbytes) for tensor in held) > _MOST_WEIGHTS:
        raise OnnxfuseError("the weights of a piece are beyond 2 GB; look at the outputs alone, without --layers")
    for tensor in held:
        made_of = weights.proto(tensor._values, tensor.name, inline=True)
        if rounded is not None and made_of.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            values = onnx.numpy_helper.to_array(made_of)
            with np.errstate(over="ignore"):
                made_of = onnx.numpy_helper.from_array(values.astype(rounded).astype(values.dtype), tensor.name)
        proto.graph.initializer.append(made_of)
    used = {(node.domain, node.op_type) for node in proto.graph.node}
    proto.functions.extend(function for key, function in model.functions.items() if key in used or key[0] != DOMAIN)
    return proto


def _declared(name: str, kind: Kind | None) -> onnx.ValueInfoProto:
    if kind is None:
        return onnx.ValueInfoProto(name=name)
    import ml_dtypes

    dtype = np.dtype(np.str_) if kind.dtype == "string" else np.dtype(getattr(ml_dtypes, kind.dtype, kind.dtype))
    return helper.make_tensor_value_info(name, weights.elem_type(dtype), list(kind.shape))
