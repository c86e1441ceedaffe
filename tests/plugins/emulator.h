// The device functions that the kernels use, on the host: a GPU thread is a coroutine, and the coroutines of a block take turns at
// barriers and shuffles. Slow and exact: it lets kernels be checked where there is no GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__
#define ONNXFUSE_EMULATED

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

using std::max;
using std::min;

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator
{
// One block after the other, or all at once: those of clusters (of that many blocks along x), and those that wait for each other.
struct Launch
{
    dim3 grid;
    dim3 block;
    int cluster = 1;
    bool cooperative = false;
    size_t shared_bytes = 0;
};
void run(Launch const& launch, std::function<void()> const& thread);
void yield();
void wait_for_block();
void wait_for_warp();
void wait_for_cluster();
int cluster_size();
void wait_for_group(); // 128 threads of the block: the first ones, those behind them, ...
int lane();
float exchange(float value, int lane_mask);

// What each lane of the warp gives, for all to see until the next wait_for_warp().
struct Gift
{
    uint32_t words[6];
};
Gift const* gather(Gift const& mine);

// A number of the environment: what the small GPU is made of.
int setting(char const* name, int otherwise);

unsigned char* dynamic_shared();
// The same place in the dynamic shared memory of the block of that rank in the cluster.
unsigned char* remote_shared(unsigned char* here, int rank);
// Whether that is in the dynamic shared memory of this block.
bool in_own_shared(unsigned char const* p);
// What the hardware does in the background: some time after this call, in any order, and before the kernel ends.
void later(std::function<void()> act);

// Copies of 16 bytes by this thread, in groups: what they write is poisoned until wait_for_copies() leaves at most `left` groups under way.
void copy(void* to, void const* from, bool there);
void end_group();
void wait_for_copies(int left);
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
template <typename T>
T __shfl_sync(unsigned, T value, int source)
{
    static_assert(sizeof(T) == 4);
    emulator::Gift gift{};
    std::memcpy(gift.words, &value, 4);
    T result;
    std::memcpy(&result, emulator::gather(gift)[source].words, 4);
    emulator::wait_for_warp();
    return result;
}
inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t value, int lane_mask)
{
    return __shfl_sync(mask, value, emulator::lane() ^ lane_mask);
}
template <typename T>
T __ldcg(T const* p)
{
    return *p;
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
    emulator::Launch launch{config->gridDim, config->blockDim};
    launch.shared_bytes = config->dynamicSmemBytes;
    for (unsigned i = 0; i < config->numAttrs; ++i)
    {
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            launch.cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
        launch.cooperative = launch.cooperative || config->attrs[i].id == cudaLaunchAttributeCooperative;
    }
    emulator::run(launch, [&] { kernel(arguments...); });
    return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int)
{
    return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel, cudaLaunchConfig_t const*)
{
    *count = emulator::setting("ONNXFUSE_EMULATED_CLUSTERS", 16);
    return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Kernel, int, size_t)
{
    *count = 2;
    return cudaSuccess;
}
