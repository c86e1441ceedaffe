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
from onnxfuse.plan import store
from onnxfuse.plan.verdicts import Verdict

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
    """`results` with `row` in the place of the one with the same name, precision and policy, or at the end.

    What a search found about a fusion stays until another search measures that fusion again: the budget of this one may not have been
    enough for it.
    """
    old = find(results, row)
    if old is not None and "failed" not in row and (known := [*old.get("verdicts", ()), *row.get("verdicts", ())]):
        newest = store.newest(list(map(Verdict.from_dict, known)))
        row = {**row, "verdicts": [verdict.to_dict() for verdict in newest]}
    rows = [row if key(other) == key(row) else other for other in results["rows"]]
    if old is None:
        rows.append(row)
    return {"schema": SCHEMA, "machine": dict(machine), "rows": rows}


def key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["name"], row["precision"], row["policy"]


def find(results: Results, row: Mapping[str, Any]) -> Row | None:
    """The row with the same name, precision and policy."""
    return next((old for old in results["rows"] if key(old) == key(row)), None)


def is_of(row: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Whether the row was measured, at `machine`'s commit and with its driver. Each GPU and TensorRT version has a file of its own."""
    measured = row.get("measured", {})
    return "failed" not in row and all(measured.get(name) == machine[name] for name in ("commit", "driver"))


def outcome(row: Mapping[str, Any]) -> str:
    """faster, slower or draw; or what keeps the row from being one of them: failed, disagrees, marked."""
    if "failed" in row:
        return "failed"
    if not row["agrees"]:
        return "disagrees"
    return "marked" if row["marks"] else str(row["verdict"])


def repeated(row: Row, again: Row) -> Row:
    """`row` with "repeat": what the second measurement gave, and whether it says the same.

    The verdicts agree where the outcome of the row is the same and every group of sites was decided alike; that the figures are
    apart by more than their intervals is said, and is no other verdict.
    """
    groups = {name: [fused(row, name), fused(again, name)] for name in dict.fromkeys([*_groups(row), *_groups(again)])}
    agree = outcome(row) == outcome(again) and all(first == second for first, second in groups.values())
    figures = {
        name: again[name] for name in ("ratio", "automatic_ms", "fused_ms", "marks", "sites", "decisions", "failed") if name in again
    }
    apart = "failed" not in row and "failed" not in again and _apart(row["ratio"], again["ratio"])
    repeat = {"agrees": agree, "outcome": outcome(again), "groups": groups, "intervals_apart": apart, "measured": again.get("measured")}
    return {**row, "repeat": {**repeat, **figures}}


def fused(row: Mapping[str, Any], group: str) -> int | None:
    """How many sites of the group are fused; None where the row knows no such group."""
    return next((decision["fused"] for decision in row.get("decisions", ()) if decision["group"] == group), None)


def _groups(row: Mapping[str, Any]) -> list[str]:
    return [decision["group"] for decision in row.get("decisions", ())]


def _apart(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    return first["high"] < second["low"] or second["high"] < first["low"]


def repeat_line(row: Mapping[str, Any]) -> str:
    """What the repetition says, in one line."""
    repeat = row["repeat"]
    if "failed" in repeat:
        return f"failed: {repeat['failed']}"
    ratio = repeat["ratio"]
    text = f"ratio {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] {repeat['outcome']}"
    other = [f"{name} {first} then {second} fused" for name, (first, second) in repeat["groups"].items() if first != second]
    said = "the verdicts agree" if repeat["agrees"] else f"THE VERDICTS DISAGREE ({outcome(row)}, then {repeat['outcome']}"
    said += "" if repeat["agrees"] else f"{'; ' if other else ''}{', '.join(other)})"
    return f"{text}: {said}{'; the intervals lie apart' if repeat['intervals_apart'] else ''}"


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
