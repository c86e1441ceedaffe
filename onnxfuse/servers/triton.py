"""A model repository for Triton Inference Server: NAME/config.pbtxt and NAME/1/model.plan.

The configuration is of Triton's `ModelConfig` (model_config.proto of triton-inference-server/common), in protobuf's text form. Batching
follows what the TensorRT backend itself assumes: the first axis of every tensor is the batch, and its largest size the smallest of the
inputs' largest ones.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxfuse.engine import manifest as manifests
from onnxfuse.engine.manifest import Manifest, Tensor
from onnxfuse.engine.run import vouched
from onnxfuse.errors import BadInput, refusal
from onnxfuse.graph.files import whole_folder
from onnxfuse.graph.names import shown

TYPES = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "int8": "TYPE_INT8",
    "uint8": "TYPE_UINT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "bool": "TYPE_BOOL",
}
LIBRARY = "plugins.so"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Export:
    """A model in a repository. `option` is what tritonserver must be started with for its plugins; "" for none."""

    folder: Path
    max_batch: int
    """0: requests are not batched."""
    option: str
    notes: tuple[str, ...]


def export(engine: Path, repository: Path, *, name: str | None = None, batching: bool | None = None) -> Export:
    """Adds `engine` to the model repository `repository` (made if need be) under `name`, which is the engine's if not given.

    `batching` None batches where the first axis is free in every tensor, the same range in every input. Raises BadInput: no engine with a
    manifest of its own, batching that it cannot do, a name that Triton or a file system would misread, a model of that name.
    """
    data = manifests.content(engine, "name an engine")
    manifest = vouched(data, engine, way_out="")
    if manifest is None:
        raise BadInput(f"{engine}: no manifest {manifests.path_of(engine).name} says what its inputs are; put it beside the engine")
    named = engine.stem if name is None else name
    if not _NAME.fullmatch(named):
        raise BadInput(f"--name {named!r}: a model's name is of letters, digits, '_', '-' and '.'; give another")
    most = max_batch(manifest)
    if batching and not most:
        raise BadInput(f"{engine}: cannot be batched: {why_no_batching(manifest)}; leave --batching off")
    most = 0 if batching is False else most
    text = "".join(f"{line}\n" for line in config(manifest, named, most))
    folder = repository / named
    try:
        repository.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{repository}: {(error.strerror or str(error)).lower()}; choose another folder") from None
    with whole_folder(folder) as work:
        (work / "1").mkdir()
        (work / "1" / "model.plan").write_bytes(data)
        (work / "1" / "model.plan.json").write_text(manifest.to_json(), encoding="utf-8")
        (work / "config.pbtxt").write_text(text, encoding="utf-8")
        if manifest.plugins is not None and manifest.plugins.file is not None:
            _copy_library(engine.with_name(manifest.plugins.file), manifest.plugins.sha256, work / "1" / LIBRARY)
    return Export(folder, most, _option(manifest, folder), tuple(_notes(manifest, most)))


def max_batch(manifest: Manifest) -> int:
    """The largest batch that all inputs take; 0 where the engine cannot be batched."""
    return 0 if why_no_batching(manifest) else min((tensor.max or (0,))[0] for tensor in manifest.inputs)


def why_no_batching(manifest: Manifest) -> str:
    """What keeps the first axis from being a batch; "" where nothing does."""
    if not manifest.inputs:
        return "it has no input"
    for tensor in (*manifest.inputs, *manifest.outputs):
        if not tensor.shape or tensor.shape[0] != -1:
            return f"the first axis of {shown(tensor.name)} is not free" if tensor.shape else f"{shown(tensor.name)} has no axes"
    ranges = {(tensor.min or (0,))[:1] + (tensor.max or (0,))[:1] for tensor in manifest.inputs}
    if len(ranges) > 1:
        return "the first axes of its inputs have different ranges"
    ((low, high),) = ranges
    return "" if low <= 1 < high or (low, high) == (1, 1) else f"its smallest batch is {low}, and a request may be a single one"


def config(manifest: Manifest, name: str, most: int) -> Iterator[str]:
    """config.pbtxt, line by line. BadInput for a type that Triton does not have."""
    yield f"name: {quoted(name)}"
    yield 'backend: "tensorrt"'
    yield 'platform: "tensorrt_plan"'
    yield 'default_model_filename: "model.plan"'
    yield f"max_batch_size: {most}"
    for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
        for tensor in tensors:
            yield from _tensor(kind, tensor, batched=most > 0)
    if most > 1:
        best = min((tensor.opt or (1,))[0] for tensor in manifest.inputs)
        preferred = f" preferred_batch_size: [ {best} ]" if 1 < best <= most else ""
        yield f"dynamic_batching {{{preferred} }}"
    yield "instance_group [ { kind: KIND_GPU count: 1 } ]"


def _tensor(kind: str, tensor: Tensor, batched: bool) -> Iterator[str]:
    if tensor.dtype not in TYPES:
        raise BadInput(f"{kind} {shown(tensor.name)} is {shown(tensor.dtype)}, which Triton does not have; cast it inside the model")
    shape: Sequence[int] = tensor.shape[1:] if batched else tensor.shape
    # Triton knows no tensor without axes: one of a single element stands for it.
    reshape = "" if shape else " reshape: { shape: [ ] }"
    dims = ", ".join(map(str, shape or (1,)))
    yield f"{kind} [ {{ name: {quoted(tensor.name)} data_type: {TYPES[tensor.dtype]} dims: [ {dims} ]{reshape} }} ]"


def quoted(text: str) -> str:
    """A string of protobuf's text form: nothing in it can end it."""
    escaped = (
        chr(byte) if 0x20 <= byte < 0x7F and chr(byte) not in "\\\"'" else f"\\{byte:03o}" for byte in text.encode("utf-8", "replace")
    )
    return '"' + "".join(escaped) + '"'


def _copy_library(source: Path, digest: str, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise BadInput(f"plugin library {source}: {refusal(error)}; build the engine again") from None
    if manifests.file_digest(target) != digest:
        raise BadInput(f"plugin library {source}: not the one that the engine was built with; build the engine again")


def _option(manifest: Manifest, folder: Path) -> str:
    if manifest.plugins is None:
        return ""
    if manifest.plugins.file is not None:
        return f"--backend-config=tensorrt,plugins={(folder / '1' / LIBRARY).absolute()}"
    return "--backend-config=tensorrt,version-compatible=true"


def _notes(manifest: Manifest, most: int) -> Iterator[str]:
    yield f"the server needs TensorRT {'.'.join(manifest.tensorrt.split('.')[:2])} and " + (
        "a GPU of sm_80 or newer" if manifest.compatible else f"a GPU of sm_{manifest.sm}"
    )
    reason = why_no_batching(manifest)
    if not most:
        yield f"requests are not batched: {reason or 'as asked'}"
