"""The search of policy measure, with invented timings: what it orders, what it believes, and what it says of each site."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from onnxfuse.bench.candidate import Candidate, Rewriting
from onnxfuse.bench.stats import BUILD_DIFFERENCE
from onnxfuse.errors import BadInput, MissingHere
from onnxfuse.plan.measure import MOST_COMBINATIONS, MOST_DROPPED, MOST_FINALS, Budget, Found, Group, Key, Place, grouped, search
from onnxfuse.plan.sites import Site

FIRST = Candidate(
    model="m.onnx", automatic=Rewriting("measure"), fused=Rewriting("measure"), precision="fp16", inputs="i.npz", work="w",
    automatic_engine="first.engine",
)  # fmt: skip
AGAIN = Candidate(**{**vars(FIRST), "automatic_engine": "again.engine", "fused_engine": "final.engine"})


def places(
    fusion: str,
    count: int = 2,
    nodes: Callable[[int], Iterable[str]] | None = None,
    needs: Iterable[Key] = (),
    group: str = "",
    width: int = 768,
) -> list[Place]:
    """Sites of a fusion, each with a node of its own, or with those given; g0, g1... where `group` is g, which is the fusion's name."""
    name = group or fusion
    sites = [
        Site(fusion, None, f"{name}{i}", tuple(nodes(i) if nodes else (f"{name}-node{i}",)), f"1x128x{width}", "float16")
        for i in range(count)
    ]
    return [Place(site, frozenset(needs)) for site in sites]


def result(ratio: float, width: float = 0.0005, **changes: Any) -> dict[str, Any]:
    interval = {"median": ratio, "low": ratio - width, "high": ratio + width}
    return {
        "ratio": interval,
        "automatic_ms": {"median": 0.4, "low": 0.4, "high": 0.4},
        "fused_ms": {"median": 0.4 / ratio, "low": 0.4 / ratio, "high": 0.4 / ratio},
        "agrees": True,
        "marks": [],
        "same_engine": False,
        **changes,
    }


class Lab:
    """Answers candidates from a table: the sites' groups -> ratio, or a whole result. Groups in upper case mean the rebuild."""

    def __init__(self, table: Mapping[str, float | dict[str, Any] | BaseException], noise: float = 0.0005) -> None:
        self.table = {frozenset(name.split()): answer for name, answer in table.items()}
        self.noise = noise
        self.orders: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> dict[str, Any]:
        self.orders.append(candidate)
        if candidate.fused == candidate.automatic:
            return result(1.0, self.noise, same_engine=True)
        names = _groups(candidate)
        if candidate.automatic_engine == AGAIN.automatic_engine:
            answer = self.table.get(frozenset(name.upper() for name in names), self.table.get(frozenset(names)))
        else:
            answer = self.table[frozenset(names)]
        assert answer is not None, names
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, dict) else result(answer)

    @property
    def asked(self) -> list[str]:
        """What was ordered, as in the table; "" is the automatic engine against itself."""
        return [self._name(candidate) for candidate in self.orders]

    def _name(self, candidate: Candidate) -> str:
        name = " ".join(sorted(_groups(candidate)))
        return name.upper() if candidate.automatic_engine == AGAIN.automatic_engine else name


def _groups(candidate: Candidate) -> set[str]:
    return {output.rstrip("0123456789") for _, output, _ in candidate.fused.sites}


def found(lab: Lab, *sites: list[Place], minutes: float = 15, cost: float = 0, **more: Any) -> Found:
    """The search over these sites; each candidate costs so many minutes."""
    budget = Budget(minutes, lambda: cost * len(lab.orders))
    return search(grouped(itertools.chain(*sites)), FIRST, AGAIN, lab, budget, **more)


def fused(of: Found) -> set[str]:
    return {fusion for (fusion, _), (is_fused, _) in of.decisions.items() if is_fused}


def reason(of: Found, fusion: str, number: int = 0) -> str:
    return of.decisions[fusion, f"{fusion}{number}"][1]


def test_sites_are_grouped_by_fusion_shape_class_and_type() -> None:
    shapes = [("a", "1x128x768", "float16"), ("a", "1x100x768", "float16"), ("a", "1x128x64", "float16"), ("b", "1x128x768", "float16"),
              ("a", "1x128x768", "float32")]  # fmt: skip
    sites = [Place(Site(fusion, None, f"y{i}", ("n",), shape, dtype)) for i, (fusion, shape, dtype) in enumerate(shapes)]
    groups = grouped(sites)
    assert [(group.name, group.dtype, len(group.places)) for group in groups] == [
        ("a 128x768", "float16", 2), ("a 128x64", "float16", 1), ("b 128x768", "float16", 1), ("a 128x768", "float32", 1),
    ]  # fmt: skip


def test_a_winner_is_built_again_and_fused() -> None:
    lab = Lab({"a": 1.05, "A": 1.045})
    of = found(lab, places("a"))
    assert lab.asked == ["", "a", "A"]
    assert fused(of) == {"a"}
    assert of.final.ratio == 1.045
    assert reason(of, "a").startswith("won, 1.050 times as fast [1.050, 1.050], 0.3810 ms against 0.4000 ms alone; won, 1.045 times")
    assert lab.orders[1].fused.sites == (("a", "a0", True), ("a", "a1", True))
    assert (lab.orders[1].automatic_engine, lab.orders[1].fused_engine) == ("first.engine", None)
    assert (lab.orders[2].automatic_engine, lab.orders[2].fused_engine) == ("again.engine", "final.engine")


def test_the_trap_of_fusions_that_are_legal_and_slower() -> None:
    """bert-base: every legal site fused is 4 % slower; each group loses or draws, and nothing is to be fused."""
    lost = result(0.963, layers={"diff": {"summary": "One region was cut in 26."}})
    lab = Lab({"skip": lost, "gelu": 0.94, "qkv": 0.997, "draw": result(1.0005, 0.001), "hair": 1.003})
    of = found(lab, places("skip", 25), places("gelu", 12), places("qkv", 12), places("draw"), places("hair"))
    assert fused(of) == set()
    assert of.final is of.automatic
    assert sorted(lab.asked) == ["", "draw", "gelu", "hair", "qkv", "skip"]  # each once, and no combination of losers
    assert reason(of, "skip").startswith("lost, 0.963 times as fast")
    assert reason(of, "skip").endswith("; left to TensorRT: One region was cut in 26.")
    assert reason(of, "draw").startswith("draw, 1.000 times as fast")
    assert "within the 0.5% that two builds of one model may differ by" in reason(of, "hair")
    assert of.final.outcome == "draw"
    assert of.final.result["ratio"]["median"] == 1.0


def test_a_model_without_sites_is_an_honest_draw() -> None:
    lab = Lab({})
    of = found(lab)
    assert lab.asked == [""]
    assert (of.final.outcome, of.decisions) == ("draw", {})


def test_the_whole_interval_must_lie_above_one() -> None:
    lab = Lab({"sure": result(1.02, 0.001), "unsure": result(1.06, 0.056)})
    of = found(lab, places("sure"), places("unsure"))
    assert fused(of) == {"sure"}
    assert reason(of, "unsure").startswith("draw, 1.060 times as fast [1.004, 1.116]")


def test_winners_are_combined_where_gains_add_up() -> None:
    lab = Lab({"a": 1.05, "b": 1.03, "a b": 1.08})
    of = found(lab, places("a"), places("b"))
    assert lab.asked == ["", "a", "b", "a b", "A B"]
    assert fused(of) == {"a", "b"}
    assert "in the plan of a 128x768 + b 128x768, built again" in reason(of, "b")


def test_gains_that_do_not_add_up_lose_the_weakest_member() -> None:
    lab = Lab({"a": 1.05, "b": 1.03, "c": 1.02, "a b c": 1.03, "a b": 1.075})
    of = found(lab, places("a"), places("b"), places("c"))
    assert lab.asked == ["", "a", "b", "c", "a b c", "a b", "A B"]
    assert fused(of) == {"a", "b"}
    assert reason(of, "c").startswith("won, 1.020 times as fast")
    assert "alone, but no gain beside the others: won, 1.030 times as fast" in reason(of, "c")


def test_a_combination_no_faster_than_its_best_member_is_not_taken() -> None:
    """The second group must add more than two builds differ by, or it has not earned its place."""
    lab = Lab({"a": 1.05, "b": 1.03, "a b": 1.05 * (1 + BUILD_DIFFERENCE / 2)})
    of = found(lab, places("a"), places("b"))
    assert fused(of) == {"a"}
    assert lab.asked[-1] == "A"


def test_a_winner_that_is_a_draw_when_built_again_gives_way_to_the_next_best() -> None:
    lab = Lab({"a": 1.05, "b": 1.03, "a b": 1.02, "A": 1.001, "B": 1.029})
    of = found(lab, places("a"), places("b"))
    assert lab.asked == ["", "a", "b", "a b", "A", "B"]
    assert fused(of) == {"b"}
    assert "alone, but draw, 1.001 times as fast" in reason(of, "a")
    assert "built again" in reason(of, "a")


def test_where_nothing_wins_again_nothing_is_fused() -> None:
    lab = Lab({"a": 1.05, "A": 0.999})
    of = found(lab, places("a"))
    assert (fused(of), of.final) == (set(), of.automatic)
    assert "alone, but lost" in reason(of, "a") or "alone, but draw" in reason(of, "a")


def test_the_number_of_builds_is_bounded() -> None:
    """Groups that all win alone, never together, and never again."""
    names = "abcdefgh"
    table: dict[str, Any] = {name: 1.05 - 0.001 * i for i, name in enumerate(names)}
    for size in range(2, len(names) + 1):
        table |= {" ".join(chosen): 1.04 for chosen in itertools.combinations(names, size)}
        table |= {" ".join(chosen).upper(): 1.0 for chosen in itertools.combinations(names, size)}
    table |= {name.upper(): 1.0 for name in names}
    lab = Lab(table)
    of = found(lab, *(places(name, 1) for name in names))
    assert len(lab.orders) == 1 + len(names) + MOST_COMBINATIONS + MOST_FINALS
    assert fused(of) == set()
    assert len(set(lab.orders)) == len(lab.orders)  # nothing is built twice


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"failed": "crashed (SIGSEGV): it said nothing", "status": -11}, "could not be measured: crashed (SIGSEGV): it said nothing"),
        (result(1.2, agrees=False, marks=["outputs disagree: cosine 0.5 is below 0.9999"]), "outputs disagree: cosine 0.5"),
        (result(1.2, marks=["another process is on the GPU (77)"]), "not to be trusted, 1.200 times as fast"),
        (result(1.2, same_engine=True), "makes the same model as without it"),
    ],
    ids=["crashed", "disagrees", "marked", "same"],
)
def test_what_cannot_be_trusted_is_not_fused_and_costs_nobody_else(answer: dict[str, Any], says: str) -> None:
    lab = Lab({"bad": answer, "good": 1.05})
    of = found(lab, places("bad", 9), places("good"))
    assert fused(of) == {"good"}
    assert says in reason(of, "bad")
    assert lab.asked == ["", "bad", "good", "GOOD"]


def test_a_combination_that_crashes_is_left_for_a_smaller_one() -> None:
    lab = Lab({"a": 1.05, "b": 1.03, "a b": {"failed": "crashed (SIGSEGV): x", "status": -11}})
    of = found(lab, places("a"), places("b"))
    assert fused(of) == {"a"}
    assert "alone, but no gain beside the others: could not be measured: crashed" in reason(of, "b")


def test_a_final_that_disagrees_is_no_win() -> None:
    lab = Lab({"a": 1.05, "A": result(1.05, agrees=False, marks=["outputs disagree: x"])})
    of = found(lab, places("a"))
    assert fused(of) == set()
    assert "alone, but outputs disagree: x" in reason(of, "a")


def test_a_machine_that_times_one_engine_differently_twice_asks_for_more() -> None:
    lab = Lab({"a": 1.02, "b": 1.06}, noise=0.03)
    of = found(lab, places("a"), places("b"))
    assert fused(of) == {"b"}
    assert "within the 3.0% that" in reason(of, "a")


def test_the_budget_ends_midway_and_what_was_proven_is_kept() -> None:
    lab = Lab({"a": 1.05, "b": 1.03, "c": 1.02})
    of = found(lab, places("a", 9), places("b", 8), places("c", 7), minutes=15, cost=6)
    assert lab.asked == ["", "a", "b", "A"]  # c was not started at minute 18, nor a combination; the final is
    assert fused(of) == {"a"}
    assert reason(of, "c") == "not measured: the budget of 15 minutes was spent"
    assert "not all combinations were measured: the budget of 15 minutes was spent" in reason(of, "b")


def test_no_budget_at_all_measures_the_automatic_engine_alone() -> None:
    lab = Lab({})
    of = found(lab, places("a"), minutes=0)
    assert lab.asked == [""]
    assert reason(of, "a") == "not measured: the budget of 0 minutes was spent"


def test_of_equal_promise_what_replaces_most_comes_first() -> None:
    """A whole layer before what is within it."""
    lab = Lab({"norms": 1.0, "layers": 1.0})
    found(lab, places("norms", 20), places("layers", 2, lambda i: [f"{i}-{part}" for part in range(30)]))
    assert lab.asked == ["", "layers", "norms"]


def test_those_of_most_promise_come_first() -> None:
    lab = Lab({"few": 1.0, "many": 1.0, "proven": 1.0, "lost": 1.0})
    expected = {"proven": 1.02, "lost": 0.9}

    def promise(group: Group) -> float:
        return expected.get(group.fusion, 1.0)

    found(lab, places("lost", 30), places("few", 1), places("many", 20), places("proven", 2), promise=promise)
    assert lab.asked == ["", "proven", "many", "few", "lost"]


@pytest.mark.parametrize(("status", "fault"), [(3, MissingHere), (2, BadInput), (-11, BadInput), (None, BadInput)])
def test_without_an_automatic_engine_there_is_nothing_to_search(status: int | None, fault: type[Exception]) -> None:
    with pytest.raises(fault, match="TensorRT's own engine of this model cannot be measured: because"):
        search([], FIRST, AGAIN, lambda candidate: {"failed": "because", "status": status}, Budget(15, lambda: 0))


def test_an_interrupt_goes_through() -> None:
    lab = Lab({"a": 1.05, "b": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        found(lab, places("a", 9), places("b"))


# Sites that claim the same nodes ---------------------------------------------------------------------------------------


def shared(name: str, *of: str) -> Callable[[int], Iterable[str]]:
    return lambda i: [f"{other}-node{i}" for other in of]


def test_of_two_groups_that_claim_the_same_nodes_the_better_one_is_fused() -> None:
    lab = Lab({"small": 1.02, "large": 1.05})
    of = found(lab, places("small"), places("large", nodes=shared("large", "small", "other")))
    assert lab.asked == ["", "large", "small", "LARGE"]
    assert fused(of) == {"large"}
    assert "alone, but its nodes are part of large 128x768 at 'large0', which gains more" in reason(of, "small")


def test_several_small_groups_may_beat_the_large_one_that_excludes_them() -> None:
    lab = Lab({"a": 1.04, "b": 1.05, "large": 1.06, "a b": 1.09})
    of = found(lab, places("a"), places("b"), places("large", nodes=shared("large", "a", "b")))
    assert fused(of) == {"a", "b"}
    assert lab.asked[-2:] == ["a b", "A B"]
    assert all("large" not in name or name == "large" for name in lab.asked)  # never together with what it excludes
    assert "its nodes are part of" in reason(of, "large")


def test_what_the_better_one_leaves_free_goes_to_the_other() -> None:
    """The large fusion has two of the three places; the small one gets the third."""
    lab = Lab({"small": 1.03, "large": 1.05, "large small": 1.061})
    of = found(lab, places("small", 3), places("large", 2, nodes=shared("large", "small")))
    assert of.final.keys == {("large", "large0"), ("large", "large1"), ("small", "small2")}
    assert of.decisions["small", "small2"][0]
    assert not of.decisions["small", "small0"][0]


def test_a_fusion_that_needs_another_is_measured_with_it() -> None:
    needed = places("pack", 1)
    needing = places("attention", 1, needs=[needed[0].site.key])
    lab = Lab({"pack": 0.98, "attention pack": 1.06})
    of = found(lab, needed, needing)
    assert fused(of) == {"pack", "attention"}
    assert reason(of, "pack").startswith("lost, 0.980 times as fast")
    assert "built again" in reason(of, "pack")


def test_a_fusion_that_adds_nothing_to_what_it_needs_is_left() -> None:
    needed = places("pack", 1)
    needing = places("attention", 1, needs=[needed[0].site.key])
    lab = Lab({"pack": 1.06, "attention pack": 1.062})
    of = found(lab, needed, needing)
    assert fused(of) == {"pack"}
    assert "less than pack 128x768: won, 1.060" in reason(of, "attention")


def test_what_needs_a_site_that_another_took_goes_with_it() -> None:
    """attention needs pack, whose node the large fusion claims: without pack there is no attention."""
    needed = places("pack", 1)
    needing = places("attention", 1, needs=[needed[0].site.key])
    lab = Lab({"pack": 1.0, "attention pack": 1.03, "large": 1.05})
    of = found(lab, needed, needing, places("large", 1, nodes=shared("large", "pack")))
    assert lab.asked == ["", "pack", "attention pack", "large", "LARGE"]
    assert fused(of) == {"large"}


def test_sites_of_folding_that_were_decided_before_stay_decided() -> None:
    left = Rewriting("measure", sites=(("conv_bn", "conv_bn", False),))
    first, again = (Candidate(**{**vars(of), "automatic": left, "fused": left}) for of in (FIRST, AGAIN))
    lab = Lab({"a conv_bn": 1.05})
    search(grouped(places("a", 1)), first, again, lab, Budget(15, lambda: 0))
    assert lab.orders[0].fused == left
    assert lab.orders[1].fused.sites == (("conv_bn", "conv_bn", False), ("a", "a0", True))


def test_element_wise_chains_are_decided_on_by_their_form() -> None:
    """Each form is a kernel of its own; the kinds of other fusions are measured together, as before."""

    def site(fusion: str, variant: str, output: str) -> Place:
        return Place(Site(fusion, variant, output, (output,), "1x96x80x80", "float16"))

    found = grouped(
        [
            site("elementwise", "Mul-Add", "a"),
            site("elementwise", "Add-Clip-Mul-Div", "b"),
            site("elementwise", "Mul-Add", "c"),
            site("bias_gelu", "erf", "d"),
            site("bias_gelu", "tanh", "e"),
        ]
    )
    assert [[place.site.output for place in group.places] for group in found] == [["a", "c"], ["b"], ["d", "e"]]
    assert [group.variant for group in found] == ["Mul-Add", "Add-Clip-Mul-Div", None]
    assert found[0].name == "elementwise Mul-Add 8192x80"


def chains(counts: dict[str, int], shapes: int) -> list[Place]:
    """So many sites of each form, in turn at so many shapes."""
    return [
        Place(
            Site(
                "elementwise",
                form,
                f"{form}-{number}",
                (f"{form}-{number}",),
                f"1x{1 << number % shapes}x80x{8 << number % shapes}",
                "float16",
            )
        )
        for form, count in counts.items()
        for number in range(count)
    ]


def test_chains_of_many_shapes_are_one_group_a_form() -> None:
    found = grouped([*chains({"Mul-Add": 12, "Mul-Add-Silu": 6}, shapes=6), *places("skip_layernorm", 2)])
    assert [(group.name, len(group.places)) for group in found] == [
        ("elementwise Mul-Add", 12),
        ("elementwise Mul-Add-Silu", 6),
        ("skip_layernorm 128x768", 2),
    ]


def test_chains_of_many_forms_are_few_groups() -> None:
    """Those of most sites alone, all others together; every site is in one group."""
    counts = {f"form{number}": 1 + (number < 5) + (number < 3) for number in range(40)}
    given = chains(counts, shapes=1)
    found = grouped(given)
    assert len(found) == 6
    assert found[-1].name == "elementwise of 35 forms"
    assert found[-1].variant is None
    assert sorted(place.site.output for group in found for place in group.places) == sorted(place.site.output for place in given)
    assert len(grouped(chains({f"form{number}": 3 for number in range(40)}, shapes=1))) == 1
    assert len(grouped(chains({f"form{number}": 40 - number for number in range(40)}, shapes=1))) == 8


# Groups that win together -----------------------------------------------------------------------------------------------


def stages(fusion: str, *groups: str, count: int = 2) -> list[Place]:
    """Groups of one fusion at different widths, called as given."""
    return [place for i, group in enumerate(groups) for place in places(fusion, count, group=group, width=96 * 2**i)]


def test_all_groups_of_a_fusion_win_together_where_each_alone_loses() -> None:
    lab = Lab({"p q": 1.3, "p": 0.98, "q": 0.99})
    of = found(lab, stages("conv", "p", "q"))
    assert lab.asked == ["", "p q", "p", "q", "P Q"]  # leaving one out is the other one alone
    assert fused(of) == {"conv"}
    assert "in the plan of conv 128x96 + conv 128x192, built again" in of.decisions["conv", "p0"][1]


def test_a_group_that_costs_the_bundle_something_is_left_out_of_it() -> None:
    lab = Lab({"p q r": 1.3, "p": 1.05, "q": 0.99, "r": 0.98, "p r": 1.25, "p q": 1.33})
    of = found(lab, stages("conv", "p", "q", "r"))
    assert lab.asked == ["", "p q r", "p", "q", "r", "p r", "p q", "P Q"]  # p won alone: nothing speaks against it
    assert of.decisions["conv", "r0"] == (
        False,
        "no gain beside the others: won, 1.300 times as fast [1.300, 1.300], 0.3077 ms against 0.4000 ms with it, "
        "won, 1.330 times as fast [1.330, 1.331], 0.3008 ms against 0.4000 ms without",
    )


def test_fusions_that_belong_together_are_tried_together_first_and_not_alone() -> None:
    """ConvNeXt: each fusion leaves reformats at its borders, both leave none."""
    together = [frozenset({"conv", "linear"})]
    lab = Lab({"c d l m": 1.6, "c d": 0.97, "l m": 1.1, "other": 1.02, "c d l m other": 1.64,
               "d l m other": 1.5, "c l m other": 1.64, "c m other": 1.3, "c l other": 1.3})  # fmt: skip
    of = found(lab, stages("conv", "c", "d"), places("other", 1), stages("linear", "l", "m"), together=together)
    assert lab.asked == [
        "", "c d l m", "c d", "l m", "other", "c d l m other", "d l m other", "c l m other", "c m other", "c l other", "C L M OTHER",
    ]  # fmt: skip
    assert fused(of) == {"conv", "linear", "other"}
    assert not of.decisions["conv", "d0"][0]
    assert "no gain beside the others: won, 1.640" in of.decisions["conv", "d0"][1]


def test_fusions_that_belong_together_and_lose_together_are_measured_alone() -> None:
    lab = Lab({"conv linear": 0.98, "conv": 1.02, "linear": 0.95})
    of = found(lab, places("conv"), places("linear"), together=[frozenset({"conv", "linear"})])
    assert lab.asked == ["", "conv linear", "conv", "linear", "CONV"]
    assert fused(of) == {"conv"}


def test_a_bundle_is_no_bundle_where_one_group_is_all_there_is() -> None:
    lab = Lab({"conv": 1.02})
    found(lab, places("conv"), together=[frozenset({"conv", "linear"})])
    assert lab.asked == ["", "conv", "CONV"]


def test_a_bundle_leaves_out_what_an_earlier_group_of_it_claims() -> None:
    lab = Lab({"conv linear": 1.3, "linear": 1.1, "conv": 1.1})
    clash = [place for i in (0, 1) for place in places("linear", 2, nodes=shared("linear", "conv") if i else None)[i : i + 1]]
    of = found(lab, places("conv"), clash, together=[frozenset({"conv", "linear"})])
    assert of.final.keys == {("conv", "conv0"), ("conv", "conv1"), ("linear", "linear0")}


def test_a_bundle_that_fails_costs_nobody_else() -> None:
    lab = Lab({"p q": {"failed": "crashed (SIGSEGV): x", "status": -11}, "p": 1.05, "q": 0.99})
    of = found(lab, stages("conv", "p", "q"))
    assert of.final.keys == {("conv", "p0"), ("conv", "p1")}


def test_a_budget_that_ends_after_the_bundle_keeps_it() -> None:
    lab = Lab({"p q": 1.3})
    of = found(lab, stages("conv", "p", "q"), minutes=10, cost=6)
    assert lab.asked == ["", "p q", "P Q"]
    assert of.final.names == "conv 128x96 + conv 128x192"


def test_the_number_of_builds_is_bounded_with_bundles_too() -> None:
    names = "abcdefghij"
    others = {" ".join(name for name in names if name != out): 1.2 for out in names}
    lab = Lab({" ".join(names): 1.3, **dict.fromkeys(names, 0.99), **others})
    of = found(lab, stages("conv", *names, count=1))
    assert len(lab.orders) == 1 + 1 + len(names) + MOST_DROPPED + 1
    assert of.final.names == "conv (10 groups)"
