"""Policy measure with TensorRT: a search from end to end, what it keeps, and the command with an interrupt in its middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import measuring, pipeline
from onnxfuse.bench import candidate as unit
from onnxfuse.bench.candidate import Candidate, Rewriting
from onnxfuse.engine import manifest, trt
from onnxfuse.errors import MissingHere
from onnxfuse.measuring import Machine, Measurement, Settings
from onnxfuse.plan import store

ROOT = Path(__file__).resolve().parents[2]
WIDTH, ROWS, LAYERS = 256, 64, 3
SAMPLES = 64


def layers() -> onnx.ModelProto:
    """Feed-forward layers: x [batch, 64, 256] -> MatMul, bias, GELU, MatMul, residual, LayerNormalization, three times. Opset 20."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(LAYERS):
        arrays = {
            f"w{i}": rng.standard_normal((WIDTH, 4 * WIDTH)) / np.sqrt(WIDTH),
            f"b{i}": 0.1 * rng.standard_normal(4 * WIDTH),
            f"v{i}": rng.standard_normal((4 * WIDTH, WIDTH)) / np.sqrt(4 * WIDTH),
            f"g{i}": 1 + 0.1 * rng.standard_normal(WIDTH),
            f"s{i}": 0.1 * rng.standard_normal(WIDTH),
        }
        weights += [numpy_helper.from_array(value.astype(np.float32), name) for name, value in arrays.items()]
        nodes += [
            helper.make_node("MatMul", [x, f"w{i}"], [f"m{i}"], f"fc{i}"),
            helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"], f"bias{i}"),
            helper.make_node("Gelu", [f"a{i}"], [f"h{i}"], f"gelu{i}", approximate="none"),
            helper.make_node("MatMul", [f"h{i}", f"v{i}"], [f"o{i}"], f"project{i}"),
            helper.make_node("Add", [f"o{i}", x], [f"r{i}"], f"residual{i}"),
            helper.make_node("LayerNormalization", [f"r{i}", f"g{i}", f"s{i}"], [f"y{i}"], f"norm{i}", epsilon=1e-5),
        ]
        x = f"y{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", ROWS, WIDTH]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measure")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    path = folder / "layers.onnx"
    onnx.save(layers(), path)
    return path


@pytest.fixture(scope="module")
def cache(folder: Path) -> Path:
    return folder / "timing.cache"


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    """Another process that holds the GPU is marked, and marked measurements are not kept: this process must not hold it."""
    if trt._context is not None:
        pytest.skip("earlier tests of this process hold the GPU; run tests/gpu/test_measure.py in a process of its own")


@pytest.fixture(scope="module")
def measured(model: Path, folder: Path, cache: Path) -> Measurement:
    """The whole search, in half precision at batch 2. Verdicts go to a file of this test's own."""
    before = os.environ.get("ONNXFUSE_VERDICTS")
    os.environ["ONNXFUSE_VERDICTS"] = str(folder / "verdicts.json")
    try:
        settings = Settings(timing_cache=cache, folder=folder / "kept", samples=SAMPLES)
        return measuring.measure(model, precision="fp16", dims={"batch": 2}, settings=settings)
    finally:
        if before is None:
            del os.environ["ONNXFUSE_VERDICTS"]
        else:
            os.environ["ONNXFUSE_VERDICTS"] = before


def test_every_group_is_built_checked_and_timed(measured: Measurement) -> None:
    trials = {(trial.stage, trial.names): trial for trial in measured.found.trials}
    rows = 64  # the batch is symbolic, and counts as 1
    for name, sites in ((f"skip_layernorm {rows}x{WIDTH}", LAYERS), (f"bias_gelu {rows}x{4 * WIDTH}", LAYERS)):
        trial = trials["alone", name]
        assert trial.outcome in ("won", "lost", "draw", "marked"), trial.said
        assert trial.result["agrees"], trial.result
        assert trial.result["max_abs"] < 0.05
        assert unit.counts(trial.result["sites"])[name.split()[0]] == sites
        assert trial.result["automatic_ms"]["median"] > 0
        assert trial.result["inputs"] == {"x": [2, ROWS, WIDTH]}
        assert len(trial.result["placements_ms"]["fused"]) > 1


def test_what_is_fused_won_when_both_engines_were_built_again(measured: Measurement) -> None:
    final = measured.found.final
    fused = {key for key, (is_fused, _) in measured.plan.items() if is_fused}
    assert fused == final.keys
    if fused:
        assert final.stage == "final"
        assert final.result["ratio"]["low"] > 1 + final.margin
    else:
        assert final is measured.found.automatic
        assert final.result["verdict"] == "draw" or abs(final.result["ratio"]["median"] - 1) < 0.01, final.result


def test_a_candidate_says_where_its_time_goes(measured: Measurement) -> None:
    for trial in measured.found.trials:
        if trial.stage == "alone":
            of = trial.result["layers"]
            assert of["diff"]["plugins"] == LAYERS, trial.result["notes"]
            for side in ("automatic", "fused"):
                total = sum(layer["us"] for layer in of[side])
                assert 0.2 < total / (1000 * trial.result[f"{side}_ms"]["median"]) < 20
            assert of["diff"]["summary"]


def test_all_builds_share_the_timing_cache(measured: Measurement, cache: Path) -> None:
    assert cache.stat().st_size > 0
    seconds = [trial.result["build_seconds"] for trial in measured.found.trials if "build_seconds" in trial.result]
    assert len({of["automatic"] for of in seconds}) <= 2  # built once for the search, and once for the final


def test_the_final_engine_runs_here(measured: Measurement) -> None:
    engine = measured.folder / "final.engine"
    if not measured.found.final.keys:
        pytest.skip("nothing won on this GPU, so that there is no final engine")
    known = manifest.load(engine)
    assert known is not None
    assert known.plugins is not None


def test_verdicts_are_of_this_machine(measured: Measurement, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_VERDICTS", str(folder / "verdicts.json"))
    here = Machine.here("auto")
    known = store.load().here
    trusted = {t.groups[0].fusion for t in measured.found.trials if t.stage == "alone" and t.outcome in ("won", "lost", "draw")}
    assert {verdict.fusion for verdict in known} == trusted
    assert {(verdict.gpu, verdict.driver, verdict.tensorrt) for verdict in known} <= {(here.name, here.driver, here.tensorrt)}


def test_a_second_search_measures_nothing(
    measured: Measurement, model: Path, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXFUSE_VERDICTS", str(folder / "verdicts.json"))

    def none(*about: object) -> None:
        raise AssertionError("measured again")

    kept = [trial for trial in measured.found.trials if "failed" not in trial.result and not trial.result["marks"]]
    if len(kept) < len(measured.found.trials):
        pytest.skip("some measurements were marked, and are to be taken again")
    monkeypatch.setattr(unit, "in_child", none)
    settings = Settings(timing_cache=cache, folder=folder / "kept", samples=SAMPLES)
    again = measuring.measure(model, precision="fp16", dims={"batch": 2}, settings=settings)
    assert again.plan == measured.plan
    assert again.resumed == len(measured.found.trials)


def test_the_planned_model_agrees_in_onnxruntime(measured: Measurement, model: Path, folder: Path) -> None:
    done = pipeline.optimize(model, folder / "out.onnx", policy="measure", measured=measured.plan, precision="fp16", dims={"batch": 2})
    assert done.agrees
    onnxruntime.InferenceSession(str(folder / "out.onnx"), providers=["CPUExecutionProvider"])


def test_a_model_that_tensorrt_refuses_is_a_failed_result(folder: Path) -> None:
    """In a child: what TensorRT's parser says comes back as one line."""
    path = folder / "refused.onnx"
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER")
    ends = [helper.make_tensor_value_info(name, TensorProto.STRING, [2]) for name in ("x", "y")]
    onnx.save(helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 17)]), path)
    np.savez(folder / "refused.npz", x=np.array([1.0, 2.0], np.float32))
    base = Rewriting("none")
    candidate = Candidate(
        model=str(path), automatic=base, fused=base, precision="keep", inputs=str(folder / "refused.npz"), work=str(folder),
        automatic_engine=str(folder / "refused.engine"),
    )  # fmt: skip
    result = unit.in_child(candidate, timeout=300)
    assert result["failed"]
    assert "\n" not in result["failed"]
    assert "Traceback" not in result["failed"]
    assert not (folder / "refused.engine").exists()


def test_another_gpu_is_refused(model: Path) -> None:
    other = "l4" if Machine.here("auto").name != "l4" else "a100"
    with pytest.raises(MissingHere, match=f"--gpu {other}"):
        measuring.measure(model, gpu=other)


def test_the_command_is_interrupted_and_goes_on(measured: Measurement, model: Path, folder: Path, cache: Path) -> None:
    """One fusion alone, with the timing cache of the search above."""
    kept, out, report = folder / "command", folder / "command.onnx", folder / "report.json"
    line = [
        sys.executable, "-m", "onnxfuse", "optimize", model, "-o", out, "--policy", "measure", "--precision", "fp16", "--dims", "batch=2",
        "--only", "skip_layernorm", "--budget", "5", "--timing-cache", cache, "--measurements", kept, "--report", report,
    ]  # fmt: skip
    command = list(map(str, line))
    environment = {**os.environ, "ONNXFUSE_VERDICTS": str(folder / "command-verdicts.json"), "COLUMNS": "200", "NO_COLOR": "1"}
    first = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 300
    while not results(kept) and first.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=120)
    assert first.returncode == 130, said
    assert "1 measurement kept in" in said, said
    assert said.count("\n") == 1, said
    assert not out.exists()

    second = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert second.returncode == 0, second.stderr
    assert "measurements are from an earlier run" in second.stdout
    facts = json.loads(report.read_text())
    assert facts["measurement"]["resumed"] == 1
    alone = next(step for step in facts["plan"]["search"] if step["stage"] == "alone")
    assert alone["group"] == f"skip_layernorm 64x{WIDTH}"
    assert facts["timings"]["engines"]["automatic"]["median"] > 0
    assert onnx.load(out).graph.node
    assert not list(kept.glob("*/*.engine"))


def results(kept: Path) -> list[Path]:
    return [path for path in kept.glob("*/*.json") if len(path.stem) == 24]
