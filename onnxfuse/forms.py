"""Published forms of JSON files (JSON Schema), and what in a file does not have its form. A file from elsewhere may hold anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from onnxfuse.graph.names import shown


def flaw(content: Mapping[str, Any], package: str, schema: str) -> str:
    """The place where `content` does not have the form of `schema`, a file of `package`, and what is wrong there; "" for none.

    Of several the outermost; where a value may have several forms, what keeps it from being the nearest of them.
    """
    from jsonschema.exceptions import best_match

    fault = best_match(_validator(package, schema).iter_errors(content))
    if fault is None:
        return ""
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault.absolute_path).lstrip(".")
    return f"{shown(place)}: {shown(fault.message)}" if place else shown(fault.message)


@cache
def _validator(package: str, schema: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(resources.files(package).joinpath(schema).read_text(encoding="utf-8")))
