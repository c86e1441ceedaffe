"""What the errors mean, in words: the price of a precision, or something wrong. And the rows of `layers` as plain values of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onnxfuse.verify.layers import ALIKE, Inside, Row, Subject
from onnxfuse.verify.metrics import Metrics

_PRECISIONS = {"quantized": "rounding to 8 bits", "tf32": "TF32"}
PIECES = 0.9  # the share of tensors whose pieces ran alone, from which on the pieces can clear the whole of a fault
EXCUSED = "differs from the reference by no more than both differ from float64"


def tensors(inside: Inside) -> list[dict[str, Any]]:
    """One mapping a tensor, in topological order. The plain figures are those of one `subject`: the fused one where it has the tensor."""
    return [_tensor(row, inside) for row in inside.rows]


def _tensor(row: Row, inside: Inside) -> dict[str, Any]:
    subject = _shown(row, inside)
    assert subject is not None  # a row is of a tensor that somebody has
    against = row.against[subject.name]
    origin, node = row.origins[subject.name]
    found: dict[str, Any] = {
        "name": row.name,
        "node": row.node,
        "op": row.op,
        "nodes": list(origin.nodes if origin is not None and origin.nodes else row.nodes),
        "fusion": None if origin is None else origin.fusion,
        "fused_node": None if origin is None else node,
        "dtype": row.kind.dtype,
        "shape": list(row.kind.shape),
        "output": row.is_output,
        "subject": subject.name,
        **_figures(against),
        "agrees": not row.leaves(subject.name),
        "reason": against.reason if row.leaves(subject.name) else "",
        "notes": [*against.remarks, *([EXCUSED] if not against.agrees and row.excused(subject.name) else [])],
        "tap": row.taps[subject.name],
        "layer": subject.layer(row.name) or None,
    }
    if subject.name in row.alone:
        wrong = row.wrong.get(subject.name, "")
        found["alone"] = {**_figures(row.alone[subject.name]), "agrees": not wrong, "reason": wrong}
        if subject.name in row.price:
            found["alone"]["price"] = row.price[subject.name].relative_rms
    for way, metrics in ways(row, inside).items():
        found[way] = {**_figures(metrics), "agrees": metrics.agrees}
    if inside.has_truth:
        found["truth"] = row.truth or "float64"
    return found


def _shown(row: Row, inside: Inside) -> Subject | None:
    """Whose figures of a tensor come first: those of the fused model or engine, else of the first that has it."""
    having = [s for s in inside.subjects if s.name in row.against]
    return next((s for s in having if s.role == "fused"), having[0] if having else None)


def ways(row: Row, inside: Inside) -> dict[str, Metrics]:
    """The errors of one tensor by way of running: against the truth, or against the reference where there is none."""
    names = {s.name: s.role for s in inside.subjects}
    if row.errors:
        return {names.get(name, inside.reference.role): metrics for name, metrics in row.errors.items()}
    return {names[name]: metrics for name, metrics in row.against.items()}


def _figures(metrics: Metrics) -> dict[str, Any]:
    names = ("max_abs", "max_rel", "ulp", "cosine", "relative_rms", "normalised")
    return {name: getattr(metrics, name) for name in names}


# ------------------------------------------------------------------------------------------------------------- in words


def brief(reason: str) -> str:
    """The first of the figures that a reason names."""
    return reason.split("; ", 1)[0]


def where(row: Row, subject: Subject) -> str:
    """A tensor with what produced it: fusion, fused node and source nodes."""
    origin, node = row.origins[subject.name]
    layer = subject.layer(row.name)
    within = f" in layer '{layer}'" if layer else ""
    if origin is None:
        return f"tensor '{row.name}', of node '{row.node}' ({row.op}){within}"
    nodes = origin.nodes or row.nodes
    listed = ", ".join(f"'{name}'" for name in nodes[:6]) + (f" and {len(nodes) - 6} more" if len(nodes) > 6 else "")
    return f"tensor '{row.name}', of fusion {origin.fusion} (node '{node}', from {listed}){within}"


def verdict(inside: Inside, subject: Subject) -> dict[str, Any]:
    """What was found inside of one subject: the first tensor that leaves its tolerance, and the first that is wrong by itself."""
    first, culprit = inside.first(subject.name), inside.culprit(subject.name)
    count = sum(subject.name in row.against for row in inside.rows)
    bad = sum(row.leaves(subject.name) for row in inside.rows)
    excused = sum(row.excused(subject.name) and not row.against[subject.name].agrees for row in inside.rows if subject.name in row.against)
    outputs = not any(row.leaves(subject.name) for row in inside.rows if row.is_output)
    sentences = []
    if first is None:
        sentences.append(f"all {count} tensors agree" if count != 1 else "the tensor agrees")
    else:
        why = brief(first.against[subject.name].reason)
        sentences.append(f"{bad} of {count} tensors leave their tolerance, first {where(first, subject)}: {why}")
    if culprit is not None:
        which = "it is" if culprit is first else f"{where(culprit, subject)} is"
        reason = brief(culprit.wrong[subject.name])
        same = culprit is first and reason == brief(first.against[subject.name].reason)
        sentences.append(f"{which} wrong by itself, with the reference's inputs" + (", too" if same else f": {reason}"))
    elif first is not None and any(subject.name in row.alone for row in inside.rows):
        sentences.append(_blameless(first, subject))
    if excused:
        sentences.append(f"{excused} of them differ from the reference by no more than both differ from float64")
    if first is not None and outputs:
        sentences.append("the outputs agree all the same")
    return {
        "name": subject.name,
        "role": subject.role,
        "compared": count,
        "outside": bad,
        "first": None if first is None else _named(first, subject, first.against[subject.name].reason),
        "wrong": None if culprit is None else _named(culprit, subject, culprit.wrong[subject.name]),
        "sentences": sentences,
    }


def _blameless(first: Row, subject: Subject) -> str:
    """Why a tensor may leave its tolerance though nothing is wrong."""
    price = first.price.get(subject.name)
    if price is not None and not first.alone[subject.name].agrees:
        return f"nothing is wrong by itself: rounding to {subject.limits.name} alone costs {price.relative_rms:.2g} of its norm there"
    return "no piece is wrong by itself: each agrees on the reference's inputs, so errors add up, or one node amplifies them"


def _named(row: Row, subject: Subject, reason: str) -> dict[str, Any]:
    origin, node = row.origins[subject.name]
    nodes = origin.nodes if origin is not None and origin.nodes else row.nodes
    return {
        "tensor": row.name,
        "node": row.node if origin is None else node,
        "fusion": None if origin is None else origin.fusion,
        "nodes": list(nodes),
        "reason": reason,
    }


def summary(inside: Inside, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The findings on all subjects, for the head of a report. notes: what else a reader should know."""
    sources = {name: source.to_dict() for name, source in inside.nonfinite.items()}
    return {
        "subjects": [verdict(inside, subject) for subject in inside.subjects],
        "nonfinite": sources,
        "batches": inside.batches,
        "notes": [*_nonfinite(inside), *inside.notes, *notes],
    }


def _nonfinite(inside: Inside) -> list[str]:
    by_source: dict[tuple[str, str], list[str]] = {}
    for name, source in inside.nonfinite.items():
        by_source.setdefault((source.tensor, source.sentence), []).append(name)
    said = [f"in {' and '.join(names)}: {sentence}" for (_, sentence), names in by_source.items()]
    return [*said, *_same_places(inside)]


def _same_places(inside: Inside) -> list[str]:
    """NaN at the same places is agreement, and worth a word."""
    said = []
    for subject in inside.subjects:
        same = [row for row in inside.rows if subject.name in row.against and row.against[subject.name].nan_equal]
        if same and all(not row.against[subject.name].nan_differ for row in same):
            said.append(f"{subject.name} has NaN at the same places as the reference in {len(same)} tensors, which counts as agreement")
    return said


# --------------------------------------------------------------------------------------------------------- error budget


def error_budget(inside: Inside) -> dict[str, Any]:
    """The outputs against the truth, each way of running beside the other, with a verdict for each output."""
    outputs = [row for row in inside.rows if row.is_output]
    judged = {row.name: _judge(row, inside) for row in outputs}
    refused = dict(list(inside.refused.items())[:20])
    without = [row for row in inside.rows if row.truth]
    return {
        "summary": _summary(judged),
        "truth": {
            "how": "the original in float64, node by node, checked against the reference",
            "tensors": len(inside.rows) - len(without),
            "without": len(without),
            "refused": refused,
            "reasons": list(dict.fromkeys(row.truth for row in without))[:5],
        },
        "figure": "norm(a - t) / norm(t), t being the truth",
        "outputs": {row.name: {way: {**_figures(m), "agrees": m.agrees} for way, m in ways(row, inside).items()} for row in outputs},
        "verdicts": {name: {"kind": kind, "sentence": sentence} for name, (kind, sentence) in judged.items()},
    }


def _summary(judged: Mapping[str, tuple[str, str]]) -> str:
    worst = next((kind for kind in ("wrong", "unknown", "price", "exact") if any(found == kind for found, _ in judged.values())), "exact")
    named = [name for name, (kind, _) in judged.items() if kind == worst]
    if not named:
        return "no output has a truth"
    return f"output '{named[0]}': {judged[named[0]][1]}" + (f" (and {len(named) - 1} more such outputs)" if len(named) > 1 else "")


def _judge(row: Row, inside: Inside) -> tuple[str, str]:
    """(kind, sentence) for one output: exact, price (of a precision), wrong, or unknown."""
    subject = _shown(row, inside)
    if subject is None:
        return "unknown", "nobody else has it"
    against = row.against[subject.name]
    if not row.errors:
        if row.kind.is_float:
            return "unknown", f"no truth: {row.truth}" if row.truth else "no truth was asked for"
        return ("exact", "the same integers") if against.agrees else ("wrong", f"{subject.name}: {against.reason}")
    own, base = row.errors[subject.name], row.errors[inside.reference.name]
    precision = _PRECISIONS.get(subject.limits.name, subject.limits.name)
    if any(math.isinf(m.used) for m in (own, against)) and not against.agrees:
        return "wrong", f"{subject.name}: {against.reason}"
    mine, theirs = own.relative_rms, base.relative_rms
    if mine <= max(2 * theirs, 2.0**-23):
        return "exact", "as near to the truth as onnxruntime"
    other = next((s for s in inside.subjects if s.role == "automatic" and s is not subject and s.name in row.errors), None)
    if other is not None and other.limits.name == subject.limits.name:
        paid = row.errors[other.name].relative_rms
        if mine <= ALIKE * paid:
            each = f"{other.name} errs by {paid:.2g}, {subject.name} by {mine:.2g}, onnxruntime by {theirs:.2g}"
            return "price", f"the price of {precision}: {each}"
        return "wrong", f"{subject.name} errs by {mine:.2g}, {mine / paid:.0f} times as much as {other.name} in the same {precision}"
    if own.agrees or against.agrees:
        word = f"the price of {precision}" if precision != "float32" else "within float32's rounding"
        return "price", f"{word}: {mine:.2g}, onnxruntime errs by {theirs:.2g}"
    return _beyond(inside, subject, f"{mine:.2g} is beyond the limits of {precision}, onnxruntime errs by {theirs:.2g}")


def _beyond(inside: Inside, subject: Subject, figures: str) -> tuple[str, str]:
    """The verdict of an output beyond its limits, with no automatic engine to set it beside: the pieces tell."""
    culprit = inside.culprit(subject.name)
    if culprit is not None:
        return "wrong", f"{figures}: a piece is wrong by itself, see tensor '{culprit.name}'"
    rows = [row for row in inside.rows if subject.name in row.against]
    if sum(subject.name in row.alone for row in rows) < PIECES * len(rows):
        return "unknown", f"{figures}: compare with the automatic engine of the same precision as well"
    if subject.limits.name == "float32":
        return "wrong", figures
    return "price", f"{figures}; no piece is wrong by itself, so rounding adds up or is amplified"
