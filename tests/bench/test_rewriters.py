"""The comparison of rewriters: its models are sound, a measurement is what it says, and nothing that went wrong looks like a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks import one_rewrite, rewriters, synthetic


def test_the_synthetic_transformer_has_the_nodes_asked_for_and_runs(tmp_path: Path) -> None:
    for nodes in (61, 610):
        model = synthetic.by_nodes(nodes)
        assert len(model.graph.node) == pytest.approx(nodes, rel=0.05)
        onnx.checker.check_model(model, full_check=True)
    feeds = {"hidden_states": np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)}
    (got,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    assert got.shape == (2, 5, 64)
    assert np.isfinite(got).all()
    assert got.std() > 0.1


def test_the_giant_is_a_hole_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    synthetic.by_bytes(path, 64_000_000)
    onnx.checker.check_model(str(path), full_check=True)
    data = (tmp_path / "m.onnx.data").stat()
    assert 64_000_000 <= data.st_size < 100_000_000
    assert data.st_blocks * 512 < data.st_size / 10


def test_a_measurement(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(synthetic.by_nodes(122), path)
    floor, ours = (rewriters.one(tool, path, 120) for tool in (rewriters.FLOOR, rewriters.OURS))
    for row in (floor, ours):
        assert row["seconds"] > 0
        assert row["invalid"] is None
    compute = [node for node in onnx.load(path).graph.node if node.op_type != "Constant"]
    assert ours["nodes"] < floor["nodes"] == len(compute)
    assert list(tmp_path.iterdir()) == [path]


def test_what_went_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> one_rewrite.Rewrite:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    def broken() -> one_rewrite.Rewrite:
        def run(path: Path, out: Path) -> None:
            raise RuntimeError("first\nsecond")

        return run

    monkeypatch.setattr(one_rewrite, "TOOLS", {"a": absent, "b": broken})
    assert one_rewrite.measure("a", tmp_path, tmp_path) == {"missing": "x"}
    assert one_rewrite.measure("b", tmp_path, tmp_path) == {"failed": "RuntimeError: first"}
    onnx.save(synthetic.by_nodes(610), tmp_path / "m.onnx")
    assert rewriters.one(rewriters.OURS, tmp_path / "m.onnx", 0.01) == {"timeout": 0.01}
    assert "failed" in rewriters.one(rewriters.OURS, tmp_path / "absent.onnx", 120)


def test_a_slow_tool_runs_once_and_a_skipped_one_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(synthetic.by_nodes(61), tmp_path / "m.onnx")
    calls: list[str] = []

    def one(tool: str, path: Path, timeout: float) -> dict[str, Any]:
        calls.append(tool)
        return {"timeout": timeout} if tool == "late" else measured(9.0 if tool == "slow" else 1.0)

    monkeypatch.setattr(rewriters, "one", one)
    rows = rewriters.measure("m", tmp_path / "m.onnx", ["quick", "slow", "late", "out"], 3, 60, {"out": "over 60 s at n"})
    assert {tool: calls.count(tool) for tool in ("quick", "slow", "late", "out")} == {"quick": 3, "slow": 1, "late": 1, "out": 0}
    assert [row.get("runs") for row in rows] == [3, 1, None, None]
    assert rows[2]["timeout"] == 60
    assert rows[3]["skipped"] == "over 60 s at n"


def measured(seconds: float, invalid: str | None = None) -> dict[str, Any]:
    return {"seconds": seconds, "cpu_seconds": seconds, "peak_bytes": 200, "nodes": 50, "initializer_bytes": 10, "invalid": invalid}


def test_the_table() -> None:
    def row(model: str, tool: str, **found: Any) -> dict[str, Any]:
        return {"model": model, "nodes_before": 1000, "bytes": 100, "tool": tool, **found}

    real = rewriters.MODELS[0].name
    rows = [
        row(real, rewriters.FLOOR, **measured(2)), row(real, rewriters.OURS, **measured(4)), row(real, "bad", failed="E: a | b"),
        row("nodes-20000", rewriters.FLOOR, **measured(1)), row("nodes-20000", rewriters.OURS, **measured(3, "no | such")),
        row("nodes-20000", "bad", timeout=60.0), row("nodes-20000", "absent", missing="absent"),
    ]  # fmt: skip
    data = {"machine": "cpu", "date": "2026-01-01", "load": [0.5, 1.0], "rounds": 3, "versions": {"a": "1"}, "rows": rows}
    lines = rewriters.table(json.loads(json.dumps(data))).splitlines()
    assert any("load 0.5 before, 1 after" in line for line in lines)
    cells = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("| ")}
    assert "2.00 (2.00 to 2.00) | - / - / 3,000 | 3.000 | - | 1 |" in cells[rewriters.OURS]
    assert "not installed" in cells["absent"]
    assert cells["bad"].endswith("| over 60 | - | 1 |")
    assert f"| {real} (1,000, 0.0) | {rewriters.OURS} | 4.000 | 2.00 | 4,000 | 2.00 | 50 | valid |" in lines
    assert any("| E: a / b | - |" in line for line in lines)
    assert any(line.endswith("| no / such |") for line in lines)


def test_the_tables_are_those_of_the_results() -> None:
    data = json.loads(rewriters.FILE.read_text())
    assert rewriters.FILE.with_suffix(".md").read_text() == rewriters.table(data) + "\n"
    assert {row["model"] for row in data["rows"]} >= {f"nodes-{nodes}" for nodes in rewriters.NODES} | {rewriters.EXTERNAL}
