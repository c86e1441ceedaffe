// What the recurrent kernels ask of the GPU beyond plain CUDA C++: tensor cores, clusters, barriers in shared memory, words in global
// memory that carry their own flag, and a limit to every wait. tests/plugins compiles the same kernels with the emulator's versions.
#pragma once

#include <cstdint>

#include "../common/vector.cuh"

#ifdef ONNXFUSE_EMULATED
#include "emulated_device.h"
#else

#define ONNXFUSE_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace onnxfuse
{
// --- waiting -----------------------------------------------------------------------------------------------------------

// Ends the kernel when a wait lasts longer than 10 s, which only a defect makes it do: an error is better than a GPU that hangs.
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
    // A wait is over.
    __device__ __forceinline__ void rest()
    {
        start_ = 0;
    }

private:
    static constexpr uint64_t kLimit = 10'000'000'000;
    __device__ __forceinline__ void give_up(int site)
    {
        if (fault_)
        {
            int volatile* told = fault_;
            told[1] = static_cast<int>(blockIdx.x);
            told[2] = static_cast<int>(blockIdx.y);
            told[0] = site;
            __threadfence_system();
        }
        __trap();
    }

    int* fault_;
    uint64_t start_ = 0;
    unsigned polls_ = 0;
};

// --- tensor cores ------------------------------------------------------------------------------------------------------

// c += a b for a [16, 16], b [16, 8]; fragments as PTX's mma.m16n8k16 has them. Before compute capability 8.0 there is no bfloat16.
__device__ __forceinline__ void mma(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __half)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a2), "r"(a3), "r"(b1));
#endif
}
__device__ __forceinline__ void mma(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __nv_bfloat16)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    __trap();
#endif
}

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

// --- clusters and barriers in shared memory ----------------------------------------------------------------------------

// An address in the shared memory of a block of the cluster.
struct Remote
{
    uint32_t address;

    __device__ __forceinline__ Remote operator+(int bytes) const
    {
        return {address + bytes};
    }
};

__device__ __forceinline__ uint32_t shared_address(void const* p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where `p`, an address in this block's shared memory, lies in the block of that rank.
__device__ __forceinline__ Remote remote(void const* p, int rank)
{
    Remote r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r.address) : "r"(shared_address(p)), "r"(rank));
    return r;
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
        // The block's own scope: acquiring from the cluster would empty the L1 cache at every wait, and shared memory is not cached.
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     " selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(address), "r"(parity)
                     : "memory");
        if (done)
            return patience.rest();
        patience.spend(site);
    }
}
// Writes 8 bytes there and counts them at that block's barrier.
__device__ __forceinline__ void send(Remote to, Remote barrier, uint32_t a, uint32_t b)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to.address), "r"(a),
                 "r"(b), "r"(barrier.address)
                 : "memory");
}
// Before copy_to_block(), by all that wrote what is copied.
__device__ __forceinline__ void before_copies_read()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Copies a multiple of 16 bytes there, to another block, in the background and counts them at that block's barrier.
__device__ __forceinline__ void copy_to_block(Remote to, void const* from, int bytes, Remote barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to.address),
                 "r"(shared_address(from)), "r"(bytes), "r"(barrier.address)
                 : "memory");
}
// Starts the next kernel of the stream early, up to its wait_for_previous().
__device__ __forceinline__ void let_next_start()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the kernel before has ended and its writes are seen; at once where this kernel was not started early.
__device__ __forceinline__ void wait_for_previous()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
#else
__device__ __forceinline__ void cluster_sync() {}
__device__ __forceinline__ Remote remote(void const*, int)
{
    return {0};
}
__device__ __forceinline__ void barrier_init(uint64_t*) {}
__device__ __forceinline__ void barrier_init_done() {}
__device__ __forceinline__ void barrier_expect(uint64_t*, int) {}
__device__ __forceinline__ void barrier_wait(uint64_t*, int, Patience&, int) {}
__device__ __forceinline__ void send(Remote, Remote, uint32_t, uint32_t) {}
__device__ __forceinline__ void before_copies_read() {}
__device__ __forceinline__ void copy_to_block(Remote, void const*, int, Remote) {}
__device__ __forceinline__ void let_next_start() {}
__device__ __forceinline__ void wait_for_previous() {}
#endif

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

// Waits until all blocks of a cooperative grid have come here `round` times (from 1). `count` starts at zero.
__device__ __forceinline__ void grid_barrier(unsigned* count, unsigned round, Patience& patience, int site)
{
    __syncthreads();
    if (threadIdx.x == 0)
    {
        unsigned const wanted = round * gridDim.x;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
        unsigned seen;
        do
        {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
            patience.spend(site);
        } while (static_cast<int>(seen - wanted) < 0);
        patience.rest();
    }
    __syncthreads();
}

// What other blocks wrote while this kernel runs: not from the L1 cache.
__device__ __forceinline__ float4 load_fresh(float const* p)
{
    return __ldcg(reinterpret_cast<float4 const*>(p));
}

// Copies 16 bytes to shared memory in the background, or zeros. Before compute capability 8.0 at once.
__device__ __forceinline__ void copy_async(void* to, void const* from, bool there)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
#else
    *static_cast<uint4*>(to) = there ? *static_cast<uint4 const*>(from) : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void copy_commit()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most `kLeft` committed groups are under way.
template <int kLeft>
__device__ __forceinline__ void copy_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}
} // namespace onnxfuse
#endif
