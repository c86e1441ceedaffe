"""Writing a model file: whole or not at all, with the interface, versions and metadata that it was read with."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from onnx import ModelProto, TensorProto
from onnx_graphsurgeon.ir.tensor import SparseValues

from onnxfuse.errors import BadInput
from onnxfuse.graph import weights
from onnxfuse.graph.convert import Export, value_info
from onnxfuse.graph.files import atomic
from onnxfuse.graph.functions import drop_unused
from onnxfuse.graph.model import Model
from onnxfuse.graph.skeleton import put_constants

_MOST_INLINE = (1 << 31) - (1 << 20)  # bytes; protobuf cannot write 2 GiB


def to_proto(model: Model) -> ModelProto:
    """The whole model in memory. External data stays a reference, relative to the source's folder."""
    proto, constants = _assemble(model)
    for tensor in constants:
        _initializer(proto, tensor)
    return proto


def _initializer(proto: ModelProto, tensor: gs.Constant) -> None:
    if isinstance(tensor._values, SparseValues):
        proto.graph.sparse_initializer.add().CopyFrom(tensor._values.tensor)
    else:
        proto.graph.initializer.add().CopyFrom(weights.proto(tensor._values, tensor.name))


def _assemble(model: Model) -> tuple[ModelProto, list[gs.Constant]]:
    """The model without the main graph's initializers, and those."""
    drop_unused(model)
    export = Export(model.graph)
    proto = ModelProto()
    proto.CopyFrom(model.header)
    graph = proto.graph
    constants = export.constants.get(id(model.graph), [])
    body = export.graph(model.graph, with_constants=False)
    graph.node.extend(body.node)
    graph.value_info.extend(body.value_info)
    if proto.ir_version < 4:  # initializers have to be inputs too
        _declare(proto, constants, {tensor.name for tensor in model.graph.inputs})
    proto.functions.extend(model.functions.values())
    return proto, constants


def _declare(proto: ModelProto, constants: list[gs.Constant], inputs: set[str]) -> None:
    """Before IR version 4 every initializer is a graph input as well: those gone are left out, new ones come last."""
    names = {tensor.name for tensor in constants}
    kept = [value for value in proto.graph.input if value.name in names or value.name in inputs]
    declared = {value.name for value in kept}
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    for tensor in constants:
        if tensor.name not in declared:
            value_info(proto.graph.input, tensor)


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Writes the model."""
    proto = to_proto(model)
    with atomic(path) as temporary:
        onnx.save(proto, str(temporary))


_unused = (BadInput, Path, TensorProto, value_info, put_constants, _MOST_INLINE)
