"""Reports on the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from onnxfuse.errors import BadInput
from onnxfuse.report import html, read, summary, terminal
from tests.report import sample


def shown(report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    terminal.show(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_optimize_shows_sites_misses_and_outputs() -> None:
    text = shown(sample.optimize())
    assert text.startswith("✓ y.onnx: 3 sites fused, 1 kept as it was; the outputs agree")
    for words in ("layernorm", "bias_gelu", "no verdict y", "constant is y", "NaN at the same 1 place", "note: a note on y"):
        assert words in text


def test_what_stays_in_float32_is_said_by_operator() -> None:
    report = sample.optimize()
    kept = [("a", "Conv", "no bf16"), ("b", "Conv", "no bf16"), ("c", "Cos", "angles"), ("d", "Exp", "range"), ("e", "Log", "range")]
    report["converted"] = {"half_nodes": 9, "float_nodes": kept, "casts": 4, "precision": "bf16"}
    text = " ".join(shown(report).split())
    assert "9 nodes in bf16, 5 in float32: 2 Conv (no bf16), 1 Cos (angles), 1 Exp (range), 1 more; 4 casts between them." in text
    report["converted"] = {**report["converted"], "float_nodes": [], "casts": 1}
    assert "precision: 9 nodes in bf16, none in float32; 1 cast between them." in " ".join(shown(report).split())


def test_what_would_be_done_is_not_called_done() -> None:
    """`explain` writes nothing, and checks nothing."""
    report = sample.optimize()
    del report["check"]
    text = shown({**report, "out": None})
    assert text.startswith("· y.onnx: 3 sites would be fused, 1 left\n")
    assert "not checked" not in text
    assert "The outputs were not checked." in shown(report)


def test_a_site_that_is_fused_on_an_estimate_says_so() -> None:
    report = sample.optimize()
    assert "canonical" not in shown(report)
    report["sites"][0]["reason"] = "estimate, from H200 (not l4): won: 1.110 times as fast"
    assert "estimate, from H200 (not l4): won: 1.110 times as fast" in " ".join(shown(report).split())


def test_disagreement_is_first_and_says_why() -> None:
    text = shown(sample.compare(1.0))
    assert text.startswith("✗ y.onnx: 3 of 3 do not agree")
    assert "1 of 3 outputs differs from onnxruntime, optimizations off: y. 1 of 32 values outside" in text
    assert "draw, 1.000× [0.970, 1.030]" in text
    assert "caution: y is busy" in text


def test_hostile_names_print_as_text() -> None:
    for report in (sample.optimize(1.0, sample.HOSTILE), sample.compare(1.0, sample.HOSTILE)):
        text = shown(report)
        assert "\x1b" not in text
        assert "[bold]" in text


def test_parts_that_a_report_need_not_have_are_not_missed() -> None:
    report = sample.optimize()
    for metrics in report["check"]["outputs"].values():
        del metrics["used"]
    read.check(report)
    assert "outputs agree" in shown(report)
    assert "outputs agree" in html.page(report)
    report["check"]["tolerance"]["rules"] = None
    with pytest.raises(BadInput, match=r"check\.tolerance\.rules: None is not of type 'array'"):
        read.check(report)


def test_figures() -> None:
    assert [summary.figure(v) for v in (None, 0.0, 1.5, 1e-9, float("inf"))] == ["–", "0", "1.5", "1e-09", "–"]
    assert summary.cosine(1.0) == "1"
    assert summary.cosine(1 - 1e-9) == "1 − 1.0e-09"
    assert summary.cosine(0.5) == "0.500000"
    assert [summary.percent(v) for v in (None, 0, 0.5, 1e-5, 8.314, 42.0)] == ["–", "0 %", "50 %", "under 0.1 %", "831 %", "42 times"]
