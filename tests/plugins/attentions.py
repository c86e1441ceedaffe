"""Calls the launcher of attention on raw memory, and what its results have to be: softmax(scale Q K^T + masks) V in float64.

As kernels.py, on a GPU's memory or, with the emulated library, on the host's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.attention_cases import Mask, Problem, Strided

Array = npt.NDArray[Any]
NOT_SUPPORTED = 801
MASKING = -64.0  # kMasking of plugins/FusedAttention/kernel.cuh


class Launcher:
    """The launcher of a library, by ctypes."""

    def __init__(self, path: Path) -> None:
        self.library = library = ctypes.CDLL(str(path))
        self._workspace = library.onnxfuse_attention_workspace
        self._workspace.restype = ctypes.c_size_t
        self._supported = library.onnxfuse_attention_supported
        self._launch = library.onnxfuse_launch_attention
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def workspace(self, problem: Problem) -> int:
        return int(self._workspace(ctypes.byref(problem)))

    def supported(self, problem: Problem) -> int:
        return int(self._supported(ctypes.byref(problem)))

    def launch(self, problem: Problem, workspace: int | None, size: int) -> int:
        return int(self._launch(ctypes.byref(problem), workspace, size, None))


@dataclass(frozen=True)
class Case:
    """One launch. `layout`: rows (all tensors [batch, row, head, i]), heads ([batch, head, row, i]) or packed (Q, K and V side by side).

    `added`: shapes of what is added, with 1 for a broadcast. `padding`: keys at the end of every second batch entry that a mask of the
    value `low` hides; `whole`: the first batch entry has all of its keys hidden. `keep`: shape of a mask of bytes.
    """

    dtype: str = "float16"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 0
    queries: int = 16
    keys: int = 16
    head: int = 64
    width: int = 0
    layout: str = "rows"
    scale: float = 0.0
    added: tuple[tuple[int, int, int, int], ...] = ()
    keep: tuple[int, int, int, int] | None = None
    hides: int = 0
    fill: float = -65504.0
    safe: int = 0
    low: float = -10000.0
    padding: int = 0
    whole: bool = False
    causal: int = 0
    offset: int = 0
    rows: int = 0
    warps: int = 0
    splits: int = 0
    spread: float = 1.0
    early: int = 0


def attend(case: Case, q: Array, k: Array, v: Array, added: list[Array], keep: Array | None, dtype: np.dtype[Any]) -> Array:
    """In float64; q [batch, heads, queries, head], masks broadcast to [batch, heads, queries, keys]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    with np.errstate(invalid="ignore"):
        scores = scale_of(case) * (q @ k.transpose(0, 1, 3, 2))
        if added:
            mask = sum(added)
            scores = np.where(mask <= MASKING, (scores + mask).astype(dtype).astype(np.float64), scores + mask)
        if keep is not None:
            scores = np.where((keep != 0) != (case.hides != 0), scores, float(np.float32(case.fill)))
        if case.causal:
            scores = np.where(np.arange(case.keys) <= np.arange(case.queries)[:, None] + case.offset, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) if case.keys else scores
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return np.asarray(np.where(np.isnan(weights), 0.0, weights) @ v if case.safe else weights @ v)


def scale_of(case: Case) -> float:
    return float(np.float32(case.scale or case.head**-0.5))


# Largest error against the largest value of V, in units of the type's roundoff. float32 sums up in another order.
LIMITS = {"float32": 16.0, "float16": 1.0, "bfloat16": 1.0}


def check(launcher: Launcher, memory: Any, case: Case, kernels: Any) -> float:
    """Launch twice, and compare with float64; the error in units of roundoff. `kernels` is the module kernels.py."""
    code, dtype, roundoff, _ = kernels.DTYPES[case.dtype]
    rng = np.random.default_rng(case.head * 1000 + case.queries * 10 + case.keys)
    kv_heads, width = case.kv_heads or case.heads, case.width or case.head
    kept: list[Any] = []

    def put(value: Array) -> int:
        kept.append((kernels.Tensor(memory, value), value))
        return int(kept[-1][0].address)

    def random(heads: int, rows: int, size: int) -> Array:
        return (rng.standard_normal((case.batch, heads, rows, size)) * case.spread).astype(dtype)

    q, k, v = random(case.heads, case.queries, case.head), random(kv_heads, case.keys, case.head), random(kv_heads, case.keys, width)
    problem = Problem(code, case.batch, case.heads, kv_heads, case.queries, case.keys, case.head, width, scale_of(case))
    problem.fill, problem.hides, problem.safe = case.fill, case.hides, case.safe
    problem.causal, problem.offset = case.causal, case.offset
    problem.rows, problem.warps, problem.splits, problem.early = case.rows, case.warps, case.splits, case.early

    def strides(tensor: Strided, heads: int, rows: int, size: int) -> None:
        if case.layout == "heads":
            tensor.row_stride, tensor.head_stride, tensor.batch_stride = size, rows * size, heads * rows * size
        else:
            tensor.row_stride, tensor.head_stride, tensor.batch_stride = heads * size, size, rows * heads * size

    def laid(value: Array) -> Array:
        return np.ascontiguousarray(value if case.layout == "heads" else value.transpose(0, 2, 1, 3))

    if case.layout == "packed":
        flat = [laid(value).reshape(case.batch, case.keys, -1) for value in (q, k, v)]
        start = put(np.concatenate(flat, axis=2))
        total = sum(part.shape[2] for part in flat)
        for tensor, part, size in zip((problem.q, problem.k, problem.v), flat, (case.head, case.head, width), strict=True):
            tensor.data, tensor.row_stride, tensor.head_stride, tensor.batch_stride = start, total, size, case.keys * total
            start += part.shape[2] * dtype.itemsize
    else:
        for tensor, value in ((problem.q, q), (problem.k, k), (problem.v, v)):
            tensor.data = put(laid(value))
            strides(tensor, value.shape[1], value.shape[2], value.shape[3])
    strides(problem.output, case.heads, case.queries, width)
    shape = (case.heads, case.queries) if case.layout == "heads" else (case.queries, case.heads)
    output = kernels.Tensor.poisoned(memory, (case.batch, *shape, width), dtype)
    problem.output.data = output.address

    def mask(to: Mask, value: Array) -> None:
        steps = [0 if extent == 1 else stride // value.itemsize for extent, stride in zip(value.shape, value.strides, strict=True)]
        to.data, to.batches, to.key_stride = put(value), value.shape[0], steps[3]
        to.batch_stride, to.head_stride, to.row_stride = steps[:3]

    def repeated(value: Array) -> Array:
        return np.asarray(np.broadcast_to(value[np.arange(case.batch) % len(value)], (case.batch, case.heads, case.queries, case.keys)))

    added, keep = [], None
    for i, extents in enumerate(case.added):
        value = rng.standard_normal(extents).astype(dtype)
        if i == len(case.added) - 1:
            value[1::2, ..., case.keys - case.padding :] = case.low
            if case.whole:
                value[0] = case.low
        mask(problem.added[i], value)
        added.append(repeated(value.astype(np.float64)))
    if case.keep:
        value = (rng.random(case.keep) < 0.7).astype(np.uint8)
        if case.whole:
            value[0] = 0
        mask(problem.keep, value)
        keep = repeated(value)

    assert launcher.supported(problem) == 0, f"{case}: refused with {launcher.supported(problem)}"
    size_needed = launcher.workspace(problem)
    assert case.splits < 2 or size_needed > 0
    room = memory.allocate(size_needed + 512)
    memory.write(room, np.full(size_needed + 512, kernels.POISON, np.uint8))
    start = (memory.address(room) + 255) // 256 * 256
    results = []
    for _ in range(2):
        assert launcher.launch(problem, start, size_needed) == kernels.SUCCESS, case
        memory.synchronize()
        results.append(output.read())
    assert results[0].tobytes() == results[1].tobytes(), f"{case}: not the same the second time"
    after = np.array(memory.read(room))[start - memory.address(room) + size_needed :]
    assert (after == kernels.POISON).all(), f"{case}: bytes behind the workspace were written"
    for tensor, value in kept:
        assert tensor.read().tobytes() == value.tobytes(), f"{case}: an input was changed"
    got = results[0].astype(np.float64)
    got = got if case.layout == "heads" else got.transpose(0, 2, 1, 3)
    want = attend(case, q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), added, keep, dtype)
    if not case.keys:
        assert (got == 0).all()
        return 0.0
    assert (np.isnan(got) == np.isnan(want)).all(), f"{case}: NaN elsewhere"
    if not got.size:
        return 0.0
    error = float(np.nan_to_num(np.abs(got - want)).max() / np.abs(v.astype(np.float64)).max() / roundoff)
    assert error <= LIMITS[case.dtype], f"{case}: off by {error:.1f} roundoffs"
    return error
