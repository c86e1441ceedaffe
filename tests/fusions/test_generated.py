"""Generated graphs: whatever is planted, rewriting keeps outputs and interface, is done in one go, and can be undone.

ONNXFUSE_EXAMPLES=20000 runs more of them, ONNXFUSE_SEED=n others.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from onnxfuse import pipeline
from onnxfuse.graph import write
from onnxfuse.plan import policy
from tests.fusions.helpers import Net, check_names, fuse, interface, load, names, ops, run, types_right, undo, value, without_types
from tests.fusions.strategies import KINDS, WIDTH, Example, Planter, examples

COUNT = int(os.environ.get("ONNXFUSE_EXAMPLES", "200"))
SEED = os.environ.get("ONNXFUSE_SEED")
SETTINGS = settings(
    max_examples=COUNT,
    derandomize=SEED is None,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    print_blob=True,
)


def seeded(test: Any) -> Any:
    return test if SEED is None else seed(int(SEED))(test)


def agree(got: list[np.ndarray], want: list[np.ndarray], tolerance: float) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        a, b = one.astype(np.float64), other.astype(np.float64)
        np.testing.assert_array_less(np.abs(a - b), tolerance * (1 + np.abs(b)))


def rewritten(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """The model after every legal fusion, folding repeated until nothing is left to fold, and how many sites there were."""
    loaded = load(model)
    pipeline.tidy(loaded)
    rules = policy.Rules("all")
    decisions, _ = pipeline.rewrite(loaded, rules)
    return write.to_proto(loaded), sum(decision.fused for decision in decisions)


@seeded
@SETTINGS
@given(examples())
def test_a_rewritten_graph_is_the_same_graph(example: Example) -> None:
    model, feeds = example.model, example.feeds
    want = run(model, feeds)
    fused, _ = rewritten(model)
    onnx.checker.check_model(fused, full_check=True)
    assert interface(fused) == interface(model)
    check_names(fused)
    types_right(fused)
    agree(run(fused, feeds), want, example.tolerance)
    again, sites = rewritten(fused)
    assert sites == 0
    assert without_types(again) == without_types(fused)
    plain = undo(fused)
    onnx.checker.check_model(plain, full_check=True)
    assert interface(plain) == interface(model)
    assert not plain.functions
    agree(run(plain, feeds), want, example.tolerance)


@seeded
@settings(SETTINGS, max_examples=max(1, COUNT // 5))
@given(examples())
def test_the_command_does_the_same(tmp_path_factory: pytest.TempPathFactory, example: Example) -> None:
    """Through files, with folding repeated until nothing is left to fold, as `optimize --policy all` does."""
    folder = tmp_path_factory.getbasetemp()
    source, fused, again, plain = (folder / f"generated-{name}.onnx" for name in ("source", "fused", "again", "plain"))
    source.write_bytes(example.model.SerializeToString())
    want = run(example.model, example.feeds)
    pipeline.optimize(source, fused, policy="all", check=False)
    made = onnx.load(fused)
    onnx.checker.check_model(made, full_check=True)
    assert interface(made) == interface(example.model)
    agree(run(made, example.feeds), want, example.tolerance)
    assert not [decision for decision in pipeline.optimize(fused, again, policy="all", check=False).decisions if decision.fused]
    pipeline.undo(fused, plain, check=False)
    agree(run(onnx.load(plain), example.feeds), want, example.tolerance)


@pytest.mark.parametrize(
    ("pattern", "fusions"),
    [
        ("convolution", ["conv_bias", "conv_bn"]), ("groupnorm", ["groupnorm"]), ("linear", ["linear_bias"]), ("attention", ["qkv_pack"]),
    ],
)  # fmt: skip
def test_the_strategy_plants_what_is_folded(pattern: str, fusions: list[str]) -> None:
    found: set[str] = set()
    for number in range(40):
        rng = random.Random(number)
        net, shape = Net(17), (2, 3, WIDTH) if pattern != "linear" else (3, WIDTH)
        last = getattr(Planter(net, lambda *options, rng=rng: rng.choice(options), commute=True), pattern)("x", shape)
        found |= set(names(fuse(net.model([value("x", shape)], [last]))[1]))
    assert found >= set(fusions)


FUSIONS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "silu": "silu", "gelu_erf": "gelu", "gelu_tanh": "gelu", "gelu_quick": "gelu"}


@seeded
@SETTINGS
@given(st.sampled_from(KINDS), st.data())
def test_a_near_miss_is_refused(kind: str, data: st.DataObject) -> None:
    """A whole pattern of which one constant is another, or one inner tensor has another reader: nothing of it is fused."""

    def pick(*options: Any) -> Any:
        return options[data.draw(st.integers(0, len(options) - 1))]

    net = Net(pick(9, 13, 17, 18, 23))
    last = getattr(Planter(net, pick, commute=True), kind)("x")
    model = net.model([value("x", [3, WIDTH])], [last])
    assert names(fuse(model)[1]) == [FUSIONS[kind]]
    exact = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and not t.dims and abs(_number(t) - 1e-3) > 1e-6]
    inner = [node.output[0] for node in model.graph.node[:-1]]
    if exact and data.draw(st.booleans()):
        wrong = data.draw(st.sampled_from(exact))
        wrong.CopyFrom(onnx.numpy_helper.from_array(np.float32(1.01 * _number(wrong) + 0.001), wrong.name))
    else:
        model.graph.output.append(value(data.draw(st.sampled_from(inner)), None))
        model = onnx.shape_inference.infer_shapes(model)
    feeds = {"x": np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)}
    fused, sites, misses = fuse(model)
    agree(run(fused, feeds), run(model, feeds), 3e-4)
    if not sites:  # a part of a pattern may be another one
        assert misses
        assert ops(fused) == ops(fuse(model, only=[])[0])


def _number(tensor: onnx.TensorProto) -> float:
    return float(onnx.numpy_helper.to_array(tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_the_strategy_plants_what_is_found(kind: str) -> None:
    for opset in (9, 13, 17, 23):
        net = Net(opset)
        last = getattr(Planter(net, lambda *options: options[-1], commute=True), kind)("x")
        assert names(fuse(net.model([value("x", [3, WIDTH])], [last]))[1]) == [FUSIONS[kind]]
