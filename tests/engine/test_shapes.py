"""--shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxfuse.engine.shapes import InputSpec, Profile, inputs_of, parse, sizes_of
from onnxfuse.errors import BadInput
from tests.engine import models

IDS = InputSpec("ids", ("batch", "length"))
MASK = InputSpec("mask", ("batch", "length"))
IMAGE = InputSpec("image", (1, 3, 224, 224))
ODD = InputSpec("onnx::x:0", (None, 4))


def test_range_and_fixed() -> None:
    assert parse(["ids:1x16..8x128..32x512"], [IDS]) == {"ids": Profile((1, 16), (8, 128), (32, 512))}
    assert parse(["ids:2x5"], [IDS]) == {"ids": Profile((2, 5), (2, 5), (2, 5))}
    assert parse(["ids: 0X5 "], [IDS]) == {"ids": Profile((0, 5), (0, 5), (0, 5))}


def test_names_with_colons() -> None:
    assert parse(["onnx::x:0:3x4"], [ODD]) == {"onnx::x:0": Profile((3, 4), (3, 4), (3, 4))}


def test_fixed_inputs_need_no_option_but_may_be_named() -> None:
    assert parse([], [IMAGE]) == {}
    assert parse(["image:1x3x224x224"], [IMAGE])["image"].opt == (1, 3, 224, 224)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["ids"], "not understood; the form is NAME:MIN..OPT..MAX"),
        (["ids:1x2..3x4"], "not understood"),
        (["ids:axb"], "not understood"),
        (["ids:-1x4"], "not understood"),
        (["ids:"], "not understood"),
        (["other:1x2"], r"no input other; its inputs are ids\[batch, length\]"),
        (["ids:1x2", "ids:1x2"], "given twice"),
        (["ids:1x2x3"], "has 2 dimensions, not 3"),
        (["ids:2x2..1x2..3x2"], r"axis 0 has 2\.\.1\.\.3"),
        (["ids:99999999999x1"], "too large"),
    ],
)
def test_refused(options: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        parse(options, [IDS])
    assert "\n" not in str(caught.value)


def test_a_fixed_length_cannot_be_changed() -> None:
    with pytest.raises(BadInput, match="fixed length 3 on axis 1, not 4"):
        parse(["image:1x4x224x224"], [IMAGE])


def test_every_dynamic_input_is_named_with_an_option_that_works() -> None:
    with pytest.raises(BadInput) as caught:
        parse([], [IDS, IMAGE, MASK])
    text = str(caught.value)
    assert "ids[batch, length], mask[batch, length]" in text
    assert "image" not in text
    examples = [word for word in text.split() if word.startswith(("ids:", "mask:"))]
    assert set(parse(examples, [IDS, IMAGE, MASK])) == {"ids", "mask"}


def test_a_symbolic_length_is_one_length() -> None:
    with pytest.raises(BadInput, match=r"the length length is 4\.\.4\.\.4 in input ids and 5\.\.5\.\.5 in input mask"):
        parse(["ids:1x4", "mask:1x5"], [IDS, MASK])


def test_inputs_of_a_model(tmp_path: Path) -> None:
    model = models.block()
    model.graph.input.append(model.graph.input[0])
    model.graph.input[1].name = "w"  # an initializer listed as input, as IR 3 does
    assert inputs_of(models.saved(model, tmp_path)) == (InputSpec("x", ("batch", 5, 64)),)


def test_sizes_of_symbolic_axes() -> None:
    inputs = [InputSpec("ids", ("batch", "length")), InputSpec("image", (3, None, "width")), InputSpec("absent", ("other",))]
    assert sizes_of(inputs, {"ids": (2, 16), "image": (3, 5, 7)}) == {"batch": 2, "length": 16, "width": 7}
