"""A fused file says where its nodes come from."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from onnxfuse import pipeline
from onnxfuse.graph import functions, origin, read, write
from tests.verify import plants


def origins(path: Path) -> dict[str, origin.Origin]:
    return {node.name: found for node in onnx.load(str(path)).graph.node if (found := origin.of(node)) is not None}


@pytest.mark.parametrize(
    ("precision", "gelu", "norm"), [("keep", "bias_gelu", "skip_layernorm"), ("fp16", "linear_epilogue", "linear_layernorm")]
)
def test_every_site_of_the_report_is_in_the_file(tmp_path: Path, precision: str, gelu: str, norm: str) -> None:
    onnx.save(plants.encoder(1), tmp_path / "m.onnx")
    done = pipeline.optimize(tmp_path / "m.onnx", tmp_path / "f.onnx", policy="all", precision=precision, skip=("attention",), check=False)
    found = origins(tmp_path / "f.onnx")
    fused = {decision.node: decision.site for decision in done.decisions if decision.fused}
    taken = {name for name in fused if name not in found}  # by a fusion that came later
    assert {name: found[name].fusion for name in found if name in fused} == {
        name: site.fusion for name, site in fused.items() if name not in taken
    }
    assert {norm, gelu, "qkv_pack"} <= {o.fusion for o in found.values()}
    source = {node.name for node in onnx.load(str(tmp_path / "m.onnx")).graph.node}
    assert all(set(o.nodes) <= source for o in found.values())
    assert found[gelu].via == ("gelu",)
    assert found["qkv_split"] == found["qkv_pack"]
    onnx.checker.check_model(str(tmp_path / "f.onnx"), full_check=True)


def test_it_outlives_another_pass_and_goes_with_the_node(tmp_path: Path) -> None:
    original, fused = plants.fused(plants.encoder(1), tmp_path)
    before = origins(fused)
    loaded = read.load(fused)
    write.save(loaded, tmp_path / "again.onnx")
    assert origins(tmp_path / "again.onnx") == before
    functions.undo(loaded)
    write.save(loaded, tmp_path / "undone.onnx")
    left = origins(tmp_path / "undone.onnx")
    assert {name: before[name] for name in left} == left
    assert not {"skip_layernorm", "bias_gelu"} & set(left)
    assert not origins(original)


def test_other_peoples_metadata_stays_and_is_none_of_ours(tmp_path: Path) -> None:
    model = plants.gated()
    plants.node(model, "gating").metadata_props.add(key="exporter", value="x")
    hostile = plants.node(model, "last")
    hostile.metadata_props.add(key=origin.FUSION, value="silu")
    hostile.metadata_props.add(key=origin.NODES, value="[[[" * 1000)
    onnx.save(model, tmp_path / "m.onnx")
    pipeline.optimize(tmp_path / "m.onnx", tmp_path / "f.onnx", policy="all", check=False)
    written = {node.name: node for node in onnx.load(str(tmp_path / "f.onnx")).graph.node}
    assert [(entry.key, entry.value) for entry in written["gating"].metadata_props] == [("exporter", "x")]
    assert origin.of(written["gating"]) is None
    assert origin.of(written["last"]) == origin.Origin("silu", "", ())
    assert json.loads(next(e.value for e in written["silu"].metadata_props if e.key == origin.NODES))
