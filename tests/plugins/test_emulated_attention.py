"""The attention kernels, run thread by thread on the host against float64.

The emulator lets warps run at random pace, hands out shared memory full of NaN, and lets copies in the background come as late as they may.
tests/gpu/test_attention.py checks the same on a GPU, and larger sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins import attentions, kernels

Case = attentions.Case
ROWS = pytest.mark.parametrize("rows", [16, 32, 64])
WARPS = pytest.mark.parametrize("warps", [4, 8])
HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
LOWEST = {"float32": -3.4028234663852886e38, "float16": -65504.0, "bfloat16": -3.38953139e38}


@pytest.fixture(scope="module")
def launcher(emulated: Callable[[str], Path]) -> Any:
    return attentions.Launcher(emulated("FusedAttention"))


@pytest.fixture(autouse=True)
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_EMULATED_SMS", "64")
    monkeypatch.setenv("ONNXFUSE_EMULATED_SHARED", str(227 * 1024))


def check(launcher: Any, **fields: Any) -> None:
    attentions.check(launcher, kernels.HOST, Case(**fields), kernels)


@ROWS
@WARPS
@HALVES
def test_blocks_of_every_size(rows: int, warps: int, dtype: str, launcher: Any) -> None:
    check(launcher, dtype=dtype, rows=rows, warps=warps)
    check(launcher, dtype=dtype, rows=rows, warps=warps, queries=rows + 7, keys=257, heads=1, batch=2)
    check(launcher, dtype=dtype, rows=rows, warps=warps, queries=5, keys=900, heads=1)  # several steps, the last one not full
    check(launcher, dtype=dtype, rows=rows, warps=warps, queries=1, keys=1, head=8)


@ROWS
@WARPS
@pytest.mark.parametrize("head", [8, 32, 40, 96, 128])
def test_heads_of_every_size(head: int, warps: int, rows: int, launcher: Any) -> None:
    check(launcher, rows=rows, warps=warps, head=head, queries=19, keys=90, heads=1)
    check(launcher, rows=rows, warps=warps, head=head, queries=3, keys=640, heads=1)


@ROWS
@pytest.mark.parametrize("head", [136, 248, 256])
def test_wide_heads(head: int, rows: int, launcher: Any) -> None:
    check(launcher, rows=rows, head=head, queries=19, keys=90, heads=1)
    check(launcher, rows=rows, head=head, queries=3, keys=330, heads=1)


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
@pytest.mark.parametrize("layout", ["rows", "heads", "packed"])
def test_layouts(layout: str, dtype: str, launcher: Any) -> None:
    check(launcher, dtype=dtype, layout=layout, queries=33, keys=33, batch=2, heads=3, width=24)


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
def test_groups_and_causal(dtype: str, launcher: Any) -> None:
    check(launcher, dtype=dtype, heads=6, kv_heads=2, queries=20, keys=40, head=32)
    for rows in (16, 64) if dtype != "float32" else (16,):
        check(launcher, dtype=dtype, causal=1, queries=100, keys=100, head=32, rows=rows)
    check(launcher, dtype=dtype, causal=1, queries=20, keys=100, head=32, offset=80)
    check(launcher, dtype=dtype, causal=1, queries=20, keys=10, head=32, offset=-3)  # the first rows have no keys: NaN
    check(launcher, dtype=dtype, causal=1, queries=20, keys=10, head=32, offset=-3, safe=1)


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
@pytest.mark.parametrize("shape", [(2, 1, 1, 70), (1, 2, 30, 70), (2, 2, 30, 70), (1, 1, 30, 1), (1, 2, 30, 71), (2, 1, 1, 71)])
def test_what_is_added(shape: tuple[int, int, int, int], dtype: str, launcher: Any) -> None:
    keys = max(shape[3], 20)
    check(launcher, dtype=dtype, batch=2, queries=30, keys=keys, head=32, added=(shape,))
    check(launcher, dtype=dtype, batch=4, queries=30, keys=keys, head=32, added=((1, 2, 30, keys), shape), low=-100.0, padding=9)


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
@pytest.mark.parametrize("low", [-10000.0, "lowest", -np.inf])
def test_rows_that_are_masked_whole(low: float | str, dtype: str, launcher: Any) -> None:
    value = LOWEST[dtype] if low == "lowest" else low
    for keys, splits in ((40, 0), (600, 0 if dtype == "float32" else 2)):
        mask = {"added": ((2, 1, 1, keys),), "padding": 9, "low": value, "whole": True}
        if dtype == "float32" and value == -10000.0:
            mask["whole"] = False  # there the last bit of the sum decides, which the reference has otherwise
        check(launcher, dtype=dtype, batch=2, keys=keys, head=32, splits=splits, **mask)
        check(launcher, dtype=dtype, batch=2, keys=keys, head=32, splits=splits, safe=1, **mask)


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
@pytest.mark.parametrize("fill", [-10000.0, "lowest", -np.inf])
def test_what_is_kept(fill: float | str, dtype: str, launcher: Any) -> None:
    value = LOWEST[dtype] if fill == "lowest" else fill
    for shape in ((2, 1, 1, 70), (1, 2, 16, 71), (2, 1, 16, 70)):
        for hides in (0, 1):
            check(launcher, dtype=dtype, batch=2, keys=shape[3], head=32, keep=shape, fill=value, hides=hides)
    check(launcher, dtype=dtype, batch=2, keys=70, head=32, keep=(2, 1, 1, 70), fill=value, whole=True)
    check(launcher, dtype=dtype, batch=2, keys=70, head=32, keep=(2, 1, 1, 70), added=((1, 2, 16, 70),), fill=value)


def test_keys_shared_out_to_blocks(launcher: Any) -> None:
    check(launcher, queries=1, keys=1000, splits=3, head=32)
    check(launcher, queries=20, keys=600, splits=2, causal=1, head=32)
    check(launcher, queries=20, keys=600, splits=2, rows=64, dtype="bfloat16", head=32, added=((1, 2, 20, 600),))
    check(launcher, queries=3, keys=2000, heads=1)  # the launcher's own choice


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
def test_nothing_to_do(dtype: str, launcher: Any) -> None:
    for nothing in ({"batch": 0}, {"queries": 0}, {"keys": 0}):
        check(launcher, dtype=dtype, **nothing)


def test_scores_of_any_size(launcher: Any) -> None:
    check(launcher, spread=30.0, keys=100)  # one key takes nearly all
    check(launcher, scale=-0.5, keys=100)
    check(launcher, spread=100.0, scale=1.0, keys=100, dtype="bfloat16")


def test_what_is_refused(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(**fields: Any) -> int:
        values = {"dtype": 1, "batch": 1, "heads": 2, "kv_heads": 2, "queries": 16, "keys": 400, "head": 64, "width": 64, **fields}
        return int(launcher.supported(attentions.Problem(**values)))

    assert answer() == 0
    assert answer(kv_heads=3) == answer(batch=-1) == answer(dtype=3) == answer(causal=2) == kernels.INVALID_VALUE
    assert (
        answer(head=60)
        == answer(head=264)
        == answer(width=4)
        == answer(rows=48)
        == answer(warps=6)
        == answer(head=256, warps=8)
        == attentions.NOT_SUPPORTED
    )
    assert answer(splits=2, keys=200, rows=16) == answer(dtype=0, rows=64) == answer(dtype=0, splits=2) == attentions.NOT_SUPPORTED
    monkeypatch.setenv("ONNXFUSE_EMULATED_SHARED", str(99 * 1024))
    assert answer(head=256, rows=16) == attentions.NOT_SUPPORTED  # two stages of 64 keys
    assert answer(head=256) == 0  # more rows at a time, and fewer keys


def test_pointers_are_checked(launcher: Any) -> None:
    data = np.zeros(1 << 16, np.uint8)
    start = data.ctypes.data + -data.ctypes.data % 16

    def launched(at: int, row: int = 64) -> int:
        problem = attentions.Problem(1, 1, 1, 1, 16, 16, 64, 64, 0.125)
        for tensor in (problem.q, problem.k, problem.v, problem.output):
            tensor.data, tensor.row_stride = at, row
        return int(launcher.launch(problem, None, 0))

    assert launched(start + 2) == launched(start, 63) == kernels.MISALIGNED_ADDRESS
    assert launched(0) == kernels.INVALID_VALUE
