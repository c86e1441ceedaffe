// What the launchers share: checks of their arguments, and the way from run-time values to a kernel's template arguments.
#pragma once

#include <type_traits>

#include "cluster.cuh"
#include "geometry.h"
#include "vector.cuh"

namespace onnxfuse
{
template <int kValue>
using Constant = std::integral_constant<int, kValue>;

template <typename T>
struct Type
{
    using type = T;
};

// Calls act(Type<T>{}) with the element type.
template <typename Act>
cudaError_t with_type(int dtype, Act act)
{
    switch (static_cast<Dtype>(dtype))
    {
    case Dtype::kFloat32: return act(Type<float>{});
    case Dtype::kFloat16: return act(Type<__half>{});
    case Dtype::kBfloat16: return act(Type<__nv_bfloat16>{});
    }
    return cudaErrorInvalidValue;
}

// Calls act(Constant<vectors per thread>{}) for every number in next_per_thread().
template <int kVector, typename Act>
cudaError_t with_per_thread(int per_thread, Act act)
{
    if constexpr (kVector == 1)
    {
        switch (per_thread)
        {
        case 2: return act(Constant<2>{});
        case 8: return act(Constant<8>{});
        case 32: return act(Constant<32>{});
        }
    }
    else
    {
        switch (per_thread)
        {
        case 1: return act(Constant<1>{});
        case 2: return act(Constant<2>{});
        case 3: return act(Constant<3>{});
        case 4: return act(Constant<4>{});
        }
        if constexpr (kVector == 4)
        {
            switch (per_thread)
            {
            case 6: return act(Constant<6>{});
            case 8: return act(Constant<8>{});
            }
        }
    }
    return cudaErrorInvalidValue;
}

// Whether every pointer is a multiple of `bytes`; null pointers are.
template <typename... Pointer>
bool aligned(size_t bytes, Pointer... pointers)
{
    return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

inline cudaError_t multiprocessors(int& count)
{
    int device = 0;
    cudaError_t const status = cudaGetDevice(&device);
    return status == cudaSuccess ? cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) : status;
}

// Launches a row kernel `kernel<T, kVector, kPerThread>(args)` on the geometry of args.rows and args.width.
// Kernels::get<T, kVector, kPerThread>() names it. early: see launch_cluster.
template <typename Kernels, typename T, int kVector, typename Args>
cudaError_t launch_rows(Args const& args, int wanted_threads, cudaStream_t stream, bool early = false)
{
    int sms = 0;
    if (cudaError_t const status = multiprocessors(sms); status != cudaSuccess)
        return status;
    RowGeometry const geometry = row_geometry(args.rows, args.width, kVector, sms, wanted_threads);
    if (!geometry.valid())
        return cudaErrorInvalidValue;
    return with_per_thread<kVector>(geometry.per_thread, [&](auto per_thread) {
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(geometry.blocks));
        config.blockDim = dim3(geometry.threads, geometry.rows_per_block);
        config.stream = stream;
        cudaLaunchAttribute attribute[1]{};
        config.attrs = attribute;
        if (early)
            start_early(attribute, config.numAttrs);
        return cudaLaunchKernelEx(&config, Kernels::template get<T, kVector, per_thread.value>(), args);
    });
}
} // namespace onnxfuse
