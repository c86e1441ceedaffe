// A recurrence whose weights stay in registers while h goes through global memory: any GPU that launches cooperatively, hidden up to
// 1024, any batch.
//
// A block has 4 * kTiles units. Each of its warps has an eighth of k, for all of the block's rows and all batch rows, and reads its
// part of h straight into tensor core operands; the eight partial sums meet in shared memory. A grid barrier ends a step.
//
// h is rounded to T where it is exchanged; sums, gates and state are float32.
#pragma once

#include "fragment.cuh"
#include "steps.cuh"

namespace onnxfuse
{
constexpr int kResidentWarps = 8;
constexpr int kResidentThreads = 32 * kResidentWarps;
constexpr int kResidentAhead = 4; // cells of a thread whose input sums are asked for before the barrier

// The exchanged h is at args.h as T: [2, directions, batch, hidden]. Blocks: directions times hidden / (4 * kTiles), rounded up.
// `columns`: batch rows whose partial sums fit in shared memory, a multiple of 8.
template <typename T, Cell kCell, int kTiles, int kSlices>
__global__ void __launch_bounds__(kResidentThreads, 1) resident(__grid_constant__ StepArgs<T> const args, int columns)
{
    constexpr int kUnits = 4 * kTiles;
    ONNXFUSE_SHARED(shared);
    auto* const parts = reinterpret_cast<float4*>(shared); // [warp][column][unit]
    auto* const states = reinterpret_cast<State*>(shared + sizeof(float4) * kResidentWarps * columns * kUnits); // [row][unit]

    int const thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    Lane const lane(thread % 32);
    int const blocks_each = (args.hidden + kUnits - 1) / kUnits;
    int const direction = static_cast<int>(blockIdx.x) / blocks_each;
    int const unit0 = static_cast<int>(blockIdx.x) % blocks_each * kUnits;
    int const k0 = warp * 32 * kSlices;
    Patience patience(args.fault);

    Slice weights[kTiles][kSlices];
    T const* const source = args.weights + int64_t{direction} * kGates<kCell> * args.hidden * args.hidden;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
        load_tile_part<kCell>(weights[m], source, args.hidden, args.hidden, unit0 + 4 * m, k0, lane);

    T* const exchanged = reinterpret_cast<T*>(args.h) + int64_t{direction} * args.batch * args.hidden;
    int64_t const turn = int64_t{args.directions} * args.batch * args.hidden;
    int const cells = args.batch * kUnits;
    T const* const bias = args.bias ? args.bias + direction * 2 * kGates<kCell> * args.hidden : nullptr;
    auto unit_of = [&](int cell) { return unit0 + cell % kUnits; };
    auto length_of = [&](int row) {
        int const given = args.lengths ? args.lengths[row] : args.steps;
        return given < 0 ? 0 : given < args.steps ? given : args.steps;
    };
    auto time_of = [&](int s, int length) { return (args.reversed >> direction & 1) && s < length ? length - 1 - s : s; };
    auto state_index = [&](int row, int unit) { return direction * args.state_direction + row * args.state_row + unit; };
    auto input_sums = [&](int s, int cell) {
        int const row = cell / kUnits, unit = unit_of(cell);
        if (cell >= cells || unit >= args.hidden || s >= args.steps)
            return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        int64_t const at = (int64_t{direction} * args.steps + time_of(s, length_of(row))) * args.batch + row;
        return reinterpret_cast<float4 const*>(args.sums)[at * args.hidden + unit];
    };

    for (int cell = thread; cell < cells; cell += kResidentThreads)
    {
        int const row = cell / kUnits, unit = unit_of(cell);
        State state{0.0f, 0.0f};
        if (unit < args.hidden)
        {
            if (args.h0)
                state.h = widen(args.h0[state_index(row, unit)]);
            if (kCell == Cell::kLstm && args.c0)
                state.c = widen(args.c0[state_index(row, unit)]);
            narrow(state.h, exchanged[row * args.hidden + unit]);
        }
        states[cell] = state;
    }

    for (int s = 0; s < args.steps; ++s)
    {
        T const* const before = exchanged + (s & 1) * turn;
        T* const after = exchanged + (s + 1 & 1) * turn;
        float4 ahead[kResidentAhead];
#pragma unroll
        for (int i = 0; i < kResidentAhead; ++i)
            ahead[i] = input_sums(s, thread + i * kResidentThreads);
        grid_barrier(args.barrier, s + 1, patience, 20);
        for (int column0 = 0; column0 < args.batch; column0 += columns)
        {
            int const count = min(columns, args.batch - column0);
            for (int c = 0; c < count; c += 8)
            {
                int const row = column0 + c + lane.g;
                uint4 h[kSlices];
#pragma unroll
                for (int i = 0; i < kSlices; ++i)
                {
                    int const k = k0 + 32 * i + 8 * lane.q;
                    h[i] = make_uint4(0, 0, 0, 0);
                    if (row < args.batch && k < args.hidden)
                        h[i] = __ldcg(reinterpret_cast<uint4 const*>(before + int64_t{row} * args.hidden + k));
                }
                float sums[kTiles][4] = {};
#pragma unroll
                for (int i = 0; i < kSlices; ++i)
                {
#pragma unroll
                    for (int m = 0; m < kTiles; ++m)
                        mma_any(sums[m], weights[m][i][0], weights[m][i][1], weights[m][i][2], weights[m][i][3], h[i].x, h[i].y, T{});
#pragma unroll
                    for (int m = 0; m < kTiles; ++m)
                        mma_any(sums[m], weights[m][i][4], weights[m][i][5], weights[m][i][6], weights[m][i][7], h[i].z, h[i].w, T{});
                }
                int const column = c + 2 * lane.q + (lane.low ? 0 : 1);
#pragma unroll
                for (int m = 0; m < kTiles; ++m)
                    parts[(warp * columns + column) * kUnits + 4 * m + lane.unit()] = gather_gates(sums[m], lane.low);
            }
            __syncthreads();
            // The cells of these rows, in the order of `thread`, so that a cell stays with its thread where all rows fit.
            int const first = column0 * kUnits;
            for (int i = 0; first + thread + i * kResidentThreads < (column0 + count) * kUnits; ++i)
            {
                int const cell = first + thread + i * kResidentThreads;
                int const row = cell / kUnits, unit = unit_of(cell);
                if (unit >= args.hidden)
                    continue;
                float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int w = 0; w < kResidentWarps; ++w)
                {
                    float4 const part = parts[w * columns * kUnits + cell - first];
                    a = make_float4(a.x + part.x, a.y + part.y, a.z + part.z, a.w + part.w);
                }
                float4 x;
                if (column0 == 0 && i < kResidentAhead)
                    x = i == 0 ? ahead[0] : i == 1 ? ahead[1] : i == 2 ? ahead[2] : ahead[3];
                else
                    x = input_sums(s, cell);
                State const old = states[cell];
                State next;
                if constexpr (kCell == Cell::kLstm)
                    next = lstm_cell<Fast>(x, a, old, args.limit);
                else
                    next = gru_cell<Fast>(x, a, old, reset_bias(bias, args.hidden, unit), args.limit);
                int const length = length_of(row);
                bool const live = s < length;
                next = live ? next : old;
                states[cell] = next;
                T rounded;
                narrow(next.h, rounded);
                after[row * args.hidden + unit] = rounded;
                if (args.y)
                    narrow(live ? next.h : 0.0f,
                        args.y[time_of(s, length) * args.y_step + direction * args.y_direction + row * args.y_row + unit]);
            }
            __syncthreads(); // the partial sums are read
        }
    }
    for (int cell = thread; cell < cells; cell += kResidentThreads)
    {
        int const row = cell / kUnits, unit = unit_of(cell);
        if (unit >= args.hidden)
            continue;
        if (args.h_last)
            narrow(states[cell].h, args.h_last[state_index(row, unit)]);
        if (kCell == Cell::kLstm && args.c_last)
            narrow(states[cell].c, args.c_last[state_index(row, unit)]);
    }
}
} // namespace onnxfuse
