// Instantiates the kernels of one type: included by one .cu for each, so that they compile side by side.
#pragma once

#include "kernel.cuh"
#include "kernels.h"

namespace onnxfuse
{
template <typename T, int kHead, int kRowWarps, int kKeyWarps>
AttentionKernel<T> attention_entry()
{
    using S = AttentionShape<kHead, kRowWarps, kKeyWarps>;
    return {attention<T, kHead, kRowWarps, kKeyWarps>, kHead, S::kThreads, S::kTile, {S::bytes(1), S::bytes(2)}};
}

template <typename T, int kHead>
AttentionKernel<T> attention_of(int rows)
{
    switch (rows)
    {
    case 16: return attention_entry<T, kHead, 1, 4>();
    case 32: return attention_entry<T, kHead, 2, 2>();
    case 64: return attention_entry<T, kHead, 4, 1>();
    }
    return {};
}

template <typename T>
AttentionKernel<T> find_attention(int head, int rows)
{
    if (head <= 32)
        return attention_of<T, 32>(rows);
    if (head <= 64)
        return attention_of<T, 64>(rows);
    if (head <= 96)
        return attention_of<T, 96>(rows);
    if (head <= 128)
        return attention_of<T, 128>(rows);
    return head <= 256 ? attention_of<T, 256>(rows) : AttentionKernel<T>{};
}

template <typename T>
void (*find_join())(AttentionArgs<T>, int64_t)
{
    return join_attention<T>;
}
} // namespace onnxfuse
