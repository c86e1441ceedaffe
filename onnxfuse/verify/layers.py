"""What happens inside: every tensor of the original that another file or engine still has, in topological order.

Three things are asked of each tensor. Is it within its tolerance (`against` the reference)? Is what computes it, fed with the reference's
values, within it too (`alone`), so that an error is not its predecessors'? And how far is it from the truth in float64 (`errors`)?

Memory is bounded: tensors are computed in batches of so many bytes, measured and dropped. A batch never splits a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onnxfuse.errors import OnnxfuseError
from onnxfuse.fusions.base import label
from onnxfuse.graph import query
from onnxfuse.graph.origin import Origin
from onnxfuse.verify import nonfinite
from onnxfuse.verify.metrics import Metrics, Tolerance, measure
from onnxfuse.verify.pieces import OWN, Pieces, names_read
from onnxfuse.verify.reference import Feeds, Kind, Outputs, Runtime

BUDGET = 512 << 20  # bytes of tensors held at once
MOST_FAILURES = 8  # pieces that are found not to run alone, before no more are looked for
REFERENCE = "onnxruntime"
CONSTANT = "constant of the file"
# A kernel alone may err by this many times what rounding its inputs, weights and result to its type costs, and by this many roundings.
TIMES_PRICE, ROUNDINGS = 8.0, 4.0
# Errors of two ways of computing in one precision differ by the order of additions and by what stays in registers: up to this many times.
ALIKE = 4.0
_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "tf32": 2.0**-11, "float32": 2.0**-24}
_CANCELS = frozenset({"Add", "Sub", "Sum", "ReduceMean", "ReduceSum"})  # operands of one size may leave noise of theirs
_SHAPES = frozenset({"Shape", "Size"})  # read no values

Progress = Callable[[str], None]


class Subject(Protocol):
    """What is compared: a model or an engine.

    name: of its file. role: "fused", "automatic" or its name. pieces: the model that says what computes a tensor. kinds: what tensors
    it can give.
    """

    name: str
    role: str
    limits: Tolerance
    pieces: Pieces

    @property
    def kinds(self) -> Mapping[str, Kind]: ...

    def fetch(self, names: Sequence[str]) -> Outputs:
        """Values of its own run."""

    def alone(self, names: Sequence[str], edges: Collection[str], values: Mapping[str, Any]) -> Outputs:
        """What computes each of `names` from `edges`, fed with these values of `edges`. Those that it cannot run so are left out."""

    def tap(self, name: str) -> str:
        """Where the figures of a tensor come from, in words."""

    def layer(self, name: str) -> str:
        """The engine's layer that computes a tensor, or part of it; empty for a model."""

    def needs(self, names: Sequence[str], edges: Collection[str]) -> Collection[str]:
        """The edges that `alone` needs for `names`."""


class ModelSubject:
    """An ONNX file in onnxruntime, or the reference itself."""

    def __init__(self, name: str, role: str, limits: Tolerance, pieces: Pieces, feeds: Feeds, runtime: Runtime, folder: Path) -> None:
        self.name, self.role, self.limits, self.pieces = name, role, limits, pieces
        self._feeds, self._runtime, self._folder = feeds, runtime, folder
        computed = runtime.kinds(pieces.path, feeds, list(pieces.producers)) if pieces.producers else {}
        # What the original computes may be a constant here, under the same name.
        constants = {name: tensor for name, tensor in pieces.constants.items() if name not in computed}
        held = {name: Kind(np.dtype(t.dtype).name, tuple(t.shape)) for name, t in constants.items() if t.dtype is not None}
        self.kinds: Mapping[str, Kind] = {**held, **computed}
        self._pieces_made = 0

    def fetch(self, names: Sequence[str]) -> Outputs:
        computed = [name for name in names if name in self.pieces.producers]
        found: Outputs = {name: query.constant(self.pieces.constants[name]) for name in names if name not in self.pieces.producers}
        if computed:
            found.update(self._runtime.run(self.pieces.path, [self._feeds], computed)[0])
        return found

    def alone(self, names: Sequence[str], edges: Collection[str], values: Mapping[str, Any], rounded: Any = None) -> Outputs:
        """As the protocol says. rounded: a narrower floating type that inputs, weights and results are rounded to."""
        constants = {name: query.constant(self.pieces.constants[name]) for name in names if name not in self.pieces.producers}
        names = [name for name in names if name in self.pieces.producers]
        if not names:
            return constants
        fed = {name: Kind.fed(np.asarray(array)) for name, array in self._feeds.items()}
        piece = self.pieces.alone(names, edges, {**fed, **self.kinds}, rounded)
        self._pieces_made += 1  # a runtime knows a file by its name and time
        path = self._folder / f"piece-{id(self)}-{self._pieces_made}.onnx"
        path.write_bytes(piece.model.SerializeToString())
        feeds = {}
        for name in piece.inputs:
            value = np.asarray(values[name] if name in values else self._feeds[name])
            kind = self.kinds.get(name)
            if rounded is not None and _is_float(value):
                with np.errstate(over="ignore"):
                    value = value.astype(rounded)
            feeds[name] = _as(value, kind) if kind is not None else value.astype(self._feeds[name].dtype)
        try:
            found = self._runtime.run(path, [feeds])[0]
        finally:
            path.unlink()
        made = {**constants, **{name.removeprefix(OWN): value for name, value in found.items()}}
        with np.errstate(over="ignore"):
            return made if rounded is None else {n: v.astype(rounded) if _is_float(v) else v for n, v in made.items()}

    def tap(self, name: str) -> str:
        return REFERENCE if name in self.pieces.producers else CONSTANT

    def layer(self, name: str) -> str:
        return ""

    def needs(self, names: Sequence[str], edges: Collection[str]) -> Collection[str]:
        nodes = {id(node): node for name in names for node in self.pieces.between(name, edges)}
        return {value for node in nodes.values() for value in names_read(node) if value in edges}


def _is_float(array: Any) -> bool:
    return isinstance(array, np.ndarray) and Kind.fed(array).is_float


def _as(value: np.ndarray, kind: Kind) -> np.ndarray:
    """In the type that a model has for a tensor, where both are floating types."""
    import ml_dtypes

    if not (kind.is_float and _is_float(value)) or value.dtype.name == kind.dtype:
        return value
    with np.errstate(over="ignore"):
        return value.astype(getattr(ml_dtypes, kind.dtype, kind.dtype))


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor. `against`, `alone` and `price` by the name of a subject; `errors`, against the truth, by the name of a subject or of the
    reference. truth: why there is none; empty where there is. nodes: of the original, that compute it from the tensors before.
    """

    name: str
    node: str
    op: str
    nodes: tuple[str, ...]
    kind: Kind
    is_output: bool
    origins: dict[str, tuple[Origin | None, str]]
    against: dict[str, Metrics]
    alone: dict[str, Metrics]
    price: dict[str, Metrics]
    errors: dict[str, Metrics]
    truth: str
    taps: dict[str, str]
    wrong: dict[str, str]  # why what computes it is wrong by itself
    reference: str  # the reference's name

    def leaves(self, subject: str) -> bool:
        """Whether it is outside of its tolerance, and no nearer to the truth than the reference's own rounding could have made it."""
        return subject in self.against and not self.against[subject].agrees and not self.excused(subject)

    def excused(self, subject: str) -> bool:
        """Whether it is about as near to the truth as the reference: then the two differ by what rounding has cost each of them."""
        mine, base = self.errors.get(subject), self.errors.get(self.reference)
        if mine is None or base is None or self.against[subject].nan_differ or self.against[subject].inf_differ or not self.kind.is_float:
            return False
        return _alike(mine, base)


def _alike(mine: Metrics, base: Metrics) -> bool:
    """Whether two errors against the truth differ by no more than two ways of computing do."""
    return mine.relative_rms <= ALIKE * base.relative_rms and mine.max_abs <= ALIKE * base.max_abs


@dataclasses.dataclass(frozen=True)
class Inside:
    """What was found. nonfinite: where NaN and infinity come from, for the reference and each
    subject. refused: nodes that float64 and the reference compute differently, with the reason.
    """

    rows: tuple[Row, ...]
    reference: Subject
    subjects: tuple[Subject, ...]
    has_truth: bool
    refused: dict[str, str]
    nonfinite: dict[str, nonfinite.Source]
    batches: int
    notes: tuple[str, ...]

    def first(self, subject: str) -> Row | None:
        """The first tensor that leaves its tolerance."""
        return next((row for row in self.rows if row.leaves(subject)), None)

    def culprit(self, subject: str) -> Row | None:
        """The first tensor that is wrong though its inputs are the reference's."""
        return next((row for row in self.rows if subject in row.wrong), None)


def look(
    reference: ModelSubject,
    subjects: Sequence[Subject],
    feeds: Feeds,
    runtime: Runtime,
    *,
    truth: bool = True,
    budget: int = BUDGET,
    progress: Progress = lambda text: None,
) -> Inside:
    """Compares every tensor of `reference` that one of `subjects` has, on one set of inputs, `budget` bytes at a time.

    OnnxfuseError: a model fails, crashes, takes too long, or does not fit into memory.
    """
    found = _Look(reference, subjects, feeds, runtime, truth, budget)
    return found.run(progress)


class _Look:
    def __init__(
        self, reference: ModelSubject, subjects: Sequence[Subject], feeds: Feeds, runtime: Runtime, truth: bool, budget: int
    ) -> None:
        self.reference, self.subjects, self.feeds, self.runtime, self.budget = reference, subjects, feeds, runtime, budget
        self.edges = {s.name: frozenset(n for n in s.kinds if n in reference.kinds) for s in subjects}
        shared = frozenset().union(*self.edges.values())
        self.order = [name for name in reference.pieces.producers if name in reference.kinds and (name in shared or self._decides(name))]
        self.shared = shared
        self.truth = _Truth(reference, feeds, runtime, self.order) if truth else None
        self.nonfinite = {s.name: nonfinite.Watch() for s in (reference, *subjects)}
        self.tops: dict[str, float] = {name: _top(np.asarray(value)) for name, value in feeds.items()}
        self.notes: dict[str, None] = {}
        self.failures = 0  # of pieces run alone

    def run(self, progress: Progress) -> Inside:
        rows: list[Row] = []
        batches = list(self._batches())
        done = 0
        for batch in batches:
            rows.extend(self._batch(batch, functools.partial(self._say, progress, done)))
            done += len(batch)
        sources = {}
        for subject in (self.reference, *self.subjects):
            progress(f"looking for NaN and infinity in {subject.name}")
            source = self.nonfinite[subject.name].explain(subject.pieces, subject.fetch, self.feeds)
            if source is not None:
                sources[subject.name] = source
        return Inside(
            tuple(rows),
            self.reference,
            tuple(self.subjects),
            self.truth is not None,
            {} if self.truth is None else self.truth.refused,
            sources,
            len(batches),
            (*self.notes, *self._loops()),
        )

    def _say(self, progress: Progress, done: int, what: str) -> None:
        progress(f"tensor {done + 1} of {len(self.order)}: {what}")

    def _loops(self) -> Iterator[str]:
        loops = self.reference.pieces.loops
        if loops:
            more = f" and {len(loops) - 3} more" if len(loops) > 3 else ""
            yield f"tensors inside of {', '.join(loops[:3])}{more} are computed once for every step, and are not compared; its results are"
        if self.reference.pieces.branches:
            yield f"{self.reference.pieces.branches} If nodes were looked into, in the branch that these inputs take"

    def _decides(self, name: str) -> bool:
        """Whether a tensor holds integers or booleans that were made of floats: float64 follows the reference there."""
        if self.reference.kinds[name].is_float:
            return False
        node = self.reference.pieces.producers[name]
        read = [self.reference.kinds.get(value) for value in names_read(node)]
        return node.op not in _SHAPES and any(kind is not None and kind.is_float for kind in read)

    # Batches ------------------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[str]]:
        """Names in order, as many as the budget has room for: their values on every side, and what their nodes read besides."""
        batch: list[str] = []
        held: set[str] = set()
        size = 0
        for name in self.order:
            more = [value for value in (name, *self._reads([name])) if value not in held and value in self.reference.kinds]
            cost = self._cost(name) + sum(self.reference.kinds[value].nbytes for value in more)
            if batch and size + cost > self.budget:
                yield batch
                batch, held, size = [], set(), 0
                more = [value for value in (name, *self._reads([name])) if value in self.reference.kinds]
                cost = self._cost(name) + sum(self.reference.kinds[value].nbytes for value in more)
            batch.append(name)
            held.update(more)
            size += cost
        if batch:
            yield batch

    def _cost(self, name: str) -> int:
        """Bytes of a tensor in all subjects, each for its own run and alone, and in float64."""
        sides = 2 * sum(s.kinds[name].nbytes for s in self.subjects if name in s.kinds)
        return sides + (8 * math.prod(self.reference.kinds[name].shape) if self.truth is not None else 0)

    def _reads(self, names: Sequence[str]) -> set[str]:
        """Tensors of the reference that are read to compute `names`, there and in the pieces of the subjects."""
        found = {value for name in names for value in names_read(self.reference.pieces.producers[name])}
        for subject in self.subjects:
            edges = self.edges[subject.name]
            mine = [name for name in names if name in edges]
            found.update(subject.needs(mine, edges))
            if _rounded(subject) is not None or self.truth is not None:
                found.update(self.reference.needs(mine, edges))
        return {value for value in found if value in self.reference.kinds}

    def _batch(self, batch: Sequence[str], progress: Progress) -> Iterator[Row]:
        progress(self.reference.name)
        want = self.reference.fetch(list(dict.fromkeys([*batch, *self._reads(batch)])))
        got: dict[str, Outputs] = {}
        alone: dict[str, Outputs] = {}
        price: dict[str, Outputs] = {}
        for subject in self.subjects:
            edges = self.edges[subject.name]
            names = [name for name in batch if name in edges]
            progress(subject.name)
            got[subject.name] = subject.fetch(names)
            progress(f"{subject.name}, piece by piece")
            alone[subject.name] = self._tried(subject, names, functools.partial(subject.alone, edges=edges, values=want))
            rounded = _rounded(subject)
            priced = [name for name in alone[subject.name] if rounded is not None and self.reference.kinds[name].is_float]
            price[subject.name] = self._tried(
                subject, priced, functools.partial(self.reference.alone, edges=edges, values=want, rounded=rounded)
            )
        true: Outputs = {}
        if self.truth is not None:
            progress("float64")
            true = self.truth.values(batch, {name: want[name] for name in batch if self._decides(name)}, want)
        for name in batch:
            self.tops[name] = _top(want[name])
            if any(name in values for values in got.values()):  # TensorRT may not write what was tapped
                yield self._row(name, want, got, alone, price, true.get(name))

    def _tried(self, subject: Subject, names: Sequence[str], work: Callable[[Sequence[str]], Outputs]) -> Outputs:
        """What `work` gives for `names`; where it fails, for as many of them as it does not fail for."""
        try:
            return work(names)
        except OnnxfuseError as error:
            if self.failures >= MOST_FAILURES:
                self.notes[f"{subject.name}: more pieces than these cannot be run alone, and were not tried one by one"] = None
                return {}
            if len(names) == 1:
                self.failures += 1
                self.notes[f"{subject.name}: what computes '{names[0]}' cannot be run alone ({str(error).split(': ', 1)[-1]:.160})"] = None
                return {}
        half = len(names) // 2
        return {**self._tried(subject, names[:half], work), **self._tried(subject, names[half:], work)}

    # One tensor -----------------------------------------------------------------------------------------------------------

    def _row(
        self,
        name: str,
        wanted: Outputs,
        got: Mapping[str, Outputs],
        alone: Mapping[str, Outputs],
        price: Mapping[str, Outputs],
        true: Any,
    ) -> Row:
        reference, want = self.reference, wanted[name]
        node = reference.pieces.producers[name]
        sides = [s for s in self.subjects if name in got[s.name]]
        against, by_itself, prices, errors, wrong = {}, {}, {}, {}, {}
        self.nonfinite[reference.name].see(name, want)
        for subject in sides:
            noise = self._noise(name, subject.limits.name)
            value = got[subject.name][name]
            self.nonfinite[subject.name].see(name, value)
            against[subject.name] = _measured(value, want, subject.limits, noise)
            if name in alone[subject.name]:
                by_itself[subject.name] = _measured(alone[subject.name][name], want, subject.limits, noise)
                if name in price[subject.name]:
                    prices[subject.name] = _measured(price[subject.name][name], want, subject.limits, noise)
                reason = _wrong(by_itself[subject.name], prices.get(subject.name), subject.limits, noise)
                on_edge = _rounded(subject) is not None and self._decides(name)  # a float on the edge may fall either way
                if reason and not on_edge and not self._as_near(subject, name, alone[subject.name][name], wanted):
                    wrong[subject.name] = reason
        if true is not None:
            errors[reference.name] = measure(want, true, reference.limits, same_dtype=False, noise=self._noise(name, "float32"))
            for subject in sides:
                value = got[subject.name][name]
                same = against[subject.name].is_same and subject.limits == reference.limits
                noise = self._noise(name, subject.limits.name)
                errors[subject.name] = errors[reference.name] if same else _measured(value, true, subject.limits, noise)
        edges = frozenset().union(*(self.edges[s.name] for s in sides)) if sides else frozenset()
        return Row(
            name=name,
            node=label(node),
            op=node.op,
            nodes=tuple(reversed([label(found) for found in reference.pieces.between(name, edges)])),
            kind=reference.kinds[name],
            is_output=name in reference.pieces.outputs,
            origins={s.name: s.pieces.origin(name, self.edges[s.name]) for s in sides},
            against=against,
            alone=by_itself,
            price=prices,
            errors=errors,
            truth="" if true is not None or self.truth is None else self.truth.why(name),
            taps={s.name: s.tap(name) for s in sides},
            wrong=wrong,
            reference=reference.name,
        )

    def _as_near(self, subject: Subject, name: str, own: Any, wanted: Outputs) -> bool:
        """Whether a piece in the reference's precision is about as near to float64, from the same inputs, as the reference is.

        Operands that cancel out inside of it leave noise to both.
        """
        if self.truth is None or _rounded(subject) is not None or not self.reference.kinds[name].is_float:
            return False
        true = self.truth.piece(name, self.edges[subject.name], wanted)
        if true is None:
            return False
        mine, base = (measure(value, true, subject.limits, same_dtype=False) for value in (own, wanted[name]))
        return not (mine.nan_differ or mine.inf_differ) and _alike(mine, base)

    def _noise(self, name: str, precision: str) -> float:
        """What rounding leaves of operands that cancel out: some units of the largest of them."""
        node = self.reference.pieces.producers[name]
        if node.op not in _CANCELS:
            return 0.0
        tops = [self._top_of(tensor) for tensor in node.inputs if tensor.name]
        return 4.0 * _ROUNDOFF.get(precision, 2.0**-11) * max(tops, default=0.0)

    def _top_of(self, tensor: Any) -> float:
        if tensor.name not in self.tops:
            values = query.constant(tensor)
            self.tops[tensor.name] = 0.0 if values is None else _top(values)
        return self.tops[tensor.name]


def _top(value: Any) -> float:
    """The largest finite magnitude of a floating tensor; 0 for anything else."""
    from onnxfuse.verify.worker import max_finite

    return max_finite(value) if _is_float(value) else 0.0


def _rounded(subject: Subject) -> Any:
    """The narrower floating type that a subject computes in; None for float32 and for what has no such type."""
    import ml_dtypes

    return {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(subject.limits.name)


def _measured(got: Any, want: Any, limits: Tolerance, noise: float) -> Metrics:
    """As is fit for a tensor inside of a model. Small integers of a quantized model are rounded numbers, and are judged as such."""
    steps = ("int8", "uint8", "int32")
    if limits.name == "quantized" and all(isinstance(value, np.ndarray) and value.dtype.name in steps for value in (got, want)):
        judged = measure(got.astype(np.float64), want.astype(np.float64), limits)
        return dataclasses.replace(judged, dtype=want.dtype.name, ulp=0.0)
    return measure(got, want, limits, same_dtype=False, noise=noise, saturates=True)


def _wrong(own: Metrics, price: Metrics | None, limits: Tolerance, noise: float) -> str:
    """Why what computes a tensor is wrong by itself; empty where it is not. price: what rounding to its precision costs there."""
    if price is None:
        return own.reason
    if own.nan_differ + own.inf_differ and not price.nan_differ + price.inf_differ:
        return own.reason
    most = TIMES_PRICE * price.relative_rms + ROUNDINGS * _ROUNDOFF.get(limits.name, 0.0)
    if own.relative_rms <= most or not own.max_abs > noise:
        return ""
    times = f"{own.relative_rms / price.relative_rms:.0f} times" if price.relative_rms else "above"
    cost = f"{times} the {price.relative_rms:.3g} that rounding to {limits.name} costs"
    return f"the error's norm is {own.relative_rms:.3g} of the reference's, {cost}"


# ------------------------------------------------------------------------------------------------------------------ truth


class _Truth:
    """The reference's model in float64. `refused`: tensors where the two do not compute the same thing, so that neither is called the
    truth; what is computed from those has none either.
    """

    def __init__(self, reference: ModelSubject, feeds: Feeds, runtime: Runtime, order: Sequence[str]) -> None:
        self.reference, self.feeds, self.runtime = reference, feeds, runtime
        self.refused: dict[str, str] = {}
        self._missing: dict[str, str] = {}
        self._tainted: set[str] = set()
        self._path = reference.pieces.path
        self._lost = ""
        try:
            runtime.truth_start(self._path, feeds, order)
        except OnnxfuseError as error:
            self._lost = f"no evaluation in float64: {error}"

    def why(self, name: str) -> str:
        return self._lost or self._missing.get(name) or self.refused.get(name) or "float64 went another way before it"

    def values(self, names: Sequence[str], decisions: Feeds, want: Mapping[str, Any]) -> Outputs:
        """The truth of `names`, less those without one. want: the reference's values of them and of all that their nodes read."""
        if self._lost:
            return {}
        try:
            found, missing = self.runtime.truth(self._path, names, decisions)
        except OnnxfuseError as error:  # a child that crashed on something else took it along
            self._lost = f"the evaluation in float64 ended: {error}"
            return {}
        self._missing.update(missing)
        doubtful = [
            name
            for name, value in found.items()
            if self.reference.kinds[name].is_float and not _explained(want[name], value, self.reference.limits)
        ]
        checked = self._checked(doubtful, want)
        for name in names:
            node = self.reference.pieces.producers[name]
            if any(read in self._tainted for read in names_read(node)):
                if self.reference.kinds[name].is_float:
                    self._tainted.add(name)
            elif name in checked:
                self.refused[name] = checked[name]
                self._tainted.add(name)
        return {name: value for name, value in found.items() if name not in self._tainted}

    def piece(self, name: str, edges: Collection[str], want: Mapping[str, Any]) -> Any:
        """Tensor `name` in float64, computed by the reference's nodes from its own values of `edges`; None where there is none."""
        if self._lost:
            return None
        pieces = self.reference.pieces
        inside = {id(node) for node in pieces.between(name, edges)}
        values = {**self.feeds, **want}
        for node in (node for node in pieces.model.graph.nodes if id(node) in inside):
            read = names_read(node)
            if any(value not in values for value in read):
                return None
            given = {value: values[value] for value in read}
            for made in node.outputs:
                if made.name != name and (not made.name or made.name in edges):
                    continue
                values[made.name] = self.runtime.truth_again(self._path, made.name, given)
                if values[made.name] is None:
                    return None
        return values[name]

    def _checked(self, names: Sequence[str], want: Mapping[str, Any]) -> dict[str, str]:
        """Those of `names` whose node, given the reference's inputs, gives something else in float64: its fault or the reference's.

        Where it gives the same, the difference came with the inputs: float32 has lost that much by here.
        """
        found = {}
        for name in names:
            node = self.reference.pieces.producers[name]
            known = {**self.feeds, **want}
            values = {read: known[read] for read in names_read(node) if read in known}
            again = self.runtime.truth_again(self._path, name, values)
            if again is None:
                continue
            metrics = measure(want[name], again, self.reference.limits, same_dtype=False, noise=_cancelled(node.op, values))
            if not metrics.agrees:
                found[name] = (
                    f"node '{label(node)}' ({node.op}) alone differs from float64 by more than {self.reference.limits.name} explains"
                )
        return found


def _cancelled(op: str, values: Mapping[str, Any]) -> float:
    return 4.0 * _ROUNDOFF["float32"] * max((_top(value) for value in values.values()), default=0.0) if op in _CANCELS else 0.0


def _explained(got: Any, true: Any, limits: Tolerance) -> bool:
    """Whether rounding explains the difference; values beyond float32 may have become infinite."""
    if not isinstance(got, np.ndarray) or not isinstance(true, np.ndarray):
        return True
    return measure(got, true, limits, same_dtype=False, saturates=True).agrees
