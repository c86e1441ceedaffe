"""groupnorm_silu: GroupNormalization, scale and shift of each image's channels (FiLM) and SiLU, where they are there, in one kernel.

    y = silu(GroupNormalization(x, scale, bias))
    y = silu(GroupNormalization(x, scale, bias) * film_scale + film_shift)        film_scale, film_shift [N, C, 1, ...]

When it wins: in diffusion U-Nets, where a runtime writes the normalised map to memory and reads it again for what follows. Without SiLU, as
before the attention of such networks, it is the norm alone. Source of the idea: the GroupNorm plugins of diffusion pipelines; "FiLM: Visual
Reasoning with a General Conditioning Layer", Perez and others, 2017.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.fusions import _bodies, _norms, groupnorm
from onnxfuse.fusions.base import Builder, Fusion, Match, Refusal
from onnxfuse.fusions.pattern import DOMAIN, Pattern, canonical, op, tensor
from onnxfuse.graph import query
from onnxfuse.graph.model import Model

_NORM = canonical("GroupNormalization", tensor("x"), tensor("scale"), tensor("bias"), out="norm")
_FILM = op("Add", op("Mul", _NORM, tensor("film_scale")), tensor("film_shift"))


def _silu(of: Pattern) -> Pattern:
    return canonical("Silu", of)


class GroupNormSilu(Fusion):
    name = "groupnorm_silu"
    kind = "fused"
    needs = ("groupnorm", "silu")
    anchor = "GroupNormalization"
    patterns = (_silu(_FILM), _silu(_NORM), _FILM, _NORM)

    def check(self, match: Match, model: Model) -> Refusal | None:
        x = match["x"]
        attrs = match.node("norm").attrs
        refusal = _norms.refuse_type(x) or _norms.refuse_epsilon(attrs)
        if refusal:
            return refusal
        if attrs.get("stash_type", 1) != 1:
            return Refusal("statistics are not kept in float32 (stash_type)", attrs["stash_type"])
        shape = query.shape(x)
        if shape is None or not 3 <= len(shape) <= 5 or not isinstance(shape[1], int):
            return Refusal(f"'{x.name}' is not proved to be [N, C, ...] of rank 3 to 5 with C known", shape)
        channels, groups = shape[1], int(attrs["num_groups"])
        refusal = groupnorm.refuse_channels(channels)
        if refusal:
            return refusal
        if groups < 1 or channels % groups:
            return Refusal(f"{channels} channels cannot be divided into groups", groups)
        for role in ("scale", "bias"):
            refusal = _refuse_parameter(match[role], role, channels, groups, self._per_group(match, model), x)
            if refusal:
                return refusal
        for role in ("film_scale", "film_shift"):
            refusal = _refuse_film(match, role, shape)
            if refusal:
                return refusal
        return None

    def _per_group(self, match: Match, model: Model) -> bool:
        """Whether scale and bias are one value a group: the operator of versions 18 to 20."""
        return match.node("norm").domain != DOMAIN and model.opset < groupnorm.NATIVE

    def variant(self, match: Match) -> str:
        film = match.get("film_scale") is not None
        if match.root.op == "Silu":
            return "film" if film else "plain"
        return "film_without_silu" if film else "without_silu"

    def rewrite(self, match: Match, new: Builder) -> gs.Node:
        x, attrs = match["x"], match.node("norm").attrs
        groups = int(attrs["num_groups"])
        shape = query.shape(x)
        assert shape is not None
        inputs = [x, *(self._for_channels(match, role, int(shape[1] or 0), groups, new) for role in ("scale", "bias"))]
        film = [match[role] for role in ("film_scale", "film_shift") if match.get(role) is not None]
        kept: dict[str, Any] = groupnorm.attributes(new.opset, groups, float(attrs.get("epsilon", 1e-5)), x)
        name = ("Film" if film else "") + ("GroupNormSilu" if match.root.op == "Silu" else "GroupNorm")
        return new.node(name, [*inputs, *film], [_norms.settle(match, x)], kept, stem=self.name, domain=DOMAIN)

    def _for_channels(self, match: Match, role: str, channels: int, groups: int, new: Builder) -> gs.Tensor:
        value = match[role]
        if not self._per_group(match, new.model):
            return value
        values = query.constant(value)
        assert values is not None
        return new.constant(value.name, np.repeat(values, channels // groups))

    def functions(self, opset: int) -> tuple[onnx.FunctionProto, ...]:
        names, norm = groupnorm.attribute_names(opset), groupnorm.statements(opset, "X", "Scale", "Bias", "normalised")
        inputs, film_inputs = "X, Scale, Bias", "X, Scale, Bias, FilmScale, FilmShift"
        film, as_it_is = "modulated = Mul (normalised, FilmScale) z = Add (modulated, FilmShift)", "z = Identity (normalised)"
        silu, nothing = "gate = Sigmoid (z) Y = Mul (z, gate)", "Y = Identity (z)"
        bodies = {
            f"GroupNorm <{names}> ({inputs})": f"{as_it_is} {nothing}",
            f"GroupNormSilu <{names}> ({inputs})": f"{as_it_is} {silu}",
            f"FilmGroupNorm <{names}> ({film_inputs})": f"{film} {nothing}",
            f"FilmGroupNormSilu <{names}> ({film_inputs})": f"{film} {silu}",
        }
        return tuple(_bodies.define(opset, f"{head} => (Y) {{ {norm} {body} }}") for head, body in bodies.items())


def _refuse_parameter(value: gs.Tensor, role: str, channels: int, groups: int, per_group: bool, x: gs.Tensor) -> Refusal | None:
    wanted = groups if per_group else channels
    if query.shape(value) != [wanted]:
        return Refusal(f"{role} '{value.name}' is not one value for each of {wanted}", query.shape(value))
    if per_group and not query.is_constant(value):
        return Refusal(f"{role} of the groups is computed at run time", value.name)
    if _norms.element_type(value) != _norms.element_type(x):
        return Refusal(f"{role} '{value.name}' is of another type than '{x.name}'")
    return None


def _refuse_film(match: Match, role: str, shape: list[int | str | None]) -> Refusal | None:
    """One value for each channel of each image: [N, C, 1, ...], computed or constant."""
    value = match.get(role)
    if value is None:
        return None
    wanted = [shape[0], shape[1], *(1 for _ in shape[2:])]
    found = query.shape(value)
    if found != wanted or found[0] is None:
        return Refusal(f"'{value.name}' is not proved to be one value for each channel of each image, {wanted}", found)
    if _norms.element_type(value) != _norms.element_type(match["x"]):
        return Refusal(f"'{value.name}' is of another type than '{match['x'].name}'")
    return None


FUSION = GroupNormSilu()
