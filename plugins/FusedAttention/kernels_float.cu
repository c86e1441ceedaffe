#include "float.cuh"

#include "kernels.h"

namespace onnxfuse
{
template <>
AttentionKernel<float> find_attention<float>(int head, int rows)
{
    if (head > kFloatLargest || rows != kFloatRows)
        return {};
    int const bytes = float_bytes(head, head);
    return {attention_float, head, kFloatThreads, kFloatKeys, {bytes, bytes}};
}

template <>
void (*find_join<float>())(AttentionArgs<float>, int64_t)
{
    return nullptr;
}
} // namespace onnxfuse
