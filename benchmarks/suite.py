"""What is measured: the models, where they come from, and what they are fed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXPORTED = ROOT / "models" / "exported"
REAL = ROOT / "models" / "real"
INPUTS = ROOT / "models" / "inputs"


@dataclass(frozen=True)
class Entry:
    """A model of the suite."""

    name: str
    model: Path
    origin: str
    """The command that brings the model here."""
    inputs: Path | None = None
    """An .npz with its inputs; None: generated from the declared types, seeded."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Lengths of symbolic dimensions, for generated inputs."""
    torch: bool = False
    """Whether models/export.py can make the PyTorch module, to be timed beside it."""


@dataclass(frozen=True)
class Candidate:
    """One row to measure. Plain values only, so that a row can be measured in another process or on another machine."""

    name: str
    model: str
    inputs: str | None
    dims: dict[str, int]
    precision: str
    policy: str
    samples: int
    work: str
    """Folder for models, engines and the timing cache of this row."""
    timing_cache: str | None
    others: tuple[str, ...]
    """What else to time: "trt_fp16_flag", "pytorch_graph"."""
    search_minutes: float = 15.0
    """The budget of policy measure."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Candidate:
        return Candidate(**{**data, "others": tuple(data["others"])})


def _exported(name: str) -> Entry:
    return Entry(
        name,
        EXPORTED / f"{name}.onnx",
        f"python models/export.py {name}",
        inputs=EXPORTED / f"{name}.npz",
        torch=True,
    )


SUITE = (
    Entry(
        "paraphrase_minilm",
        REAL / "paraphrase-minilm.onnx",
        "models/fetch paraphrase-minilm",
        inputs=INPUTS / "paraphrase-minilm-0.npz",
    ),
    Entry("vit_s_focus", REAL / "vit-s-focus.onnx", "models/fetch vit-s-focus", dims={"batch_size": 1}),
    _exported("bert_base_b1_s128"),
    _exported("bert_base_b32_s128"),
    _exported("lstm_2x512_t100_b1"),
    _exported("bilstm_2x128_t60_b32"),
    _exported("gru_1x256_t200_b1"),
    _exported("convnext_tiny_b1"),
    _exported("swin_tiny_b1"),
    _exported("vit_small_b1"),
    _exported("resnet50_b1"),
)

FURTHER = (
    Entry(
        "paraphrase_minilm_s32",
        REAL / "paraphrase-minilm.onnx",
        "models/fetch paraphrase-minilm",
        dims={"batch_size": 1, "sequence_length": 32},
    ),
    _exported("bert_base_b1_s32"),
    _exported("bert_base_b1_s512"),
    _exported("bert_base_b8_s128"),
    _exported("lstm_2x512_t100_b8"),
    _exported("lstm_2x512_t100_b64"),
    _exported("lstm_1x1024_t100_b1"),
    _exported("convnext_tiny_b8"),
    _exported("convnext_tiny_b32"),
    _exported("convnext_base_b1"),
    Entry("terrain_unet", REAL / "terrain-unet.onnx", "models/fetch terrain-unet", inputs=INPUTS / "terrain-unet-0.npz"),
)
"""Other sizes, measured where they are named: for a fusion that depends on them."""

BY_NAME = {entry.name: entry for entry in (*SUITE, *FURTHER)}
