"""Synthetic giants: a transformer encoder in primitives, as exporters wrote them before opset 17, of any number of nodes or bytes.

`python -m benchmarks.synthetic OUT.onnx --nodes 20000` or `--bytes 2500000000` (weights in one external file, full of holes).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 14
HEADS = 4
NODES_A_LAYER = 61
_PAGE = 4096


class _Layers:
    """Nodes and initializers of an encoder. Large initializers are only declared: their values are the writer's affair."""

    def __init__(self, hidden: int, inner: int) -> None:
        self.hidden, self.inner = hidden, inner
        self.nodes: list[onnx.NodeProto] = []
        self.small: list[onnx.TensorProto] = []
        self.large: dict[str, tuple[int, ...]] = {}
        self._count = 0

    def op(self, type_: str, *inputs: str, **attributes: Any) -> str:
        self._count += 1
        name = f"{type_.lower()}_{self._count}"
        self.nodes.append(helper.make_node(type_, inputs, [name], f"node_{name}", **attributes))
        return name

    def constant(self, value: Any, dtype: type = np.float32) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def vector(self, name: str, size: int, value: float) -> str:
        self.small.append(numpy_helper.from_array(np.full(size, value, np.float32), name))
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        self.large[f"{name}.weight"] = (rows, columns)
        return self.op("Add", self.op("MatMul", x, f"{name}.weight"), self.vector(f"{name}.bias", columns, 0.01))

    def norm(self, x: str, name: str) -> str:
        centered = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        variance = self.op("ReduceMean", self.op("Pow", centered, self.constant(2.0)), axes=[-1])
        scaled = self.op("Div", centered, self.op("Sqrt", self.op("Add", variance, self.constant(1e-5))))
        scaled = self.op("Mul", scaled, self.vector(f"{name}.weight", self.hidden, 1.0))
        return self.op("Add", scaled, self.vector(f"{name}.bias", self.hidden, 0.1))

    def gelu(self, x: str) -> str:
        error = self.op("Erf", self.op("Div", x, self.constant(2**0.5)))
        return self.op("Mul", self.op("Mul", x, self.op("Add", error, self.constant(1.0))), self.constant(0.5))

    def heads(self, x: str, perm: Sequence[int]) -> str:
        shape = self.constant([0, 0, HEADS, self.hidden // HEADS], np.int64)
        return self.op("Transpose", self.op("Reshape", x, shape), perm=perm)

    def attention(self, x: str, name: str) -> str:
        size = self.hidden
        query = self.heads(self.linear(x, f"{name}.query", size, size), (0, 2, 1, 3))
        key = self.heads(self.linear(x, f"{name}.key", size, size), (0, 2, 3, 1))
        value = self.heads(self.linear(x, f"{name}.value", size, size), (0, 2, 1, 3))
        scores = self.op("Div", self.op("MatMul", query, key), self.constant((size // HEADS) ** 0.5))
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        joined = self.op("Reshape", self.op("Transpose", mixed, perm=(0, 2, 1, 3)), self.constant([0, 0, size], np.int64))
        return self.linear(joined, f"{name}.output", size, size)

    def layer(self, x: str, name: str) -> str:
        x = self.norm(self.op("Add", self.attention(x, f"{name}.attention"), x), f"{name}.norm1")
        inner = self.gelu(self.linear(x, f"{name}.inner", self.hidden, self.inner))
        return self.norm(self.op("Add", self.linear(inner, f"{name}.output", self.inner, self.hidden), x), f"{name}.norm2")

    def model(self, count: int) -> onnx.ModelProto:
        x = "hidden_states"
        for number in range(count):
            x = self.layer(x, f"layer.{number}")
        self.nodes[-1].output[0] = "last_hidden_state"
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "sequence", self.hidden])
                for name in ("hidden_states", "last_hidden_state")]  # fmt: skip
        graph = helper.make_graph(self.nodes, "transformer", ends[:1], ends[1:], self.small)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8, producer_name="synthetic")


def by_nodes(nodes: int, hidden: int = 64) -> onnx.ModelProto:
    """An encoder of `nodes` nodes (to the nearest layer of 61), with seeded random weights in the model: about 3 kB a node."""
    layers = _Layers(hidden, 2 * hidden)
    model = layers.model(max(1, round(nodes / NODES_A_LAYER)))
    random = np.random.default_rng(0)
    for name, shape in layers.large.items():
        model.graph.initializer.append(numpy_helper.from_array(random.normal(0, 0.05, shape).astype(np.float32), name))
    return model


def by_bytes(path: Path, size: int, layers: int = 2) -> None:
    """Writes an encoder of `layers` layers and at least `size` bytes of weights: the model to `path`, the weights to `path`.data.

    The file of weights is one hole of zeros with a number at the start of each weight, and takes next to no room on disk.
    """
    hidden = -(-int((size / (32 * layers)) ** 0.5) // 64) * 64 + 64
    made = _Layers(hidden, 2 * hidden)
    model = made.model(layers)
    offsets = _offsets(made.large)
    with open(f"{path}.data", "wb") as data:
        for offset in offsets.values():
            data.seek(offset)
            data.write(np.float32(0.5).tobytes())
        data.truncate(max(offsets[name] + 4 * rows * columns for name, (rows, columns) in made.large.items()))
    for name, shape in made.large.items():
        tensor = model.graph.initializer.add(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        place = {"location": f"{path.name}.data", "offset": offsets[name], "length": 4 * shape[0] * shape[1]}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
    path.write_bytes(model.SerializeToString())


def _offsets(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    offsets, end = {}, 0
    for name, (rows, columns) in shapes.items():
        offsets[name] = end
        end += -(-4 * rows * columns // _PAGE) * _PAGE
    return offsets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--nodes", type=int, help="about as many nodes, weights in the model")
    size.add_argument("--bytes", type=int, help="at least as many bytes of weights, in a file of their own")
    given = parser.parse_args()
    if given.bytes:
        by_bytes(given.out, given.bytes)
    else:
        onnx.save(by_nodes(given.nodes), given.out)


if __name__ == "__main__":
    main()
