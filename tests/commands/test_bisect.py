"""`onnxfuse bisect` as a user types it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfuse import pipeline
from tests.fusions import convnext
from tests.verify import plants

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def broken(tmp_path: Path) -> tuple[Path, Path, str]:
    """A model, its fused file with a wrong epsilon in one norm, and that norm's name."""
    source, fused = plants.fused(plants.encoder(), tmp_path)
    proto = plants.edited(fused)
    name = next(node.name for node in proto.graph.node if node.op_type == "SkipLayerNormalization")
    plants.wrong_epsilon(proto, name, 1.0)
    onnx.save(proto, fused)
    np.savez(tmp_path / "inputs.npz", **plants.encoder_feeds())
    return source, fused, name


def test_a_fault_is_named_and_reproduced_by_the_line_that_is_printed(broken: tuple[Path, Path, str], tmp_path: Path, run_cli: Cli) -> None:
    source, fused, name = broken
    done = run_cli("bisect", source.name, "--other", fused.name, "--data", "inputs.npz", "-o", "found")
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {fused.name}: disagrees because of skip_layernorm at ")
    assert name in line
    assert "wrong by itself" in done.stdout
    assert "stands for l0_attention_norm" in done.stdout
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == [
        "bisect.json", "plan.json", "repro.fused.onnx", "repro.npz", "repro.onnx",
    ]  # fmt: skip
    (command,) = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith("onnxfuse compare ")]
    again = run_cli(*shlex.split(command)[1:])
    assert again.returncode == 1, again.stdout + again.stderr
    assert "repro.fused.onnx" in again.stderr
    report = json.loads((tmp_path / "found" / "bisect.json").read_text())
    assert report["verdict"] == "found"
    assert report["causes"][0]["sites"][0]["name"] == name
    # The plan that is written leaves just this site unfused, whatever policy would decide on the others.
    for policy in ("all", "proven"):
        planned = pipeline.optimize(source, tmp_path / "planned.onnx", policy=policy, plan=tmp_path / "found" / "plan.json", check=False)
        left = [d.site.output for d in planned.decisions if not d.fused and d.site.fusion not in plants.APART]
        assert left == ["l0_attention_norm_out"]


def test_nodes_that_cannot_be_told_apart_are_not_accused_alone(tmp_path: Path, run_cli: Cli) -> None:
    """They pass each other tensors in another layout, so only all of them can be switched off: the fault is in the second norm."""
    source, fused = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(convnext.model(blocks=2), source)
    pipeline.optimize(source, fused, policy="all", precision="fp16", check=False)
    proto = onnx.load(fused)
    norms = [node.name for node in proto.graph.node if node.op_type.startswith("DepthwiseConvLayerNorm")]
    plants.wrong_epsilon(proto, norms[1], 10.0)
    onnx.save(proto, fused)
    done = run_cli("bisect", source.name, "--other", fused.name)
    assert done.returncode == 1, done.stderr
    assert "fused nodes that hold together with it" in done.stderr
    (command,) = [line.strip() for line in done.stdout.splitlines() if line.endswith(" --layers")]
    again = run_cli(*shlex.split(command)[1:])
    assert again.returncode == 1, again.stderr
    assert f"'{norms[1]}'" in again.stdout


def test_what_agrees_says_so_and_leaves_nothing_behind(model: Path, tmp_path: Path, run_cli: Cli) -> None:
    before = sorted(tmp_path.iterdir())
    done = run_cli("bisect", model.name)
    assert done.returncode == 0, done.stderr
    assert "agrees with all of its" in done.stdout
    assert sorted(tmp_path.iterdir()) == before


def test_a_fused_model_is_bisected_against_another_without_a_plan(broken: tuple[Path, Path, str], tmp_path: Path, run_cli: Cli) -> None:
    """MODEL may be a fused file, too; there is no plan for what is fused already. What an earlier search left is gone."""
    source, fused, name = broken
    sound = tmp_path / "sound.onnx"
    pipeline.optimize(source, sound, policy="all", check=False)
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "plan.json").write_text("{}")
    done = run_cli("bisect", sound.name, "--other", fused.name, "--data", "inputs.npz", "-o", "found")
    assert done.returncode == 1
    assert name in done.stderr
    assert not (tmp_path / "found" / "plan.json").exists()
    assert (tmp_path / "found" / "repro.npz").exists()


def test_precision_prints_options_that_optimize_takes(tmp_path: Path, run_cli: Cli) -> None:
    from tests.verify.test_bisect_precision import cancelling

    onnx.save(cancelling(), tmp_path / "model.onnx")
    done = run_cli("bisect", "model.onnx", "--precision", "fp16", "--policy", "none")  # fused, the two would not round in between
    assert done.returncode == 1, done.stderr
    assert "unless 2 of 5 nodes stay in float32" in done.stderr
    (command,) = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith("onnxfuse optimize ")]
    words = shlex.split(command)
    assert words.count("--keep-fp32") == 2
    assert {"shift", "unshift"} <= set(words)
    assert run_cli(*words[1:], "-o", "half.onnx").returncode == 0
    report = json.loads((tmp_path / "model.bisect" / "bisect.json").read_text())
    assert report["options"] == words[3:]
    assert set(report["keep"]) == {"shift", "unshift"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precision", "fp8"], ("--precision fp8", "fp16 or bf16")),
        (["--policy", "best"], ("--policy best", "all, proven or none")),
        (["--other", "model.onnx", "--policy", "none"], ("--policy and --other exclude each other",)),
        (["--other", "model.onnx", "--precision", "fp16"], ("--precision and --other exclude each other",)),
        (["--precision", "fp16", "--tensorrt"], ("exclude each other",)),
        (["--other", "gone.onnx"], ("gone.onnx: no such file",)),
        (["--plan", "gone.json"], ("gone.json",)),
        (["--data", "gone.npz"], ("gone.npz: no such file",)),
        (["--dims", "batch"], ("NAME=N",)),
        (["-o", "model.onnx"], ("cannot write model.onnx", "folder")),
    ],
)
def test_wrong_usage_is_one_line(model: Path, refuses: Callable[..., str], arguments: list[str], words: tuple[str, ...]) -> None:
    refuses("bisect", model.name, *arguments, status=2, words=words)


def test_a_file_of_another_model_is_refused(model: Path, tmp_path: Path, refuses: Callable[..., str]) -> None:
    onnx.save(plants.gated(), tmp_path / "other.onnx")
    refuses("bisect", model.name, "--other", "other.onnx", status=2, words=("other.onnx", "input"))


def test_without_a_gpu_the_kernels_cannot_be_asked(model: Path, refuses: Callable[..., str]) -> None:
    if has_gpu():
        pytest.skip("there is a GPU here")
    refuses("bisect", model.name, "--tensorrt", status=3)


def has_gpu() -> bool:
    from onnxfuse.engine import trt
    from onnxfuse.errors import MissingHere

    try:
        trt.tensorrt()
        trt.gpu()
    except MissingHere:
        return False
    return True


def test_the_help_names_every_option(run_cli: Cli) -> None:
    done = run_cli("bisect", "--help")
    assert done.returncode == 0
    for option in ("--other", "--plan", "--precision", "--tensorrt", "--data", "--repeats", "--out"):
        assert option in done.stdout
