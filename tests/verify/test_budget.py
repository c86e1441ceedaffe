"""What errors mean in words; float64 that is refused; and `compare --layers` as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph.origin import Origin
from onnxfuse.report import read
from onnxfuse.verify import budget, check, layers, pieces, reference
from onnxfuse.verify.layers import Inside, Row
from onnxfuse.verify.metrics import Metrics, measure
from onnxfuse.verify.reference import Kind, Runtime
from tests.verify import plants

Run = Callable[..., subprocess.CompletedProcess[str]]


# ---------------------------------------------------------------------------------------------------------------- words


def inside(precision: str, errors: dict[str, float], agrees: bool = True) -> Inside:
    """One output; the errors of "ort", "automatic" and "fused", as norms."""
    limits = check.tolerance(precision)
    roles = [role for role in ("automatic", "fused") if role in errors]
    subjects = tuple(SimpleNamespace(name=f"{role}.engine", role=role, limits=limits, layer=lambda name: "") for role in roles)
    found = {
        name if name == "ort" else f"{name}.engine": Metrics(True, relative_rms=error, max_abs=error) for name, error in errors.items()
    }
    against = {s.name: Metrics(agrees, "" if agrees else "far off", relative_rms=errors[s.role], max_abs=errors[s.role]) for s in subjects}
    if not agrees:
        found = {name: Metrics(name == "ort", relative_rms=m.relative_rms, max_abs=m.max_abs) for name, m in found.items()}
    origin = {s.name: (Origin("bias_gelu", "y", ("add", "gelu")), "bias_gelu_3") for s in subjects}
    row = Row("y", "last", "Add", ("last",), Kind("float32", (2,)), True, origin, against, {}, {}, found, "", {}, {}, "ort")
    return Inside((row,), SimpleNamespace(name="ort", role="onnxruntime_float32"), subjects, True, {}, {}, 1, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "errors", "kind", "words"),
    [
        ("float32", {"ort": 1e-7, "fused": 1.5e-7}, "exact", "as near to the truth as onnxruntime"),
        ("float32", {"ort": 0.0, "fused": 1e-8}, "exact", "as near to the truth"),
        ("float16", {"ort": 1e-7, "fused": 2e-3, "automatic": 1.5e-3}, "price", "the price of float16: automatic.engine errs by 0.0015"),
        ("float16", {"ort": 1e-7, "fused": 2e-2, "automatic": 1e-3}, "wrong", "20 times as much as automatic.engine in the same float16"),
        ("float16", {"ort": 1e-7, "fused": 2e-3}, "price", "the price of float16: 0.002, onnxruntime errs by 1e-07"),
        ("tf32", {"ort": 1e-7, "fused": 2e-4, "automatic": 3e-4}, "price", "the price of TF32"),
        ("float32", {"ort": 1e-7, "fused": 1e-5}, "price", "within float32's rounding"),
    ],
)
def test_the_price_of_a_precision_is_told_from_a_fault(precision: str, errors: dict[str, float], kind: str, words: str) -> None:
    found = budget.error_budget(inside(precision, errors))
    assert found["verdicts"]["y"]["kind"] == kind
    assert words in found["verdicts"]["y"]["sentence"]
    assert words in found["summary"]
    assert set(found["outputs"]["y"]) == {"onnxruntime_float32" if name == "ort" else name for name in errors}


@pytest.mark.parametrize(
    ("alone", "wrong", "kind", "words"),
    [
        (True, True, "wrong", "a piece is wrong by itself, see tensor 'y'"),
        (True, False, "price", "no piece is wrong by itself, so rounding adds up or is amplified"),
        (False, False, "unknown", "compare with the automatic engine of the same precision as well"),
    ],
)
def test_beyond_the_limits_the_pieces_tell(alone: bool, wrong: bool, kind: str, words: str) -> None:
    found = inside("float16", {"ort": 1e-7, "fused": 0.3}, agrees=False)
    row = dataclasses.replace(
        found.rows[0],
        alone={"fused.engine": Metrics(not wrong)} if alone else {},
        wrong={"fused.engine": "far off"} if wrong else {},
    )
    said = budget.error_budget(dataclasses.replace(found, rows=(row,)))
    assert said["verdicts"]["y"]["kind"] == kind
    assert "0.3 is beyond the limits of float16" in said["summary"]
    assert words in said["summary"]


def test_both_far_from_the_truth_by_as_much_is_nobodys_fault() -> None:
    """An output that float32 itself cannot have: it differs from the reference, but is as near to float64."""
    found = inside("float32", {"ort": 1e-2, "fused": 1.2e-2}, agrees=False)
    said = budget.verdict(found, found.subjects[0])
    assert said["first"] is None
    assert "1 of them differ from the reference by no more than both differ from float64" in said["sentences"]
    far = inside("float32", {"ort": 1e-2, "fused": 1e-1}, agrees=False)
    said = budget.verdict(far, far.subjects[0])
    assert said["first"]["nodes"] == ["add", "gelu"]
    assert "of fusion bias_gelu (node 'bias_gelu_3', from 'add', 'gelu')" in said["sentences"][0]


# -------------------------------------------------------------------------------------------------------------- refusal


def test_where_float64_and_the_reference_do_not_compute_the_same_neither_is_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation's Tanh is made wrong; what follows has no truth, what is beside it has."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"], "tanh"),
        helper.make_node("Neg", ["t"], ["after"], "after"),
        helper.make_node("Neg", ["x"], ["beside"], "beside"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in ("x", "after", "beside")]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 17)]), path)
    feeds = {"x": np.linspace(-1, 1, 8, dtype=np.float32)}

    class Wrong(Runtime):
        def truth(self, model: Path, tensors: Any, decisions: Any) -> Any:
            values, missing = super().truth(model, tensors, decisions)
            return {n: v * (1.01 if n in ("t", "after") else 1.0) for n, v in values.items()}, missing

        def truth_again(self, model: Path, name: str, inputs: Any) -> Any:
            return super().truth_again(model, name, inputs) * (1.01 if name == "t" else 1.0)

    with Wrong(threads=1) as runtime:
        parts = pieces.prepare(path, feeds, runtime, tmp_path)
        base = layers.ModelSubject("reference", "onnxruntime_float32", check.tolerance(), parts, feeds, runtime, tmp_path)
        other = layers.ModelSubject("other", "fused", check.tolerance(), parts, feeds, runtime, tmp_path)
        found = layers.look(base, [other], feeds, runtime)
    assert list(found.refused) == ["t"]
    assert "node 'tanh' (Tanh) alone differs from float64 by more than float32 explains" in found.refused["t"]
    truths = {row.name: bool(row.errors) for row in found.rows}
    assert truths == {"t": False, "after": False, "beside": True}
    said = budget.error_budget(found)
    assert said["verdicts"]["after"]["kind"] == "unknown"
    assert said["truth"]["without"] == 2


def test_an_error_that_came_with_the_inputs_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """cos of 1e6 times something: float32 has lost the angle, and float64 is the truth all the same."""
    nodes = [helper.make_node("Mul", ["x", "big"], ["angle"], "scale"), helper.make_node("Cos", ["angle"], ["y"], "cos")]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(np.float32(1.1e6), "big")])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    feeds = {"x": np.random.default_rng(0).uniform(0.5, 1, 64).astype(np.float32)}
    with Runtime(threads=1) as runtime:
        parts = pieces.prepare(path, feeds, runtime, tmp_path)
        base = layers.ModelSubject("reference", "onnxruntime_float32", check.tolerance(), parts, feeds, runtime, tmp_path)
        found = layers.look(
            base, [layers.ModelSubject("other", "fused", check.tolerance(), parts, feeds, runtime, tmp_path)], feeds, runtime
        )
    row = found.rows[-1]
    assert not found.refused
    assert not row.truth
    assert row.errors["reference"].max_abs > 1e-3
    angle = feeds["x"].astype(np.float64) * np.float64(np.float32(1.1e6))
    truth = np.cos(angle)
    with Runtime(threads=1) as runtime:
        (got,) = runtime.run(path, [feeds])
    np.testing.assert_allclose(row.errors["reference"].max_abs, np.abs(got["y"] - truth).max(), rtol=1e-9)


# ---------------------------------------------------------------------------------------------------------- the command


def test_layers_from_the_command_line(tmp_path: Path, run_cli: Run) -> None:
    original, fused = plants.fused(plants.encoder(), tmp_path)
    np.savez(tmp_path / "data.npz", **plants.encoder_feeds())
    done = run_cli("compare", original, fused, "--data", "data.npz", "--layers", "--report", "r")
    assert done.returncode == 0, done.stderr
    assert "inside model.fused.onnx: all" in done.stdout
    assert "Error against float64" in done.stdout
    report = read.load(tmp_path / "r" / "report.json")
    assert report["inside"]["subjects"][0]["wrong"] is None
    assert {row["name"] for row in report["tensors"]} >= {"y", "l0_attention_norm_out"}
    assert all(row["onnxruntime_float32"]["relative_rms"] < 1e-5 for row in report["tensors"] if row["dtype"] == "float32")


def test_a_planted_fault_is_status_1_and_named(tmp_path: Path, run_cli: Run) -> None:
    original, fused = plants.fused(plants.encoder(), tmp_path)
    model = plants.edited(fused)
    plants.wrong_epsilon(model, "skip_layernorm_1", 0.5)
    onnx.save(model, fused)
    np.savez(tmp_path / "data.npz", **plants.encoder_feeds())
    done = run_cli("compare", original, fused, "--data", "data.npz", "--layers", "--no-truth", "--memory", "1", "--report", "r")
    assert done.returncode == 1
    assert "model.fused.onnx: wrong by itself: fusion skip_layernorm, node 'skip_layernorm_1'" in done.stderr
    text = " ".join(done.stdout.split())
    assert "first tensor 'l0_mlp_norm_out', of fusion skip_layernorm (node 'skip_layernorm_1'" in text
    assert "it is wrong by itself" in text
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert "error_budget" not in report
    assert report["inside"]["subjects"][0]["wrong"]["fusion"] == "skip_layernorm"


def test_the_feed_that_disagrees_is_looked_into(tmp_path: Path, run_cli: Run) -> None:
    """A mask with another fill shows only where something is masked: in the second of three feeds."""
    original, fused = plants.fused(plants.encoder(), tmp_path)
    model = plants.edited(fused)
    plants.other_mask(model)
    onnx.save(model, fused)
    (tmp_path / "data").mkdir()
    for index, masked in enumerate((0, 3, 0)):
        np.savez(tmp_path / "data" / f"{index}.npz", **plants.encoder_feeds(index, masked))
    done = run_cli("compare", original, fused, "--data", "data", "--layers", "--no-truth", "--report", "r")
    assert done.returncode == 1
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["inside"]["feed"] == 1
    assert report["inside"]["subjects"][0]["wrong"]["nodes"] == ["mask_scale"]
    assert len(report["inputs"]["feeds"]) == 3


def test_a_fused_file_alone_is_looked_into_against_itself_undone(tmp_path: Path, run_cli: Run) -> None:
    _, fused = plants.fused(plants.gated(), tmp_path)
    done = run_cli("compare", fused, "--layers", "--feeds", "1")
    assert done.returncode == 0, done.stderr
    assert "inside model.fused.onnx: all" in done.stdout


# -------------------------------------------------------------------------------------------------- streaming of outputs


def test_feeds_from_files_are_read_one_at_a_time(tmp_path: Path) -> None:
    from onnxfuse.verify import inputs

    original, _ = plants.fused(plants.gated(), tmp_path)
    (tmp_path / "data").mkdir()
    for index in range(3):
        np.savez(tmp_path / "data" / f"{index}.npz", x=np.full((4, plants.WIDTH), index, np.float32))
    feeds = inputs.from_data(tmp_path / "data", original)
    assert len(feeds) == 3
    assert [feed["x"][0, 0] for feed in feeds] == [0, 1, 2]
    assert feeds[0] is not feeds[0]  # nothing is kept
    assert [feed["x"][0, 0] for feed in feeds[1:]] == [1, 2]
    with Runtime(threads=1) as runtime:
        stream = check.streamed(runtime, original, feeds)
        outputs = [outputs["y"] for _, outputs in stream]
        whole = reference.run(original, list(feeds))
    assert all(np.array_equal(a, b["y"]) for a, b in zip(outputs, whole, strict=True))


def test_checks_of_single_feeds_add_up() -> None:
    right, wrong = np.ones(4, np.float32), np.array([1, 1, 1, 2], np.float32)
    one = check.check_arrays([{"y": right}], [{"y": right}], notes=("a",))
    two = check.check_arrays([{"y": right}], [{"y": wrong}], notes=("a", "b"))
    both = check.merged([one, two])
    assert (both.feeds, both.notes, both.agrees) == (2, ("a", "b"), False)
    assert both.outputs["y"].elements == 8
    assert both.outputs["y"].outside == 1


# --------------------------------------------------------------------------------------------------------------- figures


def test_units_in_the_last_place_are_those_of_the_coarser_type() -> None:
    want = np.array([1.0, 2.0, 1024.0, 1e-9], np.float32)
    got = want.copy()
    got[1] = np.nextafter(np.float32(2), np.float32(3))
    assert measure(got, want).ulp == 1
    got = want.astype(np.float16)
    got[0] = np.float16(1) + np.float16(2**-10)
    assert measure(got, want, check.tolerance("float16"), same_dtype=False).ulp == 1
    # A value near zero among larger ones is measured by theirs.
    near = np.array([1.0, 1.0, 1.0, 1e-6], np.float32)
    other = near.copy()
    other[3] = 0
    assert measure(other, near).ulp == pytest.approx(1e-6 / 2**-23, rel=1e-3)


def test_denormal_half_precision_is_measured_by_the_smallest_normal_number() -> None:
    want = np.full(8, 1e-7, np.float32)
    assert measure(want.astype(np.float16), want, check.tolerance("float16"), same_dtype=False).ulp < 1
