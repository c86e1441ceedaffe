"""The four axes on which hand-made and automatic fusion are weighed, filled from what a report holds.

Each answers its question in one sentence and lists the facts behind it. What was not measured is said to be so, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnxfuse.report.graph import OF_FILE

Report = Mapping[str, Any]
Fact = tuple[str, str]


def of(report: Report) -> list[dict[str, Any]]:
    """Performance, debugging, maintenance, generality."""
    return [_performance(report), _debugging(report), _maintenance(report), _generality(report)]


def _axis(name: str, question: str, answer: str, good: bool | None, facts: Iterable[Fact]) -> dict[str, Any]:
    return {
        "name": name,
        "question": question,
        "answer": answer,
        "good": good,
        "facts": [{"what": what, "value": value} for what, value in facts],
    }


# -------------------------------------------------------------------------------------------------------- performance


def _performance(report: Report) -> dict[str, Any]:
    question = "Is it faster than what TensorRT fuses by itself?"
    facts: list[Fact] = []
    verdicts: list[str] = []
    timings = report.get("timings") or {}
    for name, ratio in (timings.get("ratios") or {}).items():
        verdicts.append(str(ratio["verdict"]))
        facts.append((f"{name} against {timings['baseline']}", f"{ratio['verdict']}: {interval(ratio)}"))
    if timings.get("samples"):
        facts.append(("samples of each", str(timings["samples"])))
    measured = [row for row in report.get("rows") or () if row.get("verdict")]
    verdicts += [str(row["verdict"]) for row in measured]
    facts += [
        ({"faster": "faster", "draw": "a draw", "slower": "slower"}[word], f"{count} of {len(measured)}")
        for word in ("faster", "draw", "slower")
        if (count := _count(measured, word))
    ]
    facts += _layer_facts(report) + _kernel_facts(report)
    cautions = len(timings.get("marks") or ())
    if cautions:
        facts.append(("cautions about the measurement", str(cautions)))
    if not verdicts and facts and report["kind"] == "benchmark":
        answer = "These are kernels alone: only whole engines, timed side by side, say that."
        return _axis("performance", question, answer, None, facts)
    if not verdicts:
        return _axis("performance", question, "Not measured here: build both engines on the GPU and compare them.", None, facts)
    # Several engines or models have an answer each; only one that all share is said in one word.
    words = sorted(set(verdicts), key=["faster", "draw", "slower"].index)
    if len(words) > 1:
        return _axis("performance", question, f"It depends: {', '.join(f'{verdicts.count(w)} {w}' for w in words)}.", None, facts)
    answers = {
        "faster": "Yes, by measurement.",
        "slower": "No: it is slower.",
        "draw": "No difference can be measured, so TensorRT's own fusion stays.",
    }
    good = {"faster": True, "slower": False, "draw": None}[words[0]]
    return _axis("performance", question, answers[words[0]], good, facts)


def _count(rows: Sequence[Mapping[str, Any]], word: str) -> int:
    return sum(row["verdict"] == word for row in rows)


def _kernel_facts(report: Report) -> list[Fact]:
    """The largest share of a copy's bandwidth that each kernel reached."""
    best: dict[str, float] = {}
    for point in (report.get("roofline") or {}).get("points") or ():
        if point.get("share_of_copy"):
            best[str(point["kernel"])] = max(best.get(str(point["kernel"]), 0.0), point["share_of_copy"])
    return [(f"{kernel}, at its best", f"{100 * share:.0f} % of a copy's bandwidth") for kernel, share in best.items()]


def _layer_facts(report: Report) -> list[Fact]:
    layers = report.get("layers")
    if not layers:
        return []
    facts = [("layers of the engine", f"{len(layers['automatic'])} automatic, {len(layers['fused'])} with plugins")]
    total = [sum(layer["us"] for layer in layers[side]) for side in ("automatic", "fused")]
    facts.append(("sum over the layers, profiled", f"{total[0]:.1f} µs automatic, {total[1]:.1f} µs with plugins"))
    diff = layers.get("diff") or {}
    for key, what in (("cut", "automatic regions cut apart"), ("added", "reformats and copies added")):
        if diff.get(key):
            facts.append((what, str(len(diff[key]))))
    return facts


# ---------------------------------------------------------------------------------------------------------- debugging


def _debugging(report: Report) -> dict[str, Any]:
    question = "What can still be seen inside?"
    facts: list[Fact] = []
    seen = visible(report)
    answer, good = "See a report of optimize or compare: the graphs are not in this one.", None
    if seen is not None:
        kept, hidden, gone = seen
        facts.append(("tensors that kept their name", f"{kept} of {kept + hidden + gone}"))
        facts.append(
            ("inside fused nodes", f"{hidden}; a fused node is a standard operator, or holds its definition, which --undo brings back")
        )
        facts.append(("computed ahead or removed by cleaning", str(gone)))
        answer = (
            f"{100 * kept / max(kept + hidden, 1):.0f} % of the tensors that are computed at run time keep their name and can be compared; "
            + (f"{hidden} are inside fused nodes." if hidden else "none is hidden in a fused node.")
        )
        good = hidden == 0 or kept >= hidden
    tensors = report.get("tensors") or ()
    if tensors:
        bad = [tensor for tensor in tensors if tensor.get("agrees") is False]
        facts.append(("tensors compared one by one", str(len(tensors))))
        facts.append(("first that does not agree", str(bad[0]["name"]) if bad else "none"))
        good = False if bad else good
    layers = (report.get("layers") or {}).get("fused") or ()
    if layers:
        known = sum(bool(layer["nodes"]) for layer in layers)
        facts.append(("engine layers with known ONNX nodes", f"{known} of {len(layers)}"))
    check = _checked(report)
    if check:
        facts.append(check)
    return _axis("debugging", question, answer, good, facts)


def _checked(report: Report) -> Fact | None:
    rows = [row for row in report.get("rows") or () if "agrees" in row]
    if rows:
        return "models whose outputs agree", f"{sum(bool(row['agrees']) for row in rows)} of {len(rows)}"
    checks = [report["check"]] if report.get("check") else [other["check"] for other in report.get("others") or ()]
    if not checks:
        return None
    outputs = [metrics for check in checks for metrics in check["outputs"].values()]
    return "outputs that agree with the reference", f"{sum(bool(metrics['agrees']) for metrics in outputs)} of {len(outputs)}"


def visible(report: Report) -> tuple[int, int, int] | None:
    """Tensors that nodes of the source compute: how many the rewritten model still has by name, how many are inside of fused nodes, and
    how many cleaning took away. None without both graphs."""
    graph = report.get("graph") or {}
    if "before" not in graph or "after" not in graph:
        return None
    sites = report.get("sites") or ()
    left = {name for node in graph["after"]["nodes"] for name, _ in node["outputs"]}
    kept = hidden = gone = 0
    for node in graph["before"]["nodes"]:
        if node.get("kind"):
            continue
        fused = "site" in node and sites[node["site"]]["decision"] == "fused"
        for name, _ in node["outputs"]:
            kept += name in left
            hidden += name not in left and fused
            gone += name not in left and not fused
    return kept, hidden, gone


# -------------------------------------------------------------------------------------------------------- maintenance


def _maintenance(report: Report) -> dict[str, Any]:
    question = "What has to be kept up?"
    if "kernels" not in report:
        return _axis("maintenance", question, "Not looked at in this report.", None, ())
    kernels = report["kernels"]
    if not kernels:
        return _axis("maintenance", question, "Nothing: no plugin is used, and TensorRT compiles the whole model.", True, ())
    facts: list[Fact] = []
    spills = 0
    compiled: set[int] = set()
    for kernel in kernels:
        said = [f"{kernel['lines']} lines"] if "lines" in kernel else []
        said += [f"{kernel['tests']} tests"] if "tests" in kernel else []
        for built in kernel.get("architectures") or ():
            compiled.add(built["sm"])
            spills += built["spill_stores"] + built["spill_loads"]
            spilled = built["spill_stores"] + built["spill_loads"]
            said.append(f"sm_{built['sm']}: at most {built['registers']} registers, {f'{spilled} B of spills' if spilled else 'no spills'}")
        facts.append((kernel["op"], "; ".join(said) or "its sources are not here"))
    if not compiled:
        facts.append(("compiled here", "for no GPU yet; `onnxfuse plugins inspect --gpu NAME` compiles, and says registers and spills"))
    lines = sum(kernel.get("lines", 0) for kernel in kernels)
    answer = f"{len(kernels)} {'plugin' if len(kernels) == 1 else 'plugins'}" + (f", {lines} lines of CUDA and C++" if lines else "")
    if compiled:
        answer += f", compiled here for {', '.join(f'sm_{sm}' for sm in sorted(compiled))}{', without a spill' if not spills else ''}"
    return _axis("maintenance", question, answer + ".", spills == 0 if compiled else None, facts)


# --------------------------------------------------------------------------------------------------------- generality


def _generality(report: Report) -> dict[str, Any]:
    question = "Where does it hold, and what happens elsewhere?"
    facts: list[Fact] = []
    for kernel in report.get("kernels") or ():
        gpus = kernel.get("gpus") or f"sm_{kernel['oldest_sm']} and newer"
        width = f"last axis up to {kernel['max_width']}" if kernel.get("max_width") else "any last axis"
        facts.append((kernel["op"], f"{gpus}; {', '.join(kernel['dtypes'])}; {width}"))
    facts += [("outside of that", outside) for outside in dict.fromkeys(kernel["outside"] for kernel in report.get("kernels") or ())]
    sites = report.get("sites")
    if sites is not None and "misses" in report:
        facts.append(("near misses, each with its reason", str(len(report.get("misses") or ()))))
    machine = report.get("machine") or {}
    if machine.get("gpu"):
        words = {"gpu": "", "tensorrt": "TensorRT ", "driver": "driver "}
        facts.append(("measured on", ", ".join(f"{word}{machine[key]}" for key, word in words.items() if machine.get(key))))
        facts.append(("on other GPUs and versions", "these figures are estimates; measure again"))
    return _axis("generality", question, _where_it_holds(report), None, facts)


def _where_it_holds(report: Report) -> str:
    sites = report.get("sites")
    rows = [row for row in report.get("rows") or () if "failed" not in row]
    if sites:
        fused = sum(site["decision"] == "fused" for site in sites)
        if all(site["reason"] == OF_FILE for site in sites):
            return f"Sites that are fused, as the file says: {fused}. What stays with TensorRT, and why, is in a report of optimize."
        if fused == len(sites):
            return f"All {fused} legal sites are fused."
        return f"{fused} of {len(sites)} legal sites are fused; the others stay with TensorRT."
    if sites is not None:
        return "No fusion has a site in this model."
    if rows:
        names = len({row["name"] for row in rows})
        return f"{names} models were measured; {sum(not row.get('sites') for row in rows)} of {len(rows)} rows have no site."
    return "No site was looked for in this report."


def interval(ratio: Mapping[str, Any]) -> str:
    """ "1.068× [1.066, 1.069]"."""
    return f"{ratio['median']:.3f}× [{ratio['low']:.3f}, {ratio['high']:.3f}]"
