"""`onnxfuse optimize`: rewrite a model with fused operators, check it, and say what was done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from onnxfuse.errors import BadInput, Disagreement

if TYPE_CHECKING:
    from onnxfuse.verify.reference import Feeds


def optimize(
    model: Path = typer.Argument(help="The ONNX model."),
    out: Path | None = typer.Option(None, "-o", "--out", help="Where to write; MODEL with the suffix .fused.onnx if not given."),
    gpu: str | None = typer.Option(None, "--gpu", help="The GPU it is for: auto, a name (h100, rtx4090, ...) or sm_NN."),
    policy: str = typer.Option("proven", "--policy", help="none: clean and canonise; all: every legal site; proven: what has won by measurement."),
    precision: str = typer.Option("keep", "--precision", help="keep, fp32, fp16 or bf16: the precision written into the model."),
    keep_fp32: list[str] = typer.Option([], "--keep-fp32", help="A node, operator type or tensor that stays in float32 (repeatable)."),
    only: list[str] = typer.Option([], "--only", help="Use this fusion, and those it is built on, alone (repeatable)."),
    skip: list[str] = typer.Option([], "--skip", help="Do not use this fusion (repeatable)."),
    plan: Path | None = typer.Option(None, "--plan", help="Follow the decisions of this file, a report of an earlier run."),
    undo: bool = typer.Option(False, "--undo", help="Take fused nodes apart again instead."),
    data: Path | None = typer.Option(None, "--data", help="Inputs for the check: an .npz, or a folder of them; generated if not given."),
    check: bool = typer.Option(True, "--check/--no-check", help="Compare with the original in onnxruntime."),
    report: list[Path] = typer.Option([], "--report", help="Write what was done as JSON, or as HTML where the file ends in .html (repeatable)."),
) -> None:
    """Rewrite a model with fused operators, and check it."""
    from onnxfuse import pipeline
    from onnxfuse.commands import progress
    from onnxfuse.report import terminal

    target = out or model.with_suffix(".undone.onnx" if undo else ".fused.onnx")
    _refuse_outputs(model, target, report)
    feeds = _feeds(data, model)
    if undo:
        _undo(model, target, feeds, check)
        return
    with progress.status() as say:
        result = pipeline.optimize(
            model,
            target,
            policy=policy,
            precision=precision,
            gpu=resolve_gpu(gpu),
            only=only,
            skip=skip,
            plan=plan,
            keep_fp32=keep_fp32,
            feeds=feeds,
            check=check,
            progress=say,
        )
    facts = result.to_dict()
    for path in report:
        _write_report(facts, path)
    terminal.show(facts)
    if not result.agrees:
        assert result.check is not None
        name, reason = next(iter(result.check.disagreements.items()))
        raise Disagreement(f"{target}: written, but output '{name}' does not agree with {model.name}: {reason}")


def _undo(model: Path, target: Path, feeds: list[Feeds] | None, check: bool) -> None:
    from onnxfuse import pipeline
    from onnxfuse.commands import progress

    with progress.status() as say:
        count, checked = pipeline.undo(model, target, feeds=feeds, check=check, progress=say)
    print(f"{target}: {count} fused node{'' if count == 1 else 's'} taken apart")
    if checked is not None and not checked.agrees:
        name, reason = next(iter(checked.disagreements.items()))
        raise Disagreement(f"{target}: written, but output '{name}' does not agree with {model.name}: {reason}")


def resolve_gpu(name: str | None):  # type: ignore[no-untyped-def]  # the type would import the table for --help
    if name is None:
        return None
    from onnxfuse import gpus

    return gpus.resolve(name)


def _feeds(data: Path | None, model: Path) -> list[Feeds] | None:
    from onnxfuse.verify import inputs

    return None if data is None else inputs.from_data(data, model)


def _refuse_outputs(model: Path, target: Path, reports: list[Path]) -> None:
    """Before the work is done, not after it."""
    for option, path in [("-o", target), *(("--report", report) for report in reports)]:
        if path.resolve() == model.resolve():
            raise BadInput(f"{option} {path}: is the model itself, which is never overwritten; name another file")
        if path.is_dir():
            raise BadInput(f"{option} {path}: is a folder; name a file")
        if not path.parent.is_dir():
            raise BadInput(f"{option} {path}: there is no folder {path.parent}; make it first")


def _write_report(facts: dict[str, object], path: Path) -> None:
    from onnxfuse.report import html, json

    (html.write if path.suffix.lower() in (".html", ".htm") else json.write)(facts, path)
