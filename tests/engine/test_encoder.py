"""The stack of encoder layers that TensorRT's parser is given: which layers become one, and that its weights say what the layers said."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxfuse import plugins
from onnxfuse.engine import encoder, prepare
from tests.fusions import helpers
from tests.fusions.test_encoder_layer import HEADS, INNER, WIDTH, Encoder

PLUGINS = frozenset({encoder.STACK})


def prepared(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    path = folder / "model.onnx"
    onnx.save(helpers.fuse(model, ("encoder_layer",))[0], path)
    return onnx.ModelProto.FromString(prepare.for_parser(path, prepare.plugin_ops_in(path, PLUGINS)))


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def stack_of(node: onnx.NodeProto, held: dict[str, np.ndarray], x: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """What the kernel computes, in float64, from the stack's inputs alone: norms are folded into the products behind them."""
    attrs = attributes(node)
    before, heads, inner, epsilon = (attrs[name] for name in ("pre_norm", "heads", "inner", "epsilon"))
    width = x.shape[-1]
    sizes = [(width, 3 * width), (width, width), (width, inner), (inner, width)]
    weights, vectors = (held[name].astype(np.float64) for name in node.input[1:3])

    def statistics(s: np.ndarray, norm: bool) -> tuple[np.ndarray, np.ndarray]:
        mean, variance = s.mean(-1, keepdims=True), s.var(-1, keepdims=True)
        return (mean, 1 / np.sqrt(variance + epsilon)) if norm else (np.zeros_like(mean), np.ones_like(mean))

    outer = x
    for layer in range(weights.shape[0]):
        at = [0, 0]
        parts = []
        for k, n in sizes:
            size = -(-k * n // 128) * 128
            tiled = weights[layer, at[0] : at[0] + k * n].reshape(k // 64, n // 8, 8, 8, 8)
            matrix = tiled.transpose(0, 2, 4, 1, 3).reshape(k, n)
            parts.append((matrix, vectors[layer, at[1] : at[1] + 3 * n].reshape(3, n)))
            at[0], at[1] = at[0] + size, at[1] + -(-3 * n // 64) * 64
        mean, scale = statistics(outer, bool(attrs["first_norm"]) or layer > 0)
        one = (np.zeros_like(mean), np.ones_like(mean))
        (w, (bias, sums, _)) = parts[0]
        qkv = scale * (outer @ w - mean * sums) + bias
        q, k, v = (part.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3) for part in np.split(qkv, 3, axis=-1))
        scores = q @ k.transpose(0, 1, 3, 2) * attrs["scale"] + (0 if mask is None else mask)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        context = (e / e.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        (w, (bias, gamma, beta)) = parts[1]
        mean, scale = one if before else (mean, scale)
        middle = context @ w + bias + (outer - mean) * scale * gamma + beta
        mean, scale = statistics(middle, True)
        (w, (bias, sums, _)) = parts[2]
        h = scale * (middle @ w - mean * sums) + bias
        h = np.maximum(h, 0)  # the models of these tests have ReLU
        (w, (bias, gamma, beta)) = parts[3]
        mean, scale = one if before else (mean, scale)
        outer = h @ w + bias + (middle - mean) * scale * gamma + beta
    if before:
        return outer
    gamma, beta = held[node.input[3]]
    mean, scale = statistics(outer, True)
    return (outer - mean) * scale * gamma + beta


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("masked", [None, "keys"])
def test_layers_become_one_node_that_says_the_same(before: bool, masked: str | None, tmp_path: Path) -> None:
    spelling = Encoder(dtype=np.float16, before=before, masked=masked, activation="relu")
    model = spelling.model(3)
    ready = prepared(model, tmp_path)
    (node,) = ready.graph.node
    assert (node.op_type, node.domain) == (encoder.STACK, "onnxfuse")
    attrs = attributes(node)
    assert (attrs["heads"], attrs["inner"], attrs["activation"], attrs["pre_norm"]) == (HEADS, INNER, 2, int(before))
    assert (attrs["has_mask"], attrs["plugin_namespace"]) == (int(masked is not None), b"onnxfuse")
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in ready.graph.initializer}
    assert set(held) == {name for name in node.input if name not in ("x", "mask")}
    feeds = spelling.feeds()
    got = stack_of(node, held, feeds["x"].astype(np.float64), None if masked is None else feeds["mask"].astype(np.float64))
    wide = Encoder(before=before, masked=masked, activation="relu").model(3)
    (want,) = helpers.run(wide, {name: array.astype(np.float32) for name, array in feeds.items()})
    # Weights are rounded to float16, with gamma and without.
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)
    assert got.shape == (2, 5, WIDTH)


@pytest.mark.parametrize("tapped", [False, True])
def test_a_norm_before_post_norm_layers_goes_with_them(tapped: bool, tmp_path: Path) -> None:
    spelling = Encoder(dtype=np.float16, activation="relu", embedded=True)
    model = spelling.model(2)
    if tapped:  # somebody else reads what the norm gives
        model.graph.output.append(helper.make_tensor_value_info(model.graph.node[0].output[0], onnx.TensorProto.FLOAT16, [2, 5, WIDTH]))
    ready = prepared(model, tmp_path)
    assert [node.op_type for node in ready.graph.node] == ["LayerNormalization"] * tapped + [encoder.STACK]
    stack = ready.graph.node[-1]
    assert (attributes(stack)["first_norm"], stack.input[0] == "x") == (int(not tapped), not tapped)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in ready.graph.initializer}
    assert set(held) == {name for node in ready.graph.node for name in node.input} - {"x", model.graph.node[0].output[0]}
    feeds = spelling.feeds()
    (want,) = helpers.run(Encoder(activation="relu", embedded=True).model(2), {"x": feeds["x"].astype(np.float32)})
    if not tapped:
        got = stack_of(stack, held, feeds["x"].astype(np.float64), None)
        assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-5])
def test_a_norm_of_another_epsilon_stays(epsilon: float, tmp_path: Path) -> None:
    model = Encoder(dtype=np.float16, embedded=True).model(1)
    norm = model.graph.node[0]
    norm.attribute.remove(next(a for a in norm.attribute if a.name == "epsilon"))
    norm.attribute.append(helper.make_attribute("epsilon", epsilon))
    stays = [node.op_type for node in prepared(model, tmp_path).graph.node][:-1]
    assert stays == ([] if epsilon == 1e-12 else ["LayerNormalization"])


def test_layers_with_other_readers_between_them_stay_apart(tmp_path: Path) -> None:
    model = Encoder(dtype=np.float16).model(3)
    model.graph.output.append(helper.make_tensor_value_info("y0", onnx.TensorProto.FLOAT16, [2, 5, WIDTH]))
    ready = prepared(model, tmp_path)
    assert [(node.op_type, node.output[0]) for node in ready.graph.node] == [(encoder.STACK, "y0"), (encoder.STACK, "y")]


@pytest.mark.parametrize("symbolic", [False, True])
def test_stacks_carry_kernels_for_the_shapes_of_the_engine(symbolic: bool, tmp_path: Path) -> None:
    model = Encoder(dtype=np.float16).model(2)
    path = tmp_path / "model.onnx"
    fused = helpers.fuse(model, ("encoder_layer",))[0]
    points: tuple[dict[str, tuple[int, ...]], ...] = ({},)
    if symbolic:
        points = tuple({"x": (batch, 5, WIDTH)} for batch in (1, 4, 4))
        fused.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(fused, path)
    sources: list[str] = []
    ops = prepare.plugin_ops_in(path, PLUGINS)
    ready = onnx.ModelProto.FromString(prepare.for_parser(path, ops, None, points, lambda text: sources.append(text) or b"machine code"))
    (node,) = ready.graph.node
    attrs = attributes(node)
    assert attrs["shapes"] == (b"1x5,4x5" if symbolic else b"2x5")
    assert attrs["code"] == base64.b64encode(b"machine code")
    assert all(f"encode_{shape}(" in sources[0] for shape in attrs["shapes"].decode().split(","))


def test_shapes_that_are_too_large_are_left_to_tensorrt(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    fused = helpers.fuse(Encoder(dtype=np.float16).model(2), ("encoder_layer",))[0]
    fused.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(fused, path)
    said: list[str] = []
    ops, points = prepare.plugin_ops_in(path, PLUGINS), ({"x": (1, 5, WIDTH)}, {"x": (1000, 5, WIDTH)})
    ready = onnx.ModelProto.FromString(prepare.for_parser(path, ops, None, points, None, said.append))
    assert encoder.STACK not in {node.op_type for node in ready.graph.node}
    assert said == ["encoder layer encoder_layer: more tokens than the kernel takes, [1000, 5, 64]: left to TensorRT"]


def test_layers_whose_tokens_cannot_be_told_are_left_to_tensorrt(tmp_path: Path) -> None:
    """The plugin would refuse too many of them in the middle of a build."""
    path = tmp_path / "model.onnx"
    fused = helpers.fuse(Encoder(dtype=np.float16).model(2), ("encoder_layer",))[0]
    fused.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(fused, path)
    said: list[str] = []
    ready = onnx.ModelProto.FromString(prepare.for_parser(path, prepare.plugin_ops_in(path, PLUGINS), say=said.append))
    assert encoder.STACK not in {node.op_type for node in ready.graph.node}
    assert said == ["encoder layer encoder_layer: the shape of 'x' cannot be told: left to TensorRT"]


def test_other_architectures_leave_layers_to_tensorrt() -> None:
    said: list[str] = []
    assert prepare.taken(frozenset({"EncoderLayer", "BiasGelu"}), 90, said.append) == {"EncoderLayer", "BiasGelu"}
    assert not said
    assert prepare.taken(frozenset({"EncoderLayer", "BiasGelu"}), 80, said.append) == {"BiasGelu"}
    assert said == ["encoder layers: their kernel is for sm_90, and this is for sm_80: left to TensorRT"]


@pytest.mark.nvcc
def test_a_kernel_for_a_shape_compiles_without_spills() -> None:
    text = encoder.source(onnx.TensorProto.FLOAT16, 3072, 12, [(1, 128, 768)])
    made = plugins.compile_source(text, "EncoderLayer", encoder.SM, options=encoder.OPTIONS)
    (use,) = [use for use in made.kernels if use.name.startswith("encode_1x128")]
    assert (use.spill_stores, use.spill_loads) == (0, 0)
    assert b"encode_1x128" in made.image


def test_float32_is_left_to_tensorrt(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(helpers.fuse(Encoder().model(), ("encoder_layer",))[0], path)
    said: list[str] = []
    assert prepare.plugin_ops_in(path, PLUGINS, said.append) == frozenset()
    assert said == ["encoder layers: their kernel takes float16 and bfloat16, and 1 are of another type: left to TensorRT"]
    ready = onnx.ModelProto.FromString(prepare.for_parser(path, frozenset()))
    assert "Softmax" in {node.op_type for node in ready.graph.node}
    assert not any(node.domain == "onnxfuse" for node in ready.graph.node)


def test_without_the_plugin_the_definition_is_used(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(helpers.fuse(Encoder(dtype=np.float16).model(), ("encoder_layer",))[0], path)
    ready = onnx.ModelProto.FromString(prepare.for_parser(path, frozenset({"BiasGelu"})))
    assert not any(node.domain == "onnxfuse" for node in ready.graph.node)
