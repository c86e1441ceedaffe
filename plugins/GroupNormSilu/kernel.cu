#include "kernel.cuh"

#include <numeric>

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "bulk.cuh"

namespace onnxfuse
{
namespace
{
constexpr int kMostInCluster = 16;
constexpr int kMostParts = 1024;
constexpr int kHeldBeside = 4; // vectors that a thread holds where the rest of a block's part is in shared memory

// Channels of a block in channels-last: whole groups of whole vectors, 64 bytes or more where that divides the channels.
int slab_of(OnnxfuseGroupNorm const& p, int vector, int element)
{
    int const each = p.channels / p.groups, least = std::lcm(each, vector);
    for (int slab = least; slab <= p.channels; slab += least)
    {
        if (p.channels % slab == 0 && slab * element >= 64)
            return slab;
    }
    return p.channels;
}

// How many vectors or pixels a group has, and how many of them a block of one pass of loads has.
struct Sizes
{
    int64_t whole;
    int64_t once;
    int slab;
    bool single; // no vectors: the pixels are no multiple
};
Sizes sizes_of(OnnxfuseGroupNorm const& p)
{
    int const element = p.dtype == 0 ? 4 : 2, vector = 16 / element;
    if (p.channels_last)
    {
        int const slab = slab_of(p, vector, element);
        return {p.pixels, p.threads / (slab / vector), slab, false};
    }
    int const each = p.channels / p.groups;
    bool const single = p.pixels % vector != 0;
    return {int64_t{each} * p.pixels / (single ? 1 : vector), p.threads, each, single};
}

cudaError_t choose(OnnxfuseGroupNorm& p)
{
    bool const named = p.threads || p.per_thread || p.split || p.bulk || p.two_kernels;
    if (p.threads == 0)
        p.threads = 256;
    if (!named)
    {
        // A group that is large, but not larger than a cluster's shared memory.
        Sizes const sizes = sizes_of(p);
        if (!p.channels_last && !sizes.single && is_hopper() && sizes.whole * 16 >= 64 * 1024 && sizes.whole * 16 <= 16 * 200 * 1024)
            p.bulk = 1, p.threads = 512;
    }
    Sizes const sizes = sizes_of(p);
    if (sizes.once < 1)
        return cudaErrorInvalidValue;
    if (p.bulk)
    {
        if (p.channels_last || sizes.single || p.two_kernels || !is_hopper())
            return cudaErrorInvalidValue;
        int sms = 0;
        if (cudaError_t const status = multiprocessors(sms); status != cudaSuccess)
            return status;
        // 80 KB a block or less, and blocks for all multiprocessors.
        int64_t const blocks = int64_t{p.images} * p.groups;
        for (int split = p.split; p.split == 0; split *= 2)
        {
            split = split ? split : 1;
            bool const small = sizes.whole * 16 <= int64_t{split} * 80 * 1024;
            if (split == kMostInCluster || (small && (split >= 4 || blocks * split >= sms)))
                p.split = split;
        }
        return cudaSuccess;
    }
    if (p.split == 0)
    {
        // The fewest blocks that hold a group, and more of them while that leaves the GPU empty.
        int sms = 0;
        if (cudaError_t const status = multiprocessors(sms); status != cudaSuccess)
            return status;
        int64_t const clusters = int64_t{p.images} * (p.channels / sizes.slab);
        int64_t const most = p.two_kernels ? kMostParts : 8;
        int64_t split = 1;
        while (split < most && (sizes.whole > split * sizes.once * 8 || (clusters * split < sms && sizes.whole > split * sizes.once)))
            split *= 2;
        p.split = static_cast<int>(split);
    }
    // Two kernels have no clusters to keep to: as many blocks as hold a group.
    if (p.two_kernels)
    {
        p.per_thread = 8;
        p.split = static_cast<int>(std::max<int64_t>(p.split, std::min<int64_t>(kMostParts, ceil_div(sizes.whole, sizes.once * 8))));
    }
    if (p.per_thread == 0)
    {
        int64_t const needed = ceil_div(ceil_div(sizes.whole, p.split), sizes.once);
        p.per_thread = needed <= 2 ? 2 : 8;
    }
    if (int64_t{p.per_thread} * sizes.once * p.split < sizes.whole)
    {
        if (p.two_kernels)
            return cudaErrorInvalidValue;
        p.two_kernels = 1;
        p.split = p.per_thread = 0;
        return choose(p);
    }
    return cudaSuccess;
}

int shared_bytes(OnnxfuseGroupNorm const& p)
{
    Sizes const sizes = sizes_of(p);
    if (p.bulk)
    {
        int64_t const each = ceil_div(sizes.whole, p.split), shared = p.bulk == 2 ? std::max<int64_t>(0, each - kHeldBeside * p.threads) : each;
        return static_cast<int>(std::min<int64_t>(INT32_MAX, 16 * shared + 256 + 16 + 8 * (p.split + sizes.slab)));
    }
    if (!p.channels_last)
        return 256 + 8 * (p.split + sizes.slab);
    int const groups = sizes.slab / (p.channels / p.groups);
    return 8 * (groups * p.split + sizes.slab) + 16 + 4 * (2 * groups + static_cast<int>(sizes.once) * sizes.slab);
}

template <typename T>
GroupNormArgs<T> args_of(OnnxfuseGroupNorm const& p, Sizes const& sizes, void* workspace)
{
    return {static_cast<T const*>(p.input), static_cast<T const*>(p.gamma), static_cast<T const*>(p.beta), static_cast<T const*>(p.film_scale),
        static_cast<T const*>(p.film_shift), static_cast<T*>(p.output), static_cast<float2*>(workspace), p.images, p.channels, p.groups, p.pixels, sizes.slab,
        p.split, static_cast<int>(ceil_div(sizes.whole, p.split)), p.epsilon, p.silu != 0};
}

template <typename T, int kPerThread, Part kPart>
cudaError_t launch(OnnxfuseGroupNorm const& p, Sizes const& sizes, void* workspace, cudaStream_t stream)
{
    constexpr int kVector = 16 / sizeof(T);
    GroupNormArgs<T> const args = args_of<T>(p, sizes, workspace);
    int const cluster = kPart == Part::kAll ? p.split : 1, bytes = shared_bytes(p);
    if (p.channels_last)
    {
        int64_t const blocks = int64_t{p.images} * (p.channels / sizes.slab) * p.split;
        return launch_cluster(group_norm_last<T, kPerThread, kPart>, args, blocks, p.threads, bytes, cluster, p.early != 0, stream);
    }
    int64_t const blocks = int64_t{p.images} * p.groups * p.split;
    if (sizes.single)
        return launch_cluster(group_norm_planar<T, 1, kPerThread, kPart>, args, blocks, p.threads, bytes, cluster, p.early != 0, stream);
    return launch_cluster(group_norm_planar<T, kVector, kPerThread, kPart>, args, blocks, p.threads, bytes, cluster, p.early != 0, stream);
}

template <typename T, int kHeld>
cudaError_t launch_bulk(OnnxfuseGroupNorm const& p, Sizes const& sizes, cudaStream_t stream)
{
    int64_t const blocks = int64_t{p.images} * p.groups * p.split;
    return launch_cluster(group_norm_bulk<T, kHeld>, args_of<T>(p, sizes, nullptr), blocks, p.threads, shared_bytes(p), p.split, p.early != 0, stream);
}

template <typename T>
cudaError_t launch(OnnxfuseGroupNorm const& p, Sizes const& sizes, void* workspace, cudaStream_t stream)
{
    if (p.bulk)
        return p.bulk == 2 ? launch_bulk<T, kHeldBeside>(p, sizes, stream) : launch_bulk<T, 0>(p, sizes, stream);
    if (!p.two_kernels)
        return p.per_thread == 2 ? launch<T, 2, Part::kAll>(p, sizes, workspace, stream) : launch<T, 8, Part::kAll>(p, sizes, workspace, stream);
    cudaError_t const status = launch<T, 8, Part::kStatistics>(p, sizes, workspace, stream);
    return status == cudaSuccess ? launch<T, 8, Part::kOutput>(p, sizes, workspace, stream) : status;
}

bool supported(OnnxfuseGroupNorm const& p)
{
    int const element = p.dtype == 0 ? 4 : 2;
    return (p.silu == 0 || p.silu == 1) && p.bulk >= 0 && p.bulk <= 2 && p.images >= 0 && p.channels >= 0 && p.groups >= 1 && p.pixels >= 0 && p.channels % p.groups == 0 && (!p.channels_last || p.channels * element % 16 == 0) && int64_t{p.channels} / p.groups * p.pixels <= INT32_MAX && p.threads >= 0
        && p.threads <= kNormThreads && p.threads % 32 == 0 && (p.per_thread == 0 || p.per_thread == 2 || p.per_thread == 8) && p.split >= 0 && p.split <= (p.two_kernels ? kMostParts : kMostInCluster);
}
} // namespace
} // namespace onnxfuse

extern "C" int onnxfuse_group_norm_supported(OnnxfuseGroupNorm const* problem)
{
    using namespace onnxfuse;
    OnnxfuseGroupNorm p = *problem;
    bool const one = !p.two_kernels;
    if (!supported(p))
        return cudaErrorInvalidValue;
    if (p.channels == 0)
        return cudaSuccess; // nothing is launched
    if (cudaError_t const status = choose(p); status != cudaSuccess)
        return status;
    // A tactic of one kernel that became two is the other tactic.
    if (one && problem->threads != 0 && p.two_kernels)
        return cudaErrorInvalidConfiguration;
    return fits_gpu(shared_bytes(p), p.two_kernels ? 1 : p.split);
}

extern "C" size_t onnxfuse_group_norm_workspace_up_to(int64_t images, int64_t groups)
{
    return sizeof(float2) * static_cast<size_t>(images * groups) * onnxfuse::kMostParts;
}

extern "C" size_t onnxfuse_group_norm_workspace(OnnxfuseGroupNorm const* problem)
{
    using namespace onnxfuse;
    OnnxfuseGroupNorm p = *problem;
    if (!supported(p) || p.channels == 0 || choose(p) != cudaSuccess || !p.two_kernels)
        return 0;
    return sizeof(float2) * static_cast<size_t>(p.images) * p.groups * p.split;
}

extern "C" int onnxfuse_launch_group_norm(OnnxfuseGroupNorm const* problem, void* workspace, void* stream)
{
    using namespace onnxfuse;
    OnnxfuseGroupNorm p = *problem;
    if (!supported(p))
        return cudaErrorInvalidValue;
    if (p.images == 0 || p.channels == 0 || p.pixels == 0)
        return cudaSuccess;
    if (!p.input || !p.output)
        return cudaErrorInvalidValue;
    if (!aligned(16, p.input, p.gamma, p.beta, p.film_scale, p.film_shift, p.output))
        return cudaErrorMisalignedAddress;
    if (cudaError_t const status = choose(p); status != cudaSuccess)
        return status;
    if (p.two_kernels && !workspace)
        return cudaErrorInvalidValue;
    Sizes const sizes = sizes_of(p);
    return with_type(p.dtype, [&](auto type) -> cudaError_t {
        using T = typename decltype(type)::type;
        return launch<T>(p, sizes, workspace, static_cast<cudaStream_t>(stream));
    });
}
