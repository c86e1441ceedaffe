"""The store of verdicts: what is kept, replaced and forgotten, by several processes at once, and what becomes of a broken file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxfuse.bench.stats import Interval
from onnxfuse.plan import store
from onnxfuse.plan.verdicts import Verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file of this test: not there yet, nor its folder."""
    path = tmp_path / "cache" / "verdicts.json"
    monkeypatch.setenv("ONNXFUSE_VERDICTS", str(path))
    monkeypatch.setattr(store, "shipped", lambda: ())
    return path


def verdict(**changes: Any) -> Verdict:
    like = Verdict(
        "skip_layernorm", "bert", 128, 768, "float16", "h200", "580.1", "10.6.0",
        Interval(0.43, 0.42, 0.44), Interval(0.42, 0.41, 0.43), Interval(1.02, 1.01, 1.03), "2026-11-30",
    )  # fmt: skip
    return replace(like, **changes)


def test_what_was_added_is_there_as_it_was(file: Path) -> None:
    given = (verdict(), verdict(fusion="bias_gelu", variant="tanh"), verdict(model="modèle/\ud800"))
    assert store.add(given) == ()
    assert store.load() == store.Contents(given, ())
    assert json.loads(file.read_text())["schema"] == 1
    assert sorted(path.name for path in file.parent.iterdir()) == ["verdicts.json", "verdicts.lock"]


def test_no_file_is_no_verdict_and_no_problem(file: Path) -> None:
    assert store.load() == store.Contents((), ())
    assert not file.parent.exists()
    assert store.add([]) == ()
    assert not file.parent.exists()


def test_the_newer_of_one_key_replaces_the_older_whatever_comes_first() -> None:
    old, new = verdict(date="2026-01-02"), verdict(date="2026-01-02T10:00:00Z", ratio=Interval(0.9, 0.8, 0.95))
    for first, second in ((old, new), (new, old)):
        store.forget(lambda _: True)
        store.add([first])
        store.add([second])
        assert store.load().here == (new,)


@pytest.mark.parametrize(
    "change",
    [{"fusion": "other"}, {"variant": "erf"}, {"rows": 256}, {"width": 1024}, {"dtype": "float32"}, {"gpu": "l4"}, {"driver": "590"},
     {"tensorrt": "10.7.0"}, {"model": "vit"}],
)  # fmt: skip
def test_each_part_of_the_key_counts(change: dict[str, Any]) -> None:
    store.add([verdict()])
    store.add([verdict(**change)])
    assert store.load().here == (verdict(), verdict(**change))


def test_a_release_of_the_python_package_is_no_other_tensorrt() -> None:
    store.add([verdict()])
    store.add([verdict(tensorrt="10.6.0.post1")])
    assert [found.tensorrt for found in store.load().here] == ["10.6.0.post1"]


def test_those_measured_here_come_first_and_take_the_place_of_shipped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    ship = (verdict(origin="shipped"), verdict(width=1024, origin="shipped"))
    monkeypatch.setattr(store, "shipped", lambda: ship)
    own = verdict(ratio=Interval(0.9, 0.8, 0.95), date="2020-01-01")
    store.add([own])
    assert store.load().verdicts == (own, ship[1])
    assert [found.origin for found in store.load().verdicts] == ["here", "shipped"]


def test_forgetting_removes_what_is_meant_and_counts_it(file: Path) -> None:
    store.add([verdict(), verdict(gpu="l4"), verdict(gpu="l4", width=64)])
    assert store.forget(lambda found: found.gpu == "l4") == (2, ())
    assert store.load().here == (verdict(),)
    assert store.forget(lambda found: found.gpu == "l4") == (0, ())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b'{"schema": 1, "verdicts": [', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[]", "not a file of verdicts of schema 1"),
        (b'{"schema": 2, "verdicts": []}', "not a file of verdicts of schema 1"),
        (b'{"schema": 1, "verdicts": {}}', "not a file of verdicts of schema 1"),
    ],
)
def test_a_broken_file_is_set_aside_and_said_in_one_line(file: Path, content: bytes, words: str) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    found = store.load()
    assert (found.here, len(found.problems)) == ((), 2)
    assert words in found.problems[0]
    assert "set aside as verdicts.json.broken-" in found.problems[1]
    assert all("\n" not in line for line in found.problems)
    (aside,) = file.parent.glob("verdicts.json.broken-*")
    assert aside.read_bytes() == content
    assert store.load() == store.Contents((), ())
    assert store.add([verdict()]) == ()


def test_adding_to_a_broken_file_keeps_both(file: Path) -> None:
    for content in (b"x", b"y"):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        assert "not JSON" in store.add([verdict()])[0]
        assert store.load().here == (verdict(),)
    assert sorted(path.read_bytes() for path in file.parent.glob("*.broken-*")) == [b"x", b"y"]


BAD: list[dict[str, Any]] = [
    {"fusion": 7}, {"model": ""}, {"gpu": None}, {"date": None}, {"rows": -1}, {"width": True}, {"width": 1.5}, {"variant": 3},
    {"ratio": None}, {"ratio": {"median": 1.0, "low": 1.1, "high": 1.2}}, {"ratio": {"median": 0, "low": 0, "high": 0}},
    {"ratio": {"median": float("nan"), "low": 1, "high": 1}}, {"fused_ms": {"median": 1.0}},
]  # fmt: skip


def test_of_a_file_with_broken_entries_the_good_ones_stay_and_the_file_is_set_aside(file: Path) -> None:
    entries = [{**verdict().to_dict(), **change} for change in BAD]
    file.parent.mkdir()
    file.write_text(json.dumps({"schema": 1, "verdicts": [7, *entries, {**verdict().to_dict(), "of_a_later_version": 1}]}))
    content = file.read_bytes()
    found = store.load()
    assert found.here == (verdict(),)
    assert "entry 0 cannot be used: is not an object" in found.problems[0]
    assert f"nor can {len(BAD)} more" in found.problems[1]
    (aside,) = file.parent.glob("*.broken-*")
    assert aside.read_bytes() == content
    assert store.load() == store.Contents((verdict(),), ())


@pytest.mark.parametrize("change", BAD)
def test_an_entry_that_is_not_whole_is_no_verdict(change: dict[str, Any]) -> None:
    assert Verdict.from_dict(verdict().to_dict()) == verdict()
    with pytest.raises(ValueError, match=repr(next(iter(change)))):
        Verdict.from_dict({**verdict().to_dict(), **change})


def test_a_folder_in_its_place_is_left_alone(file: Path) -> None:
    (file / "precious").mkdir(parents=True)
    for problems in (store.load().problems, store.add([verdict()])):
        assert len(problems) == 1
        assert "is no file" in problems[0]
        assert "set ONNXFUSE_VERDICTS" in problems[0]
    assert (file / "precious").is_dir()


def test_a_cache_that_cannot_be_made_is_said(file: Path) -> None:
    file.parent.write_text("in the way")
    (problem,) = store.add([verdict()])
    assert "nothing was stored" in problem


def test_a_full_disk_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([verdict()])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        (problem,) = store.add([verdict(width=1024)])
    assert "no space left" in problem
    assert store.load().here == (verdict(),)
    assert sorted(path.name for path in file.parent.iterdir()) == ["verdicts.json", "verdicts.lock"]


def test_processes_that_add_at_once_lose_nothing(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("broken")  # which one process alone sets aside
    code = (
        "import sys; from tests.plan.test_verdicts_store import verdict; from onnxfuse.plan import store\n"
        "for n in range(10): store.add([verdict(width=100 * int(sys.argv[1]) + n)])"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(number)], cwd=ROOT) for number in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert sorted(found.width for found in store.load().here) == sorted(100 * number + n for number in range(3) for n in range(10))
    assert len(list(file.parent.glob("*.broken-*"))) == 1


def test_the_users_cache_is_where_it_is_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ONNXFUSE_VERDICTS")
    monkeypatch.delenv("ONNXFUSE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.user_file() == tmp_path / "onnxfuse" / "verdicts-1.json"
