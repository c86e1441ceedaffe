"""Judging kernels and cutting what is too big: with a compiler that is played, and with the real one."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxfuse import plugins
from onnxfuse.elementwise import body, compiling, source
from onnxfuse.elementwise.expression import MOST_INPUTS, Expression, Input, ancestors, checked, step
from onnxfuse.engine import prepare
from onnxfuse.errors import BadInput
from onnxfuse.fusions.pattern import DOMAIN
from onnxfuse.plugins import Generated, KernelUse
from tests.elementwise import cases, reference
from tests.elementwise.emulated import Kernels, values
from tests.elementwise.gpu_kit import model_of


def played(registers: Callable[[Expression], int], spilled: Callable[[Expression], int] = lambda _: 0) -> compiling.Compile:
    """A compiler whose kernels take the registers that a rule says."""

    def compile(given: Expression) -> Generated:
        uses = [KernelUse(name, 90, registers(given), spilled(given), 0, 0, 0, 1000, 128) for name in source.kernel_names(given)]
        return Generated(b"code of " + given.digest.encode(), tuple(uses))

    return compile


def spilling(given: Expression) -> int:
    """Bytes for what is alive beyond 20 values."""
    return 100 * max(0, source.pressure(given) - 20)


def by_pressure(given: Expression) -> int:
    """As many registers as values are alive, and some for addresses."""
    return 20 + source.pressure(given)


def run_parts(plan: compiling.Plan, inputs: list[np.ndarray], kernels: Kernels) -> list[np.ndarray]:
    """What the parts compute, one after another."""
    known = dict(enumerate(inputs))
    for part in plan.parts:
        made = kernels.run(part.expression, [known[value] for value in part.reads])
        known.update(zip(part.makes, made, strict=True))
    return [known[value] for value in plan.expression.outputs]


def test_what_fits_is_not_cut() -> None:
    plan = compiling.fit(cases.hard_swish_affine("float16"), played(by_pressure))
    assert len(plan.parts) == 1
    assert plan.cuts == plan.faults == ()
    assert plan.parts[0].makes == plan.expression.outputs


def test_sixty_four_live_values_are_cut_where_one_is_stored() -> None:
    """At the sum: the values are computed again behind it, and each is used at once."""
    whole = cases.over_fused("float16")
    assert source.pressure(whole) >= 64
    plan = compiling.fit(whole, played(by_pressure))
    assert len(plan.parts) == 2
    (cut,) = plan.cuts
    assert cut.operator == "Add"
    assert cut.reason == f"{by_pressure(whole)} registers a thread leave 31% of the warps (sm_90)"
    assert all(source.pressure(part.expression) < 8 for part in plan.parts)
    assert plan.to_dict()["cuts"] == [f"{cut.reason}: cut behind Add"]
    first, second = plan.parts
    assert second.reads == (0, *first.makes)


@pytest.mark.nvcc
def test_the_parts_compute_what_the_whole_does(nvcc: plugins.Nvcc, tmp_path: Path) -> None:
    whole = cases.over_fused("float32", live=24)
    plan = compiling.fit(whole, played(by_pressure, spilling))
    assert len(plan.parts) > 1
    kernels = Kernels([whole, *(part.expression for part in plan.parts)], nvcc, tmp_path)
    x = np.abs(values("float32", (5, 33), np.random.default_rng(0)))
    (got,) = run_parts(plan, [x], kernels)
    reference.compare(whole, [x], (5, 33), [got], "the parts")
    np.testing.assert_array_equal(got, kernels.run(whole, [x])[0])  # in float32 nothing is rounded at a cut that was not before


@pytest.mark.nvcc
def test_a_cut_rounds_what_it_stores_and_the_reference_knows_it(nvcc: plugins.Nvcc, tmp_path: Path) -> None:
    """A sum in float16 between two parts: the outputs are within one rounding of the reference that rounds there, and some are not of the
    one that does not, of which those of the whole are. What is off by a thousandth is found."""
    whole = cases.waiting("float16")
    plan = compiling.fit(whole, compiling.compiler(90))
    assert [cut.operator for cut in plan.cuts] == ["Sum"]
    kernels = Kernels([whole, *(part.expression for part in plan.parts)], nvcc, tmp_path)
    x = values("float16", (37, 72), np.random.default_rng(0), special=True)
    (cut,), uncut = run_parts(plan, [x], kernels), kernels.run(whole, [x])[0]
    (rounded,) = reference.limits_of(whole, [x], x.shape, rounds=reference.stored(plan))
    (plain,) = reference.limits_of(whole, [x], x.shape)
    assert reference.differs(cut, rounded) is None
    assert reference.differs(uncut, plain) is None
    assert reference.differs(cut, plain) is not None
    assert reference.differs((cut.astype(np.float64) * 1.001).astype(np.float16), rounded) is not None


def test_outputs_on_the_way_stay_outputs() -> None:
    steps = [step("Exp", 0), step("Mul", 1, 0), step("Tanh", 2), step("Add", 3, 2), step("Neg", 4)]
    given = checked(Expression(1, (Input("float32", "1"),), tuple(steps), (2, 4, 5)))
    plan = compiling.fit(given, played(lambda one: 100 if len(one.steps) > 3 else 20))
    assert len(plan.parts) == 2
    made = [value for part in plan.parts for value in part.makes]
    assert {2, 4, 5} <= set(made)
    assert len(made) == len(set(made))
    for part in plan.parts:
        assert set(part.reads) <= {0, *made}


def test_spills_are_worse_than_few_warps_and_are_said_first() -> None:
    uses = [
        KernelUse("elementwise_1_whole", 80, 255, 8, 12, 16, 0, 1, 128),
        KernelUse("elementwise_1_single", 80, 255, 99, 0, 0, 0, 1, 128),
    ]
    spills, few = compiling.faults(uses)
    assert spills == "255 registers are not enough, 20 bytes are spilled (sm_80)"
    assert few == "255 registers a thread leave 12% of the warps (sm_80)"


def test_where_no_cut_helps_it_is_said() -> None:
    plan = compiling.fit(cases.gated("float16"), played(lambda _: 255))
    assert len(plan.parts) == 1
    assert plan.faults == ("255 registers a thread leave 12% of the warps (sm_90)",)


def test_the_compiler_is_asked_no_more_than_needed() -> None:
    asked = []

    def compile(given: Expression) -> Generated:
        asked.append(given)
        return played(lambda _: 255)(given)

    compiling.fit(cases.over_fused("float16", live=16), compile)
    assert len(asked) <= 1 + 2 * compiling.MOST_TRIES


def test_no_cut_that_costs_more_than_it_saves() -> None:
    """Few warps fit, but each has enough bytes under way: a cut would only move more."""
    whole = cases.crowded("float16")
    plan = compiling.fit(whole, played(lambda one: 109 if one == whole else 40))
    assert plan.cuts == ()
    assert plan.faults == ("109 registers a thread leave 25% of the warps (sm_90)",)
    assert compiling.fit(whole, played(lambda one: 109 if one == whole else 40), compiling.Rule(worth=2.0)).cuts


def test_the_model_of_time() -> None:
    """By hand: an addition of float16 in 19.2 bytes a clock; with few warps; with spills; and with much code."""
    one = checked(Expression(1, (Input("float16", "1"),), (step("Add", 0, 0),), (1,)))
    use = lambda registers, spilled=0, stack=0, code=160: [  # noqa: E731
        KernelUse("elementwise_1_whole", 90, registers, spilled, 0, stack, 0, code, 128)
    ]
    bandwidth = 4900 * 0.88 / 132 / 1.7  # of GH200
    assert (source.vector(one), source.unroll(one)) == (8, 2)
    assert compiling.clocks(one, use(32)) == pytest.approx(4 / bandwidth)
    under_way = 8 * 32 * 2 * 16  # 8 warps, 2 vectors of 16 bytes a thread
    assert compiling.clocks(one, use(255)) == pytest.approx(4 / bandwidth / (under_way / (2000 * bandwidth)))
    assert compiling.clocks(one, use(32, spilled=180, stack=40)) == pytest.approx(4 / bandwidth + 10 / 64)
    assert compiling.clocks(one, use(32, spilled=180, stack=400)) == pytest.approx(4 / bandwidth + 10 / 24)
    assert compiling.clocks(one, use(32, code=16 * 18 * 128 * 3)) == pytest.approx(3)


@pytest.mark.nvcc
def test_planted_chains_with_the_real_compiler() -> None:
    """What was slower in parts on an H200 stays whole; what spills thousands of bytes, or leaves 8 warps, is cut into parts that do not."""
    by_name = dict(cases.too_big())
    for name in ("64 live values, 24 inputs", "64 live values, softsigns"):
        assert not compiling.fit(by_name[name], compiling.compiler(90)).cuts, name
    for name in ("180 live values, one root", "180 live values, int64"):
        plan = compiling.fit(by_name[name], compiling.compiler(90))
        assert len(plan.parts) == 2, name
        assert plan.faults == (), name


def test_order_keeps_few_alive_and_computes_before_use() -> None:
    for given in cases.values().values():
        order = source.order(given)
        assert sorted(order) == list(range(len(given.inputs), len(given.types)))
        place = {value: at for at, value in enumerate(order)}
        for value in order:
            made = given.step(value)
            assert made is not None
            assert all(read < len(given.inputs) or place[read] < place[value] for read in made.read)
        assert source.pressure(given) <= len(ancestors(given, given.outputs))


# --- into the model that TensorRT's parser is given ---------------------------------------------------------------------------


def prepared(
    model: onnx.ModelProto, folder: Path, plans: dict[str, compiling.Plan] | None, ops: frozenset[str] | None = None
) -> onnx.ModelProto:
    path = folder / "model.onnx"
    onnx.save(model, path)
    ops = prepare.plugin_ops_in(path, frozenset({"Elementwise"})) if ops is None else ops
    assert plans is None or set(prepare.expressions_in(path, ops)) == set(plans)
    return onnx.load_from_string(prepare.for_parser(path, ops, plans))


def test_a_node_gets_its_code_and_layout(tmp_path: Path) -> None:
    given = cases.film_silu("float16")
    plan = compiling.fit(given, played(by_pressure))
    model = prepared(model_of([given], [(1, 8, 4, 4)]), tmp_path, {given.text: plan})
    assert not model.functions
    (node,) = model.graph.node
    assert (node.op_type, node.domain, node.name) == ("Elementwise", DOMAIN, "node_0")
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    assert attributes["layout"].decode() == source.layout(given)
    assert base64.b64decode(attributes["code"]) == plan.parts[0].generated.image
    assert attributes["plugin_namespace"] == b"onnxfuse"
    assert set(attributes) == {"layout", "code", "plugin_namespace", "plugin_version"}


def test_a_cut_node_becomes_several(tmp_path: Path) -> None:
    given = cases.over_fused("float32")
    plan = compiling.fit(given, played(by_pressure))
    model = prepared(model_of([given], [(4, 8)]), tmp_path, {given.text: plan})
    first, second = model.graph.node
    assert [first.name, second.name] == ["node_0/part_0", "node_0/part_1"]
    assert first.output[0] in second.input
    assert list(second.output) == ["e0_o0"]


def test_without_code_the_functions_stand_for_the_nodes(tmp_path: Path) -> None:
    given = cases.gated("float32")
    for plans, ops in ((None, None), ({}, frozenset())):
        model = prepared(model_of([given], [(1, 2, 3)]), tmp_path, plans, ops)
        assert {node.op_type for node in model.graph.node} == {"Gelu", "Mul"}


def test_a_node_that_does_not_fit_its_expression_is_refused(tmp_path: Path) -> None:
    given = cases.gated("float32")
    model = model_of([given], [(1, 2, 3)])
    del model.graph.node[0].input[1]
    with pytest.raises(BadInput, match="node node_0 has not the inputs and outputs of its expression; optimize the model again"):
        prepared(model, tmp_path, {given.text: compiling.fit(given, played(by_pressure))})


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version":1}', "\x00", '{"version":2,"rank":1,"inputs":[],"steps":[],"outputs":[]}'])
def test_an_attribute_that_is_no_expression_is_one_line(text: str) -> None:
    with pytest.raises(BadInput) as fault:
        compiling.fit_all([text], 90)
    assert str(fault.value).startswith("an element-wise node's attribute 'expression': ")
    assert str(fault.value).endswith("; optimize the model again")
    assert "\n" not in str(fault.value)


def test_a_text_that_is_no_expression_is_refused_with_file_and_node(tmp_path: Path) -> None:
    model = model_of([cases.gated("float32")], [(1, 2, 3)])
    model.graph.node[0].attribute[0].s = b"[1]"
    onnx.save(model, tmp_path / "model.onnx")
    assert prepare.expressions_in(tmp_path / "model.onnx", frozenset({"BiasGelu"})) == ()
    with pytest.raises(BadInput) as fault:
        prepare.expressions_in(tmp_path / "model.onnx", frozenset({prepare.GENERATED}))
    said = str(fault.value)
    assert said.startswith(f"{tmp_path / 'model.onnx'}: node node_0: attribute 'expression': ")
    assert said.endswith("; optimize the model again")


def test_an_expression_within_a_function_of_another_operator_is_refused(tmp_path: Path) -> None:
    model = model_of([cases.gated("float32")], [(1, 2, 3)])
    (inner,) = model.graph.node
    names = [f"{DOMAIN}", "Outer", list(inner.input), list(inner.output), [inner]]
    model.functions.append(helper.make_function(*names, [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]))
    outer = helper.make_node("Outer", list(inner.input), list(inner.output), "outer", domain=DOMAIN)
    del model.graph.node[:]
    model.graph.node.append(outer)
    with pytest.raises(BadInput, match="has no kernels of its own; optimize the model again"):
        prepared(model, tmp_path, {}, frozenset({prepare.GENERATED}))


def test_every_node_of_the_plugin_gets_its_expression_whatever_name_it_is_asked_by(tmp_path: Path) -> None:
    pair = [cases.gated("float32"), cases.film_silu("float32")]
    onnx.save(model_of(pair, [(1, 2, 3), (2, 4, 3, 8)]), tmp_path / "model.onnx")
    for ops in ({prepare.GENERATED}, {body.op_type(pair[0])}):
        assert prepare.expressions_in(tmp_path / "model.onnx", frozenset(ops)) == tuple(one.text for one in pair)


def test_the_operator_is_named_by_its_expression() -> None:
    given = cases.gated("float32")
    assert body.op_type(given) == f"Elementwise_{given.digest}"
    assert prepare.creator(body.op_type(given)) == "Elementwise"


@pytest.mark.nvcc
def test_what_takes_all_inputs_that_a_kernel_has_is_cut_into_parts_that_have_no_more(nvcc: plugins.Nvcc, tmp_path: Path) -> None:
    """The second part reads what the first stores, besides inputs of its own."""
    whole = cases.crowded("float32")
    assert len(whole.inputs) == MOST_INPUTS
    plan = compiling.fit(whole, played(by_pressure), compiling.Rule(worth=2.0))
    assert plan.cuts
    assert all(len(part.reads) <= MOST_INPUTS for part in plan.parts)
    kernels = Kernels([whole, *(part.expression for part in plan.parts)], nvcc, tmp_path)
    rng = np.random.default_rng(0)
    inputs = [values("float32", (3, 21), rng) for _ in whole.inputs]
    for got, same in zip(run_parts(plan, inputs, kernels), kernels.run(whole, inputs), strict=True):
        np.testing.assert_array_equal(got, same)
