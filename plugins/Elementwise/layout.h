// What a launcher knows of an expression, and what it makes of it for given shapes: plain host code, so that it is tested without a GPU.
//
// Text form, version 1: fields with a semicolon between them, as onnxfuse/elementwise/source.py writes them:
//
//   1;name=c158de5cc058;rank=4;vector=4;each=2;end=none;groups=1,1,2;in=h1111,h0100,f;out=fe,?e
//
// name: of the kernels, elementwise_NAME_whole and so on. rank: of the full shape. vector: elements that a thread takes at once; each: vectors
// of a thread, at most. end: what the expression ends in: none, or a reduction over the last axis whose result has the full shape (full), a
// last axis of 1 (kept) or none (dropped); full also where steps follow the reduction, and then no output is its own. groups: how many neighbouring axes are one. in: element type (f float32, h float16, b bfloat16,
// i int32, l int64, ? bool) and a letter for each axis, counted from the last, 1 where it has the full shape's length and 0 where it has
// length 1. out: element type, and e for the full shape or r for the reduction's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace onnxfuse
{
enum class Ending
{
    kNone,
    kFull,
    kKept,
    kDropped
};

struct Layout
{
    struct Operand
    {
        char type;        // f, h, b, i, l or ?
        std::string axes; // of an input
        bool reduced = false;
    };

    std::string text;
    std::string name;
    int rank = 0;
    int vector = 1;
    int each = 1;
    Ending ending = Ending::kNone;
    std::vector<int> groups;
    std::vector<Operand> inputs;
    std::vector<Operand> outputs;

    // Throws std::runtime_error for anything that is not of the form above.
    static Layout parse(std::string const& text);

    // The input (and its axis) that has the full shape's length at `axis`.
    struct Source
    {
        int input;
        int axis;
    };
    Source source(int axis) const;

    // The full shape. Throws where an input has another rank, or a length that is neither the full shape's nor the 1 that is broadcast.
    std::vector<int64_t> full_shape(std::vector<std::vector<int64_t>> const& inputs) const;
};

int element_size(char type);

// One launch. arguments: the bytes of the kernel's parameter.
struct Launch
{
    std::string kernel;
    unsigned grid = 0;
    unsigned block_x = 0;
    unsigned block_y = 1;
    std::vector<unsigned char> arguments;
};

// The launch for a full shape and these pointers, on a GPU of `sms` multiprocessors. A grid of 0 where there is nothing to compute. Throws
// where the shape has 2^31 elements or more.
Launch plan(Layout const& layout, std::vector<int64_t> const& shape, void const* const* inputs, void* const* outputs, int sms);
} // namespace onnxfuse
