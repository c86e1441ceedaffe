"""Expressions of any form, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from onnxfuse.elementwise.expression import ABSENT, Expression, Input, Step, checked, constant, step
from onnxfuse.elementwise.operators import FLOATS, INTEGERS, NORMALISING, NUMBERS, OPERATORS, QUANTIZED, REDUCTIONS

FLOAT_TYPES, INTEGER_TYPES = sorted(FLOATS), sorted(INTEGERS)
# Functions whose float64 reference cannot be told from chance where arguments are large.
_TAME = sorted(name for name in OPERATORS if name not in ("Cast", "Sin", "Cos", "Pow", "Mod", "DequantizeLinear"))


@st.composite
def expressions(draw: st.DrawFn, reduction: str = "") -> Expression:
    """A valid expression of up to 12 operators over 1 to 4 axes, with broadcast inputs, several types and outputs; with a reduction at the
    "end" or in the "middle"."""
    rank = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(FLOAT_TYPES))
    inputs = [Input(kind, "1" * rank)]
    for _ in range(draw(st.integers(0, 3))):
        own = draw(st.integers(0, rank))
        dtype = draw(st.sampled_from([kind, kind, kind, "bool", *INTEGER_TYPES]))
        inputs.append(Input(dtype, draw(st.text("01", min_size=own, max_size=own))))
    builder = _Builder(inputs)
    for _ in range(draw(st.integers(1, 12))):
        builder.add(draw)
    return builder.finish(draw, rank, kind, reduction)


class Batch(list[Expression]):
    """Expressions that are compiled together; its repr is short, as hypothesis writes it."""

    def __repr__(self) -> str:
        return f"<{len(self)} expressions>"


def batches(size: int, reduction: str = "") -> st.SearchStrategy[Batch]:
    return st.lists(expressions(reduction), min_size=size, max_size=size).map(Batch)


class _Builder:
    def __init__(self, inputs: list[Input]) -> None:
        self.inputs = inputs
        self.types = [one.dtype for one in inputs]
        self.steps: list[Step] = []

    def put(self, made: Step, kind: str) -> int:
        self.steps.append(made)
        self.types.append(kind)
        return len(self.types) - 1

    def pick(self, draw: st.DrawFn, kinds: frozenset[str] | set[str]) -> int | None:
        fitting = [value for value, kind in enumerate(self.types) if kind in kinds]
        return draw(st.sampled_from(fitting)) if fitting else None

    def add(self, draw: st.DrawFn) -> None:
        name = draw(st.sampled_from([*_TAME, "Cast", "Cast"]))
        operator = OPERATORS[name]
        if name == "Cast":
            value = self.pick(draw, NUMBERS | {"bool"})
            assert value is not None
            # What a float beyond an integer's range becomes, nobody says.
            to = draw(st.sampled_from(sorted(FLOATS | {"bool"}) if self.types[value] in FLOATS else sorted(NUMBERS | {"bool"})))
            self.put(step("Cast", value, to=to), to)
            return
        if name == "QuantizeLinear":
            self.quantize(draw)
            return
        first = self.pick(draw, {"bool"}) if operator.first_bool else self.pick(draw, operator.takes)
        if first is None:
            return
        operands = [first]
        if operator.first_bool:
            operands.append(self.pick(draw, operator.takes) or 0)
        kind = self.types[operands[-1]]
        if kind not in operator.takes:
            return
        count = draw(st.integers(operator.least, min(operator.most, 4)))
        while len(operands) < count:
            if draw(st.integers(0, 3)) == 0 and kind in FLOATS:
                number = draw(st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0, 6.0, 0.1]))
                operands.append(self.put(constant(kind, number), kind))
            else:
                value = self.pick(draw, {kind})
                assert value is not None
                operands.append(value)
        if name == "Clip" and len(operands) == 3 and draw(st.booleans()):
            operands[1] = ABSENT
        attributes = {"fmod": 1.0} if name == "Mod" else {}
        self.put(step(name, *operands, **attributes), "bool" if operator.gives == "bool" else kind)

    def quantize(self, draw: st.DrawFn) -> None:
        """To 8 bits and back."""
        value = self.pick(draw, FLOATS)
        if value is None:
            return
        kind = self.types[value]
        name, (low, high) = draw(st.sampled_from(sorted(QUANTIZED.items())))
        zero = float(draw(st.sampled_from([0, 3, 127, -5 if low else 128])))
        scales = [at for at, one in enumerate(self.inputs) if one.dtype == kind and one.axes.count("1") <= 1]
        scale = draw(st.sampled_from(scales)) if scales and draw(st.booleans()) else self.put(constant(kind, 0.0625), kind)
        made = self.put(step("QuantizeLinear", value, scale, low=low, high=high, zero=zero), name)
        self.put(step("DequantizeLinear", made, scale, zero=zero), kind)

    def finish(self, draw: st.DrawFn, rank: int, kind: str, reduction: str) -> Expression:
        """With a last step that reads the full input, so that there is an output."""
        value = self.pick(draw, {kind})
        assert value is not None
        last = self.put(step("Add", 0, value), kind)
        outputs = [last]
        whole = Expression(rank, tuple(self.inputs), tuple(self.steps), (last,))
        full = frozenset(range(rank))
        for value in range(len(self.inputs), last):
            made = whole.step(value)
            if (
                made is not None
                and made.op not in ("Constant", "QuantizeLinear")
                and whole.axes_of(value) == full
                and len(outputs) < 3
                and draw(st.integers(0, 4)) == 0
            ):
                outputs.append(value)
        if reduction == "end":
            outputs.append(self.reduce(draw, last, kind))
        if reduction == "middle":
            self.follow(draw, self.reduce(draw, last, kind, kept=True), kind)
            outputs = [*outputs[draw(st.integers(0, 1)) :], len(self.types) - 1]
        return checked(Expression(rank, tuple(self.inputs), tuple(self.steps), tuple(outputs)))

    def follow(self, draw: st.DrawFn, reduced: int, kind: str) -> None:
        """Steps behind a reduction: one that reads it alone, some of any kind, and one of the full shape that reads what it became."""
        on_its_own = self.put(step(draw(st.sampled_from(["Sqrt", "Neg", "Sigmoid", "Exp"])), reduced), kind)
        for _ in range(draw(st.integers(0, 4))):
            self.add(draw)
        full = self.put(step(draw(st.sampled_from(["Mul", "Sub", "Max"])), draw(st.sampled_from([0, reduced - 1])), on_its_own), kind)
        value = self.pick(draw, {kind})
        assert value is not None
        self.put(step("Add", full, value), kind)

    def reduce(self, draw: st.DrawFn, value: int, kind: str, kept: bool = False) -> int:
        name = draw(st.sampled_from(sorted(REDUCTIONS)))
        others = [at for at, one in enumerate(self.inputs) if one.dtype == kind and one.axes == "1"]
        if name in NORMALISING and name.endswith("Normalization"):
            if not others:
                name = "Softmax"
            else:
                extra = [draw(st.sampled_from(others)) for _ in range(draw(st.integers(1, 2)) if name[0] == "L" else 1)]
                return self.put(step(name, value, *extra), kind)
        attributes = {"keepdims": float(kept or draw(st.booleans()))} if name.startswith("Reduce") else {}
        return self.put(step(name, value, **attributes), kind)
