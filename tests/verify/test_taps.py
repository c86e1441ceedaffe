"""Looking into engines, with stand-ins for them: what is tapped, where figures come from, and plugins run alone."""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.commands import compare
from onnxfuse.engine import build, prepare, trt
from onnxfuse.engine.manifest import Layer, model_digest
from onnxfuse.errors import BadInput
from onnxfuse.graph.model import DOMAIN
from onnxfuse.report import read
from onnxfuse.verify import budget, check, layers, pieces, reference, taps
from onnxfuse.verify.reference import Runtime
from tests.engine.test_manifest import example
from tests.verify import plants

PLUGINS = frozenset({"SkipLayerNormalization", "BiasGelu"})


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
    """An engine that computes its model by onnxruntime; results of nodes of type `wrong` are 5 % too large."""

    def __init__(self, model: Path, marked: Sequence[str], table: Sequence[Layer], wrong: str = "") -> None:
        self.model, self.marked, self.table = model, tuple(marked), tuple(table)
        proto = onnx.load(str(model))
        self.factors = {name: 1.05 for node in proto.graph.node if node.op_type == wrong for name in node.output[:1]}
        self.inputs = tuple(self._spec(value, True) for value in proto.graph.input)
        self.output_specs = tuple(self._spec(value, False) for value in proto.graph.output)
        self.changed: tuple[str, ...] = ()
        self.runs = 0

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
        self.runs += 1
        return self._values(feeds, [spec.name for spec in self.output_specs])

    def tapped(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self.marked)

    def tap(self, feeds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        assert set(names) <= set(self.marked)
        return self._values(feeds, names)

    def close(self) -> None:
        pass

    def layers(self) -> tuple[Layer, ...]:
        return self.table

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


@pytest.fixture
def subject(runtime: Runtime, tmp_path: Path) -> Callable[..., tuple[layers.Inside, taps.EngineSubject, list[dict[str, Any]]]]:
    """An engine of the encoder looked into; what its builder was asked for."""

    def looked(wrong: str = "", fails: str = "", table: list[Layer] | None = None) -> Any:
        original, fused = plants.fused(plants.encoder(1), tmp_path)
        feeds = plants.encoder_feeds()
        asked: list[dict[str, Any]] = []

        def builder(model: Path, **wanted: Any) -> Stand:
            asked.append({"model": model, **wanted})
            if fails:
                raise BadInput(fails)
            return Stand(model, wanted.get("taps", ()), each_node_a_layer(model, PLUGINS), wrong)

        parts = tmp_path / "parts"
        parts.mkdir()
        made = made_of(fused, table or each_node_a_layer(fused, PLUGINS))
        base = layers.ModelSubject(
            "original", "onnxruntime_float32", check.tolerance(), pieces.prepare(original, feeds, runtime, parts), feeds, runtime, parts
        )
        engine = taps.EngineSubject(
            "fused.engine", "fused", check.tolerance("tf32"), Stand(fused, (), (), wrong), made, fused,
            pieces.prepare(fused, feeds, runtime, parts), feeds, runtime, parts, builder,
        )  # fmt: skip
        return layers.look(base, [engine], feeds, runtime, truth=False), engine, asked

    return looked


def test_tensors_between_layers_are_taken_from_a_second_engine(subject: Any) -> None:
    found, engine, asked = subject()
    said = budget.verdict(found, engine)
    assert said["first"] is None
    assert said["wrong"] is None
    rows = {row.name: row for row in found.rows}
    assert rows["y"].taps["fused.engine"] == taps.OUTPUT
    assert rows["l0_scores_out"].taps["fused.engine"] == taps.SAME
    # TensorRT's layers are led back to the nodes.
    assert engine.layer("l0_scores_out") == "l0_scores"
    assert budget.tensors(found)[-1]["layer"] == "last"
    assert asked[0]["taps"][0] in rows
    assert asked[0]["plugin_ops"] == PLUGINS
    # Each plugin ran alone; nothing else did.
    assert {row.name for row in found.rows if row.alone} == {"l0_attention_norm_out", "l0_gelu_mul_half_out", "l0_mlp_norm_out"}
    # Two norms of the same shape and attributes share an engine.
    assert len(asked) == 1 + 2
    alone = onnx.load(str(asked[1]["model"]))
    assert [node.domain for node in alone.graph.node] == [DOMAIN]
    assert not alone.graph.initializer


def test_a_wrong_plugin_is_told_from_what_comes_after_it(subject: Any) -> None:
    found, engine, _ = subject(wrong="BiasGelu")
    said = budget.verdict(found, engine)
    assert said["wrong"]["tensor"] == "l0_gelu_mul_half_out"
    assert (said["wrong"]["fusion"], said["wrong"]["node"]) == ("bias_gelu", "bias_gelu")
    assert "in layer 'bias_gelu'" in said["sentences"][0]
    norm = next(row for row in found.rows if row.name == "l0_mlp_norm_out")
    assert not norm.against["fused.engine"].agrees
    assert norm.alone["fused.engine"].agrees


def test_what_cannot_be_tapped_is_said(subject: Any) -> None:
    found, engine, _ = subject(fails="TensorRT cannot build it")
    assert {row.name for row in found.rows} == {"y"}
    assert any("no second engine with taps could be built" in note and "TensorRT cannot build it" in note for note in engine.notes)


def test_one_piece_has_no_places_to_tap(subject: Any) -> None:
    found, engine, asked = subject(table=[layer("everything")])
    assert {row.name for row in found.rows} == {"y"}
    assert engine.notes == ["fused.engine: TensorRT made one piece of it, so only its outputs are compared"]
    assert asked == []


def test_the_command_sets_automatic_and_fused_engines_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong plugin is told from the price of half precision: the automatic engine of the same precision does not pay it."""
    from onnxfuse.engine import run as engine_run
    from onnxfuse.report import machine

    original, fused = plants.fused(plants.encoder(1), tmp_path, "fp16")
    np.savez(tmp_path / "data.npz", **plants.encoder_feeds())
    stands: dict[Path, Stand] = {}
    for name, ops, wrong in (("automatic.engine", frozenset[str](), ""), ("fused.engine", PLUGINS, "BiasGelu")):
        stand = Stand(fused, (), (), wrong)
        table = each_node_a_layer(fused, ops)
        stand.manifest = made_of(fused, table, ops, "fp16")  # type: ignore[attr-defined]
        stands[tmp_path / name] = stand
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(engine_run.Engine, "load", classmethod(lambda cls, path, **about: stands[path]))
    monkeypatch.setattr(machine, "describe", lambda gpu: {"gpu": str(gpu)})
    monkeypatch.setattr(compare, "_load_plugins", lambda engines: None)
    monkeypatch.setattr(compare, "_latency", lambda *about: None)
    monkeypatch.setattr(compare, "_by_layer", lambda *about: {})

    def in_memory(model: Path, *, profiles: Any = None, plugin_ops: Any = (), taps: Sequence[str] = ()) -> Stand:
        wrong = "BiasGelu" if plugin_ops else ""
        return Stand(model, taps, each_node_a_layer(model, frozenset(plugin_ops)), wrong)

    monkeypatch.setattr(build, "in_memory", in_memory)
    wanted = compare.Wanted(original, tuple(stands), tmp_path / "data.npz", 0, 1, {}, None, None, 2, layers=True)
    report = compare.run(wanted)
    read.check(report)
    assert [s["role"] for s in report["inside"]["subjects"]] == ["automatic", "fused"]
    automatic, found = report["inside"]["subjects"]
    assert automatic["wrong"] is None
    assert found["wrong"]["node"] == "bias_gelu"
    assert found["wrong"]["tensor"] == "l0_gelu_mul_half_out"
    assert report["error_budget"]["verdicts"]["y"]["kind"] == "wrong"
    assert "times as much as automatic.engine in the same float16" in report["error_budget"]["summary"]
    row = next(row for row in report["tensors"] if row["name"] == "y")
    assert row["onnxruntime_float32"]["relative_rms"] < row["automatic"]["relative_rms"] < row["fused"]["relative_rms"]


# --------------------------------------------------------------------------------------------------- TensorRT's own words


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """As much of tensorrt as listening needs."""
    module = types.ModuleType("tensorrt")
    module.IDebugListener = type("IDebugListener", (), {"__init__": lambda self: None})  # type: ignore[attr-defined]
    module.TensorLocation = SimpleNamespace(HOST="host", DEVICE="device")  # type: ignore[attr-defined]
    monkeypatch.setattr(trt, "tensorrt", lambda: module)
    monkeypatch.setattr(
        trt, "activate", lambda: SimpleNamespace(memcpy_dtoh=lambda to, address: ctypes.memmove(to.ctypes.data, address, to.nbytes))
    )
    return module


class Context:
    def __init__(self, accepts: bool = True) -> None:
        self.on: dict[str, bool] = {}
        self.accepts = accepts

    def set_debug_listener(self, listener: Any) -> bool:
        return self.accepts

    def set_all_tensors_debug_state(self, flag: bool) -> bool:
        self.on = {"a": flag, "b": flag}
        return True

    def set_tensor_debug_state(self, name: str, flag: bool) -> bool:
        self.on[name] = flag
        return True


HALF = SimpleNamespace(name="HALF")


def test_a_listener_copies_what_it_is_shown(stand_in: types.ModuleType) -> None:
    context, waited = Context(), []
    listener = trt.listen(context, ["b"], lambda: waited.append(1))
    assert context.on == {"a": False, "b": True}
    values = np.array([[1.5, -2.0]], np.float16)
    assert listener.process_debug_tensor(values.ctypes.data, "device", HALF, (1, 2), "b", 0)
    capsule_of = ctypes.pythonapi.PyCapsule_New
    capsule_of.argtypes, capsule_of.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
    assert listener.process_debug_tensor(capsule_of(values.ctypes.data, None, None), "host", HALF, (2, 1), "a", 0)
    values[:] = 0  # the memory is TensorRT's, and soon holds something else
    taken = listener.take()
    np.testing.assert_array_equal(taken["b"], [[1.5, -2.0]])
    np.testing.assert_array_equal(taken["a"], [[1.5], [-2.0]])
    assert taken["b"].dtype == np.float16
    assert waited == [1, 1]
    assert listener.take() == {}


def test_a_listener_that_fails_says_so_afterwards(stand_in: types.ModuleType) -> None:
    listener = trt.listen(Context(), ["b"], lambda: None)
    assert listener.process_debug_tensor(0, "device", SimpleNamespace(name="INT4"), (1,), "b", 0)
    with pytest.raises(trt.EngineFault, match="a debug tensor cannot be read: b: an engine tensor of type INT4"):
        listener.take()
    with pytest.raises(trt.EngineFault, match="refuses a debug listener"):
        trt.listen(Context(accepts=False), [], lambda: None)


def test_inner_tensors_are_marked_and_outputs_are_not() -> None:
    marked: list[str] = []
    outputs = [[SimpleNamespace(name="a", is_network_output=False), None], [SimpleNamespace(name="y", is_network_output=True)]]
    network = SimpleNamespace(
        num_layers=2,
        get_layer=lambda i: SimpleNamespace(num_outputs=len(outputs[i]), get_output=lambda k: outputs[i][k]),
        mark_debug=lambda tensor: marked.append(tensor.name),
    )
    trt._mark(network, ("a", "y", "absent"))
    assert marked == ["a"]
    trt._mark(network, ())
    assert marked == ["a"]
