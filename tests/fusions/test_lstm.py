"""lstm: layers become one node with the transposes around them; every condition under which they must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfuse import pipeline
from tests.fusions.helpers import OPSETS, Net, check, fuse, names, ops, random, run, same, undo, value
from tests.fusions.recurrences import BATCH, HIDDEN, STEPS, WIDTH, Stack, attributes

STACK = Stack("LSTM")
DIRECTIONS = ("forward", "reverse", "bidirectional")


def reasons(stack: Stack) -> list[str]:
    """Why nothing was fused."""
    fused, sites, misses = fuse(stack.model()[0])
    assert "lstm" not in names(sites)
    assert all(node.domain != "onnxfuse" for node in fused.graph.node)
    return [miss.reason for miss in misses if miss.fusion == "lstm"]


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_opset_and_direction(direction: str, opset: int) -> None:
    for layers in (1, 2):
        fused, sites, _ = check(*replace(STACK, opset=opset, direction=direction, layers=layers).model())
        assert ops(fused) == [f"onnxfuse::LSTMSequence{layers if layers > 1 else ''}"]
        assert sites == [("lstm", None if layers == 1 else "2 layers")]


@pytest.mark.parametrize("layers", [3, 4, 5, 9])
def test_stacks_of_four_layers_at_most(layers: int) -> None:
    fused, _, _ = check(*replace(STACK, layers=layers).model())
    whole, rest = divmod(layers, 4)
    smaller = [f"onnxfuse::LSTMSequence{rest if rest > 1 else ''}"] if rest else []
    assert sorted(ops(fused)) == smaller + ["onnxfuse::LSTMSequence4"] * whole


def test_what_lies_around_the_layers() -> None:
    for batch_first, joined, perms in (
        (True, True, ([1, 0, 2], [2, 0, 1, 3])),
        (False, True, ([0, 1, 2], [0, 2, 1, 3])),
        (False, False, ([0, 1, 2], [0, 1, 2, 3])),
        (True, False, ([1, 0, 2], [0, 1, 2, 3])),
    ):
        for opset in (9, 17):
            for direction in DIRECTIONS:
                stack = replace(STACK, batch_first=batch_first, joined=joined, opset=opset, direction=direction)
                fused, _, _ = check(*stack.model())
                op = "LSTMSequence" if joined else "LSTMSequenceByDirection"
                assert ops(fused) == [f"onnxfuse::{op}"]
                found = attributes(fused, op)
                assert (found["x_perm"], found["y_perm"]) == perms
                assert found["direction"].decode() == direction


@pytest.mark.parametrize("states", [None, "zero", "spread", "given"])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_optional_inputs(bias: bool, lengths: bool, states: str | None) -> None:
    for layers in (1, 2):
        fused, _, _ = check(*replace(STACK, bias=bias, lengths=lengths, states=states, layers=layers).model())
        (node,) = [node for node in fused.graph.node if node.domain == "onnxfuse"]
        assert [name for name in node.input[1 + 3 * layers :] if name] == (["lengths"] if lengths else []) + (
            [f"{part}{number}" for number in range(1, layers + 1) for part in "hc"] if states == "given" else []
        )
        assert bool(node.input[3]) is bias if len(node.input) > 3 else not bias


def test_attributes_are_kept() -> None:
    for attrs in ({"clip": 0.2}, {"activations": ["Sigmoid", "tanh", "Tanh"]}, {"input_forget": 0}):
        model, feeds = replace(STACK, layers=2, attrs=attrs).model()
        fused, _, _ = check(model, feeds)
        assert attributes(fused, "LSTMSequence2")["clip"] == pytest.approx(attrs.get("clip", np.finfo(np.float32).max))
    unclipped = run(STACK.model()[0], feeds)[0]
    clipped = run(fuse(replace(STACK, attrs={"clip": 0.2}).model()[0])[0], feeds)[0]
    assert np.abs(unclipped - clipped).max() > 0.05


def test_half_precision() -> None:
    fused, _, _ = check(*replace(STACK, layers=2, dtype=np.float16, direction="bidirectional").model(), rtol=1e-2, atol=1e-2)
    assert ops(fused) == ["onnxfuse::LSTMSequence2"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 12}, "hidden_size is no multiple of 8 from 16 to 1024 (12)"),
        ({"hidden": 8}, "hidden_size is no multiple of 8 from 16 to 1024 (8)"),
        ({"attrs": {"clip": float("nan")}}, "clip is not positive (nan)"),
        ({"attrs": {"input_forget": 1}}, "couples input and forget gates (input_forget) (1)"),
        ({"attrs": {"activations": ["Sigmoid", "Tanh", "Relu"]}}, "has other activations (Sigmoid, Tanh, Relu)"),
    ],
)
def test_layers_that_the_kernels_do_not_compute(change: dict[str, Any], reason: str) -> None:
    assert reason in reasons(replace(STACK, **change))


def test_peepholes() -> None:
    model, _ = STACK.model()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 3 * HIDDEN), np.float32), "p"))
    (node,) = [node for node in model.graph.node if node.op_type == "LSTM"]
    node.input.append("p")
    _, sites, misses = fuse(model)
    assert sites == []
    assert "has peepholes (input P) (p)" in [miss.reason for miss in misses]


def test_a_tensor_between_layers_that_others_read_ends_the_stack() -> None:
    for more, layers in (("joined1", ["", ""]), ("y1", ["ByDirection", ""])):
        fused, sites, _ = check(*replace(STACK, layers=2, more=(more,)).model())
        assert names(sites) == ["lstm", "lstm"]
        assert [op for op in ops(fused) if op.startswith("onnxfuse")] == [f"onnxfuse::LSTMSequence{kind}" for kind in layers]


def test_layers_that_differ() -> None:
    model, feeds = replace(STACK, layers=2).model()
    _, second = (node for node in model.graph.node if node.op_type == "LSTM")
    second.attribute.append(onnx.helper.make_attribute("clip", 0.5))
    fused, _, misses = check(model, feeds)
    assert ops(fused) == ["onnxfuse::LSTMSequence", "onnxfuse::LSTMSequence"]
    assert "layers differ in clip (None and 0.5)" in [miss.reason for miss in misses] or not misses


def test_a_layer_that_starts_from_the_last_state_of_the_one_below() -> None:
    """As in a decoder; one node would have to be computed before itself."""
    for between in (lambda net, name: name, lambda net, name: net.op("Relu", name)):
        net = Net()
        rng = np.random.default_rng(0)
        weights = [net.const(rng.uniform(-0.5, 0.5, size)) for size in ((1, 4 * HIDDEN, HIDDEN), (1, 4 * HIDDEN, HIDDEN))]
        net.op("LSTM", "x", *weights, out=["y", "h", "c"], hidden_size=HIDDEN)
        joined = net.op("Squeeze", "y", net.const([1], np.int64))
        net.op("LSTM", joined, *weights, "", "", between(net, "h"), between(net, "c"), out=["z"], hidden_size=HIDDEN)
        feeds = {"x": random(STEPS, BATCH, HIDDEN)}
        _, sites, _ = check(net.model([value("x", (STEPS, BATCH, HIDDEN))], ["z"]), feeds)
        assert names(sites) == ["lstm", "lstm"]


def test_other_axes_around_a_layer_stay() -> None:
    net = Net()
    rng = np.random.default_rng(0)
    weights = [net.const(rng.uniform(-0.5, 0.5, (1, 4 * HIDDEN, width))) for width in (WIDTH, HIDDEN)]
    net.op("LSTM", net.op("Transpose", "x", perm=[2, 1, 0]), *weights, out=["y"], hidden_size=HIDDEN)
    net.op("Reshape", net.op("Transpose", "y", perm=[0, 2, 1, 3]), net.const([STEPS * BATCH, 1, HIDDEN], np.int64), out="z")
    fused, _, _ = check(net.model([value("x", (WIDTH, BATCH, STEPS))], ["z"]), {"x": random(WIDTH, BATCH, STEPS)})
    assert ops(fused) == ["Transpose", "onnxfuse::LSTMSequenceByDirection", "Transpose", "Reshape"]


def test_shapes_that_say_the_same() -> None:
    for shape in ([0, 0, 2 * HIDDEN], [STEPS, BATCH, -1], [-1, BATCH, 2 * HIDDEN], [STEPS, -1, 2 * HIDDEN]):
        model, feeds = replace(STACK, direction="bidirectional").model()
        (target,) = [t for t in model.graph.initializer if list(onnx.numpy_helper.to_array(t).reshape(-1)) == [0, 0, -1]]
        target.CopyFrom(onnx.numpy_helper.from_array(np.array(shape, np.int64), target.name))
        fused, _, _ = check(model, feeds)
        assert ops(fused) == ["onnxfuse::LSTMSequence"]


def test_a_shape_that_is_computed() -> None:
    """The sizes of steps and batch, as exporters compute them."""
    model, feeds = replace(STACK, layers=2, direction="bidirectional", states=None).model()
    for axis, name in enumerate(("B", "T")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    for output in model.graph.output:
        for dim in output.type.tensor_type.shape.dim:
            dim.ClearField("value")
    at, node = next((i, node) for i, node in enumerate(model.graph.node) if node.op_type == "Reshape")
    net = Net(prefix="shape_")
    sizes = net.op("Slice", net.op("Shape", node.input[0]), net.const([0], np.int64), net.const([2], np.int64))
    node.input[1] = net.op("Concat", sizes, net.const([-1], np.int64), axis=0)
    model.graph.initializer.extend(net.constants)
    for made in reversed(net.nodes):
        model.graph.node.insert(at, made)
    fused, _, _ = check(model, feeds)
    assert [op for op in ops(fused) if "LSTM" in op] == ["onnxfuse::LSTMSequence2"]


def test_states_that_nobody_reads() -> None:
    fused, _, _ = check(*replace(STACK, layers=2, outputs=False).model())
    assert ops(fused) == ["onnxfuse::LSTMSequence2"]


def test_inside_branches() -> None:
    model, feeds = replace(STACK, states=None, outputs=False).model()
    inner = list(model.graph.node)
    branch = onnx.helper.make_graph(inner, "then", [], [onnx.helper.make_tensor_value_info("out", 1, (BATCH, STEPS, HIDDEN))])
    other = onnx.helper.make_graph(
        [onnx.helper.make_node("ConstantOfShape", ["size"], ["none"])],
        "else",
        [],
        [onnx.helper.make_tensor_value_info("none", 1, (BATCH, STEPS, HIDDEN))],
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([BATCH, STEPS, HIDDEN]), "size"))
    del model.graph.node[:]
    model.graph.node.append(onnx.helper.make_node("If", ["condition"], ["result"], then_branch=branch, else_branch=other))
    model.graph.input.append(onnx.helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, []))
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("result", 1, (BATCH, STEPS, HIDDEN)))
    for condition in (True, False):
        fused, sites, _ = check(model, {**feeds, "condition": np.array(condition)})
        assert names(sites) == ["lstm"]
        assert "onnxfuse::LSTMSequence" in ops(fused)


def test_layout_1() -> None:
    """Batch first by the operator itself, which onnxruntime does not run; its function does."""
    net = Net()
    rng = np.random.default_rng(0)
    weights = [net.const(rng.uniform(-0.5, 0.5, (2, 4 * HIDDEN, width))) for width in (WIDTH, HIDDEN)]
    given = [value("x", (BATCH, STEPS, WIDTH)), *(value(name, (BATCH, 2, HIDDEN)) for name in ("h0", "c0"))]
    made = [value("y", (BATCH, STEPS, 2, HIDDEN)), *(value(name, (BATCH, 2, HIDDEN)) for name in ("h", "c"))]
    attrs = {"hidden_size": HIDDEN, "direction": "bidirectional"}
    net.op("LSTM", "x", *weights, "", "", "h0", "c0", out=["y", "h", "c"], layout=1, **attrs)
    fused, sites, _ = fuse(net.model(given, made))
    assert names(sites) == ["lstm"]
    feeds = {"x": random(BATCH, STEPS, WIDTH), "h0": random(BATCH, 2, HIDDEN, seed=1), "c0": random(BATCH, 2, HIDDEN, seed=2)}

    by_steps = Net(constants=list(net.constants))
    turned = [by_steps.op("Transpose", name, perm=[1, 0, 2]) for name in ("x", "h0", "c0")]
    by_steps.op("LSTM", turned[0], *weights, "", "", *turned[1:], out=["y_", "h_", "c_"], **attrs)
    by_steps.op("Transpose", "y_", perm=[2, 0, 1, 3], out="y")
    for name in "hc":
        by_steps.op("Transpose", f"{name}_", perm=[1, 0, 2], out=name)
    want = run(by_steps.model(given, made), feeds)
    same(run(fused, feeds), want)
    same(run(undo(fused), feeds), want)


@pytest.mark.parametrize(("direction", "precision"), [("forward", "keep"), ("bidirectional", "keep"), ("bidirectional", "fp16")])
def test_layout_1_is_checked_with_what_runs_it(direction: str, precision: str, tmp_path: Path) -> None:
    """onnx's own evaluator, also of the rewritten model, whose node leaves its last inputs out."""
    net = Net()
    rng = np.random.default_rng(0)
    many = 2 if direction == "bidirectional" else 1
    weights = [net.const(rng.uniform(-0.5, 0.5, (many, 4 * HIDDEN, width))) for width in (WIDTH, HIDDEN)]
    net.op("LSTM", "x", *weights, out=["y", "h"], layout=1, hidden_size=HIDDEN, direction=direction)
    made = [value("y", (BATCH, STEPS, many, HIDDEN)), value("h", (BATCH, many, HIDDEN))]
    onnx.save(net.model([value("x", (BATCH, STEPS, WIDTH))], made), tmp_path / "model.onnx")
    result = pipeline.optimize(tmp_path / "model.onnx", tmp_path / "fused.onnx", policy="all", precision=precision)
    assert [decision.site.fusion for decision in result.decisions if decision.fused] == ["lstm"]
    assert (result.converted is not None and result.converted.casts > 0) == (precision == "fp16")
    assert result.check is not None
    assert result.check.agrees
    assert result.check.reference.startswith("onnx.reference")
