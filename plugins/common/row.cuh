// A row in the registers of the threads that share it, and sums over it.
#pragma once

#include "vector.cuh"

namespace onnxfuse
{
// Blocks of kMaxThreads that have to fit the registers of a multiprocessor: two, so that one loads while the other reduces. More values
// a thread than that allows are for the widest rows alone.
template <int kPerThread>
constexpr int kLeastBlocks = kPerThread <= 6 ? 2 : 1;

// A thread holds vectors threadIdx.x, threadIdx.x + stride, ... of its row; beyond the row's end it holds zeros.
//
// The stride is the number of threads that share the row. With very many vectors a thread that number is fixed (see geometry.h), so
// that the compiler needs no register for each address.
template <int kPerThread>
__device__ __forceinline__ int column_of(int i)
{
    int const stride = kPerThread == kMaxValuesPerThread ? kMaxThreads : static_cast<int>(blockDim.x);
    return static_cast<int>(threadIdx.x) + i * stride;
}

// x = a + b + weights, of the row that starts at vector `first`. All rows share the weights; null: none.
template <typename T, int kPerThread, int kVector>
__device__ __forceinline__ void add_rows(
    T const* a, T const* b, T const* weights, int64_t first, int vectors, float (&x)[kPerThread][kVector])
{
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        int const column = column_of<kPerThread>(i);
        bool const inside = column < vectors;
        Vector<T, kVector> parts[3] = {};
        if (inside)
        {
            parts[0] = load<T, kVector>(a, first + column);
            parts[1] = load<T, kVector>(b, first + column);
        }
        if (inside && weights)
            parts[2] = load<T, kVector>(weights, column);
        unpack(parts[0], x[i]);
#pragma unroll
        for (int part = 1; part < 3; ++part)
        {
            float other[kVector];
            unpack(parts[part], other);
#pragma unroll
            for (int j = 0; j < kVector; ++j)
                x[i][j] += other[j];
        }
        // The compiler gathers loads up to here, and without an end it gathers more than the registers hold.
        constexpr int kAtOnce = kVector == 1 ? 8 : 4;
        if (i % kAtOnce == kAtOnce - 1 && i + 1 < kPerThread)
            __syncwarp();
    }
}

// x = the row that starts at vector `first`.
template <typename T, int kPerThread, int kVector>
__device__ __forceinline__ void load_row(T const* from, int64_t first, int vectors, float (&x)[kPerThread][kVector])
{
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        int const column = column_of<kPerThread>(i);
        Vector<T, kVector> part{};
        if (column < vectors)
            part = load<T, kVector>(from, first + column);
        unpack(part, x[i]);
    }
}

template <typename T, int kPerThread, int kVector>
__device__ __forceinline__ void store_row(T* to, int64_t first, int vectors, float const (&x)[kPerThread][kVector])
{
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        int const column = column_of<kPerThread>(i);
        if (column < vectors)
        {
            Vector<T, kVector> rounded;
            pack(x[i], rounded);
            store(to, first + column, rounded);
        }
    }
}

// What a row is normalised by: (x - offset) * scale.
struct Normalizer
{
    float offset;
    float scale;
};

// Sums N values over the threads of a row: all threads get the sums. The order is fixed, so the result is the same in every run.
// `shared` is this call's own: N * kMaxThreads / 32 floats.
template <int N>
__device__ __forceinline__ void sum_over_row(float (&values)[N], float (*shared)[kMaxThreads / 32])
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
            values[n] += __shfl_xor_sync(0xffffffffu, values[n], offset);
    }
    int const warps = static_cast<int>(blockDim.x) / 32;
    if (warps == 1)
        return;
    int const lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0)
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
            shared[n][threadIdx.x / 32] = values[n];
    }
    __syncthreads();
    // Both half-warps add up the same values, so that no thread has to be told the result.
    int const source = lane % (kMaxThreads / 32);
#pragma unroll
    for (int n = 0; n < N; ++n)
        values[n] = source < warps ? shared[n][source] : 0.0f;
#pragma unroll
    for (int offset = kMaxThreads / 64; offset > 0; offset /= 2)
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
            values[n] += __shfl_xor_sync(0xffffffffu, values[n], offset);
    }
}
} // namespace onnxfuse
