// Memory, faults and timing for try.py, by ctypes.
#include <algorithm>
#include <vector>
#include <cuda_runtime.h>
#include "../plugins/FusedAttention/launch.h"
#define API extern "C" ONNXFUSE_EXPORT
API int gt_malloc(void** p, size_t n) { return cudaMalloc(p, n); }
API int gt_free(void* p) { return cudaFree(p); }
API int gt_put(void* d, void const* h, size_t n) { return cudaMemcpy(d, h, n, cudaMemcpyHostToDevice); }
API int gt_get(void* h, void const* d, size_t n) { return cudaMemcpy(h, d, n, cudaMemcpyDeviceToHost); }
API int gt_set(void* d, int v, size_t n) { return cudaMemset(d, v, n); }
API int gt_sync() { return cudaDeviceSynchronize(); }
API char const* gt_error(int e) { return cudaGetErrorString((cudaError_t)e); }
API int gt_host(void** p, size_t n) { return cudaHostAlloc(p, n, cudaHostAllocMapped); }
// Microseconds of one call: graphs of `per` calls, `reps` replays: median, least, 90 %.
API int gt_time(OnnxfuseAttention const* p, void* ws, size_t bytes, int per, int reps, float* out)
{
    cudaStream_t s; cudaError_t e;
    if ((e = cudaStreamCreate(&s))) return e;
    for (int i = 0; i < 2; i++) if (int r = onnxfuse_launch_attention(p, ws, bytes, s)) return r;
    if ((e = cudaStreamSynchronize(s))) return e;
    cudaGraph_t g; cudaGraphExec_t ge;
    if ((e = cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal))) return e;
    for (int i = 0; i < per; i++) if (int r = onnxfuse_launch_attention(p, ws, bytes, s)) return r;
    if ((e = cudaStreamEndCapture(s, &g))) return e;
    if ((e = cudaGraphInstantiate(&ge, g, 0))) return e;
    cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
    std::vector<float> v;
    for (int i = 0; i < reps + 3; i++)
    {
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
API int gt_launch(void* exec, void* s) { return cudaGraphLaunch((cudaGraphExec_t)exec, (cudaStream_t)s); }
// Microseconds of `reps` replays of two graphs in turn.
API int gt_pair(void* one, void* other, void* stream, int reps, float* a, float* b)
{
    cudaStream_t s = (cudaStream_t)stream; cudaEvent_t e[3]; for (auto& x : e) cudaEventCreate(&x);
    for (int i = -3; i < reps; i++)
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
