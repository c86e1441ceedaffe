"""Inputs and outputs of the fused recurrences, LSTMSequence and GRUSequence: one op type for each number of layers and form of Y.

Inputs: X, then W, R, B of every layer, sequence_lens, then the initial states of every layer (h, and c of an LSTM). B, sequence_lens
and the states may be absent. Outputs: Y, then the last states of every layer.
"""

from __future__ import annotations

from itertools import product

MOST_LAYERS = 4
STATES = {"LSTM": ("h", "c"), "GRU": ("h",)}


def op_type(cell: str, layers: int, joined: bool) -> str:
    """The op type of `layers` layers of ONNX's operator `cell`; `joined`: Y has its directions side by side, and so one axis less."""
    return f"{cell}Sequence{layers if layers > 1 else ''}{'' if joined else 'ByDirection'}"


def cell_of(op_type: str) -> str | None:
    """ONNX's operator that a fused one of domain onnxfuse is made of; None for those that are no recurrence."""
    return next((cell for cell in STATES if op_type.startswith(f"{cell}Sequence")), None)


def input_names(cell: str, layers: int) -> list[str]:
    """Names of the inputs, in order."""
    numbers = range(1, layers + 1)
    states = [f"{state}{number}" for number in numbers for state in STATES[cell]]
    return ["x", *(f"{part}{number}" for number in numbers for part in "wrb"), "lengths", *states]


def output_names(cell: str, layers: int) -> list[str]:
    """Names of the outputs, in order."""
    return ["y", *(f"last_{state}{number}" for number in range(1, layers + 1) for state in STATES[cell])]


def _optional(cell: str, layers: int) -> dict[str, int]:
    names = input_names(cell, layers)
    return {f"has_{name}": place for place, name in enumerate(names) if name == "lengths" or name[0] in "bhc"}


_KINDS = tuple(product(STATES, range(1, MOST_LAYERS + 1), (True, False)))
# Op type -> attribute that says whether an input is there -> its place.
OPTIONAL_INPUTS: dict[str, dict[str, int]] = {op_type(cell, layers, joined): _optional(cell, layers) for cell, layers, joined in _KINDS}
# Op type -> the plugin's name and what it is told.
CREATORS: dict[str, tuple[str, dict[str, int | str]]] = {
    op_type(cell, layers, joined): (f"{cell}Sequence", {"layers": layers, "joined": int(joined)}) for cell, layers, joined in _KINDS
}
