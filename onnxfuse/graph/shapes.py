"""Symbolic shapes: what onnx's inference forgets where a dimension has no number.

onnx gives the result of an addition of [batch, 384] and [n, 384] a new symbol each time, loses a Slice up to a computed end and a
Reshape to a computed shape, and does not tell that a tensor reshaped to the dimensions of another one has them. A residual can then
not be proved to be of one shape. `refine` walks through the graph once, and gives equal dimensions equal names.

Every rule is a statement about each run that succeeds: a broadcast that would have failed, or a -1 that no number fits, needs no shape.
New names start with unk__, which is not written to files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import query
from onnxfuse.graph.model import Model

Dim = int | str | None
Dims = Sequence[Dim]
Shapes = list[Dims | None]  # one for each output that a rule knows
Value = list[Any]  # elements of a small integer tensor: numbers, dimensions, or None; of a boolean one: True, False, or None
_Said = TypeVar("_Said")

MADE = "unk__"
_MOST = 64  # elements of a tensor whose value is followed
_FAR = 1 << 31  # an end that means: to the end
_DOMAINS = ("", None, "ai.onnx", "onnxfuse")


@dataclass(frozen=True)
class Scope:
    """Names in a graph when the walk enters a body of it: those in its shapes at first, and as many as were made."""

    names: frozenset[str]
    made: int

    def __contains__(self, name: str) -> bool:
        number = name.removeprefix(f"{MADE}s")
        return name in self.names or (number != name and number.isdigit() and int(number) < self.made)


class Names:
    """Dimensions and what is computed from them. The same computation gives the same name."""

    def __init__(self) -> None:
        self.outside: list[Scope] = []  # names of the graphs around the body that is walked through
        self.signed: set[str] = set()  # names of numbers that may be negative, which dimensions are not
        self._made: dict[tuple[Any, ...], str] = {}
        self._alias: dict[str, int | str] = {}
        self._products: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._sums: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._broadcasts: dict[str, frozenset[str]] = {}
        self._shortest: dict[str, tuple[int, str]] = {}

    def made(self, *key: Any) -> str:
        return self._made.setdefault(key, f"{MADE}s{len(self._made)}")

    def scope(self, names: frozenset[str]) -> Scope:
        return Scope(names, len(self._made))

    def fresh(self) -> str:
        return self.made("fresh", len(self._made))

    def known(self, dim: Dim) -> Dim:
        """The best name of a dimension."""
        while isinstance(dim, str) and dim in self._alias:
            dim = self._alias[dim]
        return dim

    def same(self, one: Dim, other: Dim) -> Dim:
        """The better of two names of one dimension; the worse becomes another name of it."""
        one, other = self.known(one), self.known(other)
        if one is None or one == other:
            return other
        if other is None or isinstance(one, int):
            better, worse = one, other
        elif isinstance(other, int) or one.startswith(MADE):
            better, worse = other, one
        else:
            better, worse = one, other
        if better is not None and isinstance(worse, str) and worse.startswith(MADE) and not any(worse in scope for scope in self.outside):
            # Not of names from outside of a body: what holds where a branch is taken may not hold elsewhere.
            self._alias[worse] = better
        return better

    def is_signed(self, *numbers: Any) -> bool:
        return any(number < 0 if isinstance(number, int) else number in self.signed for number in numbers)

    def _signed_like(self, name: str, *numbers: Any) -> str:
        if self.is_signed(*numbers):
            self.signed.add(name)
        return name

    def product(self, dims: Dims) -> tuple[int, tuple[str, ...]] | None:
        """Number and symbols whose product `dims` have; None where one is unknown."""
        number = 1
        symbols: list[str] = []
        for dim in map(self.known, dims):
            if dim is None:
                return None
            factor, names = (dim, ()) if isinstance(dim, int) else self._products.get(dim, (1, (dim,)))
            number *= factor
            symbols += names
        return number, tuple(sorted(symbols))

    def times(self, dims: Dims) -> Dim:
        found = self.product(dims)
        if found is None:
            return None
        number, symbols = found
        if not symbols or number == 0:
            return number
        if number == 1 and len(symbols) == 1:
            return symbols[0]
        name = self.made("product", number, symbols)
        self._products[name] = found
        return self._signed_like(name, number, *symbols)

    def is_factor(self, part: str, whole: Dim) -> bool:
        """Whether `whole` is a product of `part`, and so is 0 where that is."""
        return isinstance(whole, str) and part in self._products.get(whole, (1, ()))[1]

    def quotient(self, above: Dims, below: Dims) -> Dim:
        """What is left of the elements of `above` where `below` are taken: the -1 of a Reshape, which needs `below` not to be 0."""
        one, other = self.product(above), self.product(below)
        if one is None or other is None or other[0] == 0:
            return None
        top, bottom = Counter(one[1]), Counter(other[1])
        left, over = sorted((top - bottom).elements()), sorted((bottom - top).elements())
        if not over and one[0] % other[0] == 0:
            return self.times([one[0] // other[0], *left])
        common = math.gcd(one[0], other[0])
        name = self.made("quotient", one[0] // common, tuple(left), other[0] // common, tuple(over))
        return self._signed_like(name, one[0], other[0], *left, *over)

    def plus(self, dims: Dims) -> Dim:
        number = 0
        symbols: list[str] = []
        for dim in map(self.known, dims):
            if dim is None:
                return None
            term, names = (dim, ()) if isinstance(dim, int) else self._sums.get(dim, (0, (dim,)))
            number += term
            symbols += names
        if not symbols:
            return number
        if number == 0 and len(symbols) == 1:
            return symbols[0]
        name = self.made("sum", number, tuple(sorted(symbols)))
        self._sums[name] = number, tuple(sorted(symbols))
        return self._signed_like(name, number, *symbols)

    def minus(self, number: Any) -> Any:
        if isinstance(number, int):
            return -number
        name = self.made("minus", number)
        self.signed.add(name)
        return name

    def less(self, a: Any, b: Any) -> Any:
        if isinstance(b, int):
            return self.plus([a, -b])
        if a == b:
            return 0
        name = self.made("difference", a, b)
        self.signed.add(name)
        return name

    def divided(self, a: Any, b: Any) -> Any:
        """Integer division, which goes towards 0."""
        if isinstance(a, int) and isinstance(b, int):
            return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        found = self.product([a])
        if found is not None and isinstance(b, int) and b > 0 and found[0] % b == 0:
            return self.quotient([a], [b])
        return self._signed_like(self.made("divided", a, b), a, b)

    def shorter(self, length: int, end: str) -> str:
        """min(length, end), of a Slice from 0 to `end`."""
        name = self.made("shorter", length, end)
        self._shortest[name] = length, end
        return name

    def broadcast(self, dims: Dims) -> Dim:
        """The dimension that one-sided ones give together in a run that succeeds."""
        others = {dim for dim in map(self.known, dims) if dim != 1}
        numbers = [dim for dim in others if isinstance(dim, int)]
        if numbers:
            return numbers[0]
        if None in others:
            return None
        symbols = {part for dim in others if isinstance(dim, str) for part in self._broadcasts.get(dim, {dim})}
        for symbol in sorted(symbols):
            length, end = self._shortest.get(symbol, (1, symbol))
            if length > 1 and self.known(end) in symbols:
                symbols.discard(symbol)  # min(length, end) is 1 only where end is: otherwise the two must be equal
        if not symbols:
            return 1
        if len(symbols) == 1:
            return symbols.pop()
        name = self.made("broadcast", tuple(sorted(symbols)))
        self._broadcasts[name] = frozenset(symbols)
        return name


def refine(model: Model) -> None:
    """Gives every tensor of the model, bodies included, the best shape that is known, in place."""
    tensors = [value for graph in model.graphs() for value in (*graph.inputs, *(made for node in graph.nodes for made in node.outputs))]
    for value in tensors:
        if isinstance(value, gs.Variable) and value.shape is not None:
            value.shape = [
                None if isinstance(dim, str) and not any(map(str.isalnum, dim)) else dim for dim in value.shape
            ]  # "?" names nothing
    for value in model.graph.outputs:
        if isinstance(value, gs.Variable) and value.shape is not None and value.inputs:
            # What exporters declare of outputs is often wrong: a batch that is none.
            value.shape = [None if isinstance(dim, str) and not dim.startswith(MADE) else dim for dim in value.shape]
    walk = _Walk(model.opset)
    walk.graph(model.graph)
    for value in tensors:
        walk.settle(value)


class _Walk:
    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.names = Names()
        self.values: dict[int, Value] = {}
        self.scope = self.names.scope(frozenset())  # of the node whose bodies were walked through last

    def graph(self, graph: gs.Graph) -> None:
        for value in graph.inputs:
            self._name_all(value)
        own: frozenset[str] | None = None
        for node in graph.nodes:
            bodies = [held for held in node.attrs.values() if isinstance(held, gs.Graph)]
            if bodies:
                own = _names(graph) if own is None else own
                self.names.outside.append(self.names.scope(own))
                for body in bodies:
                    self.graph(body)
                self.scope = self.names.outside.pop()
            if node.domain in _DOMAINS:
                self._node(node)
            for value in node.outputs:
                self._name_all(value)

    def _node(self, node: gs.Node) -> None:
        shapes = self._say(_SHAPES.get(node.op), node) or []
        for value, dims in zip(node.outputs, shapes):  # noqa: B905  a rule may know fewer
            if dims is None or isinstance(value, gs.Constant):
                continue
            if value.shape is None:
                value.shape = list(dims)
            elif len(value.shape) == len(dims):
                value.shape = [self.names.same(*pair) for pair in zip(value.shape, dims, strict=True)]
        found = self._say(_VALUES.get(node.op), node) if node.outputs else None
        if found is not None and len(found) <= _MOST:
            self._remember(node.outputs[0], found)

    def _say(self, rule: Callable[[_Walk, gs.Node], _Said] | None, node: gs.Node) -> _Said | None:
        """What a rule says of a node; nothing where the node contradicts itself (an axis beyond the rank), which no run gets past."""
        try:
            return None if rule is None else rule(self, node)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return None

    def _remember(self, tensor: gs.Tensor, found: Value) -> None:
        """Values are those of tensors of rank 0 or 1, whose shape they show."""
        dims = query.shape(tensor)
        if dims is None or len(dims) > 1 or (dims and isinstance(dims[0], int) and dims[0] != len(found)):
            return
        if dims:
            tensor.shape = [self.names.same(dims[0], len(found))]
        self.values[id(tensor)] = found

    def _name_all(self, value: gs.Tensor) -> None:
        """A dimension that nothing is known of has a number all the same, and so gets a name of its own."""
        if isinstance(value, gs.Variable) and value.shape is not None and None in value.shape:
            value.shape = [self.names.fresh() if dim is None else dim for dim in value.shape]

    def settle(self, value: gs.Tensor) -> None:
        if isinstance(value, gs.Variable) and value.shape is not None:
            value.shape = [self.names.known(dim) for dim in value.shape]

    # What rules ask.

    def dims(self, node: gs.Node, index: int = 0) -> list[Dim] | None:
        if index >= len(node.inputs) or node.inputs[index].is_empty():
            return None
        found = query.shape(node.inputs[index])
        return None if found is None else [self.names.known(dim) for dim in found]

    def value(self, node: gs.Node, index: int) -> Value | None:
        if index >= len(node.inputs) or node.inputs[index].is_empty():
            return None
        tensor = node.inputs[index]
        if id(tensor) in self.values:
            return [self.names.known(x) if isinstance(x, str) else x for x in self.values[id(tensor)]]
        found = query.shape(tensor)
        if found is None or len(found) > 1 or any(isinstance(dim, int) and dim > _MOST for dim in found):
            return None
        held = query.constant(tensor)
        if held is None:
            return [None] * found[0] if len(found) == 1 and isinstance(found[0], int) and _is_integer(tensor) else None
        return held.reshape(-1).tolist() if held.dtype.kind in "iub" else None

    def numbers(self, node: gs.Node, index: int, attribute: str = "") -> list[int] | None:
        """A list that must be numbers: an input, or the attribute that it was in older versions."""
        if attribute in node.attrs:
            return [int(x) for x in node.attrs[attribute]]
        found = self.value(node, index)
        return None if found is None or not all(type(x) is int for x in found) else found


def _is_integer(value: gs.Tensor) -> bool:
    kind = query.dtype(value)
    return isinstance(kind, np.dtype) and kind.kind in "iu"


def _names(graph: gs.Graph) -> frozenset[str]:
    """Symbols in the shapes of a graph's own tensors."""
    tensors = [*graph.inputs, *(value for node in graph.nodes for value in node.outputs)]
    return frozenset(dim for value in tensors for dim in value.shape or () if isinstance(dim, str))


# ------------------------------------------------------------------------------------------------------ shapes


def _like_first(walk: _Walk, node: gs.Node) -> Shapes:
    return [walk.dims(node)]


def _together(walk: _Walk, all_dims: Sequence[Dims | None]) -> Dims | None:
    if any(dims is None for dims in all_dims):
        return None
    known = [list(dims) for dims in all_dims if dims is not None]
    rank = max(map(len, known), default=0)
    ones: list[list[Dim]] = [[1] * (rank - len(dims)) for dims in known]
    padded = [[*front, *dims] for front, dims in zip(ones, known, strict=True)]
    return [walk.names.broadcast(column) for column in zip(*padded, strict=True)]


def _broadcast(walk: _Walk, node: gs.Node) -> Shapes:
    return [_together(walk, [walk.dims(node, i) for i in range(len(node.inputs))])]


def _residual_norm(walk: _Walk, node: gs.Node) -> Shapes:
    dims = walk.dims(node)
    return [dims, dims]


def _matmul(walk: _Walk, node: gs.Node) -> Shapes:
    a, b = walk.dims(node), walk.dims(node, 1)
    if a is None or b is None or not a or not b:
        return []
    batch = _together(walk, [a[:-2], b[:-2]])
    assert batch is not None
    return [[*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else [])]]


def _gated_matmul(walk: _Walk, node: gs.Node) -> Shapes:
    """Half of the product's columns open the other half."""
    return [[*dims[:-1], dims[-1] // 2 if isinstance(dims[-1], int) else None] for dims in _matmul(walk, node) if dims]


def _gemm(walk: _Walk, node: gs.Node) -> Shapes:
    a, b = walk.dims(node), walk.dims(node, 1)
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return []
    return [[a[1 if node.attrs.get("transA") else 0], b[0 if node.attrs.get("transB") else 1]]]


def _transpose(walk: _Walk, node: gs.Node) -> Shapes:
    dims = walk.dims(node)
    if dims is None:
        return []
    return [[dims[axis] for axis in node.attrs.get("perm") or reversed(range(len(dims)))]]


def _conv(walk: _Walk, node: gs.Node) -> Shapes:
    """Batch and filters, and what a window that moves by one leaves of each axis: all of it where pads make up for the kernel."""
    dims, weight = walk.dims(node), walk.dims(node, 1)
    if dims is None or weight is None or len(dims) != len(weight):
        return []
    count, attrs = len(dims) - 2, node.attrs
    strides, dilations = attrs.get("strides") or [1] * count, attrs.get("dilations") or [1] * count
    pads, auto = attrs.get("pads") or [0] * 2 * count, attrs.get("auto_pad", "NOTSET")
    left: list[Dim] = []
    for i, (dim, kernel) in enumerate(zip(dims[2:], weight[2:], strict=True)):
        if strides[i] != 1 or not isinstance(kernel, int) or auto not in ("NOTSET", "SAME_UPPER", "SAME_LOWER"):
            left.append(None)
        else:
            gained = pads[i] + pads[i + count] - dilations[i] * (kernel - 1)
            left.append(walk.names.plus([dim, gained if auto == "NOTSET" else 0]))
    return [[dims[0], weight[0], *left]]


def _depthwise_norm(walk: _Walk, node: gs.Node) -> Shapes:
    dims = walk.dims(node)
    return [] if dims is None or len(dims) != 4 else [[dims[axis] for axis in (0, 2, 3, 1)]]


def _patches(walk: _Walk, node: gs.Node) -> Shapes:
    dims, patch = walk.dims(node), int(node.attrs.get("patch", 1))
    if dims is None or len(dims) != 4:
        return []
    depth = walk.names.times([dims[3], patch * patch])
    return [[dims[0], walk.names.divided(dims[1], patch), walk.names.divided(dims[2], patch), depth]]


def _squeeze(walk: _Walk, node: gs.Node) -> Shapes:
    dims, axes = walk.dims(node), walk.numbers(node, 1, "axes")
    if dims is None or axes is None:
        return []
    gone = {axis % len(dims) for axis in axes}
    return [[dim for i, dim in enumerate(dims) if i not in gone]]


def _unsqueeze(walk: _Walk, node: gs.Node) -> Shapes:
    dims, axes = walk.dims(node), walk.numbers(node, 1, "axes")
    if dims is None or axes is None:
        return []
    rank = len(dims) + len(axes)
    new, old = {axis % rank for axis in axes}, iter(dims)
    return [[1 if i in new else next(old) for i in range(rank)]]


def _gather(walk: _Walk, node: gs.Node) -> Shapes:
    dims, indices = walk.dims(node), walk.dims(node, 1)
    if dims is None or indices is None:
        return []
    axis = node.attrs.get("axis", 0) % len(dims)
    return [[*dims[:axis], *indices, *dims[axis + 1 :]]]


def _concat(walk: _Walk, node: gs.Node) -> Shapes:
    known = [dims for i in range(len(node.inputs)) if (dims := walk.dims(node, i)) is not None]
    if not known:
        return []
    axis, result = node.attrs["axis"] % len(known[0]), list(known[0])
    for dims in known[1:]:
        result = [a if i == axis else walk.names.same(a, b) for i, (a, b) in enumerate(zip(result, dims, strict=True))]
    result[axis] = walk.names.plus([dims[axis] for dims in known]) if len(known) == len(node.inputs) else None
    return [result]


def _split(walk: _Walk, node: gs.Node) -> Shapes:
    dims, sizes = walk.dims(node), walk.numbers(node, 1, "split")
    if dims is None:
        return []
    axis, count = node.attrs.get("axis", 0) % len(dims), len(node.outputs)
    whole = dims[axis]
    if sizes is None and len(node.inputs) < 2 and isinstance(whole, int) and whole % count == 0:
        sizes = [whole // count] * count
    parts: Sequence[Dim] = sizes if sizes is not None and len(sizes) == count else [None] * count
    return [[*dims[:axis], part, *dims[axis + 1 :]] for part in parts]


def _slice(walk: _Walk, node: gs.Node) -> Shapes:
    dims = walk.dims(node)
    if dims is None:
        return []
    if "starts" in node.attrs:
        starts, ends = list(node.attrs["starts"]), list(node.attrs["ends"])
        axes: list[int] | None = list(node.attrs.get("axes") or range(len(starts)))
        steps: Value | None = [1] * len(starts)
    else:
        count = walk.dims(node, 1)
        if count is None or len(count) != 1 or not isinstance(count[0], int):
            return []
        unknown = [None] * count[0]
        starts, ends = walk.value(node, 1) or unknown, walk.value(node, 2) or unknown
        axes = walk.numbers(node, 3) if len(node.inputs) > 3 and not node.inputs[3].is_empty() else list(range(count[0]))
        steps = walk.value(node, 4) if len(node.inputs) > 4 and not node.inputs[4].is_empty() else [1] * count[0]
    if axes is None:
        return [[None] * len(dims)]
    steps = steps or [None] * len(axes)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        dims[axis % len(dims)] = _sliced(walk, dims[axis % len(dims)], start, end, step)
    return [dims]


def _sliced(walk: _Walk, dim: Dim, start: Any, end: Any, step: Any) -> Dim:
    if dim is None or start is None or end is None or type(step) is not int or step == 0:
        return None
    if type(dim) is int and type(start) is int and type(end) is int:
        return len(range(*slice(start, end, step).indices(dim))) if step > 0 else None
    if start == 0 and step == 1:
        if end == dim or (type(end) is int and end >= _FAR):
            return dim
        if isinstance(dim, int) and isinstance(end, str):
            return walk.names.shorter(dim, end)
    if step == 1 and start == walk.names.minus(dim) and type(end) is int and end >= _FAR:
        return dim  # the last dim elements of dim
    return walk.names.made("slice", dim, start, end, step)


def _reshape(walk: _Walk, node: gs.Node) -> Shapes:
    dims = walk.dims(node)
    target = list(node.attrs["shape"]) if "shape" in node.attrs else walk.value(node, 1)
    if target is None:
        return []
    result: list[Dim] = []
    for i, size in enumerate(target):
        before = dims[i] if dims is not None and i < len(dims) else None
        if node.attrs.get("allowzero", 0) or type(size) is int:
            result.append(before if size == 0 and not node.attrs.get("allowzero", 0) else size)
        elif size is None or dims is None or walk.names.is_signed(size):
            result.append(None)  # it may be -1
        else:  # where it happens to be 0, the dimension is the one before
            same = size == before or i >= len(dims) or walk.names.is_factor(size, before)
            result.append(size if same else None if before is None else walk.names.made("or", size, before))
    if result.count(-1) == 1:
        at = result.index(-1)
        result[at] = None if dims is None else walk.names.quotient(dims, result[:at] + result[at + 1 :])
    return [[None if size is not None and walk.names.is_signed(size) else size for size in result]]


def _expand(walk: _Walk, node: gs.Node) -> Shapes:
    return [_together(walk, [walk.dims(node), walk.value(node, 1)])]


def _of_shape(walk: _Walk, node: gs.Node) -> Shapes:
    return [walk.value(node, 0)]


def _range(walk: _Walk, node: gs.Node) -> Shapes:
    start, limit, delta = (walk.value(node, i) for i in range(3))
    if start != [0] or delta != [1] or not limit or limit[0] is None or walk.names.is_signed(limit[0]):
        return [[None]]
    return [limit]


def _reduce(walk: _Walk, node: gs.Node) -> Shapes:
    dims, axes = walk.dims(node), walk.numbers(node, 1, "axes")
    if dims is None or not axes:
        return []
    gone = {axis % len(dims) for axis in axes}
    if node.attrs.get("keepdims", 1):
        return [[1 if i in gone else dim for i, dim in enumerate(dims)]]
    return [[dim for i, dim in enumerate(dims) if i not in gone]]


def _window(walk: _Walk, node: gs.Node) -> Shapes:
    """Conv and pools: batch and channels; a spatial dimension is a function of the one before, the same for the same attributes."""
    dims, weight = walk.dims(node), walk.dims(node, 1)
    if dims is None or len(dims) < 3:
        return []
    kernel = node.attrs.get("kernel_shape") or (weight[2:] if weight else None)
    if kernel is None or (node.op == "Conv" and weight is None):
        return []
    said = [node.attrs.get(name) for name in ("auto_pad", "ceil_mode")]
    result: list[Dim] = [dims[0], weight[0] if node.op == "Conv" and weight else dims[1]]
    rank = len(dims) - 2
    pads = node.attrs.get("pads") or [0] * 2 * rank
    for i, dim in enumerate(dims[2:]):
        stride, dilation = ((node.attrs.get(name) or [1] * rank)[i] for name in ("strides", "dilations"))
        key = (kernel[i], stride, dilation, pads[i], pads[i + rank], *map(str, said))
        result.append(None if dim is None or isinstance(dim, int) else walk.names.made("window", dim, *key))
    return [result]


def _resize(walk: _Walk, node: gs.Node) -> Shapes:
    return [walk.value(node, 3)] if "axes" not in node.attrs and node.attrs.get("keep_aspect_ratio_policy", "stretch") == "stretch" else []


def _if(walk: _Walk, node: gs.Node) -> Shapes:
    bodies = [held for held in node.attrs.values() if isinstance(held, gs.Graph)]
    result: Shapes = []
    for pair in zip(*(body.outputs for body in bodies), strict=True):
        one, other = (query.shape(value) for value in pair)
        if one is None or other is None or len(one) != len(other):
            result.append(None)
        else:
            known = [(walk.names.known(a), walk.names.known(b)) for a, b in zip(one, other, strict=True)]
            result.append([a if a == b else None for a, b in known])
    return result


def _out_of_body(walk: _Walk, value: gs.Tensor) -> list[Dim] | None:
    """Shape of a body's output, without the names that mean another number in each iteration."""
    dims = query.shape(value)
    known = None if dims is None else [walk.names.known(dim) for dim in dims]
    return None if known is None else [dim if isinstance(dim, int) or (dim is not None and dim in walk.scope) else None for dim in known]


def _carried(walk: _Walk, node: gs.Node, index: int, given: gs.Tensor, result: gs.Tensor) -> Dims | None:
    """Shape of a value that a loop carries, where no iteration changes it."""
    start, inner = walk.dims(node, index), query.shape(given)
    unchanged = start is not None and None not in start and start == inner == query.shape(result)
    return start if unchanged else None


def _loop(walk: _Walk, node: gs.Node) -> Shapes:
    body, count = node.attrs["body"], len(node.inputs) - 2
    carried = [_carried(walk, node, 2 + i, body.inputs[2 + i], body.outputs[1 + i]) for i in range(count)]
    stacked = [_out_of_body(walk, value) for value in body.outputs[1 + count :]]
    return [*carried, *(None if dims is None else [None, *dims] for dims in stacked)]


def _scan(walk: _Walk, node: gs.Node) -> Shapes:
    if walk.opset < 9:  # which had a batch axis before the others
        return []
    body, count = node.attrs["body"], len(node.inputs) - node.attrs["num_scan_inputs"]
    result: Shapes = [_carried(walk, node, i, body.inputs[i], body.outputs[i]) for i in range(count)]
    scanned = walk.dims(node, count)
    along = (node.attrs.get("scan_input_axes") or [0])[0]
    length = None if scanned is None else scanned[along]
    for i, value in enumerate(body.outputs[count:]):
        dims = _out_of_body(walk, value)
        if dims is not None:
            axis = (node.attrs.get("scan_output_axes") or [0] * (i + 1))[i] % (len(dims) + 1)
            dims.insert(axis, length)
        result.append(dims)
    return result


# ------------------------------------------------------------------------------------------------------ values


def _shape_value(walk: _Walk, node: gs.Node) -> Value | None:
    dims = walk.dims(node)
    return None if dims is None else dims[node.attrs.get("start", 0) : node.attrs.get("end")]


def _same_value(walk: _Walk, node: gs.Node) -> Value | None:
    return walk.value(node, 0) if _is_integer(node.outputs[0]) else None


def _gather_value(walk: _Walk, node: gs.Node) -> Value | None:
    data, indices, dims = walk.value(node, 0), walk.numbers(node, 1), walk.dims(node)
    if data is None or indices is None or dims is None or len(dims) != 1 or not all(-len(data) <= i < len(data) for i in indices):
        return None
    return [data[i] for i in indices]


def _slice_value(walk: _Walk, node: gs.Node) -> Value | None:
    data, dims = walk.value(node, 0), walk.dims(node)
    if data is None or dims is None or len(dims) != 1:
        return None
    start, end = walk.numbers(node, 1, "starts"), walk.numbers(node, 2, "ends")
    step = walk.numbers(node, 4) if len(node.inputs) > 4 and not node.inputs[4].is_empty() else [1]
    if not start or not end or not step or len(start) != 1 or step[0] < 1:
        return None
    return data[start[0] : end[0] : step[0]]


def _concat_value(walk: _Walk, node: gs.Node) -> Value | None:
    parts = [walk.value(node, i) for i in range(len(node.inputs))]  # of rank 1, as all values are
    return None if any(part is None for part in parts) else [x for part in parts if part is not None for x in part]


def _filled_value(walk: _Walk, node: gs.Node) -> Value | None:
    count, fill = walk.numbers(node, 0), node.attrs.get("value")
    held = None if fill is None else query.constant(fill)
    if not count or len(count) != 1 or not 0 <= count[0] <= _MOST or held is None or held.dtype.kind not in "iu":
        return None
    values: Value = held.reshape(-1).tolist()
    return values * count[0]


def _pairs(walk: _Walk, node: gs.Node) -> list[tuple[Any, Any]] | None:
    """Elements of two inputs, one of which may be a single one."""
    a, b = walk.value(node, 0), walk.value(node, 1)
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    size = max(len(a), len(b))
    return list(zip(a * (size if len(a) == 1 else 1), b * (size if len(b) == 1 else 1), strict=True))


def _arithmetic(of_dims: Callable[[Names, Any, Any], Any]) -> Callable[[_Walk, gs.Node], Value | None]:
    def follow(walk: _Walk, node: gs.Node) -> Value | None:
        pairs = _pairs(walk, node) if _is_integer(node.outputs[0]) else None
        return None if pairs is None else [None if a is None or b is None else of_dims(walk.names, a, b) for a, b in pairs]

    return follow


def _equal_value(walk: _Walk, node: gs.Node) -> Value | None:
    pairs = _pairs(walk, node)
    return None if pairs is None else [_equal(walk.names, a, b) for a, b in pairs]


def _equal(names: Names, a: Any, b: Any) -> bool | None:
    if a is None or b is None:
        return None
    if a == b:
        return True
    if isinstance(a, int) and isinstance(b, int):
        return False
    number, other = (a, b) if isinstance(a, int) else (b, a)
    return False if isinstance(number, int) and number < 0 and not names.is_signed(other) else None


def _negative_value(walk: _Walk, node: gs.Node) -> Value | None:
    found = walk.value(node, 0) if _is_integer(node.outputs[0]) else None
    return None if found is None else [None if x is None else walk.names.minus(x) for x in found]


def _where_value(walk: _Walk, node: gs.Node) -> Value | None:
    chosen, a, b = (walk.value(node, i) for i in range(3))
    if chosen is None or a is None or b is None:
        return None
    size = max(map(len, (chosen, a, b)))
    if any(len(part) not in (1, size) for part in (chosen, a, b)):
        return None
    chosen, a, b = (part * (size if len(part) == 1 else 1) for part in (chosen, a, b))
    return [x if c is True else y if c is False else x if x == y else None for c, x, y in zip(chosen, a, b, strict=True)]


_UNCHANGED = """
    Abs BatchNormalization BiasGelu BiasGeluTanh BiasQuickGelu Cast CastLike Ceil Celu Clip Cos CumSum DepthwiseConvLayerNormLast
    DequantizeLinear Dropout DynamicQuantizeLinear Elu Erf Exp FilmGroupNorm FilmGroupNormSilu Floor Gelu GeluTanh GroupNorm
    GroupNormSilu GroupNormalization HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization
    LeakyRelu Log LogSoftmax LpNormalization MeanVarianceNormalization Mish Neg Not PRelu QuantizeLinear QuickGelu RMSNormalization
    Reciprocal Relu Round ScatterElements ScatterND Selu Shrink Sigmoid Sign Silu Sin Softmax Softplus Softsign Sqrt Swish Tanh
    ThresholdedRelu Trilu
""".split()  # noqa: SIM905
_BROADCASTING = """
    Add And BitwiseAnd BitwiseOr Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or Pow Sub Sum Where Xor
""".split()  # noqa: SIM905
_REDUCTIONS = """
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
""".split()  # noqa: SIM905

_SHAPES: dict[str, Callable[[_Walk, gs.Node], Shapes]] = {
    **dict.fromkeys(_UNCHANGED, _like_first),
    **dict.fromkeys(_BROADCASTING, _broadcast),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("SkipLayerNormalization", "SkipRMSNormalization"), _residual_norm),
    **dict.fromkeys(("MatMul", "MatMulInteger"), _matmul),
    **dict.fromkeys(("LinearGelu", "LinearGeluTanh", "LinearQuickGelu", "LinearRelu", "LinearResidual", "LinearSilu"), _matmul),
    "PatchLinear": _matmul,
    **dict.fromkeys(("LayerNormPatches", "LayerNormPatchesCropped"), _patches),
    **dict.fromkeys(("LinearGeglu", "LinearGegluTanh", "LinearQuickGeglu", "LinearReglu", "LinearSwiglu"), _gated_matmul),
    **dict.fromkeys(("Conv", "ConvInteger", "AveragePool", "MaxPool"), _window),
    "Concat": _concat,
    "ConstantOfShape": _of_shape,
    **dict.fromkeys(("DepthwiseConvLayerNorm", "LayerNormPlanes"), _depthwise_norm),
    "Expand": _expand,
    "Gather": _gather,
    "Conv": _conv,
    "Gemm": _gemm,
    "If": _if,
    "LinearLayerNorm": lambda walk, node: _matmul(walk, node) * 2,
    "Loop": _loop,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Scan": _scan,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}

_VALUES: dict[str, Callable[[_Walk, gs.Node], Value | None]] = {
    "Add": _arithmetic(lambda names, a, b: names.plus([a, b])),
    "Cast": _same_value,
    "Concat": _concat_value,
    "ConstantOfShape": _filled_value,
    "Div": _arithmetic(Names.divided),
    "Equal": _equal_value,
    "Gather": _gather_value,
    "Identity": _same_value,
    "Neg": _negative_value,
    "Mul": _arithmetic(lambda names, a, b: names.times([a, b])),
    "Reshape": _same_value,
    "Shape": _shape_value,
    "Slice": _slice_value,
    "Squeeze": _same_value,
    "Sub": _arithmetic(Names.less),
    "Unsqueeze": _same_value,
    "Where": _where_value,
}
