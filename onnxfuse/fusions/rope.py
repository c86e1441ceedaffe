"""rope: rotary position embedding, in one kernel with the transposes around it.

    y = x * cos + turned(x) * sin        turned(x) = (-x_high, x_low), halves of the last axis, or interleaved (-x_1, x_0, -x_3, x_2, ...)

When it wins: where the queries and keys of an attention that is fused are turned: TensorRT makes slices, a concatenation and sums of it,
beside the transposes that split the heads. Only the first elements of a head may be turned (partial). Source of the idea: Su et al.,
RoFormer, 2021; the rotary kernels of language model libraries.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _heads, _norms
from onnxfuse.fusions._heads import HEADS_FIRST, Heads
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, either, op, part, tensor
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


def _partial() -> Pattern:
    whole = tensor("whole")
    # The Split makes what is turned, too, so it is looked at only.
    rest = either(op("Slice", whole, rest=True, out="rest"), replace(part("Split", whole, out="rest_part"), context=True))
    return op("Concat", _turned(), rest, out="joined")


class Rope(Fusion):
    name = "rope"
    kind = "fused"
    anchor = "Neg"
    patterns = (_partial(), _turned())

    def check(self, match: Match, model: Model) -> Refusal | None:
        if model.opset < OLDEST:
            return Refusal(f"the function needs operator set {OLDEST}; this model's is", model.opset)
        x = match["x"]
        dims = query.shape(x)
        if dims is None or len(dims) != 4:
            return Refusal(f"'{x.name}' is not known to have four axes", dims)
        turned = dims[3]
        if not isinstance(turned, int) or turned % 2:
            return Refusal(f"the number of turned elements of '{x.name}' is unknown or odd", turned)
        return _refuse_types(match) or _refuse_parts(match, turned) or _refuse_whole(match, turned) or _refuse_angles(match, turned)

    def variant(self, match: Match) -> str | None:
        return rotary.op_type("interleaved" in match.tensors, "joined" in match.tensors).removeprefix(rotary.PLUGIN).lower() or None

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        source = _source(match)
        interleaved, partial = "interleaved" in match.tensors, "joined" in match.tensors
        attrs = {
            "x_perm": list(source.perm),
            "rotary": int((query.shape(match["x"]) or [])[3] or 0),
            "dtype": _norms.element_type(source.value),
        }
        output = match.output
        if output.dtype is None:
            output.dtype = source.value.dtype
        if output.shape is None:
            output.shape = query.shape(_whole(match))
        inputs = [source.value, match["cos"], match["sin"]]
        return new.node(rotary.op_type(interleaved, partial), inputs, [output], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        if opset < OLDEST:
            return ()
        return tuple(_function(opset, interleaved, partial) for interleaved, partial in product((False, True), repeat=2))


def _whole(match: Match) -> gs.Tensor:
    return match["whole"] if "joined" in match.tensors else match["x"]


def _source(match: Match) -> Heads:
    """What is turned, behind the transposes that lead to it."""
    found = _heads.find(_whole(match))
    return found if found is not None and found.scale == 1.0 and found.repeats == 1 else Heads(_whole(match), HEADS_FIRST)


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
    if "pairs" in match.tensors:
        apart = [query.shape(match[name]) for name in ("apart0", "apart1")]
        flat = query.shape(match["interleaved"])
        straight = all(dims is not None and len(dims) == 5 and dims[3:] == [half, 1] for dims in apart)
        if not straight or match.node("pairs").attrs.get("axis") not in (-1, 4) or not query.same_shape(match["interleaved"], match["x"]):
            return Refusal("the pairs are joined otherwise than side by side", f"{apart[0]} to {flat}")
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
    """cos and sin are broadcast to what is turned, and hold a value for each turned element."""
    dims = query.shape(match["x"]) or []
    for name in ("cos", "sin"):
        own = query.shape(match[name])
        if own is None or not 1 <= len(own) <= 4 or own[-1] != turned:
            return Refusal(f"{name} '{match[name].name}' does not hold a value for each of the {turned} turned elements", own)
        for extent, wanted in zip(reversed(own), reversed(dims), strict=False):
            if _norms.grows(extent, wanted):
                return Refusal(f"{name} '{match[name].name}' has another shape than '{match['x'].name}'", f"{own} and {dims}")
    return None


def _slice(node: gs.Node, size: int) -> tuple[int, int, int] | None:
    """(start, end, step) of a Slice along the last of four axes, whose size is known; None for any other."""
    values = [query.constant(value) if not value.is_empty() else None for value in node.inputs[1:]]
    values += [None] * (4 - len(values))
    starts, ends, axes, steps = values
    if starts is None or ends is None or axes is None or any(v is not None and v.size != 1 for v in values):
        return None
    start, end, axis = (int(v.reshape(-1)[0]) for v in (starts, ends, axes))
    if axis not in (-1, 3):
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
