"""`onnxfuse verdicts`: what was measured about the fusions, and which of them still earn their place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxfuse.commands import options
from onnxfuse.errors import BadInput

if TYPE_CHECKING:
    from onnxfuse.plan.advice import Advice
    from onnxfuse.plan.store import Contents
    from onnxfuse.plan.verdicts import Verdict

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="List what was measured about the fusions, and which still earn their place.",
)

GpuName = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Only of this GPU: auto, a name such as h100, or sm_NN.")]
FusionName = Annotated[str | None, typer.Option("--fusion", metavar="NAME", help="Only of this fusion.")]


@app.callback(invoke_without_command=True)
def verdicts(
    context: typer.Context,
    gpu: GpuName = None,
    fusion: FusionName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List what was measured about the fusions, and which still earn their place."""
    if context.invoked_subcommand is not None:
        if gpu or fusion or as_json:
            raise BadInput(f"options go behind {context.invoked_subcommand}, as in `onnxfuse verdicts forget --gpu h200`")
        return
    from onnxfuse.fusions import NAMES
    from onnxfuse.plan import store
    from onnxfuse.plan.advice import advise

    contents = store.load()
    _warn(contents.problems)
    wanted = _Filter(contents.verdicts, gpu, fusion)
    found = [verdict for verdict in contents.verdicts if wanted.takes(verdict)]
    # A fusion may lose on the GPU that is asked for and win on another: that is no reason to leave it everywhere.
    advice = [one for one in advise(contents.verdicts, NAMES) if wanted.concerns(one)]
    if as_json:
        _print_json(contents, found, advice)
    else:
        _print_tables(found, advice)


@app.command()
def forget(
    gpu: GpuName = None,
    fusion: FusionName = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Remove verdicts that were measured here. Those that ship with onnxfuse stay."""
    from onnxfuse.plan import store

    if everything == bool(gpu or fusion):
        raise BadInput("say which verdicts to forget: --gpu, --fusion or both, or --all alone")
    contents = store.load()
    wanted = _Filter(contents.verdicts, gpu, fusion)
    count, problems = store.forget(wanted.takes)
    _warn((*contents.problems, *problems))
    shipped = sum(map(wanted.takes, contents.shipped))
    stay = f"; {shipped} that ship{'s' if shipped == 1 else ''} with onnxfuse stay{'s' if shipped == 1 else ''}" if shipped else ""
    print(f"{count} verdict{'' if count == 1 else 's'} forgotten{stay}")


class _Filter:
    """What the user asks about. BadInput for a GPU that nobody knows, or a fusion that this version lacks and no verdict is of."""

    def __init__(self, verdicts: Sequence[Verdict], gpu: str | None, fusion: str | None) -> None:
        from onnxfuse.fusions import NAMES

        named = options.gpu(gpu)
        self.gpu = named.name if named else None
        self.fusion = fusion
        known = dict.fromkeys((*NAMES, *(verdict.fusion for verdict in verdicts)))
        if fusion is not None and fusion not in known:
            raise BadInput(f"--fusion {fusion}: no such fusion; there are {', '.join(known)}")

    def takes(self, verdict: Verdict) -> bool:
        return self.gpu in (None, verdict.gpu) and self.fusion in (None, verdict.fusion)

    def concerns(self, advice: Advice) -> bool:
        return (advice.gpu is None or self.gpu in (None, advice.gpu)) and self.fusion in (None, advice.fusion)


def _warn(problems: Sequence[str]) -> None:
    from onnxfuse.commands.faults import one_line

    for problem in problems:
        print(f"warning: {one_line(problem)}", file=sys.stderr)


def _print_json(contents: Contents, found: Sequence[Verdict], advice: Sequence[Advice]) -> None:
    import dataclasses
    import json

    from onnxfuse.plan import store

    rows = [{**verdict.to_dict(), "outcome": verdict.outcome, "origin": verdict.origin} for verdict in found]
    facts = {
        "schema": store.SCHEMA,
        "file": str(store.user_file()),
        "verdicts": rows,
        "advice": [dataclasses.asdict(one) for one in advice],
        "problems": list(contents.problems),
    }
    print(json.dumps(facts, indent=2))


def _print_tables(found: Sequence[Verdict], advice: Sequence[Advice]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from onnxfuse.report.summary import visible

    console = Console()
    if not found:
        print("no verdicts; `onnxfuse optimize MODEL --policy measure` measures some, on a machine with a GPU")
        return
    for place in sorted({_place(verdict) for verdict in found}):
        gpu, tensorrt = place[0], ".".join(map(str, place[1]))
        table = Table(title=f"{gpu}, TensorRT {tensorrt}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("fusion", "rows x width", "ratio (95 % interval)", "model", "from"):
            table.add_column(column, overflow="fold", min_width=12)
        for verdict in sorted((one for one in found if _place(one) == place), key=_order):
            table.add_row(*map(Text, map(visible, _cells(verdict))), style=_STYLES[verdict.outcome])
        console.print(table)
    for one in advice:
        console.print(Text(visible(f"{one.fusion}: {one.text}"), style=_ADVICE_STYLES.get(one.kind, "")), soft_wrap=True)


_STYLES = {"won": "green", "lost": "red", "draw": ""}
_ADVICE_STYLES = {"retire": "yellow", "unknown": "yellow"}


def _place(verdict: Verdict) -> tuple[str, tuple[int, ...]]:
    from onnxfuse.plan.verdicts import release

    return verdict.gpu, release(verdict.tensorrt)


def _order(verdict: Verdict) -> tuple[Any, ...]:
    return verdict.fusion, verdict.dtype, verdict.width, verdict.rows, verdict.model, verdict.driver


def _what(verdict: Verdict) -> str:
    variant = f" ({verdict.variant})" if verdict.variant else ""
    beside = f" beside {', '.join(verdict.beside)}" if verdict.beside else ""
    return f"{verdict.fusion}{variant}{beside}"


def _cells(verdict: Verdict) -> tuple[str, ...]:
    return (
        _what(verdict),
        f"{verdict.rows or '?'} x {verdict.width or '?'} {verdict.dtype}",
        f"{verdict.outcome}: {verdict.ratio.median:.3f} ({verdict.ratio.low:.3f} to {verdict.ratio.high:.3f})",
        verdict.model,
        f"{verdict.origin}, {verdict.date[:10]}",
    )
