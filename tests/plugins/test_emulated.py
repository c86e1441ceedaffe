"""The kernels, compiled for the host and run thread by thread, against float64. tests/gpu/test_kernels.py checks them on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins import kernels

pytestmark = pytest.mark.nvcc

# Scalars and vectors, one warp and many, widths that fill no vector or no warp, the widest.
WIDTHS = (1, 7, 32, 100, 384, 768, 1000, 1025, 4096)
DTYPES = tuple(kernels.DTYPES)


@pytest.fixture(scope="module")
def launchers(emulated: Callable[..., Path]) -> object:
    return kernels.Launchers(emulated("BiasGelu", "SkipLayerNormalization", "SkipRMSNormalization"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rms", [False, True])
def test_norm(rms: bool, width: int, dtype: str, launchers: object) -> None:
    for rows in (0, 1, 3, 40):
        kernels.check_norm(launchers, kernels.HOST, kernels.NormCase(rms, dtype, rows, width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
def test_norm_of_the_widest_rows(rms: bool, dtype: str, launchers: object) -> None:
    for width, threads in itertools.product((16383, 16384), (0, 512)):
        kernels.check_norm(launchers, kernels.HOST, kernels.NormCase(rms, dtype, 2, width, threads=threads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize(("beta", "bias", "total"), list(itertools.product([False, True], repeat=3)))
def test_norm_with_optional_tensors(beta: bool, bias: bool, total: bool, rms: bool, dtype: str, launchers: object) -> None:
    case = kernels.NormCase(rms, dtype, 3, 384, beta=beta, bias=bias, sum=total)
    kernels.check_norm(launchers, kernels.HOST, case)


@pytest.mark.parametrize("threads", [32, 64, 96, 128, 512])
@pytest.mark.parametrize("rms", [False, True])
def test_norm_with_any_number_of_threads(rms: bool, threads: int, launchers: object) -> None:
    for rows in (1, 40):
        kernels.check_norm(launchers, kernels.HOST, kernels.NormCase(rms, "float16", rows, 768, threads=threads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_at_odd_addresses(dtype: str, launchers: object) -> None:
    size = kernels.DTYPES[dtype][1].itemsize
    for offset, width in itertools.product((size, 8), (32, 768)):
        kernels.check_norm(launchers, kernels.HOST, kernels.NormCase(False, dtype, 3, width, offset=offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("mean", [100.0, 10_000.0])
def test_norm_of_large_means(mean: float, rms: bool, dtype: str, launchers: object) -> None:
    kernels.check_norm(launchers, kernels.HOST, kernels.NormCase(rms, dtype, 3, 768, mean=mean))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("special", [(NAN,), (INF,), (-INF,), (INF, -INF), (INF, INF)])
@pytest.mark.parametrize("rms", [False, True])
def test_norm_of_special_values(rms: bool, special: tuple[float, ...], launchers: object) -> None:
    for dtype, width in itertools.product(DTYPES, (7, 768)):
        kernels.check_norm(launchers, kernels.HOST, kernels.NormCase(rms, dtype, 3, width, special=special))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(kernels.GELU_KINDS))
def test_gelu(kind: str, dtype: str, launchers: object) -> None:
    for width, rows, offset in itertools.product((1, 7, 32, 768, 3072, 20_000), (0, 1, 3, 40), (0, 4)):
        kernels.check_gelu(launchers, kernels.HOST, kernels.GeluCase(kind, dtype, rows, width, offset))


@pytest.mark.parametrize("kind", list(kernels.GELU_KINDS))
def test_gelu_of_special_and_far_values(kind: str, launchers: object) -> None:
    for dtype in DTYPES:
        special = (NAN, INF, -INF, 0.0, -0.0, 60000.0, -60000.0, 50.0, -50.0, -88.0, -10.0, -5.5)
        kernels.check_gelu(launchers, kernels.HOST, kernels.GeluCase(kind, dtype, 2, 24, special=special, spread=30.0))


@pytest.mark.parametrize(("kind", "limit"), list(kernels.GELU_ERRORS.items()))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gelu_of_every_value(kind: str, dtype: str, limit: float, launchers: object) -> None:
    assert kernels.gelu_of_every_value(launchers, kernels.HOST, kind, dtype) <= limit


def test_bad_arguments_are_refused(launchers: object) -> None:
    memory = kernels.HOST
    dtype = kernels.DTYPES["float16"][1]
    tensor = kernels.Tensor.poisoned(memory, (2, 64), dtype).address
    bad, askew = kernels.INVALID_VALUE, kernels.MISALIGNED_ADDRESS

    def norm(code=1, x=tensor, gamma=tensor, output=tensor, rows=2, width=64, threads=0):  # type: ignore[no-untyped-def]
        return launchers.skip_layernorm(code, x, tensor, gamma, None, None, output, None, rows, width, 1e-5, threads, None)  # type: ignore[attr-defined]

    assert norm(code=3) == bad
    assert norm(code=-1) == bad
    assert norm(rows=-1) == bad
    assert norm(width=16385) == bad
    assert norm(width=-1) == bad
    assert norm(x=None) == bad
    assert norm(gamma=None) == bad
    assert norm(output=None) == bad
    assert norm(threads=33) == bad
    assert norm(threads=1024) == bad
    assert norm(x=tensor + 1) == askew
    assert norm(rows=0, x=None) == kernels.SUCCESS
    assert norm(width=0) == kernels.SUCCESS
    gelu = launchers.bias_gelu  # type: ignore[attr-defined]
    assert gelu(1, 3, tensor, tensor, tensor, 2, 64, None) == bad
    assert gelu(9, 0, tensor, tensor, tensor, 2, 64, None) == bad
    assert gelu(1, 0, None, tensor, tensor, 2, 64, None) == bad
    assert gelu(1, 0, tensor + 1, tensor, tensor, 2, 64, None) == askew
    assert gelu(1, 0, None, None, None, 0, 64, None) == kernels.SUCCESS
