// Bias + GELU, element by element. A thread keeps one vector of the bias and walks down the rows, so the bias is read once a thread
// and no division finds an element's column.
//
// float32 takes the CUDA library's erff and expf. For 16-bit types those would cost more time than the memory does: they take the
// hardware's approximate exp2 and reciprocal, whose error (2^-22) is far below such a type's rounding (2^-11 or 2^-8).
//
// The error before the last rounding is a few float32 epsilons of |z| in all forms. For z = -inf the formulas give NaN (-inf * 0), and
// so do these.
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

// The hardware's approximations; the host's functions where this is compiled for the host.
__device__ __forceinline__ float fast_exp2(float x)
{
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return exp2f(x);
#endif
}

__device__ __forceinline__ float fast_reciprocal(float x)
{
#ifdef __CUDA_ARCH__
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return 1.0f / x;
#endif
}

constexpr float kLog2E = 1.4426950408889634f;

// z * sigmoid(y). The fast division returns 0 for a divisor above 2^126, where the quotient is below 1e-36 of z, and NaN for
// -inf / inf, as wanted.
template <bool kFast>
__device__ __forceinline__ float times_sigmoid(float z, float y)
{
    if constexpr (kFast)
        return z * fast_reciprocal(1.0f + fast_exp2(-kLog2E * y));
    else
        return __fdividef(z, 1.0f + expf(-y));
}

// The standard normal distribution function, by erfc of Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: the error is
// at most 0.75e-7, and falls with the result where z is far below zero.
__device__ __forceinline__ float fast_normal_cdf(float z)
{
    float const t = fast_reciprocal(fmaf(0.3275911f * 0.70710678118654752f, fabsf(z), 1.0f));
    float polynomial = fmaf(0.5f * 1.061405429f, t, 0.5f * -1.453152027f);
    polynomial = fmaf(polynomial, t, 0.5f * 1.421413741f);
    polynomial = fmaf(polynomial, t, 0.5f * -0.284496736f);
    polynomial = fmaf(polynomial, t, 0.5f * 0.254829592f);
    float const tail = polynomial * t * fast_exp2(z * z * (-0.5f * kLog2E));
    return z < 0.0f ? tail : 1.0f - tail;
}

template <GeluKind kKind, bool kFast>
__device__ __forceinline__ float gelu(float z)
{
    if constexpr (kKind == GeluKind::kErf && kFast)
    {
        return z * fast_normal_cdf(z);
    }
    else if constexpr (kKind == GeluKind::kErf)
    {
        float const half = 0.5f * z;
        return fmaf(half, erff(z * 0.70710678118654752f), half);
    }
    else if constexpr (kKind == GeluKind::kTanh)
    {
        // (1 + tanh(u)) / 2 = sigmoid(2u)
        constexpr float kLinear = 2.0f * 0.79788456080286536f; // 2 * sqrt(2 / pi)
        constexpr float kCubic = kLinear * 0.044715f;
        return times_sigmoid<kFast>(z, z * fmaf(kCubic, z * z, kLinear));
    }
    else
    {
        return times_sigmoid<kFast>(z, 1.702f * z);
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
                    z[j] = gelu<kKind, sizeof(T) == 2>(z[j] + bias[j]);
                pack(z, value[i]);
                store(args.output, (row + i * step) * vectors + column, value[i]);
            }
        }
    }
}
} // namespace onnxfuse
