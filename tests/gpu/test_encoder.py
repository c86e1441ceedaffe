"""Encoder layers on a GPU against float64, at the sizes that tests/plugins/test_emulated_encoder.py cannot reach; and in real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks import encoder_cases
from onnxfuse.bench import timing
from onnxfuse.engine import build as building
from onnxfuse.engine import encoder, trt
from onnxfuse.engine.run import Engine
from tests.fusions import helpers
from tests.fusions.test_encoder_layer import WIDTH, Encoder
from tests.plugins import encoders, kernels

Case = encoders.Case
BERT = {"width": 768, "inner": 3072, "heads": 12}
SMALL = {"width": 384, "inner": 1536, "heads": 6}


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    if trt.gpu().sm != encoder.SM:
        pytest.skip(f"encoder layers have a kernel for sm_{encoder.SM} alone; this GPU is sm_{trt.gpu().sm}")


@pytest.fixture(scope="module")
def launcher(library: Path) -> Any:
    return encoders.Launcher(library)


@pytest.mark.parametrize(
    "case",
    [
        Case(sequence=128, layers=12, **BERT),
        Case("bfloat16", sequence=128, **BERT),
        Case(sequence=32, layers=3, width=384, inner=1536, heads=12, mask="keys"),
        Case(sequence=197, layers=12, pre_norm=True, **SMALL),
        Case(sequence=197, pre_norm=True, final=False, mean=20.0, **SMALL),
        Case(sequence=512, **BERT),
        Case(batch=8, sequence=128, mask="fill", **BERT),
        Case(batch=2, sequence=64, mask="rows", **BERT),
        Case(batch=4, sequence=29, first_norm=True, **BERT),
        Case(batch=16, sequence=500, layers=1, **SMALL),
        Case(sequence=100, width=1024, inner=4096, heads=16),
        Case(sequence=100, width=1024, inner=4096, heads=8, activation=encoder_cases.RELU),
        Case(sequence=128, activation=encoder_cases.GELU_TANH, **BERT),
        Case(batch=8, sequence=128, stages=4, **SMALL),
        *(Case(sequence=128, barrier=barrier, restore=1, **BERT) for barrier in (1, 2, 3)),
        Case(sequence=128, cluster=2, **BERT),
        Case(sequence=128, cluster=8, width=256, inner=1024, heads=4),
    ],
    ids=str,
)
def test_values(case: encoders.Case, launcher: Any, memory: Any) -> None:
    encoders.check(launcher, memory, case)


def test_clusters_of_eight_are_too_few_for_wide_layers(launcher: Any) -> None:
    """An FFN of 3072 has 384 tiles, and a slice at most 16 of them: 24 clusters, whose 192 blocks no GPU of sm_90 has at once."""
    problem = encoder_cases.problem_of(Case(sequence=128, **BERT).stack, "float16")
    assert launcher.workspace(problem) > 0
    problem.cluster = 8
    assert launcher.workspace(problem) == 0
    assert launcher.launch(problem, None, 0) == encoders.NOT_SUPPORTED


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_the_benchmark_times(dtype: str, launcher: Any, memory: Any) -> None:
    """The benchmark's own reference, by torch in float32."""
    torch = pytest.importorskip("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    for sizes in encoder_cases.STACKS:
        case = encoder_cases.stack(launcher.library, dtype, sizes)
        assert case is not None
        read = torch.randn(case.reads[0], device="cuda").to(getattr(torch, dtype))
        written = torch.full_like(read, float("nan"))
        assert case.launch([read.data_ptr()], [written.data_ptr()], torch.cuda.current_stream().cuda_stream) == kernels.SUCCESS
        want = case.reference([read.float()])[0].reshape(-1)
        error = (written.float() - want).norm() / want.norm()
        assert error < (3e-3 if dtype == "float16" else 2e-2), f"{sizes}: {error}"


@pytest.mark.parametrize("before", [False, True])
def test_an_engine_at_shapes_with_kernels_of_their_own_and_without(before: bool, tmp_path: Path) -> None:
    """The profile's three shapes have kernels that were compiled for them; the others go to the one for any shape. All can be captured."""
    spelling = {"before": before, "masked": "keys", "shapes": "computed", "embedded": not before}
    path = tmp_path / "model.onnx"
    onnx.save(helpers.fuse(Encoder(dtype=np.float16, **spelling).model(3, "batch", "length"), ("encoder_layer",))[0], path)
    shapes = [f"x:1x5x{WIDTH}..2x16x{WIDTH}..8x64x{WIDTH}", "mask:1x1x1x5..2x1x1x16..8x1x1x64"]
    manifest = building.build(path, tmp_path / "model.engine", shapes=shapes)
    assert manifest.plugins is not None
    assert not manifest.left
    session = onnxruntime.InferenceSession(
        Encoder(**spelling).model(3, "batch", "length").SerializeToString(), providers=["CPUExecutionProvider"]
    )
    rng = np.random.default_rng(0)
    with Engine.load(tmp_path / "model.engine") as engine:
        for batch, length in ((1, 5), (2, 16), (8, 64), (3, 17), (1, 64), (8, 33)):
            x = rng.standard_normal((batch, length, WIDTH)).astype(np.float16)
            mask = np.where(rng.random((batch, 1, 1, length)) < 0.2, -1e4, 0).astype(np.float16)
            (want,) = session.run(None, {"x": x.astype(np.float32), "mask": mask.astype(np.float32)})
            (got,) = engine.run({"x": x, "mask": mask}).values()
            assert np.linalg.norm(got.astype(np.float64) - want) <= 3e-3 * np.linalg.norm(want), (batch, length)
        timed = timing.time_engines({"engine": engine}, {"x": x, "mask": mask}, samples=5)
    assert all(timed.captured.values())


def test_too_many_tokens_are_left_to_tensorrt_and_said(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(helpers.fuse(Encoder(dtype=np.float16).model(1, "batch", 5), ("encoder_layer",))[0], path)
    manifest = building.build(path, tmp_path / "model.engine", shapes=[f"x:1x5x{WIDTH}..2x5x{WIDTH}..1000x5x{WIDTH}"])
    (line,) = manifest.left
    assert "more tokens than the kernel takes" in line
