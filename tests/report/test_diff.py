"""What changed between two reports."""

from __future__ import annotations

import copy
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from onnxfuse.report import diff, html, read, terminal
from tests.report import gpu, sample


def interval(low: float, high: float) -> dict[str, float]:
    return {"median": (low + high) / 2, "low": low, "high": high}


@pytest.mark.parametrize(
    ("first", "second", "time", "ratio"),
    [
        ((1.0, 1.1), (0.8, 0.99), "faster", "slower"),
        ((1.0, 1.1), (1.11, 1.2), "slower", "faster"),
        ((1.0, 1.1), (1.1, 1.2), "no difference shown", "no difference shown"),  # they touch
        ((1.0, 1.1), (0.9, 1.05), "no difference shown", "no difference shown"),
        ((1.0, 1.1), (1.0, 1.1), "no difference shown", "no difference shown"),
    ],
)
def test_only_intervals_that_do_not_touch_say_anything(first: Any, second: Any, time: str, ratio: str) -> None:
    assert diff.judged(interval(*first), interval(*second), lower_is_better=True) == time
    assert diff.judged(interval(*first), interval(*second), lower_is_better=False) == ratio


def changed() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two reports: the second is faster, on a newer TensorRT, with one decision turned, one site gone, and an output gone wrong."""
    first = gpu.with_gpu_parts(sample.with_graph(sample.optimize()))
    second = copy.deepcopy(first)
    for engine in second["timings"]["engines"].values():
        engine.update({key: value / 2 for key, value in engine.items()})
    second["machine"]["tensorrt"] = "11.0.0"
    second["sites"][3].update(decision="fused", reason="won")
    del second["sites"][2]
    second["check"] = sample.checked(1.0).to_dict()
    return first, second


def test_every_change_is_named() -> None:
    first, second = changed()
    # Sites are told by fusion and tensor; the sample's three have one tensor.
    for number, site in enumerate(first["sites"]):
        site["output"] = f"t{number}"
    for number, site in zip((0, 1, 3), second["sites"], strict=True):
        site["output"] = f"t{number}"
    found = diff.between(first, second, ("a.json", "b.json"))
    assert found["machine"] == [{"what": "tensorrt", "first": "10.6.0", "second": "11.0.0"}]
    assert [(entry["name"], entry["verdict"]) for entry in found["latencies"] if entry["unit"] == "ms"] == [
        ("automatic.engine", "faster"),
        ("fused.engine", "faster"),
    ]
    assert [entry["verdict"] for entry in found["latencies"] if entry["unit"] == "ratio"] == ["no difference shown"]
    assert all(entry["change"] == pytest.approx(0.5) for entry in found["latencies"] if entry["unit"] == "ms")
    assert [(site["output"], site["second"]["decision"]) for site in found["sites"]["changed"]] == [("t3", "fused")]
    assert [site["output"] for site in found["sites"]["removed"]] == ["t2"]
    assert found["sites"]["same"] == 2
    assert [(entry["name"], entry["verdict"]) for entry in found["accuracy"]] == [("output y of rewritten model", "no longer agrees")]
    assert found["verdict"] == {"good": False, "headline": "1 no longer agrees, 2 faster, 2 decisions changed"}


def test_the_same_report_twice_is_no_difference() -> None:
    report = sample.full()
    found = diff.between(report, report)
    assert found["verdict"] == {"good": None, "headline": "No difference that matters"}
    assert found["machine"] == found["accuracy"] == []


def test_another_gpu_is_never_called_faster() -> None:
    first, second = changed()
    second["machine"]["gpu"] = "NVIDIA L4"
    found = diff.between(first, second)
    assert {entry["verdict"] for entry in found["latencies"]} == {"another GPU"}
    assert any("different GPUs" in note for note in found["notes"])


def test_rows_of_benchmarks_are_compared_one_by_one() -> None:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200-trt10.6.0.json"
    first = read.load(path)
    second = copy.deepcopy(first)
    row = next(row for row in second["rows"] if row["sites"])
    fusion = next(iter(row["sites"]))
    row["fused_ms"] = {key: value * 0.9 for key, value in row["fused_ms"].items()}
    row["sites"] = {**row["sites"], fusion: 0}
    row["agrees"] = False
    second["rows"].append({**row, "name": "new"})
    found = diff.between(first, second)
    name = f"{row['name']}, {row['precision']}, {row['policy']}"
    assert [entry["name"] for entry in found["latencies"] if entry["verdict"] == "faster"] == [f"{name}: fused"]
    assert {entry["name"].split(",")[0] for entry in found["latencies"] if entry["verdict"] == "only in one"} == {"new"}
    assert [(site["fusion"], site["output"]) for site in found["sites"]["changed"]] == [(fusion, name)]
    assert [(entry["name"], entry["verdict"]) for entry in found["accuracy"]] == [(f"outputs of {name}", "no longer agrees")]
    assert found["verdict"]["good"] is False


@pytest.mark.parametrize("name", ["y", sample.HOSTILE])
def test_a_difference_has_its_published_form_and_its_three_looks(name: str, tmp_path: Path) -> None:
    first, second = sample.full(name), sample.full(name)
    second["timings"]["engines"] = {key: gpu.interval(9.0, 0.01) for key in second["timings"]["engines"]}
    second["sites"][0]["decision"] = "kept"
    found = diff.between(first, second, (name, name))
    schema = json.loads((Path(read.__file__).parent / "diff.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(json.dumps(found)), schema)
    html.write(found, tmp_path / "d.html")
    text = (tmp_path / "d.html").read_text(encoding="utf-8")
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert not {"script", "img"} & set(tags)
    assert "Slower" in text or "slower" in text
    console = Console(file=io.StringIO(), width=200, color_system=None)
    terminal.show_diff(found, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "slower" in shown
    assert "\x1b" not in shown
