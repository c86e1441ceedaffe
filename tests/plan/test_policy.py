"""Who decides on a site, and in which order."""

from __future__ import annotations

import pytest

from onnxfuse.bench.stats import Interval
from onnxfuse.errors import BadInput
from onnxfuse.fusions import REGISTRY
from onnxfuse.plan.policy import Rules, Selection, decide, unused
from onnxfuse.plan.sites import Site
from onnxfuse.plan.verdicts import Target, Verdict

H200 = Target("h200", "10.6.0.post1", "580")
L4 = Target("l4", "10.6.0", "580")
FUSIONS = {fusion.name: fusion for fusion in REGISTRY}


def site(fusion: str, shape: str = "1x128x768") -> Site:
    return Site(fusion, None, "y", ("a", "b"), shape, "float16")


def verdict(low: float, high: float, gpu: str = "h200", rows: int = 128, width: int = 768) -> Verdict:
    median = Interval(1.0, 1.0, 1.0)
    ratio = Interval((low + high) / 2, low, high)
    return Verdict("skip_layernorm", "bert", rows, width, "float16", gpu, "580", "10.6.0", median, median, ratio, "2026-01-01")


def decision(fusion: str, rules: Rules, shape: str = "1x128x768"):
    return decide(FUSIONS[fusion], site(fusion, shape), rules)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", {"layernorm": True, "conv_bn": False, "skip_layernorm": False}),
        ("all", {"layernorm": True, "conv_bn": True, "skip_layernorm": True}),
        ("proven", {"layernorm": True, "conv_bn": True, "skip_layernorm": False}),
    ],
)
def test_policies_decide_by_kind(policy: str, expected: dict[str, bool]) -> None:
    assert {name: decision(name, Rules(policy=policy)).fused for name in expected} == expected


@pytest.mark.parametrize(
    ("low", "high", "fused", "word"), [(1.02, 1.1, True, "won"), (0.9, 0.98, False, "lost"), (0.99, 1.05, False, "draw")]
)
def test_proven_follows_the_interval(low: float, high: float, fused: bool, word: str) -> None:
    found = decision("skip_layernorm", Rules(verdicts=[verdict(low, high)], target=H200))
    assert found.fused is fused
    assert found.reason.startswith(word)


@pytest.mark.parametrize("policy", ["all", "proven", "measure"])
def test_a_fusion_without_a_kernel_for_the_gpu_is_left(policy: str) -> None:
    found = decision("encoder_layer", Rules(policy=policy, target=L4, measured={("encoder_layer", "y"): (True, "")}))
    assert (found.fused, found.reason) == (False, "its kernel is for sm_90, and l4 is sm_89: left to TensorRT")
    assert "kernel" not in decision("encoder_layer", Rules(policy=policy, target=H200)).reason
    assert decision("encoder_layer", Rules(policy="all")).fused  # for a GPU that is not known


def test_a_fusion_without_a_kernel_for_the_type_is_for_looking_alone() -> None:
    for dtype, fused in (("float32", False), ("bfloat16", True), (None, True)):
        rules = Rules(policy="measure", target=H200, dtype=dtype, measured={("encoder_layer", "y"): (True, "won")})
        assert decision("encoder_layer", rules).fused is fused
    assert decision("encoder_layer", Rules(policy="all", dtype="float32")).fused


def test_a_verdict_of_another_gpu_is_called_an_estimate() -> None:
    found = decision("skip_layernorm", Rules(verdicts=[verdict(1.02, 1.1)], target=L4))
    assert found.reason.startswith("estimate, from H200")
    assert not found.fused  # by less than what an estimate must have won by
    assert decision("skip_layernorm", Rules(verdicts=[verdict(1.06, 1.1)], target=L4)).fused
    assert "won" in found.reason


def test_the_same_gpu_beats_a_nearer_number_of_rows() -> None:
    rules = Rules(verdicts=[verdict(1.02, 1.1, gpu="l4", rows=128), verdict(0.9, 0.95, rows=4096)], target=H200)
    assert decision("skip_layernorm", rules).fused is False


def test_another_width_says_nothing() -> None:
    found = decision("skip_layernorm", Rules(verdicts=[verdict(1.02, 1.1, width=1024)], target=H200))
    assert not found.fused
    assert "never measured" in found.reason


def test_a_plan_beats_the_policy_and_skip_beats_the_plan() -> None:
    plan = {("skip_layernorm", "y"): (True, "by hand")}
    assert decision("skip_layernorm", Rules(policy="none", plan=plan)).fused
    assert decision("skip_layernorm", Rules(policy="none", plan=plan)).reason == "plan file: by hand"
    skipped = decision("skip_layernorm", Rules(policy="all", plan=plan, selection=Selection(skip=("skip_layernorm",))))
    assert not skipped.fused
    assert skipped.reason == "left out by --skip"


def test_only_brings_what_a_fusion_is_built_on() -> None:
    rules = Rules(policy="all", selection=Selection(only=("skip_layernorm",)))
    assert {name: decision(name, rules).fused for name in ("layernorm", "skip_layernorm", "gelu", "conv_bn")} == {
        "layernorm": True,
        "skip_layernorm": True,
        "gelu": False,
        "conv_bn": False,
    }


def test_unknown_names_are_refused() -> None:
    with pytest.raises(BadInput, match="--only layer_norm: no such fusion; there are groupnorm, layernorm,"):
        Selection(only=("layer_norm",))
    with pytest.raises(BadInput, match="--policy best: no such policy"):
        Rules(policy="best")


def test_unused_entries_of_a_plan_are_named() -> None:
    plan = {("gelu", "y"): (True, ""), ("gelu", "z"): (True, "")}
    assert unused(plan, [decision("gelu", Rules(plan=plan))]) == [("gelu", "z")]


def test_a_verdict_of_another_precision_is_an_estimate() -> None:
    rules = Rules(verdicts=[verdict(1.02, 1.1)], target=H200, dtype="bfloat16")
    assert decision("skip_layernorm", rules).reason.startswith("estimate, from H200")


@pytest.mark.parametrize("name", ["linear_epilogue", "attention"])
def test_half_types_without_a_kernel_on_an_old_gpu_are_left(name: str) -> None:
    t4 = Target("t4", "10.6.0", "580")
    found = decision(name, Rules(policy="all", target=t4, dtype="float16"))
    assert (found.fused, found.reason) == (False, "its kernel takes float16 from sm_80 on, and t4 is sm_75: left to TensorRT")
    assert decision(name, Rules(policy="all", target=L4, dtype="float16")).fused
    assert decision("attention", Rules(policy="all", target=t4, dtype="float32")).fused
