"""Where NaN and infinity come from: the first node whose inputs are finite and whose output is not, and the values that it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.fusions.base import label
from onnxfuse.graph import query
from onnxfuse.verify.pieces import Pieces, captured, names_read

_KINDS = ((np.isnan, "NaN"), (np.isinf, "infinity"))


@dataclasses.dataclass(frozen=True)
class Source:
    """One place where values stop being finite.

    tensor: the first that has NaN or infinity; node, op: what made it; op is "" where it is a constant of the model. count: how many values
    of it are not finite; index: of the first of those. inputs: what went in there.
    """

    tensor: str
    node: str
    op: str
    what: str
    count: int
    index: tuple[int, ...]
    inputs: tuple[str, ...]

    @property
    def sentence(self) -> str:
        if not self.op:
            return f"{self.what} stands in constant '{self.tensor}' of the model, at {list(self.index)}"
        given = " and ".join(self.inputs) or "nothing"
        places = "1 place" if self.count == 1 else f"{self.count} places"
        return f"{self.what} first comes out of node '{self.node}' ({self.op}), in '{self.tensor}' at {places}: {self.op} of {given}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {**dataclasses.asdict(self), "index": list(self.index), "inputs": list(self.inputs), "sentence": self.sentence}


class Watch:
    """Looks at tensors as they pass, in topological order, and remembers the first that is not finite."""

    def __init__(self) -> None:
        self._seen: set[str] = set()  # finite ones
        self._first: str | None = None

    def see(self, name: str, value: Any) -> None:
        if self._first is None and _bad(value) is not None:
            self._first = name
        if self._first is None:
            self._seen.add(name)

    def explain(self, pieces: Pieces, fetch: Callable[[Sequence[str]], Mapping[str, Any]], feeds: Mapping[str, Any]) -> Source | None:
        """Where what was seen comes from; None where all was finite. fetch: tensors of the run that was watched."""
        if self._first is None:
            return None
        nodes = list(reversed(pieces.between(self._first, self._seen)))
        place = {id(node): i for i, node in enumerate(pieces.model.graph.nodes)}
        nodes.sort(key=lambda node: place[id(node)])
        for node in nodes:
            made = [value.name for value in node.outputs if value.name]
            read = [name for name in names_read(node) if name not in feeds]
            values = dict(fetch(list(dict.fromkeys([*made, *read]))))
            values.update({name: feeds[name] for name in names_read(node) if name in feeds})
            found = _source(node, values)
            if found is not None:
                return found
        return None


def _source(node: gs.Node, values: Mapping[str, Any]) -> Source | None:
    """What this node tells: it holds a constant that is not finite, or makes something that is not of something that is."""
    inputs: list[tuple[str, Any]] = []
    for tensor in (*node.inputs, *captured(node)):
        if not tensor.name:
            continue
        value = query.constant(tensor) if isinstance(tensor, gs.Constant) else values.get(tensor.name)
        bad = _bad(value)
        if bad is not None:
            return Source(tensor.name, "", "", *bad, ()) if isinstance(tensor, gs.Constant) else None
        inputs.append((tensor.name, value))
    for output in node.outputs:
        bad = _bad(values.get(output.name))
        if bad is not None:
            index, shape = bad[2], np.shape(values[output.name])
            given = tuple(_given(value, index, shape) for _, value in inputs if isinstance(value, np.ndarray))
            return Source(output.name, label(node), node.op, *bad, given)
    return None


def _bad(value: Any) -> tuple[str, int, tuple[int, ...]] | None:
    """(NaN or infinity, how many of both, index of the first) of a floating tensor; None where it is finite."""
    if not isinstance(value, np.ndarray) or not (value.dtype.kind == "f" or "float" in value.dtype.name) or not value.size:
        return None
    wide = value if value.dtype.kind == "f" else value.astype(np.float32)
    finite = np.isfinite(wide)
    if finite.all():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmin(finite)), value.shape))
    what = next(name for test, name in _KINDS if test(wide[index]))
    return what, int(value.size - np.count_nonzero(finite)), index


def _given(value: np.ndarray, index: tuple[int, ...], shape: Sequence[int]) -> str:
    """What an input was at `index` of an output of `shape`; where they do not go together, the range of its values."""
    try:
        at = np.broadcast_to(value, shape)[index]
        return f"{at:.6g}" if value.dtype.kind in "iufb" else f"{float(at):.6g}"
    except ValueError:
        if value.dtype.kind not in "iuf" and "float" not in value.dtype.name:
            return f"{value.dtype.name}{list(value.shape)}"
        wide = value.astype(np.float64)
        return f"values from {float(wide.min(initial=np.inf)):.6g} to {float(wide.max(initial=-np.inf)):.6g}"
