"""Reports from files: of this schema, or of the first one, which is brought into today's form.

The form is published in schema.json. A file that does not have it is refused in one line that names the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxfuse import forms
from onnxfuse.errors import BadInput
from onnxfuse.graph.names import shown

SCHEMA = 2
REMEDY = "name a file that `optimize --report`, `compare --report` or the benchmark wrote"

Report = dict[str, Any]


def load(path: Path) -> Report:
    """The report in `path`. BadInput: no such file, not JSON, no report, or of a schema that is not known here."""
    content = forms.read_json(path, shown(path), REMEDY)
    report = current(content, shown(path))
    check(report, shown(path))
    return report


def joined(reports: Sequence[Report]) -> Report:
    """One report of several about the same model: the first, with the parts that it lacks taken from the others in turn."""
    names = dict.fromkeys(report["model"]["name"] for report in reports if report["kind"] != "benchmark" and "model" in report)
    if len(names) > 1:
        raise BadInput(
            f"reports on different models ({', '.join(map(shown, names))}) are no one report; show them one by one, or use report diff"
        )
    first, *others = reports
    found = dict(first)
    for other in others:
        found.update({name: part for name, part in other.items() if found.get(name) in (None, [], {})})
    whole = [report for report in reports if "after" in (report.get("graph") or {})]
    if whole:  # places in a graph are those of its own report's sites
        found.update({name: whole[0][name] for name in ("graph", "sites", "kernels") if name in whole[0]})
    machines = [report.get("machine") or {} for report in reports]
    # Where the GPU was says more than where the file was rewritten.
    found["machine"] = next((machine for machine in machines if machine.get("gpu")), machines[0])
    return found


def current(content: Any, where: str = "report") -> Report:
    """A report of any known schema in today's form. BadInput for anything else."""
    if not isinstance(content, dict):
        raise BadInput(f"{where}: not a report; {REMEDY}")
    schema = content.get("schema")
    if schema == SCHEMA and "kind" in content:
        return content
    if schema == "onnxfuse/optimize/1" and isinstance(content.get("model"), str):
        return _optimize_1(content)
    if schema == "onnxfuse/compare/1" and isinstance(content.get("others"), list):
        return _compare_1(content)
    if isinstance(content.get("rows"), list) and isinstance(content.get("machine"), dict):
        return _benchmark(content, where)
    if schema is None:
        raise BadInput(f"{where}: not a report (it says no schema); {REMEDY}")
    raise BadInput(f"{where}: a report of schema {shown(schema)}, and this onnxfuse reads those up to {SCHEMA}; update onnxfuse")


def check(report: Mapping[str, Any], where: str = "report") -> None:
    """BadInput where the report does not have the published form: the place and what is wrong there."""
    wrong = forms.flaw(report, "onnxfuse.report", "schema.json")
    if wrong:
        raise BadInput(f"{where}: {wrong}; {REMEDY}")
    wrong = next(_dangling(report), "")
    if wrong:
        raise BadInput(f"{where}: {shown(wrong)}; {REMEDY}")


def _dangling(report: Mapping[str, Any]) -> Iterator[str]:
    """What a schema cannot say: places and names that lead nowhere."""
    count = len(report.get("sites") or ())
    for side, graph in (report.get("graph") or {}).items():
        nodes, groups = len(graph["nodes"]), len(graph["groups"])
        for number, (first, second, _) in enumerate(graph["edges"]):
            if not (0 <= first < nodes and 0 <= second < nodes):
                yield f"graph.{side}.edges[{number}] leads to no node"
        for kind in ("nodes", "groups"):
            for number, item in enumerate(graph[kind]):
                if not 0 <= item.get("site", 0) < max(count, "site" not in item):
                    yield f"graph.{side}.{kind}[{number}] names no site"
                inside = item.get("group", item.get("parent", 0))
                most = groups if kind == "nodes" else number
                if ("group" in item or "parent" in item) and not 0 <= inside < most:
                    yield f"graph.{side}.{kind}[{number}] is in no group"
    timings = report.get("timings") or {}
    for name in (timings["baseline"], *timings["ratios"]) if timings else ():
        if name not in timings["engines"]:
            yield f"timings.engines lacks {name!r}"


def _optimize_1(content: Report) -> Report:
    model = content["model"]
    return {
        **content,
        "schema": SCHEMA,
        "kind": "optimize",
        "model": {"name": model.replace("\\", "/").rsplit("/", 1)[-1], "path": model},
        "onnxfuse": str(content.get("onnxfuse", "")),
    }


def _compare_1(content: Report) -> Report:
    found = {name: part for name, part in content.items() if name != "latency"}
    machine = content.get("machine")
    version = machine.get("onnxfuse", "") if isinstance(machine, dict) else ""
    return {**found, "schema": SCHEMA, "kind": "compare", "onnxfuse": str(version), "timings": content.get("latency")}


def _benchmark(content: Report, where: str) -> Report:
    """A results file of the benchmark: rows of models, or rows of kernels alone."""
    from onnxfuse.report import roofline

    rows, machine = content["rows"], content["machine"]
    gpu = str(machine.get("gpu", "GPU"))
    found: Report = {"schema": SCHEMA, "kind": "benchmark", "onnxfuse": str(machine.get("onnxfuse", "")), "machine": machine}
    found["model"] = {"name": f"Benchmark on {gpu}"}
    if any(isinstance(row, dict) and "kernel" in row for row in rows):
        return {**found, "roofline": roofline.of_results(content, where)}
    return {**found, "rows": [_with_verdict(row) for row in rows]}


def _with_verdict(row: Any) -> Any:
    if not isinstance(row, dict) or "verdict" in row or not isinstance(row.get("ratio"), dict):
        return row
    low, high = row["ratio"].get("low"), row["ratio"].get("high")
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return row
    return {**row, "verdict": "faster" if low > 1 else "slower" if high < 1 else "draw"}
