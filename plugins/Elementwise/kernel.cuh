// The kernels of an element-wise expression. The generated source says the expression E, these say which thread computes what:
//
//   E::Args                          the kernel's parameter. Groups are neighbouring axes that every input has or lacks together
//   E::kUnroll                       vectors of a thread whose loads are under way together
//   E::In<V, kWhole>, E::Out<V>      what V neighbouring elements read and write
//   E::load<V, kWhole>(args, element, in)      from the first of V elements on; the inputs broadcast along the last group once if kWhole
//   E::evaluate<V, kWhole>(in, out)
//   E::store<V>(args, element, out)
//   and of an expression with a reduction, evaluate with the values that are reduced as a third argument, and
//   E::result                        where it ends in one number a row
//   E::parameters, E::kEpsilon       scale and bias of a norm; E::finish<V> where it ends in what has the full shape
//   E::kMidway                       whether steps follow the reduction; then they, and all outputs, are in
//   E::after<V, kWhole>(in, out, row, result)     of the values that were reduced and what they became
//
// Three ways to run one: whole (V elements never cross the end of the last group, so that what is broadcast along it is loaded once), ragged
// (full tensors are loaded V at a time, everything else element by element) and single (V = 1, for pointers that are not at multiples of
// a vector).
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "operators.cuh"

namespace onnxfuse
{
constexpr unsigned kElementwiseThreads = 128;

// The length of a group, and what divides by it: q = (high word of n * multiplier + n) >> shift, exact for n below 2^31 (Granlund and
// Montgomery, "Division by invariant integers using multiplication", PLDI 1994, the round-up method).
struct Extent
{
    unsigned size;
    unsigned multiplier;
    unsigned shift;
    unsigned unused;
};

// As the launcher lays it out. count: elements of the full shape, below 2^31. each: vectors of a thread, up to the expression's kUnroll.
template <int kInputs, int kOutputs, int kGroups>
struct ElementwiseArgs
{
    void const* in[kInputs];
    void* out[kOutputs];
    Extent groups[kGroups];
    unsigned count;
    unsigned each;
    unsigned rows;  // of a reduction
    unsigned width; // their length
};

__device__ __forceinline__ unsigned high_word(unsigned a, unsigned b)
{
    return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
__device__ __forceinline__ unsigned quotient(unsigned n, Extent const& by)
{
    return (high_word(n, by.multiplier) + n) >> by.shift;
}

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Lanes
{
    T v[N];
};

template <typename T, int N>
__device__ __forceinline__ void fetch(void const* base, unsigned element, Lanes<T, N>& to)
{
    to = *reinterpret_cast<Lanes<T, N> const*>(static_cast<T const*>(base) + element);
}
template <typename T, int N>
__device__ __forceinline__ void put(void* base, unsigned element, Lanes<T, N> const& from)
{
    *reinterpret_cast<Lanes<T, N>*>(static_cast<T*>(base) + element) = from;
}

// --- element types ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float wide(float a) { return a; }
__device__ __forceinline__ float wide(__half a) { return __half2float(a); }
__device__ __forceinline__ float wide(__nv_bfloat16 a) { return __bfloat162float(a); }
__device__ __forceinline__ int32_t wide(int32_t a) { return a; }
__device__ __forceinline__ int64_t wide(int64_t a) { return a; }
__device__ __forceinline__ bool wide(bool a) { return a; }

// To an element type as it is stored.
template <typename T, typename From>
__device__ __forceinline__ T narrow(From a) { return static_cast<T>(a); }
template <>
__device__ __forceinline__ __half narrow<__half, float>(float a) { return __float2half_rn(a); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float a) { return __float2bfloat16_rn(a); }

// Cast: to a type, and widened again. A real number becomes true where it is not zero, and an integer by dropping its fraction.
template <typename T>
struct CastTo
{
    template <typename From>
    static __device__ __forceinline__ T of(From a) { return static_cast<T>(a); }
};
template <>
struct CastTo<bool>
{
    template <typename From>
    static __device__ __forceinline__ bool of(From a) { return a != From{0}; }
};
template <>
struct CastTo<__half>
{
    template <typename From>
    static __device__ __forceinline__ float of(From a) { return wide(__float2half_rn(static_cast<float>(a))); }
};
template <>
struct CastTo<__nv_bfloat16>
{
    template <typename From>
    static __device__ __forceinline__ float of(From a) { return wide(__float2bfloat16_rn(static_cast<float>(a))); }
};

// --- one element after another ----------------------------------------------------------------------------------------------

template <class E, int V, bool kWhole>
__device__ __forceinline__ void elementwise(typename E::Args const& args)
{
    unsigned const first = blockIdx.x * args.each * blockDim.x + threadIdx.x;
    typename E::template In<V, kWhole> in[E::kUnroll];
#pragma unroll
    for (unsigned u = 0; u < E::kUnroll; ++u)
    {
        unsigned const element = (first + u * blockDim.x) * V;
        if (u < args.each && element + V <= args.count)
            E::template load<V, kWhole>(args, element, in[u]);
    }
#pragma unroll
    for (unsigned u = 0; u < E::kUnroll; ++u)
    {
        unsigned const element = (first + u * blockDim.x) * V;
        if (u < args.each && element + V <= args.count)
        {
            typename E::template Out<V> out;
            E::template evaluate<V, kWhole>(in[u], out);
            E::template store<V>(args, element, out);
        }
        else if (u < args.each && V > 1)
        {
            for (unsigned i = element; i < args.count; ++i) // the last elements, which fill no vector
            {
                typename E::template In<1, true> one;
                typename E::template Out<1> out;
                E::template load<1, true>(args, i, one);
                E::template evaluate<1, true>(one, out);
                E::template store<1>(args, i, out);
            }
        }
    }
}

// --- rows ---------------------------------------------------------------------------------------------------------------

// Vectors of a row that a thread holds in registers between passes; longer rows are computed again.
constexpr unsigned kHeldVectors = 4;

// blockDim.x: a power of two up to 32, or whole warps; then the block is one team.
template <typename Join>
__device__ __forceinline__ float over_team(float value, Join join, float* partial)
{
    if (blockDim.x >= 32)
        value = join(value, __shfl_xor_sync(0xffffffffu, value, 16));
    if (blockDim.x >= 16)
        value = join(value, __shfl_xor_sync(0xffffffffu, value, 8));
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2)
        value = join(value, __shfl_xor_sync(0xffffffffu, value, mask));
    if (blockDim.x <= 32)
        return value;
    __syncthreads(); // the last result has been read
    if (threadIdx.x % 32 == 0)
        partial[threadIdx.x / 32] = value;
    __syncthreads();
    float total = partial[0];
    for (unsigned i = 1; i < blockDim.x / 32; ++i)
        total = join(total, partial[i]);
    return total;
}

struct AddJoin
{
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct MaxJoin
{
    __device__ __forceinline__ float operator()(float a, float b) const { return maximum(a, b); }
};
struct MinJoin
{
    __device__ __forceinline__ float operator()(float a, float b) const { return minimum(a, b); }
};

// A team of blockDim.x threads takes one row; a block has blockDim.y teams. Teams behind the last row compute that row again and store
// nothing, so that warps stay whole. width is a multiple of V.
template <class E, int V>
class Row
{
public:
    __device__ __forceinline__ Row(typename E::Args const& args, float* partial)
        : args_(args)
        , partial_(partial)
        , wanted_(blockIdx.x * blockDim.y + threadIdx.y)
        , row_(wanted_ < args.rows ? wanted_ : args.rows - 1)
    {
    }

    __device__ __forceinline__ void result(float value) const
    {
        if (threadIdx.x == 0 && there())
            E::result(args_, row_, value);
    }

protected:
    __device__ __forceinline__ bool there() const { return wanted_ < args_.rows; }
    __device__ __forceinline__ unsigned element(unsigned column) const { return row_ * args_.width + column; }

    template <bool kStore>
    __device__ __forceinline__ void compute(typename E::template In<V, true> const& in, unsigned column, float (&x)[V]) const
    {
        typename E::template Out<V> out;
        E::template evaluate<V, true>(in, out, x);
        if (kStore && !E::kMidway && there())
            E::template store<V>(args_, element(column), out);
    }
    // What has the full shape: map(value, scale, bias) is stored, or goes on into the steps that follow.
    template <typename Map>
    __device__ __forceinline__ void finish(unsigned column, float const (&x)[V], Map map) const
    {
        float scale[V], bias[V], y[V];
        typename E::template In<V, true> in;
        E::template load<V, true>(args_, element(column), in); // of it only what is used below: scale and bias, operands that follow
        E::template parameters<V, true>(in, scale, bias);
#pragma unroll
        for (int lane = 0; lane < V; ++lane)
            y[lane] = map(x[lane], scale[lane], bias[lane]);
        if constexpr (E::kMidway)
        {
            typename E::template Out<V> out;
            E::template after<V, true>(in, out, x, y);
            if (there())
                E::template store<V>(args_, element(column), out);
        }
        else if (there())
            E::template finish<V>(args_, element(column), y);
    }

    typename E::Args const& args_;
    float* partial_;
    unsigned wanted_;
    unsigned row_;
};

// A row that its team's registers hold: all of it is under way at once, and computed once.
template <class E, int V>
class HeldRow : public Row<E, V>
{
public:
    using Row<E, V>::Row;

    // The first pass: values are computed, and the outputs before the reduction stored.
    template <typename Join, typename Map>
    __device__ __forceinline__ float first(float start, Join join, Map map)
    {
        typename E::template In<V, true> in[kHeldVectors];
#pragma unroll
        for (unsigned i = 0; i < kHeldVectors; ++i)
        {
            if (column(i) < this->args_.width)
                E::template load<V, true>(this->args_, this->element(column(i)), in[i]);
        }
        float total = start;
#pragma unroll
        for (unsigned i = 0; i < kHeldVectors; ++i)
        {
            if (column(i) >= this->args_.width)
                break;
            this->template compute<true>(in[i], column(i), x_[i]);
#pragma unroll
            for (int lane = 0; lane < V; ++lane)
                total = join(total, map(x_[i][lane]));
        }
        return over_team(total, join, this->partial_);
    }
    template <typename Join, typename Map>
    __device__ __forceinline__ float again(float start, Join join, Map map)
    {
        float total = start;
#pragma unroll
        for (unsigned i = 0; i < kHeldVectors; ++i)
        {
            if (column(i) >= this->args_.width)
                break;
#pragma unroll
            for (int lane = 0; lane < V; ++lane)
                total = join(total, map(x_[i][lane]));
        }
        return over_team(total, join, this->partial_);
    }
    template <typename Map>
    __device__ __forceinline__ void write(Map map)
    {
#pragma unroll
        for (unsigned i = 0; i < kHeldVectors; ++i)
        {
            if (column(i) >= this->args_.width)
                break;
            this->finish(column(i), x_[i], map);
        }
    }
    // One number for the row.
    __device__ __forceinline__ void result(float value)
    {
        if constexpr (E::kMidway)
            write([value](float, float, float) { return value; });
        else
            Row<E, V>::result(value);
    }

private:
    static __device__ __forceinline__ unsigned column(unsigned i) { return (threadIdx.x + i * blockDim.x) * V; }
    float x_[kHeldVectors][V];
};

// A row of any length: computed again in every pass.
template <class E, int V>
class LongRow : public Row<E, V>
{
public:
    using Row<E, V>::Row;

    template <typename Join, typename Map>
    __device__ __forceinline__ float first(float start, Join join, Map map)
    {
        return pass<true>(start, join, map);
    }
    template <typename Join, typename Map>
    __device__ __forceinline__ float again(float start, Join join, Map map)
    {
        return pass<false>(start, join, map);
    }
    template <typename Map>
    __device__ __forceinline__ void write(Map map)
    {
        for (unsigned column = threadIdx.x * V; column < this->args_.width; column += blockDim.x * V)
        {
            float x[V];
            values<false>(column, x);
            this->finish(column, x, map);
        }
    }
    __device__ __forceinline__ void result(float value)
    {
        if constexpr (E::kMidway)
            write([value](float, float, float) { return value; });
        else
            Row<E, V>::result(value);
    }

private:
    template <bool kStore, typename Join, typename Map>
    __device__ __forceinline__ float pass(float start, Join join, Map map)
    {
        float total = start;
        for (unsigned column = threadIdx.x * V; column < this->args_.width; column += blockDim.x * V)
        {
            float x[V];
            values<kStore>(column, x);
#pragma unroll
            for (int lane = 0; lane < V; ++lane)
                total = join(total, map(x[lane]));
        }
        return over_team(total, join, this->partial_);
    }
    template <bool kStore>
    __device__ __forceinline__ void values(unsigned column, float (&x)[V])
    {
        typename E::template In<V, true> in;
        E::template load<V, true>(this->args_, this->element(column), in);
        this->template compute<kStore>(in, column, x);
    }
};

struct Plain
{
    __device__ __forceinline__ float operator()(float x) const { return x; }
};

// What a reduction does with its row.
template <class E>
struct ReduceSum
{
    template <class R>
    static __device__ __forceinline__ void run(R& row, typename E::Args const&)
    {
        float const sum = row.first(0.0f, AddJoin{}, Plain{});
        row.result(sum);
    }
};
template <class E>
struct ReduceMean
{
    template <class R>
    static __device__ __forceinline__ void run(R& row, typename E::Args const& args)
    {
        float const sum = row.first(0.0f, AddJoin{}, Plain{});
        row.result(sum / static_cast<float>(args.width));
    }
};
template <class E>
struct ReduceMax
{
    template <class R>
    static __device__ __forceinline__ void run(R& row, typename E::Args const&)
    {
        float const most = row.first(-INFINITY, MaxJoin{}, Plain{});
        row.result(most);
    }
};
template <class E>
struct ReduceMin
{
    template <class R>
    static __device__ __forceinline__ void run(R& row, typename E::Args const&)
    {
        float const least = row.first(INFINITY, MinJoin{}, Plain{});
        row.result(least);
    }
};
template <class E>
struct Softmax
{
    template <class R>
    static __device__ __forceinline__ void run(R& row, typename E::Args const&)
    {
        float const most = row.first(-INFINITY, MaxJoin{}, Plain{});
        float const sum = row.again(0.0f, AddJoin{}, [most](float x) { return expf(x - most); });
        row.write([most, sum](float x, float, float) { return expf(x - most) / sum; });
    }
};
template <class E>
struct LogSoftmax
{
    template <class R>
    static __device__ __forceinline__ void run(R& row, typename E::Args const&)
    {
        float const most = row.first(-INFINITY, MaxJoin{}, Plain{});
        float const sum = row.again(0.0f, AddJoin{}, [most](float x) { return expf(x - most); });
        float const log_sum = logf(sum);
        row.write([most, log_sum](float x, float, float) { return x - most - log_sum; });
    }
};
template <class E>
struct LayerNormalization
{
    template <class R>
    static __device__ __forceinline__ void run(R& row, typename E::Args const& args)
    {
        float const width = static_cast<float>(args.width);
        float const mean = row.first(0.0f, AddJoin{}, Plain{}) / width;
        float const variance = row.again(0.0f, AddJoin{}, [mean](float x) { return (x - mean) * (x - mean); }) / width;
        float const inverse = 1.0f / sqrtf(variance + E::kEpsilon);
        row.write([mean, inverse](float x, float scale, float bias) { return fmaf((x - mean) * inverse, scale, bias); });
    }
};
template <class E>
struct RMSNormalization
{
    template <class R>
    static __device__ __forceinline__ void run(R& row, typename E::Args const& args)
    {
        float const squares = row.first(0.0f, AddJoin{}, [](float x) { return x * x; });
        float const inverse = 1.0f / sqrtf(squares / static_cast<float>(args.width) + E::kEpsilon);
        row.write([inverse](float x, float scale, float) { return x * inverse * scale; });
    }
};

template <class E, int V, class Reduction>
__device__ __forceinline__ void rows(typename E::Args const& args)
{
    __shared__ float partial[32];
    if (args.width <= kHeldVectors * blockDim.x * V)
    {
        HeldRow<E, V> row(args, partial);
        Reduction::run(row, args);
    }
    else
    {
        LongRow<E, V> row(args, partial);
        Reduction::run(row, args);
    }
}
} // namespace onnxfuse
