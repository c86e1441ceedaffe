"""The occupancy calculator against the CUDA toolkit's own, and its warnings in plain words."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable

import pytest

from onnxfuse import cubin, gpus, occupancy, plugins
from onnxfuse.errors import MissingHere
from onnxfuse.plugins import KernelUse

# cudaOccMaxActiveBlocksPerMultiprocessor of cuda_occupancy.h, given a GPU's properties and a kernel's.
PROGRAM = r"""
#include <cstdio>
#include <cstring>
#include <cuda_occupancy.h>
int main()
{
    int sm, warps, smem_sm, smem_block, registers, smem, threads, launched;
    while (std::scanf("%d %d %d %d %d %d %d %d", &sm, &warps, &smem_sm, &smem_block, &registers, &smem, &threads, &launched) == 8)
    {
        cudaOccDeviceProp device;
        std::memset(&device, 0, sizeof device);
        device.computeMajor = sm / 10;
        device.computeMinor = sm % 10;
        device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = 32 * warps;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32;
        device.sharedMemPerBlock = 49152;
        device.sharedMemPerMultiprocessor = smem_sm;
        device.sharedMemPerBlockOptin = smem_block;
        device.reservedSharedMemPerBlock = sm >= 80 ? 1024 : 0;
        device.numSms = 100;
        cudaOccFuncAttributes kernel;
        std::memset(&kernel, 0, sizeof kernel);
        kernel.maxThreadsPerBlock = 1024;
        kernel.numRegs = registers;
        kernel.sharedSizeBytes = smem;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = smem_block;
        cudaOccDeviceState state;
        std::memset(&state, 0, sizeof state);
        state.carveoutConfig = 100;
        cudaOccResult result;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, launched) != CUDA_OCC_SUCCESS)
            std::puts("-1");
        else
            std::printf("%d\n", result.activeBlocksPerMultiprocessor);
    }
}
"""


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[tuple[KernelUse, int]]], list[int]]:
    """Blocks of each kernel that fit, by the toolkit, where a launch adds so many bytes of shared memory."""
    try:
        include = plugins.find_nvcc().path.parent.parent / "include"
    except MissingHere as reason:
        pytest.skip(str(reason))
    work = tmp_path_factory.mktemp("toolkit")
    (work / "toolkit.cpp").write_text(PROGRAM)
    subprocess.run(["g++", "-w", "-I", str(include), str(work / "toolkit.cpp"), "-o", str(work / "toolkit")], check=True)

    def blocks(wanted: list[tuple[KernelUse, int]]) -> list[int]:
        lines = []
        for one, launched in wanted:
            most, card = gpus.resident(one.sm), gpus.of_architecture(one.sm)[0]
            card_figures = f"{one.sm} {most.warps} {most.shared_bytes} {card.shared_kib_block * 1024}"
            lines.append(f"{card_figures} {one.registers} {one.smem} {one.threads} {launched}")
        said = subprocess.run([work / "toolkit"], input="\n".join(lines), capture_output=True, text=True, check=True).stdout.split()
        return [int(word) for word in said]

    return blocks


KINDS = list(itertools.product((16, 32, 33, 48, 64, 96, 128, 168, 255), (0, 16, 1024, 16512, 33000, 49152), (32, 96, 128, 256, 384, 512)))


@pytest.mark.nvcc
def test_blocks_are_those_of_the_toolkit(toolkit: Callable[[list[tuple[KernelUse, int]]], list[int]]) -> None:
    """Registers, shared memory and threads of every kind, on every architecture of the table; and what a launch adds."""
    kernels = [use("k", sm, registers, smem, threads) for sm in gpus.architectures() for registers, smem, threads in KINDS]
    wanted = [(one, launched) for one in kernels for launched in (0, 8000)]
    for (one, launched), blocks in zip(wanted, toolkit(wanted), strict=True):
        if one.smem + launched <= gpus.of_architecture(one.sm)[0].shared_kib_block * 1024:
            assert occupancy.of_kernel(one, launched).blocks == blocks, (one, launched)


@pytest.mark.nvcc
def test_what_a_launch_may_add(toolkit: Callable[[list[tuple[KernelUse, int]]], list[int]]) -> None:
    """As many blocks fit with that much, and fewer, or none, with a byte more."""
    kernels = [use("k", sm, registers, smem, threads) for sm in gpus.architectures() for registers, smem, threads in KINDS]
    kernels = [one for one in kernels if occupancy.of_kernel(one).blocks]
    room = [occupancy.most_launched(one) for one in kernels]
    without = toolkit([(one, 0) for one in kernels])
    assert toolkit([(one, left) for one, left in zip(kernels, room, strict=True)]) == without
    beyond = toolkit([(one, left + 1) for one, left in zip(kernels, room, strict=True)])
    assert all(more < blocks for more, blocks in zip(beyond, without, strict=True))


@pytest.mark.parametrize(
    ("registers", "smem", "threads", "sm", "blocks", "limit"),
    [
        (32, 0, 256, 90, 8, "warps"),
        (40, 0, 32, 90, 32, "blocks"),
        (255, 0, 256, 90, 1, "registers"),
        (32, 49152, 128, 80, 3, "shared memory"),
        (64, 0, 1024, 75, 1, "warps"),
    ],
)
def test_what_is_used_up_first(registers: int, smem: int, threads: int, sm: int, blocks: int, limit: str) -> None:
    held = occupancy.of(registers, smem, threads, sm)
    assert (held.blocks, held.limit) == (blocks, limit)
    assert held.share == held.warps / gpus.resident(sm).warps


def test_every_gpu_of_the_table_has_its_limits() -> None:
    assert {gpu.sm for gpu in gpus.GPUS} == set(gpus.architectures())


def use(name: str, sm: int, registers: int, smem: int = 0, threads: int = 256, spilled: int = 0) -> KernelUse:
    return KernelUse(name, sm, registers, spilled, spilled, 0, smem, 1000, threads)


def test_warnings_name_the_kernel_the_card_and_the_reason() -> None:
    libraries = {
        "sm_90": [use("even", 90, 32), use("norm<half, 8>", 90, 40, smem=40000), use("wide", 90, 128)],
        "sm_89": [use("even", 89, 32), use("norm<half, 8>", 89, 40, smem=40000), use("wide", 89, 128, spilled=8)],
    }
    spills, few = sorted(occupancy.unsuited(libraries), reverse=True)
    assert spills == "wide spills 16 bytes of registers to memory on sm_89: it may be slow there; measure, or leave its sites to TensorRT"
    assert few == (
        "norm<half, 8> fills 33% of the warps on sm_89, where shared memory set the limit, and 62% on sm_90: "
        "what was tuned for sm_90 may not suit sm_89; measure there"
    )
    assert occupancy.unsuited({"sm_90": libraries["sm_90"]}) == []


def test_a_kernel_of_one_architecture_is_not_called_better_suited_to_another() -> None:
    """Where a kernel has no body, nothing limits its warps: that is no occupancy to compare with."""
    empty = KernelUse("cluster<half>", 80, 4, 0, 0, 0, 0, 256, 256)
    (line,) = occupancy.unsuited({"sm_80": [empty, use("even", 80, 32)], "sm_90": [use("cluster<half>", 90, 168), use("even", 90, 32)]})
    assert line.startswith("cluster has no code on sm_80, and is for sm_90: others, or TensorRT, take its place there")
    (line,) = occupancy.unsuited({"sm_80": [empty]})
    assert line.startswith("cluster has no code on sm_80: others")
    kinds = {"sm_80": [empty, use("cluster<float>", 80, 64)], "sm_90": [use("cluster<half>", 90, 168), use("cluster<float>", 90, 64)]}
    (line,) = occupancy.unsuited(kinds)
    assert line.startswith("cluster has code for 1 of its 2 kinds alone on sm_80, and is for sm_90")


def test_a_block_that_has_not_its_shared_memory_cannot_run() -> None:
    (line,) = occupancy.unsuited({"sm_90": [use("k", 90, 32, smem=200 << 10)], "sm_86": [use("k", 86, 32, smem=200 << 10)]})
    assert line == "k needs 204800 bytes of shared memory, more than a block has on sm_86: it cannot run there"


def test_what_is_no_cubin_has_no_kernels() -> None:
    for content in (b"", b"\x7fELF", b"\x7fELF\x02" + bytes(100), b"\x7fELF\x02" + b"\xff" * 100, b"not a cubin at all" * 10):
        assert cubin.kernels(content) == {}
