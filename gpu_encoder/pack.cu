#include "pack.h"
#include <algorithm>
#include "../plugins/common/launch.cuh"
#include "pack.cuh"
namespace onnxfuse::encoder
{
namespace
{
template <typename T>
cudaError_t pack_one(PackLinear const& given, PackNorm const& norm, int k, int n, int first, int all, unsigned char* weights, float* vectors, bool residual, cudaStream_t stream)
{
    Linear<T> const linear{static_cast<T const*>(given.weights), given.k_stride, given.n_stride, static_cast<T const*>(given.bias)};
    PackArgs<T> args{};
    args.linear = linear;
    args.gamma = static_cast<T const*>(norm.gamma);
    args.beta = static_cast<T const*>(norm.beta);
    args.k = k; args.n = n; args.first = first; args.all = all;
    args.to = reinterpret_cast<uint4*>(weights);
    args.shift = vectors; args.sums = vectors + all;
    cudaLaunchConfig_t config{};
    config.blockDim = dim3(256);
    config.stream = stream;
    config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div(int64_t{k} / 8 * n, 256), 1024)));
    PackArgs<T> plain = args;
    if (residual) plain.gamma = plain.beta = nullptr;
    cudaError_t status = cudaLaunchKernelEx(&config, pack_weights<T>, plain);
    if (status != cudaSuccess) return status;
    config.gridDim = dim3(static_cast<unsigned>(ceil_div(n, 256)));
    if (residual) return cudaLaunchKernelEx(&config, pack_residual<T>, linear.bias, args.gamma, args.beta, n, vectors);
    return cudaLaunchKernelEx(&config, pack_vectors<T>, plain);
}
struct At { int64_t weights[4], vectors[4], total[2]; };
At places(int64_t d, int64_t f)
{
    At at{}; int64_t const n[4] = {3 * d, d, f, d}, k[4] = {d, d, d, f};
    for (int i = 0; i < 4; ++i)
    {
        at.weights[i] = at.total[0]; at.total[0] += (n[i] * k[i] * 2 + 255) / 256 * 256;
        at.vectors[i] = at.total[1]; at.total[1] += (n[i] * 12 + 255) / 256 * 256;
    }
    return at;
}
template <typename T>
cudaError_t pack(int d, int f, int pre, PackLayer const& l, unsigned char* w, unsigned char* v, cudaStream_t s)
{
    At const at = places(d, f);
    auto vec = [&](int i) { return reinterpret_cast<float*>(v + at.vectors[i]); };
    PackNorm const none{}, first = pre ? none : l.before_qkv, second = pre ? none : l.before_inner;
    PackLinear const* const parts[3] = {&l.query, &l.key, &l.value};
    cudaError_t e = cudaSuccess;
    for (int i = 0; i < 3 && !e; ++i) e = pack_one<T>(*parts[i], l.before_qkv, d, d, i * d, 3 * d, w + at.weights[0], vec(0), false, s);
    if (!e) e = pack_one<T>(l.projection, first, d, d, 0, d, w + at.weights[1], vec(1), true, s);
    if (!e) e = pack_one<T>(l.inner, l.before_inner, d, f, 0, f, w + at.weights[2], vec(2), false, s);
    if (!e) e = pack_one<T>(l.outer, second, f, d, 0, d, w + at.weights[3], vec(3), true, s);
    return e;
}
} // namespace
} // namespace onnxfuse::encoder
extern "C" void gt_packed(int width, int inner, int64_t* bytes)
{
    auto const at = onnxfuse::encoder::places(width, inner);
    bytes[0] = at.total[0]; bytes[1] = at.total[1];
}
extern "C" int gt_pack(int dtype, int width, int inner, int pre_norm, PackLayer const* layer, void* weights, void* vectors, void* stream)
{
    return onnxfuse::with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if constexpr (sizeof(T) == 2) return onnxfuse::encoder::pack<T>(width, inner, pre_norm, *layer, static_cast<unsigned char*>(weights), static_cast<unsigned char*>(vectors), static_cast<cudaStream_t>(stream));
        else return cudaErrorInvalidValue;
    });
}
