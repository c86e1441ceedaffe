// The launcher of an add + normalization kernel.
#pragma once

#include "launch.cuh"
#include "skip_norm.cuh"

namespace onnxfuse
{
// Launches Kernels::get<T, kVector, kPerThread>() for the element type `dtype`; arguments and result are those of the C launchers.
template <typename Kernels>
int launch_skip_norm(int dtype, void const* input, void const* skip, void const* gamma, void const* beta, void const* bias,
    void* output, void* sum, int64_t rows, int64_t width, float epsilon, int threads_per_row, void* stream)
{
    if (rows < 0 || width < 0 || width > kMaxWidth)
        return cudaErrorInvalidValue;
    return with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if (rows == 0 || width == 0)
            return cudaSuccess;
        if (!input || !skip || !gamma || !output)
            return cudaErrorInvalidValue;
        auto const aligned_to = [&](size_t bytes) { return aligned(bytes, input, skip, gamma, beta, bias, output, sum); };
        if (!aligned_to(sizeof(T)))
            return cudaErrorMisalignedAddress;
        SkipNormArgs<T> const args{static_cast<T const*>(input), static_cast<T const*>(skip), static_cast<T const*>(gamma),
            static_cast<T const*>(beta), static_cast<T const*>(bias), static_cast<T*>(output), static_cast<T*>(sum), rows,
            static_cast<int>(width), 1.0f / static_cast<float>(width), epsilon};
        constexpr int kVector = 16 / sizeof(T);
        if (width % kVector == 0 && aligned_to(16))
            return launch_rows<Kernels, T, kVector>(args, threads_per_row, static_cast<cudaStream_t>(stream));
        return launch_rows<Kernels, T, 1>(args, threads_per_row, static_cast<cudaStream_t>(stream));
    });
}
} // namespace onnxfuse
