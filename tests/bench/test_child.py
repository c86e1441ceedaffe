"""Children: their results, their ends, and that none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onnxfuse.bench import child


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the module `victim`, which children can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return (tmp_path / "victim.py").write_text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; print('last words'); os.abort()", "crashed (SIGABRT): last words"),
        ("import sys; print('error: no GPU', file=sys.stderr); sys.exit(3)", "no GPU"),
        ("import time; time.sleep(60)", "not done within 1 s"),
        ("print('step: building'); import os; os._exit(1)", "it said nothing"),
    ],
)
def test_crashes_and_timeouts_have_a_reason(victim, code: str, says: str) -> None:
    victim(code)
    status, said = child.run(["victim"], timeout=1 if "sleep" in code else 60)
    assert status != 0
    assert child.why(status, said, 1) == says


def test_a_child_sees_our_modules_and_no_others(victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim("import json, sys; print(json.dumps({'arguments': sys.argv[1:], 'json': json.__file__}))")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    status, said = child.run(["victim", "a b", "c"], timeout=60)
    assert (status, child.last_json(said)["arguments"]) == (0, ["a b", "c"])


def test_the_last_step_is_told_while_the_child_works(victim, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    victim(
        "import pathlib, sys, time\nprint('step: building')\nprint('noise')\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nprint('the end')"
    )
    told: list[str] = []

    def watch(step: str) -> None:
        told.append(step)
        if step == "building":
            go_on.touch()

    assert child.run(["victim", str(go_on)], timeout=60, watch=watch) == (0, "step: building\nnoise\nthe end\n")
    assert told[-1] == "building"


PARENT = """
import sys
from onnxfuse.bench import child
sys.path.insert(0, sys.argv[1])
child.run(["victim", sys.argv[2]], timeout=60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_its_parent(victim, tmp_path: Path, root: Path, number: signal.Signals) -> None:
    victim("import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(120)")
    note = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(note)], cwd=root, stderr=subprocess.DEVNULL)
    while not (note.exists() and note.read_text()):
        time.sleep(0.02)
    pid = int(note.read_text())
    parent.send_signal(number)
    parent.wait(30)
    for _ in range(500):
        if _is_gone(pid):
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child lives on")


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
