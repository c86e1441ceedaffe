"""The whole way of a model, on models small enough to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import pipeline
from onnxfuse.bench.stats import Interval
from onnxfuse.errors import BadInput
from onnxfuse.fusions import REGISTRY
from onnxfuse.plan import store
from onnxfuse.plan.verdicts import Verdict

RNG = np.random.default_rng(7)


def constant(name: str, *shape: int, low: float = -1.0) -> onnx.TensorProto:
    return numpy_helper.from_array(RNG.uniform(low, 1.0, shape).astype(np.float32), name)


def save(path: Path, nodes: list[onnx.NodeProto], inputs: dict[str, list], outputs: dict[str, list], weights: list) -> Path:
    values = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side.items()] for side in (inputs, outputs)]
    model = helper.make_model(helper.make_graph(nodes, "g", *values, weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.fixture
def block(tmp_path: Path) -> Path:
    """x W + bias, residual, LayerNormalization."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], name="dense"),
        helper.make_node("Add", ["product", "bias"], ["biased"], name="add_bias"),
        helper.make_node("Add", ["biased", "x"], ["sum"], name="residual"),
        helper.make_node("LayerNormalization", ["sum", "gamma", "beta"], ["y"], name="norm", axis=-1),
    ]
    weights = [constant("w", 8, 8), constant("bias", 8), constant("gamma", 8), constant("beta", 8)]
    return save(tmp_path / "block.onnx", nodes, {"x": ["B", 3, 8]}, {"y": ["B", 3, 8]}, weights)


def ops(path: Path) -> list[str]:
    return [f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in onnx.load(path).graph.node]


def test_all_fuses_and_the_outputs_agree(block: Path, tmp_path: Path) -> None:
    out = tmp_path / "fused.onnx"
    result = pipeline.optimize(block, out, policy="all")
    assert result.agrees
    assert ops(out) == ["MatMul", "onnxfuse::SkipLayerNormalization"]
    assert [(d.site.fusion, d.fused, d.node) for d in result.decisions] == [("skip_layernorm", True, "skip_layernorm")]
    assert set(result.decisions[0].site.nodes) == {"add_bias", "residual", "norm"}


def test_what_was_proven_beside_another_fusion_is_fused_beside_it_alone(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """skip_layernorm won where bias_gelu was fused, too: of a model without its sites, or told to skip it, that says nothing."""
    ms, ratio = Interval(0.4, 0.4, 0.4), Interval(1.2, 1.19, 1.21)
    known = [Verdict(fusion, "m", 0, 8, "float32", "h200", "1", "10.6.0", ms, ms, ratio, "2026-12-01", variant, (beside,))
             for fusion, variant, beside in [("skip_layernorm", None, "bias_gelu"), ("bias_gelu", "erf", "skip_layernorm")]]  # fmt: skip
    monkeypatch.setattr(store, "load", lambda: store.Contents(tuple(known), ()))

    def fused(model: Path, skip: tuple[str, ...] = ()) -> set[str]:
        found = pipeline.optimize(model, None, skip=skip)
        return {decision.site.fusion for decision in found.decisions if decision.fused}

    assert fused(block) == set()
    model = onnx.load(block)
    nodes = [
        helper.make_node("Add", ["y", "bias"], ["shifted"], name="add_again"),
        helper.make_node("Gelu", ["shifted"], ["z"], name="gelu"),
    ]
    model.graph.node.extend(nodes)
    model.graph.output[0].name = "z"
    model.opset_import[0].version = 20
    onnx.save(model, block)
    assert fused(block) == {"skip_layernorm", "bias_gelu"}
    assert fused(block, skip=("bias_gelu",)) == set()


def test_undo_brings_the_primitives_back(block: Path, tmp_path: Path) -> None:
    pipeline.optimize(block, tmp_path / "fused.onnx", policy="all")
    count, check = pipeline.undo(tmp_path / "fused.onnx", tmp_path / "undone.onnx")
    assert count == 1
    assert check is not None
    assert check.agrees
    assert not any(op.startswith("onnxfuse::") for op in ops(tmp_path / "undone.onnx"))


def test_a_report_is_followed_as_a_plan(block: Path, tmp_path: Path) -> None:
    report = pipeline.optimize(block, None, policy="all").to_dict()
    report["sites"][0] |= {"decision": "kept", "reason": "by hand"}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(report))
    result = pipeline.optimize(block, tmp_path / "out.onnx", policy="all", plan=plan)
    assert ops(tmp_path / "out.onnx") == ops(block)
    assert result.decisions[0].reason == "plan file: by hand"


def test_a_plan_of_another_model_is_refused(block: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"sites": [{"fusion": "gelu", "output": "elsewhere", "decision": "fused"}]}')
    with pytest.raises(BadInput, match="none of its sites is in this model"):
        pipeline.optimize(block, None, plan=plan)


def test_a_node_that_was_fused_stays_in_float32_in_its_fused_node(block: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"policy": "all", "skip": ("linear_layernorm",), "precision": "fp16"}
    result = pipeline.optimize(block, tmp_path / "half.onnx", keep_fp32=["norm"], **settings)
    assert result.converted is not None
    assert result.converted.float_nodes == (("skip_layernorm", "SkipLayerNormalization", "asked for (skip_layernorm)"),)
    with pytest.raises(BadInput, match="no node, operator or tensor nothing"):
        pipeline.optimize(block, None, policy="all", precision="fp16", keep_fp32=["norm", "nothing"])


def test_why_not_names_the_reason(block: Path) -> None:
    answers = pipeline.why_not(block, "residual")
    assert answers is not None
    assert answers[0].fits
    assert answers[0].fusion == "skip_layernorm"
    assert pipeline.why_not(block, "nothing") is None
    assert pipeline.why_not(block, "x") == []  # an input
    left = {answer.fusion: answer.reason for answer in answers if not answer.fits}
    assert left["linear_bias"].startswith("'biased' comes from Add")


def test_a_tensor_answers_for_the_node_that_makes_it(block: Path) -> None:
    assert pipeline.why_not(block, "sum") == pipeline.why_not(block, "residual")


def test_folding_goes_on_until_nothing_is_left(tmp_path: Path) -> None:
    """Conv, BatchNormalization, a channel's Add, BatchNormalization: one Conv."""
    statistics = [constant(f"{name}{i}", 4, low=0.1) for i in (1, 2) for name in ("scale", "shift", "mean", "variance")]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv"),
        helper.make_node("BatchNormalization", ["a", "scale1", "shift1", "mean1", "variance1"], ["b"], name="bn1"),
        helper.make_node("Add", ["b", "offset"], ["c"], name="add"),
        helper.make_node("BatchNormalization", ["c", "scale2", "shift2", "mean2", "variance2"], ["y"], name="bn2"),
    ]
    weights = [constant("w", 4, 3, 3, 3), constant("offset", 4, 1, 1), *statistics]
    model = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 6, 6]}, {"y": [1, 4, 4, 4]}, weights)
    result = pipeline.optimize(model, tmp_path / "out.onnx")
    assert result.agrees
    assert ops(tmp_path / "out.onnx") == ["Conv"]
    again = pipeline.optimize(tmp_path / "out.onnx", tmp_path / "again.onnx")
    assert not again.decisions


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_precision_is_written_into_the_fused_model(block: Path, tmp_path: Path, precision: str) -> None:
    out = tmp_path / "half.onnx"
    result = pipeline.optimize(block, out, policy="all", skip=("linear_layernorm",), precision=precision)
    assert result.agrees
    wanted = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[precision]
    model = onnx.load(out)
    assert {weight.data_type for weight in model.graph.initializer} == {wanted}
    fused = next(node for node in model.graph.node if node.op_type == "SkipLayerNormalization")
    assert next(attribute.i for attribute in fused.attribute if attribute.name == "dtype") == wanted
    assert {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} == {TensorProto.FLOAT}


def test_nothing_is_written_without_a_place(block: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    result = pipeline.optimize(block, None, policy="all")
    assert result.check is None
    assert sorted(tmp_path.iterdir()) == before


def test_the_registry_names_each_fusion_once_and_after_what_it_needs() -> None:
    names = [fusion.name for fusion in REGISTRY]
    assert len(names) == len(set(names))
    for fusion in REGISTRY:
        assert all(names.index(need) < names.index(fusion.name) for need in fusion.needs)
        assert set(fusion.belongs_with) <= set(names) - {fusion.name}


def test_a_shape_that_only_a_proof_makes_known_is_folded_at_once(tmp_path: Path) -> None:
    """The Loop's result has the shape of what it carries, which onnx's inference does not say: one pass must do what two would."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c_out"]), helper.make_node("Relu", ["h"], ["h_out"])],
        "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("c", TensorProto.BOOL, []),
         helper.make_tensor_value_info("h", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("c_out", TensorProto.BOOL, []), helper.make_tensor_value_info("h_out", TensorProto.FLOAT, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Loop", ["trips", "", "x"], ["looped"], body=body, name="loop"),
        helper.make_node("Shape", ["looped"], ["size"], name="shape"),
        helper.make_node("Transpose", ["looped"], ["turned"], perm=[1, 0], name="turn"),
        helper.make_node("Reshape", ["turned", "size"], ["y"], name="reshape"),
    ]
    trips = numpy_helper.from_array(np.array(2, np.int64), "trips")
    model = save(tmp_path / "m.onnx", nodes, {"x": [2, 3]}, {"y": [2, 3]}, [trips])
    result = pipeline.optimize(model, tmp_path / "once.onnx")
    assert result.agrees
    assert "Shape" not in ops(tmp_path / "once.onnx")
    pipeline.optimize(tmp_path / "once.onnx", tmp_path / "twice.onnx")
    assert ops(tmp_path / "twice.onnx") == ops(tmp_path / "once.onnx")
