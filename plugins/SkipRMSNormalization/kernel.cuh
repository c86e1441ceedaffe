// Add + RMSNormalization over the last axis.
//
// The mean square is that of the float32 sum, not of the sum as the second output stores it: each output is rounded once. The row
// stays in registers, so memory is read once.
#pragma once

#include "../common/row.cuh"

namespace onnxfuse
{
template <typename T>
struct SkipRmsNormArgs
{
    T const* input;
    T const* skip;
    T const* gamma;
    T const* bias; // null: none
    T* output;
    T* sum; // null: not wanted
    int64_t rows;
    int width;
    float per_width; // 1 / width
    float epsilon;
};

template <typename T, int kVector, int kPerThread>
__global__ void __launch_bounds__(kMaxThreads, kLeastBlocks<kPerThread>) skip_rmsnorm(SkipRmsNormArgs<T> const args)
{
    using Vec = Vector<T, kVector>;
    __shared__ float shared[1][kMaxThreads / 32];

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
    Vec gamma[kPerThread];
    add_rows<T>(args.input, args.skip, args.bias, first, vectors, x);
    auto load_weights = [&](int i) {
        gamma[i] = Vec{};
        if (inside(i))
            gamma[i] = load<T, kVector>(args.gamma, column(i));
    };
    if constexpr (kEarlyWeights)
    {
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
            load_weights(i);
    }
    if (args.sum)
        store_row<T>(args.sum, first, vectors, x);

    float squares[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            squares[0] += x[i][j] * x[i][j];
    }
    sum_over_row(squares, shared);
    float const scale = rsqrtf(squares[0] * args.per_width + args.epsilon);

    // Loads of late weights stay behind the stores of the vector before: the compiler must not gather them all in registers.
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
    {
        if constexpr (!kEarlyWeights)
            load_weights(i);
        float weight[kVector];
        unpack(gamma[i], weight);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            x[i][j] = x[i][j] * scale * weight[j];
        Vec rounded;
        pack(x[i], rounded);
        if (inside(i))
            store(args.output, first + column(i), rounded);
    }
}
} // namespace onnxfuse
