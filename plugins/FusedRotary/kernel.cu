// Each thread makes a vector of the output: it reads its own elements, their partners, and both angles.
#include "launch.h"

#include "../common/cluster.cuh"
#include "../common/launch.cuh"
#include "../common/tensor.cuh"

namespace onnxfuse
{
template <typename T>
struct RotaryTensor
{
    T* data;
    int64_t batch, head, row;

    __device__ __forceinline__ T* at(int b, int h, int r) const
    {
        return data + b * batch + h * head + r * row;
    }
};

template <typename T>
struct RotaryArgs
{
    RotaryTensor<T const> x, cos, sin;
    RotaryTensor<T> y;
    int heads, rows, parts, rotary, interleaved;
    unsigned count;
};

constexpr int kRotaryThreads = 128;

template <typename T, int kVector>
__device__ __forceinline__ void load_wide(float (&to)[kVector], T const* from, int first)
{
    unpack(load<T, kVector>(from, first / kVector), to);
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kRotaryThreads) rotary(__grid_constant__ RotaryArgs<T> const args)
{
    wait_for_kernel_before();
    next_may_start();
    unsigned const i = blockIdx.x * kRotaryThreads + threadIdx.x;
    if (i >= args.count)
        return;
    unsigned const parts = static_cast<unsigned>(args.parts), rows = static_cast<unsigned>(args.rows), heads = static_cast<unsigned>(args.heads);
    int const first = static_cast<int>(i % parts) * kVector;
    unsigned const line = i / parts;
    int const row = static_cast<int>(line % rows), head = static_cast<int>(line / rows % heads), batch = static_cast<int>(line / rows / heads);
    T const* const x = args.x.at(batch, head, row);
    float own[kVector];
    load_wide<T, kVector>(own, x, first);
    if (first < args.rotary)
    {
        float partner[kVector], cos[kVector], sin[kVector];
        int const half = args.rotary / 2;
        if constexpr (kVector > 1)
        {
            if (args.interleaved)
            {
#pragma unroll
                for (int j = 0; j < kVector; j += 2)
                {
                    partner[j] = -own[j + 1];
                    partner[j + 1] = own[j];
                }
            }
            else
                load_wide<T, kVector>(partner, x, first < half ? first + half : first - half);
        }
        else
        {
            bool const low = args.interleaved ? first % 2 == 0 : first < half;
            int const distance = args.interleaved ? 1 : half;
            load_wide<T, kVector>(partner, x, low ? first + distance : first - distance);
            partner[0] = args.interleaved && low ? -partner[0] : partner[0];
        }
        float const sign = !args.interleaved && first < half ? -1.0f : 1.0f;
        load_wide<T, kVector>(cos, args.cos.at(batch, head, row), first);
        load_wide<T, kVector>(sin, args.sin.at(batch, head, row), first);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
            own[j] = own[j] * cos[j] + sign * partner[j] * sin[j];
    }
    Vector<T, kVector> packed;
    pack(own, packed);
    store<T, kVector>(args.y.at(batch, head, row), first / kVector, packed);
}

namespace
{
using Problem = OnnxfuseRotary;

template <typename T>
RotaryTensor<T const> tensor(OnnxfuseRotaryTensor const& of)
{
    return {static_cast<T const*>(of.data), of.batch_stride, of.head_stride, of.row_stride};
}

template <typename T, int kVector>
cudaError_t launch(Problem const& p, cudaStream_t stream)
{
    int64_t const count = int64_t{p.batch} * p.heads * p.rows * (p.size / kVector);
    if (count > INT32_MAX)
        return cudaErrorInvalidValue;
    RotaryArgs<T> args{};
    args.x = tensor<T>(p.x);
    args.cos = tensor<T>(p.cos);
    args.sin = tensor<T>(p.sin);
    args.y = {static_cast<T*>(const_cast<void*>(p.y.data)), p.y.batch_stride, p.y.head_stride, p.y.row_stride};
    args.heads = p.heads;
    args.rows = p.rows;
    args.parts = p.size / kVector;
    args.rotary = p.rotary;
    args.interleaved = p.interleaved;
    args.count = static_cast<unsigned>(count);
    return launch_cluster(rotary<T, kVector>, args, (count + kRotaryThreads - 1) / kRotaryThreads, kRotaryThreads, 0, 1, p.early != 0, stream);
}

bool sound(Problem const& p)
{
    return p.batch >= 0 && p.heads >= 0 && p.rows >= 0 && p.size >= 1 && p.rotary >= 0 && p.rotary <= p.size && p.rotary % 2 == 0;
}
} // namespace
} // namespace onnxfuse

extern "C" int onnxfuse_launch_rotary(OnnxfuseRotary const* problem, void* stream)
{
    using namespace onnxfuse;
    OnnxfuseRotary const& p = *problem;
    if (!sound(p))
        return cudaErrorInvalidValue;
    return with_type(p.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if (int64_t{p.batch} * p.heads * p.rows == 0)
            return cudaSuccess;
        if (!p.x.data || !p.y.data || (p.rotary > 0 && (!p.cos.data || !p.sin.data)))
            return cudaErrorInvalidValue;
        if (!aligned(sizeof(T), p.x.data, p.cos.data, p.sin.data, p.y.data))
            return cudaErrorMisalignedAddress;
        constexpr int kVector = 16 / sizeof(T);
        int64_t steps = p.size | p.rotary | (p.interleaved ? 0 : p.rotary / 2);
        for (OnnxfuseRotaryTensor const* of : {&p.x, &p.cos, &p.sin, &p.y})
            steps |= of->batch_stride | of->head_stride | of->row_stride;
        if (steps % kVector == 0 && aligned(16, p.x.data, p.cos.data, p.sin.data, p.y.data))
            return launch<T, kVector>(p, static_cast<cudaStream_t>(stream));
        return launch<T, 1>(p, static_cast<cudaStream_t>(stream));
    });
}
