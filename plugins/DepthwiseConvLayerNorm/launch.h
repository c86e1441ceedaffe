// C launcher of depthwise convolution + bias + LayerNorm over channels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/export.h"

extern "C"
{
// output[n, y, x, c] = LayerNorm over c of (bias[c] + sum over ky, kx of input[n, c, y + ky - kernel / 2, x + kx - kernel / 2] * weight[c, ky, kx]),
// with zeros around the input. All tensors of one element type, in device memory, at multiples of 16 bytes.
struct OnnxfuseDepthwise
{
    int32_t dtype;         // onnxfuse::Dtype
    int32_t kernel;        // 3, 5 or 7
    int32_t images;
    int32_t height;
    int32_t width;
    int32_t channels;      // a multiple of 8
    int32_t planar;        // 0: input is [n, y, x, c]; 1: [n, c, y, x]
    float epsilon;
    void const* input;
    void const* weight;    // [channels, kernel, kernel]
    void const* bias;      // [channels], or null
    void const* gamma;     // [channels], or null: ones
    void const* beta;      // [channels], or null: zeros
    void* output;
    // The tactic; zeros: chosen by size.
    int32_t variant;       // 1: float32 units; 5: tensor cores (16-bit types, compute capability 8.0)
    int32_t strip;         // variant 5: images of a tile, 1 or 2 (then strips <= 4)
    int32_t rows;          // of a tile; variant 5: 1, 2 or 4 for each of the tile's 16 places
    int32_t strips;        // of a tile, along x: of 4 or, for kernel 7 and variant 1, 7 outputs; variant 5: of 8, at most 8
    int32_t split;         // blocks of a cluster that share the channels: 1 to 8, variant 5 to 16
    int32_t early;          // 1: may start before the kernel before it in the stream has ended; only weights are read until then
};

// cudaSuccess where the launcher takes the problem with its tactic on this GPU; pointers are not looked at.
ONNXFUSE_EXPORT int onnxfuse_depthwise_layernorm_supported(OnnxfuseDepthwise const* problem);
// Returns a cudaError_t: cudaErrorInvalidValue for what is not supported (sizes, tactic, a missing pointer), cudaErrorMisalignedAddress
// for pointers that are no multiples of 16 bytes. Asynchronous on `stream`; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_depthwise_layernorm(OnnxfuseDepthwise const* problem, void* stream);
}
