"""What a report says first, in words; the terminal and the page say the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """good: True agrees, False does not, None was not checked."""

    good: bool | None
    headline: str
    sentences: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Bar:
    """One engine's latency in ms, and its ratio to the baseline."""

    name: str
    median: float
    low: float
    high: float
    ratio: str
    verdict: str  # "faster", "slower", "draw", or "baseline"


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
    """The model's name, whether the report holds a string or a mapping for it."""
    model = report.get("model")
    if isinstance(model, Mapping):
        return str(model.get("name") or model.get("path") or model.get("file") or "model")
    return str(model or "model").replace("\\", "/").rsplit("/", 1)[-1]


def verdict(report: Report) -> Verdict:
    """The answer first."""
    return _compare_verdict(report) if "others" in report else _optimize_verdict(report)


def _compare_verdict(report: Report) -> Verdict:
    others = report["others"]
    bad = [other for other in others if not other["check"]["agrees"]]
    sentences = [_agreement(other["check"], str(other["name"])) for other in others]
    for bar in bars(report):
        if bar.verdict == "draw":
            sentences.append(f"{bar.name} and {report['latency']['baseline']} take the same time, as far as can be measured ({bar.ratio}).")
        elif bar.verdict in ("faster", "slower"):
            sentences.append(f"{bar.name} is {bar.verdict} than {report['latency']['baseline']}: {bar.ratio}.")
    if not bad:
        return Verdict(True, "The outputs agree", tuple(sentences))
    does = "does" if len(bad) == 1 else "do"
    where = f"{len(bad)} of {len(others)} {does} not agree" if len(others) > 1 else "The outputs do not agree"
    return Verdict(False, where, tuple(sentences))


def _optimize_verdict(report: Report) -> Verdict:
    sites = report.get("sites") or []
    fused = sum(site["decision"] == "fused" for site in sites)
    kept = len(sites) - fused
    counts = f"{_many(fused, 'site')} fused"
    if kept:
        counts += f", {kept} kept as {'it was' if kept == 1 else 'they were'}"
    check = report.get("check")
    if not check:
        return Verdict(None, counts, ("The outputs were not checked.",))
    good = bool(check["agrees"])
    return Verdict(good, f"{counts}; the outputs {'agree' if good else 'do not agree'}", (_agreement(check, ""),))


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
    latency = report.get("latency")
    if not latency:
        return []
    found = []
    for name, interval in latency["engines"].items():
        ratio = (latency.get("ratios") or {}).get(name)
        text = f"{ratio['median']:.3f}× [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else ""
        word = ratio["verdict"] if ratio else "baseline"
        found.append(Bar(name, interval["median"], interval["low"], interval["high"], text, word))
    return found


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


def visible(text: str) -> str:
    """A name with a sign for each control character: one that recolours a terminal, breaks a line, or turns a text around."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _sentence(text: str, end: str = ".") -> str:
    return text[:1].upper() + text[1:] + end


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
