"""Values of a few constant nodes: by numpy where it is exact, by onnxruntime otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from onnxfuse.graph import exact, query, weights
from onnxfuse.graph.convert import Export

Array = np.ndarray[Any, Any]


def evaluate(nodes: list[gs.Node], wanted: list[gs.Tensor], opset: int) -> dict[int, Array] | None:
    """Runs `nodes` (sorted, of the default domain, all other inputs constant); values of the `wanted` tensors by id.

    None where they cannot be run: then they are best left where they are.
    """
    known: dict[int, Array] = {}
    rest: list[gs.Node] = []
    for node in nodes:
        value = _exactly(node, known)
        if value is None:
            rest.append(node)
        else:
            known[id(node.outputs[0])] = value
    left = [tensor for tensor in wanted if id(tensor) not in known]
    if any(exact.may_trap(node) for node in rest):
        return None
    if left:
        found = _by_runtime(rest, left, opset, known)
        if found is None:
            return None
        known.update(found)
    return {id(tensor): known[id(tensor)] for tensor in wanted}


def _exactly(node: gs.Node, known: dict[int, Array]) -> Array | None:
    inputs: list[Array | None] = []
    for tensor in node.inputs:
        value = None
        if not tensor.is_empty():
            value = known[id(tensor)] if id(tensor) in known else query.constant(tensor)
            if value is None or value.dtype not in _RUNTIME:
                return None
        inputs.append(value)
    return exact.compute(node, inputs)


def _by_runtime(nodes: list[gs.Node], wanted: list[gs.Tensor], opset: int, known: dict[int, Array]) -> dict[int, Array] | None:
    """By onnxruntime. Optimizations are off: folding gives what running the model would have given."""
    import onnxruntime

    names: dict[int, str] = {}
    feeds: dict[str, Array] = {}
    export = Export(gs.Graph())
    proto = onnx.GraphProto(name="constants")
    for node in nodes:
        made = proto.node.add()
        export.node(made, node)
        del made.input[:], made.output[:]
        for tensor in node.inputs:
            if not tensor.is_empty() and id(tensor) not in names:
                value = known[id(tensor)] if id(tensor) in known else query.constant(tensor)
                if value is None:
                    return None
                names[id(tensor)] = f"t{len(names)}"
                feeds[names[id(tensor)]] = value
            made.input.append("" if tensor.is_empty() else names[id(tensor)])
        for tensor in node.outputs:
            if not tensor.is_empty():
                names[id(tensor)] = f"t{len(names)}"
            made.output.append("" if tensor.is_empty() else names[id(tensor)])
    if any(value.dtype == object or value.dtype not in _RUNTIME for value in feeds.values()):
        return None
    for name, value in feeds.items():
        proto.input.append(helper.make_tensor_value_info(name, weights.elem_type(value.dtype), list(value.shape)))
    proto.output.extend([onnx.ValueInfoProto(name=names[id(tensor)]) for tensor in wanted])
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # of no use for one run, and it would be kept
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results = session.run([names[id(tensor)] for tensor in wanted], feeds)
    except Exception:  # onnxruntime has its own exception types, and no base of them is public
        return None
    if any(not isinstance(value, np.ndarray) or value.dtype == object for value in results):
        return None
    return {id(tensor): value for tensor, value in zip(wanted, results, strict=True)}


_RUNTIME = frozenset(
    np.dtype(name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
