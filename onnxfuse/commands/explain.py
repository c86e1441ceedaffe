"""`onnxfuse explain`: what would be fused, and why a node is not. Nothing is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from onnxfuse.commands import options
from onnxfuse.errors import BadInput

if TYPE_CHECKING:
    from onnxfuse.pipeline import Answer


def explain(
    model: Path = typer.Argument(metavar="MODEL", help="The ONNX model."),
    why_not: str | None = typer.Option(None, "--why-not", help="A node or tensor: what every fusion that could hold it missed."),
    policy: str = typer.Option("all", "--policy", help="none, all or proven: who decides on the sites."),
    gpu: str | None = typer.Option(None, "--gpu", help="The GPU whose verdicts count."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    """Say what would be fused, and why a node is not."""
    from onnxfuse import pipeline
    from onnxfuse.report import terminal

    if why_not is not None:
        answers = pipeline.why_not(model, why_not)
        if answers is None:
            raise BadInput(f"--why-not {why_not}: {model} has no such node or tensor; take a name from `onnxfuse explain {model} --json`")
        if as_json:
            print(json.dumps([vars(answer) for answer in answers], indent=2))
        else:
            _print_answers(why_not, answers)
        return
    result = pipeline.optimize(model, None, policy=policy, gpu=options.gpu(gpu))
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        terminal.show(result.to_dict())


def _print_answers(name: str, answers: Sequence[Answer]) -> None:
    """The closest fusion first; each with how many nodes fitted, and what ended it."""
    from onnxfuse.report.summary import visible

    if not answers:
        print(f"no fusion begins at or near '{visible(name)}'; an input, a constant and what cleaning takes out are no part of one")
    for answer in answers:
        fitted = f"{len(answer.nodes)} node{'' if len(answer.nodes) == 1 else 's'} fitted, from {answer.root}"
        print(visible(f"{'+' if answer.fits else '-'} {answer.fusion} ({fitted}): {answer.reason}"))
