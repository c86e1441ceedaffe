"""Generated kernels in real engines: values against float64, graphs, fresh processes. tests/elementwise checks the same without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfuse.bench import timing
from onnxfuse.elementwise import compiling
from onnxfuse.elementwise.expression import Expression
from onnxfuse.engine import build as building
from onnxfuse.engine import trt
from onnxfuse.engine.run import Engine
from tests.elementwise import cases, reference
from tests.elementwise.emulated import input_shape, values
from tests.elementwise.gpu_kit import model_of

TOGETHER = 10
SHAPES = {2: (37, 72), 3: (5, 7, 9), 4: (2, 6, 5, 16)}
CASES = list(cases.values().items())


def built(
    folder: Path, expressions: list[Expression], shapes: list[tuple[int, ...]], special: bool = True
) -> tuple[Path, dict[str, np.ndarray]]:
    """An engine of these expressions, and inputs for it; special: with NaN, infinities and the like among them."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(model_of(expressions, shapes), path)
    manifest = building.build(path, folder / "model.engine")
    assert manifest.plugins is not None
    assert len(manifest.generated) == len({one.digest for one in expressions})
    rng = np.random.default_rng(0)
    feeds = {
        f"e{number}_i{at}": values(given.dtype, input_shape(given.axes, full), rng, special=special)
        for number, (one, full) in enumerate(zip(expressions, shapes, strict=True))
        for at, given in enumerate(one.inputs)
    }
    return folder / "model.engine", feeds


@pytest.mark.parametrize("start", range(0, len(CASES), TOGETHER))
def test_values(start: int, tmp_path: Path) -> None:
    group = CASES[start : start + TOGETHER]
    expressions = [one for _, one in group]
    shapes = [SHAPES[one.rank] for one in expressions]
    engine, feeds = built(tmp_path / "values", expressions, shapes)
    with Engine.load(engine) as loaded:
        got = loaded.run(feeds)
    for number, (name, one) in enumerate(group):
        inputs = [feeds[f"e{number}_i{at}"] for at in range(len(one.inputs))]
        reference.compare(one, inputs, shapes[number], [got[f"e{number}_o{at}"] for at in range(len(one.outputs))], name)


def test_reductions_in_the_middle_and_quantized_islands(tmp_path: Path) -> None:
    """Short and long rows, and those of one team of lanes; one scale, and one a channel."""
    made = {**cases.midway(), **cases.islands()}
    names = [name for name in made if "bfloat16" not in name and "uint8 float32" not in name]
    expressions = [made[name] for name in names]
    rows = [(40, 24), (3, 5000), (41, 7), (2, 1030), (100, 64), (5, 128)]
    shapes = [*rows, *(SHAPES[4] for _ in names[len(rows) :])]
    full = [(*((1,) * (one.rank - len(shape))), *shape) for one, shape in zip(expressions, shapes, strict=True)]
    engine, feeds = built(tmp_path / "midway", expressions, full, special=False)  # a NaN is its whole row's
    with Engine.load(engine) as loaded:
        got = loaded.run(feeds)
    for number, (name, one) in enumerate(zip(names, expressions, strict=True)):
        inputs = [feeds[f"e{number}_i{at}"] for at in range(len(one.inputs))]
        reference.compare(one, inputs, full[number], [got[f"e{number}_o{at}"] for at in range(len(one.outputs))], name)


def test_an_engine_runs_in_a_fresh_process_and_as_a_graph(tmp_path: Path) -> None:
    engine, feeds = built(tmp_path / "fresh", [cases.film_silu("float16")], [(2, 8, 4, 16)])
    with Engine.load(engine) as loaded:
        first = loaded.run(feeds)
        timed = timing.time_engines({"engine": loaded}, feeds, samples=5)
    assert all(timed.captured.values())
    np.savez(tmp_path / "feeds.npz", **feeds)
    script = (
        "import sys, numpy as np; from pathlib import Path; from onnxfuse.engine.run import Engine\n"
        "with Engine.load(Path(sys.argv[1])) as loaded: np.savez(sys.argv[3], **loaded.run(dict(np.load(sys.argv[2]))))"
    )
    subprocess.run([sys.executable, "-c", script, engine, tmp_path / "feeds.npz", tmp_path / "out.npz"], check=True)
    again = np.load(tmp_path / "out.npz")
    for name, array in first.items():
        np.testing.assert_array_equal(again[name], array)


def test_what_is_too_big_is_cut_in_the_engine_and_said(tmp_path: Path) -> None:
    one = cases.waiting("float16")
    engine, feeds = built(tmp_path / "big", [one], [(37, 72)])
    with Engine.load(engine) as loaded:
        assert loaded.manifest is not None
        assert any("cut behind" in line for line in loaded.manifest.notes)
        got = loaded.run(feeds)
        plan = compiling.fit(one, compiling.compiler(trt.gpu().sm))  # from the cache, as the engine's
    assert plan.cuts
    reference.compare(one, [feeds["e0_i0"]], (37, 72), [got["e0_o0"]], "cut", rounds=reference.stored(plan))
