"""Damaged files, by a seed: each is refused in one line, or optimized into a model that its check vouches for.

ONNXFUSE_MUTATED=5000 damages more of them, ONNXFUSE_SEED=n others.
"""

from __future__ import annotations

import collections
import os
import random
from pathlib import Path

import onnx
import pytest

from tests.commands.conftest import transformer_tail
from tests.fusions.strategies import example
from tests.graph import hostile
from tests.graph.models import parse
from tests.graph.mutation import mutated
from tests.graph.sandbox import Sandbox

COUNT = int(os.environ.get("ONNXFUSE_MUTATED", "300"))
SEED = int(os.environ.get("ONNXFUSE_SEED", "0"))
GROUP = 50  # files a test

TEXTS = (hostile.SOUND, hostile.NORM, hostile.LAYERNORM, hostile.CONV, hostile.TRANSPOSED, hostile.GROUPS, hostile.MOVED)


def original(rng: random.Random, seed: int) -> onnx.ModelProto:
    """A sound model: one of a few that hold every fusion's pattern and every kind of field, or a generated one."""
    kind = rng.randrange(4)
    if kind == 0:
        return hostile.filled(rng.choice(TEXTS))
    return transformer_tail() if kind == 1 and rng.random() < 0.3 else example(lambda *options: rng.choice(options), seed).model


@pytest.mark.parametrize("first", range(SEED, SEED + COUNT, GROUP))
def test_mutated_files_are_refused_in_a_line_or_right(tmp_path: Path, first: int) -> None:
    outcomes: collections.Counter[int] = collections.Counter()
    with Sandbox() as sandbox:
        for seed in range(first, min(first + GROUP, SEED + COUNT)):
            rng = random.Random(seed)
            data = mutated(original(rng, seed), rng)
            (tmp_path / "m.onnx").write_bytes(data)
            outcome = sandbox.run(["optimize", "m.onnx", "-o", "out.onnx", "--policy", "all"], tmp_path)
            words = f"seed {seed}: {outcome.fault}, status {outcome.status}\n{outcome.stdout}{outcome.stderr}"
            assert outcome.fault is None, words
            assert outcome.status in (0, 2, 3), words  # 1: outputs do not agree
            assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", *(["out.onnx"] if outcome.status == 0 else [])], words
            (tmp_path / "out.onnx").unlink(missing_ok=True)
            outcomes[outcome.status] += 1
    assert outcomes[0] > 0, outcomes
    assert outcomes[2] > 0, outcomes


def test_the_originals_are_sound(tmp_path: Path) -> None:
    """Otherwise all would be refused for another reason than the damage."""
    with Sandbox() as sandbox:
        for model in (*map(hostile.filled, TEXTS), transformer_tail(), parse(hostile.SOUND, w=hostile.FOUR)):
            (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
            outcome = sandbox.run(["optimize", "m.onnx", "-o", "out.onnx", "--policy", "all"], tmp_path)
            assert outcome.status == 0, outcome
