"""A model that is read and written is the same model."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.errors import BadInput
from onnxfuse.graph import functions, query, read, skeleton, write
from onnxfuse.graph.clean import clean
from onnxfuse.graph.model import Model
from tests.graph.models import function, load, normal, parse, run, saved, transformer

RELU = """<ir_version: 8, opset_import: ["" : 17]> g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }"""


def interface(model: onnx.ModelProto) -> object:
    fields = ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string")
    return (
        [getattr(model, field) for field in fields],
        list(model.opset_import),
        list(model.metadata_props),
        model.graph.name,
        model.graph.doc_string,
        list(model.graph.metadata_props),
        list(model.graph.input),
        list(model.graph.output),
        list(model.graph.quantization_annotation),
    )


def test_everything_but_the_nodes_is_written_as_it_was_read(tmp_path: Path) -> None:
    model = parse(
        """<ir_version: 9, opset_import: ["" : 18, "ai.onnx.ml" : 3], producer_name: "maker", model_version: 7>
        g (float[1] unused, float[N, ?, 3] x, int64[N] ids) => (float[N, ?, 3] second, float[N, ?, 3] first) {
            first = Relu(x)
            second = Abs(x)
        }"""
    )
    model.doc_string, model.graph.doc_string = "about", "the graph"
    model.metadata_props.add(key="author", value="someone")
    model.graph.metadata_props.add(key="k", value="v")
    model.graph.input[1].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    model.graph.input[1].type.denotation = "TENSOR"
    model.graph.output[0].doc_string = "an output"
    model.graph.quantization_annotation.add(tensor_name="first")
    model.graph.node[0].doc_string = "why"
    model.graph.node[0].metadata_props.add(key="namespace", value="block.0")
    after = saved(load(model, tmp_path), tmp_path)
    assert interface(after) == interface(model)
    for node in model.graph.node:
        node.ClearField("domain")  # written by onnx's text parser, as the empty text
    assert list(after.graph.node) == list(model.graph.node)


def test_rare_attributes_survive(tmp_path: Path) -> None:
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("v", TensorProto.FLOAT, [2], [1.0, 2.0]), helper.make_tensor("i", TensorProto.INT64, [2], [1, 3]), [4]
    )
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    nodes = [
        helper.make_node("Optional", [], ["o"], type=kind),
        helper.make_node("OptionalHasElement", ["o"], ["has"]),
        helper.make_node("Constant", [], ["c"], sparse_value=sparse),
        helper.make_node("Odd", ["x"], ["odd"], domain="own", strings=[b"\xff\xfe", b"ok"], text=b"\xff"),
    ]
    nodes[3].attribute.append(helper.make_attribute("none", [], attr_type=onnx.AttributeProto.FLOATS))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("has", TensorProto.BOOL, []), helper.make_tensor_value_info("c", TensorProto.FLOAT, [4]),
         helper.make_tensor_value_info("odd", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("own", 2)], ir_version=8)
    path = tmp_path / "out.onnx"
    write.save(load(model, tmp_path), path)
    assert list(onnx.load(path).graph.node) == nodes


def test_an_input_with_a_default_is_no_constant_and_keeps_its_default(tmp_path: Path) -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[2] x, float[2] scale) => (float[2] y) { y = Mul(x, scale) }""",
        scale=np.array([2, 3], np.float32),
    )
    loaded = load(model, tmp_path)
    scale = loaded.graph.nodes[0].inputs[1]
    assert query.constant(scale) is None
    assert query.scalar(scale) is None
    after = saved(loaded, tmp_path)
    x = np.ones(2, np.float32)
    assert run(after, {"x": x})["y"].tolist() == [2, 3]
    assert run(after, {"x": x, "scale": 5 * x})["y"].tolist() == [5, 5]
    assert [value.name for value in after.graph.input] == ["x", "scale"]


def test_before_ir_4_initializers_are_constants_and_stay_declared(tmp_path: Path) -> None:
    model = parse(
        """<ir_version: 3, opset_import: ["" : 9]> g (float[2] x, float[2] gone, float[2] scale) => (float[2] y) { y = Mul(x, scale) }""",
        scale=np.array([2, 3], np.float32),
        gone=np.zeros(2, np.float32),
    )
    loaded = load(model, tmp_path)
    node = loaded.graph.nodes[0]
    value = query.constant(node.inputs[1])
    assert value is not None
    assert value.tolist() == [2, 3]
    assert [tensor.name for tensor in loaded.graph.inputs] == ["x"]
    import onnx_graphsurgeon as gs

    node.inputs[1] = gs.Constant(loaded.unique_name("scale"), np.array([4, 5], np.float32))
    after = saved(loaded, tmp_path)
    assert [v.name for v in after.graph.input] == ["x", "scale_1"]
    assert run(after, {"x": np.ones(2, np.float32)})["y"].tolist() == [4, 5]


BRANCHES = """<ir_version: 3, opset_import: ["" : 9]> g (float[3] x, bool flag) => (float[3] y) {
    y = If (flag) <
        then_branch: graph = p () => (float[3] r) { c = Constant <value: tensor = float[3] {1, 2, 3}> () r = Add(x, c) },
        else_branch: graph = q () => (float[3] s) { c = Constant <value: tensor = float[3] {4, 5, 6}> () s = Mul(x, c) }>
}"""


@pytest.mark.parametrize("flag", [False, True])
def test_before_ir_4_constants_of_bodies_stay_nodes(tmp_path: Path, flag: bool) -> None:
    model = parse(BRANCHES)
    loaded = load(model, tmp_path)
    clean(loaded)
    inner = [node for graph in loaded.graphs() for node in graph.nodes if node.op != "If"]
    assert [(node.op, query.constant(node.inputs[1]) is not None) for node in inner] == [("Add", True), ("Mul", True)]
    after = saved(loaded, tmp_path)
    assert [v.name for v in after.graph.input] == ["x", "flag"]
    assert not after.graph.initializer
    feeds = {"x": normal(3), "flag": np.array(flag)}
    np.testing.assert_array_equal(run(after, feeds)["y"], run(model, feeds)["y"])


def test_a_sparse_initializer_becomes_dense(tmp_path: Path) -> None:
    model = parse(RELU.replace("Relu(x)", "Mul(x, w)"))
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.5, -2.0])
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, helper.make_tensor("", TensorProto.INT64, [2, 2], [0, 1, 1, 2]), [2, 3])
    )
    loaded = load(model, tmp_path)
    value = query.constant(loaded.graph.nodes[0].inputs[1])
    assert value is not None
    assert value.tolist() == [[0, 1.5, 0], [0, 0, -2]]
    assert run(saved(loaded, tmp_path), {"x": np.ones((2, 3), np.float32)})["y"].tolist() == [[0, 1.5, 0], [0, 0, -2]]


def test_nodes_in_any_order_are_sorted(tmp_path: Path) -> None:
    model = transformer(1)
    nodes = list(model.graph.node)[::-1]
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(model)
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(nodes)
    x = {"x": normal(2, 5, 32)}
    after = saved(load(shuffled, tmp_path), tmp_path)
    np.testing.assert_array_equal(run(after, x)["y"], run(model, x)["y"])


LOOP = """<ir_version: 8, opset_import: ["" : 17]> g (float[64,64] x, bool flag) => (float[64,64] y, float[64,64] z) {
    n = Constant <value_int: int = 2> ()
    go = Constant <value: tensor = bool {1}> ()
    y = Loop (n, go, x) <body: graph = b (int64 i, bool c, float[64,64] h) => (bool c2, float[64,64] h2) {
        c2 = Identity(c)
        t = MatMul(h, w)
        h2 = If (flag) <then_branch: graph = p () => (float[64,64] r) { r = Add(h, w) },
                        else_branch: graph = q () => (float[64,64] r) { r = Tanh(t) }>
    }>
    z = MatMul(x, w)
}"""


@pytest.mark.parametrize("flag", [False, True])
def test_subgraphs_capture_outer_tensors_and_weights_are_stored_once(tmp_path: Path, flag: bool) -> None:
    model = parse(LOOP, w=normal(64, 64) / 8)
    loaded = load(model, tmp_path)
    weights = {id(t): t for graph in loaded.graphs() for node in graph.nodes for t in node.inputs if t.name == "w"}
    assert len(weights) == 1
    assert len(query.readers(next(iter(weights.values())))) == 3
    after = saved(loaded, tmp_path)
    assert after.ByteSize() < model.ByteSize() + 2000
    feeds = {"x": normal(64, 64, seed=1), "flag": np.array(flag)}
    for name, want in run(model, feeds).items():
        np.testing.assert_array_equal(run(after, feeds)[name], want)


def test_names_inside_of_bodies_are_taken(tmp_path: Path) -> None:
    loaded = load(parse(LOOP, w=normal(64, 64)), tmp_path)  # both branches have an `r`
    tensors = {id(t): t.name for graph in loaded.graphs() for node in graph.nodes for t in (*node.inputs, *node.outputs) if t.name}
    assert sorted(tensors.values()).count("r") == 2
    assert loaded.unique_name("r") not in tensors.values()
    assert loaded.unique_name("r") != loaded.unique_name("r")


def test_value_infos_that_contradict_the_inputs_are_not_believed(tmp_path: Path) -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17, "own" : 1]> g (float[N,3] x) => (float[M,3] y)
        <float[1,3] a, float[1,3] b> { a = Relu(x) b = own.Op(a) y = Abs(b) }"""
    )
    loaded = load(model, tmp_path)
    shapes = {t.name: query.shape(t) for node in loaded.graph.nodes for t in node.outputs}
    assert shapes["a"] == ["N", 3]
    assert shapes["b"] != [1, 3]


def test_value_infos_fill_in_what_inference_cannot_know(tmp_path: Path) -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17, "own" : 1]> g (float[N,3] x) => (float[N,4] y)
        <float[N,4] b> { b = own.Op(x) y = Abs(b) }"""
    )
    loaded = load(model, tmp_path)
    assert query.shape(loaded.graph.nodes[0].outputs[0]) == ["N", 4]
    assert query.same_shape(loaded.graph.nodes[0].outputs[0], loaded.graph.nodes[1].outputs[0])


# ------------------------------------------------------------------------------------------------------ external data


def external(folder: Path, name: str = "m.onnx", data: str = "weights.bin") -> onnx.ModelProto:
    """A transformer whose weights lie in `data`."""
    model = transformer(1)
    folder.mkdir(exist_ok=True)
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    onnx.save(whole, str(folder / name), save_as_external_data=True, location=data, size_threshold=100)
    return model


def test_external_data_goes_to_a_new_file_beside_the_output(tmp_path: Path) -> None:
    model = external(tmp_path / "in")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "fused.onnx"
    write.save(read.load(tmp_path / "in" / "m.onnx"), target)
    assert sorted(path.name for path in target.parent.iterdir()) == ["fused.onnx", "fused.onnx.data"]
    assert target.stat().st_size < 20_000
    x = {"x": normal(1, 4, 32)}
    np.testing.assert_array_equal(run(target, x)["y"], run(model, x)["y"])


def test_writing_over_the_source_reads_it_to_the_end(tmp_path: Path) -> None:
    model = external(tmp_path)
    path = tmp_path / "m.onnx"
    x = {"x": normal(1, 4, 32)}
    for _ in range(3):
        write.save(read.load(path), path)
        np.testing.assert_array_equal(run(path, x)["y"], run(model, x)["y"])
    assert (tmp_path / "weights.bin").exists()
    embedded = tmp_path / "e.onnx"
    embedded.write_bytes(model.SerializeToString())
    loaded = read.load(embedded)
    write.save(loaded, embedded)
    write.save(loaded, embedded)
    np.testing.assert_array_equal(run(embedded, x)["y"], run(model, x)["y"])


def test_a_model_beyond_what_protobuf_holds_gets_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer(1)
    loaded = load(model, tmp_path)
    monkeypatch.setattr(write, "_MOST_INLINE", 30_000)
    write.save(loaded, tmp_path / "big.onnx")
    assert (tmp_path / "big.onnx.data").stat().st_size > 30_000
    x = {"x": normal(1, 4, 32)}
    np.testing.assert_array_equal(run(tmp_path / "big.onnx", x)["y"], run(model, x)["y"])


def test_external_weights_are_mapped_not_read(tmp_path: Path) -> None:
    data = tmp_path / "w.bin"
    with open(data, "wb") as file:
        file.truncate(8 << 30)  # a hole: takes no disk
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y)
        { s = Shape(w) c = Cast <to: int = 1> (s) y = Add(x, c) }"""
    )
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2 << 30], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    model.graph.initializer.append(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load(model, tmp_path)
    value = query.constant(loaded.graph.nodes[0].inputs[0])
    assert value is not None
    assert value.shape == (2 << 30,)
    assert value[-1] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    loaded = load(transformer(1), tmp_path)
    target = tmp_path / "out.onnx"
    target.write_bytes(b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(BadInput, match="cannot write") as caught:
            write.save(loaded, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert target.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "out.onnx"]


def test_weights_that_are_still_read_are_not_written_over(tmp_path: Path) -> None:
    model = transformer(1)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="w.bin")
    before = (tmp_path / "w.bin").read_bytes()
    with pytest.raises(BadInput, match=r"cannot write .*w\.bin: weights of the model are read from it"):
        write.save(read.load(tmp_path / "model.onnx"), tmp_path / "w.bin")
    assert (tmp_path / "w.bin").read_bytes() == before


def test_an_output_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    loaded = load(parse(RELU), tmp_path)
    for target in (tmp_path / "no" / "such" / "folder.onnx", tmp_path, Path("/proc/nothing.onnx")):
        with pytest.raises(BadInput, match="cannot write") as caught:
            write.save(loaded, target)
        assert "\n" not in str(caught.value)


def test_written_files_have_the_usual_permissions(tmp_path: Path) -> None:
    loaded = load(parse(RELU), tmp_path)
    mask = os.umask(0o027)
    try:
        write.save(loaded, tmp_path / "out.onnx")
    finally:
        os.umask(mask)
    assert (tmp_path / "out.onnx").stat().st_mode & 0o777 == 0o640


# ----------------------------------------------------------------------------------------------------------- functions

CALLS = """<ir_version: 8, opset_import: ["" : 17, "local" : 1]> g (float[2,8] x) => (float[2,8] y, float[2,8] inner)
{ inner = local.Twice(x) y = local.Twice(inner) }"""


def nested() -> onnx.ModelProto:
    model = parse(CALLS)
    once = function("local", "Once", ["a"], ["b"], [helper.make_node("Tanh", ["a"], ["t"]), helper.make_node("Add", ["t", "a"], ["b"])])
    calls = [helper.make_node("Once", ["a"], ["t"], domain="local"), helper.make_node("Once", ["t"], ["b"], domain="local")]
    twice = function("local", "Twice", ["a"], ["b"], calls)
    for entry in (twice, once):
        entry.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.extend([twice, once])
    return model


def test_functions_of_a_model_are_inlined(tmp_path: Path) -> None:
    model = nested()
    loaded = load(model, tmp_path)
    assert not loaded.functions
    assert {node.op for node in loaded.graph.nodes} == {"Tanh", "Add"}
    x = {"x": normal(2, 8)}
    want = run(model, x)
    for name, value in run(saved(loaded, tmp_path), x).items():
        np.testing.assert_array_equal(value, want[name])


def silu() -> onnx.FunctionProto:
    nodes = [helper.make_node("Sigmoid", ["X"], ["s"]), helper.make_node("Mul", ["X", "s"], ["Y"])]
    return function("onnxfuse", "Silu", ["X"], ["Y"], nodes)


def fused(model: Model) -> Model:
    """Puts one onnxfuse node where Sigmoid and Mul are."""
    import onnx_graphsurgeon as gs

    sigmoid, mul = model.graph.nodes
    output = mul.outputs[0]
    node = gs.Node("Silu", "silu", inputs=[sigmoid.inputs[0]], domain="onnxfuse")
    mul.outputs.clear()
    node.outputs.append(output)
    model.graph.nodes = [node]
    functions.add(model, silu())
    return model


SILU = """<ir_version: 8, opset_import: ["" : 17]> g (float[2,8] x) => (float[2,8] y) { s = Sigmoid(x) y = Mul(x, s) }"""


def test_a_fused_model_keeps_its_functions_and_undo_takes_them_out(tmp_path: Path) -> None:
    x = {"x": normal(2, 8)}
    want = run(parse(SILU), x)["y"]
    first = saved(fused(load(parse(SILU), tmp_path)), tmp_path, "fused.onnx")
    np.testing.assert_array_equal(run(first, x)["y"], want)
    again = read.load(tmp_path / "fused.onnx")
    assert [node.op for node in again.graph.nodes] == ["Silu"]
    assert functions.used_by(again) == {("onnxfuse", "Silu"): 1}
    assert saved(again, tmp_path, "again.onnx").SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)
    assert functions.undo(again) == 1
    plain = saved(again, tmp_path, "plain.onnx")
    assert [node.op_type for node in plain.graph.node] == ["Sigmoid", "Mul"]
    assert not plain.functions
    assert [(entry.domain, entry.version) for entry in plain.opset_import] == [("", 17)]
    np.testing.assert_array_equal(run(plain, x)["y"], want)
    assert functions.undo(again) == 0


def test_undo_reaches_into_bodies_and_keeps_weights(tmp_path: Path) -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17, "onnxfuse" : 1]> g (float[64,64] x, bool flag) => (float[64,64] y) {
        y = If (flag) <then_branch: graph = p () => (float[64,64] a) { t = MatMul(x, w) a = onnxfuse.Silu(t) },
                       else_branch: graph = q () => (float[64,64] b) { b = Relu(x) }> }""",
        w=normal(64, 64),
    )
    model.functions.append(silu())
    loaded = load(model, tmp_path)
    assert functions.undo(loaded) == 1
    after = saved(loaded, tmp_path)
    feeds = {"x": normal(64, 64, seed=3), "flag": np.array(True)}
    np.testing.assert_array_equal(run(after, feeds)["y"], run(model, feeds)["y"])
    assert [entry.domain for entry in after.opset_import] == [""]


def test_another_body_for_the_same_operator_is_refused(tmp_path: Path) -> None:
    loaded = fused(load(parse(SILU), tmp_path))
    functions.add(loaded, silu())
    other = silu()
    other.node[0].op_type = "HardSigmoid"
    with pytest.raises(BadInput, match="another body"):
        functions.add(loaded, other)


# ---------------------------------------------------------------------------------------------------------------- size


def test_thousands_of_nodes_agree(tmp_path: Path) -> None:
    model = transformer(40)
    assert len(model.graph.node) > 1900
    x = {"x": normal(1, 3, 32)}
    np.testing.assert_array_equal(run(saved(load(model, tmp_path), tmp_path), x)["y"], run(model, x)["y"])


def test_skeletons_hold_no_weights(tmp_path: Path) -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[2,512] x) => (float[2,512] y) { y = MatMul(x, w) }""", w=normal(512, 512)
    )
    bare, constants = skeleton.of_model(load(model, tmp_path))
    assert bare.ByteSize() < 1000
    assert list(constants) == ["w"]
    np.testing.assert_array_equal(constants["w"].array(), numpy_helper.to_array(model.graph.initializer[0]))
