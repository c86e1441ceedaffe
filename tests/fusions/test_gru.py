"""gru: as lstm, whose tests cover what they share; here what is GRU's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.fusions.helpers import OPSETS, check, fuse, names, ops, run
from tests.fusions.recurrences import Stack, attributes

STACK = Stack("GRU")


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("before_reset", [0, 1])
def test_every_opset_and_form(before_reset: int, opset: int) -> None:
    for layers, direction in ((1, "forward"), (1, "bidirectional"), (2, "reverse"), (4, "bidirectional")):
        stack = replace(STACK, opset=opset, layers=layers, direction=direction, attrs={"linear_before_reset": before_reset})
        fused, sites, _ = check(*stack.model())
        op = f"GRUSequence{layers if layers > 1 else ''}"
        assert ops(fused) == [f"onnxfuse::{op}"]
        assert names(sites) == ["gru"]
        assert attributes(fused, op)["linear_before_reset"] == before_reset


def test_the_two_forms_differ() -> None:
    results = []
    for before_reset in (0, 1):
        model, feeds = replace(STACK, attrs={"linear_before_reset": before_reset}).model()
        results.append(run(fuse(model)[0], feeds)[0])
    assert np.abs(results[0] - results[1]).max() > 1e-3


@pytest.mark.parametrize("states", [None, "zero", "given"])
@pytest.mark.parametrize("lengths", [False, True])
def test_optional_inputs(lengths: bool, states: str | None) -> None:
    for layers, bias in ((1, True), (2, False)):
        fused, _, _ = check(*replace(STACK, bias=bias, lengths=lengths, states=states, layers=layers).model())
        assert ops(fused) == [f"onnxfuse::GRUSequence{layers if layers > 1 else ''}"]


def test_half_precision() -> None:
    fused, _, _ = check(*replace(STACK, dtype=np.float16, direction="bidirectional").model(), rtol=1e-2, atol=1e-2)
    assert ops(fused) == ["onnxfuse::GRUSequence"]


def test_other_activations_are_left_alone() -> None:
    model, _ = replace(STACK, attrs={"activations": ["HardSigmoid", "Tanh"]}).model()
    _, sites, misses = fuse(model)
    assert sites == []
    assert "has other activations (HardSigmoid, Tanh)" in [miss.reason for miss in misses]


def test_layers_of_two_forms_are_two_nodes() -> None:
    model, feeds = replace(STACK, layers=2).model()
    _, second = (node for node in model.graph.node if node.op_type == "GRU")
    second.attribute.extend(onnx_attribute(linear_before_reset=1))
    fused, _, _ = check(model, feeds)
    assert ops(fused) == ["onnxfuse::GRUSequence", "onnxfuse::GRUSequence"]


def onnx_attribute(**attrs: int) -> list[object]:
    from onnx import helper

    return [helper.make_attribute(name, given) for name, given in attrs.items()]
