"""Reports as plain JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.errors import BadInput
from onnxfuse.report import json as reports
from tests.report import sample


def test_values_become_plain() -> None:
    @dataclasses.dataclass
    class Thing:
        path: Path
        numbers: tuple[float, ...]

    thing = Thing(Path("a/b"), (1.5, float("nan"), float("inf")))
    assert reports.plain(thing) == {"path": "a/b", "numbers": [1.5, None, None]}
    assert reports.plain({1: np.float32(0.5), "n": np.int64(3), "s": {"b", "a"}, "x": None}) == {
        "1": 0.5,
        "n": 3,
        "s": ["a", "b"],
        "x": None,
    }


def test_a_comparison_has_its_keys_and_reads_back(tmp_path: Path) -> None:
    report = sample.compare()
    reports.write(report, tmp_path / "report.json")
    back = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert back == report
    assert (back["schema"], back["kind"]) == (2, "compare")
    assert back["agrees"] is True
    metrics = back["others"][0]["check"]["outputs"]["nan"]
    assert metrics["equal_nans"] == 1
    assert {"max_abs", "max_rel", "cosine", "agrees", "reason", "used"} <= set(metrics)
    assert sample.compare(error=1.0)["agrees"] is False


def test_a_hostile_name_is_kept_and_the_file_is_whole(tmp_path: Path) -> None:
    report = sample.optimize(name=sample.HOSTILE + "\udc80")
    reports.write(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["policy"] == "proven"
    with pytest.raises(BadInput, match="cannot write"):
        reports.write(report, tmp_path / "gone" / "report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
