"""`onnxfuse verdicts`: what is listed and forgotten, and what the user is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from onnxfuse.bench.stats import Interval
from onnxfuse.plan import store
from onnxfuse.plan.verdicts import Verdict

WON, LOST = Interval(1.1, 1.05, 1.2), Interval(0.9, 0.8, 0.95)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store: two fusions on two GPUs of which no verdicts ship, and one that no version knows."""
    path = tmp_path / "verdicts.json"
    monkeypatch.setenv("ONNXFUSE_VERDICTS", str(path))
    ms = Interval(0.43, 0.42, 0.44)
    like = Verdict("skip_layernorm", "bert", 128, 768, "float16", "h100", "580.1", "10.6.0", ms, ms, WON, "2026-11-30T01:02:03Z")
    store.add(
        [
            like,
            replace(like, tensorrt="11.2.0", ratio=LOST),
            replace(like, fusion="skip_rmsnorm", variant="tanh", gpu="l4", ratio=LOST),
            replace(like, fusion="old_fusion", model="a\nb\x1b[31m"),
        ]
    )
    return path


def test_the_table_and_the_advice(run_cli, file: Path) -> None:
    done = run_cli("verdicts")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "skip_layernorm 128 x 768 float16 won: 1.100 (1.050 to 1.200) bert here, 2026-11-30" in lines
    assert "skip_rmsnorm (tanh) 128 x 768 float16 lost: 0.900 (0.800 to 0.950) bert here, 2026-11-30" in lines
    assert "h100, TensorRT 11.2.0" in lines
    assert "skip_layernorm: won on h100 with TensorRT 10.6.0, and nothing any more with 11.2.0: retire it there" in lines
    assert "skip_rmsnorm: never won anywhere, in 1 measurement: leave it to TensorRT" in lines
    assert any(line.startswith("old_fusion: no such fusion in this version") for line in lines)
    assert "\x1b" not in done.stdout


def test_json_and_filters(run_cli, file: Path) -> None:
    done = run_cli("verdicts", "--json", "--gpu", "H100", "--fusion", "skip_layernorm")
    found = json.loads(done.stdout)
    assert [(row["tensorrt"], row["outcome"], row["origin"]) for row in found["verdicts"]] == [
        ("10.6.0", "won", "here"),
        ("11.2.0", "lost", "here"),
    ]
    assert [one["kind"] for one in found["advice"]] == ["retire"]
    assert found["file"] == str(file)
    everything = json.loads(run_cli("verdicts", "--json").stdout)
    assert len([row for row in everything["verdicts"] if row["origin"] == "here"]) == 4
    assert run_cli("verdicts", "--json", "--fusion", "old_fusion").returncode == 0


def test_forgetting_by_filter(run_cli, file: Path) -> None:
    assert run_cli("verdicts", "forget", "--gpu", "l4").stdout == "1 verdict forgotten\n"
    assert run_cli("verdicts", "forget", "--gpu", "l4").stdout == "0 verdicts forgotten\n"
    assert run_cli("verdicts", "forget", "--fusion", "old_fusion").stdout == "1 verdict forgotten\n"
    assert len(store.load().here) == 2
    assert run_cli("verdicts", "forget", "--all").stdout.startswith("2 verdicts forgotten")
    assert store.load().here == ()


def test_a_broken_store_is_one_warning_each_and_no_failure(run_cli, file: Path) -> None:
    file.write_text("{")
    done = run_cli("verdicts", "--json")
    assert done.returncode == 0
    assert [row for row in json.loads(done.stdout)["verdicts"] if row["origin"] == "here"] == []
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["warning", "warning"]
    assert "set aside as verdicts.json.broken-" in done.stderr
    assert run_cli("verdicts").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "v100"), "TensorRT 10 dropped it"),
        (("--gpu", "h900"), "is not known"),
        (("--fusion", "layer_norm"), "--fusion layer_norm: no such fusion; there are groupnorm, layernorm,"),
        (("forget",), "say which verdicts to forget"),
        (("forget", "--all", "--gpu", "l4"), "say which verdicts to forget"),
        (("--gpu", "l4", "forget", "--all"), "options go behind forget"),
        (("remember",), "No such command 'remember'"),
    ],
)
def test_bad_input_is_one_line(refuses, file: Path, arguments: tuple[str, ...], words: str) -> None:
    refuses("verdicts", *arguments, status=2, words=(words,))
    assert len(store.load().here) == 4


def test_proven_says_where_its_decision_is_from(run_cli, model: Path, file: Path) -> None:
    """A verdict of the model's width, from another GPU: an estimate, which needs a margin."""
    ms = Interval(0.43, 0.42, 0.44)
    like = Verdict("skip_layernorm", "bert", 16, 64, "float32", "h200", "580.1", "10.6.0", ms, ms, WON, "2026-11-30")
    store.add([like])
    for ratio, decision in ((WON, "fused"), (Interval(1.05, 1.049, 1.2), "kept")):
        store.add([replace(like, ratio=ratio)])
        done = run_cli("explain", model, "--policy", "proven", "--gpu", "l4", "--json")
        assert done.returncode == 0, done.stderr
        sites = json.loads(done.stdout)["sites"]
        (site,) = [site for site in sites if site["fusion"] == "skip_layernorm"]
        assert site["decision"] == decision
        assert site["reason"].startswith("estimate, from H200 (not l4")


def test_a_broken_store_is_a_note_and_stops_nothing(run_cli, model: Path, file: Path) -> None:
    file.write_text("{")
    done = run_cli("explain", model, "--policy", "proven", "--json")
    assert done.returncode == 0, done.stderr
    assert [note.split(":")[0] for note in json.loads(done.stdout)["notes"]] == [f"verdicts {file}"] * 2
