"""Reports from files: every schema, the published form, and one line for what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest

from benchmarks import synthetic
from onnxfuse import pipeline
from onnxfuse.errors import BadInput
from onnxfuse.report import complete, html, read, terminal
from onnxfuse.report import json as reports
from tests.report import gpu, sample

ROOT = Path(__file__).resolve().parent.parent.parent


def schema(name: str = "schema.json") -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((Path(read.__file__).parent / name).read_text(encoding="utf-8"))
    return loaded


def test_the_published_schemas_are_schemas() -> None:
    for name in ("schema.json", "diff.schema.json"):
        jsonschema.Draft202012Validator.check_schema(schema(name))


@pytest.mark.parametrize("report", [sample.optimize(), sample.optimize(1.0), sample.compare(), sample.full(), sample.full(sample.HOSTILE)])
def test_reports_have_the_published_form(report: dict[str, Any]) -> None:
    jsonschema.validate(reports.plain(complete.derived(report)), schema())


@pytest.mark.parametrize("policy", ["none", "all"])
def test_a_real_report_has_the_published_form_and_reads_back(tmp_path: Path, policy: str) -> None:
    source, out = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(synthetic.by_nodes(60), source)
    result = pipeline.optimize(source, out, policy=policy, precision="fp16")
    report = complete.complete({**result.to_dict(), "machine": {"onnxfuse": "1"}}, source, out)
    reports.write(report, tmp_path / "report.json")
    back = read.load(tmp_path / "report.json")
    assert back["kind"] == "optimize"
    assert back["graph"]["after"]["nodes"]
    assert [axis["name"] for axis in back["axes"]] == ["performance", "debugging", "maintenance", "generality"]
    html.page(back)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("h200-*.json")), ids=lambda path: path.stem)
def test_results_of_the_benchmark_are_reports(path: Path) -> None:
    report = read.load(path)
    assert report["kind"] == ("compare" if "-kit-" in path.name else "benchmark")  # a kit's script compares the engines that it builds
    assert report["machine"]["gpu"].startswith("NVIDIA H200")
    if report["kind"] == "compare":
        assert report["agrees"]
    elif "rows" in report:
        for row in report["rows"]:
            assert "failed" in row or row["verdict"] == (
                "faster" if row["ratio"]["low"] > 1 else "slower" if row["ratio"]["high"] < 1 else "draw"
            )
    else:
        assert all(0 < point["share_of_copy"] < 1.1 for point in report["roofline"]["points"])
    html.page(report)
    terminal.show(report)


def old(report: dict[str, Any]) -> dict[str, Any]:
    """A report in the form of the first schema."""
    kind = report.pop("kind")
    if kind == "optimize":
        return {**report, "schema": "onnxfuse/optimize/1", "model": report["model"]["path"]}
    return {**report, "schema": "onnxfuse/compare/1", "latency": report.pop("timings")}


@pytest.mark.parametrize("made", [sample.optimize, sample.compare])
def test_the_first_schema_still_reads(tmp_path: Path, made: Any) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old(made())), encoding="utf-8")
    report = read.load(path)
    assert (report["schema"], report["kind"]) == (2, made().get("kind"))
    assert report["model"]["name"] == "y.onnx"
    assert report.get("timings") == made().get("timings")
    html.page(report)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a report"),
        ("{}", "says no schema"),
        ('{"schema": 3, "kind": "optimize"}', "of schema 3, and this onnxfuse reads those up to 2; update onnxfuse"),
        ('{"schema": 2, "kind": "poem", "onnxfuse": "1"}', "kind: 'poem' is not one of"),
        ('{"schema": 2, "kind": "optimize", "onnxfuse": "1", "sites": [{"fusion": 7}]}', "sites[0]"),
        ('{"schema": 2, "kind": "optimize", "onnxfuse": "1", "sites": {}}', "sites: {} is not of type 'array'"),
        ('{"schema": 1, "machine": {"copy_gbps": 1}, "rows": [{"kernel": "skip_layernorm"}]}', "rows[0] lacks"),
        ('{"schema": 1, "machine": {}, "rows": [{"kernel": "skip_layernorm"}]}', "lacks the figure 'copy_gbps'"),
        ('{"schema": 1, "machine": {}, "rows": [7]}', "rows[0]"),
        ('{"schema": "onnxfuse/optimize/1", "model": "m.onnx", "sites": [7]}', "sites[0]"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInput) as fault:
        read.load(path)
    assert words in str(fault.value)
    assert str(path) in str(fault.value)
    assert "\n" not in str(fault.value)
    assert len(str(fault.value)) < 500


@pytest.mark.parametrize("part", sorted(gpu.with_gpu_parts(sample.with_graph(sample.optimize()))))
def test_a_part_of_another_form_is_refused_and_never_a_traceback(tmp_path: Path, part: str) -> None:
    report = {**gpu.with_gpu_parts(sample.with_graph(sample.optimize())), part: [{"wrong": None}, 7]}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    with pytest.raises(BadInput):
        read.load(path)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("graph", "before", "edges", 0), [0, 99, 0], "edges[0] leads to no node"),
        (("graph", "before", "nodes", 1, "site"), 99, "nodes[1] names no site"),
        (("graph", "before", "nodes", 1, "group"), 2, "nodes[1] is in no group"),
        (("graph", "before", "groups", 0, "parent"), 0, "groups[0] is in no group"),
        (("graph", "before", "groups", 1, "site"), -1, "groups[1] names no site"),
        (("timings", "baseline"), "other", "lacks 'other'"),
    ],
)
def test_places_that_lead_nowhere_are_refused(place: tuple[str | int, ...], value: Any, words: str) -> None:
    report = sample.full()
    read.check(report)
    holder: Any = report
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    with pytest.raises(BadInput) as fault:
        read.check(report)
    assert words in str(fault.value)


def test_reports_on_one_model_are_joined_and_on_two_refused() -> None:
    rewritten, timed = sample.with_graph(sample.optimize()), sample.compare()
    row = {"kernel": "skip_layernorm", "dtype": "float16", "rows": 2, "width": 8, "microseconds": 2.0}
    report = read.joined([rewritten, timed, read.current({"schema": 1, "machine": {"gpu": "G", "copy_gbps": 9.0}, "rows": [row]})])
    assert report["kind"] == "optimize"
    assert report["sites"] == rewritten["sites"]
    assert report["timings"] == timed["timings"]
    assert report["roofline"]["points"][0]["flops"] == 8 * 2 * 8
    assert report["machine"]["gpu"] == "y"
    with pytest.raises(BadInput, match="different models"):
        read.joined([sample.optimize(), sample.optimize(name="z")])
