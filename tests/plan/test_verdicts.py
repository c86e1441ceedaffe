"""Verdicts: classes of shapes, outcomes, what counts as measured and what as an estimate, and the file that ships."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onnxfuse.bench.stats import Interval
from onnxfuse.errors import MissingHere
from onnxfuse.plan import store, verdicts
from onnxfuse.plan.sites import Site
from onnxfuse.plan.verdicts import Target, Verdict

H200 = Target("h200", "10.6.0.post1", "580.1")
SITE = Site("skip_layernorm", None, "y", ("add", "norm"), "1x128x768", "float16")


def verdict(low: float = 1.01, high: float = 1.03, **changes: Any) -> Verdict:
    ms = Interval(0.43, 0.42, 0.44)
    like = Verdict(
        "skip_layernorm", "bert", 128, 768, "float16", "h200", "580.1", "10.6.0",
        ms, ms, Interval((low + high) / 2, low, high), "2026-11-30",
    )  # fmt: skip
    return replace(like, **changes)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("1x128x768", (128, 768)),
        ("1x100x768", (128, 768)),
        ("Bx128x768", (0, 768)),
        ("128xB", (128, 0)),
        ("?", (0, 0)),
        ("", (1, 1)),
        ("768", (1, 768)),
        ("0x8", (0, 8)),
    ],
)
def test_shape_class(shape: str, expected: tuple[int, int]) -> None:
    assert verdicts.shape_class(shape) == expected


def test_shipped_verdicts_are_whole_and_consistent() -> None:
    for found in store.shipped():
        assert found.origin == "shipped"
        assert found.ratio.median == pytest.approx(found.automatic_ms.median / found.fused_ms.median, rel=0.05)


@pytest.mark.parametrize(("text", "expected"), [("10.6.0.post1", (10, 6, 0)), ("10.6", (10, 6)), ("11.2.1.2", (11, 2, 1)), ("unknown", ())])
def test_release(text: str, expected: tuple[int, ...]) -> None:
    assert verdicts.release(text) == expected


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [(1.006, 1.01, "won"), (1.002, 1.004, "draw"), (0.99, 1.2, "draw"), (0.99, 1.0, "draw"), (0.9, 0.999, "draw"), (0.9, 0.994, "lost")],
)
def test_outcome(low: float, high: float, outcome: str) -> None:
    """Two builds of one model differ by up to half a percent: less is neither a win nor a loss."""
    assert verdict(low, high).outcome == outcome


def test_what_was_measured_just_here_is_no_estimate() -> None:
    found = verdicts.nearest([verdict()], SITE, H200)
    assert found is not None
    assert (found.estimate, found.other_driver, found.wins) == ((), False, True)
    assert found.reason == "won: 1.020 times as fast [1.010, 1.030] in bert, float16, on h200, TensorRT 10.6.0"


@pytest.mark.parametrize(
    ("change", "target", "dtype", "says"),
    [
        ({"gpu": "l4"}, H200, None, "estimate, from L4 (not h200): won"),
        ({"tensorrt": "10.7.0"}, H200, None, "estimate, from H200 (not TensorRT 10.6.0.post1): won"),
        ({"dtype": "float32"}, H200, None, "estimate, from H200 (not float16): won"),
        ({}, H200, "bfloat16", "estimate, from H200 (not bfloat16): won"),
        ({"rows": 4096}, H200, None, "estimate, from H200 (4096 rows, not 128): won"),
        ({}, Target("h200"), None, "estimate, from H200 (TensorRT's version there is not known): won"),
        ({}, Target(), None, "estimate, from H200 (the GPU is not known, TensorRT's version there is not known): won"),
    ],
)
def test_anything_else_is_an_estimate_that_needs_a_margin(change: dict[str, Any], target: Target, dtype: str | None, says: str) -> None:
    for low, wins in ((1.04, False), (1.05, True)):
        found = verdicts.nearest([verdict(low, 1.2, **change)], SITE, target, dtype)
        assert found is not None
        assert found.reason.startswith(says)
        assert found.wins is wins


def test_another_driver_is_a_measurement_and_said_to_be_one_of_another_driver() -> None:
    found = verdicts.nearest([verdict(driver="570.2")], SITE, H200)
    assert found is not None
    assert (found.estimate, found.wins) == ((), True)
    assert "driver 570.2 (another is here" in found.reason


def test_another_width_variant_or_unknown_shape_says_nothing() -> None:
    assert verdicts.nearest([verdict(width=1024), verdict(variant="erf"), verdict(fusion="other")], SITE, H200) is None
    assert verdicts.nearest([verdict(rows=0, width=0)], replace(SITE, shape="?"), H200) is None
    assert verdicts.nearest([verdict(variant="erf")], replace(SITE, variant="erf"), H200) is not None
    assert verdicts.nearest([verdict()], replace(SITE, variant="erf"), H200) is not None


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"dtype": "float32"}, {"gpu": "l4"}),
        ({"tensorrt": "10.7.0"}, {"dtype": "float32"}),
        ({"rows": 256}, {"tensorrt": "10.7.0"}),
        ({"rows": 256}, {"rows": 4096}),
        ({"driver": "1"}, {"rows": 256}),
        ({"driver": "1"}, {"origin": "shipped"}),
        ({}, {"driver": "1"}),
        ({"gpu": "l4", "tensorrt": "11.0.0"}, {"gpu": "l4", "tensorrt": "10.9.0"}),
        ({"model": "vit", "ratio": Interval(0.99, 0.98, 1.0)}, {}),
        ({"beside": ("linear_epilogue",)}, {}),
        ({}, {"beside": ("linear_epilogue",), "rows": 256}),
    ],
)
def test_what_counts_more(better: dict[str, Any], worse: dict[str, Any]) -> None:
    """GPU, type, TensorRT, rows, measured here, driver, newest TensorRT; where models disagree, the cautious one."""
    for order in ((better, worse), (worse, better)):
        found = verdicts.nearest([verdict(**change) for change in order], SITE, H200)
        assert found is not None
        assert found.verdict == verdict(**better)


def test_what_was_fused_with_it_is_kept_and_said() -> None:
    of = verdict(beside=("dwconv_layernorm", "linear_epilogue"))
    assert Verdict.from_dict(of.to_dict()) == of
    assert "beside" not in verdict().to_dict()  # the form of before, which older versions read
    assert of.key != verdict().key
    found = verdicts.nearest([of], SITE, H200)
    assert found is not None
    assert "[1.010, 1.030] beside dwconv_layernorm and linear_epilogue in bert" in found.reason
    for wrong in ("linear_epilogue", [7], [""]):
        with pytest.raises(ValueError, match="'beside' is not a list of fusions"):
            Verdict.from_dict({**of.to_dict(), "beside": wrong})


def test_the_target_is_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxfuse import gpus
    from onnxfuse.engine import trt

    monkeypatch.setattr(trt, "gpu", lambda: trt.Device("NVIDIA H200", 90, "580.1"))
    monkeypatch.setattr(trt, "version", lambda: "10.6.0")
    assert Target.of(None) == Target("h200", "10.6.0", "580.1")
    assert Target.of(gpus.resolve("h200")) == Target("h200", "10.6.0", "580.1")
    assert Target.of(gpus.resolve("l4")) == Target("l4")

    def absent() -> str:
        raise MissingHere("no TensorRT")

    monkeypatch.setattr(trt, "version", absent)
    assert Target.of(gpus.resolve("h200")) == Target("h200")
    monkeypatch.setattr(trt, "gpu", absent)
    assert Target.of(None) == Target()


def test_a_symbolic_axis_is_an_estimate_until_its_length_is_known() -> None:
    """A model with a free length was measured at one; at an unknown one that is no measurement."""
    free = replace(SITE, shape=SITE.shape.replace("1x", "Bx", 1))
    assert free.shape != SITE.shape
    unknown, known = (verdicts.nearest([verdict()], site, H200) for site in (free, free.sized({"B": 1})))
    assert unknown is not None
    assert known is not None
    assert unknown.estimate
    assert "a known number" in unknown.reason
    assert known.estimate == ()


def test_a_chain_of_open_shape_is_like_another_of_its_form() -> None:
    """The text detector's heights and widths are open: nothing but the form tells its chains from others."""
    site = Site("elementwise", "Mul-Add-Clip", "y", ("mul", "add", "clip"), "?x16x?x?", "float16")
    known = verdict(1.1, 1.2, fusion="elementwise", variant="Mul-Add-Clip", rows=0, width=0)
    found = verdicts.nearest([known], site, H200)
    assert found is not None
    assert found.verdict == known
    assert found.estimate == ("0 rows, not a known number",)
    for other in ({"variant": "Mul-Add"}, {"variant": None}, {"width": 80}, {"fusion": "bias_gelu"}):
        assert verdicts.nearest([replace(known, **other)], site, H200) is None
    open_norm = replace(SITE, shape="?")
    assert verdicts.nearest([verdict(rows=0, width=0)], open_norm, H200) is None
