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


def written_out(net: Net, x: str, cos: str, sin: str, spelled: str = "halves", shape: tuple[int, ...] = (B, H, S, R)) -> str:
    """Each angle once, as Llama's reference: by halves, by neighbours, or of complex numbers ("complex", "unbind", "dynamo")."""
    size = shape[-1]
    if spelled == "halves":
        first, second = piece(net, x, 0, size // 2), piece(net, x, size // 2, size)
    elif spelled == "split":
        first, second = net.name("low"), net.name("high")
        net.op("Split", x, ints(net, size // 2, size // 2), out=[first, second], axis=-1)
    elif spelled == "neighbours":
        first, second = piece(net, x, 0, size, 2), piece(net, x, 1, size, 2)
    else:
        paired = net.op("Reshape", x, ints(net, *shape[:3], -1, 2))
        if spelled == "complex":
            first, second = (net.op("Gather", paired, net.const(i, np.int64), axis=-1) for i in range(2))
        elif spelled == "unbind":
            names = [net.name("real"), net.name("imaginary")]
            net.op("Split", paired, ints(net, 1, 1), out=names, axis=-1)
            first, second = (net.op("Squeeze", name, ints(net, -1)) for name in names)
        else:
            first, second = piece(net, paired, 0, 1), piece(net, paired, 1, 2)
    real = net.op("Sub", net.op("Mul", first, cos), net.op("Mul", second, sin))
    imaginary = net.op("Add", net.op("Mul", first, sin), net.op("Mul", second, cos))
    if spelled in ("halves", "split"):
        return net.op("Concat", real, imaginary, axis=-1)
    if spelled != "dynamo":
        real, imaginary = (
            net.op("Unsqueeze", y, ints(net, -1)) if net.opset >= 13 else net.op("Unsqueeze", y, axes=[4]) for y in (real, imaginary)
        )
    return net.op("Reshape", net.op("Concat", real, imaginary, axis=-1), ints(net, *shape))


def native(net: Net, *inputs: str, **attrs: int) -> str:
    return net.op("RotaryEmbedding", *inputs, **attrs)


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


HALF = (1, 1, S, R // 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("opset", [12, 17, 23])
@pytest.mark.parametrize("spelled", ["halves", "neighbours", "complex"])
def test_written_out(spelled: str, opset: int, dtype: Any) -> None:
    net, feeds = Net(opset), feeds_of(dtype, HALF)
    _, sites, _ = helpers.check(
        model(net, feeds, written_out(net, "x", "cos", "sin", spelled)),
        feeds, ONLY, **({"rtol": 5e-3, "atol": 5e-3} if dtype == np.float16 else {}),
    )  # fmt: skip
    assert sites == [("rope", None if spelled == "halves" else "interleaved")]


@pytest.mark.parametrize("angles", [HALF, (S, R // 2), (B, H, S, R // 2)])
@pytest.mark.parametrize("spelled", ["split", "unbind", "dynamo"])
def test_parts_of_numbers(spelled: str, angles: tuple[int, ...]) -> None:
    net, feeds = Net(), feeds_of(angles=(*angles, 1) if spelled == "dynamo" else angles)
    fused, sites, _ = helpers.check(model(net, feeds, written_out(net, "x", "cos", "sin", spelled)), feeds, ONLY)
    assert sites == [("rope", None if spelled == "split" else "interleaved")]
    assert "Sub" not in helpers.ops(fused)


def test_rows_before_heads() -> None:
    """As Llama's reference, whose angles are of [1, rows, 1, pairs]."""
    net, feeds = Net(), {"x": random(B, S, H, R), "cos": random(1, S, 1, R // 2, seed=1), "sin": random(1, S, 1, R // 2, seed=2)}
    _, sites, _ = helpers.check(model(net, feeds, written_out(net, "x", "cos", "sin", "complex", (B, S, H, R))), feeds, ONLY)
    assert sites == [("rope", "interleaved")]


def test_a_part_of_the_head_written_out() -> None:
    net = Net()
    turned = written_out(net, piece(net, "x", 0, R), "cos", "sin")
    out = net.op("Concat", turned, piece(net, "x", R, R + 4), axis=-1)
    feeds = feeds_of(angles=HALF, size=R + 4)
    fused, sites, _ = helpers.check(model(net, feeds, out), feeds, ONLY)
    assert sites == [("rope", "partial")]
    assert "Slice" not in helpers.ops(fused)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("part", [0, 4])
def test_native_operator(part: int, interleaved: int, axes: int, positions: bool, dtype: Any) -> None:
    net, pairs = Net(23), (part or R) // 2
    feeds = {"x": random(B, H, S, R, dtype=dtype) if axes == 4 else random(B, S, H * R, dtype=dtype)}
    shape = (11, pairs) if positions else (B, S, pairs)
    feeds |= {name: random(*shape, seed=i, dtype=dtype) for i, name in enumerate(("cos", "sin"))}
    if positions:
        feeds["ids"] = np.random.default_rng(0).integers(0, 11, (B, S))
    out = native(net, *feeds, interleaved=interleaved, rotary_embedding_dim=part, num_heads=H)
    tolerance = {"rtol": 5e-3, "atol": 5e-3} if dtype == np.float16 else {}
    fused, sites, _ = helpers.check(model(net, feeds, out), feeds, ONLY, **tolerance)
    assert sites == [("rope", ("interleaved" if interleaved else "") + ("partial" if part else "") or None)]
    assert "RotaryEmbedding" not in helpers.ops(fused)


def test_native_operator_of_any_batch_and_length() -> None:
    net = Net(23)
    net.op("Identity", native(net, "x", "cos", "sin", "ids", num_heads=H), out="y")
    symbols: dict[str, list[int | str]] = {"x": ["B", "S", H * R], "cos": ["P", R // 2], "sin": ["P", R // 2], "ids": ["B", "S"]}
    kinds = {"ids": onnx.TensorProto.INT64}
    loaded = net.model([value(name, of, kinds.get(name, onnx.TensorProto.FLOAT)) for name, of in symbols.items()], ["y"])
    feeds = {
        "x": random(B, S, H * R),
        "cos": random(9, R // 2),
        "sin": random(9, R // 2, seed=1),
        "ids": np.arange(B * S).reshape(B, S) % 9,
    }
    fused, sites, _ = helpers.check(loaded, feeds, ONLY)
    assert sites == [("rope", None)]
    feeds |= {"x": random(3, 1, H * R, seed=4), "ids": np.array([[8], [0], [3]])}
    helpers.same(helpers.run(fused, feeds), helpers.run(loaded, feeds))


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

    def test_a_sum_where_a_difference_should_be(self) -> None:
        net, feeds = Net(), feeds_of(angles=HALF)
        low, high = piece(net, "x", 0, R // 2), piece(net, "x", R // 2, R)
        first = net.op("Sub", net.op("Mul", low, "cos"), net.op("Mul", high, "sin"))
        second = net.op("Sub", net.op("Mul", high, "cos"), net.op("Mul", low, "sin"))
        _, sites, _ = helpers.fuse(model(net, feeds, net.op("Concat", first, second, axis=-1)), ONLY)
        assert sites == []

    def test_halves_in_the_other_order(self) -> None:
        net = Net()
        low, high = piece(net, "x", R // 2, R), piece(net, "x", 0, R // 2)
        first = net.op("Sub", net.op("Mul", low, "cos"), net.op("Mul", high, "sin"))
        second = net.op("Add", net.op("Mul", high, "cos"), net.op("Mul", low, "sin"))
        refused(net, feeds_of(angles=HALF), net.op("Concat", first, second, axis=-1), "is no half of the last axis")

    @pytest.mark.parametrize("spelled", ["complex", "dynamo"])
    def test_numbers_whose_parts_are_exchanged(self, spelled: str) -> None:
        net = Net()
        out = written_out(net, "x", "cos", "sin", spelled)
        one, other = [node for node in net.nodes if node.op_type in ("Gather", "Slice")]
        one.output[0], other.output[0] = other.output[0], one.output[0]
        feeds = feeds_of(angles=(*HALF, 1) if spelled == "dynamo" else HALF)
        refused(net, feeds, out, "is not the element 0 of each pair")

    def test_one_angle_for_all_pairs(self) -> None:
        net, feeds = Net(), feeds_of(angles=(1, 1, S, 1))
        refused(net, feeds, written_out(net, "x", "cos", "sin"), "does not hold a value for each of the 4 turned elements")

    def test_caches_of_another_size(self) -> None:
        net = Net(23)
        feeds = {"x": random(B, H, S, R), "cos": random(B, S, 2), "sin": random(B, S, 2)}
        loaded = model(net, feeds, native(net, "x", "cos", "sin", rotary_embedding_dim=4))
        for given in loaded.graph.input[1:]:
            given.type.tensor_type.shape.dim[2].dim_param = "pairs"
        _, sites, misses = helpers.fuse(loaded, ONLY)
        assert sites == []
        assert any("does not hold a value for each of the 2 turned pairs" in miss.reason for miss in misses)

    def test_caches_of_unknown_length_beside_one_row(self) -> None:
        net = Net(23)
        feeds = {"x": random(B, H, 1, R), "cos": random(B, 1, R // 2), "sin": random(B, 1, R // 2)}
        loaded = model(net, feeds, native(net, "x", "cos", "sin"))
        for given in loaded.graph.input[1:]:
            given.type.tensor_type.shape.dim[1].dim_param = "rows"
        _, sites, misses = helpers.fuse(loaded, ONLY)
        assert sites == []
        assert any("is not known to be of the rows of 'x'" in miss.reason for miss in misses)

    def test_heads_of_unknown_size(self) -> None:
        net = Net(23)
        feeds = {"x": random(B, S, H * R), "cos": random(B, S, R // 2), "sin": random(B, S, R // 2)}
        loaded = model(net, feeds, native(net, "x", "cos", "sin", num_heads=H))
        loaded.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "width"
        _, sites, misses = helpers.fuse(loaded, ONLY)
        assert sites == []
        assert any("are of unknown number or size" in miss.reason for miss in misses)

    def test_old_operator_sets(self) -> None:
        net = Net(11)
        refused(net, feeds_of(), halves(net, "x", "cos", "sin"), "the function needs operator set 12; this model's is (11)")


@pytest.mark.parametrize("opset", [12, 13, 23])
def test_every_kind_has_a_function(opset: int) -> None:
    names = ["FusedRotary", "FusedRotaryPartial", "FusedRotaryInterleaved", "FusedRotaryInterleavedPartial"]
    assert [function.name for function in rope.FUSION.functions(opset)] == names
