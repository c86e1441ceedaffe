"""Faults in kernels, planted in a copy of their sources: bisect compiles it, builds engines with it, and names the sites.

One library holds both faults, each for rows of one width, so that it is compiled once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.conftest import with_path

ROOT = Path(__file__).resolve().parents[2]
PAST_A_ROW, INTERMITTENT = 72, 40  # widths
FAULTS = {
    # The loads begin one vector late, and so end in the next row.
    "add_rows<T>(args.input, args.skip, args.bias, first, vectors, x);": f"""
    add_rows<T>(args.input, args.skip, args.bias, first + (args.width == {PAST_A_ROW} ? 1 : 0), vectors, x);""",
    # In every other stretch of two milliseconds, the scale is wrong.
    "Normalizer const by = Statistics::of(x, inside, args.per_width, args.epsilon);": f"""
    Normalizer by = Statistics::of(x, inside, args.per_width, args.epsilon);
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    if (args.width == {INTERMITTENT} && (nanoseconds >> 21 & 1))
        by.scale *= 1.5f;""",
}


def model() -> onnx.ModelProto:
    """x [2, 4, 64] -> y: Add + LayerNormalization of widths 72, 40 and 64, and MatMul + bias + GELU of width 64."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(name: str, values: object) -> str:
        constants.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
        return name

    def op(kind: str, name: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def linear(name: str, x: str, rows: int, columns: int) -> str:
        return op("MatMul", name, x, constant(f"{name}_w", rng.normal(0, rows**-0.5, (rows, columns))))

    def norm(name: str, x: str, skip: str, width: int) -> str:
        scale, shift = (constant(f"{name}_{role}", rng.normal(mean, 0.1, width)) for role, mean in (("scale", 1), ("shift", 0)))
        return op("LayerNormalization", name, op("Add", f"{name}_sum", x, skip), scale, shift, epsilon=1e-5, axis=-1)

    a = norm("norm72", linear("a", "x", 64, 72), linear("b", "x", 64, 72), 72)
    b = norm("norm40", linear("c", a, 72, 40), linear("d", a, 72, 40), 40)
    biased = op("Add", "biased", linear("e", b, 40, 64), constant("bias", rng.normal(0, 0.5, 64)))
    shifted = op("Add", "shifted", op("Erf", "erf", op("Div", "scaled", biased, constant("root2", 2**0.5))), constant("one", 1.0))
    gelu = op("Mul", "gelu", op("Mul", "doubled", biased, shifted), constant("half", 0.5))
    norm("y", gelu, "x", 64)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4, 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "widths", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def sabotaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and faulty plugin sources beside it."""
    folder = tmp_path_factory.mktemp("sabotaged")
    for name in ("onnxfuse", "plugins"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "plugins" / "common" / "skip_norm.cuh"
    text = source.read_text()
    for right, wrong in FAULTS.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    source.write_text(text)
    return folder


def bisect(package: Path, folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    onnx.save(model(), folder / "model.onnx")
    done = subprocess.run(
        [sys.executable, "-m", "onnxfuse", "bisect", str(folder / "model.onnx"), "--tensorrt", "-o", str(folder / "found"), *arguments],
        cwd=package, env=with_path(package), capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    report = folder / "found" / "bisect.json"
    return done, json.loads(report.read_text()) if report.exists() else {}


def test_the_sound_kernels_agree(tmp_path: Path) -> None:
    done, _ = bisect(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agrees with all of its 4 sites on in 10 runs" in done.stdout


def test_a_kernel_that_reads_past_a_row_and_one_that_fails_at_times(sabotaged: Path, tmp_path: Path) -> None:
    done, report = bisect(sabotaged, tmp_path, "--repeats", "8")
    assert done.returncode == 1, done.stdout + done.stderr
    causes = report["causes"]
    assert isinstance(causes, list)
    found = {site["outputs"][0]: cause for cause in causes for site in cause["sites"]}
    assert set(found) == {f"norm{PAST_A_ROW}", f"norm{INTERMITTENT}"}
    assert {cause["kind"] for cause in causes} == {"site"}
    past, at_times = found[f"norm{PAST_A_ROW}"], found[f"norm{INTERMITTENT}"]
    assert past["flips"] == past["runs"]
    assert 0 < at_times["flips"] <= at_times["runs"]
    made = report["reproduction"]
    assert isinstance(made, dict)
    assert made["steps"] == 0
    assert Path(made["fused"]).exists()
