"""A kit of element-wise expressions: their machine code is inside, and where one was too big is said. No compiler is needed any more."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from onnxfuse import gpus, plugins
from onnxfuse.errors import MissingHere
from onnxfuse.kit import make
from tests.elementwise import cases
from tests.elementwise.gpu_kit import model_of

pytestmark = pytest.mark.nvcc

FAT_BINARY = (0xBA55ED50).to_bytes(4, "little")  # what the driver loads: machine code for one architecture or several


def test_machine_code_and_cuts(tmp_path: Path, require_external: Callable[[str], None]) -> None:
    big = cases.spilling()
    onnx.save(model_of([big, cases.film_silu("float16")], [(6, 16), (2, 4, 3, 8)]), tmp_path / "model.onnx")
    try:
        made = make.make(tmp_path / "model.onnx", tmp_path / "kit", gpu=gpus.resolve("h200"), shapes=[])
    except MissingHere as reason:
        require_external(str(reason))
        raise
    assert made.plugins == ("Elementwise",)
    about = json.loads((tmp_path / "kit" / "kit.json").read_text())
    (said,) = about["notes"]
    assert said.startswith(f"generated kernel {big.form}: ")
    assert "bytes are spilled (sm_90)" in said
    assert said.endswith("cut behind Min")
    model = onnx.load(tmp_path / "kit" / "fused.onnx")
    assert not model.functions
    assert [node.op_type for node in model.graph.node] == ["Elementwise"] * 3
    for node in model.graph.node:
        image = base64.b64decode(next(attribute.s for attribute in node.attribute if attribute.name == "code"))
        assert image[:4] == FAT_BINARY
    assert "Elementwise" not in {node.op_type for node in onnx.load(tmp_path / "kit" / "automatic.onnx").graph.node}
    assert plugins.LIBRARY in about["files"]
