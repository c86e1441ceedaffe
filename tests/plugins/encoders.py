"""Calls the launcher of encoder layers on raw memory, and what its results have to be, in float64.

As kernels.py, on a GPU's memory or, with the emulated library, on the host's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.encoder_cases import GELU, GELU_TANH, Problem, Stack, layer_of, packed, problem_of
from tests.plugins import kernels

Array = npt.NDArray[Any]
NOT_SUPPORTED = 801
NO_MASK, SAME, FLOAT, BOOLEAN = range(4)  # how a mask is stored


class Launcher:
    """The launcher of a library, by ctypes."""

    def __init__(self, path: Path) -> None:
        self.library = library = ctypes.CDLL(str(path))
        self._workspace = library.onnxfuse_encoder_workspace
        self._most = library.onnxfuse_encoder_workspace_up_to
        self._workspace.restype = self._most.restype = ctypes.c_size_t
        self._launch = library.onnxfuse_launch_encoder
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def workspace(self, problem: Problem) -> int:
        return int(self._workspace(ctypes.byref(problem)))

    def workspace_up_to(self, problem: Problem) -> int:
        return int(self._most(ctypes.byref(problem)))

    def launch(self, problem: Problem, workspace: int | None, size: int) -> int:
        return int(self._launch(ctypes.byref(problem), workspace, size, None))


@dataclass(frozen=True)
class Case:
    """One launch. first_norm: of a post-norm stack; mask: "", "keys" (boolean), "fill" (of x's type, by key) or "rows" (float32, by head,
    row and key). mean: of x. cluster to restore: see launch.h; 0 lets the launcher choose."""

    dtype: str = "float16"
    layers: int = 2
    width: int = 128
    inner: int = 256
    heads: int = 4
    batch: int = 1
    sequence: int = 32
    pre_norm: bool = False
    first_norm: bool = False
    final: bool = True
    activation: int = GELU
    mask: str = ""
    mean: float = 0.0
    cluster: int = 0
    clusters: int = 0
    parts: tuple[int, ...] = (0, 0, 0, 0)
    blocks: tuple[int, ...] = (0, 0, 0, 0)
    per: int = 0
    stages: int = 0
    barrier: int = 0
    restore: int = 0

    @property
    def stack(self) -> Stack:
        return Stack("", self.layers, self.width, self.inner, self.heads, self.batch, self.sequence, self.pre_norm)


def _norm(x: Array, layer: Mapping[str, Array], number: int, epsilon: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * layer[f"gamma{number}"] + layer[f"beta{number}"]


def reference(case: Case, x: Array, layers: Sequence[Mapping[str, Array]], first: Mapping[str, Array], mask: Array | None) -> Array:
    """The stack in float64. mask: added to the scores, of any shape that broadcasts. first: the norm before, last: see `check`."""
    epsilon = case.stack.epsilon

    def heads(y: Array) -> Array:
        return y.reshape(case.batch, case.sequence, case.heads, -1).transpose(0, 2, 1, 3)

    if case.first_norm:
        x = _norm(x, first, 2, epsilon)
    for number, w in enumerate(layers):
        h = _norm(x, w, 1, epsilon) if case.pre_norm else x
        q, k, v = (heads(h @ w[f"w{role}"] + w[f"b{role}"]) for role in "qkv")
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(case.width // case.heads) + (0 if mask is None else mask)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        middle = x + (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ w["wo"] + w["bo"]
        m = _norm(middle, w, 2 if case.pre_norm else 1, epsilon)
        inner = m @ w["w1"] + w["b1"]
        if case.activation in (GELU, GELU_TANH):
            inner = kernels.gelu("tanh" if case.activation == GELU_TANH else "none", inner)
        else:
            inner = np.maximum(inner, 0)
        x = (m if not case.pre_norm else middle) + inner @ w["w2"] + w["b2"]
        if case.final if number == len(layers) - 1 else not case.pre_norm:
            x = _norm(x, w, 2, epsilon)
    return x


def _mask(case: Case, rng: np.random.Generator, dtype: Any) -> tuple[Array | None, Array | None]:
    """As it is stored, and as it is added to the scores; the first key is never hidden."""
    keys = (case.batch, case.sequence)
    if case.mask == "keys":
        keep = np.arange(case.sequence) < rng.integers(1, case.sequence + 1, (case.batch, 1))
        return keep.astype(np.uint8), np.where(keep, 0.0, -np.inf)[:, None, None]
    if case.mask == "fill":
        fill = np.where((rng.random(keys) < 0.3) & (np.arange(case.sequence) > 0), -1e4, 0.0).astype(dtype)
        return fill, fill.astype(np.float64)[:, None, None]
    if case.mask == "rows":
        full = rng.standard_normal((case.batch, case.heads, case.sequence, case.sequence)).astype(np.float32)
        return full, full.astype(np.float64)
    return None, None


# Largest relative error (2-norm) after one layer; each further one adds an eighth of it.
LIMITS = {"float16": 1e-3, "bfloat16": 8e-3}


def check(launcher: Launcher, memory: kernels.Memory, case: Case) -> None:
    """Launch twice, and compare with float64. The norm behind the stack is that of the last layer (2)."""
    dtype = kernels.DTYPES[case.dtype][1]
    rng = np.random.default_rng(case.width + 10 * case.sequence + case.batch)
    first, *layers = (layer_of(case.width, case.inner, rng, dtype) for _ in range(case.layers + 1))
    x = (rng.standard_normal((case.batch, case.sequence, case.width)) + case.mean).astype(dtype)
    stored, mask = _mask(case, rng, dtype)
    kept: list[kernels.Tensor] = []

    def put(value: Array) -> int:
        kept.append(kernels.Tensor(memory, np.ascontiguousarray(value)))
        return kept[-1].address

    problem = problem_of(case.stack, case.dtype)
    for name in ("activation", "cluster", "clusters", "per", "stages", "barrier", "restore"):
        setattr(problem, name, getattr(case, name))
    problem.first_norm = case.pre_norm or case.first_norm
    problem.parts[:], problem.blocks[:] = case.parts, case.blocks
    problem.x = put(x)
    problem.weights, problem.vectors = map(put, packed(layers, first if case.first_norm else None, case.pre_norm, dtype))
    if case.final:
        problem.final_gamma, problem.final_beta = (put(layers[-1][name].astype(np.float32)) for name in ("gamma2", "beta2"))
    if stored is not None:
        problem.mask, problem.mask_type = put(stored), {"keys": BOOLEAN, "fill": SAME, "rows": FLOAT}[case.mask]
        problem.mask_batch = stored[0].size
        if case.mask == "rows":
            problem.mask_head, problem.mask_row = case.sequence**2, case.sequence
    if case.restore:
        problem.counters = put(np.zeros(2, np.uint32))
    y = kernels.Tensor.poisoned(memory, x.shape, dtype)
    problem.y = y.address

    size = launcher.workspace(problem)
    assert size > 0, f"{case}: refused"
    assert launcher.workspace_up_to(problem) >= size
    room = memory.allocate(size + 512)
    memory.write(room, np.full(size + 512, kernels.POISON, np.uint8))  # nothing may count on what was there
    start = (memory.address(room) + 255) // 256 * 256
    results = []
    for _ in range(2):
        assert launcher.launch(problem, start, size) == kernels.SUCCESS, case
        memory.synchronize()
        results.append(y.read())
    assert results[0].tobytes() == results[1].tobytes(), f"{case}: not the same the second time"
    after = np.array(memory.read(room))[start - memory.address(room) + size :]
    assert (after == kernels.POISON).all(), f"{case}: bytes behind the workspace were written"
    for tensor in kept:
        tensor.read()  # asserts that nothing around it was written

    wide = [{name: value.astype(np.float64) for name, value in layer.items()} for layer in (first, *layers)]
    want = reference(case, x.astype(np.float64), wide[1:], wide[0], mask)
    got = results[0].astype(np.float64)
    assert np.isfinite(got).all(), f"{case}: {np.isnan(got).sum()} of {got.size} elements are no numbers"
    scale = np.sqrt((want**2).mean())
    limit = LIMITS[case.dtype] * (1 + case.layers / 8) * (1 + abs(case.mean))
    error = np.sqrt(((got - want) ** 2).mean()) / scale
    assert error <= limit, f"{case}: off by {error:.1e}"
    worst = np.abs(got - want).max() / scale
    assert worst <= 20 * limit, f"{case}: an element is off by {worst:.1e}"
