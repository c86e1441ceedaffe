"""Made-up GPU parts for a real report: what a profile, a tensor comparison and a search would add. For tests of the page alone."""

from __future__ import annotations

import random
from typing import Any

Report = dict[str, Any]


def with_gpu_parts(report: Report, seed: int = 0) -> Report:
    """Timings, layers, tensors, error budget, roofline and plan, as plausible as can be, from the report's own graphs and sites."""
    rng = random.Random(seed)
    layers = {"automatic": _layers(report, "before", rng), "fused": _layers(report, "after", rng)}
    total = {side: sum(layer["us"] for layer in layers[side]) for side in layers}
    wholes = [layer for layer in layers["automatic"] if layer["name"].startswith("{ForeignNode")]
    added = [layer for layer in layers["fused"] if layer["type"] == "Reformat"]
    summary = f"{len(wholes)} regions are cut apart; in all {total['automatic']:.1f} us became {total['fused']:.1f}."
    diff: Report = {"cut": [_cut(layer) for layer in wholes[:4]], "added": added, "removed": [], "changed": [], "summary": summary}
    ratio = total["automatic"] / total["fused"]
    timings = {
        "engines": {f"{side}.engine": interval(total[side] / 1100, 0.004) for side in ("automatic", "fused")},
        "baseline": "automatic.engine",
        "ratios": {
            "fused.engine": {**interval(ratio, 0.004), "verdict": "faster" if ratio > 1.004 else "slower" if ratio < 0.996 else "draw"}
        },
        "samples": 200,
        "marks": [],
    }
    machine = {
        "gpu": "NVIDIA H200 (sm_90)",
        "driver": "580.159.04",
        "tensorrt": "10.6.0",
        "date": "2026-11-30 21:00 UTC",
        "copy_gbps": 4236.9,
    }
    return {
        **report,
        "machine": {**report.get("machine", {}), **machine},
        "timings": timings,
        "layers": {**layers, "diff": {**diff, "automatic_us": total["automatic"], "fused_us": total["fused"]}},
        "tensors": _tensors(report, rng),
        "error_budget": _budget(report, rng),
        "plan": _plan(report),
    }


def interval(median: float, share: float) -> dict[str, float]:
    return {"median": median, "low": median * (1 - share), "high": median * (1 + share)}


def _cut(layer: Report) -> Report:
    return {
        "what": "region",
        "name": layer["name"],
        "layers": 3,
        "nodes": len(layer["nodes"]),
        "us": layer["us"],
        "by": ["plugin"],
        "pieces": 2,
    }


def _layers(report: Report, side: str, rng: random.Random) -> list[Report]:
    """Stretches of nodes between matrix products as one layer each; plugins stand alone, with a copy before some of them."""
    made: list[Report] = []
    run: list[str] = []

    def close() -> None:
        if run:
            name = f"{{ForeignNode[{run[0]}...{run[-1]}]}}" if len(run) > 1 else run[0]
            made.append(
                {
                    "name": name,
                    "type": "kgen",
                    "nodes": list(run),
                    "us": round(rng.uniform(1.5, 4) + len(run) * 0.12, 3),
                    "kernel": "__myl_Fused",
                }
            )
            run.clear()

    for node in report["graph"][side]["nodes"]:
        if node.get("kind"):
            continue
        if node["op"].startswith("onnxfuse."):
            close()
            if rng.random() < 0.15:
                made.append({"name": f"Reformatting CopyNode for {node['name']}", "type": "Reformat", "nodes": [], "us": 1.2, "kernel": ""})
            plugin = {"name": node["name"], "type": "PluginV3", "nodes": [node["name"]], "us": round(rng.uniform(1.2, 1.9), 3)}
            made.append({**plugin, "kernel": node["op"].split(".")[1]})
        else:
            run.append(node["name"])
            if node["op"] in ("MatMul", "Conv", "Gemm") or len(run) > 24:
                close()
    close()
    return made


def _tensors(report: Report, rng: random.Random) -> list[Report]:
    sites, found, grown = report.get("sites") or [], [], 1e-7
    for node in report["graph"]["after"]["nodes"]:
        if node.get("kind") or not node["outputs"] or (node["outputs"][0][1] and "float" not in node["outputs"][0][1]):
            continue
        grown *= rng.uniform(0.93, 1.12)
        errors = {
            way: _error(grown * factor * rng.uniform(0.5, 2))
            for way, factor in (("onnxruntime_float32", 1.0), ("automatic", 900), ("fused", 800))
        }
        fusion = sites[node["site"]]["fusion"] if "site" in node and sites[node["site"]]["decision"] == "fused" else None
        found.append({"name": node["outputs"][0][0], "node": node["name"], "fusion": fusion, **errors["fused"], **errors, "agrees": True})
    if len(found) > 20:
        found[-12].update(agrees=False, reason="37 of 6144 values outside", max_abs=0.4, fused=_error(0.4))
    return found


def _error(size: float) -> Report:
    return {"max_abs": size, "max_rel": size * 30, "ulp": max(0.5, size * 4e6), "cosine": 1 - min(size * size, 0.5), "agrees": True}


def _budget(report: Report, rng: random.Random) -> Report:
    names = [node["name"] for node in report["graph"]["after"]["nodes"] if node.get("kind") == "output"]
    sizes = (("onnxruntime_float32", 3e-7), ("automatic", 2.8e-3), ("fused", 2.1e-3))
    return {"outputs": {name: {way: _error(size * rng.uniform(0.6, 1.6)) for way, size in sizes} for name in names}}


def _plan(report: Report) -> Report:
    counts: dict[str, int] = {}
    for site in report.get("sites") or []:
        counts[site["fusion"]] = counts.get(site["fusion"], 0) + 1
    ratios = [(1.031, "faster"), (0.968, "slower"), (1.001, "draw")]
    search = [
        {"group": fusion, "sites": count, "ratio": interval(ratios[i % 3][0], 0.004), "verdict": ratios[i % 3][1], "kept": i % 3 == 0}
        for i, (fusion, count) in enumerate(counts.items())
    ]
    return {
        "policy": "measure",
        "summary": "Each group was built and timed alone; those that win are combined and timed again.",
        "search": search,
    }
