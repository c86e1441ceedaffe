"""What a report says first, in words; the terminal and the page say the same."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnxfuse.report import axes

Report = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """good: True agrees, False does not, None was not checked."""

    good: bool | None
    headline: str
    sentences: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Bar:
    """One engine's latency in ms, and the baseline's over it."""

    name: str
    median: float
    low: float
    high: float
    ratio: Mapping[str, float] | None
    verdict: str  # "faster", "slower", "draw", or "baseline"

    @property
    def said(self) -> str:
        return axes.interval(self.ratio) if self.ratio else ""


@dataclasses.dataclass(frozen=True)
class Group:
    """The sites of one fusion."""

    fusion: str
    sites: tuple[Mapping[str, Any], ...]

    @property
    def fused(self) -> int:
        return sum(site["decision"] == "fused" for site in self.sites)

    @property
    def kept(self) -> int:
        return len(self.sites) - self.fused

    @property
    def reason(self) -> str:
        """The reason that all sites share; empty where they differ."""
        reasons = {str(site["reason"]) for site in self.sites}
        return reasons.pop() if len(reasons) == 1 else ""


def model_name(report: Report) -> str:
    """The model's name."""
    model = report.get("model") or {}
    return str(model.get("name") or "model")


def verdict(report: Report) -> Verdict:
    """The answer first."""
    if report["kind"] == "benchmark":
        return _benchmark_verdict(report)
    return _compare_verdict(report) if "others" in report else _optimize_verdict(report)


def _benchmark_verdict(report: Report) -> Verdict:
    rows = report.get("rows") or []
    if not rows:
        points = (report.get("roofline") or {}).get("points") or []
        shares = [point["share_of_copy"] for point in points if point.get("share_of_copy")]
        said = [f"The best reaches {percent(max(shares))} of a copy's bandwidth."] if shares else []
        return Verdict(None, f"{_many(len(points), 'kernel')} measured alone", tuple(said))
    counts = {word: sum(row.get("verdict") == word for row in rows) for word in ("faster", "draw", "slower")}
    failed = sum("failed" in row for row in rows)
    words = [
        f"{counts['faster']} faster",
        _many(counts["draw"], "draw"),
        f"{counts['slower']} slower",
        *([f"{failed} failed"] if failed else []),
    ]
    wrong = [str(row["name"]) for row in rows if row.get("agrees") is False]
    sentences = []
    best = max(
        (row for row in rows if row.get("verdict") == "faster" and row.get("ratio")),
        key=lambda row: float(row["ratio"]["median"]),
        default=None,
    )
    worst = min(
        (row for row in rows if row.get("verdict") == "slower" and row.get("ratio")),
        key=lambda row: float(row["ratio"]["median"]),
        default=None,
    )
    for row, what in ((best, "most gained"), (worst, "most lost")):
        if row is not None:
            sentences.append(f"The {what}: {row['name']}, {row['precision']}, {row.get('policy', '')}: {axes.interval(row['ratio'])}.")
    if wrong:
        sentences.append(f"Outputs that do not agree: {_listed(wrong)}.")
    return Verdict(False if wrong else None, f"Against TensorRT alone: {', '.join(words)}", tuple(sentences))


def _compare_verdict(report: Report) -> Verdict:
    others = report["others"]
    bad = [other for other in others if not other["check"]["agrees"]]
    sentences = [_agreement(other["check"], str(other["name"])) for other in others]
    for bar in bars(report):
        if bar.verdict == "draw":
            sentences.append(f"{bar.name} and {report['timings']['baseline']} take the same time, as far as can be measured ({bar.said}).")
        elif bar.verdict in ("faster", "slower"):
            sentences.append(f"{bar.name} is {bar.verdict} than {report['timings']['baseline']}: {bar.said}.")
    if not bad:
        return Verdict(True, "The outputs agree", tuple(sentences))
    does = "does" if len(bad) == 1 else "do"
    where = f"{len(bad)} of {len(others)} {does} not agree" if len(others) > 1 else "The outputs do not agree"
    return Verdict(False, where, tuple(sentences))


def _optimize_verdict(report: Report) -> Verdict:
    sites = report.get("sites") or []
    fused = sum(site["decision"] == "fused" for site in sites)
    kept = len(sites) - fused
    asked = report.get("out", "") is None  # `explain` asks, and writes nothing
    counts = f"{_many(fused, 'site')} {'would be fused' if asked else 'fused'}"
    if kept:
        counts += f", {kept} left" if asked else f", {kept} kept as {'it was' if kept == 1 else 'they were'}"
    check = report.get("check")
    if not check:
        return Verdict(None, counts, () if asked else ("The outputs were not checked.",))
    good = bool(check["agrees"])
    sentences = [_agreement(check, "")]
    timed = [bar for bar in bars(report) if bar.ratio]
    sentences += [f"{bar.name} against {report['timings']['baseline']}: {bar.verdict}, {bar.said}." for bar in timed]
    return Verdict(good, f"{counts}; the outputs {'agree' if good else 'do not agree'}", tuple(sentences))


def _agreement(check: Mapping[str, Any], name: str) -> str:
    outputs = check["outputs"]
    bad = [output for output, metrics in outputs.items() if not metrics["agrees"]]
    start = f"{name}: " if name else ""
    if bad:
        source = check["reference"] or "the reference"
        differ = f"{len(bad)} of {_many(len(outputs), 'output')} {'differs' if len(bad) == 1 else 'differ'} from {source}"
        return f"{start}{differ}: {_listed(bad)}. {_sentence(outputs[bad[0]]['reason'])}"
    worst = max((metrics.get("used") or 0.0 for metrics in outputs.values()), default=0.0)
    agree = f"all {len(outputs)} outputs agree" if len(outputs) != 1 else "the output agrees"
    text = f"{start}{agree} with {check['reference'] or 'the reference'}, at {percent(worst)} of the tolerance."
    return text if name else _sentence(text, end="")


def bars(report: Report) -> list[Bar]:
    """Latencies, the baseline first."""
    timings = report.get("timings")
    if not timings:
        return []
    found = []
    for name, interval in timings["engines"].items():
        ratio = (timings.get("ratios") or {}).get(name)
        found.append(Bar(name, interval["median"], interval["low"], interval["high"], ratio, ratio["verdict"] if ratio else "baseline"))
    return sorted(found, key=lambda bar: bar.name != timings["baseline"])


def groups(report: Report) -> list[Group]:
    """Sites by fusion, in the order in which fusions first appear."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for site in report.get("sites") or []:
        found.setdefault(site["fusion"], []).append(site)
    return [Group(fusion, tuple(sites)) for fusion, sites in found.items()]


def misses(report: Report) -> dict[str, list[Mapping[str, Any]]]:
    """Near misses by fusion, in the order in which fusions first appear."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for miss in report.get("misses") or []:
        found.setdefault(miss["fusion"], []).append(miss)
    return found


def checks(report: Report) -> list[tuple[str, Mapping[str, Any]]]:
    """Every check in the report, with the name of what was checked."""
    if "others" in report:
        return [(str(other["name"]), other["check"]) for other in report["others"]]
    return [("rewritten model", report["check"])] if report.get("check") else []


def place(report: Report) -> list[str]:
    """GPU, TensorRT and date, or what there is of them."""
    machine = report.get("machine") or {}
    named = {"gpu": "", "tensorrt": "TensorRT ", "driver": "driver ", "date": ""}
    found = [f"{word}{machine[key]}" for key, word in named.items() if machine.get(key)]
    if not machine.get("gpu") and report.get("gpu"):
        found.insert(0, f"for {report['gpu']}")
    return found


def sections(report: Report) -> list[tuple[str, str]]:
    """The parts that the page has: the element's id and the title."""
    there: dict[tuple[str, str], Any] = {
        ("axes", "Worth it?"): True,
        ("latency", "Latency"): report.get("timings"),
        ("models", "Models"): report.get("rows"),
        ("layers", "Layers"): report.get("layers"),
        ("graph", "Graph"): report.get("graph"),
        ("accuracy", "Accuracy"): report.get("tensors"),
        ("budget", "Error budget"): budget(report),
        ("roofline", "Roofline"): report.get("roofline"),
        ("outputs", "Outputs"): checks(report),
        ("plan", "Plan"): "sites" in report,
        ("misses", "Near misses"): report.get("misses"),
        ("kernels", "Plugins"): report.get("kernels"),
        ("precision", "Precision"): report.get("converted"),
        ("inputs", "Inputs"): report.get("inputs"),
        ("machine", "Machine"): True,
    }
    return [section for section, content in there.items() if content]


def facts(report: Report) -> list[tuple[str, str]]:
    """Where and how it was made: name and value."""
    found: list[tuple[str, str]] = []
    model = report.get("model") or {}
    if model.get("path"):
        found.append(("model", str(model["path"])))
    found += [(key, str(report[key])) for key in ("out", "gpu", "policy", "precision") if report.get(key)]
    found += [(str(other["kind"]), str(other.get("path") or other["name"])) for other in report.get("others") or ()]
    found += [(f"cleaned, {key}", str(value)) for key, value in (report.get("cleaned") or {}).items()]
    machine = {"onnxfuse": report.get("onnxfuse"), **(report.get("machine") or {})}
    found += [(key, _plain(value)) for key, value in machine.items() if value not in (None, "", [], {})]
    found += [(f"{key}, s", f"{value:g}") for key, value in (report.get("seconds") or {}).items()]
    return found


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def precision(converted: Mapping[str, Any]) -> str:
    """How much computes in half precision, and which operators stay in float32, the most frequent first."""
    kept = converted["float_nodes"]
    text = f"{_many(converted['half_nodes'], 'node')} in {converted['precision']}, {len(kept) or 'none'} in float32"
    reasons: dict[str, list[str]] = {}
    for _, op, reason in kept:
        reasons.setdefault(op, []).append(reason)
    often = sorted(reasons, key=lambda op: -len(reasons[op]))
    said = [f"{len(reasons[op])} {op} ({Counter(reasons[op]).most_common(1)[0][0]})" for op in often[:3]]
    if rest := sum(len(reasons[op]) for op in often[3:]):
        said.append(f"{rest} more")
    casts = f"; {_many(converted['casts'], 'cast')} between them" if converted["casts"] else ""
    return f"{text}{': ' if said else ''}{', '.join(said)}{casts}."


def graph_in_words(report: Report) -> str:
    """What the two graphs show, in a sentence."""
    graph = report.get("graph") or {}
    if "after" not in graph:
        return "The model as it is."
    sites = report.get("sites") or ()
    fused = sum(site["decision"] == "fused" for site in sites)
    text = "The model before and after."
    if fused:
        text += (
            f" Coloured: what {_many(fused, 'fused site')} took, and what became of it; the same place has the same colour on both sides."
        )
    return text + (" Outlined: sites that were left to TensorRT." if fused < len(sites) else "")


def inside(report: Report) -> list[str]:
    """What was found inside, in sentences: what `compare --layers` says, or else which tensor leaves its tolerance first."""
    part = report.get("inside")
    if part:
        said = [f"{subject['name']}: {'; '.join(subject['sentences'])}." for subject in part["subjects"]]
        names = tuple(f"{subject['name']}:" for subject in part["subjects"])  # a name stays as it is
        notes = [str(note) for note in part.get("notes") or ()]
        return [*said, *(f"{note}." if note.startswith(names) else _sentence(note) for note in notes)]
    tensors = report.get("tensors") or ()
    bad = [tensor for tensor in tensors if tensor.get("agrees") is False]
    if not bad:
        return [f"All {len(tensors)} tensors that were compared agree."] if tensors else []
    first = bad[0]
    by = f", made by {first['node']}" if first.get("node") else ""
    fusion = f" of fusion {first['fusion']}" if first.get("fusion") else ""
    return [f"{len(bad)} of {len(tensors)} tensors differ; the first is {first['name']}{by}{fusion}."]


METRICS = {"max_abs": "max abs", "max_rel": "max rel", "relative_rms": "relative norm", "ulp": "ULP", "cosine": "1 − cosine"}


def metrics(report: Report) -> list[tuple[str, str]]:
    """Figures that at least one tensor has."""
    tensors = report.get("tensors") or ()
    keys = ways(tensors)
    return [(key, title) for key, title in METRICS.items() if any(_has(tensor, key, keys) for tensor in tensors)]


def _has(tensor: Mapping[str, Any], key: str, keys: Sequence[str]) -> bool:
    return any((part or {}).get(key) is not None for part in (tensor, *(tensor.get(way) for way in keys)))


def ways(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Keys of the ways of running that tensors or outputs have errors of: onnxruntime first, the fused one last."""
    found = {key for part in parts for key, error in part.items() if isinstance(error, Mapping) and way_in_words(key)}
    return sorted(found, key=lambda key: (not key.startswith("onnxruntime"), key == "fused", key))


def way_in_words(key: str) -> str:
    """ "onnxruntime_float32" as a reader says it; empty for what is no way of running."""
    if key.startswith("onnxruntime_"):
        return f"onnxruntime, {key.removeprefix('onnxruntime_')}"
    return {"automatic": "automatic", "fused": "fused"}.get(key, "")


@dataclasses.dataclass(frozen=True)
class Budget:
    """Ways of running, and for each output their errors and what that means. figure: which error, as a key and in words."""

    ways: tuple[str, ...]
    outputs: tuple[tuple[str, tuple[Mapping[str, Any] | None, ...]], ...]
    verdicts: Mapping[str, Mapping[str, str]]
    figure: tuple[str, str]


def budget(report: Report) -> Budget | None:
    """None where the report has none."""
    part = report.get("error_budget") or {}
    outputs = part.get("outputs") or {}
    if not outputs:
        return None
    keys = ways(outputs.values())
    normed = all((error or {}).get("relative_rms") is not None for errors in outputs.values() for error in errors.values())
    figure = ("relative_rms", str(part.get("figure") or "norm(a - t) / norm(t)")) if normed else ("max_abs", "max abs error")
    rows = tuple((name, tuple(errors.get(key) for key in keys)) for name, errors in outputs.items())
    return Budget(tuple(map(way_in_words, keys)), rows, part.get("verdicts") or {}, figure)


def outputs(check: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Outputs with their metrics: those that disagree first, otherwise in the model's order."""
    return sorted(check["outputs"].items(), key=lambda item: bool(item[1]["agrees"]))


def figure(value: Any) -> str:
    """A number for people: three digits, a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, float) and not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    return f"{value:.3g}"


def cosine(value: Any) -> str:
    """A cosine: its distance from 1 is what matters, and rounding must not make it 1."""
    if value is None:
        return "–"
    if value == 1:
        return "1"
    gap = abs(1.0 - value)
    return f"1 − {gap:.1e}" if gap < 1e-6 else f"{value:.6f}"


def percent(share: Any) -> str:
    """A share of the tolerance."""
    if share is None:
        return "–"
    if share == 0:
        return "0 %"
    if share < 0.001:
        return "under 0.1 %"
    if share < 1:
        return f"{100 * share:.2g} %"
    return f"{100 * share:.0f} %" if share < 10 else f"{share:.3g} times"


def worst_used(check: Mapping[str, Any]) -> str:
    """The largest share of the tolerance that an output uses; "over" where one differs in a way that has no share, as by NaN."""
    shares = [metrics.get("used", 0.0) for metrics in check["outputs"].values()]
    return "over" if None in shares else percent(max(shares, default=0.0))


LONGEST_WORD = 400  # characters without a space: no name of an exporter comes near, and a path does not reach it


def visible(text: str) -> str:
    """A name with a sign for each control character (one that recolours a terminal, breaks a line, or turns a text around).

    Of a word that would fill a page the middle is left out: the JSON form and the data of a page hold all of it.
    """
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: f"{word[0][:120]}…{word[0][-60:]}", shown)


def _sentence(text: str, end: str = ".") -> str:
    return text[:1].upper() + text[1:] + end


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
