"""groupnorm_silu: the norm, scale and shift of each image's channels, and SiLU become one node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions.helpers import NEWEST, OPSETS, Net, check, fuse, names, ops, proved, random, run, silu, value

C, G = 16, 4
X = random(2, C, 5, 3)
FILM = {"a": random(2, C, 1, 1, seed=1), "b": random(2, C, 1, 1, seed=2)}


def model(
    opset: int = 17,
    native: bool = False,
    film: bool = False,
    runtime: bool = True,
    elem: int = TensorProto.FLOAT,
    dtype: Any = np.float32,
    film_shape: Any = ("N", C, 1, 1),
    activated: bool = True,
) -> onnx.ModelProto:
    net = Net(opset)
    rng = np.random.default_rng(5)
    if native:
        size = C if opset >= 21 else G
        y = net.op(
            "GroupNormalization",
            "x",
            net.const(rng.uniform(0.5, 1.5, size), dtype),
            net.const(rng.uniform(-1, 1, size), dtype),
            num_groups=G,
            epsilon=1e-5,
        )
    else:
        y = net.op("Reshape", "x", net.const([0, G, -1], np.int64))
        y = net.op("InstanceNormalization", y, net.const(np.ones(G), dtype), net.const(np.zeros(G), dtype), epsilon=1e-5)
        y = net.op("Reshape", y, net.op("Shape", "x") if runtime else net.const([-1, C, 5, 3], np.int64))
        y = net.op("Mul", y, net.const(rng.uniform(0.5, 1.5, (C, 1, 1)), dtype))
        y = net.op("Add", y, net.const(rng.uniform(-1, 1, (C, 1, 1)), dtype))
    inputs = [value("x", ("N", C, 5, 3), elem)]
    if film:
        y = net.op("Add", net.op("Mul", y, "a"), "b")
        inputs += [value("a", film_shape, elem), value("b", film_shape, elem)]
    if activated:
        net.op("Mul", y, net.op("Sigmoid", y), out="y")
    else:
        net.nodes[-1].output[0] = "y"
    return net.model(inputs, [value("y", ("N", C, 5, 3), elem)])


def reference(x: np.ndarray, proto: onnx.ModelProto, film: bool, activated: bool = True) -> np.ndarray:
    held = [onnx.numpy_helper.to_array(t).astype(np.float64).reshape(-1) for t in proto.graph.initializer]
    scale, bias = (np.repeat(v, C // len(v))[:, None, None] for v in held[-2:])
    grouped = x.astype(np.float64).reshape(len(x), G, -1)
    centred = grouped - grouped.mean(-1, keepdims=True)
    y = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)).reshape(x.shape) * scale + bias
    y = y * FILM["a"] + FILM["b"] if film else y
    return silu(y) if activated else np.asarray(y)


@pytest.mark.parametrize("film", [False, True])
@pytest.mark.parametrize("opset", OPSETS)
def test_spelled_out_at_every_opset(opset: int, film: bool) -> None:
    feeds = {"x": X, **(FILM if film else {})}
    original = model(opset, film=film)
    fused, sites, _ = check(original, feeds)
    assert ops(fused) == ["onnxfuse::FilmGroupNormSilu" if film else "onnxfuse::GroupNormSilu"]
    assert sites[-1] == ("groupnorm_silu", "film" if film else "plain")
    np.testing.assert_allclose(run(fused, feeds)[0], reference(X, original, film), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [18, 20, 21, NEWEST])
def test_the_operator(opset: int) -> None:
    original = model(opset, native=True)
    fused, sites, _ = check(original, {"x": X})
    assert ops(fused) == ["onnxfuse::GroupNormSilu"]
    assert names(sites) == ["silu", "groupnorm_silu"]
    np.testing.assert_allclose(run(fused, {"x": X})[0], reference(X, original, False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("film", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("opset", [9, 17, 18, 20, 21, NEWEST])
def test_without_silu(opset: int, native: bool, film: bool) -> None:
    if native and opset < 18:
        return
    feeds = {"x": X, **(FILM if film else {})}
    original = model(opset, native=native, film=film, activated=False)
    fused, sites, _ = check(original, feeds)
    assert ops(fused) == ["onnxfuse::FilmGroupNorm" if film else "onnxfuse::GroupNorm"]
    assert sites[-1] == ("groupnorm_silu", "film_without_silu" if film else "without_silu")
    np.testing.assert_allclose(run(fused, feeds)[0], reference(X, original, film, False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [18, 20, 21, NEWEST])
def test_the_operator_with_film(opset: int) -> None:
    feeds = {"x": X, **FILM}
    original = model(opset, native=True, film=True)
    fused, _, _ = check(original, feeds)
    assert ops(fused) == ["onnxfuse::FilmGroupNormSilu"]
    np.testing.assert_allclose(run(fused, feeds)[0], reference(X, original, True), rtol=1e-4, atol=1e-5)


def test_a_constant_target() -> None:
    fused, _, _ = check(model(runtime=False), {"x": X})
    assert ops(fused) == ["onnxfuse::GroupNormSilu"]


def test_half_precision() -> None:
    x = X.astype(np.float16)
    fused, _, _ = check(model(elem=TensorProto.FLOAT16, dtype=np.float16), {"x": x}, rtol=1e-2, atol=1e-2)
    assert ops(fused) == ["onnxfuse::GroupNormSilu"]


def test_bfloat16() -> None:
    import ml_dtypes

    original = model(NEWEST, native=True, elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, sites, _ = fuse(original)
    assert names(sites)[-1] == "groupnorm_silu"
    proved(original, fused)


@pytest.mark.parametrize("shape", [(1, C, 1, 1), ("N", C, 5, 3), (C, 1, 1)])
def test_what_is_not_one_value_for_each_channel_of_each_image(shape: Any) -> None:
    sizes = [2 if size == "N" else size for size in shape]
    feeds = {"x": X, "a": random(*sizes, seed=1), "b": random(*sizes, seed=2)}
    fused, sites, _ = check(model(film=True, film_shape=shape), feeds)
    assert [variant for name, variant in sites if name == "groupnorm_silu"] == ["without_silu"]
    assert ops(fused) == ["onnxfuse::GroupNorm", "Mul", "Add", "onnxfuse::Silu"]


def test_a_negative_epsilon_is_left() -> None:
    original = model(21, native=True)
    norm = next(node for node in original.graph.node if node.op_type == "GroupNormalization")
    next(attribute for attribute in norm.attribute if attribute.name == "epsilon").f = -1e-6
    _, sites, misses = check(original, {"x": X})
    assert "groupnorm_silu" not in names(sites)
    assert any("epsilon is negative or no number" in miss.reason for miss in misses), misses


def test_a_norm_that_others_read_is_kept() -> None:
    original = model(21, native=True)
    norm = next(node for node in original.graph.node if node.op_type == "GroupNormalization")
    original.graph.output.append(value(norm.output[0], ["N", C, 5, 3]))
    fused, sites, _ = check(original, {"x": X})
    assert sites[-1] == ("groupnorm_silu", "without_silu")
    assert sorted(ops(fused)) == ["onnxfuse::GroupNorm", "onnxfuse::Silu"]


@pytest.mark.parametrize(("opset", "channels"), [(18, 1 << 40), (18, 1 << 21)])
def test_channels_that_nobody_means(opset: int, channels: int) -> None:
    original = model(opset, native=True)
    original.graph.input[0].type.tensor_type.shape.dim[1].dim_value = channels
    _, sites, misses = fuse(original)
    assert "groupnorm_silu" not in names(sites)
    assert any(f"more than 1048576 channels ({channels})" in miss.reason for miss in misses), misses
