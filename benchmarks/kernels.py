"""The plugin kernels alone: time and share of a copy's bandwidth, at small, middle and large shapes.

    python -m benchmarks.kernels [--samples N] [--only NAME] [--dtype TYPE...] [--size SIZE...] [--out FILE]

Needs a GPU, torch and the CUDA compiler. A kernel runs over rotating sets of buffers that together are several times the L2, so that
it reads from memory; small shapes are timed warm as well, since in an engine their inputs come from the L2. Launches are replayed from a
CUDA graph and timed with events. Each sample is followed by one of a device-to-device copy of 1 GiB, counting bytes read and bytes
written, and the share is of the two together; so is the share of an fp16 matrix product, for kernels that are bound by arithmetic.

Rows are merged into FILE by kernel, type, shape, threads and cache. Without --out they are printed as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.attention_cases import attentions
from benchmarks.encoder_cases import encoders
from benchmarks.epilogue_cases import epilogues
from benchmarks.kernel_cases import CASES, CODES, FEW, Case
from benchmarks.recurrence_cases import recurrences
from onnxfuse import gpus, plugins
from onnxfuse.bench import stats
from onnxfuse.bench.timing import bandwidth_mark, interleave, judge
from onnxfuse.bench.watch import Watch
from onnxfuse.engine.trt import EngineFault
from onnxfuse.errors import BadInput, MissingHere, OnnxfuseError
from onnxfuse.graph.files import atomic

COLD = 3
"""The buffers of a cold run are this many times the L2."""
COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192
LAUNCHES = 20
"""Launches of one sample, at least."""
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference from float32 of torch, relative to 1 + |value|: a few roundings of the type. tests/plugins holds them tighter."""

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 if a kernel failed or disagrees."""
    options = _parser().parse_args(argv)
    command = " ".join(["python -m benchmarks.kernels", *(sys.argv[1:] if argv is None else argv)])
    try:
        return _run(options, command)
    except OnnxfuseError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Time the plugin kernels alone.")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--only", default="", help="a part of the kernel's name")
    parser.add_argument("--dtype", nargs="+", choices=list(CODES), default=list(CODES))
    parser.add_argument("--size", nargs="+", choices=["small", "middle", "large"], default=["small", "middle", "large"])
    parser.add_argument(
        "--threads",
        action="store_true",
        help="also time other numbers of threads a row, at the small shapes, and other tactics of attention; in float16",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="results file to merge the rows into")
    parser.add_argument("--commit", default=None, help="the commit measured, where git cannot say it")
    return parser


def _run(options: argparse.Namespace, command: str) -> int:
    try:
        import torch
    except ImportError:
        raise MissingHere("torch is not installed; `pip install torch`") from None
    if not torch.cuda.is_available():
        raise MissingHere("no GPU here; run it on a machine with one")
    start = time.monotonic()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    major, minor = torch.cuda.get_device_capability()
    library = plugins.build(10 * major + minor)
    loaded = ctypes.CDLL(str(library.path))
    bench = Bench(torch, options.samples, gpus.resolve("auto").memory_gbps)
    rows = []
    for dtype in options.dtype:
        for case in _cases(loaded, dtype, options):
            for cache in caches(case):
                rows.append(bench.row(case, cache))
                print(line(rows[-1]), file=sys.stderr, flush=True)
    found = {
        "schema": 1,
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "driver": _driver(),
            "compiler": library.compiler,
            "copy_gbps": round(bench.copy_gbps(), 1),
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "commit": options.commit or results.commit(),
            "seconds": round(time.monotonic() - start, 1),
        },
        "rows": rows,
    }
    if options.out is None:
        print(json.dumps(found, indent=1))
    else:
        with atomic(options.out) as part:
            part.write_text(json.dumps(merged(options.out, found), indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.get("agrees", False) for row in rows) else 1


def _cases(library: ctypes.CDLL, dtype: str, options: argparse.Namespace) -> Iterator[Case]:
    for cases in (*CASES, recurrences, epilogues, encoders, attentions):
        for case in cases(library, dtype, options.threads and dtype == "float16"):
            if options.only in case.kernel and case.shape.size in options.size:
                yield case


def caches(case: Case) -> tuple[str, ...]:
    """Small cases are timed warm, too."""
    return ("cold", "warm") if sum(case.reads) + sum(case.writes) < 4 * FEW and case.shape.size == "small" else ("cold",)


def _driver() -> str:
    from onnxfuse.engine import trt

    return trt.gpu().driver


class Bench:
    """Times cases beside a copy. `memory_gbps` is what the card's memory can do, None where that is not known."""

    def __init__(self, torch: Any, samples: int, memory_gbps: float | None) -> None:
        self._torch, self._samples, self._memory_gbps = torch, samples, memory_gbps
        self._copies: list[float] = []
        source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        # On the stream and not in a graph, where it takes a slower way.
        self._copy = _events(torch, lambda: target.copy_(source))
        self._matmul: Callable[[int], float] | None = None
        for _ in range(3):
            self._copy(1)

    def copy_gbps(self) -> float:
        """What the copy reached over the whole run."""
        return 2 * COPY_BYTES / float(np.median(self._copies)) / 1e6

    def row(self, case: Case, cache: str) -> Row:
        """Median and interval of one launch in microseconds, and the share of the copy beside it; "failed" where a launch failed."""
        head = {
            "kernel": case.kernel,
            "dtype": case.dtype,
            "rows": case.shape.rows,
            "width": case.shape.width,
            "shape": case.shape.name,
            "size": case.shape.size,
            "threads_per_row": case.threads,
            "cache": cache,
        }
        try:
            return {**head, **self._measured(case, cache)}
        except (EngineFault, RuntimeError) as fault:
            return {**head, "failed": " ".join(str(fault).split())}

    def _measured(self, case: Case, cache: str) -> Row:
        torch = self._torch
        inputs, outputs = self._buffers(case, 1 if cache == "warm" else self._sets(case))
        launches = max(LAUNCHES, len(inputs))
        kernel = _graph(torch, case, inputs, outputs, launches)

        def each(count: int) -> float:
            if cache == "warm":
                kernel(1)  # the copy before has emptied the caches
            return kernel(count) / launches

        runners = {"kernel": each, "copy": self._copy}
        if case.flops:
            runners["matmul"] = self._matmul_runner()
        error = self._error(case, inputs[0], outputs[0], kernel)
        for _ in range(3):
            kernel(1)
        watch = Watch()
        watch.look()
        taken = interleave(runners, dict.fromkeys(runners, 1), self._samples, watch.look)
        watch.look()
        self._copies += taken["copy"]
        return row_of(case, cache, taken, error, self._memory_gbps, watch.marks(), watch.notes())

    def _sets(self, case: Case) -> int:
        l2 = self._torch.cuda.get_device_properties(0).L2_cache_size
        return int(max(2, -(-COLD * l2 // case.moved)))

    def _buffers(self, case: Case, sets: int) -> tuple[list[list[Any]], list[list[Any]]]:
        """Random numbers and not zeros: zeros take less power, and flatter."""
        torch = self._torch
        kind = getattr(torch, case.dtype)
        inputs = [[torch.randn(elements, device="cuda").to(kind) for elements in case.reads] for _ in range(sets)]
        outputs = [[torch.full((elements,), float("nan"), dtype=kind, device="cuda") for elements in case.writes] for _ in range(sets)]
        return inputs, outputs

    def _error(self, case: Case, inputs: Sequence[Any], outputs: Sequence[Any], kernel: Callable[[int], float]) -> float:
        """Largest difference of what the timed graph itself writes from the reference, relative to 1 + |value|; NaN counts as infinite."""
        torch = self._torch
        for output in outputs:
            output.fill_(float("nan"))
        kernel(1)
        wanted = case.reference([tensor.float() for tensor in inputs])
        worst = 0.0
        for got, want in zip(outputs, wanted, strict=False):  # a reference may give more than this case writes
            wide, flat = got.float(), want.reshape(-1)
            difference = ((wide - flat).abs() / (1 + flat.abs())).nan_to_num(nan=float("inf")).max()
            worst = max(worst, float(difference))
        torch.cuda.synchronize()
        return worst

    def _matmul_runner(self) -> Callable[[int], float]:
        if self._matmul is None:
            torch = self._torch
            a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.float16) for _ in range(2))
            out = torch.empty_like(a)
            self._matmul = _events(torch, lambda: torch.matmul(a, b, out=out))
            for _ in range(3):
                self._matmul(1)
        return self._matmul


def row_of(
    case: Case, cache: str, taken: Mapping[str, Sequence[float]], error: float, memory_gbps: float | None, marks: Sequence[str],
    notes: Sequence[str] = (),
) -> Row:  # fmt: skip
    """A row's figures from its samples (milliseconds), pure. Copy and kernel are paired, so that a drift that both saw cancels."""
    each = stats.bootstrap_median(taken["kernel"])
    beside = stats.bootstrap_ratio(taken["copy"], taken["kernel"])
    scale = case.moved / (2 * COPY_BYTES)
    tolerance = case.roundings * TOLERANCE[case.dtype]
    agrees = error <= tolerance
    found = list(marks) + judge({"kernel": taken["kernel"], "copy": taken["copy"]})
    if not agrees:
        found.append(f"outputs disagree: error {error:.3g} is above {tolerance:.3g}")
    if memory_gbps is not None:
        copied = bandwidth_mark(2 * COPY_BYTES, stats.bootstrap_median(taken["copy"]).median, memory_gbps)
        # A warm case is one that the caches serve; in a cold one they must not.
        own = bandwidth_mark(case.moved, each.median, memory_gbps) if cache == "cold" else None
        found += [mark for mark in (own, f"copy: {copied}" if copied else None) if mark]
    share = {name: round(scale * value, 4) for name, value in (("median", beside.median), ("low", beside.low), ("high", beside.high))}
    row: Row = {
        "microseconds": round(1e3 * each.median, 3),
        "low": round(1e3 * each.low, 3),
        "high": round(1e3 * each.high, 3),
        "gbps": round(case.moved / each.median / 1e6, 1),
        "copy_gbps": round(2 * COPY_BYTES / stats.bootstrap_median(taken["copy"]).median / 1e6, 1),
        "share_of_copy": share["median"],
        "share_low": share["low"],
        "share_high": share["high"],
    }
    if case.flops:
        product = 2 * MATMUL_SIZE**3
        against = stats.bootstrap_ratio(taken["matmul"], taken["kernel"])
        row["tflops"] = round(case.flops / each.median / 1e9, 2)
        row["share_of_matmul"] = round(case.flops / product * against.median, 4)
    return {**row, "agrees": agrees, "error": error if error < float("inf") else None, "marks": found, "notes": list(notes)}


def line(row: Row) -> str:
    """A row in one line for the terminal."""
    head = f"{row['kernel']:24} {row['dtype']:8} {row['rows']:6} x {row['width']:5} threads {row['threads_per_row']:3} {row['cache']}"
    if "failed" in row:
        return f"{head}  failed: {row['failed']}"
    text = f"{head}  {row['microseconds']:8.2f} us  {row['gbps']:7.0f} GB/s  {row['share_of_copy']:6.3f} of copy"
    text += f" [{row['share_low']:.3f}, {row['share_high']:.3f}]"
    if "share_of_matmul" in row:
        text += f"  {row['tflops']:.1f} TFLOP/s, {row['share_of_matmul']:.3f} of matmul"
    return text + "".join(f"\n    mark: {mark}" for mark in row["marks"])


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("kernel", "dtype", "rows", "width", "threads_per_row", "cache"))


def merged(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """The file at `path` with the rows of `found` in the place of those of the same key. BadInput where it is something else."""
    try:
        old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
        kept = [row for row in old if key(row) not in {key(new) for new in found["rows"]}]
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{path}: not a results file of kernels; move it away") from None
    return {**found, "rows": [*kept, *found["rows"]]}


def _events(torch: Any, launch: Callable[[], object]) -> Callable[[int], float]:
    """Milliseconds of so many launches of what `launch` launches."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(count: int) -> float:
        begin.record()
        for _ in range(count):
            launch()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return run


def _graph(
    torch: Any, case: Case, inputs: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any]], launches: int
) -> Callable[[int], float]:
    """As `_events`, of a CUDA graph of `launches` launches over the sets of buffers in turn. EngineFault if a launch fails."""

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for index in range(launches):
            read, written = ([tensor.data_ptr() for tensor in sets[index % len(sets)]] for sets in (inputs, outputs))
            status = case.launch(read, written, stream)
            if status:
                raise EngineFault(f"launch failed: cudaError_t {status}")

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _events(torch, graph.replay)


if __name__ == "__main__":
    sys.exit(main())
