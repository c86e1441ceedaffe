"""elementwise: chains and trees become one node; values against onnxruntime; where a site ends, and what it leaves alone."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse import pipeline
from onnxfuse.elementwise import expression as ex
from onnxfuse.fusions import REGISTRY, elementwise
from onnxfuse.fusions.base import Index, find
from onnxfuse.graph.precision import convert
from tests.fusions.helpers import NEWEST, OPSETS, RUN_OPSET, Net, check, fuse, load, ops, proved, random, run, same, text, undo, value

X = random(2, 6, 4, 8)
SHAPE = [2, 6, 4, 8]


def chains(model: onnx.ModelProto) -> list[elementwise.Chain]:
    loaded = load(model)
    pipeline.tidy(loaded)
    found, _ = find(elementwise.FUSION, loaded, Index.of(loaded))
    assert all(isinstance(chain, elementwise.Chain) for chain in found)
    return found  # type: ignore[return-value]


def fused(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], only: tuple[str, ...] = ("elementwise",), **tolerance: float
) -> onnx.ModelProto:
    """The rewritten model; its values, and those taken apart again, are the original's."""
    rewritten, _, _ = fuse(model, only)
    onnx.checker.check_model(rewritten, full_check=True)
    same(run(rewritten, feeds), run(model, feeds), **tolerance)
    same(run(undo(rewritten), feeds), run(model, feeds), **tolerance)
    return rewritten


def kinds(model: onnx.ModelProto) -> list[str]:
    """Operators, with the form of an expression in the place of its digest."""
    return [op if "Elementwise" not in op else "Elementwise" for op in ops(model)]


def forms(model: onnx.ModelProto) -> list[str]:
    return [chain.expression.form for chain in chains(model)]


def hard_swish(net: Net, x: str, opset: int = 17) -> str:
    shifted = net.op("Add", x, net.const(3.0))
    if opset < 11:
        clipped = net.op("Clip", shifted, min=0.0, max=6.0)
    else:
        clipped = net.op("Clip", shifted, net.const(0.0), net.const(6.0))
    return net.op("Div", net.op("Mul", x, clipped), net.const(6.0))


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset: int) -> None:
    net = Net(opset)
    x = hard_swish(net, "x", opset)
    y = net.op("Mul", net.op("Sigmoid", x), net.op("Tanh", net.op("Neg", x)))
    model = net.model([value("x", SHAPE)], [net.op("Sub", y, net.op("Exp", x))])
    if opset <= RUN_OPSET:
        assert kinds(fused(model, {"x": X})) == ["Elementwise"]
    else:
        assert kinds(fuse(model, ["elementwise"])[0]) == ["Elementwise"]


@pytest.mark.parametrize("shape", [(), (1,), (8,), (4, 1), (6, 1, 1), (1, 6, 1, 1), (2, 1, 4, 8), (2, 6, 4, 8), (2, 1, 1, 1)])
def test_broadcasts(shape: tuple[int, ...]) -> None:
    net = Net()
    other = random(*shape, seed=1)
    y = net.op("Mul", "x", net.op("Add", "other", net.op("Relu", "x")))
    model = net.model([value("x", SHAPE), value("other", shape)], [y])
    assert kinds(fused(model, {"x": X, "other": other})) == ["Elementwise"]
    (chain,) = chains(model)
    axes = "".join("0" if size == 1 else "1" for size in shape)
    assert {given.axes for given in chain.expression.inputs} == {"1111", axes}


def test_a_result_that_grows_along_the_way() -> None:
    """[6, 1, 1] and [8]: neither has the shape of the sum."""
    net = Net()
    total = net.op("Add", "a", "b")
    model = net.model([value("a", [6, 1, 1]), value("b", [8]), value("x", [2, 6, 4, 8])], [net.op("Mul", net.op("Relu", total), "x")])
    feeds = {"a": random(6, 1, 1), "b": random(8, seed=2), "x": X}
    assert kinds(fused(model, feeds)) == ["Elementwise"]


def test_dynamic_shapes() -> None:
    net = Net()
    y = net.op("Mul", net.op("Exp", "x"), net.op("Add", "x", "bias"))
    model = net.model([value("x", ["N", 3, "L"]), value("bias", ["L"])], [y])
    rewritten, _, _ = fuse(model, ["elementwise"])
    assert kinds(rewritten) == ["Elementwise"]
    for n, length in ((1, 4), (3, 7)):
        feeds = {"x": random(n, 3, length), "bias": random(length)}
        same(run(rewritten, feeds), run(model, feeds))
    unproved = net.model([value("x", ["N", 3, "L"]), value("bias", ["M"])], [y])
    assert chains(unproved) == []


@pytest.mark.parametrize("reduction", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "Softmax", "LogSoftmax", "LayerNormalization"])
@pytest.mark.parametrize("opset", [11, 17, 18, RUN_OPSET])
def test_a_reduction_ends_a_site(reduction: str, opset: int) -> None:
    if reduction == "LayerNormalization" and opset < 17:
        return
    net = Net(opset)
    total = net.op("Add", net.op("Mul", "x", "x"), net.op("Abs", "x"))
    if reduction.startswith("Reduce") and not (reduction == "ReduceSum" and opset < 18):
        last = net.mean(total, op=reduction)
    elif reduction == "ReduceSum":
        last = net.op(reduction, total, net.const([-1], np.int64)) if opset >= 13 else net.op(reduction, total, axes=[-1])
    elif reduction == "LayerNormalization":
        last = net.op(reduction, total, net.const(np.linspace(1, 2, 8)), net.const(np.linspace(-1, 1, 8)))
    else:
        last = net.op(reduction, total, axis=3)
    model = net.model([value("x", SHAPE)], [last, net.op("Neg", total)])
    (chain,) = chains(model)
    assert chain.expression.reduction is not None
    assert chain.expression.reduction.op == reduction
    fused(model, {"x": X}, atol=1e-6)


def masked(net: Net) -> str:
    soft = net.op("Softmax", net.op("Mul", "x", net.const(0.3)), axis=-1)
    return net.op("Mul", soft, "u")


def spelled_rms(net: Net) -> str:
    """The operand of the mean is read again, small tensors are between it and where it is used, and a sigmoid serves what follows alone."""
    h = net.op("Mul", "x", "u")
    mean = net.op("ReduceMean", net.op("Mul", h, h), axes=[-1], keepdims=1)
    scale = net.op("Reciprocal", net.op("Sqrt", net.op("Add", mean, net.const(1e-3))))
    return net.op("Mul", net.op("Mul", h, scale), net.op("Sigmoid", "x"))


def normed(net: Net) -> str:
    norm = net.op("LayerNormalization", net.op("Mul", "x", "u"), net.const(random(8)), net.const(random(8)))
    return net.op("Tanh", net.op("Mul", norm, "x"))


@pytest.mark.parametrize(
    ("build", "form"),
    [
        (masked, "Mul-Softmax-Mul"),
        (spelled_rms, "Mul-Mul-ReduceMean-Add-Sqrt-Reciprocal-Mul-and-2-more"),
        (normed, "Mul-LayerNormalization-Mul-Tanh"),
    ],
)
def test_a_reduction_in_the_middle(build: Any, form: str) -> None:
    net = Net(17)
    model = net.model([value("x", SHAPE), value("u", SHAPE)], [build(net)])
    feeds = {"x": X, "u": random(*SHAPE, seed=4)}
    (chain,) = chains(model)
    assert chain.expression.form.startswith(form)
    assert chain.expression.is_reduced_midway
    assert kinds(fused(model, feeds, atol=1e-5)) == ["Elementwise"]


def softmax_and_more(shape: list[Any], **more: Any) -> list[str]:
    """The forms of Add-Softmax and Tanh-Mul behind it; `more` is what else the model has."""
    net = Net(17)
    total = net.op("Add", "x", net.const(0.3))
    soft = net.op("Softmax", total, axis=-1)
    y = net.op("Mul", net.op("Tanh", soft), more["behind"](net, total) if "behind" in more else "u")
    others = more["outputs"](net, total, soft) if "outputs" in more else []
    return forms(net.model([value("x", shape), value("u", shape)], [y, *others]))


def test_two_sites_stay_two_where_they_cannot_be_one() -> None:
    apart = ["Add-Softmax", "Tanh-Mul"]
    assert softmax_and_more(SHAPE) == ["Add-Softmax-Tanh-Mul"]
    assert softmax_and_more([2, 4097]) == apart  # no block holds the row
    assert softmax_and_more([2, 4096]) == ["Add-Softmax-Tanh-Mul"]
    assert softmax_and_more(["N", "L"]) == apart
    assert softmax_and_more(["N", 8]) == ["Add-Softmax-Tanh-Mul"]
    # Another way between them: the one node would need its own result.
    assert softmax_and_more(SHAPE, behind=lambda net, total: net.op("MaxPool", total, kernel_shape=[1, 1])) == apart
    # Somebody else needs the softmax, too.
    assert softmax_and_more(SHAPE, outputs=lambda net, total, soft: [net.op("MaxPool", soft, kernel_shape=[1, 1])]) == apart
    # A graph's output is one of the site; not one number a row.
    assert softmax_and_more(SHAPE, outputs=lambda net, total, soft: [soft]) == ["Add-Softmax-Tanh-Mul"]
    net = Net(17)
    mean = net.op("ReduceMean", net.op("Abs", "x"), axes=[-1], keepdims=1)
    y = net.op("Exp", net.op("Sub", "x", mean))
    assert forms(net.model([value("x", SHAPE)], [y, mean])) == ["Abs-ReduceMean", "Sub-Exp"]
    # A mean that drops its axis is added along another one.
    net = Net(17)
    mean = net.op("ReduceMean", net.op("Abs", "x"), axes=[-1], keepdims=0)
    model = net.model([value("x", [8, 8])], [net.op("Exp", net.op("Sub", "x", mean))])
    assert forms(model) == ["Abs-ReduceMean", "Sub-Exp"]
    fused(model, {"x": random(8, 8)})


def test_rows_that_need_each_other_are_not_both_one() -> None:
    """Each could be one site alone; both would be a cycle."""
    net = Net(17)
    a, b = net.op("Add", "x", net.const(0.3)), net.op("Add", "z", net.const(0.7))
    soft_a, soft_b = net.op("Softmax", a, axis=-1), net.op("Softmax", b, axis=-1)
    of_b, of_a = net.op("MaxPool", b, kernel_shape=[1, 1]), net.op("MaxPool", a, kernel_shape=[1, 1])
    outputs = [net.op("Mul", net.op("Tanh", soft_a), of_b), net.op("Mul", net.op("Tanh", soft_b), of_a)]
    model = net.model([value("x", SHAPE), value("z", SHAPE)], outputs)
    assert sorted(forms(model)) == ["Add-Softmax", "Add-Softmax-Tanh-Mul", "Tanh-Mul"]
    fused(model, {"x": X, "z": random(*SHAPE, seed=5)})


# --- quantization ------------------------------------------------------------------------------------------------------------


def quantized(net: Net, x: str, scale: Any = 0.05, zero: Any = 3, kind: Any = np.int8, dtype: Any = np.float32, **axis: int) -> str:
    scales, zeros = net.const(scale, dtype), net.const(zero, kind)
    return net.op("DequantizeLinear", net.op("QuantizeLinear", x, scales, zeros, **axis), scales, zeros, **axis)


ISLAND = "Mul-Sigmoid-QuantizeLinear-DequantizeLinear-Add-Relu"


@pytest.mark.parametrize(
    ("scale", "zero", "kind", "axis"),
    [
        (0.0037, 3, np.int8, {}),
        (0.5, 131, np.uint8, {}),
        (np.linspace(0.001, 0.01, 6), np.zeros(6), np.int8, {"axis": 1}),
        (np.linspace(0.001, 0.01, 8), np.full(8, 128), np.uint8, {"axis": -1}),
    ],
)
def test_quantization_between_element_wise_operators(scale: Any, zero: Any, kind: Any, axis: dict[str, int]) -> None:
    """One scale, one of few digits, and one a channel; to the last step of the 8 bits."""
    net = Net(17)
    gate = net.op("Sigmoid", net.op("Mul", "x", net.const(0.7)))
    y = net.op("Relu", net.op("Add", quantized(net, gate, scale, zero, kind, **axis), "u"))
    model = net.model([value("x", SHAPE), value("u", SHAPE)], [y])
    assert forms(model) == [ISLAND]
    assert kinds(fused(model, {"x": X, "u": random(*SHAPE, seed=2)})) == ["Elementwise"]


@pytest.mark.parametrize("opset", [10, 13, RUN_OPSET])
def test_quantization_in_every_opset(opset: int) -> None:
    net = Net(opset)
    y = net.op("Neg", quantized(net, net.op("Exp", "x")))
    assert kinds(fused(net.model([value("x", SHAPE)], [y]), {"x": X})) == ["Elementwise"]


def left_alone(build: Any, *others: Any) -> None:
    """No quantization is part of a site; the model is what it was."""
    net = Net(21)
    model = net.model([value("x", SHAPE), *others], build(net))
    assert all("Quantize" not in form for form in forms(model))
    rewritten, _, _ = fuse(model, ["elementwise"])
    assert ops(rewritten).count("QuantizeLinear") == ops(model).count("QuantizeLinear") > 0


def test_quantization_that_tensorrt_needs_is_left_alone() -> None:
    def gate(net: Net) -> str:
        return net.op("Sigmoid", net.op("Mul", "x", net.const(0.7)))

    def more(net: Net, x: str) -> str:
        return net.op("Exp", net.op("Neg", x))

    left_alone(lambda net: [conv(net, quantized(net, gate(net)))])  # before a convolution
    left_alone(lambda net: [more(net, quantized(net, conv(net)))])  # behind one
    left_alone(lambda net: [more(net, quantized(net, net.op("Relu", conv(net))))])  # behind one and its activation
    left_alone(lambda net: [net.op("Relu", net.op("Add", conv(net), quantized(net, gate(net))))])  # a residual, in its epilogue
    left_alone(lambda net: [more(net, quantized(net, "x"))])  # of an input

    def shared(net: Net) -> list[str]:
        """One reader is element-wise, and one a convolution."""
        scale, zero = net.const(0.05), net.const(3, np.int8)
        narrow = net.op("QuantizeLinear", gate(net), scale, zero)
        first, second = (net.op("DequantizeLinear", narrow, scale, zero) for _ in range(2))
        return [more(net, first), conv(net, second)]

    left_alone(shared)
    left_alone(lambda net: [net.op("QuantizeLinear", gate(net), net.const(0.05), net.const(3, np.int8))])  # its result is an output


def test_quantization_that_no_kernel_has_is_left_alone() -> None:
    def between(net: Net, scale: str, zero: str, **more: int) -> list[str]:
        narrow = net.op("QuantizeLinear", net.op("Exp", "x"), scale, zero, **more)
        return [net.op("Neg", net.op("DequantizeLinear", narrow, scale, zero, **more))]

    left_alone(lambda net: between(net, "s", net.const(3, np.int8)), value("s", []))  # a scale that is computed
    left_alone(lambda net: between(net, net.const(np.full(6, 0.1)), net.const(np.arange(6), np.int8), axis=1))  # a zero point a channel
    left_alone(lambda net: between(net, net.const(0.1), net.const(300, np.uint16)))  # 16 bits
    scales, zeros = np.full((2, 6, 2, 8), 0.1), np.zeros((2, 6, 2, 8))
    left_alone(lambda net: between(net, net.const(scales), net.const(zeros, np.int8), axis=2, block_size=2))


def test_quantization_in_half_precision() -> None:
    net = Net(20)
    y = net.op("Add", quantized(net, net.op("Sigmoid", net.op("Mul", "x", net.const(0.7))), 1 / 128), "x")
    model = net.model([value("x", SHAPE)], [y])
    written = converted(model)
    (node,) = (node for node in written.graph.node if node.domain)
    assert {given.dtype for given in ex.parse(node.attribute[0].s.decode()).inputs} == {"float16"}
    same(run(written, {"x": X}), run(model, {"x": X}), rtol=2e-3, atol=1.01 / 128)  # one step where a half is rounded the other way


def test_other_axes_are_no_end() -> None:
    net = Net(13)
    total = net.op("Add", net.op("Mul", "x", "x"), net.op("Abs", "x"))
    model = net.model([value("x", SHAPE)], [net.op("ReduceMean", total, axes=[1]), net.op("Softmax", total, axis=1)])
    (chain,) = chains(model)
    assert chain.expression.reduction is None
    assert kinds(fused(model, {"x": X})) == ["Elementwise", "ReduceMean", "Softmax"]


def test_what_others_read_are_outputs() -> None:
    net = Net()
    a = net.op("Mul", "x", "x")
    b = net.op("Relu", net.op("Sub", a, "x"))
    moved = net.op("Transpose", a, perm=[0, 2, 3, 1])
    model = net.model([value("x", SHAPE)], [net.op("Exp", b), moved, b])
    rewritten = fused(model, {"x": X})
    assert kinds(rewritten) == ["Elementwise", "Transpose"]
    assert len(next(node for node in rewritten.graph.node if node.domain).output) == 3


def test_a_way_out_and_back_is_no_site() -> None:
    """What leaves the site through a Transpose comes back: one node would need its own result."""
    net = Net()
    a = net.op("Exp", net.op("Neg", "x"))
    back = net.op("Transpose", net.op("Transpose", a, perm=[0, 1, 3, 2]), perm=[0, 1, 3, 2])
    b = net.op("Mul", net.op("Tanh", a), net.op("Add", back, "x"))
    model = net.model([value("x", SHAPE)], [net.op("Conv", b, net.const(random(3, 6, 1, 1)))])
    rewritten = fused(model, {"x": X})
    # Cleaning takes the pair of transposes out, which leaves one chain; a MaxPool stays.
    net = Net()
    a = net.op("Exp", net.op("Neg", "x"))
    back = net.op("MaxPool", a, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    model = net.model([value("x", SHAPE)], [net.op("Mul", net.op("Tanh", a), net.op("Add", back, "x"))])
    rewritten = fused(model, {"x": X})
    assert kinds(rewritten) == ["Elementwise", "MaxPool", "Elementwise"]


def test_a_way_through_a_body_is_no_site() -> None:
    """A subgraph captures what the site makes, and what it gives comes back."""
    net = Net()
    a = net.op("Exp", net.op("Neg", "x"), out="a")
    then = helper.make_graph([helper.make_node("Abs", ["a"], ["p"])], "then", [], [onnx.ValueInfoProto(name="p")])
    other = helper.make_graph([helper.make_node("Neg", ["a"], ["m"])], "else", [], [onnx.ValueInfoProto(name="m")])
    net.nodes.append(helper.make_node("If", ["flag"], ["r"], then_branch=then, else_branch=other))
    y = net.op("Add", net.op("Tanh", a), net.op("Mul", "r", "x"))
    model = net.model([value("x", SHAPE), value("flag", [], TensorProto.BOOL)], [value(y, SHAPE)])
    rewritten = fused(model, {"x": X, "flag": np.array(False)})
    assert [kind for kind in kinds(rewritten) if kind not in ("Abs", "Neg")] == ["Elementwise", "If", "Elementwise"]


def test_a_small_tensor_is_part_of_the_site_only_if_nobody_else_reads_it() -> None:
    for also in (False, True):
        net = Net()
        gate = net.op("Sigmoid", net.op("Mul", "s", net.const(0.3)))
        y = net.op("Relu", net.op("Mul", "x", gate))
        outputs = [y, gate] if also else [y]
        model = net.model([value("x", SHAPE), value("s", [2, 6, 1, 1])], outputs)
        rewritten = fused(model, {"x": X, "s": random(2, 6, 1, 1)})
        assert kinds(rewritten) == (["Elementwise", "Elementwise"] if also else ["Elementwise"])


# --- what is left to TensorRT ---------------------------------------------------------------------------------------------


def test_small_tensors_that_others_read_are_a_site_of_their_own() -> None:
    """A LayerNormalization of which somebody also wants the variance: at once, not only when the result is rewritten again."""
    net = Net()
    mean = net.op("ReduceMean", "x", axes=[-1], keepdims=1)
    centred = net.op("Sub", "x", mean)
    variance = net.op("Add", net.op("ReduceMean", net.op("Mul", centred, centred), axes=[-1], keepdims=1), net.const(1e-3))
    y = net.op("Div", centred, net.op("Sqrt", variance))
    model = net.model([value("x", SHAPE)], [net.op("Mul", y, net.const(random(8))), variance])
    assert sorted(forms(model)) == ["Add-Sqrt", "Div-Mul", "Sub-Mul-ReduceMean"]
    rewritten = fused(model, {"x": X})
    assert chains(rewritten) == []


def conv(net: Net, x: str = "x") -> str:
    return net.op("Conv", x, net.const(random(6, 6, 1, 1, seed=3) * 0.3))


def test_the_epilogue_of_a_convolution_stays_with_it() -> None:
    net = Net()
    y = net.op("Relu", net.op("Add", conv(net), net.const(random(6, 1, 1))))
    z = net.op("Relu", net.op("Add", conv(net, y), y))  # the residual and its activation
    assert forms(net.model([value("x", SHAPE)], [z])) == []
    more = net.op("Mul", net.op("Add", net.op("Exp", z), net.const(0.7)), z)
    assert forms(net.model([value("x", SHAPE)], [more])) == ["Exp-Add-Mul"]


def test_what_is_no_epilogue_is_a_site() -> None:
    net = Net()
    y = hard_swish(net, conv(net))  # the convolution's result is read twice
    model = net.model([value("x", SHAPE)], [net.op("Add", net.op("Mul", y, net.const(0.7)), net.const(0.1))])
    assert forms(model) == ["Add-Clip-Mul-Div-Mul-Add"]
    assert kinds(fused(model, {"x": X})) == ["Conv", "Elementwise"]


def test_attention_is_left_alone() -> None:
    net = Net()
    q = net.op("MatMul", "q", "k")
    scores = net.op("Add", net.op("Div", q, net.const(8.0)), "mask")
    soft = net.op("Softmax", scores, axis=-1)
    cleaned = net.op("Where", net.op("IsNaN", soft), net.const(0.0), soft)
    model = net.model(
        [value("q", [2, 4, 8]), value("k", [2, 8, 4]), value("v", [2, 4, 8]), value("mask", [2, 1, 4])], [net.op("MatMul", cleaned, "v")]
    )
    assert forms(model) == []


def test_shapes_and_vectors_are_left_alone() -> None:
    net = Net()
    size = net.op("Mul", net.op("Add", "n", net.const([1, 1], np.int64)), net.const([2, 2], np.int64))
    model = net.model([value("x", ["N", "M"]), value("n", [2], TensorProto.INT64)], [net.op("Reshape", "x", size)])
    assert forms(model) == []


def test_a_single_operator_is_no_site() -> None:
    net = Net()
    assert forms(net.model([value("x", SHAPE)], [net.op("Exp", "x")])) == []
    net = Net()
    assert forms(net.model([value("x", SHAPE)], [net.op("Cast", net.op("Exp", "x"), to=TensorProto.FLOAT16)])) == []


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda net: net.op("Cast", net.op("Neg", net.op("Cast", "x", to=TensorProto.DOUBLE)), to=TensorProto.FLOAT), "type float64"),
        (
            lambda net: net.op("Exp", net.op("Neg", net.op("Relu", conv(net)))),
            "is the epilogue of the matrix product or convolution before it",
        ),
        (lambda net: net.op("Softmax", net.op("Exp", "x"), axis=1), "is not over the last axis alone"),
    ],
)
def test_why_not_says_why(build: Any, reason: str) -> None:
    net = Net()
    loaded = load(net.model([value("x", SHAPE)], [build(net)]))
    pipeline.tidy(loaded)
    _, misses = find(elementwise.FUSION, loaded, Index.of(loaded), far=True)
    assert any(reason in miss.reason for miss in misses), misses


# --- forms, constants, types ------------------------------------------------------------------------------------------------


def test_layers_that_differ_in_trained_numbers_share_an_operator() -> None:
    net = Net()
    y = "x"
    for number in (0.123, 0.456, -0.789):
        y = net.op("MaxPool", net.op("Add", net.op("Mul", y, net.const(number)), net.const(3.0)), kernel_shape=[1, 1])
    model = net.model([value("x", SHAPE)], [y])
    rewritten = fused(model, {"x": X})
    assert len({node.op_type for node in rewritten.graph.node if node.domain}) == 1
    assert len(rewritten.functions) == 1


def test_all_is_said_by_the_attribute() -> None:
    net = Net()
    model = net.model([value("x", SHAPE)], [net.op("Pow", net.op("Add", "x", net.const(0.25)), net.const(2.0))])
    rewritten, _, _ = fuse(model, ["elementwise"])
    (node,) = rewritten.graph.node
    (attribute,) = node.attribute
    assert attribute.name == "expression"
    said = json.loads(attribute.s)
    assert said["version"] == 1
    assert [entry[0] for entry in said["steps"]] == ["Constant", "Add", "Constant", "Pow"]
    assert node.op_type == f"Elementwise_{ex.parse(attribute.s.decode()).digest}"


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -0.0])
def test_special_values(special: float) -> None:
    x = X.copy()
    x[0, 0] = special
    net = Net()
    y = net.op("Max", net.op("Relu", "x"), net.op("Min", "x", net.const(0.5)), net.op("Clip", "x", net.const(-1.0)))
    model = net.model([value("x", SHAPE)], [net.op("Where", net.op("IsNaN", "x"), y, net.op("Add", y, "x"))])
    assert kinds(fused(model, {"x": x})) == ["Elementwise"]


def test_integers_and_conditions() -> None:
    model = text(
        """g (int64[2,3,4] i, int32[2,3,4] j, bool[2,3,4] b, float[2,3,4] x) => (float[2,3,4] y, bool[2,3,4] z) {
        two = Constant <value = int64 {2}> ()
        k = Cast <to = 7> (j)
        s = Add (i, k)
        m = Mod (s, two)
        zero = Constant <value = int64 {0}> ()
        even = Equal (m, zero)
        z = And (even, b)
        y = Where (z, x, f)
        f = Cast <to = 1> (s)
    }""".replace(
            "        y = Where (z, x, f)\n        f = Cast <to = 1> (s)\n", "        f = Cast <to = 1> (s)\n        y = Where (z, x, f)\n"
        )
    )
    feeds = {
        "i": np.arange(24).reshape(2, 3, 4), "j": np.arange(24, dtype=np.int32).reshape(2, 3, 4)[::-1].copy(),
        "b": np.arange(24).reshape(2, 3, 4) % 3 > 0, "x": random(2, 3, 4),
    }  # fmt: skip
    assert kinds(fused(model, feeds)) == ["Elementwise"]


@pytest.mark.parametrize("elem", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_types(elem: int) -> None:
    dtype = np.float16 if elem == TensorProto.FLOAT16 else ml_dtypes.bfloat16
    net = Net(20)
    y = net.op("Mul", net.op("Sigmoid", net.op("Add", "x", net.const(0.37, dtype))), "x")
    model = net.model([value("x", SHAPE, elem)], [net.op("Div", y, net.const(3.0, dtype))])
    (chain,) = chains(model)
    assert {given.dtype for given in chain.expression.inputs} == {str(np.dtype(dtype))}
    if elem == TensorProto.FLOAT16:
        fused(model, {"x": X.astype(np.float16)}, rtol=5e-3, atol=5e-3)
    else:
        proved(model, fuse(model, ["elementwise"])[0])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_precision_after_fusing(precision: Any) -> None:
    """The expression is retyped with the tensors; angles stay in float32."""
    net = Net(20)
    y = net.op("Clip", net.op("Add", net.op("Mul", "x", net.const(0.3)), net.const(3.0)), net.const(0.0), net.const(1e9))
    z = net.op("Add", net.op("Sin", net.op("Mul", net.op("MaxPool", y, kernel_shape=[1, 1]), net.const(0.7))), net.const(1.5))
    loaded = load(net.model([value("x", SHAPE)], [z]))
    pipeline.tidy(loaded)
    matches, _ = find(elementwise.FUSION, loaded, Index.of(loaded))
    from onnxfuse.fusions.base import apply
    from onnxfuse.graph import write

    assert len(matches) == 2
    apply(elementwise.FUSION, matches, loaded)
    convert(loaded, precision)
    written = write.to_proto(loaded)
    onnx.checker.check_model(written, full_check=True)
    half = "float16" if precision == "fp16" else "bfloat16"
    first, second = (ex.parse(node.attribute[0].s.decode()) for node in written.graph.node if node.domain)
    assert {given.dtype for given in first.inputs} == {half}
    assert {given.dtype for given in second.inputs} == {"float32"}
    assert {function.name for function in written.functions} == {node.op_type for node in written.graph.node if node.domain}
    if precision == "fp16":
        same(run(written, {"x": X}), run(net.model([value("x", SHAPE)], [z]), {"x": X}), rtol=1e-2, atol=1e-2)


def converted(model: onnx.ModelProto) -> onnx.ModelProto:
    """All chains fused, then half precision."""
    from onnxfuse.fusions.base import apply
    from onnxfuse.graph import write

    loaded = load(model)
    pipeline.tidy(loaded)
    matches, _ = find(elementwise.FUSION, loaded, Index.of(loaded))
    assert matches
    apply(elementwise.FUSION, matches, loaded)
    convert(loaded, "fp16")
    written = write.to_proto(loaded)
    onnx.checker.check_model(written, full_check=True)
    return written


def test_sums_of_integer_products_stay_in_float32() -> None:
    """They pass the half range before they are scaled, as do those of the operators one by one."""
    net = Net(20)
    product = net.op("MatMulInteger", "x", net.const(np.full((64, 8), 100), np.int8))
    scaled = net.op("Mul", net.op("Cast", product, to=TensorProto.FLOAT), net.op("Mul", "scale", net.const(0.37)))
    model = net.model([value("x", [4, 64], TensorProto.INT8), value("scale", [1, 1])], [net.op("Relu", scaled)])
    feeds = {"x": np.full((4, 64), 100, np.int8), "scale": np.full((1, 1), 1e-3, np.float32)}
    written = converted(model)
    same(run(written, feeds), run(model, feeds), rtol=2e-3, atol=0.0)


def test_indices_through_a_logarithm_keep_their_digits() -> None:
    """Buckets of distances, as T5 has them: a trained constant in half precision would move their ends."""
    net = Net(20)
    distance = net.op("Cast", net.op("Sub", "a", "b"), to=TensorProto.FLOAT)
    bucket = net.op("Div", net.op("Log", net.op("Max", distance, net.const(1.0))), net.const(0.00173287))
    model = net.model(
        [value("a", [40, 1], TensorProto.INT64), value("b", [1, 40], TensorProto.INT64)], [net.op("Cast", bucket, to=TensorProto.INT64)]
    )
    feeds = {"a": np.arange(40).reshape(40, 1) * 50, "b": np.arange(40).reshape(1, 40)}
    same(run(converted(model), feeds), run(model, feeds), rtol=0.0, atol=0.0)


def test_no_other_fusion_loses_a_site() -> None:
    """A residual and its norm, a bias and its GELU, the cell of an LSTM beside chains of all kinds."""
    net = Net(20)
    x = net.op("Clip", net.op("Add", net.op("Mul", "x", net.const(1.3)), net.const(0.3)), net.const(-3.0), net.const(3.0))
    summed = net.op("Add", net.op("Mul", net.op("MatMul", x, net.const(random(8, 8))), net.const(0.7)), x)
    normed = net.op("LayerNormalization", summed, net.const(np.ones(8)), net.const(np.zeros(8)))
    biased = net.op("Add", net.op("MatMul", normed, net.const(random(8, 16))), net.const(random(16)))
    wide = net.op("Mul", net.op("Gelu", biased), net.op("MatMul", normed, net.const(random(8, 16, seed=3))))
    length = net.op("Transpose", wide, perm=[1, 0, 2])
    states = net.op("LSTM", length, net.const(random(1, 64, 16)), net.const(random(1, 64, 16)), net.const(random(1, 128)), hidden_size=16)
    model = net.model([value("x", [2, 4, 8])], [net.op("Mul", net.op("Tanh", net.op("Add", states, net.const(0.1))), states)])
    rewritten, sites, _ = fuse(model, [fusion.name for fusion in REGISTRY])
    same(run(rewritten, {"x": random(2, 4, 8)}), run(model, {"x": random(2, 4, 8)}), rtol=1e-4, atol=1e-5)
    others = [name for name, _ in sites if name != "elementwise"]
    assert len(others) < len(sites)
    assert {"lstm", "bias_gelu", "skip_layernorm"} <= set(others)
    assert others == [name for name, _ in fuse(model)[1]]


def test_it_is_the_last_of_the_registry_and_takes_what_others_left() -> None:
    built_in = [fusion.name for fusion in REGISTRY]
    assert built_in[-1] == "elementwise" or built_in.index("elementwise") == len([f for f in REGISTRY if f.name != "elementwise"])
    net = Net()
    total = net.op("Add", net.op("MatMul", "a", net.const(random(8, 8))), net.op("Mul", "x", net.const(1.3)))
    normed = net.op("LayerNormalization", net.op("Add", total, "x"), net.const(np.ones(8)), net.const(np.zeros(8)))
    model = net.model([value("x", [2, 4, 8]), value("a", [2, 4, 8])], [normed])
    rewritten, sites, _ = check(model, {"x": random(2, 4, 8), "a": random(2, 4, 8, seed=1)})
    assert "skip_layernorm" in [name for name, _ in sites]
    assert "onnxfuse::SkipLayerNormalization" in ops(rewritten)


def test_newest_opset() -> None:
    net = Net(NEWEST)
    model = net.model([value("x", SHAPE)], [net.op("Mul", net.op("Swish", "x"), net.op("Gelu", "x", approximate="tanh"))])
    assert forms(model) == ["Silu-GeluTanh-Mul"]
