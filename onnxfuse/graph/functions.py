"""Model functions: those of fused nodes, and those that a model brings along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx
import onnx.inliner
from onnx import FunctionProto, ModelProto, NodeProto

from onnxfuse.errors import BadInput
from onnxfuse.graph.convert import Import, node_graphs
from onnxfuse.graph.model import DOMAIN, Model, opset
from onnxfuse.graph.names import first_line, shown

MOST_NODES = 250_000  # ten times the largest known model; a file of a few hundred bytes can hold functions that expand to 10^30 nodes


def add(model: Model, function: FunctionProto) -> None:
    """Gives the model the body of a fused operator, and imports its domain. An equal body may be added again."""
    key = (function.domain, function.name)
    known = model.functions.get(key)
    if known is not None and known != function:
        raise BadInput(
            f"function {shown(function.domain)}::{shown(function.name)}: the model has another body for it; run optimize --undo first"
        )
    model.functions[key] = function
    if all(entry.domain != function.domain for entry in model.header.opset_import):
        model.header.opset_import.add(domain=function.domain, version=1)


def used_by(model: Model) -> dict[tuple[str, str], int]:
    """How many nodes, subgraphs included, call each of the model's functions."""
    counts = Counter((node.domain or "", node.op) for graph in model.graphs() for node in graph.nodes)
    return {key: counts[key] for key in model.functions if counts[key]}


def drop_unused(model: Model) -> None:
    """Removes functions that neither a node nor a used function calls."""
    live = set(used_by(model))
    pending = list(live)
    while pending:
        for node in _nodes(model.functions[pending.pop()].node):
            key = (node.domain, node.op_type)
            if key in model.functions and key not in live:
                live.add(key)
                pending.append(key)
    model.functions = {key: body for key, body in model.functions.items() if key in live}


def undo(model: Model) -> int:
    """Replaces every fused node (domain onnxfuse) by its function's body, in place. Returns how many there were.

    Graph inputs, outputs and tensors that anyone else reads keep their names; the domain's opset import goes.
    """
    from onnxfuse.graph import skeleton

    count = sum(number for (domain, _), number in used_by(model).items() if domain == DOMAIN)
    for graph in model.graphs():
        for node in graph.nodes:
            if node.domain == DOMAIN and (DOMAIN, node.op) not in model.functions:
                raise BadInput(
                    f"node {shown(node.name)}: {shown(node.op)} of domain {DOMAIN} has no function body here; undo what optimize wrote"
                )
    if count:
        bare, constants = skeleton.of_model(model)
        plain = skeleton.infer(_inlined(bare, [key for key in model.functions if key[0] == DOMAIN]))
        model.graph = Import(constants=constants).graph(plain.graph, [], list(model.header.opset_import), model.opset)
        model.names = set()
    model.functions = {key: body for key, body in model.functions.items() if key[0] != DOMAIN}
    kept = [entry for entry in model.header.opset_import if entry.domain != DOMAIN]
    del model.header.opset_import[:]
    model.header.opset_import.extend(kept)
    return count


def inline_foreign(model: ModelProto) -> ModelProto:
    """Inlines every function that is not of domain onnxfuse. Raises BadInput on recursion, and on functions that expand without bound."""
    if not model.functions:
        return model
    _check_bounded(model)
    foreign = [(f.domain, f.name) for f in model.functions if f.domain != DOMAIN]
    return _inlined(model, foreign) if foreign else model


def _inlined(model: ModelProto, keys: list[tuple[str, str]]) -> ModelProto:
    wanted = set(keys)
    try:
        if any(opset(f) not in (0, opset(model)) for f in model.functions if (f.domain, f.name) in wanted):
            plain = onnx.inliner.inline_local_functions(model, convert_version=True)
        else:
            plain = onnx.inliner.inline_selected_functions(model, keys)
    except Exception as error:
        raise BadInput(f"functions cannot be inlined: {first_line(error)}; export the model without functions") from None
    left = {(node.domain, node.op_type) for node in _nodes(plain.graph.node)} & wanted
    if left:
        domain, name = sorted(left)[0]
        raise BadInput(f"function {shown(domain)}::{shown(name)}: of another opset, and cannot be converted; export without functions")
    kept = [f for f in plain.functions if (f.domain, f.name) not in wanted]
    del plain.functions[:]
    plain.functions.extend(kept)
    return plain


def _nodes(nodes: Iterable[NodeProto]) -> Iterable[NodeProto]:
    for node in nodes:
        yield node
        for body in node_graphs(node):
            yield from _nodes(body.node)


def _check_bounded(model: ModelProto) -> None:
    bodies = {(f.domain, f.name, f.overload): f for f in model.functions}
    if len(bodies) != len(model.functions):
        raise BadInput("two functions have the same name; export the model again")
    calls = {key: [(n.domain, n.op_type, n.overload) for n in _nodes(body.node)] for key, body in bodies.items()}
    size: dict[tuple[str, str, str], int] = {}
    for start in bodies:
        path: dict[tuple[str, str, str], None] = {}
        pending = [(start, False)]
        while pending:
            key, done = pending.pop()
            if done:
                path.pop(key)
                size[key] = sum(size.get(callee, 1) for callee in calls[key])
            elif key in path:
                raise BadInput(f"function {shown(key[0])}::{shown(key[1])}: calls itself; export the model without functions")
            elif key not in size:
                path[key] = None
                pending.append((key, True))
                pending.extend((callee, False) for callee in dict.fromkeys(calls[key]) if callee in bodies)
    total = sum(size.get((n.domain, n.op_type, n.overload), 1) for n in _nodes(model.graph.node))
    if total > MOST_NODES:
        raise BadInput(f"its functions expand to {shown(total)} nodes, more than {MOST_NODES:,}; export the model without functions")
