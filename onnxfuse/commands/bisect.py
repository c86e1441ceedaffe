"""`onnxfuse bisect`: which fused sites make the outputs disagree, or which nodes need float32."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onnxfuse.commands import options, progress
from onnxfuse.errors import BadInput, Disagreement

if TYPE_CHECKING:
    from onnxfuse.verify.bisect.backends import Backend, Feeds, OnnxRuntime
    from onnxfuse.verify.bisect.regions import Pair, Region
    from onnxfuse.verify.bisect.repro import Reproduction
    from onnxfuse.verify.bisect.search import Finding
    from onnxfuse.verify.check import Reference
    from onnxfuse.verify.metrics import Tolerance
    from onnxfuse.verify.reference import Outputs, Runtime

Progress = Callable[[str], None]
ENGINE_RUNS = 5  # of one engine: a fault that shows in every second run is missed with a probability of 3 %
ENGINE_SAMPLE = 3  # innocent plugins asked alone: each is an engine to build


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the user asks for."""

    model: Path
    other: Path | None
    plan: Path | None
    policy: str
    precision: str | None
    tensorrt: bool
    feeds: Sequence[Feeds] | None
    dims: dict[str, int]
    seed: int
    repeats: int | None
    tries: int
    rtol: float | None
    atol: float | None
    folder: Path


def bisect(
    model: Path = typer.Argument(..., metavar="MODEL", help="The original ONNX model."),
    other: Path = typer.Option(None, help="The fused file that disagrees, or the engine built from it; MODEL is optimized if not given."),
    plan: Path = typer.Option(None, help="Optimize MODEL by this plan, a report of `optimize`."),
    policy: str = typer.Option("all", help="The policy to optimize MODEL with: all, proven or none."),
    precision: str = typer.Option(None, help="fp16 or bf16: find which nodes must stay in float32 instead."),
    tensorrt: bool = typer.Option(False, "--tensorrt", help="Look for the fault in the kernels: each try is an engine, on the GPU here."),
    data: Path = typer.Option(None, help="Inputs: an .npz file with arrays named like the inputs, or a folder of them."),
    dims: list[str] = typer.Option(None, metavar="NAME=N", help="Size of a symbolic dimension in generated inputs (repeatable)."),
    seed: int = typer.Option(0, min=0, help="Seed of the generated inputs."),
    repeats: int = typer.Option(None, min=1, max=1000, help="Runs of each try, for faults that come and go; 5 for engines, else 1."),
    tries: int = typer.Option(1000, min=3, help="Most runs in all; what is known by then is told."),
    rtol: float = typer.Option(None, min=0.0, help="Relative tolerance; by default what suits the precision."),
    atol: float = typer.Option(None, min=0.0, help="Absolute tolerance."),
    out: Path = typer.Option(
        None, "-o", "--out", metavar="DIR", help="Where the reproduction goes; MODEL with the suffix .bisect if not given."
    ),
) -> None:
    """Find the fused sites that make the outputs disagree.

    Sites are switched off and on until the smallest set that disagrees is left. A small model that shows it by itself is written.
    """
    from onnxfuse.verify import check
    from onnxfuse.verify.bisect import words

    _require(model, other, plan, policy, precision, tensorrt)
    check.tolerance(rtol=rtol, atol=atol)  # refused before the work, not after it
    sizes = options.dims(dims or [])
    given = options.feeds(data, dims or [], model)
    folder = out or model.with_suffix(".bisect")
    _require_folder(folder)
    wanted = Wanted(model, other, plan, policy, precision, tensorrt, given, sizes, seed, repeats, tries, rtol, atol, folder)
    with progress.status() as say:
        found = of_precision(wanted, say) if precision else of_sites(wanted, say)
    words.show(found)
    if found["verdict"] != "agree":
        raise Disagreement(words.headline(found))


def _require(model: Path, other: Path | None, plan: Path | None, policy: str, precision: str | None, tensorrt: bool) -> None:
    from onnxfuse.graph import read

    if precision not in (None, "fp16", "bf16"):
        raise BadInput(f"--precision {precision}: no such precision; give fp16 or bf16")
    if policy not in ("all", "proven", "none"):
        raise BadInput(f"--policy {policy}: no such policy here; give all, proven or none")
    idle = [name for name, value in (("--plan", plan), ("--policy", policy != "all"), ("--precision", precision)) if value and other]
    if idle:
        raise BadInput(f"{idle[0]} and --other exclude each other: the sites are those of the other file; leave one of them out")
    if precision and tensorrt:
        raise BadInput("--precision and --tensorrt exclude each other: conversions are tried in onnxruntime; leave one of them out")
    for path in (model, other):
        if path is not None and not path.exists():
            raise BadInput(f"{path}: no such file; give an .onnx model" + (" or an .engine file" if path == other else ""))
        if path is not None and path.suffix != ".engine":
            read.load(path)


def _require_folder(folder: Path) -> None:
    """Before the work is done, not after it. Nothing is made yet: where all agrees, there is nothing to write."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"cannot write {folder}: it is a file; give -o a folder")
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write {folder}: folder {there} cannot be written to; give -o another folder")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {(error.strerror or str(error)).lower()}; give -o another folder") from None


# -------------------------------------------------------------------------------------------------------------- sites


def of_sites(wanted: Wanted, say: Progress) -> dict[str, Any]:
    """The sites that make the outputs disagree, as a report: see `_report`.

    What is searched is how far the fused file is from itself with its sites off, which leaves out what half precision costs both.
    """
    from onnxfuse.verify.bisect import regions, search
    from onnxfuse.verify.bisect.oracles import against, exchanging
    from onnxfuse.verify.reference import Runtime

    on_gpu = wanted.tensorrt or (wanted.other is not None and wanted.other.suffix == ".engine")
    if on_gpu:
        _require_gpu()
    with _scratch() as scratch, Runtime() as runtime:
        fused = _source_of(wanted.other) if wanted.other is not None else _optimized(wanted, scratch, say)
        cpu, given = _given(wanted, fused, runtime, 1 if on_gpu else 2, say)
        repeats = wanted.repeats or (ENGINE_RUNS if on_gpu else 1)
        backend = _engines(scratch, repeats) if on_gpu else cpu
        limits = _limits(wanted, fused, on_gpu)
        original, alike = (fused, True) if on_gpu else _unfused(wanted, fused, cpu, given, limits, scratch)
        say("comparing the files")
        original, rewritten, given = _without_branches(original, fused, cpu, given, limits, scratch)
        right = against(given.outputs, limits, backend.same_dtype)
        pair = regions.pair(original, rewritten, scratch)
        pair = pair.only(_has_plugin) if on_gpu else pair
        unfused = backend.run(pair.save((), scratch / "unfused.onnx"), given.feeds)
        case = Case(wanted, pair, cpu, backend, given.feeds, limits, unfused, scratch, say)
        oracle = exchanging(pair, lambda path: backend.run(path, given.feeds), against(unfused, limits, backend.same_dtype))
        finding = search.Finding("agree", 0.0)
        if pair.sites:
            sample = ENGINE_SAMPLE if on_gpu else 8
            groups = {name: pair.regions[name].group for name in pair.sites} if alike else None
            finding = search.search(pair.sites, oracle, groups=groups, repeats=repeats, sample=sample, limit=wanted.tries, say=say)
        whole = right(backend.run(pair.save(pair.sites, scratch / "whole.onnx"), given.feeds))
        return _told(case, finding, fused, whole, right(unfused))


@dataclasses.dataclass(frozen=True)
class Case:
    """What is searched, and by what. cpu: what gives the tensors inside. unfused: the outputs with every site off."""

    wanted: Wanted
    pair: Pair
    cpu: OnnxRuntime
    backend: Backend
    feeds: Sequence[Feeds]
    limits: Tolerance
    unfused: Sequence[Outputs]
    scratch: Path
    say: Progress


def _told(case: Case, finding: Finding, fused: Path, whole: float, baseline: float) -> dict[str, Any]:
    """The report, with what is written of it. whole, baseline: the figures against MODEL of all sites on, and off."""
    verdict = finding.verdict
    if whole <= 1 and finding.runs == 1 and case.limits.name in ("float16", "bfloat16"):
        verdict = "agree"  # the two round otherwise, and the fused one is near enough
    if verdict == "agree" and not (whole <= 1 and baseline <= 1):
        verdict = "rounding" if baseline <= 1 else "elsewhere"
    if verdict == "found" and baseline > 1 and finding.figure <= baseline:
        verdict = "elsewhere"  # half precision alone costs more than the sites change
    if verdict in ("agree", "elsewhere"):
        finding = dataclasses.replace(finding, causes=())
    if finding.guilty:
        for name in ("bisect.json", "plan.json", "repro.onnx", "repro.fused.onnx", "repro.npz"):  # of an earlier search
            (case.wanted.folder / name).unlink(missing_ok=True)
    made = _reproduced(case, finding) if finding.guilty else None
    report = _report(case, dataclasses.replace(finding, verdict=verdict), fused, made)
    report |= {"apart": finding.figure, "figure": whole, "baseline": baseline}
    if finding.guilty:
        report["plan"] = _plan(case, finding)
        _write(report, case.wanted.folder)
    return report


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="onnxfuse-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _require_gpu() -> None:
    from onnxfuse.engine import trt

    trt.tensorrt()
    trt.gpu()


def _source_of(other: Path) -> Path:
    """The model that an engine was built from, which its manifest names; a model is its own."""
    if other.suffix != ".engine":
        return other
    from onnxfuse.engine import manifest

    remedy = "give --other the .onnx file that it was built from, with --tensorrt"
    found = manifest.load(other)
    if found is None or found.model_path is None:
        raise BadInput(f"{other}: no manifest says which model it was built from; {remedy}")
    source = other.parent / found.model_path
    if not source.exists():
        raise BadInput(f"{other}: was built from {source}, which is gone; {remedy}")
    return source


def _optimized(wanted: Wanted, scratch: Path, say: Progress) -> Path:
    from onnxfuse import pipeline

    fused = scratch / f"{wanted.model.stem}.fused.onnx"
    pipeline.optimize(wanted.model, fused, policy=wanted.policy, plan=wanted.plan, check=False, progress=say)
    return fused


def _has_plugin(region: Region) -> bool:
    from onnxfuse import plugins
    from onnxfuse.engine import prepare

    creators = {op.name for op in plugins.ops()}
    return any(prepare.creator(op) in creators for op in region.ops)


def _engines(scratch: Path, runs: int) -> Backend:
    from onnxfuse.verify.bisect.engines import Engines

    return Engines(scratch, runs)


def _given(wanted: Wanted, fused: Path, runtime: Runtime, count: int, say: Progress) -> tuple[OnnxRuntime, Reference]:
    """Inputs, and MODEL's outputs for them, by an evaluator that can run the fused file, too."""
    from onnxfuse.verify import check, reference
    from onnxfuse.verify.bisect.backends import OnnxRuntime

    check.same_inputs(wanted.model, fused)
    if wanted.feeds is not None:
        given = check.Reference(wanted.feeds, *check.run_feeds(runtime, wanted.model, wanted.feeds, say))
    else:
        given = check.generated(runtime, wanted.model, wanted.seed, count, wanted.dims, say).whole()
    rounded = check.precision(fused) == "bfloat16" and check.precision(wanted.model) != "bfloat16"
    if given.evaluator == reference.ONNXRUNTIME and not rounded:
        try:
            runtime.run(fused, given.feeds[:1])
        except reference.CannotRun:
            outputs = runtime.run(wanted.model, given.feeds, evaluator=reference.ONNX_REFERENCE)
            given = check.Reference(given.feeds, outputs, reference.ONNX_REFERENCE, given.notes)
    return OnnxRuntime(runtime, given.evaluator, rounded), given


def _without_branches(
    original: Path, fused: Path, cpu: OnnxRuntime, given: Reference, limits: Tolerance, scratch: Path
) -> tuple[Path, Path, Reference]:
    """Both files with the branch that one feed takes in the place of each If, so that there are sites inside; and that feed alone, the one
    whose outputs are furthest off. The files as they are where there is no If, or where they cannot be run so.
    """
    from onnxfuse.errors import OnnxfuseError
    from onnxfuse.verify import pieces
    from onnxfuse.verify.bisect.oracles import worst_feed
    from onnxfuse.verify.check import Reference
    from onnxfuse.verify.skim import skeleton

    if not any(node.op_type == "If" and not node.domain for node in skeleton(fused).graph.node):
        return original, fused, given
    try:
        at = worst_feed(given.outputs, cpu.run(fused, given.feeds), limits, cpu.same_dtype)
        feed, taken = given.feeds[at], []
        for name, path in (("original", original), ("fused", fused)):
            folder = scratch / f"{name}-taken"
            folder.mkdir()
            taken.append(pieces.prepare(path, feed, cpu.runtime, folder).path)
    except OnnxfuseError:
        return original, fused, given
    return taken[0], taken[1], Reference([feed], [given.outputs[at]], given.evaluator, given.notes)


def _unfused(wanted: Wanted, fused: Path, cpu: OnnxRuntime, given: Reference, limits: Tolerance, scratch: Path) -> tuple[Path, bool]:
    """MODEL in the precision of the fused file, so that rounding is the same on both sides; and whether it is. MODEL itself where that is
    its precision, or where its conversion overflows or cannot be run.
    """
    import math

    from onnxfuse.errors import OnnxfuseError
    from onnxfuse.graph import read, write
    from onnxfuse.graph.precision import convert
    from onnxfuse.verify import check
    from onnxfuse.verify.bisect.oracles import against

    half = {"float16": "fp16", "bfloat16": "bf16"}.get(check.precision(fused))
    if half is None or check.precision(wanted.model) != "float32":
        return wanted.model, True
    path = scratch / f"{wanted.model.stem}.{half}.onnx"
    try:
        ranges = cpu.runtime.ranges(wanted.model, given.feeds) if half == "fp16" else None
        loaded = read.load(wanted.model)
        convert(loaded, "fp16" if half == "fp16" else "bf16", (), ranges)
        write.save(loaded, path)
        alike = math.isfinite(against(given.outputs, limits, cpu.same_dtype)(cpu.run(path, given.feeds)))
    except OnnxfuseError:
        alike = False
    return path if alike else wanted.model, alike


def _limits(wanted: Wanted, fused: Path, on_gpu: bool) -> Tolerance:
    from onnxfuse.verify import check

    limits, _ = check.limits_for(wanted.model, fused, wanted.rtol, wanted.atol)
    # TensorRT multiplies float32 matrices in TF32.
    return check.tolerance("tf32", wanted.rtol, wanted.atol) if on_gpu and limits.name == "float32" else limits


def _reproduced(case: Case, finding: Finding) -> Reproduction | None:
    """A reproduction of the first cause that is no rounding, with the feed that shows it best."""
    from onnxfuse.verify.bisect import repro
    from onnxfuse.verify.bisect.oracles import against, worst_feed

    guilty = next(cause.sites for cause in finding.causes if cause.kind != "rounding")
    original = case.pair.save((), case.scratch / "original.onnx")
    got = case.backend.run(case.pair.save(guilty, case.scratch / "guilty.onnx"), case.feeds)
    feed = case.feeds[worst_feed(case.unfused, got, case.limits, case.backend.same_dtype)]

    def fetch(names: Sequence[str]) -> Feeds:
        inner = [name for name in names if name not in feed]
        values = case.cpu.run(original, [feed], inner)[0] if inner else {}
        return {name: feed[name] if name in feed else case.pair.typed(name, values[name]) for name in names}

    def verify(first: Path, second: Path, feeds: Feeds) -> float:
        judge = against(case.cpu.run(first, [feeds]), case.limits, case.backend.same_dtype)
        return max(judge(case.backend.run(second, [feeds])) for _ in range(finding.repeats))

    _make_folder(case.wanted.folder)
    return repro.reproduce(case.pair, guilty, fetch, verify, case.wanted.folder, "repro", case.say)


def _plan(case: Case, finding: Finding) -> str | None:
    """Writes a plan that leaves the guilty sites unfused and fuses the others that the rewritten file has; returns its path. None where
    they are no sites of fusions, or MODEL is fused itself.
    """
    import json

    from onnxfuse.graph.files import atomic
    from onnxfuse.graph.model import DOMAIN
    from onnxfuse.verify.skim import skeleton

    keys = dict.fromkeys(key for site in finding.guilty for key in case.pair.regions[site].keys)
    if not keys or any(node.domain == DOMAIN for node in skeleton(case.wanted.model).graph.node):
        return None
    found = {"decision": "kept", "reason": "found by bisect: the outputs disagree with it"}
    others = {"decision": "fused", "reason": "fused in the file that was bisected, and not found to be at fault"}
    every = dict.fromkeys((*keys, *(key for region in case.pair.regions.values() for key in region.keys)))
    sites = [{"fusion": fusion, "output": output, **(found if (fusion, output) in keys else others)} for fusion, output in every]
    path = case.wanted.folder / "plan.json"
    with atomic(path) as temporary:
        temporary.write_text(json.dumps({"sites": sites}, indent=1) + "\n", encoding="utf-8")
    return str(path)


def _report(case: Case, finding: Finding, fused: Path, made: Reproduction | None) -> dict[str, Any]:
    """Plain values: the verdict and figures of `search.Finding`, the causes with their sites, the reproduction."""
    from onnxfuse import __version__

    own = case.wanted.other is None

    def site(name: str) -> dict[str, Any]:
        region = case.pair.regions[name]
        return {**dataclasses.asdict(region), "group": region.group, "words": str(region)}

    causes = [{**dataclasses.asdict(cause), "sites": [site(name) for name in cause.sites]} for cause in finding.causes]
    facts = {key: value for key, value in dataclasses.asdict(finding).items() if key != "causes"}
    reproduction = None
    if made is not None:
        reproduction = {**dataclasses.asdict(made), "original": str(made.original), "fused": str(made.fused), "data": str(made.data)}
    return {
        "kind": "bisect",
        "onnxfuse": __version__,
        "model": str(case.wanted.model),
        "other": f"{case.wanted.model.name}, optimized" if own else fused.name,
        "backend": case.backend.name,
        "limits": case.limits.name,
        "policy": case.wanted.policy if own else None,
        "sites": len(case.pair.sites),
        **facts,
        "causes": causes,
        "reproduction": reproduction,
        "crashes": list(getattr(case.backend, "faults", ())),
    }


# ---------------------------------------------------------------------------------------------------------- precision


def of_precision(wanted: Wanted, say: Progress) -> dict[str, Any]:
    """The nodes that must stay in float32, as a report."""
    from onnxfuse import __version__, pipeline
    from onnxfuse.graph.precision import Precision
    from onnxfuse.verify import check
    from onnxfuse.verify.bisect.oracles import against
    from onnxfuse.verify.bisect.precision import Conversions, fewest
    from onnxfuse.verify.reference import Runtime

    half: Precision = "fp16" if wanted.precision == "fp16" else "bf16"
    with _scratch() as scratch, Runtime() as runtime:
        fused = _optimized(wanted, scratch, say)
        cpu, given = _given(wanted, fused, runtime, 2, say)
        say("measuring ranges")
        ranges = runtime.ranges(wanted.model, given.feeds) if half == "fp16" else None
        conversions = Conversions(fused, half, ranges, scratch)
        nodes = conversions.nodes()
        judge = against(given.outputs, check.tolerance(half, wanted.rtol, wanted.atol), same_dtype=True)
        oracle = conversions.oracle(nodes, lambda path: runtime.run(path, given.feeds, evaluator=given.evaluator), judge)
        remedy = fewest(nodes, oracle, limit=wanted.tries, say=say)
        keep = remedy.options(nodes)
        checked = None
        if remedy.verdict != "elsewhere":
            say("checking what was found")
            converted = scratch / f"{wanted.model.stem}.{half}.onnx"
            settings: dict[str, Any] = {"policy": wanted.policy, "plan": wanted.plan, "precision": half, "keep_fp32": keep}
            checked = pipeline.optimize(wanted.model, converted, feeds=given.feeds, progress=say, **settings).check
    report = {
        "kind": "bisect",
        "onnxfuse": __version__,
        "model": str(wanted.model),
        "precision": half,
        "policy": wanted.policy,
        "evaluator": dataclasses.replace(cpu, rounded=True).name,
        **dataclasses.asdict(remedy),
        "operators": {name: nodes[name] for name in remedy.keep},
        "options": _pasted(wanted, half, keep),
        "checked": None if checked is None else checked.to_dict(),
    }
    if remedy.verdict == "found":
        _write(report, wanted.folder)
    return report


def _pasted(wanted: Wanted, half: str, keep: tuple[str, ...]) -> list[str]:
    """The options of `optimize`, one word a value."""
    plan = ["--plan", str(wanted.plan)] if wanted.plan else []
    return ["--policy", wanted.policy, *plan, "--precision", half, *(word for name in keep for word in ("--keep-fp32", name))]


def _write(report: Mapping[str, Any], folder: Path) -> None:
    import json
    import math

    from onnxfuse.graph.files import atomic

    def plain(value: Any) -> Any:
        """JSON knows neither NaN nor infinity."""
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value if not isinstance(value, float) or math.isfinite(value) else None if math.isnan(value) else str(value)

    _make_folder(folder)
    with atomic(folder / "bisect.json") as temporary:
        temporary.write_text(json.dumps(plain(report), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
