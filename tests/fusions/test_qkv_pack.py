"""qkv_pack: one product against onnxruntime, and every reason to refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions import helpers
from tests.fusions.helpers import Net, value

ONLY = ("qkv_pack",)
ROLES = ("q", "k", "v")
HEADS, SIZE = 2, 4


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * 0.5).astype(np.float32)


@dataclass
class Attention:
    """x [N, S, 16] -> attention with heads of 4; every spelling is a field."""

    opset: int = 17
    dtype: Any = np.float32
    bias: Sequence[str] = ROLES
    bias_shape: tuple[int, ...] = ()
    first: bool = False  # the bias is the first operand
    gemm: dict[str, Any] | None = None
    heads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROLES, HEADS))
    sources: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ROLES, "x"))
    width: dict[str, int] = field(default_factory=lambda: {"x": 16, "mem": 24})
    mask: str | None = None  # "add", "first" or "where": how a mask meets the scores
    constant_nodes: bool = False
    scaled_first: bool = False
    net: Net = field(init=False)

    def __post_init__(self) -> None:
        self.net = Net(self.opset, constant_nodes=self.constant_nodes)

    def linear(self, role: str, order: int) -> str:
        net, source = self.net, self.sources[role]
        rows, columns = self.width[source], self.heads[role] * SIZE
        weight = random(rows, columns, seed=order)
        bias = [net.const(random(columns, seed=order + 10).reshape(*self.bias_shape, columns), self.dtype)] if role in self.bias else []
        if self.gemm is not None:
            flat = (
                net.op("Reshape", source, net.const([-1, rows], np.int64))
                if f"{source}_flat" not in self.flat
                else self.flat[f"{source}_flat"]
            )
            self.flat[f"{source}_flat"] = flat
            stored = weight.T if self.gemm.get("transB") else weight
            return net.op("Gemm", flat, net.const(stored, self.dtype, name=f"{role}_w"), *bias, out=f"{role}_out", **self.gemm)
        product = net.op("MatMul", source, net.const(weight, self.dtype, name=f"{role}_w"), out=None if bias else f"{role}_out")
        if not bias:
            return product
        operands = [product, *bias]
        return net.op("Add", *(operands[::-1] if self.first else operands), out=f"{role}_out")

    flat: dict[str, str] = field(default_factory=dict)

    def split_heads(self, role: str, x: str) -> str:
        net, heads = self.net, self.heads[role]
        shaped = net.op("Reshape", x, net.const([self.rows.get(self.sources[role], 2), -1, heads, SIZE], np.int64))
        turned = net.op("Transpose", shaped, perm=[0, 2, 3, 1] if role == "k" else [0, 2, 1, 3])
        repeats = self.heads["q"] // heads
        return net.op("Concat", *[turned] * repeats, axis=1) if repeats > 1 else turned

    rows: dict[str, int] = field(default_factory=dict)

    def build(self, out: str = "y") -> Net:
        net = self.net
        parts = {role: self.split_heads(role, self.linear(role, order)) for order, role in enumerate(ROLES)}
        if self.scaled_first:
            parts["q"] = net.op("Mul", parts["q"], net.const(0.5, self.dtype))
            scores = net.op("MatMul", parts["q"], parts["k"])
        else:
            scores = net.op("Div", net.op("MatMul", parts["q"], parts["k"]), net.const(2.0, self.dtype))
        if self.mask == "where":
            scores = net.op("Where", "mask", net.const(-1e4, self.dtype), scores)
        elif self.mask:
            scores = net.op("Add", *([scores, "mask"] if self.mask == "add" else ["mask", scores]))
        weights = net.op("Softmax", scores, axis=3 if self.opset < 13 else -1)
        context = net.op("Transpose", net.op("MatMul", weights, parts["v"]), perm=[0, 2, 1, 3])
        net.op("Reshape", context, net.const([2, -1, self.heads["q"] * SIZE], np.int64), out=out)
        return net

    def model(self, outputs: Sequence[Any] = (), length: Any = 5) -> onnx.ModelProto:
        kind = int(helpers.helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)))
        inputs = [value("x", [2, length, 16], kind)]
        if "mem" in self.sources.values():
            inputs.append(value("mem", [2, 7, self.width["mem"]], kind))
        if self.mask:
            inputs.append(value("mask", [2, 1, 1, 5], TensorProto.BOOL if self.mask == "where" else kind))
        return self.net.model(inputs, [value("y", [2, length, self.heads["q"] * SIZE], kind), *outputs])


X = {"x": random(2, 5, 16, seed=99)}


def refused(model: onnx.ModelProto) -> set[str]:
    fused, sites, misses = helpers.fuse(model, ONLY)
    assert sites == []
    assert "Split" not in helpers.ops(fused)
    return {miss.reason for miss in misses}


def packed(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.name.startswith("qkv_")]


@pytest.mark.parametrize("opset", [7, 9, 11, 12, 13, 14, 17, 18, 21, helpers.RUN_OPSET])
@pytest.mark.parametrize("bias", [ROLES, (), ("q", "v")])
def test_three_become_one(opset: int, bias: Sequence[str]) -> None:
    attention = Attention(opset, bias=bias)
    attention.build()
    fused, sites, misses = helpers.check(attention.model(), X, ONLY)
    assert (helpers.names(sites), misses) == (["qkv_pack"], [])
    assert [node.op_type for node in packed(fused)] == ["MatMul", "Add", "Split"] if bias else ["MatMul", "Split"]
    assert list(packed(fused)[-1].output) == ["q_out", "k_out", "v_out"]
    assert helpers.ops(fused).count("MatMul") == 3


@pytest.mark.parametrize(
    "spelling",
    [
        {"first": True},
        {"bias_shape": (1, 1)},
        {"constant_nodes": True},
        {"scaled_first": True},
        {"mask": "add"},
        {"mask": "first"},
        {"mask": "where"},
        {"heads": {"q": 4, "k": 2, "v": 2}},
    ],
)
def test_spellings(spelling: dict[str, Any]) -> None:
    attention = Attention(**spelling)
    attention.build()
    masks = {"where": np.arange(10).reshape(2, 1, 1, 5) % 3 == 1, None: None}
    mask = masks.get(attention.mask, random(2, 1, 1, 5, seed=3))
    fused, sites, _ = helpers.check(attention.model(), X if mask is None else X | {"mask": mask}, ONLY)
    assert helpers.names(sites) == ["qkv_pack"]
    assert len(packed(fused)) == 3


@pytest.mark.parametrize("gemm", [{}, {"transB": 1}, {"alpha": 0.5, "beta": 2.0}])
@pytest.mark.parametrize("bias", [ROLES, ()])
def test_gemm(gemm: dict[str, Any], bias: Sequence[str]) -> None:
    attention = Attention(gemm=gemm, bias=bias)
    attention.build()
    fused, sites, _ = helpers.check(attention.model(), X, ONLY)
    assert helpers.names(sites) == ["qkv_pack"]
    assert [node.op_type for node in packed(fused)] == ["Gemm", "Split"]


@pytest.mark.parametrize("rotated_first", [False, True])
def test_rotary_embedding_cache_and_repeated_heads(rotated_first: bool) -> None:
    """What decoders put between a projection and the product of the attention."""
    net = Net()

    def heads(role: str, count: int, order: int) -> str:
        product = net.op("MatMul", "x", net.const(random(16, count * SIZE, seed=order)), out=f"{role}_out")
        return net.op("Transpose", net.op("Reshape", product, net.const([2, -1, count, SIZE], np.int64)), perm=[0, 2, 1, 3])

    def piece(x: str, start: int, end: int) -> str:
        return net.op("Slice", x, *(net.const([number], np.int64) for number in (start, end, 3)))

    def rotate(x: str) -> str:
        plain = net.op("Mul", x, net.const(random(5, SIZE, seed=20)))
        turned = net.op(
            "Mul", net.op("Concat", net.op("Neg", piece(x, 2, 4)), piece(x, 0, 2), axis=-1), net.const(random(5, SIZE, seed=21))
        )
        return net.op("Add", *([turned, plain] if rotated_first else [plain, turned]))

    def repeat(x: str) -> str:
        wide = net.op("Expand", net.op("Unsqueeze", x, net.const([2], np.int64)), net.const([1, 1, 2, 1, 1], np.int64))
        return net.op("Reshape", wide, net.const([2, 4, -1, SIZE], np.int64))

    q, k, v = heads("q", 4, 0), heads("k", 2, 1), heads("v", 2, 2)
    k = net.op("Concat", "past", rotate(k), axis=2)
    v = net.op("Concat", "past", v, axis=2)
    scores = net.op("MatMul", net.op("Mul", rotate(q), net.const(0.5)), net.op("Transpose", repeat(k), perm=[0, 1, 3, 2]))
    net.op("MatMul", net.op("Softmax", scores, axis=-1), repeat(v), out="y")
    model = net.model([value("x", [2, 5, 16]), value("past", [2, 2, 3, SIZE])], ["y"])
    fused, sites, _ = helpers.check(model, X | {"past": random(2, 2, 3, SIZE)}, ONLY)
    assert helpers.names(sites) == ["qkv_pack"]
    assert list(packed(fused)[-1].output) == ["q_out", "k_out", "v_out"]


def test_attention_without_projections_is_no_site() -> None:
    """Neither are the products that the residual sums in front of it lead to."""
    net, x = Net(), "x"
    for layer in range(6):
        x = net.op("Add", x, net.op("MatMul", net.op("Relu", x), net.const(random(8, 8, seed=layer))))
    scores = net.op("MatMul", x, net.op("Transpose", x, perm=[0, 2, 1]))
    net.op("MatMul", net.op("Softmax", scores, axis=-1), x, out="y")
    _, sites, _ = helpers.fuse(net.model([value("x", [2, 5, 8])], ["y"]), ONLY)
    assert sites == []


def test_dynamic_length() -> None:
    attention = Attention()
    attention.build()
    for length in (3, 5):
        helpers.check(attention.model(length="S"), {"x": random(2, length, 16)}, ONLY)


def test_half_precision() -> None:
    attention = Attention(dtype=np.float16)
    attention.build()
    _, sites, _ = helpers.check(attention.model(), {"x": X["x"].astype(np.float16)}, ONLY, rtol=1e-2, atol=1e-2)
    assert helpers.names(sites) == ["qkv_pack"]


def test_results_with_other_readers_keep_their_names() -> None:
    attention = Attention()
    net = attention.build()
    net.op("Relu", "k_out", out="z")
    model = attention.model([value("q_out", [2, 5, 8]), value("z", [2, 5, 8])])
    fused, sites, _ = helpers.check(model, X, ONLY)
    assert helpers.names(sites) == ["qkv_pack"]
    assert [v.name for v in fused.graph.output] == ["y", "q_out", "z"]


def test_one_that_is_read_before_the_others_are_made() -> None:
    """The shape of a later Reshape hangs on the first projection, so the product has to stand where the first one was."""
    attention = Attention()
    net = attention.build()
    shape = net.op("Shape", "q_out")
    net.op("Add", "y", net.op("Cast", net.op("ReduceSum", shape, keepdims=0), to=1), out="z")
    made = [node for node in net.nodes if node.op_type == "Shape"]
    net.nodes.remove(made[0])
    net.nodes.insert(next(i for i, node in enumerate(net.nodes) if "q_out" in node.output) + 1, made[0])
    _, sites, _ = helpers.check(attention.model([value("z", [2, 5, 8])]), X, ONLY)
    assert helpers.names(sites) == ["qkv_pack"]


def test_two_attentions() -> None:
    one = Attention()
    one.build("h")
    two = Attention()
    two.net = Net(prefix="second_")
    two.width, two.sources = {"h": 8}, dict.fromkeys(ROLES, "h")
    two.build("y")
    renamed = {f"{role}_{part}": f"{role}_{part}_2" for role in ROLES for part in ("w", "out")}
    for node in two.net.nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for tensor in two.net.constants:
        tensor.name = renamed.get(tensor.name, f"{tensor.name}_2")
    for node in two.net.nodes:
        known = {tensor.name for tensor in two.net.constants}
        node.input[:] = [f"{name}_2" if f"{name}_2" in known else name for name in node.input]
    one.net.nodes += two.net.nodes
    one.net.constants += two.net.constants
    _, sites, _ = helpers.check(one.model(), X, ONLY)
    assert helpers.names(sites) == ["qkv_pack", "qkv_pack"]


def test_queries_and_keys_alone() -> None:
    """Position embeddings are added to both, the values come from the tensor without them."""
    attention = Attention()
    attention.sources = {"q": "p", "k": "p", "v": "x"}
    attention.width["p"] = 16
    attention.net.op("Add", "x", attention.net.const(random(5, 16)), out="p")
    attention.build()
    fused, sites, misses = helpers.check(attention.model(), X, ONLY)
    assert (helpers.names(sites), misses) == (["qkv_pack"], [])
    assert list(packed(fused)[-1].output) == ["q_out", "k_out"]


def test_cross_attention_is_refused() -> None:
    attention = Attention()
    attention.sources = {"q": "x", "k": "mem", "v": "mem"}
    attention.build()
    said = refused(attention.model())
    assert said == {
        "Q, K and V are made of different tensors (x, mem, mem)",
        "Q and K are made of different tensors (x, mem)",
    }


@pytest.mark.parametrize("role", ROLES)
def test_weight_read_by_others_is_not_packed(role: str) -> None:
    attention = Attention()
    net = attention.build()
    net.op("MatMul", "u", f"{role}_w", out="z")
    model = attention.model([value("z", [2, 8])])
    model.graph.input.append(value("u", [2, 16]))
    fused, sites, misses = helpers.fuse(model, ONLY)
    if role == "v":  # those of Q and K are packed all the same
        assert list(packed(fused)[-1].output) == ["q_out", "k_out"]
    else:
        assert sites == []
        assert {miss.reason for miss in misses} == {f"weight '{role}_w' has other readers and would be stored twice (2)"}


def test_weights_at_run_time() -> None:
    attention = Attention()
    net = attention.build()
    net.constants = [tensor for tensor in net.constants if tensor.name != "q_w"]
    model = attention.model()
    model.graph.input.append(value("q_w", [16, 8]))
    assert refused(model) == {"'q_weight' is computed at run time (q_w)"}


def test_one_product_for_two_is_refused() -> None:
    attention = Attention()
    net = attention.build()
    for node in net.nodes:
        node.input[:] = ["q_out" if name in ("k_out", "v_out") else name for name in node.input]
    said = refused(attention.model())
    assert said == {
        "Q, K and V share one product (q_out, q_out, q_out)",
        "Q and K share one product (q_out, q_out)",
    }


def test_different_factors() -> None:
    attention = Attention(gemm={"alpha": 0.5})
    net = attention.build()
    next(node for node in net.nodes if "k_out" in node.output).attribute[0].f = 0.25
    said = refused(attention.model())
    assert said == {"Q, K and V have different alpha (0.5, 0.25, 0.5)", "Q and K have different alpha (0.5, 0.25)"}


def test_bias_for_each_row() -> None:
    attention = Attention(bias=())
    net = attention.build()
    net.nodes.insert(1, onnx.helper.make_node("Add", ["q_out", net.const(random(5, 8), name="rows")], ["q_sum"]))
    for node in net.nodes[2:]:
        node.input[:] = ["q_sum" if name == "q_out" else name for name in node.input]
    fused, sites, _ = helpers.check(attention.model(), X, ONLY)
    assert helpers.names(sites) == ["qkv_pack"]  # without the addition, which stays
    assert [node.op_type for node in packed(fused)] == ["MatMul", "Split"]


def test_products_that_are_no_attention_are_no_site() -> None:
    net = Net()
    parts = [net.op("MatMul", "x", net.const(random(16, 8, seed=seed))) for seed in range(3)]
    net.op("Add", net.op("Mul", parts[0], parts[1]), parts[2], out="y")
    _, sites, misses = helpers.fuse(net.model([value("x", [2, 5, 16])], ["y"]), ONLY)
    assert (sites, misses) == ([], [])


def test_inside_a_branch() -> None:
    attention = Attention()
    attention.build("then")
    other = Net(prefix="e")
    other.op("Slice", "x", *(other.const(array, np.int64) for array in ([0], [8], [2])), out="else")
    bodies = [
        onnx.helper.make_graph(net.nodes, name, [], [value(out, [2, 5, 8])], net.constants)
        for net, name, out in ((attention.net, "a", "then"), (other, "b", "else"))
    ]
    outer = Net()
    outer.op("If", "c", out="y", then_branch=bodies[0], else_branch=bodies[1])
    model = outer.model([value("x", [2, 5, 16]), value("c", [], TensorProto.BOOL)], [value("y", [2, 5, 8])])
    _, sites, _ = helpers.check(model, X | {"c": np.array(True)}, ONLY)
    assert helpers.names(sites) == ["qkv_pack"]
