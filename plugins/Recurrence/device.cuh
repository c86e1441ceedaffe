// What the recurrent kernels ask of the GPU beyond plain CUDA C++ and plugins/common: products on tensor cores of Turing, too, and words in
// global memory that carry their own flag. tests/plugins compiles the same kernels with the emulator's versions.
#pragma once

#include "../common/blocks.cuh"

#ifdef ONNXFUSE_EMULATED
#include "emulated_device.h"
#else

namespace onnxfuse
{
// --- tensor cores ------------------------------------------------------------------------------------------------------

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define ONNXFUSE_TURING
// Halves of k one after the other. There is no bfloat16.
__device__ __forceinline__ void mma_turing(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __half)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a2), "r"(a3), "r"(b1));
}
__device__ __forceinline__ void mma_turing(float (&)[4], uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, __nv_bfloat16)
{
    __trap();
}
#endif

// --- special functions -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float tanh_approximate(float x)
{
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Minimum and maximum that keep NaN.
__device__ __forceinline__ float smaller(float a, float b)
{
#if __CUDA_ARCH__ >= 800
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return b < a ? b : a;
#endif
}
__device__ __forceinline__ float larger(float a, float b)
{
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return b > a ? b : a;
#endif
}

// --- global memory -----------------------------------------------------------------------------------------------------

// 8 bytes are written and read as one: 4 of payload and 4 that say that it is there. No fence is needed.
constexpr uint32_t kReady = 1;

__device__ __forceinline__ uint64_t flagged_load(uint64_t const* p)
{
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void flagged_store(uint64_t* p, uint32_t payload)
{
    uint64_t const word = uint64_t{kReady} << 32 | payload;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
}
} // namespace onnxfuse
#endif

namespace onnxfuse
{
// mma, on Turing, too.
template <typename T>
__device__ __forceinline__ void mma_any(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, T type)
{
#ifdef ONNXFUSE_TURING
    mma_turing(c, a0, a1, a2, a3, b0, b1, type);
#else
    mma(c, a0, a1, a2, a3, b0, b1, type);
#endif
}

// What other blocks wrote while this kernel runs: not from the L1 cache.
__device__ __forceinline__ float4 load_fresh(float const* p)
{
    return __ldcg(reinterpret_cast<float4 const*>(p));
}
} // namespace onnxfuse
