"""Where the plugins stand below the roof: what they move and compute, against what a copy and a matmul reach on the same card.

The model of S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for multicore architectures",
CACM 52(4), 2009: a kernel of I operations a byte reaches at most I times the bandwidth. The bandwidth is that of a measured
copy. The plugins are all far left of the ridge: their roof is the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onnxfuse.errors import BadInput

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

# Operations an element of the formula as written, each addition, multiplication, division, root and transcendental function as one.
# LayerNormalization of a sum: x+s, the sum for the mean; d = x-m, d*d, their sum; d*r, *gamma, +beta. The row's own few are left out.
# RMSNormalization of a sum: x+s; x*x, their sum; x*r, *gamma.
# GroupNormalization and SiLU: the sum for the mean; d = x-m, d*d, their sum; *a, +b of the channel; exp, +1, /.
# GELU of a sum: x+b; erf: x*c, erf, +1, *x, *0.5. tanh: x*x, *x, *c, +x, *c, tanh, +1, *x, *0.5. quick: *c, exp, +1, /, * x.
OPERATIONS = {
    "skip_layernorm": 8,
    "skip_rmsnorm": 5,
    "bias_gelu": 6,
    "bias_gelu erf": 6,
    "bias_gelu none": 6,
    "bias_gelu tanh": 10,
    "bias_gelu quick": 6,
    "groupnorm_silu": 9,
}
# Tensors as large as the input that pass memory once: norms read input and skip and write the output, and the sum where somebody reads it.
WITH_SUM = " with sum"
TENSORS = {"skip_layernorm": 3, "skip_rmsnorm": 3, "bias_gelu": 2, "groupnorm_silu": 2}


def of_results(results: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The part of a report, from a results file of benchmarks/kernels.py. Kernels whose formula is neither known here nor
    counted in the row are left out.

    BadInput where a row or the machine lacks a figure; `where` names the file.
    """
    machine = results["machine"]
    if not _is_figure(machine.get("copy_gbps")):
        raise BadInput(f"{where}: machine lacks the figure 'copy_gbps', the roof; measure the kernels again")
    points = []
    for number, row in enumerate(results["rows"]):
        lacking = [key for key in ("rows", "width", "microseconds") if not isinstance(row, Mapping) or not _is_figure(row.get(key))]
        if lacking:
            raise BadInput(f"{where}: rows[{number}] lacks the figure {lacking[0]!r}; measure the kernels again")
        known = _formula(row.get("kernel")) in OPERATIONS or (_is_figure(row.get("flops")) and _is_figure(row.get("gbps")))
        if known and row.get("dtype") in SIZES:
            points.append(_point(row))
    matmul = machine.get("matmul_tflops")
    return {
        "gpu": str(machine.get("gpu", "GPU")),
        "copy_gbps": machine["copy_gbps"],
        **({} if matmul is None else {"matmul_tflops": matmul}),
        "points": points,
    }


def _is_figure(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    kernel, elements = str(row["kernel"]), row["rows"] * row["width"]
    us = row["microseconds"]
    # What the benchmark says that it moved, and computes, where it does.
    if _is_figure(row.get("gbps")):
        moved = row["gbps"] * us * 1e3
    else:
        moved = (TENSORS[kernel.split()[0]] + kernel.endswith(WITH_SUM)) * elements * SIZES[row["dtype"]]
    optional = {name: row[name] for name in ("low", "high", "gbps", "share_of_copy", "cache") if row.get(name) is not None}
    label = f"{row.get('shape', '')} ({row['rows']} × {row['width']})".strip()
    flops = row["flops"] if _is_figure(row.get("flops")) else OPERATIONS[_formula(kernel)] * elements
    return {"kernel": kernel, "label": label, "dtype": row["dtype"], "us": us, "bytes": moved, "flops": flops, **optional}


def _formula(kernel: Any) -> str:
    """The key in OPERATIONS: writing the sum out moves more and computes nothing more."""
    return str(kernel).removesuffix(WITH_SUM)


def of_layers(report: Mapping[str, Any], copy_gbps: float) -> list[dict[str, Any]]:
    """Points for the plugins of this model's own profile: the layers that are one fused node alone, whose shapes are known.

    A profiler's time of a small layer has its own cost in it, so that these points lie low rather than high.
    """
    sites = {str(site["node"]): site for site in report.get("sites") or () if site.get("node") and site["fusion"] in TENSORS}
    sizes, summed = _symbols(report), _summed(report)
    found = []
    for layer in (report.get("layers") or {}).get("fused", ()):
        site = sites.get(str(layer["nodes"][0])) if len(layer["nodes"]) == 1 else None
        dims = [sizes.get(size, size) for size in str((site or {}).get("shape") or "?").split("x")]
        dtype = _built_in(report, site)
        if site is None or dtype is None or not layer["us"] or not all(str(size).isdigit() for size in dims):
            continue
        elements = math.prod(int(size) for size in dims)
        moved = (TENSORS[site["fusion"]] + (site["node"] in summed)) * elements * SIZES[dtype]
        gbps = moved / layer["us"] / 1e3
        flops = OPERATIONS[site["fusion"]] * elements
        point = {"kernel": site["fusion"], "label": f"in this engine: {layer['name']}", "dtype": dtype, "us": layer["us"]}
        found.append({**point, "bytes": moved, "flops": flops, "gbps": gbps, "share_of_copy": gbps / copy_gbps, "cache": "in the engine"})
    return found


def _built_in(report: Mapping[str, Any], site: Mapping[str, Any] | None) -> str | None:
    """The element type that a site's tensors have after the conversion of precision."""
    converted = {"fp16": "float16", "bf16": "bfloat16"}.get(str(report.get("precision")))
    dtype = converted or str((site or {}).get("dtype"))
    return dtype if dtype in SIZES else None


def _summed(report: Mapping[str, Any]) -> set[str]:
    """Nodes of the rewritten model whose second output, the sum of a norm, is read."""
    after = (report.get("graph") or {}).get("after") or {"nodes": [], "edges": []}
    return {str(after["nodes"][source]["name"]) for source, _, which in after["edges"] if which == 1}


def _symbols(report: Mapping[str, Any]) -> dict[str, str]:
    """Size of each symbolic dimension, from the declared inputs and the arrays that were given for them."""
    nodes = ((report.get("graph") or {}).get("before") or {}).get("nodes", ())
    feeds = (report.get("inputs") or {}).get("feeds") or [{}]
    found: dict[str, str] = {}
    for node in nodes:
        if node.get("kind") == "input" and node["name"] in feeds[0] and node["outputs"]:
            declared, given = _sizes(node["outputs"][0][1]), _sizes(feeds[0][node["name"]])
            found.update((name, size) for name, size in zip(declared, given, strict=False) if not name.isdigit() and size.isdigit())
    return found


def _sizes(text: str) -> list[str]:
    """ "float32[B, 4]" -> ["B", "4"]."""
    return [size.strip() for size in text.partition("[")[2].rstrip("]").split(",")]
