// C launcher of the rotary position embedding.
#pragma once

#include <cstdint>

#include "../common/export.h"

extern "C"
{
// Element [batch][head][row][i] lies at batch * batch_stride + head * head_stride + row * row_stride + i; strides in elements, 0: a broadcast.
struct OnnxfuseRotaryTensor
{
    void const* data;
    int64_t batch_stride, head_stride, row_stride;
};

// y = x * cos + turned(x) * sin for the first `rotary` elements of each head, and y = x for the others. turned(x) is (-second half, first
// half), or with `interleaved` (-x[1], x[0], -x[3], x[2], ...).
struct OnnxfuseRotary
{
    int32_t dtype; // onnxfuse::Dtype of all tensors
    int32_t batch, heads, rows, size;
    int32_t rotary; // even, up to size
    int32_t interleaved;
    OnnxfuseRotaryTensor x, cos, sin, y; // y.data is written, and overlaps no other
    int32_t early; // 1: may start before the stream's kernel before it has ended
};

// Returns a cudaError_t: cudaErrorInvalidValue for sizes or pointers that make no sense, cudaErrorMisalignedAddress for a pointer inside an
// element. All pointers, strides and halves at multiples of 16 bytes are faster. Asynchronous on `stream`; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_rotary(OnnxfuseRotary const* problem, void* stream);
}
