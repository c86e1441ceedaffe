// C launcher of transformer encoder layers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/export.h"

extern "C"
{
// A linear map's parameters: element (k, n) of the weights at k * k_stride + n * n_stride, [K, N] as ONNX's MatMul has it or the other
// way; bias [N] or null. Both of the element type.
struct OnnxfuseLinear
{
    void const* weights;
    int64_t k_stride, n_stride;
    void const* bias;
};
struct OnnxfuseNorm
{
    void const* gamma; // [width]; null with beta: no norm there
    void const* beta;
};

// One layer as given to the packing. `before_qkv`: the norm of what enters; for post-norm layers after the first, the norm at the end of
// the layer before. `before_inner`: the norm behind the attention's residual (post-norm) or before the feed-forward network (pre-norm).
struct OnnxfuseEncoderLayer
{
    OnnxfuseLinear query, key, value, projection, inner, outer;
    OnnxfuseNorm before_qkv, before_inner;
};

struct OnnxfuseEncoder
{
    int32_t dtype;      // onnxfuse::Dtype: float16 or bfloat16
    int32_t layers, batch, sequence, width, inner, heads;
    int32_t pre_norm;   // 0: post-norm (norms behind the residual sums), 1: pre-norm
    int32_t first_norm; // whether the first layer's input is normalised by its before_qkv (pre-norm: it is)
    int32_t activation; // 0 GELU by erf, 1 GELU by tanh, 2 ReLU
    float epsilon;
    float scale;        // of the scores
    void const* x;      // [batch, sequence, width]
    void* y;
    void const* packed; // from onnxfuse_encoder_pack()
    float const* final_gamma; // [width], float32, the norm behind the last layer; null: none (pre-norm alone)
    float const* final_beta;
    void const* mask;   // element [b][h][row][key] at b * mask_batch + h * mask_head + row * mask_row + key
    int32_t mask_type;  // 0 none, 1 of the element type, added, 2 float32, added, 3 bytes, 0 hides
    int64_t mask_batch, mask_head, mask_row;
    // How; 0 chooses.
    int32_t cluster;    // blocks of a cluster: 1, 2, 4, 8
    int32_t clusters;   // at most so many
    int32_t parts[4], blocks[4], per, stages; // see plan.h
    int32_t barrier;    // 0 to 3, see encoder.cuh
    int32_t restore;    // 0: the counters are cleared by a memset before; 1: the kernel clears them, and they are zero at the first call
    int32_t skip;       // for measurements
    unsigned* counters; // 8 bytes; null: in the workspace
    long long* profile;
    int32_t* fault;     // host memory that a kernel that waits in vain writes to; may be null
};

// Bytes of packed weights of one layer.
ONNXFUSE_EXPORT size_t onnxfuse_encoder_packed(OnnxfuseEncoder const* problem);
// Packs one layer into onnxfuse_encoder_packed() bytes at `to`. Independent of batch, sequence and GPU.
ONNXFUSE_EXPORT int onnxfuse_encoder_pack(OnnxfuseEncoder const* problem, OnnxfuseEncoderLayer const* layer, void* to, void* stream);
// Bytes of workspace; 0 where the problem is refused.
ONNXFUSE_EXPORT size_t onnxfuse_encoder_workspace(OnnxfuseEncoder const* problem);
// Where the parts of the workspace lie and how the products are shared out, as numbers: for tests. Returns how many.
ONNXFUSE_EXPORT int onnxfuse_encoder_describe(OnnxfuseEncoder const* problem, int64_t* numbers, int most);
// Computes the layers. Returns a cudaError_t: cudaErrorInvalidValue for sizes that make no sense, cudaErrorNotSupported for those that
// do not fit, cudaErrorCooperativeLaunchTooLarge where blocks would not be resident at once, cudaErrorMemoryAllocation for too small a
// workspace, cudaErrorMisalignedAddress. Asynchronous; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_encoder(OnnxfuseEncoder const* problem, void* workspace, size_t bytes, void* stream);
}
