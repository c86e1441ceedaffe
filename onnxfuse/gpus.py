"""The table of GPUs: what `--gpu NAME` can name, and the figures that planning needs.

Figures are those of NVIDIA's data sheets and architecture white papers (largest variant of the name; `memory_gbps` is peak bandwidth,
which a copy reaches to about 90 %), shared memory those of the CUDA C++ Programming Guide, "Technical specifications per compute
capability". CUDA and TensorRT support is that of their release notes and support matrix; Jetson modules get TensorRT with JetPack.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from onnxfuse.errors import BadInput


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one compute capability where only that was named (then the figures of a single card are None).

    `sm` is the compute capability without its dot; bandwidth in GB/s; shared memory in KiB of a multiprocessor, and of a block that
    asks for all it may have.
    """

    name: str
    sm: int
    sms: int | None
    memory_gbps: float | None
    shared_kib_sm: int
    shared_kib_block: int
    tensorrt: str
    """Versions that build engines for it."""
    cuda: str
    """Toolkits that compile for it."""
    kind: str
    aliases: tuple[str, ...] = ()
    host: str | None = None
    """The kind of processor (as `uname -m` says it) that every machine with this GPU has; None where there are several."""


# Shared memory by compute capability: KiB of a multiprocessor, KiB that one block may opt in to.
_SHARED = {
    75: (64, 64),
    80: (164, 163),
    86: (100, 99),
    87: (164, 163),
    89: (100, 99),
    90: (228, 227),
    100: (228, 227),
    103: (228, 227),
    110: (228, 227),
    120: (100, 99),
    121: (100, 99),
}
# Warps and blocks that a multiprocessor holds at once, by compute capability; all have the same count of registers.
_RESIDENT = {
    75: (32, 16),
    80: (64, 32),
    86: (48, 16),
    87: (48, 16),
    89: (48, 24),
    90: (64, 32),
    100: (64, 32),
    103: (64, 32),
    110: (48, 24),
    120: (48, 24),
    121: (48, 24),
}
_REGISTERS = 65536
# TensorRT versions by compute capability. JetPack fixes the version on a Jetson.
_TENSORRT = {
    75: "10 (for 11 see its support matrix)",
    80: "10, 11",
    86: "10, 11",
    87: "10 (JetPack 6)",
    89: "10, 11",
    90: "10, 11",
    100: "10.8 and later, 11",
    103: "10.13 and later, 11",
    110: "10.13 and later (JetPack 7), 11",
    120: "10.8 and later, 11",
    121: "10.13 and later, 11",
}

# CUDA toolkits that compile for a compute capability. 13.0 dropped all below 7.5.
_CUDA = {
    75: "10.0 and later",
    80: "11.0 and later",
    86: "11.1 and later",
    87: "11.4 and later",
    89: "11.8 and later",
    90: "11.8 and later",
    100: "12.8 and later",
    103: "12.9 and later",
    110: "13.0 and later",
    120: "12.8 and later",
    121: "12.9 and later",
}

_DATA_CENTRE, _WORKSTATION, _CONSUMER, _JETSON = "data centre", "workstation", "consumer", "Jetson"

# Name, kind, compute capability, multiprocessors, GB/s, other names.
_ROWS: tuple[tuple[str, str, int, int, float, tuple[str, ...]], ...] = (
    ("t4", _DATA_CENTRE, 75, 40, 320, ()),
    ("a100", _DATA_CENTRE, 80, 108, 1555, ("a100-40gb", "a100-sxm4-40gb", "a100-pcie-40gb")),
    ("a100-80gb", _DATA_CENTRE, 80, 108, 2039, ("a100-sxm4-80gb", "a100-sxm-80gb")),
    ("a100-80gb-pcie", _DATA_CENTRE, 80, 108, 1935, ("a100-pcie-80gb",)),
    ("a800", _DATA_CENTRE, 80, 108, 2039, ("a800-80gb", "a800-sxm4-80gb", "a800-80gb-pcie")),
    ("a30", _DATA_CENTRE, 80, 56, 933, ()),
    ("a40", _DATA_CENTRE, 86, 84, 696, ()),
    ("a10", _DATA_CENTRE, 86, 72, 600, ()),
    ("a10g", _DATA_CENTRE, 86, 80, 600, ()),
    ("a16", _DATA_CENTRE, 86, 10, 200, ()),
    ("a2", _DATA_CENTRE, 86, 10, 200, ()),
    ("l4", _DATA_CENTRE, 89, 58, 300, ()),
    ("l20", _DATA_CENTRE, 89, 92, 864, ()),
    ("l40", _DATA_CENTRE, 89, 142, 864, ()),
    ("l40s", _DATA_CENTRE, 89, 142, 864, ()),
    ("h20", _DATA_CENTRE, 90, 78, 4000, ("h20-96gb",)),
    ("h100", _DATA_CENTRE, 90, 132, 3352, ("h100-sxm", "h100-sxm5", "h100-80gb-hbm3")),
    ("h100-pcie", _DATA_CENTRE, 90, 114, 2039, ()),
    ("h100-nvl", _DATA_CENTRE, 90, 132, 3938, ()),
    ("h800", _DATA_CENTRE, 90, 132, 3352, ("h800-sxm", "h800-sxm5")),
    ("h200", _DATA_CENTRE, 90, 132, 4800, ("h200-sxm", "h200-nvl")),
    ("gh200", _DATA_CENTRE, 90, 132, 4900, ("gh200-480gb", "gh200-144g-hbm3e")),
    ("b200", _DATA_CENTRE, 100, 148, 8000, ()),
    ("gb200", _DATA_CENTRE, 100, 152, 8000, ()),
    ("b300", _DATA_CENTRE, 103, 148, 8000, ("b300-sxm6-ac",)),
    ("gb300", _DATA_CENTRE, 103, 152, 8000, ()),
    ("rtx-pro-6000", _WORKSTATION, 120, 188, 1792, (
        "rtx-pro-6000-blackwell", "rtx-pro-6000-server", "rtx-pro-6000-blackwell-workstation-edition",
        "rtx-pro-6000-blackwell-server-edition", "rtx-pro-6000-blackwell-max-q-workstation-edition",
    )),
    ("rtx-pro-5000", _WORKSTATION, 120, 110, 1344, ("rtx-pro-5000-blackwell",)),
    ("rtx-pro-4500", _WORKSTATION, 120, 82, 896, ("rtx-pro-4500-blackwell",)),
    ("rtx-pro-4000", _WORKSTATION, 120, 70, 672, ("rtx-pro-4000-blackwell",)),
    ("rtx-pro-2000", _WORKSTATION, 120, 34, 288, ("rtx-pro-2000-blackwell",)),
    ("rtx6000-ada", _WORKSTATION, 89, 142, 960, ("rtx-6000-ada-generation",)),
    ("rtx5880-ada", _WORKSTATION, 89, 110, 960, ("rtx-5880-ada-generation",)),
    ("rtx5000-ada", _WORKSTATION, 89, 100, 576, ("rtx-5000-ada-generation",)),
    ("rtx4500-ada", _WORKSTATION, 89, 60, 432, ("rtx-4500-ada-generation",)),
    ("rtx4000-ada", _WORKSTATION, 89, 48, 360, ("rtx-4000-ada-generation",)),
    ("rtx4000-sff-ada", _WORKSTATION, 89, 48, 280, ("rtx-4000-sff-ada-generation",)),
    ("rtx2000-ada", _WORKSTATION, 89, 22, 224, ("rtx-2000-ada-generation",)),
    ("rtx-a6000", _WORKSTATION, 86, 84, 768, ("a6000",)),
    ("rtx-a5500", _WORKSTATION, 86, 80, 768, ("a5500",)),
    ("rtx-a5000", _WORKSTATION, 86, 64, 768, ("a5000",)),
    ("rtx-a4500", _WORKSTATION, 86, 56, 640, ("a4500",)),
    ("rtx-a4000", _WORKSTATION, 86, 48, 448, ("a4000",)),
    ("rtx-a2000", _WORKSTATION, 86, 26, 288, ("a2000", "rtx-a2000-12gb")),
    ("rtx8000", _WORKSTATION, 75, 72, 672, ()),
    ("rtx6000", _WORKSTATION, 75, 72, 672, ()),
    ("rtx5000", _WORKSTATION, 75, 48, 448, ()),
    ("rtx4000", _WORKSTATION, 75, 36, 416, ()),
    ("titan-rtx", _WORKSTATION, 75, 72, 672, ()),
    ("dgx-spark", _WORKSTATION, 121, 48, 273, ("gb10",)),
    ("gtx1650", _CONSUMER, 75, 14, 128, ()),
    ("gtx1650super", _CONSUMER, 75, 20, 192, ()),
    ("gtx1660", _CONSUMER, 75, 22, 192, ()),
    ("gtx1660super", _CONSUMER, 75, 22, 336, ()),
    ("gtx1660ti", _CONSUMER, 75, 24, 288, ()),
    ("rtx2060", _CONSUMER, 75, 30, 336, ()),
    ("rtx2060super", _CONSUMER, 75, 34, 448, ()),
    ("rtx2070", _CONSUMER, 75, 36, 448, ()),
    ("rtx2070super", _CONSUMER, 75, 40, 448, ()),
    ("rtx2080", _CONSUMER, 75, 46, 448, ()),
    ("rtx2080super", _CONSUMER, 75, 48, 496, ()),
    ("rtx2080ti", _CONSUMER, 75, 68, 616, ()),
    ("rtx3050", _CONSUMER, 86, 20, 224, ()),
    ("rtx3060", _CONSUMER, 86, 28, 360, ()),
    ("rtx3060ti", _CONSUMER, 86, 38, 448, ()),
    ("rtx3070", _CONSUMER, 86, 46, 448, ()),
    ("rtx3070ti", _CONSUMER, 86, 48, 608, ()),
    ("rtx3080", _CONSUMER, 86, 68, 760, ()),
    ("rtx3080ti", _CONSUMER, 86, 80, 912, ()),
    ("rtx3090", _CONSUMER, 86, 82, 936, ()),
    ("rtx3090ti", _CONSUMER, 86, 84, 1008, ()),
    ("rtx4060", _CONSUMER, 89, 24, 272, ()),
    ("rtx4060ti", _CONSUMER, 89, 34, 288, ()),
    ("rtx4070", _CONSUMER, 89, 46, 504, ()),
    ("rtx4070super", _CONSUMER, 89, 56, 504, ()),
    ("rtx4070ti", _CONSUMER, 89, 60, 504, ()),
    ("rtx4070tisuper", _CONSUMER, 89, 66, 672, ()),
    ("rtx4080", _CONSUMER, 89, 76, 717, ()),
    ("rtx4080super", _CONSUMER, 89, 80, 736, ()),
    ("rtx4090", _CONSUMER, 89, 128, 1008, ()),
    ("rtx4090d", _CONSUMER, 89, 114, 1008, ()),
    ("rtx5050", _CONSUMER, 120, 20, 320, ()),
    ("rtx5060", _CONSUMER, 120, 30, 448, ()),
    ("rtx5060ti", _CONSUMER, 120, 36, 448, ()),
    ("rtx5070", _CONSUMER, 120, 48, 672, ()),
    ("rtx5070ti", _CONSUMER, 120, 70, 896, ()),
    ("rtx5080", _CONSUMER, 120, 84, 960, ()),
    ("rtx5090", _CONSUMER, 120, 170, 1792, ()),
    ("orin", _JETSON, 87, 16, 205, ("agx-orin", "jetson-agx-orin")),
    ("orin-nx", _JETSON, 87, 8, 102, ("jetson-orin-nx",)),
    ("orin-nano", _JETSON, 87, 8, 102, ("jetson-orin-nano", "jetson-orin-nano-super")),
    ("thor", _JETSON, 110, 20, 273, ("agx-thor", "jetson-thor", "jetson-agx-thor", "jetson-t5000")),
)  # fmt: skip

# Beside these GPUs is always an Arm processor: Grace, or a Jetson's own.
_ARM = frozenset({"gh200", "gb200", "gb300", "dgx-spark", "orin", "orin-nx", "orin-nano", "thor"})

GPUS: tuple[Gpu, ...] = tuple(
    Gpu(name, sm, sms, gbps, *_SHARED[sm], _TENSORRT[sm], _CUDA[sm], kind, aliases, "aarch64" if name in _ARM else None)
    for name, kind, sm, sms, gbps, aliases in _ROWS
)

# GPUs that people still have and TensorRT 10 does not: name to compute capability.
_TOO_OLD = {
    "v100": 70, "v100s": 70, "titanv": 70, "xavier": 72, "agxxavier": 72, "xaviernx": 72,
    "p100": 60, "p40": 61, "p4": 61, "gtx1080": 61, "gtx1080ti": 61, "gtx1070": 61, "gtx1060": 61, "titanxp": 61, "tx2": 62,
    "m60": 52, "m40": 52, "nano": 53, "k80": 37,
}  # fmt: skip


@dataclass(frozen=True)
class Resident:
    """What a multiprocessor holds at once: warps, blocks, 32-bit registers, bytes of shared memory."""

    warps: int
    blocks: int
    registers: int
    shared_bytes: int


def resident(sm: int) -> Resident:
    """Of a compute capability of the table, 90 for 9.0. Raises KeyError for another."""
    warps, blocks = _RESIDENT[sm]
    return Resident(warps, blocks, _REGISTERS, _SHARED[sm][0] * 1024)


def architectures() -> tuple[int, ...]:
    """The compute capabilities of the table, the oldest first."""
    return tuple(_RESIDENT)


def of_architecture(sm: int) -> tuple[Gpu, ...]:
    """The GPUs of one compute capability."""
    return tuple(gpu for gpu in GPUS if gpu.sm == sm)


def resolve(name: str) -> Gpu:
    """The GPU that `name` means: "auto", a name or alias in any case ("H100", "RTX 4090", "NVIDIA H200"), "sm_90", "sm90" or "90".

    Raises BadInput for a GPU that TensorRT no longer supports, with the reason, and for a name that is not known, with those like it;
    MissingHere for "auto" where there is no GPU.
    """
    wanted = _key(name)
    if wanted == "auto":
        return _device()
    if match := re.fullmatch(r"(?:sm)?(\d{2,3})[af]?", wanted):
        return _architecture(int(match[1]), name)
    if old := _too_old(name):
        raise _refused(name, old)
    if gpu := _by_key().get(wanted):
        return gpu
    known = {key: gpu.name for key, gpu in _by_key().items()}
    close = dict.fromkeys(known[key] for key in difflib.get_close_matches(wanted, known, n=4, cutoff=0.6))
    meant = f"did you mean {', '.join(close)}?" if close else "`onnxfuse plugins list` shows the names"
    raise BadInput(f"GPU {name!r} is not known; {meant} (sm_NN names a compute capability)")


def _too_old(name: str) -> int:
    """Compute capability of a GPU that TensorRT left behind, also where its memory and form follow: "Tesla V100-SXM2-16GB". Else 0."""
    words = re.split(r"[\s_\-.]+", name.strip().lower())
    starts = (_key(" ".join(words[:count])) for count in range(len(words), 0, -1))
    return next((_TOO_OLD[start] for start in starts if start in _TOO_OLD), 0)


def _key(name: str) -> str:
    """A name without case, vendor, brand and separators."""
    plain = re.sub(r"[\s_\-.]+", "", name.strip().lower())
    return re.sub(r"^(nvidia)?(geforce|tesla|quadro)?(?=.)", "", plain)


def _by_key() -> dict[str, Gpu]:
    return {_key(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}


def _architecture(sm: int, name: str) -> Gpu:
    if sm < min(_SHARED):
        raise _refused(name, sm)
    if sm not in _SHARED:
        raise BadInput(f"GPU {name!r}: no such compute capability; there are {', '.join(f'sm_{known}' for known in _SHARED)}")
    return Gpu(f"sm_{sm}", sm, None, None, *_SHARED[sm], _TENSORRT[sm], _CUDA[sm], "compute capability")


def _refused(name: str, sm: int) -> BadInput:
    return BadInput(
        f"GPU {name!r} is of compute capability {sm // 10}.{sm % 10}: TensorRT 10 dropped it (7.5 is the oldest) and CUDA 13 "
        "cannot compile for it; use a Turing GPU (t4) or newer"
    )


def _device() -> Gpu:
    """The GPU of this machine: its row, or what its compute capability says where the table has no such name."""
    from onnxfuse.engine import trt

    name, sm, _ = trt.gpu()
    found = _by_key().get(_key(name))
    return found if found and found.sm == sm else _architecture(sm, name)
