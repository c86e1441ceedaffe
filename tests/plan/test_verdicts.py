"""Verdicts: classes of shapes, outcomes, and the file that ships."""

from __future__ import annotations

import pytest

from onnxfuse.plan import store, verdicts


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("1x128x768", (128, 768)),
        ("1x100x768", (128, 768)),
        ("Bx128x768", (128, 768)),
        ("?", (0, 0)),
        ("", (1, 1)),
        ("768", (1, 768)),
        ("0x8", (0, 8)),
    ],
)
def test_shape_class(shape: str, expected: tuple[int, int]) -> None:
    assert verdicts.shape_class(shape) == expected


def test_shipped_verdicts_are_whole_and_consistent() -> None:
    for verdict in store.shipped():
        for interval in (verdict.automatic_ms, verdict.fused_ms, verdict.ratio):
            assert 0 < interval.low <= interval.median <= interval.high
        assert verdict.ratio.median == pytest.approx(verdict.automatic_ms.median / verdict.fused_ms.median, rel=0.05)
        assert verdict.gpu
        assert verdict.driver
        assert verdict.tensorrt
