// LayerNormalization over channels, channels last, each pixel's row written where it stands in its patch.
//
// A row is read once, normalised in registers and written once. Neighbouring pixels of a patch are neighbours in the output, so writes are as
// contiguous as reads.
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
} // namespace onnxfuse
