"""The kernel of the rotary embedding, run thread by thread on the host against float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.plugins import kernels


class Placed(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch_stride", "head_stride", "row_stride"))]


class Problem(ctypes.Structure):
    """OnnxfuseRotary of plugins/FusedRotary/launch.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "batch", "heads", "rows", "size", "rotary", "interleaved")),
        *((name, Placed) for name in ("x", "cos", "sin", "y")),
        ("early", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Case:
    """`rows_first`: x is [batch, rows, heads, size]. `angles`: shape of cos and sin but for the last axis, 1 for a broadcast."""

    dtype: str = "float16"
    size: int = 64
    rotary: int = 64
    interleaved: int = 0
    rows_first: bool = False
    angles: tuple[int, int, int] = (1, 1, 5)
    batch: int = 2
    heads: int = 3
    rows: int = 5
    offset: int = 0


@pytest.fixture(scope="module")
def launch(emulated: Callable[[str], Path]) -> Callable[[Problem], int]:
    function = ctypes.CDLL(str(emulated("FusedRotary"))).onnxfuse_launch_rotary
    return lambda problem: int(function(ctypes.byref(problem), None))


def check(launch: Callable[[Problem], int], case: Case) -> None:
    code, dtype, roundoff, _ = kernels.DTYPES[case.dtype]
    rng = np.random.default_rng(case.size + case.rotary)
    x = rng.standard_normal((case.batch, case.heads, case.rows, case.size)).astype(dtype)
    cos, sin = (rng.standard_normal((*case.angles, case.rotary)).astype(dtype) for _ in range(2))
    laid = np.ascontiguousarray(x.transpose(0, 2, 1, 3) if case.rows_first else x)
    tensors = {name: kernels.Tensor(kernels.HOST, value, case.offset) for name, value in (("x", laid), ("cos", cos), ("sin", sin))}
    y = kernels.Tensor.poisoned(kernels.HOST, x.shape, dtype, case.offset)
    problem = Problem(code, case.batch, case.heads, case.rows, case.size, case.rotary, case.interleaved)
    for name, tensor in tensors.items():
        getattr(problem, name).data = tensor.address
    problem.y = Placed(y.address, *(stride // dtype.itemsize for stride in x.strides[:3]))
    batch, second, third = (stride // dtype.itemsize for stride in laid.strides[:3])
    heads, rows = (third, second) if case.rows_first else (second, third)
    problem.x.batch_stride, problem.x.head_stride, problem.x.row_stride = batch, heads, rows
    for placed in (problem.cos, problem.sin):
        strides = [0 if extent == 1 else stride // dtype.itemsize for extent, stride in zip(cos.shape, cos.strides, strict=True)]
        placed.batch_stride, placed.head_stride, placed.row_stride = strides[:3]
    assert launch(problem) == kernels.SUCCESS, case
    wide, c, s = (value.astype(np.float64) for value in (x, cos, sin))
    part = wide[..., : case.rotary]
    if case.interleaved:
        turned = np.stack([-part[..., 1::2], part[..., ::2]], axis=-1).reshape(part.shape)
    else:
        turned = np.concatenate([-part[..., case.rotary // 2 :], part[..., : case.rotary // 2]], axis=-1)
    want = np.concatenate([part * c + turned * s, wide[..., case.rotary :]], axis=-1)
    got = y.read().astype(np.float64)
    entering = np.concatenate([np.abs(part * c) + np.abs(turned * s), np.abs(wide[..., case.rotary :])], axis=-1)
    assert (np.abs(got - want) <= roundoff * np.abs(want) + 4 * 2.0**-24 * entering + 1e-7).all(), case
    assert (got[..., case.rotary :] == wide[..., case.rotary :]).all(), case


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
@pytest.mark.parametrize("interleaved", [0, 1])
def test_whole_heads_and_parts(interleaved: int, dtype: str, launch: Callable[[Problem], int]) -> None:
    for size, rotary in ((64, 64), (80, 32), (24, 8), (12, 6), (10, 2), (256, 256)):
        check(launch, Case(dtype, size, rotary, interleaved))
        check(launch, Case(dtype, size, rotary, interleaved, rows_first=True))


@pytest.mark.parametrize("angles", [(1, 1, 1), (2, 1, 5), (1, 3, 5), (2, 3, 5)])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_angles_are_broadcast(interleaved: int, angles: tuple[int, int, int], launch: Callable[[Problem], int]) -> None:
    check(launch, Case(interleaved=interleaved, angles=angles))
    check(launch, Case(interleaved=interleaved, angles=angles, rotary=32, offset=2))


def test_what_is_refused(launch: Callable[[Problem], int]) -> None:
    assert (
        launch(Problem(1, 1, 1, 1, 8, 9))
        == launch(Problem(1, 1, 1, 1, 8, 10))
        == launch(Problem(5, 1, 1, 1, 8, 8))
        == kernels.INVALID_VALUE
    )
    assert launch(Problem(1, 1, 1, 1, 8, 8)) == kernels.INVALID_VALUE  # no pointers
    assert launch(Problem(1, 0, 1, 1, 8, 8)) == kernels.SUCCESS
    assert launch(Problem(1, 1, 1, 1, 8, 8, 0, *(Placed(3) for _ in range(4)))) == kernels.MISALIGNED_ADDRESS
