// Attention with an online softmax on tensor cores (mma.sync): scores never leave the registers.
//
// A block takes 16 rows of queries for each of its kRowWarps; the keys of a step are dealt out evenly to its kKeyWarps, whose results are
// joined at the end, so that few rows still keep four schedulers busy. K and V of the next step are copied while this one is computed. Rows
// in shared memory are padded by 16 bytes: ldmatrix then meets no bank twice.
#pragma once

#include "../common/tensor.cuh"
#include "launch.h"

namespace onnxfuse
{
template <typename T>
struct Strided
{
    T* data;
    int64_t batch, row, head;
};

template <typename T>
struct MaskArgs
{
    T const* data;
    int64_t batch, head, row;
    int batches; // 0: none
    int step; // between keys: 0 or 1
    int pairs;   // whether elements 2i and 2i + 1 of a row can be read as one
};

template <typename T>
struct AttentionArgs
{
    Strided<T const> q, k, v;
    Strided<T> output;
    MaskArgs<T> added[2];
    MaskArgs<unsigned char> keep;
    float scale, fill;
    int heads, group; // heads of Q, and how many share one of K and V
    int queries, keys, head, width;
    int hides, safe;
    int causal, offset;
    int tiles;  // blocks along the queries
    int splits; // blocks along the keys
    int split_keys;
    int stages; // of K and V in shared memory
    int tile;   // keys of a step: a multiple of 16 kKeyWarps
    float* partial; // with splits: [split][batch * heads][queries][width], then as many pairs of maximum and sum for each row
    float2* statistics;
    int64_t count; // of 8 elements of the output
};

template <int kHead, int kRowWarps, int kKeyWarps>
struct AttentionShape
{
    static constexpr int kThreads = 32 * kRowWarps * kKeyWarps;
    static constexpr int kRows = 16 * kRowWarps;
    static constexpr int kKeys = kHead > 128 ? 16 : kHead > 64 ? 32 : kKeyWarps > 1 ? 48 : 64; // of a warp in a step, at most
    static constexpr int kPitch = 2 * kHead + 16; // bytes
    static constexpr int kSumPitch = kHead + 8;   // floats
    static constexpr bool kHoldsQ = kHead <= 128; // in registers

    static constexpr int kKeyBytes = 2 * kPitch; // of K and V in a stage
    static constexpr int kQBytes = kRows * kPitch;
    static constexpr int kSumBytes = kKeyWarps * kRows * (4 * kSumPitch + 8);
};

template <typename T>
__device__ __forceinline__ float rounded(float x)
{
    T to;
    narrow(x, to);
    return widen(to);
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNone = -HUGE_VALF;
// At and below it an added value is a mask, not a bias.
constexpr float kMasking = -64.0f;

// Rows first to first + count - 1 of a head, up to `end`, to shared memory; zeros beyond and to the right of `width`.
template <int kHead, int kThreads, typename T>
__device__ __forceinline__ void copy_rows(unsigned char* to, Strided<T const> const& from, int first, int count, int end, int width)
{
    constexpr int kParts = kHead / 8;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count * kParts; i += kThreads)
    {
        int const row = i / kParts, part = i % kParts;
        bool const there = first + row < end && 8 * part < width;
        copy_16(to + row * (2 * kHead + 16) + 16 * part, there ? from.data + (first + row) * from.row + 8 * part : from.data, there);
    }
}

// The four elements of the two rows of a lane in a tile of 8 keys: keys `key` and key + 1.
template <typename T>
__device__ __forceinline__ void add_pairs(float (&to)[4], MaskArgs<T> const& mask, T const* const (&rows)[2], int key, int keys)
{
#pragma unroll
    for (int i = 0; i < 2; ++i)
    {
        if (mask.pairs && key < keys)
        {
            uint32_t const both = *reinterpret_cast<uint32_t const*>(rows[i] + key);
            to[2 * i] += widen(bits_as<T>(static_cast<uint16_t>(both)));
            to[2 * i + 1] += widen(bits_as<T>(static_cast<uint16_t>(both >> 16)));
        }
        else
        {
            to[2 * i] += key < keys ? widen(rows[i][key * mask.step]) : 0.0f;
            to[2 * i + 1] += key + 1 < keys ? widen(rows[i][(key + 1) * mask.step]) : 0.0f;
        }
    }
}

// Where the rows of this lane begin in a mask. Rows beyond the last one read the last.
template <typename T>
__device__ __forceinline__ void mask_rows(T const* (&rows)[2], MaskArgs<T> const& mask, int batch, int head, int row, int queries)
{
    T const* const base = mask.data + (mask.batches ? batch % mask.batches : 0) * mask.batch + head * mask.head;
    rows[0] = base + min(row, queries - 1) * mask.row;
    rows[1] = base + min(row + 8, queries - 1) * mask.row;
}

// Sums of weighted values to their mean.
template <typename T>
__device__ __forceinline__ void finish(float (&values)[8], float total, AttentionArgs<T> const& args)
{
    bool const nothing = args.keys == 0 || (args.safe && !(total > 0.0f));
    float const inverse = 1.0f / total;
#pragma unroll
    for (int j = 0; j < 8; ++j)
        values[j] = nothing ? 0.0f : values[j] * inverse;
}

// Blocks that a multiprocessor has room for: they hide each other's loads, but must not spill.
template <int kHead, int kRowWarps, int kKeyWarps>
constexpr int kBlocksAtOnce = kRowWarps * kKeyWarps > 4 ? 1 : kHead <= 64 && kKeyWarps > 1 ? 3 : 2;

template <typename T, int kHead, int kRowWarps, int kKeyWarps>
__global__ void __launch_bounds__(32 * kRowWarps * kKeyWarps, kBlocksAtOnce<kHead, kRowWarps, kKeyWarps>) attention(__grid_constant__ AttentionArgs<T> const args)
{
    using S = AttentionShape<kHead, kRowWarps, kKeyWarps>;
    ONNXFUSE_SHARED(shared);
    unsigned char* const q_rows = shared;
    unsigned char* const k_rows = q_rows + S::kRows * S::kPitch;
    int const stage_bytes = args.tile * S::kPitch;
    unsigned char* const v_rows = k_rows + args.stages * stage_bytes;

    int const lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int const g = lane / 4, q = lane % 4;
    int const row_warp = warp % kRowWarps, key_warp = warp / kRowWarps;
    int const row_tile = static_cast<int>(blockIdx.x) % args.tiles;
    int const others = static_cast<int>(blockIdx.x) / args.tiles;
    int const split = others % args.splits;
    int const batch_head = others / args.splits;
    int const head = batch_head % args.heads, batch = batch_head / args.heads;
    int const first_row = row_tile * S::kRows;

    Strided<T const> q_from = args.q, k_from = args.k, v_from = args.v;
    q_from.data += batch * args.q.batch + head * args.q.head;
    k_from.data += batch * args.k.batch + head / args.group * args.k.head;
    v_from.data += batch * args.v.batch + head / args.group * args.v.head;
    int const begin = split * args.split_keys;
    int end = min(args.keys, begin + args.split_keys);
    if (args.causal)
        end = min(end, first_row + S::kRows + args.offset);
    int const steps = end > begin ? (end - begin + args.tile - 1) / args.tile : 0;

    wait_for_kernel_before();
    copy_rows<kHead, S::kThreads>(q_rows, q_from, first_row, S::kRows, args.queries, args.head);
    copy_rows<kHead, S::kThreads>(k_rows, k_from, begin, args.tile, end, args.head);
    end_of_copies();
    copy_rows<kHead, S::kThreads>(v_rows, v_from, begin, args.tile, end, args.width);
    end_of_copies();

    int const row = first_row + 16 * row_warp + g; // and row + 8
    // Masked scores may be as low as a float can be, and are not in units of ln 2.
    bool const masked = args.added[0].batches || args.keep.batches;
    float const scale = masked ? args.scale : args.scale * kLog2E;
    float const to_exponent = masked ? kLog2E : 1.0f;

    uint32_t q_held[S::kHoldsQ ? kHead / 16 : 1][4];
    unsigned char const* const q_at = q_rows + (16 * row_warp + lane % 16) * S::kPitch + 16 * (lane / 16);
    int const own_keys = args.tile / kKeyWarps; // of this warp in a step
    unsigned char const* const k_at = k_rows + (own_keys * key_warp + lane / 16 * 8 + lane % 8) * S::kPitch + 16 * (lane / 8 % 2);
    unsigned char const* const v_at = v_rows + (own_keys * key_warp + lane % 16) * S::kPitch + 16 * (lane / 16);
    float sums[kHead / 8][4] = {};
    float most[2] = {kNone, kNone}, total[2] = {};

    for (int step = 0; step < steps; ++step)
    {
        int const stage = args.stages > 1 ? step & 1 : 0;
        int const first_key = begin + step * args.tile + own_keys * key_warp;
        int const end_key = min(end, first_key + own_keys);
        bool const busy = first_key < end;
        float added[S::kKeys / 8][4];
        uint32_t keep = ~0u; // a bit for each of them
        if (masked && busy)
        {
            T const* added_rows[2][2];
            mask_rows(added_rows[0], args.added[0], batch, head, row, args.queries);
            mask_rows(added_rows[1], args.added[1], batch, head, row, args.queries);
            unsigned char const* keep_rows[2];
            mask_rows(keep_rows, args.keep, batch, head, row, args.queries);
#pragma unroll
            for (int n = 0; n < S::kKeys / 8; ++n)
            {
                int const key = first_key + 8 * n + 2 * q;
                added[n][0] = added[n][1] = added[n][2] = added[n][3] = 0.0f;
                if (args.added[0].batches)
                    add_pairs(added[n], args.added[0], added_rows[0], key, args.keys);
                if (args.added[1].batches)
                    add_pairs(added[n], args.added[1], added_rows[1], key, args.keys);
                if (args.keep.batches)
                {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                    {
                        if (key + j % 2 < args.keys && (keep_rows[j / 2][(key + j % 2) * args.keep.step] != 0) == (args.hides != 0))
                            keep &= ~(1u << (4 * n + j));
                    }
                }
            }
        }

        wait_for_copies<1>(); // K is there; V may be under way
        __syncthreads();
        bool const more = step + 1 < steps;
        int const next_key = begin + (step + 1) * args.tile;
        if (more)
            copy_rows<kHead, S::kThreads>(k_rows + (stage ^ 1) * stage_bytes, k_from, next_key, args.tile, end, args.head);
        end_of_copies();
        if constexpr (S::kHoldsQ)
        {
            if (step == 0)
            {
#pragma unroll
                for (int k = 0; k < kHead / 16; ++k)
                    load_matrices(q_held[k], q_at + 32 * k);
            }
        }

        float scores[S::kKeys / 8][4] = {};
        if (busy)
        {
            unsigned char const* const at = k_at + stage * stage_bytes;
#pragma unroll
            for (int k = 0; k < kHead / 16; ++k)
            {
                uint32_t fresh[4];
                if constexpr (!S::kHoldsQ)
                    load_matrices(fresh, q_at + 32 * k);
                uint32_t const(&a)[4] = *(S::kHoldsQ ? &q_held[S::kHoldsQ ? k : 0] : &fresh);
#pragma unroll
                for (int n = 0; n < S::kKeys / 16; ++n)
                {
                    if (first_key + 16 * n >= end_key)
                        break;
                    uint32_t b[4];
                    load_matrices(b, at + 16 * n * S::kPitch + 32 * k);
                    mma(scores[2 * n], a, b[0], b[1], T{});
                    mma(scores[2 * n + 1], a, b[2], b[3], T{});
                }
            }

            float highest[2] = {most[0], most[1]};
#pragma unroll
            for (int n = 0; n < S::kKeys / 8; ++n)
            {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                {
                    int const key = first_key + 8 * n + 2 * q + j % 2;
                    float x = scores[n][j] * scale;
                    if (masked)
                    {
                        float const sum = x + added[n][j];
                        x = added[n][j] <= kMasking ? rounded<T>(sum) : sum;
                        x = keep >> (4 * n + j) & 1 ? x : args.fill;
                    }
                    bool const outside = key >= end_key || (args.causal && key > row + 8 * (j / 2) + args.offset);
                    scores[n][j] = outside ? kNone : x;
                    highest[j / 2] = fmaxf(highest[j / 2], scores[n][j]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], 1));
                highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], 2));
                float const base = highest[i] == kNone ? 0.0f : highest[i];
                float const shrink = exp2_approximate((most[i] - base) * to_exponent);
                most[i] = highest[i];
                total[i] *= shrink;
#pragma unroll
                for (int n = 0; n < kHead / 8; ++n)
                {
                    sums[n][2 * i] *= shrink;
                    sums[n][2 * i + 1] *= shrink;
                }
#pragma unroll
                for (int n = 0; n < S::kKeys / 8; ++n)
                {
#pragma unroll
                    for (int j = 2 * i; j < 2 * i + 2; ++j)
                    {
                        scores[n][j] = exp2_approximate((scores[n][j] - base) * to_exponent);
                        total[i] += scores[n][j];
                    }
                }
            }
        }

        wait_for_copies<1>(); // V is there; the next K may be under way
        __syncthreads();
        if (more)
            copy_rows<kHead, S::kThreads>(v_rows + (stage ^ 1) * stage_bytes, v_from, next_key, args.tile, end, args.width);
        end_of_copies();
        if (busy)
        {
            unsigned char const* const at = v_at + stage * stage_bytes;
#pragma unroll
            for (int k = 0; k < S::kKeys / 16; ++k)
            {
                if (first_key + 16 * k >= end_key)
                    break;
                float const(&low)[4] = scores[2 * k], (&high)[4] = scores[2 * k + 1];
                uint32_t const a[4]
                    = {pack_pair<T>(low[0], low[1]), pack_pair<T>(low[2], low[3]), pack_pair<T>(high[0], high[1]), pack_pair<T>(high[2], high[3])};
#pragma unroll
                for (int n = 0; n < kHead / 16; ++n)
                {
                    uint32_t b[4];
                    load_matrices_transposed(b, at + 16 * k * S::kPitch + 32 * n);
                    mma(sums[2 * n], a, b[0], b[1], T{});
                    mma(sums[2 * n + 1], a, b[2], b[3], T{});
                }
            }
        }
    }
    next_may_start();

    // The warps that shared the keys join their sums, [key warp][row][i], each with its maximum and total.
    auto* const joined = reinterpret_cast<float*>(shared);
    auto* const statistics = reinterpret_cast<float2*>(shared + kKeyWarps * S::kRows * S::kSumPitch * 4);
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i)
    {
        int const at = key_warp * S::kRows + 16 * row_warp + g + 8 * i;
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1);
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
        if (q == 0)
            statistics[at] = make_float2(most[i], total[i]);
#pragma unroll
        for (int n = 0; n < kHead / 8; ++n)
            *reinterpret_cast<float2*>(joined + at * S::kSumPitch + 8 * n + 2 * q) = make_float2(sums[n][2 * i], sums[n][2 * i + 1]);
    }
    __syncthreads();

    constexpr int kParts = kHead / 8;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < S::kRows * kParts; i += S::kThreads)
    {
        int const of = i / kParts, part = i % kParts;
        if (first_row + of >= args.queries || 8 * part >= args.width)
            continue;
        float highest = kNone, all = 0.0f, values[8] = {};
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w)
            highest = fmaxf(highest, statistics[w * S::kRows + of].x);
        float const base = highest == kNone ? 0.0f : highest;
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w)
        {
            float2 const own = statistics[w * S::kRows + of];
            float const weight = exp2_approximate((own.x - base) * to_exponent);
            all += weight * own.y;
            auto const* const from = reinterpret_cast<float4 const*>(joined + (w * S::kRows + of) * S::kSumPitch + 8 * part);
            float4 const a = from[0], b = from[1];
            float const given[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 8; ++j)
                values[j] += weight * given[j];
        }
        if (args.splits > 1)
        {
            int64_t const to = (int64_t{split} * (gridDim.x / args.tiles / args.splits) + batch_head) * args.queries + first_row + of;
            auto* const place = reinterpret_cast<float4*>(args.partial + to * args.width + 8 * part);
            place[0] = make_float4(values[0], values[1], values[2], values[3]);
            place[1] = make_float4(values[4], values[5], values[6], values[7]);
            if (part == 0)
                args.statistics[to] = make_float2(highest, all);
            continue;
        }
        finish(values, all, args);
        Vector<T, 8> packed;
        pack(values, packed);
        T* const to = args.output.data + batch * args.output.batch + (first_row + of) * args.output.row + head * args.output.head;
        store(to, part, packed);
    }
}

// The results of blocks that shared the keys: a thread for each 8 elements of the output.
template <typename T>
__global__ void __launch_bounds__(128) join_attention(__grid_constant__ AttentionArgs<T> const args)
{
    wait_for_kernel_before();
    int const parts = args.width / 8;
    int64_t const rows = args.count / parts;
    int64_t const i = int64_t{blockIdx.x} * 128 + threadIdx.x;
    if (i >= args.count)
        return;
    int64_t const of = i / parts;
    int const part = static_cast<int>(i % parts);
    float highest = kNone, all = 0.0f, values[8] = {};
    for (int s = 0; s < args.splits; ++s)
        highest = fmaxf(highest, args.statistics[s * rows + of].x);
    float const base = highest == kNone ? 0.0f : highest;
    float const to_exponent = args.added[0].batches || args.keep.batches ? kLog2E : 1.0f;
    for (int s = 0; s < args.splits; ++s)
    {
        float2 const own = args.statistics[s * rows + of];
        float const weight = exp2_approximate((own.x - base) * to_exponent);
        all += weight * own.y;
        auto const* const from = reinterpret_cast<float4 const*>(args.partial + (s * rows + of) * args.width + 8 * part);
        float4 const a = from[0], b = from[1];
        float const given[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
            values[j] += weight * given[j];
    }
    finish(values, all, args);
    Vector<T, 8> packed;
    pack(values, packed);
    int const row = static_cast<int>(of % args.queries);
    int const batch_head = static_cast<int>(of / args.queries);
    T* const to = args.output.data + batch_head / args.heads * args.output.batch + row * args.output.row
        + batch_head % args.heads * args.output.head;
    store(to, part, packed);
}
} // namespace onnxfuse
