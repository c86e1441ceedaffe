"""Small questions that fusions ask about a tensor. Each is answered in constant time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import SparseValues

from onnxfuse.graph.weights import Converted, Weight


def _constant_of(tensor: gs.Tensor) -> gs.Constant | None:
    if isinstance(tensor, gs.Constant):
        return tensor
    if len(tensor.inputs) == 1:
        node = tensor.inputs[0]
        if node.op == "Constant" and not node.domain:
            value = node.attrs.get("value")
            return value if isinstance(value, gs.Constant) else None
    return None


def constant(tensor: gs.Tensor) -> np.ndarray[Any, Any] | None:
    """Value of an initializer or of a Constant node, read only; bfloat16 and the like in ml_dtypes' types.

    None for everything known only at run time, graph inputs with a default value among them, and for sparse tensors.
    """
    found = _constant_of(tensor)
    if found is not None:
        values = found._values
        if isinstance(values, (Weight, Converted)):
            array: np.ndarray[Any, Any] = values.array()
            return array
        if isinstance(values, np.ndarray):
            view: np.ndarray[Any, Any] = values.view()
            view.flags.writeable = False
            return view
        if isinstance(values, SparseValues):
            return None
        loaded: np.ndarray[Any, Any] = np.asarray(found.values)
        return loaded
    if len(tensor.inputs) == 1 and tensor.inputs[0].op == "Constant" and not tensor.inputs[0].domain:
        return _plain_constant(tensor.inputs[0].attrs)
    return None


_PLAIN = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


def _plain_constant(attrs: dict[str, Any]) -> np.ndarray[Any, Any] | None:
    for name, dtype in _PLAIN.items():
        if name in attrs and not hasattr(attrs[name], "SerializeToString"):
            return np.asarray(attrs[name], dtype)
    return None


def is_constant(tensor: gs.Tensor) -> bool:
    """Like `constant(tensor) is not None`, without reading the value."""
    found = _constant_of(tensor)
    if found is not None:
        return not isinstance(found._values, SparseValues)
    return constant(tensor) is not None


def scalar(tensor: gs.Tensor) -> float | None:
    """The one element of a constant of any rank; None for constants of another size and for what is no constant."""
    size = shape(tensor)
    if size is not None and any(d != 1 for d in size):
        return None
    value = constant(tensor)
    if value is None or value.size != 1 or value.dtype == object:
        return None
    return float(value.reshape(-1)[0])


def shape(tensor: gs.Tensor) -> list[int | str | None] | None:
    """Dimensions: a number, a symbol, or None where nothing is known; None for unknown rank."""
    if isinstance(tensor, gs.Constant):
        return list(tensor.shape)
    if tensor.shape is None and is_constant(tensor):
        value = constant(tensor)
        return None if value is None else list(value.shape)
    return None if tensor.shape is None else list(tensor.shape)


def rank(tensor: gs.Tensor) -> int | None:
    dims = shape(tensor)
    return None if dims is None else len(dims)


def dtype(tensor: gs.Tensor) -> np.dtype[Any] | int | None:
    """Element type, always a numpy dtype (ml_dtypes for those that numpy lacks); None where unknown, and for what is no tensor."""
    found = tensor.dtype
    return None if found is None else found if isinstance(found, int) else np.dtype(found)


def same_shape(a: gs.Tensor, b: gs.Tensor) -> bool:
    """Whether two shapes are proven equal. A symbol stands for one number throughout a model."""
    one, other = shape(a), shape(b)
    return one is not None and one == other and None not in one


def readers(tensor: gs.Tensor) -> list[gs.Node]:
    """Nodes that read a tensor, those in subgraphs too; a node that reads it twice is there twice."""
    return list(tensor.outputs)


class Outputs:
    """Which tensors are outputs of the main graph or of a subgraph. Built once for a stage: `Outputs(model.graphs())`."""

    def __init__(self, graphs: Iterable[gs.Graph]) -> None:
        self._tensors = {id(tensor): tensor for graph in graphs for tensor in graph.outputs}

    def __contains__(self, tensor: gs.Tensor) -> bool:
        return id(tensor) in self._tensors
