"""Expressions in float64, from the ONNX operators' definitions, and how far a float32 evaluation may be from that.

The bound is found by evaluating with random relative errors of some float32 roundings behind every step (stochastic arithmetic, after
J. Vignes' CESTAC method): where the results spread, any float32 evaluation may differ as much.

A value that a cut stores is rounded to its type there, as the kernels do it: in the evaluation that is exact otherwise, and in the
disturbed ones behind their errors, so that what lies near the middle between two numbers of the type may fall to either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.elementwise.compiling import Plan
from onnxfuse.elementwise.expression import ABSENT, NUMPY, Expression, Step
from onnxfuse.elementwise.operators import FLOATS, INTEGERS, OPERATORS, REDUCTIONS

Array = np.ndarray[Any, Any]
FLOAT32 = 2.0**-24
LARGEST = float(np.finfo(np.float32).max)

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def _clip(x: Array, low: Any, high: Any) -> Array:
    x = x if low is None else np.where(x < low, low, x)
    return x if high is None else np.where(x > high, high, x)


def _clip_in(kind: str, x: Array, low: Any = None, high: Any = None) -> Array:
    """An absent bound is the type's largest finite number."""
    if kind not in FLOATS:
        return _clip(x, low, high)
    largest = float(ml_dtypes.finfo(NUMPY[kind]).max)
    return _clip(x, -largest if low is None else low, largest if high is None else high)


def _hard_sigmoid(x: Array, alpha: float, beta: float) -> Array:
    return _clip(alpha * x + beta, np.float64(0), np.float64(1))


def _max(a: Array, b: Array) -> Array:
    return np.where((a > b) | (a != a), a, b)


def _min(a: Array, b: Array) -> Array:
    return np.where((a < b) | (a != a), a, b)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b)
    down = a // safe  # rounded down, where the operator drops the fraction
    return np.where(b == 0, 0, down + ((down * safe != a) & ((a < 0) != (safe < 0))))


def _modulo(a: Array, b: Array, fmod: float) -> Array:
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    safe = np.where(b == 0, 1, b)
    return np.where(b == 0, 0, np.fmod(a, safe) if fmod else np.mod(a, safe))


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _divide, "Max": _max, "Min": _min, "Sum": np.add, "Mean": np.add,
    "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "Equal": np.equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal, "Less": np.less, "LessOrEqual": np.less_equal, "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor, "Pow": np.power, "PRelu": lambda x, slope: np.where(x < 0, slope * x, x),
}  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {
    "Abs": np.abs, "Neg": np.negative, "Not": np.logical_not, "BitwiseNot": np.invert, "Ceil": np.ceil, "Floor": np.floor, "Round": np.rint,
    "Exp": np.exp, "Log": np.log, "Sqrt": np.sqrt, "Sin": np.sin, "Cos": np.cos, "Tanh": np.tanh, "Erf": _erf, "Sigmoid": _sigmoid,
    "Reciprocal": lambda x: 1 / x, "Relu": lambda x: np.where(x < 0, np.zeros_like(x), x), "Sign": np.sign, "IsNaN": np.isnan,
    "Identity": lambda x: x, "Silu": lambda x: x * _sigmoid(x), "QuickGelu": lambda x: x * _sigmoid(np.float64(np.float32(1.702)) * x),
    "Softplus": _softplus, "Softsign": lambda x: x / (1 + np.abs(x)), "Mish": lambda x: x * np.tanh(_softplus(x)),
    "HardSwish": lambda x: x * _hard_sigmoid(x, 1 / 6, 0.5), "Gelu": lambda x: x / 2 * (1 + _erf(x / math.sqrt(2))),
    "GeluTanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}  # fmt: skip
_WITH_ATTRIBUTES: dict[str, Callable[..., Any]] = {
    "LeakyRelu": lambda x, alpha: np.where(x < 0, alpha * x, x),
    "Elu": lambda x, alpha: np.where(x < 0, alpha * np.expm1(x), x),
    "Celu": lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x / alpha)),
    "Selu": lambda x, alpha, gamma: gamma * np.where(x > 0, x, alpha * np.expm1(x)),
    "ThresholdedRelu": lambda x, alpha: np.where(x > alpha, x, 0.0),
    "HardSigmoid": _hard_sigmoid,
    "IsInf": lambda x, negative, positive: (np.isposinf(x) & bool(positive)) | (np.isneginf(x) & bool(negative)),
    "Mod": None,  # type: ignore[dict-item]
}


# Their formulas subtract numbers of about the operand's size, or of 1.
_CANCELLING = frozenset({"Gelu", "GeluTanh", "HardSigmoid", "HardSwish", "Mish", "LogSoftmax", "Selu", "Celu", "Elu"})


def _cast(x: Array, to: str) -> Array:
    if to == "bool":
        return x != 0
    if to in INTEGERS:
        return np.trunc(x).astype(to) if x.dtype.kind == "f" else x.astype(to)
    return rounded(x.astype(np.float64), to)


def rounded(x: Array, dtype: str) -> Array:
    """float64 values rounded to a float type."""
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(NUMPY[dtype]).astype(np.float64)


def stored(plan: Plan) -> frozenset[int]:
    """Values that go through memory from one part of a plan to another."""
    return frozenset(value for part in plan.parts for value in part.reads if value >= len(plan.expression.inputs))


def evaluate(
    given: Expression,
    inputs: Sequence[Array],
    shape: tuple[int, ...],
    noise: np.random.Generator | None = None,
    rounds: Collection[int] = (),
) -> list[Array]:
    """Outputs in float64 (integers and bool in their type), not rounded to their type. noise: disturb every step by some roundings.
    rounds: values that are rounded to their type before anything reads them."""
    found: list[Any] = [_widened(array, one.dtype) for array, one in zip(inputs, given.inputs, strict=True)]
    with np.errstate(all="ignore"):
        for one in given.steps:
            value = _step(given, one, found)
            if noise is not None and value.dtype.kind == "f" and one.op != "Constant":
                value = value * (1 + noise.uniform(-6, 6, np.shape(value)) * FLOAT32)
                tiny = np.abs(value) < 2.0**-126  # where float32 underflows
                value = np.where(tiny & (noise.integers(0, 2, np.shape(value)) == 0), 0.0, value)
                value = np.where(np.abs(value) > LARGEST, np.copysign(np.inf, value), value)  # where it overflows
                value = _with_cancellation(one, [found[read] for read in one.read], value, noise)
            if len(found) in rounds and value.dtype.kind == "f":
                value = rounded(value, given.types[len(found)])
            found.append(value)
    return [found[v] if v == given.row_output else np.broadcast_to(found[v], shape) for v in given.outputs]


def _with_cancellation(one: Step, operands: Sequence[Any], value: Any, noise: np.random.Generator) -> Any:
    """What roundings within an operator's own formula may do, where it subtracts numbers that are larger than the result."""
    if one.op in _CANCELLING:
        size = 1 + np.abs(operands[0])
    elif one.op.endswith("Normalization"):
        x, scale, *bias = operands
        spread = np.sqrt((x * x).mean(axis=-1, keepdims=True) if one.op[0] == "R" else x.var(axis=-1, keepdims=True)) + 1e-3
        size = np.abs(scale) * np.abs(x).max(axis=-1, keepdims=True, initial=0.0) / spread + sum(np.abs(b) for b in bias)
    else:
        return value
    size = np.where(np.isfinite(size), size, 0) * 4 * FLOAT32
    vanished = (np.abs(value) < size) & (noise.integers(0, 2, np.shape(value)) == 0)
    return np.where(vanished, 0.0, value + size * noise.uniform(-1, 1, np.shape(value)))


def _widened(array: Array, dtype: str) -> Array:
    return array.astype(np.float64) if dtype in FLOATS else array


def _step(given: Expression, one: Step, found: Sequence[Any]) -> Any:
    if one.op == "Constant":
        kind = str(one.get("type"))
        return np.asarray(one.get("value"), np.float64 if kind in FLOATS else NUMPY[kind])
    operands = [None if value == ABSENT else found[value] for value in one.operands]
    if one.op in REDUCTIONS:
        return _reduction(one, operands)
    if OPERATORS[one.op].jumps:
        operands = [
            x if given.types[value] not in FLOATS - {"float32"} else rounded(x, given.types[value])
            for value, x in zip(one.operands, operands, strict=True)
        ]
    if one.op == "Cast":
        return _cast(operands[0], str(one.get("to")))
    if one.op == "Clip":
        return _clip_in(given.types[one.operands[0]], *operands)
    if one.op == "Where":
        return np.where(*operands)
    if one.op == "QuantizeLinear":
        low, high, zero = (one.get(name) for name in ("low", "high", "zero"))
        whole = np.rint(operands[0] / operands[1])
        return np.where(np.isnan(whole), low, np.clip(whole + zero, low, high))
    if one.op == "DequantizeLinear":
        return (operands[0] - one.get("zero")) * operands[1]
    if one.op == "Mod":
        return _modulo(*operands, one.get("fmod"))
    if one.op in _UNARY:
        return _UNARY[one.op](operands[0])
    if one.op in _BINARY:
        total = operands[0]
        for x in operands[1:]:
            total = _BINARY[one.op](total, x)
        return total / len(operands) if one.op == "Mean" else total
    attributes = [np.float64(np.float32(one.get(name))) for name in OPERATORS[one.op].attributes]
    return _WITH_ATTRIBUTES[one.op](operands[0], *attributes)


def _reduction(one: Step, operands: Sequence[Any]) -> Any:
    x = operands[0]
    if one.op.startswith("Reduce"):
        by = {"Sum": np.sum, "Mean": np.mean, "Max": np.max, "Min": np.min}[one.op.removeprefix("Reduce")]
        return by(x, axis=-1, keepdims=bool(one.get("keepdims")))
    if one.op.endswith("Softmax"):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        softmax = e / e.sum(axis=-1, keepdims=True)
        return softmax if one.op == "Softmax" else x - x.max(axis=-1, keepdims=True) - np.log(e.sum(axis=-1, keepdims=True))
    if one.op == "LayerNormalization":
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float64(np.float32(one.get("epsilon")))) * operands[1]
    return y + operands[2] if len(operands) > 2 else y


def compare(
    given: Expression,
    inputs: Sequence[Array],
    shape: tuple[int, ...],
    got: Sequence[Array],
    what: object,
    seed: int = 0,
    rounds: Collection[int] = (),
) -> None:
    """Asserts that outputs are those of the expression, as far as float32 arithmetic can tell. rounds: as in `evaluate`."""
    for number, (limits, value) in enumerate(zip(limits_of(given, inputs, shape, seed, rounds), got, strict=True)):
        fault = differs(value, limits)
        assert fault is None, f"output {number} of {what}: {fault}: {given.text}"


@dataclass(frozen=True)
class Limits:
    """What an output may be: `want`, within `bound` where it is finite.

    Where float32 arithmetic cannot tell (`sure` is false) anything is right.
    """

    want: Array
    bound: Array
    sure: Array


SAMPLES, ROUNDED_SAMPLES = 6, 24  # the more where a value may fall to either of two numbers: all six would agree once in 64 times


def limits_of(
    given: Expression, inputs: Sequence[Array], shape: tuple[int, ...], seed: int = 0, rounds: Collection[int] = ()
) -> list[Limits]:
    exact = evaluate(given, inputs, shape, rounds=rounds)
    rng = np.random.default_rng(seed)
    samples = [evaluate(given, inputs, shape, rng, rounds) for _ in range(ROUNDED_SAMPLES if rounds else SAMPLES)]
    return [
        _limits(given.types[value], want, [sample[number] for sample in samples])
        for number, (value, want) in enumerate(zip(given.outputs, exact, strict=True))
    ]


def _limits(kind: str, want: Array, spread: Sequence[Array]) -> Limits:
    if kind not in FLOATS:
        return Limits(want, np.zeros(want.shape), np.logical_and.reduce([sample == want for sample in spread]))
    unit, tiny = {"float32": (FLOAT32, 2.0**-143), "float16": (2.0**-11, 2.0**-24), "bfloat16": (2.0**-8, 2.0**-126)}[kind]
    target = rounded(want, kind)
    with np.errstate(all="ignore"):
        deviation = np.max([np.abs(sample - want) for sample in spread], axis=0)
        bound = 1.01 * unit * np.abs(want) + 3 * deviation + 16 * FLOAT32 * np.abs(want) + tiny
        sure = np.logical_and.reduce([np.isfinite(rounded(s, kind)) == np.isfinite(target) for s in spread])
        sure &= np.logical_and.reduce([np.isnan(s) == np.isnan(want) for s in spread])
        sure &= ~((np.abs(want) > LARGEST / 2) & np.isfinite(want))
        sure &= np.isfinite(bound) | ~np.isfinite(target)
    # Not rounded: the bound has the rounding in it, whichever way it goes.
    return Limits(np.where(np.isfinite(target), want, target), bound, sure)


def differs(got: Array, limits: Limits) -> str | None:
    """What is wrong with an output; None where nothing is."""
    if got.shape != limits.want.shape:
        return f"shape {got.shape} and not {limits.want.shape}"
    have = got.astype(np.float64) if got.dtype.kind not in "bi" else got
    with np.errstate(all="ignore"):
        right = (have == limits.want) | (np.isnan(have) & np.isnan(limits.want) if have.dtype.kind == "f" else False)
        if have.dtype.kind == "f":
            right |= np.isfinite(have) & np.isfinite(limits.want) & (np.abs(have - limits.want) <= limits.bound)
    wrong = limits.sure & ~right
    if not wrong.any():
        return None
    return f"{int(wrong.sum())} values are wrong, such as {have[wrong][:3]} for {limits.want[wrong][:3]} within {limits.bound[wrong][:3]}"
