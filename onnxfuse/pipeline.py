"""The way of a model: load, clean, and for each fusion in turn match, decide and rewrite; then precision, write and check.

Data goes one way. What each step found is kept in the result, which reports are made of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxfuse import __version__
from onnxfuse.errors import BadInput
from onnxfuse.fusions import REGISTRY
from onnxfuse.fusions.base import Index, Miss, apply, find, label
from onnxfuse.graph import clean, functions, read, write
from onnxfuse.graph.model import Model
from onnxfuse.plan import planfile, policy, verdicts
from onnxfuse.plan.sites import Decision, Site
from onnxfuse.verify import inputs, reference
from onnxfuse.verify.check import Check, check_models
from onnxfuse.verify.reference import Feeds

if TYPE_CHECKING:
    from onnxfuse.gpus import Gpu
    from onnxfuse.graph.precision import PrecisionReport

SCHEMA = "onnxfuse/optimize/1"
PRECISIONS = ("keep", "fp32", "fp16", "bf16")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What optimizing a model did.

    cleaned: nodes removed by each kind of cleaning. decisions: every legal site and what became of it. misses: where a
    fusion nearly held, and why not. precision: what the conversion did, None where precision was kept. check: None where it was not asked for.
    seconds: by step.
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

    @property
    def agrees(self) -> bool:
        return self.check is None or self.check.agrees

    def to_dict(self) -> dict[str, Any]:
        """The report, as JSON values. It is a plan file, too."""
        return {
            "schema": SCHEMA,
            "onnxfuse": __version__,
            "model": str(self.model),
            "out": None if self.out is None else str(self.out),
            "gpu": self.gpu,
            "policy": self.policy,
            "precision": self.precision,
            "nodes": {"before": self.nodes_before, "after": self.nodes_after},
            "cleaned": self.cleaned,
            "sites": [decision.to_dict() for decision in self.decisions],
            "misses": [vars(miss) | {"nodes": list(miss.nodes)} for miss in self.misses],
            "converted": None if self.converted is None else self.converted.to_dict(),
            "check": None if self.check is None else self.check.to_dict(),
            "notes": list(self.notes),
            "seconds": self.seconds,
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
    keep_fp32: Sequence[str] = (),
    feeds: Sequence[Feeds] | None = None,
    check: bool = True,
    progress: Progress = silent,
) -> Result:
    """Rewrites `model` and writes it to `out`; with `out` None nothing is written or checked.

    feeds: inputs for the check and for the ranges of a precision conversion; generated where none are given.
    Raises BadInput for what is wrong with the arguments or the model. Disagreement is not raised: see `Result.agrees`.
    """
    rules = _rules(policy, only, skip, plan, gpu)
    if precision not in PRECISIONS:
        raise BadInput(f"--precision {precision}: no such precision; there are {', '.join(PRECISIONS)}")
    clock = _Clock(progress)
    loaded: Model = clock.step("load", "loading", lambda: read.load(model))
    before = _count(loaded)
    cleaned = clock.step("clean", "cleaning", lambda: clean.clean(loaded))
    decisions, misses = clock.step("fuse", "matching and rewriting", lambda: rewrite(loaded, rules))
    notes = () if plan is None else _stray(plan, rules, decisions)
    halved, checked_here = precision in ("fp16", "bf16"), check and out is not None
    if feeds is None and (halved or checked_here):
        feeds = clock.step("inputs", "making inputs", lambda: inputs.generate(model, count=2))
    converted = checked = None
    if halved:
        converted = clock.step("precision", f"converting to {precision}", lambda: _convert(loaded, model, precision, keep_fp32, feeds or ()))
    if out is not None:
        clock.step("write", "writing", lambda: write.save(loaded, out))
    if checked_here:
        checked = clock.step("check", "checking in onnxruntime", lambda: check_models(model, out, feeds or (), progress=progress))
    return Result(
        model=model,
        out=out,
        gpu=rules.gpu,
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


def rewrite(model: Model, rules: policy.Rules) -> tuple[list[Decision], list[Miss]]:
    """Every fusion of the registry in turn, in place: find its sites, decide on each, rewrite the chosen ones."""
    decisions: list[Decision] = []
    misses: list[Miss] = []
    index = Index.of(model)
    for fusion in REGISTRY:
        matches, missed = find(fusion, model, index)
        decided = [policy.decide(fusion, Site.of(match), rules) for match in matches]
        nodes = apply(fusion, [match for match, decision in zip(matches, decided, strict=True) if decision.fused], model)
        names = iter(nodes)
        decisions += [Decision(d.site, d.fused, d.reason, next(names).name if d.fused else None) for d in decided]
        misses += missed
        if nodes:
            index = Index.of(model)
    functions.drop_unused(model)
    return decisions, misses


@dataclass(frozen=True)
class Answer:
    """What one fusion says of a node: it is part of a site, or how far the best attempt that met it came (nodes) and why it ended."""

    fusion: str
    fits: bool
    root: str
    nodes: tuple[str, ...]
    reason: str


def why_not(model: Path, name: str) -> list[Answer] | None:
    """What every fusion of the registry says of the node or tensor called `name`, the closest first; None where there is none."""
    loaded = read.load(model)
    clean.clean(loaded)
    followed = {label(node) for graph in loaded.graphs() for node in graph.nodes if name in (node.name, *(t.name for t in node.outputs))}
    if not followed:
        return None
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


def undo(model: Path, out: Path, *, feeds: Sequence[Feeds] | None = None, check: bool = True, progress: Progress = silent) -> tuple[int, Check | None]:
    """Takes every fused node of `model` apart again, into `out`; returns how many there were, and what the check found."""
    progress("loading")
    loaded = read.load(model)
    count = functions.undo(loaded)
    progress("writing")
    write.save(loaded, out)
    if not check:
        return count, None
    return count, check_models(model, out, feeds or inputs.generate(model, count=2), progress=progress)


def _rules(name: str, only: Sequence[str], skip: Sequence[str], plan: Path | None, gpu: Gpu | None) -> policy.Rules:
    return policy.Rules(
        policy=name,
        selection=policy.Selection(tuple(only), tuple(skip)),
        plan={} if plan is None else planfile.read(plan),
        verdicts=verdicts.shipped(),
        gpu=None if gpu is None else gpu.name,
    )


def _stray(plan: Path, rules: policy.Rules, decisions: Sequence[Decision]) -> tuple[str, ...]:
    """A note for each entry of the plan that names no site; a plan of which none does belongs to another model."""
    stray = policy.unused(rules.plan, decisions)
    if rules.plan and len(stray) == len(rules.plan):
        raise BadInput(f"plan {plan}: none of its sites is in this model; make a plan of this model with --report")
    return tuple(f"the plan's site of {fusion} at '{output}' is not in this model" for fusion, output in stray)


def _count(model: Model) -> int:
    return sum(len(graph.nodes) for graph in model.graphs())


def _convert(model: Model, source: Path, to: str, keep_fp32: Sequence[str], feeds: Sequence[Feeds]) -> PrecisionReport:
    """The ranges are those of the source in float32; what is left of its tensors after rewriting has kept its name."""
    from onnxfuse.graph import precision

    ranges = reference.ranges(source, feeds) if to == "fp16" else None
    return precision.convert(model, to, keep_fp32, ranges)
