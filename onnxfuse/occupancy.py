"""How many warps of a kernel a multiprocessor holds at once, from what the compiler says of the kernel and the table in onnxfuse/gpus.py.

The rules are those of NVIDIA's occupancy calculator (cuda_occupancy.h of the CUDA toolkit, with which the tests compare): a warp is given
registers in pieces of 256, a multiprocessor's four parts take whole warps, and a block's shared memory counts in pieces of 128 bytes (256
on Turing) with 1 KiB of its own for the system from compute capability 8.0 on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from onnxfuse import gpus

if TYPE_CHECKING:
    from onnxfuse.plugins import KernelUse

_WARP = 32
_PARTS = 4  # of a multiprocessor, each with its own registers
_REGISTER_PIECE = 256


@dataclass(frozen=True)
class Occupancy:
    """blocks, warps: of a multiprocessor at once. share: of the warps it could hold.

    limit: what is used up first, registers, shared memory, warps or blocks.
    """

    blocks: int
    warps: int
    share: float
    limit: str


def of(registers: int, smem: int, threads: int, sm: int) -> Occupancy:
    """registers: of a thread. smem: bytes of a block. threads: of a block, 1 to 1024. sm: a compute capability of the table, 90 for 9.0."""
    most = gpus.resident(sm)
    warps = -(-threads // _WARP)
    by = {
        "warps": most.warps // warps,
        "blocks": most.blocks,
        "registers": _by_registers(registers, warps, most.registers),
        "shared memory": _by_shared(smem, sm, most.shared_bytes),
    }
    blocks = min(by.values())
    # Where two are used up together, the fixed limits of the card are named: nothing in the kernel would change them.
    limit = next(name for name, value in by.items() if value == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / most.warps, limit)


def _by_registers(registers: int, warps: int, total: int) -> int:
    if registers == 0:
        return 1 << 16
    of_warp = -(-registers * _WARP // _REGISTER_PIECE) * _REGISTER_PIECE
    of_part = total // _PARTS // of_warp
    return of_part * _PARTS // warps


def _by_shared(smem: int, sm: int, total: int) -> int:
    piece, own = _pieces(sm)
    taken = -(-(smem + own) // piece) * piece
    return total // taken if taken else 1 << 16


def _pieces(sm: int) -> tuple[int, int]:
    """Of shared memory: bytes of a piece, and the system's own of each block."""
    return (256, 0) if sm < 80 else (128, 1024)


def of_kernel(use: KernelUse, launched: int = 0) -> Occupancy:
    """At the largest block that the kernel is compiled for; 1024 threads where it has no bound. launched: bytes of shared memory that a
    launch adds to a block for its shapes, which no compiler knows."""
    return of(use.registers, use.smem + launched, use.threads or 1024, use.sm)


def most_launched(use: KernelUse) -> int:
    """Bytes of shared memory that a launch may add to a block while as many blocks fit as without; 0 where none fits."""
    blocks = of_kernel(use).blocks
    if blocks == 0:
        return 0
    piece, own = _pieces(use.sm)
    of_block = gpus.resident(use.sm).shared_bytes // blocks // piece * piece - own
    largest = gpus.of_architecture(use.sm)[0].shared_kib_block * 1024
    return max(0, min(of_block, largest) - use.smem)


def is_empty(use: KernelUse) -> bool:
    """Whether a kernel has no body on its architecture: the bare return that is left of one written for another (nvcc 13: 4 registers,
    256 bytes on sm_75 to sm_121). Others pass pointers on, which takes more registers."""
    return use.registers <= 4 and use.code <= 512


def figures(use: KernelUse) -> dict[str, Any]:
    """All that is known of a kernel, as JSON has it."""
    held = of_kernel(use)
    return {**asdict(use), "occupancy": round(held.share, 3), "limit": held.limit, "most_launched": most_launched(use)}


# A kernel that reaches less than this share of what it reaches elsewhere was made with another card in mind.
_SUITED = 0.67


def unsuited(libraries: Mapping[str, Sequence[KernelUse]]) -> list[str]:
    """Warnings in plain words, one for each kernel and architecture that do not suit each other: it has no code there, spills registers,
    a block needs more shared memory than there is, or far fewer warps fit than on the best of the architectures given. Instantiations
    of one kernel count as one, by the worst of those that have code.
    """
    held: dict[str, dict[str, list[KernelUse]]] = {}
    for name, uses in libraries.items():
        for use in uses:
            if use.registers:
                held.setdefault(use.name.split("<")[0], {}).setdefault(name, []).append(use)
    return [line for kernel, by_name in held.items() for line in (*_absent(kernel, by_name), *_unsuited(by_name))]


def _absent(kernel: str, by_name: Mapping[str, Sequence[KernelUse]]) -> list[str]:
    """Architectures that a kernel is not for."""
    count = {name: sum(not is_empty(use) for use in uses) for name, uses in by_name.items()}
    most = max(count.values())
    there = " and ".join(name for name in by_name if count[name] == most)
    return [
        f"{kernel} has {'no code' if count[name] == 0 else f'code for {count[name]} of its {len(uses)} kinds alone'} on {name}"
        f"{f', and is for {there}' if most else ''}: others, or TensorRT, take its place there, and speeds measured with it do not hold"
        for name, uses in by_name.items()
        if count[name] < max(most, 1)
    ]


def _unsuited(all_by_name: Mapping[str, Sequence[KernelUse]]) -> list[str]:
    found = []
    by_name = {name: [use for use in uses if not is_empty(use)] for name, uses in all_by_name.items()}
    by_name = {name: uses for name, uses in by_name.items() if uses}
    best_of: dict[str, tuple[float, str]] = {}
    for name, uses in by_name.items():
        for use in uses:
            best_of[use.name] = max(best_of.get(use.name, (0.0, name)), (of_kernel(use).share, name), key=lambda entry: entry[0])
    for name, uses in by_name.items():
        spilling = [use for use in uses if use.spill_stores + use.spill_loads]
        if spilling:
            worst = max(spilling, key=lambda use: use.spill_stores + use.spill_loads)
            spilled = worst.spill_stores + worst.spill_loads
            found.append(
                f"{worst.name} spills {spilled} bytes of registers to memory on {name}: it may be slow there; measure, or leave its sites "
                "to TensorRT"
            )
        behind = [(of_kernel(use).share / best_of[use.name][0], use) for use in uses if best_of[use.name][0]]
        share, use = min(behind, key=lambda entry: entry[0], default=(1.0, uses[0]))
        if of_kernel(use).blocks == 0:
            found.append(f"{use.name} needs {use.smem} bytes of shared memory, more than a block has on {name}: it cannot run there")
        elif share < _SUITED:
            reached, (best, elsewhere) = of_kernel(use), best_of[use.name]
            found.append(
                f"{use.name} fills {reached.share:.0%} of the warps on {name}, where {reached.limit} set the limit, and "
                f"{best:.0%} on {elsewhere}: what was tuned for {elsewhere} may not suit {name}; measure there"
            )
    return found
