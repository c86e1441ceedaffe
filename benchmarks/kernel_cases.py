"""What benchmarks/kernels.py runs: each plugin's kernel at small, middle and large shapes. A new kernel is one generator more in CASES."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CODES = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (2, 2)}
"""Element type -> (the launchers' code of it, bytes of an element)."""
LARGE = 64 * 2**20
"""Bytes of one float16 tensor of the large shapes."""
FEW = 2**20
"""Elements below which other numbers of threads are worth timing."""


@dataclass(frozen=True)
class Shape:
    rows: int
    width: int
    name: str
    size: str
    """small (bound by launch and latency), middle (some waves of blocks) or large (64 MB and more, bound by the memory)."""


@dataclass(frozen=True)
class Case:
    """One launch.

    reads, writes: elements of each tensor that passes memory once; they lie in another place at every launch of a cold run. Weights are
    small, stay, and are not counted. launch: addresses of the inputs, of the outputs, and the stream; returns a cudaError_t.
    reference: the outputs for the inputs, all float32 tensors of torch. flops: floating-point operations, where they and not the memory
    are the limit. roundings: how many times the usual error results may have, of many layers.
    """

    kernel: str
    dtype: str
    shape: Shape
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    launch: Callable[[Sequence[int], Sequence[int], int], int]
    reference: Callable[[Sequence[Any]], Sequence[Any]]
    threads: int = 0
    flops: int = 0
    roundings: int = 1

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return CODES[self.dtype][1] * (sum(self.reads) + sum(self.writes))


NORM_SHAPES = (
    Shape(1, 4096, "LLM decode", "small"),
    Shape(32, 384, "MiniLM, 32 tokens", "small"),
    Shape(197, 384, "ViT-S", "small"),
    Shape(128, 768, "BERT base, 128 tokens", "small"),
    Shape(4096, 768, "BERT base, 32 x 128 tokens", "middle"),
    Shape(2048, 4096, "LLM prefill", "middle"),
    Shape(LARGE // 2 // 768, 768, "64 MB fp16, 768", "large"),
    Shape(LARGE // 2 // 1024, 1024, "64 MB fp16, 1024", "large"),
    Shape(LARGE // 2 // 4096, 4096, "64 MB fp16, 4096", "large"),
    Shape(LARGE // 2 // 16384, 16384, "64 MB fp16, 16384", "large"),
)
GELU_SHAPES = (
    Shape(32, 1536, "MiniLM, 32 tokens", "small"),
    Shape(128, 3072, "BERT base, 128 tokens", "small"),
    Shape(4096, 3072, "BERT base, 32 x 128 tokens", "middle"),
    Shape(LARGE // 2 // 3072, 3072, "64 MB fp16", "large"),
    Shape(2 * LARGE // 3072, 3072, "256 MB fp16", "large"),
)
GELU_KINDS = ("erf", "tanh", "quick")
THREADS = (0, 32, 64, 96, 128, 192, 256, 384, 512)
EPSILON = 1e-5


def norms(library: ctypes.CDLL, dtype: str, other_threads: bool) -> Iterator[Case]:
    """The residual norms: input and skip read, the output written, and the sum where it is read."""
    for shape in NORM_SHAPES:
        few = shape.rows * shape.width < FEW
        for threads in THREADS if other_threads and few else (0,):
            if threads == 0 or threads * 32 >= shape.width:
                yield from _norms(library, dtype, shape, threads)


def _norms(library: ctypes.CDLL, dtype: str, shape: Shape, threads: int) -> Iterator[Case]:
    import torch

    p, i, i64, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    layernorm, rmsnorm = library.onnxfuse_launch_skip_layernorm, library.onnxfuse_launch_skip_rmsnorm
    layernorm.argtypes = [i, p, p, p, p, p, p, p, i64, i64, f, i, p]
    rmsnorm.argtypes = [i, p, p, p, p, p, p, i64, i64, f, i, p]
    code, elements = CODES[dtype][0], shape.rows * shape.width
    gamma, beta, bias = (weights(shape.width, dtype) for _ in range(3))

    def launch_layernorm(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        output, total = (*written, None)[:2]
        pointers = [*read, gamma.data_ptr(), beta.data_ptr(), bias.data_ptr(), output, total]
        return int(layernorm(code, *pointers, shape.rows, shape.width, EPSILON, threads, stream))

    def launch_rmsnorm(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        pointers = [*read, gamma.data_ptr(), None, *written]
        return int(rmsnorm(code, *pointers, shape.rows, shape.width, EPSILON, threads, stream))

    def layernorm_of(read: Sequence[Any]) -> list[Any]:
        total = (read[0] + read[1]).view(shape.rows, shape.width) + bias.float()
        return [torch.nn.functional.layer_norm(total, (shape.width,), gamma.float(), beta.float(), EPSILON), total]

    def rmsnorm_of(read: Sequence[Any]) -> list[Any]:
        total = (read[0] + read[1]).view(shape.rows, shape.width)
        return [total * torch.rsqrt((total**2).mean(1, keepdim=True) + EPSILON) * gamma.float(), total]

    two, one = (elements, elements), (elements,)
    yield Case("skip_layernorm", dtype, shape, two, one, launch_layernorm, layernorm_of, threads)
    yield Case("skip_layernorm with sum", dtype, shape, two, two, launch_layernorm, layernorm_of, threads)
    yield Case("skip_rmsnorm with sum", dtype, shape, two, two, launch_rmsnorm, rmsnorm_of, threads)


def gelus(library: ctypes.CDLL, dtype: str, other_threads: bool) -> Iterator[Case]:
    """Bias and GELU: one tensor read, one written."""
    for shape in GELU_SHAPES:
        for kind, name in enumerate(GELU_KINDS):
            yield gelu(library, dtype, shape, kind, name)


def gelu(library: ctypes.CDLL, dtype: str, shape: Shape, kind: int, name: str) -> Case:
    import torch

    p, i, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    function = library.onnxfuse_launch_bias_gelu
    function.argtypes = [i, i, p, p, p, i64, i64, p]
    code, elements = CODES[dtype][0], shape.rows * shape.width
    bias = weights(shape.width, dtype)

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        return int(function(code, kind, read[0], bias.data_ptr(), written[0], shape.rows, shape.width, stream))

    def reference(read: Sequence[Any]) -> list[Any]:
        z = read[0].view(shape.rows, shape.width) + bias.float()
        if name == "quick":
            return [z * torch.sigmoid(1.702 * z)]
        return [torch.nn.functional.gelu(z, approximate="tanh" if name == "tanh" else "none")]

    return Case(f"bias_gelu {name}", dtype, shape, (elements,), (elements,), launch, reference)


CASES: tuple[Callable[[ctypes.CDLL, str, bool], Iterator[Case]], ...] = (norms, gelus)
"""Each: (plugin library, element type, whether to try other numbers of threads a row) -> cases."""


def weights(width: int, dtype: str) -> Any:
    """A random vector on the GPU."""
    import torch

    return torch.randn(width, device="cuda").to(getattr(torch, dtype))
