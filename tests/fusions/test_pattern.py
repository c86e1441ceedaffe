"""The matcher by itself: commuted operands, alternatives, the same tensor twice, constants, and the nearest miss."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from onnxfuse.fusions.pattern import (
    Matcher,
    Pattern,
    canonical,
    const,
    either,
    is_close,
    leaf_names,
    least_nodes,
    maybe,
    op,
    root_types,
    tensor,
    through,
)
from tests.fusions.helpers import Net, load, value


def graph(build: Any, **inputs: Any) -> dict[str, gs.Tensor]:
    """Tensors by name of a net that `build` fills; its last node computes 'y'."""
    net = Net(17)
    build(net)
    net.op("Identity", net.nodes[-1].output[0], out="end")
    model = load(net.model([value(name, [2, 8]) for name in inputs or {"x": 0, "z": 0}], ["end"]))
    return {t.name: t for node in model.graph.nodes for t in (*node.inputs, *node.outputs)}


def found(pattern: Pattern, root: gs.Tensor) -> list[dict[str, str]]:
    return [{name: t.name for name, t in match.tensors.items()} for match in Matcher(pattern).match(root)]


A, B = tensor("a"), tensor("b")


def test_both_orders_of_a_commutative_operator() -> None:
    t = graph(lambda net: net.op("Add", net.op("Neg", "x"), "z", out="y"))
    assert found(op("Add", A, B), t["y"]) == [{"a": "t0", "b": "z"}, {"a": "z", "b": "t0"}]
    assert found(op("Add", A, op("Neg", B)), t["y"]) == [{"a": "z", "b": "x"}]


def test_one_order_of_the_others() -> None:
    t = graph(lambda net: net.op("Sub", net.op("Neg", "x"), "z", out="y"))
    assert found(op("Sub", A, op("Neg", B)), t["y"]) == []
    assert found(op("Sub", op("Neg", A), B), t["y"]) == [{"a": "x", "b": "z"}]


def test_one_name_is_one_tensor() -> None:
    t = graph(lambda net: net.op("Mul", net.op("Neg", "x"), net.op("Neg", "z"), out="y"))
    assert found(op("Mul", op("Neg", A), op("Neg", A)), t["y"]) == []
    assert len(found(op("Mul", op("Neg", A), op("Neg", B)), t["y"])) == 2


def test_one_pattern_object_is_one_tensor() -> None:
    shared = op("Neg", A)
    twice = graph(lambda net: net.op("Mul", net.op("Neg", "x"), net.op("Neg", "x"), out="y"))
    assert found(op("Mul", shared, shared), twice["y"]) == []
    assert len(found(op("Mul", op("Neg", A), op("Neg", A)), twice["y"])) == 2
    once = graph(lambda net: net.op("Mul", n := net.op("Neg", "x"), n, out="y"))
    assert found(op("Mul", shared, shared), once["y"]) == [{"a": "x"}]


def test_alternatives_are_tried_until_the_whole_matches() -> None:
    t = graph(lambda net: net.op("Mul", net.op("Cast", net.op("Neg", "x"), to=1), "z", out="y"))
    assert found(op("Mul", maybe("Cast", op("Neg", A)), B), t["y"]) == [{"a": "x", "b": "z"}]
    assert found(op("Mul", either(op("Neg", A), op("Abs", A)), B), t["y"]) == []


def test_through_looks_past_operators_and_leaves_them_out_of_the_match() -> None:
    t = graph(lambda net: net.op("Neg", net.op("Transpose", net.op("Abs", "x"), perm=[0, 1]), out="y"))
    (match,) = Matcher(op("Neg", through(("Transpose",), op("Abs", A)))).match(t["y"])
    assert [node.op for node in match.nodes] == ["Neg", "Abs"]
    assert [node.op for node in match.context] == ["Transpose"]


def test_number_of_inputs() -> None:
    t = graph(lambda net: net.op("Clip", "x", net.const(0), net.const(1), out="y"))
    assert found(op("Clip", A), t["y"]) == []
    assert found(op("Clip", A, rest=True), t["y"]) == [{"a": "x"}]
    assert found(op("Clip", A, B, tensor("c"), tensor("d")), t["y"]) == []


def test_absent_inputs() -> None:
    t = graph(lambda net: net.op("Clip", "x", "", net.const(1), out="y"))
    assert found(op("Clip", A, B, tensor("c")), t["y"]) == []
    t = graph(lambda net: net.op("Clip", "x", net.const(0), "", out="y"))
    assert len(found(op("Clip", A, B), t["y"])) == 1


def test_the_second_output_is_not_the_first() -> None:
    def build(net: Net) -> None:
        net.op("Split", "x", net.const([1, 1], np.int64), out=["left", "right"], axis=0)
        net.op("Add", "left", "right", out="y")

    t = graph(build)
    pattern = op("Split", A, rest=True)
    assert len(found(pattern, t["left"])) == 1
    assert found(pattern, t["right"]) == []


def test_another_domain_is_another_operator() -> None:
    t = graph(lambda net: net.op("Neg", "x", out="y"))
    t["y"].inputs[0].domain = "custom"
    assert found(op("Neg", A), t["y"]) == []
    t["y"].inputs[0].domain = "onnxfuse"
    assert found(op("Neg", A), t["y"]) == []
    assert len(found(canonical("Neg", A), t["y"])) == 1


@pytest.mark.parametrize("constant_nodes", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_constants_of_one_element(shape: tuple[int, ...], constant_nodes: bool) -> None:
    net = Net(17, constant_nodes=constant_nodes)
    net.op("Add", "x", net.const(np.full(shape, 2)), out="y")
    model = load(net.model([value("x", [2, 8])], ["y"]))
    root = model.graph.outputs[0]
    assert len(found(op("Add", A, const("two", 2.0)), root)) == 1
    assert found(op("Add", A, const("three", 3.0)), root) == []
    assert len(found(op("Add", A, const("any")), root)) == 1


def test_two_constants_of_one_value_are_one() -> None:
    t = graph(lambda net: net.op("Add", net.op("Mul", "x", net.const(2)), net.const([2]), out="y"))
    two = const("two", 2.0)
    assert len(found(op("Add", op("Mul", A, two), two), t["y"])) == 1


ROUNDING = [
    (np.float16(0.044715), 0.044715, True),
    (np.float16(0.0448), 0.044715, False),
    (np.float16(1.702), 1.702, True),
    (np.nextafter(np.float16(1), np.float16(2)), 1.0, False),
    (np.float32(1.4142135), 2**0.5, True),
    (np.float32(1.41421), 2**0.5, False),
    (np.float32(0.044715), 0.044715, True),
    (np.float64(1.4142135), 2**0.5, True),
    (np.int64(2), 2.0, True),
    (np.int64(3), 2.0, False),
    (np.int32(1), 1.4, False),
]


@pytest.mark.parametrize(("stored", "wanted", "same"), ROUNDING)
def test_constants_are_compared_in_the_precision_they_are_stored_in(stored: Any, wanted: float, same: bool) -> None:
    assert is_close(float(stored), wanted, gs.Constant("c", np.asarray(stored))) is same


def test_bfloat16_constants() -> None:
    import ml_dtypes

    for stored, wanted, same in ((1.702, 1.702, True), (0.044715, 0.044715, True), (1.75, 1.702, False), (1.0078125, 1.0, False)):
        held = np.asarray(stored, ml_dtypes.bfloat16)
        assert is_close(float(held), wanted, gs.Variable("c", held.dtype)) is same


def test_the_nearest_miss_names_the_node_and_the_reason() -> None:
    t = graph(lambda net: net.op("Mul", "x", net.op("Add", net.op("Abs", "x"), net.const(1)), out="y"))
    matcher = Matcher(op("Mul", A, op("Add", op("Erf", A), const("one", 1.0))))
    assert list(matcher.match(t["y"])) == []
    miss = matcher.miss
    assert miss is not None
    assert [node.op for node in miss.nodes] == ["Mul", "Add"]
    assert miss.at is not None
    assert miss.at.op == "Abs"
    assert miss.reason.endswith("comes from Abs, not from Erf")


def test_a_wrong_constant_is_a_better_miss_than_a_wrong_tensor() -> None:
    t = graph(lambda net: net.op("Mul", "x", net.op("Add", net.op("Erf", "x"), net.const(1.5)), out="y"))
    matcher = Matcher(either(op("Mul", op("Neg", A), B), op("Mul", A, op("Add", op("Erf", A), const("one", 1.0)))))
    assert list(matcher.match(t["y"])) == []
    assert matcher.miss is not None
    assert (matcher.miss.reason, matcher.miss.value) == ("constant 'one' is not 1", 1.5)


def test_roots_and_sizes() -> None:
    pattern = either(op(("Add", "Sub"), op("Neg", A), B), op("Neg", A))
    assert root_types(pattern) == {"Add", "Sub", "Neg"}
    assert least_nodes(pattern) == 1
    assert least_nodes(op("Add", op("Neg", A), maybe("Cast", op("Abs", B)))) == 3
    assert leaf_names(op("Add", maybe("Cast", A), op("Mul", B, const("two", 2.0), out="inner"))) == {"a", "b", "two"}
    with pytest.raises(TypeError, match="must start with an operator"):
        root_types(A)
