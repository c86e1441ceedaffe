"""How many warps of a kernel a multiprocessor holds at once, from what the compiler says of the kernel and the table in onnxfuse/gpus.py.

The rules are those of NVIDIA's occupancy calculator (cuda_occupancy.h of the CUDA toolkit, with which the tests compare): a warp is given
registers in pieces of 256, a multiprocessor's four parts take whole warps, and a block's shared memory counts in pieces of 128 bytes (256 on
Turing) with 1 KiB of its own for the system from compute capability 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse import gpus

_WARP = 32
_PARTS = 4  # of a multiprocessor, each with its own registers
_REGISTER_PIECE = 256


@dataclass(frozen=True)
class Occupancy:
    """blocks, warps: of a multiprocessor at once. share: of the warps it could hold. limit: what is used up first (registers, shared memory,
    warps or blocks).
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
    piece, own = (256, 0) if sm < 80 else (128, 1024)
    taken = -(-(smem + own) // piece) * piece
    return total // taken if taken else 1 << 16
