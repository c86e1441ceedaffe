// Checks that the two skip + norm plugins share.
#pragma once

#include "plugin.h"

namespace onnxfuse
{
// inputs: input, skip, then [width] tensors called `weights`; at least `least` inputs, and one for each name at most.
inline void check_norm(std::vector<Shape> const& inputs, size_t least, std::vector<char const*> const& weights)
{
    if (inputs.size() < least || inputs.size() > 2 + weights.size())
        refuse("%zu inputs; it takes %zu to %zu", inputs.size(), least, 2 + weights.size());
    check_rank("input", inputs[0], 1);
    check_same("skip", inputs[1], "input", inputs[0]);
    for (size_t i = 2; i < inputs.size(); ++i)
        check_per_column(weights[i - 2], inputs[i], inputs[0].last());
}
} // namespace onnxfuse
