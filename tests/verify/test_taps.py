"""Looking into engines, with stand-ins for them: what is tapped, where figures come from, and plugins run alone."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.bench import child
from onnxfuse.commands import compare
from onnxfuse.engine import build, prepare, trt
from onnxfuse.engine import run as engine_run
from onnxfuse.engine.manifest import Layer, model_digest, path_of
from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph.model import DOMAIN
from onnxfuse.report import html, read
from onnxfuse.verify import budget, check, engine_process, layers, pieces, reference, taps
from onnxfuse.verify.reference import Runtime
from tests.engine.test_manifest import example
from tests.verify import plants

# The GELU has the product before it in it where the file is in half precision.
PLUGINS = frozenset({"SkipLayerNormalization", "BiasGelu", "LinearGelu"})


def layer(*nodes: str, name: str = "") -> Layer:
    return Layer(name or "+".join(nodes), "", None, None, (), ("fp32",), nodes)


# ------------------------------------------------------------------------------------------------------------ what to tap


def path_model(*edges: tuple[str, str, str]) -> onnx.ModelProto:
    """Nodes (name, input, output) in a row."""
    nodes = [helper.make_node("Relu", [given], [made], name) for name, given, made in edges]
    return helper.make_model(helper.make_graph(nodes, "g", [], []))


def test_only_what_one_layer_hands_to_another_is_tapped() -> None:
    model = path_model(("a", "x", "1"), ("b", "1", "2"), ("c", "2", "3"), ("d", "3", "4"), ("e", "2", "5"))
    one_each = [layer("a"), layer("b"), layer("c"), layer("d"), layer("e")]
    assert taps.between_layers(model, one_each) == ["1", "2", "3"]
    # b and c are one kernel: what passes between them is never written. e reads it, so it is written after all, but c need not read it.
    assert taps.between_layers(model, [layer("a"), layer("b", "c"), layer("d"), layer("e")]) == ["1", "3"]
    # A node that is computed in two layers, as Myelin does.
    assert taps.between_layers(model, [layer("a", "b"), layer("b", "c"), layer("d"), layer("e")]) == ["3"]
    assert taps.between_layers(model, [layer("a", "b", "c", "d", "e")]) == []
    assert taps.between_layers(model, [layer(name="no metadata")]) == []


def test_where_the_second_engine_fused_otherwise_is_known_by_node() -> None:
    first = [layer("a"), layer("b", "c"), layer("d")]
    alike = taps.fused_alike(first, [layer("a"), layer("b"), layer("c"), layer("d")])
    assert [alike(name) for name in "abcd"] == [True, False, False, True]


def test_the_model_of_an_engine_is_known_by_its_content(tmp_path: Path) -> None:
    model = tmp_path / "models" / "m.onnx"
    model.parent.mkdir()
    onnx.save(path_model(("a", "x", "y")), model)
    other = tmp_path / "other.onnx"
    onnx.save(path_model(("b", "x", "y")), other)
    made = dataclasses.replace(example(), model="m.onnx", model_sha256=model_digest(model), model_path="models/m.onnx")
    assert taps.source_of(made, tmp_path / "m.engine", []) == model
    moved = dataclasses.replace(made, model_path="gone/m.onnx")
    assert taps.source_of(moved, tmp_path / "m.engine", []) is None
    assert taps.source_of(moved, tmp_path / "m.engine", [other, model]) == model
    assert taps.source_of(dataclasses.replace(made, model_sha256="0"), tmp_path / "m.engine", [model]) is None
    assert taps.source_of(None, tmp_path / "m.engine", [model]) is None


# ---------------------------------------------------------------------------------------------------------------- engines


class Stand:
    """An engine that computes its model by onnxruntime; results of nodes of type `wrong` are 5 % too large. `marked` are outputs, too."""

    def __init__(self, model: Path, marked: Sequence[str] = (), wrong: str = "") -> None:
        self.model, self.marked = model, tuple(marked)
        proto = onnx.load(str(model))
        self.factors = {name: 1.05 for node in proto.graph.node if node.op_type == wrong for name in node.output[:1]}
        self.inputs = tuple(self._spec(value, True) for value in proto.graph.input)
        self.output_specs = tuple(self._spec(value, False) for value in proto.graph.output)
        self.changed: tuple[str, ...] = ()

    def _spec(self, value: onnx.ValueInfoProto, is_input: bool) -> Any:
        kind = value.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name if kind.elem_type else "float32"
        return SimpleNamespace(
            name=value.name, dtype=dtype, shape=tuple(d.dim_value for d in kind.shape.dim), is_input=is_input, on_host=False
        )

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *about: object) -> None:
        pass

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        return self._values(feeds, [spec.name for spec in self.output_specs])

    def run_each(self, feeds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        outputs = [spec.name for spec in self.output_specs]
        yield from self._values(feeds, [*outputs, *(name for name in self.marked if name not in outputs)]).items()

    def close(self) -> None:
        pass

    def _values(self, feeds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """With wrong results passed on: the model is cut behind each of them, which changes its constants into scaled ones."""
        proto = onnx.load(str(self.model))
        elements = [t.data_type for t in proto.graph.initializer] + [v.type.tensor_type.elem_type for v in proto.graph.input]
        element = TensorProto.FLOAT16 if TensorProto.FLOAT16 in elements else TensorProto.FLOAT
        nodes = []
        for node in proto.graph.node:
            nodes.append(node)
            for name in set(node.output) & set(self.factors):
                node.output[:] = [f"{made}/right" if made == name else made for made in node.output]
                proto.graph.initializer.append(helper.make_tensor(f"{name}/factor", element, [], [self.factors[name]]))
                nodes.append(helper.make_node("Mul", [f"{name}/right", f"{name}/factor"], [name]))
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        del copy.graph.node[:]
        copy.graph.node.extend(nodes)
        path = self.model.with_name(f"stand-{self.model.name}")
        onnx.save(copy, path)
        return reference.run(path, [feeds], list(names))[0]


def each_node_a_layer(model: Path, plugin_ops: frozenset[str]) -> list[Layer]:
    prepared = onnx.ModelProto.FromString(prepare.for_parser(model, plugin_ops))
    return [layer(node.name) for node in prepared.graph.node]


def made_of(model: Path, table: Sequence[Layer], plugin_ops: frozenset[str] = PLUGINS, dtype: str = "fp32") -> Any:
    """A manifest."""
    use = dataclasses.replace(example().plugins, ops=tuple(sorted(plugin_ops)), embedded=True) if plugin_ops else None  # type: ignore[type-var]
    table = [dataclasses.replace(entry, outputs=(dtype,)) for entry in table]
    return dataclasses.replace(
        example(), model=model.name, model_path=model.name, model_sha256=model_digest(model), plugins=use, layers=tuple(table), inputs=()
    )


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime(threads=1) as child:
        yield child


class Process:
    """Stands for the process that builds and runs engines: does here what it does there, with onnxruntime for TensorRT.

    asked: what was built. table: of the engine that gives these taps. ends: how a process ends instead, by how many there were before.
    """

    def __init__(self, patch: pytest.MonkeyPatch, wrong: str = "") -> None:
        self.wrong = wrong
        self.asked: list[dict[str, Any]] = []
        self.table: Callable[[Path, frozenset[str], Sequence[str]], list[Layer]] = lambda model, ops, taps: each_node_a_layer(model, ops)
        self.ends: dict[int, tuple[int | None, str]] = {}
        self._started = 0
        self._turn = threading.Lock()
        patch.setattr(child, "run", self._run)
        patch.setattr(build, "build", self._build)
        patch.setattr(engine_run.Engine, "load", classmethod(lambda cls, path, trust=False: self._load(path)))

    def _run(self, arguments: Sequence[str], timeout: float, watch: Callable[[str], None]) -> tuple[int | None, str]:
        with self._turn:  # stdout is one for all threads
            return self._ended(*arguments)

    def _ended(self, module: str, request: str) -> tuple[int | None, str]:
        assert module == "onnxfuse.verify.engine_process"
        self._started += 1
        if self._started - 1 in self.ends:
            return self.ends[self._started - 1]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            try:
                engine_process.main(request)
            except OnnxfuseError as fault:
                return 1, f"{said.getvalue()}error: {fault}"
        return 0, said.getvalue()

    def _build(self, model: Path, out: Path, *, use_plugins: bool, taps: Sequence[str], **more: Any) -> None:
        self.asked.append({"model": model, "use_plugins": use_plugins, "taps": list(taps), **more})
        ops = PLUGINS if use_plugins else frozenset[str]()
        path_of(out).write_text(made_of(model, self.table(model, ops, taps), ops).to_json())
        out.write_text(json.dumps({"model": str(model), "taps": list(taps), "wrong": self.wrong if use_plugins else ""}))

    def _load(self, path: Path) -> Any:
        about = json.loads(path.read_text())
        return contextlib.nullcontext(Stand(Path(about["model"]), about["taps"], about["wrong"]))


@pytest.fixture
def subject(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[layers.Inside, taps.EngineSubject, list[Path]]]:
    """An engine of the encoder looked into, and the models of nodes that were built to run alone. `process`: the one of the taps."""

    def looked(
        process: Process | None = None, wrong: str = "", table: list[Layer] | None = None, free: int = 1 << 30, cache: Path | None = None
    ) -> Any:
        original, fused = plants.fused(plants.encoder(1), tmp_path)
        feeds = plants.encoder_feeds()
        built: list[Path] = []
        if process is None:
            Process(monkeypatch, wrong)

        def alone(model: Path, *, plugin_ops: Any) -> Stand:
            assert plugin_ops <= PLUGINS
            built.append(model)
            return Stand(model, (), wrong)

        parts = tmp_path / "parts"
        parts.mkdir()
        made = made_of(fused, table or each_node_a_layer(fused, PLUGINS))
        base = layers.ModelSubject(
            "original", "onnxruntime_float32", check.tolerance(), pieces.prepare(original, feeds, runtime, parts), feeds, runtime, parts
        )
        engine = taps.EngineSubject(
            "fused.engine", "fused", check.tolerance("tf32"), Stand(fused, (), wrong), made, fused,
            pieces.prepare(fused, feeds, runtime, parts), feeds, runtime, parts, alone, free, cache,
        )  # fmt: skip
        return layers.look(base, [engine], feeds, runtime, truth=False), engine, built

    return looked


def test_tensors_between_layers_are_taken_from_a_second_engine(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    found, engine, alone = subject(process)
    said = budget.verdict(found, engine)
    assert said["first"] is None
    assert said["wrong"] is None
    rows = {row.name: row for row in found.rows}
    assert rows["y"].taps["fused.engine"] == taps.OUTPUT
    assert rows["l0_scores_out"].taps["fused.engine"] == taps.SAME
    # TensorRT's layers are led back to the nodes.
    assert engine.layer("l0_scores_out") == "l0_scores"
    assert budget.tensors(found)[-1]["layer"] == "last"
    (asked,) = process.asked
    assert asked["taps"][0] in rows
    assert set(rows) - {"y"} == set(asked["taps"]) - {"qkv", "qkv_sum"}  # which the original does not have
    assert asked["use_plugins"]
    assert engine.notes == []
    # Each plugin ran alone; nothing else did.
    assert {row.name for row in found.rows if row.alone} == {"l0_attention_norm_out", "l0_gelu_mul_half_out", "l0_mlp_norm_out"}
    # Two norms of the same shape and attributes share an engine.
    assert len(alone) == 2
    model = onnx.load(str(alone[0]))
    assert [node.domain for node in model.graph.node] == [DOMAIN]
    assert not model.graph.initializer
    # TensorRT's parser takes no output without a type.
    assert all(value.type.tensor_type.elem_type == TensorProto.FLOAT for path in alone for value in onnx.load(str(path)).graph.output)


def test_where_tapping_changed_what_is_fused_is_said(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around a tensor are the nodes that read it, too."""
    process = Process(monkeypatch)

    def table(model: Path, ops: frozenset[str], taps: Sequence[str]) -> list[Layer]:
        """The softmax goes along with the sum before it."""
        one_each = each_node_a_layer(model, ops)
        return [*(entry for entry in one_each if not {"l0_masked", "l0_softmax"} & set(entry.nodes)), layer("l0_masked", "l0_softmax")]

    process.table = table
    found, _, _ = subject(process)
    taken = {row.name: row.taps["fused.engine"] for row in found.rows}
    other = {name for name, tap in taken.items() if tap == taps.OTHER}
    assert other == {"l0_scale_out", "mask_unsqueeze_out", "l0_masked_out", "l0_softmax_out"} & set(taken)
    assert "l0_masked_out" in other
    assert taken["l0_scores_out"] == taps.SAME


def test_a_device_with_little_room_has_several_engines(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.ends[1] = (-6, "corrupted double-linked list\n")
    found, engine, _ = subject(process, free=2 * 8192)
    assert len(process.asked) > 2
    for asked in process.asked:
        assert sum(engine._types[name].nbytes for name in asked["taps"]) <= 8192 or len(asked["taps"]) == 1
    tapped = [name for asked in process.asked for name in asked["taps"]]
    assert len(tapped) == len(set(tapped))
    # One of them was lost, and no more.
    assert {row.name for row in found.rows} == {*tapped, "y"} - {"qkv", "qkv_sum"}
    assert len(engine.notes) == 1
    every = len(tapped) + int(engine.notes[0].split(": ")[1].split(" of ")[0])
    assert f"of {every} tensors could not be looked into: TensorRT ended with SIGABRT while building an engine" in engine.notes[0]
    assert budget.verdict(found, engine)["wrong"] is None


def test_a_second_engine_has_the_timing_cache_of_the_first(subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of it: TensorRT adds to it what it has timed anew."""
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"timed")
    process = Process(monkeypatch)
    build_one, given = process._build, []

    def build_and_write(model: Path, out: Path, *, timing_cache: Path, **more: Any) -> None:
        given.append(timing_cache.read_bytes())
        timing_cache.write_bytes(b"more")
        build_one(model, out, **more)

    monkeypatch.setattr(build, "build", build_and_write)
    _, engine, _ = subject(process, cache=cache)
    assert given == [b"timed"]
    assert cache.read_bytes() == b"timed"
    (asked,) = process.asked
    assert asked["level"] is None
    assert engine.notes == []
    assert "built with the timing cache that it was built with" in engine.how[0]


def test_without_its_timing_cache_it_is_built_quickly_and_that_is_said(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    _, engine, _ = subject(process)
    (asked,) = process.asked
    assert (asked["level"], asked["timing_cache"]) == (taps.QUICK, None)
    assert f"builder optimization level {taps.QUICK}, so with other kernels" in engine.how[0]


def test_a_timing_cache_that_does_not_fit_is_left_out(subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"of another GPU")
    process = Process(monkeypatch)
    process.ends[0] = (2, "error: the timing cache cannot be used here: it belongs to another GPU\n")
    found, engine, _ = subject(process, cache=cache)
    (asked,) = process.asked
    assert (asked["level"], asked["timing_cache"]) == (taps.QUICK, None)
    assert engine.notes == []
    assert len(found.rows) > 1
    assert f"builder optimization level {taps.QUICK}" in engine.how[0]


def test_the_timing_cache_is_where_the_engine_says(tmp_path: Path) -> None:
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches" / "t.cache").write_bytes(b"timed")
    made = dataclasses.replace(example(), timing_cache="../caches/t.cache")
    assert taps.cache_of(made, tmp_path / "engines" / "m.engine") is None  # no such folder
    (tmp_path / "engines").mkdir()
    found = taps.cache_of(made, tmp_path / "engines" / "m.engine")
    assert found is not None
    assert found.read_bytes() == b"timed"
    assert taps.cache_of(dataclasses.replace(made, timing_cache="../caches/gone"), tmp_path / "engines" / "m.engine") is None
    assert taps.cache_of(example(), tmp_path / "engines" / "m.engine") is None
    assert taps.cache_of(None, tmp_path / "engines" / "m.engine") is None


def test_batches_keep_the_order_and_never_split_a_tensor() -> None:
    kinds = {name: reference.Kind("float16", (size,)) for name, size in zip("abcde", (1, 2, 9, 2, 2), strict=True)}
    assert taps.batches("abcde", kinds, 8) == [["a", "b"], ["c"], ["d", "e"]]
    assert taps.batches("abcde", kinds, 1 << 20) == [["a", "b", "c", "d", "e"]]
    assert taps.batches("", kinds, 8) == []


def test_a_wrong_plugin_is_told_from_what_comes_after_it(subject: Any) -> None:
    found, engine, _ = subject(wrong="BiasGelu")
    said = budget.verdict(found, engine)
    assert said["wrong"]["tensor"] == "l0_gelu_mul_half_out"
    assert (said["wrong"]["fusion"], said["wrong"]["node"]) == ("bias_gelu", "bias_gelu")
    assert "in layer 'bias_gelu'" in said["sentences"][0]
    norm = next(row for row in found.rows if row.name == "l0_mlp_norm_out")
    assert not norm.against["fused.engine"].agrees
    assert norm.alone["fused.engine"].agrees


ENDS = {
    "building": (
        (-6, "corrupted double-linked list\n"),
        "TensorRT ended with SIGABRT while building an engine (corrupted double-linked list)",
    ),
    "running": ((-11, "step: run\n"), "TensorRT ended with SIGSEGV while running an engine (it said nothing)"),
    "refused": ((1, "error: m.onnx: TensorRT cannot build an engine: no tactic\n"), "m.onnx: TensorRT cannot build an engine: no tactic"),
    "hanging": ((None, ""), "not done within 1800 s"),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_cannot_be_tapped_is_one_line(subject: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    process = Process(monkeypatch)
    process.ends[0], line = ENDS[how]
    found, engine, _ = subject(process)
    assert {row.name for row in found.rows} == {"y"}
    assert engine.notes == [f"fused.engine: could not be looked into: {line}"]


def test_a_process_that_aborts_costs_nothing_else(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one."""
    start = child.run
    process = Process(monkeypatch)
    monkeypatch.setattr(
        child, "run", lambda arguments, timeout, watch=None: start(["tests.verify.aborting_process", arguments[1]], timeout)
    )
    found, engine, _ = subject(process)
    assert {row.name for row in found.rows} == {"y"}
    line = "could not be looked into: TensorRT ended with SIGABRT while building an engine (corrupted double-linked list)"
    assert engine.notes == [f"fused.engine: {line}"]
    assert process.asked == []
    assert not [path for path in (engine._folder).rglob("*") if path.suffix in (".engine", ".json", ".npz")]


def test_a_full_folder_is_said_before_anything_is_built(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 10))
    _, engine, _ = subject(process)
    assert process.asked == []
    assert "the folder for temporary files has 0.0; set TMPDIR" in engine.notes[0]


def test_half_precision_comes_back_as_it_was(tmp_path: Path) -> None:
    """bfloat16 crosses as float32."""
    import ml_dtypes

    values = {"/h": np.array([1.5, np.inf], np.float16), "b": np.array([[3.0]], ml_dtypes.bfloat16), "n": np.array(7, np.int64)}
    engine_process._write(tmp_path / "v.npz", iter(values.items()))
    assert engine_process.names(tmp_path / "v.npz") == {"/h", "b", "n"}
    read_back = engine_process.read(tmp_path / "v.npz", ["/h", "b", "absent"])
    assert {name: value.dtype.name for name, value in read_back.items()} == {"/h": "float16", "b": "float32"}
    np.testing.assert_array_equal(read_back["/h"], values["/h"])
    assert taps._cast(read_back["b"], reference.Kind("bfloat16", (1, 1))).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read_back["b"], [[3.0]])


def test_one_piece_has_no_places_to_tap(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    found, engine, _ = subject(process, table=[layer("everything")])
    assert {row.name for row in found.rows} == {"y"}
    assert engine.notes == ["fused.engine: TensorRT made one piece of it, so only its outputs are compared"]
    assert process.asked == []


class Command:
    """`compare --layers` of an automatic engine and a fused one, whose kernel of type LinearGelu is wrong."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        from onnxfuse.report import machine

        original, fused = plants.fused(plants.encoder(1), tmp_path, "fp16")
        np.savez(tmp_path / "data.npz", **plants.encoder_feeds())
        self.process = Process(patch, "LinearGelu")
        stands: dict[Path, Stand] = {}
        for name, ops, wrong in (("automatic.engine", frozenset[str](), ""), ("fused.engine", PLUGINS, "LinearGelu")):
            stand = Stand(fused, (), wrong)
            stand.manifest = made_of(fused, each_node_a_layer(fused, ops), ops, "fp16")  # type: ignore[attr-defined]
            stands[tmp_path / name] = stand
            (tmp_path / name).write_bytes(b"")
            path_of(tmp_path / name).write_text(stand.manifest.to_json())  # type: ignore[attr-defined]

        def load(path: Path) -> Any:
            return contextlib.nullcontext(stands[path]) if path in stands else self.process._load(path)

        patch.setattr(engine_run.Engine, "load", classmethod(lambda cls, path, **about: load(path)))
        patch.setattr(machine, "describe", lambda gpu: {"gpu": str(gpu)})
        patch.setattr(compare, "_load_plugins", lambda engines: None)
        patch.setattr(compare, "_latency", lambda *about: None)
        patch.setattr(compare, "_by_layer", lambda *about: {})
        patch.setattr(trt, "free_memory", lambda: 1 << 30)
        self.alone: list[Path] = []

        def in_memory(model: Path, *, plugin_ops: frozenset[str]) -> Stand:
            self.alone.append(model)
            return Stand(model, (), "LinearGelu" if plugin_ops else "")

        patch.setattr(build, "in_memory", in_memory)
        self.wanted = compare.Wanted(original, tuple(stands), tmp_path / "data.npz", 0, 1, {}, None, None, 2, layers=True)


def test_an_abort_inside_leaves_outputs_and_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(tmp_path, monkeypatch)
    command.process.ends = dict.fromkeys(range(2), (-6, "corrupted double-linked list\n"))
    report = compare.run(command.wanted)
    read.check(report)
    notes = [note for note in report["inside"]["notes"] if "could not be looked into: TensorRT ended with SIGABRT" in note]
    assert [note.split(": ")[0] for note in notes] == ["automatic.engine", "fused.engine"]
    assert {row["name"] for row in report["tensors"]} == {"y"}
    assert {other["name"] for other in report["others"]} == {"automatic.engine", "fused.engine"}
    # It says what the outputs say.
    assert report["agrees"] == all(other["check"]["agrees"] for other in report["others"])


def test_the_command_sets_automatic_and_fused_engines_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong plugin is told from the price of half precision: the automatic engine of the same precision does not pay it."""
    command = Command(tmp_path, monkeypatch)
    report = compare.run(command.wanted)
    read.check(report)
    assert [s["role"] for s in report["inside"]["subjects"]] == ["automatic", "fused"]
    automatic, found = report["inside"]["subjects"]
    assert automatic["wrong"] is None
    assert found["wrong"]["node"] == "linear_epilogue"
    assert found["wrong"]["tensor"] == "l0_gelu_mul_half_out"
    assert report["error_budget"]["verdicts"]["y"]["kind"] == "wrong"
    assert "times as much as automatic.engine in the same float16" in report["error_budget"]["summary"]
    # The plain figures, the fusion and what is alone are the fused engine's.
    gelu = next(row for row in report["tensors"] if row["name"] == "l0_gelu_mul_half_out")
    assert (gelu["subject"], gelu["fusion"]) == ("fused.engine", "linear_epilogue")
    assert gelu["alone"]["agrees"] is False
    assert "automatic" in gelu
    row = next(row for row in report["tensors"] if row["name"] == "y")
    assert row["onnxruntime_float32"]["relative_rms"] < row["automatic"]["relative_rms"] < row["fused"]["relative_rms"]
    assert sorted(asked["use_plugins"] for asked in command.process.asked) == [False, True]


def test_a_report_of_engines_knows_the_model_that_they_were_built_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(tmp_path, monkeypatch)
    report = compare._complete(compare.run(command.wanted), command.wanted)
    assert {"before", "after"} <= report["graph"].keys()
    assert {site["fusion"] for site in report["sites"]} == {"qkv_pack", "skip_layernorm", "linear_epilogue"}
    assert {kernel["op"] for kernel in report["kernels"]} == {"SkipLayerNormalization", "Linear"}
    page = html.page(report)
    assert "wrong by itself" in page
    said = {axis["name"]: axis["answer"] for axis in report["axes"]}
    assert "2 plugins" in said["maintenance"]
    assert "keep their name" in said["debugging"]
    assert "as the file says: 4" in said["generality"]
    # Only what was asked for is looked at when the model is gone.
    (tmp_path / "model.fused.onnx").unlink()
    assert compare._rewritten(command.wanted.model, command.wanted.others) == []


def test_second_engines_of_all_are_built_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin, and both for plugins alone to be built."""
    command = Command(tmp_path, monkeypatch)
    begun = threading.Barrier(3)
    run_one, build_alone = child.run, build.in_memory

    def run(arguments: Sequence[str], timeout: float, watch: Callable[[str], None]) -> Any:
        begun.wait(60)
        return run_one(arguments, timeout, watch)

    def in_memory(model: Path, *, plugin_ops: frozenset[str]) -> Stand:
        if not command.alone:
            begun.wait(60)
        return build_alone(model, plugin_ops=plugin_ops)  # type: ignore[return-value]

    monkeypatch.setattr(child, "run", run)
    monkeypatch.setattr(build, "in_memory", in_memory)
    report = compare.run(command.wanted)
    assert not [note for note in report["inside"]["notes"] if "could not be looked into" in note]
    assert len(command.process.asked) == 2
    # What was built ahead is what was asked for: one engine for both norms, one for the GELU.
    assert len(command.alone) == 2


def test_a_fault_elsewhere_ends_the_building_of_second_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(tmp_path, monkeypatch)
    ended: list[str] = []

    def run(arguments: Sequence[str], timeout: float, watch: Callable[[str], None]) -> Any:
        try:
            while True:
                watch("building")
                time.sleep(0.01)
        finally:
            ended.append(arguments[1])

    def interrupted(model: Path, *, plugin_ops: frozenset[str]) -> Stand:
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "run", run)
    monkeypatch.setattr(build, "in_memory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare.run(command.wanted)
    assert len(ended) == 2


def test_a_plugin_that_reads_a_cast_of_an_input_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original does not have the cast: its values are those of the input, rounded."""
    command = Command(tmp_path, monkeypatch)
    report = compare.run(dataclasses.replace(command.wanted, others=command.wanted.others[1:]))
    rows = {row["name"]: row for row in report["tensors"]}
    assert rows["l0_attention_norm_out"]["alone"]["agrees"]
    assert rows["l0_mlp_norm_out"]["alone"]["agrees"]
    assert report["inside"]["subjects"][0]["wrong"]["tensor"] == "l0_gelu_mul_half_out"


def test_inner_tensors_become_outputs_and_outputs_stay() -> None:
    marked: list[str] = []
    outputs = [[SimpleNamespace(name="a", is_network_output=False), None], [SimpleNamespace(name="y", is_network_output=True)]]
    network = SimpleNamespace(
        num_layers=2,
        get_layer=lambda i: SimpleNamespace(num_outputs=len(outputs[i]), get_output=lambda k: outputs[i][k]),
        mark_output=lambda tensor: marked.append(tensor.name),
    )
    trt._mark(network, ("a", "y", "absent"))
    assert marked == ["a"]
    trt._mark(network, ())
    assert marked == ["a"]
