"""What TensorRT's parser is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxfuse.engine import prepare
from onnxfuse.errors import BadInput
from tests.engine import models

ALL = frozenset({"SkipLayerNormalization", "SkipRMSNormalization", "BiasGelu"})


def prepared(path: Path, ops: frozenset[str]) -> onnx.ModelProto:
    return onnx.load_from_string(prepare.for_parser(path, ops))


def outputs(model: bytes, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def test_plugin_nodes_lose_their_function_and_name_their_creator(tmp_path: Path) -> None:
    model = prepared(models.saved(models.block(), tmp_path), ALL)
    assert not model.functions
    by_name = {node.name: node for node in model.graph.node}
    norm = attributes(by_name["norm_0"])
    assert norm["plugin_namespace"] == b"onnxfuse"
    assert norm["plugin_version"] == b"1"
    assert (norm["has_beta"], norm["outputs"]) == (1, 2)
    kinds = {a.name: a.type for a in by_name["norm_0"].attribute}
    assert kinds["plugin_version"] == onnx.AttributeProto.STRING
    assert kinds["outputs"] == onnx.AttributeProto.INT
    gelu = attributes(by_name["gelu_0"])
    assert gelu == {"approximate": b"none", "plugin_namespace": b"onnxfuse", "plugin_version": b"1"}
    assert by_name["norm_0"].domain == "onnxfuse"


def test_canonical_operators_are_inlined_and_named_after_the_node(tmp_path: Path) -> None:
    model = prepared(models.saved(models.block(), tmp_path), ALL)
    assert [node.name for node in model.graph.node] == ["fc", "gelu_0", "norm_0", "silu_0/Sigmoid_2", "silu_0/Mul"]
    assert {o.domain for o in model.opset_import} == {"", "onnxfuse"}


@pytest.mark.parametrize("ops", [frozenset(), frozenset({"BiasGelu"})])
def test_without_plugins_values_are_those_of_the_functions(tmp_path: Path, ops: frozenset[str]) -> None:
    path = models.saved(models.block(), tmp_path)
    model = prepared(path, ops)
    left = {node.op_type for node in model.graph.node if node.domain == "onnxfuse"}
    assert left == ops
    if not ops:
        assert not model.functions
        assert {o.domain for o in model.opset_import} == {""}
        feeds = models.feeds()
        for got, want in zip(outputs(model.SerializeToString(), feeds), outputs(path.read_bytes(), feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_inputs_outputs_and_weights_are_kept(tmp_path: Path) -> None:
    original = models.block()
    model = prepared(models.saved(original, tmp_path), ALL)
    assert list(model.graph.input) == list(original.graph.input)
    assert list(model.graph.output) == list(original.graph.output)
    assert list(model.graph.initializer) == list(original.graph.initializer)
    assert model.ir_version == original.ir_version


def test_unused_sum_and_absent_inputs(tmp_path: Path) -> None:
    model = models.block()
    norm = next(n for n in model.graph.node if n.op_type == "SkipLayerNormalization")
    norm.output[1] = ""
    norm.input[3] = ""
    norm.input.append("b")
    del model.graph.output[1]
    node = next(n for n in prepared(models.saved(model, tmp_path), ALL).graph.node if n.name == "norm_0")
    assert list(node.output) == ["n"]
    assert list(node.input) == ["g", "x", "gamma", "b"]
    given = attributes(node)
    assert (given["has_beta"], given["outputs"]) == (0, 1)


def test_stale_plugin_attributes_are_replaced(tmp_path: Path) -> None:
    model = models.block()
    norm = next(n for n in model.graph.node if n.op_type == "SkipLayerNormalization")
    norm.attribute.append(helper.make_attribute("plugin_version", "7"))
    model.functions[0].attribute.append("plugin_version")
    node = next(n for n in prepared(models.saved(model, tmp_path), ALL).graph.node if n.name == "norm_0")
    assert [helper.get_attribute_value(a) for a in node.attribute if a.name == "plugin_version"] == [b"1"]


def test_nodes_in_subgraphs_are_prepared_too(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("BiasGelu", ["x", "b"], [f"{name}_g"], domain="onnxfuse", approximate="none"),
            helper.make_node("Silu", [f"{name}_g"], [f"{name}_y"], name=f"{name}_silu", domain="onnxfuse"),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [2, 4])])

    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("z"))],
        "g",
        [
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, [4]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxfuse", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[models.bias_gelu(), models.silu()])
    result = prepared(models.saved(model, tmp_path), ALL)
    (conditional,) = result.graph.node
    assert conditional.name == "If:y"
    for attribute in conditional.attribute:
        ops = [node.op_type for node in attribute.g.node]
        assert ops == ["BiasGelu", "Sigmoid", "Mul"]
        assert attributes(attribute.g.node[0])["plugin_namespace"] == b"onnxfuse"


def test_external_data_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "ext.onnx"
    onnx.save_model(models.block(), str(path), save_as_external_data=True, location="ext.bin", size_threshold=0)
    model = prepared(path, ALL)
    references = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    assert references == {"ext.bin"}
    assert not any(t.raw_data for t in model.graph.initializer)


def test_external_data_that_are_missing_or_outside_the_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model" / "ext.onnx"
    path.parent.mkdir()
    onnx.save_model(models.block(), str(path), save_as_external_data=True, location="ext.bin", size_threshold=0)
    data = path.with_name("ext.bin")
    data.rename(tmp_path / "ext.bin")
    with pytest.raises(BadInput, match=r"ext\.bin"):
        prepare.read(path)
    data.symlink_to(tmp_path / "ext.bin")
    with pytest.raises(BadInput, match=r"ext\.bin"):
        prepare.read(path)


def test_a_node_with_neither_plugin_nor_function_is_named(tmp_path: Path) -> None:
    model = models.block()
    del model.functions[1]
    with pytest.raises(BadInput, match=r"onnxfuse\.BiasGelu has no plugin and no function"):
        prepare.for_parser(models.saved(model, tmp_path), frozenset())


def test_functions_of_other_domains_are_left_to_tensorrt(tmp_path: Path) -> None:
    model = models.block()
    own = models.silu()
    own.domain = "mine"
    model.functions.append(own)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    model.graph.node[-1].domain = "mine"
    result = prepared(models.saved(model, tmp_path), ALL)
    assert [f.domain for f in result.functions] == ["mine"]


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08"])
def test_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"bad\.onnx: not an ONNX model"):
        prepare.for_parser(path, ALL)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        prepare.for_parser(tmp_path / "absent.onnx", ALL)
    with pytest.raises(BadInput, match="is a directory"):
        prepare.for_parser(tmp_path, ALL)


def test_a_sum_that_nobody_reads_is_not_asked_for(tmp_path: Path) -> None:
    model = models.block()
    del model.graph.output[1]  # it still has its name in the node
    node = next(n for n in prepared(models.saved(model, tmp_path), ALL).graph.node if n.name == "norm_0")
    assert list(node.output) == ["n"]
    assert attributes(node)["outputs"] == 1


@pytest.mark.parametrize(("op_type", "kind"), [("BiasGelu", None), ("BiasGeluTanh", b"tanh"), ("BiasQuickGelu", b"quick")])
def test_kinds_of_a_gelu_have_one_creator(tmp_path: Path, op_type: str, kind: bytes | None) -> None:
    model = models.block()
    gelu = next(n for n in model.graph.node if n.name == "gelu_0")
    gelu.op_type = op_type
    if kind is not None:
        del gelu.attribute[:]
    path = models.saved(model, tmp_path)
    assert prepare.plugin_ops_in(path, ALL) == {op_type, "SkipLayerNormalization"}
    node = next(n for n in prepared(path, ALL).graph.node if n.name == "gelu_0")
    assert node.op_type == "BiasGelu"
    assert attributes(node)["approximate"] == (kind or b"none")


def test_the_layer_norm_of_an_older_version_is_given_as_the_native_one(tmp_path: Path) -> None:
    """Its function would be taken apart into primitives in float32; the parser has an importer whatever version the model imports."""
    from onnxfuse.fusions.layernorm import FUSION

    (function,) = FUSION.functions(13)
    node = helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"], name="norm", domain="onnxfuse", epsilon=0.25, dtype=1)
    shapes = {"x": [2, 8], "scale": [8], "bias": [8], "y": [2, 8]}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([node], "g", values[:3], values[3:])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("onnxfuse", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=7)
    made = prepared(models.saved(model, tmp_path), frozenset())
    (native,) = made.graph.node
    assert (native.domain, native.op_type, native.name) == ("", "LayerNormalization", "norm")
    assert attributes(native) == {"axis": -1, "epsilon": 0.25}
    assert not made.functions
    # The same values, where a runtime knows the operator.
    made.opset_import[0].version = 17
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("x", (2, 8)), ("scale", 8), ("bias", 8))}
    want = outputs(model.SerializeToString(), feeds)[0]
    np.testing.assert_allclose(outputs(made.SerializeToString(), feeds)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op_type", "approximate"), [("Gelu", "none"), ("GeluTanh", "tanh")])
def test_the_gelu_of_an_older_version_is_given_as_the_native_one(tmp_path: Path, op_type: str, approximate: str) -> None:
    from onnxfuse.fusions.gelu import FUSION

    (function,) = [function for function in FUSION.functions(17) if function.name == op_type]
    node = helper.make_node(op_type, ["x"], ["y"], name="gelu", domain="onnxfuse", dtype=1)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxfuse", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)
    made = prepared(models.saved(model, tmp_path), frozenset())
    (native,) = made.graph.node
    assert (native.domain, native.op_type, native.name) == ("", "Gelu", "gelu")
    assert attributes(native) == {"approximate": approximate.encode()}
    made.opset_import[0].version = 20  # the same values, where a runtime knows the operator
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    want = outputs(model.SerializeToString(), feeds)[0]
    np.testing.assert_allclose(outputs(made.SerializeToString(), feeds)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "sm", "left"), [(TensorProto.FLOAT16, 75, True), (TensorProto.FLOAT16, 80, False), (TensorProto.FLOAT, 75, False)]
)
def test_kernels_of_half_types_that_an_old_gpu_lacks_are_left_to_tensorrt(tmp_path: Path, dtype: int, sm: int, left: bool) -> None:
    path = tmp_path / "model.onnx"
    nodes = [
        helper.make_node("FusedAttention", ["q", "k", "v"], ["a"], domain="onnxfuse", dtype=dtype),
        helper.make_node("BiasGelu", ["a", "b"], ["y"], domain="onnxfuse", dtype=dtype),
    ]
    values = [helper.make_tensor_value_info(name, dtype, None) for name in ("q", "k", "v", "b", "y")]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("onnxfuse", 1)]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", values[:-1], values[-1:]), opset_imports=opsets), path)
    said: list[str] = []
    ops = frozenset({"FusedAttention", "BiasGelu", "LinearGelu"})
    assert prepare.taken_in_half(path, ops, sm, said.append) == ops - ({"FusedAttention"} if left else set())
    words = ["FusedAttention: its kernels take 16-bit types from sm_80 on, and this is for sm_75: left to TensorRT"]
    assert said == (words if left else [])
