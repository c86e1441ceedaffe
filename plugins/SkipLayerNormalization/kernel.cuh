// Add + LayerNormalization over the last axis.
#pragma once

#include "../common/layernorm.cuh"
#include "../common/skip_norm.cuh"

namespace onnxfuse
{
template <typename T, int kVector, int kPerThread>
__global__ void __launch_bounds__(kMaxThreads, kLeastBlocks<kPerThread>) skip_layernorm(SkipNormArgs<T> const args)
{
    skip_norm<LayerNormStatistics, T, kVector, kPerThread>(args);
}
} // namespace onnxfuse
