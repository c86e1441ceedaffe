// Memory, faults and timing for try.py, by ctypes.
#include <algorithm>
#include <vector>
#include <cuda_runtime.h>
#include "../plugins/DepthwiseConvLayerNorm/launch.h"
#include "../plugins/GroupNormSilu/launch.h"
#include "../plugins/Linear/launch.h"
#define API extern "C" ONNXFUSE_EXPORT
API int gt_malloc(void** p, size_t n) { return cudaMalloc(p, n); }
API int gt_free(void* p) { return cudaFree(p); }
API int gt_put(void* d, void const* h, size_t n) { return cudaMemcpy(d, h, n, cudaMemcpyHostToDevice); }
API int gt_get(void* h, void const* d, size_t n) { return cudaMemcpy(h, d, n, cudaMemcpyDeviceToHost); }
API int gt_set(void* d, int v, size_t n) { return cudaMemset(d, v, n); }
API int gt_sync() { return cudaDeviceSynchronize(); }
API char const* gt_error(int e) { return cudaGetErrorString((cudaError_t)e); }

static __global__ void copy_kernel(uint4 const* from, uint4* to, size_t n)
{
    for (size_t i = blockIdx.x * size_t{blockDim.x} * 4 + threadIdx.x; i < n; i += gridDim.x * size_t{blockDim.x} * 4)
    {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) if (i + j * blockDim.x < n) v[j] = from[i + j * blockDim.x];
#pragma unroll
        for (int j = 0; j < 4; ++j) if (i + j * blockDim.x < n) to[i + j * blockDim.x] = v[j];
    }
}
static __global__ void nothing() {}
struct Copy { void const* from; void* to; size_t bytes; };
struct Link { long kind; void const* problem; };
static int launch(int kind, void const* p, void* ws, cudaStream_t s)
{
    switch (kind)
    {
    case 0: return onnxfuse_launch_depthwise_layernorm((OnnxfuseDepthwise const*)p, s);
    case 1: return onnxfuse_launch_group_norm((OnnxfuseGroupNorm const*)p, ws, s);
    case 2: return onnxfuse_launch_linear((OnnxfuseLinear const*)p, s);
    case 3: { auto c = (Copy const*)p; copy_kernel<<<std::min<size_t>((c->bytes / 16 + 1023) / 1024, 100000), 256, 0, s>>>((uint4 const*)c->from, (uint4*)c->to, c->bytes / 16); return cudaGetLastError(); }
    case 4: { auto c = (Copy const*)p; return cudaMemcpyAsync(c->to, c->from, c->bytes, cudaMemcpyDeviceToDevice, s); }
    case 6: { auto c = (Link const*)p; for (; c->problem; ++c) if (int r = launch(c->kind, c->problem, ws, s)) return r; return 0; }
    case 5: nothing<<<1, 32, 0, s>>>(); return cudaGetLastError();
    }
    return cudaErrorInvalidValue;
}
API int gt_launch(int kind, void const* p, void* ws) { return launch(kind, p, ws, 0); }
// Median, least and 90 % of microseconds a call. `sets` problems (other memory each) in turn make `per` calls of a graph. flush: the L2 cache is
// filled with other data before each replay (then per should be 1 or what is cold at once).
API int gt_time(int kind, void const* problems, int bytes_each, int sets, void* ws, int per, int reps, void* flush, size_t flush_bytes, float* out)
{
    cudaStream_t s; cudaError_t e;
    if ((e = cudaStreamCreate(&s))) return e;
    auto const at = [&](int i) { return (char const*)problems + size_t(i % sets) * bytes_each; };
    if (int r = launch(kind, at(0), ws, s)) return r;
    if ((e = cudaStreamSynchronize(s))) return e;
    cudaGraph_t g; cudaGraphExec_t ge;
    if ((e = cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal))) return e;
    for (int i = 0; i < per; i++) if (int r = launch(kind, at(i), ws, s)) return r;
    if ((e = cudaStreamEndCapture(s, &g))) return e;
    if ((e = cudaGraphInstantiate(&ge, g, 0))) return e;
    cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
    std::vector<float> v;
    for (int i = 0; i < reps + 3; i++)
    {
        if (flush) cudaMemsetAsync(flush, i, flush_bytes, s);
        cudaEventRecord(a, s);
        if ((e = cudaGraphLaunch(ge, s))) return e;
        cudaEventRecord(b, s);
        if ((e = cudaEventSynchronize(b))) return e;
        float ms; cudaEventElapsedTime(&ms, a, b);
        if (i >= 3) v.push_back(ms * 1000.f / per);
    }
    std::sort(v.begin(), v.end());
    out[0] = v[v.size() / 2]; out[1] = v[0]; out[2] = v[v.size() * 9 / 10];
    cudaGraphExecDestroy(ge); cudaGraphDestroy(g); cudaEventDestroy(a); cudaEventDestroy(b); cudaStreamDestroy(s);
    return cudaGetLastError();
}
API int gt_stream(void** s) { return cudaStreamCreateWithFlags((cudaStream_t*)s, cudaStreamNonBlocking); }
API int gt_stream_sync(void* s) { return cudaStreamSynchronize((cudaStream_t)s); }
API int gt_begin(void* s) { return cudaStreamBeginCapture((cudaStream_t)s, cudaStreamCaptureModeGlobal); }
API int gt_end(void* s, void** exec)
{
    cudaGraph_t g; if (int e = cudaStreamEndCapture((cudaStream_t)s, &g)) return e;
    int e = cudaGraphInstantiate((cudaGraphExec_t*)exec, g, 0); cudaGraphDestroy(g); return e;
}
API int gt_replay(void* exec, void* s) { return cudaGraphLaunch((cudaGraphExec_t)exec, (cudaStream_t)s); }
// Microseconds of `reps` replays of two graphs in turn.
API int gt_pair(void* one, void* other, void* stream, int reps, float* a, float* b)
{
    cudaStream_t s = (cudaStream_t)stream; cudaEvent_t e[3]; for (auto& x : e) cudaEventCreate(&x);
    for (int i = -10; i < reps; i++)
    {
        cudaEventRecord(e[0], s);
        if (int r = cudaGraphLaunch((cudaGraphExec_t)one, s)) return r;
        cudaEventRecord(e[1], s);
        if (int r = cudaGraphLaunch((cudaGraphExec_t)other, s)) return r;
        cudaEventRecord(e[2], s);
        if (int r = cudaEventSynchronize(e[2])) return r;
        float x, y; cudaEventElapsedTime(&x, e[0], e[1]); cudaEventElapsedTime(&y, e[1], e[2]);
        if (i >= 0) a[i] = 1000 * x, b[i] = 1000 * y;
    }
    return cudaGetLastError();
}
