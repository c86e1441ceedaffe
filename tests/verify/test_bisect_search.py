"""The search itself, driven by invented oracles."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.errors import MissingHere, OnnxfuseError
from onnxfuse.verify.bisect.search import Asked, Finding, OutOfTries, search, shrinking

SITES = [f"s{i}" for i in range(24)]
Figure = Callable[[frozenset[str]], float]


def rounding(sites: Collection[str], each: float) -> float:
    """Independent errors of one size, whose squares add up."""
    return each * math.sqrt(len(sites))


def kinds(finding: Finding) -> list[tuple[str, set[str]]]:
    return [(cause.kind, set(cause.sites)) for cause in finding.causes]


# ---------------------------------------------------------------------------------------------------- delta debugging


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_what_is_found_is_interesting_and_1_minimal_whatever_the_oracle_says(data: st.DataObject) -> None:
    """Random answers: nothing is monotone. All sites disagree and none do not; the rest is drawn."""
    items = [f"s{i}" for i in range(data.draw(st.integers(1, 9)))]
    dice = random.Random(data.draw(st.integers(0, 10**6)))
    share = data.draw(st.sampled_from([0.05, 0.3, 0.7]))
    known: dict[frozenset[str], bool] = {frozenset(items): True, frozenset(): False}

    def interesting(some: Collection[str]) -> bool:
        return known.setdefault(frozenset(some), dice.random() < share)

    steps = list(shrinking(items, interesting))
    assert all(set(after) < set(before) for before, after in itertools.pairwise(steps))
    assert all(known[frozenset(step)] for step in steps)
    last = set(steps[-1])
    assert not any(interesting(last - {item}) for item in last)


@pytest.mark.parametrize("count", [1, 2, 3, 64, 301])
def test_one_guilty_of_many_is_found_in_logarithmic_tries(count: int) -> None:
    items = [f"s{i}" for i in range(count)]
    guilty = items[count * 2 // 3]
    asked: list[frozenset[str]] = []

    def interesting(some: Collection[str]) -> bool:
        asked.append(frozenset(some))
        return guilty in some

    assert list(shrinking(items, interesting))[-1] == (guilty,)
    assert len(asked) <= 2 * math.ceil(math.log2(count)) + 1


# --------------------------------------------------------------------------------------------------- kinds of faults


def test_nothing_disagrees() -> None:
    finding = search(SITES, lambda on: rounding(on, 0.01))
    assert finding.verdict == "agree"
    assert finding.causes == ()
    assert finding.tries == 1


def test_a_single_wrong_site_stands_out_of_rounding() -> None:
    finding = search(SITES, lambda on: rounding(on, 0.02) + 40 * ("s7" in on))
    assert finding.verdict == "found"
    assert kinds(finding) == [("site", {"s7"})]
    assert finding.causes[0].alone["s7"] == pytest.approx(40.02)
    assert finding.causes[0].typical == pytest.approx(0.02)
    assert finding.rest < 1
    assert finding.tries < 30
    assert finding.complete


def test_two_wrong_sites_are_both_found() -> None:
    finding = search(SITES, lambda on: math.inf if "s20" in on else rounding(on, 0.01) + 5 * ("s3" in on))
    assert {cause.kind for cause in finding.causes} == {"site"}
    assert sorted(finding.guilty) == ["s20", "s3"]


def test_two_sites_that_do_harm_only_together() -> None:
    finding = search(SITES, lambda on: 12.0 if {"s2", "s19"} <= on else rounding(on, 0.01))
    assert kinds(finding) == [("together", {"s2", "s19"})]
    assert max(finding.causes[0].alone.values()) < 0.1


def test_one_fault_that_another_hides() -> None:
    """Not monotone: with s4 on, s9 does no harm; all on disagrees by s11."""
    finding = search(SITES, lambda on: 8.0 if "s11" in on or ("s9" in on and "s4" not in on) else 0.0)
    assert all(kind == "site" for kind, _ in kinds(finding))
    assert {"s11"} in [sites for _, sites in kinds(finding)]


def test_errors_that_every_site_adds_to_are_no_wrong_site() -> None:
    finding = search(SITES, lambda on: rounding(on, 0.3))
    assert finding.verdict == "rounding"
    assert finding.guilty == ()
    assert [kind for kind, _ in kinds(finding)] == ["rounding"]
    assert len(finding.causes[0].sites) > 4


def test_errors_of_one_sign_that_add_up_are_no_wrong_site() -> None:
    finding = search(SITES, lambda on: 0.06 * len(on))
    assert finding.verdict == "rounding"


def test_unequal_rounding_just_over_the_limit_is_no_wrong_site() -> None:
    """The largest of many comparable errors is over the limit by itself, and so is its neighbour."""
    sizes = {site: 0.5 + 0.03 * index for index, site in enumerate(SITES)}
    finding = search(SITES, lambda on: math.sqrt(sum(sizes[site] ** 2 for site in on)))
    assert finding.verdict == "rounding"


def test_a_limit_below_all_rounding_accuses_nobody() -> None:
    finding = search(SITES, lambda on: rounding(on, 1e6))
    assert finding.verdict == "rounding"


def test_a_wrong_site_is_found_behind_rounding_that_is_over_the_limit() -> None:
    finding = search(SITES, lambda on: rounding(on, 0.4) + 30 * ("s22" in on))
    assert finding.guilty == ("s22",)
    finding = search(SITES, lambda on: rounding(on, 3.0) + 3000 * ("s22" in on))
    assert finding.guilty == ("s22",)


def test_two_faults_within_the_limit_that_are_over_it_together() -> None:
    finding = search(SITES, lambda on: rounding(on, 0.005) + 0.7 * ("s5" in on) + 0.6 * ("s6" in on))
    assert kinds(finding) == [("sum", {"s5", "s6"})]


GROUPS = {site: "norm" if index % 3 else "gelu" for index, site in enumerate(SITES)}


@pytest.mark.parametrize("each", [50.0, 0.3])
def test_a_kernel_that_is_wrong_everywhere_is_no_rounding(each: float) -> None:
    """Two of three sites are wrong, by as much: over the limit alone, or only all of them together."""
    norms = {site for site, group in GROUPS.items() if group == "norm"}
    finding = search(SITES, lambda on: rounding(on, 0.002) + rounding(on & norms, each), groups=GROUPS)
    assert kinds(finding) == [("group", norms)]
    assert finding.rest < 0.1


def test_a_kernel_that_is_all_there_is_and_wrong_everywhere() -> None:
    groups = dict.fromkeys(SITES, "norm")
    assert kinds(search(SITES, lambda on: rounding(on, 5.0), groups=groups)) == [("group", set(SITES))]
    assert search(SITES, lambda on: rounding(on, 0.3), groups=groups).verdict == "rounding"


@pytest.mark.parametrize("groups", [None, dict.fromkeys("abc", "norm")])
def test_most_of_few_sites_are_wrong(groups: dict[str, str] | None) -> None:
    """What is typical is known from the one that is right, and a group of which one is right is not accused."""
    finding = search("abc", lambda on: 0.003 * len(on) + 5 * ("a" in on) + 7 * ("b" in on), groups=groups)
    assert kinds(finding) == [("site", {"a"}), ("site", {"b"})]


def test_groups_that_round_alike_are_not_accused() -> None:
    assert search(SITES, lambda on: rounding(on, 0.3), groups=GROUPS).verdict == "rounding"
    assert search(SITES, lambda on: rounding(on, 3.0), groups=GROUPS).verdict == "rounding"


def test_a_wrong_site_is_found_beside_a_kernel_that_is_wrong_everywhere() -> None:
    norms = {site for site, group in GROUPS.items() if group == "norm"}
    finding = search(SITES, lambda on: rounding(on, 0.002) + rounding(on & norms, 20.0) + 500 * ("s9" in on), groups=GROUPS)
    assert ("site", {"s9"}) in kinds(finding)
    assert set(finding.guilty) == {"s9", *norms}


def test_a_single_site_that_is_all_there_is() -> None:
    assert kinds(search(["only"], lambda on: 3.0 * len(on))) == [("site", {"only"})]


def test_a_disagreement_with_every_site_off_is_elsewhere() -> None:
    finding = search(SITES, lambda on: 4.0)
    assert finding.verdict == "elsewhere"
    assert finding.baseline == 4.0
    assert finding.tries == 2


# ------------------------------------------------------------------------------------------------------- intermittent


class Flipping:
    """A site that is wrong in some runs only, by a seeded die; the rest rounds."""

    def __init__(self, guilty: set[str], rate: float, seed: int) -> None:
        self.guilty, self.rate, self.dice = guilty, rate, random.Random(seed)

    def __call__(self, on: frozenset[str]) -> float:
        return 9.0 if self.guilty <= on and self.dice.random() < self.rate else rounding(on, 0.01)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_an_intermittent_site_is_found_and_its_rate_told(rate: float, seed: int) -> None:
    finding = search(SITES, Flipping({"s13"}, rate, seed), repeats=10)
    assert finding.verdict == "found"
    assert kinds(finding) == [("site", {"s13"})]
    cause = finding.causes[0]
    assert cause.runs >= 10
    assert 0 < cause.flips <= cause.runs
    assert finding.repeats >= 10
    if rate == 0.3:
        assert cause.intermittent
        assert finding.flips < finding.runs


def test_an_intermittent_pair_is_found() -> None:
    finding = search(SITES, Flipping({"s1", "s23"}, 0.5, 5), repeats=12)
    assert kinds(finding) == [("together", {"s1", "s23"})]


def test_more_is_asked_where_the_fault_is_rare() -> None:
    often = search(SITES, Flipping({"s1"}, 0.8, 1), repeats=5).repeats
    seldom = search(SITES, Flipping({"s1"}, 0.15, 3), repeats=20).repeats
    assert often < 10
    assert seldom > 20


def test_what_never_shows_agrees_in_so_many_runs() -> None:
    finding = search(SITES, lambda on: 0.1, repeats=7)
    assert finding.verdict == "agree"
    assert finding.runs == 14


# -------------------------------------------------------------------------------------------------------------- asking


def test_answers_are_remembered() -> None:
    calls: list[frozenset[str]] = []

    def oracle(on: frozenset[str]) -> float:
        calls.append(on)
        return 2.0 * ("s7" in on)

    finding = search(SITES, oracle)
    assert len(calls) == len(set(calls)) == finding.tries


def test_a_set_that_cannot_be_run_is_neither_guilty_nor_the_end() -> None:
    def oracle(on: frozenset[str]) -> float:
        if "s8" in on and "s9" not in on:
            raise OnnxfuseError("no kernel for half a pair")
        return 6.0 * ("s8" in on)

    finding = search(SITES, oracle)
    assert kinds(finding) == [("together", {"s8", "s9"})]
    assert "no kernel for half a pair" in finding.faults


def test_what_cannot_be_run_at_all_is_told() -> None:
    def oracle(on: frozenset[str]) -> float:
        raise OnnxfuseError("model.onnx: broken")

    with pytest.raises(OnnxfuseError, match="broken"):
        search(SITES, oracle)


def test_what_is_missing_here_ends_the_search() -> None:
    def oracle(on: frozenset[str]) -> float:
        if len(on) < 24:
            raise MissingHere("no GPU")
        return 2.0

    with pytest.raises(MissingHere):
        search(SITES, oracle)


def test_the_limit_on_runs_ends_it_with_what_is_known() -> None:
    finding = search(SITES, lambda on: 9.0 * ({"s3", "s17"} <= on), limit=9)
    assert not finding.complete
    assert finding.verdict in ("found", "rounding")
    assert {"s3", "s17"} <= set(finding.causes[0].sites)


def test_a_question_beyond_the_limit_is_refused() -> None:
    asked = Asked(lambda on: 0.0, limit=1)
    asked.ask(("a",))
    assert asked.ask(("a",)).figure == 0.0
    with pytest.raises(OutOfTries):
        asked.ask(("b",))


def test_progress_says_how_far_it_is() -> None:
    said: list[str] = []
    search(SITES, lambda on: 3.0 * ("s7" in on), say=said.append)
    assert any("of 24 sites left" in line for line in said)
    assert any("1 of 24 sites left" in line or "2 of 24 sites left" in line for line in said)
