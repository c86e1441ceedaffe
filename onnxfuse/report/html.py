"""Reports as one HTML page that needs nothing else: styles, script and charts are inside, and nothing is fetched.

Every name comes from a model file and may be hostile, so all of it goes through the template engine's escaping.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxfuse.report import summary

MOST_ROWS = 2000  # rows of one table: a browser stays fluid, and the JSON holds the rest


def page(report: Mapping[str, Any]) -> str:
    """The page of a report of `optimize` or `compare`, as made by `report.json`."""
    from importlib import resources

    import jinja2

    folder = resources.files("onnxfuse.report") / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: summary.visible(value) if type(value) is str else value,  # not what is markup already
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(figure=summary.figure, cosine=summary.cosine, percent=summary.percent, outputs=summary.outputs)
    return environment.get_template("page.html.j2").render(
        report=report,
        name=summary.model_name(report),
        verdict=summary.verdict(report),
        groups=summary.groups(report),
        checks=summary.checks(report),
        bars=summary.bars(report),
        misses=summary.misses(report),
        most=MOST_ROWS,
    )


def write(report: Mapping[str, Any], path: Path) -> None:
    """Write the page whole or not at all. BadInput where the file system refuses."""
    from onnxfuse.graph.files import atomic

    with atomic(path) as temporary:
        temporary.write_text(page(report), encoding="utf-8", errors="backslashreplace")
