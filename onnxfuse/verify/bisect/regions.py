"""Two files of one model, and every model between them.

A rewritten file keeps the names of the tensors that it still computes. Between those, what differs falls into regions: nodes of the
rewritten file that the original does not have, held together by tensors that the original does not have. Each region can be
switched off by itself: its outputs are then computed by the original's nodes. With every region on, the model is the rewritten file; with
every region off, the original.

A site of a fusion is such a region; so are a folded constant and whatever another tool did. Regions are of the main graph: what
differs inside a subgraph is part of the region of the node that holds it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, external_data_helper, helper

from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.graph import functions, origin, read, write
from onnxfuse.graph.convert import node_graphs
from onnxfuse.graph.model import DOMAIN, Model, opset
from onnxfuse.graph.names import first_line, shown
from onnxfuse.verify.double import reads

_INLINE = 1024  # bytes; larger weights lie in one file that all models between the two share
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})

Value = tuple[str, str]  # a tensor's name, and whose: _OLD or _NEW
_OLD, _NEW = "original", "rewritten"


@dataclass(frozen=True)
class Region:
    """A place where the rewritten file differs.

    name: of its fused node, else of its first node, else of the constant that it is. fusion: what made it, where its nodes say so; keys:
    the entries (fusion, output) of a plan that its nodes name. ops: operators that the rewritten file has there; nodes: the names of
    those nodes. replaced: the original's nodes that they say they stand for. inputs, outputs: tensors that both files have. fused: names of
    its fused nodes; several are one region where they pass each other tensors that the original does not have, as in another layout.
    """

    name: str
    fusion: str | None
    keys: tuple[tuple[str, str], ...]
    ops: tuple[str, ...]
    nodes: tuple[str, ...]
    replaced: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fused: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """What it has in common with other regions: its fusion, else its operators."""
        return self.fusion or ("folded constant" if not self.nodes else "+".join(dict.fromkeys(self.ops)))

    def __str__(self) -> str:
        others = len(self.fused) - 1
        more = f" or one of {others} fused nodes that hold together with it" if others > 0 else ""
        return f"{self.group} at '{self.outputs[0]}'" + (f" (node '{self.name}'){more}" if self.nodes else "")


@dataclass(frozen=True)
class _Side:
    """One of the two files, as tables by tensor name. digests: of its constants, equal where the values are."""

    proto: ModelProto
    digests: dict[str, bytes]

    @cached_property
    def made(self) -> dict[str, NodeProto]:
        return {name: node for node in self.proto.graph.node for name in node.output if name}

    @cached_property
    def constants(self) -> dict[str, TensorProto]:
        return {tensor.name: tensor for tensor in self.proto.graph.initializer}

    @cached_property
    def sparse(self) -> dict[str, onnx.SparseTensorProto]:
        return {tensor.values.name: tensor for tensor in self.proto.graph.sparse_initializer}

    @cached_property
    def inputs(self) -> dict[str, ValueInfoProto]:
        return {value.name: value for value in self.proto.graph.input}

    @cached_property
    def outputs(self) -> dict[str, ValueInfoProto]:
        return {value.name: value for value in self.proto.graph.output}

    @cached_property
    def types(self) -> dict[str, ValueInfoProto]:
        """What is known of the tensors: declared, or inferred."""
        try:
            graph = onnx.shape_inference.infer_shapes(self.proto).graph
        except Exception:  # inference is at times wrong about what runs; then only what is declared is known
            graph = self.proto.graph
        known = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
        for tensor in self.proto.graph.initializer:
            known.setdefault(tensor.name, helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        return known

    def has(self, name: str) -> bool:
        return name in self.made or name in self.constants or name in self.inputs or name in self.sparse

    def is_fed(self, name: str) -> bool:
        return name in self.inputs and name not in self.constants and name not in self.sparse

    def element(self, name: str) -> int:
        """The element type; 0 where it is unknown."""
        value = self.types.get(name)
        return 0 if value is None else int(value.type.tensor_type.elem_type)


@dataclass(frozen=True)
class Pair:
    """The two files, with their large weights in `folder`. `always` names regions that stay on and are no sites."""

    folder: Path
    old: _Side
    new: _Side
    regions: dict[str, Region]  # by name, in topological order
    home: dict[str, str] = field(repr=False)  # tensors that both have, and a region makes -> the region
    common: frozenset[str] = field(repr=False)  # tensors that both make
    always: frozenset[str] = frozenset()

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the regions that can be switched, in topological order."""
        return tuple(name for name in self.regions if name not in self.always)

    def only(self, chosen: Callable[[Region], bool]) -> Pair:
        """The same, with every region that is not chosen always on."""
        return replace(self, always=frozenset(name for name, region in self.regions.items() if not chosen(region)))

    def save(self, on: Collection[str], path: Path) -> Path:
        """Writes the model with just these sites on. `path` must be in `folder`, where its weights are.

        OnnxfuseError: the original computes these tensors in another order, so that they cannot be had from both.
        """
        onnx.save(self.between(on), str(path))
        return path

    def between(self, on: Collection[str]) -> ModelProto:
        """The model with just these sites on. Its large weights are external, in `folder`."""
        proto = ModelProto()
        proto.CopyFrom(self.new.proto)
        for name in ("node", "initializer", "sparse_initializer", "value_info", "quantization_annotation"):
            proto.graph.ClearField(name)
        part = _Assembly(self, frozenset(on) | self.always, tuple(self.new.outputs), None)
        declared = {value.name for value in proto.graph.input}
        proto.graph.node.extend(part.nodes)
        proto.graph.initializer.extend(part.constants)
        kept = {tensor.name for tensor in part.constants}
        # Defaults of inputs, which nobody need read.
        proto.graph.initializer.extend(t for t in self.new.proto.graph.initializer if t.name in declared and t.name not in kept)
        proto.graph.sparse_initializer.extend(part.sparse)
        proto.graph.value_info.extend(part.types())
        return self._finished(proto)

    def window(self, on: Collection[str], outputs: Sequence[str], inside: Collection[str]) -> ModelProto:
        """The part of `between` that computes `outputs` from tensors that are not `inside`, in the original's types. All are
        tensors that both files make. Inputs are sorted by name.
        """
        part = _Assembly(self, frozenset(on) | self.always, tuple(outputs), frozenset(inside))
        graph = helper.make_graph(
            part.nodes,
            "reproduction",
            [self._value(name) for name in sorted(part.cuts)],
            [self._value(name) for name in outputs],
            part.constants,
            sparse_initializer=part.sparse,
            value_info=part.types(),
        )
        proto = helper.make_model(graph, opset_imports=list(self.new.proto.opset_import), ir_version=self.new.proto.ir_version)
        proto.functions.extend(self.new.proto.functions)
        return self._finished(proto)

    def typed(self, name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Values of a tensor in the type that the original has for it, which an evaluator may have widened."""
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(self.old.element(name)))
        return values if values.dtype == dtype else values.astype(dtype)

    def _value(self, name: str) -> ValueInfoProto:
        """Name and type without the sizes of free dimensions, which inference may have made up."""
        value = ValueInfoProto()
        value.CopyFrom(self.old.types.get(name) or self.new.types[name])
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.Clear()
        return value

    def _finished(self, proto: ModelProto) -> ModelProto:
        """With the functions and operator sets of what it holds, and no others."""
        bodies = {(function.domain, function.name): function for function in proto.functions}
        used, fresh = set(), {(node.domain, node.op_type) for node in _all_nodes(proto.graph.node)} & set(bodies)
        while fresh:
            used |= fresh
            fresh = {(node.domain, node.op_type) for key in fresh for node in _all_nodes(bodies[key].node)} & set(bodies) - used
        del proto.functions[:]
        proto.functions.extend(body for key, body in bodies.items() if key in used)
        imports = {entry.domain: entry for entry in (*self.old.proto.opset_import, *proto.opset_import)}
        if not used:
            imports.pop(DOMAIN, None)
        del proto.opset_import[:]
        proto.opset_import.extend(imports.values())
        proto.ir_version = max(proto.ir_version, 4)  # before it, every constant must be an input, too
        return proto


def pair(original: Path, rewritten: Path, folder: Path) -> Pair:
    """Reads both files, and puts their weights into `folder`. Fused nodes of the original are taken apart first, so that both may be the
    same fused file: then each fused node is a region, and switched off it is its function's body.

    BadInput: one of them is no model, or they have different operator sets or outputs.
    """
    old, new = _side(original, folder, _OLD, functions.undo), _side(rewritten, folder, _NEW, lambda model: 0)
    if opset(old.proto) != opset(new.proto):
        raise BadInput(
            f"{rewritten}: is of operator set {opset(new.proto)} and {original} of {opset(old.proto)}, so their nodes cannot be exchanged; "
            "convert the original to the same operator set first"
        )
    if list(old.outputs) != list(new.outputs):
        raise BadInput(f"{rewritten}: does not have the outputs of {original}; name the file that was made of it")
    return _compared(old, new, folder)


def _side(path: Path, folder: Path, stem: str, change: Callable[[Model], int]) -> _Side:
    model = read.load(path)
    change(model)
    copy = folder / f"{stem}.onnx"
    write.save(model, copy)
    proto = onnx.load(str(copy))
    _lift_constants(proto)
    digests = {tensor.name: _digest(tensor) for tensor in proto.graph.initializer}
    external_data_helper.convert_model_to_external_data(proto, location=f"{stem}.weights", size_threshold=_INLINE)
    external_data_helper.write_external_data_tensors(proto, str(folder))
    copy.unlink()
    return _Side(proto, digests)


def _lift_constants(proto: ModelProto) -> None:
    """Constant nodes become initializers: the same thing, written in two ways."""
    left = []
    for node in proto.graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None) if node.op_type == "Constant" and not node.domain else None
        if value is None:
            left.append(node)
        else:
            tensor = proto.graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
    if len(left) < len(proto.graph.node):
        del proto.graph.node[:]
        proto.graph.node.extend(left)


def _digest(tensor: TensorProto) -> bytes:
    digest = hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)}".encode())
    values = onnx.numpy_helper.to_array(tensor)
    digest.update(values.tobytes() if values.dtype != object else repr(values.tolist()).encode())
    return digest.digest()


# --------------------------------------------------------------------------------------------------------- comparing


def _compared(old: _Side, new: _Side, folder: Path) -> Pair:
    common = frozenset(name for name in {**new.made, **new.constants, **new.inputs} if _same(name, old, new))
    changed = [node for node in new.proto.graph.node if not _is_kept(node, old, new, common)]
    home: dict[str, str] = {}
    regions: dict[str, Region] = {}
    for name in new.constants:
        # What the original computes and the rewritten file holds. A constant that was changed in its place is two tensors of one name.
        if name in common and name in old.made:
            _register(Region(name, None, (), (), (), (), (), (name,)), regions, home)
    for group in _groups(changed, common):
        region = _region(group, common, new)
        if region is not None:
            _register(region, regions, home)
    order = {name: place for place, name in enumerate([*new.constants, *new.made])}
    ranked = dict(sorted(regions.items(), key=lambda item: min(order[name] for name in item[1].outputs)))
    return Pair(folder, old, new, ranked, home, common)


def _register(region: Region, regions: dict[str, Region], home: dict[str, str]) -> None:
    name, count = region.name, 1
    while name in regions:
        count += 1
        name = f"{region.name} ({count})"
    regions[name] = replace(region, name=name)
    home.update(dict.fromkeys(region.outputs, name))


def _same(name: str, old: _Side, new: _Side) -> bool:
    """Whether both files have this tensor: fed to both or made by both, of one kind, and of no known size in which they differ."""
    if not old.has(name) or old.is_fed(name) != new.is_fed(name):
        return False
    if name in old.constants and name in new.constants:
        return old.digests[name] == new.digests[name]
    first, second = old.element(name), new.element(name)
    if first != second and not {first, second} <= _FLOATS:
        return False
    shapes = [_dims(side, name) for side in (old, new)]
    if shapes[0] is None or shapes[1] is None:
        return True
    return len(shapes[0]) == len(shapes[1]) and all(a is None or b is None or a == b for a, b in zip(*shapes, strict=True))


def _dims(side: _Side, name: str) -> list[int | None] | None:
    value = side.types.get(name)
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return [int(dim.dim_value) if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]


def _is_kept(node: NodeProto, old: _Side, new: _Side, common: Collection[str]) -> bool:
    """Whether the original has this very node, reading the same tensors."""
    twin = old.made.get(next(filter(None, node.output), ""))
    if twin is None or _content(twin) != _content(node):
        return False
    if any(old.element(name) != new.element(name) for name in (*node.input, *node.output) if name):
        return False
    return all(name in common for name in (*reads(node), *node.output) if name)


def _content(node: NodeProto) -> bytes:
    """All that a node computes: not its name, nor what is said about it."""
    bare = NodeProto()
    bare.CopyFrom(node)
    for name in ("name", "doc_string", "metadata_props"):
        bare.ClearField(name)
    attributes = sorted(bare.attribute, key=lambda attribute: attribute.name)
    bare.ClearField("attribute")
    bare.attribute.extend(attributes)
    return bytes(bare.SerializeToString(deterministic=True))


def _groups(nodes: Sequence[NodeProto], common: Collection[str]) -> list[list[NodeProto]]:
    """Nodes that tensors which only the rewritten file has hold together; in order of their first node.

    A Cast of what both have holds nothing together: it is there for each of its readers.
    """
    parent = list(range(len(nodes)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name and name not in common}
    for i, node in enumerate(nodes):
        for name in reads(node):
            if name in makers and not _is_edge(nodes[makers[name]], common):
                parent[root(i)] = root(makers[name])
    groups: dict[int, list[NodeProto]] = defaultdict(list)
    for i, node in enumerate(nodes):
        groups[root(i)].append(node)
    return list(groups.values())


def _is_edge(node: NodeProto, common: Collection[str]) -> bool:
    return node.op_type == "Cast" and not node.domain and node.input[0] in common


def _region(nodes: Sequence[NodeProto], common: Collection[str], new: _Side) -> Region | None:
    outputs = tuple(name for node in nodes for name in node.output if name in common)
    if not outputs:
        return None
    leader = next((node for node in nodes if node.domain == DOMAIN), nodes[0])
    origins = [found for node in nodes if (found := origin.of(node)) is not None]
    mine = set(outputs)
    read_here = dict.fromkeys(name for node in nodes for name in reads(node) if name in new.made or name in new.inputs)
    return Region(
        name=leader.name or outputs[0],
        fusion=next((found.fusion for found in (origin.of(leader), *origins) if found is not None), None),
        keys=tuple(dict.fromkeys((found.fusion, found.site) for found in origins)),
        ops=tuple(node.op_type for node in nodes),
        nodes=tuple(node.name or next(filter(None, node.output)) for node in nodes),
        replaced=tuple(dict.fromkeys(name for found in origins for name in found.nodes)),
        inputs=tuple(name for name in read_here if name in common and name not in mine),
        outputs=outputs,
        fused=tuple(node.name for node in nodes if node.domain == DOMAIN),
    )


# -------------------------------------------------------------------------------------------------------- assembling


class _Assembly:
    """Nodes and constants that compute `outputs` with some regions on.

    inside: tensors that may be computed; any other that both files make is an input (`cuts`). None: graph inputs alone are.
    """

    def __init__(self, pair: Pair, on: frozenset[str], outputs: tuple[str, ...], inside: frozenset[str] | None) -> None:
        self.pair = pair
        self.on = on
        self.inside = inside
        self.outputs = frozenset(outputs)
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self.sparse: list[onnx.SparseTensorProto] = []
        self.cuts: set[str] = set()
        self._done: set[Value] = set()  # values that are there
        for name in outputs:
            self._make((name, _OLD))

    def types(self) -> list[ValueInfoProto]:
        """The element types of what the nodes make. Sizes are left to inference, which knows them for what is fed."""
        known = ((self._name(value), self._kind(value)) for value in self._done if value[0] not in self.outputs)
        made = {name for node in self.nodes for name in node.output}
        return [helper.make_tensor_value_info(name, kind, None) for name, kind in sorted(known) if kind and name in made]

    def _primary(self, name: str) -> str:
        """Whose nodes compute a tensor that both make."""
        region = self.pair.home.get(name)
        return _OLD if region is not None and region not in self.on else _NEW

    def _is_cut(self, name: str) -> bool:
        if name not in self.pair.common or name in self.outputs:
            return False
        side = self._side(self._primary(name))
        if name in side.constants or name in side.sparse:
            return self.inside is None and name in side.inputs
        return name in side.inputs or (self.inside is not None and name not in self.inside)

    def _side(self, which: str) -> _Side:
        return self.pair.old if which == _OLD else self.pair.new

    def _kind(self, value: Value) -> int:
        return self._side(value[1]).element(value[0])

    def _source(self, value: Value) -> Value:
        """The value that this one is a copy or a Cast of: what is computed, or fed."""
        name, which = value
        if name not in self.pair.common:
            return value
        primary = _OLD if self._is_cut(name) else self._primary(name)
        return value if primary == which else (name, primary)

    def _name(self, value: Value) -> str:
        """What a value is called in the assembled model."""
        name, which = value
        source = self._source(value)
        if name in self.pair.common:
            if self._kind(source) == self._kind(value):
                value = source
            # Inputs and outputs have the original's types and names.
            first = (name, _OLD) if name in self.outputs or self._is_cut(name) else source
            return name if value == first or (value == source and self._kind(first) == self._kind(source)) else _private(name, value[1])
        taken = which == _OLD and self.pair.new.has(name)
        return _private(name, which) if taken else name

    def _make(self, wanted: Value) -> None:
        """Adds what computes a value, and first what it needs; without recursion, as graphs are deep."""
        pending: list[tuple[Value, bool]] = [(wanted, False)]
        open_: set[Value] = set()
        while pending:
            value, ready = pending.pop()
            if ready:
                self._add(value)
                open_.discard(value)
            elif value not in self._done:
                if value in open_:
                    raise OnnxfuseError(
                        f"tensor {shown(value[0])}: computed in another order in the original; its sites cannot be exchanged"
                    )
                open_.add(value)
                pending.append((value, True))
                pending.extend((need, False) for need in self._needs(value) if need not in self._done)

    def _needs(self, value: Value) -> list[Value]:
        source = self._source(value)
        if source != value:
            return [source]
        name, which = value
        node = None if self._is_cut(name) else self._side(which).made.get(name)
        return [] if node is None else [(name, which) for name in dict.fromkeys(reads(node)) if self._side(which).has(name)]

    def _add(self, value: Value) -> None:
        if value in self._done:
            return
        self._done.add(value)
        name, which = value
        source, side = self._source(value), self._side(which)
        if source != value:
            if self._name(source) != self._name(value):
                self.nodes.append(helper.make_node("Cast", [self._name(source)], [self._name(value)], to=self._kind(value)))
        elif self._is_cut(name):
            self.cuts.add(name)
        elif name in side.made:
            self._add_node(side.made[name], which)
        elif name in side.constants:
            tensor = TensorProto()
            tensor.CopyFrom(side.constants[name])
            tensor.name = self._name(value)
            self.constants.append(tensor)
        elif name in side.sparse:
            sparse = onnx.SparseTensorProto()
            sparse.CopyFrom(side.sparse[name])
            sparse.values.name = self._name(value)
            self.sparse.append(sparse)

    def _add_node(self, node: NodeProto, which: str) -> None:
        names = {name: self._name((name, which)) for name in reads(node) if name and self._side(which).has(name)}
        made = NodeProto()
        made.CopyFrom(node)
        _rename(made, names)
        del made.output[:]
        for name in node.output:
            value = (name, which)
            # An output of a node that another file's node computes is not read from here.
            idle = bool(name) and self._source(value) != value
            made.output.append(_private(name, f"idle.{which}") if idle else self._name(value) if name else "")
            if name and not idle:
                self._done.add(value)
        self.nodes.append(made)


def _private(name: str, which: str) -> str:
    return f"{name}/onnxfuse.{which}"


def _rename(node: NodeProto, names: dict[str, str]) -> None:
    """Changes the names that a node reads, in place."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for graph in node_graphs(node):
        for inner in graph.node:
            _rename(inner, names)  # inner names differ from outer ones, as read and written
        for value in graph.output:
            value.name = names.get(value.name, value.name)


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for graph in node_graphs(node):
            yield from _all_nodes(graph.node)


def with_weights(proto: ModelProto, folder: Path) -> ModelProto:
    """The model with its external weights read in, in place."""
    try:
        external_data_helper.load_external_data_for_model(proto, str(folder))
    except Exception as error:
        raise OnnxfuseError(f"weights of a reproduction cannot be read: {first_line(error)}") from None
    return proto
