"""Bad input, command by command: one line that names the thing, exit status 2, no traceback, nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.commands.conftest import transformer_tail

# Every command that reads a model, with what else it is given.
READERS = {
    "optimize": ("optimize", "{model}", "-o", "out.onnx"),
    "build-engine": ("build-engine", "{model}", "-o", "out.engine", "--gpu", "a100", "--shapes", "x:1x16x64", "--shapes", "r:1x16x64"),
    "compare": ("compare", "{model}", "good.onnx"),
    "compare-other": ("compare", "good.onnx", "{model}"),
    "explain": ("explain", "{model}"),
}


def with_external_data(folder: Path, location: str) -> Path:
    """A model whose weights are in another file."""
    model = transformer_tail()
    for tensor in model.graph.initializer:
        if tensor.name == "weight":
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", location), ("offset", "0"), ("length", str(64 * 64 * 4))):
                entry = tensor.external_data.add()
                entry.key, entry.value = key, value
    path = folder / "external.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def missing(folder: Path) -> Path:
    return folder / "nowhere.onnx"


def directory(folder: Path) -> Path:
    (folder / "folder.onnx").mkdir()
    return folder / "folder.onnx"


def written(content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "bad.onnx"
        path.write_bytes(content)
        return path

    return write


def truncated(folder: Path) -> Path:
    whole = transformer_tail().SerializeToString()
    return written(whole[: len(whole) * 2 // 3])(folder)


def external_missing(folder: Path) -> Path:
    return with_external_data(folder, "gone.bin")


def external_above(folder: Path) -> Path:
    (folder.parent / f"{folder.name}-secret.bin").write_bytes(bytes(64 * 64 * 4))
    return with_external_data(folder, f"../{folder.name}-secret.bin")


def external_absolute(folder: Path) -> Path:
    target = folder.parent / f"{folder.name}-secret.bin"
    target.write_bytes(bytes(64 * 64 * 4))
    return with_external_data(folder, str(target))


def external_link(folder: Path) -> Path:
    target = folder.parent / f"{folder.name}-secret.bin"
    target.write_bytes(bytes(64 * 64 * 4))
    (folder / "weights.bin").symlink_to(target)
    return with_external_data(folder, "weights.bin")


def external_short(folder: Path) -> Path:
    (folder / "weights.bin").write_bytes(bytes(100))
    return with_external_data(folder, "weights.bin")


def unknown_operator(folder: Path) -> Path:
    model = transformer_tail()
    model.graph.node[5].op_type = "Erfinator"
    return written(model.SerializeToString())(folder)


def unknown_opset(folder: Path) -> Path:
    model = transformer_tail()
    model.opset_import[0].version = 999
    return written(model.SerializeToString())(folder)


def dangling_input(folder: Path) -> Path:
    model = transformer_tail()
    model.graph.node[2].input[0] = "nobody"
    return written(model.SerializeToString())(folder)


BAD_MODELS = {
    "no such file": (missing, ("nowhere.onnx",)),
    "a folder": (directory, ("folder.onnx",)),
    "empty": (written(b""), ("bad.onnx",)),
    "text": (written(b"This is no model, it is a letter.\n" * 30), ("bad.onnx",)),
    "a picture": (written(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4), ("bad.onnx",)),
    "truncated": (truncated, ("bad.onnx",)),
    "external data missing": (external_missing, ("external.onnx", "gone.bin")),
    "external data above the folder": (external_above, ("external.onnx", "secret.bin")),
    "external data at an absolute path": (external_absolute, ("external.onnx", "secret.bin")),
    "external data behind a link": (external_link, ("external.onnx", "weights.bin")),
    "external data too short": (external_short, ("external.onnx", "weights.bin")),
    "unknown operator": (unknown_operator, ("bad.onnx", "Erfinator")),
    "opset of the future": (unknown_opset, ("bad.onnx", "999")),
    "input of nobody": (dangling_input, ("bad.onnx", "nobody")),
}


# Faults of the graph, which build-engine leaves to TensorRT's parser: it knows operators that onnx does not.
PARSED_BY_TENSORRT = ("unknown operator", "opset of the future", "input of nobody")


@pytest.mark.parametrize("bad", BAD_MODELS)
@pytest.mark.parametrize("command", READERS)
def test_bad_model(refuses, tmp_path: Path, command: str, bad: str):
    if command == "build-engine" and bad in PARSED_BY_TENSORRT and not importlib.util.find_spec("tensorrt"):
        pytest.skip("TensorRT, whose parser reads the graph, is not installed here")
    onnx.save(transformer_tail(), tmp_path / "good.onnx")
    make, words = BAD_MODELS[bad]
    path = make(tmp_path)
    refuses(*(word.format(model=path.name) for word in READERS[command]), status=2, words=words)


def test_unknown_domain_is_named(refuses, tmp_path: Path):
    """An operator that onnxruntime does not know cannot be checked: the line names it."""
    model = transformer_tail()
    model.graph.node[5].domain = "com.acme"
    model.opset_import.append(helper.make_opsetid("com.acme", 1))
    (tmp_path / "acme.onnx").write_bytes(model.SerializeToString())
    refuses("optimize", "acme.onnx", "-o", "out.onnx", status=2, words=("acme.onnx", "com.acme"))


@pytest.mark.parametrize(
    ("gpu", "words"),
    [("h1000", ("h1000", "h100")), ("v100", ("v100", "TensorRT")), ("sm_12", ("sm_12",)), ("", ("gpu",))],
    ids=["unknown", "v100", "sm_12", "empty"],
)
@pytest.mark.parametrize(
    "command",
    [
        ("optimize", "model.onnx", "-o", "out.onnx"),
        ("build-engine", "model.onnx", "-o", "out.engine", "--shapes", "x:1x16x64", "--shapes", "r:1x16x64"),
        ("plugins", "build"),
    ],
    ids=lambda command: command[0],
)
def test_wrong_gpu(refuses, model: Path, command: tuple[str, ...], gpu: str, words: tuple[str, ...]):
    refuses(*command, "--gpu", gpu, status=2, words=words)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (["nobody:1x16x64"], ("nobody",)),
        (["x:"], ()),
        (["x"], ()),
        (["x:1xAx64"], ("1xAx64",)),
        (["x:0x16x64"], ()),
        (["x:-1x16x64"], ()),
        (["x:1x16"], ()),
        (["x:1x16x32"], ()),
        (["x:4x16x64..2x16x64..1x16x64"], ()),
        (["x:1x16x64..2x16x64"], ()),
        (["x:1x16x64", "x:2x16x64"], ()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_shapes(refuses, model: Path, shapes: list[str], words: tuple[str, ...]):
    options = [part for shape in (*shapes, "r:1x16x64") for part in ("--shapes", shape)]
    line = refuses("build-engine", "model.onnx", "-o", "out.engine", "--gpu", "a100", *options, status=2, words=words)
    assert re.search(r"\b(x|nobody)\b", line), f"the input is not named: {line}"


@pytest.mark.parametrize("output", ["missing/out.onnx", "folder", "model.onnx/out.onnx"])
def test_unwritable_output(refuses, model: Path, tmp_path: Path, output: str):
    (tmp_path / "folder").mkdir()
    refuses("optimize", "model.onnx", "-o", output, status=2, words=(output,))


@pytest.mark.parametrize("report", ["missing/report.json", "folder"])
def test_unwritable_report(refuses, model: Path, tmp_path: Path, report: str):
    (tmp_path / "folder").mkdir()
    refuses("optimize", "model.onnx", "-o", "out.onnx", "--report", report, status=2, words=(report,))


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_a_pipe_or_device_is_no_output(refuses, model: Path, tmp_path: Path, option: str):
    """Replacing it by a file, as whole-or-not-at-all does, would take /dev/null from the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        refuses("optimize", "model.onnx", option, name, status=2, words=(f"{option} {name}", "pipe"))
    refuses("build-engine", "model.onnx", "-o", "pipe", "--shapes", "x:1x16x64", "--shapes", "r:1x16x64", status=2, words=("pipe",))
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_one_file_takes_one_output(refuses, model: Path):
    refuses("optimize", "model.onnx", "-o", "out.onnx", "--report", "out.onnx", status=2, words=("--report out.onnx", "-o"))
    refuses("optimize", "model.onnx", "--report", "a.json", "--report", "./a.json", status=2, words=("--report",))


def test_a_report_does_not_take_the_place_of_weights(refuses, tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(bytes(64 * 64 * 4))
    with_external_data(tmp_path, "weights.bin")
    command = ("optimize", "external.onnx", "-o", "out.onnx", "--report")
    refuses(*command, "weights.bin", status=2, words=("--report weights.bin", "weights"))
    refuses(*command, "out.onnx.data", status=2, words=("--report out.onnx.data", "weights of out.onnx"))
    assert (tmp_path / "weights.bin").read_bytes() == bytes(64 * 64 * 4)


@pytest.mark.parametrize("command", ["optimize --plan", "optimize --data", "bisect --plan", "compare --data"])
def test_a_pipe_is_no_input(refuses, model: Path, tmp_path: Path, command: str):
    """It would be waited for, and /dev/zero has no end."""
    os.mkfifo(tmp_path / "pipe")
    verb, option = command.split()
    others = ["model.onnx"] if verb == "compare" else []
    refuses(verb, "model.onnx", *others, option, "pipe", status=2, words=("pipe", "ordinary file"))


@pytest.mark.parametrize("path", ["", ".", "/", "a" * 300 + ".onnx"], ids=["empty", "here", "root", "long"])
@pytest.mark.parametrize("command", ["optimize", "inspect", "bisect", "compare", "build-engine"])
def test_a_path_that_names_no_file(refuses, command: str, path: str):
    refuses(command, path, status=2)


def test_a_size_in_superscript_is_none(refuses, model: Path):
    refuses("optimize", "model.onnx", "--dims", "batch=\u00b2", status=2, words=("NAME=N",))


def test_a_link_is_followed(run_cli, model: Path, tmp_path: Path):
    (tmp_path / "real").mkdir()
    for name in ("out.onnx", "report.json"):
        (tmp_path / name).symlink_to(Path("real") / name)
    done = run_cli("optimize", "model.onnx", "-o", "out.onnx", "--report", "report.json")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["out.onnx", "report.json"]
    assert (tmp_path / "out.onnx").is_symlink()
    assert (tmp_path / "report.json").is_symlink()


@pytest.mark.parametrize(
    "idle",
    [("--report", "a.json"), ("--policy", "all"), ("--precision", "fp16"), ("--plan", "p"), ("--only", "gelu"), ("--gpu", "h100")],
    ids=lambda idle: idle[0],
)
def test_undo_takes_no_option_that_it_would_ignore(refuses, model: Path, idle: tuple[str, str]):
    refuses("optimize", "model.onnx", "--undo", *idle, status=2, words=("--undo", idle[0]))


def test_keeping_float32_needs_a_conversion(refuses, model: Path):
    refuses("optimize", "model.onnx", "--keep-fp32", "norm", status=2, words=("--keep-fp32 norm", "--precision"))


def test_a_fusion_is_not_both_wanted_and_left_out(refuses, model: Path):
    refuses("optimize", "model.onnx", "--only", "gelu", "--skip", "gelu", status=2, words=("--only gelu", "--skip gelu", "leave one"))


@pytest.mark.parametrize("idle", [("--memory", "64"), ("--no-truth",)], ids=lambda idle: idle[0])
def test_what_only_layers_reads_is_refused_without_it(refuses, model: Path, idle: tuple[str, ...]):
    refuses("compare", "model.onnx", "model.onnx", *idle, status=2, words=(idle[0], "--layers"))


@pytest.mark.parametrize("command", [("compare", "model.onnx"), ("bisect",)], ids=lambda command: command[0])
@pytest.mark.parametrize("option", ["--rtol", "--atol"])
@pytest.mark.parametrize("limit", ["inf", "nan", "-1"])
def test_a_tolerance_is_a_finite_number(refuses, model: Path, command: tuple[str, ...], option: str, limit: str):
    refuses(*command, "model.onnx", option, limit, status=2, words=(option,))


def test_a_link_to_the_reference_is_said_to_be_the_same_file(run_cli, refuses, model: Path, tmp_path: Path):
    (tmp_path / "link.onnx").symlink_to("model.onnx")
    done = run_cli("compare", "model.onnx", "link.onnx")
    assert done.returncode == 0, done.stderr
    assert "the same file as the reference" in " ".join(done.stdout.split())
    refuses("compare", "model.onnx", "model.onnx", "link.onnx", status=2, words=("named twice",))


def test_a_report_of_compare_needs_the_folder_that_it_goes_into(refuses, run_cli, model: Path, tmp_path: Path):
    refuses("compare", "model.onnx", "model.onnx", "--report", "no/deep/er", status=2, words=("--report no/deep/er", "there is no folder"))
    (tmp_path / "file").touch()
    refuses("compare", "model.onnx", "model.onnx", "--report", "file", status=2, words=("--report file", "it is a file"))
    refuses("compare", "model.onnx", "model.onnx", "--report", "r.html", status=2, words=("--report r.html", "a folder", "give r"))
    refuses("compare", "model.onnx", "model.onnx", "--report", "new", "--dims", "nobody=2", status=2)  # nothing is made for nothing
    assert run_cli("compare", "model.onnx", "model.onnx", "--report", "new").returncode == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["report.html", "report.json"]


@pytest.mark.parametrize(
    ("command", "help_of"),
    [
        (("compare", "--rtol"), "onnxfuse compare"),
        (("export", "triton", "--name"), "onnxfuse export triton"),
        (("report", "diff", "--nonsense"), "onnxfuse report diff"),
    ],
)
def test_wrong_usage_names_the_help_of_its_command(refuses, command: tuple[str, ...], help_of: str):
    refuses(*command, status=2, words=(f"see `{help_of} --help`",))


@pytest.mark.parametrize(
    "command",
    [
        "optimize gone", "explain gone", "compare gone", "bisect gone", "build-engine gone", "inspect gone", "report gone",
        "export triton gone models", "optimize model.onnx --plan gone", "optimize model.onnx --data gone.npz",
    ],
)  # fmt: skip
def test_a_file_that_is_not_there_is_said_in_the_same_words(refuses, model: Path, command: str):
    refuses(*command.split(), status=2, words=("gone", ": no such file; "))


def test_a_file_of_another_kind_is_no_engine(refuses, model: Path, tmp_path: Path):
    (tmp_path / "letter.json").write_text("{}")
    refuses("inspect", "letter.json", status=2, words=("letter.json: no engine", "an ONNX model, or the folder of a kit"))


def test_output_over_the_input_is_whole_or_untouched(run_cli, model: Path):
    """Writing over the model that is read either succeeds or leaves it as it was."""
    before = model.read_bytes()
    done = run_cli("optimize", "model.onnx", "-o", "model.onnx", "--policy", "all")
    if done.returncode:
        assert done.stderr.startswith("error: ")
        assert model.read_bytes() == before
    else:
        onnx.checker.check_model(onnx.load(model))


def heavy_model(folder: Path) -> Path:
    """3 MB of weights, so that a small quota cannot hold them."""
    model = transformer_tail()
    weight = np.random.default_rng(0).normal(0, 0.1, (64, 12288)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "wide"))
    model.graph.node.append(helper.make_node("MatMul", ["y", "wide"], ["z"], "widen"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 16, 12288]))
    path = folder / "heavy.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_full_disk_leaves_nothing(tmp_path: Path):
    """A file size limit stops writing as a full disk does, at 1 MB into the model."""
    heavy_model(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "onnxfuse", "optimize", "heavy.onnx", "-o", "out.onnx", "--policy", "all"],
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "out.onnx" in done.stderr or "too large" in done.stderr.lower(), done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("data.npz",)),
        (b"not a zip", ("data.npz",)),
        ({"x": np.zeros((1, 16, 64), np.float32)}, ("data.npz", "r")),
        ({"x": np.zeros((1, 16, 64)), "r": np.zeros((1, 16, 64), np.float32)}, ("x", "float64")),
        ({"x": np.zeros((1, 16, 63), np.float32), "r": np.zeros((1, 16, 64), np.float32)}, ("x", "63")),
        ({"x": np.array([{}], object), "r": np.zeros((1, 16, 64), np.float32)}, ("data.npz",)),
    ],
    ids=["missing", "no npz", "input missing", "wrong type", "wrong shape", "pickled"],
)
def test_bad_data(refuses, model: Path, tmp_path: Path, content: object, words: tuple[str, ...]):
    (tmp_path / "other.onnx").write_bytes(model.read_bytes())
    if isinstance(content, bytes):
        (tmp_path / "data.npz").write_bytes(content)
    elif isinstance(content, dict):
        np.savez(tmp_path / "data.npz", **content)
    refuses("compare", "model.onnx", "other.onnx", "--data", "data.npz", status=2, words=words)


def test_unknown_fusion_is_named_with_those_there_are(refuses, model: Path):
    refuses("optimize", "model.onnx", "-o", "out.onnx", "--only", "gelo", status=2, words=("gelo", "gelu"))
    refuses("optimize", "model.onnx", "-o", "out.onnx", "--skip", "gelo", status=2, words=("gelo", "gelu"))


def test_unknown_node_is_named(refuses, model: Path):
    refuses("explain", "model.onnx", "--why-not", "nobody", status=2, words=("nobody",))


@pytest.mark.parametrize("plan", [None, b"not a plan", b"{}", b'{"schema": 99}'], ids=["missing", "text", "empty", "newer"])
def test_bad_plan(refuses, model: Path, tmp_path: Path, plan: bytes | None):
    if plan is not None:
        (tmp_path / "plan.json").write_bytes(plan)
    refuses("optimize", "model.onnx", "-o", "out.onnx", "--plan", "plan.json", status=2, words=("plan.json",))


def test_a_name_that_is_not_utf8_is_refused(refuses, model: Path, tmp_path: Path):
    name = os.fsdecode(b"bad\xff.onnx")
    refuses("optimize", "model.onnx", "-o", name, status=2, words=("bad", "UTF-8"))
    (tmp_path / name).write_bytes(model.read_bytes())
    refuses("optimize", name, status=2, words=("bad", "UTF-8"))


def test_a_model_that_cannot_be_checked_says_how_to_go_on(run_cli, model: Path, tmp_path: Path):
    wide = onnx.load(model)
    wide.graph.node.append(helper.make_node("NoSuchThing", ["y"], ["z"], domain="own"))
    wide.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 16, 64]))
    wide.opset_import.append(helper.make_opsetid("own", 1))
    onnx.save(wide, tmp_path / "wide.onnx")
    done = run_cli("optimize", "wide.onnx", "-o", "out.onnx")
    assert done.returncode == 2
    assert "--no-check" in done.stderr
    assert run_cli("optimize", "wide.onnx", "-o", "out.onnx", "--no-check").returncode == 0


def test_a_different_model_disagrees(run_cli, model: Path, tmp_path: Path):
    """compare says by its status that outputs differ."""
    changed = onnx.load(model)
    weight = next(t for t in changed.graph.initializer if t.name == "bias")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + np.float32(0.5), "bias"))
    onnx.save(changed, tmp_path / "other.onnx")
    done = run_cli("compare", "model.onnx", "other.onnx")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_missing_tensorrt_says_how_to_get_it(run_cli, model: Path):
    if importlib.util.find_spec("tensorrt"):
        pytest.skip("TensorRT is installed here, so that nothing is missing")
    shapes = ("--shapes", "x:1x16x64", "--shapes", "r:1x16x64")
    done = run_cli("build-engine", "model.onnx", "-o", "out.engine", "--gpu", "a100", *shapes)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("\n") == 1
    assert "pip install" in done.stderr
    assert not (model.parent / "out.engine").exists()
