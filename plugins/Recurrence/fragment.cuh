// Weights in registers as tensor core operands.
//
// A tile has 16 rows: the gates of 4 units, row = 4 * gate + unit. It is operand A of mma.m16n8k16; operand B holds up to eight vectors,
// batch rows, as columns. The sum over k may run in any order, so that k is dealt out in pieces of 8 consecutive elements: lane
// (g, q) = (lane / 4, lane % 4) takes elements 32 i + 8 q to 32 i + 8 q + 7 of row g and row g + 8, and of column g. Both operands are
// then read from row-major memory 16 bytes at a time, and nothing is packed.
//
// In the product lane (g, q) has rows g and g + 8 of columns 2q and 2q + 1: gates g / 4 and 2 + g / 4 of unit g % 4.
#pragma once

#include "cell.cuh"

namespace onnxfuse
{
struct Lane
{
    int g;
    int q;
    bool low; // gates 0 and 2; else 1 and 3

    __device__ __forceinline__ explicit Lane(int lane)
        : g(lane >> 2)
        , q(lane & 3)
        , low(lane < 16)
    {
    }
    __device__ __forceinline__ int unit() const
    {
        return g & 3;
    }
    __device__ __forceinline__ int first_gate() const
    {
        return g >> 2;
    }
};

// The eight registers for 32 k.
using Slice = uint32_t[8];

// The tile of units unit0 to unit0 + 3. weights: [gates * hidden, width] in ONNX's order, width a multiple of 8. Slice i begins at
// k_of(i), and k ends at end_of(i) or the width; zeros beyond.
template <Cell kCell, int kSlices, typename T, typename Begin, typename End>
__device__ __forceinline__ void load_slices(
    Slice (&to)[kSlices], T const* weights, int hidden, int width, int unit0, Lane const& lane, Begin begin, End end)
{
    int const unit = unit0 + lane.unit();
    int const gate = lane.first_gate();
    bool const inside = unit < hidden;
    bool const second = inside && gate + 2 < kGates<kCell>;
    T const* const low = weights + static_cast<int64_t>(onnx_gate<kCell>(gate) * hidden + unit) * width;
    T const* const high = weights + static_cast<int64_t>(onnx_gate<kCell>(gate + 2) * hidden + unit) * width;
#pragma unroll
    for (int i = 0; i < kSlices; ++i)
    {
        int const k = begin(i) + 8 * lane.q;
        bool const there = k < min(end(i), width);
        uint4 const zero = make_uint4(0, 0, 0, 0);
        uint4 const a = inside && there ? *reinterpret_cast<uint4 const*>(low + k) : zero;
        uint4 const b = second && there ? *reinterpret_cast<uint4 const*>(high + k) : zero;
        to[i][0] = a.x;
        to[i][1] = b.x;
        to[i][2] = a.y;
        to[i][3] = b.y;
        to[i][4] = a.z;
        to[i][5] = b.z;
        to[i][6] = a.w;
        to[i][7] = b.w;
    }
}

// From k0 on.
template <Cell kCell, int kSlices, typename T>
__device__ __forceinline__ void load_tile_part(
    Slice (&to)[kSlices], T const* weights, int hidden, int width, int unit0, int k0, Lane const& lane)
{
    load_slices<kCell>(to, weights, hidden, width, unit0, lane, [&](int i) { return k0 + 32 * i; }, [&](int) { return width; });
}

template <Cell kCell, int kSlices, typename T>
__device__ __forceinline__ void load_tile(Slice (&to)[kSlices], T const* weights, int hidden, int width, int unit0, Lane const& lane)
{
    load_tile_part<kCell>(to, weights, hidden, width, unit0, 0, lane);
}

// Slice i has the `units` of k, a multiple of 8, that block i of a cluster sends.
template <Cell kCell, int kSlices, typename T>
__device__ __forceinline__ void load_tile_of_blocks(
    Slice (&to)[kSlices], T const* weights, int hidden, int width, int unit0, int units, Lane const& lane)
{
    load_slices<kCell>(
        to, weights, hidden, width, unit0, lane, [&](int i) { return i * units; }, [&](int i) { return (i + 1) * units; });
}

// sums[tile] = weights[tile] times the columns in shared memory. `column` is this lane's column (g) at its first piece (8 q), and the next
// slice's lies kSliceBytes further on.
template <typename T, int kSliceBytes, int kTiles, int kSlices>
__device__ __forceinline__ void multiply(float (&sums)[kTiles][4], Slice const (&weights)[kTiles][kSlices], unsigned char const* column)
{
    // An mma waits for the one before it in its sum, so that several sums run side by side. With two tiles there are four warps to a
    // scheduler, which is enough.
    constexpr int kChains = kTiles >= 2 ? 1 : kSlices <= 2 ? 2 : 4;
    float parts[kTiles][kChains][4] = {};
#pragma unroll
    for (int i = 0; i < kSlices; ++i)
    {
        uint4 const b = *reinterpret_cast<uint4 const*>(column + kSliceBytes * i);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
        {
            Slice const& a = weights[m][i];
            mma_any(parts[m][2 * i % kChains], a[0], a[1], a[2], a[3], b.x, b.y, T{});
            mma_any(parts[m][(2 * i + 1) % kChains], a[4], a[5], a[6], a[7], b.z, b.w, T{});
        }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
    {
#pragma unroll
        for (int j = 0; j < 4; ++j)
        {
            if constexpr (kChains == 4)
                sums[m][j] = (parts[m][0][j] + parts[m][1][j]) + (parts[m][2][j] + parts[m][3][j]);
            else if constexpr (kChains == 2)
                sums[m][j] = parts[m][0][j] + parts[m][1][j];
            else
                sums[m][j] = parts[m][0][j];
        }
    }
}

constexpr unsigned kWarp = 0xffffffffu;

// All four gates of one unit and column: low lanes keep column 2q and get its gates 1 and 3 from the lane 16 above, which keeps
// column 2q + 1.
__device__ __forceinline__ float4 gather_gates(float const (&sum)[4], bool low)
{
    float const first = __shfl_xor_sync(kWarp, low ? sum[1] : sum[0], 16);
    float const second = __shfl_xor_sync(kWarp, low ? sum[3] : sum[2], 16);
    return low ? make_float4(sum[0], first, sum[2], second) : make_float4(first, sum[1], second, sum[3]);
}

// Bytes between the columns of a matrix in shared memory: the reads of eight lanes (two columns, four pieces) then meet no bank twice.
__host__ __device__ constexpr int column_stride(int slices)
{
    return 64 * slices + (slices % 2 == 0 ? 64 : 0);
}
} // namespace onnxfuse
