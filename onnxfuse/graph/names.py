"""How names from a model file appear in messages."""

from __future__ import annotations

_LONGEST = 120


def shown(name: object) -> str:
    """`name` safe to print on one line: control characters, line separators and lone surrogates escaped, long names cut."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(name))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def is_text(path: object) -> bool:
    """Whether a path is text: bytes that are not UTF-8 are lone surrogates in it, which most libraries refuse."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def first_line(error: BaseException) -> str:
    """The first line of a library's message, safe to print."""
    lines = str(error).strip().splitlines()
    return shown(lines[0].rstrip(".;")) if lines else type(error).__name__
