"""What the tests of fusions share: building models, rewriting them as the pipeline does, and running them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse import pipeline
from onnxfuse.fusions import REGISTRY
from onnxfuse.fusions.base import Index, Miss, apply, find
from onnxfuse.graph import functions, read, write
from onnxfuse.graph.model import Model

NEWEST = onnx.defs.onnx_opset_version()
OPSETS = (9, 11, 13, 14, 17, 18, 20, 21, 23, NEWEST)
# The newest opset and IR version that the installed onnxruntime runs.
RUN_OPSET = min(NEWEST, 26)
RUN_IR = 10

ort.set_default_logger_severity(4)


@dataclass
class Net:
    """A graph under construction. `op` appends a node and returns the name of its first output."""

    opset: int = 17
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    constant_nodes: bool = False  # constants become Constant nodes instead of initializers
    prefix: str = "t"

    def name(self, stem: str | None = None) -> str:
        return f"{stem or self.prefix}{len(self.nodes) + len(self.constants)}"

    def op(self, op_type: str, *inputs: str, out: str | Sequence[str] | None = None, domain: str = "", **attrs: Any) -> str:
        outputs = [out] if isinstance(out, str) else list(out) if out else [self.name()]
        self.nodes.append(helper.make_node(op_type, list(inputs), outputs, domain=domain, **attrs))
        return outputs[0]

    def const(self, value: Any, dtype: Any = np.float32, name: str | None = None) -> str:
        name = name or self.name(f"{self.prefix}c")
        tensor = numpy_helper.from_array(np.asarray(value).astype(dtype), name)
        if self.constant_nodes:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.constants.append(tensor)
        return name

    def mean(self, x: str, axes: Sequence[int] = (-1,), keepdims: int = 1, op: str = "ReduceMean") -> str:
        """A reduction; its axes became an input in version 18."""
        if self.opset >= 18:
            return self.op(op, x, self.const(list(axes), np.int64), keepdims=keepdims)
        return self.op(op, x, axes=list(axes), keepdims=keepdims)

    def model(
        self, inputs: Iterable[onnx.ValueInfoProto], outputs: Iterable[onnx.ValueInfoProto | str], ir: int | None = None, **kwargs: Any
    ) -> ModelProto:
        given = list(inputs)
        if (ir or RUN_IR) < 4:  # initializers are inputs too
            given += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in self.constants]
        wanted = [onnx.ValueInfoProto(name=value) if isinstance(value, str) else value for value in outputs]
        graph = helper.make_graph(self.nodes, "g", given, wanted, self.constants, **kwargs)
        return make(graph, self.opset, ir)


def make(graph: onnx.GraphProto, opset: int, ir: int | None = None) -> ModelProto:
    """A model, its outputs' missing types filled in by shape inference."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir or RUN_IR)
    if any(not value.type.WhichOneof("value") for value in model.graph.output):
        typed = {value.name: value for value in onnx.shape_inference.infer_shapes(model).graph.output}
        for value in model.graph.output:
            value.CopyFrom(typed[value.name])
    return model


def text(source: str, ir: int = RUN_IR, opset: int = 17) -> ModelProto:
    """A model from onnx's text form of a graph."""
    return onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]>\n{source}')


def value(name: str, shape: Sequence[int | str | None] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def load(model: ModelProto) -> Model:
    return read.from_proto(copy.deepcopy(model))


def fuse(model: ModelProto, only: Iterable[str] | None = None) -> tuple[ModelProto, list[tuple[str, str | None]], list[Miss]]:
    """The rewritten model, (fusion, variant) of every site, and the near misses. `only` names fusions; what they need is done first."""
    loaded = load(model)
    pipeline.tidy(loaded)
    # elementwise takes what all others leave, so that it is looked for only where it is asked for.
    wanted = {fusion.name for fusion in REGISTRY} - {"elementwise"} if only is None else set(only)
    names = {need for fusion in REGISTRY if fusion.name in wanted for need in (fusion.name, *fusion.needs)}
    sites: list[tuple[str, str | None]] = []
    misses: list[Miss] = []
    for fusion in REGISTRY:
        if fusion.name not in names:
            continue
        matches, missed = find(fusion, loaded, Index.of(loaded))
        sites += [(fusion.name, fusion.variant(match)) for match in matches]
        misses += missed
        apply(fusion, matches, loaded)
    return write.to_proto(loaded), sites, misses


def undo(model: ModelProto) -> ModelProto:
    loaded = load(model)
    functions.undo(loaded)
    return write.to_proto(loaded)


def run(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs in onnxruntime, optimizations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def graphs(graph: onnx.GraphProto) -> Iterable[onnx.GraphProto]:
    """A graph and all its subgraphs."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def ops(model: ModelProto, *, constants: bool = False) -> list[str]:
    """Operator types in order, subgraphs after the node that holds them; domain onnxfuse as a prefix."""
    return [
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        for graph in graphs(model.graph)
        for node in graph.node
        if constants or node.op_type != "Constant"
    ]


def names(sites: Iterable[tuple[str, str | None]]) -> list[str]:
    return [name for name, _ in sites]


def initializers(model: ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def interface(model: ModelProto) -> tuple[Any, ...]:
    """What a rewrite must keep: graph inputs and outputs as declared, IR version, the standard opset, metadata."""
    given = {t.name for t in model.graph.initializer} if model.ir_version < 4 else set()
    inputs = [value.SerializeToString() for value in model.graph.input if value.name not in given]
    outputs = [value.SerializeToString() for value in model.graph.output]
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return inputs, outputs, model.ir_version, opset, [(p.key, p.value) for p in model.metadata_props]


def check_names(model: ModelProto) -> None:
    """No node name is given twice in the whole model, and no tensor name twice where both can be read."""
    nodes = [node.name for graph in graphs(model.graph) for node in graph.node if node.name]
    assert len(nodes) == len(set(nodes)), sorted(name for name in nodes if nodes.count(name) > 1)
    _check_scope(model.graph, frozenset())


def _check_scope(graph: onnx.GraphProto, outer: frozenset[str]) -> None:
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}  # one may be the default of the other
    made = [*given, *(name for node in graph.node for name in node.output if name)]
    assert len(made) == len(set(made)), sorted(name for name in made if made.count(name) > 1)
    assert not outer & set(made), sorted(outer & set(made))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _check_scope(attribute.g, outer | set(made))


def same(got: Sequence[np.ndarray], want: Sequence[np.ndarray], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=rtol, atol=atol)


def check(
    model: ModelProto,
    feeds: Mapping[str, np.ndarray],
    only: Iterable[str] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    full_check: bool = True,
) -> tuple[ModelProto, list[tuple[str, str | None]], list[Miss]]:
    """Rewrites `model` and proves it: outputs, interface, validity, names, undo, and that a second time changes nothing."""
    fused, sites, misses = fuse(model, only)
    want = run(model, feeds)
    same(run(fused, feeds), want, rtol, atol)
    proved(model, fused, only, full_check)
    same(run(undo(fused), feeds), want, rtol, atol)
    return fused, sites, misses


def proved(model: ModelProto, fused: ModelProto, only: Iterable[str] | None = None, full_check: bool = True) -> None:
    """All that can be said of a rewritten model without running it."""
    onnx.checker.check_model(fused, full_check=full_check)
    assert interface(fused) == interface(model)
    check_names(fused)
    types_right(fused)
    again, sites, _ = fuse(fused, only)
    assert sites == []
    assert without_types(again) == without_types(fused)


def without_types(model: ModelProto) -> ModelProto:
    """The model without what it says of inner types: after a rewrite, inference may find more of them."""
    bare = copy.deepcopy(model)
    for graph in graphs(bare.graph):
        del graph.value_info[:]
        for output in graph.output if graph is not bare.graph else ():
            output.ClearField("type")
    return bare


def types_right(model: ModelProto) -> None:
    """Types and shapes that the file states are those that inference finds."""
    bare = copy.deepcopy(model)
    del bare.graph.value_info[:]
    found = {v.name: v for v in onnx.shape_inference.infer_shapes(bare, data_prop=True).graph.value_info}
    for said in model.graph.value_info:
        if said.name not in found:
            continue
        one, other = said.type.tensor_type, found[said.name].type.tensor_type
        assert one.elem_type == other.elem_type, said.name
        if one.HasField("shape") and other.HasField("shape"):
            assert len(one.shape.dim) == len(other.shape.dim), said.name
            for a, b in zip(one.shape.dim, other.shape.dim, strict=True):
                assert not (a.HasField("dim_value") and b.HasField("dim_value")) or a.dim_value == b.dim_value, said.name


# ------------------------------------------------------------------------------------- formulas, in float64


def layer_norm(x: np.ndarray, scale: Any = 1.0, bias: Any = 0.0, epsilon: float = 1e-5, axes: tuple[int, ...] = (-1,)) -> np.ndarray:
    x = np.asarray(x, np.float64)
    centered = x - x.mean(axis=axes, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=axes, keepdims=True) + epsilon) * np.asarray(scale, np.float64) + np.asarray(
        bias, np.float64
    )


def rms_norm(x: np.ndarray, scale: Any = 1.0, epsilon: float = 1e-5) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * np.asarray(scale, np.float64)


def gelu(x: np.ndarray, variant: str) -> np.ndarray:
    x = np.asarray(x, np.float64)
    if variant == "erf":
        return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if variant == "tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-1.702 * x))


def silu(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / (1 + np.exp(-x))


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
