#include "table.cuh"

namespace onnxfuse
{
template AttentionKernel<__half> find_attention<__half>(int head, int rows, int warps);
template void (*find_join<__half>())(AttentionArgs<__half>);
} // namespace onnxfuse
