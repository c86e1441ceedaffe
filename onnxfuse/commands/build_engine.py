"""`onnxfuse build-engine`: a TensorRT engine and its manifest."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from onnxfuse.errors import BadInput

if TYPE_CHECKING:
    from onnxfuse.engine.build import ProgressCallback, Step
    from onnxfuse.engine.manifest import Manifest


def build_engine(
    model: Path = typer.Argument(..., metavar="MODEL", help="ONNX model, optimized or not."),
    output: Optional[Path] = typer.Option(  # noqa: UP045  (typer reads this on Python 3.10)
        None, "-o", "--out", metavar="ENGINE", help="Engine to write; MODEL with the suffix .engine if not given."
    ),
    gpu: str = typer.Option("auto", "--gpu", metavar="NAME", help="The GPU to build for: auto, a name (h200), or sm_NN."),
    shapes: list[str] = typer.Option(
        [], "--shapes", metavar="NAME:MIN..OPT..MAX", help="Shapes of a dynamic input, e.g. ids:1x16..8x128..32x512; repeat it."
    ),
    timing_cache: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--timing-cache", metavar="FILE", help="Read where it exists, written after: the next build is faster."
    ),
    embed_plugins: bool = typer.Option(
        True, "--embed-plugins/--no-embed-plugins", help="Put the plugin library into the engine, or beside it as ENGINE.plugins.so."
    ),
    no_plugins: bool = typer.Option(False, "--no-plugins", help="Build what TensorRT makes alone: fused operators are taken apart again."),
    compatible: Optional[str] = typer.Option(  # noqa: UP045
        None, "--compatible", metavar="ampere+", help="Build an engine that also runs on other GPUs: ampere+, every one from sm_80 on."
    ),
    kit: Optional[Path] = typer.Option(  # noqa: UP045
        None,
        "--kit",
        metavar="DIR",
        help="For a GPU that is not here: write all that its machine needs to build, check and time, and build nothing.",
    ),
    original: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--original", metavar="MODEL", help="With --kit: the model whose outputs are the right ones, if not MODEL itself."
    ),
    data: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--data", metavar="FILE.npz", help="With --kit: inputs to check with (a file or a folder of them); made up if not given."
    ),
) -> None:
    """Build a TensorRT engine for the GPU here, and ENGINE.json, which says what it was made of and what TensorRT made of it."""
    from onnxfuse.commands import options
    from onnxfuse.engine import build as building

    _refuse_mixtures(kit, {"-o": output, "--timing-cache": timing_cache}, {"--original": original, "--data": data})
    hardware = building.compatibility(compatible)
    if kit is not None:
        _make_kit(kit, model, gpu, shapes=shapes, original=original, data=data, compatible=hardware, use_plugins=not no_plugins)
        return
    out = output if output is not None else options.beside(model, ".engine")
    with _progress() as progress:
        manifest = building.build(
            model,
            out,
            gpu=gpu,
            shapes=shapes,
            timing_cache=timing_cache,
            embed_plugins=embed_plugins,
            use_plugins=not no_plugins,
            compatible=hardware,
            progress=progress,
        )
    for line in summary(manifest, out):
        typer.echo(line)


def _refuse_mixtures(kit: Path | None, engine_options: Mapping[str, object], kit_options: Mapping[str, object]) -> None:
    for option, value in (engine_options if kit is not None else kit_options).items():
        if value is not None:
            reason = "a kit builds elsewhere" if kit is not None else "it says what a kit is checked with"
            remedy = f"leave {option} off" if kit is not None else "give --kit DIR with it"
            raise BadInput(f"{option}: {reason}; {remedy}")


def _make_kit(folder: Path, model: Path, name: str, **settings: Any) -> None:
    from onnxfuse.commands import options
    from onnxfuse.commands.progress import status
    from onnxfuse.kit.make import make

    gpu = options.gpu(name)
    assert gpu is not None
    with status() as progress:
        made = make(model, folder, gpu=gpu, progress=progress, **settings)
    compatible = settings["compatible"] is not None
    target, code = ("every GPU from sm_80 on", "sm_80 and newer") if compatible else (made.gpu.name, f"sm_{made.gpu.sm}")
    plugins = f"plugins {', '.join(made.plugins)} for {code}" if made.plugins else "no plugins"
    typer.echo(f"{folder}: kit for {target}, {made.size / 1e6:.1f} MB: {plugins}; {made.cases} inputs with their outputs")
    for line in made.notes:
        typer.echo(line)
    script = shlex.quote(str(Path(folder.name) / "kit.py"))
    machine = "a machine with such a GPU" if compatible else "a machine with that GPU"
    typer.echo(f"on {machine}, tensorrt and numpy: python3 {script} --sha256 {made.sha256}")


def summary(manifest: Manifest, out: Path) -> list[str]:
    """What was built, in a few lines."""
    precisions = ", ".join(f"{count} {name}" for name, count in manifest.precisions.items())
    lines = [
        f"{out}: {manifest.engine_bytes / 1e6:.1f} MB, built in {manifest.build_seconds:.0f} s "
        f"with TensorRT {manifest.tensorrt} on {manifest.gpu}",
        f"layers: {len(manifest.layers)}" + (f" ({precisions})" if precisions else ""),
    ]
    if manifest.plugins is not None:
        where = "embedded in the engine" if manifest.plugins.embedded else f"beside it in {manifest.plugins.file}"
        lines.append(f"plugins: {', '.join(manifest.plugins.ops)}, {where}")
    lines += manifest.notes
    return lines


@contextlib.contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """Shows the builder's phases on stderr while they last; silent where stderr is no terminal."""
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}
        depth: dict[str, int] = {}
        lock = threading.Lock()

        def show(step: Step) -> None:
            with lock:
                if step.finished:
                    depth.pop(step.phase, None)
                    if step.phase in tasks:
                        bar.remove_task(tasks.pop(step.phase))
                    return
                if step.phase not in tasks:
                    depth[step.phase] = depth.get(step.parent or "", -1) + 1
                    tasks[step.phase] = bar.add_task("  " * depth[step.phase] + step.phase, total=step.steps)
                bar.update(tasks[step.phase], completed=step.done)

        yield show
