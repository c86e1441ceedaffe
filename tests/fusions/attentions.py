"""Models with one attention each, as exporters write it; inputs get random values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.fusions import helpers
from tests.fusions.helpers import Net, value

ONLY = ("attention",)
LOWEST = {np.float32: -3.4028234663852886e38, np.float16: -65504.0}
B, S, K, H, D = 2, 5, 7, 3, 8


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@dataclass
class Written:
    """A model that is written attention by attention; inputs get random values."""

    opset: int = 17
    dtype: Any = np.float32
    net: Net = field(init=False)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    symbols: dict[str, list[int | str]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    prefix: str = ""  # of inputs' names: several attentions in one model have inputs of their own

    def __post_init__(self) -> None:
        self.net = Net(self.opset)

    def given(self, name: str, *shape: int, symbols: list[int | str] | None = None, values: np.ndarray | None = None) -> str:
        name = self.prefix + name
        assert name not in self.feeds
        self.feeds[name] = random(*shape, seed=len(self.feeds), dtype=self.dtype) if values is None else values
        self.symbols[name] = symbols or list(self.feeds[name].shape)
        return name

    def const(self, values: Any) -> str:
        return self.net.const(values, self.dtype)

    def ints(self, *values: int) -> str:
        return self.net.const(list(values), np.int64)

    def heads(self, x: str, heads: int = H, size: int = D, perm: tuple[int, ...] = (0, 2, 1, 3)) -> str:
        """[batch, rows, heads * size] -> [batch, heads, rows, size]"""
        return self.net.op("Transpose", self.net.op("Reshape", x, self.ints(0, 0, heads, size)), perm=list(perm))

    def unsqueezed(self, x: str, axis: int) -> str:
        return self.net.op("Unsqueeze", x, self.ints(axis)) if self.opset >= 13 else self.net.op("Unsqueeze", x, axes=[axis])

    def joined(self, context: str, width: int = H * D) -> str:
        turned = self.net.op("Transpose", context, perm=[0, 2, 1, 3])
        return self.net.op("Reshape", turned, self.ints(0, 0, width), out=self.out())

    def out(self) -> str:
        self.outputs.append(f"y{len(self.outputs)}")
        return self.outputs[-1]

    def model(self) -> onnx.ModelProto:
        kinds = {name: helper.np_dtype_to_tensor_dtype(values.dtype) for name, values in self.feeds.items()}
        inputs = [value(name, self.symbols[name], kinds[name]) for name in self.feeds]
        return self.net.model(inputs, self.outputs)

    def check(self, *variants: str | None, **kwargs: Any) -> onnx.ModelProto:
        half = self.dtype == np.float16
        tolerance = {"rtol": 5e-3, "atol": 5e-3} if half else {}
        fused, sites, _ = helpers.check(self.model(), self.feeds, ONLY, **{**tolerance, **kwargs})
        assert sites == [("attention", variant) for variant in variants]
        assert "Softmax" not in helpers.ops(fused)
        return fused

    def refused(self, reason: str) -> None:
        _, sites, misses = helpers.fuse(self.model(), ONLY)
        assert sites == []
        assert any(reason in miss.reason for miss in misses), [miss.reason for miss in misses]


def bert(w: Written, mask: str | None, s: int = S, batch: int | str = B, rows: int | str = S) -> str:
    """As torch's old exporter writes BERT: q, k and v by products of their own."""
    net = w.net
    q, k, v = (w.given(name, B, s, H * D, symbols=[batch, rows, H * D]) for name in ("q", "k", "v"))
    scores = net.op("MatMul", w.heads(q), w.heads(k, perm=(0, 2, 3, 1)))
    scores = net.op("Div", scores, w.const(np.sqrt(D)))
    if mask:
        scores = net.op("Add", scores, mask)
    return w.joined(net.op("MatMul", net.op("Softmax", scores, axis=-1), w.heads(v)))


def sdpa(w: Written, q: str, k: str, v: str, mask: str | None = None, safe: bool = False) -> str:
    """scaled_dot_product_attention as torch's new exporter writes it: both sides scaled, keys turned in three axes."""
    net = w.net
    flat = net.op("Reshape", k, w.ints(-1, K, D))
    turned = net.op("Reshape", net.op("Transpose", flat, perm=[0, 2, 1]), w.ints(B, H, D, K))
    root = w.const(D**-0.25)
    scores = net.op("MatMul", net.op("Mul", q, root), net.op("Mul", turned, root))
    if mask:
        scores = net.op("Add", scores, mask)
    weights = net.op("Softmax", scores, axis=-1)
    if safe:
        weights = net.op("Where", net.op("IsNaN", weights), w.const(0.0), weights)
    return net.op("MatMul", weights, v)


def packed_by_axis(w: Written, x: str, split: str) -> list[str]:
    net = w.net
    five = net.op("Transpose", net.op("Reshape", x, w.ints(0, 0, 3, H, D)), perm=[2, 0, 3, 1, 4])
    if split == "gather":
        return [net.op("Gather", five, net.const(i, np.int64), axis=0) for i in range(3)]
    names = [f"part{i}" for i in range(3)]
    if w.opset >= 13:
        net.op("Split", five, w.ints(1, 1, 1), out=names, axis=0)
    else:
        net.op("Split", five, out=names, axis=0, split=[1, 1, 1])
    if split == "reshape":
        return [net.op("Reshape", name, w.ints(B, H, S, D)) for name in names]
    return [net.op("Squeeze", name, w.ints(0)) if w.opset >= 13 else net.op("Squeeze", name, axes=[0]) for name in names]


def vit(w: Written, split: str = "gather") -> None:
    """As timm writes it."""
    net = w.net
    q, k, v = packed_by_axis(w, w.given("x", B, S, 3 * H * D), split)
    scores = net.op("MatMul", net.op("Mul", q, w.const(D**-0.5)), net.op("Transpose", k, perm=[0, 1, 3, 2]))
    w.joined(net.op("MatMul", net.op("Softmax", scores, axis=-1), v))


def swin(w: Written, windows: int = 2, many: int = 1) -> None:
    """A bias of positions, and for shifted windows a mask that is the same for every image."""
    net, batch = w.net, 4
    x = w.given("x", batch, S, 3 * H * D)
    q, k, v = packed_by_axis(w, x, "gather")
    scores = net.op("MatMul", net.op("Mul", q, w.const(D**-0.5)), net.op("Transpose", k, perm=[0, 1, 3, 2]))
    biased = net.op("Add", scores, w.const(random(1, H, S, S)))
    mask = np.where(random(1, windows, many, S, S) > 0.5, -100.0, 0.0)
    apart = net.op("Add", net.op("Reshape", biased, w.ints(batch // windows, windows, H, S, S)), w.const(mask))
    together = net.op("Reshape", apart, w.ints(batch, H, S, S))
    w.joined(net.op("MatMul", net.op("Softmax", together, axis=-1), v))


def cosine(w: Written, windows: int = 2, computed: bool = False) -> None:
    """Swin's second version: queries and keys of length one, a scale for each head, at most 100."""
    net, batch = w.net, 4
    q, k, v = packed_by_axis(w, w.given("x", batch, S, 3 * H * D), "gather")

    def normal(x: str) -> str:
        length = net.op("Max", net.op("ReduceL2", x, axes=[-1], keepdims=1), w.const(1e-4))
        return net.op("Div", x, net.op("Expand", length, net.op("Shape", x)))

    scores = net.op("MatMul", normal(q), net.op("Transpose", normal(k), perm=[0, 1, 3, 2]))
    # Half precision knows a score of 100 to 0.03: too little to compare values.
    logarithm = np.log(np.linspace(1, 200 if w.dtype == np.float32 else 16, H)).reshape(H, 1, 1)
    if computed:
        scale = net.op("Exp", net.op("Min", w.given("scale", values=logarithm.astype(w.dtype)), w.const(np.log(100))))
    else:
        scale = w.const(np.minimum(np.exp(logarithm), 100))
    scores = net.op("Add", net.op("Mul", scores, scale), w.const(16 * np.abs(random(1, H, S, S))))
    if windows:
        mask = np.where(random(1, windows, 1, S, S) > 0.5, -100.0, 0.0)
        apart = net.op("Add", net.op("Reshape", scores, w.ints(batch // windows, windows, H, S, S)), w.const(mask))
        scores = net.op("Reshape", apart, w.ints(batch, H, S, S))
    w.joined(net.op("MatMul", net.op("Softmax", scores, axis=-1), v))


def bart(w: Written, mask: tuple[int, ...] | None = None, batch: int | str = B, rows: int | str = S) -> None:
    """As BART and Whisper were written: products of [batch * heads, rows, size], masks added to [batch, heads, rows, keys]."""
    net = w.net
    x, memory = (w.given(name, B, n, H * D, symbols=[batch, rows, H * D]) for name, n in (("x", S), ("memory", S)))
    extents = [net.op("Slice", net.op("Shape", x), w.ints(axis), w.ints(axis + 1)) for axis in (0, 1)]

    def shaped(value: str, *target: int | str) -> str:
        if isinstance(batch, int):
            return net.op("Reshape", value, w.ints(*({"B": B, "S": S, "N": B * H}.get(e, e) for e in target)))  # type: ignore[call-overload]
        many = net.op("Mul", extents[0], w.ints(H))
        parts = {"B": extents[0], "S": extents[1], "N": many}
        return net.op("Reshape", value, net.op("Concat", *(parts[e] if isinstance(e, str) else w.ints(e) for e in target), axis=0))

    def heads(value: str) -> str:
        apart = net.op("Transpose", shaped(value, "B", "S", H, D), perm=[0, 2, 1, 3])
        return shaped(apart, "N", "S", D)

    q, k, v = heads(net.op("Mul", x, w.const(D**-0.5))), heads(memory), heads(memory)
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1]))
    if mask:
        symbols: list[int | str] = [{B: batch, S: rows}.get(extent, extent) for extent in mask]
        scores = net.op("Add", shaped(scores, "B", H, "S", "S"), w.given("mask", *mask, symbols=symbols))
        scores = shaped(scores, "N", "S", "S")
    context = net.op("MatMul", net.op("Softmax", scores, axis=-1), v)
    turned = net.op("Transpose", shaped(context, "B", H, "S", D), perm=[0, 2, 1, 3])
    w.net.op("Identity", shaped(turned, "B", "S", H * D), out=w.out())


def grouped(w: Written, repeat: str = "Expand") -> None:
    """Llama: heads of keys and values repeated, the softmax in float32."""
    net, many, own = w.net, 6, 2
    q, k, v = w.given("q", B, S, many * D), w.given("k", B, S, own * D), w.given("v", B, S, own * D)

    def repeated(x: str) -> str:
        five = w.unsqueezed(w.heads(x, own), 2)
        shape = w.ints(B, own, 3, S, D) if repeat == "Expand" else w.ints(1, 1, 3, 1, 1)
        return net.op("Reshape", net.op(repeat, five, shape), w.ints(B, many, S, D))

    scores = net.op("MatMul", w.heads(q, many), net.op("Transpose", repeated(k), perm=[0, 1, 3, 2]))
    scores = net.op("Add", net.op("Mul", scores, w.const(D**-0.5)), w.given("mask", B, 1, S, S))
    weights = net.op("Softmax", net.op("Cast", scores, to=TensorProto.FLOAT), axis=-1)
    weights = net.op("Cast", weights, to=helper.np_dtype_to_tensor_dtype(np.dtype(w.dtype)))
    w.joined(net.op("MatMul", weights, repeated(v)), many * D)


def replaced(w: Written, hides: bool = True, fill: float | None = -10000.0) -> None:
    """DistilBERT and GPT-2."""
    net = w.net
    q, k, v = (w.given(name, B, S, H * D) for name in ("q", "k", "v"))
    scores = net.op("Div", net.op("MatMul", w.heads(q), w.heads(k, perm=(0, 2, 3, 1))), w.const(np.sqrt(D)))
    chosen = random(B, 1, S, S) > 0
    chosen[1, 0, 0] = hides  # a row with nothing left
    mask, filler = w.given("mask", values=chosen), w.const(LOWEST[w.dtype] if fill is None else fill)
    scores = net.op("Where", mask, *((filler, scores) if hides else (scores, filler)))
    w.joined(net.op("MatMul", net.op("Softmax", scores, axis=-1), w.heads(v)))
