"""The benchmark suite's own parts: rows, files, table; and that a crash costs one row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import machine, measure, results, table
from benchmarks.suite import SUITE, Candidate
from onnxfuse.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]

MACHINE = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "tensorrt": "10.6.0",
    "date": "2026-11-30",
    "commit": "abc",
    "command": "python -m benchmarks",
    "copy_gbps": 4258.0,
    "matmul_tflops": 790.1,
}


def row(name: str = "m", **changes: Any) -> results.Row:
    return {
        "name": name,
        "precision": "fp16",
        "policy": "all",
        "automatic_ms": {"median": 0.4, "low": 0.39, "high": 0.41},
        "fused_ms": {"median": 0.32, "low": 0.31, "high": 0.33},
        "ratio": {"median": 1.25, "low": 1.2, "high": 1.3},
        "verdict": "faster",
        "others_ms": {"pytorch_graph": {"median": 0.9, "low": 0.8, "high": 1.0}},
        "sites": {"bias_gelu": 12},
        "agrees": True,
        "max_abs": 0.00123,
        "cosine": 0.99999,
        "automatic_max_abs": 0.0011,
        "automatic_cosine": 0.99999,
        "marks": [],
        "notes": [],
        **changes,
    }


def candidate(work: Path, **changes: Any) -> Candidate:
    values = {
        "name": "m", "model": "absent.onnx", "inputs": None, "dims": {"batch": 1}, "precision": "fp16", "policy": "all",
        "samples": 200, "work": str(work), "timing_cache": None, "others": ("trt_fp16_flag",),
    }  # fmt: skip
    return Candidate(**{**values, **changes})


def test_rows_are_merged_by_name_precision_and_policy(tmp_path: Path) -> None:
    path = tmp_path / "new" / "h200-trt10.6.0.json"
    data = results.load(path)
    for new in (row("a"), row("b"), row("a", agrees=False), row("a", policy="proven"), row("a", precision="bf16")):
        data = results.merged(data, MACHINE, new)
        results.save(data, path)
    back = results.load(path)
    assert [results.key(r) for r in back["rows"]] == [
        ("a", "fp16", "all"), ("b", "fp16", "all"), ("a", "fp16", "proven"), ("a", "bf16", "all"),
    ]  # fmt: skip
    assert back["rows"][0]["agrees"] is False
    assert back["machine"] == MACHINE


def test_verdicts_stay_until_the_fusion_is_measured_again(tmp_path: Path) -> None:
    def of(fusion: str, ratio: float, date: str) -> dict[str, Any]:
        figures = {name: {"median": ratio, "low": ratio, "high": ratio} for name in ("automatic_ms", "fused_ms", "ratio")}
        about = {"fusion": fusion, "model": "a", "rows": 128, "width": 768, "dtype": "float16", "gpu": "h200", "driver": "580"}
        return {**about, "tensorrt": "10.6.0", "date": date, **figures}

    first = row("a", verdicts=[of("skip_layernorm", 1.02, "2026-11-30"), of("bias_gelu", 0.94, "2026-11-30")])
    second = row("a", verdicts=[of("skip_layernorm", 1.03, "2026-12-01"), of("encoder_layer", 1.66, "2026-12-01")])
    data = results.load(tmp_path / "none.json")
    for new in (first, second, results.failed("a", "fp16", "all", "crashed")):
        data = results.merged(data, MACHINE, new)
        if "failed" not in new:
            kept = {entry["fusion"]: entry["ratio"]["median"] for entry in data["rows"][0]["verdicts"]}
    assert kept == {"skip_layernorm": 1.03, "bias_gelu": 0.94, "encoder_layer": 1.66}


@pytest.mark.parametrize(
    ("gpu", "tensorrt", "expected"),
    [
        ("NVIDIA H200", "10.6.0.post1", "h200-trt10.6.0.json"),
        ("NVIDIA GeForce RTX 4090", "11.2.1.2", "geforce-rtx-4090-trt11.2.1.json"),
        ("", "dev", "gpu-trtdev.json"),
    ],
)
def test_file_names(gpu: str, tensorrt: str, expected: str) -> None:
    assert results.file_name(gpu, tensorrt) == expected


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 9}'])
def test_files_of_something_else_are_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(BadInput, match="move it away"):
        results.load(tmp_path / "r.json")


def test_the_table_says_what_the_rows_say() -> None:
    rows = [row(), row("lost", agrees=False, max_abs=None, marks=["x"]), results.failed("gone", "fp16", "all", "a | b\nc")]
    text = table.table({"schema": 1, "machine": MACHINE, "rows": rows})
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200, driver 580.1, TensorRT 10.6.0, 2026-11-30; a copy reaches 4258 GB/s")
    assert lines[4] == (
        "| m | fp16, all | 12 bias_gelu | 0.4000 | 0.3200 | 1.250 (1.200 to 1.300) | faster |  | 0.9000 | 0.0012 (0.0011) | 0.999990 |"
    )
    assert "**outputs disagree** (marked)" in lines[5]
    assert "unbounded (0.0011)" in lines[5]
    assert r"failed: a \| b c" in lines[6]
    columns = {line.replace(r"\|", "").count("|") for line in lines[2:7]}
    assert len(columns) == 1
    assert lines[7:] == ["", "Marked rows: x."]


def test_the_table_says_what_a_repetition_said() -> None:
    agreed, other = ({**row(name), "repeat": {"agrees": name == "a", "outcome": "draw"}} for name in "ab")
    lines = table.table({"schema": 1, "machine": MACHINE, "rows": [agreed, other]}).splitlines()
    assert "| faster, twice |" in lines[4]
    assert "| faster, then draw |" in lines[5]


def test_the_table_is_put_between_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, document = tmp_path / "r.json", tmp_path / "README.md"
    results.save({"schema": 1, "machine": MACHINE, "rows": [row()]}, file)
    document.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    assert table.main([str(file), "--check", str(document)]) == 1
    assert table.main([str(file), "--write", str(document)]) == 0
    assert table.main([str(file), "--check", str(document)]) == 0
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    document.write_text("nothing")
    assert table.main([str(file), "--write", str(document)]) == 2
    assert "no place for the table" in capsys.readouterr().err


def test_the_readme_shows_the_newest_results() -> None:
    if not list(results.FOLDER.glob("*-trt*.json")):
        pytest.skip("no results have been measured yet")
    readme = ROOT / "README.md"
    if not readme.is_file() or table.BEGIN not in readme.read_text(encoding="utf-8"):
        pytest.skip("README.md has no result table yet")
    assert table.main(["--check", str(readme)]) == 0


def test_a_candidate_travels_as_json(tmp_path: Path) -> None:
    one = candidate(tmp_path)
    assert Candidate.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_a_fault_becomes_a_failed_row(tmp_path: Path) -> None:
    got = measure.in_child(candidate(tmp_path), timeout=120)
    assert results.key(got) == ("m", "fp16", "all")
    assert "absent.onnx" in got["failed"]
    assert "\n" not in got["failed"]


def test_a_disagreeing_row_is_said_so() -> None:
    text = command.line(row(agrees=False, max_abs=None, marks=["outputs disagree: x"], notes=["n"]))
    assert "DISAGREES (max abs unbounded" in text
    assert "mark: outputs disagree: x" in text


def test_the_suite_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(entry.name in said for entry in SUITE)


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nosuch"]) == 2
    assert capsys.readouterr().err.startswith("error: no model nosuch in the suite; there are: ")


def test_a_copy_faster_than_the_memory_is_marked() -> None:
    assert machine.impossible(4258, 4800) is None
    assert machine.impossible(4258, None) is None
    assert "above the memory's 4800 GB/s" in str(machine.impossible(5200, 4800))


def test_the_children_run_this_python() -> None:
    status, said = measure.child(["benchmarks.machine"], timeout=120)
    assert status in (0, 3), said
    assert sys.executable


@pytest.mark.parametrize("option", ["--budget", "--search-minutes", "--row-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-3", "soon"])
def test_a_time_that_is_none_is_wrong_usage(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: {value}: no time; give a number" in capsys.readouterr().err
