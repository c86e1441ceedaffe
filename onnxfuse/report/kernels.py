"""What is known of each plugin that a model uses: what it covers, and what it costs to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxfuse import plugins
from onnxfuse.engine.prepare import creator
from onnxfuse.fusions import REGISTRY
from onnxfuse.fusions.pattern import DOMAIN
from onnxfuse.report import counted

_OPSET = 17  # of all functions, the names are the same in every operator set

OUTSIDE = (
    "a site elsewhere is refused with the reason and stays with TensorRT; the fused node's function body runs where there is no plugin"
)


def facts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each plugin that stands for a fused site of the report, in the library's order. Nothing is compiled for it: the registers, spills
    and memory are those of the libraries that this machine has compiled from the present sources, if any."""
    used = _used(report, DOMAIN)
    wanted = [op for op in plugins.ops() if op.name in used]
    libraries = plugins.compiled() if wanted else ()
    tests = counted.tests()
    found = []
    for op in wanted:
        fusions = sorted(used[op.name])
        entry: dict[str, Any] = {
            "op": op.name,
            "fusions": fusions,
            "covers": op.covers,
            "dtypes": list(op.dtypes),
            "max_width": op.max_width,
            "oldest_sm": op.only[0] if op.only else plugins.OLDEST_SM,
            "gpus": op.gpus,
            "outside": OUTSIDE,
        }
        folder = plugins.folder(op.name)
        if folder is not None:
            entry["lines"] = counted.lines(folder)
            entry["architectures"] = _architectures(counted.kernels(folder), libraries)
        if op.name in tests:
            entry["tests"] = tests[op.name] + sum(tests.get(fusion, 0) for fusion in fusions)
        found.append(entry)
    return found


def _used(report: Mapping[str, Any], domain: str) -> dict[str, set[str]]:
    """Plugin -> the fusions whose nodes in the rewritten model it runs; of a benchmark's models, which were measured on its library."""
    nodes = ((report.get("graph") or {}).get("after") or {}).get("nodes", ())
    sites = report.get("sites") or ()
    found: dict[str, set[str]] = {}
    for node in nodes:
        where, _, name = node["op"].rpartition(".")
        if where == domain:
            fusion = {str(sites[node["site"]]["fusion"])} if "site" in node else set()
            found.setdefault(creator(name), set()).update(fusion)
    fused = {str(fusion) for row in report.get("rows") or () for fusion in row.get("sites") or ()}
    if report["kind"] == "benchmark":
        fused.update(str(point["kernel"]).split()[0] for point in (report.get("roofline") or {}).get("points") or ())
    for known in REGISTRY if fused else ():
        if known.name in fused:
            for function in known.functions(_OPSET):
                found.setdefault(creator(function.name), set()).add(known.name)
    return found


def _architectures(names: tuple[str, ...], libraries: Any) -> list[dict[str, Any]]:
    """The most that one instantiation of the kernels takes, for each architecture that is compiled here."""
    found = []
    for library in libraries:
        uses = [use for use in library.kernels if use.name.split("<")[0] in names]
        if uses:
            most = {key: max(getattr(use, key) for use in uses) for key in ("registers", "spill_stores", "spill_loads", "stack", "smem")}
            found.append({"sm": library.sm, "kernels": len(uses), **most, "compiler": library.compiler})
    return found
