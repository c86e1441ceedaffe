"""encoder_layer: a layer of a transformer encoder becomes one node; consecutive ones run in one launch.

    attention(h) = softmax(scale Q K^T + mask) V        Q, K, V = h Wq + bq, h Wk + bk, h Wv + bv, split into heads
    post-norm    m = LN(x + attention(x) Wo + bo)            y = LN(m + act(m W1 + b1) W2 + b2)
    pre-norm     m = x + attention(LN(x)) Wo + bo            y = m + act(LN(m) W1 + b1) W2 + b2

When it wins: few tokens (1 to 512 a call), where a layer is seven short kernels that wait for each other: one persistent kernel streams
the weights while its blocks wait. Above, TensorRT's own kernels fill the GPU. Source: "Attention Is All You Need", 2017 (post-norm); "On
Layer Normalization in the Transformer Architecture", 2020 (pre-norm).
"""

from __future__ import annotations

import math
from itertools import product as every

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _folding, _norms, gelu, layernorm
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, canonical, const, either, op, part, tensor
from onnxfuse.graph import query
from onnxfuse.graph.encoder import ACTIVATIONS, INPUTS, op_type
from onnxfuse.graph.model import Model

OLDEST = 13  # operator set: Softmax along one axis, Split with its widths as input
WIDEST, LONGEST, MOST_INNER = 1024, 512, 4  # width, sequence, width of the feed-forward network in widths
HEAD_SIZES = (32, 64, 128)
# Queries, keys and values: three products; parts of one, each split into heads (qkv_pack); one that is split into [3, heads, size] as a
# whole, turned to [3, batch, heads, sequence, size], and taken apart (timm).
APART, SPLIT, STACKED = FORMS = ("apart", "split", "stacked")


def _linear(x: Pattern, role: str) -> Pattern:
    product = op("MatMul", x, const(f"{role}_weight"), out=f"{role}_product")
    summed = either(op("Add", product, const(f"{role}_bias")), product)
    return either(op("Mul", summed, const(f"{role}_gain")), summed)


def _scaled(of: Pattern, role: str) -> Pattern:
    return either(op("Mul", of, const(f"{role}_factor")), op("Div", of, const(f"{role}_divisor")), of)


def _attention(h: Pattern, form: str) -> Pattern:
    joined = _plain(h, "qkv")
    stacked = op("Transpose", op("Reshape", joined, tensor("qkv_shape"), out="qkv_grouped"), out="qkv_turned")

    def heads(place: int, role: str) -> Pattern:
        if form == STACKED:
            one = either(op("Slice", stacked, rest=True), part("Split", stacked))
            taken = op("Squeeze", one, const(f"{role}_axes"), out=f"{role}_heads")
            return either(op("Gather", stacked, const(f"{role}_place"), out=f"{role}_heads"), taken)
        rows = op("Split", joined, rest=True, place=place) if form == SPLIT else _plain(h, role)
        return op("Transpose", op("Reshape", rows, tensor(f"{role}_shape"), out=f"{role}_grouped"), out=f"{role}_heads")

    keys = heads(1, "k")
    flat = op("Transpose", op("Reshape", keys, tensor("k_flat_shape"), out="k_flat"), out="k_flat_turned")
    keys = either(op("Reshape", flat, tensor("k_raised_shape"), out="k_raised"), op("Transpose", keys, out="k_turned"), keys)
    scores = _scaled(op("MatMul", _scaled(heads(0, "q"), "q"), _scaled(keys, "k"), out="scores"), "scores")
    masked = either(op("Add", scores, tensor("mask")), scores)
    context = op("MatMul", op("Softmax", masked, out="weights"), heads(2, "v"))
    return op("Reshape", op("Transpose", context, out="context"), tensor("merged_shape"), out="merged")


def _plain(x: Pattern, role: str) -> Pattern:
    product = op("MatMul", x, const(f"{role}_weight"), out=f"{role}_product")
    return either(op("Add", product, const(f"{role}_bias")), product)


def _norm(x: Pattern, number: int) -> Pattern:
    return canonical("LayerNormalization", x, const(f"gamma{number}"), const(f"beta{number}"), out=f"norm{number}")


def _activated(x: Pattern) -> Pattern:
    return either(canonical("Gelu", x, out="Gelu"), canonical("GeluTanh", x, out="GeluTanh"), op("Relu", x, out="Relu"))


def _post_norm(form: str) -> Pattern:
    x = tensor("x")
    middle = _norm(op("Add", _linear(_attention(x, form), "o"), x, out="middle"), 1)
    inner = _activated(_linear(middle, "inner"))
    return _norm(op("Add", _linear(inner, "outer"), middle, out="last"), 2)


def _pre_norm(form: str) -> Pattern:
    x = tensor("x")
    middle = op("Add", _linear(_attention(_norm(x, 1), form), "o"), x, out="middle")
    inner = _activated(_linear(_norm(middle, 2), "inner"))
    return op("Add", _linear(inner, "outer"), middle, out="last")


class EncoderLayer(Fusion):
    name = "encoder_layer"
    kind = "fused"
    needs = ("layernorm", "gelu")
    architectures = (90,)
    dtypes = ("float16", "bfloat16")
    patterns = tuple(layer(form) for layer in (_post_norm, _pre_norm) for form in FORMS)

    def check(self, match: Match, model: Model) -> Refusal | None:
        if model.opset < OLDEST:
            return Refusal(f"needs operator set {OLDEST}; this model's is", model.opset)
        x = match["x"]
        refusal = _norms.refuse_type(x)
        if refusal:
            return refusal
        if query.rank(x) != 3:
            return Refusal(f"'{x.name}' is not [batch, sequence, width]", query.shape(x))
        return _refuse_sizes(match) or _refuse_parameters(match) or _refuse_heads(match) or _refuse_norms(match) or _refuse_mask(match)

    def variant(self, match: Match) -> str:
        return "pre-norm" if _before(match) else "post-norm"

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x = match["x"]
        inputs = [x]
        for role in ("q", "k", "v", "o"):
            inputs += _parameters(match, role, new)
        inputs += [_vector(match, name, new) for name in ("gamma1", "beta1")]
        for role in ("inner", "outer"):
            inputs += _parameters(match, role, new)
        inputs += [_vector(match, name, new) for name in ("gamma2", "beta2")]
        masked = "mask" in match.tensors
        if masked:
            inputs.append(match["mask"])
        heads, size = _heads(match)
        attrs = {
            "grouped": [0, 0, heads, size],
            "scale": _scale(match),
            "epsilon": float(match.node("norm1").attrs.get("epsilon", 1e-5)),
            "dtype": _norms.element_type(x),
        }
        kind = op_type(_before(match), _activation(match), masked)
        return new.node(kind, inputs, [_norms.settle(match, x)], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        kinds = every((False, True), ACTIVATIONS, (False, True))
        return tuple(_function(opset, before, activation, masked) for before, activation, masked in kinds) if opset >= OLDEST else ()


def _function(opset: int, before: bool, activation: str, masked: bool) -> onnx.FunctionProto:
    def norm(x: str, number: int, y: str) -> str:
        given = frozenset({x, y, f"gamma{number}", f"beta{number}"})
        return _bodies.scoped(layernorm.statements(opset, x, f"gamma{number}", f"beta{number}", y), f"norm{number}_", given)

    def linear(x: str, weight: str, bias: str, y: str) -> str:
        return f"{y}_product = MatMul ({x}, {weight}) {y} = Add ({y}_product, {bias})"

    h = "normed" if before else "x"
    if activation == "Relu":
        activated = "active = Relu (wide_inner)"
    else:
        kind = next(kind for kind in gelu.KINDS.values() if kind.op == activation)
        activated = _bodies.scoped(kind.statements(opset, "wide_inner", "active"), "gelu_", frozenset({"wide_inner", "active"}))
    body = f"""
        {norm("x", 1, "normed") if before else ""}
        {linear(h, "wq", "bq", "q")}
        {linear(h, "wk", "bk", "k")}
        {linear(h, "wv", "bv", "v")}
        by_heads = Constant <value_ints: ints = @grouped> ()
        q_grouped = Reshape (q, by_heads)
        k_grouped = Reshape (k, by_heads)
        v_grouped = Reshape (v, by_heads)
        q_heads = Transpose <perm = [0, 2, 1, 3]> (q_grouped)
        k_heads = Transpose <perm = [0, 2, 3, 1]> (k_grouped)
        v_heads = Transpose <perm = [0, 2, 1, 3]> (v_grouped)
        wide_scale = Constant <value_float: float = @scale> ()
        score_scale = Cast <to: int = @dtype> (wide_scale)
        scores = MatMul (q_heads, k_heads)
        scaled = Mul (scores, score_scale)
        {"met = Add (scaled, mask)" if masked else "met = Identity (scaled)"}
        weights = Softmax <axis = -1> (met)
        context_heads = MatMul (weights, v_heads)
        context = Transpose <perm = [0, 2, 1, 3]> (context_heads)
        side_by_side = Constant <value = int64[3] {{0, 0, -1}}> ()
        merged = Reshape (context, side_by_side)
        {linear("merged", "wo", "bo", "projected")}
        middle_sum = Add (projected, x)
        {norm("middle_sum", 2 if before else 1, "middle")}
        {linear("middle", "w1", "b1", "wide_inner")}
        {activated}
        {linear("active", "w2", "b2", "narrow")}
        {"y = Add (narrow, middle_sum)" if before else f"last_sum = Add (narrow, middle) {norm('last_sum', 2, 'y')}"}
    """
    inputs = INPUTS if masked else INPUTS[:-1]
    name = op_type(before, activation, masked)
    return _bodies.define(opset, f"{name} <grouped, scale, epsilon, dtype> ({', '.join(inputs)}) => (y) {{ {body} }}")


def _before(match: Match) -> bool:
    return bool(match.root.op == "Add")


def _activation(match: Match) -> str:
    found = next(name for name in ACTIVATIONS if name in match.tensors)
    return "GeluTanh" if found == "Gelu" and gelu.variant_of(match.node(found)) == "tanh" else found


def _packed(match: Match) -> bool:
    return "qkv_weight" in match.tensors


def _stacked(match: Match) -> bool:
    return "qkv_grouped" in match.tensors


def _width(match: Match) -> int:
    return int((query.shape(match["x"]) or [0])[-1] or 0)


def _inner(match: Match) -> int:
    return int((query.shape(match["inner_weight"]) or [0, 0])[-1] or 0)


def _heads(match: Match) -> tuple[int, int]:
    shape = query.shape(match["qkv_grouped" if _stacked(match) else "q_grouped"]) or [0, 0]
    return int(shape[-2] or 0), int(shape[-1] or 0)


def _refuse_sizes(match: Match) -> Refusal | None:
    shape = query.shape(match["x"]) or []
    width, inner = shape[-1], (query.shape(match["inner_weight"]) or [None])[-1]
    if not isinstance(width, int) or width % 64 or not 64 <= width <= WIDEST:
        return Refusal(f"width is no multiple of 64 up to {WIDEST}", width)
    if not isinstance(inner, int) or inner % 64 or not 64 <= inner <= MOST_INNER * width:
        return Refusal(f"width of the feed-forward network is no multiple of 64 up to {MOST_INNER} times {width}", inner)
    if isinstance(shape[1], int) and shape[1] > LONGEST:
        return Refusal(f"sequence is longer than {LONGEST}", shape[1])
    return None


def _refuse_parameters(match: Match) -> Refusal | None:
    width, inner = _width(match), _inner(match)
    columns = {"q": width, "k": width, "v": width, "o": width, "inner": inner, "outer": width, "qkv": 3 * width}
    rows = {"outer": inner}
    kind = _norms.element_type(match["x"])
    for role in (("qkv",) if _packed(match) else ("q", "k", "v")) + ("o", "inner", "outer"):
        weight = match[f"{role}_weight"]
        wanted = [rows.get(role, width), columns[role]]
        if query.shape(weight) != wanted:
            return Refusal(f"weight '{weight.name}' is not {wanted}", query.shape(weight))
        for name in (f"{role}_bias", f"{role}_gain"):
            vector = match.get(name)
            if vector is None:
                continue
            refusal = _folding.refuse_parameter(vector, name)
            if refusal:
                return refusal
            size = query.shape(vector) or []
            if len(size) > 3 or [d for d in size if d != 1] not in ([], [columns[role]]) or (size and size[-1] not in (1, columns[role])):
                return Refusal(f"'{vector.name}' of shape {size} is not one value for each of the columns", columns[role])
        for name in ("weight", "bias", "gain"):
            given = match.get(f"{role}_{name}")
            if given is not None and _norms.element_type(given) != kind:
                return Refusal(f"'{given.name}' is of another type than '{match['x'].name}'")
    return None


def _refuse_heads(match: Match) -> Refusal | None:
    width = _width(match)
    heads, size = _heads(match)
    if heads * size != width or size not in HEAD_SIZES:
        return Refusal(f"heads are not of {', '.join(map(str, HEAD_SIZES))} that make up the width", size)
    refusal = (_refuse_stacked if _stacked(match) else _refuse_turned)(match)
    if refusal:
        return refusal
    if match.node("weights").attrs.get("axis", -1) not in (-1, 3):
        return Refusal("the softmax is not over the keys (axis)", match.node("weights").attrs["axis"])
    if _perm(match, "context") != [0, 2, 1, 3]:
        return Refusal("the context is turned in another way", _perm(match, "context"))
    context, merged = query.shape(match["context"]), query.shape(match["merged"])
    if context is None or merged is None or None in context or merged != [*context[:2], width]:
        return Refusal(f"'{match['merged'].name}' is not proved to put the heads side by side", f"{context} and {merged}")
    for name in ("q", "k", "scores"):
        for part_ in ("factor", "divisor"):
            value = match.get(f"{name}_{part_}")
            if value is not None and query.scalar(value) is None:
                return Refusal(f"the scale '{value.name}' is not one value", query.shape(value))
    return None if math.isfinite(_scale(match)) else Refusal("the scale of the scores is", _scale(match))


def _refuse_turned(match: Match) -> Refusal | None:
    """Queries, keys and values that are split into heads and turned one by one."""
    if _packed(match):
        split = match.node("q_grouped").inputs[0].inputs[0]
        places = [match.node(f"{role}_grouped").inputs[0] for role in "qkv"]
        rank = query.rank(split.inputs[0]) or 0
        if split.attrs.get("axis", 0) not in (-1, rank - 1) or any((query.shape(value) or [0])[-1] != _width(match) for value in places):
            return Refusal("queries, keys and values are not three equal parts of one product", split.name)
    for role in "qkv":
        refusal = _refuse_grouped(match, role, [*_heads(match)])
        if refusal:
            return refusal
    perms = [_perm(match, f"{role}_heads") for role in "qkv"]
    keys = _keys(match, perms[1])
    if isinstance(keys, Refusal):
        return keys
    if perms[0] != [0, 2, 1, 3] or perms[2] != [0, 2, 1, 3] or keys != [0, 2, 3, 1]:
        return Refusal("queries, keys or values are turned in another way", ", ".join(map(str, (perms[0], keys, perms[2]))))
    return None


def _refuse_stacked(match: Match) -> Refusal | None:
    """Queries, keys and values that are split into heads and turned together."""
    refusal = _refuse_grouped(match, "qkv", [3, *_heads(match)])
    if refusal:
        return refusal
    if _perm(match, "qkv_turned") != [2, 0, 3, 1, 4]:
        return Refusal("queries, keys and values are turned in another way", _perm(match, "qkv_turned"))
    places = [_place(match.node(f"{role}_heads")) for role in "qkv"]
    if places != [0, 1, 2]:
        return Refusal("queries, keys and values are not the first, second and third of three", places)
    keys = _keys(match, [0, 2, 1, 3])
    if isinstance(keys, Refusal):
        return keys
    return None if keys == [0, 2, 3, 1] else Refusal("keys are turned in another way", keys)


def _refuse_grouped(match: Match, role: str, parts: list[int]) -> Refusal | None:
    grouped = match[f"{role}_grouped"]
    before, after = query.shape(match.node(f"{role}_grouped").inputs[0]), query.shape(grouped)
    if before is None or None in before or after != [*before[:-1], *parts]:
        return Refusal(f"'{grouped.name}' is not proved to split the width into heads", f"{before} and {after}")
    return None


def _keys(match: Match, heads: list[int]) -> list[int] | Refusal:
    """Of which axes of [batch, sequence, heads, size] the keys in the product of the scores are; `heads`: those after the first turn."""
    turned = [0, 1, 2, 3]
    if "k_turned" in match.tensors:
        turned = _perm(match, "k_turned")
    elif "k_raised" in match.tensors:
        if not _turns_flat(match):
            shapes = [query.shape(match[name]) for name in ("k_flat", "k_raised")]
            return Refusal(f"'{match['k_raised'].name}' is not proved to turn keys alone", f"{shapes[0]} and {shapes[1]}")
        turned = [0, 1, 3, 2]
    return [heads[i] for i in turned] if len(turned) == len(heads) else turned


def _turns_flat(match: Match) -> bool:
    """[batch, heads, S, D] -> [batch heads, S, D] -> [batch heads, D, S] -> [batch, heads, D, S]: the exporter of traced programs."""
    before, flat = query.shape(match.node("k_flat").inputs[0]), query.shape(match["k_flat"])
    if before is None or flat is None or None in before or len(before) != 4 or len(flat) != 3 or flat[1:] != before[2:]:
        return False
    return _perm(match, "k_flat_turned") == [0, 2, 1] and query.shape(match["k_raised"]) == [*before[:2], before[3], before[2]]


def _perm(match: Match, name: str) -> list[int]:
    return list(match.node(name).attrs.get("perm") or ())


def _place(node: gs.Node) -> int | None:
    """Which of three along the first axis a node takes: a Gather, or the Squeeze of a Slice or of a part of a Split."""
    if node.op == "Gather":
        place = query.constant(node.inputs[1])
        if place is None or place.ndim != 0 or node.attrs.get("axis", 0) not in (0, -5) or not -3 <= int(place) < 3:
            return None
        return range(3)[int(place)]
    value, axes = node.inputs
    if _numbers(axes) != [0]:
        return None
    source = value.inputs[0]
    if source.op == "Split":
        thirds = source.attrs.get("axis", 0) in (0, -5) and len(source.outputs) == 3
        return next(i for i, output in enumerate(source.outputs) if output is value) if thirds else None
    if len(source.inputs) < 4:
        return None
    start, end, along, *step = map(_numbers, source.inputs[1:])
    if along not in ([0], [-5]) or step not in ([], [[1]]) or not start or not end:
        return None
    taken = range(3)[start[0] : end[0]]
    return taken[0] if len(taken) == 1 else None


def _numbers(value: gs.Tensor) -> list[int] | None:
    found = query.constant(value)
    return None if found is None or found.ndim != 1 else [int(number) for number in found]


def _refuse_norms(match: Match) -> Refusal | None:
    width = _width(match)
    attrs = [match.node(f"norm{number}").attrs for number in (1, 2)]
    for found in attrs:
        if found.get("axis", -1) not in (-1, 2) or found.get("stash_type", 1) != 1:
            return Refusal("a norm is not over the last axis, or not in float32", found.get("axis", -1))
    if attrs[0].get("epsilon", 1e-5) != attrs[1].get("epsilon", 1e-5):
        return Refusal("the norms have different epsilon", f"{attrs[0].get('epsilon', 1e-5)} and {attrs[1].get('epsilon', 1e-5)}")
    refusal = _norms.refuse_epsilon(attrs[0])
    if refusal:
        return refusal
    for name in ("gamma1", "beta1", "gamma2", "beta2"):
        refusal = _norms.row_parameter(match[name], [width], name, match["x"])
        if refusal:
            return refusal
    return None


def _refuse_mask(match: Match) -> Refusal | None:
    mask = match.get("mask")
    if mask is None:
        return None
    shape, heads = query.shape(mask), _heads(match)[0]
    if _norms.element_type(mask) != _norms.element_type(match["x"]):
        return Refusal(f"mask '{mask.name}' is of another type than '{match['x'].name}'")
    if shape is None or len(shape) != 4 or shape[1] not in (1, heads) or (shape[3] == 1 and (query.shape(match["x"]) or [0, 0])[1] != 1):
        return Refusal(f"mask '{mask.name}' is not [batch or 1, heads or 1, rows or 1, keys]", shape)
    for own, wanted in zip((shape[0], shape[2]), query.shape(match["x"]) or [], strict=False):
        if _norms.grows(own, wanted):
            return Refusal(f"mask '{mask.name}' has another shape than the scores of '{match['x'].name}'", shape)
    return None


def _scale(match: Match) -> float:
    total = 1.0
    for name in ("q", "k", "scores"):
        factor, divisor = match.get(f"{name}_factor"), match.get(f"{name}_divisor")
        if factor is not None:
            total *= query.scalar(factor) or 0.0
        if divisor is not None:
            total /= query.scalar(divisor) or math.nan
    return total


def _parameters(match: Match, role: str, new: Builder) -> list[gs.Tensor]:
    """Weight and bias of a linear map, with what it is multiplied by afterwards."""
    x = match["x"]
    if _packed(match) and role in "qkv":
        width = _width(match)
        columns = slice("qkv".index(role) * width, ("qkv".index(role) + 1) * width)
        weight, bias = match["qkv_weight"], match.get("qkv_bias")
        part = new.constant(f"{role}_weight", np.ascontiguousarray(_values(weight)[:, columns]))
        if bias is None:
            return [part, new.filled("zeros", 0.0, (width,), _norms.numpy_type(x))]
        return [part, new.constant(f"{role}_bias", np.broadcast_to(_values(bias).reshape(-1), (3 * width,))[columns].copy())]
    weight, bias, gain = match[f"{role}_weight"], match.get(f"{role}_bias"), match.get(f"{role}_gain")
    columns_of = (query.shape(weight) or [0, 0])[-1]
    assert isinstance(columns_of, int)
    if gain is None:
        return [weight, new.filled("zeros", 0.0, (columns_of,), _norms.numpy_type(x)) if bias is None else _row(bias, columns_of, new)]
    by = np.broadcast_to(_values(gain).reshape(-1).astype(np.float64), (columns_of,))
    shift = np.zeros(columns_of) if bias is None else _values(bias).reshape(-1).astype(np.float64)
    scaled = _folding.rounded(_values(weight).astype(np.float64) * by, weight)
    shifted = _folding.rounded(np.broadcast_to(shift, (columns_of,)) * by, weight)
    return [new.constant(weight.name, scaled), new.constant(f"{role}_bias", shifted)]


def _row(value: gs.Tensor, size: int, new: Builder) -> gs.Tensor:
    if query.shape(value) == [size]:
        return value
    if _values(value).size == size:
        return new.reshaped(value, (size,))
    return new.constant(value.name, np.broadcast_to(_values(value).reshape(-1), (size,)).copy())


def _vector(match: Match, name: str, new: Builder) -> gs.Tensor:
    return _norms.parameter(match[name], [_width(match)], 0.0, match["x"], new)


def _values(value: gs.Tensor) -> Array:
    found = query.constant(value)
    assert found is not None
    return np.asarray(found)


FUSION = EncoderLayer()
