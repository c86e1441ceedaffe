"""The suite's command: order, budget, resuming, repeating; the rows themselves come from a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import results
from benchmarks.suite import Candidate, Entry
from tests.bench.test_benchmarks import MACHINE, row

KNOWN = {**MACHINE, "marks": []}
NAMES = ("a", "b", "c")


class Bench:
    """Measures nothing: every candidate becomes the row that `make` gives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.measured: list[Candidate] = []
        self.make: Callable[[Candidate], results.Row] = lambda candidate: searched(candidate.name)

    def in_child(self, candidate: Candidate, timeout: float, watch: Callable[[str], None]) -> results.Row:
        watch("TensorRT alone")
        self.measured.append(candidate)
        return self.make(candidate)

    def run(self, *arguments: str, commit: str = "abc") -> int:
        self.measured.clear()
        return command.main(["--out", str(self.folder), "--work", str(self.folder / "work"), "--commit", commit, *arguments])

    @property
    def names(self) -> list[str]:
        return [candidate.name for candidate in self.measured]

    @property
    def rows(self) -> dict[str, results.Row]:
        return {found["name"]: found for found in results.load(self.folder / "h200-trt10.6.0.json")["rows"]}


def searched(name: str, fused: int = 12, **changes: Any) -> results.Row:
    decisions = [{"group": "bias_gelu 128x3072", "sites": 12, "fused": fused, "reasons": ["x"]}]
    return row(name, policy="measure", samples=200, decisions=decisions, **changes)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    (tmp_path / "model.onnx").touch()
    entries = {name: Entry(name, tmp_path / "model.onnx", "make it") for name in NAMES}
    made = Bench(tmp_path)
    monkeypatch.setattr(command, "BY_NAME", entries)
    monkeypatch.setattr(command, "SUITE", tuple(entries.values()))
    monkeypatch.setattr(command, "in_child", made.in_child)
    monkeypatch.setattr(command, "_machine", lambda work: dict(KNOWN))
    return made


def test_rows_are_measured_in_the_order_given(bench: Bench) -> None:
    assert bench.run("c", "a") == 0
    assert bench.names == ["c", "a"]
    assert bench.measured[0].policy == "measure"
    assert bench.rows["c"]["measured"]["commit"] == "abc"
    assert bench.rows["c"]["measured"]["seconds"] >= 0


def test_what_is_measured_is_resumed(bench: Bench) -> None:
    bench.run("a")
    bench.run("--resume")
    assert bench.names == ["b", "c"]
    bench.run("--resume")
    assert bench.names == []
    bench.run("--resume", commit="def")
    assert bench.names == ["a", "b", "c"]


def test_a_row_that_failed_is_measured_again(bench: Bench) -> None:
    bench.make = lambda candidate: results.failed(candidate.name, candidate.precision, candidate.policy, "crashed")
    assert bench.run("a") == 1
    bench.make = lambda candidate: searched(candidate.name)
    bench.run("a", "--resume")
    assert bench.names == ["a"]


def test_no_row_is_started_after_the_budget(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])

    def slow(candidate: Candidate) -> results.Row:
        now[0] += 100
        return searched(candidate.name)

    bench.make = slow
    bench.run("--budget", "3", "--search-minutes", "2")
    assert bench.names == ["a", "b"]
    # What is left of the budget is the search's, too.
    assert [candidate.search_minutes for candidate in bench.measured] == [2, pytest.approx(3 - 100 / 60)]
    assert "the budget of 3 minutes is spent; not measured: c and what follows" in capsys.readouterr().out


def test_too_few_samples_are_marked(bench: Bench) -> None:
    bench.make = lambda candidate: searched(candidate.name) | {"samples": candidate.samples, "marks": []}
    bench.run("a", "--samples", "50")
    assert bench.rows["a"]["marks"] == ["50 samples; 200 are the least that counts"]


def test_what_speaks_against_the_machine_marks_its_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_machine", lambda work: {**KNOWN, "marks": ["another process is on the GPU (7)"]})
    bench.make = lambda candidate: searched(candidate.name, marks=[], verdicts=[{"fusion": "bias_gelu"}])
    bench.run("a")
    assert bench.rows["a"]["marks"] == ["another process is on the GPU (7)"]
    assert bench.rows["a"]["verdicts"] == []


def test_extras_can_be_left_out(bench: Bench) -> None:
    bench.run("a")
    assert bench.measured[0].others == ("trt_fp16_flag",)
    bench.run("a", "--skip-extras")
    assert bench.measured[0].others == ()


def test_the_timing_cache_is_the_file_given(bench: Bench, tmp_path: Path) -> None:
    bench.run("a", "--timing-cache", str(tmp_path / "carried"))
    assert bench.measured[0].timing_cache == str(tmp_path / "carried")


def test_a_repetition_that_agrees(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("a", "b")
    first = bench.measured[0].work
    assert bench.run("--repeat") == 0
    assert bench.names == ["a", "b"]  # c has nothing to repeat
    assert bench.measured[0].work != first
    said = capsys.readouterr().out
    assert said.count("the verdicts agree") == 2
    assert "c, fp16, measure: not in the file, so that there is nothing to repeat" in said
    repeat = bench.rows["a"]["repeat"]
    assert (repeat["agrees"], repeat["outcome"], repeat["groups"]) == (True, "faster", {"bias_gelu 128x3072": [12, 12]})
    bench.run("--repeat", "--resume")
    assert bench.names == []


@pytest.mark.parametrize(
    ("again", "says"),
    [
        (searched("a", verdict="draw"), "(faster, then draw)"),
        (searched("a", fused=0), "(faster, then faster; bias_gelu 128x3072 12 then 0 fused)"),
        (searched("a", marks=["a clock moved"]), "(faster, then marked)"),
        (searched("a", agrees=False), "(faster, then disagrees)"),
    ],
    ids=["verdict", "group", "mark", "outputs"],
)
def test_a_repetition_that_does_not_agree(bench: Bench, capsys: pytest.CaptureFixture[str], again: results.Row, says: str) -> None:
    bench.run("a")
    bench.make = lambda candidate: again
    assert bench.run("a", "--repeat") == 1
    assert f"THE VERDICTS DISAGREE {says}" in capsys.readouterr().out
    assert bench.rows["a"]["repeat"]["agrees"] is False
    assert bench.rows["a"]["verdict"] == "faster"  # the first measurement stays


def test_a_repetition_that_fails_is_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("a")
    bench.make = lambda candidate: results.failed("a", "fp16", "measure", "crashed")
    assert bench.run("a", "--repeat") == 1
    assert "again: failed: crashed" in capsys.readouterr().out


def test_intervals_that_lie_apart_are_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("a")
    bench.make = lambda candidate: searched("a", ratio={"median": 1.1, "low": 1.09, "high": 1.11})
    assert bench.run("a", "--repeat") == 0
    assert "the verdicts agree; the intervals lie apart" in capsys.readouterr().out


def test_the_machine_is_asked_once_until_it_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def child(arguments: list[str], timeout: float) -> tuple[int, str]:
        asked.append(arguments)
        return 0, json.dumps(KNOWN)

    boot = tmp_path / "boot"
    boot.write_text("one\n")
    monkeypatch.setattr(command, "BOOT", boot)
    monkeypatch.setattr(command, "child", child)
    assert command._machine(tmp_path) == command._machine(tmp_path) == KNOWN
    assert len(asked) == 1
    boot.write_text("two\n")
    command._machine(tmp_path)
    assert len(asked) == 2


def test_a_python_without_the_packages_is_told_so() -> None:
    run = Path(command.__file__).with_name("run")
    done = subprocess.run([sys.executable, "-S", "-E", str(run), "--list"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "has no package" in done.stderr
