"""Files made to do harm, through the command line: one line and status 2, or success where the file is sound after all.

No crash, no traceback, no command that does not end, no memory without bound, nothing written, nothing read outside of the model's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.graph import hostile
from tests.graph.hostile import Make
from tests.graph.sandbox import Outcome, Sandbox

MEMORY = 3000  # MiB; a model of a million nodes takes half of it

# Odd, and sound all the same: what runtimes take. Everything else must be refused.
SOUND = {
    "strings", "booleans of 7", "negative sizes of an input", "absurd sizes of an input", "sizes of an input that are 0",
    "sparse of 2^60 elements", "a body that reads what comes later", "one name for an input and an initializer", "two outputs of one name",
    "an output that is an input", "an output that is an initializer", "one opset twice", "a Constant of text",
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


def judged(outcome: Outcome, name: str) -> Outcome:
    assert outcome.fault is None, f"{name}: {outcome.fault}\n{outcome.stdout}{outcome.stderr}"
    assert outcome.rss < MEMORY, f"{name}: {outcome.rss} MiB"
    return outcome


def optimized(sandbox: Sandbox, make: Make, name: str, folder: Path, explain: bool = False) -> Outcome:
    """What `optimize` does with a model; a refusal leaves nothing behind, and `explain` agrees."""
    folder.mkdir()
    path = make(folder)
    before = sorted(folder.rglob("*"))
    outcome = judged(sandbox.run(["optimize", str(path), "-o", str(folder / "out.onnx"), "--policy", "all", "--no-check"], folder), name)
    left = sorted(folder.rglob("*"))
    assert left == (before if outcome.status else sorted([*before, folder / "out.onnx"])), name
    if explain:
        explained = judged(sandbox.run(["explain", str(path)], folder), name)
        assert (explained.status, explained.stderr) == (outcome.status, outcome.stderr)
    return outcome


def groups(cases: dict[str, Make], size: int = 40) -> list[dict[str, Make]]:
    """A test for some tens of cases: each is a tenth of a second."""
    listed = list(cases.items())
    return [dict(listed[at : at + size]) for at in range(0, len(listed), size)]


STRUCTURE = {**hostile.NO_MODELS, **hostile.TENSORS, **hostile.GRAPHS}


@pytest.mark.parametrize("cases", groups(STRUCTURE), ids=lambda cases: next(iter(cases)))
def test_structure(sandbox: Sandbox, tmp_path: Path, cases: dict[str, Make]) -> None:
    for number, (name, make) in enumerate(cases.items()):
        outcome = optimized(sandbox, make, name, tmp_path / str(number), explain=True)
        assert outcome.status == (0 if name in SOUND else 2), f"{name}: {outcome.stderr}"


def test_the_sound_are_named_rightly() -> None:
    assert set(STRUCTURE) >= SOUND


@pytest.mark.parametrize("cases", groups(hostile.ATTRIBUTES, 80), ids=lambda cases: next(iter(cases)))
def test_attributes_of_wrong_types_and_absurd_values(sandbox: Sandbox, tmp_path: Path, cases: dict[str, Make]) -> None:
    for number, (name, make) in enumerate(cases.items()):
        outcome = optimized(sandbox, make, name, tmp_path / str(number))
        if name.endswith(("a tensor", "a graph", "reals", "texts")) or (name.endswith("a real") and "epsilon" not in name):
            assert outcome.status == 2, f"{name}: {outcome.stdout}"


def test_names(sandbox: Sandbox, tmp_path: Path) -> None:
    for number, (name, make) in enumerate(hostile.NAMED.items()):
        outcome = optimized(sandbox, make, name, tmp_path / str(number))
        if name.endswith("refused"):
            assert outcome.status == 2, name
            assert len(outcome.stderr) < 500
        shown = outcome.stdout + outcome.stderr
        assert all(c.isprintable() or c == "\n" for c in shown), name


@pytest.mark.parametrize("name", hostile.SIZES)
def test_sizes(sandbox: Sandbox, tmp_path: Path, name: str) -> None:
    optimized(sandbox, hostile.SIZES[name], name, tmp_path / "model")


def test_what_must_not_expand_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    refused = ("bodies 10,000 deep", "a chain of 1,000,000 nodes", "a bomb of functions", "functions that call each other",
               "a function that calls itself", "a function of onnxfuse that calls itself")  # fmt: skip
    for number, name in enumerate(refused):
        (tmp_path / str(number)).mkdir()
        path = hostile.SIZES[name](tmp_path / str(number))
        assert judged(sandbox.run(["optimize", str(path), "--undo", "--no-check"], tmp_path), name).status == 2, name


def test_external_data_is_never_opened_outside_of_the_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    """Every way out leads to a pipe that nobody writes to: whoever opens it waits, and the sandbox calls that a hang."""
    for number, (name, make) in enumerate(hostile.EXTERNAL.items()):
        assert optimized(sandbox, make, name, tmp_path / str(number), explain=True).status == 2, name


@pytest.mark.parametrize("command", ["build-engine", "compare", "optimize"])
def test_every_command_keeps_inside_the_folder(sandbox: Sandbox, tmp_path: Path, command: str) -> None:
    cases = {
        **hostile.EXTERNAL,
        **{name: hostile.NO_MODELS[name] for name in ("a pipe", "a link to a device", "a link to itself", "a folder")},
    }
    for number, (name, make) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = str(make(folder))
        before = sorted(folder.rglob("*"))
        rest = {"build-engine": ["-o", str(folder / "out.engine"), "--gpu", "a100"], "compare": [path], "optimize": ["--policy", "all"]}
        outcome = judged(sandbox.run([command, path, *rest[command]], folder), name)
        assert outcome.status == 2, f"{name}: {outcome.stderr}"
        assert sorted(folder.rglob("*")) == before


CHECKED = ("absurd sizes of an input", "sparse of 2^60 elements", "two outputs of one name", "sizes of an input that are 0",
           "negative sizes of an input", "an output that is an initializer", "strings")  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_odd_models_end_in_a_line(sandbox: Sandbox, tmp_path: Path, name: str) -> None:
    path = {**hostile.TENSORS, **hostile.GRAPHS}[name](tmp_path)
    judged(sandbox.run(["optimize", str(path), "-o", "out.onnx", "--policy", "all"], tmp_path), name)


def test_a_crash_of_onnxruntime_is_a_line(sandbox: Sandbox, tmp_path: Path) -> None:
    """Dividing the smallest integer by -1 ends the process that does it. The divisor is computed, so that nothing folds it away."""
    source = "g (int64[1] x) => (int64[1] y) { z = Sub(x, x) m = Sub(z, one) s = Add(z, smallest) y = Div(s, m) }"
    path = hostile.text(source, one=hostile.np.array([1]), smallest=hostile.np.array([-(1 << 63)]))(tmp_path)
    outcome = judged(sandbox.run(["optimize", str(path), "-o", "out.onnx"], tmp_path), "crash")
    assert outcome.status == 2
    assert "crashed on it (SIGFPE)" in outcome.stderr
    assert not (tmp_path / "out.onnx").exists()
