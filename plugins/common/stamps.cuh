// When a block comes where, for measuring alone: nothing unless compiled with ONNXFUSE_STAMPS.
#pragma once

#if defined(ONNXFUSE_STAMPS) && !defined(ONNXFUSE_EMULATED)
#include <cuda_runtime.h>

namespace onnxfuse
{
static __device__ long long* stamps_of_blocks; // [blocks][16]

__device__ __forceinline__ void stamp(int which)
{
    if (stamps_of_blocks && threadIdx.x == 0)
        stamps_of_blocks[blockIdx.x * 16 + which] = clock64();
}
} // namespace onnxfuse
#define ONNXFUSE_STAMPS_SETTER(name)                                                              \
    extern "C" __attribute__((visibility("default"))) int name(void* stamps)                      \
    {                                                                                             \
        return cudaMemcpyToSymbol(onnxfuse::stamps_of_blocks, &stamps, sizeof stamps);            \
    }
#else
#define ONNXFUSE_STAMPS_SETTER(name)
namespace onnxfuse
{
__device__ __forceinline__ void stamp(int) {}
} // namespace onnxfuse
#endif
