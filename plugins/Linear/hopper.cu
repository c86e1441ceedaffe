#include "group.cuh"

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "hopper.h"

namespace onnxfuse
{
namespace
{
constexpr int kGroupStages = 5; // that leave room for another block: 98 KB

template <typename T, int kColumns, Ending kEnding>
cudaError_t launch_tile(OnnxfuseLinear const& p, cudaStream_t stream)
{
    int sms = 0;
    if (cudaError_t const status = multiprocessors(sms); status != cudaSuccess)
        return status;
    int const across = static_cast<int>(ceil_div(p.columns, kColumns));
    HopperArgs<T> args{};
    bool const bfloat = static_cast<Dtype>(p.dtype) == Dtype::kBfloat16;
    if (cudaError_t const status = make_tile_map(args.input, p.input, bfloat, p.rows, p.width, kHopperRows); status != cudaSuccess)
        return status;
    if (cudaError_t const status = make_tile_map(args.weight, p.weight, bfloat, p.width, p.columns, kHopperDepth); status != cudaSuccess)
        return status;
    args.rest = linear_args<T>(p, across, 1, HopperShape<kColumns>::kStages);
    int64_t const tiles = ceil_div(p.rows, kHopperRows) * across;
    return launch_cluster(linear_hopper<T, kColumns, kEnding>, args, std::min<int64_t>(tiles, sms), kHopperThreads, HopperShape<kColumns>::kBytes, 1, p.early != 0, stream);
}

template <typename T>
cudaError_t launch(OnnxfuseLinear const& p, cudaStream_t stream)
{
    if (p.ending == static_cast<int>(Ending::kGated))
        return p.tile_columns == 256 ? launch_tile<T, 256, Ending::kGated>(p, stream) : launch_tile<T, 128, Ending::kGated>(p, stream);
    return p.tile_columns == 256 ? launch_tile<T, 256, Ending::kColumns>(p, stream) : launch_tile<T, 128, Ending::kColumns>(p, stream);
}
} // namespace

namespace
{
template <typename T, int kSplit, Ending kEnding>
cudaError_t launch_split(OnnxfuseLinear const& p, cudaStream_t stream)
{
    int const across = static_cast<int>(ceil_div(p.columns, kGroupColumns));
    int const steps = static_cast<int>(ceil_div(ceil_div(p.width, 64), kSplit)), stages = std::min(steps, kGroupStages);
    HopperArgs<T> args{};
    bool const bfloat = static_cast<Dtype>(p.dtype) == Dtype::kBfloat16;
    if (cudaError_t const status = make_tile_map(args.input, p.input, bfloat, p.rows, p.width, kGroupRows); status != cudaSuccess)
        return status;
    if (cudaError_t const status = make_tile_map(args.weight, p.weight, bfloat, p.width, p.columns, kHopperDepth); status != cudaSuccess)
        return status;
    args.rest = linear_args<T>(p, across, kSplit, stages);
    dim3 const blocks(static_cast<unsigned>(across * kSplit), static_cast<unsigned>(ceil_div(p.rows, kGroupRows)));
    return launch_cluster(linear_group<T, kSplit, kEnding>, args, blocks, kGroupThreads, group_bytes(stages), kSplit, p.early != 0, stream);
}

template <typename T, Ending kEnding>
cudaError_t launch_ending(OnnxfuseLinear const& p, cudaStream_t stream)
{
    switch (p.split)
    {
    case 1: return launch_split<T, 1, kEnding>(p, stream);
    case 2: return launch_split<T, 2, kEnding>(p, stream);
    case 4: return launch_split<T, 4, kEnding>(p, stream);
    case 8: return launch_split<T, 8, kEnding>(p, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch_group(OnnxfuseLinear const& p, cudaStream_t stream)
{
    return p.ending == static_cast<int>(Ending::kGated) ? launch_ending<T, Ending::kGated>(p, stream) : launch_ending<T, Ending::kColumns>(p, stream);
}
} // namespace

cudaError_t launch_linear_group(OnnxfuseLinear const& p, cudaStream_t stream)
{
    switch (static_cast<Dtype>(p.dtype))
    {
    case Dtype::kFloat16: return launch_group<__half>(p, stream);
    case Dtype::kBfloat16: return launch_group<__nv_bfloat16>(p, stream);
    default: return cudaErrorInvalidValue;
    }
}

cudaError_t hopper_supported()
{
    int device = 0, major = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess && major != 9)
        status = cudaErrorInvalidConfiguration;
    return status;
}

cudaError_t launch_linear_hopper(OnnxfuseLinear const& p, cudaStream_t stream)
{
    switch (static_cast<Dtype>(p.dtype))
    {
    case Dtype::kFloat16: return launch<__half>(p, stream);
    case Dtype::kBfloat16: return launch<__nv_bfloat16>(p, stream);
    default: return cudaErrorInvalidValue;
    }
}
} // namespace onnxfuse
