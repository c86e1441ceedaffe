// Add + normalization over the last axis: what the kernels have in common, whatever statistics they normalise by.
//
// Statistics are those of the float32 sum, not of the sum as the second output stores it: each output is rounded once, and that
// lies closest to a float64 reference. (onnxruntime's CUDA kernel normalises the rounded sum: for large sums in half precision its
// result is off by the rounding of the sum, ours is not.)
//
// The row stays in registers, so memory is read once.
#pragma once

#include "row.cuh"

namespace onnxfuse
{
template <typename T>
struct SkipNormArgs
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

// The kernel of one row. Statistics::of(x, inside, per_width, epsilon) gives the Normalizer of the row in x, and may change x: inside(i) is
// whether vector i is within the row. Statistics::kBeta: whether there may be a beta.
template <typename Statistics, typename T, int kVector, int kPerThread>
__device__ __forceinline__ void skip_norm(SkipNormArgs<T> const& args)
{
    using Vec = Vector<T, kVector>;
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
        if (Statistics::kBeta && inside(i) && args.beta)
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

    Normalizer const by = Statistics::of(x, inside, args.per_width, args.epsilon);

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
        {
            x[i][j] = (x[i][j] - by.offset) * by.scale * weight[j];
            if constexpr (Statistics::kBeta)
                x[i][j] += shift[j];
        }
        Vec rounded;
        pack(x[i], rounded);
        if (inside(i))
            store(args.output, first + column(i), rounded);
    }
}
} // namespace onnxfuse
