"""The way of a model: load, clean, and for each fusion in turn match, decide and rewrite; then precision, write and check.

Data goes one way. What each step found is kept in the result, which reports are made of.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_graphsurgeon as gs

from onnxfuse import __version__
from onnxfuse.errors import BadInput
from onnxfuse.fusions import REGISTRY
from onnxfuse.fusions.base import Fusion, Index, Miss, apply, find, label
from onnxfuse.graph import clean, functions, garbage, query, read, shapes, write
from onnxfuse.graph.model import Model
from onnxfuse.graph.precision import Precision, PrecisionReport, convert
from onnxfuse.plan import planfile, policy, store, verdicts
from onnxfuse.plan.measure import Place
from onnxfuse.plan.sites import Decision, Site
from onnxfuse.verify import reference
from onnxfuse.verify.check import Check, Reference, check_rewritten, generated, run_feeds
from onnxfuse.verify.reference import Feeds

if TYPE_CHECKING:
    from onnxfuse.gpus import Gpu

SCHEMA = 2  # of reports: onnxfuse/report/schema.json
PRECISIONS = ("keep", "fp32", "fp16", "bf16")
HALVES = ("fp16", "bf16")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What optimizing a model did.

    cleaned: nodes removed by each kind of cleaning. decisions: every legal site and what became of it. misses: where a fusion
    nearly held, and why not. converted: what the conversion of precision did, None where it was kept. check: None where it was not
    asked for. seconds: by step. measured: the parts of a report that policy measure adds.
    """

    model: Path
    out: Path | None
    gpu: str | None
    policy: str
    precision: str
    nodes_before: int
    nodes_after: int
    cleaned: dict[str, int]
    decisions: tuple[Decision, ...]
    misses: tuple[Miss, ...]
    converted: PrecisionReport | None = None
    check: Check | None = None
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        return self.check is None or self.check.agrees

    def to_dict(self) -> dict[str, Any]:
        """The report, as JSON values. It is a plan file, too."""
        return {
            "schema": SCHEMA,
            "kind": "optimize",
            "onnxfuse": __version__,
            "model": {"name": self.model.name, "path": str(self.model)},
            "out": None if self.out is None else str(self.out),
            "gpu": self.gpu,
            "policy": self.policy,
            "precision": self.precision,
            "nodes": {"before": self.nodes_before, "after": self.nodes_after},
            "cleaned": self.cleaned,
            "sites": [decision.to_dict() for decision in self.decisions],
            "misses": [vars(miss) | {"nodes": list(miss.nodes)} for miss in self.misses],
            "converted": None if self.converted is None else asdict(self.converted),
            "check": None if self.check is None else self.check.to_dict(),
            "notes": list(self.notes),
            "seconds": self.seconds,
            **self.measured,
        }


def silent(_: str) -> None:
    """Progress that nobody watches."""


class _Clock:
    """Seconds spent in each step, and word of each step to whoever watches."""

    def __init__(self, say: Progress) -> None:
        self.say = say
        self.seconds: dict[str, float] = {}

    def step(self, name: str, words: str, work: Callable[[], Any]) -> Any:
        self.say(words)
        started = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 4)


def optimize(
    model: Path,
    out: Path | None,
    *,
    policy: str = "proven",
    precision: str = "keep",
    gpu: Gpu | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    plan: Path | None = None,
    measured: planfile.Plan | None = None,
    keep_fp32: Sequence[str] = (),
    feeds: Sequence[Feeds] | None = None,
    dims: Mapping[str, int] | None = None,
    ranges: Mapping[str, float] | None = None,
    check: bool = True,
    progress: Progress = silent,
) -> Result:
    """Rewrites `model` and writes it to `out`; with `out` None nothing is written or checked.

    measured: for policy measure, what `onnxfuse.measuring` found. feeds: inputs for the check and for the ranges of a precision
    conversion; where none are given they are generated, with `dims` as the sizes of symbolic dimensions, which decide on verdicts,
    too. ranges: the largest magnitude of each tensor of `model`, where they were measured before. Raises BadInput for what is wrong with
    the arguments or the model, OnnxfuseError where the model takes none of the inputs. Disagreement is not raised: see `Result.agrees`.
    """
    if policy == "measure" and measured is None:
        raise BadInput("--policy measure: nothing was measured; `onnxfuse optimize --policy measure` measures, on a machine with a GPU")
    rules = _rules(policy, only, skip, plan, measured, gpu, precision, dims or {})
    if precision not in PRECISIONS:
        raise BadInput(f"--precision {precision}: no such precision; there are {', '.join(PRECISIONS)}")
    clock = _Clock(progress)
    converted = checked = None
    with contextlib.ExitStack() as stack:
        with garbage.paused():
            loaded: Model = clock.step("load", "loading", lambda: read.load(model))
            loaded.becomes_half = precision in HALVES
            before = _count(loaded)
            cleaned = clock.step("clean", "cleaning", lambda: tidy(loaded))
            decisions, misses = clock.step("fuse", "matching and rewriting", lambda: rewrite(loaded, rules))
            notes = (*rules.notes, *(() if plan is None else _stray(plan, rules, decisions)))
            half: Precision | None = "fp16" if precision == "fp16" else "bf16" if precision == "bf16" else None
            unmeasured = precision == "fp16" and ranges is None
            if unmeasured or (check and out is not None):
                child = stack.enter_context(reference.Runtime())
                given = clock.step("reference", "running the original", lambda: _reference(child, model, feeds, dims, progress))
            if unmeasured:
                # What is left of the source's tensors after rewriting has kept its name, and so its range.
                ranges = clock.step("ranges", "measuring ranges", lambda: child.ranges(model, given.feeds))
            if half:
                kept = _where_now(keep_fp32, decisions)
                converted = clock.step("precision", f"converting to {precision}", lambda: convert(loaded, half, kept, ranges))
            if out is not None:
                clock.step("write", "writing", lambda: write.save(loaded, out))
        if check and out is not None:
            checked = clock.step("check", "checking", lambda: check_rewritten(child, model, given, out, progress=progress))
    return Result(
        model=model,
        out=out,
        gpu=rules.target.gpu,
        policy=policy,
        precision=precision,
        nodes_before=before,
        nodes_after=_count(loaded),
        cleaned=cleaned,
        decisions=tuple(decisions),
        misses=tuple(misses),
        converted=converted,
        check=checked,
        notes=notes,
        seconds=clock.seconds,
    )


def _where_now(names: Sequence[str], decisions: Sequence[Decision]) -> list[str]:
    """Names of nodes, with the fused node in the place of each that went into one."""
    now = list(names)
    for decision in decisions:
        if decision.fused and decision.node and not set(decision.site.nodes).isdisjoint(now):
            now = [decision.node, *(name for name in now if name not in decision.site.nodes)]
    return now


def tidy(model: Model) -> dict[str, int]:
    """Cleans and proves shapes equal, in place; again where a proof gave a Shape node its value. Returns the nodes that went, by kind."""
    counts = Counter(clean.clean(model))
    shapes.refine(model)
    while any(node.op == "Shape" and _is_known(node.inputs[0]) for graph in model.graphs() for node in graph.nodes):
        more = clean.clean(model)
        if not more:
            break  # it makes a graph output, and stays
        counts.update(more)
        shapes.refine(model)
    return dict(sorted(counts.items()))


def _is_known(value: gs.Tensor) -> bool:
    dims = query.shape(value)
    return dims is not None and all(isinstance(size, int) for size in dims)


def rewrite(model: Model, rules: policy.Rules) -> tuple[list[Decision], list[Miss]]:
    """Every fusion of the registry in turn, in place: find its sites, decide on each, rewrite the chosen ones.

    Folding is repeated until it finds nothing more: what one folds into a Conv, the next may go on with.
    """
    decisions: dict[tuple[str, str], Decision] = {}
    misses: dict[str, list[Miss]] = {}
    index: Index | None = None
    for kind, fusions in itertools.groupby(REGISTRY, lambda fusion: fusion.kind):
        stage, more = list(fusions), True
        if kind == "fused" and rules.companions:
            index = Index.of(model) if index is None else index
            rules = rules.among(_present(stage, model, index, rules))
        while more:
            more = False
            for fusion in stage:
                index = Index.of(model) if index is None else index
                decided, misses[fusion.name] = _rewrite_one(fusion, model, index, rules)
                decisions.update((decision.site.key, decision) for decision in decided)
                if any(decision.fused for decision in decided):
                    index = None  # read again by the next fusion
                    more = more or kind == "folding"
    functions.drop_unused(model)
    # A place that one fusion took is no near miss of another.
    taken = {node for decision in decisions.values() if decision.fused for node in decision.site.nodes}
    left = [miss for miss in itertools.chain.from_iterable(misses.values()) if not taken.issuperset(miss.nodes)]
    return list(decisions.values()), left


def sites(
    model: Path, only: Sequence[str] = (), skip: Sequence[str] = (), precision: str = "keep"
) -> tuple[tuple[Place, ...], tuple[Site, ...]]:
    """What there is to measure in a model: every site of a fusion that may cost something, also where they claim the same nodes; and the
    sites of what costs nothing.

    All are found where nothing else is fused, so that a site shows that would be gone with another one fused. One that shows only where
    others are fused (of a fusion that needs them, or that is built on what they write) says which.
    """

    def decided(**rules: Any) -> list[Decision]:
        loaded = read.load(model)
        loaded.becomes_half = precision in HALVES
        tidy(loaded)
        return rewrite(loaded, policy.Rules(selection=policy.Selection(tuple(only), tuple(skip)), **rules))[0]

    by_name = {fusion.name: fusion for fusion in REGISTRY}
    costly = {fusion.name for fusion in REGISTRY if fusion.kind != "canonical" and not fusion.free}
    with garbage.paused():
        alone, together = decided(policy="measure"), decided(policy="all")
        excluded = {name for name in costly if policy.Selection(tuple(only), tuple(skip)).excluded(by_name[name])}
        found = {d.site.key: Place(d.site) for d in alone if d.site.fusion in costly - excluded}
        unseen = {d.site.fusion for d in together if d.fused and d.site.fusion in costly and d.site.key not in found}
        for fusion in REGISTRY:
            before = [name for name in fusion.needs if name in costly]
            if fusion.name not in costly - excluded or not (before or fusion.name in unseen):
                continue
            others = [fused.site.fusion for fused in together if fused.fused and fused.site.fusion in costly - {fusion.name}]
            for enabling in [before] if before else [*([name] for name in dict.fromkeys(others)), others]:
                needs = {key: (True, "") for key, place in found.items() if place.site.fusion in enabling}
                new = [d.site for d in decided(policy="measure", measured=needs) if d.site.fusion == fusion.name]
                if before:
                    found = {key: place for key, place in found.items() if place.site.fusion != fusion.name}
                for site in new:
                    found.setdefault(site.key, Place(site, frozenset(needs)))
    free = tuple(d.site for d in alone if d.fused and by_name[d.site.fusion].free)
    return tuple(found.values()), free


def _present(stage: Sequence[Fusion], model: Model, index: Index, rules: policy.Rules) -> set[str]:
    """Those of the fusions beside which others were measured that may be fused in this model."""
    asked = [fusion for fusion in stage if fusion.name in rules.companions and not rules.selection.excluded(fusion)]
    return {fusion.name for fusion in asked if find(fusion, model, index)[0]}


def _rewrite_one(fusion: Fusion, model: Model, index: Index, rules: policy.Rules) -> tuple[list[Decision], list[Miss]]:
    matches, misses = find(fusion, model, index)
    decided = [policy.decide(fusion, Site.of(match), rules) for match in matches]
    nodes = iter(apply(fusion, [match for match, decision in zip(matches, decided, strict=True) if decision.fused], model))
    return [replace(decision, node=next(nodes).name) if decision.fused else decision for decision in decided], misses


@dataclass(frozen=True)
class Answer:
    """What one fusion says of a node: it is part of a site, or how far the best attempt that met it came (nodes) and why it ended."""

    fusion: str
    fits: bool
    root: str
    nodes: tuple[str, ...]
    reason: str


@garbage.paused()
def why_not(model: Path, name: str) -> list[Answer] | None:
    """What every fusion of the registry says of the node or tensor called `name`, the closest first; None where there is none.

    No fusion says anything of a graph input, or of what cleaning takes out.
    """
    loaded = read.load(model)
    known = {n for graph in loaded.graphs() for node in graph.nodes for n in (node.name, *(t.name for t in (*node.inputs, *node.outputs)))}
    tidy(loaded)
    followed = {label(node) for graph in loaded.graphs() for node in graph.nodes if name in (node.name, *(t.name for t in node.outputs))}
    if not followed:
        return [] if name in known else None
    answers: list[Answer] = []
    for fusion in REGISTRY:
        matches, misses = find(fusion, loaded, Index.of(loaded), far=True)
        sites = [tuple(label(node) for node in match.nodes) for match in matches]
        roots = [label(match.root) for match in matches]
        made = apply(fusion, matches, loaded)
        for nodes, root, node in zip(sites, roots, made, strict=True):
            if followed & set(nodes):
                answers.append(Answer(fusion.name, True, root, nodes, f"is a site; becomes {node.op} '{node.name}'"))
                followed.add(label(node))
        met = [miss for miss in misses if followed & {miss.root, miss.at, *miss.nodes}]
        if met and not any(answer.fusion == fusion.name for answer in answers):
            best = max(met, key=lambda miss: len(miss.nodes))
            answers.append(Answer(fusion.name, False, best.root, best.nodes, best.reason))
    return sorted(answers, key=lambda answer: (not answer.fits, -len(answer.nodes)))


def undo(
    model: Path,
    out: Path,
    *,
    feeds: Sequence[Feeds] | None = None,
    dims: Mapping[str, int] | None = None,
    check: bool = True,
    progress: Progress = silent,
) -> tuple[int, Check | None]:
    """Takes every fused node of `model` apart again, into `out`; returns how many there were, and what the check found."""
    progress("loading")
    loaded = read.load(model)
    count = functions.undo(loaded)
    progress("writing")
    write.save(loaded, out)
    if not check:
        return count, None
    with reference.Runtime() as child:
        return count, check_rewritten(child, model, _reference(child, model, feeds, dims, progress), out, progress=progress)


def _reference(
    child: reference.Runtime, model: Path, feeds: Sequence[Feeds] | None, dims: Mapping[str, int] | None, progress: Progress
) -> Reference:
    """Inputs, given or generated, and the model's outputs for them."""
    if feeds is None:
        return generated(child, model, count=2, dims=dims, progress=progress).whole()
    return Reference(feeds, *run_feeds(child, model, feeds, progress))


def _rules(
    name: str,
    only: Sequence[str],
    skip: Sequence[str],
    plan: Path | None,
    measured: planfile.Plan | None,
    gpu: Gpu | None,
    precision: str,
    sizes: Mapping[str, int],
) -> policy.Rules:
    known = store.load() if name == "proven" else store.Contents((), ())
    return policy.Rules(
        policy=name,
        selection=policy.Selection(tuple(only), tuple(skip)),
        plan={} if plan is None else planfile.read(plan),
        verdicts=known.verdicts,
        target=verdicts.Target.of(gpu) if name == "proven" else verdicts.Target(None if gpu is None else gpu.name),
        dtype=verdicts.DTYPES.get(precision),
        sizes=sizes,
        measured=measured or {},
        notes=known.problems,
    )


def _stray(plan: Path, rules: policy.Rules, decisions: Sequence[Decision]) -> tuple[str, ...]:
    """A note for each entry of the plan that names no site; a plan of which none does belongs to another model."""
    stray = policy.unused(rules.plan, decisions)
    if rules.plan and len(stray) == len(rules.plan):
        raise BadInput(f"plan {plan}: none of its sites is in this model; make a plan of this model with --report")
    return tuple(f"the plan's site of {fusion} at '{output}' is not in this model" for fusion, output in stray)


def _count(model: Model) -> int:
    return sum(len(graph.nodes) for graph in model.graphs())
