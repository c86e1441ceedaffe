// C launcher of attention: softmax(scale * Q K^T + masks) V.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/export.h"

extern "C"
{
// Element [batch][row][head][i] of a tensor lies at batch * batch_stride + row * row_stride + head * head_stride + i; strides in elements.
struct OnnxfuseAttentionTensor
{
    void const* data;
    int64_t batch_stride, row_stride, head_stride;
};

// What is added to the scores, or says which of them are kept: element [batch % batches][head][query][key]. A stride of 0 is a broadcast;
// keys lie one after the other where theirs is 1. `batches` of 0: there is none.
struct OnnxfuseAttentionMask
{
    void const* data;
    int32_t batches;
    int32_t key_stride; // 0 or 1
    int64_t batch_stride, head_stride, row_stride;
};

struct OnnxfuseAttention
{
    int32_t dtype;                  // onnxfuse::Dtype
    int32_t batch, heads, kv_heads; // query head h reads key and value head h / (heads / kv_heads)
    int32_t queries, keys;
    int32_t head, width;            // of Q and K, of V and the output; multiples of 8 up to 256
    float scale;
    OnnxfuseAttentionTensor q, k, v, output; // output.data is written
    // scores = scale * Q K^T + added[0] + added[1], in float32. A sum with added values of -64 or below is rounded to the type, as in a
    // model that computes in that type: what such a mask (-10000, -65504) leaves of the scores of a row that is masked whole is the rounding.
    OnnxfuseAttentionMask added[2]; // of the type of Q
    OnnxfuseAttentionMask keep;     // bytes: where zero (with `hides` 1: where not zero), the score is `fill`
    int32_t hides;
    float fill;
    int32_t safe;                   // 1: a row that would be NaN is zero
    int32_t causal;                 // 1: key j counts for query i where j <= i + offset; others as -inf
    int32_t offset;
    // How; 0 chooses.
    int32_t rows;                   // queries of a block: 16, 32 or 64
    int32_t warps;                  // of a block: 4 or 8; those beyond one for 16 rows share the keys
    int32_t splits;                 // blocks that share the keys of a query
    int32_t early;                  // 1: may start before the stream's kernel before it has ended
};

// Bytes of workspace that onnxfuse_launch_attention() needs for this problem on the current device.
ONNXFUSE_EXPORT size_t onnxfuse_attention_workspace(OnnxfuseAttention const* problem);

// The most that it needs for this problem and for any with fewer batch entries, queries or keys.
ONNXFUSE_EXPORT size_t onnxfuse_attention_workspace_up_to(OnnxfuseAttention const* problem);

// Whether it computes this problem as asked; pointers are not looked at. A cudaError_t as below.
ONNXFUSE_EXPORT int onnxfuse_attention_supported(OnnxfuseAttention const* problem);

// Computes it. Returns a cudaError_t: cudaErrorInvalidValue for sizes or pointers that make no sense, cudaErrorNotSupported for head
// sizes above 256 or no multiple of 8, half types before compute capability 8.0, and float32 with other than 16 rows and 4 warps, or with splits, cudaErrorMisalignedAddress for tensors or
// strides that are no multiples of 16 bytes (masks excepted), cudaErrorMemoryAllocation for too small a workspace.
// A row all of whose scores are -inf is NaN, without `safe`; without keys the output is zero. Asynchronous on `stream`; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_attention(OnnxfuseAttention const* problem, void* workspace, size_t bytes, void* stream);
}
