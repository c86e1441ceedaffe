"""What numpy folds is, bit for bit, what onnxruntime gives; what it might not be is left to onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from onnx import helper, numpy_helper

from onnxfuse.graph import exact
from onnxfuse.graph.convert import Import
from tests.graph.models import Array

I64 = np.int64


def node(op: str, inputs: list[Array], attributes: dict[str, Any], opset: int) -> tuple[Array | None, Any]:
    """What exact.compute gives for a node, and a function that runs it in onnxruntime."""
    names = [f"i{k}" for k in range(len(inputs))]
    proto = helper.make_node(op, names, ["y"], **attributes)
    values = [numpy_helper.from_array(value, name) for value, name in zip(inputs, names, strict=True)]
    graph = helper.make_graph([proto], "g", [], [helper.make_empty_tensor_value_info("y")], values)
    made = Import().graph(graph, [], [], opset).nodes[0]

    def reference() -> Array:
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found: Array = session.run(None, {})[0]
        return found

    return exact.compute(made, inputs), reference


def same(op: str, *inputs: Any, opset: int = 17, **attributes: Any) -> None:
    arrays = [np.asarray(value) for value in inputs]
    got, reference = node(op, arrays, attributes, opset)
    assert got is not None, f"{op} is not computed"
    want = reference()
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


def left(op: str, *inputs: Any, opset: int = 17, **attributes: Any) -> None:
    got, _ = node(op, [np.asarray(value) for value in inputs], attributes, opset)
    assert got is None


CUBE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
HALF = CUBE.astype(np.float16)


@pytest.mark.parametrize("value", [CUBE, HALF, CUBE.astype(I64), CUBE > 5], ids=lambda value: str(value.dtype))
def test_moving_data(value: Array) -> None:
    same("Identity", value)
    same("Reshape", value, np.array([0, -1], I64))
    same("Reshape", value, np.array([4, 6], I64))
    same("Transpose", value, perm=[2, 0, 1])
    same("Transpose", value)
    same("Unsqueeze", value, np.array([0, -1], I64))
    same("Unsqueeze", value, opset=11, axes=[1, 3])
    same("Squeeze", value[:1], np.array([0], I64))
    same("Squeeze", value[:1, :, :1])
    same("Squeeze", value[:1], opset=11, axes=[0])
    same("Concat", value, value[:, :1], axis=-2)
    same("Gather", value, np.array([[1, -1], [0, 2]], I64), axis=1)
    same("Gather", value, np.array(1, np.int32))


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ([1], [2**63 - 1], [1], [1]), ([-1], [-(2**63)], [2], [-1]), ([3], [0], [-1], [-2]), ([-100], [100], [0], [1]),
        ([0, 1], [1, -1], [0, 2], [1, 1]), ([2], [1], [1], [1]), ([-1], [-10], [1], [-1]), ([5], [-1], [2], [-1]),
    ],
)  # fmt: skip
def test_slices(starts: list[int], ends: list[int], axes: list[int], steps: list[int]) -> None:
    same("Slice", CUBE, *(np.array(part, I64) for part in (starts, ends, axes, steps)))
    if steps == [1]:
        same("Slice", CUBE, opset=9, starts=starts, ends=ends, axes=axes)


@pytest.mark.parametrize("target", [1, 2, 3, 6, 7, 9, 11, 12])
@pytest.mark.parametrize(
    "value",
    [
        np.array([0, 1, 255], np.uint8), np.array([-128, -1, 127], np.int8), np.array([-(2**31), 2**31 - 1], np.int32),
        np.array([-(2**40) - 1, 2**53 + 1], I64), np.array([True, False]),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, np.ndarray) else str(value),
)  # fmt: skip
def test_casts_of_integers(value: Array, target: int) -> None:
    same("Cast", value, to=target)


def test_casts_of_floats() -> None:
    values = np.array([0.0, -0.0, 1.5, -1.5, 2.5, 1e9, -1e9, 1e-40], np.float32)
    for target in (6, 7, 9, 1, 11):
        same("Cast", values, to=target)
    same("Cast", np.array([0.1, 1e300, np.inf, np.nan]), to=1)
    for wild in (np.nan, np.inf, 3e9, -1e20):
        left("Cast", np.array([wild], np.float32), to=6)
    left("Cast", np.array([-1.0], np.float32), to=2)
    left("Cast", CUBE, to=10)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Equal"])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_single_operations_of_floats(op: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    finite = st.floats(width=dtype(0).itemsize * 8, allow_nan=False, allow_subnormal=False)  # type: ignore[arg-type]
    one, other = (data.draw(npst.arrays(dtype, shape, elements=finite)) for shape in ((3, 4), (4,)))
    got, reference = node(op, [one, other], {}, 17)
    assert got is not None
    np.testing.assert_array_equal(got, reference())


def test_integer_arithmetic() -> None:
    a, b = np.array([7, 2**31 - 1, 0], np.int32), np.array([2, 3, 5], np.int32)
    for op in ("Add", "Sub", "Mul", "Div", "Equal"):
        same(op, a, b)
        same(op, a.astype(I64), b[:1].astype(I64))


def test_integer_division_goes_towards_zero_and_never_traps() -> None:
    a, b = np.array([7, -7, 7, -7, 6, -6, 0], I64), np.array([2, 2, -2, -2, 3, 3, -5], I64)
    same("Div", a, b)
    same("Mod", a, b)
    same("Mod", a, b, fmod=1)
    same("Mod", np.array([7, 200], np.uint8), np.array([4, 255], np.uint8))
    smallest = np.iinfo(I64).min
    for op in ("Div", "Mod"):
        same(op, np.array([7, 255], np.uint8), np.array([2, 16], np.uint8))
        same(op, np.array([smallest], I64), np.array([2], I64))
        left(op, np.array([7], I64), np.array([0], I64))
        left(op, np.array([1, smallest], I64), np.array([-1], I64))  # onnxruntime dies of SIGFPE
        left(op, np.array([1.0], np.float32), np.array([1], I64))


def test_filled() -> None:
    same("ConstantOfShape", np.array([2, 3], I64))
    same("ConstantOfShape", np.array([2], I64), value=numpy_helper.from_array(np.array([7], I64)))
    same("ConstantOfShape", np.array([], I64), value=numpy_helper.from_array(np.array([True])))
    left("ConstantOfShape", np.array([1 << 40], I64))
    left("ConstantOfShape", np.array([1 << 20, 1 << 20], I64))
    left("ConstantOfShape", np.array([-1], I64))


def test_what_is_wrong_or_unknown_is_left_to_the_runtime() -> None:
    left("Gather", CUBE, np.array([9], I64))
    left("Reshape", CUBE, np.array([5, 5], I64))
    left("Reshape", CUBE, np.array([1, 1, 2, 0], I64))
    left("Reshape", CUBE[:0], np.array([0, -1], I64))
    left("Concat", CUBE, CUBE[0], axis=0)
    left("Slice", CUBE, np.array([0], I64), np.array([1], I64), np.array([7], I64))
    left("Slice", CUBE, np.array([0], I64), np.array([1], I64), np.array([0], I64), np.array([0], I64))
    left("Squeeze", CUBE, np.array([0], I64))
    left("Transpose", CUBE, perm=[0, 0, 1])
    left("Add", HALF, HALF)
    left("Add", CUBE, CUBE[0], opset=6, broadcast=1)
    left("Exp", CUBE)
    left("MatMul", CUBE[0], CUBE[0].T)
