"""Makes a folder that checks and times generated kernels on a machine with a GPU: no compiler there, no onnxfuse.

python -m tests.elementwise.gpu_kit FOLDER [--gpu h200] [--only-pairs]   here
python3 FOLDER/run.py --part kernels OUT [--seconds N]                   on the GPU: its driver and numpy
python3 FOLDER/run.py --part engines OUT [--seconds N]                   TensorRT, too

With --only-pairs the folder is small, and part engines times chains against TensorRT's own alone.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
from onnx import helper

from benchmarks import results
from models.inputs import feeds
from onnxfuse import gpus, pipeline, plugins
from onnxfuse.bench import stats
from onnxfuse.elementwise import body, compiling, source
from onnxfuse.elementwise.expression import NUMPY, Expression, bytes_each
from onnxfuse.elementwise.operators import NORMALISING
from onnxfuse.engine import prepare
from onnxfuse.fusions import elementwise
from onnxfuse.fusions.base import Index, find
from onnxfuse.fusions.pattern import DOMAIN
from onnxfuse.graph import query, read
from onnxfuse.plan import policy
from onnxfuse.plan.sites import Site
from onnxfuse.plan.verdicts import shape_class
from tests.elementwise import cases, reference
from tests.elementwise.emulated import input_shape, values

HERE = Path(__file__).parent
TOGETHER = 10  # expressions in one engine of the value checks
SHAPES = {2: ((37, 72), (5, 19)), 3: ((5, 8, 24), (3, 7, 9)), 4: ((2, 6, 5, 16), (3, 2, 7, 5))}
OPEN = 80  # a length that the model leaves open and its inputs do not tell
CHAINS = 30
LARGE = {"64 MB": 64 << 20, "256 MB": 256 << 20}  # bytes of one float16 tensor of the full shape
MOST_MOVED = 8  # times 64 MB: what an engine at that size may move
CUT_ANYWAY = compiling.Rule(least=0.5, worth=math.inf)
Plans = Mapping[str, compiling.Plan]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """A chain of a trained model, in half precision, at the size that it has there with an input of models/inputs.py.

    site: its shape as a site of the model has it, named axes with the length that they have there; "?" is one without a name.
    """

    model: str
    expression: Expression
    shape: Shape
    site: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.expression.form} {'x'.join(map(str, self.shape))}"


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


def plan_entry(plan: compiling.Plan, folder: Path, suffix: str = "") -> dict[str, Any]:
    """A plan as gpu_kernels.py reads it; the machine code becomes files of the folder."""
    given = plan.expression
    parts = []
    for part in plan.parts:
        code = f"{part.expression.digest}{suffix}.bin"
        (folder / code).write_bytes(part.generated.image)
        parts.append({"layout": source.layout(part.expression), "code": code, "reads": list(part.reads), "makes": list(part.makes)})
    end = given.reduction
    reduced = given.row_output is not None and end is not None and end.op not in NORMALISING
    return {
        "parts": parts,
        "types": list(given.types),
        "axes": [one.axes for one in given.inputs],
        "outputs": list(given.outputs),
        "reduced": given.row_output if reduced else None,
        "ends_row": end is not None,
        "keeps_axis": bool(end is not None and reduced and end.get("keepdims")),
        "kernels": plan.to_dict()["kernels"],
        "cuts": plan.to_dict()["cuts"],
    }


def value_checks(folder: Path, wanted: Sequence[tuple[str, Expression]], plans: Plans, *, engines: bool) -> list[dict[str, Any]]:
    """Some expressions each, inputs at two shapes, and what the outputs may be; with a model of dynamic shape for an engine of them."""
    found = []
    for start in range(0, len(wanted), TOGETHER):
        name, group = f"values{start}", wanted[start : start + TOGETHER]
        expressions = [one for _, one in group]
        arrays: dict[str, Any] = {}
        for run in (0, 1):
            for number, one in enumerate(expressions):
                full = SHAPES[one.rank][run]
                rng = np.random.default_rng(start + number)
                inputs = [values(given.dtype, input_shape(given.axes, full), rng, special=run == 1) for given in one.inputs]
                arrays.update({f"{run}/in/e{number}_i{at}": _bits(array) for at, array in enumerate(inputs)})
                rounds = reference.stored(plans[one.text])
                for at, limits in enumerate(reference.limits_of(one, inputs, full, rounds=rounds)):
                    arrays[f"{run}/want/e{number}_o{at}"] = limits.want
                    arrays[f"{run}/bound/e{number}_o{at}"] = limits.bound
                    arrays[f"{run}/sure/e{number}_o{at}"] = limits.sure
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        entries = [
            {"name": of, "plan": plan_entry(plans[one.text], folder), "runs": [list(full) for full in SHAPES[one.rank]]}
            for of, one in group
        ]
        found.append(
            {
                "name": name,
                "arrays": f"{name}.npz",
                "expressions": entries,
                **(_engine(folder, name, expressions, plans) if engines else {}),
            }
        )
    return found


def _engine(folder: Path, name: str, expressions: Sequence[Expression], plans: Plans) -> dict[str, Any]:
    symbols = [tuple(f"e{number}_{axis}" for axis in range(one.rank)) for number, one in enumerate(expressions)]
    files = parser_models(model_of(expressions, symbols), plans, folder, name)
    profile = {
        f"e{number}_i{at}": _profile(given.axes, one.rank) for number, one in enumerate(expressions) for at, given in enumerate(one.inputs)
    }
    return {"model": files["fused"], "profile": profile}


def _profile(axes: str, rank: int) -> list[list[int]]:
    runs = [input_shape(axes, full) for full in SHAPES[rank]]
    return [[min(sizes) for sizes in zip(*runs, strict=True)], list(runs[0]), [max(sizes) for sizes in zip(*runs, strict=True)]]


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(np.uint16) if array.dtype == NUMPY["bfloat16"] else array


# --- chains of trained models -------------------------------------------------------------------------------------------


def from_models(folder: Path, most: int = CHAINS) -> list[Chain]:
    """One chain of every expression first, then one of every form and class of shapes, as verdicts are told apart, then the others of most
    elements; no two of one model, expression and channels."""
    found: dict[tuple[str, str, int], Chain] = {}
    for path in sorted(folder.glob("*.onnx")):
        for chain in _chains(path):
            key = path.stem, chain.expression.digest, chain.shape[1] if len(chain.shape) > 2 else chain.shape[-1]
            if key not in found or math.prod(chain.shape) > math.prod(found[key].shape):
                found[key] = chain
    forms: dict[str, Chain] = {}
    ordered = sorted(found.values(), key=lambda chain: -math.prod(chain.shape))
    for chain in ordered:
        forms.setdefault(chain.expression.digest, chain)
    classes = {(chain.expression.form, *shape_class(chain.site)): chain for chain in reversed([*forms.values(), *ordered])}
    first = {id(chain): chain for chain in (*forms.values(), *reversed(classes.values()))}
    return [*first.values(), *(chain for chain in ordered if id(chain) not in first)][:most]


def _chains(path: Path) -> Iterator[Chain]:
    loaded = read.load(path)
    pipeline.tidy(loaded)
    pipeline.rewrite(loaded, policy.Rules(policy="none"))
    matches = [one for one in find(elementwise.FUSION, loaded, Index.of(loaded))[0] if isinstance(one, elementwise.Chain)]
    known = _shapes(path, [tensor for match in matches for tensor in (*match.inputs, *match.outputs)])
    for match in matches:
        ends = match.expression.row_output is not None
        full = query.shape(match.root.inputs[0]) if ends else query.shape(match.outputs[-1])
        seen = next(
            (known[tensor.name] for tensor in (*match.outputs, *match.inputs) if len(known.get(tensor.name, ())) == len(full or [])), None
        )
        shape = tuple(size if isinstance(size, int) else OPEN if axis > 1 else 1 for axis, size in enumerate(full or []))
        if seen is not None and all(not isinstance(size, int) or size == real for size, real in zip(full or [], seen, strict=True)):
            shape = seen
        if len(shape) == match.expression.rank:
            yield Chain(path.stem, match.expression.retyped("float16"), shape, _site(match, shape))


def _site(match: elementwise.Chain, full: Shape) -> str:
    """As proven sees the site where it is told what the named axes are."""
    axes = Site.of(match).shape.split("x")
    real = [*full[: len(axes) - 1], 1] if len(axes) == len(full) and axes[-1] == "1" else list(full)  # what a reduction leaves
    return "x".join("?" if axis == "?" else str(size) for axis, size in zip(axes, real, strict=False))


def _shapes(path: Path, wanted: Sequence[gs.Tensor]) -> dict[str, Shape]:
    """The shapes of tensors when the model runs on its first input."""
    model = onnx.load(path)
    there = {name for node in model.graph.node for name in node.output} - {value.name for value in model.graph.output}
    taken = {tensor.name: query.dtype(tensor) for tensor in wanted if tensor.name in there and query.dtype(tensor) is not None}
    names = list(taken)
    model.graph.output.extend(helper.make_tensor_value_info(name, _element(str(kind)), None) for name, kind in taken.items())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # which keeps every tensor that is asked for
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {name: array.shape for name, array in zip(names, session.run(names, feeds(path.stem)[0]), strict=True)} if names else {}


def _grown(chain: Chain, size: int) -> Shape | None:
    """The shape with a longer first axis, for so many bytes of float16; None where nothing of the full shape has that axis."""
    grows = any(len(one.axes) == chain.expression.rank and one.axes[:1] == "1" for one in chain.expression.inputs)
    first, *others = chain.shape
    times = max(1, size // (2 * math.prod(chain.shape)))
    return (first * times, *others) if grows and times > 1 else None


def chain_entry(chain: Chain, plans: Plans, folder: Path, large: Mapping[str, int], suffix: str = "") -> dict[str, Any]:
    sizes = {"model": chain.shape, **{name: grown for name, size in large.items() if (grown := _grown(chain, size))}}
    return {
        "name": chain.name,
        "model": chain.model,
        "form": chain.expression.form,
        "dtype": "float16",
        "operators": sum(step.op not in ("Constant", "Cast", "Identity") for step in chain.expression.steps),
        "shape": list(chain.shape),
        "sizes": {name: list(shape) for name, shape in sizes.items()},
        "plan": plan_entry(plans[chain.expression.text], folder, suffix),
    }


def pairs(chains: Sequence[Chain], plans: Plans, folder: Path, large: Mapping[str, int]) -> list[dict[str, Any]]:
    """Each chain as an engine with the plugin and one without, at its size in the model, and at 64 MB where it grows."""
    found = []
    wanted = [(chain, "model", chain.shape) for chain in chains]
    most = MOST_MOVED * large["64 MB"]
    grown = [
        (chain, "64 MB", shape)
        for chain in chains
        if (shape := _grown(chain, large["64 MB"])) and bytes_each(chain.expression) * math.prod(shape) <= most
    ]
    for number, (chain, size, shape) in enumerate([*wanted, *grown]):
        one = chain.expression
        found.append(
            {
                "name": chain.name,
                "model": chain.model,
                "form": one.form,
                "dtype": "float16",
                "size": size,
                "shape": list(shape),
                "site": chain.site if size == "model" else None,
                "bytes": bytes_each(one) * math.prod(shape),
                "models": parser_models(model_of([one], [shape]), plans, folder, f"chain{number}"),
            }
        )
    return found


# --- chains that are too big ----------------------------------------------------------------------------------------------


def planted(folder: Path, sm: int, size: int) -> list[dict[str, Any]]:
    """Chains that are too big, whole and cut: as the rule cuts them or, where it does not, as they would be."""
    compile_ = compiling.compiler(sm)
    found = []
    for name, one in cases.too_big():
        cut, whole = compiling.fit(one, compile_), compiling.uncut(one, compile_)
        chosen = bool(cut.cuts)
        cut = cut if chosen else compiling.fit(one, compile_, CUT_ANYWAY)
        width = 4096
        rows = max(1, size // (2 * width * max(1, bytes_each(one) // 4)))
        clocks = [round(sum(compiling.clocks(part.expression, part.generated.kernels) for part in plan.parts), 2) for plan in (whole, cut)]
        found.append(
            {
                "name": name,
                "shape": [rows, width],
                "live_values": source.pressure(one),
                "why": [*cut.to_dict()["cuts"], *cut.faults],
                "is_cut": chosen,
                "expected_whole_over_cut": round(clocks[0] / clocks[1], 2),
                "whole": whole.to_dict()["kernels"],
                "cut": cut.to_dict()["kernels"],
                "plans": {"whole": plan_entry(whole, folder), "cut": plan_entry(cut, folder)},
            }
        )
    return found


def variants(chains: Sequence[Chain], folder: Path, sm: int, large: Mapping[str, int]) -> list[dict[str, Any]]:
    """Some chains with more and fewer vectors under way in a thread than is chosen, and with IEEE arithmetic in half precision, too."""
    found = []
    for chain in [one for one in chains if one.expression.reduction is None][:3]:
        one = chain.expression
        for count in (1, 2, 4):
            words = f"{count} vectors a thread{' (chosen)' if count == source.unroll(one) else ''}"
            found.append(_variant(chain, folder, sm, large, f"-{count}", words, unroll=lambda given, count=count: count))
    quick = {one.expression.digest: one for one in chains if source.is_quick(one.expression)}
    found.extend(_variant(chain, folder, sm, large, "-ieee", "IEEE arithmetic", _QUICK={}) for chain in quick.values())
    return found


def _variant(chain: Chain, folder: Path, sm: int, large: Mapping[str, int], suffix: str, words: str, **replaced: object) -> dict[str, Any]:
    """A chain compiled with something of the module `source` replaced; its code has a file of its own."""
    kept = {name: getattr(source, name) for name in replaced}
    try:
        for name, other in replaced.items():
            setattr(source, name, other)
        plan = compiling.uncut(chain.expression, compiling.compiler(sm))
        entry = chain_entry(chain, {chain.expression.text: plan}, folder, large, suffix)
        return {**entry, "name": f"{entry['name']}, {words}"}
    finally:
        for name, own in kept.items():
            setattr(source, name, own)


def launcher(folder: Path) -> None:
    """The plugin's own launcher as a library of its own."""
    _link(
        [HERE / "gpu_launch.cpp", *(plugins.sources() / "Elementwise" / name for name in ("layout.cpp", "driver.cpp"))],
        folder / "launch.bin",
    )


def library(folder: Path) -> None:
    """The plugin alone: the units of the plugin library that it needs, which are C++ without kernels."""
    root = plugins.sources()
    units = [*sorted((root / "Elementwise").glob("*.cpp")), *sorted((root / "common").glob("*.cpp"))]
    cudart = plugins.find_nvcc().cudart
    _link(
        units,
        folder / "plugins.bin",
        ["-fvisibility=hidden", f"-Wl,--version-script={root / 'exports.map'}", "-s", str(cudart), "-lrt", "-lpthread"],
    )


def _link(units: Sequence[Path], out: Path, options: Sequence[str] = ()) -> None:
    headers = plugins.find_nvcc().path.parent.parent / "include"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-static-libstdc++", "-static-libgcc"]
    include = ["-I", str(plugins.sources()), "-isystem", str(headers)]
    subprocess.run(["g++", *flags, *include, *map(str, units), *options, "-o", str(out), "-ldl"], check=True)


def make(
    folder: Path,
    sm: int,
    chains: Sequence[Chain],
    checks: Sequence[tuple[str, Expression]],
    large: Mapping[str, int],
    *,
    engines: bool,
    kernels: bool = True,
    copy_bytes: int = 1 << 30,
) -> None:
    """The whole folder. engines, kernels: with what these parts need; without kernels part engines has pairs of engines alone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("run", "kernels", "engines"):
        shutil.copyfile(HERE / f"gpu_{name}.py", folder / f"{name}.py")
    shutil.copyfile(Path(stats.__file__), folder / "stats.py")
    if kernels:
        launcher(folder)
    checks = [*checks, *{chain.expression.text: (f"chain {chain.name}", chain.expression) for chain in chains}.values()]
    plans = compiling.fit_all([one.text for _, one in checks], sm)
    size = max(large.values(), default=1 << 16)
    about: dict[str, Any] = {
        "sm": sm,
        "compiler": f"nvcc {plugins.find_nvcc().release}",
        "commit": results.commit(),
        "copy_bytes": copy_bytes,
        "values": value_checks(folder, checks, plans, engines=engines) if kernels else [],
        "planted": planted(folder, sm, size) if kernels else [],
        "chains": [chain_entry(chain, plans, folder, large) for chain in chains] if kernels else [],
        "variants": variants(chains, folder, sm, large) if kernels else [],
        "pairs": [],
    }
    if engines:
        library(folder)
        about["pairs"] = pairs(chains, plans, folder, large)
    (folder / "kit.json").write_text(json.dumps(about, indent=1))
    checked = sum(len(group["expressions"]) for group in about["values"])
    print(f"{folder}: {checked} expressions to check, {len(chains)} chains, {len(about['pairs'])} pairs of engines")


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("folder", type=Path)
    given.add_argument("--gpu", default="h200")
    given.add_argument("--models", type=Path, default=Path("models/real"))
    given.add_argument("--only-pairs", action="store_true", help="a small folder, with which chains are timed against TensorRT's own alone")
    arguments = given.parse_args()
    chains = from_models(arguments.models)
    checks = [] if arguments.only_pairs else list(cases.values().items())
    make(arguments.folder, gpus.resolve(arguments.gpu).sm, chains, checks, LARGE, engines=True, kernels=not arguments.only_pairs)


if __name__ == "__main__":
    main()
