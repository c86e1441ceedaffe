"""The three steps from Python: `onnxfuse.optimize`, `onnxfuse.build_engine` and `onnxfuse.compare`, with the commands' defaults.

Paths may be strings. What is wrong with the arguments or a file, what is missing here, and what does not agree are the exceptions of
`onnxfuse.errors`; but outputs that disagree are no exception here: look at `agrees`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnxfuse.engine.manifest import Manifest
    from onnxfuse.measuring import Settings
    from onnxfuse.pipeline import Result

File = str | os.PathLike[str]
Progress = Callable[[str], None]


def optimize(
    model: File,
    out: File | None = None,
    *,
    policy: str = "proven",
    precision: str = "keep",
    gpu: str | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    plan: File | None = None,
    keep_fp32: Sequence[str] = (),
    feeds: Sequence[Mapping[str, np.ndarray]] | None = None,
    dims: Mapping[str, int] | None = None,
    settings: Settings | None = None,
    check: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Rewrites `model` with fused operators into `out` (MODEL.fused.onnx if not given), and checks it in onnxruntime.

    feeds: inputs by name for the check; made up where none are given, with `dims` as the sizes of free axes. settings: of policy
    "measure", which needs a GPU and TensorRT. The result has the decision and reason of each site, and `to_dict()` is the JSON report.
    """
    from onnxfuse import gpus, measuring, pipeline

    source = Path(model)
    rewriting: dict[str, Any] = {
        "precision": precision, "keep_fp32": keep_fp32, "only": only, "skip": skip, "feeds": feeds, "dims": dims, "check": check,
        "progress": progress or pipeline.silent,
    }  # fmt: skip
    target = Path(out) if out is not None else source.with_suffix(".fused.onnx")
    if policy == "measure":
        return measuring.optimize(source, target, gpu=gpu or "auto", settings=settings or measuring.Settings(), **rewriting)
    known = None if gpu is None else gpus.resolve(gpu)
    return pipeline.optimize(source, target, policy=policy, gpu=known, plan=None if plan is None else Path(plan), **rewriting)


def build_engine(
    model: File,
    out: File | None = None,
    *,
    gpu: str = "auto",
    shapes: Sequence[str] = (),
    timing_cache: File | None = None,
    embed_plugins: bool = True,
    use_plugins: bool = True,
) -> Manifest:
    """Builds the engine `out` (MODEL.engine if not given) and its manifest OUT.json for the GPU here; returns the manifest.

    shapes: "NAME:MIN..OPT..MAX" for each input with a free axis. use_plugins False: what TensorRT makes of the same file alone.
    """
    from onnxfuse.engine import build

    source = Path(model)
    return build.build(
        source,
        Path(out) if out is not None else source.with_suffix(".engine"),
        gpu=gpu,
        shapes=shapes,
        timing_cache=None if timing_cache is None else Path(timing_cache),
        embed_plugins=embed_plugins,
        use_plugins=use_plugins,
    )


def compare(
    model: File,
    *others: File,
    data: File | None = None,
    seed: int = 0,
    feeds: int = 2,
    dims: Mapping[str, int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    samples: int = 200,
    layers: bool = False,
    trust: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compares every output of `others` (.onnx, .engine) with those of `model` in onnxruntime, and times the engines side by side.

    Without `others` a fused model is compared with itself undone. `trust` runs code inside engines that no manifest vouches for. Returns
    the JSON report; its "agrees" says how it went.
    """
    from onnxfuse.commands.compare import Wanted, run

    wanted = Wanted(
        model=Path(model),
        others=tuple(map(Path, others)),
        data=None if data is None else Path(data),
        seed=seed,
        feeds=feeds,
        dims=dict(dims or {}),
        rtol=rtol,
        atol=atol,
        samples=samples,
        layers=layers,
        trust=trust,
    )
    return run(wanted, progress or (lambda text: None))
