"""The command line itself: help, lazy loading, and how faults become one line and an exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import onnx
import pytest

from onnxfuse import commands
from onnxfuse.commands import faults
from onnxfuse.errors import BadInput, Disagreement, MissingHere
from tests.conftest import with_path

HEAVY = ("onnx", "numpy", "onnxruntime", "onnx_graphsurgeon", "ml_dtypes", "tensorrt", "pycuda", "cuda", "jinja2")


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "ONNXFUSE_DEBUG": "0", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_names_every_command_and_imports_nothing_heavy():
    done = python(
        f"""
        import sys
        from onnxfuse.commands import main
        status = main(["--help"])
        loaded = [name for name in {HEAVY!r} if name in sys.modules]
        commands = {{name for name in sys.modules if name.startswith("onnxfuse.commands.")}}
        print("LOADED", loaded, sorted(commands - {{"onnxfuse.commands.faults", "onnxfuse.commands.streams"}}), status)
        """
    )
    assert "LOADED [] [] 0" in done.stdout, done.stdout + done.stderr
    for entry in commands.COMMANDS:
        assert re.search(rf"{entry.name}\s+{re.escape(entry.help)}", done.stdout), entry


@pytest.mark.parametrize("name", [entry.name for entry in commands.COMMANDS])
def test_help_of_a_command_tells_every_option_and_imports_nothing_heavy(name: str):
    done = python(
        f"""
        import sys
        from onnxfuse.commands import main
        status = main([{name!r}, "--help"])
        print("LOADED", [name for name in {HEAVY!r} if name in sys.modules], status)
        """
    )
    assert "LOADED [] 0" in done.stdout, done.stdout + done.stderr
    assert f"Usage: onnxfuse {name}" in done.stdout


def leaves(command: object, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], object]]:
    """Every command below a click command, with the words that lead to it."""
    children = getattr(command, "commands", None)
    if not children:
        return [(path, command)]
    return [leaf for name, child in children.items() for leaf in leaves(child, (*path, name))]


@pytest.mark.parametrize("entry", commands.COMMANDS, ids=lambda entry: entry.name)
def test_every_option_has_a_help_text(entry: commands.Command):
    for path, command in leaves(commands.load(entry), (entry.name,)):
        assert command.help, path
        for parameter in command.params:
            text = getattr(parameter, "help", None)
            assert text, f"{' '.join(path)}: {parameter.name} has no help text"
            assert "[" not in text, f"{' '.join(path)}: {parameter.name}: rich takes brackets for markup and drops them"


def test_no_arguments_print_the_help(run_cli):
    done = run_cli()
    assert done.returncode == 0
    assert "build-engine" in done.stdout
    assert done.stderr == ""


def test_a_group_without_a_command_prints_its_help(run_cli):
    done = run_cli("plugins")
    assert done.returncode == 0
    assert "inspect" in done.stdout + done.stderr
    assert "error" not in done.stdout + done.stderr
    assert "completion" not in done.stdout + done.stderr


def test_version(run_cli):
    done = run_cli("--version")
    assert re.fullmatch(r"onnxfuse \d+\.\d+\.\d+\S*\n", done.stdout)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimise"], ("optimise", "onnxfuse --help")),
        (["--nope"], ("--nope", "onnxfuse --help")),
        (["doctor", "--nope"], ("--nope", "onnxfuse doctor --help")),
        (["doctor", "surplus"], ("surplus", "onnxfuse doctor --help")),
        (["optimize"], ("MODEL", "onnxfuse optimize --help")),
        (["optimize", "model.onnx", "--policy"], ("--policy",)),
        (["optimize", "model.onnx", "--policy", "bold"], ("bold",)),
        (["optimize", "model.onnx", "--precision", "int3"], ("int3",)),
        (["build-engine"], ("MODEL", "onnxfuse build-engine --help")),
        (["compare"], ("MODEL", "onnxfuse compare --help")),
        (["compare", "model.onnx", "--samples", "few"], ("--samples",)),
        (["explain"], ("MODEL", "onnxfuse explain --help")),
        (["plugins", "destroy"], ("destroy", "onnxfuse plugins --help")),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line(refuses, model, arguments: list[str], words: tuple[str, ...]):
    refuses(*arguments, status=2, words=words)


@pytest.mark.parametrize(
    ("fault", "message", "status"),
    [
        (BadInput("a.onnx: no such file"), "a.onnx: no such file", 2),
        (MissingHere("no GPU here; get one"), "no GPU here; get one", 3),
        (Disagreement("y: cosine 0.3"), "y: cosine 0.3", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: No space left on device", 2),
        (MemoryError(), "not enough memory", 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_faults(fault: BaseException, message: str, status: int):
    said, code = faults.describe(fault)
    assert said.startswith(message)
    assert code == status


def test_control_characters_of_a_model_stay_out_of_the_terminal():
    assert faults.one_line("node 'a\nb\x1b[31m\u2028c'") == "node 'a b [31m c'"


BROKEN = """
    import sys
    from onnxfuse import commands
    from onnxfuse.commands import doctor
    def fail():
        raise {fault}
    doctor.CHECKS = (fail,)
    sys.exit(commands.main(["doctor"]))
"""


def test_an_internal_fault_is_one_line_and_a_log(tmp_path: Path):
    done = python(BROKEN.format(fault="ZeroDivisionError('two\\nlines')"), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 70
    line = re.fullmatch(r"error: internal fault: ZeroDivisionError: two lines; please report, details in (\S+)\n", done.stderr)
    assert line, done.stderr
    log = Path(line[1])
    assert log.is_relative_to(tmp_path)
    assert "ZeroDivisionError" in log.read_text()
    assert "in fail" in log.read_text()


def test_debugging_shows_the_traceback():
    done = python(BROKEN.format(fault="ZeroDivisionError"), ONNXFUSE_DEBUG="1")
    assert "Traceback" in done.stderr
    assert done.returncode == 1


def test_interrupting_is_one_line():
    done = python(BROKEN.format(fault="KeyboardInterrupt"))
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_interrupting_the_import_is_one_line(tmp_path: Path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    done = python("import sys; from onnxfuse.__main__ import run; sys.exit(run())", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_nothing_is_left_outside_of_the_outputs(run_cli, model: Path, tmp_path: Path):
    """Neither onnxruntime nor onnxfuse puts anything into the home or the temporary folder."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    done = run_cli("optimize", "model.onnx", HOME=str(tmp_path / "home"), TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["home", "model.fused.onnx", "model.onnx", "tmp"]


def test_a_reader_that_goes_away_is_no_fault():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "onnxfuse", "doctor", "--json"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["plugins list", "doctor", "--help", "explain model.onnx"])
def test_a_reader_that_went_away_has_one_status(command: str, model: Path, tmp_path: Path):
    """rich has a status of its own for it, which is that of outputs that do not agree."""
    script = f"{sys.executable} -m onnxfuse {command} | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_names_of_a_model_do_not_command_the_terminal(run_cli, model: Path, tmp_path: Path):
    proto = onnx.load(model)
    proto.graph.node[0].name = "res\x1b[31m\n\u202e"
    onnx.save(proto, tmp_path / "hostile.onnx")
    done = run_cli("explain", "hostile.onnx", "--why-not", proto.graph.node[0].name)
    assert done.returncode == 0, done.stderr
    assert "skip_layernorm" in done.stdout
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert all(line.startswith(("+ ", "- ")) for line in done.stdout.splitlines())


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_closed_and_full_streams(closed: str, model: Path, tmp_path: Path):
    script = f"unset PYTHONUNBUFFERED; {sys.executable} -m onnxfuse optimize model.onnx -o out.onnx {closed}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (2 if closed == ">/dev/full" else 0), done.stderr
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    assert done.stderr == ("error: output: No space left on device; free space or choose another path\n" if done.returncode else "")


def test_a_fault_that_nobody_can_be_told_has_its_status(tmp_path: Path):
    for closed in ("2>&-", "2>/dev/full"):
        script = f"unset PYTHONUNBUFFERED; {sys.executable} -m onnxfuse optimize absent.onnx {closed}"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (2, ""), closed


@pytest.mark.parametrize("command", [("doctor",), ("explain", "model.onnx"), ("plugins", "list")])
def test_output_without_unicode(run_cli, model: Path, command: tuple[str, ...]):
    done = run_cli(*command, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode in (0, 3), done.stderr
    assert done.stdout
    assert done.stderr == ""


def test_a_folder_that_is_gone(model: Path, tmp_path: Path):
    script = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m onnxfuse optimize {model} -o out.onnx"
    environment = with_path()
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, "error: the current folder is gone; change to one that exists\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_unwinds_so_that_temporary_files_go(tmp_path: Path, number: signal.Signals):
    code = f"""
        import sys, time
        from pathlib import Path
        from onnxfuse import commands
        from onnxfuse.commands import doctor
        def wait():
            part = Path({str(tmp_path)!r}, "part")
            part.touch()
            try:
                time.sleep(60)
            finally:
                part.unlink()
        doctor.CHECKS = (wait,)
        sys.exit(commands.main(["doctor"]))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "part").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", [("-m", "onnxfuse"), ("cli.py",)], ids=" ".join)
def test_launchers_of_a_checkout(root: Path, launcher: tuple[str, ...]):
    done = subprocess.run([sys.executable, *launcher, "--version"], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("onnxfuse "), done.stderr


def test_cli_py_works_from_any_folder_without_installing(root: Path, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, root / "cli.py", "doctor", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert json.loads(done.stdout)["schema"] == 1, done.stderr
