"""Engines as a back end, with a stand-in for the process that builds and runs them."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxfuse.bench import child
from onnxfuse.commands import bisect as command
from onnxfuse.errors import OnnxfuseError
from onnxfuse.verify import engine_process
from onnxfuse.verify.bisect import engines, words
from onnxfuse.verify.bisect.engines import Engines, shapes
from onnxfuse.verify.reference import Runtime
from tests.gpu.test_bisect import model as widths
from tests.verify import plants

Process = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime() as started:
        yield started


def folder_of(arguments: Sequence[str]) -> Path:
    """Where the outputs of an order go."""
    return Path(json.loads(Path(arguments[1]).read_text())["out"]).parent


def process(runtime: Runtime, faulty: Callable[[str], bool] = lambda name: False, crash: bool = False) -> Process:
    """Does what the process does, with onnxruntime for TensorRT, and every plugin node called so a wrong epsilon."""

    def run(arguments: Sequence[str], timeout: float, watch: object = None) -> tuple[int, str]:
        module, request = arguments
        assert module == "onnxfuse.verify.engine_process"
        order = json.loads(Path(request).read_text())
        model = onnx.load(order["model"])
        wrong = [node for node in model.graph.node if node.domain == "onnxfuse" and faulty(node.name)]
        said = f"{child.STEP}run\n"
        if crash and wrong:
            return -11, said
        for node in wrong:
            plants.wrong_epsilon(model, node.name, 3.0)
        changed = Path(order["model"]).with_suffix(".faulty.onnx")
        onnx.save(model, changed)
        for index, path in enumerate(order["feeds"]):
            with np.load(path) as feed:
                outputs = runtime.run(changed, [dict(feed)])[0]
            for turn in range(order["runs"]):
                np.savez(f"{order['out']}.{turn}.{index}.npz", **outputs)
        return 0, said

    return run


def in_turn(even: Process, odd: Process) -> Process:
    """Runs 0, 2, 4, 6 and 8 are those of one process, the others those of another."""

    def run(arguments: Sequence[str], timeout: float, watch: object = None) -> tuple[int, str]:
        folder = folder_of(arguments)
        even(arguments, timeout, watch)
        kept = {path.name: path.read_bytes() for path in folder.glob("outputs.[02468].*")}
        done = odd(arguments, timeout, watch)
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        return done

    return run


def test_runs_of_one_engine_are_made_together(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = plants.fused(plants.encoder(1), tmp_path)
    calls: list[object] = []
    stand_in = process(runtime)
    monkeypatch.setattr(child, "run", lambda *arguments: calls.append(arguments) or stand_in(*arguments))
    made = Engines(tmp_path, runs=3)
    feeds = [plants.encoder_feeds(0), plants.encoder_feeds(1)]
    for _ in range(3):
        outputs = made.run(fused, feeds)
        for got, feed in zip(outputs, feeds, strict=True):
            np.testing.assert_array_equal(got["y"], runtime.run(fused, [feed])[0]["y"])
    assert len(calls) == 1
    made.run(fused, feeds)
    assert len(calls) == 2


def test_the_engines_of_the_last_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their content, whatever the file is called."""
    built: list[str] = []

    def run(arguments: Sequence[str], timeout: float, watch: object = None) -> tuple[int, str]:
        order = json.loads(Path(arguments[1]).read_text())
        if not Path(order["engine"]).exists():
            built.append(Path(order["model"]).stem)
            Path(order["engine"]).write_bytes(b"")
        np.savez(f"{order['out']}.0.0.npz", y=np.zeros(1))
        return 0, ""

    monkeypatch.setattr(child, "run", run)
    made, feeds = Engines(tmp_path, 1), [{"x": np.zeros((1, 2), np.float32)}]

    def ask(name: str, content: str) -> None:
        path = tmp_path / f"{name}.onnx"
        path.write_text(content)
        made.run(path, feeds)

    ask("a", "one")
    ask("b", "two")
    ask("c", "one")
    assert built == ["a", "b"]
    for number in range(engines.KEPT - 1):
        ask(f"more{number}", f"more {number}")
    ask("c", "one")  # used later than b
    assert built == ["a", "b", *(f"more{number}" for number in range(engines.KEPT - 1))]
    ask("b", "two")
    assert built[-1] == "b"
    assert len(list(tmp_path.glob("*.engine"))) == engines.KEPT


def test_an_engine_that_is_not_built_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(plants.gated(), path)
    monkeypatch.setattr(child, "run", lambda *arguments: (2, "error: node 'a': no tactic; use another shape\n"))
    with pytest.raises(OnnxfuseError, match="no engine: node 'a': no tactic"):
        Engines(tmp_path, 1).run(path, [{"x": np.zeros((4, 32), np.float32)}])


def test_an_engine_that_crashes_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(plants.gated(), path)
    monkeypatch.setattr(child, "run", lambda *arguments: (-11, f"{child.STEP}run\n"))
    made = Engines(tmp_path, 2)
    assert made.run(path, [{"x": np.zeros((4, 32), np.float32)}]) == [{}]
    assert "SIGSEGV" in made.faults[0]


def test_shapes_cover_all_feeds() -> None:
    feeds = [{"x": np.zeros((2, 16)), "s": np.zeros(())}, {"x": np.zeros((1, 32)), "s": np.zeros(())}]
    assert shapes(feeds) == ["x:1x16..2x16..2x32"]
    assert shapes(feeds[:1]) == ["x:2x16"]


def test_half_precision_crosses_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(plants.gated(), path)
    seen: list[np.ndarray] = []

    def run(arguments: Sequence[str], timeout: float, watch: object = None) -> tuple[int, str]:
        order = json.loads(Path(arguments[1]).read_text())
        with np.load(order["feeds"][0]) as feed:
            seen.append(feed["x"])
        np.savez(f"{order['out']}.0.0.npz", y=seen[0])
        return 0, f"{child.STEP}run\n"

    monkeypatch.setattr(child, "run", run)
    x = np.full((4, 32), 1.5, ml_dtypes.bfloat16)
    (outputs,) = Engines(tmp_path, 1).run(path, [{"x": x}])
    np.testing.assert_array_equal(outputs["y"], np.full((4, 32), 1.5, np.float32))


def wanted(source: Path, folder: Path) -> command.Wanted:
    return command.Wanted(
        model=source, other=None, plan=None, policy="all", precision=None, tensorrt=True, feeds=[plants.encoder_feeds()], dims={}, seed=0,
        repeats=2, tries=1000, rtol=None, atol=None, folder=folder / "found",
    )  # fmt: skip


def test_an_intermittent_plugin_is_told_with_how_often(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong in every other run of an engine."""
    source, fused = plants.fused(plants.encoder(), tmp_path)
    guilty = next(node.name for node in plants.edited(fused).graph.node if node.op_type == "BiasGelu")
    right, wrong = process(runtime), process(runtime, lambda name: name == guilty)

    def damage(model: onnx.ModelProto, name: str, epsilon: float) -> None:
        plants.node(model, name).input[1] = plants.node(model, name).input[1].replace("l0", "l1")

    monkeypatch.setattr(plants, "wrong_epsilon", damage)
    monkeypatch.setattr(child, "run", in_turn(right, wrong))
    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    report = command.of_sites(dataclasses.replace(wanted(source, tmp_path), repeats=4), lambda text: None)
    assert [site["name"] for cause in report["causes"] for site in cause["sites"]] == [guilty]
    assert (report["flips"], report["runs"]) == (4, 8)
    assert "disagrees in 4 of 8 runs because of bias_gelu" in words.headline(report)
    assert "intermittent: 4 of 8 runs disagree" in "\n".join(words.site_lines(report))


@pytest.mark.parametrize("crash", [False, True])
def test_a_faulty_plugin_is_found_by_the_command(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, crash: bool) -> None:
    """All but TensorRT: the model is optimized, engines are built of it with subsets of plugins, and the node is reproduced."""
    source, fused = plants.fused(plants.encoder(), tmp_path)
    guilty = [node.name for node in plants.edited(fused).graph.node if node.op_type == "SkipLayerNormalization"][1]
    monkeypatch.setattr(child, "run", process(runtime, lambda name: name == guilty, crash))
    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    report = command.of_sites(wanted(source, tmp_path), lambda text: None)
    assert report["verdict"] == "found"
    assert [site["name"] for cause in report["causes"] for site in cause["sites"]] == [guilty]
    assert report["sites"] == 9  # norms, GELUs, attentions, and the chain that makes the mask
    assert bool(report["crashes"]) == crash
    lines = "\n".join(words.site_lines(report))
    assert "onnxfuse build-engine" in lines
    assert "SIGSEGV" in lines or not crash
    assert [node.name for node in onnx.load(report["reproduction"]["fused"]).graph.node] == [guilty]


def test_engines_that_are_wrong_without_plugins_too_accuse_none(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = plants.fused(plants.encoder(), tmp_path)

    def run(arguments: Sequence[str], timeout: float, watch: object = None) -> tuple[int, str]:
        done = process(runtime)(arguments, timeout, watch)
        for path in folder_of(arguments).glob("outputs.*.npz"):
            np.savez(path, y=-np.load(path)["y"])
        return done

    monkeypatch.setattr(child, "run", run)
    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    report = command.of_sites(wanted(source, tmp_path), lambda text: None)
    assert report["verdict"] == "elsewhere"
    assert report["baseline"] > 1
    assert "disagrees with every site off, too" in words.headline(report)
    assert not (tmp_path / "found").exists()


def test_the_process_builds_once_and_writes_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from onnxfuse.engine import build, run
    from onnxfuse.engine.trt import TensorSpec

    signature, asked = inspect.signature(build.build), []

    class Loaded:
        inputs = (TensorSpec("x", "float16", (4,), True, False),)
        count = 0

        def __enter__(self) -> Loaded:
            return self

        def __exit__(self, *about: object) -> None:
            pass

        def run_each(self, feeds: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
            assert feeds["x"].dtype == np.float16
            self.count += 1
            yield from {"y": feeds["x"] + np.float16(self.count), "n": np.arange(2), "/b": feeds["x"].astype(ml_dtypes.bfloat16)}.items()

    monkeypatch.setattr(build, "build", lambda *places, **names: asked.append(signature.bind(*places, **names).arguments))
    monkeypatch.setattr(run.Engine, "load", lambda path: Loaded())
    np.savez(tmp_path / "feed0.npz", x=np.ones(4, np.float32))
    order = {"model": "m.onnx", "engine": "e.engine", "shapes": ["x:4"], "cache": "c", "feeds": [str(tmp_path / "feed0.npz")], "runs": 3}
    (tmp_path / "order.json").write_text(json.dumps({**order, "out": str(tmp_path / "outputs")}))
    engine_process.main(str(tmp_path / "order.json"))
    assert len(asked) == 1
    assert (asked[0]["model"], asked[0]["out"], asked[0]["shapes"]) == (Path("m.onnx"), Path("e.engine"), ["x:4"])
    assert f"{child.STEP}run" in capfd.readouterr().out
    for turn in range(3):
        with np.load(tmp_path / f"outputs.{turn}.0.npz") as data:
            assert {name: data[name].dtype.name for name in data.files} == {"y": "float16", "n": "int64", "/b": "float32"}
            np.testing.assert_array_equal(data["y"], np.full(4, 2.0 + turn))


def test_most_of_few_plugins_are_faulty(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests/gpu/test_bisect.py plants in CUDA: of three norms one is always wrong and one in every other run."""
    onnx.save(widths(), tmp_path / "model.onnx")
    always = process(runtime, lambda name: name == "skip_layernorm")
    at_times = process(runtime, lambda name: name in ("skip_layernorm", "skip_layernorm_1"))

    monkeypatch.setattr(child, "run", in_turn(always, at_times))
    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    report = command.of_sites(dataclasses.replace(wanted(tmp_path / "model.onnx", tmp_path), feeds=None, repeats=8), lambda text: None)
    assert report["sites"] == 4
    found = {cause["sites"][0]["outputs"][0]: (cause["kind"], cause["flips"], cause["runs"]) for cause in report["causes"]}
    assert found == {"norm72": ("site", 8, 8), "norm40": ("site", 4, 8)}
    assert report["reproduction"]["steps"] == 0
