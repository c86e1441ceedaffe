"""Times by layer on the GPU here: of an encoder layer as TensorRT fuses it alone, and with its residual norms as plugins."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import pipeline
from onnxfuse.bench import layers, timing
from onnxfuse.bench.layers import LayerTime
from onnxfuse.engine import build
from onnxfuse.engine.run import Engine

WIDTH, ROWS = 256, 128


def encoder_layer() -> onnx.ModelProto:
    """x[1, 128, 256] fp16: projection, residual and LayerNorm; two products with a GELU between them, residual and LayerNorm."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 1 / 16, (WIDTH, WIDTH)) for name in ("w0", "w1", "w2")}
    weights |= {name: rng.normal(0, 0.1, WIDTH) for name in ("b0", "b1", "b2", "beta0", "beta1")}
    weights |= {name: rng.normal(1, 0.1, WIDTH) for name in ("gamma0", "gamma1")}
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["m0"], "project"),
        helper.make_node("Add", ["m0", "b0"], ["p0"], "project_bias"),
        helper.make_node("Add", ["p0", "x"], ["s0"], "residual"),
        helper.make_node("LayerNormalization", ["s0", "gamma0", "beta0"], ["n0"], "norm"),
        helper.make_node("MatMul", ["n0", "w1"], ["m1"], "fc1"),
        helper.make_node("Add", ["m1", "b1"], ["p1"], "fc1_bias"),
        helper.make_node("Gelu", ["p1"], ["g"], "gelu"),
        helper.make_node("MatMul", ["g", "w2"], ["m2"], "fc2"),
        helper.make_node("Add", ["m2", "b2"], ["p2"], "fc2_bias"),
        helper.make_node("Add", ["p2", "n0"], ["s1"], "residual_1"),
        helper.make_node("LayerNormalization", ["s1", "gamma1", "beta1"], ["y"], "norm_1"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, ROWS, WIDTH]) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(value.astype(np.float16), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "encoder_layer", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def rewritten(folder: Path) -> tuple[Path, Path, dict[str, tuple[str, ...]]]:
    """The model for TensorRT alone, the one with fused norms, and what each fused node stands for."""
    source = folder / "encoder.onnx"
    onnx.save(encoder_layer(), source)
    pipeline.optimize(source, folder / "automatic.onnx", policy="none", check=False)
    done = pipeline.optimize(source, folder / "fused.onnx", policy="all", only=["skip_layernorm"], check=False)
    sources = layers.sources_of(decision.to_dict() for decision in done.decisions if decision.fused)
    return folder / "automatic.onnx", folder / "fused.onnx", sources


class Profiled(NamedTuple):
    automatic: tuple[LayerTime, ...]
    fused: tuple[LayerTime, ...]
    sources: dict[str, tuple[str, ...]]
    fused_us: float
    """What a run of the fused engine takes when nothing is profiled."""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder = tmp_path_factory.mktemp("layers")
    automatic, fused, sources = rewritten(folder)
    feeds = {"x": np.random.default_rng(1).standard_normal((1, ROWS, WIDTH)).astype(np.float16)}
    found = []
    for model in (automatic, fused):
        engine = model.with_suffix(".engine")
        build.build(model, engine, timing_cache=folder / "timing.cache", use_plugins=model is fused)
        with Engine.load(engine) as loaded:
            before = loaded.run(feeds)["y"]
            found.append(layers.profile(loaded, feeds, runs=20))
            np.testing.assert_array_equal(loaded.run(feeds)["y"], before)  # and runs as before after it
    with Engine.load(fused.with_suffix(".engine")) as loaded:
        timed = timing.time_engines({"fused": loaded}, feeds, samples=50)
    return Profiled(found[0], found[1], sources, 1000 * timed.median("fused").median)


def test_every_layer_that_ran_is_in_the_table(profiled: Profiled) -> None:
    """What the profiler calls a layer is what the inspector calls it: without that no time has nodes."""
    for table in (profiled.automatic, profiled.fused):
        assert not [layer for layer in table if not layer.type], table
        assert sum(layer.us > 0 for layer in table) >= 3, table


def test_plugins_are_layers_with_their_time_and_node(profiled: Profiled) -> None:
    plugins = [layer for layer in profiled.fused if layers.is_plugin(layer)]
    assert [layer.kernel for layer in plugins] == ["SkipLayerNormalization"] * 2, profiled.fused
    assert sorted(node for layer in plugins for node in layer.nodes) == sorted(profiled.sources)
    assert all(layer.us > 0 for layer in plugins)
    assert not [layer for layer in profiled.automatic if layers.is_plugin(layer)]


def test_nodes_are_mapped(profiled: Profiled) -> None:
    for table in (profiled.automatic, profiled.fused):
        nodes = {node for layer in table if layer.us > 0 for node in layer.nodes}
        assert {"project", "fc1", "fc2"} <= nodes, table
        assert not [node for node in nodes if "ONNX Layer" in node or not node.isprintable()], nodes


def test_the_sum_is_near_what_the_engine_takes(profiled: Profiled) -> None:
    """Microseconds and not milli- or nanoseconds; a profiled kernel takes longer by its events, an engine by gaps between kernels."""
    assert profiled.fused_us / 10 < sum(layer.us for layer in profiled.fused) < 30 * profiled.fused_us


def test_what_the_plugins_did(profiled: Profiled) -> None:
    found = layers.compare(profiled.automatic, profiled.fused, profiled.sources)
    assert found.plugins == 2
    replaced = {plugin for change in found.changed for plugin in change.by}
    assert replaced == {layer.name for layer in profiled.fused if layers.is_plugin(layer)}
    assert all(change.automatic for change in found.changed if change.by), found.changed
    parts = sum(change.us for change in found.changed) + sum(one.us for one in found.added) - sum(one.us for one in found.removed)
    assert found.fused_us - found.automatic_us == pytest.approx(parts + found.unchanged_us)
    assert all(set(cut.by) <= replaced and cut.pieces for cut in found.cut), found.cut
    assert "2 plugins " in found.summary
