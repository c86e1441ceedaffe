"""dwconv_layernorm: a depthwise convolution, the transpose and the norm behind it become one node; what is no such convolution stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions.helpers import NEWEST, Net, check, fuse, layer_norm, names, ops, proved, random, run, same, undo, value

C, H, W = 16, 6, 5
X = random(2, C, H, W)
ONE = "onnxfuse::DepthwiseConvLayerNorm"


def model(
    opset: int = 17,
    kernel: int = 7,
    bias: bool = True,
    offset: bool = True,
    elem: int = TensorProto.FLOAT,
    dtype: Any = np.float32,
    channels: int = C,
    last: bool = False,
    perm: tuple[int, ...] = (0, 2, 3, 1),
    weight: Any = None,
    epsilon: float = 1e-6,
    group: int | None = None,
    size: tuple[int, int] = (H, W),
    **conv: Any,
) -> onnx.ModelProto:
    net = Net(opset)
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((channels, 1, kernel, kernel)) / kernel if weight is None else weight
    given = net.op("Transpose", "x", perm=[0, 3, 1, 2]) if last else "x"
    vectors = [net.const(rng.uniform(0.5, 1.5, channels), dtype) for _ in range(3)]
    attrs = {"kernel_shape": [kernel, kernel], "group": channels if group is None else group, **({"pads": [kernel // 2] * 4} | conv)}
    attrs = {name: held for name, held in attrs.items() if held is not None}
    conv_out = net.op("Conv", given, net.const(weight, dtype), *vectors[: int(bias)], **attrs)
    rows = net.op("Transpose", conv_out, perm=list(perm))
    y = net.op("LayerNormalization", rows, vectors[1], *vectors[2 : 2 + int(offset)], axis=-1, epsilon=epsilon)
    shape = ("N", *size, channels) if last else ("N", channels, *size)
    return net.model([value("x", shape, elem)], [y])


def reference(x: np.ndarray, proto: onnx.ModelProto, epsilon: float = 1e-6) -> np.ndarray:
    """In float64, from the model's own constants: weight, bias, scale and offset in the order of the test's net."""
    held = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer}
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    norm = next(node for node in proto.graph.node if node.op_type == "LayerNormalization")
    w = held[conv.input[1]][:, 0]
    k = w.shape[-1]
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (k // 2,) * 2, (k // 2,) * 2))
    total = sum(padded[:, :, i : i + H, j : j + W] * w[:, i, j, None, None] for i in range(k) for j in range(k))
    total = total + (held[conv.input[2]][:, None, None] if len(conv.input) > 2 else 0)
    offset = held[norm.input[2]] if len(norm.input) > 2 else 0.0
    return layer_norm(np.asarray(total).transpose(0, 2, 3, 1), held[norm.input[1]], offset, epsilon)


@pytest.mark.parametrize("opset", [17, 18, 20, 21, NEWEST])
def test_every_opset(opset: int) -> None:
    original = model(opset)
    fused, sites, _ = check(original, {"x": X})
    assert ops(fused) == [ONE]
    assert sites == [("dwconv_layernorm", "channels_first")]
    np.testing.assert_allclose(run(fused, {"x": X})[0], reference(X, original), rtol=1e-4, atol=1e-5)
    same(run(undo(fused), {"x": X}), run(original, {"x": X}))


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_kernels_and_optional_parameters(kernel: int, bias: bool, offset: bool) -> None:
    original = model(kernel=kernel, bias=bias, offset=offset)
    fused, _, _ = check(original, {"x": X})
    assert ops(fused) == [ONE]
    np.testing.assert_allclose(run(fused, {"x": X})[0], reference(X, original), rtol=1e-4, atol=1e-5)


def test_an_input_that_was_channels_last_is_read_as_it_is() -> None:
    fused, sites, _ = check(model(last=True), {"x": X.transpose(0, 2, 3, 1)})
    assert ops(fused) == [f"{ONE}Last"]
    assert sites == [("dwconv_layernorm", "channels_last")]


def test_half_precision() -> None:
    x = X.astype(np.float16)
    original = model(elem=TensorProto.FLOAT16, dtype=np.float16)
    fused, _, _ = check(original, {"x": x}, rtol=2e-2, atol=2e-2)
    assert ops(fused) == [ONE]
    np.testing.assert_allclose(run(fused, {"x": x})[0].astype(np.float64), reference(x, original), rtol=1e-2, atol=1e-2)


def test_bfloat16() -> None:
    import ml_dtypes

    original = model(NEWEST, elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, sites, _ = fuse(original)
    assert names(sites) == ["dwconv_layernorm"]
    proved(original, fused)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_padding_by_name(auto_pad: str) -> None:
    fused, _, _ = check(model(auto_pad=auto_pad, pads=None), {"x": X})
    assert ops(fused) == [ONE]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pads": [3, 3, 3, 2]}, "the output is not as large as the input (pads) ([3, 3, 3, 2])"),
    ({"pads": [0, 0, 0, 0]}, "the output is not as large as the input (pads)"),
    ({"epsilon": -1e-6}, "epsilon is negative or no number"),
    ({"strides": [2, 2]}, "strides are not 1 ([2, 2])"),
    ({"dilations": [2, 2], "pads": [6] * 4}, "dilations are not 1 ([2, 2])"),
    ({"weight": np.ones((C, 8, 7, 7)), "group": 2}, "is not depthwise (group) (2)"),
    ({"channels": 12}, "channels are no multiple of 8 up to 2048 (12)"),
    ({"kernel": 9}, "the kernel is not 3x3, 5x5 or 7x7 ([9, 9])"),
    ({"perm": (0, 3, 2, 1)}, "Transpose does not put the channels last (perm) ([0, 3, 2, 1])"),
]


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(kwargs: dict[str, Any], reason: str) -> None:
    x = random(2, kwargs.get("channels", C), 12, 12)
    original = model(**kwargs, size=(12, 12))
    _, sites, misses = check(original, {"x": x})
    assert names(sites) == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "dwconv_layernorm"), misses


def test_a_convolution_that_others_read_is_kept() -> None:
    original = model()
    conv = next(node for node in original.graph.node if node.op_type == "Conv")
    original.graph.output.append(value(conv.output[0], ["N", C, H, W]))
    _, sites, misses = check(original, {"x": X})
    assert names(sites) == []
    assert any("is also read by a graph output" in miss.reason for miss in misses), misses
