"""The results file: one JSON a GPU and TensorRT version, rows merged by (name, precision, policy)."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxfuse.errors import BadInput
from onnxfuse.graph.files import atomic

SCHEMA = 1
FOLDER = Path(__file__).resolve().parent / "results"

Row = dict[str, Any]
Results = dict[str, Any]


def file_name(gpu: str, tensorrt: str) -> str:
    """("NVIDIA H200", "10.6.0.post1") -> "h200-trt10.6.0.json"."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia").strip()).strip("-")
    match = re.match(r"\d+(\.\d+){0,2}", tensorrt)
    return f"{slug or 'gpu'}-trt{match.group(0) if match else tensorrt}.json"


def load(path: Path) -> Results:
    """The results at `path`, or empty ones where there is no such file. BadInput for another schema or broken JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"schema": SCHEMA, "machine": {}, "rows": []}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not a results file ({error}); move it away") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise BadInput(f"{path}: not a results file of schema {SCHEMA}; move it away")
    return data


def merged(results: Results, machine: Mapping[str, Any], row: Row) -> Results:
    """`results` with `row` in the place of the one with the same name, precision and policy, or at the end."""
    rows = [row if key(old) == key(row) else old for old in results["rows"]]
    if all(key(old) != key(row) for old in results["rows"]):
        rows.append(row)
    return {"schema": SCHEMA, "machine": dict(machine), "rows": rows}


def key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["name"], row["precision"], row["policy"]


def save(results: Results, path: Path) -> None:
    """Writes the file whole or not at all; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as part:
        part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def failed(name: str, precision: str, policy: str, reason: str) -> Row:
    """The row of a candidate that could not be measured."""
    return {"name": name, "precision": precision, "policy": policy, "failed": reason}


def measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "failed" not in row]


def commit() -> str | None:
    """The commit of the checkout, with "+" where files differ from it; None where git cannot say."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None
