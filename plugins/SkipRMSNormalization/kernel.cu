#include "kernel.cuh"

#include "../common/skip_norm_launch.cuh"
#include "launch.h"

namespace
{
struct Kernels
{
    template <typename T, int kVector, int kPerThread>
    static constexpr auto get()
    {
        return onnxfuse::skip_rmsnorm<T, kVector, kPerThread>;
    }
};
} // namespace

extern "C" int onnxfuse_launch_skip_rmsnorm(int dtype, void const* input, void const* skip, void const* gamma, void const* bias,
    void* output, void* sum, int64_t rows, int64_t width, float epsilon, int threads_per_row, void* stream)
{
    return onnxfuse::launch_skip_norm<Kernels>(
        dtype, input, skip, gamma, nullptr, bias, output, sum, rows, width, epsilon, threads_per_row, stream);
}
