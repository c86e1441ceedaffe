"""Models of any size: work grows with the nodes alone, weights stay where they are. Steps and bytes are counted, nothing is timed."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import synthetic
from onnxfuse import pipeline
from onnxfuse.errors import BadInput
from onnxfuse.fusions import REGISTRY
from onnxfuse.fusions.base import Index
from onnxfuse.graph import garbage, read
from onnxfuse.graph.model import Model

ROOT = Path(__file__).resolve().parent.parent


def counted(work: Callable[[], object]) -> int:
    """How many calls of functions, Python's and C's, `work` makes in this process."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    work()  # what is loaded, looked up or cached the first time is no work of the model's
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_a_node(path: Path, nodes: int) -> float:
    model = synthetic.by_nodes(nodes)
    onnx.save(model, path)
    return counted(lambda: pipeline.optimize(path, path.with_name("out.onnx"), policy="all", check=False)) / len(model.graph.node)


def test_work_grows_with_the_nodes_and_no_faster(tmp_path: Path) -> None:
    small, large = (calls_a_node(tmp_path / f"{nodes}.onnx", nodes) for nodes in (600, 4800))
    assert large <= 1.1 * small


def test_what_many_nodes_share_costs_no_more_with_more_of_them(tmp_path: Path) -> None:
    """A bias, an epsilon and a weight that every layer reads."""

    def calls(layers: int) -> float:
        nodes, x = [], "x"
        for i in range(layers):
            nodes += [
                helper.make_node("MatMul", [x, "w"], [f"m{i}"]),
                helper.make_node("Add", [f"m{i}", "b"], [f"a{i}"]),
                helper.make_node("Identity", ["b"], [f"i{i}"]),
                helper.make_node("Sigmoid", [f"a{i}"], [f"s{i}"]),
                helper.make_node("Mul", [f"a{i}", f"s{i}"], [f"y{i}"]),
                helper.make_node("Add", [f"y{i}", f"i{i}"], [f"z{i}"]),
            ]
            x = f"z{i}"
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("x", x)]
        weights = [numpy_helper.from_array(np.ones((4, 4), np.float32), "w"), numpy_helper.from_array(np.ones(4, np.float32), "b")]
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
        path = tmp_path / f"{layers}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        return counted(lambda: pipeline.optimize(path, tmp_path / "out.onnx", policy="all", check=False)) / len(nodes)

    assert calls(800) <= 1.1 * calls(100)


def test_folding_weights_costs_no_more_with_more_readers_or_longer_chains(tmp_path: Path) -> None:
    """Many that read one weight and together would make more than it is; a chain of which each link makes more than it frees."""

    def calls(count: int) -> float:
        nodes = [helper.make_node("Transpose", ["w"], [f"t{i}"]) for i in range(count)]
        nodes += [helper.make_node("MatMul", ["x", f"t{i}"], [f"y{i}"]) for i in range(count)]
        nodes += [helper.make_node("Concat", [f"c{i}", "v"], [f"c{i + 1}"], axis=0) for i in range(count)]
        weights = [numpy_helper.from_array(np.ones((160, 160), np.float32), name) for name in ("w", "v", "c0")]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 160]) for name in (f"y{i}" for i in range(count))]
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 160])]
        nodes.append(helper.make_node("Gather", [f"c{count}", "i"], ["z"]))
        inputs.append(helper.make_tensor_value_info("i", TensorProto.INT64, [1]))
        outputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 160]))
        graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
        path = tmp_path / f"{count}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        return counted(lambda: pipeline.optimize(path, tmp_path / "out.onnx", check=False)) / count

    assert calls(400) <= 1.1 * calls(50)


def test_a_graph_is_indexed_again_only_after_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Model] = []
    original = Index.of
    monkeypatch.setattr(Index, "of", classmethod(lambda cls, model: built.append(model) or original(model)))  # type: ignore[func-returns-value]
    onnx.save(synthetic.by_nodes(120), tmp_path / "m.onnx")
    done = pipeline.optimize(tmp_path / "m.onnx", None, policy="all")
    changed = {decision.site.fusion for decision in done.decisions if decision.fused}
    assert 0 < len(built) <= 2 * len(changed) + 1  # folding fusions look twice
    built.clear()
    pipeline.optimize(tmp_path / "m.onnx", None, skip=[fusion.name for fusion in REGISTRY])
    assert len(built) == 1


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """onnxruntime sessions made while the test runs."""
    made: list[object] = []
    original = onnxruntime.InferenceSession

    def session(*arguments: Any, **options: Any) -> Any:
        made.append(original(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    return made


def folded(text: str, path: Path) -> list[str]:
    path.write_bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}').SerializeToString())
    pipeline.optimize(path, path.with_name("out.onnx"), check=False)
    return [node.op_type for node in onnx.load(path.with_name("out.onnx")).graph.node]


def test_shapes_and_types_are_folded_without_a_session(tmp_path: Path, sessions: list[object]) -> None:
    left = folded(
        """g (float[N, 2, 6] x) => (float[N, 3, 4] y) <float[3] w = {1.0, 2.0, 3.0}, int64[1] three = {3}> {
        one = Constant <value_int: int = 1> ()
        axes = Constant <value_ints: ints = [0]> ()
        four = Add(three, one)
        minus = Constant <value_ints: ints = [-1]> ()
        target = Concat <axis = 0> (minus, three, four)
        r = Reshape(x, target)
        i = Cast <to = 7> (w)
        f = Cast <to = 1> (i)
        u = Unsqueeze(f, axes)
        t = Transpose <perm = [1, 0]> (u)
        y = Mul(r, t)
    }""",
        tmp_path / "m.onnx",
    )
    assert left == ["Reshape", "Mul"]
    assert not sessions


def test_all_that_needs_the_runtime_shares_one_session(tmp_path: Path, sessions: list[object]) -> None:
    chains = "\n".join(f"e{i} = Exp(c)\n p{i} = Pow(e{i}, c)\n x{i + 1} = Mul(x{i}, p{i})" for i in range(20))
    left = folded(f"g (float[3] x0) => (float[3] x20) <float[3] c = {{1.0, 2.0, 3.0}}> {{ {chains} }}", tmp_path / "m.onnx")
    assert left == ["Mul"] * 20
    assert len(sessions) == 1


def test_large_constants_of_branches_are_read_once_and_shared(tmp_path: Path) -> None:
    """They are taken out of bodies, but for names that are given twice."""
    big = numpy_helper.from_array(np.arange(1024, dtype=np.float32), "v")

    def branch(name: str, constant: str) -> onnx.GraphProto:
        nodes = [helper.make_node("Constant", [], [constant], value=big), helper.make_node("Add", ["x", constant], [name])]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1024])])

    def model(*constants: str) -> onnx.ModelProto:
        bodies = dict(zip(("then_branch", "else_branch"), map(branch, ("a", "b"), constants), strict=True))
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1024]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1024])]
        graph = helper.make_graph([helper.make_node("If", ["c"], ["y"], **bodies)], "g", inputs, outputs)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    for number, constants in enumerate([("k", "l"), ("k", "k")]):
        path, out = tmp_path / f"{number}.onnx", tmp_path / f"{number}-out.onnx"
        onnx.save(model(*constants), path)
        assert len(read.load(path).graph.nodes) == 1
        pipeline.optimize(path, out, check=False)
        onnx.checker.check_model(str(out), full_check=True)
        for chosen in (True, False):
            feeds = {"x": np.ones(1024, np.float32), "c": np.array(chosen)}
            (got,) = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"]).run(None, feeds)
            np.testing.assert_array_equal(got, np.arange(1024, dtype=np.float32) + 1)


def test_weights_shared_through_identity_stay_one(tmp_path: Path) -> None:
    """Layers that share their weights, each behind an Identity, and a transposed reader: as in one public model, which grows eightfold
    where they are copied."""
    nodes, x = [], "x"
    for i in range(12):
        nodes += [
            helper.make_node("Identity", ["w"], [f"w{i}"]),
            helper.make_node("Transpose", [f"w{i}"], [f"t{i}"], perm=[1, 0]),
            helper.make_node("MatMul", [x, f"w{i}"], [f"m{i}"]),
            helper.make_node("MatMul", [f"m{i}", f"t{i}"], [f"n{i}"]),
            helper.make_node("Identity", ["b"], [f"b{i}"]),
            helper.make_node("Add", [f"n{i}", f"b{i}"], [f"y{i}"]),
        ]
        x = f"y{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 512]) for name in ("x", x)]
    weights = [numpy_helper.from_array(np.full((512, 512), 0.001, np.float32), "w"), numpy_helper.from_array(np.ones(512, np.float32), "b")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    path, out = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    done = pipeline.optimize(path, out, policy="all")
    assert done.agrees
    assert out.stat().st_size <= 1.05 * path.stat().st_size
    assert "Identity" not in [node.op_type for node in onnx.load(out).graph.node]


# -------------------------------------------------------------------------------------------------------- large weights


def in_child(path: Path, out: Path, tool: str = "onnxfuse") -> dict[str, Any]:
    """Optimizes without the check (or has another tool rewrite) in a new process; its most memory, and onnx.checker's verdict."""
    command = [sys.executable, "-m", "benchmarks.one_rewrite", tool, str(path), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "peak_bytes" in found, found
    return found


def test_memory_is_no_more_than_graph_surgeon_alone_takes(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(synthetic.by_nodes(2000), path)
    ours, surgeon = (in_child(path, tmp_path / "out.onnx", tool)["peak_bytes"] for tool in ("onnxfuse", "graph-surgeon in + out"))
    assert ours <= surgeon


def check_round_trip(folder: Path, size: int) -> None:
    path, out = folder / "big.onnx", folder / "out.onnx"
    synthetic.by_bytes(path, size)
    data, copied = folder / "big.onnx.data", folder / "out.onnx.data"
    found = in_child(path, out)
    assert found["invalid"] is None
    assert found["peak_bytes"] <= 0.1 * data.stat().st_size
    model = onnx.load(out, load_external_data=False)
    assert out.stat().st_size < 1 << 20
    assert {"LayerNormalization", "SkipLayerNormalization"} & {node.op_type for node in model.graph.node}
    external = [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    total = 0
    with open(copied, "rb") as file:
        for tensor in external:
            place = {entry.key: entry.value for entry in tensor.external_data}
            assert place["location"] == copied.name
            file.seek(int(place["offset"]))
            if len(tensor.dims) == 2:
                assert np.frombuffer(file.read(8), np.float32).tolist() == [0.5, 0.0]  # as the generator wrote it
                total += int(place["length"])
    assert total == sum(4 * tensor.dims[0] * tensor.dims[1] for tensor in external if len(tensor.dims) == 2)
    assert total >= size


def test_external_weights_are_not_held_in_memory(tmp_path: Path) -> None:
    check_round_trip(tmp_path, 300_000_000)


def test_a_model_beyond_two_gigabytes_is_optimized(tmp_path: Path) -> None:
    """The weights are a hole in a file, but are written in full."""
    size = 2_200_000_000
    if shutil.disk_usage(tmp_path).free < 2 * size:
        pytest.skip(f"needs {2 * size / 1e9:.1f} GB in {tmp_path}")
    try:
        check_round_trip(tmp_path, size)
    finally:
        for file in tmp_path.glob("*.data"):
            file.unlink()


# ------------------------------------------------------------------------------------------------------------- garbage


def test_garbage_collection_is_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with garbage.paused():
        with garbage.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_garbage_collection_goes_on_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        pipeline.optimize(tmp_path / "none.onnx", None)
    assert gc.isenabled()
