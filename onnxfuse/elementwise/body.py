"""The ONNX function of an expression: what a fused node means wherever there is no plugin, in the operators of the model's opset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.elementwise.expression import ABSENT, NUMPY, Expression, Step
from onnxfuse.elementwise.operators import REDUCTIONS

STEM = "Elementwise"
ATTRIBUTE = "expression"
_ELEMENT = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
_QUANTIZATIONS = frozenset({"QuantizeLinear", "DequantizeLinear"})
_WHOLE_ATTRIBUTES = frozenset({"fmod", "detect_negative", "detect_positive"})
# Clip's bounds, the axes of ReduceSum, those of the other reductions became inputs; Gelu and RMSNormalization became operators.
_CLIP_INPUTS, _SUM_AXES, _AXES, _GELU, _LAYER_NORM, _RMS_NORM = 11, 13, 18, 20, 17, 23


def op_type(given: Expression) -> str:
    """The operator of domain onnxfuse that stands for an expression: one for each, as an ONNX function serves one operator."""
    return f"{STEM}_{given.digest}"


def function(given: Expression, opset: int, domain: str) -> onnx.FunctionProto:
    """The definition of `op_type(given)`, importing version `opset` of the standard operators."""
    names = [f"x{value}" for value in range(len(given.inputs))] + [f"v{value}" for value in range(len(given.inputs), len(given.types))]
    writer = _Writer(opset)
    by_axis = any(one.op in _QUANTIZATIONS and given.axes_of(one.operands[1]) for one in given.steps)
    for value, one in enumerate(given.steps, start=len(given.inputs)):
        operands = ["" if operand == ABSENT else names[operand] for operand in one.operands]
        if one.op in _QUANTIZATIONS and by_axis:
            writer.by_axis(one, operands, names[value], given.types[one.operands[1]])
        elif one.op in _QUANTIZATIONS:
            writer.quantization(one, operands, names[value], (given.types[one.operands[0]], given.types[value]))
        else:
            writer.step(one, operands, names[value], given.types[one.operands[0]] if one.operands else "")
    return helper.make_function(
        domain,
        op_type(given),
        names[: len(given.inputs)],
        [names[value] for value in given.outputs],
        writer.nodes,
        [helper.make_opsetid("", opset)],
        [ATTRIBUTE],
    )


class _Writer:
    """Appends the nodes of one step after another."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def constant(self, name: str, value: Any, dtype: str) -> str:
        tensor = numpy_helper.from_array(np.asarray(value).astype(NUMPY[dtype]), name)
        return self.node("Constant", [], name, value=tensor)

    def step(self, one: Step, operands: Sequence[str], result: str, dtype: str) -> None:
        """One step; `dtype` is the type of its first operand."""
        if one.op == "Constant":
            self.constant(result, one.get("value"), one.get("type"))
        elif one.op == "Cast":
            self.node("Cast", operands, result, to=_ELEMENT[one.get("to")])
        elif one.op == "Clip":
            self.clip(operands, result, dtype)
        elif one.op in ("Silu", "QuickGelu", "Gelu", "GeluTanh", "HardSwish", "Mish"):
            self.gate(one.op, operands[0], result, dtype)
        elif one.op in REDUCTIONS:
            self.reduction(one, operands, result, dtype)
        else:
            attributes = {name: int(value) if name in _WHOLE_ATTRIBUTES else value for name, value in one.attributes}
            if one.op == "Mod":
                attributes["fmod"] = 1 if dtype.startswith(("float", "bfloat")) else attributes["fmod"]
            self.node(one.op, operands, result, **attributes)

    def quantization(self, one: Step, operands: Sequence[str], result: str, kinds: tuple[str, str]) -> None:
        """As it was, by one scale. kinds: of the first operand and of the result."""
        kind = kinds[0] if one.op == "DequantizeLinear" else kinds[1]
        zeros = numpy_helper.from_array(np.asarray(one.get("zero"), kind), f"{result}_zero")
        zero = self.node("Constant", [], f"{result}_zero", value=zeros)
        self.node(one.op, [*operands, zero], result)

    def by_axis(self, one: Step, operands: Sequence[str], result: str, dtype: str) -> None:
        """By the scales of an axis: in float32, as the operators have a scale of one axis, and constants of its length, which an expression
        does not know. dtype: of the scale."""

        def wide(name: str, stem: str) -> str:
            return name if dtype == "float32" else self.node("Cast", [name], f"{result}_{stem}", to=TensorProto.FLOAT)

        x, scale = operands[0], wide(operands[1], "scale")
        zero = self.constant(f"{result}_zero", one.get("zero"), "float32")
        if one.op == "DequantizeLinear":
            steps = self.node("Sub", [x, zero], f"{result}_steps")
            if dtype == "float32":
                self.node("Mul", [steps, scale], result)
            else:
                self.node("Cast", [self.node("Mul", [steps, scale], f"{result}_y")], result, to=_ELEMENT[dtype])
            return
        steps = self.node("Round", [self.node("Div", [wide(x, "x"), scale], f"{result}_exact")], f"{result}_steps")
        moved = self.node("Add", [steps, zero], f"{result}_moved")
        low, high = (self.constant(f"{result}_{end}", one.get(end), "float32") for end in ("low", "high"))
        inside = self.node("Clip", [moved, low, high], f"{result}_inside")
        self.node("Where", [self.node("IsNaN", [moved], f"{result}_nan"), low, inside], result)

    def clip(self, operands: Sequence[str], result: str, dtype: str) -> None:
        if self.opset >= _CLIP_INPUTS:
            given = [*operands]
            while given[-1] == "":
                given.pop()
            self.node("Clip", given, result)
            return
        # Bounds were attributes: Max and Min take values. An absent one is the type's largest finite number, there as here.
        low, high = (*operands[1:], "", "")[:2]
        largest = float(np.finfo(NUMPY[dtype]).max)
        low = low or self.constant(f"{result}_low", -largest, dtype)
        high = high or self.constant(f"{result}_high", largest, dtype)
        self.node("Min", [self.node("Max", [operands[0], low], f"{result}_raised"), high], result)

    def gate(self, op: str, x: str, result: str, dtype: str) -> None:
        """x times a gate, in float32 between casts."""
        wide = x if dtype == "float32" else self.node("Cast", [x], f"{result}_wide", to=TensorProto.FLOAT)
        last = result if dtype == "float32" else f"{result}_y"
        if op == "Silu":
            self.node("Mul", [wide, self.node("Sigmoid", [wide], f"{result}_gate")], last)
        elif op == "QuickGelu":
            slope = self.constant(f"{result}_slope", 1.702, "float32")
            steep = self.node("Mul", [wide, slope], f"{result}_steep")
            self.node("Mul", [wide, self.node("Sigmoid", [steep], f"{result}_gate")], last)
        elif op == "HardSwish":
            gate = self.node("HardSigmoid", [wide], f"{result}_gate", alpha=1 / 6, beta=0.5)
            self.node("Mul", [wide, gate], last)
        elif op == "Mish":
            self.node("Mul", [wide, self.node("Tanh", [self.node("Softplus", [wide], f"{result}_plus")], f"{result}_gate")], last)
        else:
            self.gelu(op, wide, result, last)
        if last != result:
            self.node("Cast", [last], result, to=_ELEMENT[dtype])

    def gelu(self, op: str, x: str, result: str, last: str) -> None:
        if self.opset >= _GELU:
            self.node("Gelu", [x], last, approximate="none" if op == "Gelu" else "tanh")
            return
        half = self.node("Mul", [x, self.constant(f"{result}_half", 0.5, "float32")], f"{result}_halved")
        if op == "Gelu":
            scaled = self.node("Mul", [x, self.constant(f"{result}_scale", 0.5**0.5, "float32")], f"{result}_scaled")
            gate = self.node("Erf", [scaled], f"{result}_gate")
        else:
            cube = self.node("Mul", [self.node("Mul", [x, x], f"{result}_square"), x], f"{result}_cube")
            bent = self.node("Mul", [cube, self.constant(f"{result}_cubic", 0.044715, "float32")], f"{result}_bent")
            total = self.node("Add", [x, bent], f"{result}_total")
            scaled = self.node("Mul", [total, self.constant(f"{result}_scale", (2 / np.pi) ** 0.5, "float32")], f"{result}_scaled")
            gate = self.node("Tanh", [scaled], f"{result}_gate")
        opened = self.node("Add", [gate, self.constant(f"{result}_one", 1.0, "float32")], f"{result}_open")
        self.node("Mul", [half, opened], last)

    def reduction(self, one: Step, operands: Sequence[str], result: str, dtype: str) -> None:
        if one.op in ("Softmax", "LogSoftmax"):
            self.node(one.op, operands, result, axis=-1)
        elif one.op.startswith("Reduce"):
            self.reduce(one.op, operands[0], result, int(one.get("keepdims")))
        elif self.opset >= (_LAYER_NORM if one.op == "LayerNormalization" else _RMS_NORM):
            self.node(one.op, operands, result, axis=-1, epsilon=one.get("epsilon"))
        else:
            self.norm(one, operands, result, dtype)

    def reduce(self, op: str, x: str, result: str, keepdims: int) -> str:
        if self.opset >= (_SUM_AXES if op == "ReduceSum" else _AXES):
            axes = self.constant(f"{result}_axes", [-1], "int64")
            return self.node(op, [x, axes], result, keepdims=keepdims)
        return self.node(op, [x], result, axes=[-1], keepdims=keepdims)

    def norm(self, one: Step, operands: Sequence[str], result: str, dtype: str) -> None:
        """LayerNormalization or RMSNormalization spelled out, statistics in float32."""
        wide = operands[0] if dtype == "float32" else self.node("Cast", [operands[0]], f"{result}_wide", to=TensorProto.FLOAT)
        if one.op == "LayerNormalization":
            wide = self.node("Sub", [wide, self.reduce("ReduceMean", wide, f"{result}_mean", 1)], f"{result}_centered")
        square = self.node("Mul", [wide, wide], f"{result}_square")
        variance = self.reduce("ReduceMean", square, f"{result}_variance", 1)
        shifted = self.node("Add", [variance, self.constant(f"{result}_eps", one.get("epsilon"), "float32")], f"{result}_shifted")
        plain = self.node("Div", [wide, self.node("Sqrt", [shifted], f"{result}_root")], f"{result}_plain")
        given = plain if dtype == "float32" else self.node("Cast", [plain], f"{result}_narrow", to=_ELEMENT[dtype])
        scaled = self.node("Mul", [given, operands[1]], f"{result}_scaled" if len(operands) > 2 else result)
        if len(operands) > 2:
            self.node("Add", [scaled, operands[2]], result)
