"""One row: optimize, build both engines, check, time. A pure function of its candidate.

`measure` writes into the candidate's work folder only, and returns plain values. It runs in a process of its own (`in_child`,
or `python -m benchmarks.measure CANDIDATE.json ROW.json`), so that a crash of TensorRT costs one row and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.suite import ROOT, Candidate
from onnxfuse.bench import stats, timing
from onnxfuse.engine import build, manifest
from onnxfuse.engine.manifest import Manifest
from onnxfuse.engine.run import Array, Engine, cast_feeds
from onnxfuse.errors import OnnxfuseError
from onnxfuse.plan.sites import Site

COSINE = 0.9999
"""Least cosine between the fused engine's outputs and onnxruntime's in float32."""
ERROR_FACTOR = 2.0
"""Largest error of the fused engine, as a multiple of the automatic engine's."""
NO_ERROR = 1e-6
"""An error that is never held against the fused engine: the automatic one may be exact."""

Outputs = Mapping[str, Array]


def measure(candidate: Candidate) -> results.Row:
    """The row of `candidate`: see benchmarks/README.md for its fields. Raises OnnxfuseError where it cannot be measured."""
    from onnxfuse.verify import reference

    clock = _Stopwatch()
    work = Path(candidate.work)
    work.mkdir(parents=True, exist_ok=True)
    model = Path(candidate.model)
    feeds = feeds_of(candidate)
    shapes = _fixed_shapes(model, feeds)
    cache = Path(candidate.timing_cache) if candidate.timing_cache else None

    # Rows of one model share its automatic engine.
    shared = work.parent / f"{candidate.name}-{candidate.precision}-automatic"
    shared.mkdir(exist_ok=True)
    automatic, _ = _optimized(candidate, shared / "automatic.onnx", "none", feeds)
    fused, sites = _optimized(candidate, work / "fused.onnx", candidate.policy, feeds)
    clock.lap("optimize")
    engines = {"automatic": shared / "automatic.engine", "fused": work / "fused.engine"}
    manifests = {
        "automatic": _kept(engines["automatic"], automatic)
        or build.build(automatic, engines["automatic"], shapes=shapes, timing_cache=cache, use_plugins=False),
        "fused": build.build(fused, engines["fused"], shapes=shapes, timing_cache=cache),
    }
    clock.lap("build")
    wanted = reference.run(model, [feeds])[0]
    clock.lap("reference")

    loaded = {name: Engine.load(path) for name, path in engines.items()}
    got = {name: engine.run(cast_feeds(engine.inputs, feeds)) for name, engine in loaded.items()}
    errors = {name: error_of(outputs, wanted) for name, outputs in got.items()}
    fresh, fresh_reason = _runs_in_fresh_process(engines["fused"], feeds, got["fused"], work)
    notes = [] if fresh else [f"fresh process: {fresh_reason}"]
    if "trt_fp16_flag" in candidate.others:
        reason = _add_fp16_flag(engines, model, work, shapes, cache)
        notes += [f"trt_fp16_flag: {reason}"] if reason else []
    clock.lap("check")

    for engine in loaded.values():
        engine.close()
    timed = timing.time_placed({name: partial(Engine.load, path) for name, path in engines.items()}, feeds, samples=candidate.samples)
    clock.lap("time")
    others = {"trt_fp16_flag": timed.median("trt_fp16_flag").to_dict()} if "trt_fp16_flag" in engines else {}
    if "pytorch_graph" in candidate.others:
        answer = pytorch_graph(candidate)
        if "median" in answer:
            others["pytorch_graph"] = answer
        else:
            notes.append(f"pytorch_graph: {answer['failed']}")
        clock.lap("pytorch")

    ratio = timed.ratio("automatic", "fused")
    agrees, disagreement = judge(errors["fused"], errors["automatic"])
    marks = list(timed.marks) + ([f"outputs disagree: {disagreement}"] if not agrees else [])
    return {
        "name": candidate.name,
        "precision": candidate.precision,
        "policy": candidate.policy,
        "automatic_ms": timed.median("automatic").to_dict(),
        "fused_ms": timed.median("fused").to_dict(),
        "ratio": ratio.to_dict(),
        "verdict": stats.verdict(ratio),
        "others_ms": others,
        "sites": dict(sorted(Counter(site.fusion for site in sites).items())),
        "site_shapes": _shapes_of(sites),
        "agrees": agrees,
        "max_abs": _number(errors["fused"]["max_abs"]),
        "cosine": errors["fused"]["cosine"],
        "automatic_max_abs": _number(errors["automatic"]["max_abs"]),
        "automatic_cosine": errors["automatic"]["cosine"],
        "fresh_process": fresh,
        "layers": {name: len(known.layers) for name, known in manifests.items()},
        "precisions": {name: known.precisions for name, known in manifests.items()},
        "build_seconds": {name: known.build_seconds for name, known in manifests.items()},
        "inputs": {name: list(array.shape) for name, array in feeds.items()},
        "samples": len(timed.samples["fused"]),
        "placements_ms": {name: [round(ms, 5) for ms in timed.by_placement(name)] for name in ("automatic", "fused")},
        "cuda_graph": all(timed.captured.values()),
        "clocks_mhz": {"before": timed.before.sm, "after": timed.after.sm},
        "marks": marks,
        "notes": notes,
        "seconds": clock.laps,
    }


def _kept(engine: Path, model: Path) -> Manifest | None:
    """The manifest of an engine that was built from exactly this model; None where there is none."""
    known = manifest.load(engine)
    return known if known is not None and engine.is_file() and known.model_sha256 == manifest.model_digest(model) else None


def feeds_of(candidate: Candidate) -> dict[str, Array]:
    """The candidate's inputs: its .npz, or generated from the declared types with seed 0."""
    if candidate.inputs is not None:
        with np.load(candidate.inputs, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    from onnxfuse.verify import inputs

    return dict(inputs.generate(Path(candidate.model), seed=0, dims=candidate.dims)[0])


def error_of(got: Outputs, wanted: Outputs) -> dict[str, float]:
    """Largest absolute error and smallest cosine over all floating-point outputs, against float32 of onnxruntime.

    An integer or boolean output that differs anywhere, a missing one, a wrong shape, and NaN or Inf in other places
    count as an infinite error.
    """
    largest, cosine = 0.0, 1.0
    for name, want in wanted.items():
        if name not in got or got[name].shape != want.shape:
            return {"max_abs": math.inf, "cosine": 0.0}
        a, b = (np.asarray(x).astype(np.float64) for x in (got[name], want))
        finite = np.isfinite(b)
        if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return {"max_abs": math.inf, "cosine": 0.0}
        if not (want.dtype.kind == "f" or "float" in want.dtype.name):
            if not np.array_equal(a, b):
                return {"max_abs": math.inf, "cosine": 0.0}
            continue
        a, b = a[finite], b[finite]
        if a.size == 0:
            continue
        largest = max(largest, float(np.abs(a - b).max()))
        norm = float(np.linalg.norm(a) * np.linalg.norm(b))
        cosine = min(cosine, float(a @ b) / norm if norm else float(np.array_equal(a, b)))
    return {"max_abs": largest, "cosine": cosine}


def judge(fused: Mapping[str, float], automatic: Mapping[str, float]) -> tuple[bool, str]:
    """Whether the fused engine's error is acceptable, and why not.

    Its outputs must point where the reference's do, and its error may be no more than ERROR_FACTOR times that of the
    automatic engine of the same precision.
    """
    if not fused["cosine"] >= COSINE:
        return False, f"cosine {fused['cosine']:.6f} is below {COSINE}"
    limit = max(NO_ERROR, ERROR_FACTOR * automatic["max_abs"])
    if not fused["max_abs"] <= limit:
        return False, f"error {fused['max_abs']:.3g} is above {limit:.3g}, the limit beside the automatic engine's error"
    return True, ""


def in_child(candidate: Candidate, timeout: float) -> results.Row:
    """`measure` in a process of its own; a crash, a fault and a timeout become a failed row."""
    folder = Path(candidate.work)
    folder.mkdir(parents=True, exist_ok=True)
    order, answer = folder / "candidate.json", folder / "row.json"
    order.write_text(json.dumps(candidate.to_dict()), encoding="utf-8")
    answer.unlink(missing_ok=True)
    status, said = child(["benchmarks.measure", str(order), str(answer)], timeout)
    if status == 0 and answer.is_file():
        return dict(json.loads(answer.read_text(encoding="utf-8")))
    return results.failed(candidate.name, candidate.precision, candidate.policy, why(status, said, timeout))


def pytorch_graph(candidate: Candidate, timeout: float = 300) -> dict[str, Any]:
    """Time of the same module in PyTorch under a CUDA graph: {"median", "low", "high"}, or {"failed": reason}."""
    arguments = ["benchmarks.pytorch", candidate.name, candidate.precision, str(candidate.samples)]
    status, said = child(arguments, timeout)
    if status != 0:
        return {"failed": why(status, said, timeout)}
    return last_json(said)


def child(arguments: list[str], timeout: float) -> tuple[int | None, str]:
    """(exit status or None for a timeout, what was said) of `python -m ARGUMENTS` in the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Unbuffered: what was said before a crash is not lost with it.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
        except BaseException:
            process.terminate()
            process.wait()
            raise
        output.seek(0)
        return status, output.read()


def last_json(said: str) -> dict[str, Any]:
    """The last JSON object that a child printed on a line of its own."""
    line = next(line for line in reversed(said.splitlines()) if line.startswith("{"))
    return dict(json.loads(line))


def why(status: int | None, said: str, timeout: float) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "it said nothing")
    if status is None:
        return f"not done within {timeout:.0f} s"
    if status < 0:
        return f"crashed ({signal.Signals(-status).name}): {last}"
    return last.removeprefix("error: ")


def _optimized(candidate: Candidate, out: Path, policy: str, feeds: Mapping[str, Array]) -> tuple[Path, list[Site]]:
    """The rewritten model, and its fused sites. The engine's outputs are checked, not the model's.

    Policy only:FUSION is that fusion, and what it is built on, at every legal site.
    """
    from onnxfuse import gpus, pipeline

    only = (policy.removeprefix("only:"),) if policy.startswith("only:") else ()

    result = pipeline.optimize(
        Path(candidate.model),
        out,
        policy="all" if only else policy,
        only=only,
        precision=candidate.precision,
        gpu=gpus.resolve("auto"),
        feeds=[dict(feeds)],
        check=False,
    )
    return out, [decision.site for decision in result.decisions if decision.fused]


def _shapes_of(sites: Sequence[Site]) -> dict[str, list[str]]:
    """The shapes of each fusion's sites, as the model declares them."""
    shapes: dict[str, set[str]] = {}
    for site in sites:
        shapes.setdefault(site.fusion, set()).add(site.shape)
    return {fusion: sorted(found) for fusion, found in sorted(shapes.items())}


def _fixed_shapes(model: Path, feeds: Mapping[str, Array]) -> list[str]:
    """--shapes for the dynamic inputs: the shapes of the feeds, fixed."""
    from onnxfuse.engine.shapes import inputs_of

    return [f"{spec.name}:{'x'.join(map(str, feeds[spec.name].shape))}" for spec in inputs_of(model) if spec.dynamic and spec.name in feeds]


def _add_fp16_flag(engines: dict[str, Path], model: Path, work: Path, shapes: list[str], cache: Path | None) -> str | None:
    """Adds the weakly typed engine of the untouched model; returns why there is none."""
    out = work / "fp16_flag.engine"
    try:
        build.build_reference_fp16flag(model, out, shapes=shapes, timing_cache=cache)
        engines["trt_fp16_flag"] = out
    except OnnxfuseError as error:
        return str(error)
    return None


def _runs_in_fresh_process(engine: Path, feeds: Mapping[str, Array], expected: Outputs, work: Path) -> tuple[bool, str]:
    """Whether the engine gives the same outputs in a new process, where no plugin library is loaded."""
    given, answer = work / "fresh-in.npz", work / "fresh-out.npz"
    np.savez(given, **dict(feeds))
    status, said = child(["benchmarks.fresh", str(engine), str(given), str(answer)], 300)
    if status != 0:
        return False, why(status, said, 300)
    with np.load(answer, allow_pickle=False) as outputs:
        for name, want in expected.items():
            got = outputs[name]
            if not np.allclose(got, want.astype(got.dtype), rtol=1e-2, atol=1e-3, equal_nan=True):
                return False, f"output {name} differs from the one of the process that built the engine"
    return True, ""


def _number(value: float) -> float | None:
    """JSON has no infinity: an error without bound is null."""
    return value if math.isfinite(value) else None


class _Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 2)
        self._last = now


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
