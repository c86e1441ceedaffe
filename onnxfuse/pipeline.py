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
from onnxfuse.fusions.base import Index, Miss, apply, find
from onnxfuse.graph import clean, functions, precision, read, write
from onnxfuse.graph.model import Model
from onnxfuse.plan import planfile, policy, verdicts
from onnxfuse.plan.sites import Decision, Site

if TYPE_CHECKING:
    from onnxfuse.gpus import Gpu
    from onnxfuse.verify.check import Check
    from onnxfuse.verify.reference import Feeds

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
    converted: precision.PrecisionReport | None = None
    check: Check | None = None
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
    if plan is not None:
        _refuse_unused(plan, rules, decisions)
    converted = None
    if precision in ("fp16", "bf16"):
        feeds = feeds or clock.step("inputs", "making inputs", lambda: _generated(model))
        converted = clock.step("precision", f"converting to {precision}", lambda: _convert(loaded, model, precision, keep_fp32, feeds, progress))
    checked = None
    if out is not None:
        clock.step("write", "writing", lambda: write.save(loaded, out))
        if check:
            feeds = feeds or clock.step("inputs", "making inputs", lambda: _generated(model))
            checked = clock.step("check", "checking in onnxruntime", lambda: _check(model, out, feeds, progress))
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


def undo(model: Path, out: Path, *, feeds: Sequence[Feeds] | None = None, check: bool = True, progress: Progress = silent) -> tuple[int, Check | None]:
    """Takes every fused node of `model` apart again, into `out`; returns how many there were, and what the check found."""
    progress("loading")
    loaded = read.load(model)
    count = functions.undo(loaded)
    progress("writing")
    write.save(loaded, out)
    if not check:
        return count, None
    return count, _check(model, out, feeds or _generated(model), progress)


def _rules(name: str, only: Sequence[str], skip: Sequence[str], plan: Path | None, gpu: Gpu | None) -> policy.Rules:
    return policy.Rules(
        policy=name,
        selection=policy.Selection(tuple(only), tuple(skip)),
        plan={} if plan is None else planfile.read(plan),
        verdicts=verdicts.shipped(),
        gpu=None if gpu is None else gpu.name,
    )


def _refuse_unused(plan: Path, rules: policy.Rules, decisions: Sequence[Decision]) -> None:
    stray = policy.unused(dict(rules.plan), decisions)
    if stray:
        fusion, output = stray[0]
        raise BadInput(f"plan {plan}: this model has no site of {fusion} at '{output}'; make a plan of this model with --report")


def _count(model: Model) -> int:
    return sum(len(graph.nodes) for graph in model.graphs())


def _generated(model: Path) -> list[Feeds]:
    from onnxfuse.verify import inputs

    return inputs.generate(model, count=2)


def _convert(model: Model, source: Path, to: str, keep_fp32: Sequence[str], feeds: Sequence[Feeds], progress: Progress) -> precision.PrecisionReport:
    """Ranges are those of the source in float32: tensors of the rewritten graph that survive carry the same names."""
    from onnxfuse.verify import reference

    ranges = reference.ranges(source, feeds) if to == "fp16" else None
    progress(f"converting to {to}")
    return precision.convert(model, to, keep_fp32, ranges)


def _check(original: Path, rewritten: Path, feeds: Sequence[Feeds], progress: Progress) -> Check:
    from onnxfuse.verify import check

    return check.check_models(original, rewritten, feeds, progress=progress)
