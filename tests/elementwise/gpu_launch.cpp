// The plugin's own launcher as C functions, so that generated kernels run on a GPU without TensorRT.
#include <cstdio>
#include <exception>

#include "Elementwise/driver.h"
#include "Elementwise/layout.h"

using namespace onnxfuse;

namespace
{
struct Loaded
{
    Layout layout;
    std::shared_ptr<Module> module;
    int sms;
};

template <typename Act>
int said_status(char* said, Act act)
{
    try
    {
        act();
        return 0;
    }
    catch (std::exception const& fault)
    {
        std::snprintf(said, 500, "%s", fault.what());
        return 1;
    }
}
} // namespace

extern "C" int elementwise_load(char const* layout, char const* code, size_t size, void** loaded, char* said)
{
    return said_status(said, [&] {
        Layout const parsed = Layout::parse(layout);
        auto module = Module::of(std::string(code, size));
        module->prepare(parsed);
        *loaded = new Loaded{parsed, module, multiprocessors_here()};
    });
}

// shapes: of all inputs, one after another.
extern "C" int elementwise_launch(void* loaded, int64_t const* shapes, void const* const* in, void* const* out, void* stream, char* said)
{
    return said_status(said, [&] {
        Loaded const& known = *static_cast<Loaded*>(loaded);
        std::vector<std::vector<int64_t>> given;
        for (Layout::Operand const& input : known.layout.inputs)
        {
            given.emplace_back(shapes, shapes + input.axes.size());
            shapes += input.axes.size();
        }
        Launch const launch = plan(known.layout, known.layout.full_shape(given), in, out, known.sms);
        if (launch.grid > 0)
            known.module->launch(launch, static_cast<CUstream_st*>(stream));
    });
}
