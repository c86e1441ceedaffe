"""Policy measure as a whole, without a GPU: onnxruntime stands in for TensorRT, and an engine's time follows from its operators."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfuse import commands, measuring, pipeline
from onnxfuse.errors import BadInput, MissingHere
from onnxfuse.fusions import bias_gelu
from onnxfuse.measuring import Interrupted, Machine, Measurement, Settings
from onnxfuse.plan import planfile, store
from onnxfuse.report import read
from onnxfuse.verify.reference import Runtime
from tests.bench import standin
from tests.commands.conftest import transformer_tail
from tests.plan import lab
from tests.plan.lab import Lab


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """SkipLayerNormalization makes engines 5 % faster, BiasGelu 5 % slower."""
    monkeypatch.setenv("ONNXFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONNXFUSE_VERDICTS", raising=False)
    return lab.install(monkeypatch, {"SkipLayerNormalization": 0.95, "BiasGelu": 1.05})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(transformer_tail(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


FEEDS = {name: np.random.default_rng(i).standard_normal((2, 16, 64)).astype(np.float32) for i, name in enumerate(("x", "r"))}
FEW = Settings(samples=24)


def measured(model: Path, feeds: Any = FEEDS, settings: Settings = FEW, **more: Any) -> Measurement:
    return measuring.measure(model, feeds=[feeds], settings=settings, **more)


def results(of: Measurement) -> list[Path]:
    return [path for path in of.folder.glob("*.json") if len(path.stem) == 24]


def test_what_wins_is_fused_and_what_loses_is_not(work: Lab, model: Path, tmp_path: Path) -> None:
    of = measured(model)
    assert {fusion: fused for (fusion, _), (fused, _) in of.plan.items()} == {"skip_layernorm": True, "bias_gelu": False}
    assert work.measured == ["", "skip_layernorm", "bias_gelu", "final skip_layernorm"]
    done = pipeline.optimize(model, tmp_path / "out.onnx", policy="measure", measured=of.plan, feeds=[FEEDS])
    assert done.agrees
    operators = {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}
    assert "SkipLayerNormalization" in operators
    assert "BiasGelu" not in operators
    reasons = {decision.site.fusion: decision.reason for decision in done.decisions}
    assert reasons["skip_layernorm"].startswith("won, 1.05")
    assert reasons["bias_gelu"].startswith("lost, 0.95")
    assert reasons["gelu"] == "canonical: one node for what was spelled out"


def test_every_build_shares_one_timing_cache_and_nothing_is_built_twice(work: Lab, model: Path) -> None:
    of = measured(model)
    caches = {cache for _, _, cache in work.builds.done}
    assert caches == {str(of.folder.parent / "h200-trt10.6.0.timing-cache")}
    assert [name for name, *_ in work.builds.done] == [
        "automatic.engine", "fused.engine", "fused.engine", "automatic-again.engine", "final.engine",
    ]  # fmt: skip
    assert [name for name, plugins, _ in work.builds.done if not plugins] == ["automatic.engine", "automatic-again.engine"]


def test_a_timing_cache_and_a_folder_may_be_given(work: Lab, model: Path, tmp_path: Path) -> None:
    of = measured(model, settings=Settings(timing_cache=tmp_path / "own.cache", folder=tmp_path / "results", samples=24))
    assert {cache for _, _, cache in work.builds.done} == {str(tmp_path / "own.cache")}
    assert of.folder.parent == tmp_path / "results"


def test_a_second_run_measures_nothing_and_says_so(work: Lab, model: Path) -> None:
    first = measured(model)
    built = len(work.builds.done)
    first.tidy()
    again = measured(model)
    assert len(work.builds.done) == built
    assert again.plan == first.plan
    assert again.resumed == 4
    assert any(note.startswith("4 of 4 measurements are from an earlier run, kept in ") for note in again.notes)


def test_an_interrupted_search_goes_on_where_it_was(work: Lab, model: Path) -> None:
    work.interrupt_at = 3
    with pytest.raises(
        Interrupted, match=r"interrupted; 2 measurements kept in .*: give the same command again to go on from there"
    ) as told:
        measured(model)
    assert told.value.exit_status == 130
    work.interrupt_at = None
    of = measured(model)
    assert work.measured == ["", "skip_layernorm", "bias_gelu", "bias_gelu", "final skip_layernorm"]
    assert (of.resumed, len(of.found.trials)) == (2, 4)
    assert of.plan["skip_layernorm", "normed"][0]


@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "of something else", "marked", "no object"])
def test_a_damaged_result_is_measured_again(work: Lab, model: Path, damage: str) -> None:
    of = measured(model)
    path = next(path for path in results(of) if '"skip_layernorm"' in path.read_text() and '"automatic-again"' not in path.read_text())
    text = path.read_text()
    content = json.loads(text)
    if damage == "flipped":  # a ratio that was never measured, in a file that is whole
        content["result"]["ratio"] = {"median": 9.0, "low": 9.0, "high": 9.0}
    elif damage == "of something else":
        content["key"]["precision"] = "bf16"
    elif damage == "marked":
        content["result"]["marks"] = ["SM clock moved"]
        content["sha256"] = measuring._digest(content["result"])
    new = {"empty": "", "half": text[: len(text) // 2], "no object": "[]"}
    path.write_text(new.get(damage, json.dumps(content)))
    again = measured(model)
    assert again.resumed == 3
    assert work.measured[4:] == ["skip_layernorm"]
    assert again.plan["skip_layernorm", "normed"][1].startswith("won, 1.05")
    assert path.read_text() != new.get(damage)


@pytest.mark.parametrize("change", ["model", "inputs", "precision", "driver", "tensorrt", "plugins", "version", "samples"])
def test_a_result_holds_only_for_what_it_was_measured_on(work: Lab, model: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    measured(model)
    more: dict[str, Any] = {}
    if change == "model":
        changed = transformer_tail()
        changed.graph.initializer[0].raw_data = np.full(64, 2.0, np.float32).tobytes()
        onnx.save(changed, model)
    elif change == "inputs":
        more = {"feeds": {name: np.ones((2, 16, 64), np.float32) for name in ("x", "r")}}
    elif change == "precision":
        more = {"precision": "fp16"}
    elif change in ("driver", "tensorrt", "plugins"):
        here = Machine.here("auto")
        monkeypatch.setattr(Machine, "here", lambda gpu: Machine(**{**vars(here), change: "other"}))
        if change != "plugins":
            monkeypatch.setattr("onnxfuse.engine.trt.version", lambda: "other" if change == "tensorrt" else "10.6.0")
    elif change == "version":
        monkeypatch.setattr(measuring, "__version__", "9.9")
    else:
        more = {"settings": Settings(samples=25)}
    assert measured(model, **more).resumed == 0


def test_ranges_are_measured_once_and_the_model_written_is_the_one_measured(
    work: Lab, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all feeds: the second one is so large that float16 cannot hold the residual sum."""
    asked: list[int] = []
    own = Runtime.ranges

    def ranges(self: Runtime, path: Path, feeds: Any, *more: Any) -> dict[str, float]:
        asked.append(len(feeds))
        return own(self, path, feeds, *more)

    monkeypatch.setattr(Runtime, "ranges", ranges)
    large = {"x": FEEDS["x"] * 30000, "r": FEEDS["r"] * 30000}
    of = measuring.measure(model, feeds=[FEEDS, large], settings=FEW, precision="fp16")
    assert of.ranges is not None
    assert of.ranges["sum"] > 65504
    out = tmp_path / "out.onnx"
    pipeline.optimize(model, out, policy="measure", measured=of.plan, precision="fp16", feeds=of.feeds, ranges=of.ranges, check=False)
    assert asked == [2]
    assert onnx.load(out) == onnx.load(of.folder / "final.onnx")


def test_failures_are_not_kept(work: Lab, model: Path) -> None:
    work.failing = "skip_layernorm"
    of = measured(model)
    assert of.plan["skip_layernorm", "normed"] == (False, "could not be measured: crashed (SIGSEGV): x")
    assert len(results(of)) == 2  # the automatic engine, and bias_gelu
    work.failing = ""
    assert measured(model).plan["skip_layernorm", "normed"][0]


def test_one_search_of_a_model_at_a_time(work: Lab, model: Path) -> None:
    folder = measured(model).folder
    with measuring._own(folder), pytest.raises(BadInput, match="is being measured by another process; wait for it, or end it"):
        measured(model)


def test_a_folder_that_others_can_write_is_refused(work: Lab, model: Path) -> None:
    """An engine holds code, and one that is kept is loaded again."""
    measured(model).folder.chmod(0o777)
    with pytest.raises(BadInput, match="others can write there"):
        measured(model)


def test_what_a_killed_search_left_is_removed(work: Lab, model: Path) -> None:
    folder = measured(model).folder
    (folder / "scratch-x").mkdir()
    (folder / "scratch-x" / "fused.engine").write_text("half")
    (folder / ".final.engine.abc.part").write_text("half")
    measured(model).tidy()
    assert sorted(path.suffix for path in folder.iterdir()) == ["", *[".json"] * 4]  # the lock, and the results


def test_verdicts_are_stored(work: Lab, model: Path) -> None:
    measured(model)
    known = {verdict.fusion: verdict for verdict in store.load().here}
    assert {fusion: verdict.ratio.median for fusion, verdict in known.items()} == {
        "skip_layernorm": pytest.approx(1 / 0.95, rel=1e-3), "bias_gelu": pytest.approx(1 / 1.05, rel=1e-3),
    }  # fmt: skip
    of = known["bias_gelu"]
    assert (of.variant, of.model, of.rows, of.width, of.dtype) == ("erf", "model", 32, 64, "float32")
    assert (of.gpu, of.driver, of.tensorrt) == ("h200", "580.1", "10.6.0")


def test_the_verdict_of_a_final_plan_is_that_of_the_rebuild(work: Lab, model: Path) -> None:
    """A win that did not come again is no win in the store."""
    work.again = {"SkipLayerNormalization": 1.0}
    of = measured(model)
    assert not of.plan["skip_layernorm", "normed"][0]
    known = {verdict.fusion: verdict for verdict in store.load().here}
    assert known["skip_layernorm"].ratio.median == pytest.approx(1.0, rel=1e-3)


def test_verdicts_say_what_to_measure_first(work: Lab, model: Path) -> None:
    work.factors = {"SkipLayerNormalization": 1.05, "BiasGelu": 0.95}
    measured(model)
    other = transformer_tail()
    other.graph.initializer[0].raw_data = np.full(64, 2.0, np.float32).tobytes()
    onnx.save(other, model)
    work.orders.clear()
    measured(model)
    assert work.measured[:3] == ["", "bias_gelu", "skip_layernorm"]


def test_the_report_holds_every_candidate(work: Lab, model: Path, tmp_path: Path) -> None:
    of = measured(model)
    done = pipeline.optimize(model, tmp_path / "out.onnx", policy="measure", measured=of.plan, feeds=[FEEDS])
    report = json.loads(json.dumps({**done.to_dict(), **of.to_dict()}, allow_nan=False))
    (tmp_path / "report.json").write_text(json.dumps(report))
    kept = [(step["stage"], step["group"], step["verdict"], step["kept"]) for step in report["plan"]["search"]]
    assert kept == [
        ("automatic", "TensorRT alone", "draw", False),
        ("alone", "skip_layernorm 32x64", "won", True),
        ("alone", "bias_gelu 32x64", "lost", False),
        ("final", "skip_layernorm 32x64", "won", True),
    ]
    assert report["timings"]["ratios"]["fused"]["verdict"] == "faster"
    assert report["layers"]["diff"]["summary"] == standin.SUMMARY
    assert [one["layers"]["diff"]["summary"] for one in report["measurement"]["candidates"][1:]] == [standin.SUMMARY] * 3
    assert report["measurement"]["inputs"] == {"x": [2, 16, 64], "r": [2, 16, 64]}
    assert report["measurement"]["final"]["outcome"] == "won"
    # The report is a plan, which gives the same model without measuring.
    plan = planfile.read(tmp_path / "report.json")
    assert plan["skip_layernorm", "normed"][0]
    again = pipeline.optimize(model, tmp_path / "again.onnx", plan=tmp_path / "report.json", feeds=[FEEDS])
    assert {d.site.key for d in again.decisions if d.fused} == {d.site.key for d in done.decisions if d.fused}


def with_batchnorm(path: Path) -> Path:
    """Conv and BatchNormalization, which fold for nothing, before the transformer's tail."""
    model = transformer_tail(2)
    ones = {name: np.ones(2, np.float32) for name in ("bn_scale", "bn_shift", "bn_mean", "bn_variance")}
    arrays = {**ones, "kernel": np.random.default_rng(0).standard_normal((2, 2, 1, 1)).astype(np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in arrays.items())
    nodes = [
        onnx.helper.make_node("Unsqueeze", ["x", "zero"], ["x4"]),
        onnx.helper.make_node("Conv", ["x4", "kernel"], ["conv"], "conv"),
        onnx.helper.make_node("BatchNormalization", ["conv", *ones], ["bn"], "bn"),
        onnx.helper.make_node("Squeeze", ["bn", "zero"], ["x3"]),
    ]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0], np.int64), "zero"))
    model.graph.node[0].input[0] = "x3"
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(("factor", "folded"), [(1.0, True), (0.9, True), (1.1, False)])
def test_folding_that_costs_nothing_is_done_unless_it_costs_something(work: Lab, tmp_path: Path, factor: float, folded: bool) -> None:
    """An engine takes `factor` times as long where no BatchNormalization is left."""
    work.folded = factor
    model = with_batchnorm(tmp_path / "model.onnx")
    of = measured(model)
    done = pipeline.optimize(model, tmp_path / "out.onnx", policy="measure", measured=of.plan, feeds=[FEEDS])
    assert {d.site.fusion: d.fused for d in done.decisions}["conv_bn"] is folded
    assert of.plan["skip_layernorm", "normed"][0]
    assert not of.plan["bias_gelu", "y"][0]
    assert [name for name, *_ in work.builds.done].count("automatic.engine") == (1 if folded else 2)
    reason = next(d.reason for d in done.decisions if d.site.fusion == "conv_bn")
    assert reason.startswith("folding that costs nothing" if folded else "folding that should cost nothing, but: lost, 0.909 times")


def test_progress_says_what_is_measured_and_how_much_time_is_left(work: Lab, model: Path) -> None:
    told: list[str] = []
    measured(model, progress=told.append)
    assert "TensorRT alone (15.0 minutes left)" in told
    assert any(words.startswith("1 of 2, skip_layernorm 32x64 (1 site) alone (") and words.endswith(" minutes left)") for words in told)
    assert "building (" in " ".join(told)  # what the child says


def test_sites_of_a_selection_alone_are_measured(work: Lab, model: Path) -> None:
    of = measured(model, skip=("skip_layernorm",))
    assert set(of.plan) == {("bias_gelu", "y")}


def test_fusions_that_say_so_are_measured_together_first(work: Lab, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias_gelu.FUSION, "belongs_with", ("skip_layernorm",), raising=False)
    work.factors["BiasGelu"] = 0.98
    of = measured(model)
    assert work.measured == ["", "bias_gelu skip_layernorm", "bias_gelu", "skip_layernorm", "final bias_gelu skip_layernorm"]
    assert all(fused for fused, _ in of.plan.values())
    assert {(verdict.fusion, verdict.beside, verdict.outcome) for verdict in store.load().here} == {
        ("bias_gelu", ("skip_layernorm",), "won"), ("skip_layernorm", ("bias_gelu",), "won"),
    }  # fmt: skip


def test_sites_that_others_would_take_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second fusion of the same nodes, and one that shows only where that is fused."""
    from onnxfuse.fusions.pattern import canonical, op, tensor

    class Copy(bias_gelu.BiasGelu):
        name = "copy"

    class After(bias_gelu.BiasGelu):
        """A negation of what BiasGelu makes."""

        name = "after"
        needs = ()
        patterns = (op("Neg", canonical("BiasGelu", tensor("x"), tensor("b"))),)

        def check(self, match: Any, model: Any) -> None:
            return None

        def variant(self, match: Any) -> None:
            return None

        def rewrite(self, match: Any, new: Any) -> Any:
            return new.node("Neg", [match["x"]], [match.output], stem="after")

    proto = transformer_tail(2)
    proto.graph.node.append(onnx.helper.make_node("Neg", ["y"], ["z"], "negate"))
    proto.graph.output[0].name = "z"
    onnx.save(proto, tmp_path / "m.onnx")
    monkeypatch.setattr(pipeline, "REGISTRY", (*pipeline.REGISTRY, Copy(), After()))
    places, free = pipeline.sites(tmp_path / "m.onnx")
    assert free == ()
    assert {place.site.key for place in places if not place.needs} == {("skip_layernorm", "normed"), ("bias_gelu", "y"), ("copy", "y")}
    assert {place.site.key: set(place.needs) for place in places if place.needs} == {("after", "z"): {("bias_gelu", "y")}}


# Through the command line ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import pytest
from tests.plan import lab
work = lab.install(pytest.MonkeyPatch(), {"SkipLayerNormalization": 0.95, "BiasGelu": 1.05})
work.slow_at = int(sys.argv[1])
from onnxfuse.commands import main
status = main(sys.argv[2:])
print("measured:", work.measured)
sys.exit(status)
"""


def command(root: Path, tmp_path: Path, slow_at: int, *arguments: object) -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(slow_at), "optimize", *map(str, arguments), "--policy", "measure", "--dims", "batch=2"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "ONNXFUSE_CACHE": str(tmp_path / "cache"), "COLUMNS": "200", "NO_COLOR": "1", "ONNXFUSE_DEBUG": "0"}


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(model: Path, root: Path, tmp_path: Path) -> None:
    line = command(root, tmp_path, 2, model, "-o", tmp_path / "out.onnx", "--report", tmp_path / "r.json")
    first = subprocess.Popen(line, cwd=root, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for said in first.stdout:
        if "slow now" in said:
            break
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 130, errors
    assert errors.startswith("error: interrupted; 1 measurement kept in "), errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out.onnx").exists()
    line[3] = "0"
    second = subprocess.run(line, cwd=root, env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 0, second.stderr
    assert "measured: ['skip_layernorm', 'bias_gelu', 'final skip_layernorm']" in second.stdout
    assert "1 of 4 measurements are from an earlier run" in second.stdout
    report = read.load(tmp_path / "r.json")  # of the published form
    assert report["measurement"]["resumed"] == 1
    assert {site["fusion"]: site["decision"] for site in report["sites"]}["skip_layernorm"] == "fused"
    assert not list((tmp_path / "cache" / "measurements").glob("*/*.engine"))  # large, and of no more use


@pytest.fixture
def refused(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Status and the one line of a command that must refuse, and leave nothing."""
    monkeypatch.setattr("signal.signal", lambda *about: None)
    monkeypatch.chdir(model.parent)

    def run(*arguments: str) -> tuple[int, str]:
        before = sorted(model.parent.iterdir())
        status = commands.main(["optimize", str(model), *arguments])
        said = capsys.readouterr().err
        assert said.startswith("error: "), said
        assert said.count("\n") == 1, said
        assert sorted(model.parent.iterdir()) == before
        return status, said

    return run


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is here")
def test_without_tensorrt_there_is_one_line(refused: Callable[..., tuple[int, str]]) -> None:
    status, said = refused("--policy", "measure")
    assert status == 3
    assert all(word in said for word in ("--policy measure", "TensorRT is not installed", "--policy proven"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "5"), ("--budget", "--policy measure")),
        (("--policy", "all", "--timing-cache", "t"), ("--timing-cache", "--policy measure")),
        (("--policy", "measure", "--budget", "-1"), ("--budget -1", "minutes")),
        (("--policy", "measure", "--budget", "nan"), ("--budget nan", "minutes")),
        (("--policy", "measure", "--plan", "p.json"), ("--plan p.json", "leave one of them out")),
        (("--policy", "measure", "--timing-cache", "no/where"), ("--timing-cache", "there is no folder")),
        (("--policy", "measure", "--measurements", "model.onnx"), ("--measurements", "is no folder")),
        (("--undo", "--budget", "5"), ("--undo", "--budget")),
    ],
)
def test_options_that_contradict_are_refused(
    refused: Callable[..., tuple[int, str]], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    status, said = refused(*arguments)
    assert status == 2
    assert all(word in said for word in words), said


def test_another_gpu_than_the_one_here_is_refused(work: Lab, model: Path) -> None:
    with pytest.raises(MissingHere, match=r"--gpu l4: .* here is NVIDIA H200"):
        measured(model, gpu="l4")
    assert measured(model, gpu="h200").plan["skip_layernorm", "normed"][0]


def test_inputs_of_types_that_cannot_be_kept_are_refused(work: Lab, model: Path) -> None:
    import ml_dtypes

    with pytest.raises(BadInput, match="input x is bfloat16"):
        measured(model, feeds={"x": np.ones((2, 16, 64), ml_dtypes.bfloat16)})


def test_the_optimizer_itself_does_not_pretend_to_have_measured(model: Path) -> None:
    with pytest.raises(BadInput, match="--policy measure: nothing was measured"):
        pipeline.optimize(model, None, policy="measure")
