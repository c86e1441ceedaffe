"""Running models in a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.verify import reference
from onnxfuse.verify.reference import CannotRun, Runtime
from tests.verify.conftest import Save

FLOAT = TensorProto.FLOAT
X = np.array([[1, 2, 3, 4], [0, 1, 0, -1]], np.float32)
W = np.arange(8, dtype=np.float32).reshape(4, 2) - 3


def test_values_and_inner_tensors(linear: Path) -> None:
    (outputs,) = reference.run(linear, [{"x": X}])
    assert list(outputs) == ["y"]
    np.testing.assert_array_equal(outputs["y"], np.maximum(X @ W, 0))
    (inner,) = reference.run(linear, [{"x": X}], tensors=["h"])
    assert list(inner) == ["h"]
    np.testing.assert_array_equal(inner["h"], X @ W)
    with pytest.raises(BadInput, match="no tensor 'nothing'"):
        reference.run(linear, [{"x": X}], tensors=["nothing"])


def test_one_child_serves_several_models(linear: Path, save: Save) -> None:
    other = save([helper.make_node("Neg", ["x"], ["y"])], [("x", FLOAT, [2])], [("y", FLOAT, [2])])
    seen: list[tuple[int, int]] = []
    with Runtime() as runtime:
        runtime.run(linear, [{"x": X}, {"x": X[:1]}], progress=lambda *at: seen.append(at))
        child = runtime._child
        assert child
        assert runtime.run(other, [{"x": np.ones(2, np.float32)}])[0]["y"].tolist() == [-1, -1]
        assert runtime._child is child
        folder = Path(runtime._folder.name) if runtime._folder else None
        assert folder
        assert not list(folder.glob("*.npy"))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert child.poll() is not None
    assert not folder.exists()


def test_a_model_that_changed_is_read_again(save: Save) -> None:
    values = [("x", FLOAT, [2])], [("y", FLOAT, [2])]
    with Runtime() as runtime:
        feed = {"x": np.ones(2, np.float32)}
        path = save([helper.make_node("Neg", ["x"], ["y"])], *values)
        assert runtime.run(path, [feed])[0]["y"].tolist() == [-1, -1]
        os.utime(path, ns=(1, 1))
        path = save([helper.make_node("Identity", ["x"], ["y"])], *values)
        assert runtime.run(path, [feed])[0]["y"].tolist() == [1, 1]


def test_ranges_are_the_largest_finite_magnitudes(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = [{"x": X}, {"x": np.array([[100, 0, 0, np.inf]], np.float32)}]
    expected = {"x": 100.0, "h": 300.0, "y": 24.0}
    found = reference.ranges(linear, feeds, tensors=["x", "h", "y"])
    h = np.abs(np.concatenate([X @ W, np.array([[100, 0, 0, np.inf]]) @ W]))
    expected["h"] = float(h[np.isfinite(h)].max())
    y = np.maximum(np.concatenate([X @ W, np.array([[100, 0, 0, np.inf]]) @ W]), 0)
    expected["y"] = float(y[np.isfinite(y)].max(initial=0))
    assert found == expected
    monkeypatch.setattr(reference, "RANGES_BUDGET", 1)  # one tensor at a time
    seen: list[tuple[int, int]] = []
    assert reference.ranges(linear, feeds, progress=lambda *at: seen.append(at)) == {k: expected[k] for k in ("h", "y")}
    assert seen[-1] == (2, 2)


def test_external_data_and_inner_tensors_of_it(linear: Path) -> None:
    model = onnx.load(linear)
    path = linear.parent / "external.onnx"
    onnx.save(model, path, save_as_external_data=True, location="external.bin", size_threshold=0)
    with Runtime() as runtime:
        np.testing.assert_array_equal(runtime.run(path, [{"x": X}])[0]["y"], np.maximum(X @ W, 0))
        np.testing.assert_array_equal(runtime.run(path, [{"x": X}], tensors=["h"])[0]["h"], X @ W)


def test_functions_of_the_model_run(save: Save) -> None:
    body = helper.make_function(
        "onnxfuse", "Silu", ["X"], ["Y"],
        [helper.make_node("Sigmoid", ["X"], ["S"]), helper.make_node("Mul", ["X", "S"], ["Y"])],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    path = save([helper.make_node("Silu", ["x"], ["y"], domain="onnxfuse")], [("x", FLOAT, [4])], [("y", FLOAT, [4])], functions=[body])
    x = np.linspace(-2, 2, 4, dtype=np.float32)
    np.testing.assert_allclose(reference.run(path, [{"x": x}])[0]["y"], x / (1 + np.exp(-x)), rtol=1e-6)


def test_sequences_optionals_and_strings(save: Save) -> None:
    nodes = [helper.make_node("SequenceConstruct", ["x", "x"], ["s"]), helper.make_node("Identity", ["t"], ["u"])]
    path = save(nodes, [("x", FLOAT, [2]), ("t", TensorProto.STRING, [2])], [("u", TensorProto.STRING, [2])])
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_sequence_value_info("s", FLOAT, None))
    onnx.save(model, path)
    (outputs,) = reference.run(path, [{"x": np.ones(2, np.float32), "t": np.array(["a", "bé"])}])
    assert [part.tolist() for part in outputs["s"]] == [[1, 1], [1, 1]]
    assert outputs["u"].tolist() == ["a", "bé"]


def test_bfloat16_in_and_out(save: Save) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=FLOAT), helper.make_node("Cast", ["f"], ["y"], to=TensorProto.BFLOAT16)]
    path = save(nodes, [("x", TensorProto.BFLOAT16, [3])], [("y", TensorProto.BFLOAT16, [3])])
    x = np.array([1, -2.5, np.nan], ml_dtypes.bfloat16)
    y = reference.run(path, [{"x": x}])[0]["y"]
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), x.astype(np.float32))


def test_repeated_node_names_run(save: Save) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["h"], name="same"), helper.make_node("Neg", ["h"], ["y"], name="same")]
    path = save(nodes, [("x", FLOAT, [2])], [("y", FLOAT, [2])])
    with Runtime() as runtime:
        assert runtime.run(path, [{"x": np.ones(2, np.float32)}])[0]["y"].tolist() == [1, 1]
        assert runtime.run(path, [{"x": np.ones(2, np.float32)}], tensors=["h"])[0]["h"].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("op", "element", "words"),
    [("Add", TensorProto.BFLOAT16, "Could not find an implementation for Add"), ("Foo", FLOAT, "Foo")],
)
def test_what_has_no_kernel_is_told_from_a_fault(save: Save, op: str, element: int, words: str) -> None:
    domain = "elsewhere" if op == "Foo" else ""
    path = save([helper.make_node(op, ["x", "x"], ["y"], domain=domain)], [("x", element, [2])], [("y", element, [2])])
    feed = {"x": np.ones(2, ml_dtypes.bfloat16 if element == TensorProto.BFLOAT16 else np.float32)}
    with pytest.raises(CannotRun, match=words) as caught:
        reference.run(path, [feed])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_onnx_reference_runs_bfloat16(save: Save) -> None:
    path = save([helper.make_node("Add", ["x", "x"], ["y"])], [("x", TensorProto.BFLOAT16, [2])], [("y", TensorProto.BFLOAT16, [2])])
    with Runtime() as runtime:
        y = runtime.run(path, [{"x": np.array([1, 2], ml_dtypes.bfloat16)}], evaluator=reference.ONNX_REFERENCE)[0]["y"]
    assert y.astype(float).tolist() == [2, 4]


def test_a_fault_is_one_line_with_the_model_and_the_reason(save: Save, tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"], name="shape_it")]
    path = save(nodes, [("x", FLOAT, [2]), ("s", TensorProto.INT64, [1])], [("y", FLOAT, None)])
    with pytest.raises(OnnxfuseError, match=r"model\.onnx: onnxruntime failed on it: .*Reshape") as caught, Runtime() as runtime:
        runtime.run(path, [{"x": np.ones(2, np.float32), "s": np.array([3])}])
    assert not isinstance(caught.value, CannotRun)
    assert "\n" not in str(caught.value)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(OnnxfuseError, match=r"broken\.onnx"):
        reference.run(broken, [{}])


def test_silence_ends_by_timeout_and_the_runtime_goes_on(endless: Path, linear: Path) -> None:
    with Runtime(timeout=1.0) as runtime:
        with pytest.raises(OnnxfuseError, match=r"endless\.onnx: onnxruntime gave no answer within 1 s"):
            runtime.run(endless, [{"x": np.ones(2, np.float32)}])
        runtime.timeout = 60
        assert runtime.run(linear, [{"x": X}])[0]["y"].shape == (2, 2)


def test_a_crash_is_one_line_and_the_runtime_goes_on(endless: Path, linear: Path) -> None:
    # A signal from outside, as from the kernel when memory is short, is to the parent what a crash of onnxruntime is.
    with Runtime(timeout=60) as runtime:
        runtime.run(linear, [{"x": X}])
        assert runtime._child
        pid = runtime._child.pid

        def crash() -> None:
            time.sleep(0.5)
            os.kill(pid, signal.SIGSEGV)

        threading.Thread(target=crash).start()
        with pytest.raises(OnnxfuseError, match=r"endless\.onnx: onnxruntime crashed on it \(SIGSEGV\)") as caught:
            runtime.run(endless, [{"x": np.ones(2, np.float32)}])
        assert "\n" not in str(caught.value)
        assert runtime.run(linear, [{"x": X}])[0]["y"].shape == (2, 2)


def test_a_killed_command_leaves_nothing(endless: Path, tmp_path: Path) -> None:
    """The child ends with its parent, though it is busy, and removes the folder of the tensors."""
    (tmp_path / "tmp").mkdir()
    code = f"import numpy as np; from onnxfuse.verify import reference; reference.run({str(endless)!r}, [{{'x': np.ones(2, np.float32)}}])"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True) as parent:
        while not list((tmp_path / "tmp").glob("onnxfuse-*/in*.npy")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)  # long enough for the child to be computing; nothing hangs on it
        parent.kill()
    while list((tmp_path / "tmp").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_modules_in_the_current_folder_are_not_imported(linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    assert reference.run(linear, [{"x": X}])[0]["y"].shape == (2, 2)


def test_ranges_of_a_model_with_an_empty_tensor(save: Save) -> None:
    """An empty tensor has no largest element; the others still have theirs."""
    nodes = [
        helper.make_node("Slice", ["x", "none", "none"], ["empty"]),
        helper.make_node("Mul", ["x", "x"], ["y"]),
        helper.make_node("Concat", ["empty", "y"], ["z"], axis=0),
    ]
    path = save(nodes, [("x", FLOAT, [4])], [("z", FLOAT, [4])], {"none": np.array([0], np.int64)})
    found = reference.ranges(path, [{"x": np.array([1, -3, 2, 0], np.float32)}])
    assert found == {"empty": 0.0, "y": 9.0, "z": 9.0}


def test_ranges_count_no_integers_and_no_nan(save: Save) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["n"]), helper.make_node("Sqrt", ["x"], ["y"])]
    path = save(nodes, [("x", FLOAT, [3])], [("n", onnx.TensorProto.INT64, [1]), ("y", FLOAT, [3])])
    assert reference.ranges(path, [{"x": np.array([-1, 4, 9], np.float32)}]) == {"y": 3.0}
