// The operators of an element-wise expression, with the meaning that the ONNX operators have in onnxruntime.
//
// Real numbers are float32 here. Compiled without contraction and without fast math, +, -, *, / and the square root are those of IEEE 754,
// bit for bit as the operators one by one; other functions are the CUDA library's, within a few units of the last place. NaN goes through
// everything but comparisons, ThresholdedRelu and the bounds of Clip. Integers wrap around; an integer divided by zero gives zero.
#pragma once

#include <cmath>
#include <cstdint>

namespace onnxfuse
{
#define ONNXFUSE_OPERATOR __device__ __forceinline__

// --- arithmetic -------------------------------------------------------------------------------------------------------

ONNXFUSE_OPERATOR float add(float a, float b) { return a + b; }
ONNXFUSE_OPERATOR int32_t add(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
ONNXFUSE_OPERATOR int64_t add(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }

ONNXFUSE_OPERATOR float subtract(float a, float b) { return a - b; }
ONNXFUSE_OPERATOR int32_t subtract(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)); }
ONNXFUSE_OPERATOR int64_t subtract(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)); }

ONNXFUSE_OPERATOR float multiply(float a, float b) { return a * b; }
ONNXFUSE_OPERATOR int32_t multiply(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b)); }
ONNXFUSE_OPERATOR int64_t multiply(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }

template <typename T>
ONNXFUSE_OPERATOR T negate(T a) { return subtract(T{0}, a); }
template <>
ONNXFUSE_OPERATOR float negate<float>(float a) { return -a; }

ONNXFUSE_OPERATOR float divide(float a, float b) { return a / b; }
template <typename T>
ONNXFUSE_OPERATOR T divide(T a, T b)
{
    // The smallest number over -1 wraps around, where a division would trap on a host.
    return b == 0 ? T{0} : b == -1 ? negate(a) : a / b;
}

ONNXFUSE_OPERATOR float absolute(float a) { return fabsf(a); }
template <typename T>
ONNXFUSE_OPERATOR T absolute(T a) { return a < 0 ? negate(a) : a; }

template <typename T>
ONNXFUSE_OPERATOR T maximum(T a, T b) { return a > b || a != a ? a : b; }
template <typename T>
ONNXFUSE_OPERATOR T minimum(T a, T b) { return a < b || a != a ? a : b; }

// fmod 0: the sign of the divisor, as Python's; else of the dividend, as C's. Real numbers always have fmod 1.
ONNXFUSE_OPERATOR float modulo(float a, float b, float) { return fmodf(a, b); }
template <typename T>
ONNXFUSE_OPERATOR T modulo(T a, T b, float fmod)
{
    if (b == 0 || b == -1)
        return 0;
    T const rest = a % b;
    return fmod == 0.0f && rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// As onnxruntime, which multiplies for the exponents 2 and 3.
ONNXFUSE_OPERATOR float power(float a, float b) { return b == 2.0f ? a * a : b == 3.0f ? a * a * a : powf(a, b); }

template <typename T>
ONNXFUSE_OPERATOR T sign(T a) { return a > 0 ? T{1} : a < 0 ? T{-1} : a; }

template <typename T>
ONNXFUSE_OPERATOR T at_least(T a, T low) { return a < low ? low : a; }
template <typename T>
ONNXFUSE_OPERATOR T at_most(T a, T high) { return a > high ? high : a; }

ONNXFUSE_OPERATOR int32_t bitwise_and(int32_t a, int32_t b) { return a & b; }
ONNXFUSE_OPERATOR int64_t bitwise_and(int64_t a, int64_t b) { return a & b; }
ONNXFUSE_OPERATOR int32_t bitwise_or(int32_t a, int32_t b) { return a | b; }
ONNXFUSE_OPERATOR int64_t bitwise_or(int64_t a, int64_t b) { return a | b; }
ONNXFUSE_OPERATOR int32_t bitwise_xor(int32_t a, int32_t b) { return a ^ b; }
ONNXFUSE_OPERATOR int64_t bitwise_xor(int64_t a, int64_t b) { return a ^ b; }
ONNXFUSE_OPERATOR int32_t bitwise_not(int32_t a) { return ~a; }
ONNXFUSE_OPERATOR int64_t bitwise_not(int64_t a) { return ~a; }

// --- logic ------------------------------------------------------------------------------------------------------------

ONNXFUSE_OPERATOR bool logical_and(bool a, bool b) { return a && b; }
ONNXFUSE_OPERATOR bool logical_or(bool a, bool b) { return a || b; }
ONNXFUSE_OPERATOR bool logical_xor(bool a, bool b) { return a != b; }
ONNXFUSE_OPERATOR bool logical_not(bool a) { return !a; }

template <typename T>
ONNXFUSE_OPERATOR bool equal(T a, T b) { return a == b; }
template <typename T>
ONNXFUSE_OPERATOR bool greater(T a, T b) { return a > b; }
template <typename T>
ONNXFUSE_OPERATOR bool greater_or_equal(T a, T b) { return a >= b; }
template <typename T>
ONNXFUSE_OPERATOR bool less(T a, T b) { return a < b; }
template <typename T>
ONNXFUSE_OPERATOR bool less_or_equal(T a, T b) { return a <= b; }
template <typename T>
ONNXFUSE_OPERATOR T select(bool condition, T a, T b) { return condition ? a : b; }

ONNXFUSE_OPERATOR bool is_nan(float a) { return a != a; }
ONNXFUSE_OPERATOR bool is_inf(float a, float negative, float positive)
{
    return fabsf(a) == INFINITY && (a < 0.0f ? negative != 0.0f : positive != 0.0f);
}

// --- functions --------------------------------------------------------------------------------------------------------

ONNXFUSE_OPERATOR float reciprocal(float a) { return 1.0f / a; }
ONNXFUSE_OPERATOR float square_root(float a) { return sqrtf(a); }
ONNXFUSE_OPERATOR float exponential(float a) { return expf(a); }
ONNXFUSE_OPERATOR float logarithm(float a) { return logf(a); }
ONNXFUSE_OPERATOR float error_function(float a) { return erff(a); }
ONNXFUSE_OPERATOR float sine(float a) { return sinf(a); }
ONNXFUSE_OPERATOR float cosine(float a) { return cosf(a); }
ONNXFUSE_OPERATOR float hyperbolic_tangent(float a) { return tanhf(a); }
ONNXFUSE_OPERATOR float floor_of(float a) { return floorf(a); }
ONNXFUSE_OPERATOR float ceiling(float a) { return ceilf(a); }
ONNXFUSE_OPERATOR float round_even(float a) { return rintf(a); }

template <typename T>
ONNXFUSE_OPERATOR T relu(T a) { return a < 0 ? T{0} : a; }
ONNXFUSE_OPERATOR float leaky_relu(float a, float alpha) { return a < 0.0f ? alpha * a : a; }
ONNXFUSE_OPERATOR float prelu(float a, float slope) { return a < 0.0f ? slope * a : a; }
ONNXFUSE_OPERATOR float thresholded_relu(float a, float alpha) { return a > alpha ? a : 0.0f; }
ONNXFUSE_OPERATOR float elu(float a, float alpha) { return a < 0.0f ? alpha * expm1f(a) : a; }
ONNXFUSE_OPERATOR float celu(float a, float alpha) { return a > 0.0f ? a : alpha * expm1f(a / alpha); }
ONNXFUSE_OPERATOR float selu(float a, float alpha, float gamma) { return gamma * (a > 0.0f ? a : alpha * expm1f(a)); }
ONNXFUSE_OPERATOR float hard_sigmoid(float a, float alpha, float beta) { return at_most(at_least(alpha * a + beta, 0.0f), 1.0f); }
ONNXFUSE_OPERATOR float hard_swish(float a) { return a * hard_sigmoid(a, 0x1.555556p-3f, 0.5f); }
ONNXFUSE_OPERATOR float sigmoid(float a) { return 1.0f / (1.0f + expf(-a)); }
ONNXFUSE_OPERATOR float silu(float a) { return a * sigmoid(a); }
ONNXFUSE_OPERATOR float quick_gelu(float a) { return a * sigmoid(1.702f * a); }
ONNXFUSE_OPERATOR float softplus(float a) { return a > 0.0f ? a + log1pf(expf(-a)) : log1pf(expf(a)); }
ONNXFUSE_OPERATOR float softsign(float a) { return a / (1.0f + fabsf(a)); }
ONNXFUSE_OPERATOR float mish(float a) { return a * tanhf(softplus(a)); }
ONNXFUSE_OPERATOR float gelu(float a) { return 0.5f * a * (1.0f + erff(a * 0.70710678118654752f)); }
ONNXFUSE_OPERATOR float gelu_tanh(float a)
{
    return 0.5f * a * (1.0f + tanhf(0.79788456080286536f * (a + 0.044715f * a * a * a)));
}
} // namespace onnxfuse
