"""The page: complete, safe with hostile names, and without anything to fetch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn

import pytest

from onnxfuse.report import html
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


@pytest.mark.parametrize("report", [sample.optimize(1.0, sample.HOSTILE), sample.compare(1.0, sample.HOSTILE)])
def test_hostile_names_stay_text(report: dict[str, Any]) -> None:
    text = html.page(report)
    page = Page(text)
    assert "<script>alert" not in text
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<img src=x onerror=alert(2)>" in page.text  # shown as it is
    assert "{{ 7*7 }}" in page.text


def test_a_name_does_not_turn_the_text_around() -> None:
    text = html.page(sample.optimize(name="a\u202eb\x1b[31mc\nd"))
    assert "a\ufffdb\ufffd[31mc\ufffdd" in text
    assert "\u202e" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("report", REPORTS)
def test_nothing_is_fetched(report: dict[str, Any]) -> None:
    text = html.page(report)
    assert not re.search(r"https?://|//[a-z]", re.sub(r"(?m)^\s*//.*$", "", text))
    assert "@import" not in text
    assert "url(" not in text
    page = Page(text)
    assert not any(attributes.keys() & {"src", "srcset", "data"} for _, attributes in page.tags)
    assert {tag for tag, attributes in page.tags if "href" in attributes} == {"a"}
    assert all(attributes["href"].startswith("#") for _, attributes in page.tags if attributes.get("href"))
    assert "default-src 'none'" in text


def test_latency_is_drawn_to_scale_and_a_draw_is_a_draw() -> None:
    text = html.page(sample.compare())
    widths = [float(width) for width in re.findall(r'<rect class="bar"[^>]* width="([\d.]+)"', text)]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)
    assert "faster, 2.000× [1.950, 2.050]" in text
    assert "draw, 1.000× [0.970, 1.030]" in text
    assert "same.engine and y.engine take the same time" in text


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


def test_the_page_works_in_a_browser(tmp_path: Path, require_external: Callable[[str], NoReturn]) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        require_external("chromium is not on PATH")
    act = """<script>
      const type = (words) => { field.value = words; field.dispatchEvent(new Event("input")); };
      const rows = () => document.querySelectorAll("tr[data-row]:not([hidden])").length;
      const all = rows(); type("bias_gelu no verdict");
      const hidden = document.querySelectorAll("details.group[hidden]").length;
      document.title = [all, rows(), document.getElementById("found").textContent, hidden].join("|");
      type(""); document.title += "|" + rows();
    </script></body>"""
    path = tmp_path / "page.html"
    path.write_text(html.page(sample.optimize(name=sample.HOSTILE)).replace("</body>", act), encoding="utf-8")
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, "--headless", *options, "--enable-logging=stderr", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    # All rows: three sites, one kept, one miss. The words leave one; every other group is hidden.
    assert re.search(r"<title>5\|1\|1 place\|2\|5</title>", done.stdout), re.findall("<title>.*?</title>", done.stdout)


def test_precision_says_what_stays_in_float32() -> None:
    from onnxfuse.graph.precision import PrecisionReport
    from onnxfuse.report.json import plain

    converted = PrecisionReport("fp16", 40, (("norm", "ReduceMean", "values reach 1e6"),), 3, clamped={"mask": 2})
    page = Page(html.page({**sample.optimize(), "converted": plain(converted)}))
    assert "40 nodes compute in fp16, 1 stay in float32; 3 casts between them." in page.text
    assert "values reach 1e6" in page.text
    assert "2 in mask" in page.text
