// The same on Hopper for few images, where latency counts: one instruction asks for the whole tile (TMA), so that no thread spends
// instructions on addresses; few instructions in all, since a kernel that runs for three microseconds waits for its code, too.
#pragma once

#include "../common/hopper.cuh"
#include "../common/stamps.cuh"
#include "kernel.cuh"

namespace onnxfuse
{
template <typename T>
struct PictureArgs
{
    PictureMap input;
    T const* weight; // [channels, kernel, kernel]
    T const* bias;
    T const* gamma;
    T const* beta;
    T* output;
    int images, height, width, channels;
    int tiles_x, tiles_y;
    int rows, strips, split;
    float epsilon;
    int lanes; // threads of a pixel
};

// Where the parts lie in dynamic shared memory. Plain host code too.
struct PictureLayout
{
    int tile_bytes, weight_pitch, pitch;
    int weight, result, stats, barrier, bytes;

    __host__ __device__ PictureLayout(int kernel, int rows, int columns, int channels, int split)
    {
        auto const round = [](int n) { return (n + 127) / 128 * 128; };
        tile_bytes = (rows + kernel - 1) * (columns + kernel - 1) * channels * 2;
        weight_pitch = channels + (channels / 2 % 2 == 0 ? 2 : 0); // an odd number of words: rows and columns meet each bank once
        pitch = channels + 4;
        weight = round(tile_bytes);
        result = weight + round(kernel * kernel * weight_pitch * 2);
        stats = result + round(rows * columns * pitch * 4);
        barrier = stats + round(split * rows * columns * 8);
        bytes = barrier + 8;
    }
};

// Mean and squared distances from it of a block's channels of a pixel; v: this thread's channels. Threads beyond the channels hold others'.
template <int kQuads>
__device__ __forceinline__ float2 pixel_statistics(float const* from, int lane, int lanes, int channels, float inverse, float4 (&v)[kQuads])
{
    float mean[1] = {}, squares[1] = {};
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
    {
        int const c = 4 * (lane + q * lanes);
        v[q] = *reinterpret_cast<float4 const*>(from + min(c, channels - 4));
        mean[0] += c < channels ? (v[q].x + v[q].y) + (v[q].z + v[q].w) : 0.0f;
    }
    sum_over_lanes(mean, lanes);
    mean[0] *= inverse;
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
    {
        float const a = v[q].x - mean[0], b = v[q].y - mean[0], d = v[q].z - mean[0], e = v[q].w - mean[0];
        squares[0] += 4 * (lane + q * lanes) < channels ? (a * a + b * b) + (d * d + e * e) : 0.0f;
    }
    sum_over_lanes(squares, lanes);
    return make_float2(mean[0], squares[0]);
}

// kQuads: groups of 4 channels of a thread in the norm: channels of a block <= 4 * kQuads * lanes.
template <typename T, int kKernel, int kStrip, int kQuads>
__global__ void __launch_bounds__(kDepthwiseThreads, 1) depthwise_layernorm_picture(__grid_constant__ PictureArgs<T> const args)
{
#if defined(ONNXFUSE_HOPPER) || defined(ONNXFUSE_EMULATED) // elsewhere it is never launched
    ONNXFUSE_SHARED(shared);
    constexpr int kRadius = kKernel / 2, kSpan = kStrip + kKernel - 1, kTaps = kKernel * kKernel;
    int const columns = args.strips * kStrip, channels = args.channels / args.split, pairs = channels / 2, pixels = args.rows * columns;
    PictureLayout const layout(kKernel, args.rows, columns, channels, args.split);
    uint16_t* const weight = reinterpret_cast<uint16_t*>(shared + layout.weight);
    float* const result = reinterpret_cast<float*>(shared + layout.result);
    float2* const stats = reinterpret_cast<float2*>(shared + layout.stats);
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(shared + layout.barrier);
    int const threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    int const rank = static_cast<int>(blockIdx.x) % args.split, tile = static_cast<int>(blockIdx.x) / args.split;
    int const image = tile / (args.tiles_x * args.tiles_y), y0 = tile / args.tiles_x % args.tiles_y * args.rows, x0 = tile % args.tiles_x * columns;
    int const first_channel = rank * channels;
    stamp(0);
    if (args.split > 1)
        cluster_arrive();
    if (thread == 0)
    {
        phase_init(barrier, 1);
        phases_ready();
        phase_expect(barrier, layout.tile_bytes);
        wait_for_kernel_before();
        copy_picture(shared, &args.input, image, y0 - kRadius, x0 - kRadius, first_channel, barrier);
    }
    auto const* const from = reinterpret_cast<uint16_t const*>(args.weight) + first_channel * kTaps;
#pragma unroll 4
    for (int i = thread; i < channels * kTaps; i += threads)
        weight[i % kTaps * layout.weight_pitch + i / kTaps] = from[i];

    // Which strip of which pair is this thread's.
    int const strip = thread / pairs, pair = thread % pairs;
    int const row = strip / args.strips, column = strip % args.strips * kStrip;
    bool const works = strip < args.rows * args.strips;
    float2 sum[kStrip];
    if (works)
    {
        float2 const bias = widen_pair(reinterpret_cast<uint32_t const*>(args.bias + first_channel)[pair], T{});
#pragma unroll
        for (int i = 0; i < kStrip; ++i)
            sum[i] = bias;
    }
    // What the norm multiplies by.
    int const lane = thread % args.lanes, slot = thread / args.lanes, slots = threads / args.lanes;
    uint2 gamma[kQuads], beta[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
    {
        int const c = 4 * (lane + q * args.lanes);
        gamma[q] = beta[q] = make_uint2(0, 0);
        if (c < channels)
        {
            gamma[q] = *reinterpret_cast<uint2 const*>(args.gamma + first_channel + c);
            beta[q] = *reinterpret_cast<uint2 const*>(args.beta + first_channel + c);
        }
    }
    __syncthreads();
    stamp(1);
    phase_wait(barrier, 0);
    wait_for_kernel_before();
    stamp(2);
    if (works)
    {
        int const stride = pairs, tile_columns = columns + kKernel - 1; // in words
        uint32_t const* x_row = reinterpret_cast<uint32_t const*>(shared) + (row * tile_columns + column) * stride + pair;
        uint32_t const* w_row = reinterpret_cast<uint32_t const*>(weight) + pair;
#pragma unroll 1
        for (int ky = 0; ky < kKernel; ++ky)
        {
            float2 x[kSpan];
#pragma unroll
            for (int i = 0; i < kSpan; ++i)
                x[i] = widen_pair(x_row[i * stride], T{});
#pragma unroll
            for (int kx = 0; kx < kKernel; ++kx)
            {
                float2 const w = widen_pair(w_row[kx * (layout.weight_pitch / 2)], T{});
#pragma unroll
                for (int i = 0; i < kStrip; ++i)
                {
                    sum[i].x = fmaf(x[i + kx].x, w.x, sum[i].x);
                    sum[i].y = fmaf(x[i + kx].y, w.y, sum[i].y);
                }
            }
            x_row += tile_columns * stride;
            w_row += kKernel * (layout.weight_pitch / 2);
        }
#pragma unroll
        for (int i = 0; i < kStrip; ++i)
            *reinterpret_cast<float2*>(result + (row * columns + column + i) * layout.pitch + 2 * pair) = sum[i];
    }
    __syncthreads();
    next_may_start();
    stamp(3);

    int const rounds = (pixels + slots - 1) / slots;
    float const inverse = 1.0f / static_cast<float>(channels);
    if (args.split > 1)
    {
        cluster_wait(); // all blocks have begun, so their shared memory is there
#pragma unroll 1
        for (int round = 0; round < rounds; ++round)
        {
            int const p = min(slot + round * slots, pixels - 1);
            float4 v[kQuads];
            float2 const found = pixel_statistics<kQuads>(result + p * layout.pitch, lane, args.lanes, channels, inverse, v);
            if (lane < args.split)
                remote_store(stats + rank * pixels + p, lane, found);
        }
        cluster_arrive();
        cluster_wait();
        stamp(4);
    }
#pragma unroll 1
    for (int round = 0; round < rounds; ++round)
    {
        int const p = min(slot + round * slots, pixels - 1);
        float4 v[kQuads];
        float mean, squares;
        if (args.split > 1)
        {
            mean = 0.0f;
            squares = 0.0f;
#pragma unroll 1
            for (int r = 0; r < args.split; ++r)
                mean += stats[r * pixels + p].x;
            mean /= static_cast<float>(args.split);
#pragma unroll 1
            for (int r = 0; r < args.split; ++r)
            {
                float2 const part = stats[r * pixels + p];
                squares += part.y + (part.x - mean) * (part.x - mean) * static_cast<float>(channels);
            }
#pragma unroll
            for (int q = 0; q < kQuads; ++q)
            {
                int const c = 4 * (lane + q * args.lanes);
                v[q] = *reinterpret_cast<float4 const*>(result + p * layout.pitch + min(c, channels - 4));
            }
        }
        else
        {
            float2 const found = pixel_statistics<kQuads>(result + p * layout.pitch, lane, args.lanes, channels, inverse, v);
            mean = found.x;
            squares = found.y;
        }
        float const scale = 1.0f / sqrtf(squares / static_cast<float>(args.channels) + args.epsilon);
        int const y = y0 + p / columns, x = x0 + p % columns;
        if (y < args.height && x < args.width)
        {
            T* const to = args.output + ((int64_t{image} * args.height + y) * args.width + x) * args.channels + first_channel;
#pragma unroll
            for (int q = 0; q < kQuads; ++q)
            {
                int const c = 4 * (lane + q * args.lanes);
                float2 const g0 = widen_pair(gamma[q].x, T{}), g1 = widen_pair(gamma[q].y, T{}), b0 = widen_pair(beta[q].x, T{}), b1 = widen_pair(beta[q].y, T{});
                v[q].x = fmaf((v[q].x - mean) * scale, g0.x, b0.x);
                v[q].y = fmaf((v[q].y - mean) * scale, g0.y, b0.y);
                v[q].z = fmaf((v[q].z - mean) * scale, g1.x, b1.x);
                v[q].w = fmaf((v[q].w - mean) * scale, g1.y, b1.y);
                if (c < channels)
                    store_4(to + c, v[q]);
            }
        }
    }
    stamp(5);
#endif
}
} // namespace onnxfuse
