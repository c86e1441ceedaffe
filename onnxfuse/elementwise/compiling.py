"""Compiling an expression, judging its kernels, and cutting it where they are too big.

A generated kernel may be too big where it spills registers, or where a multiprocessor holds few of its warps. It can then be cut at one
value: the first part computes the value and stores it, the second reads it, and computes again what both need. That costs bytes and
instructions, so it is done only where a model of the time (`clocks`) promises a clear win. What was cut, and why, is in the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from onnxfuse import gpus, occupancy, plugins
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
    bytes_read,
    checked,
    parse,
)
from onnxfuse.elementwise.operators import REDUCTIONS, TYPES
from onnxfuse.plugins import KernelUse

# Arithmetic as written: no contraction of a product and a sum into one rounding.
OPTIONS = ("-fmad=false",)
# Of a multiprocessor's warps: a kernel that holds fewer may be too big.
LEAST_OCCUPANCY = 1 / 3
# Of the whole's time, what the parts may take: the model is not exact, and each part is a launch more.
WORTH = 0.9
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
    make = compiler(sm, and_newer)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the compilers are processes of their own
        plans = pool.map(lambda one: fit(one, make), given.values())
        return dict(zip(given, plans, strict=True))


@dataclass(frozen=True)
class Rule:
    """When a kernel is cut. least: the occupancy below which it may be too big. worth: of the whole's time, what the parts may take."""

    least: float = LEAST_OCCUPANCY
    worth: float = WORTH


def fit(given: Expression, make: Compile, rule: Rule = Rule()) -> Plan:
    """Compiles an expression, cut where its kernels would be too big."""
    whole = uncut(given, make).parts[0]
    parts, cuts = _fit(given, whole, make, rule, MOST_PARTS)
    left = tuple(fault for part in parts for fault in faults(part.generated.kernels, rule.least)[:1])
    return Plan(given, tuple(parts), tuple(cuts), left)


def uncut(given: Expression, make: Compile) -> Plan:
    """Compiles an expression as it is."""
    return Plan(given, (Part(given, tuple(range(len(given.inputs))), given.outputs, make(given)),), ())


def _fit(given: Expression, part: Part, make: Compile, rule: Rule, most: int) -> tuple[list[Part], list[Cut]]:
    """`part`, or the parts that it is cut into, with values numbered as in `given`."""
    wrong = faults(part.generated.kernels, rule.least)
    if not wrong or most < 2:
        return [part], []
    for value, first, second in _cuts(given, part)[:MOST_TRIES]:
        pieces = [Part(*piece, make(piece[0])) for piece in (first, second)]
        if not _is_better(part, pieces, rule.worth):
            continue
        made = given.step(value)
        cut = Cut(made.op if made else "input", wrong[0])
        left, cuts_left = _fit(given, pieces[0], make, rule, most // 2)
        right, cuts_right = _fit(given, pieces[1], make, rule, most // 2)
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


def _is_better(whole: Part, pieces: Sequence[Part], worth: float) -> bool:
    """Whether the parts are so much faster, by the model, that the cut is worth it."""
    parts = sum(clocks(piece.expression, piece.generated.kernels) for piece in pieces)
    return parts < worth * clocks(whole.expression, whole.generated.kernels)


CLOCK_GHZ = 1.7  # of all cards, near enough
REACHED = 0.88  # of the peak bandwidth, by a copy
LATENCY = 2000  # clocks that a load takes under load: so long must the bytes under way last
LANES = 128  # instructions of single threads that a multiprocessor starts in a clock
BUSY_WARPS = 16  # that hide the latency of arithmetic
L1_SPILLS, L2_SPILLS = 64, 24  # bytes of spills in a clock, where the stacks of all threads fit into the first level, and where not
L1_BYTES = 192 << 10


def clocks(given: Expression, kernels: Iterable[KernelUse]) -> float:
    """Clocks of one multiprocessor for one element, of a large tensor, by a simple model: memory and arithmetic overlap, spills add.

    Memory reaches the bandwidth of a copy where enough bytes are under way (Little's law). The instructions are counted by the size of the
    code, branches that are seldom taken included. On an H200 it is within a third of what was measured.
    """
    judged = [use for use in kernels if not use.name.endswith(("_single", "_ragged"))]
    return max(_clocks(given, use) for use in judged)


def _clocks(given: Expression, use: KernelUse) -> float:
    held = occupancy.of_kernel(use)
    vector, unroll = source.vector(given), source.unroll(given)
    elements = (vector + 1) * unroll  # those behind the last vector have code of their own
    loaded = max(1, bytes_read(given)) * vector * unroll
    bandwidth = _bandwidth(use.sm)
    memory = bytes_each(given) / bandwidth / min(1.0, held.warps * 32 * loaded / (LATENCY * bandwidth))
    arithmetic = use.code / 16 / elements / LANES / min(1.0, held.warps / BUSY_WARPS)
    in_l1 = use.stack * held.warps * 32 <= L1_BYTES
    spills = (use.spill_stores + use.spill_loads) / elements / (L1_SPILLS if in_l1 else L2_SPILLS)
    return max(memory, arithmetic) + spills


def _bandwidth(sm: int) -> float:
    """Bytes in a clock that a multiprocessor has of the memory, of the largest card of an architecture."""
    known = [(gpu.sms, gpu.memory_gbps) for gpu in gpus.of_architecture(sm) if gpu.sms and gpu.memory_gbps]
    sms, gbps = max(known, default=(100, 1000.0))
    return gbps * REACHED / sms / CLOCK_GHZ


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
        if given.types[value] not in TYPES:
            continue  # quantized: it has no form in memory
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
    computed = _in_order(given, _computed(given, makes, known))
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


def _in_order(given: Expression, values: Iterable[int]) -> list[int]:
    """So that a reduction that nothing of them follows is the last."""
    reduced = given.reduced
    return sorted(values, key=lambda value: (reduced is not None and reduced in ancestors(given, [value]), value))


def _input(given: Expression, value: int) -> Input:
    if given.step(value) is None:
        return given.inputs[value]
    return Input(given.types[value], "".join("1" if axis in given.axes_of(value) else "0" for axis in range(given.rank)))
