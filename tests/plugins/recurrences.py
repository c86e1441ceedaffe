"""Calls the launcher of recurrences on raw memory, and what its results have to be: ONNX's LSTM and GRU in float64.

As kernels.py, on a GPU's memory or, with the emulated library, on the host's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.recurrence_cases import Problem

Array = npt.NDArray[Any]
LSTM, GRU, GRU_RESET_FIRST = 0, 1, 2
AUTOMATIC, STEPS, GRID, INDEPENDENT, CLUSTER, RESIDENT = range(6)
NOT_SUPPORTED = 801


class Launcher:
    """The launcher of a library, by ctypes."""

    def __init__(self, path: Path) -> None:
        self.library = library = ctypes.CDLL(str(path))
        self._workspace = library.onnxfuse_recurrence_workspace
        self._workspace.restype = ctypes.c_size_t
        self._most = library.onnxfuse_recurrence_workspace_up_to
        self._most.restype = ctypes.c_size_t
        self._variant = library.onnxfuse_recurrence_variant
        self._launch = library.onnxfuse_launch_recurrence
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def workspace(self, problem: Problem) -> int:
        return int(self._workspace(ctypes.byref(problem)))

    def workspace_up_to(self, problem: Problem) -> int:
        return int(self._most(ctypes.byref(problem)))

    def variant(self, problem: Problem) -> int:
        return int(self._variant(ctypes.byref(problem)))

    def launch(self, problem: Problem, workspace: int | None, size: int) -> int:
        return int(self._launch(ctypes.byref(problem), workspace, size, None))


@dataclass(frozen=True)
class Case:
    """One launch. `reversed`: bit d says that direction d runs backwards. `trained`: how large weights are against 1 / sqrt(hidden)."""

    cell: int = LSTM
    dtype: str = "float16"
    steps: int = 5
    batch: int = 1
    width: int = 24
    hidden: int = 64
    directions: int = 1
    reversed: int = 0
    layers: int = 1
    bias: bool = True
    states: bool = False
    lengths: bool = False
    clip: float = 0.0
    batch_first: bool = False
    last: bool = True
    variant: int = AUTOMATIC
    rows: int = 0
    cluster: int = 0
    wavefront: int = 0
    trained: float = 1.0


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def reference(case: Case, x: Array, weights: tuple[Array | None, ...], lengths: Array | None) -> tuple[Array, Array, Array]:
    """One layer in float64. x [steps, batch, width]; weights W, R, B, h0, c0 as ONNX has them. Y, Y_h, Y_c."""
    w, r, b, h0, c0 = (None if given is None else np.asarray(given, np.float64) for given in weights)
    assert w is not None
    assert r is not None
    steps, batch, _ = x.shape
    directions, rows, hidden = r.shape
    ends = np.full(batch, steps) if lengths is None else np.clip(lengths, 0, steps)
    y = np.zeros((steps, directions, batch, hidden))
    last_h, last_c = np.zeros((2, directions, batch, hidden))

    def limited(sums: Array) -> Array:
        return np.clip(sums, -case.clip, case.clip) if case.clip else sums

    for d in range(directions):
        backwards = case.reversed >> d & 1
        h = np.zeros((batch, hidden)) if h0 is None else h0[d].copy()
        c = np.zeros((batch, hidden)) if c0 is None else c0[d].copy()
        bias = np.zeros(2 * rows) if b is None else b[d]
        inputs = x @ w[d].T + bias[:rows]
        recurrent, recurrent_bias = np.ascontiguousarray(r[d].T), bias[rows:]
        for s in range(steps):
            time = np.where(s < ends, ends - 1 - s, s) if backwards else np.full(batch, s)
            given = inputs[time, np.arange(batch)]
            if case.cell == LSTM:
                i, o, f, g = np.split(given + h @ recurrent + recurrent_bias, 4, axis=1)
                new_c = sigmoid(limited(f)) * c + sigmoid(limited(i)) * np.tanh(limited(g))
                new_h = sigmoid(limited(o)) * np.tanh(new_c)
            else:
                gates = given[:, : 2 * hidden] + h @ recurrent[:, : 2 * hidden] + recurrent_bias[: 2 * hidden]
                z, reset = (sigmoid(limited(gate)) for gate in np.split(gates, 2, axis=1))
                part = recurrent[:, 2 * hidden :]
                if case.cell == GRU:
                    inner = reset * (h @ part + recurrent_bias[2 * hidden :])
                else:
                    inner = (reset * h) @ part + recurrent_bias[2 * hidden :]
                new_h, new_c = (1 - z) * np.tanh(limited(given[:, 2 * hidden :] + inner)) + z * h, c
            live = (s < ends)[:, None]
            y[time, d, np.arange(batch)] = np.where(live, new_h, 0)
            h, c = np.where(live, new_h, h), np.where(live, new_c, c)
        last_h[d], last_c[d] = h, c
    return y, last_h, last_c


# Largest relative error (2-norm) of an output. float32 stands for summation in another order; in half types h is rounded at every step.
LIMITS = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}


def check(launcher: Launcher, memory: Any, case: Case, kernels: Any) -> None:
    """Launch, and compare every output with float64. `kernels` is the module kernels.py."""
    code, dtype, _, _ = kernels.DTYPES[case.dtype]
    rng = np.random.default_rng(case.hidden * 1000 + case.steps * 10 + case.batch)
    gates = 4 if case.cell == LSTM else 3
    size = case.trained / np.sqrt(case.hidden)
    shape = (case.directions, case.batch, case.hidden)
    kept: list[Any] = []

    def put(value: Array) -> int:
        kept.append(kernels.Tensor(memory, value))
        return int(kept[-1].address)

    def uniform(*extents: int, limit: float = size) -> Array:
        return rng.uniform(-limit, limit, extents).astype(dtype)

    problem = Problem(
        dtype=code,
        cell=case.cell,
        directions=case.directions,
        reversed=case.reversed,
        layers=case.layers,
        steps=case.steps,
        batch=case.batch,
        width=case.width,
        hidden=case.hidden,
        clip=case.clip,
        variant=case.variant,
        rows=case.rows,
        cluster=case.cluster,
        wavefront=case.wavefront,
        state_direction=case.batch * case.hidden,
        state_row=case.hidden,
    )
    x = rng.standard_normal((case.steps, case.batch, case.width)).astype(dtype)
    outputs: dict[str, Any] = {}
    if case.batch_first:
        problem.x = put(np.ascontiguousarray(x.transpose(1, 0, 2)))
        problem.x_step, problem.x_row = case.width, case.steps * case.width
        problem.y_step, problem.y_direction = case.directions * case.hidden, case.hidden
        problem.y_row = case.steps * case.directions * case.hidden
        outputs["y"] = kernels.Tensor.poisoned(memory, (case.batch, case.steps, case.directions, case.hidden), dtype)
    else:
        problem.x = put(x)
        problem.x_step, problem.x_row = case.batch * case.width, case.width
        problem.y_row, problem.y_direction = case.hidden, case.batch * case.hidden
        problem.y_step = case.directions * problem.y_direction
        outputs["y"] = kernels.Tensor.poisoned(memory, (case.steps, *shape), dtype)
    problem.y = outputs["y"].address
    lengths = None
    if case.lengths:
        lengths = rng.integers(0, case.steps + 1, case.batch).astype(np.int32)
        lengths[0] = max(case.steps - 1, 0)
        problem.lengths = put(lengths)

    want: dict[str, Array] = {}
    given = x.astype(np.float64)
    for number in range(case.layers):
        width = case.width if number == 0 else case.directions * case.hidden
        w = uniform(case.directions, gates * case.hidden, width)
        r = uniform(case.directions, gates * case.hidden, case.hidden)
        b = uniform(case.directions, 2 * gates * case.hidden) if case.bias else None
        h0 = uniform(*shape, limit=1.0) if case.states else None
        c0 = uniform(*shape, limit=1.5) if case.states and case.cell == LSTM else None
        layer = problem.layer[number]
        layer.input_weights, layer.weights = put(w), put(r)
        for name, value in (("bias", b), ("h0", h0), ("c0", c0)):
            if value is not None:
                setattr(layer, name, put(value))
        y, h, c = reference(case, given, (w, r, b, h0, c0), lengths)
        for name, value in (("h", h), ("c", c)):
            if case.last and (name == "h" or case.cell == LSTM):
                outputs[f"{name}{number}"] = kernels.Tensor.poisoned(memory, shape, dtype)
                want[f"{name}{number}"] = value
                setattr(layer, f"{name}_last", outputs[f"{name}{number}"].address)
        given = y.transpose(0, 2, 1, 3).reshape(case.steps, case.batch, case.directions * case.hidden)
    want["y"] = y.transpose(2, 0, 1, 3) if case.batch_first else y

    size_needed = launcher.workspace(problem)
    assert launcher.variant(problem) > 0, f"{case}: refused with {launcher.variant(problem)}"
    assert launcher.workspace_up_to(problem) >= size_needed
    room = memory.allocate(size_needed + 512)
    memory.write(room, np.full(size_needed + 512, kernels.POISON, np.uint8))  # nothing may count on what was there
    start = (memory.address(room) + 255) // 256 * 256
    results = []
    for _ in range(2):
        assert launcher.launch(problem, start, size_needed) == kernels.SUCCESS, case
        memory.synchronize()
        results.append({name: tensor.read() for name, tensor in outputs.items()})
    after = np.array(memory.read(room))[start - memory.address(room) + size_needed :]
    assert (after == kernels.POISON).all(), f"{case}: bytes behind the workspace were written"
    for name, value in results[0].items():
        assert value.tobytes() == results[1][name].tobytes(), f"{case}: {name} is not the same the second time"
        got = value.astype(np.float64)
        assert np.isfinite(got).all(), f"{case}: {name} holds what is no number"
        scale = np.sqrt((want[name] ** 2).mean()) if want[name].size else 0.0
        error = np.sqrt(((got - want[name]) ** 2).mean()) if got.size else 0.0
        assert error <= LIMITS[case.dtype] * scale + 1e-9, f"{case}: {name} is off by {error / (scale or 1):.1e}"
        if scale:
            worst = np.abs(got - want[name]).max()
            assert worst <= 30 * LIMITS[case.dtype] * max(scale, 0.05), f"{case}: an element of {name} is off by {worst:.1e}"
