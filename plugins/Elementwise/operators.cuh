// The operators of an element-wise expression, with the meaning that the ONNX operators have in onnxruntime.
//
// Real numbers are float32 here. Compiled without contraction and without fast math, +, -, *, / and the square root are those of IEEE 754,
// bit for bit as the operators one by one; other functions are the CUDA library's, within a few units of the last place. NaN goes through
// everything but comparisons, ThresholdedRelu and the bounds of Clip. Integers wrap around; an integer divided by zero gives zero.
// The functions of namespace quick are for results that are rounded to half precision: their error, some 2^-20 of the result, is small
// beside that rounding, and infinities and NaN come from the same operands.
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

// A whole number from low to high, halves to the even one, as a float; NaN becomes the lowest.
ONNXFUSE_OPERATOR float quantize(float a, float scale, float low, float high, float zero)
{
    return fminf(fmaxf(rintf(a / scale), low - zero), high - zero) + zero;
}
ONNXFUSE_OPERATOR float dequantize(float a, float scale, float zero) { return (a - zero) * scale; }

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
// factor / (1 + exp(-a)), of a power that never overflows: exp(-a) does below -88.7, where a / (1 + exp(-a)) is a normal number down to -91.
ONNXFUSE_OPERATOR float gated(float factor, float a)
{
    float const power = expf(-fabsf(a));
    return (a < 0.0f ? factor * power : factor) / (1.0f + power);
}
ONNXFUSE_OPERATOR float sigmoid(float a) { return gated(1.0f, a); }
ONNXFUSE_OPERATOR float silu(float a) { return gated(a, a); }
ONNXFUSE_OPERATOR float quick_gelu(float a) { return gated(a, 1.702f * a); }
ONNXFUSE_OPERATOR float softplus(float a) { return a > 0.0f ? a + log1pf(expf(-a)) : log1pf(expf(a)); }
ONNXFUSE_OPERATOR float softsign(float a) { return a / (1.0f + fabsf(a)); }
ONNXFUSE_OPERATOR float mish(float a) { return a * tanhf(softplus(a)); }
ONNXFUSE_OPERATOR float gelu(float a) { return 0.5f * a * (1.0f + erff(a * 0.70710678118654752f)); }
ONNXFUSE_OPERATOR float gelu_tanh(float a)
{
    return 0.5f * a * (1.0f + tanhf(0.79788456080286536f * (a + 0.044715f * a * a * a)));
}

// --- for results in half precision ------------------------------------------------------------------------------------

namespace quick
{
// The hardware's reciprocal and power of two: denormal numbers are zero to them, as operands and as results.
#ifdef ONNXFUSE_EMULATED
#define ONNXFUSE_APART inline
inline float flushed(float a) { return std::fabs(a) < 0x1p-126f ? std::copysign(0.0f, a) : a; }
inline float inverse(float a) { return flushed(1.0f / flushed(a)); }
inline float exp2_of(float a) { return flushed(std::exp2(a)); }
#else
#define ONNXFUSE_APART __noinline__
ONNXFUSE_OPERATOR float inverse(float a)
{
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
    return result;
}
ONNXFUSE_OPERATOR float exp2_of(float a)
{
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
    return result;
}
#endif

// The divisor is brought to where its reciprocal is a normal number.
ONNXFUSE_OPERATOR float divide(float a, float b)
{
    float const scale = fabsf(b) > 0x1p100f ? 0x1p-32f : fabsf(b) < 0x1p-100f ? 0x1p32f : 1.0f;
    return a * inverse(b * scale) * scale;
}
ONNXFUSE_OPERATOR float reciprocal(float a) { return divide(1.0f, a); }
ONNXFUSE_OPERATOR float softsign(float a) { return divide(a, 1.0f + fabsf(a)); }

// Results below 2^-126 are zero: for float16 only. 0x1.715476p+0 is log2 of e.
ONNXFUSE_OPERATOR float sigmoid(float a) { return inverse(1.0f + exp2_of(-0x1.715476p+0f * a)); }
ONNXFUSE_OPERATOR float silu(float a) { return a * sigmoid(a); }
ONNXFUSE_OPERATOR float quick_gelu(float a) { return a * sigmoid(1.702f * a); }
// (1 + tanh(u)) / 2 is the sigmoid of 2 u.
ONNXFUSE_OPERATOR float gelu_tanh(float a) { return a * sigmoid(1.5957691216057307f * fmaf(0.044715f * a * a, a, a)); }

// a minus the nearest multiple of pi/2, of which the lowest bits of `quarter` are the number; for up to 2^16. pi/2 is subtracted in three
// parts (W. J. Cody and W. Waite, Software Manual for the Elementary Functions, 1980). The polynomials are those of sinf.c in S. Moshier's
// Cephes library, for up to pi/4.
constexpr float kMostAngle = 65536.0f;
ONNXFUSE_OPERATOR float reduced(float a, unsigned& quarter)
{
    float const shifted = a * 0x1.45f306p-1f + 0x1.8p23f; // its last bit is worth 1: rounded to a whole number, without slow conversions
    float const nearest = shifted - 0x1.8p23f;
    quarter = __float_as_uint(shifted);
    return fmaf(nearest, -0x1.846988p-48f, fmaf(nearest, -0x1.4442d0p-24f, fmaf(nearest, -0x1.921fb4p+0f, a)));
}
ONNXFUSE_OPERATOR float turned(float r, unsigned quarter)
{
    float const square = r * r;
    float const sine = fmaf(fmaf(fmaf(square, -1.9515295891e-4f, 8.3321608736e-3f), square, -1.6666654611e-1f), square * r, r);
    float const fourth = fmaf(fmaf(square, 2.443315711809948e-5f, -1.388731625493765e-3f), square, 4.166664568298827e-2f);
    float const cosine = fmaf(fmaf(fourth, square, -0.5f), square, 1.0f);
    float const value = quarter & 1 ? cosine : sine;
    return quarter & 2 ? -value : value;
}
// Apart, so that the code of each lane stays small.
static __device__ ONNXFUSE_APART float far_sine(float a) { return sinf(a); }
static __device__ ONNXFUSE_APART float far_cosine(float a) { return cosf(a); }
ONNXFUSE_OPERATOR float sine(float a)
{
    if (!(fabsf(a) < kMostAngle))
        return far_sine(a);
    unsigned quarter;
    float const r = reduced(a, quarter);
    return turned(r, quarter);
}
ONNXFUSE_OPERATOR float cosine(float a)
{
    if (!(fabsf(a) < kMostAngle))
        return far_cosine(a);
    unsigned quarter;
    float const r = reduced(a, quarter);
    return turned(r, quarter + 1);
}
} // namespace quick
} // namespace onnxfuse
