"""The command line: which commands there are, and how a fault becomes one line and an exit status.

A command is one file in this folder and one line of COMMANDS. Its module is imported when the command is invoked, so
that `onnxfuse --help` answers at once and works where onnxruntime or TensorRT is broken.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from onnxfuse import __version__
from onnxfuse.commands import faults, streams


class Command(NamedTuple):
    """One line of the registry: what to type, where the function (or typer application) is, and what it is for."""

    name: str
    target: str
    help: str


COMMANDS = (
    Command("optimize", "onnxfuse.commands.optimize:optimize", "Rewrite a model with fused operators, and check it."),
    Command("build-engine", "onnxfuse.commands.build_engine:build_engine", "Build a TensorRT engine and its manifest."),
    Command("compare", "onnxfuse.commands.compare:compare", "Compare outputs and latency of models and engines."),
    Command("run", "onnxfuse.commands.run:run", "Run an engine once and show its outputs' range."),
    Command("inspect", "onnxfuse.commands.inspect:inspect", "Say what an engine, a model or a kit holds, and whether it is intact."),
    Command("export", "onnxfuse.commands.export:app", "Write an engine in the form that an inference server takes."),
    Command("explain", "onnxfuse.commands.explain:explain", "Say what would be fused, and why a node is not."),
    Command("bisect", "onnxfuse.commands.bisect:bisect", "Find the fused sites that make the outputs disagree."),
    Command("report", "onnxfuse.commands.report:app", "Show a report as a page, and what changed between two."),
    Command("verdicts", "onnxfuse.commands.verdicts:app", "List what was measured, and which fusions earn their place."),
    Command("plugins", "onnxfuse.commands.plugins:app", "List, compile and inspect the CUDA plugin library."),
    Command("doctor", "onnxfuse.commands.doctor:doctor", "Say what this machine can do, and how to get the rest."),
)


def load(command: Command) -> Any:
    """Import the command's module; returns the click command that typer makes of it."""
    module, attribute = command.target.split(":")
    target = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(command.name)(target)
        target = single
    loaded = typer.main.get_command(target)
    loaded.name = command.name
    return _naming(loaded)


def _naming(command: Any) -> Any:
    """The click command, whose parser's faults name it: click raises some of them (an option without its value) without a context."""
    parse = command.parse_args

    def parse_args(ctx: Any, args: list[str]) -> list[str]:
        try:
            return list(parse(ctx, args))
        except Exception as fault:
            if getattr(fault, "ctx", ctx) is None:
                fault.ctx = ctx  # type: ignore[attr-defined]
            raise

    command.parse_args = parse_args
    for inner in getattr(command, "commands", {}).values():
        _naming(inner)
    return command


class LazyGroup(TyperGroup):
    """A group whose help is written from the registry, and whose commands are imported when they are invoked."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {entry.name: TyperCommand(name=entry.name, help=entry.help) for entry in COMMANDS}

    def list_commands(self, ctx: Any) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as fault:
            raise faults.Stopped(fault) from fault  # click would turn both into a bare exit status

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(next(entry for entry in COMMANDS if entry.name == name)), rest


app = typer.Typer(cls=LazyGroup, name="onnxfuse", pretty_exceptions_enable=False, add_completion=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"onnxfuse {__version__}")
        raise typer.Exit


@app.callback()
def onnxfuse(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Operator fusion for TensorRT: rewrite an ONNX model, prove it right, build the engine, measure if it wins."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status. A fault becomes one line on stderr, unless ONNXFUSE_DEBUG=1."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _terminate)
    streams.prepare()
    if os.environ.get("ONNXFUSE_DEBUG") == "1":
        return _run(arguments)
    try:
        return _run(arguments)
    except SystemExit as end:  # rich's answer to a reader that went away, with a status that means something else here
        if isinstance(end.__context__, BrokenPipeError):
            return faults.report(end.__context__)
        raise
    except (Exception, KeyboardInterrupt) as fault:
        return faults.report(fault)


def _run(arguments: list[str]) -> int:
    status = typer.main.get_command(app).main(arguments, prog_name="onnxfuse", standalone_mode=False)
    sys.stdout.flush()
    return status if isinstance(status, int) else 0


def _terminate(number: int, frame: object) -> NoReturn:
    """SIGTERM, and SIGHUP of a terminal that is closed, unwind like an exception, so that half-written files are removed."""
    sys.exit(128 + number)
