"""A whole row, with onnxruntime standing in for TensorRT, and with planted faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks import measure, results, table
from benchmarks.suite import Candidate
from onnxfuse import gpus
from onnxfuse.engine.trt import EngineFault
from tests.bench import standin
from tests.bench.standin import Builds, StandIn
from tests.bench.test_benchmarks import MACHINE
from tests.commands.conftest import transformer_tail
from tests.plan import lab


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    builds = standin.install(monkeypatch)
    monkeypatch.setattr(measure.build, "build_reference_fp16flag", builds.build)
    monkeypatch.setattr(gpus, "resolve", lambda name: gpus.GPUS[0])
    monkeypatch.setattr(measure, "_runs_in_fresh_process", lambda *about: (True, ""))
    return builds


def candidate(tmp_path: Path, **changes: Any) -> Candidate:
    onnx.save(transformer_tail(), tmp_path / "tail.onnx")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "feeds.npz", **{name: rng.standard_normal((3, 16, 64)).astype(np.float32) for name in ("x", "r")})
    values = {
        "name": "tail", "model": str(tmp_path / "tail.onnx"), "inputs": str(tmp_path / "feeds.npz"), "dims": {}, "precision": "keep",
        "policy": "all", "samples": 200, "work": str(tmp_path / "work"), "timing_cache": str(tmp_path / "t.cache"),
        "others": ("trt_fp16_flag",),
    }  # fmt: skip
    return Candidate(**{**values, **changes})


def test_a_row_has_the_fields_of_the_results_file(tmp_path: Path, builds: Builds) -> None:
    row = json.loads(json.dumps(measure.measure(candidate(tmp_path)), allow_nan=False))
    assert results.key(row) == ("tail", "keep", "all")
    assert row["automatic_ms"]["median"] == pytest.approx(0.4, rel=1e-3)
    assert row["ratio"]["low"] < 4 / 3 < row["ratio"]["high"]
    assert row["verdict"] == "faster"
    assert set(row["others_ms"]) == {"trt_fp16_flag"}
    assert row["sites"] == {"bias_gelu": 1, "gelu": 1, "skip_layernorm": 1}
    assert row["site_shapes"] == {"bias_gelu": ["batchx16x64"], "gelu": ["batchx16x64"], "skip_layernorm": ["batchx16x64"]}
    assert row["agrees"]
    assert row["max_abs"] == pytest.approx(1e-4, rel=0.1)
    assert row["automatic_max_abs"] == pytest.approx(1e-4, rel=0.1)
    assert row["fresh_process"]
    assert (row["marks"], row["notes"]) == ([], [])
    assert row["inputs"] == {"x": [3, 16, 64], "r": [3, 16, 64]}
    assert row["layer_diff"] == standin.SUMMARY
    text = table.table({"schema": 1, "machine": MACHINE, "rows": [row]})
    assert "| tail | keep, all | 1 bias_gelu, 1 gelu, 1 skip_layernorm | 0.4000 | 0.2999 |" in text


def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: dict[str, float], **changes: Any) -> results.Row:
    monkeypatch.setenv("ONNXFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONNXFUSE_VERDICTS", raising=False)
    work = lab.install(monkeypatch, factors)
    monkeypatch.setattr(measure, "Engine", StandIn)
    monkeypatch.setattr(measure.build, "build_reference_fp16flag", work.builds.build)
    monkeypatch.setattr(measure, "_runs_in_fresh_process", lambda *about: (True, ""))
    values = {"policy": "measure", "samples": 24, "others": (), **changes}
    return json.loads(json.dumps(measure.measure(candidate(tmp_path, **values)), allow_nan=False))


def test_a_row_of_policy_measure_is_the_final_timing_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = searched(tmp_path, monkeypatch, {"SkipLayerNormalization": 0.95, "BiasGelu": 1.05})
    assert results.key(row) == ("tail", "keep", "measure")
    assert row["ratio"]["median"] == pytest.approx(1 / 0.95, rel=1e-3)
    assert row["sites"] == {"gelu": 1, "skip_layernorm": 1}
    assert [(step["stage"], step["group"], step["verdict"]) for step in row["search"]] == [
        ("automatic", "TensorRT alone", "draw"), ("alone", "skip_layernorm 64x64", "won"), ("alone", "bias_gelu 64x64", "lost"),
        ("final", "skip_layernorm 64x64", "won"),
    ]  # fmt: skip
    assert [(of["group"], of["sites"], of["fused"]) for of in row["decisions"]] == [
        ("skip_layernorm 64x64", 1, 1), ("bias_gelu 64x64", 1, 0),
    ]  # fmt: skip
    assert (row["agrees"], row["marks"], row["fresh_process"]) == (True, [], True)


def test_a_row_of_policy_measure_with_nothing_to_win_is_an_honest_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = searched(tmp_path, monkeypatch, {"SkipLayerNormalization": 1.04, "BiasGelu": 1.05})
    assert row["verdict"] == "draw"
    assert row["ratio"]["low"] <= 1 <= row["ratio"]["high"]
    assert row["sites"] == {"gelu": 1}
    assert [of["fused"] for of in row["decisions"]] == [0, 0]


def test_an_earlier_search_leaves_no_engine_to_time_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {"SkipLayerNormalization": 1.04, "BiasGelu": 1.05, "Gelu": 1.0}
    searched(tmp_path, monkeypatch, factors)
    row = searched(tmp_path, monkeypatch, factors, others=("trt_fp16_flag",))
    assert "trt_fp16_flag: the automatic engine of an earlier run is gone" in row["notes"]
    assert row["verdict"] == "draw"


def test_rows_of_one_model_share_its_automatic_engine(tmp_path: Path, builds: Builds) -> None:
    rows = [
        measure.measure(candidate(tmp_path, policy=policy, work=str(tmp_path / policy.replace(":", "-")), others=()))
        for policy in ("all", "only:bias_gelu")
    ]
    assert [name for name, *_ in builds.done] == ["automatic.engine", "fused.engine", "fused.engine"]
    assert rows[1]["sites"] == {"bias_gelu": 1, "gelu": 1}


def test_outputs_that_disagree_are_marked(tmp_path: Path, builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "error", 0.001)
    row = measure.measure(candidate(tmp_path))
    assert not row["agrees"]
    assert row["marks"][0].startswith("outputs disagree: error 0.0011")


def test_an_enqueue_that_fails_is_no_row(tmp_path: Path, builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: StandIn, feeds: object) -> None:
        raise EngineFault("fused: enqueue failed: error 2")

    monkeypatch.setattr(StandIn, "run", failing)
    with pytest.raises(EngineFault, match="enqueue failed"):
        measure.measure(candidate(tmp_path))


def test_an_engine_that_a_fresh_process_cannot_run_is_said_so(tmp_path: Path, builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_runs_in_fresh_process", OWN)
    row = measure.measure(candidate(tmp_path))
    assert row["fresh_process"] is False
    assert row["notes"][0].startswith("fresh process: ")


OWN = measure._runs_in_fresh_process
