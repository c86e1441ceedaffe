"""Every model between two files: what is on comes from the one, what is off from the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.errors import BadInput
from onnxfuse.verify.bisect import regions
from onnxfuse.verify.bisect.regions import Pair
from onnxfuse.verify.reference import Runtime
from tests.verify import plants

FEEDS = plants.encoder_feeds()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime() as child:
        yield child


@pytest.fixture(scope="module", params=["keep", "fp16"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return plants.fused(plants.encoder(), tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def pair(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return regions.pair(*files, tmp_path_factory.mktemp("pair"))


def outputs(runtime: Runtime, path: Path) -> dict[str, np.ndarray]:
    return runtime.run(path, [FEEDS])[0]


def between(runtime: Runtime, pair: Pair, on: list[str] | tuple[str, ...]) -> dict[str, np.ndarray]:
    path = pair.save(on, pair.folder / f"{len(list(pair.folder.iterdir()))}.onnx")
    onnx.checker.check_model(str(path))
    return outputs(runtime, path)


def test_all_off_is_the_original_and_all_on_the_rewritten_file(runtime: Runtime, files: tuple[Path, Path], pair: Pair) -> None:
    for on, path in (((), files[0]), (pair.sites, files[1])):
        got, want = between(runtime, pair, on), outputs(runtime, path)
        assert list(got) == list(want)
        for name in want:
            assert got[name].dtype == want[name].dtype
            np.testing.assert_array_equal(got[name], want[name])


def test_any_choice_of_sites_computes_the_same_function(runtime: Runtime, files: tuple[Path, Path], pair: Pair) -> None:
    want = outputs(runtime, files[0])["y"]
    dice = random.Random(1)
    for size in (1, 1, 2, len(pair.sites) // 2, len(pair.sites) - 1):
        got = between(runtime, pair, dice.sample(pair.sites, size))["y"]
        np.testing.assert_allclose(got, want, atol=2e-2 if files[1].stat().st_size < files[0].stat().st_size else 1e-5)


def test_sites_are_named_by_fusion_and_stand_for_the_source_nodes(tmp_path: Path) -> None:
    pair = regions.pair(*plants.fused(plants.encoder(1), tmp_path), tmp_path)
    norm = next(region for region in pair.regions.values() if "SkipLayerNormalization" in region.ops)
    assert norm.fusion == "skip_layernorm"
    assert {"l0_attention_residual", "l0_attention_norm"} <= set(norm.replaced)
    assert norm.outputs[0] == "l0_attention_norm_out"
    assert ("skip_layernorm", "l0_attention_norm_out") in norm.keys
    order = [region.outputs[0] for region in pair.regions.values()]
    assert order.index("l0_attention_norm_out") < order.index("l0_mlp_norm_out")


def test_the_fused_file_against_itself_has_its_fused_nodes_as_sites(runtime: Runtime, tmp_path: Path) -> None:
    _, fused = plants.fused(plants.encoder(), tmp_path)
    pair = regions.pair(fused, fused, tmp_path)
    names = {node.name for node in plants.edited(fused).graph.node if node.domain == "onnxfuse"}
    assert set(pair.sites) == names
    off = pair.between(())
    assert not [node for node in off.graph.node if node.domain]
    assert not off.functions
    np.testing.assert_allclose(between(runtime, pair, ())["y"], outputs(runtime, fused)["y"], atol=1e-5)


def test_only_some_regions_may_be_sites(tmp_path: Path) -> None:
    _, fused = plants.fused(plants.encoder(), tmp_path)
    pair = regions.pair(fused, fused, tmp_path).only(lambda region: "BiasGelu" in region.ops)
    assert len(pair.sites) == 2
    assert {node.op_type for node in pair.between(()).graph.node if node.domain} == {"SkipLayerNormalization"}


def constant(name: str, *values: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.float32), name)


def small(path: Path, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto], opset: int = 17, output: str = "y") -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", output)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def test_folded_and_changed_constants_are_sites(runtime: Runtime, tmp_path: Path) -> None:
    """k = a + b is folded wrongly, and c is another in its place."""
    sums = [helper.make_node("Add", ["a", "b"], ["k"], "fold"), helper.make_node("Mul", ["x", "k"], ["h"], "scale")]
    last = helper.make_node("Add", ["h", "c"], ["y"], "shift")
    original = small(tmp_path / "a.onnx", [*sums, last], [constant("a", 1, 2), constant("b", 3, 4), constant("c", 1, 1)])
    changed = small(tmp_path / "b.onnx", [sums[1], last], [constant("k", 4, 60), constant("c", 1, 10)])
    pair = regions.pair(original, changed, tmp_path)
    assert set(pair.sites) == {"k", "shift"}
    assert str(pair.regions["k"]) == "folded constant at 'k'"
    x = np.array([1, 1], np.float32)
    for on, want in (((), [5, 7]), (("k",), [5, 61]), (("shift",), [5, 16]), (("k", "shift"), [5, 70])):
        path = pair.save(on, tmp_path / "try.onnx")
        np.testing.assert_array_equal(Runtime.run(runtime, path, [{"x": x}])[0]["y"], want)
        path.unlink()


def test_captured_tensors_and_bodies_follow(runtime: Runtime, tmp_path: Path) -> None:
    """A branch of an If reads what a site makes."""
    cases = Path(__file__).resolve().parents[2]
    del cases
    branch = [
        helper.make_graph([helper.make_node(op, ["h"], [op.lower()])], op, [], [helper.make_tensor_value_info(op.lower(), 1, [2])])
        for op in ("Neg", "Abs")
    ]
    choose = helper.make_node("If", ["yes"], ["y"], "choose", then_branch=branch[0], else_branch=branch[1])
    flag = numpy_helper.from_array(np.array(True), "yes")
    two = [helper.make_node("Add", ["x", "c"], ["s"], "one"), helper.make_node("Add", ["s", "c"], ["h"], "two")]
    one = [helper.make_node("Add", ["x", "c2"], ["h"], "both")]
    original = small(tmp_path / "a.onnx", [*two, choose], [constant("c", 1, 1), flag])
    merged = small(tmp_path / "b.onnx", [*one, choose], [constant("c2", 2, 3), flag])
    pair = regions.pair(original, merged, tmp_path)
    assert pair.sites == ("both",)
    x = np.zeros(2, np.float32)
    for on, want in (((), [-2, -2]), (("both",), [-2, -3])):
        path = pair.save(on, tmp_path / f"try{len(on)}.onnx")
        np.testing.assert_array_equal(runtime.run(path, [{"x": x}])[0]["y"], want)


def test_names_that_mean_something_else_in_the_other_file_are_kept_apart(runtime: Runtime, tmp_path: Path) -> None:
    """h is x + c in the one and a vector of another size in the other."""
    original = small(
        tmp_path / "a.onnx",
        [helper.make_node("Add", ["x", "c"], ["h"], "a"), helper.make_node("Neg", ["h"], ["y"], "n")],
        [constant("c", 1, 2)],
    )
    nodes = [
        helper.make_node("Concat", ["x", "c"], ["h"], "cat", axis=0),
        helper.make_node("Slice", ["h", "from", "to"], ["y"], "cut"),
    ]
    bounds = [numpy_helper.from_array(np.array([at], np.int64), name) for name, at in (("from", 0), ("to", 2))]
    changed = small(tmp_path / "b.onnx", nodes, [constant("c", 1, 2), *bounds])
    pair = regions.pair(original, changed, tmp_path)
    x = np.array([5, 5], np.float32)
    for on, want in (((), [-6, -7]), (pair.sites, [5, 5])):
        path = pair.save(on, tmp_path / f"try{len(on)}.onnx")
        np.testing.assert_array_equal(runtime.run(path, [{"x": x}])[0]["y"], want)


def test_files_that_cannot_be_exchanged_are_refused(tmp_path: Path) -> None:
    neg = [helper.make_node("Neg", ["x"], ["y"], "n")]
    first = small(tmp_path / "a.onnx", neg, [])
    with pytest.raises(BadInput, match="operator set 18"):
        regions.pair(first, small(tmp_path / "b.onnx", neg, [], opset=18), tmp_path)
    other = small(tmp_path / "c.onnx", [helper.make_node("Neg", ["x"], ["z"], "n")], [], output="z")
    with pytest.raises(BadInput, match="outputs"):
        regions.pair(first, other, tmp_path)


def test_a_window_is_fed_with_what_lies_outside(runtime: Runtime, tmp_path: Path) -> None:
    original, fused = plants.fused(plants.encoder(1), tmp_path)
    pair = regions.pair(original, fused, tmp_path)
    output = "l0_attention_norm_out"
    site = pair.home[output]
    want = runtime.run(original, [FEEDS], tensors=[output])[0][output]
    for on in ((), (site,)):
        proto = regions.with_weights(pair.window(on, [output], {output}), tmp_path)
        names = [value.name for value in proto.graph.input]
        assert len(proto.graph.node) <= 3
        inner = [name for name in names if name not in FEEDS]
        feeds = {**FEEDS, **runtime.run(original, [FEEDS], tensors=inner)[0]}
        path = tmp_path / f"window{len(on)}.onnx"
        onnx.save(proto, path)
        np.testing.assert_allclose(runtime.run(path, [feeds])[0][output], want, atol=1e-5)
