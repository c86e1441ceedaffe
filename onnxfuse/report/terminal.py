"""Reports on the terminal. Names from a model file are printed as text: markup and control characters in them do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxfuse.report import summary

if TYPE_CHECKING:
    from rich.console import Console

MOST_ROWS = 40  # of outputs: the JSON and HTML reports hold all

MOST_CHANGES = 10
LEAST_CHANGE = 0.05  # us
MOST_OF_NAME = 48  # of a kernel's


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a report: verdict, sites, near misses, outputs, latencies."""
    from rich.console import Console

    from onnxfuse.report import read

    console = console or Console()
    report = read.current(report)
    _verdict(report, console)
    if "sites" in report:
        _sites(report, console)
        _misses(report, console)
    for name, check in summary.checks(report):
        _outputs(name, check, console)
    _latency(report, console)
    _layers(report, console)


def _text(value: Any, style: str = "") -> Any:
    from rich.text import Text

    return Text(summary.visible(str(value)), style=style)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=_text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(_text(column), justify="right" if column in right else "left", overflow="fold")
    return table


def _verdict(report: Mapping[str, Any], console: Console) -> None:
    found = summary.verdict(report)
    mark, style = {True: ("✓", "bold green"), False: ("✗", "bold red"), None: ("·", "bold")}[found.good]
    console.print(_text(f"{mark} {summary.model_name(report)}: {found.headline[0].lower()}{found.headline[1:]}", style))
    for sentence in found.sentences:
        console.print(_text(f"  {sentence}"))
    for note in report.get("notes") or ():
        console.print(_text(f"  note: {note}"))


def _sites(report: Mapping[str, Any], console: Console) -> None:
    found = summary.groups(report)
    if not found:
        console.print(_text("  no fusion has a site in this model"))
        return
    table = _table("Sites", "fusion", "fused", "kept", "why kept", right=("fused", "kept"))
    for group in found:
        reasons = dict.fromkeys(str(site["reason"]) for site in group.sites if site["decision"] != "fused" and site["reason"])
        why = "; ".join(list(reasons)[:3]) + (f"; {len(reasons) - 3} more reasons" if len(reasons) > 3 else "")
        table.add_row(_text(group.fusion), str(group.fused), str(group.kept), _text(why))
    console.print(table)


def _misses(report: Mapping[str, Any], console: Console) -> None:
    found = summary.misses(report)
    if not found:
        return
    table = _table("Near misses", "fusion", "places", "for example", right=("places",))
    for fusion, misses in found.items():
        node = misses[0].get("at") or misses[0].get("root") or ""
        table.add_row(_text(fusion), str(len(misses)), _text(f"{node}: {misses[0]['reason']}"))
    console.print(table)


def _outputs(name: str, check: Mapping[str, Any], console: Console) -> None:
    outputs = check["outputs"]
    columns = ("output", "max abs", "max rel", "cosine", "of tolerance", "")
    table = _table(f"Outputs of {name}", *columns, right=columns[1:5])
    for output, metrics in summary.outputs(check)[:MOST_ROWS]:
        style = "" if metrics["agrees"] else "red"
        said = metrics["reason"] if not metrics["agrees"] else "; ".join(metrics.get("notes") or ())
        figures = [summary.figure(metrics["max_abs"]), summary.figure(metrics["max_rel"]), summary.cosine(metrics["cosine"])]
        share = summary.percent(metrics["used"]) if metrics["used"] is not None else "over"
        table.add_row(_text(output, style), *figures, share, _text(said, style))
    console.print(table)
    _more(len(outputs), console)
    for note in check.get("notes") or ():
        console.print(_text(f"  note: {note}"))


def _latency(report: Mapping[str, Any], console: Console) -> None:
    found = summary.bars(report)
    if not found:
        return
    baseline = report["timings"]["baseline"]
    table = _table("Latency", "engine", "median ms", "95 % interval", f"against {baseline}", right=("median ms",))
    for bar in found:
        style = {"faster": "green", "slower": "red"}.get(bar.verdict, "")
        said = "" if bar.verdict == "baseline" else f"{bar.verdict}, {bar.said}"
        table.add_row(_text(bar.name), f"{bar.median:.4g}", f"{bar.low:.4g} to {bar.high:.4g}", _text(said, style))
    console.print(table)
    for mark in report["timings"].get("marks") or ():
        console.print(_text(f"  caution: {mark}", "yellow"))


def _layers(report: Mapping[str, Any], console: Console) -> None:
    """What the plugins did to TensorRT's own fusion: the summary, and the kernels whose time changed most."""
    diff = (report.get("layers") or {}).get("diff")
    if not diff:
        return
    console.print(_text("Layers", "bold"))
    console.print(_text(f"  {diff['summary']}"))
    changed = [change for change in sorted(diff["changed"], key=lambda change: -abs(change["us"])) if abs(change["us"]) >= LEAST_CHANGE]
    if not changed:
        return
    table = _table("Kernels that changed most", "nodes", "TensorRT alone", "fused", "us", "change", right=("us", "change"))
    for change in changed[:MOST_CHANGES]:
        nodes = change["by"] or change["nodes"]
        named = f"{nodes[0] if nodes else ''}{f' and {len(nodes) - 1} more' if len(nodes) > 1 else ''}"
        kernels = ["; ".join(dict.fromkeys(name[:MOST_OF_NAME] for name in change[side])) for side in ("automatic", "fused")]
        times = f"{change['automatic_us']:.1f} to {change['fused_us']:.1f}"
        style = "red" if change["us"] > 0 else "green"
        table.add_row(_text(named), *map(_text, kernels), times, _text(f"{change['us']:+.1f}", style))
    console.print(table)


def _more(count: int, console: Console) -> None:
    if count > MOST_ROWS:
        console.print(_text(f"  and {count - MOST_ROWS} more: --report writes them all"))
