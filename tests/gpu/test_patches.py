"""The norm that writes patches on a GPU against float64, and engines of ConvNeXt's stages with every plugin of theirs.

Small ones without a GPU: tests/plugins/test_emulated_patches.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxfuse import pipeline
from onnxfuse.engine import build as building
from onnxfuse.engine.run import Engine
from tests.fusions import test_patch_linear
from tests.fusions.helpers import random, run
from tests.plugins import kernels, patches
from tests.plugins.patches import Case

DTYPES = pytest.mark.parametrize("dtype", list(kernels.DTYPES))


@pytest.fixture(scope="module")
def launchers(library: Path) -> Any:
    return patches.Launchers(library)


@DTYPES
@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize(("side", "channels"), [(56, 96), (28, 192), (14, 384), (7, 504)])
def test_the_sizes_of_convnext(side: int, channels: int, planar: bool, dtype: str, launchers: Any, memory: Any) -> None:
    for images in (1, 3):
        patches.check(launchers, memory, Case(dtype, images, side, side + 1, channels, planar=planar), (32, 64, 96, 128, 256, 512))
    patches.check(launchers, memory, Case(dtype, 2, side, side, channels, 1, planar, mean=30.0))
    patches.check(launchers, memory, Case(dtype, 1, side, side, channels, 4, planar, beta=False))


@DTYPES
def test_odd_and_wide_rows(dtype: str, launchers: Any, memory: Any) -> None:
    for channels in (1, 33, 1000, 1025, 2048, 16384):
        patches.check(launchers, memory, Case(dtype, 2, 5, 6, channels), (32, 64, 128, 256, 512))
    patches.check(launchers, memory, Case(dtype, 40, 31, 33, 128))
    patches.check(launchers, memory, Case(dtype, 3, 31, 33, 100, planar=True, offset=8))


NORMS = {"DepthwiseConvLayerNormLast", "LayerNormPatchesCropped", "LayerNormPlanes"}
ENGINES = [
    (TensorProto.FLOAT16, np.float16, NORMS | {"LinearGelu", "LinearResidual", "PatchLinear"}, 3e-2),
    (TensorProto.FLOAT, np.float32, NORMS, 2e-2),  # products of float32 are TensorRT's
]


@pytest.mark.parametrize(("elem", "dtype", "wanted", "limit"), ENGINES, ids=["float16", "float32"])
def test_an_engine_of_two_stages(elem: int, dtype: Any, wanted: set[str], limit: float, launchers: Any, tmp_path: Path) -> None:
    """Fused throughout and built for batches of 1 to 8, against onnxruntime's result of the original; 13 rows fill six patches."""
    original = test_patch_linear.stages(stem=True, side=13, blocks=(1, 1), elem=elem, dtype=dtype)
    source, fused, engine = (tmp_path / each for each in ("source.onnx", "fused.onnx", "fused.engine"))
    onnx.save(original, source)
    pipeline.optimize(source, fused, policy="all", skip=["elementwise"], check=False)
    written = [node.op_type for node in onnx.load(fused).graph.node]
    assert written.count("LayerNormPlanes") == written.count("LayerNormPatchesCropped") == written.count("PatchLinear") == 1
    made = building.build(fused, engine, shapes=["x:1x3x52x52..3x3x52x52..8x3x52x52"])
    assert wanted == set(made.plugins.ops)
    with Engine.load(engine) as loaded:
        for batch in (1, 3, 8):
            feeds = {"x": random(batch, 3, 52, 52, seed=batch, dtype=dtype)}
            (got,), (want,) = loaded.run(feeds).values(), run(original, feeds)
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=limit, atol=limit)
