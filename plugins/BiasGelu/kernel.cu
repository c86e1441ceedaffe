#include "kernel.cuh"

#include "../common/launch.cuh"

namespace onnxfuse
{
namespace
{
template <int kVector, GeluKind kKind, typename T>
cudaError_t launch(BiasGeluArgs<T> args, cudaStream_t stream)
{
    int sms = 0;
    if (cudaError_t const status = multiprocessors(sms); status != cudaSuccess)
        return status;
    ColumnGeometry const geometry = column_geometry(args.rows, args.width, kVector, sms);
    if (!geometry.valid())
        return cudaErrorInvalidValue;
    args.rows_each = geometry.rows_each;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(geometry.blocks_x), static_cast<unsigned>(geometry.blocks_y));
    config.blockDim = dim3(geometry.threads_x, geometry.threads_y);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, bias_gelu<T, kVector, kKind>, args);
}

template <int kVector, typename T>
cudaError_t launch(BiasGeluArgs<T> const& args, GeluKind kind, cudaStream_t stream)
{
    switch (kind)
    {
    case GeluKind::kErf: return launch<kVector, GeluKind::kErf>(args, stream);
    case GeluKind::kTanh: return launch<kVector, GeluKind::kTanh>(args, stream);
    case GeluKind::kQuick: return launch<kVector, GeluKind::kQuick>(args, stream);
    }
    return cudaErrorInvalidValue;
}
} // namespace
} // namespace onnxfuse

extern "C" int onnxfuse_launch_bias_gelu(int dtype, int kind, void const* input, void const* bias, void* output, int64_t rows,
    int64_t width, void* stream)
{
    using namespace onnxfuse;
    if (rows < 0 || width < 0)
        return cudaErrorInvalidValue;
    return with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if (rows == 0 || width == 0)
            return cudaSuccess;
        if (!input || !bias || !output)
            return cudaErrorInvalidValue;
        if (!aligned(sizeof(T), input, bias, output))
            return cudaErrorMisalignedAddress;
        BiasGeluArgs<T> const args{
            static_cast<T const*>(input), static_cast<T const*>(bias), static_cast<T*>(output), rows, width, 0};
        constexpr int kVector = 16 / sizeof(T);
        auto const gelu_kind = static_cast<GeluKind>(kind);
        if (width % kVector == 0 && aligned(16, input, bias, output))
            return launch<kVector>(args, gelu_kind, static_cast<cudaStream_t>(stream));
        return launch<1>(args, gelu_kind, static_cast<cudaStream_t>(stream));
    });
}
