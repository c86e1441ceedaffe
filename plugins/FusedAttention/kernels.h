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
    int head = 0; // up to this
    int threads = 0;
    int tile = 0; // keys of a step
    int bytes[2] = {}; // of shared memory with one and with two stages
};

// The one for heads of this size and blocks of 16, 32 or 64 rows; without a kernel where there is none. join: what adds up splits.
template <typename T>
AttentionKernel<T> find_attention(int head, int rows);
template <typename T>
void (*find_join())(AttentionArgs<T>, int64_t);
} // namespace onnxfuse
