"""The fusions, in the order in which they are tried: what an earlier one writes, a later one may build on."""

from __future__ import annotations

from onnxfuse.fusions import bias_gelu, gelu, layernorm, rmsnorm, silu, skip_layernorm, skip_rmsnorm
from onnxfuse.fusions.base import Fusion

REGISTRY: tuple[Fusion, ...] = (
    layernorm.FUSION,
    rmsnorm.FUSION,
    gelu.FUSION,
    silu.FUSION,
    skip_layernorm.FUSION,
    skip_rmsnorm.FUSION,
    bias_gelu.FUSION,
)
NAMES: tuple[str, ...] = tuple(fusion.name for fusion in REGISTRY)
