"""The trained models of models/catalog.py: optimized with every legal fusion, they give what they gave, at two shapes each.

`make test-real` fetches them; what is not fetched is skipped with that reason. Values are compared in onnxruntime with its own
optimizations off, on inputs that make the outputs move.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from models.catalog import MODELS, RealModel
from models.inputs import Feeds, feeds
from onnxfuse import pipeline

pytestmark = [pytest.mark.real, pytest.mark.slow]

# A rounding of 1e-7 before a dynamic quantizer flips an 8-bit step, which is a hundredth of a tensor's range and grows from
# layer to layer. There, the tensor that the first quantizer reads is compared.
QUANTIZERS = ("DynamicQuantizeLinear", "QuantizeLinear")


@dataclass(frozen=True)
class Optimized:
    model: RealModel
    path: Path
    report: dict


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def optimized(request, tmp_path_factory) -> Optimized:
    """The model after `onnxfuse optimize --policy all`, checked by the command itself on its inputs, and its report."""
    model: RealModel = request.param
    if not model.path.is_file():
        pytest.skip(f"{model.name} is not fetched: models/fetch {model.name}")
    folder = tmp_path_factory.mktemp(model.name)
    path, report = folder / "fused.onnx", folder / "report.json"
    for number, inputs in enumerate(feeds(model.name)):
        np.savez(folder / f"{number}.npz", **inputs)
    command = [sys.executable, "-m", "onnxfuse", "optimize", model.path, "-o", path, "--policy", "all"]
    command += ["--report", report, "--data", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return Optimized(model, path, json.loads(report.read_text()))


def before_quantizing(model: onnx.ModelProto) -> str | None:
    """The tensor that the first quantizer reads, if there is one."""
    return next((node.input[0] for node in model.graph.node if node.op_type in QUANTIZERS), None)


def outputs(path: Path, inputs: Feeds, tensor: str | None) -> dict[str, np.ndarray]:
    """The model's outputs in onnxruntime, unoptimized; or one tensor inside it."""
    model = onnx.load(path)
    if tensor is not None:
        del model.graph.output[:]
        model.graph.output.append(onnx.ValueInfoProto(name=tensor))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    taken = {put.name: inputs[put.name] for put in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))


@pytest.mark.parametrize("number", [0, 1], ids=["one shape", "another shape"])
def test_outputs_are_what_they_were(optimized: Optimized, number: int):
    inputs = feeds(optimized.model.name)[number]
    tensor = before_quantizing(onnx.load(optimized.model.path))
    wanted = outputs(optimized.model.path, inputs, tensor)
    got = outputs(optimized.path, inputs, tensor)
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        assert got[name].dtype == want.dtype
        assert got[name].shape == want.shape
        if want.dtype.kind != "f":
            np.testing.assert_array_equal(got[name], want)
            continue
        assert np.isfinite(want).all()
        spread = float(want.max() - want.min())
        tight = 1e-5 if tensor is not None else 1e-4  # a few layers lie before the first quantizer
        np.testing.assert_allclose(got[name], want, rtol=10 * tight, atol=tight * max(spread, abs(float(want.max()))))


def test_the_sites_that_were_counted_by_hand_are_found(optimized: Optimized):
    found = collections.Counter(site["fusion"] for site in optimized.report["sites"] if site["decision"] == "fused")
    for fusion, count in optimized.model.sites.items():
        assert found[fusion] == count, f"{fusion}: {found[fusion]} sites, not {count}; all: {dict(found)}"


@pytest.mark.parametrize("model", [model for model in MODELS if model.apart], ids=lambda model: model.name)
def test_without_whole_layers_their_parts_are_found(model: RealModel):
    if not model.path.is_file():
        pytest.skip(f"{model.name} is not fetched: models/fetch {model.name}")
    done = pipeline.optimize(model.path, None, policy="all", skip=("encoder_layer",), check=False)
    found = collections.Counter(decision.site.fusion for decision in done.decisions if decision.fused)
    assert {fusion: found[fusion] for fusion in model.apart} == model.apart


def test_the_interface_is_kept(optimized: Optimized):
    before, after = onnx.load(optimized.model.path), onnx.load(optimized.path)
    for one, other in ((before.graph.input, after.graph.input), (before.graph.output, after.graph.output)):
        assert [value.SerializeToString() for value in one] == [value.SerializeToString() for value in other]
    assert before.ir_version == after.ir_version
    onnx.checker.check_model(after)
