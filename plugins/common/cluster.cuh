// Launches of kernels with dynamic shared memory, in clusters or not.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace onnxfuse
{
// Whether this GPU gives a block so much shared memory, and has clusters of that many blocks.
inline cudaError_t fits_gpu(int64_t bytes, int cluster)
{
    int device = 0, most = 0, major = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status != cudaSuccess)
        return status;
    return bytes <= most && (cluster == 1 || major >= 9) ? cudaSuccess : cudaErrorInvalidConfiguration;
}

inline bool is_hopper()
{
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

// mma of 16 x 16 by 16 x 8 halves.
// Those of compute capability 8.0, with asynchronous copies and bfloat16; on an older GPU kernels that use them are compiled to nothing.
inline bool has_tensor_cores()
{
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8;
}

// A grid's blocks in clusters of `size` along x.
inline cudaLaunchAttribute cluster_attribute(int size)
{
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(size);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    return attribute;
}

// Adds to `attributes`, of which there are `count`, what lets a kernel start before the stream's kernel before it has ended; nothing on a GPU
// that lacks it (before compute capability 9.0).
inline void start_early(cudaLaunchAttribute* attributes, unsigned& count)
{
    int device = 0, major = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess || major < 9)
        return;
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
}

// `kernel`(args) in `blocks` blocks, `cluster` of them, next to each other along x, in a cluster. early: it may start before the stream's kernel before it
// has ended, and waits for it itself (from compute capability 9.0 on; elsewhere it starts as usual). cudaErrorInvalidValue where the grid is too large, or the
// shared memory more than this GPU gives a block.
template <typename Args>
cudaError_t launch_cluster(void (*kernel)(Args), Args const& args, dim3 blocks, int threads, int bytes, int cluster, bool early, cudaStream_t stream)
{
    if (bytes > 48 * 1024)
    {
        cudaError_t const status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (status != cudaSuccess)
        {
            cudaGetLastError();
            return status;
        }
    }
    if (cluster > 8)
    {
        cudaError_t const status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (status != cudaSuccess)
            return status;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    cudaLaunchAttribute attribute[2] = {cluster_attribute(cluster), {}};
    unsigned count = cluster > 1 ? 1 : 0;
    if (early)
        start_early(attribute, count);
    config.attrs = attribute;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, args);
}
template <typename Args>
cudaError_t launch_cluster(void (*kernel)(Args), Args const& args, int64_t blocks, int threads, int bytes, int cluster, bool early, cudaStream_t stream)
{
    if (blocks > INT32_MAX)
        return cudaErrorInvalidValue;
    return launch_cluster(kernel, args, dim3(static_cast<unsigned>(blocks)), threads, bytes, cluster, early, stream);
}
} // namespace onnxfuse
