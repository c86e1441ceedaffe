"""Measure the suite on the machine at hand, and write benchmarks/results/GPU-trtVERSION.json.

    python -m benchmarks                                  every model of the suite that is here, fp16, policy measure
    python -m benchmarks bert_base_b1_s128 --policy all   one of them, with every legal fusion
    python -m benchmarks --resume --budget 9              go on where the last call stopped, start no row after 9 minutes
    python -m benchmarks --repeat                         measure once more what is in the file, and say whether the verdicts agree
    python -m benchmarks --list                           what there is, and the commands that bring what is not

Rows are measured in the order in which they are named, and merged into the file one by one, so that an interrupted run keeps what it
has measured, and a part can be measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.measure import child, in_child
from benchmarks.suite import BY_NAME, ROOT, SUITE, Candidate, Entry
from onnxfuse.bench.child import last_json, why
from onnxfuse.errors import BadInput, MissingHere, OnnxfuseError
from onnxfuse.graph.files import atomic

OTHERS = ("trt_fp16_flag", "pytorch_graph")
POLICIES = ("measure", "all", "proven", "none")
SAMPLES = 200
"""The least that counts."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 if a row failed or disagrees."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.list:
            return _list()
        return _run(arguments, shlex.join(["python", "-m", "benchmarks", *(sys.argv[1:] if argv is None else argv)]))
    except OnnxfuseError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_status
    except KeyboardInterrupt:
        print("error: interrupted; rows measured so far are in the file", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the suite on the machine at hand.")
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="which models, in this order (default: all that are here)")
    add("--precision", nargs="+", default=["fp16"], choices=["keep", "fp32", "fp16", "bf16"])
    add("--policy", nargs="+", type=_policy, default=["measure"], help="measure, all, proven, none, or only:FUSION (default: measure)")
    add("--samples", type=int, default=SAMPLES, help=f"samples of each engine (default: {SAMPLES}; fewer are marked)")
    add("--others", nargs="*", default=list(OTHERS), choices=OTHERS, help="what else to time (default: both)")
    add("--skip-extras", action="store_const", dest="others", const=[], help="time nothing else: the same as --others alone")
    add("--budget", type=_time, default=0, metavar="MINUTES", help="start no row after so many minutes, and no candidate of a search")
    add("--search-minutes", type=_time, default=15, metavar="MINUTES", help="policy measure: start no candidate of a row after so long")
    add("--row-timeout", type=_time, default=1800, metavar="SECONDS", help="give a row up after so long")
    add("--resume", action="store_true", help="leave out rows that the file has from this commit, driver and TensorRT")
    add("--repeat", action="store_true", help="measure rows of the file once more, and write beside them whether the verdicts agree")
    add("--out", type=Path, default=results.FOLDER, metavar="FOLDER", help="where the results file is")
    add("--work", type=Path, default=ROOT / "build" / "benchmarks", metavar="FOLDER", help="models, engines and results of searches")
    add("--timing-cache", type=Path, metavar="FILE", help="TensorRT's timing cache, read and written (default: in the work folder)")
    add("--commit", default=None, help="the commit measured, where git cannot say it")
    add("--list", action="store_true", help="list the suite, measure nothing")
    return parser


def _policy(text: str) -> str:
    from onnxfuse.fusions import NAMES

    if text not in POLICIES and text not in {f"only:{name}" for name in NAMES}:
        raise argparse.ArgumentTypeError(f"{text}: give {', '.join(POLICIES)}, or only:FUSION with one of {', '.join(NAMES)}")
    return text


def _time(text: str) -> float:
    """A time of any unit: finite, and not negative."""
    try:
        length = float(text)
    except ValueError:
        length = math.nan
    if not 0 <= length < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: no time; give a number, as in 15")
    return length


def _run(arguments: argparse.Namespace, command: str) -> int:
    clock = Clock(arguments.budget)
    entries = _chosen(arguments.models)
    arguments.work.mkdir(parents=True, exist_ok=True)
    machine = {**_machine(arguments.work), **_provenance(command, arguments.commit)}
    path = arguments.out / results.file_name(machine["gpu"], machine["tensorrt"])
    table = results.load(path)
    print(
        f"{machine['gpu']}, driver {machine['driver']}, TensorRT {machine['tensorrt']}: "
        f"copy {machine['copy_gbps']} GB/s, fp16 matmul {machine['matmul_tflops']} TFLOP/s ({clock.spent():.0f} s)",
        *(f"mark: {mark}" for mark in machine["marks"]),
        sep="\n    ",
        flush=True,
    )
    good = True
    for candidate in _wanted(_candidates(entries, arguments, machine), table, machine, arguments):
        if clock.is_over():
            print(f"the budget of {arguments.budget:g} minutes is spent; not measured: {candidate.name} and what follows")
            break
        row = _measured(candidate, arguments, clock, machine)
        if arguments.repeat:
            row = results.repeated(results.find(table, row) or row, row)
        table = results.merged(table, machine, row)
        results.save(table, path)
        print(line(row), flush=True)
        good = good and row.get("agrees", False) and row.get("repeat", {}).get("agrees", True)
    print(f"written to {path} after {clock.spent():.0f} s")
    return 0 if good else 1


class Clock:
    """Seconds since the start, and the budget in minutes; 0 is none."""

    def __init__(self, budget: float) -> None:
        self._start, self._budget = time.monotonic(), budget

    def spent(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        """Minutes."""
        return self._budget - self.spent() / 60 if self._budget else float("inf")

    def is_over(self) -> bool:
        return self.left() <= 0


def _measured(candidate: Candidate, arguments: argparse.Namespace, clock: Clock, machine: dict[str, Any]) -> results.Row:
    """The row of a candidate, with what it was measured on and how long that took."""
    print(f"{candidate.name}, {candidate.precision}, {candidate.policy} ({clock.spent():.0f} s)", flush=True)
    start = time.monotonic()
    limited = dataclasses.replace(candidate, search_minutes=min(candidate.search_minutes, clock.left()))
    row = in_child(limited, arguments.row_timeout, _Steps(start))
    row["measured"] = {name: machine[name] for name in ("date", "commit", "driver", "copy_gbps", "matmul_tflops")}
    row["measured"]["seconds"] = round(time.monotonic() - start, 1)
    if "failed" not in row:
        against = [*machine["marks"], *_too_few(row["samples"])]
        row["marks"] += against
        if against:  # a marked row makes no verdict
            row["verdicts"] = []
    return row


class _Steps:
    """Says what a row does now, and when."""

    def __init__(self, start: float) -> None:
        self._start, self._last = start, ""

    def __call__(self, step: str) -> None:
        if step and step != self._last:
            self._last = step
            print(f"    {time.monotonic() - self._start:6.0f} s  {step}", flush=True)


def _too_few(samples: int) -> list[str]:
    return [f"{samples} samples; {SAMPLES} are the least that counts"] if samples < SAMPLES else []


def _wanted(
    candidates: Sequence[Candidate], table: results.Results, machine: Mapping[str, Any], arguments: argparse.Namespace
) -> Iterator[Candidate]:
    """Those that --resume and --repeat leave."""
    for candidate in candidates:
        known = results.find(table, {"name": candidate.name, "precision": candidate.precision, "policy": candidate.policy})
        current = known is not None and results.is_of(known, machine)
        if arguments.repeat:
            if known is None or "failed" in known:
                print(f"{candidate.name}, {candidate.precision}, {candidate.policy}: not in the file, so that there is nothing to repeat")
            elif not (arguments.resume and "repeat" in known and current):
                yield candidate
        elif not (arguments.resume and current):
            yield candidate


def line(row: results.Row) -> str:
    """A row in one line for the terminal."""
    head = f"{row['name']:24} {row['precision']:5} {row['policy']:20}"
    if "failed" in row:
        return f"{head} failed: {row['failed']}"
    ratio = row["ratio"]
    text = (
        f"{head} automatic {row['automatic_ms']['median']:.4f} ms, fused {row['fused_ms']['median']:.4f} ms, "
        f"ratio {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] {row['verdict']}, "
        f"{'agrees' if row['agrees'] else 'DISAGREES'} (max abs {_figure(row['max_abs'])}, automatic "
        f"{_figure(row['automatic_max_abs'])})"
    )
    if "repeat" in row:
        text += f"\n    again: {results.repeat_line(row)}"
    if row.get("seconds"):
        text += "\n    seconds: " + ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in row["seconds"].items())
    return text + "".join(f"\n    mark: {mark}" for mark in row["marks"]) + "".join(f"\n    note: {note}" for note in row["notes"])


def _figure(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.3g}"


def _chosen(names: Sequence[str]) -> list[Entry]:
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise BadInput(f"no model {unknown[0]} in the suite; there are: {', '.join(BY_NAME)}")
    entries = [BY_NAME[name] for name in names]
    for entry in entries:
        if not entry.model.is_file():
            raise MissingHere(f"{entry.name} is not here ({entry.model}); `{entry.origin}`")
    here = entries or [entry for entry in SUITE if entry.model.is_file()]
    if not here:
        raise MissingHere("no model of the suite is here; `python -m benchmarks --list` says how to get them")
    return here


def _candidates(entries: Sequence[Entry], arguments: argparse.Namespace, machine: dict[str, Any]) -> list[Candidate]:
    name = f"{results.file_name(machine['gpu'], machine['tensorrt']).removesuffix('.json')}.timing-cache"
    cache = arguments.timing_cache or arguments.work / name
    # A repetition finds no result of the first search to go on from.
    again = "-again" if arguments.repeat else ""
    return [
        Candidate(
            name=entry.name,
            model=str(entry.model),
            inputs=str(entry.inputs) if entry.inputs is not None else None,
            dims=dict(entry.dims),
            precision=precision,
            policy=policy,
            samples=arguments.samples,
            work=str((arguments.work / f"{entry.name}-{precision}-{policy.replace(':', '-')}{again}").resolve()),
            timing_cache=str(cache.resolve()),
            search_minutes=arguments.search_minutes,
            others=tuple(o for o in arguments.others if _applies(o, entry, precision)),
        )
        for entry in entries
        for precision in arguments.precision
        for policy in arguments.policy
    ]


def _applies(other: str, entry: Entry, precision: str) -> bool:
    return entry.torch if other == "pytorch_graph" else precision == "fp16"


def _machine(work: Path) -> dict[str, Any]:
    """What benchmarks/machine.py says, asked in a process of its own: this one must not hold the GPU while rows are timed.

    Kept in the work folder until the machine is started anew: one run in several calls.
    """
    kept = work / "machine.json"
    boot = BOOT.read_text(encoding="ascii").strip() if BOOT.is_file() else None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        if boot is not None and known["boot"] == boot and not known["machine"]["marks"]:
            return dict(known["machine"])
    status, said = child(["benchmarks.machine"], 300)
    if status != 0:
        raise MissingHere(why(status, said, 300))
    machine = last_json(said)
    with atomic(kept) as part:
        part.write_text(json.dumps({"boot": boot, "machine": machine}), encoding="utf-8")
    return machine


def _provenance(command: str, commit: str | None) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.strftime("%Y-%m-%d"), "commit": commit or results.commit(), "command": command}


def _list() -> int:
    for entry in BY_NAME.values():
        print(f"{entry.name:24} {'here' if entry.model.is_file() else entry.origin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
