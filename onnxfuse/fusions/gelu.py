"""gelu: a Gaussian error linear unit that an exporter spelled out becomes one node.

    erf     y = x/2 * (1 + erf(x / sqrt(2)))
    tanh    y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))
    quick   y = x * sigmoid(1.702 x)

When it wins: as the first step for others (bias_gelu, linear_epilogue). The three differ by up to 5e-4 (erf and tanh) and 2e-2 (quick), so
each stays its own kind. Source: "Gaussian Error Linear Units", Hendrycks and Gimpel, 2016; ONNX Gelu, version 20, has the first two. Below
that version, and for the third, the node is of domain onnxfuse; as one function cannot serve three formulas, each kind is an operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, const, either, op, tensor
from onnxfuse.graph.model import Model

NATIVE = 20
CUBIC = 0.044715
SCALE = math.sqrt(2 / math.pi)
_ONE = const("one", 1.0)


def _half(of: Pattern) -> Pattern:
    return either(op("Mul", of, const("half", 0.5)), op("Div", of, const("two", 2.0)))


def _gated(x: Pattern, plus: Pattern) -> Pattern:
    """x * plus / 2, with the half in any place."""
    return either(op("Mul", x, _half(plus)), op("Mul", plus, _half(x)), _half(op("Mul", x, plus)))


def _erf(x: Pattern) -> Pattern:
    argument = either(op("Div", x, const("sqrt2", math.sqrt(2))), op("Mul", x, const("rsqrt2", math.sqrt(0.5))))
    erf = op("Erf", argument, out="gate")
    halved = op("Add", _half(erf), const("half", 0.5))
    return either(_gated(x, op("Add", erf, _ONE)), op("Mul", x, halved))


def _tanh_argument(x: Pattern, scale: float) -> Pattern:
    """scale * (x + 0.044715 x^3) in the spellings that exporters use."""
    k, c = const("cubic", CUBIC), const("scale", scale)
    square = either(op("Mul", x, x), op("Pow", x, const("two", 2.0)))
    cube = either(op("Pow", x, const("three", 3.0)), op("Mul", x, square))
    bent = either(op("Mul", square, k), op("Mul", op("Mul", k, x), x))
    cubic = either(op("Mul", cube, k), op("Mul", bent, x), op("Mul", op("Mul", k, x), square))
    factor = op("Add", bent, _ONE)
    return either(
        op("Mul", op("Add", x, cubic), c),
        op("Mul", op("Mul", x, c), factor),
        op("Mul", op("Mul", x, factor), c),
        op("Mul", x, op("Mul", factor, c)),
        op("Add", op("Mul", x, c), op("Mul", cube, const("scaled_cubic", scale * CUBIC))),
    )


def _tanh(x: Pattern) -> Pattern:
    tanh = op("Tanh", _tanh_argument(x, SCALE), out="gate")
    # 1 + tanh(z) = 2 sigmoid(2 z)
    sigmoid = op("Sigmoid", _tanh_argument(x, 2 * SCALE), out="gate")
    halved = op("Add", _half(tanh), const("half", 0.5))
    return either(_gated(x, op("Add", tanh, _ONE)), op("Mul", x, halved), op("Mul", x, sigmoid))


def _quick(x: Pattern) -> Pattern:
    return op("Mul", x, op("Sigmoid", op("Mul", x, const("slope", 1.702), out="quick"), out="gate"))


@dataclass(frozen=True)
class GeluKind:
    """A formula, the operator that stands for it, and statements that compute float32 `y` from float32 `x`."""

    op: str
    approximate: str | None  # attribute of the native operator, where there is one
    body: str

    def native(self, opset: int) -> bool:
        return opset >= NATIVE and self.approximate is not None

    def statements(self, opset: int, given: str, result: str) -> str:
        """A function's statements for `result`, of the attribute dtype: the native operator where there is one."""
        if self.native(opset):
            return f'{result} = Gelu <approximate = "{self.approximate}"> ({given})'
        return f"x = Cast <to = 1> ({given})\n{self.body}\n{result} = Cast <to: int = @dtype> (y)"


_OPEN = """one = Constant <value = float {1.0}> ()
           half = Constant <value = float {0.5}> ()
           open = Add (gate, one)
           halved = Mul (x, half)
           y = Mul (halved, open)"""

KINDS = {
    "erf": GeluKind(
        "Gelu",
        "none",
        f"""rsqrt2 = Constant <value = float {{{math.sqrt(0.5)!r}}}> ()
            scaled = Mul (x, rsqrt2)
            gate = Erf (scaled)
            {_OPEN}""",
    ),
    "tanh": GeluKind(
        "GeluTanh",
        "tanh",
        f"""cubic = Constant <value = float {{{CUBIC!r}}}> ()
            scale = Constant <value = float {{{SCALE!r}}}> ()
            square = Mul (x, x)
            cube = Mul (square, x)
            bent = Mul (cube, cubic)
            sum = Add (x, bent)
            argument = Mul (sum, scale)
            gate = Tanh (argument)
            {_OPEN}""",
    ),
    "quick": GeluKind(
        "QuickGelu",
        None,
        """slope = Constant <value = float {1.702}> ()
           steep = Mul (x, slope)
           gate = Sigmoid (steep)
           y = Mul (x, gate)""",
    ),
}


def variant_of(node: gs.Node) -> str:
    """The kind that a canonical node stands for."""
    if node.domain == DOMAIN:
        return next(variant for variant, kind in KINDS.items() if kind.op == node.op)
    return "tanh" if node.attrs.get("approximate", "none") == "tanh" else "erf"


class Gelu(Fusion):
    """One of the three kinds; they are found and reported as one fusion with variants."""

    name = "gelu"
    kind = "canonical"
    patterns = (_erf(tensor("x")), _tanh(tensor("x")), _quick(tensor("x")))

    def check(self, match: Match, model: Model) -> Refusal | None:
        return _norms.refuse_operands(match, match["x"])

    def variant(self, match: Match) -> str:
        if match.get("quick") is not None:
            return "quick"
        return "erf" if match.node("gate").op == "Erf" else "tanh"

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        kind, x = KINDS[self.variant(match)], match["x"]
        if kind.native(new.opset):
            return new.node("Gelu", [x], [_norms.settle(match, x)], {"approximate": kind.approximate}, stem=self.name)
        attrs = {"dtype": _norms.element_type(x)}
        return new.node(kind.op, [x], [_norms.settle(match, x)], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        return tuple(
            _bodies.define(opset, f"{kind.op} <dtype> (X) => (Y) {{ {kind.statements(opset, 'X', 'Y')} }}")
            for kind in KINDS.values()
            if not kind.native(opset)
        )


FUSION = Gelu()
