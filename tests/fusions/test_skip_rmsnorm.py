"""skip_rmsnorm: residual addition and norm become one node; the sum stays where others read it; a broadcast is no residual."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions.helpers import NEWEST, OPSETS, Net, check, fuse, names, ops, proved, random, rms_norm, run, same, undo, value
from tests.fusions.strategies import WIDTH, Planter, every, first

OP = "onnxfuse::SkipRMSNormalization"
X, SKIP = random(2, 3, WIDTH), random(2, 3, WIDTH, seed=1)
FEEDS = {"x": X, "skip": SKIP}
GAMMA = np.linspace(0.5, 2, WIDTH)


def norm(net: Net, total: str, dtype: Any = np.float32, out: str = "y", **attrs: Any) -> str:
    """One node where the opset has it, six elsewhere."""
    if net.opset >= 23:
        return net.op("RMSNormalization", total, net.const(GAMMA, dtype), out=out, **{"epsilon": 1e-3, **attrs})
    inverse = net.op("Reciprocal", net.op("Sqrt", net.op("Add", net.mean(net.op("Mul", total, total)), net.const(1e-3, dtype))))
    return net.op("Mul", net.const(GAMMA, dtype), net.op("Mul", total, inverse), out=out)


def inputs(shape: Any = (2, 3, WIDTH), skip: Any = None, elem: int = TensorProto.FLOAT) -> list[onnx.ValueInfoProto]:
    return [value("x", shape, elem), value("skip", shape if skip is None else skip, elem)]


def model(opset: int = 17, pick: Any = first, dtype: Any = np.float32, attrs: Any = None, commute: bool = False, **kwargs: Any) -> Any:
    net = Net(opset)
    norm(net, Planter(net, pick, dtype, commute).residual("x", "skip"), dtype, **(attrs or {}))
    return net.model(inputs(**kwargs), ["y"])


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_and_bias(opset: int) -> None:
    for original in every(lambda pick: model(opset, pick)):
        fused, sites, _ = check(original, FEEDS)
        assert ops(fused) == [OP]
        assert names(sites) == (["skip_rmsnorm"] if opset >= 23 else ["rmsnorm", "skip_rmsnorm"])
        rows = [onnx.numpy_helper.to_array(t) for t in original.graph.initializer if t.dims == [WIDTH]]
        bias = rows[0] if len(rows) == 2 else 0  # the other is gamma
        np.testing.assert_allclose(run(fused, FEEDS)[0], rms_norm(X + SKIP + bias, GAMMA, 1e-3), rtol=1e-4, atol=1e-5)
        same(run(undo(fused), FEEDS), run(fused, FEEDS))


def test_every_order_of_operands() -> None:
    for original in every(lambda pick: model(17, pick, commute=True)):
        assert ops(fuse(original)[0]) == [OP]


@pytest.mark.parametrize("opset", [13, 23])
def test_half_precision(opset: int) -> None:
    feeds = {name: given.astype(np.float16) for name, given in FEEDS.items()}
    fused, _, _ = check(model(opset, dtype=np.float16, elem=TensorProto.FLOAT16), feeds, rtol=1e-2, atol=1e-2)
    assert ops(fused) == [OP]
    np.testing.assert_allclose(
        run(fused, feeds)[0].astype(np.float64), rms_norm(feeds["x"] + feeds["skip"], GAMMA, 1e-3), rtol=5e-3, atol=5e-3
    )


@pytest.mark.parametrize("opset", [13, NEWEST])
def test_bfloat16(opset: int) -> None:
    import ml_dtypes

    original = model(opset, elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, _, _ = fuse(original)
    assert ops(fused) == [OP]
    proved(original, fused)


REFUSED = [
    ({"skip": (1, 3, WIDTH)}, "not proved to be of one shape ([2, 3, 8] and [1, 3, 8])"),
    ({"skip": (WIDTH,)}, "not proved to be of one shape ([2, 3, 8] and [8])"),
    ({"shape": ("n", 3, WIDTH), "skip": ("m", 3, WIDTH)}, "not proved to be of one shape (['n', 3, 8] and ['m', 3, 8])"),
    ({"opset": 23, "attrs": {"stash_type": 10}, "elem": 10, "dtype": np.float16}, "statistics are not kept in float32 (stash_type) (10)"),
    ({"opset": 23, "attrs": {"axis": 1}}, "normalises more than the last axis (axis) (1)"),
    ({"opset": 23, "elem": TensorProto.DOUBLE, "dtype": np.float64}, "'x' is of type (double)"),
]


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(kwargs: dict[str, Any], reason: str) -> None:
    fused, sites, misses = fuse(model(**kwargs))
    assert "skip_rmsnorm" not in names(sites)
    assert any(reason in miss.reason for miss in misses if miss.fusion == "skip_rmsnorm"), [miss.reason for miss in misses]
    assert OP not in ops(fused)


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("opset", [13, 23])
def test_the_sum_is_a_second_output_where_others_read_it(output: bool, opset: int) -> None:
    net = Net(opset)
    total = net.op("Add", "x", "skip")
    other = total if output else net.op("Neg", total)  # stands before the norm
    norm(net, total)
    fused, _, _ = check(net.model(inputs(), ["y", other]), FEEDS)
    assert sorted(ops(fused)) == sorted([OP] if output else [OP, "Neg"])
    np.testing.assert_allclose(run(fused, FEEDS)[1], (X + SKIP) * (1 if output else -1), rtol=1e-6)


def test_a_chain_of_residuals_as_in_a_transformer() -> None:
    net = Net(13)
    x = "x"
    for i in range(4):
        y = norm(net, x, out=f"norm{i}")
        x = net.op("Add", net.op("MatMul", y, net.const(np.eye(WIDTH))), x, out=f"sum{i}")
    norm(net, x)
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": X})
    assert names(sites).count("rmsnorm") == 5
    assert names(sites).count("skip_rmsnorm") == 4
    assert "Add" not in ops(fused)
