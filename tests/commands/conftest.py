"""Models and checks that the command tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

WIDTH = 64


def transformer_tail(dim: object = "batch") -> onnx.ModelProto:
    """Residual Add, LayerNormalization, MatMul + bias + GELU(erf): x, r [dim, 16, 64] -> y. Opset 17, weights 16 KB."""
    rng = np.random.default_rng(0)
    arrays = {
        "scale": rng.normal(1, 0.1, WIDTH),
        "shift": rng.normal(0, 0.1, WIDTH),
        "weight": rng.normal(0, 0.1, (WIDTH, WIDTH)),
        "bias": rng.normal(0, 0.1, WIDTH),
        "root2": np.sqrt(2.0),
        "one": np.array(1.0),
        "half": np.array(0.5),
    }
    weights = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in arrays.items()]
    nodes = [
        helper.make_node("Add", ["x", "r"], ["sum"], "residual"),
        helper.make_node("LayerNormalization", ["sum", "scale", "shift"], ["normed"], "norm", epsilon=1e-5),
        helper.make_node("MatMul", ["normed", "weight"], ["product"], "matmul"),
        helper.make_node("Add", ["product", "bias"], ["biased"], "add_bias"),
        helper.make_node("Div", ["biased", "root2"], ["scaled"], "div"),
        helper.make_node("Erf", ["scaled"], ["erf"], "erf"),
        helper.make_node("Add", ["erf", "one"], ["shifted"], "add_one"),
        helper.make_node("Mul", ["biased", "shifted"], ["doubled"], "mul"),
        helper.make_node("Mul", ["doubled", "half"], ["y"], "mul_half"),
    ]
    shape = [dim, 16, WIDTH]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "r")]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "tail", inputs, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """tmp_path/model.onnx: has a skip_layernorm site and a bias_gelu site."""
    path = tmp_path / "model.onnx"
    onnx.save(transformer_tail(), path)
    return path


@pytest.fixture
def refuses(tmp_path: Path, run_cli: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """Run a command that must refuse: one `error:` line on stderr with these words, this status, and no new file."""

    def check(*arguments: object, status: int, words: tuple[str, ...] = (), **settings: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        done = run_cli(*arguments, **settings)
        shown = f"$ onnxfuse {' '.join(map(str, arguments))}\nstatus {done.returncode}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr, shown
        assert done.returncode == status, shown
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(lines) == 1, shown
        assert lines[0].startswith("error: "), shown
        assert "internal fault" not in lines[0], shown
        for word in words:
            assert word.lower() in lines[0].lower(), f"{word!r} is not in: {lines[0]}"
        assert sorted(tmp_path.rglob("*")) == before, shown
        return lines[0]

    return check
