#include "float.cuh"

#include "kernels.h"

namespace onnxfuse
{
template <>
AttentionKernel<float> find_attention<float>(int head, int rows, int warps)
{
    if (head > kFloatLargest || rows != kFloatRows || warps != 4)
        return {};
    return {attention_float, kFloatThreads, 1, kFloatKeys, float_bytes(head, head), 0, 0};
}

template <>
void (*find_join<float>())(AttentionArgs<float>)
{
    return nullptr;
}
} // namespace onnxfuse
