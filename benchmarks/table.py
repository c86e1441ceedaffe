"""The README's result table, made from a results file.

python -m benchmarks.table                    print the table of the newest results file
python -m benchmarks.table --write README.md  put it between the markers of README.md
python -m benchmarks.table --check README.md  status 1 where README.md says something else
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.graph.files import atomic

BEGIN, END = "<!-- results: python -m benchmarks.table -->", "<!-- /results -->"
HEAD = (
    "| model | precision, policy | sites fused | TensorRT alone, ms | onnxfuse, ms | ratio (95 % interval) | result "
    "| TensorRT's FP16 flag, ms | PyTorch graph, ms | max abs error (TensorRT alone) | cosine |"
)


def table(data: results.Results) -> str:
    """Markdown: a line on the machine, then a row each measured model. ratio is TensorRT alone over onnxfuse."""
    machine = data["machine"]
    lines = [
        f"{machine['gpu']}, driver {machine['driver']}, TensorRT {machine['tensorrt']}, {machine['date']}; a copy "
        "reaches "
        f"{_figure(machine['copy_gbps'], 0)} GB/s there, an fp16 matrix product "
        f"{_figure(machine['matmul_tflops'], 0)} TFLOP/s.",
        "",
        HEAD,
        "|" + "---|" * (HEAD.count("|") - 1),
    ]
    marks = dict.fromkeys(mark for row in data["rows"] for mark in row.get("marks", ()))
    notes = ["", "Marked rows: " + "; ".join(marks) + "."] if marks else []
    return "\n".join(lines + [_row(row) for row in data["rows"]] + notes)


def _row(row: results.Row) -> str:
    kind = f"{row['precision']}, {row['policy']}"
    if "failed" in row:
        return f"| {row['name']} | {kind} | | | | | failed: {_cell(row['failed'])} | | | | |"
    ratio = row["ratio"]
    result = row["verdict"] if row["agrees"] else "**outputs disagree**"
    if row["marks"]:
        result += " (marked)"
    if "repeat" in row:
        result += ", twice" if row["repeat"]["agrees"] else f", then {row['repeat']['outcome']}"
    cells = [
        row["name"],
        kind,
        ", ".join(f"{count} {fusion}" for fusion, count in row["sites"].items()) or "none",
        _figure(row["automatic_ms"]["median"]),
        _figure(row["fused_ms"]["median"]),
        f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
        result,
        _figure(row["others_ms"].get("trt_fp16_flag", {}).get("median")),
        _figure(row["others_ms"].get("pytorch_graph", {}).get("median")),
        f"{_error(row['max_abs'])} ({_error(row['automatic_max_abs'])})",
        f"{row['cosine']:.6f}",
    ]
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _figure(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _error(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.2g}"


def _cell(text: Any) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def placed(document: str, text: str) -> str:
    """`document` with `text` between its markers. BadInput where it has none."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(document):
        raise BadInput(f"no place for the table; put the lines {BEGIN} and {END} where it belongs")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", document, count=1)


def newest(folder: Path = results.FOLDER) -> Path:
    """The results file with the latest date; BadInput where there is none."""
    files = [(str(results.load(path)["machine"].get("date", "")), path.name, path) for path in folder.glob("*-trt*.json")]
    if not files:
        raise BadInput(f"no results in {folder}; measure with `python -m benchmarks`")
    return max(files)[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description="The README's result table.")
    parser.add_argument("file", nargs="?", type=Path, help="results file (default: the newest)")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    parser.add_argument("--check", type=Path, metavar="DOCUMENT")
    arguments = parser.parse_args(argv)
    try:
        text = table(results.load(arguments.file or newest()))
        document = arguments.write or arguments.check
        if document is None:
            print(text)
            return 0
        before = document.read_text(encoding="utf-8")
        after = placed(before, text)
        if arguments.check is not None and after != before:
            print(
                f"error: {document}: the table is not that of the results; `python -m benchmarks.table --write {document}`", file=sys.stderr
            )
            return 1
        if arguments.write is not None:
            with atomic(document) as part:
                part.write_text(after, encoding="utf-8")
    except (OnnxfuseError, OSError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return getattr(fault, "exit_status", 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
