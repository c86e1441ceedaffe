"""Times `onnxfuse optimize` without its check against other ONNX rewriters; writes benchmarks/results/rewriters.json and .md.

    python -m benchmarks.rewriters                     every tool that is installed, the trained models and the synthetic giants
    python -m benchmarks.rewriters --models minilm-int8 nodes-20000 --tools onnxfuse "onnx.load + onnx.save"
    python -m benchmarks.rewriters --table             write the tables again from the results file, measure nothing

Each measurement is a process of its own (benchmarks/one_rewrite.py), and the tools take turns within each round. The others come with
`pip install '.[bench]'`; models/fetch brings the trained models.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx

from benchmarks import results, synthetic
from benchmarks.one_rewrite import PACKAGES, TOOLS
from benchmarks.suite import ROOT
from models.catalog import MODELS
from onnxfuse.graph.files import atomic

FILE = results.FOLDER / "rewriters.json"
FLOOR, OURS = "onnx.load + onnx.save", "onnxfuse"
NODES = (2_000, 6_000, 20_000)
EXTERNAL = "external-2.5GB"
EXTERNAL_BYTES = 2_500_000_000

Row = dict[str, Any]


def models(folder: Path, wanted: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Names and files: the trained models that are here, and synthetic ones, made in `folder`."""
    for model in MODELS:
        if model.path.is_file() and (not wanted or model.name in wanted):
            yield model.name, model.path
    for nodes in NODES:
        if not wanted or f"nodes-{nodes}" in wanted:
            path = folder / f"nodes-{nodes}.onnx"
            onnx.save(synthetic.by_nodes(nodes), path)
            yield path.stem, path
    if not wanted or EXTERNAL in wanted:
        path = folder / f"{EXTERNAL}.onnx"
        synthetic.by_bytes(path, EXTERNAL_BYTES)
        yield EXTERNAL, path


def one(tool: str, path: Path, timeout: float) -> Row:
    """One measurement in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="rewritten-", dir=path.parent if os.access(path.parent, os.W_OK) else None) as folder:
        command = [sys.executable, "-m", "benchmarks.one_rewrite", tool, str(path), str(Path(folder) / "out.onnx")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False)
        except subprocess.TimeoutExpired:
            return {"timeout": timeout}
    try:
        row: Row = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"failed": f"status {done.returncode}" + (f": {lines[-1][:200]}" if lines else "")}
    return row


def measure(name: str, path: Path, tools: Sequence[str], rounds: int, timeout: float, slow: dict[str, str]) -> list[Row]:
    """Rows of one model, a tool each. A tool that took long is not run again; what `slow` names is not run at all."""
    runs: dict[str, list[Row]] = {tool: [] for tool in tools}
    for number in range(rounds):
        for tool in tools if number % 2 == 0 else tools[::-1]:
            done = runs[tool]
            if tool in slow or (done and ("seconds" not in done[-1] or done[-1]["seconds"] > timeout / 10)):
                continue
            done.append(one(tool, path, timeout))
            print(f"{name}: {tool}: {_brief(done[-1])}", file=sys.stderr, flush=True)
    proto = onnx.load(path, load_external_data=False)
    data = path.with_name(f"{path.name}.data")
    fixed = {
        "model": name,
        "nodes_before": _count(proto.graph),
        "bytes": path.stat().st_size + (data.stat().st_size if data.exists() else 0),
    }
    return [fixed | {"tool": tool} | ({"skipped": slow[tool]} if tool in slow else _summary(runs[tool])) for tool in tools]


def _count(graph: onnx.GraphProto) -> int:
    return sum(1 + sum(_count(attribute.g) for attribute in node.attribute) for node in graph.node)


def _brief(row: Row) -> str:
    return f"{row['seconds']:.3f} s" if "seconds" in row else str(row)


def _summary(runs: Sequence[Row]) -> Row:
    """Medians of the runs that ended; the last one's verdict."""
    good = [run for run in runs if "seconds" in run]
    if not good:
        return dict(runs[-1])
    medians = {key: statistics.median(run[key] for run in good) for key in ("seconds", "cpu_seconds", "peak_bytes")}
    return {**good[-1], **medians, "runs": len(good)}


def run(arguments: argparse.Namespace) -> int:
    tools = [tool for tool in TOOLS if not arguments.tools or tool in arguments.tools]
    slow: dict[str, str] = {}
    rows: list[Row] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.work) as folder:
        for name, path in models(Path(folder), arguments.models):
            slow = slow if name.startswith("nodes-") else {}
            rows += measure(name, path, tools, arguments.rounds, arguments.timeout, slow)
            late = [row["tool"] for row in rows if row["model"] == name and "timeout" in row]
            slow = slow | dict.fromkeys(late, f"over {arguments.timeout:.0f} s at {name}")  # larger ones of the kind are not tried
            _save(arguments, load, tools, rows)  # an interrupted run keeps what it has measured
    print(_tabulate(arguments.out))
    return 0


def _tabulate(file: Path) -> str:
    """Writes the tables of a results file beside it."""
    text = table(json.loads(file.read_text(encoding="utf-8")))
    with atomic(file.with_suffix(".md")) as part:
        part.write_text(text + "\n", encoding="utf-8")
    return text


def _save(arguments: argparse.Namespace, load: float, tools: Sequence[str], rows: Sequence[Row]) -> None:
    data = {
        "schema": results.SCHEMA,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "rounds": arguments.rounds,
        "versions": {tool: version for tool in tools if (version := _version(tool))},
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic(arguments.out) as part:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _version(tool: str) -> str | None:
    try:
        return metadata.version(PACKAGES.get(tool, tool.split()[0]))
    except metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------------------- table


def table(data: dict[str, Any]) -> str:
    """Markdown: the machine, one line a tool over all models, then each model."""
    before, after = data["load"]
    lines = [
        "# ONNX rewriters",
        "",
        "Made by `python -m benchmarks.rewriters`; [benchmarks/README.md](../README.md#rewriters) says what is measured.",
        "",
        f"{data['machine']}, {data['date']}; load {before:g} before, {after:g} after; medians of up to {data['rounds']} fresh processes.",
        "Versions: " + ", ".join(f"{tool} {version}" for tool, version in data["versions"].items()) + ".",
        "",
        "## Overview",
        "",
        *_overview(data["rows"]),
        "",
        "## Each model",
        "",
        *_details(data["rows"]),
    ]
    return "\n".join(lines)


def _overview(rows: Sequence[Row]) -> list[str]:
    names = {model.name for model in MODELS}
    sizes = [f"nodes-{nodes}" for nodes in NODES]
    lines = [
        "| tool | time / load + save, trained models: geometric mean (least to most) | CPU µs a node at "
        + " / ".join(f"{nodes:,}" for nodes in NODES)
        + f" | seconds at {NODES[-1]:,} | peak memory / bytes of a {EXTERNAL.removeprefix('external-')} model | failed or invalid |",
        "|" + "---|" * 6,
    ]
    for tool in dict.fromkeys(row["tool"] for row in rows):
        own = {row["model"]: row for row in rows if row["tool"] == tool}
        ratios = [ratio for name, row in own.items() if name in names and (ratio := _ratio(row, rows)) is not None]
        mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None
        spread = "-" if mean is None else f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        bad = sum(1 for row in own.values() if "failed" in row or row.get("invalid"))
        cells = [
            tool,
            spread if all("missing" not in row for row in own.values()) else "not installed",
            " / ".join(_micros(own.get(name, {})) for name in sizes),
            _seconds(own.get(sizes[-1], {})),
            _memory(own.get(EXTERNAL, {})),
            str(bad),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _details(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| model (nodes, MB) | tool | seconds | / load + save | CPU µs a node | peak memory / model | nodes left | onnx.checker |",
        "|" + "---|" * 8,
    ]
    for row in rows:
        ratio = _ratio(row, rows)
        what = f"{row['model']} ({row['nodes_before']:,}, {row['bytes'] / 1e6:,.1f})"
        if "seconds" in row:
            verdict = "valid" if row["invalid"] is None else row["invalid"].replace("|", "/")
            shown = "-" if ratio is None else f"{ratio:.2f}"
            cells = [what, row["tool"], _seconds(row), shown, _micros(row), _memory(row), f"{row['nodes']:,}", verdict]
        else:
            cells = [what, row["tool"], _seconds(row), "-", "-", "-", "-", "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _ratio(row: Row, rows: Sequence[Row]) -> float | None:
    floor = next((other for other in rows if other["model"] == row["model"] and other["tool"] == FLOOR), {})
    return float(row["seconds"] / floor["seconds"]) if "seconds" in row and "seconds" in floor else None


def _seconds(row: Row) -> str:
    if "seconds" in row:
        return f"{row['seconds']:.3f}" if row["seconds"] < 10 else f"{row['seconds']:.0f}"
    if "timeout" in row:
        return f"over {row['timeout']:.0f}"
    if "missing" in row:
        return f"{row['missing']} is not installed"
    return str(row.get("skipped") or row.get("failed") or "-").replace("|", "/")


def _micros(row: Row) -> str:
    return f"{1e6 * row['cpu_seconds'] / row['nodes_before']:,.0f}" if "cpu_seconds" in row else "-"


def _memory(row: Row) -> str:
    return f"{row['peak_bytes'] / row['bytes']:.2f}" if "peak_bytes" in row else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewriters", description="Time ONNX rewriters against each other.")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=[], metavar="TOOL", help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="names of trained models, nodes-N, or " + EXTERNAL)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each tool on each model (default: 3)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a run is given up (default: 60)")
    parser.add_argument("--out", type=Path, default=FILE, help="results file")
    parser.add_argument("--work", type=Path, default=None, help="folder for synthetic models (6 GB are needed; default: the temporary one)")
    parser.add_argument("--table", action="store_true", help="write the tables again from the results file, measure nothing")
    arguments = parser.parse_args(argv)
    if arguments.table:
        print(_tabulate(arguments.out))
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
