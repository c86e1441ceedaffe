"""A whole row, with onnxruntime standing in for TensorRT, and with planted faults."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from benchmarks import measure, results, table
from benchmarks.suite import Candidate
from onnxfuse.bench.timing import Clocks, Timings
from onnxfuse.engine.trt import EngineFault, TensorSpec
from onnxfuse.plan.sites import Site
from tests.bench.test_benchmarks import MACHINE
from tests.engine import models
from tests.engine.test_manifest import example


class StandIn:
    """An engine that onnxruntime runs. The file's name says which fault it has."""

    error = 0.0

    def __init__(self, path: Path) -> None:
        self._session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        self._offset = self.error if path.name == "fused.engine" else 0.0
        self.inputs = tuple(TensorSpec(i.name, "float32", (-1, 5, 64), True, False) for i in self._session.get_inputs())

    @classmethod
    def load(cls, path: Path) -> StandIn:
        return cls(path)

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [o.name for o in self._session.get_outputs()]
        noise = 1e-4 + self._offset
        return {name: value + noise for name, value in zip(names, self._session.run(None, feeds), strict=True)}

    def close(self) -> None:
        pass


def timings(engines: dict[str, Any], feeds: object, samples: int) -> Timings:
    level = {"automatic": 0.4, "fused": 0.3, "trt_fp16_flag": 0.5}
    rng = np.random.default_rng(0)
    taken = {name: list(level[name] * (1 + 0.001 * rng.standard_normal(samples))) for name in engines}
    steady = Clocks(1980, 3201, 50)
    return Timings(taken, dict.fromkeys(taken, 5), dict.fromkeys(taken, True), steady, steady, ())


@pytest.fixture
def candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Candidate:
    model = models.saved(models.block(), tmp_path)
    np.savez(tmp_path / "feeds.npz", **models.feeds())

    def optimized(candidate: Candidate, out: Path, policy: str, feeds: object) -> tuple[Path, list[Site]]:
        shutil.copy(candidate.model, out)
        return out, [] if policy == "none" else [Site("bias_gelu", "erf", "y", ("add", "gelu"), "?x5x64", "float32")]

    def build(model: Path, out: Path, **options: Any) -> Any:
        assert options["shapes"] == ["x:3x5x64"]
        shutil.copy(model, out)
        return dataclasses.replace(example(), build_seconds=1.0)

    monkeypatch.setattr(measure, "_optimized", optimized)
    monkeypatch.setattr(measure, "build", SimpleNamespace(build=build, build_reference_fp16flag=build))
    monkeypatch.setattr(measure, "Engine", StandIn)
    monkeypatch.setattr(measure.timing, "time_placed", timings)
    return Candidate(
        name="block", model=str(model), inputs=str(tmp_path / "feeds.npz"), dims={}, precision="fp16", policy="all", samples=200,
        work=str(tmp_path / "work"), timing_cache=str(tmp_path / "t.cache"), others=("trt_fp16_flag",),
    )  # fmt: skip


def test_a_row_has_the_fields_of_the_results_file(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_runs_in_fresh_process", lambda *a: (True, ""))
    row = json.loads(json.dumps(measure.measure(candidate), allow_nan=False))
    assert results.key(row) == ("block", "fp16", "all")
    assert row["automatic_ms"]["median"] == pytest.approx(0.4, rel=1e-3)
    assert row["ratio"]["low"] < 4 / 3 < row["ratio"]["high"]
    assert row["verdict"] == "faster"
    assert set(row["others_ms"]) == {"trt_fp16_flag"}
    assert row["sites"] == {"bias_gelu": 1}
    assert row["site_shapes"] == {"bias_gelu": ["?x5x64"]}
    assert row["agrees"]
    assert row["max_abs"] == pytest.approx(1e-4, rel=0.1)
    assert row["automatic_max_abs"] == pytest.approx(1e-4, rel=0.1)
    assert row["fresh_process"]
    assert (row["marks"], row["notes"]) == ([], [])
    assert row["inputs"] == {"x": [3, 5, 64]}
    text = table.table({"schema": 1, "machine": MACHINE, "rows": [row]})
    assert "| block | fp16, all | 1 bias_gelu | 0.4000 | 0.2999 |" in text


def test_outputs_that_disagree_are_marked(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_runs_in_fresh_process", lambda *a: (True, ""))
    monkeypatch.setattr(StandIn, "error", 0.001)
    row = measure.measure(candidate)
    assert not row["agrees"]
    assert row["marks"][0].startswith("outputs disagree: error 0.0011")


def test_an_enqueue_that_fails_is_no_row(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: StandIn, feeds: object) -> None:
        raise EngineFault("fused: enqueue failed: error 2")

    monkeypatch.setattr(StandIn, "run", failing)
    with pytest.raises(EngineFault, match="enqueue failed"):
        measure.measure(candidate)


def test_an_engine_that_a_fresh_process_cannot_run_is_said_so(candidate: Candidate) -> None:
    row = measure.measure(candidate)
    assert row["fresh_process"] is False
    assert row["notes"][0].startswith("fresh process: ")
