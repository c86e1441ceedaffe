"""`onnxfuse report`, as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from benchmarks import synthetic
from tests.report import sample

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(sample.with_graph(sample.optimize())), encoding="utf-8")
    return path


def test_a_report_is_shown_and_written_as_a_page(run_cli: Callable[..., Any], written: Path) -> None:
    shown = run_cli("report", str(written))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("✓ y.onnx: 3 sites fused, 1 kept as it was; the outputs agree")
    assert "debugging:" in shown.stdout
    page = written.with_suffix(".html")
    done = run_cli("report", str(written), "-o", str(page))
    assert (done.returncode, done.stdout) == (0, f"wrote {page}\n"), done.stderr
    assert "<h1>y.onnx</h1>" in page.read_text(encoding="utf-8")
    assert run_cli("report", "-o", str(page), str(written)).returncode == 0  # the option may stand before


def test_reports_on_one_model_become_one_page(run_cli: Callable[..., Any], written: Path, tmp_path: Path) -> None:
    compared = tmp_path / "compare.json"
    compared.write_text(json.dumps(sample.compare()), encoding="utf-8")
    out = tmp_path / "all.json"
    done = run_cli("report", str(written), str(compared), str(RESULTS / "h200-kernels.json"), "-o", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert {"sites", "graph", "timings", "roofline", "axes"} <= set(report)


def test_what_optimize_and_compare_write_is_shown(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    model, fused = tmp_path / "m.onnx", tmp_path / "f.onnx"
    onnx.save(synthetic.by_nodes(60), model)
    reports = tmp_path / "o.json", tmp_path / "o.html"
    options = [part for path in reports for part in ("--report", str(path))]
    done = run_cli("optimize", str(model), "-o", str(fused), "--policy", "all", *options)
    assert done.returncode == 0, done.stderr
    assert 'data-side="after"' in reports[1].read_text(encoding="utf-8")
    done = run_cli("compare", str(model), str(fused), "--report", str(tmp_path / "c"))
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in (reports[0], tmp_path / "c" / "report.json"))
    assert [len(report["graph"]["after"]["nodes"]) for report in (first, second)] == [len(first["graph"]["after"]["nodes"])] * 2
    # Nobody told compare of the sites: the fused file says them itself.
    assert {site["node"] for site in second["sites"]} <= {site["node"] for site in first["sites"]}
    done = run_cli("report", "diff", str(reports[0]), str(reports[0]))
    assert (done.returncode, done.stdout) == (0, "· No difference that matters\n"), done.stderr


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_a_difference_is_shown_and_written(run_cli: Callable[..., Any], written: Path, tmp_path: Path, suffix: str) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(sample.optimize(1.0)), encoding="utf-8")
    out = tmp_path / f"diff{suffix}"
    done = run_cli("report", "diff", str(written), str(other), "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("✗ 1 no longer agrees")
    assert "no longer agree" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.json"], "none.json: no such file; name a file that"),
        (["{report}", "-o", "page.pdf"], "-o page.pdf: the suffix says what is written; name a .html or .json file"),
        (["{report}", "-o", "{report}"], "is one of the reports that are read; name another file"),
        (["{report}", "-o", "nowhere/page.html"], "nowhere"),
        (["diff", "{report}"], "Missing argument"),
        (["{report}", "{other}"], "reports on different models (y.onnx, z.onnx)"),
        (["{newer}"], "a report of schema 9, and this onnxfuse reads those up to 2; update onnxfuse"),
        (["{text}"], "not JSON"),
    ],
)
def test_wrong_usage_is_one_line(refuses: Callable[..., str], written: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    files = {"report": str(written)}
    contents = {"other": json.dumps(sample.optimize(name="z")), "newer": '{"schema": 9, "kind": "optimize"}', "text": "hello"}
    for name, content in contents.items():
        files[name] = str(tmp_path / f"{name}.json")
        Path(files[name]).write_text(content, encoding="utf-8")
    refuses("report", *(argument.format(**files) for argument in arguments), status=2, words=(words,))
