// Whether compute-sanitizer takes a bulk copy or an st.async from block A of a cluster to block B. bulk KIND A B; prints what arrived.
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <cuda_runtime.h>
__device__ uint32_t sh(void const* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__global__ void __cluster_dims__(2, 1, 1) k(int kind, int from, int to, int* out)
{
    __shared__ __align__(128) int data[2][32]; __shared__ uint64_t bar; int rank = blockIdx.x, t = threadIdx.x;
    data[0][t] = 100 * rank + t; data[1][t] = -1;
    if (t == 0) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(sh(&bar)) : "memory"); asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sh(&bar)), "r"(rank == to ? 128 : 0) : "memory"); }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    uint32_t d, b; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(sh(data[1])), "r"(to)); asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(b) : "r"(sh(&bar)), "r"(to));
    if (rank == from && t == 0) printf("kind %d from %d to %d: destination %x, own window %x\n", kind, from, to, d, sh(data[1]));
    if (rank == from && kind == 0 && t == 0) asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];" ::"r"(d), "r"(sh(data[0])), "r"(b) : "memory");
    if (rank == from && kind == 1 && t < 16) asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(d + 8 * t), "r"(data[0][2 * t]), "r"(data[0][2 * t + 1]), "r"(b) : "memory");
    if (rank == to) for (int n = 0, done = 0; !done && n < 1000000; n++) asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(sh(&bar)) : "memory");
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    out[32 * rank + t] = data[1][t];
}
int main(int n, char** a)
{
    int kind = atoi(a[1]), from = atoi(a[2]), to = atoi(a[3]), host[64], *out; cudaMalloc(&out, 256);
    k<<<2, 32>>>(kind, from, to, out); cudaError_t e = cudaDeviceSynchronize(); cudaMemcpy(host, out, 256, cudaMemcpyDeviceToHost);
    printf("%s; block %d has %d..%d (want %d..%d)\n", cudaGetErrorString(e), to, host[32 * to], host[32 * to + 31], 100 * from, 100 * from + 31); return e;
}
