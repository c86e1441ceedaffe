// What the encoder kernel asks of the GPU beyond plain CUDA C++ and plugins/common: products of a warpgroup from shared memory without
// swizzle, and what a test or a measurement needs. tests/plugins compiles the same kernel with the emulator's versions.
#pragma once

#include "../common/blocks.cuh"

namespace onnxfuse::encoder
{
constexpr int kWarpgroup = 128;

template <typename T>
__device__ __forceinline__ uint32_t pack2(float a, float b)
{
    T low, high;
    narrow(a, low);
    narrow(b, high);
    return bits_as<uint16_t>(low) | uint32_t{bits_as<uint16_t>(high)} << 16;
}
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t word)
{
    return make_float2(widen(bits_as<T>(static_cast<uint16_t>(word))), widen(bits_as<T>(static_cast<uint16_t>(word >> 16))));
}
} // namespace onnxfuse::encoder

#ifdef ONNXFUSE_EMULATED
#include "emulated_encoder_device.h"
#else

namespace onnxfuse::encoder
{
// Giving up is a call: inlined at every wait it would make the kernel a tenth larger.
class Patience : public Waiter<Patience>
{
public:
    using Waiter::Waiter;
    __device__ __noinline__ void give_up(int site)
    {
        end(site);
    }
};

__device__ __forceinline__ long long clock_now()
{
    return clock64();
}

// --- special functions -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float reciprocal_approximate(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- tensor cores ------------------------------------------------------------------------------------------------------

// A matrix in shared memory as core matrices of 8 rows of 16 bytes, each contiguous.
struct Operand
{
    uint64_t descriptor;

    // `step`: bytes from 8 columns of k to the next; `rows`: bytes from 8 rows to the next.
    __device__ __forceinline__ Operand(void const* p, int step, int rows)
        : descriptor(((shared_word(p) >> 4) & 0x3fff) | uint64_t(step >> 4) << 16 | uint64_t(rows >> 4) << 32)
    {
    }
    __device__ __forceinline__ void advance(int bytes)
    {
        descriptor += static_cast<uint64_t>(bytes >> 4);
    }
};
__device__ __forceinline__ void product_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void product_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void product_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// c += a b^T for a [64, 16], b [8 kTiles, 16], in the background: begins after product_fence(), ends with product_wait().
template <typename T, int kTiles>
struct Product;

#define ONNXFUSE_C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define ONNXFUSE_PRODUCT(T, TYPE, TILES, N, LIST, A, B, ...)                                                                                \
    template <>                                                                                                                             \
    struct Product<T, TILES>                                                                                                                \
    {                                                                                                                                       \
        static __device__ __forceinline__ void add(float (*c)[4], Operand const& a, Operand const& b)                                       \
        {                                                                                                                                   \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST "}, " A ", " B ", 1, 1, 1, 0, 0;"         \
                         : __VA_ARGS__                                                                                                      \
                         : "l"(a.descriptor), "l"(b.descriptor));                                                                           \
        }                                                                                                                                   \
    };
#define ONNXFUSE_L1 "%0,%1,%2,%3"
#define ONNXFUSE_L2 ONNXFUSE_L1 ",%4,%5,%6,%7"
#define ONNXFUSE_L3 ONNXFUSE_L2 ",%8,%9,%10,%11"
#define ONNXFUSE_L4 ONNXFUSE_L3 ",%12,%13,%14,%15"
#define ONNXFUSE_L5 ONNXFUSE_L4 ",%16,%17,%18,%19"
#define ONNXFUSE_L6 ONNXFUSE_L5 ",%20,%21,%22,%23"
#define ONNXFUSE_L7 ONNXFUSE_L6 ",%24,%25,%26,%27"
#define ONNXFUSE_L8 ONNXFUSE_L7 ",%28,%29,%30,%31"
#define ONNXFUSE_O1 ONNXFUSE_C4(0)
#define ONNXFUSE_O2 ONNXFUSE_O1, ONNXFUSE_C4(1)
#define ONNXFUSE_O3 ONNXFUSE_O2, ONNXFUSE_C4(2)
#define ONNXFUSE_O4 ONNXFUSE_O3, ONNXFUSE_C4(3)
#define ONNXFUSE_O5 ONNXFUSE_O4, ONNXFUSE_C4(4)
#define ONNXFUSE_O6 ONNXFUSE_O5, ONNXFUSE_C4(5)
#define ONNXFUSE_O7 ONNXFUSE_O6, ONNXFUSE_C4(6)
#define ONNXFUSE_O8 ONNXFUSE_O7, ONNXFUSE_C4(7)
#define ONNXFUSE_PRODUCTS(T, TYPE)                                                                                                          \
    ONNXFUSE_PRODUCT(T, TYPE, 1, 8, ONNXFUSE_L1, "%4", "%5", ONNXFUSE_O1)                                                                    \
    ONNXFUSE_PRODUCT(T, TYPE, 2, 16, ONNXFUSE_L2, "%8", "%9", ONNXFUSE_O2)                                                                   \
    ONNXFUSE_PRODUCT(T, TYPE, 3, 24, ONNXFUSE_L3, "%12", "%13", ONNXFUSE_O3)                                                                 \
    ONNXFUSE_PRODUCT(T, TYPE, 4, 32, ONNXFUSE_L4, "%16", "%17", ONNXFUSE_O4)                                                                 \
    ONNXFUSE_PRODUCT(T, TYPE, 5, 40, ONNXFUSE_L5, "%20", "%21", ONNXFUSE_O5)                                                                 \
    ONNXFUSE_PRODUCT(T, TYPE, 6, 48, ONNXFUSE_L6, "%24", "%25", ONNXFUSE_O6)                                                                 \
    ONNXFUSE_PRODUCT(T, TYPE, 7, 56, ONNXFUSE_L7, "%28", "%29", ONNXFUSE_O7)                                                                 \
    ONNXFUSE_PRODUCT(T, TYPE, 8, 64, ONNXFUSE_L8, "%32", "%33", ONNXFUSE_O8)
ONNXFUSE_PRODUCTS(__half, "f16")
ONNXFUSE_PRODUCTS(__nv_bfloat16, "bf16")

// An 8 x 8 matrix of 16-bit elements, two neighbours of a row a lane, transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t word)
{
    uint32_t to;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(word));
    return to;
}

// --- global memory -----------------------------------------------------------------------------------------------------

// What other blocks wrote while this kernel runs: not from the L1 cache.
__device__ __forceinline__ uint4 load_fresh(uint4 const* p)
{
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint2 load_fresh(uint2 const* p)
{
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_fresh(uint32_t const* p)
{
    uint32_t v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
} // namespace onnxfuse::encoder
#endif
