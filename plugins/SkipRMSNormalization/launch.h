// C launcher of the add + RMSNormalization kernel.
#pragma once

#include <cstdint>

#include "../common/export.h"

extern "C"
{
// sum = input + skip (+ bias);  output = sum / sqrt(mean(sum * sum) + epsilon) * gamma, per row.
//
// dtype: onnxfuse::Dtype of all tensors. input, skip, output: [rows, width], row-major, in device memory, not overlapping.
// gamma, bias: [width]. sum: [rows, width]. bias and sum may be null. Any alignment of whole elements; all pointers and
// rows at multiples of 16 bytes are faster. threads_per_row: 0 chooses; else a multiple of 32 up to 512, for measuring.
//
// Returns a cudaError_t: cudaErrorInvalidValue for a width above 16384, a negative size, an unknown dtype, a missing pointer or
// too few threads; cudaErrorMisalignedAddress for a pointer inside an element. No rows or no columns: nothing to do, success.
// Asynchronous on `stream` (a cudaStream_t); safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_skip_rmsnorm(int dtype, void const* input, void const* skip, void const* gamma, void const* bias,
    void* output, void* sum, int64_t rows, int64_t width, float epsilon, int threads_per_row, void* stream);
}
