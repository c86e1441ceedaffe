"""Writes the part of commands.md that the commands themselves know: every option, from the typer application."""

from __future__ import annotations

from pathlib import Path

import mkdocs_gen_files
import typer
from typer.cli import get_docs_for_click

from onnxfuse import commands

PAGE = "commands.md"


def section(entry: commands.Command) -> str:
    """One command's reference; headings start at the third level."""
    command = commands.load(entry)
    context = typer.Context(command, info_name=entry.name)
    text = get_docs_for_click(obj=command, ctx=context, name=f"onnxfuse {entry.name}")
    return "\n".join(f"##{line}" if line.startswith("#") else line for line in text.splitlines())


written = (Path(__file__).parent.parent / PAGE).read_text(encoding="utf-8")
with mkdocs_gen_files.open(PAGE, "w") as page:
    page.write(f"{written}\n## Every option\n\n" + "\n\n".join(section(entry) for entry in commands.COMMANDS))
