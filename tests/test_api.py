"""The three steps from Python do what the commands do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import onnxfuse
from onnxfuse.errors import BadInput, MissingHere
from tests.conftest import missing_for_gpu


@pytest.fixture
def model(tmp_path: Path) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy")
    gamma = helper.make_tensor("gamma", TensorProto.FLOAT, [8], np.linspace(0.5, 2, 8))
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["squared"]),
        helper.make_node("Add", ["x", "squared"], ["sum"], name="residual"),
        helper.make_node("LayerNormalization", ["sum", "gamma"], ["y"], name="norm"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], [gamma])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_optimize_writes_checks_and_explains(model: Path) -> None:
    result = onnxfuse.optimize(str(model), policy="all", gpu="h200")
    assert [(decision.site.fusion, decision.fused) for decision in result.decisions] == [("skip_layernorm", True)]
    assert result.agrees
    assert result.check is not None
    assert result.to_dict()["sites"][0]["decision"] == "fused"
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    before, after = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for path in (model, model.with_suffix(".fused.onnx"))
    )
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_compare_returns_the_report(model: Path, tmp_path: Path) -> None:
    onnxfuse.optimize(model, tmp_path / "fused.onnx", policy="all", check=False)
    report = onnxfuse.compare(model, tmp_path / "fused.onnx", dims={"n": 3})
    assert report["agrees"] is True
    wrong = onnx.load(model)
    wrong.graph.initializer[0].CopyFrom(helper.make_tensor("gamma", TensorProto.FLOAT, [8], np.linspace(0.5, 2.1, 8)))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    assert onnxfuse.compare(model, tmp_path / "wrong.onnx")["agrees"] is False


def test_faults_are_exceptions_of_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nothing\.onnx: no such file"):
        onnxfuse.optimize(tmp_path / "nothing.onnx")
    if missing_for_gpu() is not None:
        with pytest.raises(MissingHere, match="TensorRT"):
            onnxfuse.build_engine(model, shapes=["x:1x8..4x8..8x8"])
        with pytest.raises(MissingHere, match="--policy measure needs"):
            onnxfuse.optimize(model, policy="measure")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import onnxfuse, sys; print([name for name in ('numpy', 'onnx', 'onnxruntime', 'tensorrt') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_compare_hands_on_whether_engines_are_trusted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = []

    def load(path: Path, trust: bool = False) -> None:
        trusted.append(trust)
        raise BadInput(f"{path}: no engine")

    monkeypatch.setattr("onnxfuse.engine.run.Engine.load", load)
    (tmp_path / "m.engine").write_bytes(b"plan")
    for trust in (False, True):
        with pytest.raises(BadInput):
            onnxfuse.compare(model, tmp_path / "m.engine", trust=trust)
    assert trusted == [False, True]
