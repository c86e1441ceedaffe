#include "launch.h"

#include "common/launch.cuh"

namespace onnxfuse
{
constexpr int kReluSquaredThreads = 256;

template <typename T, int kVector>
__global__ void __launch_bounds__(kReluSquaredThreads) relu_squared(T const* input, T* output, int64_t vectors)
{
    int64_t const i = int64_t{blockIdx.x} * kReluSquaredThreads + threadIdx.x;
    if (i >= vectors)
        return;
    float x[kVector];
    unpack(load<T, kVector>(input, i), x);
#pragma unroll
    for (float& value : x)
        value = value < 0 ? 0 : value * value; // a NaN is not below 0
    Vector<T, kVector> packed;
    pack(x, packed);
    store(output, i, packed);
}

template <int kVector, typename T>
static cudaError_t launch(T const* input, T* output, int64_t count, cudaStream_t stream)
{
    int64_t const vectors = count / kVector;
    int64_t const blocks = ceil_div(vectors, kReluSquaredThreads);
    if (blocks > INT32_MAX)
        return cudaErrorInvalidValue;
    relu_squared<T, kVector><<<static_cast<unsigned>(blocks), kReluSquaredThreads, 0, stream>>>(input, output, vectors);
    return cudaGetLastError();
}
} // namespace onnxfuse

extern "C" int onnxfuse_launch_relu_squared(int dtype, void const* input, void* output, int64_t count, void* stream)
{
    using namespace onnxfuse;
    if (count <= 0)
        return count < 0 ? cudaErrorInvalidValue : cudaSuccess;
    return with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        auto const* const from = static_cast<T const*>(input);
        auto* const to = static_cast<T*>(output);
        constexpr int kVector = 16 / sizeof(T);
        if (count % kVector == 0 && aligned(16, input, output))
            return launch<kVector>(from, to, count, static_cast<cudaStream_t>(stream));
        return launch<1>(from, to, count, static_cast<cudaStream_t>(stream));
    });
}
