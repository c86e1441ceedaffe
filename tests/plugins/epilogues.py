"""Calls the launchers of depthwise convolution + LayerNorm, GroupNorm + SiLU and of products with an epilogue on raw memory, and what
their results have to be, in float64.

As kernels.py, on a GPU's memory or, with the emulated library, on the host's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.epilogue_cases import Depthwise, GroupNorm, Linear

Array = npt.NDArray[Any]
ENDINGS = ("columns", "gated", "norm")
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh", "gelu_quick")


class Launchers:
    """The launchers of a library, by ctypes."""

    def __init__(self, path: Path) -> None:
        self.library = library = ctypes.CDLL(str(path))
        self._depthwise, self._linear = library.onnxfuse_launch_depthwise_layernorm, library.onnxfuse_launch_linear
        self._group_norm, self._workspace = library.onnxfuse_launch_group_norm, library.onnxfuse_group_norm_workspace
        self._workspace.restype = ctypes.c_size_t
        self._supported = {
            Depthwise: library.onnxfuse_depthwise_layernorm_supported,
            GroupNorm: library.onnxfuse_group_norm_supported,
            Linear: library.onnxfuse_linear_supported,
        }

    def supported(self, problem: ctypes.Structure) -> int:
        return int(self._supported[type(problem)](ctypes.byref(problem)))

    def workspace(self, problem: ctypes.Structure) -> int:
        return int(self._workspace(ctypes.byref(problem))) if isinstance(problem, GroupNorm) else 0

    def launch(self, problem: ctypes.Structure, workspace: int | None = None) -> int:
        at = ctypes.byref(problem)
        if isinstance(problem, GroupNorm):
            return int(self._group_norm(at, ctypes.c_void_p(workspace), None))
        return int((self._depthwise if isinstance(problem, Depthwise) else self._linear)(at, None))


@dataclass(frozen=True)
class DepthwiseCase:
    dtype: str = "float16"
    images: int = 1
    height: int = 7
    width: int = 7
    channels: int = 64
    kernel: int = 7
    planar: bool = False
    bias: bool = True
    affine: bool = True
    mean: float = 0.0
    tactic: dict[str, int] = field(default_factory=dict)

    def make(self, code: int, dtype: Any, rng: Any) -> tuple[ctypes.Structure, dict[str, Array], Array]:
        """The problem without its tensors, the tensors by name, and the output in float64."""
        n, h, w, c, k = self.images, self.height, self.width, self.channels, self.kernel
        x = (rng.standard_normal((n, h, w, c)) + self.mean).astype(dtype)
        given = {"input": np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if self.planar else x}
        given["weight"] = (rng.standard_normal((c, k, k)) / k).astype(dtype)
        if self.bias:
            given["bias"] = rng.standard_normal(c).astype(dtype)
        if self.affine:
            given["gamma"] = (1 + 0.3 * rng.standard_normal(c)).astype(dtype)
            given["beta"] = (0.3 * rng.standard_normal(c)).astype(dtype)
        padded = np.pad(x.astype(np.float64), ((0, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0)))
        taps = given["weight"].astype(np.float64)
        y = sum(padded[:, i : i + h, j : j + w] * taps[:, i, j] for i in range(k) for j in range(k))
        y = y + given["bias"].astype(np.float64) if self.bias else y
        y = _normalised(y, (-1,), 1e-6)
        if self.affine:
            y = y * given["gamma"].astype(np.float64) + given["beta"].astype(np.float64)
        sizes = {"dtype": code, "kernel": k, "images": n, "height": h, "width": w, "channels": c, "planar": int(self.planar)}
        return Depthwise(**sizes, epsilon=1e-6, **self.tactic), given, y


@dataclass(frozen=True)
class GroupNormCase:
    dtype: str = "float16"
    images: int = 2
    channels: int = 64
    groups: int = 8
    pixels: int = 64
    last: bool = False
    film: bool = False
    silu: bool = True
    affine: bool = True
    mean: float = 0.0
    tactic: dict[str, int] = field(default_factory=dict)

    def make(self, code: int, dtype: Any, rng: Any) -> tuple[ctypes.Structure, dict[str, Array], Array]:
        n, c, p = self.images, self.channels, self.pixels
        x = (rng.standard_normal((n, c, p)) + self.mean).astype(dtype)
        given = {"input": np.ascontiguousarray(x.transpose(0, 2, 1)) if self.last else x}
        y = _normalised(x.astype(np.float64).reshape(n, self.groups, -1), (-1,), 1e-5).reshape(n, c, p)
        if self.affine:
            given["gamma"] = (1 + 0.3 * rng.standard_normal(c)).astype(dtype)
            given["beta"] = (0.3 * rng.standard_normal(c)).astype(dtype)
            y = y * given["gamma"].astype(np.float64)[:, None] + given["beta"].astype(np.float64)[:, None]
        if self.film:
            given["film_scale"], given["film_shift"] = ((0.3 * rng.standard_normal((n, c))).astype(dtype) for _ in range(2))
            y = y * given["film_scale"].astype(np.float64)[:, :, None] + given["film_shift"].astype(np.float64)[:, :, None]
        y = activated("silu", y) if self.silu else y
        sizes = {"dtype": code, "images": n, "silu": int(self.silu), "channels": c, "groups": self.groups, "pixels": p}
        problem = GroupNorm(**sizes, channels_last=int(self.last), epsilon=1e-5, **self.tactic)
        return problem, given, y.transpose(0, 2, 1) if self.last else y


@dataclass(frozen=True)
class LinearCase:
    dtype: str = "float16"
    rows: int = 49
    width: int = 96
    columns: int = 136
    activation: str = "none"
    bias: bool = True
    scale: bool = False
    residual: bool = False
    ending: str = "columns"
    affine: bool = True
    mean: float = 0.0
    tactic: dict[str, int] = field(default_factory=dict)

    def make(self, code: int, dtype: Any, rng: Any) -> tuple[ctypes.Structure, dict[str, Array], Array]:
        given = {"input": rng.standard_normal((self.rows, self.width)).astype(dtype)}
        given["weight"] = (rng.standard_normal((self.width, self.columns)) / math.sqrt(self.width)).astype(dtype)
        y = given["input"].astype(np.float64) @ given["weight"].astype(np.float64)
        if self.bias:
            given["bias"] = rng.standard_normal(self.columns).astype(dtype)
            y = y + given["bias"].astype(np.float64)
        if self.ending == "gated":
            gate, value = (y.reshape(self.rows, -1, 2, 8)[:, :, place].reshape(self.rows, -1) for place in (0, 1))
            y = activated(self.activation, gate) * value
        else:
            y = activated(self.activation, y)
        if self.scale:
            given["scale"] = (0.5 * rng.standard_normal(self.columns)).astype(dtype)
            y = y * given["scale"].astype(np.float64)
        if self.residual:
            given["residual"] = (rng.standard_normal((self.rows, self.columns)) + self.mean).astype(dtype)
            y = y + given["residual"].astype(np.float64)
        if self.ending == "norm":
            y = _normalised(y, (-1,), 1e-5)
            if self.affine:
                given["gamma"] = (1 + 0.3 * rng.standard_normal(self.columns)).astype(dtype)
                given["beta"] = (0.3 * rng.standard_normal(self.columns)).astype(dtype)
                y = y * given["gamma"].astype(np.float64) + given["beta"].astype(np.float64)
        sizes = {"dtype": code, "rows": self.rows, "width": self.width, "columns": self.columns}
        sizes |= {"ending": ENDINGS.index(self.ending), "epsilon": 1e-5}
        return Linear(**sizes, activation=ACTIVATIONS.index(self.activation), **self.tactic), given, y


Case = DepthwiseCase | GroupNormCase | LinearCase


def activated(kind: str, z: Array) -> Array:
    if kind == "gelu":
        return 0.5 * z * (1 + np.vectorize(math.erf, otypes=[np.float64])(z / math.sqrt(2)))
    rates = {"silu": 1.0, "gelu_quick": 1.702}
    if kind in rates:
        return z / (1 + np.exp(-rates[kind] * z))
    if kind == "gelu_tanh":
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return np.maximum(z, 0) if kind == "relu" else z


def _normalised(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    away = x - x.mean(axes, keepdims=True)
    return away / np.sqrt((away**2).mean(axes, keepdims=True) + np.float64(np.float32(epsilon)))


_TACTIC = {
    Depthwise: ("variant", "strip", "rows", "strips", "split"),
    GroupNorm: ("threads", "per_thread", "split", "bulk", "two_kernels"),
    Linear: ("tile_rows", "tile_columns", "stages", "split", "hopper"),
}
# Largest relative error (2-norm) of the output: float32 stands for summation in another order, half types for one rounding.
LIMITS = {"float32": 2e-6, "float16": 4e-4, "bfloat16": 3e-3}


def check(launchers: Launchers, memory: Any, case: Case, kernels: Any, further: Sequence[dict[str, int]] = ()) -> None:
    """Launch twice, compare with float64, and bit by bit with the second time. `kernels` is the module kernels.py.

    `further`: tactics that are checked too, where this GPU takes them.
    """
    code, dtype, _, _ = kernels.DTYPES[case.dtype]
    problem, given, want = case.make(code, dtype, np.random.default_rng(7))
    held = {name: kernels.Tensor(memory, value) for name, value in given.items()}
    for name, tensor in held.items():
        setattr(problem, name, tensor.address)
    # Float32 sums of large values that nearly cancel.
    limit = LIMITS[case.dtype] * (1 + abs(getattr(case, "mean", 0.0)) * (0.3 if case.dtype == "float32" else 0.02))
    assert launchers.supported(problem) == kernels.SUCCESS, f"{case}: refused"
    for tactic in (case.tactic, *further):
        for name in _TACTIC[type(problem)]:
            setattr(problem, name, tactic.get(name, 0))
        if launchers.supported(problem) == kernels.SUCCESS:
            _check(launchers, memory, problem, want, limit, kernels, f"{case} {tactic}")


def _check(launchers: Launchers, memory: Any, problem: Any, want: Array, limit: float, kernels: Any, said: str) -> None:
    output = kernels.Tensor.poisoned(memory, want.shape, next(row[1] for row in kernels.DTYPES.values() if row[0] == problem.dtype))
    problem.output = output.address
    room = memory.allocate(launchers.workspace(problem) + 256)
    start = (memory.address(room) + 255) // 256 * 256
    results = []
    for _ in range(2):
        assert launchers.launch(problem, start) == kernels.SUCCESS, said
        memory.synchronize()
        results.append(output.read())
    assert results[0].tobytes() == results[1].tobytes(), f"{said}: not the same the second time"
    got = results[0].astype(np.float64)
    assert np.isfinite(got).all(), f"{said}: holds what is no number, first at {np.argwhere(~np.isfinite(got))[0]}"
    scale = np.sqrt((want**2).mean())
    error = np.sqrt(((got - want) ** 2).mean())
    assert error <= limit * scale, f"{said}: off by {error / scale:.1e}"
    away = np.abs(got - want) > 30 * limit * np.maximum(scale, np.abs(want))
    assert not away.any(), f"{said}: {away.sum()} elements are off, first {np.argwhere(away)[0]}"
