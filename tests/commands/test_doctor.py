"""doctor: what it finds here, and what it says where things are missing."""

from __future__ import annotations

import json
import os
import platform
import stat
from pathlib import Path

import numpy
import onnx
import onnxruntime

from onnxfuse.commands import doctor
from onnxfuse.commands.doctor import Finding, abilities


def by_name(done) -> dict[str, dict]:
    assert done.returncode == 0, done.stderr
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_what_is_installed_is_found_with_its_version(run_cli):
    found = by_name(run_cli("doctor", "--json"))
    assert found["onnx"]["found"] == onnx.__version__
    assert found["onnxruntime"]["found"] == onnxruntime.__version__
    assert found["Python"]["found"].startswith(platform.python_version())
    assert numpy.__version__  # onnx needs it: no finding of its own


def test_every_missing_thing_has_a_remedy_in_one_line(run_cli, tmp_path: Path):
    done = run_cli("doctor", "--json", PATH=str(tmp_path), CUDA_HOME="", CXX="")
    found = by_name(done)
    assert not found["C++ compiler"]["ok"]
    for finding in found.values():
        assert finding["ok"] or finding["remedy"], finding
        assert "\n" not in finding["found"] + finding["remedy"]
    assert not json.loads(done.stdout)["can"]["plugins build"]["works"]


def test_the_table_ends_with_what_works(run_cli):
    done = run_cli("doctor")
    assert done.returncode == 0
    assert done.stderr == ""
    *_, optimize, plugins, engine = done.stdout.strip().splitlines()
    assert optimize == "onnxfuse optimize: works here"
    assert plugins.startswith("onnxfuse plugins build: ")
    assert engine.startswith("onnxfuse build-engine: ")


def fake_smi(folder: Path, answer: str) -> dict[str, str]:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho '{answer}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_gpu_and_driver_as_the_driver_tells_them(run_cli, tmp_path: Path):
    settings = fake_smi(tmp_path, "NVIDIA H200, 9.0, 580.95.05, 143771 MiB")
    gpu = by_name(run_cli("doctor", "--json", **settings))["NVIDIA GPU"]
    assert gpu["ok"]
    assert gpu["found"] == "NVIDIA H200, sm_90, 143771 MiB, driver 580.95.05"


def test_a_gpu_that_is_too_old_is_said_to_be(run_cli, tmp_path: Path):
    settings = fake_smi(tmp_path, "Tesla V100-SXM2-16GB, 7.0, 535.1, 16384 MiB")
    gpu = by_name(run_cli("doctor", "--json", **settings))["NVIDIA GPU"]
    assert not gpu["ok"]
    assert "7.5" in gpu["remedy"]


def test_a_driver_that_does_not_answer_lists_no_gpu(run_cli, tmp_path: Path):
    settings = fake_smi(tmp_path, "No devices were found")
    assert not by_name(run_cli("doctor", "--json", **settings))["NVIDIA GPU"]["ok"]


def test_a_package_that_does_not_load_is_not_there(tmp_path: Path, monkeypatch):
    (tmp_path / "brokenpackage.py").write_text("raise ImportError('libnothing.so: cannot open\\nshared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    finding = doctor._package("broken", "brokenpackage", "mend it")()
    assert finding == Finding("broken", False, "does not load: libnothing.so: cannot open shared object file", "mend it")


def test_abilities_follow_from_findings():
    findings = [Finding("nvcc", False, "none", "get it"), Finding("C++ compiler", True, "g++"), Finding("onnx", True, "1")]
    works = {ability.name: ability.works for ability in abilities(findings)}
    assert works == {"optimize": True, "plugins build": False, "build-engine": True}


def test_a_full_or_readonly_cache_is_told(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ONNXFUSE_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "FREE_GB_WANTED", 1e9)
    finding = doctor._cache()
    assert not finding.ok
    assert "ONNXFUSE_CACHE" in finding.remedy
