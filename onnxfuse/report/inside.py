"""What `compare --layers` found, on the terminal, behind the verdict: the tensors that leave their tolerance and the error budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxfuse.report import summary, terminal

if TYPE_CHECKING:
    from rich.console import Console

MOST = 8  # rows: the report holds all


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the parts `inside`, `tensors` and `error_budget` of a report; nothing where it has none."""
    from rich.console import Console

    if "inside" not in report:
        return
    console = console or Console()
    _tensors(report, console)
    _budget(report, console)


def _tensors(report: Mapping[str, Any], console: Console) -> None:
    found = [t for t in report["tensors"] if not t["agrees"] or not t.get("alone", {}).get("agrees", True)]
    if not found:
        return
    columns = ("tensor", "fusion", "max abs", "ulp", "alone", "")
    table = terminal._table("Tensors that leave their tolerance, in order", *columns, right=columns[2:5])
    for tensor in found[:MOST]:
        alone = tensor.get("alone")
        by_itself = "–" if alone is None else "agrees" if alone["agrees"] else "wrong"
        figures = [summary.figure(tensor["max_abs"]), summary.figure(tensor["ulp"]), by_itself]
        said = str((alone or {}).get("reason") or tensor["reason"]).split("; ", 1)[0]
        table.add_row(*(terminal._text(text) for text in (tensor["name"], tensor["fusion"] or "", *figures, said)))
    console.print(table)
    if len(found) > MOST:
        console.print(terminal._text(f"  and {len(found) - MOST} more: --report writes them all"))


def _budget(report: Mapping[str, Any], console: Console) -> None:
    budget = report.get("error_budget")
    if not budget or not budget["outputs"]:
        return
    ways = list(dict.fromkeys(way for errors in budget["outputs"].values() for way in errors))
    heads = [way.replace("onnxruntime_", "onnxruntime ") for way in ways]
    table = terminal._table("Error against float64: norm(a - t) / norm(t)", "output", *heads, "", right=tuple(heads))
    for name, errors in list(budget["outputs"].items())[:MOST]:
        figures = [summary.figure(errors[way]["relative_rms"]) if way in errors else "–" for way in ways]
        table.add_row(*(terminal._text(text) for text in (name, *figures, budget["verdicts"][name]["sentence"])))
    console.print(table)
    truth = budget["truth"]
    if truth["without"]:
        why = "; ".join(truth["reasons"])
        console.print(terminal._text(f"  note: {truth['without']} of {truth['without'] + truth['tensors']} tensors have no truth: {why}"))
