// C launcher of transformer encoder layers.
//
// Weights of a layer: the matrices [K, N] of Q, K and V side by side, of the projection and of the inner and the outer product of the
// feed-forward network, each as [K / 64][N / 8][8 eighths of the chunk of k][8 columns][8 of k], with gamma of the norm before it multiplied
// in, each at a multiple of 256 bytes from the first; layers follow each other at a multiple of 256 bytes. They know nothing of batch,
// sequence or GPU. Vectors of a layer, float32: three of N for each of the four, likewise at multiples of 256 bytes: of a product behind a
// norm, its bias with beta W, the sums of the columns of what was packed, and zeros; of a product that is added to a residual, its bias, and
// gamma and beta of the norm of the residual (1 and 0 where it is as it lies). onnxfuse/engine/encoder.py writes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/export.h"

extern "C"
{
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
    void const* weights;  // see above
    float const* vectors;
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

// Bytes of workspace; 0 where the problem is refused.
ONNXFUSE_EXPORT size_t onnxfuse_encoder_workspace(OnnxfuseEncoder const* problem);
// The most that this problem or one with fewer rows needs.
ONNXFUSE_EXPORT size_t onnxfuse_encoder_workspace_up_to(OnnxfuseEncoder const* problem);
// Computes the layers. Returns a cudaError_t: cudaErrorInvalidValue for sizes that make no sense, cudaErrorNotSupported for those that
// do not fit, cudaErrorCooperativeLaunchTooLarge where blocks would not be resident at once, cudaErrorMemoryAllocation for too small a
// workspace, cudaErrorMisalignedAddress. Asynchronous; safe to capture in a graph.
ONNXFUSE_EXPORT int onnxfuse_launch_encoder(OnnxfuseEncoder const* problem, void* workspace, size_t bytes, void* stream);
}

namespace onnxfuse::encoder
{
// How a kernel that was compiled for the problem's shape is launched. It knows the plan, so the problem must come from as_compiled().
struct Launch
{
    int blocks = 0, threads = 0, cluster = 0, shared = 0;
    std::vector<unsigned char> argument;
};
// The problem with the clusters that a kernel compiled for its shape has.
OnnxfuseEncoder as_compiled(OnnxfuseEncoder problem);
// Fills all but the argument. Not cudaSuccess: this GPU is not one that such kernels are for; the general kernel may still run here.
int plan_compiled(OnnxfuseEncoder const& problem, Launch& launch);
// As onnxfuse_launch_encoder, up to the launch itself: checks, clears the counters on `stream` and fills `launch`.
int prepare_compiled(OnnxfuseEncoder const& problem, void* workspace, size_t bytes, void* stream, Launch& launch);
} // namespace onnxfuse::encoder
