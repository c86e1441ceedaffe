// How blocks of a launch speak with each other while it runs: remote shared memory and barriers within a cluster, counters in global memory
// between all blocks, and a limit to every wait. tests/plugins compiles the same kernels with the emulator's versions. What needs compute
// capability 9.0 is empty before it: the launchers do not go there.
#pragma once

#include "tensor.cuh"

#ifdef ONNXFUSE_EMULATED
#include "emulated_blocks.h"
#else

namespace onnxfuse
{
// --- waiting -----------------------------------------------------------------------------------------------------------

// Ends the kernel when a wait lasts longer than 10 s, which only a defect makes it do: an error is better than a GPU that hangs.
// `fault`, where given, is host memory that is told which wait it was. Derived has give_up(int site), which calls end().
template <typename Derived>
class Waiter
{
public:
    __device__ explicit Waiter(int* fault)
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
            static_cast<Derived*>(this)->give_up(site);
    }
    // A wait is over.
    __device__ __forceinline__ void rest()
    {
        start_ = 0;
    }

protected:
    __device__ __forceinline__ void end(int site)
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

private:
    static constexpr uint64_t kLimit = 10'000'000'000;

    int* fault_;
    uint64_t start_ = 0;
    unsigned polls_ = 0;
};

class Patience : public Waiter<Patience>
{
public:
    using Waiter::Waiter;
    __device__ __forceinline__ void give_up(int site)
    {
        end(site);
    }
};

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
// Where `p`, an address in this block's shared memory, lies in the block of that rank.
__device__ __forceinline__ Remote remote(void const* p, int rank)
{
    return {remote_word(p, rank)};
}
// A barrier whose phase ends when `arrivals` have arrived and all the bytes that they expect have come.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals = 1)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_word(barrier)), "r"(arrivals) : "memory");
#endif
}
// After the inits, before another block uses them.
__device__ __forceinline__ void barrier_init_done()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// After the inits, before copies use them.
__device__ __forceinline__ void barriers_ready()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_word(barrier)) : "memory");
#endif
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_word(barrier)), "r"(bytes) : "memory");
#endif
}
// Until the phase of that parity has ended.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(shared_word(barrier)),
                 "r"(parity)
                 : "memory");
#endif
}
template <typename Derived>
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity, Waiter<Derived>& patience, int site)
{
#if __CUDA_ARCH__ >= 900
    uint32_t const address = shared_word(barrier);
    for (;;)
    {
        uint32_t done;
        // The block's own scope: acquiring from the cluster would empty the L1 cache at every wait, and shared memory is not cached.
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(address), "r"(parity)
                     : "memory");
        if (done)
            return patience.rest();
        patience.spend(site);
    }
#endif
}
// The same where what has come was written by other blocks of the cluster.
template <typename Derived>
__device__ __forceinline__ void barrier_wait_cluster(uint64_t* barrier, int parity, Waiter<Derived>& patience, int site)
{
#if __CUDA_ARCH__ >= 900
    uint32_t const address = shared_word(barrier);
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
#endif
}
// Writes 8 or 16 bytes there and counts them at that block's barrier.
__device__ __forceinline__ void send(Remote to, Remote barrier, uint32_t a, uint32_t b)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to.address), "r"(a),
                 "r"(b), "r"(barrier.address)
                 : "memory");
#endif
}
__device__ __forceinline__ void send(Remote to, Remote barrier, float4 v)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to.address),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)), "r"(barrier.address)
                 : "memory");
#endif
}
// What this thread wrote to shared memory, for bulk copies and the tensor cores of a warpgroup to see after the next barrier.
__device__ __forceinline__ void before_async_reads()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Copies a multiple of 16 bytes there, to another block, in the background and counts them at that block's barrier.
__device__ __forceinline__ void copy_to_block(Remote to, void const* from, int bytes, Remote barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to.address),
                 "r"(shared_word(from)), "r"(bytes), "r"(barrier.address)
                 : "memory");
#endif
}
// Copies a multiple of 16 bytes from global memory, from and to multiples of 16, in the background and counts them at the barrier.
__device__ __forceinline__ void copy_bytes(void* to, void const* from, int bytes, uint64_t* barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_word(to)),
                 "l"(from), "r"(bytes), "r"(shared_word(barrier))
                 : "memory");
#endif
}

// --- counters in global memory -----------------------------------------------------------------------------------------

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
// Until the count is `wanted` or beyond; it may go round.
template <typename Derived>
__device__ __forceinline__ void wait_count(unsigned const* count, unsigned wanted, Waiter<Derived>& patience, int site)
{
    unsigned seen;
    do
    {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
        patience.spend(site);
    } while (static_cast<int>(seen - wanted) < 0);
    patience.rest();
}
} // namespace onnxfuse
#endif

namespace onnxfuse
{
__device__ __forceinline__ void cluster_sync()
{
    cluster_arrive();
    cluster_wait();
}
// Waits until all blocks of a cooperative grid have come here `round` times (from 1). `count` starts at zero.
__device__ __forceinline__ void grid_barrier(unsigned* count, unsigned round, Patience& patience, int site)
{
    __syncthreads();
    if (threadIdx.x == 0)
    {
        count_release(count);
        wait_count(count, round * gridDim.x, patience, site);
    }
    __syncthreads();
}
} // namespace onnxfuse
