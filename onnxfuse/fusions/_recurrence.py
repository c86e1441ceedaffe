"""What lstm and gru share: layers of a stack, with what exporters put between and around them, become one node.

LSTM, (Squeeze | Transpose, Reshape), LSTM, ...      and Transpose before the first, Squeeze, Transpose or Reshape behind the last

Cells that are written in primitives (_cell.py) become a layer of one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _cell, _norms
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal, label, reads
from onnxfuse.fusions.pattern import Op, Pattern, either, op, tensor
from onnxfuse.graph import query, recurrence
from onnxfuse.graph.model import DOMAIN, Model

SMALLEST, LARGEST = 16, 1024  # hidden units
_GATES = {"LSTM": 4, "GRU": 3}
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}
_NO_CLIP = float(np.finfo(np.float32).max)  # onnxruntime's default
_SEARCHED = 10_000  # nodes behind an initial state

# Y is [steps, directions, batch, hidden]. The order in which its axes are given on, and whether directions and hidden become one axis.
_Layout = tuple[tuple[int, ...], bool]
_PLAIN: _Layout = ((0, 1, 2, 3), False)
_BY_BATCH: _Layout = ((2, 0, 1, 3), False)
_STEPS_FIRST: _Layout = ((0, 2, 1, 3), True)
_BATCH_FIRST: _Layout = ((2, 0, 1, 3), True)


class Recurrence(Fusion):
    """The fusion of ONNX's operator `cell`."""

    kind = "fused"
    cell: str
    anchor: str
    same: tuple[str, ...]
    """Attributes that all layers must share."""

    def check(self, match: Match, model: Model) -> Refusal | None:
        if _cell.found(match):
            units = _cell.hidden(match)
            return _refuse_hidden(units, match["h"].name) or _cell.refuse(match, self.cell, model)
        layers = _layers(match)
        for node in layers:
            refusal = self._refuse_node(node)
            if refusal:
                return refusal
        first = layers[0]
        for node in layers[1:]:
            for name in ("direction", "hidden_size", "clip", *self.same):
                if node.attrs.get(name) != first.attrs.get(name):
                    return Refusal(f"layers differ in {name}", f"{first.attrs.get(name)} and {node.attrs.get(name)}")
            if _given(node, 4) is not _given(first, 4):
                return Refusal("layers have different sequence_lens", label(node))
            if _by_batch(node) or _by_batch(first):
                return Refusal("a stack with layout 1", label(node))
        return _refuse_joints(match, layers) or _refuse_cycle(match, layers)

    def variant(self, match: Match) -> str | None:
        if _cell.found(match):
            return "cell"
        layers = len(_layers(match))
        return None if layers == 1 else f"{layers} layers"

    def kept(self, match: Match) -> list[gs.Tensor]:
        if _cell.found(match):
            return [match["new_c"]] if "new_c" in match.tensors else []
        return [value for node in _layers(match) for value in node.outputs[1:]]

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        return self._rewrite_cell(match, new) if _cell.found(match) else self._rewrite_layers(match, new)

    def _rewrite_cell(self, match: Match, new: Builder) -> gs.Node:
        kind = match["x"].dtype
        units = _cell.hidden(match)
        batch = (query.shape(match["x"]) or [None])[0]

        def moved(op_type: str, given: gs.Tensor, made: gs.Tensor) -> None:
            axes = {"axes": [0]} if new.opset < 13 else {}
            more = [] if axes else [new.computed(("axes", 0), "axes", lambda: np.array([0], np.int64))]
            new.node(op_type, [given, *more], [made], axes, stem=self.name)

        def one_step(value: gs.Tensor) -> gs.Tensor:
            made = new.variable(f"{value.name}_of_a_step", kind, [1, *(query.shape(value) or [])])
            moved("Unsqueeze", value, made)
            return made

        weights = _cell.weights(match, self.cell)
        made = zip("wrb", (weights.w, weights.r, weights.b), strict=True)
        inputs = [one_step(match["x"]), *(new.computed((*weights.key, name), f"{self.name}_{name}", compute) for name, compute in made)]
        states = [match[name] for name in recurrence.STATES[self.cell]]
        inputs += [gs.Variable.empty(), *(gs.Variable.empty() if _is_zero(value) else one_step(value) for value in states)]
        while inputs[-1].is_empty():
            inputs.pop()
        names = ("y", *(f"last_{name}" for name in recurrence.STATES[self.cell]))
        outputs = [new.variable(f"{self.name}_{name}", kind, [1, batch, units]) for name in names]
        attrs = {"direction": "forward", "hidden_size": units, "clip": _NO_CLIP, "x_perm": [0, 1, 2], "y_perm": [0, 2, 1, 3]}
        if self.cell == "GRU":
            attrs["linear_before_reset"] = int(not _cell.is_reset_first(match))
        fused = new.node(recurrence.op_type(self.cell, 1, True), inputs, outputs, attrs, stem=self.name, domain=DOMAIN)
        moved("Squeeze", outputs[0], match.output)
        if "new_c" in match.tensors:
            moved("Squeeze", outputs[2], match["new_c"])
        return fused

    def _rewrite_layers(self, match: Match, new: Builder) -> gs.Node:
        layers = _layers(match)
        first = layers[0]
        cell = self.cell
        flipped = _by_batch(first)  # layout 1

        def state(value: gs.Tensor | None) -> gs.Tensor:
            if value is None or _is_zero(value):
                return gs.Variable.empty()
            if not flipped:
                return value
            turned = new.variable(f"{value.name}_by_direction", value.dtype, None)
            new.node("Transpose", [value], [turned], {"perm": [1, 0, 2]}, stem=self.name)
            return turned

        states = range(len(recurrence.STATES[cell]))
        inputs = [match["x"]]
        for node in layers:
            inputs += [node.inputs[1], node.inputs[2], _given(node, 3) or gs.Variable.empty()]
        inputs.append(_given(first, 4) or gs.Variable.empty())
        inputs += [state(_given(node, 5 + i)) for node in layers for i in states]
        while inputs[-1].is_empty():
            inputs.pop()

        outputs, turns = [match.output], []
        for number, node in enumerate(layers, start=1):
            for i in states:
                value = node.outputs[1 + i] if len(node.outputs) > 1 + i else gs.Variable.empty()
                if value.is_empty():  # onnxruntime infers types only of calls with all outputs
                    value = new.variable(f"{self.name}_last_{recurrence.STATES[cell][i]}{number}", match["x"].dtype, None)
                elif flipped:
                    turns.append((value, new.variable(f"{value.name}_by_direction", value.dtype, None)))
                    value = turns[-1][1]
                outputs.append(value)

        perm, joined = _layout(match)
        attrs = {
            "direction": first.attrs.get("direction", "forward"),
            "hidden_size": int(first.attrs["hidden_size"]),
            "clip": float(first.attrs.get("clip", _NO_CLIP)),
            "x_perm": [1, 0, 2] if flipped or "x_turned" in match.tensors else [0, 1, 2],
            "y_perm": list(perm),
            **{name: int(first.attrs.get(name, 0)) for name in self.same},
        }
        fused = new.node(recurrence.op_type(cell, len(layers), joined), inputs, outputs, attrs, stem=self.name, domain=DOMAIN)
        for value, turned in turns:
            new.node("Transpose", [turned], [value], {"perm": [1, 0, 2]}, stem=self.name)
        return fused

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        kinds = product(range(1, recurrence.MOST_LAYERS + 1), (True, False))
        return tuple(self._function(opset, layers, joined) for layers, joined in kinds)

    def _function(self, opset: int, layers: int, joined: bool) -> onnx.FunctionProto:
        cell = self.cell
        states = recurrence.STATES[cell]
        same = "".join(f", {name}: int = @{name}" for name in self.same)
        lines = ["given1 = Transpose <perm: ints = @x_perm> (x)"]
        if joined or layers > 1:
            lines.append("side_by_side = Constant <value = int64[3] {0, 0, -1}> ()")
        for i in range(1, layers + 1):
            given = [f"given{i}", f"w{i}", f"r{i}", f"b{i}", "lengths", *(f"{state}{i}" for state in states)]
            made = [f"y{i}", *(f"last_{state}{i}" for state in states)]
            lines.append(
                f"{', '.join(made)} = {cell} <direction: string = @direction, hidden_size: int = @hidden_size, "
                f"clip: float = @clip{same}> ({', '.join(given)})"
            )
            if i < layers:
                lines.append(f"by_row{i} = Transpose <perm = [0, 2, 1, 3]> (y{i}) given{i + 1} = Reshape (by_row{i}, side_by_side)")
        turned = f"Transpose <perm: ints = @y_perm> (y{layers})"
        lines.append(f"turned = {turned} y = Reshape (turned, side_by_side)" if joined else f"y = {turned}")
        name = recurrence.op_type(cell, layers, joined)
        attrs = ["direction", "hidden_size", "clip", "x_perm", "y_perm", *self.same]
        given_names, made_names = recurrence.input_names(cell, layers), recurrence.output_names(cell, layers)
        body = "\n".join(lines)
        return _bodies.define(opset, f"{name} <{', '.join(attrs)}> ({', '.join(given_names)}) => ({', '.join(made_names)}) {{ {body} }}")

    def _refuse_node(self, node: gs.Node) -> Refusal | None:
        attrs = node.attrs
        hidden = attrs.get("hidden_size")
        weights, recurrent = node.inputs[1], node.inputs[2]
        refusal = _refuse_hidden(hidden, label(node))
        if refusal:
            return refusal
        if _given(node, 7) is not None:
            return Refusal("has peepholes (input P)", node.inputs[7].name)
        if attrs.get("input_forget", 0):
            return Refusal("couples input and forget gates (input_forget)", attrs["input_forget"])
        directions = _directions(node)
        if directions is None:
            return Refusal("direction is", attrs.get("direction"))
        wanted = _ACTIVATIONS[self.cell] * directions
        activations = [str(name).lower() for name in attrs.get("activations") or wanted]
        if activations != wanted:
            return Refusal("has other activations", ", ".join(map(str, attrs["activations"])))
        if not attrs.get("clip", 1.0) > 0:
            return Refusal("clip is not positive", attrs["clip"])
        x = node.inputs[0]
        refusal = _norms.refuse_type(x)
        if refusal:
            return refusal
        for value in (weights, recurrent, *filter(None, (_given(node, place) for place in (3, 5, 6)))):
            if _norms.element_type(value) != _norms.element_type(x):
                return Refusal(f"'{value.name}' is of another type than '{x.name}'")
        rows = _GATES[self.cell] * hidden
        if (query.shape(recurrent) or []) != [directions, rows, hidden]:
            return Refusal(f"the shape of R '{recurrent.name}' is not {[directions, rows, hidden]}", query.shape(recurrent))
        if query.rank(weights) != 3 or (query.shape(weights) or [])[:2] != [directions, rows]:
            return Refusal(f"the shape of W '{weights.name}' does not begin with {[directions, rows]}", query.shape(weights))
        return None


def _refuse_hidden(units: int | None, name: str) -> Refusal | None:
    if units is None:
        return Refusal("hidden_size is not given", name)
    if units % 8 or not SMALLEST <= units <= LARGEST:
        return Refusal(f"hidden_size is no multiple of 8 from {SMALLEST} to {LARGEST}", units)
    return None


def patterns(cell: str) -> tuple[Pattern, ...]:
    """Stacks of four layers to one, each with what may stand behind it, the longest first, and cells in primitives."""
    found: list[Pattern] = []
    for layers in range(recurrence.MOST_LAYERS, 0, -1):
        x = tensor("x")
        y: Pattern = _layer(cell, 1, either(op("Transpose", x, out="x_turned"), x))
        for number in range(2, layers + 1):
            y = _layer(cell, number, _joined(y, f"_{number}"))
        found += [op("Transpose", _joined(y, "_last"), out="y_turned"), _joined(y, "_last"), y]
    return (*found, *_cell.patterns(cell))


def _layer(cell: str, number: int, given: Pattern) -> Op:
    return op(cell, given, tensor(f"w{number}"), tensor(f"r{number}"), out=f"y{number}", rest=True)


def _joined(y: Pattern, suffix: str) -> Pattern:
    """The directions of `y` side by side: [steps, batch, directions * hidden]."""
    return either(
        op("Squeeze", y, out=f"squeezed{suffix}", rest=True),
        op("Reshape", op("Transpose", y, out=f"by_row{suffix}"), tensor(f"shape{suffix}"), out=f"reshaped{suffix}"),
    )


def _layers(match: Match) -> list[gs.Node]:
    numbers = range(1, recurrence.MOST_LAYERS + 1)
    return [match.node(f"y{number}") for number in numbers if f"y{number}" in match.tensors]


def _given(node: gs.Node, place: int) -> gs.Tensor | None:
    return node.inputs[place] if len(node.inputs) > place and not node.inputs[place].is_empty() else None


def _directions(node: gs.Node) -> int | None:
    return {"forward": 1, "reverse": 1, "bidirectional": 2}.get(node.attrs.get("direction", "forward"))


def _by_batch(node: gs.Node) -> bool:
    return bool(node.attrs.get("layout", 0))


def _layout(match: Match) -> _Layout:
    if "y_turned" in match.tensors:
        return _BATCH_FIRST
    if "squeezed_last" in match.tensors or "reshaped_last" in match.tensors:
        return _STEPS_FIRST
    return _BY_BATCH if _by_batch(_layers(match)[0]) else _PLAIN


def _refuse_joints(match: Match, layers: Sequence[gs.Node]) -> Refusal | None:
    """What stands between and behind the layers must be what `patterns` takes it for."""
    for name, perm in (("x_turned", [1, 0, 2]), ("y_turned", [1, 0, 2])):
        if name in match.tensors and match.node(name).attrs.get("perm") != perm:
            return Refusal(f"'{match[name].name}' exchanges other axes than steps and batch", match.node(name).attrs.get("perm"))
    for number, node in enumerate(layers, start=1):
        suffix = f"_{number + 1}" if number < len(layers) else "_last"
        if _by_batch(node) and (f"squeezed{suffix}" in match.tensors or f"by_row{suffix}" in match.tensors or "x_turned" in match.tensors):
            return Refusal("layout 1 with axes exchanged around it", label(node))
        refusal = _refuse_squeeze(match, f"squeezed{suffix}", node) or _refuse_reshape(match, suffix, node)
        if refusal:
            return refusal
    return None


def _refuse_squeeze(match: Match, name: str, layer: gs.Node) -> Refusal | None:
    if name not in match.tensors:
        return None
    node = match.node(name)
    axes = query.constant(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("axes")
    if axes is None or [int(axis) % 4 for axis in np.ravel(axes)] != [1]:
        return Refusal(f"'{match[name].name}' squeezes other axes than that of directions", axes)
    if _directions(layer) != 1:
        return Refusal(f"'{match[name].name}' squeezes the axis of two directions")
    return None


def _refuse_reshape(match: Match, suffix: str, layer: gs.Node) -> Refusal | None:
    if f"by_row{suffix}" not in match.tensors:
        return None
    turned, made = match[f"by_row{suffix}"], match[f"reshaped{suffix}"]
    if match.node(f"by_row{suffix}").attrs.get("perm") != [0, 2, 1, 3]:
        return Refusal(f"'{turned.name}' does not put the directions behind the batch", match.node(f"by_row{suffix}").attrs.get("perm"))
    shape = query.constant(match[f"shape{suffix}"])
    width = (_directions(layer) or 1) * layer.attrs["hidden_size"]
    before = query.shape(turned) or [None] * 4
    if shape is None and None not in before[:2] and query.shape(made) == [*before[:2], width]:
        return None  # a target that is computed
    fits = shape is not None and len(shape) == 3 and not match.node(f"reshaped{suffix}").attrs.get("allowzero", 0)
    if fits and shape is not None:
        fits = all(size in (0, known) for size, known in zip(shape[:2], before, strict=False)) and shape[2] in (-1, width)
        fits = fits or (
            shape[2] == width and -1 in shape[:2] and all(size in (0, -1, known) for size, known in zip(shape[:2], before, strict=False))
        )
    if not fits:
        return Refusal(f"'{made.name}' is not proved to put the directions side by side", None if shape is None else list(shape))
    return None


def _refuse_cycle(match: Match, layers: Sequence[gs.Node]) -> Refusal | None:
    """Refuses a stack whose later layers start from something that an earlier one computes."""
    inside = {id(node) for node in match.nodes}
    for node in layers[1:]:
        for value in node.inputs[1:]:
            if value.is_empty():
                continue
            for count, source in enumerate(_behind(value)):
                if id(source) in inside:
                    return Refusal(f"'{value.name}' is computed from a layer below", label(node))
                if count > _SEARCHED:
                    return Refusal(f"too much of the model lies behind '{value.name}' to be looked through", label(node))
    return None


def _behind(value: gs.Tensor) -> Iterator[gs.Node]:
    seen: set[int] = set()
    waiting = list(value.inputs)
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        waiting.extend(source for given in reads(node) for source in given.inputs)


def _is_zero(value: gs.Tensor) -> bool:
    """Whether an initial state is all zeros: the default. Exporters write it as a constant, or spread over the batch."""
    found = query.constant(value)
    if found is not None:
        return not np.any(found)
    node = value.inputs[0] if value.inputs else None
    if node is None or node.domain not in ("", None, "ai.onnx"):
        return False
    if node.op == "ConstantOfShape":
        filled = node.attrs.get("value")
        return filled is None or not np.any(filled.values)
    if node.op in ("Expand", "Tile", "Slice", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast"):
        return _is_zero(node.inputs[0])
    return False
