"""Policies: who decides whether a legal site is fused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxfuse import gpus
from onnxfuse.errors import BadInput
from onnxfuse.fusions import NAMES, REGISTRY
from onnxfuse.fusions.base import Fusion
from onnxfuse.plan import verdicts as records
from onnxfuse.plan.planfile import Plan
from onnxfuse.plan.sites import Decision, Site
from onnxfuse.plan.verdicts import Target, Verdict

POLICIES = ("none", "all", "proven", "measure")


@dataclass(frozen=True)
class Selection:
    """Which fusions may be used at all: `only` these and those they are built on, and none of `skip`."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, names in (("--only", self.only), ("--skip", self.skip)):
            unknown = [name for name in names if name not in NAMES]
            if unknown:
                raise BadInput(f"{option} {unknown[0]}: no such fusion; there are {', '.join(NAMES)}")

        both = [name for name in self.only if name in self.skip]
        if both:
            raise BadInput(f"--only {both[0]} and --skip {both[0]} exclude each other; leave one of them out")

    def excluded(self, fusion: Fusion) -> str | None:
        """The reason why `fusion` is not looked for; None where it is."""
        if fusion.name in self.skip:
            return "left out by --skip"
        if self.only and fusion.name not in self.only:
            needed = {name for other in REGISTRY if other.name in self.only for name in other.needs}
            if fusion.name not in needed:
                return "left out by --only"
        return None


@dataclass(frozen=True)
class Rules:
    """All that decides a site. verdicts: those measured here before those that ship. dtype: what float32 will be converted to.

    sizes: lengths of symbolic axes, where they are known. measured: what policy measure found, in the form of a plan. notes: what a
    reader of the report should know, one line each.
    """

    policy: str = "proven"
    selection: Selection = field(default_factory=Selection)
    plan: Plan = field(default_factory=dict)
    verdicts: Sequence[Verdict] = ()
    target: Target = field(default_factory=Target)
    dtype: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    measured: Plan = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def companions(self) -> frozenset[str]:
        """Fusions beside which others were measured."""
        return frozenset(name for verdict in self.verdicts for name in verdict.beside)

    def among(self, present: Collection[str]) -> Rules:
        """The same, for a model that has sites of the fusions `present`: what was measured beside others says nothing of it."""
        return replace(self, verdicts=[verdict for verdict in self.verdicts if set(verdict.beside) <= set(present)])

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput(f"--policy {self.policy}: no such policy; there are {', '.join(POLICIES)}")


def decide(fusion: Fusion, site: Site, rules: Rules) -> Decision:
    """The first that has a say decides: --skip and --only, the plan file, then the policy."""
    excluded = rules.selection.excluded(fusion)
    if excluded:
        return Decision(site, False, excluded)
    if site.key in rules.plan:
        fused, reason = rules.plan[site.key]
        return Decision(site, fused, f"plan file: {reason}" if reason else "plan file")
    if fusion.kind == "canonical":
        return Decision(site, True, "canonical: one node for what was spelled out")
    if rules.policy == "none":
        return Decision(site, False, "policy none only cleans and canonises")
    elsewhere = _without_kernel(fusion, site, rules)
    if elsewhere:
        return Decision(site, False, elsewhere)
    if rules.policy == "all":
        return Decision(site, True, "policy all takes every legal site")
    if rules.policy == "measure" and site.key in rules.measured:
        return Decision(site, *rules.measured[site.key])
    if fusion.free:
        return Decision(site, True, "folding that costs nothing")
    if rules.policy == "measure":
        return Decision(site, False, "not measured")
    return _proven(site, rules)


def _without_kernel(fusion: Fusion, site: Site, rules: Rules) -> str | None:
    """Why a fusion has no kernel for this site on the GPU that is meant, where one is known."""
    name = rules.target.gpu
    if fusion.architectures and name is not None and (sm := gpus.resolve(name).sm) not in fusion.architectures:
        made_for = " and ".join(f"sm_{known}" for known in fusion.architectures)
        return f"its kernel is for {made_for}, and {name} is sm_{sm}: left to TensorRT"
    dtype = rules.dtype or site.dtype
    if name is not None and dtype in ("float16", "bfloat16") and (sm := gpus.resolve(name).sm) < fusion.half_from:
        return f"its kernel takes {dtype} from sm_{fusion.half_from} on, and {name} is sm_{sm}: left to TensorRT"
    if rules.policy != "all" and fusion.dtypes and dtype not in fusion.dtypes:
        return f"its kernel takes {' and '.join(fusion.dtypes)}, not {dtype}: left to TensorRT"
    return None


def _proven(site: Site, rules: Rules) -> Decision:
    found = records.nearest(rules.verdicts, site.sized(rules.sizes), rules.target, rules.dtype)
    if found is None:
        return Decision(site, False, "never measured at this width: left to TensorRT's own fusion")
    return Decision(site, found.wins, found.reason)


def unused(plan: Plan, decisions: Sequence[Decision]) -> list[tuple[str, str]]:
    """Entries of a plan that name no site of this model."""
    seen = {decision.site.key for decision in decisions}
    return [key for key in plan if key not in seen]
