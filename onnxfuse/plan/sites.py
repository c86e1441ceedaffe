"""A site and what was decided about it, as plain values that a report and a plan file hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onnxfuse.fusions.base import Match, label
from onnxfuse.graph import query, shapes


@dataclass(frozen=True)
class Site:
    """A legal place for a fusion.

    output: the tensor that the fused node computes; with the fusion's name it identifies the site.
    nodes: the source nodes that the fusion replaces. shape: of `output`, as "Bx128x768"; "?" for what is unknown.
    """

    fusion: str
    variant: str | None
    output: str
    nodes: tuple[str, ...]
    shape: str
    dtype: str

    @property
    def key(self) -> tuple[str, str]:
        return self.fusion, self.output

    def sized(self, sizes: Mapping[str, int]) -> Site:
        """This site with the lengths that its symbolic axes have in `sizes`."""
        return replace(self, shape="x".join(str(sizes.get(size, size)) for size in self.shape.split("x")))

    @classmethod
    def of(cls, match: Match) -> Site:
        dims = query.shape(match.output)
        kind = query.dtype(match.output)
        return cls(
            match.fusion.name,
            match.fusion.variant(match),
            match.output.name,
            tuple(label(node) for node in match.nodes),
            "?" if dims is None else "x".join(_size(size) for size in dims),
            "?" if kind is None else str(kind),
        )


def _size(size: int | str | None) -> str:
    """A dimension as the model names it; names that inference made up say nothing to a reader."""
    return "?" if size is None or str(size).startswith(shapes.MADE) else str(size)


@dataclass(frozen=True)
class Decision:
    """Whether a site is fused, why, and the node that then stands for it."""

    site: Site
    fused: bool
    reason: str
    node: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form that reports and plan files have."""
        return {
            "fusion": self.site.fusion,
            "variant": self.site.variant,
            "output": self.site.output,
            "nodes": list(self.site.nodes),
            "shape": self.site.shape,
            "dtype": self.site.dtype,
            "decision": "fused" if self.fused else "kept",
            "reason": self.reason,
            "node": self.node,
        }
