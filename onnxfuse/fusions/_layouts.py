"""Channels first and channels last: questions that fusions of both ask."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.fusions.pattern import STANDARD

TO_LAST = (0, 2, 3, 1)
TO_FIRST = (0, 3, 1, 2)


def transposed_from(value: gs.Tensor, perm: tuple[int, ...]) -> gs.Tensor | None:
    """What `value` is a Transpose by `perm` of; None where it is not."""
    # The last one: while sites are rewritten, a tensor comes from the old node and from the new one.
    node = value.inputs[-1] if value.inputs else None
    if node is None or node.op != "Transpose" or node.domain not in STANDARD or tuple(node.attrs.get("perm", ())) != perm:
        return None
    given: gs.Tensor = node.inputs[0]
    return given


def behind_transpose(value: gs.Tensor) -> gs.Tensor | None:
    """The channels-last tensor that a channels-first one was transposed from."""
    return transposed_from(value, TO_FIRST)
