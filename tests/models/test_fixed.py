"""A fixed input is a constant or has a shape, and the model computes what it computed."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from models.fixed import fix


def model() -> onnx.ModelProto:
    """y = x + s where `twice` is false, else x + 2 s."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Mul", ["s", f"{name}_factor"], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [])],
            [helper.make_tensor(f"{name}_factor", TensorProto.FLOAT, [], [factor])],
        )
        for name, factor in (("then", 2.0), ("else", 1.0))
    }
    nodes = [helper.make_node("If", ["twice"], ["scaled"], **branches), helper.make_node("Add", ["x", "scaled"], ["y"])]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]),
        helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("twice", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def test_it_computes_what_it_computed() -> None:
    feeds = {"x": np.ones((2, 3), np.float32), "s": np.array(0.5, np.float32)}
    wanted = run(model(), {**feeds, "twice": np.array(True)})
    fixed = model()
    fix(fixed, ["twice=1", "x:2x3"])
    assert [value.name for value in fixed.graph.input] == ["x", "s"]
    assert [dim.dim_value for dim in fixed.graph.input[0].type.tensor_type.shape.dim] == [2, 3]
    np.testing.assert_array_equal(run(fixed, feeds), wanted)


@pytest.mark.parametrize("change", ["z=1", "x", "z:1x2", "x:2xn"])
def test_what_names_no_input_is_refused(change: str) -> None:
    with pytest.raises(ValueError, match=r"expected NAME=VALUE|invalid literal"):
        fix(model(), [change])
