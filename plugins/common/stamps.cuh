// When a block comes where, for measuring alone: nothing unless compiled with ONNXFUSE_STAMPS.
#pragma once

#include <cstdint>

namespace onnxfuse
{
#if defined(ONNXFUSE_STAMPS) && !defined(ONNXFUSE_EMULATED)
__device__ extern long long* stamps_of_blocks; // [blocks][16]

__device__ __forceinline__ void stamp(int which, int thread = 0)
{
    if (stamps_of_blocks && static_cast<int>(threadIdx.x) == thread)
        stamps_of_blocks[blockIdx.x * 16 + which] = clock64();
}
#else
__device__ __forceinline__ void stamp(int, int = 0) {}
#endif
} // namespace onnxfuse
