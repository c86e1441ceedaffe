"""attention: as exporters write it, against onnxruntime, and every reason to refuse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.fusions import _bodies, attention
from onnxfuse.graph.attention import FORMS
from tests.fusions import helpers
from tests.fusions.attentions import (
    LOWEST,
    ONLY,
    B,
    D,
    H,
    K,
    S,
    Written,
    bart,
    bert,
    cosine,
    grouped,
    packed_by_axis,
    random,
    replaced,
    sdpa,
    swin,
    vit,
)  # fmt: skip
from tests.fusions.helpers import value


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("opset", [12, 13, 17, 18, 20, 23])
def test_bert(opset: int, dtype: Any) -> None:
    w = Written(opset, dtype)
    bert(w, None)
    fused = w.check(None)
    node = next(node for node in fused.graph.node if node.op_type == "FusedAttention")
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attrs["scale"] == pytest.approx(D**-0.5, rel=1e-6 if dtype is np.float32 else 2e-4)
    assert (attrs["q_perm"], attrs["k_perm"], attrs["v_perm"], attrs["y_perm"]) == ([0, 2, 1, 3],) * 4
    assert "Transpose" not in helpers.ops(fused)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("low", [-10000.0, None, -np.inf])
def test_padding(low: float | None, dtype: Any) -> None:
    w = Written(dtype=dtype)
    mask = np.zeros((B, 1, 1, S), dtype)
    mask[0, ..., 3:] = LOWEST[dtype] if low is None else low
    if dtype is np.float32 or low == -np.inf:
        mask[1] = mask[0, ..., -1]  # a row that is masked whole
    bert(w, w.given("mask", values=mask))
    w.check("added")


@pytest.mark.parametrize("low", [-10000.0, LOWEST[np.float16]])
def test_half_precision_leaves_nothing_of_a_row_that_is_masked_whole(low: float) -> None:
    """The sum is rounded to multiples of 8 or 32. (onnxruntime keeps what it adds in float32 on a CPU, so it is no reference here.)"""
    w = Written(dtype=np.float16)
    bert(w, w.given("mask", values=np.full((B, 1, 1, S), low, np.float16)))
    fused, _, _ = helpers.fuse(w.model(), ONLY)
    (got,) = helpers.run(fused, w.feeds)
    mean = w.feeds["v"].astype(np.float64).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(got, np.broadcast_to(mean, got.shape), atol=2e-3)


@pytest.mark.parametrize("shape", [(S,), (S, S), (H, 1, S), (1, 1, S, S), (B, H, S, S), (B, 1, S, 1), (1,), (1, H, 1, 1)])
def test_what_is_added_is_broadcast(shape: tuple[int, ...]) -> None:
    w = Written()
    bert(w, w.given("mask", *shape))
    w.check("added")


def test_dynamic_batch_and_length() -> None:
    w = Written()
    bert(w, w.given("mask", B, 1, 1, S, symbols=["B", 1, 1, "S"]), batch="B", rows="S")
    fused = w.check("added")
    for length in (1, 9):
        feeds = {name: random(3, length, H * D, seed=length) for name in ("q", "k", "v")} | {"mask": random(3, 1, 1, length)}
        helpers.same(helpers.run(fused, feeds), helpers.run(w.model(), feeds))


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_torch_sdpa(masked: bool, safe: bool) -> None:
    w = Written(18)
    q, k, v = w.given("q", B, H, S, D), w.given("k", B, H, K, D), w.given("v", B, H, K, D)
    mask = np.where(random(B, 1, S, K) > 0, 0, -np.inf).astype(np.float32)
    mask[0, 0, 0] = -np.inf
    context = sdpa(w, q, k, v, w.given("mask", values=mask) if masked else None, safe)
    w.net.op("Identity", context, out=w.out())
    fused = w.check("added" if masked else None)
    assert "FusedAttentionAdded" in fused.functions[0].name or not masked
    rows = helpers.run(fused, w.feeds)[0][0, :, 0]
    assert np.isnan(rows).all() == (masked and not safe)


def test_torch_sdpa_of_any_length() -> None:
    """The shapes of the turned keys are computed from the keys' own."""
    w = Written(18)
    net, many, last = w.net, np.iinfo(np.int64).max, np.iinfo(np.int64).min
    q, k, v = (w.given(name, B, H, S, D, symbols=["B", H, "S", D]) for name in ("q", "k", "v"))

    def some(start: int, end: int) -> str:
        return net.op("Slice", net.op("Shape", k), w.ints(start), w.ints(end))

    size, rows, front = some(-1, many), some(-2, -1), some(last, -2)
    flat = net.op("Reshape", k, net.op("Concat", w.ints(-1), rows, size, axis=0))
    turned = net.op("Reshape", net.op("Transpose", flat, perm=[0, 2, 1]), net.op("Concat", front, size, rows, axis=0))
    root = net.op("Sqrt", net.op("Div", w.const(1.0), net.op("Sqrt", net.op("Cast", size, to=TensorProto.FLOAT))))
    scores = net.op("MatMul", net.op("Mul", q, root), net.op("Mul", turned, net.op("CastLike", root, k)))
    context = net.op("MatMul", net.op("Softmax", scores, axis=-1), v)
    w.joined(context)
    w.check(None)


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize("split", ["gather", "squeeze", "reshape"])
def test_timm_vit(split: str, opset: int) -> None:
    w = Written(opset)
    vit(w, split)
    fused = w.check("packed")
    assert not {"Gather", "Split", "Squeeze", "Transpose"} & set(helpers.ops(fused))


@pytest.mark.parametrize("groups", [1, 3])
def test_packed_by_one_product(groups: int) -> None:
    w = Written()
    net, own = w.net, H // groups
    sizes = [H * D, own * D, own * D]
    net.op("Split", w.given("x", B, S, sum(sizes)), w.ints(*sizes), out=["q", "k", "v"], axis=-1)
    q, k, v = (w.heads(name, heads) for name, heads in (("q", H), ("k", own), ("v", own)))
    scores = net.op("Mul", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2])), w.const([0.3]))
    w.joined(net.op("MatMul", net.op("Softmax", scores, axis=3), v))
    fused = w.check("packed" if groups == 1 else "packedgrouped")
    assert "Split" not in helpers.ops(fused)


def test_parts_in_another_order_are_three_tensors() -> None:
    w = Written()
    net = w.net
    k, q, v = packed_by_axis(w, w.given("x", B, S, 3 * H * D), "gather")
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
    w.joined(net.op("MatMul", net.op("Softmax", scores, axis=-1), v))
    w.check(None)


@pytest.mark.parametrize("windows", [1, 2, 4])
@pytest.mark.parametrize("many", [1, H])
def test_swin(windows: int, many: int) -> None:
    w = Written()
    swin(w, windows, many)
    w.check("packedaddedwindows")


def test_swin_of_any_batch() -> None:
    w, windows = Written(), 2
    net, x = w.net, w.given("x", 4, S, 3 * H * D, symbols=["batch", S, 3 * H * D])
    five = net.op("Transpose", net.op("Reshape", x, w.ints(-1, S, 3, H, D)), perm=[2, 0, 3, 1, 4])
    q, k, v = (net.op("Gather", five, net.const(i, np.int64), axis=0) for i in range(3))
    scores = net.op("MatMul", net.op("Mul", q, w.const(D**-0.5)), net.op("Transpose", k, perm=[0, 1, 3, 2]))
    biased = net.op("Add", scores, w.const(random(1, H, S, S)))
    images = net.op("Div", net.op("Slice", net.op("Shape", x), w.ints(0), w.ints(1)), w.ints(windows))
    apart = net.op("Reshape", biased, net.op("Concat", images, w.ints(windows, H, S, S), axis=0))
    mask = np.where(random(1, windows, 1, S, S) > 0.5, -100.0, 0.0)
    together = net.op("Reshape", net.op("Add", apart, w.const(mask)), w.ints(-1, H, S, S))
    w.joined(net.op("MatMul", net.op("Softmax", together, axis=-1), v))
    fused = w.check("packedaddedwindows")
    feeds = {"x": random(8, S, 3 * H * D, seed=5)}
    helpers.same(helpers.run(fused, feeds), helpers.run(w.model(), feeds))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("windows", [0, 2])
def test_swin_of_the_second_version(windows: int, computed: bool, dtype: Any) -> None:
    w = Written(dtype=dtype)
    cosine(w, windows, computed)
    w.check("addedwindows" if windows else "added")


@pytest.mark.parametrize("shape", [(H, 1, 1), (1, H, 1, 1)])
@pytest.mark.parametrize("computed", [False, True])
def test_a_scale_for_each_head(computed: bool, shape: tuple[int, ...]) -> None:
    """Of queries that lie by rows, and side by side with keys and values."""
    w = Written()
    w.net.op("Split", w.given("x", B, S, 3 * H * D), w.ints(H * D, H * D, H * D), out=["q", "k", "v"], axis=-1)
    q, k, v = (w.heads(name) for name in "qkv")
    scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = w.net.op("Mul", scores, w.given("scale", *shape) if computed else w.const(random(*shape)))
    w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v))
    fused = w.check(None)
    assert "Transpose" not in helpers.ops(fused)


def test_t5() -> None:
    """No scale; a bias of positions and a mask, added up before."""
    w = Written()
    net = w.net
    q, k, v = (w.given(name, B, S, H * D) for name in ("q", "k", "v"))
    bias = net.op("Add", w.given("bias", 1, H, S, S), w.given("mask", B, 1, 1, S))
    scores = net.op("Add", net.op("MatMul", w.heads(q), w.heads(k, perm=(0, 2, 3, 1))), bias)
    weights = net.op("Softmax", net.op("Cast", scores, to=TensorProto.FLOAT), axis=-1)
    w.joined(net.op("MatMul", weights, w.heads(v)))
    w.check("added")


def test_whisper_cross_attention() -> None:
    """Queries scaled before their heads are split; keys and values of another length, values of another width."""
    w = Written()
    net = w.net
    q = net.op("Mul", w.given("q", B, S, H * D), w.const(D**-0.5))
    k, v = w.given("k", B, K, H * D), w.given("v", B, K, H * 16)
    scores = net.op("MatMul", w.heads(q), net.op("Transpose", w.heads(k), perm=[0, 1, 3, 2]))
    w.joined(net.op("MatMul", net.op("Softmax", scores, axis=-1), w.heads(v, size=16)), H * 16)
    w.check(None)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("fill", [-10000.0, None, -np.inf])
@pytest.mark.parametrize("hides", [True, False])
def test_masks_that_replace(hides: bool, fill: float | None, dtype: Any) -> None:
    w = Written(dtype=dtype)
    replaced(w, hides, fill)
    w.check("kept")


@pytest.mark.parametrize("low", [-np.inf, LOWEST[np.float32], -65504.0])
@pytest.mark.parametrize("spelled", ["added", "kept", "hidden"])
def test_a_constant_that_hides_later_keys_is_causal(spelled: str, low: float) -> None:
    w = Written()
    net = w.net
    q, k, v = (w.given(name, B, S, H * D) for name in ("q", "k", "v"))
    scores = net.op("MatMul", w.heads(q), w.heads(k, perm=(0, 2, 3, 1)))
    earlier = np.tril(np.ones((1, 1, S, S), bool))
    if spelled == "added":
        scores = net.op("Add", scores, w.const(np.where(earlier, 0, low)))
    elif spelled == "kept":
        scores = net.op("Where", net.const(earlier, bool), scores, w.const(low))
    else:
        scores = net.op("Where", net.const(~earlier, bool), w.const(low), scores)
    scores = net.op("Add", scores, w.given("mask", B, 1, 1, S)) if spelled == "added" else scores
    w.joined(net.op("MatMul", net.op("Softmax", scores, axis=-1), w.heads(v)))
    w.check("addedcausal" if spelled == "added" else "causal")


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_behind_one_that_replaces(causal: bool) -> None:
    """GPT-2 hides later keys, and then padding. Where other scores are replaced, what is added to their filling counts."""
    w = Written()
    q, k, v = (w.heads(w.given(name, B, S, H * D)) for name in "qkv")
    scores = w.net.op("Div", w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2])), w.const(np.sqrt(D)))
    keep = w.net.const(np.tril(np.ones((1, 1, S, S), bool)), bool) if causal else w.given("keep", values=random(B, 1, S, S) > 0)
    scores = w.net.op("Add", w.net.op("Where", keep, scores, w.const(LOWEST[np.float32])), w.given("mask", B, 1, 1, S))
    w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v))
    if causal:
        w.check("addedcausal")
    else:
        w.refused("is added to scores after some were replaced")


@pytest.mark.parametrize("change", [(0, 0), (0, 1), (3, 2)])
def test_a_constant_that_hides_otherwise_is_not_causal(change: tuple[int, int]) -> None:
    w = Written()
    mask = np.where(np.tril(np.ones((S, S), bool)), 0, -1e9)
    mask[change] = -1.0
    bert(w, w.const(mask))
    w.check("added")


def test_added_twice_and_replaced() -> None:
    w = Written()
    net = w.net
    q, k, v = (w.given(name, B, S, H * D) for name in ("q", "k", "v"))
    scores = net.op("MatMul", w.heads(q), w.heads(k, perm=(0, 2, 3, 1)))
    scores = net.op("Add", w.given("more", B, 1, 1, S), net.op("Add", scores, w.given("bias", 1, H, S, S)))
    scores = net.op("Where", w.given("mask", values=random(B, 1, 1, S) > 0), scores, w.const(-1e4))
    w.joined(net.op("MatMul", net.op("Softmax", scores, axis=-1), w.heads(v)))
    w.check("addedtwicekept")


@pytest.mark.parametrize("repeat", ["Expand", "Tile"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_grouped_queries(dtype: Any, repeat: str) -> None:
    w = Written(dtype=dtype)
    grouped(w, repeat)
    fused = w.check("addedgrouped")
    assert repeat not in helpers.ops(fused)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", [None, "float", "bool"])
def test_native_operator(mask: str | None, causal: int) -> None:
    w = Written(23)
    q, k, v = w.given("q", B, 4, S, D), w.given("k", B, 2, K, D), w.given("v", B, 2, K, 16)
    given = []
    if mask:
        chosen = random(B, 1, S, K) > -1
        chosen[..., 0] = True
        given = [w.given("mask", values=chosen if mask == "bool" else random(S, K))]
    w.net.op("Attention", q, k, v, *given, out=w.out(), is_causal=causal, scale=0.3)
    kind = {None: "", "float": "added", "bool": "kept"}[mask] + ("causal" if causal else "") + "grouped"
    fused, sites, _ = helpers.check(w.model(), w.feeds, ONLY)
    assert sites == [("attention", kind)]
    assert "Attention" not in helpers.ops(fused)


@pytest.mark.parametrize("attrs", [{"is_causal": 2}, {"is_causal": -1}, {"scale": 0.5}])
def test_native_operator_takes_its_attributes_at_their_word(attrs: dict[str, Any]) -> None:
    """Causal where the number is 1."""
    w = Written(opset=23)
    w.net.op("Attention", *(w.given(name, B, H, rows, D) for name, rows in (("q", S), ("k", K), ("v", K))), out=w.out(), **attrs)
    w.check(None)


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_native_operator_gives_zero_for_rows_that_are_masked_whole(kind: str) -> None:
    w = Written(opset=23)
    names = [w.given(name, B, H, rows, D) for name, rows in (("q", S), ("k", K), ("v", K))]
    keep = random(B, 1, S, K) > 0
    keep[0, 0, 1] = False
    mask = w.given("mask", values=keep if kind == "bool" else np.where(keep, 0, -np.inf).astype(np.float32))
    w.net.op("Attention", *names, mask, out=w.out())
    fused = w.check("kept" if kind == "bool" else "added")
    assert (helpers.run(fused, w.feeds)[0][0, :, 1] == 0).all()


@pytest.mark.parametrize("shape", [(S, 1), (S, K - 2)])
def test_native_operator_with_masks_of_fewer_keys_stays(shape: tuple[int, ...]) -> None:
    """It hides the keys that the mask has not; one alone is no broadcast."""
    w = Written(opset=24)
    names = [w.given(name, B, H, rows, D) for name, rows in (("q", S), ("k", K), ("v", K))]
    w.net.op("Attention", *names, w.given("mask", *shape), out=w.out())
    w.refused("is not known to be of all keys")


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [
        ({"softcap": 2.0}, "bounds the scores (softcap) (2.0)"),
        ({"left_window_size": 2}, "looks at a window of keys (left_window_size) (2)"),
        ({"right_window_size": 0}, "looks at a window of keys (right_window_size) (0)"),
    ],
)
def test_native_operator_with_more_than_the_kernel_has_stays(attrs: dict[str, Any], reason: str) -> None:
    w = Written(opset=23 if "softcap" in attrs else 25)
    w.net.op("Attention", *(w.given(name, B, H, S, D) for name in "qkv"), out=w.out(), **attrs)
    w.refused(reason)


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_native_operator_whose_scores_are_read_stays(mode: int) -> None:
    w = Written(opset=23)
    w.net.op("Attention", *(w.given(name, B, H, S, D) for name in "qkv"), out=[w.out(), "", "", w.out()], qk_matmul_output_mode=mode)
    w.refused("gives more than the result")


def test_native_operator_with_lengths_of_its_own_stays() -> None:
    w = Written(opset=24)
    names = [w.given(name, B, H, S, D) for name in "qkv"]
    w.net.op("Attention", *names, "", "", "", w.given("lengths", values=np.array([2, 3])), out=w.out())
    w.refused("has a cache or lengths of its own (lengths)")


def test_native_operator_with_a_cache_stays() -> None:
    w = Written(23)
    names = [w.given("q", B, H, S, D), w.given("k", B, H, K, D), w.given("v", B, H, K, D)]
    past = [w.given("pk", B, H, 2, D), w.given("pv", B, H, 2, D)]
    w.net.op("Attention", *names, "", *past, out=w.out())
    w.refused("has a cache or lengths of its own (pk, pv)")


def test_the_transposes_stay_for_other_readers() -> None:
    w = Written()
    bert(w, None)
    turned = next(node.output[0] for node in w.net.nodes if node.op_type == "Transpose")
    w.net.op("Neg", turned, out=w.out())
    fused, sites, _ = helpers.check(w.model(), w.feeds, ONLY)
    assert helpers.names(sites) == ["attention"]
    assert helpers.ops(fused).count("Transpose") == 1


@pytest.mark.parametrize("mask", [None, (B, 1, S, S), (S,)])
def test_bart(mask: tuple[int, ...] | None) -> None:
    w = Written()
    bart(w, mask)
    fused = w.check("added" if mask else None)
    assert "Transpose" not in helpers.ops(fused)


@pytest.mark.parametrize("mask", [None, (B, 1, S, S)])
def test_bart_of_any_batch_and_length(mask: tuple[int, ...] | None) -> None:
    w = Written()
    bart(w, mask, "B", "S")
    fused = w.check("added" if mask else None)
    feeds = {name: random(3, 9, H * D, seed=len(name)) for name in ("x", "memory")} | ({"mask": random(3, 1, 9, 9)} if mask else {})
    helpers.same(helpers.run(fused, feeds), helpers.run(w.model(), feeds))


@pytest.mark.parametrize("mask", [None, (B * H, S, K), (1, S, K), (S, K)])
def test_torch_multi_head_attention(mask: tuple[int, ...] | None) -> None:
    """Rows first, all heads of all batch entries in one axis; the old exporter writes baddbmm as scaled sums."""
    w = Written()
    net = w.net
    q, k, v = (w.given(name, n, B, H * D) for name, n in (("q", S), ("k", K), ("v", K)))
    q = net.op("Mul", q, w.const(D**-0.5))
    q, k, v = (net.op("Transpose", net.op("Reshape", x, w.ints(n, B * H, D)), perm=[1, 0, 2]) for x, n in ((q, S), (k, K), (v, K)))
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1]))
    if mask:
        scores = net.op("Add", scores, w.given("mask", *mask))
    context = net.op("Transpose", net.op("MatMul", net.op("Softmax", scores, axis=-1), v), perm=[1, 0, 2])
    net.op("Reshape", context, w.ints(S * B, H * D), out=w.out())
    fused = w.check("added" if mask else None)
    assert "Transpose" not in helpers.ops(fused)


def test_products_of_three_axes_alone() -> None:
    w = Written()
    net = w.net
    q, k, v = w.given("q", 4, S, D), w.given("k", 4, K, D), w.given("v", 4, K, 16)
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1]))
    net.op("MatMul", net.op("Softmax", scores, axis=2), v, out=w.out())
    w.check(None)


@pytest.mark.parametrize("mask", [None, "float", "bool"])
@pytest.mark.parametrize("split", [False, True])
def test_native_operator_of_three_axes(split: bool, mask: str | None) -> None:
    w = Written(23)
    sizes = [4 * D, 2 * D, 2 * D]
    names = ["q", "k", "v"]
    if split:
        w.net.op("Split", w.given("x", B, S, sum(sizes)), w.ints(*sizes), out=names, axis=-1)
    else:
        names = [w.given(name, B, S, size) for name, size in zip(names, sizes, strict=True)]
    chosen = random(B, 1, S, S) > -1
    chosen[..., 0] = True
    given = [w.given("mask", values=chosen if mask == "bool" else random(S, S))] if mask else []
    w.net.op("Attention", *names, *given, out=w.out(), q_num_heads=4, kv_num_heads=2)
    fused, sites, _ = helpers.check(w.model(), w.feeds, ONLY)
    assert sites == [("attention", ("packed" if split else "") + {None: "", "float": "added", "bool": "kept"}[mask] + "grouped")]
    assert "Attention" not in helpers.ops(fused)


class TestAxesThatOnlyLookRight:
    """Shapes fit, elements do not lie where attention would read them."""

    def test_a_mask_of_batch_and_heads_together(self) -> None:
        w = Written()
        bart(w)
        softmax = next(node for node in w.net.nodes if node.op_type == "Softmax")
        softmax.input[0] = w.net.op("Add", softmax.input[0], w.given("mask", B * H, S, S))
        w.net.nodes.insert(w.net.nodes.index(softmax), w.net.nodes.pop())
        w.check("added")  # all heads of all batch entries as those of one

    @pytest.mark.parametrize("rows", [S, 1])
    def test_keys_that_are_regrouped(self, rows: int) -> None:
        w = Written()
        q, k, v = (w.given(name, B, H, S, D) for name in "qkv")
        flat = w.net.op("Reshape", k, w.ints(-1, rows, D))
        turned = w.net.op("Reshape", w.net.op("Transpose", flat, perm=[0, 2, 1]), w.ints(B, H, D, S))
        w.net.op("MatMul", w.net.op("Softmax", w.net.op("MatMul", q, turned), axis=-1), v, out=w.out())
        if rows == S:
            w.check(None)
        else:
            w.refused("the axes of the keys lie otherwise")

    def test_rows_that_are_repeated_beside_the_heads(self) -> None:
        w = Written()
        q, k, v = w.given("q", B, 6, S, D), w.given("k", B, 2, S, D), w.given("v", B, 2, S, D)
        wide = [w.net.op("Tile", w.unsqueezed(x, 2), w.ints(1, 1, 3, 2, 1)) for x in (k, v)]
        k, v = (w.net.op("Reshape", x, w.ints(B, 6, 2 * S, D)) for x in wide)
        scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2]))
        w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v, out=w.out())
        w.check(None)  # behind the repetition

    def test_windows_along_the_heads(self) -> None:
        w = Written()
        q, k, v = (w.given(name, 4, H, S, D) for name in "qkv")
        scores = w.net.op("Add", w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2])), w.const(random(1, H, S, S)))
        apart = w.net.op("Add", w.net.op("Reshape", scores, w.ints(6, 2, 1, S, S)), w.const(random(1, 2, 1, S, S)))
        whole = w.net.op("Reshape", apart, w.ints(4, H, S, S))
        w.net.op("MatMul", w.net.op("Softmax", whole, axis=-1), v, out=w.out())
        w.refused("split into windows otherwise than along the batch")

    def test_parts_whose_rows_become_batch_entries(self) -> None:
        w = Written()
        w.net.op("Split", w.given("x", B, 6, 3 * H * D), w.ints(H * D, H * D, H * D), out=["q", "k", "v"], axis=-1)
        q, k, v = (w.net.op("Transpose", w.net.op("Reshape", x, w.ints(3, 4, H, D)), perm=[0, 2, 1, 3]) for x in "qkv")
        scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2]))
        w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v))
        w.check(None)  # three tensors, not packed

    def test_heads_of_keys_that_are_batch_entries_of_queries(self) -> None:
        w = Written()
        q, k, v = w.given("q", 2, 6, S, D), w.given("k", 4, 3, S, D), w.given("v", 4, 3, S, D)
        q, k, v = (w.net.op("Reshape", x, w.ints(12, S, D)) for x in (q, k, v))
        scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 2, 1]))
        context = w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v)
        w.net.op("Reshape", context, w.ints(2, 6, S, D), out=w.out())
        w.check(None)  # as heads of one batch entry


class TestRefused:
    def written(self, **fields: Any) -> tuple[Written, str]:
        w = Written(**fields)
        return w, bert(w, None)

    def test_weights_that_others_read(self) -> None:
        w, _ = self.written()
        weights = next(node.output[0] for node in w.net.nodes if node.op_type == "Softmax")
        w.net.op("Neg", weights, out=w.out())
        w.refused("is also read by")

    def test_another_axis(self) -> None:
        w, _ = self.written()
        next(node for node in w.net.nodes if node.op_type == "Softmax").attribute[0].i = 2
        w.refused("the softmax is over other axes than the keys (axis) (2)")

    def test_old_operator_sets(self) -> None:
        w, _ = self.written(opset=11)
        w.refused("the function needs operator set 12; this model's is (11)")

    @pytest.mark.parametrize("size", [4, 12, 264])
    def test_sizes_of_heads(self, size: int) -> None:
        w = Written()
        q, k, v = (w.heads(w.given(name, 1, 2, size), 1, size) for name in ("q", "k", "v"))
        scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2]))
        w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v), size)
        w.refused(f"the size of a head is no multiple of 8 up to 256 ({size})")

    @pytest.mark.parametrize("shape", [(1, 1, S, 1), (B, H, 1, 1), (H, 1, S)])
    def test_a_scale_for_each_row(self, shape: tuple[int, ...]) -> None:
        w = Written()
        q, k, v = (w.heads(w.given(name, B, S, H * D)) for name in ("q", "k", "v"))
        scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = w.net.op("Mul", scores, w.const(random(*shape)))
        w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v))
        w.refused("is not one number")

    def test_a_mask_that_makes_more_of_the_batch(self) -> None:
        w = Written()
        q, k, v = (w.heads(w.given(name, 1, S, H * D)) for name in ("q", "k", "v"))
        scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = w.net.op("Add", scores, w.given("mask", B, 1, 1, S))
        w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v))
        w.refused("has another shape than the scores")

    def test_a_mask_of_unknown_length_beside_one_row(self) -> None:
        w = Written()
        q, k, v = (w.heads(w.given(name, B, rows, H * D)) for name, rows in (("q", 1), ("k", S), ("v", S)))
        scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = w.net.op("Add", scores, w.given("mask", 4, S, symbols=["rows", S]))
        w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v))
        w.refused("has another shape than the scores")

    def test_keys_of_one_batch_entry(self) -> None:
        w = Written()
        q = w.heads(w.given("q", B, S, H * D))
        k, v = (w.heads(w.given(name, 1, S, H * D)) for name in ("k", "v"))
        scores = w.net.op("MatMul", q, w.net.op("Transpose", k, perm=[0, 1, 3, 2]))
        w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v))
        w.refused("is a broadcast over the batch (2 and 1)")

    def test_keys_that_are_not_turned(self) -> None:
        w = Written()
        q, k, v = (w.heads(w.given(name, B, D, H * D)) for name in ("q", "k", "v"))
        scores = w.net.op("MatMul", q, k)  # as many keys as elements
        w.joined(w.net.op("MatMul", w.net.op("Softmax", scores, axis=-1), v))
        w.refused("the axes of the keys lie otherwise")

    def test_another_type(self) -> None:
        w = Written(dtype=np.float64)
        bert(w, None)
        w.refused("is of type (double)")


@pytest.mark.parametrize("opset", [12, 13, 18, 23])
def test_every_form_has_a_function(opset: int) -> None:
    functions = attention.FUSION.functions(opset)
    assert {function.name for function in functions} == {form.op_type for form in FORMS}
    assert len(functions) == len(FORMS)


def test_bfloat16_runs_anywhere() -> None:
    """onnxruntime has no bfloat16 products; the function's are in float32."""
    form = next(form for form in FORMS if form.op_type == "FusedAttentionAdded")
    function = next(f for f in attention.FUSION.functions(17) if f.name == form.op_type)
    attrs = {"scale": 0.5, "fill": 0.0, "hides": 0, "safe": 0, "heads": H, "kv_heads": H, "dtype": TensorProto.BFLOAT16}
    attrs |= {f"{name}_perm": [0, 2, 1, 3] for name in "qkvy"}
    names = ["q", "k", "v", "mask"]
    nodes = [helper.make_node("Cast", [name], [f"{name}_b"], to=TensorProto.BFLOAT16) for name in names]
    nodes.append(helper.make_node(form.op_type, [f"{name}_b" for name in names], ["y_b"], domain=_bodies.DOMAIN, **attrs))
    nodes.append(helper.make_node("Cast", ["y_b"], ["y"], to=TensorProto.FLOAT))
    shapes = {name: [B, S, H, D] for name in "qkvy"} | {"mask": [B, 1, 1, S]}
    graph = helper.make_graph(nodes, "g", [value(name, shapes[name]) for name in names], [value("y", shapes["y"])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(_bodies.DOMAIN, 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)
    feeds = {name: random(*shapes[name], seed=i).astype(ml_dtypes.bfloat16).astype(np.float32) for i, name in enumerate(names)}
    feeds["mask"][0] = -10000.0  # in bfloat16 nothing is left of the scores: all keys alike
    (got,) = helpers.run(model, feeds)
    np.testing.assert_allclose(got[0], np.broadcast_to(feeds["v"][0].mean(axis=0), (S, H, D)), rtol=1e-2, atol=1e-2)
