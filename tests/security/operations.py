"""What a kill is tried on: each operation writes state A or B, and each check says whether what is there is A or B, whole.

Run as a program, it forks a process for each line "OPERATION FOLDER" on stdin, which does the operation once, says its number, and
repeats it until it is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import plugins
from onnxfuse.bench.stats import Interval
from onnxfuse.engine import build as building
from onnxfuse.engine import manifest as manifests
from onnxfuse.engine.run import vouched
from onnxfuse.errors import BadInput
from onnxfuse.graph import read, write
from onnxfuse.graph.files import locked, whole_folder
from onnxfuse.plan import store
from onnxfuse.plan.verdicts import Verdict
from tests.engine.test_manifest import example

SIZE = 60_000  # large enough for a write to be cut in the middle


def proto(value: float) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(np.full(SIZE, value, np.float32), name) for name in ("a", "b")]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE]) for name in ("x", "y")]
    nodes = [helper.make_node("Add", ["x", "a"], ["t"]), helper.make_node("Mul", ["t", "b"], ["y"])]
    graph = helper.make_graph(nodes, f"of {value}", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def save_model(folder: Path, state: int) -> None:
    source = folder / f"source{state}.onnx"
    if not source.exists():
        onnx.save(proto(float(state)), source)
    write.save(read.load(source), folder / "m.onnx")


def save_model_with_data(folder: Path, state: int) -> None:
    source = folder / f"external{state}.onnx"
    if not source.exists():
        onnx.save(proto(float(state)), source, save_as_external_data=True, location=f"external{state}.data", size_threshold=0)
    write.save(read.load(source), folder / "m.onnx")


def check_model(folder: Path) -> None:
    onnx.checker.check_model(str(folder / "m.onnx"), full_check=True)
    model = onnx.load(folder / "m.onnx")
    values = {float(v) for tensor in model.graph.initializer for v in np.unique(numpy_helper.to_array(tensor))}
    assert len(values) == 1
    assert model.graph.name == f"of {values.pop()}"


def save_engine(folder: Path, state: int) -> None:
    engine = bytes([state]) * SIZE
    manifest = dataclasses.replace(example(), engine_sha256=hashlib.sha256(engine).hexdigest(), plugins=None, gpu=f"GPU {state}")
    building._write(folder / "m.engine", engine, manifest, ())


def check_engine(folder: Path) -> None:
    """Engine and manifest are whole; where they are of two builds, the engine is refused with the reason."""
    engine = (folder / "m.engine").read_bytes()
    assert engine in (bytes([0]) * SIZE, bytes([1]) * SIZE)
    manifest = manifests.load(folder / "m.engine")
    assert manifest is not None
    assert manifest.gpu in ("GPU 0", "GPU 1")
    try:
        assert vouched(engine, folder / "m.engine") == manifest
    except BadInput as refusal:
        assert "written for another engine" in str(refusal)  # noqa: PT017


def save_library(folder: Path, state: int) -> None:
    os.environ["ONNXFUSE_CACHE"] = str(folder / "cache")
    place = plugins._private("plugins") / "sm_90-entry"
    with locked(place.with_suffix(".lock")), plugins._new_folder(place) as work:
        content = bytes([state]) * SIZE
        (work / plugins.LIBRARY).write_bytes(content)
        note = {"sm": 90, "sha256": hashlib.sha256(content).hexdigest(), "ops": [], "compiler": "nvcc", "kernels": []}
        (work / "library.json").write_text(json.dumps(note))
    plugins.keep(bytes([state]) * SIZE)


def check_library(folder: Path) -> None:
    """Nothing, or a library that is what was compiled; what is kept to be loaded is named by its hash."""
    os.environ["ONNXFUSE_CACHE"] = str(folder / "cache")
    place = plugins._private("plugins") / "sm_90-entry"
    assert plugins._load(place) is not None or not place.exists()
    for path in (folder / "cache" / "loaded").glob("*.so"):
        assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()


def verdict(model: str, median: float) -> Verdict:
    time, ratio = Interval(1.0, 0.9, 1.1), Interval(median, 1.05, 1.4)
    return Verdict("skip_layernorm", model, 128, 768, "float16", "h200", "580.1", "10.6.0", time, time, ratio, "2026-11-30")


def save_verdicts(folder: Path, state: int) -> None:
    os.environ["ONNXFUSE_VERDICTS"] = str(folder / "verdicts.json")
    problems = store.add([verdict(f"m{n}", 1.1 + 0.1 * state) for n in range(60)])
    assert not problems


def check_verdicts(folder: Path) -> None:
    os.environ["ONNXFUSE_VERDICTS"] = str(folder / "verdicts.json")
    found = store.load()
    assert not found.problems
    assert len(found.here) == 60
    assert len({one.ratio.median for one in found.here}) == 1


def save_folder(folder: Path, state: int) -> None:
    place = folder / f"kit{state}"
    with contextlib.suppress(BadInput), whole_folder(place) as work:
        for name in ("one", "two", "three"):
            (work / name).write_bytes(bytes([state]) * SIZE)
    if place.exists():
        place.rename(folder / f"old-{os.getpid()}-{os.urandom(4).hex()}")


def check_folder(folder: Path) -> None:
    for place in (*folder.glob("kit?"), *folder.glob("old-*")):
        assert sorted(path.name for path in place.iterdir()) == ["one", "three", "two"]
        assert {path.stat().st_size for path in place.iterdir()} == {SIZE}


OPERATIONS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], None]]] = {
    "model": (save_model, check_model),
    "model with data": (save_model_with_data, check_model),
    "engine": (save_engine, check_engine),
    "library": (save_library, check_library),
    "verdicts": (save_verdicts, check_verdicts),
    "folder": (save_folder, check_folder),
}


def serve() -> None:
    for line in sys.stdin:
        name, folder = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            OPERATIONS[name][0](Path(folder), 1)
            print(os.getpid(), flush=True)
            while True:
                for state in (0, 1):
                    OPERATIONS[name][0](Path(folder), state)
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    serve()
