"""graph-surgeon's nodes and tensors, compared by identity.

graph-surgeon compares nodes and tensors by name (and nodes by attributes and inputs too), also when it takes a reader off a
tensor's list: that takes off the wrong one where two branches hold equal nodes, and costs a walk over all readers of a shared
constant. These are ordinary gs.Node, gs.Variable and gs.Constant objects otherwise, and may be mixed with those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.util.misc import SynchronizedList


class Node(gs.Node):  # type: ignore[misc]
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(
        self,
        op: str,
        name: str = "",
        attrs: dict[str, Any] | None = None,
        inputs: Sequence[gs.Tensor] = (),
        outputs: Sequence[gs.Tensor] = (),
        domain: str | None = None,
    ) -> None:
        fields = self.__dict__  # not by assignment: gs.Node looks at every one
        fields["op"] = op
        fields["name"] = name
        fields["attrs"] = {} if attrs is None else attrs
        fields["inputs"] = SynchronizedList(self, "outputs", inputs)
        fields["outputs"] = SynchronizedList(self, "inputs", outputs)
        fields["domain"] = domain


class Variable(gs.Variable):  # type: ignore[misc]
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(
        self, name: str, dtype: np.dtype[Any] | None = None, shape: Sequence[int | str | None] | None = None, type: str = "tensor_type"
    ) -> None:
        fields = self.__dict__
        fields["name"] = name
        fields["inputs"] = SynchronizedList(self, "outputs", ())
        fields["outputs"] = SynchronizedList(self, "inputs", ())
        fields["dtype"] = dtype
        fields["shape"] = shape
        fields["type"] = type


class Constant(gs.Constant):  # type: ignore[misc]
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, name: str, values: np.ndarray[Any, Any] | LazyValues) -> None:
        fields = self.__dict__
        fields["name"] = name
        fields["inputs"] = SynchronizedList(self, "outputs", ())
        fields["outputs"] = SynchronizedList(self, "inputs", ())
        fields["_values"] = values
        fields["data_location"] = None
        fields["_export_dtype"] = None


def bodies(node: gs.Node) -> list[gs.Graph]:
    """The subgraphs of a node, not those inside of them."""
    return [value for value in node.attrs.values() if isinstance(value, gs.Graph)]


def with_inner(nodes: Iterable[gs.Node]) -> Iterable[gs.Node]:
    """Nodes, and all nodes of their subgraphs."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from with_inner(body.nodes)


def set_input(node: gs.Node, index: int, tensor: gs.Tensor) -> None:
    """Makes `node` read `tensor` as its input `index`."""
    old = node.inputs[index]
    if old is tensor:
        return
    _take_off(old.outputs, node)
    list.__setitem__(node.inputs, index, tensor)
    list.append(tensor.outputs, node)


def set_output(node: gs.Node, index: int, tensor: gs.Tensor) -> None:
    """Makes `node` produce `tensor` as its output `index`; what it produced there has no producer afterwards."""
    old = node.outputs[index]
    if old is tensor:
        return
    _take_off(old.inputs, node)
    list.__setitem__(node.outputs, index, tensor)
    list.append(tensor.inputs, node)


def redirect(old: gs.Tensor, new: gs.Tensor) -> None:
    """Everyone who reads `old` reads `new`. Graph outputs stay as they are."""
    for node in {id(reader): reader for reader in old.outputs}.values():
        for i, tensor in enumerate(node.inputs):
            if tensor is old:
                list.__setitem__(node.inputs, i, new)
                list.append(new.outputs, node)
    list.clear(old.outputs)


def detach(nodes: Iterable[gs.Node]) -> None:
    """Cuts nodes, those in their subgraphs too, off all tensors. Taking them off their graph's list is the caller's."""
    gone: dict[int, gs.Node] = {id(node): node for node in with_inner(nodes)}
    touched: dict[int, gs.Tensor] = {}
    for node in gone.values():
        touched.update((id(tensor), tensor) for tensor in (*node.inputs, *node.outputs))
    for tensor in touched.values():
        for field in (tensor.outputs, tensor.inputs):
            if any(id(node) in gone for node in field):
                list.__setitem__(field, slice(None), [node for node in field if id(node) not in gone])
    for node in gone.values():
        list.clear(node.inputs)
        list.clear(node.outputs)


def _take_off(field: list[Any], node: gs.Node) -> None:
    for i, entry in enumerate(field):
        if entry is node:
            list.__delitem__(field, i)
            return
