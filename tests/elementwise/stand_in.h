// A stand-in for libcuda.so.1 that plays generated kernels on the host: memory is the host's, a graph replays what was put on the stream,
// and every microsecond is the host's. What it is not given before aborts the process.
#pragma once

#include "emulated.h"

#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace stand_in
{
using Work = std::function<void()>;

inline std::vector<Work>* recording = nullptr;

inline void put_on_stream(Work const& work)
{
    if (recording)
        recording->push_back(work);
    else
        work();
}

// A kernel by its name, with the bytes of its parameter and its launch.
void play(std::string const& kernel, std::vector<unsigned char> const& argument, dim3 grid, dim3 block);
// Bytes of the parameter; 0 for an unknown kernel.
size_t argument_size(std::string const& kernel);

template <typename Args>
Args argument(std::vector<unsigned char> const& bytes)
{
    Args args;
    std::memcpy(&args, bytes.data(), sizeof args);
    return args;
}
} // namespace stand_in

extern "C"
{
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int) { *device = 0; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { *context = reinterpret_cast<void*>(1); return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxSynchronize() { return 0; }
int cuDeviceGetName(char* name, int size, int) { std::snprintf(name, size, "NVIDIA Stand-in"); return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetAttribute(int* value, int which, int) { *value = which == 16 ? 2 : which == 38 ? 4096 : 0; return 0; }
int cuGetErrorString(int, char const** text) { *text = "stand-in"; return 0; }
int cuMemAlloc_v2(void** memory, size_t size) { *memory = std::malloc(size); return 0; }
int cuMemFree_v2(void* memory) { std::free(memory); return 0; }
int cuMemcpyHtoD_v2(void* to, void const* from, size_t size) { std::memcpy(to, from, size); return 0; }
int cuMemcpyDtoH_v2(void* to, void const* from, size_t size) { std::memcpy(to, from, size); return 0; }
int cuMemsetD8_v2(void* to, unsigned char byte, size_t size) { std::memset(to, byte, size); return 0; }
int cuMemcpyDtoDAsync_v2(void* to, void const* from, size_t size, void*)
{
    stand_in::put_on_stream([=] { std::memmove(to, from, size); });
    return 0;
}
int cuStreamCreate(void** stream, unsigned) { *stream = reinterpret_cast<void*>(2); return 0; }
int cuStreamSynchronize(void*) { return 0; }
int cuStreamBeginCapture_v2(void*, int) { stand_in::recording = new std::vector<stand_in::Work>; return 0; }
int cuStreamEndCapture(void*, void** graph) { *graph = stand_in::recording; stand_in::recording = nullptr; return 0; }
int cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long) { *ready = graph; return 0; }
int cuGraphLaunch(void* graph, void*)
{
    for (stand_in::Work const& work : *static_cast<std::vector<stand_in::Work>*>(graph))
        work();
    return 0;
}
int cuGraphDestroy(void*) { return 0; } // what is instantiated is the graph itself
int cuGraphExecDestroy(void* graph) { delete static_cast<std::vector<stand_in::Work>*>(graph); return 0; }
int cuEventCreate(void** event, unsigned) { *event = new double; return 0; }
int cuEventRecord(void* event, void*)
{
    auto const now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(event) = std::chrono::duration<double, std::milli>(now).count();
    return 0;
}
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* ms, void* start, void* end)
{
    *ms = static_cast<float>(*static_cast<double*>(end) - *static_cast<double*>(start));
    return 0;
}
int cuEventDestroy_v2(void* event) { delete static_cast<double*>(event); return 0; }

// Launches as clusters: the plugin looks these up when it opens the driver, and a generated kernel never calls them.
int cuLaunchKernelEx(void const*, void*, void**, void**) { std::abort(); }
int cuFuncSetAttribute(void*, int, int) { std::abort(); }
int cuOccupancyMaxActiveClusters(int*, void*, void const*) { std::abort(); }

// Machine code is taken as it is; its kernels are known by their names.
int cuLibraryLoadData(void** library, void const*, void*, void*, unsigned, void*, void*, unsigned) { *library = reinterpret_cast<void*>(3); return 0; }
int cuLibraryUnload(void*) { return 0; }
int cuLibraryGetKernel(void** kernel, void*, char const* name)
{
    if (!stand_in::argument_size(name))
        return 500;
    *kernel = new std::string(name);
    return 0;
}
int cuKernelGetFunction(void** function, void* kernel) { *function = kernel; return 0; }
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, void*, void** parameters, void**)
{
    std::string const name = *static_cast<std::string*>(kernel);
    auto const* const bytes = static_cast<unsigned char const*>(parameters[0]);
    std::vector<unsigned char> const argument(bytes, bytes + stand_in::argument_size(name));
    stand_in::put_on_stream([=] { stand_in::play(name, argument, dim3(gx, gy, gz), dim3(bx, by, bz)); });
    return 0;
}
}
