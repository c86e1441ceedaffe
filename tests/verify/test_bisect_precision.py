"""Which nodes need float32: the search, and the conversions that it tries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxfuse.errors import OnnxfuseError
from onnxfuse.verify import check
from onnxfuse.verify.bisect.oracles import against
from onnxfuse.verify.bisect.precision import ROOM, Conversions, emulate, fewest
from onnxfuse.verify.reference import Runtime
from tests.verify import plants

NODES = {f"{op}{i}": op for i in range(6) for op in ("Conv", "Exp", "Add")}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime() as child:
        yield child


# --------------------------------------------------------------------------------------------------------- the search


def test_nothing_need_stay() -> None:
    remedy = fewest(NODES, lambda half: 0.4)
    assert remedy.verdict == "agree"
    assert remedy.keep == ()


def test_one_node_that_overflows() -> None:
    remedy = fewest(NODES, lambda half: math.inf if "Exp3" in half else 0.1)
    assert remedy.verdict == "found"
    assert remedy.keep == ("Exp3",)
    assert remedy.remaining == 0.1
    assert remedy.options(NODES) == ("Exp3",)
    assert remedy.alone == {"Exp3": math.inf}


def test_a_whole_operator_type_is_told_in_one_word() -> None:
    remedy = fewest(NODES, lambda half: math.inf if any(name.startswith("Exp") for name in half) else 0.1)
    assert set(remedy.keep) == {name for name in NODES if name.startswith("Exp")}
    assert remedy.options(NODES) == ("Exp",)


def test_nodes_of_several_types() -> None:
    remedy = fewest(NODES, lambda half: 5.0 * ("Exp1" in half) + 3.0 * ("Conv2" in half))
    assert set(remedy.keep) == {"Exp1", "Conv2"}
    assert set(remedy.options(NODES)) == {"Exp1", "Conv2"}


def test_the_largest_of_many_roundings_stay() -> None:
    """Squares add up; without the largest, the rest is within the limit. What is kept is 1-minimal."""
    sizes = {name: 0.1 + 0.05 * index for index, name in enumerate(NODES)}

    def oracle(half: frozenset[str]) -> float:
        return math.sqrt(sum(sizes[name] ** 2 for name in half))

    remedy = fewest(NODES, oracle)
    assert remedy.verdict == "found"
    rest = frozenset(NODES) - set(remedy.keep)
    assert oracle(rest) <= ROOM
    assert all(oracle(rest | {name}) > ROOM for name in remedy.keep)
    assert np.median([sizes[name] for name in remedy.keep]) > np.median([sizes[name] for name in rest])


def test_rounding_over_the_whole_model_is_no_matter_of_a_few_nodes() -> None:
    nodes = {f"{op}{i}": op for i in range(60) for op in ("Conv", "Mul", "Shift")}
    remedy = fewest(nodes, lambda half: 0.2 * math.sqrt(sum(not name.startswith("Shift") for name in half)))
    assert remedy.diffuse
    assert remedy.types == ("Conv", "Mul")
    assert remedy.options(nodes) == ("Conv", "Mul")
    assert len(remedy.keep) > 100
    assert remedy.tries < 150


def test_a_model_that_disagrees_in_float32_is_no_matter_of_precision() -> None:
    assert fewest(NODES, lambda half: 2.0).verdict == "elsewhere"


def test_a_conversion_that_cannot_be_run_is_told() -> None:
    def oracle(half: frozenset[str]) -> float:
        raise OnnxfuseError("no kernel")

    with pytest.raises(OnnxfuseError, match="no kernel"):
        fewest(NODES, oracle)


def test_the_limit_on_tries_leaves_a_set_that_agrees() -> None:
    def oracle(half: frozenset[str]) -> float:
        return 9.0 if {"Exp1", "Conv2", "Add5"} & half else 0.2

    remedy = fewest(NODES, oracle, limit=7)
    assert not remedy.complete
    assert remedy.verdict == "found"
    assert oracle(frozenset(NODES) - set(remedy.keep)) <= 1


# ---------------------------------------------------------------------------------------------------- real conversions


def cancelling() -> ModelProto:
    """y = tanh(x w) + ((x + 2000) - 2000): the sum has too few digits in half precision; the range is fine."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "matmul"),
        helper.make_node("Tanh", ["product"], ["squashed"], "tanh"),
        helper.make_node("Add", ["x", "big"], ["shifted"], "shift"),
        helper.make_node("Sub", ["shifted", "big"], ["back"], "unshift"),
        helper.make_node("Add", ["squashed", "back"], ["y"], "join"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 32]) for name in "xy"]
    weights = {"w": rng.normal(0, 0.2, (32, 32)), "big": np.array(2000.0)}
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_a_sum_without_digits_is_what_must_stay(tmp_path: Path, runtime: Runtime, half: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(cancelling(), path)
    feeds = [{"x": np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)}]
    conversions = Conversions(path, "fp16" if half == "fp16" else "bf16", None, tmp_path)
    nodes = conversions.nodes()
    assert set(nodes) == {"matmul", "tanh", "shift", "unshift", "join"}
    judge = against(runtime.run(path, feeds), check.tolerance(half), same_dtype=True)
    remedy = fewest(nodes, conversions.oracle(nodes, lambda file: runtime.run(file, feeds), judge))
    assert remedy.verdict == "found"
    assert set(remedy.keep) == {"shift", "unshift"}
    assert remedy.remaining < 1 < remedy.figure
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx"]


def test_fused_nodes_are_among_those_that_may_stay(tmp_path: Path) -> None:
    _, fused = plants.fused(plants.encoder(), tmp_path)
    nodes = Conversions(fused, "bf16", None, tmp_path).nodes()
    assert {"SkipLayerNormalization", "BiasGelu", "MatMul", "Softmax"} <= set(nodes.values())
    assert len(set(nodes)) == len(nodes)


def test_emulated_bfloat16_rounds_where_bfloat16_does(tmp_path: Path, runtime: Runtime) -> None:
    """Against onnx.reference on elementwise operators, which round once: equal bits."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"], "square"),
        helper.make_node("Add", ["square", "x"], ["sum"], "sum"),
        helper.make_node("Transpose", ["sum"], ["turned"], "turn", perm=[1, 0]),
        helper.make_node("Sub", ["turned", "square"], ["y"], "last"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, 16]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    path, out = tmp_path / "model.onnx", tmp_path / "half.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    Conversions(path, "bf16", None, tmp_path).write((), out)
    feeds = {"x": np.random.default_rng(2).normal(0, 30, size=(16, 16)).astype(np.float32)}
    want = ReferenceEvaluator(onnx.load(out)).run(None, feeds)[0]
    emulate(out)
    assert not any(t.data_type == TensorProto.BFLOAT16 for t in onnx.load(out).graph.initializer)
    np.testing.assert_array_equal(runtime.run(out, [feeds])[0]["y"], want)
    assert not np.array_equal(want, runtime.run(path, [feeds])[0]["y"])


def test_emulated_bfloat16_keeps_a_whole_encoder_near_its_float32(tmp_path: Path, runtime: Runtime) -> None:
    source, fused = plants.fused(plants.encoder(), tmp_path)
    out, feeds = tmp_path / "half.onnx", [plants.encoder_feeds()]
    Conversions(fused, "bf16", None, tmp_path).write((), out)
    emulate(out)
    want, got = (runtime.run(path, feeds)[0]["y"] for path in (source, out))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    step = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)
    assert 0.1 * step < error < 10 * step


def test_what_is_halved_inside_a_branch_is_rounded_there(tmp_path: Path, runtime: Runtime) -> None:
    branches = {
        name: helper.make_graph(
            [helper.make_node("Mul", ["x", "third"], [f"{name}_out"], name)], name, [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [8])],
        )
        for name in ("then_branch", "else_branch")
    }  # fmt: skip
    node = helper.make_node("If", ["yes"], ["y"], "choose", **branches)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in "xy"]
    flag = helper.make_tensor_value_info("yes", TensorProto.BOOL, [])
    third = numpy_helper.from_array(np.float32(1 / 3), "third")
    graph = helper.make_graph([node], "g", [ends[0], flag], [ends[1]], [third])
    path, out = tmp_path / "model.onnx", tmp_path / "half.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    Conversions(path, "bf16", None, tmp_path).write((), out)
    emulate(out)
    x = np.linspace(1, 2, 8, dtype=np.float32)
    half = ml_dtypes.bfloat16
    want = (x.astype(half) * np.float32(1 / 3).astype(half)).astype(np.float32)
    np.testing.assert_array_equal(runtime.run(out, [{"x": x, "yes": np.array(True)}])[0]["y"], want)
