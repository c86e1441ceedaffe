"""Rows of kernels alone, from samples with planted faults; what needs a GPU is in tests/gpu/test_benchmark_faults.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import kernels
from benchmarks.kernel_cases import Case, Shape
from onnxfuse.engine.trt import EngineFault
from onnxfuse.errors import BadInput

PEAK = 4800.0  # GB/s
COPY_MS = 2 * kernels.COPY_BYTES / 4200e6  # a copy of 4200 GB/s
RNG = np.random.default_rng(0)


def case(elements: int = 1 << 25, flops: int = 0, size: str = "large") -> Case:
    shape = Shape(elements // 1024, 1024, "test", size)
    return Case("k", "float16", shape, (elements,), (elements,), lambda *given: 0, lambda read: read, flops=flops)


def steady(level: float, noise: float = 0.001) -> list[float]:
    return [float(value) for value in level * (1 + noise * RNG.standard_normal(60))]


def row(gbps: float = 4000.0, cache: str = "cold", error: float = 0.0, copy: float = COPY_MS, flops: int = 0, **more: Any) -> kernels.Row:
    one = case(flops=flops)
    taken = {"kernel": steady(one.moved / gbps / 1e6, more.pop("noise", 0.001)), "copy": steady(copy), "matmul": steady(1.4)}
    return kernels.row_of(one, cache, taken, error, PEAK, more.pop("marks", ()))


def test_shares_are_of_the_copy_beside() -> None:
    got = row(4000.0)
    assert got["gbps"] == pytest.approx(4000, rel=1e-3)
    assert got["copy_gbps"] == pytest.approx(4200, rel=1e-3)
    assert got["share_of_copy"] == pytest.approx(4000 / 4200, rel=1e-3)
    assert got["share_low"] <= got["share_of_copy"] <= got["share_high"]
    assert got["low"] <= got["microseconds"] <= got["high"]
    assert got["microseconds"] == pytest.approx(1e-3 * case().moved / 4000, rel=1e-3)
    assert (got["agrees"], got["marks"]) == (True, [])
    assert "share_of_matmul" not in got


def test_a_kernel_bound_by_arithmetic_has_a_share_of_the_matmul() -> None:
    flops = kernels.MATMUL_SIZE**3  # half of the product's
    got = row(case().moved / 1.4e6, flops=flops)  # in the product's time
    assert got["share_of_matmul"] == pytest.approx(0.5, rel=1e-3)
    assert got["tflops"] == pytest.approx(flops / 1.4e9, rel=1e-2)


def test_a_warm_cache_in_a_cold_run_is_marked() -> None:
    (mark,) = row(9000.0)["marks"]
    assert mark.endswith("GB/s is above the memory's 4800 GB/s: a warm cache was timed")


def test_a_warm_run_may_be_faster_than_the_memory() -> None:
    assert row(9000.0, cache="warm")["marks"] == []


def test_a_copy_that_was_not_timed_right_is_marked() -> None:
    (mark,) = row(copy=COPY_MS / 2)["marks"]
    assert mark.startswith("copy: 8")


@pytest.mark.parametrize("error", [0.1, float("inf")])
def test_outputs_that_disagree_are_marked(error: float) -> None:
    got = row(error=error)
    assert not got["agrees"]
    assert got["marks"][0].startswith("outputs disagree")
    json.dumps(got, allow_nan=False)


def test_an_interval_too_wide_is_marked() -> None:
    (mark,) = row(noise=0.3)["marks"]
    assert mark.startswith("kernel: interval too wide")


def test_what_the_watch_saw_is_marked() -> None:
    assert row(marks=["another process is on the GPU (7)"])["marks"] == ["another process is on the GPU (7)"]


@pytest.mark.parametrize("fault", [EngineFault("launch failed: cudaError_t 209"), RuntimeError("CUDA error:\n misaligned address")])
def test_a_launch_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def failing(self: object, case: Case, cache: str) -> None:
        raise fault

    monkeypatch.setattr(kernels.Bench, "_measured", failing)
    got = object.__new__(kernels.Bench).row(case(), "cold")
    assert got["failed"] == " ".join(str(fault).split())
    assert "microseconds" not in got
    assert "failed: " in kernels.line(got)


def test_small_cases_are_timed_warm_too() -> None:
    assert kernels.caches(case(1 << 16, size="small")) == ("cold", "warm")
    assert kernels.caches(case()) == ("cold",)


def test_rows_are_merged_by_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"

    def of(kernel: str, us: float) -> dict[str, Any]:
        return {"kernel": kernel, "dtype": "float16", "rows": 1, "width": 2, "threads_per_row": 0, "cache": "cold", "microseconds": us}

    path.write_text(json.dumps({"schema": 1, "machine": {}, "rows": [of("a", 1.0), of("b", 1.0)]}))
    got = kernels.merged(path, {"schema": 1, "machine": {"gpu": "new"}, "rows": [of("b", 2.0), of("c", 2.0)]})
    assert [(r["kernel"], r["microseconds"]) for r in got["rows"]] == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    assert got["machine"] == {"gpu": "new"}
    path.write_text("[]")
    with pytest.raises(BadInput, match="not a results file of kernels"):
        kernels.merged(path, {"rows": []})
