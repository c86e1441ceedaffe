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
    bool active;
    int tile, tiles, chunk, chunks, slot, part, row_part, slice;
};

// What the compiler knows of the problem: nothing, or, where the kernel is compiled for an engine's shape, all of it (a third faster).
struct AnyShape
{
    static constexpr bool kFixed = false;
};
template <int kBatch_, int kSequence_, int kWidth_, int kInner_, int kHeads_, int kCluster, int kClusters, int kShared>
struct FixedShape
{
    static constexpr bool kFixed = true;
    static constexpr int kBatch = kBatch_, kSequence = kSequence_, kWidth = kWidth_, kInner = kInner_, kHeads = kHeads_;
    static constexpr Plan plan()
    {
        Plan plan{};
        make_plan(kBatch, kSequence, kWidth, kInner, kHeads, kCluster, kClusters, kShared, Wishes{}, plan);
        return plan;
    }
};

// With ONNXFUSE_PROFILE, clocks of a phase: 0 begins, 1 all others have ended the phase before, 2 activations are asked for, 3 the first
// turn of them is there, 4 the first product begins, 5 products are done, 6 sums are sent, 7 all sums are there, 8 written, 9 released.
// In attention: 2 loads are asked for, 3 scores are there, 4 and 5 the maximum and the sum of all warps, 6 values are multiplied.
constexpr int kStamps = 10;

template <typename T, typename Shape>
class Encoder
{
    Args<T> const& a_;
    unsigned char* const shared_;
    int const thread_ = static_cast<int>(threadIdx.x);
    int const warp_ = __shfl_sync(~0u, thread_ / 32, 0); // so that the compiler knows that a warp has one
    int const lane_ = thread_ % 32, g_ = lane_ / 4, q_ = lane_ % 4;
    int const rank_, cluster_;
    Patience patience_;
    unsigned wanted_ = 0;   // arrivals at the grid barrier
    unsigned parities_ = 0; // of the turns' barriers
    int sums_parity_ = 0;
    int use_ = 0; // of weights, for the two places of vectors
    int step_ = 0;

    // Where the compiler is to know the plan, it does.
    __device__ __forceinline__ ProductPlan product(int f) const
    {
        if constexpr (Shape::kFixed)
        {
            constexpr Plan plan = Shape::plan();
            return f == 0 ? plan.product[0] : f == 1 ? plan.product[1] : f == 2 ? plan.product[2] : plan.product[3];
        }
        else
            return a_.plan.product[f];
    }
    __device__ __forceinline__ SharedPlan shared() const
    {
        if constexpr (Shape::kFixed)
        {
            constexpr Plan plan = Shape::plan();
            return plan.shared;
        }
        else
            return a_.plan.shared;
    }
#define ONNXFUSE_KNOWN(name, fixed, any)                                                                                                   \
    __device__ __forceinline__ int name() const                                                                                            \
    {                                                                                                                                      \
        if constexpr (Shape::kFixed)                                                                                                       \
        {                                                                                                                                  \
            constexpr Plan plan = Shape::plan();                                                                                           \
            (void)plan;                                                                                                                    \
            constexpr int value = fixed;                                                                                                   \
            return value;                                                                                                                  \
        }                                                                                                                                  \
        else                                                                                                                               \
            return any;                                                                                                                    \
    }
    ONNXFUSE_KNOWN(cluster_size, plan.cluster, a_.plan.cluster)
    ONNXFUSE_KNOWN(padded, plan.padded, a_.plan.padded)
    ONNXFUSE_KNOWN(used, plan.used, a_.plan.used)
    ONNXFUSE_KNOWN(rows, plan.rows, a_.plan.rows)
    ONNXFUSE_KNOWN(batch, Shape::kBatch, a_.batch)
    ONNXFUSE_KNOWN(sequence, Shape::kSequence, a_.sequence)
    ONNXFUSE_KNOWN(width, Shape::kWidth, a_.width)
    ONNXFUSE_KNOWN(inner_width, Shape::kInner, a_.inner_width)
    ONNXFUSE_KNOWN(heads, Shape::kHeads, a_.heads)
#undef ONNXFUSE_KNOWN

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
#pragma unroll 1
        for (int layer = 0; layer < a_.layers; ++layer)
        {
            if constexpr (Shape::kFixed)
            {
                product_phase(layer, kQkv);
                attention_phase();
                product_phase(layer, kProjection);
                product_phase(layer, kInner);
                product_phase(layer, kOuter);
            }
            else
            {
#pragma unroll 1
                for (int f = 0; f < kProducts; ++f)
                {
                    if (f == kProjection)
                        attention_phase();
                    product_phase(layer, f);
                }
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
    __device__ __forceinline__ void product_phase(int layer, int f)
    {
        multiply(layer, f);
        end();
    }
    __device__ __forceinline__ void attention_phase()
    {
        if (a_.skip == 0)
            attend_all();
        else
            begin(true);
        end();
    }

    // --- shared memory -------------------------------------------------------------------------------------------------

    // By numbers that the compiler knows to be the same in all threads of a block: it multiplies in the background only then.
    __device__ __forceinline__ Task task_of(ProductPlan const& p) const
    {
        int const log_parts = p.parts >> 1; // of 1, 2 and 4
        Task t;
        t.slice = static_cast<int>(static_cast<unsigned>(cluster_) * p.by_groups >> 16);
        t.part = rank_ & p.parts - 1;
        t.row_part = rank_ >> log_parts;
        t.slot = (cluster_ - t.slice * p.groups) * (cluster_size() >> log_parts) + t.row_part;
        t.tile = t.slice * p.each + min(t.slice, p.extra);
        t.tiles = p.each + (t.slice < p.extra ? 1 : 0);
        t.chunk = t.part * p.chunk_share + min(t.part, p.chunk_extra);
        t.chunks = p.chunk_share + (t.part < p.chunk_extra ? 1 : 0);
        t.active = t.slice < p.slices && t.slot * p.blocks * kRowBlock < used();
        return t;
    }
    // Of a turn of weights, and of the activations.
    __device__ __forceinline__ uint64_t* full(int turn) const
    {
        return reinterpret_cast<uint64_t*>(shared_ + shared().barriers) + turn;
    }
    __device__ __forceinline__ uint64_t* sums_full() const
    {
        return full(kTurns);
    }
    __device__ __forceinline__ unsigned char* sums() const
    {
        return shared_ + shared().sums;
    }
    __device__ __forceinline__ float2* statistics() const
    {
        return reinterpret_cast<float2*>(shared_ + shared().statistics);
    }
    __device__ __forceinline__ float2* partial() const
    {
        return reinterpret_cast<float2*>(shared_ + shared().partial);
    }
    __device__ __forceinline__ void prepare()
    {
        if (thread_ == 0)
        {
            for (int i = 0; i <= kTurns; ++i)
                barrier_init(full(i));
            barrier_init_done();
        }
        __syncthreads();
        if (cluster_size() > 1)
            cluster_sync();
    }

    // --- between phases ------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void stamp(int i)
    {
#ifdef ONNXFUSE_PROFILE
        if (a_.profile && thread_ == 0)
            a_.profile[(static_cast<int64_t>(blockIdx.x) * (5 * a_.layers + 2) + step_) * kStamps + i] = clock_now();
#endif
    }
    // Waits until all blocks have ended the phase before.
    __device__ __forceinline__ void begin(bool wait)
    {
        stamp(0);
        if (wait)
        {
            bool const by_warp = a_.barrier == 1 || a_.barrier == 2;
            wanted_ += by_warp ? gridDim.x * kWarps : gridDim.x;
            if (a_.barrier == 2)
            {
                // All lanes: where one alone waits, the compiler no longer believes that a warp goes together.
                wait_count(a_.count, wanted_, patience_, 100);
                __syncwarp();
            }
            else
            {
                if (thread_ == 0)
                    wait_count(a_.count, wanted_, patience_, 101);
                __syncthreads();
            }
        }
        stamp(1);
    }
    // Tells all blocks that this one has written what it has to. 0: one thread for the block; 1: a thread a warp; 2: that, and a thread a
    // warp waits; 3: every thread fences for itself.
    __device__ __forceinline__ void end()
    {
        stamp(8);
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
        stamp(9);
        ++step_;
    }
    __device__ __forceinline__ void leave()
    {
        stamp(9);
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
        if (cluster_size() > 1)
            cluster_sync(); // nobody leaves while others may send to it
    }

    // --- loads ---------------------------------------------------------------------------------------------------------

    __device__ __forceinline__ int vectors_of(int f) const
    {
        return f == kProjection || f == kOuter ? 3 : 2;
    }
    // Weights of `count` chunks of a turn, from `chunk` of this part on, each by a warp; the turn's barrier expects them and `more` bytes.
    __device__ __forceinline__ void load_weights(ProductPlan const& p, Task const& t, int layer, int f, int turn, int chunk, int count, int more)
    {
        int const bytes = t.tiles * kTileBytes;
        unsigned char const* const from = a_.weights + layer * a_.weights_step + a_.weight_at[f]
            + (static_cast<unsigned>(t.chunk + chunk) * p.tiles + t.tile) * static_cast<unsigned>(kTileBytes);
        unsigned char* const to = shared_ + turn * p.per * p.stage_bytes + p.blocks * kChunkBytes;
        int const first = warp_ - turn * p.per & kWarps - 1; // not always the same warp
        if (first == 0 && lane_ == 0)
            barrier_expect(full(turn), count * bytes + more);
        for (int c = first; c < count; c += kWarps)
        {
            if (lane_ == 0)
                copy_bytes(to + c * p.stage_bytes, from + static_cast<unsigned>(c * p.tiles) * static_cast<unsigned>(kTileBytes), bytes, full(turn));
        }
    }
    // Asks for the first weights of a product and for its vectors. The ring must be free.
    __device__ __forceinline__ void prefetch(int layer, int f)
    {
        ++use_;
        ProductPlan const p = product(f);
        Task const t = task_of(p);
        if (!t.active)
            return;
        int const count = vectors_of(f), bytes = t.tiles * 32;
        if (warp_ >= kWarps - count && lane_ == 0)
        {
            int const i = kWarps - 1 - warp_;
            unsigned char const* const vectors = a_.vectors + layer * a_.vectors_step + a_.vector_at[f] + t.tile * 32;
            unsigned char* const to = shared_ + shared().vectors + (use_ & 1) * shared().vector_bytes;
            copy_bytes(to + i * bytes, vectors + static_cast<unsigned>(i * p.tiles * 32), bytes, full(0));
        }
        int const chunks = min(p.stages, t.chunks);
#pragma unroll 1
        for (int turn = 0, chunk = 0; chunk < chunks; ++turn, chunk += p.per)
            load_weights(p, t, layer, f, turn, chunk, min(p.per, chunks - chunk), turn == 0 ? count * bytes : 0);
    }
    // The row of x behind a padded row; negative: none.
    __device__ __forceinline__ int row_of_x(int row) const
    {
        int const b = static_cast<int>(static_cast<unsigned>(row >> 4) * uint64_t{a_.plan.by_tiles} >> 24), s = row - b * padded();
        return b < batch() && s < sequence() ? b * sequence() + s : -1;
    }
    // `count` chunks from `chunk` of K on, into the stages from `stage` on. `from`: activations; null: x.
    __device__ __forceinline__ void load_chunks(ProductPlan const& p, unsigned char const* from, int first_block, int chunk, int stage, int count)
    {
        unsigned char* to = shared_ + stage * p.stage_bytes + thread_ * 16;
        if (from)
        {
            unsigned const next_block = static_cast<unsigned>(p.chunks) * kChunkBytes;
            from += static_cast<unsigned>(first_block) * next_block + static_cast<unsigned>(chunk * kChunkBytes + thread_ * 16);
#pragma unroll 1
            for (int i = 0; i < count; ++i, from += kChunkBytes, to += p.stage_bytes)
            {
                copy_16(to, from);
                copy_16(to + kChunkBytes / 2, from + kChunkBytes / 2);
                if (p.blocks == 2)
                {
                    copy_16(to + kChunkBytes, from + next_block);
                    copy_16(to + kChunkBytes + kChunkBytes / 2, from + next_block + kChunkBytes / 2);
                }
            }
            return;
        }
        to += thread_ % 8 * 1024 + thread_ / 8 * 16 - thread_ * 16;
#pragma unroll 1
        for (int h = 0; h < 2 * p.blocks; ++h, to += h % 2 ? 512 : kChunkBytes - 512)
        {
            int const row = row_of_x(first_block * kRowBlock + h * 32 + thread_ / 8);
            T const* source = a_.x + static_cast<int64_t>(max(row, 0)) * width() + chunk * kChunk + thread_ % 8 * 8;
#pragma unroll 1
            for (int i = 0; i < count; ++i, source += kChunk)
                copy_16(to + i * p.stage_bytes, source, row >= 0);
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
        int const slices = product(which ? kOuter : kProjection).slices;
        float2 const* const from = (which ? a_.statistics[1] : a_.statistics[0]) + static_cast<unsigned>(j * rows() + row);
        unsigned const step = static_cast<unsigned>(rows()) << shift;
#pragma unroll
        for (int half = 0; half < 16; half += 4)
        {
            if (half << shift < slices) // of the whole block
            {
#pragma unroll
                for (int k = half; k < half + 4; ++k)
                {
                    loaded[k] = make_uint2(0, 0);
                    if (j + (k << shift) < slices)
                        loaded[k] = load_fresh(reinterpret_cast<uint2 const*>(from + k * step));
                }
            }
        }
    }
    __device__ __forceinline__ void finish_statistics(ProductPlan const& p, int which, uint2 const (&loaded)[16])
    {
        int const shift = threads_shift(p), each = 1 << shift, local = thread_ >> shift, j = thread_ & each - 1;
        ProductPlan const before = product(which ? kOuter : kProjection);
        // Columns that stand behind a mean.
        float const few = 8.0f * static_cast<float>(before.each), many = few + 8.0f;
        float total = 0.0f;
#pragma unroll
        for (int half = 0; half < 16; half += 4)
        {
            if (half << shift < before.slices)
            {
#pragma unroll
                for (int k = half; k < half + 4; ++k)
                    total += (j + (k << shift) < before.extra ? many : few) * __uint_as_float(loaded[k].x);
            }
        }
#pragma unroll 1
        for (int m = 1; m < each; m <<= 1)
            total += __shfl_xor_sync(~0u, total, m);
        float const mean = total * a_.inverse_width;
        float squares = 0.0f;
#pragma unroll
        for (int half = 0; half < 16; half += 4)
        {
            if (half << shift < before.slices)
            {
#pragma unroll
                for (int k = half; k < half + 4; ++k)
                {
                    int const slice = j + (k << shift);
                    float const off = __uint_as_float(loaded[k].x) - mean;
                    if (slice < before.slices)
                        squares += __uint_as_float(loaded[k].y) + (slice < before.extra ? many : few) * off * off;
                }
            }
        }
#pragma unroll 1
        for (int m = 1; m < each; m <<= 1)
            squares += __shfl_xor_sync(~0u, squares, m);
        if (j == 0)
            statistics()[local] = make_float2(mean, rsqrtf(squares * a_.inverse_width + a_.epsilon));
    }
    // Mean and 1 / deviation of 8 `pieces` values a lane, all of a row of a warp.
    template <int kPieces>
    __device__ __forceinline__ float2 moments(float const (&v)[kPieces][8], int pieces) const
    {
        float const inverse = a_.inverse_width;
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
        int const rows = p.blocks * kRowBlock / p.parts, pieces = width() / 8;
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
                    piece = reinterpret_cast<uint4 const*>(a_.x + static_cast<int64_t>(row) * width())[lane_ + 32 * i];
                widen8(piece, v[i]);
            }
            float2 const s = moments(v, pieces);
            if (lane_ == 0)
                statistics()[local] = s;
        }
    }

    // --- products ------------------------------------------------------------------------------------------------------

    // What a block multiplies in a pass.
    struct Pass
    {
        int layer, f, first_block;
        unsigned char const* from; // activations; null: x
        bool load;                 // whether weights are on their way
    };
    // The sums of this block's part of k, to those that own the rows.
    template <int kWide>
    __device__ __forceinline__ void hand_out(ProductPlan const& p, Task const& t, float const (&c)[kWide][4], int tile0, int tiles)
    {
        int const group = warp_ / 4, shift = share_shift(p), each = 1 << shift, row_tile_of_warp = warp_ % 4, owner = row_tile_of_warp >> shift;
        int const units = (p.blocks << shift) * t.tiles, block = p.blocks == 2 ? group : 0;
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

    // Turn after turn: waits for its activations and weights, multiplies, and refills the places of the turn before the last.
    template <int kWide, bool kRefills>
    __device__ __forceinline__ void multiply_turns(ProductPlan const& p, Task const& t, Pass const& pass, int a_at, int b_at, int tile0, int tiles)
    {
        float c[kWide][4];
#pragma unroll
        for (int j = 0; j < kWide; ++j)
        {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                c[j][e] = 0.0f;
        }
        // As t.chunks, in a way that shows the compiler that all threads have the same.
        int const chunks = p.chunk_share + ((rank_ & p.parts - 1) < p.chunk_extra ? 1 : 0);
        int turn = 0, slot = 0, left = chunks;
        product_fence();
#pragma unroll 1
        do // there is a chunk
        {
            // A group is committed each turn, so that the number of those behind the one that is needed is always the same: of the first
            // four turns 3, of those that were asked for two turns ago 1.
            if (!kRefills || turn < kTurns)
                wait_for_copies<kTurns - 1>();
            else
                wait_for_copies<1>();
            if (turn == 0)
                stamp(3);
            before_async_reads();
            if (pass.load || turn >= kTurns)
            {
                barrier_wait(full(slot), parities_ >> slot & 1, patience_, 10 + pass.f);
                parities_ ^= 1u << slot;
            }
            __syncthreads();
            if (turn == 0)
                stamp(4);
            product_fence();
            unsigned char* at = shared_ + slot * p.per * p.stage_bytes;
            int const end = max(left - p.per, 0);
#pragma unroll 1
            do
            {
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
                at += p.stage_bytes;
            } while (--left > end);
            product_commit();
            if constexpr (kRefills)
            {
                // All warps have passed the barrier above, and so have done with what they multiplied two turns ago.
                int const chunk = (turn + 2) * p.per, to = slot ^ 2;
                if (turn >= 2 && chunk < chunks)
                {
                    int const count = min(p.per, chunks - chunk);
                    load_weights(p, t, pass.layer, pass.f, to, chunk, count, 0);
                    __syncwarp();
                    load_chunks(p, pass.from, pass.first_block, t.chunk + chunk, to * p.per, count);
                }
                end_of_copies();
                product_wait<1>();
            }
            else
                end_of_copies();
            ++turn;
            slot = turn % kTurns;
        } while (left > 0);
        product_wait<0>();
        stamp(5);
        hand_out<kWide>(p, t, c, tile0, tiles);
    }
    template <int kWide>
    __device__ __forceinline__ void multiply_wide(ProductPlan const& p, Task const& t, Pass const& pass, int a_at, int b_at, int tile0, int tiles)
    {
        if (t.chunks > p.stages)
            multiply_turns<kWide, true>(p, t, pass, a_at, b_at, tile0, tiles);
        else
            multiply_turns<kWide, false>(p, t, pass, a_at, b_at, tile0, tiles);
    }
    __device__ __forceinline__ void multiply_pass(ProductPlan const& p, Task const& t, Pass const& pass, int a_at, int b_at, int tile0, int tiles)
    {
        switch (p.wide)
        {
#ifndef ONNXFUSE_QUICK
        case 1: return multiply_wide<1>(p, t, pass, a_at, b_at, tile0, tiles);
        case 2: return multiply_wide<2>(p, t, pass, a_at, b_at, tile0, tiles);
        case 3: return multiply_wide<3>(p, t, pass, a_at, b_at, tile0, tiles);
        case 6: return multiply_wide<6>(p, t, pass, a_at, b_at, tile0, tiles);
        case 8: return multiply_wide<8>(p, t, pass, a_at, b_at, tile0, tiles);
        case 10: return multiply_wide<10>(p, t, pass, a_at, b_at, tile0, tiles);
        case 12: return multiply_wide<12>(p, t, pass, a_at, b_at, tile0, tiles);
        case 14: return multiply_wide<14>(p, t, pass, a_at, b_at, tile0, tiles);
        case 16: return multiply_wide<16>(p, t, pass, a_at, b_at, tile0, tiles);
#endif
        case 4: return multiply_wide<4>(p, t, pass, a_at, b_at, tile0, tiles);
        case 5: return multiply_wide<5>(p, t, pass, a_at, b_at, tile0, tiles);
        default: return multiply_wide<7>(p, t, pass, a_at, b_at, tile0, tiles);
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
        ProductPlan const p = product(f);
        Task const t = task_of(p);
        // What is asked for afterwards: layer * 4 + product; past the last: nothing.
        int const following = layer * kProducts + f + 1;
        auto ask = [&](int next) {
            if (next < a_.layers * kProducts)
                prefetch(next / kProducts, next % kProducts);
        };
        bool const waits = layer > 0 || f > 0;
        if (!t.active)
        {
            begin(waits);
            for (int pass = 1; pass < p.passes && p.parts > 1; ++pass)
                cluster_sync(); // as the others of the cluster
            ask(following);
            return;
        }
        unsigned char const* const from = f == kQkv ? (layer ? a_.outer : nullptr) : f == kProjection ? a_.context : f == kInner ? a_.middle : a_.inner;
        bool const whole = t.chunks <= p.stages;
        int const stride = p.groups * (cluster_size() >> (p.parts >> 1)) * p.blocks;
        int const which = statistics_for(layer, f);
        // The columns of this warp's group and where its operands lie in a stage.
        int const group = warp_ / 4, half = (t.tiles + 1) / 2;
        int const tile0 = p.blocks == 2 || group == 0 ? 0 : half, tiles = p.blocks == 2 ? t.tiles : group ? t.tiles - half : half;
        int const a_at = p.blocks == 2 ? group * kChunkBytes : 0, b_at = p.blocks * kChunkBytes + tile0 * kTileBytes;
#pragma unroll 1
        for (int number = 0, first = t.slot * p.blocks; number < p.passes; ++number, first += stride)
        {
            bool const last = number + 1 == p.passes || (first + stride) * kRowBlock >= used();
            if (number > 0 && p.parts > 1)
                cluster_sync(); // nobody sends while the sums of the pass before are read
            else if (number > 0)
                __syncthreads();
            if (first * kRowBlock >= used())
                continue;
            uint2 loaded[16];
            uint32_t rest[4][2];
            // The residual and its statistics are older than the phase before: there is no need to wait for it.
            bool const early = f == kProjection || f == kOuter;
            if (a_.skip < 2 && early)
            {
                if (which >= 0)
                    load_statistics(p, t, first, which, loaded);
                load_residual(p, t, layer, f, first, rest);
            }
            if (number == 0) // as late as this, for what is computed until here takes no time then
                begin(waits);
            if (a_.skip < 2)
            {
                if (which >= 0 && !early)
                    load_statistics(p, t, first, which, loaded);
#pragma unroll 1
                for (int turn = 0, chunk = 0; turn < kTurns; ++turn, chunk += p.per)
                {
                    load_chunks(p, from, first, t.chunk + chunk, chunk, min(p.per, min(p.stages, t.chunks) - chunk));
                    end_of_copies();
                }
            }
            if (which == -1 && thread_ < 128)
                statistics()[thread_] = make_float2(0.0f, 1.0f);
            if (which == -2)
                statistics_of_x(p, t, first);
            stamp(2);
            int const next = last ? following : layer * kProducts + f;
            bool const asks = last ? following < a_.layers * kProducts : !whole;
            if (a_.skip >= 2)
            {
                wait_alone(t, p, f);
                __syncthreads();
                if (last)
                    ask(following);
                continue;
            }
            multiply_pass(p, t, {layer, f, first, from, number == 0 || !whole}, a_at, b_at, tile0, tiles);
            __syncthreads(); // all have done with the ring
            if (asks)
                prefetch(next / kProducts, next % kProducts);
            if (which >= 0)
                finish_statistics(p, which, loaded);
            stamp(6);
            if (p.parts > 1)
            {
                if (warp_ == 0) // one warp for the block, for whoever waits here gives up its L1 cache
                {
                    if (lane_ == 0)
                        barrier_expect(sums_full(), (p.parts - 1) * (p.blocks << share_shift(p)) * t.tiles * 512);
                    __syncwarp();
                    barrier_wait_cluster(sums_full(), sums_parity_, patience_, 20 + f);
                }
                sums_parity_ ^= 1;
            }
            __syncthreads();
            stamp(7);
            // prefetch() has gone on to the other place, if it asked for something.
            unsigned char const* const vectors = shared_ + shared().vectors + ((use_ - (asks ? 1 : 0)) & 1) * shared().vector_bytes;
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
        for (int turn = 0, chunk = 0; chunk < min(p.stages, t.chunks); ++turn, chunk += p.per)
        {
            barrier_wait(full(turn), parities_ >> turn & 1, patience_, 30 + f);
            parities_ ^= 1u << turn;
        }
    }

    // Where two neighbours of a row lie in activations of `chunks` chunks.
    static __device__ __forceinline__ unsigned place(int tile16, int chunks, int column8, int lane)
    {
        return static_cast<unsigned>((((tile16 >> 2) * chunks * 8 + column8) * 8 + (tile16 & 3) * 2) * 128 + lane * 4);
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
                words[h] = row < 0 ? 0u : *reinterpret_cast<uint32_t const*>(a_.x + static_cast<int64_t>(row) * width() + column8 * 8 + 2 * q_);
            }
            return;
        }
        unsigned char const* const at = (f == kProjection ? a_.outer : a_.middle) + place(tile16, width() / kChunk, column8, lane_);
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
            if (warp_ + k * kWarps >= units)
                break;
            while (tile >= t.tiles)
            {
                tile -= t.tiles;
                ++index;
            }
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
        int const row_tiles = p.blocks << share_shift(p), units = row_tiles * t.tiles, tiles16 = rows() / 16;
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
            float4 v = *reinterpret_cast<float4 const*>(sums() + unit * 512 + lane_ * 16);
#pragma unroll
            for (int s = 1; s < 4; ++s)
            {
                if (s >= p.parts)
                    break;
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
                    unsigned char* const to = a_.qkv + static_cast<unsigned>(((column8 >> 1) * tiles16 + tile16) * 512 + lane_ * 16 + (column8 & 1) * 8);
                    *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(low.x, low.y), pack2<T>(high.x, high.y));
                }
                else
                {
                    unsigned char* const to = a_.inner + place(tile16, inner_width() / kChunk, column8, lane_);
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
                        *reinterpret_cast<uint32_t*>(a_.y + static_cast<int64_t>(row0) * width() + column8 * 8 + 2 * q_) = low;
                    if (row1 >= 0)
                        *reinterpret_cast<uint32_t*>(a_.y + static_cast<int64_t>(row1) * width() + column8 * 8 + 2 * q_) = high;
                    continue;
                }
                unsigned char* const to = (kF == kProjection ? a_.middle : a_.outer) + place(tile16, width() / kChunk, column8, lane_);
                *reinterpret_cast<uint32_t*>(to) = low;
                *reinterpret_cast<uint32_t*>(to + 128) = high;
                // Of what was written, not of what was rounded.
                float2 const m0 = moments_of_tile(unpack2<T>(low)), m1 = moments_of_tile(unpack2<T>(high));
                if (q_ == 0)
                {
                    partial()[(index * 16 + g_) * kJoined + tile] = m0;
                    partial()[(index * 16 + 8 + g_) * kJoined + tile] = m1;
                }
            }
        }
        if constexpr (kResidual)
        {
            if (straight)
                return;
            __syncthreads();
            // Eight lanes a row, each with up to two tiles.
            float const inverse = reciprocal_approximate(static_cast<float>(t.tiles));
#pragma unroll 1
            for (int first = warp_ * 32; first < row_tiles * 128; first += kThreads)
            {
                int const local = (first + lane_) / 8, j = lane_ % 8;
                float2 const low = j < t.tiles ? partial()[local * kJoined + j] : make_float2(0.0f, 0.0f);
                float2 const high = j + 8 < t.tiles ? partial()[local * kJoined + j + 8] : make_float2(0.0f, 0.0f);
                float mean = low.x + high.x;
#pragma unroll
                for (int m = 1; m < 8; m <<= 1)
                    mean += __shfl_xor_sync(~0u, mean, m);
                mean *= inverse;
                float squares = j < t.tiles ? low.y + 8.0f * (low.x - mean) * (low.x - mean) : 0.0f;
                if (j + 8 < t.tiles)
                    squares += high.y + 8.0f * (high.x - mean) * (high.x - mean);
#pragma unroll
                for (int m = 1; m < 8; m <<= 1)
                    squares += __shfl_xor_sync(~0u, squares, m);
                int const row = row_tile(p, t, first_block, local / 16) * 16 + local % 16;
                if (j == 0)
                    a_.statistics[kF == kOuter][static_cast<unsigned>(t.slice * rows() + row)] = make_float2(mean, squares);
            }
        }
    }

    // --- attention -----------------------------------------------------------------------------------------------------

    // `first`: of the mask's row. There is a mask.
    __device__ __forceinline__ float masked(float score, int64_t first, int key, int sequence) const
    {
        if (key >= sequence)
            return -__uint_as_float(0x7f800000u);
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
        int sequence = this->sequence();
        if constexpr (!Shape::kFixed)
            asm volatile("" : "+r"(sequence));
        int const tiles16 = rows() / 16, keys = (sequence + 15) / 16, key0 = b * keys, blocks = width() / 16;
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
                v = load_fresh(reinterpret_cast<uint2 const*>(values + (c / 2 * step + tile_of_keys * 512 + (c & 1) * 8)));
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
        stamp(2);
        float s[kTurns][2][4];
        float most0 = -__uint_as_float(0x7f800000u), most1 = most0;
        int const row = tile * 16 + g_;
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
            int const first_key = (warp_ + i * kWarps) * 16 + 2 * q_;
            if (a_.mask_type == kNoMask)
            {
#pragma unroll
                for (int e = 0; e < 8; ++e)
                {
                    float& score = s[i][e / 4][e % 4];
                    score = first_key + e / 4 * 8 + e % 2 < sequence ? score * a_.scale_log2 : -__uint_as_float(0x7f800000u);
                }
            }
            else
            {
                int64_t const head = b * a_.mask_batch + h * a_.mask_head;
#pragma unroll
                for (int e = 0; e < 8; ++e)
                {
                    float& score = s[i][e / 4][e % 4];
                    int64_t const first = head + min(row + e % 4 / 2 * 8, sequence - 1) * a_.mask_row;
                    score = masked(score, first, first_key + e / 4 * 8 + e % 2, sequence);
                }
            }
            most0 = fmaxf(most0, fmaxf(fmaxf(s[i][0][0], s[i][0][1]), fmaxf(s[i][1][0], s[i][1][1])));
            most1 = fmaxf(most1, fmaxf(fmaxf(s[i][0][2], s[i][0][3]), fmaxf(s[i][1][2], s[i][1][3])));
        }
        if constexpr (kTurns == 4) // only now: the keys needed the registers
            first_values();
        stamp(3);
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
        stamp(4);
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
        stamp(5);
        total0 = total1 = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
        {
            total0 += joined[128 + w * 16 + g_];
            total1 += joined[128 + w * 16 + 8 + g_];
        }
        float const inverse0 = reciprocal_approximate(total0), inverse1 = reciprocal_approximate(total1);
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
                        uint2 words = v[now % 2][i];
                        if (tile_of_keys == keys - 1)
                        {
                            // Keys that do not exist have probability 0, and may hold anything.
                            words.x = tile_of_keys * 16 + g_ < sequence ? words.x : 0u;
                            words.y = tile_of_keys * 16 + 8 + g_ < sequence ? words.y : 0u;
                        }
                        uint4 const p = *reinterpret_cast<uint4 const*>(probabilities + tile_of_keys * 512 + lane_ * 16);
                        uint32_t const b0 = transpose(words.x), b1 = transpose(words.y);
                        mma(o[i & 1], p, b0, b1, T{});
                    }
                }
            }
            stamp(6);
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
                unsigned char* const to = a_.context + place(key0 + tile, width() / kChunk, h * kColumns + c, lane_);
                *reinterpret_cast<uint32_t*>(to) = pack2<T>(all.x * inverse0, all.y * inverse0);
                *reinterpret_cast<uint32_t*>(to + 128) = pack2<T>(all.z * inverse1, all.w * inverse1);
            }
        }
        __syncthreads();
    }
    template <int kSteps>
    __device__ __forceinline__ void attend_with(int b, int h, int tile)
    {
        int const keys = padded() / 16;
        if (keys <= 8)
            attend<kSteps, 1>(b, h, tile);
        else if (keys <= 16)
            attend<kSteps, 2>(b, h, tile);
        else
            attend<kSteps, 4>(b, h, tile);
    }
    __device__ __forceinline__ void attend_all()
    {
        int const tiles = padded() / 16, items = batch() * heads() * tiles;
        int item = static_cast<int>(blockIdx.x), tile = 0, h = 0, b = 0;
        auto take = [&] {
            int const rest = static_cast<int>(static_cast<unsigned>(item) * uint64_t{a_.plan.by_tiles} >> 24);
            tile = item - rest * tiles;
            b = static_cast<int>(static_cast<unsigned>(rest) * uint64_t{a_.plan.by_heads} >> 24);
            h = rest - b * heads();
        };
        take();
        begin(true);
#pragma unroll 1
        while (item < items)
        {
            switch (Shape::kFixed ? width() / heads() : a_.head)
            {
            case 32: attend_with<2>(b, h, tile); break;
            case 64: attend_with<4>(b, h, tile); break;
            default: attend_with<8>(b, h, tile); break;
            }
            item += static_cast<int>(gridDim.x);
            take();
        }
    }

    // --- the norm behind the last layer --------------------------------------------------------------------------------

    __device__ __forceinline__ void normalise()
    {
        int const pieces = width() / 8;
#pragma unroll 1
        for (int row = static_cast<int>(blockIdx.x) * kWarps + warp_; row < used(); row += static_cast<int>(gridDim.x) * kWarps)
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
                if (column < width())
                {
                    uint32_t words[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                    {
                        float2 const gamma = *reinterpret_cast<float2 const*>(a_.final_gamma + column + 2 * e);
                        float2 const beta = *reinterpret_cast<float2 const*>(a_.final_beta + column + 2 * e);
                        words[e] = pack2<T>((v[i][2 * e] - s.x) * s.y * gamma.x + beta.x, (v[i][2 * e + 1] - s.x) * s.y * gamma.y + beta.y);
                    }
                    *reinterpret_cast<uint4*>(a_.y + static_cast<int64_t>(to) * width() + column) = make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
    }
};

// allow-spill encoder: 64 bytes, a handful of loads in a launch of 100 us; without attention there are none
template <typename T, typename Known>
__device__ __forceinline__ void run_encoder(Args<T> const& args)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(ONNXFUSE_EMULATED)
    ONNXFUSE_SHARED(shared);
    Encoder<T, Known>(args, shared).run();
#endif
}
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) encode(__grid_constant__ Args<T> const args)
{
    run_encoder<T, AnyShape>(args);
}
} // namespace onnxfuse::encoder
