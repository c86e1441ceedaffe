"""The text form: what is written is read back, and whatever else a model file may hold is refused before source is made of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.elementwise import source
from onnxfuse.elementwise.expression import Expression, Input, bytes_each, checked, constant, groups, parse, step
from onnxfuse.elementwise.operators import REDUCTIONS
from onnxfuse.errors import BadInput
from tests.elementwise import cases
from tests.elementwise.strategies import expressions

GOOD = cases.hard_swish_affine("float16")


@given(expressions())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_text_and_back(of: Expression) -> None:
    again = parse(of.text)
    assert again == of
    assert again.text == of.text
    assert again.digest == of.digest


@given(expressions("end"))
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_source_holds_known_words_and_numbers_alone(of: Expression) -> None:
    """Every word of the generated source is one of a fixed list, or made of a digest or a number."""
    text = source.source(of)
    words = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"-?0x[0-9a-f.]+(p[+-]\d+)?(f|ull|u)?|\b\d[\d.]*[fu]?\b", " ", text)))
    plain = {word for word in words if not re.fullmatch(r"[vxycq]\d+|(Expression|elementwise)_[0-9a-f]{12}(_whole|_ragged|_single)?", word)}
    assert plain <= KNOWN, plain - KNOWN
    assert text.isascii()
    assert '"' not in text.replace('#include "Elementwise/kernel.cuh"', "").replace('extern "C"', "")


KNOWN = {
    *"""include Elementwise kernel cuh struct static constexpr unsigned kUnroll using Args onnxfuse ElementwiseArgs template int V bool
    kWhole In Lanes __half __nv_bfloat16 float int32_t int64_t Out __device__ __forceinline__ void load const args element in fetch if else
    pragma unroll for lane v quotient groups size static_cast evaluate out wide narrow store put row extern C __global__ __launch_bounds__
    rows elementwise true false kElementwiseThreads result value parameters scale bias finish after kMidway kEpsilon CastTo of NAN INFINITY
    at_least at_most quick""".split(),  # noqa: SIM905
    *(operator.function for operator in source.OPERATORS.values()),
    *REDUCTIONS,
}


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(GOOD.text), **fields})


def midway(*steps: list[Any], outputs: list[int]) -> str:
    """An exponential, and these steps."""
    whole = {"version": 1, "rank": 2, "inputs": [["float16", "11"]], "steps": [["Exp", [0]], *steps], "outputs": outputs}
    return json.dumps(whole)


def test_steps_may_follow_a_reduction() -> None:
    of = parse(midway(["ReduceSum", [1], {"keepdims": "0x1p0"}], ["Sub", [1, 2]], outputs=[3, 1]))
    assert of.is_reduced_midway
    assert of.axes_of(2) == {0}
    assert of.axes_of(3) == {0, 1}
    assert parse(of.text) == of
    assert bytes_each(of) == 6
    softmax = parse(midway(["Softmax", [1]], ["Exp", [2]], outputs=[3, 2]))  # of the full shape, and so an output like any other
    assert softmax.row_output is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        "1e999",
        "\x00",
        "[" * 5000,
        '"' * 3,
        changed(version=2),
        changed(version="1"),
        changed(rank=9),
        changed(rank=-1),
        changed(rank=True),
        changed(rank="4"),
        changed(inputs=[]),
        changed(inputs=[["float16", "1111"]] * 25),
        changed(inputs=[["float64", "1111"]]),
        changed(inputs=[["float16", "1121"]]),
        changed(inputs=[["float16", "11111"]]),
        changed(inputs=[["float16"]]),
        changed(steps=[]),
        changed(steps=[["Exp", [0]]] * 300),
        changed(steps=[["system", [0]]]),
        changed(steps=[["Exp", [7]]]),
        changed(steps=[["Exp", [-1]]]),
        changed(steps=[["Exp", [0.0]]]),
        changed(steps=[["Exp", [0], {"alpha": "0x1p0"}]]),
        changed(steps=[["Elu", [0], {"alpha": "1); }"}]]),
        changed(steps=[["Elu", [0]]]),
        changed(steps=[["Cast", [0], {"to": "char*"}]]),
        changed(steps=[["Add", [0, 0, 0]]]),
        changed(steps=[["Constant", [], {"type": "int32", "value": "0x1.8p+0"}]]),
        changed(steps=[["Not", [0]]]),
        changed(steps=[["Where", [0, 0, 0]]]),
        changed(steps=[["ReduceSum", [0], {"keepdims": "0x1p0"}], ["Exp", [0]]]),
        midway(["ReduceSum", [1], {"keepdims": "0x0p0"}], ["Sub", [1, 2]], outputs=[3]),
        midway(["ReduceSum", [1], {"keepdims": "0x1p0"}], ["Sub", [1, 2]], outputs=[3, 2]),
        midway(["ReduceSum", [1], {"keepdims": "0x1p0"}], ["Sub", [1, 1]], outputs=[3]),
        midway(["ReduceSum", [1], {"keepdims": "0x1p0"}], ["Exp", [2]], outputs=[3]),
        midway(["Softmax", [1]], ["Softmax", [2]], outputs=[3]),
        midway(["ReduceSum", [1], {"keepdims": "0x1p0"}], ["Softmax", [2]], outputs=[3]),
        changed(outputs=[]),
        changed(outputs=[0]),
        changed(outputs=[5, 5]),
        changed(outputs=[99]),
        changed(outputs=[7]),
        changed(more=1),
        GOOD.text + " " * 70000,
    ],
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as fault:
        parse(text)
    assert str(fault.value).startswith("expression: ")
    assert str(fault.value).endswith("; optimize the model again")
    assert "\n" not in str(fault.value)
    assert len(str(fault.value)) < 200


@given(st.data())
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_a_damaged_text_is_refused_or_valid(data: st.DataObject) -> None:
    """Never another exception, and what is let through is an expression that source can be made of."""
    text = GOOD.text
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at] + data.draw(st.text('[]{},":0123456789eE+-xpfalstrun\\;()', max_size=4)) + text[at + data.draw(st.integers(0, 4)) :]
        )
    try:
        of = parse(text)
    except BadInput:
        return
    assert checked(of) is of
    source.source(of)
    source.layout(of)


def test_neighbouring_axes_that_all_inputs_share_are_one() -> None:
    def of(*axes: str, end: str = "") -> tuple[int, ...]:
        rank = max(map(len, axes))
        steps = [step("Add", 0, min(1, len(axes) - 1))]
        if end:
            steps.append(step(end, len(axes)))
        return groups(checked(Expression(rank, tuple(Input("float32", one) for one in axes), tuple(steps), (len(axes) + len(steps) - 1,))))

    assert of("1111") == (4,)
    assert of("1111", "0100") == (1, 1, 2)
    assert of("1111", "1") == (3, 1)
    assert of("1111", "") == (4,)
    assert of("1111", "1100") == (2, 2)
    assert of("1111", end="ReduceSum") == (3, 1)


def test_bytes_are_those_of_full_tensors() -> None:
    assert bytes_each(cases.film_silu("float16")) == 4  # x and the result; scale and shift are small
    assert bytes_each(cases.rotary("float16")) == 8
    assert bytes_each(cases.masked_softmax("float32")) == 8
    mean = cases.values()["ReduceMean float16"]
    assert bytes_each(mean) == 4  # the mean is one number a row


def test_retyped_constants_stay_within_the_range() -> None:
    of = checked(Expression(1, (Input("float32", "1"),), (constant("float32", -1e9), step("Max", 0, 1)), (2,)))
    half = of.retyped("float16")
    assert half.types == ("float16",) * 3
    assert half.steps[0].get("value") == -65504.0
    assert of.retyped("bfloat16").steps[0].get("value") == pytest.approx(-1e9, rel=1e-2)
    infinite = checked(Expression(1, (Input("float32", "1"),), (constant("float32", float("inf")), step("Min", 0, 1)), (2,)))
    assert infinite.retyped("float16").steps[0].get("value") == float("inf")


def test_arithmetic_between_whole_numbers_keeps_its_digits() -> None:
    """Buckets of distances, as T5 has them: through a logarithm from integers to integers."""
    steps = (
        step("Cast", 0, to="float32"),
        step("Log", 1),
        constant("float32", 2.7725887),
        step("Div", 2, 3),
        step("Cast", 4, to="int64"),
    )
    given = checked(Expression(2, (Input("int64", "11"),), steps, (5,)))
    assert given.retyped("float16") is given
    with_output = checked(Expression(2, given.inputs, steps, (4, 5)))
    assert with_output.retyped("float16").types[4] == "float16"
