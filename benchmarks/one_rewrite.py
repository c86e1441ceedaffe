"""`python -m benchmarks.one_rewrite TOOL IN.onnx OUT.onnx`: one tool rewrites one model in this new process, and is measured.

Prints one JSON object: seconds (wall, loading and saving included, imports not), cpu_seconds, peak_bytes (the most resident memory
above what there was after the imports), nodes (of the result, Constant left out), initializer_bytes, and invalid (what onnx.checker
says, or null). Where it cannot be done: missing (the package) or failed (the first line of the exception).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx

Rewrite = Callable[[Path, Path], object]
_MOST_INLINE = 2_000_000_000


def save(model: onnx.ModelProto, out: Path) -> None:
    """As a user of onnx would: external data where the model would not fit otherwise."""
    if sum(_initializer_bytes(tensor) for tensor in model.graph.initializer) > _MOST_INLINE:
        onnx.save(model, out, save_as_external_data=True, location=f"{out.name}.data")
    else:
        onnx.save(model, out)


def load_and_save() -> Rewrite:
    return lambda path, out: save(onnx.load(path), out)


def graph_surgeon() -> Rewrite:
    import onnx_graphsurgeon as gs

    return lambda path, out: save(gs.export_onnx(gs.import_onnx(onnx.load(path))), out)


def onnxfuse() -> Rewrite:
    import onnxruntime  # noqa: F401  imported on first need otherwise, which would be measured

    from onnxfuse.pipeline import optimize

    return lambda path, out: optimize(path, out, check=False)


def onnxruntime_basic() -> Rewrite:
    return _onnxruntime("ORT_ENABLE_BASIC")


def onnxruntime_extended() -> Rewrite:
    return _onnxruntime("ORT_ENABLE_EXTENDED")


def _onnxruntime(level: str) -> Rewrite:
    import onnxruntime

    def run(path: Path, out: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(out)
        options.log_severity_level = 4
        if any(path.parent.glob(f"{path.name}.data")):
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{out.name}.data")
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    return run


def onnxruntime_transformers() -> Rewrite:
    import logging

    from onnxruntime.transformers import optimizer

    logging.disable(logging.CRITICAL)

    def run(path: Path, out: Path) -> None:
        made = optimizer.optimize_model(str(path), model_type="unet" if "unet" in path.name else "bert", opt_level=0)
        save(made.model, out)

    return run


def onnxslim() -> Rewrite:
    import onnxslim

    return lambda path, out: save(onnxslim.slim(onnx.load(path)), out)


def onnxsim() -> Rewrite:
    import onnxsim

    return lambda path, out: save(onnxsim.simplify(onnx.load(path))[0], out)


def onnxoptimizer() -> Rewrite:
    import onnxoptimizer

    return lambda path, out: save(onnxoptimizer.optimize(onnx.load(path)), out)


def onnxscript() -> Rewrite:
    import onnxscript.optimizer
    import onnxscript.rewriter

    return lambda path, out: save(onnxscript.rewriter.rewrite(onnxscript.optimizer.optimize(onnx.load(path))), out)


TOOLS: dict[str, Callable[[], Rewrite]] = {
    "onnx.load + onnx.save": load_and_save,
    "onnxfuse": onnxfuse,
    "graph-surgeon in + out": graph_surgeon,
    "onnxruntime basic": onnxruntime_basic,
    "onnxruntime extended": onnxruntime_extended,
    "onnxsim": onnxsim,
    "onnxoptimizer": onnxoptimizer,
    "onnxruntime transformers": onnxruntime_transformers,
    "onnxscript": onnxscript,
    "OnnxSlim": onnxslim,
}
PACKAGES = {"OnnxSlim": "onnxslim", "graph-surgeon in + out": "onnx-graphsurgeon", "onnx.load + onnx.save": "onnx"}


def measure(tool: str, path: Path, out: Path) -> dict[str, Any]:
    try:
        rewrite = TOOLS[tool]()
    except ImportError as error:
        return {"missing": error.name or str(error)}
    onnx.defs.has("Add")  # the table of operators is filled on first need: part of importing
    before = _reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        rewrite(path, out)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"}
    found = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu, "peak_bytes": _status("VmHWM") - before}
    return found | judge(out)


def judge(out: Path) -> dict[str, Any]:
    """What is in the file that a tool wrote."""
    model = onnx.load(out, load_external_data=False)
    invalid = None
    try:
        onnx.checker.check_model(str(out))
    except Exception as error:
        invalid = str(error).strip().splitlines()[0][:200]
    nodes = sum(1 for node in _nodes(model.graph) if node.op_type != "Constant")
    return {"nodes": nodes, "initializer_bytes": sum(map(_initializer_bytes, model.graph.initializer)), "invalid": invalid}


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)


def _initializer_bytes(tensor: onnx.TensorProto) -> int:
    external = {entry.key: entry.value for entry in tensor.external_data}
    return int(external["length"]) if "length" in external else tensor.ByteSize()


def _reset_peak() -> int:
    """Forgets the peak of resident memory; returns what is resident now. 0 and a peak of the whole process where there is no /proc."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
