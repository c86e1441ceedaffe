#include "launch.h"

#include <algorithm>

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "kernel.cuh"
#include "kernels.h"

namespace onnxfuse
{
namespace
{
using Problem = OnnxfuseAttention;
using Mask = OnnxfuseAttentionMask;

struct Choice
{
    int rows = 0, splits = 1, split_keys = 0, stages = 1, tile = 0, bytes = 0;
    size_t workspace = 0;
};

int divide(int64_t a, int64_t b)
{
    return static_cast<int>((a + b - 1) / b);
}

cudaError_t check_sizes(Problem const& p)
{
    bool const sound = p.dtype >= 0 && p.dtype <= 2 && p.batch >= 0 && p.heads >= 1 && p.kv_heads >= 1 && p.heads % p.kv_heads == 0
        && p.queries >= 0 && p.keys >= 0 && p.head >= 1 && p.width >= 1 && p.rows >= 0 && p.warps >= 0 && p.splits >= 0 && p.causal >= 0 && p.causal <= 1
        && p.added[0].batches >= 0 && p.added[1].batches >= 0 && p.keep.batches >= 0 && (p.added[0].batches || !p.added[1].batches);
    if (!sound)
        return cudaErrorInvalidValue;
    if (p.head % 8 || p.width % 8 || p.head > 256 || p.width > 256)
        return cudaErrorNotSupported;
    // Blocks are counted in 32 bits.
    if (int64_t{p.batch} * p.heads > INT32_MAX / std::max(1, divide(p.queries, 16)) / std::max(1, p.splits))
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

// Two blocks of an H100 share its 227 KB.
constexpr int kHalfOfShared = 113 * 1024;

// The keys of a step: all in one where they fit, else as many as leave room for two stages and a second block.
template <typename T>
bool choose_tile(int keys, int most_shared, AttentionKernel<T> const& found, Choice& choice)
{
    int const unit = 16 * found.sharing, most = found.keys * found.sharing;
    auto bytes = [&](int tile, int stages) { return std::max(found.q_bytes + stages * tile * found.key_bytes, found.sum_bytes); };
    choice.tile = std::max(1, divide(keys, unit)) * unit;
    choice.stages = 1;
    if (choice.tile > most || bytes(choice.tile, 1) > most_shared)
    {
        choice.stages = 2;
        for (choice.tile = most; choice.tile > unit && bytes(choice.tile, 2) > std::min(most_shared, kHalfOfShared);)
            choice.tile -= unit;
    }
    choice.bytes = bytes(choice.tile, choice.stages);
    return choice.bytes <= most_shared;
}

template <typename T>
cudaError_t choose(Problem const& p, Choice& choice, AttentionKernel<T>& found)
{
    int device = 0, multiprocessors = 0, major = 0, most_shared = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess)
        return status;
    constexpr bool kHalf = sizeof(T) == 2;
    if ((kHalf && major < 8) || (!kHalf && p.splits > 1))
        return cudaErrorNotSupported;
    int64_t const sequences = int64_t{p.batch} * p.heads;
    auto blocks = [&](int rows) { return sequences * divide(p.queries, rows); };
    // Blocks as large as still give every multiprocessor two.
    choice.rows = p.rows || kHalf ? p.rows : 16;
    if (!choice.rows)
        choice.rows = p.queries > 32 && blocks(64) >= 2 * multiprocessors ? 64 : p.queries > 16 && blocks(32) >= 2 * multiprocessors ? 32 : 16;
    for (;;)
    {
        found = find_attention<T>(std::max(p.head, p.width), choice.rows, p.warps ? p.warps : 4);
        if (!found.kernel)
            return cudaErrorNotSupported;
        if (choose_tile(p.keys, most_shared, found, choice))
            break;
        // Of wide heads, more rows mean fewer keys at a time.
        if (p.rows || !kHalf || choice.rows == 64)
            return cudaErrorNotSupported;
        choice.rows *= 2;
    }
    int const most_splits = kHalf ? std::max(1, divide(p.keys, 2 * choice.tile)) : 1;
    choice.splits = p.splits;
    if (!choice.splits)
        choice.splits = static_cast<int>(std::clamp<int64_t>(multiprocessors / std::max<int64_t>(1, blocks(choice.rows)), 1, most_splits));
    if (p.splits > 1 && (p.splits > most_splits || p.splits > 64))
        return cudaErrorNotSupported;
    choice.split_keys = divide(divide(p.keys, choice.splits), choice.tile) * choice.tile;
    choice.splits = std::max(1, divide(p.keys, std::max(1, choice.split_keys)));
    if (choice.splits > 1)
        choice.workspace = size_t(choice.splits) * size_t(sequences) * size_t(p.queries) * (size_t(p.width) * 4 + 8);
    return cudaSuccess;
}

cudaError_t check_pointers(Problem const& p)
{
    if (!p.q.data || !p.output.data || ((!p.k.data || !p.v.data) && p.keys > 0))
        return cudaErrorInvalidValue;
    for (Mask const* mask : {&p.added[0], &p.added[1], &p.keep})
    {
        if (mask->batches && !mask->data)
            return cudaErrorInvalidValue;
    }
    int64_t strides = 0;
    int64_t const element = p.dtype == static_cast<int>(Dtype::kFloat32) ? 4 : 2;
    bool straight = aligned(static_cast<size_t>(element), p.added[0].data, p.added[1].data);
    for (OnnxfuseAttentionTensor const* tensor : {&p.q, &p.k, &p.v, &p.output})
    {
        straight = straight && aligned(16, tensor->data);
        strides |= tensor->batch_stride | tensor->row_stride | tensor->head_stride;
    }
    return straight && strides * element % 16 == 0 ? cudaSuccess : cudaErrorMisalignedAddress;
}

template <typename T>
MaskArgs<T> mask_args(Mask const& mask, int keys)
{
    bool const pairs = mask.key_stride == 1 && keys % 2 == 0 && (mask.batch_stride | mask.head_stride | mask.row_stride) % 2 == 0 && aligned(2 * sizeof(T), mask.data);
    return {static_cast<T const*>(mask.data), mask.batch_stride, mask.head_stride, mask.row_stride, mask.batches, mask.key_stride, pairs};
}

template <typename T>
cudaError_t launch(Problem const& p, Choice const& choice, AttentionKernel<T> const& found, void* workspace, cudaStream_t stream)
{
    auto tensor = [](OnnxfuseAttentionTensor const& of) {
        return Strided<T const>{static_cast<T const*>(of.data), of.batch_stride, of.row_stride, of.head_stride};
    };
    AttentionArgs<T> args{};
    args.q = tensor(p.q);
    args.k = tensor(p.k);
    args.v = tensor(p.v);
    args.output = {static_cast<T*>(const_cast<void*>(p.output.data)), p.output.batch_stride, p.output.row_stride, p.output.head_stride};
    args.added[0] = mask_args<T>(p.added[0], p.keys);
    args.added[1] = mask_args<T>(p.added[1], p.keys);
    args.keep = mask_args<unsigned char>(p.keep, p.keys);
    args.scale = p.scale;
    args.fill = p.fill;
    args.hides = p.hides;
    args.safe = p.safe;
    args.heads = p.heads;
    args.group = p.heads / p.kv_heads;
    args.queries = p.queries;
    args.keys = p.keys;
    args.head = p.head;
    args.width = p.width;
    args.causal = p.causal;
    args.offset = p.offset;
    args.tiles = divide(p.queries, choice.rows);
    args.splits = choice.splits;
    args.split_keys = choice.split_keys;
    args.stages = choice.stages;
    args.tile = choice.tile;
    int64_t const rows = int64_t{p.batch} * p.heads * p.queries;
    args.partial = static_cast<float*>(workspace);
    args.statistics = reinterpret_cast<float2*>(args.partial + choice.splits * rows * p.width);

    args.count = rows * (p.width / 8);

    int64_t const blocks = int64_t{args.tiles} * args.splits * p.batch * p.heads;
    cudaError_t const status = launch_cluster(found.kernel, args, blocks, found.threads, choice.bytes, 1, p.early != 0, stream);
    if (status != cudaSuccess || choice.splits == 1)
        return status;
    return launch_cluster(find_join<T>(), args, (args.count + 127) / 128, 128, 0, 1, true, stream);
}
} // namespace
} // namespace onnxfuse

extern "C" size_t onnxfuse_attention_workspace(OnnxfuseAttention const* problem)
{
    using namespace onnxfuse;
    Choice choice;
    if (check_sizes(*problem) == cudaSuccess)
    {
        with_type(problem->dtype, [&](auto type) {
            AttentionKernel<typename decltype(type)::type> found;
            return choose(*problem, choice, found);
        });
    }
    return choice.workspace;
}

extern "C" size_t onnxfuse_attention_workspace_up_to(OnnxfuseAttention const* problem)
{
    using namespace onnxfuse;
    int sms = 0;
    if (check_sizes(*problem) != cudaSuccess || multiprocessors(sms) != cudaSuccess)
        return 0;
    OnnxfuseAttention const& p = *problem;
    // Where the launcher chooses, splits are no more blocks than there are multiprocessors, of 64 rows at most.
    size_t const row = size_t(p.width) * 4 + 8, chosen = size_t(sms) * 64 * row;
    size_t const given = p.splits > 1 ? size_t(p.splits) * size_t(p.batch) * size_t(p.heads) * size_t(p.queries) * row : 0;
    return std::max(chosen, given);
}

extern "C" int onnxfuse_attention_supported(OnnxfuseAttention const* problem)
{
    using namespace onnxfuse;
    if (cudaError_t const status = check_sizes(*problem); status != cudaSuccess)
        return status;
    return with_type(problem->dtype, [&](auto type) {
        Choice choice;
        AttentionKernel<typename decltype(type)::type> found;
        return choose(*problem, choice, found);
    });
}

extern "C" int onnxfuse_launch_attention(OnnxfuseAttention const* problem, void* workspace, size_t bytes, void* stream)
{
    using namespace onnxfuse;
    if (cudaError_t const status = check_sizes(*problem); status != cudaSuccess)
        return status;
    return with_type(problem->dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        Choice choice;
        AttentionKernel<T> found;
        cudaError_t status = choose(*problem, choice, found);
        if (status != cudaSuccess || problem->batch == 0 || problem->queries == 0)
            return status;
        status = check_pointers(*problem);
        if (status == cudaSuccess && choice.workspace > 0 && (!workspace || bytes < choice.workspace))
            status = cudaErrorMemoryAllocation;
        return status == cudaSuccess ? launch(*problem, choice, found, workspace, static_cast<cudaStream_t>(stream)) : status;
    });
}
