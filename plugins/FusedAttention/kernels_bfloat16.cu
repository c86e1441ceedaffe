#include "table.cuh"

namespace onnxfuse
{
template AttentionKernel<__nv_bfloat16> find_attention<__nv_bfloat16>(int head, int rows, int warps);
template void (*find_join<__nv_bfloat16>())(AttentionArgs<__nv_bfloat16>);
} // namespace onnxfuse
