"""Delta debugging over anything that can be switched on and off: which few of many sites make the outputs disagree.

The algorithm is ddmin (A. Zeller, R. Hildebrandt: Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28(2), 2002). It does not
assume that errors only grow with the set: what is found is 1-minimal, which means that leaving any one site of it out makes the
outputs agree. What an answer means for a user is judged afterwards: a wrong site, several that do harm only together, or rounding
that every site adds a little to.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxfuse.errors import MissingHere, OnnxfuseError

Sites = frozenset[str]
# The disagreement with just these sites on: the largest error as a share of its limit, linear in the error; above 1 is a disagreement.
Oracle = Callable[[Sites], float]
Progress = Callable[[str], None]

# A wrong site errs by much more than its fellows round: in encoders in float16, the largest rounding of a site is 4 to 10 times the median.
APART = 10.0
# Where every site is over the limit by itself, the limit is below rounding, whose sizes spread widely: only what is far out is a fault.
FAR = 30.0
# Errors that merely add up are at most the sum of their parts (the triangle inequality); more needs an interaction. The margin is for
# limits that an operator behind the sites bends.
SUPERADDITIVE = 1.5
MOST_TOGETHER = 4  # more sites than these that are all needed are no fault that anyone planted
MISSED = 0.01  # accepted probability that an intermittent fault does not show in one question
MOST_RUNS = 60  # of one question
MOST_CAUSES = 8


class OutOfTries(Exception):
    """The limit on runs is reached: what is known by now must do."""


@dataclass(frozen=True)
class Answer:
    """What one set of sites gave, run by run. NaN: it could not be run. Above `bar`, a run disagrees."""

    figures: tuple[float, ...]
    bar: float = 1.0

    @property
    def disagreements(self) -> int:
        return sum(figure > self.bar for figure in self.figures)

    @property
    def disagrees(self) -> bool:
        return self.disagreements > 0

    @property
    def figure(self) -> float:
        """The largest of all runs; NaN where none could be run."""
        return max((figure for figure in self.figures if not math.isnan(figure)), default=math.nan)

    @property
    def intermittent(self) -> bool:
        return 0 < self.disagreements < len(self.figures)


class Asked:
    """An oracle that is asked several times and remembers every answer.

    A set that disagrees once is guilty, so the asking ends there; one that agrees is asked `repeats` times. `limit` is on the runs. `bar`:
    what a figure must exceed to disagree.
    """

    def __init__(self, oracle: Oracle, repeats: int = 1, limit: int = 1000, say: Progress = lambda text: None) -> None:
        self.oracle = oracle
        self.repeats = repeats
        self.limit = limit
        self.say = say
        self.bar = 1.0
        self.runs = 0
        self.faults: dict[Sites, str] = {}  # sets that could not be run, and why
        self._known: dict[Sites, list[float]] = {}

    @property
    def tries(self) -> int:
        """How many different sets were tried."""
        return len(self._known)

    def disagrees(self, sites: Sequence[str] | Sites) -> bool:
        return self.ask(sites).disagrees

    def ask(self, sites: Sequence[str] | Sites, runs: int | None = None) -> Answer:
        """The answers so far, and as many more as it takes; with `runs`, that many in all, whatever they say."""
        chosen = frozenset(sites)
        known = self._known.setdefault(chosen, [])
        while (
            len(known) < (runs or self.repeats) and (runs or not any(figure > self.bar for figure in known)) and chosen not in self.faults
        ):
            if self.runs >= self.limit:
                if known:
                    break
                del self._known[chosen]
                raise OutOfTries
            known.append(self._once(chosen))
        return Answer(tuple(known), self.bar)

    def known_to_agree(self, site: str) -> bool:
        """Whether `site` was asked alone, could be run, and never disagreed."""
        known = self._known.get(frozenset((site,)), [])
        return bool(known) and all(figure <= self.bar for figure in known)

    def _once(self, sites: Sites) -> float:
        self.runs += 1
        try:
            return float(self.oracle(sites))
        except MissingHere:
            raise
        except OnnxfuseError as fault:
            self.faults[sites] = str(fault)
            return math.nan


def shrinking(items: Sequence[str], interesting: Callable[[Sequence[str]], bool]) -> Iterator[tuple[str, ...]]:
    """ever smaller interesting subsets, the last of which is 1-minimal; the first is `items`, which must be interesting, as the empty
    set must not be.
    """
    current, parts = tuple(items), 2
    yield current
    while len(current) > 1:
        pieces = [current[start:end] for start, end in _bounds(len(current), parts)]
        rests = [tuple(item for item in current if item not in piece) for piece in pieces] if parts > 2 else []
        smaller = next((piece for piece in pieces if interesting(piece)), None)
        if smaller is not None:
            parts = 2
        else:
            smaller = next((rest for rest in rests if interesting(rest)), None)
            if smaller is not None:
                parts = max(parts - 1, 2)
            elif parts >= len(current):
                return
            else:
                parts = min(2 * parts, len(current))
                continue
        current = smaller
        yield current


def _bounds(count: int, parts: int) -> Iterator[tuple[int, int]]:
    for part in range(parts):
        yield count * part // parts, count * (part + 1) // parts


@dataclass(frozen=True)
class Cause:
    """A smallest set of sites that disagrees.

    kind: "site" (wrong by itself), "together" (harmless alone, wrong together), "sum" (each within the limits, far above the others'
    rounding, and over them together), "group" (all sites of one group, which are alike and far above those of other groups: a fusion or
    kernel that is wrong everywhere) or "rounding" (no wrong site: what all contribute adds up).
    alone: the figure of each site by itself. typical: what other sites contribute by themselves, the median of some of them.
    flips, runs: how often it disagreed.
    """

    kind: str
    sites: tuple[str, ...]
    figure: float
    alone: dict[str, float]
    typical: float
    flips: int
    runs: int

    @property
    def intermittent(self) -> bool:
        return self.flips < self.runs


@dataclass(frozen=True)
class Finding:
    """What a search found.

    verdict: "agree" (nothing disagrees), "elsewhere" (it disagrees with every site off), "found" (a cause that is no rounding), "rounding"
    (no single site: rounding adds up). figure, baseline and rest are those of all sites, of none, and of all but the causes'.
    flips, runs: how often the whole disagreed. complete: whether the limit on runs sufficed. faults: sets that could not be run.
    """

    verdict: str
    figure: float
    baseline: float = math.nan
    rest: float = math.nan
    causes: tuple[Cause, ...] = ()
    flips: int = 0
    runs: int = 0
    repeats: int = 1
    tries: int = 0
    complete: bool = True
    faults: tuple[str, ...] = field(default=())

    @property
    def guilty(self) -> tuple[str, ...]:
        """The sites of every cause that is no rounding, in order of the causes."""
        return tuple(dict.fromkeys(site for cause in self.causes if cause.kind != "rounding" for site in cause.sites))


def search(
    sites: Sequence[str],
    oracle: Oracle,
    *,
    groups: Mapping[str, str] | None = None,
    repeats: int = 1,
    sample: int = 8,
    limit: int = 1000,
    say: Progress = lambda text: None,
) -> Finding:
    """The smallest sets of `sites` (in topological order) that disagree, disjoint from each other, and what kind of fault each is.

    groups: site -> what it has in common with others: its fusion, its kernel. repeats: how often a set must agree to count as agreeing;
    above 1 for what may be intermittent, and raised to what the measured flip rate needs. sample: how many innocent sites are asked
    alone, to know what is typical. Raises OnnxfuseError where all sites together cannot be run.
    """
    asked = Asked(oracle, repeats, limit, say)
    say("all sites on")
    whole = asked.ask(sites, 2 * repeats if repeats > 1 else 1)
    if math.isnan(whole.figure):
        raise OnnxfuseError(asked.faults[frozenset(sites)])
    finding = Finding("agree", whole.figure, flips=whole.disagreements, runs=len(whole.figures), repeats=repeats)
    if whole.disagrees:
        asked.repeats = _repeats_for(whole, repeats)
        say("all sites off")
        none = asked.ask(())
        if math.isnan(none.figure):
            raise OnnxfuseError(asked.faults[frozenset()])
        finding = replace(finding, verdict="elsewhere", baseline=none.figure, repeats=asked.repeats)
        if not none.disagrees:
            finding = _causes(finding, asked, sites, groups or {}, sample, whole.intermittent or repeats > 1)
    return replace(finding, tries=asked.tries, faults=tuple(asked.faults.values()))


def _repeats_for(whole: Answer, least: int) -> int:
    """Runs after which a fault that shows as often as in `whole` has been missed with a probability below MISSED."""
    if not whole.intermittent:
        return least
    rate = whole.disagreements / len(whole.figures)
    return min(max(least, math.ceil(math.log(MISSED) / math.log1p(-rate))), MOST_RUNS)


def _causes(finding: Finding, asked: Asked, sites: Sequence[str], groups: Mapping[str, str], sample: int, unsure: bool) -> Finding:
    left, complete, rest = tuple(sites), True, finding.figure
    causes: list[Cause] = []
    try:
        while len(causes) < MOST_CAUSES:
            found, whole = _smallest(asked, left, unsure)
            complete = complete and whole
            fellows = [site for site in left if site not in found]
            cause = _judge(asked, found, fellows, sample)
            if cause.kind == "rounding":
                cause = _group(asked, left, groups, sample) or _judge(asked, found, _agreeing(asked, fellows), sample)
            others = [site for site in left if site not in cause.sites]
            if cause.kind == "rounding" and _outstanding(cause.typical) > asked.bar and not causes:
                # Rounding alone reaches the limit, and may hide a fault: what stands out of it is looked for.
                asked.bar = _outstanding(cause.typical)
                if asked.ask(left).disagrees:
                    continue
            causes.append(cause)
            left = tuple(others)
            answer = asked.ask(left) if left else None
            rest = answer.figure if answer else finding.baseline
            if causes[-1].kind == "rounding" or answer is None or not answer.disagrees:
                break
    except OutOfTries:
        complete = False
    verdict = "found" if any(cause.kind != "rounding" for cause in causes) else "rounding"
    return replace(finding, verdict=verdict, causes=tuple(causes), rest=rest, complete=complete)


def _smallest(asked: Asked, sites: tuple[str, ...], unsure: bool) -> tuple[tuple[str, ...], bool]:
    """A 1-minimal set and whether the tries sufficed for it. With `unsure`, what is left is asked for longer before it is believed."""
    found = sites

    def interesting(some: Sequence[str]) -> bool:
        asked.say(f"try {asked.tries + 1}, {len(found)} of {len(sites)} sites left")
        return asked.disagrees(some)

    try:
        while True:
            for smaller in shrinking(found, interesting):
                found = smaller
            again = _without_one(asked, found) if unsure else None
            if again is None:
                return found, True
            found = again
    except OutOfTries:
        return found, False


def _without_one(asked: Asked, found: tuple[str, ...]) -> tuple[str, ...] | None:
    """A subset, one site smaller, that disagrees when it is asked twice as often; None where there is none."""
    if len(found) == 1:
        return None
    rests = (tuple(other for other in found if other != site) for site in found)
    return next((rest for rest in rests if asked.ask(rest, min(2 * asked.repeats, MOST_RUNS)).disagrees), None)


def _judge(asked: Asked, found: tuple[str, ...], others: Sequence[str], sample: int) -> Cause:
    """What kind of fault a smallest set is. Past the limit on runs, what was not measured counts as NaN."""
    asked.say(f"measuring {len(found)} sites alone")
    answer = asked.ask(found, asked.repeats)
    alone = {site: _alone(asked, site) for site in found}
    some = others[:: max(1, math.ceil(len(others) / sample))] if sample else []
    measured = [figure for site in some if not math.isnan(figure := _alone(asked, site))]
    peers = measured or (sorted(alone.values()) if len(found) > 1 else [])
    typical = statistics.median(peers) if peers else 0.0
    kind = _kind(answer.figure, list(alone.values()), typical)
    return Cause(kind, found, answer.figure, alone, typical, answer.disagreements, len(answer.figures))


def _agreeing(asked: Asked, sites: Sequence[str]) -> Sequence[str]:
    """Those that agree by themselves as far as is known, or all where none does: most of a few sites may be faulty, and say nothing of
    what is typical.
    """
    return [site for site in sites if asked.known_to_agree(site)] or sites


def _group(asked: Asked, left: Sequence[str], groups: Mapping[str, str], sample: int) -> Cause | None:
    """The group whose sites all stand out of all others, where it disagrees. One that is all there is must be over the limit site by
    site.
    """
    members: dict[str, list[str]] = {}
    for site in left:
        members.setdefault(groups.get(site, ""), []).append(site)
    if "" in members:
        return None
    typical: dict[str, float] = {}
    measured: dict[str, dict[str, float]] = {}
    for name, sites in members.items():
        asked.say(f"measuring sites of {name}")
        alone = {site: _alone(asked, site) for site in sites[:: max(1, math.ceil(len(sites) / max(2, sample // 2)))]}
        measured[name] = {site: figure for site, figure in alone.items() if not math.isnan(figure)}
        typical[name] = statistics.median(measured[name].values()) if measured[name] else 0.0
    worst = max(typical, key=lambda name: typical[name])
    least = min(measured[worst].values(), default=0.0)
    rest = max((figure for name, figure in typical.items() if name != worst), default=0.0)
    answer = asked.ask(members[worst], asked.repeats)
    stands_out = least >= _outstanding(rest) if len(members) > 1 else least > 1
    if not (stands_out and answer.disagrees and len(members[worst]) > 1):
        return None
    alone = {site: measured[worst].get(site, math.nan) for site in members[worst]}
    return Cause("group", tuple(members[worst]), answer.figure, alone, rest, answer.disagreements, len(answer.figures))


def _alone(asked: Asked, site: str) -> float:
    with contextlib.suppress(OutOfTries):
        return asked.ask((site,)).figure
    return math.nan


def _kind(figure: float, alone: Sequence[float], typical: float) -> str:
    if len(alone) == 1:
        return "site" if figure >= _outstanding(typical) else "rounding"
    if figure > SUPERADDITIVE * sum(part for part in alone if not math.isnan(part)):
        return "together"
    if len(alone) <= MOST_TOGETHER and all(part >= _outstanding(typical) for part in alone):
        return "sum"
    return "rounding"


def _outstanding(typical: float) -> float:
    """The figure from which a site stands out of its fellows."""
    return (APART if typical <= 1 else FAR) * typical
