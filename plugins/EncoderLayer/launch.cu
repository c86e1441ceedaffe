#include "launch.h"

#include <algorithm>
#include <cstring>

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "kernels.h"

namespace onnxfuse::encoder
{
namespace
{
using Problem = OnnxfuseEncoder;

template <typename Act>
cudaError_t with_half(int dtype, Act act)
{
    switch (static_cast<Dtype>(dtype))
    {
    case Dtype::kFloat16: return act(Type<__half>{});
    case Dtype::kBfloat16: return act(Type<__nv_bfloat16>{});
    default: return cudaErrorInvalidValue;
    }
}

// Where the parts of a layer's weights and vectors lie, in bytes.
struct Packed
{
    int64_t weights[kProducts], vectors[kProducts], weights_total, vectors_total;
};
Packed packed_of(Problem const& p)
{
    int64_t const n[kProducts] = {3 * int64_t{p.width}, p.width, p.inner, p.width}, k[kProducts] = {p.width, p.width, p.width, p.inner};
    Packed packed{};
    auto take = [](int64_t& total, int64_t bytes) {
        int64_t const at = total;
        total += (bytes + 255) / 256 * 256;
        return at;
    };
    for (int f = 0; f < kProducts; ++f)
    {
        packed.weights[f] = take(packed.weights_total, n[f] * k[f] * 2);
        packed.vectors[f] = take(packed.vectors_total, 3 * n[f] * 4);
    }
    return packed;
}

struct Places
{
    int64_t outer, middle, qkv, context, inner, statistics[2], count, total;
};
Places lay_out(Problem const& p, Plan const& plan)
{
    Places places{};
    auto take = [&](int64_t bytes) {
        int64_t const at = places.total;
        places.total += (bytes + 255) / 256 * 256;
        return at;
    };
    int64_t const rows = plan.rows;
    places.count = take(256);
    places.outer = take(rows * p.width * 2);
    places.middle = take(rows * p.width * 2);
    places.qkv = take(rows * 3 * p.width * 2);
    places.context = take(rows * p.width * 2);
    places.inner = take(rows * p.inner * 2);
    places.statistics[0] = take(rows * plan.product[kProjection].slices * 8);
    places.statistics[1] = take(rows * plan.product[kOuter].slices * 8);
    return places;
}

cudaError_t check(Problem const& p)
{
    int const head = p.heads > 0 && p.width % p.heads == 0 ? p.width / p.heads : 0;
    bool const sound = p.layers >= 1 && p.batch >= 1 && p.sequence >= 1 && p.sequence <= 512 && p.width >= 64 && p.width <= 1024 && p.width % 64 == 0
        && p.inner >= 64 && p.inner % 64 == 0 && p.inner <= 8192 && head > 0 && p.activation >= 0 && p.activation <= 2 && p.epsilon >= 0.0f
        && p.mask_type >= 0 && p.mask_type <= 3 && (p.mask_type == 0 || p.mask) && p.barrier >= 0 && p.barrier <= 3
        && (p.pre_norm || p.final_gamma) && !p.final_gamma == !p.final_beta && int64_t{p.batch} * ceil_of(p.sequence, 16) * 16 <= 8192;
    if (!sound)
        return cudaErrorInvalidValue;
    return head == 32 || head == 64 || head == 128 ? cudaSuccess : cudaErrorNotSupported;
}

// The plan with clusters of this size. cudaErrorNotSupported where so few do not do.
template <typename T>
cudaError_t plan_with(Problem const& p, int cluster, int shared_bytes, Plan& plan)
{
    cudaLaunchAttribute attribute = cluster_attribute(cluster);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaError_t const status = cudaOccupancyMaxActiveClusters(&clusters, encode_kernel<T>(), &config); status != cudaSuccess)
        return status;
    if (clusters < 1)
        return cudaErrorCooperativeLaunchTooLarge;
    clusters = std::min(clusters, 132);
    if (p.clusters)
        clusters = std::min(clusters, p.clusters);
    Wishes wishes{};
    std::copy(p.parts, p.parts + kProducts, wishes.parts);
    std::copy(p.blocks, p.blocks + kProducts, wishes.blocks);
    wishes.per = p.per;
    wishes.stages = p.stages;
    bool const fits = make_plan(p.batch, p.sequence, p.width, p.inner, p.heads, cluster, clusters, shared_bytes, wishes, plan);
    return fits ? cudaSuccess : cudaErrorNotSupported;
}

template <typename T>
cudaError_t choose(Problem const& p, Plan& plan)
{
    if (cudaError_t const status = check(p); status != cudaSuccess)
        return status;
    int device = 0, major = 0, shared_bytes = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess)
        return status;
    if (major != 9)
        return cudaErrorNotSupported;
    // All of the shared memory, so that a multiprocessor has one block.
    status = cudaFuncSetAttribute(encode_kernel<T>(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess)
        return status;
    // Slices are those of clusters: a GPU of few multiprocessors needs smaller ones for wide layers.
    int cluster = p.cluster ? p.cluster : cluster_for(p.batch, p.sequence, p.width, p.inner);
    status = plan_with<T>(p, cluster, shared_bytes, plan);
    while (status == cudaErrorNotSupported && !p.cluster && cluster > 1)
        status = plan_with<T>(p, cluster /= 2, shared_bytes, plan);
    if (status != cudaSuccess)
        return status;
    return cudaSuccess;
}

cudaError_t choose_any(Problem const& p, Plan& plan)
{
    return with_half(p.dtype, [&](auto type) { return choose<typename decltype(type)::type>(p, plan); });
}

template <typename T>
Args<T> arguments(Problem const& p, Plan const& plan, unsigned char* workspace)
{
    Places const places = lay_out(p, plan);
    Packed const packed = packed_of(p);
    Args<T> args{};
    args.plan = plan;
    args.x = static_cast<T const*>(p.x);
    args.y = static_cast<T*>(p.y);
    args.outer = workspace + places.outer;
    args.middle = workspace + places.middle;
    args.qkv = workspace + places.qkv;
    args.context = workspace + places.context;
    args.inner = workspace + places.inner;
    for (int i = 0; i < 2; ++i)
        args.statistics[i] = reinterpret_cast<float2*>(workspace + places.statistics[i]);
    args.weights = static_cast<unsigned char const*>(p.weights);
    args.vectors = reinterpret_cast<unsigned char const*>(p.vectors);
    args.weights_step = packed.weights_total;
    args.vectors_step = packed.vectors_total;
    std::copy(packed.weights, packed.weights + kProducts, args.weight_at);
    std::copy(packed.vectors, packed.vectors + kProducts, args.vector_at);
    args.final_gamma = p.final_gamma;
    args.final_beta = p.final_beta;
    args.mask = p.mask;
    args.mask_type = p.mask_type;
    args.mask_batch = p.mask_batch;
    args.mask_head = p.mask_head;
    args.mask_row = p.mask_row;
    args.layers = p.layers;
    args.batch = p.batch;
    args.sequence = p.sequence;
    args.width = p.width;
    args.inner_width = p.inner;
    args.heads = p.heads;
    args.head = p.width / p.heads;
    args.inverse_width = 1.0f / static_cast<float>(p.width);
    args.before = p.pre_norm;
    args.first_norm = p.first_norm;
    args.activation = p.activation;
    args.epsilon = p.epsilon;
    args.scale_log2 = p.scale * 1.44269504f;
    args.count = p.counters ? p.counters : reinterpret_cast<unsigned*>(workspace + places.count);
    args.barrier = p.barrier;
    args.restore = p.restore;
    args.skip = p.skip;
    args.profile = p.profile;
    args.fault = p.fault;
    return args;
}

template <typename T>
cudaError_t launch(Problem const& p, Plan const& plan, unsigned char* workspace, cudaStream_t stream)
{
    Args<T> const args = arguments<T>(p, plan, workspace);
    if (!p.restore)
    {
        if (cudaError_t const status = cudaMemsetAsync(args.count, 0, 8, stream); status != cudaSuccess)
            return status;
    }
    cudaLaunchAttribute attributes[2] = {cluster_attribute(plan.cluster), {}};
    // Blocks wait for each other: refused, rather than hung, where they would not all be resident.
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(plan.cluster * plan.clusters));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(plan.shared.total);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, encode_kernel<T>(), args);
}

// Whether a problem may be launched with this workspace, and its plan.
cudaError_t ready(Problem const& p, void* workspace, size_t bytes, Plan& plan)
{
    if (cudaError_t const status = choose_any(p, plan); status != cudaSuccess)
        return status;
    if (!p.x || !p.y || !p.weights || !p.vectors || !workspace)
        return cudaErrorInvalidValue;
    if (bytes < static_cast<size_t>(lay_out(p, plan).total))
        return cudaErrorMemoryAllocation;
    if (!aligned(16, p.x, p.y, p.weights, p.vectors, p.final_gamma, p.final_beta) || !aligned(256, workspace))
        return cudaErrorMisalignedAddress;
    return cudaSuccess;
}

cudaError_t plan_known(Problem const& p, Plan& plan)
{
    if (cudaError_t const status = choose_any(p, plan); status != cudaSuccess)
        return status;
    // What the compiler was told. Fields are ints alone: no padding.
    Plan known;
    bool const fits = make_plan(p.batch, p.sequence, p.width, p.inner, p.heads, p.cluster, p.clusters, kCompiledShared, Wishes{}, known);
    return fits && std::memcmp(&plan, &known, sizeof plan) == 0 ? cudaSuccess : cudaErrorNotSupported;
}
} // namespace
} // namespace onnxfuse::encoder

extern "C" size_t onnxfuse_encoder_workspace(OnnxfuseEncoder const* problem)
{
    using namespace onnxfuse::encoder;
    Plan plan;
    return problem && choose_any(*problem, plan) == cudaSuccess ? static_cast<size_t>(lay_out(*problem, plan).total) : 0;
}

extern "C" size_t onnxfuse_encoder_workspace_up_to(OnnxfuseEncoder const* problem)
{
    using namespace onnxfuse::encoder;
    if (!problem)
        return 0;
    // How products are divided depends on the number of row blocks, and more of them may take less.
    size_t most = onnxfuse_encoder_workspace(problem);
    OnnxfuseEncoder smaller = *problem;
    int const blocks = ceil_of(problem->batch * ceil_of(problem->sequence, 16) * 16, kRowBlock);
    smaller.sequence = std::min(kRowBlock, ceil_of(problem->sequence, 16) * 16);
    for (int i = 1; i <= blocks; ++i)
    {
        smaller.batch = ceil_of(i * kRowBlock, smaller.sequence);
        most = std::max(most, onnxfuse_encoder_workspace(&smaller));
    }
    return most;
}

extern "C" int onnxfuse_launch_encoder(OnnxfuseEncoder const* problem, void* workspace, size_t bytes, void* stream)
{
    using namespace onnxfuse;
    using namespace onnxfuse::encoder;
    if (!problem)
        return cudaErrorInvalidValue;
    Problem const& p = *problem;
    Plan plan;
    if (cudaError_t const status = ready(p, workspace, bytes, plan); status != cudaSuccess)
        return status;
    return with_half(p.dtype, [&](auto type) {
        return launch<typename decltype(type)::type>(p, plan, static_cast<unsigned char*>(workspace), static_cast<cudaStream_t>(stream));
    });
}

namespace onnxfuse::encoder
{
OnnxfuseEncoder as_compiled(OnnxfuseEncoder problem)
{
    problem.cluster = cluster_for(problem.batch, problem.sequence, problem.width, problem.inner);
    problem.clusters = compiled_clusters(problem.cluster);
    return problem;
}

int plan_compiled(OnnxfuseEncoder const& p, Launch& launch)
{
    Plan plan;
    if (cudaError_t const status = plan_known(p, plan); status != cudaSuccess)
        return status;
    launch.blocks = plan.cluster * plan.clusters;
    launch.threads = kThreads;
    launch.cluster = plan.cluster;
    launch.shared = plan.shared.total;
    return cudaSuccess;
}

int prepare_compiled(OnnxfuseEncoder const& p, void* workspace, size_t bytes, void* stream, Launch& launch)
{
    Plan plan;
    if (cudaError_t const status = ready(p, workspace, bytes, plan); status != cudaSuccess)
        return status;
    return with_half(p.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        Args<T> const args = arguments<T>(p, plan, static_cast<unsigned char*>(workspace));
        auto const* const first = reinterpret_cast<unsigned char const*>(&args);
        launch.argument.assign(first, first + sizeof args);
        return p.restore ? cudaSuccess : cudaMemsetAsync(args.count, 0, 8, static_cast<cudaStream_t>(stream));
    });
}
} // namespace onnxfuse::encoder
