"""One step of an LSTM or GRU in primitives, as exporters write a cell: it becomes a sequence of one step.

    i, f, g, o = Split(x W + h R + b)    c' = sigmoid(f) c + sigmoid(i) tanh(g)    h' = sigmoid(o) tanh(c')

The products are MatMul or Gemm, of x and h each or of both side by side, one for all gates or one for each gate, in any order of gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _folding, _norms
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Match, Refusal, label
from onnxfuse.fusions.pattern import Pattern, const, either, op, part, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

GATES = {"LSTM": ("i", "o", "f", "g"), "GRU": ("z", "r", "n")}
"""Gates in the order of ONNX's weights; g and n are the ones with tanh (ONNX's c and h)."""
_BFLOAT16_FROM = 22  # the operator set from which ONNX's LSTM and GRU take bfloat16
_X, _H, _C = tensor("x"), tensor("h"), tensor("c")

# --- patterns ----------------------------------------------------------------------------------------------------------
# Names: those of operand v (x, h, or xh side by side) of all gates are v_product, v_weight, v_bias; of one gate, v_product_i and so on.


def patterns(cell: str) -> tuple[Pattern, ...]:
    if cell == "LSTM":
        return tuple(map(_lstm, (_part_of_sum, _sum_of_parts, _own_sum)))
    return (*map(_gru, (_parts, _own)), _gru_reset_first())


def _linear(operand: str, given: Pattern, gate: str = "") -> Pattern:
    weight, bias, out = const(f"{operand}_weight{gate}"), const(f"{operand}_bias{gate}"), f"{operand}_product{gate}"
    return either(
        op("Add", op("MatMul", given, weight, out=out), bias),
        op("Gemm", given, weight, bias, out=out),
        op(("MatMul", "Gemm"), given, weight, out=out),
    )


def _sum(gate: str = "", state: Pattern = _H) -> Pattern:
    x, h = _linear("x", _X, gate), _linear("h", state, gate)
    joined = either(op("Concat", _X, state, out=f"joined{gate}"), op("Concat", state, _X, out=f"joined{gate}"))
    return either(op("Add", x, h), op("Add", op("Add", x, h), const(f"bias{gate}")), _linear("xh", joined, gate))


def _part_of_sum() -> Callable[[str], Pattern]:
    sums = _sum()
    return lambda gate: part("Split", sums, out=f"part_{gate}")


def _sum_of_parts() -> Callable[[str], Pattern]:
    x, h = _linear("x", _X), _linear("h", _H)
    return lambda gate: op("Add", part("Split", x, out=f"x_part_{gate}"), part("Split", h, out=f"h_part_{gate}"))


def _own_sum() -> Callable[[str], Pattern]:
    return lambda gate: _sum(f"_{gate}")


def _lstm(ways: Callable[[], Callable[[str], Pattern]]) -> Pattern:
    gate = ways()
    forget = gate("f")
    f = op("Sigmoid", either(forget, op("Add", forget, const("forget_bias"))))
    c = op("Add", op("Mul", f, _C), op("Mul", op("Sigmoid", gate("i")), op("Tanh", gate("g"))), out="new_c")
    return op("Mul", op("Tanh", c), op("Sigmoid", gate("o")))


def _parts() -> Callable[[str, str], Pattern]:
    of = {"x": _linear("x", _X), "h": _linear("h", _H)}
    return lambda operand, gate: part("Split", of[operand], out=f"{operand}_part_{gate}")


def _own() -> Callable[[str, str], Pattern]:
    of = {"x": _X, "h": _H}
    return lambda operand, gate: _linear(operand, of[operand], f"_{gate}")


def _gru(ways: Callable[[], Callable[[str, str], Pattern]]) -> Pattern:
    of = ways()
    r, z = (op("Sigmoid", op("Add", of("x", gate), of("h", gate))) for gate in "rz")
    return _mixed(z, op("Tanh", op("Add", of("x", "n"), op("Mul", r, of("h", "n")))))


def _gru_reset_first() -> Pattern:
    r, z = (op("Sigmoid", _sum(f"_{gate}")) for gate in "rz")
    return _mixed(z, op("Tanh", _sum("_n", op("Mul", r, _H, out="reset_h"))))


def _mixed(z: Pattern, n: Pattern) -> Pattern:
    return either(
        op("Add", op("Mul", op("Sub", _H, n), z), n),
        op("Add", op("Mul", op("Sub", const("one", 1), z), n), op("Mul", z, _H)),
    )


# --- conditions --------------------------------------------------------------------------------------------------------


def found(match: Match) -> bool:
    """Whether a match is one of these patterns'."""
    return "h" in match.tensors


def is_reset_first(match: Match) -> bool:
    """GRU without linear_before_reset."""
    return "reset_h" in match.tensors


def hidden(match: Match) -> int | None:
    size = (query.shape(match["h"]) or [None])[-1]
    return size if isinstance(size, int) else None


def refuse(match: Match, cell: str, model: Model) -> Refusal | None:
    """Every condition but those on the number of hidden units, which must be known."""
    x = match["x"]
    refusal = _norms.refuse_type(x)
    if refusal:
        return refusal
    kind = _norms.element_type(x)
    if kind == onnx.TensorProto.BFLOAT16 and model.opset < _BFLOAT16_FROM:
        return Refusal(f"{cell} takes bfloat16 from operator set {_BFLOAT16_FROM}; this model's is", model.opset)
    for name, value in match.tensors.items():
        allowed = {kind} if name in ("h", "c") else {kind, 0}  # 0: not said of an inner tensor
        if _norms.element_type(value) not in allowed:
            return Refusal(f"'{value.name}' is of another type than '{x.name}'")
    batch = (query.shape(x) or [None])[0]
    for value in (x, match["h"], *([match["c"]] if "c" in match.tensors else [])):
        shape = query.shape(value)
        wanted = [batch, shape[-1] if value is x and shape else hidden(match)]
        if shape is None or len(shape) != 2 or None in shape or shape != wanted:
            return Refusal(f"the shape of '{value.name}' is not proved to be {wanted}", shape)
    for gate in GATES[cell]:
        for operand in "xh":
            made = _operand(match, cell, operand, gate)
            if isinstance(made, Refusal):
                return made
    forget = match.get("forget_bias")
    bias = None if forget is None else _folding.per_channel(forget, hidden(match) or 0, 1, 2)
    return bias if isinstance(bias, Refusal) else None


@dataclass(frozen=True)
class _Operand:
    """What one gate takes of x or of h: rows of a weight [gates * hidden, size] or, as stored, of its transpose; columns of the operand."""

    weight: gs.Tensor
    transposed: bool  # [size, gates * hidden]
    rows: slice
    columns: slice
    biases: tuple[gs.Tensor, ...]  # of all the rows of the weight
    count: int  # rows of the weight

    def values(self) -> Array:
        """[hidden, size], as stored."""
        stored = query.constant(self.weight)
        assert stored is not None
        return (stored.T if self.transposed else stored)[self.rows, self.columns]

    def bias(self) -> Array:
        """[hidden], in float64."""
        total = np.zeros(self.count)
        for value in self.biases:
            one = _folding.per_channel(value, self.count, 1, 2)
            assert not isinstance(one, Refusal)
            total = total + one
        return np.asarray(total[self.rows])


def _operand(match: Match, cell: str, operand: str, gate: str) -> _Operand | Refusal:
    """Where the weights and biases of `gate` for x or h lie; refused where that is not proved."""
    units = hidden(match)
    assert units is not None
    piece = next((name for name in (f"part_{gate}", f"{operand}_part_{gate}") if name in match.tensors), None)
    suffix = "" if piece else f"_{gate}"
    count = units * len(GATES[cell]) if piece else units
    joined = f"xh_product{suffix}" in match.tensors
    name = "xh" if joined else operand
    product = match.node(f"{name}_product{suffix}")
    refusal = _refuse_product(product) or (_refuse_split(match.node(piece), units, len(GATES[cell])) if piece else None)
    if refusal:
        return refusal
    weight = match[f"{name}_weight{suffix}"]
    transposed = not product.attrs.get("transB", 0)
    sizes = {"x": query.shape(match["x"]), "h": [0, units]}
    widths = {name: (shape or [None])[-1] for name, shape in sizes.items()}
    columns = slice(None)
    wanted = widths[operand]
    if joined:
        node = match.node(f"joined{suffix}")
        if node.attrs.get("axis") not in (1, -1):
            return Refusal(f"'{node.outputs[0].name}' joins another axis than the last", node.attrs.get("axis"))
        x_first = node.inputs[0] is match["x"]
        if not isinstance(widths["x"], int):
            return Refusal(f"the width of '{match['x'].name}' is unknown")
        start = widths["x"] if x_first else units
        columns = slice(None, start) if (operand == "x") == x_first else slice(start, None)
        wanted = widths["x"] + units
    shape = query.shape(weight)
    expected = [wanted, count] if transposed else [count, wanted]
    if shape != expected:
        return Refusal(f"the shape of '{weight.name}' is not {expected}", shape)
    # Where both operands share a bias it counts once, with x.
    names = [f"{name}_bias{suffix}"] if not joined or operand == "x" else []
    names += [f"bias{suffix}"] if operand == "x" else []
    biases = tuple(match[bias] for bias in names if bias in match.tensors)
    for value in biases:
        given = _folding.per_channel(value, count, 1, 2)
        if isinstance(given, Refusal):
            return given
    first = match.node(piece).outputs.index(match[piece]) * units if piece else 0
    return _Operand(weight, transposed, slice(first, first + units), columns, biases, count)


def _refuse_product(node: gs.Node) -> Refusal | None:
    for name, usual in (("transA", 0), ("alpha", 1.0), ("beta", 1.0)):
        if node.op == "Gemm" and node.attrs.get(name, usual) != usual:
            return Refusal(f"'{label(node)}' has {name}", node.attrs[name])
    return None


def _refuse_split(node: gs.Node, units: int, gates: int) -> Refusal | None:
    if node.attrs.get("axis", 0) not in (1, -1):
        return Refusal(f"'{label(node)}' splits another axis than the last", node.attrs.get("axis", 0))
    sizes = query.constant(node.inputs[1]) if len(node.inputs) > 1 and not node.inputs[1].is_empty() else node.attrs.get("split")
    if len(node.outputs) != gates or (sizes is not None and [int(size) for size in sizes] != [units] * gates):
        return Refusal(f"'{label(node)}' does not split into {gates} parts of {units}", None if sizes is None else list(sizes))
    if sizes is None and len(node.inputs) > 1 and not node.inputs[1].is_empty():
        return Refusal(f"sizes of the parts of '{label(node)}' are no constant")
    return None


# --- weights -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """W, R and B as ONNX has them, to be computed. `key` is the same for cells that share all of them."""

    key: tuple[object, ...]
    w: Callable[[], Array]
    r: Callable[[], Array]
    b: Callable[[], Array]


def weights(match: Match, cell: str) -> Weights:
    """The weights of a cell that is not refused."""
    forget = match.get("forget_bias")
    like = match["x"]

    def operands(operand: str) -> list[_Operand]:
        made = [_operand(match, cell, operand, gate) for gate in GATES[cell]]
        return [one for one in made if isinstance(one, _Operand)]

    x, h = operands("x"), operands("h")

    def stacked(parts: Sequence[_Operand]) -> Array:
        return np.ascontiguousarray(np.concatenate([one.values() for one in parts])[None])

    def biases() -> Array:
        rows = [one.bias() for one in (*x, *h)]
        if forget is not None:
            given = _folding.per_channel(forget, len(rows[0]), 1, 2)
            assert not isinstance(given, Refusal)
            rows[GATES[cell].index("f")] = rows[GATES[cell].index("f")] + given
        return _folding.rounded(np.concatenate(rows)[None], like)

    def of(one: _Operand) -> tuple[object, ...]:
        return (id(one.weight), one.rows.start, one.columns.start, one.columns.stop, *map(id, one.biases))

    key = ("cell", cell, id(forget), *(of(one) for one in (*x, *h)))
    return Weights(key, lambda: stacked(x), lambda: stacked(h), biases)
