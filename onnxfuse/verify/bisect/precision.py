"""Which nodes must stay in float32, so that a model in half precision still agrees.

The search is over the nodes that the conversion would halve: first, by delta debugging, over operator types, then over the nodes of those
types in the order of the error that each makes alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph import query, read, write
from onnxfuse.graph.convert import node_graphs
from onnxfuse.graph.precision import Precision, convert
from onnxfuse.verify.bisect.oracles import Judge, Run
from onnxfuse.verify.bisect.search import Asked, Oracle, OutOfTries, Progress, shrinking

_FLOAT, _HALVES = TensorProto.FLOAT, (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# These move values, or choose among them: what they read is in half precision already, and so is what they give.
_MOVES = frozenset(
    """Abs Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Max MaxPool Min Neg Pad Relu Reshape Slice
    SpaceToDepth Split Squeeze Tile Transpose Unsqueeze Where""".split()  # noqa: SIM905
)
# Share of the limit that what is left in half precision may take: other inputs round otherwise.
ROOM = 0.75
FEW = 24  # nodes that a person may want to read the names of


@dataclass(frozen=True)
class Remedy:
    """What must stay in float32.

    verdict: "agree" (nothing need), "found", or "elsewhere" (it disagrees with every node in float32). keep: nodes by name, or by their
    first output. types: the fewest operator types that suffice. figure: the disagreement with all in half precision; remaining: with
    `keep` in float32. alone: with just that node in half precision. nodes: how many the search was over. diffuse: rounding adds up
    over so many nodes that they were not narrowed down. complete: whether the limit on tries sufficed; if not, `keep` does agree, and
    may be larger than it need be.
    """

    verdict: str
    figure: float
    keep: tuple[str, ...] = ()
    remaining: float = math.nan
    alone: Mapping[str, float] = field(default_factory=dict)
    types: tuple[str, ...] = ()
    nodes: int = 0
    tries: int = 0
    diffuse: bool = False
    complete: bool = True

    def options(self, nodes: Mapping[str, str]) -> tuple[str, ...]:
        """`keep` as values of --keep-fp32: an operator type where each of its `nodes` (name -> operator type) is in it, or where nodes are
        too many to be named.
        """
        if self.diffuse:
            return self.types
        counts, kept = Counter(nodes.values()), Counter(nodes[name] for name in self.keep)
        whole = [op for op in kept if kept[op] == counts[op] > 1]
        return (*whole, *(name for name in self.keep if nodes[name] not in whole))


def fewest(nodes: Mapping[str, str], oracle: Oracle, *, limit: int = 1000, say: Progress = lambda text: None) -> Remedy:
    """The smallest set of `nodes` (name -> operator type) that must be off for the rest to agree with some ROOM left. The set is
    1-minimal: with any one of it in half precision as well, that no longer holds. Raises OnnxfuseError where the model in half precision
    cannot be run.
    """
    asked = Asked(oracle, limit=limit, say=say)
    every = tuple(nodes)

    def figure(kept: Collection[str]) -> float:
        return asked.ask([name for name in every if name not in kept]).figure

    say("everything in half precision")
    whole, none = figure(()), math.nan
    remedy = Remedy("agree", whole, nodes=len(every))
    if math.isnan(whole):
        raise OnnxfuseError(asked.faults[frozenset(every)])
    if whole > 1:
        say("everything in float32")
        none = figure(every)
        most = ROOM if none <= ROOM / 2 else 1.0
        remedy = replace(remedy, verdict="elsewhere") if not none <= 1 else _search(remedy, asked, nodes, most)
        if remedy.verdict == "found":
            remedy = replace(remedy, remaining=figure(remedy.keep))
    return replace(remedy, tries=asked.tries)


def _search(remedy: Remedy, asked: Asked, nodes: Mapping[str, str], most: float) -> Remedy:
    by_type: dict[str, list[str]] = defaultdict(list)
    for name, op in nodes.items():
        by_type[op].append(name)
    keep, alone, types, diffuse = tuple(nodes), dict[str, float](), tuple(by_type), False

    def agrees(kept: Iterable[str]) -> bool:
        kept = frozenset(kept)
        return asked.ask([name for name in nodes if name not in kept]).figure <= most

    try:
        for types in shrinking(tuple(by_type), lambda types: agrees(name for op in types for name in by_type[op])):
            keep = tuple(name for name in nodes if nodes[name] in types)
            asked.say(f"try {asked.tries + 1}, {len(types)} of {len(by_type)} operator types left")
        for name in keep:
            asked.say(f"try {asked.tries + 1}, {name} alone")
            alone[name] = asked.ask((name,)).figure
        ranked = sorted(keep, key=lambda name: -alone[name] if alone[name] == alone[name] else 0.0)
        ranked = ranked[: _shortest(ranked, agrees)]
        keep, diffuse = tuple(ranked), len(ranked) > FEW
        # The smallest errors are the likeliest to be tolerable. Of many that are alike, leaving some out tells nobody anything.
        for smaller in () if diffuse else _pruned(ranked, agrees):
            keep = tuple(smaller)
            asked.say(f"try {asked.tries + 1}, {len(keep)} nodes left")
    except OutOfTries:
        remedy = replace(remedy, complete=False)
    kept = {name: alone.get(name, math.nan) for name in nodes if name in keep}
    return replace(remedy, verdict="found", keep=tuple(kept), alone=kept, types=types, diffuse=diffuse)


def _shortest(ranked: Sequence[str], agrees: Any) -> int:
    """The length of a prefix that agrees: the shortest, where agreement grows with it. The whole must agree."""
    low, high = 0, len(ranked)  # low disagrees, high agrees
    while high - low > 1:
        middle = (low + high) // 2
        if agrees(ranked[:middle]):
            high = middle
        else:
            low = middle
    return high


def _pruned(ranked: Sequence[str], agrees: Any) -> Iterable[list[str]]:
    """Ever shorter lists that agree, until none of the last can be left out."""
    left, more = list(ranked), True
    while more:
        more = False
        for name in reversed(list(left)):
            if len(left) > 1 and agrees(other for other in left if other != name):
                left.remove(name)
                more = True
                yield left


# -------------------------------------------------------------------------------------------------------- conversions


class Conversions:
    """Conversions of one model, differing in what stays in float32.

    model: in float32, as it is before its conversion. ranges: as of `graph.precision.convert`. Each is computed in float32 and rounded
    after each operator, as kernels with float32 accumulators do. onnxruntime has hardly a kernel for half precision on the CPU, and
    leaves the rounding out between two operators without one; onnx.reference even sums in half precision.
    """

    def __init__(self, model: Path, precision: Precision, ranges: Mapping[str, float] | None, folder: Path) -> None:
        self.model = model
        self.precision = precision
        self.ranges = ranges
        self.folder = folder
        self._count = itertools.count()

    def nodes(self) -> dict[str, str]:
        """Name (else first output) -> operator type of each node that the conversion would halve, in topological order."""
        loaded = read.load(self.model)
        found = {node.name or node.outputs[0].name: node.op for graph in loaded.graphs() for node in graph.nodes if _computes(node)}
        kept = {name for name, _, _ in convert(loaded, self.precision, (), self.ranges).float_nodes}
        return {name: op for name, op in found.items() if name not in kept}

    def write(self, kept: Sequence[str], path: Path) -> None:
        """Writes the model in half precision but for the nodes `kept`."""
        loaded = read.load(self.model)
        convert(loaded, self.precision, kept, self.ranges)
        write.save(loaded, path)

    def oracle(self, nodes: Collection[str], run: Run, judge: Judge) -> Oracle:
        """On means half: the disagreement with just these of `nodes` in half precision."""

        def ask(on: frozenset[str]) -> float:
            path = self.folder / f"half{next(self._count)}.onnx"
            try:
                self.write([name for name in nodes if name not in on], path)
                emulate(path)
                return judge(run(path))
            finally:
                path.unlink(missing_ok=True)
                Path(f"{path}.data").unlink(missing_ok=True)

        return ask


def _computes(node: Any) -> bool:
    floats = any(query.dtype(tensor) == np.float32 for tensor in (*node.inputs, *node.outputs))
    return floats and node.op not in ("Shape", "Size")


def emulate(path: Path) -> None:
    """Makes of a model in half precision one in float32 that rounds wherever the other's tensors are: in place."""
    model = onnx.load(str(path))
    _emulate(model.graph)
    onnx.save(model, str(path))


def _emulate(graph: GraphProto) -> None:
    values = [*graph.input, *graph.output, *graph.value_info]
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    narrow = {name: kind for name, kind in kinds.items() if kind in _HALVES}
    for value in values:
        if value.name in narrow:
            value.type.tensor_type.elem_type = _FLOAT
    for tensor in graph.initializer:
        _widen(tensor)
    nodes = []
    for node in graph.node:
        for inner in node_graphs(node):
            _emulate(inner)
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen(attribute.t)
            if attribute.name == "dtype" and attribute.i in _HALVES:
                attribute.i = _FLOAT
        nodes.append(node)
        nodes.extend(_rounding(node, narrow))
    del graph.node[:]
    graph.node.extend(nodes)


def _rounding(node: NodeProto, narrow: Mapping[str, int]) -> Iterable[NodeProto]:
    """Casts to half precision and back behind a node's outputs, which it then makes under other names."""
    if node.op_type in _MOVES and not node.domain:
        return
    to_half = node.op_type == "Cast" and not node.domain
    for place, name in enumerate(node.output):
        if name not in narrow:
            continue
        exact, rounded = f"{name}/onnxfuse.exact", f"{name}/onnxfuse.rounded"
        node.output[place] = rounded if to_half else exact
        if not to_half:
            yield helper.make_node("Cast", [exact], [rounded], to=narrow[name])
        yield helper.make_node("Cast", [rounded], [name], to=_FLOAT)


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _HALVES:
        wide = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
