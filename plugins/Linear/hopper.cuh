// The same product for many rows on Hopper: tiles come by maps of the operands (TMA), a warp asks for them, and two groups of four warps
// multiply them straight from shared memory (wgmma), 64 rows each. Blocks stay and take tile after tile, so that the next tile's operands
// come while this one's results are written.
#pragma once

#include "../common/hopper.cuh"
#include "kernel.cuh"

namespace onnxfuse
{
constexpr int kHopperRows = 128, kHopperDepth = 64, kHopperThreads = 384;

template <int kColumns>
struct HopperShape
{
    static constexpr int kInputBytes = kHopperRows * kHopperDepth * 2, kPieceBytes = kHopperDepth * 128, kPieces = kColumns / 64;
    static constexpr int kStageBytes = kInputBytes + kPieces * kPieceBytes;
    static constexpr int kStages = kColumns == 256 ? 4 : 5;
    // The stages begin at a multiple of 1024; behind them the barriers, and a piece of 16 rows of 36 sums for each warp.
    static constexpr int kBytes = kStages * kStageBytes + 1024 + 16 * kStages + 8 * 16 * 36 * 4;
};

template <typename T>
struct HopperArgs
{
    TileMap input;
    TileMap weight;
    LinearArgs<T> rest;
};

// Rows of tiles that are gone through together, so that what the blocks read at a time stays in the L2 cache.
constexpr int kHopperGroup = 8;

__device__ __forceinline__ int2 tile_at(int index, int tiles_down, int tiles_across)
{
    int const group = index / (kHopperGroup * tiles_across), within = index % (kHopperGroup * tiles_across);
    int const rows = min(kHopperGroup, tiles_down - group * kHopperGroup);
    return make_int2(group * kHopperGroup + within % rows, within / rows);
}

// y = residual + scale * activation(z + bias), eight columns of a row.
template <typename T>
__device__ __forceinline__ void finish_vector(float (&z)[8], Vector<T, 8> const& bias, Vector<T, 8> const& scale, Vector<T, 8> const& residual, LinearArgs<T> const& args)
{
    float other[8];
    unpack(bias, other);
#pragma unroll
    for (int e = 0; e < 8; ++e)
        z[e] += other[e];
    activate<true>(z, args.activation);
    if (args.scale)
    {
        unpack(scale, other);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            z[e] *= other[e];
    }
    if (args.residual)
    {
        unpack(residual, other);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            z[e] += other[e];
    }
}

// A warp's 16 rows of sums to the output, 32 columns at a time by way of its piece of shared memory: little code, where registers can only be
// named in code, and whole lines for the memory.
constexpr int kPieceColumns = 32, kPiecePitch = kPieceColumns + 4;

template <typename T, Ending kEnding, int N>
__device__ __forceinline__ void hopper_output(LinearArgs<T> const& args, float const (&sums)[N], float* piece, int row0, int column0)
{
    int const lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int chunk = 0; chunk < N * 2 / kPieceColumns; ++chunk)
    {
        float* const to = piece + lane / 4 * kPiecePitch + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < N / 4; ++j)
        {
            if (j / 4 == chunk)
            {
                *reinterpret_cast<float2*>(to + j % 4 * 8) = make_float2(sums[4 * j], sums[4 * j + 1]);
                *reinterpret_cast<float2*>(to + 8 * kPiecePitch + j % 4 * 8) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
            }
        }
        __syncwarp();
        int const column = column0 + chunk * kPieceColumns + lane % 4 * 8;
        if constexpr (kEnding == Ending::kGated)
        {
            int const pair = column0 + chunk * kPieceColumns + lane % 2 * 16, row = row0 + lane / 2;
            if (pair < args.columns && row < args.rows)
            {
                float4 const* const from = reinterpret_cast<float4 const*>(piece + lane / 2 * kPiecePitch + lane % 2 * 16);
                float gate[8] = {from[0].x, from[0].y, from[0].z, from[0].w, from[1].x, from[1].y, from[1].z, from[1].w};
                float value[8] = {from[2].x, from[2].y, from[2].z, from[2].w, from[3].x, from[3].y, from[3].z, from[3].w};
                add_bias(gate, args.bias, pair);
                add_bias(value, args.bias, pair + 8);
                store(args.output + int64_t{row} * (args.columns / 2) + pair / 2, 0, gated<T>(gate, value, args.activation));
            }
        }
        else if (column < args.columns)
        {
            Vector<T, 8> bias{}, scale{};
            if (args.bias)
                bias = load<T, 8>(args.bias + column, 0);
            if (args.scale)
                scale = load<T, 8>(args.scale + column, 0);
#pragma unroll 1
            for (int r = lane / 4; r < 16; r += 8)
            {
                int const row = row0 + r;
                if (row >= args.rows)
                    break;
                int64_t const at = int64_t{row} * args.columns + column;
                Vector<T, 8> residual{};
                if (args.residual)
                    residual = load<T, 8>(args.residual + at, 0);
                float4 const low = *reinterpret_cast<float4 const*>(piece + r * kPiecePitch + lane % 4 * 8);
                float4 const high = *reinterpret_cast<float4 const*>(piece + r * kPiecePitch + lane % 4 * 8 + 4);
                float z[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                finish_vector(z, bias, scale, residual, args);
                Vector<T, 8> rounded;
                pack(z, rounded);
                store(args.output + at, 0, rounded);
            }
        }
        __syncwarp();
    }
}

template <typename T, int kColumns, Ending kEnding = Ending::kColumns>
__global__ void __launch_bounds__(kHopperThreads, 1) linear_hopper(__grid_constant__ HopperArgs<T> const args)
{
#if defined(ONNXFUSE_HOPPER) || defined(ONNXFUSE_EMULATED) // elsewhere it is never launched
    using S = HopperShape<kColumns>;
    ONNXFUSE_SHARED(shared_start);
    unsigned char* const shared = shared_start + (1024 - reinterpret_cast<uintptr_t>(shared_start) % 1024) % 1024;
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared + S::kStages * S::kStageBytes);
    uint64_t* const empty = full + S::kStages;
    int const group = static_cast<int>(threadIdx.x) / 128, thread = static_cast<int>(threadIdx.x) % 128;
    int const tiles_down = (args.rest.rows + kHopperRows - 1) / kHopperRows, tiles_across = args.rest.tiles_columns;
    int const tiles = tiles_down * tiles_across, steps = (args.rest.width + kHopperDepth - 1) / kHopperDepth;
    if (threadIdx.x == 0)
    {
        for (int s = 0; s < S::kStages; ++s)
        {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 2);
        }
        barriers_ready();
    }
    __syncthreads();
    wait_for_kernel_before();
    next_may_start();

    int stage = 0, parity = 0;
    auto const next = [&] {
        if (++stage == S::kStages)
        {
            stage = 0;
            parity ^= 1;
        }
    };
    if (group == 0)
    {
        give_registers<24>();
        if (thread != 0)
            return;
        for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x))
        {
            int2 const at = tile_at(tile, tiles_down, tiles_across);
            for (int step = 0; step < steps; ++step)
            {
                barrier_wait(empty + stage, parity ^ 1); // the first time round it is empty
                barrier_expect(full + stage, S::kStageBytes);
                unsigned char* const to = shared + stage * S::kStageBytes;
                copy_tile(to, &args.input, at.x * kHopperRows, step * kHopperDepth, full + stage);
#pragma unroll
                for (int piece = 0; piece < S::kPieces; ++piece)
                    copy_tile(to + S::kInputBytes + piece * S::kPieceBytes, &args.weight, step * kHopperDepth, at.y * kColumns + 64 * piece, full + stage);
                next();
            }
        }
        return;
    }
    take_registers<240>();
    int const mine = group - 1; // 64 rows of the tile
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x))
    {
        int2 const at = tile_at(tile, tiles_down, tiles_across);
        float sums[kColumns / 2];
        int before = -1;
        for (int step = 0; step < steps; ++step)
        {
            barrier_wait(full + stage, parity);
            unsigned char const* const input = shared + stage * S::kStageBytes + mine * 64 * 128;
            unsigned char const* const weight = shared + stage * S::kStageBytes + S::kInputBytes;
            products_fence();
#pragma unroll
            for (int k = 0; k < kHopperDepth; k += 16)
                multiply_group(sums, operand_rows(input + 2 * k), operand_columns(weight + 128 * k, S::kPieceBytes), step > 0 || k > 0, T{});
            products_commit();
            products_wait<1>(); // the step before is done: its stage is free
            if (before >= 0 && thread == 0)
                barrier_arrive(empty + before);
            before = stage;
            next();
        }
        products_wait<0>();
        if (thread == 0)
            barrier_arrive(empty + before);
        int const warp = thread / 32;
        float* const piece = reinterpret_cast<float*>(empty + S::kStages) + (mine * 4 + warp) * 16 * kPiecePitch;
        hopper_output<T, kEnding>(args.rest, sums, piece, at.x * kHopperRows + mine * 64 + warp * 16, at.y * kColumns);
    }
#endif
}
} // namespace onnxfuse
