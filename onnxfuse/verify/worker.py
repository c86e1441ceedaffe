"""The child process that runs models: a crash of onnxruntime ends it, and not the command.

Reads one JSON request a line from standard input and answers one JSON line each on the standard output that it started with.
Arrays travel as .npy files in the folder that the parent made; nothing is ever pickled.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# numpy has no name for these, so .npy files hold their bits. Names are those of ml_dtypes.
_BITS = {
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e4m3fnuz": np.uint8,
    "float8_e5m2": np.uint8,
    "float8_e5m2fnuz": np.uint8,
}
_ONNX_TYPES = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e4m3fnuz": 18, "float8_e5m2": 19, "float8_e5m2fnuz": 20}
# What onnxruntime says of a model that it has no kernel for, or is too new for it: no fault of the model.
_CANNOT = (
    "NOT_IMPLEMENTED",
    "is not a registered function/op",
    "No Op registered for",
    "Unsupported model IR version",
    "under development",
    "(layout == 1) are not supported",
)

Entry = dict[str, Any]


class Cannot(Exception):
    """The evaluator has no means to run this model."""


def main(folder: str) -> None:
    # Libraries print to descriptor 1: answers get a descriptor of their own, and prints go where errors go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    runner = Runner(Path(folder), lambda done, total: say({"progress": [done, total]}))
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(folder, requests), daemon=True).start()
    while (request := requests.get())["op"] != "stop":
        say(_answer(runner, request))


def _answer(runner: Runner, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": getattr(runner, request.pop("op"))(**request)}
    except Cannot as error:
        return {"error": first_line(error), "kind": "cannot"}
    except Exception as error:  # anything that a model can make a library raise is an answer, not an end
        return {"error": first_line(error), "kind": "cannot" if _is_beyond(error) else "fault"}


def _is_beyond(error: Exception) -> bool:
    """Whether it says that onnxruntime lacks what the model needs."""
    return any(words in str(error) for words in _CANNOT)


def _listen(folder: str, requests: queue.Queue[dict[str, Any]]) -> None:
    """Passes requests on. The end of the input before "stop" means that the parent was killed: nobody wants an answer any more, and
    nobody else removes what it left.
    """
    with open(os.dup(0), encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            requests.put(request)
            if request["op"] == "stop":
                return
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def first_line(error: Exception) -> str:
    """The first line of what a library said, less its decoration: the node, and what is wrong."""
    if isinstance(error, MemoryError):
        return "out of memory"
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    # Nodes inside nodes each add a lead; the innermost one failed.
    nodes = re.findall(r"running (\w+) node\. Name:'(.*?)' Status Message: ", text)
    text = text.rsplit("Status Message: ", 1)[-1]
    if "/onnxruntime_src/" in text:  # a C++ signature stands before the words
        text = text.rsplit(") ", 1)[-1]
    node = f"{nodes[-1][0]} node {nodes[-1][1]!r}: " if nodes else ""
    return (node + text)[:400]


class Runner:
    """Serves the requests; holds the last session, as several feeds of one model follow each other."""

    def __init__(self, folder: Path, progress: Callable[[int, int], None]):
        self.folder = folder
        self.progress = progress
        self.written = 0
        self._key: Any = None
        self._session: Any = None
        self._truth: Any = None

    def run(
        self, model: str, feeds: dict[str, Entry], tensors: list[str] | None, evaluator: str, tidy: bool, threads: int
    ) -> dict[str, Entry]:
        """Outputs by name; those of `tensors` only, where given (inner tensors too)."""
        arrays = {name: self._read(entry) for name, entry in feeds.items()}
        if evaluator == "onnx.reference":
            outputs = self._by_reference(model, arrays, tensors)
        else:
            outputs = run_session(self._open(model, tuple(tensors or ()), tidy, threads), arrays, tensors)
        return {name: self._write(value) for name, value in outputs.items()}

    def ranges(
        self, model: str, feeds: list[dict[str, Entry]], tensors: list[str], budget: int, tidy: bool, threads: int
    ) -> dict[str, float]:
        """Largest finite magnitude of each floating tensor: computed by the model itself; where that fails, in groups of about
        `budget` bytes; where onnxruntime cannot run the model, by onnx's evaluator.
        """
        try:
            return self._ranges_in_graph(model, feeds, tensors, tidy, threads)
        except Exception:  # an empty tensor has no largest element, and old versions lack operators
            self._key = self._session = None
        try:
            return self._ranges_in_groups(model, feeds, tensors, budget, tidy, threads)
        except Exception as error:
            if not _is_beyond(error):
                raise
        return self._ranges_by_reference(model, feeds, tensors)

    def _ranges_in_graph(self, model: str, feeds: list[dict[str, Entry]], tensors: list[str], tidy: bool, threads: int) -> dict[str, float]:
        types = {output.name: output.type for output in self._open(model, tuple(tensors), tidy, threads).get_outputs()}
        self._key = self._session = None
        floats = [name for name in tensors if types.get(name) in ("tensor(float)", "tensor(double)", "tensor(float16)")]
        suffix, names = reductions(floats, types)
        session = open_session(Path(model), (), tidy, threads, suffix)
        found: dict[str, float] = {}
        for feed in feeds:
            tops = run_session(session, {name: self._read(entry) for name, entry in feed.items()}, names)
            for name, top in zip(floats, tops.values(), strict=True):
                found[name] = max(found.get(name, 0.0), float(top))
        self.progress(len(tensors), len(tensors))
        return found

    def _ranges_in_groups(
        self, model: str, feeds: list[dict[str, Entry]], tensors: list[str], budget: int, tidy: bool, threads: int
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        largest, at = 0, 0
        while at < len(tensors):
            # The first group is small, as nothing is known of the sizes yet.
            count = min(256, max(1, budget // largest)) if largest else 8
            group = tensors[at : at + count]
            session = self._open(model, tuple(group), tidy, threads)
            for feed in feeds:
                outputs = run_session(session, {name: self._read(entry) for name, entry in feed.items()}, group)
                for name, value in outputs.items():
                    if isinstance(value, np.ndarray) and is_float(value):
                        largest = max(largest, value.nbytes)
                        found[name] = max(found.get(name, 0.0), max_finite(value))
            at += len(group)
            self.progress(at, len(tensors))
        self._key = self._session = None
        return found

    def _ranges_by_reference(self, model: str, feeds: list[dict[str, Entry]], tensors: list[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for feed in feeds:
            values = self._by_reference(model, {name: self._read(entry) for name, entry in feed.items()}, tensors)
            for name, value in values.items():
                if isinstance(value, np.ndarray) and is_float(value):
                    found[name] = max(found.get(name, 0.0), max_finite(value))
        self.progress(len(tensors), len(tensors))
        return found

    def kinds(self, model: str, feeds: dict[str, Entry], tensors: list[str], tidy: bool, threads: int) -> dict[str, list[Any]]:
        """Element type and shape of each of `tensors` that is one, computed by the model itself: no tensor is kept."""
        types = {output.name: output.type for output in self._open(model, tuple(tensors), tidy, threads).get_outputs()}
        self._key = self._session = None
        plain = [name for name in tensors if types.get(name, "").startswith("tensor(")]
        suffix, names = shapes_of(plain, types)
        session = open_session(Path(model), (), tidy, threads, suffix, early=True)
        found = run_session(session, {name: self._read(entry) for name, entry in feeds.items()}, names)
        return {name: [types[name], [int(n) for n in shape]] for name, shape in zip(plain, found.values(), strict=True)}

    def truth_start(self, model: str, feeds: dict[str, Entry], tensors: list[str], tidy: bool, threads: int) -> None:
        """Begins a float64 evaluation, of which `truth` then asks for `tensors`, each once and in this order."""
        import onnx
        import onnx.inliner

        from onnxfuse.verify.double import Evaluator

        self._key = self._session = None
        proto = onnx.load(model)
        if proto.functions:
            proto = onnx.inliner.inline_local_functions(proto)
        self._truth = Evaluator(proto, {name: self._read(entry) for name, entry in feeds.items()}, tensors)

    def truth(self, model: str, feeds: dict[str, Entry], tensors: list[str], tidy: bool, threads: int) -> dict[str, Any]:
        """float64 values; those that cannot be had by float64 alone, with the reason, under "missing". `feeds` are decisions that the
        reference took, which this evaluation is to follow.
        """
        if self._truth is None:
            raise Cannot("the process that evaluated it in float64 is gone")
        self._truth.follow({name: self._read(entry) for name, entry in feeds.items()})
        values = self._truth.values(tensors)
        missing = {name: self._truth.missing[name] for name in tensors if name in self._truth.missing}
        return {"values": {name: self._write(value) for name, value in values.items()}, "missing": missing}

    def truth_again(self, model: str, feeds: dict[str, Entry], tensors: list[str], tidy: bool, threads: int) -> dict[str, Any] | None:
        """The one of `tensors` in float64, from these inputs of its node."""
        from onnxfuse.verify.double import NoTruth

        if self._truth is None:
            return None
        try:
            return self._write(self._truth.again(tensors[0], {name: self._read(entry) for name, entry in feeds.items()}))
        except NoTruth:
            return None

    def _open(self, model: str, extra: tuple[str, ...], tidy: bool, threads: int) -> Any:
        key = (model, os.stat(model).st_mtime_ns, extra, tidy, threads)
        if self._key != key:
            self._key = self._session = None  # frees the last one first
            self._session = open_session(Path(model), extra, tidy, threads)
            self._key = key
        return self._session

    def _by_reference(self, model: str, feeds: dict[str, np.ndarray], tensors: list[str] | None) -> dict[str, Any]:
        import onnx.inliner
        from onnx.reference import ReferenceEvaluator

        # It calls no function without all of its inputs.
        proto = onnx.inliner.inline_local_functions(onnx.load(model))
        have = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors or () if name not in have)
        names = list(tensors) if tensors is not None else [output.name for output in proto.graph.output]
        try:
            return dict(zip(names, ReferenceEvaluator(proto).run(names, feeds), strict=True))
        except Exception as error:  # whatever it lacks shows as an exception of any type
            raise Cannot(f"onnx.reference: {first_line(error)}") from error

    def _read(self, entry: Entry) -> np.ndarray:
        array: np.ndarray = np.load(entry["file"], allow_pickle=False)
        if entry["dtype"] in _BITS:
            import ml_dtypes

            array = array.view(getattr(ml_dtypes, entry["dtype"]))
        return array

    def _write(self, value: Any) -> Entry:
        if value is None:
            return {"none": True}
        if isinstance(value, list):
            if value and isinstance(value[0], dict):
                raise Cannot("an output is a map, which is not compared")
            return {"sequence": [self._write(item) for item in value]}
        self.written += 1
        return write_array(self.folder / f"out{self.written}.npy", value)


def write_array(path: Path, value: Any) -> Entry:
    """Write one array; says under which name its type can be read back."""
    array = np.asarray(value)
    dtype = array.dtype.name
    if dtype in _BITS:
        array = array.view(_BITS[dtype])
    elif array.dtype == object:
        array = array.astype(str)
    np.save(path, array, allow_pickle=False)
    return {"file": str(path), "dtype": dtype}


def is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype.name in _BITS


def max_finite(array: np.ndarray) -> float:
    flat, top = array.ravel(), 0.0
    for start in range(0, flat.size, 1 << 20):
        piece = np.abs(flat[start : start + (1 << 20)].astype(np.float64))
        top = max(top, float(np.max(piece, initial=0.0, where=np.isfinite(piece))))
    return top


def open_session(model: Path, extra: Iterable[str], tidy: bool, threads: int, more: bytes = b"", early: bool = False) -> Any:
    """An unoptimized session on the CPU. `extra` tensors become outputs of a copy in memory, beside the model's own; `more` is a
    serialized ModelProto that is merged into that copy. early: Shape nodes run as soon as they can, and what they read may go.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if early:
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    source: str | bytes = str(model)
    suffix = with_outputs(model, extra) + more
    if tidy or suffix:
        # From bytes, external data is looked for where the file lies.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.resolve().parent))
        source = (tidied(model) if tidy else model.read_bytes()) + suffix
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def with_outputs(model: Path, extra: Iterable[str]) -> bytes:
    """Bytes that, behind those of the model, make `extra` outputs of its graph: protobuf merges what is concatenated."""
    extra = list(extra)
    if not extra:
        return b""
    import onnx

    from onnxfuse.verify.skim import skeleton

    have = {output.name for output in skeleton(model).graph.output}
    suffix = onnx.ModelProto()
    suffix.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra if name not in have)
    return suffix.SerializeToString() if suffix.graph.output else b""


def reductions(tensors: Sequence[str], types: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """What, merged into a model, computes the largest finite magnitude of each of `tensors`; and the outputs' names."""
    import onnx
    from onnx import TensorProto, helper

    taken, prefix = set(types), "onnxfuse.range"
    while any(name.startswith(prefix) for name in taken):
        prefix += "."
    scalars = {"infinity": float("inf"), "zero": 0.0}
    suffix = onnx.ModelProto()
    for name, value in scalars.items():
        tensor = helper.make_tensor("", TensorProto.FLOAT, [], [value])
        suffix.graph.node.append(helper.make_node("Constant", [], [f"{prefix}.{name}"], value=tensor))
    outputs = []
    for index, name in enumerate(tensors):
        at = f"{prefix}.{index}."
        steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
            ("Cast", [name], "wide", {"to": TensorProto.FLOAT}),
            ("Abs", [at + "wide"], "size", {}),
            ("Less", [at + "size", f"{prefix}.infinity"], "finite", {}),  # false for NaN, too
            ("Where", [at + "finite", at + "size", f"{prefix}.zero"], "counted", {}),
            ("ReduceMax", [at + "counted"], "top", {"keepdims": 0}),
        ]
        for op, inputs, output, attributes in steps:
            suffix.graph.node.append(helper.make_node(op, inputs, [at + output], **attributes))
        outputs.append(at + "top")
    suffix.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return suffix.SerializeToString(), outputs


def shapes_of(tensors: Sequence[str], types: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """What, merged into a model, computes the shape of each of `tensors`; and the outputs' names."""
    import onnx
    from onnx import helper

    taken, prefix = set(types), "onnxfuse.shape"
    while any(name.startswith(prefix) for name in taken):
        prefix += "."
    suffix = onnx.ModelProto()
    outputs = [f"{prefix}.{index}" for index in range(len(tensors))]
    suffix.graph.node.extend(helper.make_node("Shape", [name], [output]) for name, output in zip(tensors, outputs, strict=True))
    suffix.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return suffix.SerializeToString(), outputs


def tidied(model: Path) -> bytes:
    """The same model with unique node names: onnxruntime refuses repeated ones, which ONNX allows."""
    import onnx

    proto = onnx.load(str(model), load_external_data=False)
    bodies: list[Any] = [proto.graph, *proto.functions]
    count = 0
    while bodies:
        for node in bodies.pop().node:
            count += 1
            node.name = f"{node.op_type}_{count}"
            for attribute in node.attribute:
                bodies.extend([attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs)
    return bytes(proto.SerializeToString())


def run_session(session: Any, feeds: dict[str, np.ndarray], tensors: list[str] | None) -> dict[str, Any]:
    declared = session.get_outputs()
    known = {i.name for i in (*session.get_inputs(), *session.get_overridable_initializers())}
    feeds = {name: array for name, array in feeds.items() if name in known}
    names = list(tensors) if tensors is not None else [output.name for output in declared]
    types = {output.name: output.type for output in declared}
    narrow = ("bfloat16", "float8")
    if any(array.dtype.name in _BITS for array in feeds.values()) or any(words in types.get(n, "") for n in names for words in narrow):
        return _run_narrow(session, feeds, names)
    return dict(zip(names, session.run(names, feeds), strict=True))


def _run_narrow(session: Any, feeds: dict[str, np.ndarray], names: list[str]) -> dict[str, Any]:
    """onnxruntime's numpy bridge has no bfloat16 and no float8: their bits go in and come out by OrtValue."""
    import onnxruntime as ort

    given = {}
    for name, array in feeds.items():
        if array.dtype.name in _BITS:
            bits = np.ascontiguousarray(array).view(_BITS[array.dtype.name])
            given[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_TYPES[array.dtype.name])
        else:
            given[name] = ort.OrtValue.ortvalue_from_numpy(array)
    return {name: _array(value) for name, value in zip(names, session.run_with_ort_values(names, given), strict=True)}


def _array(value: Any) -> Any:
    narrow = {number: name for name, number in _ONNX_TYPES.items()}
    if not (value.is_tensor() and value.element_type() in narrow):
        return value.numpy()
    import ml_dtypes

    name = narrow[value.element_type()]
    bits = np.frombuffer(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), dtype=_BITS[name])
    return bits.view(getattr(ml_dtypes, name)).reshape(value.shape())
