"""Writing half precision into a model: float16 or bfloat16, with float32 islands where half would be wrong.

Why not onnxruntime.transformers.float16, the best kept converter: no bfloat16 target, it knows no value ranges, its block list
is by operator only, and it halves whatever a function-domain or custom node reads without asking whether it can take it.

Rules. Graph inputs and outputs keep their declared types, with one Cast a tensor at the edge. Each type variable of an operator
takes half if its schema allows half at the model's opset (Conv has bfloat16 only since opset 22), float32 otherwise. All float
inputs of a node so have one type, as a strongly typed TensorRT network wants, but for those that the operator fixes (scales of Resize).
In float32 stay: what the caller names; what `ranges` shows to pass the half range, with everything that reads it; sums that
could pass it on the way; what reads a constant that half cannot hold (mask fills and bounds of Clip are clamped instead);
spelled-out norm statistics (a square that is averaged, up to the division by its root); angles of Sin and Cos, and index
arithmetic on whole numbers, where half has too few digits; dequantization of integer products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, TensorProto

from onnxfuse.elementwise import body as definition
from onnxfuse.elementwise import expression
from onnxfuse.errors import BadInput
from onnxfuse.graph import functions, query, weights
from onnxfuse.graph.ir import Constant, Node, Variable, bodies, redirect, set_input, set_output
from onnxfuse.graph.model import DOMAIN, Model
from onnxfuse.graph.names import shown

Precision = Literal["fp16", "bf16"]
_FLOAT = np.dtype(np.float32)
_HALF = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
_HALF_CODES = {"tensor(float16)": TensorProto.FLOAT16, "tensor(bfloat16)": TensorProto.BFLOAT16}
_SAFE = 0.5  # share of the half range that a measured value may fill: other inputs may go further than those measured

_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
_WINDOWS = frozenset({"BlackmanWindow", "HannWindow", "HammingWindow", "MelWeightMatrix", "DFT", "STFT"})
_SEQUENCES = frozenset(
    """ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceMap SplitToSequence
    Optional OptionalGetElement OptionalHasElement""".split()  # noqa: SIM905
)
_SUMS = frozenset({"CumSum", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceSum", "ReduceSumSquare"})
_SQUARE_SUMS = frozenset({"ReduceL2", "ReduceSumSquare"})
_STATISTICS = frozenset({"Add", "Clip", "Max", "Pow", "Reciprocal", "Reshape", "Sqrt", "Squeeze", "Unsqueeze"})
_MOVES = frozenset({"Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
_INTEGER_PRODUCTS = frozenset({"ConvInteger", "MatMulInteger"})
_SATURATE = frozenset({"Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Pad", "Where"})
_BOUNDS = frozenset({"Clip", "Max"})  # a bound above zero guards a division or a logarithm, which zero would not
_NEWEST_EXPORTED = 23  # the newest opset that torch's exporter writes
_FIRST_BF16 = 13  # the opset in which Cast and arithmetic learned bfloat16
_VANISHES = "vanishes in half precision"
_LAZY = 1 << 20  # bytes; larger weights are converted while they are written
_PARAMETER = 1 << 16  # elements; larger constants are weights, where a few vanished values are counted and do no harm
_CONTROL = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True)
class PrecisionReport:
    """What convert did. Constants are counted once, however many nodes read them."""

    precision: str
    half_nodes: int
    float_nodes: tuple[tuple[str, str, str], ...]  # name, operator, why it stays in float32
    casts: int
    clamped: dict[str, int] = field(default_factory=dict)  # constant -> finite values beyond the half range, set to its end
    vanished: dict[str, int] = field(default_factory=dict)  # constant -> values that became zero
    subnormal: dict[str, int] = field(default_factory=dict)  # constant -> values that became subnormal (fewer digits)


def convert(
    model: Model, precision: Precision, keep_fp32: Sequence[str] = (), ranges: Mapping[str, float] | None = None
) -> PrecisionReport:
    """Turns float32 into half precision, in place, best on a graph whose norms and GELUs are single nodes.

    keep_fp32: names of nodes or tensors, or operator types, that stay in float32; BadInput for a name that the model has not.
    ranges: largest absolute value of tensors by name, seen in a float32 run; NaN and inf count as beyond any range.
    """
    if precision not in _HALF:
        raise BadInput(f"precision {shown(precision)}: unknown; use fp16 or bf16")
    if precision == "bf16" and model.opset < _FIRST_BF16:
        raise BadInput(
            f"precision bf16: opset {model.opset} has no operator that takes bfloat16, {_FIRST_BF16} is the first; "
            f"export the model with opset {_FIRST_BF16} or newer, or use fp16"
        )
    work = _Conversion(model, _HALF[precision], dict(ranges or {}))
    floats = [node for node in work.nodes.values() if work.is_float_node(node)]
    work.decide(list(keep_fp32))
    work.rewrite()
    kept = tuple((node.name, node.op, work.kept[id(node)]) for node in floats if id(node) in work.kept)
    return PrecisionReport(precision, len(floats) - len(kept), kept, work.casts, work.clamped, work.vanished, work.subnormal)


@cache
def _slots(op: str, domain: str, opset: int, half: str) -> tuple[tuple[bool, ...], tuple[bool, ...], bool, bool] | None:
    """Whether each input and each output may be half, and whether the last of them repeats; None for an unknown operator."""
    if not onnx.defs.has(op, opset, domain):
        return None
    schema = onnx.defs.get_schema(op, opset, domain)
    inputs = tuple(half in parameter.types for parameter in schema.inputs)
    outputs = tuple(half in parameter.types for parameter in schema.outputs)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    return (
        inputs,
        outputs,
        bool(schema.inputs) and schema.inputs[-1].option == variadic,
        bool(schema.outputs) and schema.outputs[-1].option == variadic,
    )


def _first_without_half(body: onnx.FunctionProto, given: Sequence[str], opset: int, half: str) -> str | None:
    """The first operator of a function's body that takes no half values where it gets them; `given`: the inputs that become half."""
    halves = set(given)
    for node in body.node:
        if node.op_type == "Cast":
            (to,) = (attribute for attribute in node.attribute if attribute.name == "to")
            # What is cast to no type by name is cast to that of the function's inputs (dtype).
            if to.ref_attr_name or to.i == _HALF_CODES[half]:
                halves.update(node.output)
            continue
        taken = [i for i, name in enumerate(node.input) if name in halves]
        slots = _slots(node.op_type, node.domain, opset, half)
        if not taken or slots is None:
            continue
        inputs, outputs, more_in, more_out = slots
        if not all(_slot(inputs, more_in, i) for i in taken):
            return str(node.op_type)
        halves.update(name for i, name in enumerate(node.output) if _slot(outputs, more_out, i))
    return None


_ANGLES = frozenset({"Sin", "Cos"})


def _operators_within(node: gs.Node) -> set[str]:
    """The operators of an element-wise expression; none for other nodes."""
    if definition.ATTRIBUTE not in node.attrs:
        return set()
    return {step.op for step in expression.parse(node.attrs[definition.ATTRIBUTE], f"node {shown(node.name)}").steps}


def _is_between_whole_numbers(node: gs.Node) -> bool:
    """Whether an element-wise expression computes integers from integers and constants, through floating point."""
    if definition.ATTRIBUTE not in node.attrs or any(_is_float(tensor) for tensor in node.outputs):
        return False
    return all(query.is_constant(tensor) for tensor in node.inputs if _is_float(tensor))


def _slot(slots: tuple[bool, ...], repeats: bool, index: int) -> bool:
    if index < len(slots):
        return slots[index]
    return bool(slots and repeats and slots[-1])


class _Conversion:
    """One run of convert: first `decide` which nodes stay in float32 and why, then `rewrite` the graph."""

    def __init__(self, model: Model, half: np.dtype[Any], ranges: dict[str, float]) -> None:
        self.model = model
        self.half = half
        self.half_name = "tensor(float16)" if half == np.float16 else "tensor(bfloat16)"
        self.largest = float(ml_dtypes.finfo(half).max)  # type: ignore[no-untyped-call]
        self.smallest = float(ml_dtypes.finfo(half).smallest_normal)  # type: ignore[no-untyped-call]
        self.ranges = ranges
        self.kept: dict[int, str] = {}
        self.casts = 0
        self.clamped: dict[str, int] = {}
        self.vanished: dict[str, int] = {}
        self.subnormal: dict[str, int] = {}
        self.nodes: dict[int, gs.Node] = {}
        self.home: dict[int, gs.Graph] = {}  # node, or graph input -> graph
        self._versions: dict[tuple[int, np.dtype[Any]], gs.Tensor] = {}
        self._behind: dict[int, list[gs.Node]] = {}  # node -> casts to put behind it
        self._first: dict[int, list[gs.Node]] = {}  # graph -> casts to put first
        for graph in model.graphs():
            self.home.update((id(tensor), graph) for tensor in graph.inputs)
            for node in graph.nodes:
                self.nodes[id(node)] = node
                self.home[id(node)] = graph
                _type_bodies(node)
        self.stored: dict[int, np.dtype[Any]] = {}  # float32 variables -> their type after conversion
        self._fills: set[int] = set()
        self._reaches: dict[int, float] = {}
        self._halfless: dict[tuple[str, tuple[bool, ...]], str | None] = {}

    # ------------------------------------------------------------------------------------------------------- deciding

    def decide(self, keep: list[str]) -> None:
        self._keep_named(keep)
        self._fills = self._mask_fills()
        for node in self.nodes.values():
            reason = self._own_reason(node)
            if reason:
                self._keep(node, reason)
                if reason.endswith(_VANISHES) and node.op != "BatchNormalization":
                    self._keep_until_division(node, None, reason)
        for node in self.nodes.values():
            self._keep_statistics(node)
        self._keep_whole_numbers()
        self._keep_between()
        for node in self.nodes.values():
            for i, tensor in enumerate(node.outputs):
                if _is_float(tensor):
                    self.stored[id(tensor)] = self._made(node, i)
            if node.op in ("Loop", "Scan") and not node.domain:
                for body in bodies(node):
                    kind = _FLOAT if id(node) in self.kept else self.half
                    self.stored.update((id(tensor), kind) for tensor in body.inputs if _is_float(tensor))

    def is_float_node(self, node: gs.Node) -> bool:
        return any(_is_float(tensor) for tensor in (*node.inputs, *node.outputs))

    def _keep(self, node: gs.Node, reason: str) -> None:
        self.kept.setdefault(id(node), reason)

    def _keep_named(self, keep: list[str]) -> None:
        wanted = set(keep)
        found: set[str] = set()
        for node in self.nodes.values():
            hits = wanted & {node.name, node.op, *(t.name for t in node.inputs), *(t.name for t in node.outputs)}
            if hits:
                found |= hits
                self._keep(node, f"asked for ({shown(min(hits))})")
        missing = wanted - found
        if missing:
            raise BadInput(f"keep in float32: no node, operator or tensor {shown(min(missing))}; `onnxfuse explain` lists them")

    def _own_reason(self, node: gs.Node) -> str | None:
        unknown = next((t for t in (*node.inputs, *node.outputs) if _is_untyped(t)), None)
        if unknown is not None and node.op not in _CONTROL:
            return f"the type of {shown(unknown.name)} is not known"
        if node.domain and node.domain != DOMAIN:
            return f"custom operator of domain {shown(node.domain)}"
        if node.op in _RANDOM and not node.domain:
            return "random values are drawn in float32"
        if node.op in _WINDOWS or (node.op == "CumSum" and not node.domain):
            return "loses too many digits in half precision"
        if node.op in _SEQUENCES and not node.domain:
            return "sequences keep their type"
        if _ANGLES & ({node.op} if not node.domain else _operators_within(node)):
            return "angles need more digits than half precision has"
        if _is_between_whole_numbers(node):
            return "an index needs more digits than half precision has"
        return self._dequantizes(node) or self._range_reason(node) or self._constant_reason(node) or self._schema_reason(node)

    def _constant_reason(self, node: gs.Node) -> str | None:
        """A constant that half cannot hold, where clamping it would change more than an end of the range."""
        if node.domain or node.op in _SATURATE:
            return None
        for tensor in node.inputs:
            if tensor.is_empty() or query.dtype(tensor) != _FLOAT or not query.is_constant(tensor) or self._is_fill(tensor):
                continue
            reach = self._reach(tensor)
            if reach > self.largest:
                return f"constant {shown(tensor.name)} reaches {reach:.3g}"
            if self._vanishes(tensor) and (node.op == "BatchNormalization" or reach < self.smallest):
                return f"constant {shown(tensor.name)} {_VANISHES}"
        return None

    def _reach(self, tensor: gs.Tensor) -> float:
        """Largest absolute value of a constant; inf and NaN do not count."""
        key = id(tensor)
        if key not in self._reaches:
            values = tensor._values if isinstance(tensor, gs.Constant) else None
            whole = query.constant(tensor) if not isinstance(values, weights.Weight) else None
            parts = weights.pieces(values) if isinstance(values, weights.Weight) else [] if whole is None else [whole]
            self._reaches[key] = max(map(_largest, parts), default=0.0)
        return self._reaches[key]

    def _vanishes(self, tensor: gs.Tensor) -> bool:
        value = query.constant(tensor) if math.prod(tensor.shape or [1]) <= _PARAMETER else None
        return value is not None and bool(((value != 0) & (value.astype(self.half) == 0)).any())

    def _schema_reason(self, node: gs.Node) -> str | None:
        """The operator's data cannot be half at this opset."""
        name = "float16" if self.half == np.float16 else "bfloat16"
        if node.domain == DOMAIN:
            operator = self._without_half(node)
            return f"{operator} takes no {name} in opset {self.model.opset}" if operator else None
        if node.op in _CONTROL or node.op in ("Cast", "Constant", "ConstantOfShape"):
            return None
        slots = _slots(node.op, node.domain or "", self.model.opset, self.half_name)
        if slots is None:
            return None
        inputs, outputs, more_in, more_out = slots
        takes = [_slot(inputs, more_in, i) for i, tensor in enumerate(node.inputs) if _is_float(tensor)]
        gives = [_slot(outputs, more_out, i) for i, tensor in enumerate(node.outputs) if _is_float(tensor)]
        if (takes and not any(takes)) or (gives and not any(gives)):
            return f"{node.op} takes no {name} in opset {self.model.opset}{self._later(node)}"
        return None

    def _later(self, node: gs.Node) -> str:
        """From which opset on the operator takes half values where it gets float32 ones."""
        for opset in range(self.model.opset + 1, _NEWEST_EXPORTED + 1):
            slots = None if node.domain else _slots(node.op, "", opset, self.half_name)
            if slots and any(_slot(slots[0], slots[2], i) for i, tensor in enumerate(node.inputs) if _is_float(tensor)):
                return f"; export with opset {opset}"
        return ""

    def _without_half(self, node: gs.Node) -> str | None:
        """The operator in a fused node's body that is given half values and takes none at this opset."""
        key = node.op, tuple(map(_is_float, node.inputs))
        if key not in self._halfless:
            if definition.ATTRIBUTE in node.attrs:
                body = definition.function(self._retyped(node), self.model.opset, DOMAIN)
            else:
                body = self.model.functions.get((DOMAIN, node.op), onnx.FunctionProto())
            given = [name for name, tensor in zip(body.input, node.inputs, strict=False) if _is_float(tensor)]
            self._halfless[key] = _first_without_half(body, given, self.model.opset, self.half_name)
        return self._halfless[key]

    def _dequantizes(self, node: gs.Node) -> str | None:
        reason = "sums of integer products pass the half range"
        if definition.ATTRIBUTE in node.attrs:
            return reason if any(_maker(tensor, op) for tensor in node.inputs for op in _INTEGER_PRODUCTS) else None
        if node.op == "Cast" and not node.domain:
            return reason if any(_maker(node.inputs[0], op) for op in _INTEGER_PRODUCTS) else None
        if node.op == "Mul" and not node.domain:
            casts = [tensor.inputs[0] for tensor in node.inputs if _maker(tensor, "Cast")]
            return reason if any(_maker(cast.inputs[0], op) for cast in casts for op in _INTEGER_PRODUCTS) else None
        return None

    def _range_reason(self, node: gs.Node) -> str | None:
        for tensor in (*node.outputs, *node.inputs):
            if _is_float(tensor) and self._too_large(tensor, 1):
                return f"values of {shown(tensor.name)} reach {self.ranges[tensor.name]:.3g}"
        if node.op in _SUMS and not node.domain and node.inputs and _is_float(node.inputs[0]):
            source, count = node.inputs[0], _reduced(node)
            power = 2 if node.op in _SQUARE_SUMS else 1
            if count and self._too_large(source, count, power):
                return f"a sum of {count} values up to {self.ranges[source.name]:.3g} may pass the half range"
        return None

    def _too_large(self, tensor: gs.Tensor, count: int, power: int = 1) -> bool:
        reach = self.ranges.get(tensor.name)
        if reach is None or id(tensor) in self._fills or isinstance(tensor, gs.Constant):
            return False
        return not abs(reach) ** power * count <= self.largest * (_SAFE if count == 1 else 1.0)

    def _mask_fills(self) -> set[int]:
        """Tensors whose large values come from a fill like -3.4e38, which is clamped: their measured range does not count."""
        fills: set[int] = set()
        for node in self.nodes.values():
            if node.domain or not node.outputs:
                continue
            sources = [tensor for tensor in node.inputs if id(tensor) in fills or self._is_fill(tensor)]
            if not sources:
                continue
            others = [tensor for tensor in node.inputs if all(tensor is not source for source in sources)]
            within = all(abs(self.ranges.get(tensor.name, 0.0)) <= self.largest * _SAFE for tensor in others if _is_float(tensor))
            passes = node.op in ("Where", "Add", "Min", "Max", "Cast", "Softmax") or node.op in _MOVES
            scales = node.op == "Mul" and all(abs(self.ranges.get(tensor.name, 0.0)) <= 1 for tensor in others)
            if (passes and within) or scales:
                fills.add(id(node.outputs[0]))
        return fills

    def _is_fill(self, tensor: gs.Tensor) -> bool:
        if not query.is_constant(tensor) or query.dtype(tensor) != _FLOAT:
            return False
        value = query.constant(tensor) if math.prod(tensor.shape or [1]) <= 1 << 20 else None
        if value is None or not value.size:
            return False
        return bool(value.min() < -self.largest and np.unique(value[value < -self.largest]).size == 1)

    def _keep_statistics(self, node: gs.Node) -> None:
        """Variance in primitives: a square that is averaged, the mean taken off before, and all up to the division by the root."""
        if node.domain or node.op not in _SUMS or not node.inputs or not _is_float(node.inputs[0]):
            return
        square = node.inputs[0].inputs[0] if len(node.inputs[0].inputs) == 1 else None
        squares = square is not None and (
            (square.op == "Pow" and query.scalar(square.inputs[1]) == 2) or (square.op == "Mul" and square.inputs[0] is square.inputs[1])
        )
        if not squares and node.op not in _SQUARE_SUMS:
            return
        reason = "norm statistics"
        base = node.inputs[0]
        if squares and square is not None:
            self._keep(square, reason)
            base = square.inputs[0]
        if _maker(base, "Sub"):
            centred = base.inputs[0]
            self._keep(centred, reason)
            for mean in centred.inputs:
                if _maker(mean, "ReduceMean"):
                    self._keep(mean.inputs[0], reason)
        self._keep(node, reason)
        self._keep_until_division(node, base, reason)

    def _keep_until_division(self, node: gs.Node, data: gs.Tensor | None, reason: str) -> None:
        """Everything from a statistic to the division (or product with the reciprocal) that it is made for."""
        pending = list(node.outputs[0].outputs)
        seen: set[int] = set()
        while pending:
            reader = pending.pop()
            if id(reader) in seen or reader.domain:
                continue
            seen.add(id(reader))
            if reader.op in _STATISTICS:
                self._keep(reader, reason)
                pending += reader.outputs[0].outputs
            elif reader.op in ("Div", "Mul"):
                self._keep(reader, reason)
                if not any(tensor is data for tensor in reader.inputs) and not _grows(reader):
                    pending += reader.outputs[0].outputs  # 1 / sqrt(v), scaled before it meets the data

    def _keep_whole_numbers(self) -> None:
        """Arithmetic on integers that were cast to float, where it ends in an index, a size or an angle."""
        whole: dict[int, gs.Node] = {}
        for node in self.nodes.values():
            if node.domain or not node.outputs or not _is_float(node.outputs[0]) or node.op in _CONTROL:
                continue
            floats = [tensor for tensor in node.inputs if _is_float(tensor) and not query.is_constant(tensor)]
            if node.inputs and not query.is_constant(node.outputs[0]) and all(id(tensor) in whole for tensor in floats):
                whole[id(node.outputs[0])] = node
        for node in self.nodes.values():
            if node.domain:
                continue
            ends = node.op in ("Sin", "Cos", "Range", "Resize", "Upsample") or (node.op == "Cast" and not _is_float(node.outputs[0]))
            pending = [tensor for tensor in node.inputs if id(tensor) in whole] if ends else []
            if pending and node.op == "Cast":
                self._keep(node, "an index needs more digits than half precision has")
            while pending:
                maker = whole[id(pending.pop())]
                if id(maker) not in self.kept:
                    self._keep(maker, "leads to an index, a size or an angle")
                    pending += [tensor for tensor in maker.inputs if id(tensor) in whole]

    def _keep_between(self) -> None:
        """Nodes that only move data from float32 nodes to float32 nodes stay in float32: two casts fewer."""
        moves = [node for node in self.nodes.values() if node.op in _MOVES and not node.domain and id(node) not in self.kept]
        between = {id(node) for node in moves if _is_float(node.outputs[0])}
        size = -1
        while size != len(between):
            size = len(between)
            for node in (*moves, *reversed(moves)):
                floats = [tensor for tensor in node.inputs if _is_float(tensor)]
                makers = [tensor.inputs[0] for tensor in floats if len(tensor.inputs) == 1]
                readers = [reader for tensor in node.outputs for reader in tensor.outputs]
                ends = all(id(end) in self.kept or id(end) in between for end in (*makers, *readers))
                if not (len(makers) == len(floats) > 0 and readers and ends):
                    between.discard(id(node))
        for node in moves:
            if id(node) in between:
                self._keep(node, "between float32 nodes")

    # -------------------------------------------------------------------------------------------------- types of slots

    def _made(self, node: gs.Node, index: int) -> np.dtype[Any]:
        """Type of a float output after conversion."""
        if id(node) in self.kept:
            return _FLOAT
        if node.op == "LayerNormalization" and index > 0:
            return _FLOAT  # mean and inverse deviation, of the type that stash_type says
        return self._slot_type(node, index, is_input=False)

    def _wanted(self, node: gs.Node, index: int) -> np.dtype[Any]:
        """Type in which a node reads a float input after conversion."""
        return _FLOAT if id(node) in self.kept else self._slot_type(node, index, is_input=True)

    def _slot_type(self, node: gs.Node, index: int, is_input: bool) -> np.dtype[Any]:
        if node.domain == DOMAIN or node.op in _CONTROL or node.op in ("Cast", "Constant", "ConstantOfShape"):
            return self.half
        slots = _slots(node.op, node.domain or "", self.model.opset, self.half_name)
        if slots is None:
            return _FLOAT
        allowed = _slot(slots[0], slots[2], index) if is_input else _slot(slots[1], slots[3], index)
        return self.half if allowed else _FLOAT

    # ------------------------------------------------------------------------------------------------------- rewriting

    def rewrite(self) -> None:
        main_outputs = {id(tensor) for tensor in self.model.graph.outputs}
        for node in self.nodes.values():
            for i, tensor in enumerate(list(node.outputs)):
                if self.stored.get(id(tensor)) == self.half and id(tensor) in main_outputs:
                    self._split_output(node, i, tensor)
        wanted = [
            (node, i, tensor, self._wanted(node, i))
            for node in self.nodes.values()
            for i, tensor in enumerate(node.inputs)
            if _is_float(tensor)
        ]
        shared = {id(tensor) for _, _, tensor, kind in wanted if kind == _FLOAT} | main_outputs
        for node, i, tensor, kind in wanted:
            set_input(node, i, self._version(tensor, kind, id(tensor) in shared))
        for node in self.nodes.values():
            self._rewrite_bodies(node)
        for node in self.nodes.values():
            if id(node) not in self.kept:
                self._rewrite_attributes(node)
        functions.drop_unused(self.model)
        for graph in self.model.graphs():
            for tensor in graph.inputs:
                self._retype(tensor)
            for node in graph.nodes:
                for tensor in node.outputs:
                    self._retype(tensor)
        self._place_casts()

    def _retype(self, tensor: gs.Tensor) -> None:
        kind = self.stored.get(id(tensor))
        if kind is not None:
            tensor.dtype = kind

    def _split_output(self, node: gs.Node, index: int, tensor: gs.Tensor) -> None:
        """A graph output keeps name and type, by a Cast; the node's own result is a new tensor that everyone else reads."""
        own = Variable(self.model.unique_name(f"{tensor.name}_half"), self.half, tensor.shape)
        redirect(tensor, own)
        set_output(node, index, own)
        own.dtype = _FLOAT  # until _retype, like every other tensor that is converted
        self.stored[id(own)] = self.half
        del self.stored[id(tensor)]
        self._versions[id(own), _FLOAT] = tensor
        self._cast(own, tensor, _FLOAT)

    def _version(self, tensor: gs.Tensor, kind: np.dtype[Any], shared: bool) -> gs.Tensor:
        """`tensor` in type `kind`: itself, a converted constant, or the result of the one Cast that there is for it."""
        if isinstance(tensor, gs.Constant):
            if kind == _FLOAT:
                return tensor
        elif self.stored.get(id(tensor), _FLOAT) == kind:
            return tensor
        key = (id(tensor), kind)
        if key not in self._versions:
            suffix = "half" if kind == self.half else "float"
            if isinstance(tensor, gs.Constant):
                name = self.model.unique_name(f"{tensor.name}_{suffix}") if shared else tensor.name
                found = Constant(name, self._half_values(tensor))
                found.home = getattr(tensor, "home", None)
            else:
                found = Variable(self.model.unique_name(f"{tensor.name}_{suffix}"), kind, tensor.shape)
                self._cast(tensor, found, kind)
            self._versions[key] = found
            self._keepalive(tensor)
        return self._versions[key]

    def _keepalive(self, tensor: gs.Tensor) -> None:
        self.__dict__.setdefault("_alive", []).append(tensor)  # ids in _versions stay valid

    def _cast(self, source: gs.Tensor, target: gs.Tensor, kind: np.dtype[Any]) -> None:
        name = self.model.unique_name(f"{target.name}_cast")
        cast = Node("Cast", name, {"to": weights.elem_type(kind)}, [source], [target])
        self.casts += 1
        if source.inputs:
            self._behind.setdefault(id(source.inputs[0]), []).append(cast)
        else:
            self._first.setdefault(id(self.home[id(source)]), []).append(cast)

    def _place_casts(self) -> None:
        for graph in list(self.model.graphs()):
            nodes = list(self._first.get(id(graph), ()))
            for node in graph.nodes:
                nodes.append(node)
                nodes += self._behind.get(id(node), ())
            graph.nodes = nodes

    def _rewrite_bodies(self, node: gs.Node) -> None:
        """What a body gives has the type of the node's outputs."""
        if node.op not in _CONTROL or node.domain:
            return
        kind = _FLOAT if id(node) in self.kept else self.half
        for body in bodies(node):
            for i, tensor in enumerate(body.outputs):
                if _is_float(tensor):
                    body.outputs[i] = self._version(tensor, kind, True)

    def _rewrite_attributes(self, node: gs.Node) -> None:
        if node.domain == DOMAIN and definition.ATTRIBUTE in node.attrs:
            self._retype_expression(node)
            return
        if node.domain not in (None, "", DOMAIN) or not node.outputs or self.stored.get(id(node.outputs[0])) != self.half:
            return
        code = weights.elem_type(self.half)
        if node.domain == DOMAIN:
            if "dtype" in node.attrs:  # the type that the function's body gives back
                node.attrs["dtype"] = code
        elif node.op == "Cast":
            node.attrs["to"] = code
        elif node.op == "EyeLike" and node.attrs.get("dtype", 1) == TensorProto.FLOAT:
            node.attrs["dtype"] = code
        elif node.op == "ConstantOfShape":
            value = node.attrs.get("value")
            filled = query.constant(value) if isinstance(value, gs.Constant) else np.zeros(1, np.float32)
            if filled is not None:
                node.attrs["value"] = Constant("", self._narrow(filled, node.outputs[0].name))
        elif node.op == "Constant":
            filled = query.constant(node.outputs[0])
            if filled is not None:
                node.attrs.clear()
                node.attrs["value"] = Constant("", self._narrow(filled, node.outputs[0].name))
        elif node.op == "DequantizeLinear" and node.attrs.get("output_dtype") == TensorProto.FLOAT:
            node.attrs["output_dtype"] = code

    def _retyped(self, node: gs.Node) -> expression.Expression:
        return expression.parse(node.attrs[definition.ATTRIBUTE], f"node {shown(node.name)}").retyped(str(self.half))

    def _retype_expression(self, node: gs.Node) -> None:
        """Another expression, and so another operator with its own function."""
        retyped = self._retyped(node)
        node.attrs[definition.ATTRIBUTE] = retyped.text
        node.op = definition.op_type(retyped)
        functions.add(self.model, definition.function(retyped, self.model.opset, DOMAIN))

    # ------------------------------------------------------------------------------------------------------- constants

    def _half_values(self, tensor: gs.Constant) -> np.ndarray[Any, Any] | weights.Converted:
        values = tensor._values
        if isinstance(values, weights.Weight) and values.nbytes > _LAZY:
            for piece in weights.pieces(values):
                self._count_losses(piece, tensor.name)
            return weights.Converted(values, self.half, lambda piece: _narrowed(piece, self.half))
        found = query.constant(tensor)
        if found is None:
            raise BadInput(f"sparse initializer {shown(tensor.name)}: too large to convert; keep its readers in float32")
        if any(node.op in _BOUNDS and not node.domain for node in tensor.outputs):
            found = _held_off_zero(found, self.half)
        return self._narrow(found, tensor.name)

    def _narrow(self, values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        self._count_losses(values, name)
        return _narrowed(values, self.half)

    def _count_losses(self, values: np.ndarray[Any, Any], name: str) -> None:
        for counts, loss in zip((self.clamped, self.vanished, self.subnormal), _losses(values, self.half), strict=True):
            if loss:
                counts[name] = counts.get(name, 0) + loss


def _first_beyond(kind: np.dtype[Any]) -> np.float32:
    """The smallest magnitude that rounds to inf: half a step above the largest value."""
    limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    step = 2.0 ** math.floor(math.log2(float(limits.max))) * float(limits.eps)
    beyond: np.float32 = np.float32(float(limits.max) + step / 2)
    return beyond


def _narrowed(values: np.ndarray[Any, Any], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Values as half: finite ones stay finite, inf and NaN stay what they are."""
    largest = np.float32(ml_dtypes.finfo(kind).max)  # type: ignore[no-untyped-call]
    if values.size and not (values.max() <= largest and values.min() >= -largest):
        values = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
    with np.errstate(under="ignore", invalid="ignore"):
        half: np.ndarray[Any, Any] = values.astype(kind)
    return half


def _held_off_zero(values: np.ndarray[Any, Any], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Values that would become zero as half set to the smallest subnormal number of their sign."""
    smallest = np.float32(float(ml_dtypes.finfo(kind).smallest_subnormal))  # type: ignore[no-untyped-call]
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        vanish = (values != 0) & (values.astype(kind) == 0)
    return np.where(vanish, np.copysign(smallest, values), values)


def _losses(values: np.ndarray[Any, Any], kind: np.dtype[Any]) -> tuple[int, int, int]:
    """How many values _narrowed sets to the end of the range, to zero, and to subnormal numbers."""
    limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    magnitude = np.abs(values)
    clamped = vanished = 0
    beyond = _first_beyond(kind)
    if magnitude.size and not magnitude.max() < beyond:
        clamped = int(np.count_nonzero((magnitude >= beyond) & np.isfinite(magnitude)))
    zeros = magnitude.size - int(np.count_nonzero(magnitude))
    small = int(np.count_nonzero(magnitude < np.float32(limits.smallest_normal))) - zeros
    if small:
        vanished = int(np.count_nonzero(magnitude <= np.float32(float(limits.smallest_subnormal) / 2))) - zeros
    return clamped, vanished, small - vanished


def _largest(values: np.ndarray[Any, Any]) -> float:
    ends = np.array([values.min(), values.max()]) if values.size else values
    if not np.isfinite(ends).all():
        ends = values[np.isfinite(values)]
    return float(np.abs(ends).max(initial=0.0))


def _is_float(tensor: gs.Tensor) -> bool:
    if tensor.is_empty() and not isinstance(tensor, gs.Constant):
        return False
    return tensor.dtype is not None and not isinstance(tensor.dtype, int) and np.dtype(tensor.dtype) == _FLOAT


def _is_untyped(tensor: gs.Tensor) -> bool:
    return isinstance(tensor, gs.Variable) and tensor.dtype is None and tensor.type == "tensor_type" and not tensor.is_empty()


def _maker(tensor: gs.Tensor, op: str) -> bool:
    return len(tensor.inputs) == 1 and tensor.inputs[0].op == op and not tensor.inputs[0].domain


def _grows(node: gs.Node) -> bool:
    """Whether a Mul or Div meets a larger run-time operand: the data that is normalised."""
    shapes = [query.shape(tensor) for tensor in node.inputs if not query.is_constant(tensor)]
    if len(shapes) < 2:
        return False
    return any(shape is None for shape in shapes) or shapes[0] != shapes[1]


def _reduced(node: gs.Node) -> int | None:
    """How many elements are summed into one; None where it is not known."""
    shape = query.shape(node.inputs[0])
    if shape is None:
        return None
    axes: Any = node.attrs.get("axes")
    if len(node.inputs) > 1 and not node.inputs[1].is_empty():
        axes = query.constant(node.inputs[1])
        if axes is None:
            return None
        axes = axes.reshape(-1).tolist()
    elif isinstance(axes, AttributeProto):
        return None
    if axes is None or len(axes) == 0:
        axes = range(len(shape))
    sizes = [shape[axis] for axis in axes if -len(shape) <= axis < len(shape)]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _type_bodies(node: gs.Node) -> None:
    """Body inputs without a type get that of what they receive."""
    if node.domain or node.op not in ("Loop", "Scan"):
        return
    for body in bodies(node):
        for tensor, source in _passed(node, body):
            if tensor.dtype is None and tensor.type == "tensor_type" and not source.is_empty() and source.dtype is not None:
                tensor.dtype = source.dtype


def _passed(node: gs.Node, body: gs.Graph) -> Iterator[tuple[gs.Tensor, gs.Tensor]]:
    yield from zip(body.inputs, node.inputs, strict=False)
