"""Small models with every kind of fusion in them, and faults to plant in their fused files.

Each model is float32 and made of named nodes. A plant changes a fused ModelProto in place, as a wrong kernel or a wrong fusion would, and
returns the name of the tensor where it first shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxfuse import pipeline

WIDTH, INNER, HEADS, TOKENS = 32, 64, 2, 8
MASKED = -1e4


class _Net:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def op(self, op_type: str, *inputs: str, name: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
        made = list(outputs) or [f"{name}_out"]
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name, **attributes))
        return made[0]

    def const(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        weight = self.const(f"{name}_w", self.rng.normal(0, rows**-0.5, (rows, columns)))
        product = self.op("MatMul", x, weight, name=f"{name}_matmul")
        return self.op("Add", product, self.const(f"{name}_b", self.rng.normal(0, 0.1, columns)), name=f"{name}_add")

    def norm(self, x: str, skip: str, name: str) -> str:
        total = self.op("Add", x, skip, name=f"{name}_residual")
        scale = self.const(f"{name}_scale", self.rng.normal(1, 0.2, WIDTH))
        shift = self.const(f"{name}_shift", self.rng.normal(0, 0.2, WIDTH))
        return self.op("LayerNormalization", total, scale, shift, name=f"{name}_norm", epsilon=1e-5)

    def gelu(self, x: str, name: str) -> str:
        scaled = self.op("Div", x, self.const(f"{name}_root2", 2**0.5), name=f"{name}_div")
        erf = self.op("Erf", scaled, name=f"{name}_erf")
        shifted = self.op("Add", erf, self.const(f"{name}_one", 1.0), name=f"{name}_add")
        product = self.op("Mul", x, shifted, name=f"{name}_mul")
        return self.op("Mul", product, self.const(f"{name}_half", 0.5), name=f"{name}_mul_half")

    def model(self, inputs: Mapping[str, tuple[int, list[Any]]], output: str, shape: list[Any]) -> ModelProto:
        given = [helper.make_tensor_value_info(name, *about) for name, about in inputs.items()]
        made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(self.nodes, "planted", given, made, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def encoder(layers: int = 2, seed: int = 0) -> ModelProto:
    """x [1, 8, 32] and mask int64 [1, 8] -> y. A transformer encoder: sites of qkv_pack, skip_layernorm, bias_gelu in each layer."""
    net = _Net(seed)
    cast = net.op("Cast", "mask", name="mask_cast", to=TensorProto.FLOAT)
    inverted = net.op("Sub", net.const("mask_one", 1.0), cast, name="mask_invert")
    mask = net.op("Mul", inverted, net.const("mask_fill", MASKED), name="mask_scale")
    mask = net.op("Unsqueeze", mask, net.const("mask_axes", [1, 2], np.int64), name="mask_unsqueeze")
    heads = net.const("heads", [0, TOKENS, HEADS, WIDTH // HEADS], np.int64)
    joined = net.const("joined", [0, TOKENS, WIDTH], np.int64)
    x = "x"
    for i in range(layers):
        q, k, v = (net.op("Reshape", net.linear(x, f"l{i}_{r}", WIDTH, WIDTH), heads, name=f"l{i}_{r}_heads") for r in "qkv")
        q, v = (net.op("Transpose", t, name=f"l{i}_{r}_turn", perm=[0, 2, 1, 3]) for t, r in ((q, "q"), (v, "v")))
        k = net.op("Transpose", k, name=f"l{i}_k_turn", perm=[0, 2, 3, 1])
        scores = net.op("Div", net.op("MatMul", q, k, name=f"l{i}_scores"), net.const(f"l{i}_root", 4.0), name=f"l{i}_scale")
        weights = net.op("Softmax", net.op("Add", scores, mask, name=f"l{i}_masked"), name=f"l{i}_softmax", axis=-1)
        mixed = net.op("Transpose", net.op("MatMul", weights, v, name=f"l{i}_mix"), name=f"l{i}_back", perm=[0, 2, 1, 3])
        mixed = net.op("Reshape", mixed, joined, name=f"l{i}_join")
        x = net.norm(net.linear(mixed, f"l{i}_o", WIDTH, WIDTH), x, f"l{i}_attention")
        inner = net.gelu(net.linear(x, f"l{i}_up", WIDTH, INNER), f"l{i}_gelu")
        x = net.norm(net.linear(inner, f"l{i}_down", INNER, WIDTH), x, f"l{i}_mlp")
    net.op("Tanh", x, name="last", outputs=("y",))
    return net.model({"x": (TensorProto.FLOAT, [1, TOKENS, WIDTH]), "mask": (TensorProto.INT64, [1, TOKENS])}, "y", [1, TOKENS, WIDTH])


def encoder_feeds(seed: int = 0, masked: int = 2) -> dict[str, np.ndarray]:
    """Inputs of `encoder`, the last `masked` tokens masked out."""
    mask = np.ones((1, TOKENS), np.int64)
    mask[:, TOKENS - masked :] = 0
    return {"x": np.random.default_rng(seed).normal(size=(1, TOKENS, WIDTH)).astype(np.float32), "mask": mask}


def convnet(blocks: int = 3, seed: int = 0) -> ModelProto:
    """image [1, 3, 12, 12] -> y. Conv, BatchNormalization, Relu: a site of conv_bn in each block."""
    net, x, channels = _Net(seed), "image", 3
    for i in range(blocks):
        weight = net.const(f"b{i}_w", net.rng.normal(0, (9 * channels) ** -0.5, (8, channels, 3, 3)))
        x = net.op("Conv", x, weight, net.const(f"b{i}_b", net.rng.normal(0, 0.1, 8)), name=f"b{i}_conv", pads=[1, 1, 1, 1])
        statistics = [
            net.const(f"b{i}_{role}", values)
            for role, values in (
                ("gamma", net.rng.normal(1, 0.2, 8)),
                ("beta", net.rng.normal(0, 0.2, 8)),
                ("mean", net.rng.normal(0, 0.2, 8)),
                ("variance", net.rng.uniform(0.5, 1.5, 8)),
            )
        ]
        x = net.op("BatchNormalization", x, *statistics, name=f"b{i}_norm", epsilon=1e-5)
        x = net.op("Relu", x, name=f"b{i}_relu", outputs=("y",) if i == blocks - 1 else ())
        channels = 8
    return net.model({"image": (TensorProto.FLOAT, [1, 3, 12, 12])}, "y", [1, 8, 12, 12])


def gated(seed: int = 0) -> ModelProto:
    """x [4, 32] -> y. A gated MLP, down(silu(gate(x)) * up(x)): a site of silu."""
    net = _Net(seed)
    gate, up = net.linear("x", "gate", WIDTH, INNER), net.linear("x", "up", WIDTH, INNER)
    opened = net.op("Mul", gate, net.op("Sigmoid", gate, name="sigmoid"), name="silu_mul")
    product = net.op("Mul", opened, up, name="gating")
    net.op("Tanh", net.linear(product, "down", INNER, WIDTH), name="last", outputs=("y",))
    return net.model({"x": (TensorProto.FLOAT, [4, WIDTH])}, "y", [4, WIDTH])


# What would take in the nodes that are looked at, or in which faults are planted.
APART = ("attention", "elementwise", "linear_layernorm")


def fused(model: ModelProto, folder: Path, precision: str = "keep", name: str = "model") -> tuple[Path, Path]:
    """Paths of the model, and of its file with every legal site fused, but for those of APART."""
    source, target = folder / f"{name}.onnx", folder / f"{name}.fused.onnx"
    onnx.save(model, source)
    result = pipeline.optimize(source, target, policy="all", precision=precision, skip=APART, check=False)
    assert any(decision.fused for decision in result.decisions)
    return source, target


def edited(path: Path) -> ModelProto:
    """The file's model, to plant in."""
    return onnx.load(str(path))


# ------------------------------------------------------------------------------------------------------------- plants


def node(model: ModelProto, name: str) -> NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def weight(model: ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name)).copy()


def set_weight(model: ModelProto, name: str, values: np.ndarray) -> None:
    """Replaces an initializer's values, for all who read it."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(values.astype(numpy_helper.to_array(tensor).dtype), name))


def wrong_epsilon(model: ModelProto, name: str, epsilon: float = 0.1) -> str:
    """The fused norm called `name` adds another epsilon."""
    found = node(model, name)
    next(a for a in found.attribute if a.name == "epsilon").f = epsilon
    return found.output[0]


def training_statistics(model: ModelProto, name: str, source: ModelProto, normed: np.ndarray, block: int) -> str:
    """The fused Conv called `name` has the BatchNormalization of block `block` of `convnet` folded in with the statistics of one batch.

    normed: what the normalisation of that block reads, of the original, [1, 8, height, width].
    """
    found = node(model, name)
    gamma, beta, kernel, bias = (weight(source, f"b{block}_{role}") for role in ("gamma", "beta", "w", "b"))
    mean, variance = normed.mean((0, 2, 3)), normed.var((0, 2, 3))
    factor = gamma / np.sqrt(variance + 1e-5)
    set_weight(model, found.input[1], kernel * factor[:, None, None, None])
    set_weight(model, found.input[2], (bias - mean) * factor + beta)
    return found.output[0]


def other_mask(model: ModelProto, fill: float = -1.0) -> str:
    """Masked scores are filled with another value: what is masked shines through."""
    set_weight(model, "mask_fill", np.asarray(fill))
    return "mask_scale_out"


def swapped(model: ModelProto, name: str, first: int, second: int) -> str:
    """Two inputs of the node called `name` are exchanged: gate and value, scale and shift."""
    found = node(model, name)
    found.input[first], found.input[second] = found.input[second], found.input[first]
    return found.output[0]


def infinite(model: ModelProto, name: str, place: int) -> str:
    """A weight of the node called `name` is so large that some products overflow, though all that goes in is finite."""
    found = node(model, name)
    values = weight(model, found.input[place])
    values.reshape(-1)[: values.shape[-1]] = 3e38
    set_weight(model, found.input[place], values)
    return found.output[0]
