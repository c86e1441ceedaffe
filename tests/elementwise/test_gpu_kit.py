"""The folder that checks and times kernels on a GPU, run whole against a driver that plays the kernels on the host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfuse import plugins
from onnxfuse.elementwise import source
from onnxfuse.elementwise.expression import Expression
from onnxfuse.report import read
from tests.elementwise import cases, gpu_kit
from tests.elementwise.emulated import EMULATOR, HERE

pytestmark = pytest.mark.nvcc

CHAINS = [
    gpu_kit.Chain("one", cases.hard_swish_affine("float16"), (1, 3, 4, 24), "1x3x?x?"),
    gpu_kit.Chain("two", cases.layer_scale_residual_norm("float16"), (2, 5, 40), "2x5x40"),
]
CHECKS = [("snake", cases.snake("float32")), ("casts", cases.casts("bfloat16")), ("comparisons", cases.every_operator("int64")[0])]


@pytest.fixture(scope="module")
def kit(nvcc: plugins.Nvcc, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit") / "kit"
    gpu_kit.make(folder, 90, CHAINS, CHECKS, {"64 MB": 1 << 13}, engines=False, copy_bytes=1 << 16)
    return folder


@pytest.fixture(scope="module")
def driver(kit: Path, nvcc: plugins.Nvcc, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that plays the kernels of the kit."""
    from onnxfuse.elementwise import compiling

    expressions = [chain.expression for chain in CHAINS] + [one for _, one in CHECKS]
    for _, one in cases.too_big():
        for rule in (compiling.Rule(), gpu_kit.CUT_ANYWAY):
            expressions += [one, *(part.expression for part in compiling.fit(one, compiling.compiler(90), rule).parts)]
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(_driver(expressions))
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-fno-strict-aliasing", "-w", "-shared"]
    headers = ["-isystem", str(nvcc.path.parent.parent / "include"), "-I", str(plugins.sources()), "-include", str(EMULATOR / "emulator.h")]
    units = [str(folder / "driver.cpp"), str(EMULATOR / "emulator.cpp"), str(plugins.sources() / "Elementwise" / "layout.cpp")]
    subprocess.run(["g++", *flags, *headers, *units, "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


def _driver(expressions: Sequence[Expression]) -> str:
    different = {one.digest: one for one in expressions}
    plays, sizes = [], []
    for one in different.values():
        args = f"Expression_{one.digest}::Args"
        for kernel in source.kernel_names(one):
            sizes.append(f'    if (kernel == "{kernel}") return sizeof({args});')
            plays.append(f'    if (kernel == "{kernel}")\n    {{')
            plays.append(f"        auto const args = argument<{args}>(bytes);")
            plays.append(f"        return emulator::run({{grid, block}}, [&] {{ {kernel}(args); }});\n    }}")
    return "\n".join(
        [
            f'#include "{HERE / "stand_in.h"}"',
            source.INCLUDE,
            *(source.source(one, include="") for one in different.values()),
            "void stand_in::play(std::string const& kernel, std::vector<unsigned char> const& bytes, dim3 grid, dim3 block)\n{",
            *plays,
            "    std::abort();\n}",
            "size_t stand_in::argument_size(std::string const& kernel)\n{",
            *sizes,
            "    return 0;\n}",
        ]
    )


def _run(
    kit: Path, driver: Path, out: Path, *options: str, part: str = "kernels", fault: str = ""
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, str(kit / "run.py"), "--part", part, str(out), "--samples", "3", *options]
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(HERE / "stand_in_trt"), "STAND_IN_TRT": fault}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    path = out / f"stand-in-elementwise-{part}.json"
    return done, json.loads(path.read_text()) if path.exists() else {}


def test_part_kernels(kit: Path, driver: Path, tmp_path: Path) -> None:
    done, found = _run(kit, driver, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["checked"] == len(CHECKS) + len(CHAINS)
    for row in found["rows"]:
        assert row["low"] <= row["microseconds"] <= row["high"]
        assert row["flops"] > row["rows"] * row["width"]
    # As a results file of the benchmark, with rates that a slow machine rounds to zero.
    (tmp_path / "fast.json").write_text(json.dumps({**found, "rows": [{**row, "gbps": 1.0} for row in found["rows"]]}))
    points = read.load(tmp_path / "fast.json")["roofline"]["points"]
    assert [point["kernel"] for point in points] == [row["kernel"] for row in found["rows"]] != []
    assert {(row["model"], row["size"]) for row in found["rows"]} == {
        (name, size) for name in ("one", "two") for size in ("model", "64 MB")
    }
    assert [row["name"] for row in found["planted"]] == [name for name, _ in cases.too_big()]
    assert all(row["why"] and row["whole_over_cut"]["median"] > 0 for row in found["planted"])
    assert len({row["name"] for row in found["variants"]}) == 4
    assert [row["is_cut"] for row in found["planted"]] == [False, False, True, True]
    assert found["left"] == found["wrong"] == []
    assert found["machine"]["copy_gbps"] > 0


def test_what_no_time_is_left_for_is_said(kit: Path, driver: Path, tmp_path: Path) -> None:
    _, found = _run(kit, driver, tmp_path, "--seconds", "0")
    assert found["checked"] == 0
    assert "snake" in found["left"]
    assert CHAINS[1].name in found["left"]


def test_a_wrong_value_is_found(kit: Path, driver: Path, tmp_path: Path) -> None:
    """Results that are off by a hundredth."""
    wrong = tmp_path / "kit"
    shutil.copytree(kit, wrong)
    about = json.loads((wrong / "kit.json").read_text())
    (group,) = about["values"]
    arrays = dict(np.load(wrong / group["arrays"]))
    arrays["0/want/e0_o0"] = arrays["0/want/e0_o0"] + 0.01
    np.savez(wrong / group["arrays"], **arrays)
    (wrong / "kit.json").write_text(json.dumps({**about, "planted": [], "chains": [], "variants": []}))
    done, found = _run(wrong, driver, tmp_path / "out")
    assert done.returncode == 1
    assert len(found["wrong"]) == 2  # at both alignments
    assert all(line.startswith("snake: output 0 of [5, 8, 24] at offset") for line in found["wrong"])


# --- pairs of engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(nvcc: plugins.Nvcc, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "kit"
    gpu_kit.make(folder, 90, CHAINS, [], {"64 MB": 1 << 12}, engines=True, kernels=False, copy_bytes=1 << 16)
    return folder


NAMES = [f"{chain.name}, {size}" for size in ("model", "64 MB") for chain in CHAINS]


def test_pairs_are_built_side_by_side_and_timed_in_turn(pairs: Path, driver: Path, tmp_path: Path) -> None:
    done, found = _run(pairs, driver, tmp_path, part="engines")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["name"] for row in found["rows"]] == NAMES
    for row in found["rows"]:
        assert row["agrees"]
        assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
        assert row["samples"] == 3 * row["placements"] == 24
        assert row["cold"]
        assert row["sets"] >= 2
        assert "clocks and throttling are not known: NVML is missing" in row["marks"]  # no figures without a mark here
    assert [row["site"] for row in found["rows"]] == ["1x3x?x?", "2x5x40", None, None]
    assert found["machine"]["builders"] >= 1
    assert found["left"] == found["wrong"] == []


def test_engines_that_disagree_are_marked(pairs: Path, driver: Path, tmp_path: Path) -> None:
    """Outputs stay NaN: apart from TensorRT's own, and without a finite number."""
    done, found = _run(pairs, driver, tmp_path, part="engines", fault="wrong")
    assert done.returncode == 1
    assert [line.split(": ")[0] for line in found["wrong"]] == NAMES
    for row in found["rows"]:
        assert not row["agrees"]
        assert "fused: an output without a finite number" in row["marks"]
        assert any("from TensorRT's own" in mark for mark in row["marks"])


def test_a_builder_that_dies_ends_its_engine_alone(pairs: Path, driver: Path, tmp_path: Path) -> None:
    done, found = _run(pairs, driver, tmp_path, part="engines", fault="crash")
    assert done.returncode == 1
    assert found["rows"] == []
    told = [line for line in found["wrong"] if "its builder ended with status 3" in line]
    assert told
    assert all(": fused: " in line for line in told)
    assert len(told) + len(found["left"]) == len(NAMES)  # after some deaths nothing more is asked


def test_what_is_not_timed_is_left_and_what_was_is_kept(pairs: Path, driver: Path, tmp_path: Path) -> None:
    done, found = _run(pairs, driver, tmp_path, "--seconds", "0", part="engines")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["left"] == NAMES
    kept: list[dict[str, Any]] = []
    command = [sys.executable, str(pairs / "run.py"), "--part", "engines", str(tmp_path / "out"), "--samples", "3"]
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(HERE / "stand_in_trt")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if " us = " in line and kept == []:
                kept = [{}]
            elif " us = " in line:
                running.kill()  # after the second chain: the first was written before
                break
    rows = json.loads((tmp_path / "out" / "stand-in-elementwise-engines.json").read_text())["rows"]
    assert [row["name"] for row in rows] == NAMES[: len(rows)]
    assert rows
