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
    gpu_kit.Chain("one", cases.hard_swish_affine("float16"), (1, 3, 4, 24)),
    gpu_kit.Chain("two", cases.layer_scale_residual_norm("float16"), (2, 5, 40)),
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


def _run(kit: Path, driver: Path, out: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, str(kit / "run.py"), "--part", "kernels", str(out), "--samples", "3", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": str(driver)})
    path = out / "stand-in-elementwise-kernels.json"
    return done, json.loads(path.read_text()) if path.exists() else {}


def test_part_kernels(kit: Path, driver: Path, tmp_path: Path) -> None:
    done, found = _run(kit, driver, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["checked"] == len(CHECKS) + len(CHAINS)
    for row in found["rows"]:
        assert row["low"] <= row["microseconds"] <= row["high"]
        assert row["flops"] > row["rows"] * row["width"]
    report = read.load(tmp_path / "stand-in-elementwise-kernels.json")  # as a results file of the benchmark
    fast = [row["kernel"] for row in found["rows"] if row["gbps"] > 0]  # this machine is slow
    assert [point["kernel"] for point in report["roofline"]["points"]] == fast != []
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
