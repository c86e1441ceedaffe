"""The residual sum that skip_layernorm and skip_rmsnorm share: input + skip, and a bias added before or after."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from onnxfuse.fusions import _norms
from onnxfuse.fusions.base import Builder, Match, Refusal
from onnxfuse.fusions.pattern import Pattern, const, either, op, tensor
from onnxfuse.graph import query

# The kernel keeps a row in the registers of one thread block; wider rows would spill.
MAX_WIDTH = 16384

# The body's statements for `sum`, in the type of the inputs: where the sum has other readers they see what they saw before.
SUM = """joined = Add (input, skip)
         sum = Add (joined, bias)"""


def total(bias: bool) -> Pattern:
    given, skip = tensor("input"), tensor("skip")
    if not bias:
        return op("Add", given, skip, out="sum")
    vector = const("bias")
    return either(op("Add", op("Add", given, vector), skip, out="sum"), op("Add", op("Add", given, skip), vector, out="sum"))


def refuse(match: Match, parameters: Sequence[str]) -> Refusal | None:
    """The norm is over the last axis alone; a broadcast is no residual; the parameters hold one value for each element of a row."""
    attrs = match.root.attrs
    if attrs.get("stash_type", 1) != 1:
        return Refusal("statistics are not kept in float32 (stash_type)", attrs["stash_type"])
    rank = query.rank(match["sum"])
    if attrs.get("axis", -1) not in (-1, None if rank is None else rank - 1):
        return Refusal("normalises more than the last axis (axis)", attrs["axis"])
    given, skip = match["input"], match["skip"]
    refusal = _norms.refuse_epsilon(attrs) or _norms.refuse_operands(match, given)
    if refusal:
        return refusal
    if _norms.element_type(skip) != _norms.element_type(given):
        return Refusal(f"'{skip.name}' is of another type than '{given.name}'")
    if not query.same_shape(given, skip):
        shapes = f"{query.shape(given)} and {query.shape(skip)}"
        return Refusal("the two operands of the addition are not proved to be of one shape", shapes)
    sizes = _norms.rows_of(given, 1)
    if isinstance(sizes, Refusal):
        return sizes
    if sizes[0] > MAX_WIDTH:
        return Refusal(f"rows are longer than the {MAX_WIDTH} elements that the kernel holds", sizes[0])
    escapes = match.escapes(match["sum"]) is not None
    for role in (*parameters, "bias"):
        value = match.get(role)
        if value is not None and escapes and value.inputs and not query.is_constant(value):
            # It may be computed from the sum, which would then come out of the node that needs it.
            return Refusal(f"{role} '{value.name}' is computed at run time, and '{match['sum'].name}' has other readers")
        refusal = None if value is None else _norms.row_parameter(value, sizes, role, given)
        if refusal:
            return refusal
    return None


def inputs(match: Match, parameters: Sequence[str], new: Builder) -> list[gs.Tensor]:
    """input, skip and the parameters, zeros standing for the absent ones."""
    sizes = _norms.rows_of(match["input"], 1)
    assert not isinstance(sizes, Refusal)
    given, skip = match["input"], match["skip"]
    return [given, skip, *(_norms.parameter(match.get(role), sizes, 0.0, given, new) for role in parameters)]


def outputs(match: Match) -> list[gs.Tensor]:
    """The norm and the sum. Both, also where nobody reads the sum: onnxruntime infers types only of calls with all outputs."""
    return [_norms.settle(match, match["input"]), match["sum"]]
