"""Reports as plain JSON: what `optimize --report` and `compare --report` write, and what the other forms are made from.

Keys are those of schema.json, which is published; a change that a reader would notice gets a new number.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onnxfuse.report.read import SCHEMA

Report = dict[str, Any]


def compare_report(*, model: Any, inputs: Any, others: Iterable[Any], latency: Any = None, **more: Any) -> Report:
    """What `compare` found. Each of `others`: name, path, kind ("onnx" or "engine"), check, and for an engine its manifest.

    latency, where engines were timed, becomes the part "timings": engines (name -> median, low, high in ms), baseline (a name), ratios
    (name -> median, low, high, verdict), samples, marks.
    """
    from onnxfuse import __version__

    listed = [plain(other) for other in others]
    return {
        "schema": SCHEMA,
        "kind": "compare",
        "onnxfuse": __version__,
        "model": plain(model),
        "agrees": all(other["check"]["agrees"] for other in listed),
        "inputs": plain(inputs),
        "others": listed,
        **({} if latency is None else {"timings": plain(latency)}),
        **plain(more),
    }


def plain(value: Any) -> Any:
    """Dataclasses, mappings, paths, numpy numbers... as JSON values. NaN and infinity, which JSON lacks, become null."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def dumps(report: Mapping[str, Any]) -> str:
    """The report as text; strict JSON."""
    return json.dumps(plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write(report: Mapping[str, Any], path: Path) -> None:
    """Write the report whole or not at all. BadInput where the file system refuses."""
    from onnxfuse.graph.files import atomic

    with atomic(path) as temporary:
        # A lone surrogate of a hostile name has no UTF-8 form.
        temporary.write_text(dumps(report), encoding="utf-8", errors="backslashreplace")
