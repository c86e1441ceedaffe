"""rope: rotary position embedding, in one kernel with the transposes around it.

    y = x * cos + turned(x) * sin        turned(x) = (-x_high, x_low), halves of the last axis, or interleaved (-x_1, x_0, -x_3, x_2, ...)

Also written out with half as many angles, (x_low * cos - x_high * sin, x_high * cos + x_low * sin), and so for pairs, as complex products
are lowered; and ONNX's operator RotaryEmbedding.

When it wins: where the queries and keys of an attention that is fused are turned: TensorRT makes slices, a concatenation and sums of it,
beside the transposes that split the heads. Only the first elements of a head may be turned (partial). Source of the idea: Su et al.,
RoFormer, 2021; the rotary kernels of language model libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _heads, _norms
from onnxfuse.fusions._heads import HEADS_FIRST, Heads
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, const, either, op, part, tensor
from onnxfuse.graph import query, rotary
from onnxfuse.graph.model import Model

OLDEST = 12  # a Constant takes its value from an attribute


def _turned() -> Pattern:
    x = tensor("x")
    slices = {name: op("Slice", x, rest=True, out=name) for name in ("low", "high", "even", "odd")}
    first, second = (either(slices[name], part("Split", x, out=f"{name}_part")) for name in ("low", "high"))
    halves = op("Concat", op("Neg", second), first, out="halves")
    pairs = [
        op("Unsqueeze", value, rest=True, out=name) for value, name in ((op("Neg", slices["odd"]), "apart0"), (slices["even"], "apart1"))
    ]
    interleaved = op("Reshape", op("Concat", *pairs, out="pairs"), tensor("flat"), out="interleaved")
    rotated = either(halves, interleaved)
    return op("Add", op("Mul", x, tensor("cos")), op("Mul", rotated, tensor("sin")), out="sum")


def _written_out() -> Pattern:
    """Each angle once. "real" is the first of what is joined."""
    x, cos, sin = tensor("x"), tensor("cos"), tensor("sin")

    def turned(first: Pattern, second: Pattern) -> tuple[Pattern, Pattern]:
        real = op("Sub", op("Mul", first, cos), op("Mul", second, sin), out="real")
        return real, op("Add", op("Mul", second, cos), op("Mul", first, sin))

    def woven(first: Pattern, second: Pattern) -> Pattern:
        apart = [op("Unsqueeze", value, rest=True, out=f"apart{i}") for i, value in enumerate(turned(first, second))]
        return op("Reshape", op("Concat", *apart, out="pairs"), tensor("flat"), out="interleaved")

    slices = {name: op("Slice", x, rest=True, out=name) for name in ("low", "high", "even", "odd")}
    low, high = (either(slices[name], part("Split", x, out=f"{name}_part")) for name in ("low", "high"))
    paired = op("Reshape", x, tensor("by_pair"), out="paired")
    taken = [
        either(
            op("Gather", paired, const(f"place{i}"), out=f"taken{i}"),
            op("Squeeze", part("Split", paired, out=f"piece{i}"), rest=True, out=f"taken{i}"),
        )
        for i in range(2)
    ]
    thin = turned(*(op("Slice", paired, rest=True, out=f"thin{i}") for i in range(2)))
    return either(
        op("Concat", *turned(low, high), out="halves"),
        woven(slices["even"], slices["odd"]),
        woven(*taken),
        op("Reshape", op("Concat", *thin, out="pairs"), tensor("flat"), out="interleaved"),
    )


def _partial() -> Pattern:
    whole = tensor("whole")
    # The Split makes what is turned, too, so it is looked at only.
    rest = either(op("Slice", whole, rest=True, out="rest"), replace(part("Split", whole, out="rest_part"), context=True))
    return op("Concat", either(_turned(), _written_out()), rest, out="joined")


_NATIVE = op("RotaryEmbedding", tensor("given"), tensor("cos"), tensor("sin"), rest=True, out="native")


class Rope(Fusion):
    name = "rope"
    kind = "fused"
    anchor = "Neg"
    patterns = (_partial(), _turned(), _written_out(), _NATIVE)

    def check(self, match: Match, model: Model) -> Refusal | None:
        if model.opset < OLDEST:
            return Refusal(f"the function needs operator set {OLDEST}; this model's is", model.opset)
        if "native" in match.tensors:
            return _refuse_native(match)
        x = match["x"]
        dims = query.shape(x)
        if dims is None or len(dims) != 4:
            return Refusal(f"'{x.name}' is not known to have four axes", dims)
        turned = dims[3]
        if not isinstance(turned, int) or turned % 2:
            return Refusal(f"the number of turned elements of '{x.name}' is unknown or odd", turned)
        return _refuse_types(match) or _refuse_parts(match, turned) or _refuse_whole(match, turned) or _refuse_angles(match, turned)

    def variant(self, match: Match) -> str | None:
        return _op_type(match).removeprefix(rotary.PLUGIN).lower() or None

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        if "native" in match.tensors:
            return _rewrite_native(match, new)
        source, turned = _source(_whole(match)), int((query.shape(match["x"]) or [])[3] or 0)
        output = match.output
        if output.dtype is None:
            output.dtype = source.value.dtype
        if output.shape is None:
            output.shape = query.shape(_whole(match))
        angles = [match["cos"], match["sin"]]
        if "real" in match.tensors:
            pairs = "interleaved" in match.tensors
            angles = [_doubled(value, turned, pairs, new, thin="thin0" in match.tensors) for value in angles]
        return _node(_op_type(match), source, angles, output, turned, new)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        if opset < OLDEST:
            return ()
        return tuple(_function(opset, interleaved, partial) for interleaved, partial in product((False, True), repeat=2))


def _whole(match: Match) -> gs.Tensor:
    return match["whole"] if "joined" in match.tensors else match["x"]


def _source(value: gs.Tensor) -> Heads:
    """What is turned, behind the transposes that lead to it."""
    found = _heads.find(value)
    return found if found is not None and found.scale == 1.0 and found.repeats == 1 else Heads(value, HEADS_FIRST)


def _op_type(match: Match) -> str:
    if "native" in match.tensors:
        attrs, (size, turned) = match.node("native").attrs, _sizes(match)
        return rotary.op_type(attrs.get("interleaved", 0) != 0, turned != size)
    return rotary.op_type("interleaved" in match.tensors, "joined" in match.tensors)


def _node(op_type: str, source: Heads, angles: Sequence[gs.Tensor], output: gs.Tensor, turned: int, new: Builder) -> gs.Node:
    attrs = {"x_perm": list(source.perm), "rotary": turned, "dtype": _norms.element_type(source.value)}
    return new.node(op_type, [source.value, *angles], [output], attrs, stem="rope", domain=DOMAIN)


def _doubled(value: gs.Tensor, turned: int, pairs: bool, new: Builder, thin: bool = False) -> gs.Tensor:
    """[..., turned / 2] as [..., turned]: once more behind itself, or for pairs each angle twice. thin: [..., turned / 2, 1]."""
    dims = list(query.shape(value) or [])
    if thin:
        dims.pop()
    elif pairs:
        apart = new.variable(f"{value.name}_apart", value.dtype, [*dims, 1])
        if new.opset >= 13:
            new.node("Unsqueeze", [value, _target((-1,), new)], [apart], stem="rope")
        else:
            new.node("Unsqueeze", [value], [apart], {"axes": [len(dims)]}, stem="rope")
        value = apart
    twice = new.variable(f"{value.name}_twice", value.dtype, [*dims, 2] if pairs else [*dims[:-1], turned])
    new.node("Concat", [value, value], [twice], {"axis": -1}, stem="rope")
    if not pairs:
        return twice
    flat = new.variable(f"{value.name}_flat", value.dtype, [*dims[:-1], turned])
    new.node("Reshape", [twice, _target((*[0] * (len(dims) - 1), turned), new)], [flat], stem="rope")
    return flat


def _target(extents: tuple[int, ...], new: Builder) -> gs.Constant:
    return new.computed(extents, "extents", lambda: np.array(extents, np.int64))


# The operator RotaryEmbedding: given [batch, heads, rows, size], or [batch, rows, heads * size] with num_heads; cos and sin
# [batch, rows, turned / 2], or [positions, turned / 2] and the positions [batch, rows].


def _sizes(match: Match) -> tuple[int, int]:
    """Elements of a head, 0 where they are unknown, and of those how many are turned."""
    dims, attrs = query.shape(match["given"]) or [], match.node("native").attrs
    last, heads = dims[-1] if dims else None, int(attrs.get("num_heads", 0))
    if not isinstance(last, int) or (len(dims) == 3 and (heads < 1 or last % heads)):
        return 0, 0
    size = last if len(dims) == 4 else last // heads
    return size, int(attrs.get("rotary_embedding_dim", 0)) or size


def _positions(match: Match) -> gs.Tensor | None:
    given = match.node("native").inputs[3:]
    return None if not given or given[0].is_empty() else given[0]


def _refuse_native(match: Match) -> Refusal | None:
    given, (size, turned) = match["given"], _sizes(match)
    dims = query.shape(given)
    if dims is None or len(dims) not in (3, 4) or not size:
        return Refusal(f"heads of '{given.name}' are of unknown number or size", dims)
    if turned % 2 or not 2 <= turned <= size:
        return Refusal(f"the number of turned elements of '{given.name}' is odd, or larger than a head", turned)
    refusal = _norms.refuse_type(given)
    if refusal:
        return refusal
    rows = [dims[0], dims[2] if len(dims) == 4 else dims[1]]
    positions = _positions(match)
    for name in ("cos", "sin"):
        cache = match[name]
        if _norms.element_type(cache) != _norms.element_type(given):
            return Refusal(f"'{cache.name}' is of another type than '{given.name}'")
        own = query.shape(cache)
        if own is None or len(own) != (3 if positions is None else 2) or own[-1] != turned // 2:
            return Refusal(f"{name} '{cache.name}' does not hold a value for each of the {turned // 2} turned pairs", own)
    for by_row in [match["cos"], match["sin"]] if positions is None else [positions]:
        own = query.shape(by_row)
        if own is None or len(own) < 2 or any(_norms.grows(one, wanted) for one, wanted in zip(own[:2], rows, strict=True)):
            return Refusal(f"'{by_row.name}' is not known to be of the rows of '{given.name}'", f"{own} and {dims}")
    return None


def _rewrite_native(match: Match, new: Builder) -> gs.Node:
    given, (size, turned) = match["given"], _sizes(match)
    dims = list(query.shape(given) or [])
    pairs = match.node("native").attrs.get("interleaved", 0) != 0
    by_row = len(dims) == 3

    def angles(cache: gs.Tensor) -> gs.Tensor:
        positions = _positions(match)
        if positions is not None:
            found = new.variable(f"{cache.name}_of_rows", cache.dtype, [*(query.shape(positions) or []), turned // 2])
            new.node("Gather", [cache, positions], [found], {"axis": 0}, stem="rope")
            cache = found
        own = list(query.shape(cache) or [])
        axis = 2 if by_row else 1
        wide = new.variable(f"{cache.name}_of_heads", cache.dtype, [*own[:axis], 1, *own[axis:]])
        new.node("Unsqueeze", [cache, _target((axis,), new)], [wide], stem="rope")
        return _doubled(wide, turned, pairs, new)

    output = match.output
    if output.dtype is None:
        output.dtype = given.dtype
    if output.shape is None:
        output.shape = dims
    both = [angles(match["cos"]), angles(match["sin"])]
    if not by_row:
        return _node(_op_type(match), _source(given), both, output, turned, new)
    # Rows take the place of heads: angles are broadcast along any axis.
    heads = int(dims[2] or 0) // size
    apart, made = (new.variable(f"{value.name}_by_head", given.dtype, [*dims[:2], heads, size]) for value in (given, output))
    new.node("Reshape", [given, _target((0, 0, heads, size), new)], [apart], stem="rope")
    node = _node(_op_type(match), Heads(apart, HEADS_FIRST), both, made, turned, new)
    new.node("Reshape", [made, _target((0, 0, heads * size), new)], [output], stem="rope")
    return node


def _refuse_types(match: Match) -> Refusal | None:
    x = match["x"]
    refusal = _norms.refuse_type(x)
    if refusal:
        return refusal
    for value in (match["cos"], match["sin"]):
        if _norms.element_type(value) != _norms.element_type(x):
            return Refusal(f"'{value.name}' is of another type than '{x.name}'")
    return None


def _refuse_parts(match: Match, turned: int) -> Refusal | None:
    """Both halves, or all even and all odd elements, of the last axis."""
    half = turned // 2
    wanted = {"low": (0, half, 1), "high": (half, turned, 1), "even": (0, turned, 2), "odd": (1, turned, 2)}
    for name, bounds in wanted.items():
        if name in match.tensors and _slice(match.node(name), turned) != bounds:
            return Refusal(f"'{match[name].name}' is no half of the last axis of '{match['x'].name}'", _slice(match.node(name), turned))
    for place, name in enumerate(("low_part", "high_part")):
        if name in match.tensors and not _is_part(match[name], place, (half, half)):
            return Refusal(f"'{match[name].name}' is no half of the last axis of '{match['x'].name}'", query.shape(match[name]))
    if "halves" in match.tensors and match.node("halves").attrs.get("axis") not in (-1, 3):
        return Refusal("the halves are joined along another axis", match.node("halves").attrs.get("axis"))
    return _refuse_pairs(match, half)


def _refuse_pairs(match: Match, half: int) -> Refusal | None:
    """Neighbours, and what they become side by side again."""
    if "pairs" not in match.tensors:
        return None
    x, last = match["x"], (-1, 4)
    if "paired" in match.tensors:
        dims, paired = query.shape(x) or [], query.shape(match["paired"]) or []
        if len(paired) != 5 or paired[3:] != [half, 2] or not all(map(_heads.same, paired[:3], dims[:3])):
            return Refusal(f"'{match['paired'].name}' is not '{x.name}' by pairs", f"{paired} and {dims}")
    for place in range(2):
        if f"thin{place}" in match.tensors:
            bounds = _slice(match.node(f"thin{place}"), 2, last)
            if bounds != (place, place + 1, 1):
                return Refusal(f"'{match[f'thin{place}'].name}' is not the element {place} of each pair", bounds)
        if f"taken{place}" in match.tensors:
            found = _heads.taken(match[f"taken{place}"])
            if found is None or found[1] != place or found[2] not in last:
                return Refusal(f"'{match[f'taken{place}'].name}' is not the element {place} of each pair")
    apart = [query.shape(match[name]) for name in ("apart0", "apart1") if name in match.tensors]
    flat = query.shape(match["interleaved"])
    straight = all(dims is not None and len(dims) == 5 and dims[3:] == [half, 1] for dims in apart)
    if not straight or match.node("pairs").attrs.get("axis") not in last or not query.same_shape(match["interleaved"], x):
        return Refusal("the pairs are joined otherwise than side by side", f"{apart} to {flat}")
    return None


def _refuse_whole(match: Match, turned: int) -> Refusal | None:
    """With a part that is not turned: the first elements of the last axis are, the others follow."""
    if "joined" not in match.tensors:
        return None
    whole, x = match["whole"], match["x"]
    dims = query.shape(whole)
    size = dims[3] if dims is not None and len(dims) == 4 else None
    if not isinstance(size, int) or size <= turned:
        return Refusal(f"the last axis of '{whole.name}' is unknown", dims)
    if match.node("joined").attrs.get("axis") not in (-1, 3):
        return Refusal("the parts are joined along another axis", match.node("joined").attrs.get("axis"))
    first = x.inputs[0] if len(x.inputs) == 1 else None
    sizes = (turned, size - turned)
    if first is None or first.op not in ("Slice", "Split") or first.inputs[0] is not whole:
        return Refusal(f"what is turned is no part of '{whole.name}'", x.name)
    sound = _slice(first, size) == (0, turned, 1) if first.op == "Slice" else _is_part(x, 0, sizes)
    rest = _slice(match.node("rest"), size) == (turned, size, 1) if "rest" in match.tensors else _is_part(match["rest_part"], 1, sizes)
    return (
        None if sound and rest else Refusal(f"the parts are not the first {turned} elements of '{whole.name}' and those behind them", size)
    )


def _refuse_angles(match: Match, turned: int) -> Refusal | None:
    """cos and sin are broadcast to what is turned, and hold a value for each turned element, or for each two of them where written out."""
    dims = (query.shape(match["x"]) or [])[:3]
    wanted_last = turned // 2 if "real" in match.tensors else turned
    for name in ("cos", "sin"):
        own = query.shape(match[name])
        if own is not None and "thin0" in match.tensors:
            own = own[:-1] if own[-1:] == [1] else None
        if own is None or not 1 <= len(own) <= 4 or own[-1] != wanted_last:
            return Refusal(f"{name} '{match[name].name}' does not hold a value for each of the {wanted_last} turned elements", own)
        for extent, wanted in zip(reversed(own[:-1]), reversed(dims), strict=False):
            if _norms.grows(extent, wanted):
                return Refusal(f"{name} '{match[name].name}' has another shape than '{match['x'].name}'", f"{own} and {dims}")
    return None


def _slice(node: gs.Node, size: int, last: tuple[int, int] = (-1, 3)) -> tuple[int, int, int] | None:
    """(start, end, step) of a Slice along the last axis, of four unless `last` says so, whose size is known; None for any other."""
    values = [query.constant(value) if not value.is_empty() else None for value in node.inputs[1:]]
    values += [None] * (4 - len(values))
    starts, ends, axes, steps = values
    if starts is None or ends is None or axes is None or any(v is not None and v.size != 1 for v in values):
        return None
    start, end, axis = (int(v.reshape(-1)[0]) for v in (starts, ends, axes))
    if axis not in last:
        return None
    start, end = (bound + size if bound < 0 else min(bound, size) for bound in (start, end))
    return start, end, 1 if steps is None else int(np.ravel(steps)[0])


def _is_part(value: gs.Tensor, place: int, sizes: tuple[int, int]) -> bool:
    """Whether a Split of the last of four axes into two of these sizes gives `value` at `place`."""
    node = value.inputs[0]
    if node.op != "Split" or len(node.outputs) != 2 or node.outputs[place] is not value or node.attrs.get("axis", 0) not in (-1, 3):
        return False
    given = query.constant(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("split")
    return tuple(int(size) for size in np.ravel(given)) == sizes if given is not None else sizes[0] == sizes[1]


def _function(opset: int, interleaved: bool, partial: bool) -> onnx.FunctionProto:
    body = f"""heads = Transpose <perm: ints = @x_perm> (x) wide = Cast <to = 1> (heads)
        wide_cos = Cast <to = 1> (cos) wide_sin = Cast <to = 1> (sin)
        zero = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> () two = Constant <value_ints = [2]> ()
        last = Constant <value_ints = [-1]> () end = Constant <value = int64[1] {{{np.iinfo(np.int64).max}}}> ()
        turned_size = Constant <value_int: int = @rotary> () size = Reshape (turned_size, one)
        given = Slice (wide, zero, size, last)
        {_PAIRS.format(apart=_unsqueezed(opset)) if interleaved else _HALVES}
        kept = Mul (given, wide_cos) moved = Mul (turned, wide_sin) sum = Add (kept, moved)
        {_REST if partial else "whole = Identity (sum)"}
        y = Cast <to: int = @dtype> (whole)"""
    return _bodies.define(opset, f"{rotary.op_type(interleaved, partial)} <x_perm, rotary, dtype> (x, cos, sin) => (y) {{ {body} }}")


_HALVES = """half = Div (size, two) low = Slice (given, zero, half, last) high = Slice (given, half, end, last)
        minus = Neg (high) turned = Concat <axis = -1> (minus, low)"""
_PAIRS = """even = Slice (given, zero, end, last, two) odd = Slice (given, one, end, last, two) minus = Neg (odd)
        {apart} pairs = Concat <axis = -1> (first, second) extents = Shape (given) turned = Reshape (pairs, extents)"""
_REST = "rest = Slice (wide, size, end, last) whole = Concat <axis = -1> (sum, rest)"


def _unsqueezed(opset: int) -> str:
    if opset >= 13:
        return "first = Unsqueeze (minus, last) second = Unsqueeze (even, last)"
    return "first = Unsqueeze <axes = [4]> (minus) second = Unsqueeze <axes = [4]> (even)"


FUSION = Rope()
