"""rmsnorm: every spelling becomes one node that computes the formula; what only looks like it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions.helpers import NEWEST, OPSETS, Net, check, fuse, ops, proved, random, rms_norm, run, same, value
from tests.fusions.strategies import WIDTH, Planter, every

NODE = {True: "RMSNormalization", False: "onnxfuse::RMSNormalization"}
X = random(2, 3, WIDTH)
SCALE = np.linspace(0.5, 2, WIDTH)


def spelled(
    net: Net,
    x: str = "x",
    *,
    scale: Any = SCALE,
    epsilon: Any = 1e-5,
    exponent: Any = 2.0,
    axes: tuple[int, ...] = (-1,),
    keepdims: int = 1,
    dtype: Any = np.float32,
    out: str = "y",
) -> dict[str, str]:
    """T5's spelling; returns its tensors by name."""
    square = net.op("Pow", x, net.const(exponent, dtype))
    mean = net.mean(square, axes, keepdims)
    root = net.op("Sqrt", net.op("Add", mean, net.const(epsilon, dtype)))
    inverse = net.op("Reciprocal", root)
    norm = net.op("Mul", x, inverse)
    net.op("Mul", scale if isinstance(scale, str) else net.const(scale, dtype), norm, out=out)
    return {"square": square, "mean": mean, "root": root, "inverse": inverse, "norm": norm}


def model(
    opset: int = 17, shape: Any = (2, 3, WIDTH), elem: int = TensorProto.FLOAT, ir: int | None = None, **kwargs: Any
) -> onnx.ModelProto:
    net = Net(opset)
    spelled(net, **kwargs)
    return net.model([value("x", shape, elem)], ["y"], ir)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset: int) -> None:
    fused, sites, misses = check(model(opset), {"x": X}, rtol=1e-5)
    assert ops(fused) == [NODE[opset >= 23]]
    assert sites == [("rmsnorm", None)]
    assert misses == []
    np.testing.assert_allclose(run(fused, {"x": X})[0], rms_norm(X, SCALE), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 13, 18, NEWEST])
@pytest.mark.parametrize("ir", [3, 4, 6, 8, 10, onnx.IR_VERSION])
def test_every_ir_version(opset: int, ir: int) -> None:
    fused, sites, _ = check(model(opset, ir=ir), {"x": X})
    assert len(sites) == 1
    assert fused.ir_version == ir


@pytest.mark.parametrize("commute", [False, True])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("opset", [11, 23])
def test_every_spelling(opset: int, scale: bool, commute: bool) -> None:
    def build(pick: Any) -> onnx.ModelProto:
        net = Net(opset)
        last = Planter(net, pick, commute=commute).rmsnorm("x", scale)
        return net.model([value("x", ["N", 3, WIDTH])], [last])

    for original in every(build):
        fused, sites, _ = fuse(original)
        assert sites == [("rmsnorm", None)], ops(original)
        assert ops(fused) == [NODE[opset >= 23]]
        same(run(fused, {"x": X}), run(original, {"x": X}))


def test_constant_nodes() -> None:
    net = Net(17, constant_nodes=True)
    spelled(net)
    assert ops(check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": X})[0]) == [NODE[False]]


@pytest.mark.parametrize("opset", [13, 23])
@pytest.mark.parametrize("casts", [1, 2])
def test_half_precision_that_is_widened_first(opset: int, casts: int) -> None:
    """The form of Llama and T5 in half precision: cast up, normalise, cast down, scale."""
    x = (300 * random(2, 3, WIDTH)).astype(np.float16)  # whose square half precision does not hold
    net = Net(opset)
    wide = net.op("Cast", "x", to=1)
    mean = net.mean(net.op("Pow", wide, net.const(2)))
    inverse = net.op("Reciprocal", net.op("Sqrt", net.op("Add", mean, net.const(1e-5))))
    norm = net.op("Mul", wide if casts == 1 else net.op("Cast", "x", to=1), inverse)
    net.op("Mul", net.const(SCALE, np.float16), net.op("Cast", norm, to=10), out="y")
    fused, _, _ = check(net.model([value("x", [2, 3, WIDTH], TensorProto.FLOAT16)], ["y"]), {"x": x}, rtol=5e-3, atol=5e-3)
    assert ops(fused) == [NODE[opset >= 23]]
    np.testing.assert_allclose(run(fused, {"x": x})[0].astype(np.float64), rms_norm(x, SCALE), rtol=5e-3, atol=5e-3)


def test_half_precision_that_is_scaled_in_float32() -> None:
    x = random(2, 3, WIDTH, dtype=np.float16)
    net = Net(13)
    spelled(net, net.op("Cast", "x", to=1), out="wide")
    net.op("Cast", "wide", to=10, out="y")
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH], TensorProto.FLOAT16)], ["y"]), {"x": x}, rtol=5e-3)
    assert ops(fused) == ["Cast", NODE[False], "Cast"]
    assert len(sites) == 1


def test_a_widened_value_that_others_read_is_kept() -> None:
    x = random(2, 3, WIDTH, dtype=np.float16)
    net = Net(13)
    wide = net.op("Cast", "x", to=1)
    inverse = net.op("Reciprocal", net.op("Sqrt", net.op("Add", net.mean(net.op("Mul", wide, wide)), net.const(1e-5))))
    net.op("Mul", net.const(SCALE, np.float16), net.op("Cast", net.op("Mul", wide, inverse), to=10), out="y")
    original = net.model([value("x", [2, 3, WIDTH], TensorProto.FLOAT16)], ["y", wide])
    fused, sites, _ = check(original, {"x": x}, rtol=5e-3, atol=5e-3)
    assert len(sites) == 1
    assert ops(fused) == ["Cast", NODE[False], "Cast", "Mul"]  # only the part in float32


@pytest.mark.parametrize("to", [TensorProto.FLOAT16, TensorProto.INT32, TensorProto.DOUBLE])
def test_a_cast_that_is_no_widening(to: int) -> None:
    elem = {TensorProto.FLOAT16: np.float16, TensorProto.INT32: np.int32, TensorProto.DOUBLE: np.float64}[to]
    net = Net(17)
    cast = net.op("Cast", "x", to=to)
    square = net.op("Cast", net.op("Mul", cast, cast), to=1) if to == TensorProto.INT32 else net.op("Mul", cast, cast)
    back = (lambda name: name) if to == TensorProto.INT32 else (lambda name: net.op("Cast", name, to=1))
    mean = net.op("Add", net.mean(square), net.const(1e-5, np.float32 if to == TensorProto.INT32 else elem))
    net.op("Div", "x", back(net.op("Sqrt", mean)), out="y")
    _, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": 3 * X})
    assert sites == []


def test_half_precision_does_not_overflow() -> None:
    x = (1000 * X).astype(np.float16)
    fused, _, _ = fuse(model(13, elem=TensorProto.FLOAT16, dtype=np.float16))
    np.testing.assert_allclose(run(fused, {"x": x})[0].astype(np.float64), rms_norm(x, SCALE), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("opset", [13, NEWEST])
def test_bfloat16(opset: int) -> None:
    import ml_dtypes

    original = model(opset, elem=TensorProto.BFLOAT16, dtype=ml_dtypes.bfloat16)
    fused, sites, _ = fuse(original)
    assert len(sites) == 1
    assert ops(fused) == [NODE[opset >= 23]]
    proved(original, fused)


@pytest.mark.parametrize("axes", [(-1,), (2,)])
def test_axes(axes: tuple[int, ...]) -> None:
    assert len(check(model(axes=axes), {"x": X})[1]) == 1


@pytest.mark.parametrize("epsilon", [1e-12, 0.05])
@pytest.mark.parametrize("opset", [9, 13, 23])
def test_epsilon_is_kept(opset: int, epsilon: float) -> None:
    fused, _, _ = check(model(opset, epsilon=epsilon), {"x": 0.1 * X})
    np.testing.assert_allclose(run(fused, {"x": 0.1 * X})[0], rms_norm(0.1 * X, SCALE, epsilon), rtol=1e-4, atol=1e-4)


REFUSED = [
    ({"shape": (2, 3, "W")}, "length of the normalised rows of 'x' is unknown ([2, 3, 'W'])"),
    ({"exponent": 3.0}, "constant 'two' is not 2 (3.0)"),
    ({"axes": (1,)}, "normalised axes are not the last ones ([1])"),
    ({"axes": (-2, -1)}, "normalises several axes ([-2, -1])"),
    ({"keepdims": 0, "shape": (WIDTH, WIDTH)}, "ReduceMean drops the axes it reduces (keepdims) (0)"),
    ({"epsilon": np.linspace(1, 2, 3).reshape(3, 1)}, "epsilon is not one value ([3, 1])"),
    ({"elem": TensorProto.DOUBLE, "dtype": np.float64}, "'x' is of type (double)"),
    ({"epsilon": np.full((1, 1, 1, 1), 1e-5)}, "has more axes than 'x', and so has the result ([1, 1, 1, 1])"),
]


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(kwargs: dict[str, Any], reason: str) -> None:
    original = model(**kwargs)
    fused, sites, misses = fuse(original)
    assert sites == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "rmsnorm"), [miss.reason for miss in misses]
    assert ops(fused) == ops(original)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 1, WIDTH), (3, WIDTH), (1, 1, 1, WIDTH)])
def test_a_scale_that_broadcasts_stays_outside(shape: tuple[int, ...]) -> None:
    fused, sites, _ = check(model(17, scale=np.full(shape, 1.5)), {"x": X})
    assert len(sites) == 1
    assert ops(fused) == [NODE[False], "Mul"]


def test_a_scale_that_widens_the_rows_stays_outside() -> None:
    x = random(3, 1)
    fused, _, _ = check(model(17, shape=(3, 1), scale=np.array([0.5, -2])), {"x": x})
    assert run(fused, {"x": x})[0].shape == (3, 2)


@pytest.mark.parametrize("name", ["square", "mean", "root", "inverse"])
@pytest.mark.parametrize("output", [False, True])
def test_an_inner_tensor_that_others_read_is_kept(name: str, output: bool) -> None:
    net = Net(17)
    inner = spelled(net)[name]
    other = inner if output else net.op("Relu", inner)
    _, sites, misses = check(net.model([value("x", [2, 3, WIDTH])], ["y", other]), {"x": X})
    assert sites == []
    reader = "a graph output" if output else "(Relu)"
    assert any(f"'{inner}' is also read by" in miss.reason and reader in miss.reason for miss in misses)


def test_the_normalised_value_is_read_by_others() -> None:
    net = Net(17)
    norm = spelled(net)["norm"]
    fused, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y", norm]), {"x": X})
    assert len(sites) == 1
    assert ops(fused) == [NODE[False], "Mul"]


def test_another_tensor_than_the_normalised_one_is_scaled() -> None:
    net = Net(17)
    other = net.op("Neg", "x")
    inverse = net.op("Reciprocal", net.op("Sqrt", net.op("Add", net.mean(net.op("Mul", "x", "x")), net.const(1e-5))))
    net.op("Mul", net.const(SCALE), net.op("Mul", other, inverse), out="y")
    _, sites, _ = check(net.model([value("x", [2, 3, WIDTH])], ["y"]), {"x": X})
    assert sites == []
