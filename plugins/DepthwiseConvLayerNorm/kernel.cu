#include "kernel.cuh"

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "band.cuh"

namespace onnxfuse
{
namespace
{
// Outputs of a thread along x.
constexpr int strip_of(int kernel)
{
    return kernel == 7 ? 7 : 4;
}

int pixel_stride_of(OnnxfuseDepthwise const& p)
{
    int const channels = p.channels / p.split, element = p.dtype == 0 ? 4 : 2;
    bool const even = channels * element / 4 % 2 == 0;
    return p.planar && even ? channels + 4 / element : channels;
}

template <typename T, int kKernel>
cudaError_t launch_plain(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    constexpr int kStrip = strip_of(kKernel);
    int const columns = p.strips * kStrip, channels = p.channels / p.split;
    int const stride = pixel_stride_of(p);
    DepthwiseLayout const layout(sizeof(T), kKernel, p.rows, columns, channels, stride, p.split);
    DepthwiseArgs<T> const args{static_cast<T const*>(p.input), static_cast<T const*>(p.weight), static_cast<T const*>(p.bias),
        static_cast<T const*>(p.gamma), static_cast<T const*>(p.beta), static_cast<T*>(p.output), p.images, p.height, p.width, p.channels,
        static_cast<int>(ceil_div(p.width, columns)), static_cast<int>(ceil_div(p.height, p.rows)), p.rows, p.strips, p.split, p.planar, stride, p.epsilon};
    int64_t const blocks = int64_t{args.tiles_x} * args.tiles_y * p.images * p.split;
    int const threads = static_cast<int>(std::min<int64_t>(kDepthwiseThreads, ceil_div(channels / 2 * p.rows * p.strips, 32) * 32));
    return launch_cluster(depthwise_layernorm<T, kKernel, kStrip>, args, blocks, threads, layout.bytes, p.split, p.early != 0, stream);
}

BandShape band_of(OnnxfuseDepthwise const& p)
{
    return BandShape(p.kernel, p.rows, p.strips, p.strip, p.height, p.channels / p.split, p.split);
}

template <typename T, int kKernel, int kRows>
cudaError_t launch_band(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    int const channels = p.channels / p.split;
    BandArgs<T> const args{static_cast<T const*>(p.input), static_cast<T const*>(p.weight), static_cast<T const*>(p.bias),
        static_cast<T const*>(p.gamma), static_cast<T const*>(p.beta), static_cast<T*>(p.output), p.images, p.height, p.width, p.channels, p.split,
        p.planar, p.epsilon, 1.0f / static_cast<float>(p.split), 8.0f / static_cast<float>(channels), 1.0f / static_cast<float>(p.channels), band_of(p)};
    auto const tiles = [](int size, int each) { return static_cast<unsigned>(ceil_div(size, each)); };
    dim3 const blocks(tiles(p.width, 8 * p.strips) * static_cast<unsigned>(p.split), tiles(p.height, kRows << args.shape.down_log), tiles(p.images, p.strip));
    return launch_cluster(depthwise_layernorm_band<T, kKernel, kRows>, args, blocks, 4 * channels, args.shape.bytes, p.split, p.early != 0, stream);
}

template <typename T, int kKernel>
cudaError_t launch_band(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    if constexpr (sizeof(T) == 2)
    {
        if (p.rows == 2)
            return launch_band<T, kKernel, 2>(p, stream);
        if constexpr (kKernel == 7)
            return p.rows == 1 ? launch_band<T, kKernel, 1>(p, stream) : launch_band<T, kKernel, 4>(p, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename T, int kKernel>
cudaError_t launch(OnnxfuseDepthwise const& p, cudaStream_t stream)
{
    if (p.variant == 5)
        return launch_band<T, kKernel>(p, stream);
    return launch_plain<T, kKernel>(p, stream);
}

// Shared memory of a block.
int64_t shared_bytes(OnnxfuseDepthwise const& p)
{
    int const channels = p.channels / p.split;
    if (p.variant == 5)
        return band_of(p).bytes;
    int const columns = p.strips * strip_of(p.kernel);
    if (int64_t{p.rows} * columns > 1024)
        return INT32_MAX;
    return DepthwiseLayout(p.dtype == 0 ? 4 : 2, p.kernel, p.rows, columns, channels, pixel_stride_of(p), p.split).bytes;
}

bool supported(OnnxfuseDepthwise const& p)
{
    if (p.split < 1 || p.split > 16 || p.channels % (8 * p.split) != 0 || p.rows < 1 || p.strips < 1 || p.dtype < 0 || p.dtype > 2)
        return false;
    int const channels = p.channels / p.split;
    switch (p.variant)
    {
    case 1: return p.split <= 8;
    case 5:
        return p.dtype != 0 && p.strips <= 8 && (p.strip == 1 || (p.strip == 2 && p.strips <= 4)) && (p.rows == 2 || (p.kernel == 7 && (p.rows == 1 || p.rows == 4)))
            && 4 * channels <= band_threads(p.rows) && p.height <= 65535 && ceil_div(p.images, p.strip) <= 65535
            && int64_t{p.channels} * p.height * p.width * p.strip <= INT32_MAX && has_tensor_cores();
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
        p.strip = p.strip ? p.strip : 1;
        p.rows = p.rows ? p.rows : p.variant == 5 ? 2 : 4;
        p.strips = p.strips ? p.strips : 1;
        p.split = p.split ? p.split : 1;
        return fits();
    }
    // By measurements on an H200. Few elements: small tiles and few channels, for more blocks; many: large tiles, and a cluster only where it must be.
    int64_t const elements = int64_t{p.images} * p.height * p.width * p.channels;
    bool const some = elements > 1'000'000, many = elements > 4'000'000;
    int const across = static_cast<int>(std::min<int64_t>(ceil_div(p.width, 8), some ? 4 : 7));
    p.variant = 5, p.strips = across, p.strip = across == 1 && p.images > 1 ? 2 : 1;
    int const first = some ? (p.channels <= 96 ? p.channels : across == 1 ? 128 : 64) : p.images > 1 ? 64 : 32;
    for (int const rows : {many && across > 2 ? 4 : (some && across > 1) || p.kernel < 7 ? 2 : 1, 2, 1})
    {
        for (int const channels : {first, 64, 48, 32, 96, 128, p.channels})
        {
            if (p.channels % channels != 0)
                continue;
            p.rows = rows, p.split = p.channels / channels;
            if (fits() == cudaSuccess)
                return cudaSuccess;
        }
    }
    int const how[][3] = {{4, 1, 4}, {1, 1, 8}, {4, 1, 1}, {1, 1, 1}};
    for (auto const& tactic : how)
    {
        p.variant = 1, p.rows = tactic[0], p.strips = tactic[1], p.split = tactic[2], p.strip = 1;
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
        case 3: return launch<T, 3>(p, s);
        case 5: return launch<T, 5>(p, s);
        case 7: return launch<T, 7>(p, s);
        }
        return cudaErrorInvalidValue;
    });
}
