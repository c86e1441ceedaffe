"""Makes of an onnxfuse model the bytes that TensorRT's parser is given.

An onnxfuse model carries every fused node twice: as a node and as the ONNX function that defines it. TensorRT 10.6
prefers the function even where the plugin is registered, later versions prefer the plugin, and every version keys
functions by op type alone, without the domain. So nothing is left to that choice: a node that is to be a plugin loses
its function and names its creator; every other onnxfuse node is replaced by its function's body.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import helper, inliner

from onnxfuse import plugins
from onnxfuse.engine import encoder
from onnxfuse.errors import BadInput, refusal
from onnxfuse.graph import attention, recurrence, rotary, tensors, weights
from onnxfuse.graph.model import DOMAIN
from onnxfuse.graph.names import shown
from onnxfuse.graph.wire import map_file

if TYPE_CHECKING:
    from onnxfuse.elementwise.compiling import Plan

NAMESPACE = "onnxfuse"
VERSION = "1"
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

# TensorRT gives a plugin its inputs without their places, so a node says whether an optional input that others may
# follow is there: attribute -> place.
OPTIONAL_INPUTS = {"SkipLayerNormalization": {"has_beta": 3}, **recurrence.OPTIONAL_INPUTS}
COUNTED_OUTPUTS = frozenset({"SkipLayerNormalization", "SkipRMSNormalization", "LSTMSequence", "GRUSequence", "Linear"})
# One function serves one op type, one creator all kinds of a GELU: op type -> creator, and the attribute that says the kind.
CREATORS: dict[str, tuple[str, dict[str, int | str]]] = {
    "BiasGeluTanh": ("BiasGelu", {"approximate": "tanh"}),
    "BiasQuickGelu": ("BiasGelu", {"approximate": "quick"}),
    "DepthwiseConvLayerNormLast": ("DepthwiseConvLayerNorm", {"channels_last": 1}),
    "FilmGroupNorm": ("GroupNormSilu", {"film": 1, "silu": 0}),
    "FilmGroupNormSilu": ("GroupNormSilu", {"film": 1}),
    "GroupNorm": ("GroupNormSilu", {"silu": 0}),
    "LayerNormPatchesCropped": ("LayerNormPatches", {}),
    "LayerNormPlanes": ("LayerNormPatches", {"channels_first": 1}),
    "LinearGeglu": ("Linear", {"activation": "gelu", "gated": 1}),
    "LinearGegluTanh": ("Linear", {"activation": "gelu_tanh", "gated": 1}),
    "LinearGelu": ("Linear", {"activation": "gelu"}),
    "LinearGeluTanh": ("Linear", {"activation": "gelu_tanh"}),
    "LinearLayerNorm": ("Linear", {"residual": 1, "norm": 1}),
    "LinearQuickGeglu": ("Linear", {"activation": "gelu_quick", "gated": 1}),
    "LinearQuickGelu": ("Linear", {"activation": "gelu_quick"}),
    "LinearReglu": ("Linear", {"activation": "relu", "gated": 1}),
    "LinearRelu": ("Linear", {"activation": "relu"}),
    "LinearResidual": ("Linear", {"residual": 1}),
    "LinearSilu": ("Linear", {"activation": "silu"}),
    "LinearSwiglu": ("Linear", {"activation": "silu", "gated": 1}),
    "PatchLinear": ("Linear", {}),
    **recurrence.CREATORS,
    **attention.CREATORS,
    **rotary.CREATORS,
    **{op_type: (encoder.STACK, {}) for op_type in encoder.KINDS},
}
# Its plugins' kernels are generated: each node carries its own.
GENERATED = "Elementwise"
# Creators whose plugins take float16 and bfloat16 alone: a node that stayed in float32 is spelled out again.
HALF_ALONE = frozenset({"Linear"})
# What the parser knows as a standard operator whatever version the model imports (its importers look at the name alone, in 10.0 and
# later): onnxfuse op type -> operator and attributes. The functions compute in float32 between casts, and TensorRT 10.6 then keeps a
# GELU out of the matmul's kernel before it (seen in ViT-S in half precision).
NATIVE: dict[str, tuple[str, dict[str, int | str]]] = {
    "LayerNormalization": ("LayerNormalization", {"axis": -1}),
    "Gelu": ("Gelu", {"approximate": "none"}),
    "GeluTanh": ("Gelu", {"approximate": "tanh"}),
}


_APART = "InFloat32"


def for_parser(
    path: Path,
    plugin_ops: frozenset[str],
    generated: Mapping[str, Plan] | None = None,
    points: Sequence[encoder.Point] = ({},),
    make: encoder.Compile | None = None,
    say: encoder.Say = lambda line: None,
) -> bytes:
    """The model at `path`, ready for TensorRT's parser, serialized.

    `plugin_ops` are the op types of domain onnxfuse that plugins will execute; with an empty set the result is the model
    without any onnxfuse operator. `generated` is what `elementwise.compiling.fit_all` made of the texts in `expressions_in`: an
    element-wise node that was cut becomes several; without it they are all replaced by their functions' bodies. With `make`, encoder
    layers get kernels for their shapes at `points`, which give shapes to inputs that have none of their own; `say` is told why some of them
    are left to TensorRT. External data are not
    read: the bytes refer to them as the file did, and the parser is told where the file is. Node names are kept, unnamed nodes get
    one, and the nodes of an inlined body are named after the node they stand for ("norm_3/ReduceMean"), so that TensorRT's layers can be
    led back to the model's nodes.

    Raises BadInput where the file is not an ONNX model, or where an onnxfuse node has neither plugin nor function.
    """
    model = read(path)
    encoders = encoder.STACK in {creator(op) for op in plugin_ops}
    shapes = encoder.shapes_at(model, path.parent, points) if encoders else {}
    for graph in _all_graphs(model):
        _make_native(graph.node)
        if encoders:
            encoder.merge(graph, path.parent, shapes, say)
        if make is not None:
            encoder.compile_for(graph, shapes, make)
    _set_float32_apart(model)
    called = {node.op_type for node in _nodes(model) if node.domain == DOMAIN}
    defined = {function.name for function in model.functions if function.domain == DOMAIN}
    made = {creator(op) for op in plugin_ops}
    # The encoder layers that are left are those that the plugin does not take.
    plugin_ops = frozenset(op_type for op_type in called if creator(op_type) in plugin_ops | made and op_type not in encoder.KINDS)
    if generated is None:
        plugin_ops = frozenset(op_type for op_type in plugin_ops if creator(op_type) != GENERATED)
    for op_type in sorted(called - defined - plugin_ops):
        raise BadInput(f"{path}: operator onnxfuse.{op_type} has no plugin and no function in the file; optimize the model again")
    inlined = sorted(called & defined - plugin_ops)
    if inlined:
        model = _inline(model, inlined)
    kept = [function for function in model.functions if function.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend(kept)
    for graph in _all_graphs(model):
        _name_nodes(graph.node)
    for graph in _all_graphs(model):
        _generate(graph, generated or {}, path)
    used = [node for node in _nodes(model) if node.domain == DOMAIN]
    read_somewhere = {name for graph in _all_graphs(model) for name in (*_read_by(graph.node), *(value.name for value in graph.output))}
    for node in used:
        _address(node, read_somewhere)
    if not used:
        _forget_domain(model)
    return bytes(model.SerializeToString())


def _set_float32_apart(model: onnx.ModelProto) -> None:
    """Gives the float32 nodes of HALF_ALONE an op type of their own, with the same function, that no plugin executes."""
    apart = set()
    for node in _nodes(model):
        if _is_apart(node):
            apart.add(node.op_type)
            node.op_type += _APART
    for function in [function for function in model.functions if function.domain == DOMAIN and function.name in apart]:
        copy = model.functions.add()
        copy.CopyFrom(function)
        copy.name += _APART


def _is_apart(node: onnx.NodeProto) -> bool:
    """Whether a node is one of float32 whose plugin takes halves alone."""
    half_alone = node.domain == DOMAIN and creator(node.op_type) in HALF_ALONE
    return half_alone and any(attribute.name == "dtype" and attribute.i == onnx.TensorProto.FLOAT for attribute in node.attribute)


def plugin_ops_in(path: Path, plugin_ops: frozenset[str], say: encoder.Say = lambda line: None) -> frozenset[str]:
    """The op types of the model at `path` that a creator among `plugin_ops` makes plugins for."""
    own = (node for node in _nodes(read(path)) if node.domain == DOMAIN and not _is_apart(node))
    known = [node for node in own if creator(node.op_type) in plugin_ops]
    wide = [node for node in known if node.op_type in encoder.KINDS and not encoder.executable(node)]
    if wide:
        say(f"encoder layers: their kernel takes float16 and bfloat16, and {len(wide)} are of another type: left to TensorRT")
    return frozenset(node.op_type for node in known if node not in wide)


def taken(ops: frozenset[str], sm: int, say: encoder.Say = lambda line: None) -> frozenset[str]:
    """Those of `ops` whose plugins run on this architecture: encoder layers have a kernel for sm_90 alone, and are TensorRT's elsewhere."""
    runs = ops if sm == encoder.SM else frozenset(op for op in ops if creator(op) != encoder.STACK)
    if runs != ops:
        say(f"encoder layers: their kernel is for sm_{encoder.SM}, and this is for sm_{sm}: left to TensorRT")
    return runs


def taken_in_half(model: Path, ops: frozenset[str], sm: int, say: encoder.Say = lambda line: None) -> frozenset[str]:
    """Those of `ops` whose plugins take the element types that `model` has there on this architecture."""
    oldest = {op.name: op.half_from for op in plugins.ops()}
    fused = [node for node in _nodes(read(model)) if node.domain == DOMAIN and node.op_type in ops]
    halves = {node.op_type for node in fused for attribute in node.attribute if attribute.name == "dtype" and attribute.i in _HALVES}
    missing = {op for op in halves if oldest.get(creator(op), 0) > sm}
    for name in sorted({creator(op) for op in missing}):
        say(f"{name}: its kernels take 16-bit types from sm_{oldest[name]} on, and this is for sm_{sm}: left to TensorRT")
    return ops - missing


def expressions_in(path: Path, plugin_ops: frozenset[str]) -> tuple[str, ...]:
    """The texts of all element-wise expressions in the model at `path`, each once; none where their plugin is not among `plugin_ops`.

    Raises BadInput, naming file and node, for a text that is no expression.
    """
    if GENERATED not in map(creator, plugin_ops):
        return ()
    from onnxfuse.elementwise.expression import parse

    found: dict[str, None] = {}
    for node in _nodes(read(path)):
        if node.domain == DOMAIN and creator(node.op_type) == GENERATED and (text := _expression(node)) not in found:
            parse(text, f"{path}: node {shown(node.name or node.op_type)}: attribute 'expression'")
            found[text] = None
    return tuple(found)


def creator(op_type: str) -> str:
    """The name of the creator that makes plugins for an op type of domain onnxfuse."""
    return _creation(op_type)[0]


def _creation(op_type: str) -> tuple[str, dict[str, int | str]]:
    """Creator, and the attributes that say which of its kinds an op type is."""
    if op_type.startswith(f"{GENERATED}_"):  # an operator for each expression
        return GENERATED, {}
    return CREATORS.get(op_type, (op_type, {}))


def _expression(node: onnx.NodeProto) -> str:
    texts = [attribute.s for attribute in node.attribute if attribute.name == "expression"]
    return texts[0].decode("utf-8", "replace") if texts else ""


def _generate(graph: onnx.GraphProto, generated: Mapping[str, Plan], path: Path) -> None:
    """Gives every element-wise node of a graph its machine code; where its expression was cut, a node for each part."""
    if not any(node.domain == DOMAIN and creator(node.op_type) == GENERATED for node in graph.node):
        return
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.domain == DOMAIN and creator(node.op_type) == GENERATED:
            plan = generated.get(_expression(node))
            if plan is None:  # of the body of another operator's function
                raise BadInput(f"{path}: node {shown(node.name)} has no kernels of its own; optimize the model again")
            nodes += _parts(node, plan, path)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _parts(node: onnx.NodeProto, plan: Plan, path: Path) -> Iterator[onnx.NodeProto]:
    from onnxfuse.elementwise import source

    whole = plan.expression
    if len(node.input) != len(whole.inputs) or len(node.output) != len(whole.outputs) or not all(node.input):
        raise BadInput(f"{path}: node {shown(node.name)} has not the inputs and outputs of its expression; optimize the model again")
    names = dict(enumerate(node.input))
    for number, (value, name) in enumerate(zip(whole.outputs, node.output, strict=True)):
        names[value] = name or f"{node.name}/unread_{number}"
    for number, part in enumerate(plan.parts):
        for value in part.makes:
            names.setdefault(value, f"{node.name}/part_{number}_{value}")
        yield helper.make_node(
            GENERATED,
            [names[value] for value in part.reads],
            [names[value] for value in part.makes],
            f"{node.name}/part_{number}" if len(plan.parts) > 1 else node.name,
            domain=DOMAIN,
            layout=source.layout(part.expression),
            code=base64.b64encode(part.generated.image),
        )


def _make_native(nodes: Sequence[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.domain == DOMAIN and node.op_type in NATIVE:
            node.domain = ""
            node.op_type, attributes = NATIVE[node.op_type]
            kept = [attribute for attribute in node.attribute if attribute.name == "epsilon"]
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())


def _read_by(nodes: Sequence[onnx.NodeProto]) -> Iterator[str]:
    for node in nodes:
        yield from node.input


def read(path: Path) -> onnx.ModelProto:
    """The model without its external data. BadInput where it is no ONNX model, or its data are missing or outside its folder."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(bytes(map_file(path)))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; give the path of an ONNX model") from None
    except OSError as error:
        raise BadInput(f"{path}: {refusal(error)}; give the path of an ONNX model") from None
    except Exception:
        raise BadInput(f"{path}: not an ONNX model; give a whole .onnx file") from None
    if not model.HasField("graph") or not model.ir_version:
        raise BadInput(f"{path}: not an ONNX model; give a whole .onnx file")
    for tensor in tensors.every(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            weights.check(tensor, path.parent, f"{path}: tensor {shown(tensor.name)}")
    return model


def _inline(model: onnx.ModelProto, op_types: Sequence[str]) -> onnx.ModelProto:
    calls = [
        (node.name or node.op_type, frozenset(node.input), tuple(filter(None, node.output)))
        for graph in _all_graphs(model)
        for node in graph.node
        if node.domain == DOMAIN and node.op_type in op_types
    ]
    model = inliner.inline_selected_functions(model, [(DOMAIN, op_type) for op_type in op_types])
    producers = {output: node for node in _nodes(model) for output in node.output if output}
    for name, inputs, outputs in calls:
        _name_body(name, inputs, outputs, producers)
    return model


def _name_body(name: str, inputs: frozenset[str], outputs: tuple[str, ...], producers: dict[str, onnx.NodeProto]) -> None:
    """Names the nodes between a former call's outputs and inputs after the call."""
    seen: set[str] = set()
    waiting = [output for output in outputs if output not in inputs]
    while waiting:
        node = producers.get(waiting.pop())
        if node is None or node.output[0] in seen:
            continue
        seen.add(node.output[0])
        node.name = f"{name}/{node.op_type}" if len(seen) == 1 else f"{name}/{node.op_type}_{len(seen)}"
        waiting.extend(source for source in node.input if source and source not in inputs)


def _name_nodes(nodes: Sequence[onnx.NodeProto]) -> None:
    for node in nodes:
        if not node.name:
            node.name = f"{node.op_type}:{next(filter(None, node.output), '')}"


def _address(node: onnx.NodeProto, read_somewhere: set[str]) -> None:
    """Tells TensorRT which creator makes this node's plugin, and which optional tensors the node has.

    A last output that nobody reads is dropped: the kernel need not write it.
    """
    optional = OPTIONAL_INPUTS.get(node.op_type, {})
    present = {name: int(len(node.input) > place and bool(node.input[place])) for name, place in optional.items()}
    inputs = [name for name in node.input if name]
    outputs = list(node.output)
    while node.op_type != GENERATED and len(outputs) > 1 and (not outputs[-1] or outputs[-1] not in read_somewhere):
        outputs.pop()
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(outputs)
    node.op_type, kind = _creation(node.op_type)
    extra: dict[str, int | str] = {"plugin_namespace": NAMESPACE, "plugin_version": VERSION, **present, **kind}
    if node.op_type in COUNTED_OUTPUTS:
        extra["outputs"] = len(outputs)
    kept = [attribute for attribute in node.attribute if attribute.name not in extra]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in extra.items())


def _forget_domain(model: onnx.ModelProto) -> None:
    kept = [opset for opset in model.opset_import if opset.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and every subgraph of it, depth first."""
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    waiting.append(attribute.g)
                elif attribute.type == onnx.AttributeProto.GRAPHS:
                    waiting.extend(attribute.graphs)


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in _all_graphs(model):
        yield from graph.node
