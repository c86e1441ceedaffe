// The device functions that the kernels use, on the host: a GPU thread is a coroutine, and the coroutines of a block take turns at
// barriers and shuffles. Slow and exact: it lets kernels be checked where there is no GPU.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator
{
void run(dim3 grid, dim3 block, std::function<void()> const& thread);
void wait_for_block();
void wait_for_warp();
float exchange(float value, int lane_mask);
} // namespace emulator

inline void __syncthreads()
{
    emulator::wait_for_block();
}
inline void __syncwarp()
{
    emulator::wait_for_warp();
}
inline float __shfl_xor_sync(unsigned, float value, int lane_mask)
{
    return emulator::exchange(value, lane_mask);
}
inline float __uint_as_float(unsigned bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value)
{
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float rsqrtf(float x)
{
    return 1.0f / std::sqrt(x);
}
// As the GPU's: a divisor above 2^126 gives zero, or NaN under an infinity.
inline float __fdividef(float a, float b)
{
    return std::fabs(b) > 0x1p126f ? a * 0.0f : a / b;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void (*kernel)(Parameters...), Arguments const&... arguments)
{
    emulator::run(config->gridDim, config->blockDim, [&] { kernel(arguments...); });
    return cudaSuccess;
}
