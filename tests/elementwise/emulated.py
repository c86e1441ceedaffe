"""Generated kernels compiled for the host and run thread by thread, through the launcher's own plan: values on a machine without a GPU."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse import plugins
from onnxfuse.elementwise import source
from onnxfuse.elementwise.expression import NUMPY, Expression, output_types
from onnxfuse.elementwise.operators import NORMALISING

HERE = Path(__file__).parent
EMULATOR = HERE.parent / "plugins"
GUARD = 64  # bytes around every tensor that must stay as they are
POISON = 0xA5

Array = np.ndarray[Any, Any]

_RUN = """
extern "C" int run_{name}(char const* layout, int64_t const* shapes, void const* const* in, void* const* out, int sms, char* said)
{{
    return run(layout, shapes, in, out, sms, said, [](onnxfuse::Launch const& launch) {{
        Expression_{name}::Args args;
        if (launch.arguments.size() > sizeof args || launch.arguments.size() + 8 <= sizeof args)
            throw std::runtime_error("the arguments are of another size");
        std::memcpy(&args, launch.arguments.data(), launch.arguments.size());
        {calls}
        throw std::runtime_error("no kernel " + launch.kernel);
    }});
}}
"""
_CALL = """if (launch.kernel == "{kernel}")
        {{
            emulator::run({{dim3(launch.grid), dim3(launch.block_x, launch.block_y)}}, [&] {{ {kernel}(args); }});
            return;
        }}"""


class Kernels:
    """The kernels of many expressions in one host library."""

    def __init__(self, expressions: Sequence[Expression], nvcc: plugins.Nvcc, work: Path) -> None:
        different = {one.digest: one for one in expressions}
        text = [f'#include "{HERE / "emulated.h"}"\n', source.INCLUDE]
        for one in different.values():
            text.append(source.source(one, include=""))
            calls = "\n        ".join(_CALL.format(kernel=kernel) for kernel in source.kernel_names(one))
            text.append(_RUN.format(name=one.digest, calls=calls))
        (work / "kernels.cpp").write_text("\n".join(text))
        units = [work / "kernels.cpp", EMULATOR / "emulator.cpp", plugins.sources() / "Elementwise" / "layout.cpp"]
        flags = ["-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-fno-strict-aliasing", "-w", "-shared"]
        headers = [
            "-isystem",
            str(nvcc.path.parent.parent / "include"),
            "-I",
            str(plugins.sources()),
            "-include",
            str(EMULATOR / "emulator.h"),
        ]
        subprocess.run(["g++", *flags, *headers, *map(str, units), "-o", str(work / "kernels.so")], check=True)
        self._library = ctypes.CDLL(str(work / "kernels.so"))

    def run(self, given: Expression, inputs: Sequence[Array], *, offset: int = 0, sms: int = 2) -> list[Array]:
        """Outputs for these inputs. offset: bytes by which tensors lie behind a multiple of 16. sms: of the GPU that is played."""
        shapes = [np.shape(array) for array in inputs]
        held = [_Held(np.ascontiguousarray(array), offset) for array in inputs]
        full = full_shape(given, shapes)
        empty = [np.zeros(shape, NUMPY[kind]) for shape, kind in zip(output_shapes(given, full), output_types(given), strict=True)]
        made = [_Held(array, offset, poisoned=True) for array in empty]
        flat = [size for shape in shapes for size in shape]
        said = ctypes.create_string_buffer(500)
        status = getattr(self._library, f"run_{given.digest}")(
            source.layout(given).encode(),
            (ctypes.c_int64 * max(1, len(flat)))(*flat),
            (ctypes.c_void_p * len(held))(*(one.address for one in held)),
            (ctypes.c_void_p * len(made))(*(one.address for one in made)),
            sms,
            said,
        )
        if status:
            raise RuntimeError(said.value.decode())
        for one, array in zip(held, inputs, strict=True):
            assert one.read().tobytes() == np.ascontiguousarray(array).tobytes(), "an input was written"
        return [one.read() for one in made]


class _Held:
    """An array between guard bytes."""

    def __init__(self, array: Array, offset: int, poisoned: bool = False) -> None:
        self.shape, self.dtype, self.size = array.shape, array.dtype, array.nbytes
        self.room = np.full(array.nbytes + 2 * GUARD + 32, POISON, np.uint8)
        self.start = GUARD - (self.room.ctypes.data + GUARD) % -16 + offset
        if not poisoned:
            self.room[self.start : self.start + self.size] = np.frombuffer(array.tobytes(), np.uint8)

    @property
    def address(self) -> int:
        return int(self.room.ctypes.data) + self.start

    def read(self) -> Array:
        end = self.start + self.size
        assert (self.room[: self.start] == POISON).all(), "bytes before a tensor were written"
        assert (self.room[end:] == POISON).all(), "bytes behind a tensor were written"
        return np.frombuffer(self.room[self.start : end].tobytes(), self.dtype).reshape(self.shape)


def full_shape(given: Expression, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    full = [1] * given.rank
    for one, shape in zip(given.inputs, shapes, strict=True):
        for at, letter in enumerate(one.axes):
            if letter == "1":
                full[given.rank - len(one.axes) + at] = shape[at]
    return tuple(full)


def output_shapes(given: Expression, full: tuple[int, ...]) -> list[tuple[int, ...]]:
    end = given.reduction
    shapes = []
    for value in given.outputs:
        reduced = end is not None and value == given.row_output and end.op not in NORMALISING
        shapes.append((*full[:-1], 1) if reduced and end is not None and end.get("keepdims") else full[:-1] if reduced else full)
    return shapes


def input_shape(axes: str, full: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an input for a full shape."""
    own = full[len(full) - len(axes) :]
    return tuple(size if letter == "1" else 1 for size, letter in zip(own, axes, strict=True))


SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0, -3.0, 6.0, 88.0, -88.0, 1e-30, -1e-30, 6e4, -6e4)


def values(dtype: str, shape: tuple[int, ...], rng: np.random.Generator, special: bool = False, spread: float = 2.0) -> Array:
    """Numbers of a type: some special ones among them where they are asked for."""
    count = math.prod(shape)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in ("int32", "int64"):
        drawn = rng.integers(-9, 10, count)
        if special and count:
            info = np.iinfo(dtype)
            where = rng.integers(0, count, max(1, count // 6))
            drawn[where] = rng.choice([0, 1, -1, info.max, info.min, 7], where.size)
        return drawn.astype(dtype).reshape(shape)
    drawn = rng.standard_normal(count) * spread
    if special and count:
        where = rng.integers(0, count, max(1, count // 3))
        drawn[where] = rng.choice(SPECIAL, where.size)
    with np.errstate(over="ignore"):
        return drawn.astype(NUMPY[dtype]).reshape(shape)


def wide(array: Array) -> Array:
    """Floats in float64, everything else as it is."""
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype == np.dtype(ml_dtypes.bfloat16) else array
