"""The recurrent kernels, clusters and grids that wait for each other among them, run thread by thread on the host against float64.

The emulator lets warps of different blocks run at random pace, ends a wait that lasts too long, and hands out shared memory full of NaN.
tests/gpu/test_recurrence.py checks the same on a GPU, and larger sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.plugins import kernels, recurrences

Case = recurrences.Case
LSTM, GRU, RESET_FIRST = recurrences.LSTM, recurrences.GRU, recurrences.GRU_RESET_FIRST
CELLS = pytest.mark.parametrize("cell", [LSTM, GRU], ids=["lstm", "gru"])
ALL = {"bias": True, "states": True, "lengths": True, "clip": 0.4, "batch_first": True, "directions": 2, "reversed": 2, "layers": 2}


@pytest.fixture(scope="module")
def launcher(emulated: Callable[[str], Path]) -> Any:
    return recurrences.Launcher(emulated("Recurrence"))


@pytest.fixture(autouse=True)
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_EMULATED_SMS", "64")


def check(launcher: Any, case: Any) -> None:
    recurrences.check(launcher, kernels.HOST, case, kernels)


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
@pytest.mark.parametrize("cell", [LSTM, GRU, RESET_FIRST])
def test_any_size_and_type(cell: int, dtype: str, launcher: Any) -> None:
    has_grid = dtype == "float32" or cell == RESET_FIRST
    for variant in (recurrences.STEPS, *([recurrences.GRID] if has_grid else [])):
        check(launcher, Case(cell, dtype, 3, 2, 20, 24, variant=variant))
        check(launcher, Case(cell, dtype, 2, 9, 16, 16, variant=variant, **ALL))
        check(launcher, Case(cell, dtype, 3, 1, 7, 40, reversed=1, bias=False, variant=variant))


@CELLS
@pytest.mark.parametrize(("hidden", "rows"), [(128, 2), (104, 4), (64, 1), (24, 8)])
def test_independent_blocks(hidden: int, rows: int, cell: int, launcher: Any) -> None:
    check(launcher, Case(cell, steps=4, batch=5, hidden=hidden, rows=rows, variant=recurrences.INDEPENDENT))
    check(launcher, Case(cell, "bfloat16", 5, 5, hidden=hidden, rows=rows, variant=recurrences.INDEPENDENT, **ALL))


@CELLS
@pytest.mark.parametrize("rows", [1, 8])
def test_clusters(rows: int, cell: int, launcher: Any) -> None:
    check(launcher, Case(cell, steps=4, batch=2, hidden=128, rows=rows, cluster=8, variant=recurrences.CLUSTER))
    check(launcher, Case(cell, steps=4, batch=3, hidden=16, rows=rows, cluster=8, variant=recurrences.CLUSTER))
    check(launcher, Case(cell, steps=3, batch=3, hidden=256, rows=rows, cluster=8, variant=recurrences.CLUSTER))
    check(launcher, Case(cell, "bfloat16", 5, 10 if rows == 8 else 2, hidden=72, rows=rows, cluster=8, variant=recurrences.CLUSTER, **ALL))


@CELLS
def test_clusters_of_sixteen(cell: int, launcher: Any) -> None:
    check(launcher, Case(cell, steps=3, hidden=512, variant=recurrences.CLUSTER))
    check(launcher, Case(cell, steps=2, batch=9, hidden=400, states=True, variant=recurrences.CLUSTER))


@CELLS
@pytest.mark.parametrize("batch", [1, 11])
def test_layers_as_a_wavefront(batch: int, cell: int, launcher: Any) -> None:
    check(launcher, Case(cell, steps=6, batch=batch, hidden=72, layers=2, cluster=8, variant=recurrences.CLUSTER))
    options = {"reversed": 1, "states": True, "lengths": True}
    check(launcher, Case(cell, steps=4, batch=batch, hidden=136, layers=3, cluster=8, variant=recurrences.CLUSTER, **options))


@CELLS
def test_weights_resident_and_h_in_global_memory(cell: int, launcher: Any) -> None:
    check(launcher, Case(cell, steps=4, hidden=24, variant=recurrences.RESIDENT))
    check(launcher, Case(cell, "bfloat16", 3, 19, hidden=72, variant=recurrences.RESIDENT, **ALL))
    check(launcher, Case(cell, steps=2, batch=2, hidden=264, reversed=1, variant=recurrences.RESIDENT))


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_steps(steps: int, launcher: Any) -> None:
    for variant in (recurrences.STEPS, recurrences.INDEPENDENT, recurrences.CLUSTER, recurrences.RESIDENT):
        check(launcher, Case(steps=steps, batch=2, states=True, layers=2, variant=variant, cluster=8))
    check(launcher, Case(RESET_FIRST, steps=steps, batch=2, states=True, layers=2, variant=recurrences.GRID))


def test_what_is_refused(launcher: Any) -> None:
    def answer(**fields: Any) -> int:
        values = {"dtype": 1, "directions": 1, "layers": 1, "steps": 3, "batch": 1, "width": 8, "hidden": 64, **fields}
        return -int(launcher.variant(recurrences.Problem(**values)))

    assert answer(hidden=60) == answer(directions=3) == answer(cell=3) == answer(layers=9) == kernels.INVALID_VALUE
    assert answer(variant=recurrences.INDEPENDENT, hidden=136) == recurrences.NOT_SUPPORTED
    assert answer(variant=recurrences.CLUSTER, hidden=520) == recurrences.NOT_SUPPORTED
    assert answer(variant=recurrences.CLUSTER, hidden=8, batch=2) == recurrences.NOT_SUPPORTED
    assert answer(variant=recurrences.GRID) == recurrences.NOT_SUPPORTED
    assert answer(variant=recurrences.CLUSTER, dtype=0) == recurrences.NOT_SUPPORTED
    assert answer(variant=recurrences.CLUSTER, cell=RESET_FIRST) == recurrences.NOT_SUPPORTED
    assert answer(variant=recurrences.RESIDENT, hidden=1032) == recurrences.NOT_SUPPORTED


@pytest.mark.parametrize("cell", [LSTM, GRU, RESET_FIRST])
def test_the_reference_is_onnxruntimes(cell: int) -> None:
    rng = np.random.default_rng(0)
    steps, batch, width, hidden, gates = 7, 4, 5, 8, 4 if cell == LSTM else 3
    for reversed_, directions in ((0, 1), (1, 1), (2, 2)):
        for clip in (0.0, 0.5):
            case = Case(cell, reversed=reversed_, clip=clip)
            shapes = {
                "x": (steps, batch, width),
                "w": (directions, gates * hidden, width),
                "r": (directions, gates * hidden, hidden),
                "b": (directions, 2 * gates * hidden),
                "h": (directions, batch, hidden),
                "c": (directions, batch, hidden),
            }
            feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            feeds["n"] = np.array([7, 3, 5, 1], np.int32)
            names = ["x", "w", "r", "b", "n", "h", *(["c"] if cell == LSTM else [])]
            direction = "bidirectional" if directions == 2 else ("forward", "reverse")[reversed_]
            attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction, **({"clip": clip} if clip else {})}
            if cell != LSTM:
                attrs["linear_before_reset"] = int(cell == GRU)
            outputs = ["y", "last_h", *(["last_c"] if cell == LSTM else [])]
            node = helper.make_node("LSTM" if cell == LSTM else "GRU", names, outputs, **attrs)
            given = [
                helper.make_tensor_value_info(name, TensorProto.INT32 if name == "n" else TensorProto.FLOAT, feeds[name].shape)
                for name in names
            ]
            made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
            graph = helper.make_graph([node], "g", given, made)
            model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
            session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            got = session.run(None, {name: feeds[name] for name in names})
            parts = (feeds["w"], feeds["r"], feeds["b"], feeds["h"], feeds["c"])
            want = recurrences.reference(case, feeds["x"].astype(np.float64), parts, feeds["n"])
            for one, other in zip(got, want, strict=False):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
