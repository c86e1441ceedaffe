"""Do two models, or a model and an engine, give the same outputs?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.verify import inputs, reference
from onnxfuse.verify.metrics import Metrics, Tolerance, incomparable, measure, worst
from onnxfuse.verify.skim import skeleton

if TYPE_CHECKING:
    import onnx

# Where the limits come from.
# float32: rtol and atol with which rewriters are commonly tested, and scale-free limits that re-ordered float32 stays far below.
# 16 bits: the error's norm may be k unit roundoffs u of the reference's, which leaves a cosine of 1 - (k u)^2 / 2. k = 29 for float16
# (u = 2^-11) is a cosine of 0.9999; k = 16 for bfloat16 (u = 2^-8) is 0.998. That is room for the roundings of some tens of layers, and
# a kernel that is wrong by a few per cent fails. The largest error is held to a few times that norm, measured in the largest value.
# tf32: what TensorRT multiplies float32 matrices in by default, with float16's roundoff.
# quantized: where activations are rounded to 8 bits, a difference in the last bit can cross a rounding step, 1/255 of the range.
TOLERANCES = {
    "float32": Tolerance(of_typical=1e-5),
    "float16": Tolerance(rtol=None, atol=None, cosine=0.9999, relative_rms=1.42e-2, normalised=3e-2, name="float16"),
    "quantized": Tolerance(rtol=None, atol=None, cosine=0.999, relative_rms=4.5e-2, normalised=0.1, name="quantized"),
    "tf32": Tolerance(rtol=None, atol=None, cosine=0.9999, relative_rms=1.42e-2, normalised=3e-2, name="tf32"),
    "bfloat16": Tolerance(rtol=None, atol=None, cosine=0.998, relative_rms=6.25e-2, normalised=0.2, name="bfloat16"),
}
# Names that users type for them.
_ALIASES = {"keep": "float32", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_LOOSEST_LAST = ("float32", "tf32", "float16", "quantized", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Check:
    """What a comparison found. `outputs` keeps the reference's order."""

    outputs: dict[str, Metrics]
    tolerance: Tolerance
    reference: str = ""  # which evaluator gave the right values
    feeds: int = 1
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return all(metrics.agrees for metrics in self.outputs.values())

    @property
    def disagreements(self) -> dict[str, str]:
        """Output -> why it does not agree."""
        return {name: metrics.reason for name, metrics in self.outputs.items() if not metrics.agrees}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {
            "agrees": self.agrees,
            "reference": self.reference,
            "tolerance": {**dataclasses.asdict(self.tolerance), "rules": self.tolerance.rules},
            "feeds": self.feeds,
            "notes": list(self.notes),
            "outputs": {name: metrics.to_dict() for name, metrics in self.outputs.items()},
        }


def tolerance(precision: str = "float32", rtol: float | None = None, atol: float | None = None) -> Tolerance:
    """The limits for a precision: float32, tf32, float16, bfloat16, quantized (or fp32, fp16, bf16, keep).

    An rtol or atol that a user gives is asked exactly as given, beside the precision's scale-free limits.
    """
    name = _ALIASES.get(precision, precision)
    if name not in TOLERANCES:
        raise BadInput(f"no tolerance for precision {precision!r}; give one of {', '.join([*TOLERANCES, *_ALIASES])}")
    default = TOLERANCES[name]
    if rtol is None and atol is None:
        return default
    for option, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise BadInput(f"--{option} {value:g}: a tolerance is finite and not negative; give 0 or a small number, as in 1e-3")
    return dataclasses.replace(
        default, rtol=rtol if rtol is not None else default.rtol, atol=atol if atol is not None else default.atol, of_typical=0.0
    )


def precision(model: Path) -> str:
    """The lowest precision that a model computes in, from the types it declares: a key of TOLERANCES. Weights are not read."""
    return max(_precisions(skeleton(Path(model))), key=_LOOSEST_LAST.index)


def _precisions(proto: onnx.ModelProto) -> Iterator[str]:
    import onnx

    narrow = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}
    yield "float32"
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if value.type.tensor_type.elem_type in narrow:
            yield narrow[value.type.tensor_type.elem_type]
    graphs: list[Any] = [proto.graph, *proto.functions]
    while graphs:
        graph = graphs.pop()
        for tensor in getattr(graph, "initializer", ()):
            if tensor.data_type in narrow:
                yield narrow[tensor.data_type]
        for node in graph.node:
            if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
                yield "quantized"
            for attribute in node.attribute:
                if attribute.name == "to" and attribute.i in narrow:
                    yield narrow[attribute.i]
                elif attribute.HasField("t") and attribute.t.data_type in narrow:
                    yield narrow[attribute.t.data_type]
                graphs.extend([attribute.g] if attribute.HasField("g") else attribute.graphs)


def check_arrays(
    wanted: Sequence[Mapping[str, Any]],
    got: Sequence[Mapping[str, Any]],
    limits: Tolerance | None = None,
    *,
    same_dtype: bool = False,
    source: str = "",
    notes: Sequence[str] = (),
) -> Check:
    """Outputs by name, one mapping a feed: `wanted` are the right ones. An output that `got` lacks is a disagreement; one more is a note.

    With `same_dtype` false (engines), floating types of different width are compared by value.
    """
    limits = limits or TOLERANCES["float32"]
    found: dict[str, list[Metrics]] = {}
    more: dict[str, None] = {}
    for want, have in zip(wanted, got, strict=True):
        more.update(dict.fromkeys(name for name in have if name not in want))
        for name, value in want.items():
            one = measure(have[name], value, limits, same_dtype=same_dtype) if name in have else incomparable("this output is missing")
            found.setdefault(name, []).append(one)
    extra = [f"output {name!r} has no counterpart in the reference" for name in more]
    return Check({name: worst(each) for name, each in found.items()}, limits, source, len(wanted), (*notes, *extra))


def merged(checks: Sequence[Check]) -> Check:
    """Checks of the same outputs, each over feeds of its own, as one."""
    outputs = {name: worst([check.outputs[name] for check in checks if name in check.outputs]) for name in checks[0].outputs}
    notes = dict.fromkeys(note for check in checks for note in check.notes)
    return dataclasses.replace(checks[0], outputs=outputs, feeds=sum(check.feeds for check in checks), notes=tuple(notes))


def check_models(
    original: Path,
    rewritten: Path,
    feeds_list: Sequence[reference.Feeds],
    rtol: float | None = None,
    atol: float | None = None,
    *,
    runtime: reference.Runtime | None = None,
    progress: Callable[[str], None] | None = None,
) -> Check:
    """Run both models and compare every output of the original, within limits that follow the lowest precision of the two (or rtol, atol).

    Where onnxruntime has no kernels for one of them, both run in onnx.reference, and `reference` of the result says so; CannotRun where
    that fails too. BadInput: the models take different inputs. OnnxfuseError: a model fails, crashes, or takes too long.
    """
    same_inputs(original, rewritten)
    with _borrowed(runtime) as child:
        given = Reference(feeds_list, *run_feeds(child, Path(original), feeds_list, progress))
        return check_rewritten(child, original, given, rewritten, rtol, atol, progress)


def check_rewritten(
    child: reference.Runtime,
    original: Path,
    given: Reference,
    rewritten: Path,
    rtol: float | None = None,
    atol: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Check:
    """As `check_models`, with the outputs of `original` given. Both models are judged in one evaluator: where onnxruntime has no kernels
    for the rewritten one, the original runs again in onnx.reference.
    """
    same_inputs(original, rewritten)
    if given.evaluator == reference.ONNX_REFERENCE:
        naming = _naming(progress, rewritten, given.evaluator)
        wanted, evaluator = given.outputs, given.evaluator
        got = child.run(rewritten, given.feeds, evaluator=evaluator, progress=naming)
    else:
        got, evaluator = run_feeds(child, rewritten, given.feeds, progress)
        wanted = given.outputs if evaluator == given.evaluator else child.run(original, given.feeds, evaluator=evaluator)
    limits, notes = limits_for(original, rewritten, rtol, atol)
    return check_arrays(wanted, got, limits, same_dtype=True, source=reference.describe(evaluator), notes=(*given.notes, *notes))


def limits_for(original: Path, rewritten: Path, rtol: float | None = None, atol: float | None = None) -> tuple[Tolerance, tuple[str, ...]]:
    """The limits for a pair of models, and what a reader should know of them."""
    lowest = max(precision(original), precision(rewritten), key=_LOOSEST_LAST.index)
    note = f"the limits are those of {lowest}, the lowest precision of the two models"
    if lowest == "quantized":
        note = "activations are rounded to 8 bits, where a difference in the last bit can cross a rounding step: the limits allow for it"
    return tolerance(lowest, rtol, atol), () if lowest == "float32" else (note,)


def same_inputs(original: Path, rewritten: Path) -> None:
    """BadInput where the second model needs an input that the first has not, or lacks one: no feed would suit both."""
    first, second = (skeleton(Path(path)) for path in (original, rewritten))
    needed, taken = ({spec.name for spec in inputs.specs(proto)} for proto in (first, second))
    offered = {value.name for value in second.graph.input}
    has = {value.name for value in first.graph.input}
    for names, there, lacks in ((needed - offered, original, rewritten), (taken - has, rewritten, original)):
        if names:
            listed = ", ".join(repr(name) for name in sorted(names))
            raise BadInput(f"{lacks}: has no input {listed}, which {there} takes; compare models with the same inputs")


@dataclasses.dataclass(frozen=True)
class Reference:
    """Feeds, and a model's outputs for each of them, from one evaluator."""

    feeds: Sequence[reference.Feeds]
    outputs: list[reference.Outputs]
    evaluator: str
    notes: tuple[str, ...] = ()


@dataclasses.dataclass
class Stream:
    """Feeds that a model takes, and its outputs for them, one feed at a time. notes: complete when all were asked for."""

    child: reference.Runtime
    model: Path
    feeds: Sequence[reference.Feeds]
    first: reference.Outputs
    evaluator: str
    may_refuse: bool  # further feeds are of guessed sizes
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[tuple[reference.Feeds, reference.Outputs]]:
        yield self.feeds[0], self.first
        for index in range(1, len(self.feeds)):
            feed = self.feeds[index]
            try:
                outputs = self.child.run(self.model, [feed], evaluator=self.evaluator)[0]
            except OnnxfuseError:
                if not self.may_refuse:
                    raise
                self.notes = (LEFT_OUT,)
                return
            yield feed, outputs

    def whole(self) -> Reference:
        """All of them at once."""
        pairs = list(self)
        return Reference([feed for feed, _ in pairs], [outputs for _, outputs in pairs], self.evaluator, self.notes)


LEFT_OUT = "inputs of further sizes were left out: the reference does not take them"


def streamed(
    child: reference.Runtime, model: Path, feeds: Sequence[reference.Feeds], progress: Callable[[str], None] | None = None
) -> Stream:
    """Given feeds, with the model's outputs for each as they are asked for. OnnxfuseError: it does not take one of them."""
    outputs, evaluator = run_feeds(child, model, feeds[:1], progress)
    return Stream(child, model, feeds, outputs[0], evaluator, may_refuse=False)


def generated(
    child: reference.Runtime,
    model: Path,
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Stream:
    """Made-up feeds that the model takes, and its outputs for them as they are asked for.

    Sizes that are declared free are at times not: some are guessed anew where the model refuses them. Feeds after the first have other
    sizes; those that the model does not take are left out, and a note says so. OnnxfuseError: it takes no guess; the sizes are named.
    """
    feeds, outputs, evaluator = _first_feed(child, model, seed, count, dims or {}, progress)
    return Stream(child, model, feeds, outputs[0], evaluator, may_refuse=True)


def _first_feed(
    child: reference.Runtime, model: Path, seed: int, count: int, dims: Mapping[str, int], progress: Callable[[str], None] | None
) -> tuple[list[inputs.Feeds], list[reference.Outputs], str]:
    """Feeds of the first guess that the model takes, and its outputs for the first of them."""
    guessed = [name for name in inputs.symbols(model) if name not in dims]
    refusals = []
    for guess in inputs.GUESSES if guessed else inputs.GUESSES[:1]:
        feeds = inputs.generate(model, seed, count, dims, guess)
        try:
            return feeds, *run_feeds(child, model, feeds[:1], progress)
        except reference.CannotRun:
            raise
        except OnnxfuseError as error:
            refusals.append(error)
    if not guessed:
        raise refusals[0]
    options = " ".join(f"--dims '{name}=N'" for name in guessed)
    raise OnnxfuseError(f"{refusals[0]}; free sizes were guessed: give them with {options}, or real inputs with --data") from refusals[0]


def usable_feeds(model: Path, seed: int = 0, count: int = 1, dims: Mapping[str, int] | None = None) -> Sequence[reference.Feeds]:
    """Made-up feeds that the model takes: those of `generated`."""
    with reference.Runtime() as child:
        return generated(child, model, seed, count, dims).whole().feeds


def run_feeds(
    child: reference.Runtime, model: Path, feeds_list: Sequence[reference.Feeds], progress: Callable[[str], None] | None = None
) -> tuple[list[reference.Outputs], str]:
    """Outputs of a model and the evaluator that gave them: onnxruntime, or onnx.reference where onnxruntime has no kernels for it."""
    try:
        return child.run(model, feeds_list, progress=_naming(progress, model, reference.ONNXRUNTIME)), reference.ONNXRUNTIME
    except reference.CannotRun as refusal:
        evaluator = reference.ONNX_REFERENCE
        try:
            return child.run(model, feeds_list, evaluator=evaluator, progress=_naming(progress, model, evaluator)), evaluator
        except reference.CannotRun as error:
            raise reference.CannotRun(f"{refusal}; nor can {str(error).split(': ', 2)[-1]}") from error


def _naming(progress: Callable[[str], None] | None, model: Path, evaluator: str) -> reference.Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(f"{model.name} in {evaluator}: input {min(done + 1, total)} of {total}")


class _borrowed:
    """The caller's runtime, left open; or one of our own, closed at the end."""

    def __init__(self, runtime: reference.Runtime | None):
        self.runtime = runtime or reference.Runtime()
        self.own = runtime is None

    def __enter__(self) -> reference.Runtime:
        return self.runtime

    def __exit__(self, *about: object) -> None:
        if self.own:
            self.runtime.close()
