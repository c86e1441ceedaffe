// Bias + GELU, element by element. A thread keeps one vector of the bias and goes down kColumnRows rows, so the bias is read once for
// them and no division finds an element's column.
//
// What limits it is the memory. Blocks are short and many: where a grid is meant to cover the GPU just once and registers let fewer blocks
// in than that, the last ones run alone, as long as all others.
//
// float32 takes the CUDA library's erff and expf. For 16-bit types those would cost more time than the memory does: they take the
// hardware's approximate exp2 and reciprocal, whose error (2^-22) is far below such a type's rounding (2^-11 or 2^-8). tanh.approx is not
// among them: its error of 2^-11 is as large as float16's rounding.
//
// Largest errors over all values of z, in units of the last place: float16 0.56 (erf), 0.51 (tanh), 0.51 (quick); bfloat16 0.51 in all
// kinds where the result is above 1e-6, and below that an absolute error of 2e-9. float32: a few roundings of |z|.
// For z = -inf the formulas give NaN (-inf * 0), and so do these.
#pragma once

#include "../common/geometry.h"
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
    int rows_each; // of a thread, up to kColumnRows at a time
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

// The standard normal distribution function. Below zero its logarithm to base 2 is nearly a parabola, so a polynomial and one exp2 give
// it: a fit of degree 7 on [0, 6] in which an error of the function counts by its size near zero, and relative to it in the tail. On
// that range the relative error is below 3.7e-5 and the absolute error below 4.6e-7; beyond it the polynomial goes on falling.
__device__ __forceinline__ float fast_normal_cdf(float z)
{
    float const a = fabsf(z);
    float log2_of_tail = fmaf(-1.2553314e-06f, a, 5.0577652e-05f);
    log2_of_tail = fmaf(log2_of_tail, a, -8.5042475e-04f);
    log2_of_tail = fmaf(log2_of_tail, a, 8.2302853e-03f);
    log2_of_tail = fmaf(log2_of_tail, a, -5.3492859e-02f);
    log2_of_tail = fmaf(log2_of_tail, a, -4.5881239e-01f);
    log2_of_tail = fmaf(log2_of_tail, a, -1.1511613f);
    log2_of_tail = fmaf(log2_of_tail, a, -9.9999875e-01f);
    float const tail = fast_exp2(log2_of_tail);
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

template <typename T, int kVector, GeluKind kKind>
__global__ void __launch_bounds__(kColumnThreads) bias_gelu(BiasGeluArgs<T> const args)
{
    int64_t const vectors = args.width / kVector;
    int64_t const column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (column >= vectors)
        return;
    float bias[kVector];
    unpack(load<T, kVector>(args.bias, column), bias);

    int64_t const block_rows = int64_t{blockDim.y} * args.rows_each;
    for (int64_t first = blockIdx.y * block_rows + threadIdx.y; first < args.rows; first += gridDim.y * block_rows)
    {
        Vector<T, kVector> value[kColumnRows];
#pragma unroll
        for (int i = 0; i < kColumnRows; ++i)
        {
            int64_t const row = first + i * int64_t{blockDim.y};
            if (i < args.rows_each && row < args.rows)
                value[i] = load<T, kVector>(args.input, row * vectors + column);
        }
#pragma unroll
        for (int i = 0; i < kColumnRows; ++i)
        {
            int64_t const row = first + i * int64_t{blockDim.y};
            if (i < args.rows_each && row < args.rows)
            {
                float z[kVector];
                unpack(value[i], z);
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    z[j] = gelu<kKind, sizeof(T) == 2>(z[j] + bias[j]);
                pack(z, value[i]);
                store(args.output, row * vectors + column, value[i]);
            }
        }
    }
}
} // namespace onnxfuse
