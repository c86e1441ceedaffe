"""Faults planted in fused files and in engines: each is found and named."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from onnxfuse.commands.bisect import Wanted, of_sites
from onnxfuse.errors import OnnxfuseError
from onnxfuse.verify import check, inputs
from onnxfuse.verify.bisect import regions, repro, words
from onnxfuse.verify.bisect.oracles import against, exchanging
from onnxfuse.verify.bisect.regions import Pair
from onnxfuse.verify.bisect.search import Finding, search
from onnxfuse.verify.reference import Feeds, Outputs, Runtime
from tests.verify import plants

Plant = Callable[[ModelProto], object]


def wanted(model: Path, other: Path | None, folder: Path, feeds: Sequence[Feeds] | None = None) -> Wanted:
    return Wanted(
        model=model, other=other, plan=None, policy="all", precision=None, tensorrt=False, feeds=list(feeds) if feeds else None, dims={},
        seed=0, repeats=None, tries=1000, rtol=None, atol=None, folder=folder,
    )  # fmt: skip


def silent(text: str) -> None:
    pass


def norms(path: Path) -> list[str]:
    return [node.name for node in plants.edited(path).graph.node if node.op_type == "SkipLayerNormalization"]


def planted(original: ModelProto, folder: Path, plant: Plant, precision: str = "keep") -> tuple[Path, Path]:
    source, fused = plants.fused(original, folder, precision)
    proto = plants.edited(fused)
    plant(proto)
    onnx.save(proto, fused)
    return source, fused


def one_cause(report: dict[str, object]) -> dict[str, object]:
    assert report["verdict"] == "found", report
    causes = report["causes"]
    assert isinstance(causes, list)
    assert len(causes) == 1
    cause: dict[str, object] = causes[0]
    return cause


def assert_reproduces(report: dict[str, object]) -> None:
    """The files written are small, whole, and disagree by themselves."""
    made = report["reproduction"]
    assert isinstance(made, dict)
    original, fused, data = (Path(made[name]) for name in ("original", "fused", "data"))
    for path in (original, fused):
        onnx.checker.check_model(str(path), full_check=True)
    assert all(dim.HasField("dim_value") for value in onnx.load(str(fused)).graph.input for dim in value.type.tensor_type.shape.dim)
    feeds = inputs.from_data(data, original)
    with Runtime() as runtime:
        assert not check.check_models(original, fused, feeds, runtime=runtime).agrees


@pytest.mark.parametrize("precision", ["keep", "fp16"])
def test_a_wrong_epsilon(tmp_path: Path, precision: str) -> None:
    def plant(model: ModelProto) -> None:
        plants.wrong_epsilon(model, names[2], 1.0)

    names = norms(plants.fused(plants.encoder(), tmp_path, precision)[1])
    source, fused = planted(plants.encoder(), tmp_path, plant, precision)
    report = of_sites(wanted(source, fused, tmp_path / "out", [plants.encoder_feeds()]), silent)
    sites = one_cause(report)["sites"]
    assert [site["name"] for site in sites] == [names[2]]
    assert sites[0]["fusion"] == "skip_layernorm"
    assert {"l1_attention_residual", "l1_attention_norm"} <= set(sites[0]["replaced"])
    assert_reproduces(report)
    assert report["reproduction"]["nodes"][0] <= 6


def test_a_swapped_gate(tmp_path: Path) -> None:
    """The input of SiLU and the linear half of a gated MLP are exchanged."""

    def plant(model: ModelProto) -> None:
        silu = next(node for node in model.graph.node if node.op_type == "Silu")
        gate, up = silu.input[0], "up_add_out"
        silu.input[0] = up
        plants.node(model, "gating").input[1] = gate

    source, fused = planted(plants.gated(), tmp_path, plant)
    report = of_sites(wanted(source, fused, tmp_path / "out"), silent)
    assert report["verdict"] == "found"
    # Both nodes read what the other should, and each is wrong by itself.
    sites = [site for cause in report["causes"] for site in cause["sites"]]
    assert {site["name"] for site in sites} == {"silu", "gating"}
    assert {cause["kind"] for cause in report["causes"]} == {"site"}


def test_a_batch_norm_folded_in_training_mode(tmp_path: Path) -> None:
    original = plants.convnet()
    source, fused = plants.fused(original, tmp_path)
    proto = plants.edited(fused)
    image = np.random.default_rng(4).normal(size=(1, 3, 12, 12)).astype(np.float32)
    with Runtime() as runtime:
        normed = runtime.run(source, [{"image": image}], tensors=["b1_conv_out"])[0]["b1_conv_out"]
    conv = next(node for node in proto.graph.node if node.output[0] == "b1_norm_out")
    plants.training_statistics(proto, conv.name, original, normed, 1)
    onnx.save(proto, fused)
    other = np.random.default_rng(5).normal(1, 2, size=(1, 3, 12, 12)).astype(np.float32)
    report = of_sites(wanted(source, fused, tmp_path / "out", [{"image": other}]), silent)
    (site,) = one_cause(report)["sites"]
    assert site["fusion"] == "conv_bn"
    assert site["outputs"] == ("b1_norm_out",)
    assert {"b1_conv", "b1_norm"} == set(site["replaced"])
    assert_reproduces(report)


def test_a_mask_filled_with_another_value(tmp_path: Path) -> None:
    source, fused = planted(plants.encoder(), tmp_path, plants.other_mask)
    report = of_sites(wanted(source, fused, tmp_path / "out", [plants.encoder_feeds(masked=3)]), silent)
    (site,) = one_cause(report)["sites"]
    assert "mask_scale" in site["nodes"]
    assert_reproduces(report)


def test_a_function_body_of_another_formula_accuses_all_that_call_it(tmp_path: Path) -> None:
    def plant(model: ModelProto) -> None:
        body = next(function for function in model.functions if function.name == "BiasGelu")
        next(node for node in body.node if node.op_type == "Erf").op_type = "Tanh"

    source, fused = planted(plants.encoder(), tmp_path, plant)
    report = of_sites(wanted(source, fused, tmp_path / "out", [plants.encoder_feeds()]), silent)
    assert report["verdict"] == "found"
    guilty = {site["fusion"] for cause in report["causes"] for site in cause["sites"]}
    assert guilty == {"bias_gelu"}
    assert sum(len(cause["sites"]) for cause in report["causes"]) == 2


def test_two_faults_that_show_only_together(tmp_path: Path) -> None:
    """y = x + (x * 0) (x * 0): a wrong factor is hidden by the other factor."""

    def model(first: float, second: float) -> ModelProto:
        names = {"first": ("x", "k1", "p"), "second": ("x", "k2", "q"), "product": ("p", "q", "pq")}
        nodes = [helper.make_node("Mul", [a, b], [c], name) for name, (a, b, c) in names.items()]
        nodes.append(helper.make_node("Add", ["pq", "x"], ["y"], "last"))
        factors = [numpy_helper.from_array(np.float32(value), name) for name, value in (("k1", first), ("k2", second))]
        values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [16]) for name in "xy"]
        graph = helper.make_graph(nodes, "g", values[:1], values[1:], factors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    source, other = tmp_path / "model.onnx", tmp_path / "other.onnx"
    onnx.save(model(0, 0), source)
    onnx.save(model(1, 1), other)
    report = of_sites(wanted(source, other, tmp_path / "out"), silent)
    cause = one_cause(report)
    assert cause["kind"] == "together"
    assert [site["name"] for site in cause["sites"]] == ["first", "second"]
    assert_reproduces(report)


def branching() -> ModelProto:
    """x [1, 8, 32], long (bool) -> y: an If with two encoder layers in each of its branches."""
    inner = plants.encoder()
    mask = numpy_helper.from_array(plants.encoder_feeds()["mask"], "mask")
    branches = {}
    for name in ("then_branch", "else_branch"):
        nodes = []
        for node in inner.graph.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = f"{name}_{node.name}"
            copy.output[:] = [f"{name}_{output}" for output in node.output]
            made = {output for other in inner.graph.node for output in other.output}
            copy.input[:] = [f"{name}_{source}" if source in made else source for source in node.input]
            nodes.append(copy)
        output = helper.make_tensor_value_info(f"{name}_y", onnx.TensorProto.FLOAT, [1, plants.TOKENS, plants.WIDTH])
        branches[name] = helper.make_graph(nodes, name, [], [output])
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, plants.TOKENS, plants.WIDTH]) for name in "xy"]
    flag = helper.make_tensor_value_info("long", onnx.TensorProto.BOOL, [])
    node = helper.make_node("If", ["long"], ["y"], "choose", **branches)
    graph = helper.make_graph([node], "g", [values[0], flag], [values[1]], [*inner.graph.initializer, mask])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("taken", [True, False])
def test_a_site_inside_a_branch(tmp_path: Path, taken: bool) -> None:
    source, fused = plants.fused(branching(), tmp_path)
    proto = plants.edited(fused)
    branch = next(a.g for a in proto.graph.node[-1].attribute if a.name == ("then_branch" if taken else "else_branch"))
    guilty = [node for node in branch.node if node.op_type == "SkipLayerNormalization"][1]
    next(a for a in guilty.attribute if a.name == "epsilon").f = 1.0
    onnx.save(proto, fused)
    x = plants.encoder_feeds()["x"]
    feeds = [{"x": x, "long": np.array(value)} for value in (not taken, taken)]
    report = of_sites(wanted(source, fused, tmp_path / "out", feeds), silent)
    (site,) = one_cause(report)["sites"]
    assert site["name"] == guilty.name
    assert_reproduces(report)
    assert report["reproduction"]["nodes"][0] <= 6


def test_sites_that_a_plan_keeps_are_no_sites(tmp_path: Path) -> None:
    source, _ = plants.fused(plants.encoder(), tmp_path)
    everything = wanted(source, None, tmp_path / "out", [plants.encoder_feeds()])
    plan = tmp_path / "plan.json"
    outputs = [f"l{i}_{part}_norm_out" for i in (0, 1) for part in ("attention", "mlp")]
    # A norm that the first leaves is the head of a chain for the second.
    kept = [*(("skip_layernorm", name) for name in outputs), ("elementwise", "y")]
    plan.write_text(json.dumps({"sites": [{"fusion": fusion, "output": name, "decision": "kept"} for fusion, name in kept]}))
    whole, less = (of_sites(dataclasses.replace(everything, plan=path), silent) for path in (None, plan))
    assert whole["verdict"] == less["verdict"] == "agree"
    assert whole["sites"] - less["sites"] == 4


@pytest.mark.parametrize("precision", ["keep", "fp16"])
def test_a_fusion_that_is_wrong_everywhere_is_named_once(tmp_path: Path, precision: str) -> None:
    def plant(model: ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "SkipLayerNormalization":
                plants.wrong_epsilon(model, node.name, 1.0)

    source, fused = planted(plants.encoder(4), tmp_path, plant, precision)
    report = of_sites(wanted(source, fused, tmp_path / "out", [plants.encoder_feeds()]), silent)
    assert report["verdict"] == "found"
    guilty = {site["fusion"] for cause in report["causes"] for site in cause["sites"]}
    assert guilty == {"skip_layernorm"}
    assert_reproduces(report)


def test_an_untouched_file_agrees_and_writes_nothing(tmp_path: Path) -> None:
    for precision in ("keep", "fp16"):
        source, fused = plants.fused(plants.encoder(), tmp_path, precision)
        report = of_sites(wanted(source, fused, tmp_path / "out", [plants.encoder_feeds()]), silent)
        assert report["verdict"] == "agree"
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [0.5, 0.97])
def test_rounding_in_half_precision_accuses_nobody(tmp_path: Path, share: float) -> None:
    """An absolute limit below what float16 rounds in all layers together: the unfused model in float16 is over it, too, or just not."""
    source, fused = plants.fused(plants.encoder(3), tmp_path, "fp16")
    feeds = [plants.encoder_feeds()]
    with Runtime() as runtime:
        error = check.check_models(source, fused, feeds, runtime=runtime).outputs["y"].max_abs
    tight = dataclasses.replace(wanted(source, fused, tmp_path / "out", feeds), rtol=0.0, atol=share * error)
    report = of_sites(tight, silent)
    assert report["verdict"] == ("elsewhere" if report["baseline"] > 1 else "rounding")
    assert "half precision costs that" in words.headline(report) or "rounding adds up" in words.headline(report)
    assert report["apart"] < report["figure"]
    assert report["figure"] > 1
    assert not (tmp_path / "out").exists()


def test_a_small_error_that_a_later_operator_makes_large_is_reproduced_with_it(tmp_path: Path) -> None:
    """h = x + 1e4 loses digits that only y = (h - 1e4) * 100 shows."""

    def model(constant: float) -> ModelProto:
        nodes = [
            helper.make_node("Add", ["x", "c"], ["h"], "first"),
            helper.make_node("Sub", ["h", "big"], ["d"], "second"),
            helper.make_node("Mul", ["d", "hundred"], ["y"], "third"),
        ]
        values = {"c": constant, "big": 1e4, "hundred": 100.0}
        constants = [numpy_helper.from_array(np.float32(value), name) for name, value in values.items()]
        ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64]) for name in "xy"]
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    source, other = tmp_path / "model.onnx", tmp_path / "other.onnx"
    onnx.save(model(1e4), source)
    onnx.save(model(1e4 + 0.05), other)
    report = of_sites(wanted(source, other, tmp_path / "out"), silent)
    assert [site["name"] for site in one_cause(report)["sites"]] == ["first"]
    assert report["reproduction"]["steps"] == 1
    assert report["reproduction"]["nodes"] == (2, 2)
    assert_reproduces(report)


# ------------------------------------------------------------------------------------- engines, with a stand-in for one


class FakeEngine:
    """Runs a model in onnxruntime, and the plugin nodes called `guilty` with a kernel of its own."""

    def __init__(self, runtime: Runtime, feeds: Feeds, guilty: str, kernel: Callable[[np.ndarray], np.ndarray]) -> None:
        self.runtime, self.feeds, self.guilty, self.kernel = runtime, feeds, guilty, kernel
        self.built: list[Path] = []

    def run(self, path: Path) -> list[Outputs]:
        if path not in self.built:
            self.built.append(path)
        model = onnx.load(str(path))
        node = next((node for node in model.graph.node if node.name == self.guilty and node.domain == "onnxfuse"), None)
        if node is None:
            return self.runtime.run(path, [self.feeds])
        name = node.output[0]
        right = self.runtime.run(path, [self.feeds], tensors=[name])[0][name]
        node.output[0] = f"{name}/right"
        model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, list(right.shape)))
        damaged = path.with_suffix(".damaged.onnx")
        onnx.save(model, damaged)
        return self.runtime.run(damaged, [{**self.feeds, name: self.kernel(right)}])


def past_a_row(right: np.ndarray) -> np.ndarray:
    """What a kernel gives whose row is one element too long: the first of the next row in the place of its last."""
    flat = right.reshape(-1).copy()
    width = right.shape[-1]
    flat[width - 1 : -1 : width] = flat[width::width]
    return flat.reshape(right.shape)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime() as child:
        yield child


@pytest.fixture
def plugins(tmp_path: Path) -> Pair:
    """A fused file against its own functions, the nodes with plugins as sites."""
    _, fused = plants.fused(plants.encoder(), tmp_path)
    return regions.pair(fused, fused, tmp_path).only(lambda region: any(op.startswith(("Skip", "Bias")) for op in region.ops))


def bisected(pair: Pair, runtime: Runtime, engine: FakeEngine, repeats: int) -> Finding:
    feeds = [plants.encoder_feeds()]
    right = runtime.run(pair.save((), pair.folder / "right.onnx"), feeds)
    oracle = exchanging(pair, engine.run, against(right, check.tolerance("tf32"), same_dtype=False))
    return search(pair.sites, oracle, repeats=repeats, sample=3)


def test_a_kernel_that_reads_past_a_row(plugins: Pair, runtime: Runtime) -> None:
    guilty = plugins.sites[2]
    engine = FakeEngine(runtime, plants.encoder_feeds(), guilty, past_a_row)
    finding = bisected(plugins, runtime, engine, repeats=3)
    assert finding.guilty == (guilty,)
    assert finding.causes[0].kind == "site"
    # Several runs of one set are runs of one engine.
    assert len(engine.built) == finding.tries


def test_an_intermittent_kernel(plugins: Pair, runtime: Runtime) -> None:
    guilty, dice = plugins.sites[4], random.Random(2)
    engine = FakeEngine(runtime, plants.encoder_feeds(), guilty, lambda right: past_a_row(right) if dice.random() < 0.4 else right)
    finding = bisected(plugins, runtime, engine, repeats=8)
    assert finding.guilty == (guilty,)
    assert finding.flips < finding.runs
    assert finding.causes[0].flips >= 1


def test_an_engine_that_crashes_when_it_runs_is_beyond_any_limit(plugins: Pair, runtime: Runtime) -> None:
    """Such a run gives no outputs at all."""
    guilty = plugins.sites[1]

    def run(path: Path) -> list[Outputs]:
        on = {node.name for node in onnx.load(str(path)).graph.node if node.domain}
        return [{}] if guilty in on else runtime.run(path, [plants.encoder_feeds()])

    right = runtime.run(plugins.save((), plugins.folder / "right.onnx"), [plants.encoder_feeds()])
    finding = search(plugins.sites, exchanging(plugins, run, against(right, check.tolerance("tf32"), same_dtype=False)))
    assert finding.guilty == (guilty,)
    assert finding.figure == float("inf")


def test_engines_that_cannot_be_built_leave_the_rest_to_judge(plugins: Pair, runtime: Runtime) -> None:
    guilty = plugins.sites[3]
    engine = FakeEngine(runtime, plants.encoder_feeds(), guilty, past_a_row)

    def run(path: Path) -> list[Outputs]:
        on = {node.name for node in onnx.load(str(path)).graph.node if node.domain}
        if len(on) == 1 and guilty not in on:
            raise OnnxfuseError("no engine: no tactic")
        return engine.run(path)

    right = runtime.run(plugins.save((), plugins.folder / "right.onnx"), [plants.encoder_feeds()])
    finding = search(plugins.sites, exchanging(plugins, run, against(right, check.tolerance("tf32"), same_dtype=False)))
    assert finding.guilty == (guilty,)
    assert finding.faults


def test_a_kernel_fault_is_reproduced_by_its_node(plugins: Pair, runtime: Runtime) -> None:
    guilty, feeds = plugins.sites[0], plants.encoder_feeds()
    right = plugins.save((), plugins.folder / "right.onnx")

    def fetch(names: Sequence[str]) -> Feeds:
        inner = [name for name in names if name not in feeds]
        return {**{name: feeds[name] for name in names if name in feeds}, **runtime.run(right, [feeds], tensors=inner)[0]}

    def verify(original: Path, fused: Path, inputs: Feeds) -> float:
        engine = FakeEngine(runtime, inputs, guilty, past_a_row)
        return against(runtime.run(original, [inputs]), check.tolerance("tf32"), same_dtype=False)(engine.run(fused))

    made = repro.reproduce(plugins, [guilty], fetch, verify, plugins.folder, "repro", silent)
    assert made is not None
    assert made.steps == 0
    assert [node.name for node in onnx.load(str(made.fused)).graph.node] == [guilty]
    assert made.figure > 1


def test_what_does_not_disagree_again_is_not_called_a_reproduction(plugins: Pair, runtime: Runtime) -> None:
    right = plugins.save((), plugins.folder / "right.onnx")
    feeds = plants.encoder_feeds()

    def fetch(names: Sequence[str]) -> Feeds:
        inner = [name for name in names if name not in feeds]
        return {
            **{name: feeds[name] for name in names if name in feeds},
            **(runtime.run(right, [feeds], tensors=inner)[0] if inner else {}),
        }

    tried: list[int] = []

    def verify(original: Path, fused: Path, inputs: Feeds) -> float:
        tried.append(len(onnx.load(str(fused)).graph.node))
        return 0.5

    assert repro.reproduce(plugins, [plugins.sites[0]], fetch, verify, plugins.folder, "repro", silent) is None
    assert tried == sorted(tried)
    assert tried[0] < tried[-1]
    assert not (plugins.folder / "repro.onnx").exists()
