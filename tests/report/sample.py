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
    site = {"variant": None, "shape": [2], "dtype": "float32", "nodes": [f"{name}_a", f"{name}_b"], "output": f"{name}_out"}
    return {
        "schema": "onnxfuse/optimize/1",
        "model": f"folder/{name}.onnx",
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
