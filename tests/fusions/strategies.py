"""Every fusion's pattern in every spelling, planted by a `pick` that chooses: `every` walks through all choices, hypothesis draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.fusions.helpers import NEWEST, Net, make, value

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

    # What follows keeps the shape of x, which is [batch, channels, ...] or, for `linear` and `attention`, [..., rows, WIDTH].

    def convolution(self, x: str, shape: tuple[int, ...]) -> str:
        """Conv or ConvTranspose, its bias inside or behind it, and a BatchNormalization."""
        channels, spatial = shape[1], len(shape) - 2
        groups = self.pick(1, channels)
        op = self.pick("Conv", "ConvTranspose")
        bias = self.pick("inside", "behind", "both", "none")
        inside = [self.random(channels)] if bias in ("inside", "both") else []
        weight = self.random(channels, channels // groups, *([1] * spatial))
        y = self.net.op(op, x, weight, *inside, kernel_shape=[1] * spatial, group=groups)
        if bias in ("behind", "both"):
            y = self.both("Add", y, self.random(*self.pick((channels,), (1, channels)), *([1] * spatial)))
        if self.pick(True, False):
            y = self.net.op("BatchNormalization", y, *(self.random(channels) for _ in range(4)), epsilon=self.pick(1e-3, 0.1))
        return y

    def groupnorm(self, x: str, shape: tuple[int, ...]) -> str:
        channels = shape[1]
        groups = self.pick(channels, 1)
        grouped = self.net.op("Reshape", x, self.const(self.pick([0, groups, -1], [shape[0], groups, -1]), np.int64))
        ones, zeros = (self.const(np.full(groups, number)) for number in (1, 0))
        y = self.net.op("InstanceNormalization", grouped, ones, zeros, epsilon=1e-3)
        y = self.net.op("Reshape", y, self.pick(lambda: self.net.op("Shape", x), lambda: self.const(shape, np.int64))())
        column = (channels,) + (1,) * (len(shape) - 2)
        y = self.both("Mul", y, self.random(*column)) if self.pick(True, False) else y
        return self.both("Add", y, self.random(*column)) if self.pick(True, False) else y

    def linear(self, x: str, shape: tuple[int, ...]) -> str:
        """MatMul or Gemm and two additions of a constant, or a BatchNormalization."""
        weight = self.const(np.random.default_rng(self.seed).uniform(-0.4, 0.4, (WIDTH, WIDTH)))
        if len(shape) != 2 or self.pick(True, False):
            y = self.both("Add", self.net.op("MatMul", x, weight), self.random(WIDTH))
        else:
            y = self.net.op("Gemm", x, weight, self.random(WIDTH), transB=self.pick(0, 1))
            if self.pick(True, False):
                return self.net.op("BatchNormalization", y, *(self.random(WIDTH) for _ in range(4)))
        return self.both("Add", y, self.random(*self.pick((WIDTH,), (1, WIDTH)))) if self.pick(True, False) else y

    def attention(self, x: str, shape: tuple[int, ...]) -> str:
        """One head, of three products of one tensor."""
        net, x = self.net, self.net.op("Tanh", x)  # large scores would make one of many alike the winner
        made = []
        for _ in range(3):
            self.seed += 1
            weight = np.random.default_rng(self.seed).uniform(-0.4, 0.4, (WIDTH, WIDTH))
            y = net.op("MatMul", x, self.const(weight))
            made.append(self.both("Add", y, self.random(WIDTH)) if self.pick(True, False) else y)
        axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        scores = net.op("MatMul", made[0], net.op("Transpose", made[1], perm=axes))
        scores = self.pick(lambda: self.both("Mul", scores, self.const(0.35)), lambda: net.op("Div", scores, self.const(3)))()
        return net.op("MatMul", net.op("Softmax", scores, axis=len(shape) - 1), made[2])


# ------------------------------------------------------------------------------------------------------- graphs

SHAPES = ((WIDTH,), (3, WIDTH), (2, 3, WIDTH), (1, 3, WIDTH), (2, 1, 2, WIDTH))
KINDS = ("layernorm", "rmsnorm", "gelu_erf", "gelu_tanh", "gelu_quick", "silu")


@dataclass
class Constants(Net):
    """A net whose equal constants may be one tensor, and whose constants may be nodes, initializers, or ones that a caller may override."""

    pick: Pick = first
    ir: int = 10
    overridable: list[onnx.ValueInfoProto] = field(default_factory=list)
    outer: Constants | None = None  # where a body may keep its constants
    known: dict[tuple[Any, ...], str] = field(default_factory=dict)
    other_shapes: set[str] = field(default_factory=set)  # inner tensors that need not broadcast to the others

    def const(self, number: Any, dtype: Any = np.float32, name: str | None = None) -> str:
        held = np.asarray(number).astype(dtype)
        key = (held.tobytes(), held.shape, held.dtype)
        if key in self.known and self.pick(True, False):
            return self.known[key]
        if not held.ndim and held.dtype.kind == "f":
            held = held.reshape(self.pick((), (1,)))
        if self.outer is not None and self.pick(False, True):
            return self.outer.const(held, dtype)
        name = self.name(f"{self.prefix}c")
        tensor = numpy_helper.from_array(held, name)
        kinds = ["initializer"] * 4 if self.outer is None or self.ir >= 4 else []
        kind = self.pick(*kinds, "node", *(["overridable"] if self.outer is None and self.ir >= 4 and held.dtype.kind == "f" else []))
        if kind == "node":
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.constants.append(tensor)
        if kind == "overridable":
            self.overridable.append(value(name, held.shape, tensor.data_type))
        self.known[key] = name
        return name


@dataclass(frozen=True)
class Example:
    """A model, inputs for it, and how far float rounding may take a right rewrite from it."""

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    tolerance: float


def folded(planter: Planter, shape: tuple[int, ...]) -> list[str]:
    """The patterns that a tensor of this shape can hold beside the row-wise ones; onnxruntime runs them in float32 alone."""
    if planter.dtype != np.float32 or len(shape) < 2:
        return []
    return ["linear", "attention", *(["convolution", "groupnorm"] if len(shape) > 2 else [])]


def step(planter: Planter, x: str, skip: str, shape: tuple[int, ...]) -> str:
    """One of the patterns, or something that is none. `shape` is that of x and skip."""
    pick, net = planter.pick, planter.net
    kind = pick("canonical", "bias", "residual", "noise", *(["folded"] * 2 if folded(planter, shape) else []))
    if kind == "folded":
        before = len(net.nodes)
        y: str = getattr(planter, pick(*folded(planter, shape)))(x, shape)
        if isinstance(net, Constants):
            net.other_shapes.update(name for node in net.nodes[before:] for name in node.output if name != y)
        return y
    if kind == "noise":
        return pick(lambda: net.op("Tanh", x), lambda: net.op("Add", x, skip), lambda: planter.both("Mul", x, planter.random(WIDTH)))()
    if kind == "bias":
        x = planter.both("Add", x, planter.random(*pick((WIDTH,), (1, WIDTH), ())))
    if kind == "residual":
        x = planter.residual(x, skip)
    name = pick(*(KINDS if kind != "residual" else ("layernorm", "rmsnorm")))
    return getattr(planter, name)(x, **({"epsilon": pick(1e-3, 0.1)} if name in ("layernorm", "rmsnorm") else {}))


def inner_tensors(net: Net) -> list[str]:
    return [name for node in net.nodes if node.op_type != "Constant" for name in node.output]


def nested(planter: Planter, x: str, skip: str, shape: tuple[int, ...], elem: int) -> str:
    """A step in the body of an If, a Loop or a Scan, on tensors that the body captures or is given."""
    net, pick = planter.net, planter.pick
    assert isinstance(net, Constants)
    inner = Constants(net.opset, prefix=f"b{len(net.nodes)}_", pick=pick, ir=net.ir, outer=net)
    kind = pick("If", "Loop", "Scan") if len(shape) > 2 else pick("If", "Loop")
    own = inner.name("v") if kind != "If" else x
    captured, within = (skip, shape) if kind != "Scan" else (own, shape[1:])
    last = inner.op("Identity", step(Planter(inner, pick, planter.dtype, planter.commute, seed=planter.seed + 100), own, captured, within))
    if kind == "If":
        minus = inner.name(f"{inner.prefix}minus")
        captured = pick(x, *(name for name in inner_tensors(net) if name not in net.other_shapes))
        other = helper.make_graph([helper.make_node("Sub", [x, captured], [minus])], "else", [], [onnx.ValueInfoProto(name=minus)])
        then = helper.make_graph(inner.nodes, "then", [], [onnx.ValueInfoProto(name=last)], inner.constants)
        return net.op("If", "flag", then_branch=then, else_branch=other)
    given, result = value(own, within, elem), value(last, None, elem)
    result.type.tensor_type.ClearField("shape")
    if kind == "Scan":
        return net.op("Scan", x, body=helper.make_graph(inner.nodes, "body", [given], [result], inner.constants), num_scan_inputs=1)
    go, i = inner.name("go"), inner.name("i")
    inner.nodes.append(helper.make_node("Identity", [go], [go + "_on"]))
    before = [value(i, [], TensorProto.INT64), value(go, [], TensorProto.BOOL), given]
    body = helper.make_graph(inner.nodes, "body", before, [value(go + "_on", [], TensorProto.BOOL), result], inner.constants)
    return net.op("Loop", net.const(2, np.int64), "", x, body=body)


def example(pick: Pick, seed: int) -> Example:
    """A graph of a few steps, each of which may read what any earlier one made, with inner tensors as further outputs."""
    dtype = pick(np.float32, np.float32, np.float16)
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shape = pick(*SHAPES)
    net = Constants(pick(17, 9, 11, 12, 13, 14, 16, 18, 20, 21, 23, NEWEST), pick=pick, ir=pick(10, 8, 4, 3))
    planter = Planter(net, pick, dtype, commute=True, seed=seed)
    made = ["x", "skip"]
    bodies = len(shape) > 1 and net.ir >= 4
    for _ in range(pick(1, 2, 3)):
        x, skip = pick(made[-1], made[0]), pick(*made)
        made.append(nested(planter, x, skip, shape, elem) if bodies and pick(False, False, True) else step(planter, x, skip, shape))
    inner = [name for name in inner_tensors(net) if name not in made]
    read = sorted({pick(*inner) for _ in range(pick(0, 0, 1, 2))}) if inner else []
    outputs = [made[-1], *(name if pick(True, False) else net.op("Abs", name) for name in read)]
    dims: tuple[Any, ...] = tuple(pick(size, f"d{i}") if i < len(shape) - 1 else size for i, size in enumerate(shape))
    inputs = [value("x", dims, elem), value("skip", dims, elem), value("flag", [], TensorProto.BOOL)]
    given = inputs + net.overridable
    if net.ir < 4:
        given += [value(t.name, t.dims, t.data_type) for t in net.constants]
    graph = helper.make_graph(net.nodes, "g", given, [onnx.ValueInfoProto(name=name) for name in outputs], net.constants)
    random = np.random.default_rng(seed)
    feeds = {name: random.standard_normal(shape).astype(dtype) for name in ("x", "skip")}
    model = make(graph, net.opset, net.ir)
    for output in model.graph.output:
        if not output.type.tensor_type.HasField("shape"):  # behind a loop
            output.CopyFrom(value(output.name, [None] * len(shape), elem))
    return Example(model, {**feeds, "flag": np.array(pick(True, False))}, 3e-4 if dtype == np.float32 else 6e-2)


@st.composite
def examples(draw: Any) -> Example:
    """`example`, with hypothesis choosing."""
    return example(lambda *options: options[draw(st.integers(0, len(options) - 1))], draw(st.integers(0, 1000)))
