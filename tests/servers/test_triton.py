"""Triton's model repository, read by Triton's own schema."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from google.protobuf import text_format

from onnxfuse.engine import manifest as manifests
from onnxfuse.engine.manifest import Manifest, PluginUse, Tensor
from onnxfuse.errors import BadInput
from onnxfuse.servers import triton
from tests.engine.test_manifest import example

IDS = Tensor("ids", "int64", (-1, -1), (1, 8), (4, 24), (8, 64))
MASK = Tensor("mask", "bool", (-1, -1), (1, 8), (4, 24), (8, 64))
Y = Tensor("y", "float16", (-1, -1, 384))
EXTERNAL = Path(__file__).resolve().parents[1] / "plugins" / "external.py"


def module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="session")
def schema(require_external: Callable[[str], NoReturn]) -> Any:
    """Triton's ModelConfig message."""
    external = module(EXTERNAL, "external_for_triton")
    try:
        return module(external.triton_schema(), "model_config_pb2").ModelConfig
    except external.Absent as reason:
        require_external(f"Triton's schema: {reason}")


def engine(folder: Path, name: str = "m.engine", **changes: Any) -> Path:
    path = folder / name
    path.write_bytes(b"an engine")
    usual = {"inputs": (IDS, MASK), "outputs": (Y,), "plugins": None, "engine_sha256": hashlib.sha256(b"an engine").hexdigest()}
    manifests.path_of(path).write_text(dataclasses.replace(example(), **{**usual, **changes}).to_json())
    return path


def parsed(schema: Any, folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), schema())


@pytest.mark.external
def test_a_repository_with_batching(schema: Any, tmp_path: Path) -> None:
    done = triton.export(engine(tmp_path), tmp_path / "repository", name="minilm")
    config = parsed(schema, tmp_path / "repository" / "minilm")
    assert (config.name, config.backend, config.platform, config.default_model_filename) == (
        "minilm",
        "tensorrt",
        "tensorrt_plan",
        "model.plan",
    )
    assert config.max_batch_size == done.max_batch == 8
    read = [
        (t.name, schema.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number[t.data_type].name, list(t.dims))
        for t in config.input
    ]
    assert read == [("ids", "TYPE_INT64", [-1]), ("mask", "TYPE_BOOL", [-1])]
    assert [(t.name, list(t.dims)) for t in config.output] == [("y", [-1, 384])]
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    assert config.instance_group[0].Kind.Name(config.instance_group[0].kind) == "KIND_GPU"
    plan = tmp_path / "repository" / "minilm" / "1" / "model.plan"
    assert plan.read_bytes() == b"an engine"
    assert manifests.load(plan) == manifests.load(tmp_path / "m.engine")


@pytest.mark.external
def test_every_type_is_one_of_tritons(schema: Any) -> None:
    known = schema.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
    assert set(triton.TYPES.values()) <= set(known)


@pytest.mark.external
@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ((Tensor("x", "float32", (4, 3)),), (Y,), "the first axis of x is not free"),
        ((IDS,), (Tensor("y", "float16", (7, 384)),), "the first axis of y is not free"),
        ((IDS, dataclasses.replace(MASK, max=(16, 64))), (Y,), "the first axes of its inputs have different ranges"),
        ((dataclasses.replace(IDS, min=(2, 8)),), (Y,), "its smallest batch is 2"),
        ((Tensor("\x1b[2J", "float32", (4,)),), (Y,), r"the first axis of \x1b[2J is not free"),
        ((Tensor("s", "float32", ()),), (Y,), "s has no axes"),
    ],
)
def test_without_batching_the_whole_shape_stands(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], reason: str, schema: Any, tmp_path: Path
) -> None:
    path = engine(tmp_path, inputs=inputs, outputs=outputs)
    done = triton.export(path, tmp_path / "r")
    assert done.max_batch == 0
    assert any(reason in note for note in done.notes)
    config = parsed(schema, done.folder)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    for tensor, stated in zip((*inputs, *outputs), (*config.input, *config.output), strict=True):
        assert list(stated.dims) == list(tensor.shape or (1,))
        assert stated.HasField("reshape") == (not tensor.shape)
    with pytest.raises(BadInput, match=r"cannot be batched: .*leave --batching off"):
        triton.export(path, tmp_path / "other", batching=True)


@pytest.mark.external
def test_a_batch_of_numbers_has_an_axis_of_one(schema: Any, tmp_path: Path) -> None:
    done = triton.export(engine(tmp_path, outputs=(Tensor("score", "float32", (-1,)),)), tmp_path / "r")
    (output,) = parsed(schema, done.folder).output
    assert (list(output.dims), list(output.reshape.shape), output.HasField("reshape")) == ([1], [], True)


@pytest.mark.external
@pytest.mark.parametrize("name", ['a"b', "a\\", "a\nname: 'b'", "é", '" } ] max_batch_size: 99 input [ { name: "', "\x00", "'"])
def test_names_of_tensors_cannot_break_out(name: str, schema: Any, tmp_path: Path) -> None:
    done = triton.export(engine(tmp_path, inputs=(dataclasses.replace(IDS, name=name),)), tmp_path / "r")
    config = parsed(schema, done.folder)
    assert [tensor.name for tensor in config.input] == [name]
    assert config.max_batch_size == 8


def test_an_engine_of_no_plain_name_needs_another(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--name '\.': a model's name is of letters, digits"):
        triton.export(engine(tmp_path, name="..engine"), tmp_path / "r")
    assert triton.export(engine(tmp_path, name="..engine"), tmp_path / "r", name="m").folder.name == "m"


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".hidden", "a b", "$(touch x)", "-x", "a\nb"])
def test_names_of_models_are_plain(name: str, tmp_path: Path) -> None:
    path = engine(tmp_path)
    with pytest.raises(BadInput, match=r"--name .*: a model's name is of letters, digits"):
        triton.export(path, tmp_path / "r", name=name)
    assert not (tmp_path / "r").exists()


def test_the_plugin_library_comes_along(tmp_path: Path) -> None:
    library = b"\x7fELF library"
    use = PluginUse("m.engine.plugins.so", hashlib.sha256(library).hexdigest(), False, ("BiasGelu",))
    path = engine(tmp_path, plugins=use)
    with pytest.raises(BadInput, match=r"plugin library .*m\.engine\.plugins\.so: no such file"):
        triton.export(path, tmp_path / "r")
    (tmp_path / "m.engine.plugins.so").write_bytes(library + b"changed")
    with pytest.raises(BadInput, match="not the one that the engine was built with"):
        triton.export(path, tmp_path / "r")
    assert not list((tmp_path / "r").iterdir())
    (tmp_path / "m.engine.plugins.so").write_bytes(library)
    done = triton.export(path, tmp_path / "r")
    copied = done.folder / "1" / "plugins.so"
    assert copied.read_bytes() == library
    assert done.option == f"--backend-config=tensorrt,plugins={copied}"


def test_what_is_refused(tmp_path: Path) -> None:
    path = engine(tmp_path)
    triton.export(path, tmp_path / "r")
    with pytest.raises(BadInput, match="the folder is not empty"):
        triton.export(path, tmp_path / "r")
    path.write_bytes(b"another engine")
    with pytest.raises(BadInput, match=r"was written for another engine, .*; build it again$"):
        triton.export(path, tmp_path / "r2")
    manifests.path_of(path).unlink()
    with pytest.raises(BadInput, match=r"no manifest m\.engine\.json says what its inputs are"):
        triton.export(path, tmp_path / "r2")
    with pytest.raises(BadInput, match="no such file"):
        triton.export(tmp_path / "absent.engine", tmp_path / "r2")
    odd = engine(tmp_path, "odd.engine", outputs=(Tensor("y", "float8_e4m3fn", (-1, 3)),))
    with pytest.raises(BadInput, match="output y is float8_e4m3fn, which Triton does not have"):
        triton.export(odd, tmp_path / "r2")


def test_the_command(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    use = PluginUse(None, "0" * 64, True, ("BiasGelu",))
    engine(tmp_path, plugins=use)
    done = run_cli("export", "triton", "m.engine", "r", "--name", "net", "--no-batching")
    assert done.returncode == 0, done.stderr
    assert "r/net: config.pbtxt and 1/model.plan, no batching" in done.stdout
    assert "note: requests are not batched: as asked" in done.stdout
    assert f"tritonserver --model-repository={tmp_path}/r --backend-config=tensorrt,version-compatible=true" in done.stdout
    again = run_cli("export", "triton", "m.engine", "r", "--name", "net")
    assert again.returncode == 2
    assert again.stderr.startswith("error: cannot write r/net: the folder is not empty")
    shutil.rmtree(tmp_path / "r")


def test_a_manifest_keeps_what_it_says(tmp_path: Path) -> None:
    path = engine(tmp_path, compatible="ampere+", model_path="../m.onnx")
    back = Manifest.from_json(manifests.path_of(path).read_text())
    assert (back.compatible, back.model_path) == ("ampere+", "../m.onnx")
