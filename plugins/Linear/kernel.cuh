// Matrix product + bias + activation + layer scale + residual (+ LayerNorm where a block has whole rows) on tensor cores (mma.sync).
//
// A block makes a tile of the product; blocks of a cluster share k and add their sums up through each other's shared memory, so that few
// rows still fill the GPU, without a workspace. Tiles of both operands come by copies in the background, several stages ahead. Rows of
// 64 halves lie in shared memory with their 16-byte parts exchanged (part ^ row % 8), so that ldmatrix meets no bank twice; the weights'
// [k, n] order is what ldmatrix.trans makes of them, so they need no packing.
#pragma once

#include "../common/activation.cuh"
#include "../common/tensor.cuh"
#include "launch.h"

namespace onnxfuse
{
template <typename T>
struct LinearArgs
{
    T const* input;
    T const* weight;
    T const* bias;
    T const* scale;
    T const* residual;
    T* output;
    T const* gamma;
    T const* beta;
    T* total;
    float epsilon;
    int rows, width, columns;
    int tiles_columns; // tiles along n
    int split;
    int stages;
    Activation activation;
};

template <typename T>
LinearArgs<T> linear_args(OnnxfuseLinear const& p, int tiles_columns, int split, int stages)
{
    return {static_cast<T const*>(p.input), static_cast<T const*>(p.weight), static_cast<T const*>(p.bias), static_cast<T const*>(p.scale),
        static_cast<T const*>(p.residual), static_cast<T*>(p.output), static_cast<T const*>(p.gamma), static_cast<T const*>(p.beta),
        static_cast<T*>(p.total), p.epsilon, p.rows, p.width, p.columns, tiles_columns, split, stages, static_cast<Activation>(p.activation)};
}

constexpr int kLinearDepth = 64; // of a stage along k

template <int kRows, int kColumns>
struct LinearShape
{
    // Warps take 32 x 32, or 64 x 32 of the large tiles.
    static constexpr int kWarpRows = kRows >= 128 ? 64 : 32, kWarpColumns = 32;
    static constexpr int kWarpsDown = kRows / kWarpRows, kWarpsAcross = kColumns / kWarpColumns;
    static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
    static constexpr int kStageBytes = (kRows + kColumns) * kLinearDepth * 2;
    static constexpr int kPitch = kColumns + 4; // of the sums in shared memory, in floats

    static constexpr int bytes(int stages)
    {
        int const pipeline = stages * kStageBytes, sums = kRows * kPitch * 4;
        return pipeline > sums ? pipeline : sums;
    }
};

// The 16-byte part of a row of `kParts` parts at which part `c` of row `r` lies.
template <int kParts>
__device__ __forceinline__ int part_of(int r, int c)
{
    return kParts >= 8 ? c ^ (r & 7) : c ^ (r >> 1 & 3);
}

// z += bias, and a null bias is zeros.
template <typename T>
__device__ __forceinline__ void add_bias(float (&z)[8], T const* bias, int column)
{
    if (!bias)
        return;
    float other[8];
    unpack(load<T, 8>(bias + column, 0), other);
#pragma unroll
    for (int e = 0; e < 8; ++e)
        z[e] += other[e];
}

// activation(gate) * value, eight columns of a row with their biases in them.
template <typename T>
__device__ __forceinline__ Vector<T, 8> gated(float (&gate)[8], float const (&value)[8], Activation activation)
{
    activate<true>(gate, activation);
#pragma unroll
    for (int e = 0; e < 8; ++e)
        gate[e] *= value[e];
    Vector<T, 8> rounded;
    pack(gate, rounded);
    return rounded;
}

__device__ __forceinline__ float sum_over_warp(float x)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// A warp's row of up to 256 columns, eight to a lane where they are `there`: z becomes its norm, in two passes over what is held.
template <typename T>
__device__ __forceinline__ void norm_of_row(float (&z)[8], LinearArgs<T> const& args, int column, bool there)
{
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e)
        sum += z[e];
    float const mean = sum_over_warp(there ? sum : 0.0f) / static_cast<float>(args.columns);
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e)
        squares = fmaf(z[e] - mean, z[e] - mean, squares);
    float const rate = 1.0f / sqrtf(sum_over_warp(there ? squares : 0.0f) / static_cast<float>(args.columns) + args.epsilon);
#pragma unroll
    for (int e = 0; e < 8; ++e)
        z[e] = (z[e] - mean) * rate;
    if (there && args.gamma)
    {
        float other[8];
        unpack(load<T, 8>(args.gamma + column, 0), other);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            z[e] *= other[e];
    }
    if (there)
        add_bias(z, args.beta, column);
}

template <typename T, int kRows, int kColumns, Ending kEnding = Ending::kColumns>
__global__ void __launch_bounds__(LinearShape<kRows, kColumns>::kThreads) linear(LinearArgs<T> const args)
{
    using S = LinearShape<kRows, kColumns>;
    constexpr int kDepth = kLinearDepth, kParts = kColumns / 8;
    constexpr int kTilesDown = S::kWarpRows / 16, kTilesAcross = S::kWarpColumns / 8;
    ONNXFUSE_SHARED(shared);
    int const thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    int const rank = static_cast<int>(blockIdx.x) % args.split, tile = static_cast<int>(blockIdx.x) / args.split;
    int const row0 = tile / args.tiles_columns * kRows, column0 = tile % args.tiles_columns * kColumns;
    int const warp_row = warp / S::kWarpsAcross * S::kWarpRows, warp_column = warp % S::kWarpsAcross * S::kWarpColumns;

    // This block's steps along k.
    int const all_steps = (args.width + kDepth - 1) / kDepth, each = (all_steps + args.split - 1) / args.split;
    int const first = rank * each, steps = max(0, min(each, all_steps - first));

    auto const fetch_input = [&](int step) {
        unsigned char* const stage = shared + step % args.stages * S::kStageBytes;
        int const k0 = (first + step) * kDepth;
        for (int i = thread; i < kRows * 8; i += S::kThreads)
        {
            int const r = i / 8, c = i % 8;
            bool const there = row0 + r < args.rows && k0 + 8 * c < args.width;
            T const* const from = there ? args.input + int64_t{row0 + r} * args.width + k0 + 8 * c : args.input;
            copy_16(stage + (r * 8 + part_of<8>(r, c)) * 16, from, there);
        }
    };
    auto const fetch_weight = [&](int step) {
        unsigned char* const stage = shared + step % args.stages * S::kStageBytes;
        int const k0 = (first + step) * kDepth;
        for (int i = thread; i < kDepth * kParts; i += S::kThreads)
        {
            int const r = i / kParts, c = i % kParts;
            bool const there = k0 + r < args.width && column0 + 8 * c < args.columns;
            T const* const from = there ? args.weight + int64_t{k0 + r} * args.columns + column0 + 8 * c : args.weight;
            copy_16(stage + kRows * kDepth * 2 + (r * kParts + part_of<kParts>(r, c)) * 16, from, there);
        }
    };
    next_may_start();
    for (int s = 0; s < min(args.stages - 1, steps); ++s)
        fetch_weight(s);
    wait_for_kernel_before();
    for (int s = 0; s < args.stages - 1; ++s)
    {
        if (s < steps)
            fetch_input(s);
        end_of_copies();
    }

    float sums[kTilesDown][kTilesAcross][4] = {};
    for (int step = 0; step < steps; ++step)
    {
        switch (args.stages)
        {
        case 2: wait_for_copies<0>(); break;
        case 3: wait_for_copies<1>(); break;
        default: wait_for_copies<2>(); break;
        }
        __syncthreads();
        if (step + args.stages - 1 < steps)
        {
            fetch_input(step + args.stages - 1);
            fetch_weight(step + args.stages - 1);
        }
        end_of_copies();
        unsigned char const* const a_stage = shared + step % args.stages * S::kStageBytes;
        unsigned char const* const b_stage = a_stage + kRows * kDepth * 2;
#pragma unroll
        for (int k = 0; k < kDepth; k += 16)
        {
            uint32_t a[kTilesDown][4];
#pragma unroll
            for (int i = 0; i < kTilesDown; ++i)
            {
                int const r = warp_row + 16 * i + lane % 16, c = k / 8 + lane / 16;
                load_matrices(a[i], a_stage + (r * 8 + part_of<8>(r, c)) * 16);
            }
#pragma unroll
            for (int j = 0; j < kTilesAcross; j += 2)
            {
                uint32_t b[4];
                int const r = k + lane % 16, c = warp_column / 8 + j + lane / 16;
                load_matrices_transposed(b, b_stage + (r * kParts + part_of<kParts>(r, c)) * 16);
#pragma unroll
                for (int i = 0; i < kTilesDown; ++i)
                {
                    mma(sums[i][j], a[i], b[0], b[1], T{});
                    mma(sums[i][j + 1], a[i], b[2], b[3], T{});
                }
            }
        }
    }
    wait_for_copies<0>();
    __syncthreads(); // all have read the stages: now the sums lie there

    float* const out = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < kTilesDown; ++i)
    {
#pragma unroll
        for (int j = 0; j < kTilesAcross; ++j)
        {
            int const r = warp_row + 16 * i + lane / 4, c = warp_column + 8 * j + lane % 4 * 2;
            *reinterpret_cast<float2*>(out + r * S::kPitch + c) = make_float2(sums[i][j][0], sums[i][j][1]);
            *reinterpret_cast<float2*>(out + (r + 8) * S::kPitch + c) = make_float2(sums[i][j][2], sums[i][j][3]);
        }
    }
    if (args.split > 1)
    {
        cluster_arrive();
        cluster_wait();
    }
    else
    {
        __syncthreads();
    }

    // This block's share of the tile's rows.
    int const share = kRows / args.split, from_row = rank * share;
    // Eight columns of a row, and what the other blocks have of them.
    auto const collect = [&](float (&z)[8], int r, int c) {
#pragma unroll
        for (int e = 0; e < 8; ++e)
            z[e] = 0.0f;
        for (int other = 0; other < args.split; ++other)
        {
            float4 const* const at = reinterpret_cast<float4 const*>(out + r * S::kPitch + c);
            float4 const low = args.split > 1 ? remote_load(at, other) : at[0], high = args.split > 1 ? remote_load(at + 1, other) : at[1];
            z[0] += low.x, z[1] += low.y, z[2] += low.z, z[3] += low.w;
            z[4] += high.x, z[5] += high.y, z[6] += high.z, z[7] += high.w;
        }
    };
    auto const finish = [&](float (&z)[8], int row, int column) {
        add_bias(z, args.bias, column);
        activate<true>(z, args.activation);
        float other[8];
        if (args.scale)
        {
            unpack(load<T, 8>(args.scale + column, 0), other);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                z[e] *= other[e];
        }
        if (args.residual)
        {
            unpack(load<T, 8>(args.residual + int64_t{row} * args.columns + column, 0), other);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                z[e] += other[e];
        }
    };
    auto const write = [&](T* to, float const(&z)[8], int row, int column) {
        Vector<T, 8> rounded;
        pack(z, rounded);
        store(to + int64_t{row} * args.columns + column, 0, rounded);
    };
    if constexpr (kEnding == Ending::kGated)
    {
        for (int i = thread; i < share * kParts / 2; i += S::kThreads)
        {
            int const r = from_row + i / (kParts / 2), c = i % (kParts / 2) * 16, row = row0 + r, column = column0 + c;
            if (row >= args.rows || column >= args.columns)
                continue;
            float gate[8], value[8];
            collect(gate, r, c);
            collect(value, r, c + 8);
            add_bias(gate, args.bias, column);
            add_bias(value, args.bias, column + 8);
            store(args.output + int64_t{row} * (args.columns / 2) + column / 2, 0, gated<T>(gate, value, args.activation));
        }
    }
    else if constexpr (kEnding == Ending::kNorm)
    {
        static_assert(kColumns <= 256, "a warp has a row");
        int const column = lane * 8;
        bool const there = column < args.columns;
        for (int r = from_row + warp; r < from_row + share && row0 + r < args.rows; r += S::kThreads / 32)
        {
            float z[8] = {};
            if (there)
            {
                collect(z, r, column);
                finish(z, row0 + r, column);
                if (args.total)
                    write(args.total, z, row0 + r, column);
            }
            norm_of_row(z, args, column, there);
            if (there)
                write(args.output, z, row0 + r, column);
        }
    }
    else
    {
        for (int i = thread; i < share * kParts; i += S::kThreads)
        {
            int const r = from_row + i / kParts, c = i % kParts * 8, row = row0 + r, column = column0 + c;
            if (row >= args.rows || column >= args.columns)
                continue;
            float z[8];
            collect(z, r, c);
            finish(z, row, column);
            write(args.output, z, row, column);
        }
    }
    if (args.split > 1)
    {
        cluster_arrive();
        cluster_wait(); // nobody ends while its sums are read
    }
}
} // namespace onnxfuse
