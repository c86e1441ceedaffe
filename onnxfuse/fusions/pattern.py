"""The matcher: patterns over onnx-graphsurgeon tensors, matched from a root node towards its inputs.

It knows what a graph pattern of the library does not: operands of commutative operators in either order, alternatives, operators
that may be there or not, constants compared in the precision they are stored in, and, where nothing matches, the nearest miss.

    x = tensor("x")
    mean = op("ReduceMean", x, rest=True, out="mean")
    centered = op("Sub", x, mean, out="centered")

A pattern object that is used twice must match the same tensor twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import query
from onnxfuse.graph.model import DOMAIN as DOMAIN

COMMUTATIVE = frozenset({"Add", "Mul", "And", "Or", "Xor", "Max", "Min", "Sum", "Equal"})
STANDARD = ("", None, "ai.onnx")
# Relative distance at which a stored constant is the one meant: the rounding of its own type, and for float32 and wider the
# 1e-6 by which exporters that print seven digits differ. What a narrow type holds exactly (0.5, 1, 2) has no rounding.
_CONSTANT_RTOL = {2: 2.0**-10, 4: 1e-6, 8: 1e-6}
_BFLOAT16_RTOL = 2.0**-7
# How many tensors `through` looks at: a longer way leads out of what a pattern is about, along the residual sums of a whole network.
_MOST_THROUGH = 24


class Pattern:
    """Anything that can be asked of a tensor."""


@dataclass(frozen=True, eq=False)
class AnyTensor(Pattern):
    """Any tensor that is there; the same name means the same tensor."""

    name: str


@dataclass(frozen=True, eq=False)
class Const(Pattern):
    """A constant; with `value`, a one-element constant of that value (rank 0 or more)."""

    name: str
    value: float | None


@dataclass(frozen=True, eq=False)
class Op(Pattern):
    """Output `place` of a node of one of `types`, or with `part` any of its outputs, whose inputs match `inputs`.

    `rest` allows further inputs (the axes of a reduction). A `context` node is needed for the match but is not part of
    the fusion: it stays, and what it computes may have other readers.
    """

    types: tuple[str, ...]
    inputs: tuple[Pattern, ...]
    out: str | None
    rest: bool
    context: bool
    domains: tuple[str | None, ...]
    place: int = 0
    part: bool = False


@dataclass(frozen=True, eq=False)
class Either(Pattern):
    """The first of several patterns that leads to a whole match."""

    choices: tuple[Pattern, ...]


@dataclass(frozen=True, eq=False)
class Through(Pattern):
    """`inner`, reached through any number of nodes of `types` along any of their run-time inputs, which are context."""

    types: frozenset[str]
    inner: Pattern


def tensor(name: str) -> AnyTensor:
    return AnyTensor(name)


def const(name: str, value: float | None = None) -> Const:
    return Const(name, value)


def op(
    types: str | tuple[str, ...], *inputs: Pattern, out: str | None = None, rest: bool = False, context: bool = False, place: int = 0
) -> Op:
    """A node of the standard domain."""
    return Op((types,) if isinstance(types, str) else types, inputs, out, rest, context, STANDARD, place)


def part(type_: str, *inputs: Pattern, out: str | None = None) -> Op:
    """Any output of a node of the standard domain, further inputs allowed: a part of a Split."""
    return Op((type_,), inputs, out, True, False, STANDARD, part=True)


def canonical(type_: str, *inputs: Pattern, out: str | None = None, rest: bool = False) -> Op:
    """A node that canonising writes: of the standard domain where the opset has it, of onnxfuse's otherwise."""
    return Op((type_,), inputs, out, rest, False, (*STANDARD, DOMAIN))


def either(*choices: Pattern) -> Either:
    return Either(choices)


def maybe(types: str | tuple[str, ...], inner: Pattern) -> Either:
    """`inner`, with or without a one-input node of `types` behind it."""
    return Either((inner, op(types, inner)))


def through(types: Sequence[str], inner: Pattern) -> Through:
    return Through(frozenset(types), inner)


@dataclass(frozen=True)
class NearMiss:
    """Where the best attempt at one root ended: nodes matched so far, the node or tensor in question, and why it is not it."""

    nodes: tuple[gs.Node, ...]
    at: gs.Node | None
    reason: str
    value: Any


@dataclass(frozen=True)
class Found:
    """A structural match: tensors by name, the nodes that the fusion replaces, and those only looked at."""

    tensors: dict[str, gs.Tensor]
    nodes: tuple[gs.Node, ...]
    context: tuple[gs.Node, ...]


@dataclass
class _State:
    tensors: dict[str, gs.Tensor] = field(default_factory=dict)
    ops: dict[int, gs.Tensor] = field(default_factory=dict)
    nodes: dict[int, gs.Node] = field(default_factory=dict)
    context: dict[int, gs.Node] = field(default_factory=dict)

    def extended(self) -> _State:
        return _State(dict(self.tensors), dict(self.ops), dict(self.nodes), dict(self.context))

    def bound(self, name: str | None, value: gs.Tensor) -> _State | None:
        """This state with `name` standing for `value`; None where it stands for another tensor already."""
        if name is None:
            return self
        known = self.tensors.get(name)
        if known is value:
            return self
        if known is not None:
            return None
        state = self.extended()
        state.tensors[name] = value
        return state


def producer(value: gs.Tensor) -> gs.Node | None:
    return value.inputs[0] if value.inputs else None


@cache
def root_types(pattern: Pattern) -> frozenset[str]:
    """Operator types that a root node of `pattern` can have."""
    if isinstance(pattern, Op):
        return frozenset(pattern.types)
    if isinstance(pattern, Either):
        return frozenset().union(*(root_types(choice) for choice in pattern.choices))
    raise TypeError(f"a pattern must start with an operator, not {type(pattern).__name__}")


@cache
def leaf_names(pattern: Pattern) -> frozenset[str]:
    """Names of the tensors that a match starts from: all but those of operators' results."""
    if isinstance(pattern, (AnyTensor, Const)):
        return frozenset((pattern.name,))
    if isinstance(pattern, Op):
        return frozenset().union(*map(leaf_names, pattern.inputs))
    if isinstance(pattern, Either):
        return frozenset().union(*map(leaf_names, pattern.choices))
    return leaf_names(pattern.inner) if isinstance(pattern, Through) else frozenset()


@cache
def least_nodes(pattern: Pattern) -> int:
    """How many nodes the smallest match of `pattern` has, counting a node that is used twice each time."""
    if isinstance(pattern, Op):
        return 1 + sum(least_nodes(given) for given in pattern.inputs)
    if isinstance(pattern, Either):
        return min(least_nodes(choice) for choice in pattern.choices)
    return least_nodes(pattern.inner) if isinstance(pattern, Through) else 0


@cache
def makers(pattern: Pattern) -> frozenset[str] | None:
    """Operator types that a tensor which matches `pattern` can come from; None where it need not come from a certain one."""
    if isinstance(pattern, Op):
        return frozenset(pattern.types)
    if not isinstance(pattern, Either):
        return None
    choices = [makers(choice) for choice in pattern.choices]
    return None if None in choices else frozenset().union(*(types for types in choices if types is not None))


def fits(pattern: Pattern, value: gs.Tensor) -> bool:
    """Whether `value` may match, as far as the operator that it comes from tells."""
    types = makers(pattern)
    return types is None or (bool(value.inputs) and value.inputs[0].op in types)


def leads_in(pattern: Pattern, root: gs.Node) -> bool:
    """Whether an attempt at `root` gets beyond it: to a first operand of the operator that `pattern` wants there."""
    if isinstance(pattern, Either):
        return any(leads_in(choice, root) for choice in pattern.choices)
    if not isinstance(pattern, Op) or root.op not in pattern.types:
        return False
    first = root.inputs[: 2 if root.op in COMMUTATIVE and len(root.inputs) == 2 else 1]
    return not pattern.inputs or any(fits(pattern.inputs[0], value) for value in first)


class Matcher:
    """One attempt at one root. `miss` tells how far it got."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self._best: tuple[tuple[int, bool], _State, gs.Node | None, str, Any] | None = None

    def match(self, root: gs.Tensor) -> Iterator[Found]:
        for state in self._tensor(self.pattern, root, _State()):
            yield Found(state.tensors, tuple(state.nodes.values()), tuple(state.context.values()))

    @property
    def miss(self) -> NearMiss | None:
        if self._best is None:
            return None
        _, state, at, reason, value = self._best
        return NearMiss((*state.nodes.values(), *state.context.values()), at, reason, value)

    def _fail(self, state: _State, at: gs.Node | None, reason: str, value: Any = None, number: bool = False) -> None:
        # Of two attempts that got equally far, one that failed at the value of a constant says more.
        progress = (len(state.nodes) + len(state.context), number)
        if self._best is None or progress > self._best[0]:
            self._best = (progress, state, at, reason, value)

    def _tensor(self, pattern: Pattern, value: gs.Tensor, state: _State) -> Iterator[_State]:
        if isinstance(pattern, AnyTensor):
            yield from self._any(pattern, value, state)
        elif isinstance(pattern, Const):
            yield from self._const(pattern, value, state)
        elif isinstance(pattern, Either):
            # Where some choices can match, the others have nothing to say.
            for choice in [choice for choice in pattern.choices if fits(choice, value)] or pattern.choices:
                yield from self._tensor(choice, value, state)
        elif isinstance(pattern, Through):
            yield from self._through(pattern, value, state)
        else:
            assert isinstance(pattern, Op)
            yield from self._op(pattern, value, state)

    def _any(self, pattern: AnyTensor, value: gs.Tensor, state: _State) -> Iterator[_State]:
        if value.is_empty():
            self._fail(state, None, f"optional input '{pattern.name}' is absent")
            return
        bound = state.bound(pattern.name, value)
        if bound is None:
            self._fail(state, producer(value), f"'{pattern.name}' is two different tensors", value.name)
        else:
            yield bound

    def _const(self, pattern: Const, value: gs.Tensor, state: _State) -> Iterator[_State]:
        if pattern.value is None:
            if query.is_constant(value):
                bound = state.bound(pattern.name, value)
                if bound is not None:
                    yield bound
                return
            self._fail(state, producer(value), f"'{pattern.name}' is computed at run time", value.name)
            return
        number = query.scalar(value)
        if number is None:
            self._fail(state, producer(value), f"'{pattern.name}' is no one-element constant", value.name)
        elif not is_close(number, pattern.value, value):
            self._fail(state, producer(value), f"constant '{pattern.name}' is not {pattern.value:.9g}", number, number=True)
        else:
            bound = state.bound(pattern.name, value)
            # Two constants of one value are one constant to a pattern, whatever tensors hold them.
            yield state if bound is None else bound

    def _through(self, pattern: Through, value: gs.Tensor, state: _State) -> Iterator[_State]:
        seen: set[int] = set()
        pending = [(value, state)]
        while pending and len(seen) < _MOST_THROUGH:
            value, state = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield from self._tensor(pattern.inner, value, state)
            node = producer(value)
            if node is None or node.op not in pattern.types or node.domain not in STANDARD:
                continue
            state = state.extended()
            state.context[id(node)] = node
            runtime = [given for given in node.inputs if not given.is_empty() and not query.is_constant(given)]
            pending.extend((given, state) for given in reversed(runtime))

    def _op(self, pattern: Op, value: gs.Tensor, state: _State) -> Iterator[_State]:
        known = state.ops.get(id(pattern))
        if known is not None:
            if known is value:
                yield state
            else:
                self._fail(state, producer(value), f"'{pattern.out or pattern.types[0]}' is two different tensors", value.name)
            return
        node = producer(value)
        if node is None:
            self._fail(state, None, f"'{value.name}' is {_origin(value)}, not the result of {' or '.join(pattern.types)}", value.name)
            return
        if node.op not in pattern.types or node.domain not in pattern.domains:
            self._fail(state, node, f"'{value.name}' comes from {node.op}, not from {' or '.join(pattern.types)}", node.op)
            return
        if not pattern.part and (len(node.outputs) <= pattern.place or node.outputs[pattern.place] is not value):
            which = f"output {pattern.place}" if pattern.place else "the first output"
            self._fail(state, node, f"'{value.name}' is not {which} of {node.op}", value.name)
            return
        given = len(node.inputs)
        while given > len(pattern.inputs) and node.inputs[given - 1].is_empty():
            given -= 1
        if given < len(pattern.inputs) or (given > len(pattern.inputs) and not pattern.rest):
            self._fail(state, node, f"{node.op} has {given} inputs, not {len(pattern.inputs)}", given)
            return
        bound = state.bound(pattern.out, value)
        if bound is None:
            self._fail(state, node, f"'{pattern.out}' is two different tensors", value.name)
            return
        entered = bound.extended()
        entered.ops[id(pattern)] = value
        (entered.context if pattern.context else entered.nodes)[id(node)] = node
        inputs = node.inputs[: len(pattern.inputs)]
        for values in _orders(pattern, node, inputs):
            yield from self._inputs(pattern.inputs, values, entered)

    def _inputs(self, patterns: Sequence[Pattern], values: Sequence[gs.Tensor], state: _State) -> Iterator[_State]:
        if not patterns:
            yield state
            return
        for after in self._tensor(patterns[0], values[0], state):
            yield from self._inputs(patterns[1:], values[1:], after)


def _orders(pattern: Op, node: gs.Node, inputs: Sequence[gs.Tensor]) -> list[Sequence[gs.Tensor]]:
    """The operands as given and, where that is the same, exchanged; one order alone where the other cannot match."""
    if node.op not in COMMUTATIVE or len(inputs) != 2 or inputs[0] is inputs[1]:
        return [inputs]
    both = [inputs, inputs[::-1]]
    return [values for values in both if all(map(fits, pattern.inputs, values))] or both


def is_close(number: float, wanted: float, value: gs.Tensor) -> bool:
    """Whether `number`, stored in the type of `value`, is the constant `wanted`."""
    kind = query.dtype(value)
    if not isinstance(kind, np.dtype) or kind.kind in "iub":
        return number == wanted
    if kind.itemsize < 4 and float(kind.type(wanted)) == wanted:
        return number == wanted
    rtol = _CONSTANT_RTOL.get(kind.itemsize, 0.0) if kind.kind == "f" else _BFLOAT16_RTOL
    return abs(number - wanted) <= rtol * abs(wanted)


def _origin(value: gs.Tensor) -> str:
    return "a constant" if isinstance(value, gs.Constant) else "a graph input"
