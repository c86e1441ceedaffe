"""The page: complete, safe with hostile names, and without anything to fetch."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from onnxfuse.report import html, summary
from tests.report import sample


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


REPORTS = [sample.optimize(), sample.optimize(1.0), sample.compare(), sample.compare(1.0)]


@pytest.mark.parametrize("report", REPORTS)
def test_verdict_comes_first(report: dict[str, Any]) -> None:
    text = html.page(report)
    good = report.get("agrees", (report.get("check") or {}).get("agrees"))
    assert ('class="verdict good"' if good else 'class="verdict bad"') in text
    assert text.index('class="verdict') < text.index("<h2>")


HOSTILE = [sample.optimize(1.0, sample.HOSTILE), sample.compare(1.0, sample.HOSTILE), sample.full(sample.HOSTILE)]


@pytest.mark.parametrize("report", HOSTILE, ids=["optimize", "compare", "all"])
def test_hostile_names_stay_text(report: dict[str, Any]) -> None:
    text = html.page(report)
    page = Page(text)
    assert "<script>alert" not in text
    # The packed data, the libraries that are needed, the page's own; none of them from a name.
    assert sum(tag == "script" for tag, _ in page.tags) == len(text.split("'sha256-"))
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<img src=x onerror=alert(2)>" in page.text  # shown as it is
    assert "{{ 7*7 }}" in page.text


def test_a_name_that_fills_a_page_loses_its_middle() -> None:
    name = "start" + "x" * 5000 + "end"
    shown = summary.visible(f"output {name} differs")
    assert re.fullmatch(r"output startx+…x+end differs", shown)
    assert len(shown) < 220
    assert summary.visible("x" * 400) == "x" * 400


def test_an_output_of_nan_uses_no_share_of_the_tolerance_but_all_of_it() -> None:
    report = sample.compare(1.0)
    report["others"] = report["others"][:1]
    metrics = next(iter(report["others"][0]["check"]["outputs"].values()))
    metrics |= {"agrees": False, "used": None, "reason": "NaN on one side only"}
    assert summary.worst_used(report["others"][0]["check"]) == "over"
    assert summary.worst_used({"outputs": {"a": {"used": 0.25}, "b": {}}}) == "25 %"
    assert re.search(r"over\s*of the tolerance used", Page(html.page(report)).text)


def test_a_name_does_not_turn_the_text_around() -> None:
    text = html.page(sample.optimize(name="a\u202eb\x1b[31mc\nd"))
    assert "a\ufffdb\ufffd[31mc\ufffdd" in text
    assert "\u202e" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("report", [*REPORTS, sample.full()])
def test_nothing_is_fetched(report: dict[str, Any]) -> None:
    """What a browser really asks for is tested in test_browser.py."""
    text = html.page(report)
    assert "@import" not in text
    assert "sourceMappingURL" not in text
    page = Page(text)
    assert not any(attributes.keys() & {"src", "srcset", "data"} for _, attributes in page.tags)
    assert {tag for tag, attributes in page.tags if "href" in attributes} == {"a"}
    assert all(attributes["href"].startswith("#") for _, attributes in page.tags if attributes.get("href"))
    assert "default-src 'none'" in text


def test_the_policy_allows_the_scripts_of_the_page_and_no_others() -> None:
    text = html.page(sample.full())
    policy = re.search(r"script-src ([^;]*);", text)
    assert policy
    allowed = set(policy[1].split())
    inside = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(inside) == 5
    assert allowed == {f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in inside}


def test_scripts_write_text_and_never_markup() -> None:
    for name in html.SCRIPTS:
        script = (Path(html.__file__).parent / "templates" / name).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|createContextualFragment", script
        )


def test_libraries_are_those_that_were_vendored() -> None:
    folder = Path(html.__file__).parent / "assets"
    for entry in html.assets():
        assert hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
        assert f"{entry['package']} {entry['version']}" in (folder / "LICENSES.txt").read_text(encoding="utf-8")
    assert {entry["file"] for entry in html.assets()} == {path.name for path in folder.glob("*.js")} == set(html.LIBRARIES)
    assert "Permission is hereby granted" in html.page(sample.full())  # the licences travel with the page


def test_latencies_are_told_and_a_draw_is_a_draw() -> None:
    text = html.page(sample.compare())
    assert "faster, 2.000× [1.950, 2.050]" in text
    assert "draw, 1.000× [0.970, 1.030]" in text
    assert "same.engine and y.engine take the same time" in text


def test_every_part_is_there_and_in_the_list_of_contents() -> None:
    page = Page(html.page(sample.full()))
    ids = {attributes.get("id") for _, attributes in page.tags}
    targets = [str(attributes["href"])[1:] for tag, attributes in page.tags if tag == "a"]
    assert set(targets) <= ids
    assert {
        "axes",
        "latency",
        "models",
        "layers",
        "graph",
        "accuracy",
        "budget",
        "roofline",
        "outputs",
        "plan",
        "misses",
        "machine",
    } <= set(targets)


def test_a_page_without_graph_or_layers_leaves_their_libraries_out() -> None:
    small, large = html.page(sample.compare()), html.page(sample.full())
    assert "/*! cytoscape 3" in large
    assert "/*! cytoscape 3" not in small
    assert len(small) < 700_000


def test_sites_misses_and_reasons_are_there() -> None:
    page = Page(html.page(sample.optimize(1.0)))
    for words in ("layernorm", "bias_gelu", "erf", "no verdict y", "constant is y", "y_out", "a note on y", "differs:", "out.onnx"):
        assert words in page.text
    assert "NaN at the same 1 place on both sides" in page.text


def test_a_large_report_stays_small_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    text = html.page(sample.optimize(sites=2500))
    assert len(text) < 3_000_000
    assert "500 more are in the JSON report" in text


def test_a_report_without_sites_or_check() -> None:
    report = {**sample.optimize(), "sites": [], "misses": [], "check": None}
    page = Page(html.page(report))
    assert "No fusion has a site in this model." in page.text
    assert "The outputs were not checked." in page.text


def test_precision_says_what_stays_in_float32() -> None:
    from onnxfuse.graph.precision import PrecisionReport
    from onnxfuse.report.json import plain

    converted = PrecisionReport("fp16", 40, (("norm", "ReduceMean", "values reach 1e6"),), 3, clamped={"mask": 2})
    page = Page(html.page({**sample.optimize(), "converted": plain(converted)}))
    assert "40 nodes in fp16, 1 in float32: 1 " in page.text
    assert "values reach 1e6" in page.text
    assert "2 in mask" in page.text
