"""lstm and gru: one step in primitives, as exporters write a cell, becomes a sequence of one step; conditions under which it must not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.fusions.helpers import OPSETS, Net, check, fuse, initializers, names, ops, value

HIDDEN, WIDTH, BATCH = 16, 24, 3
ORDERS = {"LSTM": "ifgo", "GRU": "rzn"}  # PyTorch's


@dataclass(frozen=True)
class Cell:
    """A model of `steps` cells one behind the other. `products`: "each" of x and h, or of both "joined"; `gates`: how they come apart:
    "split" (LSTM: of the sum), "split each" (of both products), "own" (products of their own)."""

    cell: str = "LSTM"
    products: str = "each"
    gates: str = "split"
    gemm: bool = True
    bias: str | None = "both"  # "both" products, one "after" the sum, None
    order: str = ""
    steps: int = 1
    opset: int = 17
    hidden: int = HIDDEN
    batch: Any = BATCH
    width: Any = WIDTH
    dtype: Any = np.float32
    h_first: bool = False
    forget_bias: float | None = None
    reset_first: bool = False
    mix: str = "difference"  # h' = n + z (h - n), or the "sum" (1 - z) n + z h
    attrs: dict[str, Any] = field(default_factory=dict)  # of Gemm
    split: list[int] | None = None
    more: tuple[str, ...] = ()

    def model(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        net = Net(self.opset)
        kind = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16, np.float64: TensorProto.DOUBLE}[self.dtype]
        order = self.order or ORDERS[self.cell]
        weights: dict[tuple[str, str], str] = {}

        def const(key: tuple[str, str], *size: int) -> str:
            if key not in weights:
                weights[key] = net.const(rng.uniform(-0.5, 0.5, size), self.dtype)
            return weights[key]

        def linear(name: str, given: str, size: int, gate: str = "", bias: bool | None = None) -> str:
            rows = self.hidden * (1 if gate else len(order))
            biased = self.bias == "both" if bias is None else bias
            more = [const((f"{name}_b", gate), rows)] if biased else []
            if self.gemm:
                c = more or ([net.const(np.zeros(1), self.dtype)] if self.opset < 11 else [])
                return net.op("Gemm", given, const((f"{name}_w", gate), rows, size), *c, transB=1, **self.attrs)
            product = net.op("MatMul", given, const((f"{name}_w", gate), size, rows))
            return net.op("Add", product, *more) if more else product

        def total(x: str, h: str, gate: str = "") -> str:
            if self.products == "joined":
                joined = net.op("Concat", *((h, x) if self.h_first else (x, h)), axis=1)
                return linear("xh", joined, WIDTH + self.hidden, gate)
            operands = [linear("x", x, WIDTH, gate), linear("h", h, self.hidden, gate)]
            made = net.op("Add", *(operands[::-1] if self.h_first else operands))
            rows = self.hidden * (1 if gate else len(order))
            return net.op("Add", made, const(("b", gate), 1, rows)) if self.bias == "after" else made

        def split(sums: str) -> dict[str, str]:
            outs = [net.name(f"part{number}_") for number in range(len(order))]
            if self.opset >= 13:
                sizes = [net.const(self.split, np.int64)] if self.split else []
                more = {"num_outputs": len(order)} if self.opset >= 18 and not sizes else {}
                net.op("Split", sums, *sizes, out=outs, axis=-1 if self.opset > 10 else 1, **more)
            else:
                net.op("Split", sums, out=outs, axis=1, **({"split": self.split} if self.split else {}))
            return dict(zip(order, outs, strict=True))

        def lstm(x: str, h: str, c: str) -> tuple[str, str]:
            if self.gates == "split":
                parts = split(total(x, h))
            elif self.gates == "split each":
                both = [split(linear("x", x, WIDTH)), split(linear("h", h, self.hidden))]
                parts = {gate: net.op("Add", both[0][gate], both[1][gate]) for gate in order}
            else:
                parts = {gate: total(x, h, gate) for gate in order}
            if self.forget_bias is not None:
                parts["f"] = net.op("Add", parts["f"], net.const(self.forget_bias, self.dtype))
            i, f, o = (net.op("Sigmoid", parts[gate]) for gate in "ifo")
            new_c = net.op("Add", net.op("Mul", f, c), net.op("Mul", i, net.op("Tanh", parts["g"])))
            return net.op("Mul", o, net.op("Tanh", new_c)), new_c

        def gru(x: str, h: str) -> str:
            if self.reset_first:
                r, z = (net.op("Sigmoid", total(x, h, gate)) for gate in "rz")
                n = net.op("Tanh", total(x, net.op("Mul", r, h), "n"))
            else:
                if self.gates == "own":
                    sides = [{g: linear(v, t, w, g) for g in order} for v, t, w in (("x", x, WIDTH), ("h", h, self.hidden))]
                else:
                    sides = [split(linear("x", x, WIDTH)), split(linear("h", h, self.hidden))]
                r, z = (net.op("Sigmoid", net.op("Add", sides[0][gate], sides[1][gate])) for gate in "rz")
                n = net.op("Tanh", net.op("Add", sides[0]["n"], net.op("Mul", r, sides[1]["n"])))
            if self.mix == "difference":
                return net.op("Add", net.op("Mul", net.op("Sub", h, n), z), n)
            rest = net.op("Sub", net.const(1, self.dtype), z)
            return net.op("Add", net.op("Mul", rest, n), net.op("Mul", z, h))

        names = ("h", "c") if self.cell == "LSTM" else ("h",)
        given = [value(f"x{step}", (self.batch, self.width), kind) for step in range(self.steps)]
        given += [value(name, (self.batch, self.hidden), kind) for name in names]
        feeds = {f"x{step}": rng.standard_normal((BATCH, WIDTH)).astype(self.dtype) for step in range(self.steps)}
        feeds |= {name: rng.uniform(-1, 1, (BATCH, self.hidden)).astype(self.dtype) for name in names}
        h, c = "h", "c"
        for step in range(self.steps):
            if self.cell == "LSTM":
                h, c = lstm(f"x{step}", h, c)
            else:
                h = gru(f"x{step}", h)
        outputs = [h, c] if self.cell == "LSTM" else [h]
        return net.model(given, [*outputs, *self.more]), feeds


LSTM, GRU = Cell(), Cell("GRU")
LSTMS = [
    replace(LSTM, products=products, gates=gates, gemm=gemm, bias=bias)
    for products, gates, bias in (
        ("each", "split", "both"),
        ("each", "split", "after"),
        ("each", "split", None),
        ("joined", "split", "both"),
        ("each", "split each", "both"),
        ("each", "own", "both"),
        ("each", "own", "after"),
        ("joined", "own", None),
    )
    for gemm in (True, False)
]
GRUS = [replace(GRU, gates=gates, gemm=gemm, mix=mix) for gates, mix in (("split", "difference"), ("own", "sum")) for gemm in (True, False)]


def fused_ops(cell: Cell) -> list[str]:
    """Operators of the rewritten model, which is proved equal, without those that move axes."""
    model, feeds = cell.model()
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if cell.dtype == np.float16 else {}
    fused, sites, _ = check(model, feeds, only=("lstm", "gru"), **tolerance)
    assert sites == [(cell.cell.lower(), "cell")] * cell.steps
    return [op for op in ops(fused) if op not in ("Unsqueeze", "Squeeze")]


@pytest.mark.parametrize("cell", LSTMS, ids=lambda cell: f"{cell.products} {cell.gates} {cell.bias} {'Gemm' if cell.gemm else 'MatMul'}")
def test_every_form_of_an_lstm_cell(cell: Cell) -> None:
    for h_first in (False, True):
        assert fused_ops(replace(cell, h_first=h_first)) == ["onnxfuse::LSTMSequence"]


@pytest.mark.parametrize("cell", GRUS, ids=lambda cell: f"{cell.gates} {'Gemm' if cell.gemm else 'MatMul'}")
def test_every_form_of_a_gru_cell(cell: Cell) -> None:
    for bias in ("both", None):
        assert fused_ops(replace(cell, bias=bias)) == ["onnxfuse::GRUSequence"]


@pytest.mark.parametrize("products", ["each", "joined"])
def test_a_gru_cell_whose_reset_gate_comes_first(products: str) -> None:
    for mix in ("difference", "sum"):
        cell = replace(GRU, products=products, reset_first=True, mix=mix, bias="after" if products == "each" else "both")
        assert fused_ops(cell) == ["onnxfuse::GRUSequence"]
        fused, _, _ = fuse(cell.model()[0], ("gru",))
        (node,) = [node for node in fused.graph.node if node.op_type == "GRUSequence"]
        assert [attribute.i for attribute in node.attribute if attribute.name == "linear_before_reset"] == [0]


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset: int) -> None:
    for cell in (LSTM, GRU):
        for split in (None, [HIDDEN] * len(ORDERS[cell.cell])):
            assert len(fused_ops(replace(cell, opset=opset, split=split))) == 1


@pytest.mark.parametrize("order", ["iofg", "gifo", "oigf"])
def test_gates_in_any_order(order: str) -> None:
    for products in ("each", "joined"):
        assert fused_ops(replace(LSTM, order=order, products=products)) == ["onnxfuse::LSTMSequence"]
    assert fused_ops(replace(GRU, order=order.replace("o", "").translate(str.maketrans("ifg", "zrn"))[:3])) == ["onnxfuse::GRUSequence"]


def test_a_forget_bias_beside_the_sums() -> None:
    for gates in ("split", "own"):
        assert fused_ops(replace(LSTM, forget_bias=1.0, gates=gates)) == ["onnxfuse::LSTMSequence"]


def test_half_precision_and_a_batch_without_a_size() -> None:
    for cell in (LSTM, GRU):
        assert len(fused_ops(replace(cell, dtype=np.float16))) == 1
        assert len(fused_ops(replace(cell, batch="N"))) == 1


@pytest.mark.parametrize("cell", [LSTM, replace(LSTM, gates="own"), GRU], ids=["lstm", "own", "gru"])
def test_cells_behind_each_other_share_weights(cell: Cell) -> None:
    chain = replace(cell, steps=4)
    assert len(fused_ops(chain)) == 4
    fused, _, _ = fuse(chain.model()[0], (cell.cell.lower(),))
    gates = len(ORDERS[cell.cell])
    large = [array for array in initializers(fused).values() if array.size >= gates * HIDDEN * HIDDEN]
    assert sorted(array.shape for array in large) == [(1, gates * HIDDEN, HIDDEN), (1, gates * HIDDEN, WIDTH)]


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (replace(LSTM, hidden=12), "hidden_size is no multiple of 8 from 16 to 1024 (12)"),
        (replace(GRU, hidden=8), "hidden_size is no multiple of 8 from 16 to 1024 (8)"),
        (replace(LSTM, attrs={"alpha": 0.5}), "has alpha (0.5)"),
        (replace(GRU, attrs={"beta": 2.0}), "has beta (2.0)"),
        (replace(LSTM, dtype=np.float64), "is of type (double)"),
        (replace(LSTM, batch=None), "is not proved to be"),
    ],
)
def test_cells_that_the_kernels_do_not_compute(cell: Cell, reason: str) -> None:
    fused, sites, misses = fuse(cell.model()[0], ("lstm", "gru"))
    assert sites == []
    assert all(node.domain != "onnxfuse" for node in fused.graph.node)
    assert any(reason in miss.reason for miss in misses), misses


def test_a_gate_that_others_read() -> None:
    model, _ = LSTM.model()
    (split,) = [node for node in model.graph.node if node.op_type == "Split"]
    sigmoid = next(node for node in model.graph.node if node.op_type == "Sigmoid" and node.input[0] == split.output[0])
    model.graph.output.append(value(sigmoid.output[0], (BATCH, HIDDEN)))
    _, sites, misses = fuse(model, ("lstm",))
    assert sites == []
    assert any("is also read by a graph output" in miss.reason for miss in misses)


def test_a_batch_of_one_that_spreads_over_another() -> None:
    """x W + h R may have more rows than h; a sequence has not."""
    model, _ = LSTM.model()
    x = next(given for given in model.graph.input if given.name == "x0")
    x.type.tensor_type.shape.dim[0].dim_value = 1
    _, sites, misses = fuse(model, ("lstm",))
    assert sites == []
    assert any("is not proved to be [1, 16]" in miss.reason for miss in misses)


def test_other_activations_and_other_cells_stay() -> None:
    for old, new in (("Tanh", "Relu"), ("Sigmoid", "HardSigmoid")):
        model, feeds = LSTM.model()
        for node in model.graph.node:
            node.op_type = new if node.op_type == old else node.op_type
        fused, sites, _ = check(model, feeds, only=("lstm", "gru"))
        assert names(sites) == []
        assert ops(fused) == ops(model)


def test_the_gates_must_be_parts_of_one_size() -> None:
    model, _ = replace(LSTM, split=[HIDDEN] * 4).model()
    (split,) = [node for node in model.graph.node if node.op_type == "Split"]
    sizes = next(tensor for tensor in model.graph.initializer if tensor.name == split.input[1])
    sizes.CopyFrom(onnx.numpy_helper.from_array(np.array([8, 24, 16, 16], np.int64), sizes.name))
    _, sites, misses = fuse(model, ("lstm",))
    assert sites == []
    assert any("does not split into 4 parts of 16" in miss.reason for miss in misses)


@pytest.mark.parametrize(
    "cell", [LSTM, replace(LSTM, gemm=False, bias="after"), replace(GRU, gates="own", gemm=False)], ids=["split", "sum", "gru"]
)
def test_among_all_fusions(cell: Cell) -> None:
    """What others fold before: a product with the bias behind it."""
    fused, sites, _ = check(*cell.model())
    assert (cell.cell.lower(), "cell") in sites
    assert [op for op in ops(fused) if op not in ("Unsqueeze", "Squeeze")] == [f"onnxfuse::{cell.cell}Sequence"]
