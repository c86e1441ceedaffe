"""The attention kernels on a GPU: alone against float64, larger than tests/plugins/test_emulated_attention.py has them; and in engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks import attention_cases
from onnxfuse import pipeline
from onnxfuse.engine import build as building
from onnxfuse.engine.run import Engine
from tests.fusions import attentions as written
from tests.fusions import helpers
from tests.gpu import engines
from tests.plugins import attentions, kernels

Case = attentions.Case
ROWS = pytest.mark.parametrize("rows", [16, 32, 64])
WARPS = pytest.mark.parametrize("warps", [4, 8])
HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
DTYPES = pytest.mark.parametrize("dtype", list(kernels.DTYPES))


@pytest.fixture(scope="module")
def launcher(library: Path) -> Any:
    return attentions.Launcher(library)


def check(launcher: Any, memory: Any, **fields: Any) -> None:
    attentions.check(launcher, memory, Case(**fields), kernels)


@ROWS
@WARPS
@HALVES
@pytest.mark.parametrize("head", [8, 32, 40, 64, 80, 96, 128, 192, 256])
def test_heads_of_every_size(head: int, dtype: str, warps: int, rows: int, launcher: Any, memory: Any) -> None:
    for queries, keys in ((1, 1), (49, 49), (128, 700), (257, 257)) if head <= 128 or warps == 4 else ():
        check(launcher, memory, dtype=dtype, rows=rows, warps=warps, head=head, queries=queries, keys=keys, batch=2, heads=4)


@DTYPES
def test_masks(dtype: str, launcher: Any, memory: Any) -> None:
    for rows in (0,) if dtype == "float32" else (16, 32, 64):
        common = {"dtype": dtype, "rows": rows, "batch": 8, "heads": 12, "queries": 49, "keys": 49, "head": 32, "layout": "packed"}
        check(launcher, memory, **common, added=((1, 12, 49, 49), (4, 1, 49, 49)), low=-100.0, padding=20)
        check(launcher, memory, **common, added=((8, 1, 1, 49),), padding=9, low=float("-inf"), whole=True)
        check(launcher, memory, **common, keep=(8, 1, 49, 49), fill=float("-inf"))
        check(launcher, memory, **common, keep=(8, 1, 1, 49), hides=1, whole=False)


@DTYPES
def test_causal_groups_and_long_sequences(dtype: str, launcher: Any, memory: Any) -> None:
    check(launcher, memory, dtype=dtype, heads=32, kv_heads=8, queries=512, keys=512, head=128, causal=1)
    check(launcher, memory, dtype=dtype, heads=8, kv_heads=2, queries=5, keys=4000, head=128, causal=1, offset=3995)
    check(launcher, memory, dtype=dtype, heads=6, queries=1500, keys=1500)


@HALVES
@pytest.mark.parametrize("splits", [2, 7, 16])
def test_keys_shared_out_to_blocks(splits: int, dtype: str, launcher: Any, memory: Any) -> None:
    check(launcher, memory, dtype=dtype, queries=1, keys=8192, heads=8, head=128, splits=splits, early=1)
    check(launcher, memory, dtype=dtype, queries=40, keys=6000, heads=2, rows=64, splits=splits, added=((1, 1, 1, 6000),))


@HALVES
def test_cases_of_the_benchmark(dtype: str, launcher: Any) -> None:
    torch = pytest.importorskip("torch")
    for case in attention_cases.attentions(launcher.library, dtype, False):
        read, written = (
            [torch.randn(count, device="cuda").to(getattr(torch, dtype)) for count in counts] for counts in (case.reads, case.writes)
        )
        stream = torch.cuda.current_stream().cuda_stream
        assert case.launch([tensor.data_ptr() for tensor in read], [tensor.data_ptr() for tensor in written], stream) == kernels.SUCCESS
        (want,) = case.reference([tensor.float() for tensor in read])
        error = (written[0].float() - want.reshape(-1)).abs().max().item()
        assert error < (4e-3 if dtype == "float16" else 3e-2), f"{case.kernel}: {error}"


def padded(w: written.Written) -> None:
    mask = np.zeros((written.B, 1, 1, written.S), w.dtype)
    mask[0, ..., 3:] = -10000.0
    written.bert(w, w.given("mask", values=mask))


FORMS: dict[str, Callable[[written.Written], object]] = {
    "FusedAttentionAdded": padded,
    "FusedAttentionPacked": written.vit,
    "FusedAttentionPackedAddedWindows": written.swin,
    "FusedAttentionAddedWindows": written.cosine,
    "FusedAttentionKept": written.replaced,
    "FusedAttentionAddedGrouped": written.grouped,
    "FusedAttention": written.bart,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_engine_with_every_form(dtype: Any, tmp_path: Path) -> None:
    """Masks that are added and replace, three tensors and one, windows, grouped queries, three axes: each by its plugin."""
    w = written.Written(dtype=dtype)
    for w.prefix, write in FORMS.items():
        write(w)
    onnx.save(w.model(), tmp_path / "model.onnx")
    done = pipeline.optimize(tmp_path / "model.onnx", tmp_path / "fused.onnx", policy="all", skip=("elementwise",), check=False)
    assert [decision.site.fusion for decision in done.decisions if decision.fused] == ["attention"] * len(FORMS)
    manifest = building.build(tmp_path / "fused.onnx", tmp_path / "fused.engine")
    assert manifest.plugins is not None
    assert manifest.plugins.ops == tuple(sorted(FORMS))
    engines.check_by_plugins(manifest, tmp_path / "fused.onnx")
    with Engine.load(tmp_path / "fused.engine") as engine:
        outputs = engine.run(w.feeds)
    for form, name, want in zip(FORMS, w.outputs, helpers.run(w.model(), w.feeds), strict=True):
        np.testing.assert_allclose(outputs[name].astype(np.float32), want.astype(np.float32), rtol=1e-2, atol=1e-2, err_msg=form)


def test_an_engine_of_any_batch_and_length(tmp_path: Path) -> None:
    w = written.Written(dtype=np.float16)
    written.bert(w, None, batch="B", rows="S")
    onnx.save(w.model(), tmp_path / "model.onnx")
    pipeline.optimize(tmp_path / "model.onnx", tmp_path / "fused.onnx", policy="all", check=False)
    width = written.H * written.D
    shapes = [f"{name}:1x1x{width}..2x64x{width}..4x512x{width}" for name in "qkv"]
    manifest = building.build(tmp_path / "fused.onnx", tmp_path / "fused.engine", shapes=shapes)
    engines.check_by_plugins(manifest, tmp_path / "fused.onnx")
    with Engine.load(tmp_path / "fused.engine") as engine:
        for batch, rows in ((1, 1), (4, 512), (3, 77)):
            feeds = {name: written.random(batch, rows, width, seed=i, dtype=np.float16) for i, name in enumerate("qkv")}
            (want,), (got,) = helpers.run(w.model(), feeds), engine.run(feeds).values()
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=1e-2, atol=1e-2)
