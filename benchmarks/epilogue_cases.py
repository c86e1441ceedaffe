"""Cases of benchmarks/kernels.py: the kernels of ConvNeXt alone and its blocks as they follow each other, GroupNorm + SiLU, large products.

Sizes are those of ConvNeXt-tiny's four stages at 224 x 224 and of a diffusion U-Net. Weights of products are as large as what they are
multiplied with, so they are counted and rotated as inputs are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.kernel_cases import CODES, Case, Shape, weights

_I, _P = ctypes.c_int32, ctypes.c_void_p


class Depthwise(ctypes.Structure):
    """OnnxfuseDepthwise of plugins/DepthwiseConvLayerNorm/launch.h."""

    _fields_ = [
        *((name, _I) for name in ("dtype", "kernel", "images", "height", "width", "channels", "planar")),
        ("epsilon", ctypes.c_float),
        *((name, _P) for name in ("input", "weight", "bias", "gamma", "beta", "output")),
        *((name, _I) for name in ("variant", "strip", "rows", "strips", "split", "early")),
    ]


class GroupNorm(ctypes.Structure):
    """OnnxfuseGroupNorm of plugins/GroupNormSilu/launch.h."""

    _fields_ = [
        *((name, _I) for name in ("dtype", "images", "channels", "groups", "pixels", "channels_last", "silu")),
        ("epsilon", ctypes.c_float),
        *((name, _P) for name in ("input", "gamma", "beta", "film_scale", "film_shift", "output")),
        *((name, _I) for name in ("threads", "per_thread", "split", "bulk", "two_kernels", "early")),
    ]


class Linear(ctypes.Structure):
    """OnnxfuseLinear of plugins/Linear/launch.h."""

    _fields_ = [
        *((name, _I) for name in ("dtype", "activation", "rows", "width", "columns", "ending")),
        ("epsilon", ctypes.c_float),
        *((name, _P) for name in ("input", "weight", "bias", "scale", "residual", "output", "gamma", "beta", "total")),
        *((name, _I) for name in ("tile_rows", "tile_columns", "stages", "split", "hopper", "early")),
    ]


NO_ACTIVATION, GELU = 0, 3  # onnxfuse::Activation
EPSILON = 1e-6
STAGES = ((56, 96, 3), (28, 192, 3), (14, 384, 9), (7, 768, 3))
"""ConvNeXt-tiny: pixels a side, channels, blocks."""
BATCHES = {1: "small", 8: "middle", 32: "large"}
LAYER_SCALE = 0.1
GROUPS = 32
GROUP_NORMS = ((8, 320, 4096), (16, 512, 4096), (1, 128, 512 * 512), (2, 512, 256 * 256))
"""Images, channels, pixels."""
TWO_BLOCKS = (512, 16, 2)
"""Threads, split and bulk of the tactic that has two blocks of a large group on each multiprocessor."""


def epilogues(library: ctypes.CDLL, dtype: str, other_threads: bool) -> Iterator[Case]:
    """Each kernel with the launcher's own tactic. Products have no float32."""
    for batch, size in BATCHES.items():
        for side, channels, _ in STAGES:
            yield depthwise(library, dtype, batch, side, channels, size)
    for kernel in (3, 5):
        yield depthwise(library, dtype, 8, 28, 192, "middle", kernel)
    for sizes in GROUP_NORMS:
        every = (group_norm(library, dtype, *sizes, tactic=tactic) for tactic in (None, TWO_BLOCKS))
        yield from (case for case in every if case is not None)
    if dtype == "float32":
        return
    for batch, size in BATCHES.items():
        for side, channels, _ in STAGES:
            shape = f"ConvNeXt-tiny {side}x{side}, batch {batch}"
            yield linear(library, dtype, batch * side * side, channels, 4 * channels, shape, size, "gelu")
            yield linear(library, dtype, batch * side * side, 4 * channels, channels, shape, size, "residual")
    for kind in ("plain", "gelu"):
        yield linear(library, dtype, 4096, 4096, 4096, "4096 x 4096 x 4096", "large", kind)
    for side, channels, depth in STAGES:
        yield blocks(library, dtype, side, channels, depth)


def depthwise(library: ctypes.CDLL, dtype: str, batch: int, side: int, channels: int, size: str, kernel: int = 7) -> Case:
    """Convolution + LayerNorm, channels last."""
    function = library.onnxfuse_launch_depthwise_layernorm
    taps, vectors = _matrix(channels, kernel * kernel, dtype, 1 / kernel), [weights(channels, dtype) for _ in range(3)]
    problem = _depthwise(dtype, batch, side, channels, kernel, taps, vectors)
    elements = batch * side * side * channels

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        problem.input, problem.output = read[0], written[0]
        return int(function(ctypes.byref(problem), _P(stream)))

    def reference(read: Sequence[Any]) -> list[Any]:
        return [_depthwise_of(read[0].view(batch, side, side, channels), taps, vectors, kernel)]

    shape = Shape(batch * side * side, channels, f"{side}x{side}, batch {batch}", size)
    return Case(f"dwconv_layernorm {kernel}x{kernel}", dtype, shape, (elements,), (elements,), launch, reference)


def group_norm(
    library: ctypes.CDLL, dtype: str, images: int, channels: int, pixels: int, tactic: tuple[int, int, int] | None = None
) -> Case | None:
    """GroupNorm of 32 groups with SiLU, channels first. tactic: threads, split and bulk; None where this GPU does not take it."""
    import torch

    function, workspace_of = library.onnxfuse_launch_group_norm, library.onnxfuse_group_norm_workspace
    workspace_of.restype = ctypes.c_size_t
    gamma, beta = (weights(channels, dtype) for _ in range(2))
    problem = GroupNorm(
        dtype=CODES[dtype][0], images=images, channels=channels, groups=GROUPS, pixels=pixels, silu=1, epsilon=EPSILON,
        gamma=gamma.data_ptr(), beta=beta.data_ptr(),
    )  # fmt: skip
    problem.threads, problem.split, problem.bulk = tactic or (0, 0, 0)
    if library.onnxfuse_group_norm_supported(ctypes.byref(problem)):
        return None
    room = torch.empty(int(workspace_of(ctypes.byref(problem))) + 16, dtype=torch.uint8, device="cuda")

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        problem.input, problem.output = read[0], written[0]
        return int(function(ctypes.byref(problem), _P(room.data_ptr()), _P(stream)))

    def reference(read: Sequence[Any]) -> list[Any]:
        x = read[0].view(images, channels, pixels)
        return [torch.nn.functional.silu(torch.nn.functional.group_norm(x, GROUPS, gamma.float(), beta.float(), EPSILON))]

    shape = Shape(images * channels, pixels, f"{images}x{channels}x{pixels}", "large")
    elements = (images * channels * pixels,)
    name = "groupnorm_silu" + (f" by {' x '.join(map(str, tactic))}" if tactic else "")
    return Case(name, dtype, shape, elements, elements, launch, reference)


def linear(library: ctypes.CDLL, dtype: str, rows: int, width: int, columns: int, name: str, size: str, kind: str) -> Case:
    """A product: plain, with bias and GELU, or with bias, layer scale and residual."""
    function = library.onnxfuse_launch_linear
    bias, scale = (weights(columns, dtype) for _ in range(2))
    problem = _linear(dtype, rows, width, columns, kind, bias, scale)
    read = [rows * width, width * columns, *([rows * columns] if kind == "residual" else [])]

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        problem.input, problem.weight, problem.residual = (*read, None)[:3]
        problem.output = written[0]
        return int(function(ctypes.byref(problem), _P(stream)))

    def reference(read: Sequence[Any]) -> list[Any]:
        residual = read[2].view(rows, columns) if kind == "residual" else None
        return [_linear_of(read[0].view(rows, width), read[1].view(width, columns), kind, bias, scale, residual)]

    shape = Shape(rows, columns, f"{name}, k {width}", size)
    return Case(
        f"linear_epilogue {kind}", dtype, shape, tuple(read), (rows * columns,), launch, reference, flops=2 * rows * width * columns
    )


def blocks(library: ctypes.CDLL, dtype: str, side: int, channels: int, depth: int) -> Case:
    """All blocks of a stage at batch 1, each with its own weights: convolution + norm, product + GELU, product + scale + residual. Every
    kernel may start before the one before it has ended, as the plugins let them.
    """
    import torch

    dw, product = library.onnxfuse_launch_depthwise_layernorm, library.onnxfuse_launch_linear
    rows, kept, steps = side * side, [], []
    normed, hidden = (torch.empty(rows * n, dtype=getattr(torch, dtype), device="cuda") for n in (channels, 4 * channels))
    between = [torch.empty_like(normed) for _ in range(2)]
    for _ in range(depth):
        taps, vectors = _matrix(channels, 49, dtype, 1 / 7), [weights(channels, dtype) for _ in range(3)]
        up, down = _matrix(channels, 4 * channels, dtype, channels**-0.5), _matrix(4 * channels, channels, dtype, (4 * channels) ** -0.5)
        up_bias, down_bias, scale = weights(4 * channels, dtype), weights(channels, dtype), weights(channels, dtype) * LAYER_SCALE
        first = _depthwise(dtype, 1, side, channels, 7, taps, vectors)
        second = _linear(dtype, rows, channels, 4 * channels, "gelu", up_bias, None)
        third = _linear(dtype, rows, 4 * channels, channels, "residual", down_bias, scale)
        second.weight, third.weight = up.data_ptr(), down.data_ptr()
        first.early = second.early = third.early = 1
        steps.append((first, second, third))
        kept.append((taps, vectors, up, up_bias, down, down_bias, scale))

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        x = read[0]
        for number, (first, second, third) in enumerate(steps):
            first.input = third.residual = x
            # Here, and not where they are made: the launch keeps what it writes to.
            first.output = second.input = normed.data_ptr()
            second.output = third.input = hidden.data_ptr()
            x = third.output = written[0] if number == depth - 1 else between[number % 2].data_ptr()
            for function, problem in ((dw, first), (product, second), (product, third)):
                if failed := int(function(ctypes.byref(problem), _P(stream))):
                    return failed
        return 0

    def reference(read: Sequence[Any]) -> list[Any]:
        x = read[0].view(rows, channels)
        for taps, vectors, up, up_bias, down, down_bias, scale in kept:
            y = _depthwise_of(x.view(1, side, side, channels), taps, vectors, 7).view(rows, channels)
            y = _linear_of(y, up.float(), "gelu", up_bias, scale, None)
            x = _linear_of(y, down.float(), "residual", down_bias, scale, x)
        return [x]

    shape = Shape(rows, channels, f"{depth} blocks of ConvNeXt-tiny at {side}x{side}", "small")
    return Case("convnext blocks", dtype, shape, (rows * channels,), (rows * channels,), launch, reference)


def _matrix(rows: int, columns: int, dtype: str, scale: float) -> Any:
    return (weights(rows * columns, dtype) * scale).view(rows, columns)


def _depthwise(dtype: str, batch: int, side: int, channels: int, kernel: int, taps: Any, vectors: Sequence[Any]) -> Depthwise:
    bias, gamma, beta = (vector.data_ptr() for vector in vectors)
    return Depthwise(
        dtype=CODES[dtype][0], kernel=kernel, images=batch, height=side, width=side, channels=channels, epsilon=EPSILON,
        weight=taps.data_ptr(), bias=bias, gamma=gamma, beta=beta,
    )  # fmt: skip


def _depthwise_of(x: Any, taps: Any, vectors: Sequence[Any], kernel: int) -> Any:
    """x [images, height, width, channels], float32."""
    import torch

    _, height, width, channels = x.shape
    bias, gamma, beta = (vector.float() for vector in vectors)
    edge = kernel // 2
    padded = torch.nn.functional.pad(x, (0, 0, edge, edge, edge, edge))  # not conv2d, which may take TF32
    y = bias.expand(x.shape)
    for row in range(kernel):
        for column in range(kernel):
            y = y + padded[:, row : row + height, column : column + width] * taps.float()[:, row * kernel + column]
    return torch.nn.functional.layer_norm(y, (channels,), gamma, beta, EPSILON)


def _linear(dtype: str, rows: int, width: int, columns: int, kind: str, bias: Any, scale: Any) -> Linear:
    return Linear(
        dtype=CODES[dtype][0], activation=GELU if kind == "gelu" else NO_ACTIVATION, rows=rows, width=width, columns=columns,
        bias=None if kind == "plain" else bias.data_ptr(), scale=scale.data_ptr() if kind == "residual" else None,
    )  # fmt: skip


def _linear_of(x: Any, weight: Any, kind: str, bias: Any, scale: Any, residual: Any) -> Any:
    """x [rows, width], weight [width, columns], residual [rows, columns], float32."""
    import torch

    y = x @ weight
    if kind == "plain":
        return y
    y = y + bias.float()
    return torch.nn.functional.gelu(y) if kind == "gelu" else residual + scale.float() * y
