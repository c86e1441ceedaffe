"""groupnorm: a GroupNormalization that an exporter spelled around InstanceNormalization, or out, becomes one node.

    y = (x - mean) / sqrt(variance + epsilon) * scale + bias        statistics over each of num_groups groups of channels and all positions

When it wins: always, as the first step for others. Spelled out it is Reshape to [N, groups, -1], InstanceNormalization, Reshape back,
Mul and Add; or, in place of InstanceNormalization, the mean, the variance and what follows from them, over [N, groups, -1] or
[N, groups, C / groups, -1]. As one node its statistics stay in float32 whatever the precision of the model. Formula and names: ONNX
GroupNormalization, version 21, with scale and bias for each channel. Below that version the node is of domain onnxfuse. The
GroupNormalization of version 18 has a scale for each group, is deprecated and is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _folding, _norms
from onnxfuse.fusions._folding import Array
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, STANDARD, Pattern, const, either, is_close, maybe, op, producer, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

MOST_CHANNELS = 1 << 20
NATIVE = 21
# From this version on a Constant can take an integer from an attribute; below, the node carries the target of its Reshape.
_FROM_ATTRIBUTE = 12
# From this version on a Constant can hold integers.
_INTEGERS = 9


def _by_moments(grouped: Pattern) -> Pattern:
    """(x - mean) / sqrt(variance + epsilon), in float32 between casts or not."""
    x = maybe("Cast", grouped)
    mean = op("ReduceMean", x, rest=True, out="mean")
    deviation = either(op("Sub", x, mean, out="centered"), op("Sub", x, mean))
    square = either(op("Pow", deviation, const("two", 2.0)), op("Mul", deviation, deviation))
    total = op("ReduceSum", square, rest=True, out="total")
    variance = either(
        op("ReduceMean", square, rest=True, out="variance"), op("Div", total, const("count")), op("Mul", total, const("rate"))
    )
    shifted = op("Add", variance, const("epsilon"))
    root = either(op("Sqrt", shifted), op("Pow", shifted, const("half", 0.5)))
    inverse = either(op("Reciprocal", root), op("Div", const("one", 1.0), root), op("Pow", shifted, const("minus_half", -0.5)))
    return maybe("Cast", either(op("Div", deviation, root), op("Mul", deviation, inverse)))


def _pattern(scale: bool, bias: bool) -> Pattern:
    grouped = op("Reshape", tensor("x"), tensor("groups"), out="grouped")
    instance = op("InstanceNormalization", grouped, const("group_scale"), const("group_bias"), out="instance")
    norm: Pattern = op("Reshape", either(instance, _by_moments(grouped)), tensor("back"), out="norm")
    if scale:
        norm = op("Mul", norm, const("scale"))
    if bias:
        norm = op("Add", norm, const("bias"))
    return norm


class GroupNorm(Fusion):
    name = "groupnorm"
    kind = "canonical"
    anchor = "InstanceNormalization"
    patterns = (_pattern(True, True), _pattern(True, False), _pattern(False, True), _pattern(False, False))

    def check(self, match: Match, model: Model) -> Refusal | None:
        x = match["x"]
        refusal = _norms.refuse_operands(match, x)
        if refusal:
            return refusal
        shape = query.shape(x)
        if shape is None or not 3 <= len(shape) <= 5 or not isinstance(shape[1], int):
            return Refusal(f"'{x.name}' is not proved to be [N, C, ...] of rank 3 to 5 with C known", shape)
        refusal = refuse_channels(shape[1]) or _refuse_groups(match, shape, shape[1]) or _refuse_moments(match, shape)
        refusal = refusal or _refuse_back(match, shape)
        if refusal:
            return refusal
        folded = _parameters(match)
        if isinstance(folded, Refusal):
            return folded
        return _folding.refuse_overflow(folded[0], "scale", x) or _folding.refuse_overflow(folded[1], "bias", x)

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x = match["x"]
        folded = _parameters(match)
        assert not isinstance(folded, Refusal)
        inputs = [x]
        for role, values in zip(("scale", "bias"), folded, strict=True):
            given = match.get(role) if match.get(role) is not None else match.get(f"group_{role}")
            stem = role if given is None else given.name
            inputs.append(new.constant(stem, values.astype(_norms.numpy_type(x))))
        groups = _groups(match)
        epsilon = _epsilon(match)
        if new.opset >= NATIVE:
            attrs = {"num_groups": groups, "epsilon": epsilon}
            return new.node("GroupNormalization", inputs, [_norms.settle(match, x)], attrs, stem=self.name)
        attrs = attributes(new.opset, groups, epsilon, x)
        return new.node("GroupNormalization", inputs, [_norms.settle(match, x)], attrs, stem=self.name, domain=DOMAIN)

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        if opset >= NATIVE:
            return ()
        body = statements(opset, "X", "Scale", "Bias", "Y")
        return (_bodies.define(opset, f"GroupNormalization <{attribute_names(opset)}> (X, Scale, Bias) => (Y) {{ {body} }}"),)


def attributes(opset: int, groups: int, epsilon: float, x: gs.Tensor) -> dict[str, Any]:
    """What a node carries for `statements`."""
    attrs: dict[str, Any] = {"num_groups": groups, "epsilon": epsilon, "dtype": _norms.element_type(x)}
    if opset < _FROM_ATTRIBUTE:
        kind = np.int64 if opset >= _INTEGERS else np.float32
        attrs["grouped_shape"] = gs.Constant("grouped_shape", np.array([0, groups, -1], kind))
    return attrs


def attribute_names(opset: int) -> str:
    """The attributes that a function of `statements` declares."""
    return "num_groups, epsilon, dtype" if opset >= _FROM_ATTRIBUTE else "num_groups, epsilon, dtype, grouped_shape"


def statements(opset: int, given: str, scale: str, bias: str, result: str) -> str:
    """A function's statements for `result`, of the attributes of `attributes`: the native operator where there is one."""
    if opset >= NATIVE:
        native = "num_groups: int = @num_groups, epsilon: float = @epsilon"
        return f"{result} = GroupNormalization <{native}> ({given}, {scale}, {bias})"
    if opset >= _FROM_ATTRIBUTE:
        target = """number = Constant <value_int: int = @num_groups> ()
                    count = Reshape (number, rest)
                    grouped_target = Concat <axis = 0> (same, count, rest)"""
    else:
        target = "sizes = Constant <value: tensor = @grouped_shape> () grouped_target = Cast <to = 7> (sizes)"
    return f"""x = Cast <to = 1> ({given})
        {_integer(opset, "same", 0)} {_integer(opset, "one", 1)} {_integer(opset, "rest", -1)}
        {target}
        grouped = Reshape (x, grouped_target)
        {_bodies.row_mean(opset, "mean", "grouped")}
        centered = Sub (grouped, mean)
        square = Mul (centered, centered)
        {_bodies.row_mean(opset, "variance", "square")}
        {_bodies.epsilon(opset)}
        shifted = Add (variance, eps)
        root = Sqrt (shifted)
        norm = Div (centered, root)
        channels = Shape ({scale})
        flat_target = Concat <axis = 0> (same, channels, rest)
        flat = Reshape (norm, flat_target)
        column = Concat <axis = 0> (channels, one)
        wide_scale = Cast <to = 1> ({scale})
        wide_bias = Cast <to = 1> ({bias})
        scale_column = Reshape (wide_scale, column)
        bias_column = Reshape (wide_bias, column)
        scaled = Mul (flat, scale_column)
        y = Add (scaled, bias_column)
        shape = Shape ({given})
        back = Reshape (y, shape)
        {result} = Cast <to: int = @dtype> (back)"""


def _integer(opset: int, name: str, number: int) -> str:
    """Statements for an int64 tensor of one element."""
    if opset >= _INTEGERS:
        return f"{name} = Constant <value = int64[1] {{{number}}}> ()"
    return f"{name}_float = Constant <value = float[1] {{{number}.0}}> () {name} = Cast <to = 7> ({name}_float)"


def refuse_channels(channels: int) -> Refusal | None:
    """More than anybody means: a value for each of them is written."""
    return None if channels <= MOST_CHANNELS else Refusal(f"more than {MOST_CHANNELS} channels", channels)


def _epsilon(match: Match) -> float:
    if match.get("instance") is not None:
        return float(match.node("instance").attrs.get("epsilon", 1e-5))
    epsilon = query.scalar(match["epsilon"])
    assert epsilon is not None
    return float(epsilon)


def _groups(match: Match) -> int:
    """How many groups the Reshape makes; 0 where that is not known."""
    if match.get("instance") is not None:
        sizes = _folding.known_sizes(match["group_scale"])
        assert sizes
        return sizes[0]
    made = query.shape(match["grouped"])
    return made[1] if made is not None and len(made) > 1 and isinstance(made[1], int) else 0


def _refuse_moments(match: Match, shape: Sequence[int | str | None]) -> Refusal | None:
    """Mean and variance must be those of all that a group has."""
    if match.get("instance") is not None:
        return None
    grouped = match["grouped"]
    made = query.shape(grouped) or []
    over = ["mean", "total" if match.get("total") is not None else "variance"]
    for name in over:
        axes = _norms.reduced_axes(match.node(name))
        if isinstance(axes, Refusal):
            return axes
        if _norms.from_end(axes, len(made)) != list(range(2 - len(made), 0)):
            return Refusal("mean and variance are not those of whole groups (axes)", axes)
    epsilon = query.scalar(match["epsilon"])
    if epsilon is None:
        return Refusal("epsilon is not one value", query.shape(match["epsilon"]))
    refusal = _norms.refuse_epsilon({"epsilon": epsilon})
    if refusal or match.get("total") is None:
        return refusal
    rest = made[2:]
    if not all(isinstance(size, int) for size in rest):
        return Refusal("how many elements a group has is not known", made)
    count, role = int(np.prod([int(size or 0) for size in rest])), "rate" if match.get("count") is None else "count"
    said = query.scalar(match[role])
    wanted = count if role == "count" else 1 / max(count, 1)
    if said is None or not is_close(float(said), wanted, match[role]):
        return Refusal(f"the sum of squares is not divided by the {count} elements of a group", said)
    return None


def _refuse_groups(match: Match, shape: Sequence[int | str | None], channels: int) -> Refusal | None:
    """The first Reshape must make [N, groups, everything else]."""
    if match.get("instance") is None:
        made, groups = query.shape(match["grouped"]), _groups(match)
        if made is None or len(made) not in (3, 4) or made[0] != shape[0] or made[0] is None or groups < 1:
            return Refusal(f"Reshape is not proved to make [N, groups, ...] of {list(shape)}", made)
        return Refusal(f"{channels} channels cannot be divided into groups", groups) if channels % groups else None
    sizes = query.shape(match["group_scale"])
    if sizes is None or len(sizes) != 1 or query.shape(match["group_bias"]) != sizes:
        return Refusal("scale of the InstanceNormalization is not one value for each of the groups", sizes)
    groups = _groups(match)
    target = query.constant(match["groups"])
    if target is None:
        made = query.shape(match["grouped"]) or []
        if len(made) == 3 and made[0] is not None and made[:2] == [shape[0], groups] and channels % groups == 0:
            return None  # what is left for the last axis is everything else
        return Refusal("number of groups is computed at run time", match["groups"].name)
    wanted = [int(size) for size in target.reshape(-1)]
    if target.ndim != 1 or len(wanted) != 3 or wanted[1] != groups:
        return Refusal(f"Reshape does not make [N, {groups}, -1]", wanted)
    if groups < 1 or channels % groups:
        return Refusal(f"{channels} channels cannot be divided into groups", groups)
    batch, rest = wanted[0], wanted[2]
    if match.node("grouped").attrs.get("allowzero", 0) and batch == 0:
        return Refusal("Reshape makes a tensor of no elements (allowzero)", wanted)
    known = [size for size in shape[2:] if isinstance(size, int)]
    whole = channels // groups * int(np.prod(known)) if len(known) == len(shape) - 2 else None
    kept = batch == 0 or (batch == shape[0] and rest in (-1, whole)) or (batch == -1 and rest == whole)
    return None if kept and (rest in (-1, whole)) else Refusal(f"Reshape is not proved to keep the batch of {list(shape)}", wanted)


def _refuse_back(match: Match, shape: Sequence[int | str | None]) -> Refusal | None:
    """The second Reshape must give the shape of the input again."""
    x, back = match["x"], match["back"]
    source = producer(back)
    if source is not None and source.op == "Shape" and source.domain in STANDARD:
        whole = not source.attrs.get("start", 0) and "end" not in source.attrs
        if whole and (source.inputs[0] is x or query.same_shape(source.inputs[0], x)):
            return None
    if query.same_shape(match["norm"], x):
        return None
    target = query.constant(back)
    if target is None:
        return Refusal("shape of the second Reshape is not proved to be that of the input", back.name)
    wanted = [int(size) for size in target.reshape(-1)]
    copies = not match.node("norm").attrs.get("allowzero", 0)
    agrees = [
        size == -1 or size == given or (size == 0 and copies and (axis == 0 or (axis == 1 and given == _groups(match))))
        for axis, (size, given) in enumerate(zip(wanted, shape, strict=False))
    ]
    if len(wanted) == len(shape) and all(agrees):
        return None
    return Refusal(f"second Reshape does not give the shape {list(shape)} of the input", wanted)


def _parameters(match: Match) -> tuple[Array, Array] | Refusal:
    """Scale and bias for each channel in float64: those of the InstanceNormalization, one a group, with those behind it."""
    shape = query.shape(match["x"]) or []
    channels = shape[1]
    assert isinstance(channels, int)
    for role in ("group_scale", "group_bias", "scale", "bias"):
        value = match.get(role)
        refusal = None if value is None else _folding.refuse_parameter(value, role.replace("_", " "))
        if refusal:
            return refusal
    scale, bias = np.ones(channels), np.zeros(channels)
    if match.get("instance") is not None:
        scale, bias = (np.repeat(_folding.wide(match[f"group_{role}"]), channels // _groups(match)) for role in ("scale", "bias"))
    for role in ("scale", "bias"):
        value = match.get(role)
        given = None if value is None else _folding.per_channel(value, channels, 1, len(shape))
        if isinstance(given, Refusal):
            return given
        if given is not None and role == "scale":
            scale, bias = scale * given, bias * given
        elif given is not None:
            bias = bias + given
    return scale, bias


FUSION = GroupNorm()
