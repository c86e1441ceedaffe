"""The search of policy measure: which groups of sites are faster than TensorRT alone, together and when built again.

Sites are grouped by fusion and shape class, those of generated kernels by their form, too. First come bundles: all groups of one fusion,
and those of fusions that belong together, which may win although each group alone loses at its borders. Then each group alone is built
and timed against the automatic engine; what wins is combined, as gains do not add up; groups of a bundle that bring nothing are dropped;
and the best plan is timed once more from a rebuild of both engines. What is no win is left to TensorRT.

The search knows neither TensorRT nor files: it is given the unit of work, `run`, and orders candidates one after the other. For n
groups and b bundles it orders at most 1 + b + n + MOST_COMBINATIONS + MOST_DROPPED + MOST_FINALS of them, each of which builds one
engine; the automatic engine is built twice, once for the search and once for the final.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from onnxfuse.bench.stats import BUILD_DIFFERENCE
from onnxfuse.errors import BadInput, MissingHere
from onnxfuse.plan.sites import Site
from onnxfuse.plan.verdicts import APART, UNKNOWN_ROWS, shape_class

if TYPE_CHECKING:
    from onnxfuse.bench.candidate import Candidate

MOST_COMBINATIONS = 6
MOST_DROPPED = 6
MOST_FINALS = 3
MOST_APART = 8  # groups of a fusion in APART

_MOST_NAMED = 4  # groups of a plan, beyond which it is named by its fusions

Key = tuple[str, str]
Result = Mapping[str, Any]
Run = Callable[["Candidate"], Result]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """A site that was found. needs: sites of other fusions without which this one is not there."""

    site: Site
    needs: frozenset[Key] = frozenset()


@dataclass(frozen=True)
class Group:
    """Sites that are decided on together: of one fusion, shape class and element type."""

    fusion: str
    rows: int
    width: int
    dtype: str
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        size = "" if not self.width else f" {self.rows or '?'}x{self.width}"
        forms = len({place.site.variant for place in self.places})
        form = "" if self.fusion not in APART else f" {self.variant}" if forms == 1 else f" of {forms} forms"
        return f"{self.fusion}{form}{size}"

    @property
    def keys(self) -> frozenset[Key]:
        """Its sites, and those that they need."""
        return frozenset(place.site.key for place in self.places).union(*(place.needs for place in self.places))

    @property
    def size(self) -> int:
        """How many nodes it replaces."""
        return sum(len(place.site.nodes) for place in self.places)

    @property
    def variant(self) -> str | None:
        """The variant of all of them; None where they differ or have none."""
        variants = {place.site.variant for place in self.places}
        return variants.pop() if len(variants) == 1 else None


def grouped(places: Iterable[Place]) -> tuple[Group, ...]:
    """Groups in the order in which their first sites come.

    Each group costs an engine. Where a fusion of many forms would make more than MOST_APART of them, sites of one form are one group
    whatever their shapes; where that does not do, the forms of fewest sites are one group together.
    """
    found: _Groups = {}
    for place in places:
        found.setdefault((place.site.fusion, place.site.dtype, *shape_class(place.site.shape), _form(place)), []).append(place)
    for fusion in sorted(APART):
        if _count(found, fusion) > MOST_APART:
            found = _whatever_shape(found, fusion, {_form(place) for members in found.values() for place in members})
        if _count(found, fusion) > MOST_APART:
            found = _whatever_shape(found, fusion, _frequent(found, fusion))
    return tuple(Group(fusion, rows, width, dtype, tuple(members)) for (fusion, dtype, rows, width, _), members in found.items())


_Key = tuple[str, str, int, int, "str | None"]
_Groups = dict[_Key, list[Place]]


def _form(place: Place) -> str | None:
    return place.site.variant if place.site.fusion in APART else None


def _count(groups: _Groups, fusion: str) -> int:
    return sum(key[0] == fusion for key in groups)


def _frequent(groups: _Groups, fusion: str) -> set[str | None]:
    """The forms of most sites, one less than the groups that there may be; those that are equal to the first left out are left out."""
    sizes = {key[-1]: len(members) for key, members in groups.items() if key[0] == fusion}
    few = sorted(sizes.values(), reverse=True)[MOST_APART - 1 :][:1]
    return {form for form, size in sizes.items() if not few or size > few[0]}


def _whatever_shape(groups: _Groups, fusion: str, forms: Collection[str | None]) -> _Groups:
    """`groups` with those of one fusion grouped by their form alone, all other forms together, each where its first site was."""
    found: _Groups = {}
    for key, members in groups.items():
        for place in members:
            form = _form(place) if _form(place) in forms else None
            new = (fusion, place.site.dtype, UNKNOWN_ROWS, 0, form) if key[0] == fusion else key
            found.setdefault(new, []).append(place)
    return found


@dataclass(frozen=True)
class Trial:
    """A candidate that was measured. stage: automatic, alone, combination or final. margin: by what its interval must lie above 1."""

    stage: str
    groups: tuple[Group, ...]
    keys: frozenset[Key]
    result: Result
    margin: float

    @property
    def names(self) -> str:
        if len(self.groups) <= _MOST_NAMED:
            return " + ".join(group.name for group in self.groups) or "TensorRT alone"
        counts = Counter(group.fusion for group in self.groups)
        return " + ".join(f"{fusion} ({count} group{'' if count == 1 else 's'})" for fusion, count in counts.items())

    @property
    def ratio(self) -> float:
        """Median of automatic over fused; 0 where it was not measured."""
        return 0.0 if "failed" in self.result else float(self.result["ratio"]["median"])

    @property
    def outcome(self) -> str:
        """won, lost or draw; or what keeps it from being one of them: failed, same, disagrees, marked."""
        if "failed" in self.result:
            return "failed"
        if self.result.get("same_engine"):
            return "same"
        if not self.result["agrees"]:
            return "disagrees"
        if self.result["marks"]:
            return "marked"
        ratio = self.result["ratio"]
        if ratio["low"] > 1 + self.margin:
            return "won"
        return "lost" if ratio["high"] < 1 - self.margin else "draw"

    @property
    def won(self) -> bool:
        return self.outcome == "won"

    @property
    def figures(self) -> str:
        """The ratio with its interval and both latencies."""
        of = self.result["ratio"]
        ratio = f"{of['median']:.3f} times as fast [{of['low']:.3f}, {of['high']:.3f}]"
        return f"{ratio}, {self.result['fused_ms']['median']:.4f} ms against {self.result['automatic_ms']['median']:.4f} ms"

    @property
    def said(self) -> str:
        """The outcome in words."""
        outcome = self.outcome
        if outcome == "failed":
            return f"could not be measured: {self.result['failed']}"
        if outcome == "same":
            return "makes the same model as without it"
        if outcome == "disagrees":
            return "; ".join(self.result["marks"])
        if outcome == "marked":
            return f"not to be trusted, {self.figures}: {'; '.join(self.result['marks'])}"
        if outcome == "draw" and not self.result["ratio"]["low"] <= 1 <= self.result["ratio"]["high"]:
            return f"draw, {self.figures}: within the {self.margin:.1%} that two builds of one model may differ by"
        return f"{outcome}, {self.figures}"

    @property
    def explained(self) -> str:
        """The outcome in words, and what the layers say of one that lost."""
        return self.said + self.because

    @property
    def because(self) -> str:
        """Why it lost, from the layers of both engines; else empty."""
        summary = ((self.result.get("layers") or {}).get("diff") or {}).get("summary")
        return f": {summary}" if summary and self.outcome == "lost" else ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "groups": [group.name for group in self.groups],
            "site_count": len(self.keys),
            "outcome": self.outcome,
            "reason": self.explained,
            **self.result,
        }


@dataclass(frozen=True)
class Found:
    """What the search found. decisions: for every site of every group whether it is fused, and why. automatic: the automatic engine
    timed against itself. final: the plan from a rebuild; `automatic` where nothing is fused.
    """

    groups: tuple[Group, ...]
    decisions: dict[Key, tuple[bool, str]]
    automatic: Trial
    final: Trial
    trials: tuple[Trial, ...]


@dataclass
class Budget:
    """Minutes after which no further candidate is started; `spent` says how many have gone."""

    minutes: float
    spent: Callable[[], float]

    @property
    def is_spent(self) -> bool:
        return self.spent() >= self.minutes

    def __str__(self) -> str:
        return f"the budget of {self.minutes:g} minute{'' if self.minutes == 1 else 's'} was spent"


def search(
    groups: Sequence[Group],
    first: Candidate,
    again: Candidate,
    run: Run,
    budget: Budget,
    promise: Callable[[Group], float] = lambda group: 1.0,
    say: Say = lambda words: None,
    together: Collection[frozenset[str]] = (),
) -> Found:
    """Measures groups and combinations of them, and says for every site whether it is fused and why.

    first, again: the candidates of the search and of the final rebuild, with the sites left to be filled in; they differ in where engines
    are kept. promise: the ratio that is expected of a group, which says what is measured first; of equal ones, it is what replaces more
    nodes. together: names of fusions that belong together; where such a bundle wins, its groups are measured by leaving them out of it
    and not alone. The budget ends with the start of a candidate; what has won until then is still built again. Raises BadInput or
    MissingHere where not even the automatic engine can be measured. What `run` raises goes through.
    """
    return _Search(groups, first, again, run, budget, say, together).go(promise)


@dataclass
class _Search:
    groups: Sequence[Group]
    first: Candidate
    again: Candidate
    run: Run
    budget: Budget
    say: Say
    together: Collection[frozenset[str]]
    margin: float = BUILD_DIFFERENCE
    trials: list[Trial] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    @cached_property
    def places(self) -> dict[Key, Place]:
        return {place.site.key: place for group in self.groups for place in group.places}

    def go(self, promise: Callable[[Group], float]) -> Found:
        automatic = self._automatic()
        ordered = sorted(self.groups, key=lambda group: (-promise(group), -group.size))
        bundles = [trial for trial in self._bundled(ordered) if trial.won]
        belonging = {group for trial in bundles if self._belong(trial.groups) for group in trial.groups}
        alone = self._alone([group for group in ordered if group not in belonging])
        known = self._combined([*bundles, *(trial for trial in alone.values() if trial.won)])
        known = self._thinned(known, [group for group in ordered if _id(group) not in alone or not alone[_id(group)].won])
        final = self._final(known) or automatic
        decisions = {
            place.site.key: self._decision(group, place, alone.get(_id(group)), known, final)
            for group in self.groups
            for place in group.places
        }
        return Found(tuple(self.groups), decisions, automatic, final, tuple(self.trials))

    # The steps ------------------------------------------------------------------------------------------------------

    def _automatic(self) -> Trial:
        """The automatic engine against itself: what it takes, and how far apart two timings of one engine are here."""
        self.say("TensorRT alone")
        result = self.run(replace(self.first, fused=self.first.automatic, fused_engine=None))
        if "failed" in result:
            fault = MissingHere if result.get("status") == MissingHere.exit_status else BadInput
            raise fault(f"TensorRT's own engine of this model cannot be measured: {result['failed']}")
        ratio = result["ratio"]
        self.margin = max(BUILD_DIFFERENCE, ratio["high"] - 1, 1 - ratio["low"])
        trial = Trial("automatic", (), frozenset(), {**result, "same_engine": False}, self.margin)
        self.trials.append(trial)
        return trial

    def _bundled(self, groups: Sequence[Group]) -> Iterator[Trial]:
        """All groups of fusions that belong together, and all of each fusion that has several, until the budget is spent."""
        for fusions in dict.fromkeys([*self.together, *(frozenset((group.fusion,)) for group in groups)]):
            members = tuple(group for group in groups if group.fusion in fusions)
            keys = self._fitting(members)
            if len(members) < 2 or any(trial.keys == keys for trial in self.trials) or self.budget.is_spent:
                continue
            self.say(f"all {len(members)} groups of {' and '.join(dict.fromkeys(group.fusion for group in members))} together")
            yield self._measure("combination", members, keys)

    def _alone(self, groups: Sequence[Group]) -> dict[str, Trial]:
        """Every group alone, those of most promise first, until the budget is spent."""
        done: dict[str, Trial] = {}
        for number, group in enumerate(groups, start=1):
            if self.budget.is_spent:
                self.not_measured[_id(group)] = f"not measured: {self.budget}"
                continue
            self.say(f"{number} of {len(groups)}, {group.name} ({_many(group)}) alone")
            done[_id(group)] = self._measure("alone", (group,), group.keys)
        return done

    def _combined(self, winners: Sequence[Trial]) -> list[Trial]:
        """All plans that won, the one to take first. A plan takes the place of a smaller one only if it is faster by the margin."""
        known = sorted(winners, key=lambda trial: -trial.ratio)
        best = next((trial for trial in known if all(self._earns(trial, less) for less in known if less.keys < trial.keys)), None)
        if best is None:
            return []
        waiting = list(self._arrangements(known))
        for _ in range(MOST_COMBINATIONS):
            measured = {trial.keys for trial in self.trials}
            waiting = [union for union in waiting if union.expected > best.ratio and union.keys not in measured]
            if not waiting or self.budget.is_spent:
                break
            union = max(waiting, key=lambda union: union.expected)
            self.say(f"{' + '.join(group.name for group in union.groups)} together")
            trial = self._measure("combination", union.groups, union.keys)
            if trial.won:
                known.append(trial)
            if trial.won and self._earns(trial, best):
                best = trial
            waiting.append(self._union(sorted(union.winners, key=lambda trial: -trial.ratio)[:-1]))
        if waiting and self.budget.is_spent:
            self.not_measured["combination"] = f"not all combinations were measured: {self.budget}"
        return [best, *(trial for trial in sorted(known, key=lambda trial: -trial.ratio) if trial is not best)]

    def _thinned(self, known: list[Trial], doubtful: Sequence[Group]) -> list[Trial]:
        """The same plans, before them the first one without those of the doubtful groups that make it no faster. Those with the most
        sites are left out first. No margin is asked of them: with one, many small gains would go one by one.
        """
        groups = [group for group in doubtful if known and group in known[0].groups]
        for group in sorted(groups, key=lambda group: -len(group.places))[:MOST_DROPPED]:
            best = known[0]
            rest = tuple(other for other in best.groups if other is not group)
            keys = self._fitting(rest) & best.keys
            if not keys or any(trial.keys == keys for trial in self.trials) or self.budget.is_spent:
                continue
            self.say(f"{best.names} without {group.name}")
            trial = self._measure("combination", rest, keys)
            if trial.won and trial.ratio >= best.ratio:
                self.dropped[_id(group)] = f"no gain beside the others: {best.said} with it, {trial.said} without"
                known = [trial, *known]
            elif trial.won:
                known = [best, trial, *known[1:]]
        return known

    def _final(self, known: Sequence[Trial]) -> Trial | None:
        """The first of these plans that wins again, with both engines built again; None where none does."""
        for trial in known[:MOST_FINALS]:
            self.say(f"{trial.names}, built again")
            final = self._measure("final", trial.groups, trial.keys)
            if final.won:
                return final
        return None

    def _measure(self, stage: str, groups: tuple[Group, ...], keys: frozenset[Key]) -> Trial:
        template = self.again if stage == "final" else self.first
        chosen = tuple((fusion, output, True) for fusion, output in sorted(keys))
        candidate = replace(template, fused=replace(template.fused, sites=(*template.fused.sites, *chosen)))
        trial = Trial(stage, groups, keys, self.run(candidate), self.margin)
        self.trials.append(trial)
        return trial

    # Combinations ---------------------------------------------------------------------------------------------------

    def _earns(self, trial: Trial, smaller: Trial) -> bool:
        return trial.ratio > smaller.ratio * (1 + BUILD_DIFFERENCE)

    def _arrangements(self, winners: Sequence[Trial]) -> Iterator[_Union]:
        """All winners together. Where they claim the same nodes, each of them once with the right of way over the others."""
        for leader in winners:
            yield self._union([leader, *(trial for trial in winners if trial is not leader)])

    def _union(self, winners: Sequence[Trial]) -> _Union:
        """Plans that won, together; sites whose nodes an earlier one of them claims are left out."""
        keys: frozenset[Key] = frozenset()
        members: list[Trial] = []
        groups: dict[Group, None] = {}
        expected = 1.0
        for trial in winners:
            new = self._new(trial.keys, keys)
            if new:
                keys |= new
                members.append(trial)
                groups.update(dict.fromkeys(group for group in trial.groups if not new.isdisjoint(group.keys)))
                expected *= math.pow(trial.ratio, len(new) / len(trial.keys))
        return _Union(tuple(members), tuple(groups), keys, expected)

    def _fitting(self, groups: Iterable[Group]) -> frozenset[Key]:
        """Sites of these groups, without those whose nodes an earlier group claims."""
        keys: frozenset[Key] = frozenset()
        for group in groups:
            keys |= self._new(group.keys, keys)
        return keys

    def _new(self, keys: frozenset[Key], taken: frozenset[Key]) -> frozenset[Key]:
        """Those of `keys` that can be fused beside what is taken."""
        new: set[Key] = set()
        claimed = {node for key in taken for node in self.places[key].site.nodes}
        for key in sorted(keys - taken, key=lambda key: len(self.places[key].needs)):  # what is needed before what needs it
            place = self.places[key]
            if claimed.isdisjoint(place.site.nodes) and place.needs <= taken | new:
                new.add(key)
        return frozenset(new)

    def _belong(self, groups: Iterable[Group]) -> bool:
        """Whether they are of several fusions that belong together."""
        fusions = {group.fusion for group in groups}
        return len(fusions) > 1 and any(fusions <= of for of in self.together)

    # Reasons --------------------------------------------------------------------------------------------------------

    def _decision(self, group: Group, place: Place, alone: Trial | None, known: Sequence[Trial], final: Trial) -> tuple[bool, str]:
        if place.site.key in final.keys:
            before = f"{alone.said} alone; " if alone is not None else ""
            return True, f"{before}{final.said} in the plan of {final.names}, built again"
        if _id(group) in self.dropped:
            return False, self.dropped[_id(group)]
        if _id(group) in self.not_measured:
            return False, self.not_measured[_id(group)]
        if alone is not None and not alone.won:
            return False, f"{alone.said}; left to TensorRT{alone.because}" if alone.outcome in ("draw", "lost") else alone.said
        reason = "" if alone is None else f"{alone.said} alone, but "
        nodes = set(place.site.nodes)
        for other in self.groups:
            for taken in other.places:
                if other is not group and taken.site.key in final.keys and nodes & set(taken.site.nodes):
                    return False, f"{reason}its nodes are part of {other.name} at '{taken.site.output}', which gains more"
        tried = [trial for trial in self.trials if place.site.key in trial.keys and trial.stage == "final"]
        if tried:
            return False, f"{reason}{tried[-1].said} in the plan of {tried[-1].names}, built again"
        together = [trial for trial in self.trials if place.site.key in trial.keys and trial.stage == "combination"]
        if together:
            best = max(together, key=lambda trial: trial.ratio)
            return False, f"{reason}no gain beside the others: {best.said} in {best.names}, {known[0].said} in {known[0].names}"
        return False, reason + self.not_measured.get("combination", f"less than {known[0].names}: {known[0].said}")


@dataclass(frozen=True)
class _Union:
    """Plans that won, together. expected: their gains multiplied, which is more than they bring."""

    winners: tuple[Trial, ...]
    groups: tuple[Group, ...]
    keys: frozenset[Key]
    expected: float


def _id(group: Group) -> str:
    return f"{group.name} {group.dtype}"


def _many(group: Group) -> str:
    return f"{len(group.places)} site{'' if len(group.places) == 1 else 's'}"
