#include "kernel.cuh"

#include "../common/launch.cuh"
#include "launch.h"

namespace onnxfuse
{
namespace
{
struct Kernels
{
    template <typename T, int kVector, int kPerThread>
    static constexpr auto get()
    {
        return skip_rmsnorm<T, kVector, kPerThread>;
    }
};

template <typename T>
cudaError_t launch(SkipRmsNormArgs<T> const& args, int threads_per_row, cudaStream_t stream)
{
    auto const aligned_to = [&](size_t bytes) {
        return aligned(bytes, args.input, args.skip, args.gamma, args.bias, args.output, args.sum);
    };
    if (!aligned_to(sizeof(T)))
        return cudaErrorMisalignedAddress;
    constexpr int kVector = 16 / sizeof(T);
    if (args.width % kVector == 0 && aligned_to(16))
        return launch_rows<Kernels, T, kVector>(args, threads_per_row, stream);
    return launch_rows<Kernels, T, 1>(args, threads_per_row, stream);
}
} // namespace
} // namespace onnxfuse

extern "C" int onnxfuse_launch_skip_rmsnorm(int dtype, void const* input, void const* skip, void const* gamma, void const* bias,
    void* output, void* sum, int64_t rows, int64_t width, float epsilon, int threads_per_row, void* stream)
{
    using namespace onnxfuse;
    if (rows < 0 || width < 0 || width > kMaxWidth)
        return cudaErrorInvalidValue;
    return with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if (rows == 0 || width == 0)
            return cudaSuccess;
        if (!input || !skip || !gamma || !output)
            return cudaErrorInvalidValue;
        SkipRmsNormArgs<T> const args{static_cast<T const*>(input), static_cast<T const*>(skip), static_cast<T const*>(gamma),
            static_cast<T const*>(bias), static_cast<T*>(output), static_cast<T*>(sum), rows, static_cast<int>(width),
            1.0f / static_cast<float>(width), epsilon};
        return launch(args, threads_per_row, static_cast<cudaStream_t>(stream));
    });
}
