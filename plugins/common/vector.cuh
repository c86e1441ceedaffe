// Loads, stores and conversions of 16-byte vectors and of single elements. Arithmetic is float32 everywhere: a value is converted
// once when loaded and rounded once (to nearest even) when stored.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "dtype.h"

namespace onnxfuse
{
// N elements of T as they lie in memory: one, or as many as fill 16 bytes.
template <typename T, int N>
struct Vector;

template <typename T>
struct Vector<T, 1>
{
    T v[1];
};

template <>
struct Vector<float, 4>
{
    uint4 v;
};

template <>
struct Vector<__half, 8>
{
    uint4 v;
};

template <>
struct Vector<__nv_bfloat16, 8>
{
    uint4 v;
};

template <typename T, int N>
__device__ __forceinline__ Vector<T, N> load(T const* base, int64_t vector)
{
    return reinterpret_cast<Vector<T, N> const*>(base)[vector];
}

template <typename T, int N>
__device__ __forceinline__ void store(T* base, int64_t vector, Vector<T, N> const& value)
{
    reinterpret_cast<Vector<T, N>*>(base)[vector] = value;
}

__device__ __forceinline__ float widen(float x)
{
    return x;
}
__device__ __forceinline__ float widen(__half x)
{
    return __half2float(x);
}
__device__ __forceinline__ float widen(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

// The same bits as another type.
template <typename To, typename From>
__device__ __forceinline__ To bits_as(From const& from)
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

template <typename T>
__device__ __forceinline__ void unpack(Vector<T, 1> const& from, float (&to)[1])
{
    to[0] = widen(from.v[0]);
}
__device__ __forceinline__ void unpack(Vector<float, 4> const& from, float (&to)[4])
{
    to[0] = __uint_as_float(from.v.x);
    to[1] = __uint_as_float(from.v.y);
    to[2] = __uint_as_float(from.v.z);
    to[3] = __uint_as_float(from.v.w);
}
__device__ __forceinline__ void unpack(Vector<__half, 8> const& from, float (&to)[8])
{
    unsigned const words[4] = {from.v.x, from.v.y, from.v.z, from.v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
    {
        float2 const pair = __half22float2(bits_as<__half2>(words[i]));
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}
__device__ __forceinline__ void unpack(Vector<__nv_bfloat16, 8> const& from, float (&to)[8])
{
    unsigned const words[4] = {from.v.x, from.v.y, from.v.z, from.v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
    {
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void narrow(float x, float& to)
{
    to = x;
}
__device__ __forceinline__ void narrow(float x, __half& to)
{
    to = __float2half_rn(x);
}
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& to)
{
    to = __float2bfloat16_rn(x);
}

template <typename T>
__device__ __forceinline__ void pack(float const (&from)[1], Vector<T, 1>& to)
{
    narrow(from[0], to.v[0]);
}
__device__ __forceinline__ void pack(float const (&from)[4], Vector<float, 4>& to)
{
    to.v = make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), __float_as_uint(from[3]));
}
__device__ __forceinline__ void pack(float const (&from)[8], Vector<__half, 8>& to)
{
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
    {
        __half2 const pair = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
        words[i] = bits_as<unsigned>(pair);
    }
    to.v = make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void pack(float const (&from)[8], Vector<__nv_bfloat16, 8>& to)
{
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
    {
        __nv_bfloat162 const pair = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
        words[i] = bits_as<unsigned>(pair);
    }
    to.v = make_uint4(words[0], words[1], words[2], words[3]);
}

// Two neighbours in a register, the first one low.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float a, float b);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float a, float b)
{
    return bits_as<uint32_t>(__floats2half2_rn(a, b));
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float a, float b)
{
    return bits_as<uint32_t>(__floats2bfloat162_rn(a, b));
}
} // namespace onnxfuse
