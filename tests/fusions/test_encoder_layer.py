"""encoder_layer: layers as exporters write them against onnxruntime, and every reason to refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions import helpers
from tests.fusions.helpers import Net, value

ONLY = ("encoder_layer",)
WIDTH, HEADS, SIZE, INNER = 64, 2, 32, 128


def random(*shape: int, seed: int = 0, scale: float = 0.2) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


@dataclass
class Encoder:
    """x [2, S, 64] -> layers of an encoder; every spelling is a field."""

    opset: int = 17
    dtype: Any = np.float32
    before: bool = False  # pre-norm
    activation: str = "erf"
    masked: str | None = None  # "keys", "heads" or "full"
    scale: str = "divide"  # "divide", "multiply", "query", "both" or "none"
    shapes: str = "constant"  # of the reshapes: "constant" or "computed"
    turned: bool = False  # keys are turned twice
    flat: str | None = None  # keys are turned in three axes: "right", or "wrong", another way
    stacked: str | None = None  # queries, keys and values are split together and taken apart: "gather", "slice" or "split"
    places: tuple[int, ...] = (0, 1, 2)  # of queries, keys and values in the stack
    stack_perm: tuple[int, ...] = (2, 0, 3, 1, 4)
    embedded: bool = False  # x is normalised before the first layer
    bias: bool = True
    gain: bool = False  # layers are scaled (CaiT, DINOv2)
    constant_nodes: bool = False
    epsilon: tuple[float, float] = (1e-12, 1e-12)
    perm: tuple[int, ...] = (0, 2, 1, 3)
    size: int = SIZE
    tap: str | None = None  # what somebody else reads
    net: Net = field(init=False)
    seed: int = 0

    def __post_init__(self) -> None:
        self.net = Net(self.opset, constant_nodes=self.constant_nodes)

    def weight(self, *shape: int, scale: float = 0.2, shift: float = 0.0) -> str:
        self.seed += 1
        return self.net.const(random(*shape, seed=self.seed, scale=scale) + np.float32(shift), self.dtype)

    def linear(self, x: str, rows: int, columns: int, gain: bool = False) -> str:
        net = self.net
        y = net.op("MatMul", x, self.weight(rows, columns))
        if self.bias:
            y = net.op("Add", *([self.weight(columns), y] if self.seed % 2 else [y, self.weight(columns)]))
        return net.op("Mul", y, self.weight(columns, shift=1.0)) if gain else y

    def norm(self, x: str, epsilon: float, out: str | None = None) -> str:
        gamma, beta = self.weight(WIDTH, shift=1.0), self.weight(WIDTH)
        if self.opset >= 17:
            return self.net.op("LayerNormalization", x, gamma, beta, axis=-1, epsilon=epsilon, out=out)
        net = self.net
        centered = net.op("Sub", x, net.mean(x))
        variance = net.mean(net.op("Mul", centered, centered))
        root = net.op("Sqrt", net.op("Add", variance, net.const(epsilon, self.dtype)))
        return net.op("Add", net.op("Mul", net.op("Div", centered, root), gamma), beta, out=out)

    def grouped(self, x: str, perm: tuple[int, ...], shape: list[int], rank: int = 3) -> str:
        net = self.net
        if self.shapes == "constant":
            to = net.const(shape, np.int64)
        else:
            sizes = [net.op("Gather", net.op("Shape", x), net.const(i, np.int64)) for i in range(2)]
            parts = [net.op("Unsqueeze", size, net.const([0], np.int64)) for size in sizes]
            to = net.op("Concat", *parts, *(net.const([size], np.int64) for size in shape[2:]), axis=0)
        y = net.op("Reshape", x, to)
        return net.op("Transpose", y, perm=list(perm)) if perm else y

    def apart(self, h: str) -> list[str]:
        heads = [0, 0, WIDTH // self.size, self.size]
        keys = (0, 2, 1, 3) if self.turned or self.flat else (0, 2, 3, 1)
        return [self.grouped(self.linear(h, WIDTH, WIDTH), perm, heads) for perm in (self.perm, keys, (0, 2, 1, 3))]

    def taken_apart(self, h: str) -> list[str]:
        """As timm's exports: [batch, sequence, 3, heads, size], turned, and one of the three each."""
        net, zero = self.net, self.net.const([0], np.int64)
        whole = self.grouped(self.linear(h, WIDTH, 3 * WIDTH), self.stack_perm, [0, 0, 3, WIDTH // self.size, self.size])
        if self.stacked == "gather":
            return [net.op("Gather", whole, net.const(place, np.int64), axis=0) for place in self.places]
        if self.stacked == "slice":
            ends = [place + 1 if place < 2 else 2**63 - 1 for place in self.places]
            parts = [
                net.op("Slice", whole, net.const([place], np.int64), net.const([end], np.int64), zero)
                for place, end in zip(self.places, ends, strict=True)
            ]
        else:
            made = [f"{whole}_{place}" for place in range(3)]
            net.op("Split", whole, net.const([1, 1, 1], np.int64), out=made, axis=0)
            parts = [made[place] for place in self.places]
        return [net.op("Squeeze", part, zero) for part in parts]

    def activated(self, x: str) -> str:
        net = self.net
        if self.activation == "relu":
            return net.op("Relu", x)
        if self.activation == "tanh":
            cube = net.op("Mul", net.op("Pow", x, net.const(3.0, self.dtype)), net.const(0.044715, self.dtype))
            inner = net.op("Mul", net.op("Add", x, cube), net.const(np.sqrt(2 / np.pi), self.dtype))
            gate = net.op("Add", net.op("Tanh", inner), net.const(1.0, self.dtype))
        else:
            gate = net.op("Add", net.op("Erf", net.op("Div", x, net.const(np.sqrt(2), self.dtype))), net.const(1.0, self.dtype))
        return net.op("Mul", net.op("Mul", x, gate), net.const(0.5, self.dtype))

    def layer(self, x: str, out: str) -> str:
        net = self.net
        h = self.norm(x, self.epsilon[0]) if self.before else x
        q, k, v = self.taken_apart(h) if self.stacked else self.apart(h)
        if self.flat:
            flat = [-1, 5, self.size] if self.flat == "right" else [-1, self.size, 5]
            k = net.op("Transpose", net.op("Reshape", k, net.const(flat, np.int64)), perm=[0, 2, 1])
            k = net.op("Reshape", k, net.const([-1, WIDTH // self.size, self.size, 5], np.int64))
        elif self.turned or self.stacked:
            k = net.op("Transpose", k, perm=[0, 1, 3, 2])
        by = np.sqrt(self.size)
        if self.scale in ("query", "both"):
            q = net.op("Mul", q, net.const(1 / by if self.scale == "query" else by**-0.5, self.dtype))
        if self.scale == "both":
            k = net.op("Mul", k, net.const(by**-0.5, self.dtype))
        scores = net.op("MatMul", q, k)
        if self.scale in ("divide", "multiply"):
            scores = net.op(
                "Div" if self.scale == "divide" else "Mul", scores, net.const(by if self.scale == "divide" else 1 / by, self.dtype)
            )
        if self.masked:
            scores = net.op("Add", scores, "mask")
        context = net.op("Transpose", net.op("MatMul", net.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        merged = self.grouped(context, (), [0, 0, WIDTH])
        middle = net.op("Add", self.linear(merged, WIDTH, WIDTH, self.gain), x)
        if self.tap == "middle":
            net.op("Neg", middle, out="tapped")
        if self.before:
            m = self.norm(middle, self.epsilon[1])
            inner = self.activated(self.linear(m, WIDTH, INNER))
            return net.op("Add", self.linear(inner, INNER, WIDTH, self.gain), middle, out=out)
        m = self.norm(middle, self.epsilon[0])
        inner = self.activated(self.linear(m, WIDTH, INNER))
        return self.norm(net.op("Add", self.linear(inner, INNER, WIDTH, self.gain), m), self.epsilon[1], out)

    def model(self, layers: int = 1, batch: Any = 2, length: Any = 5) -> onnx.ModelProto:
        kind = int(helpers.helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)))
        x = self.norm("x", self.epsilon[0]) if self.embedded else "x"
        for i in range(layers):
            x = self.layer(x, "y" if i == layers - 1 else f"y{i}")
        inputs = [value("x", [batch, length, WIDTH], kind)]
        if self.masked:
            inputs.append(value("mask", self.mask_shape(batch, length), kind))
        outputs = [value("y", [batch, length, WIDTH], kind)]
        if self.tap:
            outputs.append(value("tapped", [batch, length, WIDTH], kind))
        return self.net.model(inputs, outputs)

    def mask_shape(self, batch: Any, length: Any) -> list[Any]:
        return {"keys": [batch, 1, 1, length], "heads": [1, HEADS, length, length], "full": [batch, HEADS, length, length]}[
            self.masked or "keys"
        ]

    def feeds(self) -> dict[str, np.ndarray]:
        feeds = {"x": random(2, 5, WIDTH, seed=99, scale=1.0).astype(self.dtype)}
        if self.masked:
            shape = self.mask_shape(2, 5)
            feeds["mask"] = np.where(np.arange(np.prod(shape)).reshape(shape) % 5 == 3, -1e4, random(*shape, seed=98)).astype(self.dtype)
        return feeds


SPELLINGS: list[dict[str, Any]] = [
    {},
    {"opset": 13},
    {"opset": 14, "before": True},
    {"opset": 20},
    {"before": True},
    {"activation": "tanh"},
    {"activation": "relu", "before": True},
    {"masked": "keys"},
    {"masked": "heads", "before": True},
    {"masked": "full", "scale": "both"},
    {"scale": "multiply"},
    {"scale": "query"},
    {"scale": "none"},
    {"turned": True},
    {"flat": "right"},
    {"stacked": "gather", "before": True},
    {"stacked": "slice", "before": True, "flat": "right", "scale": "both"},
    {"stacked": "split", "bias": False},
    {"stacked": "split", "opset": 13, "turned": True, "masked": "keys"},
    {"bias": False},
    {"gain": True, "before": True},
    {"gain": True, "bias": False},
    {"constant_nodes": True},
    {"size": 64},
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: dict[str, Any]) -> None:
    encoder = Encoder(**spelling)
    fused, sites, _ = helpers.check(encoder.model(), encoder.feeds(), ONLY)
    assert ("encoder_layer", "pre-norm" if encoder.before else "post-norm") in sites
    assert len(helpers.ops(fused)) == 1


@pytest.mark.parametrize("before", [False, True])
def test_layers_in_a_row_of_any_length(before: bool) -> None:
    """Shapes computed at run time go with the layer that they serve."""
    encoder = Encoder(before=before, shapes="computed", masked="keys")
    fused, sites, _ = helpers.check(encoder.model(3, "batch", "length"), encoder.feeds(), ONLY)
    assert helpers.names(sites).count("encoder_layer") == 3
    assert len(helpers.ops(fused)) == 3


@pytest.mark.parametrize("before", [False, True])
def test_packed_projections(before: bool) -> None:
    """What qkv_pack has made of it."""
    encoder = Encoder(before=before)
    fused, sites, _ = helpers.check(encoder.model(2), encoder.feeds(), ("qkv_pack", "encoder_layer"))
    assert helpers.names(sites).count("encoder_layer") == 2
    assert [name.split("::")[-1] for name in helpers.ops(fused)] == ["PreNormEncoderLayer" if before else "EncoderLayer"] * 2


def test_half() -> None:
    encoder = Encoder(dtype=np.float16)
    fused, sites, _ = helpers.check(encoder.model(), encoder.feeds(), ONLY, rtol=2e-2, atol=2e-2)
    assert helpers.names(sites)[-1] == "encoder_layer"
    assert [a.i for a in fused.graph.node[-1].attribute if a.name == "dtype"] == [TensorProto.FLOAT16]


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        ({"epsilon": (1e-12, 1e-5)}, "different epsilon"),
        ({"epsilon": (-1e-6, -1e-6)}, "epsilon is negative"),
        ({"size": 16}, "heads are not of"),
        ({"opset": 12, "shapes": "constant"}, "needs operator set 13"),
        ({"tap": "middle"}, "is also read by"),
        ({"stacked": "gather", "places": (0, 2, 1)}, "are not the first, second and third of three ([0, 2, 1])"),
        ({"stacked": "slice", "places": (1, 1, 2)}, "are not the first, second and third of three ([1, 1, 2])"),
        ({"stacked": "split", "places": (2, 1, 0)}, "are not the first, second and third of three ([2, 1, 0])"),
        ({"stacked": "gather", "stack_perm": (2, 1, 3, 0, 4)}, "queries, keys and values are turned in another way"),
        ({"flat": "wrong"}, "is not proved to turn keys alone"),
    ],
)
def test_refused(spelling: dict[str, Any], reason: str) -> None:
    encoder = Encoder(**spelling)
    _, sites, misses = helpers.fuse(encoder.model(batch=5), ONLY)
    assert "encoder_layer" not in helpers.names(sites)
    assert any(reason in miss.reason for miss in misses if miss.fusion == "encoder_layer"), [m.reason for m in misses]


def test_long_sequences_are_left() -> None:
    _, sites, misses = helpers.fuse(Encoder().model(length=600), ONLY)
    assert "encoder_layer" not in helpers.names(sites)
    assert any("sequence is longer than 512" in miss.reason for miss in misses)


def test_a_mask_that_makes_more_of_the_batch_is_none() -> None:
    for said in (4, "other"):
        model = Encoder(masked="keys").model(batch=1)
        model.graph.input[1].type.tensor_type.shape.dim[0].CopyFrom(value("", [said]).type.tensor_type.shape.dim[0])
        model.graph.output[0].type.tensor_type.shape.dim[0].CopyFrom(value("", [said]).type.tensor_type.shape.dim[0])
        _, sites, misses = helpers.fuse(model, ONLY)
        assert "encoder_layer" not in helpers.names(sites)
        assert any("mask 'mask' has another shape than the scores" in miss.reason for miss in misses)


def test_a_mask_over_queries_alone_is_no_mask_of_keys() -> None:
    encoder = Encoder(masked="keys")
    model = encoder.model()
    model.graph.input[1].type.tensor_type.shape.dim[2].dim_value = 5
    model.graph.input[1].type.tensor_type.shape.dim[3].dim_value = 1
    _, sites, misses = helpers.fuse(model, ONLY)
    assert "encoder_layer" not in helpers.names(sites)
    assert any("is not [batch or 1, heads or 1, rows or 1, keys]" in miss.reason for miss in misses)
