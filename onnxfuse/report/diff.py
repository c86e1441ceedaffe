"""What changed between two reports: sites and decisions, latencies, accuracy, machine.

A latency is called faster or slower only where the two 95 % intervals do not touch, and not at all across different GPUs. Disjoint
intervals of two medians are the cautious test: they differ at well below the 5 % level (N. Schenker, J. Gentleman, "On judging the
significance of differences by examining the overlap between confidence intervals", The American Statistician 55(3), 2001).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnxfuse.report import summary

Report = Mapping[str, Any]
Difference = dict[str, Any]

SCHEMA = 2
MACHINE = ("gpu", "driver", "cuda", "tensorrt", "onnxfuse", "onnx", "onnxruntime", "numpy", "python", "system", "commit")
SETTINGS = ("policy", "precision", "gpu")
# Two errors that differ by less are called the same: kernels add in another order from build to build.
ALIKE = 2.0


def between(first: Report, second: Report, names: tuple[str, str] = ("first", "second")) -> Difference:
    """The difference of two reports in today's form, as JSON values; see diff.schema.json. names: what the two are called."""
    found: Difference = {
        "schema": SCHEMA,
        "kind": "diff",
        "onnxfuse": _version(),
        "first": _about(first, names[0]),
        "second": _about(second, names[1]),
        "machine": list(_changed(first.get("machine") or {}, second.get("machine") or {}, MACHINE)),
        "settings": list(_changed(first, second, SETTINGS)),
        "sites": _sites(first, second),
        "latencies": list(_latencies(first, second)),
        "accuracy": list(_accuracy(first, second)),
        "layers": list(_layers(first, second)),
    }
    return {**found, "notes": _notes(found, first, second), "verdict": _verdict(found)}


def _version() -> str:
    from onnxfuse import __version__

    return __version__


def _about(report: Report, name: str) -> dict[str, Any]:
    return {"name": name, "kind": report["kind"], "model": summary.model_name(report), "place": summary.place(report)}


def _changed(first: Mapping[str, Any], second: Mapping[str, Any], keys: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What both say, and say differently; what only one says is no change."""
    for key in keys:
        one, other = (None if holder.get(key) is None else str(holder[key]) for holder in (first, second))
        if one != other and one is not None and other is not None:
            yield {"what": key, "first": one, "second": other}


# -------------------------------------------------------------------------------------------------------------- sites


def _sites(first: Report, second: Report) -> dict[str, Any]:
    """Sites by fusion and output tensor. For a benchmark: the number of sites of each fusion in each row."""
    if "rows" in first or "rows" in second:
        return _sites_of_rows(first, second)
    one, other = ({(str(s["fusion"]), str(s["output"])): s for s in report.get("sites") or ()} for report in (first, second))
    changed = [
        {"fusion": key[0], "output": key[1], "first": _decision(one[key]), "second": _decision(other[key])}
        for key in one
        if key in other and one[key]["decision"] != other[key]["decision"]
    ]
    return {
        "added": [{"fusion": key[0], "output": key[1], "second": _decision(site)} for key, site in other.items() if key not in one],
        "removed": [{"fusion": key[0], "output": key[1], "first": _decision(site)} for key, site in one.items() if key not in other],
        "changed": changed,
        "same": sum(key in other and one[key]["decision"] == other[key]["decision"] for key in one),
    }


def _decision(site: Mapping[str, Any]) -> dict[str, str]:
    return {"decision": str(site["decision"]), "reason": str(site["reason"])}


def _sites_of_rows(first: Report, second: Report) -> dict[str, Any]:
    one, other = _rows(first), _rows(second)
    changed, same = [], 0
    for key in one:
        if key not in other:
            continue
        counts = [row.get("sites") or {} for row in (one[key], other[key])]
        for fusion in dict.fromkeys((*counts[0], *counts[1])):
            numbers = [count.get(fusion, 0) for count in counts]
            same += numbers[0] == numbers[1]
            if numbers[0] != numbers[1]:
                said = [{"decision": f"{number} fused", "reason": ""} for number in numbers]
                changed.append({"fusion": fusion, "output": key, "first": said[0], "second": said[1]})
    return {"added": [], "removed": [], "changed": changed, "same": same}


def _rows(report: Report) -> dict[str, Mapping[str, Any]]:
    return {", ".join(str(row[key]) for key in ("name", "precision", "policy") if row.get(key)): row for row in report.get("rows") or ()}


# ---------------------------------------------------------------------------------------------------------- latencies


def _latencies(first: Report, second: Report) -> Iterator[dict[str, Any]]:
    """Times and ratios by name; those that only one report has are said to be so."""
    alike = _gpu(first) == _gpu(second)
    one, other = dict(_intervals(first)), dict(_intervals(second))
    for key in dict.fromkeys((*one, *other)):
        name, unit = key
        a, b = one.get(key), other.get(key)
        entry = {"name": name, "unit": unit, "first": a, "second": b}
        if a is None or b is None:
            yield {**entry, "verdict": "only in one"}
        elif not alike:
            yield {**entry, "verdict": "another GPU"}
        else:
            yield {
                **entry,
                "verdict": judged(a, b, lower_is_better=unit != "ratio"),
                "change": b["median"] / a["median"] if a["median"] else None,
            }


def judged(first: Mapping[str, float], second: Mapping[str, float], lower_is_better: bool) -> str:
    """ "faster" or "slower" where the intervals do not touch, else "no difference shown". Of a ratio, more is faster."""
    if second["high"] < first["low"]:
        return "faster" if lower_is_better else "slower"
    if second["low"] > first["high"]:
        return "slower" if lower_is_better else "faster"
    return "no difference shown"


def _intervals(report: Report) -> Iterator[tuple[tuple[str, str], dict[str, float]]]:
    timings = report.get("timings") or {}
    for name, interval in (timings.get("engines") or {}).items():
        yield (name, "ms"), _only(interval)
    for name, ratio in (timings.get("ratios") or {}).items():
        yield (f"{name} against {timings['baseline']}", "ratio"), _only(ratio)
    for name, row in _rows(report).items():
        for key, title, unit in (
            ("automatic_ms", "automatic", "ms"),
            ("fused_ms", "fused", "ms"),
            ("ratio", "fused against automatic", "ratio"),
        ):
            if row.get(key):
                yield (f"{name}: {title}", unit), _only(row[key])
    for point in (report.get("roofline") or {}).get("points") or ():
        if "low" in point and "high" in point:
            name = ", ".join(str(point[key]) for key in ("kernel", "dtype", "label", "cache") if point.get(key))
            yield (name, "us"), {"median": point["us"], "low": point["low"], "high": point["high"]}


def _only(interval: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(interval[key]) for key in ("median", "low", "high")}


def _gpu(report: Report) -> str:
    """The GPU of the measurement; a report that names none says nothing against."""
    return str((report.get("machine") or {}).get("gpu") or "")


# ----------------------------------------------------------------------------------------------------------- accuracy


def _accuracy(first: Report, second: Report) -> Iterator[dict[str, Any]]:
    """Outputs, and tensors inside, that changed: in whether they agree, or in their error by more than twice."""
    one, other = dict(_errors(first)), dict(_errors(second))
    for name in one:
        if name in other:
            yield from _compared(name, one[name], other[name])


def _compared(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    entry = {"name": name, "first": _error(a), "second": _error(b)}
    if a["agrees"] != b["agrees"]:
        yield {**entry, "verdict": "now agrees" if b["agrees"] else "no longer agrees"}
        return
    before, after = a.get("max_abs"), b.get("max_abs")
    if before is None or after is None:
        return
    if after > ALIKE * before:
        yield {**entry, "verdict": "larger error"}
    elif before > ALIKE * after:
        yield {**entry, "verdict": "smaller error"}


def _error(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: part.get(key) for key in ("agrees", "max_abs", "cosine")}


def _errors(report: Report) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for title, check in summary.checks(report):
        for output, metrics in check["outputs"].items():
            yield f"output {output} of {title}", metrics
    for tensor in report.get("tensors") or ():
        if tensor.get("agrees") is not None:
            yield f"tensor {tensor['name']}", tensor
    for name, row in _rows(report).items():
        if row.get("agrees") is not None:
            yield f"outputs of {name}", row


# ------------------------------------------------------------------------------------------------------------- layers


def _layers(first: Report, second: Report) -> Iterator[dict[str, Any]]:
    """How many layers each engine has and what they take together."""
    for side in ("automatic", "fused"):
        both = [(report.get("layers") or {}).get(side) for report in (first, second)]
        if all(layers is not None for layers in both):
            counted = [
                {"layers": len(layers), "us": round(sum(layer["us"] for layer in layers), 3)} for layers in both if layers is not None
            ]
            yield {"name": side, "first": counted[0], "second": counted[1]}


# ----------------------------------------------------------------------------------------------------------- in words


def _notes(found: Difference, first: Report, second: Report) -> list[str]:
    notes = []
    if found["first"]["model"] != found["second"]["model"]:
        notes.append(f"the models have different names: {found['first']['model']} and {found['second']['model']}")
    if found["first"]["kind"] != found["second"]["kind"]:
        notes.append(f"a report of {found['first']['kind']} and one of {found['second']['kind']}: only what both hold is compared")
    if _gpu(first) != _gpu(second) and found["latencies"]:
        gpus = " and ".join(_gpu(report) or "none named" for report in (first, second))
        notes.append(f"measured on different GPUs ({gpus}): no latency is called faster or slower")
    for title, report in (("first", first), ("second", second)):
        notes += [f"caution of the {title}: {mark}" for mark in (report.get("timings") or {}).get("marks") or ()]
        marks = dict.fromkeys(mark for row in report.get("rows") or () for mark in row.get("marks") or ())
        notes += [f"caution of the {title}: {mark}" for mark in marks]
    return notes


def _verdict(found: Difference) -> dict[str, Any]:
    """good: False where something became worse, True where only better, None where nothing is shown."""
    speeds = [entry["verdict"] for entry in found["latencies"] if entry["unit"] != "ratio"]
    faster, slower = speeds.count("faster"), speeds.count("slower")
    worse = [entry for entry in found["accuracy"] if entry["verdict"] == "no longer agrees"]
    better = [entry for entry in found["accuracy"] if entry["verdict"] == "now agrees"]
    sites = found["sites"]
    decisions = len(sites["changed"]) + len(sites["added"]) + len(sites["removed"])
    parts = [f"{len(worse)} no longer {'agrees' if len(worse) == 1 else 'agree'}"] if worse else []
    parts += [f"{len(better)} {'agrees' if len(better) == 1 else 'agree'} now"] if better else []
    parts += [f"{count} {word}" for count, word in ((faster, "faster"), (slower, "slower")) if count]
    parts += [f"{decisions} {'decision' if decisions == 1 else 'decisions'} changed"] if decisions else []
    headline = ", ".join(parts) if parts else "No difference that matters"
    good = False if worse or slower else True if faster or better else None
    return {"good": good, "headline": headline[0].upper() + headline[1:]}
