"""`compare --layers` with real engines: debug tensors, plugins alone, and a planted fault that is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfuse.commands import compare
from onnxfuse.engine import build as building
from onnxfuse.engine.manifest import Manifest
from onnxfuse.report import json, read
from onnxfuse.verify import reference, taps
from tests.verify import plants

NORM = "l0_attention_norm_out"  # a tensor that a plugin computes


@dataclass(frozen=True)
class Engines:
    original: Path
    fused: Path
    fused_engine: Path
    automatic_engine: Path
    manifest: Manifest
    data: Path


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """One encoder layer in half precision, with plugins and without."""
    folder = tmp_path_factory.mktemp("layers")
    original, fused = plants.fused(plants.encoder(1), folder, "fp16")
    np.savez(folder / "data.npz", **plants.encoder_feeds())
    cache = folder / "timing.cache"
    manifest = building.build(fused, folder / "fused.engine", timing_cache=cache)
    building.build(fused, folder / "automatic.engine", use_plugins=False, timing_cache=cache)
    return Engines(original, fused, folder / "fused.engine", folder / "automatic.engine", manifest, folder / "data.npz")


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_latency", lambda *about: None)
    monkeypatch.setattr(compare, "_by_layer", lambda *about: {})


def compared(engines: Engines, *others: Path, memory: int = 512) -> dict[str, Any]:
    wanted = compare.Wanted(engines.original, others, engines.data, 0, 1, {}, None, None, 2, layers=True, memory=memory)
    report = compare.run(wanted)
    read.check(json.plain(report))
    return report


def test_debug_tensors_have_the_values_of_the_model(engines: Engines) -> None:
    names = ["l0_scores_out", NORM, "l0_down_matmul_out"]
    plugins = engines.manifest.plugins
    assert plugins is not None
    engine = building.in_memory(engines.fused, plugin_ops=plugins.ops, taps=[*names, "y", "absent"])
    assert set(engine.tapped([*names, "absent"])) == set(names)
    feeds = plants.encoder_feeds()
    (want,) = reference.run(engines.original, [feeds], names)
    from onnxfuse.engine.run import cast_feeds

    for chosen in (names, names[:1], names):
        got = engine.tap(cast_feeds(engine.inputs, feeds), chosen)
        assert set(got) == set(chosen)
        for name in chosen:
            assert got[name].dtype == np.float16
            np.testing.assert_allclose(got[name].astype(np.float32), want[name], rtol=2e-2, atol=2e-2)
    # Outputs go on as before.
    (right,) = reference.run(engines.original, [feeds])
    np.testing.assert_allclose(engine.run(cast_feeds(engine.inputs, feeds))["y"].astype(np.float32), right["y"], rtol=2e-2, atol=2e-2)
    engine.close()


def test_a_right_engine_agrees_inside_and_pays_the_price_of_half_precision(engines: Engines) -> None:
    report = compared(engines, engines.automatic_engine, engines.fused_engine)
    assert [s["role"] for s in report["inside"]["subjects"]] == ["automatic", "fused"]
    for said in report["inside"]["subjects"]:
        assert said["wrong"] is None, said
        assert said["first"] is None, said
    assert report["error_budget"]["verdicts"]["y"]["kind"] == "price"
    fused = {row["name"]: row for row in report["tensors"] if "fused" in row}
    assert len(fused) > 1, report["inside"]["notes"]
    assert fused[NORM]["fused"]["agrees"]
    wide = compared(engines, engines.fused_engine)
    rows = {row["name"]: row for row in wide["tensors"]}
    assert rows[NORM]["fusion"] == "skip_layernorm"
    assert rows[NORM]["alone"]["agrees"]
    assert rows["y"]["tap"] == taps.OUTPUT
    assert rows[NORM]["tap"] in (taps.SAME, taps.OTHER)
    narrow = compared(engines, engines.fused_engine, memory=1)
    assert [row["name"] for row in narrow["tensors"]] == list(rows)


def test_a_fused_engine_with_a_wrong_epsilon_is_named(engines: Engines, tmp_path: Path) -> None:
    model = plants.edited(engines.fused)
    plants.wrong_epsilon(model, "skip_layernorm", 0.5)
    onnx.save(model, tmp_path / "planted.onnx")
    building.build(tmp_path / "planted.onnx", tmp_path / "planted.engine")
    report = compared(engines, engines.automatic_engine, tmp_path / "planted.engine")
    assert not report["agrees"]
    said = report["inside"]["subjects"][1]
    assert said["wrong"]["tensor"] == NORM
    assert (said["wrong"]["fusion"], said["wrong"]["node"]) == ("skip_layernorm", "skip_layernorm")
    assert report["error_budget"]["verdicts"]["y"]["kind"] == "wrong"


def test_without_its_model_only_outputs_are_compared(engines: Engines, tmp_path: Path) -> None:
    moved = tmp_path / "moved.engine"
    moved.write_bytes(engines.fused_engine.read_bytes())
    (tmp_path / "moved.engine.json").write_text(
        (engines.fused_engine.parent / "fused.engine.json").read_text().replace("model.fused.onnx", "gone.onnx")
    )
    report = compared(engines, moved)
    assert [row["name"] for row in report["tensors"]] == ["y"]
    assert any("the model that it was built from is not here" in note for note in report["inside"]["notes"])
