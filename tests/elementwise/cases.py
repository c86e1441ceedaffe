"""Expressions that are run on a GPU: every operator, type, broadcast and ending; forms found in real models; and one that is too big."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.elementwise.expression import Expression, Input, Step, checked, constant, step
from onnxfuse.elementwise.operators import FLOATS, OPERATORS, QUANTIZED


class Writer:
    """Writes steps one after another; values are numbered as they come."""

    def __init__(self, rank: int, *inputs: tuple[str, str]) -> None:
        self.rank = rank
        self.inputs = tuple(Input(*one) for one in inputs)
        self.steps: list[Step] = []

    def __call__(self, op: str, *operands: int, **attributes: float | str) -> int:
        return self._add(step(op, *operands, **attributes))

    def number(self, dtype: str, value: float) -> int:
        return self._add(constant(dtype, value))

    def _add(self, made: Step) -> int:
        self.steps.append(made)
        return len(self.inputs) + len(self.steps) - 1

    def whole(self, *outputs: int) -> Expression:
        return checked(Expression(self.rank, self.inputs, tuple(self.steps), outputs))


def hard_swish_affine(dtype: str, rank: int = 4) -> Expression:
    """x * s + b, hard-swish spelled out, and another affine: the text detector's chain between convolutions."""
    w = Writer(rank, (dtype, "1" * rank), *((dtype, ""),) * 4)
    x = w("Add", w("Mul", 0, 1), 2)
    gate = w("Clip", w("Add", x, w.number(dtype, 3)), w.number(dtype, 0), w.number(dtype, 6))
    return w.whole(w("Add", w("Mul", w("Div", w("Mul", x, gate), w.number(dtype, 6)), 3), 4))


def film_silu(dtype: str) -> Expression:
    """silu(x * scale + shift), one scale and shift a channel and image: the diffusion U-Net's."""
    w = Writer(4, (dtype, "1111"), (dtype, "1100"), (dtype, "1100"))
    return w.whole(w("Silu", w("Add", w("Mul", 0, 1), 2)))


def snake(dtype: str) -> Expression:
    """x + sin(a x)^2 / a, one a for each channel."""
    w = Writer(3, (dtype, "111"), (dtype, "010"))
    s = w("Sin", w("Mul", 0, 1))
    return w.whole(w("Add", 0, w("Div", w("Mul", s, s), 1)))


def gated(dtype: str) -> Expression:
    w = Writer(3, (dtype, "111"), (dtype, "111"))
    return w.whole(w("Mul", w("GeluTanh", 0), 1))


def layer_scale_residual_norm(dtype: str) -> Expression:
    """x * gamma + residual, kept, and its norm: two outputs."""
    w = Writer(3, (dtype, "111"), (dtype, "1"), (dtype, "111"), (dtype, "1"), (dtype, "1"))
    total = w("Add", w("Mul", 0, 1), 2)
    return w.whole(total, w("LayerNormalization", total, 3, 4))


def masked_softmax(dtype: str) -> Expression:
    w = Writer(4, (dtype, "1111"), ("bool", "1001"), (dtype, ""))
    return w.whole(w("Softmax", w("Where", 1, w("Mul", 0, 2), w.number(dtype, -10000.0))))


def softmax_then(dtype: str) -> Expression:
    """softmax(s x) times a mask of rows, the scores kept: a reduction in the middle whose result has the full shape."""
    w = Writer(4, (dtype, "1111"), (dtype, ""), (dtype, "1001"))
    scores = w("Mul", 0, 1)
    return w.whole(scores, w("Mul", w("Softmax", scores), 2))


def gated_rms(dtype: str) -> Expression:
    """h / sqrt(mean(h^2) + eps) of h = x * w, times sigmoid(x): a reduction in the middle that gives one number a row."""
    w = Writer(3, (dtype, "111"), (dtype, "1"))
    h = w("Mul", 0, 1)
    root = w("Sqrt", w("Add", w("ReduceMean", w("Mul", h, h)), w.number(dtype, 1e-3)))
    return w.whole(w("Mul", w("Div", h, root), w("Sigmoid", 0)))


def norm_then_silu(dtype: str) -> Expression:
    w = Writer(3, (dtype, "111"), (dtype, "111"), (dtype, "1"), (dtype, "1"))
    return w.whole(w("Silu", w("LayerNormalization", w("Add", 0, 1), 2, 3)))


def midway() -> dict[str, Expression]:
    """Reductions in the middle, by name."""
    return {f"{make.__name__} {kind}": make(kind) for make in (softmax_then, gated_rms, norm_then_silu) for kind in sorted(FLOATS)}


def rotary(dtype: str) -> Expression:
    """Both halves of a rotation: two outputs."""
    w = Writer(4, (dtype, "1111"), (dtype, "1111"), (dtype, "0011"), (dtype, "0011"))
    return w.whole(w("Sub", w("Mul", 0, 2), w("Mul", 1, 3)), w("Add", w("Mul", 0, 3), w("Mul", 1, 2)))


def quantize_dequantize(dtype: str) -> Expression:
    w = Writer(2, (dtype, "11"), (dtype, ""))
    low, high = w.number(dtype, -64), w.number(dtype, 63)
    return w.whole(w("Mul", w("Clip", w("Round", w("Div", 0, 1)), low, high), 1))


def quantized_island(dtype: str, per_channel: bool, kind: str = "int8") -> Expression:
    """gelu(x * s) in 8 bits, and a residual: what is between two layers of a quantized network."""
    low, high = QUANTIZED[kind]
    zero = 0.0 if kind == "int8" else 131.0
    w = Writer(4, (dtype, "1111"), (dtype, "1111"), (dtype, "100" if per_channel else ""), (dtype, ""))
    q = w("QuantizeLinear", w("GeluTanh", w("Mul", 0, 3)), 2, low=low, high=high, zero=zero)
    return w.whole(w("Add", w("DequantizeLinear", q, 2, zero=zero), 1))


def islands() -> dict[str, Expression]:
    """By name."""
    return {
        f"island {kind} {dtype}{' per channel' * per}": quantized_island(dtype, bool(per), kind)
        for kind in sorted(QUANTIZED)
        for dtype in sorted(FLOATS)
        for per in (0, 1)
    }


def over_fused(dtype: str, live: int = 64, op: str = "Sqrt") -> Expression:
    """`live` values that are all needed again once their sum is known."""
    w = Writer(2, (dtype, "11"))
    values = [0]
    for _ in range(live - 1):
        values.append(w(op, values[-1]))
    total = values[0]
    for value in values[1:]:
        total = w("Add", total, value)
    last = total
    for value in values:
        last = w("Div", value, last)
    return w.whole(last)


def crowded(dtype: str) -> Expression:
    """24 inputs and 64 values alive at a time, in two stages that share one value: memory is the limit, and few warps fit."""
    full, live, kept = 12, (51, 21), 3
    w = Writer(2, *(((dtype, "11"),) * (2 * full)))
    made: list[int] = []
    between: list[int] = []
    for stage, count in enumerate(live):
        read = [*between, *range(stage * full, (stage + 1) * full)]
        values = [w("Mul", read[at % len(read)], read[(at + 1 + at // len(read)) % len(read)]) for at in range(count)]
        total = values[0]
        for value in values[1:]:
            total = w("Add", total, value)
        last = total
        for value in values:
            last = w("Sub", value, last)
        between = [w("Div", last, w("Add", w("Abs", total), w.number(dtype, 1)))]
        made += [between[0], *(w("Mul", value, between[0]) for value in values[-kept:])]
    return w.whole(*made)


def waiting(dtype: str, live: int = 180) -> Expression:
    """`live` cheap values, all needed again behind a root of their sum: so many registers that 8 warps are left, each a chain of waits."""
    w = Writer(2, (dtype, "11"))
    values = [0, w("Abs", 0)]
    while len(values) < live:
        values.append(w("Mul" if len(values) % 2 else "Sub", values[-1], values[-2]))
    return w.whole(_in_eights(w, "Max", w("Sqrt", _in_eights(w, "Sum", values[0], values[1:])), values))


def spilling(live: int = 180) -> Expression:
    """`live` cheap whole numbers of 64 bits, two registers each, all needed again behind their minimum: most of them are spilled."""
    w = Writer(2, ("int64", "11"))
    values = [0, w("Abs", 0)]
    while len(values) < live:
        values.append(w("Add" if len(values) % 2 else "BitwiseXor", values[-1], values[-2]))
    return w.whole(_in_eights(w, "Max", _in_eights(w, "Min", values[0], values[1:]), values))


def _in_eights(w: Writer, op: str, first: int, others: Sequence[int]) -> int:
    for start in range(0, len(others), 7):
        first = w(op, first, *others[start : start + 7])
    return first


def too_big() -> list[tuple[str, Expression]]:
    """Chains that a person would call too big, by name. On an H200 only the last is slower than its parts; the one before draws."""
    return [
        ("64 live values, 24 inputs", crowded("float16")),
        ("64 live values, softsigns", over_fused("float16", op="Softsign")),
        ("180 live values, one root", waiting("float16")),
        ("180 live values, int64", spilling()),
    ]


_APART = ("Cast", "Identity", "Clip", "QuantizeLinear")  # with cases of their own


def every_operator(kind: str) -> list[Expression]:
    """All operators that take a type, some in each expression, all of them outputs in turn."""
    names = [name for name, operator in OPERATORS.items() if kind in operator.takes and name not in _APART]
    found = []
    for start in range(0, len(names), 8):
        inputs: Sequence[tuple[str, str]] = ((kind, "111"), (kind, "101"), ("bool", "111"))
        w = Writer(3, *inputs)
        made = []
        for name in names[start : start + 8]:
            operator = OPERATORS[name]
            count = max(operator.least, 2 if operator.folded else 1)
            operands = [2, 0, 1] if operator.first_bool else [0, 1, 0][:count]
            attributes = {"fmod": 1.0} if name == "Mod" and kind in FLOATS else {}
            value = w(name, *operands, **attributes)
            axes_full = count > 1 or operator.first_bool or operands[0] == 0
            made.append(value) if axes_full else None
        found.append(w.whole(*made))
    return found


def casts(kind: str) -> Expression:
    w = Writer(2, (kind, "11"), ("int32", "01"))
    narrow = [w("Cast", w("Add", 0, w("Cast", 1, to=kind)), to=to) for to in ("float32", "float16", "bfloat16", "bool")]
    return w.whole(*narrow)


def values() -> dict[str, Expression]:
    """What is checked on a GPU, by name."""
    found: dict[str, Expression] = {}
    for kind in ("float32", "float16", "bfloat16", "int32", "int64", "bool"):
        found.update({f"operators {kind} {number}": one for number, one in enumerate(every_operator(kind))})
    for kind in sorted(FLOATS):
        found[f"casts {kind}"] = casts(kind)
        found[f"hard swish affine {kind}"] = hard_swish_affine(kind)
        found[f"film silu {kind}"] = film_silu(kind)
        found[f"snake {kind}"] = snake(kind)
        found[f"layer scale residual norm {kind}"] = layer_scale_residual_norm(kind)
        found[f"masked softmax {kind}"] = masked_softmax(kind)
        found[f"rotary {kind}"] = rotary(kind)
    found["quantize dequantize float16"] = quantize_dequantize("float16")
    found["gated float16"] = gated("float16")
    for end in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "Softmax", "LogSoftmax", "RMSNormalization"):
        w = Writer(2, ("float16", "11"), ("float16", "1"))
        total = w("Add", 0, 1)
        found[f"{end} float16"] = w.whole(total, w(end, total, *([1] if end[0:3] == "RMS" else [])))
    w = Writer(2, ("float32", "11"), ("float32", "11"))
    found["dropped axis float32"] = w.whole(w("ReduceMean", w("Mul", 0, 1), keepdims=0.0))
    return found
