"""float64 node by node: values against onnxruntime's float32, and against float64 formulas where float32 is not enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.verify.double import Evaluator

RNG = np.random.default_rng(0)
Case = tuple[str, list[Any], dict[str, Any], int]


def model(
    op: str, inputs: Sequence[Any], attributes: Mapping[str, Any], opset: int, outputs: int = 1
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    feeds = {f"i{place}": np.asarray(value) for place, value in enumerate(inputs) if value is not None}
    node = helper.make_node(
        op, [f"i{p}" if v is not None else "" for p, v in enumerate(inputs)], [f"o{k}" for k in range(outputs)], **attributes
    )
    given = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()]
    graph = helper.make_graph([node], "g", given, [onnx.ValueInfoProto(name=f"o{k}") for k in range(outputs)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), feeds


def by_onnxruntime(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    found: list[Any] = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, dict(feeds)
    )
    return found


def x(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return RNG.uniform(low, high, shape).astype(np.float32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


COORDINATES = "coordinate_transformation_mode"
DEQUANTIZED = [np.arange(12, dtype=np.uint8).reshape(3, 4), np.array([0.1, 0.2, 0.3], np.float32), np.array([1, 2, 3], np.uint8)]

CASES: dict[str, Case] = {
    "conv": ("Conv", [x(2, 4, 9, 8), x(6, 4, 3, 3), x(6)], {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}, 17),
    "conv of groups": ("Conv", [x(1, 6, 7, 7), x(6, 2, 3, 3)], {"group": 3}, 17),
    "depthwise conv": ("Conv", [x(1, 4, 12), x(4, 1, 5), x(4)], {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2]}, 11),
    "conv, same lower": ("Conv", [x(1, 2, 8, 7), x(3, 2, 2, 4)], {"auto_pad": "SAME_LOWER"}, 11),
    "conv in three dimensions": ("Conv", [x(1, 2, 4, 5, 6), x(3, 2, 2, 3, 2)], {"pads": [1, 1, 0, 0, 1, 1]}, 11),
    "conv transpose": (
        "ConvTranspose", [x(2, 4, 5, 6), x(4, 3, 3, 3), x(3)],
        {"strides": [2, 2], "pads": [1, 0, 1, 2], "output_padding": [1, 0]}, 17,
    ),
    "conv transpose of groups": ("ConvTranspose", [x(1, 4, 5, 5), x(4, 3, 2, 2)], {"group": 2, "strides": [2, 3], "dilations": [2, 1]}, 11),
    "conv transpose to a shape": ("ConvTranspose", [x(1, 2, 5, 5), x(2, 3, 3, 3)], {"output_shape": [10, 11], "strides": [2, 2]}, 11),
    "conv transpose, same": ("ConvTranspose", [x(1, 2, 5, 5), x(2, 3, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, 11),
    "average pool": ("AveragePool", [x(1, 2, 7, 8)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 2]}, 11),
    "average pool, padding counted": (
        "AveragePool", [x(1, 2, 7, 8)],
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}, 11,
    ),
    "average pool, ceiled": ("AveragePool", [x(1, 2, 7, 8)], {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}, 18),
    "global average": ("GlobalAveragePool", [x(2, 3, 4, 5)], {}, 17),
    "resize nearest": (
        "Resize", [x(1, 2, 4, 5), None, np.array([1, 1, 2, 3], np.float32)],
        {"mode": "nearest", COORDINATES: "asymmetric", "nearest_mode": "floor"}, 13,
    ),
    "resize nearest, half pixel": ("Resize", [x(1, 2, 7, 5), None, None, i64(1, 2, 4, 9)], {"mode": "nearest"}, 13),
    "resize nearest, ceil": (
        "Resize", [x(1, 2, 7, 5), None, None, i64(1, 2, 4, 9)],
        {"mode": "nearest", "nearest_mode": "ceil", COORDINATES: "asymmetric"}, 13,
    ),
    "resize linear": ("Resize", [x(1, 2, 4, 5), None, None, i64(1, 2, 9, 13)], {"mode": "linear"}, 13),
    "resize linear, corners": (
        "Resize", [x(1, 2, 4, 5), None, None, i64(1, 2, 9, 3)],
        {"mode": "linear", COORDINATES: "align_corners"}, 13,
    ),
    "resize linear, pytorch": (
        "Resize", [x(1, 2, 4, 5), None, None, i64(1, 2, 1, 3)],
        {"mode": "linear", COORDINATES: "pytorch_half_pixel"}, 18,
    ),
    "resize cubic": ("Resize", [x(1, 1, 6, 7), None, None, i64(1, 1, 11, 5)], {"mode": "cubic", "cubic_coeff_a": -0.5}, 13),
    "resize cubic, nothing outside": ("Resize", [x(1, 1, 6, 7), None, None, i64(1, 1, 11, 5)], {"mode": "cubic", "exclude_outside": 1}, 13),
    "erf": ("Erf", [x(3, 4)], {}, 13),
    "gelu": ("Gelu", [x(3, 4)], {}, 20),
    "gelu, tanh": ("Gelu", [x(3, 4)], {"approximate": "tanh"}, 20),
    "layer norm": ("LayerNormalization", [x(3, 4, 5), x(5), x(5)], {"epsilon": 1e-3}, 17),
    "layer norm of two axes": ("LayerNormalization", [x(3, 4, 5), x(4, 5)], {"axis": -2}, 17),
    "instance norm": ("InstanceNormalization", [x(2, 3, 4, 5), x(3), x(3)], {}, 17),
    "group norm": ("GroupNormalization", [x(2, 6, 4), x(6), x(6)], {"num_groups": 2}, 21),
    "softmax": ("Softmax", [x(3, 4, 5)], {"axis": 1}, 13),
    "softmax, flattened": ("Softmax", [x(3, 4, 5)], {"axis": 1}, 11),
    "log softmax": ("LogSoftmax", [x(3, 4)], {}, 13),
    "clip": ("Clip", [x(9), np.float32(-1), np.float32(0.5)], {}, 13),
    "clip, by attributes": ("Clip", [x(9)], {"min": -0.5, "max": 1.0}, 6),
    "hard sigmoid": ("HardSigmoid", [x(9)], {"alpha": 0.3, "beta": 0.4}, 17),
    "hard swish": ("HardSwish", [x(9, low=-5, high=5)], {}, 17),
    "elu": ("Elu", [x(9)], {"alpha": 0.7}, 17),
    "celu": ("Celu", [x(9)], {"alpha": 0.7}, 17),
    "selu": ("Selu", [x(9)], {}, 17),
    "leaky relu": ("LeakyRelu", [x(9)], {"alpha": 0.2}, 17),
    "prelu": ("PRelu", [x(2, 3, 4), x(3, 1)], {}, 17),
    "mish": ("Mish", [x(9)], {}, 18),
    "softplus": ("Softplus", [x(9)], {}, 17),
    "softsign": ("Softsign", [x(9)], {}, 17),
    "sigmoid": ("Sigmoid", [x(9, low=-30, high=30)], {}, 17),
    "gemm": ("Gemm", [x(4, 3), x(5, 4), x(1, 5)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}, 17),
    "matmul, broadcast": ("MatMul", [x(2, 1, 3, 4), x(5, 4, 2)], {}, 17),
    "add, broadcast": ("Add", [x(2, 3), x(3)], {}, 17),
    "add of integers": ("Add", [i64(1, 2), i64(3, 4)], {}, 17),
    "div of integers": ("Div", [i64(7, -7), i64(2, 2)], {}, 17),
    "quantize": ("QuantizeLinear", [x(3, 4, low=-50, high=50), np.float32(0.5), np.uint8(100)], {}, 13),
    "quantize an axis": ("QuantizeLinear", [x(3, 4), np.array([0.1, 0.2, 0.3, 0.4], np.float32), np.zeros(4, np.int8)], {"axis": 1}, 13),
    "dequantize": ("DequantizeLinear", DEQUANTIZED, {"axis": 0}, 13),
    # By onnxruntime's own double kernels.
    "reduce": ("ReduceMean", [x(3, 4, 5)], {"axes": [1], "keepdims": 0}, 13),
    "batch norm": ("BatchNormalization", [x(2, 3, 4), x(3), x(3), x(3), x(3, low=0.5, high=2)], {}, 15),
    "max pool": ("MaxPool", [x(1, 2, 6, 6)], {"kernel_shape": [2, 2]}, 17),
    "einsum": ("Einsum", [x(2, 3), x(3, 4)], {"equation": "ij,jk->ik"}, 17),
    "gather": ("Gather", [x(5, 3), i64(4, 0)], {}, 17),
    "gru": (
        "GRU", [x(4, 2, 3), x(2, 12, 3), x(2, 12, 4), x(2, 24)],
        {"hidden_size": 4, "direction": "bidirectional", "linear_before_reset": 1}, 14,
    ),
    "cast": ("Cast", [x(3)], {"to": TensorProto.FLOAT16}, 17),
    "cast to integers": ("Cast", [x(3, low=0, high=9)], {"to": TensorProto.INT32}, 17),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_operator_gives_what_float32_gives_and_more(name: str) -> None:
    op, inputs, attributes, opset = CASES[name]
    proto, feeds = model(op, inputs, attributes, opset)
    (want,) = by_onnxruntime(proto, feeds)
    evaluator = Evaluator(proto, feeds, ["o0"])
    found = evaluator.values(["o0"])
    assert not evaluator.missing
    got = found["o0"]
    assert got.shape == want.shape
    if want.dtype.kind == "f":
        assert got.dtype == np.float64
        tolerance = 1e-3 if want.dtype == np.float16 else 2e-6
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    else:
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_an_lstm_goes_by_whatever_can_do_it() -> None:
    proto, feeds = model("LSTM", [x(4, 2, 3), x(1, 16, 3), x(1, 16, 4), x(1, 32)], {"hidden_size": 4}, 14, outputs=3)
    want = by_onnxruntime(proto, feeds)
    evaluator = Evaluator(proto, feeds, ["o0", "o1", "o2"])
    found = evaluator.values(["o0", "o1", "o2"])
    for got, right in zip((found[f"o{k}"] for k in range(3)), want, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, right, atol=1e-6)


def test_it_is_nearer_than_float32_can_be() -> None:
    """Values of which float32 keeps nothing: 1e8 + 1 - 1e8, and erf to the last digits."""
    nodes = [
        helper.make_node("Add", ["x", "big"], ["a"]),
        helper.make_node("Sub", ["a", "big"], ["b"]),
        helper.make_node("Erf", ["x"], ["e"]),
        helper.make_node("Conv", ["row", "kernel"], ["c"]),
    ]
    weights = {"big": np.float32(1e8), "row": np.full((1, 1, 64), 0.1, np.float32), "kernel": np.full((1, 1, 64), 0.1, np.float32)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [onnx.ValueInfoProto(name="b")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = Evaluator(proto, {"x": np.array([0.75], np.float32)}, ["b", "e", "c"]).values(["b", "e", "c"])
    assert found["b"][0] == pytest.approx(0.75, abs=1e-8)
    assert found["e"][0] == math.erf(0.75)
    assert found["c"][0, 0, 0] == pytest.approx(64 * float(np.float32(0.1)) ** 2, rel=1e-15)


def test_what_nothing_computes_in_float64_has_no_truth_and_nor_has_what_follows() -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["r"], "dice"),
        helper.make_node("Add", ["x", "r"], ["a"], "add"),
        helper.make_node("Neg", ["x"], ["n"], "neg"),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])], [onnx.ValueInfoProto(name="a")])
    evaluator = Evaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), {"x": x(2)}, ["r", "a", "n"])
    found = evaluator.values(["r", "a", "n"])
    assert list(found) == ["n"]
    assert evaluator.missing["a"] == evaluator.missing["r"] == "node 'dice' (RandomNormalLike): makes random numbers"


def test_decisions_are_followed() -> None:
    """5.9999999 is 6 in float32: the evaluation goes the way that the reference went."""
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64), helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])], [onnx.ValueInfoProto(name="y")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    evaluator = Evaluator(proto, {"x": np.array([5.9], np.float32)}, ["i", "y"])
    evaluator.follow({"i": i64(6)})
    found = evaluator.values(["i", "y"])
    assert (found["i"].tolist(), found["y"].tolist()) == ([6], [6.0])


def test_tensors_go_after_their_last_reader() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["t0"])]
    nodes += [helper.make_node("Neg", [f"t{i}"], [f"t{i + 1}"]) for i in range(9)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])], [onnx.ValueInfoProto(name="t9")])
    evaluator = Evaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), {"x": x(4)}, ["t2", "t9"])
    assert list(evaluator.values(["t2"])) == ["t2"]
    assert set(evaluator._values) <= {"t2"}  # its reader has yet to come
    assert list(evaluator.values(["t9"])) == ["t9"]
    assert evaluator._values == {}
