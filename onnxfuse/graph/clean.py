"""Cleaning a graph before fusions look at it: constants folded, dead nodes and steps that do nothing removed.

What folding must not do: copy a weight that others still read (one public model grows from 85 to 643 MB that way), make
something large out of something small, or touch Q/DQ pairs, random operators, sequences and bodies.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import query, weights
from onnxfuse.graph.evaluate import evaluate
from onnxfuse.graph.ir import Constant, Node, bodies, detach, redirect, set_output, with_inner
from onnxfuse.graph.model import Model
from onnxfuse.graph.skeleton import retype

_SMALL = 64 << 10  # bytes; a result up to this size is always folded
_MOST_SMALL = 256 << 20  # bytes; what all small results of a graph may come to
_LARGE = 1 << 30  # bytes; a result beyond this size never is
_ROUNDS = 16

# Deterministic, of one kind of output whatever the values are, and safe to run in this process on any input.
_FOLDABLE = frozenset(
    """Abs Add And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Clip Concat ConstantOfShape
    Cos Cosh CumSum Div Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Greater GreaterOrEqual IsInf IsNaN
    Less LessOrEqual Log MatMul Max Mean Min Mod Mul Neg NonZero Not OneHot Or Pad Pow Range Reciprocal ReduceL1 ReduceL2 ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round ScatterElements ScatterND Shape Sigmoid Sign Sin Sinh
    Size Slice Softmax Softplus Split Sqrt Squeeze Sub Sum Tan Tanh Tile TopK Transpose Trilu Unsqueeze Where Xor""".split()  # noqa: SIM905
)
# The size of these results hangs on values, not on the shapes of the inputs: without an inferred shape they are left alone.
_SIZED_BY_VALUE = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Tile"})


def clean(model: Model) -> dict[str, int]:
    """Cleans `model` in place. Returns how many nodes went, by kind: constant, shape, identity, branch (If with a constant
    condition), dead. Graph inputs, outputs and the tensors that remain keep their names."""
    counts: Counter[str] = Counter()
    for _ in range(_ROUNDS):
        before = counts["shape"]
        graphs = list(model.graphs())
        outputs = query.Outputs(graphs)
        for graph in graphs:
            _lift_constants(graph, outputs, counts)
            _skip_identities(model, graph, outputs, counts)
            _fold_shapes(graph, outputs, counts)
        folded = sum(_fold(model, graph, outputs) for graph in graphs)
        counts["constant"] += folded
        if _inline_branches(model, counts):
            retype(model)
        elif not folded and counts["shape"] == before:
            break  # no value became known that was not
    counts["dead"] += sweep(model)
    return {kind: count for kind, count in sorted(counts.items()) if count}


def sweep(model: Model) -> int:
    """Removes nodes that contribute to no graph output, in place; returns how many, inner ones included."""
    needed = {id(tensor) for graph in model.graphs() for tensor in graph.outputs}
    dead: list[gs.Node] = []
    _sweep(model.graph, needed, dead)
    count = sum(1 for _ in with_inner(dead))
    detach(dead)
    return count


def _sweep(graph: gs.Graph, needed: set[int], dead: list[gs.Node]) -> None:
    kept: list[gs.Node] = []
    for node in reversed(graph.nodes):
        if any(id(tensor) in needed for tensor in node.outputs):
            kept.append(node)
            for body in bodies(node):
                _sweep(body, needed, dead)
            needed.update(id(tensor) for tensor in node.inputs)
        else:
            dead.append(node)
    if len(kept) < len(graph.nodes):
        graph.nodes = kept[::-1]


def _remove(graph: gs.Graph, gone: list[gs.Node]) -> None:
    if gone:
        ids = {id(node) for node in gone}
        graph.nodes = [node for node in graph.nodes if id(node) not in ids]
        detach(gone)


# ------------------------------------------------------------------------------------------------ steps that do nothing


def _lift_constants(graph: gs.Graph, outputs: query.Outputs, counts: Counter[str]) -> None:
    """Constant nodes become initializers."""
    gone = []
    for node in graph.nodes:
        if node.op == "Constant" and not node.domain and node.outputs[0] not in outputs:
            value = node.attrs.get("value")
            values = value._values if isinstance(value, gs.Constant) else query.constant(node.outputs[0])
            if values is not None:
                _become(graph, node.outputs[0], values)
                gone.append(node)
    counts["constant"] += len(gone)
    _remove(graph, gone)


def _become(graph: gs.Graph, tensor: gs.Tensor, values: Any) -> gs.Constant:
    """A constant takes the place and the name of `tensor`."""
    constant = Constant(tensor.name, values)
    constant.home = graph
    redirect(tensor, constant)
    return constant


def _skip_identities(model: Model, graph: gs.Graph, outputs: query.Outputs, counts: Counter[str]) -> None:
    gone = []
    for node in graph.nodes:
        if node.outputs and node.outputs[0] not in outputs and _does_nothing(node, model.opset, outputs):
            redirect(node.outputs[0], node.inputs[0])
            gone.append(node)
    counts["identity"] += len(gone)
    _remove(graph, gone)


def _does_nothing(node: gs.Node, opset: int, outputs: query.Outputs) -> bool:
    if node.domain or not node.inputs or node.inputs[0].is_empty():
        return False
    if node.op == "Identity":
        return True
    if node.op == "Cast":
        dtype = query.dtype(node.inputs[0])
        return dtype is not None and weights.elem_type(dtype) == node.attrs.get("to")
    return node.op == "Dropout" and _is_inference(node, opset) and not any(mask.outputs or mask in outputs for mask in node.outputs[1:])


def _is_inference(dropout: gs.Node, opset: int) -> bool:
    """Training mode was attribute is_test before opset 7, does not exist up to 11, and is the third input since 12."""
    if opset < 7:
        return bool(dropout.attrs.get("is_test", 0))
    if opset < 12 or len(dropout.inputs) < 3 or dropout.inputs[2].is_empty():
        return True
    mode = query.constant(dropout.inputs[2])
    return mode is not None and not mode.any()


# -------------------------------------------------------------------------------------------------------------- shapes

Dims = list[int | None]


def _fold_shapes(graph: gs.Graph, outputs: query.Outputs, counts: Counter[str]) -> None:
    """Replaces what is computed from static dimensions alone: Shape, and Gather, Slice... of a Shape where only some are static."""
    known: dict[int, tuple[Dims, bool]] = {}  # elements of a small integer tensor, and whether it is a scalar
    gone = []
    for node in graph.nodes:
        if node.domain or len(node.outputs) != 1:
            continue
        found = _elements(node, known)
        if found is None:
            continue
        known[id(node.outputs[0])] = found
        dims, is_scalar = found
        if None not in dims and node.outputs[0] not in outputs:
            values = np.asarray(dims, np.int64)
            _become(graph, node.outputs[0], values.reshape(()) if is_scalar else values)
            gone.append(node)
    counts["shape"] += len(gone)
    _remove(graph, gone)


def _elements(node: gs.Node, known: dict[int, tuple[Dims, bool]]) -> tuple[Dims, bool] | None:
    """What is known of the elements of a node's output, where it is made of dimensions."""
    if node.op in ("Shape", "Size"):
        shape = query.shape(node.inputs[0])
        if shape is None:
            return None
        dims: Dims = [size if isinstance(size, int) else None for size in shape]
        if node.op == "Shape":
            start, end = node.attrs.get("start", 0), node.attrs.get("end", len(dims))
            return dims[slice(start, end)], False
        return ([math.prod(dims)] if None not in dims else [None]), True  # type: ignore[arg-type]
    source = known.get(id(node.inputs[0])) if node.inputs else None
    if node.op == "Concat":
        return _concat(node, known)
    if source is None:
        return None
    dims, is_scalar = source
    if node.op == "Gather" and not is_scalar:
        index = query.constant(node.inputs[1])
        if index is None or index.dtype.kind not in "iu" or index.ndim > 1:
            return None
        if any(not -len(dims) <= i < len(dims) for i in index.reshape(-1)):
            return None
        return [dims[int(i)] for i in index.reshape(-1)], index.ndim == 0
    if node.op == "Slice" and not is_scalar:
        return _slice(node, dims)
    if node.op == "Unsqueeze" and is_scalar:
        return dims, False
    if node.op == "Squeeze" and len(dims) == 1 and not is_scalar:
        return dims, True
    if node.op == "Cast" and node.attrs.get("to") == weights.elem_type(np.int64):
        return dims, is_scalar
    return None


def _concat(node: gs.Node, known: dict[int, tuple[Dims, bool]]) -> tuple[Dims, bool] | None:
    dims: Dims = []
    if not any(id(tensor) in known for tensor in node.inputs):
        return None
    for tensor in node.inputs:
        part = known.get(id(tensor))
        if part is not None:
            if part[1]:
                return None
            dims += part[0]
        else:
            value = query.constant(tensor) if query.rank(tensor) == 1 and query.dtype(tensor) == np.int64 else None
            shape = query.shape(tensor)
            if value is not None:
                dims += [int(v) for v in value]
            elif shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] < 64:
                dims += [None] * shape[0]
            else:
                return None
    return dims, False


def _slice(node: gs.Node, dims: Dims) -> tuple[Dims, bool] | None:
    """Slice of a 1-D tensor, by attributes (before opset 10) or by inputs."""
    parts: list[list[int]] = []
    for i, name in enumerate(("starts", "ends", "axes", "steps"), start=1):
        default = {"axes": [0], "steps": [1]}.get(name)
        if len(node.inputs) > 1:
            given = i < len(node.inputs) and not node.inputs[i].is_empty()
            value = query.constant(node.inputs[i]) if given else default
        else:
            value = node.attrs.get(name, default)
        if value is None or len(value) != 1:
            return None
        parts.append([int(v) for v in value])
    (start,), (end,), (axis,), (step,) = parts
    if axis not in (0, -1) or step <= 0:
        return None
    return dims[start:end:step], False


# ------------------------------------------------------------------------------------------------------------- folding


def _fold(model: Model, graph: gs.Graph, outputs: query.Outputs) -> int:
    """Evaluates nodes whose inputs are all constant, small results all at once, weights one by one; returns how many."""
    small, large = _foldable(graph, outputs)
    gone = _replace(model, graph, small)
    for chain in _chains(large):
        read = [tensor._values for node in chain for tensor in node.inputs if isinstance(tensor, gs.Constant)]
        gone += _replace(model, graph, chain)
        for values in read:
            weights.release(values)
    _remove(graph, gone)
    return len(gone)


def _foldable(graph: gs.Graph, outputs: query.Outputs) -> tuple[list[gs.Node], list[gs.Node]]:
    """Nodes that can be folded, in order: those with small results of small values, and those that make weights of weights."""
    fixed: dict[int, bool] = {}  # output of a foldable node -> is it small
    small: list[gs.Node] = []
    large: dict[int, gs.Node] = {}
    left = _MOST_SMALL
    for node in graph.nodes:
        if node.domain or node.op not in _FOLDABLE or any(tensor in outputs for tensor in node.outputs):
            continue
        inputs = [tensor for tensor in node.inputs if not tensor.is_empty()]
        if not all(id(tensor) in fixed or query.is_constant(tensor) for tensor in inputs):
            continue
        size = _result_bytes(node)
        if size is None or size > _LARGE:
            continue
        of_small = all(fixed.get(id(t), True) and (id(t) in fixed or _nbytes(t) <= 16 * _SMALL) for t in inputs)
        is_small = size <= min(_SMALL, left) and of_small
        fixed.update((id(tensor), is_small) for tensor in node.outputs)
        if is_small:
            left -= size
            small.append(node)
        else:
            large[id(node)] = node
    return small, _without_growth(large)


def _without_growth(large: dict[int, gs.Node]) -> list[gs.Node]:
    """Leaves out nodes that read a weight which stays anyway, or that make more elements than they free."""
    made = {id(tensor) for node in large.values() for tensor in node.outputs}
    while True:
        count = len(large)
        goes: dict[int, bool] = {}  # weight -> is it no longer needed, and not outgrown by what is made of it
        for node in list(large.values()):
            if not _frees(node, large, made, goes):
                del large[id(node)]
                made.difference_update(map(id, node.outputs))
        if len(large) == count:
            return list(large.values())


def _frees(node: gs.Node, large: dict[int, gs.Node], made: set[int], goes: dict[int, bool]) -> bool:
    freed = 0
    for tensor in node.inputs:
        if tensor.is_empty():
            continue
        if id(tensor) not in made and not query.is_constant(tensor) and not _is_small_foldable(tensor):
            return False  # made by a node that is no longer folded
        size = _elements_of(tensor)
        if size is None or size * 4 <= _SMALL:
            continue
        if id(tensor) not in goes:
            readers = {id(reader): reader for reader in tensor.outputs}
            goes[id(tensor)] = all(key in large for key in readers) and sum(map(_made_by, readers.values())) <= size
        if not goes[id(tensor)]:
            return False
        freed += size
    return _made_by(node) <= freed


def _is_small_foldable(tensor: gs.Tensor) -> bool:
    size = _elements_of(tensor)
    return size is not None and size * 4 <= _SMALL


def _elements_of(tensor: gs.Tensor) -> int | None:
    shape = query.shape(tensor)
    if shape is None or not all(isinstance(size, int) for size in shape):
        return None
    return math.prod(shape)  # type: ignore[arg-type]


def _made_by(node: gs.Node) -> int:
    return sum(_elements_of(tensor) or 0 for tensor in node.outputs if not tensor.is_empty())


def _itemsize(dtype: np.dtype[Any] | int | None) -> int:
    return dtype.itemsize if isinstance(dtype, np.dtype) else 8


def _nbytes(tensor: gs.Tensor) -> int:
    dtype, count = query.dtype(tensor), _elements_of(tensor)
    return _LARGE + 1 if count is None else count * (_itemsize(dtype))


def _result_bytes(node: gs.Node) -> int | None:
    """Size of a node's results; an upper bound from its inputs where no shape is known, None where there is no bound."""
    total = 0
    for tensor in node.outputs:
        if tensor.is_empty():
            continue
        if tensor.type != "tensor_type" if isinstance(tensor, gs.Variable) else False:
            return None
        count = _elements_of(tensor)
        if count is None:
            if node.op in _SIZED_BY_VALUE:
                return None
            sizes = [_elements_of(source) for source in node.inputs if not source.is_empty()]
            if any(size is None for size in sizes):
                return None
            count = math.prod(max(size, 1) for size in sizes if size is not None)
        dtype = query.dtype(tensor)
        total += count * (_itemsize(dtype))
    return total


def _chains(nodes: list[gs.Node]) -> list[list[gs.Node]]:
    """Nodes that feed each other, together, so that values in between need not be kept."""
    chain_of: dict[int, list[gs.Node]] = {}
    chains: list[list[gs.Node]] = []
    for node in nodes:
        before = [chain_of[id(tensor)] for tensor in node.inputs if id(tensor) in chain_of]
        chain = max(before, key=len, default=[])
        for other in before:
            if other is not chain:
                chain += other
                for member in other:
                    chain_of.update((id(tensor), chain) for tensor in member.outputs)
                other.clear()
        if not before:
            chains.append(chain)
        chain.append(node)
        chain_of.update((id(tensor), chain) for tensor in node.outputs)
    return [chain for chain in chains if chain]


def _replace(model: Model, graph: gs.Graph, nodes: list[gs.Node]) -> list[gs.Node]:
    """Evaluates nodes (in order, with constant inputs) and puts constants in their place; returns those that are done."""
    if not nodes:
        return []
    inside = {id(node) for node in nodes}
    wanted = [
        tensor
        for node in nodes
        for tensor in node.outputs
        if not tensor.is_empty() and any(id(reader) not in inside for reader in tensor.outputs)
    ]
    values = evaluate(nodes, wanted, model.opset)
    if values is None:
        if len(nodes) == 1:
            return []
        ready = (node for node in nodes if all(tensor.is_empty() or query.is_constant(tensor) for tensor in node.inputs))
        return [done for node in ready for done in _replace(model, graph, [node])]
    for tensor in wanted:
        _become(graph, tensor, values[id(tensor)])
    return nodes


# ------------------------------------------------------------------------------------------------------------ branches


def inline_branches(model: Model) -> int:
    """Puts the live branch of every If with a constant condition in its place, and does nothing else. Returns how many there were."""
    counts: Counter[str] = Counter()
    _inline_branches(model, counts)
    return counts["branch"]


def _inline_branches(model: Model, counts: Counter[str]) -> bool:
    """Puts the live branch of every If with a constant condition in its place."""
    taken: Counter[str] | None = None
    found = False
    for graph in model.graphs():  # lazily: the branches of an If that goes are not looked at
        if not any(node.op == "If" and not node.domain for node in graph.nodes):
            continue
        nodes: list[gs.Node] = []
        for node in graph.nodes:
            condition = query.constant(node.inputs[0]) if node.op == "If" and not node.domain else None
            if condition is None or condition.size != 1:
                nodes.append(node)
                continue
            branch = node.attrs["then_branch" if condition.reshape(-1)[0] else "else_branch"]
            taken = _name_counts(model) if taken is None else taken
            nodes += _inline(model, node, branch, taken)
            counts["branch"] += 1
            found = True
        graph.nodes = nodes
    return found


def _name_counts(model: Model) -> Counter[str]:
    """In how many places each name is given: by nodes as their own or to an output, by constants, by graph inputs."""
    names: Counter[str] = Counter()
    constants: dict[int, gs.Constant] = {}
    for graph in model.graphs():
        names.update(tensor.name for tensor in graph.inputs)
        for node in graph.nodes:
            names[node.name] += 1
            names.update(tensor.name for tensor in node.outputs)
            constants.update((id(tensor), tensor) for tensor in node.inputs if isinstance(tensor, gs.Constant))
    names.update(tensor.name for tensor in constants.values())
    return names


def _inline(model: Model, node: gs.Node, branch: gs.Graph, taken: Counter[str]) -> list[gs.Node]:
    """The branch's nodes, with the If's outputs as their results."""
    nodes = list(branch.nodes)
    results = list(branch.outputs)
    outputs = list(node.outputs)
    for key in [key for key, value in node.attrs.items() if value is branch]:
        del node.attrs[key]
    detach([node])  # with the dead branch; the live one is no longer in it
    local: dict[int, gs.Tensor] = {}
    for inner in with_inner(nodes):
        if inner.name and taken[inner.name] > 1:
            inner.name = model.unique_name(inner.name)
        local.update((id(tensor), tensor) for tensor in inner.outputs)
        local.update(
            (id(tensor), tensor) for tensor in inner.inputs if isinstance(tensor, gs.Constant) and getattr(tensor, "home", None) is branch
        )
    for tensor in local.values():
        if tensor.name and taken[tensor.name] > 1:
            tensor.name = model.unique_name(tensor.name)
    used: set[int] = set()
    for result, output in zip(results, outputs, strict=False):
        if output.is_empty():
            continue
        if isinstance(result, gs.Variable) and isinstance(output, gs.Variable):
            output.dtype, output.shape = result.dtype or output.dtype, result.shape
        if id(result) in local and result.inputs and id(result) not in used:
            used.add(id(result))
            maker = result.inputs[0]
            redirect(result, output)
            set_output(maker, next(i for i, tensor in enumerate(maker.outputs) if tensor is result), output)
        else:
            source = next((o for r, o in zip(results, outputs, strict=False) if r is result and id(r) in used), result)
            nodes.append(Node("Identity", model.unique_name(f"{output.name}_identity"), inputs=[source], outputs=[output]))
    return nodes
