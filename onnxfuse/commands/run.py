"""`onnxfuse run`: a quick look at what an engine computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import typer

from onnxfuse.errors import BadInput

if TYPE_CHECKING:
    from onnxfuse.engine.run import Engine


class Look(NamedTuple):
    """One tensor in a few figures; minimum, maximum and mean are of the finite values, None where there are none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float | None
    maximum: float | None
    mean: float | None
    nans: int
    infinities: int


def run(
    engine: Path = typer.Argument(..., metavar="ENGINE", help="The engine to run, with its manifest beside it."),
    data: Path = typer.Option(..., "--data", metavar="FILE.npz", help="The inputs: arrays named like the engine's inputs."),
    output: Optional[Path] = typer.Option(  # noqa: UP045  (typer reads this on Python 3.10)
        None, "-o", "--out", metavar="FILE.npz", help="Write the outputs here; bfloat16 is written as float32."
    ),
    trust: bool = typer.Option(False, "--trust", help="Run code inside the engine although no manifest vouches for it: as any program."),
) -> None:
    """Run an engine once, and show shape, range and mean of every output, and how many values are NaN."""
    from onnxfuse.engine.run import Engine
    from onnxfuse.graph import files

    if output is not None:
        files.check(output, "-o")
    feeds = _read(data)
    with Engine.load(engine, trust=trust) as loaded:
        for line in loaded.changed:
            typer.echo(f"note: {line}", err=True)
        outputs = loaded.run(_fitting(feeds, loaded, data))
    _show([look(name, array) for name, array in outputs.items()])
    if output is not None:
        _write(outputs, output)


def look(name: str, array: Any) -> Look:
    """The figures of one array, in float64."""
    import numpy as np

    values = np.asarray(array)
    wide = values.astype(np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    low, high, mean = (float(finite.min()), float(finite.max()), float(finite.mean())) if finite.size else (None, None, None)
    return Look(name, values.dtype.name, values.shape, low, high, mean, int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))


def _read(path: Path) -> dict[str, Any]:
    from onnxfuse.verify import inputs

    with inputs.opened(path) as data:
        return {name: data[name] for name in data.files}


def _fitting(feeds: Mapping[str, Any], engine: Engine, path: Path) -> dict[str, Any]:
    """What the engine takes of the file: floating-point arrays in its types, 16 bits without a name as the bfloat16 that they were."""
    import numpy as np

    from onnxfuse.engine.run import cast_feeds

    known = {spec.name: np.dtype(spec.dtype) for spec in engine.inputs}
    missing = [name for name in known if name not in feeds]
    if missing:
        has = ", ".join(list(feeds)[:8]) or "nothing"
        raise BadInput(f"{path}: input {missing[0]!r} is missing (the file has {has}); add it with numpy.savez")
    named = {
        name: array.view(known[name])
        if name in known and array.dtype.kind == "V" and array.dtype.itemsize == known[name].itemsize
        else array
        for name, array in feeds.items()
    }
    return cast_feeds(engine.inputs, named)


def _show(looks: list[Look]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from onnxfuse.graph.names import shown

    table = Table("output", "type", "shape", "min", "max", "mean", "NaN", "infinite", box=box.SIMPLE_HEAD, pad_edge=False)
    for one in looks:
        figures = ["" if value is None else f"{value:.6g}" for value in (one.minimum, one.maximum, one.mean)]
        cells = (shown(one.name), one.dtype, "x".join(map(str, one.shape)) or "scalar", *figures, str(one.nans), str(one.infinities))
        table.add_row(*(Text(cell, style="bold red" if bad else "") for cell, bad in zip(cells, _alarms(one), strict=True)))
    Console().print(table)


def _alarms(one: Look) -> tuple[bool, ...]:
    return (*[False] * 6, one.nans > 0, one.infinities > 0)


def _write(outputs: Mapping[str, Any], path: Path) -> None:
    """As numpy.savez writes it, which would take a tensor called "file" for its own argument."""
    import zipfile

    import numpy as np

    from onnxfuse.graph.files import atomic

    plain = {name: array.astype(np.float32) if array.dtype.kind == "V" else array for name, array in outputs.items()}
    with atomic(path) as part, zipfile.ZipFile(part, "w") as archive:
        for name, array in plain.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
