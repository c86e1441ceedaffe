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
    return {attention<T, kHead, kRowWarps, kKeyWarps>, S::kThreads, kKeyWarps, S::kKeys, S::kQBytes, S::kKeyBytes, S::kSumBytes};
}

template <typename T, int kHead>
AttentionKernel<T> attention_of(int rows, int warps)
{
    if constexpr (kHead <= 128)
    {
        switch (warps == 8 ? rows : 0)
        {
        case 16: return attention_entry<T, kHead, 1, 8>();
        case 32: return attention_entry<T, kHead, 2, 4>();
        case 64: return attention_entry<T, kHead, 4, 2>();
        }
    }
    switch (warps == 4 ? rows : 0)
    {
    case 16: return attention_entry<T, kHead, 1, 4>();
    case 32: return attention_entry<T, kHead, 2, 2>();
    case 64: return attention_entry<T, kHead, 4, 1>();
    }
    return {};
}

template <typename T>
AttentionKernel<T> find_attention(int head, int rows, int warps)
{
    if (head <= 32)
        return attention_of<T, 32>(rows, warps);
    if (head <= 64)
        return attention_of<T, 64>(rows, warps);
    if (head <= 96)
        return attention_of<T, 96>(rows, warps);
    if (head <= 128)
        return attention_of<T, 128>(rows, warps);
    return head <= 256 ? attention_of<T, 256>(rows, warps) : AttentionKernel<T>{};
}

template <typename T>
void (*find_join())(AttentionArgs<T>)
{
    return join_attention<T>;
}
} // namespace onnxfuse
