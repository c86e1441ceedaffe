// Transformer encoder layers, one after the other, in one launch.
//
// A layer has five phases with a grid barrier between them: products with the weights of Q, K and V; attention; the projection; the inner
// and the outer product of the feed-forward network. Blocks come in clusters. In a product a cluster has a slice of the columns and its
// blocks divide k and the rows; sums of parts of k go to the block that owns their rows through distributed shared memory. Weights of the
// next product are asked for as soon as those of this one are used up, so that they come while blocks wait for each other.
//
// Norms are folded: W holds gamma W, and with the statistics of a row the product of its norm is rstd (s W - mean sum(W)) + bias + beta W,
// where s is the row as it lies in memory. A block that writes columns of s leaves the mean of its columns and the sum of squares about
// it; whoever needs the row's statistics joins them (Chan, Golub and LeVeque 1979). Nothing is subtracted that is large and equal.
//
// Activations lie as the tensor cores read them without swizzle: [64 rows][8 columns][8 rows] of 8 x 16 bytes. Q, K and V lie as the
// registers of mma have them: [16 columns][16 rows] of 32 lanes x 16 bytes. The rows of a sequence are padded to a multiple of 16.
#pragma once

#include "arguments.h"
#include "device.cuh"

namespace onnxfuse::encoder
{
// What a block has of a product.
struct Task
{
    int active, tile, tiles, chunk, chunks, slot, part, row_part, slice;
};

template <typename T>
class Encoder
{
    Args<T> const& a_;
    unsigned char* const shared_;
    int const thread_ = static_cast<int>(threadIdx.x);
    int const warp_ = __shfl_sync(~0u, thread_ / 32, 0); // so that the compiler knows that a warp has one
    int const lane_ = thread_ % 32, g_ = lane_ / 4, q_ = lane_ % 4;
    int const rank_, cluster_;
    Patience patience_;
    unsigned round_ = 0;
    unsigned parities_ = 0; // of the stages' barriers
    int sums_parity_ = 0;
    int use_ = 0; // of weights, for the two places of vectors
    int step_ = 0, stamps_ = 0;

public:
    __device__ Encoder(Args<T> const& args, unsigned char* shared)
        : a_(args)
        , shared_(shared)
        , rank_(static_cast<int>(blockIdx.x) % args.plan.cluster)
        , cluster_(static_cast<int>(blockIdx.x) / args.plan.cluster)
        , patience_(args.fault)
    {
    }

    __device__ __forceinline__ void run()
    {
        prepare();
        prefetch(0, kQkv);
        int layer = 0;
#pragma unroll 1
        for (; layer < a_.layers; ++layer)
        {
#pragma unroll 1
            for (int f = 0; f < kProducts; ++f)
            {
                if (f == kProjection)
                {
                    begin(true);
                    stamp(2);
                    if (a_.skip == 0)
                        attend_all();
                    stamp(3);
                    end();
                }
                begin(layer > 0 || f > 0);
                multiply(layer, f);
                end();
            }
        }
        if (a_.final_gamma)
        {
            begin(true);
            normalise();
        }
        leave();
    }

private:
    // --- shared memory -------------------------------------------------------------------------------------------------

    __device__ __forceinline__ Task& task(int f) const
    {
        return reinterpret_cast<Task*>(shared_ + a_.plan.shared.tasks)[f];
    }
    // Of a block, by numbers that the compiler knows to be the same in all its threads: it multiplies in the background only then.
    __device__ __forceinline__ Task task_here(int f) const
    {
        Plan const& plan = a_.plan;
        ProductPlan const& p = plan.product[f];
        int const log_parts = p.parts >> 1; // of 1, 2 and 4
        Task t;
        t.slice = cluster_ / p.groups;
        t.part = rank_ & p.parts - 1;
        t.row_part = rank_ >> log_parts;
        t.slot = cluster_ % p.groups * (plan.cluster >> log_parts) + t.row_part;
        t.tile = first_of(t.slice, p.tiles, p.slices);
        t.tiles = first_of(t.slice + 1, p.tiles, p.slices) - t.tile;
        t.chunk = t.part * p.chunks >> log_parts;
        t.chunks = ((t.part + 1) * p.chunks >> log_parts) - t.chunk;
        t.active = t.slice < p.slices && t.slot * p.blocks * kRowBlock < plan.used;
        return t;
    }
    __device__ __forceinline__ uint64_t* full(int stage) const
    {
        return reinterpret_cast<uint64_t*>(shared_ + a_.plan.shared.barriers) + stage;
    }
    __device__ __forceinline__ uint64_t* sums_full() const
    {
        return full(kMaxStages);
    }
    __device__ __forceinline__ unsigned char* sums() const
    {
        return shared_ + a_.plan.shared.sums;
    }
    __device__ __forceinline__ float2* statistics() const
    {
        return reinterpret_cast<float2*>(shared_ + a_.plan.shared.statistics);
    }
    __device__ __forceinline__ float2* partial() const
    {
        return reinterpret_cast<float2*>(shared_ + a_.plan.shared.partial);
    }
    __device__ __forceinline__ float* counts(int which) const
    {
        return reinterpret_cast<float*>(shared_ + a_.plan.shared.counts) + which * a_.plan.clusters;
    }

    static __device__ __forceinline__ int first_of(int i, int all, int shares)
    {
        return static_cast<int>(static_cast<unsigned>(i) * static_cast<unsigned>(all) / static_cast<unsigned>(shares));
    }

    __device__ __forceinline__ void prepare()
    {
        Plan const& plan = a_.plan;
        if (thread_ == 0)
        {
            for (int i = 0; i <= kMaxStages; ++i)
                barrier_init(full(i));
            barrier_init_done();
        }
        if (thread_ >= 32 && thread_ < 32 + kProducts)
        {
            int const f = thread_ - 32;
            task(f) = task_here(f);
        }
        // Columns that stand behind each mean.
        for (int i = thread_; i < 2 * plan.clusters; i += kThreads)
        {
            int const which = i / plan.clusters, slice = i % plan.clusters;
            ProductPlan const& p = plan.product[which ? kOuter : kProjection];
            if (slice < p.slices)
                counts(which)[slice] = 8.0f * static_cast<float>(first_of(slice + 1, p.tiles, p.slices) - first_of(slice, p.tiles, p.slices));
        }
        __syncthreads();
        if (plan.cluster > 1)
            cluster_sync();
    }

    // --- between phases ------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void stamp(int i)
    {
        if (a_.profile && thread_ == 0)
            a_.profile[(static_cast<int64_t>(blockIdx.x) * (5 * a_.layers + 2) + step_) * 7 + i] = clock_now();
    }
    __device__ __forceinline__ int arrivals() const
    {
        return a_.barrier == 1 || a_.barrier == 2 ? kWarps : 1;
    }
    // Waits until all blocks have ended the phase before.
    __device__ __forceinline__ void begin(bool wait)
    {
        stamp(0);
        if (wait)
        {
            unsigned const wanted = ++round_ * gridDim.x * arrivals();
            if (a_.barrier == 2)
            {
                // All lanes: where one alone waits, the compiler no longer believes that a warp goes together.
                wait_count(a_.count, wanted, patience_, 100 + step_ % 5);
                __syncwarp();
            }
            else
            {
                if (thread_ == 0)
                    wait_count(a_.count, wanted, patience_, 100 + step_ % 5);
                __syncthreads();
            }
        }
        stamp(1);
    }
    // Tells all blocks that this one has written what it has to. 0: one thread for the block; 1: a thread a warp; 2: that, and a thread a
    // warp waits; 3: every thread fences for itself.
    __device__ __forceinline__ void end()
    {
        stamp(5);
        if (a_.barrier == 1 || a_.barrier == 2)
        {
            __syncwarp();
            if (lane_ == 0)
                count_release(a_.count);
            __syncwarp();
        }
        else if (a_.barrier == 3)
        {
            fence_gpu();
            __syncthreads();
            if (thread_ == 0)
                count_relaxed(a_.count);
        }
        else
        {
            __syncthreads();
            if (thread_ == 0)
                count_release(a_.count);
        }
        stamp(6);
        ++step_;
    }
    __device__ __forceinline__ void leave()
    {
        stamp(6);
        // Nobody waits for `count` after its last grid barrier; the block that leaves last puts it back.
        if (a_.restore)
        {
            __syncthreads();
            if (thread_ == 0 && count_and_ask(a_.count + 1) == gridDim.x - 1)
            {
                store_relaxed(a_.count, 0);
                store_relaxed(a_.count + 1, 0);
            }
        }
        if (a_.plan.cluster > 1)
            cluster_sync(); // nobody leaves while others may send to it
    }

    // --- loads ---------------------------------------------------------------------------------------------------------

    __device__ __forceinline__ int vectors_of(int f) const
    {
        return f == kProjection || f == kOuter ? 3 : 2;
    }
    __device__ __forceinline__ void load_weights(int layer, int f, Task const& t, int chunk, int stage, int more)
    {
        ProductPlan const& p = a_.plan.product[f];
        unsigned char const* const from
            = a_.weights + layer * a_.weights_step + a_.weight_at[f] + (static_cast<int64_t>(t.chunk + chunk) * p.tiles + t.tile) * kTileBytes;
        int const bytes = t.tiles * kTileBytes;
        barrier_expect(full(stage), bytes + more);
        bulk_load(shared_ + stage * p.stage_bytes + p.blocks * kChunkBytes, from, bytes, full(stage));
    }
    // Asks for the first weights of a product and for its vectors. The ring must be free.
    __device__ __forceinline__ void prefetch(int layer, int f)
    {
        ++use_;
        if (thread_ != 0)
            return;
        Task const t = task(f);
        if (!t.active)
            return;
        ProductPlan const& p = a_.plan.product[f];
        int const count = vectors_of(f), bytes = t.tiles * 32;
        unsigned char const* const vectors = a_.vectors + layer * a_.vectors_step + a_.vector_at[f] + t.tile * 32;
        unsigned char* const to = shared_ + a_.plan.shared.vectors + (use_ & 1) * a_.plan.shared.vector_bytes;
        for (int s = 0; s < min(p.stages, t.chunks); ++s)
            load_weights(layer, f, t, s, s, s == 0 ? count * bytes : 0);
        for (int i = 0; i < count; ++i)
            bulk_load(to + i * bytes, vectors + static_cast<int64_t>(i) * p.tiles * 32, bytes, full(0));
    }
    // The row of x behind a padded row; negative: none.
    __device__ __forceinline__ int row_of_x(int row) const
    {
        int const b = row / a_.plan.padded, s = row - b * a_.plan.padded;
        return b < a_.batch && s < a_.sequence ? b * a_.sequence + s : -1;
    }
    // `from`: activations; null: x.
    __device__ __forceinline__ void load_chunk(int f, unsigned char const* from, int first_block, int chunk, int stage)
    {
        ProductPlan const& p = a_.plan.product[f];
        unsigned char* const to = shared_ + stage * p.stage_bytes;
#pragma unroll 1
        for (int b = 0; b < p.blocks; ++b)
        {
            if (from)
            {
                unsigned char const* const source = from + (static_cast<int64_t>(first_block + b) * p.chunks + chunk) * kChunkBytes;
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    copy_async(to + b * kChunkBytes + (i * kThreads + thread_) * 16, source + (i * kThreads + thread_) * 16);
            }
            else
            {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                {
                    int const piece = i * kThreads + thread_, column = piece % 8, row = piece / 8;
                    int const there = row_of_x((first_block + b) * kRowBlock + row);
                    T const* const source = a_.x + static_cast<int64_t>(max(there, 0)) * a_.width + chunk * kChunk + column * 8;
                    copy_async(to + b * kChunkBytes + column * 1024 + row * 16, source, there >= 0);
                }
            }
        }
        copy_commit();
    }
    static __device__ __forceinline__ void copy_wait_for(int left)
    {
        switch (left)
        {
        case 0: return copy_wait<0>();
        case 1: return copy_wait<1>();
        case 2: return copy_wait<2>();
        case 3: return copy_wait<3>();
        case 4: return copy_wait<4>();
        case 5: return copy_wait<5>();
        case 6: return copy_wait<6>();
        case 7: return copy_wait<7>();
        case 8: return copy_wait<8>();
        default: return left < 11 ? copy_wait<9>() : copy_wait<11>();
        }
    }

    // --- statistics of rows --------------------------------------------------------------------------------------------

    // A row block's four tiles of 16 rows are shared out over the parts of k: 4, 2 or 1 for each, as a power of two.
    static __device__ __forceinline__ int share_shift(ProductPlan const& p)
    {
        return 2 - p.parts / 2;
    }
    // Threads that join the statistics of a row, as a power of two.
    static __device__ __forceinline__ int threads_shift(ProductPlan const& p)
    {
        return 3 + p.parts / 2 - p.blocks;
    }
    // 16 rows of which this block has the sums, by their order in the block.
    __device__ __forceinline__ int row_tile(ProductPlan const& p, Task const& t, int first_block, int index) const
    {
        int const shift = share_shift(p), each = 1 << shift;
        return (first_block + (index >> shift)) * 4 + t.part * each + (index & each - 1);
    }
    // Asks for the statistics that this thread joins; afterwards finish_statistics().
    __device__ __forceinline__ void load_statistics(ProductPlan const& p, Task const& t, int first_block, int which, uint2 (&loaded)[16])
    {
        int const shift = threads_shift(p), each = 1 << shift, local = thread_ >> shift, j = thread_ & each - 1;
        int const row = row_tile(p, t, first_block, local / 16) * 16 + local % 16;
        int const slices = a_.plan.product[which ? kOuter : kProjection].slices;
#pragma unroll
        for (int k = 0; k < 16; ++k)
        {
            int const slice = j + k * each;
            loaded[k] = make_uint2(0, 0);
            if (slice < slices)
                loaded[k] = load_fresh(reinterpret_cast<uint2 const*>(a_.statistics[which] + static_cast<int64_t>(slice) * a_.plan.rows + row));
        }
    }
    __device__ __forceinline__ void finish_statistics(ProductPlan const& p, int which, uint2 const (&loaded)[16])
    {
        int const shift = threads_shift(p), each = 1 << shift, local = thread_ >> shift, j = thread_ & each - 1;
        int const slices = a_.plan.product[which ? kOuter : kProjection].slices;
        float const inverse = 1.0f / static_cast<float>(a_.width);
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < 16; ++k)
        {
            if (j + k * each < slices)
                total += counts(which)[j + k * each] * __uint_as_float(loaded[k].x);
        }
        for (int m = 1; m < each; m <<= 1)
            total += __shfl_xor_sync(~0u, total, m);
        float const mean = total * inverse;
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < 16; ++k)
        {
            if (j + k * each < slices)
            {
                float const off = __uint_as_float(loaded[k].x) - mean;
                squares += __uint_as_float(loaded[k].y) + counts(which)[j + k * each] * off * off;
            }
        }
        for (int m = 1; m < each; m <<= 1)
            squares += __shfl_xor_sync(~0u, squares, m);
        if (j == 0)
            statistics()[local] = make_float2(mean, rsqrtf(squares * inverse + a_.epsilon));
    }
    // Mean and 1 / deviation of 8 `pieces` values a lane, all of a row of a warp.
    template <int kPieces>
    __device__ __forceinline__ float2 moments(float const (&v)[kPieces][8], int pieces) const
    {
        float const inverse = 1.0f / static_cast<float>(a_.width);
        float total = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
        {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                total += v[i][e];
        }
        for (int m = 1; m < 32; m <<= 1)
            total += __shfl_xor_sync(~0u, total, m);
        float const mean = total * inverse;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
        {
#pragma unroll
            for (int e = 0; e < 8; ++e)
            {
                float const off = v[i][e] - mean;
                squares += lane_ + 32 * i < pieces ? off * off : 0.0f;
            }
        }
        for (int m = 1; m < 32; m <<= 1)
            squares += __shfl_xor_sync(~0u, squares, m);
        return make_float2(mean, rsqrtf(squares * inverse + a_.epsilon));
    }
    static __device__ __forceinline__ void widen8(uint4 const& from, float (&to)[8])
    {
        uint32_t const words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            float2 const pair = unpack2<T>(words[i]);
            to[2 * i] = pair.x;
            to[2 * i + 1] = pair.y;
        }
    }
    // Those of x itself, a row a warp.
    __device__ __forceinline__ void statistics_of_x(ProductPlan const& p, Task const& t, int first_block)
    {
        int const rows = p.blocks * kRowBlock / p.parts, pieces = a_.width / 8;
#pragma unroll 1
        for (int local = warp_; local < rows; local += kWarps)
        {
            int const row = row_of_x(row_tile(p, t, first_block, local / 16) * 16 + local % 16);
            float v[4][8];
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                uint4 piece = make_uint4(0, 0, 0, 0);
                if (row >= 0 && lane_ + 32 * i < pieces)
                    piece = reinterpret_cast<uint4 const*>(a_.x + static_cast<int64_t>(row) * a_.width)[lane_ + 32 * i];
                widen8(piece, v[i]);
            }
            float2 const s = moments(v, pieces);
            if (lane_ == 0)
                statistics()[local] = s;
        }
    }

    // --- products ------------------------------------------------------------------------------------------------------

    // The sums of this block's part of k, on their way to those that own the rows.
    struct Sums
    {
        int layer, f, first_block;
        bool load;     // whether weights are on their way
        int next;      // what to ask for afterwards: layer * 4 + product; negative: nothing
        int which;     // statistics to finish: 0 or 1; negative: none
    };
    template <int kWide, bool kRefills>
    __device__ __forceinline__ void multiply_chunks(
        Sums const& what, Task const& t, unsigned char const* from, float (&c)[kWide][4], int group, int chunks, int a_at, int b_at)
    {
        int const f = what.f;
        ProductPlan const& p = a_.plan.product[f];
        int committed = min(p.stages, chunks), stage = 0, freed = 0, i = 0;
        product_fence();
#pragma unroll 1
        do // there is a chunk
        {
            int const last = min(i + p.per, chunks);
            copy_wait_for(committed - last);
            before_async_reads();
            int s = stage;
            if (what.load || i >= p.stages)
            {
                for (int k = i; k < last; ++k)
                {
                    barrier_wait(full(s), parities_ >> s & 1, patience_, 10 + f);
                    parities_ ^= 1u << s;
                    s = s + 1 == p.stages ? 0 : s + 1;
                }
            }
            __syncthreads();
            product_fence();
            int k = i;
#pragma unroll 1
            do
            {
                unsigned char* const at = shared_ + stage * p.stage_bytes;
                Operand a(at + a_at, 1024, 128), b(at + b_at, 128, kTileBytes);
#pragma unroll
                for (int step = 0; step < kChunk / 16; ++step)
                {
                    if constexpr (kWide <= 8)
                        Product<T, kWide>::add(c, a, b);
                    else
                    {
                        Product<T, kWide / 2>::add(c, a, b);
                        Operand upper = b;
                        upper.advance(kWide / 2 * kTileBytes);
                        Product<T, kWide / 2>::add(c + kWide / 2, a, upper);
                    }
                    a.advance(2048);
                    b.advance(256);
                }
                stage = stage + 1 == p.stages ? 0 : stage + 1;
            } while (++k < last);
            product_commit();
            if constexpr (kRefills)
            {
                // All warps have passed the barrier above, and so have done with what they multiplied two turns ago.
                for (int free = i - p.per; freed < free && freed + p.stages < chunks; ++freed)
                {
                    int const to = freed % p.stages;
                    if (thread_ == 0)
                        load_weights(what.layer, f, t, freed + p.stages, to, 0);
                    load_chunk(f, from, what.first_block, t.chunk + freed + p.stages, to);
                    ++committed;
                }
                product_wait<1>();
            }
            i += p.per;
        } while (i < chunks);
        product_wait<0>();
    }
    template <int kWide>
    __device__ __forceinline__ void products(Sums const& what, Task const& t, unsigned char const* from, uint2 const (&loaded)[16])
    {
        int const f = what.f;
        ProductPlan const& p = a_.plan.product[f];
        int const group = warp_ / 4;
        int const half = (t.tiles + 1) / 2;
        int const tile0 = p.blocks == 2 ? 0 : group * half;
        int const tiles = p.blocks == 2 ? t.tiles : group ? t.tiles - half : half;
        int const a_at = p.blocks == 2 ? group * kChunkBytes : 0, b_at = p.blocks * kChunkBytes + tile0 * kTileBytes;
        float c[kWide][4];
#pragma unroll
        for (int j = 0; j < kWide; ++j)
        {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                c[j][e] = 0.0f;
        }
        // As t.chunks, in a way that shows the compiler that all threads have the same.
        int const log_parts = p.parts >> 1, part = rank_ & p.parts - 1;
        int const chunks = ((part + 1) * p.chunks >> log_parts) - (part * p.chunks >> log_parts);
        if (chunks > p.stages)
            multiply_chunks<kWide, true>(what, t, from, c, group, chunks, a_at, b_at);
        else
            multiply_chunks<kWide, false>(what, t, from, c, group, chunks, a_at, b_at);
        stamp(3);
        if (what.which >= 0)
            finish_statistics(p, what.which, loaded);
        __syncthreads();
        if (what.next >= 0)
            prefetch(what.next / kProducts, what.next % kProducts);

        int const shift = share_shift(p), each = 1 << shift, row_tile_of_warp = warp_ % 4, owner = row_tile_of_warp >> shift;
        int const units = p.blocks * each * t.tiles, block = p.blocks == 2 ? group : 0;
        int const first = t.part * units + (block * each + (row_tile_of_warp & each - 1)) * t.tiles + tile0;
        unsigned char* const to = sums() + first * 512 + lane_ * 16;
        if (owner == t.part)
        {
#pragma unroll
            for (int j = 0; j < kWide; ++j)
            {
                if (j < tiles)
                    *reinterpret_cast<float4*>(to + j * 512) = make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
            }
        }
        else
        {
            int const there = t.row_part * p.parts + owner;
            Remote const far = remote(to, there), barrier = remote(sums_full(), there);
#pragma unroll
            for (int j = 0; j < kWide; ++j)
            {
                if (j < tiles)
                    send(far + j * 512, barrier, make_float4(c[j][0], c[j][1], c[j][2], c[j][3]));
            }
        }
    }
    __device__ __forceinline__ void products_of(Sums const& what, Task const& t, unsigned char const* from, uint2 const (&loaded)[16])
    {
        switch (a_.plan.product[what.f].wide)
        {
#ifndef ONNXFUSE_QUICK
        case 1: return products<1>(what, t, from, loaded);
        case 2: return products<2>(what, t, from, loaded);
        case 3: return products<3>(what, t, from, loaded);
        case 4: return products<4>(what, t, from, loaded);
        case 5: return products<5>(what, t, from, loaded);
        case 6: return products<6>(what, t, from, loaded);
        case 8: return products<8>(what, t, from, loaded);
        case 10: return products<10>(what, t, from, loaded);
        case 12: return products<12>(what, t, from, loaded);
        case 14: return products<14>(what, t, from, loaded);
        case 16: return products<16>(what, t, from, loaded);
#endif
        default: return products<7>(what, t, from, loaded);
        }
    }

    // Which statistics the rows of this product need: 0 or 1 left by other blocks; -1 none; -2 those of x itself.
    __device__ __forceinline__ int statistics_for(int layer, int f) const
    {
        if (f == kInner)
            return 0;
        if (f == kOuter)
            return a_.before ? -1 : 0;
        if (f == kProjection && a_.before)
            return -1;
        return layer > 0 ? 1 : a_.first_norm ? -2 : -1;
    }

    __device__ __forceinline__ void multiply(int layer, int f)
    {
        ProductPlan const& p = a_.plan.product[f];
        Task const t = task_here(f);
        int const following = f == kOuter ? (layer + 1 < a_.layers ? (layer + 1) * kProducts : -1) : layer * kProducts + f + 1;
        if (!t.active)
        {
            for (int pass = 1; pass < p.passes && p.parts > 1; ++pass)
                cluster_sync(); // as the others of the cluster
            if (following >= 0)
                prefetch(following / kProducts, following % kProducts);
            stamp(2);
            stamp(3);
            stamp(4);
            return;
        }
        unsigned char const* const from = f == kQkv ? (layer ? a_.outer : nullptr) : f == kProjection ? a_.context : f == kInner ? a_.middle : a_.inner;
        bool const whole = t.chunks <= p.stages;
        int const stride = p.groups * (a_.plan.cluster / p.parts) * p.blocks;
#pragma unroll 1
        for (int pass = 0, first = t.slot * p.blocks; pass < p.passes; ++pass, first += stride)
        {
            bool const last = pass + 1 == p.passes || (first + stride) * kRowBlock >= a_.plan.used;
            if (pass > 0 && p.parts > 1)
                cluster_sync(); // nobody sends while the sums of the pass before are read
            else if (pass > 0)
                __syncthreads();
            if (first * kRowBlock >= a_.plan.used)
                continue;
            int const which = statistics_for(layer, f);
            uint2 loaded[16];
            if (which >= 0 && a_.skip < 2)
                load_statistics(p, t, first, which, loaded);
            if (a_.skip < 2)
            {
                for (int k = 0; k < min(p.stages, t.chunks); ++k)
                    load_chunk(f, from, first, t.chunk + k, k);
            }
            uint32_t rest[4][2];
            int const units = (p.blocks << share_shift(p)) * t.tiles;
            if ((f == kProjection || f == kOuter) && a_.skip < 2)
                load_residual(p, t, layer, f, first, rest);
            if (which == -1 && thread_ < 128)
                statistics()[thread_] = make_float2(0.0f, 1.0f);
            if (which == -2)
                statistics_of_x(p, t, first);
            if (pass == 0)
                stamp(2);
            if (a_.skip >= 2)
            {
                wait_alone(t, p, f);
                __syncthreads();
                if (last && following >= 0)
                    prefetch(following / kProducts, following % kProducts);
                stamp(3);
                stamp(4);
                continue;
            }
            Sums const what{layer, f, first, pass == 0 || !whole, last ? following : whole ? -1 : layer * kProducts + f, which};
            products_of(what, t, from, loaded);
            if (p.parts > 1)
            {
                if (thread_ == 0)
                    barrier_expect(sums_full(), (p.parts - 1) * units * 512);
                barrier_wait_cluster(sums_full(), sums_parity_, patience_, 20 + f);
                sums_parity_ ^= 1;
            }
            __syncthreads();
            stamp(4);
            // prefetch() has gone on to the other place, if it asked for something.
            bool const asked = what.next >= 0;
            unsigned char const* const vectors
                = shared_ + a_.plan.shared.vectors + ((use_ - (asked ? 1 : 0)) & 1) * a_.plan.shared.vector_bytes;
            switch (f)
            {
            case kQkv: finish<kQkv>(p, t, layer, first, vectors, rest); break;
            case kInner: finish<kInner>(p, t, layer, first, vectors, rest); break;
            case kProjection: finish<kProjection>(p, t, layer, first, vectors, rest); break;
            default: finish<kOuter>(p, t, layer, first, vectors, rest); break;
            }
        }
    }
    // skip == 2: for measurements.
    __device__ __forceinline__ void wait_alone(Task const& t, ProductPlan const& p, int f)
    {
        for (int s = 0; s < min(p.stages, t.chunks); ++s)
        {
            barrier_wait(full(s), parities_ >> s & 1, patience_, 30 + f);
            parities_ ^= 1u << s;
        }
    }

    // Where two neighbours of a row lie in activations of `chunks` chunks.
    static __device__ __forceinline__ int64_t place(int tile16, int chunks, int column8, int lane)
    {
        return ((static_cast<int64_t>(tile16 >> 2) * chunks * 8 + column8) * 8 + (tile16 & 3) * 2) * 128 + lane * 4;
    }
    // Two neighbours of rows g and g + 8 of a tile.
    __device__ __forceinline__ void residual_of(int layer, int f, int tile16, int column8, uint32_t (&words)[2]) const
    {
        if (f == kProjection && layer == 0)
        {
#pragma unroll
            for (int h = 0; h < 2; ++h)
            {
                int const row = row_of_x(tile16 * 16 + g_ + 8 * h);
                words[h] = row < 0 ? 0u : *reinterpret_cast<uint32_t const*>(a_.x + static_cast<int64_t>(row) * a_.width + column8 * 8 + 2 * q_);
            }
            return;
        }
        unsigned char const* const at = (f == kProjection ? a_.outer : a_.middle) + place(tile16, a_.width / kChunk, column8, lane_);
        words[0] = load_fresh(reinterpret_cast<uint32_t const*>(at));
        words[1] = load_fresh(reinterpret_cast<uint32_t const*>(at + 128));
    }
    // Of the first four units of this warp.
    __device__ __forceinline__ void load_residual(
        ProductPlan const& p, Task const& t, int layer, int f, int first_block, uint32_t (&rest)[4][2]) const
    {
        int const units = (p.blocks << share_shift(p)) * t.tiles;
        int index = 0, tile = warp_;
#pragma unroll
        for (int k = 0; k < 4; ++k)
        {
            while (tile >= t.tiles)
            {
                tile -= t.tiles;
                ++index;
            }
            rest[k][0] = rest[k][1] = 0;
            if (warp_ + k * kWarps < units)
                residual_of(layer, f, row_tile(p, t, first_block, index), t.tile + tile, rest[k]);
            tile += kWarps;
        }
    }

    __device__ __forceinline__ float activate(float v) const
    {
        if (a_.activation == kRelu)
            return v > 0.0f || v != v ? v : 0.0f;
        if (a_.activation == kGeluTanh)
        {
            // 0.5 v (1 + tanh(u)) = v / (1 + exp(-2u))
            float const u = 0.7978845608f * (v + 0.044715f * v * v * v);
            return v * reciprocal_approximate(1.0f + exp2_approximate(-2.885390082f * u));
        }
        // erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
        float const x = fabsf(v) * 0.70710678f, t = reciprocal_approximate(1.0f + 0.3275911f * x);
        float const tail = t * (t * (t * (t * (t * 1.061405429f - 1.453152027f) + 1.421413741f) - 0.284496736f) + 0.254829592f)
            * exp2_approximate(-1.442695041f * x * x);
        return 0.5f * (v + fabsf(v) * (1.0f - tail));
    }
    __device__ __forceinline__ float over_quad(float v) const
    {
        v += __shfl_xor_sync(~0u, v, 1);
        return v + __shfl_xor_sync(~0u, v, 2);
    }
    // Mean of 8 columns and the sum of squares about it.
    __device__ __forceinline__ float2 moments_of_tile(float2 v) const
    {
        float const mean = over_quad(v.x + v.y) * 0.125f;
        return make_float2(mean, over_quad((v.x - mean) * (v.x - mean) + (v.y - mean) * (v.y - mean)));
    }

    // From sums to what the next phases read. A unit is 16 rows of 8 columns.
    template <int kF>
    __device__ __forceinline__ void finish(ProductPlan const& p, Task const& t, int layer, int first_block, unsigned char const* vectors, uint32_t const (&rest)[4][2])
    {
        constexpr bool kResidual = kF == kProjection || kF == kOuter;
        int const row_tiles = p.blocks << share_shift(p), units = row_tiles * t.tiles, rows = row_tiles * 16;
        int const tiles16 = a_.plan.rows / 16;
        bool const straight = kF == kOuter && layer + 1 == a_.layers && !a_.final_gamma; // into y
        int index = 0, tile = warp_;
#pragma unroll 1
        for (int unit = warp_, k = 0; unit < units; unit += kWarps, ++k, tile += kWarps)
        {
            while (tile >= t.tiles)
            {
                tile -= t.tiles;
                ++index;
            }
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int s = 0; s < p.parts; ++s)
            {
                float4 const part = *reinterpret_cast<float4 const*>(sums() + (s * units + unit) * 512 + lane_ * 16);
                v.x += part.x;
                v.y += part.y;
                v.z += part.z;
                v.w += part.w;
            }
            float2 const s0 = statistics()[index * 16 + g_], s1 = statistics()[index * 16 + 8 + g_];
            int const column = tile * 8 + 2 * q_;
            float2 const first = *reinterpret_cast<float2 const*>(vectors + column * 4);
            float2 const second = *reinterpret_cast<float2 const*>(vectors + t.tiles * 32 + column * 4);
            int const tile16 = row_tile(p, t, first_block, index), column8 = t.tile + tile;
            if constexpr (!kResidual)
            {
                float2 low = make_float2(s0.y * (v.x - s0.x * second.x) + first.x, s0.y * (v.y - s0.x * second.y) + first.y);
                float2 high = make_float2(s1.y * (v.z - s1.x * second.x) + first.x, s1.y * (v.w - s1.x * second.y) + first.y);
                if constexpr (kF == kQkv)
                {
                    unsigned char* const to = a_.qkv + (static_cast<int64_t>(column8 >> 1) * tiles16 + tile16) * 512 + lane_ * 16 + (column8 & 1) * 8;
                    *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(low.x, low.y), pack2<T>(high.x, high.y));
                }
                else
                {
                    unsigned char* const to = a_.inner + place(tile16, a_.inner_width / kChunk, column8, lane_);
                    *reinterpret_cast<uint32_t*>(to) = pack2<T>(activate(low.x), activate(low.y));
                    *reinterpret_cast<uint32_t*>(to + 128) = pack2<T>(activate(high.x), activate(high.y));
                }
            }
            else
            {
                float2 const third = *reinterpret_cast<float2 const*>(vectors + 2 * t.tiles * 32 + column * 4);
                uint32_t words[2];
                if (k < 4)
                {
                    words[0] = k == 0 ? rest[0][0] : k == 1 ? rest[1][0] : k == 2 ? rest[2][0] : rest[3][0];
                    words[1] = k == 0 ? rest[0][1] : k == 1 ? rest[1][1] : k == 2 ? rest[2][1] : rest[3][1];
                }
                else
                    residual_of(layer, kF, tile16, column8, words);
                float2 const r0 = unpack2<T>(words[0]), r1 = unpack2<T>(words[1]);
                uint32_t const low = pack2<T>(v.x + first.x + (r0.x - s0.x) * s0.y * second.x + third.x, v.y + first.y + (r0.y - s0.x) * s0.y * second.y + third.y);
                uint32_t const high = pack2<T>(v.z + first.x + (r1.x - s1.x) * s1.y * second.x + third.x, v.w + first.y + (r1.y - s1.x) * s1.y * second.y + third.y);
                if (straight)
                {
                    int const row0 = row_of_x(tile16 * 16 + g_), row1 = row_of_x(tile16 * 16 + g_ + 8);
                    if (row0 >= 0)
                        *reinterpret_cast<uint32_t*>(a_.y + static_cast<int64_t>(row0) * a_.width + column8 * 8 + 2 * q_) = low;
                    if (row1 >= 0)
                        *reinterpret_cast<uint32_t*>(a_.y + static_cast<int64_t>(row1) * a_.width + column8 * 8 + 2 * q_) = high;
                    continue;
                }
                unsigned char* const to = (kF == kProjection ? a_.middle : a_.outer) + place(tile16, a_.width / kChunk, column8, lane_);
                *reinterpret_cast<uint32_t*>(to) = low;
                *reinterpret_cast<uint32_t*>(to + 128) = high;
                // Of what was written, not of what was rounded.
                float2 const m0 = moments_of_tile(unpack2<T>(low)), m1 = moments_of_tile(unpack2<T>(high));
                if (q_ == 0)
                {
                    partial()[tile * rows + index * 16 + g_] = m0;
                    partial()[tile * rows + index * 16 + 8 + g_] = m1;
                }
            }
        }
        if constexpr (kResidual)
        {
            if (straight)
                return;
            __syncthreads();
            if (thread_ < rows)
            {
                float mean = 0.0f, squares = 0.0f;
                for (int i = 0; i < t.tiles; ++i)
                    mean += partial()[i * rows + thread_].x;
                mean = mean / static_cast<float>(t.tiles);
                for (int i = 0; i < t.tiles; ++i)
                {
                    float2 const m = partial()[i * rows + thread_];
                    squares += m.y + 8.0f * (m.x - mean) * (m.x - mean);
                }
                int const row = row_tile(p, t, first_block, thread_ / 16) * 16 + thread_ % 16;
                a_.statistics[kF == kOuter][static_cast<int64_t>(t.slice) * a_.plan.rows + row] = make_float2(mean, squares);
            }
        }
    }

    // --- attention -----------------------------------------------------------------------------------------------------

    // `first`: of the mask's row.
    __device__ __forceinline__ float masked(float score, int64_t first, int key, int sequence) const
    {
        if (key >= sequence)
            return -__uint_as_float(0x7f800000u);
        if (a_.mask_type == kNoMask)
            return score * a_.scale_log2;
        int64_t const at = first + key;
        if (a_.mask_type == kMaskBool)
            return static_cast<unsigned char const*>(a_.mask)[at] ? score * a_.scale_log2 : -__uint_as_float(0x7f800000u);
        float const m = a_.mask_type == kMaskFloat ? static_cast<float const*>(a_.mask)[at] : widen(static_cast<T const*>(a_.mask)[at]);
        return score * a_.scale_log2 + m * 1.442695041f;
    }

    // A head and 16 rows: scores of 16 keys a warp at a time, then 8 columns of the context a warp.
    template <int kSteps, int kTurns> // head size / 16; key tiles / 8
    __device__ __forceinline__ void attend(int b, int h, int tile)
    {
        // Opaque, or the compiler keeps what follows from them (which keys are there) in registers from item to item.
        int sequence = a_.sequence;
        asm volatile("" : "+r"(sequence));
        int const tiles16 = a_.plan.rows / 16, keys = (sequence + 15) / 16, key0 = b * keys, blocks = a_.width / 16;
        unsigned char* const probabilities = sums();
        float* const joined = reinterpret_cast<float*>(sums() + keys * 512); // [2][8][16]
        // A head's first block of 16 columns, of Q, K or V; blocks follow each other at `step` bytes, tiles of 16 rows at 512.
        unsigned const step = static_cast<unsigned>(tiles16) * 512;
        auto fragments = [&](int part, int row) { return a_.qkv + (part * blocks + h * kSteps) * step + static_cast<unsigned>(row) * 512 + lane_ * 16; };
        unsigned char const *const queries = fragments(0, key0 + tile), *const keys_here = fragments(1, key0 + warp_), *const values = fragments(2, key0);
        constexpr int kColumns = 2 * kSteps;                         // of 8
        constexpr int kEach = kColumns <= kWarps ? 1 : kColumns / kWarps; // columns of a warp
        constexpr int kShare = kColumns < kWarps ? kWarps / kColumns : 1; // warps of a column
        // Keys are asked for in pieces of a turn, some ahead, as the registers allow.
        constexpr int kPiece = kSteps < 4 ? kSteps : 4, kParts = kSteps / kPiece, kPieces = kTurns * kParts;
        constexpr int kAhead = kPieces * kPiece <= 8 ? kPieces : 2;
        uint4 q[kSteps], k[kAhead][kPiece];
#pragma unroll
        for (int j = 0; j < kSteps; ++j)
            q[j] = load_fresh(reinterpret_cast<uint4 const*>(queries + j * step));
        auto load_keys = [&](uint4 (&to)[kPiece], int piece) {
            int const i = piece / kParts, first = piece % kParts * kPiece;
#pragma unroll
            for (int j = 0; j < kPiece; ++j)
            {
                to[j] = make_uint4(0, 0, 0, 0);
                if (warp_ + i * kWarps < keys)
                    to[j] = load_fresh(reinterpret_cast<uint4 const*>(keys_here + ((first + j) * step + i * kWarps * 512)));
            }
        };
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            load_keys(k[i], i);
        // V of this warp's columns: all keys, or every kShare-th tile.
        constexpr int kValues = kWarps * kTurns / kShare;
        int const column = warp_ % kColumns, share = kShare > 1 ? warp_ / kColumns : 0;
        auto value = [&](int c, int i) {
            int const tile_of_keys = share + i * kShare;
            uint2 v = make_uint2(0, 0);
            if (tile_of_keys < keys)
            {
                v = load_fresh(reinterpret_cast<uint2 const*>(values + (c / 2 * step + tile_of_keys * 512 + (c & 1) * 8)));
                // Keys that do not exist have probability 0, and may hold anything.
                if (tile_of_keys * 16 + g_ >= sequence)
                    v.x = 0;
                if (tile_of_keys * 16 + 8 + g_ >= sequence)
                    v.y = 0;
            }
            return v;
        };
        // Some at a time, the next while these are multiplied.
        constexpr int kMost = kSteps <= 4 && kSteps * kTurns <= 8 ? 8 : 4, kGroup = kValues < kMost ? kValues : kMost, kGroups = kValues / kGroup;
        uint2 v[2][kGroup];
        auto first_values = [&] {
#pragma unroll
            for (int i = 0; i < kGroup; ++i)
                v[0][i] = value(column, i);
        };
        if constexpr (kTurns < 4)
            first_values();
        float s[kTurns][2][4];
        float most0 = -__uint_as_float(0x7f800000u), most1 = most0;
        int const row = tile * 16 + g_;
        int64_t const mask0 = b * a_.mask_batch + h * a_.mask_head + min(row, sequence - 1) * a_.mask_row;
        int64_t const mask1 = b * a_.mask_batch + h * a_.mask_head + min(row + 8, sequence - 1) * a_.mask_row;
#pragma unroll
        for (int i = 0; i < kTurns; ++i)
        {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[i][0][e] = s[i][1][e] = 0.0f;
#pragma unroll
            for (int part = 0; part < kParts; ++part)
            {
                int const piece = i * kParts + part;
                uint4(&now)[kPiece] = k[piece % kAhead];
#pragma unroll
                for (int j = 0; j < kPiece; ++j)
                {
                    mma(s[i][0], q[part * kPiece + j], now[j].x, now[j].z, T{});
                    mma(s[i][1], q[part * kPiece + j], now[j].y, now[j].w, T{});
                }
                if (piece + kAhead < kPieces)
                    load_keys(now, piece + kAhead);
            }
#pragma unroll
            for (int e = 0; e < 8; ++e)
            {
                float& score = s[i][e / 4][e % 4];
                score = masked(score, e % 4 / 2 ? mask1 : mask0, (warp_ + i * kWarps) * 16 + e / 4 * 8 + 2 * q_ + e % 2, sequence);
                float& most = e % 4 / 2 ? most1 : most0;
                most = fmaxf(most, score);
            }
        }
        if constexpr (kTurns == 4) // only now: the keys needed the registers
            first_values();
        most0 = fmaxf(most0, __shfl_xor_sync(~0u, most0, 1));
        most0 = fmaxf(most0, __shfl_xor_sync(~0u, most0, 2));
        most1 = fmaxf(most1, __shfl_xor_sync(~0u, most1, 1));
        most1 = fmaxf(most1, __shfl_xor_sync(~0u, most1, 2));
        if (q_ == 0)
        {
            joined[warp_ * 16 + g_] = most0;
            joined[warp_ * 16 + 8 + g_] = most1;
        }
        __syncthreads();
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
        {
            most0 = fmaxf(most0, joined[w * 16 + g_]);
            most1 = fmaxf(most1, joined[w * 16 + 8 + g_]);
        }
        float total0 = 0.0f, total1 = 0.0f;
#pragma unroll
        for (int i = 0; i < kTurns; ++i)
        {
            if (warp_ + i * kWarps < keys)
            {
#pragma unroll
                for (int e = 0; e < 8; ++e)
                {
                    float& score = s[i][e / 4][e % 4];
                    score = exp2_approximate(score - (e % 4 / 2 ? most1 : most0));
                    (e % 4 / 2 ? total1 : total0) += score;
                }
                *reinterpret_cast<uint4*>(probabilities + (warp_ + i * kWarps) * 512 + lane_ * 16)
                    = make_uint4(pack2<T>(s[i][0][0], s[i][0][1]), pack2<T>(s[i][0][2], s[i][0][3]), pack2<T>(s[i][1][0], s[i][1][1]),
                        pack2<T>(s[i][1][2], s[i][1][3]));
            }
        }
        total0 = over_quad(total0);
        total1 = over_quad(total1);
        if (q_ == 0)
        {
            joined[128 + warp_ * 16 + g_] = total0;
            joined[128 + warp_ * 16 + 8 + g_] = total1;
        }
        __syncthreads();
        total0 = total1 = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
        {
            total0 += joined[128 + w * 16 + g_];
            total1 += joined[128 + w * 16 + 8 + g_];
        }
        float const inverse0 = 1.0f / total0, inverse1 = 1.0f / total1;
#pragma unroll
        for (int n = 0; n < kEach; ++n)
        {
            int const c = column + n * kWarps;
            float o[2][4] = {};
#pragma unroll
            for (int group = 0; group < kGroups; ++group)
            {
                int const now = n * kGroups + group;
                if (now + 1 < kEach * kGroups)
                {
                    int const later = (now + 1) % kGroups * kGroup, column_then = column + (now + 1) / kGroups * kWarps;
#pragma unroll
                    for (int i = 0; i < kGroup; ++i)
                        v[(now + 1) % 2][i] = value(column_then, later + i);
                }
#pragma unroll
                for (int i = 0; i < kGroup; ++i)
                {
                    int const tile_of_keys = share + (group * kGroup + i) * kShare;
                    if (tile_of_keys < keys)
                    {
                        uint2 const words = v[now % 2][i];
                        uint4 const p = *reinterpret_cast<uint4 const*>(probabilities + tile_of_keys * 512 + lane_ * 16);
                        uint32_t const b0 = transpose(words.x), b1 = transpose(words.y);
                        mma(o[i & 1], p, b0, b1, T{});
                    }
                }
            }
            float4 all = make_float4(o[0][0] + o[1][0], o[0][1] + o[1][1], o[0][2] + o[1][2], o[0][3] + o[1][3]);
            if constexpr (kShare > 1)
            {
                float4* const shares = reinterpret_cast<float4*>(joined + 256); // [warps][32]
                if (share > 0)
                    shares[warp_ * 32 + lane_] = all;
                __syncthreads();
                if (share == 0)
                {
#pragma unroll
                    for (int w = 1; w < kShare; ++w)
                    {
                        float4 const other = shares[(warp_ + w * kColumns) * 32 + lane_];
                        all.x += other.x;
                        all.y += other.y;
                        all.z += other.z;
                        all.w += other.w;
                    }
                }
            }
            if (share == 0)
            {
                unsigned char* const to = a_.context + place(key0 + tile, a_.width / kChunk, h * kColumns + c, lane_);
                *reinterpret_cast<uint32_t*>(to) = pack2<T>(all.x * inverse0, all.y * inverse0);
                *reinterpret_cast<uint32_t*>(to + 128) = pack2<T>(all.z * inverse1, all.w * inverse1);
            }
        }
        __syncthreads();
    }
    template <int kSteps>
    __device__ __forceinline__ void attend_with(int b, int h, int tile)
    {
        int const keys = a_.plan.padded / 16;
        if (keys <= 8)
            attend<kSteps, 1>(b, h, tile);
        else if (keys <= 16)
            attend<kSteps, 2>(b, h, tile);
        else
            attend<kSteps, 4>(b, h, tile);
    }
    __device__ __forceinline__ void attend_all()
    {
        int const tiles = a_.plan.padded / 16, items = a_.batch * a_.heads * tiles, size = a_.width / a_.heads;
#pragma unroll 1
        for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x))
        {
            int const tile = item % tiles, rest = item / tiles, h = rest % a_.heads, b = rest / a_.heads;
            switch (size)
            {
            case 32: attend_with<2>(b, h, tile); break;
            case 64: attend_with<4>(b, h, tile); break;
            default: attend_with<8>(b, h, tile); break;
            }
        }
    }

    // --- the norm behind the last layer --------------------------------------------------------------------------------

    __device__ __forceinline__ void normalise()
    {
        int const pieces = a_.width / 8;
#pragma unroll 1
        for (int row = static_cast<int>(blockIdx.x) * kWarps + warp_; row < a_.plan.used; row += static_cast<int>(gridDim.x) * kWarps)
        {
            int const to = row_of_x(row);
            if (to < 0)
                continue;
            float v[4][8];
            unsigned char const* const from = a_.outer + (static_cast<int64_t>(row >> 6) * pieces * 8 + (row >> 3 & 7)) * 128 + (row & 7) * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                uint4 piece = make_uint4(0, 0, 0, 0);
                if (lane_ + 32 * i < pieces)
                    piece = load_fresh(reinterpret_cast<uint4 const*>(from + (lane_ + 32 * i) * 1024));
                widen8(piece, v[i]);
            }
            float2 const s = moments(v, pieces);
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                int const column = (lane_ + 32 * i) * 8;
                if (column < a_.width)
                {
                    uint32_t words[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                    {
                        float2 const gamma = *reinterpret_cast<float2 const*>(a_.final_gamma + column + 2 * e);
                        float2 const beta = *reinterpret_cast<float2 const*>(a_.final_beta + column + 2 * e);
                        words[e] = pack2<T>((v[i][2 * e] - s.x) * s.y * gamma.x + beta.x, (v[i][2 * e + 1] - s.x) * s.y * gamma.y + beta.y);
                    }
                    *reinterpret_cast<uint4*>(a_.y + static_cast<int64_t>(to) * a_.width + column) = make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
    }
};

// allow-spill encoder: 32 bytes, a handful of loads in a launch of 100 us; without attention there are none
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) encode(__grid_constant__ Args<T> const args)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(ONNXFUSE_EMULATED)
    ONNXFUSE_DYNAMIC_SHARED(shared);
    Encoder<T>(args, shared).run();
#endif
}
} // namespace onnxfuse::encoder
