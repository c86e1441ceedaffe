// LayerNormalization over channels, channels last, each pixel's row written where it stands in its patch.
//
// A row is read once, normalised in registers and written once. Neighbouring pixels of a patch are neighbours in the output, so writes are as
// contiguous as reads. Of planes, a block transposes a tile of neighbouring pixels in shared memory, and a warp takes a pixel of it.
#pragma once

#include "../common/layernorm.cuh"
#include "../common/tensor.cuh"

namespace onnxfuse
{
template <typename T>
struct LayerNormPatchesArgs
{
    T const* input;
    T const* gamma;
    T const* beta; // null: none
    T* output;
    int64_t rows;      // pixels that fill patches
    int width;         // of a row: channels
    int image_height;
    int image_width;
    int down, across;  // patches of an image
    int patch;
    float per_width;   // 1 / width
    float epsilon;
};

// Row number `row` of the pixels that fill patches: the rows of input and output that it is.
template <typename T>
__device__ __forceinline__ void place_pixel(LayerNormPatchesArgs<T> const& args, int64_t row, int64_t& from, int64_t& to)
{
    // Fewer than 2^31 pixels: 32 bits divide faster.
    unsigned const wide = static_cast<unsigned>(args.across * args.patch), high = static_cast<unsigned>(args.down * args.patch);
    unsigned const patch = static_cast<unsigned>(args.patch), line = static_cast<unsigned>(row) / wide;
    unsigned const x = static_cast<unsigned>(row) % wide, image = line / high, y = line % high;
    from = (int64_t{image} * args.image_height + y) * args.image_width + x;
    to = (((int64_t{image} * args.down + y / patch) * args.across + x / patch) * patch + y % patch) * patch + x % patch;
}

template <typename T, int kVector, int kPerThread>
__global__ void __launch_bounds__(kMaxThreads, kLeastBlocks<kPerThread>) layernorm_patches(LayerNormPatchesArgs<T> const args)
{
    using Vec = Vector<T, kVector>;
    next_may_start();
    int64_t const row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= args.rows)
        return; // several rows a block: each is one whole warp, and no barrier follows
    int const vectors = args.width / kVector;
    auto column = [](int i) { return column_of<kPerThread>(i); };
    auto inside = [&](int i) { return column(i) < vectors; };

    // The weights, constants of the engine, come before the wait where a thread has few of them (see skip_norm.cuh).
    constexpr bool kEarlyWeights = kVector > 1 && kPerThread <= 2;
    Vec gamma[kPerThread], beta[kPerThread];
    auto load_weights = [&](int i) {
        gamma[i] = beta[i] = Vec{};
        if (inside(i))
            gamma[i] = load<T, kVector>(args.gamma, column(i));
        if (inside(i) && args.beta)
            beta[i] = load<T, kVector>(args.beta, column(i));
    };
    if constexpr (kEarlyWeights)
    {
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
            load_weights(i);
    }
    int64_t from, to;
    place_pixel(args, row, from, to);
    wait_for_kernel_before();

    float x[kPerThread][kVector];
    load_row<T>(args.input, from * vectors, vectors, x);
    Normalizer const by = LayerNormStatistics::of(x, inside, args.per_width, args.epsilon);

    // Loads of late weights stay behind the stores of the vector before: the compiler must not gather them all in registers.
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        if constexpr (!kEarlyWeights)
            load_weights(i);
        float weight[kVector], shift[kVector];
        unpack(gamma[i], weight);
        unpack(beta[i], shift);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            x[i][j] = (x[i][j] - by.offset) * by.scale * weight[j] + shift[j];
        Vec rounded;
        pack(x[i], rounded);
        if (inside(i))
            store(args.output, to * vectors + column(i), rounded);
    }
}

constexpr int kTilePixels = 32; // a warp reads as many of a channel together

// Elements between two pixels of the tile: an odd number of banks, so that writing one channel of all pixels meets each bank once.
template <typename T>
__host__ __device__ constexpr int tile_pitch(int channels)
{
    constexpr int kInBank = 4 / sizeof(T);
    int const banks = (channels + kInBank - 1) / kInBank;
    return (banks | 1) * kInBank;
}

__device__ __forceinline__ float sum_over_warp(float value)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// The same of planes [image][channel][pixel]. blockIdx.x: tile; blockIdx.y: image. Pixels that fill no patch are read and left.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2) layernorm_patches_planar(LayerNormPatchesArgs<T> const args)
{
    next_may_start();
    ONNXFUSE_SHARED(shared);
    T* const tile = reinterpret_cast<T*>(shared);
    int const pitch = tile_pitch<T>(args.width), channels = args.width;
    int const warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    int const pixels = args.image_height * args.image_width, first = static_cast<int>(blockIdx.x) * kTilePixels;
    bool const there = lane < pixels - first;
    T const* const from = args.input + int64_t{blockIdx.y} * channels * pixels + first + lane;
    wait_for_kernel_before();
    constexpr int kAtOnce = 4; // loads of a thread that are under way together
    for (int c = warp; c < channels; c += kAtOnce * warps)
    {
        T held[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
        {
            if (there && c + i * warps < channels)
                held[i] = from[int64_t{c + i * warps} * pixels];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
        {
            if (there && c + i * warps < channels)
                tile[lane * pitch + c + i * warps] = held[i];
        }
    }
    __syncthreads();

    for (int own = warp; own < kTilePixels && first + own < pixels; own += warps)
    {
        int const y = (first + own) / args.image_width, x = (first + own) % args.image_width;
        if (y >= args.down * args.patch || x >= args.across * args.patch)
            continue;
        T const* const row = tile + own * pitch;
        float mean = 0.0f;
        for (int c = lane; c < channels; c += 32)
            mean += widen(row[c]);
        mean = sum_over_warp(mean) * args.per_width;
        float off = 0.0f, square = 0.0f; // sums of the deviations and of their squares
        for (int c = lane; c < channels; c += 32)
        {
            float const away = widen(row[c]) - mean;
            off += away;
            square += away * away;
        }
        off = sum_over_warp(off) * args.per_width;
        float variance = sum_over_warp(square) * args.per_width - off * off;
        variance = variance < 0.0f ? 0.0f : variance; // keeps NaN, as fmaxf would not
        float const scale = rsqrtf(variance + args.epsilon);
        mean += off;
        int64_t const patch = (int64_t{blockIdx.y} * args.down + y / args.patch) * args.across + x / args.patch;
        T* const to = args.output + ((patch * args.patch + y % args.patch) * args.patch + x % args.patch) * channels;
        for (int c = lane; c < channels; c += 32)
        {
            float const normed = (widen(row[c]) - mean) * scale * widen(args.gamma[c]);
            narrow(args.beta ? normed + widen(args.beta[c]) : normed, to[c]);
        }
    }
}
} // namespace onnxfuse
