"""The norm that writes patches, run thread by thread on the host against float64. tests/gpu/test_patches.py checks it on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins import kernels, patches
from tests.plugins.patches import Case

DTYPES = pytest.mark.parametrize("dtype", list(kernels.DTYPES))
PLANAR = pytest.mark.parametrize("planar", [False, True])
pytestmark = pytest.mark.nvcc


@pytest.fixture(scope="module")
def launchers(emulated: Callable[..., Path]) -> Any:
    return patches.Launchers(emulated("LayerNormPatches"))


def check(launchers: Any, case: Case, *threads: int) -> None:
    patches.check(launchers, kernels.HOST, case, threads)


@DTYPES
@PLANAR
@pytest.mark.parametrize("patch", [1, 2, 4])
def test_any_size(patch: int, planar: bool, dtype: str, launchers: Any) -> None:
    for n, h, w, c in ((1, 8, 8, 96), (3, 9, 11, 40), (2, 4, 6, 200), (1, 7, 5, 8)):
        check(launchers, Case(dtype, n, h, w, c, patch, planar))
    check(launchers, Case(dtype, 2, 8, 9, 64, patch, planar, beta=False))
    check(launchers, Case(dtype, 1, 8, 8, 128, patch, planar, mean=30.0))


@DTYPES
@PLANAR
def test_channels_that_fill_no_vector(planar: bool, dtype: str, launchers: Any) -> None:
    for channels in (1, 6, 33, 100):
        check(launchers, Case(dtype, 2, 5, 7, channels, planar=planar))


@DTYPES
def test_wide_rows(dtype: str, launchers: Any) -> None:
    for channels in (768, 2048, 16384, 4099):
        check(launchers, Case(dtype, 1, 3, 4, channels), 32, 64, 96, 128, 256, 512)


def test_planes_by_any_number_of_threads(launchers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_EMULATED_SHARED", "101376")
    check(launchers, Case("float16", 2, 9, 9, 192, planar=True), 128, 256, 512)
    check(launchers, Case("float32", 1, 6, 6, 360, planar=True), 128, 256, 512)


@DTYPES
@PLANAR
def test_odd_addresses(planar: bool, dtype: str, launchers: Any) -> None:
    size = kernels.DTYPES[dtype][1].itemsize
    for offset in (size, 8):
        check(launchers, Case(dtype, 2, 5, 4, 32, planar=planar, offset=offset))


@PLANAR
def test_images_smaller_than_a_patch_have_none(planar: bool, launchers: Any) -> None:
    for h, w in ((3, 9), (9, 3), (0, 8), (8, 0)):
        check(launchers, Case("float16", 2, h, w, 8, 4, planar))
    check(launchers, Case("float16", 0, 8, 8, 8, planar=planar))


def test_bad_arguments_are_refused(launchers: Any) -> None:
    tensor = kernels.Tensor.poisoned(kernels.HOST, (4096,), kernels.DTYPES["float16"][1]).address

    def launch(**changed: Any) -> int:
        sizes = {"dtype": 1, "images": 1, "height": 4, "width": 4, "channels": 8, "patch": 2, "epsilon": 1e-6}
        return int(launchers.launch(patches.Problem(**{**sizes, "input": tensor, "gamma": tensor, "output": tensor, **changed})))

    bad = kernels.INVALID_VALUE
    assert launch() == kernels.SUCCESS
    for changed in ({"dtype": 7}, {"patch": 0}, {"channels": 16385}, {"height": -1}, {"threads": 33}, {"threads": 1024}):
        assert launch(**changed) == bad, changed
        assert launch(**changed, planar=1) == bad, changed
    for name in ("input", "gamma", "output"):
        assert launch(**{name: None}) == bad
        assert launch(**{name: tensor + 1}) == kernels.MISALIGNED_ADDRESS
    assert launch(images=65536, height=65536, width=65536) == bad
    assert launch(channels=4096, planar=1) != kernels.SUCCESS  # no block has so much shared memory
    assert launch(images=0, input=None) == kernels.SUCCESS
