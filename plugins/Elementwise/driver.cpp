#include "driver.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include <cuda.h>
#include <dlfcn.h>

namespace onnxfuse
{
namespace
{
// The driver is there on every machine that runs an engine, but not on the one where the library is compiled or checked: it is opened
// when first needed.
struct Driver
{
    decltype(&cuLibraryLoadData) load = nullptr;
    decltype(&cuLibraryUnload) unload = nullptr;
    decltype(&cuLibraryGetKernel) kernel = nullptr;
    decltype(&cuKernelGetFunction) function = nullptr;
    decltype(&cuLaunchKernel) launch = nullptr;
    decltype(&cuLaunchKernelEx) launch_ex = nullptr;
    decltype(&cuFuncSetAttribute) allow = nullptr;
    decltype(&cuOccupancyMaxActiveClusters) resident = nullptr;
    decltype(&cuGetErrorString) text = nullptr;
    decltype(&cuCtxGetDevice) device = nullptr;
    decltype(&cuDeviceGetAttribute) attribute = nullptr;
    std::string fault;

    Driver()
    {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library)
        {
            fault = "libcuda.so.1 cannot be opened; install the driver of the GPU";
            return;
        }
        find(library, "cuLibraryLoadData", load);
        find(library, "cuLibraryUnload", unload);
        find(library, "cuLibraryGetKernel", kernel);
        find(library, "cuKernelGetFunction", function);
        find(library, "cuLaunchKernel", launch);
        find(library, "cuLaunchKernelEx", launch_ex);
        find(library, "cuFuncSetAttribute", allow);
        find(library, "cuOccupancyMaxActiveClusters", resident);
        find(library, "cuGetErrorString", text);
        find(library, "cuCtxGetDevice", device);
        find(library, "cuDeviceGetAttribute", attribute);
    }

    template <typename Function>
    void find(void* library, char const* name, Function& to)
    {
        to = reinterpret_cast<Function>(dlsym(library, name));
        if (!to && fault.empty())
            fault = std::string("the driver has no ") + name + "; install a driver for CUDA 12 or newer";
    }

    void check(CUresult result, char const* what) const
    {
        if (result == CUDA_SUCCESS)
            return;
        char const* said = nullptr;
        text(result, &said);
        throw std::runtime_error(std::string(what) + ": " + (said ? said : "unknown error"));
    }
};

Driver const& driver()
{
    static Driver const opened;
    if (!opened.fault.empty())
        throw std::runtime_error(opened.fault);
    return opened;
}

// attributes: two, which must live as long as what is returned.
CUlaunchConfig config_of(ClusterLaunch const& wanted, CUlaunchAttribute* attributes, CUstream_st* stream)
{
    attributes[0] = {};
    attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[0].value.clusterDim.x = static_cast<unsigned>(wanted.cluster);
    attributes[0].value.clusterDim.y = attributes[0].value.clusterDim.z = 1;
    attributes[1] = {};
    attributes[1].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[1].value.cooperative = 1;
    CUlaunchConfig config{};
    config.gridDimX = static_cast<unsigned>(wanted.blocks);
    config.blockDimX = static_cast<unsigned>(wanted.threads);
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned>(wanted.shared);
    config.hStream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return config;
}

std::mutex modules_lock;

std::map<std::string, std::weak_ptr<Module>>& modules()
{
    // Never destroyed: engines may outlive the static objects of this library.
    static auto* const all = new std::map<std::string, std::weak_ptr<Module>>;
    return *all;
}
} // namespace

std::string decoded(std::string const& text)
{
    static char const kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    int value[256];
    std::fill(std::begin(value), std::end(value), -1);
    for (int i = 0; i < 64; ++i)
        value[static_cast<unsigned char>(kDigits[i])] = i;
    std::string bytes;
    unsigned held = 0;
    int bits = 0;
    size_t const end = std::min(text.find('='), text.size());
    for (size_t i = 0; i < end; ++i)
    {
        int const digit = value[static_cast<unsigned char>(text[i])];
        if (digit < 0)
            throw std::runtime_error("field 'code' is no base64; build the engine again");
        held = held << 6 | static_cast<unsigned>(digit);
        bits += 6;
        if (bits >= 8)
        {
            bits -= 8;
            bytes += static_cast<char>(held >> bits & 0xff);
        }
    }
    return bytes;
}

std::shared_ptr<Module> Module::of(std::string const& code)
{
    std::lock_guard<std::mutex> const guard(modules_lock);
    std::weak_ptr<Module>& known = modules()[code];
    std::shared_ptr<Module> module = known.lock();
    if (!module)
    {
        module.reset(new Module(code));
        known = module;
    }
    return module;
}

Module::Module(std::string const& code)
    : code_(code)
{
    CUlibrary library = nullptr;
    driver().check(driver().load(&library, code_.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
        "the kernel in this engine is not for this GPU; build the engine again here");
    library_ = library;
}

Module::~Module()
{
    // The driver may be gone already when a process ends; then there is nothing to give back.
    if (library_)
        driver().unload(static_cast<CUlibrary>(library_));
}

void Module::prepare(Layout const& layout)
{
    std::lock_guard<std::mutex> const guard(lock_);
    for (char const* way : {"whole", "ragged", "single"})
    {
        std::string const name = "elementwise_" + layout.name + "_" + way;
        CUkernel kernel = static_cast<CUkernel>(kernels_.count(name) ? kernels_[name] : nullptr);
        if (!kernel && driver().kernel(&kernel, static_cast<CUlibrary>(library_), name.c_str()) != CUDA_SUCCESS)
            continue; // an expression without broadcasts has no ragged kernel
        CUfunction function = nullptr;
        driver().check(driver().function(&function, kernel), "the kernel cannot be loaded");
        kernels_[name] = kernel;
    }
}

void Module::launch(Launch const& wanted, CUstream_st* stream) const
{
    void* const kernel = find(wanted.kernel);
    // A CUkernel may stand for a CUfunction; the driver then takes the one of the current context.
    void* parameter = const_cast<unsigned char*>(wanted.arguments.data());
    driver().check(driver().launch(static_cast<CUfunction>(kernel), wanted.grid, 1, 1, wanted.block_x, wanted.block_y, 1, 0, stream,
                       &parameter, nullptr),
        "the kernel did not start");
}

int Module::prepare(std::string const& name, ClusterLaunch const& wanted)
{
    std::lock_guard<std::mutex> const guard(lock_);
    CUkernel kernel = nullptr;
    CUfunction function = nullptr;
    driver().check(driver().kernel(&kernel, static_cast<CUlibrary>(library_), name.c_str()), "the engine's code lacks a kernel; build it again");
    driver().check(driver().function(&function, kernel), "the kernel cannot be loaded");
    driver().check(driver().allow(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, wanted.shared), "too little shared memory");
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config = config_of(wanted, attributes, nullptr);
    config.numAttrs = 1; // the question is of clusters alone
    int count = 0;
    driver().check(driver().resident(&count, function, &config), "no count of resident clusters");
    kernels_[name] = function;
    return count;
}

void Module::launch(std::string const& name, ClusterLaunch const& wanted, void const* argument, CUstream_st* stream) const
{
    CUlaunchAttribute attributes[2];
    CUlaunchConfig const config = config_of(wanted, attributes, stream);
    void* parameter = const_cast<void*>(argument);
    driver().check(driver().launch_ex(&config, static_cast<CUfunction>(find(name)), &parameter, nullptr), "the kernel did not start");
}

void* Module::find(std::string const& name) const
{
    std::lock_guard<std::mutex> const guard(lock_);
    auto const found = kernels_.find(name);
    if (found == kernels_.end())
        throw std::runtime_error("the engine's code has no kernel " + name + "; build the engine again");
    return found->second;
}

int multiprocessors_here()
{
    CUdevice device = 0;
    driver().check(driver().device(&device), "no CUDA context");
    int count = 0;
    driver().check(driver().attribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device), "no count of multiprocessors");
    return count;
}
} // namespace onnxfuse
