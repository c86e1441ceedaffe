"""The CUDA source of an expression, and the layout that its launcher needs.

Only what `expression.checked` let through comes here, and of it nothing is copied: numbers are written as literals, operators and types
are looked up in tables. No name or text of the model reaches the source. What its names mean is said in plugins/Elementwise/kernel.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import ml_dtypes
import numpy as np

from onnxfuse.elementwise.expression import ABSENT, NUMPY, Expression, Step, ancestors, groups
from onnxfuse.elementwise.operators import FLOATS, NORMALISING, OPERATORS, QUANTIZED, SIZES

_STORED = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int32": "int32_t", "int64": "int64_t", "bool": "bool"}
_WIDE = {"float32": "float", "float16": "float", "bfloat16": "float", "int32": "int32_t", "int64": "int64_t", "bool": "bool"}
_WIDE |= dict.fromkeys(QUANTIZED, "float")  # whole numbers, between a quantization and what undoes it
LETTERS = {"float32": "f", "float16": "h", "bfloat16": "b", "int32": "i", "int64": "l", "bool": "?"}
_EXACT = frozenset({"Cast", "Constant", "Identity"})
INCLUDE = '#include "Elementwise/kernel.cuh"\n'


def vector(given: Expression) -> int:
    """Elements that a thread takes at once: as many as fill 16 bytes of the largest full tensor, 4 at least; 4 of a dear expression."""
    if cost(given) > _DEAR:
        return 4
    full = frozenset(range(given.rank))
    largest = max(
        [SIZES[one.dtype] for value, one in enumerate(given.inputs) if given.axes_of(value) == full]
        + [SIZES[given.types[value]] for value in given.outputs]
    )
    return max(4, 16 // largest)


def cost(given: Expression) -> int:
    """Of one element, in additions."""
    return sum(OPERATORS[one.op].cost for one in given.steps if one.op in OPERATORS)


_DEAR = 80  # a cost beyond which arithmetic hides the memory's latency, and more vectors a thread only make code

_MANY = 4  # full inputs beyond which one vector of each is enough under way


def unroll(given: Expression) -> int:
    """Vectors of a thread whose loads are under way together."""
    full = frozenset(range(given.rank))
    loaded = sum(given.axes_of(value) == full for value in range(len(given.inputs)))
    return 2 if cost(given) <= _DEAR and loaded <= _MANY else 1


def kernel_names(given: Expression) -> tuple[str, ...]:
    """Names of the kernels that the source defines."""
    return tuple(f"elementwise_{given.digest}_{way}" for way in _ways(given))


def _ways(given: Expression) -> tuple[str, ...]:
    if given.reduction is not None or len(groups(given)) <= 1:
        return "whole", "single"
    return "whole", "ragged", "single"


def layout(given: Expression) -> str:
    """What a launcher must know of an expression, as plugins/Elementwise/layout.h reads it."""
    reduction = given.reduction
    is_full = given.is_reduced_midway or (reduction is not None and reduction.op in NORMALISING)
    end = "none" if reduction is None else "full" if is_full else "kept" if reduction.get("keepdims") else "dropped"
    outputs = [LETTERS[given.types[value]] + ("r" if value == given.row_output else "e") for value in given.outputs]
    fields = {
        "name": given.digest,
        "rank": given.rank,
        "vector": vector(given),
        "each": unroll(given),
        "end": end,
        "groups": ",".join(map(str, groups(given))),
        "in": ",".join(LETTERS[one.dtype] + one.axes for one in given.inputs),
        "out": ",".join(outputs),
    }
    return ";".join(["1", *(f"{name}={value}" for name, value in fields.items())])


def source(given: Expression, include: str = INCLUDE) -> str:
    """The source of all kernels of an expression; several may stand in one file, which then has the include once."""
    name = f"Expression_{given.digest}"
    ways = dict(zip(_ways(given), kernel_names(given), strict=True))
    v = vector(given)
    lines = [
        include,
        f"struct {name}",
        "{",
        f"    static constexpr unsigned kUnroll = {unroll(given)};",
        f"    using Args = onnxfuse::ElementwiseArgs<{len(given.inputs)}, {len(given.outputs)}, {max(1, len(groups(given)))}>;",
        *_indented(_structs(given)),
        *_indented(_load(given)),
        *_indented(_evaluate(given)),
        *_indented(_store(given)),
        *_indented(_row(given)),
        "};",
    ]
    reduction = given.reduction
    for way, kernel in ways.items():
        lanes = 1 if way == "single" else v
        if reduction is not None:
            call = f"rows<{name}, {lanes}, onnxfuse::{reduction.op}<{name}>>(args)"
        else:
            call = f"elementwise<{name}, {lanes}, {'false' if way == 'ragged' else 'true'}>(args)"
        bounds = "__launch_bounds__(256)" if reduction is not None else "__launch_bounds__(onnxfuse::kElementwiseThreads)"
        lines += [f'extern "C" __global__ void {bounds} {kernel}({name}::Args const args)', "{", f"    onnxfuse::{call};", "}"]
    return "\n".join(lines) + "\n"


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"    {line}" if line else line for line in lines)


# --- what is read and written -----------------------------------------------------------------------------------------------


def _groups_of(given: Expression, value: int) -> frozenset[int]:
    """Groups of the full shape along which an input changes."""
    found, axis = set(), 0
    for number, size in enumerate(groups(given)):
        if axis in given.axes_of(value):
            found.add(number)
        axis += size
    return frozenset(found)


def _structs(given: Expression) -> Iterator[str]:
    last = len(groups(given)) - 1
    yield "template <int V, bool kWhole>"
    yield "struct In"
    yield "{"
    for value, one in enumerate(given.inputs):
        present = _groups_of(given, value)
        lanes = "1" if not present else "V" if last in present else "(kWhole ? 1 : V)"
        yield f"    onnxfuse::Lanes<{_STORED[one.dtype]}, {lanes}> x{value};"
    yield "};"
    yield "template <int V>"
    yield "struct Out"
    yield "{"
    for place, value in _written(given):
        yield f"    onnxfuse::Lanes<{_STORED[given.types[value]]}, V> y{place};"
    yield "};"


def _written(given: Expression) -> Iterator[tuple[int, int]]:
    """Outputs that are stored element by element, without a reduction at the end: place and value."""
    for place, value in enumerate(given.outputs):
        if value != given.row_output:
            yield place, value


def _load(given: Expression) -> Iterator[str]:
    patterns = [_groups_of(given, value) for value in range(len(given.inputs))]
    everything = frozenset(range(len(groups(given))))
    places = sorted({p for p in patterns if p and p != everything}, key=sorted)
    count = len(groups(given))
    yield "template <int V, bool kWhole>"
    yield "static __device__ __forceinline__ void load(Args const& args, unsigned element, In<V, kWhole>& in)"
    yield "{"
    for value, present in enumerate(patterns):
        if not present:
            yield f"    onnxfuse::fetch(args.in[{value}], 0u, in.x{value});"
        elif present == everything:
            yield f"    onnxfuse::fetch(args.in[{value}], element, in.x{value});"
    if places:
        yield "    if constexpr (kWhole)"
        yield "    {"
        yield from (f"        {line}" for line in _coordinates("element", places, count))
        for value, present in enumerate(patterns):
            if present in places:
                yield f"        onnxfuse::fetch(args.in[{value}], {_offset(present)}, in.x{value});"
        yield "    }"
        yield "    else"
        yield "    {"
        yield "#pragma unroll"
        yield "        for (int lane = 0; lane < V; ++lane)"
        yield "        {"
        yield from (f"            {line}" for line in _coordinates("(element + lane)", places, count))
        for value, present in enumerate(patterns):
            if present in places:
                kind = _STORED[given.inputs[value].dtype]
                yield f"            in.x{value}.v[lane] = static_cast<{kind} const*>(args.in[{value}])[{_offset(present)}];"
        yield "        }"
        yield "    }"
    yield "}"


def _coordinates(element: str, places: list[frozenset[int]], count: int) -> Iterator[str]:
    """Statements for the coordinate in each group that is needed, from the innermost group outwards."""
    rest = element
    for number in range(count - 1, min(min(present) for present in places) - 1, -1):
        if number == 0:
            yield f"unsigned const c0 = {rest};"
            break
        yield f"unsigned const q{number} = onnxfuse::quotient({rest}, args.groups[{number}]);"
        if any(number in present for present in places):
            yield f"unsigned const c{number} = {rest} - q{number} * args.groups[{number}].size;"
        rest = f"q{number}"


def _offset(present: frozenset[int]) -> str:
    """Where an input of these groups is read."""
    first, *others = sorted(present)
    place = f"c{first}"
    for number in others:
        place = f"({place} * args.groups[{number}].size + c{number})"
    return place


def _store(given: Expression) -> Iterator[str]:
    yield "template <int V>"
    yield "static __device__ __forceinline__ void store(Args const& args, unsigned element, Out<V> const& out)"
    yield "{"
    for place, _ in _written(given):
        yield f"    onnxfuse::put(args.out[{place}], element, out.y{place});"
    yield "}"


# --- what is computed -------------------------------------------------------------------------------------------------------


def _evaluate(given: Expression) -> Iterator[str]:
    """The steps, lane by lane. Before a reduction, `row` takes the values that are reduced."""
    if given.reduction is None:
        yield from _lanes("evaluate", given, "", given.outputs, "")
        return
    before = (given.reduction.operands[0],)
    stored = () if given.is_reduced_midway else tuple(value for _, value in _written(given))
    yield from _lanes("evaluate", given, ", float (&row)[V]", (*before, *stored), f"row[lane] = v{before[0]};", stored)
    if given.is_reduced_midway:
        known = {before[0]: "row[lane]", _reduced(given): "result[lane]"}
        yield from _lanes("after", given, ", float const (&row)[V], float const (&result)[V]", given.outputs, "", known=known)


def _reduced(given: Expression) -> int:
    assert given.reduced is not None
    return given.reduced


def _lanes(
    name: str,
    given: Expression,
    parameters: str,
    wanted: Sequence[int],
    last: str,
    stored: Sequence[int] | None = None,
    known: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[str]:
    """A function that computes `wanted`, and stores those of them that are `stored`, all by default; some values are `known`."""
    needed = _needed(given, wanted, known)
    yield "template <int V, bool kWhole>"
    yield f"static __device__ __forceinline__ void {name}(In<V, kWhole> const& in, Out<V>& out{parameters})"
    yield "{"
    yield "#pragma unroll"
    yield "    for (int lane = 0; lane < V; ++lane)"
    yield "    {"
    quick = _quick(given)
    last_group = len(groups(given)) - 1
    for value, read in enumerate(given.inputs):
        present = _groups_of(given, value)
        lane = "0" if not present else "lane" if last_group in present else "kWhole ? 0 : lane"
        if value in needed and value not in known:
            yield f"        {_WIDE[read.dtype]} const v{value} = onnxfuse::wide(in.x{value}.v[{lane}]);"
    for value, text in known.items():
        if value in needed:
            yield f"        float const v{value} = {text};"
    for value in order(given):
        if value in needed and value not in known:
            formula = _formula(given, given.steps[value - len(given.inputs)], value in quick)
            yield f"        {_WIDE[given.types[value]]} const v{value} = {formula};"
    for place, value in _written(given):
        if stored is None or value in stored:
            yield f"        out.y{place}.v[lane] = onnxfuse::narrow<{_STORED[given.types[value]]}>(v{value});"
    if last:
        yield f"        {last}"
    yield "    }"
    yield "}"


def _needed(given: Expression, wanted: Iterable[int], known: Collection[int]) -> set[int]:
    """`wanted` and what they are computed from, as far as it is not known."""
    found: set[int] = set()
    waiting = list(wanted)
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            made = given.step(value)
            waiting.extend(made.read if made and value not in known else ())
    return found


def order(given: Expression) -> list[int]:
    """The steps' values in an order that keeps few of them alive: of those that can be computed next, always one that frees most."""
    readers: dict[int, int] = {}
    for one in given.steps:
        for value in set(one.read):
            readers[value] = readers.get(value, 0) + 1
    for value in given.outputs:
        readers[value] = readers.get(value, 0) + 1  # stored at the end
    first = len(given.inputs)
    waiting = {at + first: {value for value in one.read if value >= first} for at, one in enumerate(given.steps)}
    done: list[int] = []
    while waiting:
        ready = [value for value, missing in waiting.items() if not missing]
        value = min(ready, key=lambda value: (_growth(given, value, readers), value))
        del waiting[value]
        done.append(value)
        for read in set(given.steps[value - first].read):
            readers[read] -= 1
        for missing in waiting.values():
            missing.discard(value)
    return done


def _growth(given: Expression, value: int, readers: dict[int, int]) -> int:
    """By how many the values alive grow when a step is done; a constant's literal takes no register until it is read."""
    one = given.steps[value - len(given.inputs)]
    if one.op == "Constant":
        return -1
    freed = sum(readers[read] == 1 and not _is_constant(given, read) for read in set(one.read))
    return 1 - freed


def _is_constant(given: Expression, value: int) -> bool:
    made = given.step(value)
    return made is not None and made.op == "Constant"


def pressure(given: Expression) -> int:
    """Most numbers of one element that are alive at a time where the steps are done in `order`: what its kernels need registers for."""
    sequence = order(given)
    last: dict[int, int] = {}
    for at, value in enumerate(sequence):
        for read in given.steps[value - len(given.inputs)].read:
            last[read] = at
    last.update(dict.fromkeys(given.outputs, len(sequence)))
    alive = {value for value in range(len(given.inputs)) if value in last}
    most = len(alive)
    for at, value in enumerate(sequence):
        if value in last and not _is_constant(given, value):
            alive.add(value)
        most = max(most, len(alive))
        alive = {one for one in alive if last[one] > at}
    return most


# Functions of namespace quick, by the type to which their result is rounded.
_QUICK = {
    "float16": frozenset({"Cos", "Div", "GeluTanh", "QuickGelu", "Reciprocal", "Sigmoid", "Silu", "Sin", "Softsign"}),
    "bfloat16": frozenset({"Cos", "Div", "Reciprocal", "Sin", "Softsign"}),
}


def is_quick(given: Expression) -> bool:
    """Whether any of its functions is one for results in half precision."""
    return bool(_quick(given))


def _quick(given: Expression) -> frozenset[int]:
    """Values that such functions compute. Not those on which a jump or a cast rests: there a difference in the last place may be one of a
    whole step."""
    ends = [value for one in given.steps if one.op == "Cast" or (one.op in OPERATORS and OPERATORS[one.op].jumps) for value in one.read]
    known = {value for value, kind in enumerate(given.types) if (one := given.step(value)) and one.op in _QUICK.get(kind, ())}
    return frozenset(known) - ancestors(given, ends)


def _by_constant(given: Expression, one: Step) -> float | None:
    """The reciprocal of a constant divisor; None where it has none in the normal range, or the divisor is no constant."""
    made = given.step(one.operands[1])
    if made is None or made.op != "Constant":
        return None
    divisor = abs(float(made.get("value")))
    return 1 / float(made.get("value")) if 2.0**-120 < divisor < 2.0**120 else None


def _formula(given: Expression, one: Step, quick: bool) -> str:
    if one.op == "Constant":
        return _literal(str(one.get("type")), float(one.get("value")))
    operator = OPERATORS[one.op]
    operands = [_operand(given, value, operator.jumps) for value in one.operands]
    if one.op == "Identity":
        return operands[0]
    if one.op == "Cast":
        return f"onnxfuse::CastTo<{_STORED[str(one.get('to'))]}>::of({operands[0]})"
    if one.op == "Clip":
        return _clip(operands, given.types[one.operands[0]])
    if operator.folded:
        name = "add" if one.op == "Mean" else operator.function
        total = _nested(operands[0], [(name, operand) for operand in operands[1:]])
        return f"onnxfuse::divide({total}, {_literal('float32', float(len(operands)))})" if one.op == "Mean" else total
    attributes = [_literal("float32", float(value)) for value in _in_order(one)]
    if quick and one.op == "Div" and (factor := _by_constant(given, one)) is not None:
        return f"onnxfuse::multiply({operands[0]}, {_literal('float32', factor)})"
    return f"onnxfuse::{'quick::' if quick else ''}{operator.function}({', '.join([*operands, *attributes])})"


def _clip(operands: list[str], kind: str) -> str:
    """By the operator's definition an absent bound is the type's largest finite number, which an infinity then becomes."""
    low, high = (*operands[1:], "", "")[:2]
    if kind in FLOATS:
        largest = float(ml_dtypes.finfo(NUMPY[kind]).max)  # type: ignore[no-untyped-call]
        low, high = low or _literal("float32", -largest), high or _literal("float32", largest)
    return _nested(operands[0], [(name, bound) for name, bound in (("at_least", low), ("at_most", high)) if bound])


def _in_order(one: Step) -> list[float]:
    """Attributes as the device function takes them."""
    return [float(one.get(name)) for name in OPERATORS[one.op].attributes]


def _nested(first: str, others: list[tuple[str, str]]) -> str:
    for name, operand in others:
        first = f"onnxfuse::{name}({first}, {operand})"
    return first


def _operand(given: Expression, value: int, jumps: bool) -> str:
    if value == ABSENT:
        return ""
    made, kind = given.step(value), given.types[value]
    if jumps and kind in FLOATS and kind != "float32" and made is not None and made.op not in _EXACT:
        return f"onnxfuse::CastTo<{_STORED[kind]}>::of(v{value})"  # rounded as the original rounds it before the jump
    return f"v{value}"


def _literal(dtype: str, value: float) -> str:
    """A number as a literal of the type in which it is computed."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "int32":
        return f"static_cast<int32_t>(0x{int(value) & 0xFFFFFFFF:x}u)"
    if dtype == "int64":
        return f"static_cast<int64_t>(0x{int(value) & 0xFFFFFFFFFFFFFFFF:x}ull)"
    value = float(np.float32(value))
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{value.hex()}f"


# --- rows -------------------------------------------------------------------------------------------------------------------


def _row(given: Expression) -> Iterator[str]:
    """What a reduction asks of the expression."""
    reduction = given.reduction
    if reduction is None:
        return
    yield f"static constexpr bool kMidway = {'true' if given.is_reduced_midway else 'false'};"
    if "epsilon" in dict(reduction.attributes):
        yield f"static constexpr float kEpsilon = {_literal('float32', float(reduction.get('epsilon')))};"
    if given.is_reduced_midway or reduction.op in NORMALISING:
        yield from _parameters(given, reduction)
    if given.row_output is None:
        return
    place = given.outputs.index(given.row_output)
    kind = _STORED[given.types[given.row_output]]
    if reduction.op not in NORMALISING:
        yield "static __device__ __forceinline__ void result(Args const& args, unsigned row, float value)"
        yield "{"
        yield f"    static_cast<{kind}*>(args.out[{place}])[row] = onnxfuse::narrow<{kind}>(value);"
        yield "}"
        return
    yield "template <int V>"
    yield "static __device__ __forceinline__ void finish(Args const& args, unsigned element, float const (&row)[V])"
    yield "{"
    yield f"    onnxfuse::Lanes<{kind}, V> result;"
    yield "#pragma unroll"
    yield "    for (int lane = 0; lane < V; ++lane)"
    yield f"        result.v[lane] = onnxfuse::narrow<{kind}>(row[lane]);"
    yield f"    onnxfuse::put(args.out[{place}], element, result);"
    yield "}"


def _parameters(given: Expression, reduction: Step) -> Iterator[str]:
    """Scale and bias of a norm; 1 and 0 where it has none."""
    last = len(groups(given)) - 1
    yield "template <int V, bool kWhole>"
    yield "static __device__ __forceinline__ void parameters(In<V, kWhole> const& in, float (&scale)[V], float (&bias)[V])"
    yield "{"
    yield "#pragma unroll"
    yield "    for (int lane = 0; lane < V; ++lane)"
    yield "    {"
    for name, number, absent in (("scale", 1, "1.0f"), ("bias", 2, "0.0f")):
        if number < len(reduction.operands):
            value = reduction.operands[number]
            lane = "lane" if last in _groups_of(given, value) else "0"
            yield f"        {name}[lane] = onnxfuse::wide(in.x{value}.v[{lane}]);"
        else:
            yield f"        {name}[lane] = {absent};"
    yield "    }"
    yield "}"
