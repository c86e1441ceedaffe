"""GraphProto to graph-surgeon graph and back.

graph-surgeon's own importer and exporter lose node metadata, attributes of rare kinds, optional types, overridable
initializers and the graph that an initializer belongs to (it copies a captured weight into every subgraph that reads it),
and copy the table of outer tensors for every subgraph. The graph made here is an ordinary gs.Graph all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, GraphProto, NodeProto, TypeProto, ValueInfoProto
from onnx_graphsurgeon.ir.tensor import SparseValues

from onnxfuse.errors import BadInput
from onnxfuse.graph import weights
from onnxfuse.graph.ir import Constant, Node, Variable
from onnxfuse.graph.names import shown

Scope = list[dict[str, gs.Tensor]]  # innermost first


class Empty(list[Any]):
    """An empty list attribute; `kind` is its AttributeProto type, which an empty list does not show."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind


# ----------------------------------------------------------------------------------------------------------- import


@dataclass
class Import:
    """What importing needs beyond the graph itself."""

    folder: Path | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)  # values of main-graph constants kept out of the proto
    names: set[str] = field(default_factory=set)  # every name seen

    def graph(self, proto: GraphProto, outer: Scope, opsets: list[onnx.OperatorSetIdProto], opset: int) -> gs.Graph:
        local: dict[str, gs.Tensor] = {}
        scope = [local, *outer]
        renamed = self._constants(proto, local, outer)
        types = {value.name: value for value in proto.value_info}
        inputs = []
        for value in proto.input:
            if value.name in local:
                continue
            if not outer and value.name in self.constants:
                local[value.name] = Constant(value.name, self.constants[value.name])
                continue
            tensor = self._variable(value.name, outer, renamed)
            set_type(tensor, value)
            local[value.name] = tensor
            inputs.append(tensor)
        for value in proto.output:
            types.setdefault(value.name, value)
        nodes = [self._node(node, scope, types, renamed, opsets, opset) for node in proto.node]
        outputs = [self._find(value.name, scope) for value in proto.output]
        for tensor, value in zip(outputs, proto.output, strict=True):
            if isinstance(tensor, gs.Variable) and tensor.dtype is None and tensor.type == "tensor_type":
                set_type(tensor, value)
        self.names.update(local)
        graph = gs.Graph(
            nodes=nodes,
            inputs=inputs,
            outputs=outputs,
            name=proto.name,
            doc_string=proto.doc_string,
            opset=opset,
            import_domains=opsets,
        )
        for tensor in local.values():
            if isinstance(tensor, gs.Constant):
                tensor.home = graph
        return graph

    def _constants(self, proto: GraphProto, local: dict[str, gs.Tensor], outer: Scope) -> dict[str, str]:
        renamed: dict[str, str] = {}
        for tensor in proto.initializer:
            name = self._fresh(tensor.name, outer, renamed)
            known = None if outer else self.constants.get(name)
            local[tensor.name] = Constant(name, weights.Weight(tensor, self.folder) if known is None else known)
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            values = dense(sparse)
            local[name] = Constant(name, SparseValues(sparse) if values is None else values)
        return renamed

    def _fresh(self, name: str, outer: Scope, renamed: dict[str, str]) -> str:
        """A subgraph's name that also exists outside of it is changed: names then mean one thing wherever nodes move."""
        if not any(name in table for table in outer):
            return name
        count = 1
        while (fresh := f"{name}_{count}") in self.names or any(fresh in table for table in outer):
            count += 1
        self.names.add(fresh)
        renamed[name] = fresh
        return fresh

    def _variable(self, name: str, outer: Scope, renamed: dict[str, str]) -> gs.Variable:
        return Variable(self._fresh(name, outer, renamed) if outer else name)

    def _find(self, name: str, scope: Scope) -> gs.Tensor:
        for table in scope:
            if name in table:
                return table[name]
        raise BadInput(f"tensor {shown(name)}: read but never produced; export the model again")

    def _node(
        self, proto: NodeProto, scope: Scope, types: Mapping[str, ValueInfoProto], renamed: dict[str, str],
        opsets: list[onnx.OperatorSetIdProto], opset: int,
    ) -> gs.Node:  # fmt: skip
        outputs = []
        for name in proto.output:
            tensor = Variable("") if not name else self._variable(name, scope[1:], renamed)
            if name:
                if name in types:
                    set_type(tensor, types[name])
                scope[0][name] = tensor
            outputs.append(tensor)
        inputs = [self._find(name, scope) if name else Variable("") for name in proto.input]
        attrs = {a.name: self._attribute(a, proto, scope, opsets, opset) for a in proto.attribute}
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        node = Node(op=proto.op_type, name=proto.name, attrs=attrs, inputs=inputs, outputs=outputs, domain=domain or None)
        if proto.doc_string or proto.metadata_props or proto.overload:
            node.notes = proto
        self.names.add(proto.name)
        return node

    def _attribute(self, a: AttributeProto, node: NodeProto, scope: Scope, opsets: list[onnx.OperatorSetIdProto], opset: int) -> Any:
        read = _READ.get(a.type)
        if not isinstance(a.name, str) or not isinstance(a.doc_string, str):
            raise BadInput(f"node {shown(node.name or node.op_type)}: an attribute's name is not UTF-8; the file is damaged")
        if a.ref_attr_name:
            raise BadInput(
                f"node {shown(node.name or node.op_type)}: attribute {shown(a.name)} refers to a function's, outside of one; export again"
            )
        if a.type == AttributeProto.GRAPH:
            return self.graph(a.g, scope, opsets, opset)
        if a.type == AttributeProto.TENSOR:
            return Constant(a.t.name, weights.Weight(a.t, self.folder))
        if a.type == AttributeProto.GRAPHS:
            raise BadInput(
                f"node {shown(node.name or node.op_type)}: attribute {shown(a.name)} is a list of graphs, which no standard operator has"
            )
        if read is None:
            return AttributeProto.FromString(a.SerializeToString())  # sparse tensors, types, lists of tensors: kept as they are
        try:
            value = read(a)
        except UnicodeDecodeError:
            return AttributeProto.FromString(a.SerializeToString())
        return Empty(a.type) if value == [] else value


_READ: dict[int, Callable[[AttributeProto], Any]] = {
    AttributeProto.FLOAT: lambda a: a.f,
    AttributeProto.INT: lambda a: a.i,
    AttributeProto.STRING: lambda a: a.s.decode(),
    AttributeProto.FLOATS: lambda a: list(a.floats),
    AttributeProto.INTS: lambda a: list(a.ints),
    AttributeProto.STRINGS: lambda a: [s.decode() for s in a.strings],
}


def set_type(tensor: gs.Variable, value: ValueInfoProto) -> None:
    """Element type and shape from a value info. A value that is no tensor has neither; its type is kept as it is."""
    kind = value.type.WhichOneof("value")
    if kind == "tensor_type":
        inner = value.type.tensor_type
        tensor.dtype = weights.NUMPY.get(inner.elem_type)
        tensor.shape = [_dim(d) for d in inner.shape.dim] if inner.HasField("shape") else None
    elif kind is not None:
        tensor.type = kind
        tensor.value_type = value.type


def _dim(dim: Any) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value) if dim.dim_value >= 0 else None
    return dim.dim_param if isinstance(dim.dim_param, str) and dim.dim_param else None


_DENSE_LIMIT = 256 << 20  # bytes; a sparse tensor that would be larger stays sparse


def dense(sparse: onnx.SparseTensorProto) -> np.ndarray[Any, Any] | None:
    """Values of a sparse initializer as an array; None where that would be very large."""
    name = shown(sparse.values.name)
    dims = list(sparse.dims)
    weights.check(sparse.values, None, f"sparse initializer {name}")
    weights.check(sparse.indices, None, f"sparse initializer {name}, indices")
    if any(d < 0 for d in dims):
        raise BadInput(f"sparse initializer {name}: impossible shape {shown(dims)}; the file is damaged")
    if weights.byte_size(dims, sparse.values.data_type) > _DENSE_LIMIT:
        return None
    values = onnx.numpy_helper.to_array(sparse.values).reshape(-1)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    flat = indices if indices.ndim == 1 else None
    try:
        if flat is None:
            flat = np.ravel_multi_index(tuple(indices.T), dims)
        if flat.shape != values.shape or (flat.size and (flat.min() < 0 or flat.max() >= np.prod(dims, dtype=np.int64))):
            raise ValueError
    except ValueError:
        raise BadInput(f"sparse initializer {name}: indices outside of its shape {shown(dims)}; the file is damaged") from None
    out = np.zeros(int(np.prod(dims, dtype=np.int64)), values.dtype)
    out[flat] = values
    return out.reshape(dims)


# ----------------------------------------------------------------------------------------------------------- export


@dataclass
class Export:
    """Writes graphs. Each constant goes to one graph: where it was, or the innermost graph that covers all its readers."""

    main: gs.Graph
    inline: bool = False  # external data of subgraphs and attributes is brought into the proto
    attribute_bytes: int | None = None  # tensors in attributes that are larger are written without their values
    inner_as_nodes: bool = False  # a body's constants become Constant nodes: before IR version 4 initializers have to be inputs

    def __post_init__(self) -> None:
        self._parent: dict[int, gs.Graph | None] = {id(self.main): None}
        self._depth = {id(self.main): 0}
        self._owner: dict[int, gs.Graph] = {}
        self._tensors: dict[int, gs.Constant] = {}
        self._visit(self.main)
        self.constants: dict[int, list[gs.Constant]] = {}
        for key, tensor in self._tensors.items():
            owner = self._owner[key]
            home = getattr(tensor, "home", None)
            if home is not None and id(home) in self._parent and self._covers(home, owner):
                owner = home
            self.constants.setdefault(id(owner), []).append(tensor)

    def _visit(self, graph: gs.Graph) -> None:
        for node in graph.nodes:
            for tensor in node.inputs:
                if isinstance(tensor, gs.Constant):
                    self._reads(tensor, graph)
            for value in node.attrs.values():
                if isinstance(value, gs.Graph):
                    self._parent[id(value)] = graph
                    self._depth[id(value)] = self._depth[id(graph)] + 1
                    self._visit(value)
        for tensor in graph.outputs:
            if isinstance(tensor, gs.Constant):
                self._reads(tensor, graph)

    def _reads(self, tensor: gs.Constant, graph: gs.Graph) -> None:
        key = id(tensor)
        owner = self._owner.get(key)
        if owner is graph:
            return
        self._tensors[key] = tensor
        self._owner[key] = graph if owner is None else self._common(owner, graph)

    def _common(self, a: gs.Graph, b: gs.Graph) -> gs.Graph:
        while a is not b:
            if self._depth[id(a)] < self._depth[id(b)]:
                a, b = b, a
            above = self._parent[id(a)]
            assert above is not None
            a = above
        return a

    def _covers(self, graph: gs.Graph, inner: gs.Graph | None) -> bool:
        while inner is not None:
            if inner is graph:
                return True
            inner = self._parent[id(inner)]
        return False

    def graph(self, graph: gs.Graph, with_constants: bool = True, into: GraphProto | None = None) -> GraphProto:
        """GraphProto of `graph`. Inputs and outputs carry the types of their tensors; the main graph's are replaced by the caller."""
        proto = GraphProto() if into is None else into
        proto.name, proto.doc_string = graph.name or "graph", graph.doc_string or ""
        outputs = {id(tensor) for tensor in graph.outputs}
        constants = self.constants.get(id(graph), ()) if with_constants else ()
        if self.inner_as_nodes and graph is not self.main:
            for tensor in constants:
                self._constant_node(proto.node.add(), tensor)
            constants = ()
        for node in graph.nodes:
            self.node(proto.node.add(), node)
            for tensor in node.outputs:
                if tensor.name and id(tensor) not in outputs:
                    value_info(proto.value_info, tensor)
        for tensor in graph.inputs:
            value_info(proto.input, tensor, always=True)
        for tensor in graph.outputs:
            value_info(proto.output, tensor, always=True)
        for tensor in constants:
            if isinstance(tensor._values, SparseValues):
                proto.sparse_initializer.add().CopyFrom(tensor._values.tensor)
            else:
                proto.initializer.add().CopyFrom(weights.proto(tensor._values, tensor.name, self.inline))
        return proto

    def _constant_node(self, proto: NodeProto, tensor: gs.Constant) -> None:
        proto.op_type = "Constant"
        proto.output.append(tensor.name)
        if isinstance(tensor._values, SparseValues):
            attribute = proto.attribute.add(name="sparse_value", type=AttributeProto.SPARSE_TENSOR)
            attribute.sparse_tensor.CopyFrom(tensor._values.tensor)
        else:
            attribute = proto.attribute.add(name="value", type=AttributeProto.TENSOR)
            attribute.t.CopyFrom(weights.proto(tensor._values, tensor.name, self.inline))

    def node(self, proto: NodeProto, node: gs.Node) -> None:
        """Fills `proto` from `node`."""
        proto.op_type = node.op
        if node.name:
            proto.name = node.name
        if node.domain:
            proto.domain = node.domain
        proto.input.extend([tensor.name for tensor in node.inputs])
        proto.output.extend([tensor.name for tensor in node.outputs])
        for name, value in node.attrs.items():
            self._attribute(proto.attribute.add(), name, value, node)
        notes = getattr(node, "notes", None)
        if notes is not None:
            proto.doc_string = notes.doc_string
            proto.metadata_props.extend(notes.metadata_props)
            if notes.overload:
                proto.overload = notes.overload

    def _attribute(self, proto: AttributeProto, name: str, value: Any, node: gs.Node) -> None:
        if isinstance(value, gs.Graph):
            proto.type = AttributeProto.GRAPH
            self.graph(value, into=proto.g)
        elif isinstance(value, gs.Tensor):
            proto.type = AttributeProto.TENSOR
            if self.attribute_bytes is not None and value._values.nbytes > self.attribute_bytes:
                proto.t.dims.extend(value._values.shape)
                proto.t.data_type = weights.elem_type(value._values.dtype)
            else:
                proto.t.CopyFrom(weights.proto(value._values, value.name, self.inline))
        elif isinstance(value, AttributeProto):
            proto.CopyFrom(value)
        elif isinstance(value, Empty):
            proto.type = value.kind  # type: ignore[assignment]
        elif isinstance(value, (bool, int, np.integer)):
            proto.type, proto.i = AttributeProto.INT, int(value)
        elif isinstance(value, (float, np.floating)):
            proto.type, proto.f = AttributeProto.FLOAT, float(value)
        elif isinstance(value, str):
            proto.type, proto.s = AttributeProto.STRING, value.encode()
        elif isinstance(value, (np.dtype, type)):
            proto.type, proto.i = AttributeProto.INT, weights.elem_type(value)
        else:
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            kind = _list_kind(node, name) if not len(plain) else None
            proto.CopyFrom(onnx.helper.make_attribute(name, plain, attr_type=kind))
        proto.name = name


def _list_kind(node: gs.Node, name: str) -> int:
    attributes = onnx.defs.get_schema(node.op, domain=node.domain or "").attributes
    if name not in attributes:
        return int(AttributeProto.INTS)
    return int(attributes[name].type.value)  # type: ignore[attr-defined]


def value_info(into: Any, tensor: gs.Tensor, always: bool = False) -> None:
    """Adds what is known of `tensor` to a repeated ValueInfoProto field; nothing where nothing is known, unless `always`."""
    kept: TypeProto | None = getattr(tensor, "value_type", None)
    if kept is None and tensor.dtype is None and not always:
        return
    value = into.add()
    value.name = tensor.name
    if kept is not None:
        value.type.CopyFrom(kept)
        _forget_made(value.type)
    elif tensor.dtype is not None:
        inner = value.type.tensor_type
        inner.elem_type = weights.elem_type(tensor.dtype)
        if tensor.shape is not None:
            dims = inner.shape.dim
            inner.shape.SetInParent()
            for size in tensor.shape:
                dim = dims.add()
                if isinstance(size, str):
                    if not size.startswith("unk__"):  # made up by shape inference
                        dim.dim_param = size
                elif size is not None:
                    dim.dim_value = int(size)


def _forget_made(kind: TypeProto) -> None:
    """Takes the symbols that inference made up out of a type: inside of a sequence they would say that all its parts are of one size."""
    which = kind.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        _forget_made(getattr(kind, which).elem_type)
    elif which == "map_type":
        _forget_made(kind.map_type.value_type)
    elif which is not None:
        for dim in getattr(kind, which).shape.dim if getattr(kind, which).HasField("shape") else ():
            if dim.dim_param.startswith("unk__"):
                dim.Clear()


def node_graphs(proto: NodeProto) -> Iterator[GraphProto]:
    """The subgraphs of a node."""
    for a in proto.attribute:
        if a.type == AttributeProto.GRAPH:
            yield a.g
        elif a.type == AttributeProto.GRAPHS:
            yield from a.graphs
