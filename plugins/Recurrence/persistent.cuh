// A recurrence whose weights stay in registers from the first step to the last.
//
// kCluster == 1: a block has all units of one direction for kRows batch rows. Batch rows are independent, so blocks exchange nothing.
// kCluster > 1: the blocks of a cluster share out the units. After each step a block sends the h of its units to all blocks of the
// cluster, by stores or copies that count themselves at a barrier there: no cluster barrier in the loop. One batch row: every warp
// sends for itself as soon as it has its units. Eight rows: the block gathers its part, and one copy goes to each block.
//
// Consecutive layers of a stack run as a wavefront: for each layer after the first, one cluster multiplies its input weights with the
// h of the layer below as they come, and one runs its recurrence. Between clusters values go through global memory in flagged words.
// All clusters of a batch group must then be resident at once (the launcher's business).
//
// h is rounded to T where it is exchanged; sums, gates and state are float32. Loops run two steps at a time, one for each half of what
// is kept twice, so that addresses are constants: few instructions a step, as up to four warps share a scheduler.
#pragma once

#include "fragment.cuh"

namespace onnxfuse
{
constexpr int kMaxLayers = 8;

template <typename T>
struct Layer
{
    T const* input_weights; // [gates * hidden, hidden], for layers after the first
    T const* weights;       // [directions, gates * hidden, hidden]
    T const* bias;          // [directions, 2 * gates * hidden], or null
    T const* h0;            // null: zeros
    T const* c0;            // null: zeros
    T* h_last;              // null: not wanted
    T* c_last;              // null: not wanted
};

template <typename T>
struct RecurrentArgs
{
    Layer<T> layers[kMaxLayers];
    float const* sums;      // input sums with biases, [directions, steps, batch, hidden, 4] in the order of gates
    uint64_t* handed;       // h of a layer for the next, flagged: [layers - 1, steps, batch, hidden / 2]
    uint64_t* products;     // input sums of later layers, flagged: [layers - 1, steps, batch, hidden, 4]
    int32_t const* lengths; // [batch], or null: all steps
    T* y;                   // null: not wanted
    int64_t y_step, y_direction, y_row;     // in elements
    int64_t state_direction, state_row;     // of h0, c0, h_last, c_last
    int steps, batch, hidden;
    int reversed;           // bit d: direction d runs backwards
    float limit;            // of the gates' sums; infinite: none
    int* fault;
};

template <int kRows, int kTiles>
constexpr int kCells = kRows == 8 ? kTiles : 1;

template <int kSlices, int kTiles, int kCluster>
constexpr int kPersistentThreads = 32 * ((kSlices * 8 + kTiles * kCluster - 1) / (kTiles * kCluster));

template <typename T, Cell kCell, int kSlices, int kTiles, int kRows, int kCluster>
class Persistent
{
    static_assert(kRows == 1 || kRows == 2 || kRows == 4 || kRows == 8);
    static_assert(kTiles <= 2 && (kCluster == 1 || (kTiles == 1 && (kRows == 1 || kRows == 8))));
    static constexpr bool kGathers = kCluster > 1 && kRows == 8;
    static_assert(!kGathers || kSlices == kCluster, "a slice of k is what one block sends");

    // h in shared memory, twice: a row for each batch row, or [block][row][32 units], as the blocks send it: a block writes its own part
    // in place and copies it from there to the others. (A bulk copy from a block to itself is none that compute-sanitizer lets pass.)
    static constexpr int kStride = kGathers ? 64 : column_stride(kSlices);
    static constexpr int kSliceBytes = kGathers ? 64 * kRows : 64;
    static constexpr int kBuffer = kGathers ? kSlices * kSliceBytes : kRows * kStride;
    static constexpr int kBarriers = 2 * kBuffer;
    static constexpr int kLengths = kBarriers + 16;

    static constexpr bool kSplit = kRows <= 2; // a lane has two gates of a cell, else all
    static constexpr int kThreads = kPersistentThreads<kSlices, kTiles, kCluster>;
    static constexpr int kCount = kCells<kRows, kTiles>;

    // Input sums: all gates, or gates g / 4 and 2 + g / 4 in x and y.
    using Input = std::conditional_t<kSplit, float2, float4>;

    RecurrentArgs<T> const& args_;
    unsigned char* const shared_;
    int const thread_ = static_cast<int>(threadIdx.x);
    int const warp_ = thread_ / 32;
    Lane const lane_;
    int const rank_ = static_cast<int>(blockIdx.x) % kCluster; // within the cluster
    int const role_ = static_cast<int>(blockIdx.x) / kCluster; // recurrence 0, product 1, recurrence 1, product 2, ...
    int const layer_ = (role_ + 1) / 2;
    bool const last_layer_;
    int const row0_ = static_cast<int>(blockIdx.y) * kRows;
    int const direction_ = static_cast<int>(blockIdx.z);
    bool const backwards_;
    int rows_;       // batch rows that exist
    int block_unit0_, block_units_; // the first of this block, and how many of its units exist
    int unit0_;      // the first of this warp
    bool alive_;     // whether it has units
    Slice weights_[kTiles][kSlices];
    Patience patience_;

public:
    static constexpr int kSharedBytes = kLengths + 4 * kRows;

    __device__ Persistent(RecurrentArgs<T> const& args, unsigned char* shared)
        : args_(args)
        , shared_(shared)
        , lane_(thread_ % 32)
        , last_layer_(role_ == static_cast<int>(gridDim.x) / kCluster - 1)
        , backwards_(args.reversed >> direction_ & 1)
        , patience_(args.fault)
    {
        rows_ = min(kRows, args.batch - row0_);
        int const units = static_cast<int>(blockDim.x) / 32 * 4 * kTiles;
        block_unit0_ = rank_ * units;
        block_units_ = max(0, min(units, args.hidden - block_unit0_));
        unit0_ = block_unit0_ + warp_ * 4 * kTiles;
        alive_ = unit0_ < args.hidden;
    }

    __device__ __forceinline__ void run()
    {
        bool const product = kCluster > 1 && role_ % 2 == 1;
        Layer<T> const& layer = args_.layers[layer_];
        T const* const source
            = product ? layer.input_weights : layer.weights + int64_t{direction_} * kGates<kCell> * args_.hidden * args_.hidden;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
        {
            if constexpr (kGathers)
            {
                int const units = static_cast<int>(blockDim.x) / 32 * 4;
                load_tile_of_blocks<kCell>(weights_[m], source, args_.hidden, args_.hidden, unit0_, units, lane_);
            }
            else
                load_tile<kCell>(weights_[m], source, args_.hidden, args_.hidden, unit0_ + 4 * m, lane_);
        }
        prepare(product);
        wait_for_kernel_before();
        if (product)
            multiply_steps();
        else if (kCluster > 1 && layer_ > 0)
            recur<true>();
        else
            recur<false>();
        if constexpr (kCluster > 1)
            cluster_sync(); // nobody leaves while others may send to it
    }

private:
    // --- shared memory -------------------------------------------------------------------------------------------------

    __device__ __forceinline__ unsigned char* buffer(int half) const
    {
        return shared_ + half * kBuffer;
    }
    // The part of a buffer that this block computes.
    __device__ __forceinline__ unsigned char* own_part(int half) const
    {
        return buffer(half) + rank_ * kSliceBytes;
    }
    __device__ __forceinline__ uint64_t* barrier(int half) const
    {
        return reinterpret_cast<uint64_t*>(shared_ + kBarriers) + half;
    }
    __device__ __forceinline__ int* length_of_row() const
    {
        return reinterpret_cast<int*>(shared_ + kLengths);
    }
    // This lane's column of operand B.
    __device__ __forceinline__ unsigned char const* column(int half) const
    {
        return buffer(half) + lane_.g % kRows * kStride + 16 * lane_.q;
    }
    // Where h of a batch row and unit lies in a buffer.
    __device__ __forceinline__ int place(int row, int unit) const
    {
        if constexpr (kGathers)
        {
            int const units = static_cast<int>(blockDim.x) / 32 * 4;
            return unit / units * kSliceBytes + row * kStride + unit % units * static_cast<int>(sizeof(T));
        }
        else
            return row * kStride + unit * static_cast<int>(sizeof(T));
    }
    // Blocks of the cluster that have units.
    __device__ __forceinline__ int live_blocks() const
    {
        int const units = static_cast<int>(blockDim.x) / 32 * 4 * kTiles;
        return (args_.hidden + units - 1) / units;
    }
    // What comes to this block in a step.
    __device__ __forceinline__ int message_bytes() const
    {
        return kGathers ? (live_blocks() - 1) * rows_ * 64 : rows_ * args_.hidden * static_cast<int>(sizeof(T));
    }

    __device__ __forceinline__ void prepare(bool product)
    {
        Layer<T> const& layer = args_.layers[layer_];
        for (int i = thread_; i < kBarriers / 4; i += static_cast<int>(blockDim.x))
            reinterpret_cast<uint32_t*>(shared_)[i] = 0;
        if (thread_ < kRows)
        {
            int length = thread_ < rows_ ? args_.steps : 0;
            if (args_.lengths && thread_ < rows_)
                length = max(0, min(args_.lengths[row0_ + thread_], args_.steps));
            length_of_row()[thread_] = length;
        }
        if (kCluster > 1 && thread_ == 0)
        {
            barrier_init(barrier(0));
            barrier_init(barrier(1));
            barrier_init_done();
            barrier_expect(barrier(0), message_bytes());
            barrier_expect(barrier(1), message_bytes());
        }
        __syncthreads();
        if (layer.h0 && !product)
        {
            for (int i = thread_; i < rows_ * args_.hidden; i += static_cast<int>(blockDim.x))
            {
                int const row = i / args_.hidden, unit = i % args_.hidden;
                *reinterpret_cast<T*>(buffer(0) + place(row, unit)) = layer.h0[state_index(row0_ + row, unit)];
            }
        }
        if constexpr (kCluster > 1)
            cluster_sync();
        __syncthreads();
    }

    __device__ __forceinline__ int64_t state_index(int row, int unit) const
    {
        return direction_ * args_.state_direction + row * args_.state_row + unit;
    }

    __device__ __forceinline__ int steps_of_group() const
    {
        int most = 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row)
            most = max(most, length_of_row()[row]);
        return most;
    }

    // Where step `s` of a row lies in time: backwards from the row's end where it runs backwards.
    __device__ __forceinline__ int time_of(int s, int length) const
    {
        return backwards_ && s < length ? length - 1 - s : s;
    }

    // --- cells: which lane has which ------------------------------------------------------------------------------------

    __device__ __forceinline__ int tile_of(int cell) const
    {
        if constexpr (kTiles == 1)
            return 0;
        else if constexpr (kRows == 8)
            return cell;
        else if constexpr (kRows == 4)
            return lane_.q >> 1;
        else
            return lane_.q & 1;
    }
    __device__ __forceinline__ int unit_of(int cell) const
    {
        return unit0_ + 4 * tile_of(cell) + lane_.unit();
    }
    __device__ __forceinline__ int row_of_cell() const
    {
        if constexpr (kRows == 8)
            return 2 * lane_.q + (lane_.low ? 0 : 1);
        else if constexpr (kRows == 4)
            return 2 * (lane_.q & 1) + (lane_.low ? 0 : 1);
        else if constexpr (kRows == 2)
            return lane_.q >> 1;
        else
            return 0;
    }
    // Whether no other lane has the same cell, or this is the one to speak for it.
    __device__ __forceinline__ bool speaks() const
    {
        if constexpr (kRows == 8)
            return true;
        else if constexpr (kRows == 4)
            return kTiles == 2 || lane_.q < 2;
        else if constexpr (kRows == 2)
            return lane_.low && (kTiles == 2 || (lane_.q & 1) == 0);
        else
            return lane_.low && lane_.q < kTiles;
    }
    // Whether the cell is one of the problem's.
    __device__ __forceinline__ bool exists(int cell) const
    {
        return row_of_cell() < rows_ && unit_of(cell) < args_.hidden;
    }

    // --- addresses that grow with the step: base and bytes a step, which fit 32 bits (the launcher's business) -------------

    struct Cursor
    {
        char* base;
        int step;

        __device__ __forceinline__ char* at(int s) const
        {
            return base + int64_t{s} * step;
        }
    };
    template <typename Element>
    static __device__ __forceinline__ Cursor cursor(Element* base, int64_t step)
    {
        return {reinterpret_cast<char*>(const_cast<std::remove_const_t<Element>*>(base)), static_cast<int>(step * sizeof(Element))};
    }
    __device__ __forceinline__ Cursor sums_cursor(int cell) const
    {
        int64_t const row = int64_t{direction_} * args_.steps * args_.batch + row0_ + row_of_cell();
        return cursor(args_.sums + (row * args_.hidden + unit_of(cell)) * 4 + (kSplit ? lane_.first_gate() : 0),
            int64_t{args_.batch} * args_.hidden * 4);
    }
    // The flagged h of `layer` from `pair` of batch row `row` of the group on.
    __device__ __forceinline__ Cursor handed_cursor(int layer, int row, int pair) const
    {
        int const pairs = args_.hidden / 2;
        int64_t const first = int64_t{layer} * args_.steps * args_.batch + row0_ + row;
        return cursor(args_.handed + first * pairs + pair, int64_t{args_.batch} * pairs);
    }
    // The flagged input sums of this layer.
    __device__ __forceinline__ Cursor products_cursor(int row, int unit, int gate) const
    {
        int64_t const first = int64_t{layer_ - 1} * args_.steps * args_.batch + row0_ + row;
        return cursor(args_.products + (first * args_.hidden + unit) * 4 + gate, int64_t{args_.batch} * args_.hidden * 4);
    }
    __device__ __forceinline__ Cursor y_cursor(int row, int unit) const
    {
        return cursor(args_.y + direction_ * args_.y_direction + (row0_ + row) * args_.y_row + unit, args_.y_step);
    }

    // --- the input product of a later layer -------------------------------------------------------------------------------

    __device__ __forceinline__ void multiply_steps()
    {
        int const steps = steps_of_group();
        int const pairs = args_.hidden / 2; // a block has at least as many threads
        bool const reads = thread_ < pairs;
        Cursor const from = handed_cursor(layer_ - 1, 0, thread_);
        int const to = place(0, 2 * thread_);
        int const unit = unit0_ + lane_.unit();
        int const gate = lane_.first_gate();
        auto bias_of = [&](int of) {
            return unit < args_.hidden ? input_bias<kCell>(args_.layers[layer_].bias, args_.hidden, of, unit) : 0.0f;
        };
        float const bias_first = bias_of(gate), bias_second = bias_of(gate + 2);
        constexpr int kOut = kRows == 1 ? 1 : 2; // batch rows that a lane has in its product
        Cursor out[kOut];
#pragma unroll
        for (int i = 0; i < kOut; ++i)
            out[i] = kRows == 1 ? products_cursor(0, unit, gate + 2 * (lane_.q & 1)) : products_cursor(2 * lane_.q + i, unit, gate);

        auto word = [&](int s, int row) { return reinterpret_cast<uint64_t const*>(from.at(s)) + int64_t{row} * pairs; };
        auto ask = [&](uint64_t(&words)[kRows], int s) {
#pragma unroll
            for (int row = 0; row < kRows; ++row)
                words[row] = reads && row < rows_ && s < steps ? flagged_load(word(s, row)) : 0;
        };
        uint64_t words[2][kRows];
        ask(words[0], 0);
        ask(words[1], 1);
        for (int s0 = 0; s0 < steps; s0 += 2)
        {
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                int const s = s0 + half;
                if (s >= steps)
                    break;
#pragma unroll
                for (int row = 0; row < kRows; ++row)
                {
                    if (!reads || row >= rows_)
                        continue;
                    while (static_cast<uint32_t>(words[half][row] >> 32) != kReady)
                    {
                        patience_.spend(1);
                        words[half][row] = flagged_load(word(s, row));
                    }
                    *reinterpret_cast<uint32_t*>(buffer(half) + to + row * kStride) = static_cast<uint32_t>(words[half][row]);
                }
                patience_.rest();
                __syncthreads();
                ask(words[half], s + 2);
                float sums[kTiles][4];
                multiply<T, kSliceBytes>(sums, weights_, column(half));
                if (!alive_)
                    continue;
                auto hand = [&](char* at, int row, float sum) {
                    if (row < rows_)
                        flagged_store(reinterpret_cast<uint64_t*>(at), __float_as_uint(sum));
                };
                if constexpr (kRows == 1)
                {
                    // All columns are the same.
                    if (lane_.q < 2)
                        hand(out[0].at(s), 0, lane_.q == 0 ? sums[0][0] + bias_first : sums[0][2] + bias_second);
                }
                else
                {
#pragma unroll
                    for (int i = 0; i < kOut; ++i)
                    {
                        char* const at = out[i].at(s);
                        hand(at, 2 * lane_.q + i, sums[0][i] + bias_first);
                        hand(at + 16, 2 * lane_.q + i, sums[0][2 + i] + bias_second);
                    }
                }
            }
        }
    }

    // --- the recurrence ---------------------------------------------------------------------------------------------------

    // The flagged words of one cell, two or four.
    static constexpr int kFlagged = kSplit ? 2 : 4;
    struct Words
    {
        uint64_t word[kFlagged];

        __device__ __forceinline__ bool complete() const
        {
            bool all = true;
#pragma unroll
            for (int i = 0; i < kFlagged; ++i)
                all = all && static_cast<uint32_t>(word[i] >> 32) == kReady;
            return all;
        }
    };
    static __device__ __forceinline__ Words load_words(char const* at)
    {
        Words words;
#pragma unroll
        for (int i = 0; i < kFlagged; ++i)
            words.word[i] = flagged_load(reinterpret_cast<uint64_t const*>(at) + (kSplit ? 2 * i : i));
        return words;
    }
    static __device__ __forceinline__ Input input_of(Words const& words)
    {
        auto value = [&](int i) { return __uint_as_float(static_cast<uint32_t>(words.word[i])); };
        if constexpr (kSplit)
            return make_float2(value(0), value(1));
        else
            return make_float4(value(0), value(1), value(2), value(3));
    }
    static __device__ __forceinline__ Input load_input(char const* at)
    {
        auto const* const gates = reinterpret_cast<float const*>(at);
        if constexpr (kSplit)
            return make_float2(gates[0], gates[2]);
        else
            return *reinterpret_cast<float4 const*>(gates);
    }

    __device__ __forceinline__ State next_state(Input const& x, float const (&sums)[kTiles][4], int cell, State const& before, float bias)
    {
        float const limit = args_.limit;
        if constexpr (!kSplit)
        {
            float4 a = gather_gates(sums[0], lane_.low);
            if constexpr (kTiles == 2)
            {
                // Columns 4 to 7 repeat 0 to 3, or a lane has a cell of each tile.
                float4 const b = gather_gates(sums[1], lane_.low);
                a = tile_of(cell) == 1 ? b : a;
            }
            if constexpr (kCell == Cell::kLstm)
                return lstm_cell<Fast>(x, a, before, limit);
            else
                return gru_cell<Fast>(x, a, before, bias, limit);
        }
        else
        {
            // Columns repeat every kRows: this lane's own pair of gates is in column row_of_cell() of any lane of its g.
            bool const odd = kRows == 2 && row_of_cell() == 1;
            float first = odd ? sums[0][1] : sums[0][0];
            float second = odd ? sums[0][3] : sums[0][2];
            if constexpr (kTiles == 2)
            {
                if (tile_of(cell) == 1)
                {
                    first = odd ? sums[1][1] : sums[1][0];
                    second = odd ? sums[1][3] : sums[1][2];
                }
            }
            first = Fast::sigmoid(clipped(first + x.x, limit)); // i and f, or r and z
            if constexpr (kCell == Cell::kLstm)
            {
                // g in low lanes, o in the others, by one function: tanh(x) = 2 sigmoid(2x) - 1.
                second = Fast::tanh_or_sigmoid(clipped(second + x.y, limit), lane_.low);
                float const other_first = __shfl_xor_sync(kWarp, first, 16);
                float const other_second = __shfl_xor_sync(kWarp, second, 16);
                float const i = lane_.low ? first : other_first;
                float const f = lane_.low ? other_first : first;
                float const g = lane_.low ? second : other_second;
                float const o = lane_.low ? other_second : second;
                float const c = f * before.c + i * g;
                return {o * Fast::tanh(c), c};
            }
            else
            {
                // Right in low lanes, which have r and n.
                float const z = __shfl_xor_sync(kWarp, first, 16);
                float const n = Fast::tanh(clipped(x.y + first * (second + bias), limit));
                return {n + z * (before.h - n), 0.0f};
            }
        }
    }

    // kLater: of a layer whose input sums come while it runs.
    template <bool kLater>
    __device__ __forceinline__ void recur()
    {
        Layer<T> const& layer = args_.layers[layer_];
        int const row = row_of_cell();
        int const length = length_of_row()[row];
        int const steps = steps_of_group();

        State state[kCount];
        float bias[kCount];
        Cursor from[kCount];
        bool mine[kCount];
#pragma unroll
        for (int cell = 0; cell < kCount; ++cell)
        {
            int const unit = unit_of(cell);
            mine[cell] = exists(cell);
            from[cell] = kLater ? products_cursor(row, unit, kSplit ? lane_.first_gate() : 0) : sums_cursor(cell);
            state[cell].h = mine[cell] && layer.h0 ? widen(layer.h0[state_index(row0_ + row, unit)]) : 0.0f;
            state[cell].c = kCell == Cell::kLstm && mine[cell] && layer.c0 ? widen(layer.c0[state_index(row0_ + row, unit)]) : 0.0f;
            T const* const given = layer.bias ? layer.bias + direction_ * 2 * kGates<kCell> * args_.hidden : nullptr;
            bias[cell] = kCell == Cell::kGru && mine[cell] ? reset_bias(given, args_.hidden, unit) : 0.0f;
        }
        // Input sums are asked for two steps ahead.
        Input ahead[2][kCount];
        Words words[2];
        auto ask = [&](int half, int s) {
            if constexpr (kLater)
            {
                if (mine[0] && s < steps)
                    words[half] = load_words(from[0].at(s));
            }
            else
            {
#pragma unroll
                for (int cell = 0; cell < kCount; ++cell)
                {
                    if (mine[cell] && s < steps)
                        ahead[half][cell] = load_input(from[cell].at(time_of(s, length)));
                }
            }
        };
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
#pragma unroll
            for (int cell = 0; cell < kCount; ++cell)
                ahead[half][cell] = Input{};
            words[half] = Words{};
            ask(half, half);
        }
        Giver const giver(*this);
        if (kCluster > 1 && !(kGathers ? block_units_ > 0 : alive_))
            return;

        for (int s0 = 0; s0 < steps; s0 += 2)
        {
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                int const s = s0 + half;
                if (s >= steps)
                    break;
                Input x[kCount];
                if constexpr (kLater)
                {
                    while (mine[0] && !words[half].complete())
                    {
                        patience_.spend(2);
                        words[half] = load_words(from[0].at(s));
                    }
                    patience_.rest();
                    x[0] = input_of(words[half]);
                }
                else
                {
#pragma unroll
                    for (int cell = 0; cell < kCount; ++cell)
                        x[cell] = ahead[half][cell];
                }
                ask(half, s + 2);
                if constexpr (kCluster > 1)
                {
                    if (half == 1 || s0 > 0)
                    {
                        // This half's barrier ends a phase every other step, first for step 1, or 2.
                        __syncwarp();
                        barrier_wait(barrier(half), (s0 / 2 + half + 1) & 1, patience_, 3);
                        if (thread_ == 0)
                            barrier_expect(barrier(half), message_bytes());
                    }
                }
                float sums[kTiles][4];
                multiply<T, kSliceBytes>(sums, weights_, column(half));
                giver.catch_up(*this, s, half);
                bool const live = s < length;
#pragma unroll
                for (int cell = 0; cell < kCount; ++cell)
                {
                    State const next = next_state(x[cell], sums, cell, state[cell], bias[cell]);
                    state[cell] = live ? next : state[cell];
                }
                giver.give(*this, s, half ^ 1, s + 1 < steps, state, live, length);
            }
        }
        giver.catch_up(*this, steps, steps & 1);
        finish(steps, state);
    }

    // --- what is done with h ------------------------------------------------------------------------------------------------

    // kCluster == 1: h into the other buffer, and from there to y.
    struct ToItself
    {
        bool writes[kCount];
        int to[kCount];
        int from;   // this thread's piece of 8 units for y; negative: none
        int length; // of its row
        Cursor y;

        __device__ explicit ToItself(Persistent const& p)
        {
#pragma unroll
            for (int cell = 0; cell < kCount; ++cell)
            {
                writes[cell] = p.speaks() && p.exists(cell);
                to[cell] = p.place(p.row_of_cell(), p.unit_of(cell));
            }
            int const pieces = p.args_.hidden / 8;
            int const row = p.thread_ / pieces, unit = p.thread_ % pieces * 8; // there are at least as many threads
            bool const has = p.args_.y && row < p.rows_;
            from = has ? p.place(row, unit) : -1;
            length = has ? p.length_of_row()[row] : 0;
            y = has ? p.y_cursor(row, unit) : Cursor{};
        }
        __device__ __forceinline__ void give(
            Persistent& p, int s, int half, bool, State const (&state)[kCount], bool, int) const
        {
            unsigned char* const next = p.buffer(half);
#pragma unroll
            for (int cell = 0; cell < kCount; ++cell)
            {
                if (writes[cell])
                    narrow(state[cell].h, *reinterpret_cast<T*>(next + to[cell]));
            }
            __syncthreads();
        }
        // y of the step before `s`, whose h lies in this half, while the products of `s` are under way.
        __device__ __forceinline__ void catch_up(Persistent const& p, int s, int half) const
        {
            if (from < 0 || s == 0)
                return;
            uint4 const v = *reinterpret_cast<uint4 const*>(p.buffer(half) + from);
            *reinterpret_cast<uint4*>(y.at(p.time_of(s - 1, length))) = s - 1 < length ? v : make_uint4(0, 0, 0, 0);
        }
    };

    // One batch row: every warp its four units, to all blocks, the next layer or y.
    struct ByWarp
    {
        Remote to;     // this warp's place in the first buffer of the block that this lane sends to
        Remote at;     // that block's first barrier
        bool sends;
        bool hands;    // this lane's pair to the next layer
        bool writes;   // y
        Cursor out;

        __device__ __forceinline__ void catch_up(Persistent const&, int, int) const {}
        __device__ explicit ByWarp(Persistent& p)
        {
            int const lane = p.thread_ % 32;
            sends = p.alive_ && lane < kCluster && lane < p.live_blocks();
            Remote const there = remote(p.shared_, sends ? lane : 0);
            to = there + p.unit0_ * static_cast<int>(sizeof(T));
            at = there + kBarriers;
            hands = p.alive_ && !p.last_layer_ && lane < 2;
            writes = p.alive_ && p.last_layer_ && p.args_.y && lane == 0;
            out = hands ? p.handed_cursor(p.layer_, 0, p.unit0_ / 2 + lane) : writes ? p.y_cursor(0, p.unit0_) : Cursor{};
        }
        __device__ __forceinline__ void give(
            Persistent& p, int s, int half, bool more, State const (&state)[kCount], bool live, int length) const
        {
            float const h = state[0].h;
            uint32_t const first = pack_pair<T>(__shfl_sync(kWarp, h, 0), __shfl_sync(kWarp, h, 4));
            uint32_t const second = pack_pair<T>(__shfl_sync(kWarp, h, 8), __shfl_sync(kWarp, h, 12));
            if (sends && more)
                send(to + half * kBuffer, at + half * 8, first, second);
            if (hands)
                flagged_store(reinterpret_cast<uint64_t*>(out.at(s)), p.thread_ % 32 == 0 ? first : second);
            if (writes)
                *reinterpret_cast<uint2*>(out.at(p.time_of(s, length))) = live ? make_uint2(first, second) : make_uint2(0, 0);
        }
    };

    // Eight batch rows: the block gathers its units in its own buffer, then a thread for each other block copies them there; others take
    // them to y or the next layer. A part is written again two steps later: by then its copies have been read, as what they brought
    // the other blocks went into what those have sent since.
    struct ByBlock
    {
        bool keeps;   // this lane's cell exists
        int cell_at;  // where it lies in the gathered part
        Remote to;    // this block's part in the first buffer of the block that this thread copies to
        Remote at;    // that block's first barrier
        bool sends;
        int from;     // this thread's piece: 8 units for y, 2 for the next layer; negative: none
        int length;   // of its row
        Cursor out;

        __device__ __forceinline__ void catch_up(Persistent const&, int, int) const {}
        __device__ explicit ByBlock(Persistent& p)
        {
            keeps = p.exists(0);
            cell_at = p.row_of_cell() * kStride + (p.unit_of(0) - p.block_unit0_) * static_cast<int>(sizeof(T));
            sends = p.block_units_ > 0 && p.thread_ < p.live_blocks() && p.thread_ != p.rank_;
            Remote const there = remote(p.shared_, sends ? p.thread_ : 0);
            to = there + p.rank_ * kSliceBytes;
            at = there + kBarriers;
            int const size = p.last_layer_ ? 8 : 2;
            int const pieces = p.block_units_ / size;
            int const row = pieces ? p.thread_ / pieces : p.rows_;
            int const unit = pieces ? p.thread_ % pieces * size : 0;
            bool const has = row < p.rows_ && (p.args_.y || !p.last_layer_);
            from = has ? row * kStride + unit * static_cast<int>(sizeof(T)) : -1;
            length = has ? p.length_of_row()[row] : 0;
            out = !has ? Cursor{}
                : p.last_layer_ ? p.y_cursor(row, p.block_unit0_ + unit)
                                : p.handed_cursor(p.layer_, row, (p.block_unit0_ + unit) / 2);
        }
        __device__ __forceinline__ void give(
            Persistent& p, int s, int half, bool more, State const (&state)[kCount], bool, int) const
        {
            unsigned char* const gathered = p.own_part(half);
            if (keeps)
                narrow(state[0].h, *reinterpret_cast<T*>(gathered + cell_at));
            before_async_reads();
            __syncthreads();
            if (sends && more)
                copy_to_block(to + half * kBuffer, gathered, p.rows_ * 64, at + half * 8);
            if (from < 0)
                return;
            if (p.last_layer_)
            {
                uint4 const v = *reinterpret_cast<uint4 const*>(gathered + from);
                *reinterpret_cast<uint4*>(out.at(p.time_of(s, length))) = s < length ? v : make_uint4(0, 0, 0, 0);
            }
            else
                flagged_store(reinterpret_cast<uint64_t*>(out.at(s)), *reinterpret_cast<uint32_t const*>(gathered + from));
        }
    };

    using Giver = std::conditional_t<kCluster == 1, ToItself, std::conditional_t<kGathers, ByBlock, ByWarp>>;

    // Zeros behind the longest row, and the last states.
    __device__ __forceinline__ void finish(int steps, State const (&state)[kCount])
    {
        int const row = row_of_cell();
        Layer<T> const& layer = args_.layers[layer_];
        if (!speaks())
            return;
#pragma unroll
        for (int cell = 0; cell < kCount; ++cell)
        {
            int const unit = unit_of(cell);
            if (!exists(cell))
                continue;
            T zero;
            narrow(0.0f, zero);
            Cursor const y = y_cursor(row, unit);
            for (int s = steps; last_layer_ && args_.y && s < args_.steps; ++s)
                *reinterpret_cast<T*>(y.at(s)) = zero;
            if (layer.h_last)
                narrow(state[cell].h, layer.h_last[state_index(row0_ + row, unit)]);
            if (kCell == Cell::kLstm && layer.c_last)
                narrow(state[cell].c, layer.c_last[state_index(row0_ + row, unit)]);
        }
    }
};

template <typename T, Cell kCell, int kSlices, int kTiles, int kRows, int kCluster>
__global__ void __launch_bounds__(kPersistentThreads<kSlices, kTiles, kCluster>, 1)
    persistent(__grid_constant__ RecurrentArgs<T> const args)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    if constexpr (kCluster > 1)
        return;
#endif
    ONNXFUSE_SHARED(shared);
    Persistent<T, kCell, kSlices, kTiles, kRows, kCluster>(args, shared).run();
}
} // namespace onnxfuse
