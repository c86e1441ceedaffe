// C launcher of LayerNormalization over channels whose rows become patches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/export.h"

extern "C"
{
// output[n, y / p, x / p, ((y % p) * p + x % p) * channels + c] = LayerNorm over c of input[n, y, x, c], p the patch's side; with `planar` of
// input[n, c, y, x]. Rows and columns of the image that fill no patch are dropped. All tensors of one element type, row-major, in device memory, not overlapping.
struct OnnxfuseLayerNormPatches
{
    int32_t dtype;     // onnxfuse::Dtype
    int32_t images;
    int32_t height;
    int32_t width;
    int32_t channels;  // up to 16384
    int32_t patch;     // pixels a side, 1 or more
    int32_t planar;    // 0: input is [n, y, x, c]; 1: [n, c, y, x]
    float epsilon;
    void const* input;
    void const* gamma; // [channels]
    void const* beta;  // [channels], or null: zeros
    void* output;
    // The tactic; zero: chosen by size.
    int32_t threads;   // that share a row, a multiple of 32 up to 512; planar: of a block, 128, 256 or 512
    int32_t early;     // 1: may start before the kernel before it in the stream has ended; only gamma and beta are read until then
};

// cudaSuccess where the launcher takes the problem with its tactic on this GPU; pointers are not looked at.
ONNXFUSE_EXPORT int onnxfuse_layernorm_patches_supported(OnnxfuseLayerNormPatches const* problem);
// Returns a cudaError_t: cudaErrorInvalidValue for what is not supported (sizes, tactic, a missing pointer), cudaErrorMisalignedAddress for a
// pointer inside an element. Pointers and rows at multiples of 16 bytes are faster. Asynchronous on `stream`; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_layernorm_patches(OnnxfuseLayerNormPatches const* problem, void* stream);
}
