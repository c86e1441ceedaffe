"""The table of GPUs and what --gpu may name."""

from __future__ import annotations

import importlib

import pytest

from onnxfuse import gpus
from onnxfuse.errors import BadInput


@pytest.mark.parametrize(
    ("name", "found", "sm"),
    [
        ("h200", "h200", 90),
        ("H100", "h100", 90),
        (" a100 ", "a100", 80),
        ("A100-SXM4-80GB", "a100-80gb", 80),
        ("RTX 4090", "rtx4090", 89),
        ("rtx_4090", "rtx4090", 89),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 89),
        ("NVIDIA H200", "h200", 90),
        ("NVIDIA H100 80GB HBM3", "h100", 90),
        ("Tesla T4", "t4", 75),
        ("Quadro RTX A6000", "rtx-a6000", 86),
        ("jetson-agx-orin", "orin", 87),
        ("GB200", "gb200", 100),
        ("NVIDIA B200", "b200", 100),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada", 89),
        ("Quadro RTX 6000", "rtx6000", 75),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000", 120),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper", 89),
        ("NVIDIA A10G", "a10g", 86),
        ("sm_90", "sm_90", 90),
        ("SM90", "sm_90", 90),
        ("sm_90a", "sm_90", 90),
        ("90", "sm_90", 90),
        ("sm_120", "sm_120", 120),
        ("sm_75", "sm_75", 75),
    ],
)
def test_names(name: str, found: str, sm: int) -> None:
    gpu = gpus.resolve(name)
    assert (gpu.name, gpu.sm) == (found, sm)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("v100", "7.0"),
        ("V100", "7.0"),
        ("Tesla P100", "6.0"),
        ("GTX 1080 Ti", "6.1"),
        ("sm_70", "7.0"),
        ("sm_61", "6.1"),
        ("Tesla V100-SXM2-16GB", "7.0"),
        ("Tesla M40 24GB", "5.2"),
        ("NVIDIA TITAN V", "7.0"),
        ("Tesla P4", "6.1"),
    ],
)
def test_too_old(name: str, capability: str) -> None:
    with pytest.raises(BadInput) as fault:
        gpus.resolve(name)
    message = str(fault.value)
    assert message.startswith(f"GPU {name!r} is of compute capability {capability}: TensorRT 10 dropped it")
    assert "CUDA 13 cannot compile for it" in message
    assert "\n" not in message


@pytest.mark.parametrize(("name", "like"), [("h10", "h100"), ("rtx4900", "rtx4090"), ("a1000", "a100"), ("orin-nanoo", "orin-nano")])
def test_unknown_name_lists_close_ones(name: str, like: str) -> None:
    with pytest.raises(BadInput) as fault:
        gpus.resolve(name)
    assert str(fault.value).startswith(f"GPU {name!r} is not known; did you mean ")
    assert like in str(fault.value)


@pytest.mark.parametrize("name", ["", "gpu", "🙂", "x" * 500, "sm_", "sm_1000", "-1"])
def test_nonsense_is_bad_input(name: str) -> None:
    with pytest.raises(BadInput):
        gpus.resolve(name)


def test_unknown_capability_lists_those_there_are() -> None:
    with pytest.raises(BadInput, match="no such compute capability; there are sm_75, sm_80"):
        gpus.resolve("sm_91")


def test_table_is_consistent() -> None:
    keys = [gpus._key(name) for gpu in gpus.GPUS for name in (gpu.name, *gpu.aliases)]
    assert len(keys) == len(set(keys))
    assert not set(keys) & set(gpus._TOO_OLD)
    for gpu in gpus.GPUS:
        assert gpus.resolve(gpu.name) is gpu
        assert gpu.shared_kib_block < gpu.shared_kib_sm or gpu.sm == 75
        assert gpu.sms
        assert gpu.memory_gbps
        assert gpu.tensorrt
        assert gpu.cuda
    assert {gpu.name for gpu in gpus.GPUS if gpu.host == "aarch64"} == {
        "gh200", "gb200", "gb300", "dgx-spark", "orin", "orin-nx", "orin-nano", "thor",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "sm", "found"), [("NVIDIA H200", 90, "h200"), ("NVIDIA Secret 7", 100, "sm_100"), ("NVIDIA L4", 90, "sm_90")]
)
def test_auto_asks_the_device(device: str, sm: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = importlib.import_module("onnxfuse.engine.trt")
    monkeypatch.setattr(trt, "gpu", lambda: (device, sm, "580.1"))
    assert gpus.resolve("auto").name == found
