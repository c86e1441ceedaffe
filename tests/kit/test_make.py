"""Making a kit: what is in it gives the right outputs, and it appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxfuse import gpus, plugins
from onnxfuse.errors import BadInput, MissingHere
from onnxfuse.kit import make, target
from tests.engine import models
from tests.kit.conftest import SHAPES


def outputs_of(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


def test_the_automatic_model_gives_the_outputs_of_the_kit(made: make.Kit) -> None:
    cases = target.read_reference(str(made.folder))
    assert [feeds["x"].shape[0] for feeds, _ in cases] == [3, 1, 8]  # to optimize for, smallest, largest
    for feeds, wanted in cases:
        for name, got in outputs_of(made.folder / "automatic.onnx", feeds).items():
            np.testing.assert_allclose(got.astype(np.float32), wanted[name].astype(np.float32), rtol=2e-3, atol=2e-3)


def test_the_fused_model_has_plugins_where_the_automatic_has_none(made: make.Kit) -> None:
    domains = {
        name: {node.domain for node in onnx.load(made.folder / f"{name}.onnx", load_external_data=False).graph.node}
        for name in ("automatic", "fused")
    }
    assert domains == {"automatic": {""}, "fused": {"", "onnxfuse"}}
    assert made.plugins == ("BiasGelu", "SkipLayerNormalization")


def test_weights_are_there_once(tmp_path: Path) -> None:
    model = models.saved(models.block(width=256), tmp_path)
    kit = make.make(model, tmp_path / "kit", gpu=gpus.resolve("a100"), shapes=["x:1x5x256"], progress=lambda line: None)
    one = 4 * 256 * 256
    assert one < (kit.folder / "weights.bin").stat().st_size < one + 5 * 4096
    assert all((kit.folder / f"{name}.onnx").stat().st_size < 20_000 for name in ("automatic", "fused"))
    assert outputs_of(kit.folder / "automatic.onnx", models.feeds(width=256)).keys() == {"y", "s"}


def test_external_data_of_the_model_comes_along(tmp_path: Path) -> None:
    onnx.save(models.block(width=64), str(tmp_path / "m.onnx"), save_as_external_data=True, location="sub.data", size_threshold=0)
    kit = make.make(tmp_path / "m.onnx", tmp_path / "kit", gpu=gpus.resolve("a100"), shapes=["x:3x5x64"])
    (tmp_path / "sub.data").unlink()
    feeds = models.feeds()
    wanted = outputs_of(models.saved(models.block(width=64), tmp_path, "inline.onnx"), feeds)
    got = outputs_of(kit.folder / "automatic.onnx", feeds)
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5)


def test_the_library_is_the_targets(tmp_path: Path, model: Path) -> None:
    kit = make.make(model, tmp_path / "kit", gpu=gpus.resolve("sm_80"), shapes=SHAPES)
    assert (kit.folder / "libonnxfuse_plugins.so").read_bytes() == plugins.build(80).path.read_bytes()
    assert json.loads((kit.folder / "kit.json").read_text())["architectures"] == [80]


def test_right_outputs_of_the_original_in_float32(tmp_path: Path, model: Path) -> None:
    original = models.saved(models.block("float32"), tmp_path, "original.onnx")
    kit = make.make(model, tmp_path / "kit", gpu=gpus.resolve("h200"), shapes=SHAPES, original=original)
    about = json.loads((kit.folder / "kit.json").read_text())
    assert about["reference"].endswith(", original.onnx")
    assert about["tolerance"]["name"] == "float16"
    for feeds, outputs in target.read_reference(str(kit.folder)):
        assert feeds["x"].dtype == np.float16
        wanted = outputs_of(original, {"x": feeds["x"].astype(np.float32)})
        for name, array in wanted.items():
            assert outputs[name].dtype == np.float32
            np.testing.assert_array_equal(outputs[name], array)


def test_given_inputs(tmp_path: Path, model: Path) -> None:
    np.savez(tmp_path / "in.npz", **models.feeds("float16", batch=5))
    kit = make.make(model, tmp_path / "kit", gpu=gpus.resolve("h200"), shapes=SHAPES, data=tmp_path / "in.npz")
    ((feeds, _),) = target.read_reference(str(kit.folder))
    np.testing.assert_array_equal(feeds["x"], models.feeds("float16", batch=5)["x"])
    np.savez(tmp_path / "large.npz", **models.feeds("float16", batch=9))
    with pytest.raises(BadInput, match=r"large\.npz: input 'x' has shape \(9, 5, 64\), and --shapes takes \(1, 5, 64\) to \(8, 5, 64\)"):
        make.make(model, tmp_path / "other", gpu=gpus.resolve("h200"), shapes=SHAPES, data=tmp_path / "large.npz")


def test_a_model_without_plugins_has_the_automatic_engine_alone(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = models.saved(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path)
    kit = make.make(model, tmp_path / "kit", gpu=gpus.resolve("h200"))
    about = json.loads((kit.folder / "kit.json").read_text())
    assert list(about["engines"]) == ["automatic"]
    assert about["library"] is None
    assert not (kit.folder / "weights.bin").exists()


def test_a_library_for_every_gpu_from_ampere_on(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []
    library = plugins.build(80)  # that the other one holds code for newer GPUs is tested where it is compiled

    def build(sm: int, and_newer: bool) -> plugins.Library:
        asked.append((sm, and_newer))
        return library

    monkeypatch.setattr(make.plugins, "build", build)
    kit = make.make(model, tmp_path / "kit", gpu=gpus.resolve("l4"), shapes=SHAPES, compatible="ampere+")
    assert asked == [(80, True)]
    about = target.read_kit(str(kit.folder))
    assert (about["compatible"], about["sm"]) == ("ampere+", 89)
    for sm, refused in ((80, False), (120, False), (75, True)):
        with pytest.raises(target.Fault) if refused else contextlib.nullcontext():
            target.check_gpu(about, "a GPU", sm)
    with pytest.raises(BadInput, match=r"--gpu t4: hardware-compatible engines need compute capability 8\.0"):
        make.make(model, tmp_path / "other", gpu=gpus.resolve("t4"), shapes=SHAPES, compatible="ampere+")


@pytest.mark.parametrize("moment", ["build", "run_feeds"])
def test_what_fails_leaves_nothing(moment: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make.plugins if moment == "build" else make.check, moment, fail)
    with pytest.raises(BadInput, match="no space left on device"):
        make.make(model, tmp_path / "kit", gpu=gpus.resolve("h200"), shapes=SHAPES)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_stays(tmp_path: Path, model: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "mine").touch()
    with pytest.raises(BadInput, match="the folder is not empty; remove it, or choose another"):
        make.make(model, tmp_path / "kit", gpu=gpus.resolve("h200"), shapes=SHAPES)
    with pytest.raises(BadInput, match="it is a file, and a folder is to be made"):
        make.make(model, tmp_path / "kit" / "mine", gpu=gpus.resolve("h200"), shapes=SHAPES)
    assert [path.name for path in (tmp_path / "kit").iterdir()] == ["mine"]


def test_a_target_with_other_processors_is_said(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make.platform, "machine", lambda: "x86_64")
    with pytest.raises(
        MissingHere, match="--gpu orin: its machines have aarch64 processors, and the plugin library would be compiled for x86_64"
    ):
        make.make(model, tmp_path / "kit", gpu=gpus.resolve("orin"), shapes=SHAPES)
    assert make.make(model, tmp_path / "kit", gpu=gpus.resolve("orin"), shapes=SHAPES, use_plugins=False).plugins == ()
    assert {gpu.host for gpu in gpus.GPUS if gpu.kind == "Jetson"} == {"aarch64"}


def test_the_command(run_cli: Callable[..., object], tmp_path: Path, model: Path) -> None:
    shutil.copy(model, tmp_path / "m.onnx")
    done = run_cli("build-engine", "m.onnx", "--gpu", "h200", "--shapes", SHAPES[0], "--kit", "my kit")
    assert done.returncode == 0, done.stderr
    assert "my kit: kit for h200," in done.stdout
    said = done.stdout.split("--sha256 ")[1].strip()
    assert "python3 'my kit/kit.py'" in done.stdout
    assert target.read_kit(str(tmp_path / "my kit"), said)["gpu"] == "h200"
    (tmp_path / "my kit" / "more.txt").touch()
    looked = run_cli("inspect", "my kit")
    assert looked.returncode == 0, looked.stderr
    assert f"sha256 of kit.json: {said}" in looked.stdout
    assert "note: not of the kit: more.txt" in looked.stdout
    (tmp_path / "my kit" / "fused.onnx").write_bytes(b"other")
    assert "fused.onnx is missing or not the file" in run_cli("inspect", "my kit").stderr


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--kit", "k"), 3, "or name the GPU that it is for, as in --gpu h100"),
        (("--kit", "k", "--gpu", "h999"), 2, "GPU 'h999' is not known"),
        (("--kit", "k", "--gpu", "h200"), 2, "--shapes x:"),
        (("--kit", "k", "--gpu", "h200", "-o", "e.engine"), 2, "-o: a kit builds elsewhere; leave -o off"),
        (("--data", "in.npz"), 2, "--data: it says what a kit is checked with; give --kit DIR with it"),
        (("--compatible", "volta"), 2, "--compatible volta: not a level that TensorRT has; give ampere+"),
        (("--kit", "no/such/k", "--gpu", "h200", "--shapes", SHAPES[0]), 2, "there is no folder"),
        (("--gpu", "h200", "--shapes", SHAPES[0]), 3, "or --kit DIR writes all that a machine with h200 needs"),
    ],
)  # fmt: skip
def test_the_commands_refusals(
    arguments: tuple[str, ...], status: int, says: str, run_cli: Callable[..., object], tmp_path: Path, model: Path
) -> None:
    shutil.copy(model, tmp_path / "m.onnx")
    done = run_cli("build-engine", "m.onnx", *arguments)
    assert done.returncode == status, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize(
    ("compatible", "says"),
    [
        (None, "kit: kit for l4, 1.0 MB: plugins BiasGelu for sm_89;"),
        ("ampere+", "every GPU from sm_80 on, 1.0 MB: plugins BiasGelu for sm_80 and newer;"),
    ],
)
def test_the_command_says_which_gpus_it_is_for(
    compatible: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onnxfuse.commands import build_engine

    kit = make.Kit(tmp_path / "kit", gpus.resolve("l4"), "f" * 64, {}, 1_000_000, ("BiasGelu",), 3)
    monkeypatch.setattr(make, "make", lambda *wanted, **settings: kit)
    build_engine._make_kit(kit.folder, tmp_path / "m.onnx", "l4", compatible=compatible)
    assert says in capsys.readouterr().out
