"""Part engines of run.py: generated kernels in engines, and against what TensorRT makes of the same operators alone."""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import tensorrt as trt
from run import Copy, Cuda, differs, rounded
from stats import bootstrap_median, bootstrap_ratio

SIZES = {trt.float32: 4, trt.float16: 2, trt.bfloat16: 2, trt.int32: 4, trt.int64: 8, trt.bool: 1}
KINDS = {
    trt.float32: np.float32,
    trt.float16: np.float16,
    trt.int32: np.int32,
    trt.int64: np.int64,
    trt.bool: np.bool_,
    trt.bfloat16: np.uint16,
}


APART = 0.02  # relative to 1 and to the value: some roundings of half precision


class Log(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
        self.errors = []
        trt.init_libnvinfer_plugins(self, "")

    def log(self, severity, text):
        if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
            self.errors.append(text[:300])


def built(log, model, library, profile=None):
    """A serialized engine, and the seconds it took."""
    start = time.monotonic()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model.read_bytes()):
        raise RuntimeError("; ".join(str(parser.get_error(at)) for at in range(min(3, parser.num_errors))))
    config = builder.create_builder_config()
    config.plugins_to_serialize = [str(library)]
    if profile:
        ranges = builder.create_optimization_profile()
        for name, (low, middle, high) in profile.items():
            if low != high:
                ranges.set_shape(name, low, middle, high)
        config.add_optimization_profile(ranges)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("the build failed: " + "; ".join(log.errors[-3:]))
    return bytes(plan), time.monotonic() - start


class Engine:
    """A context and its memory."""

    def __init__(self, cuda, log, plan):
        self.runtime = trt.Runtime(log)
        self.runtime.engine_host_code_allowed = True
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise RuntimeError("the engine does not load: " + "; ".join(log.errors[-3:]))
        self.context = self.engine.create_execution_context()
        self.cuda, self.memory = cuda, {}
        names = [self.engine.get_tensor_name(at) for at in range(self.engine.num_io_tensors)]
        self.inputs = [name for name in names if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if name not in self.inputs]

    def bind(self, shapes):
        """Memory for every tensor at these shapes of the inputs."""
        for name in self.inputs:
            is_open = -1 in tuple(self.engine.get_tensor_shape(name))
            if is_open and not self.context.set_input_shape(name, tuple(shapes[name])):
                raise RuntimeError(f"shape {shapes[name]} of {name} is refused")
        for name in (*self.inputs, *self.outputs):
            size = int(np.prod(self.context.get_tensor_shape(name), dtype=np.int64)) * SIZES[self.engine.get_tensor_dtype(name)]
            if name in self.memory:
                self.cuda.free(self.memory.pop(name))
            self.memory[name] = self.cuda.memory(size)
            self.cuda.fill(self.memory[name], 255, max(size, 1))
            self.context.set_tensor_address(name, self.memory[name].value)

    def enqueue(self):
        if not self.context.execute_async_v3(self.cuda.stream.value):
            raise RuntimeError("the engine did not run")

    def run(self):
        self.enqueue()
        self.cuda.wait()

    def output(self, name):
        """In float64, integers and bool in their type."""
        kind = self.engine.get_tensor_dtype(name)
        array = self.cuda.get(self.memory[name], tuple(self.context.get_tensor_shape(name)), KINDS[kind])
        if kind == trt.bfloat16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float64) if array.dtype.kind == "f" else array

    def close(self):
        for memory in self.memory.values():
            self.cuda.free(memory)
        self.memory = {}


def check(engine, arrays, names):
    """Wrong outputs of an engine of some expressions, at both shapes of the reference, run and replayed."""
    wrong = []
    for run in (0, 1):
        given = {name: arrays[f"{run}/in/{name}"] for name in engine.inputs}
        engine.bind({name: array.shape for name, array in given.items()})
        for name, array in given.items():
            engine.cuda.put(engine.memory[name], array)
        engine.run()
        first = {name: engine.output(name) for name in engine.outputs}
        for name, have in first.items():
            fault = differs(have, *(arrays[f"{run}/{what}/{name}"] for what in ("want", "bound", "sure")))
            if fault:
                wrong.append(f"{names[int(name[1:].split('_')[0])]}, output {name.split('_o')[1]}, run {run}: {fault}")
        ready = engine.cuda.captured(engine.enqueue)
        engine.cuda.replay(ready)
        engine.cuda.wait()
        wrong += [
            f"{name}, run {run}: a replayed graph gives other values"
            for name in engine.outputs
            if engine.output(name).tobytes() != first[name].tobytes()
        ]
    return wrong


def fresh(folder):
    """The engine and arrays of a folder, in this process, with no plugin library and no compiler at hand."""
    about = json.loads((folder / "about.json").read_text())
    engine = Engine(Cuda(), Log(), (folder / "engine").read_bytes())
    wrong = check(engine, np.load(about["arrays"]), about["names"])
    print("\n".join(wrong))
    return 1 if wrong else 0


def in_fresh_process(folder, plan, group, names):
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "engine").write_bytes(plan)
        (Path(place) / "about.json").write_text(json.dumps({"arrays": str(folder / group["arrays"]), "names": names}))
        path = ":".join(part for part in os.environ.get("PATH", "").split(":") if "cuda" not in part)
        command = [sys.executable, str(folder / "run.py"), "--part", "fresh", place]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=120, env={**os.environ, "PATH": path, "CUDA_HOME": "/none"}
        )
    return [] if done.returncode == 0 else [f"{group['name']} in a fresh process: {(done.stdout + done.stderr)[-400:]}"]


def time_pair(cuda, log, folder, entry, samples):
    """Microseconds of each engine of a chain, in turn, with intervals, and how far their outputs are apart."""
    engines, seconds = {}, {}
    try:
        for kind, file in entry["models"].items():
            plan, seconds[kind] = built(log, folder / file, folder / "plugins.bin")
            engines[kind] = Engine(cuda, log, plan)
        rng = np.random.default_rng(0)
        feeds = {}
        for engine in engines.values():
            engine.bind({name: tuple(engine.engine.get_tensor_shape(name)) for name in engine.inputs})
            for name in engine.inputs:
                if name not in feeds:
                    feeds[name] = random(rng, engine.engine.get_tensor_dtype(name), tuple(engine.engine.get_tensor_shape(name)))
                cuda.put(engine.memory[name], feeds[name])
            engine.run()
        outputs = engines["fused"].outputs
        worst = max(distance(engines["fused"].output(name), engines["automatic"].output(name)) for name in outputs)
        graphs = {kind: cuda.captured(engine.enqueue) for kind, engine in engines.items()}
        times = max(3, int(1000 / max(cuda.microseconds(lambda: cuda.replay(graphs["fused"]), 5), 1)))
        taken = {kind: [] for kind in engines}
        for turn in range(samples + 2):
            for kind in list(engines)[:: 1 if turn % 2 else -1]:
                taken[kind].append(cuda.microseconds(lambda kind=kind: cuda.replay(graphs[kind]), times))
        taken = {kind: found[2:] for kind, found in taken.items()}
        ratio = bootstrap_ratio(taken["automatic"], taken["fused"])
        return {
            "name": f"{entry['name']}, {entry['size']}",
            **{key: entry[key] for key in ("model", "form", "size", "shape", "bytes")},
            "precision": "fp16",
            "policy": "all",
            **{f"{kind}_ms": rounded(bootstrap_median([us / 1000 for us in found]), 6) for kind, found in taken.items()},
            "ratio": rounded(ratio),
            "verdict": "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "draw",
            "agrees": worst <= APART,
            "largest_difference": round(worst, 6),
            "sites": {"elementwise": 1},
            "layers": {kind: engine.engine.num_layers for kind, engine in engines.items()},
            "build_seconds": {kind: round(value, 2) for kind, value in seconds.items()},
            "marks": [],
        }
    finally:
        for engine in engines.values():
            engine.close()


def random(rng, kind, shape):
    drawn = rng.standard_normal(min(int(np.prod(shape, dtype=np.int64)), 1 << 20)).astype(np.float32) + 1.5
    whole = np.resize(drawn, shape)
    if kind == trt.bool:
        return whole > 1.5
    if kind == trt.bfloat16:
        return (whole.view(np.uint32) >> 16).astype(np.uint16)
    return whole.astype(KINDS[kind])


def distance(a, b):
    """Largest difference, relative to 1 and to the values: TensorRT rounds after every operator."""
    a, b = (array.reshape(-1)[: 1 << 22] * 1.0 for array in (a, b))
    with np.errstate(all="ignore"):
        gap = np.abs(a - b) / (1 + np.maximum(np.abs(a), np.abs(b)))
        return float(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.nan_to_num(gap, nan=np.inf)).max(initial=0.0))


def run(cuda, folder, about, clock, samples, out):
    """All of it: what was found, in the form of the file, and what is wrong."""
    log = Log()
    if trt.get_plugin_registry().load_library(str(folder / "plugins.bin")) is None:
        raise SystemExit("error: the plugin library does not load")
    copy = Copy(cuda, about["copy_bytes"])
    found = {
        "machine": {"tensorrt": trt.__version__, "copy_gbps": round(copy.gbps(copy.us(5)), 1)},
        "checked": 0,
        "fresh_processes": 0,
        "rows": [],
        "wrong": [],
        "left": [],
    }
    wrong = found["wrong"]

    def attempt(name, act):
        """One piece of work; a fault of it ends no other."""
        if clock.is_over:
            found["left"].append(name)
            return
        try:
            act()
        except Exception as fault:
            traceback.print_exc()
            wrong.append(f"{name}: {type(fault).__name__}: {fault}; {'; '.join(log.errors[-2:])}")

    def values(group):
        names = [entry["name"] for entry in group["expressions"]]
        plan, seconds = built(log, folder / group["model"], folder / "plugins.bin", group["profile"])
        engine = Engine(cuda, log, plan)
        try:
            faults = check(engine, np.load(folder / group["arrays"]), names)
        finally:
            engine.close()
        found["checked"] += len(names)
        wrong.extend(faults)
        print(f"{group['name']}: {len(names)} expressions, {len(faults)} wrong, built in {seconds:.1f} s", flush=True)
        if not found["fresh_processes"]:
            faults = in_fresh_process(folder, plan, group, names)
            found["fresh_processes"] += not faults
            wrong.extend(faults)

    def pair(entry):
        row = time_pair(cuda, log, folder, entry, samples)
        found["rows"].append(row)
        if not row["agrees"]:
            wrong.append(f"{row['name']}: the outputs are {row['largest_difference']} from TensorRT's own")
        ratio, built_in = row["ratio"], sum(row["build_seconds"].values())
        figures = f"{row['automatic_ms']['median'] * 1e3:8.2f} / {row['fused_ms']['median'] * 1e3:8.2f} us = {ratio['median']:.3f}"
        print(f"{figures} [{ratio['low']:.3f}, {ratio['high']:.3f}] {row['verdict']}, built in {built_in:.1f} s: {row['name']}", flush=True)

    first, *others = about["values"]
    attempt(first["name"], lambda: values(first))
    for entry in about["pairs"]:
        attempt(f"{entry['name']}, {entry['size']}", lambda entry=entry: pair(entry))
    for group in others:
        attempt(group["name"], lambda group=group: values(group))
    return found, wrong
