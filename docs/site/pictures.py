"""Pictures of graphs: boxes in layers, arrows between neighbours, as an SVG that follows the page's colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

BOX_HEIGHT, GAP_X, GAP_Y, LETTER, MARGIN = 30, 18, 34, 7.6, 8


@dataclass(frozen=True)
class Box:
    """A box with a label; `plain` is a tensor or constant, without a frame."""

    label: str
    plain: bool = False

    @property
    def width(self) -> float:
        return LETTER * len(self.label) + 20


def layers(edges: Sequence[tuple[str, str]], names: Sequence[str]) -> list[list[str]]:
    """`names` by their longest way from a source of `edges`; each layer in the order given."""
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for source, target in edges:
            depth[target] = max(depth[target], depth[source] + 1)
    # A source stands just above what reads it.
    for name in names:
        below = [depth[target] for source, target in edges if source == name]
        if below and not any(target == name for _, target in edges):
            depth[name] = min(below) - 1
    return [[name for name in names if depth[name] == level] for level in range(max(depth.values()) + 1)]


def svg(boxes: Mapping[str, Box], edges: Sequence[tuple[str, str]], title: str, said: Mapping[tuple[str, str], str] | None = None) -> str:
    """The graph from top to bottom; `said` are words beside edges."""
    rows = layers(edges, list(boxes))
    widths = [sum(boxes[name].width for name in row) + GAP_X * (len(row) - 1) for row in rows]
    whole, height = max(widths) + 2 * MARGIN, len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    centre: dict[str, tuple[float, float]] = {}
    for level, (row, width) in enumerate(zip(rows, widths, strict=True)):
        x = (whole - width) / 2
        for name in row:
            centre[name] = (x + boxes[name].width / 2, MARGIN + level * (BOX_HEIGHT + GAP_Y) + BOX_HEIGHT / 2)
            x += boxes[name].width + GAP_X
    parts = [
        f'<svg role="img" viewBox="0 0 {whole:.0f} {height:.0f}" width="{whole:.0f}" style="max-width:100%"><title>{escape(title)}</title>'
    ]
    for source, target in edges:
        (x1, y1), (x2, y2) = centre[source], centre[target]
        y1, y2 = y1 + BOX_HEIGHT / 2, y2 - BOX_HEIGHT / 2
        curve = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + 20:.0f} {x2:.0f} {y2 - 20:.0f} {x2:.0f} {y2:.0f}"
        head = f"M{x2 - 4:.0f} {y2 - 7:.0f}L{x2:.0f} {y2:.0f}L{x2 + 4:.0f} {y2 - 7:.0f}"
        parts += [f'<path d="{path}" fill="none" stroke="currentColor" opacity=".6"/>' for path in (curve, head)]
        if words := (said or {}).get((source, target)):
            x, y = (x1 + x2) / 2, (y1 + y2) / 2 + 4
            parts.append(f'<text x="{x + 6:.0f}" y="{y:.0f}" font-size="12" fill="currentColor" opacity=".8">{escape(words)}</text>')
    for name, box in boxes.items():
        x, y = centre[name]
        if not box.plain:
            parts.append(
                f'<rect x="{x - box.width / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{box.width:.0f}" height="{BOX_HEIGHT}" rx="6"'
                ' fill="var(--md-code-bg-color, #eee)" stroke="teal"/>'
            )
        style = 'font-style="italic"' if box.plain else ""
        parts.append(
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" font-size="13" fill="currentColor" {style}>{escape(box.label)}</text>'
        )
    return "".join(parts) + "</svg>"
