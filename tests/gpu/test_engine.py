"""Engines on the GPU here: built with plugins and without, run, timed, and refused."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.bench import timing
from onnxfuse.engine import build as building
from onnxfuse.engine import prepare, trt
from onnxfuse.engine.manifest import Manifest, path_of
from onnxfuse.engine.run import Engine
from onnxfuse.errors import BadInput, MissingHere
from tests.engine import models

ROOT = Path(__file__).resolve().parents[2]
RANGE = "x:1x5x64..3x5x64..8x5x64"


@dataclass(frozen=True)
class Built:
    model: Path
    engine: Path
    manifest: Manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module", params=["float32", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fused(folder: Path, dtype: str) -> Built:
    """The small block with plugins, embedded, dynamic batch 1 to 8."""
    model = models.saved(models.block(dtype), folder, f"{dtype}.onnx")
    out = folder / f"{dtype}.engine"
    return Built(model, out, building.build(model, out, shapes=[RANGE], timing_cache=folder / "timing.cache"))


@pytest.fixture(scope="module")
def automatic(folder: Path, dtype: str, fused: Built) -> Built:
    """The same model without plugins: what TensorRT makes alone."""
    out = folder / f"{dtype}-automatic.engine"
    return Built(fused.model, out, building.build(fused.model, out, shapes=[RANGE], use_plugins=False))


@pytest.fixture
def cleanup() -> Iterator[None]:
    yield
    gc.collect()


def wanted(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The block's outputs in float32 from onnxruntime, from its functions."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(models.block().SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: array.astype(np.float32) for name, array in feeds.items()})
    return dict(zip((o.name for o in session.get_outputs()), outputs, strict=True))


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], dtype: str) -> None:
    """Float32 may be computed in TF32 by TensorRT, so its limit is that of 10 mantissa bits, too."""
    limit = {"float32": 1e-2, "float16": 2e-2}[dtype]
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype.name == dtype
        np.testing.assert_allclose(got[name].astype(np.float32), array, rtol=limit, atol=limit)


def python(code: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_fused_engine_agrees_with_onnxruntime(fused: Built, dtype: str, batch: int) -> None:
    feeds = models.feeds(dtype, batch=batch)
    with Engine.load(fused.engine) as engine:
        assert_close(engine.run(feeds), wanted(feeds), dtype)


def test_one_engine_serves_shapes_in_any_order(fused: Built, dtype: str) -> None:
    with Engine.load(fused.engine) as engine:
        for batch in (2, 8, 1, 5, 8):
            feeds = models.feeds(dtype, batch=batch)
            assert_close(engine.run(feeds), wanted(feeds), dtype)


def test_the_automatic_engine_agrees_too(automatic: Built, dtype: str) -> None:
    feeds = models.feeds(dtype)
    with Engine.load(automatic.engine) as engine:
        assert_close(engine.run(feeds), wanted(feeds), dtype)


def test_the_manifest_shows_the_plugins(fused: Built, automatic: Built, dtype: str) -> None:
    assert fused.manifest.plugins is not None
    assert fused.manifest.plugins.ops == ("BiasGelu", "SkipLayerNormalization")
    nodes = {node for layer in fused.manifest.layers for node in layer.nodes}
    assert {"norm_0", "gelu_0"} <= nodes, f"layers: {fused.manifest.layers}"
    plugin_layers = [layer for layer in fused.manifest.layers if "plugin" in layer.type.lower() or layer.plugin]
    assert len(plugin_layers) == 2, f"layers: {fused.manifest.layers}"
    short = {"float32": "fp32", "float16": "fp16"}[dtype]
    assert all(layer.outputs[0] == short for layer in plugin_layers)
    assert automatic.manifest.plugins is None
    assert not [layer for layer in automatic.manifest.layers if "plugin" in layer.type.lower()]
    assert fused.manifest.inputs[0].max == (8, 5, 64)


def test_a_fresh_process_needs_no_library(fused: Built, dtype: str, tmp_path: Path) -> None:
    feeds = models.feeds(dtype)
    np.savez(tmp_path / "in.npz", **feeds)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fresh", fused.engine, tmp_path / "in.npz", tmp_path / "out.npz"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as outputs:
        for name, array in wanted(feeds).items():
            np.testing.assert_allclose(outputs[name], array, rtol=2e-2, atol=2e-2)


def test_plugins_that_are_not_embedded_are_loaded_from_their_library(fused: Built, dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "apart.engine"
    manifest = building.build(fused.model, out, shapes=[RANGE], embed_plugins=False)
    assert manifest.plugins is not None
    assert not manifest.plugins.embedded
    code = (
        "import sys, numpy as np; from pathlib import Path; from onnxfuse.engine.run import Engine\n"
        "from tests.engine import models\n"
        "with Engine.load(Path(sys.argv[1])) as e: print(sorted(e.run(models.feeds(sys.argv[2]))))"
    )
    done = python(code, out, dtype)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['s', 'y']"


def test_a_plugin_whose_enqueue_fails_is_noticed(folder: Path, tmp_path: Path) -> None:
    """A library compiled for another architecture: its kernels cannot be launched here."""
    other = 80 if trt.gpu().sm != 80 else 90
    model = models.saved(models.block(), tmp_path)
    code = """
import sys
from pathlib import Path
from onnxfuse import plugins
from onnxfuse.engine import prepare, trt
from onnxfuse.engine.run import Engine
from onnxfuse.errors import OnnxfuseError
from tests.engine import models
model = Path(sys.argv[1])
ops = prepare.plugin_ops_in(model, plugins.PLUGIN_OPS)
library = plugins.build(int(sys.argv[2]))
shapes = ((1, 5, 64), (3, 5, 64), (8, 5, 64))
try:
    built = trt.build(trt.Order(prepare.for_parser(model, ops), model, {"x": shapes}, libraries=(library.path,),
    embed=False))
    Engine(built.engine, "wrong", manifest=None, host_code=False).run(models.feeds())
except OnnxfuseError as fault:
    print(type(fault).__name__, fault)
else:
    print("ran")
"""
    done = python(code, model, other)
    assert done.stdout.startswith(("EngineFault", "BadInput")), done.stdout + done.stderr


def test_engines_are_timed_side_by_side(fused: Built, automatic: Built, dtype: str) -> None:
    with Engine.load(fused.engine) as first, Engine.load(automatic.engine) as second:
        timed = timing.time_engines({"automatic": second, "fused": first}, models.feeds("float32"), samples=20, warm_up=0.05)
    assert timed.captured == {"automatic": True, "fused": True}, timed.marks
    assert {name: len(samples) for name, samples in timed.samples.items()} == {"automatic": 20, "fused": 20}
    assert all(0 < sample < 1000 for samples in timed.samples.values() for sample in samples)
    ratio = timed.ratio("automatic", "fused")
    assert ratio.low <= ratio.median <= ratio.high


def test_outputs_are_right_after_graph_replay(fused: Built, dtype: str) -> None:
    feeds = models.feeds(dtype)
    with Engine.load(fused.engine) as engine:
        timing.time_engines({"fused": engine}, feeds, samples=2, warm_up=0)
        assert_close(engine.outputs(), wanted(feeds), dtype)


def test_a_manifest_of_another_engine_or_gpu_is_refused(fused: Built, tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    engine.write_bytes(fused.engine.read_bytes() + b"\0")
    text = path_of(fused.engine).read_text()
    path_of(engine).write_text(text)
    with pytest.raises(BadInput, match="written for another engine"):
        Engine.load(engine)
    engine.write_bytes(fused.engine.read_bytes())
    data = json.loads(text)
    path_of(engine).write_text(json.dumps({**data, "sm": 75, "gpu": "NVIDIA T4"}))
    with pytest.raises(BadInput, match=r"built for NVIDIA T4 \(sm_75\)"):
        Engine.load(engine)
    path_of(engine).write_text(json.dumps({**data, "driver": "1.2.3"}))
    with Engine.load(engine) as loaded:
        assert [line for line in loaded.changed if line.startswith("driver: built with 1.2.3, here is ")]


def test_embedded_code_is_not_run_without_a_manifest(fused: Built, tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    engine.write_bytes(fused.engine.read_bytes())
    # In a fresh process: here the creators are registered already, and TensorRT needs no code from the engine.
    code = """
import sys
from pathlib import Path
from onnxfuse.engine.run import Engine
from onnxfuse.errors import BadInput
try:
    Engine.load(Path(sys.argv[1]))
except BadInput as fault:
    print("refused:", fault)
"""
    done = python(code, engine)
    assert done.stdout.startswith("refused:"), done.stdout + done.stderr
    assert "cannot load this engine" in done.stdout


def test_a_truncated_engine_is_refused(fused: Built, tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    engine.write_bytes(fused.engine.read_bytes()[:1000])
    with pytest.raises(BadInput, match="cannot load this engine"):
        Engine.load(engine)


def test_another_gpu_cannot_be_built_for(fused: Built, tmp_path: Path) -> None:
    other = "sm_80" if trt.gpu().sm != 80 else "sm_90"
    with pytest.raises(MissingHere, match="an engine is built on the GPU that it is for"):
        building.build(fused.model, tmp_path / "e", gpu=other, shapes=[RANGE])


def test_shapes_outside_the_profile_are_refused(fused: Built, dtype: str) -> None:
    with Engine.load(fused.engine) as engine:
        with pytest.raises(BadInput, match=r"input x has shape \(9, 5, 64\); the engine takes \(1, 5, 64\) to \(8, 5, 64\)"):
            engine.run(models.feeds(dtype, batch=9))
        feeds = models.feeds(dtype, batch=2)
        assert_close(engine.run(feeds), wanted(feeds), dtype)


def test_ctrl_c_stops_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    model = models.saved(models.block(), tmp_path)
    (tmp_path / "out").mkdir()
    code = """
import sys
from pathlib import Path
from onnxfuse.commands import faults
from onnxfuse.engine import build
said = []
def progress(step):
    if not said:
        said.append(print("building", flush=True))
try:
    build.build(Path(sys.argv[1]), Path(sys.argv[2]), shapes=[sys.argv[3]], progress=progress)
except KeyboardInterrupt as fault:
    sys.exit(faults.report(fault))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(model), str(tmp_path / "out" / "m.engine"), RANGE],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert list((tmp_path / "out").iterdir()) == []
    assert said.strip().endswith("error: interrupted")


def test_the_timing_cache_is_used_again(fused: Built, folder: Path, tmp_path: Path) -> None:
    cache = folder / "timing.cache"
    assert cache.stat().st_size > 0
    building.build(fused.model, tmp_path / "again.engine", shapes=[RANGE], timing_cache=cache)
    broken = tmp_path / "broken.cache"
    broken.write_bytes(b"nonsense" * 100)
    with pytest.raises(BadInput, match="timing cache cannot be used here"):
        building.build(fused.model, tmp_path / "third.engine", shapes=[RANGE], timing_cache=broken)


def test_the_command_builds(fused: Built, tmp_path: Path) -> None:
    out = tmp_path / "cli.engine"
    done = subprocess.run(
        [sys.executable, "-m", "onnxfuse", "build-engine", fused.model, "-o", out, "--shapes", RANGE],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plugins: BiasGelu, SkipLayerNormalization, embedded in the engine" in done.stdout
    assert out.is_file()
    assert path_of(out).is_file()


# Models without plugins, for what an engine can take and give ---------------------------------------------------------


def simple(nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[int | str]]], outputs: dict[str, tuple[int, list[int | str]]],
           weights: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *about) for name, about in inputs.items()],
        [helper.make_tensor_value_info(name, *about) for name, about in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def built(model: onnx.ModelProto, folder: Path, *shapes: str) -> Engine:
    path = models.saved(model, folder, "m.onnx")
    building.build(path, folder / "m.engine", shapes=shapes)
    return Engine.load(folder / "m.engine")


def test_integers_and_scalars(tmp_path: Path) -> None:
    model = simple(
        [helper.make_node("Gather", ["table", "ids"], ["rows"]), helper.make_node("Mul", ["rows", "scale"], ["y"])],
        {"ids": (TensorProto.INT64, ["n"]), "scale": (TensorProto.FLOAT, [])},
        {"y": (TensorProto.FLOAT, ["n", 4])},
        {"table": np.arange(40, dtype=np.float32).reshape(10, 4)},
    )
    with built(model, tmp_path, "ids:0..3..8") as engine:
        for ids in ([7, 0, 9], [], [1]):
            feeds = {"ids": np.array(ids, np.int64), "scale": np.array(2.0, np.float32)}
            want = np.arange(40, dtype=np.float32).reshape(10, 4)[feeds["ids"]] * 2
            np.testing.assert_array_equal(engine.run(feeds)["y"], want)


def test_bfloat16_outputs(tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["c"], to=TensorProto.BFLOAT16), helper.make_node("Add", ["c", "c"], ["y"])]
    model = simple(nodes, {"x": (TensorProto.FLOAT, [4])}, {"y": (TensorProto.BFLOAT16, [4])})
    with built(model, tmp_path) as engine:
        x = np.array([1.0, 2.5, -3.0, 0.1], np.float32)
        y = engine.run({"x": x})["y"]
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), 2 * x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_outputs_whose_size_is_known_only_after_the_run(tmp_path: Path) -> None:
    model = simple(
        [helper.make_node("NonZero", ["x"], ["where"]), helper.make_node("Add", ["x", "x"], ["twice"])],
        {"x": (TensorProto.FLOAT, [3, 4])},
        {"where": (TensorProto.INT64, [2, "n"]), "twice": (TensorProto.FLOAT, [3, 4])},
    )
    with built(model, tmp_path) as engine:
        for seed in range(3):
            x = np.random.default_rng(seed).integers(0, 2, (3, 4)).astype(np.float32)
            got = engine.run({"x": x})
            np.testing.assert_array_equal(got["where"], np.stack(np.nonzero(x)))
            np.testing.assert_array_equal(got["twice"], 2 * x)
        assert not engine.capturable
        timed = timing.time_engines({"e": engine}, {"x": x}, samples=2, warm_up=0)
    assert timed.captured == {"e": False}
    assert "no CUDA graph" in timed.marks[0]


def test_external_data(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model = simple(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        {"x": (TensorProto.FLOAT, [64, 64])},
        {"y": (TensorProto.FLOAT, [64, 64])},
        {"w": weights},
    )
    path = tmp_path / "sub" / "ext.onnx"
    path.parent.mkdir()
    onnx.save_model(model, str(path), save_as_external_data=True, location="ext.bin", size_threshold=0)
    building.build(path, tmp_path / "m.engine")
    with Engine.load(tmp_path / "m.engine") as engine:
        x = np.ones((64, 64), np.float32)
        np.testing.assert_array_equal(engine.run({"x": x})["y"], x + weights)


def test_what_tensorrt_cannot_take_is_one_line_with_the_node(tmp_path: Path) -> None:
    model = simple(
        [helper.make_node("Det", ["x"], ["y"], name="determinant")],
        {"x": (TensorProto.FLOAT, [3, 3])},
        {"y": (TensorProto.FLOAT, [])},
    )
    path = models.saved(model, tmp_path)
    with pytest.raises(BadInput, match=r"TensorRT cannot take the model: .*determinant") as caught:
        building.build(path, tmp_path / "m.engine")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.engine").exists()


def test_an_input_that_holds_a_shape_is_refused(tmp_path: Path) -> None:
    model = simple(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        {"x": (TensorProto.FLOAT, [4]), "shape": (TensorProto.INT64, [2])},
        {"y": (TensorProto.FLOAT, ["a", "b"])},
    )
    with pytest.raises(BadInput, match="input shape holds a shape"):
        building.build(models.saved(model, tmp_path), tmp_path / "m.engine")


def test_loading_and_closing_gives_memory_back(fused: Built, dtype: str, cleanup: None) -> None:
    driver = trt.activate()

    def once() -> None:
        with Engine.load(fused.engine) as engine:
            engine.run(models.feeds(dtype))
        gc.collect()

    def lost() -> int:
        before, _ = driver.mem_get_info()
        for _ in range(5):
            once()
        return int(before - driver.mem_get_info()[0])

    once()
    # Other processes take memory of the same GPU now and then; what is not given back here is missing in every round.
    assert min(lost() for _ in range(4)) < 32 << 20


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here")
def test_torch_in_the_same_process(fused: Built, dtype: str) -> None:
    code = """
import sys
from pathlib import Path
import torch
a = torch.ones(4, device="cuda")
from onnxfuse.engine.run import Engine
from tests.engine import models
with Engine.load(Path(sys.argv[1])) as engine:
    outputs = engine.run(models.feeds(sys.argv[2]))
    b = a + 1
    again = engine.run(models.feeds(sys.argv[2]))
assert all((outputs[n] == again[n]).all() for n in outputs)
print(float(b.sum()))
"""
    done = python(code, fused.engine, dtype)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "8.0"


def test_the_bytes_for_the_parser_are_what_the_engine_was_made_of(fused: Built) -> None:
    model = onnx.load_from_string(prepare.for_parser(fused.model, frozenset(fused.manifest.plugins.ops)))  # type: ignore[union-attr]
    assert {node.op_type for node in model.graph.node if node.domain == "onnxfuse"} == set(fused.manifest.plugins.ops)  # type: ignore[union-attr]
