"""The trained models looked into: a right fused file has no piece that is wrong by itself, a planted fault is named, and float64 is had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models.catalog import MODELS, RealModel
from models.inputs import feeds
from onnxfuse import pipeline
from onnxfuse.commands import compare
from tests.verify import plants

pytestmark = [pytest.mark.real, pytest.mark.slow]


def looked(model: RealModel, other: Path, folder: Path) -> dict[str, Any]:
    np.savez(folder / "data.npz", **feeds(model.name)[0])
    return compare.run(compare.Wanted(model.path, (other,), folder / "data.npz", 0, 1, {}, None, None, 2, layers=True))


def fetched(model: RealModel) -> RealModel:
    if not model.path.is_file():
        pytest.skip(f"{model.name} is not fetched: models/fetch {model.name}")
    return model


@pytest.mark.parametrize("precision", ["keep", "fp16"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_nothing_is_wrong_by_itself(model: RealModel, precision: str, tmp_path: Path) -> None:
    fetched(model)
    pipeline.optimize(model.path, tmp_path / "fused.onnx", policy="all", precision=precision, check=False)
    report = looked(model, tmp_path / "fused.onnx", tmp_path)
    (said,) = report["inside"]["subjects"]
    assert said["wrong"] is None, said
    assert precision == "fp16" or said["first"] is None, said
    assert not report["error_budget"]["truth"]["refused"]
    assert report["error_budget"]["truth"]["without"] == 0
    assert "wrong" not in {verdict["kind"] for verdict in report["error_budget"]["verdicts"].values()}


def test_an_epsilon_planted_into_a_trained_model_is_named(tmp_path: Path) -> None:
    model = fetched(next(model for model in MODELS if model.name == "paraphrase-minilm"))
    pipeline.optimize(model.path, tmp_path / "fused.onnx", policy="all", skip=("encoder_layer",), check=False)
    planted = plants.edited(tmp_path / "fused.onnx")
    tensor = plants.wrong_epsilon(planted, "skip_layernorm_2", 1e-3)
    onnx.save(planted, tmp_path / "fused.onnx")
    report = looked(model, tmp_path / "fused.onnx", tmp_path)
    (said,) = report["inside"]["subjects"]
    assert (said["wrong"]["tensor"], said["wrong"]["fusion"], said["wrong"]["node"]) == (tensor, "skip_layernorm", "skip_layernorm_2")
    assert len(said["wrong"]["nodes"]) == 3
