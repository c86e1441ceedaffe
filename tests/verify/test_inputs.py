"""Feeds from files and made-up feeds."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.errors import BadInput
from onnxfuse.verify import inputs, reference
from tests.verify.conftest import Save

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


@pytest.fixture
def bert(save: Save) -> Path:
    """Three embeddings, one behind a Cast and a Reshape, and a mask, as in BERT."""
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["a"]),
        helper.make_node("Gather", ["types", "token_type_ids"], ["b"]),
        helper.make_node("Cast", ["position_ids"], ["p32"], to=TensorProto.INT32),
        helper.make_node("Identity", ["p32"], ["p"]),
        helper.make_node("Gather", ["places", "p"], ["c"]),
        helper.make_node("Add", ["a", "b"], ["ab"]),
        helper.make_node("Add", ["ab", "c"], ["abc"]),
        helper.make_node("Cast", ["attention_mask"], ["m"], to=FLOAT),
        helper.make_node("Unsqueeze", ["m", "last"], ["m3"]),
        helper.make_node("Mul", ["abc", "m3"], ["y"]),
    ]
    ids = [(n, INT64, ["batch", "seq"]) for n in ("input_ids", "attention_mask", "token_type_ids", "position_ids")]
    weights = {
        "words": np.ones((37, 4), np.float32),
        "types": np.ones((2, 4), np.float32),
        "places": np.ones((40, 4), np.float32),
        "last": np.array([-1]),
    }
    return save(nodes, ids, [("y", FLOAT, ["batch", "seq", 4])], weights, name="bert")


def test_bert_inputs_suit_the_model(bert: Path) -> None:
    feeds = inputs.generate(bert, count=3)
    for feed in feeds:
        assert feed["input_ids"].max() < 37
        assert feed["input_ids"].min() >= 0
        assert len(np.unique(feed["input_ids"])) > 5
        masked = max(1, feed["attention_mask"].shape[1] // 8)  # not all ones: a mask that is ignored must show
        assert (feed["attention_mask"][:, :-masked] == 1).all()
        assert (feed["attention_mask"][:, -masked:] == 0).all()
        assert (feed["token_type_ids"] == 0).all()
        assert (feed["position_ids"][0] == np.arange(feed["position_ids"].shape[1]) % 40).all()
        assert len({array.shape for array in feed.values()}) == 1  # one symbol, one size
        assert all(array.dtype == np.int64 for array in feed.values())
    assert [feed["input_ids"].shape for feed in feeds] == [(1, 32), (3, 17), (2, 48)]
    for outputs in reference.run(bert, feeds):
        assert np.isfinite(outputs["y"]).all()


def test_feeds_repeat_by_seed(bert: Path) -> None:
    first, again, other = inputs.generate(bert, 3), inputs.generate(bert, 3), inputs.generate(bert, 4)
    assert (first[0]["input_ids"] == again[0]["input_ids"]).all()
    assert (first[0]["input_ids"] != other[0]["input_ids"]).any()


def test_dims_fix_sizes(bert: Path) -> None:
    feeds = inputs.generate(bert, count=2, dims={"batch": 5, "seq": 7})
    assert [feed["input_ids"].shape for feed in feeds] == [(5, 7), (5, 7)]
    assert inputs.generate(bert, dims={"batch": 0})[0]["input_ids"].shape == (0, 32)
    with pytest.raises(BadInput, match=r"no free dimension 'lenght'; it has batch, seq"):
        inputs.generate(bert, dims={"lenght": 5})
    with pytest.raises(BadInput, match="cannot be negative"):
        inputs.generate(bert, dims={"seq": -1})


def test_dims_without_a_name_go_by_input_and_axis(save: Save) -> None:
    path = save([helper.make_node("Relu", ["u"], ["y"])], [("u", FLOAT, [None, 16])], [("y", FLOAT, [None, 16])])
    assert inputs.symbols(path) == ["u[0]"]
    assert inputs.generate(path, dims={"u[0]": 6})[0]["u"].shape == (6, 16)


def test_ids_are_bounded_inside_subgraphs_and_behind_quantized_tables(save: Save) -> None:
    body = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["t"])], "then", [], [helper.make_tensor_value_info("t", FLOAT, None)]
    )
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["table"]),
        helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=body),
    ]
    weights = {"q": np.ones((5, 3), np.uint8), "s": np.array(0.5, np.float32), "yes": np.array(True)}
    path = save(nodes, [("ids", INT64, [200])], [("y", FLOAT, None)], weights)
    ids = inputs.generate(path)[0]["ids"]
    assert set(np.unique(ids)) == {0, 1, 2, 3, 4}


def test_ids_are_bounded_along_the_axis_of_the_table(save: Save) -> None:
    node = helper.make_node("Gather", ["table", "ids"], ["y"], axis=1)
    path = save([node], [("ids", INT64, [100])], [("y", FLOAT, None)], {"table": np.ones((50, 3), np.float32)})
    assert inputs.generate(path)[0]["ids"].max() == 2


def test_other_kinds_of_input(save: Save) -> None:
    values = [
        ("flag", BOOL, [3]),
        ("sr", INT64, []),
        ("x", FLOAT, [2, 6, 4]),
        ("x_lengths", INT64, [2]),
        ("words", TensorProto.STRING, [2]),
        ("half", TensorProto.FLOAT16, [100]),
        ("brain", TensorProto.BFLOAT16, [4]),
        ("sigma", FLOAT, [1]),
        ("causal_mask", FLOAT, [4, 4]),
        ("z", TensorProto.COMPLEX64, [3]),
    ]
    path = save([helper.make_node("Identity", ["x"], ["y"])], values, [("y", FLOAT, [2, 6, 4])])
    feed = inputs.generate(path)[0]
    assert feed["flag"].all()
    assert feed["sr"] == 16000
    assert feed["sr"].shape == ()
    assert (feed["x_lengths"] == 6).all()
    assert feed["words"].dtype.kind == "U"
    assert feed["half"].dtype == np.float16
    assert feed["brain"].dtype == ml_dtypes.bfloat16
    assert feed["sigma"] == 0.5
    assert (feed["causal_mask"] == [1, 1, 1, 0]).all()
    assert feed["z"].dtype == np.complex64
    assert abs(feed["half"].astype(float).std() - 1) < 0.3


@pytest.mark.parametrize(
    ("shape", "zeros"),
    [
        ([3, 16], np.s_[:, 14:]),
        ([2, 1, 1, 9], np.s_[..., 8:]),
        ([2, 5, 1], np.s_[:, 4:]),
        ([7], np.s_[6:]),
        ([3, 1], np.s_[:0]),  # a whole example is never hidden
        ([], np.s_[:0]),
    ],
)
@pytest.mark.parametrize("kind", [BOOL, INT64, FLOAT])
def test_a_mask_hides_the_end_of_a_sequence(save: Save, shape: list[int], zeros: object, kind: int) -> None:
    path = save([helper.make_node("Identity", ["mask"], ["y"])], [("mask", kind, shape)], [("y", kind, shape)])
    mask = inputs.generate(path)[0]["mask"]
    assert mask.dtype == helper.tensor_dtype_to_np_dtype(kind)
    expected = np.ones(shape)
    if shape:
        expected[zeros] = 0  # type: ignore[index]
    assert (mask == expected).all()


def test_sequence_lengths_of_a_recurrent_layer(save: Save) -> None:
    node = helper.make_node("LSTM", ["x", "w", "r", "", "n"], ["y"], hidden_size=2)
    weights = {"w": np.ones((1, 8, 3), np.float32), "r": np.ones((1, 8, 2), np.float32)}
    path = save([node], [("x", FLOAT, ["T", 4, 3]), ("n", TensorProto.INT32, [4])], [("y", FLOAT, None)], weights)
    feed = inputs.generate(path, dims={"T": 11})[0]
    assert (feed["n"] == 11).all()
    reference.run(path, [feed])


@pytest.mark.parametrize(("shape", "axis"), [([2, 3, 64, 48], 1), ([2, 64, 48, 3], 3), ([1, 3, 1, 1], 1)])
def test_pictures_are_smooth_with_ink_on_them(save: Save, shape: list[int], axis: int) -> None:
    path = save([helper.make_node("Identity", ["x"], ["y"])], [("x", FLOAT, shape)], [("y", FLOAT, shape)])
    picture = np.moveaxis(inputs.generate(path)[0]["x"], axis, 1)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    pixels = picture * deviation[:, None, None] + mean[:, None, None]
    assert pixels.min() >= -1e-6
    assert pixels.max() <= 1 + 1e-6
    if shape != [1, 3, 1, 1]:
        assert pixels.min() < 0.15  # ink
        steps = np.abs(np.diff(pixels[:, :, :24], axis=2))  # no ink in the upper half
        assert steps.max() < 0.2


def test_initializers_listed_as_inputs_are_not_fed(save: Save) -> None:
    path = save([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", FLOAT, [2, 3]), ("w", FLOAT, [3, 3])], [("y", FLOAT, [2, 3])])
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 3), np.float32), "w"))
    onnx.save(model, path)
    assert list(inputs.generate(path)[0]) == ["x"]
    assert [spec.name for spec in inputs.specs(path, optional=True)] == ["x", "w"]


def test_an_input_that_is_no_tensor_is_refused(save: Save, tmp_path: Path) -> None:
    path = save([helper.make_node("Identity", ["x"], ["y"])], [("x", FLOAT, [2])], [("y", FLOAT, [2])])
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_sequence_value_info("many", FLOAT, None))
    onnx.save(model, path)
    with pytest.raises(BadInput, match="input 'many' is a sequence"):
        inputs.generate(path)


def test_weights_are_not_read(save: Save) -> None:
    path = save(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        [("ids", INT64, [8])],
        [("y", FLOAT, None)],
        {"table": np.ones((9000, 16), np.float32)},
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    (path.parent / "weights.bin").unlink()
    assert inputs.generate(path)[0]["ids"].max() > 256


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x08", b"\x3a\xff\xff\x03ab"])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"bad\.onnx"):
        inputs.generate(path)
    with pytest.raises(BadInput, match=r"gone\.onnx"):
        inputs.generate(tmp_path / "gone.onnx")


# ------------------------------------------------------------------------------------------------------- from files


def test_one_file_and_a_folder_in_natural_order(linear: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for n in (10, 2, 1):
        np.savez(folder / f"inputs_{n}.npz", x=np.full((n, 4), n, np.float32), label=np.array(["extra"]))
        np.savez(folder / f"outputs_{n}.npz", y=np.zeros(1))
    feeds = inputs.from_data(folder, linear)
    assert [feed["x"].shape[0] for feed in feeds] == [1, 2, 10]
    assert list(feeds[0]) == ["x"]
    assert len(inputs.from_data(folder / "inputs_2.npz", linear)) == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"z": np.zeros((1, 4), np.float32)}, r"input 'x' \(float32\[N, 4\]\) is missing \(the file has z\); add it"),
        ({"x": np.zeros((1, 4))}, r"input 'x' is float64 and the model takes float32; convert it with \.astype\('float32'\)"),
        ({"x": np.zeros((1, 5), np.float32)}, r"input 'x' has shape \[1, 5\] and the model takes float32\[N, 4\]"),
        ({"x": np.zeros(4, np.float32)}, r"input 'x' has shape \[4\]"),
        ({"x": np.array([object()])}, r"holds Python objects"),
    ],
)
def test_data_that_does_not_fit(linear: Path, tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    file = tmp_path / "data.npz"
    np.savez(file, **arrays)
    with pytest.raises(BadInput, match=re.escape(str(file)) + ".*" + message):
        inputs.from_data(file, linear)


def test_files_that_are_no_npz(linear: Path, tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "single.npy", np.zeros(3))
    np.savez(tmp_path / "whole.npz", x=np.zeros((100, 4), np.float32))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:300])
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("text.npz", "not an .npz file"),
        ("single.npy", r"not an .npz file; write one with numpy.savez\(FILE, x=array\)"),
        ("cut.npz", "not an .npz file"),
        ("gone.npz", "no such file"),
        ("empty", "no .npz file in this folder"),
    ):
        with pytest.raises(BadInput, match=message):
            inputs.from_data(tmp_path / name, linear)


def test_bfloat16_comes_back_from_its_bits(save: Save, tmp_path: Path) -> None:
    path = save([helper.make_node("Cast", ["x"], ["y"], to=FLOAT)], [("x", TensorProto.BFLOAT16, [2])], [("y", FLOAT, [2])])
    want = np.array([1.5, -2], ml_dtypes.bfloat16)
    for stored in (want, want.view(np.uint16)):
        np.savez(tmp_path / "b.npz", x=stored)
        feed = inputs.from_data(tmp_path / "b.npz", path)[0]
        assert feed["x"].dtype == ml_dtypes.bfloat16
        assert reference.run(path, [feed])[0]["y"].tolist() == [1.5, -2]
