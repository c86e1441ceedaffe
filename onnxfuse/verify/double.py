"""A model in float64, node by node: the truth that float32 and float16 are measured against.

Every floating tensor is float64, whatever the model declares. A node runs in onnxruntime where that has a double kernel, alone, in a
session that nodes of the same kind share; else here in numpy; else in onnx.reference. A node that none of them can compute, or
whose result may depend on float32, leaves its outputs without a truth, and all that is computed from them.

Runs in the child process of `reference`. A tensor is dropped after its last reader, so that about as much is held as any runtime holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
Values = dict[str, Any]

_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_FLOAT_ATTRIBUTES = ("to", "dtype", "output_dtype")  # element types in attributes
_RANDOM = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"})


class NoTruth(Exception):
    """Nothing here computes this node in float64."""


def wide(value: Any) -> Any:
    """`value` with floating arrays as float64; everything else as it is."""
    if isinstance(value, list):
        return [wide(item) for item in value]
    if isinstance(value, np.ndarray) and (value.dtype.kind == "f" or (value.dtype.kind == "V" and "float" in value.dtype.name)):
        return value.astype(np.float64)
    return value


class Evaluator:
    """Evaluates a model step by step, in the order of its nodes.

    model: functions inlined, nodes sorted, weights in it. wanted: tensors of the main graph that will be asked for, by `values`, in
    the order of the nodes. missing: why a tensor has no truth.
    """

    def __init__(self, model: onnx.ModelProto, feeds: Mapping[str, Array], wanted: Iterable[str]) -> None:
        self.opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
        self.missing: dict[str, str] = {}
        self._imports = list(model.opset_import)
        self._nodes = model.graph.node
        self._next = 0
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._values: Values = {name: wide(value) for name, value in feeds.items()}
        self._uses = Counter(name for node in self._nodes for name in reads(node))
        self._uses.update(wanted)
        self._sessions: dict[bytes, Any] = {}
        self._followed: Values = {}

    def follow(self, decisions: Mapping[str, Array]) -> None:
        """Results that are taken as given when their node is reached: integers and booleans that were made of floats."""
        self._followed.update(decisions)

    def values(self, names: Sequence[str]) -> Values:
        """The named tensors, for the last time; those without a truth are left out (see `missing`)."""
        found: Values = {}
        for name in names:
            while name not in self._values and name not in self.missing and name not in self._weights and self._next < len(self._nodes):
                self._step()
            if name in self._values or name in self._weights:
                found[name] = self._read(name)
            self._done(name)
        return found

    def again(self, name: str, inputs: Mapping[str, Array]) -> Any:
        """Tensor `name`, computed by its node from these inputs instead of its own. NoTruth where more inputs are needed."""
        node = next((node for node in self._nodes if name in node.output), None)
        if node is None:
            raise NoTruth(f"'{name}' is not known")

        def read(wanted: str) -> Any:
            if wanted in inputs:
                return wide(inputs[wanted])
            if wanted in self._weights:
                return wide(numpy_helper.to_array(self._weights[wanted]))
            if wanted in self._values:
                return self._values[wanted]
            raise NoTruth(f"'{wanted}' is not known")

        return self._compute(node, read)[list(node.output).index(name)]

    def _step(self) -> None:
        node = self._nodes[self._next]
        self._next += 1
        needs = list(reads(node))
        lacking = next((name for name in needs if name in self.missing), None)
        outputs: Sequence[Any] = ()
        if lacking is not None:
            reason = self.missing[lacking]
        else:
            try:
                outputs, reason = self._compute(node, self._read), ""
            except NoTruth as error:
                reason = f"node '{node.name or next(iter(node.output), '')}' ({node.op_type}): {error}"
        for place, name in enumerate(node.output):
            if not name:
                continue
            if reason or place >= len(outputs):
                self.missing[name] = reason or "not computed"
            elif self._uses[name]:
                self._values[name] = self._followed.pop(name, outputs[place])
        for name in needs:
            self._done(name)

    def _done(self, name: str) -> None:
        self._uses[name] -= 1
        if self._uses[name] <= 0:
            self._values.pop(name, None)

    def _read(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        if name in self._weights:
            return wide(numpy_helper.to_array(self._weights[name]))
        raise NoTruth(f"'{name}' is not known")

    # One node ---------------------------------------------------------------------------------------------------------

    def _compute(self, node: NodeProto, read: Callable[[str], Any]) -> Sequence[Any]:
        if node.op_type in _BODIES and node.domain in ("", "ai.onnx"):
            return _BODIES[node.op_type](self, node, read)
        inputs = [read(name) if name else None for name in node.input]
        if node.domain not in ("", "ai.onnx"):
            raise NoTruth(f"domain {node.domain} has no function here")
        if node.op_type in _RANDOM:
            raise NoTruth("makes random numbers")
        if node.op_type in OWN:
            with np.errstate(all="ignore"):
                result = OWN[node.op_type](_Call(node, self.opset, inputs))
            if result is not None:
                return [wide(value) for value in (result if isinstance(result, tuple) else (result,))]
        outputs = self._by_onnxruntime(node, inputs)
        return outputs if outputs is not None else self._by_reference(node, inputs)

    def _by_onnxruntime(self, node: NodeProto, inputs: list[Any]) -> list[Any] | None:
        """None where there is no kernel for doubles."""
        import onnxruntime as ort

        if any(value is not None and (not isinstance(value, np.ndarray) or value.dtype.kind in "OUSV") for value in inputs):
            return None
        one, feeds = _alone(node, inputs)
        types = [helper.np_dtype_to_tensor_dtype(value.dtype) for value in feeds.values()]
        key = one.SerializeToString() + bytes(str(types), "ascii")
        if key not in self._sessions:
            graph = helper.make_graph(
                [one],
                "one",
                [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(feeds, types, strict=True)],
                [onnx.ValueInfoProto(name=name) for name in one.output if name],
            )
            options = ort.SessionOptions()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 4
            options.enable_cpu_mem_arena = False  # it would keep what one node needed
            options.intra_op_num_threads = 1  # a pool of threads for each kind of node costs more than it gives
            model = helper.make_model(graph, opset_imports=self._imports, ir_version=8)
            try:
                self._sessions[key] = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            except Exception:  # onnxruntime's exceptions have no public base
                self._sessions[key] = None
        session = self._sessions[key]
        if session is None:
            return None
        try:
            made = iter(session.run(None, feeds))
        except Exception:
            return None
        outputs = [next(made) if name else None for name in node.output]
        narrow = any(isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float16) for value in outputs)
        return None if narrow else outputs

    def _by_reference(self, node: NodeProto, inputs: list[Any]) -> list[Any]:
        """onnx's own definition in numpy; refused where it went down to float32 on the way out."""
        from onnx.reference import ReferenceEvaluator

        try:
            one, feeds = _alone(node, inputs)
            evaluator = ReferenceEvaluator(one, opsets={o.domain: o.version for o in self._imports})
            found = evaluator.run(None, feeds)
        except Exception as error:  # whatever it lacks shows as an exception of any type
            raise NoTruth(f"no double kernel, and onnx.reference says: {(str(error) or repr(error)).splitlines()[0][:160]}") from None
        if any(isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float16) for value in found):
            raise NoTruth("no double kernel")
        return list(found)

    # Bodies -----------------------------------------------------------------------------------------------------------

    def _body(self, graph: GraphProto, given: Values, outer: Callable[[str], Any]) -> list[Any]:
        """Outputs of a subgraph; its own names hide those outside."""
        known: Values = dict(given)
        weights = {tensor.name: tensor for tensor in graph.initializer}

        def read(name: str) -> Any:
            if name in known:
                return known[name]
            return wide(numpy_helper.to_array(weights[name])) if name in weights else outer(name)

        for node in graph.node:
            known.update(zip(node.output, self._compute(node, read), strict=False))
        return [read(value.name) for value in graph.output]

    def _if(self, node: NodeProto, read: Callable[[str], Any]) -> list[Any]:
        bodies = {a.name: a.g for a in node.attribute}
        return self._body(bodies["then_branch" if bool(np.all(read(node.input[0]))) else "else_branch"], {}, read)

    def _loop(self, node: NodeProto, read: Callable[[str], Any]) -> list[Any]:
        body = next(a.g for a in node.attribute if a.name == "body")
        most, go, *carried = [read(name) if name else None for name in node.input] + [None] * (2 - len(node.input))
        count = len(carried)
        limit = math.inf if most is None else int(np.asarray(most).reshape(-1)[0])
        on = True if go is None else bool(np.all(go))
        stacked: list[list[Any]] = [[] for _ in body.output[1 + count :]]
        step = 0
        while on and step < limit:
            given = dict(zip((v.name for v in body.input), [np.array(step, np.int64), np.array(on), *carried], strict=False))
            outcome = self._body(body, given, read)
            on, carried = bool(np.all(outcome[0])), outcome[1 : 1 + count]
            for kept, value in zip(stacked, outcome[1 + count :], strict=True):
                kept.append(value)
            step += 1
        if stacked and not step:
            raise NoTruth("a Loop that never runs has scanned outputs of unknown shape")
        return [*carried, *(np.stack(kept) for kept in stacked)]


_BODIES: dict[str, Callable[[Evaluator, NodeProto, Callable[[str], Any]], list[Any]]] = {"If": Evaluator._if, "Loop": Evaluator._loop}


def reads(node: NodeProto) -> Iterator[str]:
    """Names that a node reads from its graph, those that its bodies capture too."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs:
            yield from captured(body)


def captured(body: GraphProto) -> Iterator[str]:
    """Names that a subgraph reads and does not make."""
    own = {v.name for v in body.input} | {t.name for t in body.initializer} | {t.values.name for t in body.sparse_initializer}
    own.update(name for node in body.node for name in node.output)
    named = [name for node in body.node for name in reads(node)] + [value.name for value in body.output]
    yield from (name for name in dict.fromkeys(named) if name and name not in own)


def _alone(node: NodeProto, inputs: Sequence[Any]) -> tuple[NodeProto, dict[str, Any]]:
    """The node with names that depend on places alone, its element types made double; and its inputs by those names."""
    one = NodeProto(op_type=node.op_type, domain=node.domain)
    feeds: dict[str, Any] = {}
    for place, value in enumerate(inputs):
        one.input.append("" if value is None else f"i{place}")
        if value is not None:
            feeds[f"i{place}"] = value
    one.output.extend(f"o{place}" if name else "" for place, name in enumerate(node.output))
    for attribute in node.attribute:
        copy = one.attribute.add()
        copy.CopyFrom(attribute)
        if attribute.name in _FLOAT_ATTRIBUTES and attribute.i in _NARROW:
            copy.i = TensorProto.DOUBLE
        if attribute.type == AttributeProto.TENSOR and attribute.t.data_type in _NARROW:
            copy.t.CopyFrom(numpy_helper.from_array(wide(numpy_helper.to_array(attribute.t))))
    return one, feeds


# Operators in numpy -----------------------------------------------------------------------------------------------------


class _Call:
    """One node with its inputs: what an operator of `OWN` is given."""

    def __init__(self, node: NodeProto, opset: int, inputs: Sequence[Any]) -> None:
        self.attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.opset = opset
        self.inputs = inputs

    def __getitem__(self, place: int) -> Any:
        return self.inputs[place]

    def get(self, place: int) -> Any:
        return self.inputs[place] if place < len(self.inputs) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value


def _constant(call: _Call) -> Array | None:
    if "value" in call.attributes:
        return np.asarray(numpy_helper.to_array(call.attributes["value"]))
    for name, kind in (("value_float", np.float64), ("value_floats", np.float64), ("value_int", np.int64), ("value_ints", np.int64)):
        if name in call.attributes:
            return np.asarray(call.attributes[name], kind)
    return None


def _cast(call: _Call) -> Array | None:
    """Between numbers; a float that is cut to an integer is cut as numpy does."""
    kind, x = call.attribute("to"), call[0]
    if kind in (*_NARROW, TensorProto.DOUBLE) and x.dtype.kind in "fiub":
        return np.asarray(x.astype(np.float64))
    return None


def _erf(x: Array) -> Array:
    return np.asarray(np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape))


def _gelu(call: _Call) -> Array:
    x = call[0]
    if call.attribute("approximate", "none") == "tanh":
        return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def _clip(call: _Call) -> Array | None:
    low = call.get(1) if call.get(1) is not None else call.attribute("min")
    high = call.get(2) if call.get(2) is not None else call.attribute("max")
    x = call[0]
    if x.dtype.kind != "f":
        return None
    x = x if low is None else np.maximum(x, low)
    return np.asarray(x if high is None else np.minimum(x, high))


def _elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _spatial(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _along_channels(values: Array, rank: int) -> Array:
    return values.reshape(-1, *(1,) * (rank - 2))


def _instance_norm(call: _Call) -> Array:
    x, axes = call[0], _spatial(call[0])
    centred = x - x.mean(axes, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + call.attribute("epsilon", 1e-5))
    return np.asarray(normed * _along_channels(call[1], x.ndim) + _along_channels(call[2], x.ndim))


def _group_norm(call: _Call) -> Array:
    x, groups = call[0], call.attribute("num_groups")
    grouped = x.reshape(x.shape[0], groups, -1)
    centred = grouped - grouped.mean(-1, keepdims=True)
    normed = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + call.attribute("epsilon", 1e-5))).reshape(x.shape)
    scale, shift = call[1], call[2]
    if scale.size == groups and groups != x.shape[1]:  # one a group before version 21
        scale, shift = (np.repeat(values, x.shape[1] // groups) for values in (scale, shift))
    return np.asarray(normed * _along_channels(scale, x.ndim) + _along_channels(shift, x.ndim))


def _layer_norm(call: _Call) -> Array:
    x = call[0]
    axes = tuple(range(call.attribute("axis", -1) % x.ndim, x.ndim))
    centred = x - x.mean(axes, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + call.attribute("epsilon", 1e-5)) * call[1]
    return np.asarray(normed if call.get(2) is None else normed + call[2])


def _rms_norm(call: _Call) -> Array:
    x = call[0]
    axes = tuple(range(call.attribute("axis", -1) % x.ndim, x.ndim))
    return np.asarray(x / np.sqrt((x**2).mean(axes, keepdims=True) + call.attribute("epsilon", 1e-5)) * call[1])


def _quantized(x: Array, scale: Array, zero: Array, kind: Any) -> Array:
    bounds = np.iinfo(kind)
    return np.asarray(np.clip(np.rint(x / scale) + zero, bounds.min, bounds.max).astype(kind))


def _dynamic_quantize(call: _Call) -> tuple[Array, ...]:
    x = call[0]
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    scale = (high - low) / 255.0 or 1.0
    zero = np.clip(np.rint(-low / scale), 0, 255).astype(np.uint8)
    return _quantized(x, np.float64(scale), zero.astype(np.float64), np.uint8), np.array(scale), zero


def _per_axis(values: Array, call: _Call) -> Array:
    """Scales and zero points along the axis that they belong to; None of blocks."""
    if values.ndim == 0 or values.size == 1:
        return values.reshape(())
    if values.ndim != 1 or call.attribute("block_size", 0):
        raise NoTruth("quantized by blocks")
    axis = call.attribute("axis", 1) % call[0].ndim
    return values.reshape([-1 if place == axis else 1 for place in range(call[0].ndim)])


def _quantize(call: _Call) -> Array | None:
    zero = call.get(2)
    kind = np.dtype(np.uint8) if zero is None else zero.dtype
    if kind.kind not in "iu":
        return None
    shift = np.zeros(()) if zero is None else _per_axis(zero, call).astype(np.float64)
    return _quantized(call[0], _per_axis(call[1], call), shift, kind)


def _dequantize(call: _Call) -> Array | None:
    if call[0].dtype.kind not in "iu":
        return None
    shift = 0.0 if call.get(2) is None else _per_axis(call[2], call).astype(np.float64)
    return np.asarray((call[0].astype(np.float64) - shift) * _per_axis(call[1], call))


# Convolutions: a sum over the taps of the kernel, each a matrix product over the channels; no column matrix is made.


def _pads(call: _Call, sizes: Sequence[int], extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Padding before and after each axis. extents: of the dilated kernel."""
    auto = call.attribute("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        totals = [max(0, (-(-n // s) - 1) * s + k - n) for n, k, s in zip(sizes, extents, strides, strict=True)]
        halves = [(t // 2, t - t // 2) for t in totals]
        return halves if auto == "SAME_UPPER" else [(b, a) for a, b in halves]
    given = call.attribute("pads") if auto == "NOTSET" else None
    given = list(given) if given else [0] * (2 * len(sizes))
    return list(zip(given[: len(sizes)], given[len(sizes) :], strict=True))


def _kernel(call: _Call, rank: int, shape: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    strides = list(call.attribute("strides") or [1] * rank)
    dilations = list(call.attribute("dilations") or [1] * rank)
    return strides, dilations, [(k - 1) * d + 1 for k, d in zip(shape, dilations, strict=True)]


_ALL: tuple[Any, ...] = (slice(None), slice(None))  # batch and channels


def _window(tap: Sequence[int], dilations: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> tuple[Any, ...]:
    """What one tap of a kernel meets, of a padded input, for `sizes` outputs."""
    axes = zip(tap, dilations, sizes, strides, strict=True)
    return _ALL + tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in axes)


def _conv(call: _Call) -> Array:
    x, weight, groups = call[0], call[1], call.attribute("group", 1)
    rank = x.ndim - 2
    strides, dilations, extents = _kernel(call, rank, weight.shape[2:])
    pads = _pads(call, x.shape[2:], extents, strides)
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    sizes = [(n - e) // s + 1 for n, e, s in zip(x.shape[2:], extents, strides, strict=True)]
    batch, out = x.shape[0], weight.shape[0]
    total = np.zeros((batch, groups, out // groups, math.prod(sizes)))
    for tap in np.ndindex(*weight.shape[2:]):
        part = x[_window(tap, dilations, sizes, strides)].reshape(batch, groups, x.shape[1] // groups, -1)
        total += weight[_ALL + tap].reshape(groups, out // groups, -1) @ part
    result = total.reshape(batch, out, *sizes)
    return result if call.get(2) is None else result + _along_channels(call[2], x.ndim)


def _conv_transpose(call: _Call) -> Array:
    x, weight, groups = call[0], call[1], call.attribute("group", 1)
    rank = x.ndim - 2
    strides, dilations, extents = _kernel(call, rank, weight.shape[2:])
    extra = list(call.attribute("output_padding") or [0] * rank)
    full = [(n - 1) * s + e + o for n, s, e, o in zip(x.shape[2:], strides, extents, extra, strict=True)]
    auto, wanted = call.attribute("auto_pad", "NOTSET"), call.attribute("output_shape")
    if auto.startswith("SAME") and not wanted:
        wanted = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if wanted:
        cut = [f - w for f, w in zip(full, wanted, strict=True)]
        pads = [(c - c // 2, c // 2) if auto != "SAME_UPPER" else (c // 2, c - c // 2) for c in cut]
    else:
        pads = _pads(call, x.shape[2:], extents, strides)
    batch, out = x.shape[0], weight.shape[1]
    grouped = x.reshape(batch, groups, x.shape[1] // groups, -1)
    total = np.zeros((batch, groups * out, *full))
    for tap in np.ndindex(*weight.shape[2:]):
        taps = weight[_ALL + tap].reshape(groups, -1, out).transpose(0, 2, 1)
        total[_window(tap, dilations, x.shape[2:], strides)] += (taps @ grouped).reshape(batch, groups * out, *x.shape[2:])
    result = total[_ALL + tuple(slice(a, f - b) for (a, b), f in zip(pads, full, strict=True))]
    return result if call.get(2) is None else result + _along_channels(call[2], x.ndim)


def _average_pool(call: _Call) -> Array:
    x = call[0]
    shape = call.attribute("kernel_shape")
    strides, dilations, extents = _kernel(call, x.ndim - 2, shape)
    pads = _pads(call, x.shape[2:], extents, strides)
    up = bool(call.attribute("ceil_mode", 0))
    sizes = []
    for n, (a, b), e, s in zip(x.shape[2:], pads, extents, strides, strict=True):
        size = (-(-(n + a + b - e) // s) if up else (n + a + b - e) // s) + 1
        sizes.append(size - 1 if up and (size - 1) * s >= n + a else size)  # no window begins in the padding behind
    more = [max(0, (n - 1) * s + e - (m + a + b)) for n, s, e, m, (a, b) in zip(sizes, strides, extents, x.shape[2:], pads, strict=True)]
    counted = np.pad(np.ones((1, 1, *x.shape[2:])), [(0, 0), (0, 0), *pads], constant_values=float(call.attribute("count_include_pad", 0)))
    counted = np.pad(counted, [(0, 0), (0, 0), *((0, m) for m in more)])
    x = np.pad(x, [(0, 0), (0, 0), *((a, b + m) for (a, b), m in zip(pads, more, strict=True))])
    total, count = np.zeros((*x.shape[:2], *sizes)), np.zeros((1, 1, *sizes))
    for tap in np.ndindex(*shape):
        window = _window(tap, dilations, sizes, strides)
        total += x[window]
        count += counted[window]
    return total / count


def _resize(call: _Call) -> Array | None:
    """Nearest, linear and cubic: an axis at a time, as the product with a matrix of weights."""
    x = call[0]
    sizes = call.get(3) if call.opset >= 11 else None
    scales = call.get(2) if call.opset >= 11 else call.get(1)
    axes = list(call.attribute("axes") or range(x.ndim))
    odd = call.attribute("antialias", 0) or call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch"
    if odd or call.opset < 11 or x.dtype.kind != "f":
        return None
    for place, axis in enumerate(axes):
        length = x.shape[axis]
        size = int(sizes[place]) if sizes is not None and sizes.size else math.floor(length * float(np.float32(scales[place])))
        scale = size / length if sizes is not None and sizes.size else float(np.float32(scales[place]))
        if size != length or scale != 1.0:
            weights = _resize_weights(call, length, size, scale)
            x = np.moveaxis(np.moveaxis(x, axis, -1) @ weights.T, -1, axis)
    return np.asarray(x)


def _resize_weights(call: _Call, length: int, size: int, scale: float) -> Array:
    """[size, length]: how much of each input goes into each output, by the operator's definition."""
    at = np.arange(size, dtype=np.float64)
    places = {
        "half_pixel": lambda: (at + 0.5) / scale - 0.5,
        "half_pixel_symmetric": lambda: length / 2 * (1 - size / (scale * length)) + (at + 0.5) / scale - 0.5,
        "pytorch_half_pixel": lambda: (at + 0.5) / scale - 0.5 if size > 1 else at * 0,
        "align_corners": lambda: at * (length - 1) / (size - 1) if size > 1 else at * 0,
        "asymmetric": lambda: at / scale,
    }
    kind, mode = call.attribute("coordinate_transformation_mode", "half_pixel"), call.attribute("mode", "nearest")
    if kind not in places:
        raise NoTruth(f"Resize with {kind}")
    source = places[kind]()
    weights = np.zeros((size, length))
    rows = np.arange(size)
    if mode == "nearest":
        down = np.floor(source)
        half = source - down
        rounding = call.attribute("nearest_mode", "round_prefer_floor")
        up = {"floor": half < 0, "ceil": half > 0, "round_prefer_floor": half > 0.5, "round_prefer_ceil": half >= 0.5}[rounding]
        np.add.at(weights, (rows, np.clip(down + up, 0, length - 1).astype(int)), 1.0)
        return weights
    low = np.floor(source).astype(int)
    t = source - low
    if mode == "linear":
        taps = {0: 1 - t, 1: t}
    else:
        a = call.attribute("cubic_coeff_a", -0.75)
        near: Callable[[Array], Array] = lambda d: (a + 2) * d**3 - (a + 3) * d**2 + 1  # noqa: E731
        far: Callable[[Array], Array] = lambda d: a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a  # noqa: E731
        taps = {-1: far(1 + t), 0: near(t), 1: near(1 - t), 2: far(2 - t)}
    for step, share in taps.items():
        where = low + step
        if call.attribute("exclude_outside", 0):
            share = np.where((where < 0) | (where >= length), 0.0, share)
        np.add.at(weights, (rows, np.clip(where, 0, length - 1)), share)
    return weights / weights.sum(1, keepdims=True) if call.attribute("exclude_outside", 0) else weights


def _softmax_like(call: _Call) -> tuple[Array, tuple[int, ...]]:
    x = call[0]
    if call.opset >= 13:
        return x, (call.attribute("axis", -1),)
    return x, tuple(range(call.attribute("axis", 1) % x.ndim, x.ndim))


def _softmax(call: _Call) -> Array:
    x, axes = _softmax_like(call)
    shifted = np.exp(x - x.max(axes, keepdims=True))
    return np.asarray(shifted / shifted.sum(axes, keepdims=True))


def _log_softmax(call: _Call) -> Array:
    x, axes = _softmax_like(call)
    shifted = x - x.max(axes, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axes, keepdims=True)))


def _matmul(call: _Call) -> Array | None:
    return np.matmul(call[0], call[1]) if call[0].dtype == call[1].dtype == np.float64 else None


def _gemm(call: _Call) -> Array | None:
    a, b = call[0], call[1]
    if a.dtype != np.float64:
        return None
    product = (a.T if call.attribute("transA", 0) else a) @ (b.T if call.attribute("transB", 0) else b)
    product = call.attribute("alpha", 1.0) * product
    return np.asarray(product if call.get(2) is None else product + call.attribute("beta", 1.0) * call[2])


def _arithmetic(compute: Callable[[Array, Array], Any]) -> Callable[[_Call], Any]:
    """Of floats; integers have rules of their own. Before version 7 broadcasting was another."""
    return lambda c: compute(c[0], c[1]) if c.opset >= 7 and c[0].dtype == c[1].dtype == np.float64 else None


OWN: dict[str, Callable[[_Call], Any]] = {
    "Add": _arithmetic(np.add),
    "AveragePool": _average_pool,
    "Cast": _cast,
    "Celu": lambda c: _elu(c[0] / c.attribute("alpha", 1.0), 1.0) * c.attribute("alpha", 1.0) if c.attribute("alpha", 1.0) > 0 else None,
    "Clip": _clip,
    "Constant": _constant,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _arithmetic(np.divide),
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "Elu": lambda c: _elu(c[0], c.attribute("alpha", 1.0)),
    "Erf": lambda c: _erf(c[0]),
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda c: c[0].mean(_spatial(c[0]), keepdims=True),
    "GroupNormalization": _group_norm,
    "HardSigmoid": lambda c: np.clip(c.attribute("alpha", 0.2) * c[0] + c.attribute("beta", 0.5), 0, 1),
    "HardSwish": lambda c: c[0] * np.clip(c[0] / 6 + 0.5, 0, 1),
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda c: np.where(c[0] < 0, c.attribute("alpha", 0.01) * c[0], c[0]),
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "Mul": _arithmetic(np.multiply),
    "Mish": lambda c: c[0] * np.tanh(_softplus(c[0])),
    "PRelu": lambda c: np.where(c[0] < 0, c[1] * c[0], c[0]),
    "QuantizeLinear": _quantize,
    "RMSNormalization": _rms_norm,
    "Resize": _resize,
    "Selu": lambda c: c.attribute("gamma", 1.05070102214813232421875) * _elu(c[0], c.attribute("alpha", 1.67326319217681884765625)),
    "Sigmoid": lambda c: _sigmoid(c[0]),
    "Softmax": _softmax,
    "Softplus": lambda c: _softplus(c[0]),
    "Softsign": lambda c: c[0] / (1 + np.abs(c[0])),
    "Sub": _arithmetic(np.subtract),
    "Swish": lambda c: c[0] * _sigmoid(c.attribute("alpha", 1.0) * c[0]),
}
