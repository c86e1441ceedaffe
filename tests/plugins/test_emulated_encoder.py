"""The encoder kernel on the host, clusters, barriers and tensor cores included, against float64.

Copies in the background come as late as they may, products of a warpgroup late or at once, blocks run at random pace, and shared memory is
handed out full of NaN. tests/gpu/test_encoder.py checks the same on a GPU, and larger sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.encoder_cases import GELU_TANH, RELU, problem_of
from tests.plugins import encoders, kernels

pytestmark = pytest.mark.nvcc
Case = encoders.Case


@pytest.fixture(scope="module")
def launcher(emulated: Callable[..., Path]) -> Any:
    return encoders.Launcher(emulated("EncoderLayer"))


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much shared memory as an H100 has, and few of its clusters."""
    monkeypatch.setenv("ONNXFUSE_EMULATED_SHARED", "232448")
    monkeypatch.setenv("ONNXFUSE_EMULATED_CLUSTERS", "5")


CASES = {
    "one row block": Case(batch=2, sequence=21),
    "two row blocks": Case(sequence=100, layers=1),
    "pre-norm": Case(sequence=40, pre_norm=True, final=False),
    "norm before, post-norm": Case(sequence=37, first_norm=True),
    "large mean": Case(sequence=37, pre_norm=True, final=False, mean=20.0),
    "bfloat16": Case("bfloat16", sequence=40),
    "tanh": Case(sequence=18, activation=GELU_TANH, mask="rows", batch=2),
    "relu, pre-norm, final norm": Case(sequence=37, pre_norm=True, activation=RELU),
    "keys hidden": Case(batch=3, sequence=21, mask="keys"),
    "filled": Case(batch=2, sequence=37, mask="fill"),
    "heads of 64": Case(sequence=37, heads=2),
    "heads of 128": Case(sequence=37, heads=1),
    "more than 128 keys": Case(sequence=200, heads=2, layers=1),
    "four parts": Case(layers=1, sequence=70, inner=512, parts=(2, 2, 2, 4)),
    "two row blocks at a time": Case(layers=1, sequence=100, blocks=(2, 2, 2, 2)),
    "cluster of one": Case(sequence=20, cluster=1),
    "cluster of eight": Case(sequence=20, cluster=8),
    "grid barrier, put back": Case(sequence=32, barrier=2, restore=1),
    "ring, passes": Case(width=64, inner=128, heads=2, batch=2, sequence=90, layers=1, stages=4, clusters=2),
    "width 192, uneven parts": Case(width=192, inner=384, heads=3, batch=2, sequence=33, parts=(2, 1, 2, 4), layers=1),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, launcher: Any) -> None:
    encoders.check(launcher, kernels.HOST, CASES[name])


@pytest.mark.parametrize(
    "case",
    [
        Case(sequence=513),
        Case(batch=65, sequence=128),
        Case(width=96, heads=3),
        Case(width=1088, heads=17),
        Case(heads=8),
        Case(inner=96),
        Case(layers=0),
        Case(final=False),
    ],
)
def test_what_the_kernel_does_not_take_has_no_workspace_and_is_not_launched(case: encoders.Case, launcher: Any) -> None:
    problem = problem_of(case.stack, case.dtype)
    if case.final:
        problem.final_gamma = problem.final_beta = 16
    assert launcher.workspace(problem) == 0
    assert launcher.launch(problem, None, 0) in (kernels.INVALID_VALUE, encoders.NOT_SUPPORTED)


def test_workspace_of_the_largest_shape_is_enough_for_smaller_ones(launcher: Any) -> None:
    """How products are divided depends on the rows: fewer may need more of one part."""

    def problem(batch: int, sequence: int) -> Any:
        given = problem_of(Case(batch=batch, sequence=sequence, width=256, inner=1024).stack, "float16")
        given.final_gamma = given.final_beta = 16
        return given

    most = launcher.workspace_up_to(problem(8, 128))
    for batch, sequence in np.ndindex(8, 128):
        assert launcher.workspace(problem(batch + 1, sequence + 1)) <= most
