"""What to feed a model: arrays from files, or made up from the declared types so that the model can do something sensible with them.

Random numbers are poor inputs: an id beyond its table is an error, a mask of noise hides everything, and a picture of noise leaves
many detectors silent. So `generate` looks at what an input is called, what reads it, and its shape. Weights are never read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from onnxfuse.errors import BadInput
from onnxfuse.graph.names import shown
from onnxfuse.verify.skim import skeleton

if TYPE_CHECKING:
    import onnx

Feeds = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Guess:
    """Sizes for free dimensions by kind, each for the first, second and third feed (and so on in turns)."""

    batch: tuple[int, ...]
    sequence: tuple[int, ...]
    pixels: tuple[int, ...]
    other: tuple[int, ...]


# In the order in which to try them, where a model refuses sizes that it declares free: text and pictures, frames of sound and small
# pictures, a second of sound and large pictures.
GUESSES = (
    Guess((1, 3, 2), (32, 17, 48), (224, 256, 192), (16, 9, 24)),
    Guess((1, 3, 2), (512, 256, 384), (64, 48, 32), (64, 48, 80)),
    Guess((1, 3, 2), (16000, 8000, 24000), (640, 512, 320), (128, 96, 160)),
)
SAMPLING_RATE = 16000
UNKNOWN_IDS = 2  # exclusive bound of integers that no table bounds: in range for nearly everything

_MOST_ELEMENTS = 1 << 28  # of one input that is made up
_MOST_AXES = 64  # of numpy
_BATCH_NAMES = re.compile(r"batch|^(b|n|bs)$", re.I)
_SEQUENCE_NAMES = re.compile(r"seq|len|time|token|frame|^(s|t|l)$", re.I)
_PIXEL_NAMES = re.compile(r"height|width|^(h|w)$", re.I)
_SAMPLING_RATE_NAMES = re.compile(r"^(sr|fs|sample_?rate|sampling_?rate)$", re.I)
_LENGTH_NAMES = re.compile(r"lengths?$|lens?$", re.I)
_LEVEL_NAMES = re.compile(r"sigma|time_?step|noise_?level", re.I)  # positive knobs of diffusion models


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One input that a caller must feed. A dimension is a size, a symbol's name, or None."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str | None, ...] | None  # None: not even the rank is declared

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with these sizes of its free dimensions, by symbol or NAME[AXIS]; a scalar where no rank is declared."""
        return tuple(d if isinstance(d, int) else sizes[d or f"{self.name}[{axis}]"] for axis, d in enumerate(self.shape or ()))

    def __str__(self) -> str:
        dims = "any shape" if self.shape is None else ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"{_dtype_name(self.dtype)}[{dims}]"


def specs(model: Path | onnx.ModelProto, optional: bool = False) -> list[InputSpec]:
    """The inputs that must be fed, in order; with `optional` also those that have an initializer as default."""
    import onnx

    proto = model if isinstance(model, onnx.ModelProto) else skeleton(model)
    defaults = {t.name for t in proto.graph.initializer} | {s.values.name for s in proto.graph.sparse_initializer}
    return [spec_of(value) for value in proto.graph.input if optional or value.name not in defaults]


def symbols(model: Path | onnx.ModelProto) -> list[str]:
    """The names that `dims` of `generate` takes: symbols, and NAME[AXIS] for a dimension without one."""
    found: dict[str, None] = {}
    for spec in specs(model):
        for axis, dim in enumerate(spec.shape or ()):
            if not isinstance(dim, int):
                found[dim or f"{spec.name}[{axis}]"] = None
    return list(found)


def spec_of(value: onnx.ValueInfoProto) -> InputSpec:
    """Name, type and shape of one input or output. BadInput where it is no tensor."""
    import onnx

    if value.type.WhichOneof("value") != "tensor_type":
        kind = (value.type.WhichOneof("value") or "untyped_value").removesuffix("_type").replace("_", " ")
        raise BadInput(f"input {value.name!r} is a {kind}, and only tensors can be fed; make it inside the model or export without it")
    tensor = value.type.tensor_type
    if tensor.elem_type not in onnx.TensorProto.DataType.values() or not tensor.elem_type:
        raise BadInput(f"input {value.name!r} has no element type that is known ({tensor.elem_type}); export the model again")
    dtype = (
        np.dtype(np.str_)
        if tensor.elem_type == onnx.TensorProto.STRING
        else np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    )
    if not tensor.HasField("shape"):
        return InputSpec(value.name, dtype, None)
    # Some exporters name every unknown dimension "?", though they differ.
    named = (d.dim_param if d.dim_param.strip("?") else None for d in tensor.shape.dim)
    dims = (d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else n for d, n in zip(tensor.shape.dim, named, strict=True))
    return InputSpec(value.name, dtype, tuple(dims))


def _dtype_name(dtype: np.dtype) -> str:
    return "string" if dtype.kind in "US" else dtype.name


# ------------------------------------------------------------------------------------------------------- from files


class FromFiles(Sequence[Feeds]):
    """Feeds that lie in files, one each, and are read when they are asked for: a folder may hold more than the memory."""

    def __init__(self, files: Sequence[Path], read: Callable[[Path], Feeds]) -> None:
        self._files, self._read = files, read

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, index: int) -> Feeds: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Feeds]: ...
    def __getitem__(self, index: int | slice) -> Feeds | Sequence[Feeds]:
        if isinstance(index, slice):
            return FromFiles(self._files[index], self._read)
        return self._read(self._files[index])


def from_data(path: Path, model: Path) -> Sequence[Feeds]:
    """One feed for each .npz: of the file, or of the folder (those named inputs*.npz where there are any, in natural order).

    Arrays are named like the model's inputs; further arrays are ignored. Every file is looked at now, and read again when its feed is asked
    for. BadInput names the file, the input and the remedy: unreadable, pickled, missing, wrong dtype or shape.
    """
    wanted = specs(model, optional=True)
    required = {spec.name for spec in specs(model)}
    found = FromFiles(_files(Path(path)), lambda file: _checked(file, wanted, required))
    for _ in found:  # what is wrong with the last file is said before the first is used
        pass
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.npz"), key=lambda p: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", p.name)])
    found = [p for p in found if p.name.startswith("inputs")] or found
    if not found:
        raise BadInput(f"{path}: no .npz file in this folder; write one with numpy.savez(FILE, input_name=array, ...)")
    return found


def _checked(file: Path, wanted: Sequence[InputSpec], required: set[str]) -> Feeds:
    feeds = {}
    with opened(file, wanted[0].name if wanted else "x") as data:
        for spec in wanted:
            if spec.name in data.files:
                feeds[spec.name] = _fitting(data[spec.name], spec, file)
            elif spec.name in required:
                has = ", ".join(data.files[:8]) or "nothing"
                raise BadInput(f"{file}: input {spec.name!r} ({spec}) is missing (the file has {has}); add it with numpy.savez")
    return feeds


@contextlib.contextmanager
def opened(file: Path, example: str = "x") -> Iterator[Any]:
    """An .npz file, of plain arrays only. BadInput for what cannot be read, and for Python objects, which are never unpickled."""
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise BadInput(f"{file}: is not an ordinary file; give --data an .npz file or a folder of them")
    if file.is_file() and not zipfile.is_zipfile(file):  # numpy takes it for pickled data
        raise BadInput(f"{file}: not an .npz file; write one with numpy.savez(FILE, {example}=array)")
    try:
        with np.load(file, allow_pickle=False) as data:
            yield data
    except FileNotFoundError:
        raise BadInput(f"{file}: no such file; give --data an .npz file or a folder of them") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = "holds Python objects, which are not read" if "pickle" in str(error) else "cannot be read as .npz"
        raise BadInput(f"{file}: {why}; write it again with numpy.savez and plain arrays") from error


def _fitting(array: np.ndarray, spec: InputSpec, file: Path) -> np.ndarray:
    where = f"{file}: input {spec.name!r}"
    if spec.dtype.kind in "US":
        if array.dtype.kind not in "US":
            raise BadInput(f"{where} is {array.dtype.name} and the model takes string; convert it with .astype(str)")
    elif spec.dtype.kind == "V" and array.dtype.kind in "Vu" and array.dtype.itemsize == spec.dtype.itemsize:
        array = array.view(spec.dtype)  # .npz keeps the bits of bfloat16 and float8, but not their name
    elif array.dtype != spec.dtype:
        raise BadInput(f"{where} is {array.dtype.name} and the model takes {spec.dtype.name}; convert it with .astype({spec.dtype.name!r})")
    if spec.shape is not None:
        fits = len(spec.shape) == array.ndim and all(not isinstance(d, int) or d == n for d, n in zip(spec.shape, array.shape, strict=True))
        if not fits:
            raise BadInput(f"{where} has shape {list(array.shape)} and the model takes {spec}; reshape, pad or cut it")
    return array


# --------------------------------------------------------------------------------------------------------- made up


def generate(model: Path, seed: int = 0, count: int = 1, dims: Mapping[str, int] | None = None, guess: Guess = GUESSES[0]) -> list[Feeds]:
    """`count` feeds that suit the model, repeatable by `seed`. The first has batch 1; further ones have other values and free sizes.

    dims: sizes of symbolic dimensions by symbol, or NAME[AXIS] for a dimension without one; the others are guessed.
    BadInput: a dimension that the model does not have, a size below 0, an input that is no tensor.
    """
    proto = skeleton(Path(model))
    inputs = specs(proto)
    fixed = dict(dims or {})
    known = symbols(proto)
    for name, size in fixed.items():
        if name not in known:
            raise BadInput(f"{model}: no free dimension {name!r}; it has {', '.join(known) or 'none, all are fixed'}")
        if size < 0:
            raise BadInput(f"--dims {name}={size}: a size cannot be negative; give 0 or more")
    tables = _bounds(proto)
    return [_feed(inputs, tables, fixed, seed, index, guess) for index in range(count)]


def _feed(
    inputs: Sequence[InputSpec], tables: Mapping[str, _Table], fixed: Mapping[str, int], seed: int, index: int, guess: Guess
) -> Feeds:
    sizes = dict(fixed)
    for spec in inputs:
        for axis, dim in enumerate(spec.shape or ()):
            if not isinstance(dim, int):
                kind = _kind_of_size(spec, dim or "", axis, guess)
                sizes.setdefault(dim or f"{spec.name}[{axis}]", kind[index % len(kind)])
    shapes = {spec.name: spec.sized(sizes) for spec in inputs}
    for name, shape in shapes.items():
        if math.prod(shape) > _MOST_ELEMENTS or len(shape) > _MOST_AXES:
            large = shown(list(shape))
            raise BadInput(f"input {name!r} of shape {large} is too large to be made up; give smaller --dims, or inputs with --data")
    length = _sequence_length(inputs, shapes)
    feeds = {}
    for number, spec in enumerate(inputs):
        # One generator an input: another input more or less does not change the values of the rest.
        rng = np.random.default_rng([seed, index, number])
        feeds[spec.name] = _values(spec, shapes[spec.name], tables.get(spec.name), length, rng, sizes)
    return feeds


def _kind_of_size(spec: InputSpec, symbol: str, axis: int, guess: Guess) -> tuple[int, ...]:
    """Batch, sequence, pixels or other: by the symbol's name, else by where the dimension stands."""
    assert spec.shape is not None
    rank = len(spec.shape)
    if _BATCH_NAMES.search(symbol):
        return guess.batch
    if _SEQUENCE_NAMES.search(symbol):
        return guess.sequence
    if _PIXEL_NAMES.search(symbol) or (rank == 4 and _channels(spec) is not None and axis not in (0, _channels(spec))):
        return guess.pixels
    # A recurrent state is [layers, batch, width] with a fixed number of layers.
    if axis == 0 or (axis == 1 and rank == 3 and isinstance(spec.shape[0], int)):
        return guess.batch
    if (axis == 1 and rank in (2, 3)) or spec.dtype.kind in "iub":
        return guess.sequence
    return guess.other


def _channels(spec: InputSpec) -> int | None:
    """The axis of three colours of a batch of pictures, if it looks like one."""
    if spec.shape is None or len(spec.shape) != 4:
        return None
    return next((axis for axis in (1, 3) if spec.shape[axis] == 3), None)


def _sequence_length(inputs: Sequence[InputSpec], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What "full length" means: the second dimension of the first input that has one."""
    return next((shapes[spec.name][1] for spec in inputs if len(shapes[spec.name]) >= 2), 1)


def _values(
    spec: InputSpec, shape: tuple[int, ...], table: _Table | None, length: int, rng: np.random.Generator, sizes: Mapping[str, int]
) -> np.ndarray:
    kind = spec.dtype.kind
    if kind in "US":
        return np.full(shape, "text")
    if "mask" in spec.name.lower():
        return _mask(shape).astype(spec.dtype)
    if kind == "b":
        return np.ones(shape, spec.dtype)
    if kind in "iu":
        return _integers(spec, shape, table, length, rng, sizes).astype(spec.dtype)
    if kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(spec.dtype)
    if _SAMPLING_RATE_NAMES.search(spec.name):
        return np.full(shape, SAMPLING_RATE, spec.dtype)
    if _LEVEL_NAMES.search(spec.name):
        return np.full(shape, 0.5, spec.dtype)
    if (axis := _channels(spec)) is not None and min(shape) > 0:
        return _pictures(shape, axis, rng).astype(spec.dtype)
    return rng.standard_normal(shape).astype(spec.dtype)


def _mask(shape: tuple[int, ...]) -> np.ndarray:
    """Ones, and zeros at the end of the last axis that is not the batch: an eighth of it, at least one.

    Behind a mask of ones nothing is hidden, and a kernel that ignores it, or hides with another value, would pass.
    """
    mask = np.ones(shape)
    axis = next((axis for axis in reversed(range(len(shape))) if shape[axis] > 1 and (axis or len(shape) == 1)), None)
    if axis is not None:
        np.moveaxis(mask, axis, -1)[..., -max(1, shape[axis] // 8) :] = 0
    return mask


def _integers(
    spec: InputSpec, shape: tuple[int, ...], table: _Table | None, length: int, rng: np.random.Generator, sizes: Mapping[str, int]
) -> np.ndarray:
    name = spec.name.lower()
    bound = table.bound(sizes) if table else None
    if "token_type" in name or "segment" in name:
        return np.zeros(shape)
    if "position" in name and shape:
        return np.broadcast_to(np.arange(shape[-1]) % (bound or max(1, shape[-1])), shape)
    if table and table.lengths:
        return np.full(shape, bound or length)
    if bound is not None:
        return rng.integers(0, max(1, bound), shape)
    if _SAMPLING_RATE_NAMES.search(name):
        return np.full(shape, SAMPLING_RATE)
    if _LENGTH_NAMES.search(name):
        return np.full(shape, length)
    if not shape or _LEVEL_NAMES.search(name):
        return np.ones(shape)
    return rng.integers(0, UNKNOWN_IDS, shape)


def _pictures(shape: tuple[int, ...], channels: int, rng: np.random.Generator) -> np.ndarray:
    """Smooth bright fields with dark strokes, in [0, 1], then normalised as for ImageNet (mean 0.485..., deviation 0.229...).

    The strokes look like lines of writing: text detectors stay below 1e-4 without them, and a wrong fusion would pass.
    """
    count = shape[0]
    height, width = [n for axis, n in enumerate(shape) if axis not in (0, channels)]
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j] if min(height, width) > 1 else np.zeros((2, height, width))
    image = np.empty((count, 3, height, width))
    for n in range(count):
        for colour in range(3):
            fx, fy = rng.uniform(0.5, 3.0, 2)
            px, py = rng.uniform(0, 2 * np.pi, 2)
            image[n, colour] = 0.7 + 0.3 * np.sin(2 * np.pi * fx * x + px) * np.sin(2 * np.pi * fy * y + py)
        image[n] *= 1.0 - 0.9 * _strokes(height, width, rng)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    image = (image - mean[:, None, None]) / deviation[:, None, None]
    return np.moveaxis(image, 1, channels)


def _strokes(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """1 where there is ink: lines of small glyphs, each a few bars, over the lower half."""
    ink = np.zeros((height, width))
    glyph = max(4, min(height, width) // 14)
    pen = max(1, glyph // 6)
    for top in range(height // 2, height - glyph, 2 * glyph):
        for left in range(glyph, width - 2 * glyph, glyph):
            if rng.random() < 0.2:
                continue  # a space between words
            box = ink[top : top + glyph, left : left + max(2, glyph - 2 * pen)]
            for at in rng.integers(0, max(1, box.shape[1] - pen + 1), 2):
                box[:, at : at + pen] = 1.0
            at = int(rng.integers(0, max(1, glyph - pen + 1)))
            box[at : at + pen, :] = 1.0
    return ink


# ---------------------------------------------------------------------------------- what bounds an integer input

# An index stays the same number, whatever these do to its type and shape.
_SAME_NUMBERS = {
    "Cast",
    "CastLike",
    "Reshape",
    "Unsqueeze",
    "Squeeze",
    "Identity",
    "Flatten",
    "Transpose",
    "Expand",
    "Slice",
    "Tile",
    "Concat",
    "Where",
}
# A table keeps its shape through these, along the input that is first.
_SAME_SHAPE = {"Cast", "CastLike", "Identity", "DequantizeLinear", "Mul", "Add", "Sub", "Div"}
_RECURRENT = {"LSTM", "GRU", "RNN"}


@dataclasses.dataclass
class _Table:
    """What an integer input indexes: sizes of the tables (numbers, or symbols of a run-time tensor), or lengths of sequences."""

    tables: list[int | str] = dataclasses.field(default_factory=list)
    lengths: bool = False

    def bound(self, sizes: Mapping[str, int]) -> int | None:
        known = [size if isinstance(size, int) else sizes.get(size, 1) for size in self.tables]
        return min(known) if known else None


class _Links:
    """Who makes and who reads each tensor, subgraphs included (their nodes read outer names)."""

    def __init__(self, proto: onnx.ModelProto):
        self.shapes: dict[str, list[int | str]] = {}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for graph in _graphs(proto.graph):
            for tensor in graph.initializer:
                self.shapes[tensor.name] = list(tensor.dims)
            for sparse in graph.sparse_initializer:
                self.shapes[sparse.values.name] = list(sparse.dims)
            for value in (*graph.value_info, *graph.input, *graph.output):
                if value.type.HasField("tensor_type") and value.type.tensor_type.HasField("shape"):
                    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in value.type.tensor_type.shape.dim]
                    self.shapes.setdefault(value.name, dims)
            for node in graph.node:
                for name in node.output:
                    self.makers[name] = node
                for index, name in enumerate(node.input):
                    self.readers.setdefault(name, []).append((node, index))

    def shape(self, name: str, hops: int = 8) -> list[int | str] | None:
        """Of a tensor, from its declaration or through nodes that keep it."""
        if name in self.shapes:
            return self.shapes[name]
        node = self.makers.get(name)
        if node is None or not hops:
            return None
        if node.op_type == "Constant":
            return next((list(a.t.dims) for a in node.attribute if a.name == "value"), None)
        if node.op_type in _SAME_SHAPE:
            return self.shape(node.input[0], hops - 1)
        return None


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _graphs(inner)


def _bounds(proto: onnx.ModelProto) -> dict[str, _Table]:
    """What each integer input of the model indexes, directly or behind nodes that keep the numbers."""
    import onnx.inliner

    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    links = _Links(proto)
    found = {}
    for spec in specs(proto):
        if spec.dtype.kind in "iu":
            found[spec.name] = _indexed(spec.name, links)
    return {name: table for name, table in found.items() if table.tables or table.lengths}


def _indexed(name: str, links: _Links) -> _Table:
    found = _Table()
    seen, todo = {name}, [name]
    while todo:
        for node, index in links.readers.get(todo.pop(), ()):
            if node.op_type in ("Gather", "GatherElements") and index == 1:
                axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
                shape = links.shape(node.input[0])
                # A table of unknown size holds at least one row.
                found.tables.append((shape[axis] if shape and -len(shape) <= axis < len(shape) else 1) or 1)
            elif node.op_type in _RECURRENT and index == 4:
                found.lengths = True
                shape = links.shape(node.input[0])
                if shape and (steps := shape[next((a.i for a in node.attribute if a.name == "layout"), 0)]):
                    found.tables.append(steps)
            elif node.op_type in _SAME_NUMBERS and not (
                node.op_type in ("Reshape", "Expand", "Slice", "Tile", "Unsqueeze", "Squeeze") and index
            ):
                fresh = [output for output in node.output if output and output not in seen]
                seen.update(fresh)
                todo.extend(fresh)
    return found
