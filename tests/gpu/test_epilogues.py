"""Depthwise convolution + LayerNorm, GroupNorm + SiLU and products with epilogues on a GPU against float64, at the sizes of real networks.

Each with the launcher's own choice and with every tactic that this GPU takes. Small ones without a GPU:
tests/plugins/test_emulated_epilogues.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from benchmarks import epilogue_cases
from benchmarks.kernels import TOLERANCE
from onnxfuse import pipeline
from onnxfuse.engine import build as building
from onnxfuse.engine.run import Engine
from tests.fusions import convnext, test_groupnorm_silu
from tests.fusions.convnext import weights
from tests.fusions.helpers import Net, random, run, value
from tests.plugins import epilogues, kernels

Depthwise, GroupNorm, Linear = epilogues.DepthwiseCase, epilogues.GroupNormCase, epilogues.LinearCase
DTYPES = pytest.mark.parametrize("dtype", list(kernels.DTYPES))
HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
STAGES = pytest.mark.parametrize(("side", "channels"), [(56, 96), (28, 192), (14, 384), (7, 768)])


@pytest.fixture(scope="module")
def launchers(library: Path) -> Any:
    return epilogues.Launchers(library)


def check(launchers: Any, memory: Any, case: Any, *tactics: dict[str, int]) -> None:
    epilogues.check(launchers, memory, case, kernels, tactics)


@STAGES
@pytest.mark.parametrize("images", [1, 3])
@DTYPES
def test_depthwise(dtype: str, images: int, side: int, channels: int, launchers: Any, memory: Any) -> None:
    across = min((side + 7) // 8, 7)
    tactics = [
        {"variant": 5, "rows": rows, "strips": strips, "split": split, "strip": pair}
        for rows in (1, 2, 4)
        for strips in {across, (across + 1) // 2}
        for split in (1, 2, 3, 4, 6, 8, 12, 16)
        for pair in (1, 2)
    ]
    tactics += [{"variant": 1, "rows": rows, "strips": 1, "split": split} for rows in (1, 4) for split in (1, 2, 8)]
    check(launchers, memory, Depthwise(dtype, images, side, side, channels), *tactics)
    check(launchers, memory, Depthwise(dtype, images, side, side + 3, channels, planar=True))


@pytest.mark.parametrize("kernel", [3, 5])
@DTYPES
def test_depthwise_of_other_kernels(dtype: str, kernel: int, launchers: Any, memory: Any) -> None:
    for planar in (False, True):
        check(launchers, memory, Depthwise(dtype, 2, 29, 31, 120, kernel, planar, mean=5.0))


@DTYPES
@pytest.mark.parametrize("last", [False, True])
def test_group_norm(last: bool, dtype: str, launchers: Any, memory: Any) -> None:
    tactics = [{"threads": threads, "split": split, "bulk": bulk} for threads in (128, 512) for split in (1, 4, 16) for bulk in (0, 1)]
    for images, channels, pixels in ((1, 320, 4096), (2, 512, 1024), (3, 64, 1023), (1, 128, 65536)):
        case = GroupNorm(dtype, images, channels, 32, pixels, last, film=images > 1)
        check(launchers, memory, case, *tactics, {"threads": 256, "two_kernels": 1})


@HALVES
@pytest.mark.parametrize(("width", "columns"), [(96, 384), (384, 96), (768, 3072), (3072, 768), (72, 200)])
@pytest.mark.parametrize("rows", [1, 49, 197, 3136])
def test_linear(rows: int, width: int, columns: int, dtype: str, launchers: Any, memory: Any) -> None:
    tactics = [{"tile_rows": 64, "tile_columns": 64, "split": split, "hopper": hopper} for split in (1, 2, 4, 8) for hopper in (0, 1)]
    tactics += [{"tile_columns": 128, "hopper": 1}, {"tile_columns": 256, "hopper": 1}, {"tile_rows": 128, "tile_columns": 128}]
    check(launchers, memory, Linear(dtype, rows, width, columns, "gelu"), *tactics)
    check(launchers, memory, Linear(dtype, rows, width, columns, scale=True, residual=True), *tactics)


@DTYPES
def test_group_norm_in_registers_and_shared_memory(dtype: str, launchers: Any, memory: Any) -> None:
    tactics = [{"threads": 512, "split": split, "bulk": 2} for split in (2, 4, 8, 16)]
    for images, channels, pixels in ((1, 320, 4096), (1, 128, 65536), (1, 64, 131072)):
        for silu in (False, True):
            check(launchers, memory, GroupNorm(dtype, images, channels, 32, pixels, silu=silu), *tactics)


@HALVES
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 768, 4096), (197, 384, 1200), (1000, 320, 2560)])
def test_one_product_gates_the_other(rows: int, width: int, columns: int, dtype: str, launchers: Any, memory: Any) -> None:
    tactics = [{"tile_rows": 64, "tile_columns": 64, "split": split, "hopper": hopper} for split in (1, 2, 4, 8) for hopper in (0, 1)]
    tactics += [{"tile_columns": each, "hopper": 1} for each in (128, 256)]
    tactics += [{"tile_rows": 32, "tile_columns": 64, "split": 4}, {"tile_rows": 128, "tile_columns": 128}]
    check(launchers, memory, Linear(dtype, rows, width, columns, "silu", ending="gated"), *tactics)


@HALVES
@pytest.mark.parametrize(("width", "columns"), [(96, 96), (384, 96), (192, 192), (1024, 256)])
@pytest.mark.parametrize("rows", [1, 49, 3136])
def test_norm_of_what_is_summed(rows: int, width: int, columns: int, dtype: str, launchers: Any, memory: Any) -> None:
    tiles = [(32, 128, 3), (64, 128, 3), (32, 256, 2), (32, 256, 3)]
    tactics = [
        {"tile_rows": down, "tile_columns": across, "stages": stages, "split": split}
        for down, across, stages in tiles
        for split in (1, 2, 4, 8)
    ]
    check(launchers, memory, Linear(dtype, rows, width, columns, scale=True, residual=True, ending="norm"), *tactics)


@HALVES
def test_what_the_benchmark_times(dtype: str, launchers: Any, memory: Any) -> None:
    """The benchmark's own reference, by torch in float32; a stage's blocks start early there."""
    torch = pytest.importorskip("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in epilogue_cases.epilogues(launchers.library, dtype, False):
        if case.shape.size != "small":
            continue
        read, written = (
            [torch.randn(count, device="cuda").to(getattr(torch, dtype)) for count in counts] for counts in (case.reads, case.writes)
        )
        stream = torch.cuda.current_stream().cuda_stream
        assert case.launch([tensor.data_ptr() for tensor in read], [tensor.data_ptr() for tensor in written], stream) == kernels.SUCCESS
        want = case.reference([tensor.float() for tensor in read])[0].reshape(-1)
        error = ((written[0].float() - want).abs() / (1 + want.abs())).max().item()
        assert error < case.roundings * TOLERANCE[dtype], f"{case.kernel}, {case.shape.name}: {error}"


@pytest.mark.parametrize("name", ["convnext", "groupnorm"])
def test_an_engine_with_these_plugins(name: str, launchers: Any, tmp_path: Path) -> None:
    """Fused throughout (ConvNeXt's blocks channels last), built for batches of 1 to 8, against onnxruntime's result of the original."""
    if name == "convnext":
        original, wanted, shapes = (
            convnext.model(3),
            {"DepthwiseConvLayerNormLast", "LinearGelu", "LinearResidual"},
            {"x": (convnext.C, convnext.SIDE, convnext.SIDE)},
        )
    else:
        original, wanted = test_groupnorm_silu.model(film=True, elem=TensorProto.FLOAT16, dtype=np.float16), {"FilmGroupNormSilu"}
        shapes = {"x": (16, 5, 3), "a": (16, 1, 1), "b": (16, 1, 1)}
    source, fused, engine = (tmp_path / each for each in ("source.onnx", "fused.onnx", "fused.engine"))
    onnx.save(original, source)
    pipeline.optimize(source, fused, policy="all", check=False)
    ranges = [f"{x}:" + "..".join("x".join(map(str, (batch, *shape))) for batch in (1, 3, 8)) for x, shape in shapes.items()]
    made = building.build(fused, engine, shapes=ranges)
    assert wanted == set(made.plugins.ops)
    with Engine.load(engine) as loaded:
        for batch in (1, 3, 8):
            feeds = {x: random(batch, *shape, seed=batch, dtype=np.float16) for x, shape in shapes.items()}
            (got,), (want,) = loaded.run(feeds).values(), run(original, feeds)
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2e-2, atol=2e-2)


def _all_forms() -> onnx.ModelProto:
    """What a product, and what a GroupNorm, can end in: each form once, and some read by others."""
    net, half, k = Net(18), TensorProto.FLOAT16, 64
    product = net.op("Add", net.op("MatMul", "x", weights(net, k, k)), weights(net, k, seed=2))
    total = net.op("Add", net.op("Mul", product, weights(net, k, seed=3)), "r")
    rows = net.op("LayerNormalization", total, weights(net, k, seed=4), weights(net, k, seed=5), axis=-1)
    gate, passes = (net.op("MatMul", rows, weights(net, k, 2 * k, seed=seed)) for seed in (6, 7))
    gated = net.op("Mul", net.op("Mul", gate, net.op("Sigmoid", gate)), passes)
    net.op("Split", net.op("MatMul", total, weights(net, k, 2 * k, seed=8)), out=["passes", "gate"], axis=-1, num_outputs=2)
    net.op("Mul", "passes", net.op("Relu", "gate"), out="halves")
    dense = net.op("Relu", net.op("Gemm", "flat", weights(net, k, k, seed=9), weights(net, k, seed=10), transB=1))
    normed = net.op("GroupNormalization", "map", weights(net, 4, seed=11), weights(net, 4, seed=12), num_groups=4)
    net.op("Add", net.op("Mul", normed, "a"), "b", out="film")
    inputs = {"x": (7, k), "r": (7, k), "flat": (k,), "map": (16, 8, 6), "a": (16, 1, 1), "b": (16, 1, 1)}
    outputs = {total: (7, k), gated: (7, 2 * k), "halves": (7, k), dense: (k,), "film": (16, 8, 6)}
    return net.model(
        [value(name, ("N", *shape), half) for name, shape in inputs.items()],
        [value(name, ("N", *shape), half) for name, shape in outputs.items()],
    )


def test_an_engine_with_every_form(launchers: Any, tmp_path: Path) -> None:
    original = _all_forms()
    shapes = {given.name: [dim.dim_value for dim in given.type.tensor_type.shape.dim[1:]] for given in original.graph.input}
    source, fused, engine = (tmp_path / each for each in ("source.onnx", "fused.onnx", "fused.engine"))
    onnx.save(original, source)
    pipeline.optimize(source, fused, policy="all", check=False)
    ranges = [f"{name}:" + "..".join("x".join(map(str, (batch, *shape))) for batch in (1, 3, 8)) for name, shape in shapes.items()]
    made = building.build(fused, engine, shapes=ranges)
    assert set(made.plugins.ops) == {"LinearLayerNorm", "LinearSwiglu", "LinearReglu", "LinearRelu", "FilmGroupNorm"}
    with Engine.load(engine) as loaded:
        for batch in (1, 3, 8):
            feeds = {name: random(batch, *shape, seed=batch, dtype=np.float16) for name, shape in shapes.items()}
            got = loaded.run(feeds)
            for output, want in zip(original.graph.output, run(original, feeds), strict=True):
                near = 1e-2 * np.abs(want.astype(np.float32)).max()
                np.testing.assert_allclose(got[output.name].astype(np.float32), want.astype(np.float32), rtol=2e-2, atol=near)
