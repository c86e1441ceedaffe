#include "kernel.cuh"

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "picture.cuh"

namespace onnxfuse
{
namespace
{
int pixel_stride_of(OnnxfuseDepthwise const& p)
{
    int const channels = p.channels / p.split, element = p.dtype == 0 ? 4 : 2;
    bool const even = channels * element / 4 % 2 == 0;
    return p.planar && p.variant == 1 && even ? channels + 4 / element : channels;
}

template <typename T, int kKernel, int kStrip, bool kTile>
cudaError_t launch(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    int const columns = p.strips * kStrip, channels = p.channels / p.split;
    int const stride = pixel_stride_of(p);
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

int lanes_for(int channels)
{
    return channels <= 96 ? 8 : channels <= 192 ? 16 : 32;
}

template <typename T, int kKernel, int kStrip, int kQuads>
cudaError_t launch_picture(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    int const columns = p.strips * kStrip, channels = p.channels / p.split;
    PictureLayout const layout(kKernel, p.rows, columns, channels, p.split);
    PictureArgs<T> args{};
    bool const bfloat = static_cast<Dtype>(p.dtype) == Dtype::kBfloat16;
    cudaError_t const status = make_picture_map(args.input, p.input, bfloat, p.images, p.height, p.width, p.channels, p.rows + kKernel - 1, columns + kKernel - 1, channels);
    if (status != cudaSuccess)
        return status;
    args.weight = static_cast<T const*>(p.weight), args.bias = static_cast<T const*>(p.bias), args.gamma = static_cast<T const*>(p.gamma);
    args.beta = static_cast<T const*>(p.beta), args.output = static_cast<T*>(p.output);
    args.images = p.images, args.height = p.height, args.width = p.width, args.channels = p.channels;
    args.tiles_x = static_cast<int>(ceil_div(p.width, columns)), args.tiles_y = static_cast<int>(ceil_div(p.height, p.rows));
    args.rows = p.rows, args.strips = p.strips, args.split = p.split, args.epsilon = p.epsilon, args.lanes = lanes_for(channels);
    int64_t const blocks = int64_t{args.tiles_x} * args.tiles_y * p.images * p.split;
    int const threads = static_cast<int>(ceil_div(channels / 2 * p.rows * p.strips, 32) * 32);
    return launch_cluster(depthwise_layernorm_picture<T, kKernel, kStrip, kQuads>, args, blocks, threads, layout.bytes, p.split, p.early != 0, stream);
}

template <typename T, int kKernel, int kStrip>
cudaError_t launch_picture(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    if constexpr (sizeof(T) == 2)
        return p.channels / p.split <= 384 ? launch_picture<T, kKernel, kStrip, 3>(p, stream) : launch_picture<T, kKernel, kStrip, 6>(p, stream);
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
    if (p.variant == 4)
        return p.strip == 4 ? launch_picture<T, kKernel, 4>(p, stream) : launch_picture<T, kKernel, 7>(p, stream);
    if (p.strip == 4)
        return launch<T, kKernel, 4>(p, stream);
    return launch<T, kKernel, 7>(p, stream);
}

// Shared memory of a block.
int64_t shared_bytes(OnnxfuseDepthwise const& p)
{
    int const channels = p.channels / p.split;
    if (int64_t{p.rows} * p.strip * p.strips > 1024)
        return INT32_MAX;
    if (p.variant == 4)
        return PictureLayout(p.kernel, p.rows, p.strips * p.strip, channels, p.split).bytes;
    if (p.variant == 3)
        return DepthwiseTensorLayout(p.kernel, p.rows * p.strip, 8 * p.strips, channels, p.split).bytes;
    return DepthwiseLayout(p.dtype == 0 ? 4 : 2, p.kernel, p.rows, p.strips * p.strip, channels, pixel_stride_of(p), p.split, p.variant == 1).bytes;
}

bool supported(OnnxfuseDepthwise const& p)
{
    if (p.split < 1 || p.split > 8 || p.channels % (8 * p.split) != 0 || p.rows < 1 || p.strips < 1 || p.dtype < 0 || p.dtype > 2)
        return false;
    switch (p.variant)
    {
    case 1: return p.strip == 4 || p.strip == 7;
    case 2: return (p.strip == 4 || p.strip == 7) && !p.planar;
    case 4:
        return p.dtype != 0 && (p.strip == 4 || p.strip == 7) && !p.planar && !p.packed && p.channels / p.split <= 256 && p.channels / p.split / 2 * p.rows * p.strips <= kDepthwiseThreads
            && p.bias && p.gamma && p.beta && is_hopper() && p.rows + p.kernel - 1 <= 256 && p.strips * p.strip + p.kernel - 1 <= 256;
    case 3: return p.dtype != 0 && p.strip >= 1 && p.strip * p.strips <= 8 && (p.rows == 2 || p.rows == 4 || p.rows == 8);
    }
    return false;
}

// A named tactic is completed and checked; of a problem that names none, the first that this GPU has room for is taken.
cudaError_t chosen(OnnxfuseDepthwise& p)
{
    auto const fits = [&] { return supported(p) ? fits_gpu(shared_bytes(p), p.split) : cudaErrorInvalidValue; };
    if (p.variant != 0 || p.strip != 0 || p.rows != 0 || p.strips != 0 || p.split != 0)
    {
        p.variant = p.variant ? p.variant : 1;
        p.strip = p.strip ? p.strip : 7;
        p.rows = p.rows ? p.rows : 4;
        p.strips = p.strips ? p.strips : 1;
        p.split = p.split ? p.split : 1;
        return fits();
    }
    int const across = p.width > 28 ? 7 : p.width > 14 ? 4 : p.width > 7 ? 2 : 1;
    int const how[][5] = {{3, 4, across == 7 ? 1 : std::min(8 / across, 4), across, 4}, {3, 2, 1, across, 8}, {3, 2, 1, across, 4}, {3, 2, 1, across, 1},
        {1, 4, 7, 1, 4}, {1, 1, 7, 1, 8}, {1, 1, 4, 1, 1}, {2, 1, 4, 1, 1}};
    for (auto const& tactic : how)
    {
        p.variant = tactic[0], p.rows = tactic[1], p.strip = tactic[2], p.strips = tactic[3], p.split = tactic[4];
        if (fits() == cudaSuccess)
            return cudaSuccess;
    }
    return cudaErrorInvalidConfiguration;
}

bool sizes_supported(OnnxfuseDepthwise const& p)
{
    return p.images >= 0 && p.height >= 0 && p.width >= 0 && p.channels >= 0 && p.channels % 8 == 0 && (p.kernel == 3 || p.kernel == 5 || p.kernel == 7)
        && p.dtype >= 0 && p.dtype <= 2 && int64_t{p.channels} * p.height * p.width <= INT32_MAX;
}
} // namespace
} // namespace onnxfuse

extern "C" int onnxfuse_depthwise_layernorm_supported(OnnxfuseDepthwise const* problem)
{
    OnnxfuseDepthwise p = *problem;
    return onnxfuse::sizes_supported(p) ? onnxfuse::chosen(p) : cudaErrorInvalidValue;
}

extern "C" int onnxfuse_launch_depthwise_layernorm(OnnxfuseDepthwise const* problem, void* stream)
{
    using namespace onnxfuse;
    OnnxfuseDepthwise p = *problem;
    if (!sizes_supported(p))
        return cudaErrorInvalidValue;
    if (p.images == 0 || p.height == 0 || p.width == 0 || p.channels == 0)
        return cudaSuccess;
    if (!p.input || !p.weight || !p.output)
        return cudaErrorInvalidValue;
    if (!aligned(16, p.input, p.weight, p.bias, p.gamma, p.beta, p.output))
        return cudaErrorMisalignedAddress;
    if (cudaError_t const status = chosen(p); status != cudaSuccess)
        return status;
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

ONNXFUSE_STAMPS_SETTER(onnxfuse_stamps_depthwise)
