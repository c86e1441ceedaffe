"""Damaged models from sound ones, by a seed: bits flipped, bytes cut and repeated, and fields exchanged, doubled, lost and set to extremes.

What is damaged on the level of fields parses, and so gets further into the program than what is damaged on the level of bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto

_NUMBERS = (0, 1, -1, 2, 3, 7, 13, 127, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), 1 << 32, 1 << 62, (1 << 63) - 1, -(1 << 63))
_REALS = (0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "y", "a\nb", "\x1b[31m", "../x", "/etc/passwd", "\0", "n" * 5000, "Add", "If", "onnxfuse", "ai.onnx", "axis", "Constant")
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def mutated(model: ModelProto, rng: random.Random) -> bytes:
    """The bytes of `model`, damaged in one way or a few."""
    if rng.random() < 0.25:
        return _bytes(model.SerializeToString(), rng)
    damaged = ModelProto()
    damaged.CopyFrom(model)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        _field(damaged, rng)
    data = damaged.SerializeToString()
    return _bytes(data, rng) if rng.random() < 0.1 else data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        if not out:
            break
        at, size = rng.randrange(len(out)), rng.randint(1, 40)
        kind = rng.randrange(6)
        if kind < 2:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at] = rng.randrange(256)
        elif kind == 3:
            del out[at : at + size]
        elif kind == 4:
            out[at:at] = out[max(0, at - size) : at]
        else:
            del out[at:]
    return bytes(out)


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _field(model: ModelProto, rng: random.Random) -> None:
    """Changes one field somewhere. Each kind of message is as likely as the next, however many there are of it."""
    kinds: dict[str, list[Message]] = {}
    for message in _messages(model):
        kinds.setdefault(message.DESCRIPTOR.name, []).append(message)
    message = rng.choice(kinds[rng.choice(sorted(kinds))])
    fields = [field for field, _ in message.ListFields()]
    if not fields or rng.random() < 0.15:
        fields = list(message.DESCRIPTOR.fields)
    field = rng.choice(fields)
    if field.is_repeated:
        _list(message, field, kinds, rng)
    elif rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        others = kinds.get(field.message_type.name)
        if others and not _holds(other := rng.choice(others), message):
            getattr(message, field.name).CopyFrom(type(other).FromString(other.SerializeToString()))
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), rng))


def _holds(outer: Message, inner: Message) -> bool:
    return any(message is inner for message in _messages(outer))


def _list(message: Message, field: FieldDescriptor, kinds: dict[str, list[Message]], rng: random.Random) -> None:
    items = getattr(message, field.name)
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    kept = [type(item).FromString(item.SerializeToString()) if is_message else item for item in items]
    extra = kinds.get(field.message_type.name, []) if is_message else []
    at = rng.randrange(len(kept)) if kept else 0
    actions: list[Callable[[], Any]] = [kept.clear]
    if kept:
        other = rng.randrange(len(kept))
        actions += [
            lambda: kept.pop(at),
            lambda: kept.insert(other, kept[at]),
            lambda: kept.__setitem__(slice(None), kept[::-1]),
            lambda: kept.__setitem__(at, kept[other]),
            lambda: kept.insert(other, kept.pop(at)),
            lambda: kept.extend([kept[at]] * rng.choice((1, 3, 40))),
        ]
        if not is_message:
            actions += [lambda: kept.__setitem__(at, _value(field, kept[at], rng))] * 6
    if extra:
        actions.append(lambda: kept.insert(at, rng.choice(extra)))
    if not is_message:
        actions.append(lambda: kept.append(_value(field, None, rng)))
    rng.choice(actions)()
    copies = [type(item).FromString(item.SerializeToString()) if is_message else item for item in kept]
    del items[:]
    items.extend(copies)


def _value(field: FieldDescriptor, old: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values])
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        near = [] if old is None else [old + 1, old - 1, -old, old * 2]
        return min(max(rng.choice([*_NUMBERS, *near, *near]), low), high)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice([*_REALS, *([] if old is None else [old * 2, old + 1e-6])])
    if field.type == FieldDescriptor.TYPE_BYTES:
        old = old or b""
        return rng.choice([b"", b"\xff\xfe", old[:-1], old + b"\0", old[::-1], bytes(len(old)), b"\xff" * len(old), b"tanh", b"NOTSET"])
    return rng.choice(_TEXTS)
