"""How far a tensor is from its reference, in float64, and whether that is near enough.

Three questions are asked of every floating tensor:

1. Do NaN and infinity stand at the same places (infinity with the same sign)? A NaN on one side only is a failure.
2. Does every other element keep |a - b| <= max(atol, of_typical * median|b|) + rtol * |b|, b being the reference?
3. Do the scale-free figures hold: cosine, norm(a - b) / norm(b), and max|a - b| / max|b|? The element rule alone passes any error
   in a tensor whose values are all below atol.

Integers, booleans and strings must be equal.

For tensors inside a model two more things are allowed for. `noise` is an absolute error that is none: what rounding leaves of operands that
cancel out. And a value beyond the largest of the other's type, as in a mask of -3.4e38 that becomes -65504 or -inf in float16, is
saturated, and counted as such, with `saturates`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

CHUNK = 1 << 15  # elements looked at together: their float64 copies stay in the cache
SAMPLE = 1 << 14  # elements whose median magnitude stands for that of all
FEW = 8  # below this many elements a tensor may be small by cancellation alone, and gets FEW_NORMALISED
FEW_NORMALISED = 0.1
REL_FLOOR = 1e-6  # max_rel divides by at least this share of max|b|, so that it does not explode near zero


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What "near enough" means. A field that is None is not asked.

    `of_typical` lets the absolute part grow with a tensor whose median magnitude is above 1, where float32 rounding alone
    exceeds an atol meant for values around 1.
    """

    rtol: float | None = 1e-4
    atol: float | None = 1e-5
    of_typical: float = 0.0
    cosine: float | None = 0.99999
    relative_rms: float | None = 1e-3
    normalised: float | None = 1e-3
    name: str = "float32"

    @property
    def rules(self) -> list[str]:
        """What is asked, in formulas."""
        parts = []
        if self.rtol is not None or self.atol is not None:
            absolute = f"max({self.atol or 0:g}, {self.of_typical:g}*median|b|)" if self.of_typical else f"{self.atol or 0:g}"
            parts.append(f"|a-b| <= {absolute} + {self.rtol or 0:g}*|b| at every place")
        if self.cosine is not None:
            parts.append(f"cosine >= {self.cosine:g}")
        if self.relative_rms is not None:
            parts.append(f"norm(a-b) / norm(b) <= {self.relative_rms:g}")
        if self.normalised is not None:
            parts.append(f"max|a-b| / max|b| <= {self.normalised:g}")
        return parts

    def __str__(self) -> str:
        return ", ".join(self.rules)


@dataclasses.dataclass(frozen=True)
class Metrics:
    """One tensor against its reference (the worst over the feeds, where there are several).

    ulp is the largest error in units in the last place of the coarser of the two types, each taken at |b| or at the median
    magnitude, whichever is larger: a value that happens to be near zero cannot be expected to be nearer to it than its fellows to theirs.

    The figures look at the places where both sides are finite; where there is none although the two differ, as in another shape or type,
    errors are infinite and the cosine is NaN. max_rel divides by at least 1e-6 * max|b|; relative_rms is
    norm(a - b) / norm(b), which shows a wrong scale (the cosine is blind to it); normalised is max|a - b| / max|b|. `used` is the share of
    the tolerance that the worst figure takes: 1 is the limit.
    """

    agrees: bool
    reason: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    relative_rms: float = 0.0
    normalised: float = 0.0
    ulp: float = 0.0
    used: float = 0.0
    outside: int = 0
    nan_equal: int = 0
    nan_differ: int = 0
    inf_equal: int = 0
    inf_differ: int = 0
    saturated: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report; `equal_nans` is the reports' name of `nan_equal`."""
        values = dataclasses.asdict(self)
        return {**values, "shape": list(self.shape), "notes": list(self.remarks), "equal_nans": self.nan_equal}

    @property
    def is_same(self) -> bool:
        """Whether no value differs, be it by a single bit."""
        return self.agrees and not self.max_abs and not self.saturated and not any("compared with" in note for note in self.notes)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and where NaN and infinity agree."""
        places = (("NaN", self.nan_equal), ("infinity", self.inf_equal))
        same = [f"{what} at the same {_count(count)} on both sides" for what, count in places if count]
        beyond = [f"beyond the range of the narrower type at {_count(self.saturated)}"] if self.saturated else []
        return (*self.notes, *same, *beyond)


def measure(
    got: Any, want: Any, tolerance: Tolerance | None = None, *, same_dtype: bool = True, noise: float = 0.0, saturates: bool = False
) -> Metrics:
    """Compare `got` with the reference `want`: arrays or scalars of any dtype, lists of them (ONNX sequences), or None (empty optional).

    With `same_dtype` false, two floating types of different width are compared by value, and a note says so. noise, saturates: see
    above; the figures of the result are those of the values themselves.
    """
    tolerance = tolerance or Tolerance()
    if got is None or want is None:
        same = got is None and want is None
        return Metrics(True) if same else incomparable(f"{_kind(got)} instead of {_kind(want)}")
    if isinstance(want, (list, tuple)) or isinstance(got, (list, tuple)):
        return _measure_sequence(got, want, tolerance, same_dtype)
    got, want = np.asarray(got), np.asarray(want)
    about = {"dtype": want.dtype.name, "shape": want.shape, "elements": int(want.size)}
    if got.shape != want.shape:
        return dataclasses.replace(incomparable(f"shape {list(got.shape)} instead of {list(want.shape)}"), **about)
    notes: tuple[str, ...] = ()
    if got.dtype != want.dtype and not (_is_text(got) and _is_text(want)):
        if same_dtype or not (_is_float(got) and _is_float(want)):
            return dataclasses.replace(incomparable(f"{got.dtype.name} instead of {want.dtype.name}"), **about)
        notes = (f"{got.dtype.name} compared with {want.dtype.name}",)
    if np.iscomplexobj(want):
        got, want = (np.stack([x.real, x.imag]) for x in (got, want))
    if _is_float(want) and _identical(got, want):
        found = Metrics(True, nan_equal=int(np.count_nonzero(np.isnan(want))), inf_equal=int(np.count_nonzero(np.isinf(want))))
    elif _is_float(want):
        found = _measure_floats(got, want, tolerance, noise, saturates)
    else:
        found = _measure_exact(got, want)
    return dataclasses.replace(found, **about, notes=notes)


def agrees(got: Any, want: Any, rtol: float = 1e-4, atol: float = 1e-5) -> bool:
    """Whether `got` is near `want` by the module's three questions, at exactly these tolerances."""
    return measure(got, want, Tolerance(rtol=rtol, atol=atol)).agrees


def worst(metrics: Sequence[Metrics]) -> Metrics:
    """The same tensor over several feeds as one: largest errors, smallest cosine, summed counts, the reason of the worst."""
    if len(metrics) == 1:
        return metrics[0]
    bad = max((m for m in metrics if not m.agrees), key=lambda m: m.used, default=None)
    first = bad or metrics[0]
    return Metrics(
        agrees=bad is None,
        reason=bad.reason if bad else "",
        dtype=first.dtype,
        shape=first.shape,
        elements=sum(m.elements for m in metrics),
        max_abs=max(m.max_abs for m in metrics),
        max_rel=max(m.max_rel for m in metrics),
        cosine=float(np.min([m.cosine for m in metrics])),  # NaN, where one has none, is kept
        relative_rms=max(m.relative_rms for m in metrics),
        normalised=max(m.normalised for m in metrics),
        ulp=max(m.ulp for m in metrics),
        saturated=sum(m.saturated for m in metrics),
        used=max(m.used for m in metrics),
        outside=sum(m.outside for m in metrics),
        nan_equal=sum(m.nan_equal for m in metrics),
        nan_differ=sum(m.nan_differ for m in metrics),
        inf_equal=sum(m.inf_equal for m in metrics),
        inf_differ=sum(m.inf_differ for m in metrics),
        notes=tuple(dict.fromkeys(note for m in metrics for note in m.notes)),
    )


_NO_FIGURES: dict[str, Any] = {
    **dict.fromkeys(("max_abs", "max_rel", "relative_rms", "normalised", "ulp", "used"), float("inf")),
    "cosine": float("nan"),
}  # of what differs and has no two numbers to compare: an error of 0 and a cosine of 1 would say that it does not


def incomparable(reason: str) -> Metrics:
    """What differs in a way that no figure can tell: in kind, shape or type, or because it is not there."""
    return Metrics(False, reason, **_NO_FIGURES)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (an empty optional)"
    return f"a sequence of {len(value)}" if isinstance(value, (list, tuple)) else "a tensor"


def _is_float(array: np.ndarray) -> bool:
    # bfloat16 and the 8-bit floats of ml_dtypes are of kind V, as are its 4-bit integers.
    return array.dtype.kind in "fc" or (array.dtype.kind == "V" and "float" in array.dtype.name)


def _identical(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether two arrays of one shape have the same bits, as most tensors of a rewritten model have."""
    if got.dtype != want.dtype or not want.size:
        return False
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (got, want))
    return bool(np.array_equal(a, b))


def _is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "OUS"


def _measure_sequence(got: Any, want: Any, tolerance: Tolerance, same_dtype: bool) -> Metrics:
    if not (isinstance(want, (list, tuple)) and isinstance(got, (list, tuple))) or len(got) != len(want):
        return incomparable(f"{_kind(got)} instead of {_kind(want)}")
    if not want:
        return Metrics(True, dtype="sequence", shape=(0,))
    parts = [measure(g, w, tolerance, same_dtype=same_dtype) for g, w in zip(got, want, strict=True)]
    bad = next((i for i, part in enumerate(parts) if not part.agrees), None)
    whole = dataclasses.replace(worst(parts), dtype=f"sequence({parts[0].dtype})", shape=(len(want),))
    return whole if bad is None else dataclasses.replace(whole, reason=f"element {bad} of the sequence: {parts[bad].reason}")


def _measure_exact(got: np.ndarray, want: np.ndarray) -> Metrics:
    if _is_text(want):
        different = np.asarray(got.astype(str) != want.astype(str))
        errors = different.astype(np.float64)
    else:
        different = np.asarray(got != want)
        exact = want.dtype.kind in "iu" and want.dtype.itemsize == 8  # int64 differences do not fit float64, nor always int64
        wide = (x.astype(object) if exact and different.any() else x.astype(np.float64) for x in (got[different], want[different]))
        errors = np.array([abs(float(a - b)) for a, b in zip(*wide, strict=True)]) if different.any() else np.zeros(0)
    count = int(np.count_nonzero(different))
    if not count:
        return Metrics(True)
    at = _index(int(np.flatnonzero(different)[0]), want.shape)
    reason = f"{count} of {want.size} values differ, first at {list(at)}: {got[at]!s:.60} instead of {want[at]!s:.60}"
    cosine = 0.0 if _is_text(want) else _cosine(got.astype(np.float64), want.astype(np.float64))
    biggest = 1.0 if _is_text(want) else float(np.max(np.abs(want.astype(np.float64)))) or 1.0
    largest = float(errors.max())
    norm = 0.0 if _is_text(want) else float(np.linalg.norm(want.astype(np.float64)))
    return Metrics(
        False,
        reason,
        max_abs=largest,
        max_rel=largest / biggest,
        cosine=cosine,
        relative_rms=float(np.linalg.norm(errors)) / norm if norm else float("inf"),
        normalised=largest / biggest,
        used=float("inf"),
        outside=count,
    )


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.ravel(), b.ravel()
    top_a, top_b = float(np.max(np.abs(a), initial=0.0)), float(np.max(np.abs(b), initial=0.0))
    if not top_a or not top_b:
        return float(top_a == top_b)
    a, b = a / top_a, b / top_b
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1.0, 1.0))


def _chunks(got: np.ndarray, want: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    got, want = got.ravel(), want.ravel()
    for start in range(0, want.size, CHUNK):
        piece = slice(start, start + CHUNK)
        yield start, got[piece].astype(np.float64), want[piece].astype(np.float64)


@dataclasses.dataclass
class _Sums:
    """What one pass over the chunks gathers."""

    top_got: float = 0.0
    top_want: float = 0.0
    nan_equal: int = 0
    nan_differ: int = 0
    inf_equal: int = 0
    inf_differ: int = 0
    saturated: int = 0
    first_nan: int = -1
    first_inf: int = -1
    clean: bool = True  # nothing but finite values that both types have


def _survey(got: np.ndarray, want: np.ndarray, saturates: bool) -> _Sums:
    """NaN and infinity by position, and the largest finite magnitudes (needed before sums of squares, which could overflow)."""
    sums = _Sums()
    limit = _largest(got.dtype) if saturates and got.dtype != want.dtype else np.inf
    for start, a, b in _chunks(got, want):
        size_a, size_b = np.abs(a), np.abs(b)
        top_a, top_b = float(size_a.max(initial=0.0)), float(size_b.max(initial=0.0))
        if math.isfinite(top_a) and math.isfinite(top_b) and top_b <= limit:  # the usual case: nothing to look for
            sums.top_got, sums.top_want = max(sums.top_got, top_a), max(sums.top_want, top_b)
            continue
        nan_a, nan_b, inf_a, inf_b = np.isnan(a), np.isnan(b), np.isinf(a), np.isinf(b)
        beyond = (size_b > limit) & (size_a >= limit) & (np.sign(a) == np.sign(b))
        lone_nan = nan_a != nan_b
        lone_inf = (inf_a | inf_b) & ~(nan_a | nan_b) & (a != b) & ~beyond
        sums.nan_equal += int(np.count_nonzero(nan_a & nan_b))
        sums.nan_differ += int(np.count_nonzero(lone_nan))
        sums.inf_equal += int(np.count_nonzero(inf_a & inf_b & (a == b)))
        sums.inf_differ += int(np.count_nonzero(lone_inf))
        sums.saturated += int(np.count_nonzero(beyond & (a != b)))
        if sums.first_nan < 0 and lone_nan.any():
            sums.first_nan = start + int(np.argmax(lone_nan))
        if sums.first_inf < 0 and lone_inf.any():
            sums.first_inf = start + int(np.argmax(lone_inf))
        sums.top_got = max(sums.top_got, float(np.max(size_a, initial=0.0, where=np.isfinite(a) & ~beyond)))
        sums.top_want = max(sums.top_want, float(np.max(size_b, initial=0.0, where=np.isfinite(b) & ~beyond)))
    sums.clean = not (sums.nan_equal or sums.nan_differ or sums.inf_equal or sums.inf_differ or sums.saturated)
    return sums


def _largest(dtype: Any) -> float:
    """The largest finite value of a floating type, ml_dtypes' included."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _digits(*dtypes: Any) -> tuple[int, int]:
    """(bits of the significand, exponent of the smallest normal number) of the coarsest of these floating types."""
    import ml_dtypes

    found = [ml_dtypes.finfo(dtype) for dtype in dtypes]  # type: ignore[no-untyped-call]
    return min(int(info.nmant) + 1 for info in found), max(int(info.minexp) for info in found)


def _typical(want: np.ndarray) -> float:
    """Median magnitude of the finite values; of an even sample where there are many. One outlier does not move it."""
    sample = want.ravel()[:: max(1, want.size // SAMPLE)].astype(np.float64)
    sample = np.abs(sample[np.isfinite(sample)])
    return float(np.median(sample)) if sample.size else 0.0


@dataclasses.dataclass
class _Errors:
    """What a second pass over the chunks gathers; sums are of values over the largest ones."""

    dot: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    ee: float = 0.0  # of the errors as they are judged
    raw: float = 0.0  # of the errors as they are
    max_abs: float = 0.0
    max_rel: float = 0.0
    ulp: float = 0.0
    used: float = 0.0
    judged: float = 0.0  # the largest error less the noise
    outside: int = 0
    worst_at: int = -1
    worst_excess: float = -1.0

    @property
    def cosine(self) -> float:
        if not (self.aa and self.bb):
            return float(bool(self.aa) == bool(self.bb))
        return float(np.clip(self.dot / np.sqrt(self.aa * self.bb), -1.0, 1.0))

    def share(self, of: float) -> float:
        """The norm of errors, whose squares sum up to `of`, in the reference's."""
        return float(np.sqrt(of / self.bb)) if self.bb else (0.0 if of == 0 else float("inf"))


def _gather(
    got: np.ndarray, want: np.ndarray, sums: _Sums, typical: float, atol: float, rtol: float, by_element: bool, noise: float
) -> _Errors:
    found = _Errors()
    scale_a, scale_b = sums.top_got or 1.0, sums.top_want or 1.0
    floor = REL_FLOOR * sums.top_want or np.finfo(np.float64).tiny
    bits, smallest = _digits(got.dtype, want.dtype)
    least = max(typical, 2.0**smallest)
    limit_of_type = _largest(got.dtype)
    for start, a, b in _chunks(got, want):
        if not sums.clean:
            finite = np.isfinite(a) & np.isfinite(b)
            if sums.saturated:
                finite &= ~((np.abs(b) > limit_of_type) & (np.abs(a) >= limit_of_type))
            if not finite.any():
                continue
            a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        with np.errstate(over="ignore"):
            error, size = np.abs(a - b), np.abs(b)
        top = float(error.max())
        scaled_a, scaled_b = a / scale_a, b / scale_b
        # Not by BLAS, whose threads cost more than such short sums on a busy machine.
        found.dot += float(np.sum(scaled_a * scaled_b))
        found.aa += float(np.sum(scaled_a * scaled_a))
        found.bb += float(np.sum(scaled_b * scaled_b))
        if not top:
            continue
        found.max_abs = max(found.max_abs, top)
        found.max_rel = max(found.max_rel, float(np.max(error / np.maximum(size, floor))))
        units = np.ldexp(1.0, np.frexp(np.maximum(size, least))[1] - bits)
        found.ulp = max(found.ulp, float(np.max(error / units)))
        found.raw += float(np.sum((error / scale_b) ** 2))
        judged = np.maximum(error - noise, 0.0) if noise else error
        found.judged = max(found.judged, float(judged.max()))
        if by_element:
            with np.errstate(over="ignore"):
                limit = atol + rtol * size
                beyond = judged > limit
                share = np.divide(judged, limit, out=np.where(judged > 0, np.inf, 0.0), where=limit > 0)
            found.outside += int(np.count_nonzero(beyond))
            found.used = max(found.used, float(share.max()))
            if beyond.any() and float((judged - limit).max()) > found.worst_excess:
                found.worst_at, found.worst_excess = start + int(np.argmax(judged - limit)), float((judged - limit).max())
        found.ee += float(np.sum((judged / scale_b) ** 2))
    return found


def _measure_floats(got: np.ndarray, want: np.ndarray, tolerance: Tolerance, noise: float, saturates: bool) -> Metrics:
    sums = _survey(got, want, saturates)
    by_element = tolerance.rtol is not None or tolerance.atol is not None
    rtol = tolerance.rtol or 0.0
    typical = _typical(want)
    atol = max(tolerance.atol or 0.0, tolerance.of_typical * typical)
    found = _gather(got, want, sums, typical, atol, rtol, by_element, noise)
    by_largest = [top / sums.top_want if sums.top_want else (0.0 if top == 0 else float("inf")) for top in (found.max_abs, found.judged)]

    reasons = _places(sums, got, want)
    if found.outside:
        at = _index(found.worst_at, want.shape)
        rule = f"|a-b| <= {atol:.3g} + {rtol:g}*|b|"
        reasons.append(
            f"{found.outside} of {want.size} values outside {rule}, worst at {list(at)}: {_show(got[at])} instead of {_show(want[at])}"
        )
    used = found.used
    # An all-zero reference has no scale: atol alone judges it.
    if sums.top_want or not by_element:
        # What is mostly noise may point anywhere.
        cosine = 1.0 if noise and not found.judged else found.cosine
        share, why = _scale_free(cosine, found.share(found.ee), by_largest[1], int(want.size), tolerance)
        used = max(used, share)
        reasons.extend(why)
    measured = Metrics(
        agrees=not reasons,
        reason="; ".join(reasons),
        max_abs=found.max_abs,
        max_rel=found.max_rel,
        cosine=found.cosine,
        relative_rms=found.share(found.raw),
        normalised=by_largest[0],
        ulp=found.ulp,
        used=float("inf") if sums.nan_differ or sums.inf_differ else used,
        outside=found.outside,
        nan_equal=sums.nan_equal,
        nan_differ=sums.nan_differ,
        inf_equal=sums.inf_equal,
        inf_differ=sums.inf_differ,
        saturated=sums.saturated,
    )
    apart = sums.nan_differ + sums.inf_differ
    nothing_left = apart and apart + sums.nan_equal + sums.inf_equal + sums.saturated == want.size
    return dataclasses.replace(measured, **_NO_FIGURES) if nothing_left else measured


def _places(sums: _Sums, got: np.ndarray, want: np.ndarray) -> list[str]:
    reasons = []
    for what, count, first in (("NaN", sums.nan_differ, sums.first_nan), ("infinity", sums.inf_differ, sums.first_inf)):
        if count:
            at = _index(first, want.shape)
            reasons.append(
                f"{what} on one side only at {_count(count)}, first at {list(at)}: {_show(got[at])} instead of {_show(want[at])}"
            )
    return reasons


def _scale_free(cosine: float, relative_rms: float, normalised: float, size: int, tolerance: Tolerance) -> tuple[float, list[str]]:
    used, reasons = 0.0, []
    if tolerance.cosine is not None and size >= FEW:
        used = max(used, (1.0 - cosine) / (1.0 - tolerance.cosine))
        if cosine < tolerance.cosine:
            reasons.append(f"cosine {cosine:.6f} is below {tolerance.cosine:g}")
    if tolerance.relative_rms is not None and size >= FEW:
        used = max(used, relative_rms / tolerance.relative_rms)
        if relative_rms > tolerance.relative_rms:
            reasons.append(f"the error's norm is {relative_rms:.3g} of the reference's, above {tolerance.relative_rms:g}")
    if tolerance.normalised is not None:
        limit = tolerance.normalised if size >= FEW else max(FEW_NORMALISED, tolerance.normalised)
        used = max(used, normalised / limit)
        if normalised > limit:
            reasons.append(f"largest error is {normalised:.3g} of the largest reference value, above {limit:g}")
    return used, reasons


def _count(places: int) -> str:
    return "1 place" if places == 1 else f"{places} places"


def _show(value: Any) -> str:
    return f"{float(value):.6g}"
