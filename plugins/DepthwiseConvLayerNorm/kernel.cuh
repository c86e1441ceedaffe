// Depthwise convolution + bias + LayerNorm over channels, output channels-last.
//
// A block makes a tile of pixels for all channels, or for a part of them in a cluster that shares the channels out. A thread makes a strip
// of outputs along x for two channels, so that a weight is read once for the strip. The sums go to shared memory in float32; then a warp
// takes a pixel: mean and squared distances from it in two passes, merged over the cluster (each block's mean and distances are
// enough: M2 = sum M2_i + n_i (mean_i - mean)^2, Chan, Golub, LeVeque 1979), so one exchange does.
#pragma once

#include "../common/tensor.cuh"
#include "launch.h"

namespace onnxfuse
{
constexpr int kDepthwiseThreads = 512;

template <typename T>
struct DepthwiseArgs
{
    T const* input;
    T const* weight;
    T const* bias;
    T const* gamma;
    T const* beta;
    T* output;
    int images, height, width, channels;
    int tiles_x, tiles_y; // tiles of an image
    int rows, strips, split;
    int planar;
    int pixel_stride; // of the tile in shared memory, in elements
    float epsilon;
};

// Two channels as they lie in memory.
template <typename T>
struct Pair;
template <>
struct Pair<float>
{
    using type = uint2;
};
template <>
struct Pair<__half>
{
    using type = uint32_t;
};
template <>
struct Pair<__nv_bfloat16>
{
    using type = uint32_t;
};

__device__ __forceinline__ float2 widen_pair(uint2 p, float)
{
    return make_float2(__uint_as_float(p.x), __uint_as_float(p.y));
}
__device__ __forceinline__ float2 widen_pair(uint32_t p, __half)
{
    return __half22float2(bits_as<__half2>(p));
}
__device__ __forceinline__ float2 widen_pair(uint32_t p, __nv_bfloat16)
{
    return make_float2(__uint_as_float(p << 16), __uint_as_float(p & 0xffff0000u));
}

// Four channels.
__device__ __forceinline__ float4 load_4(float const* p)
{
    return *reinterpret_cast<float4 const*>(p);
}
template <typename T>
__device__ __forceinline__ float4 load_4(T const* p)
{
    uint2 const raw = *reinterpret_cast<uint2 const*>(p);
    float2 const a = widen_pair(raw.x, T{}), b = widen_pair(raw.y, T{});
    return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ void store_4(float* p, float4 v)
{
    *reinterpret_cast<float4*>(p) = v;
}
__device__ __forceinline__ void store_4(__half* p, float4 v)
{
    __half2 const a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
    *reinterpret_cast<uint2*>(p) = make_uint2(bits_as<uint32_t>(a), bits_as<uint32_t>(b));
}
__device__ __forceinline__ void store_4(__nv_bfloat16* p, float4 v)
{
    __nv_bfloat162 const a = __floats2bfloat162_rn(v.x, v.y), b = __floats2bfloat162_rn(v.z, v.w);
    *reinterpret_cast<uint2*>(p) = make_uint2(bits_as<uint32_t>(a), bits_as<uint32_t>(b));
}

// Where a tile's parts lie in dynamic shared memory. Plain host code too.
struct DepthwiseLayout
{
    int input, weight, result, stats, bytes;

    __host__ __device__ DepthwiseLayout(int element, int kernel, int rows, int columns, int channels, int pixel_stride, int split)
    {
        auto const round = [](int n) { return (n + 127) / 128 * 128; };
        input = 0;
        weight = round((rows + kernel - 1) * (columns + kernel - 1) * pixel_stride * element);
        result = weight + round(kernel * kernel * channels * element);
        stats = result + round(rows * columns * channels * 4);
        bytes = stats + split * rows * columns * 8;
    }
};

// The threads of a pixel in normalise_tile: as many as have four channels, a power of two from 8 to 32.
__device__ __forceinline__ int lanes_of(int channels)
{
    return channels <= 32 ? 8 : channels <= 64 ? 16 : 32;
}

template <int N>
__device__ __forceinline__ void sum_over_lanes(float (&values)[N], int lanes)
{
    for (int offset = lanes / 2; offset > 0; offset /= 2)
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
            values[n] += __shfl_xor_sync(0xffffffffu, values[n], offset);
    }
}

// LayerNorm of the tile's sums in shared memory, `result` [pixels][pitch] with this block's channels, and the output.
template <typename T>
__device__ __forceinline__ void normalise_tile(
    DepthwiseArgs<T> const& args, float const* result, int pitch, float2* stats, int columns, int rank, int image, int y0, int x0)
{
    constexpr int kAtOnce = 4; // pixels of a thread whose loads and shuffles are under way together
    int const channels = args.channels / args.split, pixels = args.rows * columns;
    int const lanes = lanes_of(channels), lane = static_cast<int>(threadIdx.x) % lanes;
    int const apart = static_cast<int>(blockDim.x) / lanes, own = static_cast<int>(threadIdx.x) / lanes;
    // All threads of a warp go round equally often: those beyond the last pixel do it again.
    int const rounds = (pixels + apart * kAtOnce - 1) / (apart * kAtOnce);
    if (args.split > 1)
        cluster_wait(); // all blocks have begun, so their shared memory is there
    for (int round = 0; round < rounds; ++round)
    {
        int const first = own + round * kAtOnce * apart;
        float const* from[kAtOnce];
        float mean[kAtOnce] = {}, squares[kAtOnce] = {};
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            from[j] = result + min(first + j * apart, pixels - 1) * pitch;
        for (int c = 4 * lane; c < channels; c += 4 * lanes)
        {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j)
            {
                float4 const v = *reinterpret_cast<float4 const*>(from[j] + c);
                mean[j] += (v.x + v.y) + (v.z + v.w);
            }
        }
        sum_over_lanes(mean, lanes);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            mean[j] /= static_cast<float>(channels);
        for (int c = 4 * lane; c < channels; c += 4 * lanes)
        {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j)
            {
                float4 const v = *reinterpret_cast<float4 const*>(from[j] + c);
                float const a = v.x - mean[j], b = v.y - mean[j], d = v.z - mean[j], e = v.w - mean[j];
                squares[j] += (a * a + b * b) + (d * d + e * e);
            }
        }
        sum_over_lanes(squares, lanes);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
        {
            int const p = first + j * apart;
            if (p < pixels && lane < args.split)
            {
                float2* const to = stats + rank * pixels + p;
                if (args.split > 1)
                    remote_store(to, lane, make_float2(mean[j], squares[j]));
                else
                    *to = make_float2(mean[j], squares[j]);
            }
        }
    }
    if (args.split > 1)
    {
        cluster_arrive();
        cluster_wait();
    }
    else
    {
        __syncwarp();
    }
    for (int round = 0; round < rounds; ++round)
    {
        int const first = own + round * kAtOnce * apart;
        float const* from[kAtOnce];
        float mean[kAtOnce], scale[kAtOnce];
        T* to[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
        {
            int const p = min(first + j * apart, pixels - 1);
            from[j] = result + p * pitch;
            float sum = 0.0f, squares = 0.0f;
            for (int r = 0; r < args.split; ++r)
                sum += stats[r * pixels + p].x;
            mean[j] = sum / static_cast<float>(args.split);
            for (int r = 0; r < args.split; ++r)
            {
                float2 const part = stats[r * pixels + p];
                float const away = part.x - mean[j];
                squares += part.y + away * away * static_cast<float>(channels);
            }
            scale[j] = 1.0f / sqrtf(squares / static_cast<float>(args.channels) + args.epsilon);
            int const y = y0 + p / columns, x = x0 + p % columns;
            bool const inside = first + j * apart < pixels && y < args.height && x < args.width;
            to[j] = inside ? args.output + ((int64_t{image} * args.height + y) * args.width + x) * args.channels + rank * channels : nullptr;
        }
        for (int c = 4 * lane; c < channels; c += 4 * lanes)
        {
            float4 const g = args.gamma ? load_4(args.gamma + rank * channels + c) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            float4 const b = args.beta ? load_4(args.beta + rank * channels + c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j)
            {
                float4 v = *reinterpret_cast<float4 const*>(from[j] + c);
                v.x = fmaf((v.x - mean[j]) * scale[j], g.x, b.x);
                v.y = fmaf((v.y - mean[j]) * scale[j], g.y, b.y);
                v.z = fmaf((v.z - mean[j]) * scale[j], g.z, b.z);
                v.w = fmaf((v.w - mean[j]) * scale[j], g.w, b.w);
                if (to[j])
                    store_4(to[j] + c, v);
            }
        }
    }
}

// Where a block's tile lies.
struct DepthwisePlace
{
    int rank, image, y0, x0;
};
template <typename T>
__device__ __forceinline__ DepthwisePlace place_of(DepthwiseArgs<T> const& args, int columns)
{
    int const block = static_cast<int>(blockIdx.x), tile = block / args.split;
    int const row = tile / args.tiles_x, image = row / args.tiles_y;
    return {block % args.split, image, (row % args.tiles_y) * args.rows, (tile % args.tiles_x) * columns};
}

template <typename T, int kKernel, int kStrip>
__global__ void __launch_bounds__(kDepthwiseThreads, 1) depthwise_layernorm(DepthwiseArgs<T> const args)
{
    ONNXFUSE_SHARED(shared);
    using P = typename Pair<T>::type;
    constexpr int kRadius = kKernel / 2, kSpan = kStrip + kKernel - 1, kChunk = 16 / sizeof(T);
    int const columns = args.strips * kStrip, channels = args.channels / args.split, pairs = channels / 2;
    DepthwiseLayout const layout(sizeof(T), kKernel, args.rows, columns, channels, args.pixel_stride, args.split);
    T* const tile = reinterpret_cast<T*>(shared + layout.input);
    T* const weight = reinterpret_cast<T*>(shared + layout.weight);
    float* const result = reinterpret_cast<float*>(shared + layout.result);
    float2* const stats = reinterpret_cast<float2*>(shared + layout.stats);
    int const threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    auto const [rank, image, y0, x0] = place_of(args, columns);
    if (args.split > 1)
        cluster_arrive();

    int const first_channel = rank * channels, chunks = channels / kChunk;
    for (int i = thread; i < kKernel * kKernel * channels; i += threads)
    {
        int const tap = i / channels, c = i % channels;
        weight[i] = args.weight[(first_channel + c) * (kKernel * kKernel) + tap];
    }
    wait_for_kernel_before();
    next_may_start();
    int const tile_columns = columns + kKernel - 1, tile_rows = args.rows + kKernel - 1;
    if (!args.planar)
    {
        T const* const from = args.input + int64_t{image} * args.height * args.width * args.channels + first_channel;
        for (int i = thread; i < tile_rows * tile_columns * chunks; i += threads)
        {
            int const pixel = i / chunks, c = i % chunks * kChunk;
            int const y = y0 - kRadius + pixel / tile_columns, x = x0 - kRadius + pixel % tile_columns;
            bool const there = y >= 0 && y < args.height && x >= 0 && x < args.width;
            copy_16(tile + pixel * args.pixel_stride + c, there ? from + (int64_t{y} * args.width + x) * args.channels + c : args.input, there);
        }
    }
    if (args.planar)
    {
        T const* const from = args.input + (int64_t{image} * args.channels + first_channel) * args.height * args.width;
        int const pixels = tile_rows * tile_columns;
        for (int i = thread; i < pixels * channels; i += threads)
        {
            int const c = i / pixels, pixel = i % pixels;
            int const y = y0 - kRadius + pixel / tile_columns, x = x0 - kRadius + pixel % tile_columns;
            bool const there = y >= 0 && y < args.height && x >= 0 && x < args.width;
            T value{};
            if (there)
                value = from[(int64_t{c} * args.height + y) * args.width + x];
            tile[pixel * args.pixel_stride + c] = value;
        }
    }
    end_of_copies();
    wait_for_copies<0>();
    __syncthreads();

    for (int unit = thread; unit < pairs * args.rows * args.strips; unit += threads)
    {
        int const pair = unit % pairs, strip = unit / pairs;
        int const row = strip / args.strips, column = strip % args.strips * kStrip;
        float2 bias = make_float2(0.0f, 0.0f);
        if (args.bias)
            bias = widen_pair(reinterpret_cast<P const*>(args.bias + first_channel)[pair], T{});
        float2 sum[kStrip];
#pragma unroll
        for (int i = 0; i < kStrip; ++i)
            sum[i] = bias;
#pragma unroll 1
        for (int ky = 0; ky < kKernel; ++ky)
        {
            float2 x[kSpan];
            T const* const from = tile + ((row + ky) * tile_columns + column) * args.pixel_stride + 2 * pair;
#pragma unroll
            for (int i = 0; i < kSpan; ++i)
            {
                if (args.planar) // the pixel stride is odd in words there, and a pair of float32 not at a multiple of 8 bytes
                    x[i] = make_float2(widen(from[i * args.pixel_stride]), widen(from[i * args.pixel_stride + 1]));
                else
                    x[i] = widen_pair(*reinterpret_cast<P const*>(from + i * args.pixel_stride), T{});
            }
#pragma unroll
            for (int kx = 0; kx < kKernel; ++kx)
            {
                float2 const w = widen_pair(reinterpret_cast<P const*>(weight + (ky * kKernel + kx) * channels)[pair], T{});
#pragma unroll
                for (int i = 0; i < kStrip; ++i)
                {
                    sum[i].x = fmaf(x[i + kx].x, w.x, sum[i].x);
                    sum[i].y = fmaf(x[i + kx].y, w.y, sum[i].y);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kStrip; ++i)
            *reinterpret_cast<float2*>(result + (row * columns + column + i) * channels + 2 * pair) = sum[i];
    }
    __syncthreads();
    normalise_tile(args, result, channels, stats, columns, rank, image, y0, x0);
}
} // namespace onnxfuse
