"""elementwise: a maximal chain or tree of element-wise operators in one generated kernel.

    (y1, y2...) = expression(x1, x2...)        of any form: arithmetic, activations, comparisons, Where, casts; inputs of the full shape, or
                                               broadcast (scalars, one value a channel, one a row); a reduction of each row may end it

When it wins: where TensorRT does not merge the operators by itself, such as long scalar chains between convolutions, gates, reductions in
the middle. Plain chains it does merge, so every chain is a site with a verdict of its own, by its form. Source of the idea: the pointwise
fusion of XLA and of TorchInductor. Here the operator has no fixed kernel: its expression is an attribute (onnxfuse/elementwise), and CUDA
source is generated from it when an engine is built.

Where a site ends:
- What directly follows a convolution or matrix product and is its epilogue in TensorRT stays there: one bias, one activation, the residual.
- So does everything between the two products of an attention, which is one kernel in TensorRT.
- A quantization and what undoes it are part of a site only between element-wise operators: its operand is computed by one that may be in a
  site, and so are all readers of what comes back. Every other pair stays where TensorRT looks for it, at its products and convolutions.
- Nodes at different levels (a node's level counts the operators of other kinds before it, on the longest path) are never in one site: so
  what a site computes is never needed to compute its inputs, and finding all sites takes one pass.
- A small tensor's operators are part of a larger one's site only if nothing else reads the small tensor: they are computed once for each
  element there.
- A reduction ends what is found so. Where what follows it reads nothing that depends on the site in another way, and a row fits into a
  block's registers, both are one site with the reduction in the middle.
- A tensor that somebody else reads becomes an output, up to MOST_OUTPUTS of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.elementwise import body
from onnxfuse.elementwise import expression as ex
from onnxfuse.elementwise.operators import FLOATS, MOST_OPERANDS, OPERATORS, QUANTIZED, REDUCTIONS, TYPES
from onnxfuse.errors import BadInput
from onnxfuse.fusions.base import Builder, Fusion, Index, Match, Miss, label, reads
from onnxfuse.fusions.pattern import DOMAIN
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

MOST_NODES = 192  # of a site; a longer chain is several
MOST_WIDTH = 4096  # elements of a row that a block's registers hold: 256 threads, 4 vectors, 4 elements
FEWEST_OPERATORS = 2  # a single one has nothing to save
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "BatchNormalization"})
_MATMULS = frozenset({"MatMul", "Einsum"})
_BIASES = frozenset({"Add", "Sub"})
_ACTIVATIONS = frozenset(
    """Relu LeakyRelu Elu Selu Clip Sigmoid Tanh HardSigmoid HardSwish Softplus Silu Gelu GeluTanh QuickGelu Mish Erf
    PRelu""".split()  # noqa: SIM905
)
_AFTER_RESIDUAL = frozenset({"Relu", "Clip", "LeakyRelu"})
_OWN = frozenset({"Silu", "QuickGelu", "Gelu", "GeluTanh", "LayerNormalization", "RMSNormalization"})
# What a node may carry: those that are read, and those that say nothing here (dtype is of the function's body, saturate of 8-bit types).
_QUANTIZATIONS = frozenset({"QuantizeLinear", "DequantizeLinear"})
_QUANTIZING = frozenset({"axis", "saturate", "block_size", "precision", "output_dtype"})
_PER_AXIS = 13  # the opset from which a scale may be one of an axis
_READ = frozenset(name for operator in OPERATORS.values() for name in operator.attributes)
_ATTRIBUTES = _READ | {"saturate", "approximate", "dtype", "to", "min", "max"}
_NORMS = ("LayerNormalization", "RMSNormalization")
_WEIGHTLESS = frozenset({"Cast", "Identity", "Constant"})
_HOPS = 4  # element-wise nodes between a product and the softmax of an attention

Shape = list[Any]


@dataclass(frozen=True, eq=False)
class Chain(Match):
    """A site: the expression, and the tensors that it reads and makes, in its order."""

    expression: ex.Expression
    inputs: tuple[gs.Tensor, ...]
    outputs: tuple[gs.Tensor, ...]
    shapes: tuple[tuple[int, ...] | None, ...]  # what constants among the inputs are reshaped to


class Elementwise(Fusion):
    name = "elementwise"
    kind = "fused"
    needs = ("layernorm", "rmsnorm", "gelu", "groupnorm", "silu")
    patterns = ()
    # What others read of a chain, besides its last output.
    keeps = tuple(f"output{number}" for number in range(1, ex.MOST_OUTPUTS))

    def find(self, model: Model, index: Index, far: bool) -> tuple[list[Match], list[Miss]]:
        found: list[Match] = []
        misses: list[Miss] = []
        for graph in model.graphs():
            survey = _Survey(graph, model, index, _islands(graph, model, index))
            for region in _with_rows(self, survey):
                chain = _chain(self, graph, region, index)
                if isinstance(chain, Chain):
                    found.append(chain)
                elif chain and (far or chain.told):
                    names = tuple(label(node) for node in region.nodes)
                    misses.append(Miss(self.name, label(region.nodes[-1]), names, None, chain.reason))
            if far:
                misses += [Miss(self.name, label(node), (label(node),), None, reason) for node, reason in survey.refused]
        return found, misses

    def variant(self, match: Match) -> str:
        assert isinstance(match, Chain)
        return match.expression.form

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        assert isinstance(match, Chain)
        given = match.expression
        for value, tensor in zip(given.outputs, match.outputs, strict=True):
            if tensor.dtype is None:
                tensor.dtype = ex.NUMPY[given.types[value]]
        attrs = {body.ATTRIBUTE: given.text}
        inputs = [
            tensor if shape is None else new.reshaped(tensor, shape) for tensor, shape in zip(match.inputs, match.shapes, strict=True)
        ]
        return new.node(body.op_type(given), inputs, match.outputs, attrs, stem=self.name, domain=DOMAIN)

    def definitions(self, nodes: Sequence[gs.Node], opset: int) -> tuple[onnx.FunctionProto, ...]:
        texts = dict.fromkeys(str(node.attrs[body.ATTRIBUTE]) for node in nodes)
        return tuple(body.function(ex.parse(text), opset, DOMAIN) for text in texts)


FUSION = Elementwise()


# --- which nodes belong together ----------------------------------------------------------------------------------------


@dataclass
class _Region:
    """Nodes that are joined, in the graph's order; the shape of the largest; and the reduction that ends it, if one does."""

    nodes: list[gs.Node]
    shape: Shape
    end: gs.Node | None = None


class _Survey:
    """One pass over a graph: which nodes may be in a site, their levels, and which are joined."""

    def __init__(self, graph: gs.Graph, model: Model, index: Index, islands: frozenset[int] = frozenset()) -> None:
        self.graph = graph
        self.islands = islands
        self.opset = model.opset
        self.index = index
        self.level: dict[int, int] = {}
        self.parent: dict[int, int] = {}
        self.region: dict[int, _Region] = {}
        self.stage: dict[int, str] = {}  # tensors that are a product's, up to some point of its epilogue
        self.refused: list[tuple[gs.Node, str]] = []
        self.attention = _attention(graph)
        self.position = {id(node): at for at, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            self._visit(node)

    def regions(self) -> list[_Region]:
        """In the graph's order, as are the nodes of each."""
        for region in self.region.values():
            region.nodes.sort(key=lambda node: self.position[id(node)])
        return sorted(self.region.values(), key=lambda region: self.position[id(region.nodes[-1])])

    def _visit(self, node: gs.Node) -> None:
        reason = self._why_not(node)
        if reason is None:
            self._join(node)
            return
        if reason:
            self.refused.append((node, reason))
        makers = [value.inputs[0] for value in reads(node) if value.inputs]
        self.level[id(node)] = max([self.level.get(id(made), 0) + (id(made) in self.parent) for made in makers], default=0)

    def _why_not(self, node: gs.Node) -> str | None:
        """Why a node can be part of no site; empty where it is of another kind altogether."""
        self._note_product(node)
        if not _is_known(node) or not node.outputs:
            return ""
        if node.op in _QUANTIZATIONS:
            return None if id(node) in self.islands else "quantizes for others than element-wise operators, or in a way that no kernel has"
        if id(node) in self.attention:
            return "is part of an attention, which TensorRT has one kernel for"
        if self._in_epilogue(node):
            return "is the epilogue of the matrix product or convolution before it"
        return _refuse_node(node, self.opset)

    # Epilogues: the stage of a tensor is product, bias, residual or active.

    def _note_product(self, node: gs.Node) -> None:
        if node.op in _PRODUCTS and not node.domain and node.outputs:
            self.stage[id(node.outputs[0])] = "product"

    def _in_epilogue(self, node: gs.Node) -> bool:
        for place, value in enumerate(node.inputs):
            stage = self.stage.get(id(value))
            if stage is None or len(value.outputs) != 1 or id(value) in self.index.outputs:
                continue
            others = [other for at, other in enumerate(node.inputs) if at != place and not other.is_empty()]
            constant = all(query.is_constant(other) for other in others)
            if node.op in _BIASES and constant and stage == "product":
                after = "bias"
            elif node.op == "Add" and not constant and stage in ("product", "bias") and query.same_shape(value, node.outputs[0]):
                after = "residual"
            elif node.op in _ACTIVATIONS and constant and (stage != "residual" or node.op in _AFTER_RESIDUAL) and stage != "active":
                after = "active"
            else:
                continue
            self.stage[id(node.outputs[0])] = after
            return True
        return False

    # Levels and joining.

    def _join(self, node: gs.Node) -> None:
        joined: list[int] = []
        level = 0
        for value in {id(value): value for value in node.inputs if value.inputs}.values():
            maker = value.inputs[0]
            if id(maker) not in self.parent:
                level = max(level, self.level.get(id(maker), 0))
                continue
            together = self._may_join(value, maker, node)
            level = max(level, self.level[id(maker)] + (not together))
            if together:
                joined.append(id(maker))
        roots = {self._root(at) for at in joined if self.level[at] == level}
        if not self._fits(node, roots):
            level += 1
            roots = set()
        self._unite(node, roots, level)

    def _may_join(self, value: gs.Tensor, maker: gs.Node, node: gs.Node) -> bool:
        """Whether what reads `value` can be in one site with what makes it."""
        region = self.region[self._root(id(maker))]
        if region.end is not None or query.shape(value) != region.shape:
            return False
        if node.op in REDUCTIONS:
            return value is node.inputs[0]
        full = query.shape(node.outputs[0])
        return full == region.shape or (len(value.outputs) == 1 and id(value) not in self.index.outputs)

    def _fits(self, node: gs.Node, roots: set[int]) -> bool:
        regions = [self.region[root] for root in roots]
        if sum(len(region.nodes) for region in regions) >= MOST_NODES:
            return False
        return node.op not in REDUCTIONS or all(region.shape == query.shape(node.inputs[0]) for region in regions)

    def _unite(self, node: gs.Node, roots: set[int], level: int) -> None:
        key = id(node)
        self.level[key] = level
        self.parent[key] = key
        ends = node.op in REDUCTIONS
        shape = query.shape(node.inputs[0] if ends else node.outputs[0])
        assert shape is not None
        nodes = [one for root in sorted(roots, key=lambda root: len(self.region[root].nodes)) for one in self.region.pop(root).nodes]
        for root in roots:
            self.parent[root] = key
        self.region[key] = _Region([*nodes, node], shape, node if ends else None)

    def _root(self, key: int) -> int:
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key


def _is_known(node: gs.Node) -> bool:
    if node.domain == DOMAIN:
        return node.op in _OWN
    return not node.domain and (node.op in OPERATORS or node.op in REDUCTIONS or node.op == "Swish") and node.op not in (_OWN - _STANDARD)


_STANDARD = frozenset({"Gelu", "LayerNormalization", "RMSNormalization"})


# --- quantization between element-wise operators ------------------------------------------------------------------------------


def _islands(graph: gs.Graph, model: Model, index: Index) -> frozenset[int]:
    """Quantizations, and what undoes them, that are between nodes that may be in a site."""
    pairs = [node for node in graph.nodes if node.op == "QuantizeLinear" and not node.domain and node.outputs]
    if not pairs:
        return frozenset()
    able = _Survey(graph, model, index).parent
    found: set[int] = set()
    for node in pairs:
        back = list(node.outputs[0].outputs)
        ends = [reader for one in back for reader in one.outputs[0].outputs]
        kept = {id(value) for one in (node, *back) for value in one.outputs} & index.outputs
        if kept or not back or not node.inputs[0].inputs or id(node.inputs[0].inputs[0]) not in able:
            continue
        undone = all(one.op == "DequantizeLinear" and not one.domain and one.outputs[0].outputs for one in back)
        if undone and all(id(one) in able for one in ends) and all(_is_plain(one, model.opset) for one in (node, *back)):
            found.update(map(id, (node, *back)))
    return frozenset(found)


def _is_plain(node: gs.Node, opset: int) -> bool:
    """Whether a kernel can compute it: to or from 8 bits, constant scales for all or for each of an axis, one zero point."""
    given, scale, made = node.inputs[0], node.inputs[1], node.outputs[0]
    shape = query.shape(made)
    if shape is None or None in shape or not 0 < len(shape) <= ex.MOST_RANK or query.shape(given) != shape:
        return False
    wide, narrow = (given, made) if node.op == "QuantizeLinear" else (made, given)
    if _type(wide) not in FLOATS or _type(scale) != _type(wide) or _type(narrow) not in QUANTIZED or _zero_point(node) is None:
        return False
    if set(node.attrs) - _QUANTIZING or any(node.attrs.get(name, 0) for name in ("block_size", "precision")):
        return False
    sizes = query.shape(scale)
    if not query.is_constant(scale) or sizes is None:
        return False
    return query.scalar(scale) is not None or (opset >= _PER_AXIS and len(sizes) == 1 and sizes[0] == shape[_axis(node, len(shape))])


def _axis(node: gs.Node, rank: int) -> int:
    axis = int(node.attrs.get("axis", 1))
    return axis + rank if axis < 0 else min(axis, rank - 1)


def _zero_point(node: gs.Node) -> int | None:
    """Of all elements; None where they have several, or it is no constant."""
    if len(node.inputs) < 3 or node.inputs[2].is_empty():
        return 0
    values = query.constant(node.inputs[2])
    return int(values.flat[0]) if values is not None and values.size and (values == values.flat[0]).all() else None


def _attention(graph: gs.Graph) -> set[int]:
    """Element-wise nodes and softmaxes between two matrix products."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op != "Softmax" or node.domain or not node.outputs:
            continue
        after = _way(node.outputs[0], forward=True)
        if after is not None:
            found.update([id(node), *map(id, after)])
            found.update(map(id, _way(node.inputs[0], forward=False) or ()))
    return found


def _way(value: gs.Tensor, forward: bool) -> list[gs.Node] | None:
    """The element-wise nodes from `value` to the next matrix product, None where there is none within a few hops."""
    passed: list[gs.Node] = []
    waiting = [(value, 0)]
    reached = False
    for tensor, hops in waiting:
        for node in tensor.outputs if forward else tensor.inputs:
            if node.op in _MATMULS and not node.domain:
                reached = True
            elif hops < _HOPS and _is_known(node) and len(passed) < MOST_NODES:
                passed.append(node)
                waiting += [(other, hops + 1) for other in (node.outputs if forward else node.inputs)]
    return passed if reached else None


# --- whether a node can be computed by a kernel -------------------------------------------------------------------------


def _type(value: gs.Tensor) -> str:
    kind = query.dtype(value)
    return "?" if kind is None or isinstance(kind, int) else str(kind)


def _refuse_node(node: gs.Node, opset: int) -> str | None:
    """Types and shapes that a kernel does not have, or that are not proven."""
    values = [value for value in (*node.inputs, node.outputs[0]) if not value.is_empty()]
    if node.op in REDUCTIONS:
        return _refuse_reduction(node, opset)
    if any(body_ for body_ in node.attrs.values() if isinstance(body_, gs.Graph)):
        return "has a body"
    full = query.shape(node.outputs[0])
    if full is None or None in full:
        return f"shape of '{node.outputs[0].name}' is unknown"
    if len(full) > ex.MOST_RANK or not values[:-1]:
        return "has no operands, or too many axes"
    for value in values:
        if _type(value) not in TYPES:
            return f"'{value.name}' is of type {_type(value)}"
        shape = query.shape(value)
        if shape is None or len(shape) > len(full):
            return f"'{value.name}' is of unknown shape, or of more axes than the result"
        if any(size not in (1, whole) for size, whole in zip(shape, full[len(full) - len(shape) :], strict=True)):
            return f"'{value.name}' of shape {shape} is not proved to fit the result's {full}"
    unknown = set(node.attrs) - _ATTRIBUTES
    if unknown:
        return f"has an attribute that is not known ({sorted(unknown)[0]})"
    return _refuse_types(node)


def _refuse_types(node: gs.Node) -> str | None:
    op = _name(node)
    if op is None:
        return "is of a kind that no kernel has"
    operator = OPERATORS[op]
    operands = [value for value in node.inputs if not value.is_empty()]
    if not operator.least <= len(operands) <= operator.most:
        return f"has {len(operands)} operands, and kernels take up to {MOST_OPERANDS}"
    kinds = [_type(value) for value in operands[1 if operator.first_bool else 0 :]]
    if op == "Pow" and query.scalar(node.inputs[1]) is not None:
        kinds = kinds[:1]  # a constant exponent is taken in the type of the base
    if len(set(kinds)) != 1 or kinds[0] not in operator.takes:
        return f"{node.op} of {' and '.join(sorted(set(kinds)))} is not computed by kernels"
    if op == "Cast" and _cast_to(node) is None:
        return "casts to a type that kernels have not"
    return None


def _name(node: gs.Node) -> str | None:
    """The expression's operator for a node."""
    if node.op == "Gelu" and node.attrs.get("approximate", "none") == "tanh":
        return "GeluTanh"
    if node.op == "Swish":
        return "Silu" if node.attrs.get("alpha", 1.0) == 1.0 else None
    return str(node.op)


def _cast_to(node: gs.Node) -> str | None:
    try:
        kind = onnx.helper.tensor_dtype_to_np_dtype(int(node.attrs["to"]))
    except (KeyError, TypeError, ValueError):
        return None
    return str(kind) if str(kind) in TYPES else None


def _refuse_reduction(node: gs.Node, opset: int) -> str | None:
    given = node.inputs[0]
    shape = query.shape(given)
    if shape is None or not shape or None in shape or len(shape) > ex.MOST_RANK:
        return f"shape of '{given.name}' is unknown, or has no axes"
    if _type(given) not in REDUCTIONS[node.op].takes or _type(node.outputs[0]) not in ("?", _type(given)):
        return f"reduces {_type(given)}"
    if len([value for value in node.outputs if not value.is_empty()]) != 1:
        return "has other outputs than the norm"
    last = (-1, len(shape) - 1)
    if node.op.startswith("Reduce"):
        return None if _axes(node) in ([last[0]], [last[1]]) else "does not reduce the last axis alone"
    default = 1 if opset < 13 and node.op.endswith("Softmax") else -1
    if node.attrs.get("axis", default) not in last:
        return "is not over the last axis alone"
    if node.attrs.get("stash_type", 1) != 1:
        return "keeps its statistics in another type"
    for value in node.inputs[1:]:
        if value.is_empty() or query.shape(value) != shape[-1:] or _type(value) != _type(given):
            return f"'{value.name}' is not one value for each element of a row"
    return None


def _axes(node: gs.Node) -> list[int]:
    """The axes of a reduction; none where it reduces all, or they are not known."""
    if len(node.inputs) > 1 and not node.inputs[1].is_empty():
        values = query.constant(node.inputs[1])
        return [] if values is None else [int(axis) for axis in values.reshape(-1)]
    return list(node.attrs.get("axes") or ())


# --- from nodes to an expression ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Not:
    """A region that is no site. told: worth a word without being asked."""

    reason: str
    told: bool = False


def _parts(region: _Region, index: Index) -> list[_Region]:
    """The region; where others read a small tensor of it, those of small tensors, which stay outside, and what is left. Small tensors are
    never made of large ones, so that no part is needed to compute what it needs.
    """
    inside = {id(node) for node in region.nodes}
    small = [node for node in region.nodes if not _is_whole(node, region)]
    if not any(_read_outside(node, inside, index) for node in small):
        return [region]
    return [*_of_one_shape(small), replace(region, nodes=[node for node in region.nodes if _is_whole(node, region)])]


def _with_rows(fusion: Fusion, survey: _Survey) -> list[_Region]:
    """All regions, as parts; one that ends in a reduction and the one behind it as a single region, where they can be one site."""
    parts = [(region, _parts(region, survey.index)) for region in survey.regions()]
    rows = _Rows(survey, [region for region, own in parts if len(own) == 1])
    joined: dict[int, list[_Region]] = {}  # what stands in the place of a region
    for first, second in rows.pairs():
        if id(first) in joined or id(second) in joined:
            continue
        alone = [_chain(fusion, survey.graph, one, survey.index) for one in (first, second)]
        feeders = [region for region in rows.feeders(first, second) if id(region) not in joined]
        for together in ([first, second, *feeders], [first, second]):
            whole = rows.whole(together)
            is_site = len(whole.nodes) <= MOST_NODES and isinstance(_chain(fusion, survey.graph, whole, survey.index), Chain)
            if is_site and _OWN_KERNEL not in alone and rows.join(first, whole):
                joined.update({id(region): [] for region in together})
                joined[id(second)] = [whole]
                break
    return [part for region, own in parts for part in joined.get(id(region), own)]


class _Rows:
    """Which regions may be one although a reduction is between them: those that stay apart from what is on another way between them."""

    def __init__(self, survey: _Survey, regions: Sequence[_Region]) -> None:
        self.survey = survey
        self.regions = regions
        # Nodes that will be one, found by any of them: those of a region at first.
        self.group = {id(node): region.nodes for region in survey.region.values() for node in region.nodes}
        self.of = {id(node): region for region in regions for node in region.nodes}

    def pairs(self) -> Iterator[tuple[_Region, _Region]]:
        """Each region whose reduction ends in a short row, with the one that reads it."""
        for first in self.regions:
            if first.end is None or not isinstance(first.shape[-1], int) or first.shape[-1] > MOST_WIDTH:
                continue
            readers = {id(node): node for node in first.end.outputs[0].outputs}.values()
            behind = list({id(self.of[id(node)]): self.of[id(node)] for node in readers if id(node) in self.of}.values())
            second = behind[0] if len(behind) == 1 and all(id(node) in self.of for node in readers) else None
            if second is None or second.end is not None or second.shape != first.shape or self._level(second) != self._level(first) + 1:
                continue
            yield first, second

    def feeders(self, first: _Region, second: _Region) -> list[_Region]:
        """Regions beside the first that serve the second alone: nothing else needs what they make."""
        inside = set(map(id, second.nodes))
        found = {id(self.of[id(made)]): self.of[id(made)] for node in second.nodes for made in self._makers(node) if id(made) in self.of}
        return [
            region
            for region in found.values()
            if region is not first
            and region is not second
            and region.end is None
            and region.shape == first.shape
            and self._level(region) == self._level(first)
            and not any(_read_outside(node, inside | set(map(id, region.nodes)), self.survey.index) for node in region.nodes)
        ]

    def whole(self, regions: Sequence[_Region]) -> _Region:
        nodes = [node for region in regions for node in region.nodes]
        return _Region(sorted(nodes, key=lambda node: self.survey.position[id(node)]), regions[0].shape)

    def join(self, first: _Region, whole: _Region) -> bool:
        """Makes nodes one, unless something between them would then need what they make. first: of the lowest level among them."""
        inside = set(map(id, whole.nodes))
        seen = set(inside)
        waiting = [made for node in whole.nodes for made in self._makers(node) if id(made) not in inside]
        while waiting:
            node = waiting.pop()
            for one in self.group.get(id(node), [node]):
                if id(one) in seen or self.survey.level.get(id(one), -1) < self._level(first):
                    continue  # of a lower level, or of the graph around: it needs nothing of them
                seen.add(id(one))
                makers = self._makers(one)
                if any(id(made) in inside for made in makers):
                    return False
                waiting += makers
        self.group.update({id(node): whole.nodes for node in whole.nodes})
        return True

    def _level(self, region: _Region) -> int:
        return self.survey.level[id(region.nodes[0])]

    @staticmethod
    def _makers(node: gs.Node) -> list[gs.Node]:
        return [value.inputs[0] for value in reads(node) if value.inputs]


def _of_one_shape(nodes: Sequence[gs.Node]) -> list[_Region]:
    """Nodes that are joined by tensors of the shape that they make, in the order given."""
    found: list[_Region] = []
    for node in nodes:
        shape = query.shape(node.outputs[0])
        assert shape is not None
        makers = {id(value.inputs[0]) for value in node.inputs if value.inputs}
        joined = [of for of in found if of.shape == shape and any(id(maker) in makers for maker in of.nodes)]
        found = [of for of in found if of not in joined]
        found.append(_Region([*(maker for of in joined for maker in of.nodes), node], shape))
    return found


def _chain(fusion: Fusion, graph: gs.Graph, region: _Region, index: Index) -> Chain | _Not:
    nodes = region.nodes
    inside = {id(node) for node in nodes}
    if sum(node.op not in _WEIGHTLESS for node in nodes) < FEWEST_OPERATORS:
        return _Not("is a single operator, and there is nothing to save")
    if len(region.shape) < 2:
        return _Not("computes a vector or a scalar, which is more likely a shape than data")
    outputs = [node.outputs[0] for node in nodes if _read_outside(node, inside, index)]
    if not outputs:
        return _Not("is read by nobody")
    if len(outputs) > ex.MOST_OUTPUTS:
        return _Not(f"has {len(outputs)} outputs, and a kernel {ex.MOST_OUTPUTS} at most", told=True)
    writer = _Writer(region.shape, inside)
    try:
        for node in nodes:
            writer.node(node)
        given = writer.expression(outputs)
    except BadInput as fault:
        return _Not(str(fault), told=True)
    if _has_own_kernel(given):
        return _OWN_KERNEL
    # The last node stands for the site: all that the site reads is made before it.
    named = {f"output{number}": value for number, value in enumerate(reversed(outputs))}
    read = tuple(writer.tensors)
    return Chain(fusion, graph, nodes[-1], named, tuple(nodes), index, given, read, tuple(outputs), tuple(writer.shapes))


_OWN_KERNEL = _Not("is what skip_layernorm, skip_rmsnorm or bias_gelu have kernels of their own for")
_OWN_KERNELS = frozenset(
    f"{sums}{last}" for sums, ends in (("Add-Add-", _NORMS), ("Add-", _NORMS), ("Add-", ("Gelu", "GeluTanh", "QuickGelu"))) for last in ends
)


def _has_own_kernel(given: ex.Expression) -> bool:
    """Whether an expression is one that another fusion's plugin computes: measuring it twice would only take time."""
    return given.form in _OWN_KERNELS and all(one.axes in ("1" * given.rank, "1") for one in given.inputs)


def _is_whole(node: gs.Node, region: _Region) -> bool:
    return node is region.end or query.shape(node.outputs[0]) == region.shape


def _read_outside(node: gs.Node, inside: set[int], index: Index) -> bool:
    value = node.outputs[0]
    return id(value) in index.outputs or any(id(reader) not in inside for reader in value.outputs)


class _Writer:
    """Writes the steps of nodes, one after another."""

    def __init__(self, shape: Shape, inside: set[int]) -> None:
        self.shape = shape
        self.inside = inside
        self.tensors: list[gs.Tensor] = []
        self.shapes: list[tuple[int, ...] | None] = []
        self.scales: dict[tuple[int, int], int] = {}
        self.inputs: list[ex.Input] = []
        # Values before all inputs are known: an input by its place, a step by its place behind LATER.
        self.values: dict[int, int] = {}
        self.constants: dict[tuple[str, str], int] = {}
        self.steps: list[ex.Step] = []

    def node(self, node: gs.Node) -> None:
        op = _name(node) or node.op
        if op in REDUCTIONS:
            self.values[id(node.outputs[0])] = self.add(self.reduction(node))
            return
        if op in _QUANTIZATIONS:
            self.values[id(node.outputs[0])] = self.add(self.quantization(node))
            return
        operator = OPERATORS[op]
        base = _type(node.inputs[0])
        exponent = node.inputs[1] if op == "Pow" else None
        operands = [ex.ABSENT if value.is_empty() else self.value(value, base if value is exponent else "") for value in node.inputs]
        if op == "Cast":
            step = ex.step("Cast", *operands, to=_cast_to(node) or "")
        elif op == "Clip":
            step = ex.step("Clip", *self.bounds(node, operands, base))
        else:
            given = {name: node.attrs[name] for name in operator.attributes if name in node.attrs}
            step = ex.step(op, *operands, **{name: float(value) for name, value in given.items()})
        self.values[id(node.outputs[0])] = self.add(step)

    def bounds(self, node: gs.Node, operands: list[int], base: str) -> list[int]:
        """Those of Clip, which were attributes once."""
        if len(operands) == 1:
            given = [node.attrs.get(name) for name in ("min", "max")]
            operands += [ex.ABSENT if bound is None else self.constant(base, float(bound)) for bound in given]
        while operands[-1] == ex.ABSENT:
            operands.pop()
        return operands

    def reduction(self, node: gs.Node) -> ex.Step:
        given, *others = (self.value(value) for value in node.inputs[: 1 if node.op.startswith("Reduce") else None])
        if node.op.startswith("Reduce"):
            return ex.step(node.op, given, keepdims=float(node.attrs.get("keepdims", 1)))
        if node.op.endswith("Normalization"):
            return ex.step(node.op, given, *others, epsilon=float(node.attrs.get("epsilon", 1e-5)))
        return ex.step(node.op, given)

    def quantization(self, node: gs.Node) -> ex.Step:
        given, scale = self.value(node.inputs[0]), self.scale(node)
        zero = float(_zero_point(node) or 0)
        if node.op == "DequantizeLinear":
            return ex.step(node.op, given, scale, zero=zero)
        low, high = QUANTIZED[_type(node.outputs[0])]
        return ex.step(node.op, given, scale, low=low, high=high, zero=zero)

    def scale(self, node: gs.Node) -> int:
        """A number; or the scales of an axis, as a constant that is broadcast along those behind it."""
        tensor = node.inputs[1]
        if query.scalar(tensor) is not None:
            return self.value(tensor)
        rank = len(query.shape(node.outputs[0]) or ())
        behind = rank - 1 - _axis(node, rank)
        key = (id(tensor), behind)
        if key not in self.scales:
            self.scales[key] = self.input(tensor, ex.Input(_type(tensor), "1" + "0" * behind), (-1, *((1,) * behind)))
        return self.scales[key]

    def input(self, tensor: gs.Tensor, given: ex.Input, shape: tuple[int, ...] | None = None) -> int:
        self.tensors.append(tensor)
        self.shapes.append(shape)
        self.inputs.append(given)
        return len(self.inputs) - 1

    def value(self, tensor: gs.Tensor, base: str = "") -> int:
        """The value that stands for a tensor: a step's, an input, or a constant of few digits. With `base` any constant, in that type."""
        known = self.values.get(id(tensor))
        if known is not None:
            return known
        one = query.scalar(tensor)
        kind = _type(tensor)
        if one is not None and (base or _is_formula(one)):
            return self.constant(base or kind, one)
        shape = query.shape(tensor)
        assert shape is not None
        whole = self.shape[len(self.shape) - len(shape) :]
        axes = "".join("1" if size == full else "0" for size, full in zip(shape, whole, strict=True))
        self.values[id(tensor)] = self.input(tensor, ex.Input(kind, axes))
        return self.values[id(tensor)]

    def constant(self, kind: str, value: float) -> int:
        made = ex.constant(kind, value)
        key = (kind, float(made.get("value")).hex())
        if key not in self.constants:
            self.constants[key] = self.add(made)
        return self.constants[key]

    def add(self, step: ex.Step) -> int:
        self.steps.append(step)
        return _LATER + len(self.steps) - 1

    def expression(self, outputs: Sequence[gs.Tensor]) -> ex.Expression:
        """The whole, with values numbered: inputs first, then steps."""

        def final(value: int) -> int:
            return value if value < _LATER else value - _LATER + len(self.inputs)

        steps = tuple(replace(step, operands=tuple(map(final, step.operands))) for step in self.steps)
        return ex.checked(ex.Expression(len(self.shape), tuple(self.inputs), steps, tuple(final(self.values[id(v)]) for v in outputs)))


_LATER = 1 << 20


def _is_formula(value: float) -> bool:
    """Whether a number is one of few digits, as formulas have them: it then is part of the expression. Others are inputs, so that layers
    that differ in trained numbers alone share a kernel."""
    return not np.isfinite(value) or (abs(value) <= 64 and value * 8 == int(value * 8))
