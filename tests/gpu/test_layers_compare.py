"""`compare --layers` with real engines: tensors inside as outputs of second engines, plugins alone, and a planted fault that is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfuse.commands import compare
from onnxfuse.engine import build as building
from onnxfuse.engine import trt
from onnxfuse.engine.run import Engine, cast_feeds
from onnxfuse.report import json, read
from onnxfuse.verify import engine_process, reference, taps
from tests.verify import plants

NORM, GELU = "l0_attention_norm_out", "l0_gelu_mul_half_out"  # tensors that plugins compute

pytestmark = pytest.mark.xdist_group("layers")  # with --dist loadgroup one worker builds the engines, once


@dataclass(frozen=True)
class Engines:
    original: Path
    fused: Path
    fused_engine: Path
    automatic_engine: Path
    data: Path
    cache: Path


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """One encoder layer in half precision, with plugins and without."""
    folder = tmp_path_factory.mktemp("layers")
    original, fused = plants.fused(plants.encoder(1), folder, "fp16")
    np.savez(folder / "data.npz", **plants.encoder_feeds())
    cache = folder / "timing.cache"
    building.build(fused, folder / "fused.engine", timing_cache=cache)
    building.build(fused, folder / "automatic.engine", use_plugins=False, timing_cache=cache)
    return Engines(original, fused, folder / "fused.engine", folder / "automatic.engine", folder / "data.npz", cache)


@pytest.fixture(autouse=True, scope="module")
def _untimed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compare, "_latency", lambda *about: None)
        patched.setattr(compare, "_by_layer", lambda *about: {})
        yield


def compared(engines: Engines, *others: Path) -> dict[str, Any]:
    wanted = compare.Wanted(engines.original, others, engines.data, 0, 1, {}, None, None, 2, layers=True)
    report = compare.run(wanted)
    read.check(json.plain(report))
    return report


@pytest.fixture(scope="module")
def sound(engines: Engines, _untimed: None) -> dict[str, Any]:
    """The report of both engines."""
    return compared(engines, engines.automatic_engine, engines.fused_engine)


@pytest.mark.parametrize("plugins", [True, False])
def test_taps_have_the_values_of_the_model(engines: Engines, tmp_path: Path, plugins: bool) -> None:
    """With plugins and without, where all of them are inside of one region of TensorRT's compiler."""
    names = ["l0_scores_out", NORM, "l0_down_matmul_out"]
    order = engine_process.Order(
        str(engines.fused), str(tmp_path / "tapped.engine"), str(tmp_path / "values"), plugins=plugins, taps=[*names, "absent"],
        cache=str(engines.cache),
    )  # fmt: skip
    feeds = plants.encoder_feeds()
    engine_process.run(order, [feeds])
    got = engine_process.read(order.outputs(0, 0))
    (want,) = reference.run(engines.original, [feeds], names)
    assert set(got) == set(names)
    for name in names:
        assert got[name].dtype == np.float16
        np.testing.assert_allclose(got[name].astype(np.float32), want[name], rtol=2e-2, atol=2e-2)
    # Outputs go on as before.
    (right,) = reference.run(engines.original, [feeds])
    with Engine.load(tmp_path / "tapped.engine") as engine:
        assert {spec.name for spec in engine.output_specs} == {*names, "y"}
        outputs = engine.run(cast_feeds(engine.inputs, feeds))
    np.testing.assert_allclose(outputs["y"].astype(np.float32), right["y"], rtol=2e-2, atol=2e-2)


def test_a_right_engine_agrees_inside_and_pays_the_price_of_half_precision(sound: dict[str, Any]) -> None:
    inside = sound["inside"]
    assert [s["role"] for s in inside["subjects"]] == ["automatic", "fused"]
    assert not [note for note in inside["notes"] if "could not be looked into" in note or "cannot be run alone" in note]
    # The second engines were built with the timing cache of the engines, which the manifest names.
    assert len([note for note in inside["notes"] if "built with the timing cache that it was built with" in note]) == 2
    for said in inside["subjects"]:
        assert said["wrong"] is None, said
        assert said["first"] is None, said
    assert sound["error_budget"]["verdicts"]["y"]["kind"] == "price"
    rows = {row["name"]: row for row in sound["tensors"]}
    assert len([row for row in rows.values() if "fused" in row]) > 1, inside["notes"]
    for name, fusion in ((NORM, "skip_layernorm"), (GELU, "linear_epilogue")):
        assert (rows[name]["subject"], rows[name]["fusion"]) == ("fused.engine", fusion)
        assert rows[name]["fused"]["agrees"]
        assert rows[name]["alone"]["agrees"]
        assert rows[name]["tap"] in (taps.SAME, taps.OTHER)
    assert rows["y"]["tap"] == taps.OUTPUT


def test_a_device_with_little_room_has_several_engines(engines: Engines, sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[engine_process.Order] = []
    run = engine_process.run
    monkeypatch.setattr(engine_process, "run", lambda order, feeds, **more: orders.append(order) or run(order, feeds, **more))
    # Half of what the tensors inside need, in two engines or three.
    mine = [row for row in sound["tensors"] if row["subject"] == "fused.engine"]
    tapped = sum(int(np.prod(row["shape"])) * 2 for row in mine if row["tap"] in (taps.SAME, taps.OTHER))
    monkeypatch.setattr(trt, "free_memory", lambda: int(tapped / 2 / taps.SHARE))
    report = compared(engines, engines.fused_engine)
    assert len(orders) > 1
    assert not [note for note in report["inside"]["notes"] if "could not be looked into" in note]
    assert [row["name"] for row in report["tensors"]] == [row["name"] for row in mine]
    assert report["inside"]["subjects"][0]["wrong"] is None


def test_a_fused_engine_with_a_wrong_epsilon_is_named(engines: Engines, tmp_path: Path) -> None:
    """It has no timing cache: its second engine is built at a low optimization level, and that is said."""
    model = plants.edited(engines.fused)
    plants.wrong_epsilon(model, "skip_layernorm", 0.5)
    onnx.save(model, tmp_path / "planted.onnx")
    building.build(tmp_path / "planted.onnx", tmp_path / "planted.engine")
    report = compared(engines, engines.automatic_engine, tmp_path / "planted.engine")
    assert not report["agrees"]
    said = report["inside"]["subjects"][1]
    assert said["wrong"], report["inside"]
    assert said["wrong"]["tensor"] == NORM
    assert (said["wrong"]["fusion"], said["wrong"]["node"]) == ("skip_layernorm", "skip_layernorm")
    assert any(note.startswith("planted.engine: ") and "optimization level" in note for note in report["inside"]["notes"])
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
