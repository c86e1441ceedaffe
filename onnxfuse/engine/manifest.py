"""The manifest beside an engine: what it was made of, where, and what TensorRT made of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnxfuse import forms
from onnxfuse.engine.prepare import read
from onnxfuse.errors import BadInput, refusal
from onnxfuse.graph.names import shown
from onnxfuse.graph.wire import map_file

SCHEMA = 1
AMPERE = 80  # compute capability from which TensorRT's hardware-compatible engines run


@dataclass(frozen=True)
class Tensor:
    """An input or output of the engine."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """-1 where dynamic."""
    min: tuple[int, ...] | None = None
    opt: tuple[int, ...] | None = None
    max: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layer:
    """One layer of the engine, as TensorRT built it."""

    name: str
    type: str
    plugin: str | None
    tactic: str | None
    inputs: tuple[str, ...]
    """Data type of each input as built, e.g. "fp16"."""
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]
    """Names of the ONNX nodes that the layer computes."""


@dataclass(frozen=True)
class PluginUse:
    """The plugin library that the engine needs."""

    file: str | None
    """Its name beside the engine; None where it is inside."""
    sha256: str
    embedded: bool
    ops: tuple[str, ...]
    """The op types of the model that plugins compute, sorted. A plugin may serve several: FusedAttentionKept is one of FusedAttention's."""


@dataclass(frozen=True)
class Manifest:
    """All that is known of an engine."""

    model: str
    model_sha256: str
    """Of the model file and, after it, of its external data files in the order of their names."""
    engine_sha256: str
    engine_bytes: int
    plugins: PluginUse | None
    tensorrt: str
    driver: str
    gpu: str
    sm: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    strongly_typed: bool
    build_seconds: float
    layers: tuple[Layer, ...]
    warnings: tuple[str, ...] = ()
    model_path: str | None = None
    """Where the model was when the engine was built, relative to the engine's folder."""
    compatible: str | None = None
    """"ampere+" for an engine that runs on every GPU from compute capability 8.0 on; None for one that runs on `sm` alone."""
    generated: tuple[Mapping[str, Any], ...] = ()
    """The generated kernels, expression by expression: form, kernels with their resources, and where one was cut and why."""
    left: tuple[str, ...] = ()
    """Fused nodes that have no plugin here and were left to TensorRT, and why, a line each."""
    timing_cache: str | None = None
    """The timing cache that the build wrote, relative to the engine's folder: a build like it is quick, and chooses the same kernels."""
    schema: int = SCHEMA

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of plugins: what was left to TensorRT, and generated kernels that were too big."""
        return (*self.left, *cuts(self.generated))

    @property
    def precisions(self) -> dict[str, int]:
        """How many layers compute into each data type, most frequent first."""
        counts = Counter(layer.outputs[0] for layer in self.layers if layer.outputs)
        return dict(counts.most_common())

    def to_json(self) -> str:
        """The manifest as written beside the engine, with the summary of precisions."""
        return json.dumps({**dataclasses.asdict(self), "precisions": self.precisions}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, what: str = "manifest") -> Manifest:
        """The reverse of to_json. BadInput where the text is no manifest of this schema; `what` names the file."""
        try:
            data = json.loads(text)
            schema = data["schema"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BadInput(f"{what}: not an engine manifest; build the engine again") from None
        if schema != SCHEMA:
            raise BadInput(f"{what}: manifest schema {shown(schema)}, not {SCHEMA}; build the engine again with this version of onnxfuse")
        wrong = forms.flaw(data, "onnxfuse.engine", "manifest.schema.json")
        if wrong:
            raise BadInput(f"{what}: damaged engine manifest ({wrong}); build the engine again")
        try:
            return _manifest(data)
        except ValueError as error:
            raise BadInput(f"{what}: damaged engine manifest ({error}); build the engine again") from None


def path_of(engine: Path) -> Path:
    """Where the manifest of an engine is: model.engine -> model.engine.json."""
    return engine.with_name(engine.name + ".json")


def load(engine: Path) -> Manifest | None:
    """The manifest beside `engine`; None where there is none."""
    path = path_of(engine)
    try:
        return Manifest.from_json(bytes(map_file(path)).decode("utf-8"), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; build the engine again") from None


def content(engine: Path, remedy: str) -> bytes:
    """The bytes of an engine. BadInput, with what to do, for one that cannot be read; a pipe or a device is none, and may have no end."""
    try:
        return bytes(map_file(engine))
    except OSError as error:
        raise BadInput(f"{engine}: {refusal(error)}; {remedy}") from None


def runs_on(manifest: Manifest, sm: int) -> bool:
    """Whether the engine can run on a GPU of compute capability `sm` at all."""
    return sm == manifest.sm or (manifest.compatible == "ampere+" and sm >= AMPERE)


def changes(manifest: Manifest, *, gpu: str, sm: int, tensorrt: str, driver: str) -> tuple[str, ...]:
    """What of the machine is not as it was when the engine was built, and what to do, one line each."""
    pairs = (
        ("GPU", f"{manifest.gpu} (sm_{manifest.sm})", f"{gpu} (sm_{sm})", "build the engine again for the kernels that are fastest here"),
        ("TensorRT", manifest.tensorrt, tensorrt, "build the engine again"),
        ("driver", manifest.driver, driver, "it runs, but measure again before you trust old figures"),
    )
    return tuple(f"{what}: built with {then}, here is {now}; {remedy}" for what, then, now, remedy in pairs if then != now)


def stale(manifest: Manifest, engine: Path, library_sha256: str | None) -> tuple[str, ...]:
    """What of the model and the plugin library changed since `engine` was built, and what to do, one line each.

    A model that is not where it was is not missed: engines travel without. `library_sha256` is of the library that onnxfuse has compiled
    for this architecture; None where it has none.
    """
    lines = []
    model = engine.parent / manifest.model_path if manifest.model_path else None
    if model is not None and model.is_file() and _digest_or_none(model) != manifest.model_sha256:
        lines.append(f"model: {manifest.model} changed after the engine was built from it; build the engine again")
    then = manifest.plugins.sha256 if manifest.plugins is not None else None
    if then and library_sha256 and then != library_sha256:
        versions = f"built with {then[:12]}, this version of onnxfuse has {library_sha256[:12]}"
        lines.append(f"plugin library: {versions}; build the engine again for its kernels")
    return tuple(lines)


def _digest_or_none(model: Path) -> str | None:
    try:
        return model_digest(model)
    except BadInput:
        return None


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of one file."""
    digest = hashlib.sha256()
    _feed(digest, path)
    return digest.hexdigest()


def model_digest(path: Path) -> str:
    """SHA-256 (hex) of a model file and, after it, of its external data files in the order of their names."""
    digest = hashlib.sha256()
    _feed(digest, path)
    for location in sorted(_external(read(path))):
        _feed(digest, path.parent / location)
    return digest.hexdigest()


def _feed(digest: Any, path: Path) -> None:
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise BadInput(f"{path}: {refusal(error)}; the model's external data must lie beside it") from None


def _external(model: onnx.ModelProto) -> set[str]:
    return {
        entry.value
        for tensor in onnx.external_data_helper._get_all_tensors(model)
        if onnx.external_data_helper.uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }


# The inspector's table ------------------------------------------------------------------------------------------------

# TensorRT's words for data types, in the order to look for them: "BFloat16" holds "Float16", "Float16" holds "Float".
_TYPES = (
    ("bf16", r"bfloat16|bf16"),
    ("fp16", r"half|float16|fp16"),
    ("fp8", r"fp8|float8"),
    ("fp4", r"fp4|float4"),
    ("fp32", r"float|fp32"),
    ("uint8", r"uint8"),
    ("int4", r"int4"),
    ("int8", r"int8"),
    ("int64", r"int64"),
    ("int32", r"int32"),
    ("bool", r"bool"),
)


def layers_from(table: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """Layers from TensorRT's inspector (JSON, detailed); fields that a version does not give stay empty."""
    return tuple(_layer(entry) for entry in table)


def _layer(entry: Mapping[str, Any]) -> Layer:
    plugin = next((str(entry[key]) for key in ("PluginType", "PluginName", "pluginType") if entry.get(key)), None)
    tactic = next((str(entry[key]) for key in ("TacticName", "TacticValue") if entry.get(key)), None)
    return Layer(
        name=str(entry.get("Name", "")),
        type=str(entry.get("LayerType", "")),
        plugin=plugin,
        tactic=tactic,
        inputs=_types(entry.get("Inputs")),
        outputs=_types(entry.get("Outputs")),
        nodes=onnx_nodes(str(entry.get("Metadata") or "")),
    )


def _types(tensors: Any) -> tuple[str, ...]:
    return tuple(_type(t) for t in tensors if isinstance(t, dict)) if isinstance(tensors, list) else ()


def _type(tensor: Mapping[str, Any]) -> str:
    text = str(tensor.get("Datatype") or tensor.get("DataType") or tensor.get("Format/Datatype") or tensor.get("Format") or "")
    lowered = text.lower()
    return next((name for name, pattern in _TYPES if re.search(pattern, lowered)), text or "unknown")


def onnx_nodes(metadata: str) -> tuple[str, ...]:
    """Names of ONNX nodes in a layer's metadata: "[ONNX Layer: a]\\x1e[ONNX Layer: b]" -> ("a", "b").

    TensorRT separates them by \\x1e, in the layers that Myelin made by \\x1f.
    """
    parts = re.split(r"[\x1e\x1f]|\\u001[efEF]", metadata)
    names = (re.fullmatch(r"\s*\[ONNX Layer: (.*)\]\s*", part, re.DOTALL) for part in parts)
    return tuple(dict.fromkeys(match.group(1) for match in names if match))


# Reading JSON back ----------------------------------------------------------------------------------------------------


def cuts(generated: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """One line for each generated kernel that was too big: where it was cut and why, or that no cut would have made it better."""
    return tuple(
        f"generated kernel {entry['form']}: {line}"
        for entry in generated
        for line in (*entry["cuts"], *(f"{fault}, and no cut makes it better" for fault in entry["faults"]))
    )


def _manifest(data: Mapping[str, Any]) -> Manifest:
    return Manifest(
        model=str(data["model"]),
        model_sha256=str(data["model_sha256"]),
        engine_sha256=str(data["engine_sha256"]),
        engine_bytes=int(data["engine_bytes"]),
        plugins=_plugin_use(data["plugins"]),
        tensorrt=str(data["tensorrt"]),
        driver=str(data["driver"]),
        gpu=str(data["gpu"]),
        sm=int(data["sm"]),
        inputs=tuple(_tensor(t) for t in data["inputs"]),
        outputs=tuple(_tensor(t) for t in data["outputs"]),
        strongly_typed=bool(data["strongly_typed"]),
        build_seconds=float(data["build_seconds"]),
        # The script of a kit leaves TensorRT's own table.
        layers=layers_from(data["inspector"]) if "inspector" in data else tuple(_layer_back(layer) for layer in data["layers"]),
        warnings=tuple(map(str, data.get("warnings", ()))),
        model_path=str(data["model_path"]) if data.get("model_path") is not None else None,
        compatible=str(data["compatible"]) if data.get("compatible") is not None else None,
        generated=tuple(_generated(entry) for entry in data.get("generated", ())),
        left=tuple(map(str, data.get("left", ()))),
        timing_cache=str(data["timing_cache"]) if data.get("timing_cache") is not None else None,
        schema=int(data["schema"]),
    )


def _generated(data: Mapping[str, Any]) -> Mapping[str, Any]:
    lists = {name: [str(line) for line in data[name]] for name in ("cuts", "faults")}
    return {"form": str(data["form"]), "name": str(data["name"]), **lists, "kernels": [dict(kernel) for kernel in data["kernels"]]}


def _plugin_use(data: Mapping[str, Any] | None) -> PluginUse | None:
    if data is None:
        return None
    file = str(data["file"]) if data.get("file") is not None else None
    if file is not None and (file in ("", "..") or Path(file).name != file):
        raise ValueError(f"plugin library {file!r} is no plain file name")
    return PluginUse(file, str(data["sha256"]), bool(data["embedded"]), tuple(map(str, data["ops"])))


def _tensor(data: Mapping[str, Any]) -> Tensor:
    low, mid, high = (tuple(map(int, data[key])) if data.get(key) is not None else None for key in ("min", "opt", "max"))
    return Tensor(str(data["name"]), str(data["dtype"]), tuple(map(int, data["shape"])), low, mid, high)


def _layer_back(data: Mapping[str, Any]) -> Layer:
    return Layer(
        name=str(data["name"]),
        type=str(data["type"]),
        plugin=data["plugin"],
        tactic=data["tactic"],
        inputs=tuple(data["inputs"]),
        outputs=tuple(data["outputs"]),
        nodes=tuple(data["nodes"]),
    )
