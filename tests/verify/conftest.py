"""Small models for the tests of verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """save(nodes, inputs, outputs, weights={}, opset=17, name="model") -> path. A value is (name, element type, shape)."""

    def make(
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[tuple[str, int, Sequence[Any] | None]],
        outputs: Sequence[tuple[str, int, Sequence[Any] | None]],
        weights: dict[str, np.ndarray] | None = None,
        opset: int = 17,
        name: str = "model",
        functions: Sequence[onnx.FunctionProto] = (),
        **options: Any,
    ) -> Path:
        graph = helper.make_graph(
            list(nodes),
            "graph",
            [helper.make_tensor_value_info(*value) for value in inputs],
            [helper.make_tensor_value_info(*value) for value in outputs],
            [numpy_helper.from_array(value, key) for key, value in (weights or {}).items()],
        )
        domains = sorted({node.domain for node in nodes} - {""})
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=8, functions=list(functions))
        path = tmp_path / f"{name}.onnx"
        onnx.save(model, path, **options)
        return path

    return make


@pytest.fixture
def linear(save: Save) -> Path:
    """y = relu(x w) and its inner tensor h = x w; x [N, 4]."""
    w = np.arange(8, dtype=np.float32).reshape(4, 2) - 3
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    return save(nodes, [("x", TensorProto.FLOAT, ["N", 4])], [("y", TensorProto.FLOAT, ["N", 2])], {"w": w}, name="linear")


@pytest.fixture
def endless(save: Save) -> Path:
    """A Loop that never ends."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Neg", ["v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info(*v)
            for v in (("i", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("v", TensorProto.FLOAT, [2]))
        ],
        [helper.make_tensor_value_info(*v) for v in (("go_on", TensorProto.BOOL, []), ("w", TensorProto.FLOAT, [2]))],
    )
    node = helper.make_node("Loop", ["", "yes", "x"], ["y"], body=body)
    return save([node], [("x", TensorProto.FLOAT, [2])], [("y", TensorProto.FLOAT, [2])], {"yes": np.array(True)}, name="endless")
