"""Writes fusions.md from the fusions' own files: formula, when it wins, the picture of the pattern, what it writes, where it is refused."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import mkdocs_gen_files

sys.path.insert(0, str(Path(__file__).parent))
from pictures import Box, svg

from onnxfuse.engine.prepare import creator
from onnxfuse.fusions import BUILT_IN
from onnxfuse.fusions.base import KINDS, Fusion
from onnxfuse.fusions.pattern import AnyTensor, Const, Either, Op, Pattern, Through
from onnxfuse.plugins import OPS

TITLES = {
    "canonical": ("Canonical", "One node for what an exporter spelled out: the first step for others, and never a loss."),
    "folding": ("Folding", "Constants are computed ahead. Some of it costs nothing at run time and is always done."),
    "fused": ("Fused", "Operators with CUDA plugins. Each has to earn its place by measurement."),
}


class Picture:
    """Boxes and edges of one pattern; a pattern object that is used twice is one box."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.edges: list[tuple[str, str]] = []
        self._known: dict[int, str] = {}

    def add(self, pattern: Pattern) -> str:
        if id(pattern) in self._known:
            return self._known[id(pattern)]
        if isinstance(pattern, Either):
            return self.add(pattern.choices[0])
        key = f"t:{pattern.name}" if isinstance(pattern, AnyTensor) else f"n{len(self._known)}"
        self._known[id(pattern)] = key
        if isinstance(pattern, AnyTensor):
            self.boxes.setdefault(key, Box(pattern.name, plain=True))
        elif isinstance(pattern, Const):
            self.boxes[key] = Box(pattern.name if pattern.value is None else f"{pattern.value:g}", plain=True)
        elif isinstance(pattern, Op):
            sources = [self.add(source) for source in pattern.inputs]
            self.boxes[key] = Box(" or ".join(pattern.types))
            self.edges += [(source, key) for source in dict.fromkeys(sources)]
        elif isinstance(pattern, Through):
            source = self.add(pattern.inner)
            self.boxes[key] = Box(f"through {', '.join(sorted(pattern.types)[:3])}…", plain=True)
            self.edges.append((source, key))
        return key


def choices(pattern: Pattern, seen: set[int] | None = None) -> int:
    """How many alternatives a pattern allows in all, the first ones not counted."""
    seen = set() if seen is None else seen
    if id(pattern) in seen:
        return 0
    seen.add(id(pattern))
    if isinstance(pattern, Either):
        return len(pattern.choices) - 1 + sum(choices(choice, seen) for choice in pattern.choices)
    inner = pattern.inputs if isinstance(pattern, Op) else (pattern.inner,) if isinstance(pattern, Through) else ()
    return sum(choices(part, seen) for part in inner)


def document(fusion: Fusion) -> str:
    """The fusion's own words: the first line is its title, indented lines are formulas."""
    said = inspect.getdoc(sys.modules[type(fusion).__module__]) or ""
    head, _, body = said.partition("\n")
    title = head.split(":", 1)[1].strip()
    return f"{title[0].upper()}{title[1:]}\n\n{body.strip(chr(10))}"


def pattern(fusion: Fusion) -> list[str]:
    """The picture of a pattern; nothing of a fusion that finds its sites without one."""
    if not fusion.patterns:
        return []
    picture = Picture()
    picture.add(fusion.patterns[0])
    others = sum(map(choices, fusion.patterns)) + len(fusion.patterns) - 1
    spellings = f"*The pattern; {others} alternatives within it are accepted as well.*" if others else "*The pattern.*"
    return [svg(picture.boxes, picture.edges, f"the pattern of {fusion.name}"), "", spellings, ""]


def section(fusion: Fusion) -> str:
    writes = sorted(function.name for function in fusion.functions(13))
    plugins = [op for op in OPS if op.name in set(map(creator, writes))]
    lines = [
        f"### {fusion.name}",
        "",
        document(fusion),
        "",
        *pattern(fusion),
    ]
    if writes:
        lines += ["Writes: " + ", ".join(f"`{name}`" for name in writes) + ("" if plugins else " (a function body; no plugin)") + ".", ""]
    for op in plugins:
        limit = f"; last axis up to {op.max_width:,}" if op.max_width else ""
        lines += [f"Plugin `{op.name}`: {op.covers} ({', '.join(op.dtypes)}{limit}).", ""]
    return "\n".join(lines)


with mkdocs_gen_files.open("fusions.md", "w") as page:
    page.write("# Fusions\n\nMade from the fusions' own files. What was measured of them: [How it decides](how-it-decides.md).\n\n")
    for kind in KINDS:
        title, said = TITLES[kind]
        page.write(f"## {title}\n\n{said}\n\n")
        page.writelines(section(fusion) + "\n" for fusion in BUILT_IN if fusion.kind == kind)
