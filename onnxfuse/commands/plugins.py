"""`onnxfuse plugins`: what the CUDA library covers, compiling it ahead of use, and what its kernels need of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxfuse.commands import options

if TYPE_CHECKING:
    from onnxfuse.plugins import Library

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="List, compile and inspect the CUDA plugin library.",
)

GpuNames = Annotated[
    list[str] | None,
    typer.Option("--gpu", metavar="NAME", help="auto, a name such as h100, or sm_NN; may be given several times; auto if not given."),
]
MoreGpus = Annotated[
    list[str] | None, typer.Argument(metavar="[GPU]...", help="Further GPUs, as in --gpu a100 h100; all is every architecture.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list")
def list_plugins(json: AsJson = False) -> None:
    """List the operators that the library implements, and the GPUs that --gpu can name."""
    from onnxfuse import gpus, plugins

    if json:
        _print_json({"schema": 1, "plugins": plugins.ops(), "gpus": gpus.GPUS})
        return
    rows = [(op.name, op.covers, ", ".join(op.dtypes), f"up to {op.max_width}" if op.max_width else "any", op.gpus) for op in plugins.ops()]
    _print_table("Plugins", ("plugin", "computes", "types", "last axis", "GPUs"), rows)
    figures = [(gpu.name, f"sm_{gpu.sm}", gpu.kind, gpu.sms, _rounded(gpu.memory_gbps), gpu.tensorrt) for gpu in gpus.GPUS]
    _print_table("GPUs", ("--gpu", "architecture", "kind", "SMs", "GB/s", "TensorRT"), figures)


@app.command()
def build(gpu: GpuNames = None, json: AsJson = False) -> None:
    """Compile the library for one or more GPUs, ahead of its first use. Needs no GPU."""
    built = _build(gpu)
    if json:
        _print_json({"schema": 1, "libraries": [_summary(library) for library in built]})
        return
    for library in built:
        typer.echo(f"sm_{library.sm}  {library.path}")


@app.command()
def inspect(
    gpu: GpuNames = None,
    more: MoreGpus = None,
    json: AsJson = False,
) -> None:
    """Show what every kernel takes of each GPU: registers, spills, memory, code, and how many of its warps fit; and where a kernel that
    suits one GPU will not suit another. Compiles what is not compiled yet."""
    from onnxfuse import occupancy

    built = _build(_every([*(gpu or ()), *(more or ())]))
    warnings = occupancy.unsuited({f"sm_{library.sm}": library.kernels for library in built})
    if json:
        libraries = [{**_summary(library), "kernels": [occupancy.figures(use) for use in library.kernels]} for library in built]
        _print_json({"schema": 1, "libraries": libraries, "warnings": warnings})
        return
    columns = ("kernel", "regs", "spills", "stack", "shared", "launch", "code", "threads", "warps", "limit")
    for library in built:
        rows = [_row(occupancy.figures(use), occupancy.is_empty(use)) for use in library.kernels if use.registers]
        _print_table(f"sm_{library.sm}, {library.compiler}{_cards(library.sm)}", columns, rows)
    typer.echo(
        "spills, stack, shared, launch, code: bytes; shared: what the compiler lays out; launch: what a launch may add to a block for its "
        "shapes while so many warps fit; warps: that a multiprocessor holds at once, of those it could; limit: what runs out"
    )
    for line in warnings:
        typer.echo(f"warning: {line}")


def _row(of: dict[str, Any], empty: bool) -> tuple[Any, ...]:
    if empty:
        return of["name"], *["-"] * 8, "not for it"
    spilled = of["spill_stores"] + of["spill_loads"]
    taken = of["registers"], spilled, of["stack"], of["smem"], of["most_launched"], of["code"], of["threads"]
    return of["name"], *taken, f"{of['occupancy']:.0%}", of["limit"]


def _cards(sm: int) -> str:
    """Some GPUs of an architecture."""
    from onnxfuse import gpus

    names = [card.name for card in gpus.of_architecture(sm)]
    return f" ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else ""


def _every(names: list[str]) -> list[str]:
    """The names given; for "all" every architecture that the compiler here and TensorRT have."""
    if "all" not in names:
        return names
    from onnxfuse import gpus, plugins

    here = plugins.find_nvcc().architectures
    return [f"sm_{sm}" for sm in gpus.architectures() if sm in here]


def _build(names: list[str] | None) -> list[Library]:
    """The libraries for the named GPUs, one for each architecture, with a progress bar on a terminal's stderr."""
    from rich.console import Console
    from rich.progress import Progress

    from onnxfuse import plugins

    wanted = [gpu for name in names or ["auto"] if (gpu := options.gpu(name))]
    console = Console(stderr=True)
    libraries = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for sm in dict.fromkeys(gpu.sm for gpu in wanted):
            task = progress.add_task(f"compiling for sm_{sm}", total=None)
            libraries.append(
                plugins.build(sm, lambda name, done, total, task=task: progress.update(task, completed=done, total=total))  # type: ignore[misc]
            )
            progress.remove_task(task)
    return libraries


def _summary(library: Library) -> dict[str, Any]:
    return {
        "sm": library.sm,
        "path": str(library.path),
        "sha256": library.sha256,
        "bytes": library.path.stat().st_size,
        "compiler": library.compiler,
        "ops": library.ops,
    }


def _rounded(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.0f}"


def _print_json(value: Any) -> None:
    import dataclasses
    import json

    typer.echo(json.dumps(value, indent=2, default=dataclasses.asdict))


_FILE_WIDTH = 120  # columns of what is written to a file or a pipe, where nothing says how wide it is shown


def _print_table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numbers = all(isinstance(row[index], int) or str(row[index]).isdigit() for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold", no_wrap=index == 0 or numbers)  # names are copied
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    console.print(table)
