#include "kernel.cuh"

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "hopper.h"

namespace onnxfuse
{
namespace
{
template <typename T, int kRows, int kColumns, Ending kEnding>
cudaError_t launch_tile(OnnxfuseLinear const& p, cudaStream_t stream)
{
    using S = LinearShape<kRows, kColumns>;
    int const down = static_cast<int>(ceil_div(p.rows, kRows)), across = static_cast<int>(ceil_div(p.columns, kColumns));
    LinearArgs<T> const args = linear_args<T>(p, across, p.split, p.stages);
    return launch_cluster(linear<T, kRows, kColumns, kEnding>, args, int64_t{down} * across * p.split, S::kThreads, S::bytes(p.stages), p.split, p.early != 0, stream);
}

template <typename T, Ending kEnding>
cudaError_t launch_ending(OnnxfuseLinear const& p, cudaStream_t stream)
{
    switch (p.tile_rows * 1000 + p.tile_columns)
    {
    case 32064: return launch_tile<T, 32, 64, kEnding>(p, stream);
    case 64064: return launch_tile<T, 64, 64, kEnding>(p, stream);
    case 128128: return launch_tile<T, 128, 128, kEnding>(p, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch(OnnxfuseLinear const& p, cudaStream_t stream)
{
    switch (static_cast<Ending>(p.ending))
    {
    case Ending::kColumns: return launch_ending<T, Ending::kColumns>(p, stream);
    case Ending::kGated: return launch_ending<T, Ending::kGated>(p, stream);
    case Ending::kNorm: break;
    }
    switch (p.tile_rows * 1000 + p.tile_columns)
    {
    case 32128: return launch_tile<T, 32, 128, Ending::kNorm>(p, stream);
    case 64128: return launch_tile<T, 64, 128, Ending::kNorm>(p, stream);
    case 32256: return launch_tile<T, 32, 256, Ending::kNorm>(p, stream);
    }
    return cudaErrorInvalidValue;
}

bool sizes_supported(OnnxfuseLinear const& p)
{
    bool const ends = p.ending == static_cast<int>(Ending::kColumns) || (p.ending == static_cast<int>(Ending::kGated) && p.columns % 16 == 0)
        || (p.ending == static_cast<int>(Ending::kNorm) && p.columns <= kMostNormed);
    return p.rows >= 0 && p.width >= 0 && p.columns >= 0 && p.width % 8 == 0 && p.columns % 8 == 0 && p.activation >= 0
        && p.activation <= static_cast<int>(Activation::kGeluQuick) && (p.dtype == 1 || p.dtype == 2) && ends;
}

int shared_bytes(OnnxfuseLinear const& p)
{
    int const tile = p.tile_rows * 1000 + p.tile_columns;
    if (p.ending == static_cast<int>(Ending::kNorm))
    {
        if (p.columns > p.tile_columns)
            return -1;
        switch (tile)
        {
        case 32128: return LinearShape<32, 128>::bytes(p.stages);
        case 64128: return LinearShape<64, 128>::bytes(p.stages);
        case 32256: return LinearShape<32, 256>::bytes(p.stages);
        }
        return -1;
    }
    switch (tile)
    {
    case 32064: return LinearShape<32, 64>::bytes(p.stages);
    case 64064: return LinearShape<64, 64>::bytes(p.stages);
    case 128128: return LinearShape<128, 128>::bytes(p.stages);
    }
    return -1;
}

cudaError_t choose(OnnxfuseLinear& p)
{
    bool const norm = p.ending == static_cast<int>(Ending::kNorm);
    if (norm && p.hopper)
        return cudaErrorInvalidValue;
    if (norm)
    {
        p.tile_rows = p.tile_rows ? p.tile_rows : 32;
        p.tile_columns = p.tile_columns ? p.tile_columns : p.columns <= 128 ? 128 : 256;
        p.stages = p.stages ? p.stages : p.tile_columns == 256 ? 2 : 3;
    }
    bool const named = p.tile_rows || p.tile_columns || p.stages || p.split || p.hopper;
    if (!named && hopper_supported() == cudaSuccess)
    {
        p.hopper = 1;
        int64_t const tiles = ceil_div(p.rows, 64) * ceil_div(p.columns, 64);
        int64_t const large = ceil_div(p.rows, 128) * ceil_div(p.columns, 128);
        // Measured on an H200: large tiles where there are some for half of the multiprocessors; with a short k, that does not hide their end, for all and many times.
        if (p.columns < 128 || large < (p.width >= 384 ? 64 : 1000)) // blocks share k while that fills the GPU and leaves each of them enough to do
        {
            p.tile_rows = p.tile_columns = 64;
            for (p.split = 1; p.split < 8 && 2 * p.split * tiles <= 132 && ceil_div(p.width, 64) >= 12 * p.split; p.split *= 2)
                ;
        }
        else
        {
            p.tile_columns = p.width >= 2048 && tiles >= 4096 ? 256 : 128;
        }
    }
    if (p.hopper && p.tile_rows == 64)
    {
        p.split = p.split ? p.split : 1;
        bool const valid = p.tile_columns == 64 && (p.split == 1 || p.split == 2 || p.split == 4 || p.split == 8) && ceil_div(p.rows, 64) <= 65535;
        return valid ? hopper_supported() : cudaErrorInvalidValue;
    }
    if (p.hopper)
    {
        bool const valid = p.split <= 1 && (p.tile_columns == 128 || p.tile_columns == 256);
        p.split = 1;
        return valid ? hopper_supported() : cudaErrorInvalidValue;
    }
    if (p.tile_rows == 0)
        p.tile_rows = p.rows <= 32 ? 32 : p.rows >= 4096 && p.columns >= 128 ? 128 : 64;
    if (p.tile_columns == 0)
        p.tile_columns = p.tile_rows == 128 ? 128 : 64;
    if (p.stages == 0)
        p.stages = p.tile_rows == 128 ? 3 : 4;
    if (p.split == 0)
        p.split = 1;
    if (!has_tensor_cores())
        return cudaErrorInvalidConfiguration;
    int const bytes = shared_bytes(p);
    if (bytes < 0 || p.stages < 2 || p.stages > 4 || (p.split != 1 && p.split != 2 && p.split != 4 && p.split != 8))
        return cudaErrorInvalidValue;
    return fits_gpu(bytes, p.split);
}
} // namespace
} // namespace onnxfuse

extern "C" int onnxfuse_linear_supported(OnnxfuseLinear const* problem)
{
    OnnxfuseLinear p = *problem;
    return onnxfuse::sizes_supported(p) ? onnxfuse::choose(p) : cudaErrorInvalidValue;
}

extern "C" int onnxfuse_launch_linear(OnnxfuseLinear const* problem, void* stream)
{
    using namespace onnxfuse;
    OnnxfuseLinear p = *problem;
    if (!sizes_supported(p))
        return cudaErrorInvalidValue;
    if (p.rows == 0 || p.columns == 0)
        return cudaSuccess;
    if (p.width == 0 || !p.input || !p.weight || !p.output)
        return cudaErrorInvalidValue;
    bool const norm = p.ending == static_cast<int>(Ending::kNorm), gated = p.ending == static_cast<int>(Ending::kGated);
    if ((gated && (p.scale || p.residual)) || (!norm && (p.gamma || p.beta || p.total)))
        return cudaErrorInvalidValue;
    if (!aligned(16, p.input, p.weight, p.bias, p.scale, p.residual, p.output, p.gamma, p.beta, p.total))
        return cudaErrorMisalignedAddress;
    if (cudaError_t const status = choose(p); status != cudaSuccess)
        return status;
    auto const s = static_cast<cudaStream_t>(stream);
    if (p.hopper)
        return p.tile_rows == 64 ? launch_linear_group(p, s) : launch_linear_hopper(p, s);
    switch (static_cast<Dtype>(p.dtype))
    {
    case Dtype::kFloat16: return launch<__half>(p, s);
    case Dtype::kBfloat16: return launch<__nv_bfloat16>(p, s);
    default: return cudaErrorInvalidValue;
    }
}
