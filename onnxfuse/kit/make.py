"""Making a kit: the models as TensorRT's parser takes them, the plugin library for the target, inputs with the right outputs, the script.

A kit holds the model twice: `fused.onnx` with its plugins, and `automatic.onnx` with every onnxfuse operator taken apart again, which is
what TensorRT makes alone. Both read one file of weights.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxfuse import __version__, plugins
from onnxfuse.elementwise.compiling import fit_all
from onnxfuse.engine import encoder, prepare
from onnxfuse.engine import manifest as manifests
from onnxfuse.engine.shapes import Profile, inputs_of, parse
from onnxfuse.errors import BadInput, MissingHere
from onnxfuse.graph import tensors, weights
from onnxfuse.graph.files import whole_folder
from onnxfuse.graph.wire import map_file
from onnxfuse.kit import target
from onnxfuse.verify import check, inputs, reference

if TYPE_CHECKING:
    from onnxfuse.gpus import Gpu

SCRIPT = "kit.py"
WEIGHTS = "weights.bin"
REFERENCE = "reference.npz"
_EXTERNAL_FROM = 1024  # bytes; smaller tensors stay in the model, where the parser folds them
_PAGE = 4096

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Kit:
    """A kit that was made. `sha256` is of its kit.json, which holds the hashes of all else."""

    folder: Path
    gpu: Gpu
    sha256: str
    files: Mapping[str, str]
    size: int
    """Bytes of all files."""
    plugins: tuple[str, ...]
    cases: int
    notes: tuple[str, ...] = ()
    """What was left to TensorRT and why, and generated kernels that were too big."""


def make(
    model: Path,
    folder: Path,
    *,
    gpu: Gpu,
    shapes: Sequence[str] = (),
    original: Path | None = None,
    data: Path | None = None,
    seed: int = 0,
    compatible: str | None = None,
    use_plugins: bool = True,
    progress: Progress = lambda line: None,
) -> Kit:
    """Writes the kit of `model` for `gpu` to `folder`, whole or not at all. Needs neither that GPU nor TensorRT.

    `shapes` are values of --shapes. The right outputs are those of `original` in onnxruntime (a model of the same inputs, such as the one
    in float32 before it was optimized), or of `model` itself. The inputs are `data`, or made up from `seed` at the shapes to optimize for,
    the smallest and the largest. With `compatible` "ampere+" the engines run on every GPU from compute capability 8.0 on.

    Raises BadInput (model, shapes, GPU, folder), MissingHere (no compiler, or one for another kind of processor).
    """
    if compatible is not None and gpu.sm < manifests.AMPERE:
        raise BadInput(f"--gpu {gpu.name}: hardware-compatible engines need compute capability 8.0 or newer; leave --compatible off")
    profiles = parse(shapes, inputs_of(model))
    left: list[str] = []
    wanted = prepare.plugin_ops_in(model, frozenset(op.name for op in plugins.ops()), left.append) if use_plugins else frozenset()
    with whole_folder(folder) as work:
        progress("preparing the models")
        sm = manifests.AMPERE if compatible else gpu.sm
        wanted = prepare.taken_in_half(model, prepare.taken(wanted, sm, left.append), sm, left.append)
        plans = fit_all(prepare.expressions_in(model, wanted), sm, and_newer=compatible is not None)
        engines = {"automatic": frozenset[str](), **({"fused": wanted} if wanted else {})}
        at = tuple({name: tuple(getattr(p, which)) for name, p in profiles.items()} for which in ("min", "opt", "max"))
        protos = {
            name: onnx.ModelProto.FromString(prepare.for_parser(model, ops, plans, at, encoder.compiled, left.append))
            for name, ops in engines.items()
        }
        _write_models(protos, model.parent, work)
        library = None
        if wanted:
            check_processor(gpu)
            progress(f"compiling the plugin library for sm_{sm}{' and newer' if compatible else ''}")
            library = plugins.build(sm, and_newer=compatible is not None)
            shutil.copyfile(library.path, work / plugins.LIBRARY)
        progress("computing the right outputs")
        given = _reference(original or model, model, profiles, data, seed)
        _write_reference(given, work / REFERENCE)
        shutil.copyfile(Path(target.__file__), work / SCRIPT)
        files = {path.name: manifests.file_digest(path) for path in sorted(work.iterdir())}
        notes = [*left, *manifests.cuts(plan.to_dict() for plan in plans.values())]
        creators = sorted({prepare.creator(op) for op in wanted})
        about = {
            "schema": target.SCHEMA,
            "onnxfuse": __version__,
            "model": model.name,
            "model_sha256": manifests.model_digest(model),
            "gpu": gpu.name,
            "sm": gpu.sm,
            "architectures": [gpu.sm],
            "compatible": compatible,
            "shapes": {name: [list(p.min), list(p.opt), list(p.max)] for name, p in profiles.items()},
            "engines": {name: {"model": f"{name}.onnx", "plugins": creators if ops else []} for name, ops in engines.items()},
            "library": plugins.LIBRARY if library else None,
            **_limits(model, original, given),
            "notes": notes,
            "files": files,
        }
        text = (json.dumps(about, indent=1) + "\n").encode()
        (work / target.KIT).write_bytes(text)
        size = sum(path.stat().st_size for path in work.iterdir())
    return Kit(folder, gpu, hashlib.sha256(text).hexdigest(), files, size, tuple(creators), len(given.feeds), tuple(notes))


def check_processor(gpu: Gpu) -> None:
    """MissingHere where the library would be compiled for another kind of processor than the target has."""
    here = platform.machine()
    if gpu.host is not None and gpu.host != here:
        raise MissingHere(
            f"--gpu {gpu.name}: its machines have {gpu.host} processors, and the plugin library would be compiled for {here}; make the kit "
            f"on a machine with {gpu.host}, or with --no-plugins"
        )


# The models --------------------------------------------------------------------------------------------------------------


def _write_models(protos: Mapping[str, onnx.ModelProto], source: Path, folder: Path) -> None:
    """Writes NAME.onnx for each, all with their large tensors in one file; a tensor that several hold is written once."""
    places: dict[str, tuple[int, int]] = {}
    with open(folder / WEIGHTS, "wb") as out:
        for proto in protos.values():
            for tensor in tensors.every(proto):
                _move(tensor, source, out, places)
        written = out.tell()
    if not written:
        (folder / WEIGHTS).unlink()
    for name, proto in protos.items():
        (folder / f"{name}.onnx").write_bytes(proto.SerializeToString())


def _move(tensor: onnx.TensorProto, source: Path, out: Any, places: dict[str, tuple[int, int]]) -> None:
    """Moves a tensor's raw data to the file of weights."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        place = weights.location(tensor)
        length = weights.byte_size(list(tensor.dims), tensor.data_type)
        content = memoryview(map_file(source / place.file))[place.offset : place.offset + length]
    elif tensor.HasField("raw_data") and len(tensor.raw_data) >= _EXTERNAL_FROM:
        content = memoryview(tensor.raw_data)
    else:
        return
    digest = hashlib.sha256(content).hexdigest()
    if digest not in places:
        out.write(b"\0" * (-out.tell() % _PAGE))
        places[digest] = out.tell(), len(content)
        out.write(content)
    offset, length = places[digest]
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", WEIGHTS), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


# The reference -----------------------------------------------------------------------------------------------------------


def _reference(judge: Path, model: Path, profiles: Mapping[str, Profile], data: Path | None, seed: int) -> check.Reference:
    """Inputs that `model` takes, and the outputs of `judge` for them."""
    check.same_inputs(judge, model)
    if data is not None:
        feeds = inputs.from_data(data, model)
        _check_shapes(feeds, profiles, data)
    else:
        feeds = [feed for sizes in _sizes(model, profiles) for feed in inputs.generate(model, seed, 1, sizes)]
    # Floats that the model takes in 16 bits reach a wider judge as the same values.
    types = {spec.name: spec.dtype for spec in inputs.specs(judge, optional=True)}
    judged = [{name: array.astype(types[name], copy=False) for name, array in feed.items()} for feed in feeds]
    with reference.Runtime() as runtime:
        outputs, evaluator = check.run_feeds(runtime, judge, judged)
    return check.Reference(feeds, outputs, evaluator)


def _sizes(model: Path, profiles: Mapping[str, Profile]) -> list[dict[str, int]]:
    """Sizes of the model's free dimensions: those to optimize for, then the smallest and the largest, each once."""
    found = []
    for which in ("opt", "min", "max"):
        sizes: dict[str, int] = {}
        for spec in inputs.specs(model):
            lengths = getattr(profiles[spec.name], which) if spec.name in profiles else ()
            for axis, (dim, length) in enumerate(zip(spec.shape or (), lengths, strict=False)):
                if not isinstance(dim, int):
                    sizes.setdefault(dim or f"{spec.name}[{axis}]", length)
        found.append(sizes)
    return [sizes for place, sizes in enumerate(found) if sizes not in found[:place]]


def _check_shapes(feeds: Sequence[Mapping[str, Any]], profiles: Mapping[str, Profile], data: Path) -> None:
    for feed in feeds:
        for name, profile in profiles.items():
            shape = np.shape(feed[name])
            if not all(low <= length <= high for low, length, high in zip(profile.min, shape, profile.max, strict=True)):
                raise BadInput(f"{data}: input {name!r} has shape {shape}, and --shapes takes {profile.min} to {profile.max}; give others")


def _write_reference(given: check.Reference, path: Path) -> None:
    """`CASE/in/NAME` and `CASE/out/NAME`; what numpy has no type for as float32, which holds every value of bfloat16."""
    arrays = {}
    for case, (feeds, outputs) in enumerate(zip(given.feeds, given.outputs, strict=True)):
        for kind, values in (("in", feeds), ("out", outputs)):
            for name, value in values.items():
                arrays[f"{case}/{kind}/{name}"] = _storable(value, name)
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def _storable(value: Any, name: str) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind in "OUS":
        raise BadInput(f"{name!r} is no tensor of numbers, which a TensorRT engine cannot have; change the model's inputs and outputs")
    return value.astype(np.float32) if value.dtype.kind == "V" else value


def _limits(model: Path, original: Path | None, given: check.Reference) -> dict[str, Any]:
    """What the outputs are compared with, and how near they must be: the limits of the model's precision, of TF32 at least."""
    limits, _ = check.limits_for(original or model, model)
    if limits.name == "float32":
        limits = check.tolerance("tf32")
    judge = reference.describe(given.evaluator)
    return {
        "reference": f"{judge}, {original.name}" if original else judge,
        "tolerance": {**vars(limits), "rules": limits.rules},
        "inputs": {
            "source": f"{len(given.feeds)} made with the kit",
            "feeds": [{name: f"{array.dtype.name}{list(array.shape)}" for name, array in feed.items()} for feed in given.feeds],
        },
    }
