"""What onnx's checker does not look at, and fusions and runtimes rely on: bodies that fit their nodes, constants that have a value,
versions that are not in doubt, attributes of onnxfuse's own operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from onnxfuse.errors import BadInput
from onnxfuse.graph.convert import node_graphs
from onnxfuse.graph.model import DOMAIN
from onnxfuse.graph.names import first_line, shown

_STANDARD = ("", "ai.onnx")
_OWN_ATTRIBUTES = {
    "axis": AttributeProto.INT,
    "clip": AttributeProto.FLOAT,
    "direction": AttributeProto.STRING,
    "dtype": AttributeProto.INT,
    "epsilon": AttributeProto.FLOAT,
    "expression": AttributeProto.STRING,
    "grouped": AttributeProto.INTS,
    "grouped_shape": AttributeProto.TENSOR,
    "channels": AttributeProto.INT,
    "pads": AttributeProto.INTS,
    "hidden_size": AttributeProto.INT,
    "linear_before_reset": AttributeProto.INT,
    "num_groups": AttributeProto.INT,
    "patch": AttributeProto.INT,
    "rotary": AttributeProto.INT,
    "scale": AttributeProto.FLOAT,
    "fill": AttributeProto.FLOAT,
    "hides": AttributeProto.INT,
    "safe": AttributeProto.INT,
    "heads": AttributeProto.INT,
    "kv_heads": AttributeProto.INT,
    "q_perm": AttributeProto.INTS,
    "k_perm": AttributeProto.INTS,
    "v_perm": AttributeProto.INTS,
    "widths": AttributeProto.INTS,
    "q_rows": AttributeProto.INTS,
    "k_rows": AttributeProto.INTS,
    "v_rows": AttributeProto.INTS,
    "repeats": AttributeProto.INTS,
    "k_heads": AttributeProto.INTS,
    "v_heads": AttributeProto.INTS,
    "x_perm": AttributeProto.INTS,
    "y_perm": AttributeProto.INTS,
}
_UNCHECKED = "onnxfuse.deprecated"  # a domain that the checker does not know


def check(proto: ModelProto) -> None:
    """Raises BadInput for a model that no runtime could make sense of, though its parts are sound."""
    _check_imports(proto.opset_import)
    if not proto.graph.output:
        raise BadInput("has no outputs, so there is nothing to compute; export the model again")
    _check_nodes(proto.graph.node)


def check_nodes(proto: ModelProto) -> None:
    """onnx's checker on a skeleton. Raises BadInput where it does not accept it.

    It stops at the first operator that its version deprecates (GroupNormalization of 18 to 20), which runtimes still run. Those are
    checked by their schemas here, and the rest of the model as if they were of a domain that nobody knows.
    """
    try:
        onnx.checker.check_model(proto)
    except Exception as error:
        if "is deprecated in domain_version" not in str(error):
            raise _invalid(first_line(error)) from None
        _check_around_deprecated(proto)


def _check_around_deprecated(proto: ModelProto) -> None:
    version = max((entry.version for entry in proto.opset_import if entry.domain in _STANDARD), default=0)
    copy = ModelProto()
    copy.CopyFrom(proto)
    for node in _all(copy.graph.node):
        if node.domain in _STANDARD and onnx.defs.has(node.op_type, max_inclusive_version=version):
            schema = onnx.defs.get_schema(node.op_type, version)
            if schema.deprecated:
                _check_deprecated(node, schema)
                node.domain = _UNCHECKED
    copy.opset_import.add(domain=_UNCHECKED, version=1)
    try:
        onnx.checker.check_model(copy)
    except Exception as error:
        raise _invalid(first_line(error)) from None


def _check_deprecated(node: NodeProto, deprecated: onnx.defs.OpSchema) -> None:
    """Attributes of a deprecated operator, whose last schema says nothing of them, by the one before."""
    schema = onnx.defs.get_schema(node.op_type, deprecated.since_version - 1) if not deprecated.attributes else deprecated
    what = f"node {shown(node.name or node.op_type)}"
    for attribute in node.attribute:
        if attribute.name not in schema.attributes:
            raise _invalid(f"{what} has no attribute {shown(attribute.name)}")
        kind = int(schema.attributes[attribute.name].type.value)  # type: ignore[attr-defined]
        if attribute.type != kind:
            raise _invalid(f"attribute {shown(attribute.name)} of {what} is not of type {AttributeProto.AttributeType.Name(kind)}")
    given = {attribute.name for attribute in node.attribute}
    missing = [name for name, attribute in schema.attributes.items() if attribute.required and name not in given]
    if missing:
        raise _invalid(f"{what} lacks attribute {missing[0]}")
    if not schema.min_input <= len(node.input) <= schema.max_input:
        raise _invalid(f"{what} has {len(node.input)} inputs")


def _invalid(what: str) -> BadInput:
    return BadInput(f"not valid ONNX: {what}; export the model again")


def _all(nodes: Iterable[NodeProto]) -> Iterable[NodeProto]:
    for node in nodes:
        yield node
        for body in node_graphs(node):
            yield from _all(body.node)


def _check_imports(entries: Iterable[onnx.OperatorSetIdProto]) -> None:
    versions: dict[str, int] = {}
    for entry in entries:
        domain = "" if entry.domain in _STANDARD else entry.domain
        if versions.setdefault(domain, entry.version) != entry.version:
            which = f"domain {shown(domain)}" if domain else "the standard domain"
            raise BadInput(f"imports versions {versions[domain]} and {entry.version} of {which}; export the model again")


def _check_nodes(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        rule = _RULES.get(node.op_type) if node.domain in _STANDARD else _check_own if node.domain == DOMAIN else None
        fault = rule(node) if rule is not None else None
        if fault is not None:
            raise BadInput(f"node {shown(node.name or node.op_type)}: {fault}; export the model again")
        for body in node_graphs(node):
            _check_nodes(body.node)


def _check_own(node: NodeProto) -> str | None:
    for attribute in node.attribute:
        kind = _OWN_ATTRIBUTES.get(attribute.name)
        if attribute.type != kind:
            return f"attribute {shown(attribute.name)} is none of {DOMAIN}'s {shown(node.op_type)}, or of another type"
    return None


def _check_constant(node: NodeProto) -> str | None:
    count = len(node.attribute)
    return None if count == 1 else f"a Constant has {count} values instead of one"


def _bodies(node: NodeProto) -> dict[str, GraphProto]:
    return {attribute.name: attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH}


def _check_if(node: NodeProto) -> str | None:
    for name, body in _bodies(node).items():
        if len(body.output) != len(node.output):
            return f"{shown(name)} has {len(body.output)} outputs, the If {len(node.output)}"
    return None


def _check_loop(node: NodeProto) -> str | None:
    carried = max(0, len(node.input) - 2)
    for body in _bodies(node).values():
        if len(body.input) != carried + 2:
            return f"the body of the Loop has {len(body.input)} inputs instead of {carried + 2}"
        if len(body.output) != len(node.output) + 1 or len(node.output) < carried:
            return f"the body of the Loop has {len(body.output)} outputs, the Loop {len(node.output)}"
    return None


def _check_scan(node: NodeProto) -> str | None:
    scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
    if not 0 < scanned <= len(node.input):
        return f"the Scan has num_scan_inputs {scanned}"
    for body in _bodies(node).values():
        if len(node.input) - len(body.input) not in (0, 1):  # before version 9 the lengths of the sequences came first
            return f"the body of the Scan has {len(body.input)} inputs, the Scan {len(node.input)}"
        if len(body.output) != len(node.output) or len(body.output) < len(body.input) - scanned:
            return f"the body of the Scan has {len(body.output)} outputs, the Scan {len(node.output)}"
    return None


_RULES: dict[str, Callable[[NodeProto], str | None]] = {
    "Constant": _check_constant,
    "If": _check_if,
    "Loop": _check_loop,
    "Scan": _check_scan,
}
