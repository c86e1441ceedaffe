// The same for channels first on Hopper: a block's part lies in shared memory, brought by one instruction, instead of in registers. So more blocks
// are on an SM, and some of them load while others compute or write: what limits a block of phases.
#pragma once

#include "../common/hopper.cuh"
#include "kernel.cuh"

namespace onnxfuse
{
template <typename T>
__global__ void __launch_bounds__(kNormThreads, 1) group_norm_bulk(GroupNormArgs<T> const args)
{
#if defined(ONNXFUSE_HOPPER) || defined(ONNXFUSE_EMULATED) // elsewhere it is never launched
    constexpr int kVector = 16 / sizeof(T);
    ONNXFUSE_SHARED(shared);
    uint4 const* const data = reinterpret_cast<uint4 const*>(shared);
    float* const scratch = reinterpret_cast<float*>(shared + args.per_block * 16); // 2 * 32
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(scratch + 64);
    float2* const parts = reinterpret_cast<float2*>(barrier + 2); // split
    float2* const lines = parts + args.split;                      // a group's channels
    int const thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    int const rank = static_cast<int>(blockIdx.x) % args.split, group = static_cast<int>(blockIdx.x) / args.split;
    int const image = group / args.groups, first_channel = group % args.groups * args.slab;
    int const each = args.pixels / kVector, size = args.slab * each; // vectors of a channel, of the group
    int const first = rank * args.per_block, count = max(0, min(args.per_block, size - first));
    int64_t const base = int64_t{group} * size + first;
    if (args.split > 1)
        cluster_arrive();
    if (thread == 0)
    {
        barrier_init(barrier, 1);
        barriers_ready();
        barrier_expect(barrier, count * 16);
        wait_for_kernel_before();
        if (count > 0)
            copy_bytes(shared, reinterpret_cast<uint4 const*>(args.input) + base, count * 16, barrier);
    }
    __syncthreads();
    wait_for_kernel_before();
    barrier_wait(barrier, 0);

    float sum[1] = {};
#pragma unroll 4
    for (int i = thread; i < count; i += threads)
    {
        float x[kVector];
        unpack(Vector<T, kVector>{data[i]}, x);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            sum[0] += x[j];
    }
    sum_over_block(sum, scratch);
    float const mean = sum[0] / static_cast<float>(max(count, 1) * kVector);
    float squares[1] = {};
#pragma unroll 4
    for (int i = thread; i < count; i += threads)
    {
        float x[kVector];
        unpack(Vector<T, kVector>{data[i]}, x);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            squares[0] = fmaf(x[j] - mean, x[j] - mean, squares[0]);
    }
    sum_over_block(squares, scratch + 32);
    if (args.split > 1)
        cluster_wait(); // all blocks have begun
    share_parts(args, Part::kAll, parts, group, rank, make_float2(mean, squares[0]), thread < 32);
    meet(args);
    next_may_start();
    auto const counts = [&](int r) { return static_cast<float>(max(0, min(args.per_block, size - r * args.per_block)) * kVector); };
    float2 const statistics = merge(parts, args.split, counts, args.epsilon);
    for (int c = thread; c < args.slab; c += threads)
        lines[c] = line_of(args, statistics, image, first_channel + c);
    __syncthreads();
    int channel = (first + thread) / each, within = (first + thread) % each;
#pragma unroll 2
    for (int i = thread; i < count; i += threads)
    {
        float2 const line = lines[channel];
        float x[kVector];
        unpack(Vector<T, kVector>{data[i]}, x);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            x[j] = fmaf(x[j], line.x, line.y);
        activate_each<Activation::kSilu, sizeof(T) == 2>(x);
        Vector<T, kVector> rounded;
        pack(x, rounded);
        store(args.output, base + i, rounded);
        within += threads;
        while (within >= each)
        {
            within -= each;
            ++channel;
        }
    }
#endif
}
} // namespace onnxfuse
