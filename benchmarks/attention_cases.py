"""Cases of benchmarks/kernels.py: attention, from the models of the suite to lengths, batches and heads that it has not.

With --threads each case is timed by every tactic of the plugin that takes it, beside the launcher's own choice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernel_cases import CODES, Case, Shape, weights

TACTICS = (
    (16, 4, 1),
    (16, 8, 1),
    (32, 4, 1),
    (32, 8, 1),
    (64, 4, 1),
    (64, 8, 1),
    (16, 4, 2),
    (64, 4, 2),
    (16, 4, 4),
    (16, 4, 8),
    (16, 4, 16),
)
"""(rows, warps, splits), as in plugins/FusedAttention/plugin.cpp."""
NOTHING = (0, 0, 0)


class Strided(ctypes.Structure):
    """OnnxfuseAttentionTensor of plugins/FusedAttention/launch.h."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch_stride", "row_stride", "head_stride"))]


class Mask(ctypes.Structure):
    """OnnxfuseAttentionMask of plugins/FusedAttention/launch.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batches", ctypes.c_int32),
        ("key_stride", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("batch_stride", "head_stride", "row_stride")),
    ]


class Problem(ctypes.Structure):
    """OnnxfuseAttention of plugins/FusedAttention/launch.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "batch", "heads", "kv_heads", "queries", "keys", "head", "width")),
        ("scale", ctypes.c_float),
        *((name, Strided) for name in ("q", "k", "v", "output")),
        ("added", Mask * 2),
        ("keep", Mask),
        ("hides", ctypes.c_int32),
        ("fill", ctypes.c_float),
        ("safe", ctypes.c_int32),
        *((name, ctypes.c_int32) for name in ("causal", "offset", "rows", "warps", "splits", "early")),
    ]


@dataclass(frozen=True)
class Sizes:
    """bias: something is added to each score of a head, the same for every batch entry. kv_heads 0: as many as heads."""

    model: str
    size: str
    batch: int
    queries: int
    keys: int
    heads: int
    head: int
    kv_heads: int = 0
    bias: bool = False
    causal: bool = False

    @property
    def name(self) -> str:
        what = f"{self.batch} x {self.queries} x {self.keys}, {self.heads} of {self.head}"
        return f"attention {what}" + (", bias" if self.bias else "") + (", causal" if self.causal else "")


SIZES = (
    Sizes("BERT base, 128 tokens", "small", 1, 128, 128, 12, 64),
    Sizes("BERT base, 32 tokens", "small", 1, 32, 32, 12, 64),
    Sizes("MiniLM, 32 tokens", "small", 1, 32, 32, 12, 32),
    Sizes("ViT-S", "small", 1, 197, 197, 6, 64),
    Sizes("T5, 64 tokens", "small", 1, 64, 64, 8, 64, bias=True),
    Sizes("Swin-T, first stage", "small", 64, 49, 49, 3, 32, bias=True),
    Sizes("Swin-T, last stage", "small", 1, 49, 49, 24, 32, bias=True),
    Sizes("LLM decode, 4,096 keys", "small", 1, 1, 4096, 32, 128, kv_heads=8),
    Sizes("BERT base, 512 tokens", "middle", 1, 512, 512, 12, 64),
    Sizes("BERT base, 8 x 128 tokens", "middle", 8, 128, 128, 12, 64),
    Sizes("BERT base, 32 x 128 tokens", "middle", 32, 128, 128, 12, 64),
    Sizes("Whisper tiny", "middle", 1, 1500, 1500, 6, 64),
    Sizes("heads of 80", "middle", 1, 257, 257, 16, 80),
    Sizes("LLM prefill, 512 tokens", "middle", 1, 512, 512, 32, 128, kv_heads=8, causal=True),
    Sizes("4,096 tokens", "large", 1, 4096, 4096, 16, 128),
)


def attentions(library: ctypes.CDLL, dtype: str, other_threads: bool) -> Iterator[Case]:
    """Q, K and V [batch, rows, heads, size] read, the context written."""
    for sizes in SIZES:
        for tactic in (NOTHING, *TACTICS) if other_threads else (NOTHING,):
            problem = problem_of(sizes, dtype, tactic)
            if library.onnxfuse_attention_supported(ctypes.byref(problem)) == 0:
                yield attention(library, dtype, sizes, problem)


def problem_of(sizes: Sizes, dtype: str, tactic: tuple[int, int, int] = NOTHING) -> Problem:
    """All but the addresses."""
    kv_heads = sizes.kv_heads or sizes.heads
    problem = Problem(CODES[dtype][0], sizes.batch, sizes.heads, kv_heads, sizes.queries, sizes.keys, sizes.head, sizes.head)
    problem.scale, problem.causal = sizes.head**-0.5, int(sizes.causal)
    problem.rows, problem.warps, problem.splits = tactic
    for tensor, rows, heads in (
        (problem.q, sizes.queries, sizes.heads),
        (problem.k, sizes.keys, kv_heads),
        (problem.v, sizes.keys, kv_heads),
    ):
        tensor.batch_stride, tensor.row_stride, tensor.head_stride = rows * heads * sizes.head, heads * sizes.head, sizes.head
    problem.output = problem.q
    if sizes.bias:
        problem.added[0].batches, problem.added[0].key_stride = 1, 1
        problem.added[0].head_stride, problem.added[0].row_stride = sizes.queries * sizes.keys, sizes.keys
    return problem


def attention(library: ctypes.CDLL, dtype: str, sizes: Sizes, problem: Problem) -> Case:
    import torch

    function, workspace_of = library.onnxfuse_launch_attention, library.onnxfuse_attention_workspace
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    workspace_of.argtypes, workspace_of.restype = [ctypes.c_void_p], ctypes.c_size_t
    batch, queries, keys, heads, size = sizes.batch, sizes.queries, sizes.keys, sizes.heads, sizes.head
    bias = weights(heads * queries * keys, dtype) if sizes.bias else None
    if bias is not None:
        problem.added[0].data = bias.data_ptr()
    room = torch.empty(int(workspace_of(ctypes.byref(problem))) + 256, dtype=torch.uint8, device="cuda")

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        problem.q.data, problem.k.data, problem.v.data, problem.output.data = *read, *written
        return int(function(ctypes.byref(problem), room.data_ptr(), room.numel(), stream))

    def reference(read: Sequence[Any]) -> list[Any]:
        q = read[0].view(batch, queries, heads, size).transpose(1, 2)
        k, v = (part.view(batch, keys, -1, size).transpose(1, 2).repeat_interleave(heads // problem.kv_heads, dim=1) for part in read[1:])
        scores = q @ k.transpose(2, 3) * size**-0.5
        if bias is not None:
            scores = scores + bias.float().view(heads, queries, keys)
        if sizes.causal:
            scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(1), float("-inf"))
        return [(scores.softmax(dim=3) @ v).transpose(1, 2)]

    tactic = (problem.rows, problem.warps, problem.splits)
    name = sizes.name + (f" by {' x '.join(map(str, tactic))}" if tactic != NOTHING else "")
    own = batch * keys * problem.kv_heads * size
    written = batch * queries * heads * size
    counted = 2 * batch * heads * 2 * size * (queries * (queries + 1) // 2 if sizes.causal else queries * keys)
    shape = Shape(batch * queries, heads * size, sizes.model, sizes.size)
    return Case(name, dtype, shape, (written, own, own), (written,), launch, reference, flops=0 if sizes.size == "small" else counted)
