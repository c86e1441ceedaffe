"""Verdicts: what was measured, end to end, about a fusion on one GPU and TensorRT version. `plan.store` keeps them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from onnxfuse.bench.stats import BUILD_DIFFERENCE, Interval
from onnxfuse.errors import OnnxfuseError
from onnxfuse.plan.sites import Site

if TYPE_CHECKING:
    from onnxfuse.gpus import Gpu

# The element type that each --precision leads to; "keep" and fp32 leave what the model has.
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
# A measurement of another GPU, TensorRT version, element type or shape class is an estimate, and must have won by this much to be followed.
ESTIMATE_MARGIN = 1.05
# Rows of a tensor are classed by the next power of two: times change little within one class.
UNKNOWN_ROWS = 0
# Fusions whose variants are different kernels, each with a verdict of its own. What says a variant of these says more than the width does.
APART = frozenset({"elementwise"})

HERE, SHIPPED = "here", "shipped"


@dataclass(frozen=True)
class Verdict:
    """One measurement of one fusion in one model, everything else left to TensorRT.

    beside: the other fusions that were fused with it, where it was measured in a plan of several alone: it says something of models that
    have sites of all of them. variant: of the fusion, as in `Site`; None where it has none, or where several were measured together.
    model: what was measured. width: elements of the last axis; rows: the product of the other axes, rounded up to a power of two.
    dtype: numpy's name of the element type. gpu: its name in `onnxfuse.gpus`. automatic_ms, fused_ms: latencies of the whole engine;
    ratio: automatic over fused, so above 1 the fusion wins. date: of the measurement, UTC, ISO 8601, to the day or finer. origin: whose
    store holds it; no part of the measurement.
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
    date: str
    variant: str | None = None
    beside: tuple[str, ...] = ()
    origin: str = field(default=HERE, compare=False)

    @property
    def outcome(self) -> str:
        """won or lost, by more than two builds of one model differ by; or a draw, which goes to TensorRT."""
        if self.ratio.low > 1 + BUILD_DIFFERENCE:
            return "won"
        return "lost" if self.ratio.high < 1 - BUILD_DIFFERENCE else "draw"

    @property
    def shape(self) -> tuple[str | None, int, int, str]:
        """Variant, rows, width and element type: what a site must have in common with it."""
        return self.variant, self.rows, self.width, self.dtype

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same of two measurements of which the newer one replaces the older."""
        return self.fusion, *self.shape, self.beside, self.gpu, release(self.tensorrt), self.driver, self.model

    def to_dict(self) -> dict[str, Any]:
        """The form of the stores."""
        entry = asdict(self)
        del entry["origin"]
        return {**entry, "beside": list(self.beside)} if self.beside else {name: entry[name] for name in entry if name != "beside"}

    @classmethod
    def from_dict(cls, entry: Any, origin: str = HERE) -> Verdict:
        """The reverse of to_dict. ValueError says what is wrong with `entry`; fields that a later version adds are left out."""
        if not isinstance(entry, dict):
            raise ValueError("is not an object")
        texts = {name: _text(entry, name) for name in ("fusion", "model", "dtype", "gpu", "driver", "tensorrt", "date")}
        sizes = {name: _size(entry, name) for name in ("rows", "width")}
        intervals = {name: _interval(entry, name) for name in ("automatic_ms", "fused_ms", "ratio")}
        variant = None if entry.get("variant") is None else _text(entry, "variant")
        beside = entry.get("beside", [])
        if not isinstance(beside, list) or not all(isinstance(name, str) and name for name in beside):
            raise ValueError("'beside' is not a list of fusions")
        return cls(**texts, **sizes, **intervals, variant=variant, beside=tuple(beside), origin=origin)  # type: ignore[arg-type]


def _text(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name!r} is not a text")
    return value


def _size(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name!r} is not a size")
    return value


def _interval(entry: dict[str, Any], name: str) -> Interval:
    given = entry.get(name)
    parts = [given.get(part) if isinstance(given, dict) else None for part in ("median", "low", "high")]
    values = [float(part) for part in parts if isinstance(part, (int, float)) and math.isfinite(part) and part > 0]
    if len(values) != len(parts):
        raise ValueError(f"{name!r} is not a median with its interval")
    interval = Interval(*values)
    if not interval.low <= interval.median <= interval.high:
        raise ValueError(f"the median of {name!r} is not within its interval")
    return interval


def shape_class(shape: str) -> tuple[int, int]:
    """(rows, width) of a site's shape such as "4x128x768"; what depends on a symbolic axis, or on nothing known, is 0."""
    *leading, last = shape.split("x") if shape else ["1"]
    rows = math.prod(int(size) for size in leading) if all(size.isdigit() for size in leading) and shape != "?" else UNKNOWN_ROWS
    return (1 << (rows - 1).bit_length() if rows > 0 else UNKNOWN_ROWS), int(last) if last.isdigit() else 0


def release(tensorrt: str) -> tuple[int, ...]:
    """The release of a TensorRT version, comparable: "10.6.0.post1" and "10.6.0" are both (10, 6, 0); the post is of the Python package."""
    numbers = re.match(r"\d+(\.\d+){0,2}", tensorrt)
    return tuple(map(int, numbers.group(0).split("."))) if numbers else ()


@dataclass(frozen=True)
class Target:
    """Where an engine is to run; None is not known. gpu: its name in `onnxfuse.gpus`."""

    gpu: str | None = None
    tensorrt: str | None = None
    driver: str | None = None

    @classmethod
    def of(cls, gpu: Gpu | None) -> Target:
        """`gpu`, with the TensorRT and driver that are here where it is the GPU here; without one, the GPU here if there is any."""
        from onnxfuse import gpus
        from onnxfuse.engine import trt

        try:
            here = gpus.resolve("auto").name
            if gpu is not None and gpu.name != here:
                return cls(gpu.name)
            return cls(here, trt.version(), trt.gpu().driver)
        except OnnxfuseError:
            return cls(None if gpu is None else gpu.name)


@dataclass(frozen=True)
class Evidence:
    """What was measured that says most about a site. estimate: in what it differs from the site and the target; empty where in nothing."""

    verdict: Verdict
    estimate: tuple[str, ...] = ()
    other_driver: bool = False

    @property
    def wins(self) -> bool:
        """An estimate must have won by a margin, and a measurement at all."""
        return self.verdict.ratio.low >= ESTIMATE_MARGIN if self.estimate else self.verdict.outcome == "won"

    @property
    def reason(self) -> str:
        """Where it is from, and what was found."""
        of = self.verdict
        ratio = f"{of.ratio.median:.3f} times as fast [{of.ratio.low:.3f}, {of.ratio.high:.3f}]"
        beside = f" beside {' and '.join(of.beside)}" if of.beside else ""
        said = f"{of.outcome}: {ratio}{beside} in {of.model}, {of.dtype}, on {of.gpu}, TensorRT {of.tensorrt}"
        if self.other_driver:
            said += f", driver {of.driver} (another is here; kernels are TensorRT's and the plugins' own)"
        return f"estimate, from {of.gpu.upper()} ({', '.join(self.estimate)}): {said}" if self.estimate else said


def nearest(verdicts: Sequence[Verdict], site: Site, target: Target, dtype: str | None = None) -> Evidence | None:
    """The verdict that says most about `site` on `target`; None where its fusion was never measured at its width.

    An unknown width is like no other, but for fusions in APART: what has the same form is the same kernel.

    dtype: what the site's element type will be converted to. Another variant or width says nothing. Of the others the best shares, in this
    order, the GPU, the element type, the TensorRT release and the class of rows with the site; then it is one measured here, of this
    driver, of the newest TensorRT. Where models disagree, the most cautious one counts.

    The same GPU and TensorRT release with another driver is a measurement and no estimate: TensorRT's kernels and the plugins' are compiled
    for the GPU ahead of time, and the driver only launches them. It is said in the reason.
    """
    rows, width = shape_class(site.shape)
    wanted = dtype or site.dtype
    variants = (site.variant,) if site.fusion in APART else (None, site.variant)
    fitting = [v for v in verdicts if v.fusion == site.fusion and v.width == width and v.variant in variants]
    if not fitting or not (width or site.fusion in APART):
        return None

    other_gpu = f"not {target.gpu}" if target.gpu else "the GPU is not known"
    other_release = f"not TensorRT {target.tensorrt}" if target.tensorrt else "TensorRT's version there is not known"

    def differences(of: Verdict) -> dict[str, bool]:
        return {
            other_gpu: of.gpu != target.gpu,
            f"not {wanted}": of.dtype != wanted,
            other_release: target.tensorrt is None or release(of.tensorrt) != release(target.tensorrt),
            f"{of.rows} rows, not {rows or 'a known number'}": of.rows != rows or rows == UNKNOWN_ROWS,
        }

    def distance(of: Verdict) -> tuple[Any, ...]:
        far = abs(math.log2(max(of.rows, 1)) - math.log2(max(rows, 1)))
        newest = tuple(-number for number in release(of.tensorrt))
        return *differences(of).values(), far, not of.beside, of.origin != HERE, of.driver != target.driver, newest, of.ratio.low

    best = min(fitting, key=distance)
    estimate = tuple(words for words, differs in differences(best).items() if differs)
    return Evidence(best, estimate, not estimate and best.driver != (target.driver or best.driver))
