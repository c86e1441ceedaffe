"""Model files made to do harm, by name: `MODELS[name](folder)` writes one into `folder` and returns its path.

Most are made as bytes or as messages field by field: the helpers of the onnx package refuse them, or take minutes.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxfuse.graph.wire import delimited
from tests.graph.models import function, parse

Make = Callable[[Path], Path]
SOUND = """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 4] x, bool c) => (float[2, 4] y) { t = Add(x, w) y = Relu(t) }"""
NORM = """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 4] x) => (float[2, 4] y) {
    m = ReduceMean <axes = [-1]> (x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean <axes = [-1]> (p)
    e = Add(v, eps) s = Sqrt(e) n = Div(d, s) a = Mul(n, w) y = Add(a, b) }"""
FOUR = np.arange(4, dtype=np.float32)


def message(number: int, body: bytes) -> bytes:
    """A field of a message, on the wire."""
    return delimited(number, len(body)) + body


def sound() -> ModelProto:
    return parse(SOUND, w=FOUR)


def norm() -> ModelProto:
    return parse(NORM, w=FOUR, b=FOUR, two=np.float32(2), eps=np.float32(1e-5))


def filled(source: str) -> ModelProto:
    """A model of one of the texts here, with those constants that it reads."""
    known = {
        "w": FOUR,
        "b": FOUR,
        "two": np.float32(2),
        "eps": np.float32(1e-5),
        "k": np.ones((4, 4 // (1 + ("group" in source)), 1), np.float32),
    }
    return parse(source, **{name: value for name, value in known.items() if re.search(rf"\b{name}\b", source)})


def written(folder: Path, data: bytes) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(data)
    return path


def bytes_of(data: bytes) -> Make:
    return lambda folder: written(folder, data)


def changed(change: Callable[[ModelProto], Any], base: Callable[[], ModelProto] = sound) -> Make:
    """A sound model after `change`."""

    def make(folder: Path) -> Path:
        model = base()
        change(model)
        return written(folder, model.SerializeToString())

    return make


def text(source: str, opset: int = 17, **initializers: np.ndarray) -> Make:
    """A model of onnx's text form."""
    return lambda folder: written(
        folder, parse(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{source}', **initializers).SerializeToString()
    )


def around(graph: bytes, opset: int = 17) -> bytes:
    """The model of a graph in bytes."""
    return b"\x08\x08" + message(8, b"\x10" + bytes([opset])) + message(7, graph)


def interface() -> bytes:
    """Input x and output y, float[2], as the fields of a graph."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]).SerializeToString() for name in "xy")
    return message(11, x) + message(12, y)


# ------------------------------------------------------------------------------------------------------ no model at all


def _folder(folder: Path) -> Path:
    (folder / "m.onnx").mkdir()
    return folder / "m.onnx"


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "m.onnx")
    return folder / "m.onnx"


def _loop(folder: Path) -> Path:
    (folder / "m.onnx").symlink_to("m.onnx")
    return folder / "m.onnx"


def _device(folder: Path) -> Path:
    (folder / "m.onnx").symlink_to("/dev/zero")
    return folder / "m.onnx"


def _zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "m.onnx", "w") as archive:
        archive.writestr("model.onnx", sound().SerializeToString())
    return folder / "m.onnx"


def _forbidden(folder: Path) -> Path:
    path = folder / "secret"
    path.mkdir()
    path.chmod(0)
    return path / "m.onnx"


NO_MODELS: dict[str, Make] = {
    "0 bytes": bytes_of(b""),
    "text": bytes_of(b"This is a letter.\n" * 40),
    "zip": _zip,
    "a folder": _folder,
    "a pipe": _fifo,
    "a link to itself": _loop,
    "a link to a device": _device,
    "a missing folder": lambda folder: folder / "none" / "m.onnx",
    "zeros": bytes_of(bytes(5000)),
    "ones": bytes_of(b"\xff" * 5000),
    "a length beyond the end": bytes_of(b"\x08\x08\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"),
    "a number without an end": bytes_of(b"\x08" + b"\xff" * 4000),
    "groups": bytes_of(b"\x08\x08" + b"\x3b" * 5000),
    "two graphs": bytes_of(sound().SerializeToString() * 2),
}

# --------------------------------------------------------------------------------------------------------------- tensors


def _initializer(**fields: Any) -> Make:
    return changed(lambda m: m.graph.initializer[0].CopyFrom(TensorProto(name="w", **fields)))


def _input(*dims: int) -> Make:
    return changed(lambda m: m.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)))


def _sparse(values: list[float], indices: list[Any], dims: list[int]) -> Make:
    def change(m: ModelProto) -> None:
        del m.graph.initializer[:]
        values_ = numpy_helper.from_array(np.array(values, np.float32), "w")
        m.graph.sparse_initializer.append(
            helper.make_sparse_tensor(values_, numpy_helper.from_array(np.array(indices, np.int64), "i"), dims)
        )

    return changed(change)


RAW = np.arange(4, dtype=np.float32).tobytes()
TENSORS: dict[str, Make] = {
    "2^62 elements": _initializer(dims=[1 << 62], data_type=1, raw_data=RAW),
    "dims whose product overflows": _initializer(dims=[1 << 32, 1 << 32, 4], data_type=1, raw_data=RAW),
    "dims whose product overflows to what is there": _initializer(dims=[(1 << 62) + 1, 4], data_type=1, raw_data=RAW),
    "a million dims": _initializer(dims=[1] * 1_000_000, data_type=1, raw_data=RAW[:4]),
    "a million dims of two": _initializer(dims=[2] * 1_000_000, data_type=1, raw_data=RAW[:4]),
    "negative dims": _initializer(dims=[-4], data_type=1, raw_data=RAW),
    "negative dims of a positive product": _initializer(dims=[-2, -2], data_type=1, raw_data=RAW),
    "shorter than its dims": _initializer(dims=[4], data_type=1, raw_data=RAW[:-1]),
    "longer than its dims": _initializer(dims=[4], data_type=1, raw_data=RAW + b"\0"),
    "no data": _initializer(dims=[4], data_type=1),
    "data of another type": _initializer(dims=[4], data_type=1, int64_data=[1, 2, 3, 4]),
    "segments": _initializer(dims=[4], data_type=1, raw_data=RAW, segment=TensorProto.Segment(begin=0, end=4)),
    "unknown type": _initializer(dims=[4], data_type=99, raw_data=RAW),
    "strings": _initializer(dims=[4], data_type=8, string_data=[b"a", b"\xff\xfe", b"", b"\x1b"]),
    "strings in raw data": _initializer(dims=[4], data_type=8, raw_data=RAW),
    "booleans of 7": _initializer(dims=[4], data_type=9, raw_data=b"\x07\x07\x07\x07"),
    "negative sizes of an input": _input(-2, -4),
    "absurd sizes of an input": _input(1 << 62, 1 << 62),
    "sizes of an input that are 0": _input(0, 4),
    "sparse, index beyond the end": _sparse([1.0], [9], [4]),
    "sparse, index below 0": _sparse([1.0], [-1], [4]),
    "sparse, pairs beyond the end": _sparse([1.0], [[0, 9]], [1, 4]),
    "sparse, more values than indices": _sparse([1.0, 2.0], [1], [4]),
    "sparse of 2^60 elements": _sparse([1.0], [1], [1 << 60]),
    "sparse of overflowing dims": _sparse([1.0], [1], [1 << 40, 1 << 40]),
    "sparse of negative dims": _sparse([1.0], [1], [-4]),
}

# ----------------------------------------------------------------------------------------------------------------- graph


def _node(graph: GraphProto, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
    graph.node.append(helper.make_node(op, inputs, outputs, **attributes))


def _twice(m: ModelProto) -> None:
    m.graph.node.append(m.graph.node[0])


def _body(output: str = "o", nodes: list[NodeProto] | None = None, inputs: list[Any] | None = None, count: int = 1) -> GraphProto:
    outputs = [helper.make_tensor_value_info(output if i == 0 else f"{output}{i}", TensorProto.FLOAT, [2, 4]) for i in range(count)]
    made = [helper.make_node("Identity", ["x"], [value.name]) for value in outputs] if nodes is None else nodes
    return helper.make_graph(made, "body", inputs or [], outputs)


def _if(then: GraphProto, other: GraphProto, outputs: int = 1) -> Make:
    def change(m: ModelProto) -> None:
        del m.graph.node[:]
        names = ["y", *(f"y{i}" for i in range(1, outputs))]
        _node(m.graph, "If", ["c"], names, then_branch=then, else_branch=other)

    return changed(change)


def _loop_with(body: GraphProto) -> Make:
    def change(m: ModelProto) -> None:
        del m.graph.node[:]
        _node(m.graph, "Loop", ["n", "c", "x"], ["y"], body=body)
        m.graph.initializer.append(numpy_helper.from_array(np.array(3), "n"))

    return changed(change)


def _scan_with(body: GraphProto, scanned: int) -> Make:
    def change(m: ModelProto) -> None:
        del m.graph.node[:]
        _node(m.graph, "Scan", ["x"], ["y"], body=body, num_scan_inputs=scanned)

    return changed(change)


def _later(m: ModelProto) -> None:
    """A body that reads what is made after it."""
    del m.graph.node[:]
    body = _body(nodes=[helper.make_node("Identity", ["late"], ["o"])])
    _node(m.graph, "If", ["c"], ["y"], then_branch=body, else_branch=_body("p"))
    _node(m.graph, "Relu", ["x"], ["late"])


def _own_result(m: ModelProto) -> None:
    """A body that reads the result of its own node."""
    del m.graph.node[:]
    body = _body(nodes=[helper.make_node("Identity", ["y"], ["o"])])
    _node(m.graph, "If", ["c"], ["y"], then_branch=body, else_branch=_body("p"))


def _shared_name(m: ModelProto) -> None:
    m.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4]))


def _opset(*entries: tuple[str, int]) -> Make:
    def change(m: ModelProto) -> None:
        del m.opset_import[:]
        m.opset_import.extend(helper.make_opsetid(*entry) for entry in entries)

    return changed(change)


def _constant_without_value(m: ModelProto) -> None:
    del m.graph.initializer[:]
    m.graph.node.insert(0, NodeProto(op_type="Constant", output=["w"]))


def _constant_with(*attributes: AttributeProto) -> Make:
    def change(m: ModelProto) -> None:
        del m.graph.initializer[:]
        m.graph.node.insert(0, NodeProto(op_type="Constant", output=["w"], attribute=attributes))

    return changed(change)


GRAPHS: dict[str, Make] = {
    "a cycle": changed(lambda m: m.graph.node[0].input.__setitem__(0, "y")),
    "a node that reads itself": changed(lambda m: m.graph.node[1].input.__setitem__(0, "y")),
    "a cycle through a body": changed(_own_result),
    "a body that reads what comes later": changed(_later),
    "one node twice": changed(_twice),
    "one name for a node and an input": changed(lambda m: m.graph.node[0].output.__setitem__(0, "x")),
    "one name for an input and an initializer": changed(_shared_name),
    "two inputs of one name": changed(lambda m: m.graph.input.append(m.graph.input[0])),
    "two outputs of one name": changed(lambda m: m.graph.output.append(m.graph.output[0])),
    "two initializers of one name": changed(lambda m: m.graph.initializer.append(m.graph.initializer[0])),
    "an output that nobody makes": changed(lambda m: setattr(m.graph.output[0], "name", "nobody")),
    "an output that is an input": changed(lambda m: setattr(m.graph.output[0], "name", "x")),
    "an output that is an initializer": changed(lambda m: setattr(m.graph.output[0], "name", "w")),
    "an output without a name": changed(lambda m: setattr(m.graph.output[0], "name", "")),
    "an input without a name": changed(lambda m: setattr(m.graph.input[0], "name", "")),
    "no nodes": changed(lambda m: m.graph.ClearField("node")),
    "no outputs": changed(lambda m: m.graph.ClearField("output")),
    "no graph": changed(lambda m: m.ClearField("graph")),
    "an empty graph": changed(lambda m: m.graph.Clear()),
    "no operator type": changed(lambda m: setattr(m.graph.node[0], "op_type", "")),
    "no inputs": changed(lambda m: m.graph.node[0].ClearField("input")),
    "no node outputs": changed(lambda m: m.graph.node[0].ClearField("output")),
    "empty input names": changed(lambda m: m.graph.node[0].input.__setitem__(0, "")),
    "IR version 0": changed(lambda m: setattr(m, "ir_version", 0)),
    "IR version 10^9": changed(lambda m: setattr(m, "ir_version", 10**9)),
    "negative IR version": changed(lambda m: setattr(m, "ir_version", -5)),
    "opset 0": _opset(("", 0)),
    "negative opset": _opset(("", -1)),
    "opset 10^9": _opset(("", 10**9)),
    "no opset": _opset(),
    "another domain's opset alone": _opset(("ai.onnx.ml", 3)),
    "two opsets of one domain": _opset(("", 17), ("", 12)),
    "one opset twice": _opset(("", 17), ("ai.onnx", 17)),
    "two opsets of another domain": _opset(("", 17), ("other", 1), ("other", 2)),
    "a Constant without a value": changed(_constant_without_value),
    "a Constant with two values": _constant_with(helper.make_attribute("value_float", 1.0), helper.make_attribute("value_int", 1)),
    "a Constant of text": _constant_with(helper.make_attribute("value_string", "x")),
    "a Constant of a number in the wrong field": _constant_with(AttributeProto(name="value_float", type=AttributeProto.INT, i=3)),
    "a Constant of no type": _constant_with(AttributeProto(name="value_float", f=3.0)),
    "a Constant of an absent tensor": _constant_with(AttributeProto(name="value", type=AttributeProto.TENSOR)),
    "branches of different numbers of outputs": _if(_body(), _body("p", count=2)),
    "branches of fewer outputs than the If": _if(_body(), _body("p"), outputs=3),
    "branches without outputs": _if(_body(count=0), _body(count=0)),
    "a constant condition and a branch of too few outputs": changed(
        lambda m: (
            m.graph.ClearField("node"),
            m.graph.initializer.append(numpy_helper.from_array(np.array(True), "k")),
            _node(m.graph, "If", ["k"], ["y", "y1"], then_branch=_body(), else_branch=_body("p")),
        )
    ),
    "an If without branches": changed(lambda m: (m.graph.ClearField("node"), _node(m.graph, "If", ["c"], ["y"]))),
    "an If whose branch is a number": changed(
        lambda m: (m.graph.ClearField("node"), _node(m.graph, "If", ["c"], ["y"], then_branch=1, else_branch=_body()))
    ),
    "a Loop whose body has no inputs": _loop_with(_body()),
    "a Loop whose body has no outputs": _loop_with(_body(count=0)),
    "a Loop whose body has too many inputs": _loop_with(
        _body(inputs=[helper.make_tensor_value_info(f"i{k}", TensorProto.FLOAT, [2]) for k in range(9)])
    ),
    "a Scan without scanned inputs": _scan_with(_body(), 0),
    "a Scan with negative inputs": _scan_with(_body(), -7),
    "a Scan of more inputs than there are": _scan_with(_body(), 1 << 40),
}

# ------------------------------------------------------------------------------------------------------------ attributes

_WRONG = {
    "a real": 1.5,
    "text": "x",
    "a tensor": numpy_helper.from_array(FOUR),
    "reals": [1.5, 2.5],
    "texts": ["a", "b"],
    "a graph": helper.make_graph([], "g", [], []),
    "nothing": None,
    "2^62": 1 << 62,
    "-2^63": -(1 << 63),
    "many": [1 << 62, -(1 << 62)],
}


def _attribute(model: str, op: str, name: str, value: Any) -> Make:
    """A text model in which one attribute of the nodes of type `op` is something else."""

    def make(folder: Path) -> Path:
        proto = filled(model)
        for node in proto.graph.node:
            if node.op_type == op:
                kept = [a for a in node.attribute if a.name != name]
                new = AttributeProto(name=name, type=AttributeProto.INTS) if value is None else helper.make_attribute(name, value)
                del node.attribute[:]
                node.attribute.extend([*kept, new])
        return written(folder, proto.SerializeToString())

    return make


LAYERNORM = """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 4] x, float[2, 4] r) => (float[2, 4] y) {
    s = Add(x, r) y = LayerNormalization <axis = -1, epsilon = 1e-5> (s, w, b) }"""
CONV = """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 4, 5] x) => (float[2, 4, 5] y) {
    c = Conv <kernel_shape = [1]> (x, k) y = BatchNormalization <epsilon = 1e-5> (c, w, b, b, w) }"""
TRANSPOSED = CONV.replace("Conv <kernel", "ConvTranspose <group = 2, kernel")
GROUPS = """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 4, 5, 5] x) => (float[2, 4, 5, 5] y) {
    f = Constant <value_ints = [0, 2, -1]> () r = Reshape(x, f) z = Constant <value_floats = [0.0, 0.0]> ()
    o = Constant <value_floats = [1.0, 1.0]> () i = InstanceNormalization <epsilon = 1e-5> (r, o, z)
    t = Constant <value_ints = [2, 4, 5, 5]> () y = Reshape(i, t) }"""
MOVED = """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 4] x) => (float[4, 2] y) {
    t = Transpose <perm = [1, 0]> (x) u = Cast <to = 1> (t) h = Shape <start = 0> (u) v = Reshape <allowzero = 0> (u, h)
    q = Concat <axis = 0> (v, v) p, o = Split <axis = 0> (q) y = Gelu <approximate = "none"> (p) }""".replace('"" : 17', '"" : 20').replace(
    "Split <axis = 0>", "Split <axis = 0, num_outputs = 2>"
)
ATTRIBUTES: dict[str, Make] = {
    f"{op} {name} of {kind}": _attribute(model, op, name, value)
    for model, op, name in (
        (NORM, "ReduceMean", "axes"),
        (NORM, "ReduceMean", "keepdims"),
        (LAYERNORM, "LayerNormalization", "axis"),
        (LAYERNORM, "LayerNormalization", "epsilon"),
        (LAYERNORM, "LayerNormalization", "stash_type"),
        (CONV, "BatchNormalization", "epsilon"),
        (CONV, "BatchNormalization", "training_mode"),
        (CONV, "Conv", "group"),
        (CONV, "Conv", "kernel_shape"),
        (CONV, "Conv", "pads"),
        (CONV, "Conv", "auto_pad"),
        (TRANSPOSED, "ConvTranspose", "group"),
        (GROUPS, "InstanceNormalization", "epsilon"),
        (GROUPS, "Reshape", "allowzero"),
        (MOVED, "Transpose", "perm"),
        (MOVED, "Cast", "to"),
        (MOVED, "Shape", "start"),
        (MOVED, "Concat", "axis"),
        (MOVED, "Split", "axis"),
        (MOVED, "Split", "num_outputs"),
        (MOVED, "Gelu", "approximate"),
    )
    for kind, value in _WRONG.items()
}
# Of a deprecated operator, at which the checker of onnx stops.
_DEPRECATED = """<ir_version: 8, opset_import: ["" : 18]> g (float[2, 4, 5] x) => (float[2, 4, 5] y) {
    s = Constant <value_floats = [1.0, 1.0]> () z = Constant <value_floats = [0.0, 0.0]> ()
    n = GroupNormalization <num_groups = 2, epsilon = 1e-5> (x, s, z)
    t = Transpose <perm = [0, 1, 2]> (n) y = LayerNormalization <axis = -1, epsilon = 1e-5> (t, five, five) }"""


def _behind_deprecated(op: str, name: str, value: Any) -> Make:
    model = _attribute(_DEPRECATED, op, name, value)

    def make(folder: Path) -> Path:
        path = model(folder)
        proto = ModelProto.FromString(path.read_bytes())
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(5, np.float32), "five"))
        return written(folder, proto.SerializeToString())

    return make


ATTRIBUTES |= {
    f"behind a deprecated node: {op} {name} of {kind}": _behind_deprecated(op, name, _WRONG[kind])
    for op, name in (
        ("GroupNormalization", "num_groups"),
        ("GroupNormalization", "epsilon"),
        ("LayerNormalization", "epsilon"),
        ("LayerNormalization", "axis"),
        ("Transpose", "perm"),
    )
    for kind in ("text", "a tensor", "a graph", "nothing", "2^62")
}

# Of nodes of the package's own domain, whose attributes nobody checks.
_OWN = {
    "LayerNormalization": ({"axis": -1, "epsilon": 1e-5, "dtype": 1}, 3),
    "RMSNormalization": ({"axis": -1, "epsilon": 1e-5, "dtype": 1}, 2),
    "GroupNormalization": ({"num_groups": 2, "epsilon": 1e-5, "dtype": 1}, 3),
    "Gelu": ({"dtype": 1}, 1),
    "Silu": ({"dtype": 1}, 1),
    "SkipLayerNormalization": ({"epsilon": 1e-5, "dtype": 1}, 4),
}


def _own_node(op: str, name: str, value: Any) -> Make:
    """A residual sum that goes into a node of domain onnxfuse with a function body; one of its attributes is something else."""

    def make(folder: Path) -> Path:
        attributes, count = _OWN[op]
        model = parse(SOUND.replace('"" : 17', '"" : 17, "onnxfuse" : 1'), w=FOUR)
        del model.graph.node[1:]
        held = {**attributes, name: value}
        node = helper.make_node(op, ["t", "w", "w", "w"][:count], ["y", "unread"][: 1 + op.startswith("Skip")], domain="onnxfuse")
        node.attribute.extend(helper.make_attribute(key, held[key]) for key in held if held[key] is not None)
        model.graph.node.append(node)
        formal = ["a", "b", "c", "d"][:count]
        outputs = ["r", "s"][: len(node.output)]
        nodes = [helper.make_node("Identity", ["a"], [out]) for out in outputs]
        body = function("onnxfuse", op, formal, outputs, nodes)
        body.attribute.extend(attributes)
        model.functions.append(body)
        return written(folder, model.SerializeToString())

    return make


ATTRIBUTES |= {
    f"onnxfuse {op} {name} of {kind}": _own_node(op, name, value)
    for op, (attributes, _) in _OWN.items()
    for name in attributes
    for kind, value in _WRONG.items()
}

# ----------------------------------------------------------------------------------------------------------------- names

NAMES = {
    "ANSI": "\x1b[2J\x1b[31mred\x1b[0m",
    "lines": "a\nerror: b\r\nc",
    "NUL": "a\0b",
    "right to left": "\u202egnp.exe",
    "bell and backspace": "\x07\x08\x08\x08",
    "line separators": "a\u2028b\x85c",
    "markup": "[bold red]x[/bold red][link=http://x]y[/link]",
    "markup that does not end": "[/]",
    "a format": "{0} %s %(x)d {x!r}",
    "a path": "../../../../etc/passwd",
    "a million letters": "n" * 1_000_000,
    "a noncharacter": "\uffff\ufdd0",
    "HTML": "<script>alert(1)</script>",
}


def _named(name: str, where: str) -> Make:
    """A sound model of a norm with a hostile name, or an unsound one that is refused with that name in the line."""

    def change(m: ModelProto) -> None:
        if where == "refused":
            m.graph.node[2].input[0] = name
            return
        for node in m.graph.node:
            node.name = f"{name}{node.output[0]}"
            node.doc_string = name
        for values in (
            m.graph.input,
            m.graph.output,
            m.graph.initializer,
            *(n.input for n in m.graph.node),
            *(n.output for n in m.graph.node),
        ):
            for i, value in enumerate(values):
                if isinstance(value, str):
                    values[i] = name + value
                else:
                    value.name = name + value.name
        m.graph.name = m.producer_name = name
        m.metadata_props.add(key=name, value=name)

    return changed(change, norm)


NAMED: dict[str, Make] = {f"{kind}, {where}": _named(name, where) for kind, name in NAMES.items() for where in ("sound", "refused")}


def _lone_surrogate(folder: Path) -> Path:
    return written(folder, norm().SerializeToString().replace(message(1, b"d"), message(1, b"\xed\xa0\x80")))


NAMED["a lone surrogate"] = _lone_surrogate
NAMED["bytes that are no text"] = changed(lambda m: None)
NAMED["bytes that are no text"] = lambda folder: written(folder, norm().SerializeToString().replace(message(1, b"d"), message(1, b"\xff")))


def _dimension(name: str) -> Make:
    return changed(
        lambda m: (
            m.graph.input[0].type.tensor_type.shape.dim[0].Clear(),
            setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", name),
        ),
        norm,
    )


NAMED |= {f"a dimension: {kind}": _dimension(name) for kind, name in NAMES.items()}

# ------------------------------------------------------------------------------------------------------------------ size


def _deep(depth: int) -> bytes:
    """Bodies within bodies."""
    graph = b""
    prefix, suffix = [], []
    size = 0
    for _ in range(depth):
        attribute_rest = message(1, b"then_branch") + b"\xa0\x01\x05"
        graph_tag = delimited(6, size)
        attribute = len(attribute_rest) + len(graph_tag) + size
        node_rest = message(4, b"If")
        attribute_tag = delimited(5, attribute)
        node = len(node_rest) + len(attribute_tag) + attribute
        node_tag = delimited(1, node)
        prefix.append(node_tag + node_rest + attribute_tag + attribute_rest + graph_tag)
        size = len(node_tag) + node
    graph = b"".join(reversed(prefix)) + b"".join(suffix)
    return around(graph)


def _many(count: int, make: Callable[[int], bytes], end: bytes = b"") -> bytes:
    return around(b"".join(make(i) for i in range(count)) + end + interface())


def _chain(count: int) -> bytes:
    relu = message(4, b"Relu")

    def node(i: int) -> bytes:
        inner = message(1, b"x" if i == 0 else b"t%d" % i) + message(2, b"y" if i == count - 1 else b"t%d" % (i + 1)) + relu
        return message(1, inner)

    return _many(count, node)


def _wide(count: int) -> bytes:
    """A Sum of as many inputs."""
    node = message(1, b"x") * count + message(2, b"y") + message(4, b"Sum")
    return around(message(1, node) + interface())


def _fan(count: int) -> bytes:
    """A Concat of as many results of nodes that all read one."""
    nodes = b"".join(message(1, message(1, b"x") + message(2, b"t%d" % i) + message(4, b"Relu")) for i in range(count))
    node = b"".join(message(1, b"t%d" % i) for i in range(count)) + message(2, b"y") + message(4, b"Sum")
    return around(nodes + message(1, node) + interface())


def _doubling(op: str, steps: int) -> Make:
    """Constants that double with each node: 2^steps elements in the end."""
    nodes = " ".join(f"t{i + 1} = {op}(t{i}, t{i})" for i in range(steps))
    return text(
        f"g (float[2] x) => (float y) {{ {nodes} s = ReduceSum <keepdims = 0> (t{steps}) y = Add(s, w) }}",
        t0=np.ones(2, np.float32),
        w=np.float32(1),
    )


def _bomb(folder: Path) -> Path:
    """Each function calls the next ten times, thirty deep: 10^30 nodes."""
    steps = [("a", "t0"), *((f"t{k}", f"t{k + 1}") for k in range(9))]
    call = [[helper.make_node(f"F{i + 1}", [a], [b], domain="f") for a, b in steps] for i in range(30)]
    bodies = [function("f", f"F{i}", ["a"], ["t9"], call[i]) for i in range(30)]
    return _calling(folder, [*bodies, function("f", "F30", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])])])


def _mutual(folder: Path) -> Path:
    calls = [helper.make_node(f"F{1 - i}", ["a"], ["b"], domain="f") for i in range(2)]
    return _calling(folder, [function("f", f"F{i}", ["a"], ["b"], [calls[i]]) for i in range(2)])


def _self_calling(folder: Path) -> Path:
    return _calling(folder, [function("f", "F0", ["a"], ["b"], [helper.make_node("F0", ["a"], ["b"], domain="f")])])


def _long_calls(folder: Path) -> Path:
    """A chain of 3,000 functions, each of which calls the next."""
    bodies = [function("f", f"F{i}", ["a"], ["b"], [helper.make_node(f"F{i + 1}", ["a"], ["b"], domain="f")]) for i in range(3000)]
    return _calling(folder, [*bodies, function("f", "F3000", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])])])


def _hidden_bomb(folder: Path) -> Path:
    """Functions of the package's own domain that expand without bound where --undo inlines them."""
    call = [helper.make_node("Silu", ["a"], ["b"], domain="onnxfuse")]
    model = parse(SOUND.replace('"" : 17', '"" : 17, "onnxfuse" : 1'), w=FOUR)
    model.graph.node[1].CopyFrom(helper.make_node("Silu", ["t"], ["y"], domain="onnxfuse"))
    body = function("onnxfuse", "Silu", ["a"], ["b"], call)
    body.opset_import.append(helper.make_opsetid("onnxfuse", 1))
    model.functions.append(body)
    return written(folder, model.SerializeToString())


def _calling(folder: Path, bodies: list[Any]) -> Path:
    model = parse("""<ir_version: 8, opset_import: ["" : 17, "f" : 1]> g (float[2] x) => (float[2] y) { y = f.F0(x) }""")
    for body in bodies:
        body.opset_import.append(helper.make_opsetid("f", 1))
    model.functions.extend(bodies)
    return written(folder, model.SerializeToString())


SIZES: dict[str, Make] = {
    "bodies 10,000 deep": lambda folder: written(folder, _deep(10_000)),
    "bodies 30 deep": lambda folder: written(folder, _deep(30)),
    "a chain of 1,000,000 nodes": lambda folder: written(folder, _chain(1_000_000)),
    "100,000 inputs of one node": lambda folder: written(folder, _wide(100_000)),
    "10,000 results into one node": lambda folder: written(folder, _fan(10_000)),
    "constants that double": _doubling("Concat <axis = 0>", 45),
    "arithmetic on 2^60 elements": text(f"g (float[{1 << 60}] x) => (float[n] y) {{ a = Mul(x, x) b = Add(a, x) y = Sub(b, x) }}"),
    "arithmetic on 2^60 elements behind others": text(
        "g (float[2] x) => (float[n] y) { a = ConstantOfShape(s) r = Exp(a) b = Add(r, r) c = Expand(x, s) d = Mul(c, b) y = Sub(d, c) }",
        s=np.array([1 << 60]),
    ),
    "sums that double": _doubling("Sum", 45),
    "a Range of 2^40": text(
        "g (float[2] x) => (int64 y) { r = Range(a, b, c) y = ReduceMax <keepdims = 0> (r) }",
        a=np.int64(0),
        b=np.int64(1 << 40),
        c=np.int64(1),
    ),
    "a ConstantOfShape of 2^60": text(
        "g (float[2] x) => (float y) { r = ConstantOfShape(a) y = ReduceMax <keepdims = 0> (r) }", a=np.array([1 << 30, 1 << 30])
    ),
    "an Expand to 2^40": text(
        "g (float[2] x) => (float y) { r = Expand(o, a) y = ReduceMax <keepdims = 0> (r) }",
        o=np.ones(1, np.float32),
        a=np.array([1 << 20, 1 << 20]),
    ),
    "a Tile of 2^40": text(
        "g (float[2] x) => (float y) { r = Tile(o, a) y = ReduceMax <keepdims = 0> (r) }",
        o=np.ones((1, 1), np.float32),
        a=np.array([1 << 20, 1 << 20]),
    ),
    "an outer product of 2^40": text(
        "g (float[2] x) => (float y) { r = MatMul(o, p) y = ReduceMax <keepdims = 0> (r) }",
        o=np.ones((1 << 16, 1), np.float32),
        p=np.ones((1, 1 << 16), np.float32),
    ),
    "a broadcast of 2^40": text(
        "g (float[2] x) => (float y) { r = Add(o, p) y = ReduceMax <keepdims = 0> (r) }",
        o=np.ones((1 << 16, 1), np.float32),
        p=np.ones((1, 1 << 16), np.float32),
    ),
    "rows of 2^40": text(
        NORM.split(">", 1)[1].replace("float[2, 4]", f"float[2, {1 << 40}]").replace("a = Mul(n, w) y = Add(a, b)", "y = Relu(n)"),
        two=np.float32(2),
        eps=np.float32(1e-5),
    ),
    "division of the smallest integer by -1": text(
        "g (float[2] x) => (int64[1] y) { r = Div(a, b) y = Abs(r) }", a=np.array([-(1 << 63)]), b=np.array([-1])
    ),
    "an integer division by 0": text("g (float[2] x) => (int64[1] y) { r = Mod(a, b) y = Abs(r) }", a=np.array([5]), b=np.array([0])),
    "a bomb of functions": _bomb,
    "functions that call each other": _mutual,
    "a function that calls itself": _self_calling,
    "functions 3,000 deep": _long_calls,
    "a function of onnxfuse that calls itself": _hidden_bomb,
}

# --------------------------------------------------------------------------------------------------------- external data


def referring(**entries: str) -> bytes:
    """A model whose initializer w, 16 bytes, lies elsewhere."""
    model = sound()
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    model.graph.initializer[0].CopyFrom(weight)
    return model.SerializeToString()


def external(**entries: str) -> Make:
    """The model in a folder of its own, beside good data, bad data, and ways out of it that lead to a pipe: reading one never ends."""

    def make(folder: Path) -> Path:
        inner = folder / "model"
        inner.mkdir()
        (inner / "w.bin").write_bytes(RAW)
        (inner / "short.bin").write_bytes(RAW[:7])
        os.mkfifo(folder / "outside")
        os.mkfifo(inner / "pipe")
        (inner / "link").symlink_to(folder / "outside")
        (inner / "relative").symlink_to("../outside")
        (inner / "up").symlink_to(folder)
        (inner / "zero").symlink_to("/dev/zero")
        (inner / "loop").symlink_to("loop")
        (inner / "chain").symlink_to("link")
        (inner / "sub").mkdir()
        return written(inner, referring(**{key: value.format(folder=folder) for key, value in entries.items()}))

    return make


def _escaping_body(where: str) -> Make:
    """A tensor inside an attribute, a body or a function that leads outside."""

    def make(folder: Path) -> Path:
        path = external(location="../outside")(folder)
        model = ModelProto.FromString(path.read_bytes())
        tensor = TensorProto()
        tensor.CopyFrom(model.graph.initializer[0])
        constant = NodeProto(op_type="Constant", output=["w"])
        constant.attribute.add(name="value", type=AttributeProto.TENSOR).t.CopyFrom(tensor)
        del model.graph.initializer[:]
        if where == "attribute":
            model.graph.node.insert(0, constant)
        elif where == "attribute without a type":
            constant.attribute[0].ClearField("type")
            model.graph.node.insert(0, constant)
        elif where == "list of tensors":
            node = NodeProto(op_type="Relu", input=["x"], output=["w"])
            node.attribute.add(name="values", type=AttributeProto.TENSORS).tensors.append(tensor)
            model.graph.node.insert(0, node)
        elif where == "sparse values":
            tensor.dims[:] = [1]
            sparse = model.graph.sparse_initializer.add(dims=[4])
            sparse.values.CopyFrom(tensor)
            sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1]), "i"))
        elif where == "sparse attribute":
            tensor.dims[:] = [1]
            node = NodeProto(op_type="Constant", output=["w"])
            sparse = node.attribute.add(name="sparse_value", type=AttributeProto.SPARSE_TENSOR).sparse_tensor
            sparse.dims[:] = [4]
            sparse.values.CopyFrom(tensor)
            sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1]), "i"))
            model.graph.node.insert(0, node)
        elif where == "body":
            body = helper.make_graph(
                [helper.make_node("Identity", ["w"], ["o"])], "b", [], [helper.make_empty_tensor_value_info("o")], [tensor]
            )
            del model.graph.node[:]
            _node(model.graph, "If", ["c"], ["y"], then_branch=body, else_branch=_body("p"))
        else:
            model.opset_import.append(helper.make_opsetid("f", 1))
            model.graph.node.insert(0, helper.make_node("F", ["x"], ["w"], domain="f"))
            constant.output[0] = "k"
            model.functions.append(function("f", "F", ["a"], ["b"], [constant, helper.make_node("Add", ["a", "k"], ["b"])]))
        return written(path.parent, model.SerializeToString())

    return make


EXTERNAL: dict[str, Make] = {
    "no file name": external(),
    "a missing file": external(location="none.bin"),
    "too short a file": external(location="short.bin"),
    "above the folder": external(location="../outside"),
    "above the folder by a detour": external(location="sub/../../outside"),
    "above the folder, backslashes": external(location="..\\outside"),
    "an absolute path": external(location="{folder}/outside"),
    "a file URL": external(location="file://{folder}/outside"),
    "a link to the outside": external(location="link"),
    "a relative link to the outside": external(location="relative"),
    "a link to a link": external(location="chain"),
    "a linked folder": external(location="up/outside"),
    "a link to itself": external(location="loop"),
    "a pipe": external(location="pipe"),
    "a device by a link": external(location="zero"),
    "/dev/zero": external(location="/dev/zero"),
    "/dev/stdin": external(location="/dev/stdin"),
    "/proc/self/mem": external(location="/proc/self/mem"),
    "a folder": external(location="sub"),
    "the model's folder": external(location="."),
    "a name of control characters": external(location="\x1b[31m\n\0"),
    "a name too long": external(location="w" * 70_000),
    "a name of a lone surrogate": lambda folder: written(folder, referring(location="WWW").replace(b"WWW", b"\xed\xa0\x80")),
    "a negative offset": external(location="w.bin", offset="-4"),
    "a negative length": external(location="w.bin", length="-16"),
    "an offset beyond the end": external(location="w.bin", offset="16"),
    "an offset beyond every end": external(location="w.bin", offset=str(1 << 70)),
    "a length beyond the end": external(location="w.bin", length=str(1 << 70)),
    "a length beyond the tensor": external(location="w.bin", length="32"),
    "an offset of 5,000 digits": external(location="w.bin", offset="9" * 5000),
    "an offset that is no number": external(location="w.bin", offset="0x10"),
    "an offset of other digits": external(location="w.bin", offset="٤"),
    **{
        f"outside, from {where}": _escaping_body(where)
        for where in ("attribute", "attribute without a type", "list of tensors", "sparse values", "sparse attribute", "body", "function")
    },
}
