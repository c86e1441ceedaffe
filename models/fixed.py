"""Fixes inputs of a model: `NAME=VALUE` becomes a constant, `NAME:SHAPE` a shape; other axes that are free stay free.

    python -m models.fixed models/real/silero-vad.onnx sr=16000 input:1x576 state:2x1x128 -o models/real/silero-vad-16k.onnx

silero-vad chooses its weights by the sampling rate in an If, which TensorRT 10.6 cannot build ("tScope.getType() != kUNDEFINED", with or
without plugins). One rate and one shape leave no If behind: `onnxfuse optimize` folds it away.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper


def fix(model: onnx.ModelProto, changes: list[str]) -> None:
    """Applies `changes` in place. ValueError where one names no input, or has neither `=` nor `:`."""
    inputs = {value.name: value for value in model.graph.input}
    for change in changes:
        name, sign, text = change.partition("=") if "=" in change else change.partition(":")
        if not sign or name not in inputs:
            raise ValueError(f"{change}: expected NAME=VALUE or NAME:SHAPE of an input: {', '.join(inputs)}")
        tensor = inputs[name].type.tensor_type
        if sign == "=":
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            model.graph.initializer.append(numpy_helper.from_array(np.array(text).astype(dtype), name))
            model.graph.input.remove(inputs[name])
        else:
            shape = [int(length) for length in text.split("x")]
            inputs[name].CopyFrom(helper.make_tensor_value_info(name, tensor.elem_type, shape))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.fixed", description="Fix inputs of a model to constants and shapes.")
    parser.add_argument("model", type=Path)
    parser.add_argument("changes", nargs="+", metavar="NAME=VALUE|NAME:SHAPE")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    model = onnx.load(given.model)
    try:
        fix(model, given.changes)
    except ValueError as fault:
        parser.error(str(fault))
    onnx.save(model, given.out)


if __name__ == "__main__":
    main()
