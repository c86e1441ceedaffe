// One cell of an LSTM or GRU: gates, activations, state. Gates in the order used here; ONNX's rows of W, R and B are i o f c and z r h.
#pragma once

#include "device.cuh"

namespace onnxfuse
{
enum class Cell : int
{
    kLstm = 0, // gates i f g o
    kGru = 1,  // gates r z n; linear_before_reset: n = tanh(W x + Wb + r (R h + Rb))
    kGruResetFirst = 2 // n = tanh(W x + Wb + R (r h) + Rb)
};

template <Cell kCell>
constexpr int kGates = kCell == Cell::kLstm ? 4 : 3;

// ONNX's place of a gate.
template <Cell kCell>
__host__ __device__ constexpr int onnx_gate(int gate)
{
    if (kCell == Cell::kLstm)
        return gate == 0 ? 0 : gate == 1 ? 2 : gate == 2 ? 3 : 1;
    return gate == 0 ? 1 : gate == 1 ? 0 : 2;
}

// What is added to a gate before the recurrence: both biases, but for the part that GRU's reset gate scales. bias: [2 * gates * hidden]
// (W's, then R's), or null.
template <Cell kCell, typename T>
__device__ __forceinline__ float input_bias(T const* bias, int hidden, int gate, int unit)
{
    if (!bias || gate >= kGates<kCell>)
        return 0.0f;
    int const row = onnx_gate<kCell>(gate) * hidden + unit;
    bool const both = kCell != Cell::kGru || gate != 2;
    return widen(bias[row]) + (both ? widen(bias[kGates<kCell> * hidden + row]) : 0.0f);
}

// The bias that GRU's reset gate scales.
template <typename T>
__device__ __forceinline__ float reset_bias(T const* bias, int hidden, int unit)
{
    return bias ? widen(bias[(3 + onnx_gate<Cell::kGru>(2)) * hidden + unit]) : 0.0f;
}

// Bounds a sum to +-limit; an infinite one is no limit. NaN stays.
__device__ __forceinline__ float clipped(float x, float limit)
{
    return smaller(larger(x, -limit), limit);
}

// Correct to a few units of float32's last place.
struct Accurate
{
    static __device__ __forceinline__ float sigmoid(float x)
    {
        return 1.0f / (1.0f + expf(-x));
    }
    static __device__ __forceinline__ float tanh(float x)
    {
        return tanhf(x);
    }
};

// One instruction for each, absolute errors of up to 5e-4, which is half the distance of numbers below 1 in float16. Against float64 the
// error of 1,000 steps is the same in two digits as with functions correct to 3e-7.
struct Fast
{
    static __device__ __forceinline__ float sigmoid(float x)
    {
        return fmaf(0.5f, tanh_approximate(0.5f * x), 0.5f);
    }
    static __device__ __forceinline__ float tanh(float x)
    {
        return tanh_approximate(x);
    }
    static __device__ __forceinline__ float tanh_or_sigmoid(float x, bool is_tanh)
    {
        float const scale = is_tanh ? 1.0f : 0.5f;
        return fmaf(scale, tanh_approximate(x * scale), 1.0f - scale);
    }
};

struct State
{
    float h;
    float c; // LSTM's
};

// The next state. `x` are the gates' input sums with their biases, `a` the recurrent sums, both in the order of gates; `bias` is
// GRU's reset_bias.
template <typename Functions>
__device__ __forceinline__ State lstm_cell(float4 const& x, float4 const& a, State const& before, float limit)
{
    float const i = Functions::sigmoid(clipped(x.x + a.x, limit));
    float const f = Functions::sigmoid(clipped(x.y + a.y, limit));
    float const g = Functions::tanh(clipped(x.z + a.z, limit));
    float const o = Functions::sigmoid(clipped(x.w + a.w, limit));
    float const c = f * before.c + i * g;
    return {o * Functions::tanh(c), c};
}

template <typename Functions>
__device__ __forceinline__ State gru_cell(float4 const& x, float4 const& a, State const& before, float bias, float limit)
{
    float const r = Functions::sigmoid(clipped(x.x + a.x, limit));
    float const z = Functions::sigmoid(clipped(x.y + a.y, limit));
    float const n = Functions::tanh(clipped(x.z + r * (a.z + bias), limit));
    return {n + z * (before.h - n), 0.0f};
}
} // namespace onnxfuse
