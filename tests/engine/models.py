"""Small onnxfuse models, made by hand with their functions, for tests of engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def skip_layer_normalization() -> onnx.FunctionProto:
    """The definition of onnxfuse.SkipLayerNormalization in primitives of opset 17."""
    nodes = [
        helper.make_node("Add", ["input", "skip"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "gamma", "beta"], ["output"], axis=-1),
    ]
    nodes[1].attribute.append(_reference("epsilon", onnx.AttributeProto.FLOAT))
    return helper.make_function(
        "onnxfuse",
        "SkipLayerNormalization",
        ["input", "skip", "gamma", "beta"],
        ["output", "sum"],
        nodes,
        [helper.make_opsetid("", OPSET)],
        attributes=["epsilon"],
    )


def bias_gelu() -> onnx.FunctionProto:
    """The definition of onnxfuse.BiasGelu, approximate "none", for float32."""
    nodes = [
        helper.make_node("Add", ["X", "bias"], ["t"]),
        helper.make_node("Constant", [], ["r"], value_float=0.7071067811865476),
        helper.make_node("CastLike", ["r", "t"], ["rl"]),
        helper.make_node("Mul", ["t", "rl"], ["s"]),
        helper.make_node("Erf", ["s"], ["e"]),
        helper.make_node("Constant", [], ["one"], value_float=1.0),
        helper.make_node("CastLike", ["one", "t"], ["onel"]),
        helper.make_node("Add", ["e", "onel"], ["p"]),
        helper.make_node("Mul", ["t", "p"], ["q"]),
        helper.make_node("Constant", [], ["half"], value_float=0.5),
        helper.make_node("CastLike", ["half", "t"], ["halfl"]),
        helper.make_node("Mul", ["q", "halfl"], ["Y"]),
    ]
    return helper.make_function(
        "onnxfuse", "BiasGelu", ["X", "bias"], ["Y"], nodes, [helper.make_opsetid("", OPSET)], attributes=["approximate"]
    )


def silu() -> onnx.FunctionProto:
    """The definition of onnxfuse.Silu, a canonical operator without a plugin."""
    nodes = [helper.make_node("Sigmoid", ["X"], ["s"]), helper.make_node("Mul", ["X", "s"], ["Y"])]
    return helper.make_function("onnxfuse", "Silu", ["X"], ["Y"], nodes, [helper.make_opsetid("", OPSET)])


def block(dtype: str = "float32", width: int = 64, batch: int | str = "batch") -> onnx.ModelProto:
    """x[batch, 5, width] -> MatMul -> BiasGelu -> SkipLayerNormalization with x (sum used) -> Silu.

    Outputs: y (the Silu of the norm) and s (the sum).
    """
    rng = np.random.default_rng(0)
    kind = DTYPES[dtype]
    weights = {
        "w": rng.standard_normal((width, width)) / np.sqrt(width),
        "b": rng.standard_normal(width),
        "gamma": 1 + 0.1 * rng.standard_normal(width),
        "beta": 0.1 * rng.standard_normal(width),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="fc"),
        helper.make_node("BiasGelu", ["m", "b"], ["g"], name="gelu_0", domain="onnxfuse", approximate="none"),
        helper.make_node("SkipLayerNormalization", ["g", "x", "gamma", "beta"], ["n", "s"], name="norm_0", domain="onnxfuse", epsilon=1e-5),
        helper.make_node("Silu", ["n"], ["y"], name="silu_0", domain="onnxfuse"),
    ]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", kind, [batch, 5, width])],
        [helper.make_tensor_value_info(name, kind, [batch, 5, width]) for name in ("y", "s")],
        [numpy_helper.from_array(value.astype(dtype), name) for name, value in weights.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("onnxfuse", 1)],
        functions=[skip_layer_normalization(), bias_gelu(), silu()],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    return model


def saved(model: onnx.ModelProto, folder: Path, name: str = "block.onnx") -> Path:
    path = folder / name
    onnx.save(model, str(path))
    return path


def feeds(dtype: str = "float32", width: int = 64, batch: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((batch, 5, width)).astype(dtype)}


def _reference(name: str, kind: int) -> onnx.AttributeProto:
    """An attribute of a function body that takes its value from the call."""
    attribute = onnx.AttributeProto()
    attribute.name, attribute.ref_attr_name, attribute.type = name, name, kind
    return attribute
