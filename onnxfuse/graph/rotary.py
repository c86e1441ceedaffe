"""The fused rotary embedding: one op type for each kind, and the plugin that serves all.

Inputs: x, cos, sin. Output: y [batch, heads, rows, size].
"""

from __future__ import annotations

from itertools import product

PLUGIN = "FusedRotary"


def op_type(interleaved: bool, partial: bool) -> str:
    """The op type in domain onnxfuse. interleaved: neighbours make a pair, not halves. partial: the last elements are not turned."""
    return PLUGIN + ("Interleaved" if interleaved else "") + ("Partial" if partial else "")


# Op type -> the plugin's name and what it is told.
CREATORS: dict[str, tuple[str, dict[str, int | str]]] = {
    op_type(interleaved, partial): (PLUGIN, {"interleaved": int(interleaved)}) for interleaved, partial in product((False, True), repeat=2)
}
