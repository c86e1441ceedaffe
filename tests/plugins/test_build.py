"""Compiling and caching the library, and what ptxas says of its kernels."""

from __future__ import annotations

import errno
import json
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxfuse import plugins
from onnxfuse.errors import BadInput, MissingHere

pytestmark = pytest.mark.nvcc

SMALL_GPU = 80
EXPORTS = {
    "getCreators",
    "onnxfuse_depthwise_layernorm_supported",
    "onnxfuse_encoder_workspace",
    "onnxfuse_encoder_workspace_up_to",
    "onnxfuse_group_norm_supported",
    "onnxfuse_group_norm_workspace",
    "onnxfuse_group_norm_workspace_up_to",
    "onnxfuse_launch_bias_gelu",
    "onnxfuse_launch_depthwise_layernorm",
    "onnxfuse_launch_encoder",
    "onnxfuse_launch_error",
    "onnxfuse_launch_group_norm",
    "onnxfuse_launch_layernorm_patches",
    "onnxfuse_layernorm_patches_supported",
    "onnxfuse_launch_linear",
    "onnxfuse_launch_recurrence",
    "onnxfuse_launch_skip_layernorm",
    "onnxfuse_launch_skip_rmsnorm",
    "onnxfuse_launch_attention",
    "onnxfuse_attention_supported",
    "onnxfuse_attention_workspace",
    "onnxfuse_attention_workspace_up_to",
    "onnxfuse_launch_rotary",
    "onnxfuse_linear_supported",
    "onnxfuse_recurrence_variant",
    "onnxfuse_recurrence_workspace",
    "onnxfuse_recurrence_workspace_up_to",
    "setLoggerFinder",
}


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNXFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin folder that compiles in a second, in place of the real one."""
    folder = tmp_path / "sources"
    (folder / "One").mkdir(parents=True)
    shutil.copy(plugins.sources() / "exports.map", folder)
    (folder / "One" / "kernel.cu").write_text(
        "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n"
        'extern "C" __attribute__((visibility("default"))) int onnxfuse_launch_twice(float* x)\n'
        "{ twice<<<1, 32>>>(x); return cudaGetLastError(); }\n"
    )
    monkeypatch.setattr(plugins, "sources", lambda: folder)
    return folder


@pytest.mark.parametrize("sm", [80, 90])
def test_library_is_compiled_whole(sm: int, library: Callable[[int], plugins.Library]) -> None:
    built = library(sm)
    assert built.sm == sm
    assert set(built.ops) == plugins.PLUGIN_OPS
    symbols = subprocess.run(["nm", "-D", "--defined-only", built.path], check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == EXPORTS
    needed = subprocess.run(["readelf", "-d", built.path], check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", needed)) <= {
        "libc.so.6", "ld-linux-x86-64.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libdl.so.2",
    }  # fmt: skip


@pytest.mark.parametrize("sm", [80, 90])
def test_no_kernel_spills(sm: int, library: Callable[[int], plugins.Library]) -> None:
    kernels = library(sm).kernels
    stems = {use.name.split("<")[0] for use in kernels}
    recurrent = {"persistent", "resident", "all_steps", "one_step", "project", "project_float"}
    attention = {"attention", "attention_float"}
    products = {"depthwise_layernorm_band", "linear", "linear_group", "linear_hopper"}
    epilogues = {"depthwise_layernorm", "group_norm_bulk", "group_norm_last", "group_norm_planar", *products}
    encoders = {"encoder::encode", *(["encoder::Patience::give_up"] if sm == 90 else [])}  # elsewhere there is nothing in it
    small = {"skip_layernorm", "skip_rmsnorm", "bias_gelu", "rotary", "join_attention", "layernorm_patches", "layernorm_patches_planar"}
    assert stems == {*small, *encoders, *recurrent, *epilogues, *attention}
    assert {"skip_layernorm<half, 8, 3>", "skip_rmsnorm<bfloat16, 8, 4>", "bias_gelu<float, 4, 0>"} <= {use.name for use in kernels}
    for use in kernels:
        assert use.sm == sm
        if use.name.startswith("encoder::"):  # the sources say how much of it may spill
            continue
        assert (use.spill_stores, use.spill_loads, use.stack) == (0, 0, 0), use
        # Some hold their weights, sums or the scores of a row in registers; the others need several blocks to hide their loads.
        stem = use.name.split("<")[0]
        assert 0 < use.registers <= (255 if stem in recurrent | attention else 168 if stem in products else 128), use


def test_operators_are_those_that_the_sources_create() -> None:
    sources = (path.read_text() for path in plugins.sources().glob("*/plugin.cpp"))
    assert {name for source in sources for name in re.findall(r'kName = "(\w+)"', source)} == plugins.PLUGIN_OPS


def test_widest_row_is_the_kernels(nvcc: plugins.Nvcc, tmp_path: Path) -> None:
    source = tmp_path / "width.cpp"
    source.write_text(f'#include "{plugins.sources()}/common/dtype.h"\nstatic_assert(onnxfuse::kMaxWidth == {plugins.MAX_WIDTH});\n')
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", source], check=True)


def test_second_build_comes_from_the_cache(empty_cache: Path, tiny_sources: Path) -> None:
    compiled: list[str] = []
    first = plugins.build(SMALL_GPU, lambda name, done, total: compiled.append(f"{name} {done}/{total}"))
    assert compiled == ["One/kernel.cu 1/1"]
    before = first.path.stat().st_mtime_ns
    second = plugins.build(SMALL_GPU, lambda name, done, total: compiled.append(name))
    assert len(compiled) == 1
    assert second == first
    assert second.path.stat().st_mtime_ns == before
    assert stat.S_IMODE(empty_cache.stat().st_mode) == 0o700
    assert not list(empty_cache.glob("plugins/.building-*"))


def test_what_a_killed_build_left_is_removed(empty_cache: Path, tiny_sources: Path) -> None:
    place = plugins.build(80).path.parent
    left, other = (empty_cache / "plugins" / f".building-{name}-abc" for name in (place.name, "sm_90-of-another-process"))
    for folder in (left, other):
        folder.mkdir()
    (place / "library.json").unlink()
    plugins.build(80)
    assert not left.exists()
    assert other.exists()


def test_a_cache_that_cannot_be_written_serves_what_it_has(empty_cache: Path, tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = plugins.build(80)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plugins, "locked", full)
    assert plugins.build(80) == built
    with pytest.raises(BadInput, match="plugins: No space left on device; make room, or set ONNXFUSE_CACHE"):
        plugins.build(90)


def test_changed_source_is_another_library(empty_cache: Path, tiny_sources: Path) -> None:
    first = plugins.build(SMALL_GPU)
    kernel = tiny_sources / "One" / "kernel.cu"
    kernel.write_text(kernel.read_text().replace("2;", "3;"))
    second = plugins.build(SMALL_GPU)
    assert first.path != second.path
    assert first.sha256 != second.sha256


@pytest.mark.parametrize("victim", ["libonnxfuse_plugins.so", "library.json"])
@pytest.mark.parametrize("content", [b"", b"junk", None])
def test_damaged_library_is_built_again(victim: str, content: bytes | None, empty_cache: Path, tiny_sources: Path) -> None:
    first = plugins.build(SMALL_GPU)
    path = first.path.with_name(victim)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    compiled: list[str] = []
    second = plugins.build(SMALL_GPU, lambda name, done, total: compiled.append(name))
    assert compiled
    assert second.path == first.path
    assert plugins._hash_file(second.path) == second.sha256
    note = json.loads(second.path.with_name("library.json").read_text())
    assert note["sha256"] == second.sha256


def test_two_processes_build_once(empty_cache: Path, tiny_sources: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom onnxfuse import plugins\n"
        f"plugins.sources = lambda: Path({str(tiny_sources)!r})\n"
        "compiled = []\n"
        f"library = plugins.build({SMALL_GPU}, lambda name, done, total: compiled.append(name))\n"
        "import ctypes; ctypes.CDLL(str(library.path)).onnxfuse_launch_twice\n"
        "print(len(compiled), library.sha256)\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) for _ in "ab"
    ]
    said = [process.communicate(timeout=300)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(count for count, _ in said) == ["0", "1"]
    assert said[0][1] == said[1][1]


def test_cached_library_serves_without_a_compiler(empty_cache: Path, tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = plugins.build(SMALL_GPU)
    monkeypatch.setattr(plugins, "_nvcc_places", lambda: iter(()))
    assert plugins.build(SMALL_GPU) == built
    with pytest.raises(MissingHere, match=r"^nvcc, the CUDA compiler: not in CUDA_HOME.*pip install 'onnxfuse\[nvcc\]'"):
        plugins.build(90)


def test_compiler_fault_is_one_line_with_a_log(empty_cache: Path, tiny_sources: Path) -> None:
    (tiny_sources / "One" / "kernel.cu").write_text("this is no C++\n")
    with pytest.raises(MissingHere) as fault:
        plugins.build(SMALL_GPU)
    message = str(fault.value)
    assert "\n" not in message
    assert message.startswith("One/kernel.cu: nvcc failed: ")
    log = Path(message.rsplit(" ", 1)[1])
    assert "this is no C++" in log.read_text() or "error" in log.read_text()
    assert not list(empty_cache.glob("plugins/sm_*/"))
    assert not list(empty_cache.glob("plugins/.building-*"))


SPILLING = """
__global__ void __launch_bounds__(1024, 2) hungry(float* x, int n)
{
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[threadIdx.x + i * n];
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) total += v[i] * v[63 - i] + v[(i * 7) % 64];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) x[threadIdx.x + i * n] = v[i] * total;
}
"""


def test_a_library_for_newer_gpus_has_code_for_each_family(empty_cache: Path, tiny_sources: Path) -> None:
    both = plugins.build(80), plugins.build(80, and_newer=True)
    assert both[0].path != both[1].path
    assert {use.sm for use in both[0].kernels} == {80}
    assert {80, 90, 100, 120} <= {use.sm for use in both[1].kernels}
    assert plugins.cached(80, and_newer=True) == both[1]
    assert plugins.cached(80) == both[0]
    assert plugins.cached(90) is None


def test_no_chosen_name_reaches_a_command_line(tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc hands file names to a shell as they are, and -Wl and -Xcompiler split at commas."""
    hostile = tmp_path / "a $(touch pwned) `touch pwned`,-o,b; touch pwned"
    moved = hostile / "sources"
    shutil.copytree(tiny_sources, moved)
    monkeypatch.setattr(plugins, "sources", lambda: moved)
    monkeypatch.setenv("ONNXFUSE_CACHE", str(hostile / "cache"))
    monkeypatch.setenv("TMPDIR", str(hostile))
    monkeypatch.chdir(tmp_path)
    commands: list[list[str]] = []
    run = subprocess.run

    def watch(command: list[str], **options: object) -> object:
        commands.append([str(part) for part in command])
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(plugins.subprocess, "run", watch)
    assert plugins.build(SMALL_GPU).path.is_relative_to(hostile)
    assert not list(tmp_path.rglob("pwned"))
    assert len(commands) >= 2
    assert not [part for command in commands for part in command if "pwned" in part]
    (moved / "One" / "b$(touch pwned).cu").write_text("")
    with pytest.raises(BadInput, match="a plugin source with a special character in its name; rename it"):
        plugins.build(SMALL_GPU)


def test_a_compiler_in_the_current_folder_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvcc", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\ntouch run\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in ("", ".", ":.", "bin"):
        monkeypatch.setenv("PATH", path)
        assert plugins.on_absolute_path("nvcc") is None
        assert plugins.on_absolute_path("./g++") is None
    monkeypatch.setenv("CUDA_HOME", "")
    assert tmp_path not in {place.parent for place in plugins._nvcc_places()}
    monkeypatch.setenv("PATH", f".:{tmp_path}")
    assert plugins.on_absolute_path("nvcc") == str(tmp_path / "nvcc")


def test_a_compiler_that_a_shell_would_misread_is_refused(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "c$(touch pwned)"
    odd.mkdir()
    (odd / "g++").symlink_to(shutil.which("g++") or "g++")
    monkeypatch.setenv("CXX", str(odd / "g++"))
    with pytest.raises(MissingHere, match="nvcc hands its command lines to a shell"):
        plugins.build(SMALL_GPU)


def test_spilling_kernel_is_refused_unless_allowed(empty_cache: Path, tiny_sources: Path) -> None:
    kernel = tiny_sources / "One" / "kernel.cu"
    kernel.write_text(SPILLING)
    with pytest.raises(MissingHere, match=r"^kernel hungry: nvcc [\d.]+ spills \d+ bytes of registers for sm_80"):
        plugins.build(SMALL_GPU)
    kernel.write_text("// allow-spill hungry: it is here to spill\n" + SPILLING)
    (use,) = plugins.build(SMALL_GPU).kernels
    assert use.name == "hungry"
    assert use.spill_stores > 0
    assert use.spill_loads > 0


def test_missing_cxx_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingHere, match=r"^no-such-compiler: no such C\+\+ compiler; install g\+\+"):
        plugins.build(SMALL_GPU)


def test_old_architecture_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^sm_70: neither TensorRT 10 nor CUDA 13"):
        plugins.build(70)


def test_architecture_unknown_to_the_compiler_is_refused(empty_cache: Path) -> None:
    with pytest.raises(MissingHere, match=r"cannot compile for sm_999"):
        plugins.build(999)


def test_cache_that_others_can_write_is_refused(empty_cache: Path, tiny_sources: Path) -> None:
    plugins.build(SMALL_GPU)
    (empty_cache / "plugins").chmod(0o777)
    with pytest.raises(BadInput, match="others can write there; set ONNXFUSE_CACHE"):
        plugins.build(SMALL_GPU)
    assert stat.S_IMODE((empty_cache / "plugins").stat().st_mode) == 0o777  # not ours to change


def test_cache_under_a_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONNXFUSE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BadInput, match="set ONNXFUSE_CACHE"):
        plugins.build(SMALL_GPU)


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN8onnxfuse14skip_layernormI6__halfLi8ELi3EEEvNS_17SkipLayerNormArgsIT_EE' for 'sm_80'
ptxas info    : Function properties for _ZN8onnxfuse14skip_layernormI6__halfLi8ELi3EEEvNS_17SkipLayerNormArgsIT_EE
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 32 bytes smem, 408 bytes cmem[0]
ptxas info    : Function properties for helper
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'plain' for 'sm_90'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
"""


def test_ptxas_report_is_read() -> None:
    uses = plugins.parse_ptxas(PTXAS)
    assert uses == [
        plugins.KernelUse("skip_layernorm<half, 8, 3>", 80, 48, 8, 12, 16, 32),
        plugins.KernelUse("helper", 80, 0, 0, 0, 0, 0),
        plugins.KernelUse("plain", 90, 10, 0, 0, 0, 0),
    ]


def test_pip_layout_and_toolkit_layout_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in ("lib64", "lib", "targets/sbsa-linux/lib"):
        home = tmp_path / layout.replace("/", "-")
        (home / "bin").mkdir(parents=True)
        (home / layout).mkdir(parents=True)
        (home / layout / "libcudart_static.a").touch()
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(
            '#!/bin/sh\ncase $1 in --version) echo "Cuda compilation tools, release 12.8, V12.8.93";; *) echo sm_80; echo sm_90;; esac\n'
        )
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(home))
        found = plugins.find_nvcc()
        assert found == plugins.Nvcc(nvcc, home / layout / "libcudart_static.a", "12.8.93", frozenset({80, 90}))
        # One that does not know the architecture gives way to the next that does.
        assert plugins.find_nvcc(100).path != nvcc
