"""Looking inside: planted faults are named, with the fusion and the source nodes; memory stays bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import pipeline
from onnxfuse.verify import budget, check, layers, pieces, reference
from onnxfuse.verify.layers import Inside
from onnxfuse.verify.reference import Runtime
from tests.verify import plants

Look = Callable[..., Inside]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(threads=1) as child:
        yield child


@pytest.fixture
def look(runtime: Runtime, tmp_path: Path) -> Look:
    """look(original, other, feeds, truth=False, ...) -> what is inside of the other, called "other"."""

    def inside(original: Path, other: Path, feeds: dict[str, np.ndarray], truth: bool = False, **more: Any) -> Inside:
        folder = tmp_path / "parts"
        folder.mkdir(exist_ok=True)
        limits, _ = check.limits_for(original, other)
        base = layers.ModelSubject(
            "reference", "onnxruntime_float32", check.tolerance(), pieces.prepare(original, feeds, runtime, folder), feeds, runtime, folder
        )
        subject = layers.ModelSubject("other", "fused", limits, pieces.prepare(other, feeds, runtime, folder), feeds, runtime, folder)
        return layers.look(base, [subject], feeds, runtime, truth=truth, **more)

    return inside


def verdict(found: Inside) -> dict[str, Any]:
    return budget.verdict(found, found.subjects[0])


def planted(folder: Path, source: onnx.ModelProto, plant: Callable[[onnx.ModelProto], str]) -> tuple[Path, Path, str]:
    original, target = plants.fused(source, folder)
    model = plants.edited(target)
    tensor = plant(model)
    onnx.save(model, target)
    return original, target, tensor


# ---------------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    ("source", "feeds"),
    [
        (plants.encoder(), plants.encoder_feeds()),
        (plants.convnet(), {"image": np.random.default_rng(1).normal(size=(1, 3, 12, 12)).astype(np.float32)}),
        (plants.gated(), {"x": np.random.default_rng(1).normal(size=(4, plants.WIDTH)).astype(np.float32)}),
    ],
    ids=["encoder", "convnet", "gated"],
)
@pytest.mark.parametrize("precision", ["keep", "fp16"])
def test_what_is_right_agrees_inside_too(
    look: Look, tmp_path: Path, source: onnx.ModelProto, feeds: dict[str, np.ndarray], precision: str
) -> None:
    original, target = plants.fused(source, tmp_path, precision)
    found = look(original, target, feeds, truth=True)
    said = verdict(found)
    assert said["first"] is None, said
    assert said["wrong"] is None, said
    assert not found.refused
    assert {row.name for row in found.rows} >= {"y"}
    names = [name for node in onnx.load(original).graph.node for name in node.output]
    assert [row.name for row in found.rows] == sorted((row.name for row in found.rows), key=names.index)
    judged = budget.error_budget(found)["verdicts"]["y"]
    assert judged["kind"] == ("exact" if precision == "keep" else "price"), judged


def test_a_fused_file_says_where_its_nodes_come_from(look: Look, tmp_path: Path) -> None:
    original, target = plants.fused(plants.encoder(1), tmp_path)
    found = look(original, target, plants.encoder_feeds())
    by_name = {row["name"]: row for row in budget.tensors(found)}
    norm = by_name["l0_attention_norm_out"]
    assert (norm["fusion"], norm["fused_node"], norm["node"]) == ("skip_layernorm", "skip_layernorm", "l0_attention_norm")
    assert set(norm["nodes"]) == {"l0_o_add", "l0_attention_residual", "l0_attention_norm"}
    gelu = by_name["l0_gelu_mul_half_out"]
    # The canonical GELU that bias_gelu took counts for the nodes that it was made of.
    assert set(gelu["nodes"]) == {"l0_up_add", *(f"l0_gelu_{part}" for part in ("div", "erf", "add", "mul", "mul_half"))}
    assert by_name["l0_scores_out"]["fusion"] is None
    assert by_name["l0_scores_out"]["nodes"] == ["l0_scores"]


def modulated(path: Path, *factors: float) -> Path:
    """silu(x * factors - 3e5), z being the sum's name where there is one factor: it cancels out at x of 3, where factors make 1e5."""
    z, names = ("z", ("scaled",)) if len(factors) == 1 else ("other_z", ("once", "twice"))
    nodes = [helper.make_node("Mul", [given, f"{made}_by"], [made], made) for given, made in zip(("x", *names), names, strict=False)]
    nodes += [helper.make_node("Add", [names[-1], "shift"], [z], "add"), helper.make_node("Sigmoid", [z], [f"{z}_gate"], "sigmoid")]
    nodes.append(helper.make_node("Mul", [z, f"{z}_gate"], ["y"], "silu"))
    constants = {"shift": -3e5, **{f"{made}_by": factor for made, factor in zip(names, factors, strict=True)}}
    weights = [numpy_helper.from_array(np.float32(value), name) for name, value in constants.items()]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4096]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(("factors", "wrong"), [((1e3, 1e2), False), ((1e3, 100.01), True)])
def test_what_cancels_out_inside_of_a_piece_is_judged_by_float64(
    look: Look, tmp_path: Path, factors: tuple[float, ...], wrong: bool
) -> None:
    """The product is rounded by 0.03 where the sum is about 1: two orders of multiplication differ by that, and both are right."""
    feeds = {"x": (3 + np.linspace(-1e-3, 1e-3, 4096)).astype(np.float32)}
    found = look(modulated(tmp_path / "one.onnx", 1e5), modulated(tmp_path / "two.onnx", *factors), feeds, truth=True)
    (row,) = found.rows
    assert row.name == "y"
    assert not row.alone["other"].agrees
    assert bool(row.wrong) == wrong


# ------------------------------------------------------------------------------------------------------------- plants


def test_a_wrong_epsilon(look: Look, tmp_path: Path) -> None:
    original, target, tensor = planted(tmp_path, plants.encoder(), lambda m: plants.wrong_epsilon(m, "skip_layernorm_1"))
    found = look(original, target, plants.encoder_feeds())
    said = verdict(found)
    assert said["first"]["tensor"] == said["wrong"]["tensor"] == tensor
    assert said["wrong"]["fusion"] == "skip_layernorm"
    assert said["wrong"]["node"] == "skip_layernorm_1"
    assert set(said["wrong"]["nodes"]) == {"l0_down_add", "l0_mlp_residual", "l0_mlp_norm"}
    # What comes after it disagrees too, but is right by itself.
    assert said["outside"] > 1
    assert [row.name for row in found.rows if row.wrong] == [tensor]


@pytest.mark.parametrize("block", [0, 1, 2])
def test_batch_norm_folded_with_the_statistics_of_a_batch(look: Look, tmp_path: Path, block: int) -> None:
    source = plants.convnet()
    feeds = {"image": np.random.default_rng(1).normal(size=(1, 3, 12, 12)).astype(np.float32)}
    onnx.save(source, tmp_path / "source.onnx")
    (inner,) = reference.run(tmp_path / "source.onnx", [feeds], [f"b{block}_conv_out"])
    name = "conv_bn" + (f"_{block}" if block else "")
    original, target, tensor = planted(
        tmp_path, source, lambda m: plants.training_statistics(m, name, source, inner[f"b{block}_conv_out"], block)
    )
    said = verdict(look(original, target, feeds))
    assert said["wrong"]["tensor"] == tensor
    assert (said["wrong"]["fusion"], said["wrong"]["node"]) == ("conv_bn", name)
    assert set(said["wrong"]["nodes"]) == {f"b{block}_conv", f"b{block}_norm"}


def test_a_mask_filled_with_another_value(look: Look, tmp_path: Path) -> None:
    original, target, tensor = planted(tmp_path, plants.encoder(), plants.other_mask)
    said = verdict(look(original, target, plants.encoder_feeds()))
    assert said["first"]["tensor"] == said["wrong"]["tensor"] == tensor
    assert said["wrong"]["nodes"] == ["mask_scale"]
    # Where nothing is masked the fault does not show.
    assert verdict(look(original, target, plants.encoder_feeds(masked=0)))["first"] is None


def test_swapped_scale_and_shift(look: Look, tmp_path: Path) -> None:
    original, target, tensor = planted(tmp_path, plants.encoder(), lambda m: plants.swapped(m, "skip_layernorm_2", 2, 3))
    said = verdict(look(original, target, plants.encoder_feeds()))
    assert (said["wrong"]["tensor"], said["wrong"]["fusion"], said["wrong"]["node"]) == (tensor, "skip_layernorm", "skip_layernorm_2")


def test_a_swapped_gate(look: Look, tmp_path: Path) -> None:
    """silu(up) * gate: every tensor before keeps its name, and the nodes that read the wrong one are named."""

    def swap(model: onnx.ModelProto) -> str:
        plants.node(model, "silu").input[0] = "up_add_out"
        gating = plants.node(model, "gating")
        gating.input[:] = ["gate_add_out" if name == "up_add_out" else name for name in gating.input]
        return "silu_mul_out"

    original, target, tensor = planted(tmp_path, plants.gated(), swap)
    said = verdict(look(original, target, {"x": np.random.default_rng(1).normal(size=(4, plants.WIDTH)).astype(np.float32)}))
    assert (said["wrong"]["tensor"], said["wrong"]["fusion"], said["wrong"]["node"]) == (tensor, "silu", "silu")
    assert set(said["wrong"]["nodes"]) == {"sigmoid", "silu_mul"}


def test_an_infinity_in_the_middle(look: Look, tmp_path: Path) -> None:
    original, target, tensor = planted(tmp_path, plants.encoder(), lambda m: plants.infinite(m, "bias_gelu_1", 1))
    model = plants.edited(target)
    x = next(t for t in model.graph.initializer if t.name == plants.node(model, "bias_gelu_1").input[1])
    assert np.isfinite(numpy_helper.to_array(x)).all()
    found = look(original, target, plants.encoder_feeds())
    said = verdict(found)
    assert said["wrong"]["tensor"] == tensor
    assert (said["wrong"]["fusion"], said["wrong"]["node"]) == ("bias_gelu", "bias_gelu_1")
    # What comes out of the fused node is large, and finite; the product behind it is not.
    assert set(found.nonfinite) == {"other"}
    assert found.nonfinite["other"].node == "l1_down_matmul"
    assert found.nonfinite["other"].inputs[0].startswith("values from ")


def test_an_infinity_that_a_fused_node_makes(look: Look, tmp_path: Path) -> None:
    original, target, tensor = planted(tmp_path, plants.encoder(), lambda m: plants.infinite(m, "skip_layernorm_1", 2))
    found = look(original, target, plants.encoder_feeds())
    source = found.nonfinite["other"]
    assert (source.tensor, source.node, source.op, source.what) == (tensor, "skip_layernorm_1", "SkipLayerNormalization", "infinity")
    assert "3e+38" in source.sentence
    assert verdict(found)["wrong"]["node"] == "skip_layernorm_1"


def test_one_piece_that_cannot_be_run_alone_does_not_blind_the_rest(
    look: Look, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, target, tensor = planted(tmp_path, plants.encoder(), lambda m: plants.wrong_epsilon(m, "skip_layernorm_1"))
    right = layers.ModelSubject.alone

    def alone(self: Any, names: Any, edges: Any, values: Any, rounded: Any = None) -> Any:
        if "l0_scores_out" in names:
            raise reference.OnnxfuseError("piece.onnx: it does not run")
        return right(self, names, edges, values, rounded)

    monkeypatch.setattr(layers.ModelSubject, "alone", alone)
    found = look(original, target, plants.encoder_feeds())
    assert [row.name for row in found.rows if not row.alone] == ["l0_scores_out"]
    assert verdict(found)["wrong"]["tensor"] == tensor
    assert any("what computes 'l0_scores_out' cannot be run alone (it does not run)" in note for note in found.notes)


def test_a_child_that_is_gone_takes_the_truth_along_and_nothing_else(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = chain(tmp_path, "a", 6, 1000), chain(tmp_path, "b", 6, 1000)
    before = Runtime.truth

    def truth(self: Runtime, model: Path, tensors: Any, decisions: Any) -> Any:
        if "t3" in tensors:
            self._stop()
        return before(self, model, tensors, decisions)

    monkeypatch.setattr(Runtime, "truth", truth)
    found = look(a, b, {"x": np.linspace(0, 1, 1000, dtype=np.float32).reshape(250, 4)}, truth=True, budget=1)
    assert len(found.rows) == 6
    assert [bool(row.errors) for row in found.rows] == [True, True, True, False, False, False]
    assert "the process that evaluated it in float64 is gone" in found.rows[3].truth


@pytest.mark.parametrize("precision", ["fp16"])
def test_in_half_precision_a_fault_below_the_limits_of_a_whole_model_is_found(look: Look, tmp_path: Path, precision: str) -> None:
    """A norm whose scale is 1 % too large passes limits that have room for tens of roundings; alone it has no such excuse."""
    original, target = plants.fused(plants.encoder(), tmp_path, precision)
    model = plants.edited(target)
    norm = plants.node(model, "skip_layernorm_1")
    plants.set_weight(model, norm.input[2], plants.weight(model, norm.input[2]) * 1.01)
    onnx.save(model, target)
    found = look(original, target, plants.encoder_feeds())
    row = next(row for row in found.rows if row.name == norm.output[0])
    assert row.against["other"].agrees
    said = verdict(found)
    assert said["wrong"]["node"] == "skip_layernorm_1"
    assert "that rounding to float16 costs" in said["wrong"]["reason"]


# ---------------------------------------------------------------------------------------------- NaN, infinity, branches


def simple(nodes: list[onnx.NodeProto], folder: Path, name: str = "m", weights: dict[str, Any] | None = None, shape: Any = (4,)) -> Path:
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, list(shape)) for end in ("x", "y")]
    constants = [numpy_helper.from_array(np.asarray(v, np.float32), k) for k, v in (weights or {}).items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], constants), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


@pytest.mark.parametrize(
    ("op", "x", "what", "given"),
    [
        ("Log", -2.0, "NaN", "Log of -2"),
        ("Sqrt", -4.0, "NaN", "Sqrt of -4"),
        ("Exp", 200.0, "infinity", "Exp of 200"),
        ("Reciprocal", 0.0, "infinity", "Reciprocal of 0"),
    ],
)
def test_where_nan_and_infinity_come_from(look: Look, tmp_path: Path, op: str, x: float, what: str, given: str) -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["before"], "copy"),
        helper.make_node(op, ["before"], ["bad"], "culprit"),
        helper.make_node("Neg", ["bad"], ["y"], "after"),
    ]
    path = simple(nodes, tmp_path)
    feeds = {"x": np.array([1.0, 2.0, x, 3.0], np.float32)}
    found = look(path, path, feeds)
    source = found.nonfinite["other"]
    assert (source.tensor, source.node, source.what, source.index, source.count) == ("bad", "culprit", what, (2,), 1)
    assert given in source.sentence
    # The same on both sides is agreement, and is said.
    assert verdict(found)["first"] is None
    assert found.rows[1].against["other"].remarks
    if what == "NaN":
        assert any("counts as agreement" in note for note in budget.summary(found)["notes"])


def test_the_values_that_overflow_are_shown(look: Look, tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["p"], "product"), helper.make_node("Relu", ["p"], ["y"], "relu")]
    path = simple(nodes, tmp_path, weights={"w": [1.0, 1.0, 1e38, 1.0]})
    source = look(path, path, {"x": np.array([1, 2, 30, 4], np.float32)}).nonfinite["other"]
    assert source.inputs == ("30", "1e+38")
    constant = simple([helper.make_node("Add", ["x", "w"], ["y"], "add")], tmp_path, "c", {"w": [0.0, np.inf, 0.0, 0.0]})
    assert "stands in constant 'w'" in look(constant, constant, {"x": np.ones(4, np.float32)}).nonfinite["other"].sentence


def test_nan_on_one_side_only_is_named(look: Look, tmp_path: Path) -> None:
    def model(shift: float, name: str) -> Path:
        nodes = [helper.make_node("Add", ["x", "s"], ["a"], "add"), helper.make_node("Log", ["a"], ["y"], "log")]
        return simple(nodes, tmp_path, name, {"s": [shift] * 4})

    said = verdict(look(model(1.0, "a"), model(0.999, "b"), {"x": np.array([1, 2, -0.9995, 3], np.float32)}))
    assert said["first"]["tensor"] == "a"
    found = look(model(1.0, "a"), model(0.99999999, "b"), {"x": np.array([1, 2, -1, 3], np.float32)})
    assert found.nonfinite["reference"].what == "infinity"


def branchy(scale: float, folder: Path, name: str) -> Path:
    """y = scale*x+1 if the sum of x is positive, else -x; inside of that, another choice."""

    def body(nodes: list[onnx.NodeProto], out: str) -> onnx.GraphProto:
        return helper.make_graph(nodes, out, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, [4])])

    inner = helper.make_node(
        "If", ["is_large"], ["chosen"], "inner",
        then_branch=body([helper.make_node("Mul", ["x", "scale"], ["large"], "large_mul")], "large"),
        else_branch=body([helper.make_node("Add", ["x", "scale"], ["small"], "small_add")], "small"),
    )  # fmt: skip
    plus = helper.make_node("Add", ["chosen", "one"], ["plus"], "plus")
    outer = helper.make_node(
        "If", ["positive"], ["y"], "outer",
        then_branch=body([helper.make_node("Greater", ["sum", "ten"], ["is_large"], "ask"), inner, plus], "plus"),
        else_branch=body([helper.make_node("Neg", ["x"], ["negative"], "neg")], "negative"),
    )  # fmt: skip
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"], "is_positive"),
        outer,
    ]
    return simple(nodes, folder, name, {"scale": scale, "one": 1.0, "zero": 0.0, "ten": 10.0})


def test_tensors_inside_of_the_branch_that_is_taken_are_compared(look: Look, tmp_path: Path) -> None:
    a, b = branchy(2.0, tmp_path, "a"), branchy(2.1, tmp_path, "b")
    found = look(a, b, {"x": np.array([5, 6, 7, 8], np.float32)}, truth=True)
    names = [row.name for row in found.rows]
    assert "is_large" in names
    assert verdict(found)["first"]["tensor"] in ("chosen", "large")
    assert verdict(found)["first"]["node"] == "large_mul"
    assert any("2 If nodes were looked into" in note for note in found.notes)
    # In the other branch nothing is scaled.
    assert verdict(look(a, b, {"x": np.array([-5, -6, -7, -8], np.float32)}))["first"] is None


def test_loops_are_said_not_to_be_looked_into(look: Look, tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Mul", ["v", "f"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info(*v)
            for v in (("i", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("v", TensorProto.FLOAT, [4]))
        ],
        [helper.make_tensor_value_info(*v) for v in (("go_on", TensorProto.BOOL, []), ("w", TensorProto.FLOAT, [4]))],
    )

    def model(factor: float, name: str) -> Path:
        nodes = [
            helper.make_node("Constant", [], ["three"], value=numpy_helper.from_array(np.array(3))),
            helper.make_node("Loop", ["three", "", "x"], ["looped"], "loop", body=body),
            helper.make_node("Neg", ["looped"], ["y"], "neg"),
        ]
        return simple(nodes, tmp_path, name, {"f": factor})

    found = look(model(1.5, "a"), model(1.6, "b"), {"x": np.ones(4, np.float32)}, truth=True)
    assert verdict(found)["wrong"]["tensor"] == "looped"
    assert any("inside of loop are computed once for every step" in note for note in found.notes)
    # The truth goes through the loop.
    looped = next(row for row in found.rows if row.name == "looped")
    assert looped.errors["reference"].max_abs == pytest.approx(0, abs=1e-6)


# ------------------------------------------------------------------------------------------------------- sensible judging


def test_noise_of_operands_that_cancel_is_no_fault(look: Look, tmp_path: Path) -> None:
    """x + 1000 - 1000 in two orders: what is left is rounding, up to 100 % of a value near zero."""

    def model(first: float, name: str) -> Path:
        nodes = [
            helper.make_node("Add", ["x", "big"], ["a"], "up"),
            helper.make_node("Sub", ["a", "other"], ["y"], "down"),
        ]
        return simple(nodes, tmp_path, name, {"big": [first] * 4, "other": [1000.0] * 4})

    feeds = {"x": np.array([1e-5, 2e-5, 3e-5, 4e-5], np.float32)}
    assert verdict(look(model(1000.0, "a"), model(np.nextafter(np.float32(1000), np.float32(2000)), "b"), feeds))["first"] is None
    assert verdict(look(model(1000.0, "a"), model(1000.5, "b"), feeds))["first"]["tensor"] == "a"


def test_a_mask_beyond_half_precision_is_saturated_and_no_fault(look: Look, tmp_path: Path) -> None:
    def model(element: int, fill: float, name: str) -> Path:
        kind = np.float16 if element == TensorProto.FLOAT16 else np.float32
        nodes = [
            helper.make_node("Cast", ["x"], ["h"], "to_half", to=element),
            helper.make_node("Greater", ["h", "zero"], ["keep"], "keep"),
            helper.make_node("Where", ["keep", "h", "fill"], ["masked"], "mask"),
            helper.make_node("Softmax", ["masked"], ["s"], "softmax"),
            helper.make_node("Cast", ["s"], ["y"], "back", to=TensorProto.FLOAT),
        ]
        ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [16]) for end in ("x", "y")]
        constants = [numpy_helper.from_array(np.array(value, kind), key) for key, value in (("zero", 0), ("fill", fill))]
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / f"{name}.onnx")
        return tmp_path / f"{name}.onnx"

    feeds = {"x": np.linspace(-1, 1, 16, dtype=np.float32)}
    a, b = model(TensorProto.FLOAT, -3.4e38, "a"), model(TensorProto.FLOAT16, -65504.0, "b")
    found = look(a, b, feeds)
    assert verdict(found)["first"] is None
    masked = next(row for row in found.rows if row.name == "masked").against["other"]
    assert masked.saturated == 8
    assert any("beyond the range" in remark for remark in masked.remarks)
    # A fill that is in range is another value.
    assert verdict(look(a, model(TensorProto.FLOAT16, -5.0, "c"), feeds))["first"]["tensor"] == "masked"


# ------------------------------------------------------------------------------------------------------------- streaming


def chain(folder: Path, name: str, count: int, size: int, scale: float = 0.5) -> Path:
    nodes, x = [], "x"
    for i in range(count):
        y = "y" if i == count - 1 else f"t{i}"
        nodes.append(helper.make_node("Mul" if i % 2 else "Add", [x, "w"], [y], f"n{i}"))
        x = y
    return simple(nodes, folder, name, {"w": scale}, (size // 4, 4))


def test_batches_keep_to_the_budget_and_find_the_same(look: Look, tmp_path: Path) -> None:
    a, b = chain(tmp_path, "a", 30, 1000), chain(tmp_path, "b", 30, 1000, 0.5001)
    feeds = {"x": np.linspace(0, 1, 1000, dtype=np.float32).reshape(250, 4)}
    whole, small, single = (look(a, b, feeds, truth=True, budget=size) for size in (1 << 30, 100_000, 1))
    assert whole.batches == 1
    assert whole.batches < small.batches < single.batches == 30
    rows = [[(row.name, row.against["other"], row.alone["other"], row.errors) for row in found.rows] for found in (whole, small, single)]
    assert rows[0] == rows[1] == rows[2]


_MEASURED = """
import json, resource, sys
from pathlib import Path
from onnxfuse.commands import compare
a, b, memory = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
found = compare.run(compare.Wanted(a, (b,), None, 0, 1, {}, None, None, 2, True, True, memory))
peaks = [resource.getrusage(who).ru_maxrss << 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps([found["inside"]["batches"], len(found["tensors"]), *peaks]))
"""


def test_memory_stays_bounded_where_the_tensors_are_many_times_as_large(tmp_path: Path) -> None:
    """40 tensors of 4 MB, seen on five sides: 1 GB. What a small model of the same kind takes is the machinery's own."""

    def measured(count: int, size: int, memory: int) -> list[int]:
        a, b = chain(tmp_path, f"a{size}", count, size), chain(tmp_path, f"b{size}", count, size)
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED, str(a), str(b), str(memory)], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        found: list[int] = json.loads(done.stdout.splitlines()[-1])
        return found

    bare, large = measured(2, 16, 32), measured(40, 1 << 20, 32)
    total = 40 * (4 << 20) * 6  # float32 four times, float64 once
    assert large[1] == 40
    assert large[0] >= 20
    for own, peak in zip(bare[2:], large[2:], strict=True):
        assert peak - own < 4 * (32 << 20) < total / 6


# ----------------------------------------------------------------------------------------------------------------- rest


def test_what_became_a_constant_is_compared_too(look: Look, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Exp", ["w"], ["e"], "exp"),
        helper.make_node("Mul", ["x", "e"], ["y"], "mul"),
    ]
    original = simple(nodes, tmp_path, "a", {"w": [0.5, 1.0, 1.5, 2.0]})
    pipeline.optimize(original, tmp_path / "b.onnx", check=False)
    folded = plants.edited(tmp_path / "b.onnx")
    assert [node.op_type for node in folded.graph.node] == ["Mul"]
    feeds = {"x": np.arange(4, dtype=np.float32)}
    row = next(row for row in look(original, tmp_path / "b.onnx", feeds, truth=True).rows if row.name == "e")
    assert row.taps["other"] == layers.CONSTANT
    assert row.against["other"].agrees
    plants.set_weight(folded, "e", plants.weight(folded, "e") * 1.01)
    onnx.save(folded, tmp_path / "b.onnx")
    found = look(original, tmp_path / "b.onnx", feeds)
    assert verdict(found)["first"]["tensor"] == verdict(found)["wrong"]["tensor"] == "e"
    assert verdict(found)["wrong"]["node"] == "exp"


def test_a_folded_constant_and_external_weights_are_no_obstacle(look: Look, tmp_path: Path) -> None:
    source = plants.encoder(1)
    original = tmp_path / "external.onnx"
    onnx.save(source, original, save_as_external_data=True, location="external.data", size_threshold=256)
    pipeline.optimize(original, tmp_path / "fused.onnx", policy="all", check=False)
    found = look(original, tmp_path / "fused.onnx", plants.encoder_feeds(), truth=True)
    assert verdict(found)["first"] is None
    assert verdict(found)["wrong"] is None
