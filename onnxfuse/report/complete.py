"""Adds to a report what follows from the rest of it: the graphs, facts about the plugins, points below the roof, the four axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxfuse.report import axes, graph, read, roofline


def complete(report: Any, before: Path | None = None, after: Path | None = None) -> read.Report:
    """The report in today's form, with the derived parts. before, after: the models whose graphs are shown; files of any size."""
    found = dict(read.current(report))
    if after is not None and "sites" not in found and (said := graph.fused_sites(after)):
        found["sites"] = said
    if before is not None or after is not None:
        found["graph"] = graph.sides(before, after, found.get("sites") or ())
    return derived(found)


def derived(report: read.Report) -> read.Report:
    """The report with the parts that follow from its own content made anew."""
    found = dict(report)
    if "kernels" not in found and ("graph" in found or found["kind"] == "benchmark"):
        from onnxfuse.report import kernels

        found["kernels"] = kernels.facts(found)
    copy = (found.get("roofline") or {}).get("copy_gbps") or (found.get("machine") or {}).get("copy_gbps")
    if copy and found.get("layers"):
        base = found.get("roofline") or {"gpu": str(found["machine"].get("gpu", "GPU")), "copy_gbps": copy, "points": []}
        known = [point for point in base["points"] if point.get("cache") != "in the engine"]
        found["roofline"] = {**base, "points": [*known, *roofline.of_layers(found, copy)]}
    found["axes"] = axes.of(found)
    return found
