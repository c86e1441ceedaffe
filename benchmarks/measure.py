"""One row of the suite, on top of the product's own unit of work (onnxfuse/bench/candidate.py).

What the suite adds: whether the engine runs in a fresh process, TensorRT's FP16 flag, and PyTorch. A row of policy measure is the final
timing of the search itself. `in_child` (or `python -m benchmarks.measure CANDIDATE.json ROW.json`) measures in a process of its own, so
that a crash of TensorRT costs one row and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.suite import ROOT, Candidate
from onnxfuse import measuring
from onnxfuse.bench import candidate as work
from onnxfuse.bench import timing
from onnxfuse.bench.candidate import Also, Outputs, Rewriting, Side
from onnxfuse.bench.child import STEP, Watch, last_json, run, why
from onnxfuse.engine import build
from onnxfuse.engine.run import Array, Engine, cast_feeds
from onnxfuse.errors import OnnxfuseError

FRESH_SECONDS = 300.0
PYTORCH_SECONDS = 300.0

# Fields of a result that a row has under the same name.
_SHARED = (
    "automatic_ms", "fused_ms", "ratio", "verdict", "others_ms", "agrees", "max_abs", "cosine", "automatic_max_abs", "automatic_cosine",
    "precisions", "build_seconds", "inputs", "samples", "placements_ms", "cuda_graph", "clocks_mhz", "marks", "seconds",
)  # fmt: skip


def measure(candidate: Candidate) -> results.Row:
    """The row of `candidate`: see benchmarks/README.md for its fields. Raises OnnxfuseError where it cannot be measured."""
    folder = Path(candidate.work)
    folder.mkdir(parents=True, exist_ok=True)
    row = _searched(candidate) if candidate.policy == "measure" else _compared(candidate)
    if "pytorch_graph" in candidate.others:
        answer = pytorch_graph(candidate)
        if "median" in answer:
            row["others_ms"] = {**row["others_ms"], "pytorch_graph": answer}
        else:
            row["notes"].append(f"pytorch_graph: {answer['failed']}")
    return row


def _compared(candidate: Candidate) -> results.Row:
    """The engine of a policy against the automatic one, which the rows of one model share."""
    policy = candidate.policy
    only = (policy.removeprefix("only:"),) if policy.startswith("only:") else ()
    shared = Path(candidate.work).parent / f"{candidate.name}-{candidate.precision}-automatic"
    shared.mkdir(exist_ok=True)
    inputs = Path(candidate.work) / "inputs.npz"
    np.savez(inputs, **feeds_of(candidate))
    unit = work.Candidate(
        model=candidate.model,
        automatic=Rewriting("none"),
        fused=Rewriting("all" if only else policy, only),
        precision=candidate.precision,
        inputs=str(inputs),
        work=str(shared),
        automatic_engine=str(shared / "automatic.engine"),
        timing_cache=candidate.timing_cache,
        samples=candidate.samples,
    )

    def also(automatic: Side, fused: Side, feeds: Mapping[str, Array], outputs: Outputs) -> Also:
        fresh, reason = _runs_in_fresh_process(fused.engine, feeds, outputs, Path(candidate.work))
        notes = () if fresh else (f"fresh process: {reason}",)
        engines: dict[str, Path] = {}
        if "trt_fp16_flag" in candidate.others:
            reason = _add_fp16_flag(engines, candidate, feeds)
            notes += (f"trt_fp16_flag: {reason}",) if reason else ()
        return Also(engines, notes, {"fresh_process": fresh})

    return _row(candidate, work.measure(unit, also=also))


def _searched(candidate: Candidate) -> results.Row:
    """What policy measure came to; its final timing, from a rebuild of both engines, is the row's."""
    feeds = feeds_of(candidate)
    settings = measuring.Settings(
        budget=candidate.search_minutes,
        timing_cache=Path(candidate.timing_cache) if candidate.timing_cache else None,
        folder=Path(candidate.work),
        samples=candidate.samples,
    )
    found = measuring.measure(
        Path(candidate.model),
        precision=candidate.precision,
        feeds=[feeds],
        settings=settings,
        progress=lambda words: print(f"{STEP}{words}", flush=True),
    )
    row = _row(candidate, found.found.final.result)
    row["notes"] += found.notes
    row["search"] = found.to_dict()["plan"]["search"]
    row["decisions"] = _decisions(found)
    row["seconds"] = _phases(trial.result for trial in found.found.trials)
    row["verdicts"] = [verdict.to_dict() for verdict in found.verdicts]
    engine = found.folder / "final.engine"
    if found.found.final.keys and engine.is_file():
        with Engine.load(engine) as loaded:
            outputs = loaded.run(cast_feeds(loaded.inputs, feeds))
        row["fresh_process"], reason = _runs_in_fresh_process(engine, feeds, outputs, Path(candidate.work))
        row["notes"] += [] if row["fresh_process"] else [f"fresh process: {reason}"]
    if "trt_fp16_flag" in candidate.others:
        _time_fp16_flag(row, candidate, found.folder / "automatic.engine", feeds)
    found.tidy()
    return row


def _time_fp16_flag(row: results.Row, candidate: Candidate, automatic: Path, feeds: Mapping[str, Array]) -> None:
    """Adds the engine of TensorRT's FP16 flag to a row, timed beside the automatic engine, or a note why it is not there."""
    engines = {"automatic": automatic}
    here = automatic.is_file()  # not where every measurement is from an earlier run
    reason = _add_fp16_flag(engines, candidate, feeds) if here else "the automatic engine of an earlier run is gone"
    if reason:
        row["notes"].append(f"trt_fp16_flag: {reason}")
        return
    timed = timing.time_placed({name: partial(Engine.load, path) for name, path in engines.items()}, feeds, samples=candidate.samples)
    row["others_ms"] = {**row["others_ms"], "trt_fp16_flag": timed.median("trt_fp16_flag").to_dict()}
    row["notes"] += [f"trt_fp16_flag: {mark}" for mark in timed.marks]


def _decisions(found: measuring.Measurement) -> list[dict[str, Any]]:
    """What became of each group: how many of its sites are fused, and every reason given."""
    decided = found.found.decisions
    return [
        {
            "group": group.name,
            "sites": len(group.places),
            "fused": sum(decided[place.site.key][0] for place in group.places),
            "reasons": list(dict.fromkeys(decided[place.site.key][1] for place in group.places)),
        }
        for group in found.found.groups
    ]


def _phases(measured: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase, over all candidates of this run."""
    total: dict[str, float] = {}
    for result in measured:
        if not result.get("from_earlier_run"):
            for phase, seconds in result.get("seconds", {}).items():
                total[phase] = round(total.get(phase, 0.0) + seconds, 2)
    return total


def _row(candidate: Candidate, result: Mapping[str, Any]) -> results.Row:
    return {
        "name": candidate.name,
        "precision": candidate.precision,
        "policy": candidate.policy,
        **{field: result[field] for field in _SHARED},
        "sites": work.counts(result["sites"]),
        "site_shapes": _shapes_of(result["sites"]),
        "layers": result["layer_counts"],
        "layer_diff": result["layers"]["diff"]["summary"] if "layers" in result else None,
        "fresh_process": result.get("fresh_process"),
        "notes": list(result["notes"]),
    }


def feeds_of(candidate: Candidate) -> dict[str, Array]:
    """The candidate's inputs: its .npz, or generated from the declared types with seed 0."""
    if candidate.inputs is not None:
        return work.load_feeds(Path(candidate.inputs))
    from onnxfuse.verify import inputs

    return dict(inputs.generate(Path(candidate.model), seed=0, dims=candidate.dims)[0])


def in_child(candidate: Candidate, timeout: float, watch: Watch | None = None) -> results.Row:
    """`measure` in a process of its own; a crash, a fault and a timeout become a failed row. `watch` is told each step of a search."""
    folder = Path(candidate.work)
    folder.mkdir(parents=True, exist_ok=True)
    order, answer = folder / "candidate.json", folder / "row.json"
    order.write_text(json.dumps(candidate.to_dict()), encoding="utf-8")
    answer.unlink(missing_ok=True)
    status, said = child(["benchmarks.measure", str(order), str(answer)], timeout, watch)
    if status == 0 and answer.is_file():
        return dict(json.loads(answer.read_text(encoding="utf-8")))
    return results.failed(candidate.name, candidate.precision, candidate.policy, why(status, said, timeout))


def pytorch_graph(candidate: Candidate) -> dict[str, Any]:
    """Time of the same module in PyTorch under a CUDA graph: {"median", "low", "high"}, or {"failed": reason}."""
    arguments = ["benchmarks.pytorch", candidate.name, candidate.precision, str(candidate.samples)]
    status, said = child(arguments, PYTORCH_SECONDS)
    if status != 0:
        return {"failed": why(status, said, PYTORCH_SECONDS)}
    return last_json(said)


def child(arguments: list[str], timeout: float, watch: Watch | None = None) -> tuple[int | None, str]:
    """(exit status or None for a timeout, what was said) of `python -m ARGUMENTS` in the checkout."""
    return run(arguments, timeout, watch, folder=ROOT)


def _shapes_of(sites: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The shapes of each fusion's sites, as the model declares them."""
    shapes: dict[str, set[str]] = {}
    for site in sites:
        shapes.setdefault(site["fusion"], set()).add(site["shape"])
    return {fusion: sorted(found) for fusion, found in sorted(shapes.items())}


def _add_fp16_flag(engines: dict[str, Path], candidate: Candidate, feeds: Mapping[str, Array]) -> str | None:
    """Adds the weakly typed engine of the untouched model; returns why there is none."""
    model, out = Path(candidate.model), Path(candidate.work) / "fp16_flag.engine"
    cache = Path(candidate.timing_cache) if candidate.timing_cache else None
    try:
        build.build_reference_fp16flag(model, out, shapes=work.fixed_shapes(model, feeds), timing_cache=cache)
        engines["trt_fp16_flag"] = out
    except OnnxfuseError as error:
        return str(error)
    return None


def _runs_in_fresh_process(engine: Path, feeds: Mapping[str, Array], expected: Outputs, folder: Path) -> tuple[bool, str]:
    """Whether the engine gives the same outputs in a new process, where no plugin library is loaded."""
    given, answer = folder / "fresh-in.npz", folder / "fresh-out.npz"
    np.savez(given, **dict(feeds))
    status, said = child(["benchmarks.fresh", str(engine), str(given), str(answer)], FRESH_SECONDS)
    if status != 0:
        return False, why(status, said, FRESH_SECONDS)
    with np.load(answer, allow_pickle=False) as outputs:
        for name, want in expected.items():
            got = outputs[name]
            if not np.allclose(got, want.astype(got.dtype), rtol=1e-2, atol=1e-3, equal_nan=True):
                return False, f"output {name} differs from the one of the process that built the engine"
    return True, ""


def main(order: Path, answer: Path) -> int:
    """Measures the candidate in `order`, writes its row to `answer`; returns the exit status."""
    candidate = Candidate.from_dict(json.loads(order.read_text(encoding="utf-8")))
    try:
        row = measure(candidate)
    except OnnxfuseError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_status
    answer.write_text(json.dumps(row), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
