"""Why the tests of this folder are skipped, said once, and what they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxfuse import plugins
from onnxfuse.errors import OnnxfuseError
from tests.conftest import missing_for_gpu
from tests.plugins import kernels

HERE = Path(__file__).resolve().parent


WHY_NOT = missing_for_gpu()


@pytest.fixture(scope="session")
def memory() -> Any:
    """The GPU's memory, as the checks of kernels alone want it."""
    try:
        return kernels.gpu_memory()
    except (ImportError, RuntimeError) as reason:
        pytest.skip(f"needs torch or cupy with a GPU: {reason}")


@pytest.fixture(scope="session")
def library() -> Path:
    """The plugin library, compiled for the GPU that is here."""
    from onnxfuse.engine import trt

    try:
        return plugins.build(trt.gpu().sm).path
    except OnnxfuseError as reason:
        pytest.skip(str(reason))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if WHY_NOT is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU and TensorRT: {WHY_NOT}"), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if str(r.nodeid).startswith("tests/gpu/")]
    if WHY_NOT is not None and skipped:
        terminalreporter.write_line(f"tests/gpu: {len(skipped)} tests skipped, because {WHY_NOT}", yellow=True)
