"""The plugin library: finds the CUDA compiler, compiles plugins/ for one GPU architecture, and keeps the result by content.

A library is compiled on first use and then taken from the user's cache (ONNXFUSE_CACHE, else XDG_CACHE_HOME/onnxfuse). A cached
one is used only if its hash is still the one noted when it was made. Two processes that want the same library build it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from onnxfuse import cubin, extensions
from onnxfuse.errors import BadInput, MissingHere
from onnxfuse.graph.files import atomic, locked

HALVES = ("float16", "bfloat16")
FLOATS = ("float32", *HALVES)
MAX_WIDTH = 16384  # kMaxWidth of plugins/common/dtype.h
OLDEST_SM = 75  # the oldest that TensorRT 10 and CUDA 13 support

Progress = Callable[[str, int, int], None]
"""Called after each compiled file with its name, how many are done, and of how many."""


@dataclass(frozen=True)
class Op:
    """An operator of domain "onnxfuse" that the library implements."""

    name: str
    covers: str
    max_width: int | None  # longest last axis; None: any
    dtypes: tuple[str, ...] = FLOATS
    half_from: int = OLDEST_SM  # the oldest architecture for which it has kernels of 16-bit types
    only: tuple[int, ...] = ()  # the architectures that it is for; empty: OLDEST_SM and newer

    @property
    def gpus(self) -> str:
        """The architectures that it runs on, in words."""
        if self.only:
            return ", ".join(f"sm_{sm}" for sm in self.only)
        if not set(self.dtypes) - set(HALVES):
            return f"sm_{self.half_from} and newer"
        return f"sm_{OLDEST_SM} and newer" + (f"; 16 bits from sm_{self.half_from}" if self.half_from > OLDEST_SM else "")


OPS = (
    Op("SkipLayerNormalization", "input + skip (+ bias), then LayerNormalization; the sum as second output", MAX_WIDTH),
    Op("SkipRMSNormalization", "input + skip (+ bias), then RMSNormalization; the sum as second output", MAX_WIDTH),
    Op("BiasGelu", "X + bias, then GELU: erf, tanh or quick", None),
    Op("DepthwiseConvLayerNorm", "depthwise convolution + bias, then LayerNormalization over channels, channels last", None),
    Op("LayerNormPatches", "LayerNormalization over channels, channels last, its rows written as patches", MAX_WIDTH),
    Op("GroupNormSilu", "GroupNormalization, scale and shift of each image's channels, with SiLU or without", None),
    Op(
        "Linear",
        "X W + bias with GELU, SiLU or ReLU, also as a gate; or residual + scale * (X W + bias), and LayerNorm",
        None,
        HALVES,
        half_from=80,
    ),
    Op("LSTMSequence", "one to four layers of LSTM, any direction, states and lengths; hidden a multiple of 8", None),
    Op("GRUSequence", "one to four layers of GRU, likewise", None),
    Op("FusedRotary", "rotary position embedding: halves or neighbours, all or the first elements of a head", None),
    Op("FusedAttention", "scores, masks, softmax and values of attention; heads of 8 to 256, grouped queries, causal", None, half_from=80),
    Op("EncoderStack", "layers of a transformer encoder; heads of 32, 64 or 128, up to 512 a sequence", 1024, HALVES, only=(90,)),
    Op("Elementwise", "an expression of element-wise operators, its kernels generated", None, (*FLOATS, "int32", "int64", "bool")),
)
PLUGIN_OPS: frozenset[str] = frozenset(op.name for op in OPS)


def ops() -> tuple[Op, ...]:
    """The built-in operators and those of extensions. Raises BadInput where two have one name."""
    every = (*OPS, *(op for extension in extensions.installed() for op in extension.ops))
    for name, count in Counter(op.name for op in every).items():
        if count > 1:
            raise BadInput(f"extension operator '{name}': there is a plugin of that name; rename it, or uninstall the extension")
    return every


@dataclass(frozen=True)
class KernelUse:
    """What the compiler says of one kernel: registers of a thread; in bytes spills, stack of a thread, smem of a block and the code.

    threads: of the largest block that it is compiled for, 0 where it has no bound of its own.
    """

    name: str
    sm: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int
    code: int = 0
    threads: int = 0


@dataclass(frozen=True)
class Generated:
    """Kernels compiled from generated source: the machine code (for one architecture, or several) and what each kernel needs."""

    image: bytes
    kernels: tuple[KernelUse, ...]


@dataclass(frozen=True)
class Library:
    """A compiled plugin library for one architecture."""

    path: Path
    sm: int
    sha256: str
    kernels: tuple[KernelUse, ...]
    ops: tuple[str, ...]
    compiler: str


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its program, the static runtime library it comes with, its release, and the architectures it knows."""

    path: Path
    cudart: Path
    release: str
    architectures: frozenset[int]


LIBRARY = "libonnxfuse_plugins.so"
NVCC_REMEDY = "install it with `pip install 'onnxfuse[nvcc]'`, or set CUDA_HOME to a CUDA toolkit"


def sources() -> Path:
    """The folder of CUDA sources: plugins/ in a checkout, or its copy inside the installed package."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_plugins", package.parent / "plugins"):
        if (folder / "exports.map").is_file():
            return folder
    raise MissingHere(f"{package / '_plugins'}: the plugin sources are not there; install onnxfuse again")


def _roots() -> tuple[Path, ...]:
    """The folders whose plugins make the library: onnxfuse's, which has the common part, and those of extensions."""
    return (sources(), *(extension.plugins for extension in extensions.installed() if extension.plugins))


def find_nvcc(sm: int | None = None) -> Nvcc:
    """The first CUDA compiler that works, and that knows architecture `sm` where one is given.

    Looked for in CUDA_HOME and CUDA_PATH, on PATH, in the pip packages, and in /usr/local/cuda. Raises MissingHere.
    """
    faults = []
    for path in dict.fromkeys(_nvcc_places()):
        try:
            nvcc = _inspect_nvcc(path)
        except MissingHere as fault:
            faults.append(str(fault))
            continue
        if sm is None or sm in nvcc.architectures:
            return nvcc
        faults.append(f"{path} (CUDA {nvcc.release}) cannot compile for sm_{sm}")
    found = "; ".join(faults) if faults else "not in CUDA_HOME, on PATH or among the pip packages"
    raise MissingHere(f"nvcc, the CUDA compiler: {found}; {NVCC_REMEDY}")


def build(sm: int, progress: Progress | None = None, *, and_newer: bool = False) -> Library:
    """The library for compute capability `sm` (90 is 9.0), compiled unless the cache has it.

    `and_newer` adds machine code for every newer architecture that the compiler knows, and PTX for those that it does not: for
    engines that run on more than one. Where no compiler is installed, a cached library of the same sources serves whichever compiler
    made it. Raises BadInput for an architecture that is too old, MissingHere where a compiler is missing or fails.
    """
    if sm < OLDEST_SM:
        raise BadInput(f"sm_{sm}: neither TensorRT 10 nor CUDA 13 supports it; the oldest GPUs are those of sm_{OLDEST_SM}")
    source_key = _hash_sources(_roots())
    folder = _private("plugins")
    stem = f"sm_{sm}{'+' if and_newer else ''}-{source_key[:16]}"
    try:
        toolchain = _toolchain(sm, and_newer)
    except MissingHere:
        for cached in sorted(folder.glob(f"{stem}-*/library.json")):
            if library := _load(cached.parent):
                return library
        raise
    place = folder / f"{stem}-{toolchain.key[:8]}"
    if library := _load(place):
        return library
    try:
        with locked(place.with_suffix(".lock")):
            if library := _load(place):
                return library
            with _new_folder(place) as work:
                _compile(sm, toolchain, work, progress)
    except OSError as fault:
        raise BadInput(f"{folder}: {fault.strerror or fault}; make room, or set ONNXFUSE_CACHE to a folder that can be written") from fault
    library = _load(place)
    if library is None:
        raise MissingHere(f"{place}: the library that was just built cannot be read back; check the disk")
    return library


def compile_source(text: str, op: str, sm: int, *, and_newer: bool = False, options: Sequence[str] = ()) -> Generated:
    """CUDA source compiled to machine code, as `build` compiles the library: for `sm`, or with `and_newer` for the newer ones, too.

    The include path is the plugins' folder; of it the source may include the headers of plugin `op`. Taken from the cache where the same
    source was compiled with the same headers before. Raises MissingHere where a compiler is missing or fails.
    """
    toolchain = _toolchain(sm, and_newer)
    key = hashlib.sha256(json.dumps([text, _hash_sources((sources() / op,)), toolchain.key, *options]).encode()).hexdigest()
    place = _private("generated") / f"sm_{sm}{'+' if and_newer else ''}-{key[:32]}"
    with locked(place.with_suffix(".lock")):
        if not (known := _load_generated(place)):
            with _new_folder(place) as work:
                _compile_generated(text, toolchain, options, work)
            known = _load_generated(place)
    if known is None:
        raise MissingHere(f"{place}: the kernels that were just compiled cannot be read back; check the disk")
    return known


def compiled() -> tuple[Library, ...]:
    """The libraries that the cache has of the present sources, one for each architecture, the oldest first. Nothing is compiled."""
    key = _hash_sources(_roots())[:16]
    found = {
        library.sm: library
        for note in sorted(_private("plugins").glob(f"sm_*[0-9]-{key}-*/library.json"))
        if (library := _load(note.parent))
    }
    return tuple(found[sm] for sm in sorted(found))


def folder(op: str) -> Path | None:
    """Where the sources of the plugin `op` are: a folder of its name, or one that it shares. None where there is none."""
    own = (root / op for root in _roots() if (root / op).is_dir())
    texts = ((path, path.read_text(encoding="utf-8", errors="replace")) for root in _roots() for path in sorted(root.glob("*/plugin.cpp")))
    return next(own, None) or next((path.parent for path, text in texts if f'kName = "{op}"' in text), None)


def cached(sm: int, *, and_newer: bool = False) -> Library | None:
    """The library of today's sources, if it has been compiled; never compiles."""
    stem = f"sm_{sm}{'+' if and_newer else ''}-{_hash_sources(_roots())[:16]}"
    found = (_load(note.parent) for note in sorted((cache_dir() / "plugins").glob(f"{stem}-*/library.json")))
    return next((library for library in found if library is not None), None)


def keep(content: bytes) -> Path:
    """A file of this content in the user's cache, to load as a library: nobody else can change it."""
    path = _private("loaded") / f"{hashlib.sha256(content).hexdigest()}.so"
    try:
        intact = path.read_bytes() == content
    except OSError:
        intact = False
    if not intact:
        with atomic(path) as part:
            part.write_bytes(content)
    return path


def cache_dir() -> Path:
    """onnxfuse's folder in the user's cache, or ONNXFUSE_CACHE."""
    if own := os.environ.get("ONNXFUSE_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onnxfuse"


# --- compilers ---------------------------------------------------------------------------------------------------------


def _nvcc_places() -> Iterator[Path]:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home and os.path.isabs(home)]
    if on_path := on_absolute_path("nvcc"):
        candidates.append(Path(on_path))
    # The wheels put their parts together under the namespace package `nvidia`, in a folder for each CUDA major.
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations if spec else None) or []:
        candidates += sorted(Path(location).glob("cu*/bin/nvcc"), reverse=True)
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return (path.resolve() for path in candidates if path.is_file())


def on_absolute_path(program: str) -> str | None:
    """Where PATH has a program. Its entries that depend on the current folder (empty, or ".") are passed over: files lie there that others
    sent.
    """
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if os.path.dirname(program) and not os.path.isabs(program):
        return None
    return shutil.which(program, path=os.pathsep.join(entry for entry in entries if os.path.isabs(entry)))


@cache
def _inspect_nvcc(path: Path) -> Nvcc:
    release = re.search(r"release ([\d.]+), V([\d.]+)", _output([path, "--version"]))
    if not release:
        raise MissingHere(f"{path} does not say its version")
    if int(release[1].split(".")[0]) < 12:
        raise MissingHere(f"{path} is of CUDA {release[1]}, and 12.0 is needed")
    architectures = re.findall(r"sm_(\d+)\b", _output([path, "--list-gpu-code"]))
    home = path.parent.parent
    # Toolkits have lib64 or targets/, wheels have lib, distributions a folder for each kind of machine.
    for pattern in ("lib64", "lib", "targets/*/lib", "lib/*-linux-gnu"):
        for folder in sorted(home.glob(pattern)):
            if (folder / "libcudart_static.a").is_file():
                return Nvcc(path, folder / "libcudart_static.a", release[2], frozenset(map(int, architectures)))
    raise MissingHere(f"{path} has no libcudart_static.a beside it (package nvidia-cuda-runtime)")


@dataclass(frozen=True)
class _Toolchain:
    compile: list[str]  # commands without their files
    link: list[str]
    cudart: Path
    release: str
    key: str


def _toolchain(sm: int, and_newer: bool) -> _Toolchain:
    name = os.environ.get("CXX") or "g++"
    cxx = on_absolute_path(name)
    if not cxx:
        raise MissingHere(f"{name}: no such C++ compiler; install g++ (Debian and Ubuntu: `apt-get install g++`), or set CXX")
    nvcc = find_nvcc(sm)
    version = _output([Path(cxx), "--version"]).splitlines()[0]
    for path in (nvcc.path, nvcc.cudart, Path(cxx)):
        if not _PLAIN.fullmatch(str(path)):
            raise MissingHere(
                f"{path}: nvcc hands its command lines to a shell, and this path has a special character; install it elsewhere"
            )
    compiling, linking = _compile_command(nvcc, Path(cxx), _codes(nvcc, sm, and_newer)), _link_command(Path(cxx))
    key = hashlib.sha256(json.dumps([nvcc.release, version, compiling[3:], linking[1:]]).encode()).hexdigest()
    return _Toolchain(compiling, linking, nvcc.cudart, nvcc.release, key)


# What stands for itself in a shell, and within the comma lists of -Xcompiler and -Wl.
_PLAIN = re.compile(r"[\w./+@:=-]+")
# Machine code of one runs on every later one of the same major number.
_FAMILIES = (80, 90, 100, 110, 120)


def _codes(nvcc: Nvcc, sm: int, and_newer: bool) -> list[str]:
    """The values of -gencode: machine code of this architecture only, or of all from it on, and PTX of the last."""
    codes = [_code(sm)]
    if and_newer:
        newer = [family for family in _FAMILIES if family > sm and family in nvcc.architectures]
        codes += [_code(family) for family in newer]
        last = max([sm, *newer])
        codes.append(f"arch=compute_{last},code=compute_{last}")
    return codes


def _code(sm: int) -> str:
    """Machine code of an architecture; of Hopper with the instructions that it alone has (wgmma), which every GPU of sm_90 runs."""
    name = "90a" if sm == 90 else str(sm)
    return f"arch=compute_{name},code=sm_{name}"


def _output(command: list[Path | str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as fault:
        raise MissingHere(f"{command[0]} does not run: {fault}") from fault
    return done.stdout


def _compile_command(nvcc: Nvcc, cxx: Path, codes: Iterable[str]) -> list[str]:
    """For .cu and .cpp alike: nvcc knows where its headers are."""
    return [
        str(nvcc.path), "-ccbin", str(cxx), "-std=c++17", "-O3", *(part for code in codes for part in ("-gencode", code)),
        "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden,-ffunction-sections,-fdata-sections", "-I", "source/0", "-c",
    ]  # fmt: skip


def _link_command(cxx: Path) -> list[str]:
    """The CUDA and C++ runtimes are linked in, so that the library needs libc alone. TensorRT's is not linked at all."""
    return [
        str(cxx), "-shared", "-s", "-static-libstdc++", "-static-libgcc", "-Wl,--version-script=source/0/exports.map",
        "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,--no-undefined", "-o", LIBRARY, "-lrt", "-lpthread", "-ldl",
    ]  # fmt: skip


# --- compiling ---------------------------------------------------------------------------------------------------------


def _compile(sm: int, toolchain: _Toolchain, place: Path, progress: Progress | None) -> None:
    """Compile and link into `place`: the library, and library.json with its hash and kernels.

    The compilers work on a copy of the sources, under names and in a folder that mean nothing to a shell: nvcc puts file names and the
    current folder into command lines that a shell reads.
    """
    library = place / LIBRARY
    with _workshop(place) as work:
        kernels = _compile_units(toolchain, _copy_sources(work / "source"), work, progress)
        if work != place:
            shutil.move(work / LIBRARY, library)
    note = {
        "schema": 1,
        "sm": sm,
        "sha256": _hash_file(library),
        "ops": [op.name for op in ops()],
        "compiler": f"nvcc {toolchain.release}",
        "kernels": [asdict(use) for use in sorted(kernels, key=lambda use: use.name)],
    }
    (place / "library.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def _compile_generated(text: str, toolchain: _Toolchain, options: Sequence[str], place: Path) -> None:
    with _workshop(place) as work:
        _copy_sources(work / "source")
        (work / "generated.cu").write_text(text, encoding="utf-8")
        command = [part for part in toolchain.compile if part != "-c"]
        (work / "keep").mkdir()
        said = _run([*command, *options, *_keep("keep"), "-fatbin", "generated.cu", "-o", "generated.fatbin"], "0/generated.cu", work)
        kernels = _with_code(parse_ptxas(said), work / "keep")
        image = (work / "generated.fatbin").read_bytes()
        for name in ("generated.cu", "generated.fatbin"):
            (work / name).unlink()
        shutil.rmtree(work / "keep")
    (place / "code").write_bytes(image)
    note = {"schema": 1, "sha256": hashlib.sha256(image).hexdigest(), "kernels": [asdict(use) for use in kernels]}
    (place / "code.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def _load_generated(place: Path) -> Generated | None:
    try:
        note, image = json.loads((place / "code.json").read_text(encoding="utf-8")), (place / "code").read_bytes()
        known = Generated(image, tuple(KernelUse(**use) for use in note["kernels"]))
        return known if hashlib.sha256(image).hexdigest() == note["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(folder: str) -> list[str]:
    """Has nvcc leave its machine code in a folder: ptxas says nothing of the code's size."""
    return ["--keep", "--keep-dir", folder]


_ARCHITECTURE = re.compile(r"_(\d+)\.cubin$")


def _with_code(uses: Sequence[KernelUse], folder: Path) -> list[KernelUse]:
    """`uses` with the size of their code and their bound on threads, from the machine code in `folder`."""
    found: dict[tuple[str, int], cubin.Code] = {}
    for path in sorted(folder.glob("*.cubin")):
        match = _ARCHITECTURE.search(path.name)  # absent where there is one architecture
        codes = cubin.kernels(path.read_bytes())
        for use_name, code in zip(_demangle(list(codes)), codes.values(), strict=True):
            found.update({(use_name, sm): code for sm in ([int(match[1])] if match else {use.sm for use in uses})})
    none = cubin.Code(0, 0)
    return [replace(use, code=(code := found.get((use.name, use.sm), none)).size, threads=code.threads) for use in uses]


@contextlib.contextmanager
def _workshop(place: Path) -> Iterator[Path]:
    """`place` itself; where its path is not plain, a folder among the system's temporary ones. Sources and objects are removed."""
    if _PLAIN.fullmatch(str(place)):
        yield place
        shutil.rmtree(place / "source")
        return
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if _PLAIN.fullmatch(folder) and os.access(folder, os.W_OK):
            with tempfile.TemporaryDirectory(prefix="onnxfuse-", dir=folder) as work:
                yield Path(work)
            return
    raise MissingHere(
        f"{place}: nvcc hands its command lines to a shell, and this path has a special character; set ONNXFUSE_CACHE to another"
    )


def _compile_units(toolchain: _Toolchain, units: Sequence[str], work: Path, progress: Progress | None) -> list[KernelUse]:
    """Compiles every unit and links the library, all in `work`; what ptxas says of the kernels."""
    objects = [f"{index}.o" for index in range(len(units))]
    kernels: list[KernelUse] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = {pool.submit(_compile_unit, toolchain, unit, target, work): unit for unit, target in zip(units, objects, strict=True)}
        try:
            for done, job in enumerate(as_completed(jobs), start=1):
                name = _without_root(jobs[job])
                used = job.result()
                refuse_spills(used, allowed_spills((work / "source" / jobs[job]).parent), f"nvcc {toolchain.release}")
                kernels += used
                if progress:
                    progress(name, done, len(units))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    # The static archive comes after the objects that need it.
    _run([*toolchain.link[:3], *objects, str(toolchain.cudart), *toolchain.link[3:]], f"0/{LIBRARY}", work)
    for path in objects:
        (work / path).unlink()
    return kernels


def _compile_unit(toolchain: _Toolchain, unit: str, target: str, work: Path) -> list[KernelUse]:
    """Compiles one file; its kernels."""
    keep = f"{target}.keep"
    says_size = _keep(keep) if unit.endswith(".cu") else []
    (work / keep).mkdir()
    said = _run([*toolchain.compile, *says_size, f"source/{unit}", "-o", target], unit, work)
    uses = _with_code(parse_ptxas(said), work / keep)
    shutil.rmtree(work / keep)
    return uses


def _copy_sources(place: Path) -> list[str]:
    """Copies every root's sources to PLACE/0, PLACE/1...; the files to compile, the long ones first. BadInput for a name not plain."""
    for number, root in enumerate(_roots()):
        for path in _source_files(root):
            name = path.relative_to(root).as_posix()
            if not _PLAIN.fullmatch(name):
                raise BadInput(f"{path}: a plugin source with a special character in its name; rename it")
            target = place / str(number) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return [path.relative_to(place).as_posix() for suffix in ("*.cu", "*.cpp") for path in sorted(place.rglob(suffix))]


def _without_root(unit: str) -> str:
    """The file's name within its folder of sources."""
    return unit.partition("/")[2]


def _run(command: list[str], unit: str, work: Path) -> str:
    """Run a compiler in `work`, its temporary files there, too; returns what it wrote to stderr. A failure leaves its output in a log."""
    environment = {**os.environ, "TMPDIR": "."}
    name = _without_root(unit)
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode == 0:
        return done.stderr
    said = done.stdout + done.stderr
    log = _private("logs") / f"{name.replace('/', '-')}.log"
    log.write_text(f"{' '.join(command)}\n\n{said}", encoding="utf-8")
    lines = [line for line in said.splitlines() if re.search(r"error|fatal|undefined|No space", line)]
    reason = lines[0] if lines else f"status {done.returncode}"
    raise MissingHere(f"{name}: {Path(command[0]).name} failed: {reason}; the whole output is in {log}")


_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for 'sm_(?P<sm>\d+)a?'")
_PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
_STACK = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_USED = re.compile(r"Used (?P<registers>\d+) registers")
_SMEM = re.compile(r"(?P<smem>\d+) bytes smem")


def parse_ptxas(said: str) -> list[KernelUse]:
    """What `ptxas -v` reports of every function, kernels' names demangled.

    Each kernel has three lines, in this order: its name and architecture, stack and spills, registers and shared memory. A device
    function that was not inlined has the second only, within a kernel's lines or outside: it is listed with 0 registers.
    """
    functions: dict[tuple[str, int], dict[str, int]] = {}
    entry = current = ("", 0)
    for line in said.splitlines():
        if match := _ENTRY.search(line):
            entry = match["name"], int(match["sm"])
            functions[entry] = {}
        elif match := _PROPERTIES.search(line):
            current = match["name"], entry[1]
            functions.setdefault(current, {})
        elif (match := _STACK.search(line)) and current in functions:
            functions[current].update(stack=int(match["stack"]), spill_stores=int(match["stores"]), spill_loads=int(match["loads"]))
        elif (match := _USED.search(line)) and entry in functions:
            smem = _SMEM.search(line)
            functions[entry].update(registers=int(match["registers"]), smem=int(smem["smem"]) if smem else 0)
    absent = {"registers": 0, "spill_stores": 0, "spill_loads": 0, "stack": 0, "smem": 0}
    names = _demangle([name for name, _ in functions])
    return [
        KernelUse(name=name, sm=sm, **{**absent, **use}) for name, (_, sm), use in zip(names, functions, functions.values(), strict=True)
    ]


def _demangle(names: list[str]) -> list[str]:
    tool = on_absolute_path("c++filt")
    if not names or not tool:
        return names
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return [_short(line) for line in lines] if len(lines) == len(names) else names


def _short(name: str) -> str:
    """`void onnxfuse::f<__half, 8>(onnxfuse::Args<__half>)` as `f<half, 8>`."""
    name = re.sub(r"\(onnxfuse::\w+\)", "", name.removeprefix("void ").replace("__nv_bfloat16", "bfloat16"))
    depth = 0
    for index, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            name = name[:index]
            break
    return name.replace("onnxfuse::", "").replace("__half", "half")


_ALLOW = re.compile(r"//\s*allow-spill\s+(?P<kernel>[^:\n]+):\s*(?P<reason>\S.*)")


def allowed_spills(folder: Path) -> dict[str, str]:
    """The comments `// allow-spill KERNEL: reason` in a plugin's CUDA files: kernel name (or its beginning) to reason."""
    files = sorted(folder.glob("*.cu")) + sorted(folder.glob("*.cuh"))
    found = (match for path in files for match in _ALLOW.finditer(path.read_text(encoding="utf-8")))
    return {match["kernel"].strip(): match["reason"].strip() for match in found}


def refuse_spills(kernels: Iterable[KernelUse], allowed: dict[str, str], compiler: str) -> None:
    """Raise MissingHere for the first kernel that spills registers to memory without leave."""
    for use in kernels:
        spilled = use.spill_stores + use.spill_loads
        if spilled and not any(use.name.startswith(name) for name in allowed):
            raise MissingHere(
                f"kernel {use.name}: {compiler} spills {spilled} bytes of registers for sm_{use.sm}, which would make it slow; "
                f"{NVCC_REMEDY.split(',')[0]}"
            )


# --- the cache ---------------------------------------------------------------------------------------------------------


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash_sources(roots: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for root in roots:
        for path in _source_files(root):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


_SOURCES = {".cu", ".cuh", ".cpp", ".h", ".map"}


def _source_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.suffix in _SOURCES)


def _private(name: str) -> Path:
    """The folder `name` of the cache, made if need be. Code is loaded from it, so nobody else may write there."""
    folder = cache_dir() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as fault:
        raise BadInput(f"{folder}: {fault.strerror}; set ONNXFUSE_CACHE to a folder that can be written") from fault
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise BadInput(f"{folder}: others can write there; set ONNXFUSE_CACHE to a folder of your own")
    return folder


@contextlib.contextmanager
def _new_folder(place: Path) -> Iterator[Path]:
    """A temporary folder beside `place` that takes its name, whole, when the block ends; gone if it fails.

    The caller holds the lock of `place`: what another process left of such a folder, it left when it was killed.
    """
    prefix = f".building-{place.name}-"
    for left in place.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
    try:
        yield work
        if place.exists():  # moved away as a whole: removing it takes time, in which a kill would leave half of it
            place.rename(work.with_name(f"{work.name}-old"))
        work.rename(place)
        shutil.rmtree(work.with_name(f"{work.name}-old"), ignore_errors=True)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _load(place: Path) -> Library | None:
    """The library in this folder, or None where there is none, or its file is not the one that was built."""
    try:
        note = json.loads((place / "library.json").read_text(encoding="utf-8"))
        library = Library(
            path=place / LIBRARY,
            sm=note["sm"],
            sha256=note["sha256"],
            kernels=tuple(KernelUse(**use) for use in note["kernels"]),
            ops=tuple(note["ops"]),
            compiler=note["compiler"],
        )
        intact = _hash_file(library.path) == library.sha256
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return library if intact else None
