"""The documents say what is so: links lead somewhere, commands and options exist, make targets are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onnxfuse import commands

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/*.md"), *ROOT.glob("benchmarks/*.md")]


def code(document: Path) -> str:
    """What stands in fences and backquotes, a line each."""
    text = document.read_text()
    return "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))


def options() -> dict[tuple[str, ...], set[str]]:
    """(command, subcommand) -> its options."""
    found: dict[tuple[str, ...], set[str]] = {}
    for entry in commands.COMMANDS:
        loaded = commands.load(entry)
        leaves = getattr(loaded, "commands", None) or {"": loaded}
        for name, command in leaves.items():
            words = (entry.name, name) if name else (entry.name,)
            found[words] = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        assert re.match(r"https?://", target) or (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_options_exist(document: Path):
    known = options()
    names = "|".join(entry.name for entry in commands.COMMANDS)
    for line in re.findall(rf"onnxfuse ((?:{names})\b[^\n#]*)", code(document)):
        words = tuple(line.split())
        command = words[:2] if words[:2] in known else words[:1]
        for option in re.findall(r"(?<!\S)--?[a-z][a-z0-9-]*", line):
            assert option in known.get(command, {option}) | {"--help"}, f"onnxfuse {line}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_exist(document: Path):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?m)^make ([a-z][a-z-]*)", code(document)):
        assert re.search(rf"(?m)^{target}:", makefile), target
