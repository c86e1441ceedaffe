"""The unit of work: what it compares, what it shares, and what becomes of faults. onnxruntime stands in for TensorRT; nothing is timed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfuse.bench import candidate as work
from onnxfuse.bench import timing
from onnxfuse.bench.candidate import Candidate, Rewriting, error_of, judge
from onnxfuse.bench.timing import Timings
from onnxfuse.engine.trt import EngineFault
from tests.bench import standin
from tests.bench.standin import Builds, StandIn
from tests.commands.conftest import transformer_tail

SITES = (("skip_layernorm", "normed", True),)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    return standin.install(monkeypatch)


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    """A Transformer's tail with its residual and LayerNormalization fused, against the same left to TensorRT."""
    onnx.save(transformer_tail(), tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "inputs.npz", **{name: rng.standard_normal((2, 16, 64)).astype(np.float32) for name in ("x", "r")})
    return Candidate(
        model=str(tmp_path / "model.onnx"), automatic=Rewriting("measure"), fused=Rewriting("measure", sites=SITES), precision="keep",
        inputs=str(tmp_path / "inputs.npz"), work=str(tmp_path), automatic_engine=str(tmp_path / "automatic.engine"),
        timing_cache=str(tmp_path / "t.cache"),
    )  # fmt: skip


def test_a_candidate_travels_as_json(candidate: Candidate) -> None:
    assert Candidate.from_dict(json.loads(json.dumps(candidate.to_dict()))) == candidate


def test_what_is_chosen_is_fused_and_nothing_else(candidate: Candidate, builds: Builds) -> None:
    result = json.loads(json.dumps(work.measure(candidate), allow_nan=False))
    assert work.counts(result["sites"]) == {"gelu": 1, "skip_layernorm": 1}  # bias_gelu is a site, too
    operators = {node.op_type for node in onnx.load(Path(candidate.automatic_engine).with_suffix(".onnx")).graph.node}
    assert not operators & {"SkipLayerNormalization", "BiasGelu"}
    assert "Gelu" in operators
    assert builds.done == [("automatic.engine", False, candidate.timing_cache), ("fused.engine", True, candidate.timing_cache)]


def test_a_result_says_times_ratio_and_errors(candidate: Candidate, builds: Builds) -> None:
    result = work.measure(candidate)
    assert result["automatic_ms"]["median"] == pytest.approx(0.4, rel=1e-3)
    assert result["fused_ms"]["median"] == pytest.approx(0.3, rel=1e-3)
    assert result["ratio"]["low"] < 4 / 3 < result["ratio"]["high"]
    assert (result["verdict"], result["agrees"], result["marks"], result["same_engine"]) == ("faster", True, [], False)
    assert result["max_abs"] == pytest.approx(1e-4, rel=0.1)  # what the stand-in adds
    assert result["inputs"] == {"x": [2, 16, 64], "r": [2, 16, 64]}
    assert result["layers"]["diff"]["summary"] == standin.SUMMARY
    assert list(result["seconds"]) == ["automatic", "fused", "reference", "check", "time", "layers"]


def test_the_automatic_engine_and_the_reference_are_made_once(
    candidate: Candidate, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.measure(candidate)
    ran: list[object] = []
    monkeypatch.setattr("onnxfuse.verify.reference.run", lambda *about: ran.append(about))
    other = dataclasses.replace(candidate, fused=Rewriting("measure", sites=(("bias_gelu", "y", True),)))
    assert work.counts(work.measure(other)["sites"]) == {"bias_gelu": 1, "gelu": 1}
    assert [name for name, *_ in builds.done] == ["automatic.engine", "fused.engine", "fused.engine"]
    assert ran == []
    left = sorted(path.name for path in Path(candidate.work).iterdir())
    assert not [name for name in left if "fused" in name or "scratch" in name]


@pytest.mark.parametrize("change", ["model", "driver", "engine", "optimized model", "stamp"])
def test_an_automatic_engine_of_something_else_is_built_again(
    candidate: Candidate, builds: Builds, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    work.measure(candidate)
    engine = Path(candidate.automatic_engine)
    if change == "model":
        changed = transformer_tail()
        changed.graph.initializer[0].raw_data = np.full(64, 2.0, np.float32).tobytes()
        onnx.save(changed, candidate.model)
    elif change == "driver":
        monkeypatch.setattr("onnxfuse.engine.trt.gpu", lambda: standin.GPU._replace(driver="590.1"))
    elif change == "engine":
        engine.unlink()
    elif change == "optimized model":
        engine.with_suffix(".onnx").write_bytes(Path(candidate.model).read_bytes())
    else:
        stamp = engine.with_suffix(".made-of.json")
        stamp.write_text(stamp.read_text()[:-20])
    assert work.measure(candidate)["agrees"]
    assert [name for name, *_ in builds.done].count("automatic.engine") == 2


def test_an_engine_against_itself_is_built_once_and_is_no_two_engines(candidate: Candidate, builds: Builds) -> None:
    result = work.measure(dataclasses.replace(candidate, fused=candidate.automatic))
    assert builds.done == [("automatic.engine", False, candidate.timing_cache)]
    assert result["same_engine"]
    assert "layers" not in result


def test_what_makes_the_same_model_is_not_built(candidate: Candidate, builds: Builds) -> None:
    absent = Rewriting("measure", sites=(("skip_layernorm", "nowhere", True),))
    result = work.measure(dataclasses.replace(candidate, fused=absent))
    assert result["same_engine"]
    assert [name for name, *_ in builds.done] == ["automatic.engine"]


def test_outputs_that_disagree_are_marked(candidate: Candidate, builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "error", 0.001)
    result = work.measure(candidate)
    assert not result["agrees"]
    assert result["marks"][0].startswith("outputs disagree: error 0.0011")


def test_an_enqueue_that_fails_is_no_result(candidate: Candidate, builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: StandIn, feeds: object) -> None:
        raise EngineFault("fused: enqueue failed: error 2")

    monkeypatch.setattr(StandIn, "run", failing)
    with pytest.raises(EngineFault, match="enqueue failed"):
        work.measure(candidate)


def test_a_layer_profile_that_fails_costs_no_measurement(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    own = work._layers
    standin.install(monkeypatch)
    monkeypatch.setattr(work, "_layers", own)

    def failing(*about: object) -> None:
        raise EngineFault("fused: the profiler says nothing")

    monkeypatch.setattr(work.layers, "profile", failing)
    result = work.measure(candidate)
    assert result["notes"] == ["layers: fused: the profiler says nothing"]
    assert "layers" not in result


def marked(times: int) -> Any:
    """Timings of which the first so many are marked."""
    taken: list[Timings] = []

    def time(engines: Mapping[str, Any], feeds: object, samples: int) -> Timings:
        taken.append(standin.timings(engines, feeds, samples))
        return dataclasses.replace(taken[-1], marks=("SM clock moved",) if len(taken) <= times else ())

    return time


@pytest.mark.parametrize(("times", "marks"), [(1, []), (2, ["SM clock moved"])])
def test_marked_timings_are_taken_again_once(
    candidate: Candidate, builds: Builds, monkeypatch: pytest.MonkeyPatch, times: int, marks: list[str]
) -> None:
    monkeypatch.setattr(timing, "time_placed", marked(times))
    result = work.measure(candidate)
    assert result["marks"] == marks
    assert result["notes"] == ["timed again, as the first time was marked: SM clock moved"]


@pytest.mark.parametrize(("levels", "off"), [([1.0], False), ([1.01, 1.0], False), ([1.01, 0.99], True)])
def test_one_engine_against_itself_must_be_a_draw(
    candidate: Candidate, builds: Builds, monkeypatch: pytest.MonkeyPatch, levels: list[float], off: bool
) -> None:
    """A timing that finds one engine faster than itself is taken again once, and then marked."""
    taken = iter(levels)

    def time(engines: Mapping[str, Any], feeds: object, samples: int) -> Timings:
        of = standin.timings(engines, feeds, samples)
        level = next(taken)
        return dataclasses.replace(
            of, samples={"automatic": of.samples["automatic"], "fused": [t / level for t in of.samples["automatic"]]}
        )

    monkeypatch.setattr(timing, "time_placed", time)
    result = work.measure(dataclasses.replace(candidate, fused=candidate.automatic))
    assert any("timed against itself is no draw" in mark for mark in result["marks"]) is off
    assert len(result["notes"]) == len(levels) - 1


def test_what_a_caller_adds_is_timed_beside(candidate: Candidate, builds: Builds) -> None:
    def also(automatic: work.Side, fused: work.Side, feeds: object, outputs: Mapping[str, np.ndarray]) -> work.Also:
        assert set(outputs) == {"y"}
        return work.Also({"trt_fp16_flag": automatic.engine}, ("seen",), {"fresh_process": True})

    result = work.measure(candidate, also=also)
    assert result["others_ms"]["trt_fp16_flag"]["median"] == pytest.approx(0.5, rel=1e-3)
    assert result["notes"] == ["seen"]
    assert result["fresh_process"] is True


def test_a_fault_in_a_child_is_a_failed_result(candidate: Candidate) -> None:
    result = work.in_child(dataclasses.replace(candidate, model="absent.onnx"), timeout=120)
    assert result["status"] in (2, 3)
    assert "absent.onnx" in result["failed"] or "TensorRT" in result["failed"]
    assert "\n" not in result["failed"]
    assert not list(Path(candidate.work).glob("order-*"))


def test_the_child_reads_its_order_tells_its_steps_and_writes_its_answer(
    candidate: Candidate, builds: Builds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `in_child` starts, in this process."""
    order, answer = tmp_path / "order.json", tmp_path / "answer.json"
    order.write_text(json.dumps(candidate.to_dict()))
    assert work.main(order, answer) == 0
    assert json.loads(answer.read_text())["verdict"] == "faster"
    assert capsys.readouterr().out.splitlines() == [
        "step: the automatic engine", "step: the fused engine", "step: the reference in onnxruntime", "step: comparing the outputs",
        "step: timing", "step: timing layer by layer", "step: done",
    ]  # fmt: skip
    answer.unlink()
    order.write_text(json.dumps({**candidate.to_dict(), "model": "absent.onnx"}))
    assert work.main(order, answer) == 2
    assert "error: absent.onnx" in capsys.readouterr().err
    assert not answer.exists()


def test_the_reference_is_onnxruntimes(candidate: Candidate, builds: Builds) -> None:
    work.measure(candidate)
    feeds = work.load_feeds(Path(candidate.inputs))
    session = onnxruntime.InferenceSession(candidate.model, providers=["CPUExecutionProvider"])
    kept = work.load_feeds(Path(candidate.work) / "reference.npz")
    np.testing.assert_allclose(kept["y"], session.run(["y"], feeds)[0], rtol=1e-4, atol=1e-5)


def test_dynamic_inputs_get_the_shapes_of_the_feeds(candidate: Candidate) -> None:
    feeds = work.load_feeds(Path(candidate.inputs))
    assert work.fixed_shapes(Path(candidate.model), feeds) == ["x:2x16x64", "r:2x16x64"]


def test_errors_against_the_reference() -> None:
    want = {"y": np.array([1.0, 2.0, np.nan], np.float32), "k": np.array([1, 2])}
    same = error_of({"y": np.array([1.0, 2.0, np.nan], np.float16), "k": np.array([1, 2], np.int32)}, want)
    assert same == {"max_abs": 0.0, "cosine": pytest.approx(1.0)}
    near = error_of({"y": np.array([1.0, 2.5, np.nan]), "k": np.array([1, 2])}, want)
    assert near["max_abs"] == 0.5
    assert near["cosine"] == pytest.approx((1 + 5) / math.sqrt(5 * 7.25))


@pytest.mark.parametrize(
    "got",
    [
        {"k": np.array([1, 2])},
        {"y": np.array([1.0, 2.0]), "k": np.array([1, 2])},
        {"y": np.array([1.0, 2.0, 3.0]), "k": np.array([1, 2])},
        {"y": np.array([np.nan, 2.0, np.nan]), "k": np.array([1, 2])},
        {"y": np.array([1.0, 2.0, np.nan]), "k": np.array([1, 3])},
    ],
    ids=["missing", "shape", "no NaN", "one NaN more", "integers"],
)
def test_errors_without_bound(got: dict[str, np.ndarray]) -> None:
    want = {"y": np.array([1.0, 2.0, np.nan], np.float32), "k": np.array([1, 2])}
    assert error_of(got, want)["max_abs"] == math.inf


@pytest.mark.parametrize(
    ("fused", "automatic", "agrees"),
    [
        ((1e-3, 0.99999), (1e-3, 0.99999), True),
        ((2e-3, 0.99999), (1e-3, 0.99999), True),
        ((2.1e-3, 0.99999), (1e-3, 0.99999), False),
        ((1e-3, 0.9998), (1e-3, 0.9998), False),
        ((1e-7, 1.0), (0.0, 1.0), True),
        ((math.inf, 0.0), (1e-3, 1.0), False),
        ((1e-3, math.nan), (1e-3, 1.0), False),
        ((math.nan, 1.0), (1e-3, 1.0), False),
    ],
)
def test_agreement(fused: tuple[float, float], automatic: tuple[float, float], agrees: bool) -> None:
    as_dict = [{"max_abs": error, "cosine": cosine} for error, cosine in (fused, automatic)]
    got, reason = judge(*as_dict)
    assert got is agrees
    assert bool(reason) is not agrees
