// C launcher of matrix product + bias + activation, or + layer scale + residual.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/activation.h"
#include "../common/export.h"

extern "C"
{
// output = residual + scale * activation(input weight + bias), [m, k] [k, n], row-major. All tensors float16 or all bfloat16, in device
// memory, at multiples of 16 bytes; products are summed in float32 and what follows is float32 until the one rounding at the end.
struct OnnxfuseLinear
{
    int32_t dtype;        // onnxfuse::Dtype: float16 or bfloat16
    int32_t activation;   // onnxfuse::Activation
    int32_t rows;         // m
    int32_t width;        // k, a multiple of 8
    int32_t columns;      // n, a multiple of 8
    void const* input;
    void const* weight;   // [k, n]
    void const* bias;     // [n], or null
    void const* scale;    // [n], or null: ones
    void const* residual; // as output, or null
    void* output;
    // The tactic; zeros: chosen by size.
    int32_t tile_rows;    // of the product that a block makes: 32, 64 or 128
    int32_t tile_columns; // 64, with 128 rows 128
    int32_t stages;       // of the pipeline: 2 to 4
    int32_t split;        // blocks of a cluster that share k: 1, 2, 4 or 8
    int32_t hopper;       // 1: wgmma, compute capability 9.0: 64 x 64 with any split, or 128 x 128 or 256 with split 1
    int32_t early;        // 1: may start before the kernel before it in the stream has ended; only weights are read until then
};

// cudaSuccess where the launcher takes the problem with its tactic on this GPU; pointers are not looked at.
ONNXFUSE_EXPORT int onnxfuse_linear_supported(OnnxfuseLinear const* problem);
// Returns a cudaError_t: cudaErrorInvalidValue for what is not supported (types, sizes, tactic, a missing pointer),
// cudaErrorMisalignedAddress for pointers that are no multiples of 16 bytes. Asynchronous on `stream`; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_linear(OnnxfuseLinear const* problem, void* stream);
}
