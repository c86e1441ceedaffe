"""A model without its weights: what onnx's own checker, inliner and shape inference are given.

They serialise a model on the way in and out, so a weight would be copied four times and a model of 2 GB would fail. In a
skeleton, a constant too large to matter for shapes is a graph input of its type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import GraphProto, ModelProto, NodeProto, TensorShapeProto, TypeProto, ValueInfoProto

from onnxfuse.graph import weights
from onnxfuse.graph.convert import Export, node_graphs, set_type
from onnxfuse.graph.model import Model, opset

SMALL = 1024  # bytes; constants up to this size may be shapes, axes and the like, and stay


def put_constants(graph: GraphProto, constants: Mapping[str, Any]) -> None:
    """Adds constants to a skeleton's graph: small ones as initializers, large ones as typed inputs."""
    declared = {value.name for value in graph.input}
    for name, values in constants.items():
        if isinstance(values, weights.Weight):
            small = values.nbytes <= SMALL and values.span() is None and values.tensor.ByteSize() <= 4 * SMALL
        else:
            small = isinstance(values, np.ndarray) and values.nbytes <= SMALL
        if small:
            graph.initializer.append(weights.proto(values, name))
        elif name not in declared:
            value = graph.input.add()
            value.name = name
            value.type.tensor_type.elem_type = weights.elem_type(values.dtype)
            value.type.tensor_type.shape.SetInParent()
            for size in values.shape:
                value.type.tensor_type.shape.dim.add().dim_value = size


def of_model(model: Model, hollow: bool = False) -> tuple[ModelProto, dict[str, Any]]:
    """Skeleton of a model, and the values of its main graph's constants by name. `hollow`: large tensors in attributes have types only."""
    export = Export(model.graph, attribute_bytes=SMALL if hollow else None)
    skeleton = ModelProto(ir_version=model.header.ir_version)
    skeleton.opset_import.extend(model.header.opset_import)
    skeleton.functions.extend(model.functions.values())
    export.graph(model.graph, with_constants=False, into=skeleton.graph)
    constants = {tensor.name: tensor._values for tensor in export.constants.get(id(model.graph), ())}
    put_constants(skeleton.graph, constants)
    return skeleton, constants


def infer(skeleton: ModelProto) -> ModelProto:
    """`skeleton` with the types and shapes of its values.

    What the file itself says of inner values and of output shapes is often out of date (a batch size edited in the inputs
    alone). It is believed only where inference finds nothing, and nowhere when the two contradict each other anywhere.
    """
    bare = ModelProto()
    bare.CopyFrom(skeleton)
    said = {value.name: value for value in skeleton.graph.value_info}
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        said[value.name] = ValueInfoProto.FromString(value.SerializeToString())
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    typed, found = _inferred(bare)
    if any(_contradicts(value.type, found[name].type) for name, value in said.items() if name in found):
        return typed
    opaque = {name for node in skeleton.graph.node if node.domain for name in node.output}
    if opaque & said.keys():  # with what is said of the results of custom operators, inference gets past them
        bare.graph.value_info.extend([value for name, value in said.items() if name in opaque])
        typed, found = _inferred(bare)
    for name, value in said.items():
        if name not in found:
            typed.graph.value_info.add().CopyFrom(value)
        elif found[name].type.HasField("tensor_type") and value.type.HasField("tensor_type"):
            _complete(found[name].type, value.type)
        elif found[name].type.WhichOneof("value") is None:
            found[name].type.CopyFrom(value.type)
    return typed


def _inferred(bare: ModelProto) -> tuple[ModelProto, dict[str, ValueInfoProto]]:
    """The model with what onnx infers, and its value infos by name."""
    deprecated = _stand_in(bare.graph, opset(bare))
    try:
        typed = onnx.shape_inference.infer_shapes(bare, data_prop=not _propagates_without_bound(bare.graph, {}))
    except Exception:  # inference of a sound model can still fail (a custom operator's types); it only adds knowledge
        typed = ModelProto()
        typed.CopyFrom(bare)
    for model in (bare, typed):
        for i, node in deprecated.items():
            model.graph.node[i].CopyFrom(node)
    return typed, {value.name: value for value in (*typed.graph.value_info, *typed.graph.output)}


_PROPAGATED = frozenset({"Add", "Cast", "Concat", "Identity", "Mul", "Slice", "Squeeze", "Sub", "Unsqueeze"})  # a Gather's is its indices'
_MOST_PROPAGATED = 1 << 12  # elements; a shape has some ten


def _propagates_without_bound(graph: GraphProto, sizes: dict[str, int]) -> bool:
    """Whether onnx, which follows the elements of tensors of rank 1 through a graph, would be led into following billions of them: an
    input declared as long as that, or a chain of Concat(x, x), which doubles a constant with every node. `sizes`: lengths by name.
    """
    sizes.update((tensor.name, math.prod(tensor.dims)) for tensor in graph.initializer)
    for value in (*graph.input, *graph.value_info):
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 1 and dims[0].dim_value > 1:
            sizes[value.name] = dims[0].dim_value
    lengths = {tensor.name: _only_number(tensor) for tensor in graph.initializer if math.prod(tensor.dims) == 1}
    for node in graph.node:
        if any(_propagates_without_bound(body, sizes) for body in node_graphs(node)):
            return True
        if node.op_type == "Constant":
            size = max((math.prod(a.t.dims) if a.HasField("t") else len(a.ints) + len(a.floats) for a in node.attribute), default=1)
            lengths.update((name, _only_number(a.t)) for name in node.output for a in node.attribute if a.HasField("t") and size == 1)
        elif node.op_type in _PROPAGATED:
            given = [sizes.get(name, 1) for name in node.input]
            size = sum(given) if node.op_type == "Concat" else max(given, default=1)
            if size > _MOST_PROPAGATED:
                return True
        else:  # it may keep a length, or be given one
            size = max((max(sizes.get(name, 1), lengths.get(name, 1)) for name in node.input), default=1)
            if size <= _MOST_PROPAGATED:
                continue
        sizes.update((name, size) for name in node.output)
    return False


def _only_number(tensor: onnx.TensorProto) -> int:
    """The integer that a tensor of one element holds; 1 for others."""
    if tensor.data_type != onnx.TensorProto.INT64:
        return 1
    return int(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])


def _stand_in(graph: GraphProto, version: int) -> dict[int, NodeProto]:
    """onnx infers nothing for GroupNormalization (of 18 to 20, deprecated, but run everywhere; from 21 on, for its types depend on its
    context): another operator of the same types takes its place meanwhile. Returns the nodes to be put back, by index."""
    found: dict[int, NodeProto] = {}
    if version < 18:
        return found
    for i, node in enumerate(graph.node):
        if node.op_type == "GroupNormalization" and not node.domain:
            found[i] = NodeProto.FromString(node.SerializeToString())
            node.op_type = "InstanceNormalization"
            del node.attribute[:]
    return found


def _contradicts(said: TypeProto, found: TypeProto) -> bool:
    if not (said.HasField("tensor_type") and found.HasField("tensor_type")):
        return False
    a, b = said.tensor_type, found.tensor_type
    if not (a.HasField("shape") and b.HasField("shape")):
        return False
    if len(a.shape.dim) != len(b.shape.dim):
        return True
    return any(x.HasField("dim_value") and x.dim_value != y.dim_value and _known(y) for x, y in zip(a.shape.dim, b.shape.dim, strict=True))


def _known(dim: TensorShapeProto.Dimension) -> bool:
    return bool(dim.HasField("dim_value") or (dim.dim_param and not dim.dim_param.startswith("unk__")))


def _complete(found: TypeProto, said: TypeProto) -> None:
    a, b = found.tensor_type, said.tensor_type
    if not a.elem_type:
        a.elem_type = b.elem_type
    if not b.HasField("shape"):
        return
    if not a.HasField("shape"):
        a.shape.CopyFrom(b.shape)
        return
    for x, y in zip(a.shape.dim, b.shape.dim, strict=True):
        if not _known(x) and _known(y) and not x.dim_param:
            x.CopyFrom(y)


def retype(model: Model) -> None:
    """Infers types and shapes again, in place."""
    skeleton, _ = of_model(model, hollow=True)
    typed = infer(skeleton)
    _apply(model.graph, typed.graph)


def _apply(graph: gs.Graph, proto: GraphProto) -> None:
    types = {value.name: value for value in (*proto.value_info, *proto.output)}
    for node, node_proto in zip(graph.nodes, proto.node, strict=True):
        for tensor in node.outputs:
            if tensor.name in types and isinstance(tensor, gs.Variable):
                set_type(tensor, types[tensor.name])
        bodies = [value for value in node.attrs.values() if isinstance(value, gs.Graph)]
        for body, body_proto in zip(bodies, node_graphs(node_proto), strict=True):
            _apply(body, body_proto)
