"""ConvNeXt's blocks in float16, as timm writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from tests.fusions.helpers import Net, value
from tests.fusions.strategies import Planter, first

C, SIDE = 16, 6


def model(blocks: int, batch: Any = "N", scaled: str = "behind", side: int | None = SIDE) -> onnx.ModelProto:
    """x [batch, C, side, side] through so many blocks. scaled: where the layer scale stands, behind or before the last transpose.

    side None: any height and width.
    """
    net = Net(17)
    x = net.op("Relu", "x")
    for number in range(blocks):
        x = block(net, x, 10 + 20 * number, scaled)
    return net.model([value("x", (batch, C, side or "H", side or "W"), TensorProto.FLOAT16)], [x])


def weights(net: Net, *shape: int, seed: int = 1) -> str:
    return net.const(np.random.default_rng(seed).standard_normal(shape) / 4, np.float16)


def block(net: Net, x: str, seed: int, scaled: str = "behind") -> str:
    """Conv, Transpose, LayerNormalization, MatMul + Add, Gelu, MatMul + Add, Transpose, Mul, Add."""
    conv = net.op(
        "Conv", x, weights(net, C, 1, 7, 7, seed=seed), weights(net, C, seed=seed + 1), group=C, pads=[3] * 4, kernel_shape=[7, 7]
    )
    rows = net.op("Transpose", conv, perm=[0, 2, 3, 1])
    rows = net.op("LayerNormalization", rows, weights(net, C, seed=seed + 2), weights(net, C, seed=seed + 3), axis=-1, epsilon=1e-6)
    hidden = net.op("Add", net.op("MatMul", rows, weights(net, C, 4 * C, seed=seed + 4)), weights(net, 4 * C, seed=seed + 5))
    hidden = Planter(net, first, np.float16).gelu_erf(hidden)
    rows = net.op("Add", net.op("MatMul", hidden, weights(net, 4 * C, C, seed=seed + 6)), weights(net, C, seed=seed + 7))
    if scaled == "before":
        rows = net.op("Mul", rows, weights(net, C, seed=seed + 8))
    y = net.op("Transpose", rows, perm=[0, 3, 1, 2])
    if scaled == "behind":
        y = net.op("Mul", y, weights(net, 1, C, 1, 1, seed=seed + 8))
    return net.op("Add", y, x)
