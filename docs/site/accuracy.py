"""Puts the flow chart into accuracy.md: from outputs that disagree to what is wrong, a question at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import mkdocs_gen_files

sys.path.insert(0, str(Path(__file__).parent))
from pictures import Box, svg

PAGE = "accuracy.md"
BEFORE = "## Outputs\n"
BOXES = {
    "start": Box("compare: outputs disagree", plain=True),
    "layers": Box("compare --layers"),
    "alone": Box("Is a piece wrong by itself?"),
    "named": Box("It is named: --skip its fusion; bisect writes a small model"),
    "budget": Box("Is the automatic engine's error as large?"),
    "price": Box("The price of the precision: bisect --precision names what stays in float32"),
    "bisect": Box("bisect: sites that are wrong together, or only sometimes"),
}
EDGES = {
    ("start", "layers"): "",
    ("layers", "alone"): "",
    ("alone", "named"): "yes",
    ("alone", "budget"): "no",
    ("budget", "price"): "yes",
    ("budget", "bisect"): "no",
}

written = (Path(__file__).parent.parent / PAGE).read_text(encoding="utf-8")
assert BEFORE in written, f"{PAGE} has no heading {BEFORE.strip()}"
chart = svg(BOXES, list(EDGES), "from outputs that disagree to what is wrong", EDGES)
with mkdocs_gen_files.open(PAGE, "w") as page:
    page.write(written.replace(BEFORE, f"{chart}\n\n{BEFORE}", 1))
