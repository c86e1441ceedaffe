#!/usr/bin/env python3
"""Export the architectures of the benchmark suite, and further sizes of them, to ONNX, with random weights (seed 0), into models/exported/.

    python models/export.py                        all of them
    python models/export.py bert_base_b1_s128      one
    python models/export.py --half resnet50_b1     the module in half precision, instead of float32
    python models/export.py --list                 what there is

Needs torch and onnxscript; transformers for the BERT models, timm for the vision models. NAME.onnx is written with
NAME.npz, its seeded inputs. The usual way to half precision is from the float32 file: `onnxfuse optimize NAME.onnx
--precision fp16`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

EXPORTED = Path(__file__).resolve().parent / "exported"
OPSET = 20
SEED = 0


@dataclass(frozen=True)
class Architecture:
    """A module of the suite and its inputs. Both are made when called, seeded, in float32 on the CPU."""

    what: str
    module: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]


def _torch() -> Any:
    torch = importlib.import_module("torch")
    torch.manual_seed(SEED)
    return torch


def _bert() -> Any:
    """BertModel of bert-base without a mask: token states and pooled state.

    Its parts are called one by one, because BertModel itself makes a mask of ones where none is given, which exports as
    a Where and an IsNaN in every layer.
    """
    torch = _torch()
    transformers = importlib.import_module("transformers")
    bert = transformers.BertModel(transformers.BertConfig(attn_implementation="sdpa", use_cache=False))

    class Encoder(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: Any) -> tuple[Any, Any]:
            kinds = torch.zeros_like(input_ids)
            states = self.bert.encoder(self.bert.embeddings(input_ids=input_ids, token_type_ids=kinds))[0]
            return states, self.bert.pooler(states)

    return Encoder().eval()


def _ids(batch: int, length: int) -> tuple[Any, ...]:
    """Token ids of BERT's vocabulary, without its special tokens (below 1000)."""
    return (_torch().randint(1000, 30522, (batch, length)),)


def _recurrent(kind: str, size: int, layers: int, bidirectional: bool) -> Any:
    """An LSTM or GRU, batch first, of which the output sequence and the final states stay; zero initial states."""
    torch = _torch()
    network = getattr(torch.nn, kind)(size, size, layers, batch_first=True, bidirectional=bidirectional)

    class Recurrent(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Any) -> Any:
            output, state = self.network(x)
            return (output, *state) if isinstance(state, tuple) else (output, state)

    return Recurrent().eval()


def _sequence(batch: int, length: int, size: int) -> tuple[Any, ...]:
    return (_torch().randn(batch, length, size),)


def _timm(name: str) -> Any:
    _torch()
    return importlib.import_module("timm").create_model(name, pretrained=False).eval()


def _pictures(batch: int) -> tuple[Any, ...]:
    return (_torch().randn(batch, 3, 224, 224),)


def _vision(name: str, batch: int = 1) -> Architecture:
    what = f"timm {name}, 224 x 224, batch {batch}"
    return Architecture(what, lambda: _timm(name), lambda: _pictures(batch), ("image",), ("logits",))


def _bert_base(batch: int, length: int) -> Architecture:
    what = f"transformers BertModel, 12 layers of 768, batch {batch}, {length} tokens"
    return Architecture(what, _bert, lambda: _ids(batch, length), ("input_ids",), ("last_hidden_state", "pooler_output"))


def _lstm(size: int, layers: int, batch: int) -> Architecture:
    what = f"LSTM, {layers} layer{'s' if layers > 1 else ''} of {size}, 100 steps, batch {batch}"
    module = partial(_recurrent, "LSTM", size, layers, False)
    return Architecture(what, module, lambda: _sequence(batch, 100, size), ("x",), ("output", "h", "c"))


MODELS: dict[str, Architecture] = {
    "bert_base_b1_s128": _bert_base(1, 128),
    "bert_base_b32_s128": _bert_base(32, 128),
    "lstm_2x512_t100_b1": _lstm(512, 2, 1),
    "bilstm_2x128_t60_b32": Architecture(
        "LSTM, 2 layers of 128, both directions, 60 steps, batch 32",
        lambda: _recurrent("LSTM", 128, 2, True),
        lambda: _sequence(32, 60, 128),
        ("x",),
        ("output", "h", "c"),
    ),
    "gru_1x256_t200_b1": Architecture(
        "GRU, 1 layer of 256, 200 steps, batch 1",
        lambda: _recurrent("GRU", 256, 1, False),
        lambda: _sequence(1, 200, 256),
        ("x",),
        ("output", "h"),
    ),
    "convnext_tiny_b1": _vision("convnext_tiny"),
    "swin_tiny_b1": _vision("swin_tiny_patch4_window7_224"),
    "vit_small_b1": _vision("vit_small_patch16_224"),
    "resnet50_b1": _vision("resnet50"),
    # Other sizes of these, beyond the suite.
    "bert_base_b1_s32": _bert_base(1, 32),
    "bert_base_b1_s512": _bert_base(1, 512),
    "bert_base_b8_s128": _bert_base(8, 128),
    "lstm_2x512_t100_b8": _lstm(512, 2, 8),
    "lstm_2x512_t100_b64": _lstm(512, 2, 64),
    "lstm_1x1024_t100_b1": _lstm(1024, 1, 1),
    "convnext_tiny_b8": _vision("convnext_tiny", 8),
    "convnext_tiny_b32": _vision("convnext_tiny", 32),
    "convnext_base_b1": _vision("convnext_base"),
}

# Only the older exporter writes a recurrence as one ONNX node.
LEGACY = frozenset(name for name in MODELS if name.startswith(("lstm_", "bilstm_", "gru_")))


def export(name: str, folder: Path = EXPORTED, half: bool = False) -> Path:
    """Writes folder/NAME.onnx and folder/NAME.npz, whole or not at all; returns the path of the model.

    `half` exports the module in half precision, with half-precision inputs.
    """
    import numpy as np

    torch = _torch()
    architecture = MODELS[name]
    module, inputs = architecture.module(), architecture.inputs()
    if half:
        module = module.half()
        inputs = tuple(x.half() if x.is_floating_point() else x for x in inputs)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        model, feeds = Path(temporary) / f"{name}.onnx", Path(temporary) / f"{name}.npz"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on other batch sizes, which these models are not for
            _to_onnx(torch, module, inputs, architecture, model, legacy=name in LEGACY)
        np.savez(feeds, **{n: x.numpy() for n, x in zip(architecture.input_names, inputs, strict=True)})
        _check(model)
        for part in (feeds, model):
            os.replace(part, folder / part.name)
    return folder / f"{name}.onnx"


def _to_onnx(torch: Any, module: Any, inputs: tuple[Any, ...], about: Architecture, out: Path, *, legacy: bool) -> None:
    """torch.onnx.export to one file. The newer exporter first, the older one where the newer fails on this module."""
    names = {"input_names": list(about.input_names), "output_names": list(about.output_names)}
    if not legacy:
        try:
            program = torch.onnx.export(module, inputs, dynamo=True, opset_version=OPSET, verbose=False, **names)
            program.save(str(out), external_data=False)
            return
        except Exception:
            print(f"  the exporter of traced programs failed on {out.stem}; the older one follows", file=sys.stderr)
            traceback.print_exc(limit=-1)
    torch.onnx.export(module, inputs, str(out), dynamo=False, opset_version=OPSET, do_constant_folding=True, external_data=False, **names)


def _check(path: Path) -> None:
    """The file must be valid ONNX, hold its weights, and take and give what was asked."""
    onnx = importlib.import_module("onnx")
    onnx.checker.check_model(str(path))
    if sorted(path.parent.glob("*.data")):
        raise RuntimeError(f"{path.name}: weights were written beside the file")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Export the suite's architectures with random weights.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all)")
    parser.add_argument("--half", action="store_true", help="export the module in half precision")
    parser.add_argument("--out", type=Path, default=EXPORTED, metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="say what there is, and export nothing")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in MODELS]
    if unknown:
        parser.error(f"no model named {unknown[0]!r}; there are: {', '.join(MODELS)}")
    wanted = arguments.names or list(MODELS)
    if arguments.list:
        for name in wanted:
            print(f"{name:22} {MODELS[name].what}")
        return 0
    reasons = [reason for reason in (_attempt(name, arguments.out, arguments.half) for name in wanted) if reason]
    return 1 if reasons else 0


def _attempt(name: str, folder: Path, half: bool) -> str | None:
    """Exports one and says so; returns why it failed."""
    try:
        path = export(name, folder, half)
    except ModuleNotFoundError as error:
        reason = f"the package {error.name} is missing; `pip install {error.name}`"
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
        return None
    print(f"error: {name}: {reason}", file=sys.stderr)
    return reason


if __name__ == "__main__":
    sys.exit(main())
