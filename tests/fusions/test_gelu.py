"""gelu: the three kinds in every spelling become one node each, and are never taken for each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.fusions.helpers import NEWEST, OPSETS, Net, check, fuse, gelu, ops, proved, random, run, same, undo, value
from tests.fusions.strategies import Planter, every, first

VARIANTS = ("erf", "tanh", "quick")
X = 2 * random(2, 3, 8)


def node(variant: str, opset: int) -> str:
    if variant == "quick":
        return "onnxfuse::QuickGelu"
    return "Gelu" if opset >= 20 else {"erf": "onnxfuse::Gelu", "tanh": "onnxfuse::GeluTanh"}[variant]


def model(variant: str, opset: int, pick: Any = first, elem: int = TensorProto.FLOAT, ir: Any = None, **kwargs: Any) -> Any:
    net = Net(opset, constant_nodes=kwargs.pop("constant_nodes", False))
    shape = kwargs.pop("shape", ["N", 3, None])
    last = getattr(Planter(net, pick, **kwargs), f"gelu_{variant}")("x")
    return net.model([value("x", shape, elem)], [last], ir)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(variant: str, opset: int) -> None:
    fused, sites, _ = check(model(variant, opset), {"x": X}, rtol=1e-4, atol=1e-6)
    assert ops(fused) == [node(variant, opset)]
    assert sites == [("gelu", variant)]
    np.testing.assert_allclose(run(fused, {"x": X})[0], gelu(X, variant), rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("opset", [9, 20])
@pytest.mark.parametrize("ir", [3, 4, 7, 8, onnx.IR_VERSION])
def test_every_ir_version(variant: str, opset: int, ir: int) -> None:
    assert len(check(model(variant, opset, ir=ir), {"x": X})[1]) == 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("opset", [11, 20])
def test_every_spelling(variant: str, opset: int) -> None:
    for original in every(lambda pick: model(variant, opset, pick)):
        fused, sites, _ = fuse(original)
        assert sites == [("gelu", variant)], ops(original)
        assert ops(fused) == [node(variant, opset)]
        same(run(fused, {"x": X}), run(original, {"x": X}), atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_commuted_operands(variant: str) -> None:
    """Every order of operands in the first spelling, and the last order in every spelling."""

    def first_spelling(pick: Any) -> Any:
        return model(variant, 17, lambda *options: pick(*options) if isinstance(options[0], tuple) else options[0], commute=True)

    def last_order(pick: Any) -> Any:
        return model(variant, 17, lambda *options: options[-1] if isinstance(options[0], tuple) else pick(*options), commute=True)

    for build in (first_spelling, last_order):
        for original in every(build):
            fused, sites, _ = fuse(original)
            assert sites == [("gelu", variant)]
            same(run(fused, {"x": X}), run(original, {"x": X}), atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_constant_nodes(variant: str) -> None:
    assert ops(check(model(variant, 17, constant_nodes=True), {"x": X})[0]) == [node(variant, 17)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("opset", [13, 20])
def test_half_precision_with_rounded_constants(variant: str, opset: int) -> None:
    x = X.astype(np.float16)
    for original in every(lambda pick: model(variant, opset, pick, TensorProto.FLOAT16, dtype=np.float16)):
        fused, sites, _ = fuse(original)
        assert sites == [("gelu", variant)], ops(original)
        np.testing.assert_allclose(run(fused, {"x": x})[0].astype(np.float64), gelu(x, variant), rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("opset", [13, NEWEST])
def test_bfloat16(variant: str, opset: int) -> None:
    import ml_dtypes

    original = model(variant, opset, elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, sites, _ = fuse(original)
    assert sites == [("gelu", variant)]
    proved(original, fused)


def test_seven_digits_of_a_constant() -> None:
    net = Net(13)
    gate = net.op("Erf", net.op("Div", "x", net.const(1.4142135)))
    net.op("Mul", net.op("Mul", "x", net.op("Add", gate, net.const([1.0]))), net.const([0.5]), out="y")
    assert ops(check(net.model([value("x", ["N", 8])], ["y"]), {"x": X[0]})[0]) == ["onnxfuse::Gelu"]


def wrong_erf(**constants: float) -> onnx.ModelProto:
    net = Net(13)
    gate = net.op("Erf", net.op("Div", "x", net.const(constants.get("root", math.sqrt(2)))))
    plus = net.op("Add", gate, net.const(constants.get("one", 1)))
    net.op("Mul", net.op("Mul", "x", plus), net.const(constants.get("half", 0.5)), out="y")
    return net.model([value("x", ["N", 3, 8])], ["y"])


def wrong_tanh(**constants: float) -> onnx.ModelProto:
    net = Net(13)
    third = net.op("Mul", net.op("Pow", "x", net.const(constants.get("three", 3))), net.const(constants.get("cubic", 0.044715)))
    gate = net.op("Tanh", net.op("Mul", net.op("Add", "x", third), net.const(constants.get("scale", math.sqrt(2 / math.pi)))))
    plus = net.op("Add", gate, net.const(constants.get("one", 1)))
    net.op("Mul", net.op("Mul", "x", plus), net.const(constants.get("half", 0.5)), out="y")
    return net.model([value("x", ["N", 3, 8])], ["y"])


WRONG = [
    (wrong_erf, {"root": 1.5}, "constant 'sqrt2' is not 1.41421356 (1.5)"),
    (wrong_erf, {"root": 1.41422}, "constant 'sqrt2' is not 1.41421356"),
    (wrong_erf, {"one": 1.001}, "constant 'one' is not 1"),
    (wrong_erf, {"one": -1}, "constant 'one' is not 1 (-1.0)"),
    (wrong_erf, {"half": 0.25}, "constant 'half' is not 0.5 (0.25)"),
    (wrong_tanh, {"three": 2}, "constant 'three' is not 3 (2.0)"),
    (wrong_tanh, {"cubic": 0.044}, "constant 'cubic' is not 0.044715"),
    (wrong_tanh, {"scale": 0.8}, "constant 'scale' is not 0.797884561"),
    (wrong_tanh, {"one": 0.5}, "constant 'one' is not 1 (0.5)"),
]


@pytest.mark.parametrize(("build", "constants", "reason"), WRONG, ids=[reason for *_, reason in WRONG])
def test_another_constant(build: Any, constants: dict[str, float], reason: str) -> None:
    _, sites, misses = check(build(**constants), {"x": X})
    assert sites == []
    assert any(reason in miss.reason for miss in misses), [miss.reason for miss in misses]


def test_half_precision_constants_that_are_exact_allow_no_rounding() -> None:
    x = X.astype(np.float16)
    net = Net(13)
    gate = net.op("Erf", net.op("Div", "x", net.const(math.sqrt(2), np.float16)))
    plus = net.op("Add", gate, net.const(np.nextafter(np.float16(1), np.float16(2)), np.float16))
    net.op("Mul", net.op("Mul", "x", plus), net.const(0.5, np.float16), out="y")
    _, sites, _ = check(net.model([value("x", [2, 3, 8], TensorProto.FLOAT16)], ["y"]), {"x": x})
    assert sites == []


@pytest.mark.parametrize("place", ["argument", "gate", "factor"])
def test_another_tensor_in_one_place(place: str) -> None:
    net = Net(13)
    other = net.op("Neg", "x")
    gate = net.op("Erf", net.op("Div", other if place == "argument" else "x", net.const(math.sqrt(2))))
    if place == "gate":
        gate = net.op("Neg", gate)
    plus = net.op("Add", gate, net.const(1))
    net.op("Mul", net.op("Mul", other if place == "factor" else "x", plus), net.const(0.5), out="y")
    _, sites, _ = check(net.model([value("x", ["N", 3, 8])], ["y"]), {"x": X})
    assert sites == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("output", [False, True])
def test_inner_tensors_that_others_read_are_kept(variant: str, output: bool) -> None:
    original = model(variant, 17)
    inner = [name for n in original.graph.node[:-1] for name in n.output]
    for name in inner:
        changed = onnx.ModelProto.FromString(original.SerializeToString())
        if not output:
            changed.graph.node.append(helper.make_node("Neg", [name], ["other"]))
        changed.graph.output.append(value(name if output else "other", ["N", 3, None]))
        _, sites, misses = check(changed, {"x": X})
        assert sites == []
        assert any(f"'{name}' is also read by" in miss.reason for miss in misses), [miss.reason for miss in misses]


def test_double_precision() -> None:
    _, sites, misses = fuse(model("erf", 13, elem=TensorProto.DOUBLE, dtype=np.float64))
    assert sites == []
    assert any(miss.reason == "'x' is of type (double)" for miss in misses)


@pytest.mark.parametrize(("shape", "constant"), [((8,), (1, 1)), ((), (1,)), ((3, 8), (1, 1, 1))])
def test_a_constant_that_makes_the_result_grow(shape: tuple[int, ...], constant: tuple[int, ...]) -> None:
    net = Net(13)
    gate = net.op("Erf", net.op("Div", "x", net.const(np.full(constant, math.sqrt(2)))))
    net.op("Mul", net.op("Mul", "x", net.op("Add", gate, net.const(1))), net.const(0.5), out="y")
    _, sites, misses = check(net.model([value("x", shape)], ["y"]), {"x": random(*shape)})
    assert sites == []
    assert any("has more axes than 'x', and so has the result" in miss.reason for miss in misses), misses


@pytest.mark.parametrize("opset", [11, 20])
def test_erf_and_tanh_side_by_side(opset: int) -> None:
    net = Net(opset)
    planter = Planter(net, first)
    erf, tanh, quick = planter.gelu_erf("x"), planter.gelu_tanh("x"), planter.gelu_quick("x")
    original = net.model([value("x", [2, 3, 8])], [erf, tanh, quick])
    fused, sites, _ = check(original, {"x": X})
    assert sorted(sites) == [("gelu", "erf"), ("gelu", "quick"), ("gelu", "tanh")]
    for got, variant in zip(run(fused, {"x": X}), VARIANTS, strict=True):
        np.testing.assert_allclose(got, gelu(X, variant), rtol=1e-3, atol=2e-6)
    plain = undo(fused)
    assert not plain.functions
    same(run(plain, {"x": X}), run(original, {"x": X}), atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("opset", [11, 20])
def test_inside_an_if_with_constants_of_the_outer_graph(variant: str, opset: int) -> None:
    outer = model(variant, opset)
    body = helper.make_graph(outer.graph.node, "then", [], [onnx.ValueInfoProto(name=outer.graph.output[0].name)])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["minus"])], "else", [], [onnx.ValueInfoProto(name="minus")])
    net = Net(opset, constants=list(outer.graph.initializer))
    net.op("If", "flag", out="y", then_branch=body, else_branch=other)
    original = net.model([value("x", [2, 3, 8]), value("flag", [], TensorProto.BOOL)], [value("y", [2, 3, 8])])
    for flag in (True, False):
        fused, sites, _ = check(original, {"x": X, "flag": np.array(flag)})
        assert sites == [("gelu", variant)]
        assert sorted(ops(fused)) == sorted(["If", node(variant, opset), "Neg"])


def test_a_gate_in_the_outer_graph_and_a_product_in_the_body() -> None:
    net = Net(13)
    gate = net.op("Add", net.op("Erf", net.op("Div", "x", net.const(math.sqrt(2)))), net.const(1))
    half = net.const(0.5)
    inner = Net(13, prefix="i")
    inner.op("Mul", inner.op("Mul", "x", gate), half, out="z")
    body = helper.make_graph(inner.nodes, "then", [], [onnx.ValueInfoProto(name="z")])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["minus"])], "else", [], [onnx.ValueInfoProto(name="minus")])
    net.op("If", "flag", out="y", then_branch=body, else_branch=other)
    original = net.model([value("x", [2, 3, 8]), value("flag", [], TensorProto.BOOL)], [value("y", [2, 3, 8])])
    _, sites, misses = check(original, {"x": X, "flag": np.array(True)})
    assert sites == []
    assert any("lies partly outside the body it would be fused in" in miss.reason for miss in misses)
