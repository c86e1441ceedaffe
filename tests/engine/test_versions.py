"""What differs between TensorRT's versions, and that the bindings of the newest minor versions of 10 and 11 have every name in use."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from onnxfuse.engine import versions

# Class (or module, "") -> what engine/trt, engine/run and the script of a kit use of it.
NAMES = {
    "": [
        "Builder", "OnnxParser", "Runtime", "get_plugin_registry", "init_libnvinfer_plugins", "ILogger", "IProfiler", "IOutputAllocator",
        "IProgressMonitor", "ProfilingVerbosity", "HardwareCompatibilityLevel", "LayerInformationFormat", "TensorIOMode", "TensorLocation",
    ],
    "Builder": ["create_network", "create_builder_config", "create_optimization_profile", "build_serialized_network"],
    "IBuilderConfig": [
        "profiling_verbosity", "add_optimization_profile", "create_timing_cache", "set_timing_cache", "plugins_to_serialize",
        "progress_monitor", "hardware_compatibility_level", "set_flag", "builder_optimization_level",
    ],
    "HardwareCompatibilityLevel": ["AMPERE_PLUS"],
    "ProfilingVerbosity": ["DETAILED"],
    "INetworkDefinition": ["num_inputs", "get_input", "num_layers", "get_layer", "mark_output"],
    "ITensor": ["is_shape_tensor", "is_network_output", "shape", "name"],
    "IOptimizationProfile": ["set_shape"],
    "OnnxParser": ["parse", "num_errors", "get_error"],
    "ParserError": ["desc", "node", "node_name", "node_operator"],
    "Runtime": ["engine_host_code_allowed", "deserialize_cuda_engine"],
    "ICudaEngine": [
        "create_execution_context", "num_io_tensors", "get_tensor_name", "get_tensor_dtype", "get_tensor_shape", "get_tensor_mode",
        "get_tensor_location", "get_tensor_profile_shape", "create_engine_inspector",
    ],
    "IExecutionContext": [
        "set_input_shape", "infer_shapes", "get_tensor_shape", "set_output_allocator", "set_tensor_address", "execute_async_v3", "profiler",
    ],
    "EngineInspector": ["get_engine_information"],
    "IPluginRegistry": ["load_library", "all_creators"],
    "DataType": ["FLOAT", "HALF", "BF16", "INT8", "UINT8", "INT32", "INT64", "BOOL"],
}  # fmt: skip
SCRIPT = """
import json, sys
import tensorrt_bindings as trt
missing = []
for owner, names in json.loads(sys.argv[1]).items():
    where = getattr(trt, owner, None) if owner else trt
    missing += [f"{owner}.{name}" for name in names if where is None or not hasattr(where, name)]
flags = list(trt.NetworkDefinitionCreationFlag.__members__)
print(json.dumps({"version": trt.__version__, "missing": missing, "flags": flags, "fp16": hasattr(trt.BuilderFlag, "FP16")}))
"""


@pytest.mark.external
@pytest.mark.parametrize("version", ["10.15", "11.2"])
def test_the_bindings_have_every_name(version: str, require_external: Callable[[str], NoReturn]) -> None:
    spec = importlib.util.spec_from_file_location("external_for_versions", Path(__file__).resolve().parents[1] / "plugins" / "external.py")
    assert spec is not None
    assert spec.loader is not None
    external: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = external
    spec.loader.exec_module(external)
    try:
        trt = external.tensorrt(version)
    except external.Absent as reason:
        require_external(f"TensorRT {version}: {reason}")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(trt.libraries), "PYTHONPATH": str(trt.site)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(NAMES)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["version"].startswith(f"{version}.")
    assert said["missing"] == []
    module: Any = SimpleNamespace(
        __version__=said["version"],
        NetworkDefinitionCreationFlag=IntEnum("Flag", {name: place for place, name in enumerate(said["flags"])}),  # type: ignore[misc]
        BuilderFlag=SimpleNamespace(**({"FP16": 1} if said["fp16"] else {})),
    )
    assert versions.has_fp16_flag(module) == version.startswith("10")
    assert bool(versions.network_flags(module, strongly_typed=True)) == ("STRONGLY_TYPED" in said["flags"])


def module(version: str, **flags: int) -> Any:
    return SimpleNamespace(__version__=version, NetworkDefinitionCreationFlag=IntEnum("Flag", flags), BuilderFlag=SimpleNamespace(FP16=0))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("version", "numbers"), [("10.0.1", (10, 0)), ("10.6.0.post1", (10, 6)), ("11.2.1.2", (11, 2)), ("10.15.1.29", (10, 15))]
)
def test_numbers(version: str, numbers: tuple[int, int]) -> None:
    assert versions.number(module(version, X=0)) == numbers
    assert versions.number(module(version, X=0)) >= versions.OLDEST


def test_strong_typing_is_a_flag_or_the_only_way() -> None:
    assert versions.network_flags(module("10.0.1", EXPLICIT_BATCH=0, STRONGLY_TYPED=1), strongly_typed=True) == 2
    assert versions.network_flags(module("10.0.1", EXPLICIT_BATCH=0, STRONGLY_TYPED=1), strongly_typed=False) == 0
    assert versions.network_flags(module("11.9.0", PREFER_JIT=0), strongly_typed=True) == 0


def test_weak_typing_ends_with_11() -> None:
    assert versions.has_fp16_flag(module("10.16.0", X=0))
    assert not versions.has_fp16_flag(module("11.0.0", X=0))
