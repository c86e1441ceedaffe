"""The plugins as TensorRT calls them, by a stand-in compiled with the own header and with each official one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxfuse import plugins

HERE = Path(__file__).parent
SCENARIOS = {
    "interfaces": [],
    "roundtrip": [],
    "bad_fields": [
        "SkipLayerNormalization: field 'epsilon' is -1; it must be a number that is not negative",
        "SkipLayerNormalization: field 'epsilon' is nan; it must be a number that is not negative",
        "SkipLayerNormalization: field 'epsilon' holds 2 values; give one number",
        "SkipRMSNormalization: field 'epsilon' is no number (plugin field type 6)",
        "SkipRMSNormalization: field 'outputs' is 3; it must be a whole number from 1 to 2",
        "SkipRMSNormalization: field 'has_beta' is not known; the fields are epsilon, outputs",
        "BiasGelu: field 'approximate' is 'sigmoid'; it must be none, tanh or quick",
        "BiasGelu: field 'approximate' is no string (plugin field type 5)",
    ],
    "shapes": [
        "SkipLayerNormalization: skip [1x128x768] has another shape than input [4x128x768]; a broadcast is not supported",
        "SkipLayerNormalization: skip [128x768] has another shape than input [4x128x768]; a broadcast is not supported",
        "SkipLayerNormalization: gamma has shape [1x768]; it must be 1-D, of the last axis' length 768",
        "SkipLayerNormalization: beta has shape [384]; it must be 1-D, of the last axis' length 768",
        "SkipLayerNormalization: input has rank 0; it needs 1 or more",
        "SkipLayerNormalization: 2 inputs; it takes 3 to 5",
        "SkipLayerNormalization: the last axis has 16385 elements and the kernel takes up to 16384; leave this node to TensorRT",
        "SkipLayerNormalization: 5 inputs; it takes 3 to 4",
        "BiasGelu: bias has shape [768]; it must be 1-D, of the last axis' length 3072",
        "BiasGelu: 1 inputs; it takes 2",
        "SkipLayerNormalization: the last axis has 16385 elements and the kernel takes up to 16384; leave this node to TensorRT",
    ],
    "types": [
        "SkipLayerNormalization: input 2 has another type than input 0; cast all inputs to one type",
        "SkipLayerNormalization: input 0 has TensorRT data type 3; float32, float16 and bfloat16 are supported",
    ],
    "generated": [],
    "generated_refusals": [
        "Elementwise: input 1 has TensorRT data type 0, and the expression was made for another; optimize the model again",
        "Elementwise: input 1 [1x5x1x1] does not fit the shape [2x6x4x8] with axes 0100; optimize the model again for these shapes",
        "Elementwise: input 1 [6] has rank 1; it must be 4",
        "Elementwise: 1 inputs and 2 outputs; it has 2 and 2",
        "Elementwise: its tensors can have 2^31 elements or more; leave this node to TensorRT",
        "Elementwise: enqueue without onShapeChange",
        *["Elementwise: field 'layout' is not of version 1; build the engine again with this version of onnxfuse"] * 3,
        "Elementwise: field 'layout' has a number that it cannot have; build the engine again",
        "Elementwise: field 'layout' has no name; build the engine again",
        "Elementwise: field 'layout' has groups that are not of its rank; build the engine again",
        "Elementwise: field 'layout' has an axis that no input has; build the engine again",
        "Elementwise: field 'layout' has an output of unknown shape; build the engine again",
        "Elementwise: field 'layout' has an unknown element type; build the engine again",
        "Elementwise: field 'code' is empty; build the engine with onnxfuse build-engine, which compiles it",
    ],
    "running": [
        "SkipLayerNormalization: enqueue without onShapeChange",
        "SkipLayerNormalization: skip [1x128x768] has another shape than input [2x128x768]; a broadcast is not supported",
        "SkipLayerNormalization: the kernel did not start: invalid argument",
    ],
    "attention": [
        "FusedAttention: input 4, a mask of shape [3x1x1x77], does not fit the scores [4x12x30x77]",
        "FusedAttention: input 4, a mask of shape [4x1x1x76], does not fit the scores [4x12x30x77]",
        "FusedAttention: K [4x12x77x64] has another shape than batch, keys, heads [4x4x77x64]; a broadcast is not supported",
        "FusedAttention: 5 inputs; its fields tell of 6",
        "FusedAttention: Q, K and V [?x128x1281] are not 1280 elements behind batch and rows",
        "FusedAttention: input 5 has another type than bool",
        "FusedRotary: cos [8x64] does not fit X [?x7x12x80] and 64 turned elements",
        "FusedRotary: field 'rotary' is 64; a head of X [?x7x12x48] has fewer elements",
        "FusedAttention: fields 'heads' and 'kv_heads' are 0 and 0; the first must be a multiple of the second",
        "FusedAttention: field 'widths' must hold the widths of Q, K and V, multiples of their heads",
        "FusedAttention: field 'v_perm' must be 0 1 2 3 or 0 2 1 3",
        "FusedRotary: field 'x_perm' must be 0 1 2 3 or 0 2 1 3",
    ],
    "recurrence": [
        "LSTMSequence: initial state [2x4x64] has another shape than direction, batch, hidden [2x3x64]; a broadcast is not supported",
        "LSTMSequence: W [2x256x64] has another shape than direction, gates, input [2x256x128]; a broadcast is not supported",
        "LSTMSequence: 8 inputs; its fields tell of 9",
        "LSTMSequence: input 6 has another type than int32",
        "LSTMSequence: field 'hidden_size' is 0; the kernels take multiples of 8; leave this node to TensorRT",
        "LSTMSequence: field 'hidden_size' is 20; the kernels take multiples of 8; leave this node to TensorRT",
        "LSTMSequence: field 'direction' is 'backward'; it must be forward, reverse or bidirectional",
        "LSTMSequence: field 'x_perm' must be 0 1 2 or 1 0 2",
        "LSTMSequence: field 'y_perm' must be 0 2 1 3 or 2 0 1 3",
        "GRUSequence: field 'has_c1' is not known; the fields are direction, clip, hidden_size, layers, outputs, linear_before_reset, "
        "x_perm, y_perm, joined, has_lengths, has_b1, has_h1, has_b2, has_h2, has_b3, has_h3, has_b4, has_h4",
    ],
    "epilogues": [
        "DepthwiseConvLayerNorm: 4 inputs; it takes 5",
        "DepthwiseConvLayerNorm: the kernel is 9 wide; it must be 3, 5 or 7; leave this node to TensorRT",
        "DepthwiseConvLayerNorm: X has 100 channels; they must be a multiple of 8; leave this node to TensorRT",
        "DepthwiseConvLayerNorm: Scale has shape [48]; it must be 1-D, of the last axis' length 96",
        "GroupNormSilu: FilmScale [2x32x8x9] has another shape than one value for each channel of each image [2x32x1x1]; "
        "a broadcast is not supported",
        "GroupNormSilu: 3 inputs; it takes 5",
        "GroupNormSilu: X has 30 channels, which cannot be divided into 4 groups",
        "Linear: W has shape [96x100]; its sizes must be multiples of 8; leave this node to TensorRT",
        "Linear: W [192x384] has another shape than width of X, columns [96x384]; a broadcast is not supported",
        "Linear: residual [1x96] has another shape than the product [7x96]; a broadcast is not supported",
        "Linear: W has 200 columns; gated it must have a multiple of 16",
        "Linear: 5 inputs; it takes 7",
        "Linear: W has 264 columns; the norm takes up to 256; leave this node to TensorRT",
        "Linear: beta has shape [48]; it must be 1-D, of the last axis' length 96",
        "Linear: input 0 has TensorRT data type 0; float16 and bfloat16 are supported",
        "DepthwiseConvLayerNorm: the kernel did not start: invalid argument",
        "GroupNormSilu: the kernel did not start: invalid argument",
        "Linear: the kernel did not start: invalid argument",
        "DepthwiseConvLayerNorm: field 'channels_last' is 2; it must be a whole number from 0 to 1",
        "GroupNormSilu: field 'num_groups' is 0; it must be 1 or more",
        "Linear: field 'activation' is 'elu'; it must be none, relu, silu, gelu, gelu_tanh or gelu_quick",
        "Linear: field 'groups' is not known; the fields are activation, residual, gated, norm, epsilon, outputs",
        "Linear: fields residual, gated, norm and outputs are 1, 1, 0 and 1, which do not go together",
        "Linear: fields residual, gated, norm and outputs are 0, 0, 1 and 1, which do not go together",
        "Linear: fields residual, gated, norm and outputs are 1, 0, 0 and 2, which do not go together",
    ],
    "patches": [
        "LayerNormPatches: 2 inputs; it takes 3",
        "LayerNormPatches: X has shape [1x8x96]; it must have rank 4",
        "LayerNormPatches: Offset has shape [48]; it must be 1-D, of the last axis' length 96",
        "LayerNormPatches: Scale has shape [8]; it must be 1-D, of the last axis' length 96",
        "LayerNormPatches: X has 16385 channels and the kernel takes up to 16384; leave this node to TensorRT",
        "LayerNormPatches: X has 512 channels and the kernel takes up to 504; leave this node to TensorRT",
        "LayerNormPatches: the kernel did not start: invalid argument",
        "LayerNormPatches: field 'patch' is 0; it must be a whole number from 1 to 256",
        "LayerNormPatches: field 'channels_first' is 2; it must be a whole number from 0 to 1",
    ],
}


def compiled(program: Path, flags: list[str]) -> Path:
    subprocess.run(["g++", "-std=c++17", *flags, str(HERE / "harness.cpp"), "-o", str(program), "-ldl"], check=True)
    return program


def play(program: Path, library: Path, scenario: str) -> None:
    done = subprocess.run([program, library, scenario], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [f"onnxfuse: {line}" for line in SCENARIOS[scenario]]
    assert done.returncode == 0


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("harness") / "own", [])


@pytest.mark.nvcc
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_plugins_answer_as_tensorrt_expects(scenario: str, own: Path, library: Callable[[int], plugins.Library]) -> None:
    play(own, library(90).path, scenario)


@pytest.mark.nvcc
@pytest.mark.external
@pytest.mark.parametrize("version", ["10.14", "10.16", "11.0", "11.4"])
def test_plugins_answer_through_the_official_headers(
    version: str,
    headers: Callable[[str], Path],
    nvcc: plugins.Nvcc,
    library: Callable[[int], plugins.Library],
    tmp_path: Path,
) -> None:
    cuda = nvcc.path.parent.parent / "include"
    flags = ["-DONNXFUSE_TENSORRT_HEADERS", "-isystem", str(headers(version)), "-isystem", str(cuda)]
    program = compiled(tmp_path / "official", flags)
    for scenario in SCENARIOS:
        play(program, library(90).path, scenario)
