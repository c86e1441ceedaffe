// The same product for few rows on Hopper, where every step of latency counts: tiles of 64 x 64 that four warps multiply straight from shared
// memory (wgmma). One thread asks for the tiles (TMA), so that the others spend no instruction on addresses, and for all of them at once
// where they fit. Blocks of a cluster share k: each sends its sums of a row to the block that finishes that row, so that after one barrier all that
// is read is at home. Four more warps help to finish. What the end needs (bias, scale, residual) is asked for at the start.
#pragma once

#include "hopper.cuh"

namespace onnxfuse
{
constexpr int kGroupRows = 64, kGroupColumns = 64, kGroupThreads = 288; // eight warps that finish, of which four multiply; one that asks
constexpr int kGroupStageBytes = (kGroupRows + 64) * 128, kGroupPitch = kGroupColumns + 4; // of the sums in shared memory, in floats

// Dynamic shared memory; the stages begin at a multiple of 1024.
constexpr int group_bytes(int stages)
{
    return stages * kGroupStageBytes + kGroupRows * kGroupPitch * 4 + 1024 + 16 * stages;
}

template <typename T, int kSplit, Ending kEnding = Ending::kColumns>
__global__ void __launch_bounds__(kGroupThreads) linear_group(__grid_constant__ HopperArgs<T> const all)
{
#if defined(ONNXFUSE_HOPPER) || defined(ONNXFUSE_EMULATED) // elsewhere it is never launched
    constexpr int kTaken = kEnding == Ending::kGated ? 16 : 8; // columns of the product that give a vector of results
    constexpr int kParts = kGroupColumns / kTaken, kOwnRows = kGroupRows / kSplit, kFinishers = 256, kAsks = 256;
    // Vectors of 8 results that a thread finishes.
    constexpr int kEach = (kOwnRows * kParts + kFinishers - 1) / kFinishers;
    LinearArgs<T> const& args = all.rest;
    ONNXFUSE_SHARED(shared_start);
    unsigned char* const shared = shared_start + (1024 - reinterpret_cast<uintptr_t>(shared_start) % 1024) % 1024;
    int const stages = args.stages;
    float* const out = reinterpret_cast<float*>(shared + stages * kGroupStageBytes); // [kSplit][kOwnRows][pitch]
    uint64_t* const full = reinterpret_cast<uint64_t*>(out + kGroupRows * kGroupPitch);
    uint64_t* const empty = full + stages;
    int const thread = static_cast<int>(threadIdx.x);
    int const rank = kSplit == 1 ? 0 : cluster_rank();
    int const row0 = static_cast<int>(blockIdx.y) * kGroupRows, column0 = (kSplit == 1 ? static_cast<int>(blockIdx.x) : cluster_of_grid()) * kGroupColumns;
    int const all_steps = (args.width + 63) / 64, each = (all_steps + kSplit - 1) / kSplit;
    int const first = rank * each, steps = max(0, min(each, all_steps - first));
    if (thread == kAsks)
    {
        map_ahead(&all.weight);
        map_ahead(&all.input);
#pragma unroll 1
        for (int s = 0; s < stages; ++s)
        {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 1);
        }
        barriers_ready();
        // The weights do not wait for the kernel before.
#pragma unroll 1
        for (int s = 0; s < min(stages, steps); ++s)
        {
            barrier_expect(full + s, kGroupStageBytes);
            copy_tile(shared + s * kGroupStageBytes + kGroupRows * 128, &all.weight, (first + s) * 64, column0, full + s);
        }
    }
    // All vectors of a thread are of the same columns.
    int const column = column0 + thread % kParts * kTaken;
    Vector<T, 8> bias{}, scale{}, residual[kEach] = {}; // gated: the value's bias is in `scale`
    if (thread < kFinishers && column < args.columns)
    {
        if (args.bias)
            bias = load<T, 8>(args.bias + column, 0);
        if (kEnding == Ending::kGated && args.bias)
            scale = load<T, 8>(args.bias + column + 8, 0);
        if (args.scale)
            scale = load<T, 8>(args.scale + column, 0);
    }
    __syncthreads();
    if (kSplit > 1)
        cluster_arrive(); // this block has begun: others may write here
    wait_for_kernel_before();
    next_may_start();

    if (thread == kAsks)
    {
#pragma unroll 1
        for (int s = 0; s < min(stages, steps); ++s)
            copy_tile(shared + s * kGroupStageBytes, &all.input, row0, (first + s) * 64, full + s);
        int stage = 0, parity = 0;
#pragma unroll 1
        for (int step = stages; step < steps; ++step)
        {
            barrier_wait(empty + stage, parity);
            barrier_expect(full + stage, kGroupStageBytes);
            unsigned char* const to = shared + stage * kGroupStageBytes;
            copy_tile(to, &all.input, row0, (first + step) * 64, full + stage);
            copy_tile(to + kGroupRows * 128, &all.weight, (first + step) * 64, column0, full + stage);
            if (++stage == stages)
            {
                stage = 0;
                parity ^= 1;
            }
        }
    }
    if (thread < kFinishers && args.residual && column < args.columns)
    {
#pragma unroll
        for (int i = 0; i < kEach; ++i)
        {
            int const at = thread + kFinishers * i, row = row0 + rank * kOwnRows + at / kParts;
            if (at < kOwnRows * kParts && row < args.rows)
                residual[i] = load<T, 8>(args.residual + int64_t{row} * args.columns + column, 0);
        }
    }
    float sums[kGroupColumns / 2];
    if (thread < 128)
    {
        if (steps == 0)
        {
#pragma unroll
            for (int i = 0; i < kGroupColumns / 2; ++i)
                sums[i] = 0.0f;
        }
        int stage = 0, parity = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
        {
            barrier_wait(full + stage, parity);
            unsigned char const* const input = shared + stage * kGroupStageBytes;
            products_fence();
#pragma unroll
            for (int k = 0; k < 64; k += 16)
                multiply_group(sums, operand_rows(input + 2 * k), operand_columns(input + kGroupRows * 128 + 128 * k, 8192), step > 0 || k > 0, T{});
            products_commit();
            if (step + stages < steps) // somebody waits for this stage
            {
                products_wait<0>();
                group_sync();
                if (thread == 0)
                    barrier_arrive(empty + stage);
            }
            if (++stage == stages)
            {
                stage = 0;
                parity ^= 1;
            }
        }
        products_wait<0>();
    }
    __syncwarp(); // that of the thread that asks
    if (kSplit > 1)
        cluster_wait();
    if (thread < 128)
    {
        int const r = thread / 32 * 16 + thread % 32 / 4, c = thread % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            int const row = r + 8 * half;
            float* const to = out + ((kSplit > 1 ? rank * kOwnRows : 0) + row % kOwnRows) * kGroupPitch + c;
            RemotePlace const place = remote_place(to, row / kOwnRows);
#pragma unroll
            for (int j = 0; j < kGroupColumns / 8; ++j)
            {
                float2 const pair = make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
                if (kSplit > 1)
                    remote_put(place, 32 * j, pair);
                else
                    *reinterpret_cast<float2*>(to + 8 * j) = pair;
            }
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
    if (thread < kFinishers)
    {
#pragma unroll
        for (int i = 0; i < kEach; ++i)
        {
            int const at = thread + kFinishers * i, r = at / kParts, row = row0 + rank * kOwnRows + r;
            if (at >= kOwnRows * kParts || row >= args.rows || column >= args.columns)
                continue;
            float const* const from = out + r * kGroupPitch + at % kParts * kTaken;
            float z[kTaken] = {};
#pragma unroll
            for (int other = 0; other < kSplit; ++other)
            {
#pragma unroll
                for (int e = 0; e < kTaken; e += 4)
                {
                    float4 const four = *reinterpret_cast<float4 const*>(from + other * kOwnRows * kGroupPitch + e);
                    z[e] += four.x, z[e + 1] += four.y, z[e + 2] += four.z, z[e + 3] += four.w;
                }
            }
            if constexpr (kEnding == Ending::kGated)
            {
                float gate[8], value[8];
                unpack(bias, gate);
                unpack(scale, value);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                {
                    gate[e] += z[e];
                    value[e] += z[e + 8];
                }
                store(args.output + int64_t{row} * (args.columns / 2) + column / 2, 0, gated<T>(gate, value, args.activation));
            }
            else
            {
                finish_vector(z, bias, scale, residual[i], args);
                Vector<T, 8> rounded;
                pack(z, rounded);
                store(args.output + int64_t{row} * args.columns + column, 0, rounded);
            }
        }
    }
#endif
}
} // namespace onnxfuse
