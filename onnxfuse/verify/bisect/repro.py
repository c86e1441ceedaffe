"""A small model that shows a disagreement by itself: the guilty sites alone, fed with the tensors that the original has there."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.graph.files import atomic
from onnxfuse.verify.bisect.regions import Pair, with_weights
from onnxfuse.verify.double import reads

Feeds = Mapping[str, np.ndarray[Any, Any]]
# The tensors of the original that a reproduction is fed with; both its files -> its disagreement figure.
Fetch = Callable[[Sequence[str]], Feeds]
Verify = Callable[[Path, Path, Feeds], float]


@dataclass(frozen=True)
class Reproduction:
    """Two models of the same inputs and outputs, and the inputs: original nodes, fused nodes.

    figure: how far apart they are, above 1. steps: by how many steps of readers it was extended behind the sites before it
    disagreed. nodes: of both models.
    """

    original: Path
    fused: Path
    data: Path
    figure: float
    steps: int
    nodes: tuple[int, int]


def reproduce(
    pair: Pair, guilty: Sequence[str], fetch: Fetch, verify: Verify, folder: Path, stem: str, say: Callable[[str], None]
) -> Reproduction | None:
    """The smallest part that was found to disagree with just the guilty sites on, written into `folder` as STEM.onnx, STEM.fused.onnx and
    STEM.npz. None where not even the whole model disagrees again.

    The sites alone are tried first, and then with 1, 2, 4, 8... steps of what reads them, as a later operator may be what makes
    a small error large.
    """
    readers = _readers(pair)
    core = _core(pair, guilty, readers)
    steps, inside, grown = 0, core, frozenset[str]()
    with tempfile.TemporaryDirectory(prefix="onnxfuse-") as scratch:
        while inside != grown:
            say(f"reproducing: {len(inside)} tensors")
            grown = inside
            found = _attempt(pair, guilty, inside, readers, fetch, verify, Path(scratch))
            if found is not None:
                return _keep(found, steps, folder, stem)
            steps = 2 * steps or 1
            inside = _extended(core, readers, steps)
    return None


@dataclass(frozen=True)
class _Attempt:
    original: onnx.ModelProto
    fused: onnx.ModelProto
    feeds: Feeds
    figure: float


def _attempt(
    pair: Pair, guilty: Sequence[str], inside: frozenset[str], readers: Mapping[str, set[str]], fetch: Fetch, verify: Verify, scratch: Path
) -> _Attempt | None:
    finals = set(pair.new.outputs)
    outputs = [name for name in pair.old.made if name in inside and (name in finals or not readers[name] or readers[name] - inside)]
    original, fused = (with_weights(pair.window(on, outputs, inside), pair.folder) for on in ((), guilty))
    _same_inputs(original, fused)
    paths = scratch / "reproduction.onnx", scratch / "reproduction.fused.onnx"
    try:
        feeds = fetch([value.name for value in original.graph.input])
        if not all(isinstance(value, np.ndarray) for value in feeds.values()):
            return None  # a sequence, which no .npz holds
        for proto, path in zip((original, fused), paths, strict=True):
            _fix_sizes(proto, feeds)
            _save(proto, path)
        figure = verify(*paths, feeds)
    except OnnxfuseError:
        return None  # a part may be what no evaluator takes alone
    return _Attempt(original, fused, feeds, figure) if figure > 1 else None


def _same_inputs(first: onnx.ModelProto, second: onnx.ModelProto) -> None:
    """Each gets the inputs that only the other reads."""
    values = {value.name: value for proto in (first, second) for value in proto.graph.input}
    for proto in (first, second):
        del proto.graph.input[:]
        proto.graph.input.extend(values[name] for name in sorted(values))


def _fix_sizes(proto: onnx.ModelProto, feeds: Feeds) -> None:
    """Gives the inputs the sizes of what they are fed with, so that an engine can be built without more being said."""
    for value in proto.graph.input:
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        shape.SetInParent()
        for size in feeds[value.name].shape:
            shape.dim.add(dim_value=size)


def _keep(found: _Attempt, steps: int, folder: Path, stem: str) -> Reproduction:
    original, fused, data = folder / f"{stem}.onnx", folder / f"{stem}.fused.onnx", folder / f"{stem}.npz"
    for proto, path in ((found.original, original), (found.fused, fused)):
        with atomic(path) as temporary:
            _save(proto, temporary)
    with atomic(data) as temporary, open(temporary, "wb") as file:
        # Text in a form that is read back without unpickling.
        plain = {name: array.astype(str) if array.dtype == object else array for name, array in found.feeds.items()}
        np.savez(file, **plain)  # type: ignore[arg-type]
    return Reproduction(original, fused, data, found.figure, steps, (len(found.original.graph.node), len(found.fused.graph.node)))


def _save(proto: onnx.ModelProto, path: Path) -> None:
    try:
        path.write_bytes(proto.SerializeToString())
    except ValueError:  # protobuf's limit
        raise BadInput("the reproduction holds more than 2 GiB of weights, and is not written") from None


# ----------------------------------------------------------------------------------------------------------- extent


def _readers(pair: Pair) -> Mapping[str, set[str]]:
    """Tensor that both files have -> those that both have and that are computed from it, in either file, with none in between."""
    found: dict[str, set[str]] = defaultdict(set)
    for side in (pair.old, pair.new):
        sources: dict[str, set[str]] = {}  # tensors of this file alone -> what both have that they come from
        for node in side.proto.graph.node:
            read = {one for name in reads(node) for one in ({name} if name in pair.common else sources.get(name, set()))}
            for name in filter(None, node.output):
                if name not in pair.common:
                    sources[name] = read
                else:
                    for source in read - {name}:
                        found[source].add(name)
    return found


def _core(pair: Pair, guilty: Sequence[str], readers: Mapping[str, set[str]]) -> frozenset[str]:
    """The outputs of the guilty sites, and what lies between one site and another."""
    own = [name for site in guilty for name in pair.regions[site].outputs]
    if len(guilty) == 1:
        return frozenset(own)
    sources: dict[str, set[str]] = defaultdict(set)
    for source, made in readers.items():
        for name in made:
            sources[name].add(source)
    return frozenset(own) | (_reach(own, readers) & _reach(own, sources))


def _extended(core: Collection[str], readers: Mapping[str, set[str]], steps: int) -> frozenset[str]:
    return frozenset(core).union(*(ring for ring, _ in zip(_rings(core, readers), range(steps), strict=False)))


def _reach(start: Iterable[str], readers: Mapping[str, set[str]]) -> frozenset[str]:
    return frozenset().union(*_rings(start, readers))


def _rings(start: Iterable[str], readers: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """What reads `start`, what reads that, and so on."""
    seen, ring = set(start), set(start)
    while ring := {name for source in ring for name in readers.get(source, ())} - seen:
        seen |= ring
        yield ring
