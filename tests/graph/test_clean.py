"""Cleaning changes no output, copies no weight, and leaves alone what it must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxfuse.graph import query
from onnxfuse.graph.clean import clean, sweep
from tests.graph.models import Array, load, normal, parse, run, saved, transformer

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '


def cleaned(model: ModelProto, folder: Path, *feeds: dict[str, Array], exact: bool = True) -> tuple[ModelProto, dict[str, int]]:
    """The cleaned model, after its outputs were compared, and that cleaning again changes nothing."""
    loaded = load(model, folder)
    counts = clean(loaded)
    after = saved(loaded, folder)
    for feed in feeds:
        got = run(after, feed)
        for name, want in run(model, feed).items():
            np.testing.assert_allclose(got[name], want, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-3)
            assert got[name].dtype == want.dtype
    again = load(after, folder, "again.onnx")
    assert clean(again) == {}
    assert saved(again, folder, "again-out.onnx").SerializeToString(deterministic=True) == after.SerializeToString(deterministic=True)
    return after, counts


def ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_constants_are_folded(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[2,3] x) => (float[2,3] y) {
        two = Constant <value_float: float = 2.0> ()
        i = Constant <value_ints: ints = [3]> ()
        f = Cast <to: int = 1> (i)
        e = Add(f, two)
        p = Pow(x, e)
        y = Mul(p, two)
    }"""
    )
    after, counts = cleaned(model, tmp_path, {"x": normal(2, 3)})
    assert ops(after) == ["Pow", "Mul"]
    assert counts == {"constant": 4}


def test_chains_over_static_dims_are_folded_and_dynamic_ones_are_not(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[N,4,6] x) => (float[N,?,?] y, int64[3] z) {
        s = Shape(x)
        one = Constant <value_int: int = 1> ()
        zero = Constant <value_ints: ints = [0]> ()
        two = Constant <value_ints: ints = [2]> ()
        three = Constant <value_ints: ints = [3]> ()
        c = Gather <axis: int = 0> (s, one)
        h = Div(c, c)
        cu = Unsqueeze(c, zero)
        last = Slice(s, two, three)
        both = Concat <axis: int = 0> (cu, last)
        n = Slice(s, zero, three)
        minus = Constant <value_ints: ints = [-1]> ()
        target = Concat <axis: int = 0> (minus, last, cu)
        y = Reshape(x, target)
        z = Mul(n, h)
    }"""
    )
    after, _ = cleaned(model, tmp_path, {"x": normal(2, 4, 6)}, {"x": normal(5, 4, 6)})
    assert ops(after) == ["Shape", "Slice", "Reshape", "Mul"]


def test_shape_with_start_and_end_and_size(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[N,4,6] x, float[2,3] u) => (float[N,6,4] y, float[2,3] w) {
        s = Shape <start: int = -1> (x)
        m = Shape <start: int = 1, end: int = 2> (x)
        zero = Constant <value_ints: ints = [0]> ()
        target = Concat <axis: int = 0> (zero, s, m)
        y = Reshape(x, target)
        k = Size(u)
        f = Cast <to: int = 1> (k)
        w = Mul(u, f)
    }"""
    )
    after, _ = cleaned(model, tmp_path, {"x": normal(2, 4, 6), "u": normal(2, 3)})
    assert ops(after) == ["Reshape", "Mul"]


def test_identities_go_but_outputs_keep_their_names(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[2,3] x) => (float[2,3] y, float[2,3] copy, float[2,3] same) {
        a = Identity(x)
        b, mask = Dropout(a)
        c = Cast <to: int = 1> (b)
        copy = Identity(c)
        d = Relu(c)
        y = Identity(d)
        same = Identity(d)
    }"""
    )
    after, counts = cleaned(model, tmp_path, {"x": normal(2, 3)})
    assert ops(after) == ["Identity", "Relu", "Identity", "Identity"]
    assert [value.name for value in after.graph.output] == ["y", "copy", "same"]
    assert counts == {"identity": 3}


def test_dropout_that_may_train_stays(tmp_path: Path) -> None:
    text = """g (float[2] x, bool train) => (float[2] y, float[2] z) {
        a, m = Dropout(x, r, train) y = Relu(a)
        b = Dropout(x, r, t) z = Relu(b)
    }"""
    model = parse(HEAD + text, r=np.float32(0.5), t=np.array(True))
    after, _ = cleaned(model, tmp_path)
    assert ops(after).count("Dropout") == 2


def test_a_weight_that_stays_is_not_copied(tmp_path: Path) -> None:
    weight = normal(256, 256)
    model = parse(
        HEAD
        + """g (int64[4] ids, float[2,256] x) => (float[4,256] e, float[2,256] y, float[2,256] z) {
        e = Gather(w, ids)
        t = Transpose <perm: ints = [1, 0]> (w)
        y = MatMul(x, t)
        v = Identity(w)
        z = MatMul(x, v)
    }""",
        w=weight,
    )
    after, counts = cleaned(model, tmp_path, {"ids": np.arange(4), "x": normal(2, 256)}, exact=False)
    assert ops(after) == ["Gather", "Transpose", "MatMul", "MatMul"]
    assert after.ByteSize() < weight.nbytes + 2000
    assert counts == {"identity": 1}


def test_a_weight_of_its_own_is_folded(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[2,256] x) => (float[2,256] y, float[2,128] z, float[2,128] u) {
        f = Cast <to: int = 1> (q)
        w = Mul(f, scale)
        y = MatMul(x, w)
        a, b = Split <axis: int = 1> (p)
        z = MatMul(x, a)
        u = MatMul(x, b)
    }""",
        q=np.random.default_rng(0).integers(-128, 127, (256, 256)).astype(np.int8),
        scale=normal(1, 256) ** 2,
        p=normal(256, 256),
    )
    after, _ = cleaned(model, tmp_path, {"x": normal(2, 256)}, exact=False)
    assert ops(after) == ["MatMul"] * 3
    assert {tensor.name for tensor in after.graph.initializer} == {"w", "a", "b"}


def test_nothing_large_is_made_of_something_small(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[1] x) => (float[1024,1024] y, float[4096,256] z, float[2000000] r) {
        e = Expand(c, shape)
        y = Mul(e, x)
        big = ConstantOfShape(wide)
        z = Add(big, x)
        n = Range(zero, limit, one)
        f = Cast <to: int = 1> (n)
        r = Mul(f, x)
    }""",
        c=np.ones(1, np.float32), shape=np.array([1024, 1024]), wide=np.array([4096, 256]),
        zero=np.array(0), limit=np.array(2_000_000), one=np.array(1),
    )  # fmt: skip
    after, _ = cleaned(model, tmp_path, {"x": np.ones(1, np.float32)})
    assert after.ByteSize() < 2000
    assert ops(after) == ops(model)


def test_what_must_not_be_folded(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[4,4] x) => (float[4,4] y, float[4] r, float[4,4] s) {
        q = QuantizeLinear(w, scale, zero)
        d = DequantizeLinear(q, scale, zero)
        y = MatMul(x, d)
        r = RandomUniform <shape: ints = [4]> ()
        l = SequenceConstruct(w, w)
        i = Constant <value_int: int = 1> ()
        a = SequenceAt(l, i)
        s = Add(a, x)
    }""",
        w=normal(4, 4), scale=np.float32(0.1), zero=np.uint8(128),
    )  # fmt: skip
    after, _ = cleaned(model, tmp_path)
    assert ops(after) == ["QuantizeLinear", "DequantizeLinear", "MatMul", "RandomUniform", "SequenceConstruct", "SequenceAt", "Add"]


def test_an_overridable_input_is_not_folded(tmp_path: Path) -> None:
    model = parse(HEAD + "g (float[2] x, float[2] k) => (float[2] y) { a = Exp(k) y = Mul(x, a) }", k=np.ones(2, np.float32))
    x = np.ones(2, np.float32)
    after, counts = cleaned(model, tmp_path, {"x": x}, {"x": x, "k": 2 * x})
    assert counts == {}
    assert ops(after) == ["Exp", "Mul"]


def test_bfloat16_stays_bit_for_bit(tmp_path: Path) -> None:
    import ml_dtypes

    value = np.array([1.0078125, -3.0], ml_dtypes.bfloat16)
    text = """g (float[2] x) => (float[2] y) {
        c = Cast <to: int = 16> (x) s = Add(c, k) e = Add(k, k) u = Add(s, e) y = Cast <to: int = 1> (u)
    }"""
    model = parse(HEAD + text, k=value)
    loaded = load(model, tmp_path)
    clean(loaded)
    k = next(t for node in loaded.graph.nodes for t in node.inputs if t.name == "k")
    kept = query.constant(k)
    assert kept is not None
    assert kept.tobytes() == value.tobytes()
    assert query.dtype(k) == ml_dtypes.bfloat16
    assert any(tensor.raw_data == value.tobytes() for tensor in saved(loaded, tmp_path).graph.initializer)


def test_dead_nodes_go_also_inside_of_bodies(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[2,3] x, bool c) => (float[2,3] y) {
        dead = Exp(x)
        deader = Tanh(dead)
        used = Sigmoid(x)
        y = If (c) <then_branch: graph = p () => (float[2,3] a) { no = Exp(used) a = Relu(used) },
                    else_branch: graph = q () => (float[2,3] b) { b = Abs(x) }>
    }"""
    )
    after, counts = cleaned(model, tmp_path, *({"x": normal(2, 3), "c": np.array(flag)} for flag in (True, False)))
    assert ops(after) == ["Sigmoid", "If"]
    assert counts == {"dead": 3}


def test_sweep_needs_no_tidy_reader_lists(tmp_path: Path) -> None:
    loaded = load(parse(HEAD + "g (float[2] x) => (float[2] y) { a = Exp(x) b = Exp(a) y = Relu(x) }"), tmp_path)
    list.clear(loaded.graph.nodes[0].outputs[0].outputs)  # as if someone had taken the reader off by hand
    assert sweep(loaded) == 2
    assert [node.op for node in query.readers(loaded.graph.inputs[0])] == ["Relu"]


# -------------------------------------------------------------------------------------------------------------- branches


@pytest.mark.parametrize("live", [True, False])
def test_an_if_with_a_constant_condition_is_its_live_branch(tmp_path: Path, live: bool) -> None:
    model = parse(
        HEAD
        + """g (float[2,3] x) => (float[2,3] y, float[?,?] z) {
        t = Exp(x)
        a = Relu(x)
        z, w = If (c) <
            then_branch: graph = p () => (float[2,3] r, float[2,3] s) { r = Tanh(t) s = Mul(r, k) },
            else_branch: graph = q () => (float[6] r, float[2,3] s) { r = Reshape(t, flat) s = Add(a, k) }>
        y = Mul(w, a)
    }""",
        c=np.array(live), k=normal(2, 3), flat=np.array([6]),
    )  # fmt: skip
    loaded = load(model, tmp_path)
    counts = clean(loaded)
    assert counts["branch"] == 1
    assert {tuple(query.shape(t) or ()) for t in loaded.graph.outputs if t.name == "z"} == {(2, 3) if live else (6,)}
    if live:
        after, _ = cleaned(model, tmp_path, {"x": normal(2, 3)})
        assert "If" not in ops(after)


def test_inlined_names_meet_no_others(tmp_path: Path) -> None:
    branch = "graph = {0} () => (float[2] r) {{ m = Exp(x) r = Mul(m, m) }}"
    model = parse(
        HEAD
        + "g (float[2] x, bool d) => (float[2] y, float[2] z, float[2] u) {"
        + f" y = If (c) <then_branch: {branch.format('p')}, else_branch: {branch.format('q')}>"
        + f" z = If (d) <then_branch: {branch.format('r')}, else_branch: {branch.format('s')}>"
        + f" u = If (c) <then_branch: {branch.format('t')}, else_branch: {branch.format('v')}> }}",
        c=np.array(True),
    )
    for i, node in enumerate(model.graph.node):
        for j, attribute in enumerate(node.attribute):
            for k, inner in enumerate(attribute.g.node):
                inner.name = f"same_{k}" if i < 2 else f"same_{k}_{j}"
    after, counts = cleaned(model, tmp_path, *({"x": normal(2), "d": np.array(flag)} for flag in (True, False)))
    assert counts["branch"] == 2
    names = [node.name for node in after.graph.node if node.name]
    assert len(set(names)) == len(names)


def test_a_branch_that_gives_what_it_gets(tmp_path: Path) -> None:
    names = ("a", "b", "again")
    then = helper.make_graph(
        [helper.make_node("Exp", ["x"], ["m"])], "p", [], [helper.make_tensor_value_info("m", TensorProto.FLOAT, [2])] * 2
        + [helper.make_tensor_value_info("k", TensorProto.FLOAT, [2])], [helper.make_tensor("k", TensorProto.FLOAT, [2], [1, 2])],
    )  # fmt: skip
    node = helper.make_node("If", ["c"], list(names), then_branch=then, else_branch=then)
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in names]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        outputs,
        [helper.make_tensor("c", TensorProto.BOOL, [], [True])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    loaded = load(model, tmp_path)
    clean(loaded)
    x = normal(2)
    got = run(saved(loaded, tmp_path), {"x": x})
    np.testing.assert_allclose(got["a"], np.exp(x), rtol=1e-6)
    np.testing.assert_array_equal(got["a"], got["b"])
    assert got["again"].tolist() == [1, 2]


def test_nested_constant_branches(tmp_path: Path) -> None:
    model = parse(
        HEAD
        + """g (float[2,1,3] x) => (float[?,?] y) {
        s = Shape(x)
        one = Constant <value_int: int = 1> ()
        d = Gather(s, one)
        c = Equal(d, one)
        y = If (c) <
            then_branch: graph = p () => (float[2,3] r) {
                r = If (c) <then_branch: graph = i () => (float[2,3] v) { ax = Constant <value_ints: ints = [1]> () v = Squeeze(x, ax) },
                            else_branch: graph = j () => (float[2,1,3] v) { v = Identity(x) }> },
            else_branch: graph = q () => (float[2,1,3] r) { r = Identity(x) }>
    }"""
    )
    after, counts = cleaned(model, tmp_path, {"x": normal(2, 1, 3)})
    assert counts["branch"] == 2
    assert ops(after) == ["Squeeze"]


# ------------------------------------------------------------------------------------------------------------------ size


def test_thousands_of_nodes_agree(tmp_path: Path) -> None:
    model = transformer(40)
    after, _ = cleaned(model, tmp_path, {"x": normal(2, 5, 32)})
    assert len(after.graph.node) == len(model.graph.node)


def test_a_model_of_constant_nodes(tmp_path: Path) -> None:
    model = transformer(3)
    for tensor in list(model.graph.initializer):
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]
    after, _ = cleaned(model, tmp_path, {"x": normal(2, 5, 32)})
    assert "Constant" not in ops(after)
    onnx.checker.check_model(after)
