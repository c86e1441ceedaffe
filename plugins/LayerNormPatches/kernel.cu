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
        return layernorm_patches<T, kVector, kPerThread>;
    }
};

bool sizes_supported(OnnxfuseLayerNormPatches const& p)
{
    return p.images >= 0 && p.height >= 0 && p.width >= 0 && p.channels >= 0 && p.channels <= kMaxWidth && p.patch >= 1 && p.patch <= kMaxWidth
        && p.dtype >= 0 && p.dtype <= 2 && int64_t{p.height} * p.width <= INT32_MAX
        && (p.height == 0 || p.width == 0 || p.images <= INT32_MAX / (p.height * p.width));
}

int64_t rows_of(OnnxfuseLayerNormPatches const& p)
{
    return int64_t{p.images} * (p.height / p.patch * p.patch) * (p.width / p.patch * p.patch);
}

// A named number of threads: not more warps than have something to load.
bool threads_supported(OnnxfuseLayerNormPatches const& p, int vector)
{
    return p.threads == 0 || (p.threads >= 32 && p.threads - 32 < p.channels / vector && row_geometry(1, p.channels, vector, 1, p.threads).valid());
}

int planar_threads(OnnxfuseLayerNormPatches const& p)
{
    return p.threads ? p.threads : 256;
}

int64_t planar_bytes(OnnxfuseLayerNormPatches const& p)
{
    return p.dtype == 0 ? int64_t{kTilePixels} * tile_pitch<float>(p.channels) * 4 : int64_t{kTilePixels} * tile_pitch<__half>(p.channels) * 2;
}

cudaError_t planar_supported(OnnxfuseLayerNormPatches const& p)
{
    int const threads = planar_threads(p);
    return (threads == 128 || threads == 256 || threads == 512) && p.images <= 65535 ? fits_gpu(planar_bytes(p), 1) : cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch(OnnxfuseLayerNormPatches const& p, cudaStream_t stream)
{
    if (!aligned(sizeof(T), p.input, p.gamma, p.beta, p.output))
        return cudaErrorMisalignedAddress;
    LayerNormPatchesArgs<T> const args{static_cast<T const*>(p.input), static_cast<T const*>(p.gamma), static_cast<T const*>(p.beta),
        static_cast<T*>(p.output), rows_of(p), p.channels, p.height, p.width, p.height / p.patch, p.width / p.patch, p.patch,
        1.0f / static_cast<float>(p.channels), p.epsilon};
    if (p.planar)
    {
        dim3 const blocks(static_cast<unsigned>(ceil_div(int64_t{p.height} * p.width, kTilePixels)), static_cast<unsigned>(p.images));
        return launch_cluster(layernorm_patches_planar<T>, args, blocks, planar_threads(p), static_cast<int>(planar_bytes(p)), 1, p.early != 0, stream);
    }
    constexpr int kVector = 16 / sizeof(T);
    if (p.channels % kVector == 0 && aligned(16, p.input, p.gamma, p.beta, p.output))
        return launch_rows<Kernels, T, kVector>(args, p.threads, stream, p.early != 0);
    return launch_rows<Kernels, T, 1>(args, p.threads, stream, p.early != 0);
}
} // namespace
} // namespace onnxfuse

extern "C" int onnxfuse_layernorm_patches_supported(OnnxfuseLayerNormPatches const* problem)
{
    using namespace onnxfuse;
    OnnxfuseLayerNormPatches const& p = *problem;
    if (p.planar && sizes_supported(p))
        return planar_supported(p);
    int const vector = p.dtype == 0 ? 4 : 8;
    bool const supported = sizes_supported(p) && threads_supported(p, p.channels % vector == 0 ? vector : 1);
    return supported ? cudaSuccess : cudaErrorInvalidValue;
}

extern "C" int onnxfuse_launch_layernorm_patches(OnnxfuseLayerNormPatches const* problem, void* stream)
{
    using namespace onnxfuse;
    OnnxfuseLayerNormPatches const& p = *problem;
    if (!sizes_supported(p))
        return cudaErrorInvalidValue;
    if (rows_of(p) == 0 || p.channels == 0)
        return cudaSuccess;
    if (!p.input || !p.gamma || !p.output)
        return cudaErrorInvalidValue;
    if (cudaError_t const status = p.planar ? planar_supported(p) : cudaSuccess; status != cudaSuccess)
        return status;
    return with_type(p.dtype, [&](auto type) { return launch<typename decltype(type)::type>(p, static_cast<cudaStream_t>(stream)); });
}
