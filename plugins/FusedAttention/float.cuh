// Attention in float32, without tensor cores, which would round its operands: eight threads a query, 32 keys at a time.
#pragma once

#include "kernel.cuh"

namespace onnxfuse
{
constexpr int kFloatRows = 16, kFloatKeys = 32, kFloatThreads = 128, kFloatLargest = 256;

__host__ __device__ constexpr int float_bytes(int head, int width)
{
    return 4 * ((kFloatRows + kFloatKeys) * (head + 4) + kFloatKeys * width + kFloatRows * kFloatKeys);
}

__device__ __forceinline__ float4 load_four(float const* from, bool there)
{
    return there ? *reinterpret_cast<float4 const*>(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Rows first to first + count - 1 of a head to shared memory, `pitch` floats apart; zeros from row `end` on.
__device__ __forceinline__ void load_rows(float* to, Strided<float const> const& from, int first, int count, int end, int width, int pitch)
{
    int const parts = width / 4;
    for (int i = static_cast<int>(threadIdx.x); i < count * parts; i += kFloatThreads)
    {
        int const row = i / parts, part = i % parts;
        *reinterpret_cast<float4*>(to + row * pitch + 4 * part)
            = load_four(from.data + (first + row) * from.row + 4 * part, first + row < end);
    }
}

__global__ void __launch_bounds__(kFloatThreads, 3) attention_float(__grid_constant__ AttentionArgs<float> const args)
{
    ONNXFUSE_SHARED(shared);
    int const pitch = args.head + 4;
    auto* const q_rows = reinterpret_cast<float*>(shared);
    float* const k_rows = q_rows + kFloatRows * pitch;
    float* const v_rows = k_rows + kFloatKeys * pitch;
    float* const weights = v_rows + kFloatKeys * args.width;

    int const own_row = static_cast<int>(threadIdx.x) / 8, sub = static_cast<int>(threadIdx.x) % 8;
    int const tile = static_cast<int>(blockIdx.x) % args.tiles, batch_head = static_cast<int>(blockIdx.x) / args.tiles;
    int const head = batch_head % args.heads, batch = batch_head / args.heads;
    int const first_row = tile * kFloatRows, row = first_row + own_row;
    Strided<float const> q_from = args.q, k_from = args.k, v_from = args.v;
    q_from.data += batch * args.q.batch + head * args.q.head;
    k_from.data += batch * args.k.batch + head / args.group * args.k.head;
    v_from.data += batch * args.v.batch + head / args.group * args.v.head;
    float const *first_added[2], *second_added[2];
    mask_rows(first_added, args.added[0], batch, head, row, args.queries);
    mask_rows(second_added, args.added[1], batch, head, row, args.queries);
    unsigned char const* keep_rows[2];
    mask_rows(keep_rows, args.keep, batch, head, row, args.queries);
    int const end = args.causal ? min(args.keys, first_row + kFloatRows + args.offset) : args.keys;

    wait_for_kernel_before();
    load_rows(q_rows, q_from, first_row, kFloatRows, args.queries, args.head, pitch);
    float most = kNone, total = 0.0f;
    float4 sums[kFloatLargest / 32];
#pragma unroll
    for (auto& sum : sums)
        sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first_key = 0; first_key < end; first_key += kFloatKeys)
    {
        __syncthreads();
        load_rows(k_rows, k_from, first_key, kFloatKeys, end, args.head, pitch);
        load_rows(v_rows, v_from, first_key, kFloatKeys, end, args.width, args.width);
        __syncthreads();
        float scores[4] = {};
#pragma unroll 2
        for (int i = 0; i < args.head; i += 4)
        {
            float4 const a = *reinterpret_cast<float4 const*>(q_rows + own_row * pitch + i);
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                float4 const b = *reinterpret_cast<float4 const*>(k_rows + (sub + 8 * j) * pitch + i);
                scores[j] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
        }
        float highest = most;
#pragma unroll
        for (int j = 0; j < 4; ++j)
        {
            int const key = first_key + sub + 8 * j;
            float x = kNone;
            if (key < end && !(args.causal && key > row + args.offset))
            {
                x = scores[j] * args.scale;
                if (args.added[0].batches)
                {
                    float mask = first_added[0][key * args.added[0].step];
                    if (args.added[1].batches)
                        mask += second_added[0][key * args.added[1].step];
                    x += mask;
                }
                if (args.keep.batches && (keep_rows[0][key * args.keep.step] != 0) == (args.hides != 0))
                    x = args.fill;
            }
            scores[j] = x;
            highest = fmaxf(highest, x);
        }
#pragma unroll
        for (int mask = 1; mask < 8; mask *= 2)
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, mask));
        float const base = highest == kNone ? 0.0f : highest;
        float const shrink = exp2f((most - base) * kLog2E);
        most = highest;
        total *= shrink;
#pragma unroll
        for (int j = 0; j < 4; ++j)
        {
            float const weight = exp2f((scores[j] - base) * kLog2E);
            total += weight;
            weights[own_row * kFloatKeys + sub + 8 * j] = weight;
        }
#pragma unroll
        for (auto& sum : sums)
            sum = make_float4(sum.x * shrink, sum.y * shrink, sum.z * shrink, sum.w * shrink);
        __syncwarp(); // the eight threads of a query are in one warp
#pragma unroll 2
        for (int key = 0; key < kFloatKeys; ++key)
        {
            float const weight = weights[own_row * kFloatKeys + key];
#pragma unroll
            for (int n = 0; n < kFloatLargest / 32; ++n)
            {
                if (32 * n + 4 * sub >= args.width)
                    break;
                float4 const v = *reinterpret_cast<float4 const*>(v_rows + key * args.width + 32 * n + 4 * sub);
                sums[n] = make_float4(sums[n].x + weight * v.x, sums[n].y + weight * v.y, sums[n].z + weight * v.z, sums[n].w + weight * v.w);
            }
        }
    }
    next_may_start();
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2)
        total += __shfl_xor_sync(0xffffffffu, total, mask);
    if (row >= args.queries)
        return;
    bool const nothing = args.keys == 0 || (args.safe && !(total > 0.0f));
    float const inverse = 1.0f / total;
    float* const to = args.output.data + batch * args.output.batch + row * args.output.row + head * args.output.head;
#pragma unroll
    for (int n = 0; n < kFloatLargest / 32; ++n)
    {
        if (32 * n + 4 * sub >= args.width)
            break;
        float4 const mean = make_float4(sums[n].x * inverse, sums[n].y * inverse, sums[n].z * inverse, sums[n].w * inverse);
        *reinterpret_cast<float4*>(to + 32 * n + 4 * sub) = nothing ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : mean;
    }
}
} // namespace onnxfuse
