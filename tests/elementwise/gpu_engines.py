"""Part engines of run.py: generated kernels in engines, and against what TensorRT makes of the same operators alone.

Engines of chains are built first, many side by side, each process one after another; then nothing but timing runs on the GPU.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import tensorrt as trt
from run import Copy, Cuda, Nvml, differs, rounded
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
PLACEMENTS = 8  # how often the engines of a chain are loaded anew
SAMPLE_US = 2000  # a sample takes as many runs, back to back, as take this long
WARM_UP_US = 20000
COMPARED = 1 << 20  # elements from each end of an output
COLD = 3  # buffers rotate over this many times the L2
MOST_SETS = 600  # of buffers, and so runs in one graph
FEWEST_SETS = 2
L2_BYTES = 38  # the number of the driver's attribute
BUILDING = 0.5  # of the seconds, after which no more is built
BUILD_LIMIT = 60  # seconds for one engine
MOST_DEATHS = 3  # of one builder after another, before nothing more is asked of them
RATIO_WIDTH_LIMIT = 0.05  # as in onnxfuse/bench/timing.py


class Log(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
        self.errors = []
        trt.init_libnvinfer_plugins(self, "")

    def log(self, severity, text):
        if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
            self.errors.append(text[:300])


def built(log, model, library=None, profile=None):
    """A serialized engine, with the plugin library in it if one is given, and the seconds it took."""
    start = time.monotonic()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model.read_bytes()):
        raise RuntimeError("; ".join(str(parser.get_error(at)) for at in range(min(3, parser.num_errors))))
    config = builder.create_builder_config()
    if library:
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
            size = self.size(name)
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

    def size(self, name):
        """Bytes."""
        return int(np.prod(self.context.get_tensor_shape(name), dtype=np.int64)) * SIZES[self.engine.get_tensor_dtype(name)]

    def output(self, name):
        """In float64, integers and bool in their type."""
        kind = self.engine.get_tensor_dtype(name)
        return widened(self.cuda.get(self.memory[name], tuple(self.context.get_tensor_shape(name)), KINDS[kind]), kind)

    def ends(self, name, address):
        """The first and the last elements of an output that lies elsewhere."""
        kind = self.engine.get_tensor_dtype(name)
        count = self.size(name) // SIZES[kind]
        some = min(count, COMPARED)
        places = (address, address + (count - some) * SIZES[kind])
        return widened(np.concatenate([self.cuda.get(self.cuda.pointer(place), (some,), KINDS[kind]) for place in places]), kind)

    def close(self):
        for memory in self.memory.values():
            self.cuda.free(memory)
        self.memory = {}
        self.context = self.engine = self.runtime = None


def widened(array, kind):
    if kind == trt.bfloat16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


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


# --- building many engines side by side -----------------------------------------------------------------------------------------


def load_plugins(log, folder):
    if trt.get_plugin_registry().load_library(str(folder / "plugins.bin")) is None:
        raise SystemExit("error: the plugin library does not load: " + "; ".join(log.errors[-3:]))


def builder(folder):
    """Builds the engines that it is asked for, one line each, and answers with a line. What others print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    log = Log()
    load_plugins(log, folder)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            plan, seconds = built(log, folder / order["model"])
            part = Path(order["engine"] + ".part")
            part.write_bytes(plan)
            part.rename(order["engine"])
            said = {"seconds": seconds}
        except Exception as fault:
            said = {"fault": f"{type(fault).__name__}: {fault}"}
        print(json.dumps(said), file=answers, flush=True)
    return 0


class Builders:
    """Processes that build engines. What they answered is in `said`, by model; what is missing there was not reached."""

    def __init__(self, folder, place, models, count):
        self.folder, self.place = folder, place
        self.said = {}
        self._waiting = collections.deque(model for model in models if not self.engine(model).exists())
        self.said.update({model: {"seconds": 0.0} for model in models if self.engine(model).exists()})
        self._running = set()
        self._over = threading.Event()
        self._log = (place / "builders.log").open("w")
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(min(count, len(self._waiting)))]

    def engine(self, model):
        return self.place / f"{model}.engine"

    def run(self, seconds):
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._over.set()
        for process in list(self._running):
            process.kill()
        for thread in self._threads:
            thread.join()
        self._log.close()

    def _serve(self):
        process, deaths = None, 0
        while self._waiting and deaths < MOST_DEATHS and not self._over.is_set():
            try:
                model = self._waiting.popleft()
            except IndexError:
                break
            process = process or self._start()
            answer = self._ask(process, model)
            if answer:
                self.said[model] = json.loads(answer)
                continue
            self._running.discard(process)
            status, process, deaths = process.wait(), None, deaths + 1
            if not self._over.is_set():
                self.said[model] = {"fault": f"its builder ended with status {status}, or took longer than {BUILD_LIMIT} s (builders.log)"}
        if process:
            process.stdin.close()
            process.wait()
            self._running.discard(process)

    def _start(self):
        command = [sys.executable, str(self.folder / "run.py"), "--part", "builder", str(self.place)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self._running.add(process)
        return process

    def _ask(self, process, model):
        limit = threading.Timer(BUILD_LIMIT, process.kill)
        limit.start()
        try:
            process.stdin.write(json.dumps({"model": model, "engine": str(self.engine(model))}) + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:
            return ""
        finally:
            limit.cancel()


# --- timing two engines of a chain ----------------------------------------------------------------------------------------------


class Sets:
    """Memory for many runs, each with inputs and outputs of its own, so that what a run reads is in no cache any more."""

    def __init__(self, cuda, sizes, count):
        self.cuda, self.count = cuda, count
        self._at, end = {}, 0
        for name, size in sizes.items():
            self._at[name] = end
            end += -(-max(size, 1) // 256) * 256
        self.stride = end
        self.memory = cuda.memory(self.stride * count)

    def address(self, name, at=0):
        return self.memory.value + at * self.stride + self._at[name]

    def spread(self):
        """All sets become like the first."""
        done = 1
        while done < self.count:
            more = min(done, self.count - done)
            self.cuda.copy(self.cuda.pointer(self.memory.value + done * self.stride), self.memory, more * self.stride)
            done += more
        self.cuda.wait()

    def close(self):
        self.cuda.free(self.memory)


class Chain:
    """Two engines of one chain in one placement."""

    def __init__(self, cuda, log, files, sizes, count, order):
        self.cuda, self.spacer = cuda, cuda.memory((1 + int(order.integers(1, 64))) << 20)
        self.engines = {kind: Engine(cuda, log, file.read_bytes()) for kind, file in files}
        self.sets = Sets(cuda, sizes, count)
        self.graphs = {}

    def enqueue(self, kind, at):
        engine = self.engines[kind]
        for name in (*engine.inputs, *engine.outputs):
            engine.context.set_tensor_address(name, self.sets.address(name, at))
        engine.enqueue()

    def capture(self):
        """One graph an engine: a run on every set. The reasons why an engine has none."""
        reasons = []
        for kind in self.engines:
            self.enqueue(kind, 0)
            self.cuda.wait()
            try:
                self.graphs[kind] = self.cuda.captured(lambda kind=kind: self.all_sets(kind))
            except RuntimeError as fault:
                reasons.append(f"{kind}: no CUDA graph, timed by plain enqueue ({fault})")
        return reasons

    def all_sets(self, kind):
        for at in range(self.sets.count):
            self.enqueue(kind, at)

    def launch(self, kind):
        if kind in self.graphs:
            self.cuda.replay(self.graphs[kind])
        else:
            self.all_sets(kind)

    def us(self, kind, times):
        """Of one run."""
        return self.cuda.microseconds(lambda: self.launch(kind), times) / self.sets.count

    def outputs(self, kind, at):
        engine = self.engines[kind]
        return {name: engine.ends(name, self.sets.address(name, at)) for name in engine.outputs}

    def blank(self):
        """Outputs that no run has made: NaN, or -1."""
        for engine in self.engines.values():
            for name in engine.outputs:
                for at in {0, self.sets.count - 1}:
                    self.cuda.fill(self.cuda.pointer(self.sets.address(name, at)), 255, engine.size(name))

    def close(self):
        for graph in self.graphs.values():
            self.cuda.forget(graph)
        for engine in self.engines.values():
            engine.close()
        self.sets.close()
        self.cuda.free(self.spacer)


def compared(chain):
    """How far the outputs of both engines are apart; and what a graph, which must fill the first and the last set, makes otherwise."""
    outputs, marks = {}, []
    for kind in chain.engines:
        chain.blank()
        chain.enqueue(kind, 0)
        chain.cuda.wait()
        outputs[kind] = chain.outputs(kind, 0)
        chain.blank()
        chain.launch(kind)
        chain.cuda.wait()
        for at in sorted({0, chain.sets.count - 1}):
            again = chain.outputs(kind, at)
            if any(again[name].tobytes() != array.tobytes() for name, array in outputs[kind].items()):
                marks.append(f"{kind}: a replayed graph gives other values")
                break
        if any(array.dtype.kind == "f" and array.size and not np.isfinite(array).any() for array in outputs[kind].values()):
            marks.append(f"{kind}: an output without a finite number")
    worst = max(distance(array, outputs["automatic"][name]) for name, array in outputs["fused"].items())
    return worst, marks


def time_pair(cuda, log, nvml, entry, files, samples, copy_gbps):
    """Microseconds of each engine of a chain, in turn, with intervals, and how far their outputs are apart."""
    order = np.random.default_rng(0)
    engine = Engine(cuda, log, files["automatic"].read_bytes())
    names = (*engine.inputs, *engine.outputs)
    sizes = {name: engine.size(name) for name in names}
    given = {}
    for name in engine.inputs:
        given[name] = cuda.memory(sizes[name])
        cuda.put(given[name], random(order, engine.engine.get_tensor_dtype(name), tuple(engine.engine.get_tensor_shape(name))))
    engine.close()
    try:
        return timed(cuda, log, nvml, entry, files, samples, copy_gbps, sizes, given, order)
    finally:
        for memory in given.values():
            cuda.free(memory)


def timed(cuda, log, nvml, entry, files, samples, copy_gbps, sizes, given, order):
    """The row of a pair, its inputs being at hand."""
    each, l2 = max(1, sum(sizes.values())), cuda.attribute(L2_BYTES)
    count = max(FEWEST_SETS, min(MOST_SETS, -(-COLD * l2 // each)))
    taken, kinds, looks, layers = {kind: [] for kind in files}, list(files), [], {}
    worst, marks = None, []
    for _ in range(PLACEMENTS):
        chain = Chain(cuda, log, [(kind, files[kind]) for kind in kinds], sizes, count, order)
        try:
            for name, memory in given.items():
                cuda.copy(cuda.pointer(chain.sets.address(name)), memory, sizes[name])
            chain.sets.spread()
            not_captured = chain.capture()
            if worst is None:
                worst, marks = compared(chain)
                marks += not_captured
                layers = {kind: one.engine.num_layers for kind, one in chain.engines.items()}
            times = {}
            for kind in kinds:
                whole = chain.us(kind, 1) * count
                chain.us(kind, max(1, int(WARM_UP_US / whole)))
                times[kind] = max(1, -(-SAMPLE_US // max(1, int(chain.us(kind, 1) * count))))
            looks.append(nvml.look())
            for at in range(samples):
                for kind in kinds[:: 1 if at % 2 else -1]:
                    taken[kind].append(chain.us(kind, times[kind]))
            looks.append(nvml.look())
        finally:
            chain.close()
        kinds = [*kinds[1:], kinds[0]]
    ratio = bootstrap_ratio(taken["automatic"], taken["fused"], placements=PLACEMENTS)
    ms = {kind: bootstrap_median([us / 1000 for us in found], placements=PLACEMENTS) for kind, found in taken.items()}
    if worst > APART:
        marks.append(f"the outputs are {worst:.3g} from TensorRT's own")
    if ratio.width > RATIO_WIDTH_LIMIT:
        marks.append(f"interval too wide, {100 * ratio.width:.1f} % of the ratio (limit {100 * RATIO_WIDTH_LIMIT:.0f} %)")
    cold = count * each >= COLD * l2
    gbps = {kind: entry["bytes"] / one.median / 1e6 for kind, one in ms.items()}
    marks += [
        f"{kind}: {rate:.0f} GB/s, more than a copy: a warm cache was timed"
        for kind, rate in gbps.items()
        if cold and rate > 1.15 * copy_gbps
    ]
    return {
        "name": f"{entry['name']}, {entry['size']}",
        **{key: entry[key] for key in ("model", "form", "size", "shape", "site", "bytes")},
        "precision": "fp16",
        "policy": "chain",
        **{f"{kind}_ms": rounded(one, 6) for kind, one in ms.items()},
        "ratio": rounded(ratio),
        "verdict": "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "draw",
        "agrees": worst <= APART,
        "largest_difference": round(worst, 6) if np.isfinite(worst) else None,
        "copy_share": {kind: round(rate / copy_gbps, 3) for kind, rate in gbps.items()},
        "layers": layers,
        "samples": len(taken["fused"]),
        "placements": PLACEMENTS,
        "sets": count,
        "cold": cold,
        "marks": [*marks, *nvml.marks(looks)],
    }


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
    a, b = a * 1.0, b * 1.0
    with np.errstate(all="ignore"):
        gap = np.abs(a - b) / (1 + np.maximum(np.abs(a), np.abs(b)))
        return float(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.nan_to_num(gap, nan=np.inf)).max(initial=0.0))


def run(cuda, folder, about, clock, samples, out, save):
    """All of it: what was found, in the form of the file, and what is wrong. save: writes what there is so far."""
    log, nvml = Log(), Nvml()
    load_plugins(log, folder)
    found = {
        "machine": {
            "driver": nvml.driver or cuda.version,
            "tensorrt": trt.__version__,
            "builders": 0,
            "build_seconds": 0.0,
            "copy_gbps": 0.0,
        },
        "checked": 0,
        "fresh_processes": 0,
        "rows": [],
        "wrong": [],
        "left": [],
    }
    wrong = found["wrong"]
    longest = 0.0

    def attempt(name, act):
        """One piece of work; a fault of it ends no other."""
        nonlocal longest
        start = clock.spent
        if start + longest > clock.seconds:
            found["left"].append(name)
            return
        try:
            act()
        except Exception as fault:
            traceback.print_exc()
            wrong.append(f"{name}: {type(fault).__name__}: {fault}; {'; '.join(log.errors[-2:])}")
        longest = max(longest, clock.spent - start)
        save(found)

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

    def build(place):
        builders = Builders(folder, place, [model for entry in about["pairs"] for model in entry["models"].values()], max(1, cpus() - 2))
        start = clock.spent
        builders.run(BUILDING * clock.seconds - start)
        done = [said["seconds"] for said in builders.said.values() if "seconds" in said]
        found["machine"].update(builders=max(1, cpus() - 2), build_seconds=round(clock.spent - start, 1))
        print(f"{len(done)} engines built in {clock.spent - start:.0f} s, {sum(done):.0f} s one after another", flush=True)
        return builders

    def pair(entry, builders):
        files = {kind: builders.engine(model) for kind, model in entry["models"].items()}
        row = time_pair(cuda, log, nvml, entry, files, samples, found["machine"]["copy_gbps"])
        row["build_seconds"] = {kind: round(builders.said[model]["seconds"], 2) for kind, model in entry["models"].items()}
        found["rows"].append(row)
        if not row["agrees"]:
            wrong.append(f"{row['name']}: {row['marks'][0]}")
        ratio = row["ratio"]
        figures = f"{row['automatic_ms']['median'] * 1e3:8.2f} / {row['fused_ms']['median'] * 1e3:8.2f} us = {ratio['median']:.3f}"
        marks = "".join(f"; {mark}" for mark in row["marks"])
        print(f"{figures} [{ratio['low']:.3f}, {ratio['high']:.3f}] {row['verdict']}: {row['name']}{marks}", flush=True)

    def pairs(place):
        builders = build(place)
        copy = Copy(cuda, about["copy_bytes"])
        found["machine"]["copy_gbps"] = round(copy.gbps(copy.us(20)), 1)
        copy.close()
        for entry in about["pairs"]:
            name = f"{entry['name']}, {entry['size']}"
            said = [builders.said.get(model, {}) for model in entry["models"].values()]
            faults = [f"{kind}: {one['fault']}" for kind, one in zip(entry["models"], said, strict=True) if "fault" in one]
            if faults:
                wrong.append(f"{name}: {'; '.join(faults)}")
            elif any("seconds" not in one for one in said):
                found["left"].append(name)
            else:
                attempt(name, lambda entry=entry: pair(entry, builders))
        save(found)

    if about["pairs"]:
        with tempfile.TemporaryDirectory() as place:
            pairs(Path(place))
    longest = 0.0
    for group in about["values"]:
        attempt(group["name"], lambda group=group: values(group))
    return found, wrong


def cpus():
    return len(os.sched_getaffinity(0))
