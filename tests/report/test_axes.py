"""The four axes, the facts about plugins, and the points below the roof: each figure from data."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import onnx
import pytest

from benchmarks import synthetic
from onnxfuse import pipeline, plugins
from onnxfuse.plugins import KernelUse, Library
from onnxfuse.report import axes, complete, counted, kernels, read, roofline
from tests.report import gpu, sample

ROOT = Path(__file__).resolve().parent.parent.parent


def axis(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in axes.of(report) if found["name"] == name)


def facts(found: dict[str, Any]) -> dict[str, str]:
    return {fact["what"]: fact["value"] for fact in found["facts"]}


def timed(*verdicts: str) -> dict[str, Any]:
    ratios = {word + str(i): {**gpu.interval(1.0, 0.1), "verdict": word} for i, word in enumerate(verdicts)}
    return {**sample.optimize(), "timings": {"engines": {}, "baseline": "a", "ratios": ratios, "samples": 200}}


@pytest.mark.parametrize(
    ("verdicts", "answer", "good"),
    [
        ((), "Not measured here", None),
        (("faster",), "Yes, by measurement.", True),
        (("slower", "slower"), "No: it is slower.", False),
        (("draw",), "No difference can be measured, so TensorRT's own fusion stays.", None),
        (("faster", "slower", "slower"), "It depends: 1 faster, 2 slower.", None),
    ],
)
def test_performance_says_what_was_measured_and_nothing_else(verdicts: tuple[str, ...], answer: str, good: bool | None) -> None:
    found = axis(timed(*verdicts), "performance")
    assert found["answer"].startswith(answer)
    assert found["good"] is good


def test_what_can_be_seen_is_counted_in_the_graphs() -> None:
    report = sample.with_graph(sample.optimize())
    # y_t went into the fused node, y_out is still there.
    assert axes.visible(report) == (1, 1, 0)
    found = axis(report, "debugging")
    assert found["answer"].startswith("50 % of the tensors")
    assert facts(found)["tensors that kept their name"] == "1 of 2"
    assert facts(found)["outputs that agree with the reference"] == "3 of 3"
    report["sites"][0]["decision"] = "kept"  # then it was cleaning that took y_t
    assert axes.visible(report) == (1, 0, 1)
    report["tensors"] = [{"name": "y_out", "agrees": True}, {"name": "z", "agrees": False}]
    assert facts(axis(report, "debugging"))["first that does not agree"] == "z"
    assert axis(report, "debugging")["good"] is False


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled for two architectures; one kernel spills on the older."""

    def made(sm: int, spilled: int) -> Library:
        uses = [KernelUse(f"skip_layernorm<half, {i}>", sm, 40 + i, spilled * i, 0, 8 * i, 128) for i in range(3)]
        return Library(tmp_path, sm, "", (*uses, KernelUse("other<half>", sm, 255, 99, 99, 99, 99)), (), "nvcc 13.0")

    monkeypatch.setattr(plugins, "compiled", lambda: (made(80, 4), made(90, 0)))


@pytest.mark.usefixtures("library")
def test_facts_about_the_plugins_that_are_used() -> None:
    report = sample.with_graph(sample.optimize())
    (kernel,) = kernels.facts(report)
    assert (kernel["op"], kernel["fusions"], kernel["oldest_sm"]) == ("SkipLayerNormalization", ["layernorm"], plugins.OLDEST_SM)
    assert kernel["architectures"][0] == {
        "sm": 80,
        "kernels": 3,
        "registers": 42,
        "spill_stores": 8,
        "spill_loads": 0,
        "stack": 16,
        "smem": 128,
        "compiler": "nvcc 13.0",
    }
    found = axis({**report, "kernels": [kernel]}, "maintenance")
    assert found["good"] is False
    assert "sm_80: at most 42 registers, 8 B of spills; sm_90: at most 42 registers, no spills" in facts(found)["SkipLayerNormalization"]
    assert "float16" in facts(axis({**report, "kernels": [kernel]}, "generality"))["SkipLayerNormalization"]
    narrow = {**kernel, "gpus": "sm_90"}
    assert facts(axis({**report, "kernels": [narrow]}, "generality"))["SkipLayerNormalization"].startswith("sm_90; ")


def test_no_plugin_is_nothing_to_keep(tmp_path: Path) -> None:
    source, out = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(synthetic.by_nodes(30), source)
    result = pipeline.optimize(source, out, policy="none", check=False)
    report = complete.complete({**result.to_dict(), "machine": {}}, source, out)
    assert report["kernels"] == []
    assert axis(report, "maintenance")["answer"].startswith("Nothing: no plugin is used")
    seen = axes.visible(report)
    assert seen is not None
    assert sum(seen) == sum(len(node["outputs"]) for node in report["graph"]["before"]["nodes"] if not node.get("kind"))


def test_tests_and_lines_are_counted_in_the_sources() -> None:
    count = counted.count(ROOT)
    tree = ast.parse((ROOT / "tests" / "fusions" / "test_gelu.py").read_text(encoding="utf-8"))
    assert count["gelu"] == sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(tree))
    assert {op.name for op in plugins.OPS} <= set(count)
    assert all(count.values())
    assert counted.tests() == count  # in a checkout
    assert counted.kernels(ROOT / "plugins" / "BiasGelu") == ("bias_gelu",)
    for op in plugins.OPS:
        folder = plugins.folder(op.name)
        assert folder is not None
        assert counted.lines(folder) > 20
        assert counted.kernels(folder) or op.name == "Elementwise"  # whose kernels are generated
    assert plugins.folder("LSTMSequence") == plugins.folder("GRUSequence") == ROOT / "plugins" / "Recurrence"
    assert plugins.folder("NoPlugin") is None


def test_an_installed_package_reads_the_counts_of_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "HERE", tmp_path / "site-packages" / "onnxfuse" / "report")
    counted.HERE.mkdir(parents=True)
    assert counted.tests() == {}
    (counted.HERE / "tests.json").write_text('{"gelu": 3}')
    assert counted.tests() == {"gelu": 3}


def test_lines_leave_comments_and_blank_ones_out(tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text("// a\n\n/* b\n * c\n */\nint d; // e\n  f();\n")
    (tmp_path / "note.txt").write_text("g\n")
    assert counted.lines(tmp_path) == 2


def test_points_below_the_roof_come_from_the_profile_and_the_shapes() -> None:
    report = sample.with_graph(sample.optimize())
    report["sites"][0].update(fusion="skip_layernorm", shape="Bx6x8", node="y_0")
    report["graph"]["before"]["nodes"][0]["outputs"] = [["y", "float32[B, 6, 8]"]]
    report["inputs"] = {"source": "", "feeds": [{"y": "float32[5, 6, 8]"}]}
    layer = {"name": "l", "type": "PluginV3", "nodes": ["y_0"], "us": 2.0, "kernel": ""}
    report["layers"] = {"automatic": [], "fused": [layer, {**layer, "nodes": ["y_0", "z"]}, {**layer, "nodes": ["other"]}]}
    report["precision"] = "fp16"
    (point,) = roofline.of_layers(report, 4000.0)
    elements = 5 * 6 * 8
    assert point["bytes"] == 3 * 2 * elements
    assert point["flops"] == 8 * elements
    assert point["gbps"] == pytest.approx(3 * 2 * elements / 2e-6 / 1e9)
    assert point["share_of_copy"] == pytest.approx(point["gbps"] / 4000)
    report["graph"]["after"]["edges"].append([1, 2, 1])  # somebody reads the sum, which is written then
    assert roofline.of_layers(report, 4000.0)[0]["bytes"] == 4 * 2 * elements
    report["inputs"]["feeds"] = []
    assert roofline.of_layers(report, 4000.0) == []  # of unknown size, so nothing is said


def test_kernels_alone_say_nothing_of_an_engine() -> None:
    report = read.load(ROOT / "benchmarks" / "results" / "h200-kernels.json")
    assert len(report["roofline"]["points"]) == 180
    norm, summed = (
        next(point for point in report["roofline"]["points"] if point["kernel"] == name and point["dtype"] == "float16")
        for name in ("skip_layernorm", "skip_layernorm with sum")
    )
    assert norm["flops"] == summed["flops"]
    assert summed["bytes"] / norm["bytes"] == pytest.approx(4 / 3, rel=0.01)
    found = axis(report, "performance")
    assert found["answer"].startswith("These are kernels alone")
    assert facts(found)["skip_rmsnorm with sum, at its best"].endswith("% of a copy's bandwidth")
    assert {kernel["op"] for kernel in complete.derived(report)["kernels"]} == {
        "SkipLayerNormalization",
        "SkipRMSNormalization",
        "BiasGelu",
    }
