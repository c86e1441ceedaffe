"""The CUDA compiler, whose headers the emulated kernels need, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest

from onnxfuse import plugins
from onnxfuse.errors import MissingHere


@pytest.fixture(scope="session")
def nvcc(require_external: Callable[[str], NoReturn]) -> plugins.Nvcc:
    try:
        return plugins.find_nvcc()
    except MissingHere as reason:
        require_external(str(reason))
