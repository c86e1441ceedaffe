"""Calls the launcher of the norm that writes patches on raw memory, and what its results have to be, in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.plugins import kernels
from tests.plugins.epilogues import LIMITS

_I, _P = ctypes.c_int32, ctypes.c_void_p


class Problem(ctypes.Structure):
    """OnnxfuseLayerNormPatches of plugins/LayerNormPatches/launch.h."""

    _fields_ = [
        *((name, _I) for name in ("dtype", "images", "height", "width", "channels", "patch", "planar")),
        ("epsilon", ctypes.c_float),
        *((name, _P) for name in ("input", "gamma", "beta", "output")),
        *((name, _I) for name in ("threads", "early")),
    ]


class Launchers:
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._launch, self._supported = library.onnxfuse_launch_layernorm_patches, library.onnxfuse_layernorm_patches_supported

    def launch(self, problem: Problem) -> int:
        return int(self._launch(ctypes.byref(problem), None))

    def supported(self, problem: Problem) -> int:
        return int(self._supported(ctypes.byref(problem)))


@dataclass(frozen=True)
class Case:
    dtype: str = "float16"
    images: int = 2
    height: int = 6
    width: int = 8
    channels: int = 96
    patch: int = 2
    planar: bool = False
    beta: bool = True
    mean: float = 0.0
    offset: int = 0  # bytes between a multiple of 16 and each tensor
    tactic: dict[str, int] = field(default_factory=dict)

    def tensors(self, rng: Any) -> tuple[dict[str, kernels.Array], kernels.Array]:
        """The inputs by name, and the output in float64."""
        dtype = kernels.DTYPES[self.dtype][1]
        n, h, w, c, p = self.images, self.height, self.width, self.channels, self.patch
        x = (rng.standard_normal((n, h, w, c)) + self.mean).astype(dtype)
        given = {"input": np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if self.planar else x}
        given["gamma"] = (1 + 0.3 * rng.standard_normal(c)).astype(dtype)
        wide = x.astype(np.float64)
        away = wide - wide.mean(-1, keepdims=True)
        y = away / np.sqrt((away**2).mean(-1, keepdims=True) + np.float64(np.float32(1e-6))) * given["gamma"].astype(np.float64)
        if self.beta:
            given["beta"] = (0.3 * rng.standard_normal(c)).astype(dtype)
            y = y + given["beta"].astype(np.float64)
        patches = np.empty((n, h // p, w // p, p, p, c))
        for i in range(p):
            for j in range(p):
                patches[:, :, :, i, j] = y[:, i : h // p * p : p, j : w // p * p : p]
        return given, patches.reshape(n, h // p, w // p, p * p * c)


def check(launchers: Launchers, memory: Any, case: Case, threads: Sequence[int] = ()) -> None:
    """Launch twice, compare with float64, and bit by bit with the second time; with each of `threads` that the launcher takes, too."""
    code, dtype, _, _ = kernels.DTYPES[case.dtype]
    given, want = case.tensors(np.random.default_rng(7))
    held = {name: kernels.Tensor(memory, value, case.offset) for name, value in given.items()}
    sizes = {name: getattr(case, name) for name in ("images", "height", "width", "channels", "patch")}
    problem = Problem(dtype=code, **sizes, planar=int(case.planar), epsilon=1e-6, **{name: tensor.address for name, tensor in held.items()})
    # Float32 sums of large values that nearly cancel.
    limit = LIMITS[case.dtype] * (1 + abs(case.mean) * (0.3 if case.dtype == "float32" else 0.02))
    for number in (case.tactic.get("threads", 0), *threads):
        problem.threads = number
        if number in threads and launchers.supported(problem) != kernels.SUCCESS:
            continue
        assert launchers.supported(problem) == kernels.SUCCESS, f"{case}: refused"
        results = []
        for early in (0, 1):
            output = kernels.Tensor.poisoned(memory, want.shape, dtype, case.offset)
            problem.output, problem.early = output.address, early
            assert launchers.launch(problem) == kernels.SUCCESS, f"{case} {number}"
            memory.synchronize()
            results.append(output.read())
        assert results[0].tobytes() == results[1].tobytes(), f"{case} {number}: not the same the second time"
        got = results[0].astype(np.float64)
        assert np.isfinite(got).all(), f"{case} {number}: holds what is no number, first at {np.argwhere(~np.isfinite(got))[0]}"
        away = np.abs(got - want) > 10 * limit * np.maximum(1, np.abs(want))
        assert not away.any(), f"{case} {number}: {away.sum()} elements are off, first {np.argwhere(away)[0]}"
        error, scale = np.sqrt(((got - want) ** 2).sum()), np.sqrt((want**2).sum())
        assert error <= limit * scale, f"{case} {number}: off by {error / scale:.1e}"
