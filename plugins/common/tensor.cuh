// Tensor cores, copies to shared memory in the background, clusters, and 2^x: what kernels ask of the GPU beyond plain CUDA C++. Tests compile
// the same kernels with the emulator's versions. What needs compute capability 8.0 or 9.0 is empty before it: the launchers do not go there.
#pragma once

#include <cstdint>

#include "vector.cuh"

#ifdef ONNXFUSE_EMULATED
#include "emulated_tensor.h"
#else

#define ONNXFUSE_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace onnxfuse
{
__device__ __forceinline__ uint32_t shared_word(void const* p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// c += a b for a [16, 16], b [16, 8]; fragments as PTX's mma.m16n8k16 has them.
__device__ __forceinline__ void mma(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __half)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}
__device__ __forceinline__ void mma(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, __nv_bfloat16)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

__device__ __forceinline__ float exp2_approximate(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Four matrices of 8 x 8 halves from shared memory: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], void const* row)
{
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_word(row))
                 : "memory");
#endif
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], void const* row)
{
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_word(row))
                 : "memory");
#endif
}
// Two matrices; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[2], void const* row)
{
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_word(row)) : "memory");
#endif
}

// Copies 16 bytes to shared memory in the background, or zeros.
__device__ __forceinline__ void copy_16(void* to, void const* from, bool there)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_word(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
#else
    *static_cast<uint4*>(to) = there ? *static_cast<uint4 const*>(from) : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void copy_16(void* to, void const* from)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_word(to)), "l"(from) : "memory");
#else
    *static_cast<uint4*>(to) = *static_cast<uint4 const*>(from);
#endif
}
__device__ __forceinline__ void end_of_copies()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most `kLeft` groups of copies are under way.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Lets the next kernel of the stream start before this one ends, where it was launched so (launch_cluster's `early`).
__device__ __forceinline__ void next_may_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the kernel before has ended and its writes are seen; at once where this kernel was not started early. Before any read of
// what another kernel writes, and before any write.
__device__ __forceinline__ void wait_for_kernel_before()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A barrier of the first 128 threads of a block.
__device__ __forceinline__ void group_sync()
{
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

// This block's rank in its cluster, and its cluster's along x of the grid.
__device__ __forceinline__ int cluster_rank()
{
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return static_cast<int>(rank);
}
__device__ __forceinline__ int cluster_of_grid()
{
    uint32_t cluster = blockIdx.x;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
#endif
    return static_cast<int>(cluster);
}

// What was written in shared memory before arriving is seen by all blocks of the cluster after waiting.
__device__ __forceinline__ void cluster_arrive()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The place of `p`, in this block's shared memory, in the block of that rank.
__device__ __forceinline__ uint32_t remote_word(void const* p, int rank)
{
    uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_word(p)), "r"(rank));
#endif
    return address;
}
using RemotePlace = uint32_t;
__device__ __forceinline__ RemotePlace remote_place(void const* p, int rank)
{
    return remote_word(p, rank);
}
__device__ __forceinline__ void remote_put(RemotePlace place, int bytes, float2 value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(place + bytes), "f"(value.x), "f"(value.y) : "memory");
#endif
}
__device__ __forceinline__ void remote_store(float2* p, int rank, float2 value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote_word(p, rank)), "f"(value.x), "f"(value.y) : "memory");
#endif
}
__device__ __forceinline__ float4 remote_load(float4 const* p, int rank)
{
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(remote_word(p, rank))
                 : "memory");
#endif
    return v;
}
__device__ __forceinline__ float remote_load(float const* p, int rank)
{
    float v = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote_word(p, rank)) : "memory");
#endif
    return v;
}
} // namespace onnxfuse
#endif

namespace onnxfuse
{
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1, T type)
{
    mma(c, a[0], a[1], a[2], a[3], b0, b1, type);
}
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], uint4 const& a, uint32_t b0, uint32_t b1, T type)
{
    mma(c, a.x, a.y, a.z, a.w, b0, b1, type);
}
} // namespace onnxfuse
