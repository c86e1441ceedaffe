"""Makes a folder that checks and times generated kernels on a machine with a GPU, TensorRT and numpy alone: no compiler, no onnxfuse.

python -m tests.elementwise.gpu_kit FOLDER [--gpu h200]      here; then on the GPU: python3 FOLDER/run.py FOLDER OUT
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxfuse import gpus, pipeline, plugins
from onnxfuse.elementwise import body, compiling
from onnxfuse.elementwise.expression import NUMPY, Expression, bytes_each
from onnxfuse.engine import prepare
from onnxfuse.fusions import elementwise
from onnxfuse.fusions.base import Index, find
from onnxfuse.fusions.pattern import DOMAIN
from onnxfuse.graph import query, read
from onnxfuse.plan import policy
from tests.elementwise import cases, reference
from tests.elementwise.emulated import input_shape, values

HERE = Path(__file__).parent
TOGETHER = 10  # expressions in one engine of the value checks
SHAPES = {2: ((37, 72), (5, 19)), 3: ((5, 8, 24), (3, 7, 9)), 4: ((2, 6, 5, 16), (3, 2, 7, 5))}
OPEN = 80  # a length that the model leaves open
LARGE = 64 << 20  # bytes of the full input of a large timing
Plans = dict[str, compiling.Plan]


def model_of(parts: Sequence[Expression], shapes: Sequence[tuple[int | str, ...]], opset: int = 20) -> onnx.ModelProto:
    """A model with a node for each expression, inputs e0_i0..., outputs e0_o0..."""
    nodes, given, made = [], [], []
    for number, (one, full) in enumerate(zip(parts, shapes, strict=True)):
        names = [f"e{number}_i{at}" for at in range(len(one.inputs))]
        outs = [f"e{number}_o{at}" for at in range(len(one.outputs))]
        nodes.append(helper.make_node(body.op_type(one), names, outs, f"node_{number}", domain=DOMAIN, expression=one.text))
        for name, value in zip(names, one.inputs, strict=True):
            given.append(helper.make_tensor_value_info(name, _element(value.dtype), _own(value.axes, full)))
        made += [helper.make_tensor_value_info(name, _element(one.types[v]), None) for name, v in zip(outs, one.outputs, strict=True)]
    graph = helper.make_graph(nodes, "elementwise", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)], ir_version=9)
    model.functions.extend({one.digest: body.function(one, opset, DOMAIN) for one in parts}.values())
    return model


def _own(axes: str, full: tuple[int | str, ...]) -> list[int | str]:
    return [size if letter == "1" else 1 for size, letter in zip(full[len(full) - len(axes) :], axes, strict=True)]


def _element(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(NUMPY[dtype]))


def parser_models(model: onnx.ModelProto, plans: Plans, folder: Path, name: str) -> dict[str, str]:
    """NAME.fused.onnx and NAME.automatic.onnx, as TensorRT's parser takes them."""
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    ops = prepare.plugin_ops_in(path, frozenset({prepare.GENERATED}))
    files = {"fused": f"{name}.fused.onnx", "automatic": f"{name}.automatic.onnx"}
    (folder / files["fused"]).write_bytes(prepare.for_parser(path, ops, plans))
    (folder / files["automatic"]).write_bytes(prepare.for_parser(path, frozenset()))
    path.unlink()
    return files


def value_checks(folder: Path, sm: int) -> list[dict[str, Any]]:
    """Engines of dynamic shape with some expressions each, inputs at two shapes, and what the outputs may be."""
    wanted = list(cases.values().items())
    plans = compiling.fit_all([one.text for _, one in wanted], sm)
    found = []
    for start in range(0, len(wanted), TOGETHER):
        group = wanted[start : start + TOGETHER]
        expressions = [one for _, one in group]
        symbols = [tuple(f"e{number}_{axis}" for axis in range(one.rank)) for number, one in enumerate(expressions)]
        files = parser_models(model_of(expressions, symbols), plans, folder, f"values{start}")
        arrays: dict[str, Any] = {}
        for run in (0, 1):
            for number, one in enumerate(expressions):
                full = SHAPES[one.rank][run]
                rng = np.random.default_rng(start + number)
                inputs = [values(given.dtype, input_shape(given.axes, full), rng, special=run == 1) for given in one.inputs]
                arrays.update({f"{run}/in/e{number}_i{at}": _bits(array) for at, array in enumerate(inputs)})
                for at, limits in enumerate(reference.limits_of(one, inputs, full)):
                    arrays[f"{run}/want/e{number}_o{at}"] = limits.want
                    arrays[f"{run}/bound/e{number}_o{at}"] = limits.bound
                    arrays[f"{run}/sure/e{number}_o{at}"] = limits.sure
        np.savez_compressed(folder / f"values{start}.npz", **arrays)
        largest = {
            f"e{number}_i{at}": _profile(given.axes, one.rank)
            for number, one in enumerate(expressions)
            for at, given in enumerate(one.inputs)
        }
        found.append(
            {
                "name": f"values{start}",
                "model": files["fused"],
                "arrays": f"values{start}.npz",
                "names": [n for n, _ in group],
                "profile": largest,
            }
        )
    return found


def _profile(axes: str, rank: int) -> list[list[int]]:
    runs = [input_shape(axes, full) for full in SHAPES[rank]]
    return [[min(sizes) for sizes in zip(*runs, strict=True)], list(runs[0]), [max(sizes) for sizes in zip(*runs, strict=True)]]


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(np.uint16) if array.dtype == NUMPY["bfloat16"] else array


def from_models(folder: Path) -> Iterator[tuple[str, Expression, tuple[int, ...]]]:
    """The largest chain of each form in the trained models, at its own shape, in half precision."""
    for path in sorted(folder.glob("*.onnx")):
        loaded = read.load(path)
        pipeline.tidy(loaded)
        pipeline.rewrite(loaded, policy.Rules(policy="none"))
        best: dict[str, tuple[int, Expression, tuple[int, ...]]] = {}
        for chain in find(elementwise.FUSION, loaded, Index.of(loaded))[0]:
            assert isinstance(chain, elementwise.Chain)
            full = query.shape(chain.root.inputs[0]) if chain.expression.reduction else query.shape(chain.outputs[-1])
            shape = tuple(size if isinstance(size, int) else OPEN if axis > 1 else 1 for axis, size in enumerate(full or []))
            size = math.prod(shape)
            if len(shape) == chain.expression.rank and size >= best.get(chain.expression.form, (1024,))[0]:
                best[chain.expression.form] = size, chain.expression.retyped("float16"), shape
        for form, (_, expression, shape) in best.items():
            yield f"{path.stem}: {form}", expression, shape


def timings(folder: Path, sm: int, models: Path) -> list[dict[str, Any]]:
    """Pairs of engines of one chain: at its size in the model, and at one that fills memory; and the one that is too big, cut and whole."""
    wanted: list[tuple[str, Expression, tuple[int, ...]]] = list(from_models(models))
    extra = {
        "snake": cases.snake("float16"),
        "gated": cases.gated("float16"),
        "rotary": cases.rotary("float16"),
        "masked softmax": cases.masked_softmax("float16"),
    }
    small = {"snake": (1, 256, 4096), "gated": (1, 512, 2048), "rotary": (1, 12, 512, 64), "masked softmax": (1, 12, 256, 256)}
    wanted += [(name, one, small[name]) for name, one in extra.items()]
    large: dict[str, tuple[str, Expression, tuple[int, ...]]] = {}
    for name, one, shape in wanted:
        times = max(1, LARGE // (2 * math.prod(shape)))
        if one.form not in large and _grows(one):
            large[one.form] = f"{name} at 64 MB", one, (shape[0] * times, *shape[1:])
    found = []
    plans = compiling.fit_all([one.text for _, one, _ in [*wanted, *large.values()]], sm)
    for number, (name, one, shape) in enumerate([*wanted, *large.values()]):
        files = parser_models(model_of([one], [shape]), plans, folder, f"chain{number}")
        found.append(
            {
                "name": name,
                "models": files,
                "shape": list(shape),
                "bytes": bytes_each(one) * math.prod(shape),
                "kernels": plans[one.text].to_dict(),
            }
        )
    for op in ("Sqrt", "Softsign"):
        big = cases.over_fused("float16", op=op)
        shape = (4096, 8192)
        compile_ = compiling.compiler(sm)
        cut = compiling.fit(big, compile_, least=0.5)  # cut whatever its occupancy: this is to show what a cut is worth
        whole = compiling.Plan(big, (compiling.Part(big, (0,), big.outputs, compile_(big)),), ())
        model = model_of([big], [shape])
        files = {"fused": parser_models(model, {big.text: cut}, folder, f"cut_{op}")["fused"]}
        files["whole"] = parser_models(model, {big.text: whole}, folder, f"whole_{op}")["fused"]
        files["automatic"] = f"cut_{op}.automatic.onnx"
        (folder / f"whole_{op}.automatic.onnx").unlink()
        found.append(
            {
                "name": f"64 live values, {op}",
                "models": files,
                "shape": list(shape),
                "bytes": 4 * math.prod(shape),
                "kernels": cut.to_dict(),
                "whole": whole.to_dict(),
            }
        )
    return found


def _grows(one: Expression) -> bool:
    """Whether the first axis may be as long as one likes: something of the full shape has it."""
    return any(value.axes and len(value.axes) == one.rank and value.axes[0] == "1" for value in one.inputs)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("folder", type=Path)
    given.add_argument("--gpu", default="h200")
    given.add_argument("--models", type=Path, default=Path("models/real"))
    arguments = given.parse_args()
    folder = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sm = gpus.resolve(arguments.gpu).sm
    shutil.copyfile(plugins.build(sm).path, folder / "plugins.bin")
    shutil.copyfile(HERE / "gpu_run.py", folder / "run.py")
    about = {"sm": sm, "values": value_checks(folder, sm), "timings": timings(folder, sm, arguments.models)}
    (folder / "kit.json").write_text(json.dumps(about, indent=1))
    print(f"{folder}: {len(cases.values())} expressions to check, {len(about['timings'])} to time")


if __name__ == "__main__":
    main()
