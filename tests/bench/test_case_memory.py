"""Cases of kernels own all memory whose addresses they hand to a launcher: with an allocator standing in for torch's."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import epilogue_cases

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


class Tensor:
    """So much of torch's tensor as a case uses before it is launched: a place in memory that is free again with the last of its views."""

    def __init__(self, room: Room, count: int, kind: str, base: Tensor | None = None) -> None:
        self.room, self.count, self.kind, self.base = room, count, kind, base
        self.address = room.take(self) if base is None else base.address

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.count

    def view(self, *sizes: int) -> Tensor:
        return Tensor(self.room, self.count, self.kind, self)

    def to(self, kind: str) -> Tensor:
        return Tensor(self.room, self.count, kind)

    def __mul__(self, scale: float) -> Tensor:
        return Tensor(self.room, self.count, self.kind)


class Room:
    """Memory, and which addresses are somebody's."""

    def __init__(self) -> None:
        self.next = 1 << 20
        self.held: dict[int, int] = {}

    def take(self, tensor: Tensor) -> int:
        address, size = self.next, tensor.count * BYTES[tensor.kind]
        self.next += size + 256 - size % 256
        self.held[address] = size
        weakref.finalize(tensor, self.held.pop, address)
        return address

    def holds(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self.held.items())


class Library:
    """Launchers that look at the addresses they are given."""

    def __init__(self, room: Room) -> None:
        self.room, self.launches = room, 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("onnxfuse_"):
            raise AttributeError(name)

        def launch(at: Any, *rest: Any) -> int:
            if "workspace" in name:
                return 64
            problem = at._obj
            pointers = {field: getattr(problem, field) for field, kind in problem._fields_ if kind is ctypes.c_void_p}
            pointers.update({f"argument {number}": value.value for number, value in enumerate(rest[:-1])})
            for field, address in pointers.items():
                assert not address or self.room.holds(address), f"{name}: {field} is nobody's memory"
            self.launches += 1
            return 0

        return launch


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    room = Room()

    def empty(count: int, dtype: str, device: str) -> Tensor:
        return Tensor(room, count, dtype)

    torch = SimpleNamespace(
        **{kind: kind for kind in BYTES},
        randn=lambda count, device: Tensor(room, count, "float32"),
        empty=empty,
        empty_like=lambda tensor: Tensor(room, tensor.count, tensor.kind),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return room


def test_cases_keep_what_they_hand_over(room: Room) -> None:
    library: Any = Library(room)
    for case in epilogue_cases.epilogues(library, "float16", False):
        gc.collect()
        read, written = ([Tensor(room, count, "float16") for count in counts] for counts in (case.reads, case.writes))
        before = library.launches
        assert case.launch([each.data_ptr() for each in read], [each.data_ptr() for each in written], 0) == 0
        assert library.launches > before


def test_memory_that_nobody_keeps_is_found(room: Room) -> None:
    library: Any = Library(room)
    problem = epilogue_cases.Linear(input=Tensor(room, 8, "float16").data_ptr())
    gc.collect()
    with pytest.raises(AssertionError, match="input is nobody's memory"):
        library.onnxfuse_launch_linear(ctypes.byref(problem), None)
