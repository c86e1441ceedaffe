"""Models of LSTM and GRU layers as exporters write them, for test_lstm and test_gru."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from tests.fusions.helpers import Net, value

HIDDEN, WIDTH, STEPS, BATCH = 16, 24, 5, 3
STATES = {"LSTM": ("h", "c"), "GRU": ("h",)}


@dataclass(frozen=True)
class Stack:
    """Layers of one cell between the transposes of a module that takes its batch first. `states`: None, "zero", "spread" or "given"."""

    cell: str
    layers: int = 1
    direction: str = "forward"
    opset: int = 17
    batch_first: bool = True
    joined: bool = True  # directions side by side behind the last layer
    bias: bool = True
    states: str | None = "zero"
    lengths: bool = False
    outputs: bool = True  # the last states are outputs of the graph
    hidden: int = HIDDEN
    dtype: Any = np.float32
    attrs: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[str, ...] = ()  # further graph outputs

    def model(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """The model and feeds for it."""
        rng = np.random.default_rng(0)
        net = Net(self.opset)
        kind = TensorProto.FLOAT16 if self.dtype == np.float16 else TensorProto.FLOAT
        directions = 2 if self.direction == "bidirectional" else 1
        gates = 4 if self.cell == "LSTM" else 3
        shape = (BATCH, STEPS, WIDTH) if self.batch_first else (STEPS, BATCH, WIDTH)
        given = [value("x", shape, kind)]
        feeds = {"x": rng.standard_normal(shape).astype(self.dtype)}
        if self.lengths:
            given.append(value("lengths", [BATCH], TensorProto.INT32))
            feeds["lengths"] = np.array([STEPS, 2, 4], np.int32)

        def weights(*size: int) -> str:
            return net.const(rng.uniform(-0.5, 0.5, size), self.dtype)

        def state(name: str) -> str:
            size = (directions, BATCH, self.hidden)
            if self.states == "zero":
                return net.const(np.zeros(size), self.dtype)
            if self.states == "spread":
                return net.op("Expand", net.const(np.zeros((1, 1, 1)), self.dtype), net.const(size, np.int64))
            given.append(value(name, size, kind))
            feeds[name] = rng.uniform(-1, 1, size).astype(self.dtype)
            return name

        last: list[str] = []
        x = net.op("Transpose", "x", perm=[1, 0, 2]) if self.batch_first else "x"
        for number in range(1, self.layers + 1):
            width = WIDTH if number == 1 else directions * self.hidden
            rows = gates * self.hidden
            inputs = [x, weights(directions, rows, width), weights(directions, rows, self.hidden)]
            inputs.append(weights(directions, 2 * rows) if self.bias else "")
            inputs.append("lengths" if self.lengths else "")
            if self.states:
                inputs += [state(f"{part}{number}") for part in STATES[self.cell]]
            while not inputs[-1]:
                inputs.pop()
            made = [f"y{number}", *(f"last_{part}{number}" for part in STATES[self.cell])]
            last += made[1:]
            net.op(self.cell, *inputs, out=made, hidden_size=self.hidden, direction=self.direction, **self.attrs)
            if number < self.layers or self.joined:
                x = self._join(net, made[0], f"joined{number}")
            else:
                x = made[0]
        if self.batch_first and self.joined:
            x = net.op("Transpose", x, perm=[1, 0, 2], out="out")
        outputs = [x, *(last if self.outputs else ()), *self.more]
        return net.model(given, outputs), feeds

    def _join(self, net: Net, y: str, out: str) -> str:
        if self.direction == "bidirectional":
            return net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1, 3]), net.const([0, 0, -1], np.int64), out=out)
        if self.opset >= 13:
            return net.op("Squeeze", y, net.const([1], np.int64), out=out)
        return net.op("Squeeze", y, axes=[1], out=out)


def attributes(model: onnx.ModelProto, op_type: str) -> dict[str, Any]:
    """Attributes of the only node of that type."""
    (node,) = [node for node in model.graph.node if node.op_type == op_type]
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
