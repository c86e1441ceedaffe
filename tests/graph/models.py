"""Small models and ways to run them, for the tests of the graph room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.graph import read, write
from onnxfuse.graph.model import Model

Array = np.ndarray[Any, Any]


def parse(text: str, **initializers: Array) -> ModelProto:
    """A model from onnx's text form; `initializers` are added to the main graph by name."""
    model = onnx.parser.parse_model(text)
    for name, value in initializers.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return model


def load(model: ModelProto, folder: Path, name: str = "model.onnx") -> Model:
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return read.load(path)


def saved(model: Model, folder: Path, name: str = "out.onnx") -> ModelProto:
    write.save(model, folder / name)
    onnx.checker.check_model(str(folder / name), full_check=True)
    return onnx.load(folder / name)


def run(model: ModelProto | Path, feeds: dict[str, Array]) -> dict[str, Array]:
    """Outputs in onnxruntime with optimizations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def function(domain: str, name: str, inputs: list[str], outputs: list[str], nodes: list[onnx.NodeProto]) -> onnx.FunctionProto:
    return helper.make_function(domain, name, inputs, outputs, nodes, [helper.make_opsetid("", 17)])


def transformer(layers: int, width: int = 32, opset: int = 14) -> ModelProto:
    """A BERT-like encoder in primitives: 50 nodes a layer."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, Array] = {
        "two": np.float32(2), "eps": np.float32(1e-5), "root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5),
        "scale": np.float32((width // 4) ** 0.5), "split": np.array([0, 0, 4, width // 4]), "merge": np.array([0, 0, width]),
    }  # fmt: skip

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [f"t{len(nodes)}"], name=f"{kind}_{len(nodes)}", **attributes))
        return str(nodes[-1].output[0])

    def weight(*shape: int) -> str:
        name = f"w{len(constants)}"
        constants[name] = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        return name

    def linear(x: str, into: int, out: int) -> str:
        return op("Add", op("MatMul", x, weight(into, out)), weight(out))

    def norm(x: str) -> str:
        centred = op("Sub", x, op("ReduceMean", x, axes=[-1]))
        deviation = op("Sqrt", op("Add", op("ReduceMean", op("Pow", centred, "two"), axes=[-1]), "eps"))
        return op("Add", op("Mul", op("Div", centred, deviation), weight(width)), weight(width))

    def heads(x: str) -> str:
        return op("Transpose", op("Reshape", linear(x, width, width), "split"), perm=[0, 2, 1, 3])

    x = "x"
    for _ in range(layers):
        q, k, v = heads(x), heads(x), heads(x)
        scores = op("Softmax", op("Div", op("MatMul", q, op("Transpose", k, perm=[0, 1, 3, 2])), "scale"), axis=-1)
        mixed = op("Reshape", op("Transpose", op("MatMul", scores, v), perm=[0, 2, 1, 3]), "merge")
        x = norm(op("Add", x, linear(mixed, width, width)))
        inner = linear(x, width, 2 * width)
        gelu = op("Mul", op("Mul", inner, op("Add", op("Erf", op("Div", inner, "root")), "one")), "half")
        x = norm(op("Add", x, linear(gelu, 2 * width, width)))
    nodes.append(helper.make_node("Identity", [x], ["y"]))
    shape = ["N", "S", width]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "encoder", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
