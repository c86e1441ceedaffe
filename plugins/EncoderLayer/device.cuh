// What the encoder kernel asks of the GPU beyond plain CUDA C++: tensor cores, copies in the background, clusters, barriers, and a limit
// to every wait. tests/plugins compiles the same kernel with the emulator's versions.
#pragma once

#include <cstdint>

#include "../common/vector.cuh"

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

#define ONNXFUSE_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

namespace onnxfuse::encoder
{
// --- waiting -----------------------------------------------------------------------------------------------------------

// Ends the kernel when a wait lasts longer than 4 s, which only a defect makes it do: an error is better than a GPU that hangs.
// `fault`, where given, is host memory that is told which wait it was.
class Patience
{
public:
    __device__ explicit Patience(int* fault)
        : fault_(fault)
    {
    }
    __device__ __forceinline__ void spend(int site)
    {
        if ((++polls_ & 1023u) != 0)
            return;
        uint64_t now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (start_ == 0)
            start_ = now;
        else if (now - start_ > kLimit)
            give_up(site);
    }
    __device__ __forceinline__ void rest()
    {
        start_ = 0;
    }

private:
    static constexpr uint64_t kLimit = 4'000'000'000;
    __device__ __noinline__ void give_up(int site)
    {
        if (fault_)
        {
            int volatile* told = fault_;
            told[1] = static_cast<int>(blockIdx.x);
            told[2] = static_cast<int>(threadIdx.x);
            told[0] = site;
            __threadfence_system();
        }
        __trap();
    }

    int* fault_;
    uint64_t start_ = 0;
    unsigned polls_ = 0;
};

__device__ __forceinline__ long long clock_now()
{
    return clock64();
}

// --- special functions -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approximate(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_approximate(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- shared memory -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(void const* p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// An address in the shared memory of a block of the cluster.
struct Remote
{
    uint32_t address;

    __device__ __forceinline__ Remote operator+(int bytes) const
    {
        return {address + bytes};
    }
};
__device__ __forceinline__ Remote remote(void const* p, int rank)
{
    Remote r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r.address) : "r"(shared_address(p)), "r"(rank));
    return r;
}
__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A barrier whose phase ends when one thread has arrived and all the bytes that it expects have come.
__device__ __forceinline__ void barrier_init(uint64_t* barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity, Patience& patience, int site)
{
    uint32_t const address = shared_address(barrier);
    for (;;)
    {
        uint32_t done;
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(address), "r"(parity)
                     : "memory");
        if (done)
            return patience.rest();
        patience.spend(site);
    }
}
// The same where what has come was written by other blocks of the cluster.
__device__ __forceinline__ void barrier_wait_cluster(uint64_t* barrier, int parity, Patience& patience, int site)
{
    uint32_t const address = shared_address(barrier);
    for (;;)
    {
        uint32_t done;
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(address), "r"(parity)
                     : "memory");
        if (done)
            return patience.rest();
        patience.spend(site);
    }
}
// Writes 16 bytes there and counts them at that block's barrier.
__device__ __forceinline__ void send(Remote to, Remote barrier, float4 v)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to.address),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)), "r"(barrier.address)
                 : "memory");
}
// Copies a multiple of 16 bytes to shared memory in the background and counts them at the barrier.
__device__ __forceinline__ void bulk_load(void* to, void const* from, int bytes, uint64_t* barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// Copies 16 bytes to shared memory in the background, or zeros.
__device__ __forceinline__ void copy_async(void* to, void const* from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async(void* to, void const* from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most `kLeft` committed groups are under way.
template <int kLeft>
__device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// What this thread wrote to shared memory, for the tensor cores and bulk copies to see after the next barrier.
__device__ __forceinline__ void before_async_reads()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- tensor cores ------------------------------------------------------------------------------------------------------

// A matrix in shared memory as core matrices of 8 rows of 16 bytes, each contiguous.
struct Operand
{
    uint64_t descriptor;

    // `step`: bytes from 8 columns of k to the next; `rows`: bytes from 8 rows to the next.
    __device__ __forceinline__ Operand(void const* p, int step, int rows)
        : descriptor(((shared_address(p) >> 4) & 0x3fff) | uint64_t(step >> 4) << 16 | uint64_t(rows >> 4) << 32)
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

// c += a b for a [16, 16], b [16, 8] in registers; fragments as PTX's mma.m16n8k16 has them.
__device__ __forceinline__ void mma(float (&c)[4], uint4 const& a, uint32_t b0, uint32_t b1, __half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], uint4 const& a, uint32_t b0, uint32_t b1, __nv_bfloat16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
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
__device__ __forceinline__ void count_release(unsigned* count)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ void count_relaxed(unsigned* count)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ void fence_gpu()
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
// Adds 1 and says what was there.
__device__ __forceinline__ unsigned count_and_ask(unsigned* count)
{
    unsigned was;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(was) : "l"(count) : "memory");
    return was;
}
__device__ __forceinline__ void store_relaxed(unsigned* p, unsigned v)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void wait_count(unsigned const* count, unsigned wanted, Patience& patience, int site)
{
    unsigned seen;
    do
    {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
        patience.spend(site);
    } while (static_cast<int>(seen - wanted) < 0);
    patience.rest();
}
} // namespace onnxfuse::encoder
#endif
