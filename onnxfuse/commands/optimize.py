"""`onnxfuse optimize`: rewrite a model with fused operators, check it, and say what was done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onnxfuse.commands import options, progress
from onnxfuse.errors import BadInput, Disagreement

if TYPE_CHECKING:
    from onnxfuse.verify.check import Check


def optimize(
    model: Path = typer.Argument(metavar="MODEL", help="The ONNX model."),
    out: Path | None = typer.Option(None, "-o", "--out", help="Where to write; MODEL with the suffix .fused.onnx if not given."),
    gpu: str | None = typer.Option(None, "--gpu", help="The GPU it is for: auto, a name (h100, rtx4090, ...) or sm_NN."),
    policy: str = typer.Option(
        "proven",
        "--policy",
        help="none: clean and canonise; all: every legal site; proven: what has won by measurement; measure: what wins on the GPU here.",
    ),
    precision: str = typer.Option("keep", "--precision", help="keep, fp32, fp16 or bf16: the precision written into the model."),
    keep_fp32: list[str] = typer.Option([], "--keep-fp32", help="A node, operator type or tensor that stays in float32 (repeatable)."),
    only: list[str] = typer.Option([], "--only", help="Use this fusion, and those it is built on, alone (repeatable)."),
    skip: list[str] = typer.Option([], "--skip", help="Do not use this fusion (repeatable)."),
    plan: Path | None = typer.Option(
        None, "--plan", help="Follow the decisions of this file, a report of an earlier run; --policy decides on sites not in it."
    ),
    undo: bool = typer.Option(False, "--undo", help="Take fused nodes apart again instead."),
    data: Path | None = typer.Option(None, "--data", help="Inputs for the check: an .npz, or a folder of them; generated if not given."),
    dims: list[str] = typer.Option([], "--dims", metavar="NAME=N", help="Size of a symbolic dimension in generated inputs (repeatable)."),
    check: bool = typer.Option(True, "--check/--no-check", help="Compare with the original in onnxruntime."),
    report: list[Path] = typer.Option([], "--report", help="Write what was done, as JSON or (by the suffix) HTML (repeatable)."),
    budget: float | None = typer.Option(
        None, "--budget", metavar="MINUTES", help="--policy measure: start no further candidate after so long (15 if not given)."
    ),
    timing_cache: Path | None = typer.Option(
        None, "--timing-cache", metavar="FILE", help="--policy measure: TensorRT's timing cache; one in the user's cache if not given."
    ),
    measurements: Path | None = typer.Option(
        None, "--measurements", metavar="DIR", help="--policy measure: where results are kept; the user's cache if not given."
    ),
) -> None:
    """Rewrite a model with fused operators, and check it."""
    from onnxfuse import pipeline
    from onnxfuse.report import terminal
    from onnxfuse.report.summary import visible

    measuring = {"--budget": budget, "--timing-cache": timing_cache, "--measurements": measurements}
    settings = {"--gpu": gpu, "--plan": plan, "--only": only, "--skip": skip, "--keep-fp32": keep_fp32, "--report": report, **measuring}
    if undo:
        idle = [name for name, value in settings.items() if value]
        idle += [name for name, value, default in (("--policy", policy, "proven"), ("--precision", precision, "keep")) if value != default]
        if idle:
            raise BadInput(f"--undo takes fused nodes apart and nothing else: it has no use for {', '.join(idle)}; leave that out")
    if keep_fp32 and precision not in ("fp16", "bf16"):
        raise BadInput(f"--keep-fp32 {keep_fp32[0]}: nothing is converted with --precision {precision}; add --precision fp16 or bf16")
    _refuse_measuring(policy, measuring, plan)
    target = out or options.beside(model, ".undone.onnx" if undo else ".fused.onnx")
    _refuse_outputs(model, target, report)
    if target.is_symlink():  # the file that it leads to is written, and its external data beside that
        target = target.resolve()
    given, sizes = options.feeds(data, dims, model), options.dims(dims)
    if undo:
        with progress.status() as say, _checkable(check):
            count, checked = pipeline.undo(model, target, feeds=given, dims=sizes, check=check, progress=say)
        print(f"{visible(str(target))}: {count} fused node{'' if count == 1 else 's'} taken apart")
        _require_agreement(checked, model, target)
        return
    with progress.status() as say, _checkable(check):
        rewriting: dict[str, Any] = {"precision": precision, "keep_fp32": keep_fp32, "only": only, "skip": skip, "dims": sizes}
        if policy == "measure":
            from onnxfuse import measuring as search

            how = search.Settings(search.BUDGET_MINUTES if budget is None else budget, timing_cache, measurements)
            result = search.optimize(model, target, gpu=gpu or "auto", feeds=given, settings=how, check=check, progress=say, **rewriting)
        else:
            target_gpu = options.gpu(gpu)
            result = pipeline.optimize(
                model, target, policy=policy, gpu=target_gpu, plan=plan, feeds=given, check=check, progress=say, **rewriting
            )
    facts = result.to_dict()
    if report:
        facts = _complete(facts, model, target, gpu=policy == "measure")
    for path in report:
        _write_report(facts, path)
    terminal.show(facts)
    _require_agreement(result.check, model, target)


def _refuse_measuring(policy: str, measuring: dict[str, Any], plan: Path | None) -> None:
    """Options that say nothing with this policy, or contradict it."""
    from onnxfuse.graph import files

    idle = [name for name, value in measuring.items() if value is not None]
    if policy != "measure":
        if idle:
            raise BadInput(f"{idle[0]}: nothing is measured with --policy {policy}; add --policy measure, or leave it out")
        return
    if plan is not None:
        raise BadInput(f"--plan {plan}: says what to fuse, and --policy measure finds that out; leave one of them out")
    budget, timing_cache, measurements = measuring.values()
    if budget is not None and not 0 <= budget < float("inf"):
        raise BadInput(f"--budget {budget:g}: no time; give minutes, as in --budget 15")
    if timing_cache is not None:
        files.check(timing_cache, "--timing-cache")
    if measurements is not None and measurements.exists() and not measurements.is_dir():
        raise BadInput(f"--measurements {measurements}: is no folder; name one, which is made if need be")


@contextlib.contextmanager
def _checkable(check: bool) -> Iterator[None]:
    """A model that nothing here can run is no fault of the model: what to do instead."""
    from onnxfuse.verify.reference import CannotRun

    try:
        yield
    except CannotRun as fault:
        if not check:
            raise
        raise CannotRun(f"{fault}; leave the check out with --no-check, and compare the engine with the original") from None


def _require_agreement(checked: Check | None, model: Path, target: Path) -> None:
    if checked is not None and not checked.agrees:
        name, reason = next(iter(checked.disagreements.items()))
        raise Disagreement(f"{target}: written, but output '{name}' does not agree with {model.name}: {reason}")


def _refuse_outputs(model: Path, target: Path, reports: list[Path]) -> None:
    """Before the work is done, not after it."""
    from onnxfuse.graph import files, write

    taken = dict.fromkeys(write.data_files(model), "read by the model, whose weights are in it")
    taken[os.path.realpath(model)] = "the model itself, which is never overwritten"
    for option, path in [("-o", target), *(("--report", report) for report in reports)]:
        files.check(path, option)
        real = os.path.realpath(path)
        if real in taken:
            raise BadInput(f"{option} {path}: is {taken[real]}; name another file")
        if option != "-o" and write.is_data_of(real, Path(os.path.realpath(target))):
            raise BadInput(f"{option} {path}: is where the weights of {target} go; name another file")
        taken[real] = f"what {option} writes already"


def _complete(facts: dict[str, Any], model: Path, target: Path, gpu: bool) -> dict[str, Any]:
    """With the machine, both graphs, and what follows from them."""
    from onnxfuse.report import complete, machine

    return complete.complete({**facts, "machine": machine.describe(gpu=gpu)}, model, target)


def _write_report(facts: dict[str, Any], path: Path) -> None:
    from onnxfuse.report import html, json

    (html.write if path.suffix.lower() in (".html", ".htm") else json.write)(facts, path)
