"""Where the heads of an attention come from: the tensor behind the transposes, scales and repetitions that lead to a product.

What is passed over only changes how a tensor is read, so nothing is asked of other readers: they keep what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxfuse.fusions.pattern import STANDARD
from onnxfuse.graph import query

Perm = tuple[int, ...]
HEADS_FIRST: Perm = (0, 1, 2, 3)
ROWS_FIRST: Perm = (0, 2, 1, 3)
_TURNED: Perm = (0, 1, 3, 2)
# Of [batch * heads, rows, size].
FLAT: Perm = (0, 1, 2)
FLAT_ROWS_FIRST: Perm = (1, 0, 2)
_FLAT_TURNED: Perm = (0, 2, 1)
_LONGEST = 12  # nodes


@dataclass(frozen=True)
class View:
    """Four axes of a tensor of three: what its Reshape is told, and the extents that it makes."""

    target: tuple[int, int, int, int]
    extents: tuple[int | str | None, ...]


@dataclass(frozen=True, eq=False)
class Heads:
    """`value`, whose axes in the order of `perm` are [batch, heads, rows, size], times `scale`; each of its heads stands for `repeats`.

    A value of three axes has a `view`, or is on the way to where its four axes are: [batch * heads, rows, size] in the order of `perm`.
    """

    value: gs.Tensor
    perm: Perm
    scale: float = 1.0
    repeats: int = 1
    view: View | None = None

    def extent(self, axis: int) -> int | str | None:
        """Of batch 0, heads 1, rows 2 or size 3."""
        if self.view is not None:
            return self.view.extents[self.perm[axis]]
        dims = query.shape(self.value)
        known = dims[self.perm[axis]] if dims is not None and len(dims) == 4 else None
        return _from_target(self.value, self.perm[axis]) if not isinstance(known, int) and axis in (1, 3) else known

    def number(self, axis: int) -> int | None:
        """The same where it is a known number."""
        extent = self.extent(axis)
        return extent if isinstance(extent, int) else None

    def known(self, axis: int) -> int:
        """The same where a check has made sure of it."""
        number = self.number(axis)
        assert number is not None
        return number


def find(value: gs.Tensor, transposed: bool = False) -> Heads | None:
    """What `value` [batch, heads, rows, size] is made of; `transposed`: [batch, heads, size, rows]. None where its axes lie otherwise."""
    return _walked(Heads(value, _TURNED if transposed else HEADS_FIRST))[0]


def find_apart(value: gs.Tensor, transposed: bool = False) -> Heads | None:
    """What `value` [batch * heads, rows, size] is made of where batch and heads are still apart; None where they never were."""
    return _walked(Heads(value, _FLAT_TURNED if transposed else FLAT))[0]


def find_together(value: gs.Tensor, transposed: bool = False) -> Heads | None:
    """`value` [batch * heads, rows, size], a known number of them, as the heads of one batch entry."""
    flat = _walked(Heads(value, _FLAT_TURNED if transposed else FLAT))[1]
    dims = None if flat is None else query.shape(flat.value)
    if flat is None or dims is None or len(dims) != 3:
        return None
    many, rows, size = (dims[axis] for axis in flat.perm)
    if not isinstance(many, int) or not isinstance(size, int):
        return None
    if flat.perm == FLAT:
        return replace(flat, perm=HEADS_FIRST, view=View((1, many, -1, size), (1, many, rows, size)))
    return replace(flat, perm=ROWS_FIRST, view=View((1, -1, many, size), (1, rows, many, size)))


def side_by_side(value: gs.Tensor, heads: int) -> Heads | None:
    """`value` [batch, rows, heads * size]."""
    dims = query.shape(value)
    if dims is None or len(dims) != 3 or not isinstance(dims[2], int) or heads < 1 or dims[2] % heads:
        return None
    size = dims[2] // heads
    return Heads(value, ROWS_FIRST, view=View((0, 0, heads, size), (dims[0], dims[1], heads, size)))


def same(one: int | str | None, other: int | str | None) -> bool:
    """Whether two extents are proved to be the same."""
    return one is not None and one == other


def joins(apart: gs.Tensor, together: gs.Tensor) -> bool:
    """Whether a Reshape between [batch, heads, rows, columns] and [batch * heads, rows, columns] keeps rows and columns."""
    four, three = query.shape(apart), query.shape(together)
    if four is None or three is None or (len(four), len(three)) != (4, 3):
        return False
    return same(four[2], three[1]) and same(four[3], three[2])


def _walked(at: Heads) -> tuple[Heads | None, Heads | None]:
    """The last tensor on the way whose four axes lie as the plugin reads them, and the last of three."""
    apart = together = None
    for _ in range(_LONGEST):
        if at.perm in (HEADS_FIRST, ROWS_FIRST):
            apart = at
        elif at.perm in (FLAT, FLAT_ROWS_FIRST):
            together = at
        before = _before(at)
        if before is None:
            break
        at = before
    return apart, together


def _before(at: Heads) -> Heads | None:
    node = _producer(at.value)
    if node is None:
        return None
    if node.op == "Transpose":
        perm = node.attrs.get("perm")
        return (
            None
            if perm is None or len(perm) != len(at.perm)
            else replace(at, value=node.inputs[0], perm=tuple(perm[axis] for axis in at.perm))
        )
    if node.op == "Identity":
        return replace(at, value=node.inputs[0])
    if node.op in ("Mul", "Div"):
        return _scaled(at, node)
    if node.op == "Reshape":
        return _lifted(at, node) if len(at.perm) == 3 else _turned_by_reshape(at, node) or _repeated(at, node)
    return None


def _lifted(at: Heads, node: gs.Node) -> Heads | None:
    """[batch, heads, rows, size] where a Reshape makes three axes of it."""
    given = query.shape(node.inputs[0])
    if at.perm not in (FLAT, _FLAT_TURNED) or given is None or len(given) != 4 or not isinstance(given[1], int):
        return None
    if not joins(node.inputs[0], node.outputs[0]):
        return None
    return replace(at, value=node.inputs[0], perm=HEADS_FIRST if at.perm == FLAT else _TURNED)


def _scaled(at: Heads, node: gs.Node) -> Heads | None:
    for place in (1, 0) if node.op == "Mul" else (1,):
        factor, other = _number(node.inputs[place]), node.inputs[1 - place]
        if factor and query.rank(other) == len(at.perm) >= (query.rank(node.inputs[place]) or 0):
            return replace(at, value=other, scale=at.scale * factor if node.op == "Mul" else at.scale / factor)
    return None


def _number(value: gs.Tensor) -> float | None:
    """A constant of one element, cast or not."""
    node = _producer(value)
    return query.scalar(node.inputs[0] if node is not None and node.op in ("Cast", "CastLike") else value)


def _turned_by_reshape(at: Heads, node: gs.Node) -> Heads | None:
    """Reshape to [batch * heads, rows, size], Transpose of the last two, Reshape back."""
    middle = _producer(node.inputs[0])
    if middle is None or middle.op != "Transpose" or list(middle.attrs.get("perm") or ()) != [0, 2, 1]:
        return None
    first = _producer(middle.inputs[0])
    if first is None or first.op != "Reshape":
        return None
    given, made = query.shape(first.inputs[0]), query.shape(node.outputs[0])
    if given is None or made is None or len(given) != 4 or len(made) != 4 or not isinstance(given[1], int):
        return None
    straight = joins(first.inputs[0], first.outputs[0]) and same(made[1], given[1])
    if not straight or not same(made[2], given[3]) or not same(made[3], given[2]):
        return None
    return replace(at, value=first.inputs[0], perm=tuple(_TURNED[axis] for axis in at.perm))


def _repeated(at: Heads, node: gs.Node) -> Heads | None:
    """[batch, heads, rows, size] unsqueezed at 2, expanded there, and reshaped to more heads."""
    expand = _producer(node.inputs[0])
    if expand is None or expand.op not in ("Expand", "Tile") or at.repeats != 1:
        return None
    unsqueeze = _producer(expand.inputs[0])
    if unsqueeze is None or unsqueeze.op not in ("Unsqueeze", "Reshape"):
        return None
    given, wide, many, made = (
        query.shape(value) for value in (unsqueeze.inputs[0], unsqueeze.outputs[0], expand.outputs[0], node.outputs[0])
    )
    if given is None or wide is None or made is None or (len(given), len(wide), len(made)) != (4, 5, 4):
        return None
    repeats = many[2] if many is not None and len(many) == 5 else None
    heads, more = given[1], made[1]
    if repeats is None and isinstance(heads, int) and isinstance(more, int) and heads and more % heads == 0:
        repeats = more // heads
    if not isinstance(repeats, int) or not isinstance(heads, int) or more != heads * repeats:
        return None
    # Nothing else grows: the batch, rows and size that come out are those that went in.
    straight = wide[1] == heads and wide[2] == 1 and all(same(wide[axis + (axis > 1)], given[axis]) for axis in (0, 2, 3))
    kept = all(same(made[axis], given[axis]) for axis in (0, 2, 3))
    return replace(at, value=unsqueeze.inputs[0], repeats=repeats) if straight and kept else None


def packed(q: Heads, k: Heads, v: Heads) -> gs.Tensor | None:
    """The tensor [batch, rows, ...] in which q, k and v lie side by side, in this order and with nothing else; None where there is none."""
    return _of_split(q, k, v) or _of_axis(q, k, v)


def _of_split(*parts: Heads) -> gs.Tensor | None:
    """Split of the last axis of [batch, rows, width], and each part reshaped to heads."""
    source: gs.Node | None = None
    for place, part in enumerate(parts):
        flat = _side_by_side(part)
        if part.perm != ROWS_FIRST or flat is None:
            return None
        dims, heads, size = query.shape(flat), part.number(1), part.number(3)
        split = _producer(flat, every=True)
        if split is None or split.op != "Split" or len(split.outputs) != 3 or split.outputs[place] is not flat or dims is None:
            return None
        if len(dims) != 3 or heads is None or size is None or dims[2] != heads * size or split.attrs.get("axis", 0) not in (-1, 2):
            return None
        if not same(part.extent(2), dims[1]) and not same(part.extent(0), dims[0]):
            return None
        if source is not None and split is not source:
            return None
        source = split
    return None if source is None else source.inputs[0]


def _side_by_side(part: Heads) -> gs.Tensor | None:
    """The tensor [batch, rows, heads * size] whose Reshape `part` is."""
    if part.view is not None:
        return part.value if part.view.target[:2] == (0, 0) else None
    reshape = _producer(part.value)
    return reshape.inputs[0] if reshape is not None and reshape.op == "Reshape" else None


def _of_axis(*parts: Heads) -> gs.Tensor | None:
    """[batch, rows, 3, heads, size] with its axes turned, and one of the three taken for each part."""
    source: gs.Tensor | None = None
    for place, part in enumerate(parts):
        found = taken(part.value)
        if part.perm != HEADS_FIRST or found is None or found[1:] != (place, 0):
            return None
        if source is not None and found[0] is not source:
            return None
        source = found[0]
    node = None if source is None else _producer(source)
    if node is None or node.op != "Transpose" or list(node.attrs.get("perm") or ()) != [2, 0, 3, 1, 4]:
        return None
    dims = query.shape(node.inputs[0])
    q, k, v = parts
    sizes = {(part.number(1), part.number(3)) for part in (q, k, v)}
    return node.inputs[0] if dims is not None and len(dims) == 5 and dims[2] == 3 and len(sizes) == 1 else None


def taken(value: gs.Tensor) -> tuple[gs.Tensor, int, int] | None:
    """(tensor, place, axis) where `value` is one place of a tensor along one axis, which it has no more."""
    node = _producer(value)
    if node is None:
        return None
    if node.op == "Gather":
        place = query.constant(node.inputs[1])
        single = place is not None and place.shape == ()
        return (node.inputs[0], int(place), int(node.attrs.get("axis", 0))) if single and place is not None else None
    split = _producer(node.inputs[0], every=True) if node.op in ("Squeeze", "Reshape") else None
    if split is None or split.op != "Split":
        return None
    axis = int(split.attrs.get("axis", 0))
    dims, before = query.shape(value), query.shape(node.inputs[0])
    if before is None or dims is None or len(before) != len(dims) + 1 or before[axis] != 1:
        return None
    if node.op == "Squeeze":
        axes = query.constant(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("axes")
        if axes is None or [int(a) % len(before) for a in axes] != [axis % len(before)]:
            return None
    elif not all(same(one, other) for one, other in zip([*before[:axis], *before[axis + 1 :]], dims, strict=True)):
        return None
    number = next(i for i, made in enumerate(split.outputs) if made is node.inputs[0])
    return split.inputs[0], number, axis


def _producer(value: gs.Tensor, every: bool = False) -> gs.Node | None:
    """The node of the standard domain whose first output `value` is; with `every`, any of its outputs."""
    node = value.inputs[0] if len(value.inputs) == 1 else None
    if node is None or node.domain not in STANDARD or not (every or node.outputs[0] is value):
        return None
    return node


def _from_target(value: gs.Tensor, axis: int) -> int | None:
    """An extent that a Reshape is told, where shape inference does not know it."""
    node = _producer(value)
    if node is None or node.op != "Reshape" or len(node.inputs) < 2:
        return None
    target: Sequence[int] | None = None
    known = query.constant(node.inputs[1])
    if known is not None:
        target = [int(extent) for extent in known.reshape(-1)]
        found = target[axis] if len(target) == 4 else 0
        return found if found > 0 else None
    concat = _producer(node.inputs[1])
    if concat is None or concat.op != "Concat" or len(concat.inputs) != 4:
        return None
    part = query.scalar(concat.inputs[axis])
    return int(part) if part is not None and part > 0 else None
