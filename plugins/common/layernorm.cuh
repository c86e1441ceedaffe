// The statistics of LayerNormalization over a row.
//
// Variance is the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983): the second pass also sums the deviations, which removes
// the rounding of the first mean where it is large against the deviation.
#pragma once

#include "row.cuh"

namespace onnxfuse
{
struct LayerNormStatistics
{
    static constexpr bool kBeta = true;

    // Leaves the deviations from the mean in x.
    template <int kPerThread, int kVector, typename Inside>
    static __device__ __forceinline__ Normalizer of(float (&x)[kPerThread][kVector], Inside inside, float per_width, float epsilon)
    {
        __shared__ float shared_mean[1][kMaxThreads / 32];
        __shared__ float shared_spread[2][kMaxThreads / 32];
        float total[1] = {0.0f};
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
        {
#pragma unroll
            for (int j = 0; j < kVector; ++j)
                total[0] += x[i][j];
        }
        sum_over_row(total, shared_mean);
        float const mean = total[0] * per_width;

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
        float const correction = spread[0] * per_width;
        float variance = spread[1] * per_width - correction * correction;
        variance = variance < 0.0f ? 0.0f : variance; // keeps NaN, as fmaxf would not
        return {correction, rsqrtf(variance + epsilon)};
    }
};
} // namespace onnxfuse
