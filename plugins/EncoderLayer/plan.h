// How the products of an encoder layer are shared out over the blocks of a GPU. Plain C++: nothing here knows of CUDA.
//
// A product is [rows, K] x [K, N]. Rows go in blocks of 64, K in chunks of 64, N in tiles of 8. A cluster has one slice of the tiles; its
// blocks divide K into parts, and rows. Weights lie by chunk, then tile, so that every division reads contiguous memory and the packed
// weights know nothing of it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace onnxfuse::encoder
{
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowBlock = 64;
constexpr int kChunk = 64;
constexpr int kChunkBytes = kRowBlock * kChunk * 2; // of 64 rows of activations
constexpr int kTileBytes = 8 * kChunk * 2;          // of 8 columns of weights
constexpr int kMaxStages = 16;
constexpr int kMaxTiles = 16; // of a slice
constexpr int kTurns = 4;                          // of chunks in shared memory
constexpr int kJoined = kMaxTiles + 1;             // places of a row where its statistics by tiles are joined: odd, for the banks
constexpr int kProducts = 4;
enum ProductKind
{
    kQkv = 0,
    kProjection = 1,
    kInner = 2,
    kOuter = 3
};

struct ProductPlan
{
    int tiles;  // N / 8
    int chunks; // K / 64
    int slices; // of the tiles
    int groups; // clusters that share a slice, each with its own rows
    int parts;  // of K in a cluster: 1, 2 or 4
    int blocks; // row blocks that a CTA takes at a time: 1 or 2
    int passes; // times that it takes some
    int wide;   // tiles of a warpgroup, rounded up to what is compiled
    int stages; // chunks in shared memory
    int stage_bytes;
    int per;    // chunks of a turn: between two synchronisations of the block
    // What spares blocks divisions.
    int each, extra;       // tiles of a slice; the first `extra` slices have one more
    int chunk_share;       // of a part: the first `chunk_extra` have one more
    int chunk_extra;
    unsigned by_groups;    // x / groups is x * by_groups >> 16, for x < 132
};

struct SharedPlan
{
    int ring, sums, vectors, vector_bytes, statistics, partial, barriers, total;
};

struct Plan
{
    ProductPlan product[kProducts];
    SharedPlan shared;
    int cluster;  // blocks of a cluster
    int clusters;
    int padded;   // rows of a sequence, a multiple of 16
    unsigned by_tiles, by_heads; // x / (padded / 16) and x / heads, as above with 24 bits, for x < 8192
    int used;     // batch * padded
    int rows;     // allocated: a multiple of 64
};

// Wishes for tests and measurements; 0 leaves the choice to the plan.
struct Wishes
{
    int parts[kProducts];
    int blocks[kProducts];
    int per;
    int stages;
};

constexpr int ceil_of(int a, int b)
{
    return (a + b - 1) / b;
}
constexpr int wide_for(int tiles)
{
    for (int wide : {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16})
    {
        if (tiles <= wide)
            return wide;
    }
    return 0;
}
constexpr int sums_bytes(ProductPlan const& p)
{
    return p.blocks * 2048 * ceil_of(p.tiles, p.slices);
}

// What a kernel that is compiled for a shape takes for granted: a GPU of sm_90 with 132 multiprocessors, as H100 SXM, H200 and GH200 have
// them. One with less runs the general kernel.
constexpr int kCompiledShared = 227 * 1024;
constexpr int compiled_clusters(int cluster)
{
    return cluster == 2 ? 66 : 120 / cluster; // one of 2 has a TPC to itself; of 4, 30 find room on an H200
}
// Blocks of a cluster. Measured on an H200: bert-base at 1 x 512 takes 937 us with 2 and 1116 with 4, at 1 x 128 391 and 345, ViT-S at
// 1 x 197 303 and 300. Slices of widths above 480 tiles, as bert-large has them, need more clusters than there are of 4.
constexpr int cluster_for(int batch, int sequence, int width, int inner)
{
    bool const wide = std::max(3 * width, inner) / 8 > kMaxTiles * compiled_clusters(4);
    return wide || batch * ceil_of(sequence, 16) * 16 >= 512 ? 2 : 4;
}

// Clocks of a product, roughly: what makes divisions comparable. The rates are those measured on an H200: an SM loads 45 bytes of
// activations and 33 of weights a clock, multiplies at two thirds of its peak, and sends sums at 20 bytes a clock.
constexpr double clocks_of(ProductPlan const& p)
{
    double const n = ceil_of(p.tiles, p.slices), k = ceil_of(p.chunks, p.parts);
    double const activations = p.blocks * kChunkBytes / 45.0, product = p.blocks * n * 8 * 64 * 64 / 1300.0;
    double const weights = k * n * kTileBytes / 33.0;
    double const sums = p.parts > 1 ? 500 + p.blocks * n * 2048 * (p.parts - 1) / p.parts / 20.0 : 150;
    double const finish = ceil_of(p.blocks * 4 / p.parts * static_cast<int>(n), kWarps) * 180.0;
    return p.passes * (k * std::max(activations, product) + sums + finish) + 0.35 * weights + 0.3 * k * activations;
}

// The ring gets what the rest leaves; false where not even two stages fit.
constexpr bool fit_ring(ProductPlan& p, int ring_bytes, Wishes const& wishes)
{
    int const chunks = ceil_of(p.chunks, p.parts);
    p.stage_bytes = p.blocks * kChunkBytes + ceil_of(p.tiles, p.slices) * kTileBytes;
    int const most = std::min(kMaxStages, wishes.stages ? std::min(wishes.stages, ring_bytes / p.stage_bytes) : ring_bytes / p.stage_bytes);
    bool const whole = most >= chunks;
    // Turns of three chunks at least: bert-base at 1 x 128 takes 338 us then, and 345 with one or two.
    p.per = whole ? std::min(chunks, std::max(3, ceil_of(chunks, kTurns))) : most / kTurns;
    if (whole && wishes.per)
        p.per = std::min(chunks, std::max(p.per, wishes.per));
    p.stages = whole ? chunks : p.per * kTurns;
    return p.per > 0;
}

// The best division of one product, or one without slices where there is none.
constexpr ProductPlan divide(int tiles, int chunks, int row_blocks, int cluster, int clusters, int ring_bytes, int wanted_parts, int wanted_blocks,
    Wishes const& wishes)
{
    ProductPlan best{};
    double least = 0;
    for (int parts = 1; parts <= std::min(4, cluster); parts *= 2)
    {
        if (parts > chunks || (wanted_parts && parts != wanted_parts))
            continue;
        for (int blocks = 1; blocks <= 2; ++blocks)
        {
            if (wanted_blocks && blocks != wanted_blocks)
                continue;
            for (int groups = 1; groups <= clusters && groups <= 16; ++groups)
            {
                ProductPlan p{};
                p.tiles = tiles;
                p.chunks = chunks;
                p.groups = groups;
                p.parts = parts;
                p.blocks = blocks;
                p.slices = std::min(tiles, clusters / groups);
                int const slots = groups * (cluster / parts);
                p.passes = ceil_of(row_blocks, slots * blocks);
                p.each = tiles / p.slices;
                p.extra = tiles % p.slices;
                p.chunk_share = chunks / parts;
                p.chunk_extra = chunks % parts;
                p.by_groups = 65536u / static_cast<unsigned>(groups) + 1;
                int const most = ceil_of(tiles, p.slices);
                p.wide = wide_for(blocks == 2 ? most : ceil_of(most, 2));
                if (most > kMaxTiles || !p.wide || !fit_ring(p, ring_bytes - sums_bytes(p), wishes))
                    continue;
                double const clocks = clocks_of(p);
                if (best.slices == 0 || clocks < least)
                {
                    best = p;
                    least = clocks;
                }
            }
        }
    }
    return best;
}

// False where the problem does not fit: too wide for the shared memory, or too many row statistics for a thread.
constexpr bool make_plan(
    int batch, int sequence, int width, int inner, int heads, int cluster, int clusters, int shared_bytes, Wishes const& wishes, Plan& plan)
{
    plan = {};
    plan.cluster = cluster;
    plan.clusters = clusters;
    plan.padded = ceil_of(sequence, 16) * 16;
    plan.used = batch * plan.padded;
    plan.by_tiles = (1u << 24) / static_cast<unsigned>(plan.padded / 16) + 1;
    plan.by_heads = (1u << 24) / static_cast<unsigned>(heads) + 1;
    int const row_blocks = ceil_of(plan.used, kRowBlock);
    int const n[kProducts] = {3 * width, width, inner, width}, k[kProducts] = {width, width, width, inner};
    int const kFixed = 2 * 3 * kMaxTiles * 32 + 1024 + 128 * kJoined * 8 + 256; // what follows the sums, at most
    int const for_ring = shared_bytes - kFixed;
    int sums = plan.padded * 32 + 6144; // attention's probabilities and what its warps join
    for (int f = 0; f < kProducts; ++f)
    {
        ProductPlan& p = plan.product[f];
        p = divide(n[f] / 8, k[f] / kChunk, row_blocks, cluster, clusters, for_ring, wishes.parts[f], wishes.blocks[f], wishes);
        if (p.slices == 0)
            return false;
        sums = std::max(sums, sums_bytes(p));
        plan.rows = std::max(plan.rows, p.groups * (cluster / p.parts) * p.blocks * p.passes * kRowBlock);
    }
    int partial = 0, most_tiles = 0;
    for (int f = 0; f < kProducts; ++f)
    {
        ProductPlan& p = plan.product[f];
        if (!fit_ring(p, for_ring - sums, wishes))
            return false;
        int const owned = p.blocks * kRowBlock / p.parts, most = ceil_of(p.tiles, p.slices);
        most_tiles = std::max(most_tiles, most);
        if (f == kProjection || f == kOuter)
            partial = std::max(partial, owned * kJoined * 8);
        // Statistics of a row come from every slice of the product before; at most 16 a thread.
        int const before = f == kQkv || f == kProjection ? kOuter : kProjection;
        if (ceil_of(plan.product[before].slices, kThreads / owned) > 16)
            return false;
    }
    SharedPlan& s = plan.shared;
    auto take = [&](int bytes) {
        int const at = s.total;
        s.total += ceil_of(bytes, 128) * 128;
        return at;
    };
    s.vector_bytes = 3 * most_tiles * 32;
    int const rest = ceil_of(2 * s.vector_bytes, 128) * 128 + 1024 + ceil_of(partial, 128) * 128 + 256;
    s.ring = take((shared_bytes - sums - rest) / 128 * 128);
    s.sums = take(sums);
    s.vectors = take(2 * s.vector_bytes);
    s.statistics = take(1024);
    s.partial = take(partial);
    s.barriers = take(256);
    for (ProductPlan& p : plan.product)
    {
        if (!fit_ring(p, s.sums - s.ring, wishes))
            return false;
    }
    return s.total <= shared_bytes;
}
} // namespace onnxfuse::encoder
