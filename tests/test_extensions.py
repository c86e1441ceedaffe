"""Fusions and plugins from outside the package: examples/extension, and extensions that cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.conftest import ROOT, with_path

EXAMPLE = ROOT / "examples" / "extension"


def site(folder: Path, name: str, value: str) -> Path:
    """A folder that is to Python an installed distribution with one entry point."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[onnxfuse.extensions]\n{name} = {value}\n")
    return folder


def onnxfuse(*arguments: object, path: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = with_path(*path, ROOT)
    command = [sys.executable, "-m", "onnxfuse", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


@pytest.fixture
def path(tmp_path: Path) -> list[Path]:
    return [site(tmp_path / "site", "onnxfuse_relu_squared", "onnxfuse_relu_squared:EXTENSION"), EXAMPLE]


def saved(folder: Path, square: str) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy")
    nodes = [helper.make_node("Relu", ["x"], ["r"])]
    two = [helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])]
    nodes.append(helper.make_node("Mul", ["r", "r"], ["y"]) if square == "Mul" else helper.make_node("Pow", ["r", "two"], ["y"]))
    graph = helper.make_graph(nodes, "g", [x], [y], two if square == "Pow" else [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("square", ["Mul", "Pow"])
def test_the_example_fuses_and_the_file_runs_without_it(tmp_path: Path, path: list[Path], square: str) -> None:
    model = saved(tmp_path, square)
    done = onnxfuse("optimize", model, "-o", tmp_path / "fused.onnx", "--policy", "all", path=path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    fused = onnx.load(tmp_path / "fused.onnx")
    assert [(node.domain, node.op_type) for node in fused.graph.node] == [("onnxfuse", "ReluSquared")]
    x = np.array([[-2, -0.0, 0, 0.5, 3, np.inf, -np.inf, 1e-30]], np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "fused.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.maximum(x, 0) ** 2)
    undone = onnxfuse("optimize", tmp_path / "fused.onnx", "--undo", "-o", tmp_path / "again.onnx", path=[], cwd=tmp_path)
    assert undone.returncode == 0, undone.stderr


def test_its_plugin_is_compiled_into_the_library(tmp_path: Path, path: list[Path]) -> None:
    done = onnxfuse("plugins", "build", "--gpu", "sm_90", path=path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    inspected = onnxfuse("plugins", "inspect", "--gpu", "sm_90", "--json", path=path, cwd=tmp_path)
    assert "relu_squared<half, 8>" in inspected.stdout
    assert "ReluSquared" not in onnxfuse("plugins", "list", path=[], cwd=tmp_path).stdout
    assert "ReluSquared" in onnxfuse("plugins", "list", path=path, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nowhere_at_all", "extension 'broken' of broken: broken_module:EXTENSION cannot be loaded (ModuleNotFoundError"),
        ("EXTENSION = 3", "broken_module:EXTENSION is a int and no onnxfuse.extensions.Extension"),
        (
            "from pathlib import Path\nfrom onnxfuse.extensions import Extension\nEXTENSION = Extension(plugins=Path('nowhere'))",
            "there is no folder nowhere",
        ),
        (
            "from onnxfuse.extensions import Extension\nfrom onnxfuse.fusions.silu import FUSION\nEXTENSION = Extension(fusions=(FUSION,))",
            "extension fusion 'silu': there is a fusion of that name",
        ),
    ],
)
def test_an_extension_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, code: str, said: str) -> None:
    folder = site(tmp_path / "site", "broken", "broken_module:EXTENSION")
    (folder / "broken_module.py").write_text(code)
    done = onnxfuse("explain", saved(tmp_path, "Mul"), path=[folder], cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
