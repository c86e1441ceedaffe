// The input product of all steps of a layer: sums[d][t][b][unit][gate] = W[d] x[t][b] + biases, float32, gates in the order of Cell.
#pragma once

#include "fragment.cuh"

namespace onnxfuse
{
template <typename T>
struct ProjectionArgs
{
    T const* x;          // element [t][b][i] at t * x_step + b * x_row + i
    T const* weights;    // [directions, gates * hidden, width]
    T const* bias;       // [directions, 2 * gates * hidden], or null
    float* sums;         // [directions, columns, hidden, 4]
    int64_t x_step, x_row;
    int64_t columns;     // steps * batch
    int batch, hidden, width;
    uint4* clear;        // set to zero: what later kernels find flags in
    int64_t clear_count;
};

constexpr int kProjectionUnits = 16; // of a block
constexpr int kProjectionColumns = 64;

template <typename T>
__device__ __forceinline__ void clear_flags(ProjectionArgs<T> const& args)
{
    int64_t const block = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int64_t const threads = int64_t{gridDim.x} * gridDim.y * gridDim.z * blockDim.x;
    for (int64_t i = block * blockDim.x + threadIdx.x; i < args.clear_count; i += threads)
        args.clear[i] = make_uint4(0, 0, 0, 0);
}

template <typename T>
__device__ __forceinline__ T const* input_column(ProjectionArgs<T> const& args, int64_t column)
{
    return args.x + column / args.batch * args.x_step + column % args.batch * args.x_row;
}

// Half types: 16 units by 64 columns a block of four warps, 64 of k at a time, copied three rounds ahead. kVector: rows of x and of the
// weights start at multiples of 16 bytes.
template <typename T, Cell kCell, bool kVector>
__global__ void __launch_bounds__(128) project(__grid_constant__ ProjectionArgs<T> const args)
{
    constexpr int kRounds = 3;
    constexpr int kRowBytes = 128;
    constexpr int kRows = 4 * kProjectionUnits + kProjectionColumns;
    ONNXFUSE_SHARED(shared);
    int const thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    Lane const lane(thread % 32);
    int const unit0 = static_cast<int>(blockIdx.x) * kProjectionUnits;
    int64_t const column0 = int64_t{blockIdx.y} * kProjectionColumns;
    int const direction = static_cast<int>(blockIdx.z);
    T const* const weights = args.weights + int64_t{direction} * kGates<kCell> * args.hidden * args.width;
    next_may_start();
    clear_flags(args);

    // Rows of the block's tiles: 64 of weights, 16 for every 4 units, and 64 columns of x. A thread copies every sixteenth row's piece.
    int const piece = thread % 8;
    T const* sources[kRows / 16];
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
    {
        int const row = 16 * i + thread / 8;
        sources[i] = nullptr;
        if (row < 4 * kProjectionUnits)
        {
            int const unit = unit0 + row / 16 * 4 + row % 4;
            int const gate = row / 4 % 4;
            if (unit < args.hidden && gate < kGates<kCell>)
                sources[i] = weights + static_cast<int64_t>(onnx_gate<kCell>(gate) * args.hidden + unit) * args.width;
        }
        else if (column0 + row - 4 * kProjectionUnits < args.columns)
            sources[i] = input_column(args, column0 + row - 4 * kProjectionUnits);
    }
    auto fetch = [&](int k0, int round) {
        int const k = k0 + 8 * piece;
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i)
        {
            int const row = 16 * i + thread / 8;
            // Odd rows have their halves exchanged, so that two rows' pieces meet no bank twice.
            unsigned char* const to = shared + (round * kRows + row) * kRowBytes + 16 * (piece ^ (row & 1) * 4);
            if constexpr (kVector)
            {
                bool const there = sources[i] && k < args.width;
                copy_16(to, there ? sources[i] + k : args.weights, there);
            }
            else
            {
                T values[8];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                {
                    narrow(0.0f, values[j]);
                    if (sources[i] && k + j < args.width)
                        values[j] = sources[i][k + j];
                }
                memcpy(to, values, 16);
            }
        }
    };

    int const weights_row = warp % 2 * 32, columns_row = 4 * kProjectionUnits + warp / 2 * 32;
    auto piece_at = [&](int round, int row, int index) {
        return *reinterpret_cast<uint4 const*>(shared + (round * kRows + row) * kRowBytes + 16 * (index ^ (row & 1) * 4));
    };
    float sums[2][4][4] = {};
    int const count = (args.width + 63) / 64;
#pragma unroll
    for (int i = 0; i < kRounds - 1; ++i)
    {
        if (i < count)
            fetch(64 * i, i);
        end_of_copies();
    }
    for (int i = 0; i < count; ++i)
    {
        wait_for_copies<kRounds - 2>();
        __syncthreads();
        if (i + kRounds - 1 < count)
            fetch(64 * (i + kRounds - 1), (i + kRounds - 1) % kRounds);
        end_of_copies();
        int const round = i % kRounds;
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            uint4 low[2], high[2], x[4];
#pragma unroll
            for (int a = 0; a < 2; ++a)
            {
                low[a] = piece_at(round, weights_row + 16 * a + lane.g, 4 * half + lane.q);
                high[a] = piece_at(round, weights_row + 16 * a + 8 + lane.g, 4 * half + lane.q);
            }
#pragma unroll
            for (int b = 0; b < 4; ++b)
                x[b] = piece_at(round, columns_row + 8 * b + lane.g, 4 * half + lane.q);
#pragma unroll
            for (int a = 0; a < 2; ++a)
            {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                {
                    mma_any(sums[a][b], low[a].x, high[a].x, low[a].y, high[a].y, x[b].x, x[b].y, T{});
                    mma_any(sums[a][b], low[a].z, high[a].z, low[a].w, high[a].w, x[b].z, x[b].w, T{});
                }
            }
        }
    }
#pragma unroll
    for (int a = 0; a < 2; ++a)
    {
        int const unit = unit0 + (warp % 2 * 2 + a) * 4 + lane.unit();
        bool const inside = unit < args.hidden;
        float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (inside && args.bias)
        {
            T const* const given = args.bias + direction * 2 * kGates<kCell> * args.hidden;
            bias = make_float4(input_bias<kCell>(given, args.hidden, 0, unit), input_bias<kCell>(given, args.hidden, 1, unit),
                input_bias<kCell>(given, args.hidden, 2, unit), input_bias<kCell>(given, args.hidden, 3, unit));
        }
#pragma unroll
        for (int b = 0; b < 4; ++b)
        {
            float4 v = gather_gates(sums[a][b], lane.low);
            int64_t const column = column0 + warp / 2 * 32 + 8 * b + 2 * lane.q + (lane.low ? 0 : 1);
            if (!inside || column >= args.columns)
                continue;
            v = make_float4(v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w);
            reinterpret_cast<float4*>(args.sums)[(direction * args.columns + column) * args.hidden + unit] = v;
        }
    }
}

// float32: the same block, multiplied without tensor cores, 16 of k at a time.
template <Cell kCell>
__global__ void __launch_bounds__(256) project_float(__grid_constant__ ProjectionArgs<float> const args)
{
    constexpr int kDepth = 16;
    ONNXFUSE_SHARED(shared);
    auto* const w = reinterpret_cast<float(*)[4 * kProjectionUnits + 4]>(shared);                                       // [k][unit][gate]
    auto* const x = reinterpret_cast<float(*)[kProjectionColumns + 4]>(shared + kDepth * sizeof *w); // [k][column]
    int const thread = static_cast<int>(threadIdx.x);
    int const unit0 = static_cast<int>(blockIdx.x) * kProjectionUnits;
    int64_t const column0 = int64_t{blockIdx.y} * kProjectionColumns;
    int const direction = static_cast<int>(blockIdx.z);
    float const* const weights = args.weights + int64_t{direction} * kGates<kCell> * args.hidden * args.width;
    clear_flags(args);

    int const unit = thread % kProjectionUnits, group = thread / kProjectionUnits; // of 4 columns
    float sums[4][4] = {};
    for (int k0 = 0; k0 < args.width; k0 += kDepth)
    {
        __syncthreads();
        for (int i = thread; i < kDepth * 4 * kProjectionUnits; i += 256)
        {
            int const k = i % kDepth, row = i / kDepth, gate = row % 4, of = unit0 + row / 4;
            bool const there = gate < kGates<kCell> && of < args.hidden && k0 + k < args.width;
            w[k][row] = there ? weights[static_cast<int64_t>(onnx_gate<kCell>(gate) * args.hidden + of) * args.width + k0 + k] : 0.0f;
        }
        for (int i = thread; i < kDepth * kProjectionColumns; i += 256)
        {
            int const k = i % kDepth, column = i / kDepth;
            x[k][column] = column0 + column < args.columns && k0 + k < args.width ? input_column(args, column0 + column)[k0 + k] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kDepth; ++k)
        {
            float4 const a = *reinterpret_cast<float4 const*>(&w[k][4 * unit]);
            float4 const b = *reinterpret_cast<float4 const*>(&x[k][4 * group]);
            float const values[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                sums[j][0] += a.x * values[j];
                sums[j][1] += a.y * values[j];
                sums[j][2] += a.z * values[j];
                sums[j][3] += a.w * values[j];
            }
        }
    }
    if (unit0 + unit >= args.hidden)
        return;
    float const* const given = args.bias ? args.bias + direction * 2 * kGates<kCell> * args.hidden : nullptr;
    float bias[4];
#pragma unroll
    for (int gate = 0; gate < 4; ++gate)
        bias[gate] = input_bias<kCell>(given, args.hidden, gate, unit0 + unit);
#pragma unroll
    for (int j = 0; j < 4; ++j)
    {
        int64_t const column = column0 + 4 * group + j;
        if (column < args.columns)
            reinterpret_cast<float4*>(args.sums)[(direction * args.columns + column) * args.hidden + unit0 + unit]
                = make_float4(sums[j][0] + bias[0], sums[j][1] + bias[1], sums[j][2] + bias[2], sums[j][3] + bias[3]);
    }
}
} // namespace onnxfuse
