// A stand-in for libcuda.so.1, as far as the script of a kit calls it: memory is the host's, and a graph replays what was copied.
// CUDA_FAULT names one function that fails; a function called with what it was not given before aborts the process.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <time.h>

namespace {
std::set<const void*> known;
bool capturing = false;
void (*recorded)() = nullptr;
std::map<void*, void (*)()> graphs;

bool fails(char const* name)
{
    char const* fault = std::getenv("CUDA_FAULT");
    return fault && std::string(fault) == name;
}

int answer(char const* name) { return fails(name) ? 700 : 0; }

void* make()
{
    void* handle = std::malloc(16);
    known.insert(handle);
    return handle;
}

void expect(void const* handle)
{
    if (!known.count(handle)) std::abort();
}

double now()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * t.tv_sec + 1e-6 * t.tv_nsec;
}
} // namespace

#define CALL(name, ...) extern "C" int name(__VA_ARGS__) { if (int status = answer(#name)) return status;

CALL(cuInit, unsigned) return 0; }
CALL(cuDeviceGet, int* device, int) *device = 7; return 0; }
CALL(cuDevicePrimaryCtxRetain, void** context, int device) if (device != 7) std::abort(); *context = make(); return 0; }
CALL(cuCtxSetCurrent, void* context) expect(context); return 0; }
CALL(cuDeviceGetName, char* name, int size, int) std::strncpy(name, "NVIDIA Stand-in", size); return 0; }
CALL(cuDeviceGetAttribute, int* value, int which, int)
    char const* given = std::getenv("CUDA_SM");
    int const sm = given ? std::atoi(given) : 90;
    *value = which == 75 ? sm / 10 : which == 76 ? sm % 10 : -1;
    return 0;
}
CALL(cuDriverGetVersion, int* version) *version = 13000; return 0; }
CALL(cuMemAlloc_v2, uint64_t* pointer, size_t size)
    void* memory = std::malloc(size);
    known.insert(memory);
    *pointer = reinterpret_cast<uint64_t>(memory);
    return 0;
}
CALL(cuMemFree_v2, uint64_t pointer)
    void* memory = reinterpret_cast<void*>(pointer);
    expect(memory);
    known.erase(memory);
    std::free(memory);
    return 0;
}
CALL(cuMemcpyHtoD_v2, uint64_t to, void const* from, size_t size)
    expect(reinterpret_cast<void*>(to));
    std::memcpy(reinterpret_cast<void*>(to), from, size);
    return 0;
}
CALL(cuMemcpyDtoH_v2, void* to, uint64_t from, size_t size)
    expect(reinterpret_cast<void*>(from));
    std::memcpy(to, reinterpret_cast<void*>(from), size);
    return 0;
}
CALL(cuMemsetD8_v2, uint64_t pointer, unsigned char value, size_t size)
    expect(reinterpret_cast<void*>(pointer));
    std::memset(reinterpret_cast<void*>(pointer), value, size);
    return 0;
}
CALL(cuStreamCreate, void** stream, unsigned) *stream = make(); return 0; }
CALL(cuStreamSynchronize, void* stream) expect(stream); return 0; }
CALL(cuStreamDestroy_v2, void* stream) expect(stream); known.erase(stream); return 0; }
CALL(cuStreamBeginCapture_v2, void* stream, int) expect(stream); capturing = true; return 0; }
CALL(cuStreamEndCapture, void* stream, void** graph) if (!capturing) std::abort(); capturing = false; expect(stream); graphs[*graph = make()] = recorded; recorded = nullptr; return 0; }
CALL(cuGraphInstantiateWithFlags, void** executable, void* graph, unsigned long long) expect(graph); graphs[*executable = make()] = graphs[graph]; return 0; }
CALL(cuGraphDestroy, void* graph) expect(graph); known.erase(graph); return 0; }
CALL(cuGraphLaunch, void* executable, void* stream)
    expect(executable);
    expect(stream);
    if (!fails("empty graph")) graphs.at(executable)();
    return 0;
}
CALL(cuGraphExecDestroy, void* executable) expect(executable); known.erase(executable); return 0; }
CALL(cuEventCreate, void** event, unsigned) *event = make(); return 0; }
CALL(cuEventRecord, void* event, void* stream) expect(stream); double const t = now(); std::memcpy(event, &t, sizeof t); return 0; }
CALL(cuEventSynchronize, void* event) expect(event); return 0; }
CALL(cuEventElapsedTime, float* ms, void* start, void* end)
    double a, b;
    std::memcpy(&a, start, sizeof a);
    std::memcpy(&b, end, sizeof b);
    *ms = fails("no time") ? 0.0f : static_cast<float>(b - a);
    return 0;
}
CALL(cuEventDestroy_v2, void* event) expect(event); known.erase(event); return 0; }
// Called by the stand-in for TensorRT: work that is launched while a stream is captured is kept for the graph, and not done.
extern "C" int standInRecord(void (*work)()) { if (capturing) recorded = work; return capturing; }
extern "C" int cuGetErrorName(int, char const** name) { *name = "CUDA_ERROR_STAND_IN"; return 0; }
