// What the encoder kernel is given.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "plan.h"

namespace onnxfuse::encoder
{
enum Activation
{
    kGeluErf = 0,
    kGeluTanh = 1,
    kRelu = 2
};
enum MaskType
{
    kNoMask = 0,
    kMaskSame = 1,  // of the activations' type, added to the scores
    kMaskFloat = 2, // float32, added
    kMaskBool = 3   // bytes: 0 hides a key
};

template <typename T>
struct Args
{
    Plan plan;
    T const* x; // [batch, sequence, width]
    T* y;
    unsigned char *outer, *middle, *qkv, *context, *inner; // sums behind the outer product and the projection; [rows, inner]
    float2* statistics[2]; // of middle and outer: [slices, rows] of mean and sum of squares about it
    unsigned char const *weights, *vectors; // of the first layer, in the layout of launch.h
    int64_t weights_step, vectors_step;     // bytes to the next layer's
    int64_t weight_at[kProducts], vector_at[kProducts];
    float const *final_gamma, *final_beta; // null: none
    void const* mask;
    int mask_type;
    int64_t mask_batch, mask_head, mask_row; // in elements
    int layers, batch, sequence, width, inner_width, heads, head; // head: width / heads
    int before;     // whether norms come before the products and residuals are as they lie (pre-norm)
    int first_norm; // whether the first layer's x is still to be normalised
    int activation;
    float epsilon, scale_log2, inverse_width;
    unsigned* count; // [0] arrivals at grid barriers, [1] blocks that have ended; zero at the start
    int barrier;     // 0 to 3, see arrive()
    int restore;     // whether the last block puts `count` back to zero
    int skip;        // for measurements: 1 no attention, 2 barriers and weights alone
    long long* profile; // [blocks][steps][kStamps], or null; see encoder.cuh
    int* fault;
};

} // namespace onnxfuse::encoder
