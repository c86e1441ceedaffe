"""The graph of a model as a report holds it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import synthetic
from onnxfuse import pipeline
from onnxfuse.report import graph

SCOPED = """<ir_version: 8, opset_import: ["" : 17]>
g (float[2, 4] x) => (float[2, 4] y) <float[4] w = {1.0, 2.0, 3.0, 4.0}> {
  a = Mul(x, w)
  b = Add(a, x)
  y = Relu(b)
}"""


def saved(model: onnx.ModelProto | str, path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(model) if isinstance(model, str) else model, path)
    return path


def named(side: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in side["nodes"]}


def linked(side: dict[str, Any]) -> set[tuple[str, str]]:
    return {(side["nodes"][a]["name"], side["nodes"][b]["name"]) for a, b, _ in side["edges"]}


def test_nodes_edges_shapes_and_weights(tmp_path: Path) -> None:
    side = graph.sides(saved(SCOPED, tmp_path / "m.onnx"), None)["before"]
    assert [(node.get("kind"), node["op"], node["name"]) for node in side["nodes"]] == [
        ("input", "", "x"),
        (None, "Mul", "a"),  # a node without a name is called by its output
        (None, "Add", "b"),
        (None, "Relu", "y"),
        ("output", "", "y"),
    ]
    assert side["edges"] == [[0, 1, 0], [0, 2, 0], [1, 2, 0], [2, 3, 0], [3, 4, 0]] or sorted(side["edges"]) == sorted(
        [[0, 1, 0], [0, 2, 0], [1, 2, 0], [2, 3, 0], [3, 4, 0]]
    )
    assert side["nodes"][0]["outputs"] == [["x", "float32[2, 4]"]]
    assert side["nodes"][1]["constants"] == ["w float32[4]"]
    assert side["groups"] == []
    assert side["omitted"] == 0


def test_scopes_become_groups_but_not_those_that_hold_all_or_nothing(tmp_path: Path) -> None:
    nodes, x = [], "x"
    for scope, count in (("/m/layer.0", 5), ("/m/layer.1/mlp", 4), ("/m/layer.1", 1), ("/m/head", 2)):
        for i in range(count):
            nodes.append(helper.make_node("Relu", [x], [f"t{len(nodes)}"], name=f"{scope}/Relu_{i}"))
            x = f"t{len(nodes) - 1}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", x)]
    proto = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    side = graph.sides(saved(proto, tmp_path / "m.onnx"), None)["before"]
    # "m" holds all nodes and is left out; "head" is too small.
    assert [(g["label"], g["kind"], g.get("parent")) for g in side["groups"]] == [
        ("layer.0", "scope", None),
        ("layer.1", "scope", None),
        ("mlp", "scope", 1),
    ]
    assert named(side)["/m/layer.1/mlp/Relu_0"]["group"] == 2
    assert "group" not in named(side)["/m/head/Relu_0"]


def test_a_long_graph_without_scopes_is_cut_at_narrow_places(tmp_path: Path) -> None:
    side = graph.sides(saved(synthetic.by_nodes(600), tmp_path / "m.onnx"), None)["before"]
    parts = [i for i, group in enumerate(side["groups"]) if group["kind"] == "part"]
    counts = [sum(node.get("group") == part for node in side["nodes"]) for part in parts]
    assert len(parts) > 8
    assert max(counts) <= graph.MOST_DIRECT
    group_of = [node.get("group") for node in side["nodes"]]
    between = {
        (group_of[a], group_of[b]) for a, b, _ in side["edges"] if group_of[a] != group_of[b] and None not in (group_of[a], group_of[b])
    }
    assert all(b == a + 1 for a, b in between)  # a chain: nothing reaches over a part
    crossing = [sum((group_of[a], group_of[b]) == pair for a, b, _ in side["edges"]) for pair in between]
    assert max(crossing) <= 2


def test_bodies_are_groups_and_captured_values_are_edges(tmp_path: Path) -> None:
    side = graph.sides(
        saved(
            """<ir_version: 8, opset_import: ["" : 17]>
            g (float[2] x, bool c) => (float[2] y) {
              a = Relu(x)
              y = If(c) <then_branch = t () => (float[2] p) { p = Neg(a) }, else_branch = e () => (float[2] q) { q = Abs(a) }>
            }""",
            tmp_path / "m.onnx",
        ),
        None,
    )["before"]
    nodes = named(side)
    labels = {side["groups"][nodes[name]["group"]]["label"] for name in ("p", "q")}
    assert labels == {"then_branch of y", "else_branch of y"}
    assert {("a", "p"), ("a", "q"), ("p", "y"), ("q", "y"), ("c", "y")} <= linked(side)


def test_fused_nodes_lead_back_to_what_they_took(tmp_path: Path) -> None:
    source, out = saved(synthetic.by_nodes(120), tmp_path / "m.onnx"), tmp_path / "out.onnx"
    result = pipeline.optimize(source, out, policy="all", check=False).to_dict()
    sites, both = result["sites"], graph.sides(source, out, result["sites"])
    before, after = both["before"]["nodes"], both["after"]["nodes"]
    fused = [node for node in after if node["op"].startswith("onnxfuse.")]
    assert {sites[node["site"]]["fusion"] for node in fused} == {"skip_layernorm", "bias_gelu", "attention"}
    for node in fused:
        took = [other for other in before if other.get("site") == node["site"]]
        assert len(took) >= 2
        # Through what canonical fusions made on the way: the nodes of the GELU itself, not the node that stood for it.
        ops = {other["op"] for other in took}
        assert ops >= {"bias_gelu": {"Erf"}, "attention": {"Softmax"}}.get(sites[node["site"]]["fusion"], {"Add"})
        group = both["before"]["groups"][took[0]["group"]]
        assert (group["kind"], group["site"]) == ("region", node["site"])
        assert node["outputs"][0][0] in {name for other in took for name, _ in other["outputs"]}


def test_a_file_says_its_own_sites(tmp_path: Path) -> None:
    source, out = saved(synthetic.by_nodes(120), tmp_path / "m.onnx"), tmp_path / "out.onnx"
    result = pipeline.optimize(source, out, policy="all", check=False)
    standing = {(d.site.fusion, d.site.output) for d in result.decisions if d.fused}
    said = {(site["fusion"], site["output"]) for site in graph.fused_sites(out)}
    assert said
    assert said <= standing
    assert {"skip_layernorm", "bias_gelu", "qkv_pack", "attention"} == {fusion for fusion, _ in said}


def test_kept_sites_are_marked_on_both_sides(tmp_path: Path) -> None:
    source, out = saved(synthetic.by_nodes(120), tmp_path / "m.onnx"), tmp_path / "out.onnx"
    result = pipeline.optimize(source, out, policy="none", check=False).to_dict()
    kept = {number for number, site in enumerate(result["sites"]) if site["decision"] == "kept"}
    assert kept
    for side in graph.sides(source, out, result["sites"]).values():
        assert {node["site"] for node in side["nodes"] if "site" in node} >= kept


def test_a_large_model_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST_NODES", 50)
    side = graph.sides(saved(synthetic.by_nodes(200), tmp_path / "m.onnx"), None)["before"]
    assert len(side["nodes"]) == 50
    assert side["omitted"] > 50
    assert all(a < 50 and b < 50 for a, b, _ in side["edges"])


def test_large_constants_and_long_attributes_are_left_off(tmp_path: Path) -> None:
    big = numpy_helper.from_array(np.zeros(100_000, np.float32), "v")
    nodes = [
        helper.make_node("Constant", [], ["k"], value=big),
        helper.make_node("Add", ["x", "k"], ["a"]),
        helper.make_node("Transpose", ["a"], ["y"], name="t", perm=[0], note="n" * 5000),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [100_000]) for name in ("x", "y")]
    proto = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    side = graph.sides(saved(proto, tmp_path / "m.onnx"), None)["before"]
    assert named(side)["a"]["constants"] == ["k float32[100000]"]
    assert len(named(side)["t"]["attributes"]["note"]) == graph.LONGEST_VALUE
    assert "Constant" not in {node["op"] for node in side["nodes"]}
    assert len(str(side)) < 5000


@pytest.mark.parametrize("value", ["[" * 20_000, "['', 'model.layer', 'node']", "__import__('os')", "7", ""])
def test_pytorchs_scopes_are_read_and_never_run(tmp_path: Path, value: str) -> None:
    proto = onnx.parser.parse_model(SCOPED)
    for node in proto.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=value)
    proto.graph.node.extend(helper.make_node("Relu", ["x"], [f"r{i}"], name=f"r{i}") for i in range(3))
    side = graph.sides(saved(proto, tmp_path / "m.onnx"), None)["before"]
    assert len(side["nodes"]) == 8
    assert not any(re.search("import", group["label"]) for group in side["groups"])
