#include "layout.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace onnxfuse
{
namespace
{
constexpr unsigned kThreads = 128; // kElementwiseThreads of kernel.cuh
constexpr int kMostRank = 8;
constexpr size_t kMostText = 4096;

[[noreturn]] void fail(std::string const& what)
{
    throw std::runtime_error(what);
}

std::vector<std::string> split(std::string const& text, char by)
{
    std::vector<std::string> parts{""};
    for (char const letter : text)
    {
        if (letter == by)
            parts.emplace_back();
        else
            parts.back() += letter;
    }
    return parts;
}

int number(std::string const& text, int low, int high)
{
    bool good = !text.empty() && text.size() <= 3;
    for (char const letter : text)
        good = good && letter >= '0' && letter <= '9';
    int const value = good ? std::stoi(text) : -1;
    if (value < low || value > high)
        fail("field 'layout' has a number that it cannot have; build the engine again");
    return value;
}

Layout::Operand operand(std::string const& text)
{
    if (text.empty() || !std::strchr("fhbil?", text[0]))
        fail("field 'layout' has an unknown element type; build the engine again");
    return {text[0], text.substr(1), false};
}

std::string shape_text(std::vector<int64_t> const& extents)
{
    std::string written;
    for (int64_t const extent : extents)
        written += (written.empty() ? "" : "x") + (extent < 0 ? std::string("?") : std::to_string(extent));
    return "[" + written + "]";
}

void append(std::vector<unsigned char>& bytes, void const* value, size_t size)
{
    auto const* const begin = static_cast<unsigned char const*>(value);
    bytes.insert(bytes.end(), begin, begin + size);
}

// Extent of kernel.cuh.
struct Divisor
{
    uint32_t size;
    uint32_t multiplier;
    uint32_t shift;
    uint32_t unused;
};

Divisor divisor(uint32_t size)
{
    uint32_t shift = 0;
    while (shift < 32 && (uint64_t{1} << shift) < size)
        ++shift;
    uint64_t const multiplier = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - size)) / size + 1;
    return {size, static_cast<uint32_t>(multiplier), shift, 0};
}
constexpr int64_t kHeldVectors = 4; // of kernel.cuh

// Where there are many rows: as few threads as hold the row, a part of a warp where that leaves fewer of them idle.
unsigned team_of_many(int64_t vectors)
{
    unsigned best = 0;
    int64_t least = INT64_MAX;
    for (unsigned threads = 8; threads <= 32; threads *= 2)
    {
        int64_t const steps = (vectors + threads - 1) / threads;
        if (steps <= kHeldVectors && steps * threads < least)
        {
            least = steps * threads;
            best = threads;
        }
    }
    if (best)
        return best;
    return 32 * static_cast<unsigned>(std::clamp<int64_t>((vectors + 32 * kHeldVectors - 1) / (32 * kHeldVectors), 1, 8));
}

// Where there are few: as many threads as a row has vectors.
unsigned team_of_few(int64_t vectors)
{
    return 32 * static_cast<unsigned>(std::clamp<int64_t>((vectors + 31) / 32, 1, 8));
}
} // namespace

int element_size(char type)
{
    switch (type)
    {
    case '?': return 1;
    case 'h':
    case 'b': return 2;
    case 'l': return 8;
    default: return 4;
    }
}

Layout Layout::parse(std::string const& text)
{
    if (text.size() > kMostText)
        fail("field 'layout' is too long; build the engine again");
    std::vector<std::string> const fields = split(text, ';');
    static char const* const kNames[] = {"name=", "rank=", "vector=", "each=", "end=", "groups=", "in=", "out="};
    if (fields.size() != 9 || fields[0] != "1")
        fail("field 'layout' is not of version 1; build the engine again with this version of onnxfuse");
    std::vector<std::string> values;
    for (size_t i = 0; i < 8; ++i)
    {
        if (fields[i + 1].compare(0, std::strlen(kNames[i]), kNames[i]) != 0)
            fail("field 'layout' lacks '" + std::string(kNames[i]) + "'; build the engine again");
        values.push_back(fields[i + 1].substr(std::strlen(kNames[i])));
    }
    Layout layout;
    layout.text = text;
    layout.name = values[0];
    if (layout.name.empty() || layout.name.size() > 64 || layout.name.find_first_not_of("0123456789abcdef") != std::string::npos)
        fail("field 'layout' has no name; build the engine again");
    layout.rank = number(values[1], 0, kMostRank);
    layout.vector = number(values[2], 1, 16);
    layout.each = number(values[3], 1, 8);
    static char const* const kEndings[] = {"none", "full", "kept", "dropped"};
    auto const* const ending = std::find(std::begin(kEndings), std::end(kEndings), values[4]);
    if (ending == std::end(kEndings))
        fail("field 'layout' has an unknown ending; build the engine again");
    layout.ending = static_cast<Ending>(ending - std::begin(kEndings));
    int axes = 0;
    for (std::string const& group : values[5].empty() ? std::vector<std::string>{} : split(values[5], ','))
    {
        layout.groups.push_back(number(group, 1, kMostRank));
        axes += layout.groups.back();
    }
    if (axes != layout.rank)
        fail("field 'layout' has groups that are not of its rank; build the engine again");
    for (std::string const& part : split(values[6], ','))
    {
        layout.inputs.push_back(operand(part));
        std::string const& flags = layout.inputs.back().axes;
        if (static_cast<int>(flags.size()) > layout.rank || flags.find_first_not_of("01") != std::string::npos)
            fail("field 'layout' has an input with other axes; build the engine again");
    }
    for (std::string const& part : split(values[7], ','))
    {
        Operand output = operand(part);
        output.reduced = output.axes == "r";
        if (output.axes != "e" && (output.axes != "r" || layout.ending == Ending::kNone))
            fail("field 'layout' has an output of unknown shape; build the engine again");
        layout.outputs.push_back(output);
    }
    if (layout.ending != Ending::kNone && (layout.rank == 0 || layout.groups.back() != 1))
        fail("field 'layout' reduces no last axis; build the engine again");
    for (int axis = 0; axis < layout.rank; ++axis)
        layout.source(axis);
    return layout;
}

Layout::Source Layout::source(int axis) const
{
    for (size_t i = 0; i < inputs.size(); ++i)
    {
        int const own = axis - (rank - static_cast<int>(inputs[i].axes.size()));
        if (own >= 0 && inputs[i].axes[own] == '1')
            return {static_cast<int>(i), own};
    }
    fail("field 'layout' has an axis that no input has; build the engine again");
}

std::vector<int64_t> Layout::full_shape(std::vector<std::vector<int64_t>> const& shapes) const
{
    if (shapes.size() != inputs.size())
        fail(std::to_string(shapes.size()) + " inputs; it takes " + std::to_string(inputs.size()));
    for (size_t i = 0; i < shapes.size(); ++i)
    {
        if (shapes[i].size() != inputs[i].axes.size())
        {
            fail("input " + std::to_string(i) + " " + shape_text(shapes[i]) + " has rank " + std::to_string(shapes[i].size())
                + "; it must be " + std::to_string(inputs[i].axes.size()));
        }
    }
    std::vector<int64_t> full(rank, -1);
    for (size_t i = 0; i < shapes.size(); ++i)
    {
        for (size_t own = 0; own < shapes[i].size(); ++own)
        {
            int64_t& wanted = full[rank - shapes[i].size() + own];
            if (inputs[i].axes[own] == '1' && wanted < 0)
                wanted = shapes[i][own];
        }
    }
    for (size_t i = 0; i < shapes.size(); ++i)
    {
        for (size_t own = 0; own < shapes[i].size(); ++own)
        {
            int64_t const wanted = inputs[i].axes[own] == '1' ? full[rank - shapes[i].size() + own] : 1;
            if (shapes[i][own] >= 0 && wanted >= 0 && shapes[i][own] != wanted)
            {
                fail("input " + std::to_string(i) + " " + shape_text(shapes[i]) + " does not fit the shape " + shape_text(full)
                    + " with axes " + inputs[i].axes + "; optimize the model again for these shapes");
            }
        }
    }
    return full;
}

Launch plan(Layout const& layout, std::vector<int64_t> const& shape, void const* const* inputs, void* const* outputs, int sms)
{
    Launch launch;
    int64_t count = 1;
    for (int64_t const extent : shape)
    {
        if (extent < 0 || (extent > 0 && count > INT32_MAX / extent))
            fail("the shape " + shape_text(shape) + " has 2^31 elements or more; leave this node to TensorRT");
        count *= extent;
    }
    std::vector<int64_t> groups;
    for (size_t g = 0, axis = 0; g < layout.groups.size(); ++g)
    {
        int64_t size = 1;
        for (int i = 0; i < layout.groups[g]; ++i)
            size *= shape[axis++];
        groups.push_back(size);
    }
    if (groups.empty())
        groups.push_back(1);

    // A vector is aligned as the smaller of 16 bytes and itself.
    bool aligned = true;
    auto check = [&](void const* pointer, Layout::Operand const& operand) {
        size_t const bytes = std::min<size_t>(16, static_cast<size_t>(layout.vector) * element_size(operand.type));
        aligned = aligned && reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
    };
    for (size_t i = 0; i < layout.inputs.size(); ++i)
    {
        if (layout.inputs[i].axes.find('1') != std::string::npos)
            check(inputs[i], layout.inputs[i]);
    }
    for (size_t i = 0; i < layout.outputs.size(); ++i)
    {
        if (!layout.outputs[i].reduced || layout.ending == Ending::kFull)
            check(outputs[i], layout.outputs[i]);
    }

    bool const row_end = layout.ending != Ending::kNone;
    int64_t const inner = groups.back();
    bool const fits = inner % layout.vector == 0;
    char const* way = "single";
    if (aligned && (fits || (layout.groups.size() <= 1 && !row_end)))
        way = "whole";
    else if (aligned && !row_end)
        way = "ragged";
    launch.kernel = "elementwise_" + layout.name + "_" + way;
    int64_t const vector = way[0] == 's' ? 1 : layout.vector;
    int64_t const vectors = (count + vector - 1) / vector;

    uint32_t each = 1, rows = 0, width = 0;
    if (row_end)
    {
        // A mean or a sum of nothing still has its rows.
        int64_t all = 1;
        for (size_t i = 0; i + 1 < shape.size(); ++i)
            all *= shape[i];
        rows = static_cast<uint32_t>(all);
        width = static_cast<uint32_t>(inner);
        int64_t const of_row = (inner + vector - 1) / vector;
        unsigned const team = all > int64_t{8} * sms ? team_of_many(of_row) : team_of_few(of_row);
        launch.block_x = team;
        if (team <= 32)
        {
            // Whole warps, and several blocks for every multiprocessor.
            unsigned const of_warp = 32 / team;
            unsigned const wanted = static_cast<unsigned>(std::clamp<int64_t>(all / (int64_t{4} * sms), 1, kThreads / team));
            launch.block_y = std::max(of_warp, wanted / of_warp * of_warp);
        }
        launch.grid = static_cast<unsigned>((all + launch.block_y - 1) / launch.block_y);
    }
    else
    {
        // Short blocks, as many as it takes; two vectors a thread once that still leaves every multiprocessor several blocks.
        each = vectors > int64_t{kThreads} * layout.each * 16 * sms ? layout.each : 1;
        int64_t const covered = int64_t{kThreads} * each;
        launch.block_x = kThreads;
        launch.grid = static_cast<unsigned>((vectors + covered - 1) / covered);
    }

    for (size_t i = 0; i < layout.inputs.size(); ++i)
        append(launch.arguments, &inputs[i], sizeof inputs[i]);
    for (size_t i = 0; i < layout.outputs.size(); ++i)
        append(launch.arguments, &outputs[i], sizeof outputs[i]);
    for (int64_t const size : groups)
    {
        Divisor const by = divisor(static_cast<uint32_t>(std::max<int64_t>(size, 1)));
        append(launch.arguments, &by, sizeof by);
    }
    uint32_t const last[4] = {static_cast<uint32_t>(count), each, rows, width};
    append(launch.arguments, last, sizeof last);
    return launch;
}
} // namespace onnxfuse
