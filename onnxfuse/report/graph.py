"""The graph of a model as a report holds it: nodes, edges, and groups that a page can fold.

Weights are left off but for their names and shapes, long attributes are cut, and the number of nodes is bounded, so that a report stays
small whatever the model. Groups come from scopes in the names of nodes; where there are none, from narrow places of the graph,
where few tensors pass. The nodes of each site are a group of their own, and so is every body of If, Loop and Scan.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxfuse.graph import origin
from onnxfuse.graph.origin import Origin

if TYPE_CHECKING:
    import onnx

MOST_NODES = 6000  # of one graph: with a before and an after, and all that a page holds, below 3 MB
MOST_DIRECT = 60  # members of one group that are not cut into parts
FEWEST_IN_SCOPE = 4
LONGEST_VALUE = 80
OF_FILE = "says the file"  # the reason of a fused site that only the rewritten model tells of

Sites = Sequence[Mapping[str, Any]]
Side = dict[str, Any]


def sides(before: Path | None, after: Path | None, sites: Sites = ()) -> dict[str, Side]:
    """The graphs "before" and "after" of the models that are given, with the place of each node's site. No weights are read.

    BadInput where a file is no ONNX model.
    """
    from onnxfuse.verify.skim import skeleton

    old, new = (None if path is None else _Reader(skeleton(path)) for path in (before, after))
    if old is not None and new is not None:
        for types, others in ((old.types, new.types), (new.types, old.types)):
            for name, text in others.items():
                types.setdefault(name, text)  # a tensor that both have is the same
    taken = {} if old is None else _sites_before(sites, old)
    found = {} if old is None else {"before": _side(old, taken, sites)}
    if new is not None:
        found["after"] = _side(new, _sites_after(sites, new), sites, None if old is None else _scopes(old, taken))
    return found


def fused_sites(path: Path) -> list[dict[str, Any]]:
    """The sites that a rewritten model itself says it holds, for a comparison that has no report of the rewriting."""
    from onnxfuse.verify.skim import skeleton

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for item in _Reader(skeleton(path)).items:
        made = item.origin
        if made is not None:
            site = {"fusion": made.fusion, "output": made.site, "nodes": list(made.nodes), "decision": "fused", "reason": OF_FILE}
            entry = found.setdefault((made.fusion, made.site), {**site, "node": item.name})
            if made.site in item.outputs:
                entry["node"] = item.name
    return list(found.values())


def extract(path: Path) -> Side:
    """The graph of one model. BadInput where the file is no ONNX model."""
    from onnxfuse.verify.skim import skeleton

    return _side(_Reader(skeleton(path)), {}, ())


# ---------------------------------------------------------------------------------------------------- reading a model


@dataclass
class _Item:
    """A node, or an input or output of the graph. body: the place in `_Reader.bodies` of the subgraph that it stands in."""

    op: str
    name: str
    kind: str = ""
    outputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    scope: tuple[str, ...] = ()
    body: int | None = None
    origin: Origin | None = None


class _Reader:
    """All nodes of a model, subgraphs after the node that owns them, with the edges between them."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.items: list[_Item] = []
        self.bodies: list[tuple[str, int]] = []  # label, place of the node that owns it
        self.edges: list[tuple[int, int, int]] = []
        self.types: dict[str, str] = {}
        self.omitted = 0
        self._graph(proto.graph, {}, {}, None)

    def _graph(self, graph: onnx.GraphProto, makers: dict[str, tuple[int, int]], constants: dict[str, str], body: int | None) -> list[int]:
        """Reads one graph; returns the places of what makes its outputs. makers: tensor -> (place of its node, which output)."""
        makers, constants = dict(makers), dict(constants)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if text := _type(value.type):
                self.types[value.name] = text
        for weight in graph.initializer:
            constants[weight.name] = _dims(weight.data_type, weight.dims)
        for sparse in graph.sparse_initializer:
            constants[sparse.values.name] = _dims(sparse.values.data_type, sparse.dims)
        for value in graph.input:
            if body is None and value.name not in constants:
                self._add(_Item("", value.name, "input", [value.name]), makers)
        for node in _constants_first(graph.node):
            if node.op_type == "Constant" and node.output:
                constants[node.output[0]] = _constant(node)
            else:
                self._node(node, makers, constants, body)
        ends = [makers[value.name][0] for value in graph.output if value.name in makers]
        if body is None:
            for value in graph.output:
                place = self._add(_Item("", value.name, "output"), {})
                self._link(makers, value.name, place)
        return ends

    def _node(self, node: onnx.NodeProto, makers: dict[str, tuple[int, int]], constants: dict[str, str], body: int | None) -> None:
        item = _Item(
            op=node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}",
            name=node.name or (node.output[0] if node.output else node.op_type),
            outputs=list(node.output),
            constants=[f"{name} {constants[name]}".strip() for name in node.input if name in constants and name not in makers],
            attributes={a.name: _attribute(a) for a in node.attribute},
            scope=_scope(node),
            body=body,
            origin=origin.of(node),
        )
        read = [name for name in dict.fromkeys(node.input) if name in makers]
        sources = [makers[name] for name in read]
        place = self._add(item, makers)
        if place is None:
            return
        self.edges += [(source, place, which) for source, which in sources]
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                self.bodies.append((f"{attribute.name} of {item.name}", place))
                ends = self._graph(graph, makers, constants, len(self.bodies) - 1)
                self.edges += [(end, place, 0) for end in dict.fromkeys(ends) if end != place]

    def _add(self, item: _Item, makers: dict[str, tuple[int, int]]) -> int | None:
        if len(self.items) >= MOST_NODES:
            self.omitted += 1
            return None
        place = len(self.items)
        self.items.append(item)
        makers.update({name: (place, which) for which, name in enumerate(item.outputs) if name})
        return place

    def _link(self, makers: Mapping[str, tuple[int, int]], name: str, place: int | None) -> None:
        if place is not None and name in makers:
            self.edges.append((makers[name][0], place, makers[name][1]))


def _constants_first(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Constant nodes can stand anywhere before their readers in a file; here they only say what a reader's input is."""
    return sorted(nodes, key=lambda node: node.op_type != "Constant")


def _type(kind: onnx.TypeProto) -> str:
    if not kind.HasField("tensor_type"):
        return kind.WhichOneof("value") or ""
    tensor = kind.tensor_type
    if not tensor.HasField("shape"):
        return _dtype(tensor.elem_type)
    return _dims(tensor.elem_type, [d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in tensor.shape.dim])


def _dims(dtype: int, dims: Iterable[object]) -> str:
    return f"{_dtype(dtype)}[{', '.join(map(str, dims))}]"


def _dtype(number: int) -> str:
    import onnx

    try:
        name = str(onnx.TensorProto.DataType.Name(number))
    except ValueError:
        return f"type {number}"
    return {"FLOAT": "float32", "DOUBLE": "float64", "UNDEFINED": ""}.get(name, name.lower())


def _constant(node: onnx.NodeProto) -> str:
    return next((_attribute(attribute) for attribute in node.attribute), "")


def _attribute(attribute: onnx.AttributeProto) -> str:
    """An attribute's value for people: tensors and graphs by what they are, long values cut."""
    import onnx

    if attribute.HasField("t"):
        return _dims(attribute.t.data_type, attribute.t.dims)
    if attribute.HasField("g") or attribute.graphs:
        return f"graph of {sum(len(graph.node) for graph in [attribute.g, *attribute.graphs])} nodes"
    if attribute.type == onnx.AttributeProto.STRING:
        text = attribute.s.decode("utf-8", "replace")
    else:
        # As many as can be shown, and not all of a list of a million.
        values = [*attribute.ints[:LONGEST_VALUE], *attribute.floats[:LONGEST_VALUE], *attribute.strings[:LONGEST_VALUE]]
        scalar = {onnx.AttributeProto.INT: attribute.i, onnx.AttributeProto.FLOAT: f"{attribute.f:.7g}"}.get(attribute.type)
        text = str(scalar) if scalar is not None else ", ".join(f"{v:.7g}" if isinstance(v, float) else str(v) for v in values)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _scope(node: onnx.NodeProto) -> tuple[str, ...]:
    """Where in the source model a node comes from: PyTorch's record of it, or the node's name up to the last slash."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = [str(scope) for scope in ast.literal_eval(entry.value)]
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
            return tuple(scopes[-2].split(".")) if len(scopes) > 1 and scopes[-2] else ()
    return tuple(part for part in node.name.split("/")[:-1] if part)


# -------------------------------------------------------------------------------------------------------------- sites


def _sites_before(sites: Sites, reader: _Reader) -> dict[int, int]:
    """Place of a node of the source -> place of its site: the last fusion that took it, else the first site that was kept.

    A site may name nodes that an earlier fusion made; those stand for what that one took.
    """
    places = _places(reader)
    made: dict[str, int] = {}
    found: list[set[int]] = []
    taken: dict[int, int] = {}
    for number, site in enumerate(sites):
        names = [str(name) for name in site["nodes"]]
        own = {place for name in names if name not in made for place in places.get(name, ())}
        own.update(*(found[made[name]] for name in names if name in made))
        found.append(own)
        fused = site["decision"] == "fused"
        if fused and site.get("node"):
            made[str(site["node"])] = number
        for place in own:
            if fused or place not in taken:
                taken[place] = number
    return taken


def _sites_after(sites: Sites, reader: _Reader) -> dict[int, int]:
    """Place of a node of the result -> place of the site that it was made for, or of the kept site that it belongs to."""
    numbers = {(str(site["fusion"]), str(site["output"])): number for number, site in enumerate(sites)}
    places = _places(reader)
    taken = {
        place: numbers[item.origin.fusion, item.origin.site]
        for place, item in enumerate(reader.items)
        if item.origin is not None and (item.origin.fusion, item.origin.site) in numbers
    }
    for number, site in enumerate(sites):
        # A node that stands for a site of an earlier file has no origin; those of a kept site are still as they were.
        for name in [site["node"]] if site.get("node") else site["nodes"]:
            for place in places.get(str(name), ()):
                taken.setdefault(place, number)
    return taken


def _places(reader: _Reader) -> dict[str, list[int]]:
    """Places by a node's name. A node without a name is called by its first output."""
    found: dict[str, list[int]] = {}
    for place, item in enumerate(reader.items):
        if not item.kind:
            found.setdefault(item.name, []).append(place)
    return found


def _scopes(reader: _Reader, taken: Mapping[int, int]) -> dict[int, tuple[str, ...]]:
    """Place of a site -> the scope that its source nodes have in common."""
    found: dict[int, tuple[str, ...]] = {}
    for place, number in taken.items():
        scope = reader.items[place].scope
        found[number] = _common(found[number], scope) if number in found else scope
    return found


def _common(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    size = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return first[:size]


# ------------------------------------------------------------------------------------------------------------- groups


@dataclass
class _Groups:
    """Groups as they are written; `of` holds the innermost group of each node."""

    made: list[dict[str, Any]] = field(default_factory=list)
    of: dict[int, int] = field(default_factory=dict)

    def add(self, label: str, kind: str, parent: int | None, **more: int) -> int:
        self.made.append({"label": label, "kind": kind, **({} if parent is None else {"parent": parent}), **more})
        return len(self.made) - 1

    def path(self, group: int | None) -> tuple[int, ...]:
        """The groups around, the outermost first."""
        found: list[int] = []
        while group is not None:
            found.append(group)
            group = self.made[group].get("parent")
        return tuple(reversed(found))


def _side(reader: _Reader, taken: Mapping[int, int], sites: Sites, scopes: Mapping[int, tuple[str, ...]] | None = None) -> Side:
    items = reader.items
    for place, number in taken.items():
        if scopes and not items[place].scope:
            items[place].scope = scopes.get(number, ())
    groups = _Groups()
    _by_body_and_scope(reader, groups)
    for members in _crowded(items, groups):
        _cut(members, reader.edges, groups)
    _regions(taken, sites, groups)
    nodes = [_node(item, reader.types, groups.of.get(place), taken.get(place)) for place, item in enumerate(items)]
    return {
        "nodes": nodes,
        "groups": _parents_first(groups, nodes),
        "edges": [list(edge) for edge in reader.edges],
        "omitted": reader.omitted,
    }


def _node(item: _Item, types: Mapping[str, str], group: int | None, site: int | None) -> dict[str, Any]:
    optional = {"kind": item.kind, "attributes": item.attributes, "constants": item.constants}
    places = {"group": group, "site": site}
    return {
        "op": item.op,
        "name": item.name,
        "outputs": [[name, types.get(name, "")] for name in item.outputs if name],
        **{key: value for key, value in optional.items() if value},
        **{key: value for key, value in places.items() if value is not None},
    }


def _by_body_and_scope(reader: _Reader, groups: _Groups) -> None:
    """A group for each subgraph, and inside of each graph one for each scope that holds some nodes but not all."""
    members: dict[int | None, list[int]] = {}
    for place, item in enumerate(reader.items):
        if not item.kind:
            members.setdefault(item.body, []).append(place)
    group_of_body: dict[int | None, int | None] = {None: None}
    for body in sorted(members, key=lambda body: -1 if body is None else body):  # a body's owner stands before it
        if body is not None:
            label, owner = reader.bodies[body]
            group_of_body[body] = groups.add(label, "subgraph", groups.of.get(owner))
        _by_scope(members[body], reader.items, group_of_body[body], groups)


def _by_scope(members: Sequence[int], items: Sequence[_Item], parent: int | None, groups: _Groups, depth: int = 0) -> None:
    """Sorts nodes into scopes, at one depth of the name; a scope that holds all or next to nothing is no group."""
    children: dict[str, list[int]] = {}
    for place in members:
        if len(items[place].scope) > depth:
            children.setdefault(items[place].scope[depth], []).append(place)
        elif parent is not None:
            groups.of[place] = parent
    for name, inside in children.items():
        if len(inside) < FEWEST_IN_SCOPE:
            if parent is not None:
                groups.of.update(dict.fromkeys(inside, parent))
        elif len(inside) == len(members) and len(members) > 1:
            _by_scope(inside, items, parent, groups, depth + 1)
        else:
            _by_scope(inside, items, groups.add(name, "scope", parent), groups, depth + 1)


def _crowded(items: Sequence[_Item], groups: _Groups) -> Iterator[list[int]]:
    """The nodes that stand directly in one group, where they are too many to look at."""
    direct: dict[int | None, list[int]] = {}
    for place, item in enumerate(items):
        if not item.kind:
            direct.setdefault(groups.of.get(place), []).append(place)
    yield from (members for members in direct.values() if len(members) > MOST_DIRECT)


def _cut(members: Sequence[int], edges: Sequence[tuple[int, int, int]], groups: _Groups) -> None:
    """Cuts a long stretch of nodes into parts, where the fewest tensors pass from one to the next."""
    rank = {place: number for number, place in enumerate(members)}
    passing = [0] * (len(members) + 1)
    for source, target in {(source, target) for source, target, _ in edges}:
        if source in rank and target in rank and rank[source] < rank[target]:
            passing[rank[source] + 1] += 1
            passing[rank[target] + 1] -= 1
    for number in range(1, len(passing)):
        passing[number] += passing[number - 1]
    size = max(MOST_DIRECT // 2, -(-len(members) // (MOST_DIRECT * 2 // 3)))
    parent = groups.of.get(members[0])
    start = number = 0
    while start < len(members):
        near, far = start + size * 2 // 3, start + size * 4 // 3
        end = len(members) if far >= len(members) else min(range(near, far), key=lambda cut: (passing[cut], abs(cut - start - size)))
        number += 1
        group = groups.add(f"part {number}", "part", parent)
        groups.of.update(dict.fromkeys(members[start:end], group))
        start = end


def _regions(taken: Mapping[int, int], sites: Sites, groups: _Groups) -> None:
    """The nodes of one site become a group, in the innermost group that holds them all."""
    members: dict[int, list[int]] = {}
    for place, number in taken.items():
        members.setdefault(number, []).append(place)
    for number, places in sorted(members.items()):
        if len(places) < 2:
            continue
        paths = [groups.path(groups.of.get(place)) for place in places]
        around = paths[0]
        for path in paths[1:]:
            around = _common(around, path)
        region = groups.add(str(sites[number]["fusion"]), "region", around[-1] if around else None, site=number)
        groups.of.update(dict.fromkeys(places, region))


def _parents_first(groups: _Groups, nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that still hold something, in the order made, in which a parent stands before its children; nodes are told the new places."""
    used: set[int] = set()
    for node in nodes:
        used.update(groups.path(node.get("group")))
    place = {group: number for number, group in enumerate(sorted(used))}
    for node in nodes:
        if "group" in node:
            node["group"] = place[node["group"]]
    kept = [dict(groups.made[group]) for group in sorted(used)]
    for group in kept:
        if "parent" in group:
            group["parent"] = place[group["parent"]]
    return kept
