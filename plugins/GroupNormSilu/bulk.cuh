// The same for channels first on Hopper: a block's part lies in shared memory, brought by one instruction, instead of in registers. So more blocks
// are on an SM, and some of them load while others compute or write: what limits a block of phases. Of a large group, each thread may hold kHeld
// vectors in registers besides: both memories of an SM together have room for two blocks of it.
#pragma once

#include "../common/hopper.cuh"
#include "kernel.cuh"

namespace onnxfuse
{
template <typename T, int kHeld>
__global__ void __launch_bounds__(kNormThreads, kHeld ? 2 : 1) group_norm_bulk(GroupNormArgs<T> const args)
{
#if defined(ONNXFUSE_HOPPER) || defined(ONNXFUSE_EMULATED) // elsewhere it is never launched
    constexpr int kVector = 16 / sizeof(T);
    ONNXFUSE_SHARED(shared);
    uint4 const* const data = reinterpret_cast<uint4 const*>(shared);
    int const threads = static_cast<int>(blockDim.x), room = max(0, args.per_block - kHeld * threads); // vectors of a block in shared memory
    float* const scratch = reinterpret_cast<float*>(shared + room * 16); // 2 * 32
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(scratch + 64);
    float2* const parts = reinterpret_cast<float2*>(barrier + 2); // split
    float2* const lines = parts + args.split;                      // a group's channels
    int const thread = static_cast<int>(threadIdx.x);
    int const rank = static_cast<int>(blockIdx.x) % args.split, group = static_cast<int>(blockIdx.x) / args.split;
    int const image = group / args.groups, first_channel = group % args.groups * args.slab;
    int const each = args.pixels / kVector, size = args.slab * each; // vectors of a channel, of the group
    int const first = rank * args.per_block, count = max(0, min(args.per_block, size - first)), shares = min(count, room);
    int64_t const base = int64_t{group} * size + first;
    if (args.split > 1)
        cluster_arrive();
    if (thread == 0)
    {
        barrier_init(barrier, 1);
        barriers_ready();
        barrier_expect(barrier, shares * 16);
        wait_for_kernel_before();
        if (shares > 0)
            copy_bytes(shared, reinterpret_cast<uint4 const*>(args.input) + base, shares * 16, barrier);
    }
    __syncthreads();
    wait_for_kernel_before();
    // Behind what is in shared memory.
    constexpr int kRegisters = kHeld ? kHeld : 1;
    Vector<T, kVector> held[kRegisters];
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
    {
        if (shares + thread + h * threads < count)
            held[h] = load<T, kVector>(args.input, base + shares + thread + h * threads);
    }
    barrier_wait(barrier, 0);

    float sum[1] = {};
#pragma unroll 4
    for (int i = thread; i < shares; i += threads)
    {
        float x[kVector];
        unpack(Vector<T, kVector>{data[i]}, x);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            sum[0] += x[j];
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
    {
        if (shares + thread + h * threads < count)
        {
            float x[kVector];
            unpack(held[h], x);
#pragma unroll
            for (int j = 0; j < kVector; ++j)
                sum[0] += x[j];
        }
    }
    sum_over_block(sum, scratch);
    float const mean = sum[0] / static_cast<float>(max(count, 1) * kVector);
    float squares[1] = {};
#pragma unroll 4
    for (int i = thread; i < shares; i += threads)
    {
        float x[kVector];
        unpack(Vector<T, kVector>{data[i]}, x);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            squares[0] = fmaf(x[j] - mean, x[j] - mean, squares[0]);
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
    {
        if (shares + thread + h * threads < count)
        {
            float x[kVector];
            unpack(held[h], x);
#pragma unroll
            for (int j = 0; j < kVector; ++j)
                squares[0] = fmaf(x[j] - mean, x[j] - mean, squares[0]);
        }
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
    auto const finish = [&](Vector<T, kVector> const& given, int channel, int i) {
        float2 const line = lines[channel];
        float x[kVector];
        unpack(given, x);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            x[j] = fmaf(x[j], line.x, line.y);
        end_of_norm(args, x);
        Vector<T, kVector> rounded;
        pack(x, rounded);
        store(args.output, base + i, rounded);
    };
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
    {
        int const i = shares + thread + h * threads;
        if (i < count)
            finish(held[h], (first + i) / each, i);
    }
    int channel = (first + thread) / each, within = (first + thread) % each;
#pragma unroll 2
    for (int i = thread; i < shares; i += threads)
    {
        finish(Vector<T, kVector>{data[i]}, channel, i);
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
