"""A machine for tests of policy measure: engines that onnxruntime runs, and whose time follows from the operators of their models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfuse import measuring
from onnxfuse.bench import candidate as unit
from onnxfuse.bench.candidate import Candidate
from onnxfuse.bench.timing import Timings
from onnxfuse.bench.watch import Clocks
from onnxfuse.errors import OnnxfuseError
from tests.bench import standin

MILLISECONDS = 0.4


class Lab:
    """factors: what an operator makes of an engine's time; again: the same for engines of the rebuild. folded: where no
    BatchNormalization is left. interrupt_at, slow_at: the number of an order at which Ctrl-C comes, or may come. failing: a fusion
    whose engines crash.
    """

    def __init__(self, factors: Mapping[str, float]) -> None:
        self.factors = dict(factors)
        self.again: dict[str, float] = {}
        self.folded = 1.0
        self.interrupt_at: int | None = None
        self.slow_at = 0
        self.failing = ""
        self.orders: list[Candidate] = []
        self.builds: standin.Builds

    @property
    def measured(self) -> list[str]:
        """The fusions of each order, with "final" for the rebuild."""
        return [_name(candidate) for candidate in self.orders]

    def in_child(self, candidate: Candidate, timeout: float, watch: Callable[[str], None]) -> dict[str, Any]:
        self.orders.append(candidate)
        watch("building")
        if len(self.orders) == self.slow_at:
            print("slow now", flush=True)
            time.sleep(60)
        if len(self.orders) == self.interrupt_at:
            raise KeyboardInterrupt
        if self.failing and self.failing in _name(candidate):
            return {"failed": "crashed (SIGSEGV): x", "status": -11}
        try:
            return unit.measure(candidate)
        except OnnxfuseError as fault:
            return {"failed": str(fault), "status": fault.exit_status}

    def time(self, engines: Mapping[str, Any], feeds: object, samples: int) -> Timings:
        rng = np.random.default_rng(0)
        drift = 1 + 0.001 * rng.standard_normal(samples)
        taken = {name: list(self._milliseconds(load.args[0]) * drift) for name, load in engines.items()}
        steady = Clocks(1980, 3201, 50)
        return Timings(taken, dict.fromkeys(taken, 5), dict.fromkeys(taken, True), steady, steady, ())

    def _milliseconds(self, engine: Path) -> float:
        operators = {node.op_type for node in onnx.load(engine).graph.node}
        factors = {**self.factors, **self.again} if engine.name == "final.engine" else self.factors
        fold = self.folded if "BatchNormalization" not in operators else 1.0
        return float(MILLISECONDS * fold * np.prod([factors.get(operator, 1.0) for operator in operators]))


def _name(candidate: Candidate) -> str:
    name = " ".join(sorted({fusion for fusion, _, fused in candidate.fused.sites if fused}))
    return f"final {name}" if candidate.fused_engine and candidate.fused_engine.endswith("final.engine") else name


def _outputs(model: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """onnxruntime in this process: nothing here makes it crash, and starting a child takes longer than all else."""
    session = onnxruntime.InferenceSession(model.read_bytes(), providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, dict(feeds)), strict=True))


def install(monkeypatch: pytest.MonkeyPatch, factors: Mapping[str, float]) -> Lab:
    """Puts a lab in the place of TensorRT, the GPU, the plugin library and child processes."""
    lab = Lab(factors)
    lab.builds = standin.install(monkeypatch)
    monkeypatch.setattr(unit.timing, "time_placed", lab.time)
    monkeypatch.setattr(unit, "in_child", lab.in_child)
    monkeypatch.setattr("onnxfuse.verify.reference.run", lambda model, feeds: [_outputs(model, feeds[0])])
    monkeypatch.setattr(measuring.plugins, "build", lambda sm: SimpleNamespace(sha256="00"))
    return lab
