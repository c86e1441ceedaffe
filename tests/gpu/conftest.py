"""Why the tests of this folder are skipped, said once, and what they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxfuse.engine import trt
from onnxfuse.errors import MissingHere

HERE = Path(__file__).resolve().parent


def why_not() -> str | None:
    """What these tests need and this machine lacks; None where all is here."""
    try:
        trt.tensorrt()
        trt.gpu()
    except MissingHere as missing:
        return str(missing)
    return None


WHY_NOT = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if WHY_NOT is None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU and TensorRT: {WHY_NOT}"), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if str(r.nodeid).startswith("tests/gpu/")]
    if WHY_NOT is not None and skipped:
        terminalreporter.write_line(f"tests/gpu: {len(skipped)} tests skipped, because {WHY_NOT}", yellow=True)
