"""Where the time goes, layer by layer, and what a fusion did to TensorRT's own fusion.

`profile` times the layers of one engine. `compare` lines two profiles up by the ONNX nodes that their layers compute: TensorRT's
automatic engine and one with plugins. A layer is what TensorRT's profiler times: one kernel, or a few. Layers that Myelin, TensorRT's
compiler for transformers, made of one part of the network are named NAME_mylR_I, part R and position I: such a part is a region here, and
a plugin inside it cuts it in two.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxfuse.engine.run import Array, Engine

RUNS = 50

Sources = Mapping[str, Sequence[str]]
"""The nodes that each fused node stands for, by its name."""


@dataclass(frozen=True)
class LayerTime:
    """A layer of an engine. nodes: the ONNX nodes it computes, or parts of them; us: microseconds, the median of several runs, 0 for one
    that launches nothing; kernel: TensorRT's tactic or the plugin, "" where TensorRT does not say."""

    name: str
    type: str
    nodes: tuple[str, ...]
    us: float
    kernel: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "nodes": list(self.nodes), "us": round(self.us, 3)}


def profile(engine: Engine, feeds: Mapping[str, Array], runs: int = RUNS) -> tuple[LayerTime, ...]:
    """Times every layer of `engine` on `feeds`, in execution order; those that launch nothing take 0 us.

    With a profiler TensorRT runs one kernel after the other and waits for each, so that the sum is above the latency of a CUDA graph
    where layers overlap. EngineFault where it fails.
    """
    taken = engine.layer_times(feeds, runs)
    names = dict.fromkeys(name for run in taken for name in run)
    by_name = {name: 1000 * statistics.median(run.get(name, 0.0) for run in taken) for name in names}
    found = []
    for layer in engine.layers():
        tactic = layer.tactic if layer.tactic and not re.fullmatch(r"0x0*", layer.tactic) else ""
        found.append(LayerTime(layer.name, layer.type, layer.nodes, by_name.pop(layer.name, 0.0), layer.plugin or tactic))
    return (*found, *(LayerTime(name, "", (), us) for name, us in by_name.items()))


# What a layer is --------------------------------------------------------------------------------------------------------

_IDLE = frozenset({"constant", "shape_call", "signal", "wait", "noop"})
_MOVES = frozenset({"reformat", "cast", "reshape", "shuffle", "copy", "memcpy", "move"})
# What Myelin calls operations that move or convert and compute nothing, in the names of kernels: __myl_ResTra_myl11_0. It keeps three
# or four letters of each.
_MYELIN_MOVES = ("Mov", "Res", "Tra", "Cas", "Rep")
_MYELIN = re.compile(r"_myl(\d+)_\d+$")


def is_plugin(layer: LayerTime) -> bool:
    return "plugin" in layer.type.lower()


def is_copy(layer: LayerTime) -> bool:
    """Whether it only moves or converts data: a reformat, a cast, a transposition."""
    if layer.type.lower() in _MOVES or layer.name.startswith(("Reformatting CopyNode", "Reformatted ")):
        return True
    made = re.fullmatch(r"__myl_([A-Za-z0-9]+)_myl\d+_\d+", layer.name)
    return made is not None and all(word.startswith(_MYELIN_MOVES) for word in re.findall(r"[A-Z][a-z0-9]*", made.group(1)))


def is_idle(layer: LayerTime) -> bool:
    """Whether it launches nothing on the GPU: a constant, or work on shapes on the host."""
    return layer.type.lower() in _IDLE


def region_of(layer: LayerTime) -> str:
    """The part of the network that TensorRT compiled as one: Myelin's, or the layer itself."""
    part = _MYELIN.search(layer.name)
    return f"myl{part.group(1)}" if part else layer.name


# Comparing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """Something of the automatic engine that fused nodes cut apart: a region of several layers, or one kernel.

    layers, nodes: how many it was made of; us: what it took; by: the fused nodes; pieces: into how many regions the rest fell.
    """

    what: str
    name: str
    layers: int
    nodes: int
    us: float
    by: tuple[str, ...]
    pieces: int


@dataclass(frozen=True)
class Change:
    """Other kernels for the same nodes. by: the plugins among them, none where it is only a neighbour that changed."""

    nodes: tuple[str, ...]
    by: tuple[str, ...]
    automatic: tuple[str, ...]
    fused: tuple[str, ...]
    automatic_us: float
    fused_us: float

    @property
    def us(self) -> float:
        """By how much it became slower."""
        return self.fused_us - self.automatic_us


@dataclass(frozen=True)
class LayerDiff:
    """What the plugins of the fused engine did. Microseconds; `changed` is in the order of what it costs.

    added, removed: layers that only move data and have no counterpart in the other engine. plugins: how many there are. The difference
    of the totals is that of `changed`, of `added` less `removed`, and of all layers that stayed what they were: `unchanged_us`.
    """

    cut: tuple[Cut, ...]
    added: tuple[LayerTime, ...]
    removed: tuple[LayerTime, ...]
    changed: tuple[Change, ...]
    plugins: int
    unchanged_us: float
    automatic_us: float
    fused_us: float

    @property
    def summary(self) -> str:
        """One or two sentences."""
        return f"{_said_of_cuts(self)} {_said_of_times(self)}"

    def to_dict(self) -> dict[str, Any]:
        """The form of reports."""
        return {
            "cut": [{**asdict(cut), "by": list(cut.by), "us": round(cut.us, 3)} for cut in self.cut],
            "added": [layer.to_dict() for layer in self.added],
            "removed": [layer.to_dict() for layer in self.removed],
            "changed": [_rounded({**asdict(change), "us": change.us}) for change in self.changed],
            "plugins": self.plugins,
            "unchanged_us": round(self.unchanged_us, 3),
            "automatic_us": round(self.automatic_us, 3),
            "fused_us": round(self.fused_us, 3),
            "summary": self.summary,
        }


def report(automatic: Sequence[LayerTime], fused: Sequence[LayerTime], sources: Sources | None = None) -> dict[str, Any]:
    """Both profiles and what is different, as the part "layers" of a report."""
    return {
        "automatic": [layer.to_dict() for layer in automatic],
        "fused": [layer.to_dict() for layer in fused],
        "diff": compare(automatic, fused, sources).to_dict(),
    }


def sources_of(sites: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """The nodes that each fused node stands for, from the sites of a report."""
    return {str(site["node"]): tuple(map(str, site["nodes"])) for site in sites if site.get("node")}


def compare(automatic: Sequence[LayerTime], fused: Sequence[LayerTime], sources: Sources | None = None) -> LayerDiff:
    """What became of the automatic engine's layers.

    The automatic engine may be one of the model before fusing, whose nodes `sources` gives for each fused node (see `sources_of`), or one
    of the fused model built without plugins, whose nodes are named FUSED/PART.
    """
    names = _Names(automatic, fused, sources or {})
    added, removed = _unmatched_copies(automatic, fused)
    changed = _changes(automatic, fused, names)
    totals = [sum(layer.us for layer in layers) for layers in (automatic, fused)]
    explained = sum(change.us for change in changed) + sum(layer.us for layer in added) - sum(layer.us for layer in removed)
    return LayerDiff(
        cut=_cuts(automatic, fused, names),
        added=added,
        removed=removed,
        changed=changed,
        plugins=sum(map(is_plugin, fused)),
        unchanged_us=totals[1] - totals[0] - explained,
        automatic_us=totals[0],
        fused_us=totals[1],
    )


class _Names:
    """One name for what is the same node in both engines."""

    def __init__(self, automatic: Sequence[LayerTime], fused: Sequence[LayerTime], sources: Sources) -> None:
        self._sources = sources
        of_plugins = {node for layer in fused if is_plugin(layer) for node in layer.nodes}
        self._whole = {*sources, *of_plugins, *(node for nodes in sources.values() for node in nodes)}
        self._automatic = {self._head(node) for layer in automatic for node in layer.nodes}

    def automatic(self, layer: LayerTime) -> frozenset[str]:
        return frozenset(map(self._head, layer.nodes))

    def fused(self, layer: LayerTime) -> frozenset[str]:
        """The nodes of the automatic engine that a layer of the fused one computes, and those that it alone has."""
        return frozenset(node for name in layer.nodes for node in self._expanded(self._head(name), ()))

    def _head(self, node: str) -> str:
        """The node that a part belongs to: FUSED/PART, where a function was taken apart."""
        head = node.split("/", 1)[0]
        return head if node not in self._whole and head in self._whole else node

    def _expanded(self, node: str, above: tuple[str, ...]) -> Iterable[str]:
        if node in self._automatic or node not in self._sources or node in above:
            return (node,)
        return [part for source in self._sources[node] for part in self._expanded(source, (*above, node))]


def _cuts(automatic: Sequence[LayerTime], fused: Sequence[LayerTime], names: _Names) -> tuple[Cut, ...]:
    """Regions of several layers first, then kernels; each kind in execution order."""
    plugins = {layer.name: names.fused(layer) for layer in fused if is_plugin(layer)}
    others = [(region_of(layer), names.fused(layer)) for layer in fused if not is_plugin(layer)]
    regions: dict[str, list[LayerTime]] = defaultdict(list)
    for layer in automatic:
        regions[region_of(layer)].append(layer)
    found = []
    for what, groups in (("region", [(n, g) for n, g in regions.items() if len(g) > 1]), ("kernel", [(a.name, [a]) for a in automatic])):
        for name, layers in groups:
            inside = frozenset(node for layer in layers for node in names.automatic(layer))
            by = tuple(plugin for plugin, taken in plugins.items() if taken & inside)
            rest = inside - frozenset(node for plugin in by for node in plugins[plugin])
            if by and rest:
                pieces = {region for region, nodes in others if nodes & rest}
                found.append(Cut(what, name, len(layers), len(inside), sum(layer.us for layer in layers), by, len(pieces)))
    return tuple(found)


def _unmatched_copies(automatic: Sequence[LayerTime], fused: Sequence[LayerTime]) -> tuple[tuple[LayerTime, ...], tuple[LayerTime, ...]]:
    """Copies of the fused engine alone, and of the automatic one alone: those left when each was given its like in the other."""
    left = [[layer for layer in layers if is_copy(layer)] for layers in (fused, automatic)]
    for like in (lambda layer: layer.name, _without_numbers):
        there = [Counter(map(like, layers)) for layers in left]
        both = there[0] & there[1]
        left = [_less(layers, Counter(both), like) for layers in left]
    return tuple(left[0]), tuple(left[1])


def _less(layers: Sequence[LayerTime], matched: Counter[str], like: Any) -> list[LayerTime]:
    """The layers without as many of each kind as are matched."""
    kept = []
    for layer in layers:
        if matched[like(layer)] > 0:
            matched[like(layer)] -= 1
        else:
            kept.append(layer)
    return kept


def _without_numbers(layer: LayerTime) -> str:
    """The name but for what TensorRT numbers: regions, positions, its own tensors."""
    return re.sub(r"\d+", "", _MYELIN.sub("", layer.name))


def _changes(automatic: Sequence[LayerTime], fused: Sequence[LayerTime], names: _Names) -> tuple[Change, ...]:
    """Layers of both engines that share nodes, in groups that share none with each other; those whose kernels are not the same."""
    groups = _Groups()
    sides = []
    for layers, of in ((automatic, names.automatic), (fused, names.fused)):
        computing = [layer for layer in layers if not is_copy(layer) and not is_idle(layer)]
        # What has no nodes is known by its name alone.
        keyed = [(layer, of(layer) or frozenset([_without_numbers(layer)])) for layer in computing]
        for _, nodes in keyed:
            groups.join(nodes)
        sides.append(keyed)
    found: dict[str, tuple[list[LayerTime], list[LayerTime]]] = defaultdict(lambda: ([], []))
    for side, keyed in enumerate(sides):
        for layer, nodes in keyed:
            found[groups.of(next(iter(nodes)))][side].append(layer)
    changes = [_change(before, after) for before, after in found.values() if _differ(before, after)]
    return tuple(sorted(changes, key=lambda change: -change.us))


def _differ(before: Sequence[LayerTime], after: Sequence[LayerTime]) -> bool:
    return Counter(layer.kernel or layer.type for layer in before) != Counter(layer.kernel or layer.type for layer in after)


def _change(before: Sequence[LayerTime], after: Sequence[LayerTime]) -> Change:
    return Change(
        nodes=tuple(dict.fromkeys(node for layer in (*before, *after) for node in layer.nodes)),
        by=tuple(layer.name for layer in after if is_plugin(layer)),
        automatic=tuple(layer.kernel or layer.type for layer in before),
        fused=tuple(layer.kernel or layer.type for layer in after),
        automatic_us=sum(layer.us for layer in before),
        fused_us=sum(layer.us for layer in after),
    )


class _Groups:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The name that stands for the set of `name`."""
        root = name
        while self._parent.setdefault(root, root) != root:
            root = self._parent[root]
        while name != root:
            self._parent[name], name = root, self._parent[name]
        return root

    def join(self, names: Iterable[str]) -> None:
        first, *others = names
        for other in others:
            self._parent[self.of(other)] = self.of(first)


# Telling ----------------------------------------------------------------------------------------------------------------


def _said_of_cuts(diff: LayerDiff) -> str:
    if not diff.plugins:
        return "No layer of the fused engine is a plugin."
    plugins = _count(diff.plugins, "plugin")
    regions = [cut for cut in diff.cut if cut.what == "region"]
    kernels = [cut for cut in diff.cut if cut.what == "kernel"]
    nodes, pieces = sum(cut.nodes for cut in regions), sum(cut.pieces for cut in regions)
    parts = [f"cut {_count(len(regions), 'region')} of {_count(nodes, 'node')} into {_count(pieces, 'piece')}"] if regions else []
    parts += [f"split {_count(len(kernels), 'kernel')} that computed more than what they replace"] if kernels else []
    return f"{plugins} {' and '.join(parts)}." if parts else f"{plugins} took the place of whole kernels and cut nothing."


def _said_of_times(diff: LayerDiff) -> str:
    own = [change for change in diff.changed if change.by]
    others = [change for change in diff.changed if not change.by]
    said = []
    if own:
        before, after = sum(change.automatic_us for change in own), sum(change.fused_us for change in own)
        said.append(f"the plugins and what shared kernels with the nodes they replace took {after:.1f} us instead of {before:.1f}")
    for layers, what in ((diff.added, "appeared"), (diff.removed, "went")):
        if layers:
            said.append(f"{_count(len(layers), 'copy', 'copies')} {what}, {sum(layer.us for layer in layers):.1f} us")
    if others:
        said.append(f"other kernels were chosen in {_count(len(others), 'place')}, {sum(change.us for change in others):+.1f} us")
    said.append(f"layers that stayed the same, {diff.unchanged_us:+.1f} us")
    total = f"in all {diff.automatic_us:.1f} us became {diff.fused_us:.1f}"
    text = "; ".join([*said, total])
    return f"{text[0].upper()}{text[1:]}."


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(v, 3) if isinstance(v, float) else list(v) if isinstance(v, tuple) else v for name, v in values.items()}
