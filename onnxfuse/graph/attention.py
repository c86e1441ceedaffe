"""Forms of the fused attention and their op types: an ONNX function has no optional statements, so each form has its own.

Inputs: q, k, v, each [batch, rows, heads, size] or [batch, heads, rows, size], or all of them in one tensor [batch, rows, heads * size side
by side]; then what is added to the scores, once or twice; then which scores are kept. Output: y, as q.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

PLUGIN = "FusedAttention"
# How often something is added to the scores. "Windows": the second mask has fewer batch entries than q, and is repeated for them.
ADDED = ("", "Added", "AddedTwice", "AddedWindows")


@dataclass(frozen=True)
class Form:
    """packed: q, k and v are one tensor. kept: some scores are replaced. grouped: several heads of q share one of k and v."""

    packed: bool = False
    added: str = ""
    kept: bool = False
    causal: bool = False
    grouped: bool = False

    @property
    def op_type(self) -> str:
        """The op type in domain onnxfuse."""
        flags = (("Kept", self.kept), ("Causal", self.causal), ("Grouped", self.grouped))
        return PLUGIN + ("Packed" if self.packed else "") + self.added + "".join(name for name, there in flags if there)

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs, in order."""
        masks = ["added", "more"][: self.added_count]
        return [*(["qkv"] if self.packed else ["q", "k", "v"]), *masks, *(["keep"] if self.kept else [])]

    @property
    def added_count(self) -> int:
        return min(ADDED.index(self.added), 2)


_EITHER = (False, True)
FORMS = tuple(Form(*flags[:1], added, *flags[1:]) for added in ADDED for flags in product(_EITHER, _EITHER, _EITHER, _EITHER))
# Op type -> the plugin's name and what it is told.
CREATORS: dict[str, tuple[str, dict[str, int | str]]] = {
    form.op_type: (
        PLUGIN,
        {"packed": int(form.packed), "added": form.added_count, "kept": int(form.kept), "causal": int(form.causal)},
    )
    for form in FORMS
}
