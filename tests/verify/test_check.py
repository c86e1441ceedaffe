"""Two models, or a model and arrays from elsewhere."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.verify import check, inputs
from onnxfuse.verify.check import check_arrays, check_models, tolerance
from onnxfuse.verify.reference import CannotRun, Runtime
from tests.verify.conftest import Save

FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16


def two_outputs(save: Save, name: str, factor: float = 1.0, element: int = FLOAT) -> Path:
    nodes = [helper.make_node("Mul", ["x", "two"], ["first"]), helper.make_node("Mul", ["x", "f"], ["second"])]
    kind = {FLOAT: np.float32, FLOAT16: np.float16, BFLOAT16: ml_dtypes.bfloat16}[element]
    weights = {"two": np.array(2, kind), "f": np.array(factor, kind)}
    return save(nodes, [("x", element, ["N", 16])], [("first", element, ["N", 16]), ("second", element, ["N", 16])], weights, name=name)


def test_equal_models_agree(save: Save) -> None:
    model = two_outputs(save, "a")
    found = check_models(model, model, inputs.generate(model, count=2))
    assert found.agrees
    assert found.feeds == 2
    assert found.reference.startswith("onnxruntime ")
    assert list(found.outputs) == ["first", "second"]
    assert found.outputs["first"].elements == 64


def test_a_planted_difference_is_found_at_its_output(save: Save) -> None:
    a, b = two_outputs(save, "a"), two_outputs(save, "b", factor=1.001)
    found = check_models(a, b, inputs.generate(a))
    assert not found.agrees
    assert list(found.disagreements) == ["second"]
    assert "outside" in found.disagreements["second"]
    assert check_models(a, b, inputs.generate(a), rtol=1e-2).outputs["first"].agrees
    report = found.to_dict()
    assert report["outputs"]["second"]["max_abs"] > 0
    assert {"max_abs", "max_rel", "cosine", "equal_nans", "agrees", "reason"} <= set(report["outputs"]["first"])


def test_inputs_that_differ_are_named(save: Save) -> None:
    a = two_outputs(save, "a")
    b = save([helper.make_node("Neg", ["z"], ["first"])], [("z", FLOAT, [1, 16])], [("first", FLOAT, [1, 16])], name="b")
    with pytest.raises(BadInput, match=r"b\.onnx: has no input 'x', which .*a\.onnx takes"):
        check_models(a, b, inputs.generate(a))


def test_a_missing_output_disagrees_and_a_further_one_is_a_note() -> None:
    one, two = np.ones(3, np.float32), np.zeros(3, np.float32)
    found = check_arrays([{"a": one, "b": two}], [{"a": one, "c": two}])
    assert found.disagreements == {"b": "this output is missing"}
    assert found.notes == ("output 'c' has no counterpart in the reference",)


def test_limits_follow_the_lowest_precision(save: Save) -> None:
    a, half, brain = two_outputs(save, "a"), two_outputs(save, "h", element=FLOAT16), two_outputs(save, "b", element=BFLOAT16)
    assert [check.precision(path) for path in (a, half, brain)] == ["float32", "float16", "bfloat16"]
    assert check.limits_for(a, half)[0].name == "float16"
    assert "float16" in check.limits_for(a, half)[1][0]
    assert check.limits_for(a, a) == (tolerance("fp32"), ())
    # What a user asks for is asked exactly.
    assert tolerance("float32", rtol=0.5).of_typical == 0
    assert (tolerance("fp16", atol=0.1).atol, tolerance("fp16", atol=0.1).cosine) == (0.1, 0.9999)
    with pytest.raises(BadInput, match="no tolerance for precision 'fp7'"):
        tolerance("fp7")
    for limit in (-1, float("inf"), float("nan")):
        with pytest.raises(BadInput, match=r"--rtol .*: a tolerance is finite and not negative"):
            tolerance("fp32", rtol=limit)


def test_a_quantizing_model_says_so(save: Save) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    model = save(nodes, [("x", FLOAT, [16])], [("y", FLOAT, [16])])
    found = check_models(model, model, inputs.generate(model))
    assert found.tolerance.name == "quantized"
    assert "8 bits" in found.notes[0]


def test_without_kernels_onnx_reference_stands_in_and_is_named(save: Save) -> None:
    a, b = two_outputs(save, "a", element=BFLOAT16), two_outputs(save, "b", factor=3.0, element=BFLOAT16)
    feeds = inputs.generate(a)
    same = check_models(a, a, feeds)
    assert same.agrees
    assert same.reference.startswith("onnx.reference ")
    assert list(check_models(a, b, feeds).disagreements) == ["second"]


def test_where_nothing_runs_it_cannot_run(save: Save) -> None:
    model = save([helper.make_node("Foo", ["x"], ["y"], domain="elsewhere")], [("x", FLOAT, [2])], [("y", FLOAT, [2])])
    with pytest.raises(CannotRun, match=r"onnxruntime cannot run it.*nor can"):
        check_models(model, model, inputs.generate(model))


def test_guessed_sizes_are_named_when_the_model_refuses_them(save: Save) -> None:
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    fixed = save([node], [("x", FLOAT, ["rows", 3])], [("y", FLOAT, None)], {"s": np.array([7, 3])})
    with Runtime() as runtime:
        with pytest.raises(OnnxfuseError, match=r"free sizes were guessed: give them with --dims 'rows=N'"):
            check.generated(runtime, fixed)
        assert len(check.generated(runtime, fixed, count=2, dims={"rows": 7}).whole().feeds) == 2
    one = save([node], [("x", FLOAT, ["rows", 3])], [("y", FLOAT, None)], {"s": np.array([1, 3])})
    with Runtime() as runtime:
        found = check.generated(runtime, one, count=3).whole()
    assert len(found.feeds) == len(found.outputs) == 1
    assert found.notes == ("inputs of further sizes were left out: the reference does not take them",)


def test_sizes_are_guessed_anew_when_the_model_refuses_the_first(save: Save) -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    path = save(nodes, [("x", FLOAT, [1, "samples"])], [("y", FLOAT, None)], {"s": np.array([2, 256])})
    assert [feed["x"].shape for feed in check.usable_feeds(path, count=3)] == [(1, 512)]
