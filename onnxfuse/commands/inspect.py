"""`onnxfuse inspect`: what an engine, a model or a kit is, from its file alone. Runs nothing of it."""

from __future__ import annotations

import json as jsons
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onnxfuse.errors import BadInput

if TYPE_CHECKING:
    from onnxfuse.engine.manifest import Manifest

SUFFIXES = (".engine", ".plan", ".trt")  # what engines are called, where no manifest says that a file is one
REMEDY = "name an engine, an ONNX model, or the folder of a kit"


def inspect(
    path: Path = typer.Argument(..., metavar="FILE|DIR", help="An engine (its manifest is read), an ONNX model, or the folder of a kit."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say what an engine, a fused model or a kit holds, what it was made from, and whether it is still what was written."""
    found = describe(path)
    if json:
        typer.echo(jsons.dumps(found, indent=1))
        return
    from onnxfuse.graph.names import shown

    for line in lines(found):
        typer.echo("".join(c if c.isprintable() else shown(c) for c in line))


def describe(path: Path) -> dict[str, Any]:
    """What is at `path`, as JSON values: `kind` is engine, model or kit. BadInput for anything else, and for a damaged one."""
    if path.is_dir():
        return _kit(path)
    if not path.exists():
        raise BadInput(f"{path}: no such file; {REMEDY}")
    return _model(path) if path.suffix == ".onnx" else _engine(path)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    yield from {"engine": _engine_lines, "model": _model_lines, "kit": _kit_lines}[found["kind"]](found)


# Engines -------------------------------------------------------------------------------------------------------------


def _engine(path: Path) -> dict[str, Any]:
    import dataclasses
    import hashlib

    from onnxfuse.engine import manifest as manifests
    from onnxfuse.engine.run import CODE

    data = manifests.content(path, REMEDY)
    if not data:
        raise BadInput(f"{path}: is empty; {REMEDY}")
    manifest = manifests.load(path)
    if manifest is None and path.suffix.lower() not in SUFFIXES:
        beside = manifests.path_of(path).name
        raise BadInput(f"{path}: no engine by its name ({', '.join(SUFFIXES)}), and no manifest {beside} beside it; {REMEDY}")
    found: dict[str, Any] = {
        "kind": "engine", "path": str(path), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "holds_code": CODE in data,
        "manifest": None, "intact": None, "notes": [],
    }  # fmt: skip
    if manifest is None:
        found["notes"].append(f"no manifest {manifests.path_of(path).name} beside it: nothing says what it holds, nor that it is an engine")
        if found["holds_code"]:
            found["notes"].append("it holds code, and is not loaded unless --trust is given")
        return found
    found["manifest"] = {**dataclasses.asdict(manifest), "precisions": manifest.precisions}
    found["intact"] = manifest.engine_sha256 == found["sha256"]
    if not found["intact"]:
        found["notes"].append("the manifest was written for another engine: this file is not trusted; build it again")
    found["notes"] += [*_changes(path, manifest), *_library(path, manifest), *manifest.notes]
    return found


def _changes(path: Path, manifest: Manifest) -> list[str]:
    """What is not as it was; of GPU, TensorRT and driver only where they are here."""
    from onnxfuse.engine import manifest as manifests
    from onnxfuse.engine import run, trt
    from onnxfuse.errors import MissingHere

    found = list(run.stale(path, manifest))
    try:
        version, device = trt.version(), trt.gpu()
    except MissingHere:
        return found
    return [*manifests.changes(manifest, gpu=device.name, sm=device.sm, tensorrt=version, driver=device.driver), *found]


def _library(path: Path, manifest: Manifest) -> list[str]:
    """Whether the library beside the engine is the one that it was built with."""
    from onnxfuse.engine import manifest as manifests

    if manifest.plugins is None or manifest.plugins.file is None:
        return []
    beside = path.with_name(manifest.plugins.file)
    if not beside.is_file():
        return [f"its plugin library {beside.name} is not beside it; put it there, or build the engine again"]
    if manifests.file_digest(beside) != manifest.plugins.sha256:
        return [f"its plugin library {beside.name} is not the one that it was built with; build the engine again"]
    return []


def _engine_lines(found: dict[str, Any]) -> Iterator[str]:
    manifest = found["manifest"]
    kind = "a file" if manifest is None else "engine"
    yield f"{found['path']}: {kind}, {found['bytes'] / 1e6:.1f} MB, sha256 {found['sha256'][:16]}"
    if manifest is not None:
        runs = f"every GPU from sm_80 on ({manifest['compatible']})" if manifest["compatible"] else f"sm_{manifest['sm']}"
        yield f"  built from {manifest['model']} (sha256 {manifest['model_sha256'][:16]}) in {manifest['build_seconds']:.0f} s"
        yield f"  with TensorRT {manifest['tensorrt']}, driver {manifest['driver']}, on {manifest['gpu']}; runs on {runs}"
        for kind in ("inputs", "outputs"):
            for tensor in manifest[kind]:
                limits = f", {_shape(tensor['min'])} to {_shape(tensor['max'])}, best at {_shape(tensor['opt'])}" if tensor["min"] else ""
                yield f"  {kind[:-1]} {tensor['name']}: {tensor['dtype']}[{_shape(tensor['shape'])}]{limits}"
        if manifest["plugins"] is not None:
            plugins = manifest["plugins"]
            where = "inside the engine" if plugins["embedded"] else f"in {plugins['file']}"
            yield f"  plugins: {', '.join(plugins['ops'])}, {where} (sha256 {plugins['sha256'][:16]})"
        precisions = ", ".join(f"{count} {name}" for name, count in manifest["precisions"].items())
        yield f"  layers: {len(manifest['layers'])}" + (f" ({precisions})" if precisions else "")
    for note in found["notes"]:
        yield f"  note: {note}"
    if found["intact"] and not found["notes"]:
        yield "  it is the engine that its manifest was written for, and nothing it was made from has changed"


def _shape(lengths: Any) -> str:
    return "x".join("?" if length == -1 else str(length) for length in lengths)


# Models --------------------------------------------------------------------------------------------------------------


def _model(path: Path) -> dict[str, Any]:
    from onnxfuse import plugins
    from onnxfuse.engine import manifest as manifests
    from onnxfuse.engine.prepare import creator
    from onnxfuse.graph.model import DOMAIN
    from onnxfuse.verify import check, inputs
    from onnxfuse.verify.skim import skeleton

    proto = skeleton(path)
    fused = Counter(node.op_type for node in proto.graph.node if node.domain == DOMAIN)
    with_plugins = {op.name for op in plugins.ops()}
    specs = {kind: [f"{spec.name}: {spec}" for spec in _values(inputs, getattr(proto.graph, kind))] for kind in ("input", "output")}
    return {
        "kind": "model", "path": str(path), "sha256": manifests.model_digest(path), "ir_version": proto.ir_version,
        "opsets": {entry.domain: entry.version for entry in proto.opset_import}, "nodes": len(proto.graph.node),
        "precision": check.precision(path), "inputs": specs["input"], "outputs": specs["output"],
        "fused": dict(fused.most_common()), "plugins": sorted({creator(op) for op in fused} & with_plugins),
        "functions": sorted(function.name for function in proto.functions if function.domain == DOMAIN),
    }  # fmt: skip


def _values(inputs: Any, values: Any) -> list[Any]:
    """Inputs or outputs that are tensors; what else there is, is not shown."""
    return [
        inputs.spec_of(value) for value in values if value.type.WhichOneof("value") == "tensor_type" and value.type.tensor_type.elem_type
    ]


def _model_lines(found: dict[str, Any]) -> Iterator[str]:
    fused = ", ".join(f"{count} {name}" for name, count in found["fused"].items())
    opset = found["opsets"].get("", "?")
    yield f"{found['path']}: ONNX model, {found['nodes']} nodes, opset {opset}, {found['precision']}, sha256 {found['sha256'][:16]}"
    for kind in ("inputs", "outputs"):
        for value in found[kind]:
            yield f"  {kind[:-1]} {value}"
    yield f"  fused operators: {fused}" if fused else "  no fused operators: optimize it, or build it as it is"
    if found["plugins"]:
        yield f"  plugins for: {', '.join(found['plugins'])}"
    if found["functions"]:
        yield f"  definitions inside: {', '.join(found['functions'])}; `onnxfuse optimize --undo` takes the model apart again"


# Kits ----------------------------------------------------------------------------------------------------------------


def _kit(folder: Path) -> dict[str, Any]:
    from onnxfuse import forms
    from onnxfuse.engine import manifest as manifests
    from onnxfuse.kit import target

    try:
        kit = target.read_kit(str(folder))
    except target.Fault as fault:
        raise BadInput(str(fault)) from None
    wrong = forms.flaw(kit, "onnxfuse.kit", "kit.schema.json")
    if wrong:
        raise BadInput(f"{folder}: {target.KIT}: {wrong}; copy the kit again")
    known = {*kit["files"], target.KIT, "result"}
    return {
        "kind": "kit", "path": str(folder), "sha256": manifests.file_digest(folder / target.KIT), **kit,
        "unlisted": sorted(path.name for path in folder.iterdir() if path.name not in known),
    }  # fmt: skip


def _kit_lines(found: dict[str, Any]) -> Iterator[str]:
    architecture = f"sm_{found['sm']}"
    gpu = architecture if found["gpu"] == architecture else f"{found['gpu']} ({architecture})"
    if found.get("compatible"):
        gpu = f"every GPU from sm_80 on ({found['compatible']})"
    yield f"{found['path']}: kit of {found['model']} for {gpu}, made by onnxfuse {found['onnxfuse']}"
    yield f"  sha256 of kit.json: {found['sha256']}"
    for name, engine in found["engines"].items():
        yield f"  engine {name}: {engine['model']}" + (f", plugins {', '.join(engine['plugins'])}" if engine["plugins"] else "")
    for name, (low, mid, high) in found["shapes"].items():
        yield f"  input {name}: {_shape(low)} to {_shape(high)}, best at {_shape(mid)}"
    yield f"  {len(found['inputs']['feeds'])} inputs with the outputs of {found['reference']}"
    yield f"  all {len(found['files'])} files are those that were put into it"
    if found["unlisted"]:
        yield f"  note: not of the kit: {', '.join(found['unlisted'])}"
