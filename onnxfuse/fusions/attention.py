"""attention: the product of queries and keys, its scale and masks, the softmax and the product with the values, in one kernel.

    y = softmax(scale * q k^T + added + more, where kept) v          heads side by side in rows, or one behind the other

When it wins: short sequences and small batches, where TensorRT's own kernel is short of blocks, and whatever it leaves in pieces (position
biases, grouped queries, several masks). Source of the idea: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et
al., FlashAttention, 2022.

Scores and masks meet in float32. A half-precision model rounds their sum, and so does this where the mask's value is -64 or below: beside
keys that are not masked it makes no difference, but of a row whose keys are all masked (by -10000 or -65504, say) the rounding is all that
is left, so that it comes out as it was: nearly uniform in half types, a softmax of its scores in float32 under -10000, uniform under
float32's lowest number, NaN under -inf. Values that replace scores are kept as they are. A constant mask that hides later keys alone is
not read: the kernel does not look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _heads, _norms
from onnxfuse.fusions._heads import FLAT_ROWS_FIRST, HEADS_FIRST, ROWS_FIRST, Heads, Perm
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, const, either, maybe, op, tensor
from onnxfuse.graph import attention, query
from onnxfuse.graph.attention import Form
from onnxfuse.graph.model import Model

Array = npt.NDArray[Any]

OLDEST = 12  # a Constant takes its value from an attribute
LARGEST = 256  # elements of a head
MASKING = -64.0
NEVER = -3e4  # what is so low has no weight beside a score of the same row


def _weights(lifted: bool = False) -> Pattern:
    """lifted: products of three axes, [batch * heads, rows, ...], whose scores have four as long as masks are added."""
    product = op("MatMul", tensor("q"), tensor("k_turned"), out="product")
    scores: Pattern = maybe("Cast", either(op("Mul", product, tensor("factor")), op("Div", product, const("divisor")), product))
    scores = op("Reshape", scores, tensor("by_head"), out="lifted") if lifted else scores
    once = op("Add", scores, tensor("added"))
    twice = op("Add", once, tensor("more"))
    windows = op(
        "Reshape", op("Add", op("Reshape", once, tensor("by_window"), out="windowed"), const("window_mask")), tensor("whole"), out="windows"
    )
    summed = either(twice, once, scores) if lifted else either(windows, twice, once, scores)
    replaced = either(op("Where", tensor("hide"), const("fill"), summed), op("Where", tensor("keep"), summed, const("fill")))
    chosen: Pattern = either(op("Add", replaced, tensor("after")), replaced, summed)
    chosen = op("Reshape", chosen, tensor("by_product"), out="lowered") if lifted else chosen
    weights = op("Softmax", maybe("Cast", chosen), out="weights")
    safe = op("Where", op("IsNaN", weights, out="dead"), const("zero", 0.0), weights)
    return maybe("Cast", either(safe, weights))


_SPELLED = op("MatMul", either(_weights(), _weights(lifted=True)), tensor("v"), out="context")
_APART = op("Reshape", _SPELLED, tensor("by_batch"), out="apart")
_NATIVE = op("Attention", tensor("q"), tensor("k"), tensor("v"), out="native", rest=True)


@dataclass(frozen=True, eq=False)
class _Site:
    q: Heads
    k: Heads
    v: Heads
    scale: float
    added: tuple[gs.Tensor, ...] = ()
    windows: gs.Tensor | None = None
    """[1, windows, 1, rows, rows], a constant."""
    keep: gs.Tensor | None = None
    hides: bool = False
    fill: float = 0.0
    causal: bool = False
    safe: bool = False
    y_perm: Perm = HEADS_FIRST
    by_head: gs.Tensor | None = None
    """[heads, 1, 1]: a scale of each head, in front of the other."""
    result: tuple[int, ...] = ()
    """Where the result has three axes: what the Reshape that makes them is told."""

    @property
    def group(self) -> int:
        return self.q.known(1) // self.k.known(1)


class Attention(Fusion):
    name = "attention"
    kind = "fused"
    half_from = 80
    anchor = "Softmax"
    patterns = (op("Transpose", either(_SPELLED, _APART), out="turned"), _APART, _SPELLED, _NATIVE)

    def check(self, match: Match, model: Model) -> Refusal | None:
        if model.opset < OLDEST:
            return Refusal(f"the function needs operator set {OLDEST}; this model's is", model.opset)
        site = _read(match)
        return site if isinstance(site, Refusal) else _refuse(match, site)

    def variant(self, match: Match) -> str | None:
        form = _form(_site_of(match))
        return form.op_type.removeprefix(attention.PLUGIN).lower() or None

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        site = _site_of(match)
        form = _form(site)
        q, k, v = site.q, site.k, site.v
        heads, own, size, width = q.known(1), k.known(1), q.known(3), v.known(3)
        inputs = [_heads.packed(q, k, v)] if form.packed else [_four_axes(part, new) for part in (q, k, v)]
        if site.by_head is not None:
            inputs[0] = _scaled_by_head(inputs[0], q.perm, site.by_head, heads, new)
        inputs += site.added
        if site.windows is not None:
            inputs.append(new.reshaped(site.windows, tuple(int(extent) for extent in (query.shape(site.windows) or [])[1:] if extent)))
        if site.keep is not None:
            inputs.append(site.keep)
        attrs = {
            "scale": site.scale,
            "fill": site.fill,
            "hides": int(site.hides),
            "safe": int(site.safe),
            "heads": heads,
            "kv_heads": own,
            "y_perm": list(site.y_perm),
            "dtype": _norms.element_type(q.value),
        }
        if form.packed:
            attrs |= {"widths": [heads * size, own * size, own * width]}
            attrs |= {"q_rows": [0, 0, heads, size], "k_rows": [0, 0, own, size], "v_rows": [0, 0, own, width]}
        else:
            attrs |= {f"{name}_perm": list(part.perm) for name, part in zip("qkv", (q, k, v), strict=True)}
        if form.grouped:
            attrs |= {"repeats": [1, 1, site.group, 1, 1], "k_heads": [0, heads, -1, size], "v_heads": [0, heads, -1, width]}
        output = _settled(match, site)
        if not site.result:
            return new.node(form.op_type, inputs, [output], attrs, stem=self.name, domain=DOMAIN)
        made = new.variable(f"{output.name}_by_head", output.dtype, _shape(site))
        node = new.node(form.op_type, inputs, [made], attrs, stem=self.name, domain=DOMAIN)
        new.node("Reshape", [made, _target(site.result, new)], [output], stem=self.name)
        return node

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        return tuple(_function(opset, form) for form in attention.FORMS) if opset >= OLDEST else ()


def _site_of(match: Match) -> _Site:
    site = _read(match)
    assert isinstance(site, _Site)
    return site


def _read(match: Match) -> _Site | Refusal:
    return _native(match) if "native" in match.tensors else _spelled(match)


def _four_axes(part: Heads, new: Builder) -> gs.Tensor:
    """What the plugin reads: a tensor of three axes with a fourth."""
    if part.view is None:
        return part.value
    made = new.variable(f"{part.value.name}_by_head", part.value.dtype, part.view.extents)
    new.node("Reshape", [part.value, _target(part.view.target, new)], [made], stem="attention")
    return made


def _scaled_by_head(q: gs.Tensor, perm: Perm, scale: gs.Tensor, heads: int, new: Builder) -> gs.Tensor:
    """The kernel has one scale: those of heads go to the queries, which are as good as scores, and smaller than those."""
    if perm == ROWS_FIRST:
        if query.is_constant(scale):
            scale = new.reshaped(scale, (heads, 1))
        else:
            by_row = new.variable(f"{scale.name}_by_row", scale.dtype, [heads, 1])
            new.node("Reshape", [scale, _target((heads, 1), new)], [by_row], stem="attention")
            scale = by_row
    made = new.variable(f"{q.name}_scaled", q.dtype, query.shape(q))
    new.node("Mul", [q, scale], [made], stem="attention")
    return made


def _target(extents: tuple[int, ...], new: Builder) -> gs.Constant:
    return new.computed(extents, "extents", lambda: np.array(extents, np.int64))


def _spelled(match: Match) -> _Site | Refusal:
    softmax = match.node("weights")
    rank = query.rank(softmax.inputs[0])
    if rank not in (3, 4):
        return Refusal("the scores are not known to have three or four axes", rank)
    if softmax.attrs.get("axis", -1) not in (-1, rank - 1):
        return Refusal("the softmax is over other axes than the keys (axis)", softmax.attrs.get("axis"))
    place = _place(match, rank)
    if isinstance(place, Refusal):
        return place
    by_head = match.get("factor") if rank == 4 and "lifted" not in match.tensors and _is_by_head(match) else None
    scale = 1.0
    for name in ("factor", "divisor"):
        if name in match.tensors and by_head is None:
            number = query.scalar(match[name])
            if not number or not np.isfinite(number):
                return Refusal(f"the scale '{match[name].name}' is not one number", number)
            scale = number if name == "factor" else 1.0 / number
    parts = place.find(match["q"], False), place.find(match["k_turned"], True), place.find(match["v"], False)
    q, k, v = parts
    if q is None or k is None or v is None:
        return Refusal("the axes of the keys lie otherwise than batch, heads, rows", match["k_turned"].name)
    if rank == 3 and not all(_heads.same(part.extent(0), q.extent(0)) and _many(part) == _many(q) for part in (k, v)):
        return Refusal("queries, keys and values are not known to have the same batch and heads", q.extent(0))
    apart = match.get("apart")
    if apart is not None and (query.shape(apart) or [None, None])[1] != q.number(1):
        return Refusal(f"the heads of '{apart.name}' are not those of the queries", query.shape(apart))
    fill = query.scalar(match["fill"]) if "fill" in match.tensors else 0.0
    if fill is None:
        return Refusal(f"what replaces scores, '{match['fill'].name}', is not one number", query.shape(match["fill"]))
    chosen, hides = match.get("hide") or match.get("keep"), "hide" in match.tensors
    added = tuple(match[name] for name in ("added", "more") if name in match.tensors)
    later = [value for value in added if _hides_later(value, lambda array: (array == 0, array <= NEVER))]
    causal = bool(later)
    if chosen is not None and fill <= NEVER and _hides_later(chosen, lambda array: (array != hides, array == hides)):
        chosen, causal = None, True
    if "after" in match.tensors:  # GPT-2: where later keys are hidden, it makes no difference when others are
        added = (*added, match["after"])
        if chosen is not None or len(added) > 2 or "window_mask" in match.tensors:
            return Refusal(f"'{match['after'].name}' is added to scores after some were replaced", len(added))
    return _Site(
        q,
        k,
        v,
        scale * q.scale * k.scale * v.scale if v.scale == 1.0 else float("nan"),
        tuple(value for value in added if all(value is not other for other in later)) if match.get("window_mask") is None else added,
        match.get("window_mask"),
        chosen,
        hides,
        fill,
        causal and match.get("window_mask") is None,
        "dead" in match.tensors,
        ROWS_FIRST if "turned" in match.tensors else HEADS_FIRST,
        by_head,
        _result(place, q, v, "turned" in match.tensors),
    )


def _is_by_head(match: Match) -> bool:
    """Whether the scores [batch, heads, rows, keys] are scaled by [1, heads, 1, 1], with or without the first axis."""
    scores, dims = query.shape(match["product"]), query.shape(match["factor"]) if "factor" in match.tensors else None
    if scores is None or dims is None or not 3 <= len(dims) <= 4 or not isinstance(dims[-3], int):
        return False
    return dims[-3] > 1 and dims[-3] == scores[1] and dims[-2:] == [1, 1] and dims[:-3] in ([], [1])


def _many(part: Heads) -> int:
    return (part.number(1) or 0) * part.repeats


def _result(place: _Place, q: Heads, v: Heads, turned: bool) -> tuple[int, ...]:
    if not place.together or q.number(1) is None or v.number(3) is None:
        return ()
    return (-1, q.known(1), v.known(3)) if turned else (q.known(1), -1, v.known(3))


@dataclass(frozen=True)
class _Place:
    """How the four axes are found. together: the products have three, and all heads of all batch entries count as those of one."""

    find: Callable[[gs.Tensor, bool], Heads | None]
    together: bool = False


def _place(match: Match, rank: int) -> _Place | Refusal:
    apart, turned = "apart" in match.tensors, "turned" in match.tensors
    perm = tuple(match.root.attrs.get("perm") or ())
    if turned and perm != (ROWS_FIRST if rank == 4 or apart else FLAT_ROWS_FIRST):
        return Refusal("the result's axes are turned otherwise (perm)", list(perm))
    if "windows" in match.tensors and rank == 3:
        return Refusal("windows of scores of three axes", match["windows"].name)
    if rank == 4:
        return Refusal("is reshaped", match["apart"].name) if apart or "lifted" in match.tensors else _Place(_heads.find)
    pairs = [(match[four], match[three]) for four, three in (("apart", "context"), ("lifted", "product")) if four in match.tensors]
    if "lowered" in match.tensors:
        pairs.append((match.node("lowered").inputs[0], match["lowered"]))
    for four, three in pairs:
        if not _heads.joins(four, three):
            return Refusal(f"the rows of '{four.name}' are not known to be those of '{three.name}'", query.shape(four))
    masks = [match[name] for name in ("added", "more", "hide", "keep", "after") if name in match.tensors]
    for mask in masks if apart and "lifted" not in match.tensors else ():
        dims = query.shape(mask)
        if dims is None or (len(dims) > 2 and dims[-3] != 1):
            return Refusal(f"the mask '{mask.name}' is of batch and heads together", dims)
    if apart:
        return _Place(_heads.find_apart)
    if "lifted" in match.tensors:
        return Refusal("the masks are of batch and heads apart, the result is of both together", match["lifted"].name)
    return _Place(_heads.find_together, together=True)


def _hides_later(value: gs.Tensor, split: Callable[[Array], tuple[Array, Array]]) -> bool:
    """Whether a constant [1, 1, rows, rows] hides from each row the keys behind it alone. `split` says what is shown and what hidden."""
    dims = query.shape(value)
    if dims is None or len(dims) < 2 or dims[-1] != dims[-2] or any(extent != 1 for extent in dims[:-2]) or not query.is_constant(value):
        return False
    array = query.constant(value)
    if array is None or array.size < 4:
        return False
    shown, hidden = split(array.reshape(array.shape[-2:]))
    lower = np.tril(np.ones(shown.shape, bool))
    return bool(shown[lower].all() and hidden[~lower].all())


def _native(match: Match) -> _Site | Refusal:
    """ONNX's operator Attention, from version 23 on."""
    node = match.node("native")
    attrs = node.attrs
    given = [None if value.is_empty() else value for value in node.inputs]
    given += [None] * (7 - len(given))
    if any(value is not None for value in given[4:]):
        return Refusal("has a cache or lengths of its own", ", ".join(value.name for value in given[4:] if value is not None))
    if any(not value.is_empty() and (value.outputs or match.escapes(value)) for value in node.outputs[1:]):
        return Refusal("gives more than the result", len(node.outputs))
    if attrs.get("softcap", 0.0):
        return Refusal("bounds the scores (softcap)", attrs["softcap"])
    for side in ("left_window_size", "right_window_size"):
        if attrs.get(side, -1) != -1:
            return Refusal(f"looks at a window of keys ({side})", attrs[side])
    rank = query.rank(node.inputs[0])
    if rank not in (3, 4) or any(query.rank(value) != rank for value in node.inputs[1:3]):
        return Refusal("q, k and v are not known to have three or four axes", rank)
    many = int(attrs.get("q_num_heads", 0)), int(attrs.get("kv_num_heads", 0)), int(attrs.get("kv_num_heads", 0))
    q, k, v = (
        _heads.find(value) if rank == 4 else _heads.side_by_side(value, heads) for value, heads in zip(node.inputs[:3], many, strict=True)
    )
    if q is None or k is None or v is None or v.scale != 1.0:
        return Refusal("the axes of the keys lie otherwise than batch, heads, rows", node.inputs[1].name)
    size, heads, own = q.number(3), q.number(1), k.number(1)
    if not size or not heads or not own:
        return Refusal("heads are of unknown number or size", f"{query.shape(q.value)} and {query.shape(k.value)}")
    if heads % own == 0:  # the operator repeats heads by itself
        k, v = replace(k, repeats=heads // own), replace(v, repeats=heads // own)
    scale = float(attrs.get("scale", size**-0.5)) * q.scale * k.scale
    mask = given[3]
    # Where it has fewer keys, the operator hides the others: no broadcast.
    if mask is not None and not _heads.same((query.shape(mask) or [None])[-1], k.extent(2)):
        return Refusal(f"the mask '{mask.name}' is not known to be of all keys", f"{query.shape(mask)} and {k.extent(2)}")
    choice = mask is not None and query.dtype(mask) == np.dtype(bool)
    added = () if mask is None or choice else (mask,)
    site = _Site(q, k, v, scale, added, None, mask if choice else None, False, -np.inf, attrs.get("is_causal", 0) == 1, mask is not None)
    return site if rank == 4 else replace(site, y_perm=ROWS_FIRST, result=(0, 0, heads * (v.number(3) or 0)))


def _refuse(match: Match, site: _Site) -> Refusal | None:
    q, k, v = site.q, site.k, site.v
    refusal = _norms.refuse_type(q.value)
    if refusal:
        return refusal
    kind = _norms.element_type(q.value)
    for value in (k.value, v.value, *site.added, *(other for other in (site.windows, site.by_head) if other is not None)):
        if _norms.element_type(value) != kind:
            return Refusal(f"'{value.name}' is of another type than '{q.value.name}'")
    for node in match.nodes:
        if node.op == "Cast" and node.attrs["to"] not in (onnx.TensorProto.FLOAT, kind):
            return Refusal(f"'{node.outputs[0].name}' is cast to", onnx.TensorProto.DataType.Name(node.attrs["to"]).lower())
    if _norms.element_type(match.output) not in (0, kind):
        return Refusal(f"'{match.output.name}' is of another type than '{q.value.name}'")
    if not abs(site.scale) <= np.finfo(np.float32).max:
        return Refusal("the values are scaled on their own", v.value.name)
    return _refuse_heads(q, k, v) or _refuse_batches(q, k, v) or _refuse_windows(match, site) or _refuse_masks(site)


def _refuse_heads(q: Heads, k: Heads, v: Heads) -> Refusal | None:
    for part in (q, k, v):
        size, heads = part.number(3), part.number(1)
        if not size or not heads:
            return Refusal(f"heads of '{part.value.name}' are of unknown number or size", query.shape(part.value))
        if size % 8 or size > LARGEST:
            return Refusal(f"the size of a head is no multiple of 8 up to {LARGEST}", size)
    heads, own = q.number(1) or 0, k.number(1) or 0
    if q.number(3) != k.number(3):
        return Refusal("queries and keys are of different sizes", f"{q.number(3)} and {k.number(3)}")
    if q.repeats != 1 or own != v.number(1) or heads % own or any(part.repeats not in (1, heads // own) for part in (k, v)):
        return Refusal("heads of queries, keys and values do not fit", f"{heads}, {own} and {v.number(1)}")
    for part in (k, v):
        if own not in (1, heads) and part.repeats != heads // own:
            return Refusal(f"heads of '{part.value.name}' are not repeated for those of the queries", f"{own} and {heads}")
    return None


def _refuse_batches(q: Heads, k: Heads, v: Heads) -> Refusal | None:
    batch = q.extent(0)
    for part in (k, v):
        other = part.extent(0)
        if other != batch and (1 in (other, batch) or (isinstance(other, int) and isinstance(batch, int))):
            return Refusal("one of queries, keys and values is a broadcast over the batch", f"{batch} and {other}")
    return None


def _refuse_windows(match: Match, site: _Site) -> Refusal | None:
    """The scores [batch, heads, rows, rows] as [batch / windows, windows, heads, rows, rows], and back."""
    if site.windows is None:
        return None
    scores = [site.q.extent(0), site.q.extent(1), site.q.extent(2), site.k.extent(2)]
    dims, batch = query.shape(site.windows) or [], scores[0]
    if len(dims) != 5 or dims[0] != 1 or dims[2] not in (1, scores[1]) or dims[3:] != scores[2:]:
        return Refusal(f"the mask of the windows '{site.windows.name}' does not fit the scores", dims)
    windows = dims[1]
    if batch is None or not isinstance(windows, int) or windows < 1 or (isinstance(batch, int) and batch % windows):
        return Refusal("the number of windows is unknown or no part of the batch", f"{windows} and {batch}")
    apart, whole = query.shape(match["windowed"]) or [], query.shape(match["windows"]) or []
    # With all other axes as they were, the first can only be the batch without its windows, and the batch again.
    if len(whole) != 4 or None in scores or apart[1:] != [windows, *scores[1:]] or whole[1:] != scores[1:]:
        return Refusal("the scores are split into windows otherwise than along the batch", f"{apart} and {whole}")
    return None


def _refuse_masks(site: _Site) -> Refusal | None:
    known = [site.q.extent(axis) for axis in (0, 1, 2)] + [site.k.extent(2)]
    for value in (*site.added, *([] if site.keep is None else [site.keep])):
        mask = query.shape(value)
        if mask is None or len(mask) > 4:
            return Refusal(f"the mask '{value.name}' is not known to have four axes at most", mask)
        for own, wanted in zip(reversed(mask), reversed(known), strict=False):
            if _norms.grows(own, wanted):
                return Refusal(f"the mask '{value.name}' has another shape than the scores", f"{mask} and {known}")
    return None


def _form(site: _Site) -> Form:
    packed = site.by_head is None and _heads.packed(site.q, site.k, site.v) is not None
    added = "AddedWindows" if site.windows is not None else attention.ADDED[len(site.added)]
    return Form(packed, added, site.keep is not None, site.causal, site.group > 1)


def _settled(match: Match, site: _Site) -> gs.Tensor:
    """The result, with a type and a shape where inference found none."""
    output = match.output
    if output.dtype is None:
        output.dtype = site.q.value.dtype
    if output.shape is None and not site.result:
        output.shape = _shape(site)
    return output


def _shape(site: _Site) -> list[int | str | None]:
    """Of what the node gives."""
    shape = [site.q.extent(0), site.q.number(1), site.q.extent(2), site.v.number(3)]
    return [shape[axis] for axis in site.y_perm]


def _function(opset: int, form: Form) -> onnx.FunctionProto:
    attrs = ["scale", "fill", "hides", "safe", "heads", "kv_heads", "y_perm", "dtype"]
    if form.packed:
        attrs += ["widths", "q_rows", "k_rows", "v_rows"]
    else:
        attrs += ["q_perm", "k_perm", "v_perm"]
    if form.grouped:
        attrs += ["repeats", "k_heads", "v_heads"]
    body = "\n".join(_statements(opset, form))
    return _bodies.define(opset, f"{form.op_type} <{', '.join(attrs)}> ({', '.join(form.inputs)}) => (y) {{ {body} }}")


def _statements(opset: int, form: Form) -> Iterator[str]:
    if form.packed:
        yield "side_by_side = Constant <value = int64[3] {0, 0, -1}> () flat = Reshape (qkv, side_by_side)"
        if opset >= 13:
            yield "parts = Constant <value_ints: ints = @widths> () flat_q, flat_k, flat_v = Split <axis = 2> (flat, parts)"
        else:
            yield "flat_q, flat_k, flat_v = Split <axis = 2, split: ints = @widths> (flat)"
        for name in "qkv":
            yield f"{name}_shape = Constant <value_ints: ints = @{name}_rows> () by_row_{name} = Reshape (flat_{name}, {name}_shape)"
            yield f"own_{name} = Transpose <perm = [0, 2, 1, 3]> (by_row_{name})"
    else:
        yield from (f"own_{name} = Transpose <perm: ints = @{name}_perm> ({name})" for name in "qkv")
    if form.grouped:
        yield "times = Constant <value_ints: ints = @repeats> () two = Constant <value_ints = [2]> ()"
        for name in "kv":
            apart = f"Unsqueeze (own_{name}, two)" if opset >= 13 else f"Unsqueeze <axes = [2]> (own_{name})"
            yield f"apart_{name} = {apart} many_{name} = Expand (apart_{name}, times)"
            yield f"{name}_shape_of_heads = Constant <value_ints: ints = @{name}_heads> ()"
            yield f"all_{name} = Reshape (many_{name}, {name}_shape_of_heads)"
    k, v = ("all_k", "all_v") if form.grouped else ("own_k", "own_v")
    yield f"wide_q = Cast <to = 1> (own_q) wide_k = Cast <to = 1> ({k}) wide_v = Cast <to = 1> ({v})"
    yield "turned_k = Transpose <perm = [0, 1, 3, 2]> (wide_k) product = MatMul (wide_q, turned_k)"
    yield "factor = Constant <value_float: float = @scale> () scores = Mul (product, factor)"
    scores = "scores"
    if form.added:
        yield from _added(opset, form)
        yield "sum = Add (scores, mask) narrow = Cast <to: int = @dtype> (sum) rounded = Cast <to = 1> (narrow)"
        yield f"limit = Constant <value = float {{{MASKING}}}> () masking = LessOrEqual (mask, limit)"
        yield "summed = Where (masking, rounded, sum)"
        scores = "summed"
    if form.kept:
        yield "hide_bits = Constant <value_int: int = @hides> () hide = Cast <to = 9> (hide_bits) kept = Xor (keep, hide)"
        yield f"filler = Constant <value_float: float = @fill> () chosen = Where (kept, {scores}, filler)"
        scores = "chosen"
    if form.causal:
        yield "zero = Constant <value = int64 {0}> () one = Constant <value = int64 {1}> ()"
        yield "second = Constant <value = int64 {2}> () third = Constant <value = int64 {3}> ()"
        yield f"extents = Shape ({scores}) rows = Gather (extents, second) columns = Gather (extents, third)"
        yield "queries = Range (zero, rows, one) keys = Range (zero, columns, one)"
        yield "column = Constant <value_ints = [-1, 1]> () from = Reshape (queries, column) past = LessOrEqual (keys, from)"
        yield f"never = Constant <value = float {{-inf}}> () causal = Where (past, {scores}, never)"
        scores = "causal"
    yield f"weights = Softmax <axis = -1> ({scores})"
    yield "safe_bits = Constant <value_int: int = @safe> () careful = Cast <to = 9> (safe_bits) bad = IsNaN (weights)"
    yield "dead = And (bad, careful) nothing = Constant <value = float {0.0}> () clean = Where (dead, nothing, weights)"
    yield "context = MatMul (clean, wide_v) turned = Transpose <perm: ints = @y_perm> (context) y = Cast <to: int = @dtype> (turned)"


def _added(opset: int, form: Form) -> Iterator[str]:
    if form.added == "Added":
        yield "mask = Cast <to = 1> (added)"
        return
    more = "more"
    if form.added == "AddedWindows":
        # [windows, ...] as often as the batch needs it.
        yield "first = Constant <value_ints = [0]> () after = Constant <value_ints = [1]> () end = Constant <value_ints = [4]> ()"
        yield "all_extents = Shape (scores) batch = Slice (all_extents, first, after) of_mask = Shape (more)"
        yield "windows = Slice (of_mask, first, after) times_each = Div (batch, windows) ones = Constant <value_ints = [1, 1, 1, 1]> ()"
        yield "spread = Concat <axis = 0> (times_each, ones) inner = Slice (of_mask, after, end)"
        yield "any = Constant <value_ints = [-1]> () whole = Concat <axis = 0> (any, inner)"
        yield "in_front = " + ("Unsqueeze (more, first)" if opset >= 13 else "Unsqueeze <axes = [0]> (more)")
        yield "spread_more = Expand (in_front, spread) repeated = Reshape (spread_more, whole)"
        more = "repeated"
    yield f"one_mask = Cast <to = 1> (added) other_mask = Cast <to = 1> ({more}) mask = Add (one_mask, other_mask)"


FUSION = Attention()
