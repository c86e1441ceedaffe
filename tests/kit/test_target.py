"""The script of a kit, run as on the target machine: in a process of its own, with stand-ins for TensorRT and the driver.

What it computes is held to onnxruntime's outputs, which the kit carries, and to onnxfuse's own metrics and intervals.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
from pathlib import Path

import jsonschema
import ml_dtypes
import numpy as np
import pytest

from onnxfuse.bench import stats
from onnxfuse.engine import manifest as manifests
from onnxfuse.kit import make, target
from onnxfuse.verify import metrics
from tests.kit.conftest import Run

QUICK = ("--samples", 16, "--placements", 2, "--warm-up", 0)


def report_of(kit: Path) -> dict:
    return json.loads((kit / "result" / "report.json").read_text())


def test_all_of_it(kit: Path, made: make.Kit, run_kit: Run, root: Path) -> None:
    done = run_kit(kit, "--sha256", made.sha256, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "fused: it runs in a fresh process without the plugin library" in done.stdout
    report = report_of(kit)
    jsonschema.validate(report, json.loads((root / "onnxfuse" / "report" / "schema.json").read_text()))
    assert report["agrees"]
    assert [(other["name"], other["check"]["agrees"], other["check"]["feeds"]) for other in report["others"]] == [
        ("automatic", True, 3), ("fused", True, 3),
    ]  # fmt: skip
    timings = report["timings"]
    assert (timings["baseline"], timings["samples"], timings["placements"]) == ("automatic", 16, 2)
    assert all(len(each) == 16 for each in timings["samples_ms"].values())
    assert not [mark for mark in timings["marks"] if "CUDA graph" in mark]
    assert {layer["name"] for layer in report["layers"]["fused"]} >= {"norm_0", "gelu_0"}
    assert all(layer["us"] == 250.0 for layer in report["layers"]["fused"])


def test_its_engines_have_manifests_that_onnxfuse_reads(kit: Path, run_kit: Run, model: Path) -> None:
    assert run_kit(kit, "--samples", 0).returncode == 0
    engine = kit / "result" / "fused.engine"
    manifest = manifests.load(engine)
    assert manifest is not None
    assert manifest.engine_sha256 == manifests.file_digest(engine)
    assert manifest.model_sha256 == manifests.model_digest(model)
    assert manifest.plugins == manifests.PluginUse(
        None, manifests.file_digest(kit / "libonnxfuse_plugins.so"), True, ("BiasGelu", "SkipLayerNormalization")
    )
    assert (manifest.sm, manifest.gpu, manifest.tensorrt) == (90, "NVIDIA Stand-in", "10.6.0")
    assert (manifest.inputs[0].dtype, manifest.inputs[0].max) == ("float16", (8, 5, 64))
    assert "norm_0" in {node for layer in manifest.layers for node in layer.nodes}
    assert "timings" not in report_of(kit)


def test_a_second_run_reads_the_timing_cache_of_the_first(kit: Path, run_kit: Run) -> None:
    assert run_kit(kit, "--samples", 0).returncode == 0
    assert run_kit(kit, "--samples", 0).returncode == 0
    assert (kit / "result" / "timing.cache").read_bytes() == b"layer" * 4


def test_wrong_outputs_are_said_and_never_timed(kit: Path, run_kit: Run) -> None:
    done = run_kit(kit, *QUICK, STAND_IN_FAULT="wrong")
    assert done.returncode == 1
    assert "fused: output 'y' DIFFERS: cosine" in done.stdout
    report = report_of(kit)
    assert not report["agrees"]
    assert "timings" not in report


def test_outputs_whose_size_is_known_only_after_the_run(kit: Path, run_kit: Run) -> None:
    done = run_kit(kit, *QUICK, STAND_IN_SIZED_BY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "note: fused: no CUDA graph, timed by plain enqueue (the size of an output is known only after a run)" in done.stdout


@pytest.mark.parametrize(
    "function",
    [
        "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuDeviceGetName", "cuDeviceGetAttribute", "cuMemAlloc_v2",
        "cuMemFree_v2", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuStreamCreate", "cuStreamSynchronize", "cuGraphLaunch", "cuEventRecord",
        "cuEventSynchronize", "cuEventElapsedTime", "cuGraphExecDestroy", "cuMemsetD8_v2",
    ],
)  # fmt: skip
def test_every_answer_of_cuda_is_looked_at(function: str, kit: Path, run_kit: Run) -> None:
    done = run_kit(kit, *QUICK, CUDA_FAULT=function)
    assert done.returncode == 1
    assert done.stderr == f"error: CUDA: {function} answers CUDA_ERROR_STAND_IN\n"
    assert not (kit / "result" / "report.json").exists()


def test_a_graph_that_computes_nothing_is_marked(kit: Path, run_kit: Run) -> None:
    done = run_kit(kit, *QUICK, CUDA_FAULT="empty graph")
    assert done.returncode == 0, done.stderr
    assert "fused: what is timed gives other outputs than a run" in report_of(kit)["timings"]["marks"]


@pytest.mark.parametrize("function", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"])
def test_without_a_graph_the_figures_are_marked(function: str, kit: Path, run_kit: Run) -> None:
    done = run_kit(kit, *QUICK, CUDA_FAULT=function)
    assert done.returncode == 0, done.stderr
    assert "no CUDA graph, timed by plain enqueue" in " ".join(report_of(kit)["timings"]["marks"])


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("parse", 1, "automatic.onnx: TensorRT 10.6.0 cannot take the model: no importer for node odd"),
        ("build", 1, "automatic.onnx: TensorRT 10.6.0 cannot build an engine: the cause"),
        ("profile", 1, "TensorRT refuses the kit's shapes together"),
        ("cache", 2, "the timing cache of an earlier run does not fit"),
        ("load_library", 2, "TensorRT 10.6.0 does not load the plugin library"),
        ("deserialize", 1, "automatic: TensorRT cannot load the engine: serialized with another version"),
        ("context", 1, "automatic: no execution context"),
        ("shape", 1, "automatic: input x of shape (3, 5, 64) is refused"),
        ("infer", 1, "automatic: shapes cannot be inferred; TensorRT misses x"),
        ("address", 1, "automatic: TensorRT refuses the memory for x"),
        ("execute", 1, "automatic: enqueue failed"),
        ("no time", 1, "automatic: a run is said to have taken 0.0 ms, which is no time"),
    ],
)
def test_every_answer_of_tensorrt_is_looked_at(fault: str, status: int, says: str, kit: Path, run_kit: Run) -> None:
    done = run_kit(kit, *QUICK, STAND_IN_FAULT=fault, CUDA_FAULT=fault)
    assert done.returncode == status
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1


def test_what_is_missing_is_said(kit: Path, run_kit: Run, tmp_path: Path) -> None:
    other = run_kit(kit, CUDA_SM="89")
    assert other.returncode == 3
    assert "this kit is for h200 (sm_90), and here is NVIDIA Stand-in (sm_89); make one with --gpu sm_89" in other.stderr
    old = run_kit(kit, STAND_IN_TENSORRT="8.6.1")
    assert old.returncode == 3
    assert "TensorRT 8.6.1 is too old: 10.0 or newer is needed" in old.stderr
    none = run_kit(kit, CUDA_FAULT="cuInit")
    assert none.returncode == 3
    assert "no NVIDIA GPU can be used here: the driver answers CUDA_ERROR_STAND_IN" in none.stderr
    driver = run_kit(kit, LD_LIBRARY_PATH=str(tmp_path))
    assert driver.returncode == 3
    assert "no NVIDIA driver here: libcuda.so.1 was not found" in driver.stderr
    module = run_kit(kit, PYTHONPATH=str(tmp_path))
    assert module.returncode == 3
    assert "TensorRT cannot be imported here: No module named 'tensorrt'" in module.stderr
    (tmp_path / "numpy.py").write_text("raise ImportError")
    arrays = run_kit(kit, PYTHONPATH=str(tmp_path))
    assert arrays.returncode == 3
    assert arrays.stderr == "error: numpy is not installed here; `python3 -m pip install numpy`\n"


@pytest.mark.parametrize("name", ["automatic.onnx", "fused.onnx", "weights.bin", "reference.npz", "libonnxfuse_plugins.so"])
def test_a_changed_file_is_not_used(name: str, kit: Path, run_kit: Run) -> None:
    content = bytearray((kit / name).read_bytes())
    content[len(content) // 2] ^= 1
    (kit / name).write_bytes(content)
    done = run_kit(kit, STAND_IN_FAULT="parse")
    assert done.returncode == 2
    assert f"{name} is missing or not the file that was put into the kit" in done.stderr
    (kit / name).unlink()
    assert run_kit(kit).returncode == 2


def test_another_kit_than_the_one_that_was_made_is_refused(kit: Path, run_kit: Run) -> None:
    """Whoever changes a file can change its hash in kit.json, and not the hash of kit.json that was said when the kit was made."""
    said = hashlib.sha256((kit / "kit.json").read_bytes()).hexdigest()
    about = json.loads((kit / "kit.json").read_text())
    (kit / "libonnxfuse_plugins.so").write_bytes(b"\x7fELF\x02\x01\x01 other code")
    about["files"]["libonnxfuse_plugins.so"] = manifests.file_digest(kit / "libonnxfuse_plugins.so")
    (kit / "kit.json").write_text(json.dumps(about))
    done = run_kit(kit, "--sha256", said)
    assert done.returncode == 2
    assert "this is not the kit that was made" in done.stderr


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "sub/file", ".."])
def test_names_that_lead_out_of_the_kit_are_refused(name: str, kit: Path, run_kit: Run) -> None:
    about = json.loads((kit / "kit.json").read_text())
    about["files"][name] = "0" * 64
    (kit / "kit.json").write_text(json.dumps(about))
    done = run_kit(kit)
    assert done.returncode == 2
    assert "names a file outside the kit" in done.stderr


def test_modules_left_in_the_kit_are_not_run(kit: Path, run_kit: Run, tmp_path: Path) -> None:
    for name in ("tensorrt", "numpy", "json", "argparse"):
        (kit / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w').close()\nraise SystemExit(99)\n")
    assert run_kit(kit, "--samples", 0).returncode == 0
    assert not (tmp_path / "run").exists()


def test_results_go_where_they_are_wanted(kit: Path, run_kit: Run, tmp_path: Path) -> None:
    assert run_kit(kit, "--samples", 0, "--out", tmp_path / "elsewhere" / "deep").returncode == 0
    assert not (kit / "result").exists()
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "deep").iterdir()) == [
        "automatic.engine", "automatic.engine.json", "fused.engine", "fused.engine.json", "report.json", "timing.cache",
    ]  # fmt: skip
    (tmp_path / "file").touch()
    done = run_kit(kit, "--out", tmp_path / "file" / "x")
    assert done.returncode == 2
    assert "give another folder" in done.stderr


def test_it_is_written_for_python_3_8() -> None:
    """Its grammar, and none of what later versions added and the script could be tempted to use."""
    tree = ast.parse(Path(target.__file__).read_text(), feature_version=(3, 8))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"removeprefix", "removesuffix", "pairwise", "file_digest", "is_relative_to", "UTC", "cache"}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert not [call for call in calls if call.func.id == "zip" and call.keywords]  # type: ignore[union-attr]
    # Types are written as in later versions, and never evaluated.
    assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)


# What the script knows again from onnxfuse -----------------------------------------------------------------------------


COUNTS = ("outside", "nan_equal", "nan_differ", "inf_equal", "inf_differ")


def pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((40, 50)).astype(np.float32)
    holes = a.copy()
    holes[3, 4], holes[5, 6], holes[7, 8] = np.nan, np.inf, -np.inf
    moved = holes.copy()
    moved[3, 4], moved[0, 0], moved[7, 8] = 0.0, np.nan, np.inf
    return [
        (a, a), (a + 1e-6, a), (a + 1e-2 * rng.standard_normal(a.shape).astype(np.float32), a), (1.05 * a, a), (-a, a), (0 * a, a),
        (a, 0 * a), (0 * a, 0 * a), (holes, holes), (moved, holes), (a.astype(np.float16), a), (a[:2, :2] + 1e-3, a[:2, :2]),
        (a.ravel()[0], a.ravel()[0]),
        (1000 * a + 1, 1000 * a), (np.arange(9), np.arange(9)), (np.arange(9) + 1, np.arange(9)), (a > 0, a > 0.1), (a[:3], a[:4]),
        (np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32)), (np.arange(3), np.arange(3, dtype=np.int32)),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "tf32", "quantized"])
@pytest.mark.parametrize("case", range(len(pairs())))
def test_its_metrics_are_onnxfuses(name: str, case: int) -> None:
    from onnxfuse.verify.check import TOLERANCES

    got, want = pairs()[case]
    limits = TOLERANCES[name]
    ours = metrics.measure(got, want, limits, same_dtype=False)
    theirs = target.measure(got, want, dataclasses.asdict(limits))
    assert theirs["agrees"] == ours.agrees, (theirs["reason"], ours.reason)
    assert bool(theirs["reason"]) == (not theirs["agrees"])
    if np.shape(got) == np.shape(want) and want.dtype.kind == "f":
        for key in (
            "max_abs",
            "max_rel",
            "cosine",
            "relative_rms",
            "normalised",
            "outside",
            "nan_equal",
            "nan_differ",
            "inf_equal",
            "inf_differ",
        ):
            assert theirs[key] == pytest.approx(getattr(ours, key), rel=1e-6, abs=1e-12), key


@pytest.mark.parametrize("placements", [2, 8, 40])
def test_its_intervals_are_onnxfuses(placements: int) -> None:
    rng = np.random.default_rng(0)
    shift = np.repeat(1 + 0.02 * rng.standard_normal(placements), 400 // placements)
    a, b = (base * shift * (1 + 0.005 * rng.standard_normal(400)) for base in (0.5, 0.48))
    found = target.summary({"automatic": list(a), "fused": list(b)}, placements, [], {"sm": None, "memory": None})
    ratio, median = stats.bootstrap_ratio(a, b, placements=placements), stats.bootstrap_median(a, placements=placements)
    for edge in ("median", "low", "high"):
        assert found["ratios"]["fused"][edge] == pytest.approx(getattr(ratio, edge), abs=1e-6)
        assert found["engines"]["automatic"][edge] == pytest.approx(getattr(median, edge), abs=1e-6)
    assert found["ratios"]["fused"]["verdict"] == stats.verdict(ratio)
    assert target.STUDENT == stats.STUDENT


@pytest.mark.parametrize(("low", "high", "word"), [(1.01, 1.1, "faster"), (0.9, 0.99, "slower"), (0.99, 1.01, "draw"), (1.0, 1.2, "draw")])
def test_its_verdicts_are_onnxfuses(low: float, high: float, word: str) -> None:
    assert target.verdict({"low": low, "high": high}) == stats.verdict(stats.Interval((low + high) / 2, low, high)) == word


def test_clocks_that_moved_and_wide_intervals_are_marked() -> None:
    before, after = {"sm": 1980, "memory": 3200}, {"sm": 1500, "memory": 3201}
    assert target.judge(before, after) == ["sm clock moved from 1980 to 1500 MHz while measuring"]
    assert target.judge(before, before) == target.judge({"sm": None, "memory": None}, after) == []
    marks = target.summary({"a": [1.0, 1.0, 2.0, 2.0], "b": [1.0, 1.0, 1.0, 1.0]}, 2, [], before)["marks"]
    assert [mark[: mark.index(",")] for mark in marks] == ["a over b: interval too wide"]


def test_bfloat16_is_rounded_half_to_even() -> None:
    values = np.concatenate(
        [np.random.default_rng(0).standard_normal(4000).astype(np.float32), [0.0, -0.0, np.inf, -np.inf, np.nan, 3.39e38]]
    )
    edges = (np.arange(0x3F80_0000, 0x3F80_0000 + 0x40000, 0x1000, dtype=np.uint32)).view(np.float32)
    every = np.concatenate([values.astype(np.float32), edges])
    back = target.from_engine(target.to_engine(every, "BF16"), "BF16")
    np.testing.assert_array_equal(back, every.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_scalars_stay_scalars_and_rows_become_contiguous() -> None:
    assert target.to_engine(np.int64(3), "INT64").shape == ()
    assert target.to_engine(np.asfortranarray(np.ones((3, 4), np.float32)), "HALF").flags.c_contiguous


def test_its_report_becomes_a_page(kit: Path, run_kit: Run, run_cli: Run, tmp_path: Path) -> None:
    assert run_kit(kit, *QUICK).returncode == 0
    done = run_cli("report", kit / "result" / "report.json", "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "block.onnx" in page
    assert "NVIDIA Stand-in" in page
