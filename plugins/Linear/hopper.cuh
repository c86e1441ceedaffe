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
    static constexpr int kStages = kColumns == 256 ? 4 : 6;
    static constexpr int kBytes = kStages * kStageBytes + 1024 + 16 * kStages; // the stages begin at a multiple of 1024
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

__device__ __forceinline__ void store_two(float a, float b, __half* to)
{
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
}
__device__ __forceinline__ void store_two(float a, float b, __nv_bfloat16* to)
{
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}
__device__ __forceinline__ float2 load_two(__half const* p)
{
    return __half22float2(*reinterpret_cast<__half2 const*>(p));
}
__device__ __forceinline__ float2 load_two(__nv_bfloat16 const* p)
{
    return make_float2(widen(p[0]), widen(p[1]));
}

template <Activation kKind, typename T, int N>
__device__ __forceinline__ void hopper_output(LinearArgs<T> const& args, float const (&sums)[N], int row, int column)
{
#pragma unroll
    for (int j = 0; j < N / 4; ++j)
    {
        int const c = column + 8 * j;
        if (c >= args.columns)
            continue;
        float2 bias = make_float2(0.0f, 0.0f), scale = make_float2(1.0f, 1.0f);
        if (args.bias)
            bias = load_two(args.bias + c);
        if (args.scale)
            scale = load_two(args.scale + c);
#pragma unroll
        for (int h = 0; h < 2; ++h)
        {
            int const r = row + 8 * h;
            if (r >= args.rows)
                continue;
            float2 z = make_float2(activate<kKind, true>(sums[4 * j + 2 * h] + bias.x) * scale.x, activate<kKind, true>(sums[4 * j + 2 * h + 1] + bias.y) * scale.y);
            int64_t const at = int64_t{r} * args.columns + c;
            if (args.residual)
            {
                float2 const more = load_two(args.residual + at);
                z.x += more.x;
                z.y += more.y;
            }
            store_two(z.x, z.y, args.output + at);
        }
    }
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kHopperThreads, 1) linear_hopper(__grid_constant__ HopperArgs<T> const args)
{
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
            phase_init(full + s, 1);
            phase_init(empty + s, 2);
        }
        phases_ready();
    }
    __syncthreads();
    next_may_start();
    wait_for_kernel_before();

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
                phase_wait(empty + stage, parity ^ 1); // the first time round it is empty
                phase_expect(full + stage, S::kStageBytes);
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
            phase_wait(full + stage, parity);
            unsigned char const* const input = shared + stage * S::kStageBytes + mine * 64 * 128;
            unsigned char const* const weight = shared + stage * S::kStageBytes + S::kInputBytes;
            products_fence();
#pragma unroll
            for (int k = 0; k < kHopperDepth; k += 16)
                multiply_group(sums, operand_rows(input + 2 * k), operand_columns(weight + 128 * k, S::kPieceBytes), step > 0 || k > 0, T{});
            products_commit();
            products_wait<1>(); // the step before is done: its stage is free
            if (before >= 0 && thread == 0)
                phase_arrive(empty + before);
            before = stage;
            next();
        }
        products_wait<0>();
        if (thread == 0)
            phase_arrive(empty + before);
        int const row = at.x * kHopperRows + mine * 64 + thread / 32 * 16 + thread % 32 / 4, column = at.y * kColumns + thread % 4 * 2;
        switch (args.rest.activation)
        {
        case Activation::kRelu: hopper_output<Activation::kRelu>(args.rest, sums, row, column); break;
        case Activation::kSilu: hopper_output<Activation::kSilu>(args.rest, sums, row, column); break;
        case Activation::kGelu: hopper_output<Activation::kGelu>(args.rest, sums, row, column); break;
        case Activation::kGeluTanh: hopper_output<Activation::kGeluTanh>(args.rest, sums, row, column); break;
        case Activation::kGeluQuick: hopper_output<Activation::kGeluQuick>(args.rest, sums, row, column); break;
        default: hopper_output<Activation::kNone>(args.rest, sums, row, column); break;
        }
    }
}
} // namespace onnxfuse
