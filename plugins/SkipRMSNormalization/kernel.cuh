// Add + RMSNormalization over the last axis.
#pragma once

#include "../common/skip_norm.cuh"

namespace onnxfuse
{
struct RmsNormStatistics
{
    static constexpr bool kBeta = false;

    template <int kPerThread, int kVector, typename Inside>
    static __device__ __forceinline__ Normalizer of(float (&x)[kPerThread][kVector], Inside, float per_width, float epsilon)
    {
        __shared__ float shared[1][kMaxThreads / 32];
        float squares[1] = {0.0f};
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
        {
#pragma unroll
            for (int j = 0; j < kVector; ++j)
                squares[0] += x[i][j] * x[i][j];
        }
        sum_over_row(squares, shared);
        return {0.0f, rsqrtf(squares[0] * per_width + epsilon)};
    }
};

template <typename T, int kVector, int kPerThread>
__global__ void __launch_bounds__(kMaxThreads, kLeastBlocks<kPerThread>) skip_rmsnorm(SkipNormArgs<T> const args)
{
    skip_norm<RmsNormStatistics, T, kVector, kPerThread>(args);
}
} // namespace onnxfuse
