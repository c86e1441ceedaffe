"""What runs the models between two files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onnxfuse.verify.bisect.precision import emulate
from onnxfuse.verify.reference import Outputs, Runtime

Feeds = Mapping[str, np.ndarray[Any, Any]]


class Backend(Protocol):
    """Runs a model on each of several feeds; the same question may be asked again, and answered differently.

    same_dtype: whether outputs have the types that the model declares.
    """

    @property
    def name(self) -> str: ...

    @property
    def same_dtype(self) -> bool: ...

    def run(self, model: Path, feeds: Sequence[Feeds]) -> Sequence[Outputs]: ...


@dataclass(frozen=True)
class OnnxRuntime:
    """onnxruntime on the CPU, or onnx.reference for what it has no kernels for. With `rounded`, a model in bfloat16 is computed in float32
    and rounded after each operator: onnxruntime has hardly a kernel for it, and onnx.reference sums in it.
    """

    runtime: Runtime
    evaluator: str
    rounded: bool = False
    same_dtype: bool = True

    @property
    def name(self) -> str:
        return f"{self.evaluator}, in float32 and rounded after each operator" if self.rounded else self.evaluator

    def run(self, model: Path, feeds: Sequence[Feeds], tensors: Sequence[str] | None = None) -> Sequence[Outputs]:
        """Outputs, or these tensors, for each feed."""
        if not self.rounded:
            return self.runtime.run(model, feeds, tensors, self.evaluator)
        copy = model.with_suffix(".rounded.onnx")
        shutil.copyfile(model, copy)
        try:
            emulate(copy)
            return self.runtime.run(copy, [{name: _wide(array) for name, array in feed.items()} for feed in feeds], tensors, self.evaluator)
        finally:
            copy.unlink(missing_ok=True)


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
