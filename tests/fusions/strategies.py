"""Every fusion's pattern in every spelling, planted by a `pick` that chooses: `every` walks through all choices, hypothesis draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.fusions.helpers import Net

Pick = Callable[..., Any]
WIDTH = 8


def first(*options: Any) -> Any:
    """The pick that takes the usual spelling."""
    return options[0]


class Choices:
    """Answers `pick(a, b, ...)` from a list of indices, with the first option after its end."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.taken: list[tuple[int, int]] = []

    def __call__(self, *options: Any) -> Any:
        index = self.indices[len(self.taken)] if len(self.taken) < len(self.indices) else 0
        self.taken.append((index, len(options)))
        return options[index]


def every(build: Callable[[Pick], Any]) -> Iterator[Any]:
    """What `build(pick)` returns for every sequence of choices."""
    indices: list[int] = []
    while True:
        pick = Choices(indices)
        yield build(pick)
        while pick.taken and pick.taken[-1][0] + 1 == pick.taken[-1][1]:
            pick.taken.pop()
        if not pick.taken:
            return
        indices = [index for index, _ in pick.taken[:-1]] + [pick.taken[-1][0] + 1]


# ---------------------------------------------------------------------------------------------------- spellings


@dataclass
class Planter:
    """Writes patterns into a net: elements of type `dtype`, spellings by `pick`."""

    net: Net
    pick: Pick
    dtype: Any = np.float32
    commute: bool = False  # choose the order of commutative operands, too
    seed: int = 0

    def const(self, number: Any, dtype: Any = None) -> str:
        return self.net.const(number, dtype or self.dtype)

    def random(self, *shape: int) -> str:
        self.seed += 1
        return self.const(np.random.default_rng(self.seed).uniform(0.5, 1.5, shape))

    def both(self, op: str, a: str, b: str) -> str:
        """A commutative operator."""
        first, second = self.pick((a, b), (b, a)) if self.commute else (a, b)
        return self.net.op(op, first, second)

    def square(self, x: str) -> str:
        kind = self.pick("pow", "mul", "pow_int") if self.net.opset >= 12 else self.pick("pow", "mul")
        if kind == "mul":
            return self.net.op("Mul", x, x)
        return self.net.op("Pow", x, self.const(2, np.int64 if kind == "pow_int" else None))

    def root(self, x: str) -> str:
        return self.pick(lambda: self.net.op("Sqrt", x), lambda: self.net.op("Pow", x, self.const(0.5)))()

    def inverse_root(self, x: str) -> str:
        return self.pick(
            lambda: self.net.op("Reciprocal", self.net.op("Sqrt", x)),
            lambda: self.net.op("Div", self.const(1), self.root(x)),
            lambda: self.net.op("Pow", x, self.const(-0.5)),
        )()

    def layernorm(self, x: str, scale: bool = True, bias: bool = True, epsilon: float = 1e-3) -> str:
        net = self.net
        mean = net.mean(x)
        centered = net.op("Sub", x, mean)
        deviation = self.pick(centered, "again")
        if deviation == "again":
            deviation = net.op("Sub", x, mean)
        inner = self.both("Add", net.mean(self.square(centered)), self.const(epsilon))
        form = self.pick("divide", "multiply", *(["fold"] if scale else []), *(["tensorflow"] if scale and bias else []))
        gamma, beta = self.random(WIDTH), self.random(WIDTH)
        if form == "tensorflow":
            factor = self.both("Mul", self.inverse_root(inner), gamma)
            return self.both("Add", self.both("Mul", x, factor), net.op("Sub", beta, self.both("Mul", mean, factor)))
        if form == "fold":
            y = self.both("Mul", deviation, self.both("Mul", self.inverse_root(inner), gamma))
        else:
            y = net.op("Div", deviation, self.root(inner)) if form == "divide" else self.both("Mul", deviation, self.inverse_root(inner))
            y = self.both("Mul", y, gamma) if scale else y
        return self.both("Add", y, beta) if bias else y

    def rmsnorm(self, x: str, scale: bool = True, epsilon: float = 1e-3) -> str:
        inner = self.both("Add", self.net.mean(self.square(x)), self.const(epsilon))
        form = self.pick("divide", "multiply", *(["fold"] if scale else []))
        gamma = self.random(WIDTH)
        if form == "fold":
            return self.both("Mul", x, self.both("Mul", self.inverse_root(inner), gamma))
        y = self.net.op("Div", x, self.root(inner)) if form == "divide" else self.both("Mul", x, self.inverse_root(inner))
        return self.both("Mul", y, gamma) if scale else y

    def half(self, x: str) -> str:
        return self.pick(lambda: self.both("Mul", x, self.const(0.5)), lambda: self.net.op("Div", x, self.const(2)))()

    def gated(self, x: str, gate: str) -> str:
        """x * (1 + gate) / 2"""
        form = self.pick("x plus half", "half x plus", "x (half plus)", "x (half + half gate)")
        if form == "x (half + half gate)":
            return self.both("Mul", x, self.both("Add", self.half(gate), self.const(0.5)))
        plus = self.both("Add", gate, self.const(1))
        if form == "half x plus":
            return self.both("Mul", self.half(x), plus)
        return self.half(self.both("Mul", x, plus)) if form == "x plus half" else self.both("Mul", x, self.half(plus))

    def gelu_erf(self, x: str) -> str:
        scaled = self.pick(
            lambda: self.net.op("Div", x, self.const(math.sqrt(2))),
            lambda: self.both("Mul", x, self.const(math.sqrt(0.5))),
        )()
        return self.gated(x, self.net.op("Erf", scaled))

    def cubic(self, x: str, scale: float) -> str:
        """scale * (x + 0.044715 x^3)"""
        net, k = self.net, self.const(0.044715)
        form = self.pick("k x^3", "k x x x", "k x^2 x", "x (1 + k x^2)", "(x scale) (1 + k x^2)", "multiplied out")
        if form == "multiplied out":
            cube = net.op("Pow", x, self.const(3))
            return self.both("Add", self.both("Mul", x, self.const(scale)), self.both("Mul", cube, self.const(scale * 0.044715)))
        if "1 +" in form:
            bent = self.pick(
                lambda: self.both("Mul", k, self.square(x)),
                lambda: self.both("Mul", self.both("Mul", k, x), x),
            )()
            factor = self.both("Add", bent, self.const(1))
            if form == "x (1 + k x^2)":
                return self.both("Mul", self.both("Mul", x, factor), self.const(scale))
            return self.both("Mul", self.both("Mul", x, self.const(scale)), factor)
        if form == "k x^3":
            cube = self.pick(lambda: net.op("Pow", x, self.const(3)), lambda: self.both("Mul", x, self.square(x)))()
            third = self.both("Mul", k, cube)
        elif form == "k x x x":
            third = self.both("Mul", self.both("Mul", self.both("Mul", k, x), x), x)
        else:
            third = self.both("Mul", self.both("Mul", self.square(x), k), x)
        return self.both("Mul", self.both("Add", x, third), self.const(scale))

    def gelu_tanh(self, x: str) -> str:
        scale = math.sqrt(2 / math.pi)
        if self.pick("tanh", "sigmoid") == "tanh":
            return self.gated(x, self.net.op("Tanh", self.cubic(x, scale)))
        return self.both("Mul", x, self.net.op("Sigmoid", self.cubic(x, 2 * scale)))

    def gelu_quick(self, x: str) -> str:
        return self.both("Mul", x, self.net.op("Sigmoid", self.both("Mul", x, self.const(1.702))))

    def silu(self, x: str) -> str:
        return self.both("Mul", x, self.net.op("Sigmoid", self.pick(lambda: x, lambda: self.both("Mul", x, self.const(1)))()))

    def residual(self, x: str, skip: str) -> str:
        """x + skip, a bias perhaps between or behind them."""
        form = self.pick("plain", "bias first", "bias last")
        if form == "bias first":
            x = self.both("Add", x, self.random(WIDTH))
        y = self.both("Add", x, skip)
        return self.both("Add", y, self.random(WIDTH)) if form == "bias last" else y
