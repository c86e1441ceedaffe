"""Depthwise convolution + LayerNorm, GroupNorm + SiLU and products with epilogues, run thread by thread on the host against float64.

Clusters, tensor cores and Hopper's copies among them. tests/gpu/test_epilogues.py checks the same on a GPU, and larger sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins import epilogues, kernels

Depthwise, GroupNorm, Linear = epilogues.DepthwiseCase, epilogues.GroupNormCase, epilogues.LinearCase
DTYPES = pytest.mark.parametrize("dtype", list(kernels.DTYPES))
HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
pytestmark = pytest.mark.nvcc


@pytest.fixture(scope="module")
def launchers(emulated: Callable[..., Path]) -> Any:
    return epilogues.Launchers(emulated("DepthwiseConvLayerNorm", "GroupNormSilu", "Linear"))


@pytest.fixture(autouse=True)
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_EMULATED_SHARED", "232448")


def check(launchers: Any, case: Any) -> None:
    epilogues.check(launchers, kernels.HOST, case, kernels)


@DTYPES
@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("planar", [False, True])
def test_depthwise_of_any_size(planar: bool, kernel: int, dtype: str, launchers: Any) -> None:
    for n, h, w, c in ((2, 9, 10, 24), (1, 5, 31, 64), (3, 7, 7, 128), (1, 1, 2, 8)):
        check(launchers, Depthwise(dtype, n, h, w, c, kernel, planar))
    check(launchers, Depthwise(dtype, 1, 7, 9, 40, kernel, planar, bias=False, affine=False))
    check(launchers, Depthwise(dtype, 1, 8, 9, 64, kernel, planar, mean=30.0))


@DTYPES
def test_depthwise_on_float32_units(dtype: str, launchers: Any) -> None:
    for planar in (False, True):
        tactic = {"variant": 1, "rows": 3, "strips": 2, "split": 2}
        check(launchers, Depthwise(dtype, 2, 7, 17, 64, planar=planar, tactic=tactic))


@HALVES
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_depthwise_on_tensor_cores(rows: int, dtype: str, launchers: Any) -> None:
    def tactic(strips: int, split: int = 1, images: int = 1) -> dict[str, int]:
        return {"variant": 5, "rows": rows, "strips": strips, "split": split, "strip": images}

    for planar in (False, True):
        check(launchers, Depthwise(dtype, 2, 9, 10, 24, planar=planar, tactic=tactic(2)))
        check(launchers, Depthwise(dtype, 3, 7, 7, 64, planar=planar, tactic=tactic(1, 2, 2)))
    check(launchers, Depthwise(dtype, 1, 9, 60, 32, tactic=tactic(7)))
    check(launchers, Depthwise(dtype, 1, 14, 28, 96, mean=30.0, tactic=tactic(4, 3)))
    check(launchers, Depthwise(dtype, 1, 15, 17, 48, bias=False, affine=False, tactic=tactic(3)))
    check(launchers, Depthwise(dtype, 1, 2, 3, 8, tactic=tactic(8)))


@DTYPES
@pytest.mark.parametrize("last", [False, True])
def test_group_norm(last: bool, dtype: str, launchers: Any) -> None:
    check(launchers, GroupNorm(dtype, channels=40, groups=4, last=last))
    check(launchers, GroupNorm(dtype, pixels=96, last=last, film=True, tactic={"threads": 64, "split": 4}))
    check(launchers, GroupNorm(dtype, channels=48, groups=4, pixels=37, last=last, film=True, tactic={"threads": 64, "split": 2}))
    check(launchers, GroupNorm(dtype, 1, groups=2, pixels=147, last=last, tactic={"threads": 64, "split": 16}))
    check(launchers, GroupNorm(dtype, groups=4, pixels=300, last=last, film=True, tactic={"threads": 64, "split": 20, "two_kernels": 1}))
    check(launchers, GroupNorm(dtype, 1, 32, 2, 144, last, affine=False, mean=30.0))
    check(launchers, GroupNorm(dtype, channels=32, groups=4, pixels=1, last=last))


@DTYPES
def test_group_norm_by_one_copy(dtype: str, launchers: Any) -> None:
    check(launchers, GroupNorm(dtype, channels=40, groups=4, tactic={"bulk": 1}))
    check(launchers, GroupNorm(dtype, pixels=96, film=True, tactic={"threads": 64, "split": 4, "bulk": 1}))
    check(launchers, GroupNorm(dtype, 1, 48, 2, 24, mean=10.0, tactic={"threads": 32, "split": 8, "bulk": 1}))


@DTYPES
def test_group_norm_in_registers_and_shared_memory(dtype: str, launchers: Any) -> None:
    """Parts that registers hold alone, that need both, and blocks that have little or nothing."""
    for split in (1, 2, 4, 8):
        tactic = {"threads": 32, "split": split, "bulk": 2}
        check(launchers, GroupNorm(dtype, channels=40, groups=4, tactic=tactic))
        check(launchers, GroupNorm(dtype, 1, 24, 2, 440, film=True, mean=5.0, tactic=tactic))
    check(launchers, GroupNorm(dtype, 1, 8, 1, 8, silu=False, tactic={"threads": 32, "split": 8, "bulk": 2}))


@DTYPES
@pytest.mark.parametrize("film", [False, True])
def test_group_norm_without_silu(film: bool, dtype: str, launchers: Any) -> None:
    for last in (False, True):
        check(launchers, GroupNorm(dtype, channels=40, groups=4, last=last, film=film, silu=False))
        two_kernels = {"threads": 64, "split": 20, "two_kernels": 1}
        check(launchers, GroupNorm(dtype, groups=4, pixels=300, last=last, film=film, silu=False, tactic=two_kernels))
    check(launchers, GroupNorm(dtype, pixels=96, film=film, silu=False, tactic={"threads": 64, "split": 4, "bulk": 1}))


@HALVES
@pytest.mark.parametrize("tile", [(32, 64), (64, 64), (128, 128)])
def test_linear_of_any_size(tile: tuple[int, int], dtype: str, launchers: Any) -> None:
    def tactic(**more: int) -> dict[str, int]:
        return {"tile_rows": tile[0], "tile_columns": tile[1], **more}

    check(launchers, Linear(dtype, activation="gelu", tactic=tactic()))
    check(launchers, Linear(dtype, 130, 200, 72, "silu", scale=True, residual=True, tactic=tactic(split=2, stages=2)))
    check(launchers, Linear(dtype, 33, 328, 64, residual=True, tactic=tactic(split=8, stages=3)))


@HALVES
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_linear_of_few_rows_on_hopper(split: int, dtype: str, launchers: Any) -> None:
    tactic = {"tile_rows": 64, "tile_columns": 64, "hopper": 1, "split": split}
    check(launchers, Linear(dtype, 100, 136, 136, "gelu", tactic=tactic))
    check(launchers, Linear(dtype, 49, 1096, 72, scale=True, residual=True, tactic=tactic))


@HALVES
@pytest.mark.parametrize("columns", [128, 256])
def test_linear_of_many_rows_on_hopper(columns: int, dtype: str, launchers: Any) -> None:
    tactic = {"tile_columns": columns, "hopper": 1}
    check(launchers, Linear(dtype, 130, 136, 264, "gelu", tactic=tactic))
    check(launchers, Linear(dtype, 300, 456, 136, "silu", scale=True, residual=True, tactic=tactic))


GATED_TACTICS: tuple[dict[str, int], ...] = (
    {},
    {"tile_rows": 32, "tile_columns": 64, "split": 2},
    {"tile_rows": 64, "tile_columns": 64, "split": 8, "stages": 3},
    {"tile_rows": 128, "tile_columns": 128},
    *({"tile_rows": 64, "tile_columns": 64, "hopper": 1, "split": split} for split in (1, 2, 4, 8)),
    *({"tile_columns": columns, "hopper": 1} for columns in (128, 256)),
)


@HALVES
@pytest.mark.parametrize("tactic", GATED_TACTICS)
def test_one_product_gates_the_other(tactic: dict[str, int], dtype: str, launchers: Any) -> None:
    for activation in ("silu", "gelu"):
        check(launchers, Linear(dtype, 69, 136, 208, activation, ending="gated", tactic=tactic))
    check(launchers, Linear(dtype, 9, 552, 16, "relu", bias=False, ending="gated", tactic=tactic))


NORM_TILES = ((32, 128, 128), (64, 128, 96), (32, 256, 192), (32, 256, 256))


@HALVES
@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize(("rows", "columns", "width"), NORM_TILES)
def test_norm_of_what_is_summed(rows: int, columns: int, width: int, split: int, dtype: str, launchers: Any) -> None:
    tactic = {"tile_rows": rows, "tile_columns": columns, "split": split, "stages": 2}
    check(launchers, Linear(dtype, 69, 136, width, scale=True, residual=True, ending="norm", tactic=tactic))
    check(launchers, Linear(dtype, 33, 264, width - 8, bias=False, residual=True, affine=False, ending="norm", mean=20.0, tactic=tactic))


@HALVES
def test_the_sum_before_the_norm_is_written_where_it_is_read(dtype: str, launchers: Any) -> None:
    case = Linear(dtype, 37, 72, 104, scale=True, residual=True, ending="norm")
    code, kind, _, _ = kernels.DTYPES[dtype]
    problem, given, _ = case.make(code, kind, np.random.default_rng(7))
    held = {name: kernels.Tensor(kernels.HOST, value) for name, value in given.items()}
    total, output = (kernels.Tensor.poisoned(kernels.HOST, (37, 104), kind) for _ in range(2))
    for name, tensor in (*held.items(), ("total", total), ("output", output)):
        setattr(problem, name, tensor.address)
    assert launchers.launch(problem) == kernels.SUCCESS
    wide = {name: value.astype(np.float64) for name, value in given.items()}
    want = wide["residual"] + wide["scale"] * (wide["input"] @ wide["weight"] + wide["bias"])
    error = np.abs(total.read().astype(np.float64) - want).max()
    assert error < 10 * epilogues.LIMITS[dtype] * np.abs(want).max()


@HALVES
@pytest.mark.parametrize("activation", epilogues.ACTIVATIONS)
def test_activations_as_the_launcher_chooses(activation: str, dtype: str, launchers: Any) -> None:
    check(launchers, Linear(dtype, 20, 64, 64, activation, bias=activation != "none"))


def test_bad_arguments_are_refused(launchers: Any) -> None:
    memory = kernels.HOST
    tensor = kernels.Tensor.poisoned(memory, (4096,), kernels.DTYPES["float16"][1]).address
    bad, askew = kernels.INVALID_VALUE, kernels.MISALIGNED_ADDRESS

    def depthwise(**changed: Any) -> int:
        sizes = {"dtype": 1, "kernel": 3, "images": 1, "height": 2, "width": 2, "channels": 8, "epsilon": 1e-6}
        given = {"input": tensor, "weight": tensor, "output": tensor}
        return int(launchers.launch(epilogues.Depthwise(**{**sizes, **given, **changed})))

    def linear(**changed: Any) -> int:
        given = {"dtype": 1, "rows": 2, "width": 8, "columns": 8, "input": tensor, "weight": tensor, "output": tensor}
        return int(launchers.launch(epilogues.Linear(**{**given, **changed})))

    def group_norm(**changed: Any) -> int:
        sizes = {"dtype": 1, "images": 1, "channels": 8, "groups": 2, "pixels": 8, "epsilon": 1e-5}
        return int(launchers.launch(epilogues.GroupNorm(**{**sizes, "input": tensor, "output": tensor, **changed})))

    for launch in (depthwise, linear, group_norm):
        assert launch(dtype=7) == bad
        assert launch(input=None) == bad
        assert launch(output=None) == bad
        assert launch(input=tensor + 2) == askew
    assert depthwise(channels=12) == bad
    assert depthwise(kernel=4) == bad
    assert depthwise(variant=3) != kernels.SUCCESS
    assert depthwise(images=0, input=None) == kernels.SUCCESS
    assert linear(width=12) == bad
    assert linear(dtype=0) == bad
    assert linear(rows=0, input=None) == kernels.SUCCESS
    assert linear(ending=3) == bad
    assert linear(ending=1) == bad  # 8 columns are half a pair
    assert linear(ending=1, columns=16, residual=tensor) == bad
    assert linear(gamma=tensor) == bad
    assert linear(ending=2, columns=264) == bad
    assert linear(ending=2, tile_rows=64, tile_columns=64) == bad
    assert linear(ending=2, hopper=1, tile_columns=128) == bad
    assert group_norm(groups=3) == bad
    assert group_norm(threads=33) == bad
    assert group_norm(silu=2) == bad
    assert group_norm(bulk=3) == bad
    assert group_norm(pixels=0, input=None) == kernels.SUCCESS


def test_what_an_older_gpu_cannot_run_is_refused(launchers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turing lacks the instructions of the products, and its kernels would do nothing; the convolution has float32 units."""
    monkeypatch.setenv("ONNXFUSE_EMULATED_MAJOR", "7")
    for tactic in ({}, {"tile_rows": 64, "tile_columns": 64}, {"hopper": 1, "tile_columns": 128}):
        problem, _, _ = Linear(tactic=tactic).make(1, np.float16, np.random.default_rng(0))
        assert launchers.supported(problem) != kernels.SUCCESS
    check(launchers, Depthwise("float16", 1, 7, 7, 32))
    check(launchers, GroupNorm("float16", 1, 64, 8, 600))
    monkeypatch.setenv("ONNXFUSE_EMULATED_MAJOR", "8")
    check(launchers, Linear("bfloat16", 33, 72, 72, "gelu"))
    check(launchers, Depthwise("bfloat16", 1, 7, 7, 64))
