"""Where a node of a rewritten model comes from: the fusion that made it, and the source nodes that it stands for.

Kept in the node's metadata_props, so that a fused file says it by itself, without the report that was written with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_graphsurgeon as gs

FUSION = "onnxfuse.fusion"  # a name of the registry
SITE = "onnxfuse.site"  # the tensor that the site computes; with the fusion it identifies the site
NODES = "onnxfuse.nodes"  # the source nodes, as a JSON list
VIA = "onnxfuse.via"  # fusions that made nodes which this one took, as a JSON list; absent where there are none


@dataclass(frozen=True)
class Origin:
    """What made a node. nodes: names of the source model's nodes, or of their first outputs where they have no name."""

    fusion: str
    site: str
    nodes: tuple[str, ...]
    via: tuple[str, ...] = ()


def of(node: gs.Node | onnx.NodeProto) -> Origin | None:
    """The origin that a node carries; None where it was in the source, or where its metadata is none of ours."""
    holder = node if isinstance(node, onnx.NodeProto) else getattr(node, "notes", None)
    if holder is None:
        return None
    found = {entry.key: entry.value for entry in holder.metadata_props}
    if FUSION not in found:
        return None
    return Origin(found[FUSION], found.get(SITE, ""), _names(found.get(NODES)), _names(found.get(VIA)))


def joined(fusion: str, site: str, taken: Iterable[gs.Node]) -> Origin:
    """The origin of what `fusion` makes of `taken`: nodes that a fusion made count for the source nodes behind them."""
    nodes: dict[str, None] = {}
    via: dict[str, None] = {}
    for node in taken:
        earlier = of(node)
        nodes.update(dict.fromkeys([_label(node)] if earlier is None else earlier.nodes))
        via.update({} if earlier is None else dict.fromkeys([*earlier.via, earlier.fusion]))
    via.pop(fusion, None)
    return Origin(fusion, site, tuple(nodes), tuple(via))


def mark(node: gs.Node, origin: Origin) -> None:
    """Writes `origin` into the metadata of a node that a fusion made."""
    notes = onnx.NodeProto()
    entries = {FUSION: origin.fusion, SITE: origin.site, NODES: json.dumps(origin.nodes, ensure_ascii=False)}
    if origin.via:
        entries[VIA] = json.dumps(origin.via, ensure_ascii=False)
    for key, value in entries.items():
        notes.metadata_props.add(key=key, value=value)
    node.notes = notes


def _label(node: gs.Node) -> str:
    return str(node.name or (node.outputs[0].name if node.outputs else node.op))


def _names(text: Any) -> tuple[str, ...]:
    """A JSON list of names; empty for what anybody else may have written there."""
    try:
        names = json.loads(text) if text else ()
    except (ValueError, RecursionError):
        return ()
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
