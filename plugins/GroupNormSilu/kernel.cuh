// GroupNorm + scale and shift (+ SiLU). Blocks read their part once and keep it in registers; each finds the mean and the squared
// distances from it of what it holds (two passes), and the parts are merged: M2 = sum M2_i + n_i (mean_i - mean)^2 (Chan, Golub, LeVeque
// 1979). The blocks that share groups are a cluster and merge through its shared memory; without clusters, or for more than a cluster
// holds, one kernel writes the parts to the workspace and another reads the input again.
//
// Channels first: a group is one piece of memory. Channels last: a block has a slab of channels, whole groups of whole 16-byte vectors,
// for some of the pixels.
#pragma once

#include "../common/activation.cuh"
#include "../common/tensor.cuh"
#include "launch.h"

namespace onnxfuse
{
constexpr int kNormThreads = 512;

// What a kernel does of the work.
enum class Part
{
    kAll,        // in a cluster
    kStatistics, // to the workspace
    kOutput      // with the statistics of the workspace
};

template <typename T>
struct GroupNormArgs
{
    T const* input;
    T const* gamma;
    T const* beta;
    T const* film_scale;
    T const* film_shift;
    T* output;
    float2* parts; // [images * groups][split]: mean and M2
    int images, channels, groups, pixels;
    int slab;      // channels of a block; channels first: a group's
    int split;
    int per_block; // vectors (channels first) or pixels (channels last) of a block
    float epsilon;
    bool silu;
};

// What a vector becomes at last.
template <typename T, int N>
__device__ __forceinline__ void end_of_norm(GroupNormArgs<T> const& args, float (&x)[N])
{
    if (args.silu)
        activate_each<Activation::kSilu, sizeof(T) == 2>(x);
}

// Sums values over a block: all threads get the sums, in a fixed order. `shared`: N * 32 floats, this call's own.
template <int N>
__device__ __forceinline__ void sum_over_block(float (&values)[N], float* shared)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
            values[n] += __shfl_xor_sync(0xffffffffu, values[n], offset);
    }
    int const lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
    if (lane == 0)
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
            shared[n * 32 + static_cast<int>(threadIdx.x) / 32] = values[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n)
        values[n] = lane < warps ? shared[n * 32 + lane] : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
            values[n] += __shfl_xor_sync(0xffffffffu, values[n], offset);
    }
}

// The merged mean and 1 / sqrt(variance + epsilon) of `split` parts; part r is of counts(r) elements.
template <typename Counts>
__device__ __forceinline__ float2 merge(float2 const* parts, int split, Counts counts, float epsilon)
{
    float total = 0.0f, mean = 0.0f, squares = 0.0f;
    for (int r = 0; r < split; ++r)
        total += counts(r);
    for (int r = 0; r < split; ++r)
        mean += parts[r].x * (counts(r) / total);
    for (int r = 0; r < split; ++r)
    {
        float const away = parts[r].x - mean;
        squares += parts[r].y + away * away * counts(r);
    }
    return make_float2(mean, 1.0f / sqrtf(squares / total + epsilon));
}

// y = x * a + b of channel c, the statistics, gamma, beta and film in one.
template <typename T>
__device__ __forceinline__ float2 line_of(GroupNormArgs<T> const& args, float2 statistics, int image, int c)
{
    float scale = args.gamma ? widen(args.gamma[c]) : 1.0f, shift = args.beta ? widen(args.beta[c]) : 0.0f;
    if (args.film_scale)
    {
        float const film = widen(args.film_scale[image * args.channels + c]);
        scale *= film;
        shift *= film;
    }
    if (args.film_shift)
        shift += widen(args.film_shift[image * args.channels + c]);
    float const a = statistics.y * scale;
    return make_float2(a, fmaf(-statistics.x, a, shift));
}

template <typename T>
__device__ __forceinline__ void share_parts(GroupNormArgs<T> const& args, Part part, float2* mine, int64_t group, int rank, float2 value, bool sender)
{
    int const lane = static_cast<int>(threadIdx.x) % 32;
    if (part == Part::kStatistics)
    {
        if (sender && lane == 0)
            args.parts[group * args.split + rank] = value;
    }
    else if (args.split > 1)
    {
        if (sender && lane < args.split)
            remote_store(mine + rank, lane, value);
    }
    else if (sender && lane == 0)
    {
        mine[0] = value;
    }
}

template <typename T>
__device__ __forceinline__ void meet(GroupNormArgs<T> const& args)
{
    if (args.split > 1)
    {
        cluster_arrive();
        cluster_wait();
    }
    else
    {
        __syncthreads();
    }
}

// Channels first. kVector divides the pixels, so a vector is of one channel.
template <typename T, int kVector, int kPerThread, Part kPart>
__global__ void __launch_bounds__(kNormThreads, 1) group_norm_planar(GroupNormArgs<T> const args)
{
    ONNXFUSE_SHARED(shared);
    float* const scratch = reinterpret_cast<float*>(shared);          // 2 * 32
    float2* const parts = reinterpret_cast<float2*>(shared + 256);     // split
    float2* const lines = parts + args.split;                          // a group's channels
    int const thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    int const rank = static_cast<int>(blockIdx.x) % args.split;
    int64_t const group = static_cast<int>(blockIdx.x) / args.split;
    int const image = static_cast<int>(group / args.groups), first_channel = static_cast<int>(group % args.groups) * args.slab;
    int const size = args.slab * args.pixels / kVector; // vectors of the group
    int const first = rank * args.per_block, count = max(0, min(args.per_block, size - first));
    int64_t const base = group * size + first;
    if (kPart == Part::kAll && args.split > 1)
        cluster_arrive();
    next_may_start();
    wait_for_kernel_before();

    Vector<T, kVector> held[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        int const at = thread + i * threads;
        if (at < count)
            held[i] = load<T, kVector>(args.input, base + at);
    }
    if constexpr (kPart != Part::kOutput)
    {
        float sum[1] = {};
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
        {
            if (thread + i * threads < count)
            {
                float x[kVector];
                unpack(held[i], x);
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    sum[0] += x[j];
            }
        }
        sum_over_block(sum, scratch);
        float const mean = count > 0 ? sum[0] / (static_cast<float>(count) * kVector) : 0.0f;
        float squares[1] = {};
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
        {
            if (thread + i * threads < count)
            {
                float x[kVector];
                unpack(held[i], x);
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    squares[0] = fmaf(x[j] - mean, x[j] - mean, squares[0]);
            }
        }
        sum_over_block(squares, scratch + 32);
        if (kPart == Part::kAll && args.split > 1)
            cluster_wait(); // all blocks have begun
        share_parts(args, kPart, parts, group, rank, make_float2(mean, squares[0]), thread < 32);
        if constexpr (kPart == Part::kStatistics)
            return;
        meet(args);
    }
    else
    {
        for (int r = thread; r < args.split; r += threads)
            parts[r] = args.parts[group * args.split + r];
        __syncthreads();
    }
    auto const counts = [&](int r) { return static_cast<float>(max(0, min(args.per_block, size - r * args.per_block))) * kVector; };
    float2 const statistics = merge(parts, args.split, counts, args.epsilon);
    for (int c = thread; c < args.slab; c += threads)
        lines[c] = line_of(args, statistics, image, first_channel + c);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        int const at = thread + i * threads;
        if (at < count)
        {
            float2 const line = lines[static_cast<unsigned>((first + at) * kVector) / static_cast<unsigned>(args.pixels)];
            float x[kVector];
            unpack(held[i], x);
#pragma unroll
            for (int j = 0; j < kVector; ++j)
                x[j] = fmaf(x[j], line.x, line.y);
            end_of_norm(args, x);
            pack(x, held[i]);
            store(args.output, base + at, held[i]);
        }
    }
}

// Adds up what the threads of a block hold of each group: totals[group]. A thread has the values of the vector `column` of a slab; row < 0:
// none. `sums`: [rows][slab].
template <int kVector>
__device__ __forceinline__ void sum_over_groups(float const (&values)[kVector], int row, int column, int rows, int slab, int each, float* sums, float* totals)
{
    __syncthreads(); // `sums` is free
    if (row >= 0)
    {
#pragma unroll
        for (int j = 0; j < kVector; j += 4)
            *reinterpret_cast<float4*>(sums + row * slab + column * kVector + j) = make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
    }
    __syncthreads();
    int const lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
    for (int g = static_cast<int>(threadIdx.x) / 32; g < slab / each; g += warps)
    {
        float total = 0.0f;
        for (int i = lane; i < rows * each; i += 32)
            total += sums[i / each * slab + g * each + i % each];
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            total += __shfl_xor_sync(0xffffffffu, total, offset);
        if (lane == 0)
            totals[g] = total;
    }
    __syncthreads();
}

// Channels last. The slab's groups are whole, and it is whole vectors; a thread keeps one column of vectors.
template <typename T, int kPerThread, Part kPart>
__global__ void __launch_bounds__(kNormThreads, 1) group_norm_last(GroupNormArgs<T> const args)
{
    constexpr int kVector = 16 / sizeof(T);
    ONNXFUSE_SHARED(shared);
    int const each = args.channels / args.groups, groups = args.slab / each, columns = args.slab / kVector;
    int const thread = static_cast<int>(threadIdx.x), rows = static_cast<int>(blockDim.x) / columns;
    float2* const parts = reinterpret_cast<float2*>(shared);                       // [groups][split]
    float2* const lines = parts + groups * args.split;                             // [slab]
    float* const sums = reinterpret_cast<float*>(shared + (8 * (groups * args.split + args.slab) + 15) / 16 * 16); // [rows][slab]
    float* const totals = sums + rows * args.slab;                                 // [2][groups]
    int const rank = static_cast<int>(blockIdx.x) % args.split, rest = static_cast<int>(blockIdx.x) / args.split;
    int const slabs = args.channels / args.slab, image = rest / slabs, first_channel = rest % slabs * args.slab;
    int const first = rank * args.per_block, count = max(0, min(args.per_block, args.pixels - first));
    int const column = thread % columns, row = thread / columns;
    bool const works = row < rows;
    int64_t const base = (int64_t{image} * args.pixels + first) * args.channels + first_channel;
    if (kPart == Part::kAll && args.split > 1)
        cluster_arrive();
    next_may_start();
    wait_for_kernel_before();

    Vector<T, kVector> held[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        int const pixel = row + i * rows;
        if (works && pixel < count)
            held[i] = load<T, kVector>(args.input + base + int64_t{pixel} * args.channels, column);
    }
    if constexpr (kPart != Part::kOutput)
    {
        float sum[kVector] = {};
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
        {
            if (works && row + i * rows < count)
            {
                float x[kVector];
                unpack(held[i], x);
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    sum[j] += x[j];
            }
        }
        float const elements = static_cast<float>(max(count, 1)) * static_cast<float>(each);
        sum_over_groups(sum, works ? row : -1, column, rows, args.slab, each, sums, totals);
        float mean[kVector], squares[kVector] = {};
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            mean[j] = totals[(column * kVector + j) / each] / elements;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
        {
            if (works && row + i * rows < count)
            {
                float x[kVector];
                unpack(held[i], x);
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    squares[j] = fmaf(x[j] - mean[j], x[j] - mean[j], squares[j]);
            }
        }
        if (kPart == Part::kAll && args.split > 1)
            cluster_wait(); // all blocks have begun
        sum_over_groups(squares, works ? row : -1, column, rows, args.slab, each, sums, totals + groups);
        for (int g = thread / 32; g < groups; g += static_cast<int>(blockDim.x) / 32)
        {
            int64_t const group = int64_t{image} * args.groups + first_channel / each + g;
            share_parts(args, kPart, parts + g * args.split, group, rank, make_float2(totals[g] / elements, totals[groups + g]), true);
        }
        if constexpr (kPart == Part::kStatistics)
            return;
        meet(args);
    }
    else
    {
        int64_t const group = int64_t{image} * args.groups + first_channel / each;
        for (int r = thread; r < groups * args.split; r += static_cast<int>(blockDim.x))
            parts[r] = args.parts[group * args.split + r];
        __syncthreads();
    }
    auto const counts = [&](int r) {
        return static_cast<float>(max(0, min(args.per_block, args.pixels - r * args.per_block))) * static_cast<float>(each);
    };
    for (int c = thread; c < args.slab; c += static_cast<int>(blockDim.x))
        lines[c] = line_of(args, merge(parts + c / each * args.split, args.split, counts, args.epsilon), image, first_channel + c);
    __syncthreads();
    if (!works)
        return;
    float a[kVector], b[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j)
    {
        float2 const line = lines[column * kVector + j];
        a[j] = line.x;
        b[j] = line.y;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        int const pixel = row + i * rows;
        if (pixel < count)
        {
            float x[kVector];
            unpack(held[i], x);
#pragma unroll
            for (int j = 0; j < kVector; ++j)
                x[j] = fmaf(x[j], a[j], b[j]);
            end_of_norm(args, x);
            pack(x, held[i]);
            store(args.output + base + int64_t{pixel} * args.channels, column, held[i]);
        }
    }
}
} // namespace onnxfuse
