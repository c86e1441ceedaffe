"""The fusions, in the order in which they are tried: what an earlier one writes, a later one may build on."""

from __future__ import annotations

from onnxfuse import extensions
from onnxfuse.fusions import (
    attention,
    bias_gelu,
    conv_bias,
    conv_bn,
    dwconv_layernorm,
    elementwise,
    encoder_layer,
    gelu,
    groupnorm,
    groupnorm_silu,
    gru,
    layernorm,
    linear_bias,
    linear_epilogue,
    linear_gated,
    linear_layernorm,
    lstm,
    patch_linear,
    qkv_pack,
    rmsnorm,
    rope,
    silu,
    skip_layernorm,
    skip_rmsnorm,
)
from onnxfuse.fusions.base import KINDS, Fusion

BUILT_IN: tuple[Fusion, ...] = (
    groupnorm.FUSION,  # before the norm of rows, which one of its groups is
    layernorm.FUSION,
    rmsnorm.FUSION,
    gelu.FUSION,
    silu.FUSION,
    conv_bias.FUSION,
    conv_bn.FUSION,
    linear_bias.FUSION,
    qkv_pack.FUSION,
    encoder_layer.FUSION,
    # What takes more of a product's surroundings comes first.
    linear_gated.FUSION,
    linear_layernorm.FUSION,
    linear_epilogue.FUSION,
    patch_linear.FUSION,  # it reads and writes what linear_epilogue transposes; dwconv_layernorm reads what it writes
    dwconv_layernorm.FUSION,
    groupnorm_silu.FUSION,
    skip_layernorm.FUSION,
    skip_rmsnorm.FUSION,
    bias_gelu.FUSION,
    lstm.FUSION,
    gru.FUSION,
    rope.FUSION,
    attention.FUSION,
    elementwise.FUSION,  # over what all others left
)
# Those of extensions come behind the built-in ones of their kind, but before `elementwise`, which would leave them nothing.
REGISTRY: tuple[Fusion, ...] = tuple(
    sorted((*BUILT_IN, *extensions.fusions(BUILT_IN)), key=lambda fusion: (KINDS.index(fusion.kind), fusion is elementwise.FUSION))
)
NAMES: tuple[str, ...] = tuple(fusion.name for fusion in REGISTRY)
