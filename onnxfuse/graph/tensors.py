"""Every tensor of a model file, wherever it hides: what must be known before anything opens the files that they refer to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto


def every(model: ModelProto) -> Iterator[TensorProto]:
    """Tensors of initializers and attributes, of sparse ones too, of the main graph, its bodies and functions."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)
        yield from _of_attributes(function.attribute_proto)


def _of_graph(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    yield from _of_sparse(graph.sparse_initializer)
    yield from _of_nodes(graph.node)


def _of_sparse(tensors: Iterable[SparseTensorProto]) -> Iterator[TensorProto]:
    for tensor in tensors:
        yield tensor.values
        yield tensor.indices


def _of_nodes(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        yield from _of_attributes(node.attribute)


def _of_attributes(attributes: Iterable[AttributeProto]) -> Iterator[TensorProto]:
    """Of every field that is filled, whatever type an attribute says it has."""
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield from _of_sparse([attribute.sparse_tensor])
        yield from _of_sparse(attribute.sparse_tensors)
        if attribute.HasField("g"):
            yield from _of_graph(attribute.g)
        for graph in attribute.graphs:
            yield from _of_graph(graph)
