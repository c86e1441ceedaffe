"""How far a tensor is from its reference, in float64, and whether that is near enough.

Three questions are asked of every floating tensor:

1. Do NaN and infinity stand at the same places (infinity with the same sign)? A NaN on one side only is a failure.
2. Does every other element keep |a - b| <= max(atol, of_typical * median|b|) + rtol * |b|, b being the reference?
3. Do the scale-free figures hold: cosine, norm(a - b) / norm(b), and max|a - b| / max|b|? The element rule alone passes any error
   in a tensor whose values are all below atol.

Integers, booleans and strings must be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

CHUNK = 1 << 20  # elements looked at together: bounds the float64 copies to some tens of MB
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

    The figures look at the places where both sides are finite. max_rel divides by at least 1e-6 * max|b|; relative_rms is
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
    used: float = 0.0
    outside: int = 0
    nan_equal: int = 0
    nan_differ: int = 0
    inf_equal: int = 0
    inf_differ: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report; `equal_nans` is the reports' name of `nan_equal`."""
        values = dataclasses.asdict(self)
        return {**values, "shape": list(self.shape), "notes": list(self.remarks), "equal_nans": self.nan_equal}

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and where NaN and infinity agree."""
        places = (("NaN", self.nan_equal), ("infinity", self.inf_equal))
        return (*self.notes, *(f"{what} at the same {_count(count)} on both sides" for what, count in places if count))


def measure(got: Any, want: Any, tolerance: Tolerance | None = None, *, same_dtype: bool = True) -> Metrics:
    """Compare `got` with the reference `want`: arrays or scalars of any dtype, lists of them (ONNX sequences), or None (empty optional).

    With `same_dtype` false, two floating types of different width are compared by value, and a note says so.
    """
    tolerance = tolerance or Tolerance()
    if got is None or want is None:
        same = got is None and want is None
        return Metrics(same, "" if same else f"{_kind(got)} instead of {_kind(want)}")
    if isinstance(want, (list, tuple)) or isinstance(got, (list, tuple)):
        return _measure_sequence(got, want, tolerance, same_dtype)
    got, want = np.asarray(got), np.asarray(want)
    about = {"dtype": want.dtype.name, "shape": want.shape, "elements": int(want.size)}
    if got.shape != want.shape:
        return Metrics(False, f"shape {list(got.shape)} instead of {list(want.shape)}", **about)
    notes: tuple[str, ...] = ()
    if got.dtype != want.dtype and not (_is_text(got) and _is_text(want)):
        if same_dtype or not (_is_float(got) and _is_float(want)):
            return Metrics(False, f"{got.dtype.name} instead of {want.dtype.name}", **about)
        notes = (f"{got.dtype.name} compared with {want.dtype.name}",)
    if np.iscomplexobj(want):
        got, want = (np.stack([x.real, x.imag]) for x in (got, want))
    found = _measure_floats(got, want, tolerance) if _is_float(want) else _measure_exact(got, want)
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
        cosine=min(m.cosine for m in metrics),
        relative_rms=max(m.relative_rms for m in metrics),
        normalised=max(m.normalised for m in metrics),
        used=max(m.used for m in metrics),
        outside=sum(m.outside for m in metrics),
        nan_equal=sum(m.nan_equal for m in metrics),
        nan_differ=sum(m.nan_differ for m in metrics),
        inf_equal=sum(m.inf_equal for m in metrics),
        inf_differ=sum(m.inf_differ for m in metrics),
        notes=tuple(dict.fromkeys(note for m in metrics for note in m.notes)),
    )


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (an empty optional)"
    return f"a sequence of {len(value)}" if isinstance(value, (list, tuple)) else "a tensor"


def _is_float(array: np.ndarray) -> bool:
    # bfloat16 and the 8-bit floats of ml_dtypes are of kind V, as are its 4-bit integers.
    return array.dtype.kind in "fc" or (array.dtype.kind == "V" and "float" in array.dtype.name)


def _is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "OUS"


def _measure_sequence(got: Any, want: Any, tolerance: Tolerance, same_dtype: bool) -> Metrics:
    if not (isinstance(want, (list, tuple)) and isinstance(got, (list, tuple))) or len(got) != len(want):
        return Metrics(False, f"{_kind(got)} instead of {_kind(want)}")
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
    return Metrics(
        False,
        reason,
        max_abs=largest,
        max_rel=largest / biggest,
        cosine=cosine,
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
    first_nan: int = -1
    first_inf: int = -1


def _survey(got: np.ndarray, want: np.ndarray) -> _Sums:
    """NaN and infinity by position, and the largest finite magnitudes (needed before sums of squares, which could overflow)."""
    sums = _Sums()
    for start, a, b in _chunks(got, want):
        nan_a, nan_b, inf_a, inf_b = np.isnan(a), np.isnan(b), np.isinf(a), np.isinf(b)
        lone_nan = nan_a != nan_b
        lone_inf = (inf_a | inf_b) & ~(nan_a | nan_b) & (a != b)
        sums.nan_equal += int(np.count_nonzero(nan_a & nan_b))
        sums.nan_differ += int(np.count_nonzero(lone_nan))
        sums.inf_equal += int(np.count_nonzero(inf_a & inf_b & (a == b)))
        sums.inf_differ += int(np.count_nonzero(lone_inf))
        if sums.first_nan < 0 and lone_nan.any():
            sums.first_nan = start + int(np.argmax(lone_nan))
        if sums.first_inf < 0 and lone_inf.any():
            sums.first_inf = start + int(np.argmax(lone_inf))
        sums.top_got = max(sums.top_got, float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a))))
        sums.top_want = max(sums.top_want, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
    return sums


def _typical(want: np.ndarray) -> float:
    """Median magnitude of the finite values; of an even sample where there are more than CHUNK. One outlier does not move it."""
    sample = want.ravel()[:: max(1, want.size // CHUNK)].astype(np.float64)
    sample = np.abs(sample[np.isfinite(sample)])
    return float(np.median(sample)) if sample.size else 0.0


def _measure_floats(got: np.ndarray, want: np.ndarray, tolerance: Tolerance) -> Metrics:
    sums = _survey(got, want)
    by_element = tolerance.rtol is not None or tolerance.atol is not None
    rtol = tolerance.rtol or 0.0
    atol = tolerance.atol or 0.0
    if tolerance.of_typical:
        atol = max(atol, tolerance.of_typical * _typical(want))
    scale_a, scale_b = sums.top_got or 1.0, sums.top_want or 1.0
    floor = REL_FLOOR * sums.top_want or np.finfo(np.float64).tiny
    dot = aa = bb = ee = max_abs = max_rel = used = 0.0
    outside, worst_at, worst_excess = 0, -1, -1.0
    for start, a, b in _chunks(got, want):
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.any():
            continue
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        with np.errstate(over="ignore"):
            error, limit = np.abs(a - b), atol + rtol * np.abs(b)
            max_rel = max(max_rel, float(np.max(error / np.maximum(np.abs(b), floor))))
        max_abs = max(max_abs, float(error.max()))
        if by_element:
            beyond = error > limit
            outside += int(np.count_nonzero(beyond))
            share = np.divide(error, limit, out=np.where(error > 0, np.inf, 0.0), where=limit > 0)
            used = max(used, float(share.max()))
            if beyond.any() and float((error - limit).max()) > worst_excess:
                worst_at, worst_excess = start + int(np.argmax(error - limit)), float((error - limit).max())
        error /= scale_b
        a, b = a / scale_a, b / scale_b
        ee += float(error @ error)
        dot, aa, bb = dot + float(a @ b), aa + float(a @ a), bb + float(b @ b)
    cosine = float(np.clip(dot / np.sqrt(aa * bb), -1.0, 1.0)) if aa and bb else float(bool(aa) == bool(bb))
    relative_rms = float(np.sqrt(ee / bb)) if bb else (0.0 if ee == 0 else float("inf"))
    normalised = max_abs / sums.top_want if sums.top_want else (0.0 if max_abs == 0 else float("inf"))

    reasons = _places(sums, got, want)
    if outside:
        at = _index(worst_at, want.shape)
        rule = f"|a-b| <= {atol:.3g} + {rtol:g}*|b|"
        reasons.append(
            f"{outside} of {want.size} values outside {rule}, worst at {list(at)}: {_show(got[at])} instead of {_show(want[at])}"
        )
    # An all-zero reference has no scale: atol alone judges it.
    if sums.top_want or not by_element:
        share, why = _scale_free(cosine, relative_rms, normalised, int(want.size), tolerance)
        used = max(used, share)
        reasons.extend(why)
    return Metrics(
        agrees=not reasons,
        reason="; ".join(reasons),
        max_abs=max_abs,
        max_rel=max_rel,
        cosine=cosine,
        relative_rms=relative_rms,
        normalised=normalised,
        used=float("inf") if sums.nan_differ or sums.inf_differ else used,
        outside=outside,
        nan_equal=sums.nan_equal,
        nan_differ=sums.nan_differ,
        inf_equal=sums.inf_equal,
        inf_differ=sums.inf_differ,
    )


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
