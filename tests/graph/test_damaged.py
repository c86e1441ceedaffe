"""Whatever is wrong with a file is one line, and nothing outside of the model's folder is read."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.graph import clean, precision, read, write
from onnxfuse.graph.names import shown
from onnxfuse.graph.wire import delimited
from tests.graph.models import function, parse, transformer

ADD = """<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { t = Add(x, w) y = Relu(t) }"""


def refused(path: Path, *words: str) -> str:
    with pytest.raises(BadInput) as caught:
        read.load(path)
    message = str(caught.value)
    assert message.isprintable(), message
    assert all(word in message for word in words), message
    return message


def write_model(folder: Path, model: ModelProto) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_what_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "none.onnx", "no such file", "none.onnx")
    refused(tmp_path, "folder")
    refused(Path("/dev/zero"), "not an ordinary file")
    refused(Path("with\0zero"), "cannot read")
    for name, data in {"empty": b"", "text": b"hello, this is no model", "zip": b"PK\x03\x04" + bytes(60), "zeros": bytes(1000)}.items():
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name, name)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    refused(fifo, "not an ordinary file")


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.999])
def test_cut_short(tmp_path: Path, share: float) -> None:
    data = transformer(1).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data[: int(len(data) * share)])
    refused(tmp_path / "m.onnx", "m.onnx")


def _double(m: ModelProto) -> None:
    m.graph.node.append(m.graph.node[0])


def _cycle(m: ModelProto) -> None:
    m.graph.node[0].input[0] = "y"


def _itself(m: ModelProto) -> None:
    m.graph.node[1].input[0] = "y"


def _dims(*dims: int) -> Callable[[ModelProto], None]:
    def change(m: ModelProto) -> None:
        m.graph.initializer[0].dims[:] = dims

    return change


def _tensor(**fields: object) -> Callable[[ModelProto], None]:
    def change(m: ModelProto) -> None:
        m.graph.initializer[0].CopyFrom(TensorProto(name="w", **fields))  # type: ignore[arg-type]

    return change


def _model(name: str, value: object) -> Callable[[ModelProto], None]:
    return lambda m: setattr(m, name, value)


def _node(name: str, value: object) -> Callable[[ModelProto], None]:
    return lambda m: setattr(m.graph.node[0], name, value)


DAMAGE: dict[str, tuple[Callable[[ModelProto], None], str]] = {
    "two producers": (_double, "produced twice"),
    "cycle": (_cycle, "cycle"),
    "reads itself": (_itself, "own result"),
    "name of an input and of a node": (lambda m: m.graph.node[0].output.__setitem__(0, "x"), "produced twice"),
    "reads nothing": (lambda m: m.graph.node[0].input.__setitem__(1, "nobody"), "'nobody'|nobody: read but never"),
    "output of nobody": (lambda m: setattr(m.graph.output[0], "name", "nobody"), "nobody"),
    "negative dims": (_dims(-2), "impossible shape"),
    "absurd dims": (_dims(1 << 62, 1 << 62, 1 << 62), "impossible shape"),
    "more dims than data": (_dims(3), "needs 12"),
    "no element type": (_tensor(dims=[2], raw_data=bytes(8)), "unknown element type 0"),
    "unknown element type": (_tensor(dims=[2], data_type=99, raw_data=bytes(8)), "unknown element type 99"),
    "too few typed values": (_tensor(dims=[2], data_type=1, float_data=[1.0]), "holds 1 values"),
    "strings as bytes": (_tensor(dims=[2], data_type=8, raw_data=b"ab"), "strings"),
    "two of a name": (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "same name"),
    "unknown operator": (_node("op_type", "Frobnicate"), "no operator Frobnicate"),
    "operator of a later opset": (_node("op_type", "Gelu"), "opset 20"),
    "domain that is not imported": (_node("domain", "my.ops"), "domain my.ops"),
    "too many inputs": (lambda m: m.graph.node[1].input.extend(["x", "x"]), "not valid ONNX"),
    "unknown attribute": (lambda m: m.graph.node[1].attribute.append(helper.make_attribute("bogus", 1)), "not valid ONNX"),
    "IR from the future": (_model("ir_version", 1000), "upgrade onnx"),
    "IR from the past": (_model("ir_version", 1), "older than 3"),
    "opset from the future": (lambda m: setattr(m.opset_import[0], "version", 500), "opset 500"),
    "negative opset": (lambda m: setattr(m.opset_import[0], "version", -3), "opset"),
    "no opset": (lambda m: m.ClearField("opset_import"), "operator set"),
    "control characters": (_node("op_type", "Bad\n\x1b[31mname\u202e"), r"\\n\\x1b"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    model = parse(ADD, w=np.ones(2, np.float32))
    change, words = DAMAGE[kind]
    change(model)
    with pytest.raises(BadInput, match=words) as caught:
        read.load(write_model(tmp_path, model))
    assert str(caught.value).isprintable()


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    data = parse(ADD, w=np.ones(2, np.float32)).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data.replace(b"\x01t", b"\x01\xff"))
    refused(tmp_path / "m.onnx", "UTF-8")


def test_bodies_nested_beyond_measure(tmp_path: Path) -> None:
    def message(number: int, body: bytes) -> bytes:
        return delimited(number, len(body)) + body

    graph = b""
    for _ in range(500):  # graph > node > attribute > graph ...
        attribute = message(1, b"then_branch") + b"\xa0\x01\x05" + message(6, graph)
        graph = message(1, message(4, b"If") + message(5, attribute))
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08" + message(8, b"\x10\x11") + message(7, graph))
    refused(tmp_path / "m.onnx", "not an ONNX model")


def test_a_million_nodes(tmp_path: Path) -> None:
    model = parse(ADD, w=np.ones(2, np.float32))
    node = helper.make_node("Relu", ["x"], ["o"])
    graph = model.graph.SerializeToString() + (delimited(1, node.ByteSize()) + node.SerializeToString()) * 1_000_000
    model.ClearField("graph")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString() + delimited(7, len(graph)) + graph)
    refused(tmp_path / "m.onnx", "1,000,002 nodes")


# ------------------------------------------------------------------------------------------------------------ functions


def calling(*bodies: onnx.FunctionProto) -> ModelProto:
    model = parse("""<ir_version: 8, opset_import: ["" : 17, "f" : 1]> g (float[2] x) => (float[2] y) { y = f.F0(x) }""")
    for body in bodies:
        body.opset_import.append(helper.make_opsetid("f", 1))
    model.functions.extend(bodies)
    return model


def call(name: str, into: str, out: str) -> onnx.NodeProto:
    return helper.make_node(name, [into], [out], domain="f")


def test_a_bomb_of_functions(tmp_path: Path) -> None:
    steps = [("a", "t0"), *((f"t{k}", f"t{k + 1}") for k in range(9))]
    bodies = [function("f", f"F{i}", ["a"], ["t9"], [call(f"F{i + 1}", *step) for step in steps]) for i in range(30)]
    bodies.append(function("f", "F30", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])]))
    refused(write_model(tmp_path, calling(*bodies)), "functions expand")


def test_functions_that_call_each_other(tmp_path: Path) -> None:
    bodies = [function("f", "F0", ["a"], ["b"], [call("F1", "a", "b")]), function("f", "F1", ["a"], ["b"], [call("F0", "a", "b")])]
    refused(write_model(tmp_path, calling(*bodies)), "calls itself")


def test_a_function_of_another_opset_is_converted(tmp_path: Path) -> None:
    body = function("f", "F0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])])
    body.opset_import[0].version = 16
    assert [node.op for node in read.load(write_model(tmp_path, calling(body))).graph.nodes] == ["Relu"]


# -------------------------------------------------------------------------------------------------------- external data


def referring(**entries: str) -> ModelProto:
    model = parse(ADD)
    weight = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with 8 bytes of data, a secret outside, and links to it."""
    inner = tmp_path / "model"
    inner.mkdir()
    (inner / "w.bin").write_bytes(struct.pack("ff", 1, 2))
    (tmp_path / "secret").write_bytes(struct.pack("ff", 3, 4))
    (inner / "link").symlink_to(tmp_path / "secret")
    (inner / "linked").symlink_to(tmp_path)
    (inner / "inside").symlink_to("w.bin")
    (inner / "loop").symlink_to("loop")
    return inner


def test_external_data_is_read(folder: Path) -> None:
    for entries in ({"location": "w.bin"}, {"location": "./w.bin", "offset": "0", "length": "8"}, {"location": "inside"}):
        model = read.load(write_model(folder, referring(**entries)))
        write.save(model, folder / "out.onnx")
        whole = onnx.load(folder / "out.onnx")
        assert numpy_helper.to_array(whole.graph.initializer[0]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({}, "without a file name"),
        ({"location": "none.bin"}, "no such file"),
        ({"location": "../secret"}, "outside the model's folder"),
        ({"location": "sub/../../secret"}, "outside the model's folder"),
        ({"location": "..\\secret"}, "outside the model's folder"),
        ({"location": "/etc/passwd"}, "outside the model's folder"),
        ({"location": "link"}, "outside the model's folder"),
        ({"location": "linked/secret"}, "outside the model's folder"),
        ({"location": "loop"}, "external data"),
        ({"location": "."}, "not an ordinary file"),
        ({"location": "a\nb"}, r"a\\nb"),
        ({"location": "w.bin", "offset": "-4"}, "at -4"),
        ({"location": "w.bin", "offset": "4"}, "ends at byte 12"),
        ({"location": "w.bin", "offset": "99999999999999999999"}, "ends at byte"),
        ({"location": "w.bin", "length": "4"}, "4 bytes"),
        ({"location": "w.bin", "offset": "zero"}, "no number"),
    ],
)
def test_external_data_that_must_not_be_read(folder: Path, entries: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        read.load(write_model(folder, referring(**entries)))
    assert str(caught.value).isprintable()


def test_external_data_of_attributes_and_bodies_is_checked_too(folder: Path) -> None:
    tensor = referring(location="../secret").graph.initializer[0]
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    model = parse(ADD)
    model.graph.node.insert(0, node)
    with pytest.raises(BadInput, match="outside"):
        read.load(write_model(folder, model))
    body = helper.make_graph([helper.make_node("Relu", ["w"], ["o"])], "b", [], [helper.make_tensor_value_info("o", 1, [2])], [tensor])
    model = parse("""<ir_version: 8, opset_import: ["" : 17]> g (bool c) => (float[2] y) { y = Identity(o) }""")
    model.graph.node.insert(0, helper.make_node("If", ["c"], ["o"], then_branch=body, else_branch=body))
    with pytest.raises(BadInput, match="outside"):
        read.load(write_model(folder, model))


# ------------------------------------------------------------------------------------------------------------- mutation


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_mutated_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, rng: random.Random) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2,4] x, bool c) => (float[2,4] y) {
        s = Shape(x) r = Reshape(x, s) t = Add(r, w) k = Constant <value: tensor = float {2}> () u = Pow(t, k)
        y = If (c) <then_branch: graph = p () => (float[2,4] a) { a = Mul(u, w) },
                    else_branch: graph = q () => (float[2,4] b) { b = Softmax <axis: int = -1> (u) }> }"""
    data = bytearray(parse(text, w=np.arange(4, dtype=np.float32)).SerializeToString())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        if rng.random() < 0.6:
            data[at] ^= 1 << rng.randrange(8)
        elif rng.random() < 0.5:
            del data[at : at + rng.randint(1, 20)]
        else:
            data[at:at] = data[max(0, at - 10) : at]
        if not data:
            break
    folder = tmp_path_factory.getbasetemp()
    path = folder / "mutated.onnx"
    path.write_bytes(data)
    message = ""
    try:
        model = read.load(path)
        clean.clean(model)
        precision.convert(model, "fp16")
        write.save(model, folder / "mutated-out.onnx")
    except OnnxfuseError as error:
        message = str(error)
    assert message.isprintable()


def test_names_are_shown_on_one_line() -> None:
    assert shown("a\nb\x1b[0m") == r"a\nb\x1b[0m"
    assert shown("\u202eabc\u2028") == r"\u202eabc\u2028"
    assert len(shown("x" * 5000)) <= 120
    assert shown("größe/µ") == "größe/µ"
