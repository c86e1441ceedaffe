"""Reading a model file. Whatever is wrong with it becomes one line."""

from __future__ import annotations

import heapq
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxfuse.errors import BadInput, refusal
from onnxfuse.graph import garbage, structure, weights
from onnxfuse.graph.convert import Import, dense, node_graphs
from onnxfuse.graph.functions import MOST_NODES, inline_foreign
from onnxfuse.graph.model import Model, opset
from onnxfuse.graph.names import is_text, shown
from onnxfuse.graph.skeleton import SMALL, infer, put_constants
from onnxfuse.graph.wire import Damaged, Span, map_file, split

_STANDARD = ("", "ai.onnx")
_NO_TEXT = "holds text that is not UTF-8; the file is damaged: fetch or export it again"


def load(path: str | os.PathLike[str]) -> Model:
    """Reads, checks and types a model. Weights stay on disk until they are read.

    Raises BadInput for anything that is no sound model: what is wrong, and what to do, in one line.
    """
    source = Path(path)
    proto, data = _parse(source)
    return _guarded(proto, data, source)


def from_proto(proto: ModelProto, path: Path | None = None) -> Model:
    """Like load, of a ModelProto in memory, which is taken apart. `path` says where external data lies."""
    return _guarded(proto, {}, path)


def _guarded(proto: ModelProto, data: dict[int, Span], path: Path | None) -> Model:
    what = shown(path) if path is not None else "model"
    try:
        with garbage.paused():
            return _build(proto, data, path)
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{what}: {_NO_TEXT}") from None
    except RecursionError:
        raise BadInput(f"{what}: subgraphs nested too deeply; export the model again") from None


def _parse(source: Path) -> tuple[ModelProto, dict[int, Span]]:
    try:
        if not is_text(source):
            raise BadInput(f"{shown(source)}: the file's name is not UTF-8, which onnxruntime cannot open; rename it")
        if source.is_dir():
            raise BadInput(f"{shown(source)}: is a folder; name the .onnx file in it")
        if source.exists() and not source.is_file():
            raise BadInput(f"{shown(source)}: is not an ordinary file; name an .onnx file")
        buffer = map_file(source)
    except (OSError, ValueError) as error:  # a zero byte in the path is a ValueError
        why = refusal(error) if isinstance(error, OSError) else f"cannot read it: {error}"
        raise BadInput(f"{shown(source)}: {why}; name an existing .onnx file") from None
    if not buffer:
        raise BadInput(f"{shown(source)}: the file is empty; fetch or export it again")
    proto = ModelProto()
    try:
        rest, data = split(buffer)
        proto.ParseFromString(rest)
    except (Damaged, DecodeError, UnicodeDecodeError):
        raise BadInput(f"{shown(source)}: not an ONNX model, or cut short; fetch or export it again") from None
    if not proto.HasField("graph") or not proto.ir_version:
        raise BadInput(f"{shown(source)}: not an ONNX model (no graph, or no IR version); name an .onnx file")
    return proto, data


def _build(proto: ModelProto, data: dict[int, Span], path: Path | None) -> Model:
    folder = path.parent if path is not None else None
    _check_versions(proto)
    if len(proto.graph.node) > MOST_NODES:
        raise BadInput(f"{len(proto.graph.node):,} nodes, more than {MOST_NODES:,}; split the model")
    external = _check_tensors(proto, folder, data)
    header = _header(proto)
    values = [weights.Weight(tensor, folder, data.get(i)) for i, tensor in enumerate(proto.graph.initializer)]
    constants: dict[str, Any] = {value.tensor.name: value for value in values}
    if len(constants) < len(values):
        raise BadInput("two initializers have the same name; export the model again")
    inputs = {value.name for value in proto.graph.input} if proto.ir_version >= 4 else set()
    defaults = {name: constants.pop(name) for name in list(constants) if name in inputs}
    del proto.graph.initializer[:]
    constants.update(_lift(proto.graph, folder, constants, bodies=proto.ir_version >= 4))
    constants.update(_densify(proto.graph))
    put_constants(proto.graph, constants)
    _arrange(proto.graph)
    for function in proto.functions:
        _arrange_nodes(function.node, set(function.input), f"function {shown(function.name)}")
    plain = inline_foreign(proto)
    if plain is not proto:
        _arrange(plain.graph)
    _check_operators(plain)
    structure.check_nodes(plain)
    structure.check(plain)
    typed = infer(plain)
    graph = Import(folder, constants).graph(typed.graph, [], list(header.opset_import), opset(header))
    return Model(graph, header, {(f.domain, f.name): f for f in typed.functions}, path, defaults, external)


def _densify(graph: GraphProto) -> dict[str, np.ndarray[Any, Any]]:
    """Takes sparse initializers out of a graph, but for those that would be very large: their dense values by name."""
    sparse = list(graph.sparse_initializer)
    values = [dense(tensor) for tensor in sparse]
    del graph.sparse_initializer[:]
    graph.sparse_initializer.extend(tensor for tensor, array in zip(sparse, values, strict=True) if array is None)
    return {tensor.values.name: array for tensor, array in zip(sparse, values, strict=True) if array is not None}


def _lift(graph: GraphProto, folder: Path | None, known: Mapping[str, object], bodies: bool) -> dict[str, weights.Weight]:
    """Takes large Constant nodes out of a graph, and with `bodies` out of its subgraphs where the name is unique: their values by name."""
    inner = list(_bodies(graph)) if bodies else []
    lifted: dict[str, weights.Weight] = {}
    if inner:
        names = Counter(_given(graph))
        for body in inner:
            _take_large(body, folder, lifted, lambda name: names[name] == 1 and name not in known)
    _take_large(graph, folder, lifted, lambda name: name not in known and name not in lifted)
    return lifted


def _take_large(graph: GraphProto, folder: Path | None, lifted: dict[str, weights.Weight], free: Callable[[str], bool]) -> None:
    outputs = {value.name for value in graph.output}
    kept: list[NodeProto] = []
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in _STANDARD and len(node.output) == 1 and len(node.attribute) == 1:
            tensor, name = node.attribute[0].t, node.output[0]
            plain = node.attribute[0].name == "value" and name and isinstance(name, str) and name not in outputs and free(name)
            if plain and tensor.data_type in weights.NUMPY and weights.byte_size(list(tensor.dims), tensor.data_type) > SMALL:
                tensor.name = name
                lifted[name] = weights.Weight(tensor, folder)
                continue
        kept.append(node)
    if len(kept) < len(graph.node):
        rest = GraphProto(node=kept)
        del graph.node[:]
        graph.node.MergeFrom(rest.node)


def _bodies(graph: GraphProto) -> Iterator[GraphProto]:
    """The subgraphs of a graph, the innermost first."""
    for node in graph.node:
        for body in node_graphs(node):
            yield from _bodies(body)
            yield body


def _given(graph: GraphProto) -> Iterator[str]:
    """Every name that a graph or a subgraph of it gives to a value, as often as it does."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield from node.output
        for body in node_graphs(node):
            yield from _given(body)


def _header(proto: ModelProto) -> ModelProto:
    header = ModelProto()
    for field, value in proto.ListFields():
        if field.name not in ("graph", "functions"):
            _set(header, field.name, value)
    for field, value in proto.graph.ListFields():
        if field.name not in ("node", "initializer", "sparse_initializer", "value_info"):
            _set(header.graph, field.name, value)
    return header


def _set(message: ModelProto | GraphProto, name: str, value: object) -> None:
    if isinstance(value, (int, str, bytes, float)):
        setattr(message, name, value)
    else:
        getattr(message, name).MergeFrom(value)


# ----------------------------------------------------------------------------------------------------------- checks


def _check_versions(proto: ModelProto) -> None:
    if proto.ir_version > onnx.IR_VERSION:
        raise BadInput(f"IR version {proto.ir_version} is newer than this onnx package knows ({onnx.IR_VERSION}); upgrade onnx")
    if proto.ir_version < 3:
        raise BadInput(f"IR version {proto.ir_version} is older than 3, the first that runtimes read; export the model again")
    version, newest = opset(proto), onnx.defs.onnx_opset_version()
    if not proto.opset_import or (not version and not any(e.domain for e in proto.opset_import)):
        raise BadInput("imports no operator set; export the model again")
    if version > newest:
        raise BadInput(f"opset {version} is newer than this onnx package knows ({newest}); upgrade onnx, or export with a lower opset")
    if version < 0:
        raise BadInput(f"impossible opset {version}; the file is damaged")


def _check_tensors(proto: ModelProto, folder: Path | None, data: Mapping[int, Span]) -> bool:
    """Checks every tensor of the file; True if any keeps its data in another file."""
    external = False
    for i, tensor in enumerate(proto.graph.initializer):
        weights.check(tensor, folder, "initializer ", data.get(i))
        external |= tensor.data_location == TensorProto.EXTERNAL
    nodes = (proto.graph.node, *(function.node for function in proto.functions))
    for tensor in itertools.chain.from_iterable(map(_node_tensors, nodes)):
        weights.check(tensor, folder, "tensor " if tensor.name else "tensor of an attribute")
        external |= tensor.data_location == TensorProto.EXTERNAL
    return external


def _graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: object) -> Iterator[TensorProto]:
    for node in nodes:  # type: ignore[attr-defined]
        for a in node.attribute:
            if a.ref_attr_name:
                continue  # in a function: the value is the calling node's
            if a.type == AttributeProto.TENSOR:
                yield a.t
            elif a.type == AttributeProto.TENSORS:
                yield from a.tensors
            elif a.type == AttributeProto.GRAPH:
                yield from _graph_tensors(a.g)


def _check_operators(proto: ModelProto) -> None:
    version = opset(proto)
    imported = {entry.domain for entry in proto.opset_import}
    functions = {(f.domain, f.name) for f in proto.functions}
    known: dict[str, bool] = {}
    for node in _all_nodes(proto.graph):
        op, domain = node.op_type, node.domain
        if domain in _STANDARD:
            if op not in known:
                known[op] = onnx.defs.has(op, max_inclusive_version=version) if version else False
            if not known[op] and (domain, op) not in functions:
                raise BadInput(f"node {shown(node.name or op)}: no operator {shown(op)} in ONNX opset {version}; {_remedy(op)}")
        elif domain not in imported:
            raise BadInput(
                f"node {shown(node.name or op)}: operator {shown(op)} of domain {shown(domain)}, which is not imported; export it again"
            )


def _remedy(op: str) -> str:
    if onnx.defs.has(op):
        return f"it needs opset {onnx.defs.get_schema(op).since_version} or another; export with that opset"
    return "a custom operator needs a domain of its own"


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for body in node_graphs(node):
            yield from _all_nodes(body)


# ---------------------------------------------------------------------------------------------------------- sorting


def _arrange(graph: GraphProto) -> None:
    """Puts nodes, subgraphs included, into an order in which each is after what it reads.

    Raises BadInput for cycles, names produced twice, and names that nothing produces.
    """
    missing = _arrange_graph(graph, "graph")
    if missing:
        raise BadInput(f"tensor {shown(min(missing))}: read but never produced; export the model again")


def _arrange_graph(graph: GraphProto, what: str) -> set[str]:
    given = {value.name for value in graph.input}
    given.update(t.name for t in graph.initializer)
    given.update(t.values.name for t in graph.sparse_initializer)
    free, produced = _arrange_nodes(graph.node, given, what)
    _check_text(value.name for value in graph.output)
    free.update(value.name for value in graph.output if value.name not in given and value.name not in produced)
    return free


def _arrange_nodes(nodes: object, given: set[str], what: str) -> tuple[set[str], dict[str, int]]:
    """Sorts a repeated field of nodes; returns the names they read from outside and the index of each name's producer."""
    listed: list[NodeProto] = list(nodes)  # type: ignore[call-overload]
    _check_text(given)
    producer: dict[str, int] = {}
    reads: list[list[str]] = []
    for i, node in enumerate(listed):
        _check_text((node.name, node.op_type, node.domain, node.doc_string, node.overload, *node.input, *node.output))
        names = [name for name in node.input if name]
        for body in node_graphs(node):
            names.extend(_arrange_graph(body, f"subgraph of node {shown(node.name or node.op_type)}"))
        reads.append(names)
        for name in node.output:
            if name and (name in producer or name in given):
                raise BadInput(f"tensor {shown(name)}: produced twice in the {what}; export the model again")
            if name:
                producer[name] = i
    free = {name for names in reads for name in names if name not in given and name not in producer}
    if all(producer.get(name, -1) < i for i, names in enumerate(reads) for name in names):
        return free, producer
    order = _sorted(listed, reads, producer, what)
    copies = [NodeProto.FromString(listed[i].SerializeToString()) for i in order]
    del nodes[:]  # type: ignore[attr-defined]
    nodes.extend(copies)  # type: ignore[attr-defined]
    return free, producer


def _check_text(values: Iterable[object]) -> None:
    """protobuf gives text that is not UTF-8 as bytes."""
    if any(type(value) is not str for value in values):
        raise BadInput(_NO_TEXT)


def _sorted(nodes: list[NodeProto], reads: list[list[str]], producer: dict[str, int], what: str) -> list[int]:
    """Indices in topological order; of the nodes that are ready, the one first in the file comes first."""
    needs = [{producer[name] for name in names if name in producer} for names in reads]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, sources in enumerate(needs):
        for source in sources:
            readers[source].append(i)
    waiting = [len(sources) for sources in needs]
    ready = [i for i, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for reader in readers[i]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        stuck = next(i for i, count in enumerate(waiting) if count)
        raise BadInput(
            f"node {shown(nodes[stuck].name or nodes[stuck].op_type)}: needs its own result (a cycle in the {what}); export the model again"
        )
    return order
