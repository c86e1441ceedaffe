"""The library in real TensorRT plugin registries, which work on a machine without a GPU. Each version has a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxfuse import plugins

SCRIPT = """
import json, sys
import numpy as np
import tensorrt_bindings as trt

registry = trt.get_plugin_registry()
loaded = registry.load_library(sys.argv[1])

def make(op, **fields):
    kinds = {np.dtype("float32"): trt.PluginFieldType.FLOAT32, np.dtype("float64"): trt.PluginFieldType.FLOAT64,
             np.dtype("int32"): trt.PluginFieldType.INT32, np.dtype("int64"): trt.PluginFieldType.INT64}
    given = []
    for name, value in fields.items():
        if isinstance(value, str):
            given.append(trt.PluginField(name, value.encode(), trt.PluginFieldType.CHAR))
        else:
            given.append(trt.PluginField(name, value, kinds[value.dtype]))
    creator = registry.get_creator(op, "1", "onnxfuse")
    return creator.create_plugin("node", trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)

def outputs(op, **fields):
    plugin = make(op, **fields)
    if plugin is None:
        return None
    return plugin.get_capability_interface(trt.PluginCapabilityType.BUILD).num_outputs

f32, i32, i64 = (lambda x: np.array([x], np.float32)), (lambda x: np.array([x], np.int32)), (lambda x: np.array([x], np.int64))
good = [
    outputs("SkipLayerNormalization"),
    outputs("SkipLayerNormalization", epsilon=f32(1e-12), outputs=i32(2), has_beta=i32(0)),
    outputs("SkipLayerNormalization", epsilon=i32(1), outputs=i64(2)),
    outputs("SkipRMSNormalization", epsilon=np.array([1e-6]), outputs=i32(1)),
    outputs("BiasGelu"), outputs("BiasGelu", approximate="tanh"), outputs("BiasGelu", approximate="quick"),
    outputs("LSTMSequence", hidden_size=i64(64)),
    outputs("GRUSequence", hidden_size=i32(64), layers=i32(3), y_perm=np.array([2, 0, 1, 3], np.int32)),
    outputs("FusedRotary", rotary=i64(64)),
    outputs("FusedAttention", heads=i32(12), scale=f32(0.125), added=i64(1), q_perm=np.array([0, 1, 2, 3], np.int64)),
    outputs("LayerNormPatches", patch=i64(2), epsilon=f32(1e-6)),
    outputs("EncoderStack", heads=i64(12), inner=i64(3072), scale=f32(0.125), has_mask=i64(1)),
    outputs("Elementwise", layout="1;name=0;rank=1;vector=4;each=1;end=none;groups=1;in=f1;out=fe,?e", code="f0VMRg=="),
]
own = [creator for creator in registry.all_creators if creator.plugin_namespace == "onnxfuse"]
bad = [
    outputs("SkipLayerNormalization", epsilon=f32(-1)),
    outputs("SkipRMSNormalization", outputs=i32(0)),
    outputs("BiasGelu", approximate="sigmoid"),
    outputs("FusedAttention", heads=i32(6), kv_heads=i32(4)),
    outputs("FusedRotary", rotary=i32(63)),
    outputs("LayerNormPatches", patch=i32(0)),
]
print(json.dumps({
    "version": trt.__version__,
    "loaded": loaded is not None,
    "creators": sorted(f"{c.plugin_namespace}::{c.name} {c.plugin_version}" for c in own),
    "fields": {op: [field.name for field in registry.get_creator(op, "1", "onnxfuse").field_names] for op in sys.argv[2:]},
    "good": good,
    "bad": bad,
}))
"""

RECURRENCE = (
    *("direction", "clip", "hidden_size", "layers", "outputs", "linear_before_reset"),
    *("x_perm", "y_perm", "joined", "has_lengths"),
)

ATTENTION = (
    *("scale", "fill", "heads", "kv_heads", "packed", "added", "kept", "hides", "safe", "causal", "widths"),
    *("q_perm", "k_perm", "v_perm", "y_perm"),
)


@pytest.mark.nvcc
@pytest.mark.external
@pytest.mark.parametrize("version", ["10.15", "11.2"])
def test_real_registry(version: str, tensorrt: Callable[[str], Any], library: Callable[[int], plugins.Library], tmp_path: Path) -> None:
    trt = tensorrt(version)
    script = tmp_path / "registry.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(library(90).path), *sorted(plugins.PLUGIN_OPS)],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(trt.libraries),
            "PYTHONPATH": os.pathsep.join([str(trt.site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["version"].startswith(f"{version}.")
    assert said["loaded"]
    assert said["creators"] == sorted(f"onnxfuse::{op} 1" for op in plugins.PLUGIN_OPS)
    assert said["fields"] == {
        "SkipLayerNormalization": ["epsilon", "outputs", "has_beta"],
        "SkipRMSNormalization": ["epsilon", "outputs"],
        "BiasGelu": ["approximate"],
        "DepthwiseConvLayerNorm": ["epsilon", "channels_last"],
        "LayerNormPatches": ["epsilon", "patch", "channels_first"],
        "GroupNormSilu": ["epsilon", "num_groups", "film", "silu"],
        "Linear": ["activation", "residual", "gated", "norm", "epsilon", "outputs"],
        "LSTMSequence": [*RECURRENCE, *(f"has_{part}{number}" for number in (1, 2, 3, 4) for part in "bhc")],
        "FusedAttention": list(ATTENTION),
        "FusedRotary": ["x_perm", "rotary", "interleaved"],
        "GRUSequence": [*RECURRENCE, *(f"has_{part}{number}" for number in (1, 2, 3, 4) for part in "bh")],
        "EncoderStack": ["heads", "inner", "pre_norm", "first_norm", "activation", "has_mask", "epsilon", "scale", "shapes", "code"],
        "Elementwise": ["layout", "code"],
    }
    assert said["good"] == [1, 2, 2, 1, 1, 1, 1, 3, 4, 1, 1, 1, 1, 2]
    assert said["bad"] == [None] * 6
    assert [line for line in done.stderr.splitlines() if line.startswith("onnxfuse: ")] == [
        "onnxfuse: SkipLayerNormalization: field 'epsilon' is -1; it must be a number that is not negative",
        "onnxfuse: SkipRMSNormalization: field 'outputs' is 0; it must be a whole number from 1 to 2",
        "onnxfuse: BiasGelu: field 'approximate' is 'sigmoid'; it must be none, tanh or quick",
        "onnxfuse: FusedAttention: fields 'heads' and 'kv_heads' are 6 and 4; the first must be a multiple of the second",
        "onnxfuse: FusedRotary: field 'rotary' is 63; it must be an even number of elements",
        "onnxfuse: LayerNormPatches: field 'patch' is 0; it must be a whole number from 1 to 256",
    ]
