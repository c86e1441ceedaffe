"""Finding and rewriting, whatever the fusion: claims, misses, order, names, shared constants, dead weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from onnxfuse.fusions import REGISTRY
from onnxfuse.fusions.base import Builder, Fusion, Index, Match, Refusal, apply, find
from onnxfuse.fusions.pattern import Matcher, op, tensor
from onnxfuse.graph import write
from onnxfuse.graph.model import Model
from tests.fusions.helpers import Net, check_names, load, ops, random, run, same, value

X = random(2, 8)


class NegNeg(Fusion):
    """A fusion for tests: -(-x) is x, seen as an Identity node; `limit` refuses those of one name."""

    name = "negneg"
    kind = "canonical"
    patterns = (op("Neg", op("Neg", tensor("x"), out="inner"), out="y"),)

    def __init__(self, limit: str = "", keeps: tuple[str, ...] = ()) -> None:
        self.limit = limit
        self.keeps = keeps

    def check(self, match: Match, model: Model) -> Refusal | None:
        return Refusal("is not wanted", match["x"].name) if match["x"].name == self.limit else None

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        if match.escapes(match["inner"]):
            new.node("Neg", [match["x"]], [match["inner"]], stem="kept")
        return new.node("Identity", [match["x"]], [match.output], stem="negneg")


def chain(count: int, readers: tuple[int, ...] = (), outputs: tuple[int, ...] = ()) -> onnx.ModelProto:
    """`count` Neg nodes in a row; an Abs reads the result of those in `readers`, and those in `outputs` are graph outputs."""
    net = Net(17)
    names = ["x"]
    for i in range(count):
        names.append(net.op("Neg", names[-1], out=f"n{i + 1}"))
    others = [net.op("Abs", names[i], out=f"a{i}") for i in readers]
    return net.model([value("x", [2, 8])], [names[-1], *others, *(names[i] for i in outputs)])


def rewritten(model: onnx.ModelProto, fusion: Fusion) -> tuple[onnx.ModelProto, list[str]]:
    loaded = load(model)
    matches, misses = find(fusion, loaded, Index.of(loaded))
    apply(fusion, matches, loaded)
    result = write.to_proto(loaded)
    onnx.checker.check_model(result, full_check=True)
    check_names(result)
    same(run(result, {"x": X}), run(model, {"x": X}))
    return result, [miss.reason for miss in misses]


@pytest.mark.parametrize("count", range(1, 6))
def test_sites_do_not_overlap(count: int) -> None:
    assert sorted(ops(rewritten(chain(count), NegNeg())[0])) == ["Identity"] * (count // 2) + ["Neg"] * (count % 2)


def test_inner_tensors_that_others_read() -> None:
    for model, reader in ((chain(2, readers=(1,)), "'a1' (Abs)"), (chain(2, outputs=(1,)), "a graph output")):
        result, misses = rewritten(model, NegNeg())
        assert ops(result) == ops(model)
        assert misses == [f"'n1' is also read by {reader}"]


def test_inner_tensors_that_a_fusion_keeps() -> None:
    result, misses = rewritten(chain(2, readers=(1,)), NegNeg(keeps=("inner",)))
    assert sorted(ops(result)) == ["Abs", "Identity", "Neg"]
    assert misses == []


def test_a_refusal_is_a_miss_with_its_value() -> None:
    result, misses = rewritten(chain(2), NegNeg(limit="x"))
    assert ops(result) == ["Neg", "Neg"]
    assert misses == ["is not wanted (x)"]


def test_a_miss_within_a_site_is_no_miss() -> None:
    assert rewritten(chain(3), NegNeg(limit="n1"))[1] == []


def test_nodes_stay_sorted_where_a_kept_tensor_is_read_before_the_site() -> None:
    net = Net(17)
    inner = net.op("Neg", "x", out="n1")
    early = net.op("Abs", inner, out="early")
    net.op("Neg", inner, out="n2")
    result, _ = rewritten(net.model([value("x", [2, 8])], ["n2", early]), NegNeg(keeps=("inner",)))
    assert ops(result).index("Neg") < ops(result).index("Abs")


def test_many_readers_of_one_constant() -> None:
    net = Net(17)
    one = net.const(1)
    x = "x"
    for _ in range(50):
        x = net.op("Add", net.op("Neg", net.op("Neg", x)), one)
    result, _ = rewritten(net.model([value("x", [2, 8])], [x]), NegNeg())
    assert ops(result).count("Identity") == 50
    assert len(result.graph.initializer) == 1


def test_constant_nodes_that_nobody_reads_any_more_go() -> None:
    net = Net(17, constant_nodes=True)
    net.op("Mul", "x", net.op("Sigmoid", net.op("Mul", "x", net.const(1))), out="y")
    loaded = load(net.model([value("x", [2, 8])], ["y"]))
    silu = next(fusion for fusion in REGISTRY if fusion.name == "silu")
    apply(silu, find(silu, loaded, Index.of(loaded))[0], loaded)
    assert ops(write.to_proto(loaded), constants=True) == ["onnxfuse::Silu"]


def test_constants_that_are_made_are_shared() -> None:
    loaded = load(chain(2))
    builder = Builder(loaded)
    zeros = builder.filled("zeros", 0.0, (8,), np.dtype(np.float32))
    assert builder.filled("zeros", 0.0, (8,), np.dtype(np.float32)) is zeros
    assert builder.filled("zeros", 0.0, (4,), np.dtype(np.float32)) is not zeros
    assert builder.filled("zeros", 0.0, (8,), np.dtype(np.float16)).dtype == np.float16
    row = gs.Constant("row", np.arange(8.0).reshape(1, 8))
    assert builder.reshaped(row, (8,)) is builder.reshaped(row, (8,))
    assert builder.reshaped(row, (8,)).values.tolist() == list(range(8))


def test_the_registry_is_complete_and_in_order() -> None:
    names = [fusion.name for fusion in REGISTRY]
    assert len(names) == len(set(names))
    for fusion in REGISTRY:
        assert fusion.kind in ("canonical", "folding", "fused")
        assert all(names.index(need) < names.index(fusion.name) for need in fusion.needs)


@pytest.mark.parametrize("opset", range(9, onnx.defs.onnx_opset_version() + 1))
def test_every_function_is_valid_at_every_opset(opset: int) -> None:
    for fusion in REGISTRY:
        for function in fusion.functions(opset):
            assert function.domain == "onnxfuse"
            assert [entry.version for entry in function.opset_import if entry.domain == ""] == [opset]
            context = onnx.checker.C.CheckerContext()
            context.ir_version = onnx.IR_VERSION
            context.opset_imports = {"": opset, "onnxfuse": 1}
            onnx.checker.check_function(function, context)


def test_a_fusion_that_says_nothing() -> None:
    with pytest.raises(TypeError, match="says no conditions"):
        Fusion.check(NegNeg(), None, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rewrites nothing"):
        Fusion.rewrite(NegNeg(), None, None)  # type: ignore[arg-type]


def transformer(layers: int) -> onnx.ModelProto:
    """Attention, LayerNorm and GELU in primitives; all layers read the same constants."""
    net = Net(13)
    two, epsilon, root, half, one = (net.const(number) for number in (2, 1e-5, 2**0.5, 0.5, 1))
    weight, row = net.const(np.eye(8)), net.const(np.ones(8))

    def norm(x: str) -> str:
        centered = net.op("Sub", x, net.mean(x))
        scaled = net.op("Div", centered, net.op("Sqrt", net.op("Add", net.mean(net.op("Pow", centered, two)), epsilon)))
        return net.op("Add", net.op("Mul", scaled, row), row)

    x = "x"
    for _ in range(layers):
        scores = net.op("Softmax", net.op("MatMul", x, net.op("Transpose", x, perm=[0, 2, 1])), axis=-1)
        x = norm(net.op("Add", x, net.op("MatMul", net.op("MatMul", scores, x), weight)))
        h = net.op("Add", net.op("MatMul", x, weight), row)
        gelu = net.op("Mul", net.op("Mul", h, net.op("Add", net.op("Erf", net.op("Div", h, root)), one)), half)
        x = norm(net.op("Add", x, net.op("MatMul", gelu, weight)))
    return net.model([value("x", [2, 3, 8])], [x])


def test_work_grows_with_the_nodes_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: questions that the matcher asks for each node."""
    asked = 0
    ask = Matcher._tensor

    def counting(self: Matcher, *arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return ask(self, *arguments)

    monkeypatch.setattr(Matcher, "_tensor", counting)
    per_node = []
    for layers in (4, 40):
        loaded = load(transformer(layers))
        count, asked = len(loaded.graph.nodes), 0
        sites = []
        for fusion in REGISTRY:
            matches, _ = find(fusion, loaded, Index.of(loaded))
            sites += [fusion.name] * len(matches)
            apply(fusion, matches, loaded)
        assert sites.count("skip_layernorm") == 2 * layers
        assert sites.count("bias_gelu") == layers
        per_node.append(asked / count)
    assert per_node[1] < 1.1 * per_node[0]
    assert per_node[1] < 60
