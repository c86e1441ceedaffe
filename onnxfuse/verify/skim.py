"""A model file less its weights: all that says how to feed it, without reading what does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.errors import BadInput, refusal
from onnxfuse.graph.names import shown

if TYPE_CHECKING:
    import onnx


def skeleton(path: Path) -> onnx.ModelProto:
    """The model without the raw data of its large initializers; external data is never opened.

    BadInput: no such file, not an ONNX model, cut short.
    """
    import onnx
    from google.protobuf.message import DecodeError

    from onnxfuse.graph.wire import map_file, split

    model = onnx.ModelProto()
    try:
        model.ParseFromString(split(map_file(Path(path)))[0])
    except (DecodeError, ValueError):  # Damaged and UnicodeDecodeError among them
        raise BadInput(f"{shown(path)}: not an ONNX model, or cut short; export or download it again") from None
    except OSError as error:
        raise BadInput(f"{shown(path)}: {refusal(error)}; name an existing .onnx file") from None
    if not model.HasField("graph"):
        raise BadInput(f"{shown(path)}: not an ONNX model (it holds no graph); name an .onnx file")
    return model
