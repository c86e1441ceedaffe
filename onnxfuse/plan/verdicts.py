"""Verdicts: what was measured, end to end, about a fusion on one GPU and TensorRT version."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from onnxfuse.bench.stats import Interval

# The element type that each --precision leads to; "keep" and fp32 leave what the model has.
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
# A measurement of another GPU or precision is an estimate, and must have won by this much to be followed.
ESTIMATE_MARGIN = 1.05
# Rows of a tensor are classed by the next power of two: times change little within one class.
UNKNOWN_ROWS = 0


@dataclass(frozen=True)
class Verdict:
    """One measurement of one fusion, everything else left to TensorRT.

    model: what was measured. gpu: its name in `onnxfuse.gpus`. width: elements of the last axis; rows: the product of the other
    axes, rounded up to a power of two.
    automatic_ms, fused_ms: latencies of the whole engine; ratio: automatic over fused, so above 1 the fusion wins.
    """

    fusion: str
    model: str
    rows: int
    width: int
    dtype: str
    gpu: str
    driver: str
    tensorrt: str
    automatic_ms: Interval
    fused_ms: Interval
    ratio: Interval

    @property
    def outcome(self) -> str:
        """won, lost, or a draw where the interval covers 1; a draw goes to TensorRT."""
        if self.ratio.low > 1:
            return "won"
        return "lost" if self.ratio.high < 1 else "draw"


def shape_class(shape: str) -> tuple[int, int]:
    """(rows, width) of a site's shape such as "Bx128x768"; symbolic axes count as 1, and an unknown shape is (0, 0)."""
    if shape == "?":
        return UNKNOWN_ROWS, 0
    sizes = [int(size) if size.isdigit() else 1 for size in shape.split("x")] if shape else [1]
    rows = math.prod(sizes[:-1])
    return (1 << (rows - 1).bit_length() if rows > 0 else UNKNOWN_ROWS), sizes[-1]


def shipped() -> tuple[Verdict, ...]:
    """The verdicts measured for this release."""
    text = resources.files("onnxfuse.plan").joinpath("verdicts.json").read_text(encoding="utf-8")
    return tuple(_verdict(entry) for entry in json.loads(text)["verdicts"])


def _verdict(entry: dict[str, object]) -> Verdict:
    intervals = {name: Interval(**entry[name]) for name in ("automatic_ms", "fused_ms", "ratio")}  # type: ignore[arg-type]
    return Verdict(**{**entry, **intervals})  # type: ignore[arg-type]


def nearest(verdicts: Sequence[Verdict], fusion: str, shape: str, dtype: str, gpu: str | None) -> tuple[Verdict, bool] | None:
    """The verdict that says most about a site, and whether it is an estimate: of another GPU or element type.

    Only verdicts of the same width count; among them those of the same GPU and type, then the nearest number of rows.
    """
    rows, width = shape_class(shape)
    candidates = [verdict for verdict in verdicts if verdict.fusion == fusion and verdict.width == width]
    if not candidates:
        return None

    def distance(verdict: Verdict) -> tuple[bool, bool, float]:
        return verdict.gpu != gpu, verdict.dtype != dtype, abs(math.log2(max(verdict.rows, 1)) - math.log2(max(rows, 1)))

    best = min(candidates, key=distance)
    return best, best.gpu != gpu or best.dtype != dtype
