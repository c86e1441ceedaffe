"""Advice: which fusions still earn their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onnxfuse.bench.stats import Interval
from onnxfuse.plan.advice import advise
from onnxfuse.plan.verdicts import Verdict

RATIOS = {"won": Interval(1.1, 1.05, 1.2), "draw": Interval(1.0, 0.99, 1.01), "lost": Interval(0.9, 0.8, 0.95)}


def verdict(outcome: str, tensorrt: str = "10.6.0", **changes: Any) -> Verdict:
    ms = Interval(1.0, 1.0, 1.0)
    like = Verdict("bias_gelu", "bert", 128, 768, "float16", "h200", "580", tensorrt, ms, ms, RATIOS[outcome], "2026-11-30")
    assert like.outcome == outcome
    return replace(like, **changes)


@pytest.mark.parametrize(
    ("verdicts", "kind", "gpu", "words"),
    [
        ([verdict("won")], "keep", "h200", "wins 1 of 1 on h200 with TensorRT 10.6.0"),
        ([verdict("won"), verdict("lost", rows=1)], "keep", "h200", "wins 1 of 2"),
        ([verdict("lost"), verdict("draw", gpu="l4")], "leave", None, "never won anywhere, in 2 measurements: leave it to TensorRT"),
        (
            [verdict("won"), verdict("draw", "11.0.0")],
            "retire",
            "h200",
            "won on h200 with TensorRT 10.6.0, and nothing any more with 11.0.0",
        ),
        ([verdict("lost", "9.0.0"), verdict("won"), verdict("lost", "11.0.0")], "retire", "h200", "retire it there"),
        ([verdict("won"), verdict("lost", "11.0.0", width=64)], "measure", "h200", "not measured again with 11.0.0: measure them"),
        ([verdict("lost"), verdict("won", "11.0.0")], "keep", "h200", "with TensorRT 11.0.0"),
        ([verdict("won", "10.10.0"), verdict("lost", "10.9.0")], "keep", "h200", "10.10.0"),
    ],
)
def test_one_piece_of_advice(verdicts: list[Verdict], kind: str, gpu: str | None, words: str) -> None:
    (found,) = advise(verdicts, ["bias_gelu"])
    assert (found.fusion, found.kind, found.gpu) == ("bias_gelu", kind, gpu)
    assert words in found.text


def test_each_gpu_has_its_own() -> None:
    found = advise(
        [verdict("won"), verdict("lost", gpu="l4"), verdict("won", fusion="gone"), verdict("lost", fusion="gelu")], ["bias_gelu", "gelu"]
    )
    assert [(one.fusion, one.gpu, one.kind) for one in found] == [
        ("bias_gelu", "h200", "keep"),
        ("bias_gelu", "l4", "leave"),
        ("gelu", None, "leave"),
        ("gone", None, "unknown"),
    ]
    assert "never won on l4, in 1 measurement" in found[1].text
    assert "verdicts forget --fusion gone" in found[3].text


def test_nothing_measured_no_advice() -> None:
    assert advise([], ["bias_gelu"]) == ()
