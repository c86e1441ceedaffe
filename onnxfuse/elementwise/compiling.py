"""Compiling an expression, judging its kernels, and cutting it where they are too big.

A generated kernel is too big where it spills registers, or where a multiprocessor holds too few of its warps to keep the memory busy. It is
then cut at one value: the first part computes the value and stores it, the second reads it. The cut that moves the fewest bytes more is
tried first; one is taken only if the parts are no longer too big, or clearly less so. What was cut, and why, is in the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from onnxfuse import occupancy, plugins
from onnxfuse.elementwise import source
from onnxfuse.elementwise.expression import (
    ABSENT,
    MOST_INPUTS,
    MOST_OUTPUTS,
    Expression,
    Input,
    Step,
    ancestors,
    bytes_each,
    checked,
    parse,
)
from onnxfuse.elementwise.operators import REDUCTIONS
from onnxfuse.plugins import KernelUse

# Arithmetic as written: no contraction of a product and a sum into one rounding.
OPTIONS = ("-fmad=false",)
# Of a multiprocessor's warps. A streaming kernel that holds fewer cannot have the 30 to 40 KB under way that cover the latency of HBM.
LEAST_OCCUPANCY = 1 / 3
# How much more of it the worst part must reach for a cut that is made for its sake: a cut costs a tensor written and read.
BETTER = 1.5
MOST_TRIES = 4  # cuts that are compiled for one kernel
MOST_PARTS = 8

Compile = Callable[[Expression], plugins.Generated]


@dataclass(frozen=True)
class Part:
    """A kernel of a plan: its expression, and which values of the whole it reads and makes, in its order."""

    expression: Expression
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    generated: plugins.Generated


@dataclass(frozen=True)
class Cut:
    """Where an expression was cut: the operator whose result is stored, and why."""

    operator: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What an expression is computed by: parts in order; one where it was not cut. faults: of parts that no cut made better."""

    expression: Expression
    parts: tuple[Part, ...]
    cuts: tuple[Cut, ...]
    faults: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The form of reports: kernels with their resources, cuts with reasons."""
        return {
            "form": self.expression.form,
            "name": self.expression.digest,
            "cuts": [f"{cut.reason}: cut behind {cut.operator}" for cut in self.cuts],
            "faults": list(self.faults),
            "kernels": [occupancy.figures(use) for part in self.parts for use in part.generated.kernels],
        }


def compiler(sm: int, and_newer: bool = False) -> Compile:
    """Compiles expressions for one architecture."""
    return lambda given: plugins.compile_source(source.source(given), "Elementwise", sm, and_newer=and_newer, options=OPTIONS)


def fit_all(texts: Sequence[str], sm: int, *, and_newer: bool = False) -> dict[str, Plan]:
    """A plan for each expression's text. BadInput for a text that is none, MissingHere without a compiler."""
    given = {text: parse(text, "an element-wise node's attribute 'expression'") for text in texts}
    compile = compiler(sm, and_newer)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the compilers are processes of their own
        plans = pool.map(lambda one: fit(one, compile), given.values())
        return dict(zip(given, plans, strict=True))


def fit(given: Expression, compile: Compile, least: float = LEAST_OCCUPANCY) -> Plan:
    """Compiles an expression, cut where its kernels would be too big. least: the occupancy below which they are."""
    whole = Part(given, tuple(range(len(given.inputs))), given.outputs, compile(given))
    parts, cuts = _fit(given, whole, compile, least, MOST_PARTS)
    left = tuple(fault for part in parts for fault in faults(part.generated.kernels, least)[:1])
    return Plan(given, tuple(parts), tuple(cuts), left)


def _fit(given: Expression, part: Part, compile: Compile, least: float, most: int) -> tuple[list[Part], list[Cut]]:
    """`part`, or the parts that it is cut into, with values numbered as in `given`."""
    wrong = faults(part.generated.kernels, least)
    if not wrong or most < 2:
        return [part], []
    for value, first, second in _cuts(given, part)[:MOST_TRIES]:
        pieces = [Part(*piece, compile(piece[0])) for piece in (first, second)]
        if not _is_better(part, pieces, least):
            continue
        made = given.step(value)
        cut = Cut(made.op if made else "input", wrong[0])
        left, cuts_left = _fit(given, pieces[0], compile, least, most // 2)
        right, cuts_right = _fit(given, pieces[1], compile, least, most // 2)
        return [*left, *right], [cut, *cuts_left, *cuts_right]
    return [part], []


# --- judging ----------------------------------------------------------------------------------------------------------------


def faults(kernels: Iterable[KernelUse], least: float = LEAST_OCCUPANCY) -> list[str]:
    """What is wrong with them, the worst first; each in a few words with its figure. Kernels for odd addresses are not judged."""
    found: list[tuple[int, str]] = []
    for use in kernels:
        if use.name.endswith("_single"):
            continue
        spilled = use.spill_stores + use.spill_loads
        share = occupancy.of_kernel(use).share
        if spilled:
            found.append((0, f"{use.registers} registers are not enough, {spilled} bytes are spilled (sm_{use.sm})"))
        if share < least:
            found.append((1, f"{use.registers} registers a thread leave {share:.0%} of the warps (sm_{use.sm})"))
    return [words for _, words in sorted(found)]


def _is_better(whole: Part, pieces: Sequence[Part], least: float) -> bool:
    """Whether the parts are free of what is wrong with the whole, or clearly less so."""
    if not any(faults(piece.generated.kernels, least) for piece in pieces):
        return True
    before, after = _worst(whole.generated.kernels), _worst([use for piece in pieces for use in piece.generated.kernels])
    return after[0] < before[0] / 2 or (after[0] <= before[0] and after[1] >= before[1] * BETTER)


def _worst(kernels: Sequence[KernelUse]) -> tuple[int, float]:
    """Most bytes spilled, least occupancy."""
    judged = [use for use in kernels if not use.name.endswith("_single")] or list(kernels)
    return (
        max(use.spill_stores + use.spill_loads for use in judged),
        min(occupancy.of_kernel(use).share for use in judged),
    )


# --- cutting ----------------------------------------------------------------------------------------------------------------

_Piece = tuple[Expression, tuple[int, ...], tuple[int, ...]]


def _cuts(given: Expression, part: Part) -> list[tuple[int, _Piece, _Piece]]:
    """Ways to cut a part in two that leave each side fewer values alive at a time, those that move the fewest bytes first."""
    whole = source.pressure(part.expression)
    found = []
    for value in _between(given, part):
        halves = _halves(given, part, value)
        if halves is None:
            continue
        first, second = halves
        alive = max(source.pressure(first[0]), source.pressure(second[0]))
        if alive < whole or len(second[0].steps) * 3 < len(part.expression.steps) * 2:
            moved = bytes_each(first[0]) + bytes_each(second[0])
            work = source.cost(first[0]) + source.cost(second[0])
            # A part of nearly all that the whole has is no smaller: among cuts of equal traffic the evenest.
            found.append((alive > whole * 2 / 3, moved, work, max(len(first[0].steps), len(second[0].steps)), value, first, second))
    return [(value, first, second) for *_, value, first, second in sorted(found, key=lambda entry: entry[:5])]


def _between(given: Expression, part: Part) -> Iterator[int]:
    """Values of the full shape that a part computes on its way, and that are not its own last results."""
    inside = _computed(given, part.makes, part.reads)
    full = frozenset(range(given.rank))
    for value in sorted(inside):
        made = given.step(value)
        if made is None or made.op in REDUCTIONS or made.op == "Constant" or given.axes_of(value) != full:
            continue
        if not set(part.makes) <= ancestors(given, [value]):
            yield value


def _computed(given: Expression, makes: Iterable[int], known: Iterable[int]) -> set[int]:
    """What is computed to make values from known ones."""
    found: set[int] = set()
    waiting, stop = list(makes), set(known)
    while waiting:
        value = waiting.pop()
        made = given.step(value)
        if value not in found and value not in stop and made is not None:
            found.add(value)
            waiting.extend(made.read)
    return found


def _halves(given: Expression, part: Part, value: int) -> tuple[_Piece, _Piece] | None:
    """The part that makes `value`, with the outputs that are on its way, and the one that makes the rest from it; None where one of them
    would have more inputs or outputs than a kernel takes."""
    before = _computed(given, [value], part.reads)
    early = tuple(dict.fromkeys([*(made for made in part.makes if made in before), value]))
    late = tuple(made for made in part.makes if made not in before)
    first, second = _piece(given, early, part.reads), _piece(given, late, (*part.reads, *early))
    return None if first is None or second is None else (first, second)


def _piece(given: Expression, makes: tuple[int, ...], known: Sequence[int]) -> _Piece | None:
    """An expression for some values of `given`, from those that are known; None where it has more inputs or outputs than one may have."""
    computed = sorted(_computed(given, makes, known))
    steps = [step for value in computed if (step := given.step(value)) is not None]
    read = sorted({value for step in steps for value in step.read} - set(computed))
    if len(read) > MOST_INPUTS or len(makes) > MOST_OUTPUTS:
        return None
    place = {value: at for at, value in enumerate([*read, *computed])}
    inputs = tuple(_input(given, value) for value in read)
    moved = tuple(
        Step(step.op, tuple(value if value == ABSENT else place[value] for value in step.operands), step.attributes) for step in steps
    )
    return checked(Expression(given.rank, inputs, moved, tuple(place[value] for value in makes))), tuple(read), makes


def _input(given: Expression, value: int) -> Input:
    if given.step(value) is None:
        return given.inputs[value]
    return Input(given.types[value], "".join("1" if axis in given.axes_of(value) else "0" for axis in range(given.rank)))
