"""Calls the library's launchers on raw memory, and what their results have to be.

The memory is a GPU's (torch or cupy) or, with the emulated library, the host's: what is checked is the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Launcher's code, numpy type, unit roundoff (half the distance from 1 to the next number), smallest subnormal.
DTYPES = {
    "float32": (0, np.dtype(np.float32), 2.0**-24, 2.0**-149),
    "float16": (1, np.dtype(np.float16), 2.0**-11, 2.0**-24),
    "bfloat16": (2, np.dtype(ml_dtypes.bfloat16), 2.0**-8, 2.0**-133),
}
GELU_KINDS = {"none": 0, "tanh": 1, "quick": 2}
# Largest error of a 16-bit type over all its values, in units of the last place; 0.5 is that of rounding.
GELU_ERRORS = {"none": 0.56, "tanh": 0.51, "quick": 0.51}
SUCCESS, INVALID_VALUE, MISALIGNED_ADDRESS = 0, 1, 716  # cudaError_t

# Arithmetic is float32. Its error is a few roundings of the quantities that enter; this many.
FLOAT32 = 2.0**-24
ROUNDINGS = 16

GUARD = 64  # bytes before and after a tensor that must stay as they are
POISON = 0xFF  # all bits set is NaN in every type


@dataclass(frozen=True)
class Memory:
    """Where tensors lie: `allocate` bytes, `write` them, know their `address`, and `read` them back."""

    allocate: Callable[[int], Any]
    write: Callable[[Any, Array], object]
    address: Callable[[Any], int]
    read: Callable[[Any], Array]
    synchronize: Callable[[], object]


HOST = Memory(
    allocate=lambda size: np.empty(size, np.uint8),
    write=np.copyto,
    address=lambda array: int(array.ctypes.data),
    read=lambda array: array,
    synchronize=lambda: None,
)


def gpu_memory() -> Memory:
    """The GPU's memory through torch or cupy; ImportError or RuntimeError, with the reason, where neither reaches a GPU."""
    try:
        import torch
    except ImportError:
        import cupy

        return Memory(
            allocate=lambda size: cupy.empty(size, cupy.uint8),
            write=lambda held, array: held.set(array),
            address=lambda held: int(held.data.ptr),
            read=cupy.asnumpy,
            synchronize=cupy.cuda.Device().synchronize,
        )
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    return Memory(
        allocate=lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
        write=lambda held, array: held.copy_(torch.from_numpy(array)),
        address=lambda held: int(held.data_ptr()),
        read=lambda held: held.cpu().numpy(),
        synchronize=torch.cuda.synchronize,
    )


class Tensor:
    """An array in `memory` between guard bytes, `offset` bytes behind a multiple of 16."""

    def __init__(self, memory: Memory, value: Array, offset: int = 0) -> None:
        self._memory = memory
        self._shape, self._dtype = value.shape, value.dtype
        room = np.full(value.nbytes + 2 * GUARD + 32, POISON, np.uint8)
        self._held = memory.allocate(room.nbytes)
        self._start = GUARD - (memory.address(self._held) + GUARD) % -16 + offset
        room[self._start : self._start + value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
        memory.write(self._held, room)

    @classmethod
    def poisoned(cls, memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> Tensor:
        """A tensor of NaNs: what a kernel leaves out shows."""
        bits = np.full((*shape, dtype.itemsize), POISON, np.uint8)
        return cls(memory, bits.view(dtype).reshape(shape), offset)

    @property
    def address(self) -> int:
        return self._memory.address(self._held) + self._start

    def read(self) -> Array:
        """The value; asserts that nothing around it was written."""
        raw = self._memory.read(self._held)
        size = int(np.prod(self._shape)) * self._dtype.itemsize
        end = self._start + size
        assert (raw[: self._start] == POISON).all(), "bytes before the tensor were written"
        assert (raw[end:] == POISON).all(), "bytes behind the tensor were written"
        return np.frombuffer(raw[self._start : end].tobytes(), self._dtype).reshape(self._shape)


class Launchers:
    """The C launchers of a library, by ctypes."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        p, i, i64, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
        self.skip_layernorm = library.onnxfuse_launch_skip_layernorm
        self.skip_layernorm.argtypes = [i, p, p, p, p, p, p, p, i64, i64, f, i, p]
        self.skip_rmsnorm = library.onnxfuse_launch_skip_rmsnorm
        self.skip_rmsnorm.argtypes = [i, p, p, p, p, p, p, i64, i64, f, i, p]
        self.bias_gelu = library.onnxfuse_launch_bias_gelu
        self.bias_gelu.argtypes = [i, i, p, p, p, i64, i64, p]


@dataclass(frozen=True)
class NormCase:
    """One launch of a skip + norm kernel. `mean` is added to every value of the row."""

    rms: bool
    dtype: str
    rows: int
    width: int
    beta: bool = True
    bias: bool = True
    sum: bool = True
    offset: int = 0
    threads: int = 0
    mean: float = 0.0
    epsilon: float = 1e-5
    special: tuple[float, ...] = ()  # put into the first row, at its start


def _random(rng: np.random.Generator, rows: int, width: int, dtype: np.dtype[Any], mean: float = 0.0) -> Array:
    """[rows, width], rows repeated after 257: fresh numbers for millions of rows would take longer than the check."""
    base = (rng.standard_normal((min(rows, 257), width)) + mean).astype(dtype)
    return base if rows <= len(base) else base[np.arange(rows) % len(base)]


def _wide(array: Array) -> Array:
    with np.errstate(invalid="ignore"):  # ml_dtypes' NaN
        return array.astype(np.float64)


def check_norm(launchers: Launchers, memory: Memory, case: NormCase) -> None:
    """Launch, and compare with float64: every element of up to 64 rows, and of all rows that they were written."""
    code, dtype, _, _ = DTYPES[case.dtype]
    rng = np.random.default_rng(case.width * 31 + case.rows)
    shape = (case.rows, case.width)
    x = _random(rng, *shape, dtype, case.mean)
    skip = _random(rng, *shape, dtype)
    gamma, beta, bias = (_random(rng, 1, case.width, dtype)[0] for _ in range(3))
    if case.special and case.rows:
        x = x.copy()
        x[0, : len(case.special)] = np.array(case.special, dtype)
    given = {
        name: Tensor(memory, value, case.offset)
        for name, value in (("x", x), ("skip", skip), ("gamma", gamma), ("beta", beta), ("bias", bias))
    }
    output = Tensor.poisoned(memory, shape, dtype, case.offset)
    total = Tensor.poisoned(memory, shape, dtype, case.offset)
    optional = [given["bias"].address if case.bias else None, output.address, total.address if case.sum else None]
    first = [code, given["x"].address, given["skip"].address, given["gamma"].address]
    last = [case.rows, case.width, case.epsilon, case.threads, None]
    if case.rms:
        status = launchers.skip_rmsnorm(*first, *optional, *last)
    else:
        status = launchers.skip_layernorm(*first, given["beta"].address if case.beta else None, *optional, *last)
    assert status == SUCCESS, case
    memory.synchronize()
    got, got_sum = output.read(), total.read()
    for name, value in (("x", x), ("skip", skip), ("gamma", gamma)):
        assert given[name].read().tobytes() == value.tobytes(), f"{name} was changed"

    picked = np.unique(np.linspace(0, case.rows - 1, min(case.rows, 64)).astype(int)) if case.rows else np.array([], int)
    parts = [_wide(x[picked]), _wide(skip[picked])] + ([np.broadcast_to(_wide(bias), (len(picked), case.width))] if case.bias else [])
    want_sum = sum(parts, np.zeros((len(picked), case.width)))
    size = sum((np.abs(part) for part in parts), np.zeros((len(picked), case.width)))
    shift = _wide(beta) if case.beta and not case.rms else np.zeros(case.width)
    with np.errstate(all="ignore"):
        centred = want_sum if case.rms else want_sum - want_sum.mean(axis=1, keepdims=True)
        scale = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + np.float64(np.float32(case.epsilon)))
        want = centred * scale * _wide(gamma) + shift
        # What one rounding of the sum's largest value does to the result, and what one of the result does.
        entering = (size.max(axis=1, keepdims=True) * scale + np.abs(centred) * scale) * np.abs(_wide(gamma)) + np.abs(shift)
    _compare(got[picked], want, case.dtype, entering, case)
    if case.sum:
        _compare(got_sum[picked], want_sum, case.dtype, size, case)
    else:
        assert (np.frombuffer(got_sum.tobytes(), np.uint8) == POISON).all(), case
    if not case.special:
        assert not np.isnan(got).any(), f"{case}: an element was not written"


@dataclass(frozen=True)
class GeluCase:
    """One launch of the bias + GELU kernel."""

    kind: str
    dtype: str
    rows: int
    width: int
    offset: int = 0
    spread: float = 3.0
    special: tuple[float, ...] = ()


def gelu(kind: str, z: Array) -> Array:
    """The three forms in float64."""
    import math

    with np.errstate(all="ignore"):
        if kind == "none":
            return z / 2 * np.vectorize(math.erfc, otypes=[np.float64])(-z / math.sqrt(2))
        if kind == "tanh":
            return z / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        return z / (1 + np.exp(-1.702 * z))


def check_gelu(launchers: Launchers, memory: Memory, case: GeluCase) -> None:
    """Launch, and compare with float64: every element of up to 16 rows, and of all rows that they were written."""
    code, dtype, _, _ = DTYPES[case.dtype]
    rng = np.random.default_rng(case.width * 31 + case.rows)
    x = (_random(rng, case.rows, case.width, np.dtype(np.float32)) * np.float32(case.spread)).astype(dtype)
    bias = _random(rng, 1, case.width, dtype)[0]
    if case.special and case.rows:
        x[0, : len(case.special)] = np.array(case.special, dtype)
    given = Tensor(memory, x, case.offset)
    weights = Tensor(memory, bias, case.offset)
    output = Tensor.poisoned(memory, x.shape, dtype, case.offset)
    status = launchers.bias_gelu(code, GELU_KINDS[case.kind], given.address, weights.address, output.address, case.rows, case.width, None)
    assert status == SUCCESS, case
    memory.synchronize()
    got = output.read()
    picked = np.unique(np.linspace(0, case.rows - 1, min(case.rows, 16)).astype(int)) if case.rows else np.array([], int)
    z = _wide(x[picked]) + _wide(bias)
    # The slope of every form is below 1.2, so a rounding of z moves the result by at most 1.2 of it.
    _compare(got[picked], gelu(case.kind, z), case.dtype, 1.2 * (np.abs(_wide(x[picked])) + np.abs(_wide(bias))) + np.abs(z), case)
    if not case.special:
        assert not np.isnan(got).any(), f"{case}: an element was not written"


def gelu_of_every_value(launchers: Launchers, memory: Memory, kind: str, dtype: str) -> float:
    """Launch on every value that a 16-bit type has, with a bias of zero; the largest error in units of the last place, where the result is
    above 1e-6 or the type is float16.

    AssertionError for NaN or infinity elsewhere than the formula in float64 has them, and for an absolute error above 2e-9 below.
    """
    code, storage, roundoff, tiny = DTYPES[dtype]
    x = np.arange(65536, dtype=np.uint16).view(storage).reshape(16, 4096)
    given, weights = Tensor(memory, x), Tensor(memory, np.zeros(4096, storage))
    output = Tensor.poisoned(memory, x.shape, storage)
    assert launchers.bias_gelu(code, GELU_KINDS[kind], given.address, weights.address, output.address, 16, 4096, None) == SUCCESS
    memory.synchronize()
    got, want = _wide(output.read()), gelu(kind, _wide(x))
    assert (np.isnan(got) == np.isnan(want)).all(), f"{kind} {dtype}: NaN elsewhere"
    infinite = np.isinf(want)
    assert (got[infinite] == want[infinite]).all(), f"{kind} {dtype}: infinity elsewhere"
    known = np.isfinite(want)
    error, size = np.abs(got[known] - want[known]), np.abs(want[known])
    small = (size < 1e-6) & (dtype == "bfloat16")
    assert error[small].max(initial=0.0) <= 2e-9, f"{kind} {dtype}: absolute error {error[small].max():.3g}"
    with np.errstate(divide="ignore"):
        last_place = np.maximum(4 * roundoff * np.exp2(np.floor(np.log2(size)) - 1), tiny)
    return float((error / last_place)[~small].max())


def _compare(got: Array, want: Array, dtype: str, entering: Array, case: object) -> None:
    """NaN and infinities in the same places; else one rounding to the type, and ROUNDINGS of float32 of what entered."""
    _, storage, roundoff, tiny = DTYPES[dtype]
    wide = _wide(got)
    with np.errstate(all="ignore"):
        expected = _wide(want.astype(np.float32).astype(storage))  # what the type makes of it: overflow is infinite
    assert (np.isnan(wide) == np.isnan(expected)).all(), f"{case}: NaN elsewhere"
    infinite = np.isinf(expected)
    assert (wide[infinite] == expected[infinite]).all(), f"{case}: infinity elsewhere"
    finite = np.isfinite(expected)
    entering = np.where(np.isfinite(entering), entering, 0)  # beside an infinity the result is exact: zero
    with np.errstate(all="ignore"):
        bound = roundoff * np.abs(want) * (1 + ROUNDINGS * FLOAT32) + ROUNDINGS * FLOAT32 * entering + tiny
    excess = np.abs(wide[finite] - want[finite]) / bound[finite]
    worst = float(excess.max(initial=0.0))
    assert worst <= 1.0, f"{case}: error {worst:.2f} times the bound"
