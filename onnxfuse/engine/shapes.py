"""--shapes: the shapes that an engine takes, as optimization profiles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxfuse.engine.prepare import read
from onnxfuse.errors import BadInput

FORM = "NAME:MIN..OPT..MAX, each as 1x128, or NAME:SHAPE for one fixed shape"


@dataclass(frozen=True)
class InputSpec:
    """A graph input as the model declares it."""

    name: str
    shape: tuple[int | str | None, ...]
    """Fixed length, name of a symbolic one, or None where nothing is said."""

    @property
    def dynamic(self) -> bool:
        return any(not isinstance(length, int) for length in self.shape)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class Profile:
    """The shapes of one input: smallest, the one to optimize for, and largest."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


def inputs_of(path: Path) -> tuple[InputSpec, ...]:
    """The inputs that a caller feeds, in order: initializers that IR version 3 lists as inputs are not among them."""
    model = read(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(_spec(value) for value in model.graph.input if value.name not in weights)


def sizes_of(inputs: Sequence[InputSpec], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The lengths of symbolic axes where the inputs have `shapes`."""
    pairs = (zip(spec.shape, shapes[spec.name], strict=False) for spec in inputs if spec.name in shapes)
    return {name: length for declared in pairs for name, length in declared if isinstance(name, str)}


def _spec(value: onnx.ValueInfoProto) -> InputSpec:
    if not value.type.HasField("tensor_type"):
        kind = value.type.WhichOneof("value")
        raise BadInput(f"input {value.name}: TensorRT takes tensors only, not a {kind or 'value of no type'}; change the model's inputs")
    if not value.type.tensor_type.HasField("shape"):
        raise BadInput(f"input {value.name} declares no rank, which TensorRT needs; give the input a shape in the model")
    lengths: list[int | str | None] = []
    for dim in value.type.tensor_type.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            lengths.append(dim.dim_value)
        else:
            lengths.append(dim.dim_param or None)
    return InputSpec(value.name, tuple(lengths))


def parse(options: Sequence[str], inputs: Sequence[InputSpec]) -> dict[str, Profile]:
    """Profiles from the values of --shapes, one for every input with a dynamic shape (and any other that was named).

    Raises BadInput for: a form that is not understood, an unknown input, an input named twice, a wrong rank, a shape
    against a fixed length, MIN, OPT and MAX out of order, two inputs that give one symbolic length different ranges,
    and a dynamic input that no option names.
    """
    known = {spec.name: spec for spec in inputs}
    profiles: dict[str, Profile] = {}
    for option in options:
        name, profile = _parse_one(option)
        if name not in known:
            raise BadInput(f"--shapes {option}: the model has no input {name}; its inputs are {', '.join(map(str, inputs)) or 'none'}")
        if name in profiles:
            raise BadInput(f"--shapes {option}: input {name} was given twice; give one --shapes an input")
        _check(option, known[name], profile)
        profiles[name] = profile
    missing = [spec for spec in inputs if spec.dynamic and spec.name not in profiles]
    if missing:
        raise BadInput(
            f"dynamic shape of input {', '.join(map(str, missing))}: TensorRT needs the range; give "
            + " ".join(f"--shapes {_example(spec)}" for spec in missing)
        )
    _check_symbols(inputs, profiles)
    return profiles


def _parse_one(option: str) -> tuple[str, Profile]:
    name, colon, text = option.rpartition(":")
    shapes = text.split("..")
    if not colon or not name or len(shapes) not in (1, 3) or not all(re.fullmatch(r"\d+(x\d+)*", s.strip().lower()) for s in shapes):
        raise BadInput(f"--shapes {option}: not understood; the form is {FORM}")
    lengths = [tuple(int(n) for n in s.strip().lower().split("x")) for s in shapes]
    if any(n > 2**31 - 1 for shape in lengths for n in shape):
        raise BadInput(f"--shapes {option}: a length above 2147483647 is too large for TensorRT; give a smaller one")
    return name, Profile(*(lengths * 3 if len(lengths) == 1 else lengths))


def _check(option: str, spec: InputSpec, profile: Profile) -> None:
    for shape in (profile.min, profile.opt, profile.max):
        if len(shape) != len(spec.shape):
            raise BadInput(f"--shapes {option}: input {spec} has {len(spec.shape)} dimensions, not {len(shape)}; the form is {FORM}")
        for axis, (given, declared) in enumerate(zip(shape, spec.shape, strict=True)):
            if isinstance(declared, int) and given != declared:
                raise BadInput(
                    f"--shapes {option}: input {spec} has the fixed length {declared} on axis {axis}, not {given}; give that length"
                )
    for axis, (low, mid, high) in enumerate(zip(profile.min, profile.opt, profile.max, strict=True)):
        if not low <= mid <= high:
            raise BadInput(f"--shapes {option}: axis {axis} has {low}..{mid}..{high}; MIN, OPT and MAX must not decrease")


def _check_symbols(inputs: Sequence[InputSpec], profiles: Mapping[str, Profile]) -> None:
    """A symbolic length is one length, whichever inputs have it."""
    first: dict[str, tuple[str, tuple[int, int, int]]] = {}
    for spec in inputs:
        profile = profiles.get(spec.name)
        if profile is None:
            continue
        for axis, length in enumerate(spec.shape):
            if not isinstance(length, str):
                continue
            given = (profile.min[axis], profile.opt[axis], profile.max[axis])
            other, expected = first.setdefault(length, (spec.name, given))
            if given != expected:
                raise BadInput(
                    f"--shapes: the length {length} is {_range(expected)} in input {other} and {_range(given)} in "
                    f"input {spec.name}; "
                    "give it the same range in both"
                )


def _range(given: tuple[int, int, int]) -> str:
    return "..".join(map(str, given))


def _example(spec: InputSpec) -> str:
    """An option that would be accepted: symbolic lengths 1 to 8, as they are no more than an example."""
    shapes = ("x".join(str(d) if isinstance(d, int) else str(n) for d in spec.shape) for n in (1, 4, 8))
    return f"{spec.name}:{'..'.join(shapes)}"
