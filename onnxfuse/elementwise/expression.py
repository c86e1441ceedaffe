"""An element-wise expression: the value that a fused node carries as its attribute `expression`, and all that its kernels are made of.

Text form, version 1, is JSON:

    {"version": 1, "rank": 4,
     "inputs": [["float16", "1111"], ["float16", "0100"], ["float32", ""]],
     "steps": [["Add", [0, 1]], ["Constant", [], {"type": "float16", "value": "0x1.8p+1"}], ["Clip", [3, 4, -1]]],
     "outputs": [5]}

rank: of the full shape, which every output has; 0 to 8. An input has an element type and one letter for each of its axes, counted from the
last: 1 where it has the full shape's length, 0 where it has length 1 and is broadcast. Values are numbered: first the inputs, then
one of each step, which reads earlier values only (-1 is an absent operand). Attributes are numbers, written as Python's float.hex; `to` and
`type` are element types. QuantizeLinear and DequantizeLinear take a number or a tensor as scale, and have the zero point and the ends of
the 8-bit type as attributes; what is between them is neither input nor output.

At most one step is a reduction over the last axis. It is the last, and nothing reads it; or it is in the middle: later steps read it, as a
value of the full shape where it normalises, else (keepdims 1) as one that is broadcast along the last axis and is no output.

What the kernels compute: float16 and bfloat16 are widened to float32, all arithmetic is float32 without contraction, and a value is
rounded once where it is stored: better than the original, which rounds after every operator. Rounded as in the original are the results of
Cast, and the operands of operators that jump (comparisons, Floor, Round...). Integers wrap around.

A text comes from a model file and may be anything: `parse` accepts what is written above and raises BadInput for all else, so that
what the source is generated from is a checked tree of numbers and known names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.elementwise.operators import BOOL, FLOATS, NORMALISING, OPERATORS, QUANTIZED, REDUCTIONS, SIZES, TYPES, Operator
from onnxfuse.errors import BadInput

VERSION = 1
MOST_RANK = 8
MOST_INPUTS = 24
MOST_OUTPUTS = 8
MOST_STEPS = 256
MOST_TEXT = 1 << 16  # characters
ABSENT = -1
NUMPY = {name: np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name) for name in sorted(TYPES)}

Attribute = float | str


@dataclass(frozen=True)
class Input:
    """An input: element type, and the letters of its axes."""

    dtype: str
    axes: str

    @property
    def is_scalar(self) -> bool:
        return "1" not in self.axes


@dataclass(frozen=True)
class Step:
    """One operator: values that it reads (ABSENT for none), and its attributes."""

    op: str
    operands: tuple[int, ...] = ()
    attributes: tuple[tuple[str, Attribute], ...] = ()

    def get(self, name: str) -> Any:
        return dict(self.attributes)[name]

    @property
    def read(self) -> tuple[int, ...]:
        """Operands that are there."""
        return tuple(value for value in self.operands if value != ABSENT)


@dataclass(frozen=True)
class Expression:
    """A whole expression, valid by construction: see `checked`."""

    rank: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Element type of every value."""
        found = [given.dtype for given in self.inputs]
        for step in self.steps:
            found.append(_type_of(step, found))
        return tuple(found)

    @property
    def reduced(self) -> int | None:
        """The value that a reduction makes."""
        return next((at for at, one in enumerate(self.steps, start=len(self.inputs)) if one.op in REDUCTIONS), None)

    @property
    def reduction(self) -> Step | None:
        return None if self.reduced is None else self.step(self.reduced)

    @property
    def is_reduced_midway(self) -> bool:
        """Whether steps follow the reduction."""
        return self.reduced is not None and self.steps[-1].op not in REDUCTIONS

    @property
    def row_output(self) -> int | None:
        """The value of a reduction that ends the expression."""
        return None if self.is_reduced_midway else self.reduced

    def step(self, value: int) -> Step | None:
        """The step that makes a value; None for an input."""
        return self.steps[value - len(self.inputs)] if value >= len(self.inputs) else None

    @property
    def text(self) -> str:
        """The text form, the same for equal expressions."""
        steps = [[step.op, list(step.operands), *([_written(step)] if step.attributes else [])] for step in self.steps]
        whole = {
            "version": VERSION,
            "rank": self.rank,
            "inputs": [[given.dtype, given.axes] for given in self.inputs],
            "steps": steps,
            "outputs": list(self.outputs),
        }
        return json.dumps(whole, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this expression."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def form(self) -> str:
        """The operators in order, as people say it: "Add-Clip-Mul-Div"; for verdicts, which hold for all of one form."""
        names = [step.op for step in self.steps if step.op not in ("Constant", "Identity", "Cast")]
        return "-".join(names) if len(names) <= 8 else f"{'-'.join(names[:7])}-and-{len(names) - 7}-more-{self.digest[:6]}"

    def axes_of(self, value: int) -> frozenset[int]:
        """Axes of the full shape (0 is the first) along which a value changes."""
        return self._axes[value]

    @cached_property
    def _axes(self) -> tuple[frozenset[int], ...]:
        found = [frozenset(self.rank - len(i.axes) + at for at, letter in enumerate(i.axes) if letter == "1") for i in self.inputs]
        for step in self.steps:
            own = frozenset[int]().union(*(found[value] for value in step.read))
            found.append(own - {self.rank - 1} if self.is_reduced_midway and _is_small(step) else own)
        return tuple(found)

    def retyped(self, half: str) -> Expression:
        """float32 everywhere become `half`; constants beyond its range are set to its end, as the conversion of weights does.

        The expression itself where it neither reads nor makes float32: arithmetic between whole numbers, such as indices, needs its digits.
        """
        if "float32" not in {*(given.dtype for given in self.inputs), *(self.types[value] for value in self.outputs)}:
            return self

        def narrow(name: str) -> str:
            return half if name == "float32" else name

        steps = []
        for step in self.steps:
            attributes = dict(step.attributes)
            if step.op == "Cast":
                attributes["to"] = narrow(attributes["to"])  # type: ignore[arg-type]
            elif step.op == "Constant" and attributes["type"] == "float32":
                attributes = {"type": half, "value": _stored(float(attributes["value"]), half)}
            steps.append(replace(step, attributes=_sorted(attributes)))
        inputs = tuple(Input(narrow(given.dtype), given.axes) for given in self.inputs)
        return checked(Expression(self.rank, inputs, tuple(steps), self.outputs))


def _is_small(given: Step) -> bool:
    """Whether it gives one number a row."""
    return given.op in REDUCTIONS and given.op not in NORMALISING


def constant(dtype: str, value: float) -> Step:
    """A step that gives one number, rounded to its type."""
    return Step("Constant", (), _sorted({"type": dtype, "value": float(np.asarray(value).astype(NUMPY[dtype]))}))


def step(op: str, *operands: int, **attributes: Attribute) -> Step:
    """A step with the attributes that its operator has, defaults filled in."""
    known = {} if op == "Cast" else {name: value for name, value in _operator(op).attributes.items() if value is not None}
    return Step(op, operands, _sorted({**known, **attributes}))


def _sorted(attributes: Mapping[str, Attribute]) -> tuple[tuple[str, Attribute], ...]:
    return tuple(sorted((name, value if isinstance(value, str) else float(value)) for name, value in attributes.items()))


def _stored(value: float, half: str) -> float:
    largest = float(ml_dtypes.finfo(NUMPY[half]).max)  # type: ignore[no-untyped-call]
    return float(np.asarray(min(max(value, -largest), largest) if math.isfinite(value) else value).astype(NUMPY[half]))


def _operator(op: str) -> Operator:
    found = OPERATORS.get(op) or REDUCTIONS.get(op)
    if found is None:
        raise BadInput("it holds an operator that is not known")
    return found


def _written(given: Step) -> dict[str, str]:
    return {name: value if isinstance(value, str) else value.hex() for name, value in given.attributes}


# --- reading and checking ------------------------------------------------------------------------------------------------


def parse(text: str, what: str = "expression") -> Expression:
    """The expression that a text says. BadInput, beginning with `what`, for everything that is not of the form above."""
    try:
        if len(text) > MOST_TEXT:
            raise BadInput(f"it is longer than {MOST_TEXT} characters")
        return _parse(text)
    except BadInput as fault:
        raise BadInput(f"{what}: {fault}; optimize the model again") from None
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, AttributeError):
        raise BadInput(f"{what}: is no element-wise expression of version {VERSION}; optimize the model again") from None


def _parse(text: str) -> Expression:
    whole = json.loads(text)
    if not isinstance(whole, dict) or set(whole) != {"version", "rank", "inputs", "steps", "outputs"}:
        raise ValueError
    if whole["version"] != VERSION:
        raise BadInput(f"it is of version {str(whole['version'])[:20]!r}, and this onnxfuse knows version {VERSION}")
    inputs = tuple(Input(_text(dtype), _text(axes)) for dtype, axes in _limited(whole["inputs"], MOST_INPUTS))
    steps = tuple(_step(entry) for entry in _limited(whole["steps"], MOST_STEPS))
    outputs = tuple(_whole(value) for value in _limited(whole["outputs"], MOST_OUTPUTS))
    return checked(Expression(_whole(whole["rank"]), inputs, steps, outputs))


def _limited(entries: Any, most: int) -> list[Any]:
    if not isinstance(entries, list):
        raise TypeError
    if len(entries) > most:
        raise BadInput(f"it has {len(entries)} inputs, steps or outputs in a list of at most {most}")
    return entries


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _step(entry: Any) -> Step:
    op, operands, *rest = entry
    if not isinstance(operands, list) or len(rest) > 1:
        raise TypeError
    attributes = {_text(name): _text(value) for name, value in rest[0].items()} if rest else {}
    read = {name: value if name in ("to", "type") else float.fromhex(value) for name, value in attributes.items()}
    return Step(_text(op), tuple(map(_whole, operands)), _sorted(read))


def checked(given: Expression) -> Expression:
    """`given` itself, if it is one that kernels can be made of; BadInput says what is wrong."""
    _require(0 <= given.rank <= MOST_RANK, f"its rank is not 0 to {MOST_RANK}")
    _require(0 < len(given.inputs) <= MOST_INPUTS, f"it has no inputs, or more than {MOST_INPUTS}")
    _require(0 < len(given.steps) <= MOST_STEPS, f"it has no steps, or more than {MOST_STEPS}")
    _require(0 < len(given.outputs) <= MOST_OUTPUTS, f"it has no outputs, or more than {MOST_OUTPUTS}")
    for read in given.inputs:
        _require(read.dtype in TYPES, "an input is of no type that it may have")
        _require(len(read.axes) <= given.rank and set(read.axes) <= {"0", "1"}, "the axes of an input are not those of its rank")
    for at, one in enumerate(given.steps, start=len(given.inputs)):
        _check_step(given, one, at)
    types = given.types  # raises where operands do not fit
    everything = frozenset().union(*(given.axes_of(i) for i in range(len(given.inputs))))
    _require(everything == frozenset(range(given.rank)), "an axis of the full shape belongs to no input")
    for value in given.outputs:
        _require(len(given.inputs) <= value < len(types), "an output is no step's value")
        _require(given.axes_of(value) == everything, "an output has not the full shape")
        _require(types[value] in TYPES, "a quantized value is an output")
    _require(len(set(given.outputs)) == len(given.outputs), "an output is there twice")
    _require(sum(one.op in REDUCTIONS for one in given.steps) <= 1, "it has two reductions")
    return given


def _check_step(given: Expression, one: Step, at: int) -> None:
    _require(all(value == ABSENT or 0 <= value < at for value in one.operands), "a step reads a value that is not there yet")
    if one.op == "Constant":
        names = {name for name, _ in one.attributes}
        _require(not one.operands and names == {"type", "value"} and one.get("type") in TYPES, "a Constant is not one number")
        _require(one.get("type") in FLOATS or float(one.get("value")).is_integer(), "a Constant is no whole number")
        return
    operator = _operator(one.op)
    _require(operator.least <= len(one.operands) <= operator.most, f"{one.op} has another number of operands")
    absent = [place for place, value in enumerate(one.operands) if value == ABSENT]
    _require(not absent or (one.op == "Clip" and 0 not in absent), f"{one.op} lacks an operand")
    if one.op in REDUCTIONS:
        _require(given.rank > 0, "a reduction of no axis")
        if one is given.steps[-1]:
            _require(at in given.outputs, "a reduction that nobody reads")
        else:
            _require(any(at in other.read for other in given.steps), "a reduction in the middle that no step reads")
            _require(not _is_small(one) or one.get("keepdims") == 1.0, "a reduction in the middle that drops its axis")
        full = frozenset(range(given.rank))
        _require(given.axes_of(one.operands[0]) == full, "what is reduced has not the full shape")
        for value in one.operands[1:]:
            _require(value < len(given.inputs), "a norm's scale or bias is no input")
    if one.op == "Cast":
        _require([name for name, _ in one.attributes] == ["to"] and one.get("to") in TYPES, "a Cast is to no known type")
        return
    _require({name for name, _ in one.attributes} == set(operator.attributes), f"{one.op} has other attributes")
    _require(all(isinstance(value, float) for _, value in one.attributes), f"{one.op} has an attribute that is no number")
    if one.op == "QuantizeLinear":
        _require((one.get("low"), one.get("high")) in QUANTIZED.values(), "a quantization is to no type of 8 bits")
    if one.op in ("QuantizeLinear", "DequantizeLinear"):
        _require(-128 <= one.get("zero") <= 255 and one.get("zero").is_integer(), "a zero point is none")
        _require(len(given.axes_of(one.operands[1])) <= 1, "a scale has more than one axis")


def _type_of(one: Step, types: Sequence[str]) -> str:
    if one.op == "Constant":
        return str(one.get("type"))
    operator = _operator(one.op)
    kinds = [types[value] for value in one.read]
    if operator.gives == "scale":
        _require(kinds[0] in operator.takes and kinds[1] in FLOATS, f"{one.op} takes a quantized value and a scale")
        return kinds[1]
    if operator.first_bool:
        _require(kinds[0] in BOOL, f"{one.op} has no condition")
        kinds = kinds[1:]
    _require(set(kinds) <= operator.takes and len(set(kinds)) == 1, f"{one.op} cannot take {' and '.join(sorted(set(kinds))) or 'nothing'}")
    if operator.gives == "quantized":
        return next((name for name, ends in QUANTIZED.items() if ends[0] == one.get("low")), "")
    return str(one.get("to")) if operator.gives == "to" else "bool" if operator.gives == "bool" else kinds[0]


def _require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise BadInput(otherwise)


# --- questions that several ask ---------------------------------------------------------------------------------------------


def groups(given: Expression) -> tuple[int, ...]:
    """How many neighbouring axes are one, from the first axis on: those that every input has or lacks together.

    A reduction keeps the last axis apart. Rank 0 has no groups.
    """
    shapes = [given.axes_of(value) for value in range(len(given.inputs))]
    found: list[int] = []
    for axis in range(given.rank):
        alone = axis == given.rank - 1 and given.reduction is not None
        if found and not alone and all((axis in axes) == (axis - 1 in axes) for axes in shapes):
            found[-1] += 1
        else:
            found.append(1)
    return tuple(found)


def output_types(given: Expression) -> tuple[str, ...]:
    return tuple(given.types[value] for value in given.outputs)


def bytes_each(given: Expression) -> int:
    """Bytes that one element of the full shape moves: full inputs read and outputs written once; broadcast inputs count for nothing."""
    large = [value for value in given.outputs if value != given.row_output or not _is_small(given.steps[-1])]
    return bytes_read(given) + sum(SIZES[given.types[value]] for value in large)


def bytes_read(given: Expression) -> int:
    """Bytes of them that are read."""
    full = frozenset(range(given.rank))
    return sum(SIZES[one.dtype] for value, one in enumerate(given.inputs) if given.axes_of(value) == full)


def ancestors(given: Expression, values: Iterable[int]) -> frozenset[int]:
    """`values` and all that they are computed from."""
    found: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            made = given.step(value)
            waiting.extend(made.read if made else ())
    return frozenset(found)
