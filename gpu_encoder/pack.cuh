// Weights as encoder.cuh reads them: [K / 64][N / 8][8 columns of k / 8][8 rows of n][8 of k], with gamma of the norm before them, and
// vectors in float32: bias + beta W and column sums of what was packed (behind a norm), or bias, gamma and beta (before a residual).
#pragma once

#include "../plugins/common/vector.cuh"

namespace onnxfuse::encoder
{
template <typename T>
struct Linear
{
    T const* weights;
    int64_t k_stride, n_stride;
    T const* bias;
};

// Columns first to first + n - 1 of `all`.
template <typename T>
struct PackArgs
{
    Linear<T> linear;
    T const *gamma, *beta; // of the norm that is folded; null: none
    int k, n, first, all;
    uint4* to;
    float *sums, *shift; // [all] each: sums of columns, bias with beta W
};

template <typename T>
__global__ void pack_weights(PackArgs<T> const p)
{
    int64_t const pieces = static_cast<int64_t>(p.k / 8) * p.n;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pieces; i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    {
        // Neighbouring threads read neighbouring columns.
        int const n = static_cast<int>(i % p.n), k8 = static_cast<int>(i / p.n), column = p.first + n;
        uint16_t values[8];
        for (int e = 0; e < 8; ++e)
        {
            int const k = k8 * 8 + e;
            T const w = p.linear.weights[k * p.linear.k_stride + n * p.linear.n_stride];
            T scaled = w;
            if (p.gamma)
                narrow(widen(w) * widen(p.gamma[k]), scaled);
            values[e] = bits_as<uint16_t>(scaled);
        }
        uint4 piece;
        memcpy(&piece, values, 16);
        p.to[((static_cast<int64_t>(k8 / 8) * (p.all / 8) + column / 8) * 8 + k8 % 8) * 8 + column % 8] = piece;
    }
}

// A thread a column: this happens once.
template <typename T>
__global__ void pack_vectors(PackArgs<T> const p)
{
    int const n = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (n >= p.n)
        return;
    float sum = 0.0f, shift = 0.0f;
    if (p.gamma)
    {
        for (int k = 0; k < p.k; ++k)
        {
            float const w = widen(p.linear.weights[k * p.linear.k_stride + n * p.linear.n_stride]);
            T scaled;
            narrow(w * widen(p.gamma[k]), scaled);
            sum += widen(scaled);
            shift += w * widen(p.beta[k]);
        }
    }
    p.sums[p.first + n] = sum;
    p.shift[p.first + n] = shift + (p.linear.bias ? widen(p.linear.bias[n]) : 0.0f);
}

// Bias, gamma and beta of a residual sum; without a norm 1 and 0.
template <typename T>
__global__ void pack_residual(T const* bias, T const* gamma, T const* beta, int n, float* to)
{
    int const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n)
        return;
    to[i] = bias ? widen(bias[i]) : 0.0f;
    to[n + i] = gamma ? widen(gamma[i]) : 1.0f;
    to[2 * n + i] = gamma ? widen(beta[i]) : 0.0f;
}
} // namespace onnxfuse::encoder
