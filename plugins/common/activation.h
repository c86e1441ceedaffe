// Activations as the launchers take them.
#pragma once

namespace onnxfuse
{
enum class Activation : int
{
    kNone = 0,
    kRelu = 1,
    kSilu = 2,      // z * sigmoid(z)
    kGelu = 3,      // erf
    kGeluTanh = 4,
    kGeluQuick = 5  // z * sigmoid(1.702 z)
};
} // namespace onnxfuse
