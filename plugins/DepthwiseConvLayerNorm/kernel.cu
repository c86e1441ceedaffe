#include "kernel.cuh"

#include "../common/cluster.cuh"
#include "../common/launch.cuh"

namespace onnxfuse
{
namespace
{
template <typename T, int kKernel, int kStrip, bool kTile>
cudaError_t launch(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    int const columns = p.strips * kStrip, channels = p.channels / p.split;
    int const stride = p.planar && kTile ? channels + (channels * static_cast<int>(sizeof(T)) / 4 % 2 == 0 ? 4 / static_cast<int>(sizeof(T)) : 0) : channels;
    DepthwiseLayout const layout(sizeof(T), kKernel, p.rows, columns, channels, stride, p.split, kTile);
    DepthwiseArgs<T> const args{static_cast<T const*>(p.input), static_cast<T const*>(p.weight), static_cast<T const*>(p.bias),
        static_cast<T const*>(p.gamma), static_cast<T const*>(p.beta), static_cast<T*>(p.output), p.images, p.height, p.width, p.channels,
        static_cast<int>(ceil_div(p.width, columns)), static_cast<int>(ceil_div(p.height, p.rows)), p.rows, p.strips, p.split, p.packed, p.planar, stride,
        p.epsilon};
    int64_t const blocks = int64_t{args.tiles_x} * args.tiles_y * p.images * p.split;
    int const threads = static_cast<int>(std::min<int64_t>(kDepthwiseThreads, ceil_div(channels / 2 * p.rows * p.strips, 32) * 32));
    return launch_cluster(depthwise_layernorm<T, kKernel, kStrip, kTile>, args, blocks, threads, layout.bytes, p.split, p.early != 0, stream);
}

template <typename T, int kKernel, int kRows>
cudaError_t launch_tensor(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    int const columns = 8 * p.strips, rows = kRows * p.strip, channels = p.channels / p.split;
    if (p.strips * p.strip > 8)
        return cudaErrorInvalidValue;
    DepthwiseTensorLayout const layout(kKernel, rows, columns, channels, p.split);
    DepthwiseArgs<T> const args{static_cast<T const*>(p.input), static_cast<T const*>(p.weight), static_cast<T const*>(p.bias),
        static_cast<T const*>(p.gamma), static_cast<T const*>(p.beta), static_cast<T*>(p.output), p.images, p.height, p.width, p.channels,
        static_cast<int>(ceil_div(p.width, columns)), static_cast<int>(ceil_div(p.height, rows)), rows, p.strips, p.split, p.packed, p.planar, 0, p.epsilon};
    int64_t const blocks = int64_t{args.tiles_x} * args.tiles_y * p.images * p.split;
    int const threads = std::min(kTensorThreads, channels / 4 * 32);
    return launch_cluster(depthwise_layernorm_tensor<T, kKernel, kRows>, args, blocks, threads, layout.bytes, p.split, p.early != 0, stream);
}

template <typename T, int kKernel>
cudaError_t launch_tensor(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    if constexpr (sizeof(T) == 2)
    {
        switch (p.rows)
        {
        case 2: return launch_tensor<T, kKernel, 2>(p, stream);
        case 4: return launch_tensor<T, kKernel, 4>(p, stream);
        case 8: return launch_tensor<T, kKernel, 8>(p, stream);
        }
    }
    return cudaErrorInvalidValue;
}

template <typename T, int kKernel, int kStrip>
cudaError_t launch(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    if (p.variant == 2)
        return p.planar ? cudaErrorInvalidValue : launch<T, kKernel, kStrip, false>(p, stream);
    return launch<T, kKernel, kStrip, true>(p, stream);
}

template <typename T, int kKernel>
cudaError_t launch(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    if (p.variant == 3)
        return launch_tensor<T, kKernel>(p, stream);
    if (p.strip == 4)
        return launch<T, kKernel, 4>(p, stream);
    return launch<T, kKernel, 7>(p, stream);
}

cudaError_t chosen(OnnxfuseDepthwise& p)
{
    if (p.variant == 0)
        p.variant = 1;
    if (p.strip == 0)
        p.strip = 7;
    if (p.rows == 0)
        p.rows = 4;
    if (p.strips == 0)
        p.strips = 1;
    if (p.split == 0)
        p.split = 1;
    return cudaSuccess;
}
} // namespace
} // namespace onnxfuse

extern "C" int onnxfuse_launch_depthwise_layernorm(OnnxfuseDepthwise const* problem, void* stream)
{
    using namespace onnxfuse;
    OnnxfuseDepthwise p = *problem;
    if (p.images < 0 || p.height < 0 || p.width < 0 || p.channels < 0 || p.channels % 8 != 0 || p.rows < 0 || p.strips < 0)
        return cudaErrorInvalidValue;
    if (p.images == 0 || p.height == 0 || p.width == 0 || p.channels == 0)
        return cudaSuccess;
    if (!p.input || !p.weight || !p.output)
        return cudaErrorInvalidValue;
    if (!aligned(16, p.input, p.weight, p.bias, p.gamma, p.beta, p.output))
        return cudaErrorMisalignedAddress;
    if (cudaError_t const status = chosen(p); status != cudaSuccess)
        return status;
    if (p.split < 1 || p.split > 8 || p.channels % (8 * p.split) != 0 || (p.variant < 3 && p.strip != 4 && p.strip != 7) || p.variant < 1 || p.variant > 3)
        return cudaErrorInvalidValue;
    return with_type(p.dtype, [&](auto type) -> cudaError_t {
        using T = typename decltype(type)::type;
        auto const s = static_cast<cudaStream_t>(stream);
        switch (p.kernel)
        {
#ifndef ONNXFUSE_SEVEN_ONLY
        case 3: return launch<T, 3>(p, s);
        case 5: return launch<T, 5>(p, s);
#endif
        case 7: return launch<T, 7>(p, s);
        }
        return cudaErrorInvalidValue;
    });
}
