"""The unit of work of measuring: two engines of one model, built, checked and timed against each other.

`measure` is a pure function of a Candidate, which holds plain values only, and returns values that JSON has: it can run in this
process, in a child (`in_child`, where a crash, a fault and a timeout become a failed result), or on another machine that sees the
same files.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse import __version__
from onnxfuse.bench import child, layers, stats, timing
from onnxfuse.engine import build, manifest
from onnxfuse.engine.manifest import Manifest
from onnxfuse.engine.run import Array, Engine, cast_feeds
from onnxfuse.engine.shapes import inputs_of
from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.graph.files import atomic

COSINE = 0.9999
"""Least cosine between the fused engine's outputs and onnxruntime's in float32."""
ERROR_FACTOR = 2.0
"""Largest error of the fused engine, as a multiple of the automatic engine's."""
NO_ERROR = 1e-6
"""An error that is never held against the fused engine: the automatic one may be exact."""
ATTEMPTS = 2
"""How often engines are timed where what speaks against the first time may have passed: another process, a clock that moved."""

Outputs = Mapping[str, Array]
Result = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Rewriting:
    """How a model is rewritten: the arguments of `pipeline.optimize` that decide on sites. sites, for policy measure: (fusion, output,
    whether it is fused).
    """

    policy: str
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    sites: tuple[tuple[str, str, bool], ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rewriting:
        sites = tuple((fusion, output, fused) for fusion, output, fused in data["sites"])
        return cls(data["policy"], tuple(data["only"]), tuple(data["skip"]), sites)


@dataclass(frozen=True)
class Candidate:
    """Two rewritings of one model to compare. Plain values only.

    automatic: left to TensorRT; built without plugins. inputs: an .npz to run and time on. work: a folder for what is shared (outputs of
    the reference) and for temporary files. automatic_engine: where that engine is kept, and taken from where it is of the same model and
    rewriting. fused_engine: the same of the other one; None keeps none. ranges: a JSON object of the largest magnitude of each of the
    model's tensors, for conversion to fp16; None measures them on the inputs, each time. shapes: values of --shapes; none is the
    shapes of the inputs, fixed. timing_cache: shared by all builds. samples: of each engine's latency.
    """

    model: str
    automatic: Rewriting
    fused: Rewriting
    precision: str
    inputs: str
    work: str
    automatic_engine: str
    fused_engine: str | None = None
    keep_fp32: tuple[str, ...] = ()
    ranges: str | None = None
    shapes: tuple[str, ...] = ()
    timing_cache: str | None = None
    samples: int = 200

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Candidate:
        given = {**data, **{name: Rewriting.from_dict(data[name]) for name in ("automatic", "fused")}}
        return cls(**{**given, **{name: tuple(given[name]) for name in ("keep_fp32", "shapes")}})


@dataclass(frozen=True)
class Side:
    """One of the two engines. sites: the fused ones, as in a report."""

    model: Path
    engine: Path
    manifest: Manifest
    sites: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Also:
    """What a caller adds to a measurement: further engines to time beside the two, by name, and what it noticed."""

    engines: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def nothing_more(automatic: Side, fused: Side, feeds: Mapping[str, Array], outputs: Outputs) -> Also:
    return Also()


def silent(_: str) -> None:
    """Progress that nobody watches."""


def measure(
    candidate: Candidate, say: Say = silent, also: Callable[[Side, Side, Mapping[str, Array], Outputs], Also] = nothing_more
) -> Result:
    """Optimizes, builds, checks and times. Raises OnnxfuseError where it cannot be measured.

    automatic_ms, fused_ms, ratio: median, low, high (ratio is automatic over fused). verdict: "faster", "slower" or "draw". sites:
    the fused ones, as in a report. agrees, max_abs, cosine and automatic_...: against onnxruntime in float32; an unbounded error is None.
    marks: reasons not to trust the figures. layers: what the two engines spend in each layer, as `bench.layers` has it, where they differ.
    """
    clock = _Stopwatch(say)
    work = Path(candidate.work)
    feeds = load_feeds(Path(candidate.inputs))
    shapes = list(candidate.shapes) or fixed_shapes(Path(candidate.model), feeds)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=work) as scratch:
        clock.step("automatic", "the automatic engine")
        automatic = _side(candidate, candidate.automatic, Path(candidate.automatic_engine), feeds, shapes, plugins=False)
        same = candidate.fused == candidate.automatic
        fused = automatic
        if not same:
            clock.step("fused", "the fused engine")
            engine = Path(candidate.fused_engine or Path(scratch) / "fused.engine")
            fused = _side(candidate, candidate.fused, engine, feeds, shapes, plugins=True, like=automatic)
            same = fused.engine == automatic.engine
        clock.step("reference", "the reference in onnxruntime")
        wanted = _reference(Path(candidate.model), feeds, work)
        clock.step("check", "comparing the outputs")
        sides = {"automatic": automatic, "fused": fused}
        got = {name: _run(side.engine, feeds) for name, side in sides.items()}
        errors = {name: error_of(outputs, wanted) for name, outputs in got.items()}
        more = also(automatic, fused, feeds, got["fused"])
        clock.step("time", "timing")
        engines = {**{name: side.engine for name, side in sides.items()}, **more.engines}
        timed, notes = _timed(engines, feeds, candidate.samples, same)
        profile, unprofiled = None, list[str]()
        if not same:
            clock.step("layers", "timing layer by layer")
            profile, unprofiled = _layers(automatic, fused, feeds)
        clock.step("", "done")
    ratio = timed.ratio("automatic", "fused")
    agrees, disagreement = judge(errors["fused"], errors["automatic"])
    return {
        "automatic_ms": timed.median("automatic").to_dict(),
        "fused_ms": timed.median("fused").to_dict(),
        "ratio": ratio.to_dict(),
        "verdict": stats.verdict(ratio),
        "others_ms": {name: timed.median(name).to_dict() for name in more.engines},
        "same_engine": same,
        "sites": list(fused.sites),
        "agrees": agrees,
        "max_abs": _number(errors["fused"]["max_abs"]),
        "cosine": errors["fused"]["cosine"],
        "automatic_max_abs": _number(errors["automatic"]["max_abs"]),
        "automatic_cosine": errors["automatic"]["cosine"],
        "layer_counts": {name: len(side.manifest.layers) for name, side in sides.items()},
        "precisions": {name: side.manifest.precisions for name, side in sides.items()},
        "build_seconds": {name: side.manifest.build_seconds for name, side in sides.items()},
        "inputs": {name: list(array.shape) for name, array in feeds.items()},
        "samples": len(timed.samples["fused"]),
        "placements_ms": {name: [round(ms, 5) for ms in timed.by_placement(name)] for name in sides},
        "cuda_graph": all(timed.captured.values()),
        "clocks_mhz": {"before": timed.before.sm, "after": timed.after.sm},
        "marks": list(timed.marks) + ([f"outputs disagree: {disagreement}"] if not agrees else []),
        "notes": [*notes, *timed.notes, *unprofiled, *more.notes, *fused.manifest.notes],
        "seconds": clock.seconds,
        **({"layers": profile} if profile else {}),
        **more.facts,
    }


def in_child(candidate: Candidate, timeout: float, watch: child.Watch | None = None) -> Result:
    """`measure` in a process of its own; a crash, a fault and a timeout become {"failed": reason, "status": exit status or None}."""
    with tempfile.TemporaryDirectory(prefix="order-", dir=candidate.work) as folder:
        order, answer = Path(folder) / "candidate.json", Path(folder) / "result.json"
        order.write_text(json.dumps(candidate.to_dict()), encoding="utf-8")
        status, said = child.run(["onnxfuse.bench.candidate", str(order), str(answer)], timeout, watch)
        if status == 0 and answer.is_file():
            return dict(json.loads(answer.read_text(encoding="utf-8")))
    return {"failed": child.why(status, said, timeout), "status": status}


# Models and engines -----------------------------------------------------------------------------------------------------


def _side(
    candidate: Candidate,
    rewriting: Rewriting,
    engine: Path,
    feeds: Mapping[str, Array],
    shapes: Sequence[str],
    plugins: bool,
    like: Side | None = None,
) -> Side:
    """The engine of the rewritten model: the one that is there, where it was made of just this, or a new one; or that of `like`, where the
    model is the same.
    """
    model, stamp = engine.with_suffix(".onnx"), engine.with_suffix(".made-of.json")
    made_of = {
        "onnxfuse": __version__,
        "source": manifest.model_digest(Path(candidate.model)),
        "rewriting": asdict(rewriting),
        "precision": candidate.precision,
        "keep_fp32": list(candidate.keep_fp32),
        "ranges": None if candidate.ranges is None else hashlib.sha256(Path(candidate.ranges).read_bytes()).hexdigest(),
        "inputs": {name: _digest(array) for name, array in feeds.items()},
        "shapes": list(shapes),
    }
    sites = _stamped(stamp, made_of)
    known = _kept(engine, model) if sites is not None else None
    if sites is not None and known is not None:
        return Side(model, engine, known, sites)
    stamp.unlink(missing_ok=True)
    sites = _optimized(candidate, rewriting, model, feeds)
    if like is not None and manifest.model_digest(model) == like.manifest.model_sha256:
        return replace(like, sites=sites)
    cache = Path(candidate.timing_cache) if candidate.timing_cache else None
    built = build.build(model, engine, shapes=shapes, timing_cache=cache, use_plugins=plugins)
    with atomic(stamp) as part:
        part.write_text(json.dumps({"made_of": made_of, "sites": sites}), encoding="utf-8")
    return Side(model, engine, built, sites)


def _stamped(stamp: Path, made_of: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """The sites that a stamp tells, where it tells of the same making; None where it does not, or there is none."""
    try:
        content = json.loads(stamp.read_text(encoding="utf-8"))
        return tuple(content["sites"]) if content["made_of"] == json.loads(json.dumps(made_of)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kept(engine: Path, model: Path) -> Manifest | None:
    """The manifest of an engine that was built from exactly this model, and here; None where there is none."""
    from onnxfuse.engine import trt

    try:
        known = manifest.load(engine)
        if known is None or not engine.is_file() or known.model_sha256 != manifest.model_digest(model):
            return None
    except BadInput:
        return None
    device = trt.gpu()
    here = {"gpu": device.name, "sm": device.sm, "driver": device.driver, "tensorrt": trt.version()}
    return None if manifest.changes(known, **here) else known  # type: ignore[arg-type]


def _optimized(candidate: Candidate, rewriting: Rewriting, out: Path, feeds: Mapping[str, Array]) -> tuple[dict[str, Any], ...]:
    """Writes the rewritten model; returns the fused sites. The engine's outputs are checked, not the model's."""
    from onnxfuse import gpus, pipeline

    result = pipeline.optimize(
        Path(candidate.model),
        out,
        policy=rewriting.policy,
        only=rewriting.only,
        skip=rewriting.skip,
        measured={(fusion, output): (fused, "candidate") for fusion, output, fused in rewriting.sites},
        precision=candidate.precision,
        keep_fp32=candidate.keep_fp32,
        gpu=gpus.resolve("auto"),
        feeds=[dict(feeds)],
        ranges=None if candidate.ranges is None else json.loads(Path(candidate.ranges).read_text(encoding="utf-8")),
        check=False,
    )
    return tuple(decision.to_dict() for decision in result.decisions if decision.fused)


# Inputs and outputs -----------------------------------------------------------------------------------------------------


def load_feeds(path: Path) -> dict[str, Array]:
    """The arrays of an .npz."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def fixed_shapes(model: Path, feeds: Mapping[str, Array]) -> list[str]:
    """Values of --shapes for the dynamic inputs: the shapes of the feeds, fixed."""
    return [f"{spec.name}:{'x'.join(map(str, feeds[spec.name].shape))}" for spec in inputs_of(model) if spec.dynamic and spec.name in feeds]


def _reference(model: Path, feeds: Mapping[str, Array], work: Path) -> Outputs:
    """onnxruntime's outputs of the model as it is, computed once for all candidates of one work folder."""
    from onnxfuse.verify import reference

    made_of = {"model": manifest.model_digest(model), "inputs": {name: _digest(array) for name, array in feeds.items()}}
    stamp, arrays = work / "reference.json", work / "reference.npz"
    try:
        if json.loads(stamp.read_text(encoding="utf-8")) == made_of:
            return load_feeds(arrays)
    except (OSError, ValueError, KeyError):
        pass
    outputs = {name: array for name, array in reference.run(model, [feeds])[0].items() if isinstance(array, np.ndarray)}
    if all(array.dtype.kind in "fiub" for array in outputs.values()):  # what an .npz gives back as it was
        stamp.unlink(missing_ok=True)
        with atomic(arrays) as part, part.open("wb") as file:
            np.savez(file, **outputs)  # type: ignore[arg-type]
        with atomic(stamp) as part:
            part.write_text(json.dumps(made_of), encoding="utf-8")
    return outputs


def _digest(array: Array) -> str:
    return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes()).hexdigest()


def _run(path: Path, feeds: Mapping[str, Array]) -> Outputs:
    engine = Engine.load(path)
    try:
        return engine.run(cast_feeds(engine.inputs, feeds))
    finally:
        engine.close()


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


# Times ------------------------------------------------------------------------------------------------------------------


def _timed(engines: Mapping[str, Path], feeds: Mapping[str, Array], samples: int, same: bool) -> tuple[timing.Timings, list[str]]:
    """The timings, and a note where marked ones were taken again. same: both are one engine, which must be a draw."""
    notes: list[str] = []
    for attempt in range(1, ATTEMPTS + 1):
        timed = timing.time_placed({name: partial(Engine.load, path) for name, path in engines.items()}, feeds, samples=samples)
        ratio = timed.ratio("automatic", "fused")
        if same and not ratio.covers(1.0):
            off = f"one engine timed against itself is no draw: {ratio.median:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
            timed = replace(timed, marks=(*timed.marks, off))
        if not timed.marks or attempt == ATTEMPTS:
            break
        notes.append(f"timed again, as the first time was marked: {'; '.join(timed.marks)}")
    return timed, notes


def _layers(automatic: Side, fused: Side, feeds: Mapping[str, Array]) -> tuple[dict[str, Any] | None, list[str]]:
    """Times by layer and how they differ, as plain values; or why there are none: a profile is no reason to lose a measurement."""

    def profile(side: Side) -> tuple[layers.LayerTime, ...]:
        with Engine.load(side.engine) as engine:
            return layers.profile(engine, cast_feeds(engine.inputs, feeds))

    try:
        return layers.report(profile(automatic), profile(fused), layers.sources_of(fused.sites)), []
    except OnnxfuseError as fault:
        return None, [f"layers: {fault}"]


def counts(sites: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many sites of each fusion."""
    return dict(sorted(Counter(str(site["fusion"]) for site in sites).items()))


def _number(value: float) -> float | None:
    """JSON has no infinity: an error without bound is null."""
    return value if math.isfinite(value) else None


class _Stopwatch:
    """Seconds by step, and word of each step to whoever watches."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._name = ""
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    def step(self, name: str, words: str) -> None:
        now = time.monotonic()
        if self._name:
            self.seconds[self._name] = round(now - self._start, 2)
        self._name, self._start = name, now
        self._say(words)


def main(order: Path, answer: Path) -> int:
    """Measures the candidate in `order`, writes its result to `answer`; returns the exit status."""
    candidate = Candidate.from_dict(json.loads(order.read_text(encoding="utf-8")))
    try:
        result = measure(candidate, say=lambda words: print(child.STEP + words, flush=True))
    except OnnxfuseError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_status
    answer.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
