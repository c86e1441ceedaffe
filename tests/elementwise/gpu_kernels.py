"""Part kernels of run.py: generated kernels by the plugin's own launcher, without TensorRT."""

import ctypes
import json
import math
import traceback

import numpy as np
from run import Copy, differs, rounded
from stats import bootstrap_median, bootstrap_ratio

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "bool": 1}
KINDS = {name: np.dtype("uint16" if name == "bfloat16" else name) for name in SIZES}
GUARD = 256  # bytes behind every output of a check that must stay as they are
COLD = 3  # the buffers of a cold run are this many times the L2
L2_BYTES, SMS = 38, 16  # numbers of the driver's attributes


class Launcher:
    """The launcher's C functions."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.said = ctypes.create_string_buffer(500)

    def load(self, layout, code):
        loaded = ctypes.c_void_p()
        if self.lib.elementwise_load(layout.encode(), code, ctypes.c_size_t(len(code)), ctypes.byref(loaded), self.said):
            raise RuntimeError(self.said.value.decode())
        return loaded

    def launch(self, loaded, shapes, inputs, outputs, stream):
        flat = [size for shape in shapes for size in shape]
        status = self.lib.elementwise_launch(
            loaded,
            (ctypes.c_int64 * max(1, len(flat)))(*flat),
            (ctypes.c_void_p * len(inputs))(*inputs),
            (ctypes.c_void_p * len(outputs))(*outputs),
            stream,
            self.said,
        )
        if status:
            raise RuntimeError(self.said.value.decode())


class Plan:
    """The kernels of an expression, loaded."""

    def __init__(self, cuda, launcher, folder, about):
        self.cuda, self.launcher, self.about = cuda, launcher, about
        self.types, self.axes, self.outputs = about["types"], about["axes"], about["outputs"]
        self.inputs = list(range(len(about["axes"])))
        self.parts = [(launcher.load(part["layout"], (folder / part["code"]).read_bytes()), part) for part in about["parts"]]
        made = {value for part in about["parts"] for value in part["makes"]}
        self.between = sorted(made - set(self.outputs))

    def shape(self, value, full):
        if value in self.inputs:
            axes = self.axes[value]
            own = full[len(full) - len(axes) :]
            return [size if letter == "1" else 1 for size, letter in zip(own, axes, strict=True)]
        if value == self.about["reduced"]:
            return [*full[:-1], 1] if self.about["keeps_axis"] else list(full[:-1])
        return list(full)

    def bytes(self, value, full):
        return math.prod(self.shape(value, full)) * SIZES[self.types[value]]

    def moved(self, full):
        """Bytes that the whole has to read and write: tensors that a cut adds do not count, and neither do those that are broadcast."""
        size = math.prod(full)
        read = sum(self.bytes(value, full) for value in self.inputs if math.prod(self.shape(value, full)) == size)
        return read + sum(self.bytes(value, full) for value in self.outputs)

    def launch(self, full, where):
        """where: address of every value."""
        for loaded, part in self.parts:
            shapes = [self.shape(value, full) for value in part["reads"]]
            reads, makes = ([where[value] for value in part[way]] for way in ("reads", "makes"))
            self.launcher.launch(loaded, shapes, reads, makes, self.cuda.stream)


class Buffers:
    """Memory for every value of a plan at a shape. offset: elements by which full tensors lie behind a vector's beginning."""

    def __init__(self, plan, full, offset=0):
        self.cuda, self.plan, self.full = plan.cuda, plan, full
        self.memory, self.where = {}, {}
        for value in (*plan.inputs, *plan.between, *plan.outputs):
            size = plan.bytes(value, full)
            self.memory[value] = plan.cuda.memory(size + GUARD + 16)
            self.where[value] = self.memory[value].value + offset * SIZES[plan.types[value]]
            plan.cuda.fill(self.memory[value], 0xA5, size + GUARD + 16)

    def put(self, value, array):
        self.cuda.put(ctypes.c_void_p(self.where[value]), array)

    def repeat(self, value, source, size):
        """Fills a tensor with `size` bytes at `source`, as often as they fit."""
        total, target = self.plan.bytes(value, self.full), self.where[value]
        done = min(size, total)
        self.cuda.copy(ctypes.c_void_p(target), ctypes.c_void_p(source), done)
        while done < total:
            step = min(done, total - done)
            self.cuda.copy(ctypes.c_void_p(target + done), ctypes.c_void_p(target), step)
            done += step

    def get(self, value):
        """In the type of memory; bfloat16 as its bits. Raises where bytes behind the tensor were written."""
        kind = KINDS[self.plan.types[value]]
        array = self.cuda.get(ctypes.c_void_p(self.where[value]), self.plan.shape(value, self.full), kind)
        behind = self.cuda.get(ctypes.c_void_p(self.where[value] + array.nbytes), (GUARD - 16,), np.uint8)
        if (behind != 0xA5).any():
            raise RuntimeError("bytes behind an output were written")
        return array

    def run(self):
        self.plan.launch(self.full, self.where)
        self.cuda.wait()

    def close(self):
        for memory in self.memory.values():
            self.cuda.free(memory)


def widened(array, kind):
    if kind == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def check(plan, arrays, number, runs):
    """What is wrong with an expression at the shapes of the reference, at aligned addresses and one element behind them."""
    wrong = []
    for run, full in enumerate(runs):
        for offset in (0, 1):
            buffers = Buffers(plan, full, offset)
            try:
                for value in plan.inputs:
                    buffers.put(value, arrays[f"{run}/in/e{number}_i{value}"])
                buffers.run()
                for at, value in enumerate(plan.outputs):
                    have = widened(buffers.get(value), plan.types[value])
                    fault = differs(have, *(arrays[f"{run}/{what}/e{number}_o{at}"] for what in ("want", "bound", "sure")))
                    if fault:
                        wrong.append(f"output {at} of {full} at offset {offset}: {fault}")
            finally:
                buffers.close()
    return wrong


def draw(rng, kind, shape):
    drawn = rng.standard_normal(min(math.prod(shape), 1 << 20)).astype(np.float32) + 1.5
    whole = np.resize(drawn, shape)
    if kind == "bool":
        return whole > 1.5
    if kind == "bfloat16":
        return (whole.view(np.uint32) >> 16).astype(np.uint16)
    return whole.astype(KINDS[kind])


class Model:
    """A chain at its size in the model, with inputs: what the large sizes repeat along the first axis."""

    def __init__(self, plan, full):
        self.plan, self.full = plan, full
        self.buffers = Buffers(plan, full)
        rng = np.random.default_rng(0)
        for value in plan.inputs:
            self.buffers.put(value, draw(rng, plan.types[value], plan.shape(value, full)))
        self.buffers.run()
        self.results = {value: self.buffers.get(value) for value in plan.outputs}

    def single(self):
        """What is wrong one element behind aligned addresses, where other kernels run."""
        other = Buffers(self.plan, self.full, offset=1)
        try:
            for value in self.plan.inputs:
                other.repeat(value, self.buffers.where[value], self.plan.bytes(value, self.full))
            other.run()
            return self.same("behind a vector's beginning", {value: other.get(value) for value in self.plan.outputs})
        finally:
            other.close()

    def repeated(self, full):
        """Buffers for a longer first axis, filled with the inputs again and again."""
        buffers = Buffers(self.plan, full)
        for value in self.plan.inputs:
            buffers.repeat(value, self.buffers.where[value], self.plan.bytes(value, self.full))
        return buffers

    def same(self, what, results):
        """Results must be those of the model's size, again and again. Sums of rows may be added in another order."""
        wrong = []
        for value, have in results.items():
            want = self.results[value]
            if not self.plan.about["ends_row"]:
                good = (have.reshape(-1, want.nbytes // want.itemsize).view(np.uint8) == want.reshape(1, -1).view(np.uint8)).all()
            else:
                a, b = (widened(array.reshape(-1, want.size), self.plan.types[value]) for array in (have, want))
                good = np.allclose(a, b, rtol=4e-3, atol=1e-3, equal_nan=True)
            if not good:
                wrong.append(f"{what}: output {value} differs from the same kernel's at {self.full}")
        return wrong


class Timer:
    """Times plans beside a copy."""

    def __init__(self, cuda, samples, copy_bytes):
        self.cuda, self.samples = cuda, samples
        self.copy = Copy(cuda, copy_bytes)
        self.l2 = cuda.attribute(L2_BYTES) or 50 << 20
        self.copies = []

    def graph(self, sets, launches):
        """A graph of some launches over sets of buffers in turn."""

        def work():
            for at in range(launches):
                one = sets[at % len(sets)]
                one.plan.launch(one.full, one.where)

        return self.cuda.captured(work)

    def cold(self, make, plan, full):
        """Sets of buffers that together are several times the L2."""
        return [make() for _ in range(max(2, math.ceil(COLD * self.l2 / plan.moved(full))))]

    def row(self, sets, moved, launches):
        """Microseconds of one launch, and its share of the bandwidth of the copy beside it and of a copy of as many bytes."""
        graph = self.graph(sets, launches)
        own = Copy(self.cuda, max(256, moved // 2)) if moved > self.l2 else None
        run = lambda: self.cuda.replay(graph)  # noqa: E731
        self.cuda.microseconds(run, 3)
        taken, copied, same = [], [], []
        for _ in range(self.samples):
            taken.append(self.cuda.microseconds(run, 1) / launches)
            copied.append(self.copy.us())
            if own:
                same.append(own.us(6))
        self.copies += copied
        share = bootstrap_ratio([us * moved / (2 * self.copy.size) for us in copied], taken)
        each = bootstrap_median(taken)
        row = {
            "microseconds": round(each.median, 3),
            "low": round(each.low, 3),
            "high": round(each.high, 3),
            "gbps": round(moved / each.median / 1000, 1),
            "copy_gbps": round(self.copy.gbps(float(np.median(copied))), 1),
            "share_of_copy": round(share.median, 4),
            "share_low": round(share.low, 4),
            "share_high": round(share.high, 4),
        }
        if own:
            row["share_of_copy_of_as_many_bytes"] = round(bootstrap_ratio(same, taken).median, 4)
            self.cuda.free(own.a)
            self.cuda.free(own.b)
        self.cuda("cuGraphExecDestroy", graph)
        return row

    def pair(self, first, second, launches):
        """Two plans over the same shapes, in turn."""
        graphs = [self.graph(first, launches), self.graph(second, launches)]
        samples = [[], []]
        for turn in range(self.samples + 2):
            for at in (0, 1)[:: 1 if turn % 2 else -1]:
                us = self.cuda.microseconds(lambda at=at: self.cuda.replay(graphs[at]), 1) / launches
                samples[at].append(us)
        samples = [taken[2:] for taken in samples]
        ratio = rounded(bootstrap_ratio(samples[1], samples[0]))
        return rounded(bootstrap_median(samples[0])), rounded(bootstrap_median(samples[1])), ratio


def time_chain(timer, plan, entry):
    """Rows of a chain, one for each size; and what is wrong."""
    model = Model(plan, entry["shape"])
    rows, wrong = [], model.single()
    head = {"kernel": f"elementwise {entry['form']}", "name": entry["name"], "model": entry["model"], "dtype": entry["dtype"]}
    try:
        for size, full in entry["sizes"].items():
            elements = math.prod(full)
            shape = {"rows": elements // full[-1], "width": full[-1], "shape": "x".join(map(str, full)), "size": size}
            row = {**head, **shape, "bytes": plan.moved(full), "flops": entry["operators"] * elements}
            if size == "model":
                measured = timer.row([model.buffers], plan.moved(full), 50)
                wrong += model.same("replayed", {value: model.buffers.get(value) for value in plan.outputs})
            else:
                sets = timer.cold(lambda full=full: model.repeated(full), plan, full)
                try:
                    measured = timer.row(sets, plan.moved(full), max(6, len(sets)))
                    if size == "64 MB":
                        wrong += model.same(f"at {size}", {value: sets[0].get(value) for value in plan.outputs})
                finally:
                    for one in sets:
                        one.close()
            rows.append({**row, "cache": "warm" if size == "model" else "cold", **measured})
    finally:
        model.buffers.close()
    return rows, [f"{entry['name']}: {line}" for line in wrong]


def time_planted(timer, whole, cut, entry):
    """What is too big, whole and cut, in turn; and whether both give the same values."""
    rng = np.random.default_rng(0)
    sets = {"whole": [Buffers(whole, entry["shape"]) for _ in range(2)], "cut": [Buffers(cut, entry["shape"]) for _ in range(2)]}
    try:
        for value in whole.inputs:
            kind, shape = whole.types[value], whole.shape(value, entry["shape"])
            drawn = draw(rng, kind, [min(math.prod(shape), 1 << 20)])
            for one in (*sets["whole"], *sets["cut"]):
                one.put(value, drawn)
                one.repeat(value, one.where[value], drawn.nbytes)
        for pair in sets.values():
            pair[0].run()
        wrong = [
            f"{entry['name']}: output {value} of the parts differs from the whole's by {difference}"
            for value in whole.outputs
            if (difference := distance(whole, value, sets["whole"][0].get(value), sets["cut"][0].get(value))) > 0.02
        ]
        us, cut_us, ratio = timer.pair(sets["cut"], sets["whole"], 4)
        row = {key: entry[key] for key in ("name", "shape", "live_values", "why", "is_cut", "expected_whole_over_cut", "whole", "cut")}
        return {**row, "bytes": whole.moved(entry["shape"]), "cut_us": us, "whole_us": cut_us, "whole_over_cut": ratio}, wrong
    finally:
        for pair in sets.values():
            for one in pair:
                one.close()


def distance(plan, value, a, b):
    """Largest difference, relative to 1 and to the values."""
    a, b = (widened(array.reshape(-1)[: 1 << 22], plan.types[value]) for array in (a, b))
    with np.errstate(all="ignore"):
        gap = np.abs(a - b) / (1 + np.maximum(np.abs(a), np.abs(b)))
        return float(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.nan_to_num(gap, nan=np.inf)).max(initial=0.0))


def run(cuda, folder, about, clock, samples):
    """All of it: what was found, in the form of the file, and what is wrong."""
    launcher = Launcher(folder / "launch.bin")
    load = lambda given: Plan(cuda, launcher, folder, given)  # noqa: E731
    found = {"machine": {"sms": cuda.attribute(SMS)}, "checked": 0, "rows": [], "planted": [], "variants": [], "wrong": [], "left": []}
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
            wrong.append(f"{name}: {type(fault).__name__}: {fault}")

    def value(arrays, number, entry):
        faults = check(load(entry["plan"]), arrays, number, entry["runs"])
        found["checked"] += 1
        wrong.extend(f"{entry['name']}: {fault}" for fault in faults)

    def planted(entry):
        row, faults = time_planted(timer, load(entry["plans"]["whole"]), load(entry["plans"]["cut"]), entry)
        found["planted"].append(row)
        wrong.extend(faults)
        shown = ("name", "is_cut", "expected_whole_over_cut", "cut_us", "whole_us", "whole_over_cut")
        print(json.dumps({key: row[key] for key in shown}), flush=True)

    def chain(entry, into):
        rows, faults = time_chain(timer, load(entry["plan"]), entry)
        found[into] += rows
        wrong.extend(faults)
        for row in rows:
            same = row.get("share_of_copy_of_as_many_bytes", 0.0)
            share = f"{row['share_of_copy']:.3f} of copy, {same:.3f} of its size"
            print(f"{row['size']:6} {row['microseconds']:9.2f} us, {share}: {row['name']}", flush=True)

    for group in about["values"]:
        arrays = np.load(folder / group["arrays"])
        for number, entry in enumerate(group["expressions"]):
            attempt(entry["name"], lambda at=(arrays, number, entry): value(*at))
    print(f"{found['checked']} expressions checked at two shapes and two alignments, {len(wrong)} wrong; {clock.spent:.0f} s", flush=True)
    timer = Timer(cuda, samples, about["copy_bytes"])
    for entry in about["planted"]:
        attempt(entry["name"], lambda entry=entry: planted(entry))
    for entry in about["chains"]:
        attempt(entry["name"], lambda entry=entry: chain(entry, "rows"))
    for entry in about["variants"]:
        attempt(entry["name"], lambda entry=entry: chain(entry, "variants"))
    if timer.copies:
        found["machine"]["copy_gbps"] = round(timer.copy.gbps(float(np.median(timer.copies))), 1)
    return found, wrong
