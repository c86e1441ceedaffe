"""Verdicts are made from rows that measured one fusion alone, and from no others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import verdicts
from onnxfuse.bench.stats import Interval


def row(policy: str, **changes: Any) -> dict[str, Any]:
    interval = {"median": 1.1, "low": 1.05, "high": 1.2}
    return {
        "name": "bert", "precision": "fp16", "policy": policy, "automatic_ms": interval, "fused_ms": interval, "ratio": interval,
        "site_shapes": {"skip_layernorm": ["1x128x768", "1x100x768", "1x1x768"], "gelu": ["1x128x3072"]}, "agrees": True, "marks": [],
        "measured": {"driver": "580.1", "date": "2026-11-30"},
    } | changes  # fmt: skip


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "machine": {"gpu": "NVIDIA H200", "tensorrt": "10.6.0"}, "rows": list(rows)}


def test_one_verdict_for_each_class_of_shapes() -> None:
    found = list(verdicts.verdicts(results(row("only:skip_layernorm"))))
    assert [(v.fusion, v.rows, v.width, v.dtype, v.gpu, v.driver) for v in found] == [
        ("skip_layernorm", 1, 768, "float16", "h200", "580.1"),
        ("skip_layernorm", 128, 768, "float16", "h200", "580.1"),
    ]
    assert found[0].ratio == Interval(1.1, 1.05, 1.2)


def test_what_a_search_found_is_taken_as_it_is() -> None:
    (alone,) = verdicts.verdicts(results(row("only:skip_layernorm", site_shapes={"skip_layernorm": ["1x64x768"]})))
    found = replace(alone, variant="erf", date="2026-12-01T10:00:00Z")
    searched = row("measure", verdicts=[found.to_dict()], marks=["the final plan's clock moved"])
    assert list(verdicts.verdicts(results(searched))) == [found]
    assert not list(verdicts.verdicts(results({**searched, "failed": "crashed"})))


@pytest.mark.parametrize(
    "other",
    [
        row("all"),
        row("only:skip_layernorm", marks=["clock moved"]),
        row("only:skip_layernorm", agrees=False),
        row("only:skip_layernorm", failed="no"),
    ],
)
def test_rows_that_prove_nothing_give_none(other: dict[str, Any]) -> None:
    assert not list(verdicts.verdicts(results(other)))


def chain(**changes: Any) -> dict[str, Any]:
    interval = {"median": 1.1, "low": 1.06, "high": 1.2}
    return {
        "name": "det Mul-Add, model", "model": "det", "form": "Mul-Add", "site": "1x16x8x8", "precision": "fp16", "policy": "chain",
        "automatic_ms": interval, "fused_ms": interval, "ratio": interval, "agrees": True, "marks": [],
    } | changes  # fmt: skip


def timed_alone(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "machine": {"gpu": "NVIDIA H200", "driver": "580.1", "tensorrt": "10.6.0.post1", "date": "2026-12-01"},
        "rows": list(rows),
    }


def test_a_chain_alone_is_a_verdict_of_its_form() -> None:
    (found,) = verdicts.chains(timed_alone(chain()))
    assert (found.fusion, found.variant, found.model, found.rows, found.width, found.dtype, found.gpu, found.driver, found.outcome) == (
        "elementwise", "Mul-Add", "det (the chain alone)", 128, 8, "float16", "h200", "580.1", "won",
    )  # fmt: skip
    (open_,) = verdicts.chains(timed_alone(chain(site="1x16x?x?")))
    assert (open_.rows, open_.width) == (0, 0)


@pytest.mark.parametrize(
    "other", [chain(site=None), chain(marks=["clock moved"]), chain(agrees=False), chain(ratio={"median": 1.04, "low": 1.03, "high": 1.05})]
)
def test_chains_that_prove_nothing_give_none(other: dict[str, Any]) -> None:
    """At another size than in the model; marked; wrong; won by so little that it may lose in a model."""
    assert not list(verdicts.chains(timed_alone(other)))


def test_of_chains_of_one_form_the_most_cautious_counts() -> None:
    lost = {"median": 0.9, "low": 0.89, "high": 0.91}
    for rows in ([chain(), chain(ratio=lost)], [chain(ratio=lost), chain()]):
        (found,) = verdicts.chains(timed_alone(*rows))
        assert found.outcome == "lost"


def test_a_file_of_chains_is_read(tmp_path: Path) -> None:
    (tmp_path / "h200-elementwise-engines.json").write_text(json.dumps(timed_alone(chain())))
    (found,) = json.loads(verdicts.text(tmp_path))["verdicts"]
    assert found["variant"] == "Mul-Add"


def test_what_ships_is_what_was_measured() -> None:
    assert json.loads(verdicts.FILE.read_text()) == json.loads(verdicts.text())


def test_no_results_no_verdicts(tmp_path: Path) -> None:
    assert json.loads(verdicts.text(tmp_path)) == {"schema": 1, "verdicts": []}
