"""models/inputs: two shapes for every model, the same each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.catalog import MODELS
from models.inputs import MAKERS, feeds


def test_every_model_has_inputs():
    assert set(MAKERS) == {model.name for model in MODELS}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_inputs_repeat_differ_in_shape_and_are_finite(name: str):
    first, second = feeds(name)
    assert [value.shape for value in first.values()] != [value.shape for value in second.values()]
    for one, again in zip((first, second), feeds(name), strict=True):
        assert one.keys() == again.keys()
        for key, value in one.items():
            assert np.isfinite(value).all()
            assert value.dtype in (np.float32, np.int64)
            np.testing.assert_array_equal(value, again[key])


def test_the_command_writes_what_the_function_gives(root: Path, tmp_path: Path):
    command = [sys.executable, "-m", "models.inputs", "ppocr-cls", "-o", tmp_path]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    for number, wanted in enumerate(feeds("ppocr-cls")):
        with np.load(tmp_path / f"ppocr-cls-{number}.npz") as file:
            np.testing.assert_array_equal(file["x"], wanted["x"])
