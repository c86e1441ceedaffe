"""`onnxfuse explain`: what would be fused, and why a node is not. Nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from onnxfuse.errors import BadInput


def explain(
    model: Path = typer.Argument(help="The ONNX model."),
    why_not: str | None = typer.Option(None, "--why-not", help="A node or tensor: what every fusion that could hold it missed."),
    policy: str = typer.Option("all", "--policy", help="none, all or proven: who decides on the sites."),
    gpu: str | None = typer.Option(None, "--gpu", help="The GPU whose verdicts count."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    """Say what would be fused, and why a node is not."""
    from onnxfuse import gpus, pipeline
    from onnxfuse.report import terminal

    if why_not is not None:
        answers = pipeline.why_not(model, why_not)
        if answers is None:
            raise BadInput(f"--why-not {why_not}: {model} has no such node or tensor; `onnxfuse explain {model} --json` lists what there is")
        if as_json:
            print(json.dumps([vars(answer) for answer in answers], indent=2))
        else:
            terminal.show_why_not(why_not, [vars(answer) for answer in answers])
        return
    result = pipeline.optimize(model, None, policy=policy, gpu=None if gpu is None else gpus.resolve(gpu))
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        terminal.show_optimize(result.to_dict())
