// C launcher of matrix product + bias + activation, or + layer scale + residual (+ LayerNorm), or of two products of which one gates the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/activation.h"
#include "../common/export.h"

namespace onnxfuse
{
// What becomes of the product.
enum class Ending : int
{
    kColumns = 0, // each column by itself
    kGated = 1,   // of each 16 columns the last 8 times the activation of the first 8
    kNorm = 2     // LayerNorm over the columns
};
constexpr int kMostNormed = 256; // columns, for the norm: a block has whole rows
} // namespace onnxfuse

extern "C"
{
// z = input weight + bias. output = residual + scale * activation(z); gated: activation(gate) * value, [m, n / 2], with z's columns in
// groups of 8, gate and value in turn; norm: total = residual + scale * activation(z), output = LayerNorm(total) * gamma + beta.
// [m, k] [k, n], row-major. All tensors float16 or all bfloat16, in device memory, at multiples of 16 bytes; products are summed in float32
// and what follows is float32 until the one rounding at the end.
struct OnnxfuseLinear
{
    int32_t dtype;        // onnxfuse::Dtype: float16 or bfloat16
    int32_t activation;   // onnxfuse::Activation
    int32_t rows;         // m
    int32_t width;        // k, a multiple of 8
    int32_t columns;      // n, a multiple of 8; gated: of 16; norm: 256 or less
    int32_t ending;       // onnxfuse::Ending
    float epsilon;        // of the norm
    void const* input;
    void const* weight;   // [k, n]
    void const* bias;     // [n], or null
    void const* scale;    // [n], or null: ones; gated: null
    void const* residual; // as output, or null; gated: null
    void* output;
    void const* gamma;    // norm: [n], or null: ones
    void const* beta;     // norm: [n], or null: zeros
    void* total;          // norm: as output, or null where nobody reads it
    // The tactic; zeros: chosen by size.
    int32_t tile_rows;    // of the product that a block makes: 32, 64 or 128
    int32_t tile_columns; // 64, with 128 rows 128; norm: 128, with 32 rows 256 too, and not less than n
    int32_t stages;       // of the pipeline: 2 to 4
    int32_t split;        // blocks of a cluster that share k: 1, 2, 4 or 8
    int32_t hopper;       // 1: wgmma (no norm), compute capability 9.0: 64 x 64 with any split, or 128 x 128 or 256 with split 1
    int32_t early;        // 1: may start before the kernel before it in the stream has ended; only weights are read until then
};

// cudaSuccess where the launcher takes the problem with its tactic on this GPU; pointers are not looked at.
ONNXFUSE_EXPORT int onnxfuse_linear_supported(OnnxfuseLinear const* problem);
// Returns a cudaError_t: cudaErrorInvalidValue for what is not supported (types, sizes, tactic, a missing pointer),
// cudaErrorMisalignedAddress for pointers that are no multiples of 16 bytes. Asynchronous on `stream`; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_linear(OnnxfuseLinear const* problem, void* stream);
}
