// The same product for few rows on Hopper, where every step of latency counts: tiles of 64 rows that four warps multiply straight from shared
// memory (wgmma). One thread asks for the tiles (TMA), so that the others spend no instruction on addresses, and for all of them at once
// where they fit. Blocks of a cluster share k and add their sums up through each other's shared memory. What the end needs (bias, scale,
// residual) is asked for at the start.
#pragma once

#include "../common/stamps.cuh"
#include "hopper.cuh"

namespace onnxfuse
{
constexpr int kGroupRows = 64, kGroupThreads = 160; // four warps that multiply, one that asks

template <int kColumns>
struct GroupShape
{
    static constexpr int kInputBytes = kGroupRows * 128, kPieces = kColumns / 64, kStageBytes = kInputBytes + kPieces * 64 * 128;
    static constexpr int kPitch = kColumns + 4; // of the sums in shared memory, in floats

    __host__ __device__ static constexpr int bytes(int stages)
    {
        int const pipeline = stages * kStageBytes, sums = kGroupRows * kPitch * 4;
        return (pipeline > sums ? pipeline : sums) + 1024 + 16 * stages;
    }
};

template <typename T, int kColumns, int kSplit>
__global__ void __launch_bounds__(kGroupThreads) linear_group(__grid_constant__ HopperArgs<T> const all)
{
#if defined(ONNXFUSE_HOPPER) || defined(ONNXFUSE_EMULATED) // elsewhere it is never launched
    using S = GroupShape<kColumns>;
    constexpr int kParts = kColumns / 8;
    // Vectors of 8 results that a thread finishes.
    constexpr int kEach = (kGroupRows / kSplit * kParts + 127) / 128;
    LinearArgs<T> const& args = all.rest;
    ONNXFUSE_SHARED(shared_start);
    unsigned char* const shared = shared_start + (1024 - reinterpret_cast<uintptr_t>(shared_start) % 1024) % 1024;
    int const stages = args.stages;
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared + S::bytes(stages) - 1024 - 16 * stages);
    uint64_t* const empty = full + stages;
    int const thread = static_cast<int>(threadIdx.x);
    int const rank = kSplit == 1 ? 0 : static_cast<int>(blockIdx.x) % kSplit, tile = static_cast<int>(blockIdx.x) / kSplit;
    int const row0 = tile / args.tiles_columns * kGroupRows, column0 = tile % args.tiles_columns * kColumns;
    int const all_steps = (args.width + 63) / 64, each = (all_steps + kSplit - 1) / kSplit;
    int const first = rank * each, steps = max(0, min(each, all_steps - first));
    stamp(0);
    if (thread == 128)
    {
        for (int s = 0; s < stages; ++s)
        {
            phase_init(full + s, 1);
            phase_init(empty + s, 1);
        }
        phases_ready();
        // The weights do not wait for the kernel before.
#pragma unroll 1
        for (int s = 0; s < min(stages, steps); ++s)
        {
            phase_expect(full + s, S::kStageBytes);
#pragma unroll
            for (int piece = 0; piece < S::kPieces; ++piece)
                copy_tile(shared + s * S::kStageBytes + S::kInputBytes + piece * 8192, &all.weight, (first + s) * 64, column0 + 64 * piece, full + s);
        }
    }
    __syncthreads();
    wait_for_kernel_before();
    stamp(1);

    float sums[kColumns / 2];
    // All vectors of a thread are of the same columns.
    int const column = column0 + thread % kParts * 8;
    constexpr bool kPrefetch = kEach <= 2; // more would take too much code; see the loop at the end
    Vector<T, 8> bias{}, scale{}, residual[kPrefetch ? kEach : 1] = {};
    if (thread >= 128)
    {
        if (thread == 128)
        {
#pragma unroll 1
            for (int s = 0; s < min(stages, steps); ++s)
                copy_tile(shared + s * S::kStageBytes, &all.input, row0, (first + s) * 64, full + s);
            int stage = 0, parity = 0;
#pragma unroll 1
            for (int step = stages; step < steps; ++step)
            {
                phase_wait(empty + stage, parity);
                phase_expect(full + stage, S::kStageBytes);
                unsigned char* const to = shared + stage * S::kStageBytes;
                copy_tile(to, &all.input, row0, (first + step) * 64, full + stage);
#pragma unroll
                for (int piece = 0; piece < S::kPieces; ++piece)
                    copy_tile(to + S::kInputBytes + piece * 8192, &all.weight, (first + step) * 64, column0 + 64 * piece, full + stage);
                if (++stage == stages)
                {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
    }
    else
    {
        if (column < args.columns)
        {
            if (args.bias)
                bias = load<T, 8>(args.bias + column, 0);
            if (args.scale)
                scale = load<T, 8>(args.scale + column, 0);
#pragma unroll
            for (int i = 0; kPrefetch && i < kEach; ++i)
            {
                int const at = thread + 128 * i, row = row0 + rank * (kGroupRows / kSplit) + at / kParts;
                if (args.residual && at < kGroupRows / kSplit * kParts && row < args.rows)
                    residual[i] = load<T, 8>(args.residual + int64_t{row} * args.columns + column, 0);
            }
        }
        if (steps == 0)
        {
#pragma unroll
            for (int i = 0; i < kColumns / 2; ++i)
                sums[i] = 0.0f;
        }
        int stage = 0, parity = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
        {
            phase_wait(full + stage, parity);
            if (step == 0)
                stamp(2);
            unsigned char const* const input = shared + stage * S::kStageBytes;
            products_fence();
#pragma unroll
            for (int k = 0; k < 64; k += 16)
                multiply_group(sums, operand_rows(input + 2 * k), operand_columns(input + S::kInputBytes + 128 * k, 8192), step > 0 || k > 0, T{});
            products_commit();
            if (step + stages < steps) // somebody waits for this stage
            {
                products_wait<0>();
                group_sync();
                if (thread == 0)
                    phase_arrive(empty + stage);
            }
            if (++stage == stages)
            {
                stage = 0;
                parity ^= 1;
            }
        }
        products_wait<0>();
        stamp(3);
    }
    next_may_start();
    __syncthreads(); // all have multiplied: now the sums lie where the stages were
    float* const out = reinterpret_cast<float*>(shared);
    if (thread < 128)
    {
        int const r = thread / 32 * 16 + thread % 32 / 4, c = thread % 4 * 2;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
        {
            *reinterpret_cast<float2*>(out + r * S::kPitch + c + 8 * j) = make_float2(sums[4 * j], sums[4 * j + 1]);
            *reinterpret_cast<float2*>(out + (r + 8) * S::kPitch + c + 8 * j) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
        }
    }
    if constexpr (kSplit > 1)
    {
        cluster_arrive();
        cluster_wait();
    }
    else
    {
        __syncthreads();
    }
    stamp(4);
    if (thread < 128)
    {
#pragma unroll(kPrefetch ? kEach : 1)
        for (int i = 0; i < kEach; ++i)
        {
            int const at = thread + 128 * i, r = rank * (kGroupRows / kSplit) + at / kParts, c = at % kParts * 8;
            int const row = row0 + r;
            if (at >= kGroupRows / kSplit * kParts || row >= args.rows || column >= args.columns)
                continue;
            float4 const* const from = reinterpret_cast<float4 const*>(out + r * S::kPitch + c);
            float4 low[kSplit], high[kSplit];
#pragma unroll
            for (int other = 0; other < kSplit; ++other)
            {
                low[other] = kSplit > 1 ? remote_load(from, other) : from[0];
                high[other] = kSplit > 1 ? remote_load(from + 1, other) : from[1];
            }
            float z[8] = {};
#pragma unroll
            for (int other = 0; other < kSplit; ++other)
            {
                z[0] += low[other].x, z[1] += low[other].y, z[2] += low[other].z, z[3] += low[other].w;
                z[4] += high[other].x, z[5] += high[other].y, z[6] += high[other].z, z[7] += high[other].w;
            }
            Vector<T, 8> added = residual[kPrefetch ? i : 0];
            if (!kPrefetch && args.residual)
                added = load<T, 8>(args.residual + int64_t{row} * args.columns + column, 0);
            finish_vector(z, bias, scale, added, args);
            Vector<T, 8> rounded;
            pack(z, rounded);
            store(args.output + int64_t{row} * args.columns + column, 0, rounded);
        }
    }
    stamp(5);
    if constexpr (kSplit > 1)
    {
        cluster_arrive();
        cluster_wait(); // nobody ends while its sums are read
    }
    stamp(6);
#endif
}
} // namespace onnxfuse
