"""`optimize --policy measure`: finds what there is to measure, has it measured, keeps every result, and says what came out.

`plan.measure` is the search, `bench.candidate` its unit of work. Here they meet the machine: the GPU, the plugin library, a folder of
results in the user's cache from which an interrupted search goes on, the budget, and the store of verdicts.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse import __version__, gpus, pipeline, plugins
from onnxfuse.bench import candidate as work
from onnxfuse.bench.candidate import Candidate, Rewriting
from onnxfuse.bench.stats import BUILD_DIFFERENCE, Interval
from onnxfuse.engine import build, manifest, trt
from onnxfuse.engine.shapes import inputs_of, sizes_of
from onnxfuse.errors import BadInput, MissingHere, OnnxfuseError
from onnxfuse.fusions import REGISTRY
from onnxfuse.graph.files import atomic
from onnxfuse.plan import store, verdicts
from onnxfuse.plan.measure import Budget, Found, Group, Trial, grouped, search
from onnxfuse.plan.planfile import Plan
from onnxfuse.plan.verdicts import Target, Verdict
from onnxfuse.verify.check import generated
from onnxfuse.verify.reference import Feeds, Runtime

OUTCOMES = ("won", "lost", "draw")
SCHEMA = 1
BUDGET_MINUTES = 15.0
CANDIDATE_SECONDS = 1200.0
"""After so long a candidate is given up: a cold build of a large model takes minutes."""

_RESULT = re.compile(r"[0-9a-f]{24}\.json")

Progress = Callable[[str], None]


class Interrupted(OnnxfuseError):
    """Ctrl-C; what was measured is kept."""

    exit_status = 130


@dataclass(frozen=True)
class Settings:
    """How to measure. folder: where results are kept, and timing_cache: that of all builds; None: in the user's cache. samples: of each
    engine's latency.
    """

    budget: float = BUDGET_MINUTES
    timing_cache: Path | None = None
    folder: Path | None = None
    samples: int = 200


@dataclass(frozen=True)
class Machine:
    """All of this machine that a measurement depends on. name: the GPU in `onnxfuse.gpus`; plugins: SHA-256 of the plugin library."""

    name: str
    gpu: str
    sm: int
    driver: str
    tensorrt: str
    plugins: str

    @classmethod
    def here(cls, gpu: str) -> Machine:
        """The machine at hand. MissingHere where it cannot measure, or where its GPU is not `gpu` ("auto" is any)."""
        if gpu != "auto":
            gpus.resolve(gpu)  # a name that no GPU has is wrong usage, whatever is missing here
        try:
            version = trt.version()
            device = trt.gpu()
            build.check_gpu(gpu, device)
            return cls(gpus.resolve("auto").name, device.name, device.sm, device.driver, version, plugins.build(device.sm).sha256)
        except MissingHere as fault:
            raise MissingHere(f"--policy measure needs an NVIDIA GPU and TensorRT: {fault}; without them use --policy proven") from None


@dataclass(frozen=True)
class Measurement:
    """What was measured, on the first of `feeds`.

    left: sites of folding that costs nothing, and did cost something. folder: where the results are. resumed: how many of them are from an
    earlier run. ranges: of the model's tensors over all feeds, for its conversion to fp16: with them the model that is written is the
    one that was measured. verdicts: as they were stored.
    """

    found: Found
    left: Plan
    machine: Machine
    settings: Settings
    folder: Path
    minutes: float
    resumed: int
    feeds: Sequence[Feeds]
    ranges: Mapping[str, float] | None
    notes: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def plan(self) -> Plan:
        """For every site that may cost something: whether to fuse it, and what was measured."""
        return {**self.left, **self.found.decisions}

    def to_dict(self) -> dict[str, Any]:
        """The parts "measurement", "plan", "timings" and "layers" of a report."""
        final = self.found.final
        report: dict[str, Any] = {
            "measurement": {
                "machine": asdict(self.machine),
                "inputs": {name: list(array.shape) for name, array in self.feeds[0].items()},
                "budget_minutes": self.settings.budget,
                "minutes": round(self.minutes, 2),
                "margin": self.found.automatic.margin,
                "folder": str(self.folder),
                "resumed": self.resumed,
                "final": {name: value for name, value in final.to_dict().items() if name != "layers"},
                "candidates": [trial.to_dict() for trial in self.found.trials],
            },
            "plan": {"policy": "measure", "summary": self.summary, "search": [_step(trial, final) for trial in self.found.trials]},
            "timings": _timings(final),
        }
        if "layers" in final.result:
            report["layers"] = final.result["layers"]
        return report

    @property
    def summary(self) -> str:
        """One sentence."""
        final = self.found.final
        if final.keys:
            return f"{final.names}: {final.said}."
        count = len(self.found.groups)
        return f"Nothing is faster than TensorRT alone ({final.result['automatic_ms']['median']:.4f} ms); groups of sites: {count}."

    def tidy(self) -> None:
        """Removes engines, models and arrays, which are large; the results stay."""
        for path in self.folder.iterdir():
            if not _RESULT.fullmatch(path.name) and path.name != "lock":
                path.unlink(missing_ok=True)


def _step(trial: Trial, final: Trial) -> dict[str, Any]:
    """A step of the search. kept: whether its sites are part of the plan."""
    kept = trial.keys <= final.keys and bool(trial.keys) == bool(final.keys)
    step = {"group": trial.names, "stage": trial.stage, "sites": len(trial.keys), "verdict": trial.outcome, "kept": kept}
    return {**step, "reason": trial.explained, **({"ratio": trial.result["ratio"]} if "ratio" in trial.result else {})}


def _timings(trial: Trial) -> dict[str, Any]:
    of = trial.result
    return {
        "engines": {"automatic": of["automatic_ms"], "fused": of["fused_ms"]},
        "baseline": "automatic",
        "ratios": {"fused": {**of["ratio"], "verdict": of["verdict"]}},
        "samples": of["samples"],
        "placements": len(of["placements_ms"]["fused"]),
        "marks": list(of["marks"]),
    }


def measure(
    model: Path,
    *,
    precision: str = "keep",
    keep_fp32: Sequence[str] = (),
    gpu: str = "auto",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    feeds: Sequence[Feeds] | None = None,
    dims: Mapping[str, int] | None = None,
    settings: Settings = Settings(),
    progress: Progress = pipeline.silent,
) -> Measurement:
    """Searches for what is faster than TensorRT alone on the GPU here, on the first of `feeds`, or on generated inputs with `dims` as free
    sizes. All feeds count for the ranges of a conversion to fp16.

    Raises MissingHere without TensorRT or GPU, or with another GPU than `gpu`; BadInput for the model, the arguments, or a folder in use;
    Interrupted for Ctrl-C, after which the same call goes on where it was.
    """
    started = time.monotonic()
    budget = Budget(settings.budget, lambda: (time.monotonic() - started) / 60)
    progress("looking for a GPU and the plugin library")
    machine = Machine.here(gpu)
    progress("looking for sites")
    places, free = pipeline.sites(model, only, skip, precision)
    with Runtime() as child:
        if feeds is None:
            progress("making up inputs")
            feeds = generated(child, model, count=2, dims=dims).whole().feeds
        _refuse_types(feeds[0])
        progress("measuring ranges")
        ranges = child.ranges(model, feeds) if precision == "fp16" else None
    sizes = sizes_of(inputs_of(model), {name: np.shape(array) for name, array in feeds[0].items()})
    places = tuple(replace(place, site=place.site.sized(sizes)) for place in places)
    context = _context(model, feeds, precision, keep_fp32, machine, settings)
    root = (settings.folder or plugins.cache_dir() / "measurements").absolute()
    folder = root / f"{_file_name(model.stem)}-{_digest(context)[:16]}"
    with _own(folder):
        np.savez(folder / "inputs.npz", **feeds[0])  # type: ignore[arg-type]
        if ranges is not None:
            (folder / "ranges.json").write_text(json.dumps(ranges), encoding="utf-8")
        cache = settings.timing_cache or root / f"{_file_name(machine.name)}-trt{_file_name(machine.tensorrt)}.timing-cache"
        base = Rewriting("measure", tuple(only), tuple(skip))
        first = Candidate(
            model=str(model.absolute()),
            automatic=base,
            fused=base,
            precision=precision,
            keep_fp32=tuple(keep_fp32),
            inputs=str(folder / "inputs.npz"),
            ranges=None if ranges is None else str(folder / "ranges.json"),
            work=str(folder),
            automatic_engine=str(folder / "automatic.engine"),
            timing_cache=str(cache.absolute()),
            samples=settings.samples,
        )
        again = replace(first, automatic_engine=str(folder / "automatic-again.engine"), fused_engine=str(folder / "final.engine"))
        worker = _Worker(folder, context, budget, progress)
        try:
            left = _costly_folding(worker, first, [site.key for site in free]) if free else {}
            base = replace(base, sites=tuple((fusion, output, fused) for (fusion, output), (fused, _) in left.items()))
            first, again = (replace(candidate, automatic=base, fused=base) for candidate in (first, again))
            found = search(grouped(places), first, again, worker, budget, _promise(machine, precision), worker.announce, _together())
        except KeyboardInterrupt:
            kept = f"{worker.done} measurement{'' if worker.done == 1 else 's'} kept in {folder}"
            raise Interrupted(f"interrupted; {kept}: give the same command again to go on from there") from None
    measured = tuple(_verdicts(found, model, machine, precision))
    notes = list(store.add(measured))
    if worker.resumed:
        notes.append(f"{worker.resumed} of {worker.done} measurements are from an earlier run, kept in {folder}")
    minutes = budget.spent()
    return Measurement(found, left, machine, settings, folder, minutes, worker.resumed, feeds, ranges, tuple(notes), measured)


def optimize(
    model: Path,
    out: Path,
    *,
    precision: str = "keep",
    keep_fp32: Sequence[str] = (),
    gpu: str = "auto",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    feeds: Sequence[Feeds] | None = None,
    dims: Mapping[str, int] | None = None,
    settings: Settings = Settings(),
    check: bool = True,
    progress: Progress = pipeline.silent,
) -> pipeline.Result:
    """`measure`, and then `pipeline.optimize` by what it found: into `out` goes the model that was measured."""
    rewriting: dict[str, Any] = {"precision": precision, "keep_fp32": keep_fp32, "only": only, "skip": skip, "dims": dims}
    found = measure(model, gpu=gpu, feeds=feeds, settings=settings, progress=progress, **rewriting)
    result = pipeline.optimize(
        model,
        out,
        policy="measure",
        measured=found.plan,
        gpu=gpus.resolve("auto"),
        feeds=found.feeds,
        ranges=found.ranges,
        check=check,
        progress=progress,
        **rewriting,
    )
    found.tidy()
    return replace(result, measured=found.to_dict(), notes=(*found.notes, *result.notes))


def _costly_folding(worker: _Worker, first: Candidate, free: Sequence[tuple[str, str]]) -> Plan:
    """Folding that costs nothing is in both engines, unless it does cost something: TensorRT folds by itself, too. The sites to leave."""
    untouched = replace(first.automatic, sites=tuple((fusion, output, False) for fusion, output in free))
    worker.announce("folding that costs nothing")
    before = str(Path(first.work) / "untouched.engine")
    result = worker(replace(first, automatic=untouched, automatic_engine=before, fused_engine=first.automatic_engine))
    trial = Trial("folding", (), frozenset(free), result, BUILD_DIFFERENCE)
    if trial.outcome in ("won", "draw", "same"):
        return {}
    return dict.fromkeys(free, (False, f"folding that should cost nothing, but: {trial.said}; left to TensorRT{trial.because}"))


def _refuse_types(feeds: Feeds) -> None:
    for name, array in feeds.items():
        if array.dtype.kind not in "fiub":
            raise BadInput(f"input {name} is {array.dtype.name}: --policy measure takes float32, float16, integers and booleans")


def _promise(machine: Machine, precision: str) -> Callable[[Group], float]:
    """What the verdicts say of a group: the ratio measured where it comes nearest."""
    known = store.load().verdicts
    target = Target(machine.name, machine.tensorrt, machine.driver)

    def promise(group: Group) -> float:
        evidence = verdicts.nearest(known, group.places[0].site, target, verdicts.DTYPES.get(precision))
        return 1.0 if evidence is None else evidence.verdict.ratio.median

    return promise


def _together() -> tuple[frozenset[str], ...]:
    """Names of fusions that belong together."""
    return tuple(frozenset((fusion.name, *fusion.belongs_with)) for fusion in REGISTRY if fusion.belongs_with)


def _verdicts(found: Found, model: Path, machine: Machine, precision: str) -> Iterator[Verdict]:
    """One for each group that was measured alone; from the rebuild where that was the final plan or was to be. And one for each group of a
    final plan of several fusions that nobody measured alone.
    """
    again = {trial.groups: trial for trial in found.trials if trial.stage == "final"}
    alone = set()
    for trial in found.trials:
        if trial.stage != "alone" or any(place.needs for place in trial.groups[0].places):
            continue
        (group,) = trial.groups
        alone.add(group)
        last = again.get(trial.groups, trial)
        if last.keys != trial.keys or last.outcome not in OUTCOMES:
            last = trial
        if last.outcome in OUTCOMES:
            yield from _verdict(group, (), last.result, model, machine, precision)
    for group in found.final.groups if found.final.won else ():
        beside = tuple(sorted({other.fusion for other in found.final.groups} - {group.fusion}))
        if beside and group not in alone:
            yield from _verdict(group, beside, found.final.result, model, machine, precision)


def _verdict(
    group: Group, beside: tuple[str, ...], of: Mapping[str, Any], model: Path, machine: Machine, precision: str
) -> Iterator[Verdict]:
    if group.fusion in verdicts.APART and group.variant is None:
        return  # of several forms: it says nothing of any
    yield Verdict(
        fusion=group.fusion,
        variant=group.variant,
        beside=beside,
        model=model.stem,
        rows=group.rows,
        width=group.width,
        dtype=verdicts.DTYPES.get(precision, group.dtype),
        gpu=machine.name,
        driver=machine.driver,
        tensorrt=machine.tensorrt,
        automatic_ms=Interval(**of["automatic_ms"]),
        fused_ms=Interval(**of["fused_ms"]),
        ratio=Interval(**of["ratio"]),
        date=of["date"],
    )


# Results that last ------------------------------------------------------------------------------------------------------


class _Worker:
    """Measures candidates in children and keeps what they give; what was measured before is not measured again."""

    def __init__(self, folder: Path, context: Mapping[str, Any], budget: Budget, progress: Progress) -> None:
        self.folder = folder
        self.context = context
        self.budget = budget
        self.progress = progress
        self.done = self.resumed = 0
        self._what = ""

    def announce(self, what: str) -> None:
        self._what = what
        self._tell("")

    def _tell(self, step: str) -> None:
        left = self.budget.minutes - self.budget.spent()
        time_left = f"{left:.1f} minutes left" if left > 0 else "the budget is spent, finishing"
        self.progress(f"{self._what}{f': {step}' if step else ''} ({time_left})")

    def __call__(self, candidate: Candidate) -> work.Result:
        key = self._key(candidate)
        path = self.folder / f"{_digest(key)[:24]}.json"
        known = load(path, key)
        self.resumed += known is not None
        result = known
        if result is None:
            result = work.in_child(candidate, CANDIDATE_SECONDS, self._tell)
            if "failed" not in result:
                result["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
                save(path, key, result)
        self.done += 1
        return result

    def _key(self, candidate: Candidate) -> Any:
        """All that the result depends on: the rewritings, whether this is the rebuild, and the context."""
        rewritings = {"automatic": asdict(candidate.automatic), "fused": asdict(candidate.fused)}
        return as_json({**rewritings, "engines": Path(candidate.automatic_engine).stem, **self.context})


def _context(
    model: Path, feeds: Sequence[Feeds], precision: str, keep_fp32: Sequence[str], machine: Machine, settings: Settings
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "onnxfuse": __version__,
        "model": manifest.model_digest(model),
        "inputs": [
            {name: [list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()] for name, array in sorted(f.items())} for f in feeds
        ],
        "precision": precision,
        "keep_fp32": list(keep_fp32),
        "machine": asdict(machine),
        "samples": settings.samples,
    }


def as_json(value: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(value))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def save(path: Path, key: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Keeps a result, whole or not at all."""
    with atomic(path) as part:
        part.write_text(json.dumps({"key": key, "result": result, "sha256": _digest(result)}) + "\n", encoding="utf-8")


def load(path: Path, key: Mapping[str, Any]) -> work.Result | None:
    """The result kept at `path` for `key`; None where there is none, or it is damaged, of something else, or marked: then it is measured
    again.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key or content["sha256"] != _digest(content["result"]) or content["result"]["marks"]:
            return None
        return {**content["result"], "from_earlier_run": True}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone; what a killed one left half-done in it is removed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        lock = (folder / "lock").open("a")
    except OSError as error:
        raise BadInput(f"{folder}: {(error.strerror or str(error)).lower()}; give --measurements a folder that can be written") from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:  # engines hold code, and one kept here is loaded again
        lock.close()
        raise BadInput(f"{folder}: others can write there; give --measurements a folder of your own")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{folder}: this model is being measured by another process; wait for it, or end it") from None
        for left in [*folder.glob("scratch-*"), *folder.glob("order-*"), *folder.glob(".*.part")]:
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        yield


@functools.cache
def _file_name(name: str) -> str:
    """A name that any file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80] or "model"
