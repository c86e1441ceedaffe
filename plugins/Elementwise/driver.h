// Machine code that an engine carries, loaded through the CUDA driver.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "layout.h"

struct CUstream_st;

namespace onnxfuse
{
// The bytes of a text in base64 without line breaks. Throws where it is none.
std::string decoded(std::string const& text);

// A cooperative launch of clusters, in one dimension.
struct ClusterLaunch
{
    int blocks, threads, cluster, shared; // shared: bytes
};

// A loaded module. Its kernels are looked up by name once.
class Module
{
public:
    // The module of this code, which whoever else asks for the same code shares. Throws where there is no driver, or it refuses the code.
    static std::shared_ptr<Module> of(std::string const& code);

    ~Module();
    Module(Module const&) = delete;
    Module& operator=(Module const&) = delete;

    // Throws where the driver refuses. Asynchronous on `stream`; safe to capture once prepare() has been called.
    void launch(Launch const& launch, CUstream_st* stream) const;

    // Loads all kernels into the current context, which must not happen within a capture.
    void prepare(Layout const& layout);

    // Loads one kernel, likewise, and allows it that much shared memory. Returns how many clusters of this launch are resident at once.
    int prepare(std::string const& kernel, ClusterLaunch const& launch);

    // Throws where the driver refuses. Asynchronous on `stream`; safe to capture. argument: the kernel's only one.
    void launch(std::string const& kernel, ClusterLaunch const& launch, void const* argument, CUstream_st* stream) const;

private:
    void* find(std::string const& kernel) const;
    explicit Module(std::string const& code);

    void* library_ = nullptr;
    std::string code_;
    mutable std::mutex lock_;
    std::map<std::string, void*> kernels_;
};

// Multiprocessors of the current device.
int multiprocessors_here();
} // namespace onnxfuse
