"""Plan files. A report of `optimize` is a plan: change a site's `decision` in it and give it back with --plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnxfuse import forms
from onnxfuse.errors import BadInput

# (fusion, output tensor) -> whether to fuse, and the reason that the file gives
Plan = Mapping[tuple[str, str], tuple[bool, str]]


def read(path: Path) -> Plan:
    """Raises BadInput where the file cannot be read or does not have the form of a plan."""
    content = forms.read_json(path, f"plan {path}", "name a file that `optimize --report` wrote")
    sites = content.get("sites") if isinstance(content, dict) else None
    if not isinstance(sites, list):
        raise BadInput(f"plan {path}: has no list 'sites'; name a file that `optimize --report` wrote")
    plan: dict[tuple[str, str], tuple[bool, str]] = {}
    for number, site in enumerate(sites):
        fields = [site.get(name) if isinstance(site, dict) else None for name in ("fusion", "output", "decision")]
        fusion, output, decision = fields
        if not isinstance(fusion, str) or not isinstance(output, str) or decision not in ("fused", "kept"):
            raise BadInput(f"plan {path}: site {number} needs 'fusion', 'output' and a 'decision' that is \"fused\" or \"kept\"")
        key, fused = (fusion, output), decision == "fused"
        if key in plan and plan[key][0] != fused:
            raise BadInput(f"plan {path}: site {number}, {fusion} at '{output}', is both fused and kept; leave one of the two")
        plan[key] = (fused, str(site.get("reason") or ""))
    return plan
