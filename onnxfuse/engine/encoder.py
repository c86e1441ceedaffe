"""Encoder layers for their plugin: consecutive ones become one node, with their weights as the kernel reads them.

    EncoderStack(x, weights, vectors, final?, mask?) -> y

weights [layers, elements] holds, for each layer, the matrices of Q, K and V side by side, of the projection and of the two products of the
feed-forward network, each as [K / 64, N / 8, 8, 8, 8] (chunk of k, tile of n, eighth of the chunk, n, k) with gamma of the norm before
it multiplied in. vectors [layers, elements], float32, holds three vectors for each of the four: bias with beta W, sums of columns, zeros
where a norm stands before the product; bias, gamma and beta of the sum that it is added to otherwise. final [2, width], float32: gamma and
beta of the norm behind the last layer. With first_norm, x is what a norm before the first
layer of a post-norm stack (of the embeddings) takes. plugins/EncoderLayer has the other side.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph import encoder
from onnxfuse.graph.encoder import INPUTS
from onnxfuse.graph.model import DOMAIN
from onnxfuse.graph.names import shown

Array = np.ndarray[Any, Any]

STACK = "EncoderStack"
NORM = "LayerNormalization"
# Op type -> pre-norm, activation as the kernel numbers it, and whether there is a mask.
KINDS = {
    encoder.op_type(before, activation, masked): (before, number, masked)
    for before in (False, True)
    for number, activation in enumerate(encoder.ACTIVATIONS)
    for masked in (False, True)
}
_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
SM = 90  # the architecture that the kernel is for, and no other
MOST_SEQUENCE = 512
MOST_ROWS = 8192  # of a batch, with sequences padded to 16
OPTIONS = ("--expt-relaxed-constexpr",)  # the kernel's source computes its plan when it is compiled
_TYPE_NAMES: dict[int, str] = {TensorProto.FLOAT16: "__half", TensorProto.BFLOAT16: "__nv_bfloat16"}
_ALIGNMENT = 256  # bytes between what the kernel reads with bulk copies


def executable(node: onnx.NodeProto) -> bool:
    """Whether the plugin takes this node: an encoder layer in a half type."""
    return node.domain == DOMAIN and node.op_type in KINDS and _attributes(node).get("dtype") in _TYPES


Shape = tuple[int, ...]
Point = Mapping[str, Sequence[int]]
"""A shape for each of the inputs that the engine is built for."""
Say = Callable[[str], None]
Compile = Callable[[str], bytes]
"""CUDA source to machine code."""


def shapes_at(model: onnx.ModelProto, folder: Path, points: Sequence[Point]) -> dict[str, list[Shape]]:
    """The shapes of the tensors that enter encoder layers, or a norm before them, where they can be told, at each of the points.

    What leads to them is computed by onnxruntime: ONNX's own inference does not see through the computing with shapes of exported models.
    """
    layers = [node for node in model.graph.node if executable(node)]
    wanted = dict.fromkeys(node.input[0] for node in layers)
    for node in layers:
        wanted.pop(node.output[0], None)
    found: dict[str, list[Shape]] = {}
    for name in wanted:
        part = _leading_to(model, name, folder)
        try:
            found[name] = [shape for point in points if (shape := _shape_of(part, point)) is not None]
        except Exception:  # onnxruntime's are of many kinds; the general kernel has to do then
            continue
    for node in layers:  # in their order: what a layer gives is shaped as what it takes
        if node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    for node in model.graph.node:
        if node.op_type == NORM and node.output[0] in found:
            found[node.input[0]] = found[node.output[0]]
    return found


def _leading_to(model: onnx.ModelProto, name: str, folder: Path) -> onnx.ModelProto:
    """A model of what computes a tensor, whose output is the tensor's shape."""
    makers = {output: node for node in model.graph.node for output in node.output}
    read, waiting, chosen = {name}, [name], set[int]()
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or id(node) in chosen:
            continue
        chosen.add(id(node))
        read.update((*node.input, *_captured(node)))
        waiting.extend((*node.input, *_captured(node)))
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    part.graph.name = "leading"
    part.graph.node.extend(node for node in model.graph.node if id(node) in chosen)
    part.graph.node.append(helper.make_node("Shape", [name], ["shape of it"]))
    part.graph.input.extend(value for value in model.graph.input if value.name in read)
    for tensor in model.graph.initializer:
        if tensor.name in read:
            part.graph.initializer.append(numpy_helper.from_array(_values(tensor, folder), tensor.name))
    part.graph.output.append(helper.make_tensor_value_info("shape of it", TensorProto.INT64, [None]))
    return part


def _shape_of(part: onnx.ModelProto, point: Point) -> Shape | None:
    """What a model of `_leading_to` says for inputs of these shapes; None where it is no [batch, sequence, width]."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(part.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    held = {tensor.name for tensor in part.graph.initializer}
    feeds = {}
    for value in part.graph.input:
        if value.name not in held:
            own = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feeds[value.name] = np.zeros(tuple(point.get(value.name, own)), kind)
    (shape,) = session.run(None, feeds)
    return tuple(map(int, shape)) if len(shape) == 3 and min(shape) > 0 else None


def fits(shape: Shape) -> bool:
    """Whether the kernel takes this many tokens."""
    batch, sequence = shape[:2]
    return sequence <= MOST_SEQUENCE and batch * -(-sequence // 16) * 16 <= MOST_ROWS


def compile_for(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[Shape]], make: Compile) -> None:
    """Gives the stacks of a graph kernels for the known shapes of what enters them."""
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        known = list(dict.fromkeys(shapes.get(node.input[0], ()))) if node.op_type == STACK and node.domain == DOMAIN else []
        if known:
            attributes = _attributes(node)
            text = source(kinds[node.input[1]], attributes["inner"], attributes["heads"], known)
            names = ",".join(f"{batch}x{sequence}" for batch, sequence, _ in known)
            node.attribute.append(helper.make_attribute("shapes", names))
            node.attribute.append(helper.make_attribute("code", base64.b64encode(make(text))))


def compiled(text: str) -> bytes:
    """The machine code of what `source` gives. MissingHere without a compiler."""
    from onnxfuse import plugins

    return plugins.compile_source(text, "EncoderLayer", SM, options=OPTIONS).image


def source(kind: int, inner: int, heads: int, shapes: Sequence[Shape]) -> str:
    """CUDA source of a kernel for each shape [batch, sequence, width] of x. plan.h says what GPU it is for."""
    kernels = "".join(
        f"""
extern "C" __global__ void __launch_bounds__(kThreads, 1) encode_{batch}x{sequence}(__grid_constant__ Args<{_TYPE_NAMES[kind]}> const args)
{{
    constexpr int cluster = cluster_for({batch}, {sequence}, {width}, {inner}), clusters = compiled_clusters(cluster);
    run_encoder<{_TYPE_NAMES[kind]}, FixedShape<{batch}, {sequence}, {width}, {inner}, {heads}, cluster, clusters, kCompiledShared>>(args);
}}
"""
        for batch, sequence, width in shapes
    )
    return f'#include "EncoderLayer/encoder.cuh"\n\nnamespace onnxfuse::encoder\n{{{kernels}}}\n'


def merge(graph: onnx.GraphProto, folder: Path, shapes: Mapping[str, Sequence[Shape]], say: Say = lambda line: None) -> None:
    """Replaces the encoder layers of a graph that the plugin takes, in place; `say` is told why others are left to TensorRT. `shapes` are
    those of what enters them; the plugin refuses too many tokens when the engine is built, so those must be known."""
    held = {tensor.name: tensor for tensor in graph.initializer}
    given = {value.name for value in graph.input}
    layers = []
    for node in graph.node:
        if executable(node) and all(name in held and name not in given for name in node.input[1:17]):
            layers.append(node)
        elif executable(node):
            say(f"{_shown(node)}: its weights are computed at run time: left to TensorRT")
    if not layers:
        return
    chains = []
    for chain in _chains(layers, graph):
        known = shapes.get(chain[0].input[0], ())
        beyond = [shape for shape in known if not fits(shape)]
        if known and not beyond:
            chains.append(chain)
            continue
        why = f"more tokens than the kernel takes, {list(beyond[0])}" if beyond else f"the shape of '{chain[0].input[0]}' cannot be told"
        say(f"{_shown(chain[0])}: {why}: left to TensorRT")
    constants = held.keys() - given
    makers, reads = {output: node for node in graph.node for output in node.output}, _reads(graph)
    norms = [_norm_before(chain[0], makers, reads, constants) for chain in chains]
    stacks = {chain[-1].output[0]: _stack(chain, norm, held, graph, folder) for chain, norm in zip(chains, norms, strict=True)}
    replaced = [node for chain, norm in zip(chains, norms, strict=True) for node in (*chain, *([norm] if norm is not None else []))]
    gone = {id(node) for node in replaced}
    nodes = []
    for node in graph.node:
        if id(node) not in gone:
            nodes.append(node)
        elif node.output[0] in stacks:
            nodes.append(stacks[node.output[0]])
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    _drop_unread(graph, {name for node in replaced for name in node.input[1:17]})


def _shown(node: onnx.NodeProto) -> str:
    return f"encoder layer {shown(node.name or node.output[0])}"


def _reads(graph: onnx.GraphProto) -> dict[str, int]:
    """How often each tensor is read; a graph output is read once."""
    reads: dict[str, int] = {value.name: 1 for value in graph.output}
    for node in graph.node:
        for name in (*node.input, *_captured(node)):
            reads[name] = reads.get(name, 0) + 1
    return reads


def _norm_before(
    layer: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], reads: Mapping[str, int], constants: set[str]
) -> onnx.NodeProto | None:
    """The norm that makes what enters a post-norm stack, where nobody else reads it and the kernel computes it the same way."""
    norm, x = makers.get(layer.input[0]), layer.input[0]
    if norm is None or norm.op_type != NORM or norm.domain or KINDS[layer.op_type][0] or reads[x] != 1:
        return None
    attributes = _attributes(norm)
    of_layer = (attributes.get("epsilon", 1e-5), attributes.get("axis", -1) in (-1, 2), attributes.get("stash_type", 1))
    if of_layer != (_attributes(layer)["epsilon"], True, 1) or len(norm.output) != 1 or len(norm.input) != 3:
        return None
    return norm if constants.issuperset(norm.input[1:]) else None


def _chains(layers: Sequence[onnx.NodeProto], graph: onnx.GraphProto) -> list[list[onnx.NodeProto]]:
    """Layers that follow each other, with nobody else reading what is between them."""
    reads = _reads(graph)
    by_input = {node.input[0]: node for node in layers}
    follows = {id(by_input[node.output[0]]) for node in layers if _continues(node, by_input.get(node.output[0]), reads)}
    chains = []
    for node in layers:
        if id(node) in follows:
            continue
        chain = [node]
        while _continues(chain[-1], by_input.get(chain[-1].output[0]), reads):
            chain.append(by_input[chain[-1].output[0]])
        chains.append(chain)
    return chains


def _continues(node: onnx.NodeProto, after: onnx.NodeProto | None, reads: Mapping[str, int]) -> bool:
    return (
        after is not None
        and reads[node.output[0]] == 1
        and after.op_type == node.op_type
        and list(after.input[17:]) == list(node.input[17:])
        and _attributes(after) == _attributes(node)
        and after.input[0] == node.output[0]
    )


def _captured(node: onnx.NodeProto) -> list[str]:
    """Names that the bodies of a node read."""
    names: list[str] = []
    for attribute in node.attribute:
        for body in (*([attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else []), *attribute.graphs):
            names.extend(value.name for value in body.output)
            for inner in body.node:
                names.extend((*inner.input, *_captured(inner)))
    return names


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _stack(
    chain: Sequence[onnx.NodeProto], norm: onnx.NodeProto | None, held: Mapping[str, TensorProto], graph: onnx.GraphProto, folder: Path
) -> onnx.NodeProto:
    before, activation, masked = KINDS[chain[0].op_type]
    attributes = _attributes(chain[0])
    kind = int(attributes["dtype"])
    layers = [{name: _values(held[node.input[i]], folder) for i, name in enumerate(INPUTS[1:17], start=1)} for node in chain]
    first = None if norm is None else (_values(held[norm.input[1]], folder), _values(held[norm.input[2]], folder))
    weights, vectors = [], []
    for i, layer in enumerate(layers):
        if before:
            entering: tuple[Array, Array] | None = (layer["gamma1"], layer["beta1"])
            inside = (layer["gamma2"], layer["beta2"])
        else:
            entering = (layers[i - 1]["gamma2"], layers[i - 1]["beta2"]) if i else first
            inside = (layer["gamma1"], layer["beta1"])
        packed = pack_layer(layer, entering, inside, before, helper.tensor_dtype_to_np_dtype(kind))
        weights.append(packed[0])
        vectors.append(packed[1])
    name = chain[0].name or chain[0].output[0]
    inputs = [chain[0].input[0] if norm is None else norm.input[0]]
    for stem, values in (("weights", np.stack(weights)), ("vectors", np.stack(vectors))):
        inputs.append(_initializer(graph, f"{name}/{stem}", values, kind if stem == "weights" else TensorProto.FLOAT))
    if not before:
        final = np.stack([layers[-1]["gamma2"], layers[-1]["beta2"]]).astype(np.float32)
        inputs.append(_initializer(graph, f"{name}/final", final, TensorProto.FLOAT))
    inputs.extend(chain[0].input[17:])
    return helper.make_node(
        STACK,
        inputs,
        [chain[-1].output[0]],
        name=name,
        domain=DOMAIN,
        heads=int(attributes["grouped"][2]),
        inner=int(layers[0]["w1"].shape[1]),
        pre_norm=int(before),
        first_norm=int(before or norm is not None),
        activation=activation,
        has_mask=int(masked),
        epsilon=float(attributes["epsilon"]),
        scale=float(attributes["scale"]),
    )


def pack_layer(
    layer: Mapping[str, Array], entering: tuple[Array, Array] | None, inside: tuple[Array, Array], before: bool, kind: Any
) -> tuple[Array, Array]:
    """Weights in `kind` and vectors in float32 of one layer, as the kernel reads them.

    `layer` has the parameters by their names in graph.encoder.INPUTS, matrices [K, N]. `entering`: gamma and beta of the norm whose result
    (or, in pre-norm, whose argument) enters the layer, None where x is taken as it is; `inside`: of the norm within it.
    """
    qkv, bias = (np.concatenate([layer[f"{part_}{role}"] for role in "qkv"], axis=-1) for part_ in "wb")
    parts = (
        _behind_norm(qkv, bias, entering, kind),
        _before_sum(layer["wo"], layer["bo"], None if before else entering, kind),
        _behind_norm(layer["w1"], layer["b1"], inside, kind),
        _before_sum(layer["w2"], layer["b2"], None if before else inside, kind),
    )
    return _side_by_side([_tiled(matrix) for matrix, _ in parts], kind), _side_by_side([vectors for _, vectors in parts], np.float32)


def _behind_norm(weight: Array, bias: Array, norm: tuple[Array, Array] | None, kind: Any) -> tuple[Array, Array]:
    """A product whose argument is normalised, or is not (None)."""
    if norm is None:
        return weight.astype(kind), np.stack([bias.astype(np.float32), *np.zeros((2, bias.size), np.float32)])
    gamma, beta = (part.astype(np.float64) for part in norm)
    wide = weight.astype(np.float64)
    folded = (wide * gamma[:, None]).astype(kind)
    sums = folded.astype(np.float64).sum(axis=0)  # of what the kernel multiplies with, not of what was rounded
    return folded, np.stack([bias + beta @ wide, sums, np.zeros_like(sums)]).astype(np.float32)


def _before_sum(weight: Array, bias: Array, norm: tuple[Array, Array] | None, kind: Any) -> tuple[Array, Array]:
    """A product that is added to a normalised tensor, or to one as it is (None)."""
    gamma, beta = norm if norm is not None else (np.ones_like(bias), np.zeros_like(bias))
    return weight.astype(kind), np.stack([bias, gamma, beta]).astype(np.float32)


def _tiled(matrix: Array) -> Array:
    """[K, N] as [K / 64, N / 8, 8, 8, 8]: chunk of k, tile of n, eighth of the chunk, n, k."""
    k, n = matrix.shape
    tiled: Array = matrix.reshape(k // 64, 8, 8, n // 8, 8).transpose(0, 3, 1, 4, 2)
    return tiled


def _side_by_side(parts: Sequence[Array], kind: Any) -> Array:
    """One row of all of them, each at a multiple of the alignment."""
    step = _ALIGNMENT // np.dtype(kind).itemsize
    sizes = [-(-part.size // step) * step for part in parts]
    row = np.zeros(sum(sizes), kind)
    at = 0
    for part, size in zip(parts, sizes, strict=True):
        row[at : at + part.size] = part.reshape(-1)
        at += size
    return row


def _values(tensor: TensorProto, folder: Path) -> Array:
    return np.asarray(numpy_helper.to_array(tensor, str(folder)))


def _initializer(graph: onnx.GraphProto, name: str, values: Array, kind: int) -> str:
    held = {tensor.name for tensor in graph.initializer}
    while name in held:
        name += "_"
    graph.initializer.append(helper.make_tensor(name, kind, values.shape, np.ascontiguousarray(values).tobytes(), raw=True))
    return name


def _drop_unread(graph: onnx.GraphProto, names: set[str]) -> None:
    read = {name for node in graph.node for name in (*node.input, *_captured(node))} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name not in names or tensor.name in read]
    kept = [TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
    del graph.initializer[:]
    graph.initializer.extend(kept)
