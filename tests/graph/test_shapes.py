"""Symbolic shapes: which dimensions are proved equal, which must not be, and that what is said holds at run time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import TensorProto, helper

from onnxfuse.graph import clean, query, read, shapes, write
from tests.fusions.helpers import Net, load, run, value
from tests.fusions.strategies import Example, examples

ROW = 8


def refined(net: Net, inputs: list[onnx.ValueInfoProto], outputs: list[str]) -> dict[str, list[Any] | None]:
    """Shapes of all tensors by name."""
    model = load(net.model(inputs, [value(name, [None]) for name in outputs]))
    model.graph.outputs[0].shape = None if model.graph.outputs[0].inputs else model.graph.outputs[0].shape
    shapes.refine(model)
    return {t.name: query.shape(t) for node in model.graph.nodes for t in (*node.inputs, *node.outputs)}


def last(build: Any, *inputs: onnx.ValueInfoProto, opset: int = 17) -> tuple[list[Any] | None, dict[str, list[Any] | None]]:
    """Shape of what `build` returns the name of, and all shapes."""
    net = Net(opset)
    name = build(net)
    found = refined(net, list(inputs), [net.op("Identity", name, out="end")])
    return found[name], found


X = value("x", ["N", "L", ROW])
IDS = value("ids", ["N", "L"], TensorProto.INT64)


def sizes(net: Net, x: str, *axes: int) -> list[str]:
    """One-element tensors of the sizes of axes, as exporters spell them."""
    one = net.const([0], np.int64)
    return [net.op("Unsqueeze", net.op("Gather", net.op("Shape", x), net.const(axis, np.int64), axis=0), one) for axis in axes]


def test_a_broadcast_of_the_same_two_is_the_same() -> None:
    def build(net: Net) -> str:
        net.op("Add", "x", "z", out="a")
        net.op("Mul", "z", net.op("Relu", "x"), out="b")
        return net.op("Add", "a", net.op("Add", "b", "x"), out="c")

    _, found = last(build, X, value("z", ["M", "L", ROW]))
    assert found["a"] == found["b"] == found["c"]
    assert found["a"] is not None
    assert found["a"][0] not in ("N", "M")


def test_a_broadcast_with_one_or_a_number() -> None:
    shape, _ = last(lambda net: net.op("Add", "x", net.const(np.zeros((1, 5, 1)))), X)
    assert shape == ["N", 5, ROW]
    shape, _ = last(lambda net: net.op("Add", "x", net.const(np.zeros((1, 1, 1)))), X)
    assert shape == ["N", "L", ROW]


def test_position_embeddings_cut_to_the_length() -> None:
    """Slice of [1, 512] up to the sequence length, then added: the sum has that length, or it fails."""

    def build(net: Net) -> str:
        (length,) = sizes(net, "ids", 1)
        table = net.const(np.zeros((1, 512)), np.int64)
        cut = net.op("Slice", table, net.const([0], np.int64), length, net.const([1], np.int64), net.const([1], np.int64))
        return net.op("Add", "x", net.op("Gather", net.const(np.zeros((512, ROW))), cut))

    assert last(build, X, IDS)[0] == ["N", "L", ROW]


def test_an_expand_as_torch_spells_it() -> None:
    """Expand to Where(shape == -1, 1, shape)."""

    def build(net: Net) -> str:
        shape = net.op("Concat", *sizes(net, "ids", 0), net.const([-1], np.int64), net.const([-1], np.int64), axis=0)
        ones = net.op("ConstantOfShape", net.const([3], np.int64), value=helper.make_tensor("v", TensorProto.INT64, [1], [1]))
        minus = net.op("Mul", ones, net.const(-1, np.int64))
        return net.op("Expand", net.const(np.zeros((1, 1, ROW))), net.op("Where", net.op("Equal", shape, minus), ones, shape))

    assert last(build, IDS)[0] == ["N", 1, ROW]


def test_heads_are_split_and_merged() -> None:
    def build(net: Net) -> str:
        n, length = sizes(net, "x", 0, 1)
        heads = net.op("Reshape", "x", net.op("Concat", n, net.const([-1], np.int64), net.const([2, 4], np.int64), axis=0))
        moved = net.op("Transpose", net.op("Transpose", heads, perm=[0, 2, 1, 3]), perm=[0, 2, 1, 3])
        merged = net.op("Reshape", moved, net.op("Concat", n, length, net.const([-1], np.int64), axis=0), out="merged")
        return net.op("Add", merged, "x")

    shape, found = last(build, X)
    assert shape == found["merged"] == ["N", "L", ROW]


def test_attention_keeps_the_shape_of_its_queries() -> None:
    def build(net: Net) -> str:
        scores = net.op("MatMul", "x", net.op("Transpose", "x", perm=[0, 2, 1]))
        return net.op("Add", "x", net.op("MatMul", net.op("Softmax", scores, axis=-1), "x"))

    assert last(build, X)[0] == ["N", "L", ROW]


def test_a_transposed_target() -> None:
    def build(net: Net) -> str:
        return net.op("Reshape", "y", net.op("Concat", *sizes(net, "y", 1), net.const([-1], np.int64), axis=0), allowzero=1)

    assert last(build, value("y", ["L", "N"]))[0] == ["N", "L"]


def test_a_target_that_may_be_minus_one_is_not_believed() -> None:
    def build(net: Net) -> str:
        n, length = sizes(net, "x", 0, 1)
        less = net.op("Sub", n, net.const([2], np.int64))
        return net.op("Reshape", "x", net.op("Concat", less, length, net.const([ROW], np.int64), axis=0))

    shape, _ = last(build, X)
    assert shape is not None
    assert shape[0] != "N"
    assert shape[2] == ROW


def test_concatenated_and_cut_lengths() -> None:
    def build(net: Net) -> str:
        net.op("Concat", net.const(np.zeros((1, 1, ROW))), "z", axis=1, out="a")
        net.op("Concat", "z", net.const(np.ones((1, 1, ROW))), axis=1, out="b")
        return net.op("Add", "a", "b")

    shape, found = last(build, value("z", [1, "L", ROW]))
    assert shape == found["a"] == found["b"]
    assert shape is not None
    assert shape[1] != "L"
    shape, _ = last(lambda net: net.op("Concat", net.const(np.zeros((1, 1, ROW))), "z", axis=1), value("z", [1, 256, ROW]))
    assert shape == [1, 257, ROW]


def test_the_last_l_of_l_elements_are_all() -> None:
    def build(net: Net) -> str:
        minus = net.op("Neg", *sizes(net, "x", 1))
        return net.op("Slice", "x", minus, net.const([2**63 - 1], np.int64), net.const([1], np.int64))

    assert last(build, X)[0] == ["N", "L", ROW]


def test_windows_of_one_size_give_one_length() -> None:
    def build(net: Net) -> str:
        weight = net.const(np.zeros((3, 3, 3)))
        net.op("Conv", "z", weight, pads=[1, 1], out="a")
        net.op("Conv", net.op("Relu", "z"), weight, pads=[1, 1], out="b")
        net.op("Conv", "z", weight, pads=[0, 0], out="other")
        return net.op("Add", "a", "b")

    shape, found = last(build, value("z", ["N", 3, "L"]))
    assert shape == found["a"] == found["b"]
    assert found["other"] != found["a"]


@pytest.mark.parametrize(
    ("attrs", "kernel", "height"),
    [
        ({"pads": [3, 1, 3, 1]}, (7, 3), "H"),
        ({"auto_pad": "SAME_UPPER"}, (7, 3), "H"),
        ({"pads": [2, 1, 4, 1]}, (7, 3), "H"),
        ({"pads": [6, 1, 6, 1], "dilations": [2, 1]}, (7, 3), "H"),
        ({"pads": [3, 1, 2, 1]}, (7, 3), None),
        ({"pads": [3, 1, 3, 1], "strides": [2, 1]}, (7, 3), None),
        ({"auto_pad": "VALID", "pads": None}, (7, 3), None),
    ],
)
def test_a_convolution_whose_pads_make_up_for_its_kernel_keeps_the_size(
    attrs: dict[str, Any], kernel: tuple[int, int], height: Any
) -> None:
    def build(net: Net) -> str:
        weight = net.const(np.zeros((5, 4, *kernel)))
        return net.op("Conv", "image", weight, **{name: held for name, held in attrs.items() if held is not None})

    shape, _ = last(build, value("image", ["N", 4, "H", "W"]))
    assert shape is not None
    assert shape[:2] == ["N", 5]
    assert (shape[2] == "H") is (height == "H")


def test_unnamed_dimensions_have_names_of_their_own() -> None:
    shape, found = last(lambda net: net.op("Add", net.op("Relu", "x"), "x"), value("x", [None, None, ROW]))
    assert shape == found["x"]
    assert shape is not None
    assert shape[0] != shape[1]


@pytest.mark.parametrize("name", ["?", "*", "-"])
def test_a_placeholder_is_no_name(name: str) -> None:
    shape, _ = last(lambda net: net.op("Relu", "x"), value("x", [name, name, ROW]))
    assert shape is not None
    assert shape[0] != shape[1]


def test_what_a_file_says_of_outputs_is_not_believed() -> None:
    net = Net(17)
    net.op("Concat", "x", "x", axis=0, out="y")
    model = load(net.model([value("x", ["N", ROW])], [value("y", ["N", ROW])]))
    shapes.refine(model)
    assert query.shape(model.graph.outputs[0]) != ["N", ROW]
    assert write.to_proto(model).graph.output[0] == value("y", ["N", ROW])  # but kept


def test_what_holds_in_a_branch_does_not_hold_outside() -> None:
    """Concatenating two tensors proves that they are as wide as each other, where the branch is taken."""
    inner = Net(17, prefix="i")
    both = inner.op("Concat", "a", "b", axis=0)
    then = helper.make_graph(inner.nodes, "then", [], [onnx.ValueInfoProto(name=both)])
    other = helper.make_graph([helper.make_node("Abs", ["a"], ["e"])], "else", [], [onnx.ValueInfoProto(name="e")])

    def build(net: Net) -> str:
        for name, axis in (("a", "p"), ("b", "q")):
            net.op("Reshape", "x", axis, out=name)
        return net.op("If", "flag", then_branch=then, else_branch=other)

    given = [value("flag", [], TensorProto.BOOL), X, *(value(name, [2], TensorProto.INT64) for name in "pq")]
    _, found = last(build, *given)
    assert found["a"] is not None
    assert found["b"] is not None
    assert found["a"][1] != found["b"][1]


def test_new_names_are_not_written() -> None:
    net = Net(17)
    net.op("Relu", net.op("Add", "x", "z"), out="y")
    model = load(net.model([X, value("z", ["M", "L", ROW])], [value("y", [None, None, None])]))
    shapes.refine(model)
    assert all(
        not dim.dim_param.startswith(shapes.MADE) for v in write.to_proto(model).graph.value_info for dim in v.type.tensor_type.shape.dim
    )


def holds(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> int:
    """Runs the model with every tensor as an output: each number must be right, and each symbol one number. Returns how many there were."""
    loaded = read.from_proto(copy.deepcopy(model))
    clean.clean(loaded)
    shapes.refine(loaded)
    said = {t.name: t.shape for node in loaded.graph.nodes for t in node.outputs if t.name and t.shape is not None}
    proto = write.to_proto(loaded)
    have = [output.name for output in proto.graph.output]
    more = [name for name in said if name not in have]
    proto.graph.output.extend([onnx.ValueInfoProto(name=name) for name in more])
    results = dict(zip([*have, *more], run(proto, feeds), strict=True)) | feeds
    said |= {t.name: t.shape for t in loaded.graph.inputs if t.shape is not None}
    symbols: dict[str, int] = {}
    count = 0
    for name, dims in said.items():
        if name not in results:
            continue
        got = np.shape(results[name])
        assert len(dims) == len(got), name
        for dim, size in zip(dims, got, strict=True):
            assert size == (dim if isinstance(dim, int) else symbols.setdefault(dim, size)), (name, dims, got)
            count += 1
    return count


@settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(examples())
def test_what_is_said_of_generated_graphs_holds(example: Example) -> None:
    assert holds(example.model, example.feeds)


@pytest.mark.real
@pytest.mark.parametrize(
    "name", ["paraphrase-minilm", "ppocr-rec", "ppocr-cls", "t5-encoder-int8", "vit-s-focus", "minilm-int8", "silero-vad"]
)
def test_what_is_said_of_trained_models_holds(name: str) -> None:
    from models import catalog, inputs

    model = next(model for model in catalog.MODELS if model.name == name)
    if not model.path.exists():
        pytest.skip(f"{model.path.name} is not here: models/fetch {name}")
    for feeds in inputs.feeds(name):
        assert holds(onnx.load(model.path), feeds)


def test_a_shape_put_back_after_grouping_is_the_same() -> None:
    """A size of 0 in a Reshape's target means the one before: of the grouped tensor's last axis, which is 0 wherever the size is."""

    def build(net: Net) -> str:
        grouped = net.op("Reshape", "image", net.const([0, 1, -1], np.int64))
        return net.op("Reshape", net.op("Relu", grouped), net.op("Shape", "image"))

    shape, _ = last(build, value("image", [2, 1, "H", ROW]), opset=9)
    assert shape == [2, 1, "H", ROW]
    names = shapes.Names()
    product = names.times([3, "H", "W"])
    assert names.is_factor("H", product)
    assert not names.is_factor("N", product)
    assert not names.is_factor("H", names.plus(["H", 1]))
