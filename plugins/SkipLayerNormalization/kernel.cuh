// Add + LayerNormalization over the last axis.
//
// Statistics are those of the float32 sum, not of the sum as the second output stores it: each output is rounded once, and that
// lies closest to a float64 reference. (onnxruntime's CUDA kernel normalises the rounded sum: for large sums in half precision its
// result is off by the rounding of the sum, ours is not.)
//
// The row stays in registers, so memory is read once. Variance is the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983):
// the second pass also sums the deviations, which removes the rounding of the first mean where it is large against the deviation.
#pragma once

#include "../common/row.cuh"

namespace onnxfuse
{
template <typename T>
struct SkipLayerNormArgs
{
    T const* input;
    T const* skip;
    T const* gamma;
    T const* beta; // null: none
    T const* bias; // null: none
    T* output;
    T* sum; // null: not wanted
    int64_t rows;
    int width;
    float per_width; // 1 / width
    float epsilon;
};

template <typename T, int kVector, int kPerThread>
__global__ void __launch_bounds__(kMaxThreads, kLeastBlocks<kPerThread>) skip_layernorm(SkipLayerNormArgs<T> const args)
{
    using Vec = Vector<T, kVector>;
    __shared__ float shared_mean[1][kMaxThreads / 32];
    __shared__ float shared_spread[2][kMaxThreads / 32];

    int64_t const row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= args.rows)
        return; // several rows a block: each is one whole warp, and no barrier follows
    int const vectors = args.width / kVector;
    int64_t const first = row * vectors;
    auto column = [](int i) { return column_of<kPerThread>(i); };
    auto inside = [&](int i) { return column(i) < vectors; };

    // The row's loads come before anything uses or stores, so that all are under way together. So do the weights' where a thread has few
    // vectors, which is where rows are few: there a second trip to memory after the statistics would show. Where rows are many, other
    // warps hide it, and the registers are better spent on having more of them.
    constexpr bool kEarlyWeights = kVector > 1 && kPerThread <= 2;
    float x[kPerThread][kVector];
    Vec gamma[kPerThread], beta[kPerThread];
    add_rows<T>(args.input, args.skip, args.bias, first, vectors, x);
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
    if (args.sum)
        store_row<T>(args.sum, first, vectors, x);

    float total[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            total[0] += x[i][j];
    }
    sum_over_row(total, shared_mean);
    float const mean = total[0] * args.per_width;

    float spread[2] = {0.0f, 0.0f}; // sums of the deviations and of their squares
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
        {
            x[i][j] = inside(i) ? x[i][j] - mean : 0.0f;
            spread[0] += x[i][j];
            spread[1] += x[i][j] * x[i][j];
        }
    }
    sum_over_row(spread, shared_spread);
    float const correction = spread[0] * args.per_width;
    float variance = spread[1] * args.per_width - correction * correction;
    variance = variance < 0.0f ? 0.0f : variance; // keeps NaN, as fmaxf would not
    float const scale = rsqrtf(variance + args.epsilon);

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
            x[i][j] = (x[i][j] - correction) * scale * weight[j] + shift[j];
        Vec rounded;
        pack(x[i], rounded);
        if (inside(i))
            store(args.output, first + column(i), rounded);
    }
}
} // namespace onnxfuse
