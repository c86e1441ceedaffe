"""`onnxfuse export`: an engine in the form that an inference server takes."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Write an engine in the form that an inference server takes.")


@app.callback()
def export() -> None:
    """Write an engine in the form that an inference server takes."""


@app.command()
def triton(
    engine: Path = typer.Argument(..., metavar="ENGINE", help="The engine, with its manifest beside it."),
    repository: Path = typer.Argument(..., metavar="DIR", help="Triton's model repository; the model is a new folder in it."),
    name: Optional[str] = typer.Option(  # noqa: UP045  (typer reads this on Python 3.10)
        None, "--name", metavar="NAME", help="The model's name in Triton; the engine's if not given."
    ),
    batching: Optional[bool] = typer.Option(  # noqa: UP045
        None, "--batching/--no-batching", help="Let Triton batch requests; if not given, wherever the engine's shapes allow it."
    ),
) -> None:
    """Add an engine to a model repository of Triton Inference Server: config.pbtxt, model.plan, and the plugin library if it is apart."""
    import shlex

    from onnxfuse.servers.triton import export as write

    done = write(engine, repository, name=name, batching=batching)
    batches = f"batches of up to {done.max_batch}" if done.max_batch else "no batching"
    typer.echo(f"{done.folder}: config.pbtxt and 1/model.plan, {batches}")
    for note in done.notes:
        typer.echo(f"note: {note}")
    command = ["tritonserver", f"--model-repository={repository.absolute()}", *([done.option] if done.option else [])]
    typer.echo(shlex.join(command))
