"""What stands in for TensorRT where there is none: onnxruntime runs the model that an engine would have been built of."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from onnxfuse.bench import candidate, layers
from onnxfuse.bench.layers import LayerTime
from onnxfuse.bench.timing import Timings
from onnxfuse.bench.watch import Clocks
from onnxfuse.engine import manifest, trt
from onnxfuse.engine.trt import TensorSpec
from tests.engine.test_manifest import example

GPU = trt.Device("NVIDIA H200", 90, "580.1")
LEVELS = {"automatic": 0.4, "fused": 0.3, "trt_fp16_flag": 0.5}
"""Milliseconds of each engine."""


class StandIn:
    """An engine that onnxruntime runs; `error` is added to what one called fused gives."""

    error = 0.0

    def __init__(self, path: Path) -> None:
        self._session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        self._noise = 1e-4 + (self.error if path.name == "fused.engine" else 0.0)
        self.inputs = tuple(TensorSpec(i.name, "float32", tuple(-1 for _ in i.shape), True, False) for i in self._session.get_inputs())

    @classmethod
    def load(cls, path: Path) -> StandIn:
        return cls(path)

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [o.name for o in self._session.get_outputs()]
        return {name: value + self._noise for name, value in zip(names, self._session.run(None, feeds), strict=True)}

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        pass


class Builds:
    """Builds engines by copying models, and remembers what was built: (engine's file, with plugins, timing cache)."""

    def __init__(self) -> None:
        self.done: list[tuple[str, bool, str | None]] = []

    def build(
        self, model: Path, out: Path, *, shapes: object = (), timing_cache: Path | None = None, use_plugins: bool = True
    ) -> manifest.Manifest:
        shutil.copy(model, out)
        self.done.append((out.name, use_plugins, str(timing_cache) if timing_cache else None))
        built = dataclasses.replace(
            example(), model_sha256=manifest.model_digest(model), gpu=GPU.name, sm=GPU.sm, driver=GPU.driver, tensorrt="10.6.0"
        )
        manifest.path_of(out).write_text(built.to_json())
        return built


def timings(engines: Mapping[str, Any], feeds: object, samples: int) -> Timings:
    """Steady samples at LEVELS."""
    rng = np.random.default_rng(0)
    taken = {name: list(LEVELS[name] * (1 + 0.001 * rng.standard_normal(samples))) for name in engines}
    steady = Clocks(1980, 3201, 50)
    return Timings(taken, dict.fromkeys(taken, 5), dict.fromkeys(taken, True), steady, steady, ())


PROFILE = layers.report(
    [LayerTime("norm", "kgen", ("residual", "norm"), 4.0)],
    [LayerTime("norm", "PluginV3", ("residual", "norm"), 3.0, "SkipLayerNormalization")],
)
"""What the layers of two engines would be."""
SUMMARY = PROFILE["diff"]["summary"]


def profiles(*about: object) -> tuple[dict[str, Any], list[str]]:
    return PROFILE, []


def install(monkeypatch: pytest.MonkeyPatch) -> Builds:
    """Puts all of it in the place of TensorRT, in the unit of work."""
    builds = Builds()
    monkeypatch.setattr(candidate.build, "build", builds.build)
    monkeypatch.setattr(candidate, "Engine", StandIn)
    monkeypatch.setattr(candidate.timing, "time_placed", timings)
    monkeypatch.setattr(candidate, "_layers", profiles)
    monkeypatch.setattr(trt, "gpu", lambda: GPU)
    monkeypatch.setattr(trt, "version", lambda: "10.6.0")
    return builds
