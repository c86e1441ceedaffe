"""What a file of GPU machine code (cubin) says of its kernels beyond ptxas: the size of their code, and the largest block they take.

A cubin is an ELF file. A kernel's instructions are the section `.text.NAME`; `.nv.info.NAME` holds attributes, of which number 5 is the
bound on threads that `__launch_bounds__` gave (seen in the compilers of CUDA 12 and 13; where it is absent the bound is 0).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_THREADS = 5
_SIZED = 4  # the form of an attribute that says its length


@dataclass(frozen=True)
class Code:
    """Of one kernel: bytes of instructions, and threads of its largest block (0 where it has no bound of its own)."""

    size: int
    threads: int


def kernels(content: bytes) -> dict[str, Code]:
    """Every kernel of a cubin, by its mangled name. Empty for what is no 64-bit ELF file."""
    try:
        sections = dict(_sections(content))
    except (struct.error, ValueError, IndexError, OverflowError):
        return {}
    prefix = ".text."
    return {
        name.removeprefix(prefix): Code(len(data), _threads(sections.get(f".nv.info.{name.removeprefix(prefix)}", b"")))
        for name, data in sections.items()
        if name.startswith(prefix)
    }


def _sections(content: bytes) -> Iterator[tuple[str, bytes]]:
    if content[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", content, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", content, table + number * size) for number in range(count)]
    names = _data(content, headers[names_at])
    for header in headers:
        start = header[0]
        yield names[start : names.index(b"\0", start)].decode("ascii", "replace"), _data(content, header)


def _data(content: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size = header
    return b"" if kind == 8 else content[offset : offset + size]  # 8: no bits in the file


def _threads(info: bytes) -> int:
    at = 0
    while at + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute == _MAX_THREADS and length == 12:
            return math.prod(struct.unpack_from("<III", info, at))
        at += length
    return 0
