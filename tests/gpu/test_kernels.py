"""The kernels on a GPU, through their C launchers, against float64. tests/plugins/test_emulated.py checks the same without one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.plugins import kernels

WIDTHS = (1, 7, 32, 384, 768, 1000, 1024, 1025, 4096, 8192, 16383, 16384)
ROWS = (0, 1, 3, 128, 4096)
MANY = 1300  # more than eight rows a multiprocessor, where the launchers change to one warp a row
DTYPES = tuple(kernels.DTYPES)
NORMS = pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def launchers(library: Path) -> Any:
    return kernels.Launchers(library)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@NORMS
def test_norm(rms: bool, width: int, dtype: str, launchers: Any, memory: Any) -> None:
    for rows in ROWS:
        # The check, not the kernel, would take long for 4096 of the widest rows.
        some = min(rows, MANY) if width > 4096 else rows
        kernels.check_norm(launchers, memory, kernels.NormCase(rms, dtype, some, width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("beta", "bias", "total"), list(itertools.product([False, True], repeat=3)))
@NORMS
def test_norm_with_optional_tensors(rms: bool, beta: bool, bias: bool, total: bool, dtype: str, launchers: Any, memory: Any) -> None:
    for rows, width in ((3, 384), (4096, 768), (3, 1001)):
        kernels.check_norm(launchers, memory, kernels.NormCase(rms, dtype, rows, width, beta=beta, bias=bias, sum=total))


@pytest.mark.parametrize("dtype", DTYPES)
@NORMS
def test_norm_with_any_number_of_threads(rms: bool, dtype: str, launchers: Any, memory: Any) -> None:
    for threads, rows in itertools.product((32, 64, 96, 128, 192, 256, 512), (1, 128, 4096)):
        kernels.check_norm(launchers, memory, kernels.NormCase(rms, dtype, rows, 768, threads=threads))


@pytest.mark.parametrize("dtype", DTYPES)
@NORMS
def test_norm_at_odd_addresses(rms: bool, dtype: str, launchers: Any, memory: Any) -> None:
    size = kernels.DTYPES[dtype][1].itemsize
    for offset, width in itertools.product((size, 8), (32, 768, 16384)):
        kernels.check_norm(launchers, memory, kernels.NormCase(rms, dtype, 33, width, offset=offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [100.0, 10_000.0])
@NORMS
def test_norm_of_large_means(rms: bool, mean: float, dtype: str, launchers: Any, memory: Any) -> None:
    for width in (32, 768, 16384):
        kernels.check_norm(launchers, memory, kernels.NormCase(rms, dtype, 129, width, mean=mean))


@pytest.mark.parametrize("special", [(NAN,), (INF,), (-INF,), (INF, -INF), (INF, INF)])
@NORMS
def test_norm_of_special_values(rms: bool, special: tuple[float, ...], launchers: Any, memory: Any) -> None:
    for dtype, width in itertools.product(DTYPES, (7, 768, 16384)):
        kernels.check_norm(launchers, memory, kernels.NormCase(rms, dtype, 3, width, special=special))


def test_norm_is_the_same_every_time(launchers: Any, memory: Any) -> None:
    import numpy as np

    code, dtype, _, _ = kernels.DTYPES["float16"]
    rng = np.random.default_rng(0)
    x, skip = (kernels.Tensor(memory, rng.standard_normal((128, 768)).astype(dtype)) for _ in "ab")
    gamma = kernels.Tensor(memory, rng.standard_normal(768).astype(dtype))
    results = set()
    for _ in range(20):
        output = kernels.Tensor.poisoned(memory, (128, 768), dtype)
        pointers = [x.address, skip.address, gamma.address, None, None, output.address, None]
        assert launchers.skip_layernorm(code, *pointers, 128, 768, 1e-5, 0, None) == kernels.SUCCESS
        memory.synchronize()
        results.add(output.read().tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(kernels.GELU_KINDS))
def test_gelu(kind: str, dtype: str, launchers: Any, memory: Any) -> None:
    size = kernels.DTYPES[dtype][1].itemsize
    for width, rows, offset in itertools.product((1, 7, 32, 768, 1000, 3072, 16384, 40_000), ROWS[:-1], (0, size)):
        kernels.check_gelu(launchers, memory, kernels.GeluCase(kind, dtype, rows, width, offset))
    kernels.check_gelu(launchers, memory, kernels.GeluCase(kind, dtype, 4096, 3072))
    kernels.check_gelu(launchers, memory, kernels.GeluCase(kind, dtype, 100_003, 7))


@pytest.mark.parametrize("kind", list(kernels.GELU_KINDS))
def test_gelu_of_special_and_far_values(kind: str, launchers: Any, memory: Any) -> None:
    special = (NAN, INF, -INF, 0.0, -0.0, 60000.0, -60000.0, 50.0, -50.0, -88.0, -10.0, -5.5)
    for dtype in DTYPES:
        kernels.check_gelu(launchers, memory, kernels.GeluCase(kind, dtype, 2, 24, special=special, spread=30.0))


@pytest.mark.parametrize(("kind", "limit"), list(kernels.GELU_ERRORS.items()))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gelu_of_every_value(kind: str, dtype: str, limit: float, launchers: Any, memory: Any) -> None:
    assert kernels.gelu_of_every_value(launchers, memory, kind, dtype) <= limit
