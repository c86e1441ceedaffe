"""Generated kernels on the emulator: every operator against onnxruntime, and thousands of expressions against float64."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplemented_

from onnxfuse import plugins
from onnxfuse.elementwise import body
from onnxfuse.elementwise.expression import NUMPY, Expression, Input, checked, constant, step
from onnxfuse.elementwise.operators import FLOATS, INTEGERS, OPERATORS, QUANTIZED
from onnxfuse.fusions.pattern import DOMAIN
from tests.elementwise import cases, reference
from tests.elementwise.emulated import SPECIAL, Kernels, full_shape, input_shape, output_shapes, values
from tests.elementwise.strategies import Batch, batches
from tests.fusions.helpers import run

pytestmark = pytest.mark.nvcc

BATCH = 60  # expressions that are compiled together
BATCHES = int(os.environ.get("ONNXFUSE_TEST_BATCHES", "2"))  # of each kind; 20 is a thorough run
_ELEMENT = {name: helper.np_dtype_to_tensor_dtype(kind) for name, kind in NUMPY.items()}


@pytest.fixture(scope="module")
def compiled(nvcc: plugins.Nvcc, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Kernels]:
    return lambda wanted: Kernels(wanted, nvcc, tmp_path_factory.mktemp("kernels"))


def by_onnxruntime(of: Expression, inputs: list[np.ndarray[Any, Any]], opset: int = 20) -> list[np.ndarray[Any, Any]]:
    """Through the function body, in a model of one node."""
    names = [f"i{number}" for number in range(len(inputs))]
    outs = [f"o{number}" for number in range(len(of.outputs))]
    node = helper.make_node(body.op_type(of), names, outs, domain=DOMAIN, expression=of.text)
    given_ = [helper.make_tensor_value_info(n, _ELEMENT[one.dtype], a.shape) for n, one, a in zip(names, of.inputs, inputs, strict=True)]
    shapes = output_shapes(of, full_shape(of, [array.shape for array in inputs]))
    made = [helper.make_tensor_value_info(n, _ELEMENT[of.types[v]], shape) for n, v, shape in zip(outs, of.outputs, shapes, strict=True)]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "g", given_, made), opset_imports=imports, ir_version=10)
    model.functions.append(body.function(of, opset, DOMAIN))
    onnx.checker.check_model(model, full_check=True)
    return run(model, dict(zip(names, inputs, strict=True)))


# --- every operator alone -------------------------------------------------------------------------------------------------


def _alone() -> list[tuple[str, Expression]]:
    found = []
    for name, operator in OPERATORS.items():
        for kind in ("float32", "int32", "int64", "bool"):
            if kind not in operator.takes or name in ("Cast", "Clip", "QuantizeLinear"):
                continue
            count = max(operator.least, 2 if operator.folded else 1)
            kinds = ["bool", kind, kind] if operator.first_bool else [kind] * count
            inputs = tuple(Input(one, "11") for one in kinds)
            variants: list[dict[str, float]] = [{}]
            if name == "Mod":
                variants = [{"fmod": 1.0}] if kind == "float32" else [{"fmod": 0.0}, {"fmod": 1.0}]
            if name == "IsInf":
                variants = [{}, {"detect_negative": 0.0}, {"detect_positive": 0.0}]
            if name == "Celu":
                variants = [{}, {"alpha": 1.5}]
            for attributes in variants:
                made = step(name, *range(len(inputs)), **attributes)
                found.append((f"{name}-{kind}-{attributes}", checked(Expression(2, inputs, (made,), (len(inputs),)))))
    for kind in ("float32", "int32", "int64"):
        inputs = (Input(kind, "11"),)
        bounds = (constant(kind, 0), constant(kind, 6))
        for number, operands in enumerate([(0, 1, 2), (0, 1), (0, -1, 2), (0,)]):
            found.append((f"Clip-{kind}-{number}", checked(Expression(2, inputs, (*bounds, step("Clip", *operands)), (3,)))))
    for start, end in itertools.product(("float32", "int32", "int64", "bool"), ("float32", "float16", "int32", "int64", "bool")):
        if start != "float32" or end not in INTEGERS:  # what a NaN or an infinity becomes there, nobody says
            found.append((f"Cast-{start}-{end}", checked(Expression(2, (Input(start, "11"),), (step("Cast", 0, to=end),), (1,)))))
    return found


ALONE = _alone()
# onnxruntime has no kernel for these types on the CPU: the reference of these tests judges them.
NOT_IN_RUNTIME = frozenset({"Relu-int64-{}", "Where-bool-{}"})


# Arithmetic of IEEE 754, and what only chooses among values.
EXACT = frozenset(
    """Abs Add Cast Ceil Clip Div Floor Identity LeakyRelu Max Min Mul Neg PRelu Reciprocal Relu Round Sign Sqrt Sub Sum ThresholdedRelu
    Where""".split()  # noqa: SIM905
)


@pytest.fixture(scope="module")
def alone(compiled: Callable[..., Kernels]) -> Kernels:
    return compiled([one for _, one in ALONE])


@pytest.mark.parametrize(("name", "of"), ALONE, ids=[name for name, _ in ALONE])
def test_an_operator_is_as_in_onnxruntime(name: str, of: Expression, alone: Kernels) -> None:
    """Special values in every place, every alignment of a vector's end."""
    rng = np.random.default_rng(7)
    for columns in (1, 7, 64):
        shape = (5, columns)
        inputs = [values(one.dtype, shape, rng, special=True) for one in of.inputs]
        operator = of.steps[-1].op
        if operator in ("Div", "Mod") and of.inputs[0].dtype in INTEGERS:
            inputs[1] = np.where(inputs[1] == 0, 3, inputs[1]).astype(inputs[1].dtype)  # zero ends the process of onnxruntime
            inputs[1] = np.where(inputs[1] == -1, 2, inputs[1]).astype(inputs[1].dtype)  # as does the smallest number over -1
        (got,) = alone.run(of, inputs)
        try:
            (want,) = by_onnxruntime(of, inputs)
        except NotImplemented_:
            assert name in NOT_IN_RUNTIME
            reference.compare(of, inputs, shape, [got], shape)
        else:
            _as_onnxruntime(name, got, want, inputs)


def _as_onnxruntime(name: str, got: Any, want: Any, inputs: list[Any]) -> None:
    assert got.dtype == want.dtype, name
    if got.dtype.kind != "f":
        np.testing.assert_array_equal(got, want, err_msg=f"{name} of {inputs}")
        return
    exact = name.split("-")[0] in EXACT
    if exact:
        assert ((got == want) | (np.isnan(got) & np.isnan(want))).all(), f"{name} of {inputs}: {got} and not {want}"
    else:
        # onnxruntime's own approximations are within 1e-6 or so of their largest value, and flush what is tiny.
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=2e-6, err_msg=f"{name} of {inputs}")


def test_whole_numbers_wrap_and_division_by_zero_gives_zero(compiled: Callable[..., Kernels]) -> None:
    for kind in ("int32", "int64"):
        info = np.iinfo(kind)
        ends = np.array([info.max, info.min, info.min, 5, -7, 0], kind)
        others = np.array([1, -1, 1, 0, 0, 0], kind)
        pair = (Input(kind, "1"), Input(kind, "1"))
        wanted = {op: checked(Expression(1, pair, (step(op, 0, 1),), (2,))) for op in ("Add", "Sub", "Mul", "Div", "Mod")}
        kernels = compiled(list(wanted.values()))
        got = {op: kernels.run(of, [ends, others])[0] for op, of in wanted.items()}
        with np.errstate(over="ignore"):
            for op, by in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply)):
                np.testing.assert_array_equal(got[op], by(ends, others))
        np.testing.assert_array_equal(got["Div"], np.array([info.max, info.min, info.min, 0, 0, 0], kind))
        np.testing.assert_array_equal(got["Mod"], np.zeros(6, kind))


# --- expressions of any form ------------------------------------------------------------------------------------------------

_SETTINGS = settings(
    max_examples=BATCHES, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
)
_LENGTHS = ((1, 2, 3, 4, 5, 8, 16), (1, 3, 7, 8))


def _check_batch(batch: Batch, compiled: Callable[..., Kernels]) -> None:
    kernels = compiled(batch)
    wrong = []
    for number, of in enumerate(batch):
        wrong += _faults(kernels, number, of)
    assert not wrong, f"{len(wrong)} of {len(batch)} expressions: " + "\n".join(wrong[:5])


def _faults(kernels: Kernels, number: int, of: Expression) -> list[str]:
    found = []
    rng = np.random.default_rng(number)
    for run_, lengths in enumerate(_LENGTHS):
        full = tuple(int(size) for size in rng.choice(lengths, of.rank))
        inputs = [values(one.dtype, input_shape(one.axes, full), rng, special=run_ == 1) for one in of.inputs]
        got = kernels.run(of, inputs, offset=8 if run_ == 1 and number % 3 == 0 else 0, sms=1 if number % 2 else 64)
        limits = reference.limits_of(of, inputs, full, number)
        faults = [reference.differs(array, one) for array, one in zip(got, limits, strict=True)]
        found += [f"output {at} of {full}: {fault}: {of.text}" for at, fault in enumerate(faults) if fault]
    return found


@given(batches(BATCH))
@_SETTINGS
def test_expressions_of_any_form(compiled: Callable[..., Kernels], batch: Batch) -> None:
    _check_batch(batch, compiled)


@given(batches(BATCH, reduction="end"))
@_SETTINGS
def test_expressions_that_end_in_a_reduction(compiled: Callable[..., Kernels], batch: Batch) -> None:
    _check_batch(batch, compiled)


@given(batches(BATCH, reduction="middle"))
@_SETTINGS
def test_expressions_with_a_reduction_in_the_middle(compiled: Callable[..., Kernels], batch: Batch) -> None:
    assert all(of.is_reduced_midway for of in batch)
    _check_batch(batch, compiled)


def test_wide_and_many_rows(compiled: Callable[..., Kernels]) -> None:
    """Rows beyond what shared memory keeps, rows of one warp and of a block, more rows than blocks hold teams."""
    wanted = []
    for op, others in (("Softmax", ()), ("LayerNormalization", (1, 1)), ("ReduceMean", ()), ("ReduceMax", ())):
        inputs = (Input("float16", "11"), Input("float16", "1"))
        wanted.append(checked(Expression(2, inputs, (step("Mul", 0, 1), step(op, 2, *others)), (2, 3))))
    kernels = compiled(wanted)
    for of, (rows, width) in itertools.product(wanted, [(1, 5000), (3, 4096), (40, 24), (41, 7), (100, 1), (2, 1030), (0, 8)]):
        rng = np.random.default_rng(width)
        inputs = [values(one.dtype, input_shape(one.axes, (rows, width)), rng, spread=1.0) for one in of.inputs]
        reference.compare(of, inputs, (rows, width), kernels.run(of, inputs), (rows, width))


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_quantized_islands_are_as_in_onnxruntime(kind: str, dtype: str, compiled: Callable[..., Kernels]) -> None:
    """Halves to the even number, saturated at both ends, NaN the lowest; by one scale, and by one a channel. To the last bit, after one
    rounding to the type."""
    low, high = QUANTIZED[kind]
    for axes, zero in (("", 0.0), ("", 3.0), ("100", 3.0)):
        steps = (
            step("QuantizeLinear", 0, 1, low=low, high=high, zero=zero),
            step("DequantizeLinear", 2, 1, zero=zero),
            step("Identity", 3),
        )
        of = checked(Expression(4, (Input(dtype, "1111"), Input(dtype, axes)), steps, (4,)))
        rng = np.random.default_rng(5)
        x = np.concatenate([np.arange(-300, 300) * 0.25, SPECIAL, rng.standard_normal(600 - len(SPECIAL)) * 90])
        with np.errstate(over="ignore"):
            x = x.reshape(2, 3, 5, 40).astype(dtype)
        scale = np.asarray([0.5, 0.37, 1.0][: 3 if axes else 1], dtype).reshape((3, 1, 1) if axes else ())
        (got,), (want,) = compiled([of]).run(of, [x, scale]), by_onnxruntime(of, [x, scale])
        np.testing.assert_array_equal(got, want)


def test_rows_with_steps_behind_a_reduction(compiled: Callable[..., Kernels]) -> None:
    """Rows that registers hold and longer ones, of a warp's part and of a block, with ends that fill no vector; every output."""
    kernels = compiled(list(cases.midway().values()))
    for (name, of), (rows, width) in itertools.product(cases.midway().items(), [(3, 5000), (2, 1030), (40, 24), (41, 7), (100, 1), (0, 8)]):
        full = (*((1,) * (of.rank - 2)), rows, width)
        rng = np.random.default_rng(width)
        inputs = [values(one.dtype, input_shape(one.axes, full), rng, spread=1.0) for one in of.inputs]
        reference.compare(of, inputs, full, kernels.run(of, inputs), f"{name} of {full}")


def test_a_reduction_in_the_middle_is_as_in_onnxruntime(compiled: Callable[..., Kernels]) -> None:
    wanted = [cases.softmax_then("float32"), cases.gated_rms("float32"), cases.norm_then_silu("float32")]
    kernels = compiled(wanted)
    for of in wanted:
        full = (2, 3, 5, 40)[-of.rank :]
        inputs = [values(one.dtype, input_shape(one.axes, full), np.random.default_rng(3)) for one in of.inputs]
        for got, want in zip(kernels.run(of, inputs), by_onnxruntime(of, inputs), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 1, 1, 5), (1, 1, 1, 1, 1, 1, 1, 9), (129, 8), (2, 3, 5, 7, 2)])
def test_any_rank_and_empty_shapes(shape: tuple[int, ...], compiled: Callable[..., Kernels]) -> None:
    rank = len(shape)
    every_other = "".join("10"[at % 2] for at in range(rank))
    inputs = (Input("float32", "1" * rank), Input("float32", every_other), Input("float32", ""))
    of = checked(Expression(rank, inputs, (step("Mul", 0, 1), step("Add", 3, 2)), (4,)))
    rng = np.random.default_rng(1)
    arrays = [values(one.dtype, input_shape(one.axes, shape), rng) for one in of.inputs]
    (got,) = compiled([of]).run(of, arrays)
    np.testing.assert_array_equal(got, arrays[0] * arrays[1] + arrays[2])


def test_shapes_that_do_not_fit_are_refused(compiled: Callable[..., Kernels]) -> None:
    of = checked(Expression(2, (Input("float32", "11"), Input("float32", "01")), (step("Add", 0, 1),), (2,)))
    kernels = compiled([of])
    zeros = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"input 1 \[1x5\] does not fit the shape \[3x4\]"):
        kernels.run(of, [zeros(3, 4), zeros(1, 5)])
    with pytest.raises(RuntimeError, match=r"input 1 \[3x4\] does not fit"):
        kernels.run(of, [zeros(3, 4), zeros(3, 4)])


def test_float16_sums_are_better_than_the_original(compiled: Callable[..., Kernels]) -> None:
    """2048 + 1 + 1 is 2050; rounding to float16 after every operator loses both ones. A Cast rounds as in the original."""
    one = constant("float16", 1.0)
    plain = checked(Expression(1, (Input("float16", "1"),), (one, step("Add", 0, 1), step("Add", 2, 1)), (3,)))
    steps = (one, step("Add", 0, 1), step("Cast", 2, to="float16"), step("Add", 3, 1), step("Cast", 4, to="float32"))
    cast = checked(Expression(1, (Input("float16", "1"),), steps, (5,)))
    kernels = compiled([plain, cast])
    x = np.full(9, 2048, np.float16)
    assert kernels.run(plain, [x])[0].tolist() == [2050.0] * 9
    assert kernels.run(cast, [x])[0].tolist() == [2049.0] * 9  # 2048 + 1 is rounded to 2048, and its sum with 1 widened


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_quick_functions_keep_infinities_nan_and_the_whole_range(kind: str, compiled: Callable[..., Kernels]) -> None:
    """Every pair of a type's extremes; the result is that of float64, but for its rounding."""
    info = ml_dtypes.finfo(NUMPY[kind])
    tiny, least, most = (float(one) for one in (info.smallest_subnormal, info.smallest_normal, info.max))
    ends = np.array([0, tiny, 3 * tiny, least, 1e-3, 0.5, 1, 3, 10, 17, 88, 700, 12345, 65000, most / 2, most, np.inf, np.nan])
    ends = np.concatenate([ends, -ends]).astype(NUMPY[kind])
    a, b = (one.ravel() for one in np.meshgrid(ends, ends))
    pair = (Input(kind, "1"), Input(kind, "1"))
    unary = ["Softsign", "Reciprocal", "Sin", "Cos", *(("Sigmoid", "Silu", "QuickGelu", "GeluTanh") if kind == "float16" else ())]
    wanted = {op: checked(Expression(1, pair, (step(op, 0), step("Max", 2, 2, 1)), (2,))) for op in unary}
    wanted["Div"] = checked(Expression(1, pair, (step("Div", 0, 1),), (2,)))
    sixth = (constant(kind, 6.0), step("Div", 0, 2), step("Max", 3, 1))
    wanted["by six"] = checked(Expression(1, pair, sixth, (3,)))
    kernels = compiled(list(wanted.values()))
    with np.errstate(all="ignore"):
        for op, of in wanted.items():
            (got,) = kernels.run(of, [a, b])
            if op == "Div":
                want = a.astype(np.float64) / b.astype(np.float64)
            elif op == "by six":
                want = a.astype(np.float64) / 6
            else:
                want = _IN_FLOAT32[op](a.astype(np.float32))
            have, want = got.astype(np.float64), want.astype(NUMPY[kind]).astype(np.float64)
            np.testing.assert_array_equal(np.isnan(have), np.isnan(want), op)
            np.testing.assert_allclose(have, want, rtol=float(info.eps), atol=tiny, err_msg=op)  # a last place


def _sigmoid(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


# Where infinities meet, what float32 gives: minus infinity times zero.
_IN_FLOAT32: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "Sigmoid": _sigmoid,
    "Silu": lambda x: x * _sigmoid(x),
    "QuickGelu": lambda x: x * _sigmoid(1.702 * x.astype(np.float64)),
    "GeluTanh": lambda x: x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x.astype(np.float64) + 0.044715 * x.astype(np.float64) ** 3)),
    "Softsign": lambda x: x / (1 + np.abs(x.astype(np.float64))),
    "Reciprocal": lambda x: 1 / x.astype(np.float64),
    "Sin": lambda x: np.sin(x.astype(np.float64)),
    "Cos": lambda x: np.cos(x.astype(np.float64)),
}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_gates_reach_as_far_as_the_type(kind: str, compiled: Callable[..., Kernels]) -> None:
    """Where exp(-x) is no float32 any more, x / (1 + exp(-x)) still is one: -7e-38 for -90."""
    x = np.concatenate([np.linspace(-110, -80, 600), np.linspace(-65, -45, 400), [-np.inf, -3e38, -1e30, 0.0, np.inf, np.nan]])
    x = x.astype(NUMPY[kind])
    wanted = {op: checked(Expression(1, (Input(kind, "1"),), (step(op, 0),), (1,))) for op in ("Sigmoid", "Silu", "QuickGelu", "Mish")}
    kernels = compiled(list(wanted.values()))
    unit, tiny = {"float32": (2.0**-20, 2.0**-143), "bfloat16": (2.0**-8, 2.0**-134)}[kind]
    for op, of in wanted.items():
        (got,) = kernels.run(of, [x])
        with np.errstate(all="ignore"):
            wide = x.astype(np.float64)
            want = reference.evaluate(of, [x], x.shape)[0]
            want = np.where(wide == -np.inf, np.float64(0) if op == "Sigmoid" else np.nan, want)
            # The argument of exp is rounded to float32 before: by 2^-24 of itself, which the result is off by.
            bound = (unit + np.abs(np.where(np.isfinite(want), wide, 0)) * 2.0**-23) * np.abs(want) + tiny
            have = got.astype(np.float64)
            same = (have == want) | (np.isnan(have) & np.isnan(want)) | (np.abs(have - want) <= bound)
            assert same.all(), f"{op} of {wide[~same][:3]}: {have[~same][:3]} for {want[~same][:3]}"


def test_what_a_jump_rests_on_is_exact() -> None:
    """A quotient that is rounded to a whole number, and one that is only stored."""
    from onnxfuse.elementwise import source

    pair = (Input("float16", "1"), Input("float16", "1"))
    rounded = checked(Expression(1, pair, (step("Div", 0, 1), step("Round", 2)), (3,)))
    stored = checked(Expression(1, pair, (step("Div", 0, 1), step("Neg", 2)), (3,)))
    float32 = checked(Expression(1, (Input("float32", "1"),), (step("Silu", 0), step("Sin", 1)), (2,)))
    assert [source.is_quick(one) for one in (rounded, stored, float32)] == [False, True, False]


def test_operands_of_a_jump_are_rounded_first(compiled: Callable[..., Kernels]) -> None:
    """2048.0 + 1 is 2048 in float16 and so not greater than 2048."""
    steps = (constant("float16", 1.0), step("Add", 0, 1), step("Greater", 2, 0))
    of = checked(Expression(1, (Input("float16", "1"),), steps, (3,)))
    assert compiled([of]).run(of, [np.full(5, 2048, np.float16)])[0].tolist() == [False] * 5


def test_types_that_are_computed() -> None:
    assert FLOATS | INTEGERS | {"bool"} == set(NUMPY)
    assert _ELEMENT["bfloat16"] == TensorProto.BFLOAT16


def test_source_is_ascii_and_holds_no_text_of_the_model(tmp_path: Path) -> None:
    from onnxfuse.elementwise import source

    of = checked(
        Expression(
            1, (Input("float32", "1"),), (step("Elu", 0, alpha=float("inf")), constant("float32", float("nan")), step("Add", 1, 2)), (3,)
        )
    )
    text = source.source(of)
    assert text.isascii()
    assert "NAN" in text
    assert "INFINITY" in text
