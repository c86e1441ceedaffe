"""Reports as one HTML page that needs nothing else: styles, scripts and libraries are inside, and nothing is fetched.

Every name comes from a model file and may be hostile. What the template writes goes through its escaping; what the scripts read is
packed, and they write text, never markup. A policy in the page allows its own scripts by their hashes alone, so that even a name that got
through would not run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from onnxfuse.report import complete, read, summary

MOST_ROWS = 2000  # rows of one table: a browser stays fluid, and the JSON holds the rest
LIBRARIES = ("d3.js", "plot.js", "dagre.js", "cytoscape.js")  # in this order: plot builds on d3
SCRIPTS = ("common.js", "charts.js", "timeline.js", "graph.js", "page.js")


def page(report: Mapping[str, Any]) -> str:
    """The page of a report of `optimize`, `compare` or the benchmark, of any schema. BadInput where it is no report."""
    full = complete.derived(dict(read.current(report)))
    scripts = _scripts(frozenset(name for name, needed in _NEEDS.items() if not needed(full)))
    return _render("page.html.j2", full, scripts, _data(full), _context(full))


def difference(diff: Mapping[str, Any]) -> str:
    """The page of what changed between two reports, as made by `report.diff`."""
    return _render("diff.html.j2", diff, [], "", {"most": MOST_ROWS})


def write(report: Mapping[str, Any], path: Path) -> None:
    """Write the page of a report, or of a difference, whole or not at all. BadInput where the file system refuses."""
    from onnxfuse.graph.files import atomic

    text = difference(report) if report.get("kind") == "diff" else page(report)
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def _context(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows, in the order of the page."""
    measured = [row["verdict"] for row in report.get("rows") or () if row.get("verdict")]
    return {
        "name": summary.model_name(report),
        "kind": {"optimize": "Optimization", "compare": "Comparison", "benchmark": "Benchmark"}[report["kind"]],
        "place": summary.place(report),
        "sections": summary.sections(report),
        "verdict": summary.verdict(report),
        "groups": summary.groups(report),
        "checks": summary.checks(report),
        "bars": summary.bars(report),
        "counts": {word: measured.count(word) for word in ("faster", "draw", "slower") if word in measured},
        "misses": summary.misses(report),
        "precision": summary.precision(report["converted"]) if report.get("converted") else "",
        "tensors": report.get("tensors") or [],
        "ways": [(way, summary.way_in_words(way)) for way in summary.ways(report.get("tensors") or ())],
        "inside": summary.inside(report),
        "metrics": summary.metrics(report),
        "graph_lead": summary.graph_in_words(report),
        "budget": summary.budget(report),
        "facts": summary.facts(report),
        "most": MOST_ROWS,
    }


def _render(template: str, report: Mapping[str, Any], scripts: list[str], data: str, context: dict[str, Any]) -> str:
    import jinja2
    from markupsafe import Markup

    folder = resources.files("onnxfuse.report") / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,  # parts that a report leaves off
        finalize=lambda value: summary.visible(value) if type(value) is str else value,  # not what is markup already
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        {name: _absent_is_none(getattr(summary, name)) for name in ("figure", "cosine", "percent")},
        outputs=summary.outputs,
        worst_used=summary.worst_used,
    )
    credits = ", ".join(f"{entry['package']} {entry['version']}" for entry in assets() if any(entry["package"] in s[:99] for s in scripts))
    return environment.get_template(template).render(
        report=report,
        data=Markup(data),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(" ".join(f"'sha256-{_digest(script)}'" for script in scripts)),
        credits=credits,
        **context,
    )


def _absent_is_none(show: Callable[[Any], str]) -> Callable[[Any], str]:
    import jinja2

    return lambda value: show(None if isinstance(value, jinja2.Undefined) else value)


# ------------------------------------------------------------------------------------------------------------ scripts

# Libraries that a page without such a part does without.
_NEEDS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "cytoscape.js": lambda report: bool(report.get("graph")),
    "dagre.js": lambda report: bool(report.get("graph")),
    "graph.js": lambda report: bool(report.get("graph")),
    "timeline.js": lambda report: bool(report.get("layers")),
}


@cache
def assets() -> tuple[dict[str, str], ...]:
    """The libraries inside: package, version, licence, sha256 of the file."""
    return tuple(json.loads((resources.files("onnxfuse.report") / "assets" / "assets.json").read_text(encoding="utf-8")))


@cache
def _scripts(without: frozenset[str]) -> list[str]:
    """The scripts of the page, the libraries first, each with its licence."""
    folder = resources.files("onnxfuse.report")
    about = {entry["file"]: entry for entry in assets()}
    found = []
    for name in LIBRARIES:
        if name not in without:
            entry = about[name]
            text = (folder / "assets" / name).read_text(encoding="utf-8")
            found.append(f"/*! {entry['package']} {entry['version']}, {entry['licence']} */\n{text}")
    licences = (folder / "assets" / "LICENSES.txt").read_text(encoding="utf-8").replace("*/", "* /")
    own = "\n".join((folder / "templates" / name).read_text(encoding="utf-8") for name in SCRIPTS if name not in without)
    found.append(f'/*!\n{licences}*/\n"use strict";\n(async () => {{\n{own}\n}})();\n')
    return found


def _digest(script: str) -> str:
    """The hash of an inline script for the page's policy. The parser reads line ends as \\n, and so do we."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _drawn(tensor: Mapping[str, Any]) -> dict[str, Any]:
    """What a chart needs of a tensor; a page of thousands stays small."""
    keys = ("name", "node", "fusion", "agrees", "reason", *summary.METRICS)
    found = {key: tensor[key] for key in keys if tensor.get(key) not in (None, "")}
    for way in summary.ways([tensor]):
        found[way] = {key: tensor[way][key] for key in summary.METRICS if tensor[way].get(key) is not None}
    if tensor.get("alone"):
        found["alone"] = {
            key: tensor["alone"][key] for key in ("agrees", "reason", *summary.METRICS) if tensor["alone"].get(key) is not None
        }
    return found


def _data(report: Mapping[str, Any]) -> str:
    """What the scripts draw: JSON, packed, as a graph of thousands of nodes is a megabyte of names."""
    parts = ("sites", "graph", "layers", "tensors", "roofline", "rows", "timings")
    held: dict[str, Any] = {name: report[name] for name in parts if report.get(name)}
    if budget := summary.budget(report):
        held["budget"] = {"ways": budget.ways, "outputs": budget.outputs, "figure": budget.figure}
    if held.get("tensors"):
        held["tensors"] = [_drawn(tensor) for tensor in held["tensors"]]
        held["ways"] = [[way, summary.way_in_words(way)] for way in summary.ways(held["tensors"])]
    text = json.dumps(held, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
