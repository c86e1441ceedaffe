"""Progress that commands show while they work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is being done; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(Text("starting"), refresh_per_second=4) as shown:
        yield lambda text: shown.update(Text(text))
