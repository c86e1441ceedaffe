"""`onnxfuse report`: show reports that were written earlier, as a page or on the terminal, and what changed between two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from onnxfuse.errors import BadInput

PAGES = (".html", ".htm")


class _ShowsFiles(TyperGroup):
    """A group whose arguments are files, unless the first is the name of a command in it: `report FILE` is `report show FILE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An option of `show` may stand before the file."""
        known = {*self.commands, "--help"}
        return list(super().parse_args(ctx, ["show", *args] if args and args[0] not in known else args))


app = typer.Typer(
    cls=_ShowsFiles,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Show reports as a page or on the terminal: `onnxfuse report FILE...`, or what changed: `onnxfuse report diff A B`.",
)


@app.command()
def show(
    files: list[Path] = typer.Argument(..., metavar="FILE...", help="Reports (JSON) of optimize, compare or a benchmark, on one model."),
    out: Path | None = typer.Option(None, "-o", "--out", help="Write the page (.html), or the report in today's form (.json), instead."),
) -> None:
    """Show a report on the terminal, or write its page.

    Of several reports on one model the parts are put together: the sites of optimize, the times of compare, the kernels of a benchmark.
    """
    from onnxfuse.report import complete, inside, read, terminal

    _require_output(out, files)
    report = complete.derived(read.joined([read.load(path) for path in files]))
    if out is not None:
        _write(report, out)
        return
    terminal.show(report)
    inside.show(report)


@app.command()
def diff(
    first: Path = typer.Argument(..., metavar="FIRST", help="The earlier report."),
    second: Path = typer.Argument(..., metavar="SECOND", help="The later one."),
    out: Path | None = typer.Option(None, "-o", "--out", help="Write a page (.html) or JSON (.json) as well."),
) -> None:
    """Say what changed between two reports: decisions, latencies, accuracy, machine.

    A latency is called faster or slower only where the 95 % intervals do not touch.
    """
    from onnxfuse.report import diff as differences
    from onnxfuse.report import read, terminal

    _require_output(out, [first, second])
    found = differences.between(read.load(first), read.load(second), (str(first), str(second)))
    terminal.show_diff(found)
    if out is not None:
        _write(found, out)


def _require_output(out: Path | None, inputs: Sequence[Path]) -> None:
    """Before the work is done, not after it."""
    from onnxfuse.graph import files

    if out is None:
        return
    if out.suffix.lower() not in (*PAGES, ".json"):
        raise BadInput(f"-o {out}: the suffix says what is written; name a .html or .json file")
    if any(path.exists() and out.exists() and path.samefile(out) for path in inputs):
        raise BadInput(f"-o {out}: is one of the reports that are read; name another file")
    files.check(out, "-o")


def _write(content: dict[str, Any], out: Path) -> None:
    from onnxfuse.report import html, json
    from onnxfuse.report.summary import visible

    (html.write if out.suffix.lower() in PAGES else json.write)(content, out)
    typer.echo(f"wrote {visible(str(out))}")
