// The kernels that there are, by their sizes.
#pragma once

#include <cuda_runtime_api.h>

namespace onnxfuse
{
template <typename T>
struct AttentionArgs;

template <typename T>
struct AttentionKernel
{
    void (*kernel)(AttentionArgs<T>) = nullptr;
    int threads = 0;
    int sharing = 0; // warps that share the keys of a step
    int keys = 0;    // of a warp in a step, at most
    // Shared memory: for the queries, for each key in a stage, and at least for the sums.
    int q_bytes = 0, key_bytes = 0, sum_bytes = 0;
};

// The one for heads up to this size, and blocks of 16, 32 or 64 rows and 4 or 8 warps; without a kernel where there is none. join: what adds
// up splits.
template <typename T>
AttentionKernel<T> find_attention(int head, int rows, int warps);
template <typename T>
void (*find_join())(AttentionArgs<T>);
} // namespace onnxfuse
