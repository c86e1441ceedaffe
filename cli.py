#!/usr/bin/env python3
"""Runs onnxfuse from a checkout, without installing it: `python cli.py optimize model.onnx`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from onnxfuse.__main__ import run

if __name__ == "__main__":
    try:
        sys.exit(run())
    except ModuleNotFoundError as missing:
        sys.exit(f"error: {missing.name} is not installed; run `pip install -e .` in {Path(__file__).resolve().parent}")
