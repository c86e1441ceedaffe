"""patch_linear: a norm over channels and a convolution of disjoint patches become a norm that writes patches and a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxfuse import measuring, pipeline
from onnxfuse.engine import prepare
from onnxfuse.plan.measure import grouped
from tests.fusions import convnext
from tests.fusions.helpers import NEWEST, Net, check, fuse, layer_norm, names, ops, proved, random, run, same, undo, value

C, FILTERS, H, W = 16, 24, 6, 8
X = random(2, C, H, W)
PAIR = ["onnxfuse::LayerNormPatches", "onnxfuse::PatchLinear"]
CROPPED = ["onnxfuse::LayerNormPatchesCropped", "onnxfuse::PatchLinear"]
F16 = TensorProto.FLOAT16


def model(
    opset: int = 17,
    patch: int | tuple[int, int] = 2,
    bias: bool = True,
    offset: bool = True,
    elem: int = TensorProto.FLOAT,
    dtype: Any = np.float32,
    channels: int = C,
    filters: int = FILTERS,
    last: bool = False,
    perm: Sequence[int] = (0, 3, 1, 2),
    epsilon: float = 1e-6,
    axis: int = -1,
    size: tuple[Any, Any] = (H, W),
    group: int = 1,
    **conv: Any,
) -> onnx.ModelProto:
    """x [N, channels, H, W], or with `last` [N, H, W, channels], normed and convolved by patches."""
    net = Net(opset)
    rng = np.random.default_rng(3)
    kernel = (patch, patch) if isinstance(patch, int) else patch
    rows = "x" if last else net.op("Transpose", "x", perm=[0, 2, 3, 1])
    vectors = [net.const(rng.uniform(0.5, 1.5, channels), dtype) for _ in range(1 + int(offset))]
    norm = net.op("LayerNormalization", rows, *vectors, axis=axis, epsilon=epsilon)
    moved = net.op("Transpose", norm, perm=list(perm))
    weight = net.const(rng.standard_normal((filters, channels // group, *kernel)) / 8, dtype)
    biases = [net.const(rng.standard_normal(filters), dtype)] if bias else []
    y = net.op("Conv", moved, weight, *biases, **({"strides": list(kernel), "group": group} | conv))
    shape = ("N", *size, channels) if last else ("N", channels, *size)
    return net.model([value("x", shape, elem)], [y])


def reference(x: np.ndarray, proto: onnx.ModelProto, epsilon: float = 1e-6) -> np.ndarray:
    """In float64, pixel by pixel of a patch, from the model's own constants."""
    held = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer}
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    norm = next(node for node in proto.graph.node if node.op_type == "LayerNormalization")
    offset = held[norm.input[2]] if len(norm.input) > 2 else 0.0
    rows = layer_norm(x.transpose(0, 2, 3, 1), held[norm.input[1]], offset, epsilon)
    weight = held[conv.input[1]]
    p = weight.shape[-1]
    down, across = x.shape[2] // p, x.shape[3] // p
    whole = rows[:, : down * p, : across * p]
    total = sum(whole[:, i::p, j::p] @ weight[:, :, i, j].T for i in range(p) for j in range(p))
    total = total + (held[conv.input[2]] if len(conv.input) > 2 else 0.0)
    return np.asarray(total).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("opset", [17, 18, 20, 21, NEWEST])
def test_every_opset(opset: int) -> None:
    original = model(opset)
    fused, sites, _ = check(original, {"x": X})
    assert ops(fused) == ["Transpose", *PAIR, "Transpose"]
    assert sites == [("patch_linear", "norm_before")]
    np.testing.assert_allclose(run(fused, {"x": X})[0], reference(X, original), rtol=1e-4, atol=1e-5)
    same(run(undo(fused), {"x": X}), run(original, {"x": X}))


@pytest.mark.parametrize("patch", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_patches_and_optional_parameters(patch: int, bias: bool, offset: bool) -> None:
    original = model(patch=patch, bias=bias, offset=offset, size=(12, 24))
    x = random(2, C, 12, 24)
    fused, _, _ = check(original, {"x": x})
    assert ops(fused) == ["Transpose", *PAIR, "Transpose"]
    np.testing.assert_allclose(run(fused, {"x": x})[0], reference(x, original), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(7, 9), ("H", "W"), (6, 9), ("H", 8)])
def test_pixels_that_fill_no_patch_are_dropped(size: tuple[Any, Any]) -> None:
    original = model(size=size)
    x = random(2, C, 7 if size[0] in (7, "H") else 6, 8 if size[1] == 8 else 9)
    fused, _, _ = check(original, {"x": x})
    assert ops(fused) == ["Transpose", *CROPPED, "Transpose"]
    np.testing.assert_allclose(run(fused, {"x": x})[0], reference(x, original), rtol=1e-4, atol=1e-5)


def test_a_norm_that_was_spelled_out() -> None:
    """Before version 17 the norm is a function, and before 13 no body cuts off what fills no patch."""
    for opset, size, fused_ops in ((13, (H, W), PAIR), (11, (H, W), PAIR), (13, (7, 9), CROPPED), (11, (7, 9), None)):
        net = Net(opset)
        rows = net.op("Transpose", "x", perm=[0, 2, 3, 1])
        centered = net.op("Sub", rows, net.mean(rows))
        variance = net.mean(net.op("Pow", centered, net.const(2.0)))
        norm = net.op("Div", centered, net.op("Sqrt", net.op("Add", variance, net.const(1e-6))))
        norm = net.op("Add", net.op("Mul", norm, net.const(np.full(C, 0.5))), net.const(np.ones(C)))
        moved = net.op("Transpose", norm, perm=[0, 3, 1, 2])
        y = net.op("Conv", moved, net.const(random(FILTERS, C, 2, 2)), strides=[2, 2])
        fused, sites, misses = check(net.model([value("x", ("N", C, *size))], [y]), {"x": random(2, C, *size)})
        assert ("patch_linear" in names(sites)) == (fused_ops is not None)
        if fused_ops:
            assert ops(fused) == ["Transpose", *fused_ops, "Transpose"]
        else:
            reason = "height and width are not known to be multiples of 2, which needs operator set 13 (11)"
            assert reason in [miss.reason for miss in misses if miss.fusion == "patch_linear"]


def test_an_input_with_its_channels_last() -> None:
    fused, _, _ = check(model(last=True), {"x": X.transpose(0, 2, 3, 1)})
    assert ops(fused) == [*PAIR, "Transpose"]


def test_half_precision() -> None:
    x = X.astype(np.float16)
    original = model(elem=F16, dtype=np.float16)
    fused, _, _ = check(original, {"x": x}, rtol=2e-2, atol=2e-2)
    assert ops(fused) == ["Transpose", *PAIR, "Transpose"]
    np.testing.assert_allclose(run(fused, {"x": x})[0].astype(np.float64), reference(x, original), rtol=1e-2, atol=1e-2)


def test_bfloat16() -> None:
    import ml_dtypes

    original = model(NEWEST, elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, sites, _ = fuse(original)
    assert names(sites) == ["patch_linear"]
    proved(original, fused)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"strides": [1, 1]}, "strides are not the kernel's sizes ([1, 1])"),
    ({"patch": 3, "strides": [2, 2]}, "strides are not the kernel's sizes ([2, 2])"),
    ({"patch": (2, 3)}, "the kernel is no square of 2x2 to 32x32 ([2, 3])"),
    ({"patch": 1}, "the kernel is no square of 2x2 to 32x32 ([1, 1])"),
    ({"pads": [1, 1, 1, 1]}, "the input is padded (pads) ([1, 1, 1, 1])"),
    ({"pads": [0, 0, 0, 1]}, "the input is padded (pads) ([0, 0, 0, 1])"),
    ({"auto_pad": "SAME_UPPER"}, "the input is padded (pads) (SAME_UPPER)"),
    ({"dilations": [2, 2]}, "dilations are not 1 ([2, 2])"),
    ({"group": 2}, "the convolution is grouped (group) (2)"),
    ({"filters": 20}, "filters and elements of a patch are no multiples of 8 ([20, 64])"),
    ({"channels": 6, "patch": 3}, "filters and elements of a patch are no multiples of 8 ([24, 54])"),
    ({"perm": (0, 3, 2, 1)}, "Transpose does not put the channels first (perm) ([0, 3, 2, 1])"),
    ({"epsilon": -1e-6}, "epsilon is negative or no number"),
]


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(kwargs: dict[str, Any], reason: str) -> None:
    x = random(2, kwargs.get("channels", C), 12, 12)
    _, sites, misses = check(model(**kwargs, size=(12, 12)), {"x": x})
    assert names(sites) == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "patch_linear"), misses


def test_padding_by_name_that_is_none() -> None:
    fused, _, _ = check(model(auto_pad="VALID"), {"x": X})
    assert ops(fused) == ["Transpose", *PAIR, "Transpose"]


@pytest.mark.parametrize("place", [0, 1])
def test_what_others_read_within_is_kept(place: int) -> None:
    """The norm, or its transpose, is an output too: there is no patch in it."""
    original = model(last=True)
    inner = original.graph.node[place].output[0]
    original.graph.output.append(value(inner, ["N", H, W, C] if place == 0 else ["N", C, H, W]))
    _, sites, misses = check(original, {"x": X.transpose(0, 2, 3, 1)})
    assert names(sites) == []
    assert any("is also read by a graph output" in miss.reason for miss in misses), misses


@pytest.mark.parametrize("also_output", [False, True])
def test_readers_of_the_result_with_its_channels_last_read_the_product(also_output: bool) -> None:
    original = model(last=True)
    (y,) = original.graph.output
    original.graph.node.extend(
        [
            onnx.helper.make_node("Transpose", [y.name], ["last"], perm=[0, 2, 3, 1]),
            onnx.helper.make_node("Relu", ["last"], ["z"]),
        ]
    )
    rest = [value("z", ["N", H // 2, W // 2, FILTERS]), value("last", ["N", H // 2, W // 2, FILTERS])]
    kept = [y, *rest] if also_output else rest[:1]
    kept = [onnx.ValueInfoProto.FromString(each.SerializeToString()) for each in kept]
    del original.graph.output[:]
    original.graph.output.extend(kept)
    fused, _, _ = check(original, {"x": X.transpose(0, 2, 3, 1)})
    assert sorted(ops(fused)) == sorted([*PAIR, "Relu", *(["Transpose"] if also_output else [])])


# --- the norm behind a convolution ----------------------------------------------------------------------------------------------


def behind(
    channels: int = C, group: int = 1, perm: Sequence[int] = (0, 2, 3, 1), offset: bool = True, elem: int = 1, dtype: Any = np.float32
) -> onnx.ModelProto:
    """image [N, 4, 8, 8] convolved by 4x4 patches, its channels put last and normed."""
    net = Net(17)
    weight = net.const(random(channels, 4 // group, 4, 4), dtype)
    x = net.op("Conv", "x", weight, net.const(random(channels, seed=1), dtype), strides=[4, 4], group=group)
    rows = net.op("Transpose", x, perm=list(perm))
    affine = [net.const(random(channels, seed=seed), dtype) for seed in (2, 3)]
    y = net.op("LayerNormalization", rows, *affine[: 1 + int(offset)], axis=-1, epsilon=1e-6)
    return net.model([value("x", ("N", 4, 8, 8), elem)], [y])


@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_behind_a_convolution(offset: bool) -> None:
    x = random(2, 4, 8, 8)
    fused, sites, _ = check(behind(offset=offset), {"x": x})
    assert ops(fused) == ["Conv", "onnxfuse::LayerNormPlanes"]
    assert sites == [("patch_linear", "norm_behind")]
    fused, _, _ = check(behind(offset=offset, elem=F16, dtype=np.float16), {"x": x.astype(np.float16)}, rtol=2e-2, atol=2e-2)
    assert ops(fused) == ["Conv", "onnxfuse::LayerNormPlanes"]


def test_a_convolution_that_others_read_stays_and_is_read() -> None:
    original = behind()
    conv = original.graph.node[0].output[0]
    original.graph.output.append(value(conv, ["N", C, 2, 2]))
    fused, _, _ = check(original, {"x": random(2, 4, 8, 8)})
    assert ops(fused) == ["Conv", "onnxfuse::LayerNormPlanes"]


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"group": 2}, "the convolution is grouped (group) (2)"),
        ({"channels": 512}, "there are not 1 to 504 channels (512)"),
        ({"perm": (0, 3, 2, 1)}, "Transpose does not put the channels last (perm)"),
    ],
)
def test_a_norm_that_is_refused_says_so_only_where_asked(kwargs: dict[str, Any], reason: str, tmp_path: Path) -> None:
    if "perm" in kwargs:
        kwargs = {**kwargs, "channels": 2}  # as long as the image is wide, so that the norm is one of either
    original = behind(**kwargs)
    _, sites, misses = check(original, {"x": random(2, 4, 8, 8)})
    assert names(sites) == []
    assert not [miss for miss in misses if miss.fusion == "patch_linear"]
    onnx.save(original, tmp_path / "m.onnx")
    answers = pipeline.why_not(tmp_path / "m.onnx", original.graph.output[0].name)
    assert answers is not None
    assert reason in next(answer.reason for answer in answers if answer.fusion == "patch_linear")


def test_a_norm_behind_a_convolution_that_becomes_a_product() -> None:
    """It reads the product, whose channels are last already."""
    original = model(last=True)
    (y,) = original.graph.output
    affine = [onnx.numpy_helper.from_array(random(FILTERS, seed=seed), f"affine{seed}") for seed in (1, 2)]
    original.graph.initializer.extend(affine)
    original.graph.node.extend(
        [
            onnx.helper.make_node("Transpose", [y.name], ["last"], perm=[0, 2, 3, 1]),
            onnx.helper.make_node("LayerNormalization", ["last", "affine1", "affine2"], ["z"], axis=-1),
        ]
    )
    y.CopyFrom(value("z", ["N", H // 2, W // 2, FILTERS]))
    fused, _, _ = check(original, {"x": X.transpose(0, 2, 3, 1)})
    assert ops(fused) == [*PAIR, "LayerNormalization"]


# --- the norm spelled out over axis 1 -------------------------------------------------------------------------------------------


def spelled(
    opset: int = 17, axes: Sequence[int] = (1,), again: Sequence[int] = (1,), size: tuple[int, int] = (H, W), shape: Any = (C, 1, 1)
) -> onnx.ModelProto:
    """As ConvNeXt's own code writes it: mean and variance over axis 1 of [N, C, H, W], scale and bias of `shape`."""
    net = Net(opset)
    x = net.op("Relu", "x")
    centered = net.op("Sub", x, net.mean(x, axes))
    variance = net.mean(net.op("Pow", centered, net.const(2.0)), again)
    norm = net.op("Div", centered, net.op("Sqrt", net.op("Add", variance, net.const(1e-6))))
    norm = net.op("Mul", net.const(random(*shape, seed=1)), norm)
    norm = net.op("Add", norm, net.const(random(*shape, seed=2)))
    y = net.op("Conv", norm, net.const(random(FILTERS, C, 2, 2, seed=3)), net.const(random(FILTERS, seed=4)), strides=[2, 2])
    return net.model([value("x", ("N", C, *size))], [y])


@pytest.mark.parametrize("opset", [11, 13, 17, 18, NEWEST])
@pytest.mark.parametrize("axis", [1, -3])
def test_a_norm_spelled_out_over_the_channels_of_planes(axis: int, opset: int) -> None:
    fused, sites, _ = check(spelled(opset, (axis,), (axis,)), {"x": X})
    assert ops(fused) == ["Relu", "Transpose", *PAIR, "Transpose"]
    assert sites == [("patch_linear", "norm_before")]


def test_planes_that_fill_no_patch_are_dropped_too() -> None:
    fused, _, _ = check(spelled(size=(7, 9), shape=(1, C, 1, 1)), {"x": random(2, C, 7, 9)})
    assert ops(fused) == ["Relu", "Transpose", *CROPPED, "Transpose"]


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"axes": [2], "again": [2]}, "the norm is not over the channels alone (axes) ([2])"),
        ({"again": [1, 2]}, "the norm is not over the channels alone (axes) ([1, 2])"),
        ({"shape": (C, H, W)}, "is not one value of the image's type for each of the channels"),
        ({"shape": (1, 1, 1)}, "is not one value of the image's type for each of the channels"),
    ],
)
def test_a_spelled_out_norm_that_is_none_over_channels(kwargs: dict[str, Any], reason: str) -> None:
    _, sites, misses = check(spelled(**kwargs), {"x": X})
    assert names(sites) == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "patch_linear"), misses


# --- ConvNeXt -------------------------------------------------------------------------------------------------------------------


def stages(
    batch: Any = "N", side: Any = 12, blocks: tuple[int, ...] = (1, 2), elem: int = F16, dtype: Any = np.float16, stem: bool = False
) -> onnx.ModelProto:
    """x [batch, C, side, side] through stages of ConvNeXt blocks of C channels, between them a norm and a convolution of 2x2 patches.

    stem: before them a convolution of 4x4 patches of x [batch, 3, 4 side, 4 side], and a norm.
    """
    net = Net(17)
    if stem:
        weight = convnext.weights(net, convnext.C, 3, 4, 4, seed=2000)
        x = net.op("Conv", "x", weight, convnext.weights(net, convnext.C, seed=2001), strides=[4, 4], kernel_shape=[4, 4])
        rows = net.op("Transpose", x, perm=[0, 2, 3, 1])
        affine = [convnext.weights(net, convnext.C, seed=seed) for seed in (2002, 2003)]
        x = net.op("Transpose", net.op("LayerNormalization", rows, *affine, axis=-1, epsilon=1e-6), perm=[0, 3, 1, 2])
    else:
        x = net.op("Relu", "x")
    for stage, count in enumerate(blocks):
        if stage:
            seed = 1000 + 10 * stage
            rows = net.op("Transpose", x, perm=[0, 2, 3, 1])
            affine = [convnext.weights(net, convnext.C, seed=seed + i) for i in (1, 2)]
            rows = net.op("LayerNormalization", rows, *affine, axis=-1, epsilon=1e-6)
            moved = net.op("Transpose", rows, perm=[0, 3, 1, 2])
            weight = convnext.weights(net, convnext.C, convnext.C, 2, 2, seed=seed + 3)
            x = net.op("Conv", moved, weight, convnext.weights(net, convnext.C, seed=seed + 4), strides=[2, 2], kernel_shape=[2, 2])
        for number in range(count):
            x = convnext.block(net, x, 10 + 200 * stage + 20 * number)
    for tensor in net.constants:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    shape = (batch, 3, 4 * side, 4 * side) if stem else (batch, convnext.C, side, side)
    return net.model([value("x", shape, elem)], [x])


@pytest.mark.parametrize("batch", ["N", 1])
def test_no_transpose_is_left_between_stages(batch: Any) -> None:
    original = stages(batch)
    feeds = {"x": random(1, convnext.C, 12, 12, dtype=np.float16)}
    fused, sites, _ = check(original, feeds, rtol=3e-2, atol=3e-2)
    block = ["onnxfuse::DepthwiseConvLayerNormLast", "onnxfuse::LinearGelu", "onnxfuse::LinearResidual"]
    assert ops(fused) == ["Relu", "Transpose", *block, *PAIR, *block, *block, "Transpose"]
    assert names(sites).count("patch_linear") == 1


def test_no_transpose_is_left_behind_the_stem() -> None:
    feeds = {"x": random(1, 3, 48, 48, dtype=np.float16)}
    fused, sites, _ = check(stages(stem=True, blocks=(1, 1)), feeds, rtol=3e-2, atol=3e-2)
    block = ["onnxfuse::DepthwiseConvLayerNormLast", "onnxfuse::LinearGelu", "onnxfuse::LinearResidual"]
    assert ops(fused) == ["Conv", "onnxfuse::LayerNormPlanes", *block, *PAIR, *block, "Transpose"]
    assert sorted(site for site in sites if site[0] == "patch_linear") == [("patch_linear", "norm_before"), ("patch_linear", "norm_behind")]


@pytest.mark.parametrize("without", ["linear_epilogue", "dwconv_layernorm", "patch_linear"])
def test_one_of_the_three_alone_is_left_out(without: str) -> None:
    """Each border is right with a neighbour that is not fused."""
    feeds = {"x": random(1, convnext.C, 12, 12, dtype=np.float16)}
    left = {"linear_epilogue", "dwconv_layernorm", "patch_linear"} - {without}
    fused, sites, _ = check(stages(), feeds, only=left, rtol=3e-2, atol=3e-2)
    assert left <= set(names(sites))
    assert ops(fused).count("onnxfuse::PatchLinear") == int(without != "patch_linear")


def test_two_transitions_in_a_row(tmp_path: Path) -> None:
    original = stages(side=16, blocks=(1, 0, 1))
    feeds = {"x": random(2, convnext.C, 16, 16, dtype=np.float16)}
    fused, sites, _ = check(original, feeds, rtol=3e-2, atol=3e-2)
    assert names(sites).count("patch_linear") == 2
    assert ops(fused).count("Transpose") == 2


def test_a_float32_model_that_becomes_half(tmp_path: Path) -> None:
    """Both nodes are plugins in half precision; one that has to stay in float32 is spelled out where its plugin takes halves alone."""
    source, fused, kept = (tmp_path / f"{name}.onnx" for name in ("source", "fused", "kept"))
    onnx.save(model(), source)
    plugins = frozenset({"Linear", "LayerNormPatches"})
    result = pipeline.optimize(source, fused, policy="all", precision="fp16")
    assert result.agrees
    given = onnx.load_from_string(prepare.for_parser(fused, plugins))
    made = [node.op_type for node in given.graph.node if node.op_type not in ("Cast", "Transpose")]
    assert made == ["LayerNormPatches", "Linear"]

    assert pipeline.optimize(source, kept, policy="all").agrees
    given = onnx.load_from_string(prepare.for_parser(kept, plugins))
    made = [node.op_type for node in given.graph.node if node.op_type not in ("Cast", "Transpose")]
    assert made == ["LayerNormPatches", "MatMul", "Add"]
    assert prepare.plugin_ops_in(fused, plugins) == {"LayerNormPatches", "PatchLinear"}
    assert prepare.plugin_ops_in(kept, plugins) == {"LayerNormPatches"}


def test_policy_measure_tries_the_three_together() -> None:
    assert {"patch_linear", "linear_epilogue", "dwconv_layernorm"} in measuring._together()


def test_the_norm_behind_the_stem_is_a_group_of_its_own(tmp_path: Path) -> None:
    onnx.save(stages(stem=True, blocks=(1, 1)), tmp_path / "m.onnx")
    places, _ = pipeline.sites(tmp_path / "m.onnx")
    groups = [group for group in grouped(places) if group.fusion == "patch_linear"]
    assert sorted(group.variant or "" for group in groups) == ["norm_before", "norm_behind"]
