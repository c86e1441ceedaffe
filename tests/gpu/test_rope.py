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


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], ops: set[str], folder: Path) -> None:
    onnx.save(model, folder / "model.onnx")
    pipeline.optimize(folder / "model.onnx", folder / "fused.onnx", policy="all", check=False)
    manifest = building.build(folder / "fused.onnx", folder / "fused.engine")
    assert manifest.plugins is not None
    assert manifest.plugins.ops == tuple(sorted(ops))
    engines.check_by_plugins(manifest, folder / "fused.onnx")
    names = [value.name for value in model.graph.output]
    with Engine.load(folder / "fused.engine") as engine:
        got = engine.run(feeds)
    for name, want in zip(names, helpers.run(model, feeds), strict=True):
        np.testing.assert_allclose(got[name].astype(np.float32), want.astype(np.float32), rtol=5e-3, atol=5e-3, err_msg=name)


def model_of(net: helpers.Net, feeds: dict[str, np.ndarray], results: list[str]) -> onnx.ModelProto:
    outputs = [net.op("Identity", result, out=f"y{i}") for i, result in enumerate(results)]
    inputs = [helpers.value(name, list(array.shape), onnx.helper.np_dtype_to_tensor_dtype(array.dtype)) for name, array in feeds.items()]
    return net.model(inputs, outputs)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_engine_with_every_form(dtype: Any, tmp_path: Path) -> None:
    """Halves and neighbours with an angle for each element, and written out; one is of a part of the head."""
    net, feeds = helpers.Net(), test_rope.feeds_of(dtype)
    feeds |= {name: test_rope.random(*test_rope.HALF, seed=i, dtype=dtype) for i, name in enumerate(("half_cos", "half_sin"), 5)}
    feeds["wide"] = test_rope.random(test_rope.B, test_rope.H, test_rope.S, test_rope.R + 4, seed=7, dtype=dtype)
    results = [write(net, "x", "cos", "sin") for write in (test_rope.halves, test_rope.pairs)]
    results += [test_rope.written_out(net, "x", "half_cos", "half_sin", spelled) for spelled in ("halves", "complex")]
    first, rest = (test_rope.piece(net, "wide", *bounds) for bounds in ((0, test_rope.R), (test_rope.R, test_rope.R + 4)))
    results.append(net.op("Concat", test_rope.halves(net, first, "cos", "sin"), rest, axis=-1))
    check(model_of(net, feeds, results), feeds, {"FusedRotary", "FusedRotaryInterleaved", "FusedRotaryPartial"}, tmp_path)


def test_an_engine_of_the_operator(tmp_path: Path) -> None:
    """RotaryEmbedding: with the positions of rows and without, of four axes and of three."""
    net, rows = helpers.Net(23), (test_rope.B, test_rope.S)
    feeds = {"x": test_rope.random(test_rope.B, test_rope.H, test_rope.S, test_rope.R, dtype=np.float16)}
    feeds["flat"] = test_rope.random(*rows, test_rope.H * test_rope.R, seed=1, dtype=np.float16)
    pairs = test_rope.R // 2
    feeds |= {name: test_rope.random(11, pairs, seed=i, dtype=np.float16) for i, name in enumerate(("cos", "sin"), 2)}
    feeds |= {name: test_rope.random(*rows, pairs, seed=i, dtype=np.float16) for i, name in enumerate(("own_cos", "own_sin"), 4)}
    positions = net.const(np.random.default_rng(0).integers(0, 11, rows), np.int64)
    results = [
        test_rope.native(net, "x", "cos", "sin", positions),
        test_rope.native(net, "flat", "own_cos", "own_sin", num_heads=test_rope.H, interleaved=1),
    ]
    check(model_of(net, feeds, results), feeds, {"FusedRotary", "FusedRotaryInterleaved"}, tmp_path)
