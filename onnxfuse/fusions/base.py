"""What a fusion is, and the two things that are done with one: finding its sites and rewriting them.

A fusion never changes an initializer, never drops a tensor that anyone else reads, and is refused with a reason where it does not
hold. `find` gives the sites that are legal and the near misses; `apply` rewrites the chosen ones. Both work on the graph
of the model in place, one fusion at a time, in the order of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions.pattern import DOMAIN, STANDARD, Matcher, Pattern, leads_in, leaf_names, least_nodes, root_types
from onnxfuse.graph import functions, origin, query
from onnxfuse.graph.ir import Constant, Node, Variable, detach
from onnxfuse.graph.model import Model

Kind = Literal["canonical", "folding", "fused"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order in which they are applied
_MOST_OF_A_SHAPE = 64  # nodes between a tensor and the Reshape that reads its sizes
# How many ways of reading one root as the pattern are checked; with branches that lead far there can be thousands, all refused alike.
_MOST_FOUND = 32


@dataclass(frozen=True)
class Refusal:
    """Why a pattern that matched is not this fusion, with the offending value."""

    reason: str
    value: Any = None

    def __str__(self) -> str:
        return self.reason if self.value is None else f"{self.reason} ({self.value})"


@dataclass(frozen=True)
class Miss:
    """A place where a fusion nearly held: the node it started from, the nodes that matched, the node in question and the reason."""

    fusion: str
    root: str
    nodes: tuple[str, ...]
    at: str | None
    reason: str


@dataclass(frozen=True, eq=False)
class Match:
    """A legal site: tensors by their names in the pattern, and the nodes that the fusion replaces, in no particular order."""

    fusion: Fusion
    graph: gs.Graph
    root: gs.Node
    tensors: dict[str, gs.Tensor]
    nodes: tuple[gs.Node, ...]
    index: Index

    def __getitem__(self, name: str) -> gs.Tensor:
        return self.tensors[name]

    def get(self, name: str) -> gs.Tensor | None:
        return self.tensors.get(name)

    @property
    def output(self) -> gs.Tensor:
        return self.root.outputs[0]

    def node(self, name: str) -> gs.Node:
        """The node that computes the tensor called `name` in the pattern."""
        producer: gs.Node = self.tensors[name].inputs[0]
        return producer

    def escapes(self, value: gs.Tensor) -> str | None:
        """Who outside of the site reads `value`; None where nobody does."""
        if id(value) in self.index.outputs:
            return "a graph output"
        inside = {id(node) for node in self.nodes}
        for reader in value.outputs:
            if id(reader) not in inside and not self._measures(reader, inside):
                return f"'{label(reader)}' ({reader.op})"
        return None

    def _measures(self, reader: gs.Node, inside: set[int]) -> bool:
        """Whether `reader` takes a shape that serves nodes of the site alone (a Reshape to what was there before) and goes with them."""
        if reader.op != "Shape" or reader.domain not in STANDARD:
            return False
        seen: dict[int, gs.Node] = {}
        pending = [reader]
        while pending:
            node = pending.pop()
            if id(node) in inside or id(node) in seen:
                continue
            seen[id(node)] = node
            if len(seen) > _MOST_OF_A_SHAPE or any(not value.outputs or id(value) in self.index.outputs for value in node.outputs):
                return False
            pending.extend(other for value in node.outputs for other in value.outputs)
        return True


class Fusion:
    """One fusion, one file. Subclasses say what they are in class attributes and in the four methods."""

    name: str
    kind: Kind
    # Canonical fusions that this one is built on.
    needs: tuple[str, ...] = ()
    # Fusions at whose border nothing is left to convert where both are fused: policy measure tries them together first.
    belongs_with: tuple[str, ...] = ()
    # Folding that costs nothing and is never measured: the policy `proven` always does it.
    free: bool = False
    # Where its kernels are: compute capabilities (90) and numpy's names of element types; empty for all.
    architectures: tuple[int, ...] = ()
    half_from: int = 0  # the oldest for 16-bit types
    dtypes: tuple[str, ...] = ()
    # Tried in this order, the larger first.
    patterns: tuple[Pattern, ...]
    # The operator without which an attempt is no near miss, where others of the pattern stand everywhere.
    anchor: str = ""
    # Names in the pattern of inner tensors that `rewrite` can still compute when others read them.
    keeps: tuple[str, ...] = ()

    def find(self, model: Model, index: Index, far: bool) -> tuple[list[Match], list[Miss]]:
        """See the function `find`. By the patterns; a fusion of no fixed form finds its sites by itself."""
        return _find_patterns(self, model, index, far)

    def check(self, match: Match, model: Model) -> Refusal | None:
        """Every condition under which the pattern is not this fusion."""
        raise TypeError(f"{type(self).__name__} says no conditions")

    def variant(self, match: Match) -> str | None:
        """The kind within the fusion (erf, tanh or quick for a GELU)."""
        return None

    def kept(self, match: Match) -> list[gs.Tensor]:
        """Inner tensors, and further outputs of the root, that `rewrite` still computes: they may have other readers."""
        return [match.tensors[name] for name in self.keeps if name in match.tensors]

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        """Makes the nodes that replace the site, with its output tensors, through `new`; returns the one that stands for the site."""
        raise TypeError(f"{type(self).__name__} rewrites nothing")

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        """Definitions of the op types that `rewrite` writes, in primitives valid at `opset`; none where they are standard operators."""
        return ()

    def definitions(self, nodes: Sequence[gs.Node], opset: int) -> tuple[onnx.FunctionProto, ...]:
        """Definitions of the op types of `nodes`, which `rewrite` made."""
        used = {node.op for node in nodes if node.domain == DOMAIN}
        return tuple(function for function in self.functions(opset) if function.name in used) if used else ()


@dataclass
class Index:
    """What matching asks of a model, read once before each fusion that has something to look at."""

    by_op: dict[str, list[tuple[gs.Graph, gs.Node]]] = field(default_factory=dict)
    owner: dict[int, gs.Graph] = field(default_factory=dict)
    outputs: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: Model) -> Index:
        index = cls()
        outputs: set[int] = set()
        for graph in model.graphs():
            outputs.update(id(value) for value in graph.outputs)
            for node in graph.nodes:
                index.by_op.setdefault(node.op, []).append((graph, node))
                index.owner[id(node)] = graph
        index.outputs = frozenset(outputs)
        return index


def label(node: gs.Node) -> str:
    """How a node is called in reports: its name, or its first output where it has none."""
    return str(node.name or (node.outputs[0].name if node.outputs else node.op))


def find(fusion: Fusion, model: Model, index: Index, far: bool = False) -> tuple[list[Match], list[Miss]]:
    """All sites of `fusion` that do not overlap, the larger patterns first, and the near misses left over.

    With `far`, attempts that matched less than half of the pattern are misses, too.
    """
    return fusion.find(model, index, far)


def _find_patterns(fusion: Fusion, model: Model, index: Index, far: bool) -> tuple[list[Match], list[Miss]]:
    matches: list[Match] = []
    misses: list[tuple[Miss, frozenset[int]]] = []
    claimed: set[int] = set()
    for pattern in fusion.patterns:
        for type_ in sorted(root_types(pattern)):
            for graph, root in index.by_op.get(type_, ()):
                if id(root) in claimed or not root.outputs or not (far or leads_in(pattern, root)):
                    continue
                outcome = _attempt(fusion, pattern, graph, root, model, index, claimed, far)
                if isinstance(outcome, Match):
                    matches.append(outcome)
                    claimed.update(id(node) for node in outcome.nodes)
                elif outcome is not None:
                    misses.append(outcome)
    left = {(miss.root, miss.reason): miss for miss, nodes in misses if not nodes & claimed}
    return matches, list(left.values())


def _attempt(
    fusion: Fusion, pattern: Pattern, graph: gs.Graph, root: gs.Node, model: Model, index: Index, claimed: set[int], far: bool
) -> Match | tuple[Miss, frozenset[int]] | None:
    matcher = Matcher(pattern)
    refused: tuple[Match, Refusal] | None = None
    for found in islice(matcher.match(root.outputs[0]), _MOST_FOUND):
        if any(id(node) in claimed for node in found.nodes):
            continue
        match = Match(fusion, graph, root, found.tensors, found.nodes, index)
        refusal = fusion.check(match, model) or _stays_inside(match, pattern, index)
        if refusal is None:
            return match
        refused = refused or (match, refusal)
    if refused is not None:
        match, refusal = refused
        miss = Miss(fusion.name, label(root), tuple(label(n) for n in match.nodes), None, str(refusal))
        return miss, frozenset(id(node) for node in match.nodes)
    near = matcher.miss
    if near is None or (not far and (len(near.nodes) < 2 or 2 * len(near.nodes) <= least_nodes(pattern))):
        return None  # too far from it to be worth a word
    if not far and fusion.anchor and all(node.op != fusion.anchor for node in near.nodes):
        return None
    reason = str(Refusal(near.reason, near.value))
    miss = Miss(fusion.name, label(root), tuple(label(n) for n in near.nodes), label(near.at) if near.at else None, reason)
    return miss, frozenset(id(node) for node in near.nodes)


def _stays_inside(match: Match, pattern: Pattern, index: Index) -> Refusal | None:
    """Refuses a site whose inner tensors somebody else reads, that needs one of them itself, or that reaches into another graph."""
    inside = {id(node) for node in match.nodes}
    for name in leaf_names(pattern):
        value = match.get(name)
        if value is not None and value.inputs and id(value.inputs[0]) in inside:
            return Refusal(f"'{name}' is computed within the site", value.name)
    kept = {id(value) for value in match.fusion.kept(match)}
    for node in match.nodes:
        if index.owner.get(id(node)) is not match.graph:
            return Refusal("lies partly outside the body it would be fused in", label(node))
        for value in node.outputs:
            if value is match.output or id(value) in kept or value.is_empty():
                continue
            reader = match.escapes(value)
            if reader is not None:
                return Refusal(f"'{value.name}' is also read by {reader}")
    return None


class Builder:
    """Makes nodes, tensors and constants with names that the model does not carry yet."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.made: list[gs.Node] = []
        self._constants: dict[tuple[Any, ...], gs.Constant] = {}
        self._reshaped: dict[tuple[int, tuple[int, ...]], gs.Constant] = {}

    @property
    def opset(self) -> int:
        return self.model.opset

    def node(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        outputs: Sequence[gs.Tensor],
        attrs: dict[str, Any] | None = None,
        *,
        stem: str,
        domain: str | None = None,
    ) -> gs.Node:
        node = Node(op, self.model.unique_name(stem), dict(attrs or {}), inputs, outputs, domain=domain)
        self.made.append(node)
        return node

    def variable(self, stem: str, dtype: Any, shape: Sequence[int | str | None] | None) -> gs.Variable:
        return Variable(self.model.unique_name(stem), dtype, None if shape is None else list(shape))

    def constant(self, stem: str, values: np.ndarray) -> gs.Constant:
        return Constant(self.model.unique_name(stem), values)

    def reshaped(self, value: gs.Tensor, shape: tuple[int, ...]) -> gs.Constant:
        """A constant of the values of another one, shared by all that ask for the same one."""
        key = (id(value), shape)
        if key not in self._reshaped:
            values = query.constant(value)
            assert values is not None
            self._reshaped[key] = self.constant(value.name, values.reshape(shape))
        return self._reshaped[key]

    def computed(self, key: tuple[Any, ...], stem: str, compute: Callable[[], np.ndarray]) -> gs.Constant:
        """A constant that is computed once for all that ask with the same key."""
        if key not in self._constants:
            self._constants[key] = self.constant(stem, compute())
        return self._constants[key]

    def filled(self, stem: str, value: float, shape: tuple[int, ...], dtype: np.dtype) -> gs.Constant:
        """A constant of one value everywhere, shared by all that ask for the same one."""
        key = (value, shape, str(dtype))
        if key not in self._constants:
            self._constants[key] = self.constant(stem, np.full(shape, value, dtype=dtype))
        return self._constants[key]


def apply(fusion: Fusion, matches: Sequence[Match], model: Model) -> list[gs.Node]:
    """Rewrites `matches` in place; returns the node that stands for each, in the same order."""
    builder = Builder(model)
    stand: list[gs.Node] = []
    replacement: dict[int, list[gs.Node]] = {}
    removed: set[int] = set()
    unsorted: set[int] = set()
    for match in matches:
        builder.made = []
        # What others read of a site now comes from a node that stands later than its first reader may.
        if any(match.escapes(value) for value in fusion.kept(match)):
            unsorted.add(id(match.graph))
        source = origin.joined(fusion.name, match.output.name, match.nodes)  # before rewriting takes the output off its node
        stand.append(fusion.rewrite(match, builder))
        for node in builder.made:
            origin.mark(node, source)
        replacement[id(match.root)] = builder.made
        removed.update(id(node) for node in match.nodes)
    if matches:
        index = matches[0].index
        gone = _with_unread([node for match in matches for node in match.nodes], removed, index)
        # Only now: what is rewritten still reads attributes and tensors of the nodes it replaces.
        detach(gone)
        for graph in {id(graph): graph for graph in (index.owner[id(node)] for node in gone)}.values():
            nodes = list(_replaced(graph.nodes, replacement, removed))
            graph.nodes = _sorted(nodes) if id(graph) in unsorted else nodes
        _define(fusion, stand, model)
    return stand


def _with_unread(nodes: Sequence[gs.Node], removed: set[int], index: Index) -> list[gs.Node]:
    """`nodes`, and those whose results nobody reads once they are gone (Constant nodes, shapes), which are added to `removed`."""
    gone = list(nodes)
    for node in gone:
        for value in node.inputs:
            source = value.inputs[0] if value.inputs else None
            if source is None or id(source) in removed or id(source) not in index.owner:
                continue
            if any(isinstance(held, gs.Graph) for held in source.attrs.values()):
                continue
            if all(id(made) not in index.outputs and all(id(reader) in removed for reader in made.outputs) for made in source.outputs):
                removed.add(id(source))
                gone.append(source)
    return gone


def _sorted(nodes: Sequence[gs.Node]) -> list[gs.Node]:
    """`nodes` with each after those whose results it reads, and otherwise in the order given."""
    source = {id(value): node for node in nodes for value in node.outputs}
    done: set[int] = set()
    order: list[gs.Node] = []
    for first in nodes:
        pending = [first]
        while pending:
            node = pending[-1]
            before = [source[id(value)] for value in reads(node) if id(value) in source]
            waiting = [other for other in before if id(other) not in done and other is not node]
            if not waiting or id(node) in done:
                pending.pop()
                if id(node) not in done:
                    done.add(id(node))
                    order.append(node)
            pending.extend(reversed(waiting) if id(node) not in done else ())
    return order


def reads(node: gs.Node) -> Iterator[gs.Tensor]:
    """Tensors that a node reads, those that its bodies capture too."""
    yield from node.inputs
    for body in node.attrs.values():
        if isinstance(body, gs.Graph):
            yield from body.outputs
            for inner in body.nodes:
                yield from reads(inner)


def _replaced(nodes: Sequence[gs.Node], replacement: dict[int, list[gs.Node]], removed: set[int]) -> Iterator[gs.Node]:
    for node in nodes:
        yield from replacement.get(id(node), ())
        if id(node) not in removed:
            yield node


def _define(fusion: Fusion, nodes: Sequence[gs.Node], model: Model) -> None:
    for function in sorted(fusion.definitions(nodes, model.opset), key=lambda function: function.name):
        functions.add(model, function)
