// Activations in float32. What they cost and how exact they are: BiasGelu/kernel.cuh, whose functions these are.
#pragma once

#include "../BiasGelu/kernel.cuh"
#include "activation.h"

namespace onnxfuse
{
// kFast: for results that are rounded to a 16-bit type.
template <Activation kKind, bool kFast>
__device__ __forceinline__ float activate(float z)
{
    switch (kKind)
    {
    case Activation::kGelu: return gelu<GeluKind::kErf, kFast>(z);
    case Activation::kGeluTanh: return gelu<GeluKind::kTanh, kFast>(z);
    case Activation::kGeluQuick: return gelu<GeluKind::kQuick, kFast>(z);
    case Activation::kSilu: return times_sigmoid<kFast>(z, z);
    case Activation::kRelu: return z < 0.0f ? 0.0f : z; // keeps NaN
    default: return z;
    }
}

template <Activation kKind, bool kFast, int N>
__device__ __forceinline__ void activate_each(float (&z)[N])
{
#pragma unroll
    for (int i = 0; i < N; ++i)
        z[i] = activate<kKind, kFast>(z[i]);
}

// One choice for all values: the kind is the same for the whole grid.
template <bool kFast, int N>
__device__ __forceinline__ void activate(float (&z)[N], Activation kind)
{
    switch (kind)
    {
    case Activation::kGelu: return activate_each<Activation::kGelu, kFast>(z);
    case Activation::kGeluTanh: return activate_each<Activation::kGeluTanh, kFast>(z);
    case Activation::kGeluQuick: return activate_each<Activation::kGeluQuick, kFast>(z);
    case Activation::kSilu: return activate_each<Activation::kSilu, kFast>(z);
    case Activation::kRelu: return activate_each<Activation::kRelu, kFast>(z);
    default: return;
    }
}
} // namespace onnxfuse
