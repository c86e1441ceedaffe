"""JSON files from elsewhere, which may hold anything: reading them, and what does not have its published form (JSON Schema)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from onnxfuse.errors import BadInput, refusal
from onnxfuse.graph.names import shown
from onnxfuse.graph.wire import map_file


def read_json(path: Path, what: str, remedy: str) -> Any:
    """The content of a JSON file from elsewhere. BadInput, "WHAT: reason; REMEDY", where it cannot be read, or is no file or no JSON."""
    try:
        return json.loads(bytes(map_file(path)).decode("utf-8"))
    except OSError as error:
        raise BadInput(f"{what}: {refusal(error)}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what}: not JSON ({shown(error)}); {remedy}") from None


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
