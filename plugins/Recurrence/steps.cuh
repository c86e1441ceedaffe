// A recurrence of any size and type: every step reads the weights again, a warp for each unit and up to eight batch rows. One launch for
// all steps where all blocks are resident at once (a grid barrier between steps), or one launch for each.
//
// h and c are float32 in memory; weights of half types are widened. The weights that a block reads come from its L1 cache after the
// first step where they fit.
#pragma once

#include "cell.cuh"

namespace onnxfuse
{
template <typename T>
struct StepArgs
{
    T const* weights;    // [directions, gates * hidden, hidden]
    T const* bias;       // [directions, 2 * gates * hidden], or null
    T const* h0;         // null: zeros
    T const* c0;         // null: zeros
    T* h_last;           // null: not wanted
    T* c_last;           // null: not wanted
    float const* sums;   // as in RecurrentArgs
    float* h;            // [2, directions, batch, hidden]: before and after a step, in turn
    float* c;            // [directions, batch, hidden]
    float* reset;        // r h, [directions, batch, hidden]; Cell::kGruResetFirst
    float* update;       // z, likewise
    unsigned* barrier;   // starts at zero
    int32_t const* lengths;
    T* y;
    int64_t y_step, y_direction, y_row;
    int64_t state_direction, state_row;
    int steps, batch, hidden, directions;
    int reversed;
    float limit;
    int* fault;
};

constexpr int kStepThreads = 256;

template <typename T, Cell kCell, int kRows>
class Steps
{
    static constexpr int kVector = 16 / sizeof(T);

    StepArgs<T> const& args_;
    int const lane_ = static_cast<int>(threadIdx.x) % 32;

    struct Item
    {
        int direction, unit, row0, rows;
    };

public:
    __device__ explicit Steps(StepArgs<T> const& args)
        : args_(args)
    {
    }

    // Steps first to last - 1.
    __device__ __forceinline__ void run(int first, int last)
    {
        Patience patience(args_.fault);
        unsigned round = 0;
        if (first == 0)
        {
            fill();
            grid_barrier(args_.barrier, ++round, patience, 10);
        }
        for (int s = first; s < last; ++s)
        {
            if constexpr (kCell == Cell::kGruResetFirst)
            {
                each([&](Item const& item) { gates_first(s, item); });
                grid_barrier(args_.barrier, ++round, patience, 11);
            }
            each([&](Item const& item) { step(s, item); });
            if (s + 1 < last)
                grid_barrier(args_.barrier, ++round, patience, 12);
        }
    }

    // The three parts of a step, for launches of their own.
    __device__ __forceinline__ void fill()
    {
        int const all = args_.directions * args_.batch * args_.hidden;
        for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < all; i += static_cast<int>(gridDim.x * blockDim.x))
        {
            int const unit = i % args_.hidden, row = i / args_.hidden % args_.batch, direction = i / args_.hidden / args_.batch;
            int64_t const given = direction * args_.state_direction + row * args_.state_row + unit;
            args_.h[i] = args_.h0 ? widen(args_.h0[given]) : 0.0f;
            if (kCell == Cell::kLstm)
                args_.c[i] = args_.c0 ? widen(args_.c0[given]) : 0.0f;
        }
    }
    __device__ __forceinline__ void reset(int s)
    {
        each([&](Item const& item) { gates_first(s, item); });
    }
    __device__ __forceinline__ void step(int s)
    {
        each([&](Item const& item) { step(s, item); });
    }

private:
    template <typename Act>
    __device__ __forceinline__ void each(Act act)
    {
        int const groups = (args_.batch + kRows - 1) / kRows;
        int const items = args_.directions * groups * args_.hidden;
        int const warps = static_cast<int>(gridDim.x * blockDim.x) / 32;
        for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32; i < items; i += warps)
        {
            int const group = i / args_.hidden % groups;
            int const row0 = group * kRows;
            act(Item{i / args_.hidden / groups, i % args_.hidden, row0, min(kRows, args_.batch - row0)});
        }
    }

    __device__ __forceinline__ int64_t cell_of(Item const& item, int row) const
    {
        return (int64_t{item.direction} * args_.batch + item.row0 + row) * args_.hidden + item.unit;
    }
    __device__ __forceinline__ float* h_at(int step) const
    {
        return args_.h + (step & 1) * int64_t{args_.directions} * args_.batch * args_.hidden;
    }

    // Sums of kCount gates from `first_gate` on times rows of `vectors`, [directions, batch, hidden]; lane r has those of row r.
    template <int kCount>
    __device__ __forceinline__ void multiply(float const* vectors, Item const& item, int first_gate, float (&of_lane)[kCount]) const
    {
        T const* rows[kCount];
#pragma unroll
        for (int g = 0; g < kCount; ++g)
            rows[g] = args_.weights
                + (int64_t{item.direction} * kGates<kCell> * args_.hidden + onnx_gate<kCell>(first_gate + g) * args_.hidden + item.unit) * args_.hidden;
        float const* const vector0 = vectors + (int64_t{item.direction} * args_.batch + item.row0) * args_.hidden;
        float sums[kCount][kRows] = {};
        for (int k = lane_ * kVector; k < args_.hidden; k += 32 * kVector)
        {
            float weights[kCount][kVector];
#pragma unroll
            for (int g = 0; g < kCount; ++g)
                unpack(load<T, kVector>(rows[g] + k, 0), weights[g]);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
            {
                if (r >= item.rows)
                    break;
#pragma unroll
                for (int j = 0; j < kVector; j += 4)
                {
                    float4 const v = load_fresh(vector0 + r * args_.hidden + k + j);
#pragma unroll
                    for (int g = 0; g < kCount; ++g)
                        sums[g][r] += weights[g][j] * v.x + weights[g][j + 1] * v.y + weights[g][j + 2] * v.z + weights[g][j + 3] * v.w;
                }
            }
        }
#pragma unroll
        for (int g = 0; g < kCount; ++g)
        {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
            {
                float sum = sums[g][r];
#pragma unroll
                for (int offset = 16; offset > 0; offset /= 2)
                    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
                if (kRows == 1 || lane_ == r)
                    of_lane[g] = sum;
            }
        }
    }

    __device__ __forceinline__ int length_of(int row) const
    {
        int const given = args_.lengths ? args_.lengths[row] : args_.steps;
        return given < 0 ? 0 : given < args_.steps ? given : args_.steps;
    }
    __device__ __forceinline__ int time_of(int s, int length, int direction) const
    {
        return (args_.reversed >> direction & 1) && s < length ? length - 1 - s : s;
    }
    __device__ __forceinline__ float4 input_sums(int s, Item const& item, int row) const
    {
        int const time = time_of(s, length_of(item.row0 + row), item.direction);
        int64_t const at = ((int64_t{item.direction} * args_.steps + time) * args_.batch + item.row0 + row) * args_.hidden + item.unit;
        return *reinterpret_cast<float4 const*>(args_.sums + 4 * at);
    }

    // Cell::kGruResetFirst: r h and z.
    __device__ __forceinline__ void gates_first(int s, Item const& item)
    {
        float sums[2] = {};
        multiply<2>(h_at(s), item, 0, sums);
        if (lane_ >= item.rows)
            return;
        float4 const x = input_sums(s, item, lane_);
        int64_t const cell = cell_of(item, lane_);
        args_.reset[cell] = Accurate::sigmoid(clipped(x.x + sums[0], args_.limit)) * __ldcg(h_at(s) + cell);
        args_.update[cell] = Accurate::sigmoid(clipped(x.y + sums[1], args_.limit));
    }

    __device__ __forceinline__ void step(int s, Item const& item)
    {
        float sums[4] = {};
        if constexpr (kCell == Cell::kLstm)
            multiply<4>(h_at(s), item, 0, sums);
        else if constexpr (kCell == Cell::kGru)
        {
            float three[3] = {};
            multiply<3>(h_at(s), item, 0, three);
            sums[0] = three[0];
            sums[1] = three[1];
            sums[2] = three[2];
        }
        else
        {
            float one[1] = {};
            multiply<1>(args_.reset, item, 2, one);
            sums[2] = one[0];
        }
        if (lane_ >= item.rows)
            return;
        int const row = item.row0 + lane_;
        int const length = length_of(row);
        bool const live = s < length;
        int64_t const cell = cell_of(item, lane_);
        float4 const x = input_sums(s, item, lane_);
        float4 const a = make_float4(sums[0], sums[1], sums[2], sums[3]);
        State before{__ldcg(h_at(s) + cell), 0.0f};
        State next;
        if constexpr (kCell == Cell::kLstm)
        {
            before.c = __ldcg(args_.c + cell);
            next = lstm_cell<Accurate>(x, a, before, args_.limit);
        }
        else if constexpr (kCell == Cell::kGru)
        {
            T const* const bias = args_.bias ? args_.bias + item.direction * 2 * kGates<kCell> * args_.hidden : nullptr;
            next = gru_cell<Accurate>(x, a, before, reset_bias(bias, args_.hidden, item.unit), args_.limit);
        }
        else
        {
            float const z = __ldcg(args_.update + cell);
            float const n = Accurate::tanh(clipped(x.z + a.z, args_.limit));
            next = {n + z * (before.h - n), 0.0f};
        }
        next = live ? next : before;
        h_at(s + 1)[cell] = next.h;
        if (kCell == Cell::kLstm)
            args_.c[cell] = next.c;
        if (args_.y)
            narrow(live ? next.h : 0.0f,
                args_.y[time_of(s, length, item.direction) * args_.y_step + item.direction * args_.y_direction + row * args_.y_row + item.unit]);
        if (s + 1 == args_.steps)
        {
            int64_t const at = item.direction * args_.state_direction + row * args_.state_row + item.unit;
            if (args_.h_last)
                narrow(next.h, args_.h_last[at]);
            if (kCell == Cell::kLstm && args_.c_last)
                narrow(next.c, args_.c_last[at]);
        }
    }
};

// Several steps, all blocks resident.
template <typename T, Cell kCell, int kRows>
__global__ void __launch_bounds__(kStepThreads, 2) all_steps(__grid_constant__ StepArgs<T> const args)
{
    Steps<T, kCell, kRows>(args).run(0, args.steps);
}

// Part 0: the first h and c; 1: GRU's gates where the reset gate comes first; 2: the step.
template <typename T, Cell kCell, int kRows>
__global__ void __launch_bounds__(kStepThreads, 2) one_step(__grid_constant__ StepArgs<T> const args, int s, int part)
{
    Steps<T, kCell, kRows> steps(args);
    if (part == 0)
        steps.fill();
    else if (part == 1)
    {
        if constexpr (kCell == Cell::kGruResetFirst)
            steps.reset(s);
    }
    else
        steps.step(s);
}
} // namespace onnxfuse
