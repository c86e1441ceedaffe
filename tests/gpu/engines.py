"""What an engine's manifest has to show."""

from __future__ import annotations

from pathlib import Path

import onnx

from onnxfuse.engine.manifest import Manifest


def check_by_plugins(manifest: Manifest, model: Path) -> None:
    """Every fused node of `model` is a plugin's layer, not what its function's body was built to: those nodes have longer names."""
    fused = {node.name for node in onnx.load(str(model)).graph.node if node.domain == "onnxfuse"}
    layers = [layer for layer in manifest.layers if layer.plugin or "plugin" in layer.type.lower()]
    computed = {name for layer in layers for name in layer.nodes}
    assert fused
    assert len(layers) == len(fused), f"layers: {manifest.layers}"
    assert fused <= computed, f"layers: {manifest.layers}"
