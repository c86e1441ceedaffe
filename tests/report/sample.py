"""Reports as the commands make them, with hostile names."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfuse.report.json import compare_report
from onnxfuse.verify.check import TOLERANCES, Check, check_arrays

HOSTILE = "</style></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7*7 }}[bold]\x1b[31m"


def checked(error: float = 0.0, name: str = "y") -> Check:
    """Three outputs, one of which is off by `error`."""
    rng = np.random.default_rng(0)
    want = {n: rng.standard_normal((4, 8)).astype(np.float32) for n in (name, "z")}
    want["nan"] = np.array([np.nan, 1, 2], np.float32)
    got = {n: a.copy() for n, a in want.items()}
    got[name][1, 2] += error
    return check_arrays([want], [got], TOLERANCES["float32"], source="onnxruntime, optimizations off")


def optimize(error: float = 0.0, name: str = "y", sites: int = 3) -> dict[str, Any]:
    """What `optimize --report` writes."""
    site = {"variant": None, "shape": "2", "dtype": "float32", "nodes": [f"{name}_a", f"{name}_b"], "output": f"{name}_out"}
    return {
        "schema": 2,
        "kind": "optimize",
        "onnxfuse": "1.0",
        "model": {"name": f"{name}.onnx", "path": f"folder/{name}.onnx"},
        "out": "out.onnx",
        "gpu": None,
        "policy": "proven",
        "precision": "keep",
        "nodes": {"before": 20, "after": 8},
        "sites": [
            *({**site, "fusion": "layernorm", "decision": "fused", "reason": "canonical", "node": f"{name}_{i}"} for i in range(sites)),
            {**site, "fusion": "bias_gelu", "variant": "erf", "decision": "kept", "reason": f"no verdict {name}", "node": None},
        ],
        "misses": [{"fusion": "gelu", "root": name, "nodes": [name], "at": None, "reason": f"constant is {name}"}],
        "check": checked(error, name).to_dict(),
        "notes": [f"a note on {name}"],
        "seconds": {"load": 0.1},
    }


def compare(error: float = 0.0, name: str = "y") -> dict[str, Any]:
    """What `compare --report` writes for two engines."""
    engines = {f"{name}.engine": {"median": 2.0, "low": 1.9, "high": 2.1}, "fused.engine": {"median": 1.0, "low": 0.99, "high": 1.01}}
    engines["same.engine"] = {"median": 2.0, "low": 1.9, "high": 2.1}
    ratios = {
        "fused.engine": {"median": 2.0, "low": 1.95, "high": 2.05, "verdict": "faster"},
        "same.engine": {"median": 1.0, "low": 0.97, "high": 1.03, "verdict": "draw"},
    }
    return compare_report(
        model={"name": f"{name}.onnx", "path": f"folder/{name}.onnx"},
        inputs={"source": "1 generated with seed 0", "feeds": [{name: "float32[4, 8]"}]},
        others=[{"name": n, "path": f"folder/{n}", "kind": "engine", "check": checked(error, name)} for n in engines],
        latency={"engines": engines, "baseline": f"{name}.engine", "ratios": ratios, "samples": 200, "marks": [f"{name} is busy"]},
        machine={"onnxfuse": "1", "gpu": name},
    )


def node(op: str, name: str, output: str, **more: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "outputs": [[output, "float32[2]"]], **more}


def with_graph(report: dict[str, Any], name: str = "y") -> dict[str, Any]:
    """`optimize` with graphs whose every text is `name`: a region of two nodes before, the fused node after."""
    ends = [
        {"op": "", "kind": "input", "name": name, "outputs": [[name, "float32[2]"]]},
        {"op": "", "kind": "output", "name": f"{name}_o", "outputs": []},
    ]
    group = {"label": name, "kind": "scope"}
    region = {"label": "layernorm", "kind": "region", "parent": 0, "site": 0}
    more = {"attributes": {name: name}, "constants": [name]}
    nodes = [node(name, f"{name}_a", f"{name}_t", group=1, site=0, **more), node("Add", f"{name}_b", f"{name}_out", group=1, site=0)]
    before = {"nodes": [ends[0], *nodes, ends[1]], "groups": [group, region], "edges": [[0, 1, 0], [1, 2, 0], [2, 3, 0]], "omitted": 0}
    fused = node("onnxfuse.SkipLayerNormalization", f"{name}_0", f"{name}_out", group=0, site=0)
    after = {"nodes": [ends[0], fused, ends[1]], "groups": [group], "edges": [[0, 1, 0], [1, 2, 0]], "omitted": 0}
    return {**report, "graph": {"before": before, "after": after}}


def full(name: str = "y") -> dict[str, Any]:
    """Every part that a report can have, with `name` wherever a text comes from outside."""
    from tests.report import gpu

    report = gpu.with_gpu_parts(with_graph({**compare(1.0, name), **optimize(1.0, name)}, name))
    report["sites"].append({**report["sites"][0], "decision": "kept", "reason": name, "output": f"{name}_kept", "node": None})
    for layer in report["layers"]["automatic"]:
        layer.update(name=name, kernel=name, type=name)
    report["tensors"].append({"name": name, "node": name, "fusion": name, "agrees": False, "reason": name, "max_abs": 1.0})
    report["timings"] = {**report["timings"], "marks": [name]}
    roof = {
        "gpu": name,
        "copy_gbps": 4000.0,
        "points": [{"kernel": name, "label": name, "dtype": name, "us": 2.0, "bytes": 4e6, "flops": 1e6}],
    }
    rows = [
        {
            "name": name,
            "precision": name,
            "policy": name,
            "ratio": gpu.interval(1.1, 0.01),
            "verdict": "faster",
            "sites": {name: 1},
            "marks": [name],
        },
        {"name": name, "precision": name, "policy": "all", "failed": name},
    ]
    inside = {"subjects": [{"name": name, "sentences": [name]}], "notes": [name]}
    return {**report, "roofline": roof, "rows": rows, "inside": inside}
