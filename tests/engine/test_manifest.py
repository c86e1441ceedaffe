"""The manifest, and the layer table of TensorRT's inspector."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from onnxfuse.engine import manifest as manifests
from onnxfuse.engine.manifest import Layer, Manifest, PluginUse, Tensor
from onnxfuse.errors import BadInput
from tests.engine import models

# As TensorRT 10.6 writes it, shortened: one layer of the automatic fusion, one plugin, one reformat.
TABLE = [
    {
        "Name": "__myl_CastMul_0",
        "LayerType": "kgen",
        "Inputs": [{"Name": "a", "Dimensions": [1, 4], "Format/Datatype": "Half"}],
        "Outputs": [{"Name": "b", "Dimensions": [1, 4], "Format/Datatype": "Float"}],
        "TacticName": "__myl_CastMul_0x3f",
        "StreamId": 0,
        "Metadata": "[ONNX Layer: /enc/Mul]\x1e[ONNX Layer: /enc/Cast]\x1e[ONNX Layer: /enc/Mul]",
    },
    {
        "Name": "norm_0",
        "LayerType": "PluginV3",
        "Inputs": [{"Name": "b", "Format/Datatype": "Row major linear FP16 format"}],
        "Outputs": [{"Name": "c", "Format/Datatype": "BFloat16"}],
        "PluginType": "SkipLayerNormalization",
        "Metadata": "[ONNX Layer: norm_0]",
    },
    {"Name": "Reformatting CopyNode", "LayerType": "Reformat", "Inputs": [], "Outputs": [{"Datatype": "Int64", "Format": "Linear"}]},
    {"Name": "only a name"},
]


def example() -> Manifest:
    return Manifest(
        model="m.onnx",
        model_sha256="a" * 64,
        engine_sha256="b" * 64,
        engine_bytes=12,
        plugins=PluginUse(None, "c" * 64, True, ("BiasGelu",)),
        tensorrt="10.6.0",
        driver="580.1",
        gpu="NVIDIA H200",
        sm=90,
        inputs=(Tensor("x", "float16", (-1, 4), (1, 4), (2, 4), (8, 4)), Tensor("k", "int64", ())),
        outputs=(Tensor("y", "float16", (-1, 4)),),
        strongly_typed=True,
        build_seconds=1.5,
        layers=manifests.layers_from(TABLE),
        warnings=("a warning",),
    )


def test_layers_of_the_inspector() -> None:
    first, plugin, reformat, bare = manifests.layers_from(TABLE)
    assert first == Layer("__myl_CastMul_0", "kgen", None, "__myl_CastMul_0x3f", ("fp16",), ("fp32",), ("/enc/Mul", "/enc/Cast"))
    assert (plugin.plugin, plugin.inputs, plugin.outputs, plugin.nodes) == (
        "SkipLayerNormalization",
        ("fp16",),
        ("bf16",),
        ("norm_0",),
    )
    assert reformat.outputs == ("int64",)
    assert bare == Layer("only a name", "", None, None, (), (), ())


def test_round_trip_and_summary() -> None:
    manifest = example()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert json.loads(manifest.to_json())["precisions"] == {"fp32": 1, "bf16": 1, "int64": 1}
    assert Manifest.from_json(replace(manifest, plugins=None).to_json()).plugins is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not an engine manifest"),
        ("[]", "not an engine manifest"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1}', "damaged engine manifest"),
    ],
)
def test_bad_manifests(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Manifest.from_json(text, "x.engine.json")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("engine_bytes",), float("inf"), "engine_bytes: inf"),
        (("sm",), "90", "sm: '90' is not of type 'integer'"),
        (("plugins",), [], "plugins: "),
        (("plugins", "file"), "../other.so", "no plain file name"),
        (("inputs",), "x", "inputs: 'x' is not of type 'array'"),
        (("inputs", 0), None, r"inputs\[0\]: None is not of type 'object'"),
        (("inputs", 0, "shape"), [1e400], r"inputs\[0\].shape\[0\]: inf"),
        (("inputs", 0, "max"), None, r"inputs\[0\].max: None is not of type 'array'"),
        (("layers", 0, "outputs"), [["fp16"]], r"layers\[0\].outputs\[0\]: "),
        (("engine_sha256",), "no\nhash", "engine_sha256: .* does not match"),
    ],
)
def test_a_manifest_from_elsewhere_may_hold_anything(path: tuple[str | int, ...], value: object, says: str) -> None:
    content = json.loads(example().to_json())
    *folders, last = path
    place = content
    for step in folders:
        place = place[step]
    place[last] = value
    with pytest.raises(BadInput, match=rf"x\.engine\.json: damaged engine manifest \(.*{says}") as fault:
        Manifest.from_json(json.dumps(content), "x.engine.json")
    assert "\n" not in str(fault.value)


def test_a_pipe_is_neither_engine_nor_manifest(tmp_path: Path) -> None:
    """Reading it would wait for ever."""
    engine = tmp_path / "m.engine"
    os.mkfifo(engine)
    os.mkfifo(manifests.path_of(engine))
    with pytest.raises(BadInput, match=r"m\.engine: is not an ordinary file; name an engine"):
        manifests.content(engine, "name an engine")
    with pytest.raises(BadInput, match=r"m\.engine\.json: cannot be read: is not an ordinary file"):
        manifests.load(engine)
    with pytest.raises(BadInput, match="is a directory"):
        manifests.content(tmp_path, "name an engine")


def test_what_changed() -> None:
    manifest = example()
    same = {"gpu": "NVIDIA H200", "sm": 90, "tensorrt": "10.6.0", "driver": "580.1"}
    assert manifests.changes(manifest, **same) == ()
    assert manifests.changes(manifest, **{**same, "driver": "590.2"}) == (
        "driver: built with 580.1, here is 590.2; it runs, but measure again before you trust old figures",
    )


def test_the_digest_covers_external_data(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save_model(models.block(), str(path), save_as_external_data=True, location="m.bin", size_threshold=0)
    before = manifests.model_digest(path)
    data = bytearray((tmp_path / "m.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "m.bin").write_bytes(data)
    assert manifests.model_digest(path) != before
    (tmp_path / "m.bin").unlink()
    with pytest.raises(BadInput, match=r"m\.bin"):
        manifests.model_digest(path)


def test_generated_kernels_and_where_they_were_cut() -> None:
    cut = "80 registers are not enough: cut behind Add"
    entry = {"form": "Exp-Div", "name": "abc", "cuts": [cut], "faults": ["few warps"], "kernels": [{"sm": 90}]}
    written = replace(example(), generated=(entry,))
    again = Manifest.from_json(written.to_json())
    assert again.generated == (entry,)
    assert again.notes == (
        "generated kernel Exp-Div: 80 registers are not enough: cut behind Add",
        "generated kernel Exp-Div: few warps, and no cut makes it better",
    )
    assert example().notes == ()
