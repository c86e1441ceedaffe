"""Layers: what the profiler reports becomes microseconds a layer, and two engines' layers are lined up by their nodes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from onnxfuse.bench import layers
from onnxfuse.bench.layers import Change, Cut, LayerTime
from onnxfuse.engine import manifest, trt
from onnxfuse.engine.manifest import Layer
from onnxfuse.engine.run import Engine
from onnxfuse.engine.trt import EngineFault
from onnxfuse.report import terminal

TABLES = json.loads((Path(__file__).parent / "data" / "paraphrase-minilm-layers.json").read_text())


def layer(name: str, nodes: str = "", us: float = 1.0, kernel: str = "", kind: str = "kgen") -> LayerTime:
    return LayerTime(name, kind, tuple(nodes.split()), us, kernel)


# One region: a matrix product with its GELU, a residual norm, another product; and a convolution outside it.
AUTOMATIC = [
    layer("conv", "conv", 5.0, "conv_a", "CaskConvolution"),
    layer("__myl_FcGel_myl0_0", "fc1 gelu", 9.5, "gemm_gelu", "fusion"),
    layer("fc2_myl0_1", "fc2", 12.0, "gemm_a", "gemm"),
    layer("__myl_AddMea_myl0_2", "add norm", 4.5, "norm_a"),
    layer("out_myl0_3", "out", 8.0, "gemm_b", "gemm"),
]
FUSED = [
    layer("conv", "conv", 5.25, "conv_a", "CaskConvolution"),
    layer("__myl_FcGel_myl0_0", "fc1 gelu", 9.5, "gemm_gelu", "fusion"),
    layer("fc2_myl0_1", "fc2", 13.5, "gemm_c", "gemm"),
    layer("__myl_ResTra_myl0_2", "fc2", 2.0),
    layer("weight", "", 0.0, kind="Constant"),
    layer("skip_layernorm", "skip_layernorm", 4.0, "SkipLayerNormalization", "PluginV3"),
    layer("__mye_myl4_0", "", 0.0, kind="shape_call"),
    layer("out_myl4_1", "out", 8.0, "gemm_b", "gemm"),
]
SOURCES = {"skip_layernorm": ["add", "norm"]}


def test_a_plugin_in_a_region_cuts_it_and_what_it_costs_adds_up() -> None:
    found = layers.compare(AUTOMATIC, FUSED, SOURCES)
    assert found.cut == (Cut("region", "myl0", 4, 6, 34.0, ("skip_layernorm",), 2),)
    assert [one.name for one in found.added] == ["__myl_ResTra_myl0_2"]
    assert found.removed == ()
    assert found.changed == (
        Change(("fc2",), (), ("gemm_a",), ("gemm_c",), 12.0, 13.5),
        Change(("add", "norm", "skip_layernorm"), ("skip_layernorm",), ("norm_a",), ("SkipLayerNormalization",), 4.5, 4.0),
    )
    assert (found.plugins, found.automatic_us, found.fused_us, found.unchanged_us) == (1, 39.0, 42.25, 0.25)
    assert found.summary == (
        "1 plugin cut 1 region of 6 nodes into 2 pieces. The plugins and what shared kernels with the nodes they replace took 4.0 us "
        "instead of 4.5; 1 copy appeared, 2.0 us; other kernels were chosen in 1 place, +1.5 us; layers that stayed the same, +0.2 us; "
        "in all 39.0 us became 42.2."
    )


def test_the_same_engine_is_no_difference() -> None:
    found = layers.compare(AUTOMATIC, AUTOMATIC)
    assert (found.cut, found.added, found.removed, found.changed, found.unchanged_us) == ((), (), (), (), 0.0)
    assert found.summary.startswith("No layer of the fused engine is a plugin.")


def test_the_automatic_engine_of_the_fused_model_names_parts() -> None:
    """Without plugins TensorRT gets the function's body: nodes named FUSED/PART."""
    automatic = [*AUTOMATIC[:3], layer("__myl_AddMea_myl0_2", "skip_layernorm/Add skip_layernorm/Mean", 4.5, "norm_a"), AUTOMATIC[4]]
    for sources in (None, SOURCES):
        found = layers.compare(automatic, FUSED, sources)
        assert found.cut == (Cut("region", "myl0", 4, 5, 34.0, ("skip_layernorm",), 2),)
        assert [change.by for change in found.changed] == [(), ("skip_layernorm",)]


def test_names_that_begin_alike_are_not_parts_of_each_other() -> None:
    automatic = [
        layer("a", "norm_1/Add norm_1/Mul", 1.0, "k"),
        layer("b", "norm/Add norm/Mul", 2.0, "k"),
        layer("c", "/norm/x normal/y", 3.0, "k"),
    ]
    fused = [layer("norm", "norm", 1.0, "P", "PluginV3"), layer("norm_1", "norm_1", 1.0, "P", "PluginV3"), automatic[2]]
    found = layers.compare(automatic, fused)
    assert [(change.by, change.automatic_us) for change in found.changed] == [(("norm_1",), 1.0), (("norm",), 2.0)]
    assert found.cut == ()
    assert "took the place of whole kernels and cut nothing" in found.summary


def test_a_plugin_that_takes_the_end_of_a_kernel_splits_it() -> None:
    automatic = [layer("fc + gelu", "fc gelu", 9.0, "gemm_gelu", "fusion")]
    fused = [layer("fc", "fc", 8.0, "gemm", "gemm"), layer("bias_gelu", "bias_gelu", 3.0, "BiasGelu", "PluginV3")]
    found = layers.compare(automatic, fused, {"bias_gelu": ["gelu"]})
    assert found.cut == (Cut("kernel", "fc + gelu", 1, 2, 9.0, ("bias_gelu",), 1),)
    (change,) = found.changed
    assert (change.automatic, change.fused, change.us) == (("gemm_gelu",), ("gemm", "BiasGelu"), 2.0)
    assert "split 1 kernel that computed more" in found.summary


def test_a_fused_node_of_fused_nodes_stands_for_all_of_them() -> None:
    automatic = [layer("x", "a b c", 3.0, "k1"), layer("y", "d", 3.0, "k2")]
    fused = [layer("outer", "outer", 2.0, "P", "PluginV3"), layer("y", "d", 3.0, "k2")]
    found = layers.compare(automatic, fused, {"inner": ["a", "b"], "outer": ["inner", "c"], "loop": ["loop"]})
    assert [(change.by, change.automatic, change.us) for change in found.changed] == [(("outer",), ("k1",), -1.0)]
    assert found.cut == ()


def test_three_products_merged_into_one_are_one_change() -> None:
    """A fusion without a plugin: qkv_pack."""
    automatic = [layer(name, name, 2.0, "small", "gemm") for name in ("q", "k", "v")]
    fused = [layer("qkv", "qkv_pack qkv_pack_bias", 5.0, "large", "gemm")]
    (change,) = layers.compare(automatic, fused, {"qkv_pack": ["q", "k", "v"]}).changed
    assert (change.automatic, change.fused, change.us, change.by) == (("small",) * 3, ("large",), -1.0, ())


@pytest.mark.parametrize(
    ("one", "copies"),
    [
        (layer("Reformatting CopyNode for Input Tensor 0 to conv", kind="Reformat"), True),
        (layer("x_half_cast", kind="Reformat"), True),
        (layer("Reformatted Output Tensor 0 to conv", kind=""), True),
        (layer("cast_hvar^35444i64_myl0_8", kind="cast"), True),
        (layer("__myl_MovResTra_myl13_1"), True),
        (layer("__myl_MoveTran_myl13_1"), True),
        (layer("__myl_ResAddTra_myl13_1"), False),
        (layer("__myl_SumCas_myl3_1"), False),
        (layer("_gemm_mha_v2_myl0_11"), False),
        (layer("conv", kind="CaskConvolution"), False),
    ],
)
def test_what_only_moves_data(one: LayerTime, copies: bool) -> None:
    assert layers.is_copy(one) is copies


def test_copies_of_both_engines_are_not_counted_whatever_their_numbers() -> None:
    automatic = [
        layer("__myl_Cas_myl0_1", us=2.0),
        layer("__myl_Cas_myl0_2", us=2.0),
        layer("cast_hvar^354i64_myl0_8", us=1.0, kind="cast"),
    ]
    fused = [layer("__myl_Cas_myl40_1", us=3.0), layer("Reformatting CopyNode for x", us=4.0, kind="Reformat")]
    found = layers.compare(automatic, fused)
    assert [one.name for one in found.added] == ["Reformatting CopyNode for x"]
    assert [one.name for one in found.removed] == ["__myl_Cas_myl0_2", "cast_hvar^354i64_myl0_8"]
    assert found.unchanged_us == pytest.approx(1.0)


def test_of_real_engines() -> None:
    """What can be counted in the table by hand: 9 plugins between 10 parts, and three GELUs that had been in their matmul's kernel."""
    automatic, fused = (
        [
            LayerTime(name, kind, tuple(nodes), 0.0 if kind in ("Constant", "shape_call") else 2.0, kernel)
            for name, kind, kernel, nodes in rows
        ]
        for rows in (TABLES["automatic"], TABLES["fused"])
    )
    found = layers.compare(automatic, fused)
    assert (len(automatic), len(fused), found.plugins) == (41, 81, 9)
    region, *kernels = found.cut
    assert (region.what, region.name, region.layers, region.pieces, len(region.by)) == ("region", "myl0", 41, 10, 9)
    assert [cut.by for cut in kernels] == [("bias_gelu",), ("bias_gelu_1",), ("bias_gelu_2",), ("skip_layernorm_5",)]
    assert [one.name for one in found.added] == [
        "__myl_ResTra_myl0_11", "__myl_MovResTra_myl13_1", "__myl_ResTra_myl13_9", "__myl_MovResTra_myl26_1", "__myl_ResTra_myl26_9",
        "__myl_Cas_myl40_2",
    ]  # fmt: skip
    assert found.unchanged_us == pytest.approx(0.0)
    gelus = [change for change in found.changed if change.by and change.by[0].startswith("bias_gelu")]
    assert [(len(change.automatic), len(change.fused), change.us) for change in gelus] == [(1, 2, 2.0)] * 3


def test_the_form_of_reports() -> None:
    found = layers.report(AUTOMATIC, FUSED, SOURCES)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["automatic"][0] == {"name": "conv", "type": "CaskConvolution", "nodes": ["conv"], "us": 5.0, "kernel": "conv_a"}
    assert {"cut", "added", "changed", "automatic_us", "fused_us", "summary"} <= found["diff"].keys()
    assert found["diff"]["cut"][0]["by"] == ["skip_layernorm"]
    assert found["diff"]["changed"][0]["us"] == 1.5
    sites = [{"node": "skip_layernorm", "nodes": ["add", "norm"]}, {"node": None, "nodes": ["x"]}]
    assert layers.sources_of(sites) == {"skip_layernorm": ("add", "norm")}


def test_on_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=160)
    part = layers.report(AUTOMATIC, FUSED, SOURCES)
    terminal._layers({"layers": part}, console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert "fc2 gemm_a gemm_c 12.0 to 13.5 +1.5" in lines
    assert "skip_layernorm norm_a SkipLayerNormalization 4.5 to 4.0 -0.5" in lines
    assert "1 plugin cut 1 region of 6 nodes into 2 pieces." in " ".join(lines)
    terminal._layers({"layers": {"automatic": [], "fused": []}}, console)
    terminal._layers({}, console)


# Profiling, with a stand-in for TensorRT ----------------------------------------------------------------------------------


class Context:
    """Reports one run after the other to its profiler: (layer, milliseconds)."""

    def __init__(self, runs: list[list[tuple[str, float]]] | None) -> None:
        self.profiler: Any = None
        self.runs = iter(runs or [])

    def infer_shapes(self) -> list[str]:
        return []

    def execute_async_v3(self, stream: int) -> bool:
        for name, ms in next(self.runs, ()):
            self.profiler.report_layer_time(name, ms)
        return self.profiler is not None


def engine(monkeypatch: pytest.MonkeyPatch, contexts: list[Any], table: list[dict[str, Any]]) -> Engine:
    """An engine whose contexts these are, the first one that it was loaded with."""

    class Base:
        INTERNAL_ERROR = ERROR = WARNING = 0

    monkeypatch.setattr(trt, "tensorrt", lambda: SimpleNamespace(IProfiler=Base))
    monkeypatch.setattr(
        trt, "activate", lambda: SimpleNamespace(Stream=lambda: SimpleNamespace(handle=7, synchronize=lambda: None), Error=OSError)
    )
    monkeypatch.setattr(trt, "deserialize", lambda *_: (object(), SimpleNamespace(create_execution_context=lambda: contexts.pop(0))))
    monkeypatch.setattr(trt, "tensors", lambda _: ())
    monkeypatch.setattr(trt, "layer_table", lambda _: tuple(table))
    return Engine(b"", "m.engine", manifest=None, host_code=False)


NODES = {"Metadata": "[ONNX Layer: /a/MatMul]\x1f[ONNX Layer: /a/Add]"}
TABLE = [
    {"Name": "weight", "LayerType": "Constant", "TacticValue": "0x0000000000000000"},
    {"Name": "a_myl0_1", "LayerType": "gemm", "TacticName": "sm80_xmma", **NODES},
    {"Name": "norm", "LayerType": "PluginV3", "PluginType": "SkipLayerNormalization", "Metadata": "[ONNX Layer: norm]"},
]


def test_a_layer_takes_the_median_of_its_runs_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds become microseconds; a layer that ran twice in a run, as in a loop, counts twice."""
    first = Context(None)
    runs = [[("a_myl0_1", a), ("norm", 0.002), ("norm", 0.001), ("unlisted", 0.5)] for a in (99.0, 0.008, 0.011, 0.009)]
    loaded = engine(monkeypatch, [first, Context(runs)], TABLE)
    found = layers.profile(loaded, {}, runs=3)
    assert [(one.name, one.type, one.nodes, one.kernel) for one in found] == [
        ("weight", "Constant", (), ""),
        ("a_myl0_1", "gemm", ("/a/MatMul", "/a/Add"), "sm80_xmma"),
        ("norm", "PluginV3", ("norm",), "SkipLayerNormalization"),
        ("unlisted", "", (), ""),
    ]
    assert [one.us for one in found] == pytest.approx([0.0, 9.0, 3.0, 500.0])
    assert first.profiler is None
    with pytest.raises(EngineFault, match="bind inputs first"):
        loaded.enqueue()


def test_an_engine_is_as_it_was_after_a_profile_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, failing = Context(None), Context([])
    failing.execute_async_v3 = lambda stream: False  # type: ignore[method-assign]
    loaded = engine(monkeypatch, [first, failing], TABLE)
    with pytest.raises(EngineFault, match="enqueue failed"):
        layers.profile(loaded, {}, runs=2)
    assert loaded._context is first


def test_no_memory_for_a_second_context(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = engine(monkeypatch, [Context(None), None], TABLE)
    with pytest.raises(EngineFault, match="no execution context"):
        layers.profile(loaded, {})


def test_nodes_of_a_layer_are_read_with_either_separator() -> None:
    for separator in ("\x1e", "\x1f", "\\u001f", "\\u001E"):
        assert manifest.onnx_nodes(separator.join(["[ONNX Layer: /a[0]/x]", "[ONNX Layer: b c]"])) == ("/a[0]/x", "b c")
    assert Layer("n", "t", None, None, (), (), manifest.onnx_nodes("")).nodes == ()
