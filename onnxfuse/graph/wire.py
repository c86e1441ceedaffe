"""The little of protobuf's wire format that keeps weights out of memory.

protobuf parses and writes a message whole. Here a model file is mapped, the raw data of its large initializers is left in
the map, and only the rest is parsed; writing puts the pieces together again, one weight at a time. Format:
https://protobuf.dev/programming-guides/encoding/. Field numbers: onnx.proto.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_RAW_DATA = 7, 5, 9
_LARGE = 16 << 10  # bytes; below it a weight is parsed with the rest
_CHUNK = 16 << 20

Buffer = mmap.mmap | bytes


class Damaged(ValueError):
    """The bytes are no protobuf message."""


@dataclass(frozen=True)
class Span:
    """Bytes of a mapped file."""

    buffer: Buffer
    start: int
    length: int

    def view(self) -> memoryview:
        return memoryview(self.buffer)[self.start : self.start + self.length]

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in pieces. Pages that were read are handed back, so that copying a file does not fill the memory."""
        end = self.start + self.length
        for at in range(self.start, end, _CHUNK):
            yield memoryview(self.buffer)[at : min(at + _CHUNK, end)]
            self._hand_back(at, min(at + _CHUNK, end))

    def release(self) -> None:
        """Hands back the pages that were read, which stay mapped and are read again when they are needed."""
        self._hand_back(self.start, self.start + self.length)

    def _hand_back(self, start: int, end: int) -> None:
        if isinstance(self.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and end > start:
            page = start - start % mmap.PAGESIZE
            self.buffer.madvise(mmap.MADV_DONTNEED, page, end - page)


def map_file(path: Path) -> Buffer:
    """The file's bytes, mapped. They stay valid when the file is replaced by another of its name.

    OSError where it is no ordinary file: a pipe would be waited for, and a device may have no end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            kind = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
            raise OSError(kind, "is a folder" if kind == errno.EISDIR else "is not an ordinary file", str(path))
        if not found.st_size:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def split(buffer: Buffer) -> tuple[bytes, dict[int, Span]]:
    """A serialised ModelProto without the raw data of its large initializers, and that data by index of the initializer.

    Raises Damaged where the bytes cannot be a ModelProto.
    """
    model: list[bytes | memoryview] = []
    data: dict[int, Span] = {}
    view = memoryview(buffer)
    count = 0
    for number, start, body, end in _fields(view, 0, len(view)):
        if number != MODEL_GRAPH or end - body < _LARGE:
            count += sum(1 for field in _fields(view, body, end) if field[0] == GRAPH_INITIALIZER) if number == MODEL_GRAPH else 0
            model.append(view[start:end])
            continue
        graph: list[bytes | memoryview] = []
        plain = body  # start of the stretch that goes over unchanged
        for inner, first, inside, last in _fields(view, body, end):
            if inner == GRAPH_INITIALIZER:
                if last - inside >= _LARGE:
                    tensor, raw = _without_raw_data(buffer, view, inside, last)
                    if raw is not None:
                        data[count] = raw
                        graph += [view[plain:first], delimited(GRAPH_INITIALIZER, len(tensor)), tensor]
                        plain = last
                count += 1
        graph.append(view[plain:end])
        model.append(delimited(MODEL_GRAPH, sum(map(len, graph))))
        model += graph
    return b"".join(model), data


def _without_raw_data(buffer: Buffer, view: memoryview, start: int, end: int) -> tuple[bytes, Span | None]:
    rest: list[memoryview] = []
    raw: Span | None = None
    for number, first, body, last in _fields(view, start, end):
        if number == TENSOR_RAW_DATA:
            raw = Span(buffer, body, last - body)
        else:
            rest.append(view[first:last])
    return b"".join(rest), raw


def _fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, start of its tag, start of its value, end of its value) of each field of a message."""
    while at < end:
        start = at
        tag, at = _varint(view, at, end)
        kind, number = tag & 7, tag >> 3
        if kind == 2:
            length, at = _varint(view, at, end)
            after = at + length
        elif kind == 0:
            _, after = _varint(view, at, end)
        elif kind == 1:
            after = at + 8
        elif kind == 5:
            after = at + 4
        else:
            raise Damaged
        if after > end or not number:
            raise Damaged
        yield number, start, at, after
        at = after


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Damaged


def delimited(number: int, length: int) -> bytes:
    """Tag and length that come before a length-delimited field."""
    return _encode(number << 3 | 2) + _encode(length)


def _encode(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
