"""Cases of benchmarks/kernels.py: LSTM and GRU layers, from the recurrent cases of the suite to batches and widths that it has not.

Their limit is latency, not memory: a step waits for the one before. The share of a copy's bandwidth says nothing of them, microseconds do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernel_cases import CODES, Case, Shape

MOST_LAYERS = 8
LSTM, GRU = 0, 1  # GRU with linear_before_reset


class Layer(ctypes.Structure):
    """OnnxfuseRecurrentLayer of plugins/Recurrence/launch.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("input_weights", "weights", "bias", "h0", "c0", "h_last", "c_last")]


class Problem(ctypes.Structure):
    """OnnxfuseRecurrence of plugins/Recurrence/launch.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "cell", "directions", "reversed", "layers", "steps", "batch", "width", "hidden")),
        ("clip", ctypes.c_float),
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("x_step", "x_row")),
        ("lengths", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("y_step", "y_direction", "y_row", "state_direction", "state_row")),
        ("layer", Layer * MOST_LAYERS),
        *((name, ctypes.c_int32) for name in ("variant", "rows", "cluster", "wavefront", "serial")),
        ("fault", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Recurrence:
    """Layers of `hidden` units that take x of `width`, both directions where `directions` is 2."""

    cell: int
    layers: int
    hidden: int
    width: int
    steps: int
    batch: int
    directions: int = 1

    @property
    def name(self) -> str:
        return f"{('lstm', 'gru')[self.cell]} {self.layers} x {self.hidden}{' both ways' if self.directions == 2 else ''}"


RECURRENCES = (
    Recurrence(LSTM, 2, 512, 512, 100, 1),
    Recurrence(LSTM, 2, 512, 512, 100, 8),
    Recurrence(LSTM, 2, 512, 512, 100, 64),
    Recurrence(LSTM, 2, 128, 128, 60, 32, directions=2),
    Recurrence(LSTM, 1, 1024, 1024, 50, 1),
    Recurrence(LSTM, 1, 1024, 1024, 50, 8),
    Recurrence(LSTM, 1, 1024, 1024, 50, 64),
    Recurrence(LSTM, 1, 128, 128, 1, 1),  # a step at a time, as voice detection runs
    Recurrence(GRU, 1, 256, 256, 200, 1),
    Recurrence(GRU, 1, 256, 256, 200, 8),
    Recurrence(GRU, 1, 256, 256, 200, 64),
    Recurrence(GRU, 2, 64, 64, 100, 1, directions=2),
)


def recurrences(library: ctypes.CDLL, dtype: str, other_threads: bool) -> Iterator[Case]:
    """LSTM and GRU by the variant that the launcher chooses; x read, Y written."""
    for problem in RECURRENCES:
        yield recurrence(library, dtype, problem)


def recurrence(library: ctypes.CDLL, dtype: str, sizes: Recurrence) -> Case:
    import torch

    function, workspace_of = library.onnxfuse_launch_recurrence, library.onnxfuse_recurrence_workspace
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    workspace_of.argtypes, workspace_of.restype = [ctypes.c_void_p], ctypes.c_size_t
    steps, batch, hidden, directions = sizes.steps, sizes.batch, sizes.hidden, sizes.directions
    rows = hidden * (4 if sizes.cell == LSTM else 3)
    layers = [_weights(dtype, sizes, rows, sizes.width if number == 0 else directions * hidden) for number in range(sizes.layers)]
    problem = Problem(
        dtype=CODES[dtype][0],
        cell=sizes.cell,
        directions=directions,
        reversed=2 if directions == 2 else 0,
        layers=sizes.layers,
        steps=steps,
        batch=batch,
        width=sizes.width,
        hidden=hidden,
        x_step=batch * sizes.width,
        x_row=sizes.width,
        y_step=batch * directions * hidden,
        y_direction=hidden,
        y_row=directions * hidden,
        state_direction=batch * hidden,
        state_row=hidden,
    )
    for number, (w, r, b) in enumerate(layers):
        problem.layer[number] = Layer(w.data_ptr(), r.data_ptr(), b.data_ptr())
    room = torch.empty(int(workspace_of(ctypes.byref(problem))) + 256, dtype=torch.uint8, device="cuda")
    start = -(-room.data_ptr() // 256) * 256

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        problem.x, problem.y = read[0], written[0]
        return int(function(ctypes.byref(problem), start, room.numel() - (start - room.data_ptr()), stream))

    def reference(read: Sequence[Any]) -> list[Any]:
        y = read[0].view(steps, batch, sizes.width)
        for layer in layers:
            y = torch.cat([_direction(sizes.cell, y, *(part[d].float() for part in layer), d == 1) for d in range(directions)], dim=2)
        return [y]

    shape = Shape(steps * batch, hidden, f"{steps} steps, batch {batch}", "middle")
    return Case(sizes.name, dtype, shape, (steps * batch * sizes.width,), (steps * batch * directions * hidden,), launch, reference)


def _weights(dtype: str, sizes: Recurrence, rows: int, width: int) -> tuple[Any, Any, Any]:
    """W, R and B as ONNX has them, and as large as a new module has them."""
    import torch

    def uniform(*shape: int) -> Any:
        return ((2 * torch.rand(shape, device="cuda") - 1) / sizes.hidden**0.5).to(getattr(torch, dtype))

    d = sizes.directions
    return uniform(d, rows, width), uniform(d, rows, sizes.hidden), uniform(d, 2 * rows)


def _direction(cell: int, x: Any, w: Any, r: Any, b: Any, backwards: bool) -> Any:
    """One direction of one layer in torch, [steps, batch, hidden]; gates in ONNX's order."""
    import torch

    rows, hidden = r.shape
    inputs = x @ w.T + b[:rows]
    h = c = torch.zeros(x.shape[1], hidden, device=x.device)
    y = torch.empty(*x.shape[:2], hidden, device=x.device)
    for step in range(x.shape[0])[:: -1 if backwards else 1]:
        sums = h @ r.T + b[rows:]
        if cell == LSTM:
            i, o, f, g = (inputs[step] + sums).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (xz, xr, xn), (hz, hr, hn) = inputs[step].chunk(3, dim=1), sums.chunk(3, dim=1)
            z, n = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
            h = n + z * (h - n)
        y[step] = h
    return y
