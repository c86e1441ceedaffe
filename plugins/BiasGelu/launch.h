// C launcher of the bias + GELU kernel.
#pragma once

#include <cstdint>

#include "../common/export.h"

namespace onnxfuse
{
enum class GeluKind : int
{
    kErf = 0,  // z / 2 * (1 + erf(z / sqrt(2)))
    kTanh = 1, // z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3)))
    kQuick = 2 // z * sigmoid(1.702 z)
};
} // namespace onnxfuse

extern "C"
{
// output = gelu(input + bias), element by element.
//
// dtype: onnxfuse::Dtype of all tensors. kind: onnxfuse::GeluKind. input, output: [rows, width], row-major, in device memory, not
// overlapping. bias: [width]. Any width; any alignment of whole elements; all pointers and rows at multiples of 16 bytes are faster.
//
// Returns a cudaError_t: cudaErrorInvalidValue for a negative size, an unknown dtype or kind, or a missing pointer;
// cudaErrorMisalignedAddress for a pointer inside an element. No rows or no columns: nothing to do, success.
// Asynchronous on `stream` (a cudaStream_t); safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_bias_gelu(int dtype, int kind, void const* input, void const* bias, void* output, int64_t rows,
    int64_t width, void* stream);
}
