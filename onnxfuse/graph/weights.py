"""Constant values that stay where they are (in the parsed file, or in a data file on disk) until someone reads them."""

from __future__ import annotations

import math
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues

from onnxfuse.errors import BadInput, refusal
from onnxfuse.graph.names import shown
from onnxfuse.graph.wire import Span, map_file

_KEEP = 4096  # decoded values up to this many bytes are kept; larger ones are decoded again when no one holds them
_MOST_AXES = 64  # of numpy, whose arrays constants become
_MOST_BYTES = 1 << 46  # no real tensor has 64 TiB; a size beyond it is damage

_BITS = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    **{number: 2 for name, number in TensorProto.DataType.items() if name in ("INT2", "UINT2")},
}
NUMPY: dict[int, np.dtype[Any]] = {}
for _number in TensorProto.DataType.values():
    if _number != TensorProto.UNDEFINED:
        NUMPY[_number] = np.dtype(helper.tensor_dtype_to_np_dtype(_number))
ONNX = {dtype: number for number, dtype in NUMPY.items()}


def elem_type(dtype: object) -> int:
    """ONNX element type of a numpy dtype (ml_dtypes included), or of an element type itself."""
    if isinstance(dtype, int):
        return dtype
    found = np.dtype(dtype)  # type: ignore[call-overload]
    if found.kind in "US":
        return int(TensorProto.STRING)
    return ONNX[found]


def byte_size(dims: list[int], data_type: int) -> int:
    """Bytes of a tensor's raw data. Types below a byte are packed, and the last byte is filled up."""
    count = math.prod(dims)
    if data_type in _BITS:
        return (count * _BITS[data_type] + 7) // 8
    return count * NUMPY[data_type].itemsize


class Weight(LazyValues):  # type: ignore[misc]
    """Values of a TensorProto. The bytes are in the proto, in `raw` (the model file, mapped), or in a data file in `folder`."""

    def __init__(self, tensor: TensorProto, folder: Path | None = None, raw: Span | None = None) -> None:
        self.tensor = tensor
        self.folder = folder
        self.raw = raw
        self.shape = list(tensor.dims)
        self.dtype = NUMPY[tensor.data_type]
        self.nbytes = 0 if tensor.data_type == TensorProto.STRING else byte_size(self.shape, tensor.data_type)
        self._kept: np.ndarray[Any, Any] | None = None
        self._seen: weakref.ref[np.ndarray[Any, Any]] | None = None

    @property
    def is_external(self) -> bool:
        return bool(self.tensor.data_location == TensorProto.EXTERNAL)

    def span(self) -> Span | None:
        """Where the raw bytes lie outside of the proto: in the mapped model file, or in a data file, mapped now."""
        if self.raw is None and self.is_external:
            place = location(self.tensor)
            return Span(map_file((self.folder or Path()) / place.file), place.offset, self.nbytes)
        return self.raw

    def array(self) -> np.ndarray[Any, Any]:
        """The values, read only. What lies in a file is mapped, not read."""
        if self._kept is not None:
            return self._kept
        found = self._seen() if self._seen is not None else None
        if found is None:
            found = self._decode()
            found.flags.writeable = False
            if found.nbytes <= _KEEP:
                self._kept = found
            else:
                self._seen = weakref.ref(found)
        return found

    def load(self) -> np.ndarray[Any, Any]:
        """The values as an array of the caller's own (graph-surgeon calls this for `Constant.values`)."""
        return np.array(self.array())

    def _decode(self) -> np.ndarray[Any, Any]:
        span = self.span()
        if span is None:
            return numpy_helper.to_array(self.tensor)
        if self.tensor.data_type in _BITS:
            whole = TensorProto(dims=self.shape, data_type=self.tensor.data_type, raw_data=bytes(span.view()))
            return numpy_helper.to_array(whole)
        count = math.prod(self.shape)
        if not count:
            return np.empty(self.shape, self.dtype)
        return np.frombuffer(span.buffer, self.dtype, count, span.start).reshape(self.shape)


class Converted(LazyValues):  # type: ignore[misc]
    """Values of a weight after `convert`, computed when they are read: a large weight is never held in both types."""

    def __init__(self, source: Weight, dtype: np.dtype[Any], convert: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
        self.source = source
        self.convert = convert
        self.shape = source.shape
        self.dtype = dtype
        self.nbytes = byte_size(self.shape, elem_type(dtype))

    def array(self) -> np.ndarray[Any, Any]:
        found = self.load()
        found.flags.writeable = False
        return found

    def load(self) -> np.ndarray[Any, Any]:
        return self.convert(self.source.array()).reshape(self.shape)

    def chunks(self) -> Iterator[memoryview]:
        for piece in pieces(self.source):
            yield np.ascontiguousarray(self.convert(piece)).view(np.uint8).data


def pieces(values: Weight) -> Iterator[np.ndarray[Any, Any]]:
    """A weight's elements in order, as 1-D arrays of some 16 MB. Types below a byte come whole."""
    span = values.span()
    if span is None or values.tensor.data_type in _BITS:
        yield values.array().reshape(-1)
    else:
        for chunk in span.chunks():
            yield np.frombuffer(chunk, values.dtype)


def release(values: Any) -> None:
    """Lets go of the memory that reading large values took, where they can be read again."""
    span = values.span() if isinstance(values, Weight) else None
    if span is not None:
        span.release()


class Place:
    """Where external data lies: a file relative to the model's folder, and a byte range in it."""

    __slots__ = ("file", "length", "offset")

    def __init__(self, file: str, offset: int, length: int | None) -> None:
        self.file, self.offset, self.length = file, offset, length


def location(tensor: TensorProto) -> Place:
    """Raises ValueError where offset or length is no number."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = entries.get("length")
    return Place(entries.get("location", ""), int(entries.get("offset") or 0), int(length) if length else None)


def check(tensor: TensorProto, folder: Path | None, what: str, raw: Span | None = None) -> None:
    """Raises BadInput, beginning with `what`, unless type, dims and data of `tensor` fit together and its data is inside `folder`.

    A space at the end of `what` stands for the tensor's name.
    """
    try:
        _inspect(tensor, folder, raw)
    except BadInput as error:
        raise BadInput(f"{what}{shown(tensor.name) if what.endswith(' ') else ''}: {error}") from None


def _inspect(tensor: TensorProto, folder: Path | None, raw: Span | None) -> None:
    if tensor.data_type not in NUMPY:
        raise BadInput(f"unknown element type {tensor.data_type}; the file is damaged or of a newer ONNX")
    dims = list(tensor.dims)
    if len(dims) > _MOST_AXES:
        raise BadInput(f"impossible rank {len(dims)}; the file is damaged")
    if any(d < 0 for d in dims) or math.prod(dims) > _MOST_BYTES:
        raise BadInput(f"impossible shape {shown(dims)}; the file is damaged")
    if tensor.HasField("segment"):
        raise BadInput("stored in segments, which no runtime reads; save the model again")
    size = byte_size(dims, tensor.data_type)
    if tensor.data_location == TensorProto.EXTERNAL:
        _check_external(tensor, folder, size)
    elif raw is not None or tensor.HasField("raw_data"):
        have = raw.length if raw is not None else len(tensor.raw_data)
        if tensor.data_type == TensorProto.STRING:
            raise BadInput("strings stored as raw data; the file is damaged")
        if have != size:
            raise BadInput(f"holds {have} bytes where its shape {shown(dims)} needs {size}; the file is damaged")
    else:
        _check_typed(tensor, math.prod(dims), size)


def _check_typed(tensor: TensorProto, count: int, size: int) -> None:
    have = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
    if tensor.data_type in _BITS:
        need = size
    elif tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        need = 2 * count
    else:
        need = count
    if have != need:
        raise BadInput(f"holds {have} values where its shape needs {need}; the file is damaged")


def _check_external(tensor: TensorProto, folder: Path | None, size: int) -> None:
    if not all(type(text) is str for entry in tensor.external_data for text in (entry.key, entry.value)):
        raise BadInput("the place of its external data is not UTF-8; the file is damaged")
    try:
        place = location(tensor)
    except ValueError:
        raise BadInput("offset or length of its external data is no number; the file is damaged") from None
    if tensor.data_type == TensorProto.STRING:
        raise BadInput("strings cannot lie in external data; the file is damaged")
    file = data_file(place.file, folder)
    if place.offset < 0 or (place.length is not None and place.length != size):
        raise BadInput(f"external data of {place.length} bytes at {place.offset}, its shape needs {size}; the file is damaged")
    have = file.stat().st_size
    if place.offset + size > have:
        raise BadInput(f"external data ends at byte {place.offset + size}, {shown(file)} has {have}; fetch the whole file")


def data_file(name: str, folder: Path | None) -> Path:
    """The external data file `name`. BadInput unless it is an ordinary file inside the model's folder."""
    if folder is None:
        raise BadInput("external data of a model that came from no file; give a path")
    if type(name) is not str or not name or "\0" in name:  # protobuf gives bytes where a name is not UTF-8
        raise BadInput("external data without a file name; the file is damaged")
    parts = name.replace("\\", "/").split("/")
    if os.path.isabs(name) or ".." in parts:
        raise BadInput(f"external data {shown(name)} lies outside the model's folder; move it beside the model")
    file = folder / name
    try:
        real, base = os.path.realpath(file), os.path.realpath(folder)
        if os.path.commonpath([real, base]) != base:
            raise BadInput(f"external data {shown(name)} leads outside the model's folder; copy it beside the model")
        mode = os.stat(real).st_mode
    except OSError as error:
        raise BadInput(f"external data file {shown(file)}: {refusal(error)}; fetch it, or save the model with its data again") from None
    if not stat.S_ISREG(mode):
        raise BadInput(f"external data {shown(name)} is not an ordinary file; copy it beside the model")
    return file


def proto(values: Any, name: str, inline: bool = False) -> TensorProto:
    """TensorProto of a constant's values: the one it came from, renamed, or a new one.

    External data stays a reference unless `inline`. Sparse values have no TensorProto.
    """
    if isinstance(values, Weight):
        if values.tensor.name != name:
            values.tensor.name = name
        span = values.raw if values.raw is not None or not inline else values.span()
        if span is None:
            return values.tensor
        return TensorProto(name=name, dims=values.shape, data_type=values.tensor.data_type, raw_data=bytes(span.view()))
    if isinstance(values, LazyValues):
        return proto(values.load(), name)
    return numpy_helper.from_array(np.asarray(values), name)


def raw_chunks(values: Any) -> tuple[int, Iterator[bytes | memoryview]] | None:
    """Length and pieces of the raw bytes of large values, where they can be written without making a TensorProto."""
    if isinstance(values, Weight):
        span = values.span()
        return None if span is None else (span.length, span.chunks())
    if isinstance(values, Converted):
        return values.nbytes, values.chunks()
    if isinstance(values, np.ndarray) and elem_type(values.dtype) not in _BITS and values.dtype != object:
        if values.dtype.byteorder == ">":
            values = values.astype(values.dtype.newbyteorder("<"))
        whole = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return values.nbytes, iter([whole.data])
    return None
