"""rope: both conventions, whole heads and parts, against onnxruntime, and every reason to refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxfuse.fusions import rope
from tests.fusions import helpers
from tests.fusions.helpers import Net, value

ONLY = ("rope",)
B, H, S, R = 2, 3, 5, 8


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def ints(net: Net, *values: int) -> str:
    return net.const(list(values), np.int64)


def piece(net: Net, x: str, start: int, end: int, step: int = 1, axis: int = -1) -> str:
    return net.op("Slice", x, *(ints(net, number) for number in (start, end, axis, step)))


def halves(net: Net, x: str, cos: str, sin: str, size: int = R, split: bool = False) -> str:
    """Llama's rotate_half."""
    if split:
        low, high = net.name("low"), net.name("high")
        net.op("Split", x, out=[low, high], axis=3, **({"num_outputs": 2} if net.opset >= 18 else {}))
    else:
        low, high = piece(net, x, 0, size // 2), piece(net, x, size // 2, np.iinfo(np.int64).max)
    turned = net.op("Concat", net.op("Neg", high), low, axis=-1)
    return net.op("Add", net.op("Mul", x, cos), net.op("Mul", turned, sin))


def pairs(net: Net, x: str, cos: str, sin: str, size: int = R, target: str | None = None) -> str:
    """GPT-J's rotate_every_two."""
    even, odd = piece(net, x, 0, size, 2), piece(net, x, 1, np.iinfo(np.int64).max, 2)

    def apart(y: str) -> str:
        return net.op("Unsqueeze", y, ints(net, -1)) if net.opset >= 13 else net.op("Unsqueeze", y, axes=[4])

    joined = net.op("Concat", apart(net.op("Neg", odd)), apart(even), axis=-1)
    turned = net.op("Reshape", joined, target or ints(net, B, H, S, size))
    return net.op("Add", net.op("Mul", turned, sin), net.op("Mul", x, cos))


def model(net: Net, feeds: dict[str, np.ndarray], out: str) -> onnx.ModelProto:
    net.op("Identity", out, out="y")
    inputs = [value(name, list(array.shape), helper.np_dtype_to_tensor_dtype(array.dtype)) for name, array in feeds.items()]
    return net.model(inputs, ["y"])


def feeds_of(dtype: Any = np.float32, angles: tuple[int, ...] = (1, 1, S, R), size: int = R) -> dict[str, np.ndarray]:
    shapes = {"x": (B, H, S, size), "cos": angles, "sin": angles}
    return {name: random(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def check(net: Net, feeds: dict[str, np.ndarray], out: str, variant: str | None) -> onnx.ModelProto:
    half = feeds["x"].dtype == np.float16
    fused, sites, _ = helpers.check(model(net, feeds, out), feeds, ONLY, **({"rtol": 5e-3, "atol": 5e-3} if half else {}))
    assert sites == [("rope", variant)]
    assert "Neg" not in helpers.ops(fused)
    return fused


def refused(net: Net, feeds: dict[str, np.ndarray], out: str, reason: str) -> None:
    _, sites, misses = helpers.fuse(model(net, feeds, out), ONLY)
    assert sites == []
    assert any(reason in miss.reason for miss in misses), [miss.reason for miss in misses]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("opset", [12, 13, 17, 20, 23])
def test_halves(opset: int, dtype: Any) -> None:
    net = Net(opset)
    check(net, feeds_of(dtype), halves(net, "x", "cos", "sin"), None)


@pytest.mark.parametrize("opset", [13, 18])
def test_halves_by_a_split(opset: int) -> None:
    net = Net(opset)
    check(net, feeds_of(), halves(net, "x", "cos", "sin", split=True), None)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("opset", [12, 17, 23])
def test_neighbours(opset: int, dtype: Any) -> None:
    net = Net(opset)
    check(net, feeds_of(dtype), pairs(net, "x", "cos", "sin"), "interleaved")


def test_neighbours_of_any_length() -> None:
    net, feeds = Net(), feeds_of()
    net.op("Identity", pairs(net, "x", "cos", "sin", target=net.op("Shape", "x")), out="y")
    symbols: dict[str, list[int | str]] = {"x": ["B", H, "S", R], "cos": [1, 1, "S", R], "sin": [1, 1, "S", R]}
    _, sites, _ = helpers.check(net.model([value(name, symbols[name]) for name in feeds], ["y"]), feeds, ONLY)
    assert sites == [("rope", "interleaved")]


def test_neighbours_that_are_regrouped() -> None:
    """Batch entries where heads were: the sum is larger than what is turned."""
    net = Net()
    feeds = {"x": random(1, H, S, R), "cos": random(1, 1, S, R, seed=1), "sin": random(1, 1, S, R, seed=2)}
    refused(net, feeds, pairs(net, "x", "cos", "sin", target=ints(net, H, 1, S, R)), "joined otherwise than side by side")


@pytest.mark.parametrize("angles", [(S, R), (R,), (B, 1, S, R), (1, S, R), (1, H, 1, R)])
def test_angles_are_broadcast(angles: tuple[int, ...]) -> None:
    net = Net()
    check(net, feeds_of(angles=angles), halves(net, "x", "cos", "sin"), None)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_a_part_of_the_head(interleaved: bool, split: bool) -> None:
    net = Net()
    if split:
        net.op("Split", "x", ints(net, R, 4), out=["first", "rest"], axis=-1)
        first, rest = "first", "rest"
    else:
        first, rest = piece(net, "x", 0, R), piece(net, "x", R, R + 4, axis=3)
    turned = (pairs if interleaved else halves)(net, first, "cos", "sin")
    fused = check(net, feeds_of(size=R + 4), net.op("Concat", turned, rest, axis=-1), "interleavedpartial" if interleaved else "partial")
    assert not {"Slice", "Split", "Concat"} & set(helpers.ops(fused))


def test_the_transpose_of_the_heads_goes_inside() -> None:
    net = Net()
    feeds = feeds_of()
    feeds["x"] = random(B, S, H * R)
    heads = net.op("Transpose", net.op("Reshape", "x", ints(net, 0, 0, H, R)), perm=[0, 2, 1, 3])
    assert "Transpose" not in helpers.ops(check(net, feeds, halves(net, heads, "cos", "sin"), None))


def test_before_an_attention() -> None:
    net = Net()
    feeds = feeds_of() | {"k": random(B, H, S, R, seed=5), "v": random(B, H, S, R, seed=6)}
    q, k = halves(net, "x", "cos", "sin"), halves(net, "k", "cos", "sin")
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
    context = net.op("MatMul", net.op("Softmax", scores, axis=-1), "v")
    fused, sites, _ = helpers.check(model(net, feeds, context), feeds, ("rope", "attention"))
    assert sites == [("rope", None), ("rope", None), ("attention", None)]
    assert helpers.ops(fused) == ["onnxfuse::FusedRotary", "onnxfuse::FusedRotary", "onnxfuse::FusedAttention", "Identity"]


class TestRefused:
    def test_other_parts(self) -> None:
        net = Net()
        turned = net.op("Concat", net.op("Neg", piece(net, "x", 2, R)), piece(net, "x", 0, 2), axis=-1)
        out = net.op("Add", net.op("Mul", "x", "cos"), net.op("Mul", turned, "sin"))
        refused(net, feeds_of(), out, "is no half of the last axis")

    def test_parts_that_are_joined_along_another_axis(self) -> None:
        net = Net()
        low, high = piece(net, "x", 0, R // 2), piece(net, "x", R // 2, R)
        turned = net.op("Concat", net.op("Neg", high), low, axis=2)
        out = net.op("Add", net.op("Mul", "x", "cos"), net.op("Mul", net.op("Reshape", turned, ints(net, B, H, S, R)), "sin"))
        _, sites, _ = helpers.fuse(model(net, feeds_of(), out), ONLY)
        assert sites == []

    def test_angles_of_another_size(self) -> None:
        net = Net()
        refused(
            net, feeds_of(angles=(1, 1, S, 1)), halves(net, "x", "cos", "sin"), "does not hold a value for each of the 8 turned elements"
        )

    def test_angles_that_make_more_of_the_batch(self) -> None:
        net = Net()
        feeds = feeds_of(angles=(4, 1, S, R))
        feeds["x"] = random(1, H, S, R)
        refused(net, feeds, halves(net, "x", "cos", "sin"), "has another shape than 'x'")

    def test_angles_of_unknown_length_beside_one_row(self) -> None:
        """A table of all positions makes as many rows of the one."""
        net = Net()
        feeds = feeds_of(angles=(S, R))
        feeds["x"] = random(B, H, 1, R)
        loaded = model(net, feeds, halves(net, "x", "cos", "sin"))
        for given in loaded.graph.input[1:]:
            given.type.tensor_type.shape.dim[0].dim_param = "positions"
        _, sites, misses = helpers.fuse(loaded, ONLY)
        assert sites == []
        assert any("has another shape than 'x'" in miss.reason for miss in misses)

    def test_what_is_left_over_is_not_what_follows(self) -> None:
        net = Net()
        turned = halves(net, piece(net, "x", 0, R), "cos", "sin")
        out = net.op("Concat", turned, piece(net, "x", R - 2, R + 2), axis=-1)
        loaded = model(net, feeds_of(size=R + 4), out)
        fused, sites, _ = helpers.check(loaded, feeds_of(size=R + 4), ONLY)
        assert sites == [("rope", None)]  # the turned part alone
        assert "Concat" in helpers.ops(fused)

    def test_old_operator_sets(self) -> None:
        net = Net(11)
        refused(net, feeds_of(), halves(net, "x", "cos", "sin"), "the function needs operator set 12; this model's is (11)")


@pytest.mark.parametrize("opset", [12, 13, 23])
def test_every_kind_has_a_function(opset: int) -> None:
    names = ["FusedRotary", "FusedRotaryPartial", "FusedRotaryInterleaved", "FusedRotaryInterleavedPartial"]
    assert [function.name for function in rope.FUSION.functions(opset)] == names
