"""Writing a model file: whole or not at all, with the interface, versions and metadata that it was read with."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto
from onnx_graphsurgeon.ir.tensor import SparseValues

from onnxfuse.errors import BadInput
from onnxfuse.graph import structure, weights
from onnxfuse.graph.convert import Export
from onnxfuse.graph.files import atomic
from onnxfuse.graph.functions import drop_unused
from onnxfuse.graph.model import Model
from onnxfuse.graph.names import shown
from onnxfuse.graph.skeleton import put_constants
from onnxfuse.graph.tensors import every
from onnxfuse.graph.wire import GRAPH_INITIALIZER, MODEL_GRAPH, TENSOR_RAW_DATA, delimited, map_file, split

_MOST_INLINE = (1 << 31) - (1 << 20)  # bytes; protobuf messages end at 2 GiB
_EXTERNAL_FROM = 1024  # bytes; smaller tensors stay in the model, where shape inference finds them
_PAGE = 4096  # alignment of large tensors in a data file, so that a runtime can map them; small ones: 64
_LARGE = 16 << 10


def to_proto(model: Model) -> ModelProto:
    """The whole model in memory. External data stays a reference, relative to the source's folder."""
    proto, constants = _assemble(model, inline=False)
    for name, values in constants.items():
        proto.graph.initializer.append(weights.proto(values, name))
    return proto


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Writes `model` to `path`, replacing what was there when all is written.

    Weights go over one by one. Where the source kept them in other files, or where the result would pass 2 GiB, they go to one
    new file beside `path`, `NAME.data`. Raises BadInput where the file system refuses, and where the result is not valid ONNX.
    """
    target = Path(os.path.realpath(path))
    if str(target) in _sources(model):
        raise BadInput(f"cannot write {shown(path)}: weights of the model are read from it; choose another output")
    proto, constants = _assemble(model, inline=True)
    graph = proto.graph.SerializeToString()
    inline = sum(_size(values) for values in constants.values()) + len(graph) < _MOST_INLINE and not model.external
    put_constants(proto.graph, constants)
    structure.check_nodes(proto)
    proto.ClearField("graph")
    if inline:
        with atomic(target) as temporary, open(temporary, "wb") as out:
            _write(out, proto, graph, [_piece(name, values) for name, values in constants.items()])
        return
    replaced = _own_data(target)
    data_name = _data_name(model, target, replaced)
    with atomic(target) as temporary, open(temporary, "wb") as out:
        with atomic(target.parent / data_name) as data_temporary, open(data_temporary, "wb") as data:
            pieces = [
                _piece(name, values) if _size(values) < _EXTERNAL_FROM else _external(data, data_name, name, values)
                for name, values in constants.items()
            ]
        _write(out, proto, graph, pieces)
    for name in replaced - {os.path.realpath(target.parent / data_name)} - _sources(model):
        Path(name).unlink(missing_ok=True)


def _assemble(model: Model, inline: bool) -> tuple[ModelProto, dict[str, Any]]:
    """The model without the main graph's initializers, and those by name (values of overridable inputs among them)."""
    drop_unused(model)
    export = Export(model.graph, inline, inner_as_nodes=model.ir_version < 4)
    proto = ModelProto()
    proto.CopyFrom(model.header)
    export.graph(model.graph, with_constants=False, into=proto.graph)
    declared = model.header.graph
    proto.graph.name, proto.graph.doc_string = declared.name, declared.doc_string
    for field in ("input", "output"):
        proto.graph.ClearField(field)  # with what is known of them by now
        getattr(proto.graph, field).extend(getattr(declared, field))
    constants: dict[str, Any] = dict(model.defaults)
    for tensor in export.constants.get(id(model.graph), ()):
        if tensor.name in constants and constants[tensor.name] is not tensor._values:
            raise BadInput(f"two constants are named {shown(tensor.name)}; this is a fault of onnxfuse")
        if isinstance(tensor._values, SparseValues):
            proto.graph.sparse_initializer.append(tensor._values.tensor)
        else:
            constants[tensor.name] = tensor._values
    if proto.ir_version < 4:
        _declare(proto, constants, {tensor.name for tensor in model.graph.inputs})
    proto.functions.extend(model.functions.values())
    return proto, constants


def _declare(proto: ModelProto, constants: dict[str, Any], inputs: set[str]) -> None:
    """Before IR version 4 every initializer is a graph input as well: those gone are left out, new ones come last."""
    kept = [value for value in proto.graph.input if value.name in constants or value.name in inputs]
    declared = {value.name: value for value in kept}
    for name, values in constants.items():
        old = declared.get(name)
        if old is None or old.type.tensor_type.elem_type != weights.elem_type(values.dtype):
            value = declared.setdefault(name, onnx.ValueInfoProto(name=name))
            value.type.tensor_type.elem_type = weights.elem_type(values.dtype)
            value.type.tensor_type.ClearField("shape")
            value.type.tensor_type.shape.SetInParent()
            for size in values.shape:
                value.type.tensor_type.shape.dim.add(dim_value=size)
    del proto.graph.input[:]
    proto.graph.input.extend(declared.values())


def _size(values: Any) -> int:
    return int(values.nbytes)


# ------------------------------------------------------------------------------------------------------------ pieces


@dataclass(frozen=True)
class _Piece:
    """A serialised TensorProto: `head`, then `length` bytes of raw data."""

    head: bytes
    length: int
    body: Iterable[bytes | memoryview]


def _piece(name: str, values: Any) -> _Piece:
    raw = weights.raw_chunks(values) if _size(values) >= _LARGE else None
    if raw is None:
        return _Piece(weights.proto(values, name, inline=True).SerializeToString(), 0, ())
    length, body = raw
    head = TensorProto(name=name, dims=values.shape, data_type=weights.elem_type(values.dtype)).SerializeToString()
    return _Piece(head + delimited(TENSOR_RAW_DATA, length), length, body)


def _external(data: BinaryIO, data_name: str, name: str, values: Any) -> _Piece:
    """Writes the values to the data file; the piece is the reference to them."""
    raw = weights.raw_chunks(values)
    length, body = raw if raw is not None else _raw_bytes(values, name)
    align = _PAGE if length >= _LARGE else 64
    offset = -(-data.tell() // align) * align
    data.write(b"\0" * (offset - data.tell()))
    for chunk in body:
        data.write(chunk)
    tensor = TensorProto(name=name, dims=values.shape, data_type=weights.elem_type(values.dtype), data_location=TensorProto.EXTERNAL)
    for key, value in (("location", data_name), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return _Piece(tensor.SerializeToString(), 0, ())


def _raw_bytes(values: Any, name: str) -> tuple[int, Iterator[bytes | memoryview]]:
    """Raw bytes of values that have none yet: numbers kept in a typed field, packed types."""
    tensor = weights.proto(values, name)
    if not tensor.HasField("raw_data"):
        tensor = weights.proto(values.load(), name)
    return len(tensor.raw_data), iter([tensor.raw_data])


def _write(out: BinaryIO, model: ModelProto, graph: bytes, pieces: list[_Piece]) -> None:
    tags = [delimited(GRAPH_INITIALIZER, len(piece.head) + piece.length) for piece in pieces]
    total = len(graph) + sum(len(tag) + len(piece.head) + piece.length for tag, piece in zip(tags, pieces, strict=True))
    out.write(model.SerializeToString())
    out.write(delimited(MODEL_GRAPH, total))
    out.write(graph)
    for tag, piece in zip(tags, pieces, strict=True):
        out.write(tag)
        out.write(piece.head)
        for chunk in piece.body:
            out.write(chunk)


def data_files(path: Path) -> set[str]:
    """The data files that the model at `path` reads, as real paths; none where no model is there. A name that `read` refuses is none."""
    proto = ModelProto()
    try:
        proto.ParseFromString(split(map_file(path))[0])
        places = {weights.location(tensor).file for tensor in every(proto) if tensor.data_location == TensorProto.EXTERNAL}
    except (OSError, ValueError, DecodeError, BadInput):  # nothing there, or no whole model
        return set()
    found = set()
    for name in places:
        with contextlib.suppress(BadInput):
            found.add(os.path.realpath(weights.data_file(name, path.parent)))
    return found


def is_data_of(path: str, target: Path) -> bool:
    """Whether `path` has a name that `save` gives to the data file of `target`. Both are real paths."""
    return re.fullmatch(rf"{re.escape(str(target))}(\.\d+)?\.data", path) is not None


def _own_data(target: Path) -> set[str]:
    """The data files, of names that `save` gives, which the model that is now at `target` reads."""
    return {path for path in data_files(target) if is_data_of(path, target)}


def _data_name(model: Model, target: Path, replaced: set[str]) -> str:
    """A name beside `target` that is none of the files that the model still reads from, nor of those that the model there reads: until
    that one is replaced, it is whole.
    """
    sources = _sources(model) | replaced
    name, count = f"{target.name}.data", 0
    while os.path.realpath(target.parent / name) in sources:
        count += 1
        name = f"{target.name}.{count}.data"
    return name


def _sources(model: Model) -> set[str]:
    """The data files that the model still reads from."""
    return {os.path.realpath((values.folder or Path()) / weights.location(values.tensor).file) for values in _externals(model)}


def _externals(model: Model) -> Iterator[weights.Weight]:
    tensors = {id(t): t for graph in model.graphs() for node in graph.nodes for t in node.inputs}
    for values in (*model.defaults.values(), *(getattr(t, "_values", None) for t in tensors.values())):
        if isinstance(values, weights.Weight) and values.is_external:
            yield values
