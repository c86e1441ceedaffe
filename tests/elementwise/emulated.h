// Runs one launch of a generated kernel on the emulator.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "../../plugins/Elementwise/layout.h"

inline int run(char const* text, int64_t const* shapes, void const* const* in, void* const* out, int sms, char* said,
    std::function<void(onnxfuse::Launch const&)> const& start)
{
    try
    {
        onnxfuse::Layout const layout = onnxfuse::Layout::parse(text);
        std::vector<std::vector<int64_t>> given;
        for (onnxfuse::Layout::Operand const& input : layout.inputs)
        {
            given.emplace_back(shapes, shapes + input.axes.size());
            shapes += input.axes.size();
        }
        onnxfuse::Launch const launch = onnxfuse::plan(layout, layout.full_shape(given), in, out, sms);
        if (launch.grid > 0)
            start(launch);
        return 0;
    }
    catch (std::exception const& fault)
    {
        std::snprintf(said, 500, "%s", fault.what());
        return 1;
    }
}
