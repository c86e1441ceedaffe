// Memory, faults, packing and timing for try.py, by ctypes.
#include <algorithm>
#include <vector>
#include <cuda_runtime.h>
#include "../plugins/EncoderLayer/launch.h"
#include "pack.h"
#define API extern "C" ONNXFUSE_EXPORT
API int gt_malloc(void** p, size_t n) { return cudaMalloc(p, n); }
API int gt_free(void* p) { return cudaFree(p); }
API int gt_put(void* d, void const* h, size_t n) { return cudaMemcpy(d, h, n, cudaMemcpyHostToDevice); }
API int gt_get(void* h, void const* d, size_t n) { return cudaMemcpy(h, d, n, cudaMemcpyDeviceToHost); }
API int gt_set(void* d, int v, size_t n) { return cudaMemset(d, v, n); }
API int gt_sync() { return cudaDeviceSynchronize(); }
API char const* gt_error(int e) { return cudaGetErrorString((cudaError_t)e); }
API int gt_host(void** p, size_t n) { return cudaHostAlloc(p, n, cudaHostAllocMapped); }
// Median microseconds of one call: graphs of `per` calls, `reps` replays. Also min and 90 %.
API int gt_time(OnnxfuseEncoder const* p, void* ws, size_t bytes, int per, int reps, float* out)
{
    cudaStream_t s; cudaError_t e;
    if ((e = cudaStreamCreate(&s))) return e;
    for (int i = 0; i < 2; i++) if (int r = onnxfuse_launch_encoder(p, ws, bytes, s)) return r;
    if ((e = cudaStreamSynchronize(s))) return e;
    cudaGraph_t g; cudaGraphExec_t ge;
    if ((e = cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal))) return e;
    for (int i = 0; i < per; i++) if (int r = onnxfuse_launch_encoder(p, ws, bytes, s)) return r;
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
