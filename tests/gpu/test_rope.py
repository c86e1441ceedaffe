"""Rotary embeddings in engines. tests/plugins/test_emulated_rotary.py checks the kernel at all sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfuse import pipeline
from onnxfuse.engine import build as building
from onnxfuse.engine.run import Engine
from tests.fusions import helpers, test_rope
from tests.gpu import engines


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("write", [test_rope.halves, test_rope.pairs])
def test_engines(write: Any, dtype: Any, tmp_path: Path) -> None:
    net, feeds = helpers.Net(), test_rope.feeds_of(dtype)
    model = test_rope.model(net, feeds, write(net, "x", "cos", "sin"))
    onnx.save(model, tmp_path / "model.onnx")
    pipeline.optimize(tmp_path / "model.onnx", tmp_path / "fused.onnx", policy="all", check=False)
    manifest = building.build(tmp_path / "fused.onnx", tmp_path / "fused.engine")
    assert manifest.plugins is not None
    assert manifest.plugins.ops == ("FusedRotary" if write is test_rope.halves else "FusedRotaryInterleaved",)
    engines.check_by_plugins(manifest, tmp_path / "fused.onnx")
    (want,) = helpers.run(model, feeds)
    with Engine.load(tmp_path / "fused.engine") as engine:
        (got,) = engine.run(feeds).values()
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=5e-3, atol=5e-3)
