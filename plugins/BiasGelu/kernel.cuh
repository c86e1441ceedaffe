// Bias + GELU, element by element. A thread keeps one vector of the bias and walks down the rows, so the bias is read once a thread
// and no division finds an element's column.
//
// Where the exact result is -0 or tiny (z far below zero) all three forms keep it without cancellation worth speaking of: the error
// is at most a few float32 epsilons of |z|. For z = -inf the formulas give NaN (-inf * 0), and so do these.
#pragma once

#include "../common/vector.cuh"
#include "launch.h"

namespace onnxfuse
{
template <typename T>
struct BiasGeluArgs
{
    T const* input;
    T const* bias;
    T* output;
    int64_t rows;
    int64_t width;
};

// z / (1 + exp(-y)), which is z * sigmoid(y). The fast division returns 0 for a divisor above 2^126, where the quotient is below any
// half and 1e-36 of z; NaN for -inf / inf, as wanted.
__device__ __forceinline__ float times_sigmoid(float z, float y)
{
    return __fdividef(z, 1.0f + expf(-y));
}

template <GeluKind kKind>
__device__ __forceinline__ float gelu(float z)
{
    if constexpr (kKind == GeluKind::kErf)
    {
        float const half = 0.5f * z;
        return fmaf(half, erff(z * 0.70710678118654752f), half);
    }
    else if constexpr (kKind == GeluKind::kTanh)
    {
        // (1 + tanh(u)) / 2 = sigmoid(2u)
        constexpr float kLinear = 2.0f * 0.79788456080286536f; // 2 * sqrt(2 / pi)
        constexpr float kCubic = kLinear * 0.044715f;
        return times_sigmoid(z, z * fmaf(kCubic, z * z, kLinear));
    }
    else
    {
        return times_sigmoid(z, 1.702f * z);
    }
}

constexpr int kGeluThreads = 256;

template <typename T, int kVector, GeluKind kKind>
__global__ void __launch_bounds__(kGeluThreads) bias_gelu(BiasGeluArgs<T> const args)
{
    constexpr int kRows = 4; // loads under way in a thread
    int64_t const vectors = args.width / kVector;
    int64_t const column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (column >= vectors)
        return;
    float bias[kVector];
    unpack(load<T, kVector>(args.bias, column), bias);

    int64_t const step = int64_t{gridDim.y} * blockDim.y;
    for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < args.rows; row += kRows * step)
    {
        Vector<T, kVector> value[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
        {
            if (row + i * step < args.rows)
                value[i] = load<T, kVector>(args.input, (row + i * step) * vectors + column);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i)
        {
            if (row + i * step < args.rows)
            {
                float z[kVector];
                unpack(value[i], z);
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    z[j] = gelu<kKind>(z[j] + bias[j]);
                pack(z, value[i]);
                store(args.output, (row + i * step) * vectors + column, value[i]);
            }
        }
    }
}
} // namespace onnxfuse
