#include "driver.h"

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

std::mutex modules_lock;

std::map<std::string, std::weak_ptr<Module>>& modules()
{
    // Never destroyed: engines may outlive the static objects of this library.
    static auto* const all = new std::map<std::string, std::weak_ptr<Module>>;
    return *all;
}
} // namespace

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
    void* kernel = nullptr;
    {
        std::lock_guard<std::mutex> const guard(lock_);
        auto const found = kernels_.find(wanted.kernel);
        if (found == kernels_.end())
            throw std::runtime_error("the engine's code has no kernel " + wanted.kernel + "; build the engine again");
        kernel = found->second;
    }
    // A CUkernel may stand for a CUfunction; the driver then takes the one of the current context.
    void* parameter = const_cast<unsigned char*>(wanted.arguments.data());
    driver().check(driver().launch(static_cast<CUfunction>(kernel), wanted.grid, 1, 1, wanted.block_x, wanted.block_y, 1, 0, stream,
                       &parameter, nullptr),
        "the kernel did not start");
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
