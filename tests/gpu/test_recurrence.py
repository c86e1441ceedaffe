"""The recurrent kernels on a GPU against float64, at the sizes that tests/plugins/test_emulated_recurrence.py cannot reach."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recurrence_cases
from tests.plugins import kernels, recurrences

Case = recurrences.Case
LSTM, GRU, RESET_FIRST = recurrences.LSTM, recurrences.GRU, recurrences.GRU_RESET_FIRST
EVERY = {"states": True, "lengths": True, "clip": 0.7, "batch_first": True, "directions": 2, "reversed": 2, "layers": 2}
CELLS = pytest.mark.parametrize("cell", [LSTM, GRU, RESET_FIRST], ids=["lstm", "gru", "gru_reset_first"])
HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@pytest.fixture(scope="module")
def launcher(library: Path) -> Any:
    return recurrences.Launcher(library)


@CELLS
@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_hidden_sizes(batch: int, dtype: str, cell: int, launcher: Any, memory: Any) -> None:
    for hidden in (16, 64, 72, 128, 200, 256, 392, 512, 520, 1024):
        recurrences.check(launcher, memory, Case(cell, dtype, 12, batch, 40, hidden), kernels)


@CELLS
@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
def test_all_options(dtype: str, cell: int, launcher: Any, memory: Any) -> None:
    for hidden, width in itertools.product((48, 104, 200, 392, 640), (37, 40)):
        recurrences.check(launcher, memory, Case(cell, dtype, 33, 13, width, hidden, **EVERY), kernels)


@HALVES
@pytest.mark.parametrize("cell", [LSTM, GRU], ids=["lstm", "gru"])
def test_every_variant(cell: int, dtype: str, launcher: Any, memory: Any) -> None:
    options = {"states": True, "lengths": True, "layers": 2}
    for variant in (recurrences.STEPS, recurrences.INDEPENDENT, recurrences.CLUSTER, recurrences.RESIDENT):
        case = Case(cell, dtype, 40, 10, 64, 128, variant=variant, **options)
        small = {"dtype": 1, "directions": 1, "layers": 2, "steps": 1, "batch": 1, "width": 8, "hidden": 128}
        if launcher.variant(recurrences.Problem(**small, variant=variant)) < 0:
            continue  # this GPU has no clusters, or launches nothing cooperatively
        recurrences.check(launcher, memory, case, kernels)


@HALVES
@pytest.mark.parametrize("cell", [LSTM, GRU], ids=["lstm", "gru"])
def test_layers_as_a_wavefront(cell: int, dtype: str, launcher: Any, memory: Any) -> None:
    for hidden, layers, batch in ((512, 2, 1), (256, 4, 1), (200, 3, 13), (136, 2, 2)):
        case = Case(cell, dtype, 50, batch, 40, hidden, reversed=1, layers=layers, states=True, lengths=batch > 1)
        recurrences.check(launcher, memory, case, kernels)


@HALVES
@pytest.mark.parametrize("cell", [LSTM, GRU], ids=["lstm", "gru"])
def test_a_thousand_steps_of_large_weights(cell: int, dtype: str, launcher: Any, memory: Any) -> None:
    for hidden in (128, 256, 512):
        recurrences.check(launcher, memory, Case(cell, dtype, 1000, 2, 64, hidden, trained=3.0), kernels)


@HALVES
def test_what_the_benchmark_times(dtype: str, launcher: Any, memory: Any) -> None:
    """The benchmark's own reference, by torch in float32."""
    torch = pytest.importorskip("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    for sizes in recurrence_cases.RECURRENCES:
        case = recurrence_cases.recurrence(launcher.library, dtype, sizes)
        read, written = (
            [torch.randn(count, device="cuda").to(getattr(torch, dtype)) for count in counts] for counts in (case.reads, case.writes)
        )
        stream = torch.cuda.current_stream().cuda_stream
        assert case.launch([tensor.data_ptr() for tensor in read], [tensor.data_ptr() for tensor in written], stream) == kernels.SUCCESS
        (want,) = case.reference([tensor.float() for tensor in read])
        error = (written[0].float() - want.reshape(-1)).abs().max().item()
        assert error < (4e-3 if dtype == "float16" else 3e-2), f"{sizes}: {error}"
