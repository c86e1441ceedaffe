"""linear_epilogue: a product, its bias and what follows become one node; a chain of ConvNeXt blocks keeps no transpose inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxfuse import pipeline
from onnxfuse.engine import prepare
from tests.fusions import convnext
from tests.fusions.convnext import weights
from tests.fusions.helpers import NEWEST, Net, check, fuse, names, ops, proved, random, value
from tests.fusions.strategies import Planter, first

F16 = TensorProto.FLOAT16
K, N = 16, 24
X = random(2, 3, K, dtype=np.float16)
OPS = {"erf": "LinearGelu", "tanh": "LinearGeluTanh", "quick": "LinearQuickGelu", "silu": "LinearSilu", "relu": "LinearRelu"}
HALF = {"rtol": 5e-3, "atol": 5e-3}


def activated(
    variant: str, opset: int = 17, bias: bool = True, swap: bool = False, shape: Any = ("N", 3, K), **kwargs: Any
) -> onnx.ModelProto:
    net = Net(opset, **kwargs)
    y = net.op("MatMul", "x", weights(net, K, N))
    if bias:
        b = weights(net, N, seed=2)
        y = net.op("Add", *((b, y) if swap else (y, b)))
    if variant == "relu":
        last = net.op("Relu", y)
    elif variant == "silu":
        last = net.op("Mul", y, net.op("Sigmoid", y))
    else:
        last = getattr(Planter(net, first, np.float16), f"gelu_{variant}")(y)
    return net.model([value("x", shape, F16)], [last])


@pytest.mark.parametrize("variant", list(OPS))
@pytest.mark.parametrize("opset", [13, 17, 20, NEWEST])
def test_activations_at_every_opset(variant: str, opset: int) -> None:
    fused, sites, _ = check(activated(variant, opset), {"x": X}, **HALF)
    assert ops(fused) == [f"onnxfuse::{OPS[variant]}"]
    assert sites[-1] == ("linear_epilogue", variant)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("constant_nodes", [False, True])
def test_spellings_of_the_bias(bias: bool, swap: bool, constant_nodes: bool) -> None:
    fused, sites, _ = check(activated("erf", bias=bias, swap=swap, constant_nodes=constant_nodes), {"x": X}, **HALF)
    assert ops(fused) == ["onnxfuse::LinearGelu"]
    assert names(sites) == ["gelu", "linear_epilogue"]


def gemm(variant: str = "relu", turned: bool = True, bias: bool = True, **attrs: float) -> onnx.ModelProto:
    net = Net(17)
    w = weights(net, N, K) if turned else weights(net, K, N)
    y = net.op("Gemm", "x", w, *([weights(net, N, seed=2)] if bias else []), **({"transB": 1} if turned else {}), **attrs)
    last = net.op("Relu", y) if variant == "relu" else Planter(net, first, np.float16).gelu_erf(y)
    return net.model([value("x", ("N", K), F16)], [last])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", ["relu", "erf"])
def test_gemm(variant: str, bias: bool, turned: bool) -> None:
    original = gemm(variant, turned, bias)
    fused, sites, _ = check(original, {"x": X[0]}, **HALF)
    assert ops(fused) == [f"onnxfuse::{OPS[variant]}"]
    assert sites[-1] == ("linear_epilogue", variant)
    assert [list(t.dims) for t in fused.graph.initializer if len(t.dims) == 2] == [[K, N]]


def test_a_product_of_matrices_whose_bias_linear_bias_has_folded() -> None:
    fused, sites, _ = check(activated("silu", shape=("N", K)), {"x": X[0]}, **HALF)
    assert ops(fused) == ["onnxfuse::LinearSilu"]
    assert names(sites) == ["silu", "linear_bias", "linear_epilogue"]


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [({"alpha": 0.5}, "Gemm scales (alpha) (0.5)"), ({"beta": 2.0}, "Gemm scales (beta) (2.0)"), ({"transA": 1}, "transposes its first")],
)
def test_gemms_that_do_more_are_left(attrs: dict[str, float], reason: str) -> None:
    original = gemm(**attrs)
    if "transA" in attrs:
        original.graph.input[0].CopyFrom(value("x", (K, "N"), F16))
    _, sites, misses = fuse(original)
    assert names(sites) == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "linear_epilogue"), misses


def test_float32_is_left_to_others() -> None:
    net = Net()
    last = net.op("Relu", net.op("MatMul", "x", net.const(np.ones((K, N)))))
    _, sites, misses = check(net.model([value("x", ("N", 3, K))], [last]), {"x": random(2, 3, K)})
    assert names(sites) == []
    assert any("tensor cores take float16 and bfloat16" in miss.reason for miss in misses), misses


def test_bfloat16() -> None:
    import ml_dtypes

    net = Net(NEWEST)
    product = net.op("MatMul", "x", net.const(np.ones((K, N)), ml_dtypes.bfloat16))
    original = net.model(
        [value("x", ("N", 3, K), TensorProto.BFLOAT16)], [net.op("Relu", net.op("Add", product, net.const(np.ones(N), ml_dtypes.bfloat16)))]
    )
    fused, sites, _ = fuse(original)
    assert names(sites) == ["linear_epilogue"]
    proved(original, fused)


REFUSED: list[tuple[tuple[int, ...], str]] = [
    ((12, N), "are no multiples of 8 ([12, 24])"),
    ((K, 20), "are no multiples of 8 ([16, 20])"),
    ((2, K, N), "is no matrix ([2, 16, 24])"),
]


@pytest.mark.parametrize(("shape", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(shape: tuple[int, ...], reason: str) -> None:
    net = Net()
    last = net.op("Relu", net.op("MatMul", "x", weights(net, *shape)))
    _, sites, misses = check(
        net.model([value("x", (2, 3, shape[-2]), F16)], [last]), {"x": random(2, 3, shape[-2], dtype=np.float16)}, **HALF
    )
    assert names(sites) == []
    assert any(reason in miss.reason for miss in misses if miss.fusion == "linear_epilogue"), misses


# --- ConvNeXt -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", ["behind", "before"])
@pytest.mark.parametrize(("batch", "side"), [("N", convnext.SIDE), (1, convnext.SIDE), (1, None)])
def test_no_transpose_is_left_between_blocks(scaled: str, batch: Any, side: int | None) -> None:
    original = convnext.model(3, batch, scaled, side)
    feeds = {"x": random(1, convnext.C, convnext.SIDE, convnext.SIDE, dtype=np.float16)}
    fused, sites, _ = check(original, feeds, rtol=2e-2, atol=2e-2)
    each = ["onnxfuse::DepthwiseConvLayerNormLast", "onnxfuse::LinearGelu", "onnxfuse::LinearResidual"]
    got = ops(fused)
    assert sorted(got) == sorted(["Relu", "Transpose", *each, *each, *each, "Transpose"]), got
    assert names(sites).count("linear_epilogue") == 6
    assert names(sites).count("dwconv_layernorm") == 3


def test_layer_scale_of_a_transformer() -> None:
    net = Net(17)
    product = net.op("Add", net.op("MatMul", "x", weights(net, K, K)), weights(net, K, seed=2))
    y = net.op("Add", net.op("Mul", product, weights(net, K, seed=3)), "x")
    fused, sites, _ = check(net.model([value("x", ("N", 3, K), F16)], [y]), {"x": X}, **HALF)
    assert ops(fused) == ["onnxfuse::LinearResidual"]
    assert sites == [("linear_epilogue", "residual")]


def test_a_residual_that_broadcasts_is_none() -> None:
    net = Net(17)
    product = net.op("MatMul", "x", weights(net, K, K))
    y = net.op("Add", net.op("Mul", product, weights(net, K, seed=3)), "r")
    inputs = [value("x", (2, 3, K), F16), value("r", (1, 3, K), F16)]
    _, sites, misses = check(net.model(inputs, [y]), {"x": X, "r": random(1, 3, K, dtype=np.float16)}, **HALF)
    assert names(sites) == []
    assert any("the residual is not proved to be of the product's shape" in miss.reason for miss in misses), misses


def test_a_float32_model_that_becomes_half(tmp_path: Path) -> None:
    """Sites are found before the conversion; a node that has to stay in float32 is no plugin's."""
    net = Net(17)
    y = "x"
    for seed in (1, 2):
        w = net.const(np.random.default_rng(seed).standard_normal((K, K)) / 4, np.float32)
        y = net.op("Add", net.op("MatMul", y, w), net.const(np.full(K, 0.5), np.float32))
        y = net.op("Relu", y)
    source, fused, kept = (tmp_path / f"{name}.onnx" for name in ("source", "fused", "kept"))
    onnx.save(net.model([value("x", (2, 3, K), TensorProto.FLOAT)], [y]), source)
    result = pipeline.optimize(source, fused, policy="all", precision="fp16")
    assert result.agrees
    assert [node.op_type for node in onnx.load(fused).graph.node if node.domain] == ["LinearRelu", "LinearRelu"]
    assert not pipeline.sites(source)[0]
    assert [place.site.fusion for place in pipeline.sites(source, precision="fp16")[0]].count("linear_epilogue") == 2

    one = next(decision.node for decision in result.decisions if decision.fused and decision.site.fusion == "linear_epilogue")
    assert one is not None
    assert pipeline.optimize(source, kept, policy="all", precision="fp16", keep_fp32=[one]).agrees
    given = onnx.load_from_string(prepare.for_parser(kept, frozenset({"Linear"})))
    spelled = [node.op_type for node in given.graph.node if node.op_type != "Cast"]
    assert sorted(spelled) == ["Add", "Linear", "MatMul", "Relu"], spelled
