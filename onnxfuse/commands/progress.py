"""Progress that commands show while they work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is being done, and for how long the command has run; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as shown:
        task = shown.add_task("starting", total=None)
        yield lambda text: shown.update(task, description=text)
