"""A model file less its weights: all that says how to feed it, without reading what does not.

Walks the protobuf wire format of a memory-mapped file and leaves out tensor values above KEEP bytes, so that a model of 2 GB
costs a few hundred KB. External data is never opened.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.errors import BadInput

if TYPE_CHECKING:
    import onnx

KEEP = 1024  # bytes; shapes, axes and scalars are below it

# message -> field number -> message to look into (onnx.proto)
_INNER: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "Sparse"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "Sparse", 23: "Sparse"},
    "Sparse": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}
_TENSOR_VALUES = {4, 5, 6, 7, 9, 10, 11}  # float_data, int32_data, string_data, int64_data, raw_data, double_data, uint64_data


def skeleton(path: Path) -> onnx.ModelProto:
    """The model without tensor values above KEEP bytes. BadInput: no such file, not an ONNX model, cut short."""
    import google.protobuf.message
    import onnx

    model = onnx.ModelProto()
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            model.ParseFromString(_copy(data, 0, len(data), "Model"))
    except (ValueError, IndexError, google.protobuf.message.DecodeError) as error:
        raise BadInput(f"{path}: not an ONNX model, or cut short; export or download it again") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error}); give the path of an ONNX file") from error
    if not model.HasField("graph"):
        raise BadInput(f"{path}: not an ONNX model (it holds no graph); export or download it again")
    return model


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def _encode(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _copy(data: mmap.mmap, start: int, end: int, message: str) -> bytes:
    if end - start <= KEEP and message != "Model":
        return data[start:end]
    out, at = bytearray(), start
    while at < end:
        begin = at
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == 2:
            length, at = _varint(data, at)
            stop = at + length
            if stop > end:
                raise ValueError("cut short")
            inner = _INNER[message].get(field)
            if message == "Tensor" and field in _TENSOR_VALUES and length > KEEP:
                pass
            elif inner:
                body = _copy(data, at, stop, inner)
                out += _encode(key) + _encode(len(body)) + body
            else:
                out += data[begin:stop]
            at = stop
        elif wire in (0, 1, 5):
            at = _varint(data, at)[1] if wire == 0 else at + (8 if wire == 1 else 4)
            if at > end:
                raise ValueError("cut short")
            # Unpacked repeated values (one key each) may be many: a tensor's are left out with the packed ones.
            if message != "Tensor" or field not in _TENSOR_VALUES:
                out += data[begin:at]
        else:
            raise ValueError(f"wire type {wire}")
    return bytes(out)
