"""Reports on the terminal. Names from a model file are printed as text: markup and control characters in them do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxfuse.report import axes, summary

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
    for sentence in summary.inside(report) if "inside" in report else ():
        console.print(_text(f"  inside {sentence}"))
    for axis in report.get("axes") or ():
        console.print(_text(f"  {axis['name']}: {axis['answer']}"))
    _rows(report, console)
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
    if report.get("converted"):
        console.print(_text(f"  precision: {summary.precision(report['converted'])}"))
    for note in report.get("notes") or ():
        console.print(_text(f"  note: {note}"))


def _sites(report: Mapping[str, Any], console: Console) -> None:
    found = summary.groups(report)
    if not found:
        console.print(_text("  no fusion has a site in this model"))
        return
    table = _table("Sites", "fusion", "fused", "kept", "why", right=("fused", "kept"))
    for group in found:
        reasons = dict.fromkeys(str(site["reason"]) for site in group.sites if site["reason"] and _worth_saying(site))
        why = "; ".join(list(reasons)[:3]) + (f"; {len(reasons) - 3} more reasons" if len(reasons) > 3 else "")
        table.add_row(_text(group.fusion), str(group.fused), str(group.kept), _text(why))
    console.print(table)


def _worth_saying(site: Mapping[str, Any]) -> bool:
    """Why a site was kept; why it was fused where that rests on a measurement, which may be an estimate from elsewhere."""
    return site["decision"] != "fused" or str(site["reason"]).startswith(("won", "estimate"))


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
        share = summary.percent(metrics["used"]) if metrics.get("used") is not None else "over" if "used" in metrics else ""
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


def _rows(report: Mapping[str, Any], console: Console) -> None:
    """The models of a benchmark, or its kernels' best share of a copy."""
    rows = report.get("rows") or ()
    if rows:
        columns = ("model", "precision, policy", "automatic ms", "fused ms", "ratio", "")
        table = _table("Models", *columns, right=columns[2:5])
        for row in rows[:MOST_ROWS]:
            if "failed" in row:
                table.add_row(_text(row["name"]), _text(row["precision"]), "", "", "", _text(row["failed"], "red"))
                continue
            word = row.get("verdict", "")
            times = [f"{row[key]['median']:.4g}" if row.get(key) else "–" for key in ("automatic_ms", "fused_ms")]
            ratio = axes.interval(row["ratio"]) if row.get("ratio") else "–"
            table.add_row(
                _text(row["name"]), _text(f"{row['precision']}, {row.get('policy', '')}"), *times, ratio, _text(word, STYLES.get(word, ""))
            )
        console.print(table)
        _more(len(rows), console)
    best: dict[tuple[str, str], float] = {}
    for point in (report.get("roofline") or {}).get("points") or ():
        key = point["kernel"], point["dtype"]
        best[key] = max(best.get(key, 0.0), point.get("share_of_copy") or 0.0)
    if best:
        table = _table("Kernels", "kernel", "type", "best share of a copy", right=("best share of a copy",))
        for (kernel, dtype), share in best.items():
            table.add_row(_text(kernel), _text(dtype), summary.percent(share))
        console.print(table)


STYLES = {"faster": "green", "slower": "red", "now agrees": "green", "no longer agrees": "red"}
UNITS = {"ms": " ms", "us": " µs", "ratio": "×"}


def show_diff(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what changed between two reports, as made by `report.diff`."""
    from rich.console import Console

    console = console or Console()
    mark, style = {True: ("✓", "bold green"), False: ("✗", "bold red"), None: ("·", "bold")}[found["verdict"]["good"]]
    console.print(_text(f"{mark} {found['verdict']['headline']}", style))
    for note in found["notes"]:
        console.print(_text(f"  note: {note}"))
    _changes("Machine and settings", ("what", "first", "second"), [[f["what"], f["first"], f["second"]] for f in _facts(found)], console)
    times = [
        [f"{entry['name']},{UNITS[entry['unit']]}", _spread(entry["first"]), _spread(entry["second"]), entry["verdict"]]
        for entry in found["latencies"]
    ]
    _changes("Latency", ("what", "first", "second", ""), times, console)
    sites = [entry for kind in ("changed", "added", "removed") for entry in found["sites"][kind]]
    decided = [[f"{site['fusion']} at {site['output']}", *(_decided(site.get(side)) for side in ("first", "second"))] for site in sites]
    _changes("Sites and decisions", ("site", "first", "second"), decided, console)
    errors = [[e["name"], *(summary.figure(e[side]["max_abs"]) for side in ("first", "second")), e["verdict"]] for e in found["accuracy"]]
    _changes("Accuracy, max abs", ("what", "first", "second", ""), errors, console)


def _facts(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*found["machine"], *found["settings"]]


def _spread(interval: Mapping[str, float] | None) -> str:
    return "–" if interval is None else f"{interval['median']:.4g} [{interval['low']:.4g}, {interval['high']:.4g}]"


def _decided(side: Mapping[str, str] | None) -> str:
    return "–" if side is None else f"{side['decision']}: {side['reason']}" if side["reason"] else side["decision"]


def _changes(title: str, columns: tuple[str, ...], rows: list[list[Any]], console: Console) -> None:
    if not rows:
        return
    table = _table(title, *columns)
    for row in rows[:MOST_ROWS]:
        table.add_row(*(_text("–" if cell is None else cell, STYLES.get(str(cell), "")) for cell in row))
    console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(_text(f"  and {len(rows) - MOST_ROWS} more: -o FILE.json or FILE.html writes them all"))


def _more(count: int, console: Console) -> None:
    if count > MOST_ROWS:
        console.print(_text(f"  and {count - MOST_ROWS} more: --report writes them all"))
