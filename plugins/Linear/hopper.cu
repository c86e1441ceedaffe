#include "group.cuh"

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "hopper.h"

namespace onnxfuse
{
namespace
{
constexpr int kGroupStages = 5; // that leave room for another block: 98 KB

template <typename T, int kColumns>
cudaError_t launch(OnnxfuseLinear const& p, cudaStream_t stream)
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
    args.rest = {static_cast<T const*>(p.input), static_cast<T const*>(p.weight), static_cast<T const*>(p.bias), static_cast<T const*>(p.scale),
        static_cast<T const*>(p.residual), static_cast<T*>(p.output), p.rows, p.width, p.columns, across, 1, HopperShape<kColumns>::kStages,
        static_cast<Activation>(p.activation)};
    int64_t const tiles = ceil_div(p.rows, kHopperRows) * across;
    return launch_cluster(linear_hopper<T, kColumns>, args, std::min<int64_t>(tiles, sms), kHopperThreads, HopperShape<kColumns>::kBytes, 1, p.early != 0, stream);
}

template <typename T>
cudaError_t launch(OnnxfuseLinear const& p, cudaStream_t stream)
{
    return p.tile_columns == 256 ? launch<T, 256>(p, stream) : launch<T, 128>(p, stream);
}
} // namespace

namespace
{
template <typename T, int kSplit>
cudaError_t launch_group(OnnxfuseLinear const& p, cudaStream_t stream)
{
    int const across = static_cast<int>(ceil_div(p.columns, kGroupColumns));
    int const steps = static_cast<int>(ceil_div(ceil_div(p.width, 64), kSplit)), stages = std::min(steps, kGroupStages);
    HopperArgs<T> args{};
    bool const bfloat = static_cast<Dtype>(p.dtype) == Dtype::kBfloat16;
    if (cudaError_t const status = make_tile_map(args.input, p.input, bfloat, p.rows, p.width, kGroupRows); status != cudaSuccess)
        return status;
    if (cudaError_t const status = make_tile_map(args.weight, p.weight, bfloat, p.width, p.columns, kHopperDepth); status != cudaSuccess)
        return status;
    args.rest = {static_cast<T const*>(p.input), static_cast<T const*>(p.weight), static_cast<T const*>(p.bias), static_cast<T const*>(p.scale),
        static_cast<T const*>(p.residual), static_cast<T*>(p.output), p.rows, p.width, p.columns, across, kSplit, stages,
        static_cast<Activation>(p.activation)};
    dim3 const blocks(static_cast<unsigned>(across * kSplit), static_cast<unsigned>(ceil_div(p.rows, kGroupRows)));
    return launch_cluster(linear_group<T, kSplit>, args, blocks, kGroupThreads, group_bytes(stages), kSplit, p.early != 0, stream);
}

template <typename T>
cudaError_t launch_group(OnnxfuseLinear const& p, cudaStream_t stream)
{
    switch (p.split)
    {
    case 1: return launch_group<T, 1>(p, stream);
    case 2: return launch_group<T, 2>(p, stream);
    case 4: return launch_group<T, 4>(p, stream);
    case 8: return launch_group<T, 8>(p, stream);
    }
    return cudaErrorInvalidValue;
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
