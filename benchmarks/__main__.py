"""Measure the suite on the machine at hand, and write benchmarks/results/GPU-trtVERSION.json.

    python -m benchmarks                                  every model of the suite that is here, fp16, policy proven
    python -m benchmarks bert_base_b1_s128 --policy all   one of them, with every legal fusion
    python -m benchmarks --list                           what there is, and the commands that bring what is not

Rows are merged into the file one by one, so that an interrupted run keeps what it has measured, and a part can be measured
again.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.measure import child, in_child, last_json, why
from benchmarks.suite import BY_NAME, ROOT, SUITE, Candidate, Entry
from onnxfuse.errors import BadInput, MissingHere, OnnxfuseError

OTHERS = ("trt_fp16_flag", "pytorch_graph")


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
    parser.add_argument("models", nargs="*", metavar="MODEL", help="which models (default: all that are here)")
    parser.add_argument("--precision", nargs="+", default=["fp16"], choices=["keep", "fp32", "fp16", "bf16"])
    parser.add_argument("--policy", nargs="+", type=_policy, default=["proven"], help="all, proven, none, or only:FUSION (default: proven)")
    parser.add_argument("--samples", type=int, default=200, help="samples of each engine (default: 200, the least that counts)")
    parser.add_argument("--others", nargs="*", default=list(OTHERS), choices=OTHERS, help="what else to time (default: both)")
    parser.add_argument("--budget", type=float, default=0, metavar="MINUTES", help="start no row after so many minutes")
    parser.add_argument("--row-timeout", type=float, default=1800, metavar="SECONDS", help="give a row up after so long")
    parser.add_argument("--out", type=Path, default=results.FOLDER, metavar="FOLDER", help="where the results file is")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "benchmarks", metavar="FOLDER", help="models, engines, timing cache")
    parser.add_argument("--commit", default=None, help="the commit measured, where git cannot say it")
    parser.add_argument("--list", action="store_true", help="list the suite, measure nothing")
    return parser


def _policy(text: str) -> str:
    from onnxfuse.fusions import NAMES

    if text not in ("all", "proven", "none") and text not in {f"only:{name}" for name in NAMES}:
        raise argparse.ArgumentTypeError(f"{text}: give all, proven, none, or only:FUSION with one of {', '.join(NAMES)}")
    return text


def _run(arguments: argparse.Namespace, command: str) -> int:
    start = time.monotonic()
    entries = _chosen(arguments.models)
    machine = {**_machine(), **_provenance(command, arguments.commit)}
    path = arguments.out / results.file_name(machine["gpu"], machine["tensorrt"])
    table = results.load(path)
    print(
        f"{machine['gpu']}, driver {machine['driver']}, TensorRT {machine['tensorrt']}: "
        f"copy {machine['copy_gbps']} GB/s, fp16 matmul {machine['matmul_tflops']} TFLOP/s"
    )
    good = True
    for candidate in _candidates(entries, arguments, machine):
        if arguments.budget and time.monotonic() - start > 60 * arguments.budget:
            print(f"the budget of {arguments.budget:g} minutes is spent; not measured: {candidate.name} and what follows")
            break
        row = in_child(candidate, arguments.row_timeout)
        row["measured"] = {name: machine[name] for name in ("date", "commit", "driver", "copy_gbps", "matmul_tflops")}
        table = results.merged(table, machine, row)
        results.save(table, path)
        print(line(row), flush=True)
        good = good and row.get("agrees", False)
    print(f"written to {path}")
    return 0 if good else 1


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
    cache = arguments.work / f"{results.file_name(machine['gpu'], machine['tensorrt']).removesuffix('.json')}.timing-cache"
    return [
        Candidate(
            name=entry.name,
            model=str(entry.model),
            inputs=str(entry.inputs) if entry.inputs is not None else None,
            dims=dict(entry.dims),
            precision=precision,
            policy=policy,
            samples=arguments.samples,
            work=str((arguments.work / f"{entry.name}-{precision}-{policy.replace(':', '-')}").resolve()),
            timing_cache=str(cache.resolve()),
            others=tuple(o for o in arguments.others if _applies(o, entry, precision)),
        )
        for entry in entries
        for precision in arguments.precision
        for policy in arguments.policy
    ]


def _applies(other: str, entry: Entry, precision: str) -> bool:
    return entry.torch if other == "pytorch_graph" else precision == "fp16"


def _machine() -> dict[str, Any]:
    """What benchmarks/machine.py says, asked in a process of its own: this one must not hold the GPU while rows are timed."""
    status, said = child(["benchmarks.machine"], 300)
    if status == 0:
        return last_json(said)
    raise MissingHere(why(status, said, 300))


def _provenance(command: str, commit: str | None) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.strftime("%Y-%m-%d"), "commit": commit or results.commit(), "command": command}


def _list() -> int:
    for entry in SUITE:
        print(f"{entry.name:24} {'here' if entry.model.is_file() else entry.origin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
