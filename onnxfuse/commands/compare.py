"""`onnxfuse compare`: do models and engines give the same outputs, and which is faster?"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onnxfuse.commands import options, progress
from onnxfuse.errors import BadInput, Disagreement, MissingHere

if TYPE_CHECKING:
    from onnxfuse.verify.check import Check, Stream
    from onnxfuse.verify.layers import Subject
    from onnxfuse.verify.metrics import Tolerance
    from onnxfuse.verify.reference import Feeds, Outputs, Runtime
    from onnxfuse.verify.taps import EngineSubject

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the user asks for."""

    model: Path
    others: tuple[Path, ...]
    data: Path | None
    seed: int
    feeds: int
    dims: dict[str, int]
    rtol: float | None
    atol: float | None
    samples: int
    layers: bool = False
    truth: bool = True
    memory: int = 512
    trust: bool = False


def compare(
    model: Path = typer.Argument(..., metavar="MODEL", help="The reference: an .onnx file, run by onnxruntime in its own precision."),
    others: list[Path] = typer.Argument(
        None, metavar="[OTHER]...", help="Models (.onnx) and engines (.engine) to compare with it. None: a fused MODEL with itself undone."
    ),
    data: Path = typer.Option(None, help="Inputs: an .npz file with arrays named like the inputs, or a folder of them."),
    seed: int = typer.Option(0, min=0, help="Seed of the generated inputs."),
    feeds: int = typer.Option(2, min=1, help="How many sets of inputs to generate; those after the first vary the free sizes."),
    dims: list[str] = typer.Option(None, metavar="NAME=N", help="Size of a symbolic dimension; may be repeated."),
    rtol: float = typer.Option(None, min=0.0, help="Relative tolerance; by default what suits the precision."),
    atol: float = typer.Option(None, min=0.0, help="Absolute tolerance."),
    samples: int = typer.Option(200, min=2, help="Latency samples of each engine."),
    layers: bool = typer.Option(False, "--layers", help="Look inside: every tensor that OTHER still has, and what is wrong by itself."),
    truth: bool = typer.Option(True, "--truth/--no-truth", help="With --layers: measure errors against the model in float64, too."),
    memory: int = typer.Option(None, min=1, metavar="MIB", help="With --layers: MiB of tensors that are held at once; 512 if not given."),
    report: Path = typer.Option(None, metavar="DIR", help="Write report.json and report.html into this folder."),
    trust: bool = typer.Option(False, "--trust", help="Run code inside engines although no manifest vouches for it: as any program."),
) -> None:
    """Compare outputs and latency of models and engines.

    MODEL is the reference. Every output of every OTHER is compared with it. Engines are run on the GPU here and timed side by side. With
    --layers the tensors inside are compared as well, and the error of each output is told apart: the price of a precision, or a fault.
    """
    from onnxfuse.report import inside, terminal

    idle = [name for name, given in (("--no-truth", not truth), ("--memory", memory is not None)) if given and not layers]
    if idle:
        raise BadInput(f"{idle[0]}: nothing is looked into without --layers; add --layers, or leave {idle[0]} out")
    sizes = options.dims(dims or [])
    wanted = Wanted(model, tuple(others or ()), data, seed, feeds, sizes, rtol, atol, samples, layers, truth, memory or 512, trust)
    _require(wanted)
    if report:
        _require_folder(report)
    with progress.status() as say:
        found = run(wanted, say)
    terminal.show(found)
    inside.show(found)
    if report:
        _write(_complete(found, wanted), report)
    if not found["agrees"]:
        raise Disagreement(_disagreement(found))


def run(wanted: Wanted, progress: Progress = lambda text: None) -> dict[str, Any]:
    """Compare, and return the report (see `report.json.compare_report`)."""
    from onnxfuse.report import machine
    from onnxfuse.report.json import compare_report
    from onnxfuse.verify import check
    from onnxfuse.verify.reference import Runtime

    with contextlib.ExitStack() as stack:
        engines = _open_engines(wanted, stack, progress)
        runtime = stack.enter_context(Runtime())
        reference, others = wanted.model, wanted.others
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onnxfuse-")))
        if not others:
            reference, others = _undone(wanted.model, folder, progress), (wanted.model,)
        models = [path for path in others if path not in engines]
        _same_inputs(reference, models, engines)
        given, source = _given(wanted, reference, engines, runtime, progress)
        label = f"{wanted.model.name} undone" if not wanted.others else wanted.model.name
        task = _Task(wanted, reference, label, _names(label, wanted.model, others), engines, runtime, progress)
        outcome = _compare(task, given)
        rows = [_row(task, path, check.merged(outcome.checks[path])) for path in others]
        more = _look_inside(task, outcome, given, folder) if wanted.layers else {}
        more |= _by_layer(task, given)
        latency = _latency(wanted, {task.names[path]: path for path in engines}, given, progress)
    return compare_report(
        model={"name": label, "path": str(wanted.model)},
        inputs={"source": f"{len(outcome.fed)} {source}", "feeds": outcome.fed},
        others=rows,
        latency=latency,
        machine=machine.describe(gpu=bool(engines)),
        **more,
    )


@dataclasses.dataclass(frozen=True)
class _Task:
    """What is compared with what. reference: the file that is run; label: how it is called; names: of the others."""

    wanted: Wanted
    reference: Path
    label: str
    names: Mapping[Path, str]
    engines: Mapping[Path, Any]
    runtime: Runtime
    progress: Progress


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """checks: of each other, one a feed. fed: the feeds in words."""

    checks: dict[Path, list[Check]]
    fed: list[dict[str, str]]

    @property
    def worst(self) -> int:
        """Which feed to look inside with: the first that shows a disagreement, else the first."""
        return next((i for i, checks in enumerate(zip(*self.checks.values(), strict=True)) if not all(c.agrees for c in checks)), 0)


def _compare(task: _Task, given: Stream) -> _Outcome:
    """Every other on every feed, of which one at a time is held."""
    outcome = _Outcome({path: [] for path in task.names}, [])
    for index, (feed, outputs) in enumerate(given):
        outcome.fed.append({name: f"{array.dtype.name}{list(array.shape)}" for name, array in feed.items()})
        for path, name in task.names.items():
            task.progress(f"{name}: input {index + 1} of {len(given.feeds)}")
            checked = _check_engine if path in task.engines else _check_model
            outcome.checks[path].append(checked(task, path, feed, outputs, given))
    if given.notes:  # known after the last feed
        for checks in outcome.checks.values():
            checks[0] = dataclasses.replace(checks[0], notes=(*given.notes, *checks[0].notes))
    return outcome


# ------------------------------------------------------------------------------------------------------ the request


def _require(wanted: Wanted) -> None:
    from onnxfuse.graph import read
    from onnxfuse.verify import check

    check.tolerance(rtol=wanted.rtol, atol=wanted.atol)
    if wanted.model.suffix == ".engine":
        raise BadInput(f"{wanted.model}: an engine cannot be the reference; name its .onnx model first and the engine behind it")
    for path in (wanted.model, *wanted.others):
        if not path.exists():
            raise BadInput(f"{path}: no such file; give an .onnx model or an .engine file")
        if path.suffix != ".engine":
            read.load(path)  # says what is wrong with a file in better words than a runtime, and keeps external data in its folder
    if len({path.resolve() for path in wanted.others}) < len(wanted.others):
        raise BadInput("the same OTHER is named twice, or a link to it; name each file once")
    if wanted.data and wanted.dims:
        raise BadInput("--data and --dims exclude each other: the sizes are those of the data; leave one of them out")


def _names(label: str, reference: Path, others: Sequence[Path]) -> dict[Path, str]:
    """Short names, with the folder where two files have the same name; none is `label`, which the reference is called."""
    short = [path.name for path in {reference, *others}]
    names = {path: path.name if short.count(path.name) == 1 else str(path) for path in others}
    return {path: f"{name} (other)" if name == label else name for path, name in names.items()}


def _undone(model: Path, folder: Path, progress: Progress) -> Path:
    from onnxfuse.graph import functions, read, write

    progress(f"undoing the fusions of {model.name}")
    loaded = read.load(model)
    if not functions.undo(loaded):
        raise BadInput(f"{model}: holds no fused node to undo; name another model or engine to compare it with")
    write.save(loaded, folder / f"undone-{model.name}")
    return folder / f"undone-{model.name}"


def _open_engines(wanted: Wanted, stack: contextlib.ExitStack, progress: Progress) -> dict[Path, Any]:
    paths = [path for path in wanted.others if path.suffix == ".engine"]
    if not paths:
        return {}
    from onnxfuse.engine.run import Engine

    engines = {}
    if wanted.layers:
        _load_plugins(paths)
    for path in paths:
        progress(f"loading {path.name}")
        engines[path] = stack.enter_context(Engine.load(path, trust=wanted.trust))
    return engines


def _load_plugins(engines: Sequence[Path]) -> None:
    """The plugin library for engines that are built to look into: loaded first, as one that is inside of an engine would be in its way."""
    from onnxfuse import plugins
    from onnxfuse.engine import manifest, trt

    known = [manifest.load(path) for path in engines if path.exists()]
    if any(found is not None and found.plugins is not None for found in known):
        trt.tensorrt()
        trt.load_plugins(plugins.build(trt.gpu().sm).path)


def _same_inputs(reference: Path, models: Sequence[Path], engines: Mapping[Path, Any]) -> None:
    from onnxfuse.verify import check, inputs

    for path in models:
        check.same_inputs(reference, path)
    needed = {spec.name for spec in inputs.specs(reference, optional=True)}
    for path, engine in engines.items():
        strange = sorted({spec.name for spec in engine.inputs} - needed)
        if strange:
            listed = ", ".join(map(repr, strange))
            raise BadInput(f"{path}: takes input {listed}, which {reference} does not have; name the model that it was built from")


# ---------------------------------------------------------------------------------------- inputs and the right values


def _given(wanted: Wanted, reference: Path, engines: Mapping[Path, Any], runtime: Runtime, progress: Progress) -> tuple[Stream, str]:
    """The feeds with the right values, and where they come from."""
    from onnxfuse.verify import check, inputs

    if wanted.data:
        return check.streamed(runtime, reference, inputs.from_data(wanted.data, reference), progress), f"from {wanted.data}"
    # An engine need not take other sizes than those that it was optimized for.
    sizes = {**_engine_sizes(reference, engines), **wanted.dims}
    given = check.generated(runtime, reference, wanted.seed, 1 if engines else wanted.feeds, sizes, progress)
    return given, f"generated with seed {wanted.seed}"


def _engine_sizes(reference: Path, engines: Mapping[Path, Any]) -> dict[str, int]:
    """Sizes that the engines take for the model's free dimensions: the fixed ones, or the sizes that they were optimized for."""
    from onnxfuse.verify import inputs

    sizes: dict[str, int] = {}
    for engine in engines.values():
        takes = {spec.name: spec.shape for spec in engine.inputs}
        if engine.manifest is not None:
            takes.update({tensor.name: tensor.opt for tensor in engine.manifest.inputs if tensor.opt})
        for spec in inputs.specs(reference):
            for axis, (dim, size) in enumerate(zip(spec.shape or (), takes.get(spec.name, ()), strict=False)):
                if not isinstance(dim, int) and size >= 0:
                    sizes.setdefault(dim or f"{spec.name}[{axis}]", size)
    return sizes


# --------------------------------------------------------------------------------------------------------- comparing


def _check_model(task: _Task, path: Path, feed: Feeds, outputs: Outputs, given: Stream) -> Check:
    from onnxfuse.verify import check

    got = task.runtime.run(path, [feed], evaluator=given.evaluator)
    limits, notes = check.limits_for(task.reference, path, task.wanted.rtol, task.wanted.atol)
    if path.samefile(task.reference):
        notes = (*notes, "the same file as the reference: that it agrees with itself says nothing of a rewrite")
    return _compared(given, outputs, got[0], limits, notes, same_dtype=True)


def _check_engine(task: _Task, path: Path, feed: Feeds, outputs: Outputs, given: Stream) -> Check:
    from onnxfuse.engine.run import cast_feeds

    engine = task.engines[path]
    got = engine.run(cast_feeds(engine.inputs, feed))
    limits = _engine_limits(task, engine)
    said = engine.manifest.notes if engine.manifest is not None else ()
    notes = (f"the limits are those of {limits.name}, the lowest precision of the engine's layers", *engine.changed, *said)
    return _compared(given, outputs, got, limits, notes, same_dtype=False)


def _engine_limits(task: _Task, engine: Any) -> Tolerance:
    from onnxfuse.verify import check

    return check.tolerance(_engine_precision(engine), task.wanted.rtol, task.wanted.atol)


def _engine_precision(engine: Any) -> str:
    """The lowest precision among the layers as built; of the inputs and outputs where no manifest tells, at least TF32."""
    if engine.manifest is not None and engine.manifest.layers:
        built = {dtype for layer in engine.manifest.layers for dtype in (*layer.inputs, *layer.outputs)}
    else:
        built = {spec.dtype for spec in (*engine.inputs, *engine.output_specs)}
    for precision, words in (("bfloat16", ("bf16", "bfloat16")), ("quantized", ("int8", "fp8")), ("float16", ("fp16", "float16"))):
        if built & set(words):
            return precision
    return "tf32"


def _compared(given: Stream, outputs: Outputs, got: Mapping[str, Any], limits: Tolerance, notes: Sequence[str], same_dtype: bool) -> Check:
    from onnxfuse.verify.check import check_arrays
    from onnxfuse.verify.reference import describe

    return check_arrays([outputs], [got], limits, same_dtype=same_dtype, source=describe(given.evaluator), notes=notes)


def _row(task: _Task, path: Path, check: Check) -> dict[str, Any]:
    row = {"name": task.names[path], "path": str(path), "kind": "engine" if path in task.engines else "onnx", "check": check}
    if path not in task.engines:
        return row
    manifest = task.engines[path].manifest
    return {**row, "manifest": manifest and {k: v for k, v in vars(manifest).items() if k != "layers"}}


# ------------------------------------------------------------------------------------------------------------- inside


def _look_inside(task: _Task, outcome: _Outcome, given: Stream, folder: Path) -> dict[str, Any]:
    """The parts of a report that say what happens inside, for the feed that shows most."""
    from onnxfuse.verify import budget, check, layers, pieces, reference, taps

    if given.evaluator != reference.ONNXRUNTIME:
        raise MissingHere(f"{task.reference}: --layers needs onnxruntime, which has no kernels for it; leave --layers out")
    feed = given.feeds[outcome.worst]
    task.progress(f"reading {task.label}")
    limits = check.tolerance(check.precision(task.reference), task.wanted.rtol, task.wanted.atol)
    parts = pieces.prepare(task.reference, feed, task.runtime, folder)
    half = limits.name if limits.name in ("float16", "bfloat16") else "float32"
    base = layers.ModelSubject(task.label, f"onnxruntime_{half}", limits, parts, feed, task.runtime, folder)
    with contextlib.ExitStack() as stack:
        subjects = _subjects(task, feed, folder, stack)
        for subject in subjects:
            if isinstance(subject, taps.EngineSubject):
                subject.build_ahead()
        found = layers.look(
            base, subjects, feed, task.runtime, truth=task.wanted.truth, budget=task.wanted.memory << 20, progress=task.progress
        )
        notes = [note for subject in subjects if isinstance(subject, taps.EngineSubject) for note in (*subject.notes, *subject.how)]
    more: dict[str, Any] = {"tensors": budget.tensors(found), "inside": {**budget.summary(found, notes), "feed": outcome.worst}}
    return {**more, "error_budget": budget.error_budget(found)} if task.wanted.truth else more


def _subjects(task: _Task, feed: Feeds, folder: Path, stack: contextlib.ExitStack) -> list[Subject]:
    """All others, ready to be looked into until `stack` closes."""
    from onnxfuse.verify import check, layers, pieces

    found: list[Subject] = []
    for path, name in task.names.items():
        task.progress(f"reading {name}")
        role = _role(task, path, {s.role for s in found})
        if path in task.engines:
            engine = _engine_subject(task, path, role, feed, folder)
            stack.callback(engine.close)
            found.append(engine)
            continue
        limits, _ = check.limits_for(task.reference, path, task.wanted.rtol, task.wanted.atol)
        parts = pieces.prepare(path, feed, task.runtime, folder)
        found.append(layers.ModelSubject(name, role, limits, parts, feed, task.runtime, folder))
    return found


def _engine_subject(task: _Task, path: Path, role: str, feed: Feeds, folder: Path) -> EngineSubject:
    from onnxfuse.engine import build, trt
    from onnxfuse.verify import pieces, taps

    engine = task.engines[path]
    others = (task.reference, *(other for other in task.names if other not in task.engines))
    source = taps.source_of(engine.manifest, path, others)
    parts = pieces.prepare(source or task.reference, feed, task.runtime, folder)
    return taps.EngineSubject(
        task.names[path],
        role,
        _engine_limits(task, engine),
        engine,
        engine.manifest,
        source,
        parts,
        feed,
        task.runtime,
        folder,
        build.in_memory,
        trt.free_memory() // len(task.engines),
        taps.cache_of(engine.manifest, path),
        task.progress,
    )


def _role(task: _Task, path: Path, taken: Collection[str]) -> str:
    """What an other is in the error budget: TensorRT's automatic engine, a fused one, or a further one by its name."""
    manifest = task.engines[path].manifest if path in task.engines else None
    role = "automatic" if path in task.engines and (manifest is None or manifest.plugins is None) else "fused"
    return task.names[path] if role in taken else role


def _by_layer(task: _Task, given: Stream) -> dict[str, Any]:
    """The part "layers", of the first automatic engine and the first fused one; where they cannot be profiled, a note says why."""
    found: dict[str, Any] = {}
    for path, engine in task.engines.items():
        found.setdefault(_role(task, path, ()), engine)
    if not {"automatic", "fused"} <= found.keys():
        return {}
    from onnxfuse.bench import layers
    from onnxfuse.engine.run import cast_feeds
    from onnxfuse.errors import OnnxfuseError
    from onnxfuse.report.graph import fused_sites

    task.progress("timing layer by layer")
    try:
        automatic, fused = (layers.profile(found[role], cast_feeds(found[role].inputs, given.feeds[0])) for role in ("automatic", "fused"))
    except OnnxfuseError as fault:
        return {"notes": [f"layers: {fault}"]}
    sources = layers.sources_of(site for path in _rewritten(task.reference, list(task.names)) for site in fused_sites(path))
    return {"layers": layers.report(automatic, fused, sources)}


def _latency(wanted: Wanted, engines: Mapping[str, Path], given: Stream, progress: Progress) -> dict[str, Any] | None:
    """Engines timed in turns; ratios are of the first over each of the others, so that above 1 the other is faster."""
    if not engines:
        return None
    from onnxfuse.bench.stats import verdict
    from onnxfuse.bench.timing import time_placed
    from onnxfuse.engine.run import Engine

    progress(f"timing {', '.join(engines)}: {wanted.samples} samples each")
    load = {name: partial(Engine.load, path, trust=wanted.trust) for name, path in engines.items()}
    timings = time_placed(load, given.feeds[0], samples=wanted.samples)
    baseline, *rest = engines
    ratios = {name: timings.ratio(baseline, name) for name in rest}
    return {
        "engines": {name: timings.median(name).to_dict() for name in engines},
        "baseline": baseline,
        "ratios": {name: {**ratio.to_dict(), "verdict": verdict(ratio)} for name, ratio in ratios.items()},
        "samples": wanted.samples,
        "placements": timings.placements,
        "marks": list(timings.marks),
    }


# ---------------------------------------------------------------------------------------------------------- telling


def _disagreement(found: Mapping[str, Any]) -> str:
    parts = []
    for other in found["others"]:
        bad = {name: m["reason"] for name, m in other["check"]["outputs"].items() if not m["agrees"]}
        if bad:
            name, reason = next(iter(bad.items()))
            more = f" (and {len(bad) - 1} more outputs)" if len(bad) > 1 else ""
            parts.append(f"{other['name']}: output {name!r} differs{more}: {reason}")
    for subject in (found.get("inside") or {}).get("subjects", ()):
        wrong = subject["wrong"]
        if wrong:
            by = f"fusion {wrong['fusion']}, node '{wrong['node']}'" if wrong["fusion"] else f"node '{wrong['node']}'"
            parts.append(f"{subject['name']}: wrong by itself: {by}")
    return "; ".join(parts)


def _require_folder(folder: Path) -> None:
    """Before the work is done, not after it. Nothing is made yet: where the work fails, there is nothing to write."""
    from onnxfuse.graph import files

    if not folder.is_dir():
        if folder.exists():
            raise BadInput(f"--report {folder}: it is a file, and a folder is to be made; give --report a folder")
        if folder.suffix.lower() in (".html", ".json"):  # what `optimize --report` takes
            raise BadInput(f"--report {folder}: a folder is to be made, for report.html and report.json; give {folder.with_suffix('')}")
        files.check(folder, "--report")
    elif not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"--report {folder}: the folder cannot be written to; give --report another")


def _rewritten(reference: Path, others: Sequence[Path]) -> list[Path]:
    """The models among `others`, and those that the engines with plugins were built from, where they are still here."""
    from onnxfuse.engine import manifest
    from onnxfuse.verify import taps

    models = [path for path in others if path.suffix != ".engine"]
    known = {path: manifest.load(path) for path in others if path.suffix == ".engine"}
    sources = [taps.source_of(about, path, (reference, *models)) for path, about in known.items() if about and about.plugins is not None]
    return list(dict.fromkeys([*models, *(source for source in sources if source is not None)]))


def _complete(found: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """With the graphs of the reference and of the first rewritten model, and what follows from them."""
    from onnxfuse.report.complete import complete

    models = _rewritten(wanted.model, wanted.others)
    return complete(found, wanted.model if wanted.others else None, models[0] if models else wanted.model if not wanted.others else None)


def _write(found: Mapping[str, Any], folder: Path) -> None:
    from onnxfuse.report import html, json

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput(f"--report {folder}: {(error.strerror or str(error)).lower()}; give --report another folder") from None
    json.write(found, folder / "report.json")
    html.write(found, folder / "report.html")
    typer.echo(f"wrote {folder / 'report.html'} and report.json")
