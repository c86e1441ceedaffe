"""The page in headless Chromium: nothing on the console, nothing fetched, search, click, keys, accessibility, paper, a large model."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import onnx
import pytest

from benchmarks import synthetic
from onnxfuse import pipeline
from onnxfuse.report import complete, html
from tests.report import gpu, sample


@dataclasses.dataclass
class Tab:
    """A page that was opened; said: console and errors; asked: what it wanted from elsewhere."""

    page: Any
    said: list[str]
    asked: list[str]

    def js(self, expression: str) -> Any:
        return self.page.evaluate(expression)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with contextlib.ExitStack() as stack:
        if path is None:
            yield None
            return
        playwright = stack.enter_context(sync_api.sync_playwright())
        yield stack.enter_context(playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]))


@pytest.fixture
def opened(browser: Any, tmp_path: Path, require_external: Callable[[str], NoReturn]) -> Iterator[Callable[..., Tab]]:
    """Opens reports; at the end nothing may have been said on a console or fetched."""
    if browser is None:
        require_external("chromium is not on PATH")
    tabs: list[Tab] = []
    with contextlib.ExitStack() as stack:

        def open_report(report: dict[str, Any], **options: Any) -> Tab:
            path = tmp_path / f"{len(tabs)}.html"
            html.write(report, path)
            context = stack.enter_context(contextlib.closing(browser.new_context(viewport={"width": 1300, "height": 900}, **options)))
            tab = Tab(context.new_page(), [], [])
            tab.page.on("console", lambda message: tab.said.append(message.text))
            tab.page.on("pageerror", lambda error: tab.said.append(str(error)))
            tab.page.on("dialog", lambda dialog: (tab.said.append(f"dialog {dialog.message}"), dialog.dismiss()))
            tab.page.on("request", lambda request: tab.asked.append(request.url))
            tab.page.goto(path.as_uri())
            if report.get("kind") != "diff":
                tab.page.wait_for_selector("html[data-ready]")
            tabs.append(tab)
            return tab

        yield open_report
        for tab in tabs:
            assert tab.said == []
            assert [url for url in tab.asked if not url.startswith(("file:", "blob:", "data:image/png"))] == []
            assert sum(url.startswith("file:") for url in tab.asked) == 1


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real report of a small transformer, with made-up GPU parts."""
    return optimized(tmp_path_factory.mktemp("transformer"), 240)


def optimized(folder: Path, nodes: int) -> dict[str, Any]:
    source, out = folder / "model.onnx", folder / "fused.onnx"
    onnx.save(synthetic.by_nodes(nodes), source)
    result = pipeline.optimize(source, out, policy="all", check=False)
    return gpu.with_gpu_parts(complete.complete({**result.to_dict(), "machine": {}}, source, out))


START = "document.querySelector('#panes').begin()"


def test_the_search_finds_and_a_click_shows_the_decision(opened: Callable[..., Tab], transformer: dict[str, Any]) -> None:
    tab = opened(transformer)
    tab.page.fill("#find", "skip_layernorm SkipLayerNormalization")
    tab.page.wait_for_selector("#results:not([hidden])")
    count = sum(node["op"] == "onnxfuse.SkipLayerNormalization" for node in transformer["graph"]["after"]["nodes"])
    assert count > 2
    assert tab.page.inner_text("#found-count") == f"{count} found"
    tab.page.click("#results li:nth-child(2) button")
    detail = tab.page.inner_text("#node-detail")
    for words in (
        "SkipLayerNormalization",
        "fused",
        "policy all takes every legal site",
        "inputs",
        "outputs",
        "engine layers",
        "fused: skip",
    ):
        assert words in detail, words
    assert "fused by skip_layernorm" in tab.page.inner_text("#node-said")
    tab.page.fill("#find", "no such node")
    tab.page.get_by_text("nothing found").wait_for()


def test_a_click_on_the_drawing_shows_the_node_under_the_pointer(opened: Callable[..., Tab], transformer: dict[str, Any]) -> None:
    tab = opened(transformer)
    tab.js(START)
    tab.page.locator("#graph").scroll_into_view_if_needed()
    tab.page.fill("#find", "hidden_states")
    tab.page.press("#find", "Enter")  # the graph's input is in the middle of the pane now
    tab.page.wait_for_timeout(500)
    tab.page.locator("[data-side=before] .canvas").scroll_into_view_if_needed()
    tab.page.keyboard.press("Escape")
    box = tab.page.locator("[data-side=before] .canvas").bounding_box()
    tab.page.mouse.click(box["x"] + 5, box["y"] + box["height"] - 5)  # beside: nothing is chosen
    tab.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.page.locator("#node-detail").get_by_text("Graph input").wait_for()


def test_keys_walk_the_graph_and_open_groups(opened: Callable[..., Tab], transformer: dict[str, Any]) -> None:
    tab = opened(transformer)
    tab.js(START)
    said = lambda: tab.page.inner_text("#node-said")  # noqa: E731
    tab.page.focus("[data-side=before] .canvas")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("ArrowDown")
    assert said().startswith("graph input")
    seen = [said()]
    for _ in range(12):
        tab.page.keyboard.press("ArrowDown")
        seen.append(said())
    assert len(set(seen)) > 8
    region = next(i for i, text in enumerate(seen) if text.startswith("region"))
    for _ in range(len(seen) - 1 - region):
        tab.page.keyboard.press("ArrowUp")
    assert said() == seen[region]
    assert "closed" in said()
    tab.page.keyboard.press("Enter")
    assert "open" in said()


def test_keys_walk_the_timeline_and_lead_to_the_graph(opened: Callable[..., Tab], transformer: dict[str, Any]) -> None:
    tab = opened(transformer)
    tab.page.locator("#chart-layers").scroll_into_view_if_needed()
    tab.page.wait_for_selector("#chart-layers svg")
    tab.page.focus("#chart-layers")
    layers = transformer["layers"]
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowRight")
    assert layers["automatic"][1]["name"] in tab.page.inner_text("#layer-detail")
    tab.page.keyboard.press("ArrowDown")
    said = tab.page.inner_text("#layer-said")
    assert said.startswith("fused: ")
    assert any(layer["name"] in said for layer in layers["fused"])
    tab.page.keyboard.press("+")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#node-detail .what b")


def test_filter_leaves_the_rows_that_hold_the_words(opened: Callable[..., Tab]) -> None:
    tab = opened(sample.optimize())
    rows = "document.querySelectorAll('tr[data-row]:not([hidden])').length"
    assert tab.js(rows) == 5
    tab.page.fill("#filter", "bias_gelu no verdict")
    assert tab.js(rows) == 1
    assert tab.page.inner_text("#found") == "1 place"
    tab.page.fill("#filter", "")
    assert tab.js(rows) == 5


def test_hostile_names_are_drawn_and_told_as_text(opened: Callable[..., Tab]) -> None:
    """The fixture fails on a dialog, an error or a request."""
    tab = opened(sample.full(sample.HOSTILE))
    tab.js("for (const part of document.querySelectorAll('.chart, #panes')) part.begin?.()")
    tab.page.fill("#find", "alert")
    tab.page.wait_for_selector("#results:not([hidden])")
    tab.page.click("#results button")
    tab.js("document.querySelector('#node-list').open = true")
    tab.page.wait_for_selector("#node-list table")
    assert "<img src=x onerror=alert(2)>" in tab.page.inner_text("#node-detail")
    assert tab.js("document.querySelectorAll('img, main script').length") == 0
    assert "\x1b" not in tab.page.inner_text("body")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_fault_of_accessibility(opened: Callable[..., Tab], transformer: dict[str, Any], scheme: str) -> None:
    """The rules of axe: names, roles, contrast, order of headings, keyboard reach."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    tab = opened(transformer if scheme == "light" else sample.full(), color_scheme=scheme, reduced_motion="reduce")
    tab.js("for (const part of document.querySelectorAll('.chart, #panes')) part.begin?.()")
    tab.page.fill("#find", "Add" if scheme == "light" else "y")
    tab.page.wait_for_selector("#results:not([hidden])")
    found = axe.run(tab.page).response["violations"]
    assert [(fault["id"], node["html"][:160], node["failureSummary"][:300]) for fault in found for node in fault["nodes"][:2]] == []


def test_tab_reaches_every_control_in_the_order_of_the_page(opened: Callable[..., Tab]) -> None:
    tab = opened(sample.full())
    contents = tab.page.query_selector_all(".contents a")
    tops = []
    for _ in range(80):
        tab.page.keyboard.press("Tab")
        tops.append(tab.js("document.activeElement.getBoundingClientRect().top + scrollY"))
        if tab.js("document.activeElement.id") == "filter":
            break
    else:
        pytest.fail("the filter was not reached")
    # Behind the list of contents, which stays at the top; controls of one line may stand a little higher.
    assert all(after >= before - 60 for before, after in itertools.pairwise(tops[len(contents) + 1 :]))


def test_paper_has_charts_and_no_controls(opened: Callable[..., Tab], transformer: dict[str, Any]) -> None:
    tab = opened(transformer, color_scheme="dark")
    tab.page.emulate_media(media="print", color_scheme="dark")
    tab.js("dispatchEvent(new Event('beforeprint'))")
    assert tab.js("[...document.querySelectorAll('.chart')].every((chart) => chart.querySelector('svg'))")
    assert tab.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not tab.page.is_visible(".contents")
    pictures = tab.page.locator(".pane .picture")
    assert pictures.count() == 2
    assert all(tab.js("[...document.images].map((image) => image.complete && image.naturalHeight > 300)"))
    tab.js("dispatchEvent(new Event('afterprint'))")
    assert pictures.count() == 0


def test_a_model_of_two_thousand_nodes(opened: Callable[..., Tab], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stays below 3 MB; how long it takes to open is printed, and no condition."""
    report = optimized(tmp_path, 2500)
    assert len(report["graph"]["before"]["nodes"]) >= 2000
    text = html.page(report)
    assert len(text.encode()) < 3_000_000
    tab = opened(report)
    tab.js(START)
    drawn = tab.js("performance.getEntriesByName('graph', 'measure')[0].duration")
    interactive = tab.js("performance.timing.domInteractive - performance.timing.navigationStart")
    tab.page.locator("#graph").scroll_into_view_if_needed()
    everything = tab.js(
        "(() => { const t = performance.now(); document.querySelector('[data-view=expand]').click(); return performance.now() - t; })()"
    )
    step = """(async () => {
      const took = [];
      for (let i = 0; i < 24; i++) {
        const begun = performance.now();
        document.querySelector(`[data-view=${i % 2 ? "in" : "out"}]`).click();
        await new Promise(requestAnimationFrame);
        took.push(performance.now() - begun);
      }
      return took.sort((a, b) => a - b)[12];
    })()"""
    frame = tab.js(step)
    with capsys.disabled():
        size = f"{len(text.encode()) / 1e6:.2f} MB"
        print(f"\n2,000 nodes: page {size}, interactive {interactive:.0f} ms, graph drawn in {drawn:.0f} ms,", end=" ")
        print(f"all of it open in {everything:.0f} ms, then {frame:.0f} ms a frame")
    tab.page.fill("#find", "MatMul")
    tab.page.wait_for_selector("#results:not([hidden])")


def test_a_difference_opens_without_a_script(opened: Callable[..., Tab]) -> None:
    from onnxfuse.report import diff

    found = diff.between(sample.full(sample.HOSTILE), sample.full(sample.HOSTILE), (sample.HOSTILE, sample.HOSTILE))
    tab = opened(json.loads(json.dumps(found)), java_script_enabled=False)
    assert "Difference of two reports" in tab.page.inner_text("body")
